// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// startGC loads GC on the gateway's maps and arms its timer, for the time of the test.
func (g *gateway) startGC(t testing.TB) (stop func()) {
	t.Helper()
	coll := g.load(t, loadGc)
	run := func(name string) {
		code, err := coll.Programs[name].Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		if err != nil || int32(code) < 0 {
			t.Fatalf("%s: %d, %v", name, int32(code), err)
		}
	}
	run("gc_start")
	run("gc_start") // a newer natkit's upgrade
	return sync.OnceFunc(func() { run("gc_stop") })
}

// short makes all time-outs so short that a test can wait for them.
func short(c *abiNatConfig) {
	for i := range c.Timeouts {
		c.Timeouts[i] = 100
	}
	limitSessions(c, 1<<20)
}

// nothing checks that no session is known and nothing is held for one.
func (g *gateway) nothing(t testing.TB) {
	t.Helper()
	if n := len(flowsOf(t, g.maps)); n != 0 {
		t.Errorf("%d flows are left", n)
	}
	for key, m := range mappingsOf(t, g.maps) {
		t.Errorf("a mapping is left: %v %+v", key, m)
	}
	var c abiNatCounts
	if err := g.maps["counts"].Lookup(uint32(0), &c); err != nil || c.Mappings != 0 {
		t.Errorf("%d mappings are counted (%v)", c.Mappings, err)
	}
	for key, s := range entries[abiNatSourceKey, abiNatSource](t, g.maps["sources"]) {
		t.Errorf("a source is left: %v %+v", key, s)
	}
	for key, c := range entries[abiNatFilterKey, abiNatFilterEntry](t, g.maps["filter_entries"]) {
		t.Errorf("a filter entry is left: %v %+v", key, c)
	}
	for _, name := range []string{"mapping_queue"} {
		if g.maps[name].LookupAndDelete(nil, make([]byte, g.maps[name].ValueSize())) == nil {
			t.Errorf("%s is not empty", name)
		}
	}
	for index := range uint32(addressCount) {
		var a abiNatAddress
		if err := g.maps["addresses"].Lookup(index, &a); err != nil {
			t.Fatal(err)
		}
		if a.PortCount == 0 {
			var slot abiNatSlot
			if err := g.maps["whole_slots"].Lookup(index, &slot); err != nil || slot.Used != 0 || slot.Addr != (abiNatAddr{}) {
				t.Errorf("address %d still belongs to %+v (%v)", index, slot, err)
			}
			continue
		}
		for class := range abiNatClassNAT_PORT_CLASSES {
			if free := g.freePorts(t, index, class); free != int(a.PortCount) {
				t.Errorf("address %d, class %d: %d of %d ports are free", index, class, free, a.PortCount)
			}
		}
		var inner *ebpf.Map
		if err := g.maps["slots"].Lookup(index, &inner); err != nil {
			t.Fatal(err)
		}
		for key, slot := range entries[uint32, abiNatSlot](t, inner) {
			if alive := slot.Refs != 0 && slot.Refs&uint32(abiNatRefsNAT_REFS_GONE) == 0; alive || slot.Used != 0 || slot.Addr != (abiNatAddr{}) {
				t.Errorf("address %d: slot %d still belongs to %+v", index, key, slot)
			}
		}
		inner.Close()
	}
	var whole abiNatPorts
	if err := g.maps["free_addresses"].Lookup(uint32(0), &whole); err != nil || whole.Free != 2 {
		t.Errorf("%d of 2 whole addresses are free (%v)", whole.Free, err)
	}
}

func (g *gateway) flowCount(t testing.TB) int {
	return len(flowsOf(t, g.maps))
}

