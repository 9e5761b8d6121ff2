// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// makeZoo makes one entry of each kind with conntrack(8), and returns how many.
func makeZoo(t testing.TB) int {
	t.Helper()
	// Accounting and times are per namespace, so this touches nobody else.
	for _, name := range []string{"nf_conntrack_acct", "nf_conntrack_timestamp"} {
		if err := os.WriteFile(sysctlDir+name, []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	zoo := []string{
		"-p tcp -s 10.0.0.1 -d 10.0.0.2 --sport 1000 --dport 80 --state ESTABLISHED -u SEEN_REPLY,ASSURED -m 5",
		"-p tcp -s 10.0.0.1 -d 10.0.0.2 --sport 1000 --dport 81 --state TIME_WAIT -u SEEN_REPLY",
		"-p udp -s 10.0.0.1 -d 10.0.0.2 --sport 1000 --dport 53",
		"-p icmp -s 10.0.0.1 -d 10.0.0.2 --icmp-type 8 --icmp-code 0 --icmp-id 77",
		"-p icmpv6 -s fe80::1 -d 2001:db8::2 --icmpv6-type 128 --icmpv6-code 0 --icmpv6-id 78",
		"-p tcp -s 2001:db8::1 -d 2001:db8::2 --sport 1000 --dport 80 --state CLOSE_WAIT -u SEEN_REPLY,ASSURED -w 7",
		"-p sctp -s 10.0.0.1 -d 10.0.0.2 --sport 1000 --dport 80 --state ESTABLISHED --orig-vtag 1 --reply-vtag 2",
		"-p gre -s 10.0.0.1 -d 10.0.0.2 --srckey 0x1a --dstkey 0x2b",
		"-p udplite -s 10.0.0.1 -d 10.0.0.2 --sport 1000 --dport 80",
		"-p 89 -s 10.0.0.1 -d 10.0.0.2",
		"-p tcp -s 10.0.0.9 -d 10.0.0.2 --sport 1000 --dport 80 --state SYN_SENT --orig-zone 3",
		"-p tcp -s 10.0.0.9 -d 10.0.0.2 --sport 1000 --dport 81 --state SYN_RECV --reply-zone 4",
		"-p tcp -s 10.0.0.9 -d 10.0.0.2 --sport 1000 --dport 82 --state CLOSE --src-nat 100.64.0.1:5000",
		"-p udp -s 10.0.0.9 -d 10.0.0.2 --sport 1000 --dport 82 --dst-nat 172.17.0.2:83",
		"-p icmp -s 10.0.0.9 -d 10.0.0.2 --icmp-type 8 --icmp-code 0 --icmp-id 79 --src-nat 100.64.0.1",
	}
	made := 0
	for _, entry := range zoo {
		// A kernel may be without some protocol; what it refuses is not in its list
		// either. The kinds that matter must be there.
		args := append([]string{"-I", "-t", "5000"}, strings.Fields(entry)...)
		if err := conntrackRun(t, args...); err == nil {
			made++
		} else if !strings.Contains(entry, "sctp") && !strings.Contains(entry, "udplite") && !strings.Contains(entry, "gre") {
			t.Fatalf("conntrack -I %s: %v", entry, err)
		}
	}
	return made
}

// differing are the fields of a line that change between two readings: timeout,
// age and references; /proc holds one reference of its own.
var differing = regexp.MustCompile(` (49\d\d|5000) |delta-time=\d+ |use=\d+`)

func sortedLines(text string) []string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i, l := range lines {
		lines[i] = differing.ReplaceAllString(strings.TrimRight(l, " "), "*")
	}
	slices.Sort(lines)
	return lines
}

func sameLines(t *testing.T, what, got, want string) {
	t.Helper()
	g, w := readLines(got), readLines(want)
	if slices.EqualFunc(g, w, readLine.same) {
		return
	}
	t.Errorf("%s differs:", what)
	for _, l := range g {
		if !slices.ContainsFunc(w, l.same) {
			t.Errorf("  only natkit: %+v", l)
		}
	}
	for _, l := range w {
		if !slices.ContainsFunc(g, l.same) {
			t.Errorf("  only there:  %+v", l)
		}
	}
}

// readLine is a line of an entry, and how long that was to live when it was read: seconds pass until
// it is read the second time.
type readLine struct {
	rest    string
	timeout int // 0: the line has none
}

// timeoutColumn is that of "ipv4 2 tcp 6 431999 ESTABLISHED ...".
var timeoutColumn = regexp.MustCompile(`^(\S+ +\d+ \S+ +\d+ )(\d+)( .*)$`)

func readLines(text string) (lines []readLine) {
	for _, line := range sortedLines(text) {
		l := readLine{rest: line}
		if m := timeoutColumn.FindStringSubmatch(line); m != nil {
			l.rest = m[1] + m[3]
			l.timeout, _ = strconv.Atoi(m[2])
		}
		lines = append(lines, l)
	}
	slices.SortFunc(lines, func(a, b readLine) int { return cmp.Compare(a.rest, b.rest) })
	return lines
}

func (l readLine) same(o readLine) bool {
	return l.rest == o.rest && max(l.timeout-o.timeout, o.timeout-l.timeout) <= 10
}

// TestListEqualsConntrackTool: natkit's lines are those of `conntrack -L -o
// extended`, whether natkit reads the kernel or any of the texts.
func TestListEqualsConntrackTool(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		made := makeZoo(t)
		extended := conntrackTool(t, "-L", "-o", "extended")
		if n := strings.Count(extended, "\n"); n != made {
			t.Fatalf("conntrack -L shows %d of %d entries:\n%s", n, made, extended)
		}
		var live []byte
		res, err := Dump(context.Background(), Filter{}, func(f *Flow) error {
			live = append(f.AppendText(live, ExtendedFields), '\n')
			return nil
		})
		if err != nil {
			return err
		}
		if res.Entries != uint64(made) || res.Malformed != 0 || res.Interrupted {
			t.Errorf("dump: %+v", res)
		}
		sameLines(t, "the live list", string(live), extended)

		proc, err := os.ReadFile("/proc/thread-self/net/nf_conntrack")
		if err != nil {
			return err
		}
		for _, source := range []struct{ name, text, want string }{
			{"the list from -o extended", extended, extended},
			{"the list from plain", conntrackTool(t, "-L"), extended},
			// /proc shows the default zone, too.
			{"the list from /proc", strings.ReplaceAll(string(proc), " zone=0", ""), extended},
			{"the list from everything", conntrackTool(t, "-L", "-o", "extended,id,ktimestamp"), conntrackTool(t, "-L", "-o", "extended,id,ktimestamp")},
		} {
			_, flows, bad := readAll(t, source.text, Filter{})
			if len(bad) > 0 {
				t.Errorf("%s: %v", source.name, bad)
			}
			var out []byte
			for _, f := range flows {
				out = append(f.AppendText(out, AllFields), '\n')
			}
			sameLines(t, source.name, string(out), source.want)
		}
		return nil
	})
}

