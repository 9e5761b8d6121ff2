// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"math/rand/v2"
	"testing"
)

// Small boxes, of which every point can be asked.
func randomBox(r *rand.Rand) Box {
	var b Box
	ranges := func() Ranges {
		if r.IntN(3) == 0 {
			return nil
		}
		var list []Range
		for range 1 + r.IntN(2) {
			first := r.Uint32N(6)
			list = append(list, Range{first, first + r.Uint32N(3)})
		}
		return RangesOf(list)
	}
	for _, d := range []FieldKind{In, Source, DestinationPort} {
		b.Dim[d] = ranges()
	}
	if r.IntN(2) == 0 {
		b.Vars = map[int]Ranges{1: ranges()}
	}
	return b
}

func has(b Box, p [4]uint32) bool {
	return b.Dim[In].Contains(p[0]) && b.Dim[Source].Contains(p[1]) && b.Dim[DestinationPort].Contains(p[2]) && b.Vars[1].Contains(p[3])
}

// The algebra of boxes is that of their points.
func TestBoxes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		a, b := randomBox(r), randomBox(r)
		and, meet := a.And(b)
		minus := a.Minus(b)
		covers := a.Covers(b)
		for n := range uint32(9 * 9 * 9 * 9) {
			p := [4]uint32{n % 9, n / 9 % 9, n / 81 % 9, n / 729}
			if got, want := meet && has(and, p), has(a, p) && has(b, p); got != want {
				t.Fatalf("%v and %v at %v: %v", a, b, p, got)
			}
			in := 0
			for _, m := range minus {
				if has(m, p) {
					in++
				}
			}
			if want := has(a, p) && !has(b, p); in > 1 || in == 1 != want {
				t.Fatalf("%v minus %v at %v: %d times", a, b, p, in)
			}
			if covers && has(b, p) && !has(a, p) {
				t.Fatalf("%v does not cover %v at %v", a, b, p)
			}
		}
	}
}
