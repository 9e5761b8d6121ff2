// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"natkit/internal/nat/rulefile"
)

// Source rules: by the interfaces they are bound to, ingress and egress interface, egress interface, ingress
// in, none; for each the host, then the longest prefix. A rule that is not bound to a
// egress interface is for the outside interfaces.
//
// Where a file has one outside interface, to be bound to it is nothing special, and
// names of interfaces out are left out of the keys.

// origin is a set of bindings that are asked together.
type origin struct {
	name    string
	in, out bool // the key has the interface
}

// sources makes the chains "source" and, for whatever egress interface, "source_anywhere".
func (c *compiler) sources(destinations bool) error {
	f := c.file
	for i := range f.Rules {
		out := f.Rules[i].Out
		if c.isSource(i) && out != "" && (len(f.Outside) > 1 || out != f.Outside[0]) {
			c.bound = true
		}
	}
	source := Chain{Name: "source"}
	c.anywhere = Chain{Name: "source_anywhere"}
	hairpin := Chain{Name: "hairpin"}
	for _, in := range []bool{true, false} {
		if c.bound {
			if err := c.origins(&source, origin{"sources" + suffix(in, true), in, true}, func(r *rulefile.Rule) bool { return r.Out != "" && (r.In != "") == in }); err != nil {
				return err
			}
			if !destinations {
				continue
			}
			if err := c.origins(&hairpin, origin{"hairpin" + suffix(in, false), in, false}, func(r *rulefile.Rule) bool {
				return r.Out == f.Outside[0] && (r.In != "") == in
			}); err != nil {
				return err
			}
		} else if err := c.origins(&c.anywhere, origin{"sources" + suffix(in, true), in, false}, func(r *rulefile.Rule) bool { return r.Out != "" && (r.In != "") == in }); err != nil {
			return err
		}
	}
	for _, in := range []bool{true, false} {
		if err := c.origins(&c.anywhere, origin{"sources" + suffix(in, false), in, false}, func(r *rulefile.Rule) bool { return r.Out == "" && (r.In != "") == in }); err != nil {
			return err
		}
	}
	if len(c.anywhere.Rules) > 0 {
		c.table.Chains = append(c.table.Chains, c.anywhere)
		source.Rules = append(source.Rules, rule(inSet(setOutside, partOut), jumpTo(c.anywhere.Name)))
		if len(hairpin.Rules) > 0 {
			hairpin.Rules = append(hairpin.Rules, rule(jumpTo(c.anywhere.Name)))
		}
	}
	for _, ch := range []Chain{source, hairpin} {
		if len(ch.Rules) > 0 {
			c.chains[ch.Name] = true
			c.table.Chains = append(c.table.Chains, ch)
		}
	}
	if c.bound && destinations && len(f.Outside) > 1 {
		c.warn(rulefile.Position{}, "an internal host that addresses an external address is seen by what the rules give it towards %q, the first outside interface, whichever the address belongs to", f.Outside[0])
	}
	return nil
}

func suffix(in, out bool) string {
	switch {
	case in && out:
		return "_in_out"
	case in:
		return "_in"
	case out:
		return "_out"
	}
	return ""
}

func isSource(r *rulefile.Rule) bool {
	switch a := r.Action.(type) {
	case rulefile.Masquerade, rulefile.SNAT:
		return true
	case rulefile.Map:
		return !a.Stateless
	}
	return false
}

// isSource reports whether a rule translates the sources of sessions: a stateless map may do so
// for some of its hosts.
func (c *compiler) isSource(index int) bool {
	return isSource(&c.file.Rules[index]) || c.tracked[index] != nil
}

// sourceSpans are those sources.
func (c *compiler) sourceSpans(index int) []span {
	r := &c.file.Rules[index]
	switch a := r.Action.(type) {
	case rulefile.Masquerade, rulefile.SNAT:
		from := sourceOf(r)
		all := rulefile.RangeOf(from)
		return []span{{number(all.First), number(all.Last), from.Bits(), index}}
	case rulefile.Map:
		return c.sessionSpans(index, a.Inside)
	}
	return nil
}

