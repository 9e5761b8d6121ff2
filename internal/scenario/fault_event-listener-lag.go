// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
)

var eventListenerFault = Fault{
	Code:    "event-listener-lag",
	Healthy: "a program with a large buffer listens to the events of the gateway's connection tracking",
	Broken:  "a program with a small buffer does not read the events of the gateway's connection tracking",
	Cured:   "the program that does not read is ended",
	Note:    "the programs are sockets of this process; instead of a larger buffer the slow one is closed",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.listenEvents(64 << 20) // for a minute and more: nobody reads it either
	},
	broken: func(_ context.Context, s *faultRun) error {
		return s.listenEvents(4 << 10)
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.closers[len(s.closers)-1]()
		return nil
	},
}

// listenEvents opens a socket in the watched namespace that gets the events of
// connection tracking and reads none.
func (s *faultRun) listenEvents(buffer int) error {
	fd := -1
	err := s.watched.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 | 2 | 4}) // new, update, destroy
	})
	open := fd >= 0
	s.closers = append(s.closers, func() {
		if open {
			unix.Close(fd)
			open = false
		}
	})
	if err != nil {
		return fmt.Errorf("listen to events in %s: %w", s.watched.Netns, err)
	}
	return nil
}
