// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/pktbuild"
)

// verdictSlot is where verdict_get of bpf/nat/verdict.h looks for UDP or TCP, but for its
// last bit: a decision has two places beside each other.
func verdictSlot(protocol uint8, e endpoints) uint32 {
	class := abiNatClassNAT_UDP
	if protocol == unix.IPPROTO_TCP {
		class = abiNatClassNAT_TCP
	}
	word := func(a netip.Addr) uint32 { return binary.NativeEndian.Uint32(a.AsSlice()) }
	rest := uint32(class)<<24 | uint32(protocol)<<16 | uint32(be(e.dport))
	b := binary.NativeEndian.AppendUint32(nil, word(e.src)*31+word(e.dst)+rest*0x9e3779b1)
	return addressHash(netip.AddrFrom4([4]byte(b))) % 16384 &^ 1
}

// meets finds endpoints that change makes of base and whose decision is at the same place.
func meets(t *testing.T, protocol uint8, base endpoints, change func(n uint32, e *endpoints)) endpoints {
	t.Helper()
	for n := range uint32(1 << 22) {
		e := base
		change(n, &e)
		if e != base && verdictSlot(protocol, e) == verdictSlot(protocol, base) {
			return e
		}
	}
	t.Fatalf("nothing is at the place of %v", base)
	return base
}

// What was decided for one packet is not another's: of another host, receiver, port,
// type of service or time, though it is at its place. TestSourceRuleRemembered has
// another generation.
func TestDecision(t *testing.T) {
	g := aGateway(t)
	udp := func(e endpoints, reason abiNatReason, src string) {
		t.Helper()
		got, out := g.send(t, inside, "udp", 0, e)
		if got != reason || (src != "" && out.src.String() != src) {
			t.Errorf("%v: %v from %v, want %v from %s", e, got, out.src, reason, src)
		}
	}
	own, known := externalAddresses[ownAddress], externalAddresses[knownAddress]

	t.Run("source", func(t *testing.T) {
		var base, other endpoints
		host := func(rule, n int) endpoints {
			return ends(fmt.Sprintf("192.168.%d.%d:5000", rule, n), "198.51.100.9:53")
		}
		for n := range 250 * 250 {
			base, other = host(masqueradeRule, n%250+3), host(knownRule, n/250+1)
			if verdictSlot(unix.IPPROTO_UDP, base) == verdictSlot(unix.IPPROTO_UDP, other) {
				break
			}
		}
		if verdictSlot(unix.IPPROTO_UDP, base) != verdictSlot(unix.IPPROTO_UDP, other) {
			t.Fatal("no two hosts meet")
		}
		for range 2 {
			udp(base, sent, own)
			udp(other, sent, known)
		}
	})
	t.Run("destination", func(t *testing.T) { // 10.0.0.0/8 is excluded
		base := ends("192.168.1.9:5000", "198.51.100.9:53")
		other := meets(t, unix.IPPROTO_UDP, base, func(n uint32, e *endpoints) {
			e.dst = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
		})
		udp(base, sent, own)
		udp(other, abiNatReasonNAT_PASS_EXCLUDED, "")
	})
	t.Run("port", func(t *testing.T) { // TCP port 22 of that receiver is excluded
		excluded := ends("192.168.1.9:5001", "198.51.100.22:22")
		other := meets(t, unix.IPPROTO_TCP, excluded, func(n uint32, e *endpoints) { e.dport = uint16(n) })
		g.want(t, inside, "tcp", pktbuild.SYN, other, sent, endpoints{netip.MustParseAddr(own), other.dst, other.sport, other.dport})
		g.refused(t, inside, "tcp", pktbuild.SYN, excluded, abiNatReasonNAT_PASS_EXCLUDED)
	})
	t.Run("type of service", func(t *testing.T) {
		const table = 77
		rule := netlink.NewRule()
		rule.Table, rule.Tos, rule.Priority = table, 0x10, 100
		g.do(t, func() error { return netlink.RuleAdd(rule) })
		nowhere := &netlink.Route{Dst: &net.IPNet{IP: net.IP{198, 51, 100, 77}, Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_UNREACHABLE, Table: table}
		g.do(t, func() error { return netlink.RouteAdd(nowhere) })
		t.Cleanup(func() {
			g.do(t, func() error { return netlink.RuleDel(rule) })
			g.do(t, func() error { return netlink.RouteDel(nowhere) })
		})
		e := ends("192.168.1.9:5004", "198.51.100.77:53")
		udp(e, sent, own)
		e.sport++
		ip := packet("udp", 0, e)
		ip.TOS = 0x10
		if _, _, reason := g.enter(t, g.hook, inside, g.in, g.in.arriving(ip).Bytes()); reason != abiNatReasonNAT_PASS_NO_ROUTE {
			t.Errorf("by the way of another type of service: %v", reason)
		}
	})
	t.Run("time", func(t *testing.T) {
		e := ends("192.168.1.9:5006", "198.51.100.78:53")
		udp(e, sent, own)
		g.unreachable(t, &net.IPNet{IP: net.IP{198, 51, 100, 78}, Mask: net.CIDRMask(32, 32)})
		time.Sleep(time.Second)
		e.sport++
		udp(e, abiNatReasonNAT_PASS_NO_ROUTE, "")
	})
}

// A source that was right at one interface is not so at another.
func TestDecisionIngress(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.hook = hooks[1]
	var second port
	g.do(t, func() (err error) {
		second, err = g.addPort(t, "in2", 7, insideMTU, netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.2.0.2"), abiNatLinkFlagNAT_LINK_INSIDE)
		return err
	})
	e := ends("192.168.1.9:5000", "198.51.100.9:53")
	for range 2 {
		if reason, _ := g.send(t, inside, "udp", 0, e); reason != sent {
			t.Fatalf("%v: %v", e, reason)
		}
		e.sport++
		if _, _, reason := g.enter(t, g.hook, inside, second, second.arriving(packet("udp", 0, e)).Bytes()); reason != abiNatReasonNAT_DROP_SPOOFED {
			t.Errorf("%v by another interface: %v", e, reason)
		}
		e.sport++
	}
}
