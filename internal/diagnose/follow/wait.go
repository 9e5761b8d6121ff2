// SPDX-License-Identifier: Apache-2.0

package follow

// Waiting for a connection at no cost: see observe.OpenWaiting. What the kernel reported of the
// first packet are the rules it met; the rest of its account is read from its conntrack entry.

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// idle is how long nothing is seen until a trace that waits detaches again, in nanoseconds.
var idle uint64 = 30_000_000_000

// wait detaches what follows packets, and waits for a new connection.
func (r *Run) wait() error {
	a := newAttachment()
	places, missing, err := observe.TranslatingPlaces()
	if err != nil {
		return err
	}
	a.missing = missing
	select {
	case <-r.begun: // by a connection that was there before the programs were
	default:
	}
	r.mu.Lock()
	r.late = false
	clear(r.early)
	r.mu.Unlock()
	for _, place := range places {
		if r.filter.Netns != 0 && place.Inode != r.filter.Netns {
			continue
		}
		traces, err := observe.OpenWaiting(place, r.filter)
		if err != nil {
			a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "new connections", Why: err.Error()})
			continue
		}
		a.rules = append(a.rules, traces...)
		if a.books[place.Inode], err = newBook(place.Place); err != nil {
			a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "names of rules", Why: err.Error()})
		}
		if r.begun != nil && r.at == nil && r.connected(place.Place) { // only at the start: later they are idle
			r.begin()
		}
	}
	if len(a.rules) == 0 {
		return errors.Join(errNothingToWaitFor, r.closeAttachment(a))
	}
	r.waits.Store(len(r.begun) == 0)
	r.replace(a)
	return nil
}

var errNothingToWaitFor = errors.New("wait for a connection: no namespace that can be waited in has NAT: trace without --wait")

// Waiting says whether no connection has matched yet.
func (r *Run) Waiting() bool { return r.waits.Load() }

func (r *Run) begin() {
	select {
	case r.begun <- struct{}{}:
	default:
	}
}

// connected says whether a connection of the filter is in the table of a namespace already.
func (r *Run) connected(place netns.Place) (found bool) {
	_ = at(place.Ref, func() error { // of what can't be read nothing is known
		_, err := conntrack.Dump(context.Background(), conntrack.Filter{Proto: r.filter.Protocol}, func(f *conntrack.Flow) error {
			t := f.Orig
			found = found || r.wants(t.Src, t.Dst, t.SrcPort, t.DstPort) || r.wants(t.Dst, t.Src, t.DstPort, t.SrcPort)
			return nil
		})
		return err
	})
	return found
}

func (r *Run) wants(from, to netip.Addr, sport, dport uint16) bool {
	within := func(e observe.PacketEnd, a netip.Addr, port uint16) bool {
		return (!e.Addresses.IsValid() || e.Addresses.Contains(a)) && (e.Port == 0 || e.Port == port)
	}
	return within(r.filter.A, from, sport) && within(r.filter.B, to, dport) &&
		(r.filter.Port == 0 || r.filter.Port == sport || r.filter.Port == dport)
}

func at(ref string, fn func() error) error {
	h, err := netns.Open(ref)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Do(fn)
}

// await attaches everything once a connection has begun. If ctx is over before, nothing is.
func (r *Run) await(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-r.begun:
	}
	waited := r.at
	r.mu.Lock()
	r.late = true
	r.mu.Unlock()
	if err := r.attach(); err != nil {
		return err
	}
	r.waits.Store(false)
	r.last = monotonic()
	seen := map[earlyPacket]bool{}
	var all []snapshot.TraceEvent
	for _, e := range r.takeMet() {
		if key := (earlyPacket{e.Netns, e.Identity}); e.Head != nil && !seen[key] {
			seen[key] = true
			all = append(all, r.firstPacket(e, waited)...)
		}
		all = append(all, e)
	}
	for _, e := range all {
		r.joined.Add(e)
	}
	return nil
}

// firstPacket are the events of a packet of which only the rules were reported, from its entry.
func (r *Run) firstPacket(e snapshot.TraceEvent, waited *attachment) []snapshot.TraceEvent {
	begin := e
	begin.Rule, begin.Point, begin.Priority, begin.TimeNS = nil, snapshot.PointHook, e.Priority-1, e.TimeNS-1
	if begin.Hook == "" {
		begin.Hook = "prerouting"
	}
	switch {
	case len(e.Head) >= 20 && e.Head[0]>>4 == 4:
		begin.Length = uint32(binary.BigEndian.Uint16(e.Head[2:]))
	case len(e.Head) >= 40:
		begin.Length = 40 + uint32(binary.BigEndian.Uint16(e.Head[4:]))
	}
	out := []snapshot.TraceEvent{begin}
	entry := r.entryOf(e, waited)
	if entry == nil {
		return out
	}
	step := begin
	step.Entry, step.TimeNS = entry, e.TimeNS
	if begin.Hook == "prerouting" || begin.Hook == "output" {
		step.Priority, step.Tuple.Destination = -99, entry.Reply.Source
		out = append(out, step)
	}
	step.Hook, step.Priority, step.Tuple = "postrouting", 101, entry.Reply.Turned()
	if step.Tuple.Source != e.Tuple.Source || step.Tuple.Destination != e.Tuple.Destination || begin.Hook == "postrouting" {
		out = append(out, step)
	}
	confirmed := *entry
	confirmed.Confirmed = true
	step.Entry = &confirmed
	return append(out, step)
}

// entryOf reads the entry that a packet made, nil if there is none.
func (r *Run) entryOf(e snapshot.TraceEvent, waited *attachment) (out *snapshot.TraceEntry) {
	book := waited.books[e.Netns]
	if book == nil {
		return nil
	}
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	t := e.Tuple
	_ = at(book.place.Ref, func() error { // without it less is known of the packet
		ctx, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_, err := conntrack.Dump(ctx, conntrack.Filter{Src: host(t.Source.Addr()), Dst: host(t.Destination.Addr())}, func(f *conntrack.Flow) error {
			if f.Orig.SrcPort != t.Source.Port() || f.Orig.DstPort != t.Destination.Port() || conntrack.ProtoName(f.Proto) != t.Protocol {
				return nil
			}
			out = &snapshot.TraceEntry{ID: 1, State: "new", Original: t, Reply: snapshot.TraceTuple{
				Protocol: t.Protocol, Source: netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort), Destination: netip.AddrPortFrom(f.Reply.Dst, f.Reply.DstPort),
			}}
			return nil
		})
		return err
	})
	return out
}
