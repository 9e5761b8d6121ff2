// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/testutil/ktest"
)

// wire is hosts behind a gateway, and a server that writes down what comes from it.
//
//	10.0.0.2-.100 ─ cl ── in  gateway  out ── sv 203.0.113.2
type wire struct {
	t            *testing.T
	gateway      string
	client, here *netns.Handle // here: the gateway's
	server       *netns.Handle
	random       *rand.Rand

	now func() time.Time // of the clock that the log has

	mu   sync.Mutex
	seen []passing
}

// passing is a packet that came to the server: who sent it, and from where it seemed to be.
type passing struct {
	host, external netip.AddrPort
	at             time.Time
}

func newWire(t *testing.T) *wire {
	t.Helper()
	ktest.Root(t)
	ktest.RunDir(t)
	return makeWire(t)
}

// makeWire makes one beside which others may run, in the same run directory.
func makeWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t: t, gateway: ktest.Name(t), random: rand.New(rand.NewPCG(5, 5)), now: time.Now}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	gateway, err := netns.Create(w.gateway)
	must(err)
	w.here = gateway
	client, err := netns.New()
	must(err)
	server, err := netns.New()
	must(err)
	w.client, w.server = client, server
	t.Cleanup(func() {
		_, _, _ = observed(context.Background(), "down --netns "+w.gateway)
		client.Close()
		server.Close()
		gateway.Close()
		if err := netns.Delete(w.gateway); err != nil {
			t.Error(err)
		}
	})
	link := func(name string, to *netns.Handle, peer string, addr string) {
		must(gateway.Do(func() error {
			veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer, PeerNamespace: netlink.NsFd(to.Fd())}
			if err := netlink.LinkAdd(veth); err != nil {
				return err
			}
			return addressed(name, addr)
		}))
	}
	must(gateway.Do(func() error { // where natkit routes pools of connected networks
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}))
	link("in", client, "cl", "10.0.0.1/24")
	link("out", server, "sv", "203.0.113.1/24")
	must(client.Do(func() error {
		for i := 2; i <= 100; i++ {
			if err := addressed("cl", fmt.Sprintf("10.0.0.%d/24", i)); err != nil {
				return err
			}
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(10, 0, 0, 1)})
	}))
	var conn *net.UDPConn
	must(server.Do(func() (err error) {
		if err := addressed("sv", "203.0.113.2/24"); err != nil {
			return err
		}
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(203, 0, 113, 2), Port: 53})
		return err
	}))
	_ = conn.SetReadBuffer(8 << 20)
	t.Cleanup(func() { conn.Close() })
	go w.observe(conn)
	return w
}

func addressed(link, addr string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(l, a); err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

func (w *wire) observe(conn *net.UDPConn) {
	b := make([]byte, 100)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		at := w.now()
		if host, err := netip.ParseAddrPort(string(b[:n])); err == nil {
			w.mu.Lock()
			w.seen = append(w.seen, passing{host, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), at})
			w.mu.Unlock()
		}
	}
}

func (w *wire) sightings() []passing {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]passing(nil), w.seen...)
}

// send opens n sessions of random hosts and ports, and waits for most of them to be seen.
func (w *wire) send(n int) {
	w.t.Helper()
	before := len(w.sightings())
	if err := w.client.Do(func() error {
		for i := range n {
			host := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + w.random.IntN(99))}), uint16(1024+w.random.IntN(60000)))
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: host.Addr().As4(), Port: int(host.Port())})
			if err == nil {
				err = unix.Sendto(fd, []byte(host.String()), 0, &unix.SockaddrInet4{Addr: [4]byte{203, 0, 113, 2}, Port: 53})
			}
			unix.Close(fd)
			if err != nil {
				return err
			}
			if i%50 == 0 {
				time.Sleep(5 * time.Millisecond)
			}
		}
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	ktest.Wait(w.t, 10*time.Second, "packets to be seen", func() bool { return len(w.sightings())-before >= n*9/10 })
}

// rules brings a rule file up, or applies it.
func (w *wire) rules(command, text string) {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "nat.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if code, stdout, stderr := observed(w.t.Context(), command+" --attach tc --netns "+w.gateway+" -f "+path); code != exitOK {
		w.t.Fatalf("%s: exit %d: %s%s", command, code, stdout, stderr)
	}
}

