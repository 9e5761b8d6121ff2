// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"encoding/binary"
	"hash/maphash"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/natlog"
)

// life is how a translation that is recorded is in use.
type life struct {
	since    natlog.Micros // 0: before it was first seen
	seen     natlog.Micros // when the log has it as alive, where it does not from its beginning
	sessions int
	unheard  bool // of one of its sessions the beginning was not heard, so that of the end nothing may be, either
}

// tracker knows what is alive. A mapping lives as long as one session uses it.
type tracker struct {
	what     What
	seed     maphash.Seed
	sessions map[uint64]struct{} // by hash of the entry's identity
	alive    map[natlog.Translation]life
	ended    natlog.Micros // of the last end that is recorded: rows of a file are in the order of time, so what begins again does so after it
	dump     bool          // it is what a dump found
	partial  bool          // a dump may have left some out
}

func newTracker(what What) *tracker {
	return &tracker{what: what, seed: maphash.MakeSeed(), sessions: map[uint64]struct{}{}, alive: map[natlog.Translation]life{}}
}

// each gives what is alive: the store's Alive.
func (t *tracker) each(yield func(natlog.Record) bool) {
	for tr, l := range t.alive {
		if !yield(natlog.Record{Translation: tr, Event: natlog.Alive, Since: l.since}) {
			return
		}
	}
}

// begin counts a session and reports whether its translations are new.
func (t *tracker) begin(f *conntrack.Flow, since natlog.Micros, record func(natlog.Record)) {
	trs, n := translations(f, t.what)
	if n == 0 {
		return
	}
	id := t.identity(f)
	if _, known := t.sessions[id]; known {
		return
	}
	t.sessions[id] = struct{}{}
	for _, tr := range trs[:n] {
		l, ok := t.alive[tr]
		if !ok {
			l.since = since
			record(natlog.Record{Translation: tr, Event: natlog.Created, Time: max(since, t.ended), Since: since})
		}
		l.sessions++
		l.unheard = l.unheard || t.dump
		t.alive[tr] = l
	}
}

// unheard is how many of which the end may not be heard.
func (t *tracker) unheard() (n int) {
	for _, l := range t.alive {
		if l.unheard {
			n++
		}
	}
	return n
}

// end is the end of a session. Of one that is not known nothing was recorded.
func (t *tracker) end(f *conntrack.Flow, at natlog.Micros, record func(natlog.Record)) {
	trs, n := translations(f, t.what)
	if n == 0 {
		return
	}
	id := t.identity(f)
	if _, known := t.sessions[id]; !known {
		return
	}
	delete(t.sessions, id)
	for _, tr := range trs[:n] {
		l := t.alive[tr]
		if l.sessions--; l.sessions > 0 {
			t.alive[tr] = l
			continue
		}
		delete(t.alive, tr)
		// What was found alive may have ended before that was recorded: its end still comes after.
		ended := max(at, l.seen)
		t.ended = max(t.ended, ended)
		record(natlog.Record{Translation: tr, Event: natlog.Ended, Time: ended, Since: l.since})
	}
}

// reported notes that the log has all of it as alive.
func (t *tracker) reported(at natlog.Micros) {
	t.ended = min(t.ended, at)
	for tr, l := range t.alive {
		l.seen = at
		t.alive[tr] = l
	}
}

// replace takes what a dump of the table found for what is alive: what is not there has
// ended unseen, after all was heard the last time; what is new began unseen.
func (t *tracker) replace(found *tracker, heard, at natlog.Micros, record func(natlog.Record)) {
	for tr, l := range t.alive {
		if now, ok := found.alive[tr]; ok {
			now.since, now.seen, now.unheard = l.since, l.seen, l.unheard || now.sessions > l.sessions
			found.alive[tr] = now
		} else if found.partial {
			found.alive[tr] = l
		} else {
			t.ended = at
			record(natlog.Record{Translation: tr, Event: natlog.Ended, Time: at, Since: l.since, Note: natlog.Unseen(max(heard, l.since))})
		}
	}
	for tr, l := range found.alive {
		if _, ok := t.alive[tr]; !ok {
			record(natlog.Record{Translation: tr, Event: natlog.Alive, Time: at, Since: l.since})
			l.seen = at
			found.alive[tr] = l
		}
	}
	if found.partial {
		maps.Copy(found.sessions, t.sessions)
	}
	t.sessions, t.alive = found.sessions, found.alive
}

// identity is what an entry and its end have in common and no other entry has: the kernel's
// identifier and the tuple.
func (t *tracker) identity(f *conntrack.Flow) uint64 {
	var b [64]byte
	binary.LittleEndian.PutUint32(b[0:], f.ID)
	binary.LittleEndian.PutUint16(b[4:], f.Zone)
	b[6] = f.Proto
	src, dst := f.Orig.Src.As16(), f.Orig.Dst.As16()
	copy(b[8:], src[:])
	copy(b[24:], dst[:])
	binary.LittleEndian.PutUint16(b[40:], f.Orig.SrcPort)
	binary.LittleEndian.PutUint16(b[42:], f.Orig.DstPort)
	return maphash.Bytes(t.seed, b[:])
}

// translations are those of an entry: none without NAT, two where its source and its
// destination are translated.
func translations(f *conntrack.Flow, what What) (trs [2]natlog.Translation, n int) {
	base := natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: f.Proto, Zone: f.Zone}
	if what.Destinations || what.Sessions {
		base.Kind = natlog.Session
	}
	add := func(internal, external, destination netip.AddrPort) {
		tr := base
		tr.Internal, tr.External = internal, external
		if what.Destinations {
			tr.Destination = destination
		}
		trs[n] = tr
		n++
	}
	icmp := f.Proto == unix.IPPROTO_ICMP || f.Proto == unix.IPPROTO_ICMPV6
	source, destination := netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
	if f.SNAT() {
		external := netip.AddrPortFrom(f.Reply.Dst, f.Reply.DstPort)
		if icmp { // the identifier is the source port of both directions
			external = netip.AddrPortFrom(f.Reply.Dst, f.Reply.SrcPort)
		}
		add(source, external, destination)
	}
	if f.DNAT() {
		internal := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
		if icmp {
			internal, destination = netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.SrcPort)
		}
		add(internal, destination, source)
	}
	return trs, n
}
