// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"strings"
	"time"
)

// Log is how the log of translations of the namespace is kept, by natkit log or natkit serve.
type Log struct {
	Folder  string    `json:"folder"`
	Wanted  bool      `json:"wanted"`        // the rules in use say that it is kept
	Written time.Time `json:"time,omitzero"` // when it was last written; none: never
	// Lost are records that could not be written in the window, Error why they cannot be now.
	Lost  uint64 `json:"lost_records"`
	Error string `json:"error,omitempty"`
	// Gaps are those of the last day, newest first, at most TopN of GapCount.
	Gaps     []LogGap  `json:"gaps,omitzero"`
	GapCount int       `json:"gap_count"`
	Sinks    []LogSink `json:"sinks,omitzero"`
}

// LogGap is a time that the log does not have.
type LogGap struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	Why   string    `json:"reason"`
}

// LogSink is what the log is sent on to.
type LogSink struct {
	URL       string    `json:"url"`
	Hostname  string    `json:"hostname,omitempty"` // of Kafka the first broker's
	Port      uint16    `json:"port,omitempty"`
	Stream    bool      `json:"stream"` // it can be reached by TCP, or cannot
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"` // of connected, or of not
	Behind    float64   `json:"behind_s"`       // how long something has been unsent
	Unsent    int       `json:"unsent_records"`
	Lost      uint64    `json:"lost_records"` // in the window: no file of the log has them any more
	Error     string    `json:"error,omitempty"`
}

// Name is the sink without its options, which name files and users.
func (s *LogSink) Name() string {
	name, _, _ := strings.Cut(s.URL, "?")
	return name
}
