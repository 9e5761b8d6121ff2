// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"

	"natkit/internal/diagnose/trim"
	"natkit/internal/snapshot"
)

// busyHooks is how many packets a second must come to a machine before what each
// of them walks through without need is worth a word.
const busyHooks = 1000

var needlessHooks = Cause{
	Code:     "needless-hooks",
	Title:    "Packets pass netfilter functions that no rule needs",
	Headline: "Netfilter overhead: empty chains and unused connection tracking",
	Search: []string{
		"perf: nf_hook_slow",
		"perf: nf_conntrack_in",
		"iptables empty tables overhead",
	},
	Severities:    []Severity{Advice},
	Needs:         []string{snapshot.CanHooks, snapshot.CanNFTables, snapshot.CanIPTablesLegacy, snapshot.CanInterfaces, snapshot.CanConntrackDump},
	Symptom:       "CPUs spend more time on a packet than its rules explain. Nothing is lost.",
	Proof:         fmt.Sprintf("At least %d packets a second arrive, and there are base chains without a rule, empty tables of iptables-legacy, rules of both iptables-legacy and nftables, or connection tracking that no translation uses. It is always advice. `natkit hooks --cost` measures the cost of each.", busyHooks),
	FalsePositive: "Chains that drop by policy, whatever their number of rules: that is their purpose. A machine with few packets. Tracking may be wanted on a firewall whose rules check states; the finding lists what to look at.",
	Cure:          "Delete what is empty, use one back end instead of two, and use notrack for traffic that needs no state. Programs that manage such chains create them again.",
	judge:         judgeNeedless,
}

func judgeNeedless(f facts) *verdict {
	if f.Hooks == nil || f.Chains == nil {
		return nil
	}
	var packets uint64
	for _, l := range f.links() {
		if l.RxPackets < implausible {
			packets = saturate(packets, l.RxPackets)
		}
	}
	if f.perSecond(packets) < busyHooks {
		return nil
	}
	// Bridges have a cause of their own, and helpers by port cost new flows alone.
	// Where rules translate, flows that they pass by are tracked rightly.
	translates := slices.ContainsFunc(f.Chains, func(c snapshot.Chain) bool { return len(c.NATRules) > 0 })
	found := slices.DeleteFunc(trim.Find(f.Snapshot), func(n trim.Needless) bool {
		return n.Kind == trim.BridgeHooks || n.Kind == trim.HelperEnabled || n.Kind == trim.IdleTracking && translates
	})
	if len(found) == 0 {
		return nil
	}
	hooks := 0
	v := &verdict{}
	for _, n := range found {
		hooks += n.Hooks
	}
	v.impact = float64(hooks)
	v.Severity = Advice
	v.Title = fmt.Sprintf("each of %.0f packets a second passes up to %s that no rule needs", f.perSecond(packets), number(uint64(hooks), "function"))
	if hooks == 0 { // such as two back ends, each of which has rules
		v.Title = fmt.Sprintf("each of %.0f packets a second passes %s", f.perSecond(packets), found[0].What)
	}
	for i, n := range found {
		if i == maxNeedless {
			v.Remedy = append(v.Remedy, fmt.Sprintf("# and %d more:", len(found)-i), f.natkit("hooks --cost"))
			break
		}
		v.Evidence = append(v.Evidence, Evidence{"not needed", n.What, fromHooks})
		for _, line := range n.Commands {
			if !slices.Contains(v.Remedy, line) {
				v.Remedy = append(v.Remedy, line)
			}
		}
	}
	if f.perPacketCost() {
		v.Remedy = append(v.Remedy, f.beyondNetfilter()...)
	}
	v.Why = "The kernel calls every function on a hook for every packet, even without rules. An empty chain costs little; tracking costs an entry for each flow and a lookup for each packet."
	v.Verify = []string{f.natkit("hooks --cost")}
	return v
}

// maxNeedless is how many of them a finding spells out.
const maxNeedless = 12
