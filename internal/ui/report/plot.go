// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// A format is a width that plots are drawn for: each is drawn twice, for a wide
// page and for a telephone, and the page shows the one that fits.
type format struct {
	class string
	width vg.Length
	name  int // characters of a router's name
	label int // characters of a figure's label
}

var formats = []format{{"wide", 760, 30, 24}, {"narrow", 328, 15, 8}}

const (
	textSize   = 12
	barHeight  = 26
	mostBars   = 60 // in one plot; what is more stands in the table
	mostPoints = 4000
)

// inks are the colours of the series; the style sheet has as many.
var inks = []ink{"s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"}

// marks tell series apart for those who see no colours.
var marks = []mark{{sides: 24}, {sides: 4, turn: 0.25}, {sides: 3, turn: 1}, {sides: 4},
	{sides: 3}, {sides: 24, hollow: true}, {sides: 4, turn: 0.25, hollow: true}, {sides: 4, hollow: true}}

// A mark is a regular polygon, with a corner at the bottom but for its turn.
type mark struct {
	sides  int
	turn   float64 // in half turns
	hollow bool
}

// DrawGlyph makes a mark a draw.GlyphDrawer.
func (m mark) DrawGlyph(c *draw.Canvas, style draw.GlyphStyle, at vg.Point) {
	var path vg.Path
	for i := range m.sides {
		sin, cos := math.Sincos(math.Pi * (2*float64(i)/float64(m.sides) + m.turn - 0.5))
		corner := vg.Point{X: at.X + style.Radius*vg.Length(cos), Y: at.Y + style.Radius*vg.Length(sin)}
		if i == 0 {
			path.Move(corner)
		} else {
			path.Line(corner)
		}
	}
	path.Close()
	c.SetColor(style.Color)
	if m.hollow {
		c.SetColor(ink("bg"))
	}
	c.Fill(path)
	c.SetColor(style.Color)
	c.SetLineStyle(draw.LineStyle{Color: style.Color, Width: 1.6})
	c.Stroke(path)
}

// styleOf is how a series looks: beyond the inks the lines are dashed.
func styleOf(series int, theirs bool) (draw.LineStyle, draw.GlyphStyle) {
	i := series % len(inks)
	line := draw.LineStyle{Color: inks[i], Width: 2}
	if round := series / len(inks); round > 0 {
		line.Dashes = []vg.Length{vg.Length(4 * round), 3}
	}
	glyph := draw.GlyphStyle{Color: inks[i], Radius: 3.4, Shape: marks[i]}
	if theirs {
		line.Width, line.Dashes = 1.2, []vg.Length{2, 3}
		glyph.Radius, glyph.Shape = 5.5, mark{sides: 4, hollow: true}
	}
	return line, glyph
}

// newPlot is a plot without a frame, in the page's inks.
func newPlot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Color = ink("dim")
		a.Padding = 0
		a.Tick.Color = ink("dim")
		a.Tick.Length = 4
		a.Tick.Label.Color = ink("fg")
		a.Tick.Label.Font = sans(textSize)
	}
	return p
}

func sans(size font.Length) font.Font {
	return font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
}

// plots draws a block of a sheet, once a format; "" where there is nothing to draw.
func (s *sheet) plots(b *block) string {
	var out strings.Builder
	for _, f := range formats {
		title := s.heading()
		if b.Conditions != "" {
			title += ": " + b.Conditions
		}
		switch {
		case s.Axis != axisNone && len(b.Rows) <= mostPoints:
			out.WriteString(s.curves(b, f, title))
		case s.Axis == axisNone && len(b.Rows) <= mostBars:
			out.WriteString(s.bars(b, f, title))
		}
	}
	return out.String()
}

// bars draws a bar a router, with a whisker from the least to the largest value.
// All blocks of a sheet have the same scale.
func (s *sheet) bars(b *block, f format, title string) string {
	p := newPlot()
	p.X.Min, p.X.Max = s.span()
	p.X.Width, p.X.Tick.Width = 0, 0
	p.X.Tick.Marker = thinned{fits: f.width / 70}
	p.Y.Min, p.Y.Max = -0.5, float64(len(b.Rows))-0.5
	p.Y.Tick.Length = 0
	var names []plot.Tick
	for i, r := range b.Rows {
		names = append(names, plot.Tick{Value: float64(len(b.Rows) - 1 - i), Label: clip(printable(r.Name), f.name) + " "})
	}
	for _, other := range s.Blocks { // out of sight, so that all blocks leave the same room for names
		for _, r := range other.Rows {
			names = append(names, plot.Tick{Value: -1, Label: clip(printable(r.Name), f.name) + " "})
		}
	}
	p.Y.Tick.Marker = plot.ConstantTicks(names)
	values := &barPlotter{sheet: s, rows: b.Rows, style: p.X.Tick.Label, format: f}
	values.style.XAlign, values.style.YAlign = draw.XLeft, draw.YCenter
	p.Add(grid{vertical: true}, values)
	height := vg.Length(len(b.Rows)*barHeight + 24)
	return drawSVG(f.width, height, f.class, title, func(c draw.Canvas) {
		p.Draw(draw.Crop(c, 1, -values.room(), 0, -4))
	})
}

