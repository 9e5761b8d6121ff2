// SPDX-License-Identifier: Apache-2.0

// Package golden compares what a test has made with a file of the repository, or writes
// that file: go test PACKAGE -run TEST -update.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write golden and generated files instead of comparing them")

// Updating reports whether files are written.
func Updating() bool { return *update }

// Check compares a file with what it should hold, and names the first line that differs.
func Check(t testing.TB, path string, want []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if line, is, was := difference(string(want), string(have)); line > 0 {
		t.Errorf("%s, line %d:\n is now %s\n was    %s\n(if that is right: go test -run '%s' -update)", path, line, is, was, t.Name())
	}
}

// difference is the first line that two texts do not share, 0 for none.
func difference(a, b string) (line int, inA, inB string) {
	if a == b {
		return 0, "", ""
	}
	as, bs := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(as), len(bs)) {
		inA, inB = "(the end)", "(the end)"
		if i < len(as) {
			inA = as[i]
		}
		if i < len(bs) {
			inB = bs[i]
		}
		if inA != inB {
			return i + 1, inA, inB
		}
	}
	return 0, "", ""
}
