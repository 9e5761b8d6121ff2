// SPDX-License-Identifier: Apache-2.0

package history

import (
	"encoding/json"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strconv"
)

// A difference between two JSON values is a JSON value itself:
//
//	{"=": V}                     another value
//	{"o": {K: D...}, "-": [K]}   an object with members that differ, are new, or gone
//	{"a": {"I": D...}, "n": N}   an array of N elements of which some differ
//
// and null where there is none.

var errDelta = errors.New("the difference does not fit the facts before it")

// difference leads from a to b.
func difference(a, b any) any {
	switch b := b.(type) {
	case map[string]any:
		if a, ok := a.(map[string]any); ok {
			return objectDifference(a, b)
		}
	case []any:
		if a, ok := a.([]any); ok && len(a) > 0 && len(b) > 0 {
			return arrayDifference(a, b)
		}
	default:
		if a == b && reflect.TypeOf(a) == reflect.TypeOf(b) {
			return nil
		}
	}
	if reflect.DeepEqual(a, b) {
		return nil
	}
	return map[string]any{"=": b}
}

func objectDifference(a, b map[string]any) any {
	members, gone := map[string]any{}, []any{}
	for key, value := range b {
		before, ok := a[key]
		if !ok {
			members[key] = map[string]any{"=": value}
		} else if d := difference(before, value); d != nil {
			members[key] = d
		}
	}
	for _, key := range slices.Sorted(maps.Keys(a)) {
		if _, ok := b[key]; !ok {
			gone = append(gone, key)
		}
	}
	if len(members) == 0 && len(gone) == 0 {
		return nil
	}
	d := map[string]any{"o": members}
	if len(gone) > 0 {
		d["-"] = gone
	}
	return d
}

func arrayDifference(a, b []any) any {
	elements := map[string]any{}
	for i := range b {
		if i >= len(a) {
			elements[strconv.Itoa(i)] = map[string]any{"=": b[i]}
		} else if d := difference(a[i], b[i]); d != nil {
			elements[strconv.Itoa(i)] = d
		}
	}
	if len(elements) == 0 && len(a) == len(b) {
		return nil
	}
	return map[string]any{"a": elements, "n": json.Number(strconv.Itoa(len(b)))}
}

// applied is what a difference leads to from a. It writes nothing into a, and what it returns
// shares with a what is equal. What was damaged is an error, never a panic.
func applied(a, d any) (any, error) {
	if d == nil {
		return a, nil
	}
	kind, ok := d.(map[string]any)
	if !ok {
		return nil, errDelta
	}
	if value, ok := kind["="]; ok {
		return value, nil
	}
	if members, ok := kind["o"].(map[string]any); ok {
		return appliedToObject(a, members, kind["-"])
	}
	if elements, ok := kind["a"].(map[string]any); ok {
		return appliedToArray(a, elements, kind["n"])
	}
	return nil, errDelta
}

func appliedToObject(a any, members map[string]any, gone any) (any, error) {
	before, ok := a.(map[string]any)
	if !ok {
		return nil, errDelta
	}
	out := maps.Clone(before)
	for key, d := range members {
		value, err := applied(before[key], d)
		if err != nil {
			return nil, err
		}
		out[key] = value
	}
	keys, _ := gone.([]any)
	for _, key := range keys {
		name, ok := key.(string)
		if !ok {
			return nil, errDelta
		}
		delete(out, name)
	}
	return out, nil
}

func appliedToArray(a any, elements map[string]any, length any) (any, error) {
	before, ok := a.([]any)
	text, ok2 := length.(json.Number)
	if !ok || !ok2 {
		return nil, errDelta
	}
	n, err := strconv.Atoi(text.String())
	// Each element that is new has a difference of its own.
	if err != nil || n < 0 || n > len(before)+len(elements) {
		return nil, errDelta
	}
	out := make([]any, n)
	copy(out, before)
	for key, d := range elements {
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= n {
			return nil, errDelta
		}
		if out[i], err = applied(out[i], d); err != nil {
			return nil, err
		}
	}
	return out, nil
}
