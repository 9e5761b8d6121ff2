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
	{Name: "NETFILTER", Kind: Need, Reason: "the hooks that tracking and NAT hang on"},
	{Name: "NETFILTER_ADVANCED", Kind: Need, Reason: "without it most of what follows is not offered"},
	{Name: "NETFILTER_NETLINK", Kind: Need, Module: true, Reason: "rules and the table are read and set through it"},
	{Name: "NF_CONNTRACK", Kind: Need, Module: true, Reason: "connection tracking, which NAT is part of"},
	{Name: "NF_NAT", Kind: Need, Module: true, Reason: "address translation"},
	{Name: "NF_TABLES", Kind: Need, Module: true, Reason: "nftables: rules that look addresses up in sets instead of one after the other"},
	{Name: "NF_TABLES_INET", Kind: Want, Reason: "one table of rules for IPv4 and IPv6"},
	{Name: "NF_TABLES_IPV4", Kind: Need, Reason: "rules for IPv4"},
	{Name: "NF_TABLES_IPV6", Kind: Want, Reason: "rules for IPv6"},
	{Name: "NFT_CT", Kind: Need, Module: true, Reason: "rules about the state of connections: established flows are let through by one rule"},
	{Name: "NFT_NAT", Kind: Need, Module: true, Reason: "rules that translate"},
	{Name: "NFT_MASQ", Kind: Need, Module: true, Reason: "masquerading"},
	{Name: "NFT_REDIR", Kind: Want, Module: true, Reason: "redirecting to the machine's own ports"},
	{Name: "NF_CT_NETLINK", Kind: Need, Module: true, Reason: "the table can be listed, watched and emptied: natkit conntrack, conntrack(8)"},

	// Faster.
	{Name: "NF_FLOW_TABLE", Kind: Want, Module: true, Reason: "flowtable: packets of established flows go past the hooks and the routing, from device to device; there is no other way to that with the kernel's own NAT"},
	{Name: "NF_FLOW_TABLE_INET", Kind: Want, Module: true, Reason: "flowtables for both families"},
	{Name: "NFT_FLOW_OFFLOAD", Kind: Want, Module: true, Reason: "the rule that puts flows into a flowtable"},
	{Name: "RPS", Kind: Want, Reason: "packets of a network card with one queue are spread over the processors"},
	{Name: "XPS", Kind: Want, Reason: "each processor sends by queues of its own"},
	{Name: "RFS_ACCEL", Kind: Want, Reason: "network cards that can steer flows to processors are told how"},
	{Name: "BPF_SYSCALL", Kind: Want, Reason: "eBPF: natkit's tracing, and forwarding in XDP and tc"},
	{Name: "BPF_JIT", Kind: Want, Reason: "eBPF programs run as machine code"},
	{Name: "BPF_JIT_ALWAYS_ON", Kind: Want, Reason: "no program runs in the interpreter, which is slower and widens speculative attacks"},
	{Name: "NET_CLS_ACT", Kind: Want, Reason: "programs on tc"},
	{Name: "NET_CLS_BPF", Kind: Want, Module: true, Reason: "programs on tc, on kernels before 6.6"},
	{Name: "NET_SCH_INGRESS", Kind: Want, Module: true, Reason: "programs on tc where packets come in, on kernels before 6.6"},
	{Name: "NFT_NUMGEN", Kind: Want, Module: true, Reason: "destinations that take turns"},
	{Name: "NFT_HASH", Kind: Want, Module: true, Reason: "destinations and outside addresses chosen by a hash of the flow"},

	// Against overload.
	{Name: "NFT_LIMIT", Kind: Want, Module: true, Reason: "rates limited by rule: a scan does not fill the table"},
	{Name: "NFT_CONNLIMIT", Kind: Want, Module: true, Reason: "connections of one source limited: one host does not fill the table"},
	{Name: "NETFILTER_SYNPROXY", Kind: Want, Module: true, Reason: "a SYN flood is answered without an entry in the table"},
	{Name: "NFT_SYNPROXY", Kind: Want, Module: true, Reason: "the rule for that"},
	{Name: "NF_CONNTRACK_ZONES", Kind: Want, Reason: "networks with the same addresses can be told apart"},
	{Name: "NF_CONNTRACK_MARK", Kind: Want, Reason: "flows can be routed by marks that they keep"},
	{Name: "IP_ADVANCED_ROUTER", Kind: Want, Reason: "without it several routing tables are not offered"},
	{Name: "IP_MULTIPLE_TABLES", Kind: Want, Reason: "several uplinks: routing by source or mark"},

	// To be looked at.
	{Name: "NF_CONNTRACK_PROCFS", Kind: Want, Reason: "/proc/net/stat/nf_conntrack: the table's counters by processor"},
	{Name: "NF_CONNTRACK_EVENTS", Kind: Want, Reason: "flows that begin and end are told: natkit conntrack watch, natkit top, conntrackd; costs nothing while nobody listens (Linux 5.19 and later)"},
	{Name: "NETFILTER_NETLINK_HOOK", Kind: Want, Module: true, Reason: "hooks can be listed without eBPF: nft list hooks, natkit hooks"},
	{Name: "DEBUG_INFO_BTF", Kind: Want, Reason: "the kernel's types, against which natkit's programs are loaded: dropped packets and hooks are seen"},
	{Name: "PERF_EVENTS", Kind: Want, Reason: "natkit profile, perf(1)"},
	{Name: "KALLSYMS", Kind: Want, Reason: "names in the place of addresses: drops by place, natkit profile"},
	{Name: "NFT_LOG", Kind: Want, Module: true, Reason: "rules that log"},
	{Name: "NFT_REJECT", Kind: Want, Module: true, Reason: "rules that refuse with an answer: clients do not wait for a time-out"},

	// Labs and containers.
	{Name: "NET_NS", Kind: Want, Reason: "namespaces: containers, natkit lab"},
	{Name: "VETH", Kind: Want, Module: true, Reason: "links between namespaces"},

	// What costs without serving NAT.
	{Name: "BRIDGE_NETFILTER", Kind: Spare, Module: true, Reason: "br_netfilter: frames that are only bridged walk through the hooks of IP; as a module it is there where Docker's or Kubernetes' rules want it"},
	{Name: "IP_NF_IPTABLES_LEGACY", Kind: Spare, Module: true, Reason: "iptables-legacy: a second set of rules beside nftables, walked through rule by rule; built in, it can't be unloaded"},
	{Name: "IP6_NF_IPTABLES_LEGACY", Kind: Spare, Module: true, Reason: "ip6tables-legacy, likewise"},
	{Name: "IP_NF_RAW", Kind: Spare, Module: true, Reason: "legacy table raw: once anybody has looked at it, a namespace keeps it on its hooks; nftables needs none"},
	{Name: "IP_NF_MANGLE", Kind: Spare, Module: true, Reason: "legacy table mangle, kept on the hooks as raw is"},
	{Name: "IP_NF_SECURITY", Kind: Spare, Module: true, Reason: "legacy table security, kept on the hooks as raw is"},
	{Name: "IP6_NF_RAW", Kind: Spare, Module: true, Reason: "legacy table raw of IPv6, kept on the hooks like IPv4's"},
	{Name: "IP6_NF_MANGLE", Kind: Spare, Module: true, Reason: "legacy table mangle of IPv6, kept on the hooks like IPv4's"},
	{Name: "IP6_NF_SECURITY", Kind: Spare, Module: true, Reason: "legacy table security of IPv6, kept on the hooks like IPv4's"},
	{Name: "NF_CONNTRACK_SECMARK", Kind: Spare, Reason: "four bytes of each entry, for SELinux's labels of packets"},
	{Name: "NF_CONNTRACK_FTP", Kind: Spare, Module: true, Reason: "helper that reads what FTP clients send; as a module it is there when a rule wants it"},
	{Name: "NF_CONNTRACK_SIP", Kind: Spare, Module: true, Reason: "helper for SIP, which rather breaks than helps telephones that know NAT"},
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
	{Name: "DEBUG_LOCK_ALLOC", Kind: Debug, Reason: "locks in memory that is freed are looked for"},
	{Name: "LOCK_STAT", Kind: Debug, Reason: "each lock counts how long it was waited for"},
	{Name: "DEBUG_SPINLOCK", Kind: Debug, Reason: "each lock is checked"},
	{Name: "SLUB_DEBUG_ON", Kind: Debug, Reason: "each object of the allocator is checked, packets and entries among them"},
	{Name: "DEBUG_PAGEALLOC_ENABLE_DEFAULT", Kind: Debug, Reason: "free pages are unmapped"},
	{Name: "DEBUG_KMEMLEAK", Kind: Debug, Reason: "each allocation is recorded"},
	{Name: "DEBUG_OBJECTS", Kind: Debug, Reason: "timers and work are followed"},
	{Name: "DEBUG_NET", Kind: Debug, Reason: "the stack checks itself at each packet"},
	{Name: "PAGE_POISONING", Kind: Debug, Reason: "where page_poison=1 is given, free pages are filled"},
}
