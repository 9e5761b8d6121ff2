// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"

	"natkit/internal/nat/rulefile"
)

// What was read need not fit together in a rule file: there each external address is given
// by one rule or pool, where the kernel's rules may name it as often as they like. What
// does not fit is left out and said, so that both engines take the file.

// settle makes the rules such as fit together, the earlier before the later.
func (i *importer) settle() {
	i.carve()
	for range maxRounds {
		i.dropIdlePools()
		wrong := i.misfits()
		if len(wrong) == 0 {
			return
		}
		var rules []rulefile.Rule
		var origins []*item
		for k, r := range i.file.Rules {
			if why, ok := wrong[k]; ok {
				i.lost(i.origins[k].rule, "left out: %s", why)
				continue
			}
			rules, origins = append(rules, r), append(origins, i.origins[k])
		}
		i.file.Rules, i.origins = rules, origins
	}
	i.note(Note{Why: "too many rules do not fit together: the rule file will be refused", Lost: true})
}

// maxRounds bounds the looking for what does not fit: of each round the first hundred
// problems are reported.
const maxRounds = 100

// carve takes addresses out of pools that another rule gives on its own: by snat to the
// one address, or as that of the gateway which is masqueraded behind.
func (i *importer) carve() {
	taken := map[netip.Addr]string{}
	for k, r := range i.file.Rules {
		switch a := r.Action.(type) {
		case rulefile.SNAT:
			if a.Pool == "" {
				taken[a.Address] = whereOf(i.origins[k].rule)
			}
		case rulefile.Masquerade:
			for _, local := range i.options.Local {
				taken[local] = whereOf(i.origins[k].rule)
			}
		}
	}
	for p := range i.file.Pools {
		pool := &i.file.Pools[p]
		for _, a := range sortedAddresses(taken) {
			cut := without(pool.Addresses, a)
			if slices.Equal(cut, pool.Addresses) {
				continue
			}
			pool.Addresses = cut
			for k, r := range i.file.Rules {
				if s, ok := r.Action.(rulefile.SNAT); ok && s.Pool == pool.Name {
					i.otherwise(i.origins[k].rule, "%s is not in the pool: %s gives that address on its own", a, taken[a])
				}
			}
		}
	}
}

func sortedAddresses(m map[netip.Addr]string) []netip.Addr {
	all := make([]netip.Addr, 0, len(m))
	for a := range m {
		all = append(all, a)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// without is the ranges without one address.
func without(ranges []rulefile.AddressRange, a netip.Addr) []rulefile.AddressRange {
	var out []rulefile.AddressRange
	for _, r := range ranges {
		if a.Less(r.First) || r.Last.Less(a) {
			out = append(out, r)
			continue
		}
		if r.First.Less(a) {
			out = append(out, rulefile.AddressRange{First: r.First, Last: a.Prev()})
		}
		if a.Less(r.Last) {
			out = append(out, rulefile.AddressRange{First: a.Next(), Last: r.Last})
		}
	}
	return out
}

// dropIdlePools removes pools that no rule uses, and notes with the others which rule is
// the first that does.
func (i *importer) dropIdlePools() {
	user := map[string]int{}
	for k, r := range i.file.Rules {
		if a, ok := r.Action.(rulefile.SNAT); ok && a.Pool != "" {
			if _, known := user[a.Pool]; !known {
				user[a.Pool] = k
			}
		}
	}
	i.file.Pools = slices.DeleteFunc(i.file.Pools, func(p rulefile.Pool) bool {
		_, used := user[p.Name]
		return !used
	})
	for p := range i.file.Pools {
		i.file.Pools[p].Position = ruleAt(user[i.file.Pools[p].Name])
	}
}

// ruleAt is a position that has the index of a rule; no other problem is in this column.
func ruleAt(k int) rulefile.Position { return rulefile.Position{Line: k + 1, Column: ruleColumn} }

const ruleColumn = 2

var inLine = regexp.MustCompile(` in line (\d+)`)

// misfits are the rules that can't stay, by index, and why.
func (i *importer) misfits() map[int]string {
	wrong := map[int]string{}
	for k := range i.file.Rules {
		i.file.Rules[k].Position = ruleAt(k)
		if a, ok := i.file.Rules[k].Action.(rulefile.SNAT); ok && a.Pool != "" {
			if p := i.file.Pool(a.Pool); p != nil && len(p.Addresses) == 0 {
				wrong[k] = "other rules give all of its addresses"
			}
		}
	}
	if len(wrong) > 0 {
		return wrong
	}
	i.givenBehindMasquerade(wrong)
	var problems rulefile.Problems
	errors.As(i.file.Validate(), &problems)
	for _, p := range problems {
		if p.Column != ruleColumn || p.Line < 1 || p.Line > len(i.file.Rules) {
			if p.Line == 0 {
				i.note(Note{Why: p.Message, Lost: true})
			}
			continue
		}
		k := p.Line - 1
		if _, told := wrong[k]; !told {
			wrong[k] = inLine.ReplaceAllStringFunc(p.Message, func(text string) string {
				n, err := strconv.Atoi(inLine.FindStringSubmatch(text)[1])
				if err != nil || n > len(i.origins) {
					return ""
				}
				return " (" + whereOf(i.origins[n-1].rule) + ")"
			})
		}
	}
	for k := range i.file.Rules {
		i.file.Rules[k].Position = rulefile.Position{}
	}
	for p := range i.file.Pools {
		i.file.Pools[p].Position = rulefile.Position{}
	}
	return wrong
}

// givenBehindMasquerade: rules that give ports of one address of the gateway give the same
// ones, whether it is named or masqueraded behind.
func (i *importer) givenBehindMasquerade(wrong map[int]string) {
	first, ports := -1, rulefile.PortRange{}
	for k, r := range i.file.Rules {
		var gives rulefile.PortRange
		switch a := r.Action.(type) {
		case rulefile.Masquerade:
			gives = a.Ports
		case rulefile.SNAT:
			if a.Pool != "" || !slices.Contains(i.options.Local, a.Address) {
				continue
			}
			gives = a.Ports
		default:
			continue
		}
		switch {
		case first < 0:
			first, ports = k, gives
		case gives != ports:
			wrong[k] = fmt.Sprintf("%s gives other ports of the gateway's address", whereOf(i.origins[first].rule))
		}
	}
}
