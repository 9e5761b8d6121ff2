// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"compress/flate"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// facts are those of a namespace at one time: some change always, some at times.
func facts(r *rand.Rand, inode uint64, at time.Time) *snapshot.Snapshot {
	s := &snapshot.Snapshot{
		TakenAt: at, WindowSeconds: 10, Host: snapshot.Host{Hostname: "gw", Kernel: "6.18"},
		Netns:        snapshot.Netns{Name: fmt.Sprintf("n%d", inode), Inode: inode},
		Capabilities: []snapshot.Capability{{Name: snapshot.CanConntrack, OK: true}},
		Conntrack:    &snapshot.Conntrack{Count: r.Uint64N(1 << 20), Max: 1 << 20, Stats: map[string]uint64{"found": 1<<53 - r.Uint64N(9)}},
		Sysctls:      map[string]string{"net.ipv4.ip_forward": "1", "net.ipv4.tcp_fin_timeout": "60"},
		Counters:     map[string]uint64{},
	}
	for range r.IntN(5) {
		s.Counters[fmt.Sprintf("Ip.C%d", r.IntN(8))] = r.Uint64N(100)
	}
	for i := range r.IntN(4) {
		s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: fmt.Sprintf("eth%d", i), Index: i + 1, MTU: 1500, Up: r.IntN(9) > 0, RxPackets: r.Uint64N(1e6)})
	}
	return s
}

// entries are n of them, ten seconds apart.
func entries(n int) []*Entry {
	r := rand.New(rand.NewPCG(1, 2))
	var out []*Entry
	for i := range n {
		e := &Entry{At: noon.Add(time.Duration(i) * 10 * time.Second), Seconds: 10}
		e.Samples = append(e.Samples, &snapshot.Snapshot{Netns: snapshot.Netns{Inode: 1}, Conntrack: &snapshot.Conntrack{Count: uint64(i)}})
		for inode := uint64(1); inode < 4; inode++ {
			if r.IntN(2) == 0 {
				e.Looks = append(e.Looks, NewLook(facts(r, inode, e.At)))
			}
		}
		if i%7 == 3 {
			e.Events = append(e.Events, Event{At: e.At, Kind: Began, Namespace: "the host", Code: "no-route", Severity: "critical", Title: "a title"})
			e.Changes = append(e.Changes, Change{At: e.At, What: "route removed: default via 10.0.0.1 dev eth0"})
		}
		out = append(out, e)
	}
	return out
}

