// SPDX-License-Identifier: Apache-2.0

package follow

// The conntrack entries of followed connections, until they end. No program of natkit's sees the end of one, so natkit asks
// for them now and then: an entry that is gone, and had time left when it was last there, was evicted or deleted.

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// entries are those that are watched.
type entries struct {
	all    []entry
	tables map[uint64]tableState // by namespace, when it was last asked
	next   time.Time
}

// entry is one of a followed connection.
type entry struct {
	netns    uint64
	ref      string
	original snapshot.TraceTuple
	last     *conntrack.Flow // as it was when it was last there; nil: it was not asked for yet
	at       time.Time
	over     *trace.EntryEnd // it ended: reported unless the connection turns out to be over
}

// tableState is how a namespace's table is.
type tableState struct {
	counts  conntrack.Stats // since the namespace was made; nil: not known
	crowded bool            // so full that the kernel also removes entries without counting them
}

const (
	maxEntries = 256 // watched at once; the one that was met first goes
	askEvery   = 500 * time.Millisecond
	// slack is how much time an entry must have had left, in seconds: the kernel reports whole ones.
	slack = 2
)

// watch adds the entry of a packet. One of a connection that ends by this packet is let go: the kernel removes it at once
// where a SYN is refused, or for a new connection with the same ends.
func (w *entries) watch(e *snapshot.TraceEvent) {
	if e.Entry == nil || !e.Entry.Confirmed || e.Entry.Original.Source.Port() == 0 {
		return // without ports natkit does not know enough to ask for it
	}
	same := func(o entry) bool { return o.netns == e.Netns && o.original == e.Entry.Original }
	if strings.Contains(e.Kind, "FIN") || strings.Contains(e.Kind, "RST") {
		w.all = slices.DeleteFunc(w.all, same)
		return
	}
	if slices.ContainsFunc(w.all, same) {
		return
	}
	if len(w.all) >= maxEntries {
		w.all = slices.Delete(w.all, 0, 1)
	}
	w.all = append(w.all, entry{netns: e.Netns, ref: e.Namespace, original: e.Entry.Original})
	w.next = time.Time{} // it may not last long
}

// ask asks for all of them, if it is time, and returns those that had ended before theirs when it asked last: since then
// natkit has come to read the packet that ended the connection, if there is one.
func (w *entries) ask() (ended []trace.EntryEnd) {
	now := time.Now()
	if len(w.all) == 0 || now.Before(w.next) {
		return nil
	}
	w.next = now.Add(askEvery)
	spaces := map[uint64][]entry{}
	for _, e := range w.all {
		spaces[e.netns] = append(spaces[e.netns], e)
	}
	was := w.tables
	w.all, w.tables = nil, map[uint64]tableState{}
	for _, inode := range slices.Sorted(maps.Keys(spaces)) {
		found, table, err := askIn(spaces[inode])
		if err != nil {
			continue // with their namespace they are gone
		}
		w.tables[inode] = table
		for i, e := range spaces[inode] {
			if e.over != nil {
				ended = append(ended, *e.over)
				e.over = nil
			} else if left := e.timeLeft(found[i], time.Now()); left > 0 {
				e.over = e.end(left, was[inode], table)
			}
			if e.last, e.at = found[i], time.Now(); e.last != nil || e.over != nil {
				w.all = append(w.all, e)
			}
		}
	}
	return ended
}

// askIn asks for entries of one namespace.
func askIn(of []entry) (found []*conntrack.Flow, table tableState, err error) {
	wanted := make([]conntrack.Flow, len(of))
	for i, e := range of {
		t := e.original
		wanted[i] = conntrack.Flow{Family: unix.AF_INET, Proto: trace.Protocols[t.Protocol], Orig: conntrack.Tuple{
			Src: t.Source.Addr(), Dst: t.Destination.Addr(), SrcPort: t.Source.Port(), DstPort: t.Destination.Port(),
		}}
		if t.Source.Addr().Is6() {
			wanted[i].Family = unix.AF_INET6
		}
	}
	h, err := open(of[0].ref, of[0].netns)
	if err != nil {
		return nil, table, err
	}
	defer h.Close()
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	err = h.Do(func() (err error) {
		if found, err = conntrack.Lookup(ctx, wanted); err != nil {
			return err
		}
		table.counts, _ = conntrack.ReadStats() // without it the reason is not known
		if l, err := conntrack.ReadLimits(); err == nil {
			table.crowded = l.Count > l.Max/100*95 // nf_conntrack_max95 of Linux
		}
		return nil
	})
	return found, table, err
}

// timeLeft is how many seconds the entry had left that is gone, or has made room for another; 0 if it has not, or if it
// ended by itself.
func (e *entry) timeLeft(now *conntrack.Flow, at time.Time) uint32 {
	last := e.last
	if last == nil || last.Has&conntrack.HasTimeout == 0 || now != nil && now.ID == last.ID {
		return 0
	}
	if last.Proto == unix.IPPROTO_TCP && last.State != conntrack.TCPSynSent && last.State != conntrack.TCPSynRecv && last.State != conntrack.TCPEstablished {
		return 0 // the connection is over: a new one may take its place
	}
	if passed := uint32(at.Sub(e.at).Seconds()); last.Timeout > passed+slack {
		return last.Timeout - passed
	}
	return 0
}

// end says what became of the entry, by what the table was before and is now. The kernel evicts none that is assured.
func (e *entry) end(left uint32, before, now tableState) *trace.EntryEnd {
	out := &trace.EntryEnd{Namespace: e.ref, Original: e.original.String(), TimeNS: monotonic(), LeftSeconds: left, How: trace.EntryGone, Tuple: e.original}
	assured := e.last.Status&conntrack.StatusAssured != 0
	switch n := now.counts.Since(before.counts)["early_drop"]; {
	case n > 0 && !assured:
		out.How = trace.EntryEvicted
		out.Why = fmt.Sprintf("the table is full: to make room the kernel evicted %s not assured (early_drop)", plural.Count(n, "entry"))
	case now.crowded && !assured:
		out.Why = "the table is more than 95 % full, where the kernel removes entries early; or somebody deleted it"
	default:
		out.Why = "somebody deleted it: conntrack -D or -F, a program that writes rules, or an address that was removed"
	}
	return out
}
