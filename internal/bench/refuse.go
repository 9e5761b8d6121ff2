// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"regexp"
)

// An OptionError is an option that can't be measured with, as opposed to a measurement
// that failed. How options are given is the caller's: Fields are those of the options
// that are refused, and the reason may name others, as {Field}.
type OptionError struct {
	Fields []string
	Reason string
}

func (e *OptionError) Error() string {
	return e.Worded(func(field string) string { return field })
}

// Worded is the error with the fields as name has them.
func (e *OptionError) Worded(name func(field string) string) string {
	var fields string
	for i, f := range e.Fields {
		if i > 0 {
			fields += ", "
		}
		fields += name(f)
	}
	return fields + ": " + worded(e.Reason, name)
}

// A HintError is any other error that an option would help with, named as {Field}.
type HintError struct{ Text string }

func (e *HintError) Error() string {
	return e.Worded(func(field string) string { return field })
}

// Worded is the error with the fields as name has them.
func (e *HintError) Worded(name func(field string) string) string { return worded(e.Text, name) }

var fieldIn = regexp.MustCompile(`\{([A-Z][A-Za-z0-9]*)\}`)

func worded(text string, name func(field string) string) string {
	return fieldIn.ReplaceAllStringFunc(text, func(field string) string { return name(field[1 : len(field)-1]) })
}

// refuse refuses one option.
func refuse(field, format string, args ...any) error {
	return refuseAll([]string{field}, format, args...)
}

func refuseAll(fields []string, format string, args ...any) error {
	return &OptionError{fields, fmt.Sprintf(format, args...)}
}

func hint(format string, args ...any) error { return &HintError{fmt.Sprintf(format, args...)} }
