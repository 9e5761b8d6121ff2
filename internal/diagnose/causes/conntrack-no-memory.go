// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// littleMemory is the share of the memory below which the kernel may fail to get
// a page at once.
const littleMemory = 0.01

var conntrackNoMemory = Cause{
	Code:     "conntrack-no-memory",
	Title:    "The kernel finds no memory for new conntrack entries",
	Headline: "New connections dropped, conntrack table not full: page allocation failure",
	Search: []string{
		"page allocation failure",
		"SLUB: Unable to allocate memory on node",
		"conntrack -S: drop",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrackStats, snapshot.CanConntrack, snapshot.CanKernelLog},
	Symptom:       "New connections are sometimes dropped under load, in a table that is far from full.",
	Proof:         fmt.Sprintf("Packets were refused (drop without insert_failed) while the table has room, and the kernel logged a failed allocation during the window: critical. Without such a line, but with less than %s of the memory available, it is a warning.", percent.Whole(littleMemory)),
	FalsePositive: "Packets that the kernel counts as drop for other reasons, on a machine with memory to spare. The memory limit of a container does not matter: entries are not charged to it (the cache is made without SLAB_ACCOUNT).",
	Cure:          "Provide memory that the kernel can take at once in an interrupt: a larger reserve (vm.min_free_kbytes), fewer other users, or more memory.",
	NoLab:         "kernel allocations cannot be made to fail on purpose without fault injection (CONFIG_FAILSLAB), and entries are not charged to a memory cgroup",
	judge:         judgeNoMemory,
}

func judgeNoMemory(f facts) *verdict {
	refused, known := f.refused()
	limit, limited := f.limit()
	if !known || refused == 0 || f.Conntrack == nil || limited && float64(max(f.Conntrack.Count, f.Conntrack.CountStart)) >= fullShare*float64(limit) {
		return nil
	}
	var logged uint64
	if f.KernelLog != nil && f.KernelLog.NoMemory < implausible {
		logged = f.KernelLog.NoMemory
	}
	scarce := f.Host.AvailableBytes > 0 && share(f.Host.AvailableBytes, f.Host.MemoryBytes) < littleMemory
	if logged == 0 && !(scarce && refused >= fewFailures) {
		return nil
	}
	v := &verdict{impact: float64(refused)}
	v.Severity = Warning
	if logged > 0 {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s of new connections refused %s: no memory, though the table has room", number(refused, "packet"), f.window())
	v.Evidence = append([]Evidence{{"packets refused", strconv.FormatUint(refused, 10), fromStats + ": drop without insert_failed"}}, f.fillEvidence()...)
	if logged > 0 {
		v.Evidence = append(v.Evidence, Evidence{"lines about failed allocations", strconv.FormatUint(logged, 10), fromLog})
	}
	if f.Host.AvailableBytes > 0 {
		v.Evidence = append(v.Evidence, Evidence{"memory available", fmt.Sprintf("%s of %s", amount(f.Host.AvailableBytes), amount(f.Host.MemoryBytes)), "/proc/meminfo"})
	}
	v.Why = "The kernel allocates an entry while it receives a packet, where it cannot wait for free memory. When its reserve is used up, it drops the packet."
	if reserve, remark, ok := f.largerReserve(); ok {
		v.Settings = []snapshot.Setting{provided(reserve, "the programs here can do without that much memory")}
		v.Remedy = []string{remark, f.set(reserve), "# and see what uses the memory:"}
	} else {
		v.Remedy = []string{"# see what uses the memory:"}
	}
	v.Remedy = append(v.Remedy, "slabtop -o -s c", "ps aux --sort=-rss")
	v.Verify = f.look(f.run("conntrack -S"), "grep -E 'MemAvailable|MemFree' /proc/meminfo")
	return v
}

const (
	leastReserve = 64 << 20 // but no more than a twentieth of the memory
	mostReserve  = 512 << 20
)

// largerReserve is more memory kept free than there is now; ok is false where there is enough, or where the
// machine's memory is not known.
func (f facts) largerReserve() (reserve snapshot.Setting, remark string, ok bool) {
	memory := f.Host.MemoryBytes
	want := min(max(memory/100, min(leastReserve, memory/20)), mostReserve)
	remark = "# a larger reserve for allocations that cannot wait (1 % of the memory, at most 512 MiB):"
	if want > memory/100 {
		remark = fmt.Sprintf("# a larger reserve for allocations that cannot wait (%s of %s of memory):", amount(want), amount(memory))
	}
	reserve = snapshot.Setting{Name: "vm.min_free_kbytes", Value: strconv.FormatUint(want>>10, 10)}
	return reserve, remark, memory > 0 && !f.enough(reserve)
}
