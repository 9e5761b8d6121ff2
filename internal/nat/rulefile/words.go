// SPDX-License-Identifier: Apache-2.0

// What an engine reports: sessions, mappings, events, and what it did with packets.

package rulefile

import (
	"time"

	"natkit/internal/snapshot"
)

// Session is a conversation that is translated: two directions, each as it arrives
// and as it leaves.
type Session struct {
	Protocol Protocol `json:"protocol"`
	// From is the side whose packet opened it: "inside" or "outside".
	From  string `json:"side"`
	State string `json:"state"` // the time-out it is under: "udp", "tcp_established"; "dead" before it is removed

	// The opener's packets: as they arrive, as they leave. ICMP queries have their
	// identifier as source port.
	Source           snapshot.Endpoint `json:"source,omitzero"`
	Destination      snapshot.Endpoint `json:"destination,omitzero"`
	SourceAfter      snapshot.Endpoint `json:"source_translated,omitzero"`
	DestinationAfter snapshot.Endpoint `json:"destination_translated,omitzero"`
	// Where subscribers are told apart by their interface: that of Source and that of
	// DestinationAfter, if they are inside.
	SourceInterface      string `json:"source_interface,omitempty"`
	DestinationInterface string `json:"destination_interface,omitempty"`

	Rule    RuleID           `json:"rule_id,omitzero"` // none of a refusal; as `natkit rules` lists it
	Age     snapshot.Seconds `json:"age_s"`
	Idle    snapshot.Seconds `json:"idle_s"`               // since the last packet that keeps it alive
	Expires snapshot.Seconds `json:"expires_s"`            // when nothing more comes; negative: due
	Packets [2]uint64        `json:"packets_by_direction"` // the opener's direction, the other
	Bytes   [2]uint64        `json:"bytes_by_direction"`   // of IPv4
}

// StateDead is the Session.State of one that has ended and waits to be removed.
const StateDead = "dead"

// Mapping is an internal endpoint with its external endpoint.
type Mapping struct {
	Class  string            `json:"class"` // tcp, udp, icmp; other: the whole address
	Inside snapshot.Endpoint `json:"internal,omitzero"`
	// Interface is that of Inside, where subscribers are told apart by it.
	Interface string            `json:"interface,omitempty"`
	Outside   snapshot.Endpoint `json:"external,omitzero"`
	Sessions  int               `json:"sessions"`
	// Filtering is whom it lets in.
	Filtering string `json:"filtering"`
	// HoldDown: no session uses it, and its port is kept for the same endpoint until the
	// hold-down is over.
	HoldDown bool `json:"in_hold_down"`
	// Explicit are the requests, by PCP or NAT-PMP, that keep it without sessions.
	Explicit []ExplicitMapping `json:"explicit,omitempty"`
}

// ExplicitMapping is what a host has asked for: to keep a mapping for a time.
type ExplicitMapping struct {
	By      string            `json:"protocol"`        // pcp, nat-pmp
	Left    snapshot.Seconds  `json:"expires_s"`       // from now
	Remote  snapshot.Endpoint `json:"remote,omitzero"` // the one endpoint that it is for (PEER)
	Filters []string          `json:"filters,omitempty"`
}

// Event is something that happened to a session, as it happens.
type Event struct {
	Time    time.Time `json:"time"`
	Kind    string    `json:"kind"`             // created, ended, refused
	Reason  string    `json:"reason,omitempty"` // of a refusal: a Reason's name
	Session Session   `json:"session"`
}

// Reason says what became of a packet, or what else an engine counts (enum nat_reason
// of bpf/nat/abi.h, whose order this is).
type Reason uint8

// ReasonInfo is a reason in words.
type ReasonInfo struct {
	Name  string // stable: a metric's label
	Kind  string // passed (to the stack, untouched), translated, counted (beside a packet's end), dropped
	Means string
}

