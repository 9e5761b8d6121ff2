// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

// leaser asks for explicit mappings on the maps of a gateway.
type leaser struct {
	*gateway
	e *Engine
}

func aLeaser(t *testing.T, hook int) *leaser {
	t.Helper()
	g := aGateway(t)
	g.hook = hooks[hook]
	e := engineOn(t, g.maps)
	e.programs = map[string]*ebpf.Program{leaseAsk: g.load(t, loadLease).Programs[leaseAsk]}
	l := &leaser{g, e}
	t.Cleanup(func() { l.forget(t) })
	return l
}

// forget removes all leases, so that the next test meets none.
func (l *leaser) forget(t *testing.T) {
	t.Helper()
	deleteAll[abiNatLeaseKey, abiNatLease](t, l.maps["leases"])
	deleteAll[abiNatSourceKey, uint32](t, l.maps["lease_counts"])
	l.put(t, "lease_state", uint32(0), &abiNatLeaseState{})
}

// ask asks with what a change makes of a request for a minute for UDP port 5000 of the inside host.
func (l *leaser) ask(t *testing.T, change func(*LeaseRequest)) (out netip.AddrPort, r LeaseResult) {
	t.Helper()
	q := &LeaseRequest{
		Inside: netip.AddrPortFrom(insideHost, 5000), Protocol: 17, Nonce: [12]byte{1}, In: l.in.ifindex, Out: l.out.ifindex, Lifetime: time.Minute, Limit: 8,
	}
	if change != nil {
		change(q)
	}
	l.do(t, func() (err error) {
		if q.Lifetime == 0 {
			r, err = l.e.EndLease(q)
		} else {
			out, r, err = l.e.Lease(q)
		}
		return err
	})
	return out, r
}

func (l *leaser) mustAsk(t *testing.T, change func(*LeaseRequest)) netip.AddrPort {
	t.Helper()
	out, r := l.ask(t, change)
	if r != LeaseDone {
		t.Fatalf("result %d", r)
	}
	return out
}

// stranger sends a packet from outside to an external endpoint, and reports whether it got in.
func (l *leaser) stranger(t *testing.T, from string, to netip.AddrPort) bool {
	t.Helper()
	src := netip.MustParseAddrPort(from)
	reason, out := l.send(t, abiNatSideNAT_OUTSIDE, "udp", 0, endpoints{src.Addr(), to.Addr(), src.Port(), to.Port()})
	if reason == back {
		if out.dst != insideHost || out.dport != 5000 {
			t.Errorf("it went to %v:%d", out.dst, out.dport)
		}
		return true
	}
	return false
}

// Those of one host are found without a look at those of all: made before and since, and not any more
// when they have ended.
func TestLeasesOf(t *testing.T) {
	l := aLeaser(t, 0)
	const others = 60000
	keys, values := make([]abiNatLeaseKey, others), make([]abiNatLease, others)
	for i := range keys {
		keys[i].Internal = abiNatMappingKey{Addr: abiNatAddr{Octet: [4]byte{10, 9, byte(i >> 8), byte(i)}}, Port: 1, Class: uint8(abiNatClassNAT_UDP)}
		values[i].Expires = 1
	}
	if _, err := l.maps["leases"].BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(err)
	}
	port := func(p uint16) func(*LeaseRequest) {
		return func(q *LeaseRequest) { q.Inside = netip.AddrPortFrom(insideHost, p) }
	}
	has := func(want ...uint16) {
		t.Helper()
		var got []uint16
		all, err := l.e.LeasesOf(insideHost, 0)
		for _, one := range all {
			got = append(got, one.Inside.Port())
			if one.Inside.Addr() != insideHost || one.Nonce != [12]byte{1} || one.Left <= 0 {
				t.Errorf("lease %+v", one)
			}
		}
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("leases of ports %v, want %v (%v)", got, want, err)
		}
	}
	l.mustAsk(t, port(5000))
	has(5000)
	made := l.e.leases.made
	l.mustAsk(t, port(5001))
	l.mustAsk(t, port(5001))
	l.mustAsk(t, port(5002))
	has(5000, 5001, 5002)
	if l.e.leases.made != made {
		t.Errorf("the %d leases of others were looked at again", others)
	}
	end := func(q *LeaseRequest) { port(5001)(q); q.Lifetime = 0 }
	if _, r := l.ask(t, end); r != LeaseDone {
		t.Errorf("the end: %d", r)
	}
	has(5000, 5002)
	// Somebody else ended one, as GC does.
	deleteAll[abiNatLeaseKey, abiNatLease](t, l.maps["leases"])
	has()
	l.mustAsk(t, port(5003))
	has(5003)
	// An index that is too old is made again.
	l.e.leases.made = l.e.leases.made.Add(-2 * leaseIndexAge)
	l.mustAsk(t, port(5004))
	if l.e.leases.keys != nil {
		t.Error("an old index is kept, and grows")
	}
	has(5003, 5004)
}

