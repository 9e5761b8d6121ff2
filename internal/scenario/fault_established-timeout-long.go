// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var establishedLongFault = Fault{
	Code:    "established-timeout-long",
	Healthy: "a tenth of the gateway's table is connections that were idle for a day",
	Broken:  "half of the gateway's table is connections that were idle for a day",
	Cured:   "their timeout is shortened and the present ones are removed, by netlink instead of the conntrack program",
	Note:    "the entries are created by netlink, not by packets, with the remaining time of a day without a packet",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		// Whoever set it on the host: a namespace begins with the kernel's default.
		if err := s.watched.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "432000"); err != nil {
			return err
		}
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.1, 0, "198.18.0.0/24", conntrack.FillOptions{Timeout: 4 * 24 * time.Hour})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.fill(ctx, 0.4, 0, "198.18.1.0/24", conntrack.FillOptions{Timeout: 4 * 24 * time.Hour})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "sysctl -w"); err != nil {
			return err
		}
		return s.empty(ctx, f, conntrack.Filter{Dst: netip.PrefixFrom(fillDest.Addr(), 32)})
	},
}
