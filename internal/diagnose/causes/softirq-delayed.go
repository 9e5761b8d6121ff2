// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	delayShare = 0.20  // of the window ksoftirqd waited: worth advice
	delayMost  = 0.50  // a warning
	delayMean  = 0.004 // seconds it waited each time; a turn of another program is 3 to 4 ms
	delayRuns  = 5.0   // a second, below which nobody notices
)

var softirqDelayed = Cause{
	Code:     "softirq-delayed",
	Title:    "Packets wait for a CPU that runs other work",
	Headline: "Latency spikes on a Linux router: ksoftirqd waits for the CPU",
	Search: []string{
		"ksoftirqd latency spikes",
		"/proc/PID/schedstat of ksoftirqd",
	},
	Severities:    []Severity{Advice, Warning},
	Thresholds:    []Threshold{portion(delayShare, "of the window that ksoftirqd waited")},
	Needs:         []string{snapshot.CanSoftirqWait, snapshot.CanCPUs},
	Symptom:       "The latency of forwarded packets jumps by a few to a hundred milliseconds while the machine also runs programs. No packet is lost.",
	Proof:         fmt.Sprintf("ksoftirqd, which processes what a softirq leaves undone, was ready and waited for its CPU for %s of the window and %.0f ms each time on average: advice, from %s a warning if that CPU took %d packets a second. Before Linux 6.4 no packet of that CPU is processed during the wait. Since then an interrupt may process some, and only left-over work waits. natkit does not see softirqs delayed within the kernel (interrupts or softirqs disabled for long).", percent.Whole(delayShare), delayMean*1000, percent.Whole(delayMost), manyPackets),
	FalsePositive: "Short waits on every machine that runs programs. A CPU that spends all its time on packets.",
	Cure:          "Move programs away from the receiving CPUs (taskset, cpuset, AllowedCPUs= of their service), or move the card's interrupts. Or use threaded NAPI, whose threads can have a priority.",
	Host:          true,
	NoLab:         "it takes programs that compete for the machine's CPUs, which everything else there would notice. It was reproduced, and found, in a virtual machine with three busy loops beside the traffic (Linux 6.12)",
	judge:         judgeDelayed,
}

func judgeDelayed(f facts) *verdict {
	if !f.ownsCPUs() || !(f.WindowSeconds > 0) {
		return nil
	}
	var worst snapshot.CPU
	var wait, runs, part float64
	for _, c := range f.CPUs {
		if c.KsoftirqdWait == nil || c.KsoftirqdRuns == nil || *c.KsoftirqdRuns >= implausible || c.Packets >= implausible {
			continue
		}
		w, n := *c.KsoftirqdWait, float64(*c.KsoftirqdRuns)
		p := w / f.WindowSeconds
		// In softirq for most of its time it waits for itself.
		if !plausibleShare(p) || c.Softirq >= oneCPUSoftirq || n < delayRuns*f.WindowSeconds || w/max(n, 1) < delayMean || p <= part {
			continue
		}
		worst, wait, runs, part = c, w, n, p
	}
	if part < f.part(delayShare) {
		return nil
	}
	v := &verdict{impact: part}
	v.Severity = Advice
	if part >= delayMost && f.perSecond(worst.Packets) >= manyPackets {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("packets waited for CPU %d, busy with other work: %.0f ms at a time, %s of the window", worst.Number, 1000*wait/runs, percent.Whole(part))
	v.Evidence = []Evidence{
		{fmt.Sprintf("ksoftirqd/%d was ready and waited", worst.Number), fmt.Sprintf("%.1f s in all, %.0f times", wait, runs), "/proc/PID/schedstat"},
		{fmt.Sprintf("CPU %d", worst.Number), fmt.Sprintf("%s busy, %s in softirq, %.0f packets a second", percent.Whole(worst.Busy), percent.Whole(worst.Softirq), f.perSecond(worst.Packets)), fromCPUs},
	}
	if worst.Steal > 0.01 && plausibleShare(worst.Steal) {
		v.Evidence = append(v.Evidence, Evidence{"time taken by the hypervisor (steal)", percent.Whole(worst.Steal), fromCPUs})
	}
	v.Why = "What a softirq cannot finish at once is left to ksoftirqd, a thread with the same priority as any program. While a program runs on that CPU, packets wait."
	v.Remedy = []string{
		fmt.Sprintf("# what runs on CPU %d; move the programs that use it most (taskset -p, or AllowedCPUs= of their service):", worst.Number),
		"ps -eo psr,pcpu,pid,comm --sort=-pcpu | awk " + quote("NR==1 || $1=="+strconv.Itoa(worst.Number)) + " | head",
	}
	for _, l := range f.links() {
		if l.NIC != nil && l.Kind == "device" && !l.NIC.Threaded {
			v.Settings = []snapshot.Setting{provided(f.device(l.Name, "threaded", "1"), "its threads then get a priority or CPUs of their own")}
			v.Remedy = append(v.Remedy, "# or receive in separate threads, which can have a priority (chrt -f -p 50 PID):",
				f.sysfs("echo 1 > /sys/class/net/"+quote(l.Name)+"/threaded"))
			break
		}
	}
	v.Verify = f.look(fmt.Sprintf("cat /proc/$(pgrep -x ksoftirqd/%d)/schedstat", worst.Number))
	return v
}
