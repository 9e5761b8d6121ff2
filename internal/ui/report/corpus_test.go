// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

// What the doctor says of gateways whose rules real programs have made, with traffic through
// them: recorded by scripts/record-corpus.sh. Nothing is wrong with them; in those that are
// called blocked somebody has put a rule before the program's that drops the service.
func TestCorpus(t *testing.T) {
	files, err := filepath.Glob("testdata/corpus/*.json")
	if err != nil || len(files) < 6 {
		t.Fatalf("snapshots %q, %v", files, err)
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".json")
		t.Run(name, func(t *testing.T) {
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			s, err := snapshot.Load(f)
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Chains) == 0 || s.Conntrack == nil || s.Conntrack.Count == 0 {
				t.Error("it has no rules, or no traffic")
			}
			findings := causes.Judge(s)
			blocked := strings.HasSuffix(name, "-blocked")
			if found := len(findings) > 0 && findings[0].Code == "rule-drop"; found != blocked || !blocked && len(findings) > 0 {
				t.Errorf("found %+v", findings)
			}
			var text bytes.Buffer
			if err := DoctorText(&text, s, findings, false); err != nil {
				t.Fatal(err)
			}
			sameCommands(t, text.String(), Doctor(s, findings))
			printed(t, filepath.Join("corpus", name+".txt"), text.Bytes())
		})
	}
}

// sameCommands compares what the text has below Remedy and Verify with what JSON has under these
// names: each finding's commands in their order, as they can be pasted, and remarks word by word.
func sameCommands(t *testing.T, text string, result DoctorResult) {
	t.Helper()
	object, err := json.Marshal(result)
	if err != nil {
		t.Fatal(err)
	}
	var has struct {
		Findings []map[string]any `json:"findings"`
	}
	if err := json.Unmarshal(object, &has); err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, f := range has.Findings {
		for _, name := range []string{"remedy", "verify"} {
			lines, ok := f[name].([]any)
			if !ok {
				t.Errorf("%s in JSON: %v", name, f[name])
			}
			for _, line := range lines {
				want = append(want, name+": "+line.(string))
			}
		}
	}
	section := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch below, indented := strings.CutPrefix(line, "    "); {
		case !indented:
			section = strings.ToLower(strings.TrimSpace(line))
		case section == "remedy" || section == "verify":
			got = append(got, section+": "+below)
		}
	}
	if got, want := remarksJoined(got), remarksJoined(want); !slices.Equal(got, want) {
		t.Errorf("text has\n%s\nJSON has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// remarksJoined makes one line of remarks that follow each other: text breaks them at its width.
func remarksJoined(lines []string) (out []string) {
	for _, line := range lines {
		name, remark, is := strings.Cut(line, ": # ")
		if n := len(out); is && n > 0 && strings.HasPrefix(out[n-1], name+": # ") {
			out[n-1] += " " + remark
			continue
		}
		out = append(out, line)
	}
	return out
}
