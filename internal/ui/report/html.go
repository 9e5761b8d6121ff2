// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/internal/bench"
	"natkit/internal/scenario"
	"natkit/internal/words/plural"
)

//go:embed page.css
var pageStyle string

//go:embed copy.js
var copyScript string

// HTML writes saved results as one page that needs nothing besides itself: no
// network, and no script but for copying tables.
func HTML(w io.Writer, saved []*Saved) error {
	page := htmlPage{Title: "natkit report"}
	for _, s := range saved {
		page.Sections = append(page.Sections, s.section())
	}
	if len(page.Sections) == 1 {
		page.Title = page.Sections[0].Title
	}
	return page.write(w)
}

func (p *htmlPage) write(w io.Writer) error {
	body := each(p.Sections, htmlSection.markup)
	if len(p.Sections) > 1 {
		body = tag("h1", text(p.Title)) + body
	}
	return document{title: p.Title, style: pageStyle, script: copyScript, body: tag("main", body)}.write(w)
}

// htmlPage is a page about results.
type htmlPage struct {
	Title    string
	Sections []htmlSection
}

type htmlSection struct {
	Title, File   string
	About         []string // lines below the title
	Command       string   // that made the result
	Routers       []bench.RouterUse
	Cards         []htmlCard
	Steps         []htmlStep
	Sources       []string
	WithoutValues string
	Notes         []string
	Environment   []htmlPair
	Compared      *htmlCompared
}

// htmlCard is a metric: plots, then a table of everything in them.
type htmlCard struct {
	Title  string
	Text   string // below the title
	Blocks []htmlBlock
	Table  htmlTable
}

type htmlBlock struct {
	Conditions string
	Plots      markup
	Legend     []htmlLegend
	Labelled   string // what bars say beside themselves, and curves don't
}

type htmlLegend struct {
	Swatch markup
	Name   string
}

type htmlTable struct {
	Open bool
	Head []string
	Rows []htmlRow
}

// Size is how many rows it has, in words.
func (t htmlTable) Size() string { return plural.Count(len(t.Rows), "row") }

// Heads are the heads, above numbers as these are.
func (t htmlTable) Heads() (out []htmlCell) {
	for i, h := range t.Head {
		class := ""
		if len(t.Rows) > 0 && strings.HasPrefix(t.Rows[0].Cells[i].Class, "num") {
			class = "num"
		}
		out = append(out, htmlCell{h, class})
	}
	return out
}

type htmlRow struct {
	Theirs bool
	Cells  []htmlCell
}

type htmlCell struct {
	Text  string
	Class string // of the style sheet: num, wrap, good, bad, theirs
}

type htmlPair struct{ Name, Value string }

type htmlStep struct {
	Name, Shows, Command, RuleFile string
	Findings                       []string
	Changes                        []string
	NotRun                         string
}

func (s htmlSection) markup() markup {
	body := tag("h1", text(s.Title))
	body += each(s.About, func(line string) markup { return said("p.dim", line) })
	body += command(s.Command)
	if s.Compared != nil {
		body += s.Compared.markup()
	}
	if len(s.Routers) > 0 {
		body += tag("dl", each(s.Routers, func(r bench.RouterUse) markup {
			about := text(r.Describe)
			if r.Unsupported != "" {
				about = tag("span.bad", "not measured:") + " " + text(r.Unsupported)
			}
			return tag("dt", text(r.Name)) + tag("dd", about)
		}))
	}
	body += each(s.Steps, htmlStep.markup) + each(s.Cards, htmlCard.markup) + s.notes()
	if len(s.Environment) > 0 {
		body += tag("article", tag("h2", "Environment"), scroll("", each(s.Environment, func(p htmlPair) markup {
			return tag("tr", tag("th", text(p.Name)), tag("td", text(p.Value)))
		})))
	}
	if s.File != "" {
		body += tag("p.dim", "Made from ", text(s.File), ".")
	}
	return tag("section", body)
}

