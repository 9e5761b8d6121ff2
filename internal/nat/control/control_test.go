// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// The test binary is also the natkit that is killed while it brings an engine up or down,
// or changes its rules.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "accel" {
		accelChild(os.Args[2])
	}
	change := map[string]func(context.Context, *rulefile.File, string, Options) (*Plan, error){
		"up": Up, "apply": Apply,
		"down": func(_ context.Context, _ *rulefile.File, _ string, o Options) (*Plan, error) {
			_, err := Down(o.Namespace)
			return nil, err
		},
	}
	if len(os.Args) > 3 && change[os.Args[1]] != nil {
		ns, err := netns.Open(os.Args[2])
		if err == nil {
			var file *rulefile.File
			if file, err = rulefile.Parse("killed", []byte(os.Args[3])); err == nil {
				_, err = change[os.Args[1]](context.Background(), file, os.Args[3], Options{Namespace: ns, Attach: AttachTC})
			}
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	remove := ktest.SharedRunDir()
	ktest.MoreAtOnce(2)
	code := m.Run()
	remove()
	os.Exit(code)
}

// testbed is a client and a server with a gateway between them.
//
//	client 10.0.0.2 ── in 10.0.0.1 │ gateway │ 198.51.100.1 out ── 198.51.100.9 server
type testbed struct {
	t                       *testing.T
	name                    string
	client, gateway, server *netns.Handle
}

const baseRules = `
inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
rules:
  - masquerade: 10.0.0.0/24
  - dnat: tcp 198.51.100.1:8080
    to: 10.0.0.2:80
  - map: 10.0.0.77 <-> 198.51.100.77
`

// newTestbed is one for a test that runs beside others: all in it is its own but the folder
// of what natkit writes.
func newTestbed(t *testing.T) *testbed {
	t.Helper()
	ktest.Root(t)
	t.Parallel()
	return makeTestbed(t)
}

// newTestbedAlone is one for a test beside which nothing runs.
func newTestbedAlone(t *testing.T) *testbed {
	t.Helper()
	ktest.Root(t)
	ktest.RunDir(t)
	return makeTestbed(t)
}

func makeTestbed(t *testing.T) *testbed {
	t.Helper()
	b := &testbed{t: t, name: ktest.Name(t)}
	b.client, b.gateway, b.server = b.namespace(), b.namespace(), b.namespace()
	if err := b.gateway.Pin(b.name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := Down(b.gateway); err != nil && !errors.Is(err, ErrDown) {
			t.Errorf("down: %v", err)
		}
		if err := netns.Delete(b.name); err != nil {
			t.Error(err)
		}
	})
	b.join("in", "10.0.0.1/24", b.client, "10.0.0.2/24")
	b.join("out", "198.51.100.1/24", b.server, "198.51.100.9/24")
	b.in(b.client, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 0, 0, 1)})
	})
	return b
}

// namespace makes one that ends with the test.
func (b *testbed) namespace() *netns.Handle {
	b.t.Helper()
	ns, err := netns.New()
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { ns.Close() })
	b.in(ns, func() error {
		lo, err := netlink.LinkByName("lo")
		return errors.Join(err, netlink.LinkSetUp(lo))
	})
	return ns
}

// join connects an interface of the gateway with eth0 of a neighbour.
func (b *testbed) join(name, addr string, peer *netns.Handle, peerAddr string) {
	b.t.Helper()
	b.link(b.gateway, name, addr, peer, "eth0", peerAddr)
}

// link connects two namespaces.
func (b *testbed) link(ns *netns.Handle, name, addr string, peer *netns.Handle, peerName, peerAddr string) {
	b.t.Helper()
	b.in(ns, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peerName, PeerNamespace: netlink.NsFd(peer.Fd())})
	})
	set := func(ns *netns.Handle, name, addr string) {
		b.in(ns, func() error {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			return errors.Join(err, netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		})
	}
	set(ns, name, addr)
	set(peer, peerName, peerAddr)
}

