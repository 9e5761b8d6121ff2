// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

// The committed eBPF objects and their Go code are what the source gives: each
// package's go:generate commands are run again, into another folder.
func TestGeneratedObjects(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long (-short)")
	}
	needPinnedCompiler(t)
	root, err := filepath.Abs(top)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range sources(t, func(path string) bool { return filepath.Base(path) == "generate.go" }) {
		dir := filepath.Join(top, filepath.Dir(path))
		t.Run(filepath.Dir(path), func(t *testing.T) {
			made := t.TempDir()
			commands := 0
			for line := range strings.Lines(string(read(t, path))) {
				_, command, ok := strings.Cut(line, "/bpf/generate.sh ")
				if !ok {
					continue
				}
				commands++
				cmd := exec.Command(filepath.Join(root, "bpf/generate.sh"), append([]string{"-output-dir", made}, strings.Fields(command)...)...)
				cmd.Dir = dir
				cmd.Env = append(os.Environ(), "GOPACKAGE="+filepath.Base(dir))
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", line, err, out)
				}
			}
			files, err := filepath.Glob(made + "/*")
			if err != nil || commands == 0 || len(files) != 2*commands {
				t.Fatalf("%d commands made %q (%v), want an object and its Go code each", commands, files, err)
			}
			for _, file := range files {
				got, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				want, err := os.ReadFile(filepath.Join(dir, filepath.Base(file)))
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s is not what its source gives: run make generate and commit", filepath.Base(file))
				}
			}
		})
	}
}

// needPinnedCompiler requires the one clang, with its tools, whose objects are
// committed: another version gives other bytes.
func needPinnedCompiler(t *testing.T) {
	t.Helper()
	version := strings.TrimSpace(string(read(t, "bpf/CLANG_VERSION")))
	for _, program := range []string{"clang-19", "llvm-strip-19"} {
		out, err := exec.Command(ktest.Tool(t, program), "--version").Output()
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(out), "version "+version) {
			ktest.Missing(t, "needs %s of version %s", program, version)
		}
	}
}
