// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/nftables"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/scraped"
	"natkit/internal/words/exposition"
)

// patient is how long a busy machine may take for what comes at once.
const patient = 2 * time.Minute

// served is a Serve that runs in the test's process, on a file.
type servedTestbed struct {
	*testbed
	file   string
	events chan *ServeEvent
	reload chan os.Signal
	url    string // of its metrics
	stop   context.CancelFunc
	ended  chan error
}

// serve begins to serve rules on a testbed, and waits until they are up.
func (b *testbed) serve(rules string, o ServeOptions) *servedTestbed {
	b.t.Helper()
	s := &servedTestbed{testbed: b, file: filepath.Join(b.t.TempDir(), "nat.yaml")}
	s.replace(rules)
	s.begin(o)
	return s
}

func (s *servedTestbed) begin(o ServeOptions) {
	s.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.url = "http://" + l.Addr().String()
	s.events, s.reload, s.ended = make(chan *ServeEvent, 100), make(chan os.Signal, 1), make(chan error, 1)
	o.Namespace, o.Attach, o.File, o.Reload, o.Metrics = s.gateway, cmp.Or(o.Attach, AttachTC), s.file, s.reload, l
	o.Say = func(e *ServeEvent) { s.events <- e }
	var ctx context.Context
	ctx, s.stop = context.WithCancel(context.Background())
	go func() { s.ended <- Serve(ctx, o) }()
	s.t.Cleanup(s.end)
}

// end stops the Serve, if it has not been.
func (s *servedTestbed) end() {
	s.stop()
	if s.ended == nil {
		return
	}
	if err := <-s.ended; err != nil {
		s.t.Errorf("serve: %v", err)
	}
	s.ended = nil
}

// replace puts another file in place of the rule file, as editors do.
func (s *servedTestbed) replace(rules string) {
	s.t.Helper()
	draft := s.file + "~"
	if err := errors.Join(os.WriteFile(draft, []byte(rules), 0o600), os.Rename(draft, s.file)); err != nil {
		s.t.Fatal(err)
	}
}

// hears waits for an event of a kind that says something, and passes over others.
func (s *servedTestbed) hears(kind, says string) *ServeEvent {
	s.t.Helper()
	limit := time.After(patient)
	for {
		select {
		case e := <-s.events:
			if text := e.Error + strings.Join(e.Why, "; "); e.Kind == kind && strings.Contains(text, says) {
				return e
			}
			s.t.Logf("%s: %s %s", e.Kind, e.Error, strings.Join(e.Why, "; "))
		case err := <-s.ended:
			s.ended = nil
			s.t.Fatalf("serve ended: %v", err)
		case <-limit:
			s.t.Fatalf("did not hear of %q: %q", kind, says)
		}
	}
}

