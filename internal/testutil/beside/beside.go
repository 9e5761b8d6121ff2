// SPDX-License-Identifier: Apache-2.0

// Package beside measures what a program that runs beside a router costs the packets that the router forwards.
package beside

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
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// program is set in a process that runs beside a benchmark: to its name.
const program = "NATKIT_BESIDE"

// Programs are what can run beside a benchmark. Each says once that it has begun, and goes on until done is closed.
type Programs map[string]func(begun func(), done <-chan struct{}) error

// Main runs one of the programs if this process is to be one of them, and says so: a test binary calls it first.
func Main(programs Programs) (ran bool) {
	run := programs[os.Getenv(program)]
	if run == nil {
		return false
	}
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(done)
	}()
	if err := run(func() { fmt.Println("begun") }, done); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// start starts one of Main's programs in a process of its own, as natkit is one: in that of the sender its goroutines and
// its memory slow the sender, too.
func start(b *testing.B, name string) (end func()) {
	b.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), program+"="+name)
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
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "begun\n" {
		b.Fatalf("%q, %v, %v", line, err, cmd.Wait())
	}
	return func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	}
}

// Benchmark is what one of Main's programs costs packets: datagrams through a router with masquerading, whose sender's
// thread does all the work. Rounds of about a second with and without the program take turns; of each the fastest twentieth
// of many short looks is taken, since the rest is what other work on the machine costs. In the first round beside the
// program it may slow some of the packets only: of that round all looks count, each at most twice the fastest twentieth, as
// they do in the rounds that it is compared with.
func Benchmark(b *testing.B, name string) {
	const packets, looks = 100, 5000
	send := Datagrams(b)
	var own, before unix.CPUSet
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own.Set(runtime.NumCPU() - 1)
	if err := errors.Join(unix.SchedGetaffinity(0, &before), unix.SchedSetaffinity(0, &own)); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	round := func() (fast, mean float64) {
		runtime.GC() // what opening and closing left is not to be done during a round
		all := make([]float64, looks)
		for i := range all {
			all[i] = send(packets)
		}
		slices.Sort(all)
		fast = all[looks/20]
		for _, ns := range all {
			mean += min(ns, 2*fast) / looks
		}
		return fast, mean
	}
	var first, later, without []float64
	for b.Loop() {
		fast1, mean1 := round()
		end := start(b, name)
		_, mean := round()
		fast, _ := round()
		end()
		fast2, mean2 := round() // a whole round may be slow
		least := min(fast1, fast2)
		without = append(without, least)
		first = append(first, 100*(mean/min(mean1, mean2)-1))
		later = append(later, 100*(fast/least-1))
	}
	slices.Sort(without)
	b.ReportMetric(without[len(without)/2], "ns/packet")
	for unit, ratios := range map[string][]float64{"%": later, "%-first-round": first} {
		slices.Sort(ratios)
		b.ReportMetric(ratios[len(ratios)/2], unit)
		b.ReportMetric(ratios[len(ratios)/4], unit+"-lower-quartile")
		b.ReportMetric(ratios[3*len(ratios)/4], unit+"-upper-quartile")
	}
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

// Datagrams gives what sends n datagrams of one flow through a router with masquerading, and says
// what one took of the sending thread, in nanoseconds: it does all the work.
func Datagrams(t testing.TB) func(n int) (ns float64) {
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

// threadTime is the CPU time of the calling thread, in nanoseconds.
func threadTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // it can't fail
	return t.Nano()
}