// runs runs a command of natkit for the gateway, as a process of its own.
func (w *wire) runs(command string, args ...string) (out *log, end func(unix.Signal)) {
	w.t.Helper()
	cmd := exec.Command(ktest.Natkit(w.t), append([]string{command, "--netns", w.gateway}, args...)...)
	out = &log{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return out, func(s unix.Signal) {
		w.t.Helper()
		if err := cmd.Process.Signal(s); err != nil {
			w.t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil && s != unix.SIGKILL {
			w.t.Errorf("natkit %s: %v: %s", command, err, out.text.String())
		}
	}
}

// logs runs natkit log, until end.
func (w *wire) logs(dir string) (end func(unix.Signal)) {
	w.t.Helper()
	out, end := w.runs("log", "--dir", dir)
	ktest.Wait(w.t, time.Minute, "natkit log to record", func() bool { return out.has("recording in " + dir) })
	return end
}

// check asks the log for everything that was on the wire. inGap: where the log has a gap, somebody
// may be missing.
func (w *wire) check(dir string, sessions, gaps bool) {
	w.t.Helper()
	wrong, inGap := 0, 0
	seen := w.sightings()
	step := len(seen)/(200*whoRounds(w.t)) + 1
	for i, s := range seen {
		if i%step != 0 {
			continue
		}
		at := natlog.MicrosOf(s.at)
		got, err := store.Who(dir, store.Question{Address: s.external.Addr(), Port: s.external.Port(), Protocol: unix.IPPROTO_UDP, Since: at, Upto: at})
		if err != nil {
			w.t.Fatal(err)
		}
		right := len(got.Lives) > 0
		for _, l := range got.Lives { // a block, and where sessions are recorded, the session
			right = right && l.Internal.Addr() == s.host.Addr() && (l.Kind == natlog.Block || l.Internal.Port() == s.host.Port())
		}
		if blocks := len(got.Lives) == 1 && got.Lives[0].Kind == natlog.Block; sessions && blocks {
			right = false
		}
		switch {
		case len(got.Gaps) > 0 && !gaps:
			w.t.Errorf("the log has a gap at %v: %+v", s.at.UTC(), got.Gaps)
			return
		case len(got.Gaps) > 0 && len(got.Lives) == 0:
			inGap++
		case !right:
			if wrong++; wrong < 5 {
				w.t.Errorf("at %v %v was %v's, and the log has %+v", s.at.UTC(), s.external, s.host, got.Lives)
			}
		}
	}
	had := map[netip.AddrPort]bool{}
	for _, s := range seen {
		had[s.external] = true
	}
	for range 50 {
		port := netip.AddrPortFrom(seen[0].external.Addr(), uint16(1024+w.random.IntN(8976)))
		at := natlog.MicrosOf(seen[w.random.IntN(len(seen))].at)
		got, err := store.Who(dir, store.Question{Address: port.Addr(), Port: port.Port(), Protocol: unix.IPPROTO_UDP, Since: at, Upto: at})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, l := range got.Lives {
			if l.Kind != natlog.Block && !had[port] {
				w.t.Errorf("nobody was seen with %v, and the log has %+v", port, l)
			}
		}
	}
	w.t.Logf("%d packets were seen; %d of them the log did not know, in gaps; %d were wrong", len(seen), inGap, wrong)
	if gaps && inGap == 0 {
		w.t.Error("no gap had anything in it")
	}
}

const wireRules = `inside: [in]
outside: [out]
pools:
  cgn: {addresses: [203.0.113.16/30], ports: 1024-9999%s}
defaults: {timeouts: {udp: 2s, port_hold_down: 2s}}
limits: {sessions: 100000, sources: 1000}
log: {record: %s}
rules:
  - {snat: 10.0.0.0/24, to: cgn}
`

// apart is longer than natkit log takes to see a change of rules, and than the second before and
// after one in which the rule files of both sides answer.
const apart = 1500 * time.Millisecond

// whoRounds is how often TestWhoIsWhoWas goes round: once, or as NATKIT_ROUNDS says.
func whoRounds(t *testing.T) int {
	text := os.Getenv("NATKIT_ROUNDS")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("NATKIT_ROUNDS=%s: a number from 1", text)
	}
	return n
}

// What natkit who finds is what was on the wire: while the log is kept, while it was killed, after
// another configuration, and after it has stopped and begun again.
func TestWhoIsWhoWas(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, c := range []struct{ blocks, record, then string }{
		{", blocks: {size: 64, at_most: 3}", "blocks", "sessions"},
		{"", "sessions", "mappings"},
		{"", "mappings", "sessions"},
	} {
		t.Run(c.record, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			w, dir := makeWire(t), filepath.Join(t.TempDir(), "log")
			command, rounds := "up", whoRounds(t)
			for range rounds {
				w.rules(command, fmt.Sprintf(wireRules, c.blocks, c.record))
				command = "apply"
				w.send(100) // before anybody reads
				end := w.logs(dir)
				w.send(300)
				end(unix.SIGKILL)
				w.send(300)
				time.Sleep(3 * time.Second) // longer than udp's 2 s: some sessions end unread
				w.send(100)
				end = w.logs(dir)
				w.send(300)
				w.rules("apply", fmt.Sprintf(wireRules, c.blocks, c.then))
				time.Sleep(apart)
				w.send(300)
				end(unix.SIGTERM)
				w.send(100)
				end = w.logs(dir)
				w.send(100)
				time.Sleep(apart) // the last packets are recorded
				end(unix.SIGTERM)
			}
			w.check(dir, c.blocks == "", false)
			rules, err := store.RulesOf(dir)
			if err != nil || len(rules) != 2*rounds {
				t.Errorf("%d rule files are kept (%v), want %d", len(rules), err, 2*rounds)
			}
		})
	}
}