// get asks the Serve by HTTP.
func (s *servedTestbed) get(path string) (status int, body []byte) {
	s.t.Helper()
	r, err := http.Get(s.url + path)
	if err != nil {
		s.t.Fatal(err)
	}
	defer r.Body.Close()
	body, err = io.ReadAll(r.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return r.StatusCode, body
}

// metric scrapes, parses as Prometheus does, and gives the sum of the series of a name
// whose labels have these values.
func (s *servedTestbed) metric(name string, labels ...string) (sum float64) {
	s.t.Helper()
	status, body := s.get("/metrics")
	if status != http.StatusOK {
		s.t.Fatalf("scrape: %d %s", status, body)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	if families[name] == nil {
		s.t.Fatalf("no metric %s", name)
	}
	for _, m := range families[name].Metric {
		var values []string
		for _, l := range m.Label {
			values = append(values, l.GetValue())
		}
		if len(without(labels, values)) == 0 {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

// numbered sends numbered datagrams from a port of the client to a server and back, one
// after the other, until it is stopped: none may be lost or come from elsewhere.
type numbered struct {
	stop chan struct{}
	err  chan error
	sent int
	seen chan []string // sources that the server saw, once it ended
}

func (b *testbed) numbered(port int) *numbered {
	b.t.Helper()
	n := &numbered{stop: make(chan struct{}), err: make(chan error, 1), seen: make(chan []string, 1)}
	var server, client net.PacketConn
	b.in(b.server, func() (err error) {
		server, err = net.ListenPacket("udp4", fmt.Sprintf("198.51.100.9:%d", port))
		return err
	})
	b.in(b.client, func() (err error) {
		client, err = net.ListenPacket("udp4", fmt.Sprintf("10.0.0.2:%d", port))
		return err
	})
	go func() {
		var seen []string
		data := make([]byte, 100)
		for {
			size, from, err := server.ReadFrom(data)
			if err != nil {
				n.seen <- seen
				return
			}
			if !slices.Contains(seen, from.String()) {
				seen = append(seen, from.String())
			}
			server.WriteTo(data[:size], from)
		}
	}()
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("198.51.100.9"), uint16(port)))
	go func() {
		defer client.Close()
		defer server.Close()
		data := make([]byte, 100)
		for {
			select {
			case <-n.stop:
				n.err <- nil
				return
			default:
			}
			want := fmt.Sprint(n.sent)
			if _, err := client.WriteTo([]byte(want), to); err != nil {
				n.err <- err
				return
			}
			n.sent++
			client.SetReadDeadline(time.Now().Add(patient))
			size, from, err := client.ReadFrom(data)
			if err != nil || string(data[:size]) != want || from.String() != to.String() {
				n.err <- fmt.Errorf("datagram %s: %q from %v: %w", want, data[:size], from, err)
				return
			}
			time.Sleep(time.Millisecond) // the other tests want the processor, too
		}
	}()
	return n
}

// whole stops and wants every datagram to have come back, all by one external endpoint.
func (n *numbered) whole(t *testing.T) {
	t.Helper()
	close(n.stop)
	if err := <-n.err; err != nil {
		t.Error(err)
	}
	if seen := <-n.seen; len(seen) != 1 || n.sent == 0 {
		t.Errorf("%d datagrams from %q", n.sent, seen)
	}
}

const moreRules = baseRules + "  - dnat: udp 198.51.100.1:7000\n    to: 10.0.0.3\n"

// The file is applied when it changes, and on demand; one with errors changes nothing; and
// packets notice none of it. Scrapes at the same time get whole replies.
func TestServeReload(t *testing.T) {
	b := newTestbed(t)
	s := b.serve(baseRules, ServeOptions{Build: map[string]string{"version": "test"}})
	s.hears("up", "")
	traffic := b.numbered(5000)
	scraped := make(chan struct{})
	scraping, enough := context.WithCancel(t.Context())
	go func() {
		defer close(scraped)
		for scraping.Err() == nil {
			r, err := http.Get(s.url + "/metrics")
			if err == nil {
				if r.StatusCode != http.StatusOK {
					t.Errorf("a scrape during a reload: %s", r.Status)
				}
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
		}
	}()
	rules := func() int {
		r, err := Rules(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		return len(r)
	}
	for range 2 {
		s.replace(moreRules)
		if e := s.hears("reloaded", ""); len(e.Plan.Added) != 1 || rules() != 4 {
			t.Errorf("added %q, %d rules", e.Plan.Added, rules())
		}
		s.replace(moreRules + "  - nonsense: 1\n")
		s.hears("kept", "nat.yaml:12:")
		if rules() != 4 {
			t.Errorf("%d rules after a file with errors", rules())
		}
		status, err := ReadStatus(b.gateway)
		if err != nil || status.Serve == nil || status.Serve.Process != os.Getpid() ||
			!strings.Contains(strings.Join(status.Problems, ";"), "natkit serve keeps the rules as they were: ") {
			t.Errorf("status %+v, %v", status, err)
		}
		if n := s.metric("natkit_last_reload_successful"); n != 0 {
			t.Errorf("the last reload counts as a success: %v", n)
		}
		// Written in place, as a shell does.
		if err := os.WriteFile(s.file, []byte(baseRules), 0o600); err != nil {
			t.Fatal(err)
		}
		s.hears("reloaded", "")
	}
	s.reload <- syscall.SIGHUP
	s.hears("reloaded", "")
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	s.hears("kept", "no such file")
	s.replace(baseRules)
	s.hears("reloaded", "")
	enough()
	<-scraped
	if ok, failed := s.metric("natkit_reloads_total", "ok"), s.metric("natkit_reloads_total", "file", "failed"); ok < 7 || failed < 3 {
		t.Errorf("%v reloads done, %v failed, want at least 7 and 3", ok, failed)
	}
	if n := s.metric("natkit_last_reload_successful"); n != 1 {
		t.Error("the last reload counts as failed")
	}
	s.end()
	s.hearsLast("ended")
	traffic.whole(t)
	if status, err := ReadStatus(b.gateway); err != nil || status.Serve != nil || len(status.Problems) > 0 {
		t.Errorf("when it has ended: status %+v, %v", status, err)
	}
}

// hearsLast wants an event of a kind among those that were said already.
func (s *servedTestbed) hearsLast(kind string) {
	s.t.Helper()
	for {
		select {
		case e := <-s.events:
			if e.Kind == kind {
				return
			}
		default:
			s.t.Errorf("did not hear of %q at the end", kind)
			return
		}
	}
}

// move replaces the addresses of an interface of the gateway; none takes them away.
func (b *testbed) move(name string, addrs ...string) {
	b.t.Helper()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		have, err := netlink.AddrList(l, netlink.FAMILY_V4)
		for _, a := range have {
			err = errors.Join(err, netlink.AddrDel(l, &a))
		}
		for _, text := range addrs {
			a, err2 := netlink.ParseAddr(text)
			err = errors.Join(err, err2, netlink.AddrAdd(l, a))
		}
		return err
	})
}

// What a pinned program does not notice is followed: each change is named as long as
// nobody serves, and gone when it is followed.
func TestServeFollows(t *testing.T) {
	b := newTestbed(t)
	s := b.serve(baseRules, ServeOptions{})
	s.hears("up", "")
	clean := func() {
		t.Helper()
		var problems []string
		ktest.Wait(t, patient, "no problems", func() bool {
			status, err := ReadStatus(b.gateway)
			if err != nil {
				t.Fatal(err)
			}
			problems = status.Problems
			return len(problems) == 0
		})
		if code, body := s.get("/healthz"); code != http.StatusOK {
			t.Errorf("health %d %s", code, body)
		}
	}
	link := func(change func(netlink.Link) error) {
		t.Helper()
		b.in(b.gateway, func() error {
			l, err := netlink.LinkByName("out")
			return errors.Join(err, change(l))
		})
	}
	from := b.sender()
	from("198.51.100.1")

	// An address that is lost and found: the sessions wait.
	b.move("out")
	s.hears("waiting", "no longer has the address 198.51.100.1 that it masquerades behind, nor another")
	b.move("out", "198.51.100.1/24")
	s.hears("followed", "interface out has an address now")
	clean()
	from("198.51.100.1")
	if n := s.metric("natkit_sessions_created_total"); n != 1 {
		t.Errorf("%v sessions were made, want the one to go on", n)
	}

	// The interface, recreated.
	link(netlink.LinkDel)
	s.hears("waiting", "out is gone")
	b.join("out", "198.51.100.1/24", b.server, "198.51.100.9/24")
	s.hears("followed", "interface out was recreated")
	clean()
	b.echo(b.server, "198.51.100.9:8")
	if got := b.ask(b.client, "198.51.100.9:8").Addr().String(); got != "198.51.100.1" {
		t.Errorf("the server saw %s", got)
	}

	// Another MTU, another MAC address.
	link(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1400) })
	s.hears("followed", "another MTU, 1400")
	link(func(l netlink.Link) error {
		return netlink.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9})
	})
	s.hears("followed", "another MAC address, 02:00:00:00:00:09")
	clean()
	b.ping(b.client, "198.51.100.9")

	// A link that flaps forgets whom it answers for.
	link(netlink.LinkSetDown)
	link(netlink.LinkSetUp)
	s.hears("followed", "ARP for 198.51.100.77 is no longer answered on out")
	clean()

	// Settings, and expiry, that somebody stops.
	b.in(b.gateway, func() error { return writeSetting(settingForward, "0") })
	s.hears("followed", "somebody has set net.ipv4.ip_forward to 0")
	b.stopGC()
	if code, body := s.get("/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(string(body), "expiry has not run") {
		t.Errorf("health without expiry: %d %s", code, body)
	}
	link(func(l netlink.Link) error { return netlink.LinkSetAlias(l, "way out") }) // anything wakes it
	s.hears("followed", "expiry has not run")
	clean()
}

