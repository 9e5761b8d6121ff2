// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// A format is a width that plots are drawn for: each is drawn twice, for a wide
// page and for a telephone, and the page shows the one that fits.
type format struct {
	class string
	width float64
	name  float64 // the most of a router's name
	label float64 // of a figure's label
}

var formats = []format{{"wide", 760, 200, 160}, {"narrow", 328, 100, 54}}

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

// draw draws the mark around a spot.
func (m mark) draw(c *canvas, colour ink, radius float64, at spot) {
	var corners []spot
	for i := range m.sides + 1 {
		sin, cos := math.Sincos(math.Pi * (2*float64(i)/float64(m.sides) + m.turn - 0.5))
		corners = append(corners, spot{at.x + radius*cos, at.y - radius*sin})
	}
	inside := colour
	if m.hollow {
		inside = "bg"
	}
	c.area(inside, corners...)
	c.lines(stroke{ink: colour, width: 1.6}, corners...)
}

// look is how a series is drawn.
type look struct {
	line   stroke
	mark   mark
	radius float64
}

// lookOf is how a series looks: beyond the inks the lines are dashed.
func lookOf(series int, theirs bool) look {
	i := series % len(inks)
	l := look{stroke{ink: inks[i], width: 2}, marks[i], 3.4}
	if round := series / len(inks); round > 0 {
		l.line.dashes = []float64{float64(4 * round), 3}
	}
	if theirs {
		l = look{stroke{inks[i], 1.2, []float64{2, 3}}, mark{sides: 4, hollow: true}, 5.5}
	}
	return l
}

// A chart is a part of a canvas, and what its edges stand for.
type chart struct {
	*canvas
	x, y                     scale
	left, right, top, bottom float64
}

// tickLength is that of a tick with a label, tickGap the way from there to the label.
const (
	tickLength = 4
	tickGap    = 3
)

func (c *chart) at(x, y float64) spot {
	return spot{c.left + c.x.place(x)*(c.right-c.left), c.bottom - c.y.place(y)*(c.bottom-c.top)}
}

// grid draws the lines that values are read by, and the labels below.
func (c *chart) grid(vertical, horizontal bool, size float64) {
	line := stroke{ink: "grid", width: 1}
	for _, t := range c.x.ticks {
		x := c.at(t.value, 0).x
		if vertical && t.label != "" {
			c.line(line, x, c.top, x, c.bottom)
		}
		half := textWidth(t.label, size) / 2
		c.text("fg", size, min(max(x, half), c.width-half), c.bottom+tickLength+tickGap+size/2, alignCentre, t.label)
	}
	for _, t := range c.y.ticks {
		if y := c.at(0, t.value).y; horizontal && t.label != "" {
			c.line(line, c.left, y, c.right, y)
		}
	}
}

