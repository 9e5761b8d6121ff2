// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"natkit/internal/words/schema"
)

// A file of all namespaces of a machine holds their snapshots one after the other,
// so that it is written and read with one of them in memory:
//
//	{"schema": "natkit/snapshots/1", "namespaces": [
//	{"schema": "natkit/snapshot/1", ...},
//	{"schema": "natkit/snapshot/1", ...}
//	], "left_out": {...}}
const (
	allKey = "namespaces"

	// maxAll is how many snapshots such a file may hold.
	maxAll = 10000
)

// allBegin is how a file of all namespaces begins.
func allBegin() string {
	return fmt.Sprintf("{%q: %q, %q: [\n", schema.Key, schema.Name(KindAll, Version), allKey)
}

// LeftOut is what is not in a file of all namespaces: how many have no interface but
// loopback, and which could not be looked into, with the reason.
type LeftOut struct {
	Idle    int      `json:"idle_count"`
	Skipped []string `json:"skipped"`
}

// Writer writes a file of all namespaces.
type Writer struct {
	w    io.Writer
	some bool
}

// NewWriter begins a file.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Add writes one snapshot.
func (w *Writer) Add(s *Snapshot) error {
	before := allBegin()
	if w.some {
		before = ",\n"
	}
	w.some = true
	if _, err := io.WriteString(w.w, before); err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	return Save(w.w, s)
}

// End ends the file.
func (w *Writer) End(l LeftOut) error {
	before := ""
	if !w.some {
		before = allBegin()
	}
	l.Skipped = append([]string{}, l.Skipped...)
	b, err := json.Marshal(l)
	if err == nil {
		_, err = fmt.Fprintf(w.w, "%s], \"left_out\": %s}\n", before, b)
	}
	if err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	return nil
}

// LoadEach reads what Save or a Writer wrote and calls each with every snapshot in it,
// under the limits of Load; all is false for a file of one. An error of each ends it.
func LoadEach(r io.Reader, each func(*Snapshot) error) (left LeftOut, all bool, err error) {
	in := bufio.NewReaderSize(r, 4096)
	if head, _ := in.Peek(256); !ofAll(head) {
		s, err := Load(in)
		if err != nil {
			return LeftOut{}, false, err
		}
		return LeftOut{}, false, each(s)
	}
	limited := &io.LimitedReader{R: in}
	dec := json.NewDecoder(limited)
	n := 0
	failed := func(err error) (LeftOut, bool, error) {
		if limited.N <= 0 {
			err = fmt.Errorf("longer than %d MB", maxBytes>>20)
		} else if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return LeftOut{}, true, fmt.Errorf("load snapshots, after %d: %w", n, err)
	}
	limited.N = maxBytes
	for i, want := range []json.Token{json.Delim('{'), schema.Key, nil, allKey, json.Delim('[')} {
		token, err := dec.Token()
		if err != nil {
			return failed(err)
		}
		if name, _ := token.(string); want == nil {
			if err := known(nil, name, KindAll); err != nil {
				return LeftOut{}, true, fmt.Errorf("load snapshots: %w", err)
			}
		} else if token != want {
			return failed(fmt.Errorf("its part %d is %v, want %v", i+1, token, want))
		}
	}
	for ; ; n++ {
		limited.N = maxBytes // for each of them
		if !dec.More() {
			break
		}
		if n == maxAll {
			return failed(fmt.Errorf("more than %d namespaces", maxAll))
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return failed(err)
		}
		s, err := parse(raw)
		if err != nil {
			return LeftOut{}, true, fmt.Errorf("namespace %d: %w", n+1, err)
		}
		if err := each(s); err != nil {
			return LeftOut{}, true, err
		}
	}
	if _, err := dec.Token(); err != nil { // ]
		return failed(err)
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return failed(err)
		}
		var value any = new(json.RawMessage) // a key of a later version
		if key == "left_out" {
			value = &left
		}
		if err := dec.Decode(value); err != nil {
			return failed(err)
		}
	}
	if _, err := dec.Token(); err != nil { // }
		return failed(err)
	}
	for i, text := range left.Skipped {
		left.Skipped[i] = cleanString(text)
	}
	left.Idle = max(0, left.Idle)
	return left, true, nil
}

// ofAll says whether a file that begins so is one of all namespaces.
func ofAll(head []byte) bool {
	dec := json.NewDecoder(bytes.NewReader(head))
	var tokens [3]json.Token
	for i := range tokens {
		var err error
		if tokens[i], err = dec.Token(); err != nil {
			return false
		}
	}
	name, _ := tokens[2].(string)
	kind, _, ok := schema.Parse(name)
	return ok && tokens[0] == json.Delim('{') && tokens[1] == schema.Key && kind == KindAll
}
