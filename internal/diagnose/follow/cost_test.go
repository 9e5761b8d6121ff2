// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// BenchmarkNothingMatches is what a trace costs packets that it is not about: datagrams through a
// router with masquerading, whose sender's thread does all the work. Rounds with and without the
// trace take turns; of each the fastest twentieth of many short looks is taken, since the rest is what other work on the machine costs.
func BenchmarkNothingMatches(b *testing.B) {
	for _, how := range []string{attached, waiting} {
		b.Run(how, func(b *testing.B) { nothingMatches(b, how) })
	}
}

// Waiting costs a packet of an established connection that nobody drops nothing: no program sees it.
// Counted, because no clock of a shared machine tells one per cent.
func TestWaitingSeesNothing(t *testing.T) {
	round := datagrams(t)
	round(1) // the entry of the flow is there
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stats.Close() })
	for _, wait := range []bool{true, false} {
		r, err := Open(Options{Flow: flowOf(t, "tcp 198.18.0.1 -> 198.18.0.2:9"), Rate: 100, Wait: wait})
		if err != nil {
			t.Fatal(err)
		}
		const n = 1000
		before := runs(t)
		round(n)
		after := runs(t)
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		delete(after, "packet_lost") // sees what anybody on the machine drops
		all := uint64(0)
		for name, count := range after {
			all += count - before[name]
		}
		if wait && all >= n { // below it new connections of other namespaces
			t.Errorf("waiting: programs ran %d times for %d datagrams: %v", all, n, after)
		}
		if !wait && all < n {
			t.Errorf("attached: programs ran %d times for %d datagrams: they are not counted", all, n)
		}
	}
}

// runs is how often each program has run that this process has open.
func runs(t *testing.T) map[string]uint64 {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fdinfo")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, entry := range entries {
		data, err := os.ReadFile("/proc/self/fdinfo/" + entry.Name())
		if err != nil {
			continue // of reading the folder
		}
		_, line, found := strings.Cut(string(data), "prog_id:\t")
		id, err := strconv.ParseUint(strings.TrimSpace(strings.SplitN(line, "\n", 2)[0]), 10, 32)
		if !found || err != nil {
			continue
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
		if err != nil {
			t.Fatal(err)
		}
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		s, err := p.Stats()
		if err != nil {
			t.Fatal(err)
		}
		out[info.Name] = s.RunCount
		p.Close()
	}
	return out
}

// receiver is a socket that wakes nobody, and has room for all datagrams of a round. One of package
// net would wake the runtime's poller for each, or not, as other goroutines are about; and one that
// is dropped passes another path, and the programs that look at drops.
func receiver(at netip.AddrPort) (fd int, err error) {
	const room = 64 << 20
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return 0, err
	}
	return fd, errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room),
		unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}),
	)
}

// datagrams gives what sends n datagrams of one flow through a router with masquerading, and says
// what one took of the sending thread, in nanoseconds: it does all the work.
func datagrams(t testing.TB) func(n int) (ns float64) {
	ktest.Root(t)
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t), Rules: lab.RulesNft, Owned: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Down() })
	var sink int
	var source net.Conn
	server := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	if err := l.ServerNode().Do(func() (err error) {
		sink, err = receiver(server)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(sink) })
	if err := l.Node("client").Do(func() (err error) {
		source, err = net.Dial("udp4", server.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { source.Close() })
	raw, err := source.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	datagram, got := make([]byte, 64), make([]byte, 64)
	return func(n int) float64 {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before := threadTime()
		_ = raw.Control(func(fd uintptr) {
			for range n {
				// Raw, without the runtime's scheduler. What does not arrive is noticed.
				_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&datagram[0])), uintptr(len(datagram)), 0, 0, 0)
			}
		})
		took := float64(threadTime()-before) / float64(n)
		arrived := 0
		for _, err := unix.Read(sink, got); err == nil; _, err = unix.Read(sink, got) {
			arrived++
		}
		if arrived != n {
			t.Errorf("%d of %d datagrams arrived", arrived, n)
		}
		return took
	}
}

func nothingMatches(b *testing.B, how string) {
	const packets, looks = 100, 5000
	send := datagrams(b)
	var own, before unix.CPUSet
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own.Set(runtime.NumCPU() - 1)
	if err := errors.Join(unix.SchedGetaffinity(0, &before), unix.SchedSetaffinity(0, &own)); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	round := func() float64 {
		runtime.GC() // what opening and closing left is not to be done during a round
		all := make([]float64, looks)
		for i := range all {
			all[i] = send(packets)
		}
		slices.Sort(all)
		return all[looks/20]
	}
	var ratios, without []float64
	for b.Loop() {
		first := round()
		end := tracing(b, how)
		with := round()
		end()
		least := min(first, round()) // a whole round may be slow
		without = append(without, least)
		ratios = append(ratios, 100*(with/least-1))
	}
	slices.Sort(ratios)
	slices.Sort(without)
	b.ReportMetric(without[len(without)/2], "ns/packet")
	b.ReportMetric(ratios[len(ratios)/2], "%")
	b.ReportMetric(ratios[len(ratios)/4], "%-lower-quartile")
	b.ReportMetric(ratios[3*len(ratios)/4], "%-upper-quartile")
}

// besideTests is set in the process that traces beside a benchmark: to how it does.
const (
	besideTests = "NATKIT_TRACE_BESIDE"
	attached    = "attached"
	waiting     = "waiting"
)

// traceBeside traces a flow that never comes until its standard input ends, and says when it has begun.
func traceBeside() error {
	flow, err := trace.ParseFlow("tcp 198.18.0.1 -> 198.18.0.2:9")
	if err != nil {
		return err
	}
	r, err := Open(Options{Flow: flow, Rate: 100, Wait: os.Getenv(besideTests) == waiting})
	if err != nil {
		return err
	}
	fmt.Println("tracing")
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, r.Close())
}

// tracing starts traceBeside in a process of its own, as natkit trace is one: in that of the sender its goroutines and its
// memory slow the sender, too.
func tracing(b *testing.B, how string) (end func()) {
	b.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), besideTests+"="+how)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "tracing\n" {
		b.Fatalf("%q, %v, %v", line, err, cmd.Wait())
	}
	return func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	}
}

// threadTime is the CPU time of the calling thread, in nanoseconds.
func threadTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // it can't fail
	return t.Nano()
}
