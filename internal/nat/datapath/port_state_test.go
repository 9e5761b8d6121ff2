// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

// ports is one address with a range of ports, and the allocator of bpf/nat/port.h over it.
type ports struct {
	maps        map[string]*ebpf.Map
	programs    map[string]*ebpf.Program
	first, last int
}

var theAllocator *ebpf.Collection

// newPorts makes an address that has the ports first..last, all of them free.
func newPorts(t testing.TB, first, last int) *ports {
	t.Helper()
	ktest.Root(t)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	if theAllocator == nil { // loaded once, because that takes longer than most tests
		spec, err := loadPortTest()
		if err != nil {
			t.Fatal(err)
		}
		if theAllocator, err = ebpf.NewCollection(spec); err != nil {
			t.Fatalf("load: %+v", err)
		}
	}
	p := &ports{maps: theAllocator.Maps, programs: theAllocator.Programs, first: first, last: last}
	addAddress(t, p.maps, 0, abiNatAddress{PortFirst: uint16(first), PortCount: uint16(last - first + 1)})
	return p
}

// addAddress makes an external address with all its ports free. The function that it
// returns takes all back.
func addAddress(t testing.TB, maps map[string]*ebpf.Map, index uint32, a abiNatAddress) (reset func()) {
	t.Helper()
	if a.PortCount == 0 {
		return addWholeAddress(t, maps, index, a)
	}
	count := 3 * uint32(a.PortCount)
	inner, free := newInner(t, "slots", int(count)), newInner(t, "free_ports", 3)
	t.Cleanup(func() { inner.Close() })
	t.Cleanup(func() { free.Close() })
	indices := make([]uint32, count)
	for i := range indices {
		indices[i] = uint32(i)
	}
	reset = func() {
		if allFree(t, free, a.PortCount) {
			return
		}
		for class := range uint32(3) {
			if err := free.Put(class, freePorts(int(a.PortFirst), int(a.PortCount))); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := inner.BatchUpdate(indices, make([]abiNatSlot, count), nil); err != nil {
			t.Fatal(err)
		}
	}
	for class := range uint32(3) {
		if err := free.Put(class, freePorts(int(a.PortFirst), int(a.PortCount))); err != nil {
			t.Fatal(err)
		}
	}
	if err := maps["slots"].Put(index, inner); err != nil {
		t.Fatal(err)
	}
	if err := maps["free_ports"].Put(index, free); err != nil {
		t.Fatal(err)
	}
	if err := maps["addresses"].Put(index, &a); err != nil {
		t.Fatal(err)
	}
	if err := maps["address_indices"].Put(&a.Addr, index); err != nil {
		t.Fatal(err)
	}
	return reset
}

// addWholeAddress is addAddress for one without ports.
func addWholeAddress(t testing.TB, maps map[string]*ebpf.Map, index uint32, a abiNatAddress) (reset func()) {
	t.Helper()
	reset = func() {
		if err := maps["whole_slots"].Put(index, &abiNatSlot{}); err != nil {
			t.Fatal(err)
		}
	}
	reset()
	if err := maps["addresses"].Put(index, &a); err != nil {
		t.Fatal(err)
	}
	if err := maps["address_indices"].Put(&a.Addr, index); err != nil {
		t.Fatal(err)
	}
	return reset
}

// allFree reports whether no port is taken.
func allFree(t testing.TB, free *ebpf.Map, count uint16) bool {
	t.Helper()
	for class := range uint32(3) {
		var p abiNatPorts
		if err := free.Lookup(class, &p); err != nil {
			t.Fatal(err)
		}
		if p.Free != uint64(count) {
			return false
		}
	}
	return true
}

// newInner makes a map as that map of maps wants it: Linux 6.1 compares even their BTF.
func newInner(t testing.TB, name string, entries int) *ebpf.Map {
	t.Helper()
	specs, err := portTestSpec()
	if err != nil {
		t.Fatal(err)
	}
	spec := specs.Maps[name].InnerMap.Copy()
	spec.MaxEntries = uint32(entries)
	m, err := ebpf.NewMap(spec)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

var portTestSpec = sync.OnceValues(loadPortTest)

// freePorts is a bitmap with count bits from first on.
func freePorts(first, count int) *abiNatPorts {
	p := &abiNatPorts{Free: uint64(count)}
	for n := first; n < first+count; n++ {
		p.Words[n/64] |= 1 << (n % 64)
		p.Summary[n/4096] |= 1 << (n / 64 % 64)
	}
	return p
}

func (p *ports) run(t testing.TB, program string, n, wanted int, parity bool, list []byte) int {
	t.Helper()
	ctx := struct {
		_        [8]byte
		Mark     uint32
		_        [20]byte
		Priority uint32
		_        [12]byte
		CB       [5]uint32
		_        [124]byte
	}{Mark: uint32(abiNatClassNAT_TCP), CB: [5]uint32{uint32(n), uint32(wanted)}}
	if parity {
		ctx.CB[2] = 1
	}
	opts := &ebpf.RunOptions{Data: list, DataOut: make([]byte, len(list)), Context: &ctx}
	got, err := p.programs[program].Run(opts)
	if err != nil {
		t.Fatalf("run %s: %v", program, err)
	}
	copy(list, opts.DataOut)
	return int(got)
}

// take takes n ports, as many as there are.
func (p *ports) take(t testing.TB, n, wanted int, parity bool) []int {
	t.Helper()
	var out []int
	for n > 0 {
		list := make([]byte, 2*min(max(n, 16), 1024))
		got := p.run(t, "take", min(n, 1024), wanted, parity, list)
		for i := range got {
			out = append(out, int(binary.LittleEndian.Uint16(list[2*i:])))
		}
		if got < min(n, 1024) {
			break
		}
		n -= got
	}
	return out
}

func (p *ports) give(t testing.TB, ports []int) {
	t.Helper()
	for len(ports) > 0 {
		n := min(len(ports), 1024)
		list := make([]byte, 2*max(n, 16))
		for i, port := range ports[:n] {
			binary.LittleEndian.PutUint16(list[2*i:], uint16(port))
		}
		if got := p.run(t, "give", n, 0, false, list); got != n {
			t.Fatalf("gave %d of %d", got, n)
		}
		ports = ports[n:]
	}
}

// state reads the bitmap and checks that its three parts agree; nobody may be at work.
func (p *ports) state(t testing.TB) map[int]bool {
	t.Helper()
	var inner *ebpf.Map
	if err := p.maps["free_ports"].Lookup(uint32(0), &inner); err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	var v abiNatPorts
	if err := inner.Lookup(uint32(abiNatClassNAT_TCP), &v); err != nil {
		t.Fatal(err)
	}
	free := map[int]bool{}
	for w, word := range v.Words {
		if (word != 0) != (v.Summary[w/64]>>(w%64)&1 == 1) {
			t.Errorf("word %d is %#x, its summary bit says otherwise", w, word)
		}
		for b := range 64 {
			if word>>b&1 == 1 {
				free[w*64+b] = true
			}
		}
	}
	if v.Free != uint64(len(free)) {
		t.Errorf("%d ports are free, the count says %d", len(free), v.Free)
	}
	return free
}

// Every port of a range can be had, each once, and what is given back comes back.
func TestPortsAll(t *testing.T) {
	for _, r := range [][2]int{{1024, 65535}, {1, 65535}, {2000, 2000}, {2000, 2063}, {1000, 1100}, {40000, 49999}, {63, 64}, {65535, 65535}} {
		for _, parity := range []bool{false, true} {
			p := newPorts(t, r[0], r[1])
			count := r[1] - r[0] + 1
			taken := map[int]bool{}
			got := p.take(t, count+1, 2001, parity)
			for _, port := range got {
				if port < r[0] || port > r[1] {
					t.Fatalf("range %v: got port %d", r, port)
				}
				if taken[port] {
					t.Fatalf("range %v: port %d given twice", r, port)
				}
				taken[port] = true
			}
			if len(got) != count {
				t.Fatalf("range %v, parity %v: got %d of %d ports", r, parity, len(got), count)
			}
			if free := p.state(t); len(free) != 0 {
				t.Fatalf("range %v: %d ports are free, none should be", r, len(free))
			}
			back := got[:(count+1)/2]
			p.give(t, back)
			free := p.state(t)
			for _, port := range back {
				if !free[port] {
					t.Fatalf("range %v: port %d was given back and is not free", r, port)
				}
			}
			again := p.take(t, count, 0, parity)
			if len(again) != len(back) || len(free) != len(back) {
				t.Fatalf("range %v: gave back %d, %d are free, got %d", r, len(back), len(free), len(again))
			}
			for _, port := range again {
				if !free[port] {
					t.Fatalf("range %v: got port %d, which was not free", r, port)
				}
				delete(free, port)
			}
		}
	}
}

// The port that is wished for is given if it can be, and another like it if not.
func TestPortsLike(t *testing.T) {
	p := newPorts(t, 512, 65535)
	for _, wanted := range []int{512, 600, 1023, 1024, 5000, 5001, 65535} {
		got := p.take(t, 3, wanted, true)
		if got[0] != wanted {
			t.Errorf("wanted %d, got %d", wanted, got[0])
		}
		for _, port := range got[1:] {
			if port%2 != wanted%2 || (port < 1024) != (wanted < 1024) {
				t.Errorf("wanted %d or one like it, got %d", wanted, port)
			}
		}
		p.give(t, got) // the others are random: one may be what is wanted next
	}
	p.take(t, 512, 1000, false) // the system's ports are gone
	if got := p.take(t, 1, 1000, true); len(got) != 1 || got[0] < 1024 {
		t.Errorf("no system port is left: got %v, want another", got)
	}
}

// A port that is chosen is hard to guess (RFC 6056): all parts of the range are hit.
func TestPortsSpread(t *testing.T) {
	p := newPorts(t, 1024, 65535)
	var tenth [10]int
	for _, port := range p.take(t, 2000, 1, false) {
		tenth[(port-1024)*10/64512]++
	}
	for i, n := range tenth {
		if n < 100 || n > 300 {
			t.Errorf("%d of 2000 ports are in tenth %d of the range, want about 200", n, i)
		}
	}

	// Nor is it one of the first behind a gap: the gateway's own connections take half of
	// the range.
	p = newPorts(t, 1024, 65535)
	var free *ebpf.Map
	if err := p.maps["free_ports"].Lookup(uint32(0), &free); err != nil {
		t.Fatal(err)
	}
	defer free.Close()
	some, rest := freePorts(1024, 32768-1024), freePorts(61000, 65536-61000)
	some.Free += rest.Free
	for i := range some.Words {
		some.Words[i] |= rest.Words[i]
	}
	for i := range some.Summary {
		some.Summary[i] |= rest.Summary[i]
	}
	if err := free.Put(uint32(abiNatClassNAT_TCP), some); err != nil {
		t.Fatal(err)
	}
	behind := 0
	for _, port := range p.take(t, 2000, 1, false) {
		if port >= 61000 && port < 61200 {
			behind++
		}
	}
	if behind > 60 {
		t.Errorf("%d of 2000 ports are the 200 behind the gap, of 36280 in all", behind)
	}
}

// All CPUs take and give at once, in a range that is nearly used up, so that they meet
// in the same words: no port has two owners at any time, and none is lost.
func TestPortsRace(t *testing.T) {
	p := newPorts(t, 3000, 3199)
	var (
		mu    sync.Mutex
		owner = map[int]int{}
		wg    sync.WaitGroup
		runs  int
	)
	claim := func(worker int, ports []int) {
		mu.Lock()
		defer mu.Unlock()
		runs++
		for _, port := range ports {
			if other, ok := owner[port]; ok {
				t.Errorf("port %d belongs to %d and %d", port, other, worker)
			}
			owner[port] = worker
		}
	}
	release := func(ports []int) {
		mu.Lock()
		defer mu.Unlock()
		for _, port := range ports {
			delete(owner, port)
		}
	}
	workers := max(runtime.NumCPU(), 2)
	end := time.Now().Add(time.Second)
	for w := range workers {
		wg.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			pin(t, w%runtime.NumCPU())
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for time.Now().Before(end) {
				got := p.take(t, 1+random.IntN(150), random.IntN(65536), random.IntN(2) == 0)
				claim(w, got)
				random.Shuffle(len(got), func(i, j int) { got[i], got[j] = got[j], got[i] })
				release(got)
				p.give(t, got)
			}
		})
	}
	wg.Wait()
	if free := p.state(t); len(free) != 200 {
		t.Errorf("%d of 200 ports are free at the end", len(free))
	}
	t.Logf("%d workers, %d runs", workers, runs)
}

