// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"slices"
	"strings"

	"natkit/internal/diagnose/trim"
	"natkit/internal/snapshot"
)

var iptablesTwoBackends = Cause{
	Code:     "iptables-two-backends",
	Title:    "Rules of iptables-legacy and of nftables are both in force",
	Headline: "Warning: iptables-legacy tables present, use iptables-legacy to see them",
	Search: []string{
		"# Warning: iptables-legacy tables present, use iptables-legacy to see them",
		"iptables-nft and iptables-legacy at the same time",
		"iptables rule has no effect",
	},
	Severities:    []Severity{Advice},
	Explains:      []string{"needless-hooks"},
	Needs:         []string{snapshot.CanNFTables, snapshot.CanIPTablesLegacy},
	Symptom:       "A rule seems to have no effect, or a packet is dropped although the rule list accepts it. There are two rule lists, and each program shows one.",
	Proof:         "Both back ends have rules or policies that filter or translate IPv4 on the same hook. It is always advice. What one chain drops and the other accepts is forward-policy-drop.",
	FalsePositive: "Empty tables of iptables-legacy, which a program loaded by listing them, and nftables' own tables beside iptables-nft: that is one back end.",
	Cure:          "Keep one of the two: convert with iptables-legacy-save and iptables-nft-restore, empty the legacy tables, and switch the programs that write them (update-alternatives).",
	judge:         judgeTwoBackends,
}

// hookPlace is where chains of a kind stand.
type hookPlace struct{ hook, kind string }

func (p hookPlace) String() string { return p.hook + " (" + p.kind + ")" }

func judgeTwoBackends(f facts) *verdict {
	legacy, nft := f.bySide()
	var both []string
	v := &verdict{impact: 1000} // before what is merely walked through in vain
	for p := range legacy {
		if len(nft[p]) > 0 {
			both = append(both, p.String())
		}
	}
	if len(both) == 0 {
		return nil
	}
	slices.Sort(both)
	v.Severity = Advice
	v.Title = "iptables-legacy and nftables rules are both in force on " + strings.Join(both, ", ")
	for _, side := range []map[hookPlace][]snapshot.Chain{legacy, nft} {
		var texts []string
		backend := ""
		for p, chains := range side {
			for _, c := range chains {
				if slices.Contains(both, p.String()) {
					backend = c.Backend
					texts = append(texts, fmt.Sprintf("%s %s: %s", c.Table, c.Name, number(uint64(max(c.Rules, 0)), "rule")))
				}
			}
		}
		slices.Sort(texts)
		v.Evidence = append(v.Evidence, Evidence{"chains of " + backend, strings.Join(texts[:min(len(texts), 8)], "; "), fromRules})
	}
	v.Why = "Each packet passes both, and is accepted only if both accept it. Of two NAT rules the first one wins, which depends on the priorities and, if they are equal, on which back end was loaded first."
	v.Remedy = []string{
		"# see the rules of each; iptables shows only its own:",
		f.run("iptables-legacy-save"), f.run("nft list ruleset"),
		"# convert the legacy rules, then switch the programs that write them (update-alternatives --set iptables /usr/sbin/iptables-nft) and restart these:",
		f.run("sh -c " + quote("iptables-legacy-save | iptables-nft-restore --noflush")),
	}
	v.Remedy = append(v.Remedy, f.emptyLegacy(legacy)...)
	v.Verify = f.look(f.run("iptables-legacy-save"), f.natkit("hooks"))
	return v
}

// bySide are the chains in force of IPv4, by back end and place.
func (f facts) bySide() (legacy, nft map[hookPlace][]snapshot.Chain) {
	legacy, nft = map[hookPlace][]snapshot.Chain{}, map[hookPlace][]snapshot.Chain{}
	for _, c := range f.Chains {
		if c.Hook == "" || c.Rules == 0 && c.Policy != "drop" {
			continue
		}
		kind := "filter"
		if c.Type == "nat" {
			kind = "nat"
		}
		p := hookPlace{c.Hook, kind}
		switch {
		case c.Family == "ip6": // it has tables and programs of its own
		case c.Backend == "iptables-legacy":
			legacy[p] = append(legacy[p], c)
		case c.Family == "ip" || c.Family == "inet":
			nft[p] = append(nft[p], c)
		}
	}
	return legacy, nft
}

// emptyLegacy empties the tables that legacy rules are in.
func (f facts) emptyLegacy(legacy map[hookPlace][]snapshot.Chain) (remedy []string) {
	tables := map[string]bool{}
	for _, chains := range legacy {
		for _, c := range chains {
			tables[c.Table] = true
		}
	}
	for _, table := range []string{"raw", "mangle", "nat", "filter", "security"} {
		if tables[table] {
			remedy = append(remedy, trim.EmptyLegacy(table, f.run)...)
		}
	}
	return remedy
}
