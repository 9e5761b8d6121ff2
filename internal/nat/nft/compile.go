// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"natkit/internal/nat/rulefile"
)

// rulesTable is the one table that a rule file is compiled to.
const rulesTable = "natkit"

// Facts are what a kernel must be asked before a rule file is compiled for it.
type Facts struct {
	TimeoutPolicies bool // it has policies of time-outs for single connections
	Labels          bool // and labels
}

// Warning is something that a rule file asks for and the kernel's NAT does otherwise.
type Warning struct {
	Position rulefile.Position // of the rule; zero: the whole file
	Text     string
}

func (w Warning) String() string {
	if w.Position.Line == 0 {
		return w.Text
	}
	return fmt.Sprintf("line %d: %s", w.Position.Line, w.Text)
}

// CompileRules gives the table that does what the rule file says, as near as the
// kernel's NAT comes to it; the warnings are what it does otherwise. Which rule a
// packet meets is the same as everywhere (see rulefile.Explain).
//
//	prerouting    excluded? > time-outs, limit > destination rule > nobody's address? drop
//	output        excluded? > destination rule, for the gateway's own connections
//	postrouting   excluded? > source rule: hairpin, or out by an outside interface
//	forward       to nobody's address? drop; clamp the MSS, if the file wants it
//	raw           addresses of stateless maps, before connection tracking
//
// Chains of type nat see the first packet of a connection only. They look up what it
// is in maps, one for each kind of rule and of binding to interfaces, from the most
// special to the least, so their length does not depend on the number of rules.
func CompileRules(f *rulefile.File, facts Facts) (Ruleset, []Warning, error) {
	c := compiler{file: f, table: Table{Name: rulesTable}, chains: map[string]bool{}}
	if len(f.Inside) == 0 || len(f.Outside) == 0 {
		return nil, nil, fmt.Errorf("compile %q: it names no inside or no outside interface", f.Name)
	}
	if err := refused(f); err != nil {
		return nil, nil, err
	}
	c.set(Set{Name: setInside, Key: datatypes([]part{partIn}), Elements: linkElements(f.Inside)})
	c.set(Set{Name: setOutside, Key: datatypes([]part{partIn}), Elements: linkElements(f.Outside)})
	c.set(Set{Name: setLinks, Key: datatypes([]part{partIn}), Elements: linkElements(slices.Concat(f.Inside, f.Outside))})
	c.oneArmed()
	c.trackHosts()

	excluded := c.exclusions()
	excludedOut := excluded // what is sent to an internal host by a rule is not what was excluded
	if excluded != nil {
		excludedOut = []Rule{slices.Concat(destNotTranslated(), excluded[0])}
	}
	destinations, err := c.destinations()
	if err != nil {
		return nil, nil, err
	}
	if err := c.sources(len(destinations.Rules) > 0); err != nil {
		return nil, nil, err
	}
	first := c.timeouts(facts)
	first = append(first, c.limits()...)
	c.modes()

	prerouting := Chain{Name: "prerouting", Base: preroutingNAT(), Rules: slices.Concat(excluded, first)}
	if len(destinations.Rules) > 0 {
		prerouting.Rules = append(prerouting.Rules, rule(inSet(setLinks, partIn), jumpTo(destinations.Name)))
		c.base(Chain{Name: "output", Base: outputNAT(), Rules: append(slices.Clone(excluded), rule(jumpTo(destinations.Name)))})
	}
	nobody := c.nobody()
	prerouting.Rules = append(prerouting.Rules, nobody...)
	c.base(prerouting)
	c.base(c.postrouting(excludedOut, len(destinations.Rules) > 0))
	c.stateless()
	c.forwarded(len(nobody) > 0)
	c.table.Chains = append(c.table.Chains, c.bases...)
	c.label(facts)
	return Ruleset{c.table}, c.warnings, nil
}

// The sets of interfaces, by side and all.
const (
	setInside  = "inside"
	setOutside = "outside"
	setLinks   = "links"
)

// compiler collects the table. Base chains stand behind the others, for readers.
type compiler struct {
	file     *rulefile.File
	table    Table
	chains   map[string]bool // by name, those that are in the table
	bases    []Chain
	warnings []Warning
	anywhere Chain          // source rules for whatever egress interface
	bound    bool           // some source rule is bound to one of several ways out
	armed    bool           // some interface is on both sides
	beside   []string       // inside only, where that is so
	tracked  map[int][]span // of stateless maps, by rule: hosts that have sessions
	given    []string       // sets of the external addresses that hosts share
}

func (c *compiler) set(s Set) { c.table.Sets = append(c.table.Sets, s) }

func (c *compiler) base(ch Chain) {
	if len(ch.Rules) > 0 {
		c.bases = append(c.bases, ch)
	}
}

