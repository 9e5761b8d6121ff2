// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// clash is two ways on which one endpoint comes to one receiver.
type clash struct {
	name   string
	side   abiNatSide
	client string
	ways   [2]string
}

// Every pair of rules that leads to one receiver, and every kind of source.
var clashes = []clash{
	{"two forwards", outer, "198.51.100.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"two forwards, system port", outer, "198.51.100.9:700", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"two forwards, low port", outer, "198.51.100.9:53", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"two forwards to many", outer, "198.51.100.9:5000", [2]string{"203.0.113.1:9443", "203.0.113.1:9444"}},
	{"map and forward", outer, "198.51.100.9:5000", [2]string{"198.18.6.2:80", "203.0.113.1:9093"}},
	{"forward and map", outer, "198.51.100.9:5000", [2]string{"203.0.113.1:9093", "198.18.6.2:80"}},
	{"forwards of all protocols", outer, "198.51.100.9:5000", [2]string{"198.18.8.1:80", "198.18.8.2:80"}},
	{"from masquerade", inside, "192.168.1.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from full cone", inside, "192.168.2.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from address-dependent filtering", inside, "192.168.3.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from address-and-port-dependent mapping", inside, "192.168.4.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from a whole address", inside, "192.168.5.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from a map", inside, "192.168.6.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
	{"from an untranslated host", inside, "192.168.9.9:5000", [2]string{"203.0.113.1:9090", "203.0.113.1:9091"}},
}

// opens sends a first packet and its answer: both arrive, the answer from where the packet went.
func (g *gateway) opens(t *testing.T, side abiNatSide, kind string, e endpoints) endpoints {
	t.Helper()
	reason, out := g.send(t, side, kind, pktbuild.SYN, e)
	if reason != sent && reason != back {
		t.Fatalf("%s %v: %v", kind, e, reason)
	}
	return out
}

// answered sends what the receiver of a packet that left as out answers to it; and another packet.
func (g *gateway) answered(t *testing.T, side abiNatSide, kind string, e, out endpoints) {
	t.Helper()
	if kind == "ping" {
		pong := endpoints{out.dst, out.src, out.sport, 0}
		if reason, got := g.send(t, inside, "pong", 0, pong); got != (endpoints{e.dst, e.src, e.sport, 0}) {
			t.Errorf("the answer to %v, sent as %v: %v %v", e, out, reason, got)
		}
	} else if reason, got := g.send(t, inside, kind, pktbuild.SYN|pktbuild.ACK, out.answer()); got != e.answer() {
		t.Errorf("the answer to %v, sent as %v: %v %v", e, out, reason, got)
	}
	if reason, again := g.send(t, side, kind, pktbuild.ACK, e); again != out {
		t.Errorf("%v again: %v %v, was %v", e, reason, again, out)
	}
}

// Of two sessions of one endpoint with one receiver the second has another source port, as
// netfilter gives it, whatever rules lead there: none is lost, and answers go where they belong.
func TestSameReceiverTwice(t *testing.T) {
	for _, h := range hooks {
		for _, c := range clashes {
			for _, kind := range []string{"udp", "tcp", "ping"} {
				if kind == "ping" && c.ways[0] != "198.18.8.1:80" {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%s", h.name, c.name, kind), func(t *testing.T) {
					g := aGateway(t)
					g.hook = h
					first, second := ends(c.client, c.ways[0]), ends(c.client, c.ways[1])
					if kind == "ping" {
						first.dport, second.dport = 0, 0
					}
					a := g.opens(t, c.side, kind, first)
					b := g.opens(t, c.side, kind, second)
					if a.dst != b.dst || a.dport != b.dport || a.src != b.src || a.sport == b.sport {
						t.Errorf("%v leaves as %v and %v as %v", first, a, second, b)
					}
					if low := uint16(1024); kind != "ping" && c.side == outer && (b.sport < low) != (second.sport < low) {
						t.Errorf("%v leaves as %v", second, b)
					}
					g.answered(t, c.side, kind, first, a)
					g.answered(t, c.side, kind, second, b)
				})
			}
		}
	}
}

// The receiver's own sessions and mappings are such ways as well.
func TestSameReceiverAndItsOwn(t *testing.T) {
	client := netip.MustParseAddrPort("198.51.100.9:5000")
	for _, h := range hooks {
		for _, kind := range []string{"udp", "tcp"} {
			t.Run(h.name+"/"+kind, func(t *testing.T) {
				g := aGateway(t)
				g.hook = h
				// It has sent to the client, who comes by a forward too.
				own := ends("192.168.1.2:80", client.String())
				seen := g.opens(t, inside, kind, own)
				second := ends(client.String(), "203.0.113.1:9090")
				b := g.opens(t, outer, kind, second)
				if b.sport == client.Port() {
					t.Errorf("%v leaves as %v, which are the answers to %v", second, b, own)
				}
				g.answered(t, outer, kind, second, b)
				if reason, got := g.send(t, outer, kind, pktbuild.SYN|pktbuild.ACK, seen.answer()); got != own.answer() {
					t.Errorf("the answer to %v: %v %v", own, reason, got)
				}
				// Its mapping lets everybody in, and a forward leads to it.
				mapped := g.opens(t, inside, kind, ends("192.168.2.2:80", "198.51.100.200:53"))
				first := endpoints{client.Addr(), mapped.src, client.Port(), mapped.sport}
				a := g.opens(t, outer, kind, first)
				second = ends(client.String(), "203.0.113.1:9094")
				b = g.opens(t, outer, kind, second)
				g.answered(t, outer, kind, first, a)
				g.answered(t, outer, kind, second, b)
			})
		}
	}
}

// Protocols without ports have nothing to tell two sessions apart by: the second is refused.
func TestSameReceiverWithoutPorts(t *testing.T) {
	g := aGateway(t)
	client := netip.MustParseAddr("198.51.100.9")
	for i, want := range []abiNatReason{back, abiNatReasonNAT_DROP_NO_PORT} {
		e := endpoints{src: client, dst: netip.AddrFrom4([4]byte{198, 18, 8, byte(i + 1)})}
		if reason, _ := g.send(t, outer, "gre", 0, e); reason != want {
			t.Errorf("%v: %v, want %v", e, reason, want)
		}
	}
}

// What a session takes for another port is free again when it has ended.
func TestSameReceiverEnds(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, short)
	before := g.freePorts(t, ownAddress, abiNatClassNAT_UDP)
	for _, way := range []string{"203.0.113.1:9090", "203.0.113.1:9091"} {
		g.opens(t, inside, "udp", ends("192.168.1.9:5000", way))
	}
	if taken := before - g.freePorts(t, ownAddress, abiNatClassNAT_UDP); taken != 2 {
		t.Errorf("%d ports are taken, want 2", taken)
	}
	// They count to the host that opens them, and to the one that both forwards reach.
	if held := g.held(t); held.mappings != 2 || held.sources != 4 {
		t.Errorf("the two sessions hold %+v", held)
	}
	defer g.startGC(t)()
	ktest.Wait(t, 30*time.Second, "the sessions and their ports to end", func() bool {
		return g.flowCount(t) == 0 && g.freePorts(t, ownAddress, abiNatClassNAT_UDP) == before
	})
	if held := g.held(t); held != (references{}) {
		t.Errorf("without sessions there is held %+v", held)
	}
}
