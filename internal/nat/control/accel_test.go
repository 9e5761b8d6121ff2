// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
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
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// accelRules are the kernel's own NAT and filter, as somebody may have set them up.
const accelRules = `
table ip nat {
  chain pre { type nat hook prerouting priority -100; iifname "out" tcp dport 8080 dnat to 10.0.0.2:80; iifname "out" udp dport 8080 dnat to 10.0.0.2:80; }
  chain post { type nat hook postrouting priority 100; oifname "out" masquerade; }
}
table ip filter {
  chain forward { type filter hook forward priority 0; policy drop
    ct state invalid drop
    ct state established,related accept
    iifname "in" accept
    ct status dnat accept
  }
}
`

// newAccelTestbed is a testbed whose gateway is one by the kernel's means.
func newAccelTestbed(t *testing.T) *testbed {
	t.Helper()
	return newTestbed(t).byKernel()
}

// byKernel has the kernel forward and translate.
func (b *testbed) byKernel() *testbed {
	b.t.Helper()
	b.in(b.gateway, func() error { return writeSetting(settingForward, "1") })
	b.nft(accelRules)
	return b
}

func (b *testbed) run(stdin, name string, args ...string) {
	b.t.Helper()
	b.in(b.gateway, func() error {
		cmd := exec.Command(ktest.Tool(b.t, name), args...)
		cmd.Stdin = strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %v: %w: %s", name, args, err, out)
		}
		return nil
	})
}

func (b *testbed) nft(rules string) { b.t.Helper(); b.run(rules, ktest.Tool(b.t, "nft"), "-f", "-") }

func (b *testbed) accelOptions() AccelOptions {
	return AccelOptions{Namespace: b.gateway, Interfaces: []string{"in", "out"}, Attach: AttachTC, Flows: MinAccelFlows(), TCPLiberal: true}
}

func (b *testbed) accelOn(o AccelOptions) *AccelPlan {
	b.t.Helper()
	p, err := AccelOn(b.t.Context(), o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		b.explain()
		if _, err := AccelOff(b.gateway); err != nil && !errors.Is(err, ErrAccelOff) {
			b.t.Errorf("accel off: %v", err)
		}
	})
	return p
}

func (b *testbed) accelStats() *rulefile.AccelStats {
	b.t.Helper()
	s, err := ReadAccelStatus(b.gateway)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, p := range s.Problems {
		b.t.Error(p)
	}
	return s.Stats
}

// parrot answers datagrams with what they say and whom they came from.
func (b *testbed) parrot(ns *netns.Handle, at string) { b.t.Helper(); b.parrotNamed(ns, at, "") }

// parrotNamed is a parrot that adds who it is.
func (b *testbed) parrotNamed(ns *netns.Handle, at, name string) {
	b.t.Helper()
	var c net.PacketConn
	b.in(ns, bound(func() (err error) { c, err = net.ListenPacket("udp4", at); return err }))
	b.t.Cleanup(func() { c.Close() })
	go func() {
		p := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(p)
			if err != nil {
				return
			}
			c.WriteTo(append(p[:n:n], from.String()+name...), from)
		}
	}()
}

// dialogue is one end of a flow of numbered datagrams.
type dialogue struct {
	conn   net.Conn
	number uint64
}

func (b *testbed) dialogue(ns *netns.Handle, from, to string) *dialogue {
	b.t.Helper()
	d := net.Dialer{}
	if from != "" {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from))
	}
	var c net.Conn
	b.in(ns, func() (err error) { c, err = d.DialContext(b.t.Context(), "udp4", to); return err })
	b.t.Cleanup(func() { c.Close() })
	return &dialogue{conn: c}
}

// ask sends the next number and returns whom the parrot saw, "" if no answer comes in
// time.
func (k *dialogue) ask(limit time.Duration) string {
	k.number++
	p := make([]byte, 2048)
	binary.BigEndian.PutUint64(p, k.number)
	if _, err := k.conn.Write(p[:8]); err != nil {
		return ""
	}
	k.conn.SetReadDeadline(time.Now().Add(limit))
	for {
		n, err := k.conn.Read(p)
		if errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err != nil {
			return ""
		}
		if n > 8 && binary.BigEndian.Uint64(p) == k.number {
			return string(p[8:n])
		}
	}
}

// within is the testbed for a subtest, which fails by itself.
func (b *testbed) within(t *testing.T) *testbed {
	inner := *b
	inner.t = t
	t.Cleanup(inner.explain)
	return &inner
}

// explain adds to a failure what there is to see of acceleration.
func (b *testbed) explain() {
	if !b.t.Failed() {
		return
	}
	for _, f := range b.entries() {
		b.t.Logf("entry %v", f)
	}
	shown := 0
	err := accelEntries(b.gateway, func(s *rulefile.AccelEntry) bool { b.t.Logf("entry %+v", *s); shown++; return shown < 30 })
	s, err2 := ReadAccelStatus(b.gateway)
	if err := errors.Join(err, err2); err != nil {
		b.t.Log(err)
		return
	}
	b.t.Logf("problems %q, packets %v", s.Problems, s.Stats.Reasons)
}

// accelerated talks until both directions of these flows use the fast path, and returns
// whom the parrot saw, each time the same if there is one flow.
func (b *testbed) accelerated(flows ...*dialogue) (seen string) {
	b.t.Helper()
	var conns []net.Conn
	for _, k := range flows {
		conns = append(conns, k.conn)
	}
	ktest.Wait(b.t, 30*time.Second, "flows use the fast path", func() bool {
		for range 20 {
			for _, k := range flows {
				answer := k.ask(10 * time.Second)
				if answer == "" {
					b.t.Fatal("no answer")
				}
				if seen != "" && len(flows) == 1 && answer != seen {
					b.t.Fatalf("the server saw %s, before %s", answer, seen)
				}
				seen = answer
			}
		}
		return b.valid(conns...) >= 2*len(flows)
	})
	return seen
}

