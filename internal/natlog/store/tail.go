// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"natkit/internal/natlog"
)

// Position is a place in the log, between two records. In the middle of a part it is a place
// of its journal, so a journal is kept, beside its Parquet file, as long as somebody needs it
// (Options.Needed); without it the part is read again from its Parquet file.
type Position struct {
	Hour    uint64 `json:"hour"` // its number, not its time
	Part    int    `json:"part"`
	Offset  int64  `json:"journal_bytes"`
	Row     int    `json:"row"`          // of a Parquet file
	Records int    `json:"part_records"` // of the part, before it
}

// PartOf is the position at which the part begins that p is in.
func (p Position) PartOf() Position { return Position{Hour: p.Hour, Part: p.Part} }

// Compare orders positions by their parts.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.Hour, q.Hour), cmp.Compare(p.Part, q.Part))
}

// Batch is what was appended at once.
type Batch struct {
	Records []natlog.Record // of which none may be changed
	// End is the position behind them. It is zero if they could not be written.
	End Position
	// Repeat is the time of records that only repeat, at the start of an hour, what is alive;
	// 0: none do.
	Repeat natlog.Micros
}

// Repeats tells whether a record only says that something is still alive.
func (b *Batch) Repeats(r *natlog.Record) bool {
	return r.Event == natlog.Alive && r.Time == b.Repeat && b.Repeat != 0
}

// Tail reads the log from a position on, in the order in which it was written; what is in a
// Parquet file in that of the file. It is for one goroutine.
type Tail struct {
	dir string
	at  Position

	journal *os.File
	buf     []byte // of the journal, from the position on
	parquet *openedFile
	group   int
	rows    []natlog.Record // of the group, not given yet
	repeat  natlog.Micros

	listed func() // for tests: called when files were listed, before one is opened
}

// tailBytes is how much of a journal is read at once, if its frames are not larger;
// tailRows how much of a row group is given at once.
const (
	tailBytes = 256 << 10
	tailRows  = 4096
)

// NewTail begins to read at a position.
func NewTail(dir string, at Position) *Tail { return &Tail{dir: dir, at: at} }

// At is up to where it has read.
func (t *Tail) At() Position { return t.at }

// Seek goes on at another position.
func (t *Tail) Seek(to Position) {
	t.Close()
	t.at = to
}

// Close closes what is open.
func (t *Tail) Close() {
	if t.journal != nil {
		t.journal.Close()
	}
	if t.parquet != nil {
		t.parquet.close()
	}
	t.journal, t.buf, t.parquet, t.rows, t.group = nil, nil, nil, nil, 0
}

// Next gives what is next, up to end, which is the end of the log; the batch is empty if
// there is nothing. An error tells why a part could not be read; the next call reads on
// behind it.
func (t *Tail) Next(end Position) (Batch, error) {
	for again := true; ; {
		if t.journal == nil && t.parquet == nil {
			ok, err := t.open(end)
			for try := 1; errors.Is(err, errMoved) && try < openTries; try++ {
				ok, err = t.open(end)
			}
			if err != nil {
				t.skip()
			}
			if err != nil || !ok {
				return Batch{End: t.at}, err
			}
		}
		var b Batch
		var more bool
		var err error
		if t.journal != nil {
			b, more, err = t.readJournal(end)
		} else {
			b, more, err = t.readParquet()
		}
		switch {
		case err != nil:
			t.skip()
			return Batch{End: t.at}, err
		case len(b.Records) > 0:
			return b, nil
		case !more && t.journal == nil && again: // it was another file
			again = false
		case !more:
			return Batch{End: t.at}, nil
		}
	}
}

// errMoved is that a file of the log was removed after it was listed: a journal became a Parquet
// file, or the file was too old.
var errMoved = errors.New("a file of the log is gone")

// openTries is how often the log is listed again for that. Each time it is another file.
const openTries = 100

// skip goes to the part behind this one.
func (t *Tail) skip() {
	t.Close()
	t.at = Position{Hour: t.at.Hour, Part: t.at.Part + 1}
}

