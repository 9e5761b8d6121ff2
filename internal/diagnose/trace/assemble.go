// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"slices"

	"natkit/internal/snapshot"
)

// Assembler joins events to packets and packets to connections. It is for one goroutine.
type Assembler struct {
	deriver     Deriver
	open        map[uint64]*way // by the address of the skb
	ways        []*way          // not taken yet, in the order in which they began
	runs        []*run          // of nftables' trace, not joined yet
	current     map[runKey]*run // the one that messages go on with
	connections map[snapshot.TraceTuple]direction
	confirmed   map[entryKey]uint64 // when an entry with this tuple was last seen
	numbers     struct{ packets, connections int }
	left        uint64 // events that found no room
}

// way is a packet under way.
type way struct {
	events []snapshot.TraceEvent
	number int
}

func (w *way) last() *snapshot.TraceEvent { return &w.events[len(w.events)-1] }

// run is what nftables reported of one packet's way through one base chain.
type run struct {
	events []snapshot.TraceEvent
}

// chain is the base chain.
func (r *run) chain() [3]string {
	rule := r.events[0].Rule
	return [3]string{rule.Family, rule.Table, rule.Chain}
}

type runKey struct{ netns, id uint64 }

// entryKey is one direction of an entry.
type entryKey struct {
	netns uint64
	tuple snapshot.TraceTuple
}

// direction of a connection: that of its first packet, or the other.
type direction struct {
	connection int
	reply      bool
}

// Bounds of what is kept of packets under way, and times in nanoseconds.
const (
	maxWays   = 10000
	maxRuns   = 10000
	maxEvents = 256 // of one packet
	maxTuples = 100000

	// settle is how long nothing more is heard of a packet until it is complete.
	settle = 300_000_000
	// wire is how long a packet may be on its way from one namespace to another.
	wire = 200_000_000
)

// Deriver finds rules that the kernel did not report, by following the saved rules of a namespace.
// Several are alternatives, none is not known.
type Deriver interface {
	// Dropped are rules that may have dropped a packet in a function of the kernel.
	Dropped(netns uint64, function string, p snapshot.DroppedPacket) []Rule
	// Translated are rules that may have translated a packet in a hook.
	Translated(netns uint64, hook string, p snapshot.DroppedPacket, after snapshot.TraceTuple) []Rule
	// Forwarded says how a program of natkit's in a namespace forwarded a packet that was seen at a
	// time, "" if none did.
	Forwarded(netns uint64, before, after snapshot.TraceTuple, at uint64) string
	// Crossed says the same of a packet that no namespace saw, and which namespace it was.
	Crossed(before, after snapshot.TraceTuple, at uint64) (namespace, how string)
	// Refused says why a program of natkit's in a namespace dropped packets shortly behind a time, "" if it dropped none.
	Refused(netns uint64, at uint64) string
	// RefusedUnseen says the same of the programs that drop packets before the stack sees them, in other namespaces than the one
	// that the packet was sent from.
	RefusedUnseen(netns uint64, at uint64) string
}

// NewAssembler returns an empty one. Without a deriver nothing is derived.
func NewAssembler(d Deriver) *Assembler {
	return &Assembler{deriver: d, open: map[uint64]*way{}, current: map[runKey]*run{}, connections: map[snapshot.TraceTuple]direction{}, confirmed: map[entryKey]uint64{}}
}

// Connection is the number of the connection that a tuple is of, 0 if it is of none that was seen.
func (a *Assembler) Connection(t snapshot.TraceTuple) int { return a.connections[t].connection }

// Lost is how many events found no room.
func (a *Assembler) Lost() uint64 { return a.left }

// Add takes an event. Those of one source come in their order.
func (a *Assembler) Add(e snapshot.TraceEvent) {
	if e.Rule != nil {
		a.addRule(e)
		return
	}
	if e.Drop != nil && e.Drop.Benign && e.Netns == 0 { // a socket that had received it freed it
		delete(a.open, e.Packet)
		return
	}
	w := a.find(&e)
	if w == nil {
		if len(a.ways) >= maxWays {
			a.left++
			return
		}
		a.numbers.packets++
		w = &way{number: a.numbers.packets}
		a.ways = append(a.ways, w)
	}
	if len(w.events) >= maxEvents {
		a.left++
		return
	}
	if e.Netns == 0 && len(w.events) > 0 { // a socket dropped it: it has left its device
		last := w.last()
		e.Netns, e.Namespace, e.Interface = last.Netns, last.Namespace, last.Interface
	}
	a.confirm(&e)
	a.connect(&e, w)
	w.events = append(w.events, e)
	a.open[e.Packet] = w
}

// confirm notes entries, and whether a new one has taken the place of one that was there: packets of the same new
// connection that are on their way at once each have one for a moment.
func (a *Assembler) confirm(e *snapshot.TraceEvent) {
	if e.Entry == nil {
		return
	}
	if len(a.confirmed) >= maxTuples {
		clear(a.confirmed)
	}
	key := entryKey{e.Netns, e.Entry.Original}
	if before, known := a.confirmed[key]; known && !e.Entry.Confirmed && e.TimeNS > before+settle {
		e.Entry.Replaces = true
	}
	if e.Entry.Confirmed {
		a.confirmed[key], a.confirmed[entryKey{e.Netns, e.Entry.Reply}] = e.TimeNS, e.TimeNS
	}
}

