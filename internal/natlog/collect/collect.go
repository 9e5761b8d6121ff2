// SPDX-License-Identifier: Apache-2.0

// Package collect makes the records of the log: from conntrack's events of the kernel's own
// NAT, also under accel, with a dump of the table at the start and after every loss.
package collect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
)

// Options of Run.
type Options struct {
	Namespace *netns.Handle
	Store     store.Options // Alive is set here
	What      What
	// Started is called when events are heard and what is alive is recorded.
	Started func(alive int)
	Say     func(text string)
	// Ticked is called every second.
	Ticked func(store.Stats)
}

// Times of a log.
const (
	tick = time.Second
	// looks: how often the table is read where entries from before the start end without an
	// event (nf_conntrack_events=2).
	looks = time.Minute
	// waiting events: when the writer is behind by these, the kernel's buffer fills.
	waitingBatches = 256
)

// event is an entry that began or ended.
type event struct {
	ended bool
	at    natlog.Micros
	flow  conntrack.Flow
}

// batch is what was heard at once.
type batch struct {
	events []event
	lost   bool
	since  time.Time // of what was lost
	err    error
}

// collector is one Run.
type collector struct {
	o       Options
	store   *store.Store
	tracker *tracker
	records []natlog.Record
	auto    bool // nf_conntrack_events=2
	looked  time.Time
	before  int // translations alive from before the start, of which no event may tell the end
}

// Run writes the log until the context ends.
func Run(ctx context.Context, o Options) (err error) {
	var listener *conntrack.Listener
	var mode conntrack.EventsMode
	if err := o.Namespace.Do(func() (err error) {
		if listener, err = conntrack.Listen(ctx); err != nil { // loads the modules that have the setting
			return err
		}
		if mode, err = conntrack.ReadEventsMode(); err != nil {
			listener.Close()
		}
		return err
	}); err != nil {
		return err
	}
	defer listener.Close()
	if mode == conntrack.EventsOff {
		return errors.New("conntrack events are off: `sysctl -w net.netfilter.nf_conntrack_events=1`, then start natkit log again")
	}
	c := &collector{o: o, tracker: newTracker(o.What), auto: mode == conntrack.EventsAuto}
	heard := make(chan batch, waitingBatches)
	inner, stop := context.WithCancel(ctx)
	defer stop()
	go listen(inner, listener, heard)
	found, err := c.dump(ctx)
	if ctx.Err() != nil { // stopped before it had begun
		return nil
	}
	if err != nil {
		return err
	}
	c.tracker, c.before, c.looked = found, len(found.alive), time.Now()
	c.o.Store.Alive = func(yield func(natlog.Record) bool) { c.tracker.each(yield) }
	if c.store, err = store.Open(c.o.Store); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.store.Close()) }()
	o.Started(len(c.tracker.alive))
	if c.auto {
		o.Say("net.netfilter.nf_conntrack_events is 2: ends of entries that are older than this start are seen up to a minute late; with 1 they are not")
	}
	return c.loop(ctx, heard)
}

// listen hears events until the context ends.
func listen(ctx context.Context, l *conntrack.Listener, heard chan<- batch) {
	good := time.Now()
	for {
		var b batch
		b.lost, b.err = l.Next(func(ended bool, f *conntrack.Flow) {
			e := event{ended: ended, at: natlog.MicrosOf(time.Now()), flow: *f}
			// What aliases the listener's buffer is not needed.
			e.flow.Secctx, e.flow.Helper, e.flow.Labels, e.flow.Names = nil, nil, nil, nil
			b.events = append(b.events, e)
		})
		b.since = good
		if !b.lost {
			good = time.Now()
		}
		select {
		case heard <- b:
		case <-ctx.Done():
			return
		}
		if b.err != nil {
			return
		}
	}
}

func (c *collector) loop(ctx context.Context, heard <-chan batch) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case b := <-heard:
			if b.err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return b.err
			}
			if err := c.take(ctx, &b); err != nil {
				return err
			}
		case <-ticker.C:
			if c.auto && c.before > 0 && time.Since(c.looked) >= looks {
				if err := c.look(ctx); err != nil {
					return err
				}
			}
			_ = c.store.Tick() // the store reports it, and tries again
			c.o.Ticked(c.store.Stats())
		}
	}
}

// take records what was heard.
func (c *collector) take(ctx context.Context, b *batch) error {
	c.records = c.records[:0]
	for i := range b.events {
		if e := &b.events[i]; e.ended {
			c.tracker.end(&e.flow, e.at, c.record)
		} else {
			c.tracker.begin(&e.flow, e.at, c.record)
		}
	}
	_ = c.store.Append(c.records) // the store counts and reports what it can't write
	if !b.lost {
		return nil
	}
	if err := c.look(ctx); err != nil {
		return err
	}
	c.o.Say("the kernel could not deliver all events: the log has a gap, and what is alive was read again")
	_ = c.store.Gap(b.since, time.Now(), "events came faster than they could be read")
	return nil
}

func (c *collector) record(r natlog.Record) { c.records = append(c.records, r) }

// look compares what is alive with the table.
func (c *collector) look(ctx context.Context) error {
	found, err := c.dump(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	c.looked = time.Now()
	c.records = c.records[:0]
	c.tracker.replace(found, natlog.MicrosOf(c.looked), c.record)
	c.before = 0
	for _, l := range c.tracker.alive {
		if l.since == 0 {
			c.before++
		}
	}
	_ = c.store.Append(c.records)
	return nil
}

// dump reads what is alive. The kernel may leave entries out when the table changes under
// it; then it is asked again.
func (c *collector) dump(ctx context.Context) (found *tracker, err error) {
	const tries = 3
	for range tries {
		found = newTracker(c.o.What)
		found.seed = c.tracker.seed
		var res conntrack.DumpResult
		err = c.o.Namespace.Do(func() (err error) {
			res, err = conntrack.Dump(ctx, conntrack.Filter{}, func(f *conntrack.Flow) error {
				since := natlog.Micros(0)
				if f.Has&conntrack.HasStart != 0 {
					since = natlog.Micros(f.Start / 1000)
				}
				found.begin(f, since, func(natlog.Record) {})
				return nil
			})
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read what is alive: %w", err)
		}
		if !res.Interrupted {
			return found, nil
		}
	}
	found.partial = true
	c.o.Say("the table changed while it was read, three times: what is alive may be incomplete")
	return found, nil
}
