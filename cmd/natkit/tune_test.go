// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// natkit runs one command line and returns its exit code and what it wrote.
func natkit(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(context.Background(), args, &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs})
	return code, out.String(), errs.String()
}

// fullTable is a file with the facts of a machine whose table is full.
func fullTable(t *testing.T, change func(*snapshot.Snapshot)) string {
	t.Helper()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	s := &snapshot.Snapshot{
		WindowSeconds: 10,
		Host:          snapshot.Host{Hostname: host, MemoryBytes: 8 << 30},
		Sysctls:       map[string]string{"net.netfilter.nf_conntrack_tcp_timeout_time_wait": "120"},
		Conntrack: &snapshot.Conntrack{
			Count: 262144, CountStart: 262144, Max: 262144, Buckets: 262144, ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8,
			Stats: map[string]uint64{"drop": 500},
			Table: &snapshot.Table{Entries: 262144, ByState: map[string]uint64{"TIME_WAIT": 200000}},
		},
	}
	if change != nil {
		change(s)
	}
	path := filepath.Join(t.TempDir(), "facts.json")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := snapshot.Save(f, s); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTunePlan(t *testing.T) {
	facts := fullTable(t, func(s *snapshot.Snapshot) { s.Netns.Name = "a b" })
	code, out, errs := natkit(t, "tune", "plan", "--from", facts)
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, %q", code, errs)
	}
	for _, want := range []string{"net.netfilter.nf_conntrack_max ", "conntrack-table-full", "To apply it: natkit tune apply --netns 'a b' --from " + facts} {
		if !strings.Contains(out, want) {
			t.Errorf("plan does not say %q:\n%s", want, out)
		}
	}
	code, out, _ = natkit(t, "tune", "plan", "--from", facts, "-o", "json")
	var plan tune.Plan
	if err := json.Unmarshal([]byte(out), &plan); err != nil || code != exitOK {
		t.Fatalf("exit %d, %v:\n%s", code, err, out)
	}
	if len(plan.Changes) != 3 || plan.Changes[1].Old != "262144" || plan.Changes[1].MemoryBytes == 0 || plan.Changes[1].Code != "conntrack-table-full" {
		t.Errorf("changes %+v", plan.Changes)
	}
	if code, out, _ = natkit(t, "tune", "plan", "--from", facts, "--memory-share", "0.001"); code != exitOK || !strings.Contains(out, "Not planned") {
		t.Errorf("exit %d:\n%s", code, out)
	}
}

func TestTuneRefuses(t *testing.T) {
	t.Setenv("NATKIT_STATE_DIR", t.TempDir())
	elsewhere := fullTable(t, func(s *snapshot.Snapshot) { s.Host.Hostname = "another-machine" })
	blue := fullTable(t, func(s *snapshot.Snapshot) { s.Netns.Name = "blue" })
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"tune plan --from /nonexistent", exitError, "/nonexistent"},
		{"tune plan --memory-share 1.5", exitUsage, "--memory-share"},
		{"tune plan --memory-share NaN", exitUsage, "--memory-share"},
		{"tune plan --for 0s", exitUsage, "--for"},
		{"tune plan --for 3s --from " + blue, exitUsage, "exclude"},
		{"tune plan --netns red --from " + blue, exitUsage, "blue"},
		{"tune plan -o yaml", exitUsage, "--output"},
		{"tune plan extra", exitUsage, "extra"},
		{"tune plan --netns nkt-no-such-one", exitError, "not found"},
		{"tune apply --from " + elsewhere, exitError, "another-machine"},
		{"tune apply --from " + blue, exitUsage, "--netns blue"},
		{"tune rollback a b", exitUsage, "too many"},
		{"tune rollback --netns blue", exitUsage, "--netns"},
		{"tune rollback 20010101-000000", exitError, "not in the history"},
	} {
		code, out, errs := natkit(t, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.says) || out != "" {
			t.Errorf("%s: exit %d, want %d; stderr %q, want %q in it; stdout %q", c.args, code, c.code, errs, c.says, out)
		}
	}
}

func TestTuneApplyRollbackHistory(t *testing.T) {
	ktest.Root(t)
	t.Setenv("NATKIT_STATE_DIR", t.TempDir())
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(); netns.Delete(name) })
	timeout := func() string {
		var data []byte
		if err := h.Do(func() (err error) {
			data, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait")
			return err
		}); err != nil {
			ktest.Missing(t, "needs connection tracking: %v", err)
		}
		return strings.TrimSpace(string(data))
	}
	was := timeout()
	facts := fullTable(t, func(s *snapshot.Snapshot) { s.Netns.Name = name })
	apply := []string{"tune", "apply", "--netns", name, "--from", facts, "--no-host-write"}

	code, out, errs := natkit(t, append(apply, "--dry-run")...)
	if code != exitOK || !strings.Contains(out, "Would save the old values") || timeout() != was {
		t.Errorf("dry run: exit %d, %s%s", code, out, errs)
	}
	code, out, errs = natkit(t, append(apply, "-o", "json")...)
	var record tune.Record
	if err := json.Unmarshal([]byte(out), &record); err != nil || code != exitOK {
		t.Fatalf("exit %d, %v: %s%s", code, err, out, errs)
	}
	if timeout() != "30" || len(record.Changes) != 1 || record.Changes[0].Old != was || len(record.Skipped) != 2 || !record.Skipped[0].Chosen {
		t.Errorf("time-out %s, record %+v", timeout(), record)
	}
	if code, out, _ = natkit(t, apply...); code != exitOK || !strings.Contains(out, "Nothing was changed") {
		t.Errorf("again: exit %d, %s", code, out)
	}
	if code, out, _ = natkit(t, "tune", "history"); code != exitOK || !strings.Contains(out, record.ID) || !strings.Contains(out, was+" -> 30") {
		t.Errorf("history: exit %d, %s", code, out)
	}
	if code, _, errs = natkit(t, append(apply, "--persist")...); code != exitError || !strings.Contains(errs, "initial network namespace only") {
		t.Errorf("persist: exit %d, %s", code, errs)
	}
	if code, out, _ = natkit(t, "tune", "rollback"); code != exitOK || !strings.Contains(out, "restored") || timeout() != was {
		t.Errorf("rollback: exit %d, %s; time-out %s", code, out, timeout())
	}
	if code, out, _ = natkit(t, "tune", "rollback"); code != exitOK || !strings.Contains(out, "Nothing to roll back") {
		t.Errorf("second rollback: exit %d, %s", code, out)
	}
	code, out, _ = natkit(t, "tune", "history", "-o", "json")
	if code != exitOK || !strings.Contains(out, `"state": "rolled back"`) {
		t.Errorf("history: exit %d, %s", code, out)
	}
}
