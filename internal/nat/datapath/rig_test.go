// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

func TestMain(m *testing.M) {
	ktest.MoreAtOnce(2)
	os.Exit(m.Run())
}

// rig is a gateway for packet tests: a namespace of its own with the programs of both
// hooks on the same maps. Nothing is attached: packets go in by BPF_PROG_TEST_RUN.
//
//	internal host 192.168.1.2 --- in 192.168.1.1/24   gateway   out 203.0.113.1/24 --- router .254 --- the world
type rig struct {
	t        testing.TB // that it is made for
	ns       *netns.Handle
	maps     map[string]*ebpf.Map
	objects  []rigObject // of the hooks
	mu       sync.Mutex
	programs map[string]*ebpf.Program // those that a test has needed
	in, out  port
	flags    uint32 // of test runs of tc: checksumComplete or 0
	zones    bool   // inside links are zones
}

// port is an interface of the gateway, and the neighbour behind it.
type port struct {
	ifindex       int
	link          uint16 // index in the map links
	mac, neighbor net.HardwareAddr
}

var (
	insideHost = netip.MustParseAddr("192.168.1.2")
	gatewayIn  = netip.MustParseAddr("192.168.1.1")
	gatewayOut = netip.MustParseAddr("203.0.113.1")
	router     = netip.MustParseAddr("203.0.113.254")
	world      = netip.MustParseAddr("198.51.100.9")
	poolFirst  = netip.MustParseAddr("203.0.113.16")
)

const (
	insideMTU  = 1500
	outsideMTU = 1400
)

// Verdicts of the hooks.
const (
	xdpDrop     = 1
	xdpPass     = 2
	xdpRedirect = 4
	tcNext      = 0xffffffff
	tcShot      = 2
	tcRedirect  = 7
)

// newRig makes a rig, and a map for what it needs of each: links, their indices,
// the transmit ports and a configuration with the RFCs' time-outs.
func newRig(t testing.TB) *rig {
	t.Helper()
	ktest.Root(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	r := &rig{t: t, ns: ns, maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}, flags: checksumComplete}
	r.do(t, func() error { return r.build(t) })
	return r
}

// keeper makes what is built for a test outlive it.
type keeper struct{ testing.TB }

func (keeper) Cleanup(func()) {}

var theRig *rig

// aRig is a rig without flows, for tests that run one after the other: they all have the
// same, because to load the programs takes longer than most tests.
func aRig(t *testing.T) *rig {
	t.Helper()
	if theRig == nil {
		theRig = newRig(keeper{t})
		theRig.ready(t, hooks, "_inside", "_outside")
	}
	theRig.flags = checksumComplete
	forgetSessions(t, theRig.maps)
	if err := theRig.configure(); err != nil {
		t.Fatal(err)
	}
	theRig.counted(t)
	return theRig
}

func (r *rig) do(t testing.TB, fn func() error) {
	t.Helper()
	if err := r.ns.Do(fn); err != nil {
		t.Fatal(err)
	}
}

// rigObject is an object of a hook, and its maps.
type rigObject struct {
	spec *ebpf.CollectionSpec
	maps map[string]*ebpf.Map
}

// load loads the maps that are not there, and some of the programs.
func (o rigObject) load(t testing.TB, programs ...string) (*ebpf.Collection, error) {
	spec := o.spec.Copy()
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(programs, name) })
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: o.maps})
	if err == nil {
		t.Cleanup(coll.Close)
	}
	return coll, err
}

// ready loads programs of hooks: a test whose time runs does not wait for one then.
func (r *rig) ready(t testing.TB, hooks []hook, sides ...string) {
	t.Helper()
	for _, h := range hooks {
		for _, side := range sides {
			r.program(t, h.name+side)
		}
	}
}

// program is one of a hook. It is loaded when a test needs it first: to check all of them takes the kernel several seconds.
func (r *rig) program(t testing.TB, name string) *ebpf.Program {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[name]; p != nil {
		return p
	}
	for _, o := range r.objects {
		if o.spec.Programs[name] == nil {
			continue
		}
		coll, err := o.load(r.t, name)
		if err != nil {
			t.Fatalf("load %s: %+v", name, err)
		}
		r.programs[name] = coll.Programs[name]
		return r.programs[name]
	}
	t.Fatalf("there is no program %s", name)
	return nil
}

