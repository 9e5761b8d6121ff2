// SPDX-License-Identifier: Apache-2.0

package causes

// Rules that drop, or no longer accept, because of what was before: limits, quotas, numbers of connections.

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"natkit/internal/diagnose/blame"
	"natkit/internal/snapshot"
)

// limits says whether a condition that can't be told from a packet is a limit of some kind. Older files have
// "{ ... }" for that of a set's elements.
func limits(text string) bool {
	return slices.ContainsFunc([]string{"limit", "quota", "ct count", "connlimit", "recent --rcheck", "recent --update", "connbytes", "{ ... }"},
		func(word string) bool { return strings.Contains(text, word) })
}

// limit is the condition of a rule that is one, "" if it has none.
func limit(r *snapshot.Rule) string {
	if r == nil {
		return ""
	}
	for _, m := range r.Matches {
		if len(m.Keys) == 0 && limits(m.Text) {
			return m.Text
		}
	}
	return ""
}

// exceeded is a limit that dropped packets were over.
type exceeded struct {
	text string
	// by is the rule that accepts within it; nil: the one that dropped has the limit itself.
	by *blame.Dropper
}

// exceeded is the limit for which c dropped a packet.
func (f facts) exceeded(c culprit) (exceeded, bool) {
	if text := limit(c.Rule); text != "" {
		return exceeded{text: text}, true
	}
	if c.sample.Text == "" {
		return exceeded{}, false
	}
	for _, d := range f.accepting(c) {
		if text := limit(d.Rule); text != "" {
			return exceeded{text, &d}, true
		}
	}
	return exceeded{}, false
}

// accepting are rules that would have accepted a packet but for one condition: a limit, or an interface
// that is not there.
func (f facts) accepting(c culprit) []blame.Dropper {
	return blame.Accepting(f.Snapshot, c.row, c.sample, func(m snapshot.Match) bool {
		_, missing := f.noInterface(m)
		return missing || len(m.Keys) == 0 && limits(m.Text)
	})
}

// overTitle says in a title with that much text what was exceeded.
func (e exceeded) overTitle(title string) string {
	if text := fmt.Sprintf(": over `%s`", e.text); utf8.RuneCountInString(title+text) <= titleMost {
		return text
	}
	return ": over a limit"
}

// raise is what to do about a limit in a rule that accepts: nothing else is opened.
func (f facts) raise(e exceeded) []string {
	a := culprit{Dropper: *e.by}
	return []string{fmt.Sprintf("# %s accepts this traffic within `%s` only. If more is wanted, raise that limit; show the rule:", a.place(), e.text), f.run(listChain(*a.Chain))}
}

// begins says whether a sampled packet begins a connection of TCP.
func begins(sample string) bool {
	fields := strings.Fields(sample)
	return len(fields) >= 5 && fields[0] == "tcp" && strings.HasPrefix(fields[4], "SYN") && !strings.Contains(fields[4], "ACK")
}

// beginnings are how many of dropped packets begin connections, as far as samples tell.
func beginnings(rows []snapshot.Drop) (n uint64) {
	for _, row := range rows {
		for _, p := range row.Packets {
			if begins(p.Text) {
				n = saturate(n, p.Stands)
			}
		}
	}
	return n
}

// refusesConnections says whether clients can't open connections for a limit: they notice that, however small
// a part of all packets it is.
func (f facts) refusesConnections(victims ruleVictims) bool {
	suspects, sure := f.droppingRules(victims)
	if !sure || beginnings(victims.rows) < ruleFew {
		return false
	}
	_, over := f.exceeded(suspects[0])
	return over
}

// maxSenders is how many of them a finding names.
const maxSenders = 3

// overBy names who sent what was over a limit, most first.
func (f facts) overBy(rows []snapshot.Drop) []Evidence {
	counts := map[netip.Addr]uint64{}
	for _, row := range rows {
		for _, p := range row.Packets {
			if t, ok := f.asSent(p.Text); ok {
				counts[t.source.Addr()] = saturate(counts[t.source.Addr()], p.Stands)
			}
		}
	}
	senders := make([]netip.Addr, 0, len(counts))
	for a := range counts {
		senders = append(senders, a)
	}
	slices.SortFunc(senders, func(a, b netip.Addr) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), a.Compare(b)) })
	var names []string
	for _, a := range senders[:min(len(senders), maxSenders)] {
		name := fmt.Sprintf("%s (%s", a, number(counts[a], "packet"))
		if f.Conntrack != nil && f.Conntrack.Table != nil {
			for _, t := range f.Conntrack.Table.Sources {
				if t.Addr == a && t.Entries < implausible {
					name += fmt.Sprintf("; %s in the table", number(t.Entries, "connection"))
				}
			}
		}
		names = append(names, name+")")
	}
	if len(names) == 0 {
		return nil
	}
	if more := len(senders) - maxSenders; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return []Evidence{{"senders over the limit", strings.Join(names, ", "), fromTracer}}
}
