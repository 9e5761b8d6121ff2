// SPDX-License-Identifier: Apache-2.0

// Package blame finds which rule or policy dropped a packet: it follows the packet
// through the saved chains. It is pure, and where a condition can't be told from what was
// saved of the packet it says so: then several rules may have been it.
package blame

import (
	"cmp"
	"slices"
	"strings"

	"natkit/internal/snapshot"
)

// Dropper is a rule that drops, or a chain's policy.
type Dropper struct {
	Chain *snapshot.Chain
	Rule  *snapshot.Rule // nil: the policy
}

// Answer is what may have dropped a packet.
type Answer struct {
	Droppers []Dropper // one: this one did; none: nothing that is known
	Unread   bool      // there are chains that drop whose rules were not saved
}

// Follow walks the chains that a dropped packet met, as far as it came, and returns what
// may have dropped it.
func Follow(s *snapshot.Snapshot, row snapshot.Drop, dropped snapshot.DroppedPacket) Answer {
	p, ok := newPacket(s, dropped)
	if !ok {
		return Answer{Unread: true}
	}
	w := newWalker(s, p, row)
	w.follow(row)
	return Answer{Droppers: w.counted(), Unread: w.unread}
}

func newWalker(s *snapshot.Snapshot, p *packet, row snapshot.Drop) *walker {
	w := &walker{s: s, p: p, backends: backendsAt(s.Host.Kernel, row.Location), named: make(map[chainName]int, len(s.Chains))}
	for i, c := range s.Chains {
		w.named[chainName{c.Backend, c.Family, c.Table, c.Name}] = i
	}
	return w
}

// follow walks the hooks until one that the packet did not get past.
func (w *walker) follow(row snapshot.Drop) {
	for _, hook := range w.p.hooks() {
		if !w.hook(hook, row.Interface) {
			return
		}
	}
}

// backendsAt are the back ends that drop at a place: since Linux 6.8 nftables frees what it
// drops where the rule is evaluated, everybody else in nf_hook_slow.
func backendsAt(kernel, location string) (only string) {
	function, _, _ := strings.Cut(location, "+")
	switch {
	case strings.HasPrefix(function, "nft_"):
		return "nft"
	case function == "nf_hook_slow" && newer(kernel, 6, 8):
		return "iptables-legacy"
	}
	return ""
}

type chainName struct{ backend, family, table, name string }

type walker struct {
	s        *snapshot.Snapshot
	p        *packet
	backends string // "" for all
	named    map[chainName]int

	out    []Dropper
	unread bool
	jumps  int

	// Rules that accept and of whose conditions all hold but those that this is about.
	nearly    func(snapshot.Match) bool
	accepting []Dropper
}

// ends is how a packet may leave a chain. Neither: it is dropped there.
type ends struct{ returns, accepts bool }

// hook walks the base chains of a hook, and says whether the packet may get past it.
func (w *walker) hook(at hook, device string) bool {
	var chains []int
	for i, c := range w.s.Chains {
		if c.Hook == at.name && slices.Contains(at.families, c.Family) && w.p.meets(c.Family) &&
			(len(c.Devices) == 0 || slices.Contains(c.Devices, device) || slices.Contains(c.Devices, w.p.In) || slices.Contains(c.Devices, w.p.Out)) {
			chains = append(chains, i)
		}
	}
	slices.SortStableFunc(chains, w.before)
	for _, i := range chains {
		c := &w.s.Chains[i]
		if c.Walk == nil && c.Policy != "drop" && len(c.DropRules) == 0 {
			continue // nothing there drops
		}
		w.jumps = 0
		e := w.chain(i, at)
		if e.returns && c.Policy == "drop" {
			w.add(Dropper{Chain: c})
		} else if e.returns {
			e.accepts = true
		}
		if !e.accepts {
			return false
		}
	}
	return true
}

// before orders base chains of a hook as packets meet them. Of one priority the one that was registered last
// comes first (Linux net/netfilter/core.c, nf_hook_entries_grow): the hooks tell, where they were read. nftables
// lists chains as they were made; when a table of iptables-legacy was registered its rules do not tell.
func (w *walker) before(a, b int) int {
	x, y := &w.s.Chains[a], &w.s.Chains[b]
	if n := cmp.Compare(x.Priority, y.Priority); n != 0 {
		return n
	}
	if i, j := w.registered(x), w.registered(y); i >= 0 && j >= 0 && i != j {
		return cmp.Compare(i, j)
	}
	if x.Backend == "nft" && y.Backend == "nft" {
		return cmp.Compare(b, a)
	}
	return 0
}

