// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"natkit/internal/diagnose/causes"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

func TestLabRunUsage(t *testing.T) {
	for _, args := range []string{"", "no-such-code", "conntrack-no-memory", "--list mtu-drop", "mtu-drop rp-filter-drop", "--for 0s mtu-drop", "-o yaml mtu-drop", "--netns blue mtu-drop"} {
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"lab", "run"}, strings.Fields(args)...), &env{stdout: &out, stderr: &errs})
		if code != exitUsage || errs.Len() == 0 || out.Len() > 0 {
			t.Errorf("lab run %s: exit %d, stdout %q, stderr %q", args, code, out.String(), errs.String())
		}
	}
}

func TestLabRunList(t *testing.T) {
	var out bytes.Buffer
	if code := run(t.Context(), []string{"lab", "run", "--list", "-o", "json"}, &env{stdout: &out, stderr: &out}); code != exitOK {
		t.Fatalf("exit %d: %s", code, out.String())
	}
	var list report.Faults
	if err := json.Unmarshal(out.Bytes(), &list); err != nil {
		t.Fatal(err)
	}
	want := slices.DeleteFunc(causes.Catalogue(), func(c causes.Cause) bool { return c.NoLab != "" })
	if len(list.Faults) != len(want) {
		t.Errorf("%d scenarios for %d causes that a lab can show", len(list.Faults), len(want))
	}
	out.Reset()
	if code := run(t.Context(), []string{"lab", "run", "--list"}, &env{stdout: &out, stderr: &out}); code != exitOK {
		t.Errorf("exit %d: %s", code, out.String())
	}
	for _, f := range list.Faults {
		if !strings.Contains("\n"+out.String(), "\n"+f.Code+" ") {
			t.Errorf("no line of %s in\n%s", f.Code, out.String())
		}
	}
}

// One scenario by the command; the others are tests of package scenario.
func TestLabRun(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "ip")
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"lab", "run", "ip-forward-off", "--for", "1s", "-o", "json"}, &env{stdout: &out, stderr: &errs}); code != exitOK {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	var res report.FaultResult
	if err := json.Unmarshal(out.Bytes(), &res); err != nil {
		t.Fatal(err)
	}
	if !res.OK || len(res.Steps) != 3 || res.Steps[1].Doctor.Findings[0].Code != "ip-forward-off" || len(res.Steps[2].Commands) == 0 {
		t.Errorf("got %s", out.String())
	}

	out.Reset()
	if code := run(t.Context(), []string{"lab", "run", "ip-forward-off", "--for", "1s"}, &env{stdout: &out, stderr: &errs}); code != exitOK {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	for _, want := range []string{"1. HEALTHY", "2. BROKEN", "CRITICAL [ip-forward-off]", "3. CURED", "sysctl -w net.ipv4.ip_forward=1", "Nothing wrong was found"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