// origins adds to a chain the questions for the source rules that belong to an origin.
func (c *compiler) origins(ch *Chain, o origin, belongs func(*rulefile.Rule) bool) error {
	var parts []part
	if o.in {
		parts = append(parts, partIn)
	}
	if o.out {
		parts = append(parts, partOut)
	}
	parts = append(parts, partSource)
	hosts := &step{name: o.name, kind: expr.NATTypeSourceNAT, parts: parts}
	nets := &step{name: o.name + "_nets", kind: expr.NATTypeSourceNAT, parts: parts, interval: true}
	links := func(r *rulefile.Rule) []byte {
		var k []byte
		if o.in {
			k = append(k, keyLink(r.In)...)
		}
		if o.out {
			k = append(k, keyLink(r.Out)...)
		}
		return k
	}
	prefixes := map[string][]span{} // by interfaces
	for i := range c.file.Rules {
		r := &c.file.Rules[i]
		if !c.isSource(i) || !belongs(r) {
			continue
		}
		from := sourceOf(r)
		if !singleHost(from) {
			bound := string(links(r))
			prefixes[bound] = append(prefixes[bound], c.sourceSpans(i)...)
			continue
		}
		e, err := c.hide(i)
		if err != nil {
			return err
		}
		e.Key = append(links(r), from.Addr().AsSlice()...)
		hosts.add(e)
	}
	for _, b := range slices.Sorted(maps.Keys(prefixes)) {
		for _, p := range flatten(prefixes[b]) {
			e, err := c.hide(p.rule)
			if err != nil {
				return err
			}
			e.Key = append([]byte(b), binaryutil.BigEndian.PutUint32(p.first)...)
			e.End = append([]byte(b), binaryutil.BigEndian.PutUint32(p.last)...)
			nets.add(e)
		}
	}
	c.emit(ch, hosts)
	c.emit(ch, nets)
	return nil
}

func sourceOf(r *rulefile.Rule) netip.Prefix {
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		return a.Source
	case rulefile.SNAT:
		return a.Source
	}
	return r.Action.(rulefile.Map).Inside
}

// hide leads to what a source rule makes of a source.
func (c *compiler) hide(index int) (Element, error) {
	r := &c.file.Rules[index]
	e := Element{Rule: index}
	switch a := r.Action.(type) {
	case rulefile.Masquerade:
		e.Verdict = goToVerdict(c.masquerade(a.Ports))
	case rulefile.Map:
		if a.IsIdentity() {
			e.Verdict = acceptVerdict()
			return e, nil
		}
		if singleHost(a.Outside) {
			e.Value = a.Outside.Addr().AsSlice()
			return e, nil
		}
		e.Verdict = goToVerdict(c.chain("from_"+a.Outside.String(), rule(translatePrefix(expr.NATTypeSourceNAT, a.Outside))))
	case rulefile.SNAT:
		switch {
		case a.Pool != "":
			p := c.file.Pool(a.Pool)
			if p == nil || len(p.Addresses) == 0 {
				return e, fmt.Errorf("compile rule %q: no pool %q", r.Match(), a.Pool)
			}
			e.Verdict = goToVerdict(c.pool(p))
		case a.Ports.IsZero():
			e.Value = a.Address.AsSlice()
		default:
			name := fmt.Sprintf("snat_%s_%s", a.Address, a.Ports)
			e.Verdict = goToVerdict(c.chain(name, withPorts(a.Ports, func(p rulefile.PortRange) []expr.Any {
				return snatRange(rulefile.AddressRange{First: a.Address, Last: a.Address}, p)
			})...))
		}
	}
	return e, nil
}

// masquerade hides behind the egress interface's address, and on a hairpin, which has none,
// behind the address that was asked for.
func (c *compiler) masquerade(ports rulefile.PortRange) string {
	name := "masquerade"
	if !ports.IsZero() {
		name += "_" + ports.String()
	}
	var rules []Rule
	for _, within := range c.hairpin() {
		rules = append(rules, withPorts(ports, func(ports rulefile.PortRange) []expr.Any {
			return slices.Concat(within, snatToAddressed(ports))
		})...)
	}
	return c.chain(name, append(rules, withPorts(ports, masqueradePorts)...)...)
}

// hairpin are the conditions, each by itself, of what a destination rule has sent from inside to an
// internal host. By an interface of both sides its address tells who is one.
func (c *compiler) hairpin() [][]expr.Any {
	to := func(receiver ...[]expr.Any) []expr.Any {
		return slices.Concat(inSet(setInside, partIn), slices.Concat(receiver...), destTranslated())
	}
	if !c.armed {
		return [][]expr.Any{to(inSet(setInside, partOut))}
	}
	all := [][]expr.Any{to(inSet(setArmed, partOut), inSet(setInsideHosts, partDest))}
	if len(c.beside) > 0 {
		all = append(all, to(inSet(setInsideOnly, partOut)))
	}
	return all
}

