// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var timeWaitFault = Fault{
	Code:    "time-wait-heavy",
	Healthy: "nearly all entries of the gateway's table are closed connections, and it has plenty of room",
	Broken:  "closed connections use more than two fifths of the table",
	Cured:   "their timeout is shortened and the present ones are removed, by netlink instead of the conntrack program",
	Note:    "the entries are created by netlink, not by packets, and belong only to the gateway's namespace",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.12, 0, "198.18.0.0/24", conntrack.FillOptions{State: conntrack.TCPTimeWait})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.fill(ctx, 0.32, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPTimeWait})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "sysctl -w"); err != nil {
			return err
		}
		return s.empty(ctx, f, conntrack.Filter{States: 1 << conntrack.TCPTimeWait})
	},
}
