// SPDX-License-Identifier: Apache-2.0

// The NAT of a rule file in plain Go, for tests: packet after packet it says what the
// engine must have done. It reads rulefile.File and shares no look-up with the compiler.
// Where the engine may choose (a port, an address of a pool, one of several targets) the
// model checks that the choice was a legal one and remembers it. It knows no GC: a
// session that has expired is there to be revived.

package datapath

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"natkit/internal/nat/rulefile"
)

type model struct {
	file  *rulefile.File
	facts Facts
	// route gives the link that an address is behind.
	route func(netip.Addr) string

	now       time.Duration
	flows     map[modelKey]*modelFlow
	mappings  map[modelInside]*modelMapping
	addresses map[netip.Addr]*modelAddress
	homes     map[modelHost]netip.Addr // address of a pool that a host has
	targets   map[modelHost]netip.Addr // of a balanced forward, by rule and client
	held      map[modelOutside]*modelMapping
	sessions  map[modelHost]int // of subscribers
	blocks    []modelBlock      // as they were given
	layouts   map[string]*rulefile.Layout
	zones     bool           // inside interfaces are zones
	errors    map[string]int // of ICMP that were translated, by what the packets inside belong to
	// lost: the engine has made a choice that no packet showed. Nothing can be said of it
	// from now on.
	lost bool
}

// modelEnds are a packet's source and destination. A query of ICMP has its identifier
// as source port and no destination port, a reply the other way round.
type modelEnds struct{ src, dst netip.AddrPort }

type modelKey struct {
	inside   bool
	protocol rulefile.Protocol
	modelEnds
}

type modelPacket struct {
	modelKey
	link               string
	syn, ack, fin, rst bool
	query              bool // of ICMP
	ttl                uint8
	length             int
	error              *modelError // it is one of ICMP
}

// modelError is what an ICMP error has in it: a packet as its sender has seen it, so many bytes.
type modelError struct {
	about      modelPacket
	kind, code uint8
	quoted     int
}

// modelOutcome is how a packet ended: ends are where it went, if it did, and about those of the
// packet inside an error.
type modelOutcome struct {
	reason      abiNatReason
	ends, about modelEnds
}

func (e modelEnds) String() string { return e.src.String() + " -> " + e.dst.String() }

func (o modelOutcome) String() string {
	text := rulefile.Reason(o.reason).String()
	if isTranslated(o) {
		text += " " + o.ends.String()
	}
	if o.about != (modelEnds{}) {
		text += " about " + o.about.String()
	}
	return text
}

func (p modelPacket) String() string {
	text := fmt.Sprintf("%s %s by %s, TTL %d, %d bytes", p.protocol, p.modelEnds, p.link, p.ttl, p.length)
	for i, on := range []bool{p.syn, p.ack, p.fin, p.rst, p.query} {
		if on {
			text += [...]string{" SYN", " ACK", " FIN", " RST", " query"}[i]
		}
	}
	if e := p.error; e != nil {
		text += fmt.Sprintf(", error %d/%d about %d bytes of %s", e.kind, e.code, e.quoted, e.about)
	}
	return text
}

type modelFlow struct {
	session  *modelSession
	to       modelEnds
	link     string // that its packets must come by; "" any
	owner    bool   // of the direction that opened the session
	outbound bool   // from an internal host
	returns  bool   // to is an external endpoint of another internal host, or from one
}

type modelSession struct {
	class    rulefile.Class
	seen     time.Duration
	syn, fin [2]bool // by whether it is the owner's
	rst      bool
}

type modelInside struct {
	pool  string
	class rulefile.Class
	end   netip.AddrPort
}

type modelOutside struct {
	class rulefile.Class
	end   netip.AddrPort
}

type modelHost struct {
	pool string
	host netip.Addr
}

type modelMapping struct {
	inside    netip.AddrPort
	pool      string
	class     rulefile.Class // ClassOther: of the whole address
	outside   netip.AddrPort
	filtering rulefile.FilteringMode
	remotes   map[netip.Addr]bool
	single    bool // a session's own, which nobody else can use
}

type modelAddress struct {
	local    bool
	oneToOne bool
	ports    rulefile.PortRange
	reserved map[modelPort]bool
}

// modelPort is a port of a space of ports.
type modelPort struct {
	class rulefile.Class
	port  uint16
}

func newModel(file *rulefile.File, facts Facts, route func(netip.Addr) string) *model {
	m := &model{
		file: file, facts: facts, route: route,
		flows: map[modelKey]*modelFlow{}, mappings: map[modelInside]*modelMapping{}, addresses: map[netip.Addr]*modelAddress{},
		homes: map[modelHost]netip.Addr{}, targets: map[modelHost]netip.Addr{},
		held: map[modelOutside]*modelMapping{}, sessions: map[modelHost]int{}, layouts: map[string]*rulefile.Layout{},
	}
	for i := range file.Pools {
		if l := file.Layout(&file.Pools[i]); l != nil {
			m.layouts[file.Pools[i].Name] = l
		}
	}
	for i := range file.Rules {
		links := file.Outside
		if out := file.Rules[i].Out; out != "" {
			links = []string{out}
		}
		for _, link := range links {
			_, addrs := m.pool(&file.Rules[i], link)
			for _, a := range addrs {
				m.outside(a, &file.Rules[i])
			}
		}
	}
	for _, r := range file.Rules {
		switch a := r.Action.(type) {
		case rulefile.Map:
			// On an outside network the gateway has the address, by whichever link the map is not for.
			for i := range rulefile.RangeOf(a.Outside).Count() {
				addr := rulefile.RangeOf(a.Outside).At(i)
				near := func(l Link) bool { return l.Outside && l.Addresses[0].Contains(addr) }
				if m.addresses[addr] == nil && !a.IsIdentity() && slices.ContainsFunc(facts.Links, near) {
					m.addresses[addr] = &modelAddress{reserved: map[modelPort]bool{}}
				}
			}
		case rulefile.DNAT:
			have := m.addresses[a.Address]
			if have == nil {
				have = &modelAddress{local: slices.Contains(facts.Local, a.Address), reserved: map[modelPort]bool{}}
				m.addresses[a.Address] = have
			}
			if !a.Ports.IsZero() {
				for p := int(a.Ports.First); p <= int(a.Ports.Last); p++ {
					have.reserved[modelPort{a.Protocol.Class(), uint16(p)}] = true
				}
			}
		}
	}
	return m
}

