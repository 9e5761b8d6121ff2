// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/testutil/ktest"
)

// place is a row of ARCHITECTURE.md's table "What is where on the machine".
type place struct {
	paths         []string // words in capitals stand for any name
	by, what, end string
}

// places reads the table.
func places(t *testing.T) (out []place) {
	t.Helper()
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n## What is where on the machine\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "| `/") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		if len(cells) != 4 {
			t.Fatalf("%d columns: %s", len(cells), line)
		}
		row := place{by: cells[1], what: cells[2], end: cells[3]}
		for path := range strings.SplitSeq(cells[0], ", ") {
			row.paths = append(row.paths, strings.Trim(path, "`"))
		}
		out = append(out, row)
	}
	if len(out) < 10 {
		t.Fatalf("%d rows", len(out))
	}
	return out
}

// manFiles is the manual page's list of files.
func manFiles(t *testing.T) (out [][2]string) {
	plain := strings.NewReplacer("`", "").Replace
	for _, row := range places(t) {
		text := row.what
		if _, condition, _ := strings.Cut(row.by, ", "); condition != "" {
			text += " (" + condition + ")"
		}
		out = append(out, [2]string{strings.Join(row.paths, ", "), plain(text + ". Removed: " + row.end + ".")})
	}
	return out
}

// Every file that natkit leaves on the machine while something is up is in the table, with
// and without a BPF file system. What tune writes its own tests compare.
func TestFilesAreListed(t *testing.T) {
	const pins, ownPins = "/sys/fs/bpf/natkit", "/run/natkit/bpf"
	var patterns []*regexp.Regexp
	for _, row := range places(t) {
		for _, path := range row.paths {
			pattern := "^" + regexp.MustCompile(`[A-Z]+`).ReplaceAllString(regexp.QuoteMeta(path), `[^/]+`)
			if path == pins || path == ownPins {
				pattern += "$" // what is below has rows of its own
			} else {
				pattern += "(/|$)"
			}
			patterns = append(patterns, regexp.MustCompile(pattern))
		}
	}
	listed := func(path string) bool {
		if below, own := strings.CutPrefix(path, ownPins+"/"); own {
			path = pins + "/" + below
		}
		return slices.ContainsFunc(patterns, func(p *regexp.Regexp) bool { return p.MatchString(path) })
	}
	if listed("/run/natkit/nat/other") || listed("/etc/sysctl.d/90-natkit") || listed("/run/natkit/bpf/1/other/x") {
		t.Fatal("the patterns match anything")
	}
	ktest.WithAndWithoutBPFFS(t, func(t *testing.T) {
		natkit := program(t)
		os.Unsetenv("NATKIT_RUN_DIR")
		mustRun := func(args ...string) {
			t.Helper()
			if out, errs, code := try(t, natkit(args...)); code != 0 {
				t.Fatalf("%v: exit %d: %s%s", args, code, out, errs)
			}
		}
		written := watchFolders(t)
		rules := filepath.Join(t.TempDir(), "nat.yaml")
		if err := os.WriteFile(rules, []byte("inside: [eth1]\noutside: [eth0]\nlimits: {sessions: 4096}\nrules:\n  - masquerade: 192.168.0.0/24\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		mustRun("lab", "up", "routed", "--name", "one", "--rules", "none")
		mustRun("lab", "up", "published", "--name", "two", "--server", "nginx")
		mustRun("accel", "on", "eth0", "docker0", "--netns", "two-host", "--tcp-liberal")
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		up := &log{}
		done := make(chan int, 1)
		go func() {
			done <- run(ctx, []string{"serve", "-f", rules, "--netns", "one-gateway", "--attach", "tc"}, &env{stdout: up, stderr: up})
		}()
		ktest.Wait(t, 30*time.Second, "natkit serve to bring the engine up", func() bool { return up.has("up on engine ebpf") || len(done) > 0 })
		paths := written()
		if len(paths) < 10 {
			t.Errorf("found only %q: %s", paths, &up.text)
		}
		for _, path := range paths {
			if !listed(path) {
				t.Errorf("%s is not in the table of ARCHITECTURE.md", path)
			}
		}
		stop()
		if code := <-done; code != exitOK {
			t.Errorf("serve: exit %d: %s", code, &up.text)
		}
		mustRun("down", "--netns", "one-gateway")
		mustRun("accel", "off", "--netns", "two-host")
		mustRun("lab", "down", "--all")
		if left := written(); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
}

// watchFolders returns a function that lists the files which were written since, and are
// there still, wherever a program may keep files of its own.
func watchFolders(t *testing.T) func() []string {
	t.Helper()
	over := t.TempDir()
	if err := unix.Mount("tmpfs", over, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(over, unix.MNT_DETACH) })
	seen := map[string]string{"/run": "/run", "/sys/fs/bpf": "/sys/fs/bpf"}
	for _, dir := range []string{"/etc", "/var", "/usr", "/home", "/opt"} {
		upper, work := filepath.Join(over, dir), filepath.Join(over, "work"+dir)
		if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("overlay", dir, "overlay", 0, "lowerdir="+dir+",upperdir="+upper+",workdir="+work); err != nil {
			ktest.Unsupported(t, "no overlay file system: %v", err)
		}
		seen[dir] = upper
	}
	return func() (out []string) {
		for dir, at := range seen {
			err := filepath.WalkDir(at, func(path string, e fs.DirEntry, err error) error {
				if err != nil || e.IsDir() || strings.HasSuffix(path, ".debug") { // a BPF file system begins with these
					return err
				}
				out = append(out, dir+strings.TrimPrefix(path, at))
				return nil
			})
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
		return out
	}
}

// Each service reads or loads what is in the kernel by bpf(2), which no group of systemd's calls has: without it the first
// one ends the process.
func TestServicesMayUseBPF(t *testing.T) {
	units, err := filepath.Glob("../../deploy/systemd/*.service")
	if err != nil || len(units) == 0 {
		t.Fatal(units, err)
	}
	for _, path := range units {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		filter := regexp.MustCompile(`(?m)^SystemCallFilter=(.*)$`).FindSubmatch(text)
		if filter == nil || !slices.Contains(strings.Fields(string(filter[1])), "bpf") {
			t.Errorf("%s: %q", path, filter)
		}
	}
}