// withPorts is several rules where ports are given: protocols without ports have none, and
// of queries they are the identifiers.
func withPorts(ports rulefile.PortRange, to func(rulefile.PortRange) []expr.Any) []Rule {
	var rules []Rule
	if !ports.IsZero() {
		for _, p := range []rulefile.Protocol{rulefile.TCP, rulefile.UDP, rulefile.UDPLite, rulefile.ICMP} {
			rules = append(rules, rule(protocol(uint8(p)), to(ports)))
		}
	}
	return append(rules, rule(to(rulefile.PortRange{})))
}

// pool hides behind a pool: a host behind the same address for as long as the pool is
// the same. Where the pool is several ranges, the host's hash chooses one, by their
// numbers of addresses.
func (c *compiler) pool(p *rulefile.Pool) string {
	name := "pool_" + p.Name
	if c.chains[name] {
		return name
	}
	ports := p.Ports
	if p.OneToOne {
		ports = rulefile.PortRange{}
		c.warn(p.Position, "pool %q: hosts do not have an address of their own, two may share one: the kernel chooses by the host's hash", p.Name)
	}
	to := func(r rulefile.AddressRange) []Rule {
		return withPorts(ports, func(ports rulefile.PortRange) []expr.Any { return snatRange(r, ports) })
	}
	if len(p.Addresses) == 1 {
		return c.chain(name, to(p.Addresses[0])...)
	}
	ranges := Set{
		Name: name, Key: []nftables.SetDatatype{nftables.TypeMark}, Data: []nftables.SetDatatype{nftables.TypeVerdict},
	}
	slots := spreadRanges(p.Addresses)
	for i, r := range p.Addresses {
		c.chain(rangeOf(name, i), to(r)...)
	}
	for slot, i := range slots {
		ranges.Elements = append(ranges.Elements, Element{
			Key:     binaryutil.NativeEndian.PutUint32(uint32(slot)),
			Verdict: goToVerdict(rangeOf(name, i)), Rule: noRule,
		})
	}
	c.set(ranges)
	return c.chain(name, rule(hashOfSource(len(slots)),
		[]expr.Any{&expr.Lookup{SourceRegister: register0, IsDestRegSet: true, SetName: name}}))
}

// rangeOf is the chain of a range of a pool. No pool has a slash in its name.
func rangeOf(pool string, i int) string { return fmt.Sprintf("%s/%d", pool, i) }

// spreadRanges gives each range slots by its share of the addresses, at least one.
func spreadRanges(ranges []rulefile.AddressRange) []int {
	total := 0
	for _, r := range ranges {
		total += r.Count()
	}
	const most = 1021
	slots := min(max(total, len(ranges)), max(most, len(ranges)))
	table := make([]int, 0, slots)
	for i, r := range ranges {
		for range max(1, r.Count()*slots/total) {
			table = append(table, i)
		}
	}
	return table
}

// postrouting says whose sources are translated: what internal hosts send out, and what
// a destination rule has translated.
func (c *compiler) postrouting(excluded []Rule, destinations bool) Chain {
	ch := Chain{Name: "postrouting", Base: postroutingNAT()}
	if !c.chains["source"] {
		return ch
	}
	ch.Rules = slices.Concat(excluded, c.amongInside(inSet(setArmed, partOut), destNotTranslated()))
	hairpin := "hairpin"
	if !c.chains[hairpin] {
		hairpin = c.anywhere.Name
	}
	for _, within := range c.hairpin() {
		switch {
		case !destinations:
		case c.chains["hairpin"] || len(c.anywhere.Rules) > 0:
			ch.Rules = append(ch.Rules, rule(within, goTo(hairpin)))
		case c.towardsInside():
			ch.Rules = append(ch.Rules, rule(within, accept())) // rules of the egress interface itself are not for them
		}
	}
	ch.Rules = append(ch.Rules, rule(inSet(setInside, partIn), goTo("source")))
	if destinations {
		ch.Rules = append(ch.Rules, rule(inSet(setOutside, partIn), destTranslated(), goTo("source")))
	}
	return ch
}

// towardsInside reports whether some source rule is bound to an egress interface that is inside.
func (c *compiler) towardsInside() bool {
	for i := range c.file.Rules {
		if c.isSource(i) && c.file.IsInside(c.file.Rules[i].Out) {
			return true
		}
	}
	return false
}