// chain adds a chain once and gives its name.
func (c *compiler) chain(name string, rules ...Rule) string {
	if !c.chains[name] {
		c.chains[name] = true
		c.table.Chains = append(c.table.Chains, Chain{Name: name, Rules: rules})
	}
	return name
}

func (c *compiler) warn(at rulefile.Position, format string, args ...any) {
	c.warnings = append(c.warnings, Warning{at, fmt.Sprintf(format, args...)})
}

func linkElements(names []string) []Element {
	var elements []Element
	for i, n := range names {
		if !slices.Contains(names[:i], n) {
			elements = append(elements, Element{Key: keyLink(n), Rule: noRule})
		}
	}
	return elements
}

// The interfaces that are on both sides, those that are inside only beside them, and the
// addresses of internal hosts, which tell by the former who is inside.
const (
	setArmed       = "one_armed"
	setInsideOnly  = "inside_only"
	setInsideHosts = "inside_hosts"
)

// oneArmed adds the sets of a file that has such interfaces.
func (c *compiler) oneArmed() {
	armed := c.file.OneArmed()
	if c.armed = len(armed) > 0; !c.armed {
		return
	}
	var spans []span
	for _, p := range c.file.InsideHosts() {
		all := rulefile.RangeOf(p)
		spans = append(spans, span{first: number(all.First), last: number(all.Last)})
	}
	hosts := Set{Name: setInsideHosts, Key: datatypes([]part{partSource}), Interval: true}
	for _, piece := range flatten(spans) {
		hosts.Elements = append(hosts.Elements, Element{
			Key: binaryutil.BigEndian.PutUint32(piece.first), End: binaryutil.BigEndian.PutUint32(piece.last), Rule: noRule,
		})
	}
	c.set(Set{Name: setArmed, Key: datatypes([]part{partIn}), Elements: linkElements(armed)})
	c.set(hosts)
	if c.beside = slices.DeleteFunc(slices.Clone(c.file.Inside), c.file.IsOneArmed); len(c.beside) > 0 {
		c.set(Set{Name: setInsideOnly, Key: datatypes([]part{partIn}), Elements: linkElements(c.beside)})
	}
}

// amongInside accepts what internal hosts send to those behind an interface of both sides: no
// rule is about it, unless a destination rule has translated it.
func (c *compiler) amongInside(conditions ...[]expr.Any) []Rule {
	if !c.armed {
		return nil
	}
	words := slices.Concat(inSet(setInsideHosts, partDest), slices.Concat(conditions...), verdictWord(expr.VerdictAccept))
	rules := []Rule{rule(inSet(setArmed, partIn), inSet(setInsideHosts, partSource), words)}
	if len(c.beside) > 0 {
		rules = append(rules, rule(inSet(setInsideOnly, partIn), words))
	}
	return rules
}

// noRule marks elements that no rule of the file is counted by.
const noRule = -1

// setExclude has what is excluded, by the parts partsExclude.
const setExclude = "exclude"

var partsExclude = []part{partProtocol, partSource, partDest, partDestPort}

// exclusions accept a packet before any rule translates it.
func (c *compiler) exclusions() []Rule {
	var boxes []box
	for i, r := range c.file.Rules {
		if a, ok := r.Action.(rulefile.Exclude); ok {
			boxes = append(boxes, exclusionBox(i, a))
		}
	}
	if boxes == nil {
		return nil
	}
	s := Set{Name: setExclude, Key: datatypes(partsExclude), Interval: true, Counter: true}
	for _, b := range disjoint(boxes) {
		s.Elements = append(s.Elements, Element{Key: cornerKey(b.low), End: cornerKey(b.high), Rule: b.rule})
	}
	c.set(s)
	return []Rule{rule(inSet(s.Name, partsExclude...), verdictWord(expr.VerdictAccept))}
}

func cornerKey(corner [boxSides]uint32) []byte {
	return key([]byte{byte(corner[boxProtocol])}, binaryutil.BigEndian.PutUint32(corner[boxSource]),
		binaryutil.BigEndian.PutUint32(corner[boxDest]), keyPort(uint16(corner[boxPort])))
}

