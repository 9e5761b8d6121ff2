// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"

	"natkit/internal/words/schema"
)

// Limits of a saved snapshot. A large host's is a few megabytes with some
// hundred thousand values; beyond these it is no snapshot but an attempt to
// use up memory.
const (
	maxBytes   = 64 << 20
	maxValues  = 2 << 20
	maxObjects = 1 << 19 // the most that a host has: MaxChains of two back ends, MaxRules with their conditions
)

// Save writes s as JSON, one fact a line, so that two of them can be compared
// with diff(1).
func Save(w io.Writer, s *Snapshot) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	if _, err := w.Write(append(schema.Put(schema.Name(Kind, Version), b), '\n')); err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	return nil
}

// Marshal is what Save writes, in one line.
func Marshal(s *Snapshot) ([]byte, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("save snapshot: %w", err)
	}
	return schema.Put(schema.Name(Kind, Version), b), nil
}

// Load reads what Save or Marshal wrote, from whatever source: it refuses what is too
// large, not a snapshot, or of a later version, and makes all texts safe to
// print. Keys it does not know are passed over; what is missing is not known.
func Load(r io.Reader) (*Snapshot, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("load snapshot: %w", err)
	}
	if len(b) > maxBytes {
		return nil, fmt.Errorf("load snapshot: longer than %d MiB", maxBytes>>20)
	}
	return parse(b)
}

// parse is Load for what is in memory.
func parse(b []byte) (*Snapshot, error) {
	if n := bytes.Count(b, []byte{'{'}); n > maxObjects { // of three bytes each becomes a struct of some hundred
		return nil, fmt.Errorf("load snapshot: more than %d objects", maxObjects)
	}
	if n := bytes.Count(b, []byte{','}); n > maxValues {
		return nil, fmt.Errorf("load snapshot: more than %d values", maxValues)
	}
	// The version first: in another one anything may have another type.
	name, err := schema.Of(b)
	if err != nil {
		return nil, fmt.Errorf("load snapshot: %w", placed(b, err))
	}
	if err := known(b, name, Kind); err != nil {
		return nil, fmt.Errorf("load snapshot: %w", err)
	}
	return decode(b)
}

// known refuses what is not of the kind, in the version that is read here.
func known(b []byte, name, want string) error {
	kind, version, ok := schema.Parse(name)
	switch {
	case name == "" && ofEarlier(b):
		return errors.New("an earlier natkit saved it, and this one does not read its form: save it again (natkit doctor --save FILE), or judge it with the natkit that saved it")
	case name == "":
		return errors.New(`no "schema": not a file of natkit doctor --save`)
	case !ok || kind != Kind && kind != KindAll:
		return fmt.Errorf("it is %q: not a file of natkit doctor --save", name)
	case kind != want:
		return errors.New("it is of all namespaces of a machine (natkit doctor --all-netns): natkit doctor --from judges it; for one namespace save that alone")
	case version > Version:
		return fmt.Errorf("it is %q, this natkit reads %q: use a newer natkit", name, schema.Name(want, Version))
	}
	return nil
}

// ofEarlier says whether a natkit saved it whose files had no schema.
func ofEarlier(b []byte) bool {
	var head struct {
		Version    *int            `json:"version"`
		TakenAt    json.RawMessage `json:"taken_at"`
		Namespaces json.RawMessage `json:"namespaces"`
	}
	return json.Unmarshal(b, &head) == nil && (head.Version != nil && head.TakenAt != nil || head.Namespaces != nil)
}

// decode reads a snapshot of a version that is known.
func decode(b []byte) (*Snapshot, error) {
	s := &Snapshot{}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("load snapshot: %w", placed(b, err))
	}
	if err := s.validate(); err != nil {
		return nil, fmt.Errorf("load snapshot: %w", err)
	}
	Clean(s)
	return s, nil
}

