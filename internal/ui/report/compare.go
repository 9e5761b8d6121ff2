// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"natkit/internal/bench"
)

// Comparison is two saved results figure by figure.
type Comparison struct {
	A    ComparedFile `json:"a"`
	B    ComparedFile `json:"b"`
	Rule string       `json:"method"` // when a change counts as outside the noise
	// Environment names what was different about the machines.
	Environment []EnvironmentChange `json:"environment_changes"`
	Rows        []ComparedFigure    `json:"figures"` // metric by metric, then by their conditions, as these come in A
	OnlyA       []bench.Figure      `json:"only_a"`
	OnlyB       []bench.Figure      `json:"only_b"`
}

// ComparedFile says which result was compared.
type ComparedFile struct {
	File    string    `json:"file"`
	Command string    `json:"command,omitempty"`
	Started time.Time `json:"time,omitzero"`
}

// EnvironmentChange is something that the figures may depend on besides what was
// meant to be changed.
type EnvironmentChange struct {
	Name string `json:"name"`
	A    string `json:"value_a"`
	B    string `json:"value_b"`
}

// ComparedFigure is a figure that both results have, under the same conditions.
type ComparedFigure struct {
	Router string       `json:"router"`
	Metric string       `json:"metric"`
	Params bench.Params `json:"params"`
	A      Spread       `json:"a"`
	B      Spread       `json:"b"`
	// ChangeRatio is B's median over A's, less 1; nil where A's is 0.
	ChangeRatio *float64 `json:"change_ratio"`
	Verdict     Verdict  `json:"verdict"`
	// Better says that the change is to the better, Worse to the worse; neither
	// where it is inside the noise or where the metric has no better.
	Better bool `json:"better"`
	Worse  bool `json:"worse"`
}

// Spread is a figure without its values.
type Spread struct {
	N      int     `json:"n"`
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Label  string  `json:"label,omitempty"`
}

// Verdict says what a change means.
type Verdict string

const (
	VerdictOutside  Verdict = "outside the noise"
	VerdictInside   Verdict = "inside the noise"
	VerdictFew      Verdict = "apart, too few trials" // would be outside with more of them
	VerdictLabelled Verdict = "apart, but labelled"   // what the label says may be the cause
	VerdictSame     Verdict = "the same"
)

// noiseRule is what verdict does, in words.
const noiseRule = "A change is outside the noise when the ranges from the least to the largest trial do not touch, the medians differ by more " +
	"than the wider of the two ranges, neither figure has a label such as noisy or generator-limited, and there are so many trials that ranges without " +
	"overlap come about by chance in at most 5 % of cases: 2 / C(nA+nB, nA), which 4 and 4 trials meet, or 3 and 5. The two runs were " +
	"not interleaved: what changed on the machine between them counts as change, too."

// mostChance is how often ranges of equal routers may be apart by chance.
const mostChance = 0.05

// Compare compares two saved results of the same kind. Figures belong together
// when router, metric and conditions are the same.
func Compare(a, b *Saved) (*Comparison, error) {
	if ka, kb := a.kind(), b.kind(); ka != kb {
		return nil, fmt.Errorf("compare %q with %q: one is of kind %s, the other of kind %s", a.Name, b.Name, ka, kb)
	}
	c := &Comparison{A: a.compared(), B: b.compared(), Rule: noiseRule,
		Environment: environmentChanges(a, b), Rows: []ComparedFigure{}, OnlyA: []bench.Figure{}, OnlyB: []bench.Figure{}}
	inB := map[figureKey]bench.Figure{}
	for _, f := range b.figures() {
		if _, known := inB[keyOf(f)]; !known { // of two under the same conditions the first counts
			inB[keyOf(f)] = rebuilt(f)
		}
	}
	inA := map[figureKey]bool{}
	for _, f := range a.figures() {
		k := keyOf(f)
		if inA[k] {
			continue
		}
		inA[k] = true
		if other, ok := inB[k]; ok && len(f.Values) > 0 && len(other.Values) > 0 {
			c.Rows = append(c.Rows, compareFigures(rebuilt(f), other))
		} else {
			c.OnlyA = append(c.OnlyA, rebuilt(f))
		}
	}
	c.Rows = gathered(gathered(c.Rows, func(r ComparedFigure) string { return conditions(r.Params) }), func(r ComparedFigure) string { return r.Metric })
	matched := map[figureKey]bool{}
	for _, r := range c.Rows {
		matched[figureKey{r.Router, r.Metric, r.Params}] = true
	}
	for _, f := range b.figures() {
		if k := keyOf(f); !matched[k] {
			matched[k] = true
			c.OnlyB = append(c.OnlyB, rebuilt(f))
		}
	}
	return c, nil
}