func (b *testbed) in(ns *netns.Handle, fn func() error) {
	b.t.Helper()
	if err := ns.Do(fn); err != nil {
		b.t.Fatal(err)
	}
}

func (b *testbed) parse(text string) *rulefile.File {
	b.t.Helper()
	file, err := rulefile.Parse("test.yaml", []byte(text))
	if err != nil {
		b.t.Fatal(err)
	}
	return file
}

func (b *testbed) options() Options { return Options{Namespace: b.gateway, Attach: AttachTC} }

// rewrite changes the record of what is up.
func (b *testbed) rewrite(change func(*record)) {
	b.t.Helper()
	rec, err := readRecord(b.gateway.Inode())
	if err != nil {
		b.t.Fatal(err)
	}
	change(rec)
	if err := rec.write(b.gateway.Inode()); err != nil {
		b.t.Fatal(err)
	}
}

func (b *testbed) up(text string, o Options) *Plan {
	b.t.Helper()
	p, err := Up(b.t.Context(), b.parse(text), text, o)
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

// bound opens a socket at an address that an earlier one, closed already, may still have: Go
// lets it go when the goroutine that waits at it has woken up.
func bound(open func() error) func() error {
	return func() error {
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			err := open()
			if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
				return err
			}
		}
	}
}

// listen opens a TCP socket that ends with the test.
func (b *testbed) listen(ns *netns.Handle, at string) net.Listener {
	b.t.Helper()
	var l net.Listener
	b.in(ns, bound(func() (err error) { l, err = net.Listen("tcp4", at); return err }))
	b.t.Cleanup(func() { l.Close() })
	return l
}

// serveTCP answers every TCP connection to an address of a namespace, then closes it.
func (b *testbed) serveTCP(ns *netns.Handle, at string, answer func(net.Conn)) {
	b.t.Helper()
	l := b.listen(ns, at)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				answer(c)
			}()
		}
	}()
}

// echo answers every connection with whom it came from.
func (b *testbed) echo(ns *netns.Handle, at string) {
	b.t.Helper()
	b.serveTCP(ns, at, func(c net.Conn) { fmt.Fprintln(c, c.RemoteAddr()) })
}

// ask connects and returns whom the other end saw.
func (b *testbed) ask(ns *netns.Handle, to string) (seen netip.AddrPort) {
	b.t.Helper()
	b.in(ns, func() error {
		c, err := net.DialTimeout("tcp4", to, 30*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return err
		}
		seen, err = netip.ParseAddrPort(strings.TrimSpace(line))
		return err
	})
	return seen
}

// ping sends an ICMP echo and waits for its answer.
func (b *testbed) ping(ns *netns.Handle, to string) { b.t.Helper(); b.pingAs(ns, to, 0x34) }

