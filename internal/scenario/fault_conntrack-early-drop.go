// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var earlyDropFault = Fault{
	Code:    "conntrack-early-drop",
	Healthy: "web traffic through a gateway whose table is a third full",
	Broken:  "the table is full, mostly with half-open flows, and new ones evict them",
	Cured:   "the flows that fill the table are removed, including those of the burst, by netlink instead of the conntrack program; nf_conntrack_max is not changed, because it is one limit for the whole host",
	Note:    "the entries are created by netlink, not by packets, and belong only to the gateway's namespace",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.36, 0, "198.18.0.0/24", conntrack.FillOptions{})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.spray(s.lab.ServerNode().Addr, 20000, 5000))
		if err := s.fill(ctx, 0.3, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPSynRecv}); err != nil {
			return err
		}
		return s.fill(ctx, 1, 0, "198.18.2.0/24", conntrack.FillOptions{Protocol: unix.IPPROTO_UDP, Unreplied: true})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		s.traffic = s.traffic[:1]
		return s.empty(ctx, f, conntrack.Filter{})
	},
}