// gathered puts rows with the same key behind the first of them.
func gathered(rows []ComparedFigure, key func(ComparedFigure) string) []ComparedFigure {
	place := map[string]int{}
	for _, r := range rows {
		if _, ok := place[key(r)]; !ok {
			place[key(r)] = len(place)
		}
	}
	slices.SortStableFunc(rows, func(a, b ComparedFigure) int { return place[key(a)] - place[key(b)] })
	return rows
}

type figureKey struct {
	router, metric string
	params         bench.Params
}

func keyOf(f bench.Figure) figureKey { return figureKey{f.Router, f.Metric, f.Params} }

func (s *Saved) kind() string {
	switch {
	case s.Result != nil:
		return s.Result.Kind
	case s.Demo != nil:
		return "demo"
	}
	return "http"
}

func (s *Saved) compared() ComparedFile {
	c := ComparedFile{File: s.Name}
	if s.Result != nil {
		c.Command, c.Started = s.Result.Command, s.Result.Started
	}
	return c
}

// figures is what a saved result is compared by.
func (s *Saved) figures() []bench.Figure {
	switch {
	case s.Result != nil:
		return s.Result.Figures
	case s.Demo != nil:
		var out []bench.Figure
		for _, r := range httpRuns(s.Demo) {
			out = append(out, httpFigures(r.name, r.http)...)
		}
		for _, a := range s.Demo.Steps {
			out = append(out, a.Figures...)
		}
		return out
	}
	return httpFigures("http", s.HTTP)
}

func environmentChanges(a, b *Saved) []EnvironmentChange {
	values := func(s *Saved) (names []string, of map[string]string) {
		of = map[string]string{}
		if s.Result != nil {
			for _, p := range environment(s.Result.Environment) {
				names, of[p.Name] = append(names, p.Name), p.Value
			}
		} else if s.Demo != nil {
			names, of["kernel"] = append(names, "kernel"), s.Demo.Kernel
		}
		return names, of
	}
	namesA, ofA := values(a)
	namesB, ofB := values(b)
	out := []EnvironmentChange{}
	for _, name := range slices.Concat(namesA, namesB) {
		seen := slices.ContainsFunc(out, func(c EnvironmentChange) bool { return c.Name == name })
		if ofA[name] != ofB[name] && !seen {
			out = append(out, EnvironmentChange{name, ofA[name], ofB[name]})
		}
	}
	return out
}

func compareFigures(a, b bench.Figure) ComparedFigure {
	spread := func(f bench.Figure) Spread { return Spread{len(f.Values), f.Median, f.Min, f.Max, f.Label} }
	c := ComparedFigure{Router: a.Router, Metric: a.Metric, Params: a.Params, A: spread(a), B: spread(b)}
	if a.Median != 0 {
		if r := (b.Median - a.Median) / abs(a.Median); !math.IsInf(r, 0) {
			c.ChangeRatio = &r
		}
	}
	c.Verdict = verdict(c.A, c.B)
	if c.Verdict == VerdictOutside {
		up := b.Median > a.Median
		better := measureOf(a.Metric).better
		c.Better = better > 0 && up || better < 0 && !up
		c.Worse = better != 0 && !c.Better
	}
	return c
}

// verdict is noiseRule.
func verdict(a, b Spread) Verdict {
	apart := a.Max < b.Min || b.Max < a.Min
	widest := max(a.Max-a.Min, b.Max-b.Min)
	switch {
	case a.Min == a.Max && b.Min == b.Max && a.Median == b.Median:
		return VerdictSame
	case !apart || abs(b.Median-a.Median) <= widest:
		return VerdictInside
	case a.Label != "" || b.Label != "":
		return VerdictLabelled
	case chanceApart(a.N, b.N) > mostChance:
		return VerdictFew
	}
	return VerdictOutside
}

// chanceApart is how often the values of two samples from the same source come to
// lie wholly on either side of each other: two of the ways to choose which of the
// values in order belong to the first sample.
func chanceApart(n, m int) float64 {
	chance := 2.0
	for i := 1; i <= n && chance > 1e-9; i++ {
		chance *= float64(i) / float64(m+i)
	}
	return min(chance, 1)
}

