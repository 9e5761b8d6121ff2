// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"cmp"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	kernelRun = regexp.MustCompile(`(?m)^\t([a-z-]+)\|([^|\n]+)\|([^|\n]*)\|`)
	kernelRow = regexp.MustCompile(`(?m)^\| ([a-z-]+) \| (6\.1|6\.12)(?:\.\S+)? \| (.*) \| (.+) \|$`)
)

// docs/kernels.md has how each run of scripts/test-kernels.sh went on each kernel, and which
// eBPF programs those were: when they change, it says so or they have run again.
func TestKernelsRanThesePrograms(t *testing.T) {
	packages := map[string]string{}
	args := []string{"run", "scripts/programs.go"}
	for _, m := range kernelRun.FindAllStringSubmatch(string(read(t, "scripts/test-kernels.sh")), -1) {
		pkg := cmp.Or(m[3], m[2])
		packages[m[1]] = pkg
		if !slices.Contains(args, pkg) {
			args = append(args, pkg)
		}
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = top
	out, err := cmd.Output()
	if err != nil || len(packages) == 0 {
		t.Fatalf("%d runs: %v", len(packages), err)
	}
	now := map[string]string{}
	for line := range strings.Lines(string(out)) {
		pkg, programs, _ := strings.Cut(strings.TrimSpace(line), " ")
		now[pkg] = programs
	}
	rows := map[string]int{}
	for _, m := range kernelRow.FindAllStringSubmatch(string(read(t, "docs/kernels.md")), -1) {
		name, version, then, result := m[1], m[2], m[3], m[4]
		rows[name]++
		then, changed := strings.CutSuffix(then, " (changed since)")
		if pkg := packages[name]; pkg == "" {
			t.Errorf("docs/kernels.md: scripts/test-kernels.sh has no run %q", name)
		} else if result != "not run" && changed == (then == now[pkg]) {
			t.Errorf("docs/kernels.md: Linux %s ran %s with the eBPF programs %s, and they are %s: run `make test-kernels`, or `scripts/test-kernels.sh -n` to have the table say which runs are older", version, name, then, now[pkg])
		}
	}
	for name := range packages {
		if rows[name] != 2 {
			t.Errorf("docs/kernels.md has %d rows of the run %s, not one for each kernel", rows[name], name)
		}
	}
}
