// SPDX-License-Identifier: Apache-2.0

package conntrack

// Counting by key in bounded memory.

import (
	"cmp"
	"slices"
)

// exactKeys is how many different keys a tally counts exactly. With 2^15 a tally
// takes at most 5 MB, and what it can be off by is 1/32768 of the entries: 8 in
// a table of 262144.
const exactKeys = 1 << 15

// tally counts entries by key. Up to limit different keys it is exact. Beyond,
// it keeps the limit keys with the highest counts by the space-saving method
// (Metwally, Agrawal, El Abbadi 2005): a new key takes the place of the rarest,
// and remembers that key's count as what may have been missed of itself. So a
// key with more than entries/limit is never missing, and rows never overstate.
type tally[K comparable] struct {
	limit int
	at    map[K]int32 // position in rows
	rows  []tallyRow[K]
	heap  []int32 // positions in rows, a heap with the rarest first; nil while exact
	place []int32 // of a row in the heap
	last  int32   // the row that was counted last: often it is the next one's, too
}

type tallyRow[K comparable] struct {
	key              K
	count            uint32 // for sure since the key took its row, plus missed
	missed           uint32 // at most so many before that
	unreplied        uint32 // of these, flows with the mark that add was given
	halfOpen         uint32 // of these, those that lastHalfOpen was told of
	minPort, maxPort uint16
}

func newTally[K comparable](limit int) tally[K] {
	return tally[K]{limit: limit, at: map[K]int32{}}
}

// add counts an entry; port is kept as lowest and highest.
func (t *tally[K]) add(key K, unreplied bool, port uint16) {
	i, ok := t.last, len(t.rows) > 0 && t.rows[t.last].key == key
	if !ok {
		i, ok = t.at[key]
	}
	switch {
	case ok:
		r := &t.rows[i]
		r.count++
		r.minPort, r.maxPort = min(r.minPort, port), max(r.maxPort, port)
	case len(t.rows) < t.limit:
		i = int32(len(t.rows))
		t.rows = append(t.rows, tallyRow[K]{key: key, count: 1, minPort: port, maxPort: port})
		t.at[key] = i
	default:
		if t.heap == nil {
			t.makeHeap()
		}
		i = t.heap[0]
		r := &t.rows[i]
		delete(t.at, r.key)
		t.at[key] = i
		*r = tallyRow[K]{key: key, count: r.count + 1, missed: r.count, minPort: port, maxPort: port}
	}
	t.last = i
	if unreplied {
		t.rows[i].unreplied++
	}
	if t.heap != nil {
		t.sink(t.place[i])
	}
}

// lastHalfOpen says that the entry that was added last is a connection that is not complete.
func (t *tally[K]) lastHalfOpen() { t.rows[t.last].halfOpen++ }

// makeHeap orders the rows when the first key has no row left.
func (t *tally[K]) makeHeap() {
	t.heap = make([]int32, len(t.rows))
	t.place = make([]int32, len(t.rows))
	for i := range t.heap {
		t.heap[i], t.place[i] = int32(i), int32(i)
	}
	for at := int32(len(t.heap)/2 - 1); at >= 0; at-- {
		t.sink(at)
	}
}

// sink moves a row whose count grew down the heap.
func (t *tally[K]) sink(at int32) {
	row := t.heap[at]
	count := t.rows[row].count
	for {
		child := 2*at + 1
		if int(child) >= len(t.heap) {
			break
		}
		if next := child + 1; int(next) < len(t.heap) && t.rows[t.heap[next]].count < t.rows[t.heap[child]].count {
			child = next
		}
		if t.rows[t.heap[child]].count >= count {
			break
		}
		t.heap[at], t.place[t.heap[child]] = t.heap[child], at
		at = child
	}
	t.heap[at], t.place[row] = row, at
}

// top returns the n rows with the most entries, most first; compare decides
// among equals, so that the same table always gives the same rows.
func (t *tally[K]) top(n int, compare func(a, b K) int) []tallyRow[K] {
	rows := slices.Clone(t.rows)
	slices.SortFunc(rows, func(a, b tallyRow[K]) int {
		return cmp.Or(cmp.Compare(b.sure(), a.sure()), compare(a.key, b.key))
	})
	return slices.Clip(rows[:min(n, len(rows))])
}

// sure is how many entries the key has for certain.
func (r *tallyRow[K]) sure() uint32 { return r.count - r.missed }
