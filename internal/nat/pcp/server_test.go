// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// fakeEngine has mappings in memory: external ports are internal ones, plus 1000.
type fakeEngine struct {
	have   map[netip.AddrPort]Mapping
	static bool
	refuse Result
	scans  int // calls of Of
}

func (f *fakeEngine) Map(m *Mapping) (netip.AddrPort, bool, Result) {
	outside := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.1"), m.Inside.Port()+1000)
	if f.static {
		return netip.AddrPortFrom(outside.Addr(), m.Inside.Port()), true, Success
	}
	if f.refuse != Success {
		return netip.AddrPort{}, false, f.refuse
	}
	if have, is := f.have[m.Inside]; is && have.Nonce != m.Nonce {
		return netip.AddrPort{}, false, NotAuthorized
	}
	if m.Strict && m.Outside.Port() != 0 && m.Outside.Port() != outside.Port() {
		return netip.AddrPort{}, false, CannotProvideExternal
	}
	if !m.Restate {
		m.Filters = f.have[m.Inside].Filters
	}
	f.have[m.Inside] = *m
	return outside, false, Success
}

func (f *fakeEngine) End(m *Mapping) Result {
	if f.static {
		return NotAuthorized
	}
	if have, is := f.have[m.Inside]; is && have.Nonce != m.Nonce {
		return NotAuthorized
	}
	delete(f.have, m.Inside)
	return Success
}

func (f *fakeEngine) Of(host netip.Addr) (out []Mapping) {
	f.scans++
	for _, m := range f.have {
		if m.Inside.Addr() == host {
			out = append(out, m)
		}
	}
	return out
}

func (f *fakeEngine) Find(m *Mapping) (Mapping, bool) {
	have, ok := f.have[m.Inside]
	return have, ok && have.Protocol == m.Protocol
}

func (f *fakeEngine) Epoch() time.Duration { return 100 * time.Second }
func (f *fakeEngine) MaxFilters() int      { return 2 }

var client = netip.MustParseAddr("10.0.0.2")

func newFake() (*fakeEngine, *Server) {
	e := &fakeEngine{have: map[netip.AddrPort]Mapping{}}
	return e, New(e, Config{MinLifetime: 2 * time.Minute, MaxLifetime: time.Hour})
}

// ask builds a request and gives the answer.
func ask(s *Server, opcode, protocol byte, port uint16, lifetime uint32, change func([]byte) []byte) []byte {
	q := make([]byte, headerBytes+map[byte]int{1: mapBytes, 2: peerBytes}[opcode])
	q[0], q[1] = version, opcode
	binary.BigEndian.PutUint32(q[4:], lifetime)
	copy(q[8:], mapped(client))
	if opcode == 1 || opcode == 2 {
		q[24], q[36] = 1, protocol
		binary.BigEndian.PutUint16(q[40:], port)
	}
	if change != nil {
		q = change(q)
	}
	return s.Answer(time.Unix(0, 0), 0, client, q)
}

func option(code byte, value ...byte) []byte {
	return append([]byte{code, 0, 0, byte(len(value))}, value...)
}

func filterOption(prefix byte, port uint16, remote string) []byte {
	value := append([]byte{0, prefix, byte(port >> 8), byte(port)}, mapped(netip.MustParseAddr(remote))...)
	return option(optionFilter, value...)
}

func with(options ...[]byte) func([]byte) []byte {
	return func(q []byte) []byte { return append(q, bytes.Join(options, nil)...) }
}

func remote(q []byte) []byte {
	binary.BigEndian.PutUint16(q[60:], 53)
	copy(q[64:], mapped(netip.MustParseAddr("198.51.100.9")))
	return q
}

