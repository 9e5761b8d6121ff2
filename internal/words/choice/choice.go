// SPDX-License-Identifier: Apache-2.0

// Package choice refuses a word that is none of a few known ones: with all of them, and
// with the one that was probably meant.
package choice

import (
	"fmt"
	"strings"
)

// fewWords is how many words a message lists beside the one that was probably meant.
const fewWords = 20

// Error refuses got, which is none of the known words.
func Error(got string, known ...string) error {
	hint := ""
	if meant := Nearest(got, known); meant != "" {
		if len(known) > fewWords {
			return fmt.Errorf("%q: did you mean %s?", got, meant)
		}
		hint = fmt.Sprintf("; did you mean %s?", meant)
	}
	return fmt.Errorf("%q: want %s%s", got, List(known), hint)
}

// List writes words as in a sentence: a, b or c.
func List(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// Nearest is the known word that was probably meant by got, "" if none is likely: the same
// but for case and separators, the only one that begins with it, or the one with the
// fewest typing errors, at most one in three letters.
func Nearest(got string, known []string) string {
	plain := plainly(got)
	if plain == "" {
		return ""
	}
	best, errors := "", 1+len(plain)/3
	if len(plain) < 3 {
		errors = 1
	}
	begins := ""
	for _, word := range known {
		other := plainly(word)
		if other == plain {
			return word
		}
		if strings.HasPrefix(other, plain) {
			if begins != "" {
				begins = "-" // several do
			} else {
				begins = word
			}
		}
		if d := distance(plain, other); d < errors {
			best, errors = word, d
		}
	}
	if begins != "" && begins != "-" {
		return begins
	}
	return best
}

// plainly leaves out what people get wrong most: case and separators.
func plainly(word string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune("-_ .", r) {
			return -1
		}
		return r
	}, strings.ToLower(word))
}

// distance counts the letters that are wrong, missing, too many, or swapped with their
// neighbour (optimal string alignment).
func distance(a, b string) int {
	x, y := []rune(a), []rune(b)
	row := func() []int { return make([]int, len(y)+1) }
	before, last, next := row(), row(), row()
	for j := range last {
		last[j] = j
	}
	for i := range x {
		next[0] = i + 1
		for j := range y {
			wrong := 1
			if x[i] == y[j] {
				wrong = 0
			}
			next[j+1] = min(last[j]+wrong, last[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && x[i] == y[j-1] && x[i-1] == y[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, last, next = last, next, before
	}
	return last[len(y)]
}
