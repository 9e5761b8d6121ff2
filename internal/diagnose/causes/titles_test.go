// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"maps"
	"strings"
	"testing"
	"unicode/utf8"
)

// Every finding's title fits a line of a terminal and says all that it has to say there:
// on the machines of the golden files none is cut, on any machine none is longer.
func TestTitles(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	for name, change := range cases {
		s := gateway()
		change(s)
		found := Judge(s)
		checkTitles(t, found)
		for _, f := range flat(found) {
			if strings.HasSuffix(f.Title, "...") {
				t.Errorf("%s: %s: title is cut: %s", name, f.Code, f.Title)
			}
		}
	}
}

// checkTitles checks findings of any machine.
func checkTitles(t *testing.T, found []Finding) {
	t.Helper()
	for _, f := range flat(found) {
		if n := utf8.RuneCountInString(f.Title); n == 0 || n > 90 {
			t.Errorf("%s: title of %d characters: %s", f.Code, n, f.Title)
		}
	}
}

func TestFit(t *testing.T) {
	long := strings.Repeat("a word ", 30)
	for _, r := range []struct{ title, want string }{
		{"short", "short"},
		{strings.Repeat("x", 90), strings.Repeat("x", 90)},
		{strings.Repeat("x", 91), strings.Repeat("x", 87) + "..."},
		{strings.Repeat("\u00fc", 91), strings.Repeat("\u00fc", 87) + "..."},
		{long, strings.Repeat("a word ", 12) + "a..."},
	} {
		if got := fit(r.title); got != r.want {
			t.Errorf("fit(%q) is %q, want %q", r.title, got, r.want)
		}
	}
}