// addRule takes an event of nftables' trace. The first of a base chain holds the packet's head.
func (a *Assembler) addRule(e snapshot.TraceEvent) {
	key := runKey{e.Netns, e.Packet}
	r := a.current[key]
	if r == nil || e.Head != nil {
		if len(a.runs) >= maxRuns || e.Head == nil {
			a.left++
			return
		}
		r = &run{}
		a.runs = append(a.runs, r)
		a.current[key] = r
	}
	r.events = append(r.events, e)
}

// find returns the packet that an event goes on with, nil if it begins one.
func (a *Assembler) find(e *snapshot.TraceEvent) *way {
	if w := a.open[e.Packet]; w != nil {
		if goesOn(w.last(), e) {
			return w
		}
		if last := w.last(); becomesReply(last, e) {
			dropped := *last
			dropped.Point, dropped.TimeNS, dropped.Drop = snapshot.PointDropped, e.TimeNS, &snapshot.TraceDrop{Reply: e.Kind}
			w.events = append(w.events, dropped)
			return nil
		}
	}
	if e.Point != snapshot.PointReceived {
		return nil
	}
	// Received from a device that made another skb of it.
	for _, w := range slices.Backward(a.ways) {
		if last := w.last(); last.Point == snapshot.PointSent && last.Packet != e.Packet && (sameOnWire(last, e) || a.crossed(last, e)) {
			return w
		}
	}
	return nil
}

// crossed says whether a packet was translated and forwarded at XDP, on its way from a device to
// another: no packet of the stack was made of it there.
func (a *Assembler) crossed(sent, received *snapshot.TraceEvent) bool {
	if a.deriver == nil || sent.Identity != received.Identity || received.TimeNS >= sent.TimeNS+wire || sent.Tuple == received.Tuple {
		return false
	}
	_, how := a.deriver.Crossed(sent.Tuple, received.Tuple, sent.TimeNS)
	return how != ""
}

// goesOn says whether an event of an skb is about the same packet as the one before.
func goesOn(last, e *snapshot.TraceEvent) bool {
	switch {
	case last.Point == snapshot.PointDropped, e.Point == snapshot.PointMade:
		return false
	case e.TimeNS > last.TimeNS+10*settle:
		return false
	case e.Point == snapshot.PointReceived && last.Point == snapshot.PointSent:
		return sameOnWire(last, e)
	case e.Point == snapshot.PointQueued && last.Point == snapshot.PointReceived && e.Netns == last.Netns && e.Entry == nil:
		return e.Identity == last.Identity // forwarded by a bridge or a program, or a new packet in the same memory
	}
	return e.Identity == last.Identity
}

// becomesReply says whether a program at tc has dropped a packet by making of it the ICMP error about it.
func becomesReply(last, e *snapshot.TraceEvent) bool {
	return last.Point == snapshot.PointReceived && e.Point == snapshot.PointQueued && e.Netns == last.Netns &&
		e.About != nil && *e.About == last.Tuple && e.Tuple.Destination.Addr() == last.Tuple.Source.Addr()
}

func sameOnWire(sent, received *snapshot.TraceEvent) bool {
	return sent.Identity == received.Identity && sent.Tuple == received.Tuple && received.TimeNS < sent.TimeNS+wire
}

// ownOf is the tuple by which an event's packet is of a connection.
func ownOf(e *snapshot.TraceEvent) snapshot.TraceTuple {
	if e.About != nil {
		return e.About.Turned()
	}
	return e.Tuple
}

// connect learns tuples: an entry joins those of both its directions, and a packet those that it had before with those that it has now.
func (a *Assembler) connect(e *snapshot.TraceEvent, w *way) {
	own := ownOf(e)
	if e.Entry != nil {
		d, known := a.connections[e.Entry.Original]
		if !known {
			if d, known = a.connections[e.Entry.Reply]; known {
				d.reply = !d.reply
			}
		}
		if !known {
			d, known = a.connections[own]
			if e.Entry.IsReply {
				d.reply = !d.reply
			}
		}
		if !known {
			d = a.begin()
		}
		a.learn(e.Entry.Original, d)
		a.learn(e.Entry.Reply.Turned(), d)
		if e.About != nil {
			return
		}
		if e.Entry.IsReply {
			d.reply = !d.reply
		}
		a.learn(own, d)
		return
	}
	if _, known := a.connections[own]; known {
		return
	}
	var d direction
	if len(w.events) > 0 {
		d = a.connections[ownOf(w.last())]
	}
	if d.connection == 0 {
		d = a.begin()
	}
	a.learn(own, d)
}

func (a *Assembler) begin() direction {
	a.numbers.connections++
	return direction{connection: a.numbers.connections}
}

