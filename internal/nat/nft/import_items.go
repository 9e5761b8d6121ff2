// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/rulefile"
)

// item is what the input does to packets: those of box, but not those of not, nor those of
// an item before it. Nothing in it is left to chance or unknown any more.
type item struct {
	rule   *ruleset.Rule   // that decides
	turns  []*ruleset.Rule // others that decide with it: by turns, or that do the same
	box    ruleset.Box
	not    []ruleset.Except
	mark   ruleset.MarkState
	local  bool // packets for "an address of this machine"
	kind   ruleset.LeafKind
	to     ruleset.TranslateKind
	shares []share // of what is translated
	why    string  // why it can't be taken over
	dead   bool    // items before it take all of its packets
	lost   bool    // no rule was made of it
	// taken are the destinations that rules were made for, nil if all of the box.
	taken ruleset.Ranges
}

// share is where a part of the packets is translated to.
type share struct {
	weight      float64 // of all shares of an item 1 together, if no packet is left alone
	first, last uint32  // addresses; 0: the address stays
	bits        int     // of a netmap
	mode        portMode
	port        uint16 // fixed: the port; shift: that of base
	base        uint16 // shift
	ports       rulefile.PortRange
}

type portMode int

const (
	portKept portMode = iota
	portFixed
	portShifted
)

// walk turns the chains into items.
func (i *importer) walk() error {
	w := ruleset.Walker{Set: i.set, Universe: i.universe, Local: i.local, Kind: "nat"}
	mark := ruleset.MarkState{Unknown: i.marksElsewhere()}
	pre, err := w.Walk("prerouting", ruleset.Region{Mark: mark})
	if err != nil {
		return err
	}
	if i.marked, err = i.items(pre); err != nil {
		return err
	}
	i.destinations = i.marked
	if !pre.Marks { // then marks matter behind only, and packets are kept together
		aside := w
		aside.MarksAside = true
		walked, err := aside.Walk("prerouting", ruleset.Region{Mark: mark})
		if err != nil {
			return err
		}
		if i.destinations, err = i.items(walked); err != nil {
			return err
		}
	}
	post, err := w.Walk("postrouting", i.undestined(pre.Rest)...)
	if err != nil {
		return err
	}
	if i.sources, err = i.items(post); err != nil {
		return err
	}
	marked := len(post.MarkAsked) > 0
	for k := range i.marked {
		m := i.marked[k].mark
		if _, known := i.behind[m]; known {
			continue
		}
		all, err := w.Walk("postrouting", ruleset.Region{Mark: m})
		if err != nil {
			return err
		}
		if i.behind[m], err = i.items(all); err != nil {
			return err
		}
		for _, r := range post.MarkAsked {
			marked = marked && slices.Contains(all.MarkAsked, r)
		}
	}
	if marked && !mark.Unknown {
		for _, r := range post.MarkAsked {
			i.lost(r, "asks for a mark that no rule of the input sets")
		}
	}
	for _, r := range pre.MarkAsked {
		i.lost(r, "asks for a mark that no rule of the input sets")
	}
	i.dead(i.destinations, ruleset.Destination)
	i.dead(i.sources, ruleset.Source)
	return i.ownHooks(&w, mark)
}

// undestined leaves out regions of which all packets' destinations are translated.
func (i *importer) undestined(regions []ruleset.Region) []ruleset.Region {
	var out []ruleset.Region
	for _, r := range regions {
		pieces := []ruleset.Box{r.Box}
		ok := true
		for k := range i.marked {
			if ok {
				pieces, ok = minusItem(pieces, &i.marked[k])
			}
		}
		if len(pieces) > 0 {
			out = append(out, r)
		}
	}
	return out
}

// marksElsewhere reports whether chains that are not of type nat set marks, which NAT rules then see. One table
// may have both.
func (i *importer) marksElsewhere() bool {
	aside := chainsBehind(i.bases(false)...)
	for r := range i.set.Rules {
		for _, s := range r.Statements {
			if m, ok := s.(ruleset.SetMark); ok && (aside[r.Chain] || !i.isNAT(r.Chain.Table)) && (m.Unknown || m.And != 0 || m.Xor != 0) {
				return true
			}
		}
	}
	return false
}

// chainsBehind are the chains that packets get to from some chains, and these.
func chainsBehind(from ...*ruleset.Chain) map[*ruleset.Chain]bool {
	seen := map[*ruleset.Chain]bool{}
	var visit func(c *ruleset.Chain)
	visit = func(c *ruleset.Chain) {
		if c == nil || seen[c] {
			return
		}
		seen[c] = true
		for _, r := range c.Rules {
			for _, to := range leadsTo(r) {
				visit(c.Table.Chain(to))
			}
		}
	}
	for _, c := range from {
		visit(c)
	}
	return seen
}

