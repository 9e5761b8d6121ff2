// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"
)

var answersFault = Fault{
	Code:    "answers-lost",
	Healthy: "web traffic through the gateway, and two packets for an address that nobody has",
	Broken:  "the rule that translates sources names an interface that is no longer the egress interface",
	Cured:   "a rule for the right interface",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		// The server, like any on the Internet, has no way to private addresses of others.
		if err := s.run(ctx, s.lab.ServerNode(), "ip route del default"); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.spray(netip.MustParseAddr("10.65.0.1"), 2, 100))
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.watched, "nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING oifname eth9 masquerade", "conntrack -F")
	},
	cure: follow("masquerade", "MASQUERADE", "conntrack -D"),
}
