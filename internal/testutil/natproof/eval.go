// SPDX-License-Identifier: Apache-2.0

package natproof

import (
	"math"
	"slices"
	"strings"

	"natkit/internal/kernel/ruleset"
)

// Packet is one packet as chains see it.
type Packet struct {
	In, Out             string
	Source, Destination uint32
	Protocol            uint8
	// Ports are zero where the protocol has none.
	SourcePort, DestinationPort uint16
	Mark                        uint32
	DestinationLocal            bool
}

// HookOutcome is what the chains of a hook do with one packet.
type HookOutcome struct {
	Rule   *ruleset.Rule // that decided; nil: none did
	Kind   ruleset.LeafKind
	Done   bool // false: nothing was decided, the packet goes on as it is
	To     ruleset.Translate
	Choice ruleset.Choice
	Mark   uint32
	// Unknown: a condition or statement on the way is not understood.
	Unknown bool
	// Asked are the rules that took it, up to the one that decided: jumps, returns, accepts.
	Asked []*ruleset.Rule
}

// Evaluator asks chains about one packet, plainly, rule by rule, as the kernel does. Draw
// gives a number below its argument.
type Evaluator struct {
	Set  *ruleset.Ruleset
	Kind string
	Draw func(f ruleset.Field) uint32

	out   HookOutcome
	steps int
}

type next int

const (
	goOn next = iota
	backToCaller
	leaveBase
	finished
)

// Eval gives what the base chains of a hook make of a packet.
func (e *Evaluator) Eval(hook string, p Packet) HookOutcome {
	e.out, e.steps = HookOutcome{Mark: p.Mark}, 0
	for _, base := range e.Set.Bases(e.Kind, hook) {
		switch e.chain(base, &p, 0) {
		case finished:
			e.out.Mark = p.Mark
			return e.out
		case goOn, backToCaller:
			if base.Policy == "drop" {
				e.out.Done, e.out.Kind = true, ruleset.Dropped
				return e.out
			}
		}
	}
	e.out.Mark = p.Mark
	return e.out
}

// maxDepth is the kernel's NFT_JUMP_STACK_SIZE. An input that no kernel would take could
// still lead a packet in circles within it: that ends, and is unknown.
const (
	maxDepth = 16
	maxRules = 500_000 // that one packet is led through
)

func (e *Evaluator) chain(c *ruleset.Chain, p *Packet, depth int) next {
	if c == nil || depth > maxDepth {
		return goOn
	}
	for _, r := range c.Rules {
		if e.steps++; e.steps > maxRules {
			e.out.Unknown = true
			return finished
		}
		if n := e.rule(r, p, depth); n != goOn {
			return n
		}
	}
	return goOn
}

func (e *Evaluator) rule(r *ruleset.Rule, p *Packet, depth int) next {
	if r.IPv6 {
		return goOn
	}
	for _, statement := range r.Statements {
		n, met := e.statement(r, statement, p, depth)
		if !met {
			return goOn
		}
		if n != goOn {
			return n
		}
	}
	return goOn
}

// statement gives where the packet goes on, and whether the rule does.
func (e *Evaluator) statement(r *ruleset.Rule, statement ruleset.Statement, p *Packet, depth int) (n next, met bool) {
	switch x := statement.(type) {
	case ruleset.Match:
		drawn := e.drawn(x.Fields)
		return goOn, slices.ContainsFunc(x.Values, func(t ruleset.Tuple) bool { return e.holds(x.Fields, t, p, drawn) }) != x.Not
	case ruleset.SetMark:
		p.Mark = p.Mark&^x.And ^ x.Xor
		e.out.Unknown = e.out.Unknown || x.Unknown
	case ruleset.Other:
		if x.Ends {
			e.out.Rule, e.out.Done, e.out.Kind, e.out.Unknown = r, true, ruleset.Ended, true
			return finished, true
		}
	case ruleset.Verdict:
		e.out.Asked = append(e.out.Asked, r)
		return e.verdict(r, x, p, depth), true
	case ruleset.VerdictMap:
		drawn := e.drawn(x.Fields)
		for _, el := range x.Elements {
			if e.holds(x.Fields, el.Key, p, drawn) {
				e.out.Asked = append(e.out.Asked, r)
				return e.verdict(r, el.Verdict, p, depth), true
			}
		}
	case ruleset.Translate:
		drawn := e.drawn(x.Fields)
		for _, c := range x.Choices {
			if len(x.Fields) == 0 || e.holds(x.Fields, c.Key, p, drawn) {
				e.out.Rule, e.out.Done, e.out.Kind, e.out.To, e.out.Choice = r, true, ruleset.Translated, x, c
				e.out.Unknown = e.out.Unknown || x.Lost != ""
				return finished, true
			}
		}
		return goOn, false
	}
	return goOn, true
}

func (e *Evaluator) verdict(r *ruleset.Rule, v ruleset.Verdict, p *Packet, depth int) next {
	switch v.Kind {
	case ruleset.Accept:
		return leaveBase
	case ruleset.Return:
		return backToCaller
	case ruleset.Drop:
		e.out.Rule, e.out.Done, e.out.Kind = r, true, ruleset.Dropped
		return finished
	case ruleset.Jump, ruleset.Goto:
		n := e.chain(r.Chain.Table.Chain(v.Chain), p, depth+1)
		if n == goOn || n == backToCaller {
			if v.Kind == ruleset.Goto {
				return backToCaller
			}
			return goOn
		}
		return n
	}
	return goOn
}

func (e *Evaluator) drawn(fields []ruleset.Field) []uint32 {
	numbers := make([]uint32, len(fields))
	for k, f := range fields {
		if f.Kind == ruleset.Draw && e.Draw != nil {
			numbers[k] = f.Offset + e.Draw(f)
		}
	}
	return numbers
}

func (e *Evaluator) holds(fields []ruleset.Field, t ruleset.Tuple, p *Packet, drawn []uint32) bool {
	if len(t) != len(fields) {
		return false
	}
	for k, f := range fields {
		n := uint32(math.MaxUint32)
		switch f.Kind {
		case ruleset.In, ruleset.Out:
			name := map[ruleset.FieldKind]string{ruleset.In: p.In, ruleset.Out: p.Out}[f.Kind]
			base, pattern := strings.CutSuffix(t[k].Name, "*")
			if pattern && !strings.HasPrefix(name, base) || !pattern && name != base {
				return false
			}
			continue
		case ruleset.Source:
			n = p.Source
		case ruleset.Destination:
			n = p.Destination
		case ruleset.ProtocolField:
			n = uint32(p.Protocol)
		case ruleset.SourcePort:
			n = uint32(p.SourcePort)
		case ruleset.DestinationPort:
			n = uint32(p.DestinationPort)
		case ruleset.Mark:
			n = p.Mark & f.Mask
		case ruleset.DestinationLocal:
			if n = 0; p.DestinationLocal {
				n = 1
			}
		case ruleset.SourceLocal:
			n = 0
		case ruleset.State:
			n = 1
		case ruleset.Draw:
			n = drawn[k]
		case ruleset.Unknown:
			e.out.Unknown = true
			return false
		}
		if n < t[k].First || n > t[k].Last {
			return false
		}
	}
	return true
}
