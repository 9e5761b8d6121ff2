// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"natkit/internal/natlog/store"
)

// FileName is the file in the folder of the log that says how its sinks are, and up to which
// position each has the log. It is written once a second.
const FileName = "sinks.json"

// Kind and version of that file.
const (
	Kind    = "log-sinks"
	Version = 1
)

var file = store.Beside{Name: FileName, Kind: Kind, Version: Version, Lasts: true} // without positions, sinks have only what is alive of what they missed

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
	switch err = file.Read(dir, &f); {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return f, nil
	case errors.Is(err, store.ErrNewer):
		return f, fmt.Errorf("%w, or remove the file to begin again", err)
	case errors.Is(err, store.ErrDamaged):
		return File{}, err
	}
	return f, fmt.Errorf("read the positions of sinks: %w", err)
}

func writeFile(dir string, f File) error {
	if err := file.Write(dir, f); err != nil {
		return fmt.Errorf("write the positions of sinks: %w", err)
	}
	return nil
}
