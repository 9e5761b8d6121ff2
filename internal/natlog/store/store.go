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
//	log.json                                                   how the log is kept (State)
//	sinks.json                                                 what the sinks have had (package sink)
//	who.audit                                                  every look-up
//	rules/20261124T025958.120000Z.yaml                         rules in force from then on
//
// Hours are numbered as they were written: a clock that is set back mixes nothing up.
package store

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// Options of a store.
type Options struct {
	Dir       string
	Node      string // of the node column
	Namespace uint64 // whose translations these are, for the state file
	Age       time.Duration
	// Bytes is how much all files may take; 0: no limit.
	Bytes int64
	// PartRecords is how many records a file has at most; 0: 2^19, which takes some 150 MB
	// of memory while it is sorted.
	PartRecords int
	// Alive gives all that is alive: each hour begins with it.
	Alive func(yield func(natlog.Record) bool)
	// Resume decides how the log goes on from what was found; nil: with a gap since then.
	Resume func(*Left) (Resumed, error)
	Say    func(text string)
	// Written is called with what was appended, also with what could not be written, in
	// order. It must not wait. nil: nobody wants it.
	Written func(Batch)
	// Needed tells whether somebody is in the middle of the journal of a part, so that it has
	// to stay when it has become a Parquet file. Any goroutine may ask.
	Needed func(part Position) bool

	// Now reads the clock, and how long something runs that nobody sets; nil: the machine's.
	Now func() (wall time.Time, running time.Duration)

	file func(path string) (file, error) // for tests; nil: the file system's
}

// Left is what was found when a log was opened.
type Left struct {
	End natlog.Micros // when the log ended; 0: there was none
	Now natlog.Micros
	// Marks are the last notes of ticks, by their source: how far that had been recorded.
	Marks map[natlog.Source]string

	dir  string
	last []part // of the last hour
}

// Resumed is how a log goes on.
type Resumed struct {
	At   natlog.Micros // the time that what is alive is of; 0: now
	Gaps []natlog.Record
}

// Gap is the one since the log ended, nil if there was none before.
func (l *Left) Gap() []natlog.Record {
	if l.End == 0 {
		return nil
	}
	note := "natkit log was not running"
	if l.End > l.Now {
		note = "natkit log was not running, and the clock was set back"
	}
	return []natlog.Record{{Event: natlog.Gap, Since: l.End, Time: l.Now, Note: note}}
}

