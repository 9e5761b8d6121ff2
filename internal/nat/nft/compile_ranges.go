// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"net/netip"
	"slices"

	"natkit/internal/nat/rulefile"
)

// Keys of interval maps must not overlap, rules may: the more special one wins. So the
// compiler cuts ranges into pieces.

// span is numbers from first to last, both included, that a rule wants. Of two spans
// that overlap, the one with the higher rank has the numbers, or of equal ones the one
// that comes first in the file.
type span struct {
	first, last uint32
	rank        int
	rule        int
}

// flatten cuts spans into pieces that do not overlap, in ascending order.
//
//  1. the numbers where a span begins, or where the first behind its last is, cut
//     everything into stretches
//  2. each stretch belongs to the best of the spans that are open there
//  3. neighbours of the same rule are one piece
func flatten(spans []span) []span {
	type edge struct {
		at    uint64
		open  bool
		index int
	}
	edges := make([]edge, 0, 2*len(spans))
	for i, s := range spans {
		edges = append(edges, edge{uint64(s.first), true, i}, edge{uint64(s.last) + 1, false, i})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })

	better := func(a, b int) int {
		return cmp.Or(cmp.Compare(spans[b].rank, spans[a].rank), cmp.Compare(spans[a].rule, spans[b].rule), cmp.Compare(a, b))
	}
	var open []int // the best first
	var pieces []span
	for i, e := range edges {
		at, found := slices.BinarySearchFunc(open, e.index, better)
		if e.open {
			open = slices.Insert(open, at, e.index)
		} else if found {
			open = slices.Delete(open, at, at+1)
		}
		if i+1 == len(edges) || edges[i+1].at == e.at || len(open) == 0 {
			continue
		}
		piece := span{uint32(e.at), uint32(edges[i+1].at - 1), spans[open[0]].rank, spans[open[0]].rule}
		if last := len(pieces) - 1; last >= 0 && pieces[last].rule == piece.rule && uint64(pieces[last].last)+1 == e.at {
			pieces[last].last = piece.last
			continue
		}
		pieces = append(pieces, piece)
	}
	return pieces
}

// box is what an exclusion names: a protocol, addresses and ports from low to high.
type box struct {
	low, high [boxSides]uint32
	rule      int
}

const (
	boxProtocol = iota
	boxSource
	boxDest
	boxPort
	boxSides
)

func exclusionBox(rule int, a rulefile.Exclude) box {
	source, dest := rulefile.RangeOf(a.Source), rulefile.RangeOf(a.Destination)
	b := box{
		low:  [boxSides]uint32{0, number(source.First), number(dest.First), 0},
		high: [boxSides]uint32{0xff, number(source.Last), number(dest.Last), 0xffff},
		rule: rule,
	}
	if a.Protocol != rulefile.AnyProtocol {
		b.low[boxProtocol], b.high[boxProtocol] = uint32(a.Protocol), uint32(a.Protocol)
	}
	if !a.Ports.IsZero() {
		b.low[boxPort], b.high[boxPort] = uint32(a.Ports.First), uint32(a.Ports.Last)
	}
	return b
}

func (b box) overlaps(o box) bool {
	for side := range boxSides {
		if b.low[side] > o.high[side] || o.low[side] > b.high[side] {
			return false
		}
	}
	return true
}

// without is what is left of b beside o, as boxes that do not overlap.
func (b box) without(o box) []box {
	if !b.overlaps(o) {
		return []box{b}
	}
	var rest []box
	for side := range boxSides {
		if b.low[side] < o.low[side] {
			below := b
			below.high[side] = o.low[side] - 1
			rest = append(rest, below)
			b.low[side] = o.low[side]
		}
		if b.high[side] > o.high[side] {
			above := b
			above.low[side] = o.high[side] + 1
			rest = append(rest, above)
			b.high[side] = o.high[side]
		}
	}
	return rest
}

// disjoint covers the same as boxes without overlap; the widest keep their shape.
// Only boxes whose sources overlap are compared: those that begin at or before the end
// of another, in the order of their sources.
func disjoint(boxes []box) []box {
	boxes = slices.Clone(boxes)
	size := func(b box) uint64 {
		return uint64(b.high[boxSource]-b.low[boxSource]) + uint64(b.high[boxDest]-b.low[boxDest])
	}
	slices.SortStableFunc(boxes, func(a, b box) int {
		return cmp.Or(cmp.Compare(a.low[boxSource], b.low[boxSource]), cmp.Compare(size(b), size(a)))
	})
	var out, active []box
	for _, b := range boxes {
		active = slices.DeleteFunc(active, func(a box) bool { return a.high[boxSource] < b.low[boxSource] })
		pieces := []box{b}
		for _, a := range active {
			var rest []box
			for _, p := range pieces {
				rest = append(rest, p.without(a)...)
			}
			pieces = rest
		}
		out = append(out, pieces...)
		active = append(active, pieces...)
	}
	return out
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}
