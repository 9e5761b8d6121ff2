// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"strings"

	"natkit/internal/diagnose/causes"
)

var ruleChainFault = Fault{
	Code:    "rule-chain-long",
	Healthy: "three hundred connections a second through a firewall with one rule and a set of two thousand addresses",
	Broken:  "the firewall has a rule for each of two thousand addresses",
	Cured:   "the set again, instead of the rules",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.browseAt(ctx, 300); err != nil {
			return err
		}
		return s.firewall(ctx, true)
	},
	broken: func(ctx context.Context, s *faultRun) error { return s.firewall(ctx, false) },
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "nft -a list chain"); err != nil {
			return err
		}
		return s.firewall(ctx, true)
	},
}

// firewall drops what comes from two thousand addresses that nobody has.
func (s *faultRun) firewall(ctx context.Context, set bool) error {
	var addrs []string
	for n := range 2000 {
		addrs = append(addrs, fmt.Sprintf("198.18.%d.%d", n/250, 1+n%250))
	}
	var b strings.Builder
	b.WriteString("add table ip firewall\ndelete table ip firewall\ntable ip firewall {\n chain forward {\n  type filter hook forward priority filter;\n")
	if set {
		fmt.Fprintf(&b, "  ip saddr { %s } drop\n", strings.Join(addrs, ", "))
	} else {
		for _, a := range addrs {
			fmt.Fprintf(&b, "  ip saddr %s drop\n", a)
		}
	}
	b.WriteString(" }\n}\n")
	return s.nft(ctx, b.String())
}
