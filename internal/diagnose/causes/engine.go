// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/words/shell"
)

// What several causes ask of natkit's own engine.

const (
	fromEngine = "counters of the engine"
	// portsLow is the share of an address's ports that are left when a warning is due.
	portsLow = 0.05
	// engineGrow is by how much a limit that was reached is raised.
	engineGrow = 2
)

// counted is how many packets the engine counted under one of the reasons.
func (f facts) counted(reasons ...string) (n uint64) {
	if f.Engine == nil {
		return 0
	}
	for _, r := range reasons {
		if c, ok := plausible(f.Engine.Packets, r); ok {
			n = saturate(n, c)
		}
	}
	return n
}

// countedEvidence is a line for each of the reasons that was counted.
func (f facts) countedEvidence(reasons ...string) (out []Evidence) {
	for _, r := range rulefile.Reasons {
		if slices.Contains(reasons, r.Name) && f.counted(r.Name) > 0 {
			out = append(out, Evidence{"packets dropped: " + r.Means, strconv.FormatUint(f.counted(r.Name), 10), fromEngine + ": " + r.Name})
		}
	}
	return out
}

// engineEvidence is how full the engine is.
func (f facts) engineEvidence() []Evidence {
	e := f.Engine
	return []Evidence{{"sessions of the engine", fmt.Sprintf("%d of %d", e.Sessions, e.SessionsMax), fromEngine}}
}

// editLimit is the commands that write a limit into the rule file.
func (f facts) editLimit(key string, from, to uint64) []string {
	e := f.Engine
	file := quote(e.File)
	switch {
	case e.Lines[key] > 0:
		return []string{fmt.Sprintf("sed -i -E '%ds/\\b%s: *%d\\b/%s: %d/' %s", e.Lines[key], key, from, key, to, file)}
	case e.Lines["limits"] == 0:
		return []string{fmt.Sprintf("printf '\\nlimits: {%s: %d}\\n' >> %s", key, to, file)}
	}
	// limits is written in one line, or in several, of which the first shows how far they are indented.
	return []string{fmt.Sprintf(`sed -i -E '%d{/\{/{s/\{/{%s: %d, /;b;};:a;n;/^ *(#|$)/ba;s/^( *)/\1%s: %d\n\1/}' %s`, e.Lines["limits"], key, to, key, to, file)}
}

// onFile is a command about the rule file in use.
func (f facts) onFile(verb string, flags ...string) string {
	return shell.Command(append([]string{verb, "-f", rulefile.Argument(f.Engine.File)}, flags...)...)
}

// apply is the command that has the engine take its rule file again. natkit serve sees by
// itself that the file has changed.
func (f facts) apply() string {
	if f.Engine.Served {
		return "# natkit serve applies the file"
	}
	return f.natkit(f.onFile("apply"))
}

// again is the commands that take the engine down and bring it up: what fixes the size of its
// tables is read then.
func (f facts) again() []string {
	if f.Engine.Served {
		return []string{"# stop natkit serve (its service), then:", f.natkit("down"), "# and start it again"}
	}
	return []string{f.natkit("down"), f.natkit(f.onFile("up", f.Engine.Flags...))}
}

// ofEngine tells whether a chain is in the table that engine nft has made of its rule file.
func (f facts) ofEngine(c snapshot.Chain) bool {
	return f.Engine != nil && f.Engine.Table != "" && c.Backend == "nft" && c.Family+" "+c.Table == f.Engine.Table
}

// engineRules is evidence of the rules of the rule file that a finding is about.
func (f facts) engineRules(about func(snapshot.EngineRule) bool) (out []Evidence, rules []snapshot.EngineRule) {
	if f.Engine == nil {
		return nil, nil
	}
	for _, r := range f.Engine.RuleList {
		if about(r) {
			rules = append(rules, r)
			out = append(out, Evidence{"rule of the engine", fmt.Sprintf("%s, line %d: %s", r.ID, r.Line, r.Rule), "natkit rules, " + f.Engine.File})
		}
	}
	return out, rules
}

// editPorts gives a rule of the rule file all ports.
func (f facts) editPorts(r snapshot.EngineRule) []string {
	if r.PortsLine == 0 {
		return []string{fmt.Sprintf("# rule %s, line %d of %s: give it ports: 1024-65535, then:", r.ID, r.Line, f.Engine.File), f.apply()}
	}
	return []string{fmt.Sprintf("# rule %s gives %s; give all:", r.ID, number(rangeSize(r.Ports), "port")), widenPorts(r.PortsLine, r.Ports, f.Engine.File), f.apply()}
}

// widenPorts writes all ports in place of a range, on a line of a rule file.
func widenPorts(line int, ports snapshot.PortRange, file string) string {
	return fmt.Sprintf("sed -i -E '%ds/\\bports: *%d-%d\\b/ports: 1024-65535/' %s", line, ports.Min, ports.Max, quote(file))
}

