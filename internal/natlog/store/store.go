// SPDX-License-Identifier: Apache-2.0

// Package store keeps the log of translations in a folder, and answers who had an external
// endpoint when.
//
// The running hour is a journal: what Append has returned for is there after a kill. At the
// end of the hour it becomes a Parquet file, sorted by external endpoint. Each hour begins
// with all that is alive, so a question about a time reads the files of one hour. An hour
// with many records has several files, its parts.
//
//	20261124T030000Z-20261124T040000Z-0000000012.000.parquet   from, to, hour, part
//	0000000013.000.journal                                     the running hour
//	lock                                                       its one writer has it locked
//	who.audit                                                  every look-up
//
// Hours are numbered as they were written: a clock that is set back mixes nothing up.
package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/words/plural"
)

// Options of a store.
type Options struct {
	Dir  string
	Node string // of the node column
	Age  time.Duration
	// Bytes is how much all files may take; 0: no limit.
	Bytes int64
	// PartRecords is how many records a file has at most; 0: 2^19, which takes some 150 MB
	// of memory while it is sorted.
	PartRecords int
	// Alive gives all that is alive: each hour begins with it.
	Alive func(yield func(natlog.Record) bool)
	Say   func(text string)

	now  func() (wall time.Time, running time.Duration) // for tests; nil: the machine's clocks
	file func(path string) (file, error)                // for tests; nil: the file system's
}

// file is what a Store needs of the journal.
type file interface {
	io.Writer
	io.ReaderAt
	io.Closer
	Truncate(size int64) error
	Sync() error
	Stat() (fs.FileInfo, error)
}

const (
	defaultPart = 1 << 19
	frameMost   = 4096 // records
	clockStep   = time.Second
)

// Store appends to the log. Its methods are for one goroutine, but for Stats.
type Store struct {
	o    Options
	lock *os.File

	journal  file // nil: none could be made
	current  part
	size     int64
	records  int // in the journal
	hour     time.Time
	lastTick time.Time
	lastRun  time.Duration // since the store was opened, which no setting of the clock changes

	failedSince time.Time // zero: the last write succeeded
	failedWhy   error
	failed      uint64 // records since then

	jobs chan part
	done chan struct{}

	mu    sync.Mutex
	stats Stats
}

// Stats is what a store did since it was opened.
type Stats struct {
	Records uint64 // written
	Lost    uint64 // that could not be written
	Gaps    uint64
	Bytes   int64 // of all files, at the last tick
	Files   int
	// Failing is why records cannot be written now, "" if they can.
	Failing string
}

// ErrLocked is that another process writes the log.
var ErrLocked = errors.New("another natkit log writes there")

// Open begins to write the log in a folder, which is made. What is there is kept: a journal
// whose writer was killed becomes a Parquet file. The gap since then is recorded.
func Open(o Options) (*Store, error) {
	if o.PartRecords == 0 {
		o.PartRecords = defaultPart
	}
	if o.now == nil {
		start := time.Now()
		o.now = func() (time.Time, time.Duration) {
			now := time.Now()
			return now.Round(0), now.Sub(start)
		}
	}
	if o.file == nil {
		o.file = func(path string) (file, error) {
			return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
		}
	}
	s := &Store{o: o, jobs: make(chan part, 1024), done: make(chan struct{})}
	if err := s.takeLock(); err != nil {
		return nil, err
	}
	list, err := parts(o.Dir)
	if err != nil {
		s.lock.Close()
		return nil, err
	}
	last := s.recover(list)
	go s.convertJobs()
	if err := s.begin(s.sinceLast(last)); err != nil {
		close(s.jobs)
		<-s.done
		return nil, errors.Join(err, s.lock.Close())
	}
	return s, nil
}

func (s *Store) takeLock() error {
	if err := os.MkdirAll(s.o.Dir, 0o700); err != nil {
		return fmt.Errorf("make the folder of the log: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(s.o.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("open the log in %s: %w", s.o.Dir, ErrLocked)
		}
		return fmt.Errorf("lock the log in %s: %w", s.o.Dir, err)
	}
	s.lock = lock
	return nil
}

// recover converts the journals of those who were killed, and gives when the log ended.
func (s *Store) recover(list []part) (last natlog.Micros) {
	left, _ := filepath.Glob(filepath.Join(s.o.Dir, "*"+parquetSuffix+".tmp"))
	for _, path := range left {
		os.Remove(path)
	}
	for _, p := range list {
		s.current.number = p.number
		if !p.journal {
			last = natlog.MicrosOf(p.end) // if the file can't be read
			if f, err := openFile(p.path); err == nil {
				last = f.end
				f.close()
			}
			continue
		}
		c, err := readJournal(p.path)
		if err == nil {
			if last = c.end; c.damaged > 0 {
				s.say("%s is damaged in %s; the rest of it is kept", p.path, plural.Count(c.damaged, "place"))
			}
			err = convert(p, s.o.Node)
		}
		if err != nil {
			s.say("%s: %v", p.path, err)
		}
	}
	return last
}

