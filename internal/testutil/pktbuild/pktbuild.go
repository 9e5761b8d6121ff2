// SPDX-License-Identifier: Apache-2.0

// Package pktbuild makes Ethernet frames with IPv4 packets for tests, byte by byte
// and checksums worked out from scratch: what a program made of a packet is right
// when it equals a frame built from what it should be. It parses nothing.
package pktbuild

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
)

// Flags of IPv4.
const (
	DF = 0x4000
	MF = 0x2000
)

// Protocol numbers.
const (
	ICMPProtocol    = 1
	TCPProtocol     = 6
	UDPProtocol     = 17
	UDPLiteProtocol = 136
)

// Flags of TCP.
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
)

// Frame is an Ethernet frame, or with neither To nor From a bare IPv4 packet.
type Frame struct {
	To, From net.HardwareAddr
	VLANs    []uint16 // tags, outermost first
	IP       IPv4
	Pad      int // bytes after the packet
}

// IPv4 is a packet. Of Protocol, Length and Check zero means: as it should be.
type IPv4 struct {
	Src, Dst netip.Addr
	TTL, TOS uint8
	ID       uint16
	Fragment uint16 // DF, MF and the offset in 8 bytes
	Options  []byte // of a length that divides by 4
	Protocol uint8
	Length   uint16
	Check    uint16
	Payload  Payload // nil: empty
}

// Payload is what an IPv4 packet carries: UDP, TCP, ICMP or Bytes.
type Payload interface {
	// bytes with a checksum over the pseudo-header of those addresses
	bytes(src, dst netip.Addr) []byte
	protocol() uint8
}

// Bytes is a payload without a header that natkit knows.
type Bytes []byte

// UDP is a datagram. Lite makes it UDP-Lite, whose Length is the checksum's coverage.
type UDP struct {
	Src, Dst   uint16
	Lite       bool
	NoChecksum bool
	Length     uint16 // 0: as it should be; UDP-Lite: everything
	Data       []byte
}

// TCP is a segment.
type TCP struct {
	Src, Dst uint16
	Seq, Ack uint32
	Flags    uint8
	Window   uint16
	Options  []byte // of a length that divides by 4
	Data     []byte
}

// ICMP is a message. Rest is its second word: identifier and sequence, or an MTU.
type ICMP struct {
	Type, Code uint8
	Rest       uint32
	Data       []byte
}

// Echo is an ICMP echo request or reply.
func Echo(kind uint8, id, sequence uint16, data []byte) ICMP {
	return ICMP{Type: kind, Rest: uint32(id)<<16 | uint32(sequence), Data: data}
}

// Bytes builds the frame.
func (f Frame) Bytes() []byte {
	var out []byte
	if f.To != nil || f.From != nil {
		out = append(append(out, f.To...), f.From...)
		for _, vid := range f.VLANs {
			out = binary.BigEndian.AppendUint16(append(out, 0x81, 0), vid)
		}
		out = append(out, 0x08, 0)
	}
	return append(append(out, f.IP.Bytes()...), make([]byte, f.Pad)...)
}

// Bytes builds the packet.
func (p IPv4) Bytes() []byte {
	var payload []byte
	protocol := p.Protocol
	if p.Payload != nil {
		payload = p.Payload.bytes(p.Src, p.Dst)
		if protocol == 0 {
			protocol = p.Payload.protocol()
		}
	}
	header := 20 + len(p.Options)
	length := p.Length
	if length == 0 {
		length = uint16(header + len(payload))
	}
	out := []byte{0x40 | byte(header/4), p.TOS}
	out = binary.BigEndian.AppendUint16(out, length)
	out = binary.BigEndian.AppendUint16(out, p.ID)
	out = binary.BigEndian.AppendUint16(out, p.Fragment)
	out = append(out, p.TTL, protocol, 0, 0)
	out = append(append(out, p.Src.AsSlice()...), p.Dst.AsSlice()...)
	out = append(out, p.Options...)
	check := p.Check
	if check == 0 {
		check = checksum(out)
	}
	binary.BigEndian.PutUint16(out[10:], check)
	return append(out, payload...)
}

func (b Bytes) bytes(_, _ netip.Addr) []byte { return b }
func (b Bytes) protocol() uint8              { return 253 } // RFC 3692: for experiments

func (u UDP) protocol() uint8 {
	if u.Lite {
		return UDPLiteProtocol
	}
	return UDPProtocol
}

func (u UDP) bytes(src, dst netip.Addr) []byte {
	length := u.Length
	if length == 0 && !u.Lite {
		length = uint16(8 + len(u.Data))
	}
	out := binary.BigEndian.AppendUint16(nil, u.Src)
	out = binary.BigEndian.AppendUint16(out, u.Dst)
	out = binary.BigEndian.AppendUint16(out, length)
	out = append(append(out, 0, 0), u.Data...)
	if u.NoChecksum {
		return out
	}
	covered := out
	if u.Lite && length != 0 {
		covered = out[:length]
	}
	check := checksum(pseudo(src, dst, u.protocol(), len(out)), covered)
	if check == 0 {
		check = 0xffff
	}
	binary.BigEndian.PutUint16(out[6:], check)
	return out
}

func (t TCP) protocol() uint8 { return TCPProtocol }

func (t TCP) bytes(src, dst netip.Addr) []byte {
	out := binary.BigEndian.AppendUint16(nil, t.Src)
	out = binary.BigEndian.AppendUint16(out, t.Dst)
	out = binary.BigEndian.AppendUint32(out, t.Seq)
	out = binary.BigEndian.AppendUint32(out, t.Ack)
	out = append(out, byte(20+len(t.Options))/4<<4, t.Flags)
	out = binary.BigEndian.AppendUint16(out, t.Window)
	out = append(out, 0, 0, 0, 0)
	out = append(append(out, t.Options...), t.Data...)
	binary.BigEndian.PutUint16(out[16:], checksum(pseudo(src, dst, TCPProtocol, len(out)), out))
	return out
}

func (i ICMP) protocol() uint8 { return ICMPProtocol }

func (i ICMP) bytes(_, _ netip.Addr) []byte {
	out := binary.BigEndian.AppendUint32([]byte{i.Type, i.Code, 0, 0}, i.Rest)
	out = append(out, i.Data...)
	binary.BigEndian.PutUint16(out[2:], checksum(out))
	return out
}

// MSS is the TCP option, and padding in front of it if odd, that puts it at an odd
// offset.
func MSS(mss uint16, odd bool) []byte {
	option := binary.BigEndian.AppendUint16([]byte{2, 4}, mss)
	if odd {
		return append(append([]byte{1}, option...), 1, 1, 0)
	}
	return option
}

func pseudo(src, dst netip.Addr, protocol uint8, length int) []byte {
	return binary.BigEndian.AppendUint16(append(slices.Concat(src.AsSlice(), dst.AsSlice()), 0, protocol), uint16(length))
}

// checksum is RFC 1071's over parts of even length, but for the last.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, part := range parts {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(part[i]) << 8
			if i+1 < len(part) {
				sum += uint32(part[i+1])
			}
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
