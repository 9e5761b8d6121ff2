// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/ktest"
)

// The committed objects and their Go code are what the source gives: the
// commands behind go:generate are run again, into another folder.
func TestGeneratedFiles(t *testing.T) {
	if _, err := os.Stat("../bpf/generate.sh"); err != nil {
		t.Skip("not in the source tree")
	}
	if os.Getenv("BPF_CLANG") == "" { // see bpf/generate.sh
		ktest.Tool(t, "clang-19")
		ktest.Tool(t, "llvm-strip-19")
	}
	source, err := os.ReadFile("generate.go")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	lines := 0
	for line := range strings.Lines(string(source)) {
		command, ok := strings.CutPrefix(line, "//go:generate ")
		if !ok {
			continue
		}
		lines++
		words := strings.Fields(command)
		cmd := exec.Command(words[0], append([]string{"-output-dir", dir}, words[1:]...)...)
		cmd.Env = append(os.Environ(), "GOPACKAGE=observe")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	made, err := filepath.Glob(dir + "/*")
	if err != nil {
		t.Fatal(err)
	}
	if len(made) != 2*lines || lines == 0 {
		t.Fatalf("%d lines made %q, want an object and its Go code each", lines, made)
	}
	for _, path := range made {
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Base(path))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what its source gives: run `make generate` and commit", filepath.Base(path))
		}
	}
}
