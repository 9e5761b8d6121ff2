// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
)

// fakeLog is an engine's log in memory, with the maps that it is about.
type fakeLog struct {
	name     string
	ring     []datapath.LogRecord
	read     int // of ring, not released
	room     int
	next     uint32
	loss     datapath.LogLoss
	alive    map[datapath.LogKey]uint64
	what     rulefile.LogRecord
	asked    bool
	down     bool
	subs     []datapath.SubscriberUse
	uses     []datapath.AddressUse
	releases int
}

func newFakeLog() *fakeLog {
	return &fakeLog{name: "one", room: 1 << 30, alive: map[datapath.LogKey]uint64{}, what: rulefile.LogMappings}
}

func (f *fakeLog) Engine() (string, error)          { return f.name, nil }
func (f *fakeLog) What() (rulefile.LogRecord, bool) { return f.what, false }
func (f *fakeLog) Asked() bool                      { return f.asked }
func (f *fakeLog) Empty() bool                      { return f.read == len(f.ring) }
func (f *fakeLog) Next() uint32                     { return f.next }
func (f *fakeLog) Lost() datapath.LogLoss           { return f.loss }
func (f *fakeLog) Recorded(l datapath.LogLoss)      { f.loss.First = 0 }
func (f *fakeLog) Up() bool                         { return !f.down }
func (f *fakeLog) Interface(zone uint8) string      { return fmt.Sprintf("in%d", zone) }
func (f *fakeLog) CloseAsked() error                { f.read = 0; return nil }
func (f *fakeLog) Abandon() error                   { f.read = 0; return nil }
func (f *fakeLog) Release()                         { f.ring, f.read = f.ring[f.read:], 0; f.releases++ }

func (f *fakeLog) Addresses(fn func(datapath.AddressUse)) error {
	for _, u := range f.uses {
		fn(u)
	}
	return nil
}

func (f *fakeLog) Use(fn func(datapath.SubscriberUse)) error {
	for _, u := range f.subs {
		fn(u)
	}
	return nil
}

func (f *fakeLog) Read(out []datapath.LogRecord) ([]datapath.LogRecord, error) {
	n := min(cap(out)-len(out), len(f.ring)-f.read)
	out = append(out, f.ring[f.read:f.read+n]...)
	f.read += n
	return out, nil
}

func (f *fakeLog) Alive(fn func(datapath.LogKey, uint64)) error {
	for k, since := range f.alive {
		fn(k, since)
	}
	return nil
}

func (f *fakeLog) happens(event datapath.LogEvent, k datapath.LogKey) {
	r := datapath.LogRecord{LogKey: k, Event: event, Time: uint64(monotonic()), Sequence: f.next}
	f.next++
	if event == datapath.LogCreated {
		f.alive[k] = r.Time
	} else {
		r.Since = f.alive[k]
		delete(f.alive, k)
	}
	if len(f.ring) >= f.room {
		if f.loss.First == 0 {
			f.loss.First = r.Time
		}
		f.loss.Last = r.Time
		f.loss.Total++
		return
	}
	f.ring = append(f.ring, r)
}

func key(port uint16) datapath.LogKey {
	return datapath.LogKey{Kind: datapath.LogMapping, Protocol: unix.IPPROTO_UDP, Internal: [4]byte{10, 0, 0, 9}, External: [4]byte{198, 51, 100, 1}, InternalPort: port, ExternalPort: port}
}

// noRules is a namespace whose rules are not natkit's.
type noRules struct{}

func (noRules) Changed() (*control.RulesChange, error) { return nil, nil }

// fakeRules is a namespace whose rules a test changes.
type fakeRules struct {
	next *control.RulesChange
	err  error
}

func (f *fakeRules) Changed() (*control.RulesChange, error) {
	next := f.next
	f.next = nil
	return next, f.err
}

// running is a Run over a fake.
type running struct {
	t    *testing.T
	log  *fakeLog
	dir  string
	off  int64
	said []string

	written func(store.Batch)
}

// during runs the collector while something happens, which is recorded when it ends.
func (r *running) during(fn func()) {
	r.t.Helper()
	r.with(func(*collector) { fn() })
}

