// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var elsewhereFault = Fault{
	Code:    "answered-from-elsewhere",
	Healthy: "a program on the server replies from the address to which the datagrams were sent",
	Broken:  "it replies from the server's other address",
	Cured:   "it is bound to the address that clients ask",
	Note:    "the cure is a setting of the program, not a command of the finding",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		err := s.echo(s.lab.ServerNode(), 5300)
		s.background(ctx, s.datagrams(netip.Addr{}, netip.AddrPortFrom(s.lab.ServerNode().Addr, 5300), 20, 10))
		return err
	},
	broken: func(ctx context.Context, s *faultRun) error {
		s.close()
		server := s.lab.ServerNode()
		other := server.Addr.Next()
		if err := s.run(ctx, server, fmt.Sprintf("ip address add %s/24 dev eth0", other)); err != nil {
			return err
		}
		s.background(ctx, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, 5300), 20, 10))
		return s.echoFrom(server, 5300, other)
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		last := len(s.closers) - 1
		s.closers[last]() // the server; those who ask go on
		s.closers = s.closers[:last]
		return s.echo(s.lab.ServerNode(), 5300)
	},
}

// echoFrom answers datagrams for a node's address from another one of it.
func (s *faultRun) echoFrom(node *lab.Node, port uint16, from netip.Addr) error {
	var in, out *net.UDPConn
	err := node.Do(func() (err error) {
		if in, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(node.Addr, port))); err != nil {
			return err
		}
		out, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, port)))
		return err
	})
	if err != nil {
		if in != nil {
			in.Close()
		}
		return fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			n, client, err := in.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = out.WriteToUDPAddrPort(buf[:n], client)
		}
	}()
	s.closers = append(s.closers, func() { in.Close(); out.Close() })
	return nil
}
