// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/pktbuild"
)

// cacheEntry is struct learn_cached of bpf/accel/learn.h, by words.
type cacheEntry [8]uint64

const (
	cacheKey   = 0 // and 1
	cacheRoute = 5
	cacheSum   = 6
	cacheBits  = 16

	cacheRouteFactor = 0x31358cc5 // in the sum
)

// setCache changes what is in the flow cache, and returns how much that is.
func (a accelRig) setCache(t testing.TB, change func(*cacheEntry)) (n int) {
	t.Helper()
	m := a.engine.maps["flow_cache"]
	keys, entries := make([]uint32, m.MaxEntries()), make([]cacheEntry, m.MaxEntries())
	var cursor ebpf.MapBatchCursor
	if _, err := m.BatchLookup(&cursor, keys, entries, nil); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	for i, slot := range keys {
		f := entries[i]
		if f == (cacheEntry{}) {
			continue
		}
		n++
		change(&f)
		if err := m.Put(slot, &f); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// cacheSlot is where an entry of that key belongs: there, or next to it in the pair.
func cacheSlot(addresses, ports uint64) uint64 {
	return (addresses*0x9e3779b97f4a7c15 + ports*0xc2b2ae3d27d4eb4f) >> (64 - cacheBits)
}

// cacheTraffic is packets of one flow, as they arrive and as they leave.
type cacheTraffic struct {
	accelRig
	from, to endpoints
	in, out  []byte
	end      []byte // of TCP, with FIN
}

func (a accelRig) traffic(sport uint16) cacheTraffic {
	x := cacheTraffic{accelRig: a, from: endpoints{insideHost, world, sport, 80}, to: endpoints{gatewayOut, world, 40000, 80}}
	data := pktbuild.TCP{Src: sport, Dst: 80, Flags: pktbuild.ACK, Data: []byte("data")}
	packet := pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: data}
	x.in = a.rig.in.arriving(packet).Bytes()
	end := data
	end.Flags |= pktbuild.FIN
	packet.Payload = end
	x.end = a.rig.in.arriving(packet).Bytes()
	data.Src = 40000
	packet.Src, packet.TTL, packet.Payload = gatewayOut, 63, data
	x.out = a.rig.out.leaving(packet).Bytes()
	return x
}

// learnt puts the flow's fast-path entry into the table and, by a packet of it, into the flow cache.
func (x cacheTraffic) learnt(t testing.TB, h hook) {
	t.Helper()
	x.put(t, pktbuild.TCPProtocol, x.from, x.to, func(*abiNatAccelEntry) {})
	x.forwards(t, h)
}

func (x cacheTraffic) forwards(t testing.TB, h hook) {
	t.Helper()
	if err := x.ends(t, h, h.redirect, x.out); err != nil {
		t.Error(err)
	}
}

// ends sends a packet and compares what becomes of it.
func (x cacheTraffic) ends(t testing.TB, h hook, want uint32, packet []byte) error {
	t.Helper()
	if verdict, out := x.run(t, h, x.in); verdict != want || !bytes.Equal(out, packet) {
		return fmt.Errorf("verdict %d, want %d; the packet: %s", int32(verdict), int32(want), differ(out, packet))
	}
	return nil
}

func (x cacheTraffic) passes(t testing.TB, h hook) {
	t.Helper()
	if err := x.ends(t, h, h.pass, x.in); err != nil {
		t.Error(err)
	}
}

// forget has the table forget the flow, as when others need its place.
func (x cacheTraffic) forget(t testing.TB) {
	t.Helper()
	key := abiNatFlowKey{Src: addr(x.from.src), Dst: addr(x.from.dst), Sport: be(x.from.sport), Dport: be(x.from.dport), Protocol: pktbuild.TCPProtocol}
	if err := x.engine.maps["accel_entries"].Delete(&key); err != nil {
		t.Fatal(err)
	}
}

// A direction in use is found in the flow cache, without the table, as long as it is valid.
func TestAccelCache(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	for _, h := range hooks {
		t.Run(h.name, func(t *testing.T) {
			x.learnt(t, h)
			x.forget(t)
			x.forwards(t, h)
			if n := a.setCache(t, func(f *cacheEntry) {}); n != 1 {
				t.Fatalf("%d entries, want 1", n)
			}
			for _, other := range hooks {
				if other.name != h.name {
					x.passes(t, other) // the packet that this hook has passed to the stack, to be seen leaving
				}
			}
		})
		t.Run(h.name+" not valid any more", func(t *testing.T) {
			x.learnt(t, h)
			x.forget(t)
			a.setCache(t, func(f *cacheEntry) {
				past := uint64(now()-2) - f[cacheRoute]&0xffffffff
				f[cacheRoute] += past
				f[cacheSum] += past * 0x31358cc5 // of bpf/accel/learn.h: a whole entry
			})
			x.passes(t, h)
		})
	}
}

// What is read of an entry while another processor writes it is never believed: of whatever
// word it is.
func TestAccelCacheHalfWritten(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	for _, h := range hooks {
		for word := cacheKey; word <= cacheSum; word++ {
			a.inTime(t, func(t testing.TB) {
				x.learnt(t, h)
				x.forget(t)
				if n := a.setCache(t, func(f *cacheEntry) { f[word] ^= 1 << 20 }); n != 1 {
					t.Errorf("%d entries, want 1", n)
				}
				x.passes(t, h)
			})
		}
	}
}

// A FIN ends what is in the flow cache even where the table has forgotten the flow.
func TestAccelCacheEnds(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	for _, h := range hooks {
		for _, forgotten := range []bool{false, true} {
			x.learnt(t, h)
			if forgotten {
				x.forget(t)
			}
			if verdict, _ := a.run(t, h, x.end); verdict != h.pass {
				t.Errorf("%s: a FIN: verdict %d, want %d", h.name, int32(verdict), int32(h.pass))
			}
			x.passes(t, h)
		}
	}
}

// More directions than a pair has room for, of one pair: all of them are forwarded, two of
// them from the flow cache.
func TestAccelCacheIsFull(t *testing.T) {
	a := aRig(t).accelerator(t)
	pairs := map[uint64][]uint16{}
	var ports []uint16
	for sport := uint16(1024); len(ports) < 3; sport++ {
		src, dst := insideHost.As4(), world.As4()
		word := func(b [4]byte) uint64 { return uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 }
		swap := func(p uint16) uint64 { return uint64(p>>8 | p<<8) }
		slot := cacheSlot(word(src)|word(dst)<<32, swap(sport)|swap(80)<<16|pktbuild.TCPProtocol<<32)
		pairs[slot/2] = append(pairs[slot/2], sport)
		ports = pairs[slot/2]
		if sport == 65535 {
			t.Fatal("no three ports share a pair")
		}
	}
	for _, h := range hooks {
		a.inTime(t, func(t testing.TB) {
			var flows []cacheTraffic
			for _, sport := range ports {
				x := a.traffic(sport)
				x.put(t, pktbuild.TCPProtocol, x.from, x.to, func(*abiNatAccelEntry) {})
				flows = append(flows, x)
			}
			before := a.counted(t)
			for range 3 {
				for _, x := range flows {
					x.forwards(t, h)
				}
			}
			if n := a.setCache(t, func(*cacheEntry) {}); n != 2 {
				t.Errorf("%s: %d of 3 directions are in the flow cache, want 2", h.name, n)
			}
			name := rulefile.AccelReasons[abiNatAccelReasonNAT_ACCEL_FORWARDED].Name
			if n := a.counted(t)[name] - before[name]; n != 9 {
				t.Errorf("%s: %d packets forwarded, want 9", h.name, n)
			}
		})
	}
}

// BenchmarkAccel reports what the programs take, in nanoseconds a packet, as BenchmarkHit: for
// a packet that is forwarded; and, where it comes in and where it leaves, for one of a flow
// that has only begun, and for one that opens a connection.
func BenchmarkAccel(b *testing.B) {
	a := newRig(b).accelerator(b)
	loopback := Link{Index: int(a.rig.in.link), Ifindex: 1, MTU: insideMTU, Transmit: true, Ethernet: true} // where such runs begin
	if err := a.engine.putLink(loopback, nil); err != nil && !errors.Is(err, unix.EINVAL) {
		b.Fatal(err)
	}
	for i, kind := range []struct {
		name    string
		flags   uint8
		known   bool
		counted string
		program []string
	}{
		{"hit", pktbuild.ACK, true, "forwarded", []string{accelXDP, accelTC}},
		{"below-threshold", pktbuild.ACK, false, "below-threshold", []string{accelTC, accelEgress}},
		{"opens", pktbuild.SYN, false, "tcp-flags", []string{accelTC, accelEgress}},
	} {
		for _, program := range kind.program {
			b.Run(kind.name+" "+program, func(b *testing.B) {
				var took []time.Duration
				same := endpoints{insideHost, world, uint16(i * 10000), 80}
				for b.Loop() {
					for range 5 {
						same.sport++ // another flow
						packet := pktbuild.IPv4{Src: same.src, Dst: same.dst, TTL: 255, Payload: pktbuild.TCP{Src: same.sport, Dst: 80, Flags: kind.flags}}
						frame := pktbuild.Frame{To: make([]byte, 6), From: a.rig.in.neighbor, IP: packet}.Bytes()
						a.revalidated(b, now()-1000)
						n := 6 // less than LEARN_THRESHOLD
						if kind.known {
							a.put(b, pktbuild.TCPProtocol, same, same, func(s *abiNatAccelEntry) { s.Hop &^= 1<<48 - 1 }) // it comes back to whom it was for
							n = 250                                                                                       // its TTL
						}
						before := a.counted(b)
						a.do(b, func() error {
							_, each, err := a.engine.programs[program].Benchmark(frame, n, nil)
							took = append(took, each)
							return err
						})
						if got := a.counted(b)[kind.counted] - before[kind.counted]; program != accelEgress && got != uint64(n) {
							b.Fatalf("%d of %d packets %s: %v", got, n, kind.counted, a.counted(b))
						}
					}
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[0]), "ns/least")
				b.ReportMetric(float64(took[len(took)/2]), "ns/median")
			})
		}
	}
}

