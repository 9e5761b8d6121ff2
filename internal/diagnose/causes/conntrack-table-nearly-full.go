// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"math"
	"time"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

const (
	// nearlyFullShare lies below the 95 % of nf_conntrack_max at which the kernel
	// itself begins to throw out entries, half-open and closing connections first
	// (gc_worker, nf_conntrack_max95), so that there is time to act.
	nearlyFullShare = 0.90

	// A table that fills up is reported earlier: from this share on, if it will be
	// full within fillSoon at the pace of the window.
	fillingShare = 0.75
	fillSoon     = 5 * time.Minute
)

var conntrackTableNearlyFull = Cause{
	Code:     "conntrack-table-nearly-full",
	Title:    "The connection tracking table is nearly full",
	Headline: "nf_conntrack_count is close to nf_conntrack_max",
	Search: []string{
		"net.netfilter.nf_conntrack_count",
		"net.netfilter.nf_conntrack_max",
		"nf_conntrack: table full, dropping packet",
	},
	Severities: []Severity{Warning},
	Thresholds: []Threshold{level(nearlyFullShare, "of the table in use")},
	Explains:   []string{"time-wait-heavy", "close-wait-heavy", "established-timeout-long"},
	Needs:      []string{snapshot.CanConntrack, snapshot.CanConntrackDump},
	Symptom:    "Nothing yet. The next burst makes new connections time out while existing ones continue.",
	Proof: fmt.Sprintf("At least %s of nf_conntrack_max is in use; or %s, and it grows fast enough to be full within %.0f minutes.",
		percent.Whole(nearlyFullShare), percent.Whole(fillingShare), fillSoon.Minutes()),
	FalsePositive: "A busy table with room, however many entries it has, and a table that fills slowly. If packets are already refused, it is conntrack-table-full.",
	Cure:          "The same as for conntrack-table-full, before it hurts.",
	judge:         judgeTableNearlyFull,
}

func judgeTableNearlyFull(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || judgeTableFull(f) != nil {
		return nil
	}
	ct := f.Conntrack
	used := float64(ct.Count) / float64(limit)
	left, filling := f.fullIn(limit)
	filling = filling && used >= fillingShare && left <= fillSoon
	if used < f.full(nearlyFullShare) && !filling {
		return nil
	}
	v := &verdict{impact: used}
	v.Severity = Warning
	v.Title = fmt.Sprintf("the connection tracking table is %s full (%d of %d)", percent.Whole(used), ct.Count, limit)
	v.Evidence = f.tableEvidence()
	if filling {
		v.Title += fmt.Sprintf(", full in %v", left.Round(time.Second))
		v.Evidence = append(v.Evidence, Evidence{"growth " + f.window(), plural.Count(ct.Count-ct.CountStart, "entry"), fromSettings + ": nf_conntrack_count"})
	}
	v.Why = "When it is full, the first packet of each new connection is dropped. The next burst of connections, or one busy client, is enough."
	growth := f.growTable(0)
	v.Settings = growth.settings
	v.Remedy = growth.remedy
	v.Verify = f.look(f.run("sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max"))
	return v
}

// fullIn is how long the table takes to be full if it goes on growing as it did in the window.
func (f facts) fullIn(limit uint64) (time.Duration, bool) {
	ct := f.Conntrack
	if ct.Count <= ct.CountStart || ct.Count >= limit {
		return 0, false
	}
	seconds := float64(limit-ct.Count) / f.perSecond(ct.Count-ct.CountStart)
	if math.IsInf(seconds, 0) || seconds > 1e6 {
		return 0, false
	}
	return time.Duration(seconds * float64(time.Second)), true
}
