// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/diagnose/blame"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// A rule of iptables is deleted by its number only while that is its number, whatever comment it has.
func TestDeleteNumbered(t *testing.T) {
	const text = "-A FORWARD -s 192.168.0.2/32 -j DROP"
	rule := &snapshot.Rule{Number: 3, Text: text, Matches: []snapshot.Match{{Keys: []string{"ip saddr"}, Values: []string{"192.168.0.2"}, Text: "-s 192.168.0.2/32"}}}
	s := culprit{Dropper: blame.Dropper{Chain: &snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "filter", Name: "FORWARD"}, Rule: rule}}
	command := facts{Snapshot: &snapshot.Snapshot{}}.deleteNumbered("iptables-legacy", s)
	for there, want := range map[string]string{
		text: "-t filter -D FORWARD 3",
		`-A FORWARD -s 192.168.0.2/32 -m comment --comment "ban \"him\"" -j DROP`: "-t filter -D FORWARD 3",
		`-A FORWARD -s 192.168.0.2/32 -m comment --comment "a ban" -j DROP`:       "-t filter -D FORWARD 3",
		"-A FORWARD -s 192.168.0.2/32 -m comment --comment ban -j DROP":           "-t filter -D FORWARD 3",
		"-A FORWARD -s 192.168.0.22/32 -j DROP":                                   "another one",
		"-A FORWARD -s 192.168.0.2/32 -p tcp -j DROP":                             "another one",
		"": "another one",
	} {
		dir := t.TempDir()
		fake := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *' -S FORWARD 3') cat <<'END'\n%s\nEND\n;; *) echo \"$@\" ;; esac\n", there)
		if err := os.WriteFile(filepath.Join(dir, "iptables-legacy"), []byte(fake), 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("bash", "-c", command)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%q is there: %s, %v; want %q\n%s", there, out, err, want, command)
		}
	}
	rule.Matches = append(rule.Matches, snapshot.Match{Text: "-m u32"})
	if got := (facts{Snapshot: &snapshot.Snapshot{}}).deleteNumbered("iptables-legacy", s); got != "iptables-legacy -t filter -D FORWARD 3" {
		t.Errorf("of a rule whose text is not known whole: %s", got)
	}
}

// The commands that write a limit into a rule file leave a rule file, however that is written.
func TestEditLimit(t *testing.T) {
	const begin = "inside: eth1\noutside: eth0\n"
	const rules = "rules:\n  - masquerade: 10.0.0.0/24\n"
	for name, tt := range map[string]struct {
		text  string
		lines map[string]int
	}{
		"without limits":              {begin + rules, nil},
		"without an end of the line":  {begin + "rules: [{masquerade: 10.0.0.0/24}]", nil},
		"in one line":                 {begin + "limits: {sources: 100}\n" + rules, map[string]int{"limits": 3}},
		"in several":                  {begin + "limits:\n  sources: 100\n" + rules, map[string]int{"limits": 3}},
		"in several, far in":          {begin + "limits:\n      sources: 100\n" + rules, map[string]int{"limits": 3}},
		"in several, behind a remark": {begin + "limits:\n# few\n\n    sources: 100 # {none}\n" + rules, map[string]int{"limits": 3}},
		"named":                       {begin + "limits: {sessions: 1000, sources: 100}\n" + rules, map[string]int{"limits": 3, "sessions": 3}},
	} {
		file := filepath.Join(t.TempDir(), "natkit.yaml")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f := facts{Snapshot: &snapshot.Snapshot{Engine: &snapshot.Engine{File: file, Lines: tt.lines}}}
		for _, line := range f.editLimit("sessions", 1000, 2000) {
			if out, err := exec.Command("bash", "-c", line).CombinedOutput(); err != nil {
				t.Errorf("%s: %s: %v: %s", name, line, err, out)
			}
		}
		after, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := rulefile.Parse(file, after)
		if err != nil || got.Limits.Sessions != 2000 || len(got.Rules) != 1 || strings.Contains(tt.text, "sources") && got.Limits.Sources != 100 {
			t.Errorf("%s: %v\n%s", name, err, after)
		}
	}
}

// A rule of iptables-nft has a handle, which stays its own whatever becomes of the rules before it.
func TestDeleteByHandle(t *testing.T) {
	rule := &snapshot.Rule{Number: 3, Handle: 28, Text: "-A FORWARD -s 192.168.0.2/32 -j DROP", Verdict: "drop"}
	c := &snapshot.Chain{Backend: "nft", Family: "ip", Table: "filter", Name: "FORWARD", Walk: []snapshot.Rule{*rule}}
	remedy := facts{Snapshot: &snapshot.Snapshot{}}.spareFrom(culprit{Dropper: blame.Dropper{Chain: c, Rule: rule}})
	if last := remedy[len(remedy)-1]; last != "nft delete rule ip filter FORWARD handle 28" {
		t.Errorf("%q", remedy)
	}
}