// An explicit mapping lets strangers in though its rule filters by endpoint; it can be extended and
// ended by its nonce alone, and when it has ended lets nobody in.
func TestLease(t *testing.T) {
	for hook := range hooks {
		l := aLeaser(t, hook)
		out := l.mustAsk(t, nil)
		if want := netip.MustParseAddrPort("203.0.113.1:5000"); out != want {
			t.Fatalf("external endpoint %v, want %v", out, want)
		}
		if !l.stranger(t, "198.51.100.9:53", out) {
			t.Error("a stranger is refused")
		}
		if again := l.mustAsk(t, nil); again != out {
			t.Errorf("extended, it has %v", again)
		}
		other := func(q *LeaseRequest) { q.Nonce[3] = 9 }
		if _, r := l.ask(t, other); r != LeaseNonce {
			t.Errorf("another nonce: %d", r)
		}
		if _, r := l.ask(t, func(q *LeaseRequest) { other(q); q.Lifetime = 0 }); r != LeaseNonce {
			t.Errorf("another nonce ends it: %d", r)
		}
		if _, r := l.ask(t, func(q *LeaseRequest) { q.Nonce, q.Open = [12]byte{}, true }); r != LeaseNonce {
			t.Errorf("no nonce extends it: %d", r)
		}
		if n, err := l.e.LeaseCount(); n != 1 || err != nil {
			t.Errorf("%d leases (%v)", n, err)
		}
		if _, r := l.ask(t, func(q *LeaseRequest) { q.Lifetime = 0 }); r != LeaseDone {
			t.Errorf("the end: %d", r)
		}
		if l.stranger(t, "198.51.100.10:53", out) && hook == 0 { // the session of the first one keeps the mapping
			t.Error("a stranger gets in after the end")
		}
		if _, r := l.ask(t, func(q *LeaseRequest) { q.Lifetime = 0 }); r != LeaseNone {
			t.Errorf("the end of none: %d", r)
		}
		l.forget(t)
	}
}

