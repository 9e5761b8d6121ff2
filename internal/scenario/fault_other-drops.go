// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net/netip"

	"natkit/internal/diagnose/causes"
)

var otherDropsFault = Fault{
	Code:    "other-drops",
	Healthy: "the firewall queues some traffic for a program (NFQUEUE), and lets it pass while none reads",
	Broken:  "the same without letting it pass, as when the program has ended",
	Cured:   "packets that no program reads pass again",
	Note:    "every kernel has this one of the functions that drop packets outside NAT; the finding shows what to add to the rule",

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
	broken: shell("iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9"),
	cure: func(ctx context.Context, s *faultRun, _ causes.Finding) error {
		return s.shell(ctx, "iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9 --queue-bypass")
	},
}
