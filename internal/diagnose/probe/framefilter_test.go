// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The filters are valid with as many interfaces and VLANs as they ever have: their jumps are short.
func TestFrameFiltersAreValid(t *testing.T) {
	many := make([]int, maxFrameLinks)
	for i := range many {
		many[i] = i + 1
	}
	addrs := make([]netip.Addr, maxFrameAddrs)
	for i := range addrs {
		addrs[i] = netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
	}
	for name, filter := range map[string]frameFilter{
		"ARP": arpFilter(many), "ARP watch": arpWatchFilter(many, addrs), "astray": astrayFilter(many, many), "no VLAN": astrayFilter(many[:1], nil),
	} {
		for i, f := range filter {
			if f.Code&7 != unix.BPF_JMP {
				continue
			}
			for _, to := range []int{i + 1 + int(f.Jt), i + 1 + int(f.Jf)} {
				if to >= len(filter) {
					t.Errorf("%s: instruction %d of %d jumps to %d", name, i, len(filter), to)
				}
			}
		}
		if last := filter[len(filter)-1]; last.Code&7 != unix.BPF_RET {
			t.Errorf("%s does not end with a return", name)
		}
	}
}

// Packets that come by again have a smaller TTL; those of traceroute are others each time.
func TestCircles(t *testing.T) {
	packet := func(ttl byte, id, port byte) (leavingPacket, []byte) {
		b := []byte{0x45, 0, 0, 28, 0, id, 0, 0, ttl, unix.IPPROTO_UDP, 0, 0, 10, 0, 0, 2, 10, 9, 0, 1, 1, 2, 0x82, port, 0, 8, 0, 0}
		p, ok := parseLeaving(b)
		if !ok {
			t.Fatal("not a packet")
		}
		return p, b
	}
	c := circles{}
	for _, ttl := range []byte{6, 4, 2} {
		p, b := packet(ttl, 1, 1)
		c.add("eth0", p, b)
	}
	for i := range byte(6) { // traceroute
		p, b := packet(i+1, 0, 100+i)
		c.add("eth0", p, b)
	}
	p, b := packet(3, 9, 9) // another one, twice the same
	c.add("eth0", p, b)
	c.add("eth0", p, b)
	rows := c.rows()
	if len(rows) != 1 || rows[0].Packets != 1 || rows[0].Dest != netip.MustParseAddr("10.9.0.1") || rows[0].Interface != "eth0" {
		t.Errorf("%+v", rows)
	}
}

// ARP is spoken on a broadcast network with a carrier, and nowhere else.
func TestSpeaksARP(t *testing.T) {
	const broadcast = unix.IFF_UP | unix.IFF_BROADCAST | unix.IFF_MULTICAST | unix.IFF_LOWER_UP
	for flags, want := range map[uint32]bool{
		broadcast: true, broadcast &^ unix.IFF_LOWER_UP: false, broadcast &^ unix.IFF_BROADCAST: false,
		broadcast | unix.IFF_NOARP: false, broadcast | unix.IFF_POINTOPOINT: false, broadcast | unix.IFF_LOOPBACK: false,
	} {
		if got := speaksARP(&netlink.LinkAttrs{RawFlags: flags}); got != want {
			t.Errorf("flags %#x: %v", flags, got)
		}
	}
}

func TestParseARP(t *testing.T) {
	probe := arpProbe([]byte{2, 0, 0, 0, 0, 1}, netip.MustParseAddr("10.0.0.1"))
	p, ok := parseARP(tappedFrame{kind: unix.PACKET_HOST, bytes: probe})
	if !ok || !p.request || !p.sender.IsUnspecified() || p.target != netip.MustParseAddr("10.0.0.1") || p.senderMAC != "02:00:00:00:00:01" || p.toMAC != "ff:ff:ff:ff:ff:ff" {
		t.Errorf("%+v, %v", p, ok)
	}
	for n := range probe {
		if _, ok := parseARP(tappedFrame{bytes: probe[:n]}); ok {
			t.Errorf("%d bytes are taken for ARP", n)
		}
	}
}