// Result codes at their places, by what RFC 6887 says of each.
func TestResults(t *testing.T) {
	for _, row := range []struct {
		name             string
		opcode, protocol byte
		port             uint16
		change           func([]byte) []byte
		want             Result
	}{
		{"MAP", 1, UDP, 80, nil, Success},
		{"PEER", 2, TCP, 80, remote, Success},
		{"ANNOUNCE", 0, 0, 0, nil, Success},
		{"version 1", 1, UDP, 80, func(q []byte) []byte { q[0] = 1; return q }, UnsuppVersion},
		{"version 3", 1, UDP, 80, func(q []byte) []byte { q[0] = 3; return q }, UnsuppVersion},
		{"opcode 3", 3, 0, 0, nil, UnsuppOpcode},
		{"a header cut off", 1, UDP, 80, func(q []byte) []byte { return q[:20] }, MalformedRequest},
		{"no multiple of four", 1, UDP, 80, func(q []byte) []byte { return q[:59] }, MalformedRequest},
		{"a body cut off", 1, UDP, 80, func(q []byte) []byte { return q[:56] }, MalformedRequest},
		{"longer than 1100", 1, UDP, 80, func(q []byte) []byte { return append(q, make([]byte, 1044)...) }, MalformedRequest},
		{"another host's address", 1, UDP, 80, func(q []byte) []byte { q[23] = 3; return q }, AddressMismatch},
		{"an IPv6 address", 1, UDP, 80, func(q []byte) []byte { q[8] = 0x20; return q }, AddressMismatch},
		{"all protocols, one port", 1, 0, 80, nil, MalformedRequest},
		{"all protocols", 1, 0, 0, nil, UnsuppProtocol},
		{"all ports", 1, UDP, 0, nil, UnsuppProtocol},
		{"SCTP", 1, 132, 80, nil, UnsuppProtocol},
		{"PEER of all ports", 2, UDP, 0, remote, MalformedRequest},
		{"PEER without a remote endpoint", 2, UDP, 80, nil, MalformedRequest},
		{"PEER of SCTP", 2, 132, 80, remote, UnsuppProtocol},
		{"PEER with PREFER_FAILURE", 2, UDP, 80, func(q []byte) []byte { return append(remote(q), option(optionPreferFailure)...) }, MalformedRequest},
		{"PEER for another external port", 2, UDP, 80, func(q []byte) []byte { q[43] = 7; return remote(q) }, CannotProvideExternal},
		{"THIRD_PARTY", 1, UDP, 80, with(option(1, mapped(client)...)), UnsuppOption},
		{"an unknown option that must be known", 1, UDP, 80, with(option(100)), UnsuppOption},
		{"an unknown option that need not", 1, UDP, 80, with(option(200, 1, 2, 3, 4)), Success},
		{"PREFER_FAILURE for another port", 1, UDP, 80, func(q []byte) []byte { q[43] = 7; return append(q, option(optionPreferFailure)...) }, CannotProvideExternal},
		{"PREFER_FAILURE twice", 1, UDP, 80, with(option(optionPreferFailure), option(optionPreferFailure)), MalformedOption},
		{"PREFER_FAILURE with a value", 1, UDP, 80, with(option(optionPreferFailure, 1, 2, 3, 4)), MalformedOption},
		{"an option longer than the message", 1, UDP, 80, with([]byte{200, 0, 0, 8}), MalformedOption},
		{"FILTER", 1, UDP, 80, with(filterOption(128, 53, "198.51.100.9")), Success},
		{"FILTER too short", 1, UDP, 80, with(option(optionFilter, 1, 2, 3, 4)), MalformedOption},
		{"FILTER of an IPv6 prefix", 1, UDP, 80, with(filterOption(64, 0, "2001:db8::")), MalformedOption},
		{"FILTER of a short prefix", 1, UDP, 80, with(filterOption(95, 0, "198.51.100.9")), MalformedOption},
		{"more FILTERs than there may be", 1, UDP, 80, with(filterOption(128, 1, "198.51.100.1"), filterOption(128, 2, "198.51.100.1"), filterOption(128, 3, "198.51.100.1")), ExcessiveRemotePeers},
		{"as many after others were removed", 1, UDP, 80, with(filterOption(128, 1, "198.51.100.1"), filterOption(0, 0, "0.0.0.0"), filterOption(128, 2, "198.51.100.1"), filterOption(128, 3, "198.51.100.1")), Success},
	} {
		_, s := newFake()
		a := ask(s, row.opcode, row.protocol, row.port, 600, row.change)
		if len(a) < headerBytes || a[0] != version || a[1]&response == 0 || Result(a[3]) != row.want {
			t.Errorf("%s: % x, want %s", row.name, a, row.want)
			continue
		}
		lifetime := time.Duration(binary.BigEndian.Uint32(a[4:])) * time.Second
		if row.want != Success && lifetime != row.want.lifetime() {
			t.Errorf("%s: the error is to be believed for %s", row.name, lifetime)
		}
		if epoch := binary.BigEndian.Uint32(a[8:]); epoch != 100 {
			t.Errorf("%s: epoch %d", row.name, epoch)
		}
		if len(a)%4 != 0 || len(a) > MaxMessage {
			t.Errorf("%s: %d octets", row.name, len(a))
		}
	}
}

