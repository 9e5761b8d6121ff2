// SPDX-License-Identifier: Apache-2.0

// Package report shows results: as text for people and as JSON for programs.
// One file holds one kind of result. It measures and judges nothing.
package report

import (
	"encoding/json"
	"io"
)

// JSON writes a result as indented JSON, the form of every command's -o json.
func JSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false) // "->" stays readable
	return enc.Encode(v)
}
