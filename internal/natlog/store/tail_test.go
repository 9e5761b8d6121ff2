// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// followed is a log that is written, with a reader that is told of what is written.
type followed struct {
	*rig
	end   Position
	told  []natlog.Record
	sizes map[Position]int
	need  func(Position) bool
}

func newFollowed(t *testing.T) *followed {
	f := &followed{rig: newRig(t), sizes: map[Position]int{}}
	f.o.Written = func(b Batch) {
		if b.End != (Position{}) {
			f.end = b.End
			f.sizes[b.End.PartOf()] += len(b.Records)
		}
		f.told = append(f.told, b.Records...)
	}
	f.o.Needed = func(p Position) bool { return f.need != nil && f.need(p) }
	return f
}

// some makes mappings that begin and end at random, in batches, with a tick after each.
func (f *followed) some(rounds int, seed uint64) {
	f.t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range rounds {
		for range rnd.IntN(4) {
			tr := mapping("10.0.0.9:1000", fmt.Sprintf("198.51.100.%d:%d", 1+rnd.IntN(9), 1024+rnd.IntN(3)))
			if _, ok := f.alive[tr]; ok {
				f.rig.end(tr)
			} else {
				f.create(tr)
			}
			f.pass(137 * time.Millisecond)
		}
		f.pass(time.Second)
		f.must(f.s.Tick())
	}
}

// read reads on to the end.
func (f *followed) read(tail *Tail) (got []natlog.Record) {
	f.t.Helper()
	for {
		b, err := tail.Next(f.end)
		f.must(err)
		if len(b.Records) == 0 {
			return got
		}
		if b.End != tail.At() {
			f.t.Fatalf("it is at %+v, and the batch ends at %+v", tail.At(), b.End)
		}
		got = append(got, b.Records...)
	}
}

func sorted(records []natlog.Record) []string {
	var out []string
	for _, r := range records {
		out = append(out, fmt.Sprintf("%d %v %v %v %v %s", r.Time, r.Event, r.Internal, r.External, r.Since, r.Note))
	}
	slices.Sort(out)
	return out
}

func (f *followed) same(what string, got, want []natlog.Record) {
	f.t.Helper()
	if g, w := sorted(got), sorted(want); !slices.Equal(g, w) {
		f.t.Errorf("%s: %d records, want %d", what, len(g), len(w))
	}
}

// Who reads on gets what was written, in its order while it is in a journal, and the same
// records from Parquet files, over the end of an hour, a restart, a step of the clock and
// parts of an hour.
func TestTail(t *testing.T) {
	f := newFollowed(t)
	f.o.PartRecords = 40
	f.open()
	live := NewTail(f.dir, Position{})
	defer live.Close()
	var got []natlog.Record
	step := func(what string, do func()) {
		t.Helper()
		do()
		got = append(got, f.read(live)...)
		f.same(what, got, f.told)
	}
	f.some(3, 1)
	if got := f.read(NewTail(f.dir, Position{})); !slices.Equal(got, f.told) {
		t.Errorf("a journal: %+v, want %+v", got, f.told)
	}
	step("one hour", func() { f.some(50, 2) })
	step("the next", func() { f.pass(time.Hour); f.must(f.s.Tick()); f.some(30, 3) })
	step("a clock set back", func() { f.now = f.now.Add(-10 * time.Minute); f.must(f.s.Tick()); f.some(10, 4) })
	step("closed", func() { f.must(f.s.Close()) })
	step("opened again", func() { f.pass(time.Minute); f.open(); f.some(30, 5) })
	step("killed", func() { f.kill(); f.pass(time.Minute); f.open(); f.some(30, 6) })
	f.must(f.s.Close())
	f.same("all from Parquet files", f.read(NewTail(f.dir, Position{})), f.told)
	sizes, err := Sizes(f.dir, Position{})
	if err != nil || len(sizes) < 6 {
		t.Fatal(sizes, err)
	}
	for _, s := range sizes {
		if s.Records != f.sizes[s.Part] {
			t.Errorf("%+v: %d records, %d were written", s.Part, s.Records, f.sizes[s.Part])
		}
	}
}

