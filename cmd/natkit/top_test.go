// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/live"
)

func TestTopUsage(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"top", "use --once or -o json"},
		{"top --interval 1ms", "--interval 1ms: want 100ms or more"},
		{"top --window 100ms", "--window 100ms: want at least the interval"},
		{"top --for 1s", "with -o json"},
		{"top --for 1s --once -o json", "without --once"},
		{"top extra", "extra"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, exitUsage, tt.says)
		}
	}
}

func TestTopCommand(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()

	code, stdout, stderr := observed(t.Context(), "top --once --window 1s --netns "+name)
	if code != exitOK || !strings.Contains(stdout, "namespace "+name) || !strings.Contains(stdout, "CPUs") {
		t.Errorf("exit %d, %q\n%s", code, stderr, stdout)
	}
	code, stdout, stderr = observed(t.Context(), "top --for 1s --interval 200ms --no-dump --no-events -o json --netns "+name)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	var m live.Moment
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &m); err != nil || code != exitOK {
		t.Fatalf("exit %d, %q, %v\n%s", code, stderr, err, stdout)
	}
	if m.Netns.Name != name || m.Seconds <= 0 || len(m.CPUs) == 0 || m.Flows != nil {
		t.Errorf("%+v", m)
	}
	if code, _, stderr = observed(t.Context(), "top --once --netns absent-"+name); code != exitError {
		t.Errorf("a namespace that is absent: exit %d, %q", code, stderr)
	}
}
