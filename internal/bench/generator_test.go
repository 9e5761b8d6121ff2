// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// openTester is a testbed with a generator, which end with the test.
func openTester(t *testing.T, flows int) (*Testbed, *tester) {
	t.Helper()
	ktest.Root(t)
	testbed, err := NewTestbed(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := testbed.Close(); err != nil {
			t.Error(err)
		}
	})
	s, err := newTester(testbed, flows)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	return testbed, s
}

// capture is a packet socket on a device of a testbed: a receiver that has nothing in
// common with the generator and the sink.
type capture struct {
	fd       int
	protocol byte // of the packets it is after
}

func newCapture(t *testing.T, ns *netns.Handle, device string) capture {
	t.Helper()
	var fd int
	err := ns.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		both := htons(unix.ETH_P_ALL) // ways: what the device sends, too
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(both)); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 128<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: both, Ifindex: l.Attrs().Index}))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return capture{fd, unix.IPPROTO_UDP}
}

// frames reads n frames, or what has come when it has looked for a second and there was no
// more: a machine that stood still is no second.
func (c capture) frames(t *testing.T, n int) (frames [][]byte) {
	t.Helper()
	buf := make([]byte, 4096)
	for waited := 0; len(frames) < n && waited < 10; {
		got, err := unix.Read(c.fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			if ready, _ := unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, 100); ready == 0 {
				waited++
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		// The ends' stacks answer: there is no server.
		if got < 24 || binary.BigEndian.Uint16(buf[12:]) != unix.ETH_P_IP || buf[23] != c.protocol {
			continue
		}
		waited = 0
		frames = append(frames, bytes.Clone(buf[:got]))
	}
	return frames
}

// ones is the one's complement sum of RFC 1071 over data: 0xffff when it includes
// a right checksum.
func ones(data []byte, sum uint32) uint32 {
	for i := 0; i+1 < len(data); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(data[i:]))
	}
	if len(data)%2 == 1 {
		sum += uint32(data[len(data)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

// checkFrame verifies a frame as it comes out of a router without NAT, and returns
// its flow's tuple.
func checkFrame(f []byte, wire int, from, to net.HardwareAddr) (string, error) {
	var errs []error
	want := func(what string, got, want any) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s %v, want %v", what, got, want))
		}
	}
	want("length", len(f), wire-4)
	if len(f) < 60 {
		return "", errors.Join(errs...)
	}
	ip, udp := f[14:34], f[34:]
	want("destination", net.HardwareAddr(f[:6]).String(), to.String())
	want("source", net.HardwareAddr(f[6:12]).String(), from.String())
	want("type", binary.BigEndian.Uint16(f[12:]), uint16(0x0800))
	want("version", ip[0], byte(0x45))
	want("IP length", int(binary.BigEndian.Uint16(ip[2:])), len(f)-14)
	want("fragment", binary.BigEndian.Uint16(ip[6:]), uint16(0))
	want("TTL", ip[8], byte(63))
	want("protocol", ip[9], byte(17))
	want("IP sum", ones(ip, 0), uint32(0xffff))
	want("UDP length", int(binary.BigEndian.Uint16(udp[4:])), len(udp))
	if udp[6] == 0 && udp[7] == 0 {
		errs = append(errs, errors.New("no UDP checksum"))
	}
	want("UDP sum", ones(udp, ones(ip[12:20], uint32(17+len(udp)))), uint32(0xffff))
	want("magic", binary.NativeEndian.Uint16(udp[8:]), uint16(generatorBenchLimitBENCH_MAGIC))
	source, _ := netip.AddrFromSlice(ip[12:16])
	target, _ := netip.AddrFromSlice(ip[16:20])
	return fmt.Sprintf("%s:%d %s:%d", source, binary.BigEndian.Uint16(udp), target, binary.BigEndian.Uint16(udp[2:])), errors.Join(errs...)
}

// tuple is the flow's that a frame must carry.
func tuple(flow int, back bool) string {
	source, target := testbedSources.Addr(), testbedTargets.Addr()
	for range flow / 63 {
		source = source.Next()
	}
	for range flow / 32768 {
		target = target.Next()
	}
	forth, to := fmt.Sprintf("%s:%d", source, 1024+flow%63), fmt.Sprintf("%s:9", target)
	if back {
		return to + " " + forth
	}
	return forth + " " + to
}

func macOf(t *testing.T, ns *netns.Handle, device string) (mac net.HardwareAddr) {
	t.Helper()
	if err := ns.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return mac
}

// Every frame of a load is what it should be, byte for byte, as a packet socket
// at the other end has it, and each flow comes once before one comes again.
func TestFrames(t *testing.T) {
	const flows = 40_000 // two targets
	testbed, s := openTester(t, flows)
	right, left := newCapture(t, testbed.Right, testbed.RightDev), newCapture(t, testbed.Left, testbed.LeftDev)
	routerOut, routerIn := macOf(t, testbed.Router, testbed.OutsideDev), macOf(t, testbed.Router, testbed.InsideDev)
	rightMAC, leftMAC := macOf(t, testbed.Right, testbed.RightDev), macOf(t, testbed.Left, testbed.LeftDev)
	cpus, err := allowedCPUs()
	if err != nil {
		t.Fatal(err)
	}
	for name, l := range map[string]frameLoad{
		"one flow":       {frames: []int{64}, flows: 1},
		"many flows":     {frames: []int{64}, flows: flows, pps: 100_000, duration: 450 * time.Millisecond},
		"longest frames": {frames: []int{1518}, flows: 100},
		"odd length":     {frames: []int{129}, flows: 100},
		"imix":           {frames: IMIX, flows: 100},
		"both ways":      {frames: IMIX, flows: 100, bothWays: true},
		"each flow once": {frames: []int{64}, flows: 5000, pps: 100_000, duration: 10 * time.Second, once: true},
		"stamped":        {frames: []int{64}, flows: 100, stampEvery: 3},
		"all CPUs":       {frames: []int{64}, flows: 100, cpus: cpus},
	} {
		t.Run(name, func(t *testing.T) {
			if l.pps == 0 {
				l.pps, l.duration = 20_000, 50*time.Millisecond
			}
			if l.cpus == nil {
				l.cpus = cpus[:1]
			}
			if testing.Short() && l.pps > 50_000 {
				ktest.Unsupported(t, "needs a machine that takes %.0f frames a second (-short)", l.pps)
			}
			sent, err := s.generator.send(context.Background(), l)
			if err != nil {
				t.Fatal(err)
			}
			slots := uint64(l.pps * sent.elapsed.Seconds())
			if l.once && (sent.frames != uint64(l.flows) || sent.elapsed > l.duration/2) {
				t.Fatalf("%d frames sent in %v, want each of %d flows once, at %.0f a second", sent.frames, sent.elapsed, l.flows, l.pps)
			}
			if got := sent.frames + sent.skipped; got+1 < slots || got > slots+uint64(len(l.cpus)) {
				t.Errorf("%d frames sent and %d skipped, want %d together", sent.frames, sent.skipped, slots)
			}
			forth, back := int(sent.frames), 0
			if l.bothWays {
				forth, back = (forth+1)/2, forth/2
			}
			var total uint64
			check := func(c capture, n int, back bool, from, to net.HardwareAddr) {
				seen, sequences := map[string]int{}, map[uint32]int{}
				frames := c.frames(t, n)
				if len(frames) != n {
					t.Fatalf("%d frames came, want %d (back: %v)", len(frames), n, back)
				}
				for _, f := range frames {
					total += uint64(len(f))
					sequence := binary.NativeEndian.Uint32(f[48:])
					sequences[sequence]++
					wire := l.frames[int(sequence)%len(l.frames)]
					if len(l.cpus) > 1 {
						wire = l.frames[0]
					}
					got, err := checkFrame(f, wire, from, to)
					if err != nil {
						t.Fatalf("frame %d (back: %v): %v\n% x", sequence, back, err, f)
					}
					if want := tuple(int(binary.NativeEndian.Uint32(f[44:])), back); got != want {
						t.Fatalf("frame %d is %s, want %s", sequence, got, want)
					}
					stamped := binary.NativeEndian.Uint64(f[52:]) != 0
					if want := l.stampEvery > 0 && int(sequence)%max(l.stampEvery, 1) == 0; stamped != want {
						t.Fatalf("frame %d has a time: %v, want %v", sequence, stamped, want)
					}
					seen[got]++
				}
				for sequence, times := range sequences {
					if times > len(l.cpus) {
						t.Fatalf("frame %d came %d times", sequence, times)
					}
				}
				least, most := n, 0
				for _, times := range seen {
					least, most = min(least, times), max(most, times)
				}
				if len(l.cpus) == 1 && (len(seen) != min(n, l.flows) || most > least+1) {
					t.Errorf("%d frames had %d of %d flows, each %d to %d times (back: %v)", n, len(seen), l.flows, least, most, back)
				}
			}
			check(right, forth, false, routerOut, rightMAC)
			if back > 0 {
				check(left, back, true, routerIn, leftMAC)
			}
			if total != sent.bytes {
				t.Errorf("%d bytes came, %d were counted as sent", total, sent.bytes)
			}
		})
	}
}

// The kernel's UDP takes the frames, which it would not with a wrong checksum.
func TestKernelTakesFrames(t *testing.T) {
	testbed, s := openTester(t, 100)
	var conn *net.UDPConn
	if err := testbed.Right.Do(func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: targetPort})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sent, err := s.generator.send(context.Background(), frameLoad{
		frames: IMIX, flows: 100, pps: 2000, duration: 20 * time.Millisecond, cpus: []int{s.generatorCPU}})
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2048)
	for i := range sent.frames {
		if err := conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := conn.ReadFromUDP(buf); err != nil {
			t.Fatalf("after %d of %d datagrams: %v", i, sent.frames, err)
		}
	}
}

