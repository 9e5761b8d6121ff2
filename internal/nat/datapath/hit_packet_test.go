// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/pktbuild"
)

// end is how a packet ends at a hook: the reason that is counted, and with a
// translation the frame that leaves.
type end struct {
	reason abiNatReason
	frame  *pktbuild.Frame
}

// A packet of an established session, through both hooks: every byte that leaves is
// compared with a frame built from nothing.
func TestHit(t *testing.T) {
	type row struct {
		name     string
		side     abiNatSide
		protocol uint8
		from, to endpoints
		change   func(*abiNatFlow) // of the flow as putFlow makes it
		packet   pktbuild.IPv4     // Src, Dst are set from from
		frame    func(*pktbuild.Frame)
		xdp, tc  abiNatReason         // how it ends
		out      func(*pktbuild.IPv4) // what changes besides addresses and TTL; nil: not translated
	}
	const (
		inside  = abiNatSideNAT_INSIDE
		outside = abiNatSideNAT_OUTSIDE
		sent    = abiNatReasonNAT_TRANSLATED_OUT
		back    = abiNatReasonNAT_TRANSLATED_IN
		toTC    = abiNatReasonNAT_PASS_TO_TC
	)
	udp := func(sport, dport uint16, data string) pktbuild.UDP {
		return pktbuild.UDP{Src: sport, Dst: dport, Data: []byte(data)}
	}
	out := endpoints{insideHost, world, 5000, 53}
	outside1 := endpoints{gatewayOut, world, 40000, 53}
	in := endpoints{world, gatewayOut, 53, 40000}
	inside1 := endpoints{world, insideHost, 53, 5000}
	ports := func(sport, dport uint16) func(*pktbuild.IPv4) {
		return func(ip *pktbuild.IPv4) {
			switch p := ip.Payload.(type) {
			case pktbuild.UDP:
				p.Src, p.Dst = sport, dport
				ip.Payload = p
			case pktbuild.TCP:
				p.Src, p.Dst = sport, dport
				ip.Payload = p
			}
		}
	}
	same := func(*pktbuild.IPv4) {}
	tcp := pktbuild.TCP{Src: 5000, Dst: 53, Seq: 1, Ack: 2, Flags: pktbuild.ACK | pktbuild.PSH, Window: 3, Data: []byte("hello")}
	rows := []row{
		{name: "UDP out", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, ID: 77, TOS: 0x2e, Payload: udp(5000, 53, "hello")}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP out, odd length, DF", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 2, Fragment: pktbuild.DF, Payload: udp(5000, 53, "hell")}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP back", side: outside, protocol: pktbuild.UDPProtocol, from: in, to: inside1,
			packet: pktbuild.IPv4{TTL: 255, Payload: udp(53, 40000, "world")}, xdp: back, tc: back, out: ports(53, 5000)},
		{name: "UDP, port kept", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: endpoints{gatewayOut, world, 5000, 53},
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "hello")}, xdp: sent, tc: sent, out: same},
		{name: "UDP, only the port", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: endpoints{insideHost, world, 5000, 5353},
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "hello")}, xdp: sent, tc: sent, out: ports(5000, 5353)},
		{name: "UDP, source and destination", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: endpoints{poolFirst, router, 1, 2},
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "hello")}, xdp: sent, tc: sent, out: ports(1, 2)},
		{name: "UDP without checksum", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.UDP{Src: 5000, Dst: 53, NoChecksum: true, Data: []byte("x")}}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP whose checksum becomes zero", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, zeroSum(outside1))}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP with IPv4 options", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Options: []byte{7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0}, Payload: udp(5000, 53, "hello")}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP in a padded frame", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "")}, frame: func(f *pktbuild.Frame) { f.Pad = 18 }, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP-Lite, all covered", side: inside, protocol: pktbuild.UDPLiteProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.UDP{Lite: true, Src: 5000, Dst: 53, Data: []byte("hello")}}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "UDP-Lite, header covered", side: inside, protocol: pktbuild.UDPLiteProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.UDP{Lite: true, Length: 8, Src: 5000, Dst: 53, Data: []byte("hello")}}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "TCP", side: inside, protocol: pktbuild.TCPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Fragment: pktbuild.DF, Payload: tcp}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "TCP with both kinds of options", side: inside, protocol: pktbuild.TCPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 64, Options: bytes.Repeat([]byte{1}, 40), Payload: pktbuild.TCP{Src: 5000, Dst: 53, Flags: pktbuild.ACK, Options: bytes.Repeat([]byte{1}, 40), Data: []byte("abc")}},
			xdp:    sent, tc: sent, out: ports(40000, 53)},
		{name: "echo request", side: inside, protocol: pktbuild.ICMPProtocol, from: endpoints{insideHost, world, 7, 0}, to: endpoints{gatewayOut, world, 9000, 0},
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.Echo(8, 7, 1, []byte("ping"))}, xdp: sent, tc: sent,
			out: func(ip *pktbuild.IPv4) { ip.Payload = pktbuild.Echo(8, 9000, 1, []byte("ping")) }},
		{name: "echo reply", side: outside, protocol: pktbuild.ICMPProtocol, from: endpoints{world, gatewayOut, 0, 9000}, to: endpoints{world, insideHost, 0, 7},
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.Echo(0, 9000, 1, []byte("ping"))}, xdp: back, tc: back,
			out: func(ip *pktbuild.IPv4) { ip.Payload = pktbuild.Echo(0, 7, 1, []byte("ping")) }},
		{name: "timestamp request", side: inside, protocol: pktbuild.ICMPProtocol, from: endpoints{insideHost, world, 7, 0}, to: endpoints{gatewayOut, world, 9000, 0},
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.Echo(13, 7, 1, make([]byte, 12))}, xdp: sent, tc: sent,
			out: func(ip *pktbuild.IPv4) { ip.Payload = pktbuild.Echo(13, 9000, 1, make([]byte, 12)) }},
		{name: "a protocol without ports", side: inside, protocol: 253, from: endpoints{src: insideHost, dst: world}, to: endpoints{src: gatewayOut, dst: world},
			packet: pktbuild.IPv4{TTL: 64, Payload: pktbuild.Bytes("whatever")}, xdp: sent, tc: sent, out: same},
		{name: "TTL 1 out is the stack's", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1,
			packet: pktbuild.IPv4{TTL: 1, Payload: udp(5000, 53, "")}, xdp: toTC, tc: abiNatReasonNAT_PASS_TTL},
		{name: "too big out with DF is the stack's", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1, change: func(f *abiNatFlow) { f.Mtu = 1400 },
			packet: pktbuild.IPv4{TTL: 64, Fragment: pktbuild.DF, Payload: udp(5000, 53, string(make([]byte, 1373)))}, xdp: toTC, tc: abiNatReasonNAT_PASS_TOO_BIG},
		{name: "as big as the MTU", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1, change: func(f *abiNatFlow) { f.Mtu = 1400 },
			packet: pktbuild.IPv4{TTL: 64, Fragment: pktbuild.DF, Payload: udp(5000, 53, string(make([]byte, 1372)))}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "from another link than the session's, to which its host has moved", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1, change: func(f *abiNatFlow) { f.Key.Link = 6 },
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "")}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "from another link than the session's, whose host is elsewhere", side: inside, protocol: pktbuild.UDPProtocol, from: endpoints{world, insideHost, 5000, 53}, to: endpoints{gatewayOut, world, 40000, 53}, change: func(f *abiNatFlow) { f.Key.Link = 6 },
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "")}, xdp: abiNatReasonNAT_DROP_SPOOFED, tc: abiNatReasonNAT_DROP_SPOOFED},
		{name: "from the session's link", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1, change: func(f *abiNatFlow) { f.Key.Link = 4 },
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "")}, xdp: sent, tc: sent, out: ports(40000, 53)},
		{name: "no neighbour yet", side: inside, protocol: pktbuild.UDPProtocol, from: out, to: outside1, change: func(f *abiNatFlow) { f.Hop = 0 },
			packet: pktbuild.IPv4{TTL: 64, Payload: udp(5000, 53, "")}, xdp: toTC, tc: sent, out: ports(40000, 53)},
	}
	r := aRig(t)
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			arrives, leaves := r.in, r.out
			if row.side == outside {
				arrives, leaves = leaves, arrives
			}
			row.packet.Src, row.packet.Dst = row.from.src, row.from.dst
			frame := arrives.arriving(row.packet)
			if row.frame != nil {
				row.frame(&frame)
			}
			want := frame
			if row.out != nil {
				want.To, want.From = leaves.neighbor, leaves.mac
				want.IP.Src, want.IP.Dst = row.to.src, row.to.dst
				want.IP.TTL--
				row.out(&want.IP)
			}
			for _, h := range hooks {
				r.putFlow(t, row.side, row.protocol, row.from, row.to, leaves, row.change)
				reason := row.xdp
				want := want
				if h.name == "tc" {
					reason = row.tc
					if row.xdp == toTC { // by the neighbour output, which writes the MACs later
						want.To, want.From = frame.To, frame.From
					}
				}
				r.expect(t, h, row.side, arrives, frame, 0, end{reason, &want}, nil)
			}
		})
	}
}

