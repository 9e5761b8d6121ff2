// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// testWire is two interfaces with a router between them that knows of neither what
// it is for nor of natkit:
//
//	tx: eth1 10.1.0.2 ── in0 10.1.0.1 router 10.2.0.1 out0 ── eth2 10.2.0.2 :rx
func testWire(t *testing.T) (w *Wire, router *netns.Handle) {
	t.Helper()
	ktest.Root(t)
	var spaces [3]*netns.Handle
	for i := range spaces {
		h, err := netns.New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		spaces[i] = h
		// IPv6 sends at times of its own choice; counts are of nothing but the load.
		must(t, h.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0) }))
	}
	tx, router, rx := spaces[0], spaces[1], spaces[2]
	pair := func(ns *netns.Handle, device, peer string) {
		must(t, ns.Do(func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = device
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerNamespace: netlink.NsFd(router.Fd())})
		}))
	}
	pair(tx, "eth1", "in0")
	pair(rx, "eth2", "out0")
	for _, d := range []struct {
		ns              *netns.Handle
		device, address string
	}{{tx, "eth1", "10.1.0.2/24"}, {router, "in0", "10.1.0.1/24"}, {router, "out0", "10.2.0.1/24"}, {rx, "eth2", "10.2.0.2/24"}} {
		must(t, d.ns.Do(func() error {
			l, err := netlink.LinkByName(d.device)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(d.address)
			return errors.Join(err, netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		}))
	}
	for _, p := range []Port{{tx, "eth1"}, {rx, "eth2"}} {
		ktest.Wait(t, 10*time.Second, "carrier of "+p.Device, func() bool { return strings.Contains(devicesOf(t, p.Netns), "running") })
	}
	route := func(ns *netns.Handle, to netip.Prefix, via string) {
		must(t, ns.Do(func() error { return netlink.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: net.ParseIP(via)}) }))
	}
	route(tx, DefaultTargets, "10.1.0.1")
	route(router, DefaultTargets, "10.2.0.2")
	route(router, DefaultSources, "10.1.0.2")
	must(t, router.Do(func() error {
		out, err := netlink.LinkByName("out0")
		if err != nil {
			return err
		}
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: out.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
			IP: net.ParseIP("10.2.0.2"), HardwareAddr: macOf(t, rx, "eth2")}); err != nil {
			return err
		}
		return errors.Join(receiveByNAPI("in0"), os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	}))
	return &Wire{TX: Port{tx, "eth1"}, RX: Port{rx, "eth2"}, Sources: DefaultSources, Targets: DefaultTargets}, router
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wireOptions(w *Wire) UDPOptions {
	return UDPOptions{Wire: w, Sizes: []FrameSize{{Bytes: 64}}, Flows: []int{100}, Rates: []Rate{{PPS: 2000}},
		Duration: 100 * time.Millisecond, Trials: 1}
}

// xdpOn tells whether the interface has an XDP program.
func xdpOn(t *testing.T, p Port) (attached bool) {
	t.Helper()
	must(t, p.Netns.Do(func() error {
		l, err := netlink.LinkByName(p.Device)
		if err == nil {
			attached = l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached
		}
		return err
	}))
	return attached
}

// devicesOf are a namespace's, as they are set up.
func devicesOf(t *testing.T, ns *netns.Handle) (devices string) {
	t.Helper()
	must(t, ns.Do(func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			a := l.Attrs()
			devices += fmt.Sprintln(a.Name, a.MTU, a.Flags, a.NumRxQueues, a.NumTxQueues, a.Promisc, a.Xdp != nil && a.Xdp.Attached)
		}
		return err
	}))
	return devices
}

