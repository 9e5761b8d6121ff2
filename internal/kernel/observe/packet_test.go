// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/sys/unix"
)

// ipv6Packet has 2001:db8::1 as its source and 2001:db8::2 as its destination.
func ipv6Packet(protocol byte, transport ...byte) []byte {
	p := make([]byte, 40)
	p[0], p[6] = 0x60, protocol
	copy(p[8:], []byte{0x20, 1, 0xd, 0xb8, 15: 1})
	copy(p[24:], []byte{0x20, 1, 0xd, 0xb8, 15: 2})
	return append(p, transport...)
}

// extension is an extension header of IPv6 with so many eights of bytes behind its first.
func extension(next, more byte) []byte {
	return append([]byte{next, more}, make([]byte, 6+8*int(more))...)
}

// A fragment is known as one wherever its header is.
func TestIsFragment(t *testing.T) {
	first := rawPacket("10.0.0.2", "10.1.0.2", unix.IPPROTO_UDP, make([]byte, 8))
	first[6] = 0x20
	header := []byte{17, 0, 0, 1, 0, 0, 0, 9}
	for name, tt := range map[string]struct {
		head []byte
		want bool
	}{
		"whole":                         {rawPacket("10.0.0.2", "10.1.0.2", unix.IPPROTO_UDP, make([]byte, 8)), false},
		"first":                         {first, true},
		"IPv6":                          {ipv6Packet(unix.IPPROTO_UDP, header...), false},
		"IPv6, fragment":                {ipv6Packet(unix.IPPROTO_FRAGMENT, header...), true},
		"IPv6, behind hop-by-hop":       {ipv6Packet(unix.IPPROTO_HOPOPTS, append(extension(unix.IPPROTO_FRAGMENT, 0), header...)...), true},
		"IPv6, hop-by-hop, no fragment": {ipv6Packet(unix.IPPROTO_HOPOPTS, extension(unix.IPPROTO_UDP, 0)...), false},
		"nothing":                       {nil, false},
	} {
		if got := isFragment(tt.head); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestDescribe(t *testing.T) {
	tcp := []byte{0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 5 << 4, 2, 0, 0, 0, 0, 0, 0}
	ip := func(protocol byte, transport ...byte) []byte {
		return rawPacket("10.0.0.2", "10.1.0.2", protocol, transport)
	}
	fragment := ip(unix.IPPROTO_UDP, 1, 2, 3, 4)
	fragment[6], fragment[7] = 0, 185
	options := ip(unix.IPPROTO_TCP, append([]byte{1, 1, 1, 1}, tcp...)...)
	options[0] = 0x46
	tests := []struct {
		name      string
		ethertype uint16
		head      []byte
		want      string
	}{
		{"tcp", unix.ETH_P_IP, ip(unix.IPPROTO_TCP, tcp...), "tcp 10.0.0.2:40000 -> 10.1.0.2:80 SYN"},
		{"tcp behind options", unix.ETH_P_IP, options, "tcp 10.0.0.2:40000 -> 10.1.0.2:80 SYN"},
		{"tcp, cut in its flags", unix.ETH_P_IP, ip(unix.IPPROTO_TCP, tcp[:13]...), "tcp 10.0.0.2:40000 -> 10.1.0.2:80"},
		{"tcp, cut in its ports", unix.ETH_P_IP, ip(unix.IPPROTO_TCP, tcp[:3]...), "tcp 10.0.0.2 -> 10.1.0.2"},
		{"udp", unix.ETH_P_IP, ip(unix.IPPROTO_UDP, 0x10, 0, 0, 53), "udp 10.0.0.2:4096 -> 10.1.0.2:53"},
		{"icmp", unix.ETH_P_IP, ip(unix.IPPROTO_ICMP, 8, 0, 0, 0), "icmp 10.0.0.2 -> 10.1.0.2 type 8 code 0"},
		{"fragment", unix.ETH_P_IP, fragment, "udp 10.0.0.2 -> 10.1.0.2 fragment at 1480"},
		{"igmp", unix.ETH_P_IP, ip(unix.IPPROTO_IGMP), "igmp 10.0.0.2 -> 10.1.0.2"},
		{"other protocol", unix.ETH_P_IP, ip(200), "ip-protocol-200 10.0.0.2 -> 10.1.0.2"},
		{"header length beyond the end", unix.ETH_P_IP, append([]byte{0x4f}, ip(unix.IPPROTO_UDP, 1, 2, 3, 4)[1:]...), "udp 10.0.0.2 -> 10.1.0.2"},
		{"ipv4 cut", unix.ETH_P_IP, ip(6)[:19], "ipv4, cut"},
		{"tcp over ipv6", unix.ETH_P_IPV6, ipv6Packet(unix.IPPROTO_TCP, tcp...), "tcp [2001:db8::1]:40000 -> [2001:db8::2]:80 SYN"},
		{"icmpv6", unix.ETH_P_IPV6, ipv6Packet(unix.IPPROTO_ICMPV6, 135, 0), "icmpv6 2001:db8::1 -> 2001:db8::2 type 135 code 0"},
		{
			"first fragment of ipv6", unix.ETH_P_IPV6,
			ipv6Packet(unix.IPPROTO_FRAGMENT, 17, 0, 0, 1, 0, 0, 0, 9, 0x10, 0, 0, 53), "udp [2001:db8::1]:4096 -> [2001:db8::2]:53",
		},
		{
			"later fragment of ipv6", unix.ETH_P_IPV6,
			ipv6Packet(unix.IPPROTO_FRAGMENT, 17, 0, 5, 0xc9, 0, 0, 0, 9, 1, 2, 3, 4), "udp 2001:db8::1 -> 2001:db8::2 fragment at 1480",
		},
		{
			"behind extension headers of ipv6", unix.ETH_P_IPV6,
			ipv6Packet(unix.IPPROTO_HOPOPTS, slices.Concat(extension(unix.IPPROTO_DSTOPTS, 1), extension(unix.IPPROTO_ROUTING, 0), extension(unix.IPPROTO_TCP, 2), tcp)...),
			"tcp [2001:db8::1]:40000 -> [2001:db8::2]:80 SYN",
		},
		{
			"behind a header of authentication", unix.ETH_P_IPV6,
			ipv6Packet(unix.IPPROTO_AH, append([]byte{unix.IPPROTO_TCP, 4, 23: 0}, tcp...)...), "tcp [2001:db8::1]:40000 -> [2001:db8::2]:80 SYN",
		},
		{
			"later fragment of ipv6 behind an extension header", unix.ETH_P_IPV6,
			ipv6Packet(unix.IPPROTO_HOPOPTS, append(extension(unix.IPPROTO_FRAGMENT, 0), 60, 0, 5, 0xc8, 0, 0, 0, 9, 1, 2, 3, 4)...), "ip-protocol-60 2001:db8::1 -> 2001:db8::2 fragment at 1480",
		},
		{"ipv6 cut in an extension header", unix.ETH_P_IPV6, ipv6Packet(unix.IPPROTO_HOPOPTS, unix.IPPROTO_TCP, 9, 0, 0), "ip-protocol-0 2001:db8::1 -> 2001:db8::2"},
		{"ipv6 cut behind an extension header", unix.ETH_P_IPV6, ipv6Packet(unix.IPPROTO_HOPOPTS, extension(unix.IPPROTO_TCP, 1)[:12]...), "tcp 2001:db8::1 -> 2001:db8::2"},
		{"ipv6 cut", unix.ETH_P_IPV6, ipv6Packet(6)[:39], "ipv6, cut"},
		{"version does not fit", unix.ETH_P_IP, ipv6Packet(6), "ipv4, cut"},
		{"arp", unix.ETH_P_ARP, nil, "arp"},
		{"lldp", 0x88cc, []byte{1}, "ethertype 0x88cc"},
		{"no packet", 0, nil, "not a network packet"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := describe(tt.ethertype, tt.head); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

func FuzzDescribe(f *testing.F) {
	f.Add(uint16(unix.ETH_P_IP), rawPacket("10.0.0.2", "10.1.0.2", unix.IPPROTO_TCP, bytes.Repeat([]byte{2}, 20)))
	f.Add(uint16(unix.ETH_P_IPV6), ipv6Packet(unix.IPPROTO_FRAGMENT, 6, 0, 0, 1, 0, 0, 0, 0))
	f.Add(uint16(0), []byte{})
	f.Fuzz(func(t *testing.T, ethertype uint16, head []byte) {
		text := describe(ethertype, head)
		if text == "" || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("described as %q", text)
		}
	})
}

// A sample names the flow of a translated packet, if that is not what it says.
func TestSampleOfTranslated(t *testing.T) {
	const snat = 1 << 4
	s := dropsDropSample{
		CtStatus: snat, Src: [16]uint8{192, 168, 0, 2}, Dst: [16]uint8{10, 1, 0, 2},
		Sport: swap16(4000), Dport: swap16(9), Protocol: unix.IPPROTO_UDP, Ethertype: swap16(unix.ETH_P_IP),
	}
	s.Captured = uint8(copy(s.Packet[:], rawPacket("10.1.0.1", "10.1.0.2", unix.IPPROTO_UDP, []byte{0x13, 0x88, 0, 9, 0, 8, 0, 0})))
	if got, want := s.String(), "udp 10.1.0.1:5000 -> 10.1.0.2:9 (flow 192.168.0.2:4000 -> 10.1.0.2:9)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	s.CtStatus = 0
	if got, want := s.String(), "udp 10.1.0.1:5000 -> 10.1.0.2:9"; got != want {
		t.Errorf("not translated: %q, want %q", got, want)
	}
}

// A packet is found by any address or port of it, and of its flow before translation.
func TestPacketMatch(t *testing.T) {
	packet := append([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0, 192, 0, 2, 1, 198, 51, 100, 7}, 0x9c, 0x40, 0, 80)
	s := dropsDropSample{Ethertype: swap16(unix.ETH_P_IP), Captured: uint8(len(packet)), Protocol: unix.IPPROTO_TCP, Sport: swap16(5000), Dport: swap16(8080)}
	copy(s.Packet[:], packet)
	copy(s.Src[:], []byte{10, 0, 0, 5})
	copy(s.Dst[:], []byte{203, 0, 113, 9})
	for _, tt := range []struct {
		host              string
		port              uint16
		wants, translated bool
	}{
		{"", 0, true, true},
		{"192.0.2.1/32", 0, true, true}, {"198.51.100.0/24", 0, true, true}, {"192.0.2.2/32", 0, false, false}, {"2001:db8::/32", 0, false, false},
		{"", 80, true, true}, {"", 40000, true, true}, {"", 81, false, false}, {"192.0.2.1/32", 80, true, true}, {"192.0.2.1/32", 81, false, false},
		{"10.0.0.5/32", 0, false, true}, {"", 8080, false, true}, {"10.0.0.5/32", 8080, false, true}, {"10.0.0.5/32", 80, false, false},
	} {
		m := PacketMatch{Port: tt.port}
		if tt.host != "" {
			m.Host = netip.MustParsePrefix(tt.host)
		}
		for status, want := range map[uint64]bool{0: tt.wants, 1 << 4: tt.translated} {
			s.CtStatus = status
			if got := m.wants(&s); got != want {
				t.Errorf("%s port %d, status %#x: %v, want %v", tt.host, tt.port, status, got, want)
			}
		}
	}
	var k kept
	for i := range 20 {
		k.add(s, i%5 == 0)
	}
	if k.sampled != 20 || k.matching != 4 || len(k.chosen) != 4 {
		t.Errorf("%d of %d, %d kept", k.matching, k.sampled, len(k.chosen))
	}
}
