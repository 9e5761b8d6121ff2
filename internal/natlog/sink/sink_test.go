// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/natlog/wire"
	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	leastBackoff, mostBackoff, saveEvery, idleEvery, closeWithin = 10*time.Millisecond, 50*time.Millisecond, 20*time.Millisecond, 5*time.Millisecond, 2*time.Second
	udpConfirm, tcpConfirm = 50*time.Millisecond, 200*time.Millisecond
	os.Exit(m.Run())
}

// gateway is a log with sinks.
type gateway struct {
	t     *testing.T
	dir   string
	sinks *Sinks
	store *store.Store
	next  int // records so far
	all   []natlog.Record

	mu   sync.Mutex
	said []string
}

func (g *gateway) say(text string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.said = append(g.said, text)
}

func (g *gateway) open(urls ...string) {
	g.t.Helper()
	var list []natlog.Sink
	for _, url := range urls {
		s, err := natlog.ParseSink(url)
		if err != nil {
			g.t.Fatal(err)
		}
		list = append(list, s)
	}
	var err error
	if g.sinks, err = Open(Options{Dir: g.dir, Node: "gw1", Sinks: list, Say: g.say}); err != nil {
		g.t.Fatal(err)
	}
	g.store, err = store.Open(store.Options{Dir: g.dir, Node: "gw1", Say: g.say, Written: g.sinks.Written, Needed: g.sinks.Needed,
		Alive: func(func(natlog.Record) bool) {}})
	if err != nil {
		g.t.Fatal(err)
	}
}

func (g *gateway) close() {
	g.t.Helper()
	if err := g.store.Close(); err != nil {
		g.t.Error(err)
	}
	if err := g.sinks.Close(); err != nil {
		g.t.Error(err)
	}
}

// record is one of its own: its number is in its addresses and its note.
func record(n int) natlog.Record {
	internal := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 1000)
	external := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(n)}), uint16(1024+n/256%60000))
	at := natlog.MicrosOf(time.Now())
	return natlog.Record{Event: natlog.Created, Time: at, Since: at, Note: fmt.Sprint(n),
		Translation: natlog.Translation{Kind: natlog.Mapping, Source: natlog.Kernel, Protocol: 6, Internal: internal, External: external}}
}

// append writes n records, and ticks.
func (g *gateway) append(n int) {
	g.t.Helper()
	var list []natlog.Record
	for range n {
		list = append(list, record(g.next))
		g.next++
	}
	g.all = append(g.all, list...)
	if err := g.store.Append(list); err != nil {
		g.t.Fatal(err)
	}
	if err := g.store.Tick(); err != nil {
		g.t.Fatal(err)
	}
}

func (g *gateway) state(url string) State {
	g.t.Helper()
	for _, s := range g.sinks.State() {
		if s.URL == url {
			return s
		}
	}
	g.t.Fatalf("no sink %s", url)
	return State{}
}

// receiver takes JSON lines over TCP, and can be stopped and started at its address.
type receiver struct {
	t       *testing.T
	address string
	mu      sync.Mutex
	ln      net.Listener
	conns   []net.Conn
	got     map[string]int // by note
	slow    time.Duration
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{t: t, got: map[string]int{}, address: "127.0.0.1:0"}
	r.start()
	t.Cleanup(r.stop)
	return r
}

func (r *receiver) url() string { return "json+tcp://" + r.address }

func (r *receiver) start() {
	r.t.Helper()
	ln, err := net.Listen("tcp", r.address)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.ln, r.address = ln, ln.Addr().String()
	r.mu.Unlock()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, conn)
			r.mu.Unlock()
			go r.take(conn)
		}
	}()
}

func (r *receiver) take(conn net.Conn) {
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		var l wire.Line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			continue // a line that a reset cut
		}
		r.mu.Lock()
		r.got[l.Note]++
		slow := r.slow
		r.mu.Unlock()
		time.Sleep(slow)
	}
}