// outside notes an address that a source rule gives, and which ports of it.
func (m *model) outside(addr netip.Addr, r *rulefile.Rule) {
	a := &modelAddress{local: slices.Contains(m.facts.Local, addr), reserved: map[modelPort]bool{}}
	switch action := r.Action.(type) {
	case rulefile.Masquerade:
		a.ports = action.Ports
	case rulefile.SNAT:
		a.ports = action.Ports
		if p := m.file.Pool(action.Pool); p != nil {
			a.ports, a.oneToOne = p.Ports, p.OneToOne
		}
	}
	if a.ports.IsZero() {
		a.ports = rulefile.DefaultPorts
		for p := int(m.facts.LocalPorts[0]); a.local && p <= int(m.facts.LocalPorts[1]); p++ {
			for class := range rulefile.Class(rulefile.PortClasses) {
				a.reserved[modelPort{class, uint16(p)}] = true
			}
		}
	}
	m.addresses[addr] = a
}

// pool is what a source rule gives to packets that leave by a link: its name, its addresses.
func (m *model) pool(r *rulefile.Rule, link string) (string, []netip.Addr) {
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		for _, l := range m.facts.Links {
			if l.Name == link {
				return "masquerade " + link, []netip.Addr{l.Addresses[0].Addr()}
			}
		}
	case rulefile.SNAT:
		if a.Pool == "" {
			return "address " + a.Address.String(), []netip.Addr{a.Address}
		}
		var addrs []netip.Addr
		for _, r := range m.file.Pool(a.Pool).Addresses {
			for i := range r.Count() {
				addrs = append(addrs, r.At(i))
			}
		}
		return a.Pool, addrs
	}
	return "", nil
}

// packet reports what is wrong with how a packet ended, if anything is.
func (m *model) packet(p modelPacket, saw modelOutcome) error {
	want, err := m.decide(p, saw)
	if err == nil && want != saw {
		err = fmt.Errorf("want %v", want)
	}
	return err
}

func refused(reason abiNatReason) (modelOutcome, error) { return modelOutcome{reason: reason}, nil }

func (m *model) decide(p modelPacket, saw modelOutcome) (modelOutcome, error) {
	if p.error != nil {
		return m.decideError(p)
	}
	if m.file.IsOneArmed(p.link) {
		p.inside = m.from(p)
	}
	f := m.flows[p.modelKey]
	if f == nil {
		return m.open(p, saw)
	}
	s := f.session
	if f.returns && !p.inside {
		return refused(abiNatReasonNAT_DROP_SPOOFED)
	}
	if f.link != "" && f.link != p.link { // its host has moved, or somebody pretends to be it
		if m.route(p.src.Addr()) != p.link {
			return refused(abiNatReasonNAT_DROP_SPOOFED)
		}
		f.link = p.link
	}
	if m.now-s.seen > m.timeout(s) {
		if reason := m.revive(p, f); reason != translated {
			return refused(reason)
		}
	}
	if f.returns {
		s.step(p, f)
		s.seen = m.now
		return m.comeBack(p, f, saw)
	}
	if reason := m.carries(p, f.to); reason != translated {
		return refused(reason) // and its connection is as before
	}
	s.step(p, f)
	return m.forward(p, f.to, s)
}

// decideError is what becomes of an ICMP error (RFC 5508). The packet inside went the other way:
// turned round it is of a session or a stateless rule, or of neither. What that makes of it, turned
// round again, is what its sender knows. No session changes.
func (m *model) decideError(p modelPacket) (modelOutcome, error) {
	reply := p.error.about.turned()
	reply.link, reply.inside = p.link, p.inside
	if m.file.IsOneArmed(p.link) {
		reply.inside = m.from(reply)
	}
	if reply.dst.Addr() != p.dst.Addr() {
		return refused(abiNatReasonNAT_DROP_NO_SESSION)
	}
	to, of := modelEnds{}, "a session"
	switch f := m.flows[reply.modelKey]; {
	case f == nil:
		reply.error, reply.ttl, reply.length = p.error, 64, 0
		out, err := m.open(reply, modelOutcome{})
		if out.reason == abiNatReasonNAT_PASS_NO_RULE && !m.passes(p, reply) {
			return refused(abiNatReasonNAT_DROP_SPOOFED)
		}
		if err != nil || !isTranslated(out) {
			return out, err
		}
		to, of = out.ends, "a stateless map"
	case !f.returns:
		to = f.to
	default: // it left and came back: only who got it knows it as it was then
		back := m.flows[modelKey{false, reply.protocol, f.to}]
		if !reply.inside || back == nil {
			return refused(abiNatReasonNAT_DROP_NO_SESSION)
		}
		to, of = back.to, "a packet that came back"
	}
	if p.ttl <= 1 {
		return refused(abiNatReasonNAT_DROP_TTL)
	}
	m.errors[of]++
	// RFC 5508 REQ-5: nobody inside has an address outside but the one that was asked for.
	from := netip.AddrPortFrom(to.src.Addr(), 0)
	if !reply.inside && reply.src.Addr() != p.src.Addr() {
		from = p.src
	}
	reason := abiNatReasonNAT_TRANSLATED_IN
	if reply.inside {
		reason = abiNatReasonNAT_TRANSLATED_OUT
	}
	return modelOutcome{reason, modelEnds{from, netip.AddrPortFrom(to.dst.Addr(), 0)}, modelEnds{to.dst, to.src}}, nil
}

