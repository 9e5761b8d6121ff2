// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// memoryOf lays an array map open to be read in place, without a system call for each
// element; the map must have BPF_F_MMAPABLE. Packets go on writing it: who reads more than
// a word of an element has to find out whether it changed in between. T is the map's type, as
// long as the kernel's elements. The elements are not to be used after close.
func memoryOf[T any](m *ebpf.Map) (elements []T, close func() error, err error) {
	var element T
	entries := int(m.MaxEntries())
	if size := int(unsafe.Sizeof(element)); size != roundUp8(int(m.ValueSize())) {
		return nil, nil, fmt.Errorf("read map %s: elements of %d bytes as %d", m, m.ValueSize(), size)
	}
	bytes, err := unix.Mmap(m.FD(), 0, entries*int(unsafe.Sizeof(element)), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("read map %s: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&bytes[0])), entries), func() error { return unix.Munmap(bytes) }, nil
}
