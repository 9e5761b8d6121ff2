// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

// evenChain is the mean chain below which chance makes no chain of 50, the
// shortest that the kernel refuses to lengthen: with 8 entries to a bucket the
// probability of one of 50 is below 1 in 10^21.
const evenChain = 8.0

var conntrackChainTooLong = Cause{
	Code:     "conntrack-chain-too-long",
	Title:    "Single hash chains are too long in a hash of the right size",
	Headline: "conntrack chaintoolong rising although nf_conntrack_buckets is large",
	Search: []string{
		"conntrack -S: chaintoolong",
		"nf_conntrack chaintoolong",
	},
	Severities: []Severity{Warning, Critical},
	Needs:      []string{snapshot.CanConntrackStats, snapshot.CanConntrack, snapshot.CanDrops},
	Symptom:    "Some new connections are dropped, always the same ones, in a table with room and a hash of the right size.",
	Proof: fmt.Sprintf("Entries were refused during the window because of their chain's length (chaintoolong), while the mean chain is shorter than %.0f, so chance cannot have made a chain of 50.",
		evenChain),
	FalsePositive: "Long chains everywhere are conntrack-hash-too-small. An attacker cannot aim at a chain from outside: the hash has a secret key.",
	Cure:          "Find the source of the flows that the hash cannot distinguish. Kernels from 4.3 left the zone of a flow out of its hash until 5.15 included it again, so the same addresses in many zones (Open vSwitch, VRFs) make one chain there, if the distribution backported only the chain limit.",
	NoLab:         "it takes a kernel whose hash leaves something out, or a hash so small that the whole host would suffer",
	judge:         judgeChain,
}

func judgeChain(f facts) *verdict {
	tooLong, _ := f.stat("chaintoolong")
	chain, known := f.meanChain()
	if tooLong == 0 || !known || chain >= evenChain {
		return nil
	}
	v := &verdict{impact: float64(tooLong)}
	v.Severity = Critical
	if tooLong < fewFailures {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("%s refused %s: single hash chains are too long (mean: %.1f entries)", number(tooLong, "entry"), f.window(), chain)
	v.Evidence = append([]Evidence{
		{"entries refused", strconv.FormatUint(tooLong, 10), fromStats + ": chaintoolong"},
		{"mean chain (each entry is in two buckets)", fmt.Sprintf("%.1f", chain), "2 x entries / buckets"},
	}, f.fillEvidence()...)
	v.Evidence = append(v.Evidence, Evidence{"kernel", orUnknown(f.Host.Kernel), "/proc/sys/kernel/osrelease"})
	_, rows, _ := f.dropped(snapshot.CauseConfirm)
	v.Evidence = append(v.Evidence, sampleEvidence(rows)...)
	v.Why = "The kernel refuses an entry whose chain already has 50 to 80 entries, and drops the packet. With so few entries per bucket, a chain that long consists of flows with the same hash."
	v.Remedy = []string{
		"# see whose flows are alike, and whether they are in many zones:",
		f.natkit("conntrack top --by source"),
		f.run("conntrack -L -o id"),
		"# flows of many zones with the same addresses: a kernel that takes the zone into the hash, 5.15 or later",
	}
	v.Verify = f.look(f.run("conntrack -S"))
	return v
}

// meanChain is how many entries stand in a bucket of the hash on average. Each
// entry of any namespace stands in two.
func (f facts) meanChain() (float64, bool) {
	ct := f.Conntrack
	if ct == nil || ct.Buckets == 0 || ct.Buckets >= implausible {
		return 0, false
	}
	entries := max(ct.Count, ct.HostObjects)
	if entries >= implausible {
		return 0, false
	}
	return 2 * float64(entries) / float64(ct.Buckets), true
}

// orUnknown is a text, or "not known".
func orUnknown(s string) string {
	if s == "" {
		return "not known"
	}
	return s
}