// zeroSum is data for a UDP datagram between those endpoints whose checksum is zero,
// to be sent as 0xffff.
func zeroSum(e endpoints) string {
	for n := range 0x10000 {
		data := []byte{byte(n >> 8), byte(n)}
		raw := pktbuild.IPv4{Src: e.src, Dst: e.dst, Payload: pktbuild.UDP{Src: e.sport, Dst: e.dport, Data: data}}.Bytes()
		if raw[26] == 0xff && raw[27] == 0xff {
			return string(data)
		}
	}
	panic("no such data")
}

// expect sends a frame in and compares how it ends: verdict, counters (also: what is
// counted besides the end itself), and the bytes that leave, or for a packet that is
// passed those that came.
func (r *rig) expect(t *testing.T, h hook, side abiNatSide, p port, in pktbuild.Frame, gso uint32, want end, also map[abiNatReason]uint64) {
	t.Helper()
	var out []byte
	if want.frame != nil {
		out = want.frame.Bytes()
	}
	r.expectBytes(t, h, side, p, in.Bytes(), gso, want.reason, out, also)
}

func (r *rig) expectBytes(t *testing.T, h hook, side abiNatSide, p port, in []byte, gso uint32, reason abiNatReason, out []byte, also map[abiNatReason]uint64) {
	t.Helper()
	verdict, got, err := r.run(t, h, side, p, in, gso)
	if err != nil {
		t.Fatalf("%s: %v", h.name, err)
	}
	counts := map[abiNatReason]uint64{reason: 1}
	maps.Copy(counts, also)
	if counted := r.counted(t); !maps.Equal(counted, counts) {
		t.Errorf("%s: counted %v, want %v", h.name, counted, counts)
	}
	wantVerdict := h.redirect
	switch {
	case reason < abiNatReasonNAT_TRANSLATED_IN:
		wantVerdict, out = h.pass, in
	case reason >= abiNatReasonNAT_DROP_MALFORMED:
		wantVerdict, out = h.drop, got
	}
	if verdict != wantVerdict {
		t.Errorf("%s: verdict %d, want %d", h.name, int32(verdict), int32(wantVerdict))
	}
	if !bytes.Equal(got, out) {
		t.Errorf("%s: the frame is not as it should be:\n%s", h.name, differ(got, out))
	}
}

