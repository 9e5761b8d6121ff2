// SPDX-License-Identifier: Apache-2.0

package snapshot

// What the sources of a trace report of packets on their way: plain values, from which package
// trace gives an account of a connection.

import (
	"fmt"
	"net/netip"
)

// TracePoint is a place where a packet was seen.
type TracePoint string

// The points, in the order in which a forwarded packet comes to them.
const (
	PointReceived TracePoint = "received" // by a device, before tc and netfilter, after XDP
	PointMade     TracePoint = "made"     // by this host, before its output hooks
	PointHook     TracePoint = "hook"     // between two functions of a netfilter hook
	PointRule     TracePoint = "rule"     // nftables reported a rule that matched
	PointPolicy   TracePoint = "policy"   // nftables reported that the end of a base chain was reached
	PointQueued   TracePoint = "queued"   // to the qdisc of a device
	PointSent     TracePoint = "sent"     // to the driver of a device
	PointDropped  TracePoint = "dropped"
)

// Sources of a TraceEvent.
const (
	TraceTracepoint = "tracepoint"
	TraceHookBPF    = "netfilter-bpf"
	TraceNFTables   = "nftables-trace"
)

// TraceEvent is one packet at one place. Names are as the namespace has them.
type TraceEvent struct {
	TimeNS    uint64     `json:"time_ns"` // CLOCK_MONOTONIC; of nftables' trace when it was read
	Source    string     `json:"source"`
	Point     TracePoint `json:"point"`
	Packet    uint64     `json:"packet"` // address of its skb; of nftables' trace its trace id
	CPU       uint32     `json:"cpu"`
	Netns     uint64     `json:"netns"`
	Namespace string     `json:"namespace"`
	Interface string     `json:"interface,omitempty"` // where it is
	In        string     `json:"in,omitempty"`        // that it came in by

	// Of PointHook, PointRule and PointPolicy. Priority is of the checkpoint, or of the base chain.
	Family   string `json:"family,omitempty"`
	Hook     string `json:"hook,omitempty"`
	Priority int    `json:"priority,omitempty"`

	Tuple TraceTuple `json:"tuple"` // the packet's own
	Kind  string     `json:"kind"`  // TCP's flags, ICMP's type and code
	// Fragment: it is a part of a packet.
	Fragment bool `json:"fragment,omitempty"`
	// About is the tuple of the packet that an ICMP error is about.
	About *TraceTuple `json:"about,omitempty"`
	// Identity is the same for a packet wherever it is seen, translated or not: it is made of
	// what NAT leaves alone.
	Identity uint64 `json:"identity"`
	Text     string `json:"text,omitempty"`   // as in Drop.Samples
	Head     []byte `json:"head,omitempty"`   // from the network header on
	Length   uint32 `json:"length,omitempty"` // of the whole network packet
	Mark     uint32 `json:"mark,omitempty"`

	Entry *TraceEntry `json:"entry,omitempty"`
	Route *TraceRoute `json:"route,omitempty"`
	Drop  *TraceDrop  `json:"drop,omitempty"`
	Rule  *TraceRule  `json:"rule,omitempty"`
}

// TraceTuple is one direction of a connection. Ports are 0 where the protocol has none.
type TraceTuple struct {
	Protocol string `json:"protocol"`
	// ID is the identifier of an ICMP query and of its reply, which NAT translates as it does ports.
	ID          uint16         `json:"icmp_id,omitempty"`
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"`
}

// String writes "tcp 10.0.0.2:4000 -> 10.0.1.2:80".
func (t TraceTuple) String() string { return t.Protocol + " " + t.Ends() }

// Ends is String without the protocol.
func (t TraceTuple) Ends() string {
	switch {
	case t.ID != 0:
		return fmt.Sprintf("%s -> %s id %d", t.Source.Addr(), t.Destination.Addr(), t.ID)
	case t.Source.Port() == 0 && t.Destination.Port() == 0:
		return t.Source.Addr().String() + " -> " + t.Destination.Addr().String()
	}
	return t.Source.String() + " -> " + t.Destination.String()
}

// Turned is the other direction of the same ends.
func (t TraceTuple) Turned() TraceTuple {
	t.Source, t.Destination = t.Destination, t.Source
	return t
}

// TraceEntry is the packet's conntrack entry.
type TraceEntry struct {
	ID        uint64     `json:"id"`    // its address: the same while it exists
	State     string     `json:"state"` // new, established, related
	IsReply   bool       `json:"is_reply,omitempty"`
	Status    []string   `json:"status,omitempty"` // confirmed, assured, seen-reply, snat, dnat
	Original  TraceTuple `json:"original"`
	Reply     TraceTuple `json:"reply"`
	Confirmed bool       `json:"confirmed"`
	// Replaces: the connection had another one before, which is gone.
	Replaces bool `json:"replaces,omitempty"`
}

// TraceRoute is where routing leads.
type TraceRoute struct {
	Function  string     `json:"function"` // ip_forward, ip_local_deliver, ip_error, ...
	Interface string     `json:"interface,omitempty"`
	Gateway   netip.Addr `json:"gateway,omitzero"`
}

// TraceDrop is where and why the kernel dropped the packet.
type TraceDrop struct {
	Location string `json:"location"`
	Function string `json:"function"`
	Reason   string `json:"reason"`
	// Cause is what the place and the reason say; "" if that is nothing, or depends on how far the
	// packet had come.
	Cause NATCause `json:"cause,omitempty"`
	// Tracking: of the functions on its hook connection tracking was the next.
	Tracking bool `json:"tracking,omitempty"`
	Benign   bool `json:"benign,omitempty"` // how packets end that nobody waits for
	// Reply is the type and code of the ICMP error that a program at tc made of the packet instead.
	Reply string `json:"reply,omitempty"`
}

// TraceRule is what nftables reported.
type TraceRule struct {
	Family  string `json:"family"`
	Table   string `json:"table"`
	Chain   string `json:"chain"`
	Base    string `json:"base,omitempty"` // the chain on the hook that led there
	Handle  uint64 `json:"handle,omitempty"`
	Verdict string `json:"verdict"`        // accept, drop, continue, jump, goto, return, ...
	To      string `json:"to,omitempty"`   // of jump and goto
	Text    string `json:"text,omitempty"` // of the rule, where it is known
}
