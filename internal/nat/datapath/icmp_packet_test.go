// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"maps"
	"net/netip"
	"testing"

	"natkit/internal/testutil/pktbuild"
)

// icmpError is an error about a packet, of which it carries the first quoted bytes (0:
// all), followed by extra.
func icmpError(kind, code uint8, rest uint32, inner pktbuild.IPv4, quoted int, extra []byte) pktbuild.ICMP {
	data := inner.Bytes()
	if quoted > 0 {
		data = data[:quoted]
	}
	return pktbuild.ICMP{Type: kind, Code: code, Rest: rest, Data: append(bytes.Clone(data), extra...)}
}

// ICMP errors about packets of a session: RFC 5508. Their inside is translated back, and
// XDP leaves them to tc.
func TestICMPErrors(t *testing.T) {
	const (
		inside  = abiNatSideNAT_INSIDE
		outside = abiNatSideNAT_OUTSIDE
		sent    = abiNatReasonNAT_TRANSLATED_OUT
		back    = abiNatReasonNAT_TRANSLATED_IN
		bad     = abiNatReasonNAT_DROP_BAD_CHECKSUM
		unknown = abiNatReasonNAT_DROP_NO_SESSION
	)
	insideRouter := netip.MustParseAddr("192.168.1.7")
	udp := func(src, dst uint16) pktbuild.Payload {
		return pktbuild.UDP{Src: src, Dst: dst, Data: []byte("question")}
	}
	bare := func(src, dst uint16) pktbuild.Payload {
		return pktbuild.UDP{Src: src, Dst: dst, NoChecksum: true, Data: []byte("question")}
	}
	lite := func(src, dst uint16) pktbuild.Payload {
		return pktbuild.UDP{Lite: true, Src: src, Dst: dst, Data: []byte("question")}
	}
	tcp := func(src, dst uint16) pktbuild.Payload {
		return pktbuild.TCP{Src: src, Dst: dst, Seq: 7, Flags: pktbuild.ACK, Data: []byte("question")}
	}
	request := func(src, dst uint16) pktbuild.Payload { return pktbuild.Echo(8, src, 1, []byte("ping")) }
	reply := func(src, dst uint16) pktbuild.Payload { return pktbuild.Echo(0, dst, 1, []byte("ping")) }
	r := aRig(t)
	for _, protocol := range []uint8{pktbuild.UDPProtocol, pktbuild.UDPLiteProtocol, pktbuild.TCPProtocol} {
		r.putFlow(t, outside, protocol, endpoints{world, gatewayOut, 53, 40000}, endpoints{world, insideHost, 53, 5000}, r.in, nil)
		r.putFlow(t, inside, protocol, endpoints{insideHost, world, 5000, 53}, endpoints{gatewayOut, world, 40000, 53}, r.out, nil)
	}
	r.putFlow(t, outside, pktbuild.ICMPProtocol, endpoints{world, gatewayOut, 0, 40000}, endpoints{world, insideHost, 0, 5000}, r.in, nil)
	r.putFlow(t, inside, pktbuild.ICMPProtocol, endpoints{insideHost, world, 5000, 0}, endpoints{gatewayOut, world, 40000, 0}, r.out, nil)
	r.putFlow(t, inside, pktbuild.ICMPProtocol, endpoints{insideHost, world, 0, 5000}, endpoints{gatewayOut, world, 0, 40000}, r.out, nil)
	r.putFlow(t, outside, pktbuild.UDPProtocol, endpoints{world, gatewayOut, 99, 40099}, endpoints{world, insideHost, 99, 5099}, r.in,
		func(f *abiNatFlow) { f.State |= uint32(abiNatFlowStateNAT_FLOW_DEAD) })

	tests := []struct {
		name    string
		side    abiNatSide
		from    netip.Addr // who sends the error
		kind    uint8
		code    uint8
		rest    uint32
		payload func(src, dst uint16) pktbuild.Payload // of the packet inside, by its ports
		port    uint16                                 // the receiver's outside; 0: 53
		options int                                    // of the packet inside
		quoted  int                                    // bytes of it, 0: all
		extra   string                                 // after it
		spoil   func([]byte)                           // the frame
		reason  abiNatReason
	}{
		{name: "TTL exceeded at a router", side: outside, from: router, kind: 11, payload: udp, reason: back},
		{name: "port unreachable at the receiver", side: outside, from: world, kind: 3, code: 3, payload: udp, reason: back},
		{name: "fragmentation needed, MTU 1280", side: outside, from: router, kind: 3, code: 4, rest: 1280, payload: udp, reason: back},
		{name: "parameter problem", side: outside, from: router, kind: 12, rest: 20 << 24, payload: udp, reason: back},
		{name: "8 bytes of UDP", side: outside, from: router, kind: 11, payload: udp, quoted: 28, reason: back},
		{name: "UDP without checksum", side: outside, from: router, kind: 11, payload: bare, reason: back},
		{name: "UDP-Lite", side: outside, from: router, kind: 11, payload: lite, reason: back},
		{name: "TCP, whole", side: outside, from: router, kind: 11, payload: tcp, reason: back},
		{name: "8 bytes of TCP", side: outside, from: router, kind: 11, payload: tcp, quoted: 28, reason: back},
		{name: "TCP to its checksum", side: outside, from: router, kind: 11, payload: tcp, quoted: 38, reason: back},
		{name: "echo request", side: outside, from: router, kind: 11, payload: request, reason: back},
		{name: "IPv4 options inside", side: outside, from: router, kind: 11, payload: udp, options: 40, reason: back},
		{name: "options inside, 8 bytes", side: outside, from: router, kind: 11, payload: udp, options: 8, quoted: 36, reason: back},
		{name: "extensions", side: outside, from: router, kind: 11, rest: 32 << 16, payload: udp, extra: "\x20\x00\x00\x00anything", reason: back},
		{name: "odd length", side: outside, from: router, kind: 11, payload: udp, extra: "x", reason: back},
		{name: "long", side: outside, from: router, kind: 11, payload: udp, extra: string(make([]byte, 1300)), reason: back},
		{name: "from inside, the receiver", side: inside, from: insideHost, kind: 3, code: 3, payload: udp, reason: sent},
		{name: "from inside, a router", side: inside, from: insideRouter, kind: 11, payload: udp, reason: sent},
		{name: "from inside, TCP", side: inside, from: insideHost, kind: 3, code: 13, payload: tcp, reason: sent},
		{name: "from inside, echo reply", side: inside, from: insideHost, kind: 3, code: 3, payload: reply, reason: sent},
		{name: "from inside, about an echo request", side: inside, from: insideHost, kind: 3, code: 3, payload: request, reason: sent},
		{name: "7 bytes of UDP", side: outside, from: router, kind: 11, payload: udp, quoted: 27, reason: abiNatReasonNAT_DROP_MALFORMED},
		{name: "header cut", side: outside, from: router, kind: 11, payload: udp, quoted: 19, reason: abiNatReasonNAT_DROP_MALFORMED},
		{name: "wrong checksum", side: outside, from: router, kind: 11, payload: udp, spoil: func(b []byte) { b[36] ^= 1 }, reason: bad},
		{name: "wrong checksum of the header inside", side: outside, from: router, kind: 11, payload: udp,
			spoil: func(b []byte) { b[14+20+8+8] ^= 1; b[14+20+2] ^= 1 }, reason: bad},
		{name: "not to the sender of what it is about", side: outside, from: router, kind: 11, payload: udp,
			spoil: func(b []byte) { b[33] ^= 3 }, reason: unknown},
		{name: "about a session that is dead", side: outside, from: router, kind: 11, payload: udp, port: 99, reason: unknown},
		{name: "about nothing of ours", side: outside, from: router, kind: 11, payload: udp, port: 54, reason: abiNatReasonNAT_PASS_NO_RULE},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			options := bytes.Repeat([]byte{1}, test.options)
			port := test.port
			if port == 0 {
				port = 53
			}
			var before, after pktbuild.IPv4 // the packet inside
			var in, out pktbuild.Frame
			if test.side == outside {
				own := uint16(40000)
				if port == 99 {
					own = 40099
				}
				before = pktbuild.IPv4{Src: gatewayOut, Dst: world, TTL: 1, ID: 9, Options: options, Payload: test.payload(own, port)}
				after = pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 1, ID: 9, Options: options, Payload: test.payload(5000, port)}
				in = r.out.arriving(pktbuild.IPv4{Src: test.from, Dst: gatewayOut, TTL: 60, TOS: 0xc0})
				out = r.in.leaving(pktbuild.IPv4{Src: test.from, Dst: insideHost, TTL: 59, TOS: 0xc0})
			} else {
				before = pktbuild.IPv4{Src: world, Dst: insideHost, TTL: 1, ID: 9, Options: options, Payload: test.payload(port, 5000)}
				after = pktbuild.IPv4{Src: world, Dst: gatewayOut, TTL: 1, ID: 9, Options: options, Payload: test.payload(port, 40000)}
				if test.name == "from inside, about an echo request" {
					before.Payload, after.Payload = pktbuild.Echo(8, 5000, 1, []byte("ping")), pktbuild.Echo(8, 40000, 1, []byte("ping"))
				}
				in = r.in.arriving(pktbuild.IPv4{Src: test.from, Dst: world, TTL: 60})
				out = r.out.leaving(pktbuild.IPv4{Src: gatewayOut, Dst: world, TTL: 59})
			}
			in.IP.Payload = icmpError(test.kind, test.code, test.rest, before, test.quoted, []byte(test.extra))
			out.IP.Payload = icmpError(test.kind, test.code, test.rest, after, test.quoted, []byte(test.extra))
			frame := in.Bytes()
			if test.spoil != nil {
				test.spoil(frame)
			}
			also := map[abiNatReason]uint64{}
			if test.reason == sent || test.reason == back {
				also[abiNatReasonNAT_ICMP_TRANSLATED] = 1
			}
			xdpReason := abiNatReasonNAT_PASS_TO_TC
			r.expectBytes(t, hooks[0], test.side, r.sidePort(test.side), frame, 0, xdpReason, nil, nil)
			flows := flowsOf(t, r.maps)
			r.expectBytes(t, hooks[1], test.side, r.sidePort(test.side), frame, 0, test.reason, out.Bytes(), also)
			if now := flowsOf(t, r.maps); !maps.Equal(now, flows) {
				t.Error("the error has changed a session: RFC 5508 REQ-6")
			}
		})
	}
}