// A reader that ends after any batch goes on where it was, also when its journal has become a
// Parquet file, which is kept for it. Without the journal the part is read again, from its
// begin; nothing is missing.
func TestTailGoesOn(t *testing.T) {
	for _, kept := range []bool{true, false} {
		f := newFollowed(t)
		var at Position
		var reading atomic.Pointer[Position] // the store's converter asks too
		reading.Store(&Position{})
		f.need = func(p Position) bool { return kept && p == reading.Load().PartOf() }
		f.open()
		var got []natlog.Record
		for i := range 12 {
			f.some(4, uint64(i))
			if i%3 == 2 {
				f.pass(time.Hour)
				f.must(f.s.Tick())
			}
			tail := NewTail(f.dir, at)
			b, err := tail.Next(f.end)
			f.must(err)
			got = append(got, b.Records...)
			at = b.End
			reading.Store(&b.End)
			tail.Close()
		}
		f.must(f.s.Close())
		for {
			tail := NewTail(f.dir, at)
			b, err := tail.Next(f.end)
			f.must(err)
			tail.Close()
			if at = b.End; len(b.Records) == 0 {
				break
			}
			got = append(got, b.Records...)
		}
		if kept {
			f.same("with its journal", got, f.told)
			if at.PartOf() != f.end.PartOf() && at.Compare(f.end) < 0 {
				t.Errorf("it is at %+v, and the end is %+v", at, f.end)
			}
			continue
		}
		f.same("without it, each once", unique(got), f.told)
	}
}

func unique(records []natlog.Record) (out []natlog.Record) {
	seen := map[natlog.Record]bool{}
	for _, r := range records {
		if !seen[r] {
			out = append(out, r)
		}
		seen[r] = true
	}
	return out
}

// A journal that was needed is removed once it is not, and with its Parquet file when that is
// too old.
func TestNeededJournal(t *testing.T) {
	f := newFollowed(t)
	var needed atomic.Int64 // the hour, 0 none: the store's converter asks too
	needed.Store(1)
	f.need = func(p Position) bool { return int64(p.Hour) == needed.Load() }
	f.o.Age = 3 * time.Hour
	hour := func() {
		f.pass(time.Hour)
		f.must(f.s.Tick())
		ktest.Wait(t, time.Minute, "the hour to become a Parquet file", func() bool {
			list, err := parts(f.dir)
			f.must(err)
			return !slices.ContainsFunc(list[:len(list)-1], func(p part) bool { return p.journal })
		})
		f.must(f.s.Tick())
	}
	f.open()
	f.some(5, 1)
	hour()
	if n := len(f.files(journalSuffix)); n != 2 {
		t.Errorf("%d journals, want the needed one and the running hour's", n)
	}
	if a := f.who("198.51.100.1:1024", f.now); a.FilesRead == 0 {
		t.Error("it can't be asked")
	}
	needed.Store(0)
	f.must(f.s.Tick())
	if n := len(f.files(journalSuffix)); n != 1 {
		t.Errorf("%d journals when it is not needed, want 1", n)
	}
	needed.Store(3)
	hour()
	hour()
	if n := len(f.files(journalSuffix)); n != 2 {
		t.Errorf("%d journals, want that of hour 3 too", n)
	}
	for range 5 {
		hour()
	}
	if n := len(f.files(journalSuffix)); n != 1 {
		t.Errorf("%d journals when they are too old, want 1", n)
	}
	f.must(f.s.Close())
}

// What is damaged or gone costs its part, and the reader reads on.
func TestTailDamaged(t *testing.T) {
	f := newFollowed(t)
	f.open()
	for i := range 3 {
		f.some(10, uint64(i))
		f.pass(time.Hour)
		f.must(f.s.Tick())
	}
	f.must(f.s.Close())
	files := f.files(parquetSuffix)
	if len(files) != 4 {
		t.Fatal(files)
	}
	f.must(os.WriteFile(files[1], []byte("PAR1 nonsense"), 0o600))
	f.must(os.Remove(files[0]))
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	b, err := tail.Next(f.end)
	if err == nil || len(b.Records) != 0 {
		t.Errorf("a damaged file: %d records, %v", len(b.Records), err)
	}
	want := f.sizes[Position{Hour: 3}] + f.sizes[Position{Hour: 4}]
	if got := f.read(tail); len(got) != want {
		t.Errorf("%d records behind it, want %d", len(got), want)
	}
}

