// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Walk sends all packets at once through the chains of a hook. What comes of it is a
// list of leaves: of those that a packet is in, the first decides.

// Universe numbers the interfaces: those that are named, in this order, and one number
// for all others.
type Universe []string

// Index of an interface.
func (u Universe) Index(name string) uint32 {
	if k := slices.Index(u, name); k >= 0 {
		return uint32(k)
	}
	return uint32(len(u))
}

// Ranges of the interfaces of that name or pattern.
func (u Universe) Ranges(name string) Ranges {
	base, pattern := strings.CutSuffix(name, "*")
	if !pattern {
		k := u.Index(name)
		return Ranges{{k, k}}
	}
	if base == "" {
		return nil
	}
	list := []Range{}
	for k, n := range u {
		if strings.HasPrefix(n, base) {
			list = append(list, Range{uint32(k), uint32(k)})
		}
	}
	return RangesOf(list)
}

// Links are the names of interfaces that rules ask for, patterns not among them.
func (s *Ruleset) Links() []string {
	var names []string
	add := func(fields []Field, key Tuple) {
		for k, f := range fields {
			if (f.Kind == In || f.Kind == Out) && k < len(key) && key[k].Name != "" && !strings.HasSuffix(key[k].Name, "*") {
				names = append(names, key[k].Name)
			}
		}
	}
	for r := range s.Rules {
		for _, statement := range r.Statements {
			switch x := statement.(type) {
			case Match:
				for _, v := range x.Values {
					add(x.Fields, v)
				}
			case VerdictMap:
				for _, e := range x.Elements {
					add(x.Fields, e.Key)
				}
			case Translate:
				for _, c := range x.Choices {
					add(x.Fields, c.Key)
				}
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// MarkState is what is known of a packet's mark.
type MarkState struct {
	Value   uint32
	Unknown bool
}

// LeafKind is what ends a packet's way.
type LeafKind int

// Kinds of leaves.
const (
	Translated LeafKind = iota
	Dropped
	Ended // by a statement that is not evaluated
)

// Leaf is packets of a box, but not those of Not, and what is done with them. Of several
// leaves the first decides.
type Leaf struct {
	Rule   *Rule  // nil: the policy of Chain
	Chain  *Chain // the base chain
	Box    Box
	Not    []Except
	Kind   LeafKind
	To     Translate // of Translated: of a map, with one choice
	Choice Choice
	Other  Other
	Mark   MarkState
	Local  bool // the box was asked for by "is an address of this machine"
}

// Except is packets that a rule has taken away.
type Except struct {
	Box  Box
	Rule *Rule
}

// Met is a rule that packets met and that does something beside deciding.
type Met struct {
	Rule  *Rule
	Other Other
}

// Variable is what is drawn or unknown.
type Variable struct {
	Field Field
	Rule  *Rule // the first that asked for it
}

// Walked is the result of a walk.
type Walked struct {
	Leaves    []Leaf
	Rest      []Region // what is left over, by its mark
	Met       []Met
	Variables []Variable // by number
	MarkAsked []*Rule    // rules that asked for a mark in vain
	Marks     bool       // some rule asked for a mark
}

// Region is packets with one mark.
type Region struct {
	Box  Box
	Not  []Except
	Mark MarkState
}

// Walker walks the chains of one type.
type Walker struct {
	Set      *Ruleset
	Universe Universe
	Local    Ranges // addresses of this machine; nil: nobody knows them
	Kind     string // of chains
	// MarksAside: marks that the chains set are not followed. It keeps packets together that
	// differ in their mark only.
	MarksAside bool

	walked   *Walked
	base     *Chain
	accepted []Except // in this base chain
	passed   []state  // accepted in this base chain
	chains   []*Chain // on the way
	vars     []Variable
	shared   map[string]int
	marks    map[*Rule]bool // asked for a mark: whether ever with success
	steps    int
}

// Errors of a walk.
var (
	ErrTooLong = errors.New("the chains lead into each other too often to follow every path")
	ErrTooMany = errors.New("the rules leave packets out in too many ways to follow every path")
)

const (
	maxSteps  = 500_000
	maxPieces = 4096
)

// state is packets on their way.
type state struct {
	Region
	local bool
}

// Walk sends packets of the regions through the base chains of a hook. A packet that a
// base chain accepts goes on with the next.
func (w *Walker) Walk(hook string, regions ...Region) (*Walked, error) {
	w.walked, w.marks, w.steps = &Walked{}, map[*Rule]bool{}, 0
	if w.shared == nil {
		w.shared = map[string]int{}
	}
	var live []state
	for _, r := range regions {
		live = append(live, state{Region: r})
	}
	for _, base := range w.Set.Bases(w.Kind, hook) {
		w.base, w.accepted = base, nil
		var next []state
		for _, s := range live {
			w.passed = nil
			out, err := w.chain(base, s)
			if err != nil {
				return nil, err
			}
			if base.Policy == "drop" {
				for _, o := range out {
					w.leaf(o, Leaf{Kind: Dropped})
				}
				out = nil
			}
			out, err = remarked(s, append(out, w.passed...))
			if err != nil {
				return nil, err
			}
			next = append(next, out...)
		}
		live = next
	}
	for _, s := range live {
		w.walked.Rest = append(w.walked.Rest, s.Region)
	}
	w.walked.Variables = w.vars
	for r, met := range w.marks {
		if !met {
			w.walked.MarkAsked = append(w.walked.MarkAsked, r)
		}
	}
	w.walked.Marks = len(w.marks) > 0
	slices.SortFunc(w.walked.MarkAsked, func(a, b *Rule) int { return a.Line - b.Line })
	return w.walked, nil
}

// remarked is a state behind a chain that gave back out of it. What ended in the chain is
// in a leaf before, so only another mark makes a difference.
func remarked(s state, out []state) ([]state, error) {
	all := []state{s}
	for _, o := range out {
		if o.Mark == s.Mark {
			continue
		}
		pieces, err := o.pieces()
		if err != nil {
			return nil, err
		}
		for _, p := range pieces {
			all[0].Not = append(slices.Clip(all[0].Not), Except{Box: p})
		}
		all = append(all, o)
	}
	return all, nil
}

// pieces are the packets of a region as boxes.
func (r Region) pieces() ([]Box, error) {
	others := make([]Box, len(r.Not))
	for k, n := range r.Not {
		others[k] = n.Box
	}
	pieces, ok := r.Box.MinusAll(others, maxPieces)
	if !ok {
		return nil, ErrTooMany
	}
	return pieces, nil
}

// narrowed keeps of what is left out what matters for the box.
func (s state) narrowed(b Box) state {
	s.Box = b
	var not []Except
	for _, n := range s.Not {
		if _, meet := b.And(n.Box); meet {
			not = append(not, n)
		}
	}
	s.Not = not
	return s
}

// chain gives the packets that come back from it.
func (w *Walker) chain(c *Chain, s state) ([]state, error) {
	if c == nil || slices.Contains(w.chains, c) { // the kernel refuses loops
		return []state{s}, nil
	}
	w.chains = append(w.chains, c)
	defer func() { w.chains = w.chains[:len(w.chains)-1] }()
	live, returned := []state{s}, []state(nil)
	for _, r := range c.Rules {
		var next []state
		for _, s := range live {
			if w.steps++; w.steps > maxSteps || len(live) > maxPieces {
				return nil, ErrTooLong
			}
			goes, back, err := w.rule(r, s)
			if err != nil {
				return nil, err
			}
			next, returned = append(next, goes...), append(returned, back...)
		}
		if live = next; len(live) == 0 {
			break
		}
	}
	return append(returned, live...), nil
}

// passage is packets of a state in a rule.
type passage struct {
	w     *Walker
	rule  *Rule
	from  state   // what came
	cur   []state // what meets all conditions so far
	goes  []state // to the next rule, marked
	back  []state // to the chain's caller
	ended bool    // nothing of from goes on
}

// rule gives the packets that go on with the next rule, and those that go back.
func (w *Walker) rule(r *Rule, s state) (goes, back []state, err error) {
	if r.IPv6 {
		return []state{s}, nil, nil
	}
	p := passage{w: w, rule: r, from: s, cur: []state{s}}
	for _, statement := range r.Statements {
		if len(p.cur) == 0 {
			break
		}
		if err := p.statement(statement); err != nil {
			return nil, nil, err
		}
	}
	for _, c := range p.cur {
		if c.Mark != s.Mark {
			if err := p.leave(c, c); err != nil {
				return nil, nil, err
			}
		}
	}
	if !p.ended {
		p.goes = append(p.goes, p.from)
	}
	return p.goes, p.back, nil
}

// whole tells whether a state is all that came.
func (p *passage) whole(s state) bool {
	return s.Box.Covers(p.from.Box) && len(s.Not) <= len(p.from.Not)
}

// leave takes packets away from those that go on, but those of out.
func (p *passage) leave(s state, out ...state) error {
	p.goes = append(p.goes, out...)
	if p.whole(s) {
		p.ended = true
		return nil
	}
	pieces, err := s.pieces()
	for _, b := range pieces {
		p.from.Not = append(slices.Clip(p.from.Not), Except{b, p.rule})
	}
	return err
}

func (p *passage) statement(statement Statement) error {
	switch x := statement.(type) {
	case Match:
		p.match(x)
	case SetMark:
		for k := range p.cur {
			if p.w.MarksAside {
				break
			}
			m := &p.cur[k].Mark
			m.Unknown = m.Unknown && x.And != math.MaxUint32 || x.Unknown
			m.Value = m.Value&^x.And ^ x.Xor
			if m.Unknown {
				m.Value = 0
			}
		}
	case Other:
		if !x.Harmless && !x.Ends {
			p.w.walked.Met = append(p.w.walked.Met, Met{p.rule, x})
		}
		if x.Ends {
			p.leaves(Leaf{Kind: Ended, Other: x})
		}
	case Translate:
		return p.translate(x)
	case Verdict:
		cur := p.cur
		p.cur = nil
		for _, s := range cur {
			if err := p.verdict(x, s); err != nil {
				return err
			}
		}
	case VerdictMap:
		return p.verdictMap(x)
	}
	return nil
}

// leaves ends all that met the conditions.
func (p *passage) leaves(l Leaf) {
	for _, s := range p.cur {
		p.w.leafOf(p.rule, s, l)
		p.ended = p.ended || p.whole(s)
	}
	p.cur = nil
}

func (w *Walker) leaf(s state, l Leaf) { w.leafOf(nil, s, l) }

func (w *Walker) leafOf(r *Rule, s state, l Leaf) {
	l.Rule, l.Chain, l.Box, l.Mark, l.Local = r, w.base, s.Box, s.Mark, s.local
	l.Not = slices.Clone(s.Not)
	for _, a := range w.accepted {
		if _, meet := s.Box.And(a.Box); meet {
			l.Not = append(l.Not, a)
		}
	}
	for _, n := range l.Not {
		if n.Box.Covers(l.Box) {
			return // nobody gets here
		}
	}
	w.walked.Leaves = append(w.walked.Leaves, l)
}

func (p *passage) translate(t Translate) error {
	if t.Lost != "" || len(t.Fields) == 0 {
		choice := Choice{}
		if len(t.Choices) > 0 {
			choice = t.Choices[0]
		}
		p.leaves(Leaf{Kind: Translated, To: t, Choice: choice})
		return nil
	}
	vars := p.w.variables(t.Fields, p.rule)
	one := t
	one.Choices = nil
	var keys []Tuple
	for _, c := range t.Choices {
		keys = append(keys, c.Key)
		for _, s := range p.cur {
			for _, m := range p.w.meet(s, t.Fields, []Tuple{c.Key}, vars) {
				p.w.leafOf(p.rule, m, Leaf{Kind: Translated, To: one, Choice: c})
			}
		}
	}
	p.asked(t.Fields, keys, false)
	return nil // what the map does not have goes on with the next rule, with the mark that it has now
}

func (p *passage) verdictMap(v VerdictMap) error {
	vars := p.w.variables(v.Fields, p.rule)
	cur := slices.Clone(p.cur)
	var keys []Tuple
	for _, e := range v.Elements {
		keys = append(keys, e.Key)
		for k, s := range cur {
			for _, m := range p.w.meet(s, v.Fields, []Tuple{e.Key}, vars) {
				if err := p.verdict(e.Verdict, m); err != nil {
					return err
				}
				if s.Mark != p.from.Mark { // what the map does not have goes on with that mark
					p.cur[k].Not = append(slices.Clip(p.cur[k].Not), Except{m.Box, p.rule})
				}
			}
		}
	}
	p.asked(v.Fields, keys, false)
	if p.ended {
		p.cur = nil
	}
	return nil
}

func (p *passage) verdict(v Verdict, s state) error {
	w := p.w
	switch v.Kind {
	case Accept:
		pieces, err := s.pieces()
		if err != nil {
			return err
		}
		for _, b := range pieces {
			w.accepted = append(w.accepted, Except{b, p.rule})
		}
		w.passed = append(w.passed, s)
		p.ended = p.ended || p.whole(s)
	case Drop:
		w.leafOf(p.rule, s, Leaf{Kind: Dropped})
		p.ended = p.ended || p.whole(s)
	case Return:
		p.back = append(p.back, s)
		return p.leave(s)
	case Jump, Goto:
		out, err := w.chain(p.rule.Chain.Table.Chain(v.Chain), s)
		if err != nil {
			return err
		}
		if v.Kind == Goto {
			p.back = append(p.back, out...)
			return p.leave(s)
		}
		if len(out) == 0 {
			p.ended = p.ended || p.whole(s)
		}
		for _, o := range out {
			if o.Mark != p.from.Mark {
				if err := p.leave(o, o); err != nil {
					return err
				}
			}
		}
	case Continue:
		if s.Mark != p.from.Mark {
			return p.leave(s, s)
		}
	}
	return nil
}

// match narrows the packets to those that meet a condition.
func (p *passage) match(m Match) {
	vars := p.w.variables(m.Fields, p.rule)
	p.asked(m.Fields, m.Values, m.Not)
	var next []state
	for _, s := range p.cur {
		met := p.w.meet(s, m.Fields, m.Values, vars)
		if m.Not {
			met = p.notMet(s, m, met)
		}
		next = append(next, met...)
	}
	p.cur = next
}

// asked notes that a rule asks for marks, and whether packets have one of those.
func (p *passage) asked(fields []Field, values []Tuple, not bool) {
	for k, f := range fields {
		if f.Kind != Mark {
			continue
		}
		for _, s := range p.cur {
			if s.Mark.Unknown {
				continue
			}
			has := slices.ContainsFunc(values, func(v Tuple) bool {
				n := s.Mark.Value & f.Mask
				return len(v) == len(fields) && v[k].First <= n && n <= v[k].Last
			})
			p.w.marks[p.rule] = p.w.marks[p.rule] || has != not || not && len(fields) > 1
		}
	}
}

func (p *passage) notMet(s state, m Match, met []state) []state {
	if len(met) == 0 {
		return []state{s}
	}
	if len(m.Fields) == 1 && len(met) == 1 { // in one dimension what is left is a box too
		var out []state
		for _, b := range s.Box.Minus(met[0].Box) {
			n := s.narrowed(b)
			n.local = s.local
			out = append(out, n)
		}
		return out
	}
	for _, x := range met {
		s.Not = append(slices.Clip(s.Not), Except{x.Box, p.rule})
	}
	return []state{s}
}

// variables gives a number to what is drawn or unknown of the fields.
func (w *Walker) variables(fields []Field, r *Rule) []int {
	vars := make([]int, len(fields))
	for k, f := range fields {
		vars[k] = -1
		switch {
		case f.Kind == DestinationLocal && w.Local == nil:
			f.Key, f.Mod = "local", 2
		case f.Kind == Mark: // the bits that a mask leaves; what two masks leave may have any values together
			f.Key, f.Mod = fmt.Sprintf("mark & %#x", f.Mask), math.MaxUint32
		case f.Kind == Unknown:
			f.Mod = 2
		case f.Kind != Draw:
			continue
		}
		key := f.Key
		if v, ok := w.shared[key]; ok && key != "" {
			vars[k] = v
			continue
		}
		vars[k] = len(w.vars)
		w.vars = append(w.vars, Variable{f, r})
		if key != "" {
			w.shared[key] = vars[k]
		}
	}
	return vars
}

// meet is the packets of s whose fields have one of the values.
func (w *Walker) meet(s state, fields []Field, values []Tuple, vars []int) []state {
	if len(fields) == 1 {
		ranges := []Range{}
		all := false
		for _, v := range values {
			if len(v) != 1 {
				continue
			}
			r := w.ranges(s, fields[0], v[0])
			all = all || r == nil
			ranges = append(ranges, r...)
		}
		joined := RangesOf(ranges)
		if all {
			joined = nil
		}
		return w.narrow(s, fields, []Ranges{joined}, vars)
	}
	var out []state
	for _, v := range values {
		if len(v) != len(fields) {
			continue
		}
		each := make([]Ranges, len(fields))
		for k, f := range fields {
			each[k] = w.ranges(s, f, v[k])
		}
		out = append(out, w.narrow(s, fields, each, vars)...)
	}
	return out
}

// ranges of a field's value: of its dimension, or of its variable; nil is all.
func (w *Walker) ranges(s state, f Field, v Value) Ranges {
	truth := func(b bool) Ranges {
		if b {
			return nil
		}
		return Ranges{}
	}
	switch f.Kind {
	case In, Out:
		return w.Universe.Ranges(v.Name)
	case Mark:
		if s.Mark.Unknown {
			return Ranges{{v.First, v.Last}}
		}
		masked := s.Mark.Value & f.Mask
		return truth(v.First <= masked && masked <= v.Last)
	case SourceLocal:
		return truth(v.First == 0) // what is forwarded comes from elsewhere
	case State:
		return truth(v.First == 1)
	case DestinationLocal:
		if w.Local != nil {
			return w.Local
		}
		return Ranges{{1, 1}}
	case Draw:
		if v.Last < f.Offset || f.Mod == 0 || v.First > f.Offset+(f.Mod-1) {
			return Ranges{}
		}
		return Ranges{{max(v.First, f.Offset) - f.Offset, min(v.Last-f.Offset, f.Mod-1)}}
	}
	return Ranges{{v.First, v.Last}}
}

func (w *Walker) narrow(s state, fields []Field, each []Ranges, vars []int) []state {
	b := s.Box
	local := s.local
	for k, f := range fields {
		r := each[k]
		if r.empty() {
			return nil
		}
		if r == nil {
			continue
		}
		one := Box{}
		switch {
		case f.Kind <= DestinationPort:
			one.Dim[f.Kind] = r
			local = local && (f.Kind != Destination || r.Size() > 1)
		case f.Kind == DestinationLocal && w.Local != nil:
			one.Dim[Destination] = r
			local = b.Dim[Destination] == nil || b.Dim[Destination].Size() > 1
		case vars[k] >= 0:
			one.Vars = map[int]Ranges{vars[k]: r}
		default:
			continue
		}
		var met bool
		if b, met = b.And(one); !met {
			return nil
		}
	}
	out := s.narrowed(b)
	out.local = local
	for _, n := range out.Not {
		if n.Box.Covers(b) {
			return nil
		}
	}
	return []state{out}
}
