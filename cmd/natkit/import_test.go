// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
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
	f, err := rulefile.Parse("-", []byte(stdout))
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

// Each program lists its own rules only: where there are others is said.
func TestImportElsewhere(t *testing.T) {
	ktest.Root(t)
	tools := map[string]string{"nft": ktest.Tool(t, "nft"), "iptables-nft": ktest.Tool(t, "iptables-nft")}
	rules := map[string][]string{
		"nft":          {"add table ip nat; add chain ip nat PREROUTING { type nat hook prerouting priority -100; }; add rule ip nat PREROUTING ip daddr 203.0.113.1 dnat to 10.0.0.1"}, // with iptables' names
		"iptables-nft": strings.Fields("-t nat -A POSTROUTING -o eth0 -j MASQUERADE"),
	}
	for has, other := range map[string]string{"nft": "iptables-nft", "iptables-nft": "nft"} {
		name := ktest.Name(t)
		h, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			h.Close()
			if err := netns.Delete(name); err != nil {
				t.Error(err)
			}
		})
		if err := h.Do(func() error { return exec.Command(tools[has], rules[has]...).Run() }); err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		code := run(t.Context(), []string{"import", "--from", other, "--netns", name, "--inside", "lo"}, &env{stdout: &out, stderr: &errs})
		if want := "1 NAT rule in " + has + ": natkit import --from " + has + " --netns " + name; code == exitOK || !strings.Contains(errs.String(), want) {
			t.Errorf("--from %s: exit %d, %q, want %q", other, code, errs.String(), want)
		}
	}
}
