// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// A lossy client loses a packet of its own now and then, and opens many more.
	halfwayFew  = 5
	halfwayMany = 10
	halfwaySome = 0.05 // of the client's open entries
	halfwayMost = 0.20

	mainTable = 254 // RT_TABLE_MAIN
)

var clientsUnreached = Cause{
	Code:     "clients-unreached",
	Title:    "Replies return to this machine but the clients do not confirm them",
	Headline: "Replies reach the router but not the client: wrong return route or stale neighbour",
	Search: []string{
		"conntrack: SYN_RECV",
		"Connection timed out",
		"ip route get: wrong interface",
	},
	Severities:    []Severity{Warning, Critical},
	Thresholds:    []Threshold{many(halfwayFew, "connections not confirmed"), portion(halfwaySome, "of the client's open entries")},
	Needs:         []string{snapshot.CanConntrackDump, snapshot.CanRoutes, snapshot.CanInterfaces, snapshot.CanDrops},
	Symptom:       "One client, or a network of them, gets no reply from anywhere. A capture on the egress interface shows their packets and the replies.",
	Proof:         fmt.Sprintf("At least %d TCP connections of one client were answered by a SYN-ACK at least a second ago and during the doctor's run (at most %d s), and the client has not confirmed it (SYN_RECV): from %s of its open entries a warning, from %s, with %d connections, critical. natkit asks the routing tables, including policy routing, where the replies go.", halfwayFew, snapshot.RecentSeconds, percent.Whole(halfwaySome), percent.Whole(halfwayMost), halfwayMany),
	FalsePositive: "Connections being opened: they are confirmed within a second. Replies, or the client's confirmations, that are seen to be dropped here, which have their own causes, and floods of half-open connections from many addresses (syn-flood).",
	Cure:          "Fix the route or policy-routing rule so that replies go to the client's network. If an old or permanent neighbour entry has another hardware address, delete it.",
	judge:         judgeClientsUnreached,
}

