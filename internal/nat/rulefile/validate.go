// SPDX-License-Identifier: Apache-2.0

// What must fit together in a rule file. None of it depends on the machine; what does
// is reported by an engine that compiles the file.

package rulefile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Bounds of a rule file, those of the engine's tables (enum nat_limit of bpf/nat/abi.h).
const (
	MaxLinks     = 255
	MaxPools     = 254   // pools, addresses of snat rules, and interfaces masqueraded behind
	MaxAddresses = 65536 // outside
)

// Validate reports what does not fit together in a file that was not parsed; of one that
// was, all does. Single values it does not look at. An error is of type Problems.
func (f *File) Validate() error {
	r := &reader{collector: collector{name: f.Name}, file: f}
	r.validate()
	if found := r.sorted(); len(found) > 0 {
		return found
	}
	return nil
}

func (r *reader) validate() {
	r.sides()
	r.bindings()
	r.poolsApart()
	r.sourceTies()
	r.destinationTies()
	r.givenPorts()
	r.poolCount()
	r.poolBlocks()
	r.drained()
	r.shares()
	r.zones()
	r.logFits()
	r.explicit()
	r.excludedTwice()
}

// at is where a key of the file is.
func (f *File) at(key string) Position { return f.positions[key] }

// AtKey is a problem with a key of the file, at its place.
func (f *File) AtKey(key, format string, args ...any) error {
	return Problems{{f.Name, f.at(key), fmt.Sprintf(format, args...)}}
}

// AtInterface is a problem with an interface that the file names, at the place where it
// says on which side that is.
func (f *File) AtInterface(name, format string, args ...any) error {
	side := "outside"
	if f.IsInside(name) {
		side = "inside"
	}
	return Problems{{f.Name, f.at(side + "." + name), fmt.Sprintf(format, args...)}}
}

// inLine names the line in a message, if it is known.
func (p Position) inLine() string {
	if p.Line == 0 {
		return ""
	}
	return fmt.Sprintf(" in line %d", p.Line)
}

// --- interfaces ----------------------------------------------------------------------

func (r *reader) sides() {
	f := r.file
	if len(f.Inside) == 0 && f.at("inside").Line == 0 {
		r.add(Position{1, 1}, "key inside is missing: the interfaces of the hosts to be translated")
	}
	if len(f.Outside) == 0 && f.at("outside").Line == 0 {
		r.add(Position{1, 1}, "key outside is missing: the interfaces towards the world")
	}
	r.oneArmed()
	if n := len(f.Inside) + len(f.Outside); n > MaxLinks {
		r.add(f.at("inside"), "%d interfaces, of at most %d", n, MaxLinks)
	}
}

// oneArmed: where an interface is on both sides, rules say by their sources who is inside.
func (r *reader) oneArmed() {
	armed := r.file.OneArmed()
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		if source, ok := rule.source(); ok && source.Bits() == 0 && len(armed) > 0 {
			r.add(rule.Position, "interface %q is inside and outside, so the sources of rules say who is inside: name the prefix of the internal hosts, and not any", armed[0])
		}
	}
}

// bindings: a rule's interfaces are the file's, and on the side where the rule has a
// meaning.
func (r *reader) bindings() {
	side := map[string]string{}
	for _, name := range r.file.Inside {
		side[name] = "inside"
	}
	for _, name := range r.file.Outside {
		side[name] = "outside"
		if r.file.IsInside(name) {
			side[name] = "both"
		}
	}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		known := true
		for _, bound := range []struct{ key, name string }{{"in", rule.In}, {"out", rule.Out}} {
			if bound.name != "" && side[bound.name] == "" {
				r.add(rule.Position, "%s: %q is not among the file's inside and outside interfaces%s", bound.key, bound.name, didYouMean(bound.name, slices.Concat(r.file.Inside, r.file.Outside)))
				known = false
			}
		}
		if !known {
			continue
		}
		switch rule.Action.(type) {
		case Masquerade, SNAT:
			if side[rule.In] == "outside" && side[rule.Out] != "inside" && side[rule.Out] != "both" {
				r.add(rule.Position, "in: %q is an outside interface; sources that come from there are translated only towards an inside one, to be named by out", rule.In)
			}
		case Map:
			if side[rule.In] == "outside" || side[rule.Out] == "inside" {
				r.add(rule.Position, "a map is bound as internal hosts see it: in is an inside interface, out an outside one")
			}
		}
	}
}

