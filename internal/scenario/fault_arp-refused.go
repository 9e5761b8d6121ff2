// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"time"

	"natkit/internal/lab"
)

var arpRefusedFault = Fault{
	Code:    "arp-refused",
	Healthy: "web traffic through the gateway, which does not reply to ARP for an address of its loopback interface, like servers behind a load balancer",
	Broken:  "the gateway replies to ARP for none of its addresses (arp_ignore=8), and the client has no ARP entry for it",
	Cured:   "the setting is undone",
	Note:    "the client sends ARP requests every 100 ms instead of every second, to save time",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.run(ctx, s.lab.Node(lab.RoleClient), "sysctl -w net.ipv4.neigh.eth0.retrans_time_ms=100"); err != nil {
			return err
		}
		if err := s.shell(ctx, "sysctl -w net.ipv4.conf.all.arp_ignore=1 && ip addr add 192.168.0.77/32 dev lo"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		s.least = 2 * time.Second
		if err := s.shell(ctx, "sysctl -w net.ipv4.conf.eth1.arp_ignore=8"); err != nil {
			return err
		}
		return s.run(ctx, s.lab.Node(lab.RoleClient), fmt.Sprintf("ip neigh del %s dev eth0 || true", s.lab.Options().Addresses.Near))
	},
	cure: follow("sysctl -w"),
}
