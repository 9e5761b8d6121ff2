// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

const (
	// Unreplied entries are a flood when they are the majority, and many: both in
	// themselves (a resolver, a monitor or a syslog sender has hundreds) and for
	// this table.
	floodMajority = 0.50
	floodEntries  = 4096
	floodRoom     = 0.01 // of nf_conntrack_max

	// In a small table fewer are many.
	floodSmall     = 200
	floodSmallRoom = 0.25

	// oneSource is the share of the unreplied entries that makes one address their author.
	oneSource = 0.50

	// guardRate is how many packets a second that address may go on sending: at the
	// 30 s that an unanswered UDP flow stays, fewer entries than floodEntries.
	guardRate = 100
)

var unrepliedFlood = Cause{
	Code:     "unreplied-flood",
	Title:    "A flood of packets without replies fills the table",
	Headline: "The conntrack table fills with [UNREPLIED] entries",
	Search: []string{
		"conntrack: [UNREPLIED]",
		"conntrack -S: early_drop",
		"nf_conntrack: table full, dropping packet",
	},
	Severities:    []Severity{Warning, Critical},
	Explains:      []string{"conntrack-table-full", "conntrack-table-nearly-full"},
	Needs:         []string{snapshot.CanConntrack, snapshot.CanConntrackDump, snapshot.CanConntrackStats},
	Symptom:       "The table grows through scans, spoofed packets, or requests to something that is gone. Half-open connections of others are evicted.",
	Proof:         fmt.Sprintf("Entries that never saw a reply are at least %d, %s of all and %s of nf_conntrack_max; in a small table %d and %s of it. Critical if the kernel evicted half-open connections to make room (early_drop).", floodEntries, percent.Whole(floodMajority), percent.Whole(floodRoom), floodSmall, percent.Whole(floodSmallRoom)),
	FalsePositive: "One-way traffic in small numbers (syslog, statsd, monitoring probes), and a quiet table in which a few entries without replies are the majority.",
	Cure:          "Limit new flows of the source before connection tracking, and stop what sends them.",
	judge:         judgeUnreplied,
}

func judgeUnreplied(f facts) *verdict {
	limit, ok := f.limit()
	if !ok || f.Conntrack.Table == nil {
		return nil
	}
	t := f.Conntrack.Table
	unreplied := t.ByStatus["UNREPLIED"]
	many := unreplied >= floodEntries && share(unreplied, limit) >= floodRoom ||
		unreplied >= floodSmall && share(unreplied, limit) >= floodSmallRoom
	if !many || unreplied > t.Entries || share(unreplied, t.Entries) < floodMajority {
		return nil
	}
	evicted, _ := f.stat("early_drop")
	v := &verdict{impact: share(unreplied, limit)}
	v.Severity = Warning
	if evicted > 0 {
		v.Severity = Critical
		v.impact = float64(evicted)
	}
	v.Title = fmt.Sprintf("%d of %d entries never saw a reply", unreplied, t.Entries)
	v.Evidence = append(f.fillEvidence(),
		Evidence{"unreplied entries", fmt.Sprintf("%d of %d (%s)", unreplied, t.Entries, percent.Whole(share(unreplied, t.Entries))), fromDump})
	if evicted > 0 {
		v.Evidence = append(v.Evidence, Evidence{"half-open entries evicted to make room", strconv.FormatUint(evicted, 10), fromStats + ": early_drop"})
	}
	if proto, n := most(t.ByProtocol); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"most common protocol", fmt.Sprintf("%s: %s", proto, plural.Count(n, "entry")), fromDump})
	}
	v.Why = "Each packet without a reply to a new address or port costs an entry for 30 s (UDP) or 120 s (a SYN). A scan or flood fills the table " +
		"with useless entries, and in a full table the kernel evicts half-open connections, including real ones."

	author, ok := mostUnreplied(t.Sources)
	if ok && share(author.Unreplied, unreplied) >= oneSource {
		v.Title += fmt.Sprintf(", %s of them from %s", percent.Whole(share(author.Unreplied, unreplied)), author.Addr)
		v.Evidence = append(v.Evidence, Evidence{"source of most of them", fmt.Sprintf("%s: %d", author.Addr, author.Unreplied), fromDump})
		family := "ip"
		if author.Addr.Is6() {
			family = "ip6"
		}
		v.Remedy = []string{
			fmt.Sprintf("# stop what %s sends; until then limit its packets before they cost an entry:", author.Addr),
			f.run("nft add table " + family + " natkit-guard"),
			f.run("nft " + quote("add chain "+family+" natkit-guard prerouting { type filter hook prerouting priority raw; }")),
			f.run("nft " + quote(fmt.Sprintf("add rule %s natkit-guard prerouting %s saddr %s limit rate over %d/second drop", family, family, author.Addr, guardRate))),
			"# its entries expire on their own; to remove them at once:",
			f.run("conntrack -D" + conntrackFamily(author.Addr) + " -s " + author.Addr.String()),
			"# when it is over: " + f.run("nft delete table "+family+" natkit-guard"),
		}
	} else {
		v.Remedy = []string{
			"# no single source: let flows without replies expire sooner, and see where they go:",
			f.set(f.local("net.netfilter.nf_conntrack_udp_timeout", 10)),
			f.set(f.local("net.netfilter.nf_conntrack_tcp_timeout_syn_sent", 20)),
			f.natkit("conntrack top --by destination"),
		}
	}
	v.Verify = f.look(f.natkit("conntrack top --by source"))
	return v
}

// mostUnreplied is the source with most unreplied entries among those listed.
func mostUnreplied(sources []snapshot.Talker) (snapshot.Talker, bool) {
	var best snapshot.Talker
	for _, s := range sources {
		if s.Addr.IsValid() && s.Unreplied > best.Unreplied {
			best = s
		}
	}
	return best, best.Unreplied > 0
}