// Sessions of every kind end when they are silent, and give back all they had. What an
// internal host keeps using stays; what only comes from outside does not keep it.
func TestGC(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, short)
	opened := 0
	open := func(side abiNatSide, kind string, e endpoints) endpoints {
		reason, out := g.send(t, side, kind, pktbuild.SYN, e)
		if reason != sent && reason != back {
			t.Fatalf("%s %v: %v", kind, e, reason)
		}
		opened++
		return out
	}
	for _, source := range []string{"192.168.1.2:5000", "192.168.2.2:5000", "192.168.3.2:5000", "192.168.4.2:5000", "192.168.5.2:5000", "192.168.6.2:5000", "192.168.8.2:4000"} {
		for _, kind := range []string{"udp", "tcp", "ping"} {
			e := ends(source, "198.51.100.9:53")
			if kind == "ping" {
				e.dport = 0
			}
			open(inside, kind, e)
			e.dst = e.dst.Next()
			open(inside, kind, e)
		}
	}
	open(inside, "gre", ends("192.168.1.2:0", "198.51.100.9:0"))
	open(inside, "gre", ends("192.168.5.2:0", "198.51.100.9:0"))
	open(outer, "tcp", ends("198.51.100.9:1234", "203.0.113.1:8080"))
	open(inside, "tcp", ends("192.168.1.3:5000", "203.0.113.1:8080")) // hairpin by rule
	cone := open(inside, "udp", ends("192.168.2.9:5500", "198.51.100.9:53"))
	open(inside, "udp", endpoints{netip.MustParseAddr("192.168.1.4"), cone.src, 6700, 5500}) // by mapping
	open(outer, "udp", endpoints{world, cone.src, 99, 5500})
	kept := ends("192.168.1.9:7777", "198.51.100.9:53")
	open(inside, "udp", kept)
	pushed := ends("192.168.1.9:7778", "198.51.100.9:53")
	pushed = open(inside, "udp", pushed).answer()

	mapped := len(mappingsOf(t, g.maps))
	g.counted(t) // sets to zero, which must not meet GC
	stop := g.startGC(t)
	defer stop()
	ktest.Wait(t, 20*time.Second, "all sessions but one end", func() bool {
		for _, e := range []struct {
			side abiNatSide
			endpoints
		}{{inside, kept}, {outer, pushed}} {
			way := g.in
			if e.side == outer {
				way = g.out
			}
			if _, _, err := g.run(t, hooks[1], e.side, way, way.arriving(packet("udp", 0, e.endpoints)).Bytes(), 0); err != nil {
				t.Fatal(err)
			}
		}
		return g.flowCount(t) == 2
	})
	ktest.Wait(t, 20*time.Second, "the last session and all ports come back", func() bool {
		return g.flowCount(t) == 0 && len(mappingsOf(t, g.maps)) == 0 &&
			g.freePorts(t, apdmAddress, abiNatClassNAT_UDP) == 8976
	})
	var before, after abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &before); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 5*time.Second, "the time of the last garbage collection", func() bool {
		return g.maps["control"].Lookup(uint32(0), &after) == nil && after.GcRan != before.GcRan
	})
	stop()
	g.nothing(t)
	counted := g.counted(t)
	if n := counted[abiNatReasonNAT_EXPIRED]; n != uint64(opened) {
		t.Errorf("%d sessions were made, %d expired", opened, n)
	}
	if n := counted[abiNatReasonNAT_UNMAPPED]; n != uint64(mapped) {
		t.Errorf("%d mappings were made, %d removed", mapped, n)
	}
}