func (b *testbed) pingAs(ns *netns.Handle, to string, id byte) {
	b.t.Helper()
	b.in(ns, func() error {
		c, err := net.Dial("ip4:icmp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		request := []byte{8, 0, 0, 0, 0x12, id, 0, 1}
		sum := ^(uint16(0x0800+0x1200+1) + uint16(id))
		request[2], request[3] = byte(sum>>8), byte(sum)
		if _, err := c.Write(request); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		answer := make([]byte, 1500)
		n, err := c.Read(answer)
		if err == nil && (n < 8 || answer[n-8] != 0) {
			err = fmt.Errorf("answer of type %d", answer[n-8])
		}
		return err
	})
}

// state is what an instance could leave behind in the gateway.
func (b *testbed) state() string {
	b.t.Helper()
	var s strings.Builder
	b.in(b.gateway, func() error {
		forward, err1 := readSetting(settingForward)
		reserved, err2 := readSetting(settingReservedPorts)
		fmt.Fprintf(&s, "forward %s, reserved %q\n", forward, reserved)
		have, err3 := proxied()
		routes, err4 := netlink.RouteList(nil, netlink.FAMILY_V4)
		fmt.Fprintln(&s, have, len(routes))
		links, err5 := netlink.LinkList()
		for _, l := range links {
			qdiscs, err := netlink.QdiscList(l)
			err5 = errors.Join(err5, err)
			for _, q := range qdiscs {
				if q.Type() != "clsact" { // made below Linux 6.6, and left: it may serve others
					fmt.Fprint(&s, l.Attrs().Name, " ", q.Type(), " ")
				}
			}
			if result, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXIngress}); err == nil {
				fmt.Fprint(&s, len(result.Programs), " programs\n")
			}
		}
		return errors.Join(err1, err2, err3, err4, err5)
	})
	pins, err1 := filepath.Glob(pinsOf(b.gateway.Inode()) + "*")
	files, err2 := filepath.Glob(instancePath(b.gateway.Inode(), "") + "*")
	if err := errors.Join(err1, err2); err != nil {
		b.t.Fatal(err)
	}
	fmt.Fprintln(&s, pins, files)
	return s.String()
}

// Both engines translate what the same file says, and down leaves nothing behind.
func TestGateway(t *testing.T) {
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			before := b.state()
			o := b.options()
			o.Engine = engine
			b.up(baseRules, o)
			b.echo(b.server, "198.51.100.9:7")
			b.echo(b.client, "10.0.0.2:80")
			outside := netip.MustParseAddr("198.51.100.1")
			if seen := b.ask(b.client, "198.51.100.9:7"); seen.Addr() != outside {
				t.Errorf("the server saw %s, want %s", seen, outside)
			}
			if seen := b.ask(b.server, "198.51.100.1:8080"); seen.Addr().String() != "198.51.100.9" {
				t.Errorf("dnat: the inside server saw %s", seen)
			}
			if seen := b.ask(b.client, "198.51.100.1:8080"); seen.Addr() != outside {
				t.Errorf("hairpin: the inside server saw %s, want %s", seen, outside)
			}
			b.ping(b.client, "198.51.100.9")
			// The second address of the client is another one outside, for which the gateway
			// answers ARP.
			b.in(b.client, func() error {
				l, err := netlink.LinkByName("eth0")
				a, _ := netlink.ParseAddr("10.0.0.77/24")
				return errors.Join(err, netlink.AddrAdd(l, a))
			})
			b.ping(b.server, "198.51.100.77")

			s, err := ReadStatus(b.gateway)
			if err != nil || len(s.Problems) > 0 || s.Rules != 3 || s.Engine != engine {
				t.Errorf("status %+v, %v", s, err)
			}
			rules, err := Rules(b.gateway)
			if err != nil || len(rules) != 3 {
				t.Fatalf("rules %+v, %v", rules, err)
			}
			for _, r := range rules {
				if r.Sessions != nil && *r.Sessions == 0 || r.Uses != nil && *r.Uses == 0 || r.Sessions == nil && r.Uses == nil {
					t.Errorf("rule %s was not used", r.Rule)
				}
			}
			if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); !errors.Is(err, datapath.ErrExists) {
				t.Errorf("second up: %v", err)
			}
			if kept, err := Down(b.gateway); err != nil || kept != nil {
				t.Errorf("down: kept %q, %v", kept, err)
			}
			if after := b.state(); after != before {
				t.Errorf("after down:\n%s\nbefore up:\n%s", after, before)
			}
			if _, err := Down(b.gateway); !errors.Is(err, ErrDown) {
				t.Errorf("second down: %v", err)
			}
		})
	}
}

