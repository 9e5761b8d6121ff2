// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"natkit/internal/bench"
	"natkit/internal/words/plural"
)

// Result writes a measurement of routers for people: what was measured on what,
// then a table a metric. The experiment of 1997 has its own form.
func Result(w io.Writer, r *bench.Result) error {
	p := &page{}
	p.result(r)
	_, err := io.WriteString(w, p.b.String())
	return err
}

// kindTitles says what a kind of result measures.
var kindTitles = map[string]string{
	"udp":         "UDP through a NAT router",
	"cps":         "New connections through a NAT router",
	"bulk":        "TCP bulk transfer through a NAT router",
	"rules":       "Cost of the number of rules",
	"ports":       "Exhaustion of a NAT router's external ports",
	"expiry":      "Packet delay while sessions expire",
	"subscribers": "Port blocks and limits of subscribers: cost and fairness",
	"trimming":    "NAT with netfilter whole, trimmed and absent",
}

// Row writes one figure in a line: as it is done, before there is a table.
func Row(f bench.Figure) string {
	m := measureOf(f.Metric)
	what := f.Router + ": " + m.Title
	if c := conditions(f.Params); c != "" {
		what += " (" + c + ")"
	}
	if len(f.Values) == 0 {
		return printable(what + ": no value" + orNothing(f.Label))
	}
	u := m.unit(f.Max)
	spread := ""
	if len(f.Values) > 1 {
		spread = fmt.Sprintf(", %s to %s in %s", u.number(f.Min), u.number(f.Max), plural.Count(len(f.Values), "trial"))
	}
	return printable(fmt.Sprintf("%s: %s%s%s", what, u.with(f.Median), spread, orNothing(f.Label)))
}

// orNothing is a figure's label as an end of its line.
func orNothing(label string) string {
	if label == "" {
		return ""
	}
	return ", " + label
}

// incomplete says that a result is not all that was asked for.
func incomplete(r *bench.Result) string {
	if r.Incomplete == "" {
		return ""
	}
	return "INCOMPLETE: " + r.Incomplete + ". What is missing was not measured, and n is smaller where a series was cut short."
}

func resultTitle(r *bench.Result) string {
	if title := kindTitles[r.Kind]; title != "" {
		return title
	}
	return "Measurement of routers: " + printable(r.Kind)
}

func routerNames(r *bench.Result) []string {
	var names []string
	for _, u := range r.Routers {
		names = append(names, u.Name)
	}
	return names
}

func (p *page) result(r *bench.Result) {
	if isPaper(r) {
		p.paper(r)
		return
	}
	p.b.WriteString(resultTitle(r) + "\n")
	p.text("", "  ", printable(machine(r.Environment)))
	p.text("", "  ", when(r))
	p.text("$ ", "    ", printable(r.Command))
	if words := incomplete(r); words != "" {
		p.text("", "  ", printable(words))
	}
	if len(r.Routers) > 0 {
		p.b.WriteString("\nRouters\n")
		width := 0
		for _, u := range r.Routers {
			width = max(width, utf8.RuneCountInString(u.Name))
		}
		width = min(width, 20)
		for _, u := range r.Routers {
			what := u.Describe
			if u.Unsupported != "" {
				what = "NOT MEASURED: " + u.Unsupported
			}
			p.text(fmt.Sprintf("  %-*s  ", width, printable(u.Name)), strings.Repeat(" ", width+4), printable(what))
		}
	}
	p.sheets(sheetsOf(routerNames(r), r.Figures, r.Published), "router")
	if empty := withoutValues(r); empty != "" {
		p.b.WriteByte('\n')
		p.text("", "  ", "Without a value: "+printable(empty)+".")
	}
	for _, note := range append(labelNotes(r.Figures), r.Notes...) {
		p.b.WriteByte('\n')
		p.text("Note: ", "      ", printable(note))
	}
}

// labelMeanings say in a sentence what labels of figures mean for who reads them.
var labelMeanings = []struct{ label, means string }{
	{"noisy", "other programs used the machine's CPUs, also when trials were repeated"},
	{"generator-limited", "the generator could not reach the offered load, so the router may do better"},
	{"lossy", "packets were lost, so this is the cost of the forwarded ones"},
	{"below range", "it was not met even at the lowest rate tried"},
	{"at the generator's limit", "it was met at the generator's highest rate, so the router may do better"},
}

// labelNotes explain the labels that figures have.
func labelNotes(figures []bench.Figure) (notes []string) {
	for _, m := range labelMeanings {
		if slices.ContainsFunc(figures, func(f bench.Figure) bool { return f.Label == m.label }) {
			notes = append(notes, fmt.Sprintf("%q: %s.", m.label, m.means))
		}
	}
	return notes
}