// sinceLast is the gap since the log ended, nil if there was none before.
func (s *Store) sinceLast(last natlog.Micros) []natlog.Record {
	if last == 0 {
		return nil
	}
	now := natlog.MicrosOf(s.wall())
	note := "natkit log was not running"
	if last > now {
		note = "natkit log was not running, and the clock was set back"
	}
	return []natlog.Record{{Event: natlog.Gap, Since: last, Time: now, Note: note}}
}

func (s *Store) wall() time.Time {
	wall, _ := s.o.now()
	return wall
}

func (s *Store) say(format string, args ...any) {
	if s.o.Say != nil {
		s.o.Say(fmt.Sprintf(format, args...))
	}
}

// begin ends the running hour and begins one: with gaps that are between them, and with all
// that is alive.
func (s *Store) begin(between []natlog.Record) error {
	now, running := s.o.now()
	if s.journal != nil && len(between) == 0 {
		if err := s.write([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(now)}}); err != nil {
			return err
		}
	}
	s.finish()
	s.hour, s.lastTick, s.lastRun = now.Truncate(time.Hour), now, running
	if err := s.create(part{number: s.current.number + 1}); err != nil {
		return err
	}
	batch := append([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(now)}}, between...)
	for r := range s.o.Alive {
		r.Event, r.Time = natlog.Alive, natlog.MicrosOf(now)
		if batch = append(batch, r); len(batch) == frameMost {
			if err := s.write(batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	if err := s.write(batch); err != nil {
		return err
	}
	s.count(func(stats *Stats) { stats.Gaps += uint64(len(between)) })
	return nil
}

// create makes a journal.
func (s *Store) create(p part) error {
	p.journal, p.path = true, filepath.Join(s.o.Dir, p.sequence()+journalSuffix)
	f, err := s.o.file(p.path)
	if err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	if _, err := io.WriteString(f, natlog.JournalHeader); err != nil {
		return errors.Join(fmt.Errorf("write the log: %w", err), f.Close(), os.Remove(p.path))
	}
	s.journal, s.current, s.size, s.records = f, p, int64(len(natlog.JournalHeader)), 0
	return nil
}

// finish hands the journal on to become a Parquet file.
func (s *Store) finish() {
	if s.journal == nil {
		return
	}
	if err := errors.Join(s.journal.Sync(), s.journal.Close()); err != nil {
		s.say("%s: %v", s.current.path, err)
	}
	s.journal = nil
	select {
	case s.jobs <- s.current:
	default: // it is readable as it is, and converted at the next start
	}
}

func (s *Store) convertJobs() {
	defer close(s.done)
	for p := range s.jobs {
		if err := convert(p, s.o.Node); err != nil && !errors.Is(err, fs.ErrNotExist) { // removed by somebody
			s.say("%s stays a journal: %v", p.path, err)
		}
	}
}

// write appends a frame. What can't be written whole is cut off again.
func (s *Store) write(records []natlog.Record) error {
	if len(records) == 0 {
		return nil
	}
	if s.records > 0 && s.records+len(records) > s.o.PartRecords {
		next := part{number: s.current.number, index: s.current.index + 1}
		s.finish()
		if err := s.create(next); err != nil {
			return err
		}
	}
	frame := natlog.AppendFrame(nil, records)
	if _, err := s.journal.Write(frame); err != nil {
		return errors.Join(fmt.Errorf("write the log: %w", err), s.journal.Truncate(s.size))
	}
	s.size += int64(len(frame))
	s.records += len(records)
	s.count(func(stats *Stats) { stats.Records += uint64(len(records)) })
	return nil
}

func (s *Store) count(change func(*Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.stats)
}

// Stats is what it did. Any goroutine may ask.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// Append stores records. When it returns nil they are there after a kill of this process,
// and after the next Tick after a power failure. What can't be written is counted, and the
// next Tick that can write begins a new hour with the gap and all that is alive.
func (s *Store) Append(records []natlog.Record) error {
	for len(records) > 0 {
		n := min(frameMost, len(records))
		err := s.failedWhy
		if s.failedSince.IsZero() {
			err = s.write(records[:n])
		}
		if err != nil {
			s.fail(err, len(records))
			return err
		}
		records = records[n:]
	}
	return nil
}

func (s *Store) fail(err error, lost int) {
	if s.failedSince.IsZero() {
		s.failedSince, s.failedWhy = s.wall(), err
		s.say("records are being lost: %v", err)
	}
	s.failed += uint64(lost)
	s.count(func(stats *Stats) { stats.Lost += uint64(lost); stats.Failing = s.failedWhy.Error() })
}

// Tick is to be called once a second, with nothing under way: what was appended goes to the
// disk, the hour ends if it is over, the clock and the folder are checked, old files removed.
func (s *Store) Tick() error {
	now, running := s.o.now()
	before := s.lastTick
	stepped := now.Sub(before) - (running - s.lastRun)
	s.lastTick, s.lastRun = now, running
	switch {
	case !s.failedSince.IsZero():
		return s.resume(now)
	case s.moved():
		if err := s.remake(); err != nil {
			s.fail(err, 0)
			return err
		}
	}
	var err error
	switch {
	case stepped >= clockStep || stepped <= -clockStep:
		err = s.begin([]natlog.Record{steppedRecord(before, now, stepped)})
	case !now.Truncate(time.Hour).Equal(s.hour):
		err = s.begin(nil)
	default:
		err = s.write([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(now)}})
	}
	if err == nil {
		err = s.journal.Sync()
	}
	if err != nil {
		s.fail(err, 0)
		return err
	}
	s.retain(now)
	return nil
}

// steppedRecord says that the clock was set, in a step, between two ticks.
func steppedRecord(before, now time.Time, step time.Duration) natlog.Record {
	note := "the clock was set forward by " + step.Round(time.Millisecond).String()
	if step < 0 {
		note = "the clock was set back by " + (-step).Round(time.Millisecond).String()
	}
	return natlog.Record{Event: natlog.Gap, Since: natlog.MicrosOf(before), Time: natlog.MicrosOf(now), Note: note}
}

// resume tries to write again after a failure.
func (s *Store) resume(now time.Time) error {
	if s.journal != nil && s.journal.Truncate(s.size) != nil {
		s.finish()
	}
	if s.moved() {
		s.finish()
		if s.lock != nil {
			s.lock.Close()
		}
		if err := s.takeLock(); err != nil {
			return err
		}
	}
	gap := natlog.Record{Event: natlog.Gap, Since: natlog.MicrosOf(s.failedSince), Time: natlog.MicrosOf(now),
		Note: plural.Count(int(s.failed), "record") + " could not be written: " + s.failedWhy.Error()}
	if err := s.begin([]natlog.Record{gap}); err != nil {
		if s.journal != nil { // half a snapshot is no beginning of an hour
			s.journal.Close()
			s.journal = nil
			os.Remove(s.current.path)
		}
		return err
	}
	s.say("records are written again; lost: %d", s.failed)
	s.failedSince, s.failedWhy, s.failed = time.Time{}, nil, 0
	s.count(func(stats *Stats) { stats.Failing = "" })
	return nil
}

// moved tells whether the journal's name no longer leads to it: its folder was removed.
func (s *Store) moved() bool {
	if s.journal == nil {
		_, err := os.Stat(s.o.Dir)
		return err != nil
	}
	own, err1 := s.journal.Stat()
	there, err2 := os.Stat(s.current.path)
	return err1 != nil || err2 != nil || !os.SameFile(own, there)
}

// remake makes the folder again, with the journal, which its open file still has.
func (s *Store) remake() error {
	s.lock.Close()
	if err := s.takeLock(); err != nil {
		return err
	}
	f, err := s.o.file(s.current.path)
	if err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	if _, err := io.Copy(f, io.NewSectionReader(s.journal, 0, s.size)); err != nil {
		return errors.Join(fmt.Errorf("write the log: %w", err), f.Close(), os.Remove(s.current.path))
	}
	s.journal.Close()
	s.journal = f
	s.say("the journal in %s was removed; it is there again, earlier files may be gone", s.o.Dir)
	return nil
}

// retain removes the oldest hours while there is more than what is to be kept.
func (s *Store) retain(now time.Time) {
	list, err := parts(s.o.Dir)
	if err != nil {
		s.say("%v", err)
		return
	}
	var total int64
	for _, p := range list {
		total += p.bytes
	}
	files := len(list)
	for _, p := range list {
		old := s.o.Age > 0 && !p.journal && now.Sub(p.end) > s.o.Age
		if p.number == s.current.number || !old && (s.o.Bytes == 0 || total <= s.o.Bytes) {
			break
		}
		if err := os.Remove(p.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.say("remove an old file of the log: %v", err)
			break
		}
		total -= p.bytes
		files--
	}
	s.count(func(stats *Stats) { stats.Bytes, stats.Files = total, files })
}

// Gap records that events between two times are missing.
func (s *Store) Gap(since, until time.Time, note string) error {
	s.count(func(stats *Stats) { stats.Gaps++ })
	return s.Append([]natlog.Record{{Event: natlog.Gap, Since: natlog.MicrosOf(since), Time: natlog.MicrosOf(until), Note: note}})
}

// Close ends the hour; all of the log is Parquet then.
func (s *Store) Close() error {
	var errs []error
	if s.failedSince.IsZero() {
		errs = append(errs, s.write([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(s.wall())}}))
	}
	s.finish()
	close(s.jobs)
	<-s.done
	return errors.Join(append(errs, s.lock.Close())...)
}
