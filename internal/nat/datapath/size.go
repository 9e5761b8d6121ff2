// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/bits"
	"unsafe"

	"github.com/cilium/ebpf"
)

// Size is how much an engine can hold. It is fixed when the engine is made: maps
// do not grow, so that memory is known before the first packet.
type Size struct {
	Sessions      int // each takes two flows
	Mappings      int // internal endpoints with an external port
	Sources       int // internal hosts
	FilterEntries int // endpoints and addresses they have sent to, for address-dependent filtering
	// SubscriberPrefix is the length of the prefix whose hosts are one subscriber; 0 is 32.
	SubscriberPrefix int
	Zones            bool // inside interfaces are zones
	HoldDown         int  // ports that rest without a mapping, beside as many as there are mappings; what finds no room does not rest
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
		tcMapFlows:         2 * uint32(s.Sessions),
		tcMapFlowDetails:   2 * uint32(s.Sessions),
		tcMapFlowBits:      (2*uint32(s.Sessions) + 63) / 64,
		tcMapFreeFlows:     uint32(s.Sessions),
		tcMapFlowTable:     tableBuckets(2 * s.Sessions),
		tcMapMappingTable:  tableBuckets(s.Mappings),
		tcMapMappingQueue:  uint32(s.Mappings + s.HoldDown),
		tcMapSources:       uint32(s.Sources),
		tcMapFilterEntries: uint32(s.FilterEntries),
	}
}

// tableBuckets is how many buckets of seven a table of bpf/lib/table.h has for so many entries:
// a power of two, with four in each on average at most, so that none finds no room.
func tableBuckets(entries int) uint32 {
	buckets := uint32(1) << bits.Len(uint(max(entries-1, 0))/4)
	return max(buckets, tableReach)
}

// tableReach is TABLE_REACH of bpf/lib/table.h.
const tableReach = 16

// MemoryBytes is what the maps of this size take in the kernel, without those that
// depend on the number of external addresses (AddressBytes) and rules.
func (s Size) MemoryBytes() int64 {
	n := s.entries()
	return arrayBytes(n[tcMapFlows], 64) + arrayBytes(n[tcMapFlowDetails], 8) + arrayBytes(n[tcMapFlowBits], 8) + queueBytes(n[tcMapFreeFlows], 4) +
		arrayBytes(n[tcMapFlowTable], 64) + arrayBytes(n[tcMapMappingTable], 64) + queueBytes(n[tcMapMappingQueue], 8) +
		hashBytes(s.Sources, 8, 88) + hashBytes(s.FilterEntries, 12, 16)
}

// arrayBytes is what an array takes that can be read in place: whole pages.
func arrayBytes(entries uint32, value int) int64 {
	const page = 4096
	return (int64(max(entries, 1))*int64(value) + page - 1) &^ (page - 1)
}

func queueBytes(entries uint32, value int) int64 { return int64(max(entries, 1)+1) * int64(value) }

// AddressBytes is what one external address with that many ports takes.
func AddressBytes(ports int) int64 {
	const portsBytes = (1024 + 16 + 1) * 8
	return 3*portsBytes + arrayBytes(3*uint32(ports), 16)
}

// BlockBytes is what an external address takes beside, if its ports are given in blocks.
func BlockBytes() int64 { return arrayBytes(1, int(unsafe.Sizeof(abiNatBlocks{}))) }

// hostBits are the bits of an address behind a prefix, as they lie in memory.
func hostBits(prefix int) uint32 {
	if prefix == 0 {
		return 0
	}
	return bits.ReverseBytes32(uint32(1<<(32-prefix) - 1))
}

func prefixOf(hosts uint32) int { return (32 - bits.OnesCount32(hosts)) % 32 }

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
