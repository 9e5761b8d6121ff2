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
	enc := encoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// JSONLine writes one of many results as JSON on a line of its own, for commands
// that go on until they are interrupted.
func JSONLine(w io.Writer, v any) error { return encoder(w).Encode(v) }

func encoder(w io.Writer) *json.Encoder {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false) // "->" stays readable
	return enc
}
