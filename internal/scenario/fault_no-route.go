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

// beyond is a network behind the server.
var beyond = netip.MustParsePrefix("10.66.0.1/24")

var noRouteFault = Fault{
	Code:    "no-route",
	Healthy: "web traffic through the gateway, and two packets for an address that nobody has",
	Broken:  "the client talks to a network behind the server, and the gateway's route there is gone",
	Cured:   "the gateway has the route again",
	Note:    "only its owner knows which router leads to a network, so the cure follows the finding's description, with the router of this lab",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.spray(netip.MustParseAddr("10.65.0.1"), 2, 100))
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error { return s.talkBeyond() },
	cure: func(_ context.Context, s *faultRun, f causes.Finding) error {
		s.commands = append(s.commands, fmt.Sprintf("ip route add %s via %s", beyond.Masked(), s.lab.ServerNode().Addr))
		return s.watched.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(beyond.Masked()), Gw: s.lab.ServerNode().Addr.AsSlice()})
		})
	},
}

// talkBeyond has the client talk to the network behind the server, which the gateway may
// know a way to.
func (s *faultRun) talkBeyond() error {
	const port = 5353
	server := s.lab.ServerNode()
	if err := s.swallow(server, port); err != nil {
		return err
	}
	if err := addLoopback(server, beyond); err != nil {
		return err
	}
	s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(beyond.Addr(), port), 5, 50))
	return nil
}

// addLoopback gives a node another address, that of a network behind it.
func addLoopback(node *lab.Node, p netip.Prefix) error {
	return node.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(p)})
	})
}