// sidePort is the port by which packets of that side come in.
func (r *rig) sidePort(side abiNatSide) port {
	if side == abiNatSideNAT_INSIDE {
		return r.in
	}
	return r.out
}

// putSession makes both directions of a session that an internal host opened; change is
// applied to each.
func (r *rig) putSession(t testing.TB, protocol uint8, from, to endpoints, change func(*abiNatFlow)) {
	t.Helper()
	r.putFlow(t, abiNatSideNAT_INSIDE, protocol, from, to, r.out, func(f *abiNatFlow) {
		f.State |= uint32(abiNatFlowStateNAT_FLOW_OWNER | abiNatFlowStateNAT_FLOW_PEER_OUTSIDE | abiNatFlowStateNAT_FLOW_OUTBOUND |
			abiNatFlowStateNAT_FLOW_TCP_SYN_OWNER | abiNatFlowStateNAT_FLOW_TCP_SYN_PEER)
		change(f)
	})
	r.putFlow(t, abiNatSideNAT_OUTSIDE, protocol, endpoints{to.dst, to.src, to.dport, to.sport}, endpoints{from.dst, from.src, from.dport, from.sport}, r.in, change)
}

// BenchmarkHit reports what the program takes for a packet of an established session, in
// nanoseconds a packet without the hook around it, which BPF_PROG_TEST_RUN measures in
// the kernel; and the instructions of it and of the helpers that it calls, where the
// processor counts them for us. The flow changes nothing, so that the same
// packet can go round; a TTL lasts for 250.
func BenchmarkHit(b *testing.B) {
	r := newRig(b)
	empty := map[string]*ebpf.Program{}
	for name, kind := range map[string]ebpf.ProgramType{"xdp": ebpf.XDP, "tc": ebpf.SchedCLS} {
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		if err != nil {
			b.Fatal(err)
		}
		defer program.Close()
		empty[name] = program
	}
	for _, h := range hooks {
		for _, protocol := range []uint8{pktbuild.UDPProtocol, pktbuild.TCPProtocol} {
			b.Run(fmt.Sprintf("%s-%d", h.name, protocol), func(b *testing.B) {
				same := endpoints{insideHost, world, 5000, 53}
				packet := pktbuild.IPv4{Src: same.src, Dst: same.dst, TTL: 255, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: make([]byte, 18)}}
				if protocol == pktbuild.TCPProtocol {
					packet.Payload = pktbuild.TCP{Src: 5000, Dst: 53, Flags: pktbuild.ACK, Data: make([]byte, 6)}
				}
				frame := pktbuild.Frame{To: make([]byte, 6), From: r.in.neighbor, IP: packet}.Bytes()
				var took []time.Duration
				var counted []float64
				program := r.program(b, h.name+"_inside")
				for b.Loop() {
					for range 20 {
						r.putFlow(b, abiNatSideNAT_INSIDE, protocol, same, same, r.out, nil)
						if err := r.ns.Do(func() error {
							verdict, each, err := program.Benchmark(frame, 250, nil)
							if err == nil && verdict != h.redirect {
								err = fmt.Errorf("verdict %d", int32(verdict))
							}
							took = append(took, each)
							return err
						}); err != nil {
							b.Fatal(err)
						}
					}
					for range 20 {
						if err := r.ns.Do(func() error {
							all, err1 := instructions(program, frame)
							around, err2 := instructions(empty[h.name], frame)
							counted = append(counted, all-around)
							return errors.Join(err1, err2)
						}); err != nil {
							b.Log(err)
							counted = nil
							break
						}
					}
				}
				if len(counted) > 0 {
					slices.Sort(counted)
					b.ReportMetric(counted[len(counted)/2], "instructions")
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[0]), "ns/least")
				b.ReportMetric(float64(took[len(took)/2]), "ns/median")
			})
		}
	}
}

// instructions counts what a run of the program takes of the kernel's instructions, with
// what is done around each run: the difference between many runs and few. The calling
// thread is locked.
func instructions(program *ebpf.Program, frame []byte) (float64, error) {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_HARDWARE, Config: unix.PERF_COUNT_HW_INSTRUCTIONS,
		Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})), Bits: unix.PerfBitExcludeUser | unix.PerfBitExcludeHv}
	fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("count instructions: %w", err)
	}
	defer unix.Close(fd)
	const few, many = 50, 200
	at := make([]uint64, 0, 3)
	for _, runs := range []int{0, few, many} {
		if runs > 0 {
			if _, _, err := program.Benchmark(frame, runs, nil); err != nil {
				return 0, err
			}
		}
		var n [8]byte
		if _, err := unix.Read(fd, n[:]); err != nil {
			return 0, fmt.Errorf("count instructions: %w", err)
		}
		at = append(at, binary.NativeEndian.Uint64(n[:]))
	}
	return (float64(at[2]-at[1]) - float64(at[1]-at[0])) / (many - few), nil
}
