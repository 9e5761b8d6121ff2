// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/natlog/parquet"
)

const (
	journalSuffix = ".journal"
	parquetSuffix = ".parquet"
	nameTime      = "20060102T150405Z"
)

// part is a file of the log: a journal, or the Parquet file that was made of one.
type part struct {
	number  uint64 // of its hour
	index   int    // in the hour
	journal bool
	path    string
	// begin and end are in its name, rounded to seconds; a journal's are zero.
	begin, end time.Time
}

func (p *part) position() Position { return Position{Hour: p.number, Part: p.index} }

func (p *part) sequence() string { return fmt.Sprintf("%010d.%03d", p.number, p.index) }

// parsePart reads a file's name.
func parsePart(name string) (p part, ok bool) {
	rest, journal := strings.CutSuffix(name, journalSuffix)
	p.journal = journal
	if !journal {
		if rest, ok = strings.CutSuffix(name, parquetSuffix); !ok {
			return p, false
		}
		words := strings.Split(rest, "-")
		if len(words) != 3 {
			return p, false
		}
		var err1, err2 error
		p.begin, err1 = time.Parse(nameTime, words[0])
		p.end, err2 = time.Parse(nameTime, words[1])
		if err1 != nil || err2 != nil {
			return p, false
		}
		rest = words[2]
	}
	number, index, ok := strings.Cut(rest, ".")
	n, err1 := strconv.ParseUint(number, 10, 64)
	i, err2 := strconv.ParseUint(index, 10, 31)
	p.number, p.index = n, int(i)
	return p, ok && err1 == nil && err2 == nil
}

// parts lists the files of the log in the order in which they were written. Where a journal
// and its Parquet file are both there, only the latter counts.
func parts(dir string) ([]part, error) {
	list, err := allParts(dir)
	return slices.CompactFunc(list, func(a, b part) bool { return a.position() == b.position() }), err
}

// allParts lists all files, a journal behind its Parquet file. The error is fs.ErrNotExist where
// there is no folder.
//
// A folder is not read in one moment: a journal that becomes a Parquet file at that time may be
// found by neither name. So the folder is read twice: a part becomes a Parquet file once. A part
// that only the first reading found is listed, too; if its file is gone when it is opened, the
// next listing has the other one.
func allParts(dir string) ([]part, error) {
	first, err := names(dir)
	if err != nil {
		return nil, err
	}
	second, err := names(dir)
	if err != nil {
		return nil, err
	}
	list := partsOf(dir, second)
	if !slices.Equal(first, second) {
		found := make(map[Position]bool, len(list))
		for i := range list {
			found[list[i].position()] = true
		}
		list = append(list, slices.DeleteFunc(partsOf(dir, first), func(p part) bool { return found[p.position()] })...)
		slices.SortFunc(list, comparePosition)
	}
	return list, nil
}

// names lists the names in the folder of a log.
func names(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("list the log: %w", err)
	}
	defer d.Close()
	list, err := d.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list the log: %w", err)
	}
	slices.Sort(list)
	return list, nil
}

// partsOf are the parts among files of the log, in order.
func partsOf(dir string, names []string) []part {
	list := make([]part, 0, len(names))
	for _, name := range names {
		if p, ok := parsePart(name); ok {
			p.path = filepath.Join(dir, name)
			list = append(list, p)
		}
	}
	slices.SortFunc(list, comparePosition)
	return list
}

// comparePosition orders parts as they were written, a journal behind its Parquet file.
func comparePosition(a, b part) int {
	if c := a.position().Compare(b.position()); c != 0 || a.journal == b.journal {
		return c
	}
	if a.journal {
		return 1
	}
	return -1
}

// content is what is in a journal.
type content struct {
	records    []natlog.Record // without ticks
	rows       int             // records that a look-up went through
	begin, end natlog.Micros
	marks      map[natlog.Source]string
	damaged    int // places where frames could not be read
	torn       bool
	whole      int64 // bytes up to a torn end
	begun      bool  // the hour's beginning ends in it: nobody was killed before that
}

// largeFrame is how many records a frame has at least whose length tells how many the rest of a journal has.
const largeFrame = 256

