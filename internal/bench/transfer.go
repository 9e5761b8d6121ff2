// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// transfer is bulk data over TCP connections through a testbed, all one way, by
// blocking system calls on a thread for each end of each connection: as iperf3
// does it.
type transfer struct {
	source, target netip.AddrPort // of the connections; the client's port may be 0
	streams        int
	down           bool          // from the right end to the left
	duration       time.Duration // how long is sent, or
	bytes          int64         // how much on each connection
}

// transferred is what a transfer did.
type transferred struct {
	bytes       int64
	elapsed     time.Duration // from the first byte sent until the last one is read
	retransmits int64         // segments
	cpu         machineTime
}

func (t transferred) gbit() float64 { return float64(t.bytes) * 8 / 1e9 }

// transferChunk is how much a system call writes or reads: iperf3's default.
const transferChunk = 128 << 10

// stallLimit is how long a transfer may go on after its time.
const stallLimit = 15 * time.Second

// run makes the connections, sends, and reads all that was sent.
func (t transfer) run(ctx context.Context, testbed *Testbed) (res transferred, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.duration+stallLimit, errors.New("stalled"))
	defer cancel()
	clients, servers, err := t.connect(ctx, testbed)
	defer func() {
		for _, f := range append(clients, servers...) {
			f.Close()
		}
	}()
	if err != nil {
		return res, fmt.Errorf("connect %s to %s through the router: %w", t.source, t.target, err)
	}
	senders, receivers := clients, servers
	if t.down {
		senders, receivers = servers, clients
	}
	cpus, err := allowedCPUs()
	if err != nil {
		return res, err
	}

	// The end of ctx wakes whoever waits in a system call.
	release := context.AfterFunc(ctx, func() {
		for _, f := range append(clients, servers...) {
			_ = unix.Shutdown(int(f.Fd()), unix.SHUT_RDWR) // already shut: nobody waits
		}
	})
	defer release()
	before, err := readMachineTime()
	if err != nil {
		return res, err
	}
	start := time.Now()
	res.bytes, err = t.move(cpus, senders, receivers, start)
	res.elapsed = time.Since(start)
	after, machineErr := readMachineTime()
	if machineErr != nil {
		return res, machineErr
	}
	if ctx.Err() != nil {
		return res, fmt.Errorf("transfer through the router: %w", context.Cause(ctx))
	}
	if err != nil {
		return res, fmt.Errorf("transfer through the router: %w", err)
	}
	res.cpu = after.since(before)
	for _, f := range senders {
		info, err := unix.GetsockoptTCPInfo(int(f.Fd()), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return res, fmt.Errorf("read retransmits: %w", err)
		}
		res.retransmits += int64(info.Total_retrans)
	}
	return res, nil
}

// move sends on all streams at once and returns how many bytes were read.
func (t transfer) move(cpus []int, senders, receivers []*os.File, start time.Time) (int64, error) {
	var working sync.WaitGroup
	var read atomic.Int64
	errs := make([]error, 2*t.streams)
	for i := range t.streams {
		// The left end on one processor, the right end on the next.
		left, right := cpus[2*i%len(cpus)], cpus[(2*i+1)%len(cpus)]
		sendAt, readAt := left, right
		if t.down {
			sendAt, readAt = right, left
		}
		working.Go(func() { errs[2*i] = pinned(sendAt, func() error { return t.send(int(senders[i].Fd()), start) }) })
		working.Go(func() {
			errs[2*i+1] = pinned(readAt, func() error {
				n, err := readAll(int(receivers[i].Fd()))
				read.Add(n)
				return err
			})
		})
	}
	working.Wait()
	return read.Load(), errors.Join(errs...)
}

// connect makes the connections; files are those of blocking sockets, in order.
func (t transfer) connect(ctx context.Context, testbed *Testbed) (clients, servers []*os.File, err error) {
	var listener *net.TCPListener
	if err := testbed.Right.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(t.target))
		return err
	}); err != nil {
		return nil, nil, err
	}
	defer listener.Close()
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(t.source)}
	for range t.streams {
		client, err := blockingSocket(testbed.Left, func() (net.Conn, error) { return dialer.DialContext(ctx, "tcp4", t.target.String()) })
		if err != nil {
			return clients, servers, err
		}
		clients = append(clients, client)
		server, err := blockingSocket(nil, func() (net.Conn, error) { return listener.Accept() })
		if err != nil {
			return clients, servers, err
		}
		servers = append(servers, server)
	}
	return clients, servers, nil
}

// blockingSocket takes a connection's socket from Go's poller, and what Go set on
// it from the socket: with TCP_NODELAY one stream carries a quarter more than
// iperf3's, whose sockets are as the kernel makes them.
func blockingSocket(ns *netns.Handle, open func() (net.Conn, error)) (f *os.File, err error) {
	err = ns.Do(func() error {
		conn, err := open()
		if err != nil {
			return err
		}
		defer conn.Close()
		tcp := conn.(*net.TCPConn)
		if err := tcp.SetNoDelay(false); err != nil {
			return err
		}
		f, err = tcp.File()
		return err
	})
	if err != nil {
		return nil, err
	}
	f.Fd() // makes it block
	return f, nil
}

// pinned runs fn on a thread of its own on one processor.
func pinned(cpu int, fn func() error) error {
	return (*netns.Handle)(nil).Do(func() error {
		var before, one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return fmt.Errorf("read processors of thread: %w", err)
		}
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("pin thread to CPU %d: %w", cpu, err)
		}
		defer unix.SchedSetaffinity(0, &before)
		return fn()
	})
}

// send writes until its time is over or its bytes are sent, and ends the stream. It writes
// once at least: on a busy machine it may begin when its time is over.
func (t transfer) send(fd int, start time.Time) error {
	chunk := make([]byte, transferChunk)
	for i := range chunk {
		chunk[i] = byte(i) // else all of it is one page of zeros in memory, which copies faster than data does
	}
	for left := t.bytes; ; {
		n := len(chunk)
		switch {
		case t.bytes > 0 && left == 0, left < 0 && time.Since(start) >= t.duration:
			return unix.Shutdown(fd, unix.SHUT_WR)
		case t.bytes > 0:
			n = int(min(left, int64(n)))
		}
		n, err := unix.Write(fd, chunk[:n])
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("send: %w", err)
		}
		left -= int64(max(n, 0))
	}
}

// readAll reads until the stream ends.
func readAll(fd int) (sum int64, err error) {
	chunk := make([]byte, transferChunk)
	for {
		n, err := unix.Read(fd, chunk)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return sum, fmt.Errorf("receive: %w", err)
		case n == 0:
			return sum, nil
		default:
			sum += int64(n)
		}
	}
}