// The generator's and the sink's counts are the devices' own, and the rate is the
// one asked for unless slots are known to have been missed.
func TestCountsAndRate(t *testing.T) {
	testbed, s := openTester(t, 1000)
	if err := s.attachSinks(); err != nil {
		t.Fatal(err)
	}
	for _, l := range []frameLoad{
		{frames: []int{64}, pps: 10_000},
		{frames: []int{64}, pps: 100_000},
		{frames: IMIX, pps: 100_000},
		{frames: []int{64}, pps: 1_000_000},
		{frames: []int{64}},
		{frames: IMIX, bothWays: true},
	} {
		t.Run(fmt.Sprintf("%d sizes %.0f", len(l.frames), l.pps), func(t *testing.T) {
			l.flows, l.duration, l.cpus = 1000, 200*time.Millisecond, []int{s.generatorCPU}
			before := deviceCounts(t, testbed)
			tr, err := s.run(context.Background(), l)
			if err != nil {
				t.Fatal(err)
			}
			got := deviceCounts(t, testbed)
			for k, v := range before {
				got[k] -= v
			}
			if got["sent"]+got["refused"] != tr.sent.frames {
				t.Errorf("%d frames sent; the devices took %d and refused %d", tr.sent.frames, got["sent"], got["refused"])
			}
			if got["received"] != tr.received.frames {
				t.Errorf("%d frames received; the devices say %d", tr.received.frames, got["received"])
			}
			if l.pps == 0 {
				return
			}
			if slots, all := l.pps*l.duration.Seconds(), float64(tr.sent.frames+tr.sent.skipped); math.Abs(all-slots) > 2 {
				t.Errorf("%d frames and %d missed slots, want %.0f together", tr.sent.frames, tr.sent.skipped, slots)
			}
		})
	}
}

