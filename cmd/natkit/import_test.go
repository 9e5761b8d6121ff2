// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"natkit/nat"
	"natkit/report"
)

func TestImportCommand(t *testing.T) {
	importRules := func(stdin, args string) (code int, stdout, stderr string) {
		var out, errs bytes.Buffer
		code = run(t.Context(), strings.Fields("import "+args), &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs})
		return code, out.String(), errs.String()
	}
	const whole = "*nat\n-A POSTROUTING -s 10.0.0.0/8 -o eth0 -j MASQUERADE\nCOMMIT\n"
	if code, _, stderr := importRules(whole, "--from - --inside eth1"); code != exitOK || stderr != "" {
		t.Errorf("exit %d, %q", code, stderr)
	}
	const rules = "*nat\n:POSTROUTING ACCEPT\n-A POSTROUTING -s 10.0.0.0/8 -o eth0 -j MASQUERADE\n-A POSTROUTING -s 10.0.0.0/8 -p tcp -j MASQUERADE\nCOMMIT\n"
	code, stdout, stderr := importRules(rules, "--from - --inside eth1")
	f, err := nat.Parse("-", []byte(stdout))
	if code != exitFindings || err != nil || len(f.Rules) != 1 || !strings.Contains(stdout, "line 4: -A POSTROUTING") || !strings.Contains(stderr, "1 note") {
		t.Errorf("exit %d, %v, %q\n%s", code, err, stderr, stdout)
	}
	code, stdout, _ = importRules(rules, "--from - --inside eth1 -o json")
	var view report.ImportView
	if err := json.Unmarshal([]byte(stdout), &view); err != nil || code != exitFindings || len(view.Rules) != 1 || !view.Notes[len(view.Notes)-1].Lost {
		t.Errorf("exit %d, %v\n%s", code, err, stdout)
	}
	for args, want := range map[string]int{
		"":                                 exitUsage,
		"--from - --local nowhere":         exitUsage,
		"--from - --netns blue":            exitUsage,
		"--from - -o text":                 exitUsage,
		"--from /nowhere":                  exitError,
		"--from -":                         exitError, // no inside interface
		"--from iptables --netns /nowhere": exitError,
	} {
		if code, _, stderr := importRules(rules, args); code != want || stderr == "" {
			t.Errorf("%q: exit %d, want %d: %q", args, code, want, stderr)
		}
	}
}