// Errors between two internal hosts that know each other by external endpoints (RFC 5508
// REQ-7), and errors that an internal host invents to get its address out.
func TestICMPInside(t *testing.T) {
	g := aGateway(t)
	g.hook = hooks[1]
	enter := func(from, to netip.Addr, about pktbuild.IPv4) (abiNatReason, []byte) {
		t.Helper()
		frame := g.in.arriving(pktbuild.IPv4{Src: from, Dst: to, TTL: 64, Payload: icmpError(3, 3, 0, about, 0, nil)}).Bytes()
		_, got, reason := g.enter(t, g.hook, abiNatSideNAT_INSIDE, g.in, frame)
		return reason, got
	}
	host, server := netip.MustParseAddr("192.168.1.3"), insideHost
	const forward = abiNatReasonNAT_TRANSLATED_OUT
	open := ends("192.168.1.3:5000", "203.0.113.1:7042")
	if reason, out := g.send(t, abiNatSideNAT_INSIDE, "udp", 0, open); reason != forward || out != ends("203.0.113.1:5000", "192.168.1.2:9042") {
		t.Fatalf("hairpin: %v %v", reason, out)
	}
	about := packet("udp", 0, ends("203.0.113.1:5000", "192.168.1.2:9042"))
	reason, got := enter(server, gatewayOut, about)
	want := g.in.leaving(pktbuild.IPv4{Src: gatewayOut, Dst: host, TTL: 63, Payload: icmpError(3, 3, 0, packet("udp", 0, open), 0, nil)}).Bytes()
	copy(got, want[:12]) // the kernel writes the MACs of new neighbours
	if reason != forward || !bytes.Equal(got, want) {
		t.Errorf("an error about a hairpinned packet: %v\n%s", reason, differ(got, want))
	}

	for _, test := range []struct {
		name   string
		inner  endpoints // as it would have come
		reason abiNatReason
	}{
		{"about a host that lives elsewhere", ends("198.51.100.9:53", "10.77.7.7:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"about the receiver itself", ends("198.51.100.9:53", "198.51.100.9:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"about itself, which no session knows", ends("198.51.100.9:53", "192.168.1.2:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"about a neighbour without NAT", ends("198.51.100.9:53", "192.168.99.2:1"), abiNatReasonNAT_PASS_NO_RULE},
	} {
		if reason, _ := enter(server, world, packet("udp", 0, test.inner)); reason != test.reason {
			t.Errorf("%s: %v, want %v", test.name, reason, test.reason)
		}
	}
}

// ICMP that is neither query nor error is dropped where a rule would translate it, in any
// fragment and though a session has its key: what it quotes would leave as it is (RFC 5508
// REQ-11). What no rule wants passes.
func TestICMPOther(t *testing.T) {
	const moreFragments = 0x2000
	g := aGateway(t)
	g.hook = hooks[1]
	inside, outside := abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE
	g.enters(t, inside, pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: pktbuild.Echo(8, 0, 1, nil)})
	if n := g.counted(t)[abiNatReasonNAT_TRANSLATED_OUT]; n != 1 {
		t.Fatalf("the session with identifier 0: %d packets", n)
	}
	drop := abiNatReasonNAT_DROP_UNSUPPORTED
	for _, test := range []struct {
		name     string
		side     abiNatSide
		src, dst string
		reason   abiNatReason
	}{
		{"behind masquerade", inside, insideHost.String(), world.String(), drop},
		{"a host with an address of its own", inside, "192.168.5.2", world.String(), drop},
		{"of a prefix", inside, "192.168.6.2", world.String(), drop},
		{"of a prefix without sessions", inside, "192.168.7.2", world.String(), drop},
		{"to a prefix", outside, world.String(), "198.18.6.2", drop},
		{"to a prefix without sessions", outside, world.String(), "198.18.7.2", drop},
		{"to the gateway", outside, world.String(), gatewayOut.String(), abiNatReasonNAT_PASS_LOCAL},
		{"to the gateway, from inside", inside, insideHost.String(), gatewayIn.String(), abiNatReasonNAT_PASS_LOCAL},
		{"to nobody's", outside, world.String(), "203.0.113.99", abiNatReasonNAT_PASS_NO_RULE},
	} {
		for _, kind := range []uint8{4, 5, 9, 30, 31, 40, 255} {
			for _, fragment := range []uint16{0, moreFragments} {
				ip := pktbuild.IPv4{Src: netip.MustParseAddr(test.src), Dst: netip.MustParseAddr(test.dst), TTL: 64, Fragment: fragment}
				about := packet("udp", 0, endpoints{ip.Dst, ip.Src, 53, 5000})
				ip.Payload = icmpError(kind, 0, 0, about, 28, nil)
				frame := g.sidePort(test.side).arriving(ip).Bytes()
				if _, _, reason := g.enter(t, g.hook, test.side, g.sidePort(test.side), frame); reason != test.reason {
					t.Errorf("%s, type %d, fragment %#x: %v, want %v", test.name, kind, fragment, reason, test.reason)
				}
			}
		}
	}
}

// The engine's own errors: what the stack could not answer rightly, in the name of the
// address that was addressed, not more than so many a second.
func TestICMPSent(t *testing.T) {
	r := aRig(t)
	var config abiNatConfig
	if err := r.maps["config"].Lookup(uint32(0), &config); err != nil {
		t.Fatal(err)
	}
	r.flags = 0 // what cuts the packet gives up the device's sum, and the kernel would compare it all the same
	config.IcmpPerSecond = 1000
	if err := r.maps["config"].Put(uint32(0), &config); err != nil {
		t.Fatal(err)
	}
	r.putFlow(t, abiNatSideNAT_OUTSIDE, pktbuild.UDPProtocol, endpoints{world, gatewayOut, 53, 40000}, endpoints{world, insideHost, 53, 5000}, r.in,
		func(f *abiNatFlow) { f.Mtu = 1300 })
	answer := func(payload pktbuild.ICMP) pktbuild.Frame {
		return pktbuild.Frame{To: r.out.neighbor, From: r.out.mac, IP: pktbuild.IPv4{Src: gatewayOut, Dst: world, TTL: 64, TOS: 0xd0, Payload: payload}}
	}
	long := pktbuild.IPv4{Src: world, Dst: gatewayOut, TTL: 9, TOS: 0x31, Fragment: pktbuild.DF, Payload: pktbuild.UDP{Src: 53, Dst: 40000, Data: make([]byte, 1300)}}
	short := pktbuild.IPv4{Src: world, Dst: gatewayOut, TTL: 1, TOS: 0x10, Payload: pktbuild.UDP{Src: 53, Dst: 40000, Data: []byte("odd")}}
	tests := []struct {
		name   string
		in     pktbuild.IPv4
		reason abiNatReason
		out    pktbuild.ICMP
	}{
		{"TTL exceeded", short, abiNatReasonNAT_DROP_TTL, icmpError(11, 0, 0, short, 0, nil)},
		{"too big", long, abiNatReasonNAT_DROP_TOO_BIG, icmpError(3, 4, 1300, long, 548, nil)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			in, out := r.out.arriving(test.in).Bytes(), answer(test.out).Bytes()
			r.expectBytes(t, hooks[0], abiNatSideNAT_OUTSIDE, r.out, in, 0, abiNatReasonNAT_PASS_TO_TC, nil, nil)
			verdict, got, err := r.run(t, hooks[1], abiNatSideNAT_OUTSIDE, r.out, in, 0)
			if err != nil {
				t.Fatal(err)
			}
			if verdict != tcRedirect || !bytes.Equal(got, out) {
				t.Errorf("verdict %d, and the frame is not as it should be:\n%s", verdict, differ(got, out))
			}
			want := map[abiNatReason]uint64{test.reason: 1, abiNatReasonNAT_ICMP_SENT: 1}
			if counted := r.counted(t); !maps.Equal(counted, want) {
				t.Errorf("counted %v, want %v", counted, want)
			}
		})
	}

	t.Run("not too often", func(t *testing.T) {
		config.IcmpPerSecond = 0
		if err := r.maps["config"].Put(uint32(0), &config); err != nil {
			t.Fatal(err)
		}
		frame := r.out.arriving(short)
		for _, h := range hooks {
			r.expect(t, h, abiNatSideNAT_OUTSIDE, r.out, frame, 0, end{abiNatReasonNAT_DROP_TTL, nil}, nil)
		}
	})
}

// MSS is lowered to what fits the links of both sides.
func TestMSS(t *testing.T) {
	r := aRig(t)
	clamp := func(f *abiNatFlow) {
		f.State |= uint32(abiNatFlowStateNAT_FLOW_CLAMP)
		f.Mtu = outsideMTU
	}
	from, to := endpoints{insideHost, world, 5000, 80}, endpoints{gatewayOut, world, 40000, 80}
	const most = outsideMTU - 40
	tests := []struct {
		name     string
		options  []byte
		want     []byte
		flags    uint8
		from, to abiNatSide
		clamped  uint64
	}{
		{"lowered", pktbuild.MSS(1460, false), pktbuild.MSS(most, false), pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 1},
		{"lowered at an odd offset", pktbuild.MSS(1460, true), pktbuild.MSS(most, true), pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 1},
		{"behind others", append([]byte{4, 2, 3, 3, 7, 1}, append(pktbuild.MSS(9000, false), 1, 0)...), append([]byte{4, 2, 3, 3, 7, 1}, append(pktbuild.MSS(most, false), 1, 0)...),
			pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 1},
		{"low enough", pktbuild.MSS(most, false), pktbuild.MSS(most, false), pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 0},
		{"none", []byte{1, 1, 1, 1}, []byte{1, 1, 1, 1}, pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 0},
		{"after the end of options", append([]byte{1, 1, 0, 0}, pktbuild.MSS(1460, false)...), append([]byte{1, 1, 0, 0}, pktbuild.MSS(1460, false)...),
			pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 0},
		{"an option of no length", []byte{9, 0, 2, 4, 5, 0xb4, 1, 1}, []byte{9, 0, 2, 4, 5, 0xb4, 1, 1}, pktbuild.SYN, abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			packet := pktbuild.IPv4{Src: from.src, Dst: from.dst, TTL: 64, Payload: pktbuild.TCP{Src: 5000, Dst: 80, Flags: test.flags, Options: test.options}}
			out := pktbuild.IPv4{Src: to.src, Dst: to.dst, TTL: 63, Payload: pktbuild.TCP{Src: 40000, Dst: 80, Flags: test.flags, Options: test.want}}
			also := map[abiNatReason]uint64{}
			if test.clamped > 0 {
				also[abiNatReasonNAT_MSS_CLAMPED] = test.clamped
			}
			for _, h := range hooks {
				r.putSession(t, pktbuild.TCPProtocol, from, to, clamp)
				want := r.out.leaving(out)
				r.expect(t, h, abiNatSideNAT_INSIDE, r.in, r.in.arriving(packet), 0, end{abiNatReasonNAT_TRANSLATED_OUT, &want}, also)
			}
		})
	}

	t.Run("towards inside, the outside link counts", func(t *testing.T) {
		packet := pktbuild.IPv4{Src: world, Dst: gatewayOut, TTL: 64, Payload: pktbuild.TCP{Src: 80, Dst: 40000, Flags: pktbuild.SYN | pktbuild.ACK, Options: pktbuild.MSS(1460, false)}}
		out := pktbuild.IPv4{Src: world, Dst: insideHost, TTL: 63, Payload: pktbuild.TCP{Src: 80, Dst: 5000, Flags: pktbuild.SYN | pktbuild.ACK, Options: pktbuild.MSS(most, false)}}
		for _, h := range hooks {
			r.putSession(t, pktbuild.TCPProtocol, from, to, func(f *abiNatFlow) { f.State |= uint32(abiNatFlowStateNAT_FLOW_CLAMP) })
			want := r.in.leaving(out)
			r.expect(t, h, abiNatSideNAT_OUTSIDE, r.out, r.out.arriving(packet), 0, end{abiNatReasonNAT_TRANSLATED_IN, &want}, map[abiNatReason]uint64{abiNatReasonNAT_MSS_CLAMPED: 1})
		}
	})
}

