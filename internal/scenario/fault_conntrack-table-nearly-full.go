// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var tableNearlyFullFault = Fault{
	Code:    "conntrack-table-nearly-full",
	Healthy: "web traffic through a gateway whose connection tracking table is half full",
	Broken:  "the table is 92 % full, and nothing is lost yet",
	Cured:   "the connections that fill the table are ended, as the finding proposes, by netlink instead of the conntrack program",
	Note:    "the entries are created by netlink, not by packets, and belong only to the gateway's namespace",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.5, 0, "198.18.0.0/24", conntrack.FillOptions{})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.fill(ctx, 0.42, 0, "198.18.1.0/24", conntrack.FillOptions{})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		return s.empty(ctx, f, conntrack.Filter{Dst: netip.PrefixFrom(fillDest.Addr(), 32)})
	},
}
