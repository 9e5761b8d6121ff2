// SPDX-License-Identifier: Apache-2.0

// Which rules a packet meets that opens a session, and why not others. This is the
// precedence read plainly, rule by rule: what `natkit explain` reports, and what the
// engines' look-ups are tested against.

package rulefile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Packet is a packet as it arrives, the first of its session.
type Packet struct {
	In                  string // interface
	Protocol            Protocol
	Source, Destination netip.Addr
	// SourcePort and DestinationPort are zero where the protocol has none. An ICMP query
	// has its identifier as source port.
	SourcePort, DestinationPort uint16
}

// packetForm is what ParsePacket reads.
const packetForm = "[PROTOCOL] SOURCE[:PORT] -> DESTINATION[:PORT] in INTERFACE"

// ParsePacket reads a packet written as in "tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1".
// Without protocol it is tcp if it has a port, icmp otherwise.
func ParsePacket(s string) (Packet, error) {
	words := strings.Fields(s)
	p := Packet{Protocol: ICMP}
	named := len(words) == 6
	if named {
		protocol, err := ParseProtocol(words[0])
		if err != nil {
			return p, err
		}
		p.Protocol, words = protocol, words[1:]
	}
	if len(words) != 5 || words[1] != "->" || words[3] != "in" {
		return p, fmt.Errorf("packet %q is not of the form %s", s, packetForm)
	}
	var err error
	if p.Source, p.SourcePort, err = parseEnd(words[0]); err != nil {
		return p, err
	}
	if p.Destination, p.DestinationPort, err = parseEnd(words[2]); err != nil {
		return p, err
	}
	p.In = words[4]
	if !named && p.DestinationPort > 0 {
		p.Protocol = TCP
	}
	switch {
	case p.Protocol == AnyProtocol:
		return p, fmt.Errorf("a packet has a protocol, and not any: write tcp, udp, icmp or another")
	case p.DestinationPort > 0 && !p.Protocol.HasPorts():
		return p, fmt.Errorf("%s has no ports: leave out :%d", p.Protocol, p.DestinationPort)
	}
	return p, nil
}

func parseEnd(s string) (netip.Addr, uint16, error) {
	address, text, named := strings.Cut(s, ":")
	a, err := netip.ParseAddr(address)
	if err != nil || !a.Is4() {
		return a, 0, fmt.Errorf("%q is not an IPv4 address, or one with a port", s)
	}
	n, ok := port(text)
	if named && !ok {
		return a, 0, fmt.Errorf("%q: want a port from 1 to 65535", s)
	}
	return a, n, nil
}

// String is the form that ParsePacket reads.
func (p Packet) String() string {
	end := func(a netip.Addr, port uint16) string {
		if port == 0 {
			return a.String()
		}
		return netip.AddrPortFrom(a, port).String()
	}
	return fmt.Sprintf("%s %s -> %s in %s", p.Protocol, end(p.Source, p.SourcePort), end(p.Destination, p.DestinationPort), p.In)
}

// Surroundings are what Explain must know of the machine.
type Surroundings interface {
	// Egress is the interface that a packet with these addresses leaves by, "" if there
	// is no route.
	Egress(source, destination netip.Addr) string
	// LinkOf is the interface on whose network an address is, "" if it is on none.
	LinkOf(netip.Addr) string
	// IsLocal reports whether an address is the gateway's own.
	IsLocal(netip.Addr) bool
}

// Stage is a question that a packet is asked.
type Stage string

// Stages, in their order.
const (
	StagePacket      Stage = "packet"      // is it one that can be translated
	StageExclude     Stage = "exclude"     // is it excluded
	StageDestination Stage = "destination" // which rule translates its destination
	StageRoute       Stage = "route"       // which way it goes then
	StageSource      Stage = "source"      // which rule translates its source
	StageResult      Stage = "result"      // what becomes of it
)

// Step is an answer, or a rule that was near to being one. Of each stage the rule that
// applies comes first, or that there is none, then those that do not, with the reason.
type Step struct {
	Stage   Stage  `json:"stage"`
	Rule    *Rule  `json:"-"`
	Text    string `json:"rule,omitempty"` // of the rule
	Line    int    `json:"line,omitempty"` // of the rule
	Applies bool   `json:"applies"`        // the rule does
	Why     string `json:"reason"`
}

// Explain reports which rules a packet meets. Only rules that are about one of its
// addresses are reported.
func Explain(f *File, p Packet, s Surroundings) []Step {
	e := explanation{f: f, p: p, s: s}
	e.explain()
	return e.steps
}

