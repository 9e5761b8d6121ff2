// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"natkit/internal/natlog/store"
	"natkit/internal/words/schema"
)

// FileName is the file in the folder of the log that says how its sinks are, and up to which
// position each has the log. It is written once a second.
const FileName = "sinks.json"

// Kind and version of that file.
const (
	Kind    = "log-sinks"
	Version = 1
)

// State is how a sink is.
type State struct {
	URL       string    `json:"url"`
	Unused    bool      `json:"unused,omitempty"` // it is not configured now; its position is kept
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since,omitzero"`     // of connected, or of not
	Sent      uint64    `json:"sent_records_total"` // some of them twice, after errors
	Lost      uint64    `json:"lost_records_total"` // that no file of the log has any more
	Formless  uint64    `json:"left_out_records_total"`
	Waiting   int       `json:"waiting_records"` // not confirmed yet
	Unsent    int       `json:"unsent_records"`  // of these, not sent yet
	Behind    float64   `json:"behind_s"`        // how long something has been unsent
	LastError string    `json:"error,omitempty"`
	ErrorTime time.Time `json:"error_time,omitzero"`
	// Position is up to where everything was received.
	Position  store.Position `json:"position"`
	FirstHour uint64         `json:"first_hour"` // the number of the hour with which it began
}

// File is what is in that file.
type File struct {
	Time  time.Time `json:"time"`
	Sinks []State   `json:"sinks"`
}

// Read gives how the sinks of a log were when they were written down; none without sinks.
func Read(dir string) (f File, err error) {
	path := filepath.Join(dir, FileName)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return f, fmt.Errorf("read the positions of sinks: %w", err)
	}
	name, err := schema.Of(b)
	if kind, version, ok := schema.Parse(name); err == nil && ok && kind == Kind && version > Version {
		return f, fmt.Errorf("%s is of a newer natkit: use that, or remove the file to begin again", path)
	}
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil { // positions are lost, and each sink begins with what is alive
		return File{}, fmt.Errorf("%s is damaged: remove it, and all sinks begin again with what is alive", path)
	}
	return f, nil
}

func writeFile(dir string, f File) error {
	b, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return fmt.Errorf("write the positions of sinks: %w", err)
	}
	path := filepath.Join(dir, FileName)
	if err := os.WriteFile(path+".new", append(schema.Put(schema.Name(Kind, Version), b), '\n'), 0o600); err != nil {
		return fmt.Errorf("write the positions of sinks: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write the positions of sinks: %w", err)
	}
	return nil
}
