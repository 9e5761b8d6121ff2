// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// tunnel connects the gateway and a neighbour by devices without Ethernet, whose packets
// this process carries.
func (b *testbed) tunnel(name, addr string, peer *netns.Handle, peerAddr string) {
	b.t.Helper()
	var ends []*os.File
	for _, end := range []struct {
		ns         *netns.Handle
		name, addr string
	}{{b.gateway, name, addr}, {peer, "tun0", peerAddr}} {
		tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: end.name}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_ONE_QUEUE, Queues: 1, NonPersist: true}
		b.in(end.ns, func() error {
			if err := netlink.LinkAdd(tun); err != nil {
				return err
			}
			l, err := netlink.LinkByName(end.name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(end.addr)
			return errors.Join(err, netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		})
		ends = append(ends, tun.Fds...)
	}
	for i, from := range ends {
		go func() {
			packet := make([]byte, 65536)
			for {
				n, err := from.Read(packet)
				if err != nil {
					return // the device is gone with its namespace, or closed
				}
				ends[1-i].Write(packet[:n]) // what finds no room is lost, as on a wire
			}
		}()
	}
	b.t.Cleanup(func() {
		for _, end := range []struct {
			ns   *netns.Handle
			name string
		}{{b.gateway, name}, {peer, "tun0"}} {
			b.in(end.ns, func() error {
				l, err := netlink.LinkByName(end.name)
				if err != nil {
					return err
				}
				return netlink.LinkDel(l)
			})
		}
		for _, end := range ends {
			end.Close()
		}
	})
}

// Interfaces without Ethernet, inside and outside, beside those with it.
func TestTunnels(t *testing.T) {
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		ktest.Missing(t, "needs the module tun: %v", err)
	}
	b := newTestbed(t)
	b.tunnel("tin", "10.1.0.1/24", b.client, "10.1.0.2/24")
	b.tunnel("tout", "203.0.113.1/24", b.server, "203.0.113.9/24")
	b.up(`
inside: [in, tin]
outside: [out, tout]
limits: {sessions: 4096, sources: 256}
rules:
  - masquerade: 10.0.0.0/8
  - dnat: tcp 203.0.113.1:8080
    to: 10.1.0.2:80
  - dnat: tcp 198.51.100.1:8080
    to: 10.1.0.2:80
`, b.options())
	b.echo(b.server, "198.51.100.9:7")
	b.echo(b.server, "203.0.113.9:7")
	b.echo(b.client, "10.1.0.2:80")
	for _, way := range []struct {
		device  string
		gateway net.IP
	}{{"eth0", net.IPv4(10, 0, 0, 1)}, {"tun0", net.IPv4(10, 1, 0, 1)}} {
		b.in(b.client, func() error {
			l, err := netlink.LinkByName(way.device)
			if err != nil {
				return err
			}
			return netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: way.gateway})
		})
		for server, outside := range map[string]string{"198.51.100.9": "198.51.100.1", "203.0.113.9": "203.0.113.1"} {
			if seen := b.ask(b.client, server+":7"); seen.Addr().String() != outside {
				t.Errorf("by %s: the server %s saw %s, want %s", way.device, server, seen, outside)
			}
			b.ping(b.client, server)
		}
	}
	for outside, server := range map[string]string{"198.51.100.1": "198.51.100.9", "203.0.113.1": "203.0.113.9"} {
		if seen := b.ask(b.server, outside+":8080"); seen.Addr().String() != server {
			t.Errorf("dnat of %s: the inside server saw %s, want %s", outside, seen, server)
		}
	}
	s, err := ReadStatus(b.gateway)
	if err != nil || len(s.Problems) > 0 {
		t.Errorf("status %+v, %v", s, err)
	}
}