// tooFew says that no change of this comparison can be outside the noise, where
// that is so.
func (c *Comparison) tooFew() string {
	enough := func(r ComparedFigure) bool { return chanceApart(r.A.N, r.B.N) <= mostChance }
	if len(c.Rows) == 0 || slices.ContainsFunc(c.Rows, enough) {
		return ""
	}
	return "TOO FEW TRIALS: no figure has enough to distinguish a change from noise; four in each file are enough."
}

// Compared writes a comparison for people.
func Compared(w io.Writer, c *Comparison) error {
	p := &page{}
	p.b.WriteString("A  " + printable(c.A.about()) + "\nB  " + printable(c.B.about()) + "\n")
	for _, e := range c.Environment {
		p.text("Different: ", "  ", printable(fmt.Sprintf("%s: %q -> %q", e.Name, e.A, e.B)))
	}
	routers, conditionsOf := 6, func(f ComparedFigure) string { return conditions(f.Params) }
	for _, r := range c.Rows {
		routers = min(max(routers, len([]rune(r.Router))), 20)
	}
	for i, r := range c.Rows {
		if i == 0 || c.Rows[i-1].Metric != r.Metric {
			p.b.WriteString("\n" + printable(comparedHeading(c, r.Metric)) + "\n")
		}
		if i == 0 || c.Rows[i-1].Metric != r.Metric || conditionsOf(c.Rows[i-1]) != conditionsOf(r) {
			if words := conditionsOf(r); words != "" {
				p.text("  ", "    ", printable(words))
			}
			fmt.Fprintf(&p.b, "    %-*s  %9s  %9s  %8s  %s\n", routers, "router", "A", "B", "change", "n")
		}
		u := c.unit(r.Metric)
		fmt.Fprintf(&p.b, "    %s  %9s  %9s  %8s  %-7s %s\n", padRight(clip(printable(r.Router), routers), routers),
			u.number(r.A.Median), u.number(r.B.Median), r.change(), fmt.Sprintf("%d, %d", r.A.N, r.B.N), printable(r.words()))
	}
	if len(c.Rows) == 0 {
		p.b.WriteString("\nNo figure is in both.\n")
	}
	for _, only := range []struct {
		name    string
		figures []bench.Figure
	}{{"A", c.OnlyA}, {"B", c.OnlyB}} {
		if len(only.figures) > 0 {
			p.b.WriteString("\nOnly in " + only.name + ":\n")
		}
		for _, f := range only.figures {
			p.text("  ", "    ", printable(onlyWords(f)))
		}
	}
	p.b.WriteByte('\n')
	if few := c.tooFew(); few != "" {
		p.text("", "", few)
	}
	p.text("", "", c.Rule)
	_, err := io.WriteString(w, p.b.String())
	return err
}

func (f ComparedFile) about() string {
	out := f.File
	if !f.Started.IsZero() {
		out += ", " + f.Started.UTC().Format("2006-01-02 15:04:05 UTC")
	}
	if f.Command != "" {
		out += ": " + f.Command
	}
	return out
}

// unit is the same for all rows of a metric.
func (c *Comparison) unit(metric string) unit {
	var largest float64
	for _, r := range c.Rows {
		if r.Metric == metric {
			largest = max(largest, abs(r.A.Median), abs(r.B.Median))
		}
	}
	return measureOf(metric).unit(largest)
}

func comparedHeading(c *Comparison, metric string) string {
	s := sheet{Measure: measureOf(metric), Unit: c.unit(metric)}
	return s.heading()
}

// change is in percent, "-" from 0.
func (f ComparedFigure) change() string {
	switch {
	case f.ChangeRatio == nil:
		return "-"
	case abs(*f.ChangeRatio) >= 10:
		return fmt.Sprintf("x %s", significant(*f.ChangeRatio+1))
	}
	return fmt.Sprintf("%+.1f %%", 100**f.ChangeRatio)
}

// words is the verdict, and whether it is good.
func (f ComparedFigure) words() string {
	switch {
	case f.Better:
		return string(f.Verdict) + ", better"
	case f.Worse:
		return string(f.Verdict) + ", worse"
	case f.Verdict == VerdictLabelled:
		labels := []string{f.A.Label, f.B.Label}
		labels = slices.Compact(slices.DeleteFunc(labels, func(l string) bool { return l == "" }))
		return string(f.Verdict) + " " + strings.Join(labels, " and ")
	}
	return string(f.Verdict)
}

func onlyWords(f bench.Figure) string {
	words := f.Router + " " + f.Metric
	if c := conditions(f.Params); c != "" {
		words += " (" + c + ")"
	}
	if len(f.Values) == 0 {
		return words + ": no value"
	}
	return words + ": " + measureOf(f.Metric).unit(f.Median).with(f.Median)
}

