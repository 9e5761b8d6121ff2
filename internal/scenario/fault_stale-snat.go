// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"
)

var staleSNATFault = Fault{
	Code:    "stale-snat",
	Healthy: "UDP flows through a gateway that translates their source to its external address",
	Broken:  "the gateway has another external address now and a rule for it; older flows continue with the old one",
	Cured:   "their entries are removed, and the rules translate them again",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		server := s.lab.ServerNode()
		if err := s.echo(server, 5353); err != nil {
			return err
		}
		if err := s.run(ctx, s.watched, "nft flush chain ip nat POSTROUTING",
			fmt.Sprintf("nft add rule ip nat POSTROUTING oifname eth0 snat to %s", s.lab.Options().Addresses.Far.Addr())); err != nil {
			return err
		}
		s.background(ctx, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, 5353), 5, 20))
		return nil
	},
	broken: func(ctx context.Context, s *faultRun) error {
		far := s.lab.Options().Addresses.Far
		return s.run(ctx, s.watched,
			fmt.Sprintf("ip addr del %s dev eth0", far), fmt.Sprintf("ip addr add 203.0.113.9/%d dev eth0", far.Bits()),
			"nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING oifname eth0 snat to 203.0.113.9")
	},
	cure: follow("conntrack -D"),
}
