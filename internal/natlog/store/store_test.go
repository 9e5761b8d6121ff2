// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/natlog/parquet"
	"natkit/internal/testutil/ktest"
)

// rig is a store with a clock of its own and what is alive.
type rig struct {
	t       *testing.T
	dir     string
	now     time.Time
	running time.Duration
	alive   map[natlog.Translation]natlog.Micros
	saying  sync.Mutex
	said    []string
	o       Options
	s       *Store
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), now: time.Date(2026, 11, 24, 3, 12, 7, 0, time.UTC), alive: map[natlog.Translation]natlog.Micros{}}
	r.o = Options{Dir: r.dir, Node: "gw1", Say: func(text string) {
		r.saying.Lock() // the converter says something, too
		defer r.saying.Unlock()
		r.said = append(r.said, text)
	}}
	r.journals(func(f *os.File) file { return unsynced{f} })
	r.o.Now = func() (time.Time, time.Duration) { return r.now, r.running }
	r.o.Alive = func(yield func(natlog.Record) bool) {
		for tr, since := range r.alive {
			if !yield(natlog.Record{Translation: tr, Since: since}) {
				return
			}
		}
	}
	return r
}

// journals has those of the log be what wrap makes of them.
func (r *rig) journals(wrap func(*os.File) file) {
	r.o.file = func(path string) (file, error) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
		return wrap(f), err
	}
}

// unsynced is a journal whose every second of test time does not cost one of the disk's.
type unsynced struct{ *os.File }

func (unsynced) Sync() error { return nil }

func (r *rig) open() *Store {
	r.t.Helper()
	s, err := Open(r.o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.s = s
	return s
}

func (r *rig) pass(d time.Duration) { r.now, r.running = r.now.Add(d), r.running+d }

// kill leaves the store as a kill of its process does.
func (r *rig) kill() {
	r.s.journal.Close()
	r.s.lock.Close()
	close(r.s.jobs)
	<-r.s.done
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) create(tr natlog.Translation) {
	r.t.Helper()
	at := natlog.MicrosOf(r.now)
	r.alive[tr] = at
	r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Created, Time: at, Since: at}}))
}

func (r *rig) end(tr natlog.Translation) {
	r.t.Helper()
	since := r.alive[tr]
	delete(r.alive, tr)
	r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Ended, Time: natlog.MicrosOf(r.now), Since: since}}))
}

func mapping(inside, outside string) natlog.Translation {
	return natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 6,
		Internal: netip.MustParseAddrPort(inside), External: netip.MustParseAddrPort(outside)}
}

// who asks as the command does, at a time.
func (r *rig) who(outside string, at time.Time) Answer {
	r.t.Helper()
	e := netip.MustParseAddrPort(outside)
	m := natlog.MicrosOf(at)
	a, err := Who(r.dir, Question{Address: e.Addr(), Port: e.Port(), Protocol: 6, Since: m, Upto: m})
	r.must(err)
	return a
}

func (r *rig) files(suffix string) []string {
	names, err := filepath.Glob(filepath.Join(r.dir, "*"+suffix))
	r.must(err)
	return names
}

// Texts of a file are UTF-8 whatever they are of: DuckDB, for one, refuses a file with others.
func TestTextIsUTF8(t *testing.T) {
	r := newRig(t)
	r.o.Node = "gw\xff"
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	tr.Subscriber = "10.0.0.1 on caf\xe9"
	r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Created, Time: natlog.MicrosOf(r.now), Note: "open /tmp/\xff"}}))
	r.must(r.s.Close())
	f, err := openFile(r.files(parquetSuffix)[0])
	r.must(err)
	defer f.close()
	for i, field := range f.Fields {
		c, err := f.Column(0, i)
		r.must(err)
		for _, text := range c.Dict {
			if !utf8.ValidString(text) {
				t.Errorf("column %s: %q", field.Name, text)
			}
		}
	}
	for key, text := range f.About {
		if !utf8.ValidString(text) {
			t.Errorf("%s: %q", key, text)
		}
	}
}

// Ticks and marks are the log's own, and no records of what happened.
func TestTicksAreNoRecords(t *testing.T) {
	r := newRig(t)
	r.open()
	r.create(mapping("10.0.0.1:1000", "198.51.100.1:5000"))
	r.must(r.s.Append([]natlog.Record{natlog.Mark(natlog.Kernel, natlog.MicrosOf(r.now), "so far")}))
	for range 3 {
		r.pass(time.Second)
		r.must(r.s.Tick())
	}
	if got := r.s.Stats().Records; got != 1 {
		t.Errorf("%d records, want 1", got)
	}
}

