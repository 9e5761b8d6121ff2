// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Clean makes every string of s safe to print: control characters and what is
// not UTF-8 become '?', a tab becomes a space. A process name, an interface name
// or a line of a foreign file may hold anything, also what a terminal would obey.
func Clean(s *Snapshot) { cleanValue(reflect.ValueOf(s).Elem()) }

// CleanAny is Clean for what a pointer leads to.
func CleanAny(pointer any) { cleanValue(reflect.ValueOf(pointer).Elem()) }

func cleanValue(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if text := v.String(); !printable(text) {
			v.SetString(cleanString(text))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				cleanValue(v.Field(i))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			cleanValue(v.Index(i))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			cleanValue(v.Elem())
		}
	case reflect.Map:
		for iter := v.MapRange(); iter.Next(); {
			key, value := iter.Key(), iter.Value()
			if value.Kind() == reflect.String && !printable(value.String()) {
				v.SetMapIndex(key, reflect.ValueOf(cleanString(value.String())).Convert(value.Type()))
			}
			if !printable(key.String()) {
				value = v.MapIndex(key)
				v.SetMapIndex(key, reflect.Value{})
				v.SetMapIndex(reflect.ValueOf(cleanString(key.String())), value)
			}
		}
	}
}

func printable(s string) bool {
	for i := range len(s) {
		if c := s[i]; c >= utf8.RuneSelf || c < ' ' || c == 0x7f {
			return printableRunes(s)
		}
	}
	return true // as nearly all are
}

func printableRunes(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unsafeRune) < 0
}

// unsafeRune: control characters, and the invisible ones that turn text around
// or hide it.
func unsafeRune(r rune) bool {
	if r < utf8.RuneSelf { // nearly all of them
		return r < ' ' || r == 0x7f
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Cf, r)
}

func cleanString(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case unsafeRune(r) || r == utf8.RuneError:
			return '?'
		}
		return r
	}, s)
}

// CleanLines is Clean for a text of several lines.
func CleanLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = CleanText(lines[i])
	}
	return strings.Join(lines, "\n")
}

// CleanText is Clean for a text alone.
func CleanText(s string) string {
	if printable(s) {
		return s
	}
	return cleanString(s)
}