// TestReadersAgree: netlink and text give the same Flow, but for what the text
// does not have.
func TestReadersAgree(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		makeZoo(t)
		live := map[uint32]Flow{}
		if _, err := Dump(context.Background(), Filter{}, func(f *Flow) error {
			live[f.ID] = *f
			return nil
		}); err != nil {
			return err
		}
		_, flows, bad := readAll(t, conntrackTool(t, "-L", "-o", "extended,id,ktimestamp"), Filter{})
		if len(bad) > 0 || len(flows) != len(live) {
			t.Fatalf("%d entries live, %d from text, errors %v", len(live), len(flows), bad)
		}
		const inText = StatusSeenReply | StatusAssured | StatusSrcNAT | StatusDstNAT
		for _, got := range flows {
			want, ok := live[got.ID]
			if !ok {
				t.Errorf("id %d only in the text", got.ID)
				continue
			}
			if got.Status&inText != want.Status&inText {
				t.Errorf("status %x from text, %x live: %s", got.Status, want.Status, got.AppendText(nil, AllFields))
			}
			want.Start = want.Start / 1e9 * 1e9
			got.Status, got.Timeout, got.Use, got.DeltaSeconds = want.Status, want.Timeout, want.Use, want.DeltaSeconds
			if g, w := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); g != w {
				t.Errorf("text %s\nlive %s", g, w)
			}
		}
		return nil
	})
}

