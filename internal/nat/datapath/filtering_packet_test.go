// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"testing"

	"natkit/internal/testutil/pktbuild"
)

// relation is what the receiver of a packet has done before, towards its sender.
type relation int

const (
	stranger      relation = iota // nothing
	otherPort                     // it has sent to another port of that address
	knownEndpoint                 // it has sent to that address and port
)

func (r relation) String() string {
	return [...]string{"stranger", "known address", "known endpoint"}[r]
}

// Whom a mapping lets in, by what RFC 4787 section 5 and RFC 5382 section 4.3 say of each
// behaviour (REQ-8 and REQ-3), by relation.
var filtering = map[string][3]bool{
	"endpoint-independent":       {true, true, true},
	"address-dependent":          {false, true, true},
	"address-and-port-dependent": {false, false, true},
}

// Internal hosts whose rule filters so.
var filteringRules = map[string]int{"endpoint-independent": fullRule, "address-dependent": knownRule, "address-and-port-dependent": masqueradeRule}

// peer is a host and the endpoint that others know it by: of one outside its own.
type peer struct {
	side       abiNatSide
	host, seen netip.AddrPort
}

// filterTestbed sends packets of one protocol through one hook.
type filterTestbed struct {
	*gateway
	kind string
	port uint16
}

// to is a packet from one to another: of TCP a SYN. It reports whether it arrived, and from where.
func (b *filterTestbed) to(t *testing.T, from, to *peer, flags uint8) bool {
	t.Helper()
	e := endpoints{from.host.Addr(), to.seen.Addr(), from.host.Port(), to.seen.Port()}
	reason, out := b.send(t, from.side, b.kind, flags, e)
	if reason != sent && reason != back {
		if reason != abiNatReasonNAT_DROP_FILTERED {
			t.Errorf("%v to %v: %v", from.host, to.seen, reason)
		}
		return false
	}
	// RFC 4787 REQ-9a, RFC 5382 REQ-8a: the receiver sees the external endpoint.
	if got := netip.AddrPortFrom(out.src, out.sport); from.seen.IsValid() && got != from.seen {
		t.Errorf("%v to %v arrives from %v, want %v", from.host, to.seen, got, from.seen)
	}
	if got := netip.AddrPortFrom(out.dst, out.dport); got != to.host {
		t.Errorf("%v to %v arrives at %v, want %v", from.host, to.seen, got, to.host)
	}
	return true
}

// inside is a host whose rule filters so, with a mapping that is as old as a packet to the world.
func (b *filterTestbed) inside(t *testing.T, mode string, host int) *peer {
	t.Helper()
	b.port++
	p := &peer{side: inside, host: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(filteringRules[mode]), byte(host)}), b.port)}
	reason, out := b.send(t, inside, b.kind, pktbuild.SYN, endpoints{p.host.Addr(), world, b.port, 53})
	if reason != sent {
		t.Fatalf("%v does not leave: %v", p.host, reason)
	}
	p.seen = netip.AddrPortFrom(out.src, out.sport)
	return p
}

// another is the same sender with another port of the same address.
func (b *filterTestbed) another(t *testing.T, from *peer) *peer {
	t.Helper()
	b.port++
	p := *from
	p.host = netip.AddrPortFrom(from.host.Addr(), b.port)
	p.seen = p.host
	if p.side == inside {
		_, out := b.send(t, inside, b.kind, pktbuild.SYN, endpoints{p.host.Addr(), world, b.port, 53})
		p.seen = netip.AddrPortFrom(out.src, out.sport)
	}
	if p.seen.Addr() != from.seen.Addr() {
		t.Fatalf("%v is %v, and %v is %v", from.host, from.seen, p.host, p.seen)
	}
	return &p
}

// senders are where a packet to a mapping can come from: outside, or inside, whose own rule
// filters in each way.
func (b *filterTestbed) senders(t *testing.T) map[string]*peer {
	b.port++
	remote := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.77"), b.port)
	all := map[string]*peer{"outside": {side: outer, host: remote, seen: remote}}
	for mode := range filtering {
		all["inside, "+mode] = b.inside(t, mode, 9)
	}
	return all
}

