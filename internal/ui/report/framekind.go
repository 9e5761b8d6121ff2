// SPDX-License-Identifier: Apache-2.0

package report

import (
	"slices"
	"strings"
)

// A frameKind is what a kernel function does for a packet: the colours of a flame
// graph and the rows of its legend.
type frameKind struct {
	Name  string // and class of the style sheet
	About string
}

// The kinds, in the order of the legend.
var (
	kindTracking = frameKind{"tracking", "connection tracking, its timeouts and flowtables"}
	kindNAT      = frameKind{"nat", "address translation"}
	kindRules    = frameKind{"rules", "hooks, nftables, iptables, sets"}
	kindBridge   = frameKind{"bridge", "bridge, br_netfilter, ebtables"}
	kindDriver   = frameKind{"driver", "devices and their drivers"}
	kindStack    = frameKind{"stack", "the rest of the network stack"}
	kindBPF      = frameKind{"bpf", "eBPF programs"}
	kindOther    = frameKind{"other", "outside the network stack"}

	frameKinds = []frameKind{kindTracking, kindNAT, kindRules, kindBridge, kindDriver, kindStack, kindBPF, kindOther}
)

// kindRule gives a kind to modules, by their names or how these begin, and where
// all is built in, to functions by how their names begin.
type kindRule struct {
	kind      frameKind
	modules   []string
	functions []string
}