// turned is a packet from where that one went to.
func (p modelPacket) turned() modelPacket {
	p.src, p.dst = p.dst, p.src
	p.query = p.protocol == rulefile.ICMP && p.dst.Port() == 0 && p.src.Port() != 0
	return p
}

// passes reports whether an error that no rule is about may go on: not from a source that nobody
// inside has, nor from inside about a packet to somebody elsewhere.
func (m *model) passes(p, reply modelPacket) bool {
	p.inside = reply.inside
	there := reply.src.Addr()
	return !m.pretends(p) && (!p.inside || m.route(there) == p.link && !slices.Contains(m.facts.Local, there))
}

// from reports whether a packet by a link of both sides is from inside: its session says so, or
// else the rules.
func (m *model) from(p modelPacket) bool {
	for _, p.inside = range []bool{true, false} {
		if m.flows[p.modelKey] != nil {
			return p.inside
		}
	}
	return m.inside(p.link, p.src.Addr())
}

// inside reports whether an address that is behind a link is an internal host's.
func (m *model) inside(link string, a netip.Addr) bool {
	if !m.file.IsOneArmed(link) {
		return m.file.IsInside(link)
	}
	return slices.ContainsFunc(m.file.Rules, func(r rulefile.Rule) bool {
		prefix, ok := sourceOf(&r)
		return ok && prefix.Contains(a)
	})
}

// comeBack is what becomes of a packet that has left by f and comes back as another's from
// outside: RFC 4787 REQ-9.
func (m *model) comeBack(p modelPacket, f *modelFlow, saw modelOutcome) (modelOutcome, error) {
	back := p
	back.inside, back.modelEnds = false, f.to
	to := m.flows[back.modelKey]
	if to == nil {
		if reason := m.enters(back); reason != translated {
			return refused(reason)
		}
		delete(m.flows, p.modelKey)
		delete(m.flows, modelKey{false, p.protocol, modelEnds{f.to.dst, f.to.src}})
		return m.open(p, saw)
	}
	s := to.session
	if m.now-s.seen > m.timeout(s) {
		if reason := m.revive(back, to); reason != translated {
			return refused(reason)
		}
	}
	s.step(back, to)
	s.seen = m.now
	return m.forward(p, to.to, s)
}

// translated stands for no reason against it.
const translated = abiNatReasonNAT_REASONS

// forward is what is asked of every packet that would be sent.
func (m *model) forward(p modelPacket, to modelEnds, s *modelSession) (modelOutcome, error) {
	if reason := m.carries(p, to); reason != translated {
		return refused(reason)
	}
	s.seen = m.now
	if p.inside {
		return modelOutcome{reason: abiNatReasonNAT_TRANSLATED_OUT, ends: to}, nil
	}
	return modelOutcome{reason: abiNatReasonNAT_TRANSLATED_IN, ends: to}, nil
}

// carries reports whether a packet can be sent to where it would go.
func (m *model) carries(p modelPacket, to modelEnds) abiNatReason {
	out := m.link(m.route(to.dst.Addr()))
	up := p.inside && to.dst.Addr() == p.dst.Addr() // the stack may answer, for it is to send it there, too
	switch {
	case p.ttl <= 1 && up:
		return abiNatReasonNAT_PASS_TTL
	case p.ttl <= 1:
		return abiNatReasonNAT_DROP_TTL
	case p.length > out.MTU && up:
		return abiNatReasonNAT_PASS_TOO_BIG
	case p.length > out.MTU:
		return abiNatReasonNAT_DROP_TOO_BIG
	}
	return translated
}

func (m *model) link(name string) *Link {
	i := slices.IndexFunc(m.facts.Links, func(l Link) bool { return l.Name == name })
	return &m.facts.Links[i]
}

// --- life ------------------------------------------------------------------------

func (m *model) timeout(s *modelSession) time.Duration {
	t := &m.file.Defaults.Timeouts
	switch s.class {
	case rulefile.ClassUDP:
		return t[rulefile.TimeoutUDP]
	case rulefile.ClassICMP:
		return t[rulefile.TimeoutICMP]
	case rulefile.ClassOther:
		return t[rulefile.TimeoutOther]
	}
	switch {
	case s.rst:
		return t[rulefile.TimeoutTCPReset]
	case s.fin[0] && s.fin[1]:
		return t[rulefile.TimeoutTCPClosing]
	case s.syn[0] && s.syn[1]:
		return t[rulefile.TimeoutTCPEstablished]
	}
	return t[rulefile.TimeoutTCPOpening]
}

