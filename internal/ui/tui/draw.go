// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/ui/live"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// The least screen that everything fits on.
const (
	columns80 = 80
	leastW    = 40
	leastH    = 10

	leastPanel = 4 // lines of one beside others
)

// draw writes the whole screen. What changes between two moments is few cells;
// the terminal's part sends only those.
func (s *state) draw(c *canvas) {
	if c.w < leastW || c.h < leastH {
		c.text(0, 0, c.w, plain, fmt.Sprintf("too small: %dx%d of %dx%d", c.w, c.h, leastW, leastH))
		return
	}
	s.header(c)
	switch {
	case s.help:
		s.drawHelp(c)
	case s.choice != nil:
		s.drawChoice(c)
	default:
		s.drawPanels(c)
	}
	s.footer(c)
}

func (s *state) header(c *canvas) {
	m := s.shown
	if m == nil {
		c.text(0, 0, c.w, bold, "natkit top")
		c.text(0, 1, c.w, dim, "reading ...")
		return
	}
	name := m.Netns.Name
	if name == "" {
		name = "(own)"
	}
	right := m.At.Local().Format(time.TimeOnly)
	if s.paused {
		right = "PAUSED " + right
	}
	c.text(0, 0, c.w-len(right)-1, bold, fmt.Sprintf("natkit top · %s · namespace %s · Linux %s", m.Host.Hostname, name, m.Host.Kernel))
	st := bold
	if s.paused {
		st = inverse
	}
	c.text(c.w-len(right), 0, len(right), st, right)
	s.fill(c, m)
	s.flows(c, m)
	if e, r := engineOf(m); e != nil {
		text, st := engineLine(e, r)
		c.text(0, headerLines-1, c.w, st, text)
	}
	c.text(0, s.headerLines()-1, c.w, dim, s.reading(m))
}

// fill is how full the table is, and when it will be.
func (s *state) fill(c *canvas, m *live.Moment) {
	f := m.Table
	switch {
	case f == nil:
		c.text(0, 1, c.w, dim, "table   no connection tracking in this namespace yet")
		return
	case f.Max == 0:
		c.text(0, 1, c.w, plain, fmt.Sprintf("table   %s, no limit", plural.Count(f.Entries, "entry")))
		return
	}
	share := float64(f.Entries) / float64(f.Max)
	st := good
	switch {
	case share >= 0.95:
		st = bad
	case share >= 0.8 || f.FullIn != nil && *f.FullIn < 600:
		st = warn
	}
	text := fmt.Sprintf(" %d of %d  %s", f.Entries, f.Max, percent.Of(share, 1))
	if f.PerSecond != nil {
		text += "  " + change(*f.PerSecond) + "/s"
	}
	switch {
	case share >= 1:
		text += "  FULL"
	case f.FullIn != nil && *f.FullIn < 48*3600:
		text += "  full in " + span(*f.FullIn)
	}
	width := max(8, c.w-8-max(46, len(text)))
	c.text(0, 1, 8, plain, "table")
	c.bar(8, 1, width, share, st)
	if st == good {
		st = plain
	}
	c.text(8+width, 1, c.w-8-width, st, text)
}

