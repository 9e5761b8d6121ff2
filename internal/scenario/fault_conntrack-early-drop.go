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
	Broken:  "the table is full, most of it with flows that are still being opened, and new ones take their places",
	Cured:   "the flows that fill the table are removed, those of the burst with them, by netlink in place of the conntrack program; nf_conntrack_max is left alone because it is one limit for the whole host",
	Note:    "the entries are made by netlink, not by packets, and belong to the gateway's namespace alone",

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
