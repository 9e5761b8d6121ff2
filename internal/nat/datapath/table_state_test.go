// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"natkit/internal/testutil/ktest"
)

// tableTest is a table of few buckets, without elements.
type tableTest struct{ *ebpf.Collection }

func newTableTest(t *testing.T, buckets uint32) tableTest {
	t.Helper()
	ktest.Root(t)
	spec, err := loadTableTest()
	if err != nil {
		t.Fatal(err)
	}
	spec.Maps["flow_table"].MaxEntries = buckets
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	t.Cleanup(coll.Close)
	if err := coll.Maps["control"].Put(uint32(0), &abiNatControl{FlowMask: buckets - 1, Seed: [2]uint64{rand.Uint64(), rand.Uint64()}}); err != nil {
		t.Fatal(err)
	}
	return tableTest{coll}
}

// run lets a program work on values, and returns its results.
func (c tableTest) run(t *testing.T, program string, values ...uint32) (results []int32) {
	t.Helper()
	const most = 256
	for len(values) > 0 {
		part := values[:min(most, len(values))]
		values = values[len(part):]
		frame := make([]byte, 4*most)
		for i, v := range part {
			binary.NativeEndian.PutUint32(frame[4*i:], v)
		}
		opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)), Context: &skbContext{CB: [5]uint32{uint32(len(part))}}}
		if n, err := c.Programs[program].Run(opts); err != nil || int(n) != len(part) {
			t.Fatalf("%s: %d of %d, %v", program, n, len(part), err)
		}
		for i := range part {
			results = append(results, int32(binary.NativeEndian.Uint32(opts.DataOut[4*i:])))
		}
	}
	return results
}

// What is inserted is found, what is there already or has no room is refused, what is
// removed is gone; all that with a table that is full now and then. Only the value that is
// named is removed.
func TestTable(t *testing.T) {
	const exists, full = -17, -7
	for _, buckets := range []uint32{8, 64} {
		c := newTableTest(t, buckets)
		room := int(buckets) * len(abiNatBucket{}.Entries)
		there := map[uint32]uint32{} // key -> value
		refused := 0
		for range 200 {
			wish := rand.IntN(room + room/4)
			for len(there) < wish {
				value := rand.Uint32() & 0x3fffffff
				before, known := there[value&0xffff]
				want := int32(0)
				if known {
					want = exists
				}
				got := c.run(t, "insert", value)[0]
				if got == full && !known && len(there) > room/2 {
					refused++
					break
				}
				if got != want {
					t.Fatalf("insert %x into %d buckets with %d entries: %d, want %d", value, buckets, len(there), got, want)
				}
				if known {
					if c.run(t, "remove", value); before == value {
						delete(there, value&0xffff)
					}
				} else {
					there[value&0xffff] = value
				}
			}
			for key, value := range there {
				if len(there) <= wish/2 {
					break
				}
				c.run(t, "remove", value)
				delete(there, key)
			}
			var keys []uint32
			for key := range uint32(0x10000) {
				if _, known := there[key]; known || key%64 == 0 {
					keys = append(keys, key)
				}
			}
			for i, got := range c.run(t, "find", keys...) {
				want := int32(-1)
				if value, known := there[keys[i]]; known {
					want = int32(value)
				}
				if got != want {
					t.Fatalf("find %x among %d: %x, want %x", keys[i], len(there), got, want)
				}
			}
		}
		if refused == 0 {
			t.Errorf("a table of %d buckets was never full", buckets)
		}
	}
}

// A table at the limit that it was made for: nothing is ever refused, and however often its
// keys change, what is not there is mostly found out by reading one bucket.
func TestTableTurnover(t *testing.T) {
	const entriesMax = 16384
	buckets := tableBuckets(entriesMax)
	if buckets != entriesMax/4 {
		t.Fatalf("%d buckets, want no more than are needed", buckets)
	}
	c := newTableTest(t, buckets)
	keys := make([]uint32, 0x10000)
	for i := range keys {
		keys[i] = uint32(i)
	}
	insert := func(keys []uint32) {
		t.Helper()
		for i, got := range c.run(t, "insert", keys...) {
			if got != 0 {
				t.Fatalf("key %x is refused: %d", keys[i], got)
			}
		}
	}
	lines := func() float64 {
		sum := uint32(0)
		for _, bucket := range entries[uint32, abiNatBucket](t, c.Maps["flow_table"]) {
			sum += 1 + bucket.Reach
		}
		return float64(sum) / float64(buckets)
	}
	rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	insert(keys[:entriesMax])
	first := lines()
	for range 30 {
		c.run(t, "remove", keys[:entriesMax/2]...)
		insert(keys[entriesMax : entriesMax+entriesMax/2])
		keys = append(keys[entriesMax/2:], keys[:entriesMax/2]...)
	}
	last := lines()
	t.Logf("a miss reads %.2f buckets at first, %.2f in the end", first, last)
	if last > 1.25 { // 1.41 if look-ups never looked less far again
		t.Errorf("a miss reads %.2f buckets after a turnover, %.2f before", last, first)
	}
}

