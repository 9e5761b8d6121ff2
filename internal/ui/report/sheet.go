// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"natkit/internal/bench"
	"natkit/internal/words/plural"
)

// A sheet is all that was measured of one metric, put in order: what its texts,
// tables and plots are made of.
type sheet struct {
	Metric  string
	Measure measure
	Unit    unit // of all values
	// Axis is what the rows of a block go along, "" for nothing: then each name has
	// one row, and they make bars; else each name has a curve.
	Axis   axis
	Blocks []block
	// Base is the router that ratios are to: the kernel's NAT where it was measured,
	// otherwise the first.
	Base string
}

// A block is rows that were measured under the same conditions and that may be
// compared.
type block struct {
	Conditions string
	Rows       []row
}

// A row is a figure beside others.
type row struct {
	X             float64 // along the axis
	Name          string  // of the router
	Series        int     // number of the router: its colour
	N, Discarded  int
	Median        float64
	Min, Max      float64
	Ratio         float64 // to the base's at the same X; 0 where there is none
	Label         string
	PublishedBy   string // whose it is, when it is not natkit's
	PublishedNote string
}

// An axis is a condition that took several values.
type axis string

const (
	axisNone       axis = ""
	axisOffered    axis = "offered"
	axisRules      axis = "rules"
	axisPercentile axis = "percentile"
)

// of takes the axis's value out of the conditions.
func (a axis) of(p *bench.Params) float64 {
	var x float64
	switch a {
	case axisOffered:
		x, p.OfferedPPS = p.OfferedPPS, 0
	case axisRules:
		x, p.Rules = float64(p.Rules), 0
	}
	return x
}

// write is how a value on the axis is written.
func (a axis) write(x float64) string {
	switch a {
	case axisOffered:
		return measureOf("offered_pps").unit(x).with(x)
	case axisPercentile:
		return significant(x) + " %"
	}
	return fmt.Sprintf("%.0f", x)
}

// sheetsOf puts figures in order: one sheet a metric, one block a set of
// conditions, both in the order in which they first appear; inside a block by the
// axis, then by router. What the figures say of their values is not believed but
// made again from the values; figures without any are left out.
func sheetsOf(routers []string, figures []bench.Figure, published []bench.Published) []sheet {
	series := map[string]int{}
	number := func(router string) int {
		if _, ok := series[router]; !ok {
			series[router] = len(series)
		}
		return series[router]
	}
	for _, r := range routers {
		number(r)
	}
	// A load without a given rate is no point on the axis of rates.
	type key struct {
		metric string
		paced  bool
	}
	var keys []key
	mine, theirs := map[key][]bench.Figure{}, map[key][]bench.Published{}
	seen := func(metric string, p bench.Params) key {
		k := key{metric, p.OfferedPPS > 0}
		if !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
		return k
	}
	for _, f := range figures {
		number(f.Router)
		if len(f.Values) > 0 {
			k := seen(f.Metric, f.Params)
			mine[k] = append(mine[k], f)
		}
	}
	for _, p := range published {
		number(p.Router)
		k := seen(p.Metric, p.Params)
		theirs[k] = append(theirs[k], p)
	}

	var sheets []sheet
	for _, k := range keys {
		s := sheet{Metric: k.metric, Measure: measureOf(k.metric), Axis: axisOfFigures(mine[k])}
		if !k.paced && slices.Contains(keys, key{k.metric, true}) {
			s.Measure.Title += " without a given rate"
		}
		at := map[bench.Params]int{}
		add := func(p bench.Params, r row) {
			r.X = s.Axis.of(&p)
			i, ok := at[p]
			if !ok {
				i = len(s.Blocks)
				at[p] = i
				s.Blocks = append(s.Blocks, block{Conditions: conditions(p)})
			}
			s.Blocks[i].Rows = append(s.Blocks[i].Rows, r)
		}
		for _, f := range mine[k] {
			f := rebuilt(f)
			add(f.Params, row{Name: f.Router, Series: series[f.Router], N: len(f.Values), Discarded: f.Discarded,
				Median: f.Median, Min: f.Min, Max: f.Max, Label: f.Label})
		}
		for _, p := range theirs[k] {
			name := p.Name
			if name == "" {
				name = p.Router
			}
			add(p.Params, row{Name: name, Series: series[p.Router], Median: p.Value, Min: p.Value, Max: p.Value,
				PublishedBy: cmp.Or(p.Source, "an unnamed source"), PublishedNote: p.Note})
		}
		s.finish()
		sheets = append(sheets, s)
	}
	return sheets
}

