// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/natlog"
)

// kernelSource is the kernel's own NAT, also under accel: conntrack's events, with a dump of the
// table at the start and after every loss.
type kernelSource struct {
	c        *collector
	listener *conntrack.Listener
	stop     context.CancelFunc
	heard    chan batch
	tracker  *tracker
	auto     bool // entries end without an event if they began while nobody listened (nf_conntrack_events=2), or events were off
	looked   time.Time
	dumped   int64 // CLOCK_MONOTONIC when the table began to be read the last time
	before   int   // translations of which no event may tell the end

	modeAt time.Time     // when the setting of events was read
	on     natlog.Micros // when it was on, the last time
	wasOn  int64         // CLOCK_MONOTONIC, before it was off
	off    bool
}

const (
	// looks: how often the table is read where entries from before the start end without an
	// event (nf_conntrack_events=2).
	looks = time.Minute
	// modes: how often the setting is read: somebody may turn events off.
	modes = 10 * time.Second
	// waitingBatches: when the writer is behind by these, the kernel's buffer fills.
	waitingBatches = 256
)

// event is an entry that began or ended.
type event struct {
	ended bool
	at    int64 // CLOCK_MONOTONIC
	flow  conntrack.Flow
}

// batch is what was heard at once.
type batch struct {
	events []event
	lost   bool
	since  int64 // of what was lost: CLOCK_MONOTONIC
	err    error
}

// newKernelSource listens, and reads what is alive. It is nil if the context has ended.
func newKernelSource(ctx context.Context, c *collector) (_ *kernelSource, err error) {
	s := &kernelSource{c: c, tracker: newTracker(c.o.What), heard: make(chan batch, waitingBatches)}
	inner, stop := context.WithCancel(ctx)
	s.stop = stop
	var mode conntrack.EventsMode
	if err := c.o.Namespace.Do(func() (err error) {
		if s.listener, err = conntrack.Listen(inner); err != nil { // loads the modules that have the setting
			return err
		}
		mode, err = conntrack.ReadEventsMode()
		return err
	}); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if mode == conntrack.EventsOff {
		return nil, errors.Join(errors.New("conntrack events are off: `sysctl -w net.netfilter.nf_conntrack_events=1`, then start it again"), s.close())
	}
	s.auto = mode == conntrack.EventsAuto
	go s.listen(inner)
	found, err := s.dump(ctx)
	if ctx.Err() != nil || err != nil {
		err = errors.Join(err, s.close())
		if ctx.Err() != nil { // stopped before it had begun
			err = nil
		}
		return nil, err
	}
	s.tracker, s.before, s.looked = found, len(found.alive), time.Now()
	found.dump = false // what it has from here on is heard
	s.modeAt, s.on, s.wasOn = s.looked, c.now(), monotonic()
	if s.auto {
		c.o.Say("net.netfilter.nf_conntrack_events is 2: ends of entries that are older than this start are seen up to a minute late; with 1 they are not")
	}
	return s, nil
}

func (s *kernelSource) each(yield func(natlog.Record) bool) { s.tracker.each(yield) }

func (s *kernelSource) reported(at natlog.Micros) {
	if s.tracker.reported(at); at == 0 { // by another clock from now on
		s.on = s.c.now()
	}
}

func (s *kernelSource) close() error {
	s.stop()
	if s.listener != nil {
		s.listener.Close()
	}
	return nil
}

// listen hears events until the context ends.
func (s *kernelSource) listen(ctx context.Context) {
	good := monotonic()
	for {
		var b batch
		b.lost, b.err = s.listener.Next(func(ended bool, f *conntrack.Flow) {
			e := event{ended: ended, at: monotonic(), flow: *f}
			// What aliases the listener's buffer is not needed.
			e.flow.Secctx, e.flow.Helper, e.flow.Labels, e.flow.Names = nil, nil, nil, nil
			b.events = append(b.events, e)
		})
		b.since = good
		if !b.lost {
			good = monotonic()
		}
		select {
		case s.heard <- b:
		case <-ctx.Done():
			return
		}
		if b.err != nil {
			return
		}
	}
}

