// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"math"
	"slices"
	"strings"
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

// Outcome is what the chains of a hook do with one packet.
type Outcome struct {
	Rule   *Rule // that decided; nil: none did
	Kind   LeafKind
	Done   bool // false: nothing was decided, the packet goes on as it is
	To     Translate
	Choice Choice
	Mark   uint32
	// Unknown: a condition or statement on the way is not understood.
	Unknown bool
	// Asked are the rules that took it, up to the one that decided: jumps, returns, accepts.
	Asked []*Rule
}

// Evaluator asks chains about one packet, plainly, rule by rule, as the kernel does. Draw
// gives a number below its argument.
type Evaluator struct {
	Set  *Ruleset
	Kind string
	Draw func(f Field) uint32

	out   Outcome
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
func (e *Evaluator) Eval(hook string, p Packet) Outcome {
	e.out, e.steps = Outcome{Mark: p.Mark}, 0
	for _, base := range e.Set.Bases(e.Kind, hook) {
		switch e.chain(base, &p, 0) {
		case finished:
			e.out.Mark = p.Mark
			return e.out
		case goOn, backToCaller:
			if base.Policy == "drop" {
				e.out.Done, e.out.Kind = true, Dropped
				return e.out
			}
		}
	}
	e.out.Mark = p.Mark
	return e.out
}

// maxDepth is the kernel's NFT_JUMP_STACK_SIZE. An input that no kernel would take could
// still lead a packet in circles within it: that ends, and is unknown.
const maxDepth = 16

func (e *Evaluator) chain(c *Chain, p *Packet, depth int) next {
	if c == nil || depth > maxDepth {
		return goOn
	}
	for _, r := range c.Rules {
		if e.steps++; e.steps > maxSteps {
			e.out.Unknown = true
			return finished
		}
		if n := e.rule(r, p, depth); n != goOn {
			return n
		}
	}
	return goOn
}

func (e *Evaluator) rule(r *Rule, p *Packet, depth int) next {
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
func (e *Evaluator) statement(r *Rule, statement Statement, p *Packet, depth int) (n next, met bool) {
	switch x := statement.(type) {
	case Match:
		drawn := e.drawn(x.Fields)
		return goOn, slices.ContainsFunc(x.Values, func(t Tuple) bool { return e.holds(x.Fields, t, p, drawn) }) != x.Not
	case SetMark:
		p.Mark = p.Mark&^x.And ^ x.Xor
		e.out.Unknown = e.out.Unknown || x.Unknown
	case Other:
		if x.Ends {
			e.out.Rule, e.out.Done, e.out.Kind, e.out.Unknown = r, true, Ended, true
			return finished, true
		}
	case Verdict:
		e.out.Asked = append(e.out.Asked, r)
		return e.verdict(r, x, p, depth), true
	case VerdictMap:
		drawn := e.drawn(x.Fields)
		for _, el := range x.Elements {
			if e.holds(x.Fields, el.Key, p, drawn) {
				e.out.Asked = append(e.out.Asked, r)
				return e.verdict(r, el.Verdict, p, depth), true
			}
		}
	case Translate:
		drawn := e.drawn(x.Fields)
		for _, c := range x.Choices {
			if len(x.Fields) == 0 || e.holds(x.Fields, c.Key, p, drawn) {
				e.out.Rule, e.out.Done, e.out.Kind, e.out.To, e.out.Choice = r, true, Translated, x, c
				e.out.Unknown = e.out.Unknown || x.Lost != ""
				return finished, true
			}
		}
		return goOn, false
	}
	return goOn, true
}

func (e *Evaluator) verdict(r *Rule, v Verdict, p *Packet, depth int) next {
	switch v.Kind {
	case Accept:
		return leaveBase
	case Return:
		return backToCaller
	case Drop:
		e.out.Rule, e.out.Done, e.out.Kind = r, true, Dropped
		return finished
	case Jump, Goto:
		n := e.chain(r.Chain.Table.Chain(v.Chain), p, depth+1)
		if n == goOn || n == backToCaller {
			if v.Kind == Goto {
				return backToCaller
			}
			return goOn
		}
		return n
	}
	return goOn
}

func (e *Evaluator) drawn(fields []Field) []uint32 {
	numbers := make([]uint32, len(fields))
	for k, f := range fields {
		if f.Kind == Draw && e.Draw != nil {
			numbers[k] = f.Offset + e.Draw(f)
		}
	}
	return numbers
}

func (e *Evaluator) holds(fields []Field, t Tuple, p *Packet, drawn []uint32) bool {
	if len(t) != len(fields) {
		return false
	}
	for k, f := range fields {
		n := uint32(math.MaxUint32)
		switch f.Kind {
		case In, Out:
			name := map[FieldKind]string{In: p.In, Out: p.Out}[f.Kind]
			base, pattern := strings.CutSuffix(t[k].Name, "*")
			if pattern && !strings.HasPrefix(name, base) || !pattern && name != base {
				return false
			}
			continue
		case Source:
			n = p.Source
		case Destination:
			n = p.Destination
		case ProtocolField:
			n = uint32(p.Protocol)
		case SourcePort:
			n = uint32(p.SourcePort)
		case DestinationPort:
			n = uint32(p.DestinationPort)
		case Mark:
			n = p.Mark & f.Mask
		case DestinationLocal:
			if n = 0; p.DestinationLocal {
				n = 1
			}
		case SourceLocal:
			n = 0
		case State:
			n = 1
		case Draw:
			n = drawn[k]
		case Unknown:
			e.out.Unknown = true
			return false
		}
		if n < t[k].First || n > t[k].Last {
			return false
		}
	}
	return true
}