// kindTable: the first that fits wins, so that what is narrow stands before what
// is wide.
var kindTable = []kindRule{
	{kindBPF, []string{"bpf"}, []string{"bpf_prog_", "bpf_trampoline", "__bpf_prog_", "bpf_dispatcher_", "cls_bpf_", "tcf_", "bpf_"}},
	{kindNAT, []string{"nf_nat", "nft_nat", "nft_masq", "nft_redir", "nft_chain_nat", "xt_nat", "xt_masquerade", "xt_redirect", "xt_netmap", "iptable_nat", "ip6table_nat"},
		[]string{"nf_nat_", "nft_nat_", "nft_masq_", "nft_redir_", "nf_xfrm_me_harder", "masquerade_", "xt_snat_", "xt_dnat_", "__nf_nat_", "iptable_nat_", "ip6table_nat_", "find_best_ips_proto", "nft_nat_do_chain", "l4proto_manip_pkt", "redirect_tg", "netmap_tg"}},
	{kindTracking, []string{"nf_conntrack", "nf_flow_table", "nf_defrag", "nft_ct", "nft_flow_offload", "xt_conntrack", "xt_ct", "nf_conncount"},
		[]string{"nf_conntrack_", "__nf_conntrack_", "nf_ct_", "__nf_ct_", "ipv4_conntrack_", "ipv6_conntrack_", "nf_confirm", "ipv4_confirm", "ipv6_confirm", "nf_flow_", "nf_defrag_", "ipv4_conntrack_defrag",
			"ctnetlink_", "resolve_normal_ct", "init_conntrack", "hash_conntrack", "tcp_in_window", "nft_ct_", "nft_flow_offload", "conntrack_", "early_drop", "gc_worker", "__nf_conncount", "nf_conncount", "get_next_corpse", "tcp_timeouts_"}},
	{kindBridge, []string{"bridge", "br_netfilter", "ebtable", "ebt_", "nf_conntrack_bridge"}, []string{"br_", "__br_", "ebt_", "ip_sabotage_in", "nf_bridge_", "setup_pre_routing", "fdb_", "deliver_clone", "maybe_deliver", "should_deliver"}},
	{kindRules, []string{"nf_tables", "nft_", "ip_tables", "ip6_tables", "x_tables", "xt_", "ip_set", "iptable_", "ip6table_", "arp_tables", "ipt_", "ip6t_", "nf_log", "nfnetlink_queue"},
		[]string{"nf_hook_", "nf_queue", "nft_", "__nft_", "ipt_", "ip6t_", "arpt_", "xt_", "ip_set_", "iptable_", "ip6table_", "nf_tables_", "nf_log_", "nfqnl_", "nf_reject_", "nf_send_", "set_match", "hash_ip_", "hash_net_", "tcp_mt", "udp_mt", "comment_mt"}},
	{kindDriver, []string{"veth", "virtio_net", "virtio", "e1000", "igb", "igc", "ixgbe", "i40e", "ice", "iavf", "mlx", "bnx", "ena", "gve", "hv_netvsc", "vmxnet3", "r8169", "tg3", "tun", "macvlan", "ipvlan", "vxlan", "geneve", "bonding", "dummy", "ifb", "wireguard", "8021q"},
		[]string{"veth_", "virtnet_", "virtqueue_", "vring_", "detach_buf_", "start_xmit", "xmit_skb", "free_old_xmit", "e1000_", "igb_", "igc_", "ixgbe_", "i40e_", "ice_", "mlx", "bnxt_", "ena_", "gve_", "netvsc_", "vmxnet3_", "rtl8169_", "rtl_", "tg3_", "tun_", "macvlan_", "ipvlan_", "vxlan_", "geneve_",
			"bond_", "dummy_", "loopback_xmit", "vlan_", "wg_", "receive_buf", "receive_mergeable", "page_to_skb", "vm_notify"}},
	{kindStack, []string{"sch_", "cls_", "act_", "tcp_", "udp_", "ipv6", "sctp", "xfrm"},
		[]string{"ip_", "__ip_", "ip6_", "ipv6_", "ipv4_", "ip4_", "ip_rcv", "tcp_", "__tcp_", "tcp4_", "tcp6_", "tcp_v", "udp_", "udp4_", "udp6_", "udpv6_", "__udp", "icmp_", "icmpv6_", "raw_", "arp_", "ndisc_", "neigh_", "__neigh_", "fib_", "__fib_", "fib6_", "inet_", "__inet_", "inet6_", "dst_", "rt_", "rt6_",
			"skb_", "__skb_", "___skb_", "__alloc_skb", "alloc_skb", "build_skb", "__build_skb", "kfree_skb", "__kfree_skb", "consume_skb", "napi_", "__napi_", "gro_", "inet_gro", "dev_", "__dev_", "netif_", "__netif_", "net_rx_", "net_tx_", "process_backlog", "enqueue_to_backlog", "get_rps_cpu", "validate_xmit", "sch_", "__qdisc_", "qdisc_",
			"pfifo_", "fq_", "fq_codel_", "noqueue_", "eth_", "sock_", "__sock_", "sk_", "__sk_", "lock_sock", "release_sock", "__sys_send", "__sys_recv", "___sys_send", "___sys_recv", "____sys_send", "____sys_recv", "__sys_connect", "__sys_accept", "__sys_bind", "__sys_socket", "__x64_sys_send", "__x64_sys_recv", "__x64_sys_connect", "__x64_sys_accept", "__x64_sys_socket",
			"packet_", "tpacket_", "csum_", "__csum_", "inet_csk", "reqsk_", "netlink_", "nfnetlink_", "xfrm_", "mld_", "igmp_", "secpath_", "flow_dissect", "__flow_hash", "__skb_flow", "tso_", "rps_", "busy_poll", "softnet_", "page_pool_", "xdp_", "__xdp_", "generic_xdp", "do_xdp_", "mrt_", "lwtunnel_"}},
}

// kindOf tells what a function does. Its name decides before its module: what nat
// calls in conntrack is conntrack's work. But many modules have functions that are
// named after a protocol, as the stack's are.
func kindOf(function, module string) frameKind {
	kind := kindBy(function, func(r kindRule) []string { return r.functions })
	if module == "" || kind != kindOther && kind != kindStack {
		return kind
	}
	if of := kindBy(strings.ToLower(module), func(r kindRule) []string { return r.modules }); of != kindOther {
		return of
	}
	return kind
}

// kindBy is the kind of the first rule with a prefix of the name.
func kindBy(name string, prefixes func(kindRule) []string) frameKind {
	for _, r := range kindTable {
		if slices.ContainsFunc(prefixes(r), func(p string) bool { return strings.HasPrefix(name, p) }) {
			return r.kind
		}
	}
	return kindOther
}