// forwarded counts packets without a look at every flow, as counted has.
func (a accelRig) forwarded(t testing.TB) (n uint64) {
	t.Helper()
	var perCPU []abiNatAccelStats
	if err := a.engine.maps["accel_stats"].Lookup(uint32(0), &perCPU); err != nil {
		t.Fatal(err)
	}
	for _, s := range perCPU {
		n += s.Packets[abiNatAccelReasonNAT_ACCEL_FORWARDED]
	}
	return n
}

// BenchmarkAccelFlows reports what packets of so many flows take that the table remembers, by
// the kernel's own clock around the program: those that are found there, and after that
// those in the flow cache. Besides, how much memory it takes, and how long it is to fill.
func BenchmarkAccelFlows(b *testing.B) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Skip(err)
	}
	defer stats.Close()
	r := newRig(b)
	for _, flows := range []int{1_000, 10_000, 100_000, 1_000_000} {
		b.Run(strconv.Itoa(flows), func(b *testing.B) {
			a := r.acceleratorOf(b, 2*flows)
			m := a.engine.maps["accel_entries"]
			keys, entries := make([]abiNatFlowKey, 2*flows), make([]abiNatAccelEntry, 2*flows)
			for i := range keys {
				from := endpoints{netip.AddrFrom4([4]byte{10, byte(i >> 17), byte(i >> 9), byte(i >> 1)}), world, 5000, 53}
				if i%2 == 1 { // the answers
					from = endpoints{world, from.src, 53, 5000}
				}
				keys[i] = abiNatFlowKey{Src: addr(from.src), Dst: addr(from.dst), Sport: be(from.sport), Dport: be(from.dport), Protocol: pktbuild.UDPProtocol}
				entries[i] = abiNatAccelEntry{
					Src: keys[i].Src, Dst: keys[i].Dst, Sport: keys[i].Sport, Dport: keys[i].Dport,
					Hop: a.out.hop(), Mtu: outsideMTU, InLink: a.in.link + 1,
				}
			}
			begun := time.Now()
			if _, err := m.BatchUpdate(keys, entries, nil); err != nil {
				b.Fatal(err)
			}
			filled := time.Since(begun)
			packet := pktbuild.IPv4{Src: insideHost, Dst: world, TTL: 64, Payload: pktbuild.UDP{Src: 5000, Dst: 53, Data: make([]byte, 18)}}
			frame := a.rig.in.arriving(packet).Bytes()
			random := rand.New(rand.NewPCG(1, uint64(flows)))
			var times [2][]float64
			program := a.engine.programs[accelTC]
			for b.Loop() {
				sample := make([]int, 1000)
				for i := range sample {
					sample[i] = 2 * random.IntN(flows)
					s := entries[sample[i]]
					s.Until = now() + 800
					if err := m.Put(&keys[sample[i]], &s); err != nil {
						b.Fatal(err)
					}
				}
				a.revalidated(b, now())
				before := a.forwarded(b)
				for pass := range times {
					was, err := program.Stats()
					if err != nil {
						b.Fatal(err)
					}
					for _, i := range sample {
						copy(frame[26:30], keys[i].Src.Octet[:])
						a.run(b, hook{name: "tc"}, frame)
					}
					is, err := program.Stats()
					if err != nil {
						b.Fatal(err)
					}
					times[pass] = append(times[pass], float64(is.Runtime-was.Runtime)/float64(is.RunCount-was.RunCount))
				}
				if n := a.forwarded(b) - before; n != 2*uint64(len(sample)) {
					b.Fatalf("%d of %d packets forwarded", n, 2*len(sample))
				}
			}
			for pass, name := range []string{"ns/table", "ns/cache"} {
				slices.Sort(times[pass])
				b.ReportMetric(times[pass][0], name+"-least")
				b.ReportMetric(times[pass][len(times[pass])/2], name)
			}
			b.ReportMetric(filled.Seconds()*1e9/float64(len(keys)), "ns/fill")
			if info, err := m.Info(); err == nil {
				if bytes, ok := info.Memlock(); ok {
					b.ReportMetric(float64(bytes)/float64(flows), "bytes/flow")
				}
			}
		})
	}
}

