// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"testing"

	"natkit/internal/snapshot"
)

const (
	tracked   = dropsDropClassDROP_TRACKED
	untracked = dropsDropClassDROP_UNTRACKED
	confirmed = dropsDropClassDROP_CONFIRMED
	snatDone  = dropsDropClassDROP_SNAT_DONE
	isRouted  = dropsDropClassDROP_ROUTED
	isLocal   = dropsDropClassDROP_LOCAL
	isSent    = dropsDropClassDROP_SENT
	opaque    = dropsDropClassDROP_OPAQUE
	ending    = dropsDropClassDROP_TCP_END
)

func TestCauseOf(t *testing.T) {
	tests := []struct {
		name             string
		function, reason string
		class            dropsDropClass
		want             snapshot.NATCause
	}{
		{"rule, where the kernel tells", "nft_do_chain", "NETFILTER_DROP", tracked | isRouted, snapshot.CauseRule},
		{"rule of a raw chain", "nft_do_chain", "NETFILTER_DROP", 0, snapshot.CauseRule},
		{"table full, received", "nf_hook_slow", "NETFILTER_DROP", 0, snapshot.CauseTableFull},
		{"table full, sent here", "nf_hook_slow", "NETFILTER_DROP", isRouted | isLocal, snapshot.CauseTableFull},
		{"table full, function split by the compiler", "nf_hook_slow.constprop.0", "NETFILTER_DROP", 0, snapshot.CauseTableFull},
		{"table full, symbols hidden", "", "NETFILTER_DROP", 0, snapshot.CauseTableFull},
		{"invalid packet forwarded", "nf_hook_slow", "NETFILTER_DROP", isRouted, snapshot.CauseRule},
		{"invalid packet on its way out", "nf_hook_slow", "NETFILTER_DROP", isRouted | isSent, snapshot.CauseRule},
		{"notrack", "nf_hook_slow", "NETFILTER_DROP", untracked, snapshot.CauseRule},
		{"ports exhausted", "nf_hook_slow", "NETFILTER_DROP", tracked | snatDone | isRouted | isSent, snapshot.CauseConfirm},
		{"ports exhausted, sent here", "nf_hook_slow", "NETFILTER_DROP", tracked | snatDone | isRouted | isLocal, snapshot.CauseConfirm},
		{"race for an entry, no NAT", "nf_hook_slow", "NETFILTER_DROP", tracked | isRouted | isSent, snapshot.CauseConfirm},
		{"rule of iptables, new flow", "nf_hook_slow", "NETFILTER_DROP", tracked | isRouted, snapshot.CauseRule},
		{"rule of iptables, new flow before routing", "nf_hook_slow", "NETFILTER_DROP", tracked, snapshot.CauseRule},
		{"rule of iptables, old flow", "nf_hook_slow", "NETFILTER_DROP", tracked | confirmed | snatDone | isRouted, snapshot.CauseRule},
		{"entry not readable", "nf_hook_slow", "NETFILTER_DROP", tracked | opaque | isRouted | isSent, snapshot.CauseNone},
		{"forwarding off", "ip_error", "IP_INADDRERRORS", isRouted, snapshot.CauseIPForwardOff},
		{"another bad address", "ip_rcv", "IP_INADDRERRORS", 0, snapshot.CauseNone},
		{"hops used up", "ip_forward", "IP_INHDR", isRouted, snapshot.CauseTTL},
		{"broken header", "ip_rcv_core", "IP_INHDR", 0, snapshot.CauseNone},
		{"reverse path", "ip_rcv_finish_core", "IP_RPFILTER", 0, snapshot.CauseReversePath},
		{"no route", "ip_error", "IP_INNOROUTES", isRouted, snapshot.CauseNoRoute},
		{"route of type blackhole", "ip_error", "NOT_SPECIFIED", isRouted, snapshot.CauseNoRoute},
		{"martian", "ip_rcv_finish_core", "IP_LOCALNET", 0, snapshot.CauseMartian},
		{"martian before Linux 6.14", "ip_rcv_finish_core", "NOT_SPECIFIED", 0, snapshot.CauseMartian},
		{"no reason elsewhere", "tcp_v4_do_rcv", "NOT_SPECIFIED", isRouted, snapshot.CauseNone},
		{"too big", "ip_forward", "PKT_TOO_BIG", isRouted, snapshot.CauseTooBig},
		{"queue", "__dev_queue_xmit", "QDISC_DROP", isRouted, snapshot.CauseQueue},
		{"neighbour", "neigh_invalidate", "NEIGH_FAILED", isRouted, snapshot.CauseNeighbour},
		{"neighbour of IPv6", "neigh_invalidate", "NOT_SPECIFIED", isRouted, snapshot.CauseNeighbour},
		{"neighbour of IPv6, no jump", "ndisc_error_report", "NOT_SPECIFIED", isRouted, snapshot.CauseNeighbour},
		{"fragment without room", "ip_defrag", "NOT_SPECIFIED", 0, snapshot.CauseFragment},
		{"queue that splits packets", "tbf_enqueue", "NOT_SPECIFIED", isRouted, snapshot.CauseQueue},
		{"backlog", "enqueue_to_backlog", "CPU_BACKLOG", 0, snapshot.CauseBacklog},
		{"closed port", "tcp_v4_rcv", "NO_SOCKET", isRouted, snapshot.CauseNone},
		{"unknown", "some_driver", "reason 900", 0, snapshot.CauseNone},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := causeOf(tt.function, tt.reason, tt.class); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if tt.want != snapshot.CauseNone && benign(tt.function, tt.reason, tt.class) {
				t.Error("it has a cause and is called benign")
			}
		})
	}
}

func TestBenign(t *testing.T) {
	for _, tt := range []struct {
		function, reason string
		class            dropsDropClass
		want             bool
	}{
		{"skb_queue_purge_reason", "QUEUE_PURGE", 0, true},
		{"ip6_mc_input", "NOT_SPECIFIED", 0, true},
		{"unix_stream_connect", "NOT_SPECIFIED", 0, true},
		{"netlink_broadcast_filtered", "NOT_SPECIFIED", 0, true},
		{"sk_stream_kill_queues", "NOT_SPECIFIED", 0, true}, // Linux 6.1
		{"bpf_prog_test_run_skb", "NOT_SPECIFIED", isRouted, true},
		{"inet_rtm_getroute", "NOT_SPECIFIED", isRouted | isLocal, true},
		{"inet6_rtm_getroute.cold", "NOT_SPECIFIED", isLocal, true},
		{"nfnetlink_rcv_batch", "NOT_SPECIFIED", 0, true},
		{"ping_rcv", "NO_SOCKET", 0, true},
		{"tcp_v4_rcv", "NO_SOCKET", 0, false},
		{"tcp_v4_rcv", "NOT_SPECIFIED", tracked, false},
		{"tcp_v4_rcv", "NOT_SPECIFIED", tracked | ending, true},
		{"tcp_v6_rcv.cold", "NOT_SPECIFIED", ending, true},
		{"ip_forward", "NOT_SPECIFIED", ending, false}, // of no meaning there
		{"unix_function", "NETFILTER_DROP", 0, false},
	} {
		if got := benign(tt.function, tt.reason, tt.class); got != tt.want {
			t.Errorf("%s %s: %v, want %v", tt.function, tt.reason, got, tt.want)
		}
	}
}