// finish puts rows in order and computes what is relative to others.
func (s *sheet) finish() {
	base := s.base()
	var largest float64
	for i := range s.Blocks {
		rows := s.Blocks[i].Rows
		byX := func(a, b row) int { return cmp.Compare(a.X, b.X) }
		byName := func(a, b row) int {
			return cmp.Or(cmp.Compare(a.theirs(), b.theirs()), cmp.Compare(a.Series, b.Series))
		}
		slices.SortStableFunc(rows, func(a, b row) int { return cmp.Or(byX(a, b), byName(a, b)) })
		if !sharedX(rows) { // nothing to compare at one X: each router's curve by itself
			slices.SortStableFunc(rows, func(a, b row) int { return cmp.Or(byName(a, b), byX(a, b)) })
		}
		medians := map[float64]float64{} // the base's, by X
		for _, r := range rows {
			largest = max(largest, abs(r.Median))
			if r.theirs() == 0 && r.Series == base {
				medians[r.X] = r.Median
			}
		}
		for j := range rows {
			if r := &rows[j]; r.theirs() == 0 && medians[r.X] != 0 {
				r.Ratio = r.Median / medians[r.X]
			}
		}
	}
	s.Unit = s.Measure.unit(largest)
}

// sharedX tells whether two of natkit's own rows, in order, have the same X.
func sharedX(rows []row) bool {
	for i := 1; i < len(rows); i++ {
		if rows[i-1].X == rows[i].X && rows[i-1].theirs()+rows[i].theirs() == 0 {
			return true
		}
	}
	return false
}

// kernelNAT is the router that is what a machine does without natkit, rules as few as
// can be.
const kernelNAT = "nft"

// base finds the Base, and returns its number.
func (s *sheet) base() int {
	n := -1
	for _, b := range s.Blocks {
		for _, r := range b.Rows {
			if r.theirs() == 1 {
				continue
			}
			if r.Name == kernelNAT {
				s.Base = r.Name
				return r.Series
			}
			if n < 0 || r.Series < n {
				n, s.Base = r.Series, r.Name
			}
		}
	}
	return n
}

// theirs is 1 for a published figure: natkit's own stand first.
func (r row) theirs() int {
	if r.PublishedBy != "" {
		return 1
	}
	return 0
}

// remarks is what must be known beside the row's numbers.
func (r row) remarks() string {
	var words []string
	add := func(s string) {
		if s = strings.TrimSpace(s); s != "" {
			words = append(words, s)
		}
	}
	add(r.Label)
	if r.Discarded > 0 {
		add(fmt.Sprintf("%s repeated", plural.Count(r.Discarded, "trial")))
	}
	if r.PublishedBy != "" {
		add("published elsewhere")
	}
	add(r.PublishedNote)
	return strings.Join(words, ", ")
}

// rebuilt is a figure with everything made from its values.
func rebuilt(f bench.Figure) bench.Figure {
	g := bench.NewFigure(f.Router, f.Metric, f.Params, f.Values...)
	g.Label, g.Discarded = f.Label, f.Discarded
	return g
}

// leastPoints make a curve: between two nobody knows where a line should bend.
const leastPoints = 3

// axisOfFigures is the condition that took several values with some router while
// all others stayed the same.
func axisOfFigures(figures []bench.Figure) axis {
	type group struct {
		router string
		params bench.Params
	}
	for _, a := range []axis{axisOffered, axisRules} {
		values := map[group][]float64{}
		for _, f := range figures {
			p := f.Params
			x := a.of(&p)
			k := group{f.Router, p}
			if slices.Contains(values[k], x) {
				continue
			}
			if values[k] = append(values[k], x); len(values[k]) == leastPoints {
				return a
			}
		}
	}
	return axisNone
}

// conditions says the parameters in words.
func conditions(p bench.Params) string {
	var words []string
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if p.Setup != "" {
		add("set-up %s", p.Setup)
	}
	if p.Protocol != "" {
		add("%s", strings.ToUpper(p.Protocol))
	}
	if p.FrameBytes != 0 {
		add("%d-byte frames", p.FrameBytes)
	}
	if p.Mix != "" {
		add("%s", strings.ToUpper(p.Mix))
	}
	if p.Flows != 0 {
		add("%s", plural.Count(p.Flows, "flow"))
	}
	if p.Streams != 0 {
		add("%s", plural.Count(p.Streams, "stream"))
	}
	if p.Cores != 0 {
		add("%s", plural.Count(p.Cores, "core"))
	}
	if p.BothWays {
		add("both ways")
	}
	if p.WaysApart {
		add("each on its core")
	}
	switch p.Direction {
	case "":
	case "up":
		add("client to server")
	case "down":
		add("server to client")
	default:
		add("%s", p.Direction)
	}
	if p.OfferedPPS != 0 {
		add("%s offered", axisOffered.write(p.OfferedPPS))
	}
	if p.Rules != 0 {
		add("%s before the one that matches", plural.Count(p.Rules, "rule"))
	}
	if p.Held != 0 {
		add("%d others in the table", p.Held)
	}
	if p.PortsUsed != 0 {
		add("%.4g %% of the ports in use", 100*p.PortsUsed)
	}
	if p.Beside != "" {
		add("beside %s", p.Beside)
	}
	return strings.Join(words, ", ")
}

func abs(x float64) float64 { return max(x, -x) }
