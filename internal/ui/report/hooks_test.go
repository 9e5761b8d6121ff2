// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"math"
	"testing"

	"natkit/internal/snapshot"
)

func TestHooksText(t *testing.T) {
	r := &Hooks{Netns: 4026532248, Hooks: []snapshot.Hook{
		{Family: "netdev", Device: "eth0", Hook: "ingress", Priority: -500, Function: "nft_do_chain_netdev", Owner: "nf_tables", Chain: "dev/early"},
		{Family: "bridge", Hook: "prerouting", Priority: 0, Function: "br_nf_pre_routing"},
		{Family: "ipv4", Hook: "prerouting", Priority: math.MinInt32, Function: "ip_sabotage_in"},
		{Family: "ipv4", Hook: "prerouting", Priority: -400, Function: "ipv4_conntrack_defrag"},
		{Family: "ipv4", Hook: "prerouting", Priority: -200, Function: "ipv4_conntrack_in"},
		{Family: "ipv4", Hook: "prerouting", Priority: -100, Function: "nf_nat_ipv4_pre_routing"},
		{
			Family: "ipv4", Hook: "prerouting", Priority: -100, Function: "nft_nat_do_chain", Owner: "nf_tables", Chain: "nat/in",
			Via: "nf_nat_ipv4_pre_routing",
		},
		{Family: "ipv4", Hook: "forward", Priority: 0, Function: "ipt_do_table", Owner: "iptables", Chain: "filter/FORWARD"},
		{Family: "ipv4", Hook: "forward", Priority: 7, Function: "bpf_nf_run", Owner: "bpf"},
		{Family: "ipv4", Hook: "postrouting", Priority: math.MaxInt32, Function: "nf_confirm"},
	}}
	var out bytes.Buffer
	if err := r.Text(&out); err != nil {
		t.Fatal(err)
	}
	out.WriteString("--\n")
	if err := (&Hooks{}).Text(&out); err != nil {
		t.Fatal(err)
	}
	printed(t, "hooks.txt", out.Bytes())
}
