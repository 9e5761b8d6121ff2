// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// fragmentOf is the part of a UDP datagram with 1016 bytes of data that begins at that
// byte of its payload, at most 512 bytes long.
func fragmentOf(src netip.Addr, port, id, at uint16, ttl uint8) pktbuild.IPv4 {
	payload := pktbuild.IPv4{Src: src, Dst: world, Payload: pktbuild.UDP{Src: port, Dst: 53, Data: make([]byte, 1016)}}.Bytes()[20:]
	p := pktbuild.IPv4{Src: src, Dst: world, TTL: ttl, ID: id, Fragment: at / 8, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes(payload[at:min(int(at)+512, len(payload))])}
	if at < 512 {
		p.Fragment |= pktbuild.MF
	}
	return p
}

// noted is the identification that fragments of a datagram from inside leave with.
func (r *rig) noted(t *testing.T, src netip.Addr, id uint16) uint16 {
	t.Helper()
	key := abiNatFragmentKey{Src: octets(src), Dst: octets(world), Id: bigEndian(id), Protocol: pktbuild.UDPProtocol}
	var note abiNatFragment
	if err := r.maps["fragments"].Lookup(&key, &note); err != nil {
		t.Fatal(err)
	}
	return bigEndian(note.Id)
}

// Fragments of two internal hosts with one external address, one receiver and the same
// identification leave with different ones: all of a datagram with its own, also when its first
// fragment comes twice (RFC 6864 section 5.3.1).
func TestFragmentIdentification(t *testing.T) {
	g := aGateway(t)
	g.flags = 0
	datagrams := map[uint16]map[uint16][]byte{}
	send := func(p pktbuild.IPv4) {
		t.Helper()
		verdict, frame, err := g.run(t, hooks[1], abiNatSideNAT_INSIDE, g.in, g.in.arriving(p).Bytes(), 0)
		if err != nil || verdict != tcRedirect {
			t.Fatalf("verdict %d, error %v, counted %v", int32(verdict), err, g.counted(t))
		}
		if sum := onesSum(frame[14:34]); sum != 0xffff {
			t.Fatalf("the IPv4 checksum is wrong: %#x", sum)
		}
		id := binary.BigEndian.Uint16(frame[18:])
		if datagrams[id] == nil {
			datagrams[id] = map[uint16][]byte{}
		}
		at := binary.BigEndian.Uint16(frame[20:]) & 0x1fff
		if had := datagrams[id][at]; had != nil && !bytes.Equal(had, frame[34:]) {
			t.Fatalf("identification %d has two fragments at %d", id, at*8)
		}
		datagrams[id][at] = bytes.Clone(frame[34:])
	}
	other := netip.MustParseAddr("192.168.1.3")
	const rounds = 40
	for round := range uint16(rounds) {
		hosts := []netip.Addr{insideHost, other}
		for i, src := range hosts {
			if round == 0 { // asks for the neighbour
				g.run(t, hooks[1], abiNatSideNAT_INSIDE, g.in, g.in.arriving(fragmentOf(src, uint16(6000+i), 1, 0, 64)).Bytes(), 0)
			}
			send(fragmentOf(src, uint16(6000+i), 500+round, 0, 64))
		}
		send(fragmentOf(hosts[0], 6000, 500+round, 0, 64))
		for i, src := range hosts {
			send(fragmentOf(src, uint16(6000+i), 500+round, 512, 64))
		}
	}
	if len(datagrams) != 2*rounds {
		t.Errorf("%d datagrams left as %d", 2*rounds, len(datagrams))
	}
	for id, parts := range datagrams {
		if len(parts) != 2 {
			t.Errorf("identification %d has %d fragments", id, len(parts))
		}
	}
}