// learn remembers a tuple and its opposite. The first that is known of it stays.
func (a *Assembler) learn(t snapshot.TraceTuple, d direction) {
	if len(a.connections) >= maxTuples {
		clear(a.connections)
	}
	if _, known := a.connections[t]; !known {
		a.connections[t] = d
	}
	if _, known := a.connections[t.Turned()]; !known {
		a.connections[t.Turned()] = direction{d.connection, !d.reply}
	}
}

// Take returns the packets of which nothing was heard for a while, in the order in which they began.
// now is CLOCK_MONOTONIC; with 0 all are taken.
func (a *Assembler) Take(now uint64) []Packet {
	var out []Packet
	for len(a.ways) > 0 {
		w := a.ways[0]
		if now != 0 && w.last().TimeNS+settle > now {
			break
		}
		a.ways = a.ways[1:]
		out = append(out, a.packet(w))
		for _, e := range w.events {
			if a.open[e.Packet] == w {
				delete(a.open, e.Packet)
			}
		}
	}
	if now != 0 {
		a.runs = slices.DeleteFunc(a.runs, func(r *run) bool { return r.events[0].TimeNS+20*settle < now })
	}
	if len(a.current) > maxRuns {
		clear(a.current)
	}
	return out
}

// packet gives the account of one.
func (a *Assembler) packet(w *way) Packet {
	first := &w.events[0]
	p := Packet{
		Number: w.number, Protocol: first.Tuple.Protocol, Kind: first.Kind, Length: first.Length,
		StartNS: first.TimeNS, Tuple: first.Tuple.Ends(),
	}
	d := a.connections[ownOf(first)]
	p.Connection, p.Reply = d.connection, d.reply
	p.Steps, p.End = account(a.withRules(w.events, d.connection), a.deriver)
	return p
}

// withRules puts what nftables reported between the events of a packet: its messages have no time
// of their own, but a hook and a priority.
func (a *Assembler) withRules(events []snapshot.TraceEvent, connection int) []snapshot.TraceEvent {
	var out []snapshot.TraceEvent
	for len(events) > 0 {
		n := 1 // events in one namespace, in one pass through its stack
		for n < len(events) && events[n].Netns == events[0].Netns && events[n-1].Point != snapshot.PointSent {
			n++
		}
		segment := slices.Clone(events[:n])
		for _, r := range a.takeRuns(segment, connection) {
			segment = insertRun(segment, r)
		}
		out = append(out, segment...)
		events = events[n:]
	}
	return out
}

// takeRuns takes the runs that are about the packet of a segment: of each base chain one, as another is about the next
// packet of the same content. Datagrams of several connections may be alike but for their ends.
func (a *Assembler) takeRuns(segment []snapshot.TraceEvent, connection int) []*run {
	ofAnother := func(t snapshot.TraceTuple) bool {
		if slices.ContainsFunc(segment, func(e snapshot.TraceEvent) bool { return e.Tuple == t }) {
			return false
		}
		known := a.connections[t].connection
		return known != 0 && connection != 0 && known != connection
	}
	from, to := segment[0].TimeNS, segment[len(segment)-1].TimeNS+settle
	if p := segment[0].Point; p != snapshot.PointReceived && p != snapshot.PointMade {
		from -= min(from, settle) // it has met rules before it was seen
	}
	var out []*run
	a.runs = slices.DeleteFunc(a.runs, func(r *run) bool {
		e := &r.events[0]
		mine := e.Netns == segment[0].Netns && e.Identity == segment[0].Identity && e.TimeNS >= from && e.TimeNS < to &&
			!slices.ContainsFunc(out, func(o *run) bool { return o.chain() == r.chain() }) && !ofAnother(e.Tuple)
		if mine {
			out = append(out, r)
		}
		return mine
	})
	return out
}

// insertRun puts a run in front of the first event that lies behind its base chain.
func insertRun(segment []snapshot.TraceEvent, r *run) []snapshot.TraceEvent {
	at := position(&r.events[0])
	i := slices.IndexFunc(segment, func(e snapshot.TraceEvent) bool { return e.Rule == nil && at.compare(position(&e)) < 0 })
	if i < 0 {
		i = len(segment)
	}
	for j := range r.events { // a chain that is jumped to is on no hook itself
		r.events[j].Hook, r.events[j].Priority = r.events[0].Hook, r.events[0].Priority
	}
	return slices.Insert(segment, i, r.events...)
}

// place is how far along the path through a namespace.
type place struct{ hook, priority int }

func (p place) compare(q place) int {
	return cmp.Or(cmp.Compare(p.hook, q.hook), cmp.Compare(p.priority, q.priority))
}

var hookOrder = map[string]int{"ingress": 1, "prerouting": 2, "input": 3, "forward": 3, "output": 4, "postrouting": 5, "egress": 6}

func position(e *snapshot.TraceEvent) place {
	switch e.Point {
	case snapshot.PointReceived:
		return place{}
	case snapshot.PointQueued, snapshot.PointSent, snapshot.PointDropped:
		return place{hook: 7}
	}
	return place{hookOrder[e.Hook], e.Priority}
}