// with is during for who needs the collector.
func (r *running) with(fn func(*collector)) {
	r.t.Helper()
	c := &collector{o: Options{
		Store: store.Options{Dir: r.dir, Node: "gw", Say: func(string) {}, Written: r.written}, Say: func(s string) { r.said = append(r.said, s) },
		Started: func(int) {}, Ticked: func(store.Stats) {}, openEngine: func() (engineLog, error) { return r.log, nil }, Now: func() time.Time { return r.timeOf(uint64(monotonic())) },
	}, rules: noRules{}}
	c.startClock()
	engine, err := c.openEngine()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.begin(r.t.Context(), engine, nil); err != nil {
		r.t.Fatal(err)
	}
	fn(c)
	if err := c.tick(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	if err := c.closeSources(); err != nil {
		r.t.Fatal(err)
	}
	if err := c.store.Close(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *running) who(port uint16, at time.Time) store.Answer {
	r.t.Helper()
	m := natlog.MicrosOf(at)
	got, err := store.Who(r.dir, store.Question{Address: tuple("198.51.100.1:1", "198.51.100.1:1").Src, Port: port, Protocol: unix.IPPROTO_UDP, Since: m, Upto: m})
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

// What happens while nobody reads is in the log with its times, unless it found no room: that is a
// gap, and what is alive after it is right.
func TestEngineReadsOn(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	for _, port := range []uint16{1, 6} {
		r.log.happens(datapath.LogCreated, key(port))
		r.log.ring[len(r.log.ring)-1].Time -= uint64(time.Second)
		r.log.alive[key(port)] -= uint64(time.Second)
	}
	var at [4]time.Time
	r.during(func() { r.log.happens(datapath.LogCreated, key(2)) })
	mark := func(i int) { time.Sleep(2 * time.Millisecond); at[i] = time.Now(); time.Sleep(2 * time.Millisecond) }
	mark(0)
	r.log.happens(datapath.LogEnded, key(1))
	r.log.happens(datapath.LogCreated, key(3))
	mark(1)
	r.log.happens(datapath.LogEnded, key(3))
	r.during(func() {})
	mark(2)
	for _, c := range []struct {
		port uint16
		at   int
		has  bool
	}{{1, 0, true}, {1, 1, false}, {2, 0, true}, {2, 1, true}, {3, 0, false}, {3, 1, true}} {
		if got := r.who(c.port, at[c.at]); len(got.Gaps) > 0 || (len(got.Lives) == 1) != c.has {
			t.Errorf("port %d at %d: %+v", c.port, c.at, got)
		}
	}
	r.log.room = 1
	r.log.happens(datapath.LogCreated, key(4)) // the last that is in the ring
	mark(2)
	r.log.happens(datapath.LogEnded, key(2))
	r.log.happens(datapath.LogCreated, key(5))
	mark(3)
	time.Sleep(time.Duration(sameBeginning) * time.Microsecond) // or it is the same beginning
	for _, port := range []uint16{4, 6} {                       // these end, and begin again
		r.log.happens(datapath.LogEnded, key(port))
		r.log.happens(datapath.LogCreated, key(port))
	}
	var end time.Time
	r.during(func() { end = time.Now() })
	if got := r.who(5, end); len(got.Lives) != 1 {
		t.Errorf("what began unseen is not alive after the gap: %+v", got)
	}
	for _, port := range []uint16{4, 6} {
		again := r.timeOf(r.log.alive[key(port)])
		if got := r.who(port, end); len(got.Lives) != 1 || got.Lives[0].Since.Time().Sub(again).Abs() > time.Millisecond {
			t.Errorf("port %d began again at %v: %+v", port, again.UTC(), got)
		}
	}
	for port, want := range map[uint16]int{2: 1, 4: 1, 5: 0, 6: 1} {
		if got := r.who(port, at[2]); len(got.Lives) != want || len(got.Gaps) > 0 {
			t.Errorf("port %d before the gap: %+v", port, got)
		}
		if got := r.who(port, at[3]); len(got.Gaps) == 0 {
			t.Errorf("port %d in the gap: %+v", port, got)
		}
	}
	r.during(func() { end = time.Now() })
	if got := r.who(5, end); len(got.Lives) != 1 || len(got.Gaps) > 0 {
		t.Errorf("after another start: %+v", got)
	}
}

// A reader that is killed after it has stored records and before it has released them stores none twice.
func TestEngineStoresOnce(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	r.log.happens(datapath.LogCreated, key(1))
	r.log.happens(datapath.LogEnded, key(1))
	kept := slices.Clone(r.log.ring)
	r.during(func() {})
	r.log.ring, r.log.read = kept, 0
	r.log.happens(datapath.LogCreated, key(2))
	r.during(func() {})
	n := map[natlog.Event]int{}
	left := map[uint16]int{}
	for _, port := range []uint16{1, 2} {
		got := r.who(port, r.timeOf(kept[0].Time+1000))
		left[port] = len(got.Lives)
		n[natlog.Gap] += len(got.Gaps)
	}
	if !maps.Equal(left, map[uint16]int{1: 1, 2: 0}) || n[natlog.Gap] > 0 {
		t.Errorf("lives %v, gaps %v", left, n)
	}
}

func (r *running) timeOf(ns uint64) time.Time { return time.Unix(0, int64(ns)+r.off) }

// Another engine, a clock that was set, and another reader in between are gaps.
func TestEngineGaps(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*running)
		why    string
	}{
		"another engine": {func(r *running) { r.log = newFakeLog(); r.log.name = "two" }, "another engine was brought up"},
		"clock set":      {func(r *running) { r.off += int64(time.Hour) }, "the clock was set forward by 1h0m0s"},
		"another reader": {func(r *running) { r.log.next += 100 }, "read by another program"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
			r.during(func() { r.log.happens(datapath.LogCreated, key(1)) })
			time.Sleep(2 * time.Millisecond)
			between := time.Now()
			time.Sleep(2 * time.Millisecond)
			c.change(r)
			r.during(func() {})
			got := r.who(7, between)
			if len(got.Gaps) != 1 || !strings.Contains(got.Gaps[0].Why, c.why) {
				t.Errorf("%+v, want a gap as %s", got, c.why)
			}
		})
	}
}

