// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var tableFullFault = Fault{
	Code:    "conntrack-table-full",
	Healthy: "web traffic through a gateway whose connection tracking table is half full of established connections",
	Broken:  "the table has room for 100 entries when the traffic starts",
	Cured:   "the connections that fill the table are ended, as the finding proposes, by netlink instead of the conntrack program; nf_conntrack_max is not changed, because it is one limit for the whole host",
	Note:    "the entries are created by netlink, not by packets, and belong only to the gateway's namespace",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.5, 0, "198.18.0.0/24", conntrack.FillOptions{})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.fill(ctx, 1, 100, "198.18.1.0/24", conntrack.FillOptions{})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		return s.empty(ctx, f, conntrack.Filter{Dst: netip.PrefixFrom(fillDest.Addr(), 32)})
	},
}