// onesSum is the sum that is 0xffff over a header with a right checksum.
func onesSum(header []byte) uint32 {
	var sum uint32
	for i := 0; i < len(header); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

// Fragments take the tc path; those without ports go as their first one did.
func TestFragments(t *testing.T) {
	g := aGateway(t)
	const inside = abiNatSideNAT_INSIDE
	enter := func(in pktbuild.IPv4, reason abiNatReason, out pktbuild.IPv4) {
		t.Helper()
		frame, want := g.in.arriving(in), g.out.leaving(out)
		g.expect(t, hooks[0], inside, g.in, frame, 0, end{abiNatReasonNAT_PASS_TO_TC, nil}, nil)
		g.expect(t, hooks[1], inside, g.in, frame, 0, end{reason, &want}, nil)
	}
	part := func(src netip.Addr, id, at uint16, ttl uint8) pktbuild.IPv4 {
		return fragmentOf(src, 5000, id, at, ttl)
	}
	const sent = abiNatReasonNAT_TRANSLATED_OUT

	g.run(t, hooks[1], inside, g.in, g.in.arriving(part(insideHost, 1, 0, 64)).Bytes(), 0) // asks for the neighbour
	g.counted(t)
	g.run(t, hooks[1], inside, g.in, g.in.arriving(part(insideHost, 77, 0, 64)).Bytes(), 0)
	g.counted(t)
	id := g.noted(t, insideHost, 77)
	enter(part(insideHost, 77, 0, 64), sent, part(gatewayOut, id, 0, 63))
	for range 2 { // a repeated one too
		enter(part(insideHost, 77, 512, 64), sent, part(gatewayOut, id, 512, 63))
	}

	stateless, outside := netip.MustParseAddr("192.168.7.3"), netip.MustParseAddr("198.18.7.3")
	enter(part(stateless, 79, 512, 64), sent, part(outside, 79, 512, 63))

	own := part(insideHost, 80, 512, 64)
	own.Dst = gatewayIn
	enter(own, abiNatReasonNAT_PASS_LOCAL, own)

	tiny := g.in.arriving(pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, ID: 81, Fragment: pktbuild.MF, Protocol: pktbuild.TCPProtocol,
		Payload: pktbuild.Bytes(binary.BigEndian.AppendUint64(nil, 0x1388_0035_0000_0001))})
	for _, h := range hooks {
		g.expect(t, h, inside, g.in, tiny, 0, end{abiNatReasonNAT_DROP_MALFORMED, nil}, nil)
	}
}

