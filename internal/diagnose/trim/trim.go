// SPDX-License-Identifier: Apache-2.0

// Package trim says what the packets of a namespace walk through in netfilter, what
// share of the time each of it takes, and which of it no rule there needs. It is a
// function of facts: a Snapshot, and stacks that a profiler took.
package trim

import (
	"slices"
	"strings"

	"natkit/internal/snapshot"
)

// Cost is one function on a hook, or one that such a function calls (Via), and its
// share.
type Cost struct {
	snapshot.Hook
	Rules int `json:"rule_count"` // of the chain behind it; -1 where there is none, or it is not known
	// Packets is how many came to the hook in the window; nil where no counter tells.
	Packets *uint64 `json:"packets,omitzero"`
	Samples uint64  `json:"sample_count"`
	Share   float64 `json:"share"` // of the time of all processors, 0 to 1
	// Shared says that the samples are those of several functions of that name on
	// this hook, which a stack does not tell apart.
	Shared bool `json:"shared,omitzero"`
}

// Costs finds what each hook takes. total is the ticks of the profile, of which
// stacks are those in the kernel. The stacks are of the whole machine: what other
// namespaces have on the same hooks counts here too.
func Costs(s *snapshot.Snapshot, stacks []snapshot.Stack, total uint64) []Cost {
	out := make([]Cost, len(s.Hooks))
	for i, h := range s.Hooks {
		out[i] = Cost{Hook: h, Rules: rulesOf(s, h), Packets: packetsAt(s, h)}
		out[i].Shared = 1 < count(s.Hooks, func(o snapshot.Hook) bool { return samePlace(o, h) && o.Function == h.Function && o.Via == h.Via })
	}
	for _, stack := range stacks {
		counted := map[int]bool{}
		for i := range stack.Frames {
			if stack.Frames[i] != "nf_hook_slow" || i == 0 {
				continue
			}
			family, hook := placeOf(stack.Frames[i+1:])
			called := stack.Frames[i-1]
			for j := range out {
				c := &out[j]
				if counted[j] || family != "" && (c.Family != family || c.Hook.Hook != hook) {
					continue
				}
				onIt := c.Function == called && c.Via == ""
				within := c.Via == called && slices.Contains(stack.Frames[:i], c.Function)
				if onIt || within {
					counted[j] = true
					c.Samples += stack.Count
				}
			}
		}
	}
	if total > 0 {
		for i := range out {
			out[i].Share = float64(out[i].Samples) / float64(total)
		}
	}
	return out
}

// Framework is the share of nf_hook_slow itself, which calls the functions, and
// Whole that of all below it.
func Framework(stacks []snapshot.Stack, total uint64) (framework, whole float64) {
	var self, all uint64
	for _, stack := range stacks {
		if slices.Contains(stack.Frames, "nf_hook_slow") {
			all += stack.Count
		}
		if len(stack.Frames) > 0 && stack.Frames[0] == "nf_hook_slow" {
			self += stack.Count
		}
	}
	if total == 0 {
		return 0, 0
	}
	return float64(self) / float64(total), float64(all) / float64(total)
}

func samePlace(a, b snapshot.Hook) bool {
	return a.Family == b.Family && a.Hook == b.Hook && a.Device == b.Device
}

func count[T any](list []T, fits func(T) bool) int {
	n := 0
	for _, e := range list {
		if fits(e) {
			n++
		}
	}
	return n
}

