// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/fleet"
	"natkit/internal/testutil/ktest"
)

func TestFleetReport(t *testing.T) {
	corpus := func(name string) string { return "../../internal/ui/report/testdata/corpus/" + name + ".json" }
	absent := filepath.Join(t.TempDir(), "absent.json")
	for _, tt := range []struct {
		args string
		code int
		says string
	}{
		{"fleet report", exitUsage, "no node: name files"},
		{"fleet report --timeout -1s x", exitUsage, "--timeout"},
		{"fleet report --netns blue x", exitUsage, "from files and URLs"},
		{"fleet report --targets " + absent, exitError, "does not exist"},
		{"fleet reports", exitUsage, "natkit fleet report"},
		{"fleet report " + absent, exitError, absent + ": no such file"},
		{"fleet report " + corpus("ufw") + " " + absent, exitUnjudged, "1 node read, 1 not"},
		{"fleet report " + corpus("ufw-blocked") + " " + absent, exitFindings, "CRITICAL rule-drop"},
		{"fleet report -o html " + corpus("ufw-blocked"), exitFindings, "rule-drop"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != tt.code || !strings.Contains(stdout+stderr, tt.says) {
			t.Errorf("%s: exit %d, %s%s; want %d, %q", tt.args, code, stdout, stderr, tt.code, tt.says)
		}
	}
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader("# nodes\n\n " + corpus("ufw") + "\n" + corpus("ufw") + "\n"), stdout: &out, stderr: &errs}
	if code := run(t.Context(), []string{"fleet", "report", "--targets", "-", "-o", "json"}, e); code != exitUnjudged {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	var r fleet.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.NodeCount != 1 {
		t.Errorf("%v, %s", err, out.String())
	}
}

// What natkit monitor serves is what its schema says, and a fleet report reads it.
func TestFleetOfMonitors(t *testing.T) {
	ktest.Root(t)
	address, stop := monitored(t, t.TempDir(), io.Discard)
	defer stop()
	var body []byte
	ktest.Wait(t, time.Minute, "the host was examined", func() bool {
		reply, err := http.Get("http://" + address + fleet.Path)
		if err != nil {
			return false
		}
		defer reply.Body.Close()
		body, _ = io.ReadAll(reply.Body)
		return reply.StatusCode == http.StatusOK
	})
	if names := ktest.ReadSchemas(t).Check(t, fleet.Path, body); len(names) != 1 {
		t.Errorf("%q", names)
	}
	_, stdout, stderr := observed(t.Context(), "fleet report -o json http://"+address)
	var r fleet.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || r.NodeCount != 1 || len(r.Unread) > 0 {
		t.Errorf("%v, %s%s", err, stdout, stderr)
	}
}