// bases are the base chains that are of type nat, or those that are not.
func (i *importer) bases(nat bool) (out []*ruleset.Chain) {
	for _, t := range i.set.Tables {
		for _, c := range t.Chains {
			if c.Hook != "" && (c.Type == "nat") == nat {
				out = append(out, c)
			}
		}
	}
	return out
}

// leadsTo are the chains that a rule may send packets to.
func leadsTo(r *ruleset.Rule) (names []string) {
	for _, s := range r.Statements {
		switch x := s.(type) {
		case ruleset.Verdict:
			names = append(names, x.Chain)
		case ruleset.VerdictMap:
			for _, e := range x.Elements {
				names = append(names, e.Verdict.Chain)
			}
		}
	}
	return names
}

// isNAT reports whether the table has a NAT chain.
func (i *importer) isNAT(t *ruleset.Table) bool {
	return slices.ContainsFunc(t.Chains, func(c *ruleset.Chain) bool { return c.Type == "nat" })
}

// dead names rules that no packet reaches, since others take all of theirs before.
func (i *importer) dead(items []item, dim ruleset.FieldKind) {
	index := newIndex(items, dim)
	by := map[*ruleset.Rule]*item{} // nil: it is reached
	for k := range items {
		it := &items[k]
		var cover *item
		for _, e := range index.near(it.box) {
			if e < k && len(items[e].not) == 0 && items[e].box.Covers(it.box) {
				cover = &items[e]
				break
			}
		}
		it.dead = cover != nil
		if cover != nil && (cover.rule == it.rule || slices.Contains(cover.turns, it.rule)) {
			if _, seen := by[it.rule]; !seen || cover.rule != it.rule {
				by[it.rule] = nil
			}
			continue
		}
		if _, seen := by[it.rule]; !seen || cover == nil {
			by[it.rule] = cover
		}
	}
	for k := range items {
		it := &items[k]
		if cover := by[it.rule]; cover != nil {
			i.otherwise(it.rule, "%s comes first and is for all of its packets: this one is never reached, and left out", whereOf(cover.rule))
		}
	}
}

// index finds the items that may have packets of a box, by one address of theirs.
type index struct {
	dim   ruleset.FieldKind
	exact map[uint32][]int
	wide  []int
	count int
}

func newIndex(items []item, dim ruleset.FieldKind) index {
	x := index{dim: dim, exact: map[uint32][]int{}, count: len(items)}
	for k := range items {
		if r := items[k].box.Dim[dim]; len(r) == 1 && r[0].First == r[0].Last {
			x.exact[r[0].First] = append(x.exact[r[0].First], k)
		} else {
			x.wide = append(x.wide, k)
		}
	}
	return x
}

func (x index) near(b ruleset.Box) []int {
	r := b.Dim[x.dim]
	if r == nil || r.Size() > 64 {
		all := make([]int, x.count)
		for k := range all {
			all[k] = k
		}
		return all
	}
	near := slices.Clone(x.wide)
	for _, part := range r {
		for n := uint64(part.First); n <= uint64(part.Last); n++ {
			near = append(near, x.exact[uint32(n)]...)
		}
	}
	slices.Sort(near)
	return near
}

// ownHooks names what is for the gateway's own connections.
func (i *importer) ownHooks(w *ruleset.Walker, mark ruleset.MarkState) error {
	taken := map[*ruleset.Rule]bool{}
	for _, it := range i.destinations {
		taken[it.rule] = true
	}
	for hook, why := range map[string]string{
		"output": "is for the gateway's own connections only",
		"input":  "translates the sources of packets for the gateway itself (hook input), which a rule file does not do",
	} {
		walked, err := w.Walk(hook, ruleset.Region{Mark: mark})
		if err != nil {
			return err
		}
		for _, l := range walked.Leaves {
			switch {
			case l.Rule == nil:
				i.lost(i.policyRule(l.Chain), "drops what no rule accepts, which a rule file does not do")
			case !taken[l.Rule] && l.Kind == ruleset.Translated:
				i.lost(l.Rule, "%s", why)
			case !taken[l.Rule]:
				i.lost(l.Rule, "is about the gateway itself")
			}
		}
	}
	return nil
}

// policyRule stands for a chain's policy.
func (i *importer) policyRule(c *ruleset.Chain) *ruleset.Rule {
	if i.policies[c] == nil {
		i.policies[c] = &ruleset.Rule{Chain: c, Line: c.Line, Text: fmt.Sprintf("chain %s policy %s", c, c.Policy)}
	}
	return i.policies[c]
}

