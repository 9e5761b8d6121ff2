// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/testutil/ktest"
)

// However fast events come, the log goes on with everything else: its clock, its hours, its end.
func TestKernelTakeEnds(t *testing.T) {
	s := &kernelSource{c: &collector{}, tracker: newTracker(What{}), heard: make(chan batch, 3*waitingBatches)}
	for range cap(s.heard) {
		s.heard <- batch{since: monotonic()}
	}
	if err := s.take(t.Context()); err != nil || len(s.heard) == 0 {
		t.Errorf("%v; %d batches are left for the next time", err, len(s.heard))
	}
}

// What was heard of the kernel before the log ends is recorded.
func TestKernelLast(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	var at time.Time
	r.with(func(c *collector) {
		s := &kernelSource{c: c, tracker: newTracker(What{}), heard: make(chan batch, 2), stop: func() {}}
		c.sources = append([]source{s}, c.sources...)
		f := flow(1, 17, tuple("10.0.0.9:1000", "192.0.2.1:53"), tuple("192.0.2.1:53", "198.51.100.1:5000"))
		s.heard <- batch{since: monotonic(), events: []event{{at: monotonic(), flow: *f}}}
		s.heard <- batch{since: monotonic(), err: context.Canceled}
		at = time.Now()
		r.log.happens(datapath.LogCreated, key(1))
		if err := c.last(); err != nil {
			t.Fatal(err)
		}
		c.sources = c.sources[1:]
	})
	for _, port := range []uint16{5000, 1} {
		if got := r.who(port, at.Add(time.Millisecond)); len(got.Lives) != 1 {
			t.Errorf("port %d: %+v", port, got)
		}
	}
}

// closingLog counts how often it was closed.
type closingLog struct {
	*fakeLog
	closed int
}

func (l *closingLog) Abandon() error { l.closed++; return nil }

// A log that cannot be kept lets go of the engine: the next try has it.
func TestRunFails(t *testing.T) {
	ns, err := netns.Open("")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	sink, err := natlog.ParseSink("syslog+tls://log?ca=/none/ca.pem")
	if err != nil {
		t.Fatal(err)
	}
	log := &closingLog{fakeLog: newFakeLog()}
	for name, o := range map[string]Options{
		"a sink":    {Store: store.Options{Dir: t.TempDir()}, Sinks: []natlog.Sink{sink}},
		"no folder": {Store: store.Options{Dir: "/proc/none"}},
	} {
		o.Namespace, o.Say, o.openEngine = ns, func(string) {}, func() (engineLog, error) { return log, nil }
		log.closed = 0
		if err := Run(t.Context(), o); err == nil || log.closed != 1 {
			t.Errorf("%s: %v, closed %d times", name, err, log.closed)
		}
	}
}

// What ended while records of the engine were lost was there until the first of these.
func TestEngineUnseenEnd(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	var asked time.Time
	var lost natlog.Micros
	r.with(func(c *collector) {
		r.log.happens(datapath.LogCreated, key(1))
		if err := c.tick(t.Context()); err != nil {
			t.Fatal(err)
		}
		asked = time.Now()
		r.log.room = 0
		r.log.happens(datapath.LogEnded, key(1))
		lost = c.time(int64(r.log.loss.First))
		ktest.Wait(t, time.Second, "the clock to go on", func() bool { return c.now() > lost })
	})
	if got := r.who(1, asked); len(got.Lives) != 1 || got.Lives[0].Least != lost || got.Lives[0].Until <= lost {
		t.Errorf("%+v, want an end not before %v", got, lost.Time())
	}
}
