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
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
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
	packets *observe.Packets
	joined  *trace.Assembler
	books   map[uint64]*book // of rules, by namespace
	missing []observe.Missing

	rules  []*observe.RuleTrace // nftables' own trace, by namespace
	reader sync.WaitGroup       // of rules
	stop   chan struct{}
	known  map[snapshot.TraceTuple]bool // in rules' tables

	mu  sync.Mutex
	met []snapshot.TraceEvent // what readers have read
}

// Open attaches everything. Close must be called.
func Open(o Options) (*Run, error) {
	f := observe.PacketFilter{
		A: observe.PacketEnd(o.Flow.A), B: observe.PacketEnd(o.Flow.B), Port: o.Port,
		Protocol: trace.Protocols[o.Flow.Protocol], Netns: o.Netns, Ifindex: o.Ifindex, Rate: o.Rate,
	}
	p, err := observe.OpenPackets(f)
	if err != nil {
		return nil, err
	}
	r := &Run{
		packets: p, books: map[uint64]*book{}, missing: p.Missing(),
		stop: make(chan struct{}), known: map[snapshot.TraceTuple]bool{},
	}
	r.joined = trace.NewAssembler(r)
	for _, place := range p.Places() {
		r.openRules(place, f)
	}
	for _, t := range r.rules { // from here on books and rules are only read
		r.reader.Go(func() { r.read(t) })
	}
	return r, nil
}

// openRules reads the rules of a namespace and has the kernel report those that packets meet.
func (r *Run) openRules(place observe.HookedPlace, f observe.PacketFilter) {
	if !place.NFTables && !place.Legacy {
		return
	}
	b, err := newBook(place.Place)
	if err != nil {
		r.missing = append(r.missing, observe.Missing{Namespace: place.Ref, What: "names of rules", Why: err.Error()})
	}
	r.books[place.Inode] = b
	if !place.NFTables {
		return
	}
	t, err := observe.OpenRuleTrace(place.Place, f, place.Tracks)
	if err != nil {
		r.missing = append(r.missing, observe.Missing{Namespace: place.Ref, What: "rules of nftables that packets meet; they are derived", Why: err.Error()})
		return
	}
	r.rules = append(r.rules, t)
}

// read takes what one namespace's trace reports.
func (r *Run) read(t *observe.RuleTrace) {
	for {
		select {
		case <-r.stop:
			return
		default:
		}
		events, err := t.Read(time.Now().Add(tick))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		for i := range events {
			if b := r.books[events[i].Netns]; b != nil {
				b.name(&events[i])
			}
		}
		r.mu.Lock()
		r.met = append(r.met, events...)
		r.mu.Unlock()
	}
}

// takeMet takes what was read.
func (r *Run) takeMet() []snapshot.TraceEvent {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.met
	r.met = nil
	return out
}

// mark has nftables report the rules of connections that got other tuples, too.
func (r *Run) mark(e *snapshot.TraceEvent) {
	tuples := []snapshot.TraceTuple{e.Tuple, e.Tuple.Turned()}
	if e.Entry != nil {
		tuples = append(tuples, e.Entry.Original, e.Entry.Reply)
	}
	tuples = slices.DeleteFunc(tuples, func(t snapshot.TraceTuple) bool { return r.known[t] })
	if len(tuples) == 0 || len(r.known) > 100000 {
		return
	}
	for _, t := range tuples {
		r.known[t] = true
	}
	for _, t := range r.rules {
		_ = t.Follow(tuples...) // without it a rule is derived
	}
}

// Close detaches everything.
func (r *Run) Close() error {
	close(r.stop)
	r.reader.Wait()
	var errs []error
	for _, t := range r.rules {
		errs = append(errs, t.Close())
	}
	return errors.Join(append(errs, r.packets.Close())...)
}

// Missing is what can't be seen.
func (r *Run) Missing() []observe.Missing { return slices.Clone(r.missing) }

// tick is how often complete packets are looked for.
const tick = 100 * time.Millisecond

// Watch calls fn with each packet until ctx ends or fn returns an error, which it returns.
func (r *Run) Watch(ctx context.Context, fn func(trace.Packet) error) error {
	next := time.Now().Add(tick)
	for {
		e, err := r.packets.Read(next)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return err
		default:
			r.mark(&e)
			r.joined.Add(e)
		}
		if time.Now().Before(next) {
			continue
		}
		next = time.Now().Add(tick)
		for _, e := range r.takeMet() {
			r.joined.Add(e)
		}
		over := ctx.Err() != nil
		now := monotonic()
		if over {
			now = 0
		}
		for _, p := range r.joined.Take(now) {
			if err := fn(p); err != nil {
				return err
			}
		}
		if over {
			return nil
		}
	}
}

// Summary returns the totals until now.
func (r *Run) Summary() (Summary, error) {
	c, err := r.packets.Counts()
	return Summary{Packets: c.Packets, Capped: c.Capped, Lost: c.Lost + r.joined.Lost(), Missing: r.Missing()}, err
}

// monotonic is the clock of the events.
func monotonic() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it can't fail
	return uint64(t.Nano())
}