func (r *rig) build(t testing.TB) error {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"xdp": loadXdp, "tc": loadTc} {
		spec, err := load()
		if err != nil {
			return err
		}
		if err := setClock(spec); err != nil {
			return err
		}
		o := rigObject{spec: spec, maps: map[string]*ebpf.Map{}}
		for n := range spec.Maps {
			if m := r.maps[n]; m != nil {
				o.maps[n] = m
			}
		}
		coll, err := o.load(t)
		if err != nil {
			return fmt.Errorf("load %s: %+w", name, err)
		}
		o.maps = coll.Maps
		r.objects = append(r.objects, o)
		for n, m := range coll.Maps {
			if r.maps[n] == nil && !strings.HasPrefix(n, ".") { // each object has its own global variables
				r.maps[n] = m
			}
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	var err error
	r.in, err = r.addPort(t, "in", 3, insideMTU, gatewayIn, insideHost, abiNatLinkFlagNAT_LINK_INSIDE)
	if err != nil {
		return err
	}
	r.out, err = r.addPort(t, "out", 5, outsideMTU, gatewayOut, router, abiNatLinkFlagNAT_LINK_OUTSIDE)
	if err != nil {
		return err
	}
	err = netlink.RouteAdd(&netlink.Route{LinkIndex: r.out.ifindex, Gw: router.AsSlice()})
	if err != nil {
		return err
	}
	if err := r.configure(); err != nil {
		return err
	}
	m, err := mapsOf(r.maps)
	if err != nil {
		return err
	}
	return putControl(m, Size{Sessions: int(m.FreeFlows.MaxEntries()), Mappings: int(m.MappingQueue.MaxEntries())})
}

// load loads an object on the maps of the rig.
func (r *rig) load(t testing.TB, load func() (*ebpf.CollectionSpec, error)) *ebpf.Collection {
	t.Helper()
	return loadOn(t, load, func(name string) *ebpf.Map { return r.maps[name] })
}

// loadOn loads an object on the maps that known knows, for the time of the test.
func loadOn(t testing.TB, load func() (*ebpf.CollectionSpec, error), known func(name string) *ebpf.Map) *ebpf.Collection {
	t.Helper()
	spec, err := load()
	if err == nil {
		err = setClock(spec)
	}
	if err != nil {
		t.Fatal(err)
	}
	use := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		if m := known(name); m != nil && !strings.HasPrefix(name, ".") { // each object has its own global variables
			use[name] = m
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: use})
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	t.Cleanup(coll.Close)
	return coll
}

// mapsOf gives maps by their fields.
func mapsOf(byName map[string]*ebpf.Map) (*tcMaps, error) {
	e := &Engine{maps: byName}
	return &e.m, e.assign(&e.m)
}

// engineOn is an engine of these maps.
func engineOn(t testing.TB, byName map[string]*ebpf.Map) *Engine {
	t.Helper()
	e := &Engine{maps: byName}
	if err := e.assign(&e.common, &e.m); err != nil {
		t.Fatal(err)
	}
	return e
}

// configure writes a configuration without rules.
func (r *rig) configure() error {
	config := abiNatConfig{}
	for i := range config.Timeouts {
		config.Timeouts[i] = ticks(60)
	}
	return r.maps["config"].Put(uint32(0), &config)
}

// ticks converts seconds to the engine's unit of time.
func ticks(seconds int) uint32 {
	return uint32(uint64(seconds) * 1e9 >> uint(abiNatLimitNAT_TICK_SHIFT))
}

// now is the engine's clock, or somewhat later: the engine counts jiffies, and where ticks
// come late (a virtual machine, above all an emulated one) these lie behind.
func now() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		panic(err)
	}
	return uint32(uint64(ts.Nano()) >> uint(abiNatLimitNAT_TICK_SHIFT))
}

