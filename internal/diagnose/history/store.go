// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"cmp"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

const (
	header        = "natkit/history-segment/1\n"
	earlierHeader = "natkit history 1\n"

	mark       = 0x6e6b // "nk"
	frameBytes = 2 + 1 + 4 + 4 + 4
	flagKey    = 1

	// maxPlain is how long an entry may be before it is compressed, and groupValues how many JSON
	// values the entries of a group may have: both are in memory while it is read.
	maxPlain    = 128 << 20
	groupValues = 8 << 20

	// groupEntries is how many entries a group has: ten minutes of them at the usual interval.
	groupEntries = 60

	// ageFor is how long a segment must be too old before it is removed: a clock that was set forward by mistake, and is
	// corrected, must not cost the history.
	ageFor = 10 * time.Minute

	segmentAge   = time.Hour
	segmentShare = 16 // of the room that all may take, one segment may take this part
	segmentBytes = 64 << 20

	suffix = ".segment"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Limits is how much a Writer keeps: whichever is reached first.
type Limits struct {
	Bytes int64
	Age   time.Duration
}

// DefaultLimits of a node.
var DefaultLimits = Limits{Bytes: 256 << 20, Age: 7 * 24 * time.Hour}

// file is what a Writer needs of one.
type file interface {
	io.Writer
	io.Closer
	Truncate(size int64) error
	Sync() error
}

// Writer appends entries. It is for one goroutine; one process at a time has the folder.
type Writer struct {
	dir    string
	limits Limits
	lock   *os.File
	create func(path string) (file, error) // for tests; nil is the file system's

	seg    file // nil: the next entry begins one
	number uint64
	size   int64
	began  time.Time // monotonic
	aged   time.Time // since when the oldest segment is too old; monotonic

	out     bytes.Buffer // what flate made of the entry
	flate   *flate.Writer
	entries int // of the group; 0: the next is a key
	values  int // of the group
	last    map[uint64]any
	lost    int    // entries that could not be written since the last one that was
	why     string // of the first of these
}

// ErrLocked is that another process writes to the folder.
var ErrLocked = errors.New("another natkit monitor writes the history there")

// Create begins to append to the history in a folder, which is made. What is there is kept.
func Create(dir string, limits Limits) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of the history: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the history: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("open the history in %s: %w", dir, ErrLocked)
		}
		return nil, fmt.Errorf("lock the history in %s: %w", dir, err)
	}
	segments, err := segmentsOf(dir)
	if err != nil {
		lock.Close()
		return nil, err
	}
	w := &Writer{dir: dir, limits: limits, lock: lock}
	if n := len(segments); n > 0 {
		w.number = segments[n-1].number // a new one is begun: what is there may have a torn end
	}
	return w, nil
}

// Close ends the segment.
func (w *Writer) Close() error {
	var errs []error
	if w.seg != nil {
		errs = append(errs, w.seg.Sync(), w.seg.Close())
		w.seg = nil
	}
	return errors.Join(append(errs, w.lock.Close())...)
}

// Add stores an entry. When it can't be written nothing of it stays, and the next entry that can
// be says what is missing.
func (w *Writer) Add(e *Entry) error {
	if w.lost > 0 {
		copied := *e
		copied.Lost = strings.TrimPrefix(strings.Join([]string{e.Lost, plural.Count(w.lost, "interval") + " could not be written: " + w.why}, "; "), "; ")
		e = &copied
	}
	if err := w.add(e); err != nil {
		if w.lost++; w.lost == 1 {
			w.why = err.Error()
		}
		return err
	}
	w.lost, w.why = 0, ""
	if w.entries < groupEntries {
		return nil
	}
	w.entries = 0
	if err := w.seg.Sync(); err != nil { // what was written is there until the machine stops
		return fmt.Errorf("write the history to the disk: %w", err)
	}
	return nil
}

func (w *Writer) add(e *Entry) error {
	if w.seg != nil && (time.Since(w.began) >= segmentAge || w.size >= min(w.limits.Bytes/segmentShare, segmentBytes)) {
		err := cmp.Or(w.seg.Sync(), w.seg.Close())
		w.seg, w.entries = nil, 0
		if err != nil {
			return fmt.Errorf("end a segment of the history: %w", err)
		}
	}
	if err := w.makeRoom(e.At); err != nil {
		return err
	}
	if w.seg == nil {
		if err := w.begin(); err != nil {
			return err
		}
	}
	frame, last, err := w.frame(e)
	if err == nil {
		_, err = w.seg.Write(frame)
	}
	if err != nil {
		// A torn frame would cost nobody but itself; but the place is wanted.
		w.entries = 0
		return errors.Join(fmt.Errorf("write the history: %w", err), w.seg.Truncate(w.size))
	}
	w.size += int64(len(frame))
	w.last = last
	w.entries++
	return nil
}

// begin makes a segment.
func (w *Writer) begin() error {
	create := w.create
	if create == nil {
		create = func(path string) (file, error) {
			return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
		}
	}
	seg, err := create(filepath.Join(w.dir, fmt.Sprintf("%010d%s", w.number+1, suffix)))
	if err != nil {
		return fmt.Errorf("begin a segment of the history: %w", err)
	}
	w.number++
	if _, err := io.WriteString(seg, header); err != nil {
		return errors.Join(fmt.Errorf("begin a segment of the history: %w", err), seg.Close(), os.Remove(w.path(w.number)))
	}
	w.seg, w.size, w.began, w.entries = seg, int64(len(header)), time.Now(), 0
	return nil
}

func (w *Writer) path(number uint64) string {
	return filepath.Join(w.dir, fmt.Sprintf("%010d%s", number, suffix))
}

