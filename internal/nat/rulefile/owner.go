// SPDX-License-Identifier: Apache-2.0

// Whose an external endpoint is by the rules alone: static translations and computed port blocks
// (computed.go). What rules give away as they see fit is not in them, and only a log knows.

package rulefile

import (
	"net/netip"
	"slices"
)

// Owner is who has an external endpoint by the rules alone.
type Owner struct {
	// Rule is a dnat rule or a map; nil: the endpoint is in Block.
	Rule *Rule
	// Internal are the endpoints that the rule sends it to: of several, the client's address
	// chooses one.
	Internal []netip.AddrPort
	Block    ComputedBlock
}

// Owners tells whose an external endpoint is by the rules alone, with the precedence of rules.
// Rules may differ by protocol and interface, so there can be several. AnyProtocol asks for all.
func (f *File) Owners(end netip.AddrPort, protocol Protocol) (owners []Owner) {
	if !end.Addr().Is4() {
		return nil
	}
	var about []*Rule
	named := []Protocol{protocol}
	for i := range f.Rules {
		r := &f.Rules[i]
		if a, ok := r.Action.(DNAT); ok && a.Address == end.Addr() && protocol == AnyProtocol && !slices.Contains(named, a.Protocol) {
			named = append(named, a.Protocol)
		}
		for _, have := range r.OutsideAddresses() {
			if have.Contains(end.Addr()) {
				about = append(about, r)
			}
		}
	}
	var found []*Rule
	static := len(about) > 0
	for _, p := range named {
		for _, in := range f.Outside {
			switch r := f.destined(about, Packet{In: in, Protocol: p, Destination: end.Addr(), DestinationPort: end.Port()}); {
			case r == nil:
				static = false
			case !slices.Contains(found, r):
				found = append(found, r)
			}
		}
	}
	for _, r := range found {
		owners = append(owners, Owner{Rule: r, Internal: r.internal(end)})
	}
	if b, ok := f.ComputedOwner(end); ok && !static && (protocol == AnyProtocol || protocol.Class() != ClassOther) {
		owners = append(owners, Owner{Block: b})
	}
	return owners
}

// destined is the rule of some that translates a packet's destination, whoever sent it.
func (f *File) destined(rules []*Rule, p Packet) (best *Rule) {
	p.Source = Everywhere.Addr()
	e := explanation{f: f, p: p}
	for i := range f.Rules {
		if a, ok := f.Rules[i].Action.(Exclude); ok && a.Source.Bits() == 0 {
			if v := e.excludes(&f.Rules[i]); v.about && v.not == "" {
				return nil
			}
		}
	}
	var rank [4]int
	for _, r := range rules {
		if v := e.destines(r); v.about && v.not == "" && (best == nil || slices.Compare(v.rank[:], rank[:]) > 0) {
			best, rank = r, v.rank
		}
	}
	return best
}

// internal is where a rule sends an external endpoint that it is for.
func (r *Rule) internal(end netip.AddrPort) (ends []netip.AddrPort) {
	switch a := r.Action.(type) {
	case Map:
		ends = append(ends, netip.AddrPortFrom(moved(end.Addr(), a.Inside), end.Port()))
	case DNAT:
		for _, t := range a.Targets {
			ends = append(ends, a.toTarget(t, end.Port()))
		}
	}
	return ends
}
