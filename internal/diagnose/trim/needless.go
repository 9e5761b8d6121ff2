// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"fmt"
	"slices"
	"strings"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// Kinds of what is needless, and of what a comparison in the lab measures.
const (
	EmptyChain    = "empty-chain"
	LegacyTable   = "legacy-table"
	LegacyBeside  = "legacy-beside-nft"
	BridgeHooks   = "bridge-netfilter"
	IdleTracking  = "idle-conntrack"
	HelperEnabled = "conntrack-helper"
)

// Needless is something that packets walk through and no rule in use needs.
type Needless struct {
	Kind  string `json:"kind"`
	What  string `json:"what"`
	Why   string `json:"reason"`
	Hooks int    `json:"hook_count"` // functions on hooks that go with it
	// OnPath is how many of them a forwarded packet meets; 0 where it is not counted.
	OnPath int `json:"path_hook_count,omitzero"`
	// Commands remove it; a line that begins with "# " is a remark.
	Commands []string `json:"remedy"`
	// SavesNS is what a forwarded packet would save, measured in the lab on this
	// kernel; nil where it was not measured.
	SavesNS *float64 `json:"saves_ns,omitzero"`
	// Unmeasured is why a measurement in the lab left it out.
	Unmeasured string `json:"unmeasured_reason,omitzero"`
}

// Find lists what is needless, as far as the facts tell. It says nothing where they
// do not: without the rules, nothing.
func Find(s *snapshot.Snapshot) []Needless {
	var out []Needless
	out = append(out, emptyChains(s)...)
	out = append(out, legacy(s)...)
	out = append(out, bridged(s)...)
	out = append(out, tracking(s)...)
	if s.Sysctls["net.netfilter.nf_conntrack_helper"] == "1" {
		out = append(out, Needless{Kind: HelperEnabled, What: "conntrack helpers are assigned to flows by port",
			Why:      "Each new flow is compared with the helpers' ports, and a helper reads what an attacker sends. Rules can assign a helper to the flows that need it.",
			Commands: []string{"# when rules assign helpers (nft: ct helper set; iptables: -j CT --helper), or none is needed:", shell.In(s.Netns.Name, "sysctl -w net.netfilter.nf_conntrack_helper=0")}})
	}
	return out
}

// emptyChains are base chains of nftables, of every family, that hold no rule and
// let everything pass.
func emptyChains(s *snapshot.Snapshot) []Needless {
	var out []Needless
	for _, c := range s.Chains {
		if c.Backend != "nft" || c.Hook == "" || c.Rules > 0 || c.Policy == "drop" {
			continue
		}
		n := Needless{
			Kind: EmptyChain, What: fmt.Sprintf("chain %s %s %s on %s: no rule, policy accept", c.Family, c.Table, c.Name, c.Hook), Hooks: 1,
			Why:      "Every packet on the hook passes it for nothing.",
			Commands: []string{shell.In(s.Netns.Name, fmt.Sprintf("nft delete chain %s %s %s", c.Family, shell.Quote(c.Table), shell.Quote(c.Name)))},
		}
		switch {
		case c.Family == "inet":
			n.Hooks = 2 // IPv4 and IPv6
		case c.Type == "nat":
			n.Why = "Without a rule it translates nothing, but it turns on tracking for every flow, and evaluates the chain for the first packet of each."
		}
		if owner := ownerOf(c.Name, c.Table); owner != "" {
			n.Commands = slices.Insert(n.Commands, 0, "# "+owner+" creates it again when it next writes its rules")
		}
		out = append(out, n)
	}
	return out
}

