// SPDX-License-Identifier: Apache-2.0

package tui

// This file shows what natkit itself has up in the namespace: a line of the header, rows of
// the panels of sources, ports and drops, and a panel with all of it.

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/ui/live"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// engineOf is what is up, with its rates; nil where nothing is.
func engineOf(m *live.Moment) (*snapshot.Engine, *live.EngineRates) {
	if m == nil || m.Judged == nil || m.Judged.Engine == nil {
		return nil, nil
	}
	r := m.Judged.EngineRates
	if r == nil {
		r = &live.EngineRates{}
	}
	return m.Judged.Engine, r
}

// The panels' share that is worth a colour.
const (
	nearlyFull = 0.8
	asGoodFull = 0.95
)

func fullStyle(share float64) style {
	switch {
	case share >= asGoodFull:
		return bad
	case share >= nearlyFull:
		return warn
	}
	return plain
}

// engineLine is the header's: what matters most comes first, a narrow screen cuts the rest.
func engineLine(e *snapshot.Engine, r *live.EngineRates) (string, style) {
	st, words := plain, []string{}
	switch {
	case e.Accelerates():
		words = append(words, accelShare(r))
		if name, rate := most(r.SlowPathPerSecond); rate > 0 {
			words = append(words, fmt.Sprintf("most others: %s %s/s", name, short(rate)))
		}
	case e.InNftables():
		words = append(words, plural.Count(e.Rules, "rule")+" in nftables; its sessions are entries of this table")
	default:
		share, part := shareOf(float64(e.Sessions), float64(e.SessionsMax))
		st = fullStyle(part)
		words = append(words, fmt.Sprintf("%d of %d sessions %s", e.Sessions, e.SessionsMax, share),
			fmt.Sprintf("new %s/s", short(r.NewPerSecond)), fmt.Sprintf("dropped %s/s", short(r.Dropped())),
			fmt.Sprintf("translated %s/s", short(r.TranslatedPerSecond)))
	}
	if n := len(e.Drift) + len(e.Problems); n > 0 {
		words = append([]string{plural.Count(n, "problem")}, words...)
		st = max(st, warn)
	}
	if slices.ContainsFunc(e.Drift, func(d snapshot.EngineDrift) bool { return d.Stops }) {
		st = bad
	}
	name := "engine"
	if e.Accelerates() {
		name = "accel"
	}
	return fmt.Sprintf("%-8s%s", name, strings.Join(words, "  ")), st
}

func accelShare(r *live.EngineRates) string {
	if r.FastPath == nil {
		return "no packet arrived that accel could forward"
	}
	return percent.Of(*r.FastPath, 1) + " of packets bypass the stack"
}

// most is the largest of some rates.
func most(rates map[string]float64) (name string, rate float64) {
	for _, n := range byRate(rates) {
		return n, rates[n]
	}
	return "", 0
}

func byRate(rates map[string]float64) []string {
	return slices.SortedFunc(maps.Keys(rates), func(a, b string) int {
		return cmp.Or(cmp.Compare(rates[b], rates[a]), strings.Compare(a, b))
	})
}

// enginePorts are rows of the panel of ports: what is taken of each outside address, in use or
// in hold-down, fullest first.
func enginePorts(t *table, e *snapshot.Engine) {
	type use struct {
		snapshot.EngineAddress
		protocol string
		used     uint64
	}
	var uses []use
	for _, a := range e.Addresses {
		for _, c := range []struct {
			protocol string
			free     uint64
		}{{"tcp", a.FreeTCP}, {"udp", a.FreeUDP}, {"icmp", a.FreeICMP}} {
			if used := a.Given - min(a.Given, c.free); used > 0 {
				uses = append(uses, use{a, c.protocol, used})
			}
		}
	}
	slices.SortStableFunc(uses, func(a, b use) int {
		return cmp.Compare(float64(b.used)/float64(b.Given), float64(a.used)/float64(a.Given))
	})
	for _, u := range uses {
		used, n := number(u.used)
		share, part := shareOf(n, float64(u.Given))
		t.add(portStyle(part), u.Addr.String()+" "+u.protocol, used, n, strconv.FormatUint(u.Given, 10), float64(u.Given), share, part,
			u.protocol, fmt.Sprintf("%d-%d", u.Ports.Min, u.Ports.Max))
	}
}

