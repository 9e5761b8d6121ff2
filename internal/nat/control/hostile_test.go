// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// Whatever is not from the gateway's own address may not leave: everything is masqueraded.
const hostileRules = `
inside: [in]
outside: [out]
limits: {sessions: 6000, mappings: 6000, sources: 256}
rules:
  - masquerade: any
  - dnat: tcp 203.0.113.1:8080
    to: 10.0.0.2:80
`

var (
	victimInside  = netip.MustParseAddrPort("10.0.0.2:7000")
	victimOutside = netip.AddrPortFrom(crossingOut, 7000)
	victimPeer    = netip.MustParseAddrPort("198.51.100.9:9")
)

// siege is a gateway under attack, with the numbered datagrams of one client that has
// nothing to do with it.
type siege struct {
	*crossing
	out, back uint32 // numbers that came through
	sent      uint32
	within    bool // the attacker is inside
}

// attack puts frames on a wire and lets a pair of the client's datagrams through in between.
func (s *siege) attack(name string, frames ...[]byte) {
	s.t.Helper()
	from := s.crossing.out
	if s.within {
		from = s.in
	}
	for i, frame := range frames {
		from.put(s.t, frame)
		switch {
		case i%512 == 511:
			s.numbered(name)
		case i%64 == 63:
			s.drain(name)
		}
	}
	s.numbered(name)
}

// numbered sends a datagram of the client and one back, and waits for both. Some bear a
// priority tag, which is no VLAN.
func (s *siege) numbered(name string) {
	s.t.Helper()
	s.sent++
	number := binary.BigEndian.AppendUint32([]byte("numbered"), s.sent)
	send := func(w *wire, src, dst netip.AddrPort) {
		frame := pktbuild.Frame{To: w.gateway, From: w.mac, IP: pktbuild.IPv4{
			Src: src.Addr(), Dst: dst.Addr(), TTL: 64, Payload: pktbuild.UDP{Src: src.Port(), Dst: dst.Port(), Data: number},
		}}
		if s.sent%3 == 0 {
			frame.VLANs = []uint16{0}
		}
		w.put(s.t, frame.Bytes())
	}
	send(s.in, victimInside, victimPeer)
	ktest.Wait(s.t, 20*time.Second, fmt.Sprintf("%s: datagram %d out", name, s.sent), func() bool { s.drain(name); return s.out == s.sent })
	send(s.crossing.out, victimPeer, victimOutside)
	ktest.Wait(s.t, 20*time.Second, fmt.Sprintf("%s: datagram %d back", name, s.sent), func() bool { s.drain(name); return s.back == s.sent })
}

// drain looks at everything that the gateway has sent.
func (s *siege) drain(name string) {
	s.t.Helper()
	for ip := s.crossing.out.take(s.t); ip != nil; ip = s.crossing.out.take(s.t) {
		// What an attacker outside sends to others outside is routed back to them; and the
		// gateway's own stack answers whoever pretends to be elsewhere (rp_filter is for that).
		src := netip.AddrFrom4([4]byte(ip[12:16]))
		if s.within && src != crossingOut && src != crossingIn {
			s.t.Fatalf("%s: a packet of %s leaves: %x", name, src, ip)
		}
		s.count(name, &s.out, ip, pktEnds{victimOutside, victimPeer})
	}
	for ip := s.in.take(s.t); ip != nil; ip = s.in.take(s.t) {
		if s.count(name, &s.back, ip, pktEnds{victimPeer, victimInside}) || s.within {
			continue
		}
		src, dst := netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
		l4 := ip[min(int(ip[0]&15)*4, len(ip)):]
		forwarded := ip[9] == pktbuild.TCPProtocol && dst == victimInside.Addr() && len(l4) >= 20 && binary.BigEndian.Uint16(l4[2:]) == 80
		told := ip[9] == pktbuild.ICMPProtocol && dst == victimInside.Addr() && (l4[0] == 3 || l4[0] == 11 || l4[0] == 12)
		own := src == crossingIn || src == crossingOut // the gateway's own errors, to who pretends to be inside
		if !own && !forwarded && !told {
			s.t.Fatalf("%s: a packet comes in that nobody asked for: %x", name, ip)
		}
	}
}

// count takes a number of the client's; each must follow the one before.
func (s *siege) count(name string, last *uint32, ip []byte, e pktEnds) bool {
	s.t.Helper()
	if len(ip) != 40 || ip[9] != pktbuild.UDPProtocol || endsOf(ip) != e || !bytes.Equal(ip[28:36], []byte("numbered")) {
		return false
	}
	if n := binary.BigEndian.Uint32(ip[36:]); n != *last+1 {
		s.t.Fatalf("%s: datagram %d comes after %d", name, n, *last)
	}
	if err := checkSums(ip); err != nil {
		s.t.Fatalf("%s: %v", name, err)
	}
	*last++
	return true
}

