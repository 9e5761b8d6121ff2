// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"natkit/internal/nat/rulefile"
)

// Apply makes the tables the engine's rules: all of them at once, between two
// packets. What is refused changes nothing: the generation in use is not touched
// before the last step. The calling thread must be in the interfaces' namespace.
//
//  1. addresses that are new: their ports, then themselves; which blocks are computed
//  2. links
//  3. the maps of rules of the generation not in use
//  4. its configuration
//  5. the generation
//  6. port blocks of addresses that gave ports one by one
//  7. addresses that no rule wants any more: nothing new is given from them, and
//     sessions masqueraded behind one that the gateway has lost end;
//     interfaces that the rules do not name are not egress interfaces any more
func (e *Engine) Apply(t *Tables) error {
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return fmt.Errorf("read generation: %w", err)
	}
	slot := (control.Generation + 1) % uint32(abiNatLimitNAT_GENERATIONS)
	var wanted, leaving []ExternalAddress
	for _, a := range t.Addresses {
		if a.Leaving {
			leaving = append(leaving, a)
		} else {
			wanted = append(wanted, a)
		}
	}
	if err := errors.Join(e.putAddresses(wanted), e.keepBlocks(wanted)); err != nil {
		return err
	}
	for _, l := range t.Links {
		if err := e.putLink(l, t.Masks); err != nil {
			return fmt.Errorf("interface %s: %w", l.Name, err)
		}
	}
	if err := e.putRules(slot, t); err != nil {
		return err
	}
	config := t.Config
	if have, err := e.config(); err == nil { // whether somebody reads events is not the file's to say
		config.Flags |= have.Flags & uint32(abiNatConfigFlagNAT_CONFIG_EVENTS)
	}
	if err := e.m.Config.Put(slot, &config); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	recorded, next, err := e.nextLog(t)
	if err == nil && next != 0 {
		err = e.setLog(recorded | next) // what either of the rules want, while packets change over
	}
	if err != nil {
		return err
	}
	// One word of the map is ours to write; GC and packets write the others.
	if err := e.flip(control.Generation + 1); err != nil {
		return err
	}
	if err := e.setLog(next); err != nil {
		return err
	}
	if err := e.adoptGranules(wanted, false); err != nil {
		return err
	}
	if err := e.leaveAddresses(leaving); err != nil {
		return err
	}
	return e.forgetLinks(t.Links)
}

// forgetLinks removes interfaces that are not among these from what packets find.
func (e *Engine) forgetLinks(keep []Link) error {
	var gone []uint32
	err := eachEntry(e.m.LinkIndices, func(ifindex, _ *uint32) bool {
		if !slices.ContainsFunc(keep, func(l Link) bool { return uint32(l.Ifindex) == *ifindex }) {
			gone = append(gone, *ifindex)
		}
		return true
	})
	for _, ifindex := range gone {
		err = errors.Join(err, e.m.LinkIndices.Delete(ifindex))
	}
	return err
}

// putRules fills the maps of one generation. They are made again with as much room as
// they need; the kernel frees those they replace when no packet looks into them. All at
// once, since for each of them it waits for a grace period of RCU.
func (e *Engine) putRules(slot uint32, t *Tables) error {
	spec, err := mapSpecs()
	if err != nil {
		return err
	}
	var puts errgroup.Group
	puts.Go(func() error { return putList(e.m.Rules, spec.Rules, slot, t.Rules) })
	puts.Go(func() error { return putList(e.m.Targets, spec.Targets, slot, t.Targets) })
	puts.Go(func() error { return putTable(e.m.Exact, spec.Exact, slot, t.Exact) })
	puts.Go(func() error { return putTable(e.m.Destinations, spec.Destinations, slot, t.Destinations) })
	puts.Go(func() error { return putTable(e.m.Origins, spec.Origins, slot, t.Origins) })
	puts.Go(func() error { return putTable(e.m.ExcludeSrc, spec.ExcludeSrc, slot, t.ExcludeSrc) })
	puts.Go(func() error { return putTable(e.m.ExcludeDst, spec.ExcludeDst, slot, t.ExcludeDst) })
	puts.Go(func() error { return putTable(e.m.Excludes, spec.Excludes, slot, t.Excludes) })
	puts.Go(func() error { return putList(e.m.SubClasses, spec.SubClasses, slot, t.Classes) })
	puts.Go(func() error { return putTable(e.m.SubPrefixes, spec.SubPrefixes, slot, t.InClass) })
	puts.Go(func() error { return putTable(e.m.Computed, spec.Computed, slot, t.Computed) })
	return puts.Wait()
}