// htmlCompared is a comparison on a page.
type htmlCompared struct {
	A, B        string
	Environment []EnvironmentChange
	Metrics     []htmlComparedMetric
	OnlyA       []string
	OnlyB       []string
	TooFew      string
	Rule        string
}

type htmlComparedMetric struct {
	Title  string
	Blocks []htmlBlock
	Table  htmlTable
}

func (c *htmlCompared) markup() markup {
	body := tag("dl", tag("dt", "A"), tag("dd", text(c.A)), tag("dt", "B"), tag("dd", text(c.B)))
	if len(c.Environment) > 0 {
		rows := tag("tr", tag("th"), tag("th", "A"), tag("th", "B"))
		rows += each(c.Environment, func(e EnvironmentChange) markup {
			return tag("tr", tag("th", text(e.Name)), tag("td", text(e.A)), tag("td", text(e.B)))
		})
		body += tag("article", tag("h2", "The machines differ"), scroll("", rows))
	}
	body += said("p.bad", c.TooFew)
	body += each(c.Metrics, func(m htmlComparedMetric) markup {
		return tag("article", tag("h2", text(m.Title)), each(m.Blocks, htmlBlock.markup), m.Table.markup())
	})
	if len(c.Metrics) == 0 {
		body += tag("p", "No figure is in both.")
	}
	for _, only := range []struct {
		title markup
		lines []string
	}{{"Only in A", c.OnlyA}, {"Only in B", c.OnlyB}} {
		if len(only.lines) > 0 {
			body += tag("h3", only.title) + paragraphs(only.lines)
		}
	}
	rule := tag("h2", "Outside the noise")
	if len(c.Metrics) > 0 {
		rule += tag("p", "In the pictures the words and the bar of B are green for a change to the better, red for one to the worse, blue where neither is said, grey where the change is not outside the noise. Bars are medians; whiskers reach from the least to the largest trial.")
	}
	return body + tag("article", rule, tag("p", text(c.Rule)))
}

// ComparedHTML writes a comparison as a page like HTML's.
func ComparedHTML(w io.Writer, c *Comparison) error {
	h := &htmlCompared{A: c.A.about(), B: c.B.about(), Environment: c.Environment, TooFew: c.tooFew(), Rule: c.Rule}
	for _, f := range c.OnlyA {
		h.OnlyA = append(h.OnlyA, onlyWords(f))
	}
	for _, f := range c.OnlyB {
		h.OnlyB = append(h.OnlyB, onlyWords(f))
	}
	at := map[string]int{}
	for _, r := range c.Rows {
		i, ok := at[r.Metric]
		if !ok {
			i = len(h.Metrics)
			at[r.Metric] = i
			h.Metrics = append(h.Metrics, htmlComparedMetric{Title: comparedHeading(c, r.Metric), Table: htmlTable{Open: true,
				Head: []string{"conditions", "router", "change", "verdict", "A", "min to max", "B", "min to max", "n"}}})
		}
		u := c.unit(r.Metric)
		of := func(s Spread) (median, spread string) {
			return u.number(s.Median), u.number(s.Min) + " to " + u.number(s.Max)
		}
		a, spreadA := of(r.A)
		b, spreadB := of(r.B)
		class := ""
		switch {
		case r.Better:
			class = "good"
		case r.Worse:
			class = "bad"
		}
		t := &h.Metrics[i].Table
		t.Rows = append(t.Rows, htmlRow{Cells: []htmlCell{
			{conditions(r.Params), "wrap"}, {r.Router, ""}, {r.change(), "num " + class}, {r.words(), "wrap " + class},
			{a, "num"}, {spreadA, "num"}, {b, "num"}, {spreadB, "num"}, {fmt.Sprintf("%d, %d", r.A.N, r.B.N), "num"}}})
	}
	for metric, i := range at {
		rows := slices.DeleteFunc(slices.Clone(c.Rows), func(r ComparedFigure) bool { return r.Metric != metric })
		for _, b := range blocksOf(rows) {
			words := conditions(b[0].Params)
			plots := c.comparedPlots(b, strings.TrimSuffix(h.Metrics[i].Title+": "+words, ": "))
			h.Metrics[i].Blocks = append(h.Metrics[i].Blocks, htmlBlock{Conditions: words, Plots: markup(plots)})
		}
	}
	page := htmlPage{Title: "Two measurements compared", Sections: []htmlSection{{Title: "Two measurements compared", Compared: h}}}
	return page.write(w)
}