// Whenever natkit is killed while it brings an engine up, down puts everything back,
// and so does an up that finds the remains.
func TestKilled(t *testing.T) {
	b := newTestbed(t)
	before := b.state()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	half := 0
	for i := range 6 {
		var out strings.Builder
		cmd := exec.Command(self, "up", b.name, baseRules)
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// From before the first pin to about the end.
		wait := time.AfterFunc(time.Duration(i)*500*time.Millisecond, func() { cmd.Process.Kill() })
		err := cmd.Wait()
		wait.Stop()
		if err != nil && out.Len() > 0 {
			t.Fatalf("up said %s", out.String())
		}
		rec, _ := readRecord(b.gateway.Inode())
		if err != nil && b.state() != before {
			half++
		}
		if rec != nil && !rec.Whole && i%2 == 1 {
			b.up(baseRules, b.options())
			b.ping(b.client, "198.51.100.9")
		}
		if _, err := Down(b.gateway); err != nil && !errors.Is(err, ErrDown) {
			t.Fatalf("killed after %d x 500 ms: down: %v", i, err)
		}
		if after := b.state(); after != before {
			t.Fatalf("killed after %d x 500 ms, after down:\n%s\nbefore:\n%s", i, after, before)
		}
		if err == nil { // it had ended before it was to be killed
			break
		}
	}
	t.Logf("%d times something was left", half)
}

// Whoever changes an instance has it alone.
func TestTwoAtOnce(t *testing.T) {
	b := newTestbed(t)
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, b.options()); !errors.Is(err, journal.ErrLocked) {
		t.Errorf("up: %v, want %v", err, journal.ErrLocked)
	}
	if _, err := Down(b.gateway); !errors.Is(err, journal.ErrLocked) {
		t.Errorf("down: %v, want %v", err, journal.ErrLocked)
	}
	if err := in.remove(); err != nil {
		t.Fatal(err)
	}
}

// The folder of pins comes and goes with those who need it: whoever holds it has it.
func TestPinsComeAndGo(t *testing.T) {
	ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 300 {
					lock, dir, err := holdPins(1, unix.LOCK_SH)
					if err != nil {
						t.Error(err)
						return
					}
					if _, err := os.Stat(filepath.Dir(dir)); err != nil {
						t.Error(err)
					}
					if err := leavePins(lock); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
	})
}

// An apply that fails halfway, because an interface can't be attached, changes nothing.
func TestApplyNothing(t *testing.T) {
	b := newTestbed(t)
	var last *netns.Handle
	for i, name := range []string{"more", "last"} {
		ns, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		b.join(name, fmt.Sprintf("10.0.%d.1/24", i+1), ns, fmt.Sprintf("10.0.%d.2/24", i+1))
		last = ns
	}
	b.up(baseRules, b.options())
	before, rules := b.state(), func() []RuleUse { r, _ := Rules(b.gateway); return r }()
	// The last one's other end sends frames that are too long for XDP.
	b.in(last, func() error {
		l, err := netlink.LinkByName("eth0")
		return errors.Join(err, netlink.LinkSetMTU(l, 9000))
	})
	text := strings.Replace(baseRules, "[in]", "[in, more, last]", 1) + "  - snat: 10.0.1.0/24\n    to: 198.51.100.50\n"
	o := b.options()
	o.Attach = AttachXDP
	if _, err := Apply(t.Context(), b.parse(text), text, o); err == nil || !strings.Contains(err.Error(), `"last"`) || !strings.Contains(err.Error(), "--attach tc") {
		t.Fatalf("an interface that can't be attached: %v", err)
	}
	if after := b.state(); after != before {
		t.Errorf("after:\n%s\nbefore:\n%s", after, before)
	}
	if r, err := Rules(b.gateway); err != nil || len(r) != len(rules) {
		t.Errorf("rules %v, %v", r, err)
	}
	b.ping(b.client, "198.51.100.9")
	// The same without XDP goes, and an interface that is no longer named is let go.
	o.Attach = AttachTC
	if _, err := Apply(t.Context(), b.parse(text), text, o); err != nil {
		t.Fatal(err)
	}
	if p, err := Apply(t.Context(), b.parse(baseRules), baseRules, o); err != nil || len(p.Detached) != 2 || len(p.Removed) != 1 {
		t.Errorf("plan %+v, %v", p, err)
	}
	if after := strings.Replace(b.state(), " "+pastFolder(b.gateway.Inode()), "", 1); after != before {
		t.Errorf("after:\n%s\nbefore:\n%s", after, before)
	}
}