// enginePanel is all about the engine.
func enginePanel(m *live.Moment) table {
	t := table{title: "engine", empty: "none", columns: []column{{name: "what"}, {name: "now", right: true}, {name: "of", right: true}, {name: "share", right: true}, {name: "meaning", zoom: true}}}
	e, r := engineOf(m)
	if e == nil {
		return t
	}
	t.title = fmt.Sprintf("engine %s, %.0f s", e.Kind, m.Judged.WindowSeconds)
	if e.Accelerates() {
		t.title = fmt.Sprintf("accel, %.0f s", m.Judged.WindowSeconds)
	}
	for _, d := range e.Drift {
		st := warn
		if d.Stops {
			st = bad
		}
		t.add(st, d.What, "", 0.0, "", 0.0, "", 0.0, "changed on the machine since the rules were applied")
	}
	for _, p := range e.Problems {
		t.add(warn, p, "", 0.0, "", 0.0, "", 0.0, "")
	}
	level := func(what string, now, limit uint64, means string) {
		text, n := number(now)
		share, part := shareOf(n, float64(limit))
		t.add(fullStyle(part), what, text, n, strconv.FormatUint(limit, 10), float64(limit), share, part, means)
	}
	rate := func(st style, what string, perSecond float64, means string) {
		t.add(st, what+"/s", short(perSecond), perSecond, "", 0.0, "", 0.0, means)
	}
	switch {
	case e.Accelerates():
		level("flow directions on the fast path", e.Sessions, 2*e.SessionsMax, "")
		rate(plain, "forwarded", r.ForwardedPerSecond, accelShare(r))
		means := map[string]string{}
		for _, reason := range rulefile.AccelReasons {
			means[reason.Name] = reason.Means
		}
		for _, name := range byRate(r.SlowPathPerSecond) {
			rate(plain, name, r.SlowPathPerSecond[name], means[name])
		}
	case e.InNftables():
		for _, rule := range e.RuleList {
			t.add(plain, "rule "+rule.ID, "", 0.0, "", 0.0, "", 0.0, fmt.Sprintf("line %d: %s", rule.Line, rule.Rule))
		}
	default:
		level("sessions", e.Sessions, e.SessionsMax, "limits.sessions")
		level("mappings", e.Mappings, e.MappingsMax, "limits.mappings")
		for i := range e.Pools {
			poolRows(&t, level, &e.Pools[i])
		}
		refusedRows(&t, e)
		rate(plain, "new sessions", r.NewPerSecond, "")
		rate(plain, "translated packets", r.TranslatedPerSecond, "")
		engineReasons(e, m.Judged.WindowSeconds, rate)
	}
	return t
}

// poolRows show how much of a pool is taken.
func poolRows(t *table, level func(what string, now, limit uint64, means string), p *snapshot.EnginePool) {
	means := fmt.Sprintf("%s, %s", plural.Count(int(p.Subscribers), "subscriber"), plural.Count(int(p.Addresses), "address"))
	if p.BlockSize > 0 {
		level("pool "+p.Name+" blocks", p.BlocksUsed, p.BlocksUsed+p.BlocksFree, fmt.Sprintf("%s; blocks of %d ports", means, p.BlockSize))
		return
	}
	if free := min(p.FreeTCP, p.FreeUDP, p.FreeICMP); p.Ports > 0 {
		level("pool "+p.Name+" ports", p.Ports-min(free, p.Ports), p.Ports, means+"; the protocol with fewest ports left")
	}
}

// refusedRows are the subscribers that were refused most in the window.
func refusedRows(t *table, e *snapshot.Engine) {
	for i := range e.Sources {
		if src := &e.Sources[i]; len(src.Refused) > 0 {
			text, n := number(src.AllRefused())
			t.add(bad, "refused: "+src.Name(), text, n, "", 0.0, "", 0.0,
				fmt.Sprintf("%s, %s (%d in hold-down), %s", plural.Count(int(src.Sessions), "session"), plural.Count(int(src.Ports), "port"), src.HoldDown, plural.Count(int(src.Blocks), "block")))
		}
	}
}

// engineReasons are what else became of packets: the dropped ones first.
func engineReasons(e *snapshot.Engine, seconds float64, row func(st style, what string, perSecond float64, means string)) {
	for _, kind := range []string{"dropped", "passed", "counted"} {
		st := plain
		if kind == "dropped" {
			st = bad
		}
		for _, reason := range rulefile.Reasons {
			if n := e.Packets[reason.Name]; reason.Kind == kind && n > 0 && reason.Name != "created" {
				row(st, kind+": "+reason.Name, float64(n)/max(seconds, 0.1), reason.Means)
			}
		}
	}
}
