// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/fleet"
	"natkit/internal/words/plural"
)

// How much of a fleet is shown as text: the whole of it is in the page and in JSON.
const (
	fleetSightings = 5  // nodes of a cause or difference
	fleetNodes     = 15 // nodes with outliers
	fleetUnread    = 20
	fleetMore      = 12 // further nodes that are named
)

// FleetText writes what is wrong in a fleet, outliers first.
func FleetText(w io.Writer, r *fleet.Report, zone *time.Location, color bool) error {
	p := page{color: color}
	p.text("", "  ", fleetAbout(r, zone))
	for _, part := range fleetParts(r) {
		p.b.WriteString("\n" + p.style(bold, part.title) + "\n")
		for _, c := range part.list {
			p.fleetCause(c, zone)
		}
	}
	if len(r.Causes) == 0 && r.NodeCount > 0 {
		p.b.WriteString("\nNothing wrong was found.\n")
	}
	if len(r.Differences) > 0 {
		p.b.WriteString("\n" + p.style(bold, "Configured otherwise than most") + "\n")
	}
	for _, d := range r.Differences {
		fmt.Fprintf(&p.b, "  %s: %s on %s\n", d.What, fleetValue(d.Most), plural.Count(d.Nodes, "node"))
		for _, line := range fleetOthers(d) {
			p.b.WriteString("    " + line + "\n")
		}
	}
	p.fleetNodes(r)
	if len(r.Unread) > 0 {
		p.b.WriteString("\n" + p.style(bold, "Not read") + "\n")
	}
	for _, u := range r.Unread[:min(len(r.Unread), fleetUnread)] {
		fmt.Fprintf(&p.b, "  %s: %s\n", u.Input, u.Reason)
	}
	if n := len(r.Unread) - fleetUnread; n > 0 {
		fmt.Fprintf(&p.b, "  and %d more\n", n)
	}
	if text := fleetUnjudged(r); text != "" {
		p.b.WriteByte('\n')
		p.text("", "  ", text)
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

// fleetAbout is what was compared, in a sentence or two.
func fleetAbout(r *fleet.Report, zone *time.Location) string {
	if r.NodeCount == 0 {
		return "No node could be read."
	}
	out := plural.Count(r.NodeCount, "node") + " read"
	if n := len(r.Unread); n > 0 {
		out += fmt.Sprintf(", %d not", n)
	}
	if r.Last.IsZero() { // no node says when
		return out + "."
	}
	if r.Last.Sub(r.First) < time.Second {
		return out + "; facts taken at " + r.Last.In(zone).Format(time.DateTime) + "."
	}
	return out + fmt.Sprintf("; facts taken between %s and %s.", r.First.In(zone).Format(time.DateTime), r.Last.In(zone).Format(time.DateTime))
}

// fleetPart is a part of the causes, with its title.
type fleetPart struct {
	title string
	list  []fleet.Cause
}

// fleetParts are the causes of few and of many nodes, where there are both.
func fleetParts(r *fleet.Report) (out []fleetPart) {
	many := slices.IndexFunc(r.Causes, func(c fleet.Cause) bool { return !c.Outlier })
	if many < 0 {
		many = len(r.Causes)
	}
	if many > 0 {
		out = append(out, fleetPart{"On few nodes", r.Causes[:many]})
	}
	if many < len(r.Causes) {
		title := "On many nodes"
		if many == 0 {
			title = "Findings"
		}
		out = append(out, fleetPart{title, r.Causes[many:]})
	}
	return out
}

func (p *page) fleetCause(c fleet.Cause, zone *time.Location) {
	fmt.Fprintf(&p.b, "%s %s on %s: %s\n", p.style(severityColor(c.Severity.String()), strings.ToUpper(c.Severity.String())), c.Code, plural.Count(c.NodeCount, "node"), c.Title)
	for _, s := range c.On[:min(len(c.On), fleetSightings)] {
		where := s.Node
		if s.Namespace != "host" {
			where += ", " + s.Namespace
		}
		fmt.Fprintf(&p.b, "  %s: %s%s\n", where, s.Title, fleetSince(s.Since, zone))
	}
	p.b.WriteString(moreOf("  ", fleetRest(c)))
}

// fleetRest are the nodes of a cause beyond those that are shown.
func fleetRest(c fleet.Cause) (names []string) {
	for _, s := range c.On[min(len(c.On), fleetSightings):] {
		if !slices.Contains(names, s.Node) && !slices.ContainsFunc(c.On[:fleetSightings], func(o fleet.Sighting) bool { return o.Node == s.Node }) {
			names = append(names, s.Node)
		}
	}
	return names
}

// moreOf names some and counts the others, "" for none.
func moreOf(indent string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	out := indent + "also on " + strings.Join(names[:min(len(names), fleetMore)], ", ")
	if n := len(names) - fleetMore; n > 0 {
		out += " and " + plural.Count(n, "more node")
	}
	return out + "\n"
}

func fleetSince(t time.Time, zone *time.Location) string {
	if t.IsZero() {
		return ""
	}
	return ", since " + t.In(zone).Format(time.DateTime)
}

// fleetValue is a value in words; rules may be missing.
func fleetValue(value string) string { return cmp.Or(value, "none") }

// fleetOthers are the other values, each with the nodes that have it.
func fleetOthers(d fleet.Difference) (lines []string) {
	by := map[string][]string{}
	var values []string
	for _, o := range d.Others {
		if by[o.Value] == nil {
			values = append(values, o.Value)
		}
		by[o.Value] = append(by[o.Value], o.Node)
	}
	slices.SortStableFunc(values, func(a, b string) int { return cmp.Compare(len(by[b]), len(by[a])) })
	for _, v := range values[:min(len(values), fleetSightings)] {
		nodes := by[v]
		line := fmt.Sprintf("%s on %s", fleetValue(v), strings.Join(nodes[:min(len(nodes), fleetMore)], ", "))
		if n := len(nodes) - fleetMore; n > 0 {
			line += " and " + plural.Count(n, "more node")
		}
		lines = append(lines, line)
	}
	if n := len(values) - fleetSightings; n > 0 {
		lines = append(lines, "and "+plural.Count(n, "more value"))
	}
	return lines
}

// fleetNodes lists the nodes that differ most from the others.
func (p *page) fleetNodes(r *fleet.Report) {
	list := r.Nodes[:min(len(r.Nodes), fleetNodes)]
	if end := slices.IndexFunc(list, func(n fleet.NodeSummary) bool { return n.Outliers == 0 }); end >= 0 {
		list = list[:end]
	}
	if len(list) == 0 {
		return
	}
	p.b.WriteString("\n" + p.style(bold, "Nodes that differ most") + "\n")
	width := len("NODE")
	for _, n := range list {
		width = max(width, utf8.RuneCountInString(n.Node))
	}
	fmt.Fprintf(&p.b, "  %-*s  %-8s  %8s  %11s  %8s\n", width, "NODE", "WORST", "FINDINGS", "DIFFERENCES", "OUTLIERS")
	for _, n := range list {
		fmt.Fprintf(&p.b, "  %-*s  %-8s  %8d  %11d  %8d\n", width, n.Node, worstOf(n), n.Findings, n.Differences, n.Outliers)
	}
}

func worstOf(n fleet.NodeSummary) string {
	if n.Worst == 0 {
		return "none"
	}
	return n.Worst.String()
}

// fleetUnjudged says how much could not be judged.
func fleetUnjudged(r *fleet.Report) string {
	if len(r.Unjudged) == 0 {
		return ""
	}
	rank := map[string]int{} // of codes of a newer natkit: none
	for i, c := range causes.Catalogue() {
		rank[c.Code] = i - len(causes.Catalogue())
	}
	var parts []string
	for _, code := range slices.SortedFunc(maps.Keys(r.Unjudged), func(a, b string) int { return cmp.Or(cmp.Compare(rank[a], rank[b]), strings.Compare(a, b)) }) {
		parts = append(parts, fmt.Sprintf("%s on %s", code, plural.Count(r.Unjudged[code], "node")))
	}
	return "Not judged, for lack of facts (natkit doctor --from FILE shows which): " + strings.Join(parts, ", ") + "."
}

// FleetHTML writes the same as one page that needs nothing besides itself, with every node of each cause.
func FleetHTML(w io.Writer, r *fleet.Report, zone *time.Location) error {
	const title = "natkit fleet report"
	body := tag("h1", title) + tag("p.dim", text(fleetAbout(r, zone)))
	for _, part := range fleetParts(r) {
		body += tag("h2", text(part.title)) + each(part.list, func(c fleet.Cause) markup { return fleetCauseMarkup(c, zone) })
	}
	if len(r.Causes) == 0 && r.NodeCount > 0 {
		body += tag("p", "Nothing wrong was found.")
	}
	if len(r.Differences) > 0 {
		body += tag("article", tag("h2", "Configured otherwise than most"), scroll("facts", fleetHead("what", "most have", "nodes", "others"), each(r.Differences, func(d fleet.Difference) markup {
			return tag("tr", tag("td", text(d.What)), tag("td", text(fleetValue(d.Most))), tag("td.num", text(fmt.Sprint(d.Nodes))), tag("td", text(strings.Join(fleetOthers(d), "\n"))))
		})))
	}
	if len(r.Nodes) > 0 {
		body += details(len(r.Nodes) <= 50, fmt.Sprintf("Nodes with a finding or a difference: %d of %d", len(r.Nodes), r.NodeCount),
			scroll("facts", fleetHead("node", "worst", "findings", "differences", "outliers", "facts taken", "read from"), each(r.Nodes, func(n fleet.NodeSummary) markup {
				taken := "not known"
				if !n.At.IsZero() {
					taken = n.At.In(zone).Format(time.DateTime)
				}
				return tag("tr", tag("td", text(n.Node)), tag("td", text(worstOf(n))), tag("td.num", text(fmt.Sprint(n.Findings))), tag("td.num", text(fmt.Sprint(n.Differences))),
					tag("td.num", text(fmt.Sprint(n.Outliers))), tag("td", text(taken)), tag("td", text(n.Input)))
			})))
	}
	if len(r.Unread) > 0 {
		body += tag("article.warning", tag("h2", "Not read"), scroll("facts", each(r.Unread, func(u fleet.Unread) markup {
			return tag("tr", tag("td", text(u.Input)), tag("td", text(u.Reason)))
		})))
	}
	body += said("p.dim", fleetUnjudged(r))
	return document{title: title, style: pageStyle + doctorStyle, body: tag("main", body)}.write(w)
}

func fleetHead(names ...string) markup {
	return tag("tr", each(names, func(n string) markup { return tag("th", text(n)) }))
}

func fleetCauseMarkup(c fleet.Cause, zone *time.Location) markup {
	body := severityTag(c.Severity) + " " + tag("code", text(c.Code)) + tag("h2", text(fmt.Sprintf("%s: %s", plural.Count(c.NodeCount, "node"), c.Title)))
	table := scroll("facts", fleetHead("node", "namespace", "severity", "since", "finding"), each(c.On, func(s fleet.Sighting) markup {
		began := "not known"
		if !s.Since.IsZero() {
			began = s.Since.In(zone).Format(time.DateTime)
		}
		return tag("tr", tag("td", text(s.Node)), tag("td", text(s.Namespace)), tag("td", text(s.Severity.String())), tag("td", text(began)), tag("td", text(s.Title)))
	}))
	if len(c.On) > fleetSightings {
		return tag("article."+c.Severity.String(), body, details(false, plural.Count(len(c.On), "finding"), table))
	}
	return tag("article."+c.Severity.String(), body, table)
}