// What fails after the rules are in use takes nothing back that they need.
func TestApplyForwardingRefused(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.in(b.gateway, func() error { return writeSetting(settingForward, "0") })
	text := baseRules + "  - map: 10.0.0.78 <-> 198.51.100.78\n"
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const readOnly = `mount --bind /proc /proc && mount -o remount,ro,bind /proc && exec "$0" "$@"`
	out, err := exec.Command("unshare", "-m", "sh", "-c", readOnly, self, "apply", b.name, text).CombinedOutput()
	if err == nil || !strings.Contains(string(out), settingForward) {
		t.Fatalf("apply without forwarding: %v, %s", err, out)
	}
	rules, err := Rules(b.gateway)
	var proxies []datapath.ProxyNeighbour
	b.in(b.gateway, func() (err error) { proxies, err = proxied(); return err })
	if err != nil || len(rules) != 4 || len(proxies) != 2 {
		t.Errorf("rules %v, %v; ARP is answered for %v", rules, err, proxies)
	}
	if _, err := Apply(t.Context(), b.parse(text), text, b.options()); err != nil {
		t.Fatal(err)
	}
	b.ping(b.client, "198.51.100.9")
}

// An interface that was recreated is reported, and attached by an apply of the same file.
func TestInterfaceRecreated(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		return errors.Join(err, netlink.LinkDel(l))
	})
	problem := func() string {
		s, err := ReadStatus(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Problems, "; ")
	}
	if p := problem(); !strings.Contains(p, "out is gone") {
		t.Errorf("problems %q", p)
	}
	if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err == nil || !strings.Contains(err.Error(), `interface "out"`) {
		t.Errorf("apply without the interface: %v", err)
	}
	b.join("out", "198.51.100.1/24", b.server, "198.51.100.9/24")
	if p := problem(); !strings.Contains(p, "out was recreated") {
		t.Errorf("problems %q", p)
	}
	if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err != nil {
		t.Fatal(err)
	}
	if p := problem(); p != "" {
		t.Errorf("problems %q", p)
	}
	b.ping(b.client, "198.51.100.9")
}

// An interface that was renamed is not called gone: its packets are translated.
func TestInterfaceRenamed(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	b.rename("out", "wan.1")
	if s, err := ReadStatus(b.gateway); err != nil || !strings.Contains(strings.Join(s.Problems, "; "), "out was renamed to wan.1") {
		t.Errorf("problems %q, %v", s.Problems, err)
	}
}

// An interface that was moved to another namespace keeps its program there: that is reported, and
// whoever follows the machine takes it off.
func TestInterfaceMoved(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	attached := func() int {
		t.Helper()
		links, err := datapath.Attached(pinsOf(b.gateway.Inode()))
		if err != nil {
			t.Fatal(err)
		}
		return len(links)
	}
	if attached() == 0 {
		ktest.Unsupported(t, "tcx links, Linux 6.6")
	}
	other := b.namespace()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		return errors.Join(err, netlink.LinkSetNsFd(l, other.Fd()))
	})
	s, err := ReadStatus(b.gateway)
	if err != nil || !strings.Contains(strings.Join(s.Problems, "\n"), "was moved to another namespace and carries a program") {
		t.Errorf("problems %q, %v", s.Problems, err)
	}
	o := b.options()
	o.Wait, o.follow = true, true
	if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, o); err != nil {
		t.Fatal(err)
	}
	if n := attached(); n != 1 {
		t.Errorf("programs on %d interfaces", n)
	}
}

