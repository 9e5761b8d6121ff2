// SPDX-License-Identifier: Apache-2.0

// Package report shows results: as text for people and as JSON for programs.
// One file holds one kind of result. It measures and judges nothing.
package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"natkit/internal/words/schema"
)

// JSON writes a result of one of the Kinds as indented JSON, the form of every command's
// -o json.
func JSON(w io.Writer, v any) error { return write(w, v, "  ") }

// JSONLine writes one of many results as JSON on a line of its own, for commands
// that go on until they are interrupted.
func JSONLine(w io.Writer, v any) error { return write(w, v, "") }

func write(w io.Writer, v any, indent string) error {
	t := reflect.TypeOf(v)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	name, ok := kindNames[t]
	if !ok {
		return fmt.Errorf("write %v as JSON: it is none of report.Kinds", t)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // "->" stays readable
	enc.SetIndent("", indent)
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(harmless(schema.Put(name, b.Bytes())))
	return err
}

// harmless writes the characters of JSON that a terminal may obey, or that hide or turn around text, by
// their numbers: these stand in strings alone.
func harmless(b []byte) []byte {
	special := func(r rune) bool { return r >= 0x7f && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) }
	if bytes.IndexFunc(b, special) < 0 {
		return b
	}
	var out []byte
	for _, r := range string(b) {
		if !special(r) {
			out = utf8.AppendRune(out, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			out = fmt.Appendf(out, `\u%04x`, unit)
		}
	}
	return out
}
