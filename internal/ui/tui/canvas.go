// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"strings"
	"unicode/utf8"
)

// style is what a cell looks like; the terminal decides the colours.
type style uint8

const (
	plain style = iota
	bold
	dim
	good
	warn
	bad
	inverse
)

// canvas is a grid of cells to draw on. Signs that a terminal without Unicode
// lacks have a stand-in.
type canvas struct {
	w, h  int
	ascii bool
	put   func(x, y int, r rune, s style)
}

// standIns are the signs natkit draws besides ASCII, and what stands for them.
var standIns = map[rune]rune{
	'█': '#', '░': '.', '…': '~', '─': '-', '→': '>', '·': '-', '▸': '>', '▾': 'v',
	'▁': '_', '▂': '_', '▃': '.', '▄': '-', '▅': '-', '▆': '=', '▇': '=',
}

// text writes s into at most width cells from x on and returns where it ended.
// Foreign signs, which may be wider than a cell, become '?'.
func (c *canvas) text(x, y, width int, st style, s string) int {
	if y < 0 || y >= c.h {
		return x
	}
	end := min(c.w, x+width)
	s = clip(s, end-x)
	for _, r := range s {
		c.set(x, y, r, st)
		x++
	}
	return x
}

func (c *canvas) set(x, y int, r rune, st style) {
	if x < 0 || x >= c.w || y < 0 || y >= c.h {
		return
	}
	if stand, ours := standIns[r]; ours && c.ascii {
		r = stand
	} else if !ours && (r < ' ' || r > '~') {
		r = '?'
	}
	c.put(x, y, r, st)
}

// clip shortens s to width cells, the last an ellipsis where something is missing.
func clip(s string, width int) string {
	if width <= 0 {
		return ""
	}
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width-1]) + "…"
}

// bar draws a share of width cells.
func (c *canvas) bar(x, y, width int, share float64, st style) {
	full := min(width, max(0, int(share*float64(width)+0.5)))
	c.text(x, y, full, st, strings.Repeat("█", full))
	c.text(x+full, y, width-full, dim, strings.Repeat("░", width-full))
}

var levels = []rune("▁▂▃▄▅▆▇█")

// spark writes values as columns, from the least to the largest of them; what differs by
// less than a hundredth is level.
func (c *canvas) spark(x, y, width int, values []float64) {
	if len(values) > width {
		values = values[len(values)-max(width, 0):]
	}
	if len(values) == 0 {
		return
	}
	low, high := values[0], values[0]
	for _, v := range values {
		low, high = min(low, v), max(high, v)
	}
	top := float64(len(levels) - 1)
	for i, v := range values {
		level := top / 2
		if high-low > high/100 {
			level = (v - low) / (high - low) * top
		}
		c.set(x+i, y, levels[int(level)], good)
	}
}
