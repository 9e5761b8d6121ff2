// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

const (
	// The kernel drops for a hundred reasons. One that no other cause of the
	// catalogue knows is worth a word when packets on their way through are lost.
	otherFew   = 10
	otherShare = 0.01 // of what came in by that interface: advice
	otherSome  = 0.05 // a warning
	otherMost  = 0.50 // critical
)

var otherDrops = Cause{
	Code:     "other-drops",
	Title:    "Forwarded packets are dropped for another reason",
	Headline: "Unexplained packet drops on a Linux router: what kfree_skb reports",
	Search: []string{
		"skb:kfree_skb",
		"dropwatch",
		"nf_queue: full at",
		"reason: TC_INGRESS",
		"reason: XDP",
		"reason: NOT_SPECIFIED",
	},
	Severities:    []Severity{Advice, Warning, Critical},
	Thresholds:    []Threshold{many(otherFew, "packets dropped"), portion(otherShare, "of the packets received on the interface")},
	Needs:         []string{snapshot.CanDrops, snapshot.CanInterfaces},
	Symptom:       "Packet loss that no rule, route, queue or table explains: a queue to a dead program, a traffic control filter, an XDP or BPF program, IPsec, a bridge port.",
	Proof:         fmt.Sprintf("The tracer saw forwarded packets dropped for a reason that no other cause covers: at least %d and %s of what arrived on their interface is advice, %s a warning, %s critical. natkit reports the kernel's reason and function, and what is known of them.", otherFew, percent.Whole(otherShare), percent.Whole(otherSome), percent.Whole(otherMost)),
	FalsePositive: "What XDP programs drop, since they are there to drop: advice at most. Packets for this machine that nobody waits for, ends of connections, frames for other hosts: every stack discards these all day.",
	Cure:          "Change what drops them: the finding names the commands that show it.",
	judge:         judgeOther,
}

// elsewhere are places and reasons of drops that belong to another part of the kernel
// or to a program: what they mean, and the commands that show it. %s is the interface.
var elsewhere = []struct {
	function, reason string // how they begin; "" is any
	what             string
	commands         []string
	remark           string
}{
	{"nf_queue", "", "packets are queued for a program (NFQUEUE), and none reads that queue", []string{"cat /proc/net/netfilter/nfnetlink_queue", "iptables-legacy-save | grep NFQUEUE", "nft list ruleset | grep queue"},
		"# start the program; or let packets pass while it is away: --queue-bypass of NFQUEUE, bypass of nft's queue"},
	{"nfqnl_", "", "the queue of a program that reads packets (NFQUEUE) is full", []string{"cat /proc/net/netfilter/nfnetlink_queue"},
		"# a faster program, more queues (--queue-balance), or a longer queue (its maximum length is set by the program)"},
	{"dev_forward_skb", "", "the other end of a virtual link does not accept them: it is down, or its MTU is too small", []string{"ip -d link show dev %s"},
		"# on the other end of the pair: the same MTU as here, and up; for TCP, MSS clamping also helps"},
	{"veth_xmit", "", "the other end of a virtual link is gone or down", []string{"ip -d link show dev %s"}, ""},
	{"", "TC_", "a filter or classifier of traffic control dropped them", []string{"tc -s filter show dev %s ingress", "tc -s filter show dev %s egress", "bpftool net show dev %s"}, ""},
	{"tcf_", "", "a filter or classifier of traffic control dropped them", []string{"tc -s filter show dev %s ingress", "tc -s filter show dev %s egress"}, ""},
	{"", "XDP", xdpDropped, []string{"ip -d link show dev %s", "bpftool net show dev %s"}, ""},
	{"do_xdp_generic", "", xdpDropped, []string{"ip -d link show dev %s", "bpftool net show dev %s"}, ""},
	{"veth_xdp", "", xdpDropped, []string{"ip -d link show dev %s", "bpftool net show dev %s"}, ""},
	{"", "BPF_", "a BPF program of a control group dropped them", []string{"bpftool cgroup tree"}, ""},
	{"", "XFRM_", "a policy of IPsec refused them", []string{"ip xfrm policy", "cat /proc/net/xfrm_stat"}, ""},
	{"xfrm", "", "a policy of IPsec refused them", []string{"ip xfrm policy", "cat /proc/net/xfrm_stat"}, ""},
	{"br_", "", "a bridge dropped them: a port's state, its VLANs, or isolation", []string{"bridge -d link show", "bridge vlan show"}, ""},
	{"", "BRIDGE_", "a bridge dropped them: a port's state, its VLANs, or isolation", []string{"bridge -d link show", "bridge vlan show"}, ""},
	{"", "VLAN", "they have a VLAN tag that no interface here has", []string{"ip -d link show type vlan", "bridge vlan show"}, ""},
	{"", "NOMEM", "there was no memory for them", []string{"cat /proc/meminfo", "sysctl vm.min_free_kbytes"}, ""},
	{"", "DEV_READY", "the interface that they were to leave by is down, or has no carrier", []string{"ip link show"}, ""},
}

const xdpDropped = "an XDP program dropped them"

