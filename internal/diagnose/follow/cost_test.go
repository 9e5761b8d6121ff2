// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// BenchmarkNothingMatches is what a trace costs packets that it is not about: datagrams through a
// router with masquerading, whose sender's thread does all the work. Rounds with and without the
// trace take turns; the ratios of neighbours are compared, by their median.
func BenchmarkNothingMatches(b *testing.B) {
	b.Run("attached", func(b *testing.B) { nothingMatches(b, false) })
	b.Run("waiting", func(b *testing.B) { nothingMatches(b, true) })
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
		runtime.GC() // what opening and closing left is not to be done during a round
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before := threadTime()
		_ = raw.Control(func(fd uintptr) {
			for range n {
				_ = unix.Send(int(fd), datagram, 0) // what does not arrive is noticed
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

func nothingMatches(b *testing.B, wait bool) {
	const packets, rounds = 20000, 41
	send := datagrams(b)
	round := func() float64 { return send(packets) }
	flow, err := trace.ParseFlow("tcp 198.18.0.1 -> 198.18.0.2:9")
	if err != nil {
		b.Fatal(err)
	}
	round()
	for b.Loop() {
		var with, without []float64
		for range rounds {
			round() // the first one after a change is not measured
			without = append(without, round())
			r, err := Open(Options{Flow: flow, Rate: 100, Wait: wait})
			if err != nil {
				b.Fatal(err)
			}
			round()
			with = append(with, round())
			r.Close()
		}
		ratios := make([]float64, rounds)
		for i := range ratios {
			ratios[i] = 100 * (with[i]/without[i] - 1)
		}
		slices.Sort(ratios)
		slices.Sort(with)
		slices.Sort(without)
		b.ReportMetric(without[rounds/2], "ns/packet")
		b.ReportMetric(with[rounds/2]-without[rounds/2], "ns/packet-more")
		b.ReportMetric(ratios[rounds/2], "%")
		b.ReportMetric(ratios[rounds/4], "%-lower-quartile")
		b.ReportMetric(ratios[3*rounds/4], "%-upper-quartile")
		b.ReportMetric(100*(with[0]/without[0]-1), "%-of-fastest") // least disturbed by other programs
	}
}

// threadTime is the CPU time of the calling thread, in nanoseconds.
func threadTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // it can't fail
	return t.Nano()
}
