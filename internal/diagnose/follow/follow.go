// SPDX-License-Identifier: Apache-2.0

// Package follow runs a trace: it opens what the kernel offers in all namespaces, feeds package
// trace with what it reports, and hands on packets as soon as their account is complete.
package follow

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
)

// Options say what to follow.
type Options struct {
	Flow    trace.Flow
	Port    uint16 // of either end; 0: any
	Netns   uint64 // where packets are first seen; 0: anywhere
	Ifindex uint32 // likewise, in that namespace
	Rate    uint32 // packets in a second at most
	// Wait attaches nothing to the path of packets until a new connection matches or one of its packets is dropped, and
	// detaches again when no more is seen of any. Without a namespace in which a new connection can be
	// noticed it is no use, and everything is attached at once.
	Wait bool
	// Programs are natkit's own, whose steps are told; nil for none.
	Programs ProgramReader
	// Ended is called by Watch for conntrack entries of followed connections that ended before their time; nil: nobody
	// asks for them.
	Ended func(trace.EntryEnd) error
}

// Summary is what a run came to.
type Summary struct {
	Packets uint64            `json:"packets"`    // followed by the kernel, once in each namespace
	Capped  uint64            `json:"capped"`     // matched, but beyond the rate
	Lost    uint64            `json:"lost_steps"` // steps that found no room
	Missing []observe.Missing `json:"unavailable,omitempty"`
}

// Run is a trace that is on.
type Run struct {
	filter   observe.PacketFilter
	programs ProgramReader
	joined   *trace.Assembler
	packets  *observe.Packets
	at       *attachment
	begun    chan struct{} // while waiting: a connection has matched; nil: it never waits
	waits    atomic.Bool
	lost     atomic.Uint64 // times that rules were lost
	look     time.Time     // when new namespaces are looked for

	entries entries
	ended   func(trace.EntryEnd) error

	early map[metRule]bool // what was read while waiting
	last  uint64           // when a packet was last seen
}

// metRule is a rule that a packet met, by nftables' number of the packet: the kernel reports it to every reader.
type metRule struct {
	netns, packet uint64
	point         snapshot.TracePoint
	rule          snapshot.TraceRule
	begins        bool // a base chain
}

func metOf(e *snapshot.TraceEvent) metRule {
	rule := *e.Rule
	rule.Text = "" // a reader may not know it
	return metRule{e.Netns, e.Packet, e.Point, rule, e.Head != nil}
}

// attachment is what hangs in the kernel.
type attachment struct {
	missing []observe.Missing

	// While it waits for a connection:
	waits     bool
	asksTable bool // whether one is there already
	connected bool // one is
	somewhere bool // there are namespaces in which a new one is noticed

	mu    sync.Mutex
	books map[uint64]*book      // of rules, by namespace
	met   []snapshot.TraceEvent // what readers have read

	programs []programOf

	rules  []*observe.RuleTrace // nftables' own trace, by namespace
	reader sync.WaitGroup       // of rules
	stop   chan struct{}
	known  map[snapshot.TraceTuple]bool // in rules' tables
}

func newAttachment() *attachment {
	return &attachment{books: map[uint64]*book{}, stop: make(chan struct{}), known: map[snapshot.TraceTuple]bool{}}
}

