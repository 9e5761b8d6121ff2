// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
)

// A command to type next has each flag as it was given.
func TestTyped(t *testing.T) {
	cmd, _, err := testRoot().Find([]string{"accel", "on"})
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--tcp-liberal=false", "--dry-run", "--flows", "5000", "--netns", "two words"}
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	const want = "natkit accel on eth0 'e th1' --dry-run --flows 5000 --netns 'two words' --tcp-liberal=false"
	if got := typed(cmd, []string{"eth0", "e th1"}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A refusal about the namespace of --netns has commands about that one.
func TestRefusalNamesNamespace(t *testing.T) {
	for text, want := range map[string]string{
		"no engine is up here: `natkit up -f FILE` starts it":                      "no engine is up here: `natkit --netns 'two words' up -f FILE` starts it",
		"`natkit accel status` shows it, `natkit accel off` ends it":               "`natkit --netns 'two words' accel status` shows it, `natkit --netns 'two words' accel off` ends it",
		"`natkit --netns gateway down` takes it down":                              "`natkit --netns gateway down` takes it down",
		"`natkit doctor --all-netns` lists them; natkit tune rollback restores it": "`natkit doctor --all-netns` lists them; natkit tune rollback restores it",
	} {
		if got := (&env{netns: "two words"}).here(text); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
		if got := (&env{}).here(text); got != text {
			t.Errorf("without --netns: %s", got)
		}
	}
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"status", "--netns", "/proc/self/ns/net"}, &env{stdout: &bytes.Buffer{}, stderr: &stderr}); code != exitError ||
		!strings.Contains(stderr.String(), "`natkit --netns /proc/self/ns/net up -f FILE`") {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
}

// A file that is there and cannot be read is not called missing.
func TestDiffOfUnreadable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "facts.json")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := runBad(t, "", "doctor", "--diff", file+"/below", file)
	refused(t, []string{"doctor", "--diff"}, code, out, errs)
	if !strings.Contains(errs, "a part of this path is a file") {
		t.Errorf("%s", errs)
	}
}

// That natkit's own engine cannot be read is said in words.
func TestUnreadableEngineInWords(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("NATKIT_RUN_DIR", dir)
	var own *netns.Handle
	record := filepath.Join(dir, "nat", strconv.FormatUint(own.Inode(), 10)+".json")
	if err := os.MkdirAll(record, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"conntrack", "memory"}, {"hooks"}} {
		var stderr bytes.Buffer
		run(t.Context(), args, &env{stdout: &bytes.Buffer{}, stderr: &stderr})
		if want := "whether natkit's own engine runs here is unknown: " + record + " is a directory, not a file\n"; !strings.Contains(stderr.String(), want) {
			t.Errorf("natkit %s: no %q in %s", strings.Join(args, " "), want, stderr.String())
		}
	}
}

// What a refusal quotes of the machine or of a file does not steer the terminal.
func TestRefusalIsHarmless(t *testing.T) {
	var stderr bytes.Buffer
	(&env{stderr: &stderr}).fail(nil, nil, "chain \x1b[2J\u202e:\n  next line", exitError)
	if want := "natkit: chain ?[2J?:\n  next line\n"; stderr.String() != want {
		t.Errorf("%q, want %q", stderr.String(), want)
	}
}
