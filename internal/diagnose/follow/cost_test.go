// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"

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

// Datagrams of a round, which all find room in the receiver's queue: one that is dropped passes
// another path, and the programs that look at drops.
const packets, room = 20000, 64 << 20

// receiver is a socket that wakes nobody. One of package net would wake the runtime's poller for
// each datagram, or not, as other goroutines are about.
func receiver(at netip.AddrPort) (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return 0, err
	}
	return fd, errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room),
		unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}),
	)
}

func nothingMatches(b *testing.B, wait bool) {
	ktest.Root(b)
	l, err := lab.Up(b.Context(), "routed", lab.Options{Name: ktest.Name(b), Rules: lab.RulesNft, Owned: true})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Down()
	var sink int
	var source net.Conn
	server := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	if err := l.ServerNode().Do(func() (err error) {
		sink, err = receiver(server)
		return err
	}); err != nil {
		b.Fatal(err)
	}
	defer unix.Close(sink)
	if err := l.Node("client").Do(func() (err error) {
		source, err = net.Dial("udp4", server.String())
		return err
	}); err != nil {
		b.Fatal(err)
	}
	defer source.Close()
	raw, err := source.(*net.UDPConn).SyscallConn()
	if err != nil {
		b.Fatal(err)
	}
	const rounds = 41
	got := make([]byte, 64)
	round := func() (ns float64) {
		runtime.GC() // what opening and closing left is not to be done during the round
		defer func() {
			n := 0
			for _, err := unix.Read(sink, got); err == nil; _, err = unix.Read(sink, got) {
				n++
			}
			if n != packets {
				b.Errorf("%d of %d datagrams arrived", n, packets)
			}
		}()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		datagram := make([]byte, 64)
		before := threadTime()
		_ = raw.Control(func(fd uintptr) {
			for range packets {
				_ = unix.Send(int(fd), datagram, 0) // a full queue of the receiver is as good
			}
		})
		return float64(threadTime()-before) / packets
	}
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
