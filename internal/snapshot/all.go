// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

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
	list, err := openList(in)
	if err != nil {
		return LeftOut{}, true, fmt.Errorf("load snapshots: %w", err)
	}
	n := 0
	for more := true; more; n++ {
		var raw []byte
		if raw, more, err = list.next(); err != nil {
			return LeftOut{}, true, fmt.Errorf("load snapshots, after %d: %w", n, cutOff(err))
		}
		if n == 0 && !more && len(bytes.TrimSpace(raw)) == 0 {
			break
		}
		if n == maxAll {
			return LeftOut{}, true, fmt.Errorf("load snapshots: more than %d namespaces", maxAll)
		}
		s, err := parse(raw)
		if err != nil {
			return LeftOut{}, true, fmt.Errorf("namespace %d: %w", n+1, err)
		}
		if err := each(s); err != nil {
			return LeftOut{}, true, err
		}
	}
	if left, err = behindList(list.in); err != nil {
		return LeftOut{}, true, fmt.Errorf("load snapshots, after %d: %w", n, cutOff(err))
	}
	return left, true, nil
}

// cutOff is an error of what ends in the middle.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// openList reads a file up to its list.
func openList(in io.Reader) (*elements, error) {
	dec := json.NewDecoder(&io.LimitedReader{R: in, N: maxBytes})
	for i, want := range []json.Token{json.Delim('{'), schema.Key, nil, allKey, json.Delim('[')} {
		token, err := dec.Token()
		if err != nil {
			return nil, cutOff(err)
		}
		if name, _ := token.(string); want == nil {
			if err := known(nil, name, KindAll); err != nil {
				return nil, err
			}
		} else if token != want {
			return nil, fmt.Errorf("its part %d is %v, want %v", i+1, token, want)
		}
	}
	return &elements{in: bufio.NewReaderSize(io.MultiReader(dec.Buffered(), in), 64<<10)}, nil
}

// behindList reads what is behind the list, up to the end of the object.
func behindList(in io.Reader) (left LeftOut, err error) {
	// As if the list had been empty.
	dec := json.NewDecoder(io.MultiReader(strings.NewReader(`{"":[`), &io.LimitedReader{R: in, N: maxBytes}))
	for range 4 { // up to the ] of the file
		if _, err := dec.Token(); err != nil {
			return LeftOut{}, err
		}
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return LeftOut{}, err
		}
		var value any = new(json.RawMessage) // a key of a later version
		if key == "left_out" {
			value = &left
		}
		if err := dec.Decode(value); err != nil {
			return LeftOut{}, err
		}
	}
	if _, err := dec.Token(); err != nil { // }
		return LeftOut{}, err
	}
	for i, text := range left.Skipped {
		left.Skipped[i] = cleanString(text)
	}
	left.Idle = max(0, left.Idle)
	return left, nil
}

// elements reads those of a JSON array, one after the other. It looks for their ends alone, which is several times as fast as a
// json.Decoder: whether they are JSON shows when they are read.
type elements struct {
	in  *bufio.Reader
	buf []byte
}

// next is the next element, which stands until the next call; more says that another one follows.
func (e *elements) next() (element []byte, more bool, err error) {
	e.buf = e.buf[:0]
	depth, quoted, escaped := 0, false, false
	for {
		if _, err := e.in.Peek(1); err != nil {
			return nil, false, err
		}
		chunk, _ := e.in.Peek(e.in.Buffered())
		for i, c := range chunk {
			switch {
			case escaped:
				escaped = false
			case quoted:
				escaped, quoted = c == '\\', c != '"'
			case c == '"':
				quoted = true
			case c == '{' || c == '[':
				depth++
			case depth == 0 && (c == ',' || c == ']'):
				e.buf = append(e.buf, chunk[:i]...)
				if c == ',' {
					i++
				}
				_, err := e.in.Discard(i)
				return e.buf, c == ',', err
			case c == '}' || c == ']':
				depth--
			}
		}
		if e.buf = append(e.buf, chunk...); len(e.buf) > maxBytes {
			return nil, false, fmt.Errorf("longer than %d MiB", maxBytes>>20)
		}
		_, _ = e.in.Discard(len(chunk)) // it is buffered
	}
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
