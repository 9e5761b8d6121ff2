// SPDX-License-Identifier: Apache-2.0

// Package ktest holds what tests that touch the kernel share: requirements
// that skip for a user and fail on CI, unique names, and waiting for a
// condition.
package ktest

import (
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"
)

// Missing ends the test because something it needs is not there. For a user it
// is skipped with the reason; where CI is set it fails: a green run means that
// the test ran.
func Missing(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("needed on CI: "+format, args...)
	}
	t.Skipf(format, args...)
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

var names atomic.Uint32

// Name returns a name, at most 14 characters, that no other test of this or
// another process uses: for namespaces and interfaces.
func Name(t testing.TB) string {
	h := fnv.New32a()
	fmt.Fprint(h, t.Name(), os.Getpid(), names.Add(1), time.Now().UnixNano())
	return fmt.Sprintf("nkt-%08x", h.Sum32())
}

// Wait polls until cond holds, and fails the test when it does not within limit.
func Wait(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