// --- addresses -----------------------------------------------------------------------

// claimed is a range of external addresses that nobody else may give away.
type claimed struct {
	AddressRange
	at   Position
	what string
}

// poolsApart: no address is in two pools, nor in a pool and elsewhere given away, nor
// given away and mapped.
func (r *reader) poolsApart() {
	var all []claimed
	given := map[netip.Addr]bool{}
	count := 0
	for i := range r.file.Pools {
		p := &r.file.Pools[i]
		count += p.Count()
		for _, a := range p.Addresses {
			all = append(all, claimed{a, p.Position, "pool " + p.Name})
		}
	}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		switch a := rule.Action.(type) {
		case SNAT:
			if a.Pool == "" && !given[a.Address] {
				given[a.Address] = true
				count++
				all = append(all, claimed{AddressRange{a.Address, a.Address}, rule.Position, "rule snat to " + a.Address.String()})
			}
		case DNAT:
			if !given[a.Address] {
				given[a.Address] = true
				count++
			}
		}
	}
	if count > MaxAddresses {
		r.add(Position{}, "%d external addresses in pools and rules, of at most %d", count, MaxAddresses)
	}
	byAddress(all)
	for i := 1; i < len(all); i++ {
		a, b := all[i-1], all[i]
		if b.First.Compare(a.Last) <= 0 {
			if b.at.Line < a.at.Line {
				a, b = b, a
			}
			r.add(b.at, "%s of %s overlaps %s of %s%s", b.AddressRange, b.what, a.AddressRange, a.what, a.at.inLine())
		}
	}
	r.mappedApart(all)
}

func byAddress(ranges []claimed) {
	slices.SortStableFunc(ranges, func(a, b claimed) int { return a.First.Compare(b.First) })
}

// mappedApart: the outside prefix of a map has none of these addresses, which are
// sorted.
func (r *reader) mappedApart(given []claimed) {
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		a, ok := rule.Action.(Map)
		if !ok {
			continue
		}
		outside := RangeOf(a.Outside)
		next, _ := slices.BinarySearchFunc(given, outside.First, func(c claimed, first netip.Addr) int { return c.Last.Compare(first) })
		if next < len(given) && given[next].First.Compare(outside.Last) <= 0 {
			g := given[next]
			r.add(rule.Position, "%s is mapped, and %s of %s%s is given to other hosts", outside, g.AddressRange, g.what, g.at.inLine())
		}
	}
}

// --- ties ----------------------------------------------------------------------------

// firstOf notes who claims something, and reports the rule that did before.
func firstOf[K comparable](claims map[K]*Rule, key K, rule *Rule) *Rule {
	if first := claims[key]; first != nil {
		return first
	}
	claims[key] = rule
	return nil
}

func (r *reader) tie(rule, first *Rule) {
	r.add(rule.Position, "rule %q ties with %q%s: both would meet the same packets", rule.Kind()+" "+rule.Match(), first.Kind()+" "+first.Match(), first.Position.inLine())
}

// sourceTies: a packet's source rule is found by interfaces and the longest prefix.
func (r *reader) sourceTies() {
	type claim struct {
		prefix  netip.Prefix
		in, out string
	}
	claims := make(map[claim]*Rule, len(r.file.Rules))
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		if source, ok := rule.source(); ok {
			if first := firstOf(claims, claim{source, rule.In, rule.Out}, rule); first != nil {
				r.tie(rule, first)
			}
		}
	}
}

// source is the prefix whose packets the rule translates the source of.
func (r *Rule) source() (netip.Prefix, bool) {
	switch a := r.Action.(type) {
	case Masquerade:
		return a.Source, true
	case SNAT:
		return a.Source, true
	case Map:
		return a.Inside, true
	}
	return netip.Prefix{}, false
}

// portClaim is what ranges of ports are ports of.
type portClaim struct {
	protocol Protocol
	address  netip.Addr
	in       string
}

// wholeClaim is addresses with all their ports, as packets see them that come in by an
// interface. A rule that is bound on one side only holds for all interfaces of the
// other; some stands for such as are bound to one.
type wholeClaim struct {
	protocol Protocol
	prefix   netip.Prefix
	side     string // of the interface; "" is unbound
	in       string // "" is all of the side
	some     bool
}

