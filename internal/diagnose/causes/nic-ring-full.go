// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	ringFew   = 10
	ringShare = 0.0001 // of what the interface received: a warning
	ringMost  = 0.01   // critical
)

var nicRingFull = Cause{
	Code:     "nic-ring-full",
	Title:    "A network card loses packets before the kernel sees them",
	Headline: "rx_missed_errors rising: the NIC drops packets before the kernel sees them",
	Search: []string{
		"rx_missed_errors",
		"rx_fifo_errors",
		"ethtool -S: rx_no_buffer_count",
		"ethtool -S: rx_missed",
		"ethtool -S: bw_in_allowance_exceeded",
		"ethtool -S: conntrack_allowance_exceeded",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(ringFew, "packets for which the card had no room"), portion(ringShare, "of what the interface received")},
	Needs:         []string{snapshot.CanInterfaces, snapshot.CanNICs, snapshot.CanCPUs},
	Symptom:       "Packet loss under load or in bursts that no IP counter, no rule and no capture shows.",
	Proof:         fmt.Sprintf("The card had no room for received packets (missed, FIFO and overrun errors of the interface, the driver's own counters such as rx_missed and rx_no_buffer), at least %s of what the interface received: a warning, from %s critical. The kernel never had these packets, so the tracer does not see them. Limits of a cloud are reported apart: *_allowance_exceeded of Amazon's driver.", "0.01 %", percent.Whole(ringMost)),
	FalsePositive: "A few packets lost while an interface came up; packets that an XDP program drops; totals since boot.",
	Cure:          "Use a longer receive ring if the card has one (ethtool -G), or more CPUs to empty it if the current one has no time left. Network limits of a cloud rise only with another instance type.",
	NoLab:         "it needs a network card: virtual interfaces have no ring to overflow. It is covered by saved snapshots",
	judge:         judgeRing,
}

func judgeRing(f facts) *verdict {
	worst, lost, allowance := f.fullestRing()
	if lost < f.few(ringFew) {
		return nil
	}
	received := worst.RxPackets
	part := share(lost, saturate(lost, received))
	v := &verdict{impact: float64(lost)}
	switch {
	case received > 0 && part < f.part(ringShare):
		v.Severity = Advice
	case received == 0 || part >= ringMost:
		v.Severity = Critical
	default:
		v.Severity = Warning
	}
	var nic snapshot.NIC
	if worst.NIC != nil {
		nic = *worst.NIC
	}
	dev := quote(worst.Name)
	v.Title = fmt.Sprintf("%s had no room for %s %s", worst.Name, number(lost, "packet"), f.window())
	if allowance != "" {
		v.Title = fmt.Sprintf("the cloud dropped %s of %s %s: a limit of this instance type", number(lost, "packet"), worst.Name, f.window())
	}
	v.Evidence = ringEvidence(worst, nic)
	v.Why = "A card puts received packets into a ring of buffers that a CPU empties. If the CPU is too late the ring is full, and the card discards packets; the kernel never sees them."
	switch {
	case allowance != "":
		v.Why = "The cloud's network enforces limits of bandwidth, packets a second or tracked connections for each machine, and drops what is beyond. The kernel never sees these packets."
		v.Remedy = []string{fmt.Sprintf("# %s is a limit of this instance type: use a larger one, or send less traffic. Which limits are reached:", allowance), f.run("ethtool -S " + dev)}
	case nic.RxRing > 0 && nic.RxRing < nic.RxRingMax:
		v.Settings = []snapshot.Setting{provided(f.device(worst.Name, "rx_ring", strconv.FormatUint(uint64(nic.RxRingMax), 10)), linkMayGo)}
		v.Remedy = []string{"# the longest ring that the card has; its link may go down for a moment:", f.run(fmt.Sprintf("ethtool -G %s rx %d", dev, nic.RxRingMax))}
	default:
		v.Remedy = []string{"# the ring cannot be longer, so a CPU must empty it sooner: see which one does, and how busy it is", interruptsOf(worst.Name),
			f.run("ethtool -c " + dev)}
	}
	for _, c := range f.CPUs {
		if c.Busy >= oneCPUBusy && c.Softirq >= oneCPUSoftirq && allowance == "" {
			v.Remedy = append(v.Remedy, fmt.Sprintf("# CPU %d has no time left, so any ring fills: let other CPUs help, see the cause softirq-one-cpu", c.Number))
			break
		}
	}
	v.Verify = f.look(f.run("ip -s -s link show dev "+dev), f.run("ethtool -S "+dev))
	return v
}

// fullestRing is the interface that lost most for want of room, and the limit of the cloud that it
// was, if it was one.
func (f facts) fullestRing() (worst snapshot.Interface, lost uint64, allowance string) {
	for _, l := range f.links() {
		n := l.RxMissed
		name := ""
		if l.NIC != nil {
			for _, key := range slices.Sorted(maps.Keys(l.NIC.Lost)) {
				// The same loss under several names: the largest is the one.
				if c := l.NIC.Lost[key]; c < implausible && c > n {
					n = c
					if name = ""; strings.HasSuffix(key, "allowance_exceeded") {
						name = key
					}
				}
			}
		}
		if n < implausible && n > lost {
			worst, lost, allowance = l, n, name
		}
	}
	return worst, lost, allowance
}

func ringEvidence(l snapshot.Interface, nic snapshot.NIC) (out []Evidence) {
	if l.RxMissed > 0 {
		out = append(out, Evidence{"missed, FIFO and overrun errors of " + l.Name, strconv.FormatUint(l.RxMissed, 10), fromLinks})
	}
	for _, key := range slices.Sorted(maps.Keys(nic.Lost)) {
		out = append(out, Evidence{key + " of " + l.Name, strconv.FormatUint(nic.Lost[key], 10), fromDrivers})
	}
	out = append(out, Evidence{"packets received", strconv.FormatUint(l.RxPackets, 10), fromLinks})
	if nic.RxRing > 0 {
		out = append(out, Evidence{"its receive ring", fmt.Sprintf("%d of at most %d", nic.RxRing, nic.RxRingMax), fromDrivers})
	}
	return out
}