// registered is the place of a base chain among the hooks, -1 where they do not tell.
func (w *walker) registered(c *snapshot.Chain) int {
	family := c.Family
	switch {
	case family == "ip", family == "inet" && w.p.dest.Addr().Is4():
		family = "ipv4"
	case family == "ip6", family == "inet":
		family = "ipv6"
	}
	owner := "nf_tables"
	if c.Backend == "iptables-legacy" {
		owner = "iptables"
	}
	return slices.IndexFunc(w.s.Hooks, func(h snapshot.Hook) bool {
		return h.Hook == c.Hook && h.Priority == c.Priority && h.Owner == owner && h.Chain == c.Table+"/"+c.Name && h.Family == family
	})
}

// maxJumps bounds the walk; the kernel's own limit is on the depth.
const maxJumps = 4096

// chain walks one chain.
func (w *walker) chain(i int, at hook) (e ends) {
	c := &w.s.Chains[i]
	if w.jumps++; w.jumps > maxJumps || len(c.Walk) < c.Rules {
		w.unread = true
		return ends{returns: true, accepts: true}
	}
	for n := range c.Walk {
		r := &c.Walk[n]
		holds := yes
		for _, m := range r.Matches {
			holds = min(holds, w.match(c, at, m))
		}
		if holds != yes && r.Verdict == "accept" && w.nearly != nil && w.holdsBut(c, at, r) {
			w.accepting = append(w.accepting, Dropper{c, r})
		}
		if holds == no {
			continue
		}
		for _, v := range w.verdicts(c, at, r) {
			sure := holds == yes && v.sure
			out := w.verdict(c, at, r, v)
			e.accepts = e.accepts || out.accepts
			if v.verdict == "return" || v.verdict == "goto" {
				e.returns = e.returns || out.returns
				if sure {
					return e
				}
			} else if sure && !out.returns {
				return e
			}
		}
	}
	e.returns = true
	return e
}

// holdsBut says whether all conditions of a rule hold but those that nearly is about.
func (w *walker) holdsBut(c *snapshot.Chain, at hook, r *snapshot.Rule) bool {
	some := false
	for _, m := range r.Matches {
		switch {
		case w.nearly(m):
			some = true
		case w.match(c, at, m) != yes:
			return false
		}
	}
	return some
}

// Accepting are rules that a dropped packet passed, and that would have accepted it but for
// conditions that but is about.
func Accepting(s *snapshot.Snapshot, row snapshot.Drop, dropped snapshot.DroppedPacket, but func(snapshot.Match) bool) []Dropper {
	p, ok := newPacket(s, dropped)
	if !ok {
		return nil
	}
	w := newWalker(s, p, row)
	w.nearly = but
	w.follow(row)
	return w.accepting
}

// MayMeet says whether the conditions of a rule may hold for a packet, wherever in its chain the
// rule is.
func MayMeet(s *snapshot.Snapshot, c *snapshot.Chain, r *snapshot.Rule, dropped snapshot.DroppedPacket) bool {
	p, ok := newPacket(s, dropped)
	if !ok {
		return true
	}
	w := walker{s: s, p: p}
	return p.meets(c.Family) && !slices.ContainsFunc(r.Matches, func(m snapshot.Match) bool { return w.match(c, hook{name: c.Hook}, m) == no })
}

// outcome is a verdict that a rule gives; sure: if its conditions hold, no other.
type outcome struct {
	verdict, chain string
	sure           bool
}

// verdicts are what a rule may decide about the packet.
func (w *walker) verdicts(c *snapshot.Chain, at hook, r *snapshot.Rule) []outcome {
	if r.Map == "" {
		return []outcome{{r.Verdict, r.Chain, true}}
	}
	set := w.set(c, r.Map)
	if set == nil {
		w.unread = true
		return nil
	}
	var out []outcome
	for _, e := range set.Elements {
		switch w.element(c, at, r.MapKeys, e) {
		case yes:
			return append(out, outcome{e.Verdict, e.Chain, len(out) == 0})
		case maybe:
			out = append(out, outcome{e.Verdict, e.Chain, false})
		}
	}
	if !set.Whole {
		w.unread = true
	}
	return out
}