// span writes a time in two units at most.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second)).Round(time.Second)
	switch {
	case d >= 24*time.Hour:
		return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	case d >= time.Minute:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

func (s *state) flows(c *canvas, m *live.Moment) {
	text := "flows   new and ended are not seen"
	if f := m.Flows; f != nil {
		text = fmt.Sprintf("flows   new %s/s  ended %s/s", short(f.NewPerSecond), short(f.EndedPerSecond))
		if f.LostEvents > 0 {
			text += "  (" + plural.Count(f.LostEvents, "event") + " lost)"
		}
	}
	end := c.text(0, 2, c.w, plain, text)
	at := max(end+2, 44)
	if c.w-at > 16 && len(s.levels) > 0 {
		end = c.text(at, 2, c.w, dim, "entries ")
		c.spark(end, 2, c.w-end, s.levels)
	}
}

// reading says how old the slow facts are and what they cost.
func (s *state) reading(m *live.Moment) string {
	var words []string
	switch j := m.Judged; {
	case j == nil:
		words = append(words, "the first window is not complete yet")
	case j.Table != nil:
		words = append(words, fmt.Sprintf("table read in %.2f s, %.0f s ago", j.Table.DumpSeconds, max(0, m.At.Sub(j.TableAt).Seconds())))
	default:
		_, why := tableOf(m)
		words = append(words, why)
	}
	if n := len(m.Unseen); n > 0 {
		words = append(words, "not seen: "+strings.Join(m.Unseen, "; "))
	}
	return "        " + strings.Join(words, "; ")
}

const headerLines = 4 // and one where natkit's own engine is up

func (s *state) headerLines() int {
	if e, _ := engineOf(s.shown); e != nil {
		return headerLines + 1
	}
	return headerLines
}

// drawPanels gives the findings a strip and the other panels a grid, or the
// focused one everything.
func (s *state) drawPanels(c *canvas) {
	top, bottom := s.headerLines(), c.h-1
	if s.zoomed {
		t := s.panel(s.focus, true, c.w)
		t.arrange(s.sort[s.focus], s.filter)
		s.page = bottom - top - 2
		s.from = max(0, min(s.from, len(t.rows)-s.page))
		t.draw(c, 0, top, c.w, bottom-top, true, true, s.sort[s.focus], s.from)
		return
	}
	t := s.panel(panelFindings, false, c.w)
	strip := 1 + min(max(1, len(t.rows)), max(1, (bottom-top)/5))
	t.draw(c, 0, top, c.w, strip, s.focus == panelFindings, false, -1, 0)
	top += strip
	wide := min(3, max(1, c.w/leastW))
	high := max(1, min((s.panels()-1+wide-1)/wide, (bottom-top)/leastPanel))
	// Where not all fit, the page of panels with the focused one.
	first := panelSources
	if at := s.focus - panelSources; at >= wide*high {
		first += at / (wide * high) * (wide * high)
	}
	for i := range wide * high {
		n := first + i
		if n >= s.panels() {
			break
		}
		x, y := i%wide*(c.w+1)/wide, top+i/wide*(bottom-top)/high
		w, h := (i%wide+1)*(c.w+1)/wide-x-1, top+(i/wide+1)*(bottom-top)/high-y
		t := s.panel(n, false, w)
		t.arrange(s.sort[n], s.filter)
		t.draw(c, x, y, w, h, s.focus == n, false, s.sort[n], 0)
	}
}

func (s *state) footer(c *canvas) {
	y := c.h - 1
	switch {
	case s.typing:
		c.text(0, y, c.w, bold, "show only rows with: "+s.filter+"_   (enter keeps it, esc drops it)")
	case s.choice != nil:
		c.text(0, y, c.w, dim, "up, down: choose   enter: look there   esc: back")
	case s.help:
		c.text(0, y, c.w, dim, "any key: back")
	case s.refused != "":
		c.text(0, y, c.w, bad, s.refused)
	default:
		text := "q quit  h help  tab panel  enter zoom  f findings  / filter  n namespace"
		if keys := s.sortKeys(); keys != "" {
			text = "q quit  h help  tab panel  enter zoom  / filter  n namespace  sort: " + keys
		}
		if s.filter != "" {
			text = "only rows with " + s.filter + " (esc: all)  " + text
		}
		c.text(0, y, c.w, dim, text)
	}
}

var helpLines = []string{
	"q, ctrl-c      quit",
	"tab, right     next panel; left, shift-tab: the one before",
	"enter          zoom the panel, with all its columns; again, or esc: back",
	"up, down       scroll the zoomed panel (page up, page down, home)",
	"f              findings, with reason and cure",
	"A to Z         sort the panel by the column with that capital letter in its",
	"               name; again: back to the first order. s: by the next column",
	"/              show only rows that contain a text; esc: all rows",
	"p, space       pause the screen; counting continues",
	"n              choose a namespace",
	"ctrl-l         redraw the screen",
	"ctrl-z         stop natkit; fg continues",
	"",
	"Entries, new and ended flows, drops and CPUs are of about the last interval;",
	"addresses, states, ports and findings are of the last window, whose time is",
	"in the last line of the head. The trend covers half a minute. Sessions of the",
	"eBPF engine are not in the table: its rows are marked. Rates of flows are from",
	"two readings of the table and need nf_conntrack_acct=1, except for the engine's.",
}

func (s *state) drawHelp(c *canvas) {
	for i, line := range helpLines {
		if y := s.headerLines() + i; y < c.h-1 {
			c.text(0, y, c.w, plain, line)
		}
	}
}

func (s *state) drawChoice(c *canvas) {
	top := s.headerLines()
	c.text(0, top, c.w, bold, "namespaces")
	rows := c.h - 2 - top
	first := max(0, s.choice.at-rows+1)
	for i := range min(rows, len(s.choice.list)-first) {
		n, st := s.choice.list[first+i], plain
		if first+i == s.choice.at {
			st = inverse
		}
		ref := n.Ref
		if ref == "" {
			ref = "(natkit's own)"
		}
		end := c.text(2, top+1+i, c.w-2, st, ref)
		c.text(max(end+2, 24), top+1+i, c.w, dim, n.About)
	}
}

// Text is the screen as plain text of so many columns, with all panels one below the
// other: for a pipe or a terminal that can't be drawn on. With 0 columns each panel has as
// many as its rows take. With ascii it has no other signs.
func Text(m *live.Moment, width int, ascii bool) string {
	s := newState()
	s.still = true
	s.add(m)
	var lines []string
	part := func(width, h int, draw func(c *canvas)) {
		grid := make([][]rune, h)
		for y := range grid {
			grid[y] = []rune(strings.Repeat(" ", width))
		}
		draw(&canvas{w: width, h: h, ascii: ascii, put: func(x, y int, r rune, _ style) { grid[y][x] = r }})
		for _, line := range grid {
			lines = append(lines, strings.TrimRight(string(line), " "))
		}
	}
	wide := func(needs int) int {
		if width == 0 {
			return max(columns80, needs)
		}
		return max(leastW, width)
	}
	part(wide(0), s.headerLines()-1, s.header)
	reading := []string{strings.TrimSpace(s.reading(m))}
	if width > 0 {
		reading = wrap(reading[0], wide(0)-8)
	}
	for _, line := range reading {
		part(wide(utf8.RuneCountInString(line)+8), 1, func(c *canvas) { c.text(8, 0, c.w, plain, line) })
	}
	for n := range s.panels() {
		t := s.panel(n, n != panelFindings, columns80)
		t.still = true
		w := wide(t.needs())
		t.wrapped(w)
		rows := max(1, len(t.rows))
		if len(t.rows) > 0 && n != panelFindings {
			rows++ // the names of its columns
		}
		part(w, 1+rows, func(c *canvas) { t.draw(c, 0, 0, w, 1+rows, false, n != panelFindings, -1, 0) })
	}
	return strings.Join(lines, "\n") + "\n"
}

// change writes a rate with its sign; what rounds to nothing has none.
func change(rate float64) string {
	if math.Abs(rate) < 0.5 {
		return "0"
	}
	return fmt.Sprintf("%+.0f", rate)
}