// items makes a list without chance of a walk's leaves.
func (i *importer) items(w *ruleset.Walked) ([]item, error) {
	for _, m := range w.Met {
		i.met(m)
	}
	var leaves []ruleset.Leaf
	for _, l := range w.Leaves {
		if l, reached := i.assume(w, l); reached {
			leaves = append(leaves, l)
		}
	}
	var out []item
	for k, l := range leaves {
		if !chancy(l) {
			out = append(out, i.splitByPorts(i.itemOf(l))...)
			continue
		}
		parts, err := i.draws(w, leaves[k:])
		if err != nil {
			return nil, err
		}
		for _, p := range parts {
			out = append(out, i.splitByPorts(p)...)
		}
	}
	return joinItems(out), nil
}

// met names statements that do more than decide.
func (i *importer) met(m ruleset.Met) {
	switch m.Other.Name {
	case "NOTRACK", "CT":
		return // named with those of other tables
	}
	i.aside(m.Rule, true, "%s: a rule file does not do that; what the rule is for goes on", m.Other.Text)
}

// assume settles what is unknown: that no such condition holds. It is said of the rules
// that it matters for.
func (i *importer) assume(w *ruleset.Walked, l ruleset.Leaf) (ruleset.Leaf, bool) {
	reached := true
	for v, r := range l.Box.Vars {
		f := w.Variables[v].Field
		if f.Kind == ruleset.Draw {
			continue
		}
		if l.Rule != nil {
			switch {
			case f.Kind == ruleset.DestinationLocal:
				i.lost(l.Rule, "is for addresses of the gateway, which the rules do not tell: name them with --local")
			case f.Kind == ruleset.Mark:
				i.lost(l.Rule, "depends on a mark that other tables set")
			case r.Contains(0):
				i.lost(l.Rule, "is for packets without %s", f.Key)
			default:
				i.lost(l.Rule, "depends on %s", f.Key)
			}
		}
		reached = reached && r.Contains(0)
		l.Box = l.Box.Without(v)
	}
	var not []ruleset.Except
	for _, n := range l.Not {
		holds := true
		for v, r := range n.Box.Vars {
			if w.Variables[v].Field.Kind == ruleset.Draw {
				continue
			}
			if n.Rule != nil {
				i.lost(n.Rule, "leaves packets out of the rules that follow by more than an exclude can name: %s", cmpKey(w.Variables[v].Field))
			}
			holds = holds && r.Contains(0)
			n.Box = n.Box.Without(v)
		}
		if holds {
			not = append(not, n)
		}
	}
	l.Not = not
	return l, reached
}

func cmpKey(f ruleset.Field) string {
	switch f.Kind {
	case ruleset.Mark:
		return "a mark that other tables set"
	case ruleset.DestinationLocal:
		return "addresses of the gateway, to be named with --local"
	}
	return f.Key
}

// chancy reports whether not all packets of a leaf's box are in it, or not always.
func chancy(l ruleset.Leaf) bool {
	return len(l.Box.Vars) > 0 || slices.ContainsFunc(l.Not, func(n ruleset.Except) bool { return len(n.Box.Vars) > 0 })
}

func (i *importer) itemOf(l ruleset.Leaf) item {
	it := item{rule: l.Rule, box: l.Box, not: l.Not, mark: l.Mark, local: l.Local, kind: l.Kind, to: l.To.Kind}
	if it.rule == nil {
		it.rule = i.policyRule(l.Chain)
	}
	switch l.Kind {
	case ruleset.Dropped:
		it.why = "drops packets, which a rule file does not do"
	case ruleset.Ended:
		it.why = l.Other.Text + ": ends the way through the rules, in a way that natkit does not know"
		switch l.Other.Name {
		case "xt":
			it.why = "is a rule of iptables: natkit import --from iptables reads it"
		case "REJECT":
			it.why = "drops packets, which a rule file does not do"
		}
	case ruleset.Translated:
		it.why = l.To.Lost
		if l.To.Kind == ruleset.Redirect {
			it.why = "sends to the gateway itself, which a rule file does not do"
		}
		it.shares = sharesOf(l.Choice, 1)
		if l.To.Kind == ruleset.DNAT && randomPort(l.To.Flags, l.Choice) {
			it.why = fmt.Sprintf("sends each connection to a port of %s at random, which a rule file does not do", it.shares[0].ports)
		}
	}
	return it
}