func TestDumpFilterAndStop(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		makeZoo(t)
		count := func(w Filter) (n int) {
			if _, err := Dump(context.Background(), w, func(f *Flow) error {
				if !w.Match(f) {
					t.Errorf("%+v let through %s", w, f.AppendText(nil, AllFields))
				}
				n++
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			return n
		}
		states, err := ParseStates("syn_sent,CLOSE", 0)
		if err != nil {
			return err
		}
		for _, tt := range []struct {
			w    Filter
			want int
		}{
			{Filter{Family: unix.AF_INET6}, 2},
			{Filter{Proto: unix.IPPROTO_ICMP}, 2},
			{Filter{States: states}, 2},
			{Filter{Src: netip.MustParsePrefix("10.0.0.9/32"), Proto: unix.IPPROTO_UDP}, 1},
			{Filter{Dst: netip.MustParsePrefix("2001:db8::/32"), Unreplied: true}, 1},
		} {
			if n := count(tt.w); n != tt.want {
				t.Errorf("%+v chose %d, want %d", tt.w, n, tt.want)
			}
		}
		stop := errors.New("enough")
		res, err := Dump(context.Background(), Filter{}, func(*Flow) error { return stop })
		if !errors.Is(err, stop) || res.Entries != 1 {
			t.Errorf("stopped: %v after %d", err, res.Entries)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := Dump(ctx, Filter{}, func(*Flow) error { return nil }); !errors.Is(err, context.Canceled) {
			t.Errorf("ended context: %v", err)
		}
		return nil
	})
}

func TestDumpLargeTable(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		const n = 20000
		if _, err := Fill(context.Background(), FillOptions{Count: n}); err != nil {
			return err
		}
		seen := map[uint32]bool{}
		res, err := Dump(context.Background(), Filter{}, func(f *Flow) error {
			seen[uint32(f.Orig.Src.As4()[3])<<16|uint32(f.Orig.SrcPort)] = true
			return nil
		})
		if err != nil {
			return err
		}
		if res.Entries != n || len(seen) != n {
			t.Errorf("%d entries, %d different, want %d", res.Entries, len(seen), n)
		}
		allocs := testing.AllocsPerRun(2, func() { Dump(context.Background(), Filter{}, func(*Flow) error { return nil }) })
		if allocs > 500 {
			t.Errorf("%.0f allocations for %d entries", allocs, n)
		}
		return nil
	})
}

func TestDumpEmptyTable(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		table, err := Tabulate(context.Background(), TableOptions{})
		if err != nil {
			return err
		}
		if table.Entries != 0 || len(table.ByProtocol) != 0 || table.Sources != nil {
			t.Errorf("%+v", table)
		}
		return nil
	})
}

func TestDelete(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		made := makeZoo(t)
		for _, o := range []FillOptions{
			{Count: 1000, State: TCPTimeWait, Timeout: time.Hour},
			{Count: 1000, Dest: netip.MustParseAddrPort("198.19.0.2:80"), Zone: 9},
		} {
			if _, err := Fill(context.Background(), o); err != nil {
				return err
			}
		}
		states, _ := ParseStates("TIME_WAIT", 0)
		n, err := Delete(context.Background(), Filter{States: states})
		if err != nil {
			return err
		}
		if n != 1001 { // and the zoo's own
			t.Errorf("deleted %d in TIME_WAIT, want 1001", n)
		}
		if l, _ := ReadLimits(); l.Count != uint64(1000+made-1) {
			t.Errorf("%d left", l.Count)
		}
		// All kinds can be deleted: the zoo has every zone and protocol.
		n, err = Delete(context.Background(), Filter{})
		if err != nil {
			return err
		}
		if l, _ := ReadLimits(); n != uint64(1000+made-1) || l.Count != 0 {
			t.Errorf("deleted %d, %d left: %s", n, l.Count, conntrackTool(t, "-L"))
		}
		return nil
	})
}

