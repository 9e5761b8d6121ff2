// SPDX-License-Identifier: Apache-2.0

package report

import "slices"

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
	var low, high, room float64
	for _, r := range c.Rows {
		if r.Metric != rows[0].Metric {
			continue
		}
		for _, s := range []Spread{r.A, r.B} {
			low, high = min(low, s.Min/u.Scale), max(high, s.Max/u.Scale)
			room = max(room, textWidth(u.number(s.Median), textSize))
		}
	}
	if low == high {
		high = 1
	}
	var out string
	for _, f := range formats {
		out += drawSVG(f.width, float64(barsTop+len(rows)*pairHeight+barsBelow), f.class, title, func(on *canvas) {
			c := barChart(on, low, high, textWidth("A", textSize), room)
			for i, r := range rows {
				c.pair(r, u, c.top+float64(i*pairHeight))
			}
			c.zero()
		})
	}
	return out
}

// pair draws a figure below a height: its words, A pale, and B in the colour of its
// verdict.
func (c *chart) pair(r ComparedFigure, u unit, top float64) {
	slot := func(n int) float64 { return top + (float64(n)+0.5)*pairHeight/wordsSlots }
	words := r.Router + ": " + r.change() + ", " + r.words()
	colour := ink("fg")
	if r.Verdict == VerdictOutside {
		colour = r.ink()
	}
	c.text(colour, textSize, c.left+5, slot(0), alignLeft, fitted(words, c.width-c.left-barGap))
	for i, side := range []struct {
		name   string
		colour ink
		of     Spread
	}{{"A", "grid", r.A}, {"B", r.ink(), r.B}} {
		y := slot(i + 1)
		c.text("fg", textSize, c.left-barGap, y, alignRight, side.name)
		c.bar(bar{side.of.Median / u.Scale, side.of.Min / u.Scale, side.of.Max / u.Scale, side.colour, false, u.number(side.of.Median)}, y, 7)
	}
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