func (r *receiver) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ln.Close()
	for _, c := range r.conns {
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		c.Close()
	}
	r.conns = nil
}

func (r *receiver) has() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for note := range r.got {
		if strings.Trim(note, "0123456789") == "" {
			n++
		}
	}
	return n
}

// A receiver that is killed and started again, under load, misses nothing.
func TestCatchesUp(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(r.url())
	for round := range 6 {
		for range 4 {
			g.append(2000)
		}
		if round%2 == 0 {
			r.stop()
		} else {
			r.start()
		}
	}
	g.append(3 * queueRecords)
	ktest.Wait(t, time.Minute, "all records", func() bool { return r.has() == g.next })
	ktest.Wait(t, time.Minute, "all to be confirmed", func() bool { return g.state(r.url()).Waiting == 0 })
	if s := g.state(r.url()); !s.Connected || s.Lost != 0 || s.Sent < uint64(g.next) || s.LastError == "" || s.Behind != 0 {
		t.Errorf("%+v", s)
	}
	g.close()
}

// What was counted of a sink goes on after a restart.
func TestCountersSurvive(t *testing.T) {
	had := State{URL: "json:///nat.json", Sent: 1, Lost: 2, Formless: 3, FirstHour: 4, Position: store.Position{Hour: 5, Part: 6}}
	w := newSender(&Sinks{}, natlog.Sink{URL: had.URL})
	if w.resume(had); w.state() != had {
		t.Errorf("%+v after a restart, %+v before", w.state(), had)
	}
}

// What a sink has not had when natkit log ends it has after the next start, also from hours
// that are Parquet files, and nothing of what it had.
func TestPositionSurvives(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(r.url())
	g.append(1000)
	ktest.Wait(t, time.Minute, "the first", func() bool { return g.state(r.url()).Waiting == 0 && r.has() == 1000 })
	r.stop()
	g.append(2000)
	g.close()
	if at, err := Read(g.dir); err != nil || len(at.Sinks) != 1 || at.Sinks[0].Waiting != 2000 {
		t.Errorf("after the end: %+v %v", at, err)
	}
	g.open("json://" + filepath.Join(t.TempDir(), "nat.json")) // without it
	g.append(500)
	g.close()
	r.start()
	g.open(r.url())
	g.append(10)
	ktest.Wait(t, time.Minute, "all records", func() bool { return r.has() == g.next })
	g.close()
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := range 1000 {
		if r.got[fmt.Sprint(n)] != 1 {
			t.Fatalf("record %d was sent %d times", n, r.got[fmt.Sprint(n)])
		}
	}
}

// A peer that reads nothing, and one that does not answer at all, cost others nothing.
func TestSlowSinkAlone(t *testing.T) {
	fast := newReceiver(t)
	deaf, err := net.Listen("tcp", "127.0.0.1:0") // accepts in the kernel, and nobody reads
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	path := filepath.Join(t.TempDir(), "nat.json")
	refused := "json+tcp://127.0.0.1:1"
	slow := "json+tcp://" + deaf.Addr().String()
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(slow, refused, fast.url(), "json://"+path)
	began := time.Now()
	for range 8 {
		g.append(12500)
	}
	took := time.Since(began)
	ktest.Wait(t, time.Minute, "the others to have all", func() bool { return fast.has() == g.next && g.state("json://"+path).Waiting == 0 })
	for _, url := range []string{slow, refused} {
		if s := g.state(url); s.Waiting < g.next/2 || s.Lost != 0 {
			t.Errorf("%s after %v: %+v", url, took, s)
		}
	}
	if s := g.state(refused); s.LastError != "connection refused" || s.Connected {
		t.Errorf("%+v", s)
	}
	if b, err := os.ReadFile(path); err != nil || strings.Count(string(b), "\n") != g.next {
		t.Errorf("the file has %d lines of %d: %v", strings.Count(string(b), "\n"), g.next, err)
	}
	g.close()
}

