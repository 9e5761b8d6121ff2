// SPDX-License-Identifier: Apache-2.0

package follow

// Waiting for a connection at no cost: see observe.OpenWaiting. What the kernel reported of the
// first packet are the rules it met; the rest of its account is read from its conntrack entry.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// idle is how long nothing is seen until a trace that waits detaches again, in nanoseconds.
var idle uint64 = 30_000_000_000

// waitFirst begins a trace by waiting. If there is a connection of the filter already it follows that, and if
// there is nowhere to wait it attaches at once.
func (r *Run) waitFirst() error {
	r.begun = make(chan struct{}, 1)
	if err := r.wait(); err != nil {
		return err
	}
	if !r.at.somewhere {
		r.begun = nil // it never waits again
		return r.begin()
	}
	if r.at.connected {
		return r.begin()
	}
	return nil
}

// wait detaches what follows packets, and waits for a new connection.
func (r *Run) wait() error {
	if err := r.packets.Detach(); err != nil {
		return err
	}
	if err := r.packets.Forget(); err != nil {
		return err
	}
	select {
	case <-r.begun: // by a connection that was there before the programs were
	default:
	}
	clear(r.early)
	a := newAttachment()
	a.waits, a.asksTable = true, r.at == nil // later its connections are idle
	if err := r.replace(a).close(); err != nil {
		return err
	}
	if err := r.packets.Wait(); err != nil {
		return err
	}
	r.waits.Store(true)
	r.refresh()
	return nil
}

// waitIn waits in a namespace, too.
func (r *Run) waitIn(a *attachment, place observe.HookedPlace) {
	if r.filter.Netns != 0 && place.Inode != r.filter.Netns || !r.filter.Tracks(place) {
		return
	}
	a.somewhere = true
	a.openBook(place.Place)
	if a.asksTable && r.connected(place.Place) {
		a.connected = true
	}
	if !place.NAT4 && !place.NAT6 {
		return // a program of packets is there
	}
	traces, err := observe.OpenWaiting(place, r.filter)
	if err != nil {
		a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "new connections", Why: err.Error()})
	}
	a.rules = append(a.rules, traces...)
}

// Waiting says whether no connection has matched yet.
func (r *Run) Waiting() bool { return r.waits.Load() }

// errFound ends a dump.
var errFound = errors.New("found")

// connected says whether a connection of the filter is in the table of a namespace already, as it is on one side of a
// translation or on the other.
func (r *Run) connected(place netns.Place) bool {
	err := at(place, func() error { // of what can't be read nothing is known
		_, err := conntrack.Dump(context.Background(), conntrack.Filter{Proto: r.filter.Protocol}, func(f *conntrack.Flow) error {
			for _, t := range []conntrack.Tuple{f.Orig, f.Reply} {
				if r.wants(t.Src, t.Dst, t.SrcPort, t.DstPort) || r.wants(t.Dst, t.Src, t.DstPort, t.SrcPort) {
					return errFound
				}
			}
			return nil
		})
		return err
	})
	return errors.Is(err, errFound)
}

func (r *Run) wants(from, to netip.Addr, sport, dport uint16) bool {
	within := func(e observe.PacketEnd, a netip.Addr, port uint16) bool {
		return (!e.Addresses.IsValid() || e.Addresses.Contains(a)) && (e.Port == 0 || e.Port == port)
	}
	return within(r.filter.A, from, sport) && within(r.filter.B, to, dport) &&
		(r.filter.Port == 0 || r.filter.Port == sport || r.filter.Port == dport)
}

// at runs fn in a namespace.
func at(place netns.Place, fn func() error) error {
	h, err := open(place.Ref, place.Inode)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Do(fn)
}

// open opens a namespace by what led to it when it was found: the process may have ended since, and another have its number.
func open(ref string, inode uint64) (*netns.Handle, error) {
	h, err := netns.Open(ref)
	if err == nil && h.Inode() != inode {
		return nil, errors.Join(fmt.Errorf("%s is another namespace now", ref), h.Close())
	}
	return h, err
}

