// SPDX-License-Identifier: Apache-2.0

// Package trace gives an account of connections from what the kernel reported of their packets:
// which way each packet took through namespaces and hooks, what was done to it, and where it left
// or died and why. It is pure: the same events give the same account, wherever they come from.
package trace

import (
	"fmt"
	"strings"

	"natkit/internal/snapshot"
)

// Packet is one packet, from where it was first seen to where it was last seen.
type Packet struct {
	Number     int    `json:"number"`          // in the order in which they were first seen, from 1
	Connection int    `json:"connection"`      // likewise
	Reply      bool   `json:"reply_direction"` // against the direction of the connection's first packet
	Protocol   string `json:"protocol"`
	Kind       string `json:"kind,omitempty"`     // TCP's flags, ICMP's type and code
	Length     uint32 `json:"length"`             // of the network packet, where it was first seen
	StartNS    uint64 `json:"start_monotonic_ns"` // CLOCK_MONOTONIC
	Tuple      string `json:"tuple"`              // where it was first seen
	Steps      []Step `json:"steps"`
	End        End    `json:"end"`
}

// Step is one thing that happened to a packet.
type Step struct {
	// TimeNS is when it was seen, CLOCK_MONOTONIC. 0: between the steps before and after it.
	TimeNS    uint64 `json:"monotonic_ns,omitempty"`
	Namespace string `json:"netns"`
	Interface string `json:"interface,omitempty"`
	Hook      string `json:"hook,omitempty"`
	What      What   `json:"what"`
	Detail    string `json:"detail,omitempty"`
	Rule      *Rule  `json:"matched_rule,omitempty"`
	Before    string `json:"ends_before,omitempty"` // the packet's ends before a translation
	After     string `json:"ends_after,omitempty"`  // and behind it
	Source    string `json:"read_from"`             // what it is known from
	Head      []byte `json:"-"`                     // of the packet there, from the network header on
	Length    uint32 `json:"-"`
}

// Rule is a rule that a packet met.
type Rule struct {
	Backend string `json:"backend"`          // nft, iptables-legacy, ebpf
	Chain   string `json:"chain"`            // family, table and chain; table and chain of iptables-legacy
	Handle  uint64 `json:"handle,omitempty"` // of nftables
	Number  int    `json:"number,omitempty"` // its place in the chain, where there are no handles
	Text    string `json:"text,omitempty"`
	Verdict string `json:"verdict"`
	To      string `json:"target_chain,omitempty"` // of jump and goto
	Policy  bool   `json:"by_policy,omitempty"`
	// Derived: not reported by the kernel but found by following the saved rules.
	Derived bool `json:"derived,omitempty"`
}

// What happened in a step.
type What string

// The steps.
const (
	Received   What = "received"
	Made       What = "made here"
	NewEntry   What = "new entry"       // connection tracking made one
	Found      What = "entry found"     // connection tracking knew the connection
	NoEntry    What = "no entry"        // invalid, or not to be tracked
	Confirmed  What = "entry confirmed" // it is in the table now
	RuleMet    What = "rule"
	Translated What = "translated"
	Bypassed   What = "translated outside netfilter" // by a program at tc or XDP
	Routed     What = "routed"
	Passed     What = "hook passed"
	Queued     What = "queued"
	Sent       What = "sent"
	Dropped    What = "dropped"
)

// End is what became of a packet, as far as it was seen.
type End struct {
	Outcome   Outcome `json:"outcome"`
	Namespace string  `json:"netns"`
	Interface string  `json:"interface,omitempty"`
	Why       string  `json:"note,omitempty"`
	Rule      *Rule   `json:"matched_rule,omitempty"` // that dropped it
	// Cause is one of those of `natkit drops`.
	Cause  snapshot.NATCause `json:"cause,omitempty"`
	Reason string            `json:"reason,omitempty"`   // the kernel's
	Place  string            `json:"location,omitempty"` // in the kernel
	Benign bool              `json:"benign,omitempty"`
}

// Outcome is how the way of a packet ended.
type Outcome string

// Outcomes.
const (
	Left      Outcome = "left"      // by an interface, and was not seen again
	Delivered Outcome = "delivered" // it passed the input hook
	Arrived   Outcome = "arrived"   // in a namespace without netfilter hooks, behind which it is not seen
	Died      Outcome = "dropped"
	Vanished  Outcome = "not seen again" // inside of the stack
)

// EntryEnd is the end of a conntrack entry of a followed connection, before its time: its next packets belong to no
// connection, and are not translated as before.
type EntryEnd struct {
	Connection  int      `json:"connection"` // as in Packet
	Namespace   string   `json:"netns"`
	Original    string   `json:"tuple"`        // of its original direction
	TimeNS      uint64   `json:"monotonic_ns"` // CLOCK_MONOTONIC, when it was missed
	LeftSeconds uint32   `json:"left_s"`       // that it would have had
	How         EntryHow `json:"outcome"`
	Why         string   `json:"note"`

	Tuple snapshot.TraceTuple `json:"-"`
}

// EntryHow is how an entry ended.
type EntryHow string

// How entries end before their time.
const (
	EntryEvicted EntryHow = "evicted" // by the kernel, from a full table
	EntryGone    EntryHow = "deleted"
)

// String names the rule as its program lists it.
func (r *Rule) String() string {
	var b strings.Builder
	b.WriteString(r.Chain)
	switch {
	case r.Policy:
		fmt.Fprintf(&b, " policy %s", r.Verdict)
		return b.String()
	case r.Handle != 0:
		fmt.Fprintf(&b, " handle %d", r.Handle)
	case r.Number != 0:
		fmt.Fprintf(&b, " rule %d", r.Number)
	}
	if r.Text != "" {
		fmt.Fprintf(&b, " `%s`", r.Text)
	}
	return b.String()
}