// A record without an engine is removed with its namespace; whoever had another folder for
// records may have removed the engine.
func TestRecordOfNamespaceGone(t *testing.T) {
	b := newTestbedAlone(t)
	b.up(baseRules, b.options())
	inode := b.gateway.Inode()
	if err := errors.Join(netns.Delete(b.name), b.gateway.Close(), datapath.Unload(pinsOf(inode))); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, patient, "the record to be removed", func() bool {
		if _, err := Clean(); err != nil {
			t.Fatal(err)
		}
		_, err := readRecord(inode)
		return errors.Is(err, ErrDown)
	})
	var err error
	if b.gateway, err = netns.Create(b.name); err != nil { // for the testbed's own removal
		t.Fatal(err)
	}
}

// What somebody else has put among the pins of a namespace that is gone stays, and stops no command in another one.
func TestForeignPinOfNamespaceGone(t *testing.T) {
	b := newTestbedAlone(t)
	b.up(baseRules, b.options())
	inode := b.gateway.Inode()
	foreign := filepath.Join(pinsOf(inode), "foreign")
	if err := errors.Join(os.Mkdir(foreign, 0o700), netns.Delete(b.name), b.gateway.Close()); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, patient, "the record to be removed", func() bool {
		if _, err := Clean(); err != nil {
			t.Fatal(err)
		}
		_, err := readRecord(inode)
		return errors.Is(err, ErrDown)
	})
	if n, err := Clean(); n != 0 || err != nil {
		t.Errorf("removed %d, %v", n, err)
	}
	if err := errors.Join(os.Remove(foreign), os.Remove(filepath.Dir(foreign))); err != nil {
		t.Error(err)
	}
	var err error
	if b.gateway, err = netns.Create(b.name); err != nil { // for the testbed's own removal
		t.Fatal(err)
	}
}

// An engine of a namespace that is gone holds memory until somebody looks.
func TestNamespaceGone(t *testing.T) {
	for name, older := range map[string]bool{"as made": false, "of an older natkit": true} {
		t.Run(name, func(t *testing.T) {
			b := newTestbedAlone(t)
			b.up(baseRules, b.options())
			dir := pinsOf(b.gateway.Inode())
			if older { // it knows by its links only, if the kernel has any
				links, _, err := datapath.Hold(dir)
				if err != nil {
					t.Fatal(err)
				}
				if links == 0 {
					ktest.Unsupported(t, "tc has no links before Linux 6.6")
				}
				if err := os.Remove(filepath.Join(dir, "maps", "lifetime")); err != nil {
					t.Fatal(err)
				}
			}
			there := func(when string) {
				t.Helper()
				// Others that use the same folder may have left something, but this is there.
				if _, err := Clean(); err != nil {
					t.Fatal(err)
				}
				if _, err := os.Stat(dir); err != nil {
					t.Fatalf("removed while %s: %v", when, err)
				}
			}
			there("it had a name")
			inode := b.gateway.Inode()
			if err := netns.Delete(b.name); err != nil {
				t.Fatal(err)
			}
			there("somebody held it")
			if err := b.gateway.Close(); err != nil {
				t.Fatal(err)
			}
			ktest.Wait(t, 20*time.Second, "the remains to be removed", func() bool {
				_, err := Clean()
				if err != nil {
					t.Fatal(err)
				}
				_, err = os.Stat(dir)
				return errors.Is(err, os.ErrNotExist)
			})
			if _, err := readRecord(inode); !errors.Is(err, ErrDown) {
				t.Errorf("record: %v", err)
			}
			ns, err := netns.Create(b.name) // for the testbed's own removal
			if err != nil {
				t.Fatal(err)
			}
			b.gateway = ns
		})
	}
}

