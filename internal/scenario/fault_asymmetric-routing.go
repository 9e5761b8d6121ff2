// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var asymmetricFault = asymmetricBy("nft add table ip firewall",
	"nft 'add chain ip firewall forward { type filter hook forward priority filter; }'",
	"nft add rule ip firewall forward ct state invalid counter drop")

// asymmetricBy is the fault on a gateway whose firewall is made by these commands.
func asymmetricBy(firewall ...string) Fault {
	f := asymmetricRouted
	f.healthy = func(ctx context.Context, s *faultRun) error {
		if err := s.run(ctx, s.watched, append([]string{"nft delete table ip nat"}, firewall...)...); err != nil {
			return err
		}
		return asymmetricRouted.healthy(ctx, s)
	}
	return f
}

var asymmetricRouted = Fault{
	Code:    "asymmetric-routing",
	Healthy: "the gateway forwards without NAT and drops invalid packets, as firewalls do",
	Broken:  "the server replies by another path, around the gateway",
	Cured:   "traffic between the two is excluded from connection tracking",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		server, client := s.lab.ServerNode(), s.lab.Node(lab.RoleClient)
		// The other way, not used yet.
		if err := s.run(ctx, client, "ip link add eth1 type veth peer name eth1 netns "+server.Netns,
			"ip addr add 10.98.0.1/30 dev eth1", "ip link set eth1 up"); err != nil {
			return err
		}
		if err := s.run(ctx, server, "ip addr add 10.98.0.2/30 dev eth1", "ip link set eth1 up"); err != nil {
			return err
		}
		return s.browse(ctx)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		return s.run(ctx, s.lab.ServerNode(), "ip route add "+s.lab.Node(lab.RoleClient).Addr.String()+"/32 via 10.98.0.1")
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "natkit-notrack"); err != nil {
			return err
		}
		// What was sent before is forgotten, as it would be after two minutes.
		return s.run(ctx, s.watched, "conntrack -F")
	},
}