// Frames go from one interface through a router elsewhere to the other, by a MAC
// that the kernel found out, and both are left as they were.
func TestWire(t *testing.T) {
	w, _ := testWire(t)
	before := devicesOf(t, w.TX.Netns) + devicesOf(t, w.RX.Netns)
	res, err := UDP(t.Context(), wireOptions(w))
	must(t, err)
	if len(res.Routers) != 1 || !strings.Contains(res.Routers[0].Describe, "from eth1 (veth) by way of ") {
		t.Errorf("%+v", res.Routers)
	}
	figures := byMetric(res)
	for _, metric := range []string{"received_pps", "latency_min_ns"} {
		if f := figures["external "+metric]; !(f.Median > 0) || f.Params.Cores != 0 || f.Params.OfferedPPS != 2000 {
			t.Errorf("%s: %+v", metric, f)
		}
	}
	if f := figures["external loss_ratio"]; len(f.Values) != 1 || f.Lost[Unexplained] != 0 {
		t.Errorf("loss: %+v", f)
	}
	if f, ok := figures["external cpu_share"]; ok {
		t.Errorf("the router's CPU is not to be known: %+v", f)
	}
	if after := devicesOf(t, w.TX.Netns) + devicesOf(t, w.RX.Netns); after != before {
		t.Errorf("the interfaces were\n%s and are\n%s", before, after)
	}

	o := wireOptions(w)
	o.Rates = nil
	res, err = UDP(t.Context(), o)
	must(t, err)
	if f := byMetric(res)["external mrr_pps"]; len(res.Figures) != 1 || !(f.Median > 0) {
		t.Errorf("without a rate: %+v", res.Figures)
	}
}

// What the router loses is said to be lost between the interfaces.
func TestWireLoss(t *testing.T) {
	w, router := testWire(t)
	l, _, err := newWireDUT(t.Context(), w, 10)
	must(t, err)
	defer l.close()
	must(t, router.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) }))
	tr, err := l.tester.run(t.Context(), frameLoad{
		frames: []int{64}, flows: 10, pps: 2000, duration: 100 * time.Millisecond, cpus: []int{l.tester.generatorCPU}})
	must(t, err)
	if tr.received.frames != 0 || tr.sent.frames == 0 || tr.lost[LostElsewhere]+tr.lost[LostBeforeRouter] != int64(tr.sent.frames) {
		t.Errorf("%d sent, %d received, lost %v", tr.sent.frames, tr.received.frames, tr.lost)
	}
}

