// SPDX-License-Identifier: Apache-2.0

package history

import (
	"cmp"
	"maps"
	"slices"
	"sort"
	"time"
)

// Episode is a finding from its beginning to its end.
type Episode struct {
	Namespace string    `json:"netns"`
	Code      string    `json:"code"`
	Severity  string    `json:"severity"` // the last one
	Title     string    `json:"title"`
	Began     time.Time `json:"since"`
	Ended     time.Time `json:"ended,omitzero"`   // zero: it is on
	Why       string    `json:"reason,omitempty"` // it ended for another reason than that it is cured
	Impact    float64   `json:"impact,omitempty"`
	// Changes are what somebody did to the namespace, or to the host, in the two minutes before.
	Changes []Change `json:"changes,omitempty"`
}

const (
	// changesBefore is how long before a finding begins a change may have brought it about.
	changesBefore = 2 * time.Minute
	// resumes is how long after a start of the monitor a finding that was on counts as the same.
	resumes = 5 * time.Minute
)

// Episodes makes episodes of entries.
type Episodes struct {
	open      map[episodeKey]*Episode
	suspended map[episodeKey]*Episode // on when the monitor ended
	done      []Episode
	changes   []Change // that may still have brought something about
	started   time.Time
	last      time.Time
}

type episodeKey struct{ namespace, code string }

// hostTitle is how the host's namespace is spoken of.
const hostTitle = "host"

// Add takes the next entry.
func (e *Episodes) Add(entry *Entry) {
	if e.open == nil {
		e.open, e.suspended = map[episodeKey]*Episode{}, map[episodeKey]*Episode{}
	}
	if entry.Begins {
		e.letGo()
		for key, open := range e.open {
			open.Ended, open.Why = e.last, "natkit monitor ended"
			e.suspended[key] = open
		}
		clear(e.open)
		e.started = entry.At
	} else if entry.At.Sub(e.started) > resumes {
		e.letGo()
	}
	before := e.last
	e.last = entry.At
	e.changes = append(e.changes, entry.Changes...)
	for _, event := range entry.Events {
		key := episodeKey{event.Namespace, event.Code}
		switch open := e.open[key]; {
		case event.Kind == Began:
			e.begin(key, event)
		case open == nil: // began before the first entry
			if event.Kind == Ended {
				e.done = append(e.done, Episode{Namespace: event.Namespace, Code: event.Code, Severity: event.Severity, Title: event.Title, Ended: event.Since, Why: event.Why})
			}
		case event.Kind == Changed:
			open.Severity, open.Title = event.Severity, event.Title
		case event.Kind == Ended:
			open.Ended, open.Why, open.Severity = event.Since, event.Why, event.Severity
			e.done = append(e.done, *open)
			delete(e.open, key)
		}
	}
	e.compare(entry.On, before)
	// The beginning of a finding is told an interval or two late.
	old := slices.IndexFunc(e.changes, func(c Change) bool { return entry.At.Sub(c.At) <= 2*changesBefore })
	if old < 0 {
		old = len(e.changes)
	}
	e.changes = slices.Clone(e.changes[old:])
}

// compare takes a list of all that is on, nil for none: what began or ended without an entry that says so did before.
func (e *Episodes) compare(list []Event, before time.Time) {
	if list == nil {
		return
	}
	on := map[episodeKey]bool{}
	for _, event := range list {
		key := episodeKey{event.Namespace, event.Code}
		on[key] = true
		if open := e.open[key]; open == nil {
			e.begin(key, event)
		} else if open.Severity != event.Severity {
			open.Severity, open.Title = event.Severity, event.Title
		}
	}
	for key, open := range e.open {
		if !on[key] {
			open.Ended, open.Why = before, "its end was not recorded"
			e.done = append(e.done, *open)
			delete(e.open, key)
		}
	}
}

func (e *Episodes) begin(key episodeKey, event Event) {
	if before, ok := e.suspended[key]; ok {
		before.Ended, before.Why, before.Severity, before.Title = time.Time{}, "", event.Severity, event.Title
		e.open[key] = before
		delete(e.suspended, key)
		return
	}
	began := event.Since
	if began.IsZero() {
		began = event.At
	}
	new := &Episode{Namespace: event.Namespace, Code: event.Code, Severity: event.Severity, Title: event.Title, Began: began, Impact: event.Impact}
	for _, c := range e.changes {
		if (c.Inode == event.Inode || c.Namespace == hostTitle) && !c.At.After(began) && began.Sub(c.At) <= changesBefore {
			new.Changes = append(new.Changes, c)
		}
	}
	e.open[key] = new
}

// letGo ends what was on when the monitor ended and did not come back.
func (e *Episodes) letGo() {
	for _, s := range e.suspended {
		e.done = append(e.done, *s)
	}
	clear(e.suspended)
}

// List is all of them, in the order in which they began.
func (e *Episodes) List() []Episode {
	out := slices.Clone(e.done)
	for _, open := range []map[episodeKey]*Episode{e.suspended, e.open} {
		for _, episode := range slices.Collect(maps.Values(open)) {
			out = append(out, *episode)
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		a, b := &out[i], &out[j]
		return cmp.Or(a.Began.Compare(b.Began), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Code, b.Code)) < 0
	})
	return out
}