func (r *reader) destinationTies() {
	type exact struct {
		portClaim
		port uint16
	}
	points := make(map[exact]*Rule, len(r.file.Rules))
	ranges := map[portClaim][]*Rule{}
	wholes := map[wholeClaim]*Rule{}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		var first *Rule
		switch a := rule.Action.(type) {
		case DNAT:
			claim := portClaim{a.Protocol, a.Address, rule.In}
			switch a.Ports.Count() {
			case 0:
				first = r.claimWhole(wholes, a.Protocol, netip.PrefixFrom(a.Address, 32), rule)
			case 1:
				first = firstOf(points, exact{claim, a.Ports.First}, rule)
			default:
				ranges[claim] = append(ranges[claim], rule)
			}
		case Map:
			first = r.claimWhole(wholes, AnyProtocol, a.Outside, rule)
		}
		if first != nil {
			r.tie(rule, first)
		}
	}
	for _, rules := range ranges {
		ports := func(rule *Rule) PortRange { return rule.Action.(DNAT).Ports }
		slices.SortStableFunc(rules, func(a, b *Rule) int { return cmp.Compare(ports(a).First, ports(b).First) })
		for i, widest := 1, rules[0]; i < len(rules); i++ {
			rule := rules[i]
			if ports(rule).Overlaps(ports(widest)) {
				if rule.Position.Line < widest.Position.Line {
					r.tie(widest, rule)
				} else {
					r.tie(rule, widest)
				}
			}
			if ports(rule).Last > ports(widest).Last {
				widest = rule
			}
		}
	}
}

// ingress is where packets for a destination rule come in: an interface of a side or, if that is
// "", any of them; without a side any at all.
type ingress struct{ side, in string }

// ingresses are those of a rule. An interface of both sides is one of each.
func (r *reader) ingresses(rule *Rule) (ways []ingress) {
	_, both := rule.Action.(Map)
	switch {
	case both && r.file.mapFrom(rule) == "" && rule.Out == "", !both && rule.In == "":
		return []ingress{{}}
	case both:
		ways = []ingress{{"inside", r.file.mapFrom(rule)}, {"outside", rule.Out}}
	case r.file.IsInside(rule.In):
		ways = []ingress{{"inside", rule.In}}
	default:
		ways = []ingress{{"outside", rule.In}}
	}
	for _, way := range ways {
		if r.file.IsOneArmed(way.in) {
			ways = append(ways, ingress{"inside", way.in}, ingress{"outside", way.in})
		}
	}
	slices.SortFunc(ways, func(a, b ingress) int { return cmp.Or(cmp.Compare(a.side, b.side), cmp.Compare(a.in, b.in)) })
	return slices.Compact(ways)
}

// claimWhole claims addresses with all their ports for the ways in that a rule holds
// for, and gives a rule that has one of them already.
func (r *reader) claimWhole(claims map[wholeClaim]*Rule, protocol Protocol, prefix netip.Prefix, rule *Rule) *Rule {
	var found *Rule
	for _, bound := range r.ingresses(rule) {
		all := wholeClaim{protocol: protocol, prefix: prefix, side: bound.side}
		one, some := all, all
		one.in, some.some = bound.in, true
		first := claims[all]
		if first == nil {
			first = claims[one]
		}
		if first == nil && bound.in == "" {
			first = claims[some]
		}
		if first != nil && first != rule && (found == nil || first.Position.Line < found.Position.Line) {
			found = first
		}
		firstOf(claims, one, rule)
		if bound.in != "" {
			firstOf(claims, some, rule)
		}
	}
	return found
}

// excludedTwice: the same exclusion again is a mistake, though a harmless one.
func (r *reader) excludedTwice() {
	claims := map[Exclude]*Rule{}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		if a, ok := rule.Action.(Exclude); ok {
			if first := firstOf(claims, a, rule); first != nil {
				r.tie(rule, first)
			}
		}
	}
}

// --- ports and pools ------------------------------------------------------------------