// What gets no answer: answers, what is too short for a version, other families.
func TestSilence(t *testing.T) {
	_, s := newFake()
	for name, data := range map[string][]byte{"nothing": {}, "an octet": {2}, "an answer": {2, 0x81, 0, 0}, "an answer of NAT-PMP": {0, 128, 0, 0}, "half a request of NAT-PMP": {0, 1, 0}} {
		if a := s.Answer(time.Unix(0, 0), 0, client, data); a != nil {
			t.Errorf("%s gets % x", name, a)
		}
	}
	if a := s.Answer(time.Unix(0, 0), 0, netip.MustParseAddr("2001:db8::1"), []byte{0, 0}); a != nil {
		t.Errorf("a client by IPv6 gets % x", a)
	}
}

// Lifetimes are kept within bounds; what is there is in the answer with the options that were
// processed, and no others.
func TestMapAnswer(t *testing.T) {
	_, s := newFake()
	for asked, want := range map[uint32]uint32{1: 120, 600: 600, 1 << 31: 3600} {
		a := ask(s, 1, UDP, 80, asked, with(option(200), option(optionPreferFailure)))
		if len(a) != headerBytes+mapBytes+optionBytes || a[60] != optionPreferFailure {
			t.Fatalf("% x", a)
		}
		if got := binary.BigEndian.Uint32(a[4:]); got != want {
			t.Errorf("asked for %d s: %d, want %d", asked, got, want)
		}
		if port, at := binary.BigEndian.Uint16(a[42:]), addr(a[44:]); port != 1080 || at != netip.MustParseAddr("203.0.113.1") || a[24] != 1 || a[36] != UDP || a[41] != 80 {
			t.Errorf("% x", a)
		}
	}
}

// Filters are added to those that there are; a mapping of a rule lets everybody in, whatever is
// asked.
func TestFilters(t *testing.T) {
	e, s := newFake()
	ask(s, 1, UDP, 80, 600, with(filterOption(128, 1, "198.51.100.1")))
	ask(s, 1, UDP, 80, 600, with(filterOption(120, 0, "198.51.100.1")))
	have := e.have[netip.AddrPortFrom(client, 80)].Filters
	if len(have) != 2 || have[1] != (Filter{netip.MustParsePrefix("198.51.100.0/24"), 0}) {
		t.Errorf("%v", have)
	}
	if e.scans != 0 {
		t.Errorf("the mappings of all hosts were looked at %d times", e.scans)
	}
	if ask(s, 1, UDP, 80, 600, nil); len(e.have[netip.AddrPortFrom(client, 80)].Filters) != 2 {
		t.Error("a request without FILTER removes filters")
	}
	e.static = true
	if a := ask(s, 1, UDP, 80, 600, with(filterOption(128, 1, "198.51.100.1"))); Result(a[3]) != ExcessiveRemotePeers {
		t.Errorf("a filter of a mapping that a rule makes: % x", a)
	}
	if a := ask(s, 1, UDP, 80, 600, nil); Result(a[3]) != Success || binary.BigEndian.Uint16(a[42:]) != 80 {
		t.Errorf("a mapping that a rule makes: % x", a)
	}
	if a := ask(s, 1, UDP, 80, 0, nil); Result(a[3]) != NotAuthorized {
		t.Errorf("its end: % x", a)
	}
}