// stopGC ends expiry, and waits until that is old.
func (b *testbed) stopGC() {
	b.t.Helper()
	program, err := ebpf.LoadPinnedProgram(filepath.Join(pinsOf(b.gateway.Inode()), "programs", "gc_stop"), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer program.Close()
	if _, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil {
		b.t.Fatal(err)
	}
	ktest.Wait(b.t, patient, "expiry to be late", func() bool {
		e, err := Open(b.gateway)
		if err != nil {
			b.t.Fatal(err)
		}
		defer e.Close()
		stats, err := e.Stats()
		if err != nil {
			b.t.Fatal(err)
		}
		return time.Duration(stats.GCAge) > staleGC
	})
}

// sender sends datagrams from one port of the client to the server until that sees one
// from the address it is given.
func (b *testbed) sender() (from func(want string)) {
	b.t.Helper()
	var server, client net.PacketConn
	b.in(b.server, func() (err error) { server, err = net.ListenPacket("udp4", "198.51.100.9:9"); return err })
	b.in(b.client, func() (err error) { client, err = net.ListenPacket("udp4", "10.0.0.2:5000"); return err })
	b.t.Cleanup(func() { server.Close(); client.Close() })
	to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort("198.51.100.9:9"))
	return func(want string) {
		b.t.Helper()
		data, last := make([]byte, 100), ""
		ktest.Wait(b.t, patient, "the server to see "+want, func() bool {
			if _, err := client.WriteTo([]byte("x"), to); err != nil {
				b.t.Fatal(err)
			}
			server.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			if _, addr, err := server.ReadFrom(data); err == nil {
				last = addr.(*net.UDPAddr).IP.String()
			}
			return last == want
		})
	}
}

