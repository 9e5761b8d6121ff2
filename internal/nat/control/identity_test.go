// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/pktbuild"
)

const identityRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: any
  - map: 10.0.1.0/24 <-> 10.0.1.0/24
  - map: 203.0.113.64/30 <-> 203.0.113.64/30
  - map: 10.0.255.0/24 <-> 10.0.255.0/24
  - {map: 10.0.9.0/24 <-> 10.0.9.0/24, stateless: true}
`

// udp is a datagram between two endpoints.
func udp(src, dst string) pktbuild.IPv4 {
	from, to := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return pktbuild.IPv4{Src: from.Addr(), Dst: to.Addr(), TTL: 64, Payload: pktbuild.UDP{Src: from.Port(), Dst: to.Port(), Data: []byte("natkit")}}
}

// passes sends a packet in by one wire and wants it out by the other, one hop on and else as it is.
func (c *crossing) passes(t *testing.T, what string, from, to *wire, p pktbuild.IPv4) {
	t.Helper()
	from.put(t, from.frame(p))
	p.TTL--
	// The kernel may put another identification into what it sends itself, which this is not.
	if got := to.arrives(t); !bytes.Equal(got, p.Bytes()) {
		t.Errorf("%s: came out as %x, want %x", what, got, p.Bytes())
	}
}

// Hosts with an identity map have sessions and are reached from outside, with their own
// addresses, whatever other rules say of them; what is for the gateway stays its own.
func TestIdentityMap(t *testing.T) {
	onEveryWay(t, identityRules, func(t *testing.T, c *crossing) {
		err := c.gateway.Do(func() error {
			l, err := netlink.LinkByName("in")
			if err != nil {
				return err
			}
			dst, err := netlink.ParseIPNet("203.0.113.64/30")
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: netip.MustParseAddr("10.0.255.2").AsSlice(), Dst: dst})
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, host := range []string{"10.0.1.5", "203.0.113.65"} {
			c.passes(t, host+" to the world", c.in, c.out, udp(host+":5000", "198.51.100.9:53"))
			c.passes(t, "the answer", c.out, c.in, udp("198.51.100.9:53", host+":5000"))
			c.passes(t, "a stranger to "+host, c.out, c.in, udp("198.51.100.77:999", host+":7"))
			c.passes(t, "its answer", c.in, c.out, udp(host+":7", "198.51.100.77:999"))
			c.passes(t, "another internal host to "+host, c.in, c.in, udp("10.0.7.7:1234", host+":7"))
		}
		c.passes(t, "a stateless host to the world", c.in, c.out, udp("10.0.9.5:5000", "198.51.100.9:53"))
		c.passes(t, "a stranger to a stateless host", c.out, c.in, udp("198.51.100.77:999", "10.0.9.5:7"))

		// Others are translated as before.
		c.in.put(t, c.in.frame(udp("10.0.7.7:5000", "198.51.100.9:53")))
		if got := c.out.arrives(t); got == nil || sourceOf(got) != crossingOut {
			t.Errorf("a masqueraded host left as %x", got)
		}
		// The gateway answers for itself on an address that the map has, too: from outside as from inside.
		for _, from := range []struct {
			*wire
			name, src string
		}{{c.in, "inside", "10.0.7.7"}, {c.out, "outside", "198.51.100.9"}} {
			echo := pktbuild.IPv4{Src: netip.MustParseAddr(from.src), Dst: crossingIn, TTL: 64, Payload: pktbuild.ICMP{Type: 8, Rest: 7 << 16}}
			from.put(t, from.frame(echo))
			if got := from.arrives(t); got == nil || got[9] != unix.IPPROTO_ICMP || got[20] != 0 || sourceOf(got) != crossingIn {
				t.Errorf("ping of the gateway from %s is answered by %x", from.name, got)
			}
		}
		// Addresses on the outside network are answered for there, and no route leads them astray.
		err = c.gateway.Do(func() error {
			have, err := proxied()
			if err != nil {
				return err
			}
			for _, n := range have {
				if n.Link == "out" && n.Addr == netip.MustParseAddr("203.0.113.65") {
					return nil
				}
			}
			t.Errorf("nobody answers ARP for 203.0.113.65 on out: %v", have)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		checkNoRoutes(t, c.gateway)
	})
}

// checkNoRoutes complains of routes that natkit has made.
func checkNoRoutes(t *testing.T, ns *netns.Handle) {
	t.Helper()
	err := ns.Do(func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
		if len(routes) > 0 {
			t.Errorf("routes %v", routes)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Between internal hosts by an external address the source rules of the outside interface count, and
// not those of the egress interface itself.
func TestHairpinBoundInside(t *testing.T) {
	const rules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - {masquerade: 10.0.0.0/16, out: in}
  - {dnat: udp 203.0.113.30:5000, to: 10.0.7.7}
`
	onEveryWay(t, rules, func(t *testing.T, c *crossing) {
		c.in.put(t, c.in.frame(udp("10.0.1.5:4000", "203.0.113.30:5000")))
		got := c.in.arrives(t)
		if got == nil || sourceOf(got) != netip.MustParseAddr("10.0.1.5") || destinationOf(got) != netip.MustParseAddr("10.0.7.7") {
			t.Errorf("the host inside sees %x, want 10.0.1.5 to 10.0.7.7", got)
		}
	})
}
