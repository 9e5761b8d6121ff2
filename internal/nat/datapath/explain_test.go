// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"natkit/internal/nat/rulefile"
)

// lookups are those of bpf/nat/rule.h, plainly, over the tables that Compile made.
type lookups struct {
	*Tables
	p    rulefile.Packet
	link int // the ingress interface
}

func (l lookups) asks(bit abiNatLookup) bool { return l.Config.Lookups&uint32(bit) != 0 }

func (l lookups) excluded() bool {
	class := func(keys map[abiNatPrefixKey]uint32, a netip.Addr) (uint32, bool) {
		for bits := 32; bits >= 0; bits-- {
			if n, ok := keys[abiNatPrefixKey{Prefixlen: uint32(bits), Addr: octets(netip.PrefixFrom(a, bits).Masked().Addr())}]; ok {
				return n, true
			}
		}
		return 0, false
	}
	src, okSrc := class(l.ExcludeSrc, l.p.Source)
	dst, okDst := class(l.ExcludeDst, l.p.Destination)
	if !l.asks(abiNatLookupNAT_LOOKUP_EXCLUDE) || !okSrc || !okDst {
		return false
	}
	keys := []abiNatExcludeKey{{Src: src, Dst: dst}}
	if l.asks(abiNatLookupNAT_LOOKUP_EXCLUDE_PORT) {
		keys = append(keys, abiNatExcludeKey{Src: src, Dst: dst, Protocol: uint8(l.p.Protocol)},
			abiNatExcludeKey{Src: src, Dst: dst, Protocol: uint8(l.p.Protocol), Port: bigEndian(l.p.DestinationPort)})
	}
	return slices.ContainsFunc(keys, func(k abiNatExcludeKey) bool { _, ok := l.Excludes[k]; return ok })
}

// destination is the destination rule, nil if there is none.
func (l lookups) destination() *abiNatRule {
	for _, step := range []struct {
		bit      abiNatLookup
		bound    bool
		protocol bool
		find     func(link int, protocol rulefile.Protocol) (uint32, bool)
	}{
		{abiNatLookupNAT_LOOKUP_EXACT_LINK, true, true, l.exact},
		{abiNatLookupNAT_LOOKUP_EXACT, false, true, l.exact},
		{abiNatLookupNAT_LOOKUP_RANGE_LINK, true, true, l.byRange},
		{abiNatLookupNAT_LOOKUP_RANGE, false, true, l.byRange},
		{abiNatLookupNAT_LOOKUP_PREFIX_PROTOCOL_LINK, true, true, l.byPrefix},
		{abiNatLookupNAT_LOOKUP_PREFIX_LINK, true, false, l.byPrefix},
		{abiNatLookupNAT_LOOKUP_PREFIX_PROTOCOL, false, true, l.byPrefix},
		{abiNatLookupNAT_LOOKUP_PREFIX, false, false, l.byPrefix},
	} {
		link, protocol := -1, rulefile.AnyProtocol
		if step.bound {
			link = l.link
		}
		if step.protocol {
			protocol = l.p.Protocol
		}
		if !l.asks(step.bit) {
			continue
		}
		if index, ok := step.find(link, protocol); ok {
			return &l.Rules[index]
		}
	}
	return nil
}

// target is where a destination rule sends the packet; without one it is not moved.
func (l lookups) target(r *abiNatRule) netip.Addr {
	switch {
	case r == nil:
		return l.p.Destination
	case r.Kind == uint8(abiNatRuleKindNAT_RULE_FORWARD):
		return netip.AddrFrom4(l.Targets[r.Targets].Addr.Octet)
	}
	return mapAddress(l.p.Destination, netip.PrefixFrom(netip.AddrFrom4(r.To.Octet), int(r.Prefix)))
}

// inside is session_side of bpf/nat/session.h.
func (l lookups) inside(link Link, a netip.Addr) bool {
	if !link.Inside || !link.Outside {
		return link.Inside
	}
	for bits := 32; bits >= 0; bits-- {
		_, ok := l.Destinations[abiNatDestinationKey{
			Prefixlen: uint32(32 + bits), Kind: uint8(abiNatDestinationKindNAT_INTERNAL_HOSTS), Addr: octets(netip.PrefixFrom(a, bits).Masked().Addr()),
		}]
		if ok {
			return true
		}
	}
	return false
}