// open opens the part that the position is in, or the next one there is.
func (t *Tail) open(end Position) (ok bool, err error) {
	list, err := allParts(t.dir)
	if errors.Is(err, fs.ErrNotExist) { // the store will make it again
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if t.listed != nil {
		t.listed()
	}
	list = slices.DeleteFunc(list, func(p part) bool { return t.at.Compare(p.position()) > 0 || end.Compare(p.position()) < 0 })
	if len(list) == 0 {
		return false, nil
	}
	p := list[0]
	if len(list) > 1 && list[1].position() == p.position() && t.at.Row == 0 { // its journal is there too
		p = list[1]
	}
	if p.position() != t.at.PartOf() {
		t.at = p.position()
	}
	if p.journal {
		t.at.Row = 0
		t.journal, err = os.Open(p.path)
	} else {
		if t.at.Row == 0 {
			t.at = t.at.PartOf()
		}
		t.parquet, err = openFile(p.path)
	}
	if err == nil {
		err = t.begin()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("%w: %s", errMoved, p.path)
	case err != nil:
		return false, fmt.Errorf("read the log's file %s: %w", p.path, err)
	}
	return true, nil
}

// begin finds out which records of the part only repeat what is alive. Those do not that
// follow a gap.
func (t *Tail) begin() error {
	if t.at.Part != 0 { // what the part before began with goes on in it
		return nil
	}
	t.repeat = 0
	var first []natlog.Record
	if t.journal != nil {
		b := make([]byte, tailBytes)
		n, err := t.journal.ReadAt(b, 0)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		rest, ok := bytes.CutPrefix(b[:n], []byte(natlog.JournalHeader))
		if !ok && n >= len(natlog.JournalHeader) {
			return errors.New("its form is not known to this natkit")
		}
		if first, _, err = natlog.NextFrame(rest, nil); err != nil || len(first) == 0 || first[0].Event != natlog.Tick {
			return nil
		}
		t.repeat = first[0].Time
	} else {
		t.repeat = t.parquet.begin
		if len(t.parquet.Groups) > 0 { // gaps have no address, so they are the first rows
			rows := make([]int, min(t.parquet.Groups[0].Rows, frameMost))
			for i := range rows {
				rows[i] = i
			}
			var err error
			if first, err = readRows(t.parquet.File, 0, rows, nil); err != nil {
				return err
			}
		}
	}
	if slices.ContainsFunc(first, func(r natlog.Record) bool { return r.Event == natlog.Gap && r.Time <= t.repeat }) {
		t.repeat = 0
	}
	return nil
}

// readJournal reads frames. more tells that it is worth while to ask again.
func (t *Tail) readJournal(end Position) (b Batch, more bool, err error) {
	last := end.Compare(t.at) == 0
	limit := end.Offset
	if !last {
		info, err := t.journal.Stat()
		if err != nil {
			return b, false, err
		}
		limit = info.Size()
	}
	t.at.Offset = max(t.at.Offset, int64(len(natlog.JournalHeader)))
	if t.at.Offset >= limit {
		if !last {
			t.skip()
		}
		return b, !last, nil
	}
	var records []natlog.Record
	for len(records) < frameMost && t.at.Offset < limit {
		whole, err := t.fill(limit, natlog.FrameLength)
		if err != nil {
			return b, false, err
		}
		var rest []byte
		for whole {
			if records, rest, err = natlog.NextFrame(t.buf, records); err == nil || rest != nil || t.at.Offset+int64(len(t.buf)) == limit {
				break
			}
			more := 2 * len(t.buf) // look for the next frame behind the damage
			if whole, err = t.fill(limit, func([]byte) int { return more }); err != nil {
				return b, false, err
			}
		}
		if !whole {
			t.Close() // the folder was removed, and the store has written another file
			break
		}
		t.at.Offset += int64(len(t.buf) - len(rest))
		t.buf = rest
	}
	records = slices.DeleteFunc(records, func(r natlog.Record) bool { return r.Event == natlog.Tick })
	t.at.Records += len(records)
	return Batch{Records: records, End: t.at, Repeat: t.repeat}, t.journal != nil, nil
}

// fill reads on in the journal until as much is there as is wanted of it, or limit is
// reached. It gives false where the file ends before that.
func (t *Tail) fill(limit int64, wanted func(b []byte) int) (ok bool, err error) {
	for wanted(t.buf) > len(t.buf) && t.at.Offset+int64(len(t.buf)) < limit {
		have := int64(len(t.buf))
		more := make([]byte, min(max(tailBytes, int64(wanted(t.buf))-have), limit-t.at.Offset-have))
		n, err := t.journal.ReadAt(more, t.at.Offset+have)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if t.buf = append(t.buf[:have:have], more[:n]...); n < len(more) {
			return false, nil
		}
	}
	return true, nil
}

// readParquet reads some rows.
func (t *Tail) readParquet() (b Batch, more bool, err error) {
	for len(t.rows) == 0 {
		if t.group == len(t.parquet.Groups) {
			t.skip()
			return b, true, nil
		}
		rows := make([]int, t.parquet.Groups[t.group].Rows)
		for i := range rows {
			rows[i] = i
		}
		before := 0
		for _, g := range t.parquet.Groups[:t.group] {
			before += g.Rows
		}
		if skip := t.at.Row - before; skip > 0 { // were read before
			rows = rows[min(skip, len(rows)):]
		}
		if len(rows) > 0 {
			if t.rows, err = readRows(t.parquet.File, t.group, rows, nil); err != nil {
				return b, false, err
			}
		}
		t.group++
	}
	n := min(tailRows, len(t.rows))
	records := t.rows[:n:n]
	t.rows = t.rows[n:]
	t.at.Row += n
	t.at.Records += n
	return Batch{Records: records, End: t.at, Repeat: t.repeat}, true, nil
}

// PartSize is how many records a part has.
type PartSize struct {
	Part    Position
	Records int
}

// Sizes counts the records of all parts from that of a position on. What cannot be read has
// none.
func Sizes(dir string, from Position) ([]PartSize, error) {
	list, err := parts(dir)
	if err != nil {
		return nil, err
	}
	var sizes []PartSize
	for _, p := range list {
		if from.Compare(p.position()) > 0 {
			continue
		}
		size := PartSize{Part: p.position()}
		if p.journal {
			if c, err := readJournal(p.path); err == nil {
				size.Records = len(c.records)
			}
		} else if f, err := openFile(p.path); err == nil {
			size.Records = int(f.Rows)
			f.close()
		}
		sizes = append(sizes, size)
	}
	return sizes, nil
}
