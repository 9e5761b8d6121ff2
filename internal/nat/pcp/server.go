// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"
)

// Mapping is an explicit mapping, wanted or there.
type Mapping struct {
	Inside   netip.AddrPort
	Remote   netip.AddrPort // PEER: whom it is for; the zero value: everybody, or whom Filters have
	Protocol uint8          // 0: none, only the external address is wanted
	Nonce    Nonce
	Open     bool // without a nonce, by NAT-PMP
	Lifetime time.Duration
	// Outside is what is wanted: an address, a port, both or neither. Strict: that or none.
	Outside netip.AddrPort
	Strict  bool
	Filters []Filter
	Restate bool // Filters replace those of the mapping
}

// Engine makes mappings.
type Engine interface {
	// Map makes or extends a mapping: its external endpoint. It lowers the lifetime where less is
	// given. Errors are NotAuthorized (another
	// client's nonce, or the host is not translated), NoResources, UserExQuota,
	// CannotProvideExternal, and NetworkFailure. static: a rule of the gateway's own maps the
	// host, and always does.
	Map(*Mapping) (outside netip.AddrPort, static bool, r Result)
	// End ends a mapping: Success too if there is none.
	End(*Mapping) Result
	// Of gives those of a host.
	Of(host netip.Addr) []Mapping
	// Find gives the one of an internal endpoint, a protocol and a remote endpoint.
	Find(*Mapping) (Mapping, bool)
	// Epoch is since when no mapping was lost.
	Epoch() time.Duration
	// MaxFilters is how many filters a mapping may have.
	MaxFilters() int
}

// Config says what hosts may ask for.
type Config struct {
	MinLifetime, MaxLifetime time.Duration
	Rate                     Rate
}

// Server answers requests. It is not safe for concurrent use: requests are answered one by one.
type Server struct {
	engine  Engine
	config  Config
	limiter limiter
	client  asker // whose request is answered
	// Count is called with each request that was answered or dropped: "map", "success".
	Count func(protocol, opcode, result string)
}

// New makes a server.
func New(engine Engine, config Config) *Server {
	return &Server{engine: engine, config: config, limiter: newLimiter(config.Rate), Count: func(string, string, string) {}}
}

// Answer gives the answer to a datagram from that address, which came in by the interface of that
// index; nil if it gets none. now is on a clock that never goes back.
func (s *Server) Answer(now time.Time, in int, from netip.Addr, data []byte) []byte {
	from = from.Unmap()
	if len(data) < 2 || data[1]&response != 0 || !from.Is4() {
		s.Count("unknown", "unknown", "ignored")
		return nil
	}
	s.client = asker{in, from}
	if !s.limiter.allow(now, s.client) {
		s.Count(protocolName(data[0]), opcodeName(data), "rate-limited")
		return nil
	}
	if data[0] == 0 {
		return s.pmp(from, data)
	}
	if data[0] != version {
		s.Count("pcp", "unknown", UnsuppVersion.String())
		return refusal(data[:min(len(data), headerBytes)], UnsuppVersion, s.engine.Epoch(), false)
	}
	q, r := parse(data, from)
	if r != Success {
		s.Count("pcp", opcodeName(data), r.String())
		return refusal(data, r, s.engine.Epoch(), false)
	}
	outside, lifetime, r := s.do(from, q)
	s.Count("pcp", q.opcode.String(), r.String())
	if r != Success {
		return refusal(data, r, s.engine.Epoch(), true)
	}
	return q.answer(outside, lifetime, s.engine.Epoch())
}

func protocolName(version uint8) string {
	if version == 0 {
		return "nat-pmp"
	}
	return "pcp"
}

// opcodeName is one of a few words, whatever was sent.
func opcodeName(data []byte) string {
	if data[0] == 0 && data[1] <= pmpTCP {
		return [...]string{"address", "map", "map"}[data[1]]
	}
	if data[0] == version {
		return Opcode(data[1]).String()
	}
	return "unknown"
}

// do does what a request asks for.
func (s *Server) do(client netip.Addr, q *request) (outside netip.AddrPort, lifetime time.Duration, r Result) {
	if q.opcode == Announce {
		return outside, 0, Success
	}
	m := &Mapping{
		Inside: netip.AddrPortFrom(client, q.internal), Remote: q.remote, Protocol: q.protocol, Nonce: q.nonce, Lifetime: s.lifetime(q.lifetime), Outside: q.external,
		Strict: q.preferFailure,
	}
	if q.lifetime == 0 {
		return outside, 0, s.end(m)
	}
	if q.opcode == Peer { // as it says: section 12.1
		m.Strict = m.Outside.Addr().IsValid() || m.Outside.Port() != 0
	}
	if q.foreign && m.Strict {
		return outside, 0, CannotProvideExternal
	}
	if q.filtered {
		if m.Restate = true; !q.reset {
			m.Filters = s.filters(m)
		}
		m.Filters = distinct(append(m.Filters, q.filters...))
		if len(m.Filters) > s.engine.MaxFilters() {
			return outside, 0, ExcessiveRemotePeers
		}
	}
	outside, static, r := s.engine.Map(m)
	if r == Success && static {
		// It is there without being asked for, and lets everybody in.
		if len(m.Filters) > 0 {
			return outside, 0, ExcessiveRemotePeers
		}
		if m.Strict && (q.external.Port() != 0 && q.external.Port() != outside.Port() || q.external.Addr().IsValid() && q.external.Addr() != outside.Addr()) {
			return outside, 0, CannotProvideExternal
		}
	}
	return outside, m.Lifetime, r
}