// Reasons by number.
var Reasons = []ReasonInfo{
	{"not-ipv4", "passed", "not an IPv4 packet for this machine: ARP, IPv6, a VLAN's, broadcast frames"},
	{"no-rule", "passed", "no rule matches it"},
	{"excluded", "passed", "an exclude rule matches it"},
	{"local", "passed", "it is for the gateway itself"},
	{"outbound-ttl", "passed", "TTL exceeded; the stack sends the ICMP error to its internal sender"},
	{"outbound-too-big", "passed", "longer than the MTU of the egress interface, with DF; the stack sends the ICMP error to its internal sender"},
	{"outbound-no-route", "passed", "there is no route; the stack sends the ICMP error to its internal sender"},
	{"multicast", "passed", "multicast or broadcast"},
	{"to-tc", "counted", "left by XDP to tc, where it is counted with its outcome"},
	{"translated-in", "translated", "from outside"},
	{"translated-out", "translated", "from inside"},
	{"created", "counted", "sessions created"},
	{"expired", "counted", "sessions removed after their timeout"},
	{"mapped", "counted", "mappings created"},
	{"unmapped", "counted", "mappings removed, their ports free again"},
	{"hairpinned", "counted", "sessions between two internal hosts by an external address"},
	{"mss-clamped", "counted", "SYN packets whose MSS was lowered"},
	{"icmp-translated", "counted", "ICMP errors translated, with the packet inside"},
	{"icmp-sent", "counted", "ICMP errors sent by the engine"},
	{"fragment-held", "counted", "fragments that arrived before their first one and are kept for it"},
	{"malformed", "dropped", "lengths that contradict each other, or a header cut short"},
	{"bad-checksum", "dropped", "an ICMP error, or the header inside it, whose checksum is wrong"},
	{"spoofed", "dropped", "a source that cannot arrive there: an internal one on another interface, an internal one from outside; or its own destination"},
	{"filtered", "dropped", "to a mapping whose filtering does not admit this sender"},
	{"no-mapping", "dropped", "to a pool address or port without a mapping"},
	{"no-session", "dropped", "it opens no session and belongs to none: a stray reply or reset, an ICMP error about an unknown packet"},
	{"no-port", "dropped", "every port of the external address is in use or in hold-down"},
	{"no-address", "dropped", "every address of the pool is in use, or the interface has none"},
	{"sessions-full", "dropped", "the session table is full (limits.sessions)"},
	{"mappings-full", "dropped", "the table of mappings or filter entries is full (limits.mappings)"},
	{"source-limit", "dropped", "its subscriber has reached its session limit (limits.sessions_per_source, or sessions of its class)"},
	{"port-limit", "dropped", "its subscriber has as many external ports as it may have, those in hold-down included (ports of its class, blocks of the pool)"},
	{"rate-limit", "dropped", "its subscriber has more new sessions a second than it may (new_per_second of its class)"},
	{"no-block", "dropped", "the external address of its subscriber has no port block left"},
	{"sources-full", "dropped", "the table of subscribers is full (limits.sources)"},
	{"inbound-ttl", "dropped", "TTL exceeded; the engine sends the ICMP error to its external sender"},
	{"too-big", "dropped", "longer than the MTU of the egress interface, from outside with DF: the engine reports the MTU to the sender"},
	{"no-route", "dropped", "there is no route to its translated destination, or not by an interface of the rule file"},
	{"unsupported", "dropped", "a protocol or ICMP type that its rule cannot translate, or a translation to the gateway itself"},
	{"fragment", "dropped", "a fragment that arrived before its first one and could not be kept: too long, or more than 128 of its datagram"},
	{"fragments-full", "dropped", "the table of fragmented datagrams is full"},
	{"race", "dropped", "lost a race against another CPU or garbage collection on the same session; its sender retransmits it"},
	{"rewrite", "dropped", "the kernel refused to rewrite it; this cannot happen"},
	{"bypass", "dropped", "a table of the rules is missing; this cannot happen"},
}

// String is the reason's name.
func (r Reason) String() string {
	if int(r) < len(Reasons) {
		return Reasons[r].Name
	}
	return "unknown"
}

// Refusals are the reasons for which a subscriber is refused a session, in the order of enum
// nat_refusal of bpf/nat/abi.h.
var Refusals = []string{"source-limit", "port-limit", "rate-limit", "no-block"}

// Stats are an engine's counters since it was made.
type Stats struct {
	Reasons  map[string]uint64 `json:"by_reason"` // packets, or what the name says, by reason's name
	BytesIn  uint64            `json:"bytes_in"`
	BytesOut uint64            `json:"bytes_out"`

	Sessions int `json:"sessions"`          // now
	Mappings int `json:"mappings"`          // now
	Explicit int `json:"explicit_mappings"` // of these, that hosts asked for by PCP or NAT-PMP

	GCAge      snapshot.Seconds `json:"gc_age_s"` // since expiry last ran
	GCTime     snapshot.Seconds `json:"gc_duration_s"`
	GCExamined uint64           `json:"gc_visited"`
	EventsLost uint64           `json:"lost_events"`
}