// CPUs that want the same keys, and the last room that there is, at the same time.
func TestTableRace(t *testing.T) {
	for _, buckets := range []uint32{8, 64} {
		c := newTableTest(t, buckets)
		// All but a few of the entries of the small table are another's, so that homes meet.
		var others []uint32
		for key := uint32(1000); len(others) < 50 && buckets == 8; key++ {
			if c.run(t, "insert", key)[0] == 0 {
				others = append(others, key)
			}
		}
		var inserted [64]uint32
		var wg sync.WaitGroup
		for cpu := range min(max(runtime.NumCPU(), 2), len(inserted)) {
			wg.Go(func() {
				pin(t, cpu%runtime.NumCPU())
				for range 40 {
					opts := &ebpf.RunOptions{Data: make([]byte, 64), DataOut: make([]byte, 64), Context: &skbContext{CB: [5]uint32{10000, uint32(cpu + 1)}}}
					wrong, err := c.Programs["storm"].Run(opts)
					if err != nil || wrong != 0 {
						t.Errorf("%d times somebody else had the key, or found another value (%v)", wrong, err)
						return
					}
					inserted[cpu] += binary.NativeEndian.Uint32(opts.DataOut)
				}
			})
		}
		wg.Wait()
		t.Logf("%d buckets: inserted %v", buckets, inserted[:min(max(runtime.NumCPU(), 2), len(inserted))])
		c.run(t, "remove", others...)
		for i, bucket := range entries[uint32, abiNatBucket](t, c.Maps["flow_table"]) {
			if bucket.Lock != 0 || bucket.Entries != [7]uint64{} {
				t.Errorf("bucket %d is not empty: %+v", i, bucket)
			}
		}
	}
}

// Keys as networks have them fill buckets as evenly as chance would, in all bits that count;
// and with another seed others.
func TestTableHash(t *testing.T) {
	const n, buckets = 1 << 16, 1 << 14
	key := func(a, b, c, d byte, sport, dport uint16) abiNatFlowKey {
		return abiNatFlowKey{Src: abiNatAddr{Octet: [4]uint8{a, b, c, d}}, Dst: abiNatAddr{Octet: [4]uint8{198, 51, 100, 9}}, Sport: be(sport), Dport: be(dport), Protocol: 17}
	}
	for name, keys := range map[string]func(i int) abiNatFlowKey{
		"ports":     func(i int) abiNatFlowKey { return key(192, 168, 1, 2, uint16(i), 53) },
		"hosts":     func(i int) abiNatFlowKey { return key(10, 0, byte(i>>8), byte(i), 5000, 53) },
		"networks":  func(i int) abiNatFlowKey { return key(byte(i>>8), byte(i), 1, 2, 5000, 53) },
		"both":      func(i int) abiNatFlowKey { return key(10, 0, byte(i>>10), byte(i>>2), 5000+uint16(i&3), 53) },
		"receivers": func(i int) abiNatFlowKey { return key(192, 168, 1, 2, 5000, uint16(i)) },
		"powers":    func(i int) abiNatFlowKey { return key(10, byte(i), 0, 0, uint16(i>>8)<<8, 0) },
	} {
		var homes [2][n]uint64
		for s := range homes {
			seed := [2]uint64{rand.Uint64(), rand.Uint64()}
			for _, shift := range []int{0, 8, 41, 50} { // of the bucket and of the tag
				var fill [buckets]int
				for i := range n {
					k := keys(i)
					hash := tableHash(seed, &k)
					homes[s][i] = hash
					fill[hash>>shift%buckets]++
				}
				chi := 0.0
				for _, f := range fill {
					d := float64(f) - n/buckets
					chi += d * d / (n / buckets)
				}
				// buckets -1 is expected; ten standard deviations are 1810.
				if chi > buckets+1810 {
					t.Errorf("%s, seed %x: bits from %d on are not spread: chi square %.0f, want about %d", name, seed, shift, chi, buckets)
				}
			}
		}
		same, differ := 0, 0
		for i := range n {
			if homes[0][i]%buckets == homes[1][i]%buckets {
				same++
			}
			differ += bits.OnesCount64(homes[0][i] ^ homes[1][i])
		}
		if same > 4*n/buckets+32 {
			t.Errorf("%s: %d of %d keys are in the same bucket with another seed", name, same, n)
		}
		if mean := float64(differ) / n; mean < 28 || mean > 36 {
			t.Errorf("%s: with another seed %.1f of 64 bits differ", name, mean)
		}
	}
}