func verdictWord(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

func jumpTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

// step is one question of a chain: the rules of a kind, found by a key. What they lead
// to is an address, an address with a port, or a chain; each has a map of its own, and
// a key is in one of them only.
type step struct {
	name     string
	kind     expr.NATType
	parts    []part
	interval bool

	addresses, endpoints, verdicts []Element
}

// add leads to a value of four bytes, of eight, or to a chain.
func (s *step) add(e Element) {
	switch {
	case e.Verdict != nil:
		s.verdicts = append(s.verdicts, e)
	case len(e.Value) == 4:
		s.addresses = append(s.addresses, e)
	default:
		s.endpoints = append(s.endpoints, e)
	}
}

// emit puts the step's maps into the table and its rules behind those of the chain.
func (c *compiler) emit(ch *Chain, s *step) {
	add := func(suffix string, elements []Element, data []nftables.SetDatatype) string {
		set := Set{
			Name: s.name + suffix, Key: datatypes(s.parts), Data: data,
			Interval: s.interval, Counter: true, Elements: elements,
		}
		c.set(set)
		return set.Name
	}
	if len(s.addresses) > 0 {
		name := add("", s.addresses, []nftables.SetDatatype{nftables.TypeIPAddr})
		ch.Rules = append(ch.Rules, rule(mapped(name, s.parts...), translate(s.kind, false)))
	}
	if len(s.endpoints) > 0 {
		name := add("_port", s.endpoints, []nftables.SetDatatype{nftables.TypeIPAddr, nftables.TypeInetService})
		ch.Rules = append(ch.Rules, rule(mapped(name, s.parts...), translate(s.kind, true)))
	}
	if len(s.verdicts) > 0 {
		name := add("_to", s.verdicts, []nftables.SetDatatype{nftables.TypeVerdict})
		ch.Rules = append(ch.Rules, rule(verdictMapped(name, s.parts...)))
	}
}

// nobody drops what is sent to an external address for which no rule has a use: routed
// on, it would come back again and again. Addresses of the gateway are its own, and those of a
// map are its hosts' by whichever interface the map is not bound to.
func (c *compiler) nobody() []Rule {
	var spans []span
	add := func(ranges []rulefile.AddressRange) {
		for _, r := range ranges {
			spans = append(spans, span{first: number(r.First), last: number(r.Last)})
		}
	}
	for _, p := range c.file.Pools {
		add(p.Addresses)
	}
	for i := range c.file.Rules {
		if _, ok := c.file.Rules[i].Action.(rulefile.Map); !ok {
			add(c.file.Rules[i].OutsideAddresses())
		}
	}
	if spans == nil {
		return nil
	}
	var rules []Rule
	c.given = c.addresses("outside_addresses", partDest, spans)
	for _, set := range c.given {
		rules = append(rules, rule(inSet(setLinks, partIn), inSet(set, partDest), destIsNotLocal(), drop()))
	}
	return rules
}

// forwarded has what is for all that is forwarded. What connection tracking finds invalid
// meets no chain of type nat, so not nobody either: sent to an external address that is
// routed to lo, for the sake of ARP, it would go round there until its TTL ends.
func (c *compiler) forwarded(toNobody bool) {
	var rules []Rule
	if toNobody {
		rules = append(rules, rule(leavesByLoopback(), drop()))
	}
	c.base(Chain{
		Name:  "forward",
		Base:  &Base{nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityMangle, nftables.ChainPolicyAccept},
		Rules: append(rules, c.clamp()...),
	})
}

// clamp is for the whole table: a chain at forward sees no rule of the file.
func (c *compiler) clamp() []Rule {
	clamps, keeps := c.file.Defaults.MSS == rulefile.MSSClamp, false
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		clamps = clamps || c.file.ClampsMSS(r)
		keeps = keeps || r.MSS == rulefile.MSSKeep
	}
	if !clamps {
		return nil
	}
	if keeps {
		c.warn(rulefile.Position{}, "mss: keep of single rules is not kept: the kernel clamps what is forwarded by the outside interfaces, whatever rule translated it")
	}
	return []Rule{
		rule(inSet(setOutside, partOut), clampMSS()),
		rule(inSet(setOutside, partIn), clampMSS()),
	}
}