// drain has an external address drain, or not.
func (l *leaser) drain(t *testing.T, addr netip.Addr, drains bool) {
	t.Helper()
	addresses := l.maps["addresses"]
	for i := range addresses.MaxEntries() {
		var a abiNatAddress
		if err := addresses.Lookup(i, &a); err != nil {
			t.Fatal(err)
		}
		if a.Addr != octets(addr) {
			continue
		}
		a.Flags &^= uint16(abiNatAddressFlagNAT_ADDRESS_DRAINING)
		if drains {
			a.Flags |= uint16(abiNatAddressFlagNAT_ADDRESS_DRAINING)
		}
		if err := addresses.Put(i, &a); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("no address %v", addr)
}

// A lease on an address that drains is not extended: its answer has what is left. There is no new
// one on it, and afterwards both are as before.
func TestLeaseDrains(t *testing.T) {
	l := aLeaser(t, 1)
	lease := func(port uint16, lifetime time.Duration) (out netip.AddrPort, r LeaseResult, given time.Duration) {
		q := (*LeaseRequest)(nil)
		out, r = l.ask(t, func(asked *LeaseRequest) {
			q = asked
			q.Inside, q.Lifetime = netip.AddrPortFrom(insideHost, port), lifetime
		})
		return out, r, q.Lifetime
	}
	left := func() (left time.Duration) {
		t.Helper()
		if err := l.e.Leases(func(had *Lease) bool { left = had.Left; return true }); err != nil {
			t.Fatal(err)
		}
		return left
	}
	out, r, given := lease(5000, time.Minute)
	if r != LeaseDone || given != time.Minute {
		t.Fatalf("%d, for %v", r, given)
	}
	l.drain(t, out.Addr(), true)
	defer l.drain(t, out.Addr(), false)
	again, r, given := lease(5000, time.Hour)
	if r != LeaseDone || again != out || given > time.Minute+time.Second || given < 30*time.Second {
		t.Errorf("asked again for an hour: %v, %d, for %v", again, r, given)
	}
	if left := left(); left > time.Minute+time.Second {
		t.Errorf("%v are left", left)
	}
	if _, r, given := lease(5000, 10*time.Second); r != LeaseDone || given != 10*time.Second || left() > 11*time.Second {
		t.Errorf("asked for less: %d, for %v, %v are left", r, given, left())
	}
	if other, r, _ := lease(5001, time.Minute); r == LeaseDone && other.Addr() == out.Addr() {
		t.Errorf("a new lease on the address: %v", other)
	}
	l.drain(t, out.Addr(), false)
	if _, r, given := lease(5000, time.Hour); r != LeaseDone || given != time.Hour || left() < 50*time.Minute {
		t.Errorf("after it has drained: %d, for %v", r, given)
	}
}

// It counts as a session and its port as a port of the subscriber, and the number of explicit
// mappings has a limit of its own.
func TestLeaseLimits(t *testing.T) {
	l := aLeaser(t, 1)
	port := func(p uint16) func(*LeaseRequest) {
		return func(q *LeaseRequest) { q.Inside, q.Limit = netip.AddrPortFrom(insideHost, p), 2 }
	}
	l.mustAsk(t, port(5000))
	l.mustAsk(t, port(5001))
	if _, r := l.ask(t, port(5002)); r != LeaseQuota {
		t.Errorf("a third of two: %d", r)
	}
	if _, r := l.ask(t, port(5001)); r != LeaseDone {
		t.Errorf("at the limit one is not extended: %d", r)
	}
	l.configure(t, func(c *abiNatConfig) { limitSessions(c, 2) })
	defer l.configure(t, func(*abiNatConfig) {})
	_, r := l.ask(t, func(q *LeaseRequest) { port(5003)(q); q.Limit = 0 })
	if reason, is := r.Reason(); !is || reason.String() != "source-limit" {
		t.Errorf("a third session of two: %d", r)
	}
	if n, _ := l.e.LeaseCount(); n != 2 {
		t.Errorf("%d leases", n)
	}
}

// Of a wanted external port the one that is free is given; a strict request takes that or none.
func TestLeaseExternal(t *testing.T) {
	l := aLeaser(t, 1)
	want := func(p uint16, strict bool) func(*LeaseRequest) {
		return func(q *LeaseRequest) {
			q.Inside, q.Outside, q.Strict = netip.AddrPortFrom(insideHost, 5000+p), netip.AddrPortFrom(netip.Addr{}, p), strict
		}
	}
	if out := l.mustAsk(t, want(7000, true)); out.Port() != 7000 {
		t.Errorf("wanted 7000, got %v", out)
	}
	l.configure(t, func(*abiNatConfig) {})
	if _, r := l.ask(t, func(q *LeaseRequest) { want(7000, true)(q); q.Inside = netip.AddrPortFrom(insideHost, 6001) }); r != LeaseExternal {
		t.Errorf("a port that another mapping has, strictly: %d", r)
	}
	if out := l.mustAsk(t, func(q *LeaseRequest) { want(7000, false)(q); q.Inside = netip.AddrPortFrom(insideHost, 6002) }); out.Port() == 7000 {
		t.Error("two mappings have port 7000")
	}
	if _, r := l.ask(t, func(q *LeaseRequest) {
		q.Outside, q.Strict = netip.AddrPortFrom(netip.MustParseAddr("203.0.113.99"), 0), true
	}); r != LeaseExternal {
		t.Errorf("an address that the host does not have: %d", r)
	}
	if _, r := l.ask(t, func(q *LeaseRequest) { q.Protocol = 132 }); r != LeaseUnsupported {
		t.Errorf("SCTP: %d", r)
	}
	if _, r := l.ask(t, func(q *LeaseRequest) {
		q.Inside = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.77"), 5000)
	}); r != LeaseUntranslated {
		t.Errorf("a host of no rule: %d", r)
	}
}

// Filters say who is let in: an address, or an address and a port; and others are not.
func TestLeaseFilters(t *testing.T) {
	for hook := range hooks {
		l := aLeaser(t, hook)
		out := l.mustAsk(t, func(q *LeaseRequest) {
			q.Restate = true
			q.Filters = []LeaseFilter{{netip.MustParsePrefix("198.51.100.0/28"), 0}, {netip.MustParsePrefix("198.51.100.77/32"), 99}}
		})
		for from, in := range map[string]bool{
			"198.51.100.9:53": true, "198.51.100.15:1": true, "198.51.100.16:53": false, "198.51.100.77:99": true, "198.51.100.77:98": false,
		} {
			if got := l.stranger(t, from, out); got != in {
				t.Errorf("%s: let in %v, want %v", from, got, in)
			}
		}
		l.mustAsk(t, func(q *LeaseRequest) { q.Restate = true })
		if !l.stranger(t, "198.51.100.200:53", out) {
			t.Error("without filters somebody is refused")
		}
		l.forget(t)
	}
}

// A lease for one remote endpoint lets that in, and nobody else.
func TestLeasePeer(t *testing.T) {
	for hook := range hooks {
		l := aLeaser(t, hook)
		out := l.mustAsk(t, func(q *LeaseRequest) { q.Remote = netip.MustParseAddrPort("198.51.100.9:53") })
		if !l.stranger(t, "198.51.100.9:53", out) {
			t.Error("the remote endpoint is refused")
		}
		if l.stranger(t, "198.51.100.9:54", out) {
			t.Error("another port of it gets in")
		}
		if l.stranger(t, "198.51.100.10:53", out) {
			t.Error("a stranger gets in")
		}
		l.forget(t)
	}
}
