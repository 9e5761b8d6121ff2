// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// ReadFacts reads what is up in a namespace as facts for the doctor, nil for nothing:
// a probe.EngineReader. It changes nothing.
func ReadFacts(ns *netns.Handle, before *snapshot.Engine, whole bool) (*snapshot.Engine, error) {
	rec, err := recordOf(ns)
	if errors.Is(err, ErrDown) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	facts, err := rec.Engine.translator().facts(ns, before, whole)
	if errors.Is(err, ErrDown) || errors.Is(err, ErrAccelOff) { // it was taken down since
		return nil, nil
	}
	return facts, err
}

// SampleEngine reads the counters of engine ebpf and how full it is, nil where it is not up: a probe.EngineSampler. The rest of
// its facts takes many times as long.
func SampleEngine(ns *netns.Handle) (*snapshot.Engine, error) {
	rec, err := recordOf(ns)
	if errors.Is(err, ErrDown) || err == nil && (rec.Engine != EngineEBPF || !rec.Whole) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e, err := rec.Engine.rules().tables(ns)
	if err != nil {
		return nil, err
	}
	out, err := sampleOf(e, rec)
	return out, errors.Join(err, e.Close())
}

// sampleOf looks at no session and no subscriber, for there may be millions.
func sampleOf(e *datapath.Engine, rec *record) (*snapshot.Engine, error) {
	packets, err := e.Packets()
	if err != nil {
		return nil, err
	}
	addresses, err := readPorts(e, rec)
	if err != nil {
		return nil, err
	}
	size := e.Size()
	out := &snapshot.Engine{Kind: string(EngineEBPF), Packets: packets, SessionsMax: uint64(size.Sessions), MappingsMax: uint64(size.Mappings)}
	out.Sessions, out.Mappings = datapath.InUse(packets)
	for _, a := range addresses {
		if a.Ports > 0 && !a.Leaving {
			out.Addresses = append(out.Addresses, addressFact(a))
		}
	}
	pools := map[uint8]int{}
	for i := range rec.Addresses {
		a := &rec.Addresses[i]
		if a.Blocks.IsZero() || a.Leaving {
			continue
		}
		use, err := e.BlockUse(a)
		if err != nil {
			return nil, err
		}
		at, is := pools[a.Pool]
		if !is {
			at, pools[a.Pool] = len(out.Pools), len(out.Pools)
			out.Pools = append(out.Pools, snapshot.EnginePool{Name: a.Addr.String()})
		}
		out.Pools[at].BlocksUsed += uint64(use.Used)
		out.Pools[at].BlocksFree += uint64(use.Free)
	}
	return out, nil
}

// engineFacts are what engines have in common. The status has no file where the engine is half
// brought up: then there is no more.
func engineFacts(ns *netns.Handle) (*Status, *snapshot.Engine, error) {
	s, err := readStatus(ns, true)
	if err != nil {
		return nil, nil, err
	}
	out := &snapshot.Engine{Kind: string(s.Engine), File: s.File, Rules: s.Rules, Served: s.Serve != nil && s.Serve.Error == "", Flags: s.flags}
	if s.file == nil {
		out.Problems = s.Problems
	}
	for _, d := range s.drift {
		out.Drift = append(out.Drift, snapshot.EngineDrift(d))
	}
	return s, out, nil
}

func (nftEngine) facts(ns *netns.Handle, _ *snapshot.Engine, _ bool) (*snapshot.Engine, error) {
	s, out, err := engineFacts(ns)
	if err != nil {
		return nil, err
	}
	out.Table = "ip natkit"
	if s.file != nil {
		out.RuleList = ruleFacts(s.file, s.text)
	}
	return out, nil
}

func (ebpfEngine) facts(ns *netns.Handle, before *snapshot.Engine, whole bool) (*snapshot.Engine, error) {
	s, out, err := engineFacts(ns)
	if err != nil || s.file == nil {
		return out, err
	}
	out.Packets = s.Stats.Reasons
	out.Sessions, out.SessionsMax = uint64(s.Stats.Sessions), uint64(s.Limits.Sessions)
	out.Mappings, out.MappingsMax = uint64(s.Stats.Mappings), uint64(s.Limits.MappingLimit())
	out.PerSource, out.SourcesMax = uint64(s.Limits.SessionsPerSource), uint64(s.Limits.Sources)
	out.Addresses = addressFacts(s)
	out.Lines = s.limitLines()
	out.HoldDown = s.file.Defaults.Timeouts[rulefile.TimeoutHoldDown].Seconds()
	return out, s.subscriberFacts(ns, out, before, whole)
}