func putList[V any](outer *ebpf.Map, spec *ebpf.MapSpec, slot uint32, values []V) error {
	keys := make([]uint32, len(values))
	for i := range keys {
		keys[i] = uint32(i)
	}
	return fill(outer, spec, slot, keys, values)
}

func putTable[K comparable, V any](outer *ebpf.Map, spec *ebpf.MapSpec, slot uint32, table map[K]V) error {
	keys := make([]K, 0, len(table))
	values := make([]V, 0, len(table))
	for k, v := range table {
		keys, values = append(keys, k), append(values, v)
	}
	return fill(outer, spec, slot, keys, values)
}

// fill makes the inner map of a slot and puts it in place.
func fill[K, V any](outer *ebpf.Map, spec *ebpf.MapSpec, slot uint32, keys []K, values []V) error {
	inner, err := makeInner(spec, max(len(keys), 1))
	if err != nil {
		return fmt.Errorf("make map %s: %w", spec.Name, err)
	}
	defer inner.Close()
	if len(keys) > 0 {
		if _, err := inner.BatchUpdate(keys, values, nil); err != nil {
			return fmt.Errorf("fill map %s with %d entries: %w", spec.Name, len(keys), err)
		}
	}
	if err := outer.Put(slot, inner); err != nil {
		return fmt.Errorf("replace map %s: %w", spec.Name, err)
	}
	return nil
}

// mapSpecs are what the engine's maps are made by, read once.
var mapSpecs = sync.OnceValues(func() (*tcMapSpecs, error) {
	specs := new(tcMapSpecs)
	spec, err := loadTc()
	if err == nil {
		err = spec.Assign(specs)
	}
	return specs, err
})

// makeInner makes a map that may stand in the outer map of that spec.
func makeInner(outer *ebpf.MapSpec, entries int) (*ebpf.Map, error) {
	spec := outer.InnerMap.Copy()
	spec.MaxEntries = uint32(entries)
	return ebpf.NewMap(spec)
}

// flip makes a generation the one in use. Whoever reads the word at that time sees the
// old one or the new: only its lowest bit counts. What GC and packets write
// beside it may be set back by a moment, which costs nothing.
func (e *Engine) flip(generation uint32) error {
	var control abiNatControl
	if err := e.m.Control.Lookup(uint32(0), &control); err != nil {
		return fmt.Errorf("read generation: %w", err)
	}
	control.Generation = generation
	if err := e.m.Control.Put(uint32(0), &control); err != nil {
		return fmt.Errorf("switch to generation %d: %w", generation, err)
	}
	return nil
}

// putLink writes an interface: first what it is, then how it is found.
func (e *Engine) putLink(l Link, masks []Masking) error {
	index := uint32(l.Index)
	v := abiNatLink{Ifindex: uint32(l.Ifindex), Mtu: uint16(min(l.MTU, 65535)), Mac: l.MAC}
	flag := func(f abiNatLinkFlag, on bool) {
		if on {
			v.Flags |= uint16(f)
		}
	}
	flag(abiNatLinkFlagNAT_LINK_INSIDE, l.Inside)
	flag(abiNatLinkFlagNAT_LINK_OUTSIDE, l.Outside)
	flag(abiNatLinkFlagNAT_LINK_XDP, l.Transmit)
	flag(abiNatLinkFlagNAT_LINK_NO_ETHERNET, !l.Ethernet)
	flag(abiNatLinkFlagNAT_LINK_ZONE, l.Zone)
	for _, m := range masks {
		if m.Link == l.Index {
			v.Pool, v.Address = uint16(m.Pool), uint16(m.Address+1)
		}
	}
	if l.Ifindex == 0 {
		return e.common.Links.Put(index, &v)
	}
	if l.Transmit {
		if err := e.common.Transmit.Put(index, uint32(l.Ifindex)); err != nil {
			return fmt.Errorf("let XDP send there: %w", err)
		}
	}
	return errors.Join(e.common.Links.Put(index, &v), e.common.LinkIndices.Put(uint32(l.Ifindex), index))
}

// addressesAtOnce bounds the file descriptors that putAddresses has open.
const addressesAtOnce = 256