func TestWhoOverHours(t *testing.T) {
	r := newRig(t)
	r.open()
	a, b := mapping("10.0.0.1:1000", "198.51.100.1:5000"), mapping("10.0.0.2:2000", "198.51.100.1:5000")
	began := r.now.Add(time.Second)
	r.pass(time.Second)
	r.create(a)
	r.pass(4 * time.Second)
	for range 5 { // over five ends of hours
		r.pass(time.Hour)
		r.must(r.s.Tick())
	}
	ended := r.now.Add(time.Minute)
	r.pass(time.Minute)
	r.end(a)
	r.pass(time.Minute)
	free := r.now
	r.pass(time.Minute)
	r.create(b)
	r.must(r.s.Tick())
	check := func() {
		t.Helper()
		got := r.who("198.51.100.1:5000", began.Add(90*time.Minute))
		if len(got.Lives) == 0 {
			t.Fatalf("%+v", got)
		}
		want := Life{Translation: a, Since: natlog.MicrosOf(began), Log: got.Lives[0].Log, Until: natlog.MicrosOf(ended), Least: natlog.MicrosOf(ended)}
		if len(got.Lives) != 1 || got.Lives[0] != want || len(got.Gaps) != 0 {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got := r.who("198.51.100.1:5000", free); len(got.Lives) != 0 || len(got.Gaps) != 0 {
			t.Errorf("between the two: %+v", got)
		}
		if got := r.who("198.51.100.1:5001", began.Add(90*time.Minute)); len(got.Lives) != 0 || len(got.Gaps) != 0 {
			t.Errorf("another port: %+v", got)
		}
		if got := r.who("198.51.100.1:5000", r.now); len(got.Lives) != 1 || got.Lives[0].Translation != b || got.Lives[0].Until != 0 {
			t.Errorf("now: %+v", got)
		}
		if got := r.who("198.51.100.1:5000", r.now.Add(time.Hour)); len(got.Gaps) != 1 || got.Gaps[0].Why != "the log ends before" {
			t.Errorf("later: %+v", got)
		}
		if got := r.who("198.51.100.1:5000", began.Add(-time.Hour)); len(got.Gaps) != 1 || got.Gaps[0].Why != "the log begins later" {
			t.Errorf("before: %+v", got)
		}
	}
	check()
	r.must(r.s.Close())
	if n := len(r.files(parquetSuffix)); n != 6 || len(r.files(journalSuffix)) != 0 {
		t.Errorf("%d Parquet files, journals %v", n, r.files(journalSuffix))
	}
	check()
}

// What ended a moment before an hour began, and was read a moment later, has ended: nobody has it for
// the rest of the hour, whatever the order of its rows.
func TestEndReadLate(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	since := r.alive[tr]
	r.pass(time.Hour)
	r.must(r.s.Tick())
	delete(r.alive, tr)
	ended := r.now.Add(-5 * time.Millisecond)
	r.must(r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Ended, Time: natlog.MicrosOf(ended), Since: since}}))
	r.pass(20 * time.Minute)
	r.must(r.s.Tick())
	check := func(file string) {
		t.Helper()
		if got := r.who("198.51.100.1:5000", r.now.Add(-10*time.Minute)); len(got.Lives) != 0 || len(got.Gaps) != 0 {
			t.Errorf("%s: after its end: %+v", file, got)
		}
		if got := r.who("198.51.100.1:5000", ended.Add(-time.Minute)); len(got.Lives) != 1 || got.Lives[0].Until != natlog.MicrosOf(ended) {
			t.Errorf("%s: before its end: %+v", file, got)
		}
		list, err := parts(r.dir)
		r.must(err)
		left := &Left{last: list[len(list)-1:]}
		left.Alive(func(rec natlog.Record) bool { t.Errorf("%s: alive at the end: %+v", file, rec); return true })
	}
	check("journal")
	r.must(r.s.Close())
	check("Parquet")
}

