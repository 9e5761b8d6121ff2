// SPDX-License-Identifier: Apache-2.0

package tui

// This file makes the panels' rows of what is known.

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/ui/live"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// The panels, in the order of the key tab.
const (
	panelFindings = iota
	panelSources
	panelDestinations
	panelFlows
	panelPorts
	panelDrops
	panelStates
	panelCPUs
	panelEngine // only where natkit's own is up
	panels
)

// panels is how many there are now.
func (s *state) panels() int {
	if e, _ := engineOf(s.shown); e == nil {
		return panelEngine
	}
	return panels
}

// panel makes the table of a panel; zoomed is whether it has the screen for itself.
func (s *state) panel(n int, zoomed bool, width int) table {
	m := s.shown
	switch n {
	case panelFindings:
		if zoomed {
			return s.findingsText(width)
		}
		return s.findingsList()
	case panelSources:
		return sources(m)
	case panelDestinations:
		return talkers("destinations", m, func(t *snapshot.Table) []snapshot.Talker { return t.Destinations })
	case panelFlows:
		return flowRates(m)
	case panelPorts:
		return portUse(m)
	case panelDrops:
		return s.dropRows()
	case panelStates:
		return states(m)
	case panelEngine:
		return enginePanel(m)
	}
	return processors(m)
}

func number(n uint64) (string, float64) { return strconv.FormatUint(n, 10), float64(n) }

func shareOf(part, whole float64) (string, float64) {
	if whole <= 0 {
		return "-", -1
	}
	return percent.Of(part/whole, 1), part / whole
}

// add appends a row of texts and numbers; a number comes as its text and its value.
func (t *table) add(st style, cells ...any) {
	r := row{style: st}
	for i := 0; i < len(cells); i++ {
		r.cells = append(r.cells, cells[i].(string))
		value := math.NaN()
		if len(r.cells) <= len(t.columns) && t.columns[len(r.cells)-1].right {
			i++
			value = cells[i].(float64)
		}
		r.nums = append(r.nums, value)
	}
	t.rows = append(t.rows, r)
}

// tableOf is the last dump; why says why there is none.
func tableOf(m *live.Moment) (t *snapshot.Table, why string) {
	switch {
	case m == nil || m.Judged == nil:
		return nil, "reading ..."
	case m.Judged.Table != nil:
		return m.Judged.Table, "none"
	}
	for _, c := range m.Judged.Unseen {
		if c.Name == snapshot.CanConntrackDump {
			return nil, "table not read: " + c.Reason
		}
	}
	return nil, "table not read"
}

func talkers(title string, m *live.Moment, of func(*snapshot.Table) []snapshot.Talker) table {
	t := table{title: title, columns: []column{{name: "address"}, {name: "entries", right: true}, {name: "share", right: true}, {name: "unreplied", right: true, zoom: true}}}
	dump, why := tableOf(m)
	t.empty = why
	if dump == nil {
		return t
	}
	for _, r := range of(dump) {
		entries, n := number(r.Entries)
		share, part := shareOf(float64(r.Entries), float64(dump.Entries))
		unreplied, u := number(r.Unreplied)
		t.add(plain, r.Addr.String(), entries, n, share, part, unreplied, u)
	}
	return t
}

// sources are those of the table, below those of the eBPF engine, whose sessions are not in it.
func sources(m *live.Moment) table {
	t := talkers("sources", m, func(t *snapshot.Table) []snapshot.Talker { return t.Sources })
	e, _ := engineOf(m)
	if !e.Tracks() {
		return t
	}
	tracked := t.rows
	t.columns = slices.Insert(t.columns, 1, column{name: "in"})
	t.rows = nil
	sources := slices.SortedStableFunc(slices.Values(e.Sources), func(a, b snapshot.EngineSource) int { return cmp.Compare(b.Sessions, a.Sessions) })
	for _, src := range sources {
		sessions, n := number(src.Sessions)
		share, part := shareOf(n, float64(e.Sessions))
		t.add(plain, src.Name(), "engine", sessions, n, share, part, "", 0.0)
	}
	for _, r := range tracked {
		r.cells, r.nums = slices.Insert(r.cells, 1, "kernel"), slices.Insert(r.nums, 1, math.NaN())
		t.rows = append(t.rows, r)
	}
	return t
}

