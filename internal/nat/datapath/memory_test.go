// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

// What is written to a map is seen in its memory, at once and at the right place; what can't
// be read so is refused.
func TestMemory(t *testing.T) {
	ktest.Root(t)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	type element struct {
		A, B uint64
		C    uint32
		_    uint32
	}
	array := func(flags uint32) *ebpf.Map {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: 1000, Flags: flags})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	m := array(unix.BPF_F_MMAPABLE)
	all, close, err := memoryOf[element](m)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1000 || all[0] != (element{}) || all[999] != (element{}) {
		t.Errorf("%d elements, the first %+v, the last %+v", len(all), all[0], all[len(all)-1])
	}
	for _, i := range []uint32{0, 500, 999} {
		want := element{A: uint64(i) + 1, B: 2, C: i}
		if err := m.Put(i, &want); err != nil {
			t.Fatal(err)
		}
		if all[i] != want {
			t.Errorf("element %d is %+v, want %+v", i, all[i], want)
		}
	}
	if err := close(); err != nil {
		t.Error(err)
	}
	if _, _, err := memoryOf[uint64](m); err == nil {
		t.Error("elements of 24 bytes were read as 8")
	}
	if _, _, err := memoryOf[element](array(0)); err == nil {
		t.Error("a map that can't be mapped was")
	}
}
