// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"math/bits"
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
	inside, outside := c.withSessions()
	// What has sessions by a map has none by another stateless one, of which other hosts may have
	// them for that.
	for known := -1; known < len(inside)+len(outside); {
		known = len(inside) + len(outside)
		c.trackParts(inside, outside)
		for i, parts := range c.tracked {
			m := c.file.Rules[i].Action.(rulefile.Map)
			for _, part := range parts {
				inside, outside = append(inside, prefixOn(m.Inside, part)), append(outside, prefixOn(m.Outside, part))
			}
		}
		inside, outside = sortedOnce(inside), sortedOnce(outside)
	}
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		if c.tracked[i] == nil {
			continue
		}
		c.tracked[i] = flatten(c.tracked[i])
		c.warn(r.Position, "hosts of a stateless map that other rules are about have sessions, so both directions must come by this gateway: %s", hostsText(sourceOf(r), c.tracked[i]))
	}
}

// trackParts finds those that are about these addresses. Each part is a prefix's.
func (c *compiler) trackParts(inside, outside []netip.Prefix) {
	c.tracked = map[int][]span{}
	for i := range c.file.Rules {
		if r := &c.file.Rules[i]; isStateless(r) {
			m := r.Action.(rulefile.Map)
			if spans := append(among(m.Inside, inside), among(m.Outside, outside)...); spans != nil {
				c.tracked[i] = spans
			}
		}
	}
}

// prefixOn is the prefix of a part on a side of a map.
func prefixOn(side netip.Prefix, part span) netip.Prefix {
	return netip.PrefixFrom(onSide(side, part).First, 32-bits.Len32(part.last-part.first))
}

func sortedOnce(prefixes []netip.Prefix) []netip.Prefix {
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	return slices.Compact(prefixes)
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
	return sortedOnce(inside), sortedOnce(outside)
}

// among gives those of some prefixes, which are sorted, that are a part of another, or all of it: what
// is equal is bound to interfaces, so more special.
func among(of netip.Prefix, sorted []netip.Prefix) (spans []span) {
	all := rulefile.RangeOf(of)
	first := number(all.First)
	byFirst := func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) }
	next, _ := slices.BinarySearchFunc(sorted, all.First, byFirst)
	for ; next < len(sorted) && all.Contains(sorted[next].Addr()); next++ {
		if p := sorted[next]; p.Bits() >= of.Bits() {
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