// Open attaches everything, or what waits. Close must be called.
func Open(o Options) (*Run, error) {
	r := &Run{
		filter: observe.PacketFilter{
			A: observe.PacketEnd(o.Flow.A), B: observe.PacketEnd(o.Flow.B), Port: o.Port,
			Protocol: trace.Protocols[o.Flow.Protocol], Netns: o.Netns, Ifindex: o.Ifindex, Rate: o.Rate,
		},
		programs: o.Programs, ended: o.Ended, early: map[metRule]bool{},
	}
	r.joined = trace.NewAssembler(r)
	var err error
	if r.packets, err = observe.LoadPackets(r.filter); err != nil {
		return nil, err
	}
	if o.Wait {
		err = r.waitFirst()
	} else {
		err = r.attach()
	}
	if err == nil {
		err = r.packets.Begin()
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// attach follows packets from here on.
func (r *Run) attach() error {
	if err := r.packets.Attach(); err != nil {
		return err
	}
	a := newAttachment()
	was := r.replace(a)
	a.openPrograms(r.programs)
	if len(a.programs) > 0 {
		if err := r.packets.Cross(); err != nil {
			return errors.Join(err, was.close())
		}
	}
	r.refresh()
	return was.close() // what waited has been read until now
}

// refreshEvery is how often namespaces are looked for that were made, or got rules, since.
const refreshEvery = 2 * time.Second

// refresh opens what is new.
func (r *Run) refresh() {
	if time.Now().Before(r.look) {
		return
	}
	r.look = time.Now().Add(refreshEvery)
	a := r.at
	added, gone := r.packets.Refresh()
	a.leave(gone)
	for _, place := range added {
		before := len(a.rules)
		if a.waits {
			r.waitIn(a, place)
		} else {
			a.openRules(place, r.filter)
		}
		for _, t := range a.rules[before:] {
			clear(a.known) // it knows none
			a.reader.Go(func() { r.read(a, t) })
		}
	}
}

// leave lets go of namespaces that have gone: they last as long as a socket in them.
func (a *attachment) leave(gone []uint64) {
	if len(gone) == 0 {
		return
	}
	a.rules = slices.DeleteFunc(a.rules, func(t *observe.RuleTrace) bool {
		if !slices.Contains(gone, t.Netns()) {
			return false
		}
		_ = t.Close() // its reader ends by that
		return true
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, inode := range gone {
		delete(a.books, inode)
	}
}

// replace puts an attachment in the place of the one before, which it returns.
func (r *Run) replace(a *attachment) (was *attachment) {
	was = r.at
	r.at, r.look = a, time.Time{}
	return was
}

// book has the rules of a namespace; nil if they are not read.
func (a *attachment) book(inode uint64) *book {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.books[inode]
}

// openBook reads the rules of a namespace.
func (a *attachment) openBook(place netns.Place) {
	b, err := newBook(place)
	if err != nil {
		a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "names of rules", Why: err.Error()})
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.books[place.Inode] = b
}

// openRules reads the rules of a namespace and has the kernel report those that packets meet.
func (a *attachment) openRules(place observe.HookedPlace, f observe.PacketFilter) {
	if !place.NFTables && !place.Legacy {
		return
	}
	a.openBook(place.Place)
	if !place.NFTables {
		return
	}
	t, err := observe.OpenRuleTrace(place, f)
	if err != nil {
		a.missing = append(a.missing, observe.Missing{Namespace: place.Ref, What: "rules of nftables that packets meet; they are derived", Why: err.Error()})
		return
	}
	a.rules = append(a.rules, t)
}

// lastRead is how long a reader that ends waits for what the kernel has reported to it already.
const lastRead = 5 * time.Millisecond

// read takes what one namespace's trace reports, until the attachment ends and nothing is left.
func (r *Run) read(a *attachment, t *observe.RuleTrace) {
	var ends time.Time // when it stops reading, even if there is more
	for {
		wait := tick
		select {
		case <-a.stop:
			wait = lastRead
			if ends.IsZero() {
				ends = time.Now().Add(tick)
			}
		default:
		}
		events, err := t.Read(time.Now().Add(wait))
		if errors.Is(err, observe.ErrRulesLost) {
			r.lost.Add(1)
			err = nil
		}
		over := !ends.IsZero() && (err != nil || time.Now().After(ends))
		if over || err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		for i := range events {
			if b := a.book(events[i].Netns); b != nil {
				b.name(&events[i])
			}
		}
		a.keep(events)
		if a.waits && len(events) > 0 {
			select {
			case r.begun <- struct{}{}:
			default:
			}
		}
	}
}

// keep keeps what was read.
func (a *attachment) keep(events []snapshot.TraceEvent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.met = append(a.met, events...)
}

// takeMet takes what was read.
func (a *attachment) takeMet() []snapshot.TraceEvent {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := a.met
	a.met = nil
	return out
}

// maxKnown bounds what is remembered of tuples: those of connections that go on are learnt again.
var maxKnown = 4096

// mark has nftables report the rules of connections that got other tuples, too.
func (r *Run) mark(e *snapshot.TraceEvent) {
	a := r.at
	tuples := []snapshot.TraceTuple{e.Tuple, e.Tuple.Turned()}
	if e.Entry != nil {
		tuples = append(tuples, e.Entry.Original, e.Entry.Reply)
	}
	tuples = slices.DeleteFunc(tuples, func(t snapshot.TraceTuple) bool { return a.known[t] })
	if len(tuples) == 0 {
		return
	}
	if len(a.known) >= maxKnown {
		clear(a.known)
		for _, t := range a.rules {
			_ = t.Forget() // what stays costs room alone
		}
	}
	for _, t := range tuples {
		a.known[t] = true
	}
	for _, t := range a.rules {
		_ = t.Follow(tuples...) // without it a rule is derived
	}
}

// Close detaches everything.
func (r *Run) Close() error {
	return errors.Join(r.at.close(), r.packets.Close())
}

// close ends an attachment; nil is none.
func (a *attachment) close() error {
	if a == nil {
		return nil
	}
	close(a.stop)
	a.reader.Wait()
	var errs []error
	for _, t := range a.rules {
		errs = append(errs, t.Close())
	}
	for _, p := range a.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// Missing is what can't be seen.
func (r *Run) Missing() []observe.Missing {
	missing := slices.Concat(r.packets.Missing(), r.at.missing)
	snapshot.CleanAny(&missing)
	return missing
}

// tick is how often complete packets are looked for.
const tick = 100 * time.Millisecond

// Watch calls fn with each packet until ctx ends or fn returns an error, which it returns.
func (r *Run) Watch(ctx context.Context, fn func(trace.Packet) error) error {
	next := time.Now().Add(tick)
	for {
		if r.at.waits {
			if err := r.await(ctx); err != nil || r.at.waits {
				return err
			}
		}
		e, err := r.packets.Read(next)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return err
		default:
			r.take(e)
		}
		if time.Now().Before(next) {
			continue
		}
		next = time.Now().Add(tick)
		over := ctx.Err() != nil
		if over {
			if err := r.takeSeen(map[packetIn]bool{}); err != nil {
				return err
			}
		}
		for _, e := range r.at.takeMet() {
			if !r.early[metOf(&e)] {
				r.joined.Add(e)
			}
		}
		if err := r.askEntries(); err != nil {
			return err
		}
		r.at.keepRefused()
		now := monotonic()
		if err == nil { // what came later may not be read yet
			now = e.TimeNS
		}
		if over {
			now = 0
		}
		for _, p := range r.joined.Take(now) {
			snapshot.CleanAny(&p) // an interface or a chain may be called anything
			if err := fn(p); err != nil {
				return err
			}
		}
		if over {
			return nil
		}
		r.refresh()
		if r.begun != nil && now > r.last+idle {
			if err := r.wait(); err != nil {
				return err
			}
		}
	}
}

// askEntries reports entries that ended.
func (r *Run) askEntries() error {
	for _, end := range r.entries.ask() {
		end.Connection = r.joined.Connection(end.Tuple)
		snapshot.CleanAny(&end)
		if err := r.ended(end); err != nil {
			return err
		}
	}
	return nil
}

// take takes an event of the programs.
func (r *Run) take(e snapshot.TraceEvent) {
	if r.ended != nil {
		r.entries.watch(&e)
	}
	r.mark(&e)
	r.joined.Add(e)
	r.last = e.TimeNS
}

// Summary returns the totals until now.
func (r *Run) Summary() (Summary, error) {
	c, err := r.packets.Counts()
	return Summary{Packets: c.Packets, Capped: c.Capped, Lost: c.Lost + r.joined.Lost() + r.lost.Load(), Missing: r.Missing()}, err
}

// monotonic is the clock of the events.
func monotonic() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it can't fail
	return uint64(t.Nano())
}