// notes are what must be known of all cards.
func (s htmlSection) notes() markup {
	if len(s.Sources)+len(s.Notes) == 0 && s.WithoutValues == "" {
		return ""
	}
	body := tag("h2", "Notes")
	if len(s.Cards) > 0 {
		body += tag("p", "Bars, the numbers beside them, and points are medians; whiskers reach from the least to the largest of the n trials.")
	}
	body += each(s.Sources, func(source string) markup {
		return tag("p", "Outlined, dashed and in italics: published elsewhere, not measured here: ", text(source), ".")
	})
	body += paragraphs(s.Notes)
	if s.WithoutValues != "" {
		body += tag("p", "Without a value: ", text(s.WithoutValues), ".")
	}
	return tag("article", body)
}

// command is what was typed.
func command(c string) markup {
	if c == "" {
		return ""
	}
	return tag("pre", "$ ", text(c))
}

func (a htmlStep) markup() markup {
	body := tag("h3", text(a.Name)) + said("p", a.Shows) + command(a.Command) + said("pre", a.RuleFile)
	for _, part := range []struct {
		name  markup
		lines []string
	}{{"the load was not run", []string{a.NotRun}}, {"found", a.Findings}, {"changed", a.Changes}} {
		body += each(part.lines, func(line string) markup {
			if line == "" {
				return ""
			}
			return tag("p", tag("b", part.name), " ", text(line))
		})
	}
	return body
}

func (c htmlCard) markup() markup {
	return tag("article", tag("h2", text(c.Title)), said("p", c.Text), each(c.Blocks, htmlBlock.markup), c.Table.markup())
}

func (b htmlBlock) markup() markup {
	legend := each(b.Legend, func(l htmlLegend) markup { return tag("li", l.Swatch, text(l.Name)) })
	if legend != "" {
		legend = tag("ul.legend", legend)
	}
	return tag("figure", said("figcaption", b.Conditions), legend, b.Plots, said("figcaption", b.Labelled))
}

func (t htmlTable) markup() markup {
	rows := tag("tr", each(t.Heads(), func(c htmlCell) markup { return tag("th."+c.Class, text(c.Text)) }))
	rows += each(t.Rows, func(r htmlRow) markup {
		name := "tr"
		if r.Theirs {
			name = "tr.theirs"
		}
		return tag(name, each(r.Cells, func(c htmlCell) markup { return tag("td."+c.Class, text(c.Text)) }))
	})
	copyButton := element("button", []attribute{{"class", "copy"}, {"hidden", ""}}, "copy as TSV")
	return details(t.Open, "Table, "+t.Size(), scroll("data", rows), copyButton)
}

func (s *Saved) section() htmlSection {
	var out htmlSection
	switch {
	case s.Result != nil:
		out = resultSection(s.Result)
	case s.Demo != nil:
		out = demoSection(s.Demo)
	default:
		out = httpSection(s.HTTP)
	}
	out.File = s.Name
	return out
}

// aboutResult are the lines below a result's title.
func aboutResult(r *bench.Result) []string {
	about := []string{machine(r.Environment), when(r)}
	if words := incomplete(r); words != "" {
		about = append(about, words)
	}
	return about
}

func resultSection(r *bench.Result) htmlSection {
	out := htmlSection{
		Title:         resultTitle(r),
		About:         aboutResult(r),
		Command:       r.Command,
		Routers:       r.Routers,
		WithoutValues: withoutValues(r),
		Notes:         append(labelNotes(r.Figures), r.Notes...),
		Environment:   environment(r.Environment),
	}
	if isPaper(r) {
		out.paperCards(r)
	} else {
		out.cards(sheetsOf(routerNames(r), r.Figures, r.Published), "router")
	}
	return out
}