// An error about a connection of the gateway's own is the stack's, also if an internal host's query
// has the connection's port as identifier.
func TestICMPAboutOwn(t *testing.T) {
	g := aGateway(t)
	g.want(t, inside, "ping", 0, ends("192.168.1.2:5000", "198.51.100.9:0"), sent, ends("203.0.113.1:5000", "198.51.100.9:0"))
	about := pktbuild.IPv4{Src: gatewayOut, Dst: world, TTL: 60, Payload: pktbuild.TCP{Src: 5000, Dst: 443, Flags: pktbuild.ACK, Data: make([]byte, 8)}}
	frame := g.out.arriving(pktbuild.IPv4{Src: router, Dst: gatewayOut, TTL: 60, Payload: icmpError(3, 4, 1280, about, 0, nil)}).Bytes()
	if verdict, _, reason := g.enter(t, hooks[1], outer, g.out, frame); verdict != tcNext || reason != abiNatReasonNAT_PASS_LOCAL {
		t.Errorf("verdict %d, %v", int32(verdict), reason)
	}
}

// An error from inside about the reply to a query with identifier 0.
func TestICMPIdentifierZero(t *testing.T) {
	g := aGateway(t)
	_, out := g.send(t, inside, "ping", 0, ends("192.168.2.2:0", "198.51.100.9:0"))
	if out.sport == 0 {
		t.Fatalf("the query left with %v", out)
	}
	host := ends("192.168.2.2:0", "198.51.100.9:0").src
	inner := func(to endpoints) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: world, Dst: to.src, TTL: 1, Payload: pktbuild.Echo(0, to.sport, 1, []byte("data"))}
	}
	frame := g.in.arriving(pktbuild.IPv4{Src: host, Dst: world, TTL: 60, Payload: icmpError(3, 13, 0, inner(endpoints{src: host}), 0, nil)}).Bytes()
	_, got, reason := g.enter(t, hooks[1], inside, g.in, frame)
	want := g.out.leaving(pktbuild.IPv4{Src: out.src, Dst: world, TTL: 59, Payload: icmpError(3, 13, 0, inner(out), 0, nil)}).Bytes()
	if reason != sent || !bytes.Equal(got[12:], want[12:]) {
		t.Errorf("%v\n%s", reason, differ(got[12:], want[12:]))
	}
}
