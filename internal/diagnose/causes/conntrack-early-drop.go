// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

// earlyDropMany is how many half-open connections must have been thrown out in
// the window for it to be critical; fewer are a warning.
const earlyDropMany = 10

var conntrackEarlyDrop = Cause{
	Code:     "conntrack-early-drop",
	Title:    "The full table evicts half-open connections",
	Headline: "conntrack early_drop rising: half-open connections are evicted",
	Search: []string{
		"conntrack -S: early_drop",
		"nf_conntrack early_drop",
	},
	Severities:    []Severity{Warning, Critical},
	Explains:      []string{"conntrack-table-full", "conntrack-table-nearly-full"},
	Needs:         []string{snapshot.CanConntrackStats, snapshot.CanConntrack, snapshot.CanConntrackDump},
	Symptom:       "Connections die while being opened, and UDP exchanges lose their reply. Nothing is refused, and the kernel logs nothing.",
	Proof:         fmt.Sprintf("Entries were evicted during the window to make room for new ones (early_drop of /proc/net/stat/nf_conntrack): from %d critical, fewer are a warning. The kernel does it only at nf_conntrack_max, and only to flows without enough traffic in both directions (not ASSURED).", earlyDropMany),
	FalsePositive: "Entries that the kernel's garbage collection removes above 95 % of the limit are not counted there; the table is then nearly full, and reported as such. With a flood in the table natkit reports the flood.",
	Cure:          "Make room: the same as for conntrack-table-full. If a flood fills the table, stop the flood.",
	judge:         judgeEarlyDrop,
}

func judgeEarlyDrop(f facts) *verdict {
	evicted, known := f.stat("early_drop")
	if !known || evicted == 0 || judgeUnreplied(f) != nil || judgeSYNFlood(f) != nil {
		return nil
	}
	v := &verdict{impact: float64(evicted)}
	v.Severity = Warning
	if evicted >= earlyDropMany {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s evicted from the full table %s", number(evicted, "half-open connection"), f.window())
	v.Evidence = append([]Evidence{{"entries evicted to make room", strconv.FormatUint(evicted, 10), fromStats + ": early_drop"}}, f.tableEvidence()...)
	v.Why = "In a full table the kernel evicts the entry of a flow that is not established yet to make room for the new one. Packets of the evicted flow then belong to no connection: " +
		"a reply is not translated back, and one end gets a reset or waits in vain."
	growth := f.growTable(0)
	v.Settings, v.Remedy = growth.settings, growth.remedy
	v.Verify = f.look(f.run("conntrack -S"), f.natkit("conntrack stats"))
	return v
}