// randomPort reports whether the kernel draws the port of a destination. Without the flags it keeps one of the
// range, and else takes the first.
func randomPort(flags []string, c ruleset.Choice) bool {
	random := slices.ContainsFunc(flags, func(f string) bool { return slices.Contains(randomFlags, f) })
	return random && c.Base == 0 && c.Ports[0] != c.Ports[1]
}

// randomFlags are what both programs call it; Linux knows one kind for destinations.
var randomFlags = []string{"random", "random-fully", "fully-random"}

// maxTargets bounds what a range of addresses becomes as a list of targets.
const maxTargets = 256

// sharesOf a translation.
func sharesOf(c ruleset.Choice, weight float64) []share {
	s := share{weight: weight, first: c.First, last: c.Last, bits: c.Bits, ports: rulefile.PortRange{First: c.Ports[0], Last: c.Ports[1]}}
	switch {
	case c.Ports[0] == 0:
	case c.Base != 0:
		s.mode, s.port, s.base = portShifted, c.Ports[0], c.Base
	default:
		s.mode, s.port = portFixed, c.Ports[0]
	}
	return []share{s}
}

// draws makes items of the first leaf, which is taken by chance, and of those after it as
// far as they take what it leaves over.
func (i *importer) draws(w *ruleset.Walked, leaves []ruleset.Leaf) ([]item, error) {
	open, err := i.undrawn(leaves[0])
	if err != nil {
		return nil, err
	}
	var done []item
	for _, l := range leaves {
		if len(open) == 0 {
			break
		}
		drawn := l.Box.Vars
		var next []drawing
		cut := []ruleset.Box{l.Box}
		for _, n := range l.Not {
			cut = append(cut, n.Box)
		}
		for k := range cut {
			cut[k].Vars = nil
		}
		for _, c := range open {
			if _, meet := c.box.And(cut[0]); !meet {
				next = append(next, c)
				continue
			}
			for _, b := range partition(c.box, cut) {
				part := c
				part.box, part.shares = b, slices.Clone(c.shares)
				if cut[0].Covers(b) {
					part.left = part.take(i, w, l, drawn, c.left)
				}
				if len(part.left) == 0 {
					done = append(done, part.item)
				} else {
					next = append(next, part)
				}
			}
		}
		if open = next; len(open)+len(done) > maxCells {
			return nil, ruleset.ErrTooMany
		}
	}
	for _, c := range open {
		done = append(done, c.item)
	}
	return done, nil
}

const maxCells = 2048

// drawing is a set of packets of which it is not decided yet what some do.
type drawing struct {
	item
	left []ruleset.Box // of what is drawn, what is not decided yet
}

// undrawn are the packets of a leaf, whatever is drawn for them.
func (i *importer) undrawn(l ruleset.Leaf) (out []drawing, err error) {
	start := i.itemOf(l)
	var plain []ruleset.Box
	for _, n := range start.not {
		if len(n.Box.Vars) == 0 {
			plain = append(plain, n.Box)
		}
	}
	start.shares, start.kind, start.not = nil, ruleset.Translated, nil
	start.box.Vars = nil
	boxes, ok := start.box.MinusAll(plain, maxCells)
	if !ok {
		return nil, ruleset.ErrTooMany
	}
	for _, b := range boxes {
		c := drawing{item: start, left: []ruleset.Box{{}}}
		c.box = b
		out = append(out, c)
	}
	return out, nil
}

// partition cuts a box such that each part is in each of the others or has none of it.
func partition(b ruleset.Box, others []ruleset.Box) []ruleset.Box {
	parts := []ruleset.Box{b}
	for _, o := range others {
		var next []ruleset.Box
		for _, p := range parts {
			if in, meet := p.And(o); meet {
				next = append(append(next, in), p.Minus(o)...)
			} else {
				next = append(next, p)
			}
		}
		parts = next
	}
	return parts
}

// take adds the share of a leaf to an item, and gives what it leaves over.
func (it *item) take(i *importer, w *ruleset.Walked, l ruleset.Leaf, drawn map[int]ruleset.Ranges, left []ruleset.Box) []ruleset.Box {
	var not []ruleset.Box
	for _, n := range l.Not {
		plain := n.Box
		plain.Vars = nil
		if plain.Covers(it.box) {
			not = append(not, ruleset.Box{Vars: n.Box.Vars})
		}
	}
	weight := 0.0
	var rest []ruleset.Box
	for _, b := range left {
		mine, meet := b.And(ruleset.Box{Vars: drawn})
		if !meet {
			rest = append(rest, b)
			continue
		}
		rest = append(rest, b.Minus(ruleset.Box{Vars: drawn})...)
		pieces, _ := mine.MinusAll(not, maxCells)
		for _, p := range pieces {
			weight += chance(w, p)
		}
		over, _ := mine.MinusAll(pieces, maxCells)
		rest = append(rest, over...)
	}
	if weight == 0 {
		return left
	}
	one := i.itemOf(l)
	switch {
	case len(it.shares) > 0 && (one.why != "" || one.to != it.to):
		it.why = "takes turns with other rules, but they do not do the same"
	case one.why != "":
		it.why = one.why
	}
	if len(it.shares) == 0 {
		it.kind, it.to, it.rule, it.mark, it.local = one.kind, one.to, one.rule, one.mark, one.local
	} else if one.rule != it.rule && !slices.Contains(it.turns, one.rule) {
		it.turns = append(slices.Clip(it.turns), one.rule)
	}
	for _, s := range one.shares {
		s.weight *= weight
		it.shares = append(it.shares, s)
	}
	return rest
}

