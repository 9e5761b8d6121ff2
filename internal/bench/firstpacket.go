// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// maxTimedFlows are a trial's: each has a port of its own.
const maxTimedFlows = 20_000

// echoTimeout is when a datagram without an answer is lost, in seconds.
const echoTimeout = 5

// echoAddress is where the right end of a testbed echoes.
func echoAddress(testbed *Testbed) netip.AddrPort {
	return netip.AddrPortFrom(testbed.Targets.Addr().Next(), echoPort)
}

// serveEcho answers each datagram at the right end with itself, until stop is
// called.
func serveEcho(testbed *Testbed) (stop func() error, err error) {
	fd, err := datagramSocket(testbed.Right, echoAddress(testbed))
	if err != nil {
		return nil, fmt.Errorf("serve echo: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- echo(fd) }()
	return func() error {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR) // it says that nobody is connected, and wakes the reader all the same
		return errors.Join(<-done, unix.Close(fd))
	}, nil
}

// echo ends when the socket is shut, which shows as a datagram from nobody.
func echo(fd int) error {
	var b [64]byte
	for {
		n, from, err := unix.Recvfrom(fd, b[:], 0)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("echo: %w", err)
		case from == nil:
			return nil
		default:
			// One that can't be answered shows as lost where it was sent.
			_ = unix.Sendto(fd, b[:n], 0, from)
		}
	}
}

// firstPacket is how much longer the first datagram of a flow and its answer take
// than the second: the median of so many new flows.
func (s *site) firstPacket(ctx context.Context, flows int) (time.Duration, error) {
	source := s.testbed.Sources.Addr().Next()
	target := echoAddress(s.testbed)
	more := make([]time.Duration, 0, flows)
	for range flows {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		first, second, err := s.twoDatagrams(netip.AddrPortFrom(source, s.nextPort()), target)
		if err != nil {
			return 0, err
		}
		more = append(more, first-second)
	}
	slices.Sort(more)
	return more[len(more)/2], nil
}

// nextPort goes through the ports that a flow may have: one used lately might
// still be known to the router.
func (s *site) nextPort() uint16 {
	const first, last = 1024, 61_000
	if s.port < first || s.port == last {
		s.port = first - 1
	}
	s.port++
	return s.port
}

// twoDatagrams times a flow's first datagram and its second, each until its answer.
func (s *site) twoDatagrams(source, target netip.AddrPort) (first, second time.Duration, err error) {
	fd, err := datagramSocket(s.testbed.Left, source)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: echoTimeout}); err != nil {
		return 0, 0, fmt.Errorf("set time-out: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: target.Addr().As4(), Port: int(target.Port())}); err != nil {
		return 0, 0, fmt.Errorf("connect to %s: %w", target, err)
	}
	for _, took := range []*time.Duration{&first, &second} {
		b := [1]byte{}
		start := time.Now()
		if _, err := unix.Write(fd, b[:]); err != nil {
			return 0, 0, fmt.Errorf("send to %s: %w", target, err)
		}
		for {
			_, err = unix.Read(fd, b[:])
			if err != unix.EINTR {
				break
			}
		}
		*took = time.Since(start)
		if err == unix.EAGAIN {
			err = fmt.Errorf("no answer after %d s", echoTimeout)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("datagram from %s to %s: %w", source, target, err)
		}
	}
	return first, second, nil
}

// datagramSocket is a blocking UDP socket bound to an address.
func datagramSocket(ns *netns.Handle, at netip.AddrPort) (fd int, err error) {
	err = ns.Do(func() error {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("make socket: %w", err)
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err != nil {
			unix.Close(fd)
			return fmt.Errorf("bind to %s: %w", at, err)
		}
		return nil
	})
	return fd, err
}