// A port is in hold-down before it is another host's, and its own host gets it back in that time.
func TestGCHoldDown(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, func(c *abiNatConfig) {
		short(c)
		c.Timeouts[abiNatTimeoutNAT_TIMEOUT_PORT_HOLD_DOWN] = ticks(3600)
	})
	_, out := g.send(t, inside, "udp", 0, ends("192.168.2.2:700", "198.51.100.9:53"))
	defer g.startGC(t)()
	ktest.Wait(t, 20*time.Second, "the session ends", func() bool { return g.flowCount(t) == 0 })
	ended := now()
	ktest.Wait(t, 30*time.Second, "the least rest that a port has, twice", func() bool {
		var c abiNatControl
		return g.maps["control"].Lookup(uint32(0), &c) == nil && int32(c.GcRan-ended) > 2*int32(abiNatLimitNAT_DEAD_TICKS)
	})
	if g.freePorts(t, fullAddress, abiNatClassNAT_UDP)+g.freePorts(t, fullAddress2, abiNatClassNAT_UDP) != 2*8976-1 {
		t.Error("the port does not rest")
	}
	g.want(t, inside, "udp", 0, ends("192.168.2.2:700", "198.51.100.8:53"), sent, endpoints{out.src, netip.MustParseAddr("198.51.100.8"), out.sport, 53})
}

// A session that is dead, but still there, lives again when its internal host speaks; from
// outside only who could open it may do that. One that is being removed is nobody's.
func TestRevive(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		g.hook = h
		g.reset(t)
		masqueraded := ends("192.168.1.2:5000", "198.51.100.9:53")
		cone := ends("192.168.2.2:5000", "198.51.100.9:53")
		_, out := g.send(t, inside, "udp", 0, masqueraded)
		_, coneOut := g.send(t, inside, "udp", 0, cone)

		g.mark(t, abiNatFlowStateNAT_FLOW_DEAD)
		g.refused(t, outer, "udp", 0, out.answer(), abiNatReasonNAT_DROP_FILTERED)
		g.want(t, inside, "udp", 0, masqueraded, sent, out)
		g.want(t, outer, "udp", 0, out.answer(), back, masqueraded.answer())
		g.want(t, outer, "udp", 0, coneOut.answer(), back, cone.answer())
		g.want(t, inside, "udp", 0, cone, sent, coneOut)
		for key, flow := range flowsOf(t, g.maps) {
			if flow.State&uint32(abiNatFlowStateNAT_FLOW_DEAD) != 0 {
				t.Errorf("%s: %v is still dead", h.name, key)
			}
		}
		if held := g.held(t); held.mappings != 2 || held.sources != 2 {
			t.Errorf("%s: after revival the sessions hold %+v", h.name, held)
		}
		g.mark(t, abiNatFlowStateNAT_FLOW_DEAD|abiNatFlowStateNAT_FLOW_GONE)
		g.refused(t, inside, "udp", 0, masqueraded, abiNatReasonNAT_DROP_RACE)
		g.refused(t, outer, "udp", 0, out.answer(), abiNatReasonNAT_DROP_RACE)
	}
}

// mark sets bits of every flow's state.
func (g *gateway) mark(t testing.TB, bits abiNatFlowState) {
	t.Helper()
	changeFlows(t, g.maps, func(flow *abiNatFlow) { flow.State |= uint32(bits) })
}