// The address that is masqueraded behind changes: sessions of the old one end, also those
// whose sender goes on, new ones have the new, and the old one's room is given back.
func TestServeAddressMoves(t *testing.T) {
	b := newTestbed(t)
	s := b.serve(baseRules, ServeOptions{})
	s.hears("up", "")
	from := b.sender()
	from("198.51.100.1")
	rules := strings.ReplaceAll(baseRules, "dnat: tcp 198.51.100.1:", "dnat: tcp 198.51.100.3:")
	s.replace(rules)
	s.hears("reloaded", "")
	for _, address := range []string{"198.51.100.2", "198.51.100.3", "198.51.100.2"} {
		b.move("out", address+"/24")
		from(address)
	}
	status, err := ReadStatus(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range status.Addresses {
		if a.Address.String() == "198.51.100.1" && !a.Leaving {
			t.Errorf("address %+v", a)
		}
	}
}

// An address that has left is forgotten when its ports are free, and can come again.
func TestForget(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	addresses := func() (out []string) {
		status, err := ReadStatus(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range status.Addresses {
			out = append(out, a.Address.String())
		}
		return out
	}
	apply := func(text string) {
		t.Helper()
		if _, err := Apply(t.Context(), b.parse(text), text, Options{Namespace: b.gateway}); err != nil {
			t.Fatal(err)
		}
	}
	pool := func(last int) string {
		return strings.Replace(baseRules, "rules:", fmt.Sprintf("rules:\n  - snat: 10.0.0.0/25\n    to: 203.0.113.%d", last), 1)
	}
	for i := range 5 {
		apply(pool(i))
	}
	want := []string{"198.51.100.1", "198.51.100.77", "203.0.113.3", "203.0.113.4"}
	if got := addresses(); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("addresses %q, want %q: the one in use and the one before it", got, want)
	}
	b.in(b.server, func() error {
		l, err := netlink.LinkByName("eth0")
		return errors.Join(err, netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.IPv4(198, 51, 100, 1),
			Dst: &net.IPNet{IP: net.IPv4(203, 0, 113, 0), Mask: net.CIDRMask(24, 32)}}))
	})
	b.ping(b.client, "198.51.100.9")
	apply(pool(5))
	apply(pool(6))
	if got := addresses(); !slices.Contains(got, "203.0.113.4") || slices.Contains(got, "203.0.113.3") {
		t.Errorf("addresses %q, want 203.0.113.4, which has a session, and not 203.0.113.3", got)
	}
	apply(pool(3))
	b.pingAs(b.client, "198.51.100.9", 0x52)
}

