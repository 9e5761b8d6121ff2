// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/netns"
)

// Lengths of frames on the wire, with the checksum of 4 bytes that Ethernet adds.
const (
	MinFrame = int(generatorBenchLimitBENCH_LEAST) + 4
	MaxFrame = int(generatorBenchLimitBENCH_MOST) + 4
)

// MaxFlows is how many flows a generator can tell apart: 63 of each source
// address in a network of 65536, as in CSIT's largest grid.
const MaxFlows = flowsPerSource << 16

const (
	flowsPerSource = int(generatorBenchLimitBENCH_PORTS)
	flowsPerTarget = int(generatorBenchLimitBENCH_FLOWS_PER_TARGET)
	maxPattern     = int(generatorBenchLimitBENCH_PATTERN)
	maxCPUs        = int(generatorBenchLimitBENCH_CPUS)
	targetPort     = 9 // discard, RFC 863
)

// IMIX is the simple mix of lengths: 7 frames of 64 bytes, 4 of 570, 1 of 1518.
var IMIX = []int{64, 570, 64, 64, 570, 64, 1518, 64, 570, 64, 64, 570}

// frameLoad is one stream of frames, from one end of a bed to the other.
type frameLoad struct {
	frames     []int // lengths on the wire, in turn; at most maxPattern
	flows      int
	random     bool    // flows in pseudo-random order, each once before one comes again
	pps        float64 // over all CPUs; 0: as fast as it goes
	duration   time.Duration
	stampEvery int   // one frame in so many is timed; 0: none
	cpus       []int // that send, each its share
}

// sendCount is what a generator sent.
type sendCount struct {
	frames, bytes uint64
	skipped       uint64 // slots that passed while no CPU of the generator ran
	elapsed       time.Duration
}

// generator sends frames from one end of a bed. Its program stays attached to a
// spare pair of devices for as long as it lives, because the kernel otherwise
// takes 24 ms for each call to put it into the XDP dispatcher and out again.
type generator struct {
	objects generatorObjects
	from    *netns.Handle
	spare   netlink.Link
	attach  link.Link
	base    generatorLoad // the addresses
}

// liveFrames is BPF_F_TEST_XDP_LIVE_FRAMES: what the program returns is done to
// the frame, linux/bpf.h.
const liveFrames = 1 << 1

// newGenerator makes a generator on the bed's left end, or its right one when it
// is to send back.
func newGenerator(bed *Bed, back bool) (g *generator, err error) {
	g = &generator{from: bed.Left}
	device, routerNS, routerDevice := bed.LeftDev, bed.Router, bed.InsideDev
	if back {
		g.from, device, routerDevice = bed.Right, bed.RightDev, bed.OutsideDev
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make packet generator: %w", err), g.close())
		}
	}()
	var router netlink.Link
	if err := routerNS.Do(func() error {
		router, err = netlink.LinkByName(routerDevice)
		return err
	}); err != nil {
		return g, err
	}
	rlimit.RemoveMemlock() // needed below Linux 5.11 only, where a refusal shows as the load's
	if err := loadGeneratorObjects(&g.objects, nil); err != nil {
		return g, explainBPF(err)
	}
	return g, g.from.Do(func() error {
		own, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		g.base = generatorLoad{
			Source: ipv4(bed.Sources.Addr()), Target: ipv4(bed.Targets.Addr()),
			Ifindex: uint32(own.Attrs().Index), CatchUp: 64, TargetPort: htons(targetPort),
		}
		if !back {
			g.base.Outward = 1
		}
		copy(g.base.Macs[:6], router.Attrs().HardwareAddr)
		copy(g.base.Macs[6:], own.Attrs().HardwareAddr)
		return g.keepDispatched()
	})
}

// keepDispatched attaches the program to a spare pair of devices.
func (g *generator) keepDispatched() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "spare0"
	spare := &netlink.Veth{LinkAttrs: attrs, PeerName: "spare1"}
	if err := netlink.LinkAdd(spare); err != nil {
		return fmt.Errorf("add spare device: %w", err)
	}
	l, err := netlink.LinkByName(attrs.Name)
	if err != nil {
		return err
	}
	g.spare = l
	g.attach, err = link.AttachXDP(link.XDPOptions{
		Program: g.objects.Generate, Interface: l.Attrs().Index, Flags: link.XDPDriverMode,
	})
	if err != nil {
		return fmt.Errorf("attach to spare device: %w", explainBPF(err))
	}
	return nil
}

func (g *generator) close() error {
	var errs []error
	if g.attach != nil {
		errs = append(errs, g.attach.Close())
	}
	if g.spare != nil {
		errs = append(errs, g.from.Do(func() error { return netlink.LinkDel(g.spare) }))
	}
	return errors.Join(append(errs, g.objects.Close())...)
}