type explanation struct {
	f     *File
	p     Packet
	s     Surroundings
	steps []Step
}

func (e *explanation) say(stage Stage, format string, args ...any) {
	e.steps = append(e.steps, Step{Stage: stage, Why: fmt.Sprintf(format, args...)})
}

func (e *explanation) explain() {
	inside := e.f.isInsideHost(e.p.In, e.p.Source)
	if why := e.untranslatable(); why != "" {
		e.say(StagePacket, "%s", why)
		return
	}
	if e.choose(StageExclude, e.excludes) != nil {
		e.say(StageResult, "goes on untranslated")
		return
	}
	destination := e.choose(StageDestination, e.destines)
	if given := e.f.gives(e.p.Destination) && !e.s.IsLocal(e.p.Destination); destination == nil && (given || !inside) {
		e.sayMapping(inside, given)
		return
	}
	to, toText := e.target(destination)
	way := e.wayTo(destination, to)
	if way == "" || !e.f.IsInside(way) && !e.f.IsOutside(way) {
		e.noWay(way, to, destination != nil && !destination.isIdentity())
		return
	}
	e.say(StageRoute, "%s is reached by %s", to, way)
	moves := destination != nil && !destination.isIdentity()
	toInside := e.f.isInsideHost(way, to)
	if inside && moves && toInside {
		way = e.addressedBy(way)
	}
	var source *Rule
	if e.f.IsOneArmed(way) && inside && toInside && !moves {
		e.say(StageSource, "both hosts are inside, by the sources of the rules: no rule")
	} else if inside || moves {
		source = e.choose(StageSource, func(r *Rule) verdict { return e.hides(r, way) })
	}
	hides := source != nil && !source.isIdentity()
	switch {
	case !moves && !hides && (destination != nil || source != nil):
		e.say(StageResult, "source and destination stay: its session is tracked, not translated")
	case !moves && !hides:
		e.say(StageResult, "goes on untranslated, unless it is for the external endpoint of a mapping")
	case !hides:
		e.say(StageResult, "destination becomes %s, the source stays", toText)
	case !moves:
		e.say(StageResult, "source becomes %s, the destination stays", e.f.hiddenText(source, e.p.Source, way))
	default:
		e.say(StageResult, "destination becomes %s, source becomes %s", toText, e.f.hiddenText(source, e.p.Source, way))
	}
}

// sayMapping reports what becomes of a packet that no destination rule is about, and that a
// mapping may be. What is for an address that the file gives away is nobody else's.
func (e *explanation) sayMapping(inside, given bool) {
	hit, miss := "it goes to the internal endpoint, and its source stays", "it is not translated"
	if inside {
		hit = "it goes to the internal endpoint (hairpin)"
	}
	if given {
		miss = "it is dropped"
	}
	e.say(StageResult, "if it is for the external endpoint of a mapping that lets its sender in, %s; otherwise %s", hit, miss)
}

// untranslatable is why no rule is asked, "" if they are.
func (e *explanation) untranslatable() string {
	src, dst := e.p.Source.As4(), e.p.Destination.As4()
	switch {
	case !e.f.IsInside(e.p.In) && !e.f.IsOutside(e.p.In):
		return fmt.Sprintf("%s is not an interface of the rule file", e.p.In)
	case src == dst:
		return "its source is its destination: dropped"
	case isMany(dst):
		return "multicast and broadcast are not translated"
	case isNobody(src) || isNobody(dst):
		return "these addresses are not of hosts on a network: not translated"
	}
	return ""
}

// isNobody reports whether an address is none of a host on a network.
func isNobody(a [4]byte) bool { return a == [4]byte{} || a[0] == 127 || isMany(a) }

// isMany reports whether an address is of multicast or broadcast.
func isMany(a [4]byte) bool { return a[0]>>4 == 14 || a == [4]byte{255, 255, 255, 255} }

func (e *explanation) noWay(way string, to netip.Addr, translated bool) {
	switch {
	case e.s.IsLocal(to) && translated:
		e.say(StageRoute, "%s is the gateway itself: it can't be reached by a rule", to)
		e.say(StageResult, "dropped")
		return
	case e.s.IsLocal(to):
		e.say(StageRoute, "%s is the gateway itself", to)
		e.say(StageResult, "goes on untranslated, unless it is for the external endpoint of a mapping")
		return
	case way == "":
		e.say(StageRoute, "there is no route to %s", to)
	default:
		e.say(StageRoute, "%s is reached by %s, which is not an interface of the rule file", to, way)
	}
	if translated {
		e.say(StageResult, "dropped")
	} else {
		e.say(StageResult, "goes on untranslated")
	}
}

