// SPDX-License-Identifier: Apache-2.0

package observe

// This file says what a drop means for NAT. It is a function of what was counted.

import (
	"strings"

	"natkit/internal/snapshot"
)

// causeOf names the cause of drops with this reason in this function.
//
// The kernel gives one reason, NETFILTER_DROP, for four things. nftables frees
// the packet where the rule is evaluated (Linux 6.8 and later), so another place
// than nf_hook_slow is a rule. What is freed in nf_hook_slow was refused by a
// function registered there, and how far the packet had come tells which: see
// netfilterCause.
func causeOf(function, reason string, class dropsDropClass) snapshot.NATCause {
	function = baseName(function)
	switch reason {
	case "NETFILTER_DROP":
		if function != "nf_hook_slow" && function != "" {
			return snapshot.CauseRule
		}
		return netfilterCause(class)
	case "IP_INADDRERRORS":
		if function == "ip_error" || function == "ip6_forward" {
			return snapshot.CauseIPForwardOff
		}
	case "IP_RPFILTER":
		return snapshot.CauseReversePath
	case "IP_INNOROUTES", "IP_OUTNOROUTES":
		return snapshot.CauseNoRoute
	case "IP_LOCAL_SOURCE", "IP_INVALID_SOURCE", "IP_LOCALNET", "IP_INVALID_DEST":
		return snapshot.CauseMartian
	case "NOT_SPECIFIED":
		switch function {
		case "ip_error": // routes of type blackhole, unreachable and prohibit (Linux 6.18)
			return snapshot.CauseNoRoute
		case "ip_rcv_finish_core": // martians before Linux 6.14, which has reasons for them
			return snapshot.CauseMartian
		case "ndisc_error_report", "neigh_invalidate": // of IPv6; the first one may end in a jump, and its caller is seen
			return snapshot.CauseNeighbour
		case "ip_defrag": // no memory for a fragment to wait in
			return snapshot.CauseFragment
		}
		if strings.HasSuffix(function, "_enqueue") { // a queue that splits a packet and has no room for any part
			return snapshot.CauseQueue
		}
	case "PKT_TOO_BIG":
		return snapshot.CauseTooBig
	case "IP_INHDR":
		if function == "ip_forward" || function == "ip6_forward" {
			return snapshot.CauseTTL
		}
	case "QDISC_DROP", "QDISC_OVERLIMIT", "QDISC_CONGESTED", "CAKE_FLOOD", "FQ_BAND_LIMIT",
		"FQ_HORIZON_LIMIT", "FQ_FLOW_LIMIT", "DUALPI2_STEP_DROP", "FULL_RING":
		return snapshot.CauseQueue
	case "NEIGH_CREATEFAIL", "NEIGH_FAILED", "NEIGH_QUEUEFULL", "NEIGH_DEAD", "NEIGH_HH_FILLFAIL":
		return snapshot.CauseNeighbour
	case "TCP_LISTEN_OVERFLOW":
		return snapshot.CauseListenOverflow
	case "TCP_CSUM", "UDP_CSUM", "IP_CSUM", "ICMP_CSUM", "SKB_CSUM":
		return snapshot.CauseChecksum
	case "DUP_FRAG", "FRAG_REASM_TIMEOUT", "FRAG_TOO_FAR":
		return snapshot.CauseFragment
	case "CPU_BACKLOG":
		return snapshot.CauseBacklog
	}
	return snapshot.CauseNone
}

// netfilterCause tells what a hook function that refused a packet was.
//
//	entry         way the packet had come         refused by
//	none          before routing, or sent here    conntrack, which could not make one
//	none          routed                          a rule (such as "drop invalid")
//	unconfirmed   source translation decided      confirmation: the tuple was taken in that time
//	unconfirmed   sent on by routing, no NAT      confirmation
//	unconfirmed   before that                     a rule
//	confirmed, or notrack                         a rule
//	not readable                                  not known
//
// A rule in iptables' raw table looks like the first line, one in its mangle
// POSTROUTING like the third: drops that the kernel's own conntrack counters do
// not confirm are also rules, see Drops.check.
func netfilterCause(class dropsDropClass) snapshot.NATCause {
	has := func(bit dropsDropClass) bool { return class&bit != 0 }
	switch {
	case has(dropsDropClassDROP_OPAQUE):
		return snapshot.CauseNone
	case has(dropsDropClassDROP_UNTRACKED), has(dropsDropClassDROP_CONFIRMED):
		return snapshot.CauseRule
	case !has(dropsDropClassDROP_TRACKED):
		if has(dropsDropClassDROP_ROUTED) && !has(dropsDropClassDROP_LOCAL) {
			return snapshot.CauseRule
		}
		return snapshot.CauseTableFull
	case has(dropsDropClassDROP_SNAT_DONE), has(dropsDropClassDROP_SENT):
		return snapshot.CauseConfirm
	}
	return snapshot.CauseRule
}

// benign says that such drops are how things end or are sorted out, and no
// traffic that somebody waits for.
func benign(function, reason string, class dropsDropClass) bool {
	function = baseName(function)
	switch reason {
	case "SKB_CONSUMED", "CONSUMED", "NOT_DROPPED_YET", "QUEUE_PURGE", "OTHERHOST", "SOCKET_CLOSE",
		"UNIX_DISCONNECT", "UNIX_SKIP_OOB", "TCP_RESET", "UNHANDLED_PROTO", "PACKET_SOCK_ERROR":
		return true
	case "NO_SOCKET": // an echo reply that a raw socket got already
		return strings.HasPrefix(function, "ping_") || strings.HasPrefix(function, "icmp")
	case "NOT_SPECIFIED":
		if function == "tcp_v4_rcv" || function == "tcp_v6_rcv" { // the last FIN finds TIME_WAIT
			return class&dropsDropClassDROP_TCP_END != 0
		}
		if function == "ndisc_error_report" { // what waited for a neighbour, unlike the rest of ndisc_
			return false
		}
		for _, prefix := range []string{
			"netlink_", "unix_", "ip6_mc_input", "mld_", "igmp_", "ndisc_", "packet_", // no traffic of users'
			"sk_stream_kill_queues", "skb_queue_purge", "skb_rbtree_purge", // QUEUE_PURGE of newer kernels
			// Made by the kernel for a program's request, natkit's own included, and freed with the
			// reply: packets of a test run, packets to ask the routing tables about, messages of netlink.
			"bpf_prog_test_run", "inet_rtm_", "inet6_rtm_", "rtnl_", "rtnetlink_", "nfnetlink_", "nfnl_", "ctnetlink_", "nf_tables_",
		} {
			if strings.HasPrefix(function, prefix) {
				return true
			}
		}
	}
	return false
}
