// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
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

// What the frames of a load are.
type traffic int

const (
	datagrams   traffic = iota // UDP
	connections                // TCP connections, which the server closes as soon as they are open
	openings                   // TCP connections that stay open
	segments                   // data on the connections of the last openings
)

// frameLoad is a stream of frames through a testbed.
type frameLoad struct {
	traffic    traffic
	frames     []int   // lengths on the wire, in turn; at most maxPattern
	first      int     // flow: those before it are not sent
	flows      int     // each once, in pseudo-random order, before one comes again
	shares     []share // of each CPU; nil: an equal one of the flows
	pps        float64 // over all CPUs and both ways; 0: as fast as it goes
	duration   time.Duration
	bothWays   bool  // every other frame goes from right to left
	waysApart  bool  // with bothWays, on two CPUs: one sends all frames forth, one all frames back
	oneTarget  bool  // all datagrams go to one address
	once       bool  // ends, before its duration, when each flow was sent; not both ways
	stampEvery int   // one frame in so many is timed; 0: none. Datagrams only
	cpus       []int // that send, each its share of the flows
	oneHost    bool  // the datagrams of the first CPU are of one host, the first, with a port for each flow

	salt uint32 // of TCP's cookies; the tester's
}

// share is a range of flows.
type share struct{ first, flows int }

// sendCount is what a generator sent.
type sendCount struct {
	frames, bytes uint64
	each          []uint64      // frames, by CPU in the load's order
	skipped       uint64        // slots that passed while no CPU of the generator ran
	ran           time.Duration // of its threads, with what the kernel did in their place
	waited        time.Duration // that they were ready to run, and something else ran
	elapsed       time.Duration
	served        time.Duration // once, of one CPU: from the first frame until the last batch of 64 was through
}

// generator sends frames from the ends of a testbed. Its program stays attached to a
// spare pair of devices for as long as it lives, because the kernel otherwise
// takes 24 ms for each call to put it into the XDP dispatcher and out again. They
// are in a namespace of their own, which ends with the process.
type generator struct {
	objects generatorObjects
	home    *netns.Handle
	spare   netlink.Link
	attach  link.Link
	base    generatorLoad   // the addresses
	alone   bool            // nothing else of a load needs the CPU that sends it
	at      [maxCPUs]uint32 // where the last load of each CPU ended in its flows
}

// liveFrames is BPF_F_TEST_XDP_LIVE_FRAMES: what the program returns is done to
// the frame, linux/bpf.h.
const liveFrames = 1 << 1

// newGenerator makes a generator on the testbed's ends. Frames from the right end are
// addressed by translations, as the sink there has learned them.
func newGenerator(testbed *Testbed, translations *ebpf.Map) (g *generator, err error) {
	g = &generator{base: generatorLoad{
		Source: ipv4(testbed.Sources.Addr()), Target: ipv4(testbed.Targets.Addr()), CatchUp: 64, TargetPort: htons(targetPort),
	}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make packet generator: %w", err), g.close())
		}
	}()
	_ = rlimit.RemoveMemlock() // needed below Linux 5.11 only, where a refusal shows as the load's
	spec, err := loadGenerator()
	if err != nil {
		return g, err
	}
	if err := loadWith(spec, translations, &g.objects); err != nil {
		return g, err
	}
	for way, end := range []testbedDevice{{testbed.Left, testbed.LeftDev}, {testbed.Right, testbed.RightDev}} {
		if testbed.toRouter[way] == nil {
			continue
		}
		if err := end.ns.Do(func() error {
			own, err := netlink.LinkByName(end.name)
			if err != nil {
				return err
			}
			copy(g.base.Macs[way][:6], testbed.toRouter[way])
			copy(g.base.Macs[way][6:], own.Attrs().HardwareAddr)
			return g.objects.Ends.Put(uint32(way), uint32(own.Attrs().Index))
		}); err != nil {
			return g, err
		}
	}
	if g.home, err = netns.New(); err != nil {
		return g, err
	}
	return g, g.home.Do(g.keepDispatched)
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
	if g.home != nil {
		errs = append(errs, g.home.Close())
	}
	return errors.Join(append(errs, g.objects.Close())...)
}

