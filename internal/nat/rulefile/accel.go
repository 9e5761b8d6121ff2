// SPDX-License-Identifier: Apache-2.0

package rulefile

import "net/netip"

// AccelReason is what acceleration of the kernel's NAT did with a packet.
type AccelReason struct {
	Name  string // stable
	Means string
}

// AccelReasons by number: enum nat_accel_reason of bpf/accel/shortcut.h, whose order this is.
// Packets of all but the first went through the stack, untouched.
var AccelReasons = []AccelReason{
	{"forwarded", "past the stack"},
	{"not-ipv4", "not an IPv4 packet for this machine: ARP, IPv6, a VLAN's, broadcast frames"},
	{"protocol", "neither TCP nor UDP"},
	{"special", "a fragment, with IP options, or malformed"},
	{"ttl", "its time to live ends here"},
	{"too-big", "longer than the way out's MTU"},
	{"tcp-strict", "TCP, of which connection tracking wants to see every packet: nf_conntrack_tcp_be_liberal is 0, --tcp-liberal sets it"},
	{"tcp-flags", "a SYN, FIN or RST"},
	{"probe", "the one a second that asks the stack whether it still lets the flow out"},
	{"waiting", "of a flow that is new or was silent, or that the stack does not let out"},
	{"other-link", "came in where the flow's packets do not"},
	{"young", "its direction has fewer than eight or so packets a second, or has only begun: not worth a shortcut"},
	{"unknown", "connection tracking does not know it: the first of a flow, or untracked"},
	{"unanswered", "the other end of its flow has not sent anything"},
	{"unsteady", "TCP that opens or closes"},
	{"helper", "a helper of connection tracking follows the flow, or changes its sequence numbers"},
	{"offloaded", "a flowtable has the flow"},
	{"timeout", "the flow has a time-out below three seconds"},
	{"local", "for this machine itself"},
	{"no-way", "no route, no neighbour, or its way out is not an accelerated interface"},
	{"other-way", "the stack sends the flow another way than the routes say: routing by mark, or a program"},
	{"no-room", "the flow cache had no free slot, or gave the slot to another flow"},
}

// AccelEligible tells whether a reason is of packets that acceleration could have forwarded:
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

// Shortcut is one direction of a flow that is accelerated, or may be.
type Shortcut struct {
	Protocol         Protocol       `json:"protocol"`
	Source           netip.AddrPort `json:"source"`
	Destination      netip.AddrPort `json:"destination"`
	SourceAfter      netip.AddrPort `json:"source_translated"`
	DestinationAfter netip.AddrPort `json:"destination_translated"`
	Packets          uint64         `json:"packets"` // past the stack
	// Trusted: packets take the shortcut now.
	Trusted bool   `json:"trusted"`
	Refused string `json:"refused,omitempty"` // an AccelReason's name
}

// AccelStats count packets since acceleration was turned on.
type AccelStats struct {
	Reasons map[string]uint64 `json:"reasons"`
	Bytes   uint64            `json:"bytes"`   // of IPv4, past the stack
	Trusted int               `json:"trusted"` // directions that take the shortcut now
	Known   int               `json:"known"`   // in the table
}
