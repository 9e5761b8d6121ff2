// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"math"
	"slices"
)

// Sets of packets. A Box is a product: for each dimension the values that a packet may
// have. Whatever a rule asks for is a box or several, so what rules do to all packets is
// computed exactly, without trying packets.

// Range is numbers from First to Last, both included.
type Range struct{ First, Last uint32 }

// Ranges are sorted, disjoint and not adjacent. nil is every number; what is empty and not
// nil is none.
type Ranges []Range

// Dimensions of a box that every packet has. Interfaces are numbers of a Universe. The
// fields In to DestinationPort are their own dimension.
const Dimensions = int(DestinationPort) + 1

// Box is the packets whose values are in all ranges. Vars are of what is drawn or unknown.
type Box struct {
	Dim  [Dimensions]Ranges
	Vars map[int]Ranges // read only, shared
}

func (r Ranges) empty() bool { return r != nil && len(r) == 0 }

// Contains tells whether n is among the numbers.
func (r Ranges) Contains(n uint32) bool {
	if r == nil {
		return true
	}
	k, found := slices.BinarySearchFunc(r, n, func(r Range, n uint32) int {
		switch {
		case r.Last < n:
			return -1
		case r.First > n:
			return 1
		}
		return 0
	})
	return found && k < len(r)
}

// Covers tells whether all of o are among the numbers.
func (r Ranges) Covers(o Ranges) bool {
	if r == nil {
		return true
	}
	if o == nil {
		return len(r) == 1 && r[0] == Range{0, math.MaxUint32}
	}
	return slices.Equal(r.And(o), o)
}

// And is what is in both.
func (r Ranges) And(o Ranges) Ranges {
	if r == nil {
		return o
	}
	if o == nil {
		return r
	}
	out := Ranges{}
	for i, j := 0, 0; i < len(r) && j < len(o); {
		first, last := max(r[i].First, o[j].First), min(r[i].Last, o[j].Last)
		if first <= last {
			out = append(out, Range{first, last})
		}
		if r[i].Last < o[j].Last {
			i++
		} else {
			j++
		}
	}
	return out
}

// Not is every other number.
func (r Ranges) Not() Ranges {
	if r == nil {
		return Ranges{}
	}
	out := Ranges{}
	next := uint64(0)
	for _, x := range r {
		if next < uint64(x.First) {
			out = append(out, Range{uint32(next), x.First - 1})
		}
		next = uint64(x.Last) + 1
	}
	if next <= math.MaxUint32 {
		out = append(out, Range{uint32(next), math.MaxUint32})
	}
	if len(out) == 1 && out[0] == (Range{0, math.MaxUint32}) {
		return nil
	}
	return out
}

// RangesOf sorts and joins ranges.
func RangesOf(list []Range) Ranges {
	if len(list) == 0 {
		return Ranges{}
	}
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b Range) int {
		if a.First < b.First {
			return -1
		}
		if a.First > b.First {
			return 1
		}
		return 0
	})
	out := Ranges{list[0]}
	for _, x := range list[1:] {
		last := &out[len(out)-1]
		if last.Last == math.MaxUint32 || x.First <= last.Last+1 {
			last.Last = max(last.Last, x.Last)
			continue
		}
		out = append(out, x)
	}
	if len(out) == 1 && out[0] == (Range{0, math.MaxUint32}) {
		return nil
	}
	return out
}

// Size is how many numbers there are.
func (r Ranges) Size() uint64 {
	if r == nil {
		return 1 << 32
	}
	n := uint64(0)
	for _, x := range r {
		n += uint64(x.Last-x.First) + 1
	}
	return n
}

// And is the packets in both boxes; not ok if there are none.
func (b Box) And(o Box) (Box, bool) {
	for d := range b.Dim {
		if b.Dim[d] = b.Dim[d].And(o.Dim[d]); b.Dim[d].empty() {
			return b, false
		}
	}
	if len(o.Vars) == 0 {
		return b, true
	}
	vars := make(map[int]Ranges, len(b.Vars)+len(o.Vars))
	for v, r := range b.Vars {
		vars[v] = r
	}
	for v, r := range o.Vars {
		if vars[v] = vars[v].And(r); vars[v].empty() {
			return b, false
		}
	}
	b.Vars = vars
	return b, true
}

// Minus is the packets of b that are not in o, as boxes that have no packet in common.
func (b Box) Minus(o Box) []Box {
	if _, meet := b.And(o); !meet {
		return []Box{b}
	}
	var out []Box
	for d := range b.Dim {
		if o.Dim[d] == nil {
			continue
		}
		if rest := b.Dim[d].And(o.Dim[d].Not()); !rest.empty() {
			piece := b
			piece.Dim[d] = rest
			out = append(out, piece)
		}
		b.Dim[d] = b.Dim[d].And(o.Dim[d])
	}
	vars := make([]int, 0, len(o.Vars))
	for v := range o.Vars {
		vars = append(vars, v)
	}
	slices.Sort(vars)
	for _, v := range vars {
		if rest := b.Vars[v].And(o.Vars[v].Not()); !rest.empty() {
			out = append(out, b.withVar(v, rest))
		}
		b = b.withVar(v, b.Vars[v].And(o.Vars[v]))
	}
	return out
}

func (b Box) withVar(v int, r Ranges) Box {
	vars := make(map[int]Ranges, len(b.Vars)+1)
	for k, x := range b.Vars {
		vars[k] = x
	}
	vars[v] = r
	b.Vars = vars
	return b
}

// Without drops what the box says of a variable.
func (b Box) Without(v int) Box {
	if _, ok := b.Vars[v]; !ok {
		return b
	}
	vars := make(map[int]Ranges, len(b.Vars))
	for k, x := range b.Vars {
		if k != v {
			vars[k] = x
		}
	}
	b.Vars = vars
	return b
}

// Covers tells whether every packet of o is in b.
func (b Box) Covers(o Box) bool {
	for d := range b.Dim {
		if !b.Dim[d].Covers(o.Dim[d]) {
			return false
		}
	}
	for v, r := range b.Vars {
		if !r.Covers(o.Vars[v]) {
			return false
		}
	}
	return true
}

// MinusAll is the packets of b that are in none of the others; not ok if that would be
// more than limit boxes.
func (b Box) MinusAll(others []Box, limit int) ([]Box, bool) {
	pieces := []Box{b}
	for _, o := range others {
		var next []Box
		for _, p := range pieces {
			next = append(next, p.Minus(o)...)
		}
		if pieces = next; len(pieces) > limit {
			return pieces, false
		}
	}
	return pieces, true
}