// hostile are packets that an attacker begins with.
func hostile(src, dst netip.Addr, dport uint16) []pktbuild.IPv4 {
	udp := pktbuild.UDP{Src: 5000, Dst: dport, Data: []byte("12345678")}
	about := pktbuild.IPv4{Src: dst, Dst: src, TTL: 1, Payload: pktbuild.UDP{Src: dport, Dst: 5000, Data: []byte("1234")}}
	var all []pktbuild.IPv4
	for _, ip := range []pktbuild.IPv4{
		{Payload: udp},
		{Payload: pktbuild.UDP{Lite: true, Src: 5000, Dst: dport, Data: []byte("12345678")}},
		{Payload: udp, Options: []byte{0x83, 7, 4, 192, 0, 2, 1, 0}}, // loose source route
		{Payload: pktbuild.TCP{Src: 5000, Dst: dport, Flags: pktbuild.SYN, Options: pktbuild.MSS(1460, true)}},
		{Payload: pktbuild.TCP{Src: 5000, Dst: dport, Flags: pktbuild.ACK, Data: []byte("1234")}},
		{Payload: pktbuild.Echo(8, 5000, 1, []byte("1234"))},
		{Payload: pktbuild.Echo(0, 7000, 1, []byte("1234"))},
		{Payload: pktbuild.ICMP{Type: 3, Code: 3, Data: about.Bytes()}},
		{Payload: pktbuild.ICMP{Type: 5, Code: 1, Rest: 0xc0000201, Data: about.Bytes()}},
		{Protocol: 47, Payload: pktbuild.Bytes("0000123456")},
		{Fragment: pktbuild.MF, ID: 7, Payload: udp},
		{Fragment: 8, ID: 7, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes("12345678")},
	} {
		ip.Src, ip.Dst, ip.TTL = src, dst, 64
		all = append(all, ip)
	}
	return all
}

// resum puts the right checksum into a frame's IPv4 header.
func resum(frame []byte) []byte {
	end := 14 + int(frame[14]&15)*4
	if end < 34 || end > len(frame) {
		return frame
	}
	frame[24], frame[25] = 0, 0
	binary.BigEndian.PutUint16(frame[24:], ^uint16(sumOf(0, frame[14:end])))
	return frame
}

// broken are all frames cut at every byte, and with every byte of their headers changed.
func broken(w *wire, packets []pktbuild.IPv4) (frames [][]byte) {
	for _, ip := range packets {
		whole := w.frame(ip)
		for n := 15; n < len(whole); n++ {
			frames = append(frames, whole[:n])
		}
		for at := 12; at < min(len(whole), 14+20+8+20+20); at++ {
			for _, bits := range []byte{0x01, 0x80, 0xff} {
				frame := bytes.Clone(whole)
				frame[at] ^= bits
				frames = append(frames, frame, resum(bytes.Clone(frame)))
			}
		}
		for version := range 16 {
			frame := bytes.Clone(whole)
			frame[14] = 0x40 | byte(version)
			frames = append(frames, resum(frame))
		}
	}
	return frames
}

// addressed are packets between addresses that have no business here.
func addressed(w *wire, sources, destinations []string) (frames [][]byte) {
	for _, src := range sources {
		for _, dst := range destinations {
			for _, ip := range hostile(netip.MustParseAddr(src), netip.MustParseAddr(dst), 8080) {
				frames = append(frames, w.frame(ip))
			}
		}
	}
	return frames
}

// An attacker outside, then one inside, sends everything that is wrong, and much of it.
// Nothing with an inside source leaves, nothing comes in that no rule and no session lets
// in, no mapping is made from outside, and the client's datagrams go on without a gap.
func TestHostile(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, attach := range []Attach{AttachTC, AttachXDP} {
		t.Run(string(attach), func(t *testing.T) { testHostile(t, attach) })
	}
}

