// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"slices"
	"strings"
	"time"

	"github.com/gdamore/tcell/v2"

	"natkit/internal/snapshot"
	"natkit/internal/ui/live"
)

// state is all that decides what the screen shows. It is changed by moments and
// keys and knows no terminal.
type state struct {
	shown   *live.Moment   // nil at first
	waiting []*live.Moment // newer than shown while paused
	drops   []dropped      // of the last dropsOver
	levels  []float64      // of the table, an interval each

	still  bool // it is text, which no key changes
	paused bool
	focus  int
	zoomed bool
	from   int // first row of the zoomed panel
	page   int // rows that it shows
	sort   [panels]int

	filter  string
	typing  bool
	help    bool
	choice  *choice // of a namespace, while it is open
	refused string  // what went wrong with the last one
}

type dropped struct {
	at      time.Time
	seconds float64
	drops   snapshot.Drops
}

// dropsOver is how long a drop stays in sight.
const dropsOver = 10 * time.Second

// mostLevels is more than a screen is wide.
const mostLevels = 512

// choice is the list of namespaces to choose from.
type choice struct {
	list []live.Namespace
	at   int
}

func newState() *state {
	s := &state{}
	for i := range s.sort {
		s.sort[i] = -1
	}
	return s
}

// forget is for another namespace: nothing is known of it yet.
func (s *state) forget() {
	s.shown, s.waiting, s.drops, s.levels, s.paused, s.from = nil, nil, nil, nil, false, 0
}

// add takes a moment; while paused the screen stays and the count goes on.
func (s *state) add(m *live.Moment) {
	if s.paused {
		s.waiting = append(s.waiting, m)
		s.waiting = s.waiting[max(0, len(s.waiting)-mostLevels):]
		return
	}
	s.shown = m
	if s.focus >= s.panels() { // the engine went down
		s.focus, s.zoomed, s.from = panelFindings, false, 0
	}
	if m.Table != nil {
		s.levels = append(s.levels, float64(m.Table.Entries))
		s.levels = s.levels[max(0, len(s.levels)-mostLevels):]
	}
	if m.Drops != nil {
		s.drops = append(s.drops, dropped{m.At, m.Seconds, *m.Drops})
	}
	s.drops = slices.DeleteFunc(s.drops, func(d dropped) bool { return m.At.Sub(d.at) >= dropsOver })
}

// action is what a key asks of those who own the terminal.
type action int

const (
	nothing action = iota
	quit
	suspend
	redraw
	listNamespaces
	enterNamespace // s.choice.list[s.choice.at]
)

// key obeys a key.
func (s *state) key(k tcell.Key, r rune) action {
	switch {
	case k == tcell.KeyCtrlC:
		return quit
	case k == tcell.KeyCtrlZ:
		return suspend
	case k == tcell.KeyCtrlL:
		return redraw
	case s.typing:
		s.type_(k, r)
		return nothing
	case s.help:
		s.help = false
		return nothing
	case s.choice != nil:
		return s.choose(k, r)
	}
	switch {
	case r == 'q':
		return quit
	case r == '?' || r == 'h':
		s.help = true
	case r == 'p' || r == ' ':
		s.paused = !s.paused
		if !s.paused {
			waiting := s.waiting
			s.waiting = nil
			for _, m := range waiting {
				s.add(m)
			}
		}
	case r == '/':
		s.typing, s.filter = true, ""
	case r == 'n':
		return listNamespaces
	case r == 's':
		s.nextSort()
	case r >= 'A' && r <= 'Z':
		s.sortBy(r)
	case r == 'f':
		s.focus, s.zoomed, s.from = panelFindings, true, 0
	case k == tcell.KeyTab || k == tcell.KeyRight:
		s.focus, s.from = (s.focus+1)%s.panels(), 0
	case k == tcell.KeyBacktab || k == tcell.KeyLeft:
		s.focus, s.from = (s.focus+s.panels()-1)%s.panels(), 0
	case k == tcell.KeyEnter:
		s.zoomed, s.from = !s.zoomed, 0
	case k == tcell.KeyEscape:
		if s.zoomed {
			s.zoomed = false
		} else {
			s.filter = ""
		}
	case k == tcell.KeyDown || r == 'j':
		s.from++
	case k == tcell.KeyUp || r == 'k':
		s.from = max(0, s.from-1)
	case k == tcell.KeyPgDn:
		s.from += max(1, s.page)
	case k == tcell.KeyPgUp:
		s.from = max(0, s.from-max(1, s.page))
	case k == tcell.KeyHome:
		s.from = 0
	}
	return nothing
}

// nextSort goes through the columns that the panel shows, and back to the order
// in which rows come.
func (s *state) nextSort() {
	t := s.panel(s.focus, s.zoomed, columns80)
	if t.text {
		return
	}
	by := s.sort[s.focus] + 1
	for by < len(t.columns) && t.columns[by].zoom && !s.zoomed {
		by++
	}
	if by >= len(t.columns) {
		by = -1
	}
	s.sort[s.focus] = by
}

// sortBy sorts the panel by the column that has the key, or again in the order in which rows come.
func (s *state) sortBy(key rune) {
	t := s.panel(s.focus, s.zoomed, columns80)
	by := slices.Index(t.keys(), key)
	if t.text || by < 0 || t.columns[by].zoom && !s.zoomed {
		return
	}
	if s.sort[s.focus] == by {
		by = -1
	}
	s.sort[s.focus], s.from = by, 0
}

// sortKeys are the letters that sort the panel, "" where it is not sorted.
func (s *state) sortKeys() string {
	t := s.panel(s.focus, s.zoomed, columns80)
	if t.text {
		return ""
	}
	var words []string
	for i, key := range t.keys() {
		if key != 0 && (s.zoomed || !t.columns[i].zoom) {
			words = append(words, string(key))
		}
	}
	return strings.Join(words, " ")
}

func (s *state) type_(k tcell.Key, r rune) {
	switch k {
	case tcell.KeyEnter:
		s.typing = false
	case tcell.KeyEscape:
		s.typing, s.filter = false, ""
	case tcell.KeyBackspace, tcell.KeyBackspace2:
		if n := len(s.filter); n > 0 {
			s.filter = s.filter[:n-1]
		}
	case tcell.KeyRune:
		if r >= ' ' && r <= '~' && len(s.filter) < 40 {
			s.filter += string(r)
		}
	}
	s.from = 0
}

func (s *state) choose(k tcell.Key, r rune) action {
	c := s.choice
	switch {
	case k == tcell.KeyDown || r == 'j' || r == 'n':
		c.at = min(c.at+1, len(c.list)-1)
	case k == tcell.KeyUp || r == 'k':
		c.at = max(c.at-1, 0)
	case k == tcell.KeyEnter:
		return enterNamespace
	case k == tcell.KeyEscape || r == 'q':
		s.choice = nil
	}
	return nothing
}