// timeouts are policies that connections get with their first packet.
func (c *compiler) timeouts(facts Facts) []Rule {
	if !facts.TimeoutPolicies {
		c.warn(rulefile.Position{}, "time-outs are those of the kernel's settings nf_conntrack_*_timeout: this kernel has no policies for single connections (CONFIG_NF_CONNTRACK_TIMEOUT)")
		return nil
	}
	seconds := func(t rulefile.Timeout) uint32 { return uint32(c.file.Defaults.Timeouts[t].Seconds()) }
	opening, established := seconds(rulefile.TimeoutTCPOpening), seconds(rulefile.TimeoutTCPEstablished)
	closing := seconds(rulefile.TimeoutTCPClosing)
	udp := expr.CtStatePolicyTimeout{expr.CtStateUDPUNREPLIED: seconds(rulefile.TimeoutUDP), expr.CtStateUDPREPLIED: seconds(rulefile.TimeoutUDP)}
	policies := []Timeout{
		{"tcp", uint8(rulefile.TCP), expr.CtStatePolicyTimeout{
			expr.CtStateTCPSYNSENT: opening, expr.CtStateTCPSYNRECV: opening, expr.CtStateTCPSYNSENT2: opening,
			expr.CtStateTCPESTABLISHED: established, expr.CtStateTCPRETRANS: established, expr.CtStateTCPUNACK: established,
			// Of one side's FIN: the other may send for hours yet (RFC 5382 REQ-5).
			expr.CtStateTCPFINWAIT: established, expr.CtStateTCPCLOSEWAIT: established, expr.CtStateTCPLASTACK: closing,
			expr.CtStateTCPTIMEWAIT: closing, expr.CtStateTCPCLOSE: seconds(rulefile.TimeoutTCPReset),
		}},
		{"udp", uint8(rulefile.UDP), udp},
	}
	var rules []Rule
	for _, p := range policies {
		c.table.Timeouts = append(c.table.Timeouts, p)
		rules = append(rules, rule(inSet(setLinks, partIn), protocol(p.Protocol), setTimeout(p.Name)))
	}
	if t := c.file.Defaults.Timeouts; t[rulefile.TimeoutICMP] != rulefile.DefaultTimeouts()[rulefile.TimeoutICMP] || t[rulefile.TimeoutOther] != rulefile.DefaultTimeouts()[rulefile.TimeoutOther] {
		c.warn(rulefile.Position{}, "time-outs icmp and other are those of the kernel's settings nf_conntrack_icmp_timeout and nf_conntrack_generic_timeout")
	}
	return rules
}

// refused is an error for what the kernel's NAT has nothing like: without it others would run
// out of ports, or a log be wrong.
func refused(f *rulefile.File) error {
	var errs []error
	if !f.PCP.IsZero() {
		errs = append(errs, f.AtKey("pcp", "the kernel's NAT has no explicit mappings that hosts ask for: use engine ebpf, or rules that forward ports"))
	}
	if f.Subscribers.Prefix > 0 {
		errs = append(errs, f.AtKey("subscribers", "the kernel's NAT does not count a subscriber's ports and new sessions: use engine ebpf, or limits.sessions_per_source"))
	}
	errs = append(errs, statelessTwice(f)...)
	errs = append(errs, shiftedTooMany(f))
	for i := range f.Pools {
		if p := &f.Pools[i]; !p.Blocks.IsZero() {
			errs = append(errs, rulefile.Problems{{File: f.Name, Position: p.Position, Message: fmt.Sprintf("pool %s: the kernel's NAT gives no blocks of ports: use engine ebpf", p.Name)}})
		}
		if p := &f.Pools[i]; len(p.Drain) > 0 {
			errs = append(errs, rulefile.Problems{{File: f.Name, Position: p.Position, Message: fmt.Sprintf("pool %s: the kernel's NAT drains no address: use engine ebpf, or take it out of addresses, which ends its connections", p.Name)}})
		}
	}
	return errors.Join(errs...)
}

// limits: of all that a file can limit, the kernel counts the connections of a source.
func (c *compiler) limits() []Rule {
	l := c.file.Limits
	if l.Sessions != rulefile.DefaultLimits().Sessions || l.Mappings != 0 {
		c.warn(rulefile.Position{}, "limits sessions and mappings are not kept: the kernel's limit is nf_conntrack_max (see natkit tune)")
	}
	if l.SessionsPerSource == 0 {
		return nil
	}
	c.set(Set{Name: "connections", Key: datatypes([]part{partSource}), Dynamic: true, Size: uint32(l.Sources)})
	limit := overLimit("connections", l.SessionsPerSource)
	if c.armed {
		limit = slices.Concat(inSet(setInsideHosts, partSource), limit)
	}
	return []Rule{rule(inSet(setInside, partIn), limit)}
}

// modes says which modes the kernel does not have.
func (c *compiler) modes() {
	var independent, open bool
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		switch r.Action.(type) {
		case rulefile.Masquerade, rulefile.SNAT:
		default:
			continue
		}
		for class := range rulefile.Class(rulefile.PortClasses) {
			independent = independent || c.file.MappingMode(r, class) == rulefile.EndpointIndependent
			open = open || c.file.FilteringMode(r, class) != rulefile.FilterAddressAndPort
		}
	}
	if independent {
		c.warn(rulefile.Position{}, "mapping endpoint-independent is not kept: the kernel makes a mapping for each remote endpoint, with the same port where that is free")
	}
	if open {
		c.warn(rulefile.Position{}, "filtering endpoint-independent and address-dependent are not kept: the kernel lets in answers only")
	}
	if c.file.Defaults.PortParity {
		c.warn(rulefile.Position{}, "port parity is not kept: the kernel chooses ports without it")
	}
}

func isStateless(r *rulefile.Rule) bool {
	m, ok := r.Action.(rulefile.Map)
	return ok && m.Stateless
}

func singleHost(p netip.Prefix) bool { return p.Bits() == 32 }