// 80 per cent of a limit is recorded once, and again after it was below 70.
func TestLimits(t *testing.T) {
	var l limits
	what := limited{what: "ports"}
	var got []int
	for _, used := range []int{50, 79, 80, 95, 75, 85, 69, 81, 100} {
		if l.crosses(what, used, 100) {
			got = append(got, used)
		}
	}
	if want := []int{80, 81}; !slices.Equal(got, want) {
		t.Errorf("recorded at %v, want %v", got, want)
	}
	if l.crosses(limited{what: "sessions"}, 5, 0) {
		t.Error("what has no limit has reached it")
	}
}

// Who has 80 per cent of its ports or blocks is recorded, as a subscriber or as a pool, which is all of its
// addresses together.
func TestLimitsAreRecorded(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	file, err := rulefile.Parse("f", []byte("inside: in\noutside: out\npools:\n  cgn: {addresses: [198.51.100.1, 198.51.100.2]}\n  full: {addresses: 198.51.100.3}\nrules:\n  - {snat: any, to: cgn}\n"))
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr
	r.log.subs = []datapath.SubscriberUse{
		{Subscriber: addr("10.0.0.7"), External: addr("198.51.100.1"), Ports: 80, MostPorts: 100, Blocks: 3, MostBlocks: 4},
		{Subscriber: addr("10.0.0.8"), Zone: 3, Ports: 79, MostPorts: 100, Blocks: 4, MostBlocks: 5},
		{Subscriber: addr("10.0.0.9"), Ports: 1000},
	}
	r.log.uses = []datapath.AddressUse{
		{Address: addr("198.51.100.1"), Used: 900, Total: 1000}, {Address: addr("198.51.100.2"), Used: 690, Total: 1000},
		{Address: addr("198.51.100.3"), Used: 1000, Total: 1000, Blocks: true}, {Address: addr("198.51.100.4"), Used: 8, Total: 10},
	}
	var got []string
	r.written = func(b store.Batch) {
		for _, rec := range b.Records {
			if rec.Event == natlog.Quota || rec.Event == natlog.Exhausted {
				got = append(got, fmt.Sprintf("%v %v %v zone %d: %s (pool %q, near %t)", rec.Event, rec.Internal.Addr(), rec.External.Addr(), rec.Zone, rec.Note, rec.Pool(), rec.Nearly()))
			}
		}
	}
	r.with(func(c *collector) {
		c.engine.file, c.engine.pool = file, map[[4]byte]string{}
		look := func() {
			c.limits.looked = time.Time{}
			c.limits.look(c)
		}
		look()
		look() // the same again is no event
		r.log.uses[1].Used = 700
		look()
	})
	slices.Sort(got)
	want := []string{
		`exhausted invalid IP 198.51.100.1 zone 0: 80%: 1600 of 2000 ports of pool cgn in use (pool "cgn", near true)`,
		`exhausted invalid IP 198.51.100.3 zone 0: 100%: 1000 of 1000 ports in blocks of pool full in use (pool "full", near true)`,
		`exhausted invalid IP 198.51.100.4 zone 0: 80%: 8 of 10 ports of pool 198.51.100.4 in use (pool "198.51.100.4", near true)`,
		`quota 10.0.0.7 198.51.100.1 zone 0: 80%: 80 of 100 ports in use (pool "", near true)`,
		`quota 10.0.0.8 invalid IP zone 3: 80%: 4 of 5 port blocks in use (pool "", near true)`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("recorded are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// BenchmarkEngine is what a record of a session costs whoever keeps the log, from the ring to the journal.
func BenchmarkEngine(b *testing.B) {
	f := newFakeLog()
	c := &collector{o: Options{Store: store.Options{Dir: b.TempDir(), Node: "gw"}, Say: func(string) {}}, rules: noRules{}}
	c.startClock()
	s, err := newEngineSource(c, f)
	if err != nil {
		b.Fatal(err)
	}
	if err := c.begin(b.Context(), s, nil); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		for n := range uint32(1000) {
			k := datapath.LogKey{Kind: datapath.LogSession, Protocol: 6, Internal: [4]byte{10, 0, byte(n >> 8), byte(n)}, External: [4]byte{198, 51, 100, 1}, ExternalPort: uint16(n)}
			f.ring = append(f.ring, datapath.LogRecord{LogKey: k, Event: datapath.LogCreated + datapath.LogEvent(f.next/1000%2), Time: uint64(monotonic()), Sequence: f.next})
			f.next++
		}
		if err := s.take(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	if err := c.store.Close(); err != nil {
		b.Fatal(err)
	}
	var use unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &use); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*1000), "ns/record")
	b.ReportMetric(float64(use.Utime.Nano()+use.Stime.Nano())/float64(b.N*1000), "cpu-ns/record")
}

// What was looked up may have ended a moment before that was recorded: its end comes after.
func TestEngineEndDuringLook(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir()}
	r.with(func(c *collector) {
		r.log.alive[key(5000)] = uint64(monotonic()) // its beginning was lost
		time.Sleep(20 * time.Millisecond)
		ended := uint64(monotonic())
		time.Sleep(20 * time.Millisecond)
		if err := c.engine.compare(c.now()); err != nil {
			t.Fatal(err)
		}
		r.log.happens(datapath.LogEnded, key(5000))
		r.log.ring[len(r.log.ring)-1].Time = ended
		time.Sleep(50 * time.Millisecond)
	})
	if got := r.who(5000, r.timeOf(uint64(monotonic())).Add(-10*time.Millisecond)); len(got.Lives) != 0 {
		t.Errorf("%+v", got)
	}
}

