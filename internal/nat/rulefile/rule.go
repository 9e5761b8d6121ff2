// SPDX-License-Identifier: Apache-2.0

// What a rule is: an action, and what holds for every kind of rule.

package rulefile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Rule is one rule: what it does, and under which conditions and modes.
type Rule struct {
	Action Action
	// In and Out bind the rule to the interface that packets come in or leave by; "" is
	// any. For a Map they are meant as internal hosts see it: Out is the interface that its
	// external addresses are reached by.
	In, Out   string
	Mapping   PerClass[MappingMode]
	Filtering PerClass[FilteringMode]
	MSS       MSSMode
	// Silent is `arp: none`: nobody answers for the rule's external addresses on a
	// connected network. A pool has its own.
	Silent   bool
	Position Position
}

// Action is one of Masquerade, SNAT, DNAT, Map and Exclude.
type Action interface {
	// kind is the rule's first key in a rule file.
	kind() string
	// match is that key's value: what the rule is for.
	match() string
}

// Masquerade translates sources to the address of the interface that packets leave
// by, with ports. Without Out it holds for every outside interface.
type Masquerade struct {
	Source netip.Prefix
	Ports  PortRange // to be given; zero: what is left beside the gateway's own
}

// SNAT translates sources to a pool or to one address.
type SNAT struct {
	Source  netip.Prefix
	Pool    string     // a name, or
	Address netip.Addr // an address
	Ports   PortRange  // with Address: to be given; zero as in Pool
}

// DNAT sends what is for an address, or for ports of it, to an internal host, or to one
// of several that the client's address chooses.
type DNAT struct {
	Protocol Protocol
	Address  netip.Addr
	Ports    PortRange // zero: the whole address
	Targets  []Target
	Weights  []int // by target: how large its share of the clients is; nil: equal
}

// Target is where a DNAT rule sends to. With Ports zero the port stays; otherwise there
// are as many as the rule matches, and the first becomes the first.
type Target struct {
	Address netip.Addr
	Ports   PortRange
}

// Map is static NAT, both ways: an inside prefix is seen outside as another of equal
// length, or as the same. Stateless: by rewriting alone, no session is kept.
type Map struct {
	Inside, Outside netip.Prefix
	Stateless       bool
}

// IsIdentity reports whether hosts keep their addresses: they have sessions, and are reached
// from outside, without being translated.
func (a Map) IsIdentity() bool { return a.Inside == a.Outside }

// KeepsAddress reports whether an identity map has the address: its packets are routed to its
// host, also those that others on an outside network are to send here.
func (f *File) KeepsAddress(a netip.Addr) bool {
	return slices.ContainsFunc(f.Rules, func(r Rule) bool {
		m, ok := r.Action.(Map)
		return ok && m.IsIdentity() && m.Outside.Contains(a)
	})
}

// isIdentity reports whether a rule is an identity map.
func (r *Rule) isIdentity() bool {
	a, ok := r.Action.(Map)
	return ok && a.IsIdentity()
}

// Exclude keeps packets from being translated by any rule.
type Exclude struct {
	Protocol            Protocol
	Source, Destination netip.Prefix
	Ports               PortRange // of the destination; zero: all
}

// Everywhere is the prefix of all addresses, `any` in a rule file.
var Everywhere = netip.PrefixFrom(netip.IPv4Unspecified(), 0)

func (Masquerade) kind() string { return "masquerade" }
func (SNAT) kind() string       { return "snat" }
func (DNAT) kind() string       { return "dnat" }
func (Map) kind() string        { return "map" }
func (Exclude) kind() string    { return "exclude" }

var ruleKinds = []string{"masquerade", "snat", "dnat", "map", "exclude"}

// RuleKinds are the kinds of rules there are, by their keys in a rule file.
func RuleKinds() []string { return slices.Clone(ruleKinds) }

func (a Masquerade) match() string { return prefixText(a.Source) }
func (a SNAT) match() string       { return prefixText(a.Source) }
func (a DNAT) match() string       { return protocolText(a.Protocol) + endpointText(a.Address, a.Ports) }
func (a Map) match() string        { return prefixText(a.Inside) + " <-> " + prefixText(a.Outside) }

func (a Exclude) match() string {
	text := protocolText(a.Protocol) + prefixText(a.Source) + " -> " + prefixText(a.Destination)
	if !a.Ports.IsZero() {
		text += ":" + a.Ports.String()
	}
	return text
}

func (t Target) String() string { return endpointText(t.Address, t.Ports) }

func prefixText(p netip.Prefix) string {
	switch p.Bits() {
	case 0:
		return "any"
	case 32:
		return p.Addr().String()
	}
	return p.String()
}

func protocolText(p Protocol) string {
	if p == AnyProtocol {
		return ""
	}
	return p.String() + " "
}

func endpointText(a netip.Addr, ports PortRange) string {
	if ports.IsZero() {
		return a.String()
	}
	return a.String() + ":" + ports.String()
}

// Kind is the rule's kind as the rule file calls it.
func (r *Rule) Kind() string { return r.Action.kind() }

