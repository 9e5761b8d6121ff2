// SPDX-License-Identifier: Apache-2.0

// Port blocks that follow from the rule file alone (RFC 7422): whose is an external port, without
// a log, and where is a subscriber seen.

package rulefile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Deterministic says which blocks of a subscriber follow from the rule file.
type Deterministic uint8

// Which blocks do.
const (
	DeterministicNone Deterministic = iota
	DeterministicFirst
	DeterministicAll
)

var deterministicNames = []string{"", "true", "all", "false"}

func (d Deterministic) String() string { return deterministicNames[d] }

// computed is how many blocks of a subscriber are computed.
func (b Blocks) computed() int {
	switch b.Deterministic {
	case DeterministicFirst:
		return 1
	case DeterministicAll:
		return 1 + b.AtMost
	}
	return 0
}

// Layout is where the computed blocks of a pool are. Its subscribers are numbered in the order of
// their addresses, over the sources of all rules that use the pool. The blocks of number n are on
// the address n % Addresses of the pool, and there in the places n / Addresses, that plus Rows,
// and so on: the computed ports of an address are one range, and every address has as many.
type Layout struct {
	Pool        *Pool
	HostBits    int // of an address, that tell the hosts of one subscriber apart
	Subscribers uint64
	Addresses   int
	Rows        int // places for the first block of each subscriber, of each address
	Each        int // blocks of a subscriber that are computed
	FirstPort   int
	Sources     []LayoutSource

	runs []layoutRun
}

// LayoutSource is where some subscribers of a layout have their numbers: that of one is Number
// more than its address without HostBits, modulo 2^32.
type LayoutSource struct {
	Prefix netip.Prefix
	Number uint32
}

// layoutRun is subscribers that follow each other: their addresses without the bits of hosts.
type layoutRun struct{ first, last, number uint64 }