// A natkit serve that is killed, and the next one.
func TestServeKilled(t *testing.T) {
	b := newTestbed(t)
	s := &servedTestbed{testbed: b, file: filepath.Join(t.TempDir(), "nat.yaml")}
	s.replace(baseRules)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(self, "-test.run=^TestServeChild$")
	child.Env = append(os.Environ(), "NATKIT_TEST_SERVE="+b.name, "NATKIT_TEST_FILE="+s.file)
	var said bytes.Buffer
	child.Stdout, child.Stderr = &said, &said
	if _, err := child.StdinPipe(); err != nil { // it ends with the test, however that ends
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Process.Kill()
	ktest.Wait(t, patient, "the child to serve", func() bool {
		status, err := ReadStatus(b.gateway)
		return err == nil && status.Serve != nil && len(status.Interfaces) == 2
	})
	traffic := b.numbered(5002)
	// Nobody else serves, or changes what is served.
	var refused *ServedError
	o := ServeOptions{Options: b.options(), File: s.file, Say: func(*ServeEvent) {}}
	if err := Serve(t.Context(), o); !errors.As(err, &refused) || refused.Process != child.Process.Pid {
		t.Errorf("a second serve: %v", err)
	}
	if _, err := Apply(t.Context(), b.parse(moreRules), moreRules, b.options()); !errors.As(err, &refused) {
		t.Errorf("apply: %v", err)
	}
	if _, err := Down(b.gateway); !errors.As(err, &refused) || !strings.Contains(err.Error(), s.file) {
		t.Errorf("down: %v", err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	child.Wait()
	if status, err := ReadStatus(b.gateway); err != nil || status.Serve != nil {
		t.Errorf("status %+v, %v\n%s", status, err, &said)
	}
	if _, err := os.Stat(instancePath(b.gateway.Inode(), ".serve")); err != nil {
		t.Error(err)
	}
	if err := forgetServing(b.gateway.Inode()); err != nil {
		t.Errorf("what a killed serve has left: %v", err)
	}
	if left, _ := filepath.Glob(instancePath(b.gateway.Inode(), ".serve") + "*"); left != nil {
		t.Errorf("left %q", left)
	}
	s.replace(moreRules) // while nobody looks
	s.begin(ServeOptions{Options: Options{}, Down: true})
	s.hears("adopted", "")
	if e := s.hears("reloaded", ""); len(e.Plan.Added) != 1 {
		t.Errorf("added %q", e.Plan.Added)
	}
	traffic.whole(t)
	before := s.ended
	s.stop()
	if err := <-before; err != nil {
		t.Error(err)
	}
	s.ended = nil
	if _, err := ReadStatus(b.gateway); !errors.Is(err, ErrDown) {
		t.Errorf("after a serve that takes down: %v", err)
	}
}

// TestServeChild is the natkit serve that TestServeKilled kills.
func TestServeChild(t *testing.T) {
	name := os.Getenv("NATKIT_TEST_SERVE")
	if name == "" {
		return
	}
	ns, err := netns.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(1) }()
	o := ServeOptions{File: os.Getenv("NATKIT_TEST_FILE"), Say: func(e *ServeEvent) { fmt.Println(e.Kind, e.Why, e.Error) }}
	o.Namespace, o.Attach = ns, AttachTC
	if err := Serve(context.Background(), o); err != nil {
		t.Fatal(err)
	}
}

// A file may name interfaces that come later, and a NAT that somebody takes away comes again.
func TestServeAwaits(t *testing.T) {
	b := newTestbed(t)
	more, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	b.move("out")
	s := b.serve(strings.Replace(baseRules, "[in]", "[in, later]", 1)+"  - masquerade: 10.0.5.0/24\n", ServeOptions{})
	if e := s.hears("up", ""); !slices.Equal(e.Plan.Awaited, []string{"later", "out"}) || !slices.Equal(e.Plan.Unaddressed, []string{"out"}) {
		t.Errorf("awaits %q, of them without an address %q", e.Plan.Awaited, e.Plan.Unaddressed)
	}
	b.move("out", "198.51.100.1/24")
	s.hears("followed", "interface out has an address now")
	b.ping(b.client, "198.51.100.9")
	b.join("later", "10.0.5.1/24", more, "10.0.5.2/24")
	s.hears("followed", "interface later is there now")
	b.in(more, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 0, 5, 1)})
	})
	b.ping(more, "198.51.100.9")
	if err := datapath.Unload(pinsOf(b.gateway.Inode())); err != nil {
		t.Fatal(err)
	}
	s.reload <- syscall.SIGHUP
	s.hears("up", "")
	b.ping(b.client, "198.51.100.9")
}

