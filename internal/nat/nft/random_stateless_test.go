// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"net/netip"
	"slices"

	"natkit/internal/nat/rulefile"
)

// statelessMaps are the stateless maps of a file as docs/rules.md has engine nft take them: they come
// before all other rules, except for hosts that have sessions by them.
type statelessMaps struct {
	f       *rulefile.File
	maps    []*rulefile.Rule
	tracked map[*rulefile.Rule][]netip.Prefix // hosts that have sessions by a map
}

func statelessOf(f *rulefile.File) statelessMaps {
	s := statelessMaps{f: f, tracked: map[*rulefile.Rule][]netip.Prefix{}}
	var inside, outside []netip.Prefix // what rules with sessions are about
	for i := range f.Rules {
		switch a := f.Rules[i].Action.(type) {
		case rulefile.Masquerade:
			inside = append(inside, a.Source)
		case rulefile.SNAT:
			inside = append(inside, a.Source)
		case rulefile.DNAT:
			outside = append(outside, netip.PrefixFrom(a.Address, 32))
			for _, t := range a.Targets {
				inside = append(inside, netip.PrefixFrom(t.Address, 32))
			}
		case rulefile.Map:
			if a.Stateless {
				s.maps = append(s.maps, &f.Rules[i])
			} else {
				inside, outside = append(inside, a.Inside), append(outside, a.Outside)
			}
		}
	}
	for found := true; found; {
		found = false
		for _, r := range s.maps {
			m := r.Action.(rulefile.Map)
			var parts []netip.Prefix
			for _, p := range inside {
				if within(p, m.Inside) {
					parts = append(parts, p)
				}
			}
			for _, p := range outside {
				if within(p, m.Outside) {
					parts = append(parts, netip.PrefixFrom(atSamePlace(p.Addr(), m.Outside, m.Inside), p.Bits()))
				}
			}
			for _, p := range parts {
				if !slices.Contains(s.tracked[r], p) {
					found = true
					s.tracked[r] = append(s.tracked[r], p)
					inside = append(inside, p)
					outside = append(outside, netip.PrefixFrom(atSamePlace(p.Addr(), m.Inside, m.Outside), p.Bits()))
				}
			}
		}
	}
	return s
}

// within reports whether a prefix is a part of another, or the same.
func within(p, of netip.Prefix) bool { return of.Contains(p.Addr()) && p.Bits() >= of.Bits() }

// isTracked reports whether a host of a stateless map has sessions by it.
func (s statelessMaps) isTracked(r *rulefile.Rule, inside netip.Addr) bool {
	return slices.ContainsFunc(s.tracked[r], func(p netip.Prefix) bool { return p.Contains(inside) })
}

// ofSource is the map that rewrites what a host sends, nil if there is none.
func (s statelessMaps) ofSource(a netip.Addr) (best *rulefile.Rule) {
	bits := -1
	for _, r := range s.maps {
		if m := r.Action.(rulefile.Map); m.Inside.Contains(a) && m.Inside.Bits() > bits && !s.isTracked(r, a) {
			best, bits = r, m.Inside.Bits()
		}
	}
	return best
}

// ofDestination is the map that rewrites what is for an external address; nil, and whether a rule with
// sessions is as special or more so.
func (s statelessMaps) ofDestination(a netip.Addr) (best *rulefile.Rule, sessions bool) {
	rank := -1
	consider := func(r *rulefile.Rule, bits int, with bool) {
		if n := 2 * bits; with && n+1 > rank || n > rank {
			best, sessions, rank = r, with, n
			if with { // of equal prefixes that one
				best, rank = nil, n+1
			}
		}
	}
	for i := range s.f.Rules {
		r := &s.f.Rules[i]
		switch action := r.Action.(type) {
		case rulefile.DNAT:
			if action.Address == a {
				consider(r, 32, true)
			}
		case rulefile.Map:
			if action.Outside.Contains(a) {
				consider(r, action.Outside.Bits(), !action.Stateless || s.isTracked(r, atSamePlace(a, action.Outside, action.Inside)))
			}
		}
	}
	return best, sessions
}