// Fragments that come before their first one are kept, and follow it.
func TestFragmentsOutOfOrder(t *testing.T) {
	g := aGateway(t)
	g.flags = 0 // the kernel would compare the sum over what was there before
	send := func(side abiNatSide, way port, p pktbuild.IPv4, verdict uint32, counted abiNatReason, also ...abiNatReason) {
		t.Helper()
		got, _, err := g.run(t, hooks[1], side, way, way.arriving(p).Bytes(), 0)
		if err != nil || got != verdict {
			t.Fatalf("verdict %d, error %v, want verdict %d", int32(got), err, int32(verdict))
		}
		want := map[abiNatReason]uint64{counted: 1}
		for _, reason := range also {
			want[reason]++
		}
		if counts := g.counted(t); !maps.Equal(counts, want) {
			t.Fatalf("counted %v, want %v", counts, want)
		}
	}
	const (
		inside, outside = abiNatSideNAT_INSIDE, abiNatSideNAT_OUTSIDE
		held, full      = abiNatReasonNAT_FRAGMENT_HELD, abiNatReasonNAT_DROP_FRAGMENT
		sent, back      = abiNatReasonNAT_TRANSLATED_OUT, abiNatReasonNAT_TRANSLATED_IN
	)
	part := func(src, dst netip.Addr, at uint16, ttl uint8) pktbuild.IPv4 {
		p := pktbuild.IPv4{Src: src, Dst: dst, TTL: ttl, ID: 9, Fragment: at/8 | pktbuild.MF, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes(counting(600))}
		if at == 0 {
			whole := pktbuild.IPv4{Src: src, Dst: dst, Payload: pktbuild.UDP{Src: 5000, Dst: 5000, Length: 3000, Data: counting(592)}}.Bytes()
			p.Payload = pktbuild.Bytes(whole[20:])
		}
		return p
	}
	open := pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: pktbuild.UDP{Src: 5000, Dst: 5000}}
	send(inside, g.in, open, tcRedirect, sent, abiNatReasonNAT_CREATED, abiNatReasonNAT_MAPPED)

	// As many as the largest datagram has at an MTU of 576, and no more: others have their room.
	other := part(insideHost, world, 600, 64)
	other.ID = 10
	send(inside, g.in, other, tcShot, held)
	const most = 128
	for i := range uint16(most) {
		send(inside, g.in, part(insideHost, world, 504*(most-i), 64), tcShot, held)
	}
	for range 3000 {
		send(inside, g.in, part(insideHost, world, 504*(most+1), 64), tcShot, full)
	}
	want := []uint16{0}
	for i := range uint16(most) {
		want = append(want, 504*(most-i))
	}
	for i, frame := range g.captured(t, "out-peer", len(want), func() []byte {
		send(inside, g.in, part(insideHost, world, 0, 64), tcShot, sent)
		return nil
	})[:len(want)] {
		p := part(gatewayOut, world, want[i], 63)
		p.ID = g.noted(t, insideHost, 9)
		if want := g.out.leaving(p).Bytes(); !bytes.Equal(frame, want) {
			t.Fatalf("frame %d is not as it should be:\n%s", i, differ(frame, want))
		}
	}
	first := part(insideHost, world, 0, 64)
	first.ID = other.ID
	if n := len(g.captured(t, "out-peer", 2, func() []byte {
		send(inside, g.in, first, tcShot, sent)
		return nil
	})); n != 3 {
		t.Errorf("%d frames of the other datagram left", n-1)
	}
	send(inside, g.in, part(insideHost, world, 600, 64), tcRedirect, sent) // late, not kept

	// To an address that is the gateway's own it may be the stack's: that gets it too.
	send(outside, g.out, part(world, gatewayOut, 600, 64), tcNext, abiNatReasonNAT_PASS_LOCAL, held)
	first = part(world, gatewayOut, 0, 64)
	frames := g.captured(t, "in-peer", 2, func() []byte {
		send(outside, g.out, first, tcShot, back)
		return nil
	})
	for i, at := range []uint16{0, 600} {
		if want := g.in.leaving(part(world, insideHost, at, 63)).Bytes(); !bytes.Equal(frames[i], want) {
			t.Errorf("frame %d is not as it should be:\n%s", i, differ(frames[i], want))
		}
	}
}