// Frames behind damage are read, however large it is.
func TestTailDamagedJournal(t *testing.T) {
	f := newFollowed(t)
	f.open()
	f.some(4, 1)
	name := f.files(journalSuffix)[0]
	junk := make([]byte, 3*tailBytes)
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0o600)
	f.must(err)
	_, err = file.Write(junk)
	f.must(err)
	f.must(file.Close())
	f.s.size += int64(len(junk))
	f.some(4, 2)
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	f.same("behind damage", f.read(tail), f.told)
	f.must(f.s.Close())
}

// When the folder is removed and written again, the reader goes on in the new file.
func TestTailFolderRemoved(t *testing.T) {
	f := newFollowed(t)
	f.open()
	f.some(4, 1)
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	got := f.read(tail)
	f.must(os.RemoveAll(f.dir))
	if b, err := tail.Next(f.end); err != nil || len(b.Records) != 0 {
		t.Errorf("while it is gone: %+v %v", b, err)
	}
	f.must(f.s.Tick())
	f.some(4, 2)
	got = append(got, f.read(tail)...)
	f.same("after it is there again", got, f.told)
	if _, err := os.Stat(filepath.Join(f.dir, "lock")); err != nil {
		t.Error(err)
	}
	f.must(f.s.Close())
}

// The records that an hour begins with repeat what is alive; those after a gap and at the
// first start do not.
func TestRepeats(t *testing.T) {
	f := newFollowed(t)
	f.open()
	f.create(mapping("10.0.0.9:1000", "198.51.100.1:1024"))
	live := map[Position]bool{}
	written := f.o.Written
	f.s.o.Written = func(b Batch) {
		written(b)
		for i := range b.Records {
			if b.Records[i].Event == natlog.Alive {
				live[b.End.PartOf()] = b.Repeats(&b.Records[i])
			}
		}
	}
	f.pass(time.Hour)
	f.must(f.s.Tick()) // hour 2 repeats
	f.now = f.now.Add(-10 * time.Minute)
	f.must(f.s.Tick()) // hour 3 begins with a gap
	f.must(f.s.Close())
	f.o.Written = f.s.o.Written
	f.pass(time.Minute)
	f.open() // hour 4 too
	read := func() map[Position]bool {
		got := map[Position]bool{}
		tail := NewTail(f.dir, Position{})
		defer tail.Close()
		for {
			b, err := tail.Next(f.end)
			f.must(err)
			if len(b.Records) == 0 {
				return got
			}
			for i := range b.Records {
				if b.Records[i].Event == natlog.Alive {
					got[b.End.PartOf()] = b.Repeats(&b.Records[i])
				}
			}
		}
	}
	want := map[Position]bool{{Hour: 2}: true, {Hour: 3}: false}
	delete(live, Position{Hour: 4})
	journal := read()
	if journal[Position{Hour: 4}] {
		t.Error("after a restart they are not new")
	}
	delete(journal, Position{Hour: 4})
	for name, got := range map[string]map[Position]bool{"live": live, "read": journal} {
		for p, w := range want {
			if g, ok := got[p]; !ok || g != w {
				t.Errorf("%s: hour %d repeats: %v (there: %v), want %v", name, p.Hour, g, ok, w)
			}
		}
	}
	f.must(f.s.Close())
}

// What an hour begins with may take several parts: all of it only repeats, from a file as from a journal.
func TestRepeatsInParts(t *testing.T) {
	f := newFollowed(t)
	f.o.PartRecords = frameMost
	f.open()
	for i := range 3 * frameMost {
		f.alive[mapping(fmt.Sprintf("10.0.0.1:%d", 1000+i), fmt.Sprintf("198.51.100.1:%d", 5000+i))] = natlog.MicrosOf(f.now)
	}
	f.pass(time.Hour)
	f.must(f.s.Tick())
	count := func(what string) {
		t.Helper()
		tail := NewTail(f.dir, Position{})
		defer tail.Close()
		repeats, parts := 0, map[Position]bool{}
		for {
			b, err := tail.Next(f.end)
			f.must(err)
			if len(b.Records) == 0 {
				break
			}
			for i := range b.Records {
				if b.Repeats(&b.Records[i]) {
					repeats++
					parts[b.End.PartOf()] = true
				}
			}
		}
		if repeats != 3*frameMost || len(parts) < 3 {
			t.Errorf("%s: %d of %d only repeat, in %d parts", what, repeats, 3*frameMost, len(parts))
		}
	}
	count("journals and files")
	f.must(f.s.Close())
	count("files")
}
