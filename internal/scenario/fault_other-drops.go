// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"natkit/internal/diagnose/causes"
)

var otherDropsFault = Fault{
	Code:    "other-drops",
	Healthy: "the firewall shows a program some of the traffic (NFQUEUE), and lets it pass as long as none reads",
	Broken:  "the same without letting it pass, as when the program has died",
	Cured:   "what no program reads may pass again",
	Note:    "of all that drops packets outside of NAT this is the one that every kernel has; the finding says what to add to the rule, which only its owner can read",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		const port = 5353
		server := s.lab.ServerNode()
		if err := s.swallow(server, port); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, netip.AddrPortFrom(server.Addr, port), 5, 50))
		if err := s.shell(ctx, "iptables-legacy -A FORWARD -p udp -j NFQUEUE --queue-num 9 --queue-bypass"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.shell(ctx, "iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9")
	},
	cure: func(ctx context.Context, s *faultRun, _ causes.Finding) error {
		return s.shell(ctx, "iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9 --queue-bypass")
	},
}