// Match is what the rule is for, the value of its first key.
func (r *Rule) Match() string { return r.Action.match() }

// Key reports what the rule claims: its kind, match and interfaces. No two rules of a
// file have the same, and a rule that keeps its key from one file to the next is the
// same rule, perhaps changed.
func (r *Rule) Key() string {
	return r.Kind() + " " + r.Match() + " in " + r.In + " out " + r.Out
}

// String is the rule in one line, as the rule file has it between braces. Rules with
// the same text are the same rule.
func (r *Rule) String() string {
	var b strings.Builder
	for i, field := range r.fields() {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(field[0] + ": " + field[1])
	}
	return b.String()
}

// fields are the rule's keys and values, in the order in which they are written.
func (r *Rule) fields() [][2]string {
	fields := [][2]string{{r.Kind(), r.Match()}}
	add := func(key, value string) {
		if value != "" {
			fields = append(fields, [2]string{key, value})
		}
	}
	switch a := r.Action.(type) {
	case Masquerade:
		add("ports", a.Ports.String())
	case SNAT:
		if a.Pool != "" {
			add("to", a.Pool)
		} else {
			add("to", a.Address.String())
		}
		add("ports", a.Ports.String())
	case DNAT:
		add("to", targetsText(a.Targets))
		add("weights", weightsText(a.Weights))
	case Map:
		if a.Stateless {
			add("stateless", "true")
		}
	}
	add("in", quoteName(r.In))
	add("out", quoteName(r.Out))
	add("mapping", perClassText(r.Mapping))
	add("filtering", perClassText(r.Filtering))
	add("mss", r.MSS.String())
	if r.Silent {
		add("arp", "none")
	}
	return fields
}

func targetsText(targets []Target) string {
	if len(targets) == 1 {
		return targets[0].String()
	}
	texts := make([]string, len(targets))
	for i, t := range targets {
		texts[i] = t.String()
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

func weightsText(weights []int) string {
	if weights == nil {
		return ""
	}
	return strings.ReplaceAll(fmt.Sprint(weights), " ", ", ")
}

// perClassText writes one value if it is the same for all, the classes that are set
// otherwise, nothing if none is.
func perClassText[T interface {
	comparable
	String() string
}](modes PerClass[T]) string {
	if modes[0] == modes[1] && modes[1] == modes[2] {
		return modes[0].String()
	}
	var parts []string
	for class, mode := range modes {
		if text := mode.String(); text != "" {
			parts = append(parts, Class(class).String()+": "+text)
		}
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// OutsideAddresses are those of the rule itself, for which somebody has to answer on a
// connected network. A pool's are not among them.
func (r *Rule) OutsideAddresses() []AddressRange {
	switch a := r.Action.(type) {
	case SNAT:
		if a.Pool == "" {
			return []AddressRange{{a.Address, a.Address}}
		}
	case DNAT:
		return []AddressRange{{a.Address, a.Address}}
	case Map:
		return []AddressRange{RangeOf(a.Outside)}
	}
	return nil
}

// gives reports whether an address is an outside one that hosts share: of a pool, of a source
// rule or of a forward. One of a map is its internal host's.
func (f *File) gives(a netip.Addr) bool {
	for i := range f.Pools {
		if slices.ContainsFunc(f.Pools[i].Addresses, func(r AddressRange) bool { return r.Contains(a) }) {
			return true
		}
	}
	return slices.ContainsFunc(f.Rules, func(r Rule) bool {
		switch action := r.Action.(type) {
		case SNAT:
			return action.Pool == "" && action.Address == a
		case DNAT:
			return action.Address == a
		}
		return false
	})
}

// IsInside and IsOutside tell on which side an interface is; neither, if the file does
// not name it.
func (f *File) IsInside(link string) bool { return slices.Contains(f.Inside, link) }

// IsOutside is described at IsInside.
func (f *File) IsOutside(link string) bool { return slices.Contains(f.Outside, link) }

// IsOneArmed reports whether an interface is on both sides: what comes in there is from inside if
// its source is an internal host's.
func (f *File) IsOneArmed(link string) bool { return f.IsInside(link) && f.IsOutside(link) }

// OneArmed are those interfaces.
func (f *File) OneArmed() (links []string) {
	for _, link := range f.Inside {
		if f.IsOutside(link) {
			links = append(links, link)
		}
	}
	return links
}

// InsideHosts are the prefixes of the sources that rules translate: where an interface is on
// both sides, its hosts with these addresses are inside, and all others outside.
func (f *File) InsideHosts() (prefixes []netip.Prefix) {
	for i := range f.Rules {
		if p, ok := f.Rules[i].source(); ok {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// isInsideHost reports whether an address that is behind an interface is inside.
func (f *File) isInsideHost(link string, a netip.Addr) bool {
	if !f.IsOneArmed(link) {
		return f.IsInside(link)
	}
	return slices.ContainsFunc(f.InsideHosts(), func(p netip.Prefix) bool { return p.Contains(a) })
}