// Alive is what was alive when the log ended. It reads the last hour.
func (l *Left) Alive(yield func(natlog.Record) bool) {
	live := map[natlog.Translation]*Life{}
	for _, p := range l.last {
		_ = eachRecord(p, func(r *natlog.Record) { follow(live, r) }) // what can't be read was reported
	}
	for tr, life := range live {
		if !yield(natlog.Record{Translation: tr, Event: natlog.Alive, Time: life.Log, Since: life.Since}) {
			return
		}
	}
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

// FrameRecords is how many records are written whole or not at all.
const FrameRecords = 4096

const (
	defaultPart = 1 << 19
	frameMost   = FrameRecords

	// ClockStep is what the clock has to be off to have been set: in smaller steps times go on as if
	// it had not.
	ClockStep = 20 * time.Millisecond
)

// Store appends to the log. Its methods are for one goroutine, but for Stats.
type Store struct {
	o    Options
	lock *os.File

	marks    map[natlog.Source]string
	journal  file // nil: none could be made
	current  part
	size     int64
	records  int // in the journal
	noted    int // of these, without ticks, which Written was told of
	hour     time.Time
	lastTick time.Time
	base     time.Time     // of the clock, when what nobody sets was 0; as of the hour's begin
	repeat   natlog.Micros // time of the records that the hour began with, if they only repeat

	gaps      []snapshot.LogGap // the last ones, for the state file
	rules     []keptRules       // that KeepRules was called with last, after those that are not kept yet
	rulesLost bool              // they are not in the folder

	sizes map[string]int64 // of files, by path, at the last tick

	distrust time.Duration // until then, by what nobody sets, no file is removed for its age

	failedSince time.Time // zero: the last write succeeded
	failedWhy   error
	failed      uint64 // records since then

	jobs chan part
	done chan struct{}
	// beginning: parts are of what an hour begins with, which is not whole yet.
	beginning bool
	begun     []part // that are written

	mu    sync.Mutex
	stats Stats
}

// Stats is what a store did since it was opened.
type Stats struct {
	Records uint64 // written; ticks and marks are none
	Lost    uint64 // that could not be written, likewise
	Gaps    uint64
	Bytes   int64 // of all files, at the last tick
	Files   int
	// Failing is why records cannot be written now, "" if they can.
	Failing string
}

// ErrLocked is that another process writes the log.
var ErrLocked = errors.New("another natkit writes there; a folder has one writer: stop that one, or take another folder")

// Open begins to write the log in a folder, which is made. What is there is kept: a journal
// whose writer was killed becomes a Parquet file. The gap since then is recorded.
func Open(o Options) (*Store, error) {
	if o.PartRecords == 0 {
		o.PartRecords = defaultPart
	}
	o.Node = strings.ToValidUTF8(o.Node, "?")
	if o.Now == nil {
		start := time.Now()
		o.Now = func() (time.Time, time.Duration) {
			now := time.Now()
			return now.Round(0), now.Sub(start)
		}
	}
	if o.file == nil {
		o.file = func(path string) (file, error) {
			return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
		}
	}
	s := &Store{o: o, jobs: make(chan part, 1024), done: make(chan struct{}), marks: map[natlog.Source]string{}}
	if err := s.takeLock(); err != nil {
		return nil, err
	}
	list, err := parts(o.Dir)
	if err != nil {
		s.lock.Close()
		return nil, err
	}
	if had, err := ReadState(o.Dir); err == nil {
		s.gaps = had.Gaps
	}
	go s.convertJobs()
	if err := s.resumeFrom(s.recover(list)); err != nil {
		close(s.jobs)
		<-s.done
		return nil, errors.Join(err, s.lock.Close())
	}
	s.writeState(s.wall())
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
			return fmt.Errorf("open the log in %s: %w%s", s.o.Dir, ErrLocked, s.holder())
		}
		return fmt.Errorf("lock the log in %s: %w", s.o.Dir, err)
	}
	s.lock = lock
	if err := lock.Truncate(0); err == nil { // for those who find it locked
		_, _ = fmt.Fprintf(lock, "%d %s\n", os.Getpid(), filepath.Base(os.Args[0]))
	}
	return nil
}