// TCP's table of bpf/nat/state.h, by packets: who sends what, and the time-out after it.
func TestStateTCP(t *testing.T) {
	const (
		S, A, F, R  = pktbuild.SYN, pktbuild.ACK, pktbuild.FIN, pktbuild.RST
		opening     = abiNatTimeoutNAT_TIMEOUT_TCP_OPENING
		established = abiNatTimeoutNAT_TIMEOUT_TCP_ESTABLISHED
		closing     = abiNatTimeoutNAT_TIMEOUT_TCP_CLOSING
		reset       = abiNatTimeoutNAT_TIMEOUT_TCP_RESET
	)
	type step struct {
		side  abiNatSide
		flags uint8
		after abiNatTimeout
	}
	g := aGateway(t)
	for _, h := range hooks {
		g.hook = h
		g.reset(t)
		for i, row := range []struct {
			name  string
			steps []step
		}{
			{"ordinary", []step{{inside, S, opening}, {outer, S | A, established}, {inside, A, established}, {inside, F | A, established},
				{outer, A, established}, {outer, F | A, closing}, {inside, A, closing}}},
			{"repeated SYN", []step{{inside, S, opening}, {inside, S, opening}, {outer, S | A, established}, {inside, S, established}}},
			{"simultaneous open", []step{{inside, S, opening}, {outer, S, established}, {inside, S | A, established}}},
			{"closed from outside", []step{{inside, S, opening}, {outer, S | A, established}, {outer, F | A, established}, {inside, F | A, closing}}},
			{"refused", []step{{inside, S, opening}, {outer, R | A, reset}, {inside, S, opening}, {outer, S | A, established}}},
			{"RST that nobody meant", []step{{inside, S, opening}, {outer, S | A, established}, {outer, R, reset}, {inside, A, established}}},
			{"RST after the end", []step{{inside, S, opening}, {outer, S | A, established}, {inside, F | A, established}, {outer, F | A, closing}, {outer, R, reset}, {inside, A, closing}}},
			{"port used again", []step{{inside, S, opening}, {outer, S | A, established}, {inside, F | A, established}, {outer, F | A, closing},
				{outer, S, closing}, {inside, S, opening}, {outer, S | A, established}}},
			{"taken up", []step{{inside, A, opening}, {inside, A, opening}, {outer, A, established}}},
			{"taken up, refused", []step{{inside, A, opening}, {outer, R, reset}}},
		} {
			e := ends("192.168.1.2:2000", "198.51.100.9:80")
			e.sport += uint16(i)
			out := endpoints{gatewayOut, e.dst, e.sport, e.dport}
			for n, s := range row.steps {
				if s.side == inside {
					g.want(t, inside, "tcp", s.flags, e, sent, out)
				} else {
					g.want(t, outer, "tcp", s.flags, out.answer(), back, e.answer())
				}
				for _, key := range []abiNatFlowKey{
					{Src: addr(e.src), Dst: addr(e.dst), Sport: be(e.sport), Dport: be(e.dport), Protocol: 6, Side: uint8(inside)},
					{Src: addr(e.dst), Dst: addr(gatewayOut), Sport: be(e.dport), Dport: be(e.sport), Protocol: 6, Side: uint8(outer)},
				} {
					flow, known := flowOf(t, g.maps, key)
					if !known {
						t.Fatalf("there is no flow of %v", key)
					}
					if got := abiNatTimeout(flow.State & uint32(abiNatFlowStateNAT_FLOW_TIMEOUT)); got != s.after {
						t.Errorf("%s: %s: after step %d side %d has time-out %d, want %d", h.name, row.name, n+1, key.Side, got, s.after)
					}
				}
			}
		}
	}
}

// All CPUs open the same sessions at once, of every kind that takes something, while the
// GC ends and removes others and some come back just then. After some seconds of
// that nothing may be left or lost.
func TestSessionRace(t *testing.T) {
	t.Parallel()
	t.Run("roomy", func(t *testing.T) { sessionRace(t, newGateway(t)) })
	// Everything is used again and again, and wanted by more than there is of it.
	t.Run("small", func(t *testing.T) {
		g := newGateway(t)
		const room = 64
		var control abiNatControl
		if err := g.maps["control"].Lookup(uint32(0), &control); err != nil {
			t.Fatal(err)
		}
		control.SessionsMax, control.FlowMask = room, room/2-1
		control.MappingsMax, control.MappingMask = room/2, room/8-1
		g.put(t, "control", uint32(0), &control)
		sessionRace(t, g)
		g.configure(t, func(c *abiNatConfig) { limitSessions(c, room+1) })
		for n := range uint16(room) {
			g.want(t, inside, "udp", 0, endpoints{netip.MustParseAddr("192.168.6.2"), world, 1000 + n, 53}, sent,
				endpoints{netip.MustParseAddr("198.18.6.2"), world, 1000 + n, 53})
		}
		g.refused(t, inside, "udp", 0, ends("192.168.6.2:999", "198.51.100.9:53"), abiNatReasonNAT_DROP_SESSIONS_FULL)
	})
}