// await attaches everything once a connection has begun, or one of its packets was dropped. If ctx is over before,
// nothing is.
func (r *Run) await(ctx context.Context) error {
	for ctx.Err() == nil {
		e, err := r.packets.Read(time.Now().Add(tick))
		switch {
		case err == nil: // a drop, or a new connection without NAT: with its entry it is followed
			return r.beginWith(&e)
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
		select {
		case <-r.begun:
			return r.begin()
		default:
		}
		if err := r.askEntries(); err != nil {
			return err
		}
		r.refresh()
	}
	return nil
}

// begin ends waiting.
func (r *Run) begin() error { return r.beginWith(nil) }

// beginWith begins with what was seen of a packet; nil for nothing but what rules reported.
//
//  1. What follows packets is attached, while what waits still reads.
//  2. What waits ends when it has read all that was reported to it.
//  3. What the programs have seen until then is taken.
//
// So of each packet that rules reported to what waited it is known whether the programs saw it, in whichever
// order natkit came to read the two.
func (r *Run) beginWith(seen *snapshot.TraceEvent) error {
	waited := r.at
	if err := r.packets.Detach(); err != nil {
		return err
	}
	if err := r.attach(); err != nil {
		return err
	}
	r.waits.Store(false)
	r.last = monotonic()
	known := map[packetIn]bool{}
	if seen != nil {
		r.take(*seen)
		known[packetOf(seen)] = true
	}
	if err := r.takeSeen(known); err != nil {
		return err
	}
	var met []snapshot.TraceEvent
	for _, e := range waited.takeMet() {
		r.early[metOf(&e)] = true
		if at := packetOf(&e); e.Head != nil && !known[at] {
			known[at] = true
			met = append(met, r.firstPacket(e, waited)...)
		}
		met = append(met, e)
	}
	for _, e := range met {
		if e.Entry != nil { // its other packets have these ends
			_ = r.packets.Follow(e.Entry.Original)
			_ = r.packets.Follow(e.Entry.Reply)
		}
		r.joined.Add(e)
	}
	return nil
}

// packetIn is a packet in a namespace.
type packetIn struct{ netns, identity uint64 }

func packetOf(e *snapshot.TraceEvent) packetIn { return packetIn{e.Netns, e.Identity} }

// maxSeen bounds how much is taken before rules are: more than a second of packets at the usual rate.
const maxSeen = 1 << 16

// takeSeen takes what the programs have seen, and adds the packets to known.
func (r *Run) takeSeen(known map[packetIn]bool) error {
	now := time.Now()
	for range maxSeen {
		e, err := r.packets.Read(now)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
		r.take(e)
		known[packetOf(&e)] = true
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
	book := waited.book(e.Netns)
	if book == nil {
		return nil
	}
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	t := e.Tuple
	_ = at(book.place, func() error { // without it less is known of the packet
		ctx, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_, err := conntrack.Dump(ctx, conntrack.Filter{Src: host(t.Source.Addr()), Dst: host(t.Destination.Addr())}, func(f *conntrack.Flow) error {
			if tupleOf(f.Proto, f.Orig) == t {
				out = &snapshot.TraceEntry{ID: 1, State: "new", Original: t, Reply: tupleOf(f.Proto, f.Reply)}
			}
			return nil
		})
		return err
	})
	return out
}

// tupleOf is one direction of an entry as packets have it.
func tupleOf(protocol uint8, t conntrack.Tuple) snapshot.TraceTuple {
	out := snapshot.TraceTuple{Protocol: conntrack.ProtoName(protocol)}
	if protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6 {
		out.ID, t.SrcPort, t.DstPort = t.SrcPort, 0, 0
	}
	out.Source, out.Destination = netip.AddrPortFrom(t.Src, t.SrcPort), netip.AddrPortFrom(t.Dst, t.DstPort)
	return out
}
