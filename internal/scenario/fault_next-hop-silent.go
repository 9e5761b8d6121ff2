// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"natkit/internal/diagnose/causes"
)

// nextRouter leads to the network beyond, on the gateway's outside network.
func nextRouter(s *faultRun) netip.Prefix {
	far := s.lab.Options().Addresses.Far
	return netip.PrefixFrom(s.lab.ServerNode().Addr.Next().Next(), far.Bits())
}

var nextHopFault = Fault{
	Code:    "next-hop-silent",
	Healthy: "web traffic through the gateway, and two packets for an address of the server's network that nobody has",
	Broken:  "the client talks to a network behind another router, which is gone",
	Cured:   "the router is back",
	Note:    "the cure is on that router, so it is not a command of the finding; the gateway sends ARP requests every 10 ms instead of every second, to save time",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.shell(ctx, "sysctl -w net.ipv4.neigh.eth0.retrans_time_ms=10"); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.spray(nextRouter(s).Addr().Next(), 2, 100))
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		if err := s.talkBeyond(); err != nil {
			return err
		}
		return s.shell(ctx, fmt.Sprintf("ip route add %s via %s", beyond.Masked(), nextRouter(s).Addr()))
	},
	cure: func(ctx context.Context, s *faultRun, _ causes.Finding) error {
		return s.run(ctx, s.lab.ServerNode(), fmt.Sprintf("ip addr add %s dev eth0", nextRouter(s)))
	},
}
