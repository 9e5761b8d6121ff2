// SPDX-License-Identifier: Apache-2.0

// Package ktest holds what tests that touch the kernel share: requirements
// that skip for a user and fail on CI, unique names, and waiting for a
// condition.
package ktest

import (
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Missing ends the test because something it needs is not there. For a user it
// is skipped with the reason; where CI is set it fails: a green run means that
// the test ran.
func Missing(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("needed on CI: "+format, args...)
	}
	skip(t, fmt.Sprintf(format, args...))
}

// Unsupported skips the test, on CI too, because this kernel can't do what is
// tested, and nobody can install it.
func Unsupported(t testing.TB, format string, args ...any) {
	t.Helper()
	skip(t, fmt.Sprintf(format, args...))
}

// skip ends the test and adds a line "package.test <tab> reason" to the file
// named by NATKIT_TEST_SKIPS, from which scripts/test.sh tells what was left out.
func skip(t testing.TB, reason string) {
	t.Helper()
	reason = strings.ReplaceAll(reason, "\n", "; ") // errors that are joined
	if path := os.Getenv("NATKIT_TEST_SKIPS"); path != "" {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		_, dir := packageDir()
		if _, err := fmt.Fprintf(f, "%s %s\t%s\n", dir, t.Name(), reason); err != nil {
			t.Fatal(err)
		}
	}
	t.Skip(reason)
}

// packageDir is the module's top and, as seen from there, the folder of the package under
// test, in which go test runs it.
func packageDir() (top, rel string) {
	dir, err := os.Getwd()
	if err != nil {
		return "", "?"
	}
	for top := dir; top != "/"; top = filepath.Dir(top) {
		if _, err := os.Stat(filepath.Join(top, "go.mod")); err == nil {
			rel, _ := filepath.Rel(top, dir)
			return top, rel
		}
	}
	return "", filepath.Base(dir)
}

// Root requires root.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, "needs root")
	}
}

// Tool requires a program and returns its path.
func Tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, "needs the program %s", name)
	}
	return path
}

// Collectors requires the programs that make test-collectors installs, and returns the folder of
// Kafka's. They are too large for make test, which leaves the test out.
func Collectors(t testing.TB) (kafka string) {
	t.Helper()
	kafka = os.Getenv("NATKIT_KAFKA")
	if kafka == "" {
		skip(t, "is run by make test-collectors")
	}
	return kafka
}

// MoreAtOnce has so many tests for each processor run side by side, of those that may: for
// packages whose tests mostly wait. TestMain calls it.
func MoreAtOnce(perProcessor int) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		if err := f.Value.Set(strconv.Itoa(perProcessor * runtime.GOMAXPROCS(0))); err != nil {
			panic(err)
		}
	}
}

// SharedRunDir gives a whole package what RunDir gives a test: its tests may then run side by
// side. TestMain calls it, and the function that it returns at its end. A process that a test
// has started has the folder of that test.
func SharedRunDir() (remove func()) {
	if os.Getenv("NATKIT_RUN_DIR") != "" || os.Getenv(lackingTest) != "" {
		return func() {}
	}
	dir, err := os.MkdirTemp("", "natkit-run")
	if err != nil {
		panic(err)
	}
	os.Setenv("NATKIT_RUN_DIR", dir)
	return func() {
		unix.Unmount(filepath.Join(dir, "bpf"), 0) // where one was mounted
		os.RemoveAll(dir)
	}
}

// RunDir gives the test a folder of its own for what ends with the next boot. Where the
// machine has no BPF file system natkit mounts one there, which ends with the test.
func RunDir(t testing.TB) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("NATKIT_RUN_DIR", dir)
	t.Cleanup(func() {
		err := unix.Unmount(filepath.Join(dir, "bpf"), 0)
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // none was mounted
			t.Error(err)
		}
	})
}

var names atomic.Uint32

// Name returns a name, at most 14 characters, that no other test of this or
// another process uses: for namespaces and interfaces.
func Name(t testing.TB) string {
	h := fnv.New32a()
	fmt.Fprint(h, t.Name(), os.Getpid(), names.Add(1), time.Now().UnixNano())
	return fmt.Sprintf("nkt-%08x", h.Sum32())
}

// busy is how many times as long as a machine of its own a test may take on one that
// others keep busy.
const busy = 6

// Wait polls until cond holds, and fails the test when it does not within limit, which is
// for a machine that does nothing else: on a busy one it may take several times as long.
func Wait(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	limit *= busy
	deadline := time.Now().Add(limit)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
