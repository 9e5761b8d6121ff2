// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var timeWaitFault = Fault{
	Code:    "time-wait-heavy",
	Healthy: "nearly all entries of the gateway's table are connections that are over, and it has plenty of room",
	Broken:  "connections that are over take more than two fifths of the table",
	Cured:   "their time-out is shortened and those that are there are removed, by netlink in place of the conntrack program",
	Note:    "the entries are made by netlink, not by packets, and belong to the gateway's namespace alone",

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
