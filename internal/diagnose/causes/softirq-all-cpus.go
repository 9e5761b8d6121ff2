// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"math"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

var softirqAllCPUs = Cause{
	Code:     "softirq-all-cpus",
	Title:    "All CPUs are busy with forwarding",
	Headline: "All CPU cores busy in softirq: the router is at its packet rate limit",
	Search: []string{
		"ksoftirqd high CPU all cores",
		"top: si",
		"nf_conntrack_in high CPU",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Explains:      []string{"cpu-backlog-full", "napi-budget", "nic-ring-full", "softirq-delayed"},
	Needs:         []string{snapshot.CanCPUs, snapshot.CanCounters, snapshot.CanInterfaces, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "Throughput stops rising, however many CPUs share the work. top shows high si on all of them. Latency grows with the load.",
	Proof:         fmt.Sprintf("On average over all CPUs at least %s of the window was busy and %s of it in softirq, no CPU exceeds the others by a factor of %.0f, and each forwarded at least %d packets a second: a warning. It is critical if packets were also lost. From %s busy it is advice. CPUs belong to the machine: in a namespace other than the initial one natkit reports it only if two thirds of the machine's packets belong to that namespace.", percent.Whole(oneCPUBusy), percent.Whole(oneCPUSoftirq), oneCPUSkew, manyPackets, percent.Whole(oneCPUNear)),
	FalsePositive: "One CPU that processes all packets is softirq-one-cpu. A server that is busy with its own packets forwards none.",
	Cure:          "Make packets cheaper, since no CPU is idle. First remove needless work (`natkit tune`, `natkit hooks --cost`). Then use fast-path entries for the kernel's NAT (`natkit accel`), or the eBPF engine in its place if the rules are your own. The finding reports which fits, who manages the rules, and what packets would bypass.",
	Host:          true,
	NoLab:         "it takes all CPUs from everything else on the machine",
	judge:         judgeAllCPUs,
}

func judgeAllCPUs(f facts) *verdict {
	forwarded, known := f.counter("Ip.ForwDatagrams")
	if len(f.CPUs) == 0 || !known || !f.ownsCPUs() {
		return nil
	}
	var busy, softirq, most float64
	var lost uint64
	for _, c := range f.CPUs {
		if !plausibleShare(c.Busy) || !plausibleShare(c.Softirq) {
			return nil
		}
		busy, softirq, most = busy+c.Busy, softirq+c.Softirq, math.Max(most, c.Softirq)
		lost = saturate(lost, c.BacklogDropped)
	}
	n := float64(len(f.CPUs))
	others := (softirq - most) / math.Max(n-1, 1)
	busy, softirq = busy/n, softirq/n
	rate := f.perSecond(forwarded)
	if busy < oneCPUNear || softirq < oneCPUSoftirq || n > 1 && most >= oneCPUSkew*others || rate < manyPackets*n {
		return nil
	}
	for _, l := range f.links() {
		lost = saturate(lost, l.RxMissed)
	}
	v := &verdict{impact: softirq}
	switch {
	case busy >= oneCPUBusy && lost > 0 && lost < implausible:
		v.Severity = Critical
		v.impact = float64(lost)
	case busy >= oneCPUBusy:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	v.Title = fmt.Sprintf("%s %s busy, %s of it in softirq; %.0f packets a second forwarded", allOf(len(f.CPUs)), percent.Whole(busy), percent.Whole(softirq/busy), rate)
	v.Evidence = []Evidence{
		{"CPUs, on average", fmt.Sprintf("%s busy, %s in softirq", percent.Whole(busy), percent.Whole(softirq)), fromCPUs},
		{"packets forwarded", fmt.Sprintf("%.0f a second", rate), fromSnmp},
		{"softirq time per forwarded packet", fmt.Sprintf("%.0f ns", 1e9*softirq*n/rate), fromCPUs + ", " + fromSnmp},
	}
	if lost > 0 && lost < implausible {
		v.Evidence = append(v.Evidence, Evidence{"packets lost because of it, in a backlog or a card's ring", strconv.FormatUint(lost, 10), fromSoftnet + ", " + fromLinks})
	}
	v.Why = "Forwarding, NAT and filtering run in softirq, packet by packet. When no CPU has time left, packets wait and are lost; only cheaper or fewer packets help."
	v.Remedy = f.cheaperPackets()
	v.Verify = f.look("cat /proc/net/softnet_stat")
	return v
}

// allOf is the processors as the subject of a sentence.
func allOf(n int) string {
	if n == 1 {
		return "the only CPU is"
	}
	return fmt.Sprintf("all %d CPUs are", n)
}
