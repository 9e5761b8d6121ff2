// SPDX-License-Identifier: Apache-2.0

// Package history keeps what a monitor sees on disk: facts, changes and events of
// one interval after the other, in bounded room, readable while it is written. It
// judges nothing: stored facts are judged with the causes of whoever reads them.
//
// A folder holds segments, numbered in the order in which they were written, so
// that a clock that is set back mixes nothing up. A segment is one hour; it begins
// with a header and holds frames:
//
//	header  "natkit/history-segment/1\n"
//	frame   mark(2) flags(1) plain(4) length(4) crc(4) payload(length)
//
// An entry is one frame: JSON, compressed. Frames form groups. The first frame of a
// group has the flag key: compression begins again, and each namespace's facts are
// stored whole. What follows stores the difference from the facts before and goes on
// with the same compression. So what is damaged costs the rest of its group, at most
// groupEntries, and a torn end costs the entry that was being written.
package history

import (
	"encoding/json"
	"time"

	"natkit/internal/snapshot"
)

// Entry is what was stored of one interval.
type Entry struct {
	At      time.Time `json:"at"` // its end
	Seconds float64   `json:"seconds"`
	// Begins says that the monitor was started: what it knew before is gone.
	Begins bool `json:"begins,omitempty"`
	// Samples are what is cheap to read: how full the table is and which counters moved, of the
	// namespaces where anything did. They are no facts to judge by.
	Samples []*snapshot.Snapshot `json:"samples,omitempty"`
	// Looks are all facts of the namespaces that were examined in this interval.
	Looks   []Look   `json:"-"`
	Changes []Change `json:"changes,omitempty"`
	Events  []Event  `json:"events,omitempty"`
	// On is all that is on, in one entry of a few minutes: who reads a part of the history learns by it what began before,
	// and what ended while nothing could be stored. nil: it is not listed here.
	On []Event `json:"on,omitzero"`
	// Tunings are settings that the monitor itself changed, or would have.
	Tunings []Tuning `json:"tunings,omitempty"`
	// Lost says what is missing before this entry and why, "" for nothing.
	Lost string `json:"lost,omitempty"`
}

// Change is something that somebody did to a namespace: to its rules, routes, links or settings.
type Change struct {
	At        time.Time `json:"time"`
	Inode     uint64    `json:"netns_inode"`
	Namespace string    `json:"netns"`
	What      string    `json:"what"` // "route added: 10.0.0.0/8 via 10.1.1.1 dev eth0"
}

// Event is a finding that began, changed or ended.
type Event struct {
	At        time.Time `json:"time"`
	Kind      string    `json:"kind"`
	Inode     uint64    `json:"netns_inode"`
	Namespace string    `json:"netns"`
	Code      string    `json:"code"`
	Severity  string    `json:"severity"`
	Title     string    `json:"title"`
	Impact    float64   `json:"impact,omitempty"`
	// Since is when what this event is about was first seen, or for the last time.
	Since time.Time `json:"since,omitzero"`
	Why   string    `json:"reason,omitempty"` // it ended for another reason than that it is cured
}

// Kinds of events.
const (
	Began   = "began"
	Changed = "changed" // another severity
	Ended   = "ended"
	On      = "on" // in a list of all that is on
)

// Tuning is what natkit monitor did about a setting, or would have done (--tune).
type Tuning struct {
	At        time.Time `json:"time"`
	Kind      string    `json:"kind"`
	Inode     uint64    `json:"netns_inode"` // of the namespace whose finding asked for it
	Namespace string    `json:"netns"`
	Setting   string    `json:"setting,omitempty"`
	Old       string    `json:"old,omitempty"`
	New       string    `json:"new,omitempty"`
	Code      string    `json:"code,omitempty"`     // of the finding
	Why       string    `json:"reason"`             // what justifies it: a finding, or what was measured
	ID        string    `json:"apply_id,omitempty"` // of natkit tune history
}

// Kinds of tunings.
const (
	Proposed    = "proposed"      // advice: nothing was changed
	Applied     = "applied"       // changed; its effect is being measured
	Kept        = "kept"          // its effect was measured, and it stays
	TakenBack   = "taken back"    // it has its old value again
	NotTheCause = "not the cause" // what it was taken back for goes on without it: it may be tried again
	NotTuned    = "failed"        // it could not be changed or taken back
)

// Look is all facts of one namespace and window, as they are stored.
type Look struct {
	inode uint64
	at    time.Time
	tree  any // JSON, as values; never written to
	value *snapshot.Snapshot
}

// NewLook is a look to be stored.
func NewLook(s *snapshot.Snapshot) Look {
	return Look{inode: s.Netns.Inode, at: s.TakenAt, value: s}
}

// Inode is the number of the namespace that was looked at.
func (l Look) Inode() uint64 { return l.inode }

// Namespace tells one namespace of a history from the others: numbers of those that are gone are given to others.
type Namespace struct {
	Inode uint64
	Title string
}

// Title is how the namespace is spoken of.
func (l Look) Title() string {
	if l.value != nil {
		return l.value.Netns.Title()
	}
	var n struct {
		Netns snapshot.Netns `json:"namespace"`
	}
	facts, _ := l.tree.(map[string]any)
	if b, err := json.Marshal(map[string]any{"namespace": facts["namespace"]}); err == nil {
		_ = json.Unmarshal(b, &n) // of one that is damaged there is no title, nor are there facts
	}
	return snapshot.CleanText(n.Netns.Title())
}

// At is when its window ended.
func (l Look) At() time.Time { return l.at }