// The kernel's engine is kept, too: most of all against who flushes all of nftables.
func TestServeNFT(t *testing.T) {
	b := newTestbed(t)
	s := b.serve(baseRules, ServeOptions{Options: Options{Engine: EngineNFT}})
	s.hears("up", "")
	b.ping(b.client, "198.51.100.9")
	if up, uses := s.metric("natkit_up", "nft"), s.metric("natkit_rule_uses_total"); up != 1 || uses != 1 {
		t.Errorf("up %v, %v uses", up, uses)
	}
	if entries := s.metric("natkit_conntrack_entries"); entries < 1 {
		t.Errorf("%v entries", entries)
	}
	if failed := s.metric("natkit_conntrack_events_total", "insert_failed"); failed != 0 {
		t.Errorf("%v insertions failed", failed)
	}
	b.in(b.gateway, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		c.FlushRuleset()
		return c.Flush()
	})
	s.hears("followed", "somebody has removed the nftables table natkit")
	b.pingAs(b.client, "198.51.100.9", 0x51)
	// The addresses that are answered for are those of a network that the interface is on.
	address := func(change func(netlink.Link, *netlink.Addr) error) {
		t.Helper()
		b.in(b.gateway, func() error {
			l, err := netlink.LinkByName("out")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr("198.51.100.1/24")
			return errors.Join(err, change(l, a))
		})
	}
	address(netlink.AddrDel)
	s.hears("followed", "198.51.100.77")
	address(netlink.AddrAdd)
	s.hears("followed", "ARP is not answered on out for 198.51.100.77")
	s.replace(moreRules)
	s.hears("reloaded", "")
	if code, body := s.get("/healthz"); code != http.StatusOK {
		t.Errorf("health %d %s", code, body)
	}
	s.end()
	s.begin(ServeOptions{})
	s.hears("adopted", "")
	if rules := s.metric("natkit_rules"); rules != 4 {
		t.Errorf("%v rules", rules)
	}
	// What was adopted comes back on its own engine, though this serve was given none. A down
	// that does not ask whether somebody serves is of an older natkit.
	if _, err := down(b.gateway, new(serving)); err != nil {
		t.Fatal(err)
	}
	s.reload <- syscall.SIGHUP
	if e := s.hears("up", ""); e.Plan.Engine != EngineNFT {
		t.Errorf("engine %s is up", e.Plan.Engine)
	}
}

// An interface that is removed while serve brings its engine up for the first time is waited
// for, as one that is removed later; natkit up names it.
func TestServeFirstUpLosesInterface(t *testing.T) {
	b := newTestbed(t)
	more, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	b.join("later", "10.0.5.1/24", more, "10.0.5.2/24")
	text := strings.Replace(baseRules, "[in]", "[in, later]", 1)
	file, o := b.parse(text), b.options()
	o.Wait = true
	tries, lost := 0, ""
	p, err := untilSteady(t.Context(), b.gateway, file, func() (*Plan, error) {
		tries++
		var p *Plan
		err := b.gateway.Do(func() (err error) {
			p, err = MakePlan(file, text, o)
			return err
		})
		if err != nil {
			return nil, err
		}
		if tries == 1 {
			b.in(b.gateway, func() error {
				l, err := netlink.LinkByName("later")
				if err != nil {
					return err
				}
				return netlink.LinkDel(l)
			})
		}
		e, err := Temporary(p, b.gateway)
		if err != nil {
			lost = err.Error()
			return nil, err
		}
		return p, e.Close()
	})
	if err != nil || tries != 2 || !slices.Equal(p.Awaited, []string{"later"}) {
		t.Errorf("after %d tries: %v, %+v", tries, err, p)
	}
	if !strings.Contains(lost, `interface "later" was removed while natkit`) {
		t.Errorf("the first try: %s", lost)
	}
	// Without an interface that comes or goes an error is one.
	tries = 0
	if _, err := untilSteady(t.Context(), b.gateway, file, func() (*Plan, error) { tries++; return nil, errHalf }); err != errHalf || tries != 1 {
		t.Errorf("after %d tries: %v", tries, err)
	}
}