// A packet without DF that is too big for the egress interface is cut (RFC 4787 REQ-13): what
// leaves, put together, is the translated packet.
func TestCut(t *testing.T) {
	g := aGateway(t)
	tests := []struct {
		name     string
		in       func(src netip.Addr) pktbuild.IPv4 // with the TTL of 64
		pieces   int
		fragment uint16 // of the packet itself
	}{
		{"one byte too long", func(src netip.Addr) pktbuild.IPv4 {
			return pktbuild.IPv4{Src: src, Dst: world, ID: 5, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: counting(outsideMTU - 27)}}
		}, 2, 0},
		{"three pieces, odd, with options", func(src netip.Addr) pktbuild.IPv4 {
			return pktbuild.IPv4{Src: src, Dst: world, ID: 6, Options: []byte{1, 1, 1, 1}, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: counting(3333)}}
		}, 3, 0},
		{"TCP", func(src netip.Addr) pktbuild.IPv4 {
			return pktbuild.IPv4{Src: src, Dst: world, ID: 7, Payload: pktbuild.TCP{Src: 5000, Dst: 53, Flags: pktbuild.SYN, Data: counting(1460)}}
		}, 2, 0},
		{"a first fragment", func(src netip.Addr) pktbuild.IPv4 {
			whole := pktbuild.IPv4{Src: src, Dst: world, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: counting(1472)}}.Bytes()[20:]
			return pktbuild.IPv4{Src: src, Dst: world, ID: 8, Fragment: pktbuild.MF, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes(whole)}
		}, 2, pktbuild.MF},
		{"the fragment after it", func(src netip.Addr) pktbuild.IPv4 {
			return pktbuild.IPv4{Src: src, Dst: world, ID: 8, Fragment: 185, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes(counting(1400))}
		}, 2, 185},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			packet := test.in(insideHost)
			packet.TTL = 64
			frame := g.in.arriving(packet).Bytes()
			small := packet // opens the session, and asks for the neighbour
			small.ID, small.Fragment, small.Options, small.Payload = 99, 0, nil, pktbuild.UDP{Src: 5000, Dst: 53}
			if _, tcp := packet.Payload.(pktbuild.TCP); tcp {
				small.Payload = pktbuild.TCP{Src: 5000, Dst: 53, Flags: pktbuild.SYN}
			}
			for range 2 {
				if _, _, err := g.run(t, hooks[1], abiNatSideNAT_INSIDE, g.in, g.in.arriving(small).Bytes(), 0); err != nil {
					t.Fatal(err)
				}
			}
			g.counted(t)
			g.flags = 0 // the kernel would compare the sum over what was cut off
			pieces := g.captured(t, "out-peer", test.pieces-1, func() []byte {
				verdict, last, err := g.run(t, hooks[1], abiNatSideNAT_INSIDE, g.in, frame, 0)
				if err != nil || verdict != tcRedirect {
					t.Fatalf("verdict %d, error %v, counted %v", int32(verdict), err, g.counted(t))
				}
				return last
			})
			want := test.in(gatewayOut)
			want.TTL, want.ID = 63, binary.BigEndian.Uint16(pieces[0][18:]) // one for all pieces
			whole := want.Bytes()
			header := int(whole[0]&15) * 4
			at := 0
			for i, piece := range pieces {
				p := want
				p.Fragment = test.fragment + uint16(at/8)
				size := (outsideMTU - header) / 8 * 8
				if i < test.pieces-1 {
					p.Fragment |= pktbuild.MF
				} else {
					size = len(whole) - header - at
				}
				p.Protocol = whole[9]
				p.Payload = pktbuild.Bytes(whole[header+at : header+at+size])
				if wanted := g.out.leaving(p).Bytes(); !bytes.Equal(piece, wanted) {
					t.Errorf("piece %d is not as it should be:\n%s", i, differ(piece, wanted))
				}
				at += size
			}
		})
	}
}

// counting is data of which every byte shows its place.
func counting(n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i * 7)
	}
	return data
}

// captured returns the n frames that arrive at an interface while send runs, and then
// the one that send returns.
func (r *rig) captured(t *testing.T, device string, n int, send func() []byte) (frames [][]byte) {
	t.Helper()
	var socket int
	r.do(t, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
			return err
		}
		return unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: be(unix.ETH_P_IP), Ifindex: l.Attrs().Index})
	})
	defer unix.Close(socket)
	last := send()
	for range n {
		frame := make([]byte, 65536)
		length, _, err := unix.Recvfrom(socket, frame, 0)
		if err != nil {
			t.Fatalf("%d of %d frames came: %v", len(frames), n, err)
		}
		frames = append(frames, frame[:length])
	}
	return append(frames, last)
}

