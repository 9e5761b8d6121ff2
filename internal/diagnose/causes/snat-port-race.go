// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"strconv"

	"natkit/internal/snapshot"
)

// raceMany is how many flows a second must fail for want of a tuple that is free
// when looked for and taken when wanted, for it to be critical.
const raceMany = 10.0

// raceSome is from how many a second on it is a warning.
const raceSome = 0.5

var snatPortRace = Cause{
	Code:     "snat-port-race",
	Title:    "Two CPUs choose the same external port, and one of the flows is dropped",
	Headline: "Connections sometimes take 1 or 3 seconds: insert_failed, SNAT port race",
	Search: []string{
		"conntrack -S: insert_failed",
		"iptables MASQUERADE --random-fully",
		"SNAT race condition insert_failed",
	},
	Severities:    []Severity{Warning, Critical},
	Needs:         []string{snapshot.CanConntrackStats, snapshot.CanConntrackDump, snapshot.CanDrops, snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "Some connections take 1 or 3 seconds longer to open, and more of them if many are opened at once to one destination. Ports are free. It mostly concerns clients that use the same source port at the same moment; the lab reproduces it this way, on Linux 6.18 too.",
	Proof:         fmt.Sprintf("At least %d flows, and one every two seconds, could not be inserted during the window (insert_failed, or dropped with an unconfirmed entry). Sources are translated, and the dump shows free ports towards every destination. From %.0f a second it is critical.", manyFailures, raceMany),
	FalsePositive: "Single failures. Exhausted ports are snat-ports-exhausted; chains that are too long have a counter of their own; DNS queries that race for one tuple are dns-race.",
	Cure:          "Choose ports at random from the start (--random-fully), which makes the same choice rare, or add external addresses.",
	judge:         judgePortRace,
}

func judgePortRace(f facts) *verdict {
	lost, rows, ok := f.raced()
	if !ok || lost < manyFailures || f.perSecond(lost) < raceSome || f.Chains != nil && !f.translatesSources() || f.Conntrack == nil || f.Conntrack.Table == nil ||
		judgeSNATPorts(f) != nil || judgeDNSRace(f) != nil {
		return nil
	}
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	if f.perSecond(lost) >= raceMany {
		v.Severity = Critical
	}
	v.Title = fmt.Sprintf("%s failed %s to get an external port, while ports are free", number(lost, "new flow"), f.window())
	v.Evidence = f.raceEvidence(lost, rows)
	if use := f.Conntrack.Table.SNATPorts; len(use) > 0 && use[0].Used < implausible {
		v.Evidence = append(v.Evidence, Evidence{"most ports in use towards one destination", fmt.Sprintf("%d, of %s towards %s %s", use[0].Used, use[0].Outside, use[0].Protocol, use[0].Dest), fromDump})
	}
	if n, _ := f.stat("found"); n > 0 {
		v.Evidence = append(v.Evidence, Evidence{"tuples already in use during the search for a free one", strconv.FormatUint(n, 10), fromStats + ": found"})
	}
	v.Why = "The kernel chooses the port with the first packet and reserves it only when that packet leaves. Two CPUs that handle new flows to one destination at the same time choose the same free port; the second entry cannot be inserted, " +
		"its packet is dropped, and the client retransmits after a second."
	v.Remedy = f.randomPorts()
	v.Verify = f.look(f.run("conntrack -S"))
	return v
}

// raced is how many new flows could not be inserted, those with chains that are
// too long left out.
func (f facts) raced() (lost uint64, rows []snapshot.Drop, known bool) {
	failed, counted := f.stat("insert_failed")
	tooLong, _ := f.stat("chaintoolong")
	traced, rows, seen := f.dropped(snapshot.CauseConfirm)
	if tooLong > 0 {
		return 0, nil, false
	}
	return max(failed, traced), rows, counted || seen
}

func (f facts) raceEvidence(lost uint64, rows []snapshot.Drop) []Evidence {
	var out []Evidence
	if failed, _ := f.stat("insert_failed"); failed > 0 {
		out = append(out, Evidence{"flows that could not be inserted", strconv.FormatUint(failed, 10), fromStats + ": insert_failed"})
	}
	if len(rows) > 0 {
		out = append(out, Evidence{"packets dropped at confirmation of their entry", strconv.FormatUint(lost, 10) + cameInBy(rows), fromTracer})
	}
	return append(out, sampleEvidence(rows)...)
}

// randomPorts is how the rules here are told to choose ports at random.
func (f facts) randomPorts() []string {
	for _, c := range f.Chains {
		if c.NATRules["masquerade"] == 0 && c.NATRules["snat"] == 0 {
			continue
		}
		if tool := iptables(c); tool != "" {
			return []string{"# add the option --random-fully to the rule that translates (iptables 1.6.2, Linux 3.14 or later), and delete the old rule:", f.run(listChain(c)),
				"# kube-proxy uses it from Kubernetes 1.16 on; for flannel and Docker see their options"}
		}
		return []string{"# add the flag fully-random to the rule that translates (masquerade fully-random, snat to ADDRESS fully-random), in place of the old rule:", f.run(listChain(c))}
	}
	return []string{"# add --random-fully (iptables) or fully-random (nft) to the rule that translates:", f.run("nft list ruleset"), f.run("iptables-save -t nat")}
}