func TestTabulateLive(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		ctx := context.Background()
		for _, o := range []FillOptions{
			{Count: 100, State: TCPTimeWait},
			{Count: 30, Protocol: unix.IPPROTO_UDP, Unreplied: true, Sources: netip.MustParsePrefix("10.1.1.1/32"), Dest: netip.MustParseAddrPort("10.9.9.9:53")},
			{Count: 40, Outside: netip.MustParseAddr("100.64.0.1"), OutsidePorts: snapshot.PortRange{Min: 5000, Max: 5039}, Dest: netip.MustParseAddrPort("10.9.9.9:443"),
				Sources: netip.MustParsePrefix("10.2.0.0/24")},
		} {
			if _, err := Fill(ctx, o); err != nil {
				return err
			}
		}
		table, err := Tabulate(ctx, TableOptions{Rows: 1})
		if err != nil {
			return err
		}
		table.DumpSeconds = 0
		want := &snapshot.Table{
			Entries:      170,
			ByProtocol:   map[string]uint64{"tcp": 140, "udp": 30},
			ByState:      map[string]uint64{"TIME_WAIT": 100, "ESTABLISHED": 40},
			ByStatus:     map[string]uint64{"ASSURED": 140, "UNREPLIED": 30, "SNAT": 40},
			Sources:      []snapshot.Talker{{Addr: netip.MustParseAddr("10.1.1.1"), Entries: 30, Unreplied: 30}},
			Destinations: []snapshot.Talker{{Addr: netip.MustParseAddr("198.19.0.1"), Entries: 100}},
			DestPorts:    []snapshot.PortUse{{Protocol: "tcp", Port: 80, Entries: 100}},
			SNATPorts: []snapshot.SNATUse{{
				Protocol: "tcp", Outside: netip.MustParseAddr("100.64.0.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("10.9.9.9:443")),
				Used: 40, MinPort: 5000, MaxPort: 5039,
			}},
			Outsides:   []snapshot.OutsideUse{{Addr: netip.MustParseAddr("100.64.0.1"), Entries: 40, Recent: 40}},
			Unanswered: []snapshot.UnansweredUse{{Protocol: "udp", Source: netip.MustParseAddr("10.1.1.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("10.9.9.9:53")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("10.9.9.9:53")), Entries: 30, Recent: 30}},
		}
		if g, w := fmt.Sprintf("%+v", table), fmt.Sprintf("%+v", want); g != w {
			t.Errorf("got  %s\nwant %s", g, w)
		}
		return nil
	})
}

func TestWatch(t *testing.T) {
	h := newNetns(t)
	watching, errs, rates := make(chan struct{}), make(chan error, 1), make(chan Rates)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		first := true
		errs <- h.Do(func() error {
			return Watch(ctx, WatchOptions{Interval: 100 * time.Millisecond, Filter: Filter{Proto: unix.IPPROTO_TCP}}, func(r *Rates) error {
				if first { // the socket listens
					first = false
					close(watching)
					return nil
				}
				rates <- *r
				return nil
			})
		})
	}()
	<-watching
	sum := newRates()
	collect := func(what string, done func() bool) {
		deadline := time.After(10 * time.Second)
		for !done() {
			select {
			case r := <-rates:
				sum.New, sum.Destroyed, sum.Lost, sum.Count = sum.New+r.New, sum.Destroyed+r.Destroyed, sum.Lost+r.Lost, r.Count
				for s, n := range r.Entered {
					sum.Entered[s] += n
				}
				for s, n := range r.Ended {
					sum.Ended[s] += n
				}
			case <-deadline:
				t.Fatalf("no %s: %+v", what, sum)
			}
		}
	}
	// Filling must not wait for the watcher, nor the other way round.
	filled := make(chan error, 1)
	fill := func(fn func() error) { go func() { filled <- h.Do(fn) }() }
	fill(func() error {
		if _, err := Fill(ctx, FillOptions{Count: 500, State: TCPSynSent}); err != nil {
			return err
		}
		_, err := Fill(ctx, FillOptions{Count: 50, Protocol: unix.IPPROTO_UDP})
		return err
	})
	collect("new flows", func() bool { return sum.New == 500 && sum.Count == 550 })
	if sum.Entered[TCPSynSent] != 500 || sum.Destroyed != 0 {
		t.Errorf("after filling: %+v", sum)
	}
	if err := <-filled; err != nil {
		t.Fatal(err)
	}
	fill(func() error { return Flush(ctx) })
	collect("ended flows", func() bool { return sum.Destroyed == 500 && sum.Count == 0 })
	if sum.Ended[TCPSynSent] != 500 || sum.New != 500 || sum.Lost != 0 {
		t.Errorf("after flush: %+v", sum)
	}
	cancel()
	for {
		select {
		case <-rates: // the interval that was being given
			continue
		case err := <-errs:
			if err != nil {
				t.Errorf("end of context: %v", err)
			}
		}
		break
	}
}

// TestWatchCountsLostEvents: a watcher that does not read loses events, and
// knows how many.
func TestWatchCountsLostEvents(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		ctx := context.Background()
		s, err := openSocket(ctx, eventGroups)
		if err != nil {
			return err
		}
		defer s.close()
		// A small buffer, so that few events fill it.
		if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 64<<10); err != nil {
			return err
		}
		const n = 5000
		if _, err := Fill(ctx, FillOptions{Count: n}); err != nil {
			return err
		}
		read := newRates()
		var f Flow
		s.file.SetReadDeadline(time.Now().Add(30 * time.Second))
		for overruns := 0; read.New+uint64(s.lost()) < n || overruns == 0; {
			b, err := s.receive()
			if errors.Is(err, unix.ENOBUFS) {
				overruns++
				continue
			}
			if err != nil {
				return fmt.Errorf("after %d events, %d lost: %w", read.New, s.lost(), err)
			}
			if err := eachMessage(b, func(typ, flags uint16, _ uint32, payload []byte) bool {
				read.add(&f, &Filter{}, typ, flags, payload)
				return true
			}); err != nil {
				return err
			}
		}
		if got := read.New + uint64(s.lost()); got != n || s.lost() == 0 {
			t.Errorf("%d events read and %d lost, want %d together", read.New, s.lost(), n)
		}
		return nil
	})
}

