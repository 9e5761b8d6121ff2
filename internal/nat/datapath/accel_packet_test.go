// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/pktbuild"
)

// A fast-path entry whose place in the table was given to another flow, while a packet looked at
// it, says what is not that packet's: it goes up to the stack as it came.
func TestAccelSlotGivenAway(t *testing.T) {
	r := aRig(t)
	from, to := endpoints{insideHost, world, 5000, 53}, endpoints{gatewayOut, world, 40000, 53}
	packet := pktbuild.IPv4{Src: from.src, Dst: from.dst, TTL: 64, Payload: pktbuild.UDP{Src: from.sport, Dst: from.dport, Data: []byte("data")}}
	after := packet
	after.Src, after.TTL, after.Payload = to.src, 63, pktbuild.UDP{Src: to.sport, Dst: to.dport, Data: []byte("data")}
	a := r.accelerator(t)
	for _, h := range hooks {
		for _, c := range []struct {
			name   string
			reason abiNatAccelReason
			change func(*abiNatAccelEntry)
		}{
			{"its own", abiNatAccelReasonNAT_ACCEL_FORWARDED, func(*abiNatAccelEntry) {}},
			{"another address", abiNatAccelReasonNAT_ACCEL_NO_ROOM, func(s *abiNatAccelEntry) { s.Dst = addr(poolFirst) }},
			{"another port", abiNatAccelReasonNAT_ACCEL_NO_ROOM, func(s *abiNatAccelEntry) { s.Sport = be(40001) }},
			{"another host's", abiNatAccelReasonNAT_ACCEL_NO_ROOM, func(s *abiNatAccelEntry) {
				s.L3Delta = delta([]byte{192, 168, 1, 3}, to.src.AsSlice(), from.dst.AsSlice(), to.dst.AsSlice())
			}},
			{"another connection's", abiNatAccelReasonNAT_ACCEL_NO_ROOM, func(s *abiNatAccelEntry) {
				s.L4Delta = delta(port16(5001), port16(to.sport), port16(53), port16(53))
			}},
		} {
			t.Run(h.name+" "+c.name, func(t *testing.T) {
				a.inTime(t, func(t testing.TB) {
					before := a.counted(t)
					a.put(t, pktbuild.UDPProtocol, from, to, c.change)
					frame := r.in.arriving(packet).Bytes()
					verdict, out := a.run(t, h, frame)
					wantVerdict, want := h.pass, frame
					if c.reason == abiNatAccelReasonNAT_ACCEL_FORWARDED {
						wantVerdict, want = h.redirect, r.out.leaving(after).Bytes()
					}
					if verdict != wantVerdict {
						t.Errorf("verdict %d, want %d", int32(verdict), int32(wantVerdict))
					}
					if d := differ(out, want); d != "" {
						t.Errorf("the packet:\n%s", d)
					}
					name := rulefile.AccelReasons[c.reason].Name
					if n := a.counted(t); n[name] != before[name]+1 {
						t.Errorf("%s: %d, before %d: %v", name, n[name], before[name], n)
					}
				})
			})
		}
	}
}

