// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

const zoneRules = `
inside: [in, in2]
outside: [out]
limits: {sessions: 4096, sources: 256}
subscribers: {by: [interface, address]}
pools:
  cgn: {addresses: 198.51.100.128/31, ports: 1024-4095, blocks: {size: 64}}
rules:
  - {snat: 10.0.0.0/24, to: cgn}
  - {dnat: "tcp 198.51.100.1:81", to: "10.0.0.2:8080", out: in}
  - {dnat: "tcp 198.51.100.1:82", to: "10.0.0.2:8080", out: in2}
`

// zoned is a testbed with a second network inside that has the addresses of the first.
type zoned struct {
	*testbed
	clients map[string]*netns.Handle // by interface
}

func newZoned(t *testing.T) *zoned {
	z := &zoned{testbed: newTestbed(t)}
	other := z.namespace()
	z.join("in2", "10.0.0.1/24", other, "10.0.0.2/24")
	z.in(other, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 0, 0, 1)})
	})
	z.clients = map[string]*netns.Handle{"in": z.client, "in2": other}
	return z
}

// newZonedTrunk is the same with both networks as VLANs on one Ethernet.
func newZonedTrunk(t *testing.T) *zoned {
	z := &zoned{testbed: newTestbed(t)}
	other := z.namespace()
	z.clients = map[string]*netns.Handle{"in": z.client, "in2": other}
	for ns, name := range map[*netns.Handle]string{z.gateway: "in", z.client: "eth0"} {
		z.in(ns, func() error {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			addresses, err := netlink.AddrList(l, netlink.FAMILY_V4)
			for i := range addresses {
				err = errors.Join(err, netlink.AddrDel(l, &addresses[i]))
			}
			return errors.Join(err, netlink.LinkSetDown(l), netlink.LinkSetName(l, "trunk"), netlink.LinkSetUp(l))
		})
	}
	z.vlan(z.gateway, "trunk", 7, z.gateway, "in", "10.0.0.1/24")
	z.vlan(z.gateway, "trunk", 8, z.gateway, "in2", "10.0.0.1/24")
	z.vlan(z.client, "trunk", 7, z.client, "eth0", "10.0.0.2/24")
	z.vlan(z.client, "trunk", 8, other, "eth0", "10.0.0.2/24")
	for _, ns := range z.clients {
		z.in(ns, func() error {
			return netlink.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 0, 0, 1)})
		})
	}
	return z
}

// says has a host answer connections to its port 8080 with a word.
func (z *zoned) says(ns *netns.Handle, word string) {
	z.serveTCP(ns, "10.0.0.2:8080", func(c net.Conn) { fmt.Fprintln(c, word) })
}

