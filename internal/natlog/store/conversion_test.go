// SPDX-License-Identifier: Apache-2.0

package store

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"natkit/internal/natlog"
	"natkit/internal/testutil/ktest"
)

// While journals become Parquet files a listing has each part once, under one of its names.
func TestListDuringConversion(t *testing.T) {
	t.Parallel()
	const hours = 1000
	dir := t.TempDir()
	journal := func(n int) string { return filepath.Join(dir, (&part{number: uint64(n)}).sequence()+journalSuffix) }
	for n := range hours {
		if err := os.WriteFile(journal(n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var converter sync.WaitGroup
	done := make(chan struct{})
	converter.Go(func() {
		defer close(done)
		at := time.Date(2026, 11, 24, 0, 0, 0, 0, time.UTC)
		for n := range hours {
			tmp := filepath.Join(dir, "x.tmp")
			name := at.Format(nameTime) + "-" + at.Add(time.Hour).Format(nameTime) + "-" + (&part{number: uint64(n)}).sequence() + parquetSuffix
			if os.WriteFile(tmp, nil, 0o600) != nil || os.Rename(tmp, filepath.Join(dir, name)) != nil || os.Remove(journal(n)) != nil {
				t.Error("convert")
				return
			}
			at = at.Add(time.Hour)
		}
	})
	defer converter.Wait()
	lists := 0
	for over := false; !over; lists++ {
		select {
		case <-done:
			over = true
		default:
		}
		list, err := parts(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(list) != hours || list[0].number != 0 || list[hours-1].number != hours-1 {
			t.Fatalf("listing %d: %d parts, want %d", lists, len(list), hours)
		}
	}
}

// A reader that finds a journal gone, which it has listed, goes on in the Parquet file at once:
// that there is nothing would be what it says at the end of the log.
func TestTailDuringConversion(t *testing.T) {
	f := newFollowed(t)
	f.open()
	f.some(10, 1)
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	tail.listed = func() {
		tail.listed = nil
		f.pass(time.Hour)
		f.must(f.s.Tick())
		ktest.Wait(t, time.Minute, "the journal to go", func() bool { return len(f.files(journalSuffix)) == 1 })
	}
	if f.same("a journal that became a Parquet file", f.read(tail), f.told); tail.listed != nil {
		t.Error("it listed nothing")
	}
	f.must(f.s.Close())
}

// A folder that is gone is no part that cannot be read: the reader goes on where it was, when the
// store has written it again.
func TestTailWithoutFolder(t *testing.T) {
	f := newFollowed(t)
	f.open()
	f.some(4, 1)
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	f.must(os.RemoveAll(f.dir))
	if b, err := tail.Next(f.end); err != nil || len(b.Records) != 0 {
		t.Errorf("while it is gone: %+v %v", b, err)
	}
	f.must(f.s.Tick())
	f.same("when it is there again", f.read(tail), f.told)
	f.must(f.s.Close())
}

// While journals become Parquet files, whoever reads the log misses nothing: a reader that
// follows it, one that begins again, and a look-up.
func TestReadDuringConversion(t *testing.T) {
	t.Parallel()
	f := newFollowed(t)
	f.o.PartRecords = 20
	f.open()
	tail := NewTail(f.dir, Position{})
	defer tail.Close()
	var got []natlog.Record
	asked := mapping("10.0.0.1:1", "198.51.100.77:7777")
	f.create(asked)
	for i := range 100 {
		f.some(3, uint64(i))
		if i%10 == 9 {
			f.pass(time.Hour)
			f.must(f.s.Tick())
		}
		got = append(got, f.read(tail)...)
		if len(got) != len(f.told) {
			t.Fatalf("round %d: %d records, want %d", i, len(got), len(f.told))
		}
		if i%10 == 9 {
			fresh := NewTail(f.dir, Position{})
			if all := f.read(fresh); len(all) != len(f.told) {
				t.Fatalf("round %d: from the begin %d records, want %d", i, len(all), len(f.told))
			}
			fresh.Close()
		}
		if a := f.who(asked.External.String(), f.now); len(a.Lives) != 1 || len(a.Gaps) > 0 {
			t.Fatalf("round %d: %+v", i, a)
		}
	}
	if g, w := sorted(got), sorted(f.told); !slices.Equal(g, w) {
		t.Error("other records")
	}
	f.must(f.s.Close())
}

// A journal is read into memory that is asked for once: what natkit log takes at most is of that.
func TestJournalReadAtOnce(t *testing.T) {
	path, random := filepath.Join(t.TempDir(), "journal"), rand.New(rand.NewPCG(1, 1))
	b := natlog.AppendFrame([]byte(natlog.JournalHeader), []natlog.Record{{Event: natlog.Tick, Time: 1}}) // as an hour begins
	const frames, each = 100, 1000
	for n := range frames {
		var records []natlog.Record
		for i := range each {
			records = append(records, randomRecord(random, natlog.Micros(1+n*each+i)))
		}
		b = natlog.AppendFrame(b, records)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	c, err := readJournal(path)
	runtime.ReadMemStats(&after)
	if err != nil || len(c.records) != frames*each {
		t.Fatalf("%d records, %v", len(c.records), err)
	}
	need := uint64(len(b)) + uint64(len(c.records))*uint64(unsafe.Sizeof(natlog.Record{}))
	if took := after.TotalAlloc - before.TotalAlloc; took > need*5/4 {
		t.Errorf("%d bytes of memory were asked for, of %d that are needed", took, need)
	}
}
