// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	ktest.CleanNatkit()
	os.Exit(code)
}

// Every command that a finding of any cause prints is one: a shell parses it, its program
// is there, natkit knows its own, and nothing is left for the reader to fill in. What the
// commands do, package scenario shows where a lab can make the fault.
func TestPrintedCommands(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		for _, ns := range []snapshot.Netns{{Init: true}, {Name: "blue"}, {Name: "pid:77"}} {
			s := gateway()
			cases[name](s)
			s.Netns.Name, s.Netns.Init = ns.Name, ns.Init
			for _, f := range flat(Judge(s)) {
				for _, line := range slices.Concat(f.Remedy, f.Verify) {
					if !seen[line] {
						seen[line] = true
						ktest.CheckCommand(t, f.Code, line)
					}
					if ns.Name != "" && strings.Contains(line, "--persist") {
						t.Errorf("%s: %q: nothing persists in a namespace", f.Code, line)
					}
				}
			}
		}
	}
}