// What did not fit into the ring is a gap, and what is alive after it is right.
func TestLogGapOfEngine(t *testing.T) {
	had := datapath.LogBytes
	datapath.LogBytes = 4096 // 85 records
	t.Cleanup(func() { datapath.LogBytes = had })
	w, dir := newWire(t), filepath.Join(t.TempDir(), "log")
	w.rules("up", fmt.Sprintf(wireRules, "", "sessions"))
	end := w.logs(dir)
	w.send(50)
	end(unix.SIGKILL)
	w.send(200)
	engine, err := control.Open(w.here)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	ktest.Wait(t, time.Minute, "all sessions to end", func() bool {
		stats, err := engine.Stats()
		return err == nil && stats.Sessions == 0
	})
	end = w.logs(dir)
	time.Sleep(100 * time.Millisecond)
	w.send(50)
	time.Sleep(1500 * time.Millisecond)
	end(unix.SIGTERM)
	w.check(dir, true, true)

	// The doctor names the gap.
	t.Setenv("NATKIT_STATE_DIR", filepath.Dir(dir))
	code, stdout, stderr := observed(t.Context(), "doctor --for 100ms --netns "+w.gateway)
	if code != exitFindings || !strings.Contains(stdout, "the translation log has a gap of") || !strings.Contains(strings.Join(strings.Fields(stdout), " "), "the engine's log was full") {
		t.Errorf("doctor: exit %d: %s%s", code, stdout, stderr)
	}
}

// A second one can neither read the engine's log nor write the folder.
func TestLogTwice(t *testing.T) {
	w, dir := newWire(t), filepath.Join(t.TempDir(), "log")
	w.rules("up", fmt.Sprintf(wireRules, "", "mappings"))
	end := w.logs(dir)
	for _, other := range []string{dir, t.TempDir()} {
		if code, _, stderr := observed(t.Context(), "log --netns "+w.gateway+" --dir "+other); code != exitError || !strings.Contains(stderr, "one does so at a time") {
			t.Errorf("a second one: exit %d, %s", code, stderr)
		}
	}
	if code, _, stderr := observed(t.Context(), "log --dir "+dir); code != exitError || !strings.Contains(stderr, "a folder has one writer") {
		t.Errorf("a second one of another namespace: exit %d, %s", code, stderr)
	}
	end(unix.SIGTERM)
}