// span is from the least to the largest value of a sheet, 0 among them, in its unit.
func (s *sheet) span() (low, high float64) {
	for _, b := range s.Blocks {
		for _, r := range b.Rows {
			low, high = min(low, r.Min/s.Unit.Scale), max(high, r.Max/s.Unit.Scale)
		}
	}
	if low == high {
		high = 1
	}
	return low, high
}

type barPlotter struct {
	sheet *sheet
	rows  []row
	style draw.TextStyle
	format
}

// words are a bar's median and what else must be known.
func (b *barPlotter) words(r row) string {
	words := b.sheet.Unit.number(r.Median)
	if base, _, _ := strings.Cut(b.sheet.Base, " ("); r.Ratio != 0 && r.Name != b.sheet.Base {
		words += "  " + ratio(r.Ratio) + " ×"
		if b.format.class == "wide" { // on a telephone there is no room to say it each time
			words += " " + clip(printable(base), b.format.name)
		}
	}
	switch {
	case r.PublishedBy != "":
		words += ", published"
	case r.Label != "":
		words += ", " + clip(printable(r.Label), b.format.label)
	}
	return words
}

// room is how wide the longest words of any block are.
func (b *barPlotter) room() vg.Length {
	var w vg.Length
	for _, other := range b.sheet.Blocks {
		for _, r := range other.Rows {
			w = max(w, b.style.Width(b.words(r)))
		}
	}
	return w + 13
}

// Plot draws the bars; natkit's own are filled, published ones an outline.
func (b *barPlotter) Plot(c draw.Canvas, p *plot.Plot) {
	scale := b.sheet.Unit.Scale
	for i, r := range b.rows {
		bar{r.Median / scale, r.Min / scale, r.Max / scale, inks[r.Series%len(inks)], r.PublishedBy != "", b.words(r)}.
			draw(c, p, c.Y(p.Y.Norm(float64(len(b.rows)-1-i))), barHeight/2-5, b.style)
	}
	drawZero(c, p)
}

// A bar reaches from 0 to its median, in the unit of the axis, with a whisker from
// the least to the largest value. Its words stand right of the plot, all in one column: at
// the end of the whisker the median would read as the largest value.
type bar struct {
	median, min, max float64
	colour           color.Color
	outline          bool
	words            string
}

func (b bar) draw(c draw.Canvas, p *plot.Plot, y, half vg.Length, style draw.TextStyle) {
	at := func(v float64) vg.Length { return c.X(p.X.Norm(v)) }
	x0, x1 := at(0), at(b.median)
	corners := []vg.Point{{X: x0, Y: y - half}, {X: x1, Y: y - half}, {X: x1, Y: y + half}, {X: x0, Y: y + half}, {X: x0, Y: y - half}}
	if b.outline {
		c.StrokeLines(draw.LineStyle{Color: b.colour, Width: 1.5, Dashes: []vg.Length{3, 3}}, corners)
	} else {
		c.FillPolygon(b.colour, corners)
	}
	if b.min < b.max {
		low, high := at(b.min), at(b.max)
		for _, line := range []draw.LineStyle{{Color: ink("bg"), Width: 3.5}, {Color: ink("fg"), Width: 1.3}} {
			c.StrokeLine2(line, low, y, high, y)
			c.StrokeLine2(line, low, y-4, low, y+4)
			c.StrokeLine2(line, high, y-4, high, y+4)
		}
	}
	c.FillText(style, vg.Point{X: c.Max.X + 8, Y: y}, b.words)
}

// drawZero draws the line that bars stand on.
func drawZero(c draw.Canvas, p *plot.Plot) {
	zero := c.X(p.X.Norm(0))
	c.StrokeLine2(draw.LineStyle{Color: ink("dim"), Width: 1}, zero, c.Min.Y, zero, c.Max.Y)
}

