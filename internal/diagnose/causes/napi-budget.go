// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	squeezedPerSecond = 10.0   // rounds a second of one processor
	squeezedPart      = 0.20   // of its packets came in such rounds: worth advice
	squeezedMost      = 0.50   // a warning, if the processor has time left
	squeezedPackets   = 20_000 // a second of that processor: with fewer its rounds end for want of time, as on a slow or shared machine
	defaultBudget     = 300
	budgetRoom        = 600
	budgetMicros      = 8000
)

var napiBudget = Cause{
	Code:     "napi-budget",
	Title:    "Receive rounds end before their work is done",
	Headline: "softnet_stat time_squeeze rising: NAPI runs out of budget",
	Search: []string{
		"time_squeeze",
		"/proc/net/softnet_stat third column",
		"net.core.netdev_budget",
		"net.core.netdev_budget_usecs",
	},
	Severities:    []Severity{Advice, Warning},
	Needs:         []string{snapshot.CanCPUs, snapshot.CanSysctls},
	Symptom:       "Latency rises in waves under load although CPUs have time left. The third column of /proc/net/softnet_stat rises.",
	Proof:         fmt.Sprintf("A CPU ended %.0f rounds a second or more with packets left, because its packet or time budget was used up (third column of /proc/net/softnet_stat), and at least %s of its packets came in such rounds, counted with the full budget: advice, from %s a warning. A round that ends by time has fewer packets, so the share is an upper bound. Below %d packets a second natkit reports nothing.", squeezedPerSecond, percent.Whole(squeezedPart), percent.Whole(squeezedMost), squeezedPackets),
	FalsePositive: "A few such rounds a minute are normal on every machine. A CPU that is always busy ends its rounds early too: a larger budget does not help there, and softirq-one-cpu is the cause.",
	Cure:          "Double net.core.netdev_budget and netdev_budget_usecs: packets are processed at once instead of in the next round. Programs on that CPU wait longer for it.",
	Host:          true,
	NoLab:         "the budget belongs to the host, and using it up takes a whole CPU. It is covered by saved snapshots",
	judge:         judgeBudget,
}

func judgeBudget(f facts) *verdict {
	if !f.ownsCPUs() {
		return nil
	}
	budget, known := f.sysctl("net.core.netdev_budget")
	if !known || budget <= 0 || budget > 1<<20 {
		budget = defaultBudget
	}
	var worst snapshot.CPU
	for _, c := range f.CPUs {
		if c.Squeezed > worst.Squeezed && c.Squeezed < implausible && c.Packets < implausible {
			worst = c
		}
	}
	part := min(1, float64(worst.Squeezed)*float64(budget)/max(1, float64(worst.Packets)))
	if f.perSecond(worst.Squeezed) < squeezedPerSecond || f.perSecond(worst.Packets) < squeezedPackets || part < squeezedPart {
		return nil
	}
	v := &verdict{impact: part}
	v.Severity = Advice
	if part >= squeezedMost && worst.Busy < oneCPUBusy {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("CPU %d ended %.0f receive rounds a second with packets left", worst.Number, f.perSecond(worst.Squeezed))
	v.Evidence = []Evidence{
		{fmt.Sprintf("rounds that CPU %d ended early", worst.Number), strconv.FormatUint(worst.Squeezed, 10), fromSoftnet},
		{"packets that it processed", fmt.Sprintf("%d, up to %s of them in such rounds", worst.Packets, percent.Whole(part)), fromSoftnet},
		{fmt.Sprintf("CPU %d", worst.Number), fmt.Sprintf("%s busy, %s in softirq", percent.Whole(worst.Busy), percent.Whole(worst.Softirq)), fromCPUs},
	}
	if known {
		v.Evidence = append(v.Evidence, Evidence{"net.core.netdev_budget", strconv.FormatInt(budget, 10), fromSettings})
	}
	micros, microsKnown := f.sysctl("net.core.netdev_budget_usecs")
	if microsKnown {
		v.Evidence = append(v.Evidence, Evidence{"net.core.netdev_budget_usecs", strconv.FormatInt(micros, 10), fromSettings})
	}
	v.Why = "The packets that are left wait for the next round. Often ksoftirqd runs it, which is scheduled like any program: packets arrive in time and leave late."
	v.Remedy = []string{"# larger rounds, on the host:"}
	for _, s := range []snapshot.Setting{
		{Name: "net.core.netdev_budget", Value: strconv.FormatUint(max(budgetRoom, 2*uint64(budget)), 10)},
		{Name: "net.core.netdev_budget_usecs", Value: strconv.Itoa(budgetMicros)},
	} {
		if !f.enough(s) {
			v.Settings = append(v.Settings, s)
			v.Remedy = append(v.Remedy, f.set(s))
		}
	}
	if len(v.Settings) == 0 {
		v.Remedy = []string{"# rounds are long already, so the CPU has too much to do: let other CPUs help, see the cause softirq-one-cpu"}
	}
	if v.Severity < Warning {
		for i := range v.Settings {
			v.Settings[i].If = "programs here may wait longer for a CPU that receives packets"
		}
	}
	v.Verify = f.look("cat /proc/net/softnet_stat")
	return v
}