// step follows a TCP connection: RFC 7857, section 2.
func (s *modelSession) step(p modelPacket, f *modelFlow) {
	if s.class != rulefile.ClassTCP {
		return
	}
	if p.syn && (p.fin || p.rst) { // no TCP sends that
		return
	}
	if p.rst {
		s.rst = true
		return
	}
	if p.syn && !p.ack && (f.owner || f.outbound) && (s.rst || s.fin[0] && s.fin[1]) {
		s.syn, s.fin = [2]bool{}, [2]bool{}
	}
	s.rst = false
	who := 0
	if f.owner {
		who = 1
	}
	if !f.owner && p.ack && !p.syn && !s.syn[0] && !s.syn[1] {
		s.syn = [2]bool{true, true} // taken up in its middle, and answered
	}
	s.syn[who] = s.syn[who] || p.syn
	s.fin[who] = s.fin[who] || p.fin
}

// opens reports whether a packet may open a session.
func opens(p modelPacket) bool {
	if p.error != nil {
		return false
	}
	switch p.protocol.Class() {
	case rulefile.ClassICMP:
		return p.query
	case rulefile.ClassTCP:
		if p.rst || p.fin {
			return false
		}
		return p.syn && !p.ack || p.inside && p.ack && !p.syn
	}
	return true
}

// revive asks whether a packet may bring an expired session back.
func (m *model) revive(p modelPacket, f *modelFlow) abiNatReason {
	s := f.session
	if reason := m.enters(p); !f.outbound && reason != translated {
		return reason
	}
	if !opens(p) {
		return abiNatReasonNAT_DROP_NO_SESSION
	}
	s.seen, s.syn, s.fin, s.rst = m.now, [2]bool{}, [2]bool{}, false
	s.step(p, f)
	return translated
}

// enters reports whether a new packet from outside would be let in.
func (m *model) enters(p modelPacket) abiNatReason {
	if !opens(p) {
		return abiNatReasonNAT_DROP_NO_SESSION
	}
	if m.destination(p) != nil {
		return translated
	}
	mapping, reason := m.mappingOf(p)
	if reason != translated {
		return reason
	}
	return mapping.admits(p.src.Addr())
}

func (mapping *modelMapping) admits(remote netip.Addr) abiNatReason {
	switch {
	case mapping.single:
	case mapping.filtering == rulefile.FilterEndpointIndependent, mapping.filtering == rulefile.FilterAddress && mapping.remotes[remote]:
		return translated
	}
	return abiNatReasonNAT_DROP_FILTERED
}

// --- rules -----------------------------------------------------------------------

// port is a packet's destination port as rules know it.
func (p modelPacket) port() uint16 {
	if p.protocol.HasPorts() {
		return p.dst.Port()
	}
	return 0
}

func (m *model) excluded(p modelPacket) bool {
	return slices.ContainsFunc(m.file.Rules, func(r rulefile.Rule) bool {
		a, ok := r.Action.(rulefile.Exclude)
		return ok && a.Source.Contains(p.src.Addr()) && a.Destination.Contains(p.dst.Addr()) &&
			(a.Protocol == rulefile.AnyProtocol || a.Protocol == p.protocol) && (a.Ports.IsZero() || a.Ports.Contains(p.port()))
	})
}

// destination is the rule for a packet's destination: for its port, for a range of ports, or for
// its address: of each kind first one that is bound to where the packet came in; then one for its
// protocol, then the longest prefix.
func (m *model) destination(p modelPacket) (found *rulefile.Rule) {
	const byAddress, byRange, byPort = 1, 2, 3
	var best [4]int
	for i := range m.file.Rules {
		r := &m.file.Rules[i]
		var rank [4]int
		switch a := r.Action.(type) {
		case rulefile.DNAT:
			if a.Address != p.dst.Addr() || a.Protocol != rulefile.AnyProtocol && a.Protocol != p.protocol || r.In != "" && r.In != p.link {
				continue
			}
			rank = [4]int{byAddress, rankOf(r.In != ""), rankOf(a.Protocol != rulefile.AnyProtocol), 32}
			if !a.Ports.IsZero() {
				if !a.Ports.Contains(p.port()) {
					continue
				}
				rank[0] = byRange
				if a.Ports.Count() == 1 {
					rank[0] = byPort
				}
			}
		case rulefile.Map:
			in := r.In
			if m.zones {
				in = "" // it says whose addresses these are
			}
			holds := m.file.IsInside(p.link) && (in == "" || in == p.link) || m.file.IsOutside(p.link) && (r.Out == "" || r.Out == p.link)
			if !a.Outside.Contains(p.dst.Addr()) || !holds {
				continue
			}
			rank = [4]int{byAddress, rankOf(in != "" || r.Out != ""), 0, a.Outside.Bits()}
		}
		if slices.Compare(rank[:], best[:]) > 0 {
			best, found = rank, r
		}
	}
	return found
}

func rankOf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// source is the rule for a packet's source that leaves by out: bound to both ways, to the
// egress interface, to the ingress interface, to none; of these the longest prefix.
func (m *model) source(p modelPacket, out string) *rulefile.Rule {
	best, found := -1, (*rulefile.Rule)(nil)
	for i := range m.file.Rules {
		r := &m.file.Rules[i]
		prefix, ok := sourceOf(r)
		if !ok || !prefix.Contains(p.src.Addr()) || r.In != "" && r.In != p.link || r.Out != "" && r.Out != out || r.Out == "" && !m.file.IsOutside(out) {
			continue
		}
		rank := prefix.Bits()
		if r.In != "" {
			rank += 100
		}
		if r.Out != "" {
			rank += 200
		}
		if rank > best {
			best, found = rank, r
		}
	}
	return found
}