// TestWatchCountsInKernel: more events than a socket's buffer holds, that nobody reads,
// are all counted, those of entries that change are not, and none is lost.
func TestWatchCountsInKernel(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		ctx := context.Background()
		s, counter, err := openCounted(&WatchOptions{NoStates: true}, func(groups uint32) (*socket, error) { return openSocket(ctx, groups) })
		if err != nil {
			return err
		}
		defer counter.close()
		defer s.close()
		if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096); err != nil {
			return err
		}
		const n = 5000
		if _, err := Fill(ctx, FillOptions{Count: n}); err != nil {
			return err
		}
		if began, ended, err := counter.read(); began != n || ended != 0 || err != nil {
			t.Errorf("after filling: %d began, %d ended, %v; want %d, 0", began, ended, err, n)
		}
		if err := Flush(ctx); err != nil {
			return err
		}
		if began, ended, err := counter.read(); began != 0 || ended != n || err != nil {
			t.Errorf("after flush: %d began, %d ended, %v; want 0, %d", began, ended, err, n)
		}
		if lost := s.lost(); lost != 0 {
			t.Errorf("%d lost", lost)
		}
		if _, err := unix.Read(s.fd, s.buf); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("an event got into the socket's buffer: %v", err)
		}
		return nil
	})
}

// What asks for the content of events reads them.
func TestWatchReadsForFilter(t *testing.T) {
	for _, o := range []WatchOptions{{}, {NoStates: true, Filter: Filter{Proto: unix.IPPROTO_TCP}}} {
		if _, _, err := openCounted(&o, nil); !errors.Is(err, errNoCounter) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestWatchFor(t *testing.T) {
	h := newNetns(t)
	in(t, h, func() error {
		var all [][]float64
		for range 20 { // where the clock is late by the rest, it is one with the first
			var seconds []float64
			err := Watch(context.Background(), WatchOptions{Interval: 200 * time.Millisecond, For: 300 * time.Millisecond}, func(r *Rates) error {
				seconds = append(seconds, r.Seconds)
				return nil
			})
			if err != nil || len(seconds) == 2 {
				return err
			}
			all = append(all, seconds)
		}
		t.Errorf("intervals %v, want a whole one and the rest", all)
		return nil
	})
}

// TestUnprivileged: without CAP_NET_ADMIN the error names what is missing.
func TestUnprivileged(t *testing.T) {
	err := explain(os.NewSyscallError("sendto", unix.EPERM))
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		return
	}
	if _, err := Dump(context.Background(), Filter{}, func(*Flow) error { return nil }); err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("dump without root: %v", err)
	}
}

