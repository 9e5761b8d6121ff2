// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// timeWaitDominant is the share of the entries that must be TIME_WAIT before
	// their time-out is what decides how full the table is.
	timeWaitDominant = 0.50

	// timeWaitRoom is the share of the limit that they must hold for a warning; from
	// timeWaitWaste on they are worth advice. Below it they do no damage: the room
	// that they take is not needed.
	timeWaitRoom  = 0.40
	timeWaitWaste = 0.20
)

var timeWaitHeavy = Cause{
	Code:     "time-wait-heavy",
	Title:    "Closed connections fill the table",
	Headline: "conntrack table full of TIME_WAIT entries",
	Search: []string{
		"conntrack: TIME_WAIT",
		"net.netfilter.nf_conntrack_tcp_timeout_time_wait",
	},
	Severities: []Severity{Advice, Warning},
	Thresholds: []Threshold{level(timeWaitDominant, "of all entries in TIME_WAIT"), level(timeWaitWaste, "of the table")},
	Needs:      []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanSysctls},
	Symptom:    "The table fills although few connections are open: each short connection keeps its entry for two minutes after its end.",
	Proof: fmt.Sprintf("TIME_WAIT is the state of at least %s of the entries, and they hold at least %s of nf_conntrack_max; from %s it is advice.",
		percent.Whole(timeWaitDominant), percent.Whole(timeWaitRoom), percent.Whole(timeWaitWaste)),
	FalsePositive: "Any number of TIME_WAIT entries in a table with room: a web server's table looks like this.",
	Cure: fmt.Sprintf("A timeout of %d s instead of 120 s divides them by four. Keep-alive between proxy and server, or between client and server, makes fewer of them.",
		shortTimeWait),
	judge: judgeTimeWait,
}

func judgeTimeWait(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	waiting := t.ByState["TIME_WAIT"]
	if waiting > t.Entries || share(waiting, t.Entries) < f.full(timeWaitDominant) || share(waiting, limit) < f.full(timeWaitWaste) {
		return nil
	}
	v := &verdict{impact: share(waiting, limit)}
	v.Severity = Advice
	if share(waiting, limit) >= timeWaitRoom {
		v.Severity = Warning
	}
	v.Title = fmt.Sprintf("closed connections (TIME_WAIT) hold %s of the connection tracking table", percent.Whole(share(waiting, limit)))
	v.Evidence = append(f.fillEvidence(),
		Evidence{"entries in TIME_WAIT", fmt.Sprintf("%d of %d (%s)", waiting, t.Entries, percent.Whole(share(waiting, t.Entries))), fromDump})
	const timeout = "net.netfilter.nf_conntrack_tcp_timeout_time_wait"
	if now, known := f.sysctl(timeout); known {
		v.Evidence = append(v.Evidence, Evidence{"their timeout", strconv.FormatInt(now, 10) + " s", fromSettings + ": nf_conntrack_tcp_timeout_time_wait"})
	}
	if len(t.Destinations) > 0 && share(t.Destinations[0].Entries, t.Entries) >= worthNaming {
		d := t.Destinations[0]
		v.Evidence = append(v.Evidence, Evidence{"destination with most entries", fmt.Sprintf("%s: %d", d.Addr, d.Entries), fromDump})
	}
	v.Why = "An entry in TIME_WAIT serves only late packets. At this share the timeout of TIME_WAIT, not the number of open " +
		"connections, decides when the table is full."
	if s, ok := f.shortenTimeWait(); ok {
		v.Settings = []snapshot.Setting{s}
		v.Remedy = append(v.Remedy, f.set(s), "# existing entries keep their old timeout; to remove them at once:")
	} else {
		v.Remedy = append(v.Remedy, "# the timeout is already short; what helps is keep-alive in client, proxy and server. To remove these entries at once:")
	}
	v.Remedy = append(v.Remedy, f.run("conntrack -D -p tcp --state TIME_WAIT"))
	v.Verify = f.look(f.natkit("conntrack stats"))
	return v
}