// What a first fragment has told holds for as long as the time-out, and is removed after
// that, so that its place is another's.
func TestFragmentsExpire(t *testing.T) {
	g := aGateway(t)
	deleteAll[[16]byte, [20]byte](t, g.maps["fragments"])
	for g.maps["fragment_queue"].LookupAndDelete(nil, new([16]byte)) == nil {
	}
	g.flags = 0
	later := func(id uint16) abiNatReason {
		t.Helper()
		_, _, reason := g.enter(t, g.hook, abiNatSideNAT_INSIDE, g.in, g.in.arriving(fragmentOf(insideHost, 5000, id, 512, 64)).Bytes())
		return reason
	}
	for id := range uint16(2) {
		g.enter(t, g.hook, abiNatSideNAT_INSIDE, g.in, g.in.arriving(fragmentOf(insideHost, 5000, 950+id, 0, 64)).Bytes())
	}
	seen := func(seconds int) { // all of them, so long ago
		for key, value := range entries[[16]byte, [20]byte](t, g.maps["fragments"]) {
			binary.NativeEndian.PutUint32(value[8:], now()-ticks(seconds))
			g.put(t, "fragments", &key, &value)
		}
	}
	seen(58) // time-outs are a minute
	if reason := later(950); reason != abiNatReasonNAT_TRANSLATED_OUT {
		t.Errorf("just before the time-out: %v", reason)
	}
	seen(61)
	if reason := later(951); reason != abiNatReasonNAT_FRAGMENT_HELD {
		t.Errorf("after the time-out: %v", reason)
	}
	defer g.startGC(t)()
	seen(118)
	if n := len(entries[[16]byte, [20]byte](t, g.maps["fragments"])); n != 2 {
		t.Errorf("%d datagrams are known, want 2: packets may still look at them", n)
	}
	seen(121)
	ktest.Wait(t, 20*time.Second, "they are forgotten", func() bool {
		return len(entries[[16]byte, [20]byte](t, g.maps["fragments"])) == 0
	})
	if g.maps["fragment_queue"].LookupAndDelete(nil, new([16]byte)) == nil {
		t.Error("the queue still knows them")
	}
}

// Who sends first fragments alone, more than are noted, keeps no other datagram from passing: the oldest give
// way (RFC 4787 REQ-14a, RFC 6888 REQ-5). No fragment is refused, and GC empties the table as it does any.
func TestFragmentFlood(t *testing.T) {
	g := aGateway(t)
	deleteAll[[16]byte, [20]byte](t, g.maps["fragments"])
	for g.maps["fragment_queue"].LookupAndDelete(nil, new([16]byte)) == nil {
	}
	g.flags = 0
	enters := func(port, id, offset uint16) {
		t.Helper()
		_, _, reason := g.enter(t, g.hook, abiNatSideNAT_INSIDE, g.in, g.in.arriving(fragmentOf(insideHost, port, id, offset, 64)).Bytes())
		if reason != abiNatReasonNAT_TRANSLATED_OUT {
			t.Fatalf("fragment at %d of datagram %d: %v", offset, id, reason)
		}
	}
	most := int(abiNatLimitNAT_MAX_FRAGMENTS)
	for id := range uint16(most + 1000) {
		enters(5000, 1+id, 0)
	}
	enters(5001, 40000, 0)
	enters(5001, 40000, 512)
	enters(5000, uint16(most+1000), 512)
	if n := len(entries[[16]byte, [20]byte](t, g.maps["fragments"])); n != most {
		t.Errorf("%d datagrams are known, want %d", n, most)
	}
	for key, value := range entries[[16]byte, [20]byte](t, g.maps["fragments"]) {
		binary.NativeEndian.PutUint32(value[8:], now()-ticks(121))
		g.put(t, "fragments", &key, &value)
	}
	defer g.startGC(t)()
	ktest.Wait(t, 20*time.Second, "they are forgotten", func() bool {
		return len(entries[[16]byte, [20]byte](t, g.maps["fragments"])) == 0
	})
}

