// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"os"
	"path/filepath"
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
			golden(t, filepath.Join("corpus", name+".txt"), text.Bytes())
		})
	}
}