// rewrite makes of a packet what stateless maps make of it, if they do.
func (s statelessMaps) rewrite(o *outcome, p rulefile.Packet) bool {
	out := (routes{}).Egress(p.Source, p.Destination)
	to, sessions := s.ofDestination(p.Destination)
	hosts := s.f.InsideHosts()
	among := s.f.IsOneArmed(out) && isInside(s.f, p.In, p.Source) && slices.ContainsFunc(hosts, func(h netip.Prefix) bool { return h.Contains(p.Destination) })
	switch {
	case !s.f.IsInside(p.In) && !s.f.IsOutside(p.In), sessions, among, s.excluded(p), s.f.IsInside(p.In) && s.given(p.Destination):
		return false
	}
	if to != nil && to.Action.(rulefile.Map).IsIdentity() && s.f.IsInside(p.In) && s.f.IsInside(out) {
		return false // one internal host sends to another, which keeps its address
	}
	from := s.ofSource(p.Source)
	if to == nil && (from == nil || !s.f.IsInside(p.In) || !s.f.IsOutside(out) || (routes{}).IsLocal(p.Destination)) {
		return false
	}
	o.stateless, o.source, o.destination = true, from, to
	if from != nil {
		m := from.Action.(rulefile.Map)
		o.src = single(atSamePlace(p.Source, m.Inside, m.Outside))
	}
	if to != nil {
		o.dst = destined(to, o.dst[0])
	}
	return true
}

func (s statelessMaps) excluded(p rulefile.Packet) bool {
	return slices.ContainsFunc(s.f.Rules, func(r rulefile.Rule) bool {
		a, ok := r.Action.(rulefile.Exclude)
		return ok && a.Source.Contains(p.Source) && a.Destination.Contains(p.Destination) &&
			(a.Protocol == rulefile.AnyProtocol || a.Protocol == p.Protocol) && (a.Ports.IsZero() || a.Ports.Contains(p.DestinationPort))
	})
}

// given reports whether hosts share an external address.
func (s statelessMaps) given(a netip.Addr) bool {
	has := func(r rulefile.AddressRange) bool { return r.Contains(a) }
	return slices.ContainsFunc(s.f.Pools, func(p rulefile.Pool) bool { return slices.ContainsFunc(p.Addresses, has) }) ||
		slices.ContainsFunc(s.f.Rules, func(r rulefile.Rule) bool {
			_, ok := r.Action.(rulefile.Map)
			return !ok && slices.ContainsFunc(r.OutsideAddresses(), has)
		})
}

// sessions is the file for a packet that no stateless map rewrites: of these it has what has sessions.
// Who is inside stays as it is.
func (s statelessMaps) sessions(p rulefile.Packet) *rulefile.File {
	with := func(keep func(r *rulefile.Rule, m rulefile.Map) bool, also ...rulefile.Rule) *rulefile.File {
		f := *s.f
		f.Rules = also
		for i := range s.f.Rules {
			r := s.f.Rules[i]
			if m, ok := r.Action.(rulefile.Map); ok && m.Stateless {
				m.Stateless = false
				if r.Action = m; !keep(&s.f.Rules[i], m) {
					r = rulefile.Rule{Action: rulefile.Masquerade{Source: m.Inside}, In: "none"}
				}
			}
			f.Rules = append(f.Rules, r)
		}
		return &f
	}
	forSource := func(r *rulefile.Rule, m rulefile.Map) bool {
		return m.Inside.Contains(p.Source) && s.isTracked(r, p.Source)
	}
	forDestination := with(func(r *rulefile.Rule, m rulefile.Map) bool {
		return m.Outside.Contains(p.Destination) && s.isTracked(r, atSamePlace(p.Destination, m.Outside, m.Inside))
	})
	var one []rulefile.Rule // the map for the destination, if it is none for the source
	for _, step := range rulefile.Explain(forDestination, p, routes{}) {
		if step.Stage != rulefile.StageDestination || !step.Applies {
			continue
		}
		for _, r := range s.maps {
			m := r.Action.(rulefile.Map)
			if a, ok := step.Rule.Action.(rulefile.Map); ok && a.Inside == m.Inside && a.Outside == m.Outside && !forSource(r, m) {
				host := atSamePlace(p.Destination, m.Outside, m.Inside)
				one = append(one, rulefile.Rule{In: r.In, Out: r.Out, Action: rulefile.Map{Inside: netip.PrefixFrom(host, 32), Outside: netip.PrefixFrom(p.Destination, 32)}})
			}
		}
	}
	return with(forSource, one...)
}
