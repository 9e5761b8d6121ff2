// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/kernel/conntrack"
)

var accountingFault = Fault{
	Code:    "conntrack-accounting",
	Healthy: "web traffic through a gateway with fifteen thousand connections",
	Broken:  "each connection counts its packets and records its start",
	Cured:   "both are turned off",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		return s.watched.Do(func() error {
			_, err := conntrack.Fill(ctx, conntrack.FillOptions{Count: 15000})
			return err
		})
	},
	broken: func(_ context.Context, s *faultRun) error {
		for _, key := range []string{"acct", "timestamp"} {
			if err := s.watched.Sysctl("net.netfilter.nf_conntrack_"+key, "1"); err != nil {
				return err
			}
		}
		return nil
	},
	cure: follow("sysctl -w"),
}