// What ends a connection, or begins another with its addresses and ports, goes up to the
// stack, and so does what follows it, in both directions.
func TestAccelEnds(t *testing.T) {
	r := aRig(t)
	from, to := endpoints{insideHost, world, 5000, 80}, endpoints{gatewayOut, world, 40000, 80}
	back, home := endpoints{world, gatewayOut, 80, 40000}, endpoints{world, insideHost, 80, 5000}
	a := r.accelerator(t)
	valid := func() (n int) {
		if err := a.AccelEntries(func(s *rulefile.AccelEntry) bool {
			if s.Valid {
				n++
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, h := range hooks {
		for name, flags := range map[string]uint8{"SYN": pktbuild.SYN, "FIN": pktbuild.FIN | pktbuild.ACK, "RST": pktbuild.RST} {
			t.Run(h.name+" "+name, func(t *testing.T) {
				var before, after int
				var verdict uint32
				segment := pktbuild.IPv4{Src: from.src, Dst: from.dst, TTL: 64, Payload: pktbuild.TCP{Src: from.sport, Dst: from.dport, Flags: flags}}
				a.inTime(t, func(t testing.TB) {
					a.put(t, pktbuild.TCPProtocol, from, to, func(*abiNatAccelEntry) {})
					a.put(t, pktbuild.TCPProtocol, back, home, func(*abiNatAccelEntry) {})
					before = valid()
					verdict, _ = a.run(t, h, r.in.arriving(segment).Bytes())
					after = valid()
				})
				if before != 2 {
					t.Fatalf("%d of 2 directions are valid", before)
				}
				if verdict != h.pass {
					t.Errorf("verdict %d, want %d", int32(verdict), int32(h.pass))
				}
				if after != 0 {
					t.Errorf("%d directions are valid after that", after)
				}
			})
		}
	}
}

// accelRig is an accelerator's programs between the ports of a rig.
type accelRig struct {
	*Accelerator
	*rig
}

func (r *rig) accelerator(t testing.TB) accelRig {
	t.Helper()
	return r.acceleratorOf(t, 1024)
}

func (r *rig) acceleratorOf(t testing.TB, entries int) accelRig {
	t.Helper()
	var a *Accelerator
	var links []Link
	for _, p := range []struct {
		port
		mtu int
	}{{r.in, insideMTU}, {r.out, outsideMTU}} {
		links = append(links, Link{Index: int(p.link), Ifindex: p.ifindex, MAC: [6]byte(p.mac), MTU: p.mtu, Transmit: true, Ethernet: true})
	}
	r.do(t, func() (err error) {
		a, err = NewAccelerator(AccelOptions{AccelEntries: entries, TCPTimeout: time.Hour}, links)
		return err
	})
	t.Cleanup(func() { a.Close() })
	return accelRig{a, r}
}

// putTicks is for how long a fast-path entry is valid that put gave.
const putTicks = 800

// inTime runs fn again until it took less time than what it put is valid: a busy machine may
// stop it for longer. What fails in time, with the t that fn is given, fails the test.
func (a accelRig) inTime(t testing.TB, fn func(t testing.TB)) {
	t.Helper()
	for {
		begun, attempt := now(), &attempt{TB: t}
		fn(attempt)
		if now()-begun < putTicks {
			attempt.report()
			return
		}
	}
}

// attempt keeps errors of a test, of which it is not known yet whether they are some.
type attempt struct {
	testing.TB
	errors []string
}

func (a *attempt) Errorf(format string, args ...any) {
	a.errors = append(a.errors, fmt.Sprintf(format, args...))
}

func (a *attempt) Error(args ...any) { a.errors = append(a.errors, fmt.Sprint(args...)) }

func (a *attempt) report() {
	a.Helper()
	for _, e := range a.errors {
		a.Error(e)
	}
}

// put gives a direction a fast-path entry that is valid, and was just now, of which nothing is at
// the flow cache.
func (a accelRig) put(t testing.TB, protocol uint8, from, to endpoints, change func(*abiNatAccelEntry)) {
	t.Helper()
	key := abiNatFlowKey{Src: addr(from.src), Dst: addr(from.dst), Sport: be(from.sport), Dport: be(from.dport), Protocol: protocol}
	s := abiNatAccelEntry{
		Src: addr(to.src), Dst: addr(to.dst), Sport: be(to.sport), Dport: be(to.dport),
		L3Delta: delta(from.src.AsSlice(), to.src.AsSlice(), from.dst.AsSlice(), to.dst.AsSlice()),
		L4Delta: delta(port16(from.sport), port16(to.sport), port16(from.dport), port16(to.dport)),
		Hop:     a.out.hop(), Until: now() + putTicks, Mtu: outsideMTU, InLink: a.in.link + 1,
	}
	change(&s)
	if err := a.engine.maps["accel_entries"].Put(&key, &s); err != nil {
		t.Fatal(err)
	}
	a.setCache(t, func(f *cacheEntry) { *f = cacheEntry{} })
	a.revalidated(t, now()+50)
}

// revalidated has the programs believe of all directions that their fast-path entries were made or
// valid at that tick: one that is to come is that of a processor that is ahead, as one is
// that looked at the clock after a tick for which another's packet came too early.
func (a accelRig) revalidated(t testing.TB, at uint32) {
	t.Helper()
	m := a.engine.maps["admissions"]
	keys, admissions := make([]uint32, m.MaxEntries()), make([]uint64, m.MaxEntries())
	for i := range keys {
		keys[i], admissions[i] = uint32(i), uint64(at)<<32
	}
	if _, err := m.BatchUpdate(keys, admissions, nil); err != nil {
		t.Fatal(err)
	}
	a.recency(t, at)
}

// recency has all slots of the recency filter hold that tick.
func (a accelRig) recency(t testing.TB, at uint32) {
	t.Helper()
	var when [marks]uint16
	for i := range when {
		when[i] = uint16(at >> 8)
	}
	if err := a.engine.maps["recency_filter"].Put(uint32(0), &when); err != nil {
		t.Fatal(err)
	}
}

// marks is how many there are.
const marks = 4096

// run sends a frame through the program of that hook, as if it came in from inside.
func (a accelRig) run(t testing.TB, h hook, frame []byte) (uint32, []byte) {
	t.Helper()
	return a.runAt(t, h, a.in, frame)
}

// runAt sends a frame through the program of that hook, as if it came in by p.
func (a accelRig) runAt(t testing.TB, h hook, p port, frame []byte) (uint32, []byte) {
	t.Helper()
	opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
	if h.name == "xdp" {
		opts.Context = &xdpContext{DataEnd: uint32(len(frame)), Ifindex: uint32(p.ifindex)}
	} else {
		opts.Context = &skbContext{Ifindex: uint32(p.ifindex)}
	}
	var verdict uint32
	a.do(t, func() (err error) {
		if verdict, err = a.engine.programs["accel_"+h.name].Run(opts); err != nil {
			err = fmt.Errorf("run %s: %w", h.name, err)
		}
		return err
	})
	return verdict, opts.DataOut
}

func (a accelRig) counted(t testing.TB) map[string]uint64 {
	t.Helper()
	s, err := a.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return maps.Clone(s.Reasons)
}
