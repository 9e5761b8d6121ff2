// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// What the monitor sends to the clients' network: with --arp-probes off nothing, whatever happens; by default nothing while
// all is well, and three ARP probes when clients do not confirm their connections; with always one in each interval.
func TestARPProbes(t *testing.T) {
	ktest.Root(t)
	for _, mode := range []monitor.ARPProbes{monitor.ProbesOff, monitor.ProbesOnSymptom, monitor.ProbesAlways} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			ktest.Lacking(t, func(t *testing.T) { sendsProbes(t, mode) })
		})
	}
}

func sendsProbes(t *testing.T, mode monitor.ARPProbes) {
	const interval = time.Second
	w := watchLab(t, Fault{})
	// So little that a pause of the machine is no fall of the traffic.
	stop := w.change(do(browseAt(1), wait(12*time.Second)))
	probes := countProbes(t, w.lab.Node(lab.RoleClient))
	w.startMonitor(watchedBy{Interval: interval, ARPProbes: mode})
	w.until(time.Minute, "the node is healthy", func() bool {
		w.cluster.mu.Lock()
		defer w.cluster.mu.Unlock()
		return w.cluster.statuses > 0
	})
	rest := func() { _ = wait(8*interval)(t.Context(), w.faultRun) }
	rest()
	if n := probes.Load(); (n > 0) != (mode == monitor.ProbesAlways) {
		t.Errorf("%d probes while all is well", n)
	}
	stop()
	stop = w.change(do(lostBeyond.broken, send(requests("{url}", 30))))
	defer func() { stop() }()
	w.until(2*time.Minute, "clients-unreached", func() bool { return w.last("clients-unreached").Kind == history.Began })
	before := probes.Load()
	rest()
	switch n := probes.Load(); {
	case mode == monitor.ProbesOff && n != 0:
		t.Errorf("%d probes, and none was to be sent", n)
	case mode == monitor.ProbesOnSymptom && n != 3:
		t.Errorf("%d probes of the symptom, want 3", n)
	case mode == monitor.ProbesAlways && n <= before:
		t.Errorf("%d probes, and %d eight intervals before", n, before)
	}
}

// countProbes counts the ARP requests that a node receives and that name no sender.
func countProbes(t *testing.T, n *lab.Node) *atomic.Int64 {
	t.Helper()
	fd := -1
	if err := n.Do(func() (err error) {
		const networkARP = 0x0608 // ETH_P_ARP in the order of the network
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, networkARP)
		return errors.Join(err, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	}); err != nil {
		t.Fatal(err)
	}
	var count atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 100); ; {
			switch n, _, err := unix.Recvfrom(fd, b, 0); {
			case err == nil && n >= 42 && bytes.Equal(b[20:22], []byte{0, 1}) && bytes.Equal(b[28:32], make([]byte, 4)):
				count.Add(1)
			case err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
				return
			case t.Context().Err() != nil:
				return
			}
		}
	}()
	t.Cleanup(func() {
		<-done
		unix.Close(fd)
	})
	return &count
}
