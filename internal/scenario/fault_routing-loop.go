// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var ttlFault = Fault{
	Code:    "routing-loop",
	Healthy: "web traffic through the gateway",
	Broken:  "the gateway sends packets for a network to the server, and the server sends them back",
	Cured:   "the server has that network, and sends nothing back",
	Note:    "only their owner knows which of the two routers is wrong: here it is the server, whose route the cure corrects",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		client := s.lab.Node(lab.RoleClient)
		// An address that is not masqueraded: a packet with the gateway's own would
		// end its first turn there.
		if err := addLoopback(client, otherway); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		const port = 5353
		server := s.lab.ServerNode()
		if err := server.Sysctl("net.ipv4.ip_forward", "1"); err != nil {
			return err
		}
		if err := s.swallow(server, port); err != nil {
			return err
		}
		if err := s.watched.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(beyond.Masked()), Gw: server.Addr.AsSlice()})
		}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(otherway.Addr(), netip.AddrPortFrom(beyond.Addr(), port), 3, 50))
		return nil
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.commands = append(s.commands, fmt.Sprintf("ip addr add %s dev lo   # on the server", beyond))
		return addLoopback(s.lab.ServerNode(), beyond)
	},
}