// take records what was heard until now. What comes during that is for the next call, however much it is.
func (s *kernelSource) take(ctx context.Context) error {
	lost := int64(0) // since when; 0: nothing was
	for range waitingBatches {
		b, ok := s.next()
		if !ok {
			break
		}
		if b.err != nil {
			return b.err
		}
		s.record(b.events)
		if b.lost && lost == 0 {
			lost = b.since
		}
	}
	if lost == 0 {
		return nil
	}
	if err := s.look(ctx, lost); err != nil {
		return err
	}
	s.c.o.Say("the kernel could not deliver all events: the log has a gap, and what is alive was read again")
	s.c.gap(natlog.Kernel, s.c.time(lost), s.c.now(), "events came faster than they could be read")
	return nil
}

// next is the next batch that was heard, if there is one.
func (s *kernelSource) next() (b batch, ok bool) {
	select {
	case b = <-s.heard:
		return b, true
	default:
		return b, false
	}
}

// record records events.
func (s *kernelSource) record(events []event) {
	for i := range events {
		if e := &events[i]; e.ended {
			s.tracker.end(&e.flow, s.c.time(e.at), s.c.record)
		} else {
			s.tracker.begin(&e.flow, s.c.time(e.at), s.c.record)
		}
	}
	s.c.append()
}

func (s *kernelSource) tick(ctx context.Context) (over bool, err error) {
	if time.Since(s.modeAt) >= modes {
		s.modeAt = time.Now()
		var mode conntrack.EventsMode
		if err := s.c.o.Namespace.Do(func() (err error) { mode, err = conntrack.ReadEventsMode(); return err }); err != nil {
			return false, err
		}
		if err := s.follow(ctx, mode); err != nil {
			return false, err
		}
	}
	if s.auto && s.before > 0 && time.Since(s.looked) >= looks {
		return false, s.look(ctx, s.dumped)
	}
	return false, nil
}

// follow records that events are missing while they are off. Of what began then there are none later
// either, but what is alive when they are on again is read.
func (s *kernelSource) follow(ctx context.Context, mode conntrack.EventsMode) error {
	was := s.off
	s.off = mode == conntrack.EventsOff
	s.auto = s.auto || s.off || mode == conntrack.EventsAuto
	if was || s.off {
		s.c.gap(natlog.Kernel, s.on, s.c.now(), "conntrack events were off (net.netfilter.nf_conntrack_events)")
	}
	s.on = s.c.now()
	if !was && !s.off {
		s.wasOn = monotonic()
	}
	switch {
	case s.off && !was:
		s.c.o.Say("net.netfilter.nf_conntrack_events was set to 0: nothing of the kernel's NAT is recorded; `sysctl -w net.netfilter.nf_conntrack_events=1`")
	case was && !s.off:
		s.c.o.Say("conntrack events are on again: what is alive was read")
		return s.look(ctx, s.wasOn)
	}
	return nil
}

// look compares what is alive with the table. Heard is the time of CLOCK_MONOTONIC until which the
// ends of what is not there any more were heard.
func (s *kernelSource) look(ctx context.Context, heard int64) error {
	found, err := s.dump(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	s.looked = time.Now()
	s.tracker.replace(found, s.c.time(heard), s.c.now(), s.c.record)
	s.before = s.tracker.unheard()
	s.c.append()
	return nil
}

// dump reads what is alive. The kernel may leave entries out when the table changes under
// it; then it is asked again.
func (s *kernelSource) dump(ctx context.Context) (found *tracker, err error) {
	const tries = 3
	s.dumped = monotonic()
	for range tries {
		found = newTracker(s.c.o.What)
		found.seed, found.dump = s.tracker.seed, true
		var res conntrack.DumpResult
		err = s.c.o.Namespace.Do(func() (err error) {
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
	s.c.o.Say("the table changed while it was read, three times: what is alive may be incomplete")
	return found, nil
}