// sheets writes each sheet as a table; who is what stands in the place of a router.
func (p *page) sheets(sheets []sheet, who string) {
	var sources []string
	for _, s := range sheets {
		p.b.WriteString("\n" + printable(s.heading()) + "\n")
		for _, b := range s.Blocks {
			if b.Conditions != "" {
				p.text("  ", "    ", printable(b.Conditions))
			}
			p.rows(&s, b.Rows, who, &sources)
		}
	}
	for i, source := range sources {
		if i == 0 {
			p.b.WriteByte('\n')
		}
		p.text(fmt.Sprintf("* published elsewhere [%d]: ", i+1), "  ", printable(source))
	}
}

// heading names the metric, its unit and which way is better.
func (s *sheet) heading() string {
	heading := s.Measure.Title
	if s.Unit.Name != "" {
		heading += ", " + s.Unit.Name
	}
	if b := s.Measure.Better(); b != "" {
		heading += " (" + b + ")"
	}
	return heading
}

// rows writes the table of a block. A published row carries the number of its
// source.
func (p *page) rows(s *sheet, rows []row, who string, sources *[]string) {
	names := len(who)
	xs := 0
	for _, r := range rows {
		names = max(names, utf8.RuneCountInString(r.Name)+4*r.theirs())
		if s.Axis != axisNone {
			xs = max(xs, utf8.RuneCountInString(s.Axis.write(r.X)), len(s.Axis))
		}
	}
	names = min(names, 30)
	line := func(x, name, n, median, low, high, ratio, remarks string) {
		var b strings.Builder
		b.WriteString("    ")
		if xs > 0 {
			b.WriteString(padLeft(x, xs) + "  ")
		}
		b.WriteString(padRight(clip(name, names), names))
		fmt.Fprintf(&b, " %4s %9s %9s %9s %6s  %s", n, median, low, high, ratio, remarks)
		p.b.WriteString(strings.TrimRight(b.String(), " ") + "\n")
	}
	line(string(s.Axis), who, "n", "median", "min", "max", "ratio", "to "+printable(clip(s.Base, names)))
	for i, r := range rows {
		x := ""
		if s.Axis != axisNone && (i == 0 || rows[i-1].X != r.X) {
			x = s.Axis.write(r.X)
		}
		name := printable(r.Name)
		n, low, high := fmt.Sprint(r.N), s.Unit.number(r.Min), s.Unit.number(r.Max)
		remarks := printable(r.remarks())
		if r.PublishedBy != "" {
			k := slices.Index(*sources, r.PublishedBy)
			if k < 0 {
				k = len(*sources)
				*sources = append(*sources, r.PublishedBy)
			}
			name = clip(name, names-2) + " *"
			n, low, high = "", "", ""
			remarks = strings.Replace(remarks, "published elsewhere", fmt.Sprintf("[%d]", k+1), 1)
		}
		line(x, name, n, s.Unit.number(r.Median), low, high, ratio(r.Ratio), remarks)
	}
}

// ratio writes a ratio.
func ratio(v float64) string {
	switch {
	case v == 0:
		return "-"
	case abs(v) >= 100:
		return fmt.Sprintf("%.0f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// machine says what the figures depend on, in a line.
func machine(e bench.Environment) string {
	var words []string
	add := func(ok bool, format string, args ...any) {
		if ok {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	add(e.Kernel != "", "Linux %s", e.Kernel)
	add(e.CPU != "", "%s", e.CPU)
	add(e.CPUs != 0, "%s", plural.Count(e.CPUs, "CPU"))
	add(e.MemoryBytes != 0, "%.1f GiB", float64(e.MemoryBytes)/(1<<30))
	add(e.Hypervisor, "virtual machine")
	add(e.Natkit != "", "natkit %s", e.Natkit)
	return strings.Join(words, ", ")
}

func when(r *bench.Result) string {
	if r.Started.IsZero() {
		return "took " + seconds(r.Seconds)
	}
	return r.Started.UTC().Format("2006-01-02 15:04:05 UTC") + ", took " + seconds(r.Seconds)
}

// withoutValues names the figures that no trial gave a value for.
func withoutValues(r *bench.Result) string {
	var names []string
	for _, f := range r.Figures {
		if len(f.Values) > 0 {
			continue
		}
		name := f.Router + " " + f.Metric
		if f.Label != "" {
			name += " (" + f.Label + ")"
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, "; ")
}

// clip shortens a text to so many characters.
func clip(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:max(n-1, 0)]) + "…"
}

func padRight(s string, n int) string {
	return s + strings.Repeat(" ", max(n-utf8.RuneCountInString(s), 0))
}

func padLeft(s string, n int) string {
	return strings.Repeat(" ", max(n-utf8.RuneCountInString(s), 0)) + s
}
