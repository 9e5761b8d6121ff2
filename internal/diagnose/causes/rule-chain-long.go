// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

const (
	// longRuleChain is the number of rules in one chain from which going through
	// them is worth a word, and busyRules how many packets a second must come in.
	longRuleChain = 1000
	busyRules     = 1000
)

var ruleChainLong = Cause{
	Code:     "rule-chain-long",
	Title:    "A chain has so many rules that traversing it costs CPU time",
	Headline: "Too many iptables rules slow down packets: nft_do_chain, ipt_do_table in perf",
	Search: []string{
		"perf: nft_do_chain",
		"perf: ipt_do_table",
		"thousands of iptables rules slow",
	},
	Severities: []Severity{Advice},
	Needs:      []string{snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces},
	Symptom:    "Nothing breaks. The packet rate falls as rules are added. CPUs are busy in nft_do_chain or ipt_do_table.",
	Proof: fmt.Sprintf("A chain has at least %d rules, while at least %d packets a second arrive. natkit does not check whether a packet reaches it. It is always advice.",
		longRuleChain, busyRules),
	FalsePositive: "Many rules in many chains of which a packet meets few (Kubernetes has one chain for each service), sets and maps, which cost one lookup however large, and a quiet machine.",
	Cure:          "Use one rule with a set or map in place of many, and put the rule that accepts established connections first. `natkit bench rules` measures the gain here.",
	judge:         judgeRuleChain,
}

func judgeRuleChain(f facts) *verdict {
	var packets uint64
	for _, l := range f.links() {
		if l.RxPackets < implausible {
			packets = saturate(packets, l.RxPackets)
		}
	}
	if f.perSecond(packets) < busyRules {
		return nil
	}
	var longest snapshot.Chain
	var long []snapshot.Chain
	for _, c := range f.Chains {
		if c.Rules < longRuleChain || c.Family == "arp" {
			continue
		}
		long = append(long, c)
		if c.Rules > longest.Rules {
			longest = c
		}
	}
	if len(long) == 0 {
		return nil
	}
	v := &verdict{impact: float64(longest.Rules)}
	v.Severity = Advice
	first := longest.Type == "nat" || longest.Type == "" && longest.Table == "nat"
	who := "each packet"
	if first {
		who = "each new connection"
	}
	v.Title = fmt.Sprintf("chain %s (%s %s) has %s, evaluated one by one for %s", longest.Name, longest.Family, longest.Table, plural.Count(longest.Rules, "rule"), who)
	for _, c := range long[:min(len(long), 5)] {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("rules of chain %s, table %s %s", c.Name, c.Family, c.Table), strconv.Itoa(c.Rules), fromRules + " (" + c.Backend + ")"})
	}
	v.Evidence = append(v.Evidence, Evidence{"packets received", fmt.Sprintf("%.0f a second", f.perSecond(packets)), fromLinks})
	v.Why = "A packet is compared with one rule after the other until one decides. The time is proportional to the number of rules before that one; a set or map needs one lookup."
	v.Remedy = []string{"# see what they have in common; rules that differ only in addresses or ports become one rule with a set (nft) or ipset (iptables):", f.run(listChain(longest))}
	if !first {
		v.Remedy = append(v.Remedy, "# and put a rule before them that accepts known connections: ct state established,related accept")
	}
	v.Remedy = append(v.Remedy, "# what that saves on this machine:", "natkit bench rules")
	if f.perPacketCost() {
		v.Remedy = append(v.Remedy, f.beyondNetfilter()...)
	}
	v.Verify = []string{"natkit profile --for 10s"}
	return v
}