// What happened before a part of an hour began, and was read later, is found in it.
func TestPartReadLate(t *testing.T) {
	r := newRig(t)
	r.o.PartRecords = 2
	r.open()
	r.create(mapping("10.0.0.1:1000", "198.51.100.1:5000"))
	r.pass(time.Second)
	r.create(mapping("10.0.0.1:1001", "198.51.100.1:5001")) // a part begins
	late := mapping("10.0.0.1:1002", "198.51.100.1:5002")
	at := r.now.Add(-2 * time.Millisecond)
	r.must(r.s.Append([]natlog.Record{{Translation: late, Event: natlog.Created, Time: natlog.MicrosOf(at), Since: natlog.MicrosOf(at)}}))
	r.pass(time.Second)
	r.must(r.s.Tick())
	if n := len(r.files("")); n < 5 {
		t.Fatalf("%d files", n)
	}
	if got := r.who("198.51.100.1:5002", at.Add(time.Millisecond)); len(got.Lives) != 1 || got.Lives[0].Translation != late {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// What Append returned for is there after a kill; what was torn is cut off; the gap is named.
func TestKill(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	r.kill()
	killed := r.now
	journal := r.files(journalSuffix)[0]
	b, err := os.ReadFile(journal)
	r.must(err)
	frame := natlog.AppendFrame(nil, []natlog.Record{{Translation: tr, Event: natlog.Ended, Time: natlog.MicrosOf(r.now.Add(time.Second))}})
	r.must(os.WriteFile(journal, append(b, frame[:len(frame)-1]...), 0o600))

	r.pass(time.Minute)
	if got := r.who("198.51.100.1:5000", killed); len(got.Lives) != 1 || got.Lives[0].Until != 0 {
		t.Errorf("without its writer: %+v", got)
	}
	delete(r.alive, tr) // it ended, with nobody watching
	stays := mapping("10.0.0.3:3000", "198.51.100.1:7000")
	r.alive[stays] = 0
	r.open()
	r.pass(time.Second)
	r.must(r.s.Tick())
	got := r.who("198.51.100.1:5000", killed)
	if len(got.Lives) != 1 || got.Lives[0].Least > natlog.MicrosOf(killed.Add(time.Second)) || got.Lives[0].Until != natlog.MicrosOf(killed.Add(time.Minute)) {
		t.Errorf("%+v", got)
	}
	if got := r.who("198.51.100.1:7000", r.now); len(got.Lives) != 1 || got.Lives[0].Since != 0 || got.Lives[0].Until != 0 {
		t.Errorf("what was there at the start: %+v", got)
	}
	got = r.who("198.51.100.1:6000", killed.Add(30*time.Second))
	if len(got.Lives) != 0 || len(got.Gaps) != 1 || got.Gaps[0].Why != "natkit log was not running" {
		t.Errorf("in the gap: %+v", got)
	}
	r.must(r.s.Close())
}

// What is there again after a gap has not ended in it.
func TestAcrossGap(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	began := r.now
	r.kill()
	r.pass(time.Minute)
	r.alive[tr] = 0 // nobody knows since when
	r.open()
	r.pass(time.Minute)
	r.end(tr)
	r.must(r.s.Tick())
	got := r.who("198.51.100.1:5000", began)
	if len(got.Lives) != 1 || !got.Lives[0].Gap || got.Lives[0].Since != natlog.MicrosOf(began) || got.Lives[0].Until != natlog.MicrosOf(r.now) {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// The same translation twice in an hour, the first time since nobody knows when: the second one does not
// end with the first.
func TestTwiceInAnHour(t *testing.T) {
	r := newRig(t)
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.alive[tr] = 0
	r.open()
	r.pass(time.Minute)
	r.end(tr)
	r.pass(time.Minute)
	r.create(tr)
	again := r.now
	r.pass(time.Minute)
	r.must(r.s.Tick())
	r.kill()
	delete(r.alive, tr)
	r.pass(time.Minute)
	r.open()
	if got := r.who("198.51.100.1:5000", again.Add(time.Second)); len(got.Lives) != 1 || got.Lives[0].Until < natlog.MicrosOf(again) {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// A journal cut at any byte gives all records of the whole frames before.
func TestTornAnywhere(t *testing.T) {
	r := newRig(t)
	r.open()
	sizes := []int64{r.s.size}
	for i := range 20 {
		r.create(mapping(fmt.Sprintf("10.0.0.1:%d", 1000+i), fmt.Sprintf("198.51.100.1:%d", 5000+i)))
		sizes = append(sizes, r.s.size)
	}
	journal := r.files(journalSuffix)[0]
	b, err := os.ReadFile(journal)
	r.must(err)
	r.kill()
	cut := filepath.Join(t.TempDir(), "cut")
	for n := range b {
		r.must(os.WriteFile(cut, b[:n], 0o600))
		c, err := readJournal(cut)
		want := 0
		for i, size := range sizes {
			if int64(n) >= size {
				want = i
			}
		}
		if err != nil || len(c.records) != want || c.damaged != 0 {
			t.Fatalf("%d bytes: %d records, want %d: %v", n, len(c.records), want, err)
		}
	}
}

// Random translations against an independent record of them, over ends of hours, kills,
// clocks that are set and many parts.
func TestWhoAgainstModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2) {
		r := newRig(t)
		random := rand.New(rand.NewPCG(seed, 9))
		r.o.PartRecords = 300
		r.open()
		type span struct {
			tr          natlog.Translation
			since, upto time.Time
		}
		var spans []span
		var gaps [][2]time.Time
		open := map[netip.AddrPort]int{} // the last span
		begin := r.now
		for range 3000 {
			r.pass(time.Duration(random.Int64N(int64(4 * time.Second))))
			switch n := random.IntN(1000); {
			case n < 2:
				killed := r.now
				r.must(r.s.Tick())
				r.kill()
				r.pass(time.Duration(random.Int64N(int64(time.Minute))))
				gaps = append(gaps, [2]time.Time{killed, r.now})
				r.open()
			case n < 4: // the clock is set forward
				r.must(r.s.Tick())
				was := r.now
				r.now = r.now.Add(90 * time.Second)
				r.must(r.s.Tick())
				gaps = append(gaps, [2]time.Time{was, r.now})
			case n < 300:
				r.must(r.s.Tick())
			}
			outside := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(random.IntN(3))}), uint16(5000+random.IntN(40)))
			if i, ok := open[outside]; ok {
				spans[i].upto = r.now
				delete(open, outside)
				r.end(spans[i].tr)
				continue
			}
			tr := mapping(fmt.Sprintf("10.0.0.%d:%d", random.IntN(200), 1024+random.IntN(60000)), outside.String())
			open[outside] = len(spans)
			spans = append(spans, span{tr: tr, since: r.now})
			r.create(tr)
		}
		r.must(r.s.Tick())
		for range 500 {
			at := begin.Add(time.Duration(random.Int64N(int64(r.now.Sub(begin)))))
			if slices.ContainsFunc(gaps, func(g [2]time.Time) bool {
				return !at.Before(g[0].Add(-time.Second)) && !at.After(g[1].Add(time.Second))
			}) {
				continue
			}
			s := spans[random.IntN(len(spans))]
			got := r.who(s.tr.External.String(), at)
			var want []Life
			for _, s2 := range spans {
				if s2.tr.External == s.tr.External && !s2.since.After(at) && (s2.upto.IsZero() || !s2.upto.Before(at)) {
					l := Life{Translation: s2.tr, Since: natlog.MicrosOf(s2.since)}
					if !s2.upto.IsZero() {
						l.Until, l.Least = natlog.MicrosOf(s2.upto), natlog.MicrosOf(s2.upto)
					}
					want = append(want, l)
				}
			}
			for i := range got.Lives {
				got.Lives[i].Log = 0
			}
			if !slices.Equal(got.Lives, want) || len(got.Gaps) > 0 {
				t.Fatalf("seed %d: %v at %v: %+v, want %+v", seed, s.tr.External, at, got, want)
			}
		}
		r.must(r.s.Close())
	}
}

// A clock that is set back makes times that were twice: both are shown.
func TestClockSetBack(t *testing.T) {
	r := newRig(t)
	r.open()
	a, b := mapping("10.0.0.1:1000", "198.51.100.1:5000"), mapping("10.0.0.2:2000", "198.51.100.1:5000")
	r.pass(10 * time.Minute)
	r.create(a)
	at := r.now.Add(time.Minute)
	r.pass(5 * time.Minute)
	r.end(a)
	r.must(r.s.Tick())
	r.now = r.now.Add(-10 * time.Minute)
	r.must(r.s.Tick())
	r.create(b)
	r.pass(15 * time.Minute)
	r.must(r.s.Tick())
	got := r.who("198.51.100.1:5000", at)
	if len(got.Lives) != 2 || len(got.Twice) != 1 || !strings.Contains(got.Twice[0].Why, "set back by 10m") {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// What is alive when the clock is set back is found by both clocks, and what happened around that time
// is a gap. In small steps nothing gets out of order.
func TestAliveWhenClockSetBack(t *testing.T) {
	r := newRig(t)
	r.open()
	a, b := mapping("10.0.0.1:1000", "198.51.100.1:5000"), mapping("10.0.0.2:2000", "198.51.100.1:5000")
	r.pass(10 * time.Minute)
	r.create(a)
	first := r.now.Add(30 * time.Second)
	r.pass(time.Minute)
	old := r.now
	r.now = r.now.Add(-5 * time.Minute)
	r.must(r.s.ClockStepped(-5*time.Minute, natlog.MicrosOf(old.Add(-50*time.Millisecond))))
	r.pass(time.Minute)
	second := r.now
	r.pass(time.Minute)
	r.end(a)
	r.create(b)
	r.pass(time.Minute)
	r.must(r.s.Tick())
	for name, at := range map[string]time.Time{"before": first, "after": second} {
		if got := r.who("198.51.100.1:5000", at); len(got.Lives) != 1 || got.Lives[0].Translation != a || len(got.Gaps) > 0 {
			t.Errorf("%s the clock was set: %+v", name, got)
		}
	}
	for name, at := range map[string]time.Time{"old": old.Add(-20 * time.Millisecond), "new": old.Add(-5*time.Minute - 20*time.Millisecond)} {
		if got := r.who("198.51.100.1:5000", at); len(got.Gaps) == 0 || !strings.Contains(got.Gaps[0].Why, "set back by 5m") {
			t.Errorf("when it was set, by the %s clock: %+v", name, got)
		}
	}
	if got := r.who("198.51.100.1:5000", second.Add(90*time.Second)); len(got.Lives) != 1 || got.Lives[0].Translation != b {
		t.Errorf("the next one: %+v", got)
	}
	r.now = r.now.Add(-30 * time.Millisecond) // seen by Tick alone
	ended := r.now.Add(30 * time.Millisecond)
	r.must(r.s.Tick())
	r.end(b)
	r.pass(10 * time.Second)
	r.must(r.s.Tick())
	if got := r.who("198.51.100.1:5000", ended.Add(5*time.Second)); len(got.Lives) != 0 || len(got.Gaps) != 0 {
		t.Errorf("after a small step: %+v", got)
	}
	r.must(r.s.Close())
}

// fullFile is a journal on a disk with room for so many more bytes.
type fullFile struct {
	*os.File
	room *int
}

func (f fullFile) Write(b []byte) (int, error) {
	if len(b) <= *f.room {
		*f.room -= len(b)
		return f.File.Write(b)
	}
	n, _ := f.File.Write(b[:*f.room])
	*f.room = 0
	return n, unix.ENOSPC
}

// A full disk loses records, which are counted; with room again the log goes on with the gap
// and all that is alive.
func TestDiskFull(t *testing.T) {
	r := newRig(t)
	room := 10_000
	r.journals(func(f *os.File) file { return fullFile{f, &room} })
	r.open()
	before := mapping("10.0.0.1:1000", "198.51.100.1:4000")
	r.create(before)
	full := r.now
	var err error
	lost := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	for i := 0; err == nil; i++ {
		at := natlog.MicrosOf(r.now)
		r.alive[lost] = at
		err = r.s.Append([]natlog.Record{{Translation: lost, Event: natlog.Created, Time: at, Since: at}})
		full = r.now
		r.pass(time.Second)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	for range 3 {
		r.pass(time.Second)
		if err := r.s.Tick(); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("%v", err)
		}
	}
	if stats := r.s.Stats(); stats.Lost != 1 || !strings.Contains(stats.Failing, "no space") {
		t.Errorf("%+v", stats)
	}
	room = 1 << 20
	r.pass(time.Second)
	r.must(r.s.Tick())
	if stats := r.s.Stats(); stats.Failing != "" || stats.Gaps != 1 {
		t.Errorf("%+v", stats)
	}
	r.pass(time.Second)
	r.must(r.s.Tick())
	got := r.who("198.51.100.1:6000", full.Add(2*time.Second))
	if len(got.Lives) != 0 || len(got.Gaps) == 0 || !strings.Contains(got.Gaps[0].Why, "1 record could not be written") {
		t.Errorf("in the gap: %+v", got)
	}
	if got := r.who("198.51.100.1:5000", r.now); len(got.Lives) != 1 {
		t.Errorf("after it: %+v", got)
	}
	if got := r.who("198.51.100.1:4000", r.now); len(got.Lives) != 1 || len(got.Gaps) != 0 {
		t.Errorf("after it: %+v", got)
	}
	r.must(r.s.Close())
}

// Marks that a full disk costs are no records that are lost, either.
func TestLostMarksAreNoRecords(t *testing.T) {
	r := newRig(t)
	room := 1 << 20
	r.journals(func(f *os.File) file { return fullFile{f, &room} })
	var told []Batch
	r.o.Written = func(b Batch) { told = append(told, b) }
	r.open()
	store := func(n int) error {
		at := natlog.MicrosOf(r.now)
		tr := mapping("10.0.0.1:1000", fmt.Sprintf("198.51.100.1:%d", 5000+n))
		return r.s.Append([]natlog.Record{{Translation: tr, Event: natlog.Created, Time: at, Since: at}, natlog.Mark(natlog.Engine, at, "mark")})
	}
	room, told = 0, nil
	for n := range 2 {
		if err := store(n); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	if stats := r.s.Stats(); stats.Lost != 2 || len(told) != 2 || len(told[0].Records) != 1 {
		t.Errorf("%d records are lost, want 2; %+v", stats.Lost, told)
	}
	room = 1 << 20
	r.must(r.s.Tick())
	r.must(r.s.Close())
	at := natlog.MicrosOf(r.now)
	got, err := Who(r.dir, Question{Address: netip.MustParseAddr("198.51.100.1"), Port: 1, Since: at, Upto: at})
	r.must(err)
	if len(got.Gaps) == 0 || !strings.HasPrefix(got.Gaps[0].Why, "2 records could not be written") {
		t.Errorf("%+v", got.Gaps)
	}
}

// Half of what an hour begins with is no hour, also where that takes several parts: nothing of it stays
// on a full disk, and who was alive before and after is one.
func TestHalfABeginning(t *testing.T) {
	r := newRig(t)
	r.o.PartRecords = frameMost
	room := 1 << 24
	r.journals(func(f *os.File) file { return fullFile{f, &room} })
	for i := range 3 * frameMost {
		r.alive[mapping(fmt.Sprintf("10.0.0.1:%d", 1000+i), fmt.Sprintf("198.51.100.1:%d", 5000+i))] = natlog.MicrosOf(r.now)
	}
	r.open()
	before := r.now
	had := len(r.files(""))
	for range 3 {
		r.pass(time.Hour)
		room = 150_000 // of the first part, and some of the second
		if err := r.s.Tick(); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("%v with %d bytes left", err, room)
		}
		r.s.journalsLeft(t, 0)
		for _, path := range r.files("") {
			if strings.Contains(path, "0000000002") || strings.Contains(path, "0000000003") || strings.Contains(path, "0000000004") {
				t.Errorf("%s stays", path)
			}
		}
	}
	room = 1 << 24
	r.pass(time.Hour)
	r.must(r.s.Tick())
	if n := len(r.files("")); n < had {
		t.Errorf("%d files, and %d before", n, had)
	}
	if got := r.who("198.51.100.1:7000", before); len(got.Lives) != 1 || got.Lives[0].Until != 0 {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// Nor is half a beginning of a writer that was killed: what it does not have has not ended there, in one part as
// in several.
func TestKilledInBeginning(t *testing.T) {
	for _, several := range []bool{false, true} {
		r := newRig(t)
		if several {
			r.o.PartRecords = frameMost
		}
		for i := range 3 * frameMost {
			r.alive[mapping(fmt.Sprintf("10.0.0.1:%d", 1000+i), fmt.Sprintf("198.51.100.1:%d", 5000+i))] = natlog.MicrosOf(r.now)
		}
		r.open()
		before := r.now
		r.pass(time.Hour)
		r.must(r.s.Tick())
		r.kill()
		for i, path := range r.files(journalSuffix) { // of the second hour: a frame of three is left
			switch info, err := os.Stat(path); {
			case err != nil:
				t.Fatal(err)
			case !several:
				r.must(os.Truncate(path, info.Size()/2))
			case i > 0:
				r.must(os.Remove(path))
			}
		}
		r.pass(time.Second)
		ended := mapping("10.0.0.1:1001", "198.51.100.1:5001")
		delete(r.alive, ended)
		r.open()
		r.pass(time.Second)
		r.must(r.s.Tick())
		for port := 5002; port < 5022; port++ { // some of them are in the frame
			if got := r.who(fmt.Sprintf("198.51.100.1:%d", port), before); len(got.Lives) != 1 || got.Lives[0].Until != 0 {
				t.Fatalf("several parts %v, port %d: %+v", several, port, got)
			}
		}
		if got := r.who("198.51.100.1:5001", before); len(got.Lives) != 1 || got.Lives[0].Until == 0 {
			t.Errorf("several parts %v, what has ended: %+v", several, got)
		}
		r.must(r.s.Close())
	}
}

// On a full disk old hours are removed all the same: they may be what fills it. So they are when the log
// is opened there, with less to keep than before.
func TestRetentionOnFullDisk(t *testing.T) {
	r := newRig(t)
	r.o.Age = 5 * time.Hour
	room := 1 << 20
	r.journals(func(f *os.File) file { return fullFile{f, &room} })
	r.open()
	hours := func(n int) {
		for range n {
			r.pass(time.Hour)
			_ = r.s.Tick()
			r.s.jobsDone(t)
		}
	}
	hours(5)
	room = 0
	for range 4 {
		if err := r.s.Tick(); r.says("being lost") && !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		r.pass(time.Hour)
	}
	r.s.journalsLeft(t, 0)
	list, err := parts(r.dir)
	r.must(err)
	for _, p := range list {
		if age := r.now.Add(-time.Hour).Sub(p.end); age > r.o.Age {
			t.Errorf("%s is there on a full disk, %v old", p.path, age)
		}
	}
	if len(list) < 2 || !r.says("no space left") {
		t.Fatalf("%d files, %q", len(list), r.said)
	}
	r.must(r.s.Close())
	r.o.Bytes = 1
	if _, err := Open(r.o); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if n := len(r.files(parquetSuffix)); n > 1 { // the last hour stays
		t.Errorf("%d files are left when the log was opened on a full disk", n)
	}
	room = 1 << 20
	r.open()
	r.must(r.s.Close())
}

// Records that are lost on a full disk may be of long before: what an engine recorded while nobody read
// it. The gap begins with them.
func TestDiskFullOfOldRecords(t *testing.T) {
	r := newRig(t)
	room := 1 << 20
	r.journals(func(f *os.File) file { return fullFile{f, &room} })
	r.open()
	for range 20 {
		r.pass(time.Minute)
		r.must(r.s.Tick())
	}
	room = 0
	at := r.now.Add(-10 * time.Minute)
	lost := natlog.Record{Translation: mapping("10.0.0.1:1000", "198.51.100.1:5000"), Event: natlog.Created, Time: natlog.MicrosOf(at), Since: natlog.MicrosOf(at)}
	if err := r.s.Append([]natlog.Record{lost}); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	gap := natlog.Record{Event: natlog.Gap, Since: natlog.MicrosOf(r.now.Add(-15 * time.Minute)), Time: natlog.MicrosOf(r.now.Add(-14 * time.Minute))}
	if err := r.s.Append([]natlog.Record{gap}); err == nil {
		t.Fatal("the gap was written")
	}
	room = 1 << 20
	r.pass(time.Second)
	r.must(r.s.Tick())
	for what, at := range map[string]time.Time{"the record": at.Add(time.Minute), "the gap": gap.Since.Time().Add(time.Second)} {
		if got := r.who("198.51.100.1:5000", at); len(got.Gaps) == 0 {
			t.Errorf("when %s was lost: %+v", what, got)
		}
	}
	r.must(r.s.Close())
}

// refusingFile is a journal that the disk does not take, though it could be written.
type refusingFile struct {
	*os.File
	refuses *bool
}

func (f refusingFile) Sync() error {
	if *f.refuses {
		return unix.EIO
	}
	return nil
}

// What was written and did not come to the disk may be lost: the gap begins when the disk took all the
// last time.
func TestNotSynced(t *testing.T) {
	r := newRig(t)
	refuses := false
	r.journals(func(f *os.File) file { return refusingFile{f, &refuses} })
	r.open()
	r.must(r.s.Tick())
	r.pass(400 * time.Millisecond)
	written := r.now
	r.create(mapping("10.0.0.1:1000", "198.51.100.1:5000"))
	r.pass(600 * time.Millisecond)
	refuses = true
	if err := r.s.Tick(); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	refuses = false
	r.pass(time.Second)
	r.must(r.s.Tick())
	if got := r.who("198.51.100.1:6000", written); len(got.Gaps) != 1 || !strings.Contains(got.Gaps[0].Why, "input/output error") {
		t.Errorf("%+v", got)
	}
	r.must(r.s.Close())
}

// What could not become a Parquet file is tried again with the next hour.
func TestConvertAgain(t *testing.T) {
	r := newRig(t)
	r.open()
	from, hour := r.now, r.s.current.sequence()
	r.pass(time.Hour)
	inTheWay := filepath.Join(r.dir, from.Format(nameTime)+"-"+r.now.Format(nameTime)+"-"+hour+parquetSuffix+".tmp")
	r.must(os.Mkdir(inTheWay, 0o700))
	r.must(r.s.Tick())
	ktest.Wait(t, time.Minute, "the journal to stay one", func() bool { return r.says("stays a journal") })
	r.must(os.Remove(inTheWay))
	r.pass(time.Hour)
	r.must(r.s.Tick())
	r.s.jobsDone(t)
	r.must(r.s.Close())
}

// A removed folder is made again, with all of the running hour.
func TestFolderRemoved(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	at := r.now
	r.must(os.RemoveAll(r.dir))
	r.end(tr)
	r.pass(time.Second)
	r.must(r.s.Tick())
	if got := r.who("198.51.100.1:5000", at); len(got.Lives) != 1 || len(got.Gaps) != 0 {
		t.Errorf("%+v", got)
	}
	if len(r.said) != 1 || !strings.Contains(r.said[0], "was removed") {
		t.Errorf("%q", r.said)
	}
	if _, err := Open(r.o); !errors.Is(err, ErrLocked) {
		t.Errorf("a second writer: %v", err)
	}
	r.must(r.s.Close())
}

// A damaged file is named, and is a gap.
func TestDamagedFile(t *testing.T) {
	r := newRig(t)
	r.open()
	tr := mapping("10.0.0.1:1000", "198.51.100.1:5000")
	r.create(tr)
	at := r.now.Add(time.Second)
	r.pass(time.Hour)
	r.must(r.s.Close())
	path := r.files(parquetSuffix)[0]
	b, err := os.ReadFile(path)
	r.must(err)
	for name, damage := range map[string]func([]byte) []byte{
		"cut":   func(b []byte) []byte { return b[:len(b)/2] },
		"page":  func(b []byte) []byte { b[40] ^= 1; return b },
		"empty": func([]byte) []byte { return nil },
		"newer": func([]byte) []byte {
			var out bytes.Buffer
			w, err := parquet.NewWriter(&out, fields())
			r.must(err)
			r.must(w.Close(map[string]string{"natkit.log": "9"}))
			return out.Bytes()
		},
	} {
		r.must(os.WriteFile(path, damage(slices.Clone(b)), 0o600))
		got := r.who("198.51.100.1:5000", at)
		if len(got.Lives) != 0 || len(got.Gaps) == 0 || !strings.Contains(got.Gaps[0].Why, path) {
			t.Errorf("%s: %+v", name, got)
		}
		if name == "newer" && !strings.Contains(got.Gaps[0].Why, "use a newer natkit") {
			t.Errorf("%+v", got)
		}
	}
}

func TestRetention(t *testing.T) {
	r := newRig(t)
	r.o.Age = 5 * time.Hour
	r.open()
	for range 20 {
		r.pass(time.Hour)
		r.must(r.s.Tick())
		r.s.jobsDone(t)
	}
	if n := len(r.files(parquetSuffix)); n < 5 || n > 6 {
		t.Errorf("%d files of 5 hours", n)
	}
	r.must(r.s.Close())
	r.o.Age, r.o.Bytes = 0, 5000
	r.open()
	r.must(r.s.Tick())
	var total int64
	for _, p := range r.files("") {
		info, err := os.Stat(p)
		r.must(err)
		total += info.Size()
	}
	if stats := r.s.Stats(); total > 5000+100 || stats.Bytes > 5000 || stats.Files < 2 {
		t.Errorf("%d bytes, %+v", total, stats)
	}
	r.must(r.s.Close())
}

// A journal that cannot be read, and hours of a clock that was far ahead, keep nothing from being
// removed; and nothing is removed for its age right after the clock has jumped.
func TestRetentionInDisorder(t *testing.T) {
	r := newRig(t)
	r.o.Age = 5 * time.Hour
	bad := filepath.Join(r.dir, "0000000000.000"+journalSuffix)
	r.must(os.WriteFile(bad, []byte("no journal of natkit's"), 0o600))
	r.must(os.Chtimes(bad, r.now, r.now))
	r.open()
	hours := func(n int) {
		t.Helper()
		for range n {
			r.pass(time.Hour)
			r.must(r.s.Tick())
			ktest.Wait(t, time.Minute, "the journals to be taken", func() bool { return len(r.s.jobs) == 0 })
		}
	}
	hours(3)
	const far = 12 * 365 * 24 * time.Hour
	had := len(r.files(parquetSuffix))
	r.now = r.now.Add(far)
	r.must(r.s.Tick())
	r.pass(10 * time.Minute)
	r.must(r.s.Tick())
	if n := len(r.files(parquetSuffix)); n < had {
		t.Errorf("%d of %d files are left when the clock has jumped", n, had)
	}
	r.now = r.now.Add(-far)
	r.must(r.s.Tick())
	hours(20)
	if n := len(r.files(parquetSuffix)); n < 5 || n > 7 { // one of them is of the wrong year
		t.Errorf("%d files of 5 hours: %v", n, r.files(parquetSuffix))
	}
	if _, err := os.Stat(bad); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the journal that cannot be read: %v", err)
	}
	r.must(r.s.Close())
}

// says is whether a text with those words was said.
func (r *rig) says(words string) bool {
	r.saying.Lock()
	defer r.saying.Unlock()
	return slices.ContainsFunc(r.said, func(text string) bool { return strings.Contains(text, words) })
}

// jobsDone waits until all journals but the running one are Parquet files.
func (s *Store) jobsDone(t testing.TB) {
	t.Helper()
	s.journalsLeft(t, 1)
}

// journalsLeft waits until there are so many journals: the others are Parquet files.
func (s *Store) journalsLeft(t testing.TB, left int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		list, err := parts(s.o.Dir)
		if err != nil {
			t.Fatal(err)
		}
		journals := 0
		for _, p := range list {
			if p.journal {
				journals++
			}
		}
		if journals == left {
			return
		}
		if time.Now().After(end) {
			t.Fatal("journals stay")
		}
	}
}

var _ io.ReaderAt = fullFile{}

// A look-up keeps of a journal what is asked: where no Parquet file could be written for months,
// all of them together would be more than a machine's memory.
func TestWhoKeepsLittle(t *testing.T) {
	dir, random := t.TempDir(), rand.New(rand.NewPCG(1, 1))
	s, err := Open(Options{Dir: dir, Node: "gw1", Alive: func(func(natlog.Record) bool) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	records, now := make([]natlog.Record, 10_000), natlog.MicrosOf(time.Now())
	for i := range records {
		records[i] = randomRecord(random, now+natlog.Micros(i))
	}
	if err := s.Append(records); err != nil {
		t.Fatal(err)
	}
	list, err := parts(dir)
	if err != nil {
		t.Fatal(err)
	}
	asked := records[0].External
	r := reader{q: Question{Address: asked.Addr(), Port: asked.Port(), Since: now, Upto: now}, journals: map[string]content{}}
	if err := r.group(list); err != nil {
		t.Fatal(err)
	}
	if len(r.journals) != 1 {
		t.Fatalf("%d journals were read", len(r.journals))
	}
	for _, c := range r.journals {
		if c.rows < len(records) || len(c.records) == 0 || cap(c.records) > 100 {
			t.Errorf("%d records looked at, %d kept in room for %d", c.rows, len(c.records), cap(c.records))
		}
	}
}