// sourceOf is whose packets a source rule is about.
func sourceOf(r *rulefile.Rule) (netip.Prefix, bool) {
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		return a.Source, true
	case rulefile.SNAT:
		return a.Source, true
	case rulefile.Map:
		return a.Inside, true
	}
	return netip.Prefix{}, false
}

// mapAddress puts an address of one prefix to the same place in another.
func mapAddress(a netip.Addr, to netip.Prefix) netip.Addr {
	from, base := a.As4(), to.Masked().Addr().As4()
	for i := range 32 {
		if bit := byte(0x80 >> (i % 8)); i >= to.Bits() {
			base[i/8] |= from[i/8] & bit
		}
	}
	return netip.AddrFrom4(base)
}

// --- a packet without session ----------------------------------------------------

func (m *model) open(p modelPacket, saw modelOutcome) (modelOutcome, error) {
	src, dst := p.src.Addr().As4(), p.dst.Addr().As4()
	switch {
	case src == dst:
		return refused(abiNatReasonNAT_DROP_SPOOFED)
	case toMany(dst):
		return refused(abiNatReasonNAT_PASS_MULTICAST)
	case src == [4]byte{} || src[0] == 127 || toMany(src):
		return refused(abiNatReasonNAT_DROP_SPOOFED)
	case dst == [4]byte{} || dst[0] == 127:
		return refused(abiNatReasonNAT_PASS_NO_RULE)
	case m.pretends(p):
		return refused(abiNatReasonNAT_DROP_SPOOFED)
	case m.excluded(p):
		return refused(abiNatReasonNAT_PASS_EXCLUDED)
	}

	to, session := p.modelEnds, false
	var target *modelMapping
	var balanced *modelHost
	rule := m.destination(p)
	switch {
	case rule != nil:
		end, err := m.target(p, rule, saw)
		if err != nil {
			return modelOutcome{}, err
		}
		to.dst = end
		if a, ok := rule.Action.(rulefile.DNAT); ok && len(a.Targets) > 1 {
			balanced = &modelHost{rule.Key(), p.src.Addr()}
		}
		session = !isStateless(rule)
	case m.addresses[p.dst.Addr()] != nil:
		mapping, reason := m.mappingOf(p)
		if mapping != nil && !opens(p) {
			return refused(abiNatReasonNAT_DROP_NO_SESSION)
		}
		if mapping == nil || reason != translated && !p.inside {
			return refused(reason)
		}
		target, session = mapping, true
		to.dst = netip.AddrPortFrom(mapping.inside.Addr(), to.dst.Port())
		switch {
		case mapping.class == rulefile.ClassOther:
		case p.query:
			to.src = netip.AddrPortFrom(to.src.Addr(), mapping.inside.Port())
		default:
			to.dst = mapping.inside
		}
	case !p.inside:
		return refused(abiNatReasonNAT_PASS_NO_RULE)
	}

	moved := to.dst != p.dst // an identity map leaves it
	if slices.Contains(m.facts.Local, to.dst.Addr()) {
		if moved {
			return refused(abiNatReasonNAT_DROP_UNSUPPORTED)
		}
		return refused(abiNatReasonNAT_PASS_LOCAL)
	}
	out := m.route(to.dst.Addr())
	way, toInside := out, m.inside(out, to.dst.Addr())
	if moved && p.inside && toInside { // hairpin: the way that it would have gone
		way = m.route(p.dst.Addr())
	}
	var hide *rulefile.Rule
	among := p.inside && toInside && !moved && m.file.IsOneArmed(out)
	if p.inside && !among || rule != nil && moved {
		hide = m.source(p, way)
	}
	if hide == nil && rule == nil && target == nil {
		return refused(abiNatReasonNAT_PASS_NO_RULE)
	}
	if from := m.route(p.src.Addr()); slices.Contains(m.facts.Local, p.src.Addr()) || from != p.link && (p.inside || m.inside(from, p.src.Addr())) {
		return refused(abiNatReasonNAT_DROP_SPOOFED)
	}
	session = session || hide != nil && !isStateless(hide)
	if session && !opens(p) {
		return refused(abiNatReasonNAT_DROP_NO_SESSION)
	}
	// The host that a rule sends the session to, where it counts.
	var published *modelHost
	if rule != nil && session && toInside {
		s := m.subscriber(poolPublished, to.dst.Addr())
		published = &s
	}
	full := func(s *modelHost) bool { return s != nil && !m.maySession(*s, 0) }
	// Refused before anything is taken, unless the sender's external address must be known.
	from, takes := p.src.Addr(), hide != nil
	if takes {
		if a, ok := hide.Action.(rulefile.Map); ok {
			from, takes = mapAddress(from, a.Outside), false
		}
	}
	if target != nil && hide == nil {
		if reason := m.admitted(target, from, false, nil); reason != translated {
			return refused(reason)
		}
	}
	if hide == nil && full(published) {
		return refused(abiNatReasonNAT_DROP_SOURCE_LIMIT)
	}
	if session {
		if reason := m.carries(p, to); reason != translated {
			return refused(reason)
		}
	}
	var own *modelMapping
	var sender *modelHost // the subscriber, if its session counts
	switch {
	case takes:
		pool, _ := m.pool(hide, way)
		s := m.subscriber(pool, p.src.Addr())
		sender = &s
	case hide != nil && session && p.inside:
		s := m.subscriber(poolMap, p.src.Addr())
		sender = &s
	}
	if full(sender) {
		return refused(abiNatReasonNAT_DROP_SOURCE_LIMIT)
	}
	undo := func() {}
	if hide != nil {
		var reason abiNatReason
		var err error
		if target != nil || published != nil {
			undo = m.undo()
		}
		to.src, own, reason, err = m.hidden(p, hide, way, to, saw)
		if err != nil || reason != translated {
			return modelOutcome{reason: reason}, err
		}
	}
	admitted := translated
	if target != nil && hide != nil {
		// What a host sends to its own external address, it has sent to that.
		toSelf := target == own && to.src.Addr() == p.dst.Addr() && own.filtering == rulefile.FilterAddress && !own.single
		admitted = m.admitted(target, to.src.Addr(), toSelf, sender)
	}
	if hide != nil && full(published) {
		admitted = abiNatReasonNAT_DROP_SOURCE_LIMIT
	}
	hairpin, returns := moved && session && hide != nil && p.inside && toInside, false
	if hairpin {
		known := m.flows[modelKey{false, p.protocol, modelEnds{to.src, p.dst}}] != nil || to.src == p.dst && target == own
		if known {
			admitted = translated
		}
		if !known && admitted == abiNatReasonNAT_DROP_SOURCE_LIMIT {
			undo()
			return refused(admitted)
		}
		returns = known || admitted != translated
	}
	if admitted != translated && !returns {
		undo()
		return refused(admitted)
	}
	if returns {
		to.dst, toInside, balanced = p.dst, false, nil
	}
	var f *modelFlow
	s := &modelSession{class: p.protocol.Class(), seen: m.now}
	if session {
		answer := modelKey{toInside, p.protocol, modelEnds{to.dst, to.src}}
		if m.flows[answer] != nil {
			end, reason, err := m.otherPort(p, own, answer, saw)
			if err != nil || reason != translated {
				return modelOutcome{reason: reason}, err
			}
			to.src, answer.dst = end, end
		}
		f = &modelFlow{session: s, to: to, owner: true, outbound: p.inside, returns: returns}
		if p.inside {
			f.link = p.link
		}
		m.flows[p.modelKey] = f
		m.flows[answer] = &modelFlow{session: s, to: modelEnds{p.dst, p.src}, outbound: answer.inside, returns: returns}
		s.step(p, f)
		if sender != nil {
			m.sessions[*sender]++
		}
		if target != nil && !returns {
			m.sessions[m.subscriber(target.pool, target.inside.Addr())]++
		}
		if published != nil && !returns {
			m.sessions[*published]++
		}
		if own != nil && !own.single && own.filtering == rulefile.FilterAddress {
			own.remotes[p.dst.Addr()] = true
		}
		if hide != nil {
			pool, addrs := m.pool(hide, way)
			if len(addrs) > 1 {
				m.homes[m.subscriber(pool, p.src.Addr())] = to.src.Addr()
			}
		}
	}
	if balanced != nil {
		m.targets[*balanced] = to.dst.Addr()
	}
	switch {
	case !returns:
		return m.forward(p, to, s)
	case admitted != translated:
		return refused(admitted)
	}
	return m.comeBack(p, f, saw)
}

