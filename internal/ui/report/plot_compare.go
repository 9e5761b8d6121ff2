// SPDX-License-Identifier: Apache-2.0

package report

import (
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// How two results are drawn beside each other: for each figure a line of words,
// then a bar of A and a bar of B, on one scale for all of a metric.

const (
	pairHeight = 62 // of a figure: its words and both bars
	wordsSlots = 3  // words, A and B, each a slot high
)

// comparedPlots draws rows of a metric that have the same conditions; "" where they
// are too many for a picture.
func (c *Comparison) comparedPlots(rows []ComparedFigure, title string) string {
	if len(rows) > mostBars/2 {
		return ""
	}
	u := c.unit(rows[0].Metric)
	var low, high float64
	for _, r := range c.Rows {
		if r.Metric == rows[0].Metric {
			low, high = min(low, r.A.Min/u.Scale, r.B.Min/u.Scale), max(high, r.A.Max/u.Scale, r.B.Max/u.Scale)
		}
	}
	if low == high {
		high = 1
	}
	var out string
	for _, f := range formats {
		p := newPlot()
		p.X.Min, p.X.Max = low, high
		p.X.Width, p.X.Tick.Width = 0, 0
		p.X.Tick.Marker = thinned{fits: f.width / 70}
		p.Y.Min, p.Y.Max = 0, float64(wordsSlots*len(rows))
		p.Y.Tick.Length = 0
		var names []plot.Tick
		for i := range rows {
			names = append(names, plot.Tick{Value: slotOf(rows, i, 1), Label: "A "}, plot.Tick{Value: slotOf(rows, i, 2), Label: "B "})
		}
		p.Y.Tick.Marker = plot.ConstantTicks(names)
		pairs := &pairPlotter{rows: rows, unit: u, style: p.X.Tick.Label, characters: int(f.width / 7)}
		pairs.style.XAlign, pairs.style.YAlign = draw.XLeft, draw.YCenter
		p.Add(grid{vertical: true}, pairs)
		out += drawSVG(f.width, vg.Length(len(rows)*pairHeight+24), f.class, title, func(dc draw.Canvas) {
			p.Draw(draw.Crop(dc, 1, -pairs.room(c.Rows), 0, -4))
		})
	}
	return out
}

// slotOf is the middle of a figure's slot on the axis, which counts from below.
func slotOf(rows []ComparedFigure, i, slot int) float64 {
	return float64(wordsSlots*(len(rows)-i)-slot) - 0.5
}

type pairPlotter struct {
	rows       []ComparedFigure
	unit       unit
	style      draw.TextStyle
	characters int // of a line of words
}

// room is how wide the longest value beside a bar is, of the metric's.
func (pp *pairPlotter) room(all []ComparedFigure) vg.Length {
	var w vg.Length
	for _, r := range all {
		if r.Metric == pp.rows[0].Metric {
			w = max(w, pp.style.Width(pp.unit.number(r.A.Median)), pp.style.Width(pp.unit.number(r.B.Median)))
		}
	}
	return w + 13
}

// Plot draws A pale, and B in the colour of its verdict.
func (pp *pairPlotter) Plot(c draw.Canvas, p *plot.Plot) {
	for i, r := range pp.rows {
		words := r.Router + ": " + r.change() + ", " + r.words()
		style := pp.style
		style.Color = r.ink()
		if r.Verdict != VerdictOutside {
			style.Color = ink("fg")
		}
		c.FillText(style, vg.Point{X: c.Min.X + 5, Y: c.Y(p.Y.Norm(slotOf(pp.rows, i, 0)))}, clip(printable(words), pp.characters))
		for slot, s := range []Spread{r.A, r.B} {
			y := c.Y(p.Y.Norm(slotOf(pp.rows, i, slot+1)))
			colour := ink("grid")
			if slot == 1 {
				colour = r.ink()
			}
			scale := pp.unit.Scale
			bar{s.Median / scale, s.Min / scale, s.Max / scale, colour, false, pp.unit.number(s.Median)}.draw(c, p, y, 7, pp.style)
		}
	}
	drawZero(c, p)
}

// ink is the colour of a verdict: only a change outside the noise has one.
func (f ComparedFigure) ink() ink {
	switch {
	case f.Better:
		return "good"
	case f.Worse:
		return "bad"
	case f.Verdict == VerdictOutside:
		return "s0"
	}
	return "dim"
}

// blocksOf parts a metric's rows by their conditions, in their order.
func blocksOf(rows []ComparedFigure) (blocks [][]ComparedFigure) {
	for _, r := range rows {
		words := conditions(r.Params)
		i := slices.IndexFunc(blocks, func(b []ComparedFigure) bool { return conditions(b[0].Params) == words })
		if i < 0 {
			i, blocks = len(blocks), append(blocks, nil)
		}
		blocks[i] = append(blocks[i], r)
	}
	return blocks
}