// holder is who has the lock, as far as its file says.
func (s *Store) holder() string {
	var pid int
	var name string
	b, err := os.ReadFile(filepath.Join(s.o.Dir, "lock"))
	if err != nil {
		return ""
	}
	if _, err := fmt.Sscanf(string(b), "%d %s", &pid, &name); err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// recover converts the journals of those who were killed, and gives what it found.
func (s *Store) recover(list []part) *Left {
	left := &Left{Now: natlog.MicrosOf(s.wall()), Marks: map[natlog.Source]string{}, dir: s.o.Dir}
	torn, _ := filepath.Glob(filepath.Join(s.o.Dir, "*"+parquetSuffix+".tmp"))
	for _, path := range torn {
		os.Remove(path)
	}
	for _, p := range list {
		s.current.number = p.number
		if !p.journal {
			left.End = natlog.MicrosOf(p.end) // if the file can't be read
			if f, err := openFile(p.path); err == nil {
				left.End = f.end
				left.mark(f.marks())
				f.close()
			}
			continue
		}
		c, err := readJournal(p.path)
		if err == nil {
			left.mark(c.marks)
			if c.begin != 0 { // otherwise the hour had just been made
				left.End = c.end
			}
			if c.damaged > 0 {
				s.say("%s is damaged in %s; the rest of it is kept", p.path, plural.Count(c.damaged, "place"))
			}
			err = s.convert(p)
		}
		if err != nil {
			s.say("%s: %v", p.path, err)
		}
	}
	if now, err := parts(s.o.Dir); err == nil && len(now) > 0 {
		last := now[len(now)-1].number
		left.last = slices.DeleteFunc(now, func(p part) bool { return p.number != last })
	}
	return left
}

func (l *Left) mark(marks map[natlog.Source]string) { maps.Copy(l.Marks, marks) }

// resumeFrom begins the first hour.
func (s *Store) resumeFrom(left *Left) error {
	resumed := Resumed{Gaps: left.Gap()}
	if s.o.Resume != nil {
		var err error
		if resumed, err = s.o.Resume(left); err != nil {
			return err
		}
	}
	s.marks = left.Marks
	if left.End != 0 {
		s.jumped(left.Now.Time().Sub(left.End.Time()))
	}
	s.retain(left.Now.Time()) // the disk may be full
	return s.begin(resumed.At, resumed.Gaps)
}

func (s *Store) wall() time.Time {
	wall, _ := s.o.Now()
	return wall
}

func (s *Store) say(format string, args ...any) {
	if s.o.Say != nil {
		s.o.Say(fmt.Sprintf(format, args...))
	}
}

// begin ends the running hour and begins one: with gaps that are between them, and with all
// that is alive at that time; 0 is now.
func (s *Store) begin(at natlog.Micros, between []natlog.Record) error {
	now, running := s.o.Now()
	s.repeat = 0
	repeats := s.journal != nil && len(between) == 0
	if repeats {
		if err := s.write([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(now)}}); err != nil {
			return err
		}
	}
	s.finish()
	at = cmp.Or(at, natlog.MicrosOf(now))
	if repeats {
		s.repeat = at
	}
	s.hour, s.lastTick, s.base = at.Time().Truncate(time.Hour), now, now.Add(-running)
	if err := s.create(part{number: s.current.number + 1}); err != nil {
		return err
	}
	s.beginning = true
	err := s.snapshot(at, between)
	s.beginning = false
	if err != nil { // half a snapshot is no beginning of an hour
		if s.journal != nil {
			s.journal.Close()
			s.journal, s.begun = nil, append(s.begun, s.current)
		}
		for _, p := range s.begun {
			os.Remove(p.path)
		}
		s.begun = nil
		return err
	}
	for _, p := range s.begun {
		s.hand(p)
	}
	s.begun = nil
	s.count(func(stats *Stats) { stats.Gaps += uint64(len(between)) })
	return nil
}

