// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"natkit/internal/nat/rulefile"
)

// Stateless maps are rewriting of every packet, without connection tracking: of
// destinations before it (priority raw), which has it leave the packet alone; of
// sources when the packet leaves. What has been left alone is what was rewritten, or
// comes from a stateless internal host and leaves by an outside interface.

// stateless adds the chains and sets of the stateless maps.
func (c *compiler) stateless() {
	var rules []int
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		if !isStateless(r) || len(c.statelessSpans(i, sourceOf(r))) == 0 {
			continue
		}
		rules = append(rules, i)
		if r.In != "" || r.Out != "" {
			c.warn(r.Position, "a stateless map is not bound to interfaces: the kernel rewrites whatever goes between inside and outside")
		}
	}
	if rules == nil {
		return
	}
	c.warn(rulefile.Position{}, "in ICMP errors about packets of stateless maps that have IPv4 options, the transport checksum inside stays as it is")
	raw := filterChain("stateless_in", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	raw.Rules = append(c.trackedAnyway(), c.amongInside(leavesBy(setArmed))...)
	if c.armed { // an error about such a packet, whoever on the way to its receiver sends that
		raw.Rules = append(raw.Rules, rule(inSet(setArmed, partIn), icmpError(), inSet(setInsideHosts, partAboutSource), inSet(setInsideHosts, partAboutDest), verdictWord(expr.VerdictAccept)))
	}
	for _, set := range c.given {
		raw.Rules = append(raw.Rules, rule(inSet(setInside, partIn), inSet(set, partDest), verdictWord(expr.VerdictAccept)))
	}
	sources := c.statelessSources(rules)
	for _, set := range c.keptAddresses(rules) { // nobody's external address was asked for: the source stays
		raw.Rules = append(raw.Rules, rule(inSet(setInside, partIn), inSet(set, partDest), leavesBy(setInside), verdictWord(expr.VerdictAccept)))
	}
	for _, set := range sources {
		raw.Rules = append(raw.Rules, rule(inSet(setInside, partIn), inSet(set, partSource), leavesBy(setOutside), notrack()))
	}
	errors := c.statelessErrors(rules, sources)
	raw.Rules = append(raw.Rules, errors.in...)
	for _, r := range c.rewriting("stateless_outside", partDest, destOffset, rules,
		func(m rulefile.Map) (from, to netip.Prefix) { return m.Outside, m.Inside }, notrack()) {
		raw.Rules = append(raw.Rules, rule(inSet(setLinks, partIn), r))
	}
	c.base(raw)
	own := filterChain("stateless_own", nftables.ChainHookOutput, nftables.ChainPriorityRaw)
	own.Rules = errors.own
	c.base(own)
	post := filterChain("stateless_out", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	post.Rules = errors.out
	for _, r := range c.rewriting("stateless_inside", partSource, sourceOffset, rules,
		func(m rulefile.Map) (from, to netip.Prefix) { return m.Inside, m.Outside }, nil) {
		post.Rules = append(post.Rules, rule(untracked(), r))
	}
	c.base(post)
}

// statelessTwice refuses what only their interfaces tell apart: the kernel rewrites before it knows
// the egress interface.
func statelessTwice(f *rulefile.File) (errs []error) {
	inside, outside := map[netip.Prefix]*rulefile.Rule{}, map[netip.Prefix]*rulefile.Rule{}
	for i := range f.Rules {
		r := &f.Rules[i]
		if !isStateless(r) {
			continue
		}
		m := r.Action.(rulefile.Map)
		for _, one := range []struct {
			side   netip.Prefix
			before map[netip.Prefix]*rulefile.Rule
		}{{m.Inside, inside}, {m.Outside, outside}} {
			if first := one.before[one.side]; first != nil {
				errs = append(errs, rulefile.Problems{{File: f.Name, Position: r.Position, Message: fmt.Sprintf("the kernel's NAT binds no stateless map to interfaces, and %q has %s too: use engine ebpf, or leave out stateless: true", "map "+first.Match(), one.side)}})
			} else {
				one.before[one.side] = r
			}
		}
	}
	return errs
}

// trackedAnyway accepts what is no stateless map's: what is excluded, and what is for
// an address of rules with sessions.
func (c *compiler) trackedAnyway() []Rule {
	var rules []Rule
	if c.excludes() {
		rules = append(rules,
			rule(inSet(setExclude, partsExclude...), verdictWord(expr.VerdictAccept)),
			rule(icmpError(), inSet(setExclude, partsExcludeAbout...), verdictWord(expr.VerdictAccept)))
	}
	for _, set := range c.addresses("tracked", partDest, c.trackedSpans()) {
		rules = append(rules, rule(inSet(set, partDest), verdictWord(expr.VerdictAccept)))
	}
	return rules
}

// trackedSpans are the external addresses of rules with sessions, without those of more special
// stateless maps.
func (c *compiler) trackedSpans() (tracked []span) {
	const sessions, none = 0, 1
	var spans []span
	add := func(of int, all ...span) {
		for _, s := range all {
			spans = append(spans, span{s.first, s.last, 2*s.rank - of, of}) // of equal prefixes that with sessions
		}
	}
	for i := range c.file.Rules {
		switch a := c.file.Rules[i].Action.(type) {
		case rulefile.DNAT:
			add(sessions, span{number(a.Address), number(a.Address), 32, i})
		case rulefile.Map:
			add(sessions, c.sessionSpans(i, a.Outside)...)
			if a.Stateless {
				add(none, c.statelessSpans(i, a.Outside)...)
			}
		}
	}
	for _, piece := range flatten(spans) {
		if piece.rule == sessions {
			tracked = append(tracked, piece)
		}
	}
	return tracked
}

func (c *compiler) excludes() bool {
	return slices.ContainsFunc(c.file.Rules, func(r rulefile.Rule) bool {
		_, ok := r.Action.(rulefile.Exclude)
		return ok
	})
}

// keptAddresses are those of hosts that keep them.
func (c *compiler) keptAddresses(rules []int) []string {
	var spans []span
	for _, i := range rules {
		for _, s := range c.statelessSpans(i, c.file.Rules[i].Action.(rulefile.Map).Outside) {
			spans = append(spans, span{s.first, s.last, s.rank, i})
		}
	}
	kept := slices.DeleteFunc(flatten(spans), func(s span) bool { return !c.file.Rules[s.rule].Action.(rulefile.Map).IsIdentity() })
	return c.addresses("stateless_kept", partDest, kept)
}

func (c *compiler) statelessSources(rules []int) []string {
	var spans []span
	for _, i := range rules {
		for _, s := range c.statelessSpans(i, c.file.Rules[i].Action.(rulefile.Map).Inside) {
			spans = append(spans, span{first: s.first, last: s.last})
		}
	}
	return c.addresses("stateless", partSource, spans)
}

// addresses adds sets of all addresses of the spans, and gives their names: one of
// ranges, and one of single addresses: many load faster into a hash than into a tree.
func (c *compiler) addresses(name string, p part, spans []span) []string {
	hosts := Set{Name: name, Key: datatypes([]part{p})}
	nets := Set{Name: name + "_nets", Key: datatypes([]part{p}), Interval: true}
	for _, piece := range flatten(spans) {
		e := Element{Key: binaryutil.BigEndian.PutUint32(piece.first), End: binaryutil.BigEndian.PutUint32(piece.last), Rule: noRule}
		if piece.first == piece.last {
			hosts.Elements = append(hosts.Elements, e)
		} else {
			nets.Elements = append(nets.Elements, e)
		}
	}
	var names []string
	for _, s := range []Set{hosts, nets} {
		if s.Elements != nil {
			c.set(s)
			names = append(names, s.Name)
		}
	}
	return names
}

// rewriting gives the rules that write what the maps say over a part of each packet:
// single hosts by a map, prefixes by a chain for each.
func (c *compiler) rewriting(name string, p part, offset uint32, rules []int, sides func(rulefile.Map) (from, to netip.Prefix), then []expr.Any) []Rule {
	hosts := Set{Name: name, Key: datatypes([]part{p}), Data: []nftables.SetDatatype{nftables.TypeIPAddr}, Counter: true}
	nets := Set{Name: name + "_nets", Key: datatypes([]part{p}), Data: []nftables.SetDatatype{nftables.TypeVerdict}, Interval: true, Counter: true}
	var spans []span
	for _, i := range rules {
		from, to := sides(c.file.Rules[i].Action.(rulefile.Map))
		if singleHost(from) {
			hosts.Elements = append(hosts.Elements, Element{Key: from.Addr().AsSlice(), Value: to.Addr().AsSlice(), Rule: i})
			continue
		}
		spans = append(spans, c.statelessSpans(i, from)...)
	}
	for _, piece := range flatten(spans) {
		from, to := sides(c.file.Rules[piece.rule].Action.(rulefile.Map))
		chain := c.chain(name+"_"+from.String(), rule(rewrite(offset, to), then))
		nets.Elements = append(nets.Elements, Element{
			Key: binaryutil.BigEndian.PutUint32(piece.first), End: binaryutil.BigEndian.PutUint32(piece.last),
			Verdict: goToVerdict(chain), Rule: piece.rule,
		})
	}
	var out []Rule
	if hosts.Elements != nil {
		c.set(hosts)
		// What is written may be in a wider map, too, as it is where a map leaves its host's address.
		out = append(out, rule(mapped(hosts.Name, p), rewriteMapped(offset), then, verdictWord(expr.VerdictAccept)))
	}
	if nets.Elements != nil {
		c.set(nets)
		out = append(out, rule(verdictMapped(nets.Name, p)))
	}
	return out
}
