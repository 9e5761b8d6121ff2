// SPDX-License-Identifier: Apache-2.0

package observe

// This file writes the head of a packet as one line.

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// tuple is what identifies a flow; ports are 0 where the protocol has none.
type tuple struct {
	protocol uint8
	src, dst netip.AddrPort
}

// hasPorts: the transport header begins with source and destination port.
func hasPorts(protocol uint8) bool {
	switch protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		return true
	}
	return false
}

func protocolName(protocol uint8) string {
	switch protocol {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_UDPLITE:
		return "udplite"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_DCCP:
		return "dccp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	case unix.IPPROTO_IGMP:
		return "igmp"
	case unix.IPPROTO_GRE:
		return "gre"
	case unix.IPPROTO_ESP:
		return "esp"
	}
	return fmt.Sprintf("ip-protocol-%d", protocol)
}

// ends writes "10.0.0.2:4000 -> 10.0.1.2:80".
func (t tuple) ends() string {
	if hasPorts(t.protocol) && (t.src.Port() != 0 || t.dst.Port() != 0) {
		return t.src.String() + " -> " + t.dst.String()
	}
	return t.src.Addr().String() + " -> " + t.dst.Addr().String()
}

// describe writes the packet that begins with head at its network header. head
// may be cut anywhere.
func describe(ethertype uint16, head []byte) string {
	t, transport, note, ok := parsePacket(ethertype, head)
	if !ok {
		switch ethertype {
		case unix.ETH_P_IP:
			return "ipv4, cut"
		case unix.ETH_P_IPV6:
			return "ipv6, cut"
		case unix.ETH_P_ARP:
			return "arp"
		case 0:
			return "not a network packet"
		}
		return fmt.Sprintf("ethertype 0x%04x", ethertype)
	}
	words := []string{protocolName(t.protocol), t.ends()}
	switch {
	case note != "":
		words = append(words, note)
	case t.protocol == unix.IPPROTO_TCP && len(transport) >= 14:
		words = append(words, tcpFlags(transport[13]))
	case (t.protocol == unix.IPPROTO_ICMP || t.protocol == unix.IPPROTO_ICMPV6) && len(transport) >= 2:
		words = append(words, fmt.Sprintf("type %d code %d", transport[0], transport[1]))
	}
	return strings.TrimSpace(strings.Join(words, " "))
}

// parsePacket returns the packet's tuple and its transport header; note says
// what keeps the transport header from being seen.
func parsePacket(ethertype uint16, head []byte) (t tuple, transport []byte, note string, ok bool) {
	var src, dst netip.Addr
	switch {
	case ethertype == unix.ETH_P_IP && len(head) >= 20 && head[0]>>4 == 4:
		src = netip.AddrFrom4([4]byte(head[12:16]))
		dst = netip.AddrFrom4([4]byte(head[16:20]))
		t.protocol = head[9]
		if offset := binary.BigEndian.Uint16(head[6:8]) & 0x1fff; offset != 0 {
			note = fmt.Sprintf("fragment at %d", int(offset)*8)
		} else if size := int(head[0]&15) * 4; size >= 20 && size <= len(head) {
			transport = head[size:]
		}
	case ethertype == unix.ETH_P_IPV6 && len(head) >= 40 && head[0]>>4 == 6:
		src = netip.AddrFrom16([16]byte(head[8:24]))
		dst = netip.AddrFrom16([16]byte(head[24:40]))
		var offset int
		t.protocol, transport, offset = walkExtensions(head[6], head[40:])
		if offset > 0 {
			note, transport = fmt.Sprintf("fragment at %d", offset), nil
		}
	default:
		return tuple{}, nil, "", false
	}
	var sport, dport uint16
	if hasPorts(t.protocol) && len(transport) >= 4 {
		sport = binary.BigEndian.Uint16(transport[0:2])
		dport = binary.BigEndian.Uint16(transport[2:4])
	}
	t.src, t.dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return t, transport, note, true
}

// walkExtensions returns what is behind the extension headers of IPv6, of which the first is protocol's: as walk_extensions of
// bpf/trace/packets.bpf.c. offset is that of a fragment, whose protocol is the datagram's; -1 if it is none.
func walkExtensions(protocol uint8, head []byte) (_ uint8, transport []byte, offset int) {
	const most = 8
	offset = -1
	for range most {
		size := 8
		switch {
		case len(head) < size:
			return protocol, head, offset
		case protocol == unix.IPPROTO_FRAGMENT:
			offset = int(binary.BigEndian.Uint16(head[2:4]) &^ 7)
		case protocol == unix.IPPROTO_HOPOPTS, protocol == unix.IPPROTO_ROUTING, protocol == unix.IPPROTO_DSTOPTS:
			size = (int(head[1]) + 1) * 8
		case protocol == unix.IPPROTO_AH:
			size = (int(head[1]) + 2) * 4
		default:
			return protocol, head, offset
		}
		protocol, head = head[0], head[min(size, len(head)):]
		if offset > 0 { // behind it is the middle of something
			break
		}
	}
	return protocol, head, offset
}

// isFragment says whether the packet that begins with head is a part of one.
func isFragment(head []byte) bool {
	const flagsAndOffset, moreOrOffset = 6, 0x3fff
	switch {
	case len(head) >= 20 && head[0]>>4 == 4:
		return binary.BigEndian.Uint16(head[flagsAndOffset:])&moreOrOffset != 0
	case len(head) >= 40 && head[0]>>4 == 6:
		_, _, offset := walkExtensions(head[6], head[40:])
		return offset >= 0
	}
	return false
}

func tcpFlags(b byte) string {
	var on []string
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"} {
		if b&(1<<i) != 0 {
			on = append(on, name)
		}
	}
	return strings.Join(on, ",")
}