func testHostile(t *testing.T, attach Attach) {
	s := &siege{crossing: newCrossing(t, EngineEBPF, attach, hostileRules)}
	random := rand.New(rand.NewPCG(1, 5))
	stranger, attacker := netip.MustParseAddr("192.0.2.66"), netip.MustParseAddr("10.0.0.66")
	outside, within := s.crossing.out, s.in
	s.numbered("peace")
	addrs := []string{"10.0.0.66", "10.0.0.2", "10.0.255.1", "203.0.113.1", "203.0.113.77", "192.0.2.66", "240.1.2.3", "224.0.0.5", "255.255.255.255", "203.0.113.255",
		"0.0.0.0", "0.1.2.3", "127.0.0.1", "169.254.1.1"}

	for _, port := range []uint16{7000, 8080, 9} {
		s.attack("broken frames from outside", broken(outside, hostile(stranger, crossingOut, port))...)
	}
	s.attack("addresses from outside", addressed(outside, addrs, addrs[2:])...) // inside ones are routed, as without NAT
	var frames [][]byte
	for kind := range 45 { // about the client's own datagrams, from anywhere
		for code := range 17 {
			about := pktbuild.IPv4{Src: crossingOut, Dst: victimPeer.Addr(), TTL: 1, Payload: pktbuild.UDP{Src: 7000, Dst: 9, Data: []byte("12345678")}}
			frames = append(frames, outside.frame(pktbuild.IPv4{Src: stranger, Dst: crossingOut, TTL: 64, Payload: pktbuild.ICMP{Type: uint8(kind), Code: uint8(code), Rest: 68, Data: about.Bytes()}}))
		}
	}
	s.attack("ICMP about the session", frames...)
	flood := func(w *wire, n int, packet func(src netip.Addr) pktbuild.IPv4) (frames [][]byte) {
		for range n {
			src := netip.AddrFrom4([4]byte{byte(100 + random.IntN(20)), byte(random.Uint32()), byte(random.Uint32()), byte(random.Uint32())})
			frames = append(frames, w.frame(packet(src)))
		}
		return frames
	}
	fragments := func(src netip.Addr, dst netip.Addr) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: src, Dst: dst, TTL: 64, ID: uint16(random.Uint32()), Fragment: uint16(random.IntN(100)) | pktbuild.MF,
			Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes("\x13\x88\x1b\x58\x05\x00\x00\x0012345678")}
	}
	s.attack("fragments from outside", flood(outside, 3000, func(src netip.Addr) pktbuild.IPv4 { return fragments(src, crossingOut) })...)
	frames = nil
	for port := 1; port < 65536; port += 23 {
		for _, ip := range hostile(stranger, crossingOut, uint16(port))[:4] {
			frames = append(frames, outside.frame(ip))
		}
	}
	s.attack("port scan", frames...)
	s.opened(func(session *rulefile.Session) bool {
		return session.Source.AddrPort == victimInside || session.Protocol == rulefile.TCP && session.Destination.AddrPort == netip.AddrPortFrom(crossingOut, 8080)
	}, func(mapping *rulefile.Mapping) bool { return mapping.Inside.AddrPort == victimInside })

	s.within = true
	s.attack("broken frames from inside", broken(within, hostile(attacker, stranger, 80))...)
	s.attack("addresses from inside", addressed(within, addrs, addrs)...)
	s.attack("fragments from inside", flood(within, 3000, func(netip.Addr) pktbuild.IPv4 { return fragments(attacker, stranger) })...)
	s.attack("spoofed sources from inside", flood(within, 2000, func(src netip.Addr) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: src, Dst: stranger, TTL: 64, Payload: pktbuild.UDP{Src: 5000, Dst: 53}}
	})...)

	s.within = false
	s.attack("SYN flood", flood(outside, 8000, func(src netip.Addr) pktbuild.IPv4 {
		return pktbuild.IPv4{Src: src, Dst: crossingOut, TTL: 64, Payload: pktbuild.TCP{Src: uint16(random.Uint32()), Dst: 8080, Flags: pktbuild.SYN}}
	})...)
	s.numbered("a full table")
	s.opened(func(*rulefile.Session) bool { return true }, func(mapping *rulefile.Mapping) bool {
		return netip.MustParsePrefix("10.0.0.0/16").Contains(mapping.Inside.Addr())
	})
}

// opened checks what sessions and mappings there are.
func (s *siege) opened(session func(*rulefile.Session) bool, mapping func(*rulefile.Mapping) bool) {
	s.t.Helper()
	e, err := Open(s.gateway)
	if err != nil {
		s.t.Fatal(err)
	}
	defer e.Close()
	sessions, mappings := 0, 0
	err = e.Sessions(func(v *rulefile.Session) bool {
		sessions++
		if !session(v) {
			s.t.Errorf("session %+v", *v)
		}
		return !s.t.Failed()
	})
	if err != nil {
		s.t.Fatal(err)
	}
	err = e.Mappings(func(v *rulefile.Mapping) bool {
		mappings++
		if !mapping(v) {
			s.t.Errorf("mapping %+v", *v)
		}
		return !s.t.Failed()
	})
	if err != nil {
		s.t.Fatal(err)
	}
	stats, err := e.Stats()
	if err != nil {
		s.t.Fatal(err)
	}
	if full := stats.Reasons["sessions-full"]; (full > 0) != (sessions == 6000) {
		s.t.Errorf("%d packets were refused with %d sessions", full, sessions)
	}
	s.t.Logf("%d sessions, %d mappings, %d datagrams each way; %v", sessions, mappings, s.sent, stats.Reasons)
}