// pretends reports whether the source of a packet from inside is one that no internal host has,
// unless it is routed to where the packet came from. By a link of both sides that is so for
// strangers too, and nobody there has what rules translate to.
func (m *model) pretends(p modelPacket) bool {
	if !p.inside && !m.file.IsOneArmed(p.link) {
		return false
	}
	src := p.src.Addr()
	address := m.addresses[src]
	known := address != nil || src.As4()[0] == 0 || src.As4()[0] >= 240
	given := address != nil && (address.oneToOne || !address.ports.IsZero())
	for _, r := range m.file.Rules {
		a, ok := r.Action.(rulefile.Map)
		given = given || ok && a.Outside.Contains(src)
	}
	if given && !p.inside {
		return true
	}
	return (known || given) && (slices.Contains(m.facts.Local, src) || m.route(src) != p.link)
}

func toMany(a [4]byte) bool { return a[0]>>4 == 14 || a == [4]byte{255, 255, 255, 255} }

func isStateless(r *rulefile.Rule) bool {
	a, ok := r.Action.(rulefile.Map)
	return ok && a.Stateless
}

// target is where a destination rule sends a packet.
func (m *model) target(p modelPacket, r *rulefile.Rule, saw modelOutcome) (netip.AddrPort, error) {
	a, ok := r.Action.(rulefile.DNAT)
	if !ok {
		return netip.AddrPortFrom(mapAddress(p.dst.Addr(), r.Action.(rulefile.Map).Inside), p.dst.Port()), nil
	}
	t := a.Targets[0]
	if len(a.Targets) > 1 {
		i := slices.IndexFunc(a.Targets, func(t rulefile.Target) bool { return t.Address == saw.ends.dst.Addr() })
		if i >= 0 {
			t = a.Targets[i]
		}
		before, known := m.targets[modelHost{r.Key(), p.src.Addr()}]
		if known && i >= 0 && before != t.Address {
			return netip.AddrPort{}, fmt.Errorf("the client has had target %s", before)
		}
		if i < 0 { // refused, as one of them is or as none of them is
			limited := saw.reason == abiNatReasonNAT_DROP_SOURCE_LIMIT
			i = slices.IndexFunc(a.Targets, func(t rulefile.Target) bool {
				return (!known || t.Address == before) && m.maySession(m.subscriber(poolPublished, t.Address), 0) != limited
			})
			t = a.Targets[max(i, 0)]
		}
	}
	port := p.dst.Port()
	if !t.Ports.IsZero() {
		port = t.Ports.First + port - a.Ports.First
	}
	return netip.AddrPortFrom(t.Address, port), nil
}

