// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
)

// granulePorts is how many ports a granule has, of which blocks consist.
const granulePorts = int(abiNatLimitNAT_PORTS) / int(abiNatLimitNAT_GRANULES)

// blockOrder is the size of a block as the maps have it.
func blockOrder(ports int) uint8 { return uint8(bits.TrailingZeros(uint(ports / granulePorts))) }

// subscribers gives the classes and what they may have.
func (c *compiler) subscribers() {
	f := c.file
	var share rulefile.Share
	if f.Subscribers.Prefix == 0 {
		share = rulefile.Share{Sessions: f.Limits.SessionsPerSource}
	} else {
		share = f.Subscribers.Default
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_COUNT_PORTS)
	}
	if f.HasBlocks() {
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_COUNT_PORTS)
	}
	c.t.Config.Limits = limitsOf(share)
	limited := share.Sessions > 0 || share.NewPerSecond > 0
	c.t.Classes = make([]abiNatLimits, 1, 1+len(f.Subscribers.Classes))
	for i := range f.Subscribers.Classes {
		class := &f.Subscribers.Classes[i]
		for _, p := range class.Of {
			c.t.InClass[abiNatPrefixKey{Prefixlen: uint32(p.Bits()), Addr: octets(p.Addr())}] = uint32(len(c.t.Classes))
			c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_CLASS)
		}
		c.t.Classes = append(c.t.Classes, limitsOf(class.Share))
		limited = limited || class.Sessions > 0 || class.NewPerSecond > 0
	}
	if limited {
		c.t.Config.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_COUNT_SESSIONS)
	}
}

func limitsOf(s rulefile.Share) abiNatLimits {
	l := abiNatLimits{Sessions: uint32(s.Sessions), Ports: uint32(s.Ports)}
	if s.NewPerSecond > 0 {
		l.IntervalNs = uint64(1e9) / uint64(s.NewPerSecond)
		l.BurstNs = uint64(s.Burst-1) * l.IntervalNs
	}
	return l
}

// computed gives the blocks of a pool that follow from the file, and the range of ports that they
// are of each address.
func (c *compiler) computed(named *rulefile.Pool, p pool) (ports [2]uint16) {
	l := c.file.Layout(named)
	if l == nil || l.Rows == 0 {
		return ports
	}
	c.t.Config.Lookups |= uint32(abiNatLookupNAT_LOOKUP_COMPUTED)
	for _, source := range l.Sources {
		key := abiNatComputedKey{Prefixlen: 32 + uint32(source.Prefix.Bits()), Pool: uint32(p.number) << 24, Addr: octets(source.Prefix.Addr())}
		c.t.Computed[key] = abiNatComputed{
			Number: source.Number, First: uint32(p.first), Count: uint32(p.count), Granule: uint16(l.FirstPort / granulePorts), Rows: uint16(l.Rows),
			Hosts: uint8(l.HostBits), Order: blockOrder(named.Blocks.Size), Blocks: uint8(l.Each),
		}
	}
	return [2]uint16{uint16(l.FirstPort), uint16(l.FirstPort + l.Rows*l.Each*named.Blocks.Size - 1)}
}

// keepBlocks makes known which granules of addresses are of computed blocks.
func (e *Engine) keepBlocks(addresses []ExternalAddress) error {
	type keep struct{ Index, First, Granules uint32 } // struct keep of bpf/nat/ports.bpf.c
	var all []keep
	for _, a := range addresses {
		if !a.Blocks.IsZero() {
			first := int(a.Computed[0]) / granulePorts
			all = append(all, keep{uint32(a.Index), uint32(first), uint32((int(a.Computed[1])+1)/granulePorts - first)})
		}
	}
	for some := range slices.Chunk(all, portChangesPerRun) {
		data, err := binary.Append(make([]byte, 14), binary.NativeEndian, some)
		if err != nil {
			return err
		}
		if _, err := e.run(blocksKeep, &ebpf.RunOptions{Data: data}); err != nil {
			return fmt.Errorf("keep computed port blocks: %w", err)
		}
	}
	return nil
}

// makeBlocks makes the map of an address that gives ports in blocks; free: nobody has any of its
// ports. If not, granules become free by adoptGranules, and as their last port does.
func (in *addressMaps) makeBlocks(index uint32, v abiNatAddress, a ExternalAddress, free bool) error {
	b := &abiNatBlocks{}
	for class := range b.Given {
		given := portBits(v.PortFirst, v.PortCount, a.Kept(rulefile.Class(class)))
		first, last := int(v.PortFirst), int(v.PortFirst)+int(v.PortCount)-1
		for g := range given.Words {
			if g*granulePorts >= first && (g+1)*granulePorts-1 <= last {
				b.Given[class][g] = given.Words[g]
			}
		}
	}
	for g := range b.Given[0] {
		if !free || b.Given[rulefile.ClassTCP][g] == 0 || b.Given[rulefile.ClassUDP][g] == 0 {
			continue
		}
		b.Free[g/64] |= 1 << (g % 64)
		b.Count++
		for class := range b.Given {
			p := &b.Ports[class]
			if p.Words[g] = b.Given[class][g]; p.Words[g] != 0 {
				p.Summary[g/64] |= 1 << (g % 64)
				p.Free += uint64(bits.OnesCount64(p.Words[g]))
			}
		}
	}
	m, err := makeInner(in.blocks.spec, 1)
	if err != nil {
		return err
	}
	in.blocks.add(index, m)
	return m.Put(uint32(0), b)
}

// adoptGranules makes granules of addresses whose ports were given one by one free for blocks,
// where nobody has any: all, or all but the last sixteenth, so that nobody is refused a port
// before packets take those of blocks.
func (e *Engine) adoptGranules(addresses []ExternalAddress, most bool) error {
	for _, a := range addresses {
		if a.Blocks.IsZero() {
			continue
		}
		granules := (int(a.Ports[1]) + 1) / granulePorts
		if most {
			granules -= 1 + (int(a.Ports[1])-int(a.Ports[0]))/granulePorts/16
		}
		data := make([]byte, 14, 14+8)
		data = binary.NativeEndian.AppendUint32(data, uint32(a.Index))
		data = binary.NativeEndian.AppendUint32(data, uint32(max(granules, 0)))
		if _, err := e.run(blocksAdopt, &ebpf.RunOptions{Data: data}); err != nil {
			return fmt.Errorf("set up port blocks of %s: %w", a.Addr, err)
		}
	}
	return nil
}

// blocksOf reads the blocks of an address in place; there are none where it gives ports one by one.
func (e *Engine) blocksOf(index uint32, read func(*abiNatBlocks)) (there bool, err error) {
	var id ebpf.MapID
	if err := e.m.Blocks.Lookup(index, &id); errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("port blocks of address %d: %w", index, err)
	}
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return false, fmt.Errorf("port blocks of address %d: %w", index, err)
	}
	defer m.Close()
	b, close, err := memoryOf[abiNatBlocks](m)
	if err != nil {
		return false, err
	}
	read(&b[0])
	return true, close()
}
