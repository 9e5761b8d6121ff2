// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"hash/fnv"
	"slices"
)

// Bounds of a rule's targets, by the largest table: each target has at least some of its
// entries, and of equal ones a hundred.
const (
	maxTargets   = 655
	maxWeight    = 1000
	leastEntries = 10
	maxRatio     = 6552 // of the sum of the weights to the least of them
)

// tableSizes are primes: a balanced rule has the first with a hundred entries or more for
// each target, and with weights ten or more for the least; so shares are kept to a percent.
// They are few, and the first is for ten targets: between tables of two sizes all clients move.
var tableSizes = []int{1021, 4093, 16381, 65521}

// weight of a target: how large its share is beside the others'.
func (a *DNAT) weight(target int) int {
	if a.Weights == nil {
		return 1
	}
	return a.Weights[target]
}

func (a *DNAT) totalWeight() (total int) {
	for i := range a.Targets {
		total += a.weight(i)
	}
	return total
}

// tableSize is the first that gives every target the entries it needs.
func (a *DNAT) tableSize() int {
	least := a.weight(0)
	for i := range a.Targets {
		least = min(least, a.weight(i))
	}
	need := max(100*len(a.Targets), leastEntries*a.totalWeight()/least)
	if at := slices.IndexFunc(tableSizes, func(size int) bool { return size >= need }); at >= 0 {
		return tableSizes[at]
	}
	return tableSizes[len(tableSizes)-1]
}

// Table is what an engine looks a client's hash up in: for each entry the index of a target.
// It is made as Maglev does (Eisenbud et al., NSDI 2016, section 3.4): every target has an
// order of its own in which it wants the entries, and they take turns; so a target that goes
// leaves its entries to the others, and hardly any other entry moves. With weights a
// target misses turns: it takes one whenever as much of its weight has come together as
// the heaviest has.
func (a *DNAT) Table() []int {
	if len(a.Targets) == 1 {
		return []int{0}
	}
	size, heaviest := a.tableSize(), 0
	table := slices.Repeat([]int{-1}, size)
	at, step, due := make([]int, len(a.Targets)), make([]int, len(a.Targets)), make([]int, len(a.Targets))
	for i, t := range a.Targets {
		h := fnv.New64a()
		h.Write([]byte(t.String()))
		sum := mix(h.Sum64())
		at[i] = int(sum>>32) % size
		step[i] = int(sum&0xffffffff)%(size-1) + 1
		heaviest = max(heaviest, a.weight(i))
	}
	for round, filled := 1, 0; ; round++ {
		for i := range a.Targets {
			if round*a.weight(i) < due[i] {
				continue
			}
			due[i] += heaviest
			for table[at[i]] >= 0 {
				at[i] = (at[i] + step[i]) % size
			}
			table[at[i]] = i
			if filled++; filled == size {
				return table
			}
		}
	}
}

// mix spreads the bits of a hash: FNV's high bits hardly depend on the last bytes.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
