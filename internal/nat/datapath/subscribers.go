// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
)

// In place of a pool's number: a host's sessions by rules that send them to it, and those that it opens where a map gives
// its address. There are such only where sessions are limited.
const (
	PoolPublished = uint8(abiNatPoolNAT_POOL_PUBLISHED)
	PoolMap       = uint8(abiNatPoolNAT_POOL_MAP)
)

// Subscriber is a subscriber as the maps have it: numbers in place of names.
type Subscriber struct {
	Addr     netip.Addr // the first of its prefix (Size.SubscriberPrefix)
	Pool     uint8      // ExternalAddress.Pool, PoolPublished or PoolMap
	Zone     uint8      // Engine.ZoneName; 0 where interfaces do not tell subscribers apart
	Class    int        // rulefile.Subscribers.Classes, from 1; 0 default; -1 it has opened nothing by the rules in use
	External netip.Addr // not valid: its pool has one address, or none is chosen yet
	Sessions int
	Ports    int // in hold-down too; 0 where ports are not counted
	Since    time.Time
	// Refused are packets, by rulefile.Refusals. One that XDP leaves to tc, which sends the ICMP
	// error, counts there alone.
	Refused [abiNatRefusalNAT_REFUSALS]uint32
	Blocks  []SubscriberBlock
}

// SubscriberBlock is a port block of a subscriber. Its address is another one than the
// subscriber's if that has got another one since.
type SubscriberBlock struct {
	Address netip.Addr
	Ports   rulefile.PortRange
}

// Subscribers calls fn with every subscriber until it returns false; it is fn's to keep.
// Subscribers that come or go during the call may be missed.
func (e *Engine) Subscribers(fn func(*Subscriber) bool) error {
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return fmt.Errorf("read generation: %w", err)
	}
	config, err := e.config()
	if err != nil {
		return err
	}
	boot, err := bootTime()
	if err != nil {
		return err
	}
	classes := config.Lookups&uint32(abiNatLookupNAT_LOOKUP_CLASS) != 0
	externals := map[uint32]netip.Addr{}
	external := func(index uint32) netip.Addr {
		addr, known := externals[index]
		if !known {
			var a abiNatAddress
			if e.m.Addresses.Lookup(index, &a) == nil {
				addr = netip.AddrFrom4(a.Addr.Octet)
			}
			externals[index] = addr
		}
		return addr
	}
	return eachEntry(e.m.Sources, func(_ *abiNatSourceKey, s *abiNatSource) bool {
		if s.Use&gone != 0 {
			return true
		}
		const count = uint64(abiNatUseNAT_USE_COUNT)
		out := Subscriber{
			Addr: netip.AddrFrom4(s.Addr.Octet), Pool: s.Pool, Zone: s.Zone, Class: -1,
			Sessions: int(s.Use & count), Ports: int(s.Use >> uint(abiNatUseNAT_USE_PORT_SHIFT) & count),
			Since: boot.Add(time.Duration(s.SinceNs)), Refused: s.Refused,
		}
		switch {
		case !classes:
			out.Class = 0
		case s.Generation == control.Generation+1:
			out.Class = int(s.Class)
		}
		if s.Placed != 0 {
			out.External = external(uint32(s.Address))
		}
		for _, id := range s.Blocks {
			if id == 0 {
				continue
			}
			out.Blocks = append(out.Blocks, SubscriberBlock{external(id >> uint(abiNatBlockIdNAT_BLOCK_ADDRESS_SHIFT)), blockPorts(id)})
		}
		return fn(&out)
	})
}

// gone is NAT_USE_GONE of bpf/nat/abi.h.
const gone = 1 << 63

// blockPorts are the ports of a block: block_range of bpf/nat/block.h.
func blockPorts(id uint32) rulefile.PortRange {
	granule := id >> uint(abiNatBlockIdNAT_BLOCK_GRANULE_SHIFT) & uint32(abiNatLimitNAT_GRANULES-1)
	order := id&uint32(abiNatBlockIdNAT_BLOCK_ORDER) - 1
	first := granule * uint32(granulePorts)
	return rulefile.PortRange{First: uint16(first), Last: uint16(first + uint32(granulePorts)<<order - 1)}
}