// mappingOf is the mapping that a packet addresses, or why there is none.
func (m *model) mappingOf(p modelPacket) (*modelMapping, abiNatReason) {
	a := m.addresses[p.dst.Addr()]
	if a == nil {
		return nil, abiNatReasonNAT_DROP_NO_MAPPING
	}
	key := modelOutside{p.protocol.Class(), p.dst}
	if p.query && p.error == nil {
		key.end = netip.AddrPortFrom(p.dst.Addr(), p.src.Port())
	}
	if a.oneToOne {
		key = modelOutside{rulefile.ClassOther, netip.AddrPortFrom(p.dst.Addr(), 0)}
	}
	mapping, held := m.held[key]
	switch {
	case held && mapping.single:
		return mapping, abiNatReasonNAT_DROP_FILTERED
	case held:
		return mapping, translated
	case a.local:
		return nil, abiNatReasonNAT_PASS_LOCAL
	}
	return nil, abiNatReasonNAT_DROP_NO_MAPPING
}

// --- external endpoints -----------------------------------------------------------

// undo takes back what hidden gives: nothing has left by it.
func (m *model) undo() func() {
	mappings, held, blocks, lost := maps.Clone(m.mappings), maps.Clone(m.held), slices.Clone(m.blocks), m.lost
	return func() { m.mappings, m.held, m.blocks, m.lost = mappings, held, blocks, lost }
}

// hidden is what a source rule makes of a packet's source. saw has what the engine chose.
func (m *model) hidden(p modelPacket, r *rulefile.Rule, way string, to modelEnds, saw modelOutcome) (netip.AddrPort, *modelMapping, abiNatReason, error) {
	if a, ok := r.Action.(rulefile.Map); ok {
		return netip.AddrPortFrom(mapAddress(p.src.Addr(), a.Outside), to.src.Port()), nil, translated, nil
	}
	pool, addrs := m.pool(r, way)
	class := p.protocol.Class()
	inside := modelInside{pool, class, p.src}
	whole := m.addresses[addrs[0]].oneToOne
	if whole {
		inside = modelInside{pool, rulefile.ClassOther, netip.AddrPortFrom(p.src.Addr(), 0)}
	}
	subscriber := m.subscriber(pool, p.src.Addr())
	home, settled := m.homes[subscriber]
	placed := settled
	independent := whole || class < rulefile.PortClasses && m.file.MappingMode(r, class) == rulefile.EndpointIndependent
	filtering := rulefile.FilterEndpointIndependent
	for c := range rulefile.Class(rulefile.PortClasses) {
		if f := m.file.FilteringMode(r, c); whole && f > filtering || c == class && !whole {
			filtering = f
		}
	}
	end := func(mapping *modelMapping) netip.AddrPort {
		if whole || class == rulefile.ClassOther {
			return netip.AddrPortFrom(mapping.outside.Addr(), to.src.Port())
		}
		return mapping.outside
	}
	if have := m.mappings[inside]; have != nil && independent {
		return end(have), have, translated, nil
	}

	had := len(addrs)
	if action, ok := r.Action.(rulefile.SNAT); ok && m.file.Pool(action.Pool) != nil {
		addrs = slices.DeleteFunc(addrs, m.file.Pool(action.Pool).Drains)
	}
	drains := len(addrs) < had
	chosen := saw.ends.src
	if len(addrs) == 1 {
		home, settled = addrs[0], true
	}
	if !whole {
		all := addrs
		if settled {
			addrs = []netip.Addr{home}
		}
		if !settled || m.homeless(subscriber, home) {
			addrs = m.settle(subscriber, class, all)
		}
		if computed, ok := m.computedFree(subscriber); ok && (!settled || m.homeless(subscriber, home)) {
			addrs = []netip.Addr{computed.Address}
		}
	}
	if whole {
		addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool {
			_, held := m.held[modelOutside{rulefile.ClassOther, netip.AddrPortFrom(a, 0)}]
			return held
		})
		if len(addrs) == 0 {
			return netip.AddrPort{}, nil, abiNatReasonNAT_DROP_NO_ADDRESS, nil
		}
	}
	if class == rulefile.ClassOther && p.protocol == rulefile.ICMP {
		return netip.AddrPort{}, nil, abiNatReasonNAT_DROP_UNSUPPORTED, nil
	}
	shown := isTranslated(saw)
	if !shown {
		m.lost = m.lost || len(addrs) > 1
		chosen = netip.AddrPortFrom(addrs[0], p.src.Port())
	} else if !slices.Contains(addrs, chosen.Addr()) {
		return netip.AddrPort{}, nil, 0, fmt.Errorf("address %s is not one of %v", chosen.Addr(), addrs)
	}
	if class == rulefile.ClassOther && !whole {
		for _, a := range addrs { // that another host has towards the same receiver
			end := netip.AddrPortFrom(a, 0)
			if !shown && m.flows[modelKey{m.inside(m.route(to.dst.Addr()), to.dst.Addr()), p.protocol, modelEnds{to.dst, end}}] != nil && saw.reason == abiNatReasonNAT_DROP_NO_PORT {
				chosen = end
			}
		}
		return netip.AddrPortFrom(chosen.Addr(), to.src.Port()), nil, translated, nil
	}
	mapping := &modelMapping{inside: inside.end, pool: pool, class: inside.class, outside: chosen, filtering: filtering, remotes: map[netip.Addr]bool{}}
	if whole {
		mapping.outside = netip.AddrPortFrom(chosen.Addr(), 0)
	} else {
		free, reason := m.freeOf(subscriber, class, chosen.Addr(), p.src.Port())
		if len(addrs) > 1 && !shown && len(free) == 0 {
			if _, other := m.freeOf(subscriber, class, addrs[1], p.src.Port()); other == translated {
				reason = other
			}
		}
		switch {
		case (reason == abiNatReasonNAT_DROP_NO_BLOCK || reason == abiNatReasonNAT_DROP_NO_PORT && !placed) && drains && saw.reason == abiNatReasonNAT_DROP_NO_ADDRESS:
			return netip.AddrPort{}, nil, saw.reason, nil // no other address has room, and this one is drained
		case reason != translated:
			return netip.AddrPort{}, nil, reason, nil
		case shown && !slices.Contains(free, chosen.Port()):
			return netip.AddrPort{}, nil, 0, fmt.Errorf("port %d, of which the best free ones are %v", chosen.Port(), free)
		case !shown && len(free) > 1:
			m.lost = true
		case !shown:
			mapping.outside = netip.AddrPortFrom(chosen.Addr(), free[0])
		}
	}
	if independent {
		m.mappings[inside] = mapping
	} else {
		mapping.single = true
	}
	m.held[modelOutside{inside.class, mapping.outside}] = mapping
	if !whole {
		if err := m.block(subscriber, mapping.outside); err != nil {
			return netip.AddrPort{}, nil, 0, err
		}
	}
	return end(mapping), mapping, translated, nil
}