// stored is how an entry looks in a frame.
type stored struct {
	*Entry
	Looks []storedLook `json:"looks,omitempty"`
}

type storedLook struct {
	Inode uint64    `json:"inode"`
	At    time.Time `json:"at"`
	Whole any       `json:"whole,omitempty"`
	Delta any       `json:"delta,omitempty"`
}

// frame is an entry as it is written, and the facts that the next one differs from.
func (w *Writer) frame(e *Entry) (frame []byte, last map[uint64]any, err error) {
	key := w.entries == 0
	last = map[uint64]any{}
	if !key {
		for inode, tree := range w.last {
			last[inode] = tree
		}
	}
	s := stored{Entry: e}
	for _, look := range e.Looks {
		tree, err := look.asTree()
		if err != nil {
			return nil, nil, err
		}
		l := storedLook{Inode: look.inode, At: look.at}
		if before, ok := last[look.inode]; ok {
			l.Delta = difference(before, tree)
		} else {
			l.Whole = tree
		}
		last[look.inode] = tree
		s.Looks = append(s.Looks, l)
	}
	plain, err := json.Marshal(s)
	if err != nil {
		return nil, nil, fmt.Errorf("store an interval: %w", err)
	}
	values := valuesIn(plain)
	if len(plain) > maxPlain || values > groupValues {
		return nil, nil, fmt.Errorf("store an interval: %d values in %d MiB are more than the history takes at once", values, len(plain)>>20)
	}
	if !key && w.values+values > groupValues {
		w.entries = 0
		return w.frame(e)
	}
	if key {
		w.values = 0
	}
	w.values += values
	w.out.Reset()
	switch {
	case w.flate == nil:
		// Fast: what is gained beyond is a tenth of the room for three times the work.
		if w.flate, err = flate.NewWriter(&w.out, flate.BestSpeed); err != nil {
			return nil, nil, err
		}
	case key:
		w.flate.Reset(&w.out)
	}
	if _, err := w.flate.Write(plain); err != nil {
		return nil, nil, err
	}
	if err := w.flate.Flush(); err != nil {
		return nil, nil, err
	}
	return sealed(key, len(plain), w.out.Bytes()), last, nil
}

// sealed is a frame of what was compressed.
func sealed(key bool, plain int, payload []byte) []byte {
	frame := make([]byte, frameBytes, frameBytes+len(payload))
	binary.BigEndian.PutUint16(frame, mark)
	if key {
		frame[2] = flagKey
	}
	binary.BigEndian.PutUint32(frame[3:], uint32(plain))
	binary.BigEndian.PutUint32(frame[7:], uint32(len(payload)))
	frame = append(frame, payload...)
	binary.BigEndian.PutUint32(frame[11:], checksum(frame))
	return frame
}

// checksum is of a whole frame but for the checksum itself.
func checksum(frame []byte) uint32 {
	return crc32.Update(crc32.Checksum(frame[:11], castagnoli), castagnoli, frame[frameBytes:])
}

// valuesIn is how many values JSON has at most: each needs room when it is read.
func valuesIn(b []byte) int {
	n, text := 1, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case !text && (c == ',' || c == '[' || c == '{'):
			n++
		}
	}
	return n
}

// asTree is a look as JSON values.
func (l Look) asTree() (any, error) {
	if l.tree != nil {
		return l.tree, nil
	}
	b, err := snapshot.Marshal(l.value)
	if err != nil {
		return nil, fmt.Errorf("store facts: %w", err)
	}
	return parseTree(b)
}

func parseTree(b []byte) (tree any, err error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber() // counters are longer than a float64 is exact
	err = dec.Decode(&tree)
	return tree, err
}

// Snapshot is the look's facts, checked like those of a file that anybody may have written.
func (l Look) Snapshot() (*snapshot.Snapshot, error) {
	if l.value != nil {
		return l.value, nil
	}
	b, err := json.Marshal(l.tree)
	if err != nil {
		return nil, fmt.Errorf("read facts of the history: %w", err)
	}
	return snapshot.Load(bytes.NewReader(b))
}

// segment is a file of the history.
type segment struct {
	path     string
	number   uint64
	size     int64
	modified time.Time
}

// segmentsOf lists the segments of a folder in the order in which they were written.
func segmentsOf(dir string) ([]segment, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open the history: %w", err)
	}
	var out []segment
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), suffix)
		number, err := strconv.ParseUint(name, 10, 64)
		if !ok || err != nil {
			continue
		}
		info, err := f.Info()
		if err != nil || !info.Mode().IsRegular() { // removed since
			continue
		}
		out = append(out, segment{filepath.Join(dir, f.Name()), number, info.Size(), info.ModTime()})
	}
	slices.SortFunc(out, func(a, b segment) int { return cmp.Compare(a.number, b.number) })
	return out, nil
}

// makeRoom removes the oldest segments when there is too much.
func (w *Writer) makeRoom(now time.Time) error {
	segments, err := segmentsOf(w.dir)
	if err != nil {
		return err
	}
	total := int64(0)
	for _, s := range segments {
		total += s.size
	}
	// Room for the entry to come: it is small beside a segment.
	most := w.limits.Bytes - w.limits.Bytes/segmentShare/4
	old := func(s segment) bool { return now.Sub(s.modified) > w.limits.Age }
	if len(segments) == 0 || !old(segments[0]) {
		w.aged = time.Time{}
	} else if w.aged.IsZero() {
		w.aged = time.Now()
	}
	for _, s := range segments {
		if s.number == w.number && w.seg != nil || total <= most && !(old(s) && time.Since(w.aged) >= ageFor) {
			break
		}
		if err := os.Remove(s.path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the oldest segment of the history: %w", err)
		}
		total -= s.size
	}
	return nil
}
