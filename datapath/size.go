// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/bits"

	"github.com/cilium/ebpf"
)

// Size is how much an engine can hold. It is fixed when the engine is made: maps
// do not grow, so that memory is known before the first packet.
type Size struct {
	Sessions int // each takes two flows
	Mappings int // inside endpoints with an outside port
	Sources  int // inside hosts
	Contacts int // endpoints and addresses they have sent to, for address-dependent filtering
	Resting  int // ports that rest without a mapping: all there are, where mapping depends on the address and port
}

// What the kernel adds to an element of a preallocated hash map (struct htab_elem
// with a lock-free list node: 48 bytes, Linux 6.1 to 6.18) and the size of one of
// its buckets, of which there are as many as elements, rounded up to a power of two.
const (
	hashElementBytes = 48
	hashBucketBytes  = 16
)

// entries gives the maps whose size the rule file decides.
func (s Size) entries() map[string]uint32 {
	return map[string]uint32{
		"flows":         uint32(2 * s.Sessions),
		"session_queue": uint32(s.Sessions),
		"mappings":      uint32(s.Mappings),
		"mapping_queue": uint32(s.Mappings + s.Resting),
		"sources":       uint32(s.Sources),
		"contacts":      uint32(s.Contacts),
	}
}

// MemoryBytes is what the maps of this size take in the kernel, without those that
// depend on the number of outside addresses (AddressBytes) and rules.
func (s Size) MemoryBytes() int64 {
	return hashBytes(2*s.Sessions, 16, 64) + hashBytes(s.Mappings, 8, 8) + hashBytes(s.Sources, 8, 16) +
		hashBytes(s.Contacts, 12, 16) + int64(s.Sessions)*16 + int64(s.Mappings+s.Resting)*8
}

// AddressBytes is what one outside address with that many ports takes.
func AddressBytes(ports int) int64 {
	const portsBytes = (1024 + 16 + 1) * 8
	return 3*portsBytes + 3*int64(ports)*16
}

func hashBytes(entries, key, value int) int64 {
	if entries == 0 {
		return 0
	}
	element := int64(hashElementBytes + roundUp8(key) + roundUp8(value))
	buckets := int64(1) << bits.Len(uint(entries-1))
	return int64(entries)*element + buckets*hashBucketBytes
}

func roundUp8(n int) int { return (n + 7) &^ 7 }

// resize puts sizes into the maps of a collection before it is loaded.
func resize(spec *ebpf.CollectionSpec, s Size) {
	for name, n := range s.entries() {
		if m := spec.Maps[name]; m != nil {
			m.MaxEntries = max(n, 1)
		}
	}
}
