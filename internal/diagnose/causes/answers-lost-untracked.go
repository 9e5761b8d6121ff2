// SPDX-License-Identifier: Apache-2.0

package causes

// Packets that rules would translate, and that are kept from connection tracking.

import (
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/snapshot"
)

// judgeUntracked tells of packets that rules would translate and connection tracking is kept from.
func judgeUntracked(f facts) *verdict {
	forwarded, _ := f.counter("Ip.ForwDatagrams")
	sent, _ := f.counter("Ip.OutTransmits")
	if !f.translates() || f.Conntrack.Count > 0 || f.Conntrack.CountStart > 0 || forwarded < lostFew || sent < forwarded/2 || !f.tracks() {
		return nil
	}
	// Entries may be gone at once: of a SYN that is refused. What keeps packets out is a rule before connection tracking.
	var before []snapshot.Chain
	for _, c := range f.Chains {
		if (c.Hook == "prerouting" || c.Hook == "output") && c.Priority <= -200 && c.Rules > 0 && !f.ofEngine(c) { // of stateless maps
			before = append(before, c)
		}
	}
	if len(before) == 0 {
		return nil
	}
	v := &verdict{impact: float64(forwarded)}
	v.Severity = Critical
	v.Title = fmt.Sprintf("NAT rules exist, but none of %s was tracked and translated", number(forwarded, "forwarded packet"))
	v.Evidence = []Evidence{
		{"packets that were to be forwarded " + f.window(), strconv.FormatUint(forwarded, 10), fromSnmp + ": Ip ForwDatagrams"},
		{"conntrack entries", "0", fromSettings + ": nf_conntrack_count"},
	}
	for _, c := range f.Chains {
		if len(c.NATRules) > 0 {
			v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("chain %s of table %s %s", c.Name, c.Family, c.Table), "translates", fromRules + " (" + c.Backend + ")"})
		}
	}
	v.Why = "NAT needs a conntrack entry. A packet that a rule excludes from connection tracking (notrack, the targets NOTRACK and CT --notrack) passes every NAT rule untouched and leaves with its own source."
	v.Remedy = []string{"# find the notrack rule, and narrow it to traffic that is not translated:"}
	for _, c := range before {
		v.Remedy = append(v.Remedy, f.run(listChain(c)))
	}
	return v
}

// tracks says whether connection tracking's functions are on the hooks, as far as that is known.
func (f facts) tracks() bool {
	return f.Hooks == nil || slices.ContainsFunc(f.Hooks, func(h snapshot.Hook) bool { return h.Function == "ipv4_conntrack_in" })
}
