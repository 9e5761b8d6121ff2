// SPDX-License-Identifier: Apache-2.0

// Subscribers and port blocks of the model: what a subscriber has is counted again each time.

package datapath

import (
	"fmt"
	"net/netip"
	"slices"

	"natkit/internal/nat/rulefile"
)

// modelBlock is ports of an external address that one subscriber alone may have.
type modelBlock struct {
	owner modelHost
	addr  netip.Addr
	ports rulefile.PortRange
}

// In place of a pool, as enum nat_pool has it.
const (
	poolPublished = "(published)"
	poolMap       = "(map)"
)

func (m *model) subscriber(pool string, host netip.Addr) modelHost {
	return modelHost{pool, m.file.Subscribers.Of(host)}
}

// maySession reports whether the subscriber may have more sessions than it has, and so many.
func (m *model) maySession(s modelHost, more int) bool {
	_, share := m.file.ShareOf(s.host)
	return share.Sessions == 0 || m.sessions[s]+more < share.Sessions
}

// mayPort reports whether the subscriber may have one more port.
func (m *model) mayPort(s modelHost) bool {
	_, share := m.file.ShareOf(s.host)
	has := 0
	for _, mapping := range m.held {
		if mapping.class < rulefile.PortClasses && m.subscriber(mapping.pool, mapping.inside.Addr()) == s {
			has++
		}
	}
	return m.file.Subscribers.Prefix == 0 || share.Ports == 0 || has < share.Ports
}

func (m *model) blocksOf(pool string) rulefile.Blocks {
	if p := m.file.Pool(pool); p != nil {
		return p.Blocks
	}
	return rulefile.Blocks{}
}

// computedFree gives the first computed block of a subscriber of which nobody has a port.
func (m *model) computedFree(s modelHost) (free rulefile.ComputedBlock, ok bool) {
	l := m.layouts[s.pool]
	if l == nil {
		return free, false
	}
	for _, block := range l.Blocks(s.host) {
		ports := rulefile.PortRange{First: block.FirstPort, Last: block.LastPort}
		taken := func(b modelBlock) bool { return b.addr == block.Address && b.ports.Overlaps(ports) }
		if !l.Pool.Drains(block.Address) && !slices.ContainsFunc(m.blocks, taken) {
			return block, true
		}
	}
	return free, false
}

// reserved reports whether some of the ports are for computed blocks alone.
func (m *model) reserved(addr netip.Addr, ports rulefile.PortRange) bool {
	for _, l := range m.layouts {
		if _, of := l.Pool.IndexOf(addr); of && l.Rows > 0 {
			last := l.FirstPort + l.Rows*l.Each*l.Pool.Blocks.Size - 1
			return ports.Overlaps(rulefile.PortRange{First: uint16(l.FirstPort), Last: uint16(last)})
		}
	}
	return false
}

// room gives the blocks of a size that an address has left, beside those that are computed.
func (m *model) room(addr netip.Addr, size int) (room []rulefile.PortRange) {
	a := m.addresses[addr]
	for first := 0; first+size <= 65536; first += size {
		ports := rulefile.PortRange{First: uint16(first), Last: uint16(first + size - 1)}
		taken := func(b modelBlock) bool { return b.addr == addr && b.ports.Overlaps(ports) }
		if a.ports.First <= ports.First && ports.Last <= a.ports.Last && !m.reserved(addr, ports) && !slices.ContainsFunc(m.blocks, taken) {
			room = append(room, ports)
		}
	}
	return room
}

// homeless reports whether a subscriber has no block, and its address none for it.
func (m *model) homeless(s modelHost, home netip.Addr) bool {
	b := m.blocksOf(s.pool)
	has := func(have modelBlock) bool { return have.owner == s }
	if computed, ok := m.computedFree(s); ok && computed.Address == home {
		return false
	}
	return !b.IsZero() && !slices.ContainsFunc(m.blocks, has) && len(m.room(home, b.Size)) == 0
}

// settle is the addresses of which a subscriber that has none may get one.
func (m *model) settle(s modelHost, class rulefile.Class, addrs []netip.Addr) []netip.Addr {
	b := m.blocksOf(s.pool)
	if b.IsZero() || class == rulefile.ClassOther {
		return addrs
	}
	if with := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return len(m.room(a, b.Size)) == 0 }); len(with) > 0 {
		return with
	}
	return addrs
}

// admitted is what becomes of a packet to a mapping, of which the session counts as its host's
// too: sender is the subscriber that has counted it already, toSelf that its filter lets it in.
func (m *model) admitted(target *modelMapping, from netip.Addr, toSelf bool, sender *modelHost) abiNatReason {
	if reason := target.admits(from); reason != translated && !toSelf {
		return reason
	}
	s, more := m.subscriber(target.pool, target.inside.Addr()), 0
	if sender != nil && *sender == s {
		more = 1
	}
	if !m.maySession(s, more) {
		return abiNatReasonNAT_DROP_SOURCE_LIMIT
	}
	return translated
}

// freeOf gives the ports of an address that a subscriber may be given, or why there are none.
func (m *model) freeOf(s modelHost, class rulefile.Class, addr netip.Addr, wanted uint16) ([]uint16, abiNatReason) {
	if !m.mayPort(s) {
		return nil, abiNatReasonNAT_DROP_PORT_LIMIT
	}
	b := m.blocksOf(s.pool)
	if b.IsZero() {
		if free := m.free(class, addr, wanted, m.addresses[addr].ports); len(free) > 0 {
			return free, translated
		}
		return nil, abiNatReasonNAT_DROP_NO_PORT
	}
	has := 0
	for _, block := range m.blocks {
		if block.owner != s {
			continue
		}
		has++
		if free := m.free(class, addr, wanted, block.ports); block.addr == addr && len(free) > 0 {
			return free, translated
		}
	}
	size := b.Extra
	if has == 0 {
		size = b.Size
	}
	if has > b.AtMost {
		return nil, abiNatReasonNAT_DROP_PORT_LIMIT
	}
	if computed, ok := m.computedFree(s); ok && computed.Address == addr {
		return m.free(class, addr, wanted, rulefile.PortRange{First: computed.FirstPort, Last: computed.LastPort}), translated
	}
	var free []uint16
	for _, ports := range m.room(addr, size) {
		free = append(free, m.free(class, addr, wanted, ports)...)
	}
	if len(free) == 0 {
		return nil, abiNatReasonNAT_DROP_NO_BLOCK
	}
	return free, translated
}

// block notes that a subscriber has got a port: of a block of its own, or a new one.
func (m *model) block(s modelHost, end netip.AddrPort) error {
	b := m.blocksOf(s.pool)
	if b.IsZero() || m.lost {
		return nil
	}
	size := b.Size
	for _, have := range m.blocks {
		switch inside := have.addr == end.Addr() && have.ports.Contains(end.Port()); {
		case inside && have.owner == s:
			return nil
		case inside:
			return fmt.Errorf("%v is in the block %v of %v", end, have.ports, have.owner)
		case have.owner == s:
			size = b.Extra
		}
	}
	first := end.Port() &^ uint16(size-1)
	m.blocks = append(m.blocks, modelBlock{s, end.Addr(), rulefile.PortRange{First: first, Last: first + uint16(size-1)}})
	return nil
}
