// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"math/big"
	"regexp"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	oneCPUBusy    = 0.95 // of its time: nothing is left
	oneCPUSoftirq = 0.60 // of its time is packets: that is what it does
	oneCPUNear    = 0.80 // busy, from which it is worth advice
	oneCPUSkew    = 2.0  // times as much softirq as all the others on average
	manyPackets   = 1000 // packets a second of one processor, below which it is not about packets
)

var softirqOneCPU = Cause{
	Code:     "softirq-one-cpu",
	Title:    "One CPU processes nearly all packets",
	Headline: "One CPU core at 100 % softirq (ksoftirqd), the others idle",
	Search: []string{
		"ksoftirqd/0 100%",
		"top: 100.0 si",
		"NET_RX softirq high on one CPU",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Explains:      []string{"cpu-backlog-full", "napi-budget", "nic-ring-full", "softirq-delayed"},
	Needs:         []string{snapshot.CanCPUs, snapshot.CanNICs, snapshot.CanInterfaces},
	Symptom:       "Throughput stops at what one core can do. top shows one core at 100 % si and the others idle. Latency grows with the load.",
	Proof:         fmt.Sprintf("One CPU was busy for %s of the window and spent %s of it in softirq, at least %.0f times as much as the others on average, with %d packets a second or more: a warning. It is critical if packets were also lost (CPU backlog, receive ring). From %s busy it is advice. CPUs belong to the machine: in a namespace other than the initial one natkit reports it only if two thirds of the machine's packets belong to that namespace.", percent.Whole(oneCPUBusy), percent.Whole(oneCPUSoftirq), oneCPUSkew, manyPackets, percent.Whole(oneCPUNear)),
	FalsePositive: "All CPUs equally busy: the machine is at its limit. A CPU that is busy with programs. A machine with one CPU.",
	Cure:          "Use more receive queues if the card has them, and spread its interrupts (irqbalance). Otherwise use RPS, which distributes packets to CPUs by flow. A single flow always stays on one CPU: only cheaper packets help it, as in softirq-all-cpus.",
	Host:          true,
	NoLab:         "CPUs belong to the whole machine: a lab that saturates one takes it from everything else there. It was reproduced, and found, in a virtual machine with two CPUs (Linux 6.12)",
	judge:         judgeOneCPU,
}

func judgeOneCPU(f facts) *verdict {
	if len(f.CPUs) < 2 || !f.ownsCPUs() {
		return nil
	}
	var hot snapshot.CPU
	sum := 0.0
	for _, c := range f.CPUs {
		if !plausibleShare(c.Busy) || !plausibleShare(c.Softirq) {
			return nil
		}
		sum += c.Softirq
		if c.Softirq > hot.Softirq {
			hot = c
		}
	}
	others := (sum - hot.Softirq) / float64(len(f.CPUs)-1)
	if hot.Busy < oneCPUNear || hot.Softirq < oneCPUSoftirq || hot.Softirq < oneCPUSkew*others || f.perSecond(hot.Packets) < manyPackets || hot.Packets >= implausible {
		return nil
	}
	lost := hot.BacklogDropped
	for _, l := range f.links() {
		lost = saturate(lost, l.RxMissed)
	}
	v := &verdict{impact: hot.Softirq}
	switch {
	case hot.Busy >= oneCPUBusy && lost > 0 && lost < implausible:
		v.Severity = Critical
		v.impact = float64(lost)
	case hot.Busy >= oneCPUBusy:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Title = fmt.Sprintf("CPU %d is %s busy and processes nearly all packets; the other %d spend %s on them", hot.Number, percent.Whole(hot.Busy), len(f.CPUs)-1, percent.Whole(others))
	v.Evidence = []Evidence{
		{fmt.Sprintf("CPU %d", hot.Number), fmt.Sprintf("%s busy, %s in softirq, %.0f packets a second", percent.Whole(hot.Busy), percent.Whole(hot.Softirq), f.perSecond(hot.Packets)), fromCPUs},
		{"softirq of the others, on average", percent.Whole(others), fromCPUs},
	}
	if hot.Squeezed > 0 && hot.Squeezed < implausible {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("rounds that CPU %d ended with work left", hot.Number), strconv.FormatUint(hot.Squeezed, 10), fromSoftnet})
	}
	if lost > 0 && lost < implausible {
		v.Evidence = append(v.Evidence, Evidence{"packets lost because of it, in its backlog or the card's ring", strconv.FormatUint(lost, 10), fromSoftnet + ", " + fromLinks})
	}
	v.Why = "One CPU serves a receive queue, and forwards, translates and filters its packets there. When it has no time left packets wait, and are lost when their queue is full, even if the other CPUs are idle."
	v.Remedy, v.Settings = f.spreadPackets(hot.Number, &v.Evidence)
	v.Remedy = append(v.Remedy, f.cheaperPackets()...)
	if v.Severity < Warning {
		for i := range v.Settings {
			v.Settings[i].If = cmp.Or(v.Settings[i].If, "programs on the other CPUs may have to wait")
		}
	}
	v.Verify = f.look("cat /proc/net/softnet_stat")
	return v
}