// A fragment that comes before its first one is kept for every kind of rule and either way,
// also between internal hosts, though ports are not known yet that would tell which rule.
func TestFragmentsOfEveryRule(t *testing.T) {
	g := aGateway(t)
	type way struct {
		name     string
		side     abiNatSide
		open     endpoints // sent first, as it comes; the source's own rule makes a mapping
		reply    bool      // the datagram is the reply to that
		datagram endpoints
	}
	in := func(host, to string) way {
		return way{name: host + " to " + to, side: outer, datagram: ends("198.51.100.9:53", to)}
	}
	ways := []way{in("forward", "203.0.113.1:7000"), in("range", "203.0.113.1:6005"), in("map", "198.18.6.9:5000")}
	for rule := masqueradeRule; rule <= tinyRule; rule++ {
		e := ends(fmt.Sprintf("192.168.%d.2:4000", rule), "198.51.100.9:53")
		if rule == statelessRule {
			continue // needs no first one
		}
		ways = append(ways, way{name: fmt.Sprintf("rule %d out", rule), side: inside, datagram: e},
			way{name: fmt.Sprintf("rule %d back", rule), side: outer, open: e, reply: true})
	}
	for _, to := range []string{"203.0.113.1:7000", "198.18.6.9:5000"} {
		ways = append(ways, way{name: "hairpin to " + to, side: inside, datagram: ends("192.168.2.7:4000", to)})
	}
	for n, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			g.reset(t)
			g.hook = hooks[1]
			e := w.datagram
			if w.open.src.IsValid() {
				_, out := g.send(t, inside, "udp", 0, w.open)
				e = out.answer()
			}
			g.flags = 0
			from, to := g.sidePort(w.side), "in-peer"
			if w.side == inside && e.dst == world {
				to = "out-peer"
			}
			whole := pktbuild.IPv4{Src: e.src, Dst: e.dst, Payload: pktbuild.UDP{Src: e.sport, Dst: e.dport, Data: counting(1016)}}.Bytes()[20:]
			part := func(at int) []byte {
				p := pktbuild.IPv4{Src: e.src, Dst: e.dst, TTL: 64, ID: uint16(100 + n), Fragment: uint16(at / 8), Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes(whole[at : at+512])}
				if at == 0 {
					p.Fragment |= pktbuild.MF
				}
				return from.arriving(p).Bytes()
			}
			if _, _, err := g.run(t, hooks[1], w.side, from, part(512), 0); err != nil {
				t.Fatal(err)
			}
			if counts := g.counted(t); counts[abiNatReasonNAT_FRAGMENT_HELD] != 1 {
				t.Fatalf("a fragment without its first one: %v", counts)
			}
			frames := g.captured(t, to, 2, func() []byte {
				if _, _, err := g.run(t, hooks[1], w.side, from, part(0), 0); err != nil {
					t.Fatal(err)
				}
				return nil
			})
			for i, at := range []int{0, 512} {
				if got := frames[i]; len(got) != 14+20+512 || binary.BigEndian.Uint16(got[20:])&0x1fff != uint16(at/8) || got[22] != 63 ||
					i > 0 && !bytes.Equal(got[26:34], frames[0][26:34]) || at > 0 && !bytes.Equal(got[34:], whole[at:]) {
					t.Errorf("fragment %d left as %x", i, got)
				}
			}
		})
	}
}

// A datagram whose identification is used again and again keeps its entry, and no other one's.
func TestFragmentsExpireBehindOne(t *testing.T) {
	g := aGateway(t)
	deleteAll[[16]byte, [20]byte](t, g.maps["fragments"])
	for g.maps["fragment_queue"].LookupAndDelete(nil, new([16]byte)) == nil {
	}
	g.flags = 0
	first := func(id uint16) {
		g.enter(t, g.hook, inside, g.in, g.in.arriving(fragmentOf(insideHost, 5000, id, 0, 64)).Bytes())
	}
	for id := range uint16(3) {
		first(960 + id)
	}
	for key, value := range entries[[16]byte, [20]byte](t, g.maps["fragments"]) {
		binary.NativeEndian.PutUint32(value[8:], now()-ticks(121)) // time-outs are a minute
		g.put(t, "fragments", &key, &value)
	}
	first(960)
	defer g.startGC(t)()
	ktest.Wait(t, 20*time.Second, "the others are forgotten", func() bool {
		return len(entries[[16]byte, [20]byte](t, g.maps["fragments"])) == 1
	})
	g.noted(t, insideHost, 960)
	for key, value := range entries[[16]byte, [20]byte](t, g.maps["fragments"]) {
		binary.NativeEndian.PutUint32(value[8:], now()-ticks(121))
		g.put(t, "fragments", &key, &value)
	}
	ktest.Wait(t, 20*time.Second, "it is forgotten too", func() bool {
		return len(entries[[16]byte, [20]byte](t, g.maps["fragments"])) == 0
	})
}
