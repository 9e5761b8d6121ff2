// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
)

var helperFault = Fault{
	Code:    "conntrack-helper",
	Healthy: "web traffic through a gateway; the kernel has helpers, but assigns none",
	Broken:  "a rule assigns the FTP helper to all connections to port 80",
	Cured:   "the rule and the connections with the helper are deleted",
	Note:    "the output of the finding's commands shows the rule; connections with the helper are removed to save time",

	topology: "routed",
	healthy:  browse,
	broken: func(ctx context.Context, s *faultRun) error {
		return s.nft(ctx, `table ip helped {
	ct helper ftp { type "ftp" protocol tcp; }
	chain prerouting {
		type filter hook prerouting priority filter;
		tcp dport 80 ct helper set "ftp"
	}
}
`)
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "nft -a list ruleset"); err != nil {
			return err
		}
		return s.run(ctx, s.watched, "nft delete table ip helped", "conntrack -F")
	},
}
