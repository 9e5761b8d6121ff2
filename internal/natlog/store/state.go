// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"natkit/internal/natlog"
	"natkit/internal/words/schema"
)

// StateFile is the file in the folder of the log that tells how the log is kept. It is written
// once a second, for those who watch it: to read the log itself for that would take long.
const StateFile = "log.json"

// Kind and version of that file.
const (
	StateKind    = "log-state"
	StateVersion = 1
)

// State is how a log is kept.
type State struct {
	Time      time.Time `json:"time"`                  // when this was written
	Namespace uint64    `json:"netns_inode,omitempty"` // whose translations it has
	Records   uint64    `json:"records_total"`         // since the log was opened
	Lost      uint64    `json:"lost_records_total"`    // of these, that could not be written
	Error     string    `json:"error,omitempty"`       // why records cannot be written now
	Bytes     int64     `json:"bytes"`                 // of all files
	Gaps      []Missing `json:"gaps"`                  // of the last day, the newest last
}

// Missing is a gap.
type Missing struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	Why   string    `json:"reason"`
}

// How much of gaps a State has.
const (
	gapsMost = 50
	gapsFor  = 24 * time.Hour
)

// ReadState gives how the log in a folder was kept when that was written down. The error is
// fs.ErrNotExist where no log is.
func ReadState(dir string) (s State, err error) {
	path := filepath.Join(dir, StateFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return s, fmt.Errorf("read how the log is kept: %w", err)
	}
	name, err := schema.Of(b)
	if kind, version, ok := schema.Parse(name); err == nil && ok && kind == StateKind && version > StateVersion {
		return s, fmt.Errorf("%s is of a newer natkit: use that", path)
	}
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return State{}, fmt.Errorf("%s is damaged; natkit log and natkit serve write it again", path)
	}
	return s, nil
}

// noteGaps keeps the gaps among records that were written.
func (s *Store) noteGaps(records []natlog.Record) {
	for i := range records {
		if r := &records[i]; r.Event == natlog.Gap {
			s.gaps = append(s.gaps, Missing{r.Since.Time(), r.Time.Time(), r.Note})
		}
	}
	s.gaps = s.gaps[max(0, len(s.gaps)-gapsMost):]
}

// writeState writes the file. What fails is tried again in a second.
func (s *Store) writeState(now time.Time) {
	s.gaps = slices.DeleteFunc(s.gaps, func(m Missing) bool { return now.Sub(m.Until) > gapsFor })
	stats := s.Stats()
	state := State{Time: now.UTC(), Namespace: s.o.Namespace, Records: stats.Records, Lost: stats.Lost, Error: stats.Failing, Bytes: stats.Bytes, Gaps: append([]Missing{}, s.gaps...)}
	b, err := json.MarshalIndent(state, "", "  ")
	if err != nil {
		return
	}
	path := filepath.Join(s.o.Dir, StateFile)
	err = os.WriteFile(path+".new", append(schema.Put(schema.Name(StateKind, StateVersion), b), '\n'), 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		os.Remove(path + ".new")
	}
}
