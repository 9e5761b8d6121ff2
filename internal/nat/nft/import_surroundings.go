// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"slices"
	"strings"

	"natkit/internal/kernel/ruleset"
)

// What NAT rules do beside deciding where packets go, and what rules of other tables do
// to packets that natkit translates.

// surroundings names it.
func (i *importer) surroundings() {
	i.sleeping()
	i.patterns()
	reached := i.reached()
	for r := range i.set.Rules {
		switch {
		case i.besideNAT(r):
		case r.Chain.Type != "nat" && !i.isNAT(r.Chain.Table) && !translates(r):
		case r.IPv6:
			if translates(r) {
				i.aside(r, true, "translates IPv6, and a rule file has IPv4 only")
			}
		case reached[r]:
			i.beside(r)
		}
	}
	i.unmet(reached)
}

// unmet names rules of which not all can be known, as a set of theirs has no elements yet or nft was asked to leave
// them out, and rules that would translate but that no packet of the walk meets.
func (i *importer) unmet(reached map[*ruleset.Rule]bool) {
	walked := chainsBehind(i.bases(true)...)
	for r := range i.set.Rules {
		if r.IPv6 || !walked[r.Chain] {
			continue
		}
		for _, s := range r.Sets() {
			if s.Empty() {
				i.lost(r, "set %s has no elements here, and is taken as empty (nft -t does not list them)", s.Name)
			}
		}
		if translates(r) && !reached[r] && !i.explained[r] {
			i.otherwise(r, "is left out: no packet meets it, as its conditions exclude each other or rules before it have all of its packets")
		}
	}
}

// sleeping names tables whose rules do nothing now, and those of which that can't be known.
func (i *importer) sleeping() {
	for _, t := range i.set.Dormant {
		i.note(Note{Line: t.Line, Rule: "table " + t.Family + " " + t.Name, Why: "is dormant: its rules do nothing now, and are left out"})
	}
	for _, t := range i.set.Tables {
		if t.UnknownFlag {
			name := t.Family + " " + t.Name
			i.note(Note{Line: t.Line, Rule: "table " + name, Lost: true,
				Why: "has a flag that this version of nft does not list rightly. Run \"nft list table " + name + "\": if it shows \"flags dormant\", the table's rules do nothing, and the rule file must not have them"})
		}
	}
}

// patterns names rules that translate for interfaces by a pattern that none with a name here fits: no packet of the
// walk meets them.
func (i *importer) patterns() {
	reached := chainsBehind(i.bases(true)...)
	for r := range i.set.Rules {
		if r.IPv6 || !reached[r.Chain] || !i.translatesBehind(r) {
			continue
		}
		for _, pattern := range linkPatterns(r) {
			if len(i.only(i.universe.Ranges(pattern))) == 0 {
				i.lost(r, "is for interfaces %s, and no interface of that name is known: name them with --inside and --outside", pattern)
			}
		}
	}
}

// translatesBehind reports whether a rule translates, or leads to one that does.
func (i *importer) translatesBehind(r *ruleset.Rule) bool {
	if translates(r) {
		return true
	}
	var chains []*ruleset.Chain
	for _, name := range leadsTo(r) {
		chains = append(chains, r.Chain.Table.Chain(name))
	}
	for c := range chainsBehind(chains...) {
		if slices.ContainsFunc(c.Rules, translates) {
			return true
		}
	}
	return false
}

// linkPatterns are the patterns by which a rule asks for interfaces, but for those that they must not have.
func linkPatterns(r *ruleset.Rule) (patterns []string) {
	add := func(fields []ruleset.Field, key ruleset.Tuple) {
		for k, f := range fields {
			if (f.Kind == ruleset.In || f.Kind == ruleset.Out) && k < len(key) && len(key[k].Name) > 1 && strings.HasSuffix(key[k].Name, "*") && !slices.Contains(patterns, key[k].Name) {
				patterns = append(patterns, key[k].Name)
			}
		}
	}
	for _, s := range r.Statements {
		switch x := s.(type) {
		case ruleset.Match:
			for _, v := range x.Values {
				if !x.Not {
					add(x.Fields, v)
				}
			}
		case ruleset.VerdictMap:
			for _, e := range x.Elements {
				add(x.Fields, e.Key)
			}
		case ruleset.Translate:
			for _, c := range x.Choices {
				add(x.Fields, c.Key)
			}
		}
	}
	return patterns
}

// reached are the rules that items come from.
func (i *importer) reached() map[*ruleset.Rule]bool {
	all := map[*ruleset.Rule]bool{}
	add := func(items []item) {
		for k := range items {
			for _, r := range items[k].rules() {
				all[r] = true
			}
			for _, n := range items[k].not {
				all[n.Rule] = true
			}
		}
	}
	add(i.destinations)
	add(i.sources)
	for _, items := range i.behind {
		add(items)
	}
	return all
}

// beside names what a rule that was taken over says beside where to.
func (i *importer) beside(r *ruleset.Rule) {
	for _, s := range r.Sets() {
		if s.Expires {
			i.aside(r, true, "set %s: its elements come and go by themselves, and are taken as they are now", s.Name)
		}
	}
	for _, statement := range r.Statements {
		t, ok := statement.(ruleset.Translate)
		if !ok {
			continue
		}
		if !r.IPv4 && t.Kind == ruleset.Masquerade {
			i.aside(r, true, "translates IPv6 too, and a rule file has IPv4 only")
		}
		for _, flag := range t.Flags {
			switch {
			case slices.Contains(randomFlags, flag):
				i.aside(r, false, "%s: the engine chooses ports in its own way, not at random for each connection", flag)
			case flag == "persistent":
				i.aside(r, false, "persistent: a host keeps its address in any case")
			}
		}
	}
}

// besideNAT names statements by which other tables take part in what NAT does, or that go
// past it.
func (i *importer) besideNAT(r *ruleset.Rule) bool {
	found := false
	for _, statement := range r.Statements {
		o, ok := statement.(ruleset.Other)
		if !ok || r.IPv6 && r.Chain.Table.Family != "inet" {
			continue
		}
		if why := besideWhy(o); why != "" {
			i.aside(r, true, "%s", why)
			found = true
		}
	}
	return found
}

func besideWhy(o ruleset.Other) string {
	name := strings.ToLower(o.Name)
	switch {
	case name == "notrack":
		return "what it is for is not tracked, and so not translated; a rule file translates it, unless an exclude names it"
	case name == "ct zone" || name == "ct" && strings.HasPrefix(o.Text, "zone"):
		return "puts connections into zones, and natkit has one table for all"
	case name == "tproxy":
		return "hands packets to a proxy on this machine (TPROXY), which a rule file does not do"
	case name == "synproxy":
		return "answers connections in place of their server (SYNPROXY), which a rule file does not do"
	case name == "tcpmss" || strings.HasPrefix(name, "tcp option maxseg"):
		return "changes TCP's maximum segment size: write mss: clamp under defaults"
	case slices.Contains([]string{"ip saddr", "ip daddr", "tcp sport", "tcp dport", "udp sport", "udp dport", "th sport", "th dport"}, name):
		return "rewrites packets without connection tracking, which only a map with stateless: true does"
	}
	return ""
}