func demoSection(d *scenario.DemoResult) htmlSection {
	out := htmlSection{
		Title:   "A published port that collapses under load, and its cure",
		About:   []string{"Linux " + d.Kernel, fmt.Sprintf("case of site %d, cause made: %s", d.Site, d.Fault)},
		Command: d.Command,
		Environment: []htmlPair{
			{"kernel", d.Kernel},
			{"nf_conntrack_max before and after", fmt.Sprintf("%d, %d", d.Before.ConntrackMax, d.After.ConntrackMax)},
			{"nf_conntrack_buckets before and after", fmt.Sprintf("%d, %d", d.Before.ConntrackBuckets, d.After.ConntrackBuckets)},
		},
	}
	if d.FaultReason != "" {
		out.Notes = append(out.Notes, "The collapse was not caused by a full table: "+d.FaultReason+".")
	}
	if d.Restored {
		out.Notes = append(out.Notes, "Everything was restored: the lab was removed, and the host-wide values were as before.")
	}
	for _, l := range d.Left {
		out.Notes = append(out.Notes, "Left behind: "+l)
	}
	out.Notes = append(out.Notes, "Each step ran once: its bars have no spread. Loads shown side by side ran in turns.")
	for _, a := range d.Steps {
		step := htmlStep{Name: a.Name, Shows: a.Shows, Command: a.Command, RuleFile: a.RuleFile, NotRun: a.NotRun}
		for _, f := range a.Findings {
			step.Findings = append(step.Findings, fmt.Sprintf("%s %s: %s", f.Severity, f.Code, f.Title))
		}
		for _, c := range a.Changes {
			step.Changes = append(step.Changes, fmt.Sprintf("%s: %s -> %s", c.Setting, c.Old, c.New))
		}
		out.Steps = append(out.Steps, step)
	}
	steps, sideBySide := demoSheets(d, true)
	out.cards(steps, "step")
	out.cards(sideBySide, "NAT")
	return out
}

func httpSection(h *bench.HTTPResult) htmlSection {
	out := htmlSection{
		Title: "HTTP load on " + h.URL,
		About: []string{
			fmt.Sprintf("%s, %s at a time; %d completed, %d failed in %s: %s requests/s", plural.Count(h.Requests, "request"), plural.Count(h.Concurrency, "connection"),
				h.Completed, h.Failed.Sum(), seconds(h.Seconds), significant(h.RequestsPerSecond)),
		},
		Notes: append(httpNotes(h), "One run: the bars have no spread."),
	}
	if h.Stopped != "" {
		out.Notes = append(out.Notes, "Stopped early: "+h.Stopped)
	}
	for _, f := range h.FailureList() {
		out.Notes = append(out.Notes, fmt.Sprintf("%d failed: %s", f.Count, f.Text))
	}
	if h.Completed <= 0 {
		return out
	}
	var times []bench.Figure
	for _, t := range timesOf(h) {
		f := bench.NewFigure(t.Name, "part_of_request_ms", bench.Params{}, t.Min, t.Median, t.Max)
		times = append(times, f)
	}
	parts := sheetsOf(nil, times, nil)[0]
	parts.Measure.Title = "Connection times: median, least and longest"
	for i := range parts.Blocks[0].Rows {
		r := &parts.Blocks[0].Rows[i]
		r.N, r.Ratio = int(h.Completed), 0
	}
	parts.Base = "" // parts of one thing are no rivals
	sheets := []sheet{parts}
	if p := percentileSheet([]httpRun{{"requests", h, nil}}); len(p.Blocks[0].Rows) > 0 {
		sheets = append(sheets, p)
	}
	out.cards(sheets, "part")
	return out
}

// cards adds a card a sheet; who is what stands in the place of a router.
func (out *htmlSection) cards(sheets []sheet, who string) {
	for _, s := range sheets {
		card := htmlCard{Title: s.heading(), Table: s.table(who)}
		for i := range s.Blocks {
			b := &s.Blocks[i]
			if slices.ContainsFunc(b.Rows, func(r row) bool { return r.theirs() == 0 }) {
				card.Blocks = append(card.Blocks, htmlBlock{b.Conditions, markup(s.plots(b)), s.legend(b), s.labelled(b)})
			} else { // nothing that the published figures could be compared with
				card.Blocks = append(card.Blocks, htmlBlock{Conditions: b.Conditions, Labelled: "natkit measured nothing here: the published figures are in the table."})
			}
			for _, r := range b.Rows {
				if r.PublishedBy != "" && !slices.Contains(out.Sources, r.PublishedBy) {
					out.Sources = append(out.Sources, r.PublishedBy)
				}
			}
		}
		out.Cards = append(out.Cards, card)
	}
}