// putAddresses writes external addresses: new ones with all their ports free, of those
// that are there only what they are for. Many at once: for every change of an outer map
// the kernel waits as in putRules.
func (e *Engine) putAddresses(all []ExternalAddress) error {
	for some := range slices.Chunk(all, addressesAtOnce) {
		if err := e.putSome(some); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) putSome(some []ExternalAddress) (err error) {
	spec, err := mapSpecs()
	if err != nil {
		return err
	}
	in := addressMaps{
		slots: inners{outer: e.m.Slots, spec: spec.Slots}, free: inners{outer: e.m.FreePorts, spec: spec.FreePorts},
		blocks: inners{outer: e.m.Blocks, spec: spec.Blocks},
	}
	defer func() { err = errors.Join(err, in.slots.close(), in.free.close(), in.blocks.close()) }()
	indices := make([]uint32, len(some))
	values := make([]abiNatAddress, len(some))
	addrs := make([]abiNatAddr, len(some))
	var free, drained []uint32   // of free_addresses
	var adopts []ExternalAddress // without blocks until now
	for i, a := range some {
		index, v := uint32(a.Index), addressOf(a)
		indices[i], values[i], addrs[i] = index, v, v.Addr
		var have abiNatAddress
		known := e.m.Addresses.Lookup(index, &have) == nil && have.Addr == v.Addr && have.PortCount == v.PortCount
		drains := have.Flags&uint16(abiNatAddressFlagNAT_ADDRESS_DRAINING) != 0
		switch {
		case a.OneToOne && a.Draining:
			drained = append(drained, index)
		case v.Block > 0, a.OneToOne && (!known || drains):
			free = append(free, index)
		}
		adopted, err := in.fill(index, v, a, known, have.Block > 0)
		if adopted {
			adopts = append(adopts, a)
		}
		if err != nil {
			return fmt.Errorf("external address %s: %w", a.Addr, err)
		}
	}
	if err := errors.Join(in.slots.put(), in.free.put(), in.blocks.put()); err != nil {
		return err
	}
	if err := e.adoptGranules(adopts, true); err != nil {
		return err
	}
	if _, err := e.m.Addresses.BatchUpdate(indices, values, nil); err != nil {
		return fmt.Errorf("write external addresses: %w", err)
	}
	if err := errors.Join(e.giveAddresses(free, true), e.giveAddresses(drained, false)); err != nil {
		return err
	}
	if _, err := e.m.AddressIndices.BatchUpdate(addrs, indices, nil); err != nil {
		return fmt.Errorf("write external addresses: %w", err)
	}
	return nil
}

// addressOf is an external address as the map of them has it.
func addressOf(a ExternalAddress) abiNatAddress {
	v := abiNatAddress{Addr: abiNatAddr{Octet: a.Addr.As4()}, Link: uint16(a.Link + 1), Pool: a.Pool}
	if a.Ports[0] > 0 {
		v.PortFirst, v.PortCount = a.Ports[0], a.Ports[1]-a.Ports[0]+1
	}
	flag := func(f abiNatAddressFlag, on bool) {
		if on {
			v.Flags |= uint16(f)
		}
	}
	flag(abiNatAddressFlagNAT_ADDRESS_OWNED, a.Owned)
	flag(abiNatAddressFlagNAT_ADDRESS_MASQUERADE, a.Masquerade)
	flag(abiNatAddressFlagNAT_ADDRESS_STATIC, v.PortCount == 0 && !a.OneToOne)
	flag(abiNatAddressFlagNAT_ADDRESS_LEAVING, a.Leaving)
	flag(abiNatAddressFlagNAT_ADDRESS_DRAINING, a.Draining)
	if b := a.Blocks; !b.IsZero() {
		v.Block, v.BlockExtra, v.BlockMore = blockOrder(b.Size)+1, blockOrder(b.Extra)+1, uint8(b.AtMost)
	}
	return v
}

// leaveAddresses keeps addresses for the sessions that they have. A masqueraded one that
// is not the gateway's any more is no external address: the sessions behind it are asked
// once a second (flow_reroute of bpf/nat/flow.h), and end.
func (e *Engine) leaveAddresses(leaving []ExternalAddress) error {
	if err := e.putAddresses(leaving); err != nil {
		return err
	}
	for _, a := range leaving {
		if !a.Masquerade || a.Owned {
			continue
		}
		if err := e.m.AddressIndices.Delete(abiNatAddr{Octet: a.Addr.As4()}); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("external address %s: %w", a.Addr, err)
		}
	}
	return nil
}

// inners are maps to be put into an outer one.
type inners struct {
	outer *ebpf.Map
	spec  *ebpf.MapSpec // of the outer one
	keys  []uint32
	maps  []*ebpf.Map
}

func (in *inners) add(key uint32, m *ebpf.Map) {
	in.keys, in.maps = append(in.keys, key), append(in.maps, m)
}