func sessionRace(t *testing.T, g *gateway) {
	g.configure(t, func(c *abiNatConfig) {
		short(c)
		for i := range c.Timeouts {
			c.Timeouts[i] = 10
		}
	})
	// Hosts in groups: one group speaks at a time, so sessions of the others die.
	var groups [30][][]byte
	for _, rule := range []byte{1, 2, 3, 4, 5, 6} {
		for n := range len(groups) * 2 {
			for port := range uint16(8) {
				e := endpoints{netip.AddrFrom4([4]byte{192, 168, rule, byte(10 + n)}), world, 2000 + port, 53}
				groups[n%len(groups)] = append(groups[n%len(groups)], g.in.arriving(packet("udp", 0, e)).Bytes(),
					g.in.arriving(packet("tcp", pktbuild.SYN, e)).Bytes())
			}
		}
	}
	stop := g.startGC(t)
	defer stop()
	var wg sync.WaitGroup
	program, begin := g.program(t, "tc_inside"), time.Now()
	for w := range max(runtime.NumCPU(), 2) {
		wg.Go(func() {
			err := g.ns.Do(func() error {
				pin(t, w%runtime.NumCPU())
				for time.Since(begin) < 5*time.Second {
					// The same at the same time on all CPUs, so that they meet.
					random := rand.New(rand.NewPCG(uint64(time.Since(begin)/(100*time.Millisecond)), 1))
					frames := groups[random.IntN(len(groups))]
					for range frames {
						opts := &ebpf.RunOptions{Data: frames[random.IntN(len(frames))], Context: &skbContext{Ifindex: uint32(g.in.ifindex)}}
						if _, err := program.Run(opts); err != nil {
							return err
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	counted := g.counted(t)
	t.Logf("counted %v", counted)
	if counted[abiNatReasonNAT_CREATED] == 0 || counted[abiNatReasonNAT_EXPIRED] == 0 {
		t.Errorf("nothing was tested: %v", counted)
	}
	ktest.Wait(t, 20*time.Second, "everything comes back", func() bool {
		if g.flowCount(t) > 0 || len(mappingsOf(t, g.maps)) > 0 {
			return false
		}
		return g.freePorts(t, apdmAddress, abiNatClassNAT_UDP) == 8976 && g.freePorts(t, apdmAddress, abiNatClassNAT_TCP) == 8976
	})
	stop()
	g.nothing(t)
	var counts abiNatCounts
	if err := g.maps["counts"].Lookup(uint32(0), &counts); err != nil {
		t.Fatal(err)
	}
	var numbers []uint32
	for number := uint32(0); g.maps["free_flows"].LookupAndDelete(nil, &number) == nil; {
		numbers = append(numbers, number)
	}
	var control abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &control); err != nil {
		t.Fatal(err)
	}
	given := min(counts.Sessions, control.SessionsMax) // CPUs may have counted past the end
	slices.Sort(numbers)
	for i, number := range numbers {
		if number != 2*uint32(i) || number >= 2*given {
			t.Fatalf("of the numbers of %d sessions that were given, these came back: %v", given, numbers)
		}
	}
	if len(numbers) != int(given) {
		t.Errorf("%d numbers came back of %d", len(numbers), given)
	}
	for _, number := range numbers {
		g.put(t, "free_flows", nil, number)
	}
	inTables(t, g.maps, func(s *tables) {
		for word, bits := range s.bits {
			if bits != 0 {
				t.Errorf("numbers from %d on are taken by nobody: %#x", 64*word, bits)
			}
		}
		for i := range s.buckets {
			if b := &s.buckets[i]; b.Lock != 0 || b.Entries != [len(b.Entries)]uint64{} {
				t.Errorf("bucket %d is not empty: %+v", i, b)
			}
		}
		for number := range s.flows {
			if state := abiNatFlowState(s.flows[number].State); state != 0 && state&abiNatFlowStateNAT_FLOW_GONE == 0 {
				t.Fatalf("flow %d is nobody's, and its state is %#x", number, state)
			}
		}
	})
}

// The 32 bits that a flow counts packets with come round; GC notes it, each time, of either direction.
func TestPacketsComeRound(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	e := ends("192.168.1.2:5000", "198.51.100.9:53")
	_, out := g.send(t, inside, "udp", 0, e)
	g.want(t, outer, "udp", 0, out.answer(), back, e.answer())
	defer g.startGC(t)()
	carried := func() (c [2]uint16) {
		inTables(t, g.maps, func(s *tables) {
			s.each(func(flow *abiNatFlow) {
				if flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0 {
					c = [2]uint16{uint16(s.details[flow.Other].Created), uint16(s.details[flow.Other].Created >> 16)}
				}
			})
		})
		return c
	}
	for _, step := range []struct {
		packets [2]uint32 // of the owner, the peer
		carried [2]uint16
		all     [2]uint64
	}{
		{[2]uint32{1 << 31, 9}, [2]uint16{1, 0}, [2]uint64{1 << 31, 9}},
		{[2]uint32{7, 1<<32 - 1}, [2]uint16{2, 1}, [2]uint64{1<<32 + 7, 1<<32 - 1}},
		{[2]uint32{1<<31 + 1, 1}, [2]uint16{3, 2}, [2]uint64{1<<32 + 1<<31 + 1, 1<<32 + 1}},
	} {
		before := carried()
		changeFlows(t, g.maps, func(flow *abiNatFlow) {
			of := 1
			if flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0 {
				of = 0
			}
			flow.Packets, flow.Bytes, flow.Seen = step.packets[of], 1<<40, now()
			if got := flowPackets(flow, before[of]); got != step.all[of] {
				t.Errorf("%d packets before GC has come by, want %d", got, step.all[of])
			}
		})
		ktest.Wait(t, 30*time.Second, "GC notes it", func() bool { return carried() == step.carried })
		changeFlows(t, g.maps, func(flow *abiNatFlow) {
			of := 1
			if flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0 {
				of = 0
			}
			if got := flowPackets(flow, step.carried[of]); got != step.all[of] {
				t.Errorf("%d packets, want %d", got, step.all[of])
			}
		})
	}
}

// What natkit reads while sessions come, change and go is of one session each, whole; and
// of those that stay none is missed.
func TestSessionsRead(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, func(c *abiNatConfig) {
		short(c)
		c.Timeouts[abiNatTimeoutNAT_TIMEOUT_OTHER] = ticks(3600)
	})
	const room = 25000
	var control abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &control); err != nil {
		t.Fatal(err)
	}
	control.SessionsMax = room
	g.put(t, "control", uint32(0), &control)
	e := engineOn(t, g.maps)
	// Everything else of a session follows from the port.
	of := func(port uint16) endpoints {
		return endpoints{netip.AddrFrom4([4]byte{192, 168, 6, byte(port)}), netip.AddrFrom4([4]byte{198, 51, byte(port >> 8), byte(port)}), port, port ^ 0x5555}
	}
	const stay = 20
	for n := range uint16(stay) {
		stays := of(n)
		stays.sport, stays.dport = 0, 0
		if reason, _ := g.send(t, inside, "gre", 0, stays); reason != sent {
			t.Fatalf("%v: %v", stays, reason)
		}
	}
	defer g.startGC(t)()
	var wg sync.WaitGroup
	stop := make(chan struct{})
	program, begin := g.program(t, "tc_inside"), time.Now()
	wg.Go(func() {
		err := g.ns.Do(func() error {
			for n := uint16(0); ; n++ {
				select {
				case <-stop:
					return nil
				default:
				}
				// One group speaks at a time, so that the others' sessions end and numbers are used again.
				port := 1000 + 20000*uint16(time.Since(begin)/(2*time.Second)%3) + n%20000
				opts := &ebpf.RunOptions{Data: g.in.arriving(packet("udp", 0, of(port))).Bytes(), Context: &skbContext{Ifindex: uint32(g.in.ifindex)}}
				if _, err := program.Run(opts); err != nil {
					return err
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
	read, made := 0, uint64(0)
	ktest.Wait(t, 60*time.Second, "numbers to be used again while they are read", func() bool {
		stayed := 0
		err := e.Sessions(func(s *rulefile.Session) bool {
			read++
			if s.Protocol == 47 {
				stayed++
				return true
			}
			want := of(s.Source.Port())
			if s.Source.Addr() != want.src || s.Destination.AddrPort != netip.AddrPortFrom(want.dst, want.dport) || s.DestinationAfter != s.Destination ||
				s.SourceAfter.Port() != want.sport || s.SourceAfter.Addr().As4()[3] != want.src.As4()[3] {
				t.Errorf("read %+v, which is of no session", s)
			}
			return !t.Failed()
		})
		if err != nil || stayed != stay {
			t.Fatalf("%d of %d sessions that stay were read (%v)", stayed, stay, err)
		}
		made += g.counted(t)[abiNatReasonNAT_CREATED]
		return made > room+10000 || t.Failed()
	})
	close(stop)
	wg.Wait()
	t.Logf("read %d, of %d", read, made)
}

// Where no room is left for a port to rest, it is free at once: it is not lost for ever.
func TestPortsWithoutRest(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	full := func(n int) int { return g.freePorts(t, apdmAddress, abiNatClassNAT_UDP) + n }
	all := full(0)
	// Others rest, and for long.
	later := clock() + 1<<29
	entry := make([]byte, 8)
	binary.NativeEndian.PutUint32(entry[4:], later)
	var filled int
	for g.maps["mapping_queue"].Put(nil, bytes.Clone(entry)) == nil {
		filled++
	}
	if filled < 60000 {
		t.Fatalf("%d entries fill the queue", filled)
	}
	g.configure(t, short)
	for n := range 5 {
		g.want(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.%d.9:%d", apdmRule, 5000+n), "198.51.100.9:53"), sent,
			ends(fmt.Sprintf("203.0.113.19:%d", 5000+n), "198.51.100.9:53"))
	}
	if n := full(5); n != all {
		t.Fatalf("%d ports are free or in use, want %d", n, all)
	}
	stop := g.startGC(t)
	defer stop()
	for began := time.Now(); len(flowsOf(t, g.maps)) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatal("sessions don't end")
		}
	}
	stop()
	if n := full(0); n != all {
		t.Errorf("%d ports are free when all sessions have ended, want %d", n, all)
	}
}

// Where no room is left for its hold-down, a mapping ends with its last session: it does not stay
// for ever.
func TestMappingsWithoutRest(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	full := func() int {
		return g.freePorts(t, fullAddress, abiNatClassNAT_UDP) + g.freePorts(t, fullAddress2, abiNatClassNAT_UDP)
	}
	all := full()
	entry := make([]byte, 8)
	binary.NativeEndian.PutUint32(entry[4:], clock()+1<<29)
	for g.maps["mapping_queue"].Put(nil, bytes.Clone(entry)) == nil {
	}
	g.configure(t, short)
	for n := range 5 {
		if reason, _ := g.send(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.%d.9:%d", fullRule, 5000+n), "198.51.100.9:53")); reason != sent {
			t.Fatal(reason)
		}
	}
	if n := full(); n != all-5 {
		t.Fatalf("%d ports are free, want %d", n, all-5)
	}
	stop := g.startGC(t)
	defer stop()
	ktest.Wait(t, time.Minute, "the sessions end", func() bool { return g.flowCount(t) == 0 })
	for g.maps["mapping_queue"].LookupAndDelete(nil, new([8]byte)) == nil {
	}
	ktest.Wait(t, 20*time.Second, "all ports are free again", func() bool { return full() == all })
	stop()
	g.nothing(t)
}