// filters are those that the mapping has.
func (s *Server) filters(m *Mapping) []Filter {
	if have, ok := s.engine.Find(m); ok && have.Nonce == m.Nonce {
		return have.Filters
	}
	return nil
}

func distinct(filters []Filter) (out []Filter) {
	for _, f := range filters {
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// end ends a mapping; with port 0 all of the protocol, with protocol 0 all of the host. Those with
// another nonce are others'.
func (s *Server) end(m *Mapping) Result {
	if m.Inside.Port() != 0 {
		return s.engine.End(m)
	}
	s.limiter.charge(s.client, allCosts-1)
	for _, have := range s.engine.Of(m.Inside.Addr()) {
		ours := have.Protocol != 0 && !have.Remote.IsValid() && have.Open == m.Open && have.Nonce == m.Nonce
		if ours && (m.Protocol == 0 || m.Protocol == have.Protocol) {
			if r := s.engine.End(&have); r != Success && r != NotAuthorized {
				return r
			}
		}
	}
	return Success
}

// lifetime is what a client gets of what it asks for.
func (s *Server) lifetime(asked time.Duration) time.Duration {
	return min(max(asked, s.config.MinLifetime), s.config.MaxLifetime)
}

// --- NAT-PMP -------------------------------------------------------------------------

// addressLifetime is how long a host that has asked for its external address keeps it without
// having a mapping.
const addressLifetime = 2 * time.Minute

// pmp answers a request of NAT-PMP.
func (s *Server) pmp(client netip.Addr, data []byte) []byte {
	epoch, opcode := s.engine.Epoch(), data[1]
	switch {
	case opcode == pmpAddress:
		m := &Mapping{Inside: netip.AddrPortFrom(client, 0), Open: true, Lifetime: addressLifetime}
		outside, _, r := s.engine.Map(m)
		s.Count("nat-pmp", "address", r.String())
		return pmpAddressAnswer(r.pmp(), epoch, outside.Addr())
	case opcode != pmpUDP && opcode != pmpTCP:
		s.Count("nat-pmp", "unknown", UnsuppOpcode.String())
		return pmpHeader(opcode, pmpUnsuppOpcode, epoch)
	case len(data) < pmpRequestBytes:
		s.Count("nat-pmp", "map", "ignored")
		return nil // RFC 6886 has no code for it
	}
	asked := time.Duration(binary.BigEndian.Uint32(data[8:])) * time.Second
	m := &Mapping{
		Inside: netip.AddrPortFrom(client, binary.BigEndian.Uint16(data[4:])), Protocol: UDP, Open: true, Lifetime: s.lifetime(asked),
		Outside: netip.AddrPortFrom(netip.Addr{}, binary.BigEndian.Uint16(data[6:])),
	}
	if opcode == pmpTCP {
		m.Protocol = TCP
	}
	var outside netip.AddrPort
	r := NotAuthorized // a mapping of all ports
	switch {
	case asked == 0:
		m.Lifetime = 0
		r = s.end(m)
	case m.Inside.Port() != 0:
		outside, _, r = s.engine.Map(m)
	}
	if r != Success {
		outside, m.Lifetime = netip.AddrPort{}, 0
	}
	s.Count("nat-pmp", "map", r.String())
	b := append(pmpHeader(opcode, r.pmp(), epoch), data[4], data[5])
	b = binary.BigEndian.AppendUint16(b, outside.Port())
	return binary.BigEndian.AppendUint32(b, uint32(m.Lifetime/time.Second))
}

// --- announcements -------------------------------------------------------------------

// Announcements are the datagrams for 224.0.0.1 after mappings were lost, or the external address
// has changed: RFC 6887 section 14.1.1, RFC 6886 section 3.2.1. external is that of all hosts; an
// invalid one is not announced.
func Announcements(epoch time.Duration, external netip.Addr) [][]byte {
	out := [][]byte{header(uint8(Announce), Success, 0, epoch)}
	if external.Is4() {
		out = append(out, pmpAddressAnswer(pmpSuccess, epoch, external))
	}
	return out
}

// AnnounceTimes is how often they are sent, and AnnouncePause what passes before the n-th.
const AnnounceTimes = 10

// AnnouncePause doubles, from a quarter of a second.
func AnnouncePause(n int) time.Duration {
	if n == 0 {
		return 0
	}
	return 250 * time.Millisecond << (n - 1)
}
