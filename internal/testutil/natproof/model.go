// SPDX-License-Identifier: Apache-2.0

package natproof

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
)

// What rules may make of a packet, by the model of them and by the rule file.

// Result is what becomes of a packet: dropped (or the router's own), or sent on.
type Result struct {
	gone     bool
	dst, src string // as text: an address, "masquerade" resolved, pools as "a-b"
	port     uint16
}

// Gone tells whether it did not leave.
func (r Result) Gone() bool { return r.gone }

// Destination is where it went, "" if it did not leave.
func (r Result) Destination() string { return r.dst }

func (r Result) String() string {
	if r.gone {
		return "does not leave"
	}
	return fmt.Sprintf("%s -> %s:%d", r.src, r.dst, r.port)
}

// Outcome is what may become of a packet.
type Outcome struct {
	Results             []Result
	destination, source []string // rules that decided about them
	destined            bool     // a rule translates the destination
	masqueraded         bool     // the source is masqueraded
	Unknown             bool     // a rule is not understood
}

// decided are the rules that did: the one that translates or drops, and those that let the
// packet past others, by accepting or returning.
func decided(list *[]string, o HookOutcome) {
	rules := slices.DeleteFunc(slices.Clone(o.Asked), func(r *ruleset.Rule) bool {
		return !slices.ContainsFunc(r.Statements, func(s ruleset.Statement) bool {
			v, plain := s.(ruleset.Verdict)
			_, mapped := s.(ruleset.VerdictMap)
			return mapped || plain && (v.Kind == ruleset.Accept || v.Kind == ruleset.Return)
		})
	})
	if o.Rule != nil {
		rules = append(rules, o.Rule)
	}
	for _, r := range rules {
		if !slices.Contains(*list, r.Where()) {
			*list = append(*list, r.Where())
		}
	}
}