// Records that come all the time are confirmed all the time: of a file, whose writes are on the disk a
// second later, and over a connection on which something is always under way.
func TestConfirmedUnderLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nat.json")
	g := &gateway{t: t, dir: t.TempDir()}
	g.open("json://" + path)
	ktest.Wait(t, time.Minute, "some to be confirmed while others come", func() bool {
		g.append(1)
		s := g.state("json://" + path)
		return g.next > 300 && s.Waiting < g.next && s.Connected
	})
	g.close()
}

func TestConfirmedBeforeAcknowledged(t *testing.T) {
	small := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) }), err)
	}}
	deaf, err := small.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	to, err := natlog.ParseSink("json+tcp://" + deaf.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	out, err := dial(to, "gw1")
	if err != nil {
		t.Fatal(err)
	}
	defer out.close()
	confirmed := func() int {
		_, sends, err := out.confirmed()
		if err != nil {
			t.Fatal(err)
		}
		return sends
	}
	if _, err := out.send(t.Context(), []natlog.Record{record(0)}); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, time.Minute, "the first record to be acknowledged", func() bool { return confirmed() == 1 })
	many := make([]natlog.Record, 100) // more than the other end takes
	for i := range many {
		many[i] = record(i)
	}
	if _, err := out.send(t.Context(), many); err != nil {
		t.Fatal(err)
	}
	if _, err := out.send(t.Context(), many[:1]); err != nil {
		t.Fatal(err)
	}
	if n := confirmed(); n != 1 {
		t.Errorf("%d sends are confirmed, want 1", n)
	}
}

// A file that is renamed is made again, and no line is in neither.
func TestFileRotation(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "nat.json")
	g := &gateway{t: t, dir: t.TempDir()}
	g.open("json://" + path)
	sent := func() bool { return g.state("json://"+path).Waiting == 0 }
	g.append(100)
	ktest.Wait(t, time.Minute, "the first lines", sent)
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	g.append(50)
	ktest.Wait(t, time.Minute, "the next lines", sent)
	g.close()
	for name, want := range map[string]int{path + ".1": 100, path: 50} {
		if b, err := os.ReadFile(name); err != nil || strings.Count(string(b), "\n") != want {
			t.Errorf("%s: %d lines, want %d: %v", name, strings.Count(string(b), "\n"), want, err)
		}
	}
}

// Hours that were removed before a sink had them are counted as lost.
func TestLostHours(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(r.url())
	g.append(10)
	ktest.Wait(t, time.Minute, "the first", func() bool { return g.state(r.url()).Waiting == 0 && r.has() == 10 })
	r.stop()
	g.append(100)
	if err := g.store.Close(); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(g.dir, "0*.journal"))
	more, _ := filepath.Glob(filepath.Join(g.dir, "*.parquet"))
	for _, f := range append(files, more...) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(g.dir, "0000000009.000.journal"), []byte(natlog.JournalHeader), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	g.store, err = store.Open(store.Options{Dir: g.dir, Say: g.say, Written: g.sinks.Written, Needed: g.sinks.Needed, Alive: func(func(natlog.Record) bool) {}})
	if err != nil {
		t.Fatal(err)
	}
	g.append(5)
	r.start()
	ktest.Wait(t, time.Minute, "what is there", func() bool { return g.state(r.url()).Waiting == 0 && r.has() == 15 })
	if s := g.state(r.url()); s.Lost != 100 {
		t.Errorf("%+v", s)
	}
	g.close()
}

// fakeOutput is a connection that ends when a test says so.
type fakeOutput struct {
	took, confirms chan int // records, calls of send
	broken         chan error
	sends          int
}

func (f *fakeOutput) send(_ context.Context, records []natlog.Record) (int, error) {
	f.took <- len(records)
	return len(records), nil
}

func (f *fakeOutput) confirmed() (time.Duration, int, error) {
	select {
	case n := <-f.confirms:
		f.sends += n
	case err := <-f.broken:
		return 0, f.sends, err
	default:
	}
	return 0, f.sends, nil
}

