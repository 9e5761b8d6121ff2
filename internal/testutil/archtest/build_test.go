// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// bigEndian are the processors of that kind that Go builds for on Linux.
var bigEndian = []string{"mips", "mips64", "ppc64", "s390x"}

// A build for a big-endian processor says why there is none, whichever package with
// eBPF objects is built, and a build for any other does not.
func TestBigEndianIsRefused(t *testing.T) {
	const reason = "undefined: natkit_does_not_run_on_big_endian_processors"
	out, err := exec.Command("go", "tool", "dist", "list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for platform := range strings.Lines(string(out)) {
		arch, ok := strings.CutPrefix(strings.TrimSpace(platform), "linux/")
		if !ok {
			continue
		}
		cmd := exec.Command("go", "build", "natkit/internal/kernel/littleendian")
		cmd.Env = append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0", "GOARCH="+arch)
		out, err := cmd.CombinedOutput()
		switch big := slices.Contains(bigEndian, arch); {
		case big && (err == nil || !strings.Contains(string(out), reason)):
			t.Errorf("%s: %v %s", arch, err, out)
		case !big && err != nil:
			t.Errorf("%s: %v %s", arch, err, out)
		}
	}
	objects, err := filepath.Glob("../../../internal/*/*_bpfel.go")
	deeper, err2 := filepath.Glob("../../../internal/*/*/*_bpfel.go")
	if err != nil || err2 != nil || len(objects) == 0 || len(deeper) == 0 {
		t.Fatal(err, err2, len(objects), len(deeper))
	}
	for _, file := range append(objects, deeper...) {
		guard := filepath.Join(filepath.Dir(file), "generate.go")
		if text, err := os.ReadFile(guard); err != nil || !strings.Contains(string(text), `import _ "natkit/internal/kernel/littleendian"`) {
			t.Errorf("%s is for little-endian processors, and %s does not refuse others: %v", file, guard, err)
		}
	}
}

// mostBytes is how large the program that make build makes may be. TLS, for the API of
// Kubernetes, is 1.8 MB of it, the log of the eBPF engine 0.1 MB, its sinks 4.6 MB, nearly all
// of that the client of Kafka, explicit mappings 0.4 MB, subscribers and their blocks 0.4 MB.
const mostBytes = 30_000_000

var buildCommand = regexp.MustCompile(`(?m)^\t(CGO_ENABLED=0 go build .*) -o natkit \./cmd/natkit$`)

// The program is small enough to be copied to a router. What reads methods by their
// names, as text/template does, makes the linker keep every exported one: 3 MB.
func TestBinaryIsSmall(t *testing.T) {
	makefile, err := os.ReadFile("../../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	m := buildCommand.FindSubmatch(makefile)
	if m == nil {
		t.Fatal("Makefile does not say how natkit is built")
	}
	file := filepath.Join(t.TempDir(), "natkit")
	cmd := exec.Command("sh", "-c", strings.ReplaceAll(string(m[1]), "$(VERSION)", "test")+" -o "+file+" ./cmd/natkit")
	cmd.Dir = "../../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > mostBytes {
		t.Errorf("%d bytes, want at most %d: go tool nm -size -sort size tells what has grown", info.Size(), mostBytes)
	}
}
