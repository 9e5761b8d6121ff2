// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
	"natkit/internal/nat/nft"
)

var mtuFault = Fault{
	Code:    "mtu-drop",
	Healthy: "the gateway's link to the clients carries packets of 1000 bytes only, and its ICMP messages reach the server",
	Broken:  "a firewall drops the gateway's ICMP messages, and the server's path MTU entry has expired",
	Cured:   "the TCP MSS is clamped to what fits; connections that already hang are closed",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.serve(ctx, lab.HTTPServerOptions{Body: bytes.Repeat([]byte("natkit lab\n"), 1000)}); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.requests(s.lab.URL(), 100))
		return s.watched.Do(func() error {
			eth1, err := netlink.LinkByName("eth1")
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(eth1, 1000)
		})
	},
	broken: func(_ context.Context, s *faultRun) error {
		// Nothing that the gateway itself sends gets out.
		mute := nft.Ruleset{{Name: "mute", Chains: []nft.Chain{{Name: "output", Base: &nft.Base{
			Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookOutput,
			Priority: nftables.ChainPriorityFilter, Policy: nftables.ChainPolicyDrop,
		}}}}}
		if err := mute.Apply(s.watched.Handle()); err != nil {
			return err
		}
		server := s.lab.ServerNode()
		if err := server.Sysctl("net.ipv4.route.flush", "1"); err != nil {
			return err
		}
		// The server gives hanging connections up after seconds instead of minutes.
		for _, key := range []string{"net.ipv4.tcp_retries2", "net.ipv4.tcp_orphan_retries"} {
			if err := server.Sysctl(key, "2"); err != nil {
				return err
			}
		}
		return nil
	},
	cure: func(ctx context.Context, s *faultRun, f causes.Finding) error {
		if err := s.follow(ctx, f, "natkit-mss"); err != nil {
			return err
		}
		return s.ended(ctx, s.lab.ServerNode())
	},
}