// wayTo is the interface that the packet leaves by. With subscribers by interface a rule says what
// its hosts are behind, of which the routes may know several.
func (e *explanation) wayTo(destination *Rule, to netip.Addr) string {
	if destination != nil && e.f.Subscribers.ByInterface {
		if way := e.f.InsideOf(destination); way != "" {
			return way
		}
	}
	return e.s.Egress(e.p.Source, to)
}

// addressedBy is the egress interface whose source rules a packet meets that an internal host sent
// to another by an external address: the one by which it would have left.
func (e *explanation) addressedBy(way string) string {
	out := e.s.LinkOf(e.p.Destination)
	if out == "" {
		out = e.s.Egress(e.p.Source, e.p.Destination)
	}
	e.say(StageRoute, "from inside to inside by an external address (hairpin): the source rules of %s hold, where %s is, and not those of %s", out, e.p.Destination, way)
	return out
}

// --- choosing --------------------------------------------------------------------------

// verdict is what a rule has to do with a packet: nothing, or it does not hold for a
// reason, or it holds with a rank, of which the first number decides that differs.
type verdict struct {
	about bool
	not   string
	rank  [4]int
	what  string // that is special about it: "port, bound to eth0"
}

// choose asks every rule, and reports which one applies and which others are about the
// packet's addresses.
func (e *explanation) choose(stage Stage, ask func(*Rule) verdict) *Rule {
	type answer struct {
		rule *Rule
		verdict
	}
	var hold, not []answer
	for i := range e.f.Rules {
		r := &e.f.Rules[i]
		switch v := ask(r); {
		case v.about && v.not == "":
			hold = append(hold, answer{r, v})
		case v.about:
			not = append(not, answer{r, v})
		}
	}
	slices.SortStableFunc(hold, func(a, b answer) int { return -slices.Compare(a.rank[:], b.rank[:]) })
	add := func(r *Rule, applies bool, why string) {
		e.steps = append(e.steps, Step{stage, r, r.String(), r.Position.Line, applies, why})
	}
	for i, a := range hold {
		if i == 0 {
			add(a.rule, true, a.what)
			continue
		}
		add(a.rule, false, fmt.Sprintf("%s: less specific", a.what))
	}
	if len(hold) == 0 {
		e.say(stage, "no rule")
	}
	for _, a := range not {
		add(a.rule, false, a.not)
	}
	if len(hold) == 0 {
		return nil
	}
	return hold[0].rule
}

// excludes asks an exclusion. All that hold are as good.
func (e *explanation) excludes(r *Rule) verdict {
	a, ok := r.Action.(Exclude)
	if !ok || !a.Source.Contains(e.p.Source) || !a.Destination.Contains(e.p.Destination) {
		return verdict{}
	}
	v := verdict{about: true, what: "excluded"}
	switch {
	case a.Protocol != AnyProtocol && a.Protocol != e.p.Protocol:
		v.not = "another protocol"
	case !a.Ports.IsZero() && !a.Ports.Contains(e.p.DestinationPort):
		v.not = "another port"
	}
	return v
}

// Kinds of destination rules, the more special the higher.
const (
	byPrefix = iota
	byRange
	byPort
)

// destines asks for a rule that translates the destination: one for the port, for a
// range of ports, for the address or its prefix; of each kind first one that is bound to
// the ingress interface; of those for addresses first one for the protocol, then the longest prefix.
func (e *explanation) destines(r *Rule) verdict {
	switch a := r.Action.(type) {
	case Map:
		v := verdict{about: a.Outside.Contains(e.p.Destination), what: fmt.Sprintf("its prefix is /%d", a.Outside.Bits())}
		bound := e.f.mapFrom(r) != "" || r.Out != ""
		v.rank = [4]int{byPrefix, truthRank(bound), 0, a.Outside.Bits()}
		if bound {
			v.what += ", bound to interfaces"
		}
		if on := e.mapBinding(r); on != "" && on != e.p.In {
			v.not = fmt.Sprintf("it is bound to %s", on)
		}
		return v
	case DNAT:
		v := verdict{about: a.Address == e.p.Destination}
		switch a.Ports.Count() {
		case 0:
			v.rank, v.what = [4]int{byPrefix, truthRank(r.In != ""), truthRank(a.Protocol != AnyProtocol), 32}, "the address"
			if a.Protocol != AnyProtocol {
				v.what = "the protocol and the address"
			}
		case 1:
			v.rank, v.what = [4]int{byPort, truthRank(r.In != "")}, "the port"
		default:
			v.rank, v.what = [4]int{byRange, truthRank(r.In != "")}, "the range of ports"
		}
		switch {
		case a.Protocol != AnyProtocol && a.Protocol != e.p.Protocol:
			v.not = "another protocol"
		case !a.Ports.IsZero() && !a.Ports.Contains(e.p.DestinationPort):
			v.not = "another port"
		case r.In != "" && r.In != e.p.In:
			v.not = fmt.Sprintf("it is bound to %s", r.In)
		}
		if r.In != "" {
			v.what += ", bound to " + r.In
		}
		return v
	}
	return verdict{}
}

