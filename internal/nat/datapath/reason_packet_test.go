// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/pktbuild"
)

// enters lets a packet in at the gateway's hook, and after XDP passes it on at tc, where
// everything is counted for the test to look at.
func (g *gateway) enters(t testing.TB, side abiNatSide, ip pktbuild.IPv4) {
	t.Helper()
	g.entersFrame(t, side, g.sidePort(side).arriving(ip).Bytes())
}

func (g *gateway) entersFrame(t testing.TB, side abiNatSide, frame []byte) {
	t.Helper()
	verdict, got, err := g.run(t, g.hook, side, g.sidePort(side), frame, 0)
	if err == nil && g.hook.name == "xdp" && verdict == xdpPass {
		_, _, err = g.run(t, hooks[1], side, g.sidePort(side), got, 0)
	}
	if err != nil {
		t.Fatalf("%s: %v", g.hook.name, err)
	}
}

// unreachable makes a network, for the time of the test, that the gateway knows it can't reach.
func (g *gateway) unreachable(t testing.TB, dst *net.IPNet) {
	t.Helper()
	route := &netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE}
	g.do(t, func() error { return netlink.RouteAdd(route) })
	t.Cleanup(func() { g.do(t, func() error { return netlink.RouteDel(route) }) })
}

// Every reason that a packet can end by, or that is counted beside, is produced at both
// hooks. A new one must get a row, or a line that says why it can't.
func TestReasons(t *testing.T) {
	const (
		// Where a reason takes longer to produce, this is the test that does.
		gc    = "TestGC"
		never = "parse.h has refused before what a helper would"
	)
	elsewhere := map[abiNatReason]string{
		abiNatReasonNAT_EXPIRED: gc, abiNatReasonNAT_UNMAPPED: gc,
		abiNatReasonNAT_DROP_REWRITE:  never,
		abiNatReasonNAT_DROP_NO_BLOCK: "TestRandomPackets",
	}
	g := aGateway(t)
	host := func(n int) *net.IPNet {
		return &net.IPNet{IP: net.IP{192, 168, 6, byte(n)}, Mask: net.CIDRMask(32, 32)}
	}
	var rules *ebpf.Map
	if err := g.maps["rules"].Lookup(uint32(0), &rules); err != nil {
		t.Fatal(err)
	}
	defer func() {
		g.put(t, "rules", uint32(0), rules)
		rules.Close()
	}()
	g.unreachable(t, host(200))
	g.unreachable(t, &net.IPNet{IP: net.IP{198, 51, 100, 200}, Mask: net.CIDRMask(32, 32)})
	out := ends("192.168.1.2:5000", "198.51.100.9:53")
	open := func(t *testing.T) { g.enters(t, inside, packet("udp", 0, out)) }
	long := func(src, dst netip.Addr, length int) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: src, Dst: dst, TTL: 64, Fragment: pktbuild.DF, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: make([]byte, length-28)}}
	}
	back := func(ttl uint8, length int) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: world, Dst: gatewayOut, TTL: ttl, Fragment: pktbuild.DF, Payload: pktbuild.UDP{Src: 53, Dst: 5000, Data: make([]byte, length-28)}}
	}
	fragment := func(id, at uint16) pktbuild.IPv4 { return fragmentOf(insideHost, 5000, id, at, 64) }
	one := func(side abiNatSide, kind string, flags uint8, src, dst string) func(*testing.T) {
		return func(t *testing.T) { g.enters(t, side, packet(kind, flags, ends(src, dst))) }
	}
	full := func(name string, fill func(testing.TB, *ebpf.Map) func()) func(*testing.T) {
		return func(t *testing.T) {
			g.configure(t, func(c *abiNatConfig) { limitSessions(c, 1000) })
			fill(t, g.maps[name])
			g.enters(t, inside, packet("udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53")))
		}
	}
	rows := []struct {
		reason  abiNatReason
		produce func(*testing.T)
	}{
		{abiNatReasonNAT_PASS_NOT_IPV4, func(t *testing.T) {
			frame := g.in.arriving(packet("udp", 0, out)).Bytes()
			frame[12], frame[13] = 0x08, 0x06
			g.entersFrame(t, inside, frame)
		}},
		{abiNatReasonNAT_PASS_NO_RULE, one(inside, "udp", 0, "192.168.99.2:1", "198.51.100.9:1")},
		{abiNatReasonNAT_PASS_EXCLUDED, one(inside, "udp", 0, "192.168.1.2:1", "10.1.2.3:1")},
		{abiNatReasonNAT_PASS_LOCAL, one(inside, "udp", 0, "192.168.1.2:1", "192.168.1.1:1")},
		{abiNatReasonNAT_PASS_TTL, func(t *testing.T) {
			ip := packet("udp", 0, out)
			ip.TTL = 1
			g.enters(t, inside, ip)
		}},
		{abiNatReasonNAT_PASS_TOO_BIG, func(t *testing.T) { g.enters(t, inside, long(insideHost, world, outsideMTU+1)) }},
		{abiNatReasonNAT_PASS_NO_ROUTE, one(inside, "udp", 0, "192.168.1.2:1", "198.51.100.200:1")},
		{abiNatReasonNAT_PASS_MULTICAST, one(inside, "udp", 0, "192.168.1.2:1", "224.0.0.251:5353")},
		{abiNatReasonNAT_PASS_TO_TC, func(t *testing.T) {
			if _, _, err := g.run(t, hooks[0], inside, g.in, g.in.arriving(fragment(901, 512)).Bytes(), 0); err != nil {
				t.Fatal(err)
			}
		}},
		{abiNatReasonNAT_TRANSLATED_IN, one(outer, "tcp", pktbuild.SYN, "198.51.100.9:1234", "203.0.113.1:8080")},
		{abiNatReasonNAT_TRANSLATED_OUT, open},
		{abiNatReasonNAT_CREATED, open},
		{abiNatReasonNAT_MAPPED, open},
		{abiNatReasonNAT_HAIRPINNED, one(inside, "tcp", pktbuild.SYN, "192.168.1.3:5000", "203.0.113.1:8080")},
		{abiNatReasonNAT_MSS_CLAMPED, func(t *testing.T) {
			from, to := endpoints{insideHost, world, 5000, 80}, endpoints{gatewayOut, world, 5000, 80}
			g.putSession(t, pktbuild.TCPProtocol, from, to, func(f *abiNatFlow) {
				f.State |= uint32(abiNatFlowStateNAT_FLOW_CLAMP)
				f.Mtu = outsideMTU
			})
			g.enters(t, inside, pktbuild.IPv4{Src: from.src, Dst: from.dst, TTL: 64, Payload: pktbuild.TCP{Src: 5000, Dst: 80, Flags: pktbuild.SYN, Options: pktbuild.MSS(1460, false)}})
		}},
		{abiNatReasonNAT_ICMP_TRANSLATED, func(t *testing.T) {
			open(t)
			about := packet("udp", 0, endpoints{gatewayOut, world, 5000, 53})
			g.enters(t, outer, pktbuild.IPv4{Src: router, Dst: gatewayOut, TTL: 64, Payload: icmpError(11, 0, 0, about, 0, nil)})
		}},
		{abiNatReasonNAT_ICMP_SENT, func(t *testing.T) {
			g.configure(t, func(c *abiNatConfig) { c.IcmpPerSecond = 1000 })
			open(t)
			g.enters(t, outer, back(1, 100))
		}},
		{abiNatReasonNAT_DROP_MALFORMED, func(t *testing.T) {
			frame := g.in.arriving(packet("udp", 0, out)).Bytes()
			frame[14] = 0x44
			g.entersFrame(t, inside, frame)
		}},
		{abiNatReasonNAT_DROP_BAD_CHECKSUM, func(t *testing.T) {
			about := packet("udp", 0, endpoints{gatewayOut, world, 5000, 53})
			frame := g.out.arriving(pktbuild.IPv4{Src: router, Dst: gatewayOut, TTL: 64, Payload: icmpError(11, 0, 0, about, 0, nil)}).Bytes()
			frame[36] ^= 1
			g.entersFrame(t, outer, frame)
		}},
		{abiNatReasonNAT_DROP_SPOOFED, one(inside, "tcp", pktbuild.SYN, "192.168.1.2:1", "192.168.1.2:1")},
		{abiNatReasonNAT_DROP_FILTERED, func(t *testing.T) {
			open(t)
			g.enters(t, outer, packet("udp", 0, ends("198.51.100.9:54", "203.0.113.1:5000")))
		}},
		{abiNatReasonNAT_DROP_NO_MAPPING, one(outer, "tcp", pktbuild.SYN, "198.51.100.9:1", "203.0.113.16:1024")},
		{abiNatReasonNAT_DROP_NO_SESSION, one(inside, "tcp", pktbuild.RST, "192.168.1.2:1", "198.51.100.9:1")},
		{abiNatReasonNAT_DROP_NO_PORT, func(t *testing.T) {
			one(inside, "gre", 0, "192.168.1.2:0", "198.51.100.9:0")(t)
			one(inside, "gre", 0, "192.168.1.3:0", "198.51.100.9:0")(t)
		}},
		{abiNatReasonNAT_DROP_NO_ADDRESS, func(t *testing.T) {
			for _, host := range []string{"192.168.5.2:0", "192.168.5.3:0", "192.168.5.4:0"} {
				one(inside, "gre", 0, host, "198.51.100.9:0")(t)
			}
		}},
		{abiNatReasonNAT_DROP_SESSIONS_FULL, full("counts", useUp)},
		{abiNatReasonNAT_DROP_MAPPINGS_FULL, full("mapping_table", fillTable)},
		{abiNatReasonNAT_DROP_SOURCE_LIMIT, func(t *testing.T) {
			g.configure(t, func(c *abiNatConfig) { limitSessions(c, 1) })
			open(t)
			g.enters(t, inside, packet("udp", 0, ends("192.168.1.2:5000", "198.51.100.9:54")))
		}},
		{abiNatReasonNAT_DROP_PORT_LIMIT, func(t *testing.T) {
			g.configure(t, func(c *abiNatConfig) {
				c.Flags, c.Limits.Ports = uint32(abiNatConfigFlagNAT_CONFIG_COUNT_PORTS), 1
			})
			open(t)
			g.enters(t, inside, packet("udp", 0, ends("192.168.1.2:5001", "198.51.100.9:53")))
		}},
		{abiNatReasonNAT_DROP_RATE_LIMIT, func(t *testing.T) {
			g.configure(t, func(c *abiNatConfig) { c.Limits.IntervalNs = 1e12 })
			open(t)
			g.enters(t, inside, packet("udp", 0, ends("192.168.1.2:5001", "198.51.100.9:53")))
		}},
		{abiNatReasonNAT_DROP_SOURCES_FULL, full("sources", fillUp[[8]byte, abiNatSource])},
		{abiNatReasonNAT_DROP_TTL, func(t *testing.T) { open(t); g.enters(t, outer, back(1, 100)) }},
		{abiNatReasonNAT_DROP_TOO_BIG, func(t *testing.T) { open(t); g.enters(t, outer, back(64, insideMTU+1)) }},
		{abiNatReasonNAT_DROP_NO_ROUTE, one(outer, "udp", 0, "198.51.100.9:1", "198.18.6.200:1")},
		{abiNatReasonNAT_DROP_UNSUPPORTED, func(t *testing.T) {
			redirect := pktbuild.ICMP{Type: 5, Data: make([]byte, 28)}
			g.enters(t, inside, pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: redirect})
		}},
		{abiNatReasonNAT_FRAGMENT_HELD, func(t *testing.T) { g.enters(t, inside, fragment(902, 512)) }},
		{abiNatReasonNAT_DROP_FRAGMENT, func(t *testing.T) {
			for range 129 { // one more than are kept
				g.enters(t, inside, fragment(903, 512))
			}
		}},
		{abiNatReasonNAT_DROP_FRAGMENTS_FULL, func(t *testing.T) {
			deleteAll[[16]byte, [20]byte](t, g.maps["fragments"])
			fillUp[[16]byte, [20]byte](t, g.maps["fragments"])
			defer deleteAll[[16]byte, [20]byte](t, g.maps["fragments"])
			for range 2 { // the first packet only asks for the neighbour
				g.enters(t, inside, fragment(904, 0))
			}
		}},
		{abiNatReasonNAT_DROP_RACE, func(t *testing.T) {
			open(t)
			g.mark(t, abiNatFlowStateNAT_FLOW_DEAD|abiNatFlowStateNAT_FLOW_GONE)
			open(t)
		}},
		// Last: the gateway has no rules after it, until the test ends.
		{abiNatReasonNAT_DROP_BYPASS, func(t *testing.T) {
			g.fill(t, "rules", indexed(make([]abiNatRule, 1)))
			open(t)
		}},
	}
	known := map[abiNatReason]bool{}
	for reason := range elsewhere {
		known[reason] = true
	}
	for _, row := range rows {
		known[row.reason] = true
		t.Run(rulefile.Reason(row.reason).String(), func(t *testing.T) {
			for _, h := range hooks {
				g.hook = h
				g.reset(t)
				g.counted(t)
				row.produce(t)
				if counted := g.counted(t); counted[row.reason] == 0 {
					t.Errorf("%s: counted %v", h.name, counted)
				}
			}
		})
	}
	for reason := range abiNatReasonNAT_REASONS {
		if !known[reason] {
			t.Errorf("nothing produces %s", rulefile.Reason(reason))
		}
	}
}

// A subscriber that has spent its share under one limit begins with the next one's.
func TestRateAfterChange(t *testing.T) {
	g := aGateway(t)
	open := func(port int) abiNatReason {
		reason, _ := g.send(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.%d.9:%d", fullRule, port), "198.51.100.9:53"))
		return reason
	}
	g.configure(t, func(c *abiNatConfig) { c.Limits.IntervalNs, c.Limits.BurstNs = 1e12, 1e12 }) // 2, then one in a quarter of an hour
	for n, want := range []abiNatReason{sent, sent, abiNatReasonNAT_DROP_RATE_LIMIT} {
		if got := open(5000 + n); got != want {
			t.Fatalf("session %d: %v, want %v", n, got, want)
		}
	}
	g.configure(t, func(c *abiNatConfig) { c.Limits.IntervalNs, c.Limits.BurstNs = 1e6, 0 }) // 1000 in a second
	open(6000)
	time.Sleep(10 * time.Millisecond)
	if got := open(6001); got != sent {
		t.Errorf("under a limit of 1000 in a second, 10 ms later: %v", got)
	}
}