// send sends the load and returns what was sent when it is over, at the latest a
// few milliseconds after its duration or the end of ctx.
func (g *generator) send(ctx context.Context, l frameLoad) (sendCount, error) {
	c := g.config(l)
	senders, err := g.senders(l, c.Interval)
	if err != nil {
		return sendCount{}, err
	}
	if err := errors.Join(g.objects.Senders.Set(&senders), g.objects.Load.Set(&c)); err != nil {
		return sendCount{}, fmt.Errorf("set load of packet generator: %w", err)
	}
	var senderThreads errgroup.Group
	ran, waited := make([]time.Duration, len(l.cpus)), make([]time.Duration, len(l.cpus))
	for i, cpu := range l.cpus {
		senderThreads.Go(func() (err error) {
			ran[i], waited[i], err = g.sendOn(ctx, cpu, &c)
			return err
		})
	}
	if err := senderThreads.Wait(); err != nil {
		return sendCount{}, fmt.Errorf("send frames: %w", err)
	}
	if err := g.objects.Senders.Get(&senders); err != nil {
		return sendCount{}, fmt.Errorf("read packet generator: %w", err)
	}
	if err := context.Cause(ctx); err != nil {
		return sendCount{}, err
	}
	count := sendCount{elapsed: l.duration}
	for i := range l.cpus {
		count.ran += ran[i]
		count.waited += waited[i]
	}
	g.count(&count, l, &c, &senders)
	return count, nil
}

// senders is what each CPU sends, and when it begins.
func (g *generator) senders(l frameLoad, interval uint64) (senders [maxCPUs]generatorSender, err error) {
	for i, cpu := range l.cpus {
		if cpu >= maxCPUs {
			return senders, fmt.Errorf("send from CPU %d: the generator knows the first %d", cpu, maxCPUs)
		}
		own := l.share(i)
		senders[cpu] = generatorSender{
			Due: l.firstDue(i, interval), First: uint32(own.first), Flows: uint32(own.flows), Stride: stride(uint32(own.flows)),
			At: g.at[cpu] % uint32(own.flows), // short loads of many flows come to all of them
		}
		if l.oneHost && i == 0 {
			senders[cpu].OneHost = 1
		}
		if l.waysApart {
			senders[cpu].Way = uint32(1 + i%2)
		}
	}
	return senders, nil
}

// firstDue is when the first frame of the i-th CPU is due: they take turns.
func (l *frameLoad) firstDue(i int, interval uint64) uint64 {
	return interval * uint64(i) / uint64(len(l.cpus))
}

// count adds what the senders have counted, and keeps where each has stopped.
func (g *generator) count(count *sendCount, l frameLoad, c *generatorLoad, senders *[maxCPUs]generatorSender) {
	var last uint64
	for i := range senders {
		count.frames += senders[i].Sent
		count.bytes += senders[i].SentBytes
		last = max(last, senders[i].LastNs)
		if senders[i].Flows > 0 {
			g.at[i] = senders[i].At
		}
	}
	for _, cpu := range l.cpus {
		count.each = append(count.each, senders[cpu].Sent)
	}
	if s := &senders[l.cpus[0]]; s.DoneNs > 0 {
		count.served = time.Duration(s.DoneNs - s.FirstNs)
	}
	if l.once && count.frames >= uint64(l.flows) {
		count.elapsed = time.Duration(last - c.StartNs + 1)
		// Without what the threads did before the first frame and after the last.
		count.ran = max(0, count.elapsed*time.Duration(len(l.cpus))-count.waited)
	}
	if c.Interval > 0 {
		var slots uint64
		for i := range l.cpus {
			slots += (uint64(count.elapsed)<<16-l.firstDue(i, c.Interval)-1)/c.Interval + 1
		}
		count.skipped = max(slots, count.frames) - count.frames
	}
}

// share is the flows that the i-th CPU sends: each has some of its own; where
// they are too few, or the ways are apart, several send the same.
func (l *frameLoad) share(i int) share {
	n := len(l.cpus)
	if l.shares != nil {
		return l.shares[i]
	}
	if l.waysApart {
		i, n = i/2, (n+1)/2
	}
	first := min(l.flows*i/n, l.flows-1)
	return share{l.first + first, max(l.flows*(i+1)/n-first, 1)}
}

// lead is the time between the set-up of a paced load and its first slot.
const lead = 2 * time.Millisecond