// mapBinding is the interface that a map's packets must come in by, on the side that
// this one came from; "" is any. By one of both sides either will do.
func (e *explanation) mapBinding(r *Rule) string {
	if e.f.IsOutside(e.p.In) && (!e.f.IsInside(e.p.In) || r.Out == "" || r.Out == e.p.In) {
		return r.Out
	}
	return e.f.mapFrom(r)
}

// hides asks for a rule that translates the source of what leaves by way: one bound to
// both interfaces, to the egress interface, to the ingress interface, to none; of each the longest prefix.
// Without an egress interface it holds for the outside interfaces.
func (e *explanation) hides(r *Rule, way string) verdict {
	source, ok := r.source()
	if !ok {
		return verdict{}
	}
	v := verdict{about: source.Contains(e.p.Source), what: fmt.Sprintf("its prefix is /%d", source.Bits())}
	v.rank = [4]int{truthRank(r.Out != ""), truthRank(r.In != ""), source.Bits()}
	if r.In != "" {
		v.what += ", bound to the ingress interface " + r.In
	}
	if r.Out != "" {
		v.what += ", bound to the egress interface " + r.Out
	}
	switch {
	case r.In != "" && r.In != e.p.In:
		v.not = fmt.Sprintf("it is bound to the ingress interface %s", r.In)
	case r.Out != "" && r.Out != way:
		v.not = fmt.Sprintf("it is bound to the egress interface %s", r.Out)
	case r.Out == "" && !e.f.IsOutside(way):
		v.not = fmt.Sprintf("without out it holds for outside interfaces, and %s is none", cmp.Or(way, "the egress interface"))
	}
	return v
}

func truthRank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// --- what becomes of it ------------------------------------------------------------------

// target is where a destination rule sends the packet: of several targets the first, in
// words all.
func (e *explanation) target(r *Rule) (netip.Addr, string) {
	if r == nil {
		return e.p.Destination, ""
	}
	switch a := r.Action.(type) {
	case DNAT:
		texts := make([]string, len(a.Targets))
		for i, t := range a.Targets {
			to := a.toTarget(t, e.p.DestinationPort)
			texts[i] = endpointText(to.Addr(), PortRange{to.Port(), to.Port()})
			if a.Weights != nil {
				texts[i] += fmt.Sprintf(" (%d of %d)", a.Weights[i], a.totalWeight())
			}
		}
		if len(texts) == 1 {
			return a.Targets[0].Address, texts[0]
		}
		return a.Targets[0].Address, "one of " + strings.Join(texts, ", ") + " (the client's address chooses)"
	case Map:
		to := moved(e.p.Destination, a.Inside)
		return to, to.String()
	}
	return e.p.Destination, ""
}

// toTarget is what the rule makes of a port that it is for, at one of its targets.
func (a DNAT) toTarget(t Target, port uint16) netip.AddrPort {
	if !t.Ports.IsZero() {
		port = t.Ports.First + port - a.Ports.First
	}
	return netip.AddrPortFrom(t.Address, port)
}

// moved is an address of one prefix in another of the same length.
func moved(a netip.Addr, to netip.Prefix) netip.Addr {
	m := mask(to.Bits())
	return address(number(to.Addr())&m | number(a)&^m)
}

// hiddenText is what a source rule makes of a source.
func (f *File) hiddenText(r *Rule, source netip.Addr, way string) string {
	switch a := r.Action.(type) {
	case Masquerade:
		return "the address of " + way
	case SNAT:
		if p := f.Pool(a.Pool); p != nil && p.OneToOne {
			return "an address of its own from pool " + a.Pool
		} else if p != nil {
			return "an address of pool " + a.Pool
		}
		return a.Address.String()
	case Map:
		return moved(source, a.Outside).String()
	}
	return ""
}