// readJournal reads a journal as far as it can be read.
func readJournal(path string) (c content, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("read the log's journal: %w", err)
	}
	if !bytes.HasPrefix(b, []byte(natlog.JournalHeader)) {
		if strings.HasPrefix(natlog.JournalHeader, string(b)) { // killed before it had written that
			return content{torn: true}, nil
		}
		if bytes.HasPrefix(b, []byte("natkit log ")) {
			return c, fmt.Errorf("read the log's journal %s: its form is not known to this natkit: use a newer one", path)
		}
		return c, fmt.Errorf("read the log's journal %s: %w: it does not begin like one", path, parquet.ErrDamaged)
	}
	gaps, rest := natlog.Micros(0), b[len(natlog.JournalHeader):]
	ticks, roomy := 0, false
	c.whole = int64(len(b))
	for len(rest) > 0 {
		had, before := len(c.records), int64(len(b)-len(rest))
		c.records, rest, err = natlog.NextFrame(rest, c.records)
		if n := len(c.records) - had; n >= largeFrame && !roomy {
			// Room for the others, at once: to grow bit by bit would take several times as much memory,
			// and slices.Grow asks for it twice under the race detector.
			more := len(rest) * n / (len(b) - len(rest) - int(before))
			c.records, roomy = append(make([]natlog.Record, 0, len(c.records)+more), c.records...), true
		}
		switch {
		case errors.Is(err, natlog.ErrTorn):
			c.torn, c.whole = true, before
		case err != nil:
			c.damaged++
		}
		for _, r := range c.records[had:] {
			if r.Event == natlog.Gap { // it may be by the clock of before
				gaps = max(gaps, r.Time)
				continue
			}
			if c.begin == 0 {
				c.begin = r.Time
			}
			c.end = max(c.end, r.Time)
			if r.Event == natlog.Tick && r.Note == "" {
				ticks++
			}
			c.begun = c.begun || ticks > 1 || r.Event != natlog.Tick && r.Event != natlog.Alive
			if r.Event == natlog.Tick && r.Note != "" {
				if c.marks == nil {
					c.marks = map[natlog.Source]string{}
				}
				c.marks[r.Source] = r.Note
			}
		}
		kept := slices.DeleteFunc(c.records[had:], func(r natlog.Record) bool { return r.Event == natlog.Tick })
		c.records = c.records[:had+len(kept)]
	}
	if c.begin == 0 {
		c.begin, c.end = gaps, gaps
	}
	return c, nil
}

// convert makes the Parquet file of a journal, and removes the journal if nobody needs it.
// Killed at any time it leaves one of the two whole.
func (s *Store) convert(journal part) error {
	c, err := readJournal(journal.path)
	if err != nil {
		return err
	}
	if c.begin == 0 {
		return os.Remove(journal.path) // nothing was written
	}
	if c.damaged > 0 {
		c.records = append(c.records, natlog.Record{Event: natlog.Gap, Since: c.begin, Time: c.end, Note: "the journal was damaged"})
	}
	dir := filepath.Dir(journal.path)
	begin, end := c.begin.Time(), (c.end + 999_999).Time()
	final := filepath.Join(dir, begin.Format(nameTime)+"-"+end.Format(nameTime)+"-"+journal.sequence()+parquetSuffix)
	tmp, err := os.OpenFile(final+".tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	err = writeParquet(tmp, &c, s.o.Node)
	err = cmp.Or(err, tmp.Sync())
	err = cmp.Or(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), final)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write the log: %w", err), os.Remove(tmp.Name()))
	}
	if err := syncFolder(dir); err != nil {
		return err
	}
	if s.needed(journal) {
		return nil
	}
	return os.Remove(journal.path)
}

// needed tells whether somebody reads a journal that has become a Parquet file.
func (s *Store) needed(journal part) bool {
	return s.o.Needed != nil && s.o.Needed(journal.position())
}

func writeParquet(out *os.File, c *content, node string) error {
	w, err := parquet.NewWriter(out, fields(), "external_address", "external_port", "time")
	if err != nil {
		return err
	}
	order := sortRecords(c.records)
	rows := groupRows(len(order))
	for len(order) > 0 {
		n := min(rows, len(order))
		if err := w.RowGroup(rowGroup(c.records, order[:n], node)); err != nil {
			return err
		}
		order = order[n:]
	}
	about := map[string]string{
		"natkit.log": strconv.Itoa(schemaVersion), "natkit.node": node,
		"natkit.begin": strconv.FormatInt(int64(c.begin), 10), "natkit.end": strconv.FormatInt(int64(c.end), 10),
	}
	if !c.begun {
		about[beginningKey] = "1"
	}
	for source, note := range c.marks {
		about[markPrefix+source.String()] = note
	}
	return w.Close(about)
}

const (
	markPrefix = "natkit.mark."
	// beginningKey is in files that have only some of what an hour begins with.
	beginningKey = "natkit.beginning"
)

// marks are those that the journal of a file ended with.
func (f *openedFile) marks() map[natlog.Source]string {
	marks := map[natlog.Source]string{}
	for key, note := range f.About {
		if name, ok := strings.CutPrefix(key, markPrefix); ok {
			if source, ok := natlog.ParseSource(name); ok {
				marks[source] = note
			}
		}
	}
	return marks
}

// eachRecord calls fn with all records of a part, in the order in which they were written.
func eachRecord(p part, fn func(*natlog.Record)) error {
	if p.journal {
		c, err := readJournal(p.path)
		for i := range c.records {
			fn(&c.records[i])
		}
		return err
	}
	f, err := openFile(p.path)
	if err != nil {
		return err
	}
	defer f.close()
	var all []natlog.Record
	for g := range f.Groups {
		rows := make([]int, f.Groups[g].Rows)
		for i := range rows {
			rows[i] = i
		}
		records, err := readRows(f.File, g, rows, nil)
		if err != nil {
			return err
		}
		all = append(all, records...)
	}
	asWritten(all, f.begin)
	for i := range all {
		fn(&all[i])
	}
	return nil
}

func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	return nil
}