// HoldDown counts for each of these subscribers how many of its ports are in hold-down. It reads
// all ports of their external addresses, some milliseconds for each address: a few subscribers
// are meant, not all.
func (e *Engine) HoldDown(of []Subscriber) ([]int, error) {
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return nil, fmt.Errorf("read what a subscriber is: %w", err)
	}
	at := map[abiNatSourceKey]int{}
	addresses := map[netip.Addr]bool{}
	for i, s := range of {
		at[abiNatSourceKey{Addr: octets(s.Addr), Pool: s.Pool, Zone: s.Zone}] = i
		if s.External.IsValid() {
			addresses[s.External] = true
		}
		for _, b := range s.Blocks {
			if b.Address.IsValid() {
				addresses[b.Address] = true
			}
		}
	}
	counts := make([]int, len(of))
	for addr := range addresses {
		var index uint32
		if err := e.m.AddressIndices.Lookup(octets(addr), &index); errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // it has gone, and its ports before it
		} else if err != nil {
			return nil, fmt.Errorf("index of %s: %w", addr, err)
		}
		err := e.eachHeldDown(index, func(slot *abiNatSlot) {
			key := abiNatSourceKey{Addr: slot.Addr, Pool: slot.Pool, Zone: slot.Zone}
			word := binary.NativeEndian.Uint32(key.Addr.Octet[:])
			binary.NativeEndian.PutUint32(key.Addr.Octet[:], word&^control.SubscriberHosts)
			if i, ours := at[key]; ours {
				counts[i]++
			}
		})
		if err != nil {
			return nil, fmt.Errorf("ports in hold-down of %s: %w", addr, err)
		}
	}
	return counts, nil
}

// eachHeldDown calls fn with each port of an address that is in hold-down and counts against its
// subscriber.
func (e *Engine) eachHeldDown(index uint32, fn func(*abiNatSlot)) error {
	var a abiNatAddress
	if err := e.m.Addresses.Lookup(index, &a); err != nil {
		return err
	}
	if a.PortCount == 0 {
		return nil // given whole
	}
	slots, close, err := e.slotsOf(index, &a)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil // the address has gone, and its mappings before it
	}
	if err != nil {
		return err
	}
	for i := range slots {
		if slot, ok := slots[i].stable(); ok && heldDown(&slot) {
			fn(&slot)
		}
	}
	return close()
}

// heldDown reports whether no session has the port of a slot any more.
func heldDown(slot *abiNatSlot) bool {
	if slot.Held&uint8(abiNatSlotHeldNAT_HELD_COUNTED) == 0 {
		return false
	}
	switch slot.Used {
	case uint8(abiNatSlotUseNAT_SLOT_MAPPING):
		return slot.Refs&uint32(abiNatRefsNAT_REFS_GONE|abiNatRefsNAT_REFS_COUNT) == 0
	case uint8(abiNatSlotUseNAT_SLOT_SESSION):
		return slot.Held&uint8(abiNatSlotHeldNAT_HELD_DOWN) != 0
	}
	return false
}

// BlockUse is how many port blocks an address has. Computed blocks are not among them: each is kept
// for its subscriber, so none of them is free for another, and one in use takes nothing from others.
type BlockUse struct {
	Used int // that subscribers have, of all sizes
	Free int // that any subscriber could get, of the first block's size
}

// BlockUse reads how many of an address's port blocks are in use. An address that gives ports one
// by one has none.
func (e *Engine) BlockUse(a *ExternalAddress) (use BlockUse, err error) {
	if a.Blocks.IsZero() {
		return use, nil
	}
	order := blockOrder(a.Blocks.Size)
	_, err = e.blocksOf(uint32(a.Index), func(b *abiNatBlocks) {
		for word := range b.Free {
			left := atomic.LoadUint64(&b.Free[word]) &^ atomic.LoadUint64(&b.Kept[word])
			use.Free += bits.OnesCount64(blockStarts(left, order))
		}
		for g := range b.Granules {
			if granule := &b.Granules[g]; granule.Computed == 0 {
				use.Used += int(granule.Used & 1)
			}
		}
	})
	return use, err
}

// blockStarts are the bits at which a block of that order may begin: block_starts of
// bpf/nat/block.h.
func blockStarts(free uint64, order uint8) uint64 {
	starts := free
	for n := range order {
		starts &= starts >> (1 << n)
	}
	aligned := uint64(0)
	for at := 0; at < 64; at += 1 << order {
		aligned |= 1 << at
	}
	return starts & aligned
}