// The exposition is what Prometheus takes, and has a word for everything that an engine counts.
func TestMetrics(t *testing.T) {
	for _, r := range rulefile.Reasons {
		if counted := descCounted[r.Name] != nil; counted != (r.Kind == "counted") {
			t.Errorf("reason %s is %s, with a metric of its own: %v", r.Name, r.Kind, counted)
		}
	}
	for _, name := range refusals {
		if !slices.ContainsFunc(rulefile.Reasons, func(r rulefile.ReasonInfo) bool { return r.Name == name && r.Kind == "dropped" }) {
			t.Errorf("no reason %s", name)
		}
	}
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.ping(b.client, "198.51.100.9")
	m := newMetrics(b.gateway, map[string]string{"version": "test"}, newPortControl(b.gateway))
	problems, err := testutil.GatherAndLint(scraped.Gathered(t, m.collect()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	want := `
# HELP natkit_sessions_created_total Sessions created.
# TYPE natkit_sessions_created_total counter
natkit_sessions_created_total 1
# HELP natkit_sessions_limit Maximum number of sessions.
# TYPE natkit_sessions_limit gauge
natkit_sessions_limit 4096
# HELP natkit_bytes_total Bytes of IPv4 translated, by direction.
# TYPE natkit_bytes_total counter
natkit_bytes_total{direction="in"} 28
natkit_bytes_total{direction="out"} 28
# HELP natkit_up Whether the gateway runs, by its engine.
# TYPE natkit_up gauge
natkit_up{engine="ebpf"} 1
natkit_up{engine="nft"} 0
`
	if err := testutil.GatherAndCompare(scraped.Gathered(t, m.collect()), strings.NewReader(want), "natkit_sessions_created_total", "natkit_sessions_limit", "natkit_bytes_total", "natkit_up"); err != nil {
		t.Error(err)
	}
	if n := scraped.SeriesOf(t, m.collect(), "natkit_ports_free"); n != rulefile.PortClasses {
		t.Errorf("%d series of free ports, want those of one address", n)
	}
	// All are free but the port that a rule forwards, of TCP alone, and what the ping has.
	status, err := ReadStatus(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	if a := status.Addresses[0]; a.Ports != a.FreeTCP+1 || a.Ports != a.FreeUDP || a.Ports != a.FreeICMP+1 {
		t.Errorf("%d ports, free: %d of TCP, %d of ICMP", a.Ports, a.FreeTCP, a.FreeICMP)
	}
	// However many addresses there are, series are not.
	var addresses []AddressStatus
	for i := range maxMetricAddresses + 1 {
		addresses = append(addresses, AddressStatus{Address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), FirstPort: 1024, LastPort: 1033, Ports: 10, FreeTCP: 2})
	}
	many := func(n int) int {
		e := exposition.New()
		exposePorts(e, addresses[:n])
		return scraped.SeriesOf(t, e, "natkit_ports_free")
	}
	if one, all := many(maxMetricAddresses), many(maxMetricAddresses+1); one != rulefile.PortClasses*maxMetricAddresses || all != rulefile.PortClasses {
		t.Errorf("%d series for %d addresses, %d for one more", one, maxMetricAddresses, all)
	}
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	if n := scraped.SeriesOf(t, m.collect(), "natkit_sessions"); n != 0 {
		t.Errorf("%d series of sessions of an engine that is down", n)
	}
	if err := m.health(); !errors.Is(err, ErrDown) {
		t.Errorf("health: %v", err)
	}
}

// systemd is informed when a service is ready, reloads, and stops.
func TestServeNotifies(t *testing.T) {
	b := newTestbedAlone(t)
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	s := b.serve(baseRules, ServeOptions{})
	hears := func(want string) {
		t.Helper()
		data := make([]byte, 200)
		l.SetReadDeadline(time.Now().Add(patient))
		n, err := l.Read(data)
		if err != nil || !strings.HasPrefix(string(data[:n]), want) {
			t.Errorf("systemd hears %q, %v; want %q", data[:n], err, want)
		}
	}
	hears("READY=1")
	s.reload <- syscall.SIGHUP
	hears("RELOADING=1\nMONOTONIC_USEC=")
	hears("READY=1")
	s.end()
	hears("STOPPING=1")
}