func toNumber(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func toAddr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// Model evaluates a packet some times, and collects what may become of it.
func (i *Imported) Model(p rulefile.Packet) Outcome {
	const draws = 200
	var m Outcome
	chance := rand.New(rand.NewPCG(7, 7))
	for k := range draws {
		used := false
		e := Evaluator{Set: i.Set, Kind: "nat", Draw: func(f ruleset.Field) uint32 {
			used = true
			return chance.Uint32N(f.Mod)
		}}
		for _, r := range m.once(&e, p) {
			if !slices.Contains(m.Results, r) {
				m.Results = append(m.Results, r)
			}
		}
		if k == 0 && !used {
			break
		}
	}
	return m
}

func (m *Outcome) once(e *Evaluator, p rulefile.Packet) []Result {
	router := Surroundings{}
	q := Packet{
		In: p.In, Source: toNumber(p.Source), Destination: toNumber(p.Destination), Protocol: uint8(p.Protocol),
		SourcePort: p.SourcePort, DestinationPort: p.DestinationPort, DestinationLocal: router.IsLocal(p.Destination),
	}
	pre := e.Eval("prerouting", q)
	decided(&m.destination, pre)
	m.Unknown = m.Unknown || pre.Unknown
	destinations, gone := []uint32{q.Destination}, false
	m.destined = m.destined || pre.Done
	if pre.Done {
		destinations, q.DestinationPort, gone = translated(pre, q.Destination, q.DestinationPort)
	}
	var out []Result
	for _, d := range destinations {
		if gone || router.IsLocal(toAddr(d)) {
			out = append(out, Result{gone: true})
			continue
		}
		after := q
		after.Destination, after.Mark = d, pre.Mark
		after.Out = router.Egress(p.Source, toAddr(d))
		post := e.Eval("postrouting", after)
		decided(&m.source, post)
		m.Unknown = m.Unknown || post.Unknown
		r := Result{src: p.Source.String(), dst: toAddr(d).String(), port: after.DestinationPort}
		if post.Done && post.Kind == ruleset.Translated {
			switch c := post.Choice; {
			case post.To.Kind == ruleset.Masquerade:
				r.src = addresses[after.Out]
			case post.To.Kind == ruleset.Netmap:
				mask := ^uint32(0) << (32 - c.Bits)
				r.src = toAddr(c.First&mask | after.Source&^mask).String()
			case c.First == c.Last:
				r.src = toAddr(c.First).String()
			default:
				r.src = toAddr(c.First).String() + "-" + toAddr(c.Last).String()
			}
		} else if post.Done {
			r = Result{gone: true}
		}
		out = append(out, r)
	}
	return out
}

// translated is where a destination may be sent.
func translated(o HookOutcome, destination uint32, port uint16) (to []uint32, toPort uint16, gone bool) {
	c := o.Choice
	switch {
	case o.Kind != ruleset.Translated, o.To.Kind == ruleset.Redirect:
		return []uint32{destination}, 0, true
	case o.To.Kind == ruleset.Netmap:
		mask := ^uint32(0) << (32 - c.Bits)
		return []uint32{c.First&mask | destination&^mask}, port, false
	}
	for n := c.First; n <= c.Last; n++ {
		to = append(to, n)
	}
	if c.Ports[0] != 0 && port != 0 {
		switch {
		case c.Base != 0:
			port = c.Ports[0] + (port - c.Base)
		case port < c.Ports[0] || port > c.Ports[1]:
			port = c.Ports[0]
		}
	}
	return to, port, false
}

// Explained is what the rule file makes of a packet.
func (i *Imported) Explained(p rulefile.Packet) Outcome { return i.explained(p, Surroundings{}) }

// ExplainedNFT is what engine nft makes of it. Between inside hosts (hairpin) it differs as
// docs/rules.md has it: rules count as if the client left by the first outside interface, and
// masqueraded it is seen as the outside address that it asked for.
func (i *Imported) ExplainedNFT(p rulefile.Packet) Outcome {
	if plain := i.explained(p, Surroundings{}); !plain.destined {
		return plain
	}
	m := i.explained(p, Surroundings{hairpin: i.File.Outside[0]})
	for k, r := range m.Results {
		if !r.gone && inside(p.In) && r.dst != p.Destination.String() && m.masqueraded && inside((Surroundings{}).Egress(p.Source, netip.MustParseAddr(r.dst))) {
			m.Results[k].src = p.Destination.String()
		}
	}
	return m
}

func (i *Imported) explained(p rulefile.Packet, router Surroundings) (m Outcome) {
	var destination, source *rulefile.Rule
	from := func(list *[]string, r *rulefile.Rule) {
		for k := range i.File.Rules {
			if &i.File.Rules[k] == r {
				*list = append(*list, i.From[k])
			}
		}
	}
	steps := rulefile.Explain(i.File, p, router)
	for _, s := range steps {
		if !s.Applies {
			continue
		}
		switch s.Stage {
		case rulefile.StageExclude:
			destination, source = nil, nil
			from(&m.destination, s.Rule)
			from(&m.source, s.Rule)
		case rulefile.StageDestination:
			destination = s.Rule
			from(&m.destination, s.Rule)
		case rulefile.StageSource:
			source = s.Rule
			from(&m.source, s.Rule)
		}
	}
	m.destined = destination != nil
	if source != nil {
		_, m.masqueraded = source.Action.(rulefile.Masquerade)
	}
	given := destination == nil && strings.Contains(steps[len(steps)-1].Why, "otherwise it is dropped")
	for _, e := range destinationsOf(destination, p) {
		r := Result{src: p.Source.String(), dst: e.a.String(), port: e.port}
		if router.IsLocal(e.a) || given {
			r = Result{gone: true}
		} else if source != nil {
			r.src = i.sourceBy(source, p, e.a, router)
		}
		m.Results = append(m.Results, r)
	}
	return m
}

// end is an address with a port.
type end struct {
	a    netip.Addr
	port uint16
}

// destinationsOf are where a rule may send a packet; without a rule it goes where it went.
func destinationsOf(rule *rulefile.Rule, p rulefile.Packet) (ends []end) {
	if rule == nil {
		return []end{{p.Destination, p.DestinationPort}}
	}
	switch a := rule.Action.(type) {
	case rulefile.DNAT:
		for _, t := range a.Targets {
			port := p.DestinationPort
			if !t.Ports.IsZero() {
				port = t.Ports.First + port - a.Ports.First
			}
			ends = append(ends, end{t.Address, port})
		}
	case rulefile.Map:
		ends = []end{{moved(p.Destination, a.Inside), p.DestinationPort}}
	}
	return ends
}

func moved(a netip.Addr, to netip.Prefix) netip.Addr {
	mask := ^uint32(0) << (32 - to.Bits())
	return toAddr(toNumber(to.Masked().Addr()) | toNumber(a)&^mask)
}

// sourceBy is what a rule makes of the source of a packet that is sent to an address, of a
// pool its first and last address. From inside to inside it is masqueraded behind the
// interface where the outside address is that it was sent to.
func (i *Imported) sourceBy(rule *rulefile.Rule, p rulefile.Packet, to netip.Addr, router Surroundings) string {
	switch a := rule.Action.(type) {
	case rulefile.Masquerade:
		way := router.Egress(p.Source, to)
		if inside(p.In) && inside(way) {
			way = cmp.Or(router.LinkOf(p.Destination), router.Egress(p.Source, p.Destination))
		}
		return addresses[way]
	case rulefile.SNAT:
		if pool := i.File.Pool(a.Pool); pool != nil {
			return pool.Addresses[0].First.String() + "-" + pool.Addresses[len(pool.Addresses)-1].Last.String()
		}
		return a.Address.String()
	case rulefile.Map:
		return moved(p.Source, a.Outside).String()
	}
	return p.Source.String()
}

// Same compares what may become of a packet.
func Same(a, b []Result) bool {
	in := func(list []Result, r Result) bool { return slices.Contains(list, r) }
	return !slices.ContainsFunc(a, func(r Result) bool { return !in(b, r) }) && !slices.ContainsFunc(b, func(r Result) bool { return !in(a, r) })
}

// Named tells whether a note is about the rule that decided what differs: about the
// destination or the source, by the rules or in the rule file.
func (i *Imported) Named(p rulefile.Packet, want, got Outcome) bool {
	var rules []string
	differ := func(part func(Result) Result) bool {
		return !Same(parts(want.Results, part), parts(got.Results, part))
	}
	if differ(func(r Result) Result { return Result{gone: r.gone, dst: r.dst, port: r.port} }) {
		rules = append(rules, slices.Concat(want.destination, got.destination)...)
	}
	if differ(func(r Result) Result { return Result{gone: r.gone, src: r.src} }) {
		rules = append(rules, slices.Concat(want.source, got.source)...)
		if want.destined != got.destined { // so other source rules are met
			rules = append(rules, slices.Concat(want.destination, got.destination)...)
		}
	}
	if slices.ContainsFunc(i.Notes, func(n nft.Note) bool {
		return n.Rule != "" && slices.Contains(rules, n.Rule) && !strings.Contains(n.Why, "chooses ports") && !strings.Contains(n.Why, "keeps its address")
	}) {
		return true
	}
	return hairpins(p, want, got) && i.general("(hairpin)") || givesAway(p, want, got) && i.general("is dropped")
}

func parts(list []Result, part func(Result) Result) []Result {
	out := make([]Result, len(list))
	for k, r := range list {
		out[k] = part(r)
	}
	return out
}

// hairpins: both send a packet from inside to the same inside host, and they differ in the
// source that it has there.
func hairpins(p rulefile.Packet, want, got Outcome) bool {
	without := func(r Result) Result { r.src = ""; return r }
	return inside(p.In) && Same(parts(want.Results, without), parts(got.Results, without)) &&
		slices.ContainsFunc(got.Results, func(r Result) bool {
			return !r.gone && r.dst != p.Destination.String() && inside(Surroundings{}.Egress(p.Source, netip.MustParseAddr(r.dst)))
		})
}

// givesAway: the rules leave the destination alone, which is an outside address of the rule
// file that is not the router's own.
func givesAway(p rulefile.Packet, want, got Outcome) bool {
	return len(got.Results) == 1 && got.Results[0].gone && !(Surroundings{}).IsLocal(p.Destination) &&
		!slices.ContainsFunc(want.Results, func(r Result) bool { return r.dst != p.Destination.String() })
}

func inside(link string) bool { return link == "eth1" || link == "eth2" }

func (i *Imported) general(what string) bool {
	return slices.ContainsFunc(i.Notes, func(n nft.Note) bool { return n.Rule == "" && strings.Contains(n.Why, what) })
}

// Compare tells whether the rule file does with a packet what the rules do. What differs
// and is not named is an error.
func (i *Imported) Compare(p rulefile.Packet, want, got Outcome) (equal bool, err error) {
	if Same(want.Results, got.Results) {
		return true, nil
	}
	if i.Named(p, want, got) {
		return false, nil
	}
	return false, i.Differ(p, "the rules", want, "the rule file", got)
}

// Differ is an error with all that is to be seen.
func (i *Imported) Differ(p rulefile.Packet, who string, want Outcome, whose string, got Outcome) error {
	return fmt.Errorf("%s: %s\n%s: %v, destination by %q, source by %q\n%s: %v, destination by %q, source by %q\n%s\nnotes %+v\n%s",
		i.Name, p, who, want.Results, want.destination, want.source, whose, got.Results, got.destination, got.source, i.Rules, i.Notes, i.File.Text())
}

// May tells whether a result is one of those that may be: of a pool any address.
func May(may []Result, r Result) bool {
	return slices.ContainsFunc(may, func(m Result) bool {
		if m.gone || r.gone {
			return m.gone == r.gone
		}
		src := m.src == r.src
		if first, last, pool := strings.Cut(m.src, "-"); pool && !src {
			a, s := netip.MustParseAddr(first), netip.MustParseAddr(r.src)
			src = a.Compare(s) <= 0 && s.Compare(netip.MustParseAddr(last)) <= 0
		}
		return src && m.dst == r.dst && m.port == r.port
	})
}

// NoPort tells whether a note says that engine ebpf has no port for the packet, which the
// rule file would send on.
func (i *Imported) NoPort(p rulefile.Packet, file Outcome) bool {
	return slices.ContainsFunc(file.Results, func(r Result) bool {
		return i.general(fmt.Sprintf("every %s port of %s:", p.Protocol, r.src))
	})
}