// Lifetime 0 ends a mapping, or with port 0 all of a protocol; others' nonces end none.
func TestEnd(t *testing.T) {
	e, s := newFake()
	other := func(q []byte) []byte { q[24] = 9; return q }
	for port := range uint16(3) {
		ask(s, 1, UDP, 80+port, 600, nil)
	}
	if a := ask(s, 1, UDP, 80, 0, other); Result(a[3]) != NotAuthorized {
		t.Errorf("% x", a)
	}
	if a := ask(s, 1, UDP, 0, 0, other); Result(a[3]) != Success || len(e.have) != 3 {
		t.Errorf("% x, %d are left", a, len(e.have))
	}
	if a := ask(s, 1, TCP, 0, 0, nil); Result(a[3]) != Success || len(e.have) != 3 {
		t.Errorf("% x, %d are left", a, len(e.have))
	}
	if a := ask(s, 1, 0, 0, 0, nil); Result(a[3]) != Success || binary.BigEndian.Uint32(a[4:]) != 0 || len(e.have) != 0 {
		t.Errorf("% x, %d are left", a, len(e.have))
	}
}

// NAT-PMP: RFC 6886 section 3.
func TestNATPMP(t *testing.T) {
	e, s := newFake()
	answer := func(q ...byte) []byte { return s.Answer(time.Unix(0, 0), 0, client, q) }
	for _, row := range []struct {
		name string
		q    []byte
		want []byte
	}{
		{"address", []byte{0, 0}, []byte{0, 128, 0, 0, 0, 0, 0, 100, 203, 0, 113, 1}},
		{"UDP", []byte{0, 1, 0, 0, 0, 80, 0, 0, 0, 0, 2, 88}, []byte{0, 129, 0, 0, 0, 0, 0, 100, 0, 80, 4, 56, 0, 0, 2, 88}},
		{"the end", []byte{0, 1, 0, 0, 0, 80, 0, 0, 0, 0, 0, 0}, []byte{0, 129, 0, 0, 0, 0, 0, 100, 0, 80, 0, 0, 0, 0, 0, 0}},
		{"TCP", []byte{0, 2, 0, 0, 0, 80, 0, 0, 0, 0, 2, 88}, []byte{0, 130, 0, 0, 0, 0, 0, 100, 0, 80, 4, 56, 0, 0, 2, 88}},
		{"all ports", []byte{0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 88}, []byte{0, 130, 0, 2, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0}},
		{"opcode 3", []byte{0, 3, 0, 0}, []byte{0, 131, 0, 5, 0, 0, 0, 100}},
	} {
		if a := answer(row.q...); !bytes.Equal(a, row.want) {
			t.Errorf("%s: % x, want % x", row.name, a, row.want)
		}
	}
	e.refuse = UserExQuota
	if a := answer(0, 1, 0, 0, 0, 81, 0, 0, 0, 0, 2, 88); len(a) != 16 || a[3] != byte(pmpNoResources) {
		t.Errorf("quota: % x", a)
	}
}

// A client has its rate, all together have theirs, and clients that nobody knows share one.
func TestRate(t *testing.T) {
	l := newLimiter(Rate{PerSecond: 10, Burst: 5, AllPerSecond: 100, AllBurst: 12})
	now := time.Unix(1000, 0)
	many := func(client netip.Addr, n int) (allowed int) {
		for range n {
			if l.allow(now, asker{1, client}) {
				allowed++
			}
		}
		return allowed
	}
	if n := many(client, 100); n != 5 {
		t.Errorf("%d at once, want 5", n)
	}
	other := netip.MustParseAddr("10.0.0.3")
	if n := many(other, 100); n != 5 {
		t.Errorf("another client: %d at once, want 5", n)
	}
	if !l.allow(now, asker{2, client}) {
		t.Error("the same address behind another interface has used up what this one may")
	}
	if n := many(netip.MustParseAddr("10.0.0.4"), 100); n != 1 {
		t.Errorf("all: %d were left, want 1", n)
	}
	now = now.Add(time.Second)
	if n := many(client, 100); n != 5 {
		t.Errorf("after a second: %d, want 5", n)
	}
	a := netip.MustParseAddr("10.1.0.0")
	for range 3 * clientsMax {
		a = a.Next()
		now = now.Add(10 * time.Millisecond)
		l.allow(now, asker{1, a})
	}
	if len(l.full) > clientsMax {
		t.Errorf("%d clients are known", len(l.full))
	}
}