// verdict does what a verdict says: returns is whether the chain may go on.
func (w *walker) verdict(c *snapshot.Chain, at hook, r *snapshot.Rule, v outcome) ends {
	switch v.verdict {
	case "accept", "queue":
		return ends{accepts: true}
	case "drop", "reject":
		w.add(Dropper{Chain: c, Rule: r})
		return ends{}
	case "return":
		return ends{returns: true}
	case "jump", "goto":
		if i, ok := w.named[chainName{c.Backend, c.Family, c.Table, v.chain}]; ok {
			if w.s.Chains[i].Walk == nil && len(w.s.Chains[i].DropRules) == 0 {
				return ends{returns: true, accepts: true} // nothing there drops
			}
			return w.chain(i, at)
		}
		w.unread = true
		return ends{returns: true, accepts: true}
	}
	return ends{returns: true}
}

func (w *walker) add(d Dropper) {
	if w.backends != "" && d.Chain.Backend != w.backends || slices.Contains(w.out, d) {
		return
	}
	w.out = append(w.out, d)
}

// counted leaves out what counts its packets and had none, where there are others.
func (w *walker) counted() []Dropper {
	met := slices.DeleteFunc(slices.Clone(w.out), func(d Dropper) bool {
		n := d.Packets()
		return n != nil && *n == 0
	})
	if len(met) == 0 {
		return w.out
	}
	return met
}

// Packets is how many packets met it in the window, nil where that is not counted.
func (d Dropper) Packets() *uint64 {
	if d.Rule == nil {
		return d.Chain.PolicyPackets
	}
	return d.Rule.Packets
}

// set is what a chain's rules call by this name.
func (w *walker) set(c *snapshot.Chain, name string) *snapshot.Set {
	for i := range w.s.Sets {
		s := &w.s.Sets[i]
		if s.Name == name && (s.Backend == "ipset" || s.Backend == c.Backend && s.Family == c.Family && s.Table == c.Table) {
			return s
		}
	}
	return nil
}

// Set is the set of this name that a rule of a chain asks, nil if it was not saved.
func Set(s *snapshot.Snapshot, c *snapshot.Chain, name string) *snapshot.Set {
	w := walker{s: s}
	return w.set(c, name)
}

// Elements are the elements of a set that a packet meets for sure.
func Elements(s *snapshot.Snapshot, c *snapshot.Chain, set *snapshot.Set, keys []string, dropped snapshot.DroppedPacket) (out []snapshot.Element) {
	p, ok := newPacket(s, dropped)
	if !ok {
		return nil
	}
	w := walker{s: s, p: p}
	for _, e := range set.Elements {
		if w.element(c, hook{name: c.Hook}, keys, e) == yes {
			out = append(out, e)
		}
	}
	return out
}

// Met are the elements of a set that a packet may have met, by their place.
func Met(s *snapshot.Snapshot, c *snapshot.Chain, set *snapshot.Set, keys []string, dropped snapshot.DroppedPacket) (out []int) {
	p, ok := newPacket(s, dropped)
	if !ok {
		return nil
	}
	w := walker{s: s, p: p}
	for i, e := range set.Elements {
		if w.element(c, hook{name: c.Hook}, keys, e) != no {
			out = append(out, i)
		}
	}
	return out
}

// truth is what is known of a condition.
type truth int

const (
	no truth = iota
	maybe
	yes
)

func (t truth) not() truth { return yes - t }

// match says whether a condition holds.
func (w *walker) match(c *snapshot.Chain, at hook, m snapshot.Match) truth {
	holds := maybe
	switch {
	case len(m.Keys) == 0, m.Set == "" && len(m.Values) == 0:
		return maybe
	case m.Set != "":
		if set := w.set(c, m.Set); set != nil {
			holds = w.member(c, at, m.Keys, set)
		}
	default:
		holds = no
		for _, v := range m.Values {
			holds = max(holds, w.p.compare(m.Keys[0], v, m.Mask, c, at))
		}
		if w.p.lacks(m.Keys[0]) {
			return no // there is no such field: inverted or not, the rule is about other packets
		}
	}
	if m.Not {
		return holds.not()
	}
	return holds
}

func (w *walker) member(c *snapshot.Chain, at hook, keys []string, set *snapshot.Set) truth {
	holds := no
	for _, key := range keys {
		if w.p.lacks(key) {
			return no
		}
	}
	for _, e := range set.Elements {
		in := w.element(c, at, keys, e)
		if in == yes && e.Not {
			return no
		}
		if !e.Not {
			holds = max(holds, in)
		}
	}
	if holds == no && !set.Whole {
		return maybe
	}
	return holds
}

// element says whether the packet's fields are those of an element.
func (w *walker) element(c *snapshot.Chain, at hook, keys []string, e snapshot.Element) truth {
	if len(e.Key) != len(keys) {
		return maybe
	}
	holds := yes
	for i, v := range e.Key {
		holds = min(holds, w.p.compare(keys[i], v, 0, c, at))
	}
	return holds
}
