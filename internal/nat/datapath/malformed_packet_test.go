// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"testing"

	"natkit/internal/testutil/pktbuild"
)

// Packets that contradict themselves end at both hooks, although a session is there for
// them; a frame cut short anywhere is never translated.
func TestMalformed(t *testing.T) {
	r := aRig(t)
	const inside = abiNatSideNAT_INSIDE
	from, to := endpoints{insideHost, world, 5000, 53}, endpoints{gatewayOut, world, 40000, 53}
	for _, protocol := range []uint8{pktbuild.UDPProtocol, pktbuild.TCPProtocol, pktbuild.UDPLiteProtocol} {
		r.putFlow(t, inside, protocol, from, to, r.out, nil)
	}
	r.putFlow(t, inside, pktbuild.ICMPProtocol, endpoints{insideHost, world, 5000, 0}, endpoints{gatewayOut, world, 40000, 0}, r.out, nil)
	packet := func(payload pktbuild.Payload) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: payload}
	}
	udp := r.in.arriving(packet(pktbuild.UDP{Src: 5000, Dst: 53, Data: []byte("data")})).Bytes()
	lite := r.in.arriving(packet(pktbuild.UDP{Lite: true, Src: 5000, Dst: 53, Data: []byte("data")})).Bytes()
	tcp := r.in.arriving(packet(pktbuild.TCP{Src: 5000, Dst: 53, Flags: pktbuild.ACK, Options: []byte{1, 1, 1, 0}, Data: []byte("data")})).Bytes()
	echo := r.in.arriving(packet(pktbuild.Echo(8, 5000, 1, []byte("data")))).Bytes()

	set := func(frame []byte, at int, values ...byte) []byte {
		frame = bytes.Clone(frame)
		copy(frame[at:], values)
		return frame
	}
	const (
		malformed = abiNatReasonNAT_DROP_MALFORMED
		stacks    = abiNatReasonNAT_PASS_NOT_IPV4
	)
	tests := []struct {
		name   string
		frame  []byte
		reason abiNatReason
	}{
		{"IPv4 with version 6", set(udp, 14, 0x65), malformed},
		{"header of 16 bytes", set(udp, 14, 0x44), malformed},
		{"header longer than the packet", set(udp, 14, 0x4f), malformed},
		{"length shorter than the header", set(udp, 16, 0, 19), malformed},
		{"length beyond the frame", set(udp, 16, 1, 0), malformed},
		{"UDP shorter than its header", set(udp, 38, 0, 7), malformed},
		{"UDP longer than the packet", set(udp, 38, 0, 13), malformed},
		{"UDP-Lite that covers part of its header", set(lite, 38, 0, 7), malformed},
		{"UDP-Lite that covers more than there is", set(lite, 38, 0, 13), malformed},
		{"TCP header of 16 bytes", set(tcp, 46, 0x40), malformed},
		{"TCP header longer than the packet", set(tcp, 46, 0xf0), malformed},
		{"no room for the TCP header", set(tcp, 16, 0, 39), malformed},
		{"no room for the ICMP header", set(echo, 16, 0, 27), malformed},
		{"IPv6", set(tcp, 12, 0x86, 0xdd), stacks},
		{"ARP", set(udp, 12, 0x08, 0x06), stacks},
		{"a tagged frame is its VLAN device's", set(udp, 12, 0x81, 0x00), stacks},
		{"a broadcast frame", set(udp, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), stacks},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, h := range hooks {
				r.expectBytes(t, h, inside, r.in, test.frame, 0, h.counts(test.reason), nil, nil)
			}
		})
	}

	t.Run("truncated at every byte", func(t *testing.T) {
		for _, whole := range [][]byte{udp, lite, tcp, echo} {
			for length := 14; length < len(whole); length++ { // the kernel runs no test on less
				for _, h := range hooks {
					if h.name == "tc" && length < 34 { // and none of tc without the IPv4 header
						continue
					}
					r.expectBytes(t, h, inside, r.in, whole[:length], 0, malformed, nil, nil)
				}
			}
		}
	})

	t.Run("to another machine", func(t *testing.T) {
		g := aGateway(t) // no session yet: the neighbour's frame is not to open one
		frame := g.in.arriving(packet(pktbuild.UDP{Src: 5000, Dst: 53}))
		frame.To = g.out.mac
		for _, h := range hooks {
			g.expect(t, h, inside, g.in, frame, 0, end{h.counts(stacks), nil}, nil)
		}
	})
}

// An skb that stands for several frames stays whole; what counts for the MTU is one of
// them, and all are counted.
func TestGSO(t *testing.T) {
	r := aRig(t)
	from, to := endpoints{insideHost, world, 5000, 80}, endpoints{gatewayOut, world, 40000, 80}
	tcp := hooks[1]
	segment := func(src endpoints, ttl uint8) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: src.src, Dst: src.dst, TTL: ttl, Fragment: pktbuild.DF, Payload: pktbuild.TCP{Src: src.sport, Dst: src.dport, Flags: pktbuild.ACK, Data: counting(3000)}}
	}
	key := r.putFlow(t, abiNatSideNAT_INSIDE, pktbuild.TCPProtocol, from, to, r.out, func(f *abiNatFlow) { f.Mtu = outsideMTU })
	want := r.out.leaving(segment(to, 63))
	r.expect(t, tcp, abiNatSideNAT_INSIDE, r.in, r.in.arriving(segment(from, 64)), 1000, end{abiNatReasonNAT_TRANSLATED_OUT, &want}, nil)
	flow, _ := flowOf(t, r.maps, key)
	if flow.Packets != 1 || flow.Bytes != 3040 { // the kernel gives a test no number of segments
		t.Errorf("%d packets of %d bytes counted", flow.Packets, flow.Bytes)
	}
	r.expect(t, tcp, abiNatSideNAT_INSIDE, r.in, r.in.arriving(segment(from, 64)), 1361, end{abiNatReasonNAT_PASS_TOO_BIG, nil}, nil)
}