// spreadPackets are the commands that let more processors receive, for the
// busiest interface.
func (f facts) spreadPackets(hot int, evidence *[]Evidence) (remedy []string, settings []snapshot.Setting) {
	var worst snapshot.Interface
	for _, l := range f.links() {
		if l.NIC != nil && l.RxPackets > worst.RxPackets && l.RxPackets < implausible {
			worst = l
		}
	}
	if worst.NIC == nil {
		return []string{"# find the interface that receives the most, then spread its queues (ethtool -L) or its packets (RPS):", f.run("ip -s link"), f.sysfs("grep . /sys/class/net/*/queues/rx-*/rps_cpus")}, nil
	}
	nic, dev := *worst.NIC, quote(worst.Name)
	*evidence = append(*evidence, Evidence{"receive queues of " + worst.Name, fmt.Sprintf("%d, %d of them spread by RPS", nic.RxQueues, nic.RPSQueues), fromDrivers})
	if nic.ChannelsMax > nic.Channels && nic.ChannelsMax < 1<<16 {
		*evidence = append(*evidence, Evidence{"queues that the card can have", strconv.FormatUint(uint64(nic.ChannelsMax), 10), fromDrivers})
		queues := min(int(nic.ChannelsMax), len(f.CPUs))
		settings = append(settings, provided(f.device(worst.Name, "combined_channels", strconv.Itoa(queues)), linkMayGo))
		remedy = append(remedy, "# use the card's queues, one for each CPU:", f.run(fmt.Sprintf("ethtool -L %s combined %d", dev, queues)))
	}
	if nic.RxQueues > 1 {
		remedy = append(remedy, "# the card has several queues: see which CPU each of them interrupts, and spread them, best with irqbalance:",
			interruptsOf(worst.Name))
	}
	if nic.RPSQueues < max(nic.RxQueues, 1) {
		settings = append(settings, f.device(worst.Name, "rps_cpus", cpuMask(f.CPUs, hot)))
		remedy = append(remedy, "# distribute packets to the other CPUs by flow (RPS):",
			f.sysfs(fmt.Sprintf(`for q in /sys/class/net/%s/queues/rx-*/rps_cpus; do echo %s > "$q"; done`, dev, cpuMask(f.CPUs, hot))))
	}
	if len(remedy) == 0 {
		remedy = []string{"# packets are already distributed by flow, so one flow may be most of the load; find it:", f.natkit("conntrack top")}
	}
	return remedy, settings
}

// interruptsOf shows which CPUs the queues of a card interrupt.
func interruptsOf(name string) string {
	return "grep -E " + quote("CPU|"+regexp.QuoteMeta(name)) + " /proc/interrupts"
}

// cpuMask is all processors but one, as rps_cpus takes it: hexadecimal, in words
// of 32 bits with commas between.
func cpuMask(cpus []snapshot.CPU, but int) string {
	mask := new(big.Int)
	for _, c := range cpus {
		if c.Number >= 0 && c.Number < 1<<16 && c.Number != but {
			mask.SetBit(mask, c.Number, 1)
		}
	}
	text := mask.Text(16)
	for i := len(text) - 8; i > 0; i -= 8 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// ownsCPUs says whether what the machine's processors do with packets is this
// namespace's affair: it is the initial one, or two thirds of the packets are its
// own. A gateway between two other namespaces has half of them.
func (f facts) ownsCPUs() bool {
	if f.Netns.Init {
		return true
	}
	var all, here uint64
	for _, c := range f.CPUs {
		if c.Packets < implausible {
			all = saturate(all, c.Packets)
		}
	}
	for _, l := range f.links() {
		if l.RxPackets < implausible {
			here = saturate(here, l.RxPackets)
		}
	}
	return all > 0 && here/2 >= all/3
}

// plausibleShare is false for what no share of a time can be, NaN included.
func plausibleShare(x float64) bool { return x >= 0 && x <= 1.001 }