// Each refusal says what is the matter and what to do, and changes nothing.
func TestWireRefuses(t *testing.T) {
	w, router := testWire(t)
	in := func(ns *netns.Handle, device string, fn func(netlink.Link) error) func() {
		return func() {
			must(t, ns.Do(func() error {
				l, err := netlink.LinkByName(device)
				if err != nil {
					return err
				}
				return fn(l)
			}))
		}
	}
	gro := func(on bool) func() {
		return in(router, "in0", func(netlink.Link) error {
			return withEthtool(func(e *ethtool.Ethtool) error { return e.Change("in0", map[string]bool{"rx-gro": on}) })
		})
	}
	byDefault := &netlink.Route{Gw: net.ParseIP("10.1.0.1")}
	var other link.Link
	nothing := func() {}
	for _, c := range []struct {
		name       string
		prepare    func()
		change     func(*UDPOptions)
		undo       func()
		want       string
		wantOption string
	}{
		{name: "no such interface", change: func(o *UDPOptions) { o.Wire.RX.Device = "eth9" }, want: `"eth9": not found`},
		{name: "no Ethernet", prepare: in(w.TX.Netns, "lo", netlink.LinkSetUp), change: func(o *UDPOptions) { o.Wire.TX.Device = "lo" }, want: "no Ethernet"},
		{name: "one interface", change: func(o *UDPOptions) { o.Wire.RX = o.Wire.TX }, wantOption: "RX"},
		{name: "no rx", change: func(o *UDPOptions) { o.Wire.RX.Device = "" }, wantOption: "TX, RX"},
		{name: "few sources", change: func(o *UDPOptions) { o.Wire.Sources = netip.MustParsePrefix("192.0.2.255/24") }, wantOption: "Sources"},
		{name: "few targets", change: func(o *UDPOptions) { o.Wire.Targets, o.Flows = netip.MustParsePrefix("192.0.2.1/32"), []int{32769} }, wantOption: "Targets"},
		{name: "same network", change: func(o *UDPOptions) { o.Wire.Targets = o.Wire.Sources }, wantOption: "Targets"},
		{name: "a router", change: func(o *UDPOptions) { o.Routers = []Router{stubRouter{"plain", plain}} }, wantOption: "Routers"},
		{name: "both ways", change: func(o *UDPOptions) { o.BothWays = true }, wantOption: "BothWays"},
		{name: "no flows", change: func(o *UDPOptions) { o.Flows = nil }, wantOption: "Flows"},
		{name: "down", prepare: in(w.RX.Netns, "eth2", netlink.LinkSetDown), undo: in(w.RX.Netns, "eth2", netlink.LinkSetUp), want: "ip link set dev eth2 up"},
		{name: "no carrier", prepare: func() {
			in(router, "in0", netlink.LinkSetDown)()
			ktest.Wait(t, 10*time.Second, "no carrier of eth1", func() bool {
				_, err := w.TX.check(true)
				return err != nil
			})
		}, undo: in(router, "in0", netlink.LinkSetUp), want: "no carrier"},
		{name: "default route",
			prepare: in(w.TX.Netns, "eth1", func(netlink.Link) error { return netlink.RouteAdd(byDefault) }),
			undo:    in(w.TX.Netns, "eth1", func(netlink.Link) error { return netlink.RouteDel(byDefault) }), want: "or Force"},
		{name: "no route", change: func(o *UDPOptions) { o.Wire.Targets = netip.MustParsePrefix("192.0.2.0/24") }, want: "RouterMAC"},
		{name: "wrong MAC", change: func(o *UDPOptions) { o.Wire.RouterMAC = net.HardwareAddr{2, 0, 0, 0, 0, 1} }, want: "none came to \"eth2\""},
		{name: "no NAPI", prepare: gro(false), undo: gro(true), want: "ethtool -K PEER gro on"},
		{name: "XDP in use", prepare: in(w.RX.Netns, "eth2", func(l netlink.Link) (err error) {
			counter := newCounter(t, ebpf.XDP, xdpPass)
			other, err = link.AttachXDP(link.XDPOptions{Program: counter.program, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
			return err
		}), undo: func() { must(t, other.Close()) }, want: "ip link set dev INTERFACE xdp off"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, step := range []*func(){&c.prepare, &c.undo} {
				if *step == nil {
					*step = nothing
				}
			}
			wire := *w
			o := wireOptions(&wire)
			if c.change != nil {
				c.change(&o)
			}
			c.prepare()
			defer c.undo()
			res, err := UDP(t.Context(), o)
			if res != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			var option *OptionError
			if got := errors.As(err, &option); got != (c.wantOption != "") || got && strings.Join(option.Fields, ", ") != c.wantOption {
				t.Errorf("%v, want it to be about %q", err, c.wantOption)
			}
			if c.name != "XDP in use" && (xdpOn(t, w.TX) || xdpOn(t, w.RX)) {
				t.Error("an XDP program is left")
			}
		})
	}
	// A default route is no reason with --force.
	must(t, w.TX.Netns.Do(func() error { return netlink.RouteAdd(byDefault) }))
	o := wireOptions(w)
	w.Force = true
	if _, err := UDP(t.Context(), o); err != nil {
		t.Errorf("with force: %v", err)
	}
}

// TestWireKilled kills a measurement: the kernel takes its programs off.
func TestWireKilled(t *testing.T) {
	if spaces := os.Getenv("NATKIT_TEST_WIRE"); spaces != "" { // the process to be killed
		tx, rx, _ := strings.Cut(spaces, " ")
		w := &Wire{TX: Port{Device: "eth1"}, RX: Port{Device: "eth2"}, Sources: DefaultSources, Targets: DefaultTargets}
		var err1, err2 error
		w.TX.Netns, err1 = netns.Open(tx)
		w.RX.Netns, err2 = netns.Open(rx)
		must(t, errors.Join(err1, err2))
		o := wireOptions(w)
		o.Duration = time.Minute
		_, err := UDP(context.Background(), o)
		t.Fatalf("was not killed: %v", err)
	}
	w, _ := testWire(t)
	before := devicesOf(t, w.TX.Netns) + devicesOf(t, w.RX.Netns)
	path := func(h *netns.Handle) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), h.Fd()) }
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWireKilled$")
	cmd.Env = append(os.Environ(), "NATKIT_TEST_WIRE="+path(w.TX.Netns)+" "+path(w.RX.Netns))
	must(t, cmd.Start())
	var arrived uint64
	ktest.Wait(t, 20*time.Second, "frames at the other interface", func() bool {
		must(t, w.RX.Netns.Do(func() error {
			l, err := netlink.LinkByName(w.RX.Device)
			if err == nil {
				arrived = l.Attrs().Statistics.RxPackets
			}
			return err
		}))
		return arrived > 1000 && xdpOn(t, w.TX) && xdpOn(t, w.RX)
	})
	must(t, cmd.Process.Kill())
	cmd.Wait()
	ktest.Wait(t, 10*time.Second, "the interfaces as they were", func() bool {
		return devicesOf(t, w.TX.Netns)+devicesOf(t, w.RX.Netns) == before
	})
}