// snapshot writes what an hour begins with, between two ticks: without the second it is not whole.
func (s *Store) snapshot(at natlog.Micros, between []natlog.Record) error {
	batch := append([]natlog.Record{{Event: natlog.Tick, Time: at}}, between...)
	for source, note := range s.marks {
		batch = append(batch, natlog.Mark(source, at, note))
	}
	for r := range s.o.Alive {
		r.Event, r.Time = natlog.Alive, at
		if batch = append(batch, r); len(batch) == frameMost {
			if err := s.write(batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return s.write(append(batch, natlog.Record{Event: natlog.Tick, Time: at}))
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
	_ = syncFolder(s.o.Dir) // or its name is gone after a power failure; Tick has what is in it synced
	s.journal, s.current, s.size, s.records, s.noted = f, p, int64(len(natlog.JournalHeader)), 0, 0
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
	if s.beginning {
		s.begun = append(s.begun, s.current)
		return
	}
	s.hand(s.current)
}

// hand has a journal become a Parquet file.
func (s *Store) hand(p part) {
	select {
	case s.jobs <- p:
	default: // it is readable as it is, and converted at the next start
	}
}

// convertAgain tries what could not be converted, as the disk was full.
func (s *Store) convertAgain() {
	list, err := parts(s.o.Dir)
	if err != nil {
		return // retain reports it
	}
	for _, p := range list {
		if p.journal && p.number != s.current.number {
			s.hand(p)
		}
	}
}

func (s *Store) convertJobs() {
	defer close(s.done)
	for p := range s.jobs {
		if err := s.convert(p); err != nil && !errors.Is(err, fs.ErrNotExist) { // removed by somebody
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
	s.noteGaps(records)
	records = withoutTicks(records)
	s.count(func(stats *Stats) { stats.Records += uint64(len(records)) })
	if s.o.Written != nil {
		s.noted += len(records)
		end := s.current.position()
		end.Offset, end.Records = s.size, s.noted
		s.o.Written(Batch{Records: records, End: end, Repeat: s.repeat})
	}
	return nil
}

// withoutTicks are the records that readers of the log get.
func withoutTicks(records []natlog.Record) []natlog.Record {
	return slices.DeleteFunc(slices.Clone(records), func(r natlog.Record) bool { return r.Event == natlog.Tick })
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

// Append stores records; up to FrameRecords of them whole or not at all. When it returns nil they
// are there after a kill of this process, and after the next Tick after a power failure. What can't be written is counted, and the
// next Tick that can write begins a new hour with the gap and all that is alive.
func (s *Store) Append(records []natlog.Record) error {
	for len(records) > 0 {
		n := min(frameMost, len(records))
		err := s.failedWhy
		if s.failedSince.IsZero() {
			err = s.write(records[:n])
		}
		if err != nil {
			records = withoutTicks(records)
			s.fail(err, records)
			if s.o.Written != nil {
				s.o.Written(Batch{Records: records})
			}
			return err
		}
		for i := range records[:n] {
			if r := &records[i]; r.Event == natlog.Tick && r.Note != "" {
				s.marks[r.Source] = r.Note
			}
		}
		records = records[n:]
	}
	return nil
}

// fail notes that records cannot be written. They may be of long before: what an engine recorded while
// nobody read it.
func (s *Store) fail(err error, lost []natlog.Record) {
	if s.failedSince.IsZero() {
		s.failedSince, s.failedWhy = s.wall(), err
		s.say("records are being lost: %v", err)
	}
	for i := range lost {
		at := lost[i].Time
		if lost[i].Event == natlog.Gap {
			at = min(at, lost[i].Since)
		}
		if at != 0 && at.Time().Before(s.failedSince) {
			s.failedSince = at.Time()
		}
	}
	s.failed += uint64(len(lost))
	s.count(func(stats *Stats) { stats.Lost += uint64(len(lost)); stats.Failing = s.failedWhy.Error() })
}

// Tick is to be called once a second, with nothing under way: what was appended goes to the
// disk, the hour ends if it is over, the clock and the folder are checked, old files removed.
func (s *Store) Tick() error {
	err := s.tick()
	s.writeState(s.wall())
	return err
}

func (s *Store) tick() error {
	now, running := s.o.Now()
	before, stepped := s.lastTick, now.Add(-running).Sub(s.base)
	s.lastTick = now
	switch {
	case !s.failedSince.IsZero():
		s.retain(now) // that may be what makes room
		return s.resume(now)
	case s.moved():
		if err := s.remake(); err != nil {
			s.fail(err, nil)
			return err
		}
		s.rulesLost = true
	}
	_ = s.keepRulesAgain() // it is tried again
	var err error
	switch {
	case stepped >= ClockStep || stepped <= -ClockStep:
		err = s.stepped(stepped, natlog.MicrosOf(before), natlog.MicrosOf(now))
	case !now.Truncate(time.Hour).Equal(s.hour):
		if s.trusted() {
			s.retainRules(now)
		}
		s.convertAgain()
		err = s.begin(0, nil)
	default:
		err = s.write([]natlog.Record{{Event: natlog.Tick, Time: natlog.MicrosOf(now)}})
	}
	written := err == nil
	if written {
		err = s.journal.Sync()
	}
	if err != nil {
		if s.fail(err, nil); written && before.Before(s.failedSince) {
			s.failedSince = before // what was written since then may be lost
		}
		return err
	}
	s.retain(now)
	return nil
}

// ClockStepped is to be called by who finds that the clock was set, before anything is appended by
// the new one: an hour begins. Known is the last time, by the old one, at which it was not set yet.
func (s *Store) ClockStepped(step time.Duration, known natlog.Micros) error {
	now := s.wall()
	if !s.failedSince.IsZero() { // the gap goes on to the new time
		if step < 0 {
			s.failedSince = s.failedSince.Add(step)
		}
		return nil
	}
	err := s.stepped(step, known, natlog.MicrosOf(now))
	if err != nil {
		s.fail(err, nil)
	}
	return err
}

func (s *Store) stepped(step time.Duration, known, now natlog.Micros) error {
	s.jumped(step)
	if err := s.write([]natlog.Record{{Event: natlog.Tick, Time: known}}); err != nil { // the hour ends there
		return err
	}
	return s.begin(0, SteppedRecords(step, known, now))
}

// clockSet begins the notes of gaps around a clock that was set.
const clockSet = "the clock was set "

// SteppedRecords say that the clock was set, in a step, after a time that is known by the clock of
// before, and before now by the clock of after. What happened in between has no certain time by
// either. What the clock has skipped, no hour of the log has, unless it showed that time before.
func SteppedRecords(step time.Duration, known, now natlog.Micros) []natlog.Record {
	by, note := natlog.Micros(step.Microseconds()), clockSet+"forward by "+step.Round(time.Millisecond).String()
	if step < 0 {
		note = clockSet + "back by " + (-step).Round(time.Millisecond).String()
	}
	gap := func(since, until natlog.Micros) natlog.Record {
		return natlog.Record{Event: natlog.Gap, Since: since, Time: until, Note: note}
	}
	list := []natlog.Record{gap(known, now-by), gap(known+by, now)}
	if step < 0 { // a time that was twice
		list = append(list, gap(now-by, known+by))
	}
	return list
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
	if err := s.begin(0, []natlog.Record{gap}); err != nil {
		return err
	}
	s.say("records are written again; lost: %d", s.failed)
	s.failedSince, s.failedWhy, s.failed = time.Time{}, nil, 0
	s.count(func(stats *Stats) { stats.Failing = "" })
	s.rulesLost = true     // what was kept last is not kept again
	_ = s.keepRulesAgain() // it is tried again
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
	found, err := names(s.o.Dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) { // it is made again
			s.say("%v", err)
		}
		return
	}
	list := partsOf(s.o.Dir, found)
	var total int64
	sizes := make(map[string]int64, len(list))
	kept := list[:0]
	for i, p := range list {
		if p.journal && i > 0 && list[i-1].position() == p.position() { // it is in its Parquet file
			if !s.needed(p) && os.Remove(p.path) == nil {
				continue
			}
			p.end = list[i-1].end
		}
		bytes, ok := s.sizes[p.path]
		if !ok || p.journal {
			if info, err := os.Stat(p.path); err == nil {
				bytes = info.Size()
				if p.end.IsZero() { // of a journal: when it was written last
					p.end = info.ModTime()
				}
			}
		}
		sizes[p.path] = bytes
		total += bytes
		kept = append(kept, p)
	}
	s.sizes = sizes
	list = kept
	files := len(list)
	for _, p := range list {
		old := s.o.Age > 0 && !p.end.IsZero() && now.Sub(p.end) > s.o.Age && s.trusted()
		if p.number == s.current.number {
			break
		}
		if !old && (s.o.Bytes == 0 || total <= s.o.Bytes) {
			continue // later hours may be older: the clock was far ahead for a while
		}
		if err := os.Remove(p.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.say("remove an old file of the log: %v", err)
			break
		}
		total -= sizes[p.path]
		files--
	}
	s.count(func(stats *Stats) { stats.Bytes, stats.Files = total, files })
}

// trusted reports whether the clock says how old files are. Where it has jumped by a day or more, it may
// be wrong, and right again within the hour: nothing is removed for its age until then.
func (s *Store) trusted() bool {
	_, running := s.o.Now()
	return running >= s.distrust
}

const (
	jump       = 24 * time.Hour
	jumpedLong = time.Hour
)

// jumped notes by how much the clock differs from what it was.
func (s *Store) jumped(by time.Duration) {
	if by >= jump {
		_, running := s.o.Now()
		s.distrust = running + jumpedLong
	}
}

// Gap records that events of a source between two times are missing.
func (s *Store) Gap(source natlog.Source, since, until natlog.Micros, note string) error {
	s.count(func(stats *Stats) { stats.Gaps++ })
	return s.Append([]natlog.Record{{Translation: natlog.Translation{Source: source}, Event: natlog.Gap, Since: since, Time: until, Note: note}})
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