func judgeClientsUnreached(f facts) *verdict {
	if f.Conntrack == nil || f.Conntrack.Table == nil || judgeSYNFlood(f) != nil {
		return nil
	}
	t := f.Conntrack.Table
	worst := f.unreached()
	if worst == nil || worst.recent < f.few(halfwayFew) {
		return nil
	}
	u := worst.example
	// How many of one source's entries are over is not known: as many as in the whole table.
	alive := uint64(float64(f.entriesOf(u.Source)) * (1 - share(t.ByState["TIME_WAIT"], t.Entries)))
	part := share(worst.recent, max(worst.recent, alive))
	if part < f.part(halfwaySome) {
		return nil
	}
	v := &verdict{impact: float64(worst.recent)}
	v.Severity = Warning
	if worst.recent >= halfwayMany && part >= halfwayMost {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s of %s got a SYN-ACK and did not confirm it in the last %d s", number(worst.recent, "connection"), u.Source, f.recent())
	r, asked := f.wayBack(u)
	link, off := f.offNetwork(r)
	v.Evidence = f.unreachedEvidence(worst, part)
	v.Why = "The service replied, and the reply passed connection tracking here. Either it does not reach the client, or the client's confirmation does not pass this machine. Usual reasons: policy routing treats the two directions differently; the neighbour entry for the client, or for the router before it, is wrong; the reply is lost on the path."
	if asked && off {
		v.Title = fmt.Sprintf("replies to %s of %s leave by %s, but it is on %s", number(worst.recent, "connection"), u.Source, r.Out, link.Name)
		v.Remedy = f.correctRoute(r)
	} else {
		v.Remedy = f.followAnswers(u, r)
	}
	v.Verify = f.look(f.natkit("conntrack list --state SYN_RECV"))
	return v
}

// unreachedClient is a client that does not confirm connections that were replied to.
type unreachedClient struct {
	recent  uint64
	example snapshot.UnansweredUse
}

// unreached is the one with most of them, nil for none.
func (f facts) unreached() (worst *unreachedClient) {
	clients := map[netip.Addr]*unreachedClient{}
	for _, u := range f.Conntrack.Table.Halfway {
		if !u.Source.IsValid() || !u.Dest.IsValid() || !u.Target.IsValid() || u.Recent > u.Entries || u.Entries >= implausible || f.own(u.Source) || f.handshakeDropped(u) {
			continue
		}
		c := clients[u.Source]
		if c == nil {
			c = &unreachedClient{example: u}
			clients[u.Source] = c
		}
		c.recent = saturate(c.recent, u.Recent)
		if worst == nil || c.recent > worst.recent {
			worst = c
		}
	}
	return worst
}

func (f facts) unreachedEvidence(worst *unreachedClient, part float64) []Evidence {
	u := worst.example
	out := []Evidence{
		{"connections from " + u.Source.String() + " with a SYN-ACK that was not confirmed", fmt.Sprintf("%d, %s of its open entries", worst.recent, percent.Whole(part)), fromDump + ": SYN_RECV"},
		{"one of them", fmt.Sprintf("%s to %s", u.Source, u.Dest), fromDump},
	}
	if u.Target != u.Dest {
		out[1].Value += ", translated to " + u.Target.String()
	}
	if link, near := f.linkTo(u.Source); near {
		out = append(out, Evidence{u.Source.String() + " is on the network of", link.Name, fromLinks})
	}
	if astray, seen := f.repliesAstray(u.Source); seen {
		out = append(out, Evidence{"frames of " + u.Source.String() + " to " + astray.To + ", which is none of this machine's hardware addresses", fmt.Sprint(astray.Count), fromFrames})
	}
	if r, asked := f.wayBack(u); asked {
		value := routeAnswer(r)
		if r.Table > 0 && r.Table != mainTable {
			value += fmt.Sprintf(", by table %d", r.Table)
		}
		out = append(out, Evidence{fmt.Sprintf("route of the replies from %s to %s", r.Source, r.Dest), value, fromRoutes})
	}
	return out
}

// wayBack is the route of the answers to a client's connections, as far as it was asked for.
func (f facts) wayBack(u snapshot.UnansweredUse) (snapshot.RouteAnswer, bool) {
	for _, r := range f.Routes {
		if r.Dest == u.Source && r.Source == u.Target.Addr() && r.Answer == snapshot.RouteFound && r.Out != "" {
			return r, true
		}
	}
	return snapshot.RouteAnswer{Source: u.Target.Addr(), Dest: u.Source}, false
}

// offNetwork says whether a route leads to an address by an interface that is not on its network, while another is. Two may
// be on networks with the same addresses: of VRFs, or by two links to one.
func (f facts) offNetwork(r snapshot.RouteAnswer) (on snapshot.Interface, off bool) {
	on, near := f.linkTo(r.Dest)
	out, _ := f.link(r.Out)
	return on, near && r.Out != on.Name && !slices.ContainsFunc(out.Addresses, func(p netip.Prefix) bool { return p.IsValid() && p.Masked().Contains(r.Dest) })
}

// askRoute is the command that asks for a route again.
func (f facts) askRoute(r snapshot.RouteAnswer) string {
	question := fmt.Sprintf("ip%s route get %s", sixFlag(r.Dest), r.Dest)
	if r.In != "" {
		question += fmt.Sprintf(" from %s iif %s", r.Source, quote(r.In))
	}
	return f.run(question)
}

// correctRoute is how to find what leads answers astray.
func (f facts) correctRoute(r snapshot.RouteAnswer) []string {
	remedy := []string{"# how the replies are routed:", f.askRoute(r),
		"# the policy routing rules, and the table with that route; delete or correct the wrong one:",
		f.run(fmt.Sprintf("ip%s rule show", sixFlag(r.Dest)))}
	if r.Table > 0 {
		remedy = append(remedy, f.run(fmt.Sprintf("ip%s route show table %d", sixFlag(r.Dest), r.Table)))
	}
	return remedy
}

// followAnswers is how to find where answers get lost that are routed as they should be.
func (f facts) followAnswers(u snapshot.UnansweredUse, r snapshot.RouteAnswer) []string {
	remedy := []string{"# is this the path to the client, also for packets with a mark?", f.askRoute(r), f.run(fmt.Sprintf("ip%s rule show", sixFlag(u.Source)))}
	hop, out := u.Source, r.Out
	if r.Via.IsValid() {
		hop = r.Via
	}
	if l, ok := f.linkTo(hop); ok && out == "" {
		out = l.Name
	}
	if out != "" {
		remedy = append(remedy, "# is this its hardware address, and not an old permanent entry?",
			f.run(fmt.Sprintf("ip neigh show to %s dev %s", hop, quote(out))),
			"# if not, delete the entry, so that it is resolved again:", f.run(fmt.Sprintf("ip neigh del %s dev %s", hop, quote(out))))
	}
	if l, ok := f.linkTo(u.Target.Addr()); ok && l.Kind == "bridge" && !f.own(u.Target.Addr()) {
		remedy = append(remedy, fmt.Sprintf("# does %s send its replies to this machine? They may have been bridged here to a neighbour that it uses as its router. On %s:", u.Target.Addr(), u.Target.Addr()),
			"#   "+fmt.Sprintf("ip%s route get %s", sixFlag(u.Source), u.Source))
	}
	return append(remedy, fmt.Sprintf("# otherwise check %s, and the path to it, for a packet filter that drops replies", u.Source))
}

// entriesOf is how many entries a source has; of one that is not among those with most,
// how many it may have at most.
func (f facts) entriesOf(source netip.Addr) uint64 {
	least := f.Conntrack.Table.Entries
	for _, s := range f.Conntrack.Table.Sources {
		if s.Addr == source {
			return s.Entries
		}
		least = min(least, s.Entries)
	}
	return least
}

// handshakeDropped says whether replies to a client, or what it confirms them with, were seen to be dropped here.
func (f facts) handshakeDropped(u snapshot.UnansweredUse) bool {
	return f.Drops != nil && slices.ContainsFunc(f.Drops.Rows, func(row snapshot.Drop) bool {
		if row.Benign || !f.here(row.Netns) {
			return false
		}
		part, some := only(row, func(sample string) bool {
			t, ok := parseSample(sample)
			return ok && (t.dest.Addr() == u.Source || midStream(sample) && confirmation(u, t))
		})
		return some && part.Count >= u.Recent/2
	})
}