func (l lookups) exact(link int, protocol rulefile.Protocol) (uint32, bool) {
	index, ok := l.Exact[abiNatExactKey{Addr: octets(l.p.Destination), Port: bigEndian(l.p.DestinationPort), Protocol: uint8(protocol), Link: uint32(link + 1)}]
	return index, ok
}

func (l lookups) byRange(link int, protocol rulefile.Protocol) (uint32, bool) {
	for bits := 16; bits >= 0; bits-- {
		index, ok := l.Destinations[abiNatDestinationKey{
			Prefixlen: uint32(64 + bits), Link: bigEndian(uint16(link + 1)), Kind: uint8(abiNatDestinationKindNAT_BY_RANGE), Protocol: uint8(protocol),
			Addr: octets(l.p.Destination), Port: bigEndian(uint16(uint32(l.p.DestinationPort) >> (16 - bits) << (16 - bits))),
		}]
		if ok {
			return index, true
		}
	}
	return 0, false
}

func (l lookups) byPrefix(link int, protocol rulefile.Protocol) (uint32, bool) {
	for bits := 32; bits >= 0; bits-- {
		index, ok := l.Destinations[abiNatDestinationKey{
			Prefixlen: uint32(32 + bits), Link: bigEndian(uint16(link + 1)), Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Protocol: uint8(protocol),
			Addr: octets(netip.PrefixFrom(l.p.Destination, bits).Masked().Addr()),
		}]
		if ok {
			return index, true
		}
	}
	return 0, false
}

// source is the id of the source rule towards a link, 0 if there is none.
func (l lookups) source(out int) uint32 {
	for _, step := range []struct {
		bit     abiNatLookup
		in, out int
	}{
		{abiNatLookupNAT_LOOKUP_SOURCE_IN_OUT, l.link, out},
		{abiNatLookupNAT_LOOKUP_SOURCE_OUT, -1, out},
		{abiNatLookupNAT_LOOKUP_SOURCE_IN, l.link, -1},
		{abiNatLookupNAT_LOOKUP_SOURCE, -1, -1},
	} {
		if !l.asks(step.bit) {
			continue
		}
		if index := trieLookup(l.Tables, step.in, step.out, l.p.Source); index >= 0 {
			return l.Rules[index].Id
		}
	}
	return 0
}

// somewhere is a machine whose routes and networks are what a test says.
type somewhere struct{ way, link string }

func (s somewhere) Egress(_, _ netip.Addr) string { return s.way }
func (s somewhere) LinkOf(netip.Addr) string      { return s.link }
func (s somewhere) IsLocal(netip.Addr) bool       { return false }

// randomRules are rules about few addresses, so that many are about the same ones. What
// would tie is left out.
func randomRules(rng *rand.Rand, armed bool) *rulefile.File {
	f := gatewayFile()
	if armed {
		f.Inside = append(f.Inside, "wan")
	}
	link := func(names ...string) string { return names[rng.IntN(len(names))] }
	prefix := func(net byte) netip.Prefix {
		return netip.PrefixFrom(few(rng, net), 24+rng.IntN(9)).Masked()
	}
	for range 1 + rng.IntN(16) {
		var r rulefile.Rule
		switch rng.IntN(8) {
		case 0:
			r = rulefile.Rule{Action: rulefile.Masquerade{Source: prefix(10)}, In: link("", "eth1", "eth2"), Out: link("", "", "eth0", "wan", "eth2")}
		case 1, 2:
			r = rulefile.Rule{Action: rulefile.SNAT{Source: prefix(10), Pool: "office"}, In: link("", "eth1", "eth2"), Out: link("", "", "eth0", "wan", "eth1")}
		case 3:
			bits := 26 + rng.IntN(7)
			r = rulefile.Rule{Action: rulefile.Map{
				Inside: netip.PrefixFrom(few(rng, 10), bits).Masked(), Outside: netip.PrefixFrom(few(rng, 100), bits).Masked(), Stateless: rng.IntN(2) == 0,
			}, In: link("", "", "eth1", "eth2"), Out: link("", "", "eth0", "wan")}
		case 4:
			a := rulefile.Exclude{Source: prefix(10), Destination: prefix(100), Protocol: rulefile.Protocol([]uint8{0, 6, 17}[rng.IntN(3)])}
			if a.Protocol != 0 && rng.IntN(2) == 0 {
				a.Ports = rulefile.PortRange{First: 80, Last: uint16(80 + rng.IntN(3))}
			}
			r = rulefile.Rule{Action: a}
		default:
			a := rulefile.DNAT{Protocol: []rulefile.Protocol{rulefile.TCP, rulefile.UDP}[rng.IntN(2)], Address: few(rng, 100), Targets: []rulefile.Target{{Address: few(rng, 10)}}}
			switch first := uint16(79 + rng.IntN(4)); rng.IntN(4) {
			case 0:
				a.Ports = rulefile.PortRange{First: first, Last: first}
			case 1:
				a.Ports = rulefile.PortRange{First: first, Last: first + uint16(1+rng.IntN(5))}
			case 2:
				a.Protocol = rulefile.AnyProtocol
			}
			r = rulefile.Rule{Action: a, In: link("", "", "eth1", "eth2", "eth0", "wan")}
		}
		f.Rules = append(f.Rules, r)
		if f.Validate() != nil {
			f.Rules = f.Rules[:len(f.Rules)-1]
		}
	}
	return f
}