func judgeOther(f facts) *verdict {
	if f.Drops == nil {
		return nil
	}
	worst, part := f.otherDrop()
	lost := worst.Count
	v := &verdict{impact: float64(lost)}
	switch {
	case lost == 0 || part < f.part(otherShare):
		return nil
	case part >= otherMost:
		v.Severity = Critical
	case part >= otherSome:
		v.Severity = Warning
	default:
		v.Severity = Advice
	}
	function, _, _ := strings.Cut(worst.Location, "+")
	inner := strings.TrimLeft(function, "_")
	way := "arrived on"
	if leaves(inner) {
		way = "were to leave by"
	}
	v.Title = fmt.Sprintf("%s that %s %s dropped at %s %s", number(lost, "packet"), way, worst.Interface, function, f.window())
	if reason := strings.ReplaceAll(strings.ToLower(worst.Reason), "_", " "); worst.Reason != "NOT_SPECIFIED" {
		v.Title += ": " + reason
	}
	v.Evidence = append([]Evidence{{fmt.Sprintf("packets dropped at %s with reason %s", worst.Location, worst.Reason), fmt.Sprintf("%d, %s of what %s %s", lost, percent.Whole(part), strings.TrimPrefix(way, "were to "), worst.Interface), fromTracer}},
		sampleEvidence([]snapshot.Drop{worst})...)
	v.Why = "The kernel dropped forwarded packets outside NAT and its rules. To a client it looks the same."
	for _, e := range elsewhere {
		if !strings.HasPrefix(inner, e.function) || !strings.HasPrefix(worst.Reason, e.reason) {
			continue
		}
		v.Why = "Judging by the function that dropped them, " + e.what + "."
		if e.what == xdpDropped {
			v.Severity = Advice // that is what such programs are for
		}
		v.Remedy = []string{"# look at it:"}
		for _, c := range e.commands {
			v.Remedy = append(v.Remedy, f.run(strings.ReplaceAll(c, "%s", quote(worst.Interface))))
		}
		if e.remark != "" {
			v.Remedy = append(v.Remedy, e.remark)
		}
		break
	}
	if client, network, ok := f.clientAtBroadcast(worst); ok {
		v.Title = fmt.Sprintf("%s to %s dropped %s: it is the broadcast address of %s", number(lost, "reply"), client, f.window(), network)
		v.Why = fmt.Sprintf("A client has the address %s, and its packets are forwarded. Its replies are treated as broadcasts, because with this machine's prefix length it is the last address of %s. One of the two prefix lengths is wrong.", client, network)
		v.Remedy = []string{"# the address and prefix length here; clients get theirs by DHCP or are configured manually:", f.run("ip -4 addr show to " + network.String())}
	}
	if v.Remedy == nil {
		v.Remedy = []string{"# see the packets, and by which functions they came to " + function + " (" + strconv.Quote(worst.Reason) + " is the kernel's name):", f.natkit("drops --for 10s --stacks")}
	}
	v.Verify = f.look(f.natkit("drops --for 10s"))
	return v
}

// otherDrop is the place that dropped most of what was on its way through, and how much that is of
// what went by its interface.
func (f facts) otherDrop() (worst snapshot.Drop, part float64) {
	for _, row := range f.Drops.Rows {
		if row.Cause != snapshot.CauseNone || row.Benign || row.Count >= implausible || row.Count < f.few(otherFew) || !f.here(row.Netns) || !f.passing(row) {
			continue
		}
		if f.byEngine(row) {
			continue
		}
		l, ok := f.link(row.Interface)
		whole := max(row.Count, l.RxPackets)
		if leaves(row.Location) {
			whole = saturate(row.Count, l.TxPackets) // counted once they have left
		}
		if !ok || whole >= implausible {
			continue
		}
		if row.Count > worst.Count {
			worst, part = row, share(row.Count, whole)
		}
	}
	return worst, part
}

// byEngine says whether the packets are those that natkit's engine dropped at its tc hook, and counts.
func (f facts) byEngine(row snapshot.Drop) bool {
	if !f.Engine.Tracks() || !strings.HasPrefix(strings.TrimLeft(row.Location, "_"), "netif_receive_skb_core") {
		return false
	}
	n := uint64(0)
	for _, r := range rulefile.Reasons {
		if r.Kind == "dropped" {
			n = saturate(n, f.counted(r.Name))
		}
	}
	return row.Count <= 2*n // the two windows are not the same to the millisecond
}

// leaves says whether packets are dropped in a function on their way out: its interface is the one that they
// were to leave by.
func leaves(function string) bool {
	function = strings.TrimLeft(function, "_")
	return slices.ContainsFunc([]string{"dev_forward_skb", "veth_xmit", "dev_queue_xmit", "sch_handle_egress"}, func(begin string) bool {
		return strings.HasPrefix(function, begin)
	})
}

// clientAtBroadcast finds a client that has the broadcast address of a network here: replies to its flows
// are for that address.
func (f facts) clientAtBroadcast(row snapshot.Drop) (client netip.Addr, network netip.Prefix, ok bool) {
	for _, text := range row.Samples {
		t, _ := parseSample(text)
		flow, known := parseFlow(text)
		if !known || flow.source.Addr() != t.dest.Addr() || !f.manifold(t.dest.Addr()) {
			continue
		}
		for _, i := range f.Interfaces {
			for _, p := range i.Addresses {
				if p.Contains(t.dest.Addr()) {
					return t.dest.Addr(), p.Masked(), true
				}
			}
		}
	}
	return client, network, false
}

// replyForOther says whether a sampled packet is the reply to somebody else's connection, though it is
// for this machine's address: what is translated back only later.
func (f facts) replyForOther(sample string) bool {
	flow, ok := parseFlow(sample)
	return ok && isAnswer(sample) && !f.own(flow.source.Addr())
}

// passing says whether packets of row were on their way through this machine.
func (f facts) passing(row snapshot.Drop) bool {
	if _, _, ok := f.clientAtBroadcast(row); ok {
		return true
	}
	return slices.ContainsFunc(row.Samples, func(sample string) bool {
		if row.Reason != "NO_SOCKET" && f.awaited(sample) || f.replyForOther(sample) {
			return true
		}
		t, _ := f.asSent(sample)
		dest := t.dest.Addr()
		return dest.IsValid() && !f.own(dest) && !f.own(t.source.Addr()) && !f.manifold(dest) && !dest.IsLoopback()
	})
}
