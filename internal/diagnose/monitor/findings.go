// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/snapshot"
)

// A finding is on after onAfter windows in a row that show it, and off after offAfter in a row
// that do not; it becomes more severe and less severe after as many. In between, what is on is judged by the lower of its thresholds
// (causes.JudgeAgain). Only windows in which the namespace was examined count.
const (
	onAfter  = 2
	offAfter = 5
)

// Active is a finding that is on.
type Active struct {
	Netns   snapshot.Netns
	Finding causes.Finding // as the last window that showed it has it
	Since   time.Time      // the end of the first window that showed it
	Last    time.Time      // of the last
}

// track is how one finding of one namespace has gone.
type track struct {
	Active
	on       bool
	with     int // windows in a row that showed it
	without  int // that did not
	severity causes.Severity
	other    int    // windows in a row with a lower severity than the reported one, or with a higher one
	lower    bool   // they have a lower one
	title    string // of the namespace when it began: it may get a better name
}

// space is what the findings of one namespace are.
type space struct {
	netns  snapshot.Netns
	tracks map[string]*track // by code
}

// findings are those of all namespaces.
type findings struct {
	spaces map[uint64]*space
}

func newFindings() *findings { return &findings{map[uint64]*space{}} }

// named are the codes that the last window showed, for JudgeAgain.
func (f *findings) named(inode uint64) map[string]bool {
	out := map[string]bool{}
	if s := f.spaces[inode]; s != nil {
		for code, t := range s.tracks {
			if (t.on || t.with > 0) && t.Finding.Severity > causes.Advice {
				out[code] = true
			}
		}
	}
	return out
}

// flat are findings with those folded under others, which are findings of their own for
// who waits for one of them.
func flat(list []causes.Finding) (out []causes.Finding) {
	for _, f := range list {
		consequences := f.Consequences
		f.Consequences = nil
		out = append(append(out, f), flat(consequences)...)
	}
	return out
}

// window takes what a window of a namespace has shown, and returns what that changes.
func (f *findings) window(netns snapshot.Netns, at time.Time, shown []causes.Finding) (events []history.Event) {
	s := f.spaces[netns.Inode]
	if s == nil {
		s = &space{tracks: map[string]*track{}}
		f.spaces[netns.Inode] = s
	}
	s.netns = netns
	for _, finding := range flat(shown) {
		t := s.tracks[finding.Code]
		if t == nil {
			t = &track{}
			s.tracks[finding.Code] = t
		}
		if t.with == 0 && !t.on {
			t.Since = at
		}
		t.Netns, t.Finding, t.Last = netns, finding, at
		t.with, t.without = t.with+1, 0
		switch {
		case !t.on && t.with >= onAfter:
			t.on, t.severity, t.title = true, finding.Severity, Title(netns)
			events = append(events, t.event(history.Began, at, ""))
		case t.on && finding.Severity != t.severity:
			if lower := finding.Severity < t.severity; lower != t.lower {
				t.lower, t.other = lower, 0
			}
			after := onAfter
			if t.lower {
				after = offAfter
			}
			if t.other++; t.other >= after {
				t.severity, t.other = finding.Severity, 0
				events = append(events, t.event(history.Changed, at, ""))
			}
		default:
			t.other = 0
		}
	}
	for code, t := range s.tracks {
		if t.Last.Equal(at) {
			continue
		}
		t.with, t.other = 0, 0
		t.without++
		switch {
		case !t.on:
			delete(s.tracks, code)
		case t.without >= offAfter:
			events = append(events, t.event(history.Ended, at, ""))
			delete(s.tracks, code)
		}
	}
	slices.SortFunc(events, func(a, b history.Event) int { return cmp.Compare(a.Code, b.Code) })
	return events
}

func (t *track) event(kind string, at time.Time, why string) history.Event {
	e := history.Event{
		At: at, Kind: kind, Inode: t.Netns.Inode, Namespace: t.title, Code: t.Finding.Code, Severity: t.severity.String(),
		Title: t.Finding.Title, Impact: t.Finding.Impact, Why: why,
	}
	switch kind {
	case history.Began, history.On:
		e.Since = t.Since
	case history.Ended:
		e.Since = t.Last
	}
	return e
}