// callers are the functions that call nf_hook_slow, and the hook they do it for.
// The compiler puts small functions into these.
var callers = map[string][2]string{
	"ip_rcv": {"ipv4", "prerouting"}, "ip_sublist_rcv": {"ipv4", "prerouting"}, "ip_list_rcv": {"ipv4", "prerouting"},
	"br_nf_pre_routing": {"ipv4", "prerouting"}, "ip_local_deliver": {"ipv4", "input"},
	"ip_forward": {"ipv4", "forward"}, "br_nf_forward_ip": {"ipv4", "forward"}, "br_nf_forward": {"ipv4", "forward"},
	"__ip_local_out": {"ipv4", "output"}, "ip_local_out": {"ipv4", "output"}, "raw_send_hdrinc": {"ipv4", "output"},
	"ip_output": {"ipv4", "postrouting"}, "ip_mc_output": {"ipv4", "postrouting"}, "br_nf_post_routing": {"ipv4", "postrouting"},
	"ipv6_rcv": {"ipv6", "prerouting"}, "ip6_sublist_rcv": {"ipv6", "prerouting"}, "ipv6_list_rcv": {"ipv6", "prerouting"}, "br_nf_pre_routing_ipv6": {"ipv6", "prerouting"},
	"ip6_input": {"ipv6", "input"}, "ip6_mc_input": {"ipv6", "input"}, "ip6_forward": {"ipv6", "forward"},
	"__ip6_local_out": {"ipv6", "output"}, "ip6_local_out": {"ipv6", "output"}, "ip6_xmit": {"ipv6", "output"}, "rawv6_send_hdrinc": {"ipv6", "output"}, "ndisc_send_skb": {"ipv6", "output"},
	"ip6_output":      {"ipv6", "postrouting"},
	"br_handle_frame": {"bridge", "prerouting"}, "br_pass_frame_up": {"bridge", "input"}, "__br_forward": {"bridge", "forward"},
	"br_forward_finish": {"bridge", "postrouting"},
	"arp_rcv":           {"arp", "input"}, "arp_xmit": {"arp", "output"},
	"__netif_receive_skb_core": {"netdev", "ingress"}, "__dev_queue_xmit": {"netdev", "egress"},
}

// placeOf is the hook that a call of nf_hook_slow is for, told from who called it;
// "" where that is not known.
func placeOf(above []string) (family, hook string) {
	for _, caller := range above[:min(len(above), 2)] {
		if place, ok := callers[caller]; ok {
			return place[0], place[1]
		}
		if caller != "nf_hook_slow_list" && !strings.HasPrefix(caller, "nf_hook") {
			return "", ""
		}
	}
	return "", ""
}

// ChainOf is the chain of nftables or the table of iptables behind a hook, nil where there
// is none or it is not known.
func ChainOf(s *snapshot.Snapshot, h snapshot.Hook) *snapshot.Chain {
	table, name, ok := strings.Cut(h.Chain, "/")
	if !ok {
		return nil
	}
	families := map[string][]string{"ipv4": {"ip", "inet"}, "ipv6": {"ip6", "inet"}}[h.Family]
	if families == nil {
		families = []string{h.Family}
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Table == table && c.Name == name && slices.Contains(families, c.Family) && (c.Backend == "nft") == (h.Owner == "nf_tables") {
			return c
		}
	}
	return nil
}

func rulesOf(s *snapshot.Snapshot, h snapshot.Hook) int {
	if c := ChainOf(s, h); c != nil {
		return c.Rules
	}
	return -1
}

// packetsAt is how many packets came to a hook in the window, by IP's own counters:
// of IPv4, and of what is not only bridged.
func packetsAt(s *snapshot.Snapshot, h snapshot.Hook) *uint64 {
	names := map[string][]string{
		"prerouting": {"Ip.InReceives"}, "input": {"Ip.InDelivers"}, "forward": {"Ip.ForwDatagrams"},
		"output": {"Ip.OutRequests"}, "postrouting": {"Ip.OutRequests", "Ip.ForwDatagrams"},
	}[h.Hook]
	if h.Family != "ipv4" || names == nil || h.Via != "" {
		return nil // of chains within the NAT core only the first packets of flows
	}
	sum := uint64(0)
	for _, name := range names {
		n, ok := s.Counters[name]
		if !ok {
			return nil
		}
		sum += n
	}
	return &sum
}
