// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"natkit/nat"
)

// Mappings calls fn with every mapping until it returns false. The table is read in
// place and never held; mappings that come or go meanwhile may be missed.
func (e *Engine) Mappings(fn func(*nat.Mapping) bool) error {
	return e.eachMapping(func(place mappingPlace, outside netip.Addr, slot *abiNatSlot) bool {
		sessions := int(slot.Refs & uint32(abiNatRefsNAT_REFS_COUNT))
		filtering := slot.Refs & uint32(abiNatRefsNAT_REFS_FILTERING) >> bits.TrailingZeros32(uint32(abiNatRefsNAT_REFS_FILTERING))
		return fn(&nat.Mapping{
			Class: nat.Class(place.class()).String(), Inside: endpoint(slot.Addr, slot.Port),
			Outside:  netip.AddrPortFrom(outside, place.port()),
			Sessions: sessions, Filtering: (nat.FilteringMode(filtering) + nat.FilterEndpointIndependent).String(), Resting: sessions == 0,
		})
	})
}

// mappingPlace says which slot is a mapping: enum nat_mapping_value of bpf/nat.h.
type mappingPlace uint64

func (p mappingPlace) address() uint32 {
	return uint32(p >> mappingPlace(abiNatMappingValueNAT_MAPPING_ADDRESS_SHIFT))
}

func (p mappingPlace) class() uint32 {
	return uint32(p>>mappingPlace(abiNatMappingValueNAT_MAPPING_CLASS_SHIFT)) & 3
}

func (p mappingPlace) port() uint16 { return uint16(p) }

// eachMapping reads the places of all mappings, and then the slots of one address after
// the other.
func (e *Engine) eachMapping(fn func(place mappingPlace, outside netip.Addr, slot *abiNatSlot) bool) error {
	values, err := tableValues(e.maps["mapping_table"])
	if err != nil {
		return err
	}
	slices.Sort(values)
	for len(values) > 0 {
		address := mappingPlace(values[0]).address()
		n := slices.IndexFunc(values, func(v uint64) bool { return mappingPlace(v).address() != address })
		if n < 0 {
			n = len(values)
		}
		if more, err := e.eachMappingOf(address, values[:n], fn); err != nil || !more {
			return err
		}
		values = values[n:]
	}
	return nil
}

// tableValues reads what a table of bpf/table.h leads to.
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

// tableValueBits is TABLE_VALUE_BITS of bpf/table.h.
const tableValueBits = 40

// eachMappingOf is eachMapping for one address. More is false when fn has had enough.
func (e *Engine) eachMappingOf(address uint32, values []uint64, fn func(mappingPlace, netip.Addr, *abiNatSlot) bool) (more bool, err error) {
	var a abiNatAddress
	if err := e.maps["addresses"].Lookup(address, &a); err != nil {
		return false, fmt.Errorf("read outside address %d: %w", address, err)
	}
	var id ebpf.MapID
	err = e.maps["slots"].Lookup(address, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, nil // the address has gone, and its mappings before it
	}
	if err != nil {
		return false, fmt.Errorf("ports of outside address %d: %w", address, err)
	}
	slots, err := ebpf.NewMapFromID(id)
	if err != nil {
		return false, fmt.Errorf("ports of outside address %d: %w", address, err)
	}
	defer slots.Close()
	outside := netip.AddrFrom4(a.Addr.Octet)
	for _, v := range values {
		place, slot, index := mappingPlace(v), abiNatSlot{}, uint32(0)
		if a.PortCount > 0 {
			index = place.class()*uint32(a.PortCount) + uint32(place.port()-a.PortFirst)
		}
		if err := slots.Lookup(index, &slot); err != nil {
			return false, fmt.Errorf("port %d of outside address %d: %w", place.port(), address, err)
		}
		if slot.Used != uint8(abiNatSlotUseNAT_SLOT_MAPPING) || slot.Refs&uint32(abiNatRefsNAT_REFS_GONE) != 0 {
			continue
		}
		if !fn(place, outside, &slot) {
			return false, nil
		}
	}
	return true, nil
}