// CPUs overtake each other: who begins when the log has an end may have an earlier time. In the order of
// time, as the rows of a file are, it still begins after that.
func TestEngineBeginBeforeEnd(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	r.log.what = rulefile.LogSessions
	to := func(last byte) datapath.LogKey {
		k := key(5000)
		k.Kind, k.Destination, k.DestinationPort = datapath.LogSession, [4]byte{192, 0, 2, last}, 443
		return k
	}
	var later time.Time
	r.during(func() { // the log has the machine's clock: what is to be apart in it has to happen apart
		r.log.happens(datapath.LogCreated, to(1))
		time.Sleep(5 * time.Millisecond)
		r.log.happens(datapath.LogEnded, to(1))
		r.log.happens(datapath.LogCreated, to(2))
		r.log.ring[2].Time = r.log.ring[1].Time - 20_000
		time.Sleep(5 * time.Millisecond)
		later = time.Now()
		time.Sleep(5 * time.Millisecond)
	})
	if got := r.who(5000, later); len(got.Lives) != 1 || len(got.Gaps) != 0 {
		t.Errorf("%+v", got)
	}
}

// busyLog is a fakeLog whose engine never stops recording.
type busyLog struct {
	*fakeLog
	reads int
	most  int // reads, before the test gives up
}

func (b *busyLog) Empty() bool { return b.reads > b.most }