// givenPorts: rules that give ports of the same address give the same ones.
func (r *reader) givenPorts() {
	addresses := map[netip.Addr]*Rule{}
	masquerades := map[string]*Rule{} // by egress interface, "" is all outside
	check := func(rule, first *Rule, ports, before PortRange) {
		if first != nil && first != rule && ports != before {
			r.add(rule.Position, "the rule %q%s gives %s of the same address, this one %s", first.Kind()+" "+first.Match(), first.Position.inLine(), givenText(before), givenText(ports))
		}
	}
	masquerade := func(rule, first *Rule) {
		if first != nil {
			check(rule, first, rule.Action.(Masquerade).Ports, first.Action.(Masquerade).Ports)
		}
	}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		switch a := rule.Action.(type) {
		case SNAT:
			if a.Pool == "" {
				if first := firstOf(addresses, a.Address, rule); first != nil {
					check(rule, first, a.Ports, first.Action.(SNAT).Ports)
				}
			}
		case Masquerade:
			masquerade(rule, firstOf(masquerades, rule.Out, rule))
		}
	}
	if everywhere := masquerades[""]; everywhere != nil {
		for _, name := range r.file.Outside {
			if rule := masquerades[name]; rule != nil {
				masquerade(rule, everywhere)
			}
		}
	}
}

func givenText(p PortRange) string {
	if p.IsZero() {
		return "all ports"
	}
	return "ports " + p.String()
}

// poolCount: an engine numbers what it gives ports of.
func (r *reader) poolCount() {
	used := map[string]bool{}
	for i := range r.file.Rules {
		rule := &r.file.Rules[i]
		switch a := rule.Action.(type) {
		case SNAT:
			if a.Pool != "" {
				used["pool "+a.Pool] = true
			} else {
				used[a.Address.String()] = true
			}
		case Masquerade:
			if rule.Out != "" {
				used["interface "+rule.Out] = true
			} else if !used[""] {
				used[""] = true
				for _, name := range r.file.Outside {
					used["interface "+name] = true
				}
			}
		}
	}
	delete(used, "")
	if len(used) > MaxPools {
		r.add(Position{}, "%d pools, addresses of snat rules and interfaces masqueraded behind, of at most %d: put single addresses into pools", len(used), MaxPools)
	}
}

// --- warnings --------------------------------------------------------------------------

// Warnings reports what is allowed, and perhaps not meant.
func (f *File) Warnings() []Problem {
	w := collector{name: f.Name}
	for i, class := range timeoutClasses {
		if d := f.Defaults.Timeouts[i]; d < class.minimum {
			w.add(f.at("timeouts."+class.key), "time-out %s of %s is less than %s asks for, %s", class.key, durationText(d), class.source, durationText(class.minimum))
		}
	}
	if len(f.Rules) == 0 {
		w.add(f.at("rules"), "no rules: nothing is translated")
	}
	used := map[string]bool{}
	for i := range f.Rules {
		if a, ok := f.Rules[i].Action.(SNAT); ok {
			used[a.Pool] = true
		}
		f.checkModes(&w, &f.Rules[i])
	}
	for i := range f.Pools {
		p := &f.Pools[i]
		if !used[p.Name] {
			w.add(p.Position, "no rule uses pool %s", p.Name)
		}
		if len(p.Drain) > 0 && p.drainsAll() {
			w.add(p.Position, "all addresses of pool %s are being drained: hosts get no new sessions by it", p.Name)
		}
		if !p.OneToOne && !p.Ports.IsZero() && p.Ports.Count() < fewPorts {
			w.add(p.Position, "pool %s gives %d ports an address: not many hosts can share them", p.Name, p.Ports.Count())
		}
	}
	l := f.Limits
	if l.SessionsPerSource > l.Sessions {
		w.add(f.at("limits.sessions_per_source"), "sessions_per_source is more than sessions: it limits nothing")
	}
	if l.Mappings > l.Sessions {
		w.add(f.at("limits.mappings"), "mappings is more than sessions: a mapping lives by its sessions, so many are never used")
	}
	if t := f.Defaults.Timeouts[TimeoutHoldDown]; t > longHoldDown {
		w.add(f.at("timeouts."+TimeoutHoldDown.String()), "ports are in hold-down for %s: no other host gets them for so long", durationText(t))
	}
	return w.sorted()
}

// checkModes warns of filtering that a rule's mapping makes stricter.
func (f *File) checkModes(w *collector, r *Rule) {
	switch a := r.Action.(type) {
	case Masquerade:
	case SNAT:
		if p := f.Pool(a.Pool); p != nil && p.OneToOne {
			return
		}
	default:
		return
	}
	for c := range Class(PortClasses) {
		if filtering := f.FilteringMode(r, c); f.MappingMode(r, c) == AddressAndPortDependent && filtering != FilterAddressAndPort {
			w.add(r.Position, "filtering %s of %s is address-and-port-dependent, as mapping is: such a port serves one remote address and port", filtering, c)
		}
	}
}

const (
	fewPorts     = 64
	longHoldDown = time.Hour
)