func (in *inners) put() error {
	if len(in.keys) == 0 {
		return nil
	}
	files := make([]uint32, len(in.maps))
	for i, m := range in.maps {
		files[i] = uint32(m.FD())
	}
	if _, err := in.outer.BatchUpdate(in.keys, files, nil); err != nil {
		return fmt.Errorf("fill map %s: %w", in.spec.Name, err)
	}
	return nil
}

func (in *inners) close() error {
	var errs []error
	for _, m := range in.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// has reports whether the index has a map.
func (in *inners) has(index uint32) bool {
	var id ebpf.MapID
	return in.outer.Lookup(index, &id) == nil
}

// again gives the map that was added last to another index, too.
func (in *inners) again(index uint32) error {
	m, err := in.maps[len(in.maps)-1].Clone()
	if err != nil {
		return fmt.Errorf("map %s of index %d: %w", in.spec.Name, index, err)
	}
	in.add(index, m)
	return nil
}

// share gives an address that has got a new index the map of its old one: mappings
// hold that, and both are the same address from now on.
func (in *inners) share(index, before uint32) error {
	var id ebpf.MapID
	if err := in.outer.Lookup(before, &id); err != nil {
		return fmt.Errorf("map %s of index %d: %w", in.spec.Name, before, err)
	}
	inner, err := ebpf.NewMapFromID(id)
	if err != nil {
		return fmt.Errorf("map %s of index %d: %w", in.spec.Name, before, err)
	}
	in.add(index, inner)
	return nil
}

// addressMaps are the maps of addresses, by index.
type addressMaps struct{ slots, free, blocks inners }

func (in *addressMaps) share(index, before uint32, blocks bool) error {
	err := errors.Join(in.slots.share(index, before), in.free.share(index, before))
	if blocks && err == nil {
		err = in.blocks.share(index, before)
	}
	return err
}

// fill makes or shares the maps that an address lacks: known is one that is there, and inBlocks that
// it gave its ports in blocks. The first result is that its granules are to be adopted.
func (in *addressMaps) fill(index uint32, v abiNatAddress, a ExternalAddress, known, inBlocks bool) (adopts bool, err error) {
	before := uint32(a.Before - 1)
	switch {
	case known && v.Block > 0 && !inBlocks:
		if in.blocks.has(index) {
			return true, nil
		}
		return true, in.makeBlocks(index, v, a, false)
	case known:
		return false, nil
	case a.Before > 0 && v.Block > 0 && !in.blocks.has(before):
		err := in.share(index, before, false)
		if err == nil {
			err = in.makeBlocks(index, v, a, false)
		}
		if err == nil {
			err = in.blocks.again(before) // whose sessions give ports back
		}
		return true, err
	case a.Before > 0:
		return false, in.share(index, before, v.Block > 0)
	case v.Flags&uint16(abiNatAddressFlagNAT_ADDRESS_STATIC) == 0:
		return false, in.makePorts(index, v, a)
	}
	return false, nil
}

// makePorts makes the maps of an address with ports. Those that are in blocks are not free
// otherwise.
func (in *addressMaps) makePorts(index uint32, v abiNatAddress, a ExternalAddress) error {
	if v.PortCount == 0 {
		return nil // it is given whole
	}
	m, err := makeInner(in.slots.spec, int(v.PortCount)*int(abiNatClassNAT_PORT_CLASSES))
	if err != nil {
		return err
	}
	in.slots.add(index, m)
	if m, err = makeInner(in.free.spec, int(abiNatClassNAT_PORT_CLASSES)); err != nil {
		return err
	}
	in.free.add(index, m)
	for class := range uint32(abiNatClassNAT_PORT_CLASSES) {
		ports := portBits(v.PortFirst, v.PortCount, a.Kept(rulefile.Class(class)))
		if v.Block > 0 {
			ports = &abiNatPorts{}
		}
		if err := m.Put(class, ports); err != nil {
			return err
		}
	}
	if v.Block == 0 {
		return nil
	}
	return in.makeBlocks(index, v, a, true)
}

// portBits gives the bits of a range without those that are reserved.
func portBits(first, count uint16, reserved []uint16) *abiNatPorts {
	ports := &abiNatPorts{}
	for port := uint32(first); port < uint32(first)+uint32(count); port++ {
		ports.Words[port/64] |= 1 << (port % 64)
	}
	for _, port := range reserved {
		ports.Words[port/64] &^= 1 << (port % 64)
	}
	for i, word := range ports.Words {
		if word != 0 {
			ports.Summary[i/64] |= 1 << (i % 64)
			ports.Free += uint64(bits.OnesCount64(word))
		}
	}
	return ports
}
