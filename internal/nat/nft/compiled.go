// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
)

// ReadFacts asks the kernel of the namespace of h.
func ReadFacts(h *netns.Handle) (Facts, error) {
	timeouts := Ruleset{{Name: "natkit_probe", Timeouts: []Timeout{{"probe", uint8(rulefile.UDP), nil}}}}
	var facts Facts
	for _, ask := range []struct {
		probe Ruleset
		has   *bool
	}{{timeouts, &facts.TimeoutPolicies}, {probeLabels(), &facts.Labels}} {
		err := ask.probe.Try(h)
		*ask.has = err == nil
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOSPC) {
			return Facts{}, fmt.Errorf("ask the kernel what its connection tracking has: %w", err)
		}
	}
	return facts, nil
}

// RemoveRules takes the table of a compiled rule file out of the namespace of h; that it
// is not there is no error.
func RemoveRules(h *netns.Handle) error { return Ruleset{{Name: rulesTable}}.Remove(h) }

// RulesThere reports whether the table of a compiled rule file is in the namespace of h.
// Others may remove it: flushing the whole rule set is how firewalls start.
func RulesThere(h *netns.Handle) (there bool, err error) {
	err = h.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		tables, err := c.ListTablesOfFamily(nftables.TableFamilyIPv4)
		if err != nil {
			return fmt.Errorf("list nftables tables: %w", err)
		}
		there = slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == rulesTable })
		return nil
	})
	return there, err
}

// Use is how often a rule was chosen: the first packets of connections, or every packet
// of a stateless map.
type Use struct{ Packets, Bytes uint64 }

// Uses reads what the rules of a compiled rule file were used for since it was applied,
// by their index in the file. A rule that is not in it has no element of its own,
// because others have all of what it is for.
func (r Ruleset) Uses(h *netns.Handle) (map[int]Use, error) {
	uses := map[int]Use{}
	err := h.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		for _, t := range r {
			table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: t.Name}
			for _, s := range t.Sets {
				if !s.Counter {
					continue
				}
				rules := make(map[string]int, len(s.Elements))
				for _, e := range s.Elements {
					rules[string(e.Key)] = e.Rule
				}
				elements, err := c.GetSetElements(&nftables.Set{Table: table, Name: s.Name})
				if err != nil {
					return fmt.Errorf("read set %s of table %s: %w", s.Name, t.Name, err)
				}
				for _, e := range elements {
					rule, ok := rules[string(e.Key)]
					if !ok || rule == noRule || e.IntervalEnd {
						continue
					}
					u := uses[rule]
					if e.Counter != nil {
						u.Packets += e.Counter.Packets
						u.Bytes += e.Counter.Bytes
					}
					uses[rule] = u
				}
			}
		}
		return nil
	})
	return uses, err
}