// chance of what is drawn.
func chance(w *ruleset.Walked, b ruleset.Box) float64 {
	p := 1.0
	for v, r := range b.Vars {
		p *= float64(r.And(ruleset.Ranges{{First: 0, Last: w.Variables[v].Field.Mod - 1}}).Size()) / float64(w.Variables[v].Field.Mod)
	}
	return p
}

// splitByPorts: a port that is in the range to which destinations are translated stays;
// any other becomes the first (Linux nf_nat_core.c, get_unique_tuple).
func (i *importer) splitByPorts(it item) []item {
	if it.kind != ruleset.Translated || it.to != ruleset.DNAT {
		return []item{it}
	}
	out := []item{it}
	for s, sh := range it.shares {
		if sh.mode != portFixed || sh.ports.First == sh.ports.Last {
			continue
		}
		in := ruleset.Box{}
		in.Dim[ruleset.DestinationPort] = ruleset.Ranges{{First: uint32(sh.ports.First), Last: uint32(sh.ports.Last)}}
		var next []item
		for _, o := range out {
			if b, meet := o.box.And(in); meet {
				kept := o
				kept.box, kept.shares = b, slices.Clone(o.shares)
				kept.shares[s].mode = portKept
				next = append(next, kept)
			}
			for _, b := range o.box.Minus(in) {
				other := o
				other.box = b
				next = append(next, other)
			}
		}
		out = next
	}
	return out
}

// joinItems makes one of items that follow each other, do the same and differ in one
// dimension only, as of two rules for TCP and UDP.
func joinItems(items []item) []item {
	var out []item
	for _, it := range items {
		for len(out) > 0 {
			joined, ok := join(out[len(out)-1], it)
			if !ok {
				break
			}
			out = out[:len(out)-1]
			it = joined
		}
		out = append(out, it)
	}
	return out
}

func join(a, b item) (item, bool) {
	if a.kind != b.kind || a.to != b.to || a.why != b.why || a.mark != b.mark || a.local != b.local || !reflect.DeepEqual(a.not, b.not) || len(a.shares) != len(b.shares) {
		return a, false
	}
	for k := range a.shares {
		x, y := a.shares[k], b.shares[k]
		if a.to != ruleset.DNAT && usual(x.ports) && usual(y.ports) {
			x.ports, x.mode, x.port = y.ports, y.mode, y.port
		}
		if x != y {
			return a, false
		}
	}
	other := -1
	for d := range a.box.Dim {
		if slices.Equal(a.box.Dim[d], b.box.Dim[d]) && (a.box.Dim[d] == nil) == (b.box.Dim[d] == nil) {
			continue
		}
		if other >= 0 || d == int(ruleset.Source) || d == int(ruleset.Destination) || d == int(ruleset.In) || d == int(ruleset.Out) {
			return a, false
		}
		other = d
	}
	if other < 0 {
		return a, true
	}
	for _, r := range a.rules() {
		if r != b.rule && !slices.Contains(b.turns, r) {
			b.turns = append(slices.Clip(b.turns), r)
		}
	}
	if a.to == ruleset.DNAT || a.kind != ruleset.Translated {
		return a, false
	}
	x, y := a.box.Dim[other], b.box.Dim[other]
	b.box = a.box
	if x == nil || y == nil {
		b.box.Dim[other] = nil
	} else {
		b.box.Dim[other] = ruleset.RangesOf(slices.Concat(x, y))
	}
	return b, true
}

// usual are the ports that are given where none are named.
func usual(r rulefile.PortRange) bool { return r.IsZero() || r == rulefile.DefaultPorts }

// whole is the chance that a packet is translated at all.
func (it *item) whole() float64 {
	all := 0.0
	for _, s := range it.shares {
		all += s.weight
	}
	return all
}

func asAddress(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