// limitLines are the line of limits in the rule file, and those of single limits that it names below: classes of
// subscribers have limits of the same names.
func (s *Status) limitLines() map[string]int {
	limits, l := lineOf(s.text, `^limits:`), s.Limits
	if limits == 0 {
		return map[string]int{}
	}
	lines := s.keyLines(limits, map[string]int{"sessions": l.Sessions, "mappings": l.MappingLimit(), "sources": l.Sources, "sessions_per_source": l.SessionsPerSource})
	lines["limits"] = limits
	return lines
}

// lineOf is the line of a rule file on which a pattern stands, outside of comments.
func lineOf(text, pattern string) int { return lineFrom(text, 1, pattern) }

// lineFrom is lineOf from a line on.
func lineFrom(text string, from int, pattern string) int {
	re := regexp.MustCompile(pattern)
	for i, line := range strings.Split(text, "\n") {
		if line, _, _ = strings.Cut(line, "#"); i+1 >= from && re.MatchString(line) {
			return i + 1
		}
	}
	return 0
}

// ruleFacts are the rules of a file that translate, at most MaxTargets.
func ruleFacts(file *rulefile.File, text string) (out []snapshot.EngineRule) {
	ids := file.RuleIDs()
	for i := range file.Rules {
		r := &file.Rules[i]
		fact := snapshot.EngineRule{ID: ids[i].String(), Line: r.Position.Line, Rule: r.String()}
		switch a := r.Action.(type) {
		case rulefile.Exclude:
			continue
		case rulefile.Masquerade:
			fact.Ports = snapshot.PortRange{Min: a.Ports.First, Max: a.Ports.Last}
		case rulefile.SNAT:
			fact.Ports = snapshot.PortRange{Min: a.Ports.First, Max: a.Ports.Last}
		case rulefile.DNAT:
			for _, t := range a.Targets {
				port := t.Ports.First
				if port == 0 {
					port = a.Ports.First // the same as it came to
				}
				fact.To = append(fact.To, snapshot.EndpointOf(netip.AddrPortFrom(t.Address, port)))
			}
		}
		if fact.Ports.Min > 0 {
			fact.PortsLine = lineFrom(text, fact.Line, fmt.Sprintf(`\bports: *%d-%d\b`, fact.Ports.Min, fact.Ports.Max))
		}
		out = append(out, fact)
	}
	return out[:min(len(out), snapshot.MaxTargets)]
}

// portsLine is the line of the rule file that gives an address its ports: of the pool or the rule that names it, or of the
// first with these ports.
func (s *Status) portsLine(a AddressStatus) int {
	pattern := fmt.Sprintf(`\bports: *%d-%d\b`, a.FirstPort, a.LastPort)
	from := 0
	for i := range s.file.Rules {
		if r, ok := s.file.Rules[i].Action.(rulefile.SNAT); ok && r.Pool == "" && r.Address == a.Address {
			from = s.file.Rules[i].Position.Line
		}
	}
	for i := range s.file.Pools {
		if s.file.Pools[i].Contains(a.Address) {
			from = s.file.Pools[i].Position.Line
		}
	}
	if from == 0 {
		return lineOf(s.text, pattern)
	}
	if line := lineFrom(s.text, from, pattern); line < s.entryEnd(from) {
		return line
	}
	return 0
}

// addressFacts are the external addresses with ports, fewest free first.
func addressFacts(s *Status) (out []snapshot.EngineAddress) {
	for _, a := range s.Addresses {
		if a.Ports == 0 || a.Leaving {
			continue
		}
		fact := addressFact(a)
		fact.Line = s.portsLine(a)
		out = append(out, fact)
	}
	slices.SortStableFunc(out, func(a, b snapshot.EngineAddress) int {
		return cmp.Compare(min(a.FreeTCP, a.FreeUDP, a.FreeICMP), min(b.FreeTCP, b.FreeUDP, b.FreeICMP))
	})
	return out[:min(len(out), snapshot.TopN)]
}

func addressFact(a AddressStatus) snapshot.EngineAddress {
	return snapshot.EngineAddress{
		Addr: a.Address, Ports: snapshot.PortRange{Min: a.FirstPort, Max: a.LastPort}, Given: uint64(a.Ports),
		FreeTCP: uint64(a.FreeTCP), FreeUDP: uint64(a.FreeUDP), FreeICMP: uint64(a.FreeICMP),
	}
}

func (acceleration) facts(ns *netns.Handle, _ *snapshot.Engine, _ bool) (*snapshot.Engine, error) {
	s, err := ReadAccelStatus(ns)
	if err != nil {
		return nil, err
	}
	out := &snapshot.Engine{Kind: string(EngineAccel), SessionsMax: uint64(s.Flows), Problems: s.Problems, Flags: s.flags}
	if s.Stats != nil {
		out.Sessions, out.Packets = uint64(s.Stats.Valid), s.Stats.Reasons
	}
	for _, l := range s.Interfaces {
		out.Interfaces = append(out.Interfaces, l.Name)
	}
	return out, nil
}