// Every behaviour of filtering, towards senders of every place and every relation, for UDP
// and TCP at both hooks, is as the RFCs have it.
func TestFilteringTable(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		for _, kind := range []string{"udp", "tcp"} {
			for mode, lets := range filtering {
				t.Run(fmt.Sprintf("%s/%s/%s", h.name, kind, mode), func(t *testing.T) {
					g.hook = h
					g.reset(t)
					b := &filterTestbed{gateway: g, kind: kind, port: 5000}
					for r := stranger; r <= knownEndpoint; r++ {
						for place := range b.senders(t) {
							b.filters(t, mode, place, r, lets[r])
						}
					}
				})
			}
		}
	}
}

func (b *filterTestbed) filters(t *testing.T, mode, place string, r relation, want bool) {
	t.Helper()
	from, to := b.senders(t)[place], b.inside(t, mode, 2)
	if from.host.Addr() == to.host.Addr() {
		t.Fatal("one host")
	}
	reach := func(p *peer) { // whether it arrives there is p's own filter's
		b.send(t, inside, b.kind, pktbuild.SYN, endpoints{to.host.Addr(), p.seen.Addr(), to.host.Port(), p.seen.Port()})
	}
	switch r {
	case otherPort:
		reach(b.another(t, from))
	case knownEndpoint:
		reach(from)
	}
	if got := b.to(t, from, to, pktbuild.SYN); got != want {
		t.Errorf("%s from %s: let in %t, want %t", r, place, got, want)
	}
	// Who has been sent to, and be it in vain, is let in: the sender's filter knows the
	// receiver (RFC 4787 section 5; RFC 5382 REQ-2a, simultaneous open).
	if from.side == inside && !b.to(t, to, from, pktbuild.SYN) {
		t.Errorf("%s, %s: the receiver does not reach the sender", r, place)
	}
	// And then the other way round too, for both have sent to each other.
	if from.side == inside || want {
		flags := uint8(pktbuild.SYN | pktbuild.ACK)
		if !b.to(t, to, from, flags) || !b.to(t, from, to, flags) {
			t.Errorf("%s, %s: they do not talk", r, place)
		}
	}
}

// A rule that publishes a host lets everybody in, from outside and inside, whatever the sender's own
// filtering is; the replies find their way.
func TestFilteringOfRules(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		for kind, published := range map[string]map[string]string{
			"udp": {"203.0.113.1:7003": "192.168.1.2:9003", "198.18.6.2:5000": "192.168.6.2:5000", "198.18.7.2:5000": "192.168.7.2:5000"},
			"tcp": {"203.0.113.1:8080": "192.168.1.2:80", "198.18.6.2:5000": "192.168.6.2:5000", "198.18.7.2:5000": "192.168.7.2:5000"},
		} {
			t.Run(h.name+"/"+kind, func(t *testing.T) {
				g.hook = h
				g.reset(t)
				b := &filterTestbed{gateway: g, kind: kind, port: 5000}
				for seen, host := range published {
					to := &peer{inside, netip.MustParseAddrPort(host), netip.MustParseAddrPort(seen)}
					for place, from := range b.senders(t) {
						if !b.to(t, from, to, pktbuild.SYN) || !b.to(t, to, from, pktbuild.SYN|pktbuild.ACK) || !b.to(t, from, to, pktbuild.ACK) {
							t.Errorf("%s to %s does not talk", place, seen)
						}
					}
				}
			})
		}
	}
}

// What opens no TCP connection is not let in by any filter (RFC 5382 REQ-4): nobody outside
// takes one up in its middle, not even one that was sent to.
func TestFilteringWithoutSYN(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		g.hook = h
		g.reset(t)
		b := &filterTestbed{gateway: g, kind: "tcp", port: 5000}
		for mode := range filtering {
			to := b.inside(t, mode, 2)
			for _, flags := range []uint8{0, pktbuild.ACK, pktbuild.SYN | pktbuild.ACK, pktbuild.FIN, pktbuild.RST, pktbuild.SYN | pktbuild.FIN, 0xff} {
				b.refused(t, outer, "tcp", flags, endpoints{netip.MustParseAddr("198.51.100.77"), to.seen.Addr(), 53, to.seen.Port()}, abiNatReasonNAT_DROP_NO_SESSION)
			}
		}
	}
}
