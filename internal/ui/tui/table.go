// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"
)

// table is one panel of the screen: rows under a title.
type table struct {
	title   string
	columns []column
	rows    []row
	empty   string // what stands in the place of no rows
	text    bool   // rows are lines of a text, which are not sorted
	few     bool   // rows are always the same few, which are not filtered
	still   bool   // it is text, which no key changes
}

type column struct {
	name  string
	right bool // numbers
	zoom  bool // shown only where the panel has the screen for itself
}

type row struct {
	cells []string
	nums  []float64 // of the columns that are numbers, to sort by
	style style
}

// keys are the letters that sort by each column: the first letter of its name that no column
// before it has.
func (t *table) keys() []rune {
	out := make([]rune, len(t.columns))
	for i, col := range t.columns {
		for _, r := range strings.ToUpper(col.name) {
			if r >= 'A' && r <= 'Z' && !slices.Contains(out, r) {
				out[i] = r
				break
			}
		}
	}
	return out
}

// heads are the names of the columns, each with its key's letter as a capital where there are keys.
func (t *table) heads() []string {
	out := make([]string, len(t.columns))
	for i, key := range t.keys() {
		if t.still {
			key = 0
		}
		at := strings.IndexRune(strings.ToUpper(t.columns[i].name), key)
		out[i] = t.columns[i].name
		if key != 0 && at >= 0 {
			out[i] = out[i][:at] + string(key) + out[i][at+1:]
		}
	}
	return out
}

// arrange sorts by a column, numbers from the largest on, and leaves out the rows
// without the filter's text.
func (t *table) arrange(by int, filter string) {
	if t.text {
		return
	}
	if filter != "" && !t.few {
		if len(t.rows) > 0 {
			t.empty = "no row has " + filter
		}
		t.rows = slices.DeleteFunc(t.rows, func(r row) bool {
			return !strings.Contains(strings.ToLower(strings.Join(r.cells, " ")), strings.ToLower(filter))
		})
	}
	if by < 0 || by >= len(t.columns) {
		return // as it came: most first
	}
	slices.SortStableFunc(t.rows, func(a, b row) int {
		if t.columns[by].right {
			return cmp.Compare(b.nums[by], a.nums[by])
		}
		return strings.Compare(a.cells[by], b.cells[by])
	})
}

// draw writes the panel into a part of the canvas: title, names of the columns
// where there is room for them, rows from the one numbered from on.
func (t *table) draw(c *canvas, x, y, w, h int, focus, zoomed bool, by, from int) {
	title := "─ " + t.title + " "
	if by >= 0 && by < len(t.columns) {
		title += "by " + t.columns[by].name + " "
	}
	st := dim
	if focus {
		st = bold
		title = "▸ " + strings.TrimPrefix(title, "─ ")
	}
	end := c.text(x, y, w, st, title)
	c.text(end, y, x+w-end, dim, strings.Repeat("─", max(0, x+w-end)))
	y, h = y+1, h-1
	if len(t.rows) == 0 {
		c.text(x, y, w, dim, t.empty)
		return
	}
	from = max(0, min(from, len(t.rows)-1))
	widths := t.widths(w, zoomed)
	if (zoomed || h > 2) && !t.text {
		c.line(x, y, t.columns, widths, t.heads(), dim)
		y, h = y+1, h-1
	}
	for i := range min(h, len(t.rows)-from) {
		c.line(x, y+i, t.columns, widths, t.rows[from+i].cells, t.rows[from+i].style)
	}
}

// leastFirst is the least that the first column has, as far as its cells take it.
const leastFirst = 12

// widths shares w out: numbers get what they need, the first column the rest. A
// column that is not shown has none.
func (t *table) widths(w int, zoomed bool) []int {
	widths := make([]int, len(t.columns))
	rest := w
	for i, col := range t.columns {
		if i == 0 || col.zoom && !zoomed {
			continue
		}
		widths[i] = utf8.RuneCountInString(col.name)
		for _, r := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(r.cells[i]))
		}
		if !col.right { // words may be cut
			widths[i] = min(widths[i], w/3)
		}
		rest -= widths[i] + 1
	}
	first := utf8.RuneCountInString(t.columns[0].name)
	for _, r := range t.rows {
		first = max(first, utf8.RuneCountInString(r.cells[0]))
	}
	// Numbers that nobody knows of what they are say nothing: on a narrow screen the last columns go.
	for i := len(widths) - 1; i > 0 && rest < min(first, leastFirst); i-- {
		if widths[i] > 0 {
			rest += widths[i] + 1
			widths[i] = 0
		}
	}
	widths[0] = max(0, rest)
	if zoomed && !t.text {
		widths[0] = max(0, min(rest, first))
		if last := len(t.columns) - 1; last > 0 && !t.columns[last].right && widths[last] > 0 { // words that were cut have what is left
			widths[last] += max(0, rest-widths[0])
		}
	}
	return widths
}

// needs is how many columns it takes without a cell that is cut.
func (t *table) needs() (columns int) {
	if len(t.rows) == 0 {
		return utf8.RuneCountInString(t.empty)
	}
	for i, col := range t.columns {
		widest := 0
		if !t.text {
			widest = utf8.RuneCountInString(col.name)
		}
		for _, r := range t.rows {
			widest = max(widest, utf8.RuneCountInString(r.cells[i]))
		}
		columns += widest + 1
	}
	return max(columns-1, utf8.RuneCountInString(t.title)+3)
}

// wrapped breaks the lines of a text that are longer than w.
func (t *table) wrapped(w int) {
	if !t.text {
		return
	}
	var rows []row
	for _, r := range t.rows {
		if utf8.RuneCountInString(r.cells[0]) <= w {
			rows = append(rows, r)
			continue
		}
		for i, line := range wrap(r.cells[0], w-2) {
			if i > 0 {
				line = "  " + line
			}
			rows = append(rows, row{cells: []string{line}, style: r.style})
		}
	}
	t.rows = rows
}

// line writes the cells.
func (c *canvas) line(x, y int, columns []column, widths []int, cells []string, st style) {
	for i, col := range columns {
		if widths[i] == 0 {
			continue
		}
		text := clip(cells[i], widths[i])
		at := x
		if col.right {
			at += widths[i] - utf8.RuneCountInString(text)
		}
		c.text(at, y, widths[i], st, text)
		x += widths[i] + 1
	}
}
