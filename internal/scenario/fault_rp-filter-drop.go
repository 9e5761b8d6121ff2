// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"natkit/internal/lab"
)

// otherway is a second address of the client whose way back, as the gateway
// knows it, leads by its other interface.
var otherway = netip.MustParsePrefix("10.99.0.1/32")

var rpFilterFault = Fault{
	Code:    "rp-filter-drop",
	Healthy: "the gateway filters strictly by reverse path, and routes are symmetric",
	Broken:  "the client sends from an address whose return path uses the gateway's other interface",
	Cured:   "filtering is set to loose on that interface",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.watched.Sysctl("net.ipv4.conf.eth1.rp_filter", "1"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		const port = 5353
		server := s.lab.ServerNode()
		if err := s.swallow(server, port); err != nil {
			return err
		}
		if err := addLoopback(s.lab.Node(lab.RoleClient), otherway); err != nil {
			return err
		}
		if err := s.watched.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(otherway), Gw: server.Addr.AsSlice()})
		}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(otherway.Addr(), netip.AddrPortFrom(server.Addr, port), 10, 50))
		return nil
	},
	cure: follow("sysctl -w"),
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
