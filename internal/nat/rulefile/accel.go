// SPDX-License-Identifier: Apache-2.0

package rulefile

import "natkit/internal/snapshot"

// MaxAccelFlows is what a table of flows may be made for: 2.5 GB.
const MaxAccelFlows = 1 << 23

// AccelReason is what acceleration of the kernel's NAT did with a packet.
type AccelReason struct {
	Name  string // stable
	Means string
}

// AccelReasons by number: enum nat_accel_reason of bpf/accel/entry.h, whose order this is.
// Packets of all but the first went through the stack, untouched.
var AccelReasons = []AccelReason{
	{"forwarded", "before the kernel stack"},
	{"not-ipv4", "not an IPv4 packet for this machine: ARP, IPv6, a VLAN's, broadcast frames"},
	{"protocol", "neither TCP nor UDP"},
	{"special", "a fragment, with IP options, or malformed"},
	{"ttl", "TTL exceeded here"},
	{"too-big", "longer than the MTU of the egress interface"},
	{"tcp-strict", "TCP while connection tracking checks its windows: nf_conntrack_tcp_be_liberal is 0, --tcp-liberal sets it to 1"},
	{"tcp-flags", "a SYN, FIN or RST"},
	{"probe", "one packet a second, passed to the stack to see whether it still forwards the flow"},
	{"waiting", "of a flow that is new or was idle, or that the stack does not forward"},
	{"other-link", "arrived on another interface than the flow's packets"},
	{"below-threshold", "its direction has fewer than about eight packets a second, or has just started"},
	{"unknown", "connection tracking has no entry: the first packet of a flow, or untracked"},
	{"unreplied", "the other end of its flow has not sent anything"},
	{"unsteady", "a TCP connection that opens or closes"},
	{"helper", "a conntrack helper reads the flow, or changes its sequence numbers"},
	{"offloaded", "a flowtable has the flow"},
	{"timeout", "the flow has a timeout below three seconds"},
	{"local", "for this machine itself"},
	{"no-route", "no route, no neighbour, or its egress interface is not accelerated"},
	{"other-route", "the stack sends the flow by another path than its route: routing by mark, or a program"},
	{"no-room", "the flow cache had no free slot, or gave the slot to another flow"},
}

// AccelEligible reports whether a reason is of packets that acceleration could have forwarded:
// TCP and UDP over IPv4 for others. Those that were seen to be for the machine itself are not
// of them; a new connection to it is not seen to be.
func AccelEligible(reason string) bool {
	return reason != "not-ipv4" && reason != "protocol" && reason != "local"
}

// AccelShare is which part of the eligible packets was forwarded. Negative: there were none.
func AccelShare(reasons map[string]uint64) float64 {
	total := 0.0
	for name, n := range reasons {
		if AccelEligible(name) {
			total += float64(n)
		}
	}
	if total == 0 {
		return -1
	}
	return float64(reasons["forwarded"]) / total
}

// AccelEntry is one direction of a flow that is accelerated, or may be.
type AccelEntry struct {
	Protocol         Protocol          `json:"protocol"`
	Source           snapshot.Endpoint `json:"source,omitzero"`
	Destination      snapshot.Endpoint `json:"destination,omitzero"`
	SourceAfter      snapshot.Endpoint `json:"source_translated,omitzero"`
	DestinationAfter snapshot.Endpoint `json:"destination_translated,omitzero"`
	Packets          uint64            `json:"packets"` // before the stack
	// Valid: packets use the fast path now.
	Valid   bool   `json:"valid"`
	Refused string `json:"reason,omitempty"` // an AccelReason's name
}

// AccelStats count packets since acceleration was turned on.
type AccelStats struct {
	Reasons map[string]uint64 `json:"by_reason"`
	Bytes   uint64            `json:"bytes"`   // of IPv4, before the stack
	Valid   int               `json:"valid"`   // directions that use the fast path now
	Known   int               `json:"entries"` // in the table
}