// Who reads events hears of a session, and stops when it is to.
func TestEventsEnd(t *testing.T) {
	b := newTestbed(t)
	b.up(baseRules, b.options())
	e, err := Open(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	ctx, cancel := context.WithCancel(t.Context())
	heard, ended := make(chan rulefile.Event, 10), make(chan error, 1)
	go func() { ended <- e.Events(ctx, func(ev *rulefile.Event) bool { heard <- *ev; return true }) }()
	for id := byte(1); ; id++ { // the first may come before anybody listens
		b.pingAs(b.client, "198.51.100.9", id)
		select {
		case ev := <-heard:
			if ev.Kind != "created" || ev.Session.Protocol != rulefile.ICMP {
				t.Errorf("event %+v", ev)
			}
		case <-time.After(100 * time.Millisecond):
			continue
		}
		break
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("events go on though nobody wants them")
	}
}

// An `ip netns exec` gives what it runs mounts of its own, and a /sys without the BPF
// file system: the engine outlives it all the same.
func TestUpByIPNetns(t *testing.T) {
	b := newTestbed(t)
	ip := ktest.Tool(t, "ip")
	pins, _, err := holdPins(0, unix.LOCK_SH) // before the command, which could not mount one that stays
	if err != nil {
		t.Fatal(err)
	}
	defer leavePins(pins)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(ip, "netns", "exec", b.name, self, "up", b.name, baseRules).CombinedOutput(); err != nil {
		t.Fatalf("up: %v: %s", err, out)
	}
	b.ping(b.client, "198.51.100.9")
	if s, err := ReadStatus(b.gateway); err != nil || len(s.Problems) > 0 {
		t.Errorf("status %+v, %v", s, err)
	}
}

// Programs that somebody takes off, of one hook or of all, are reported, and put back by an
// apply of the same file.
func TestProgramsTakenOff(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Attach = AttachXDP
	b.up(baseRules, o)
	index := map[string]int{}
	b.in(b.gateway, func() error {
		for _, name := range []string{"in", "out"} {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			index[name] = l.Attrs().Index
		}
		return nil
	})
	takeOff := func(hook datapath.Hook, name string) {
		t.Helper()
		pin := filepath.Join(pinsOf(b.gateway.Inode()), "links", fmt.Sprintf("%s-%d", hook, index[name]))
		l, err := link.LoadPinnedLink(pin, nil)
		if errors.Is(err, os.ErrNotExist) && hook == datapath.HookTC { // below Linux 6.6
			b.in(b.gateway, func() error { return datapath.DetachFilter(index[name]) })
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	problems := func(want ...string) {
		t.Helper()
		s, err := ReadStatus(b.gateway)
		if err != nil || len(s.Problems) != len(want) {
			t.Fatalf("problems %q, %v, want %q", s.Problems, err, want)
		}
		for i, w := range want {
			if !strings.Contains(s.Problems[i], w) {
				t.Errorf("problem %q, want %q", s.Problems[i], w)
			}
		}
	}
	again := func() {
		t.Helper()
		if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, Options{Namespace: b.gateway}); err != nil {
			t.Fatal(err)
		}
		problems()
	}
	problems()
	takeOff(datapath.HookXDP, "in")
	problems("xdp hook of interface in:")
	again()
	for name := range index {
		takeOff(datapath.HookXDP, name)
		takeOff(datapath.HookTC, name)
	}
	problems("tc hook of interface in:", "tc hook of interface out:")
	again()
}

// filter puts a program of the engine on an interface as Linux 6.5 and older have it: as a filter,
// which no pin takes off.
func (b *testbed) filter(name, program string) {
	b.t.Helper()
	p, err := ebpf.LoadPinnedProgram(filepath.Join(pinsOf(b.gateway.Inode()), "programs", program), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer p.Close()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		index := l.Attrs().Index
		clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
		if err := netlink.QdiscAdd(clsact); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		return netlink.FilterReplace(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 0x6e61, Priority: 1, Protocol: unix.ETH_P_ALL},
			Fd:          p.FD(), Name: "natkit", DirectAction: true,
		})
	})
}

