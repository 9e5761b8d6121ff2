// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
)

// The clock of a log. What happens is timed by CLOCK_MONOTONIC, which nobody sets, and recorded by
// what the wall clock is ahead of that. So the same moment is always the same time, and within an
// hour of the store no time comes before what happened earlier. Only setting the clock changes the
// offset: then the store begins an hour.

func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// clockOffset is what the clock is ahead of CLOCK_MONOTONIC. The best of some readings, since
// somebody else may have the processor between the two clocks.
func clockOffset(wall func() time.Time) (offset int64) {
	best := int64(-1)
	for range 8 {
		before := monotonic()
		now := wall().UnixNano()
		after := monotonic()
		if d := after - before; best < 0 || d < best {
			best, offset = d, now-before-d/2
		}
	}
	return offset
}

// startClock reads the clock.
func (c *collector) startClock() {
	if c.o.Now == nil {
		c.o.Now = time.Now
	} else if c.o.Store.Now == nil {
		c.o.Store.Now = func() (time.Time, time.Duration) { return c.o.Now().Round(0), time.Duration(monotonic()) }
	}
	c.offset, c.checked = clockOffset(c.o.Now), monotonic()
}

// time is a time of CLOCK_MONOTONIC as the log has it.
func (c *collector) time(ns int64) natlog.Micros { return natlog.Micros((ns + c.offset) / 1000) }

// earlier is by what the clock was ahead of CLOCK_MONOTONIC before it was set.
type earlier struct{ until, offset int64 }

// wasUntil notes that, the earliest first.
func (c *collector) wasUntil(until, offset int64) {
	const most = 64 // more than a clock is set in the life of what is alive
	if c.was = append(c.was, earlier{until, offset}); len(c.was) > most {
		c.was = c.was[1:]
	}
}

// timeThen is a time of CLOCK_MONOTONIC by the clock of then.
func (c *collector) timeThen(ns int64) natlog.Micros {
	for _, w := range c.was {
		if ns < w.until {
			return natlog.Micros((ns + w.offset) / 1000)
		}
	}
	return c.time(ns)
}

func (c *collector) now() natlog.Micros { return c.time(monotonic()) }

// checkClock finds that the clock was set. What has happened until then is recorded by the clock of
// before.
func (c *collector) checkClock(ctx context.Context) error {
	now, running := clockOffset(c.o.Now), monotonic()
	if !stepped(now - c.offset) {
		c.checked = running
		return nil
	}
	if err := c.takeAll(ctx); err != nil {
		return err
	}
	c.followRules() // those of the last second are of the hour that ends
	known, before := c.time(c.checked), c.offset
	c.wasUntil(c.checked, before)
	c.offset, c.checked = clockOffset(c.o.Now), monotonic()
	_ = c.store.ClockStepped(time.Duration(c.offset-before), known) // the store reports it, and tries again
	for _, s := range c.sources {                                   // an hour has begun
		s.reported(0)
	}
	by := natlog.Micros((c.offset - before) / 1000)
	for _, at := range []*natlog.Micros{&c.followed, &c.ticked, &c.without.engine, &c.without.kernel} {
		if *at != 0 {
			*at += by
		}
	}
	return nil
}

// stepped reports whether a difference of offsets is that of a clock that was set.
func stepped(ns int64) bool {
	return ns >= int64(store.ClockStep) || -ns >= int64(store.ClockStep)
}