func deviceCounts(t *testing.T, testbed *Testbed) map[string]uint64 {
	t.Helper()
	sums := map[string]uint64{}
	for _, end := range []struct {
		ns     *netns.Handle
		device string
	}{{testbed.Left, testbed.LeftDev}, {testbed.Right, testbed.RightDev}} {
		if err := end.ns.Do(func() error {
			l, err := netlink.LinkByName(end.device)
			if err != nil {
				return err
			}
			sums["received"] += l.Attrs().Statistics.RxPackets
			return withEthtool(func(e *ethtool.Ethtool) error {
				stats, err := e.Stats(end.device)
				sums["sent"] += sumQueues(stats, "tx_queue_", "_xdp_xmit")
				sums["refused"] += sumQueues(stats, "tx_queue_", "_xdp_xmit_errors")
				return err
			})
		}); err != nil {
			t.Fatal(err)
		}
	}
	return sums
}

func TestSendStops(t *testing.T) {
	_, s := openTester(t, 1)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	begun := time.Now()
	_, err := s.generator.send(ctx, frameLoad{
		frames: []int{64}, flows: 1, pps: 1000, duration: time.Minute, cpus: []int{s.generatorCPU}})
	if !errors.Is(err, context.Canceled) || time.Since(begun) > 10*time.Second {
		t.Errorf("after %v: %v, want canceled at once", time.Since(begun), err)
	}
}

// Each stride visits all flows.
func TestStride(t *testing.T) {
	for n := uint32(1); n < 500; n++ {
		if s := stride(n); gcd(s, n) != 1 || s > n {
			t.Errorf("stride of %d flows is %d", n, s)
		}
	}
	if s := stride(50_000); s < 20_000 || s > 40_000 {
		t.Errorf("stride of 50000 flows is %d, want some way", s)
	}
}

func TestLatencies(t *testing.T) {
	// The lower edges are in order, and each is within 1/16 of the next.
	for b := 1; b < latencyBuckets-1; b++ {
		if lo, hi := floorOf(b), floorOf(b+1); hi <= lo || lo >= 32 && float64(hi-lo) > float64(lo)/15 {
			t.Fatalf("buckets %d and %d begin at %v and %v", b, b+1, lo, hi)
		}
	}
	var l latencies
	if l.quantile(0.5) != 0 || l.quantile(1) != 0 {
		t.Errorf("nothing timed: median %v, longest %v", l.quantile(0.5), l.quantile(1))
	}
	l.merge(&latencies{min: 10, max: 10})
	l.buckets[10] = 99
	l.merge(&latencies{min: 5, max: 1000})
	l.buckets[5]++
	if l.quantile(0) != 5 || l.quantile(0.5) != 10 || l.quantile(1) != 1000 || l.count() != 100 {
		t.Errorf("%v %v %v of %d", l.quantile(0), l.quantile(0.5), l.quantile(1), l.count())
	}
}

// A thread that was of a real-time class goes back to what it was, with its nice value.
func TestRealTime(t *testing.T) {
	ktest.Root(t)
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	before, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	undoPin, err := pin(0, -20)
	if err != nil {
		t.Fatal(err)
	}
	undo := realTime()
	within, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	undo()
	undoPin()
	after, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if within.Policy != unix.SCHED_FIFO && within.Policy != before.Policy { // refused in some control groups
		t.Errorf("policy %d", within.Policy)
	}
	if after.Policy != before.Policy || after.Nice != before.Nice || after.Priority != before.Priority {
		t.Errorf("%+v after, %+v before", after, before)
	}
}
