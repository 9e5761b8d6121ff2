// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/testutil/ktest"
)

// Where the routes come to name a way that a filter forbids, no packet of an accelerated
// flow takes it: none was seen leaving by it.
func TestAccelForbiddenWay(t *testing.T) {
	b := newAccelTestbed(t)
	elsewhere := b.namespace()
	b.join("other", "10.9.0.1/24", elsewhere, "10.9.0.2/24")
	b.in(elsewhere, func() error {
		lo, err := netlink.LinkByName("lo")
		addr, err2 := netlink.ParseAddr("198.51.100.9/32")
		return errors.Join(err, err2, netlink.AddrAdd(lo, addr), netlink.LinkSetUp(lo),
			netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 9, 0, 1)}))
	})
	var there net.PacketConn
	b.in(elsewhere, func() (err error) { there, err = net.ListenPacket("udp4", "198.51.100.9:7000"); return err })
	t.Cleanup(func() { there.Close() })
	b.parrot(elsewhere, "10.9.0.2:7001")
	b.parrot(b.server, "198.51.100.9:7000")
	b.nft(`insert rule ip filter forward oifname "other" drop`)
	o := b.accelOptions()
	o.Interfaces = append(o.Interfaces, "other")
	b.accelOn(o)
	k, neighbour := b.dialogue(b.client, "", "198.51.100.9:7000"), b.dialogue(b.gateway, "", "10.9.0.2:7001")
	ktest.Wait(t, 30*time.Second, "the gateway knows its neighbour", func() bool { return neighbour.ask(time.Second) != "" })
	b.accelerated(k)
	b.in(b.gateway, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(198, 51, 100, 9), Mask: net.CIDRMask(32, 32)}, Gw: net.IPv4(10, 9, 0, 2)})
	})
	for begin := time.Now(); time.Since(begin) < 2*time.Second; {
		k.ask(time.Millisecond)
	}
	there.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if _, from, err := there.ReadFrom(make([]byte, 2048)); err == nil {
		t.Errorf("a datagram of %v took it", from)
	}
}

// An interface in a VRF has the addresses itself: to name the VRF in its place would accelerate nothing.
func TestAccelBelow(t *testing.T) {
	attrs := netlink.LinkAttrs{Name: "blue"}
	for _, above := range []netlink.Link{&netlink.Vrf{LinkAttrs: attrs}, &netlink.Bridge{LinkAttrs: attrs}, &netlink.Bond{LinkAttrs: attrs}} {
		vrf := above.Type() == "vrf"
		if text := belowError("in", above).Error(); strings.Contains(text, "name that") == vrf || strings.Contains(text, `in the VRF "blue"`) != vrf {
			t.Errorf("%s: %s", above.Type(), text)
		}
	}
}