// otherPort is what the source becomes of a packet whose session's answers are another session's:
// own is its mapping, if it has one. saw has what the engine chose.
func (m *model) otherPort(p modelPacket, own *modelMapping, answer modelKey, saw modelOutcome) (netip.AddrPort, abiNatReason, error) {
	class := p.protocol.Class()
	if class == rulefile.ClassOther || own != nil && own.single {
		return netip.AddrPort{}, abiNatReasonNAT_DROP_NO_PORT, nil
	}
	end := netip.AddrPortFrom(answer.dst.Addr(), saw.ends.src.Port())
	answer.dst = end
	if own != nil && own.class != rulefile.ClassOther {
		subscriber := m.subscriber(own.pool, p.src.Addr())
		free, _ := m.freeOf(subscriber, class, end.Addr(), p.src.Port())
		if len(free) == 0 { // the session that it is in the way of is not another's to end
			return netip.AddrPort{}, abiNatReasonNAT_DROP_NO_PORT, nil
		}
		if isTranslated(saw) && !slices.Contains(free, end.Port()) {
			return netip.AddrPort{}, 0, fmt.Errorf("port %d, of which the best free ones are %v", end.Port(), free)
		}
		m.held[modelOutside{class, end}] = &modelMapping{inside: p.src, pool: own.pool, class: class, outside: end, filtering: own.filtering, single: true}
		if err := m.block(subscriber, end); err != nil {
			return netip.AddrPort{}, 0, err
		}
	}
	if !isTranslated(saw) {
		m.lost = true
		return end, translated, nil
	}
	if m.flows[answer] != nil || class != rulefile.ClassICMP && end.Port() < 1024 != (p.src.Port() < 1024) {
		return netip.AddrPort{}, 0, fmt.Errorf("source %v of what %v sends, which is another session's or of another range", end, p.src)
	}
	return end, translated, nil
}

// free gives the ports of an address that may be given to who wants one: that one, or
// those of its parity and on its side of 1024, or if there are none those that there are.
func (m *model) free(class rulefile.Class, addr netip.Addr, wanted uint16, of rulefile.PortRange) []uint16 {
	a := m.addresses[addr]
	var all, alike []uint16
	near := func(p uint16) bool { return class == rulefile.ClassICMP || p < 1024 == (wanted < 1024) }
	given := func(p uint16) bool {
		_, held := m.held[modelOutside{class, netip.AddrPortFrom(addr, p)}]
		return held || a.reserved[modelPort{class, p}]
	}
	if of.Contains(wanted) && !given(wanted) {
		return []uint16{wanted}
	}
	for p := int(of.First); p <= int(of.Last); p++ {
		port := uint16(p)
		if given(port) {
			continue
		}
		all = append(all, port)
		if near(port) && (class == rulefile.ClassICMP || !m.file.Defaults.PortParity || port%2 == wanted%2) {
			alike = append(alike, port)
		}
	}
	if len(alike) > 0 {
		return alike
	}
	if alike = slices.DeleteFunc(slices.Clone(all), func(p uint16) bool { return !near(p) }); len(alike) > 0 {
		return alike
	}
	return all
}

func isTranslated(o modelOutcome) bool {
	return o.reason == abiNatReasonNAT_TRANSLATED_IN || o.reason == abiNatReasonNAT_TRANSLATED_OUT
}