// natkit serve keeps the log that its file wants, and follows it to another folder; when it is killed the next one reads on.
func TestServeKeepsLog(t *testing.T) {
	w := newWire(t)
	dirs := []string{filepath.Join(t.TempDir(), "one"), filepath.Join(t.TempDir(), "two")}
	file := filepath.Join(t.TempDir(), "nat.yaml")
	write := func(log string) {
		t.Helper()
		text := strings.Replace(fmt.Sprintf(wireRules, ", blocks: {size: 64, at_most: 3}", "blocks"), "log: {record: blocks}\n", log, 1)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("log: {folder: " + dirs[0] + "}\n")
	serve := func() (out *log, end func(unix.Signal)) { return w.runs("serve", "--attach", "tc", "-f", file) }
	says := func(out *log, what string) {
		t.Helper()
		ktest.Wait(t, time.Minute, what, func() bool { return out.has(what) })
	}
	out, end := serve()
	says(out, "recording in "+dirs[0])
	w.send(200)
	end(unix.SIGKILL)
	w.send(200)
	out, end = serve()
	says(out, "recording in "+dirs[0])
	if code, _, stderr := observed(t.Context(), "log --netns "+w.gateway+" --dir "+t.TempDir()); code != exitError || !strings.Contains(stderr, "one does so at a time") {
		t.Errorf("natkit log beside it: exit %d, %s", code, stderr)
	}
	time.Sleep(1500 * time.Millisecond)
	w.check(dirs[0], false, false)
	first := len(w.sightings())
	write("log: {folder: " + dirs[1] + ", size: 100MB}\n")
	says(out, "recording in "+dirs[1])
	w.send(100)
	time.Sleep(1500 * time.Millisecond)
	end(unix.SIGTERM)
	w.mu.Lock()
	w.seen = w.seen[first:]
	w.mu.Unlock()
	w.check(dirs[1], false, false)
}

// Of port forwards and maps engine ebpf records nothing but sessions, and natkit who answers by the
// rules that were in force.
func TestWhoByRules(t *testing.T) {
	w, dir := newWire(t), filepath.Join(t.TempDir(), "log")
	rules := func(host string) string {
		return fmt.Sprintf(wireRules, "", "mappings") + "  - {dnat: \"udp 203.0.113.20:5000\", to: \"" + host + ":6000\"}\n  - {map: 10.0.0.64/28 <-> 203.0.113.64/28}\n"
	}
	w.rules("up", rules("10.0.0.5"))
	end := w.logs(dir)
	w.send(20) // of maps, too: the server's names of hosts must be those that the answer has
	kept := func(files int) {
		t.Helper()
		ktest.Wait(t, 10*time.Second, "the rules to be kept", func() bool {
			list, err := store.RulesOf(dir)
			return err == nil && len(list) == files
		})
	}
	kept(1)
	before := time.Now()
	time.Sleep(apart)
	w.rules("apply", rules("10.0.0.6"))
	change := time.Now()
	kept(2)
	time.Sleep(apart)
	after := time.Now()
	end(unix.SIGTERM)
	for _, c := range []struct {
		at   time.Time
		port string
		has  []string
	}{
		{before, "203.0.113.20:5000 udp", []string{"10.0.0.5:6000 (by rule: dnat"}},
		{after, "203.0.113.20:5000 udp", []string{"10.0.0.6:6000 (by rule: dnat"}},
		{change, "203.0.113.20:5000 udp", []string{"10.0.0.5:6000 (by rule", "10.0.0.6:6000 (by rule"}},
		{after, "203.0.113.66:77 tcp", []string{"10.0.0.66:77 (by rule: map: 10.0.0.64/28 <-> 203.0.113.64/28)", "in force from"}},
		{after, "203.0.113.20:5000 tcp", nil},
	} {
		code, stdout, stderr := observed(t.Context(), "who "+c.port+" --at "+c.at.UTC().Format("2006-01-02T15:04:05.000Z")+" --dir "+dir)
		if want := map[bool]int{true: exitOK, false: exitFindings}[len(c.has) > 0]; code != want || stderr != "" {
			t.Errorf("%s at %v: exit %d, %s%s", c.port, c.at, code, stdout, stderr)
		}
		for _, text := range c.has {
			if !strings.Contains(stdout, text) {
				t.Errorf("%s at %v: no %q in\n%s", c.port, c.at, text, stdout)
			}
		}
	}
	if lines, err := os.ReadFile(filepath.Join(dir, store.AuditFile)); err != nil || strings.Count(string(lines), "\n") != 5 || !strings.Contains(string(lines), `"found_count":2`) {
		t.Errorf("%v: the audit file has\n%s", err, lines)
	}
	for _, s := range w.sightings() {
		if by := s.external.Addr().As4()[3]; by >= 64 && by < 80 && s.host.Addr().As4()[3] != by {
			t.Errorf("%v was seen as %v", s.host, s.external)
		}
	}
}