func few(rng *rand.Rand, net byte) netip.Addr {
	return netip.AddrFrom4([4]byte{net, 0, 0, byte(1 + rng.IntN(6))})
}

// The rules that the look-ups of bpf/nat/rule.h find are those that the precedence asks
// for, as Explain reads it.
func TestLookupsFindWhatExplainTells(t *testing.T) {
	const seeds = 600
	found := map[rulefile.Stage]int{}
	for seed := range uint64(seeds) {
		rng := rand.New(rand.NewPCG(seed, 3))
		facts, armed := machine(), seed%3 == 0
		facts.Links[3].Inside = armed
		f := randomRules(rng, armed)
		tables := mustCompile(t, f, facts)
		ids := map[*rulefile.Rule]rulefile.RuleID{}
		for i, id := range f.RuleIDs() {
			ids[&f.Rules[i]] = id
		}
		for range 100 {
			links := facts.Links
			l := lookups{Tables: tables, link: rng.IntN(len(links)), p: rulefile.Packet{
				Protocol: []rulefile.Protocol{rulefile.TCP, rulefile.UDP, rulefile.ICMP}[rng.IntN(3)], Source: few(rng, 10), Destination: few(rng, 100),
			}}
			if armed && rng.IntN(3) == 0 {
				l.p.Destination = few(rng, 10)
			}
			if l.p.Source == l.p.Destination {
				continue
			}
			l.p.In = links[l.link].Name
			if l.p.Protocol != rulefile.ICMP {
				l.p.SourcePort, l.p.DestinationPort = 40000, uint16(78+rng.IntN(9))
			}
			way, addressed := rng.IntN(len(links)), 2+rng.IntN(2)
			steps := rulefile.Explain(f, l.p, somewhere{links[way].Name, links[addressed].Name})
			applies := map[rulefile.Stage]uint32{}
			for _, s := range steps {
				if s.Applies {
					applies[s.Stage] = uint32(ids[s.Rule])
					found[s.Stage]++
				}
			}
			got := map[rulefile.Stage]uint32{}
			note := func(stage rulefile.Stage, id uint32) {
				if id != 0 {
					got[stage] = id
				}
			}
			excluded := l.excluded()
			if excluded {
				note(rulefile.StageExclude, applies[rulefile.StageExclude]) // which of several is no matter
			} else {
				destination := l.destination()
				inside, translated := l.inside(links[l.link], l.p.Source), destination != nil
				if translated {
					note(rulefile.StageDestination, destination.Id)
				}
				toInside := l.inside(links[way], l.target(destination))
				among := inside && toInside && !translated && links[way].Inside && links[way].Outside
				if inside && translated && toInside {
					way = addressed
				}
				given := slices.ContainsFunc(tables.Addresses, func(a ExternalAddress) bool { return a.Addr == l.p.Destination && !a.Owned })
				if translated || inside && !given && !among {
					note(rulefile.StageSource, l.source(way))
				}
			}
			if _, told := applies[rulefile.StageExclude]; told != excluded || !maps.Equal(got, applies) {
				t.Fatalf("seed %d: %s by %s: excluded %t, rules %v\nExplain: %+v\n%s", seed, l.p, links[way].Name, excluded, got, steps, f.Text())
			}
		}
	}
	for _, stage := range []rulefile.Stage{rulefile.StageExclude, rulefile.StageDestination, rulefile.StageSource} {
		if found[stage] < seeds {
			t.Errorf("only %d packets had a rule at stage %s", found[stage], stage)
		}
	}
}
