// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"natkit/internal/snapshot"
)

// Span is a time from which entries are wanted; a zero end is open.
type Span struct{ From, To time.Time }

func (s Span) holds(t time.Time) bool {
	return !t.Before(s.From) && (s.To.IsZero() || !t.After(s.To))
}

// ErrNone is that nothing was ever recorded.
var ErrNone = errors.New("no history here: natkit monitor records it")

// Read calls each with the entries of a folder whose time is in the span, in the order in which
// they were written. Somebody may be writing. damaged says what could not be read, and
// costs no more than that; an error of each ends it.
func Read(dir string, span Span, each func(*Entry) error) (damaged []string, err error) {
	segments, err := segmentsOf(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(segments) == 0 {
		return nil, fmt.Errorf("%s: %w", dir, ErrNone)
	}
	if err != nil {
		return nil, err
	}
	for i, s := range segments {
		// A segment's time of change is that of its last entry, by a clock that may have been set
		// since: a day is more than anybody sets it by.
		if s.modified.Add(24 * time.Hour).Before(span.From) {
			continue
		}
		b, err := readFile(s.path)
		if errors.Is(err, os.ErrNotExist) { // it was the oldest
			continue
		}
		if errors.Is(err, os.ErrPermission) {
			return damaged, fmt.Errorf("read the history: %w", err)
		}
		if err != nil { // of the disk, say: the other segments can be read
			damaged = append(damaged, fmt.Sprintf("%s could not be read: %v", s.path, err))
			continue
		}
		problems, err := readSegment(b, func(e *Entry) error {
			if !span.holds(e.At) {
				return nil
			}
			return each(e)
		})
		if err != nil {
			return damaged, err
		}
		for _, p := range problems {
			if p == tornEnd && i == len(segments)-1 { // being written
				continue
			}
			damaged = append(damaged, fmt.Sprintf("%s: %s", s.path, p))
		}
	}
	return damaged, nil
}

const tornEnd = "the last interval is incomplete: natkit monitor was killed while it wrote"

// maxSegment is how long a segment may be: what it may have, and one entry.
const maxSegment = segmentBytes + 2*maxPlain

// readFile reads a segment.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSegment+1))
	if err == nil && len(b) > maxSegment {
		err = fmt.Errorf("%s is longer than %d MiB: no segment of a history is", path, maxSegment>>20)
	}
	return b, err
}

// readSegment reads what can be read of a segment. Its problems are in words; the error is that of each.
func readSegment(b []byte, each func(*Entry) error) (problems []string, err error) {
	if !bytes.HasPrefix(b, []byte(header)) {
		if strings.HasPrefix(header, string(b)) {
			return []string{tornEnd}, nil
		}
		if bytes.HasPrefix(b, []byte(earlierHeader)) {
			return []string{"it was written by an earlier natkit, in a format that this one does not read"}, nil
		}
		return []string{"this is not a segment of natkit's history"}, nil
	}
	var g *group // nil until a key comes: what is before it can't be read
	skipping := false
	for at := len(header); at < len(b); {
		f, ok := parseFrame(b[at:])
		if !ok {
			if !skipping {
				problems = append(problems, fmt.Sprintf("damaged at byte %d: up to %d intervals after it are missing", at, groupEntries))
				skipping, g = true, nil
			}
			at++
			if next := bytes.Index(b[at:], markBytes); next >= 0 {
				at += next
			} else {
				at = len(b)
			}
			continue
		}
		at += f.length
		if f.key {
			g, skipping = newGroup(), false
		}
		if g == nil {
			continue
		}
		e, err := g.entry(f)
		if err != nil {
			problems = append(problems, fmt.Sprintf("damaged before byte %d: %v; up to %d intervals are missing", at, err, groupEntries))
			g = nil
			continue
		}
		if err := each(e); err != nil {
			return problems, err
		}
	}
	// What can't be read up to the end is the entry that was being written.
	if n := len(problems); skipping && n > 0 && strings.HasPrefix(problems[n-1], "damaged at") {
		problems[n-1] = tornEnd
	}
	return problems, nil
}

var markBytes = binary.BigEndian.AppendUint16(nil, mark)

// frame is one as it was read.
type frame struct {
	key     bool
	plain   int
	payload []byte
	length  int // of all of it
}

// parseFrame reads the frame that b begins with.
func parseFrame(b []byte) (f frame, ok bool) {
	if len(b) < frameBytes || !bytes.HasPrefix(b, markBytes) || b[2]&^flagKey != 0 {
		return f, false
	}
	plain, length := binary.BigEndian.Uint32(b[3:]), binary.BigEndian.Uint32(b[7:])
	if plain > maxPlain || uint64(length) > uint64(len(b)-frameBytes) {
		return f, false
	}
	f = frame{b[2]&flagKey != 0, int(plain), b[frameBytes : frameBytes+int(length)], frameBytes + int(length)}
	return f, checksum(b[:f.length]) == binary.BigEndian.Uint32(b[11:])
}

// group is what the frames of one have in common.
type group struct {
	in   bytes.Buffer // compressed, that was not read yet
	out  io.Reader
	last map[uint64]any

	values int // of the entries so far
}

func newGroup() *group {
	g := &group{last: map[uint64]any{}}
	g.out = flate.NewReader(&g.in)
	return g
}

// entry is the next one.
func (g *group) entry(f frame) (*Entry, error) {
	g.in.Write(f.payload)
	var plain bytes.Buffer // grows with what is really there
	if n, err := io.CopyN(&plain, g.out, int64(f.plain)); err != nil {
		return nil, fmt.Errorf("of %d bytes %d could be decompressed", f.plain, n)
	}
	if g.values += valuesIn(plain.Bytes()); g.values > groupValues {
		return nil, errors.New("more values than natkit writes")
	}
	s := stored{Entry: &Entry{}}
	dec := json.NewDecoder(&plain)
	dec.UseNumber()
	if err := dec.Decode(&s); err != nil || s.Entry == nil {
		return nil, errors.New("an interval is not as natkit writes it")
	}
	for _, p := range s.Samples {
		if p == nil {
			return nil, errors.New("an interval is not as natkit writes it")
		}
		snapshot.Clean(p)
	}
	for i := range s.Changes {
		s.Changes[i].What, s.Changes[i].Namespace = snapshot.CleanText(s.Changes[i].What), snapshot.CleanText(s.Changes[i].Namespace)
	}
	for _, list := range [][]Event{s.Events, s.On} {
		for i := range list {
			for _, text := range []*string{&list[i].Namespace, &list[i].Code, &list[i].Kind, &list[i].Severity, &list[i].Title, &list[i].Why} {
				*text = snapshot.CleanText(*text)
			}
		}
	}
	for i := range s.Tunings {
		n := &s.Tunings[i]
		for _, text := range []*string{&n.Kind, &n.Namespace, &n.Setting, &n.Old, &n.New, &n.Code, &n.Why, &n.ID} {
			*text = snapshot.CleanText(*text)
		}
	}
	s.Lost = snapshot.CleanText(s.Lost)
	for _, l := range s.Looks {
		tree := l.Whole
		if tree == nil {
			before, ok := g.last[l.Inode]
			if !ok {
				return nil, errDelta
			}
			var err error
			if tree, err = applied(before, l.Delta); err != nil {
				return nil, err
			}
		}
		g.last[l.Inode] = tree
		s.Entry.Looks = append(s.Entry.Looks, Look{inode: l.Inode, at: l.At, tree: tree})
	}
	return s.Entry, nil
}