// frame draws both axes of curves, with their ticks, and leaves room for what stands
// beside and below them.
func (c *chart) frame(vertical bool, size float64) {
	widest := 0.0
	for _, t := range c.y.ticks {
		widest = max(widest, textWidth(t.label, size))
	}
	c.left += widest + tickLength + tickGap
	c.bottom -= size + tickLength + tickGap
	c.grid(vertical, true, size)
	line := stroke{ink: "dim", width: 0.6}
	c.lines(line, spot{c.left, c.top}, spot{c.left, c.bottom}, spot{c.right, c.bottom})
	of := func(t tick) float64 {
		if t.label == "" {
			return tickLength / 2
		}
		return tickLength
	}
	for _, t := range c.x.ticks {
		x := c.at(t.value, 0).x
		c.line(line, x, c.bottom, x, c.bottom+of(t))
	}
	for _, t := range c.y.ticks {
		y := c.at(0, t.value).y
		c.line(line, c.left-of(t), y, c.left, y)
		c.text("fg", size, c.left-tickLength-tickGap, y, alignRight, t.label)
	}
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

// bars draws a bar a router, with a whisker from the least to the largest value. All
// blocks of a sheet have the same scale, and leave the same room for names and words.
// natkit's own are filled, published ones an outline.
func (s *sheet) bars(b *block, f format, title string) string {
	names, words := 0.0, 0.0
	for _, other := range s.Blocks {
		for _, r := range other.Rows {
			names = max(names, textWidth(fitted(r.Name, f.name), textSize))
			words = max(words, textWidth(s.barWords(r, f), textSize))
		}
	}
	low, high := s.span()
	height := float64(barsTop + len(b.Rows)*barHeight + barsBelow)
	return drawSVG(f.width, height, f.class, title, func(on *canvas) {
		c := barChart(on, low, high, names, words)
		for i, r := range b.Rows {
			y := c.top + (float64(i)+0.5)*barHeight
			c.text("fg", textSize, c.left-barGap, y, alignRight, fitted(r.Name, f.name))
			scale := s.Unit.Scale
			c.bar(bar{r.Median / scale, r.Min / scale, r.Max / scale, inks[r.Series%len(inks)], r.PublishedBy != "", s.barWords(r, f)}, y, barHeight/2-5)
		}
		c.zero()
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

// barWords are a bar's median and what else must be known.
func (s *sheet) barWords(r row, f format) string {
	words := s.Unit.number(r.Median)
	if base, _, _ := strings.Cut(s.Base, " ("); r.Ratio != 0 && r.Name != s.Base {
		words += "  " + ratio(r.Ratio) + " ×"
		if f.class == "wide" { // on a telephone there is no room to say it each time
			words += " " + fitted(base, f.name)
		}
	}
	switch {
	case r.PublishedBy != "":
		words += ", published"
	case r.Label != "":
		words += ", " + fitted(r.Label, f.label)
	}
	return words
}

// barGap is the way from the bars to the names before, and to the words behind them.
const (
	barGap    = 8
	barsTop   = 4
	barsBelow = 22 // for the numbers
)

// barChart is a chart of lying bars from low to high, that leaves room for the widest
// name and the widest words.
func barChart(on *canvas, low, high, names, words float64) *chart {
	c := &chart{canvas: on, left: 1 + names + barGap, right: on.width - words - barGap - 5, top: barsTop, bottom: on.height - barsBelow}
	c.x = linear(low, high, int(on.width/70))
	c.grid(true, false, textSize)
	return c
}

// A bar reaches from 0 to its median, in the unit of the axis, with a whisker from
// the least to the largest value. Its words stand right of the plot, all in one column: at
// the end of the whisker the median would read as the largest value.
type bar struct {
	median, min, max float64
	colour           ink
	outline          bool
	words            string
}

func (c *chart) bar(b bar, y, half float64) {
	at := func(v float64) float64 { return c.at(v, 0).x }
	x0, x1 := at(0), at(b.median)
	corners := []spot{{x0, y - half}, {x1, y - half}, {x1, y + half}, {x0, y + half}, {x0, y - half}}
	if b.outline {
		c.lines(stroke{b.colour, 1.5, []float64{3, 3}}, corners...)
	} else {
		c.area(b.colour, corners...)
	}
	if b.min < b.max {
		low, high := at(b.min), at(b.max)
		for _, line := range []stroke{{ink: "bg", width: 3.5}, {ink: "fg", width: 1.3}} {
			c.line(line, low, y, high, y)
			c.line(line, low, y-4, low, y+4)
			c.line(line, high, y-4, high, y+4)
		}
	}
	c.text("fg", textSize, c.right+barGap, y, alignLeft, b.words)
}

// zero draws the line that bars stand on.
func (c *chart) zero() {
	x := c.at(0, 0).x
	c.line(stroke{ink: "dim", width: 1}, x, c.top, x, c.bottom)
}

// curves draws a curve a router along the sheet's axis.
func (s *sheet) curves(b *block, f format, title string) string {
	label, unitX := s.axisUnit(b)
	curves, xs, lows, highs := s.curvesOf(b, unitX)
	height := 320.0
	if f.class == "narrow" {
		height = 260
	}
	return drawSVG(f.width, height, f.class, title, func(on *canvas) {
		c := &chart{canvas: on, x: s.axisX(xs, f.width), y: s.axisY(lows, highs), left: 1, right: on.width - 10, top: 8, bottom: on.height - 20}
		c.frame(true, textSize)
		for _, k := range curves {
			c.curve(k)
		}
		c.text("fg", textSize, on.width/2, on.height-textSize/2-3, alignCentre, label)
	})
}

// curvesOf are the rows of a block as curves, in the order of their series, and all
// their values.
func (s *sheet) curvesOf(b *block, unitX float64) (curves []curve, xs, lows, highs []float64) {
	for _, r := range b.Rows {
		key := curveKey{r.Series, r.Name, r.PublishedBy != ""}
		i := slices.IndexFunc(curves, func(k curve) bool { return k.key == key })
		if i < 0 {
			i = len(curves)
			curves = append(curves, curve{key: key})
		}
		pt := point{r.X / unitX, r.Median / s.Unit.Scale, r.Min / s.Unit.Scale, r.Max / s.Unit.Scale}
		curves[i].points = append(curves[i].points, pt)
		xs, lows, highs = append(xs, pt.x), append(lows, pt.low), append(highs, pt.high)
	}
	slices.SortStableFunc(curves, func(a, b curve) int { return cmp.Compare(a.key.series, b.key.series) })
	return curves, xs, lows, highs
}

// axisX is logarithmic where the values lie far apart.
func (s *sheet) axisX(xs []float64, width float64) scale {
	least, most := slices.Min(xs), slices.Max(xs)
	switch {
	case s.Axis == axisRules:
		a := logarithmic(xs, 1)
		a.ticks = a.ticksAt(xs, width-70)
		return a
	case s.Axis == axisPercentile:
		return linear(min(least, 50), max(most, 100), 5)
	case most > 30*smallestPositive(xs):
		return logarithmic(xs, 1.2)
	}
	return linear(0, upTo(most), int(width/80))
}

// axisY is logarithmic for costs and times that lie far apart.
func (s *sheet) axisY(lows, highs []float64) scale {
	least, most := slices.Min(lows), slices.Max(highs)
	if most > 5*smallestPositive(lows) && least >= 0 && (s.Axis == axisRules || s.isTime()) {
		return logarithmic(append(slices.Clone(lows), most), 1.3)
	}
	return linear(min(0, least), upTo(most), 7)
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

// curve draws a curve, with a mark and a whisker a point.
func (c *chart) curve(k curve) {
	l := lookOf(k.key.series, k.key.theirs)
	var path []spot
	for _, pt := range k.points {
		path = append(path, c.at(pt.x, pt.y))
		if pt.low < pt.high {
			c.lines(stroke{ink: l.line.ink, width: 1}, c.at(pt.x, pt.low), c.at(pt.x, pt.high))
		}
	}
	if len(path) > 1 {
		c.lines(l.line, path...)
	}
	for _, at := range path {
		l.mark.draw(c.canvas, l.line.ink, l.radius, at)
	}
}

// swatch is a series' line and mark, for a legend.
func swatch(series int, theirs bool) string {
	return drawSVG(28, 12, "swatch", "", func(c *canvas) {
		l := lookOf(series, theirs)
		c.line(l.line, 1, 6, 27, 6)
		l.mark.draw(c, l.line.ink, l.radius, spot{14, 6})
	})
}