// inWindow runs fn again until all of it was in one window of learn_below_threshold (bpf/accel/learn.h), in
// which nothing was counted before, and no flow has a fast-path entry that was revalidated. What fn puts is
// valid for less than a window: it counts only if it took half of one at most.
func (a accelRig) inWindow(t testing.TB, fn func()) {
	t.Helper()
	const window = 1 << 10 // ticks
	for {
		begin := now()
		a.revalidated(t, begin-1000)
		fn()
		if end := now(); end/window == begin/window && end-begin <= window/2 {
			return
		}
	}
}

// age has the windows that are counted be as many windows ago.
func (a accelRig) age(t testing.TB, windows uint64) {
	t.Helper()
	m := a.engine.maps["admissions"]
	keys, admissions := make([]uint32, m.MaxEntries()), make([]uint64, m.MaxEntries())
	var cursor ebpf.MapBatchCursor
	if _, err := m.BatchLookup(&cursor, keys, admissions, nil); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	for i, slot := range keys {
		if below := admissions[i]; below&0xffffffff != 0 {
			below = below&^0xfff0 | (below-windows<<4)&0xfff0
			if err := m.Put(slot, below); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// asked sends so many packets, and returns how many of them connection tracking was asked
// about, which has no entry; the others were below the threshold.
func (x cacheTraffic) asked(t testing.TB, h hook, packets int) (n int) {
	t.Helper()
	before := x.counted(t)
	for range packets {
		x.passes(t, h)
	}
	after := x.counted(t)
	count := func(reason abiNatAccelReason) int {
		name := rulefile.AccelReasons[reason].Name
		return int(after[name] - before[name])
	}
	n = count(abiNatAccelReasonNAT_ACCEL_UNKNOWN)
	if below := count(abiNatAccelReasonNAT_ACCEL_BELOW_THRESHOLD); n+below != packets {
		t.Errorf("%s: of %d packets %d were asked about and %d were below the threshold", h.name, packets, n, below)
	}
	return n
}

// A direction is asked about from its eighth packet in a window on, and so it is in the window
// after that; one with few packets in each never is.
func TestAccelThreshold(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	type step struct {
		age     uint64 // windows since the step before
		packets int
		asked   int
	}
	for _, h := range hooks {
		for name, steps := range map[string][]step{
			"many":                 {{0, 9, 2}, {0, 3, 3}},
			"few at a time":        {{0, 5, 0}, {1, 6, 0}, {1, 6, 0}, {2, 6, 0}},
			"before":               {{0, 8, 1}, {1, 3, 3}, {1, 3, 0}},
			"many after a silence": {{0, 8, 1}, {2, 3, 0}, {0, 5, 1}},
		} {
			var got []int
			a.inWindow(t, func() {
				got = nil
				for _, s := range steps {
					if s.age > 0 {
						a.age(t, s.age)
					}
					got = append(got, x.asked(t, h, s.packets))
				}
			})
			for i, s := range steps {
				if got[i] != s.asked {
					t.Errorf("%s: %s: of %d packets in step %d %d were asked about, want %d", h.name, name, s.packets, i, got[i], s.asked)
				}
			}
		}
	}
}

// Of two directions with one place to be counted at, both of which are busy, the one that
// comes later has its turn once the other is known.
func TestAccelThresholdShared(t *testing.T) {
	a := aRig(t).accelerator(t)
	slot := func(sport uint16) uint16 {
		src, dst := addr(insideHost).Octet, addr(world).Octet
		ports := uint64(be(80))<<16 | uint64(be(sport)) | uint64(pktbuild.TCPProtocol)<<32
		mix := (uint64(binary.NativeEndian.Uint32(src[:]))|uint64(binary.NativeEndian.Uint32(dst[:]))<<32)*0x9e3779b97f4a7c15 + ports*0xc2b2ae3d27d4eb4f
		hash := uint32(mix >> 32)
		return uint16(hash ^ hash>>15)
	}
	first := map[uint16]uint16{}
	var one, two cacheTraffic
	for sport := uint16(1024); two.from.sport == 0; sport++ {
		if sport == 0 {
			t.Fatal("no two ports share a place")
		}
		if other := first[slot(sport)]; other != 0 {
			one, two = a.traffic(other), a.traffic(sport)
		}
		first[slot(sport)] = sport
	}
	for _, h := range hooks {
		asked := 0
		a.inWindow(t, func() {
			asked = 0
			for range 7 { // in turn: none fills the window by the other's
				asked += one.asked(t, h, 1) + two.asked(t, h, 1)
			}
			if asked > 0 {
				return
			}
			asked = one.asked(t, h, 1) + two.asked(t, h, 8)
		})
		if asked != 2 {
			t.Errorf("%s: %d packets were asked about, want each direction's eighth that counts", h.name, asked)
		}
	}
}

// A flow whose fast-path entry few packets take is not asked about again when its validity ends; one that
// many take is.
func TestAccelSparse(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	for _, h := range hooks {
		for _, c := range []struct {
			packets int
			asked   int
		}{{3, 0}, {4, 1}} {
			asked := 0
			a.inWindow(t, func() {
				x.put(t, pktbuild.TCPProtocol, x.from, x.to, func(*abiNatAccelEntry) {})
				for range c.packets {
					x.forwards(t, h)
				}
				x.expire(t)
				before := a.counted(t)
				x.passes(t, h)
				unknown := rulefile.AccelReasons[abiNatAccelReasonNAT_ACCEL_UNKNOWN].Name
				asked = int(a.counted(t)[unknown] - before[unknown])
			})
			if asked != c.asked {
				t.Errorf("%s: %d packets used the fast path: after that %d were asked about, want %d", h.name, c.packets, asked, c.asked)
			}
		}
	}
}

// expire ends the validity of the traffic's fast-path entry a moment ago.
func (x cacheTraffic) expire(t testing.TB) {
	t.Helper()
	key := abiNatFlowKey{Src: addr(x.from.src), Dst: addr(x.from.dst), Sport: be(x.from.sport), Dport: be(x.from.dport), Protocol: pktbuild.TCPProtocol}
	var s abiNatAccelEntry
	if err := x.engine.maps["accel_entries"].Lookup(&key, &s); err != nil {
		t.Fatal(err)
	}
	s.Until = now() - 200
	if err := x.engine.maps["accel_entries"].Put(&key, &s); err != nil {
		t.Fatal(err)
	}
	x.setCache(t, func(f *cacheEntry) {
		f[cacheRoute] = f[cacheRoute]&^0xffffffff | uint64(s.Until)
	})
}

// A flow that was busy before a silence is asked about with its first packet, one that was
// not, or that was long ago, with its eighth.
func TestAccelBursts(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	key := abiNatFlowKey{Src: addr(x.from.src), Dst: addr(x.from.dst), Sport: be(x.from.sport), Dport: be(x.from.dport), Protocol: pktbuild.TCPProtocol}
	unknown := rulefile.AccelReasons[abiNatAccelReasonNAT_ACCEL_UNKNOWN].Name
	for _, h := range hooks {
		for _, c := range []struct {
			packets int
			silence uint32
			below   int
		}{{3, 2000, 7}, {9, 2000, 0}, {9, 40000, 7}} {
			var below int
			var wrong error // of the run that counts
			a.inWindow(t, func() {
				below, wrong = 0, nil
				var s abiNatAccelEntry
				x.put(t, pktbuild.TCPProtocol, x.from, x.to, func(valid *abiNatAccelEntry) { s = *valid })
				for range c.packets {
					wrong = errors.Join(wrong, x.ends(t, h, h.redirect, x.out))
				}
				a.setCache(t, func(f *cacheEntry) {
					f[cacheRoute] = f[cacheRoute]&^0xffffffff | uint64(now()-c.silence)
				})
				s.Until = now() - c.silence
				if err := a.engine.maps["accel_entries"].Put(&key, &s); err != nil {
					t.Fatal(err)
				}
				a.revalidated(t, now()-1000) // and nothing is counted
				before := a.counted(t)
				for range 8 {
					wrong = errors.Join(wrong, x.ends(t, h, h.pass, x.in))
					if n := a.counted(t); n[unknown] > before[unknown] { // connection tracking has no entry
						break
					}
					below++
				}
			})
			if wrong != nil {
				t.Errorf("%s: %v", h.name, wrong)
			}
			if below != c.below {
				t.Errorf("%s: %d packets, then a silence: after it %d were not asked about, want %d", h.name, c.packets, below, c.below)
			}
		}
	}
}

// The flow cache is looked at if the recency filter shows that something of its hash was revalidated, not too
// long ago; and an old slot may look recent again.
func TestAccelRecencyFilter(t *testing.T) {
	for _, h := range hooks {
		t.Run(h.name, func(t *testing.T) {
			a := aRig(t).accelerator(t)
			x := a.traffic(5000)
			x.learnt(t, h)
			x.forget(t)
			for _, c := range []struct {
				ago    uint32 // ticks
				cached bool
			}{
				{0, true}, {900, true}, {30_000, true}, {1<<24 + 900, true},
				{31_500, false}, {1 << 20, false}, {1 << 23, false}, {1<<24 - 1000, false},
			} {
				a.setCache(t, func(f *cacheEntry) {
					way := f[cacheRoute]&^0xffffffff | uint64(now()+800)
					f[cacheSum] += (way - f[cacheRoute]) * cacheRouteFactor
					f[cacheRoute] = way
				})
				a.revalidated(t, now()-1000)
				a.recency(t, now()-c.ago)
				if c.cached {
					x.forwards(t, h)
				} else {
					x.passes(t, h)
				}
			}
		})
	}
}

// A connection that begins is counted from its first packet on, whatever had its ends before.
func TestAccelBegins(t *testing.T) {
	a := aRig(t).accelerator(t)
	x := a.traffic(5000)
	opens := a.rig.in.arriving(pktbuild.IPv4{Src: x.from.src, Dst: x.from.dst, TTL: 64,
		Payload: pktbuild.TCP{Src: x.from.sport, Dst: x.from.dport, Flags: pktbuild.SYN}}).Bytes()
	for _, h := range hooks {
		for _, c := range []struct {
			name  string
			turn  []byte
			asked int
		}{{"opens", opens, 0}, {"closes", x.end, 3}} {
			asked := 0
			a.inWindow(t, func() {
				asked = x.asked(t, h, 5)
				a.run(t, h, c.turn)
				asked += x.asked(t, h, 5)
			})
			if asked != c.asked {
				t.Errorf("%s: five packets, one that %s it, and five: %d were asked about, want %d", h.name, c.name, asked, c.asked)
			}
		}
	}
}