func write(t testing.TB, dir string, limits Limits, all []*Entry) {
	t.Helper()
	w, err := Create(dir, limits)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if err := w.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// read is what there is, and what is said to be damaged.
func read(t testing.TB, dir string, span Span) (out []*Entry, damaged []string) {
	t.Helper()
	damaged, err := Read(dir, span, func(e *Entry) error { out = append(out, e); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return out, damaged
}

// same fails unless got is what was written, with all its facts.
func same(t testing.TB, got, want []*Entry) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d entries, want %d", len(got), len(want))
	}
	for i := range got {
		if !got[i].At.Equal(want[i].At) || got[i].Seconds != want[i].Seconds || !reflect.DeepEqual(got[i].Events, want[i].Events) ||
			!reflect.DeepEqual(got[i].Changes, want[i].Changes) || !reflect.DeepEqual(got[i].Samples, want[i].Samples) || len(got[i].Looks) != len(want[i].Looks) {
			t.Fatalf("entry %d is %+v, want %+v", i, got[i], want[i])
		}
		for j, look := range got[i].Looks {
			s, err := look.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			wanted, _ := want[i].Looks[j].Snapshot()
			a, _ := json.Marshal(s)
			b, _ := json.Marshal(wanted)
			if !bytes.Equal(a, b) {
				t.Fatalf("entry %d, look %d is\n%s\nwant\n%s", i, j, a, b)
			}
		}
	}
}

func TestHistoryRoundTrip(t *testing.T) {
	dir, all := t.TempDir(), entries(3*groupEntries+5)
	write(t, dir, DefaultLimits, all[:100])
	write(t, dir, DefaultLimits, all[100:]) // after a restart
	got, damaged := read(t, dir, Span{})
	if len(damaged) > 0 {
		t.Error(damaged)
	}
	same(t, got, all)
	from, to := all[70].At, all[90].At
	got, _ = read(t, dir, Span{from, to})
	same(t, got, all[70:91])
	got, _ = read(t, dir, Span{From: from})
	same(t, got, all[70:])
}

// Whoever is killed while it writes loses what it was writing, wherever it was cut off.
func TestTornEnd(t *testing.T) {
	dir, all := t.TempDir(), entries(8)
	write(t, dir, DefaultLimits, all)
	segments, err := segmentsOf(dir)
	if err != nil || len(segments) != 1 {
		t.Fatal(segments, err)
	}
	whole, err := readFile(segments[0].path)
	if err != nil {
		t.Fatal(err)
	}
	ends := map[int]int{len(header): 0} // where an entry ends -> how many there are
	for at, n := len(header), 1; at < len(whole); n++ {
		f, ok := parseFrame(whole[at:])
		if !ok {
			t.Fatal("no frame")
		}
		at += f.length
		ends[at] = n
	}
	complete := 0
	for cut := len(header); cut <= len(whole); cut++ {
		torn := true
		if n, ok := ends[cut]; ok {
			complete, torn = n, false
		}
		n := 0
		problems, err := readSegment(whole[:cut], func(e *Entry) error { n++; return nil })
		if err != nil || n != complete || torn != reflect.DeepEqual(problems, []string{tornEnd}) {
			t.Fatalf("cut at %d: %d entries, want %d; %v %v", cut, n, complete, problems, err)
		}
	}
	for cut := range len(header) {
		if problems, err := readSegment(whole[:cut], nil); err != nil || !reflect.DeepEqual(problems, []string{tornEnd}) {
			t.Fatalf("cut at %d: %v %v", cut, problems, err)
		}
	}
	// And the next one to write goes on after it.
	if err := os.Truncate(segments[0].path, int64(len(whole)-3)); err != nil {
		t.Fatal(err)
	}
	more := entries(12)[8:]
	write(t, dir, DefaultLimits, more)
	got, damaged := read(t, dir, Span{})
	if len(damaged) != 1 || !strings.HasSuffix(damaged[0], tornEnd) {
		t.Error(damaged)
	}
	same(t, got, append(all[:7:7], more...))
}

// What is damaged costs its group, and is reported.
func TestDamagedSegment(t *testing.T) {
	dir, all := t.TempDir(), entries(4*groupEntries)
	write(t, dir, DefaultLimits, all)
	segments, _ := segmentsOf(dir)
	whole, err := readFile(segments[0].path)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 40 {
		b := bytes.Clone(whole)
		at := len(header) + r.IntN(len(b)-len(header))
		b[at] ^= byte(1 + r.IntN(255))
		var got []*Entry
		problems, err := readSegment(b, func(e *Entry) error { got = append(got, e); return nil })
		if err != nil || len(problems) != 1 || len(got) >= len(all) || len(got) < len(all)-groupEntries {
			t.Fatalf("byte %d: %d of %d entries, %v, %v", at, len(got), len(all), problems, err)
		}
		first := 0
		for first < len(got) && got[first].At.Equal(all[first].At) {
			first++
		}
		same(t, got, append(all[:first:first], all[len(all)-(len(got)-first):]...))
	}
}

// fullDisk is a file that can't grow beyond a size.
type fullDisk struct {
	*os.File
	room *int
}

func (f fullDisk) Write(b []byte) (int, error) {
	if n := len(b); n > *f.room {
		n, _ = f.File.Write(b[:*f.room])
		*f.room = 0
		return n, unix.ENOSPC
	}
	*f.room -= len(b)
	return f.File.Write(b)
}

// A full disk costs what could not be written, and the next entry says so.
func TestFullDisk(t *testing.T) {
	dir, all, room := t.TempDir(), entries(30), 4000
	w, err := Create(dir, DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	w.create = func(path string) (file, error) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		return fullDisk{f, &room}, err
	}
	var want []*Entry
	lost := 0
	for i, e := range all {
		if i == 25 {
			room = 1 << 20 // somebody made room
		}
		switch err := w.Add(e); {
		case err == nil:
			want = append(want, e)
		case errors.Is(err, unix.ENOSPC):
			lost++
		default:
			t.Fatal(err)
		}
	}
	if lost == 0 || len(want) < 10 {
		t.Fatalf("%d lost, %d written", lost, len(want))
	}
	got, damaged := read(t, dir, Span{})
	if len(damaged) > 0 {
		t.Error(damaged)
	}
	same(t, got, want)
	said := ""
	for _, e := range got {
		said += e.Lost
	}
	if !strings.Contains(said, fmt.Sprintf("%s could not be written", plural.Count(lost, "interval"))) || !strings.Contains(said, "no space left") {
		t.Errorf("said %q, %d were lost", said, lost)
	}
}

// unsynced is a file on a disk that fails when it has to write.
type unsynced struct{ *os.File }

func (unsynced) Sync() error { return unix.EIO }

// What was written and may not survive the machine's stop is not counted as lost.
func TestSyncFails(t *testing.T) {
	dir, all, failed := t.TempDir(), entries(groupEntries+5), 0
	w, err := Create(dir, DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	w.create = func(path string) (file, error) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		return unsynced{f}, err
	}
	for _, e := range all {
		if err := w.Add(e); errors.Is(err, unix.EIO) {
			failed++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); failed != 1 || !errors.Is(err, unix.EIO) {
		t.Errorf("%d entries were said not to reach the disk, want 1; then %v", failed, err)
	}
	got, _ := read(t, dir, Span{})
	same(t, got, all)
	for _, e := range got {
		if e.Lost != "" {
			t.Errorf("said %q, nothing was lost", e.Lost)
		}
	}
}

// A short segment that would take gigabytes of memory is damaged, and the next group is read.
func TestManyValues(t *testing.T) {
	segment := []byte(header)
	for _, elements := range []int{groupValues, 10} {
		plain := []byte(`{"looks":[{"inode":1,"whole":[0` + strings.Repeat(",0", elements) + `]}]}`)
		var out bytes.Buffer
		w, err := flate.NewWriter(&out, flate.BestSpeed)
		if err != nil {
			t.Fatal(err)
		}
		w.Write(plain)
		w.Flush()
		segment = append(segment, sealed(true, len(plain), out.Bytes())...)
	}
	got := 0
	problems, err := readSegment(segment, func(e *Entry) error { got += len(e.Looks); return nil })
	if err != nil || got != 1 || len(problems) != 1 || !strings.Contains(problems[0], "more values than natkit writes") {
		t.Errorf("%d looks, %q, %v", got, problems, err)
	}
}

// A text has no more values than are counted in it.
func TestValuesIn(t *testing.T) {
	for text, want := range map[string]int{
		`0`: 1, `[]`: 2, `[1,[2,3],{}]`: 7, `{"a\",[":[",{",2]}`: 4, `"\\\\",[1`: 3,
	} {
		if n := valuesIn([]byte(text)); n != want {
			t.Errorf("%s: %d values, want %d", text, n, want)
		}
	}
}

// A clock that is set back mixes nothing up: entries stay in the order of writing.
func TestClockSetBack(t *testing.T) {
	dir, all := t.TempDir(), entries(40)
	for i := 20; i < 40; i++ {
		all[i].At = all[i].At.Add(-2 * time.Hour)
	}
	write(t, dir, DefaultLimits, all[:20])
	write(t, dir, DefaultLimits, all[20:])
	got, _ := read(t, dir, Span{})
	same(t, got, all)
	got, _ = read(t, dir, Span{From: all[20].At, To: all[39].At})
	same(t, got, all[20:])
}

// The oldest are removed first, and the room is kept whatever is written.
func TestLimits(t *testing.T) {
	dir, limits := t.TempDir(), Limits{Bytes: 64 << 10, Age: time.Hour}
	w, err := Create(dir, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	all := entries(600)
	for _, e := range all {
		e.At = time.Now()
		if err := w.Add(e); err != nil {
			t.Fatal(err)
		}
		if n := size(t, dir); n > limits.Bytes {
			t.Fatalf("%d bytes, want at most %d", n, limits.Bytes)
		}
	}
	got, damaged := read(t, dir, Span{})
	if len(damaged) > 0 || size(t, dir) < limits.Bytes/2 {
		t.Errorf("%v, %d bytes", damaged, size(t, dir))
	}
	same(t, got, all[len(all)-len(got):])
	// What is too old goes, but not while that may be a clock that is set wrong for a moment.
	segments, _ := segmentsOf(dir)
	all[0].At = time.Now().Add(365 * 24 * time.Hour)
	if err := w.Add(all[0]); err != nil {
		t.Fatal(err)
	}
	all[0].At = time.Now()
	if err := w.Add(all[0]); err != nil {
		t.Fatal(err)
	}
	before := len(segments)
	if segments, _ = segmentsOf(dir); len(segments) < before-1 {
		t.Errorf("a clock that was wrong for a moment cost %d of %d segments", before-len(segments), before)
	}
	long := time.Now().Add(-2 * time.Hour)
	for _, s := range segments[:len(segments)-1] {
		if err := os.Chtimes(s.path, long, long); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Add(all[0]); err != nil {
		t.Fatal(err)
	}
	if w.aged.IsZero() {
		t.Fatal("no segment is too old")
	}
	w.aged = w.aged.Add(-ageFor)
	if err := w.Add(all[0]); err != nil {
		t.Fatal(err)
	}
	if left, _ := segmentsOf(dir); len(left) > 2 {
		t.Errorf("%d segments are left", len(left))
	}
}

func size(t testing.TB, dir string) (n int64) {
	segments, err := segmentsOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range segments {
		n += s.size
	}
	return n
}

// Who reads while somebody writes sees whole entries, and no damage.
func TestReadWhileWriting(t *testing.T) {
	dir := t.TempDir()
	w, err := Create(dir, DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := Create(dir, DefaultLimits); !errors.Is(err, ErrLocked) {
		t.Errorf("a second writer: %v", err)
	}
	all := entries(50)
	for i, e := range all {
		if err := w.Add(e); err != nil {
			t.Fatal(err)
		}
		got, damaged := read(t, dir, Span{})
		if len(damaged) > 0 {
			t.Fatal(damaged)
		}
		same(t, got, all[:i+1])
	}
}

func TestReadNothing(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "none")} {
		if _, err := Read(dir, Span{}, nil); !errors.Is(err, ErrNone) {
			t.Error(err)
		}
	}
	if problems, err := readSegment([]byte(earlierHeader+"and more than a header"), nil); err != nil || len(problems) != 1 || !strings.Contains(problems[0], "earlier natkit") {
		t.Errorf("%v, %q", err, problems)
	}
	if problems, err := readSegment([]byte("something else, and longer than a header"), nil); err != nil || len(problems) != 1 || problems[0] == tornEnd {
		t.Error(problems, err)
	}
	if _, err := Read(nonEmpty(t), Span{}, func(*Entry) error { return io.ErrClosedPipe }); !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}

func nonEmpty(t testing.TB) string {
	dir := t.TempDir()
	write(t, dir, DefaultLimits, entries(2))
	return dir
}

// Any two values: what leads from one to the other does.
func TestDifference(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	var value func(depth int) any
	value = func(depth int) any {
		switch r.IntN(7 - min(depth, 2)) {
		case 0:
			return json.Number(fmt.Sprint(r.IntN(3)))
		case 1:
			return []string{"", "a", "="}[r.IntN(3)]
		case 2:
			return nil
		case 3:
			return r.IntN(2) == 0
		case 4:
			var out []any
			for range r.IntN(4) {
				out = append(out, value(depth+1))
			}
			return append([]any{}, out...)
		default:
			out := map[string]any{}
			for range r.IntN(4) {
				out[[]string{"a", "=", "o", "-", "n"}[r.IntN(5)]] = value(depth + 1)
			}
			return out
		}
	}
	for range 20000 {
		a, b := value(0), value(0)
		encoded, err := json.Marshal(difference(a, b))
		if err != nil {
			t.Fatal(err)
		}
		d, err := parseTree(encoded)
		if err != nil {
			t.Fatal(err)
		}
		was, _ := json.Marshal(a)
		got, err := applied(a, d)
		if err != nil || !reflect.DeepEqual(got, b) {
			t.Fatalf("from %v to %v by %s: %v %v", a, b, encoded, got, err)
		}
		if now, _ := json.Marshal(a); !bytes.Equal(was, now) {
			t.Fatalf("%s became %s", was, now)
		}
	}
}

// Whatever is in a segment: no panic, no more memory than there are bytes for, and only facts that
// are checked.
func FuzzSegment(f *testing.F) {
	dir := f.TempDir()
	write(f, dir, DefaultLimits, entries(3))
	segments, _ := segmentsOf(dir)
	b, err := readFile(segments[0].path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(header))
	f.Fuzz(func(t *testing.T, b []byte) {
		problems, err := readSegment(resealed(b), func(e *Entry) error {
			for _, l := range e.Looks {
				_, _ = l.Snapshot()
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			if p == "" {
				t.Fatal("a problem without words")
			}
		}
	})
}

// resealed makes the checksums right, so that what is behind them is reached.
func resealed(b []byte) []byte {
	b = bytes.Clone(b)
	for at := 0; at+frameBytes <= len(b); {
		next := bytes.Index(b[at:], markBytes)
		if next < 0 || at+next+frameBytes > len(b) {
			break
		}
		at += next
		f, _ := parseFrame(b[at:])
		if f.length == 0 {
			at++
			continue
		}
		sum := checksum(b[at : at+f.length])
		b[at+11], b[at+12], b[at+13], b[at+14] = byte(sum>>24), byte(sum>>16), byte(sum>>8), byte(sum)
		at += f.length
	}
	return b
}
