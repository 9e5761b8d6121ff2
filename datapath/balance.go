// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"hash/fnv"

	"natkit/nat"
)

// tableSizes are primes: a balanced forward has the first with a hundred entries or
// more for each target, so that shares differ by about a percent.
var tableSizes = []int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521}

// balance gives the table that a client's address is looked up in: for each entry the
// index of a target. It is made as Maglev does (Eisenbud et al., NSDI 2016, section
// 3.4): every target has an order of its own in which it wants the entries, and they
// take turns; so a target that goes leaves its entries to the others, and hardly any
// other entry moves.
func balance(targets []nat.Target) []int {
	if len(targets) == 1 {
		return []int{0}
	}
	size := tableSizes[len(tableSizes)-1]
	for _, s := range tableSizes {
		if s >= 100*len(targets) {
			size = s
			break
		}
	}
	table := make([]int, size)
	for i := range table {
		table[i] = -1
	}
	offset, skip, next := make([]int, len(targets)), make([]int, len(targets)), make([]int, len(targets))
	for i, t := range targets {
		h := fnv.New64a()
		h.Write([]byte(t.String()))
		sum := mix(h.Sum64())
		offset[i] = int(sum>>32) % size
		skip[i] = int(sum&0xffffffff)%(size-1) + 1
	}
	for filled := 0; filled < size; {
		for i := range targets {
			for {
				at := (offset[i] + next[i]*skip[i]) % size
				next[i]++
				if table[at] < 0 {
					table[at] = i
					filled++
					break
				}
			}
			if filled == size {
				break
			}
		}
	}
	return table
}

// mix spreads the bits of a hash: FNV's high bits hardly depend on the last bytes.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