func (f *fakeOutput) close() {}

// What the log could not take, and a connection breaks before it is confirmed, is lost to the sink: it is
// counted. What was confirmed before is not.
func TestLostWithoutLog(t *testing.T) {
	g := &gateway{t: t, dir: t.TempDir()}
	to, err := natlog.ParseSink("json:///nat.json")
	if err != nil {
		t.Fatal(err)
	}
	out := &fakeOutput{took: make(chan int, 10), confirms: make(chan int, 10), broken: make(chan error)}
	g.sinks, err = Open(Options{Dir: g.dir, Sinks: []natlog.Sink{to}, Say: g.say, dial: func(natlog.Sink, string) (output, error) { return out, nil }})
	if err != nil {
		t.Fatal(err)
	}
	batch := func(n int) (list []natlog.Record) {
		for i := range n {
			list = append(list, record(i))
		}
		return list
	}
	g.sinks.Written(store.Batch{Records: batch(1), End: store.Position{Hour: 1, Offset: 100, Records: 1}})
	g.sinks.Written(store.Batch{Records: batch(2)}) // the disk is full
	for _, want := range []int{1, 2} {
		if n := <-out.took; n != want {
			t.Fatalf("%d records, want %d", n, want)
		}
	}
	out.confirms <- 2
	ktest.Wait(t, time.Minute, "the first to be confirmed", func() bool { return g.state(to.URL).Position.Offset == 100 && len(out.confirms) == 0 })
	g.sinks.Written(store.Batch{Records: batch(3)})
	if n := <-out.took; n != 3 {
		t.Fatalf("%d records, want 3", n)
	}
	out.broken <- errClosed
	ktest.Wait(t, time.Minute, "the end of the connection", func() bool { return g.state(to.URL).LastError != "" })
	if s := g.state(to.URL); s.Lost != 3 {
		t.Errorf("%d records are lost, want 3", s.Lost)
	}
	if err := g.sinks.Close(); err != nil {
		t.Error(err)
	}
}

// A datagram that is refused is sent again when the collector is there.
func TestUDPRefused(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := conn.LocalAddr().String()
	conn.Close()
	url := "syslog+udp://" + address
	g := &gateway{t: t, dir: t.TempDir()}
	g.open(url)
	g.append(20)
	ktest.Wait(t, time.Minute, "a refusal", func() bool { return g.state(url).LastError == "connection refused" })
	if conn, err = net.ListenPacket("udp", address); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	seen := map[string]bool{}
	b := make([]byte, 4096)
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	for len(seen) < 20 {
		n, _, err := conn.ReadFrom(b)
		if err != nil {
			t.Fatalf("%d of 20: %v", len(seen), err)
		}
		seen[string(b[:n])] = true
	}
	g.close()
}

// Only blocks are repeated each hour, unless the URL wants something else.
func TestInterim(t *testing.T) {
	at := natlog.Micros(1764000000_000000)
	records := []natlog.Record{
		{Event: natlog.Alive, Time: at, Translation: natlog.Translation{Kind: natlog.Block}},
		{Event: natlog.Alive, Time: at, Translation: natlog.Translation{Kind: natlog.Mapping}},
		{Event: natlog.Alive, Time: at + 1, Translation: natlog.Translation{Kind: natlog.Mapping}},
		{Event: natlog.Created, Time: at, Translation: natlog.Translation{Kind: natlog.Mapping}},
	}
	b := store.Batch{Records: records, End: store.Position{Hour: 7}, Repeat: at}
	for _, tt := range []struct {
		interim natlog.Interim
		first   uint64
		want    []bool
	}{
		{natlog.InterimBlocks, 1, []bool{true, false, true, true}},
		{natlog.InterimNone, 1, []bool{false, false, true, true}},
		{natlog.InterimAll, 1, []bool{true, true, true, true}},
		{natlog.InterimNone, 7, []bool{true, true, true, true}}, // its first hour
	} {
		w := sender{to: natlog.Sink{Interim: tt.interim}}
		var got []bool
		for i := range records {
			got = append(got, w.wants(&records[i], &b, tt.first))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s from hour %d: %v, want %v", tt.interim, tt.first, got, tt.want)
		}
	}
}

