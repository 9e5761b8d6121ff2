// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"runtime"
	"testing"

	"github.com/cilium/ebpf"

	"natkit/internal/testutil/ktest"
)

// What natkit says an engine takes of memory is what the kernel says, but for the head of
// each map.
func TestMemoryIsTheKernels(t *testing.T) {
	ktest.Root(t)
	const mapHead = 16 << 10
	bytesOf := func(name string, m *ebpf.Map) int64 {
		t.Helper()
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		bytes, known := info.Memlock()
		if !known {
			t.Fatalf("the kernel does not say what map %s takes", name)
		}
		return int64(bytes)
	}
	check := func(what string, said, is int64, maps int) {
		t.Helper()
		if over := is - said; over < 0 || over > int64(maps)*int64(mapHead+4096*runtime.NumCPU()) {
			t.Errorf("%s: natkit says %d bytes, the kernel %d for %d maps", what, said, is, maps)
		}
	}
	for _, size := range []Size{
		{Sessions: 1 << 17, Mappings: 1 << 17, Sources: 1 << 14, FilterEntries: 1 << 13},
		{Sessions: 100000, Mappings: 70000, Sources: 10000, FilterEntries: 5000, HoldDown: 300000},
		smallSize,
	} {
		e, err := New(size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		var is int64
		for name := range size.entries() {
			is += bytesOf(name, e.maps[name])
		}
		if bytesOf("sources", e.maps["sources"]) < hashBytes(size.Sources, 8, 88) {
			ktest.Unsupported(t, "the kernel counts values only: before Linux 6.4")
		}
		check("engine", size.MemoryBytes(), is, len(size.entries()))
		if got := e.Size(); got != size {
			t.Errorf("the engine's size is %+v, want %+v", got, size)
		}
		const ports = 64512
		specs, err := mapSpecs()
		if err != nil {
			t.Fatal(err)
		}
		slots, err := makeInner(specs.Slots, 3*ports)
		if err != nil {
			t.Fatal(err)
		}
		free, err := makeInner(specs.FreePorts, 3)
		if err != nil {
			t.Fatal(err)
		}
		check("address", AddressBytes(ports), bytesOf("slots", slots)+bytesOf("free_ports", free), 2)
		for _, c := range []*ebpf.Map{slots, free} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
