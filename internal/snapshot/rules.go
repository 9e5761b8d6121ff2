// SPDX-License-Identifier: Apache-2.0

package snapshot

// Rules as far as package ruleset follows a packet through them: what they compare, in
// words, and what they do. Values are text, so that a redacted snapshot keeps its meaning.

// MaxRules is how many rules of chains that may drop a Snapshot holds, of all back ends.
// Those of chains beyond it are left out, and Chain.Walk is nil there.
const MaxRules = 10000

// MaxElements is how many elements of a set are kept besides those that a packet of Drops
// may have met.
const MaxElements = 64

// Rule is one rule of a chain.
type Rule struct {
	Number int    `json:"number"`           // its place in its chain, from 1
	Handle uint64 `json:"handle,omitempty"` // of nftables, 0 for iptables-legacy
	// Text is the rule as nft list or iptables -S prints it.
	Text    string  `json:"text"`
	Matches []Match `json:"matches,omitempty"` // all must hold
	// Verdict is accept, drop, reject, queue, jump, goto or return; "" goes on with the
	// next rule, unless Map says otherwise. Chain is where jump and goto lead.
	Verdict string `json:"verdict,omitempty"`
	Chain   string `json:"chain,omitempty"`
	// Map is a set whose element says the verdict, asked by the fields MapKeys.
	Map     string   `json:"map,omitempty"`
	MapKeys []string `json:"map_keys,omitempty"`
	Packets *uint64  `json:"packets,omitempty"` // in the window; nil without a counter
	// Sets is what of the packet it writes: ttl.
	Sets []string `json:"set_names,omitempty"`
	// State is what its quota, limit or the like has come to: "quota 1000 of 1000 bytes
	// used", one for each.
	State []string `json:"states,omitempty"`
}

// Match is one condition of a rule.
type Match struct {
	// Keys are the fields that are compared, as nft(8) names them: "ip saddr", "tcp dport",
	// "ct state", "iifname"; several are a concatenation. None: it compares no field (a limit),
	// or one that could not be read. Text says it then.
	Keys []string `json:"keys,omitempty"`
	Not  bool     `json:"not,omitempty"`
	// Values are alternatives: "10.0.0.1", "10.0.0.0/8", "80", "1024-65535", "new". Set is a
	// set that has them instead, Mask what is looked at of a number.
	Values []string `json:"match_values,omitempty"`
	Set    string   `json:"set,omitempty"`
	Mask   uint32   `json:"mask,omitempty"`
	// Text is the condition as the rule's text has it.
	Text string `json:"text,omitempty"`
}

// Set is a set or map of nftables, or one of ipset.
type Set struct {
	Backend string `json:"backend"` // nft, ipset
	Family  string `json:"family,omitempty"`
	Table   string `json:"table,omitempty"`
	Name    string `json:"name"`
	Size    int    `json:"size"` // how many elements it has
	// Elements are those kept: all, or those that packets of Drops may have met.
	Elements []Element `json:"elements,omitempty"`
	// Whole says that for each packet of Drops the elements tell whether it is in.
	Whole bool `json:"complete"`
}

// Element is one of a set.
type Element struct {
	Key     []string `json:"key"` // a value as in Match.Values for each field
	Verdict string   `json:"verdict,omitempty"`
	Chain   string   `json:"chain,omitempty"`
	// TimeoutSeconds is how long it stays, ExpiresSeconds how much of that is left; 0 is for ever.
	TimeoutSeconds float64 `json:"timeout_s,omitempty"`
	ExpiresSeconds float64 `json:"expires_s,omitempty"`
	Not            bool    `json:"not,omitempty"` // of ipset: nomatch
}

// DroppedPacket is one of a row's packets, chosen by chance, as far as rules ask for it.
type DroppedPacket struct {
	Text string `json:"text"` // as in Drop.Samples
	// Stands is for how many of the row's packets it stands: all of them sum up to the
	// row's count.
	Stands uint64 `json:"packets"`
	Stage  Stage  `json:"stage"`
	// In is the interface that it came in by, Out the one that its route leads out by.
	In  string `json:"ingress_interface,omitempty"`
	Out string `json:"egress_interface,omitempty"`
	// State is what rules call its state of connection tracking: new, established, related,
	// invalid, untracked. Reply and Status are of its entry.
	State  string   `json:"state,omitempty"`
	Reply  bool     `json:"reply_direction,omitempty"`
	Status []string `json:"status,omitempty"` // snat, dnat, confirmed, assured, seen-reply, ...
	Mark   uint32   `json:"mark,omitempty"`
	TTL    uint8    `json:"ttl,omitempty"` // hop limit
	DSCP   uint8    `json:"dscp,omitempty"`
	Length uint32   `json:"length,omitempty"` // of the network packet
}

// Stage is how far a packet had come when it was dropped.
type Stage string

// The stages of a packet.
const (
	StageArrived Stage = "arrived" // not routed: ingress, prerouting, or the bridge
	StageRouted  Stage = "routed"  // input or forward
	StageLocal   Stage = "local"   // made here: output or postrouting
	StageLeaving Stage = "leaving" // on its way out: postrouting, egress, or to another port of its bridge
)