// flowRates are the flows that carry most, of the table and of the eBPF engine.
func flowRates(m *live.Moment) table {
	t := table{title: "busiest flows", columns: []column{{name: "flow"}, {name: "bytes/s", right: true}, {name: "packets/s", right: true, zoom: true}, {name: "in", zoom: true}}, empty: "reading ..."}
	if m == nil || m.Judged == nil {
		return t
	}
	t.empty = cmp.Or(m.Judged.FlowsNote, "no flow carried a packet")
	if m.Judged.FlowsNote != "" {
		t.title += " (" + m.Judged.FlowsNote + ")"
	}
	for _, f := range m.Judged.TopFlows {
		in := "kernel"
		if f.Engine {
			in = "engine"
		}
		t.add(plain, f.Protocol+" "+f.Source.String()+"→"+f.Destination.String(), short(f.BytesPerSecond), f.BytesPerSecond, short(f.PacketsPerSecond), f.PacketsPerSecond, in)
	}
	if len(t.rows) == 0 {
		t.title = "busiest flows"
	}
	return t
}

func portStyle(share float64) style {
	switch {
	case share >= 0.9:
		return bad
	case share >= 0.7:
		return warn
	}
	return plain
}

func portUse(m *live.Moment) table {
	t := table{title: "SNAT ports", columns: []column{{name: "external→destination"}, {name: "used", right: true}, {name: "of", right: true, zoom: true},
		{name: "share", right: true}, {name: "proto", zoom: true}, {name: "ports seen", zoom: true}}}
	dump, why := tableOf(m)
	t.empty = why
	if e, _ := engineOf(m); e != nil {
		enginePorts(&t, e)
	}
	if dump == nil {
		return t
	}
	for _, u := range m.Judged.SNATPorts {
		used, n := number(u.Used)
		share, part := shareOf(float64(u.Used), float64(u.Ports))
		t.add(portStyle(part), u.Outside.String()+"→"+u.Dest.String(), used, n, strconv.Itoa(u.Ports), float64(u.Ports), share, part,
			u.Protocol, fmt.Sprintf("%d-%d", u.MinPort, u.MaxPort))
	}
	return t
}

// dropRows are the drops of the last intervals, by cause.
func (s *state) dropRows() table {
	t := table{title: fmt.Sprintf("drops, %.0f s", s.dropSeconds()), empty: "none",
		columns: []column{{name: "cause"}, {name: "packets", right: true}, {name: "/s", right: true}, {name: "place", zoom: true}, {name: "interface", zoom: true}}}
	if e, r := engineOf(s.shown); e != nil {
		for _, name := range byRate(r.DroppedPerSecond) {
			packets, n := number(e.Packets[name])
			t.add(bad, name, packets, n, short(r.DroppedPerSecond[name]), r.DroppedPerSecond[name], "natkit's engine", "")
		}
	}
	if s.shown != nil && s.shown.Drops == nil {
		t.empty = "not seen"
		return t
	}
	type key struct{ cause, place, dev string }
	counts := map[key]uint64{}
	var lost uint64
	for _, d := range s.drops {
		lost += d.drops.LostEvents
		for _, r := range d.drops.Rows {
			if r.Benign {
				continue
			}
			place, _, _ := strings.Cut(r.Location, "+")
			counts[key{cmp.Or(string(r.Cause), strings.ToLower(r.Reason)), place, r.Interface}] += r.Count
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(counts), func(a, b key) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a.cause, b.cause), strings.Compare(a.place, b.place))
	}) {
		packets, n := number(counts[k])
		rate := n / max(s.dropSeconds(), 0.1)
		t.add(bad, k.cause, packets, n, short(rate), rate, k.place, k.dev)
	}
	if lost > 0 {
		packets, n := number(lost)
		t.add(warn, "cause unknown", packets, n, "", 0.0, "", "")
	}
	return t
}

func (s *state) dropSeconds() float64 {
	sum := 0.0
	for _, d := range s.drops {
		sum += d.seconds
	}
	return sum
}

func states(m *live.Moment) table {
	t := table{title: "states", few: true, columns: []column{{name: "state"}, {name: "entries", right: true}, {name: "share", right: true}}}
	dump, why := tableOf(m)
	t.empty = why
	if dump == nil {
		return t
	}
	add := func(rows map[string]uint64, prefix string) {
		for _, name := range slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
			return cmp.Or(cmp.Compare(rows[b], rows[a]), strings.Compare(a, b))
		}) {
			entries, n := number(rows[name])
			share, part := shareOf(n, float64(dump.Entries))
			t.add(plain, prefix+name, entries, n, share, part)
		}
	}
	add(dump.ByState, "")
	others := maps.Clone(dump.ByProtocol)
	delete(others, "tcp") // told by its states
	add(others, "")
	add(dump.ByStatus, "")
	return t
}

