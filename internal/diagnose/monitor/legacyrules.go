// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"natkit/internal/diagnose/history"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// mostRuleChanges is how many changes of one examination are listed; of more the number is.
const mostRuleChanges = 10

// changedRules compares the rules of iptables-legacy with those of the look before: the kernel announces none of
// their changes.
func (m *monitor) changedRules(s *snapshot.Snapshot) (out []history.Change) {
	if !s.Can(snapshot.CanIPTablesLegacy) {
		return nil
	}
	now := map[string]snapshot.Chain{}
	for _, c := range s.Chains {
		if c.Backend == "iptables-legacy" {
			now[strings.Join([]string{c.Backend, c.Family, c.Table, c.Name}, " ")] = c
		}
	}
	before, known := m.legacy[s.Netns.Inode]
	m.legacy[s.Netns.Inode] = now
	if !known {
		return nil
	}
	var what []string
	for name := range maps.Keys(before) {
		if _, there := now[name]; !there {
			what = append(what, "chain removed: "+name)
		}
	}
	for name, chain := range now {
		what = append(what, chainChanges(name, before[name], chain)...)
	}
	slices.Sort(what)
	if more := len(what) - mostRuleChanges; more > 0 {
		what = append(what[:mostRuleChanges], fmt.Sprintf("%d more of iptables-legacy", more))
	}
	for _, w := range what {
		out = append(out, history.Change{At: s.TakenAt, Inode: s.Netns.Inode, Namespace: Title(s.Netns), What: w})
	}
	return out
}

// chainChanges names the rules of a chain that came and went. Of a chain that drops nothing only their number and their
// targets are known.
func chainChanges(name string, before, now snapshot.Chain) (out []string) {
	if before.Policy != now.Policy && before.Name != "" {
		out = append(out, fmt.Sprintf("policy changed: %s: %s -> %s", name, before.Policy, now.Policy))
	}
	all := func(c snapshot.Chain) bool { return len(c.Walk) == c.Rules }
	if all(before) && all(now) {
		for _, verb := range []struct {
			word     string
			of, less []snapshot.Rule
		}{{"removed", before.Walk, now.Walk}, {"added", now.Walk, before.Walk}} {
			times := map[string]int{}
			for _, r := range verb.less {
				times[r.Text]++
			}
			for _, r := range verb.of {
				if times[r.Text]--; times[r.Text] < 0 {
					out = append(out, fmt.Sprintf("rule %s: %s `%s`", verb.word, name, r.Text))
				}
			}
		}
		return out
	}
	translates := func(c snapshot.Chain) string { return fmt.Sprint(c.NATRules, c.SNATTo, c.SNATRanges, c.DNATTo) }
	switch {
	case before.Rules != now.Rules:
		out = append(out, fmt.Sprintf("rules changed: %s: %d -> %s", name, before.Rules, plural.Count(now.Rules, "rule")))
	case translates(before) != translates(now):
		out = append(out, fmt.Sprintf("rules changed: %s: other targets", name))
	}
	return out
}