// addPort makes an interface with a neighbour that never ages. A test run of XDP on
// behalf of a veth needs its receive queue to be registered, which a program on it does.
func (r *rig) addPort(t testing.TB, name string, index uint16, mtu int, addr, neighbor netip.Addr, flag abiNatLinkFlag) (port, error) {
	p := port{link: index, neighbor: net.HardwareAddr{2, 0, 0, 0, 1, byte(index)}}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: mtu, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(index)}}, PeerName: name + "-peer"}
	if err := netlink.LinkAdd(veth); err != nil {
		return p, err
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		return p, err
	}
	p.ifindex, p.mac = l.Attrs().Index, l.Attrs().HardwareAddr
	peer, err := netlink.LinkByName(name + "-peer")
	if err != nil {
		return p, err
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(24, 32)}}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R0, xdpPass), asm.Return(),
	}})
	if err != nil {
		return p, err
	}
	defer pass.Close()
	attached, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: p.ifindex, Flags: link.XDPDriverMode})
	if err != nil {
		return p, err
	}
	t.Cleanup(func() { attached.Close() })
	return p, errors.Join(
		netlink.AddrAdd(l, address), netlink.LinkSetUp(l), netlink.LinkSetUp(peer),
		netlink.NeighSet(&netlink.Neigh{LinkIndex: p.ifindex, State: netlink.NUD_PERMANENT, IP: neighbor.AsSlice(), HardwareAddr: p.neighbor}),
		r.maps["links"].Put(uint32(index), &abiNatLink{
			Ifindex: uint32(p.ifindex), Flags: uint16(flag | abiNatLinkFlagNAT_LINK_XDP), Mtu: uint16(mtu), Mac: [6]uint8(p.mac),
		}),
		r.maps["link_indices"].Put(uint32(p.ifindex), uint32(index)),
		r.maps["transmit"].Put(uint32(index), uint32(p.ifindex)),
	)
}

// hop is the value of nat_flow.hop for the neighbour behind a port.
func (p port) hop() uint64 {
	return uint64(p.link+1)<<48 | binary.LittleEndian.Uint64(append(bytes.Clone(p.neighbor), 0, 0))
}

// frame is one that arrives at the port, or leaves by it, with that packet.
func (p port) arriving(ip pktbuild.IPv4) pktbuild.Frame {
	return pktbuild.Frame{To: p.mac, From: p.neighbor, IP: ip}
}

func (p port) leaving(ip pktbuild.IPv4) pktbuild.Frame {
	return pktbuild.Frame{To: p.neighbor, From: p.mac, IP: ip}
}

func addr(a netip.Addr) abiNatAddr { return abiNatAddr{Octet: a.As4()} }

// be is a port as it lies in memory.
func be(port uint16) uint16 { return port>>8 | port<<8 }

// endpoints of one direction of a flow: as the packet arrives, or as it leaves.
type endpoints struct {
	src, dst     netip.Addr
	sport, dport uint16
}

// putFlow makes one direction of a session, that was seen just now: never later than the
// engine's clock says, to which that would be a long time ago.
func (r *rig) putFlow(t testing.TB, side abiNatSide, protocol uint8, from, to endpoints, way port, change func(*abiNatFlow)) abiNatFlowKey {
	t.Helper()
	key := abiNatFlowKey{Src: addr(from.src), Dst: addr(from.dst), Sport: be(from.sport), Dport: be(from.dport), Protocol: protocol, Side: uint8(side)}
	seen := now() - 50
	flow := abiNatFlow{
		Key: key, Src: addr(to.src), Dst: addr(to.dst), Sport: be(to.sport), Dport: be(to.dport),
		Hop: way.hop(), HopChecked: uint16(seen), Seen: seen,
		State: map[uint8]uint32{
			pktbuild.TCPProtocol: uint32(abiNatTimeoutNAT_TIMEOUT_TCP_ESTABLISHED), pktbuild.ICMPProtocol: uint32(abiNatTimeoutNAT_TIMEOUT_ICMP),
			pktbuild.UDPProtocol: uint32(abiNatTimeoutNAT_TIMEOUT_UDP), pktbuild.UDPLiteProtocol: uint32(abiNatTimeoutNAT_TIMEOUT_UDP),
		}[protocol],
	}
	if change != nil {
		change(&flow)
	}
	inTables(t, r.maps, func(s *tables) { s.put(t, &flow) })
	return key
}