// send sends the load and returns what was sent when it is over, at the latest a
// few milliseconds after its duration or the end of ctx.
func (g *generator) send(ctx context.Context, l frameLoad) (sendCount, error) {
	c := g.config(l)
	var senders [maxCPUs]generatorSender
	for i, cpu := range l.cpus {
		if cpu >= maxCPUs {
			return sendCount{}, fmt.Errorf("send from CPU %d: the generator knows the first %d", cpu, maxCPUs)
		}
		// Each CPU begins elsewhere in the round of flows and of slots.
		senders[cpu].Flow = uint32(uint64(l.flows) * uint64(i) / uint64(len(l.cpus)))
		if c.Interval > 0 {
			senders[cpu].Due = c.StartNs<<16 + c.Interval*uint64(i)/uint64(len(l.cpus))
		}
	}
	if err := errors.Join(g.objects.Senders.Set(&senders), g.objects.Load.Set(&c)); err != nil {
		return sendCount{}, fmt.Errorf("set load of packet generator: %w", err)
	}
	done := make(chan error, len(l.cpus))
	for _, cpu := range l.cpus {
		go func() { done <- g.sendOn(ctx, cpu, int(c.Longest), c.EndNs) }()
	}
	var errs []error
	for range l.cpus {
		errs = append(errs, <-done)
	}
	if err := errors.Join(errs...); err != nil {
		return sendCount{}, fmt.Errorf("send frames: %w", err)
	}
	if err := g.objects.Senders.Get(&senders); err != nil {
		return sendCount{}, fmt.Errorf("read packet generator: %w", err)
	}
	count := sendCount{elapsed: time.Duration(min(c.EndNs, monotonic()) - c.StartNs)}
	for i := range senders {
		count.frames += senders[i].Sent
		count.bytes += senders[i].SentBytes
		count.skipped += senders[i].Skipped
	}
	return count, nil
}

// lead is the time between the set-up of a load and its first frame.
const lead = 2 * time.Millisecond

// config is the load as the program has it.
func (g *generator) config(l frameLoad) generatorLoad {
	c := g.base
	c.StartNs = monotonic() + uint64(lead)
	c.EndNs = c.StartNs + uint64(l.duration)
	if l.pps > 0 {
		c.Interval = uint64(float64(len(l.cpus)) / l.pps * 1e9 * 65536)
	}
	c.Flows, c.Stride, c.StampEvery = uint32(l.flows), 1, uint32(l.stampEvery)
	if l.random {
		c.Stride = stride(uint32(l.flows))
	}
	c.Pattern, c.Longest = uint32(len(l.frames)), uint32(slices.Max(l.frames)-4)
	for i, wire := range l.frames {
		length := wire - 4
		k := &c.Kinds[i]
		k.Length = uint32(length)
		k.IpLength, k.UdpLength = htons(uint16(length-14)), htons(uint16(length-34))
		// Words as they lie in memory: version and TOS, TTL and protocol; then for
		// UDP the pseudo header's protocol and length, the target port and the length.
		k.IpSum = uint32(htons(0x4500)) + uint32(k.IpLength) + uint32(htons(64<<8|unix.IPPROTO_UDP))
		k.UdpSum = uint32(htons(unix.IPPROTO_UDP)) + 2*uint32(k.UdpLength) + uint32(c.TargetPort)
	}
	return c
}

// stride is a step near the golden section of n that visits all of n: successive
// flows are far apart in every table.
func stride(n uint32) uint32 {
	for s := uint32(float64(n) * 0.618); s > 1; s-- {
		if gcd(s, n) == 1 {
			return s
		}
	}
	return 1
}

func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// A call makes a page pool and takes it down; one of this many frames is long
// enough to make that not matter, and a turn without a frame to send takes about
// 50 ns, so that the last call ends soon after the load does.
const (
	framesPerCall = 200_000
	idleTurn      = 50 * time.Nanosecond
)

// sendOn runs the program on one CPU until the load's end. The nice value keeps
// other programs from making holes; a real-time class would be throttled.
func (g *generator) sendOn(ctx context.Context, cpu, longest int, end uint64) error {
	return g.from.Do(func() error {
		restore, err := pin(cpu, -20)
		if err != nil {
			return err
		}
		defer restore()
		// struct xdp_md: data, data_end, data_meta, ingress_ifindex, ...
		md := make([]byte, 24)
		binary.NativeEndian.PutUint32(md[4:], uint32(longest))
		binary.NativeEndian.PutUint32(md[12:], uint32(g.spare.Attrs().Index))
		run := &ebpf.RunOptions{Data: make([]byte, longest), Context: md, Flags: liveFrames, BatchSize: 64}
		for now := monotonic(); now < end && ctx.Err() == nil; now = monotonic() {
			run.Repeat = uint32(min(framesPerCall, max(64, time.Duration(end-now)/idleTurn)))
			if _, err := g.objects.Generate.Run(run); err != nil {
				return explainBPF(err)
			}
		}
		return nil
	})
}

// pin moves the calling thread, which must be locked, to a CPU and a nice value,
// and returns what undoes both.
func pin(cpu, nice int) (restore func(), err error) {
	var before, want unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("read CPUs of thread: %w", err)
	}
	want.Set(cpu)
	if err := unix.SchedSetaffinity(0, &want); err != nil {
		return nil, fmt.Errorf("pin thread to CPU %d: %w", cpu, err)
	}
	tid := unix.Gettid()
	if err := unix.Setpriority(unix.PRIO_PROCESS, tid, nice); err != nil {
		unix.SchedSetaffinity(0, &before)
		return nil, fmt.Errorf("set nice value of thread: %w", err)
	}
	return func() {
		unix.Setpriority(unix.PRIO_PROCESS, tid, 0)
		unix.SchedSetaffinity(0, &before)
	}, nil
}

// monotonic is the clock of bpf_ktime_get_ns.
func monotonic() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // can't fail
	return uint64(ts.Nano())
}

func ipv4(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// htons is n as it lies in memory when it is sent.
func htons(n uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], n)
	return binary.NativeEndian.Uint16(b[:])
}

// explainBPF says what a refusal of the kernel means here; the library's hint
// about a memory limit is wrong on current kernels.
func explainBPF(err error) error {
	if errors.Is(err, unix.EPERM) {
		return errors.New("the kernel refuses BPF programs (needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON)")
	}
	return err
}
