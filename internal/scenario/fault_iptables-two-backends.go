// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
)

var twoBackendsFault = Fault{
	Code:    "iptables-two-backends",
	Healthy: "iptables-legacy has tables without rules beside the rules of nftables",
	Broken:  "iptables-legacy also translates and filters",
	Cured:   "its rules are converted to nftables, and its tables are emptied",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.run(ctx, s.watched, "iptables-legacy -t nat -S", "iptables-legacy -S"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.watched, "iptables-legacy -t nat -A POSTROUTING -s 192.168.0.0/24 -o eth0 -j MASQUERADE",
			"iptables-legacy -A FORWARD -s 198.18.0.0/15 -j DROP")
	},
	cure: follow("iptables-nft-restore", "iptables-legacy -t", "iptables-legacy -P"),
}