func TestRefusedAtOpen(t *testing.T) {
	ca := filepath.Join(t.TempDir(), "ca.pem")
	for _, tt := range []struct{ url, says string }{
		{"syslog+tls://log?ca=" + ca, "no such file"},
		{"kafka://b/nat?user=x&password-file=" + ca, "no such file"},
	} {
		s, err := natlog.ParseSink(tt.url)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = Open(Options{Dir: t.TempDir(), Sinks: []natlog.Sink{s}}); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.url, err, tt.says)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, FileName), []byte(`{"schema":"natkit/log-sinks/9"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir}); err == nil || !strings.Contains(err.Error(), "newer natkit") {
		t.Error(err)
	}
}

// Damaged positions cost positions: the log is kept, and sinks begin again.
func TestDamagedPositions(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(g.dir, FileName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	g.open(r.url())
	g.append(10)
	ktest.Wait(t, time.Minute, "all records", func() bool { return r.has() == 10 })
	g.close()
	if len(g.said) == 0 || !strings.Contains(g.said[0], "begin again") {
		t.Errorf("said %q", g.said)
	}
}

// A log that could not begin, as another program writes it, leaves a new sink without a position: it is still new
// when the log begins, and is not sent all that was ever recorded.
func TestNewAfterFailedStart(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	var err error
	if g.store, err = store.Open(store.Options{Dir: g.dir, Say: g.say, Alive: func(func(natlog.Record) bool) {}}); err != nil {
		t.Fatal(err)
	}
	g.append(10)
	to, err := natlog.ParseSink(r.url())
	if err != nil {
		t.Fatal(err)
	}
	if g.sinks, err = Open(Options{Dir: g.dir, Sinks: []natlog.Sink{to}, Say: g.say}); err != nil {
		t.Fatal(err)
	}
	g.close()
	g.open(r.url())
	g.append(5)
	ktest.Wait(t, time.Minute, "all to be confirmed", func() bool { return g.state(r.url()).Waiting == 0 && r.has() >= 5 })
	if n := r.has(); n != 5 {
		t.Errorf("it was sent %d records, want the 5 that are new", n)
	}
	g.close()
}

// Where the files of the log were removed, hours are counted from 1 again: a sink that had more of them
// does not wait until there are as many.
func TestPositionBeyondLog(t *testing.T) {
	r := newReceiver(t)
	g := &gateway{t: t, dir: t.TempDir()}
	had := State{URL: r.url(), Position: store.Position{Hour: 500, Offset: 4000, Records: 70}, FirstHour: 3}
	if err := writeFile(g.dir, File{Sinks: []State{had}}); err != nil {
		t.Fatal(err)
	}
	g.open(r.url())
	g.append(10)
	ktest.Wait(t, 10*time.Second, "all records", func() bool { return r.has() == 10 })
	g.close()
	if s := g.state(r.url()); s.Position.Hour != 1 || s.FirstHour != 1 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
}

// A pipe that nobody reads does not keep the log from ending, and has all once somebody does.
func TestPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	g := &gateway{t: t, dir: t.TempDir()}
	g.open("json://" + path)
	g.append(5)
	closed := make(chan struct{})
	go func() { g.close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Fatal("it does not end")
	}
	g.open("json://" + path)
	reader, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	lines := bufio.NewScanner(reader)
	for n := 0; n < 5; {
		var l wire.Line
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &l) != nil {
			t.Fatalf("after %d records: %q, %v", n, lines.Text(), lines.Err())
		}
		if l.Note != "" && l.Event == "created" {
			n++
		}
	}
	g.close()
}
