// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var portRaceFault = Fault{
	Code:    "snat-port-race",
	Healthy: "two clients on two CPUs open connections to one server at the same time, from different source ports",
	Broken:  "two clients on two CPUs open connections from the same source ports, which masquerading tries to keep",
	Cured:   "masquerading chooses ports at random from the start",
	Note:    "the clients are two threads on two CPUs that synchronize before each SYN; the rule that the finding shows is replaced by hand",

	topology: "routed", clients: 2,
	healthy: func(_ context.Context, s *faultRun) error {
		if runtime.NumCPU() < 2 {
			return errors.New("this machine has one CPU: two flows cannot choose a port at the same time")
		}
		s.traffic = append(s.traffic, s.pairs(20000))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic[:0], s.pairs(0))
		return nil
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "list chain"); err != nil {
			return err
		}
		return s.run(ctx, s.watched, "nft flush chain ip nat POSTROUTING",
			fmt.Sprintf("nft add rule ip nat POSTROUTING ip saddr %s oifname eth0 masquerade fully-random", s.lab.Options().Addresses.Client.Masked()))
	},
}

// pairs sends SYNs to one port of the server from two clients at the same time, three
// thousand pairs a second in bursts. apart is by how much their source ports differ.
func (s *faultRun) pairs(apart int) func(context.Context) error {
	return func(ctx context.Context) error {
		const burst = 60
		to := netip.AddrPortFrom(s.lab.ServerNode().Addr, 81)
		var sent [2]atomic.Int64 // how many each is ready to have sent
		var failed [2]error
		var wg sync.WaitGroup
		for k, role := range []string{lab.RoleClient, lab.RoleClient + "2"} {
			wg.Go(func() {
				node := s.lab.Node(role)
				failed[k] = node.Do(func() error { // on one thread, until it ends
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
					if err != nil {
						return err
					}
					defer unix.Close(fd)
					unpin, err := pin(k)
					if err != nil {
						return err
					}
					defer unpin()
					tick := time.NewTicker(20 * time.Millisecond)
					defer tick.Stop()
					for n := 0; ctx.Err() == nil; n++ {
						seg := segment{from: netip.AddrPortFrom(node.Addr, uint16(2000+(n+k*apart)%40000)), to: to, flags: tcpSYN}
						packet := seg.packet()
						if n%burst == 0 {
							<-tick.C
						}
						sent[k].Store(int64(n))
						for spin := 0; sent[1-k].Load() < int64(n) && spin < 2_000_000; spin++ { // the other may have ended
						}
						_ = unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
					}
					return nil
				})
			})
		}
		wg.Wait()
		return errors.Join(failed[:]...)
	}
}

// pin keeps the calling thread, which must be locked, on the nth of the processors that
// it may use, until unpin; if it may, before others that keep that processor busy: two
// threads can only do something at the same time when both of them run.
func pin(n int) (unpin func(), err error) {
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, fmt.Errorf("ask for processors: %w", err)
	}
	for cpu := range 8 * len(allowed) * 8 {
		if !allowed.IsSet(cpu) {
			continue
		}
		if n == 0 {
			one.Set(cpu)
			_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}, 0)
			return func() {
				_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
				_ = unix.SchedSetaffinity(0, &allowed)
			}, unix.SchedSetaffinity(0, &one)
		}
		n--
	}
	return nil, errors.New("only one processor may be used here")
}
