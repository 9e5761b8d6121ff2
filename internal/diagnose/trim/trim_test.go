// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func stack(count uint64, frames string) snapshot.Stack {
	return snapshot.Stack{Count: count, Frames: strings.Fields(frames)}
}

func TestCosts(t *testing.T) {
	s := &snapshot.Snapshot{
		Counters: map[string]uint64{"Ip.InReceives": 1000, "Ip.ForwDatagrams": 900, "Ip.OutRequests": 50},
		Hooks: []snapshot.Hook{
			{Family: "ipv4", Hook: "prerouting", Function: "ipv4_conntrack_in"},
			{Family: "ipv4", Hook: "forward", Function: "nft_do_chain_ipv4", Owner: "nf_tables", Chain: "filter/FORWARD"},
			{Family: "ipv4", Hook: "forward", Function: "nft_do_chain_inet", Owner: "nf_tables", Chain: "a/b"},
			{Family: "ipv4", Hook: "forward", Function: "nft_do_chain_inet", Owner: "nf_tables", Chain: "a/c"},
			{Family: "ipv4", Hook: "postrouting", Function: "nf_nat_ipv4_out"},
			{Family: "ipv4", Hook: "postrouting", Function: "nft_nat_do_chain", Owner: "nf_tables", Chain: "nat/POST", Via: "nf_nat_ipv4_out"},
			{Family: "ipv4", Hook: "postrouting", Function: "nf_confirm"},
			{Family: "ipv4", Hook: "input", Function: "nf_confirm"},
			{Family: "bridge", Hook: "prerouting", Function: "br_nf_pre_routing"},
		},
		Chains: []snapshot.Chain{
			{Backend: "nft", Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Rules: 3},
			{Backend: "iptables-legacy", Family: "ip", Table: "a", Name: "b", Rules: 9},
			{Backend: "nft", Family: "inet", Table: "a", Name: "b", Hook: "forward", Rules: 1},
		},
	}
	stacks := []snapshot.Stack{
		stack(5, "nf_conntrack_in ipv4_conntrack_in nf_hook_slow ip_rcv x"),
		stack(7, "ipv4_conntrack_in nf_hook_slow nf_hook_slow_list ip_sublist_rcv x"),
		stack(3, "nft_do_chain nft_do_chain_ipv4 nf_hook_slow ip_forward x"),
		stack(4, "nft_do_chain_inet nf_hook_slow ip_forward x"),
		stack(2, "nft_do_chain nft_nat_do_chain nf_nat_inet_fn nf_nat_ipv4_out nf_hook_slow ip_output x"),
		stack(1, "nf_nat_ipv4_out nf_hook_slow ip_output x"),
		stack(6, "nf_confirm nf_hook_slow ip_local_deliver x"),
		stack(8, "nf_hook_slow ip_rcv x"),
		stack(9, "ipv4_conntrack_in nf_hook_slow br_nf_pre_routing nf_hook_slow br_handle_frame x"), // within a bridge's
		stack(10, "ip_forward x"),
		stack(11, "nf_conntrack_in"),
	}
	var got []string
	for _, c := range Costs(s, stacks, 1000) {
		got = append(got, strings.Join([]string{c.Hook.Hook, c.Function}, " ")+" "+strconv.FormatUint(c.Samples, 10)+" "+strconv.Itoa(c.Rules+1))
		if c.Shared != (c.Function == "nft_do_chain_inet") {
			t.Errorf("%s: shared is %v", c.Chain, c.Shared)
		}
		switch {
		case c.Family != "ipv4" || c.Via != "" || c.Hook.Hook == "input":
			if c.Packets != nil {
				t.Errorf("%s %s: %d packets", c.Hook.Hook, c.Function, *c.Packets)
			}
		case *c.Packets != map[string]uint64{"prerouting": 1000, "forward": 900, "postrouting": 950}[c.Hook.Hook]:
			t.Errorf("%s: %d packets", c.Hook.Hook, *c.Packets)
		}
	}
	want := []string{ // samples, rules + 1
		"prerouting ipv4_conntrack_in 21 0", "forward nft_do_chain_ipv4 3 4", "forward nft_do_chain_inet 4 2", "forward nft_do_chain_inet 4 0",
		"postrouting nf_nat_ipv4_out 3 0", "postrouting nft_nat_do_chain 2 0", "postrouting nf_confirm 0 0", "input nf_confirm 6 0", "prerouting br_nf_pre_routing 9 0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if self, whole := Framework(stacks, 1000); self != 0.008 || whole != 0.045 {
		t.Errorf("framework %g of %g", self, whole)
	}
}

