// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
	"natkit/internal/kernel/conntrack"
)

var closeWaitFault = Fault{
	Code:    "close-wait-heavy",
	Healthy: "the timeout of CLOSE_WAIT is an hour, as kube-proxy sets it, and few connections are in that state",
	Broken:  "half of the gateway's table is connections that one side has closed",
	Cured:   "their timeout is set to the kernel's default, and the present ones are removed, by netlink instead of the conntrack program",
	Note:    "the entries are created by netlink, not by packets, and belong only to the gateway's namespace",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.watched.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_close_wait", "3600"); err != nil {
			return err
		}
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.fill(ctx, 0.1, 0, "198.18.0.0/24", conntrack.FillOptions{State: conntrack.TCPCloseWait})
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.fill(ctx, 0.4, 0, "198.18.1.0/24", conntrack.FillOptions{State: conntrack.TCPCloseWait})
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "sysctl -w"); err != nil {
			return err
		}
		return s.empty(ctx, f, conntrack.Filter{States: 1 << conntrack.TCPCloseWait})
	},
}