// config is the load as the program has it.
func (g *generator) config(l frameLoad) generatorLoad {
	c := g.base
	c.StartNs = monotonic()
	if l.pps > 0 {
		c.StartNs += uint64(lead)
	}
	c.EndNs = c.StartNs + uint64(l.duration)
	if l.pps > 0 {
		c.Interval = uint64(float64(len(l.cpus)) / l.pps * 1e9 * 65536)
	}
	c.StampEvery = uint32(l.stampEvery)
	if l.bothWays {
		c.BothWays = 1
	}
	if l.once {
		c.Once = 1
	}
	if !l.oneTarget {
		c.Targets = math.MaxUint32
	}
	switch l.traffic {
	case connections, openings:
		c.Segment = uint32(generatorBenchSegmentBENCH_CONNECT)
	case segments:
		c.Segment = uint32(generatorBenchSegmentBENCH_DATA)
	}
	c.Salt = l.salt
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

// A call makes a page pool and takes it down; one of some thousand turns is long
// enough to make that not matter. Calls get shorter towards the load's end, where
// turns without a frame to send take about 50 ns each.
const (
	pacedTurns = 200_000 // a pool more often makes holes
	pacedTurn  = 50 * time.Nanosecond
	floodTurns = 20_000
	floodTurn  = 1500 * time.Nanosecond
)

// sendOn runs the program on one CPU until the load's end, and returns how long it
// ran, and how long something else had that CPU. Its priority keeps other programs from
// making holes.
func (g *generator) sendOn(ctx context.Context, cpu int, c *generatorLoad) (ran, waited time.Duration, err error) {
	turns, turn := pacedTurns, pacedTurn
	if c.Interval == 0 {
		turns, turn = floodTurns, floodTurn
	}
	err = g.home.Do(func() error {
		restore, err := pin(cpu, -20)
		if err != nil {
			return err
		}
		defer restore()
		if g.alone && time.Duration(c.EndNs-c.StartNs) <= maxRealTime {
			defer realTime()()
		}
		// struct xdp_md: data, data_end, data_meta, ingress_ifindex, ...
		md := make([]byte, 24)
		binary.NativeEndian.PutUint32(md[4:], c.Longest)
		binary.NativeEndian.PutUint32(md[12:], uint32(g.spare.Attrs().Index))
		run := &ebpf.RunOptions{Data: make([]byte, c.Longest), Context: md, Flags: liveFrames, BatchSize: 64}
		begun, before := monotonic(), readSchedstat("thread-self")
		for now := monotonic(); now < c.EndNs && ctx.Err() == nil; now = monotonic() {
			run.Repeat = uint32(min(turns, max(64, int(time.Duration(c.EndNs-now)/turn))))
			if _, err := g.objects.Generate.Run(run); err != nil {
				return explainBPF(err)
			}
			if c.Once == 0 {
				continue
			}
			var senders [maxCPUs]generatorSender
			if err := g.objects.Senders.Get(&senders); err != nil {
				return err
			}
			if s := &senders[cpu]; s.Sent >= uint64(s.Flows) {
				break
			}
		}
		waited = readSchedstat("thread-self").waited - before.waited
		ran = time.Duration(monotonic()-begun) - waited
		return nil
	})
	return ran, waited, err
}

// pin moves the calling thread, which must be locked, to a CPU and a nice value,
// and returns what undoes both.
func pin(cpu, nice int) (restore func(), err error) {
	var before, want unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("read CPUs of thread: %w", err)
	}
	class, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return nil, fmt.Errorf("read nice value of thread: %w", err)
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
		unix.Setpriority(unix.PRIO_PROCESS, tid, int(class.Nice))
		unix.SchedSetaffinity(0, &before)
	}, nil
}

// maxRealTime is how long a thread may have a real-time class and not sleep: of 950 ms
// the kernel gives other programs 50, which is a hole in a load (sched_rt_runtime_us, and
// the fair server of Linux 6.12).
const maxRealTime = 500 * time.Millisecond

// realTime gives the calling thread a real-time class, and returns what takes it away.
// Where that is refused, as in a control group without its share of it, the thread stays
// what it is.
func realTime() (restore func()) {
	before, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return func() {}
	}
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 40}, 0); err != nil {
		return func() {}
	}
	return func() { unix.SchedSetAttr(0, before, 0) }
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