func TestFind(t *testing.T) {
	tracked := []snapshot.Hook{{Family: "ipv4", Hook: "prerouting", Function: "ipv4_conntrack_in"}}
	table := func(entries, snat uint64) *snapshot.Conntrack {
		return &snapshot.Conntrack{Table: &snapshot.Table{Entries: entries, ByStatus: map[string]uint64{"SNAT": snat}}}
	}
	nat := snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "POST", Hook: "postrouting", Type: "nat", Policy: "accept", Rules: 1, NATRules: map[string]int{"masquerade": 1}}
	for _, c := range []struct {
		name string
		s    snapshot.Snapshot
		want string // kinds and commands
	}{
		{"nothing known", snapshot.Snapshot{Hooks: tracked}, ""},
		{"a gateway that needs all it has", snapshot.Snapshot{Hooks: tracked, Chains: []snapshot.Chain{nat}, Conntrack: table(1000, 900)}, ""},
		{"an empty chain", snapshot.Snapshot{Netns: snapshot.Netns{Name: "blue"}, Chains: []snapshot.Chain{{Backend: "nft", Family: "bridge", Table: "my filter", Name: "b", Hook: "forward", Policy: "accept"}}},
			"empty-chain: ip netns exec blue nft delete chain bridge 'my filter' b"},
		{"Docker's", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Table: "raw", Name: "DOCKER-BASE", Hook: "prerouting", Policy: "accept"}}},
			"empty-chain: # Docker creates it again when it next writes its rules; nft delete chain ip raw DOCKER-BASE"},
		{"an empty chain that drops", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Table: "f", Name: "b", Hook: "forward", Policy: "drop"}}}, ""},
		{"not a base chain", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Table: "f", Name: "b"}}}, ""},
		{"an empty legacy table", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "iptables-legacy", Family: "ip6", Table: "mangle", Name: "INPUT", Hook: "input", Policy: "ACCEPT"}}},
			"legacy-table: # if it is a module; if it is built in, it stays until the namespace ends:; modprobe -r ip6table_mangle"},
		{"a legacy table that drops", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "INPUT", Hook: "input", Policy: "drop"}}}, ""},
		{"legacy beside nft", snapshot.Snapshot{Chains: []snapshot.Chain{nat, {Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "INPUT", Hook: "input", Policy: "accept", Rules: 4}}},
			"legacy-beside-nft: # move the legacy rules to nftables, look at them, then empty the legacy tables:; iptables-legacy-save > legacy.rules; iptables-nft-restore --noflush < legacy.rules; " +
				"iptables-legacy -P INPUT ACCEPT; iptables-legacy -P FORWARD ACCEPT; iptables-legacy -P OUTPUT ACCEPT; iptables-legacy -t filter -F"},
		{"legacy NAT beside nft", snapshot.Snapshot{Netns: snapshot.Netns{Name: "my net"}, Chains: []snapshot.Chain{nat, {Backend: "iptables-legacy", Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Policy: "accept", Rules: 4},
			{Backend: "iptables-legacy", Family: "arp", Table: "filter", Name: "INPUT", Hook: "input", Policy: "accept", Rules: 1}}},
			"legacy-beside-nft: # move the legacy rules to nftables, look at them, then empty the legacy tables:; ip netns exec 'my net' iptables-legacy-save > legacy.rules; " +
				"ip netns exec 'my net' iptables-nft-restore --noflush < legacy.rules; ip netns exec 'my net' iptables-legacy -t nat -F"},
		{"a bridge", snapshot.Snapshot{Chains: []snapshot.Chain{}, Sysctls: map[string]string{"net.bridge.bridge-nf-call-iptables": "1"}, Hooks: []snapshot.Hook{{Family: "bridge", Hook: "prerouting", Function: "br_nf_pre_routing"}}},
			"bridge-netfilter: # unless rules here filter or translate bridged traffic:; sysctl -w net.bridge.bridge-nf-call-iptables=0; sysctl -w net.bridge.bridge-nf-call-ip6tables=0"},
		{"a bridge of Kubernetes", snapshot.Snapshot{Chains: []snapshot.Chain{{Backend: "nft", Family: "ip", Table: "nat", Name: "KUBE-SVC"}}, Sysctls: map[string]string{"net.bridge.bridge-nf-call-iptables": "1"}, Hooks: []snapshot.Hook{{Family: "bridge", Hook: "prerouting", Function: "br_nf_pre_routing"}}}, ""},
		{"tracking for nothing", snapshot.Snapshot{Hooks: tracked, Chains: []snapshot.Chain{}, Conntrack: table(1000, 3), Netns: snapshot.Netns{Name: "pid:12"}},
			"idle-conntrack: # whose flows are they? Networks without rules on connection states or NAT need no tracking: use notrack, in a chain of type filter at priority raw; nsenter -t 12 -n natkit conntrack top --by source"},
		{"few entries", snapshot.Snapshot{Hooks: tracked, Chains: []snapshot.Chain{}, Conntrack: table(20, 0)}, ""},
		{"helpers by port", snapshot.Snapshot{Sysctls: map[string]string{"net.netfilter.nf_conntrack_helper": "1"}},
			"conntrack-helper: # when rules assign helpers (nft: ct helper set; iptables: -j CT --helper), or none is needed:; sysctl -w net.netfilter.nf_conntrack_helper=0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, n := range Find(&c.s) {
				got = append(got, n.Kind+": "+strings.Join(n.Commands, "; "))
				if n.Why == "" || n.What == "" {
					t.Errorf("%+v", n)
				}
			}
			if strings.Join(got, "\n") != c.want {
				t.Errorf("got  %s\nwant %s", strings.Join(got, "\n"), c.want)
			}
		})
	}
}
