// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"testing"

	"natkit/internal/diagnose/trim"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/nft"
	"natkit/internal/scenario"
	"natkit/internal/snapshot"
)

func TestHookCostText(t *testing.T) {
	s := &snapshot.Snapshot{
		WindowSeconds: 10, Counters: map[string]uint64{"Ip.InReceives": 12345, "Ip.ForwDatagrams": 12000, "Ip.OutRequests": 7},
		Capabilities: []snapshot.Capability{{Name: snapshot.CanConntrackDump, Reason: "not requested"}, {Name: snapshot.CanOwners, Reason: "not of interest"}},
		Hooks: []snapshot.Hook{
			{Family: "ipv4", Hook: "prerouting", Function: "ipv4_conntrack_in", Priority: -200},
			{Family: "ipv4", Hook: "prerouting", Function: "nft_do_chain_ipv4", Owner: "nf_tables", Chain: "raw/PREROUTING"},
			{Family: "ipv4", Hook: "prerouting", Function: "nf_nat_ipv4_pre_routing"},
			{Family: "ipv4", Hook: "prerouting", Function: "nft_nat_do_chain", Owner: "nf_tables", Chain: "nat/PRE", Via: "nf_nat_ipv4_pre_routing"},
		},
		Chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Table: "raw", Name: "PREROUTING", Hook: "prerouting", Policy: "accept"},
			{Backend: "nft", Family: "ip", Table: "nat", Name: "PRE", Hook: "prerouting", Policy: "accept", Rules: 2}},
	}
	p := someProfile()
	var out bytes.Buffer
	r := NewHookCost(s, p, map[nft.ChainName][]nft.RuleUse{
		{Family: "ip", Table: "nat", Chain: "PRE"}: {{Handle: 4, Packets: new(uint64)}, {Handle: 9}},
	})
	if err := r.Text(&out); err != nil {
		t.Fatal(err)
	}
	r.Measured = &scenario.HookCosts{Parts: []scenario.HookPart{
		{Name: "three empty chains", More: "framework", Less: "none", NS: 90, Noise: 12, Kind: trim.EmptyChain, PerHook: 3},
		{Name: "tracking", More: "nat-idle", Less: "none", NS: 40, Noise: 60, Kind: trim.IdleTracking},
	}}
	r.Measured.Fill(r.Needless)
	if err := r.Text(&out); err != nil {
		t.Fatal(err)
	}
	if err := NewHookCost(&snapshot.Snapshot{}, &observe.Profile{}, nil).Text(&out); err != nil {
		t.Fatal(err)
	}
	if err := NewHookCost(&snapshot.Snapshot{Hooks: []snapshot.Hook{}}, &observe.Profile{}, nil).Text(&out); err != nil {
		t.Fatal(err)
	}
	printed(t, "hookcost.txt", out.Bytes())
}
