// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/nat/rulefile"
)

// Whether a packet of a host is a reply to what a rule with sessions has translated is not known
// before connection tracking, where stateless maps rewrite. So hosts of such a map that a rule
// with sessions is about have sessions by the map, too; its other hosts have none.

// trackHosts finds these hosts of each stateless map, as numbers from its first address: those with
// a more special source rule or map, targets of forwards, and hosts of which an external address is
// forwarded.
func (c *compiler) trackHosts() {
	c.tracked = map[int][]span{}
	inside, outside := c.withSessions()
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		if !isStateless(r) {
			continue
		}
		m := r.Action.(rulefile.Map)
		spans := append(among(m.Inside, inside), among(m.Outside, outside)...)
		if spans == nil {
			continue
		}
		c.tracked[i] = flatten(spans)
		c.warn(r.Position, "hosts of a stateless map that other rules are about have sessions, so both directions must come by this gateway: %s", hostsText(m.Inside, c.tracked[i]))
	}
}

// withSessions are the internal and external addresses that rules with sessions are about, sorted.
func (c *compiler) withSessions() (inside, outside []netip.Prefix) {
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, 32) }
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.DNAT:
			outside = append(outside, host(a.Address))
			for _, t := range a.Targets {
				inside = append(inside, host(t.Address))
			}
		case rulefile.Map:
			if !a.Stateless {
				inside, outside = append(inside, a.Inside), append(outside, a.Outside)
			}
		case rulefile.Masquerade, rulefile.SNAT:
			inside = append(inside, sourceOf(r))
		}
	}
	for _, prefixes := range [][]netip.Prefix{inside, outside} {
		slices.SortFunc(prefixes, netip.Prefix.Compare)
	}
	return inside, outside
}

// among gives those of some prefixes, which are sorted, that are a part of another, or its one host.
func among(of netip.Prefix, sorted []netip.Prefix) (spans []span) {
	all := rulefile.RangeOf(of)
	first := number(all.First)
	byFirst := func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) }
	next, _ := slices.BinarySearchFunc(sorted, all.First, byFirst)
	for ; next < len(sorted) && all.Contains(sorted[next].Addr()); next++ {
		if p := sorted[next]; p.Bits() > of.Bits() || singleHost(p) {
			part := rulefile.RangeOf(p)
			spans = append(spans, span{first: number(part.First) - first, last: number(part.Last) - first})
		}
	}
	return spans
}

// hostsText lists the first of some hosts of a network.
func hostsText(network netip.Prefix, hosts []span) string {
	const most = 5
	var texts []string
	for _, h := range hosts[:min(len(hosts), most)] {
		texts = append(texts, onSide(network, h).String())
	}
	if len(hosts) > most {
		texts = append(texts, "...")
	}
	return strings.Join(texts, ", ")
}

// onSide is the hosts of those numbers on a side of a map.
func onSide(side netip.Prefix, hosts span) rulefile.AddressRange {
	all := rulefile.RangeOf(side)
	return rulefile.AddressRange{First: all.At(int(hosts.first)), Last: all.At(int(hosts.last))}
}

// sessionSpans are the addresses of a map, on a side of it, that have sessions by it.
func (c *compiler) sessionSpans(rule int, side netip.Prefix) (spans []span) {
	if !isStateless(&c.file.Rules[rule]) {
		all := rulefile.RangeOf(side)
		return []span{{number(all.First), number(all.Last), side.Bits(), rule}}
	}
	for _, h := range c.tracked[rule] {
		part := onSide(side, h)
		spans = append(spans, span{number(part.First), number(part.Last), side.Bits(), rule})
	}
	return spans
}

// statelessSpans are the others, of a stateless map.
func (c *compiler) statelessSpans(rule int, side netip.Prefix) (spans []span) {
	all := rulefile.RangeOf(side)
	next := uint64(number(all.First))
	for _, h := range c.sessionSpans(rule, side) {
		if next < uint64(h.first) {
			spans = append(spans, span{uint32(next), h.first - 1, side.Bits(), rule})
		}
		next = uint64(h.last) + 1
	}
	if next <= uint64(number(all.Last)) {
		spans = append(spans, span{uint32(next), number(all.Last), side.Bits(), rule})
	}
	return spans
}
