// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var localPortsFault = Fault{
	Code:    "local-ports-exhausted",
	Healthy: "the gateway itself has 350 connections to a server, from a range of 500 ports",
	Broken:  "it opens more, until connect() fails",
	Cured:   "it gets more ports, and opens another connection",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.run(ctx, s.watched, "sysctl -qw net.ipv4.ip_local_port_range='40000 40499'"); err != nil {
			return err
		}
		if err := s.accept(s.lab.ServerNode(), 8000); err != nil {
			return err
		}
		_, err := s.connect(s.watched, netip.AddrPortFrom(s.lab.ServerNode().Addr, 8000), 350)
		return err
	},
	broken: func(_ context.Context, s *faultRun) error {
		made, err := s.connect(s.watched, netip.AddrPortFrom(s.lab.ServerNode().Addr, 8000), 500)
		if !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("after %d more connections: %v, and not %w", made, err, unix.EADDRNOTAVAIL)
		}
		return nil
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "net.ipv4.ip_local_port_range="); err != nil {
			return err
		}
		_, err := s.connect(s.watched, netip.AddrPortFrom(s.lab.ServerNode().Addr, 8000), 1)
		return err
	},
}

// accept takes connections in the namespace of a node, and keeps them until close.
func (s *faultRun) accept(node *lab.Node, port uint16) error {
	var l net.Listener
	err := node.Do(func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf(":%d", port))
		return err
	})
	if err != nil {
		return fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var held []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			held = append(held, c)
		}
		for _, c := range held {
			c.Close()
		}
	}()
	s.closers = append(s.closers, func() { l.Close(); <-ended })
	return nil
}

// connect opens so many connections from a node, which stay until close, and says how many
// it opened.
func (s *faultRun) connect(node *lab.Node, to netip.AddrPort, connections int) (made int, err error) {
	err = node.Do(func() error {
		for range connections {
			c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(to))
			if err != nil {
				return err
			}
			s.closers = append(s.closers, func() { c.Close() })
			made++
		}
		return nil
	})
	return made, err
}
