// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"natkit/internal/nat/rulefile"
)

// Each number belongs to the best of the spans that have it, and to one piece.
func TestFlatten(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 0))
		spans := make([]span, 1+random.IntN(8))
		for i := range spans {
			first := random.Uint32N(60)
			spans[i] = span{first, first + random.Uint32N(20), random.IntN(3), i}
		}
		if seed%3 == 0 { // up to the last number there is
			for i := range spans {
				spans[i].first += ^uint32(0) - 79
				spans[i].last += ^uint32(0) - 79
			}
		}
		pieces := flatten(spans)
		for i, p := range pieces {
			if p.first > p.last || i > 0 && pieces[i-1].last >= p.first {
				t.Fatalf("seed %d: %+v of %+v", seed, pieces, spans)
			}
		}
		base := spans[0].first &^ 127
		for n := base; n-base < 128; n++ {
			want := -1
			for i, s := range spans {
				if s.first <= n && n <= s.last && (want < 0 || s.rank > spans[want].rank) {
					want = i
				}
			}
			got := slices.IndexFunc(pieces, func(p span) bool { return p.first <= n && n <= p.last })
			if got >= 0 {
				got = pieces[got].rule
			}
			if got != want {
				t.Fatalf("seed %d: %d belongs to %d, want %d: %+v of %+v", seed, n, got, want, pieces, spans)
			}
		}
	}
}

// Boxes are covered as before, and no point by two.
func TestDisjoint(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		boxes := make([]box, 1+random.IntN(6))
		for i := range boxes {
			for side := range boxSides {
				a, b := random.Uint32N(4), random.Uint32N(4)
				boxes[i].low[side], boxes[i].high[side] = min(a, b), max(a, b)
			}
		}
		out := disjoint(boxes)
		for n := range uint32(256) {
			point := box{low: [boxSides]uint32{n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6}}
			point.high = point.low
			count := func(boxes []box) (hits int) {
				for _, b := range boxes {
					if b.overlaps(point) {
						hits++
					}
				}
				return hits
			}
			if before, after := count(boxes), count(out); after > 1 || (before > 0) != (after > 0) {
				t.Fatalf("seed %d: %v is in %d boxes, was in %d", seed, point.low, after, before)
			}
		}
	}
}

func TestPrefixesOfRange(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 2))
		a, b := random.Uint32(), random.Uint32()
		r := rulefile.AddressRange{First: addressOf(min(a, b)), Last: addressOf(max(a, b))}
		next := uint64(min(a, b))
		for _, p := range prefixesOfRange(r) {
			all := rulefile.RangeOf(p)
			if uint64(number(all.First)) != next || p != p.Masked() {
				t.Fatalf("seed %d: %v of %v", seed, p, r)
			}
			next = uint64(number(all.Last)) + 1
		}
		if next != uint64(max(a, b))+1 {
			t.Fatalf("seed %d: ends before %d", seed, next)
		}
	}
	all := rulefile.AddressRange{First: addressOf(0), Last: addressOf(^uint32(0))}
	if got := prefixesOfRange(all); len(got) != 1 || got[0].Bits() != 0 {
		t.Errorf("%v", got)
	}
}

func addressOf(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
