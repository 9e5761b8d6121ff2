// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
	"natkit/internal/testutil/ktest"
)

func entries(t *testing.T, path string) (out []string) {
	t.Helper()
	if err := journal.Read(path, func(m json.RawMessage) error {
		out = append(out, string(m))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAppendReadRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "j")
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []any{map[string]int{"a": 1}, "two"} {
		if err := j.Append(v); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := journal.Open(path); !errors.Is(err, journal.ErrLocked) {
		t.Errorf("second Open: %v, want ErrLocked", err)
	}
	if got := strings.Join(entries(t, path), " "); got != `{"a":1} "two"` {
		t.Errorf("entries %s", got)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = journal.Open(path); err != nil {
		t.Fatalf("Open after Close: %v", err)
	}
	if err := j.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Remove: %v", err)
	}
}

// An entry may be long: the settings of each of some ten thousand interfaces.
func TestLongEntry(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	long := strings.Repeat("net.ipv4.conf.ppp.rp_filter ", 100_000)
	for _, v := range []string{long, "next"} {
		if err := j.Append(v); err != nil {
			t.Fatal(err)
		}
	}
	if got := entries(t, path); len(got) != 2 || len(got[0]) != len(long)+2 || got[1] != `"next"` {
		t.Errorf("%d entries", len(got))
	}
}

// A crash in the middle of a write leaves a cut line: it is ignored when read,
// and the next entry does not grow out of it.
func TestCutLastLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	if err := os.WriteFile(path, []byte("{\"a\":1}\n{\"b\":"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, path); len(got) != 1 {
		t.Errorf("entries %q, want the whole one alone", got)
	}
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := j.Append("c"); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(entries(t, path), " "); got != `{"a":1} "c"` {
		t.Errorf("entries %s", got)
	}
}

// A full disk takes a part of a line. What is written once there is room again stands on a
// line of its own.
func TestFullDisk(t *testing.T) {
	ktest.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", 2*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	path, filler := filepath.Join(dir, "j"), filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, os.Getpagesize()), 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := j.Append("first"); err != nil {
		t.Fatal(err)
	}
	if err := j.Append(strings.Repeat("x", os.Getpagesize())); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("on a full disk: %v", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := j.Append("second"); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(entries(t, path), " "); got != `"first" "second"` {
		t.Errorf("entries %.100s", got)
	}
}

func TestDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	if err := os.WriteFile(path, []byte("1\nrubbish\n2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := journal.Read(path, func(json.RawMessage) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("error %v, want one that names line 2", err)
	}
}
