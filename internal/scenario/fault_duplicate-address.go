// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"natkit/internal/diagnose/causes"
)

var duplicateFault = Fault{
	Code:    "duplicate-address",
	Healthy: "web traffic through the gateway, and a second host on the clients' network",
	Broken:  "the second host also has the gateway's address",
	Cured:   "it is removed there, and the gateway announces its hardware address",

	topology: "routed",
	clients:  2,
	healthy:  browse,
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.lab.Node("client2"), fmt.Sprintf("ip addr add %s dev eth0", s.nearPrefix()))
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.run(ctx, s.lab.Node("client2"), fmt.Sprintf("ip addr del %s dev eth0", s.nearPrefix())); err != nil {
			return err
		}
		return s.follow(ctx, f, "arping -U")
	},
}

// nearPrefix is the gateway's address on the clients' network.
func (s *faultRun) nearPrefix() netip.Prefix {
	a := s.lab.Options().Addresses
	return netip.PrefixFrom(a.Near, a.Client.Bits())
}