// curves draws a curve a router along the sheet's axis.
func (s *sheet) curves(b *block, f format, title string) string {
	p := newPlot()
	label, unitX := s.axisUnit(b)
	c := &curvePlotter{}
	var xs, lows, highs []float64
	for _, r := range b.Rows {
		key := curveKey{r.Series, r.Name, r.PublishedBy != ""}
		i := slices.IndexFunc(c.curves, func(k curve) bool { return k.key == key })
		if i < 0 {
			i = len(c.curves)
			c.curves = append(c.curves, curve{key: key})
		}
		pt := point{r.X / unitX, r.Median / s.Unit.Scale, r.Min / s.Unit.Scale, r.Max / s.Unit.Scale}
		c.curves[i].points = append(c.curves[i].points, pt)
		xs, lows, highs = append(xs, pt.x), append(lows, pt.low), append(highs, pt.high)
	}
	slices.SortStableFunc(c.curves, func(a, b curve) int { return cmp.Compare(a.key.series, b.key.series) })
	narrow := f.width < 500
	switch s.Axis {
	case axisRules:
		logAxis(&p.X, slices.Min(xs), slices.Max(xs), smallestPositive(xs), 1)
		p.X.Tick.Marker = atValues(xs, &p.X, f.width-70)
	case axisPercentile:
		p.X.Min, p.X.Max = min(slices.Min(xs), 50), max(slices.Max(xs), 100)
		p.X.Tick.Marker = thinned{fits: 5}
	default:
		p.X.Min, p.X.Max = 0, upTo(slices.Max(xs))
		p.X.Tick.Marker = thinned{fits: f.width / 80}
		if slices.Max(xs) > 30*smallestPositive(xs) {
			logAxis(&p.X, slices.Min(xs), slices.Max(xs), smallestPositive(xs), 1.2)
		}
	}
	least, most := slices.Min(lows), slices.Max(highs)
	wide := most > 5*smallestPositive(lows)
	if wide && least >= 0 && (s.Axis == axisRules || s.isTime()) {
		logAxis(&p.Y, least, most, smallestPositive(lows), 1.3)
	} else {
		p.Y.Min, p.Y.Max = min(0, least), upTo(most)
		p.Y.Tick.Marker = thinned{fits: 7}
	}
	p.Add(grid{vertical: true, horizontal: true}, c)
	height := vg.Length(320)
	if narrow {
		height = 260
	}
	return drawSVG(f.width, height, f.class, title, func(dc draw.Canvas) {
		p.Draw(draw.Crop(dc, 1, -10, 18, -8))
		// Not the axis's own label, for which plot makes room as if the axis were linear.
		style := p.X.Tick.Label
		style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
		dc.FillText(style, vg.Point{X: dc.Center().X, Y: 4}, label)
	})
}

func (s *sheet) isTime() bool {
	return slices.ContainsFunc(times, func(u unit) bool { return u.Name == s.Unit.Name })
}

// axisUnit names what the axis shows, and the unit that its numbers are in.
func (s *sheet) axisUnit(b *block) (label string, scale float64) {
	var largest float64
	for _, r := range b.Rows {
		largest = max(largest, r.X)
	}
	switch s.Axis {
	case axisOffered:
		u := measureOf("offered_pps").unit(largest)
		return "offered, " + u.Name, u.Scale
	case axisRules:
		return "rules before the one that matches", 1
	}
	return "% of the requests", 1
}

type curveKey struct {
	series int
	name   string
	theirs bool
}

type curve struct {
	key    curveKey
	points []point
}

type point struct{ x, y, low, high float64 }

type curvePlotter struct{ curves []curve }

func (cp *curvePlotter) Plot(c draw.Canvas, p *plot.Plot) {
	at := func(x, y float64) vg.Point { return vg.Point{X: c.X(p.X.Norm(x)), Y: c.Y(p.Y.Norm(y))} }
	for _, k := range cp.curves {
		line, glyph := styleOf(k.key.series, k.key.theirs)
		var path []vg.Point
		for _, pt := range k.points {
			path = append(path, at(pt.x, pt.y))
			if pt.low < pt.high {
				low, high := at(pt.x, pt.low), at(pt.x, pt.high)
				c.StrokeLine2(draw.LineStyle{Color: line.Color, Width: 1}, low.X, low.Y, high.X, high.Y)
			}
		}
		if len(path) > 1 {
			c.StrokeLines(line, path)
		}
		for _, pt := range path {
			c.DrawGlyphNoClip(glyph, pt)
		}
	}
}

// swatch is a series' line and mark, for a legend.
func swatch(series int, theirs bool) string {
	return drawSVG(28, 12, "swatch", "", func(c draw.Canvas) {
		line, glyph := styleOf(series, theirs)
		c.StrokeLine2(line, 1, 6, 27, 6)
		c.DrawGlyphNoClip(glyph, vg.Point{X: 14, Y: 6})
	})
}

// grid draws a line a tick that has a label.
type grid struct{ vertical, horizontal bool }

