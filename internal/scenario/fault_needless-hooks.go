// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
)

var needlessFault = Fault{
	Code:    "needless-hooks",
	Healthy: "a gateway with the rules that it needs, and web traffic",
	Broken:  "the tables mangle, raw and security also exist, with chains without a rule",
	Cured:   "the chains without a rule are deleted",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browse(ctx); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.lab.URL(), 300))
		return nil
	},
	broken: func(ctx context.Context, s *faultRun) error {
		for i, table := range []string{"raw", "mangle", "security"} {
			for _, hook := range []string{"prerouting", "forward", "postrouting"} {
				line := fmt.Sprintf("nft add table ip %s; nft 'add chain ip %s %s { type filter hook %s priority %d; }'", table, table, hook, hook, 10*i-300)
				if err := s.shell(ctx, line); err != nil {
					return err
				}
			}
		}
		return nil
	},
	cure: follow("nft delete chain"),
}
