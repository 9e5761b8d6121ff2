// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Mappings calls fn with every mapping until it returns false. The table is read in
// place and never held; mappings that come or go during the call may be missed.
func (e *Engine) Mappings(fn func(*rulefile.Mapping) bool) error {
	explicit, err := e.explicit()
	if err != nil {
		return err
	}
	return e.eachMapping(func(id slotID, outside netip.Addr, slot *abiNatSlot) bool {
		sessions := int(slot.Refs & uint32(abiNatRefsNAT_REFS_COUNT))
		filtering := slot.Refs & uint32(abiNatRefsNAT_REFS_FILTERING) >> bits.TrailingZeros32(uint32(abiNatRefsNAT_REFS_FILTERING))
		inside := endpoint(slot.Addr, slot.Port)
		leases := explicit[leaseOwner{id.class(), slot.Pool, slot.Zone, inside}]
		// A lease is a reference on it, but no session.
		return fn(&rulefile.Mapping{
			Explicit: leases,
			Class:    rulefile.Class(id.class()).String(), Inside: snapshot.EndpointOf(inside), Interface: e.ZoneName(slot.Zone),
			Outside:  snapshot.EndpointFrom(outside, id.port()),
			Sessions: max(sessions-len(leases), 0), Filtering: (rulefile.FilteringMode(filtering) + rulefile.FilterEndpointIndependent).String(), HoldDown: sessions == 0,
		})
	})
}

// slotID says which slot is a mapping: enum nat_mapping_value of bpf/nat/abi.h.
type slotID uint64

func (p slotID) address() uint32 {
	return uint32(p >> slotID(abiNatMappingValueNAT_MAPPING_ADDRESS_SHIFT))
}

func (p slotID) class() uint32 {
	return uint32(p>>slotID(abiNatMappingValueNAT_MAPPING_CLASS_SHIFT)) & 3
}

func (p slotID) port() uint16 { return uint16(p) }

// slotMemory is a slot as it lies in memory: whose it is, and its references.
type slotMemory [2]uint64

// stable reads a slot that packets may be changing; ok is false if it has just become another's.
func (m *slotMemory) stable() (slot abiNatSlot, ok bool) {
	now := slotMemory{atomic.LoadUint64(&m[0]), atomic.LoadUint64(&m[1])}
	if atomic.LoadUint64(&m[0]) != now[0] {
		return slot, false
	}
	return *(*abiNatSlot)(unsafe.Pointer(&now)), true
}

// read is stable; ok is false if it is no mapping, too.
func (m *slotMemory) read() (slot abiNatSlot, ok bool) {
	slot, ok = m.stable()
	return slot, ok && slot.Used == uint8(abiNatSlotUseNAT_SLOT_MAPPING) && slot.Refs&uint32(abiNatRefsNAT_REFS_GONE) == 0
}

// eachMapping reads the slot ids of all mappings, and then the slots of one address after
// the other.
func (e *Engine) eachMapping(fn func(id slotID, outside netip.Addr, slot *abiNatSlot) bool) error {
	values, err := tableValues(e.m.MappingTable)
	if err != nil {
		return err
	}
	slices.Sort(values)
	for len(values) > 0 {
		address := slotID(values[0]).address()
		n := slices.IndexFunc(values, func(v uint64) bool { return slotID(v).address() != address })
		if n < 0 {
			n = len(values)
		}
		if goOn, err := e.eachMappingOf(address, values[:n], fn); err != nil || !goOn {
			return err
		}
		values = values[n:]
	}
	return nil
}

// eachMappingOf is eachMapping for one address; goOn is false when fn has had enough.
func (e *Engine) eachMappingOf(address uint32, values []uint64, fn func(slotID, netip.Addr, *abiNatSlot) bool) (goOn bool, err error) {
	var a abiNatAddress
	if err := e.m.Addresses.Lookup(address, &a); err != nil {
		return false, fmt.Errorf("read external address %d: %w", address, err)
	}
	outside := netip.AddrFrom4(a.Addr.Octet)
	slots, close, err := e.slotsOf(address, &a)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, nil // the address has gone, and its mappings before it
	}
	if err != nil {
		return false, fmt.Errorf("ports of %s: %w", outside, err)
	}
	defer func() { err = errors.Join(err, close()) }()
	for _, v := range values {
		id := slotID(v)
		i := address // of all that are given whole
		if a.PortCount > 0 {
			i = id.class()*uint32(a.PortCount) + uint32(id.port()-a.PortFirst)
		}
		if int(i) >= len(slots) {
			continue // cannot happen
		}
		if slot, ok := slots[i].read(); ok && !fn(id, outside, &slot) {
			return false, nil
		}
	}
	return true, nil
}

// slotsOf lays the slots of an address open: port_slot of bpf/nat/port.h.
func (e *Engine) slotsOf(address uint32, a *abiNatAddress) (slots []slotMemory, close func() error, err error) {
	if a.PortCount == 0 {
		return memoryOf[slotMemory](e.m.WholeSlots)
	}
	var id ebpf.MapID
	if err := e.m.Slots.Lookup(address, &id); err != nil {
		return nil, nil, err
	}
	inner, err := ebpf.NewMapFromID(id)
	if err != nil {
		return nil, nil, err
	}
	defer inner.Close()
	return memoryOf[slotMemory](inner)
}

// tableValues reads what a table of bpf/lib/table.h leads to.
func tableValues(m *ebpf.Map) ([]uint64, error) {
	buckets, close, err := memoryOf[abiNatBucket](m)
	if err != nil {
		return nil, err
	}
	var values []uint64
	for i := range buckets {
		for j := range buckets[i].Entries {
			if entry := atomic.LoadUint64(&buckets[i].Entries[j]); entry != 0 {
				values = append(values, entry&(1<<tableValueBits-1))
			}
		}
	}
	return values, close()
}

// tableValueBits is TABLE_VALUE_BITS of bpf/lib/table.h.
const tableValueBits = 40