// FuzzParse: whatever the bytes, reading ends and stays inside; what was read is
// written as a line that reads back, so nothing impossible gets in.
func FuzzParse(f *testing.F) {
	o := FillOptions{Protocol: unix.IPPROTO_TCP, Outside: netip.MustParseAddr("100.64.0.1"), Mark: 3, Zone: 4}
	if _, err := o.complete(); err != nil {
		f.Fatal(err)
	}
	var m message
	o.entry(&m, 1, 0)
	f.Add(m.b[nlHeaderLen:])
	o = FillOptions{Protocol: unix.IPPROTO_UDP, Sources: netip.MustParsePrefix("2001:db8::/64"), Dest: netip.MustParseAddrPort("[::1]:5")}
	if _, err := o.complete(); err != nil {
		f.Fatal(err)
	}
	m.b = nil
	o.entry(&m, 1, 0)
	at := m.nest(ctaCountersOrig)
	m.attr(ctaCountersPackets, 0, 0, 0, 0, 0, 0, 0, 1)
	m.endNest(at)
	at = m.nest(ctaTimestamp)
	m.attr(ctaTimestampStart, 0x18, 0, 0, 0, 0, 0, 0, 1)
	m.attr(ctaTimestampStop, 0x19, 0, 0, 0, 0, 0, 0, 1)
	m.endNest(at)
	at = m.nest(ctaHelp)
	m.attr(ctaHelpName, 'f', 't', 'p', 0)
	m.endNest(at)
	at = m.nest(ctaSecctx)
	m.attr(ctaSecctxName, 'a', 0)
	m.endNest(at)
	m.attr(ctaLabels, 1, 0, 0, 0, 0, 0, 0, 0)
	f.Add(m.b[nlHeaderLen:])
	f.Fuzz(func(t *testing.T, payload []byte) {
		before := bytes.Clone(payload)
		var flow Flow
		err := flow.parse(payload)
		if !bytes.Equal(before, payload) {
			t.Fatal("the message was changed")
		}
		if err != nil {
			return
		}
		for bit := -1; bit <= 8*len(flow.Labels); bit++ {
			flow.Label(bit)
		}
		NewAggregate(0).Add(&flow)
		line := flow.AppendText(nil, ExtendedFields)
		if len(line) == 0 || bytes.ContainsAny(line, "\n\x00\x1b") {
			t.Fatalf("line %q", line)
		}
	})
}

func FuzzMessages(f *testing.F) {
	var m message
	m.begin(msgGet, unix.NLM_F_DUMP, 1, unix.AF_UNSPEC)
	m.end()
	f.Add(m.b)
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		if err := eachMessage(b, func(_, _ uint16, _ uint32, payload []byte) bool {
			total += nlHeaderLen + len(payload)
			return true
		}); err == nil && total > len(b) {
			t.Errorf("%d bytes of messages in %d", total, len(b))
		}
	})
}

func BenchmarkFill(b *testing.B) {
	h := newNetns(b)
	in(b, h, func() error {
		for b.Loop() {
			if _, err := Fill(context.Background(), FillOptions{Count: 50000}); err != nil {
				return err
			}
			b.StopTimer()
			if err := Flush(context.Background()); err != nil {
				return err
			}
			b.StartTimer()
		}
		b.ReportMetric(50000*float64(b.N)/b.Elapsed().Seconds(), "entries/s")
		return nil
	})
}

func BenchmarkTabulate(b *testing.B) {
	h := newNetns(b)
	in(b, h, func() error {
		if _, err := Fill(context.Background(), FillOptions{Count: 100000}); err != nil {
			return err
		}
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Tabulate(context.Background(), TableOptions{}); err != nil {
				return err
			}
		}
		b.ReportMetric(100000*float64(b.N)/b.Elapsed().Seconds(), "entries/s")
		return nil
	})
}