// legacy are the tables of iptables-legacy without a rule, and those with rules
// where nftables has some as well.
func legacy(s *snapshot.Snapshot) []Needless {
	type table struct{ family, name string }
	rules := map[table]int{}
	base, onPath := map[table]int{}, map[table]int{}
	drops := map[table]bool{}
	var order []table
	nft := 0
	for _, c := range s.Chains {
		if c.Backend != "iptables-legacy" {
			nft += c.Rules
			continue
		}
		t := table{c.Family, c.Table}
		if _, known := rules[t]; !known {
			order = append(order, t)
		}
		rules[t] += c.Rules
		if c.Hook != "" {
			base[t]++
		}
		if slices.Contains([]string{"prerouting", "forward", "postrouting"}, c.Hook) {
			onPath[t]++
		}
		drops[t] = drops[t] || strings.EqualFold(c.Policy, "drop")
	}
	var out []Needless
	var empty []string
	used := 0
	for _, t := range order {
		module := map[string]string{"ip": "iptable_", "ip6": "ip6table_", "arp": "arptable_", "bridge": "ebtable_"}[t.family] + t.name
		if rules[t] > 0 || drops[t] {
			if t.family == "ip" { // the others have programs of their own
				used += rules[t]
				empty = append(empty, EmptyLegacy(t.name, func(line string) string { return shell.In(s.Netns.Name, line) })...)
			}
			continue
		}
		out = append(out, Needless{
			Kind: LegacyTable, What: fmt.Sprintf("legacy table %s %s: no rule", t.family, t.name), Hooks: base[t], OnPath: onPath[t],
			Why:      "Its chains are on the hooks, and each packet passes them.",
			Commands: []string{"# if it is a module; if it is built in, it stays until the namespace ends:", "modprobe -r " + module},
		})
	}
	if used > 0 && nft > 0 {
		out = append(out, Needless{
			Kind: LegacyBeside, What: fmt.Sprintf("%s of iptables-legacy beside %d of nftables", plural.Count(used, "rule"), nft),
			Why: "Each packet passes both. Which one decides depends on priorities that nobody chose.",
			Commands: append([]string{"# move the legacy rules to nftables, look at them, then empty the legacy tables:",
				shell.In(s.Netns.Name, "iptables-legacy-save > legacy.rules"), shell.In(s.Netns.Name, "iptables-nft-restore --noflush < legacy.rules")}, empty...),
		})
	}
	return out
}

// EmptyLegacy are commands that empty a table of iptables-legacy. A policy that drops would drop
// everything once the rules before it are gone: it goes first.
func EmptyLegacy(table string, run func(line string) string) (commands []string) {
	if table == "filter" {
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			commands = append(commands, run("iptables-legacy -P "+chain+" ACCEPT"))
		}
	}
	return append(commands, run("iptables-legacy -t "+shell.Quote(table)+" -F"))
}

// bridged is br_netfilter on a machine where no function hangs on a hook of IP that
// a bridged frame would need, or nothing is bridged.
func bridged(s *snapshot.Snapshot) []Needless {
	hooks := count(s.Hooks, func(h snapshot.Hook) bool {
		return h.Family == "bridge" && (strings.HasPrefix(h.Function, "br_nf_") || h.Function == "ip_sabotage_in")
	})
	if hooks == 0 || s.Sysctls["net.bridge.bridge-nf-call-iptables"] != "1" || s.Chains == nil {
		return nil
	}
	for _, c := range s.Chains {
		if strings.HasPrefix(c.Name, "KUBE-") || strings.HasPrefix(c.Name, "DOCKER") {
			return nil // these count on it
		}
	}
	return []Needless{{
		Kind: BridgeHooks, What: "br_netfilter: " + plural.Count(hooks, "function") + " on the bridge's hooks", Hooks: hooks,
		Why: "A bridged frame also passes the IP hooks, including tracking; a routed one does so anyway.",
		Commands: []string{"# unless rules here filter or translate bridged traffic:", shell.In(s.Netns.Name, "sysctl -w net.bridge.bridge-nf-call-iptables=0"),
			shell.In(s.Netns.Name, "sysctl -w net.bridge.bridge-nf-call-ip6tables=0")},
	}}
}

// busyTable is how many entries speak for traffic that passes.
const busyTable = 100

// tracking is connection tracking of flows that nothing translates.
func tracking(s *snapshot.Snapshot) []Needless {
	tracked := count(s.Hooks, func(h snapshot.Hook) bool {
		return strings.Contains(h.Function, "conntrack_in") || strings.Contains(h.Function, "conntrack_local")
	})
	if tracked == 0 || s.Chains == nil || s.Conntrack == nil || s.Conntrack.Table == nil {
		return nil
	}
	t := s.Conntrack.Table
	translated := min(t.Entries, max(t.ByStatus["SNAT"], t.ByStatus["DNAT"]))
	if t.Entries < busyTable || translated*10 > t.Entries {
		return nil
	}
	rules := 0
	for _, c := range s.Chains {
		for _, n := range c.NATRules {
			rules += n
		}
	}
	n := Needless{
		Kind: IdleTracking, Hooks: tracked,
		What: fmt.Sprintf("connection tracking: %d of %d entries are translated", translated, t.Entries),
		Why:  "The others cost an entry, and a lookup for each packet, which only rules on connection states need.",
		Commands: []string{"# whose flows are they? Networks without rules on connection states or NAT need no tracking: use notrack, in a chain of type filter at priority raw",
			shell.In(s.Netns.Name, "natkit conntrack top --by source")},
	}
	if rules == 0 {
		n.What += ", and no rule translates"
	}
	return []Needless{n}
}