// filters are the hooks of an interface that have such a filter.
func (b *testbed) filters(name string) (hooks []datapath.Hook) {
	b.t.Helper()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		hooks, err = datapath.Hooks(nil, l.Attrs().Index)
		return err
	})
	return hooks
}

// A filter goes with the interface from the rules, and with the engine, whatever the interface is
// called by then.
func TestFilters(t *testing.T) {
	b := newTestbed(t)
	b.join("in2", "10.0.2.1/24", b.namespace(), "10.0.2.2/24")
	b.up(strings.Replace(baseRules, "inside: [in]", "inside: [in, in2]", 1), b.options())
	for _, name := range []string{"in", "in2"} {
		b.filter(name, "tc_inside")
		if got := b.filters(name); len(got) != 1 {
			t.Fatalf("filters of %s: %q", name, got)
		}
	}
	if _, err := Apply(t.Context(), b.parse(baseRules), baseRules, b.options()); err != nil {
		t.Fatal(err)
	}
	if in, in2 := b.filters("in"), b.filters("in2"); len(in) != 1 || len(in2) != 0 {
		t.Errorf("filters of in %q, and of in2, which the rules do not name any more, %q", in, in2)
	}
	b.in(b.gateway, func() error {
		in, err := netlink.LinkByName("in")
		return errors.Join(err, netlink.LinkSetDown(in), netlink.LinkSetName(in, "renamed"))
	})
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	if got := b.filters("renamed"); len(got) != 0 {
		t.Errorf("filters after down: %q", got)
	}
}

// A port of a bridge has no packets of its own to translate.
func TestPortOfBridge(t *testing.T) {
	b := newTestbed(t)
	b.in(b.gateway, func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "lan"}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		port, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr("10.0.0.1/24")
		return errors.Join(err, netlink.AddrDel(port, a), netlink.LinkSetMaster(port, bridge), netlink.AddrAdd(bridge, a), netlink.LinkSetUp(bridge))
	})
	_, err := Up(t.Context(), b.parse(baseRules), baseRules, b.options())
	if err == nil || !strings.Contains(err.Error(), `"in" is a port of the bridge "lan"`) {
		t.Errorf("up: %v", err)
	}
	b.up(strings.Replace(baseRules, "inside: [in]", "inside: [lan]", 1), b.options())
	b.ping(b.client, "198.51.100.9")
}

// Whenever natkit is killed while it takes an engine down, up finds it whole as it was, or
// brings it up again.
func TestDownKilled(t *testing.T) {
	for _, engine := range []Engine{EngineEBPF, EngineNFT} {
		t.Run(string(engine), func(t *testing.T) {
			b := newTestbed(t)
			b.echo(b.server, "198.51.100.9:7")
			o := Options{Namespace: b.gateway, Engine: engine, Attach: AttachTC}
			b.up(baseRules, o)
			begun := time.Now()
			if _, err := Down(b.gateway); err != nil {
				t.Fatal(err)
			}
			const kills = 12
			step := max(time.Since(begun)*2, 20*time.Millisecond) / kills // to begin takes the program a while, too
			b.up(baseRules, o)
			for i := range kills {
				cmd := exec.Command(os.Args[0], "down", b.name, baseRules)
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				time.Sleep(step * time.Duration(i))
				cmd.Process.Kill()
				cmd.Wait()
				if _, err := Up(t.Context(), b.parse(baseRules), baseRules, o); err != nil && !strings.Contains(err.Error(), "up already") {
					t.Fatalf("killed after %v: up: %v", step*time.Duration(i), err)
				}
				if seen := b.ask(b.client, "198.51.100.9:7"); seen.Addr().String() != "198.51.100.1" {
					t.Fatalf("killed after %v, and up again: the server sees %v", step*time.Duration(i), seen)
				}
			}
			if _, err := Down(b.gateway); err != nil {
				t.Fatal(err)
			}
		})
	}
}
