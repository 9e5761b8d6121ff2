// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
)

// This file counts connections that clients do not confirm, for a Sampler. Nothing else shows them before the table is read:
// no counter moves, and nothing is dropped here.

const (
	// walkShare bounds how much of the time walks through the hash take, in all namespaces together; it is the hash of all.
	walkShare = 400
	// mostWalk is how long one may take: beyond, the machine has more to do than to wait for it.
	mostWalk = 2 * time.Second
)

// walks is the processor time that a Sampler has for walks.
type walks struct {
	left, cost time.Duration // what may be spent, and what the last one took
}

// choose says in which namespaces the next walks are: of those worth it the ones whose last is longest ago.
func (w *walks) choose(seen map[uint64]*sampled, near func(inode uint64) bool, passed time.Duration) map[uint64]bool {
	w.left = min(w.left+passed/walkShare, passed/walkShare)
	var all []uint64
	for inode, n := range seen {
		if n.count > 0 && near != nil && near(inode) {
			all = append(all, inode)
		}
	}
	slices.SortFunc(all, func(a, b uint64) int { return cmp.Or(seen[a].walked.Compare(seen[b].walked), cmp.Compare(a, b)) })
	out := map[uint64]bool{}
	for left := w.left; len(all) > 0 && left > 0; all = all[1:] {
		out[all[0]] = true
		left -= max(w.cost, time.Microsecond)
	}
	return out
}

// walk counts in the namespace that the thread is in; ok is false where it can't.
func (w *walks) walk(n *sampled) (found conntrack.Unconfirmed, ok bool) {
	began := threadTime()
	ctx, cancel := context.WithTimeout(context.Background(), mostWalk)
	defer cancel()
	found, err := conntrack.CountUnconfirmed(ctx)
	n.walked = time.Now()
	w.cost = threadTime() - began
	w.left -= w.cost
	return found, err == nil
}

// threadTime is the processor time that the calling thread has taken.
func threadTime() time.Duration {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
