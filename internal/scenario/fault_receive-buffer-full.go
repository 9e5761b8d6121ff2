// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"natkit/internal/diagnose/causes"
)

var receiveBufferFault = Fault{
	Code:    "receive-buffer-full",
	Healthy: "a program on the server replies to datagrams",
	Broken:  "it stops reading, and the datagrams continue",
	Cured:   "it reads again",
	Note:    "the cure is in the program, so it is not a command of the finding",

	topology: "routed",
	healthy: func(_ context.Context, s *faultRun) error {
		s.watched = s.lab.ServerNode()
		const port = 5300
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(s.watched.Addr, port), 20, 50))
		return s.echo(s.watched, port)
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.close()
		var c *net.UDPConn
		err := s.watched.Do(func() (err error) {
			if c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 5300}); err != nil {
				return err
			}
			return c.SetReadBuffer(1)
		})
		if err != nil {
			return fmt.Errorf("listen in %s: %w", s.watched.Netns, err)
		}
		s.closers = append(s.closers, func() { c.Close() })
		return nil
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.close()
		return s.echo(s.watched, 5300)
	},
}
