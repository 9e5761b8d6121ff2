// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/pprof/profile"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

// observed runs drops, hooks or profile. The tests of all three are in this file.
func observed(ctx context.Context, args string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}
	code = run(ctx, strings.Fields(args), e)
	return code, out.String(), errs.String()
}

func TestObserverUsage(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"drops --interval 1ms", "--interval 1ms: want 100ms or more"},
		{"drops --for -1s", "--for \"-1s\""},
		{"drops extra", "extra"},
		{"drops --host nonsense", "--host \"nonsense\": want an address or prefix"},
		{"drops --port 0", "--port 0: want 1 to 65535"},
		{"drops --port 70000", "--port \"70000\": out of range"},
		{"drops --cause lost", "--cause \"lost\": want conntrack-table-full, "},
		{"drops -o xml", "want text or json"},
		{"profile --for 0s", "--for \"0s\""},
		{"profile --frequency 0", "--frequency 0: want 1 to"},
		{"profile --frequency 1000000", "--frequency 1000000: want 1 to"},
		{"profile --min 101", "--min 101"},
		{"profile --cpu 0-", "--cpu \"0-\": want numbers and ranges"},
		{"profile --cpu 3-1", "want numbers and ranges"},
		{"profile --cpu 0-99999", "want numbers and ranges"},
		{"profile --from x --netns some", "--netns and --from exclude each other"},
		{"profile --diff x -o pprof", "holds one profile"},
		{"profile -o xml", "want text, json, html, svg, folded or pprof"},
		{"hooks extra", "extra"},
		{"hooks --measure", "--measure goes with --cost"},
		{"hooks --for 1s", "--for goes with --cost"},
		{"hooks --cost --for 0s", "--for \"0s\""},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, exitUsage, tt.says)
		}
	}
}

func TestDropsCommand(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()

	code, stdout, stderr := observed(t.Context(), "drops --netns "+name+" --for 300ms --interval 100ms -o json")
	if code != exitOK || stderr != "" {
		t.Fatalf("exit %d, %q", code, stderr)
	}
	intervals := 0
	for line := range strings.Lines(stdout) {
		var r report.Drops
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if r.Seconds <= 0 || r.Rows == nil || len(r.Rows) > 0 || r.LostEvents > 0 {
			t.Errorf("of a silent namespace: %s", line)
		}
		intervals++
	}
	if intervals == 0 {
		t.Error("no interval")
	}
	// Until interrupted: what was counted so far is shown, and that is no error.
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	code, stdout, stderr = observed(ctx, "drops --netns "+name+" --interval 1h")
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "0 packets dropped") {
		t.Errorf("interrupted: exit %d, %q, %q", code, stdout, stderr)
	}
}

func TestHooksCommand(t *testing.T) {
	ktest.Root(t)
	code, stdout, stderr := observed(t.Context(), "hooks -o json")
	var r report.Hooks
	if err := json.Unmarshal([]byte(stdout), &r); code != exitOK || err != nil {
		t.Fatalf("exit %d, %q, %v: %q", code, stderr, err, stdout)
	}
	if r.Netns != (*netns.Handle)(nil).Inode() || r.Hooks == nil {
		t.Errorf("%+v", r)
	}
	if code, _, stderr := observed(t.Context(), "hooks --netns no-such-namespace"); code != exitError || !strings.Contains(stderr, "not found") {
		t.Errorf("of no namespace: exit %d, %q", code, stderr)
	}
}

func TestProfileCommand(t *testing.T) {
	ktest.Root(t)
	defer keepBusy(t)()
	code, stdout, stderr := observed(t.Context(), "profile --for 200ms --root all -o json")
	var r report.Profile
	if err := json.Unmarshal([]byte(stdout), &r); code != exitOK || err != nil {
		t.Fatalf("exit %d, %q, %v", code, stderr, err)
	}
	if r.Samples.Total == 0 || r.Tree == nil || r.Samples.Root != r.Samples.Kernel {
		t.Errorf("%+v", r.Samples)
	}
	file := filepath.Join(t.TempDir(), "kernel.pb.gz")
	if code, _, stderr := observed(t.Context(), "profile --for 200ms -o pprof --file "+file); code != exitOK {
		t.Fatalf("exit %d, %q", code, stderr)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := profile.ParseData(data); err != nil {
		t.Error(err)
	}
	code, _, stderr = observed(t.Context(), "profile --root no_such_function")
	if code != exitUsage || !strings.Contains(stderr, "no function of that name") {
		t.Errorf("of no function: exit %d, %q", code, stderr)
	}
}

func TestHooksCostCommand(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()
	if err := nft.EmptyHooks().Apply(ns); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := observed(t.Context(), "hooks --cost --for 200ms --no-dump -o json --netns "+name)
	var r report.HookCost
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK {
		t.Fatalf("exit %d, %q, %v\n%s", code, stderr, err, stdout)
	}
	if r.Netns != ns.Inode() || r.Samples == 0 || len(r.Hooks) != 3 || len(r.Needless) != 3 || r.Measured != nil {
		t.Errorf("%+v", r)
	}
	code, stdout, stderr = observed(t.Context(), "hooks --cost --for 200ms --netns "+name)
	if code != exitOK || !strings.Contains(stdout, "ip netns exec "+name+" nft delete chain ip empty FORWARD") {
		t.Errorf("exit %d, %q\n%s", code, stderr, stdout)
	}
}

// keepBusy gives every CPU system calls to sample until stop is called.
func keepBusy(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for range runtime.NumCPU() {
		all.Go(func() {
			for ctx.Err() == nil {
				os.ReadFile("/proc/self/stat")
			}
		})
	}
	return func() { cancel(); all.Wait() }
}

// Pictures and folded stacks come from a profile of a file as from one that is taken.
func TestProfilePictures(t *testing.T) {
	ktest.Root(t)
	file := filepath.Join(t.TempDir(), "p.pb.gz")
	defer keepBusy(t)()
	if code, _, stderr := observed(t.Context(), "profile --cpu 0 --for 200ms -o pprof --file "+file); code != exitOK {
		t.Fatalf("exit %d, %q", code, stderr)
	}
	for args, want := range map[string]string{
		"-o html":                   "<!DOCTYPE html>",
		"-o svg":                    "<?xml",
		"-o html --diff " + file:    "Red boxes grew",
		"--root all -o folded":      ";",
		"--root all":                "1 CPU,",
		"--root all --diff " + file: "function, with all it calls",
	} {
		code, stdout, stderr := observed(t.Context(), "profile --from "+file+" "+args)
		if code != exitOK || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("%s: exit %d, %q\n%.300s", args, code, stderr, stdout)
		}
	}
	if code, _, stderr := observed(t.Context(), "profile --for 200ms --root all --netns pid:"+strconv.Itoa(os.Getpid())); code != exitOK {
		t.Errorf("--netns: exit %d, %q", code, stderr)
	}
	if code, _, stderr := observed(t.Context(), "profile --from /dev/null"); code != exitError || !strings.Contains(stderr, "/dev/null: read profile") {
		t.Errorf("an empty file: exit %d, %q", code, stderr)
	}
}
