// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strings"

	"natkit/internal/snapshot"
)

// accountedEntries is how many entries a table must have before what each of
// them counts is worth a word.
const accountedEntries = 10000

var conntrackAccounting = Cause{
	Code:     "conntrack-accounting",
	Title:    "Each connection counts its packets or records its start",
	Headline: "nf_conntrack_acct=1 or nf_conntrack_timestamp=1: what it costs",
	Search: []string{
		"net.netfilter.nf_conntrack_acct",
		"net.netfilter.nf_conntrack_timestamp",
	},
	Severities:    []Severity{Advice},
	Needs:         []string{snapshot.CanSysctls, snapshot.CanConntrack},
	Symptom:       "Nothing breaks. Entries are larger, and each packet updates two more counters of its entry.",
	Proof:         fmt.Sprintf("net.netfilter.nf_conntrack_acct or nf_conntrack_timestamp is 1, and the table has at least %d entries. Both are off by default.", accountedEntries),
	FalsePositive: "Accounting that a program reads (flow exporters, conntrack -L with bytes) is worth its price. natkit cannot see that, so it is advice.",
	Cure:          "Switch it off, unless a program here reads the counters. Existing entries keep them.",
	judge:         judgeAccounting,
}

func judgeAccounting(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Count < accountedEntries {
		return nil
	}
	v := &verdict{}
	var on []string
	for _, key := range []string{"acct", "timestamp"} {
		s := f.local("net.netfilter.nf_conntrack_"+key, 0)
		if n, known := f.sysctl(s.Name); known && n == 1 {
			on = append(on, "nf_conntrack_"+key)
			v.Evidence = append(v.Evidence, Evidence{s.Name, "1", fromSettings})
			v.Remedy = append(v.Remedy, f.set(s))
			v.Settings = append(v.Settings, provided(s, "no program here reads what entries count"))
		}
	}
	if len(on) == 0 {
		return nil
	}
	v.Severity = Advice
	v.Title = fmt.Sprintf("each of %d entries stores %s", f.Conntrack.Count, strings.Join(on, " and "))
	v.Evidence = append(v.Evidence, f.fillEvidence()...)
	if n := f.Conntrack.ExtensionBytes; n > 0 && n < 1<<16 {
		v.Evidence = append(v.Evidence, Evidence{"an entry's extension, as allocated", amount(n), fromSlab})
	}
	v.Why = "The counters of an entry take 32 bytes and its timestamps 16, in an extension that is allocated in powers of two. With accounting, each packet updates counters that all CPUs share."
	v.Remedy = append([]string{"# unless a program here reads them (flow export, billing, conntrack -L with packets and bytes):"}, v.Remedy...)
	v.Verify = []string{f.run("sysctl net.netfilter.nf_conntrack_acct net.netfilter.nf_conntrack_timestamp"), f.natkit("conntrack memory")}
	return v
}