// hears is what an address answers.
func (z *zoned) hears(ns *netns.Handle, at string) (word string) {
	z.t.Helper()
	z.in(ns, func() error {
		c, err := net.DialTimeout("tcp4", at, 30*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		all, err := io.ReadAll(c)
		word = strings.TrimSpace(string(all))
		return err
	})
	return word
}

// Two networks with the same addresses stand behind one gateway: hosts with the same address and
// port have connections with the same server at once, forwards reach the one that they name, and
// one reaches the other by its external address. Neighbours are unknown at first. Also with VLANs on one
// Ethernet.
func TestZones(t *testing.T) {
	for _, c := range []struct {
		name   string
		made   func(*testing.T) *zoned
		attach Attach
	}{{"tc", newZoned, AttachTC}, {"xdp", newZoned, AttachXDP}, {"vlans", newZonedTrunk, AttachTC}} {
		t.Run(c.name, func(t *testing.T) {
			z := c.made(t)
			if c.attach == AttachXDP {
				for _, ns := range []*netns.Handle{z.clients["in"], z.clients["in2"], z.server} {
					z.passXDP(ns)
				}
			}
			o := z.options()
			o.Attach = c.attach
			z.up(zoneRules, o)
			ports := map[string]string{"in": "81", "in2": "82"}
			for link, ns := range z.clients {
				z.says(ns, link)
			}
			for link, port := range ports {
				if got := z.hears(z.server, "198.51.100.1:"+port); got != link {
					t.Errorf("port %s is answered by %q, not by the host behind %s", port, got, link)
				}
			}
			for link, ns := range z.clients {
				for other, port := range ports {
					if got := z.hears(ns, "198.51.100.1:"+port); got != other && link != other {
						t.Errorf("from %s, port %s is answered by %q", link, port, got)
					}
				}
				z.ping(ns, "198.51.100.9")
			}
			z.atOnce(t)
			z.shown(t)
		})
	}
}

// atOnce has both hosts send from the same port to the same server, and each get its own words back.
func (z *zoned) atOnce(t *testing.T) {
	t.Helper()
	z.serveTCP(z.server, "198.51.100.9:7777", func(c net.Conn) {
		fmt.Fprintln(c, c.RemoteAddr())
		_, _ = io.Copy(c, c)
	})
	conns, seen := map[string]net.Conn{}, map[string]string{}
	for link, ns := range z.clients {
		z.in(ns, func() error {
			d := net.Dialer{Timeout: 30 * time.Second, LocalAddr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 4000}}
			c, err := d.Dial("tcp4", "198.51.100.9:7777")
			conns[link] = c
			return err
		})
		defer conns[link].Close()
		b := make([]byte, 64)
		_ = conns[link].SetDeadline(time.Now().Add(30 * time.Second))
		n, err := conns[link].Read(b)
		if err != nil {
			t.Fatal(err)
		}
		seen[link] = strings.TrimSpace(string(b[:n]))
	}
	if seen["in"] == seen["in2"] {
		t.Errorf("both are seen as %s", seen["in"])
	}
	for range 3 {
		for link, c := range conns {
			word := "word of " + link
			if _, err := io.WriteString(c, word); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, len(word))
			if _, err := io.ReadFull(c, b); err != nil || string(b) != word {
				t.Errorf("%s gets %q back (%v)", link, b, err)
			}
		}
	}
}