func processors(m *live.Moment) table {
	t := table{title: "CPUs", few: true, columns: []column{{name: "cpu"}, {name: "busy", right: true}, {name: "softirq", right: true}, {name: "packets/s", right: true},
		{name: "steal", right: true, zoom: true}, {name: "squeezed", right: true, zoom: true}, {name: "backlog drops", right: true, zoom: true}}, empty: "not seen"}
	if m == nil {
		return t
	}
	for _, c := range m.CPUs {
		share := func(v float64) string { return percent.Of(v, 0) }
		rate := float64(c.Packets) / max(m.Seconds, 0.1)
		st := plain
		switch {
		case c.BacklogDropped > 0 || c.Softirq > 0.9:
			st = bad
		case c.Softirq > 0.7:
			st = warn
		}
		squeezed, sq := number(c.Squeezed)
		dropped, d := number(c.BacklogDropped)
		t.add(st, strconv.Itoa(c.Number), share(c.Busy), c.Busy, share(c.Softirq), c.Softirq, short(rate), rate,
			share(c.Steal), c.Steal, squeezed, sq, dropped, d)
	}
	return t
}

func severityStyle(s causes.Severity) style {
	switch s {
	case causes.Critical:
		return bad
	case causes.Warning:
		return warn
	}
	return plain
}

func (s *state) findingsList() table {
	t := table{title: "findings", text: true, columns: []column{{name: "finding"}}, empty: "judging the first window ..."}
	if s.shown == nil || s.shown.Judged == nil {
		return t
	}
	j := s.shown.Judged
	t.title = fmt.Sprintf("findings of %.0f s until %s", j.WindowSeconds, j.At.Local().Format("15:04:05"))
	t.empty = "nothing wrong was found"
	if n := len(j.Unseen); n > 0 {
		which := "enter shows which"
		if s.still {
			which = "natkit doctor shows which"
		}
		t.empty = fmt.Sprintf("nothing wrong was found; %s could not be read (%s)", plural.Count(n, "source"), which)
	}
	for _, f := range j.Findings {
		t.add(severityStyle(f.Severity), fmt.Sprintf("%-8s %s: %s", strings.ToUpper(f.Severity.String()), f.Code, f.Title))
	}
	return t
}

// findingsText is all about the findings, as the doctor tells it.
func (s *state) findingsText(width int) table {
	t := s.findingsList()
	t.rows = nil
	add := func(st style, indent, text string) {
		for _, line := range wrap(text, width-len(indent)) {
			t.add(st, indent+line)
		}
	}
	if s.shown == nil || s.shown.Judged == nil {
		return t
	}
	for _, f := range s.shown.Judged.Findings {
		add(severityStyle(f.Severity), "", fmt.Sprintf("%s [%s] %s", strings.ToUpper(f.Severity.String()), f.Code, f.Title))
		for _, e := range f.Evidence {
			add(plain, "  ", fmt.Sprintf("%s: %s (%s)", e.What, e.Value, e.Source))
		}
		add(dim, "  ", f.Why)
		if len(f.Remedy) > 0 {
			add(plain, "  ", "remedy:")
		}
		for _, c := range f.Remedy {
			for _, line := range pasteable(c, width-4) {
				t.add(good, "    "+line)
			}
		}
		if len(f.Verify) > 0 {
			add(plain, "  ", "verify:")
		}
		for _, c := range f.Verify {
			for _, line := range pasteable(c, width-4) {
				t.add(plain, "    "+line)
			}
		}
		for _, c := range f.Consequences {
			add(plain, "  ", fmt.Sprintf("follows from it: [%s] %s", c.Code, c.Title))
		}
		add(plain, "", "")
	}
	if len(s.shown.Judged.Findings) == 0 {
		add(plain, "", "Nothing wrong was found.")
	}
	for _, c := range s.shown.Judged.Unseen {
		add(dim, "", fmt.Sprintf("not seen: %s: %s", c.Name, c.Reason))
	}
	for _, u := range s.shown.Unseen {
		add(dim, "", "not seen: "+u)
	}
	return t
}

// pasteable breaks a line of a cure so that each part does in a shell what the whole does: a remark
// stays a remark, and a command goes on behind a backslash. One with quotes stays whole.
func pasteable(line string, width int) []string {
	if text, remark := strings.CutPrefix(line, "#"); remark {
		lines := wrap(text, width-2)
		for i := range lines {
			lines[i] = "# " + lines[i]
		}
		return lines
	}
	if len(line) <= width || strings.ContainsAny(line, "'\"\\") {
		return []string{line}
	}
	lines := wrap(line, width-2)
	for i := range lines[:len(lines)-1] {
		lines[i] += " \\"
	}
	return lines
}

// wrap breaks a text at blanks into lines of at most width; a longer word stays
// whole and is cut by the screen.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

// short writes a rate.
func short(v float64) string {
	switch {
	case v >= 1e7:
		return fmt.Sprintf("%.0fM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.0fk", v/1e3)
	case v >= 10 || v == 0:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}