// All CPUs take and give the same two ports, so that a word becomes empty and is filled
// again all the time: its summary bit must not be lost on the way.
func TestPortsStorm(t *testing.T) {
	p := newPorts(t, 3000, 3001)
	var wg sync.WaitGroup
	for w := range max(runtime.NumCPU(), 2) {
		wg.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			pin(t, w%runtime.NumCPU())
			for range 20 {
				p.run(t, "storm", 50000, 0, false, make([]byte, 64))
			}
		})
	}
	wg.Wait()
	if free := p.state(t); len(free) != 2 {
		t.Errorf("%d of 2 ports are free at the end", len(free))
	}
}

// pin keeps the calling thread on one CPU.
func pin(t testing.TB, cpu int) {
	t.Helper()
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		t.Error(err)
	}
}

// A port taken and given back, at several fills; it is searched, none is wished for. The cost must not depend on the fill.
func BenchmarkPort(b *testing.B) {
	for _, fill := range []float64{0, 10, 50, 99, 99.9} {
		b.Run(fmt.Sprint(fill), func(b *testing.B) {
			p := newPorts(b, 1024, 65535)
			p.take(b, int(64512*fill/100), 1, false)
			b.ResetTimer()
			_, took, err := p.programs["churn"].Benchmark(make([]byte, 64), b.N, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/port")
		})
	}
}