// shown checks that subscribers and sessions are shown with their interfaces.
func (z *zoned) shown(t *testing.T) {
	t.Helper()
	s, err := ReadSubscribers(z.gateway, SubscriberOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, r := range s.Rows {
		rows = append(rows, fmt.Sprintf("%v on %s, %d blocks", r.Of, r.Interface, len(r.Blocks)))
	}
	slices.Sort(rows)
	if want := []string{"10.0.0.2/32 on in, 1 blocks", "10.0.0.2/32 on in2, 1 blocks"}; !slices.Equal(rows, want) {
		t.Errorf("subscribers %q, want %q", rows, want)
	}
	facts, err := ReadFacts(z.gateway, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for i := range facts.Sources {
		names = append(names, facts.Sources[i].Name())
	}
	slices.Sort(names)
	if want := []string{"10.0.0.2 on in", "10.0.0.2 on in2"}; !slices.Equal(names, want) {
		t.Errorf("busiest subscribers %q, want %q", names, want)
	}
	e, err := Open(z.gateway)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	at := map[string]string{}
	if err := e.Sessions(func(s *rulefile.Session) bool {
		if s.Source.AddrPort == netip.MustParseAddrPort("10.0.0.2:4000") {
			at[s.SourceInterface] = s.SourceAfter.String()
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if len(at) != 2 || at["in"] == "" || at["in"] == at["in2"] {
		t.Errorf("sessions of port 4000 by interface: %v", at)
	}
}

// What a subscriber is can't change while sessions are open: apply refuses it, either way, and names
// what to type; another interface may be added.
func TestZonesApply(t *testing.T) {
	z := newZoned(t)
	plain := strings.NewReplacer("[interface, address]", "address", ", out: in2", "", ", out: in", "").Replace(zoneRules)
	for _, change := range [][2]string{{plain, zoneRules}, {zoneRules, plain}} {
		z.up(change[0], z.options())
		_, err := Apply(t.Context(), z.parse(change[1]), change[1], z.options())
		if err == nil || !strings.Contains(err.Error(), "key by of subscribers is") || !strings.Contains(err.Error(), "[interface, address]") {
			t.Errorf("apply: %v", err)
		}
		if _, err := Down(z.gateway); err != nil {
			t.Fatal(err)
		}
	}
	one := strings.NewReplacer("[in, in2]", "[in]", "  - {dnat: \"tcp 198.51.100.1:82\", to: \"10.0.0.2:8080\", out: in2}\n", "").Replace(zoneRules)
	z.up(one, z.options())
	z.says(z.clients["in"], "in")
	z.says(z.clients["in2"], "in2")
	z.echo(z.server, "198.51.100.9:7778")
	before := z.ask(z.clients["in"], "198.51.100.9:7778")
	z.in(z.gateway, func() error { return writeSetting("net.ipv4.conf.in2.rp_filter", "1") })
	p, err := Apply(t.Context(), z.parse(zoneRules), zoneRules, z.options())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.Contains(w, "sysctl -w net.ipv4.conf.in2.rp_filter=2") }) {
		t.Errorf("warnings %q", p.Warnings)
	}
	z.in(z.gateway, func() error { return writeSetting("net.ipv4.conf.in2.rp_filter", "2") })
	if got := z.hears(z.server, "198.51.100.1:82"); got != "in2" {
		t.Errorf("the new interface answers %q", got)
	}
	if after := z.ask(z.clients["in2"], "198.51.100.9:7778"); after == before {
		t.Errorf("both zones are seen as %v", after)
	}
	z.shownSubscribers(t, 2)
}

func (z *zoned) shownSubscribers(t *testing.T, want int) {
	t.Helper()
	s, err := ReadSubscribers(z.gateway, SubscriberOptions{})
	if err != nil || s.Count != want {
		t.Errorf("%d subscribers (%v), want %d: %+v", s.Count, err, want, s.Rows)
	}
}

// Engine nft has nothing like it, and says so.
func TestZonesNFT(t *testing.T) {
	z := newZoned(t)
	o := z.options()
	o.Engine = EngineNFT
	_, err := Up(t.Context(), z.parse(zoneRules), zoneRules, o)
	if err == nil || !strings.Contains(err.Error(), "use engine ebpf") {
		t.Errorf("up: %v", err)
	}
}

// Hosts of both networks ask for the same port, by the same address and nonce: each has a mapping of
// its own, and who ends all of its mappings ends those of no other.
func TestZonesPCP(t *testing.T) {
	z := newZoned(t)
	b := &pcpTestbed{z.serve(zoneRules+"pcp: {on: [in, in2]}\n", ServeOptions{}), 1}
	b.hears("up", "")
	external := map[string]uint16{}
	for link, ns := range z.clients {
		a := b.ask(ns, "10.0.0.1:5351", b.request(1, 17, 5000, 600, nil))
		if len(a) < 60 || a[3] != 0 {
			t.Fatalf("%s: answer % x", link, a)
		}
		external[link] = uint16(a[42])<<8 | uint16(a[43])
	}
	e, err := Open(z.gateway)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	leases := func() map[string]uint16 {
		found := map[string]uint16{}
		if err := e.Leases(func(l *datapath.Lease) bool { found[e.ZoneName(l.Zone)] = l.Outside.Port(); return true }); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if got := leases(); len(external) != 2 || !maps.Equal(got, external) {
		t.Errorf("mappings by interface are %v, and were given as %v", got, external)
	}
	if a := b.ask(z.clients["in2"], "10.0.0.1:5351", b.request(1, 0, 0, 0, nil)); len(a) < 24 || a[3] != 0 {
		t.Errorf("the end of all: % x", a)
	}
	delete(external, "in2")
	if got := leases(); !maps.Equal(got, external) {
		t.Errorf("left are %v, want %v", got, external)
	}
}
