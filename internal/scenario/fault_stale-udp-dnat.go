// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"
)

var staleDNATFault = Fault{
	Code:    "stale-udp-dnat",
	Healthy: "clients send UDP to the gateway, whose rule translates to a server that never replies",
	Broken:  "the rule for a UDP service names another server now; older flows continue to the old one",
	Cured:   "their entries are removed, and the rules translate them again",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		server, near := s.lab.ServerNode(), s.lab.Options().Addresses.Near
		if err := s.swallow(server, 5353); err != nil {
			return err
		}
		if err := s.echo(server, 5354); err != nil {
			return err
		}
		if err := s.run(ctx, s.watched,
			"nft 'add chain ip nat PREROUTING { type nat hook prerouting priority dstnat; }'",
			fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr %s udp dport 53 dnat to %s:5353", near, server.Addr)); err != nil {
			return err
		}
		s.background(ctx, s.datagrams(netip.Addr{}, netip.AddrPortFrom(near, 53), 5, 20))
		return nil
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.watched, "nft flush chain ip nat PREROUTING",
			fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr %s udp dport 53 dnat to %s:5354", s.lab.Options().Addresses.Near, s.lab.ServerNode().Addr))
	},
	cure: follow("conntrack -D"),
}