// judgeEnginePorts is snat-ports-exhausted of the engine.
func judgeEnginePorts(f facts) *verdict {
	e := f.Engine
	if e == nil {
		return nil
	}
	reasons := []string{"no-port", "no-address"}
	lost := f.counted(reasons...)
	v := &verdict{impact: float64(lost)}
	var low *snapshot.EngineAddress
	if len(e.Addresses) > 0 {
		low = &e.Addresses[0]
	}
	switch {
	case lost > 0 && low != nil && left(low) > uint64(portsLow*float64(low.Given)):
		v.Severity = Critical
		v.Title = fmt.Sprintf("the engine found no port for %s %s; now %s has %d left", number(lost, "packet"), f.window(), low.Addr, left(low))
	case lost > 0 && low != nil:
		v.Severity = Critical
		v.Title = fmt.Sprintf("the engine has no port left at %s: %s of new sessions dropped %s", low.Addr, number(lost, "packet"), f.window())
	case lost > 0:
		v.Severity = Critical
		v.Title = fmt.Sprintf("the engine has no external address left: %s of new sessions dropped %s", number(lost, "packet"), f.window())
	case low != nil && low.Given > 0 && left(low) <= uint64(portsLow*float64(low.Given)):
		v.Severity = Warning
		v.impact = 1 - share(left(low), low.Given)
		v.Title = fmt.Sprintf("the engine has %d of %d ports left at %s", left(low), low.Given, low.Addr)
	default:
		return nil
	}
	v.Evidence = append(f.engineEvidence(), f.countedEvidence(reasons...)...)
	for _, a := range e.Addresses[:min(len(e.Addresses), 3)] {
		v.Evidence = append(v.Evidence, Evidence{fmt.Sprintf("ports free of %d at %s (%d-%d)", a.Given, a.Addr, a.Ports.Min, a.Ports.Max),
			fmt.Sprintf("TCP %d, UDP %d, ICMP %d", a.FreeTCP, a.FreeUDP, a.FreeICMP), "natkit status"})
	}
	v.Why = "Each internal endpoint that sends through the engine uses a port of an external address while it has sessions, and for a while after. When none is left, new sessions are refused; existing ones continue."
	v.Remedy = f.moreEnginePorts(low)
	v.Verify = f.look(f.natkit("status"))
	return v
}

// moreEnginePorts is what gives the engine ports: the whole range where the rule file has a
// narrow one, else more addresses.
func (f facts) moreEnginePorts(low *snapshot.EngineAddress) []string {
	if low != nil && low.Line > 0 && low.Ports != (snapshot.PortRange{Min: 1024, Max: 65535}) {
		return append([]string{fmt.Sprintf("# line %d of %s gives %s; give all. This restarts the engine, and its sessions end:", low.Line, f.Engine.File, number(rangeSize(low.Ports), "port")),
			widenPorts(low.Line, low.Ports, f.Engine.File)}, f.again()...)
	}
	return []string{"# all ports are already given: which hosts use most of them?", f.natkit("mappings"),
		fmt.Sprintf("# more external addresses: add them to the pool in %s, and apply it. Ask your provider for them", f.Engine.File)}
}

// engineTable is one that the engine can be full of.
type engineTable struct {
	reason, key, what string // of rulefile.Reasons; in limits
	used, most        uint64
}

// judgeEngineTable is conntrack-table-full of the engine's own tables.
func judgeEngineTable(f facts) *verdict {
	e := f.Engine
	if !e.Tracks() {
		return nil
	}
	tables := []engineTable{
		{"sessions-full", "sessions", "table of sessions", e.Sessions, e.SessionsMax},
		{"mappings-full", "mappings", "table of mappings", e.Mappings, e.MappingsMax},
		{"sources-full", "sources", "table of internal hosts", 0, e.SourcesMax},
	}
	slices.SortStableFunc(tables, func(a, b engineTable) int { return cmp.Compare(f.counted(b.reason), f.counted(a.reason)) })
	for _, t := range tables {
		if t.key == "mappings" && e.Lines["mappings"] == 0 {
			t.key = "sessions" // as many as these, unless the file says otherwise
		}
		lost := f.counted(t.reason)
		v := &verdict{impact: float64(lost)}
		switch {
		case lost > 0:
			v.Severity = Critical
			v.Title = fmt.Sprintf("the engine's %s is full (limit %d): %s dropped %s", t.what, t.most, number(lost, "packet"), f.window())
		case t.most > 0 && t.used >= t.most:
			v.Severity = Warning
			v.impact = 1
			v.Title = fmt.Sprintf("the engine's %s is full (%d of %d); nothing was refused %s", t.what, t.used, t.most, f.window())
		default:
			continue
		}
		v.Evidence = append(f.engineEvidence(), f.countedEvidence(t.reason)...)
		v.Why = "Every session needs an entry. While the table is full the first packet of each new session is dropped; existing sessions continue. The size is fixed when the engine starts."
		if want := min(engineGrow*t.most, rulefile.MaxSessions); want > t.most {
			v.Remedy = append(v.Remedy, fmt.Sprintf("# room for %d; this restarts the engine, and its sessions end:", want))
			v.Remedy = append(v.Remedy, f.editLimit(t.key, t.most, want)...)
			v.Remedy = append(v.Remedy, f.again()...)
		} else {
			v.Remedy = []string{"# an engine can have no larger table: give some of the internal hosts to another gateway. Which have most sessions?", f.natkit("subscribers --by sessions")}
		}
		v.Verify = f.look(f.natkit("status"))
		return v
	}
	return nil
}

// left is the fewest ports of a class that an address has.
func left(a *snapshot.EngineAddress) uint64 { return min(a.FreeTCP, a.FreeUDP, a.FreeICMP) }
