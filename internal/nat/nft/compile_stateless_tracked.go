// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"math/bits"
	"net/netip"
	"strings"

	"natkit/internal/nat/rulefile"
)

// Whether a packet of a host is a reply to what a rule with sessions has translated is not known
// before connection tracking, where stateless maps rewrite. So hosts of such a map that a rule
// with sessions is about have sessions by the map, too; its other hosts have none.

// trackHosts finds these hosts of each stateless map, as numbers from its first address: those with
// a more special source rule or map, targets of forwards, and hosts of which an external address is
// forwarded. What has sessions by a map has none by another stateless one, of which other hosts may
// have them for that: each such prefix is asked about once, on its side, of the at most 33 maps
// around it.
func (c *compiler) trackHosts() {
	c.tracked = map[int][]span{}
	maps := map[hostsOn]int{} // no two have the same side: statelessTwice
	for i := range c.file.Rules {
		if r := &c.file.Rules[i]; isStateless(r) {
			m := r.Action.(rulefile.Map)
			maps[hostsOn{m.Inside, false}], maps[hostsOn{m.Outside, true}] = i, i
		}
	}
	waiting := c.withSessions()
	known := map[hostsOn]bool{}
	for len(waiting) > 0 {
		hosts := waiting[len(waiting)-1]
		waiting = waiting[:len(waiting)-1]
		if known[hosts] {
			continue
		}
		known[hosts] = true
		for bits := range hosts.prefix.Bits() + 1 {
			side := netip.PrefixFrom(hosts.prefix.Addr(), bits).Masked()
			if i, ok := maps[hostsOn{side, hosts.outside}]; ok {
				part := partOf(side, hosts.prefix)
				c.tracked[i] = append(c.tracked[i], part)
				m := c.file.Rules[i].Action.(rulefile.Map)
				waiting = append(waiting, hostsOn{prefixOn(m.Inside, part), false}, hostsOn{prefixOn(m.Outside, part), true})
			}
		}
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

// hostsOn are internal or external addresses of hosts.
type hostsOn struct {
	prefix  netip.Prefix
	outside bool
}

// partOf is the part of a prefix that another one in it is, as numbers from its first address.
func partOf(side, in netip.Prefix) span {
	first, part := number(side.Addr()), rulefile.RangeOf(in)
	return span{first: number(part.First) - first, last: number(part.Last) - first}
}

// prefixOn is the prefix of a part on a side of a map.
func prefixOn(side netip.Prefix, part span) netip.Prefix {
	return netip.PrefixFrom(onSide(side, part).First, 32-bits.Len32(part.last-part.first))
}

// withSessions are the addresses that rules with sessions are about.
func (c *compiler) withSessions() (hosts []hostsOn) {
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, 32) }
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch a := r.Action.(type) {
		case rulefile.DNAT:
			hosts = append(hosts, hostsOn{host(a.Address), true})
			for _, t := range a.Targets {
				hosts = append(hosts, hostsOn{host(t.Address), false})
			}
		case rulefile.Map:
			if !a.Stateless {
				hosts = append(hosts, hostsOn{a.Inside, false}, hostsOn{a.Outside, true})
			}
		case rulefile.Masquerade, rulefile.SNAT:
			hosts = append(hosts, hostsOn{sourceOf(r), false})
		}
	}
	return hosts
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