func port16(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

// delta is what replacing words adds to the complement of a checksum, as it lies in
// memory: pairs of old and new bytes. Worked out differently than the engine does.
func delta(pairs ...[]byte) uint16 {
	sum := 0
	for i := 0; i < len(pairs); i += 2 {
		for j := 0; j < len(pairs[i]); j += 2 {
			sum += int(binary.LittleEndian.Uint16(pairs[i+1][j:])) - int(binary.LittleEndian.Uint16(pairs[i][j:]))
		}
	}
	return uint16(((sum % 0xffff) + 0xffff) % 0xffff)
}

// hook is where a packet enters.
type hook struct {
	name                 string // as the prefix of its programs
	pass, drop, redirect uint32
}

var hooks = []hook{
	{"xdp", xdpPass, xdpDrop, xdpRedirect},
	{"tc", tcNext, tcShot, tcRedirect},
}

// counts is what a hook counts of a packet that ends so: what XDP leaves to the stack, tc
// meets next.
func (h hook) counts(reason abiNatReason) abiNatReason {
	if h.name == "xdp" && reason < abiNatReasonNAT_PASS_TO_TC {
		return abiNatReasonNAT_PASS_TO_TC
	}
	return reason
}

// run sends a frame through the program of that hook and side, as if it came in by p.
// gso is the segment size of an skb that stands for several (tc only).
func (r *rig) run(t testing.TB, h hook, side abiNatSide, p port, frame []byte, gso uint32) (uint32, []byte, error) {
	t.Helper()
	name := h.name + map[abiNatSide]string{abiNatSideNAT_INSIDE: "_inside", abiNatSideNAT_OUTSIDE: "_outside", abiNatSideNAT_BOTH: "_both"}[side]
	if r.zones && side == abiNatSideNAT_INSIDE {
		name = h.name + "_zone"
	}
	opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
	if h.name == "xdp" {
		opts.Context = &xdpContext{DataEnd: uint32(len(frame)), Ifindex: uint32(p.ifindex)}
	} else {
		opts.Context = &skbContext{Ifindex: uint32(p.ifindex), GSOSize: gso}
		opts.Flags = r.flags
	}
	var verdict uint32
	program := r.program(t, name)
	err := r.ns.Do(func() (err error) {
		verdict, err = program.Run(opts)
		if errors.Is(err, unix.EINVAL) && opts.Flags != 0 { // Linux 6.9 and older
			opts.Flags = 0
			verdict, err = program.Run(opts)
		}
		return err
	})
	return verdict, opts.DataOut, err
}

// checksumComplete is BPF_F_TEST_SKB_CHECKSUM_COMPLETE: the skb carries a sum over the
// whole packet, and the kernel complains (EBADMSG) if the program lets it become wrong.
const checksumComplete = 4

type xdpContext struct {
	Data, DataEnd, DataMeta, Ifindex, Queue, Egress uint32
}

type skbContext struct {
	_       [40]byte
	Ifindex uint32
	_       [4]byte
	CB      [5]uint32
	_       [96]byte
	GSOSegs uint32
	_       [8]byte
	GSOSize uint32
	_       [12]byte
}

// counted returns the counters that are not zero, and sets all to zero.
func (r *rig) counted(t testing.TB) map[abiNatReason]uint64 {
	t.Helper()
	var cpus []abiNatStats
	if err := r.maps["stats"].Lookup(uint32(0), &cpus); err != nil {
		t.Fatal(err)
	}
	out := map[abiNatReason]uint64{}
	for _, s := range cpus {
		for reason, n := range s.Packets {
			if n > 0 {
				out[abiNatReason(reason)] += n
			}
		}
	}
	if err := r.maps["stats"].Put(uint32(0), make([]abiNatStats, len(cpus))); err != nil {
		t.Fatal(err)
	}
	return out
}

// differ shows how two frames differ, in lines of 16 bytes.
func differ(got, want []byte) string {
	a, b := strings.Split(hex.Dump(got), "\n"), strings.Split(hex.Dump(want), "\n")
	var out strings.Builder
	for i := range max(len(a), len(b)) {
		var x, y string
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if x != y {
			fmt.Fprintf(&out, "  got  %s\n  want %s\n", x, y)
		}
	}
	return out.String()
}