// Whatever comes: no panic, no answer that is longer than a message may be or no answer of its
// protocol, and nothing is made for another host.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte{0, 0})
	f.Add([]byte{0, 1, 0, 0, 0, 80, 0, 0, 0, 0, 2, 88})
	plain := make([]byte, headerBytes+mapBytes)
	plain[0], plain[1], plain[6], plain[36], plain[41] = version, 1, 2, UDP, 80
	copy(plain[8:], mapped(client))
	f.Add(plain)
	f.Add(append(bytes.Clone(plain), filterOption(128, 1, "198.51.100.1")...))
	f.Add(append(bytes.Clone(plain), option(optionPreferFailure)...))
	peer := append(bytes.Clone(plain), make([]byte, 20)...)
	peer[1] = 2
	f.Add(remote(peer))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, s := newFake()
		sent := bytes.Clone(data)
		a := s.Answer(time.Unix(0, 0), 0, client, data)
		if !bytes.Equal(sent, data) {
			t.Fatal("the request was written to")
		}
		for at := range e.have {
			if at.Addr() != client {
				t.Fatalf("a mapping of %v", at)
			}
		}
		if a == nil {
			return
		}
		if len(a) > MaxMessage || a[1] != data[1]|response {
			t.Fatalf("% x", a)
		}
		if data[0] != 0 && (a[0] != version || len(a)%4 != 0 || len(a) < headerBytes) {
			t.Fatalf("% x", a)
		}
	})
}

// Announcements are ten, the first at once, the second after a quarter of a second, each later one after twice the pause
// (RFC 6886 section 3.2.1): the last is two minutes behind the first.
func TestAnnouncements(t *testing.T) {
	var at []time.Duration
	for n, sum := 0, time.Duration(0); n < AnnounceTimes; n++ {
		sum += AnnouncePause(n)
		at = append(at, sum)
	}
	want := []time.Duration{0, 250, 750, 1750, 3750, 7750, 15750, 31750, 63750, 127750}
	for i := range want {
		want[i] *= time.Millisecond
	}
	if !slices.Equal(at, want) {
		t.Errorf("sent at %v, want %v", at, want)
	}
}

// A request for which the mappings of all hosts are looked at is as many as it costs.
func TestRateOfAll(t *testing.T) {
	answered := func(port uint16, lifetime uint32) (n int) {
		_, s := newFake()
		s.limiter = newLimiter(DefaultRate)
		for range 2 * DefaultRate.Burst {
			if ask(s, 1, UDP, port, lifetime, nil) != nil {
				n++
			}
		}
		return n
	}
	if n := answered(80, 0); n != DefaultRate.Burst {
		t.Errorf("%d ends at once are answered, want %d", n, DefaultRate.Burst)
	}
	if n := answered(0, 0); n != DefaultRate.Burst/allCosts {
		t.Errorf("%d ends of all are answered at once, want %d", n, DefaultRate.Burst/allCosts)
	}
}

// That limit is one of all clients, too: those of many addresses that end all of theirs, which may be invented,
// take no more of the processor than one would.
func TestRateOfAllClients(t *testing.T) {
	answered := func(l limiter, from int) (n int) {
		s := New(&fakeEngine{}, Config{Rate: DefaultRate})
		s.limiter = l
		now := time.Unix(1000, 0)
		for i := range DefaultRate.AllBurst {
			client := netip.AddrFrom4([4]byte{10, byte(from), byte(i >> 8), byte(i)})
			q := make([]byte, 60)
			q[0], q[1], q[36] = 2, 1, UDP
			b := client.As16()
			copy(q[8:], b[:])
			if s.Answer(now, 1, client, q) != nil {
				n++
			}
		}
		return n
	}
	if n, most := answered(newLimiter(DefaultRate), 1), DefaultRate.AllBurst/allCosts; n > most+1 {
		t.Errorf("%d ends of all are answered at once, want %d", n, most)
	}
	crowded := newLimiter(DefaultRate)
	for i := range clientsMax {
		crowded.full[asker{1, netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})}] = time.Unix(2000, 0)
	}
	if n, most := answered(crowded, 2), DefaultRate.Burst/allCosts; n > most {
		t.Errorf("%d of clients that share a bucket are answered at once, want %d", n, most)
	}
}
