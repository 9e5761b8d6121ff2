// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/snapshot"
)

// StateFile is the file in the folder of the log that tells how the log is kept. It is written
// once a second, for those who watch it: to read the log itself for that would take long.
const StateFile = "log.json"

// Kind and version of that file.
const (
	StateKind    = "log-state"
	StateVersion = 1
)

var stateFile = Beside{Name: StateFile, Kind: StateKind, Version: StateVersion}

// State is how a log is kept.
type State struct {
	Time      time.Time         `json:"time"`                  // when this was written
	Namespace uint64            `json:"netns_inode,omitempty"` // whose translations it has
	Records   uint64            `json:"records_total"`         // that were written since the log was opened
	Lost      uint64            `json:"lost_records_total"`    // that could not be
	Error     string            `json:"error,omitempty"`       // why records cannot be written now
	Bytes     int64             `json:"bytes"`                 // of all files
	Gaps      []snapshot.LogGap `json:"gaps"`                  // of the last day, the newest last
}

// How much of gaps a State has.
const (
	gapsMost = 50
	gapsFor  = 24 * time.Hour
)

// ReadState gives how the log in a folder was kept when that was written down. The error is
// fs.ErrNotExist where no log is.
func ReadState(dir string) (s State, err error) {
	switch err = stateFile.Read(dir, &s); {
	case errors.Is(err, ErrDamaged):
		return State{}, fmt.Errorf("%w; natkit log and natkit serve write it again", err)
	case err != nil && !errors.Is(err, ErrNewer):
		return s, fmt.Errorf("read how the log is kept: %w", err)
	}
	return s, err
}

// noteGaps keeps the gaps among records that were written.
func (s *Store) noteGaps(records []natlog.Record) {
	for i := range records {
		if r := &records[i]; r.Event == natlog.Gap {
			s.gaps = append(s.gaps, snapshot.LogGap{Since: r.Since.Time(), Until: r.Time.Time(), Why: r.Note})
		}
	}
	s.gaps = s.gaps[max(0, len(s.gaps)-gapsMost):]
}

// writeState writes the file. What fails is tried again in a second.
func (s *Store) writeState(now time.Time) {
	s.gaps = slices.DeleteFunc(s.gaps, func(g snapshot.LogGap) bool { return now.Sub(g.Until) > gapsFor })
	stats := s.Stats()
	state := State{Time: now.UTC(), Namespace: s.o.Namespace, Records: stats.Records, Lost: stats.Lost, Error: stats.Failing, Bytes: stats.Bytes, Gaps: append([]snapshot.LogGap{}, s.gaps...)}
	_ = stateFile.Write(s.o.Dir, state)
}
