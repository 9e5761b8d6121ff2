// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	backlogFew   = 5
	backlogShare = 0.001 // of the packets that the processor took: a warning
	backlogMost  = 0.01  // critical
	// backlogRoom is a queue that holds a burst of some ten milliseconds.
	backlogRoom = 16384

	// backlogMostRoom is a second of packets at the pace of a fast CPU: what waits longer is late anyway.
	backlogMostRoom = 1 << 20
)

var cpuBacklogFull = Cause{
	Code:     "cpu-backlog-full",
	Title:    "A CPU's backlog of received packets overflows",
	Headline: "softnet_stat dropped: the CPU backlog (netdev_max_backlog) is full",
	Search: []string{
		"/proc/net/softnet_stat second column",
		"net.core.netdev_max_backlog",
		"reason: CPU_BACKLOG",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(backlogFew, "packets for which the CPU's queue had no room"), portion(backlogShare, "of the packets that it received")},
	Needs:         []string{snapshot.CanCPUs, snapshot.CanDrops, snapshot.CanSysctls},
	Symptom:       "Bursts lose packets, mostly on virtual interfaces (containers, tunnels) and with RPS. Nothing else shows a drop.",
	Proof:         fmt.Sprintf("Packets found a CPU's backlog full (second column of /proc/net/softnet_stat, CPU_BACKLOG), at least %s of the packets that it received: a warning, from %s critical. In a namespace other than the initial one only drops of its own packets count, as the tracer saw them. Cards with NAPI do not use this queue; veth, tunnels and RPS do.", "0.1 %", percent.Whole(backlogMost)),
	FalsePositive: "A few drops in a burst beside millions of packets. Totals since boot, however large.",
	Cure:          "A longer queue, net.core.netdev_max_backlog, absorbs bursts. If a CPU has no time left, a longer queue only delays packets: other CPUs must help (softirq-one-cpu).",
	Host:          true,
	NoLab:         "each CPU has one queue for all namespaces, and the host sets its length: a lab would lose everybody's packets. It was reproduced, and found from the host and from the namespace that lost packets, in a virtual machine (Linux 6.12)",
	judge:         judgeBacklog,
}

func judgeBacklog(f facts) *verdict {
	traced, rows, _ := f.dropped(snapshot.CauseBacklog)
	var counted, taken uint64
	var worst snapshot.CPU
	for _, c := range f.CPUs {
		if c.BacklogDropped >= implausible || c.Packets >= implausible {
			continue
		}
		counted, taken = saturate(counted, c.BacklogDropped), saturate(taken, c.Packets)
		if c.BacklogDropped > worst.BacklogDropped {
			worst = c
		}
	}
	lost := traced
	if f.Netns.Init {
		lost = max(traced, counted)
	}
	if lost < f.few(backlogFew) {
		return nil
	}
	part := share(lost, saturate(lost, taken))
	if worst.BacklogDropped > 0 {
		part = max(part, share(worst.BacklogDropped, saturate(worst.BacklogDropped, worst.Packets)))
	}
	v := &verdict{impact: float64(lost)}
	switch {
	case taken > 0 && part < f.part(backlogShare):
		v.Severity = Advice
	case taken > 0 && part >= backlogMost:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s lost %s: a CPU's backlog of received packets was full", number(lost, "packet"), f.window())
	if counted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped because a queue was full, on the whole machine", strconv.FormatUint(counted, 10), fromSoftnet},
			Evidence{fmt.Sprintf("of them on CPU %d", worst.Number), fmt.Sprintf("%d, of %d that it received", worst.BacklogDropped, worst.Packets), fromSoftnet})
	}
	if traced > 0 {
		v.Evidence = append(v.Evidence, Evidence{"packets dropped with reason CPU_BACKLOG", strconv.FormatUint(traced, 10) + cameInBy(rows), fromTracer})
	}
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	room, known := f.sysctl("net.core.netdev_max_backlog")
	if known {
		v.Evidence = append(v.Evidence, Evidence{"net.core.netdev_max_backlog", strconv.FormatInt(room, 10), fromSettings})
	}
	v.Why = "Packets of an interface without a receive ring wait in a CPU's queue. If it is full they are lost, before any rule, IP counter or capture at the next hop sees them."
	f.lengthenBacklog(v, room, known)
	if worst.Busy >= oneCPUBusy {
		v.Remedy = append(v.Remedy, fmt.Sprintf("# CPU %d has no time left, so the queue fills whatever its length: let other CPUs help, see the cause softirq-one-cpu", worst.Number))
	}
	v.Verify = f.look("cat /proc/net/softnet_stat")
	return v
}

// lengthenBacklog is the cure by a longer queue than there is, where one helps.
func (f facts) lengthenBacklog(v *verdict, room int64, known bool) {
	want := uint64(backlogRoom)
	if known && room >= backlogRoom {
		want = 4 * uint64(min(room, backlogMostRoom/4))
	}
	s := snapshot.Setting{Name: "net.core.netdev_max_backlog", Value: strconv.FormatUint(want, 10)} // the host's
	if f.enough(s) {
		v.Remedy = []string{"# a longer queue would only add delay: let other CPUs help, see the cause softirq-one-cpu"}
		return
	}
	v.Settings = []snapshot.Setting{s}
	v.Remedy = []string{"# a longer queue, on the host; it uses memory only while packets wait:", f.set(s)}
}
