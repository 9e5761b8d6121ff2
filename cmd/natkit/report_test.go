// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

func TestReport(t *testing.T) {
	const udp, later, rules = "../../internal/ui/report/testdata/saved-udp.json", "../../internal/ui/report/testdata/saved-udp-later.json", "../../internal/ui/report/testdata/saved-rules.json"
	bad := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(bad, []byte(`{"version": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args  string
		code  int
		out   string // that stdout holds
		error string // that stderr holds
	}{
		{"report " + udp, exitOK, "Zero-loss rate (NDR), Mpps (more is better)", ""},
		{"report -o html " + udp + " " + rules, exitOK, "<!DOCTYPE html>", ""},
		{"report -o json " + udp, exitOK, `"results": [`, ""},
		{"report --compare " + udp + " " + later, exitOK, "outside the noise, better", ""},
		{"report --compare -o html " + udp + " " + later, exitOK, "<!DOCTYPE html>", ""},
		{"report --compare -o json " + udp + " " + later, exitOK, `"verdict": "outside the noise"`, ""},
		{"report", exitUsage, "", "want natkit report FILE..."},
		{"report --compare " + udp, exitUsage, "", "--compare: want two files, got 1"},
		{"report -o pdf " + udp, exitUsage, "", `--output "pdf": want text, html or json`},
		{"report --netns x " + udp, exitUsage, "", "made from files alone"},
		{"report no-such-file", exitError, "", "no-such-file does not exist"},
		{"report " + bad, exitError, "", "not the result of a measurement"},
		{"report -", exitError, "", `read "-": it is empty`},
		{"report --compare " + udp + " " + rules, exitError, "", "one is of kind udp, the other of kind rules"},
	} {
		var out, errs bytes.Buffer
		code := run(context.Background(), strings.Fields(c.args), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs})
		if code != c.code || !strings.Contains(out.String(), c.out) || !strings.Contains(errs.String(), c.error) {
			t.Errorf("natkit %s: exit code %d, want %d\n%.300s\n%s", c.args, code, c.code, out.String(), errs.String())
		}
		if c.code != exitOK && out.Len() > 0 {
			t.Errorf("natkit %s: failed, but printed %.300s", c.args, out.String())
		}
	}
}

// A demo whose report can't be written does not begin.
func TestDemoReportFile(t *testing.T) {
	ktest.Root(t)
	var out, errs bytes.Buffer
	code := run(context.Background(), []string{"demo", "--report", filepath.Join(t.TempDir(), "no", "demo.html")},
		&env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs})
	if code != exitError || !strings.Contains(errs.String(), "write report: ") || out.Len() > 0 {
		t.Errorf("exit code %d\n%s\n%s", code, out.String(), errs.String())
	}
}

func TestResultFile(t *testing.T) {
	dir := t.TempDir()
	fresh, old := filepath.Join(dir, "fresh"), filepath.Join(dir, "old")
	if err := os.WriteFile(old, []byte("of yesterday"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, content, want string }{
		{fresh, "", "(none)"},
		{fresh, "page", "page"},
		{old, "", "of yesterday"},
		{old, "page", "page"},
	} {
		r, err := openResultFile(c.name)
		if err != nil {
			t.Fatal(err)
		}
		r.content.WriteString(c.content)
		if err := r.close(); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(c.name)
		if os.IsNotExist(err) {
			got = []byte("(none)")
		}
		if string(got) != c.want {
			t.Errorf("%s with %q: %q, want %q", filepath.Base(c.name), c.content, got, c.want)
		}
	}
}