func TestParsePlayed(t *testing.T) {
	for text, want := range map[string]int{"198.18.0.0/16": 65536, "192.0.2.10/24": 246, "192.0.2.1/32": 1} {
		if p, err := ParsePlayed(text); err != nil || addressesOf(p) != want {
			t.Errorf("%s: %d addresses, %v, want %d", text, addressesOf(p), err, want)
		}
	}
	for _, text := range []string{"", "192.0.2.1", "192.0.2.0/33", "2001:db8::/64", "224.0.0.0/8", "127.0.0.0/8", "0.0.0.0/8"} {
		if p, err := ParsePlayed(text); err == nil {
			t.Errorf("%s is taken: %v", text, p)
		}
	}
}

// counter counts UDP frames to the discard port on a device, with a program that has nothing in
// common with the generator and the sink: no code, no headers of theirs, no stamp.
type counter struct {
	program *ebpf.Program
	packets *ebpf.Map
}

const (
	xdpPass = 2  // XDP_PASS
	tcxNext = -1 // TCX_NEXT
)

// newCounter makes a counter of XDP or of tcx. Both read the frame by the same
// instructions: the context of either has a helper that copies bytes.
func newCounter(t *testing.T, kind ebpf.ProgramType, verdict int32) *counter {
	t.Helper()
	packets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { packets.Close() })
	load := asm.FnXdpLoadBytes
	if kind == ebpf.SchedCLS {
		load = asm.FnSkbLoadBytes
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, License: "GPL", Instructions: asm.Instructions{
		// protocol at 23, target port at 36
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, 23), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16), asm.Mov.Imm(asm.R4, 15),
		load.Call(),
		asm.JNE.Imm(asm.R0, 0, "out"),
		asm.LoadMem(asm.R1, asm.RFP, -16, asm.Byte), asm.JNE.Imm(asm.R1, 17, "out"),
		asm.LoadMem(asm.R1, asm.RFP, -3, asm.Byte), asm.JNE.Imm(asm.R1, 0, "out"),
		asm.LoadMem(asm.R1, asm.RFP, -2, asm.Byte), asm.JNE.Imm(asm.R1, 9, "out"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, packets.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.Add.Imm(asm.R1, 1), asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
		asm.Return(),
	}})
	if errors.Is(err, ebpf.ErrNotSupported) || kind == ebpf.XDP && err != nil && strings.Contains(err.Error(), "unknown func") {
		ktest.Unsupported(t, "the kernel lacks bpf_xdp_load_bytes (Linux 5.18): %v", err)
	}
	must(t, err)
	t.Cleanup(func() { program.Close() })
	return &counter{program, packets}
}