// Layout gives the computed blocks of a pool, nil if it has none.
func (f *File) Layout(p *Pool) *Layout {
	if p.Blocks.computed() == 0 || p.OneToOne {
		return nil
	}
	size := p.Blocks.Size
	l := &Layout{
		Pool: p, HostBits: 32 - cmp.Or(f.Subscribers.Prefix, 32), Addresses: p.Count(), Each: p.Blocks.computed(),
		FirstPort: (int(p.PortsOf().First) + size - 1) / size * size,
	}
	var prefixes []netip.Prefix
	for i := range f.Rules {
		if a, ok := f.Rules[i].Action.(SNAT); ok && a.Pool == p.Name {
			prefixes = append(prefixes, netip.PrefixFrom(a.Source.Addr(), min(a.Source.Bits(), 32-l.HostBits)).Masked())
		}
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	prefixes = slices.Compact(prefixes)
	for _, prefix := range prefixes {
		all := RangeOf(prefix)
		run := layoutRun{first: uint64(number(all.First)) >> l.HostBits, last: uint64(number(all.Last)) >> l.HostBits}
		last := len(l.runs) - 1
		if last >= 0 && run.first <= l.runs[last].last+1 {
			l.Subscribers += max(run.last, l.runs[last].last) - l.runs[last].last
			l.runs[last].last = max(run.last, l.runs[last].last)
		} else {
			run.number = l.Subscribers
			l.Subscribers += run.last - run.first + 1
			l.runs = append(l.runs, run)
			last++
		}
		l.Sources = append(l.Sources, LayoutSource{prefix, uint32(l.runs[last].number - l.runs[last].first)})
	}
	if l.Addresses > 0 {
		l.Rows = int((l.Subscribers + uint64(l.Addresses) - 1) / uint64(l.Addresses))
	}
	return l
}

// problem is why the pool is too small, "" if it is not.
func (l *Layout) problem() string {
	size := l.Pool.Blocks.Size
	have := l.Pool.blocksOf(size)
	if l.Rows*l.Each <= have {
		return ""
	}
	each := "a computed block"
	if l.Each > 1 {
		each = fmt.Sprintf("%d computed blocks", l.Each)
	}
	return fmt.Sprintf("pool %s is too small for %s of %d ports for each subscriber: the sources of its rules are %d subscribers, %d for each of its addresses, which have room for %d (%s): "+
		"take a smaller size, more addresses, or rules for fewer subscribers", l.Pool.Name, each, size, l.Subscribers, l.Rows, have/l.Each, l.Pool.PortsOf())
}

// ComputedBlock is a port block that follows from the rule file.
type ComputedBlock struct {
	Pool       string       `json:"pool"`
	Subscriber netip.Prefix `json:"subscriber,omitzero"`
	Address    netip.Addr   `json:"external_address,omitzero"`
	FirstPort  uint16       `json:"first_port"`
	LastPort   uint16       `json:"last_port"`
	Number     int          `json:"block"` // of the subscriber's, from 1
}

// block is the i-th block of the subscriber of that number and address.
func (l *Layout) block(n, subscriber uint64, i int) ComputedBlock {
	place := int(n/uint64(l.Addresses)) + i*l.Rows
	first := l.FirstPort + place*l.Pool.Blocks.Size
	return ComputedBlock{
		Pool: l.Pool.Name, Subscriber: netip.PrefixFrom(address(uint32(subscriber<<l.HostBits)), 32-l.HostBits), Address: l.Pool.At(int(n % uint64(l.Addresses))),
		FirstPort: uint16(first), LastPort: uint16(first + l.Pool.Blocks.Size - 1), Number: i + 1,
	}
}

// Blocks gives the blocks of the subscriber of an internal host, in the order in which it gets
// them; none if no rule sends the host to the pool.
func (l *Layout) Blocks(host netip.Addr) (blocks []ComputedBlock) {
	subscriber := uint64(number(host)) >> l.HostBits
	for _, run := range l.runs {
		if run.first <= subscriber && subscriber <= run.last {
			for i := range l.Each {
				blocks = append(blocks, l.block(run.number+subscriber-run.first, subscriber, i))
			}
		}
	}
	return blocks
}

// Owner gives the block that an external endpoint is in, and so whose it is; false if it is in none
// that is computed.
func (l *Layout) Owner(end netip.AddrPort) (ComputedBlock, bool) {
	index, ok := l.Pool.IndexOf(end.Addr())
	place := (int(end.Port()) - l.FirstPort) / l.Pool.Blocks.Size
	if !ok || int(end.Port()) < l.FirstPort || l.Rows == 0 || place >= l.Rows*l.Each {
		return ComputedBlock{}, false
	}
	n := uint64(place%l.Rows)*uint64(l.Addresses) + uint64(index)
	for _, run := range l.runs {
		if run.number <= n && n <= run.number+run.last-run.first {
			return l.block(n, run.first+n-run.number, place/l.Rows), true
		}
	}
	return ComputedBlock{}, false // the last row is not full
}

// ComputedBlocks lists the blocks that the subscriber of an internal host has by the rule file
// alone, in each pool that its rules name.
func (f *File) ComputedBlocks(host netip.Addr) (blocks []ComputedBlock) {
	for i := range f.Pools {
		if l := f.Layout(&f.Pools[i]); l != nil {
			blocks = append(blocks, l.Blocks(host)...)
		}
	}
	return blocks
}

// ComputedOwner tells whose an external endpoint is by the rule file alone. False: it is in no
// computed block, and only a log knows.
func (f *File) ComputedOwner(end netip.AddrPort) (ComputedBlock, bool) {
	for i := range f.Pools {
		if l := f.Layout(&f.Pools[i]); l != nil {
			if b, ok := l.Owner(end); ok {
				return b, true
			}
		}
	}
	return ComputedBlock{}, false
}

// At gives the i-th address of the pool.
func (p *Pool) At(i int) netip.Addr {
	for _, r := range p.Addresses {
		if i < r.Count() {
			return r.At(i)
		}
		i -= r.Count()
	}
	return netip.Addr{}
}

// IndexOf gives the place of an address in the pool.
func (p *Pool) IndexOf(a netip.Addr) (index int, ok bool) {
	for _, r := range p.Addresses {
		if r.Contains(a) {
			return index + int(number(a)-number(r.First)), true
		}
		index += r.Count()
	}
	return 0, false
}

// Drains reports whether an address of the pool is to be left: nothing new is given from it.
func (p *Pool) Drains(a netip.Addr) bool {
	return slices.ContainsFunc(p.Drain, func(r AddressRange) bool { return r.Contains(a) })
}

// drainsAll reports whether no address is left for new sessions.
func (p *Pool) drainsAll() bool {
	drain := slices.Clone(p.Drain)
	slices.SortFunc(drain, func(a, b AddressRange) int { return a.First.Compare(b.First) })
	for _, r := range p.Addresses {
		next, end := uint64(number(r.First)), uint64(number(r.Last))
		for _, d := range drain {
			if first := uint64(number(d.First)); first <= next {
				next = max(next, uint64(number(d.Last))+1)
			}
		}
		if next <= end {
			return false
		}
	}
	return true
}
