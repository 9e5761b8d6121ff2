// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"net/netip"
	"slices"

	"natkit/internal/nat/rulefile"
)

// Of a packet's rules the most special decides (rulefile.Explain), where of items the first
// does. So a rule whose packets an earlier one wants is placed with a copy of that one,
// made as special, for the packets that both are for.

// placed is a rule and what it was made of.
type placed struct {
	rule  rulefile.Rule
	it    *item
	order int // of the item
}

// maxPlaced bounds what copies can grow to.
const maxPlaced = 300_000

// placement are the rules so far.
type placement struct {
	rules        []placed
	keys         map[string]bool
	destinations map[netip.Addr][]int // indices of dnat
	sources      []int
}

// place adds a rule of an item.
func (i *importer) place(it *item, rule rulefile.Rule) {
	i.placeBefore(placed{rule, it, i.orderOf(it)})
}

// orderOf numbers the items as they come.
func (i *importer) orderOf(it *item) int {
	if n, ok := i.orders[it]; ok {
		return n
	}
	i.orders[it] = len(i.orders)
	return i.orders[it]
}

func (i *importer) placeBefore(p placed) {
	s := &i.placement
	if len(s.rules) >= maxPlaced {
		i.note(Note{Why: "the rules overlap in too many ways: not all were taken over", Lost: true})
		return
	}
	switch a := p.rule.Action.(type) {
	case rulefile.DNAT:
		for k := 0; k < len(s.destinations[a.Address]); k++ {
			e := s.rules[s.destinations[a.Address][k]]
			if e.order < p.order && !i.besideDestination(e, p) {
				return
			}
		}
		s.destinations[a.Address] = append(s.destinations[a.Address], len(s.rules))
	case rulefile.Exclude:
	default:
		for k := 0; k < len(s.sources); k++ {
			e := s.rules[s.sources[k]]
			if e.order < p.order && !i.besideSource(e, p) {
				return
			}
		}
		if !s.keys[p.rule.Key()] {
			s.sources = append(s.sources, len(s.rules))
		}
	}
	if key := p.rule.Key(); !s.keys[key] {
		s.keys[key] = true
		s.rules = append(s.rules, p)
	} else if a, ok := p.rule.Action.(rulefile.DNAT); ok {
		s.destinations[a.Address] = s.destinations[a.Address][:len(s.destinations[a.Address])-1]
	}
}

// besideDestination makes room for an earlier rule; it reports whether the later one is still
// to be placed.
func (i *importer) besideDestination(early, late placed) bool {
	e, l := early.rule.Action.(rulefile.DNAT), late.rule.Action.(rulefile.DNAT)
	in, ok1 := meetLink(early.rule.In, late.rule.In)
	protocol, ok2 := meetProtocol(e.Protocol, l.Protocol)
	ports, ok3 := meetPorts(e.Ports, l.Ports)
	if !ok1 || !ok2 || !ok3 {
		return true
	}
	switch c := slices.Compare(rankDestination(early.rule), rankDestination(late.rule)); {
	case c > 0:
		return true
	case c == 0 && e.Ports.Count() < 2:
		return false // the same packets
	case c == 0:
		for _, rest := range withoutPorts(l.Ports, e.Ports) {
			part := late
			part.rule.Action = destinationOnly(l, rest)
			i.placeBefore(part)
		}
		return false
	}
	both := early
	both.rule.In = in
	a := destinationOnly(e, ports)
	a.Protocol = protocol
	both.rule.Action = a
	if in == late.rule.In && protocol == l.Protocol && ports == l.Ports {
		return false // the early one has all of them
	}
	i.placeBefore(both)
	return true
}

// destinationOnly is the rule for some of its ports.
func destinationOnly(a rulefile.DNAT, ports rulefile.PortRange) rulefile.DNAT {
	targets := slices.Clone(a.Targets)
	for k := range targets {
		if t := &targets[k]; !t.Ports.IsZero() && !ports.IsZero() {
			first := t.Ports.First + (ports.First - a.Ports.First)
			t.Ports = rulefile.PortRange{First: first, Last: first + (ports.Last - ports.First)}
		}
	}
	a.Ports, a.Targets = ports, targets
	return a
}

// besideSource is besideDestination for rules that translate sources.
func (i *importer) besideSource(early, late placed) bool {
	e, l := early.rule, late.rule
	in, ok1 := meetLink(e.In, l.In)
	out, ok2 := meetLink(e.Out, l.Out)
	if _, isMap := e.Action.(rulefile.Map); isMap {
		in, ok1 = e.In, holds(e.In, l.In)
		out, ok2 = e.Out, holds(e.Out, l.Out)
	}
	src, other := sourceOf(&e), sourceOf(&l)
	if !ok1 || !ok2 || !src.Overlaps(other) || e.Out == "" && i.file.IsInside(l.Out) || l.Out == "" && i.file.IsInside(e.Out) {
		return true
	}
	if src.Bits() < other.Bits() {
		src = other
	}
	if slices.Compare(rankSource(e), rankSource(l)) > 0 {
		return true
	}
	both := early
	both.rule.In, both.rule.Out = in, out
	if in == l.In && out == l.Out && src == other {
		return false
	}
	switch a := e.Action.(type) {
	case rulefile.Masquerade:
		a.Source = src
		both.rule.Action = a
	case rulefile.SNAT:
		a.Source = src
		both.rule.Action = a
	default:
		return true
	}
	i.placeBefore(both)
	return true
}

// rankDestination and rankSource rank as rulefile.Explain does.
func rankDestination(r rulefile.Rule) []int {
	a := r.Action.(rulefile.DNAT)
	bound := truth(r.In != "")
	switch a.Ports.Count() {
	case 0:
		return []int{0, bound, truth(a.Protocol != rulefile.AnyProtocol)}
	case 1:
		return []int{2, bound, 0}
	}
	return []int{1, bound, 0}
}

func rankSource(r rulefile.Rule) []int {
	return []int{truth(r.Out != ""), truth(r.In != ""), sourceOf(&r).Bits()}
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// holds reports whether a binding to an interface is for all packets of another.
func holds(a, b string) bool { return a == "" || a == b }

func meetLink(a, b string) (string, bool) { return cmp.Or(a, b), a == "" || b == "" || a == b }

func meetProtocol(a, b rulefile.Protocol) (rulefile.Protocol, bool) {
	return cmp.Or(a, b), a == rulefile.AnyProtocol || b == rulefile.AnyProtocol || a == b
}

// meetPorts is the ports of both; none are all.
func meetPorts(a, b rulefile.PortRange) (rulefile.PortRange, bool) {
	switch {
	case a.IsZero():
		return b, true
	case b.IsZero():
		return a, true
	}
	return rulefile.PortRange{First: max(a.First, b.First), Last: min(a.Last, b.Last)}, a.Overlaps(b)
}

// withoutPorts is the ports of a that are not of b.
func withoutPorts(a, b rulefile.PortRange) []rulefile.PortRange {
	var out []rulefile.PortRange
	if a.First < b.First {
		out = append(out, rulefile.PortRange{First: a.First, Last: b.First - 1})
	}
	if b.Last < a.Last {
		out = append(out, rulefile.PortRange{First: b.Last + 1, Last: a.Last})
	}
	return out
}

// finish puts the rules into the file.
func (i *importer) finish() {
	for _, p := range i.placement.rules {
		i.file.Rules = append(i.file.Rules, p.rule)
		i.origins = append(i.origins, p.it)
	}
}
