// SPDX-License-Identifier: Apache-2.0

package causes

import "testing"

// Whatever explains whatever, each finding is shown once: as a cause, or below one.
func TestFoldShowsAll(t *testing.T) {
	named := func(code string, explains ...string) *verdict {
		v := &verdict{Finding: Finding{Code: code, Severity: Warning}}
		v.explains = explains
		return v
	}
	for name, sorted := range map[string][]*verdict{
		"a chain":              {named("a", "b"), named("b", "c"), named("c")},
		"each other":           {named("a", "b"), named("b", "a")},
		"in a circle":          {named("a", "b"), named("b", "c"), named("c", "a")},
		"in a circle, reverse": {named("a", "c"), named("b", "a"), named("c", "b")},
		"two circles":          {named("a", "b", "c"), named("b", "a", "c"), named("c", "b", "a", "d"), named("d", "c")},
		"a circle of four":     {named("a", "b"), named("b", "c"), named("c", "d"), named("d", "a")},
		"below a circle":       {named("a", "b"), named("b", "c"), named("c", "a", "d"), named("d")},
	} {
		shown := map[string]int{}
		for _, f := range flat(fold(sorted)) {
			shown[f.Code]++
		}
		for _, v := range sorted {
			if shown[v.Code] != 1 {
				t.Errorf("%s: %s is shown %d times", name, v.Code, shown[v.Code])
			}
		}
	}
}
