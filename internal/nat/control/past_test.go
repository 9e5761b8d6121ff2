// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// Who follows the rules sees each that was in force, in order and with its time, also those that were
// replaced before it looked; what is not remembered any more is missed, and an engine that was brought up again.
func TestRulesInUse(t *testing.T) {
	b := newTestbed(t)
	text := func(i int) string { return fmt.Sprintf("# %d\n%s", i, baseRules) }
	r := NewRulesInUse(b.gateway)
	seen := func(r *RulesInUse) (list []string, whole bool) {
		t.Helper()
		change, err := r.Changed()
		if err != nil {
			t.Fatal(err)
		}
		if change == nil {
			return nil, true
		}
		for i, a := range change.Applied {
			first, _, _ := strings.Cut(a.Text, "\n")
			list = append(list, first)
			if i > 0 && !change.Applied[i-1].Since.Before(a.Since) || time.Since(a.Since) > time.Minute || a.Running == 0 {
				t.Errorf("rules %d came at %v", i, a.Since)
			}
		}
		return list, change.Whole
	}
	check := func(what string, r *RulesInUse, wantWhole bool, want ...string) {
		t.Helper()
		if got, whole := seen(r); !slices.Equal(got, want) || whole != wantWhole {
			t.Errorf("%s: %q, whole %v, want %q", what, got, whole, want)
		}
	}
	apply := func(i int) {
		t.Helper()
		if _, err := Apply(t.Context(), b.parse(text(i)), text(i), b.options()); err != nil {
			t.Fatal(err)
		}
	}
	check("nothing up", r, true)
	b.up(text(1), b.options())
	check("up", r, true, "# 1")
	check("no change", r, true)
	for i := range 3 {
		apply(2 + i)
	}
	apply(4) // it is applied already
	check("three at once", r, true, "# 2", "# 3", "# 4")
	check("somebody new", NewRulesInUse(b.gateway), true, "# 1", "# 2", "# 3", "# 4")
	for i := range pastMost + 2 {
		apply(5 + i)
	}
	if got, whole := seen(r); whole || len(got) != pastMost+1 {
		t.Errorf("after too many: %d are remembered, whole %v", len(got), whole)
	}
	if _, err := Down(b.gateway); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(pastFolder(b.gateway.Inode())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("down leaves the rules of before: %v", err)
	}
	b.up(text(1), b.options())
	check("down and up", r, false, "# 1")
}
