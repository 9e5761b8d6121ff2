// SPDX-License-Identifier: Apache-2.0

package kconfig

// option is what is known of one option of the kernel.
type option struct {
	Name   string
	Kind   Kind
	Reason string
	Module bool // it can be a module
	// Choice: there is a price to doing without, so that it is only told.
	Choice bool
}

// options in the order in which one depends on another, so that a fragment can be
// merged as it stands. Names are those of Linux 6.1 to 6.18.
var options = []option{
	// NAT itself.
	{Name: "INET", Kind: Need, Reason: "IPv4"},
	{Name: "PROC_SYSCTL", Kind: Need, Reason: "settings, among them ip_forward and the size of the conntrack table"},
	{Name: "NETFILTER", Kind: Need, Reason: "the hooks that tracking and NAT use"},
	{Name: "NETFILTER_ADVANCED", Kind: Need, Reason: "most of the following options depend on it"},
	{Name: "NETFILTER_NETLINK", Kind: Need, Module: true, Reason: "rules and the table are read and written through it"},
	{Name: "NF_CONNTRACK", Kind: Need, Module: true, Reason: "connection tracking, which NAT is part of"},
	{Name: "NF_NAT", Kind: Need, Module: true, Reason: "address translation"},
	{Name: "NF_TABLES", Kind: Need, Module: true, Reason: "nftables: rules with sets, which need one lookup instead of one comparison per address"},
	{Name: "NF_TABLES_INET", Kind: Want, Reason: "one table of rules for IPv4 and IPv6"},
	{Name: "NF_TABLES_IPV4", Kind: Need, Reason: "rules for IPv4"},
	{Name: "NF_TABLES_IPV6", Kind: Want, Reason: "rules for IPv6"},
	{Name: "NFT_CT", Kind: Need, Module: true, Reason: "rules on the state of connections: one rule accepts established flows"},
	{Name: "NFT_NAT", Kind: Need, Module: true, Reason: "rules that translate"},
	{Name: "NFT_MASQ", Kind: Need, Module: true, Reason: "masquerading"},
	{Name: "NFT_REDIR", Kind: Want, Module: true, Reason: "redirects to the machine's own ports"},
	{Name: "NF_CT_NETLINK", Kind: Need, Module: true, Reason: "the table can be listed, watched and emptied: natkit conntrack, conntrack(8)"},

	// Faster.
	{Name: "NF_FLOW_TABLE", Kind: Want, Module: true, Reason: "flowtable: packets of established flows bypass hooks and routing, from device to device; the kernel's own NAT has no other fast path"},
	{Name: "NF_FLOW_TABLE_INET", Kind: Want, Module: true, Reason: "flowtables for both families"},
	{Name: "NFT_FLOW_OFFLOAD", Kind: Want, Module: true, Reason: "the rule that offloads flows to a flowtable"},
	{Name: "RPS", Kind: Want, Reason: "spreads packets of a network card with one queue over the CPUs"},
	{Name: "XPS", Kind: Want, Reason: "each CPU transmits on its own queues"},
	{Name: "RFS_ACCEL", Kind: Want, Reason: "steers flows to CPUs on network cards that can do it"},
	{Name: "BPF_SYSCALL", Kind: Want, Reason: "eBPF: natkit's tracing, and forwarding in XDP and tc"},
	{Name: "BPF_JIT", Kind: Want, Reason: "eBPF programs run as machine code"},
	{Name: "BPF_JIT_ALWAYS_ON", Kind: Want, Reason: "no program runs in the interpreter, which is slower and helps speculative attacks"},
	{Name: "NET_CLS_ACT", Kind: Want, Reason: "programs on tc"},
	{Name: "NET_CLS_BPF", Kind: Want, Module: true, Reason: "programs on tc, on kernels before 6.6"},
	{Name: "NET_SCH_INGRESS", Kind: Want, Module: true, Reason: "programs on tc ingress, on kernels before 6.6"},
	{Name: "NFT_NUMGEN", Kind: Want, Module: true, Reason: "destinations used in turn"},
	{Name: "NFT_HASH", Kind: Want, Module: true, Reason: "destinations and external addresses chosen by a hash of the flow"},

	// Against overload.
	{Name: "NFT_LIMIT", Kind: Want, Module: true, Reason: "rate limits by rule: a scan does not fill the table"},
	{Name: "NFT_CONNLIMIT", Kind: Want, Module: true, Reason: "limits of connections per source: one host does not fill the table"},
	{Name: "NETFILTER_SYNPROXY", Kind: Want, Module: true, Reason: "SYNPROXY: a SYN flood needs no entries in the table"},
	{Name: "NFT_SYNPROXY", Kind: Want, Module: true, Reason: "the rule for that"},
	{Name: "NF_CONNTRACK_ZONES", Kind: Want, Reason: "separates networks with the same addresses"},
	{Name: "NF_CONNTRACK_MARK", Kind: Want, Reason: "flows keep marks, by which they can be routed"},
	{Name: "IP_ADVANCED_ROUTER", Kind: Want, Reason: "several routing tables depend on it"},
	{Name: "IP_MULTIPLE_TABLES", Kind: Want, Reason: "several uplinks: routing by source or mark"},

	// To be looked at.
	{Name: "NF_CONNTRACK_PROCFS", Kind: Want, Reason: "/proc/net/stat/nf_conntrack: the table's counters per CPU"},
	{Name: "NF_CONNTRACK_EVENTS", Kind: Want, Reason: "events of flows that start and end: natkit conntrack watch, natkit top, conntrackd; free while nobody listens (Linux 5.19 and later)"},
	{Name: "NETFILTER_NETLINK_HOOK", Kind: Want, Module: true, Reason: "hooks can be listed without eBPF: nft list hooks, natkit hooks"},
	{Name: "DEBUG_INFO_BTF", Kind: Want, Reason: "the kernel's types, against which natkit's programs are loaded: dropped packets and hooks are seen"},
	{Name: "PERF_EVENTS", Kind: Want, Reason: "natkit profile, perf(1)"},
	{Name: "KALLSYMS", Kind: Want, Reason: "names instead of addresses: drops by place, natkit profile"},
	{Name: "NFT_LOG", Kind: Want, Module: true, Reason: "rules that log"},
	{Name: "NFT_REJECT", Kind: Want, Module: true, Reason: "rules that refuse with a reply: clients do not wait for a timeout"},

	// Labs and containers.
	{Name: "NET_NS", Kind: Want, Reason: "namespaces: containers, natkit lab"},
	{Name: "VETH", Kind: Want, Module: true, Reason: "links between namespaces"},

	// What costs without serving NAT.
	{Name: "BRIDGE_NETFILTER", Kind: Spare, Module: true, Reason: "br_netfilter: bridged frames pass the IP hooks; as a module it is loaded only where Docker or Kubernetes need it"},
	{Name: "IP_NF_IPTABLES_LEGACY", Kind: Spare, Module: true, Reason: "iptables-legacy: a second set of rules beside nftables, evaluated rule by rule; built in, it cannot be unloaded"},
	{Name: "IP6_NF_IPTABLES_LEGACY", Kind: Spare, Module: true, Reason: "ip6tables-legacy, likewise"},
	{Name: "IP_NF_RAW", Kind: Spare, Module: true, Reason: "legacy table raw: once a program has listed it, it stays on the hooks of the namespace; nftables does not need it"},
	{Name: "IP_NF_MANGLE", Kind: Spare, Module: true, Reason: "legacy table mangle, kept on the hooks as raw is"},
	{Name: "IP_NF_SECURITY", Kind: Spare, Module: true, Reason: "legacy table security, kept on the hooks as raw is"},
	{Name: "IP6_NF_RAW", Kind: Spare, Module: true, Reason: "legacy table raw of IPv6, kept on the hooks like IPv4's"},
	{Name: "IP6_NF_MANGLE", Kind: Spare, Module: true, Reason: "legacy table mangle of IPv6, kept on the hooks like IPv4's"},
	{Name: "IP6_NF_SECURITY", Kind: Spare, Module: true, Reason: "legacy table security of IPv6, kept on the hooks like IPv4's"},
	{Name: "NF_CONNTRACK_SECMARK", Kind: Spare, Reason: "four bytes of each entry, for SELinux's labels of packets"},
	{Name: "NF_CONNTRACK_FTP", Kind: Spare, Module: true, Reason: "helper that reads what FTP clients send; as a module it is loaded when a rule needs it"},
	{Name: "NF_CONNTRACK_SIP", Kind: Spare, Module: true, Reason: "helper for SIP, which breaks telephones that handle NAT themselves"},
	{Name: "NF_CONNTRACK_H323", Kind: Spare, Module: true, Reason: "helper for H.323"},
	{Name: "NF_CONNTRACK_PPTP", Kind: Spare, Module: true, Reason: "helper for PPTP"},
	{Name: "NF_CONNTRACK_IRC", Kind: Spare, Module: true, Reason: "helper for IRC"},
	{Name: "NF_CONNTRACK_NETBIOS_NS", Kind: Spare, Module: true, Reason: "helper for NetBIOS"},
	{Name: "INIT_ON_ALLOC_DEFAULT_ON", Kind: Spare, Choice: true, Reason: "protection that costs: each buffer is filled with zeros when it is allocated; init_on_alloc=0 on the kernel's command line does without"},
	{Name: "INIT_ON_FREE_DEFAULT_ON", Kind: Spare, Choice: true, Reason: "protection that costs: each buffer is filled with zeros when it is freed; init_on_free=0 on the kernel's command line does without"},

	// For kernel developers.
	{Name: "KASAN", Kind: Debug, Reason: "each access to memory is checked"},
	{Name: "KCSAN", Kind: Debug, Reason: "accesses to memory are watched for races"},
	{Name: "PROVE_LOCKING", Kind: Debug, Reason: "each lock taken is checked for its order"},
	{Name: "DEBUG_LOCK_ALLOC", Kind: Debug, Reason: "looks for locks in memory that is freed"},
	{Name: "LOCK_STAT", Kind: Debug, Reason: "each lock records how long it was waited for"},
	{Name: "DEBUG_SPINLOCK", Kind: Debug, Reason: "each lock is checked"},
	{Name: "SLUB_DEBUG_ON", Kind: Debug, Reason: "each object of the allocator is checked, packets and entries among them"},
	{Name: "DEBUG_PAGEALLOC_ENABLE_DEFAULT", Kind: Debug, Reason: "free pages are unmapped"},
	{Name: "DEBUG_KMEMLEAK", Kind: Debug, Reason: "each allocation is recorded"},
	{Name: "DEBUG_OBJECTS", Kind: Debug, Reason: "timers and work are tracked"},
	{Name: "DEBUG_NET", Kind: Debug, Reason: "the stack is checked on each packet"},
	{Name: "PAGE_POISONING", Kind: Debug, Reason: "with page_poison=1, free pages are filled"},
}