// list is all that is on, as the history has it; never nil.
func (f *findings) list(at time.Time) []history.Event {
	out := []history.Event{}
	for _, s := range f.spaces {
		for _, t := range s.tracks {
			if t.on {
				out = append(out, t.event(history.On, at, ""))
			}
		}
	}
	slices.SortFunc(out, func(a, b history.Event) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Code, b.Code))
	})
	return out
}

// gone ends the findings of namespaces that are gone.
func (f *findings) gone(is func(inode uint64) bool, at time.Time) (events []history.Event) {
	for inode, s := range f.spaces {
		if !is(inode) {
			continue
		}
		for _, t := range s.tracks {
			if t.on {
				events = append(events, t.event(history.Ended, at, "the namespace is gone"))
			}
		}
		delete(f.spaces, inode)
	}
	slices.SortFunc(events, func(a, b history.Event) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Code, b.Code))
	})
	return events
}

// active are those that are on, the most severe first.
func (f *findings) active() (out []Active) {
	for _, s := range f.spaces {
		for _, t := range s.tracks {
			if t.on {
				a := t.Active
				a.Finding.Severity = t.severity
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, func(a, b Active) int {
		return cmp.Or(-cmp.Compare(a.Finding.Severity, b.Finding.Severity), -cmp.Compare(a.Finding.Impact, b.Finding.Impact),
			cmp.Compare(a.Finding.Code, b.Finding.Code), cmp.Compare(a.Netns.Inode, b.Netns.Inode))
	})
	return out
}

// asking are the findings above advice that are on in a namespace, the most important first: those whose
// settings may be changed.
func (f *findings) asking(inode uint64) (out []causes.Finding) {
	s := f.spaces[inode]
	if s == nil {
		return nil
	}
	for _, t := range s.tracks {
		if t.on && t.severity > causes.Advice && t.Finding.Severity > causes.Advice {
			out = append(out, t.Finding)
		}
	}
	slices.SortFunc(out, func(a, b causes.Finding) int {
		return cmp.Or(-cmp.Compare(a.Severity, b.Severity), -cmp.Compare(a.Impact, b.Impact), cmp.Compare(a.Code, b.Code))
	})
	return out
}

// urgent says whether the namespace has a finding above advice that is on, or that one more window decides
// about. Advice loses nothing by waiting for the clock's turn.
func (f *findings) urgent(inode uint64) bool {
	s := f.spaces[inode]
	if s == nil {
		return false
	}
	for _, t := range s.tracks {
		if t.on && t.severity > causes.Advice || t.Finding.Severity > causes.Advice {
			return true
		}
	}
	return false
}

// undecided says whether one more window decides whether a finding of the namespace begins.
func (f *findings) undecided(inode uint64) bool {
	s := f.spaces[inode]
	return s != nil && slices.ContainsFunc(slices.Collect(maps.Values(s.tracks)), func(t *track) bool { return !t.on })
}

// shows says whether one of these findings, of at least that severity, is on or was seen in the last window.
func (f *findings) shows(inode uint64, least causes.Severity, codes ...string) bool {
	s := f.spaces[inode]
	return s != nil && slices.ContainsFunc(codes, func(code string) bool {
		t := s.tracks[code]
		return t != nil && t.Finding.Severity >= least
	})
}

// needTable says whether the namespace has a finding above advice, on or seen in the last window, that is judged by
// the table's entries.
func (f *findings) needTable(inode uint64) bool {
	s := f.spaces[inode]
	if s == nil {
		return false
	}
	for code, t := range s.tracks {
		if t.Finding.Severity > causes.Advice && judgedByTable[code] {
			return true
		}
	}
	return false
}

var judgedByTable = func() map[string]bool {
	out := map[string]bool{}
	for _, c := range causes.Catalogue() {
		out[c.Code] = slices.Contains(c.Needs, snapshot.CanConntrackDump)
	}
	return out
}()

// Title is how a namespace is spoken of.
func Title(n snapshot.Netns) string { return n.Title() }

// elsewhere says whether another namespace has this finding.
func (f *findings) elsewhere(inode uint64, code string) bool {
	for other, s := range f.spaces {
		if other != inode && s.tracks[code] != nil {
			return true
		}
	}
	return false
}