func (c *counter) read(t *testing.T) (sum uint64) {
	t.Helper()
	var perCPU []uint64
	must(t, c.packets.Lookup(uint32(0), &perCPU))
	for _, n := range perCPU {
		sum += n
	}
	return sum
}

// Natkit's counts of what it sent and received are those of programs that share
// nothing with it, and those of the interfaces, at every rate: a frame that was not
// taken for transmission is refused by the device and counted there.
func TestCountsAreTrue(t *testing.T) {
	w, router := testWire(t)
	sentCounter, receivedCounter := newCounter(t, ebpf.XDP, xdpPass), newCounter(t, ebpf.SchedCLS, tcxNext)
	must(t, router.Do(func() error {
		in, err1 := netlink.LinkByName("in0")
		out, err2 := netlink.LinkByName("out0")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		x, err := link.AttachXDP(link.XDPOptions{Program: sentCounter.program, Interface: in.Attrs().Index, Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		t.Cleanup(func() { x.Close() })
		e, err := link.AttachTCX(link.TCXOptions{Program: receivedCounter.program, Interface: out.Attrs().Index, Attach: ebpf.AttachTCXEgress})
		if errors.Is(err, ebpf.ErrNotSupported) {
			ktest.Unsupported(t, "the kernel lacks tcx (Linux 6.6)")
		}
		if err != nil {
			return err
		}
		t.Cleanup(func() { e.Close() })
		return nil
	}))
	l, _, err := newWireDUT(t.Context(), w, 1000)
	must(t, err)
	defer l.close()
	for _, pps := range []float64{10_000, 100_000, 1_000_000, 0} {
		t.Run(fmt.Sprintf("%.0f", pps), func(t *testing.T) {
			before := []uint64{sentCounter.read(t), receivedCounter.read(t)}
			statistics := wireStatistics(t, w)
			tr, err := l.tester.run(t.Context(), frameLoad{
				frames: []int{64}, flows: 1000, pps: pps, duration: 200 * time.Millisecond, cpus: []int{l.tester.generatorCPU}})
			must(t, err)
			now := wireStatistics(t, w)
			for i := range now {
				now[i] -= statistics[i]
			}
			sent, refused, received := now[0], now[1], now[2]
			if got := sentCounter.read(t) - before[0]; got+refused != tr.sent.frames || sent != got {
				t.Errorf("%d frames sent; the other program counted %d, the interface %d, and refused %d", tr.sent.frames, got, sent, refused)
			}
			if got := receivedCounter.read(t) - before[1]; got != tr.received.frames || received != got {
				t.Errorf("%d frames received; the other program counted %d, the interface %d", tr.received.frames, got, received)
			}
			if tr.sent.frames == 0 || tr.received.frames == 0 {
				t.Errorf("%d frames sent, %d received", tr.sent.frames, tr.received.frames)
			}
		})
	}
}

// wireStatistics are what the interfaces count: packets sent, refused, received.
func wireStatistics(t *testing.T, w *Wire) (counts [3]uint64) {
	t.Helper()
	for _, p := range []Port{w.TX, w.RX} {
		must(t, p.Netns.Do(func() error {
			l, err := netlink.LinkByName(p.Device)
			if err != nil {
				return err
			}
			if n := l.Attrs().Statistics; p == w.TX {
				counts[0], counts[1] = n.TxPackets, n.TxDropped
			} else {
				counts[2] = n.RxPackets
			}
			return nil
		}))
	}
	return counts
}
