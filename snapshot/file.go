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
)

// Limits of a saved snapshot. A large host's is a few megabytes with some
// hundred thousand values; beyond these it is no snapshot but an attempt to
// use up memory.
const (
	maxBytes  = 64 << 20
	maxValues = 2 << 20
)

// Save writes s as JSON, one fact a line, so that two of them can be compared
// with diff(1).
func Save(w io.Writer, s *Snapshot) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	if _, err := w.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("save snapshot: %w", err)
	}
	return nil
}

// Load reads what Save wrote, from whatever source: it refuses what is too
// large, not a snapshot, or of a later version, and makes all texts safe to
// print. Keys it does not know are passed over; what is missing is not known.
func Load(r io.Reader) (*Snapshot, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("load snapshot: %w", err)
	}
	if len(b) > maxBytes {
		return nil, fmt.Errorf("load snapshot: longer than %d MB", maxBytes>>20)
	}
	// An empty object of three bytes becomes a struct of some hundred.
	if n := bytes.Count(b, []byte{','}); n > maxValues {
		return nil, fmt.Errorf("load snapshot: more than %d values", maxValues)
	}
	// The version first: in a later one anything may have another type.
	var head struct {
		Version *int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("load snapshot: %w", placed(b, err))
	}
	switch {
	case head.Version == nil:
		return nil, errors.New(`load snapshot: no "version": not a file of natkit doctor --save`)
	case *head.Version > Version:
		return nil, fmt.Errorf("load snapshot: it has version %d, this natkit knows up to %d: use a newer natkit", *head.Version, Version)
	case *head.Version < 1:
		return nil, fmt.Errorf("load snapshot: version %d does not exist", *head.Version)
	}
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
// them need not think of overflow. It names every one.
func (s *Snapshot) validate() error {
	errs := checkNumbers(reflect.ValueOf(s).Elem(), "")
	refuse := func(bad bool, what string, n any) {
		if bad {
			errs = append(errs, fmt.Errorf("%s is %v", what, n))
		}
	}
	refuse(s.WindowSeconds < 0 || s.WindowSeconds > 366*24*3600, "window_s", s.WindowSeconds)
	refuse(s.Host.CPUs < 0 || s.Host.CPUs > math.MaxUint16, "host.cpus", s.Host.CPUs)
	if ct := s.Conntrack; ct != nil { // 32 bits in the kernel
		refuse(ct.Count > math.MaxUint32, "conntrack.count", ct.Count)
		refuse(ct.CountStart > math.MaxUint32, "conntrack.count_start", ct.CountStart)
		refuse(ct.Max > math.MaxUint32, "conntrack.max", ct.Max)
		refuse(ct.Buckets > math.MaxUint32, "conntrack.buckets", ct.Buckets)
		refuse(ct.HostObjects > math.MaxUint32, "conntrack.host_objects", ct.HostObjects)
		refuse(ct.ObjectBytes > math.MaxUint16, "conntrack.object_bytes", ct.ObjectBytes)
		refuse(ct.ExtensionBytes > math.MaxUint16, "conntrack.extension_bytes", ct.ExtensionBytes)
		refuse(ct.BucketBytes > math.MaxUint16, "conntrack.bucket_bytes", ct.BucketBytes)
	}
	return errors.Join(errs...)
}

// checkNumbers finds every number below v that a float64, and so a JSON reader
// of another language, can't hold.
func checkNumbers(v reflect.Value, path string) []error {
	const most = 1 << 53
	var errs []error
	switch v.Kind() {
	case reflect.Uint, reflect.Uint32, reflect.Uint64:
		if v.Uint() > most {
			errs = append(errs, fmt.Errorf("%s is %d", path, v.Uint()))
		}
	case reflect.Int, reflect.Int64:
		if n := v.Int(); n > math.MaxInt32 || n < math.MinInt32 {
			errs = append(errs, fmt.Errorf("%s is %d", path, n))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				errs = append(errs, checkNumbers(v.Field(i), strings.TrimPrefix(path+"."+key, "."))...)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			errs = append(errs, checkNumbers(v.Index(i), fmt.Sprintf("%s[%d]", path, i))...)
		}
	case reflect.Map:
		for iter := v.MapRange(); iter.Next(); {
			errs = append(errs, checkNumbers(iter.Value(), fmt.Sprintf("%s[%q]", path, iter.Key()))...)
		}
	case reflect.Pointer:
		if !v.IsNil() {
			errs = append(errs, checkNumbers(v.Elem(), path)...)
		}
	}
	return errs
}

// placed adds line and column to an error of the JSON decoder.
func placed(b []byte, err error) error {
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	offset := int64(-1)
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset
	case errors.As(err, &wrong):
		offset = wrong.Offset
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
