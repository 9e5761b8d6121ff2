// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"natkit/internal/lab"
)

var ruleDropFault = Fault{
	Code:    "rule-drop",
	Healthy: "web traffic through a firewall that drops what a client sends to one address",
	Broken:  "a rule drops all that the client sends",
	Cured:   "that rule is deleted",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		const refused = "10.65.0.1"
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(netip.MustParseAddr(refused), 5353), 1, 5))
		if err := s.shell(ctx, "iptables-legacy -A FORWARD -d "+refused+" -j DROP"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.shell(ctx, fmt.Sprintf("iptables-legacy -A FORWARD -s %s -j DROP", s.lab.Node(lab.RoleClient).Addr))
	},
	cure: follow(" -D FORWARD "),
}