func (b *busyLog) Read(out []datapath.LogRecord) ([]datapath.LogRecord, error) {
	b.reads++
	for i := range uint16(10) {
		b.happens(datapath.LogCreated, key(1000+i))
		b.happens(datapath.LogEnded, key(1000+i))
	}
	return b.fakeLog.Read(out)
}

// After a loss what is alive is compared with what was recorded until then, however much is recorded
// during that: the ring may not become empty for as long as a flood lasts.
func TestEngineCompareUnderFlood(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	r.with(func(c *collector) {
		for i := range uint16(100) {
			r.log.happens(datapath.LogCreated, key(i))
		}
		busy := &busyLog{fakeLog: r.log, most: 20 * batchesAtOnce}
		c.engine.log = busy
		if err := c.engine.compare(c.now()); err != nil {
			t.Fatal(err)
		}
		if busy.reads > 2*batchesAtOnce {
			t.Errorf("it read the ring %d times, and %d of its records", busy.reads, r.log.next)
		}
		if !c.engine.hasAll(100) {
			t.Error("it has not read what there was when it looked")
		}
		c.engine.log = r.log
	})
}

// Why the rules cannot be read is reported once, not each second, and again when it is otherwise.
func TestUnreadableRulesAreReportedOnce(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	r.with(func(c *collector) {
		rules := &fakeRules{}
		c.rules = rules
		for _, err := range []error{errors.New("of a later natkit"), errors.New("damaged"), nil, errors.New("damaged")} {
			rules.err = err
			for range 3 {
				c.followRules()
			}
		}
	})
	var got []string
	for _, line := range r.said {
		if reason, ok := strings.CutPrefix(line, "the rules in force cannot be read: "); ok {
			got = append(got, reason)
		}
	}
	if want := []string{"of a later natkit", "damaged", "damaged"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// Rules that came into force in the second before the clock was set forward answer for it.
func TestRulesBeforeClockSet(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	var at time.Time
	r.with(func(c *collector) {
		rules := &fakeRules{}
		c.rules = rules
		apply := func(host string) {
			text := "inside: eth1\noutside: eth0\nrules:\n  - {dnat: \"udp 198.51.100.1:5000\", to: \"" + host + ":700\"}\n"
			file, err := rulefile.ParseRecorded("nat.yaml", []byte(text))
			if err != nil {
				t.Fatal(err)
			}
			now := monotonic()
			rules.next = &control.RulesChange{File: file, Whole: true, Applied: []control.AppliedRules{{Text: text, Since: r.timeOf(uint64(now)), Running: now}}}
		}
		apply("10.0.0.5")
		c.followRules()
		time.Sleep(1100 * time.Millisecond) // longer ago than who allows for
		apply("10.0.0.6")
		time.Sleep(30 * time.Millisecond)
		at = r.timeOf(uint64(monotonic()))
		time.Sleep(30 * time.Millisecond)
		if err := c.take(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.off += int64(40 * time.Second)
		if err := c.take(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	got := r.who(5000, at)
	if len(got.Gaps) > 0 || !slices.ContainsFunc(got.Rules, func(o store.RuleOwner) bool { return o.Internal[0].Addr().String() == "10.0.0.6" }) {
		t.Errorf("%+v", got)
	}
}

// What an engine has translated before it was recorded is a gap: one that comes up while the log is kept,
// and does not record by its rules, and one whose rules have nothing recorded any more.
func TestEngineNotRecordedYet(t *testing.T) {
	mark := func() time.Time {
		defer time.Sleep(5 * time.Millisecond)
		time.Sleep(5 * time.Millisecond)
		return time.Now()
	}
	for _, asked := range []bool{false, true} {
		r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
		var before, between, after time.Time
		r.with(func(c *collector) {
			tick := func() {
				t.Helper()
				if err := c.tick(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			before = mark()
			tick()
			between = mark()
			if r.log.asked = asked; asked {
				r.log.what = rulefile.LogDefault
				open := c.o.openEngine
				c.o.openEngine = func() (engineLog, error) { r.log.what = rulefile.LogMappings; return open() }
			} else {
				r.log.down = true
				open := c.o.openEngine
				c.o.openEngine = func() (engineLog, error) { r.log = newFakeLog(); return open() }
			}
			tick()
			after = mark()
			tick()
		})
		for at, gap := range map[time.Time]bool{before: false, between: asked, after: false} {
			if got := r.who(7, at); (len(got.Gaps) > 0) != gap {
				t.Errorf("asked %v, %v after the beginning: %+v", asked, at.Sub(before), got)
			}
		}
	}
}

// What the kernel translates before anybody listens to it is a gap, as long as it does.
func TestKernelNotRecordedYet(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	var before, between time.Time
	r.with(func(c *collector) {
		translates := false
		c.o.KernelNAT = func() (bool, error) { return translates, nil }
		before = time.Now()
		time.Sleep(5 * time.Millisecond)
		if kernel, err := c.listenToKernel(t.Context(), true); kernel != nil || err != nil {
			t.Fatal(kernel, err)
		}
		time.Sleep(5 * time.Millisecond)
		between = time.Now()
		time.Sleep(5 * time.Millisecond)
		translates = true
		c.kernelMissing("nobody listened")
	})
	for at, gap := range map[time.Time]bool{before: false, between: true} {
		if got := r.who(7, at); (len(got.Gaps) > 0) != gap {
			t.Errorf("%v after the beginning: %+v", at.Sub(before), got)
		}
	}
}

// While events are off nothing of the kernel's NAT is recorded: that is a gap until they are on again.
func TestEventsOff(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	var before, off time.Time
	pause := func() time.Time { time.Sleep(5 * time.Millisecond); return time.Now() }
	r.with(func(c *collector) {
		before = time.Now()
		pause()
		s := &kernelSource{c: c, tracker: newTracker(What{}), on: c.now()}
		off = pause()
		pause()
		for range 2 {
			if err := s.follow(t.Context(), conntrack.EventsOff); err != nil {
				t.Fatal(err)
			}
		}
		if !s.auto || !s.off {
			t.Errorf("%+v", s)
		}
	})
	for at, gap := range map[time.Time]bool{before: false, off: true} {
		if got := r.who(7, at); (len(got.Gaps) > 0) != gap {
			t.Errorf("%v after the beginning: %+v", at.Sub(before), got)
		}
	}
	if len(r.said) != 1 || !strings.Contains(r.said[0], "was set to 0") {
		t.Errorf("said %q", r.said)
	}
}

// Sessions of one endpoint with several others are one in a log without destinations, which lasts until
// the last of them has ended, also over the end of an hour.
func TestEngineSessionsOfOneEndpoint(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	r.log.what = rulefile.LogSessions
	to := func(last byte) datapath.LogKey {
		k := key(5000)
		k.Kind, k.Destination, k.DestinationPort = datapath.LogSession, [4]byte{192, 0, 2, last}, 443
		return k
	}
	mark := func() time.Time {
		defer time.Sleep(5 * time.Millisecond)
		time.Sleep(5 * time.Millisecond)
		return time.Now()
	}
	var one, between, none time.Time
	r.during(func() {
		r.log.happens(datapath.LogCreated, to(1))
		r.log.happens(datapath.LogCreated, to(2))
		r.log.happens(datapath.LogCreated, to(3))
		r.log.happens(datapath.LogEnded, to(2))
		one = mark()
	})
	between = mark()
	r.during(func() { r.log.happens(datapath.LogEnded, to(1)) }) // an hour of its own
	r.during(func() {
		between = mark()
		r.log.happens(datapath.LogEnded, to(3))
		none = mark()
	})
	for at, want := range map[time.Time]int{one: 1, between: 1, none: 0} {
		got := r.who(5000, at)
		if len(got.Lives) != want || len(got.Gaps) > 0 {
			t.Errorf("%v after the first: %+v", at.Sub(one), got)
		}
		for _, l := range got.Lives {
			if l.Destination.IsValid() {
				t.Errorf("a destination is kept: %+v", l)
			}
		}
	}
}

// When something began is by the clock of then, also if nothing but its end tells, and the clock was set
// since: while the log was kept, or while it was not.
func TestBeginByClockOfThen(t *testing.T) {
	for _, kept := range []bool{true, false} {
		r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
		began := uint64(0)
		ended := uint64(0)
		end := func(port uint16) {
			r.log.happens(datapath.LogEnded, key(port))
			last := &r.log.ring[len(r.log.ring)-1]
			last.Since, ended = began, last.Time
			time.Sleep(5 * time.Millisecond)
		}
		r.with(func(c *collector) {
			began = uint64(monotonic())
			time.Sleep(5 * time.Millisecond)
			r.log.happens(datapath.LogCreated, key(1)) // there is a mark
			time.Sleep(5 * time.Millisecond)
			if err := c.take(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !kept {
				return
			}
			r.off += int64(time.Hour)
			if err := c.take(t.Context()); err != nil {
				t.Fatal(err)
			}
			end(5000)
		})
		if !kept {
			r.off += int64(time.Hour)
			r.with(func(*collector) { end(5000) })
		}
		got := r.who(5000, r.timeOf(ended))
		want := natlog.Micros((int64(began) + r.off - int64(time.Hour)) / 1000)
		if len(got.Lives) != 1 || got.Lives[0].Since-want > 1 || want-got.Lives[0].Since > 1 {
			t.Errorf("log kept %v: %+v, want since %v", kept, got, want)
		}
	}
}

// What is of a zone is recorded with its interface, as what is alive and in its end; the same address
// of two interfaces are two subscribers.
func TestEngineZones(t *testing.T) {
	r := &running{t: t, log: newFakeLog(), dir: t.TempDir(), off: clockOffset(time.Now)}
	one, other := key(5000), key(5001)
	one.Zone, other.Zone, other.InternalPort = 4, 8, 5000
	r.during(func() {
		r.log.happens(datapath.LogCreated, one)
		r.log.happens(datapath.LogCreated, other)
	})
	time.Sleep(2 * time.Millisecond)
	at := time.Now()
	time.Sleep(2 * time.Millisecond)
	r.during(func() { r.log.happens(datapath.LogEnded, one) })
	for port, want := range map[uint16]string{5000: "10.0.0.9 on in4", 5001: "10.0.0.9 on in8"} {
		a := r.who(port, at)
		if len(a.Lives) != 1 || a.Lives[0].Subscriber != want || a.Lives[0].Zone != uint16(map[uint16]uint8{5000: 4, 5001: 8}[port]) {
			t.Errorf("port %d: %+v, want %s", port, a.Lives, want)
		}
		if ended := len(a.Lives) == 1 && a.Lives[0].Until != 0; ended != (port == 5000) {
			t.Errorf("port %d: ended %v", port, ended)
		}
	}
	s := &engineSource{log: r.log}
	for _, k := range []datapath.LogKey{one, other} {
		if tr := s.translation(k); keyOf(&tr) != k {
			t.Errorf("%+v becomes %+v", k, keyOf(&tr))
		}
	}
}
