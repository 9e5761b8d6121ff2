// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["needless-hooks"] = func(s *snapshot.Snapshot) {
		for _, table := range []string{"mangle", "raw", "security"} {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: table, Name: "PREROUTING", Hook: "prerouting", Type: "filter", Policy: "accept"})
		}
	}
}

func TestNeedlessHooks(t *testing.T) {
	const advice = "advice needless-hooks"
	run(t, []row{
		{"empty chains", examples["needless-hooks"], advice},
		{"both back ends", func(s *snapshot.Snapshot) {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Policy: "accept", Rules: 3})
		}, "advice iptables-two-backends"},
		{"tracking of flows that nothing translates", func(s *snapshot.Snapshot) {
			s.Hooks = append(s.Hooks, snapshot.Hook{Family: "ipv4", Hook: "prerouting", Priority: -200, Function: "ipv4_conntrack_in"})
			s.Chains[0].NATRules, s.Conntrack.Table.ByStatus["SNAT"] = nil, 0
		}, advice},

		{"few packets", func(s *snapshot.Snapshot) {
			examples["needless-hooks"](s)
			link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 400, 500
		}, ""},
		{"a chain that drops by policy", func(s *snapshot.Snapshot) {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "t", Name: "input", Hook: "input", Policy: "drop"})
		}, ""},
		{"rules not known", func(s *snapshot.Snapshot) { s.Chains = nil }, ""},
	})
}