// legend names the curves of a block; bars have their names beside them.
func (s *sheet) legend(b *block) []htmlLegend {
	if s.Axis == axisNone {
		return nil
	}
	rows := slices.Clone(b.Rows)
	slices.SortStableFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.theirs(), b.theirs()), cmp.Compare(a.Series, b.Series))
	})
	var out []htmlLegend
	for _, r := range rows {
		name := r.Name
		if r.PublishedBy != "" {
			name += ", published elsewhere"
		}
		if !slices.ContainsFunc(out, func(l htmlLegend) bool { return l.Name == name }) {
			out = append(out, htmlLegend{markup(swatch(r.Series, r.PublishedBy != "")), name})
		}
	}
	return out
}

// labelled counts the labels of the points on curves.
func (s *sheet) labelled(b *block) string {
	if s.Axis == axisNone {
		return ""
	}
	var words []string
	of := map[string]int{}
	for _, r := range b.Rows {
		if r.Label == "" {
			continue
		}
		if of[r.Label]++; of[r.Label] == 1 {
			words = append(words, r.Label)
		}
	}
	for i, label := range words {
		words[i] = fmt.Sprintf("%d %s", of[label], label)
	}
	if len(words) == 0 {
		return ""
	}
	return fmt.Sprintf("Labels, of %d points: %s. The table shows which.", len(b.Rows), strings.Join(words, ", "))
}

// table is a sheet as a table that stands for itself when it is copied: each row
// has its conditions, and the unit is in the head.
func (s *sheet) table(who string) htmlTable {
	t := htmlTable{}
	several := len(s.Blocks) > 1
	if several {
		t.Head = append(t.Head, "conditions")
	}
	if s.Axis != axisNone {
		t.Head = append(t.Head, string(s.Axis))
	}
	of := ""
	if s.Unit.Name != "" {
		of = ", " + s.Unit.Name
	}
	t.Head = append(t.Head, who, "n", "median"+of, "min", "max", strings.TrimSpace("ratio to "+s.Base), "remarks")
	for _, b := range s.Blocks {
		for _, r := range b.Rows {
			var cells []htmlCell
			if several {
				cells = append(cells, htmlCell{b.Conditions, "wrap"})
			}
			if s.Axis != axisNone {
				cells = append(cells, htmlCell{s.Axis.write(r.X), "num"})
			}
			n, low, high := fmt.Sprint(r.N), s.Unit.number(r.Min), s.Unit.number(r.Max)
			if r.PublishedBy != "" {
				n, low, high = "", "", ""
			}
			by := ""
			if r.Ratio != 0 {
				by = ratio(r.Ratio)
			}
			cells = append(cells, htmlCell{Text: r.Name})
			for _, number := range []string{n, s.Unit.number(r.Median), low, high, by} {
				cells = append(cells, htmlCell{number, "num"})
			}
			cells = append(cells, htmlCell{r.remarks(), "wrap"})
			t.Rows = append(t.Rows, htmlRow{r.PublishedBy != "", cells})
		}
	}
	t.Open = len(t.Rows) <= 16
	return t
}

// environment is all of it, name by name.
func environment(e bench.Environment) []htmlPair {
	var out []htmlPair
	add := func(name, value string) {
		if value != "" && value != "0" {
			out = append(out, htmlPair{name, value})
		}
	}
	add("natkit", e.Natkit)
	add("kernel", e.Kernel)
	add("processor", e.CPU)
	add("CPUs", fmt.Sprint(e.CPUs))
	if e.MemoryBytes > 0 {
		add("memory", fmt.Sprintf("%.1f GiB", float64(e.MemoryBytes)/(1<<30)))
	}
	if e.Hypervisor {
		add("virtual machine", "yes: other machines may share its CPUs")
	}
	for _, group := range []struct {
		name   string
		values map[string]string
	}{{"mitigation", e.Mitigations}, {"setting", e.Settings}, {"offloads", e.Offloads}, {"version", e.Versions}} {
		for _, name := range sortedKeys(group.values) {
			add(group.name+" "+name, group.values[name])
		}
	}
	return out
}

func sortedKeys(m map[string]string) []string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	slices.SortFunc(names, strings.Compare)
	return names
}