// validate refuses numbers that no machine has, so that those who calculate with
// them need not think of overflow. The error names the first.
func (s *Snapshot) validate() error {
	if path, n := absurdNumber(reflect.ValueOf(s).Elem()); path != "" {
		return fmt.Errorf("%s is %d", strings.TrimPrefix(path, "."), n)
	}
	for _, v := range []struct {
		path       string
		n, highest float64
	}{
		{"interval_s", s.WindowSeconds, 366 * 24 * 3600},
		{"host.cpu_count", float64(s.Host.CPUs), math.MaxUint16},
	} {
		if v.n < 0 || v.n > v.highest {
			return fmt.Errorf("%s is %v, want 0 to %v", v.path, v.n, v.highest)
		}
	}
	ct := s.Conntrack
	if ct == nil {
		return nil
	}
	for _, v := range []struct {
		path       string
		n, highest uint64
	}{
		{"entries", ct.Count, math.MaxUint32}, // 32 bits in the kernel
		{"entries_start", ct.CountStart, math.MaxUint32},
		{"entries_max", ct.Max, math.MaxUint32},
		{"buckets", ct.Buckets, math.MaxUint32},
		{"host_entries", ct.HostObjects, math.MaxUint32},
		{"entry_bytes", ct.ObjectBytes, math.MaxUint16},
		{"extension_bytes", ct.ExtensionBytes, math.MaxUint16},
		{"bucket_bytes", ct.BucketBytes, math.MaxUint16},
	} {
		if v.n > v.highest {
			return fmt.Errorf("conntrack.%s is %d, want at most %d", v.path, v.n, v.highest)
		}
	}
	return nil
}

// absurdNumber finds a number below v that a float64, and so a JSON reader of
// another language, can't hold, or an int beyond 32 bits. Its path is "" when
// there is none.
func absurdNumber(v reflect.Value) (path string, n any) {
	switch v.Kind() {
	case reflect.Uint64:
		if v.Uint() > 1<<53 {
			return " ", v.Uint()
		}
	case reflect.Int:
		if n := v.Int(); n > math.MaxInt32 || n < math.MinInt32 {
			return " ", n
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				if path, n := absurdNumber(v.Field(i)); path != "" {
					key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
					return strings.TrimSpace("." + key + path), n
				}
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if path, n := absurdNumber(v.Index(i)); path != "" {
				return fmt.Sprintf("[%d]%s", i, path), n
			}
		}
	case reflect.Map:
		for iter := v.MapRange(); iter.Next(); {
			if path, n := absurdNumber(iter.Value()); path != "" {
				return fmt.Sprintf("[%q]%s", iter.Key().String(), path), n
			}
		}
	case reflect.Pointer:
		if !v.IsNil() {
			return absurdNumber(v.Elem())
		}
	}
	return "", nil
}

// placed adds line and column to an error of the JSON decoder.
func placed(b []byte, err error) error {
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	offset := int64(-1)
	switch {
	case len(bytes.TrimSpace(b)) == 0:
		return errors.New("it is empty")
	case errors.As(err, &syntax) && syntax.Offset >= int64(len(b)):
		offset, err = syntax.Offset, errors.New("it ends too early: it is cut off")
	case errors.As(err, &syntax):
		offset, err = syntax.Offset, errors.New("this is not JSON, which natkit doctor --save writes")
	case errors.As(err, &wrong):
		offset = wrong.Offset
		if wrong.Field == "" { // all of it: the type would be a whole struct
			return fmt.Errorf("not a file of natkit doctor --save: a JSON %s", wrong.Value)
		}
		err = fmt.Errorf("%s is a %s, want %s", wrong.Field, wrong.Value, wrong.Type)
	}
	if offset < 0 || offset > int64(len(b)) {
		return err
	}
	before := b[:offset]
	line := bytes.Count(before, []byte{'\n'}) + 1
	column := len(before) - (bytes.LastIndexByte(before, '\n') + 1)
	return fmt.Errorf("line %d, column %d: %w", line, max(1, column), err)
}