// valid counts the directions of these flows, by who began them, that use the fast path.
func (b *testbed) valid(flows ...net.Conn) (n int) {
	b.t.Helper()
	local := map[string]bool{}
	for _, c := range flows {
		local[c.LocalAddr().Network()+c.LocalAddr().String()] = true
	}
	err := accelEntries(b.gateway, func(s *rulefile.AccelEntry) bool {
		if proto := s.Protocol.String(); s.Valid && (local[proto+s.Source.String()] || local[proto+s.DestinationAfter.String()]) {
			n++
		}
		return true
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// A flow is translated as before, once it uses the fast path; off puts everything back.
func TestAccelUDP(t *testing.T) {
	b := newAccelTestbed(t)
	before := b.state()
	b.parrot(b.server, "198.51.100.9:7000")
	b.parrot(b.client, "10.0.0.2:80")
	out, in := b.dialogue(b.client, "10.0.0.2:6000", "198.51.100.9:7000"), b.dialogue(b.server, "198.51.100.9:6000", "198.51.100.1:8080")
	p := b.accelOn(b.accelOptions())
	if len(p.Changes) != 1 || p.Changes[0].Setting != settingLiberal || !p.TCP {
		t.Errorf("changes %v", p.Changes)
	}
	if seen := b.accelerated(out); seen != "198.51.100.1:6000" {
		t.Errorf("the server sees %s", seen)
	}
	if seen := b.accelerated(in); seen != "198.51.100.9:6000" {
		t.Errorf("the client sees %s", seen)
	}
	if s := b.accelStats(); s.Reasons["forwarded"] < 20 || s.Bytes < 20*36 || s.Known < 4 {
		t.Errorf("%+v", s)
	}
	err := accelEntries(b.gateway, func(s *rulefile.AccelEntry) bool {
		if s.Valid && s.SourceAfter == s.Source && s.DestinationAfter == s.Destination {
			t.Errorf("no translation: %+v", s)
		}
		return true
	})
	if err != nil {
		t.Error(err)
	}
	for what, err := range map[string]error{"on twice": second(AccelOn(t.Context(), b.accelOptions())), "plan when on": second(PlanAccel(b.accelOptions()))} {
		if err == nil || !strings.Contains(err.Error(), "accel off") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Up(t.Context(), b.parse(baseRules), baseRules, b.options()); err == nil || !strings.Contains(err.Error(), "accel off") {
		t.Errorf("up: %v", err)
	}
	for what, err := range map[string]error{"down": second(Down(b.gateway)), "status": second(ReadStatus(b.gateway)), "open": second(Open(b.gateway))} {
		if !errors.Is(err, errAccelOn) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if kept, err := AccelOff(b.gateway); err != nil || len(kept) > 0 {
		t.Errorf("off: %v, kept %v", err, kept)
	}
	if after := b.state(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	for _, k := range []*dialogue{out, in} {
		if k.ask(10*time.Second) == "" {
			t.Error("no answer after off")
		}
	}
	for what, err := range map[string]error{"off": second(AccelOff(b.gateway)), "status": second(ReadAccelStatus(b.gateway))} {
		if !errors.Is(err, ErrAccelOff) {
			t.Errorf("%s when off: %v", what, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// Bulk data arrives whole both ways, with segments that the devices have merged; the
// entry's life is that of an idle connection though connection tracking has missed what
// was acknowledged; and the end of the connection is the stack's.
func TestAccelTCP(t *testing.T) {
	b := newAccelTestbed(t)
	for _, c := range []struct {
		name     string
		liberal  bool
		policy   string // a time-out of the rules' own
		min, max uint32 // seconds that an idle connection has
	}{
		{name: "strict", min: 100000, max: 432000},
		{name: "liberal", liberal: true, min: 100000, max: 432000},
		{name: "own time-out", liberal: true, min: 900, max: 1000, policy: `
table ip own {
  ct timeout own { protocol tcp; l3proto ip; policy = { established: 1000 }; }
  chain pre { type filter hook prerouting priority 0; ip protocol tcp ct timeout set "own"; }
}
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, liberal := b.within(t), c.liberal
			b.nft(c.policy)
			o := b.accelOptions()
			o.TCPLiberal = liberal
			p := b.accelOn(o)
			if p.TCP != liberal || (len(p.Warnings) > 0) == liberal {
				t.Errorf("%+v", p)
			}
			b.transfer(t, b.client, b.server, "198.51.100.9:0", func() {
				stats := b.accelStats()
				if liberal && stats.Reasons["forwarded"] < 100 || !liberal && stats.Reasons["forwarded"] > 0 {
					t.Errorf("%v", stats.Reasons)
				}
				if !liberal && stats.Reasons["tcp-strict"] < 100 {
					t.Errorf("%v", stats.Reasons)
				}
				ktest.Wait(t, 20*time.Second, "the entry has the life of an idle connection", func() bool {
					return slices.ContainsFunc(b.entries(), func(f *netlink.ConntrackFlow) bool {
						return f.Forward.Protocol == unix.IPPROTO_TCP && f.TimeOut > c.min && f.TimeOut <= c.max
					})
				})
			})
			ktest.Wait(t, 20*time.Second, "the entry ends with its connection", func() bool {
				return !slices.ContainsFunc(b.entries(), func(f *netlink.ConntrackFlow) bool {
					return f.Forward.Protocol == unix.IPPROTO_TCP && f.TimeOut > 121
				})
			})
			if _, err := AccelOff(b.gateway); err != nil {
				t.Fatal(err)
			}
			b.in(b.gateway, func() error {
				value, err := readSetting(settingLiberal)
				if value != "0" {
					t.Errorf("%s is %s after off", settingLiberal, value)
				}
				return err
			})
		})
	}
}

func (b *testbed) entries() []*netlink.ConntrackFlow {
	b.t.Helper()
	var out []*netlink.ConntrackFlow
	b.in(b.gateway, func() (err error) {
		out, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		return err
	})
	return out
}

// transfer sends some megabytes there, and what came of them back, and compares. Then
// is called while the connection is idle.
func (b *testbed) transfer(t *testing.T, from, to *netns.Handle, at string, then func()) {
	t.Helper()
	var l net.Listener
	b.in(to, bound(func() (err error) { l, err = net.Listen("tcp4", at); return err }))
	defer l.Close()
	data := make([]byte, 8<<20)
	rand.Read(data)
	var c net.Conn
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		got := make([]byte, len(data))
		if _, err := io.ReadFull(c, got); err == nil {
			c.Write(got)
		}
		io.Copy(io.Discard, c)
	}()
	b.in(from, func() (err error) { c, err = net.DialTimeout("tcp4", l.Addr().String(), 10*time.Second); return err })
	defer c.Close()
	c.SetDeadline(time.Now().Add(60 * time.Second))
	go c.Write(data)
	got := make([]byte, len(data))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if sha256.Sum256(got) != sha256.Sum256(data) {
		t.Error("other data came back")
	}
	then()
}

// TCP goes on when acceleration ends, with rules that drop what is invalid, though
// connection tracking has not followed its windows: also where one end has said already
// that it sends no more.
func TestAccelOffTCP(t *testing.T) {
	b := newAccelTestbed(t)
	set := func(value string) {
		b.in(b.gateway, func() error { return writeSetting(settingLiberal, value) })
	}
	for _, end := range []struct {
		name                          string
		halfClosed, liberal, tampered bool // the setting was 1 before; somebody sets it to 0 since
	}{{name: "open"}, {name: "half closed", halfClosed: true}, {name: "strict since", tampered: true}, {name: "strict since, and liberal before", liberal: true, tampered: true}} {
		t.Run(end.name, func(t *testing.T) {
			b := b.within(t)
			if end.liberal {
				set("1")
			}
			b.accelOn(b.accelOptions())
			before, after := make([]byte, 16<<20), make([]byte, 16<<20)
			rand.Read(before)
			rand.Read(after)
			// Windows that are small against what is sent unseen.
			small := func(_, _ string, c syscall.RawConn) (err error) {
				c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 128<<10) })
				return err
			}
			var l net.Listener
			b.in(b.server, func() (err error) {
				l, err = (&net.ListenConfig{Control: small}).Listen(t.Context(), "tcp4", "198.51.100.9:0")
				return err
			})
			defer l.Close()
			off := make(chan struct{})
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				io.Copy(c, c)
				<-off
				c.Write(after) // if there is somebody yet
			}()
			var c net.Conn
			b.in(b.client, func() (err error) {
				c, err = (&net.Dialer{Control: small, Timeout: 10 * time.Second}).Dial("tcp4", l.Addr().String())
				return err
			})
			defer c.Close()
			receive := func(want []byte) {
				t.Helper()
				c.SetDeadline(time.Now().Add(30 * time.Second))
				got := make([]byte, len(want))
				if n, err := io.ReadFull(c, got); err != nil {
					t.Fatalf("after %d bytes: %v", n, err)
				}
				if sha256.Sum256(got) != sha256.Sum256(want) {
					t.Fatal("other data came")
				}
			}
			go c.Write(before)
			receive(before)
			if n := b.accelStats().Reasons["forwarded"]; n < 100 {
				t.Errorf("%d packets forwarded", n)
			}
			if end.halfClosed {
				if err := c.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if end.tampered {
				set("0")
			}
			if kept, err := AccelOff(b.gateway); err != nil || len(kept) > 0 {
				t.Fatalf("kept %q, %v", kept, err)
			}
			b.in(b.gateway, func() error {
				value, err := readSetting(settingLiberal)
				if value != "0" {
					t.Errorf("%s is %s after off", settingLiberal, value)
				}
				return err
			})
			close(off)
			if !end.halfClosed {
				go c.Write(after)
			}
			receive(after)
		})
	}
}

// Where open connections can't be excepted, their windows go on not being looked at, and
// that is said.
func TestAccelOffUnmarked(t *testing.T) {
	b := newAccelTestbed(t)
	b.in(b.gateway, func() error {
		c, err := settingChange(settingLiberal, "1", "")
		if err != nil {
			return err
		}
		if err := c.make(); err != nil {
			return err
		}
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all, fewer [2]unix.CapUserData
		if err := unix.Capget(&head, &all[0]); err != nil {
			return err
		}
		fewer = all
		fewer[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&head, &fewer[0]); err != nil {
			return err
		}
		kept, err := c.unmake(nil)
		if err := errors.Join(err, unix.Capset(&head, &all[0])); err != nil {
			return err
		}
		if !strings.Contains(kept, "`sysctl -w "+settingLiberal+"=0`") {
			t.Errorf("kept %q", kept)
		}
		value, err := readSetting(settingLiberal)
		if value != "1" {
			t.Errorf("%s is %s", settingLiberal, value)
		}
		if kept, again := c.unmake(nil); kept != "" || again != nil {
			t.Errorf("kept %q, %v", kept, again)
		}
		return err
	})
}

// What changes in the kernel takes effect though packets go past it: within a second when
// the machine is not busy, which is printed.
func TestAccelObeys(t *testing.T) {
	b := newAccelTestbed(t)
	b.parrot(b.server, "198.51.100.9:7000")
	b.accelOn(b.accelOptions())
	stops := func(name string, change, back func()) {
		t.Run(name, func(t *testing.T) {
			b := b.within(t)
			k := b.dialogue(b.client, "", "198.51.100.9:7000")
			b.accelerated(k)
			change()
			begin := time.Now()
			last := begin
			ktest.Wait(t, 30*time.Second, "the change takes effect", func() bool {
				if k.ask(300*time.Millisecond) != "" {
					last = time.Now()
				}
				return time.Since(last) > time.Second
			})
			t.Logf("the last packet came through %v after the change", last.Sub(begin).Round(time.Millisecond))
			back()
			ktest.Wait(t, 30*time.Second, "packets come through again", func() bool { return k.ask(300*time.Millisecond) != "" })
			k.conn.Close()
		})
	}
	stops("new rule", func() { b.nft("insert rule ip filter forward udp dport 7000 drop") }, func() { b.nft("flush chain ip filter forward; add rule ip filter forward accept") })
	stops("rule for answers", func() { b.nft("insert rule ip filter forward udp sport 7000 drop") }, func() { b.nft("flush chain ip filter forward; add rule ip filter forward accept") })
	route := &netlink.Route{Dst: &net.IPNet{IP: net.IPv4(198, 51, 100, 9), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_BLACKHOLE}
	stops("route", func() { b.in(b.gateway, func() error { return netlink.RouteAdd(route) }) },
		func() { b.in(b.gateway, func() error { return netlink.RouteDel(route) }) })
	stops("neighbour", func() { b.neighbour("02:00:00:00:00:99") }, func() { b.neighbour("") })

	for _, name := range []string{"deleted entry", "flushed table"} {
		t.Run(name, func(t *testing.T) {
			b := b.within(t)
			k := b.dialogue(b.client, "", "198.51.100.9:7000")
			b.accelerated(k)
			// What the next entry is to look like distinguishes it from the one that is deleted.
			b.nft(`insert rule ip nat post oifname "out" udp dport 7000 masquerade to :2000-2099`)
			args := []string{"-D", "-p", "udp", "--dport", "7000"}
			if name == "flushed table" {
				args = []string{"-F"}
			}
			b.run("", "conntrack", args...)
			begin := time.Now()
			seen := ""
			t.Cleanup(func() { t.Logf("the server saw %q last", seen) })
			ktest.Wait(t, 30*time.Second, "packets are the new entry's", func() bool {
				seen = k.ask(300 * time.Millisecond)
				return strings.HasPrefix(seen, "198.51.100.1:20")
			})
			t.Logf("the first packet of the new entry came through %v after the change", time.Since(begin).Round(time.Millisecond))
			if seen = b.accelerated(k); !strings.HasPrefix(seen, "198.51.100.1:20") {
				t.Errorf("the server sees %s", seen)
			}
			k.conn.Close()
			b.nft("flush chain ip nat post; add rule ip nat post oifname \"out\" masquerade")
			b.run("", "conntrack", "-F")
		})
	}
}

// neighbour makes the gateway believe that the server has another MAC; "" ends that.
func (b *testbed) neighbour(mac string) {
	b.t.Helper()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		n := &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET, IP: net.IPv4(198, 51, 100, 9), State: netlink.NUD_PERMANENT}
		if mac == "" {
			return netlink.NeighDel(n)
		}
		n.HardwareAddr, _ = net.ParseMAC(mac)
		return netlink.NeighSet(n)
	})
}

// bridge makes one in the gateway, with a container at each of its ports veth1, veth2, ...
func (b *testbed) bridge(name, addr string, peers ...string) (containers []*netns.Handle) {
	b.t.Helper()
	gateway, _, _ := net.ParseCIDR(addr)
	b.in(b.gateway, func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(addr)
		return errors.Join(err, netlink.AddrAdd(bridge, addr), netlink.LinkSetUp(bridge))
	})
	for i, peer := range peers {
		container, veth := b.namespace(), fmt.Sprintf("veth%d", i+1)
		b.link(b.gateway, veth, fmt.Sprintf("169.254.9.%d/32", i+1), container, "eth0", peer)
		b.in(b.gateway, func() error {
			port, err1 := netlink.LinkByName(veth)
			bridge, err2 := netlink.LinkByName(name)
			return errors.Join(err1, err2, netlink.LinkSetMaster(port, bridge))
		})
		b.in(container, func() error { return addRoute("0.0.0.0/0", gateway.String()) })
		containers = append(containers, container)
	}
	return containers
}

func addRoute(to, via string) error {
	dst, err := netlink.ParseIPNet(to)
	return errors.Join(err, netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)}))
}

// A port published by a container's bridge: the bridge is named, its ports are not.
func TestAccelBridge(t *testing.T) {
	b := newAccelTestbed(t)
	container := b.bridge("docker0", "172.17.0.1/16", "172.17.0.2/16")[0]
	b.nft(`insert rule ip nat pre iifname "out" udp dport 8081 dnat to 172.17.0.2:81
insert rule ip nat pre iifname "out" tcp dport 8082 dnat to 172.17.0.2:82
insert rule ip filter forward iifname "docker0" accept`)
	o := b.accelOptions()
	o.Interfaces = []string{"veth1", "out"}
	if _, err := PlanAccel(o); err == nil || !strings.Contains(err.Error(), "docker0") {
		t.Errorf("a port of the bridge: %v", err)
	}
	o.Interfaces = []string{"docker0", "out"}
	p := b.accelOn(o)
	b.in(b.gateway, func() error {
		early, _ := readSetting(settingBridge)
		if told := slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.Contains(w, settingBridge) }); told != (early == "1") {
			t.Errorf("%s is %q: %q", settingBridge, early, p.Warnings)
		}
		return nil
	})
	b.parrot(container, "172.17.0.2:81")
	b.parrot(b.server, "198.51.100.9:7000")
	if seen := b.accelerated(b.dialogue(b.server, "198.51.100.9:6000", "198.51.100.1:8081")); seen != "198.51.100.9:6000" {
		t.Errorf("the container sees %s", seen)
	}
	if seen := b.accelerated(b.dialogue(container, "172.17.0.2:6000", "198.51.100.9:7000")); seen != "198.51.100.1:6000" {
		t.Errorf("the server sees %s", seen)
	}
	before := b.accelStats().Reasons["forwarded"]
	b.transfer(t, container, b.server, "198.51.100.9:0", func() {
		if n := b.accelStats().Reasons["forwarded"]; n < before+100 {
			t.Errorf("%d packets forwarded of a transfer", n-before)
		}
	})
}

// A table that is too small costs speed: every datagram is answered all the same.
func TestAccelFull(t *testing.T) {
	b := newAccelTestbed(t)
	b.parrot(b.server, "198.51.100.9:7000")
	b.accelOn(b.accelOptions())
	var talks []*dialogue
	for range MinAccelFlows() + MinAccelFlows()/2 {
		talks = append(talks, b.dialogue(b.client, "", "198.51.100.9:7000"))
	}
	for _, k := range talks {
		for range 12 { // in a row: only eight within a second make a direction eligible
			if k.ask(10*time.Second) == "" {
				t.Fatal("no answer")
			}
		}
	}
	if s := b.accelStats(); s.Known > 2*MinAccelFlows() || s.Known < MinAccelFlows() {
		t.Errorf("%d remembered of %d", s.Known, 2*MinAccelFlows())
	}
}

// A flow with packets now and then outlives its time-out, and one without does not.
func TestAccelTimeouts(t *testing.T) {
	b := newAccelTestbed(t)
	b.in(b.gateway, func() error {
		return errors.Join(writeSetting("net.netfilter.nf_conntrack_udp_timeout", "8"), writeSetting("net.netfilter.nf_conntrack_udp_timeout_stream", "8"))
	})
	b.parrot(b.server, "198.51.100.9:7000")
	b.accelOn(b.accelOptions())
	busy, silent := b.dialogue(b.client, "10.0.0.2:6001", "198.51.100.9:7000"), b.dialogue(b.client, "10.0.0.2:6002", "198.51.100.9:7000")
	b.accelerated(busy, silent)
	// Another entry of the busy one would have another port from now on.
	b.nft(`insert rule ip nat post oifname "out" udp dport 7000 masquerade to :2000-2099`)
	ktest.Wait(t, 40*time.Second, "the entry of the silent flow times out", func() bool {
		if seen := busy.ask(10 * time.Second); seen != "198.51.100.1:6001" {
			t.Fatalf("the server sees %s: the busy flow's entry has timed out", seen)
		}
		return !slices.ContainsFunc(b.entries(), func(f *netlink.ConntrackFlow) bool { return f.Forward.SrcPort == 6002 })
	})
	if seen := silent.ask(10 * time.Second); !strings.HasPrefix(seen, "198.51.100.1:20") {
		t.Errorf("the server sees %s: the silent flow's entry has not timed out", seen)
	}
}

// The same port again, after the connection before has ended, with another translation.
func TestAccelPortReused(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	b.echo(b.server, "198.51.100.9:7000")
	connect := func() (seen string) {
		b.in(b.client, func() error {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.2:6000")), Timeout: 10 * time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
				c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
				return err
			}}
			c, err := d.Dial("tcp4", "198.51.100.9:7000")
			if err != nil {
				return err
			}
			line, err := io.ReadAll(c)
			seen = strings.TrimSpace(string(line))
			c.(*net.TCPConn).SetLinger(0) // no TIME_WAIT here
			return errors.Join(err, c.Close())
		})
		return seen
	}
	if seen := connect(); seen != "198.51.100.1:6000" {
		t.Errorf("the server sees %s", seen)
	}
	b.nft(`insert rule ip nat post oifname "out" tcp dport 7000 masquerade to :2000-2099`)
	b.run("", "conntrack", "-F")
	if seen := connect(); !strings.HasPrefix(seen, "198.51.100.1:20") {
		t.Errorf("the server sees %s", seen)
	}
}

// A flow that a helper follows, and others that connection tracking does not forward.
func TestAccelLeavesAlone(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	b.parrot(b.gateway, "10.0.0.1:7000")
	k := b.dialogue(b.client, "10.0.0.2:6000", "10.0.0.1:7000")
	reason := func(name string, ask func()) {
		t.Helper()
		ktest.Wait(t, 20*time.Second, "packets are counted as "+name, func() bool {
			ask()
			return b.accelStats().Reasons[name] > 0
		})
	}
	reason("local", func() { k.ask(10 * time.Second) })
	reason("protocol", func() { b.ping(b.client, "198.51.100.9") })
	large := b.dialogue(b.client, "10.0.0.2:6001", "198.51.100.9:7000")
	b.parrot(b.server, "198.51.100.9:7000")
	reason("special", func() { large.conn.Write(make([]byte, 3000)) })
	if n := b.accelStats().Reasons["forwarded"]; n > 0 {
		t.Errorf("%d packets used the fast path", n)
	}

	helper := `
table ip helper {
  ct helper tftp { type "tftp" protocol udp; }
  chain pre { type filter hook prerouting priority 0
    udp dport 69 ct helper set "tftp"
  }
}
`
	b.in(b.gateway, func() error {
		cmd := exec.Command(ktest.Tool(t, "nft"), "-f", "-")
		cmd.Stdin = strings.NewReader(helper)
		if out, err := cmd.CombinedOutput(); err != nil {
			ktest.Unsupported(t, "no helper for TFTP: %s", bytes.TrimSpace(out))
		}
		return nil
	})
	b.parrot(b.server, "198.51.100.9:69")
	tftp := b.dialogue(b.client, "10.0.0.2:6002", "198.51.100.9:69")
	reason("helper", func() { tftp.ask(10 * time.Second) })
}

// What is done with each packet is not gone past unless that is accepted.
func TestAccelBypass(t *testing.T) {
	b := newAccelTestbed(t)
	b.run("", "tc", "qdisc", "add", "dev", "out", "root", "tbf", "rate", "100mbit", "burst", "100k", "latency", "1s")
	o := b.accelOptions()
	o.Chains = []snapshot.Chain{
		{Family: "ip", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Rules: 3, PerPacket: []string{"limit", "quota"}},
		{Family: "ip", Table: "filter", Name: "chain-of-it", Rules: 1, PerPacket: []string{"LOG"}},
		{Family: "ip", Table: "filter", Name: "plain", Hook: "postrouting", Type: "filter", Rules: 9},
		{Family: "ip", Table: "nat", Name: "mangle", Hook: "postrouting", Type: "filter", Rules: 1, PerPacket: []string{"payload"}},
		{Family: "ip6", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Rules: 1, PerPacket: []string{"limit"}},
		{Family: "netdev", Table: "early", Name: "one", Hook: "ingress", Rules: 1, Devices: []string{"out"}},
		{Family: "netdev", Table: "early", Name: "other", Hook: "ingress", Rules: 1, Devices: []string{"eth7"}},
		{Family: "netdev", Table: "early", Name: "leaving", Hook: "egress", Rules: 1, Devices: []string{"out"}}, // what tc sends meets it
		{Family: "inet", Table: "early", Name: "eth0", Hook: "ingress", Rules: 1, Devices: []string{"eth7", "in"}},
	}
	b.run("", "ip", "rule", "add", "tos", "0x10", "table", "77", "priority", "500")
	b.run("", "ip", "xfrm", "policy", "add", "src", "192.0.2.0/24", "dst", "10.0.0.0/24", "dir", "fwd", "tmpl", "proto", "esp", "mode", "tunnel")
	var refused *BypassError
	if _, err := AccelOn(t.Context(), o); !errors.As(err, &refused) {
		t.Fatalf("not refused: %v", err)
	}
	var got []string
	for _, p := range refused.Bypassed {
		got = append(got, p.What)
	}
	want := []string{"chain ip filter/forward", "chain ip filter/chain-of-it", "chain ip nat/mangle", "chain netdev early/one", "chain inet early/eth0",
		"1 IPsec policy for forwarded packets", "routing rule 500 (tos 0x10, table 77)", "qdisc tbf on out"}
	if !slices.Equal(got, want) {
		t.Errorf("bypassed %q, want %q", got, want)
	}
	o.Bypass = true
	if p := b.accelOn(o); len(p.Bypassed) != len(want) {
		t.Errorf("accepted %+v", p.Bypassed)
	}
}

// Acceleration that is refused changes nothing of the connections.
func TestAccelRefused(t *testing.T) {
	b := newAccelTestbed(t)
	tool := ktest.Tool(t, "conntrack")
	events := make(chan string, 64)
	b.in(b.gateway, func() error {
		cmd := exec.CommandContext(t.Context(), tool, "-E", "-p", "tcp")
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		go func() {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				events <- lines.Text()
			}
		}()
		return cmd.Start()
	})
	port := uint16(1000)
	// open makes a connection, and returns what happened to others before that.
	open := func() (before []string) {
		for {
			port++
			to := netip.AddrPortFrom(netip.MustParseAddr("198.19.0.1"), port)
			b.in(b.gateway, func() error {
				_, err := conntrack.Fill(t.Context(), conntrack.FillOptions{Count: 1, Dest: to, State: conntrack.TCPEstablished, Timeout: time.Hour})
				return err
			})
			for begin := time.Now(); time.Since(begin) < time.Second; { // then again: it did not listen yet
				select {
				case line := <-events:
					if strings.Contains(line, fmt.Sprint("dport=", port)) {
						return before
					}
					before = append(before, line)
				case <-time.After(100 * time.Millisecond):
				}
			}
		}
	}
	open()
	b.run("", "tc", "qdisc", "add", "dev", "out", "root", "tbf", "rate", "100mbit", "burst", "100k", "latency", "1s")
	if _, err := AccelOn(t.Context(), b.accelOptions()); !errors.As(err, new(*BypassError)) {
		t.Fatalf("not refused: %v", err)
	}
	if got := open(); len(got) > 0 {
		t.Errorf("events %q", got)
	}
}

// An egress chain sees what tc sends, and nothing of what XDP does.
func TestAccelBypassEgress(t *testing.T) {
	chains := []snapshot.Chain{{Family: "netdev", Table: "late", Name: "out", Hook: "egress", Rules: 1, Devices: []string{"out"}}}
	for _, xdp := range []bool{false, true} {
		if got := bypassedChains(chains, []datapath.Link{{Name: "in", Transmit: true}, {Name: "out", Transmit: xdp}}); len(got) > 0 != xdp {
			t.Errorf("XDP %v: %v", xdp, got)
		}
	}
}

// What makes acceleration useless is reported; a time-out that forgets TCP at once leaves it
// alone.
func TestAccelUseless(t *testing.T) {
	b := newAccelTestbed(t)
	b.run("", "ip", "rule", "add", "fwmark", "0x1", "table", "77", "priority", "500")
	b.in(b.gateway, func() error { return writeSetting(settingEstablished, "0") })
	o := b.accelOptions()
	o.Chains = []snapshot.Chain{{Family: "inet", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Rules: 1, Offloads: 1}}
	p, err := PlanAccel(o)
	if err != nil {
		t.Fatal(err)
	}
	if p.TCP || len(p.Changes) > 0 || len(p.Bypassed) > 0 {
		t.Errorf("%+v", p)
	}
	for _, want := range []string{"inet filter/forward gives flows to the kernel's flowtable", "routing rule 500 (fwmark 0x1, table 77)", settingEstablished + " is 0"} {
		if !slices.ContainsFunc(p.Warnings, func(w string) bool { return strings.Contains(w, want) }) {
			t.Errorf("no %q in %q", want, p.Warnings)
		}
	}
}

// What is probably not meant is done, and said.
func TestAccelWarns(t *testing.T) {
	b := newAccelTestbed(t)
	b.run("", "ip", "link", "set", "out", "down")
	for _, c := range []struct {
		interfaces []string
		want       string
	}{
		{[]string{"in", "out"}, "out is down"},
		{[]string{"in"}, "another interface than in"},
	} {
		o := b.accelOptions()
		o.Interfaces = c.interfaces
		p, err := PlanAccel(o)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], c.want) {
			t.Errorf("%q: warnings %q, want one: %q", c.interfaces, p.Warnings, c.want)
		}
	}
}

// What has changed since is a problem that status names, with what to do.
func TestAccelProblems(t *testing.T) {
	b := newAccelTestbed(t)
	b.join("gone", "10.8.0.1/24", b.namespace(), "10.8.0.2/24")
	o := b.accelOptions()
	o.Interfaces = append(o.Interfaces, "gone")
	b.accelOn(o)
	b.accelStats() // no problem yet
	b.in(b.gateway, func() error {
		in, err1 := netlink.LinkByName("in")
		gone, err2 := netlink.LinkByName("gone")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		mac, _ := net.ParseMAC("02:00:00:00:00:42")
		return errors.Join(netlink.LinkSetHardwareAddr(in, mac), netlink.LinkDel(gone),
			writeSetting(settingLiberal, "0"), writeSetting(settingEstablished, "1000"))
	})
	s, err := ReadAccelStatus(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"interface in has another MAC", "interface gone is gone", settingLiberal + " is 0", settingEstablished + " is 1000"} {
		if !slices.ContainsFunc(s.Problems, func(p string) bool { return strings.Contains(p, want) }) {
			t.Errorf("no problem %q in %q", want, s.Problems)
		}
	}
	b.parrot(b.server, "198.51.100.9:7000")
	k := b.dialogue(b.client, "10.0.0.2:6000", "198.51.100.9:7000")
	for range 50 {
		if k.ask(10*time.Second) == "" {
			t.Fatal("no answer")
		}
	}
}

// An interface that was renamed is not called gone: its packets are accelerated, and the commands that follow it have
// its name.
func TestAccelRenamed(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	b.rename("out", "wan.1")
	s, err := ReadAccelStatus(b.gateway)
	if err != nil || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "out was renamed to wan.1") || !strings.Contains(s.Problems[0], "--attach tc in wan.1`") {
		t.Errorf("problems %q, %v", s.Problems, err)
	}
}

// rename gives an interface of the gateway another name.
func (b *testbed) rename(name, to string) {
	b.t.Helper()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, to), netlink.LinkSetUp(l))
	})
}

// Acceleration whose record was lost is not called off, and a journal that can't be read is not removed.
func TestAccelOffWithoutRecord(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	inode := b.gateway.Inode()
	if err := os.Remove(instancePath(inode, ".json")); err != nil {
		t.Fatal(err)
	}
	if _, err := AccelOff(b.gateway); err == nil || errors.Is(err, ErrAccelOff) || !strings.Contains(err.Error(), "`natkit down`") {
		t.Errorf("off: %v", err)
	}
	if kept, err := Down(b.gateway); err != nil || len(kept) > 0 {
		t.Errorf("down: %v, %v", kept, err)
	}
	journal := instancePath(inode, ".journal")
	if err := os.WriteFile(journal, []byte("damaged\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := AccelOff(b.gateway); err == nil || errors.Is(err, ErrAccelOff) || !strings.Contains(err.Error(), journal) {
		t.Errorf("off with a damaged journal: %v", err)
	}
	if err := os.Remove(journal); err != nil {
		t.Error(err)
	}
}

// Rules and programs that come when acceleration is on are a problem; natkit's own
// programs and what was accepted are none.
func TestAccelBypassedSince(t *testing.T) {
	b := newAccelTestbed(t)
	o := b.accelOptions()
	o.Chains = []snapshot.Chain{{Family: "ip", Table: "filter", Name: "forward", Hook: "forward", Type: "filter", Rules: 3, PerPacket: []string{"limit"}}}
	o.Bypass = true
	b.accelOn(o)
	check := func() []string {
		t.Helper()
		var s AccelStatus
		if err := s.CheckBypassed(b.gateway, o.Chains); err != nil {
			t.Fatal(err)
		}
		return s.Problems
	}
	if got := check(); len(got) > 0 {
		t.Errorf("problems %q", got)
	}
	b.run("", "tc", "qdisc", "add", "dev", "out", "root", "tbf", "rate", "100mbit", "burst", "100k", "latency", "1s")
	o.Chains = append(o.Chains, snapshot.Chain{Family: "netdev", Table: "early", Name: "in", Hook: "ingress", Rules: 1, Devices: []string{"in"}})
	if got := check(); len(got) != 2 || !strings.Contains(got[0], "chain netdev early/in") || !strings.Contains(got[1], "qdisc tbf on out") {
		t.Errorf("problems %q", got)
	}
}

// Counters of another natkit's programs may be of another form: status says whose they are.
func TestAccelOfAnother(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	pin := filepath.Join(pinsOf(b.gateway.Inode()), "maps", "accel_stats")
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := errors.Join(os.Remove(pin), m.Pin(pin)); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadAccelStatus(b.gateway); err == nil {
		t.Error("counters of another form were read")
	}
	b.rewrite(func(rec *record) { rec.Make = "another" })
	s, err := ReadAccelStatus(b.gateway)
	if err != nil || s.Stats != nil || s.Share() >= 0 || len(s.Interfaces) != 2 || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "another natkit's") {
		t.Errorf("%+v, %v", s, err)
	}
}

// Half on, status shows what was changed, and no counters; while somebody is at it, it does not
// claim that he was killed.
func TestAccelHalf(t *testing.T) {
	b := newAccelTestbed(t)
	b.accelOn(b.accelOptions())
	b.rewrite(func(rec *record) { rec.Whole = false })
	check := func(problem error) {
		t.Helper()
		s, err := ReadAccelStatus(b.gateway)
		if err != nil || s.Stats != nil || s.Interfaces == nil || len(s.Changes) != 1 || len(s.Problems) != 1 || !strings.HasPrefix(s.Problems[0], problem.Error()) {
			t.Errorf("%+v, %v; want problem %q", s, err, problem)
		}
		if facts, err := ReadFacts(b.gateway, nil, true); err != nil || len(facts.Problems) != 1 || facts.Packets != nil {
			t.Errorf("facts %+v, %v", facts, err)
		}
	}
	check(errHalf)
	in, err := hold(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	check(errUnderway)
	if err := in.release(); err != nil {
		t.Fatal(err)
	}
}

// An interface has one XDP program: whose that is, and what to do, is said.
func TestAccelForeignXDP(t *testing.T) {
	b := newAccelTestbed(t)
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "theirs", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer pass.Close()
	b.in(b.gateway, func() error {
		in, err := netlink.LinkByName("in")
		return errors.Join(err, netlink.LinkSetXdpFdWithFlags(in, pass.FD(), unix.XDP_FLAGS_DRV_MODE))
	})
	o := b.accelOptions()
	o.Attach = AttachXDP
	_, err = AccelOn(t.Context(), o)
	for _, want := range []string{`"in"`, `"theirs"`, "--attach tc"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %s in: %v", want, err)
		}
	}
	o.Attach = AttachTC
	b.accelOn(o)
}

// Killed at any moment of turning it on, off puts everything back, and on begins again.
func TestAccelKilled(t *testing.T) {
	b := newAccelTestbed(t)
	before := b.state()
	b.parrot(b.server, "198.51.100.9:7000")
	k := b.dialogue(b.client, "10.0.0.2:6000", "198.51.100.9:7000")
	begin := time.Now()
	b.accelOn(b.accelOptions())
	takes := time.Since(begin)
	if _, err := AccelOff(b.gateway); err != nil {
		t.Fatal(err)
	}
	const kills = 4
	for i := range kills {
		cmd := exec.Command("/proc/self/exe", "accel", b.name)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(takes*time.Duration(i+1)/kills, func() { cmd.Process.Kill() })
		cmd.Wait()
		timer.Stop()
		if k.ask(10*time.Second) == "" {
			t.Fatal("no answer after a kill")
		}
		if i%2 == 0 {
			if _, err := AccelOff(b.gateway); err != nil && !errors.Is(err, ErrAccelOff) {
				t.Fatal(err)
			}
		} else if status, err := ReadAccelStatus(b.gateway); err != nil || len(status.Problems) > 0 {
			b.accelOn(b.accelOptions()) // half on, or off
		}
	}
	if _, err := AccelOff(b.gateway); err != nil {
		t.Fatal(err)
	}
	if after := b.state(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// accelChild is the natkit that is killed while it turns acceleration on.
func accelChild(name string) {
	ns, err := netns.Open(name)
	if err == nil {
		_, err = AccelOn(context.Background(), AccelOptions{Namespace: ns, Interfaces: []string{"in", "out"}, Attach: AttachTC, Flows: MinAccelFlows(), TCPLiberal: true})
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A stranger at another interface, who sends with the addresses of a flow, is met by what
// the kernel has against that, though the flow is accelerated.
func TestAccelSpoofed(t *testing.T) {
	b := newAccelTestbed(t)
	stranger := b.namespace()
	b.join("other", "10.9.0.1/24", stranger, "10.9.0.2/24")
	b.in(b.gateway, func() error { return writeSetting("net.ipv4.conf.other.rp_filter", "1") })
	b.in(stranger, func() error {
		lo, err := netlink.LinkByName("lo")
		addr, err2 := netlink.ParseAddr("10.0.0.2/32")
		return errors.Join(err, err2, netlink.AddrAdd(lo, addr),
			netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.IPv4(10, 9, 0, 1)}))
	})
	b.parrot(b.server, "198.51.100.9:7000")
	o := b.accelOptions()
	o.Interfaces = append(o.Interfaces, "other")
	b.accelOn(o)
	k, spoofed := b.dialogue(b.client, "10.0.0.2:6000", "198.51.100.9:7000"), b.dialogue(stranger, "10.0.0.2:6000", "198.51.100.9:7000")
	spoofed.number = 1 << 40
	p := make([]byte, 2048)
	for begin := time.Now(); time.Since(begin) < 3*time.Second; {
		binary.BigEndian.PutUint64(p, 1<<41)
		spoofed.conn.Write(p[:8])
		if seen := k.ask(10 * time.Second); seen != "198.51.100.1:6000" {
			t.Fatalf("the server sees %s", seen)
		}
		k.conn.SetReadDeadline(time.Now().Add(time.Millisecond))
		if n, err := k.conn.Read(p); err == nil && n > 8 && binary.BigEndian.Uint64(p) == 1<<41 {
			t.Fatal("a spoofed datagram came through")
		}
	}
	b.accelerated(k)
}

// By XDP, from and to veth whose ends make and take whole frames: datagrams and a
// transfer arrive as they should, and how many datagrams were overtaken is printed. So
// they do where XDP may not send to one side: what it leaves to tc, tc does.
func TestAccelXDP(t *testing.T) {
	b := newAccelTestbed(t)
	for _, ns := range []*netns.Handle{b.client, b.server} {
		b.in(ns, func() error {
			out, err := exec.Command(ktest.Tool(t, "ethtool"), "-K", "eth0", "tx", "off", "gro", "on").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	b.parrot(b.server, "198.51.100.9:7000")
	for _, c := range []struct {
		name string
		none int // of the interfaces has no XDP; -1: all have
		tc   bool
	}{{"both", -1, false}, {"outside only", 0, true}, {"inside only", 1, true}} {
		t.Run(c.name, func(t *testing.T) {
			b := b.within(t)
			o := b.accelOptions()
			o.Attach = AttachXDP
			p, err := PlanAccel(o)
			if err != nil || !p.Placements[0].XDP || len(p.Warnings) == 0 {
				t.Fatalf("%+v, %v", p, err)
			}
			if c.none >= 0 {
				p.Placements[c.none].XDP, p.links[c.none].Transmit = false, false
			}
			in, err := hold(b.gateway)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(in.accelerate(t.Context(), p), in.release()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := AccelOff(b.gateway); err != nil {
					t.Error(err)
				}
			})
			k := b.dialogue(b.client, "", "198.51.100.9:7000")
			b.accelerated(k)
			b.transfer(t, b.client, b.server, "198.51.100.9:0", func() {})
			sent, overtaken, lost := b.stream(k)
			t.Logf("of %d datagrams %d were overtaken and %d lost", sent, overtaken, lost)
			if overtaken > sent/20 {
				t.Errorf("%d of %d datagrams were overtaken", overtaken, sent)
			}
			s, err := ReadAccelStatus(b.gateway)
			if err != nil {
				t.Fatal(err)
			}
			if s.Stats.Reasons["forwarded"] < 1000 || s.Share() < 0.5 {
				t.Errorf("%.2f of the packets: %v", s.Share(), s.Stats.Reasons)
			}
			for i, l := range s.Interfaces {
				if slices.Contains(l.Hooks, "tc") != c.tc || slices.Contains(l.Hooks, "xdp") != (i != c.none) {
					t.Errorf("hooks of %s: %v", l.Name, l.Hooks)
				}
			}
		})
	}
}

// stream sends numbers for a second, and 2000 at least, as fast as the ends like, and counts
// what came back of them after a later one, and what did not.
func (b *testbed) stream(k *dialogue) (sent, overtaken, lost uint64) {
	b.t.Helper()
	first := k.number + 1
	var came uint64
	done := make(chan struct{})
	go func() {
		defer close(done)
		p := make([]byte, 2048)
		highest := uint64(0)
		for {
			n, err := k.conn.Read(p)
			if err != nil {
				return
			}
			if n <= 8 || binary.BigEndian.Uint64(p) < first {
				continue
			}
			came++
			if number := binary.BigEndian.Uint64(p); number < highest {
				overtaken++
			} else {
				highest = number
			}
		}
	}()
	p := make([]byte, 8)
	for begin := time.Now(); time.Since(begin) < time.Second || k.number < first+2000; {
		k.number++
		binary.BigEndian.PutUint64(p, k.number)
		if _, err := k.conn.Write(p); err != nil {
			b.t.Fatal(err)
		}
		if k.number%8 == 0 {
			time.Sleep(100 * time.Microsecond) // buffers of sockets are no part of this
		}
	}
	k.conn.SetReadDeadline(time.Now().Add(time.Second))
	<-done
	sent = k.number - first + 1
	return sent, overtaken, sent - came
}

// accelEntries calls fn with every direction of a flow that is remembered.
func accelEntries(ns *netns.Handle, fn func(*rulefile.AccelEntry) bool) error {
	a, err := datapath.OpenAccelerator(pinsOf(ns.Inode()))
	if err != nil {
		return err
	}
	return errors.Join(a.AccelEntries(fn), a.Close())
}

// As many flows are remembered as connection tracking may have, of which 0 is no limit.
func TestFlowsRemembered(t *testing.T) {
	for most, want := range map[int]int{0: DefaultAccelFlows, 1: MinAccelFlows(), 1 << 16: max(1<<16, MinAccelFlows()), 1 << 30: DefaultAccelFlows} {
		if got := flowsFor(most); got != want {
			t.Errorf("of %d: %d, want %d", most, got, want)
		}
	}
}