func (g grid) Plot(c draw.Canvas, p *plot.Plot) {
	line := draw.LineStyle{Color: ink("grid"), Width: 1}
	for _, t := range p.X.Tick.Marker.Ticks(p.X.Min, p.X.Max) {
		if x := c.X(p.X.Norm(t.Value)); g.vertical && !t.IsMinor() && c.ContainsX(x) {
			c.StrokeLine2(line, x, c.Min.Y, x, c.Max.Y)
		}
	}
	for _, t := range p.Y.Tick.Marker.Ticks(p.Y.Min, p.Y.Max) {
		if y := c.Y(p.Y.Norm(t.Value)); g.horizontal && !t.IsMinor() && c.ContainsY(y) {
			c.StrokeLine2(line, c.Min.X, y, c.Max.X, y)
		}
	}
}

// thinned is the default ticks, those with a label at most so many.
type thinned struct{ fits vg.Length }

func (t thinned) Ticks(low, high float64) []plot.Tick {
	var out []plot.Tick
	step := max(niceStep((high-low)/max(float64(t.fits), 2)), 1e-30) // of no measure: it only must not be 0
	for v := math.Ceil(low/step) * step; v <= high+step/1e6; v += step {
		label := short(v)
		if abs(v) < step/1e6 { // what is left of adding steps
			label = "0"
		}
		out = append(out, plot.Tick{Value: v, Label: label})
	}
	return out
}

// niceStep is the next larger of 1, 2 and 5 times a power of ten.
func niceStep(least float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, n := range []float64{1, 2, 5} {
		if n*power >= least {
			return n * power
		}
	}
	return 10 * power
}

// upTo leaves room above the largest value, and is never 0.
func upTo(largest float64) float64 {
	if largest <= 0 {
		return 1
	}
	return 1.05 * largest
}

func smallestPositive(values []float64) float64 {
	least := math.Inf(1)
	for _, v := range values {
		if v > 0 {
			least = min(least, v)
		}
	}
	if math.IsInf(least, 1) {
		return 1
	}
	return least
}

// logAxis makes an axis logarithmic from low to high with some room. 0, which has
// no logarithm, stands at the low edge, somewhat below the least positive value.
func logAxis(a *plot.Axis, low, high, positive, room float64) {
	scale := logScale{zero: math.Log10(positive) - 0.7}
	a.Scale = scale
	a.Max = max(high*room, positive*1.01)
	if a.Min = low / room; low <= 0 {
		a.Min = 0
	}
	a.Tick.Marker = logTicks{scale, low <= 0}
}

// logScale is a plot.Normalizer.
type logScale struct{ zero float64 } // where 0 stands

func (s logScale) at(v float64) float64 {
	if v <= 0 {
		return s.zero
	}
	return max(math.Log10(v), s.zero)
}

func (s logScale) Normalize(low, high, v float64) float64 {
	return (s.at(v) - s.at(low)) / (s.at(high) - s.at(low))
}

// logTicks are the powers of ten, and where there are few, what lies between.
type logTicks struct {
	scale logScale
	zero  bool
}

func (t logTicks) Ticks(low, high float64) []plot.Tick {
	var out []plot.Tick
	if t.zero {
		out = append(out, plot.Tick{Value: 0, Label: "0"})
	}
	from, to := math.Floor(t.scale.at(low)), math.Ceil(t.scale.at(high))
	every := max(1, math.Ceil((to-from)/8))
	for e := from; e <= to; e++ {
		for n := 1.0; n < 10; n++ {
			v := n * math.Pow(10, e)
			if v < low || v > high || t.zero && math.Log10(v) < t.scale.zero+0.3 {
				continue
			}
			tick := plot.Tick{Value: v}
			few := t.scale.at(high)-t.scale.at(low) < 2.2
			finer := t.scale.at(high)-t.scale.at(low) < 0.7
			if n == 1 && math.Mod(e-from, every) == 0 || few && (n == 2 || n == 5) || finer {
				tick.Label = short(v)
			}
			if every == 1 || tick.Label != "" {
				out = append(out, tick)
			}
		}
	}
	return out
}

// atValues has ticks where the values are, as far as their labels have room.
func atValues(values []float64, a *plot.Axis, width vg.Length) plot.Ticker {
	var ticks plot.ConstantTicks
	sorted := slices.Compact(slices.Sorted(slices.Values(values)))
	free := vg.Length(math.Inf(1))
	for _, v := range slices.Backward(sorted) {
		label := short(v)
		x, w := vg.Length(a.Norm(v))*width, a.Tick.Label.Width(label)
		if x+w/2+4 > free {
			continue
		}
		free = x - w/2
		ticks = append(ticks, plot.Tick{Value: v, Label: label})
	}
	return ticks
}

// short writes a number for an axis.
func short(v float64) string {
	for _, p := range []struct {
		scale float64
		name  string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= p.scale && v < 1000*p.scale {
			return strconv.FormatFloat(v/p.scale, 'g', 4, 64) + p.name
		}
	}
	return fmt.Sprintf("%.4g", v)
}
