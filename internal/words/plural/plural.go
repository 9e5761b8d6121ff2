// SPDX-License-Identifier: Apache-2.0

// Package plural writes numbers of things: 1 rule, 2 rules.
package plural

import (
	"fmt"
	"strings"
)

// Count is a number with its noun: 1 rule, 0 rules, 2 entries. A plural that English does
// not make by its rules for nouns' endings is given.
func Count[N integer](n N, noun string, plural ...string) string {
	return fmt.Sprintf("%d %s", n, Noun(n, noun, plural...))
}

// Noun is the noun alone, for numbers that are written otherwise.
func Noun[N integer](n N, noun string, plural ...string) string {
	switch {
	case n == 1:
		return noun
	case len(plural) > 0:
		return plural[0]
	}
	last := noun[len(noun)-1]
	switch {
	case last == 'y' && len(noun) > 1 && !strings.ContainsRune("aeiou", rune(noun[len(noun)-2])):
		return noun[:len(noun)-1] + "ies"
	case last == 's', last == 'x', strings.HasSuffix(noun, "ch"), strings.HasSuffix(noun, "sh"):
		return noun + "es"
	}
	return noun + "s"
}

type integer interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64
}
