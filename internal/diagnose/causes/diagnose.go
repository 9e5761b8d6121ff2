// SPDX-License-Identifier: Apache-2.0

// Package causes judges facts: a Snapshot goes in, findings come out. It
// reads nothing and changes nothing, so a Snapshot saved on one machine is
// judged on another with the same result.
//
// catalogue.go lists the causes that natkit knows; each cause is a file of its
// own, named like its code. What is wrong *now* is decided from increases over
// the window, never from totals since boot.
//
//go:generate go test -run TestDocs -update .
package causes

import (
	"fmt"

	"natkit/internal/snapshot"
)

// Severity is how much a finding matters: what is lost now is critical, what
// will be lost soon is a warning, what is merely wasted is advice.
type Severity int

// The severities, least first. Zero is none of them.
const (
	Advice Severity = iota + 1
	Warning
	Critical
)

var severityNames = map[Severity]string{Advice: "advice", Warning: "warning", Critical: "critical"}

func (s Severity) String() string {
	if name, ok := severityNames[s]; ok {
		return name
	}
	return fmt.Sprintf("Severity(%d)", int(s))
}

// MarshalText gives the severity's name.
func (s Severity) MarshalText() ([]byte, error) {
	if name, ok := severityNames[s]; ok {
		return []byte(name), nil
	}
	return nil, fmt.Errorf("severity %d: not one of critical, warning, advice", int(s))
}

// UnmarshalText reads the severity's name.
func (s *Severity) UnmarshalText(text []byte) error {
	for value, name := range severityNames {
		if name == string(text) {
			*s = value
			return nil
		}
	}
	return fmt.Errorf("severity %q: want critical, warning or advice", text)
}

// Evidence is one number that speaks for a finding, and where it was read.
type Evidence struct {
	What   string `json:"what"`
	Value  string `json:"value"`
	Source string `json:"read_from"`
}

// Finding is one cause found at work, with what proves it and what cures it.
type Finding struct {
	Code     string     `json:"code"` // a Cause's code
	Severity Severity   `json:"severity"`
	Title    string     `json:"title"` // one line, with this machine's numbers
	Evidence []Evidence `json:"evidence"`
	Why      string     `json:"why"`
	// Remedy is commands, ready to run on this machine; a line that begins with
	// "# " is a remark. Verify is commands that show whether the cure worked.
	Remedy []string `json:"remedy"`
	Verify []string `json:"verify"`
	// Settings is what package tune would change: the part of the remedy that is
	// kernel settings.
	Settings []snapshot.Setting `json:"settings,omitempty"`
	// Consequences are findings that this one explains; curing this cures them.
	Consequences []Finding `json:"consequences,omitempty"`
	// Impact is packets or connections lost in the window, or below 1 how near the limit; 0 where
	// nothing is lost or that is not known.
	Impact float64 `json:"-"`
}
