// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"

	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// mostlyHeld is the share of a subscriber's ports in hold-down from which not its sessions but
// their ends use up its blocks.
const mostlyHeld = 0.5

var portBlockTooSmall = Cause{
	Code:     "port-block-too-small",
	Title:    "Port blocks are too small for the hold-down of their ports",
	Headline: "A CGNAT subscriber with few connections runs out of ports",
	Search: []string{
		"port-limit",
		"port_hold_down",
		"port block size too small",
	},
	Severities:    []Severity{Warning},
	Explains:      []string{"engine-source-limit"},
	Needs:         []string{snapshot.CanEngine},
	Symptom:       "A subscriber with few open sessions cannot open new ones at times: mostly one that opens many short ones, such as DNS look-ups or web pages. Open sessions continue.",
	Proof:         fmt.Sprintf("The eBPF engine refused a subscriber ports during the window although it has port blocks, and at least %s of its ports are in hold-down: no session uses them, and nobody may have them yet.", percent.Whole(mostlyHeld)),
	FalsePositive: "Ports in hold-down without refusals: that is what hold-down is for. A subscriber whose ports are mostly in use has reached its limit: engine-source-limit.",
	Cure:          "Give larger extra blocks, or more of them. A subscriber needs as many ports as it opens in a second, times the seconds of a session and of its hold-down. port_hold_down below 120 s is against RFC 6888 (REQ-8).",
	judge:         judgePortBlockSize,
}

// starved is the subscriber that was refused most while its blocks are mostly in hold-down.
func (f facts) starved() *snapshot.EngineSource {
	if f.Engine == nil {
		return nil
	}
	for i := range f.Engine.Sources {
		s := &f.Engine.Sources[i]
		c := f.class(s)
		byClass := c != nil && c.Ports > 0 && s.Ports >= c.Ports
		if s.Refused["port-limit"] > 0 && s.Blocks > 0 && !byClass && s.Ports > 0 && share(s.HoldDown, s.Ports) >= mostlyHeld {
			return s
		}
	}
	return nil
}

func judgePortBlockSize(f facts) *verdict {
	s := f.starved()
	if s == nil {
		return nil
	}
	lost := s.Refused["port-limit"]
	v := &verdict{impact: float64(lost)}
	v.Severity = Warning
	v.Title = fmt.Sprintf("port blocks too small: %d of %s of %s in hold-down, %s refused", s.HoldDown, number(s.Ports, "port"), s.Name(), number(lost, "packet"))
	v.Evidence = append(f.engineEvidence(), f.subscriberEvidence(s)...)
	v.Evidence = append(v.Evidence, Evidence{"hold-down of a port", fmt.Sprintf("%.0f s", f.Engine.HoldDown), "port_hold_down of " + f.Engine.File})
	v.Why = "A port that a session has left is kept from others until its hold-down is over, so that late packets reach nobody else (RFC 6888 REQ-8). Until then it takes room in its block. Small blocks are full of such ports although few sessions are open."
	v.Remedy = append(f.largerBlocks(s), f.apply())
	v.Verify = f.look(f.natkit("subscribers --by refused"))
	return v
}

// largerBlocks is what gives a subscriber room for its hold-down.
func (f facts) largerBlocks(s *snapshot.EngineSource) []string {
	// What it had refused in the window, it would have opened for as long as the hold-down lasts.
	need := s.Ports + uint64(float64(s.Refused["port-limit"])/max(f.WindowSeconds, 1)*f.Engine.HoldDown)
	for i := range f.Engine.Pools {
		p := &f.Engine.Pools[i]
		if p.Name != s.Pool || p.BlockSize == 0 {
			continue
		}
		most := max(p.ExtraMax, 3)
		extra := min(max(powerOfTwo(float64(need/most)), 2*p.ExtraSize), largestBlock)
		out := []string{fmt.Sprintf("# %s needs about %s at this rate; larger extra blocks. Sessions continue:", s.Name(), number(need, "port"))}
		switch {
		case p.Lines["extra"] > 0:
			out = append(out, setKey(p.Lines["extra"], "extra", p.ExtraSize, extra, f.Engine.File))
		case p.Lines["size"] > 0: // which extra ones have too
			out = append(out, setKey(p.Lines["size"], "size", p.BlockSize, extra, f.Engine.File))
		default:
			return append(out, fmt.Sprintf("# write extra: %d into blocks of pool %s in %s, then:", extra, p.Name, f.Engine.File))
		}
		if most > p.ExtraMax && p.Lines["at_most"] > 0 {
			out = append(out, setKey(p.Lines["at_most"], "at_most", p.ExtraMax, most, f.Engine.File))
		}
		return out
	}
	return []string{f.natkit("subscribers --by refused")}
}

// class is the class of a subscriber, nil where the rule file has none.
func (f facts) class(s *snapshot.EngineSource) *snapshot.EngineClass {
	for i := range f.Engine.Classes {
		if f.Engine.Classes[i].Name == s.Class {
			return &f.Engine.Classes[i]
		}
	}
	return nil
}

// subscriberEvidence is what a subscriber has.
func (f facts) subscriberEvidence(s *snapshot.EngineSource) (out []Evidence) {
	const from = "natkit subscribers"
	out = append(out, Evidence{"sessions of " + s.Name(), fmt.Sprint(s.Sessions), from})
	if s.Ports > 0 {
		out = append(out, Evidence{"ports of " + s.Name(), fmt.Sprintf("%d, %d of them in hold-down", s.Ports, s.HoldDown), from})
	}
	if s.Blocks > 0 {
		out = append(out, Evidence{"port blocks of " + s.Name(), fmt.Sprintf("%d with %d ports of each protocol", s.Blocks, s.BlockPorts), from})
	}
	return out
}
