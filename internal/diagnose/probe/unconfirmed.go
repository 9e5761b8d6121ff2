// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
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
	slices.SortFunc(all, func(a, b uint64) int { return cmp.Or(seen[a].walked.at.Compare(seen[b].walked.at), cmp.Compare(a, b)) })
	out := map[uint64]bool{}
	for left := w.left; len(all) > 0 && left > 0; all = all[1:] {
		out[all[0]] = true
		left -= max(w.cost, time.Microsecond)
	}
	return out
}

// walked is what the last walk through the hash has shown of a namespace.
type walked struct {
	at       time.Time
	found    conntrack.Unconfirmed
	entries  uint64 // of the table, then
	received uint64 // packets, until then
	settled  bool   // nothing had come for a whole sample: connections were not too young to be counted
}

// still says whether nothing has come since: no connection was opened, and none was confirmed.
func (w *walked) still(n *sampled) bool {
	return w.settled && n.stackAt.Equal(n.at) && n.counters[received] == w.received && n.count == w.entries
}

// received counts packets that IPv4 received, for this machine or another. Of those that a bridge filters the entries show
// connections.
const received = "Ip.InReceives"

// walk counts in the namespace that the thread is in, of which s is the sample, unless nothing can have changed.
func (w *walks) walk(n *sampled, s *snapshot.Snapshot) (conntrack.Unconfirmed, error) {
	if n.walked.still(n) {
		n.walked.at = time.Now()
		return n.walked.found, nil
	}
	began := threadTime()
	ctx, cancel := context.WithTimeout(context.Background(), mostWalk)
	defer cancel()
	found, err := conntrack.CountUnconfirmed(ctx)
	n.walked = walked{at: time.Now()}
	if err == nil {
		settled := s.Counters != nil && s.Counters[received] == 0 && s.Conntrack != nil && s.Conntrack.Count == s.Conntrack.CountStart
		n.walked.found, n.walked.entries, n.walked.received, n.walked.settled = found, n.count, n.counters[received], settled
	}
	w.cost = threadTime() - began
	w.left -= w.cost
	return found, err
}

// threadTime is the processor time that the calling thread has taken.
func threadTime() time.Duration {
	var r unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
