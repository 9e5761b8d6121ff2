// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

func TestNPD(t *testing.T) {
	seesAll := func(n snapshot.Netns) *snapshot.Snapshot {
		s := &snapshot.Snapshot{Netns: n}
		s.Capabilities = []snapshot.Capability{{Name: snapshot.CanConntrack, OK: true}, {Name: snapshot.CanHooks, OK: true}}
		return s
	}
	without := func(s *snapshot.Snapshot, name string) *snapshot.Snapshot {
		for i := range s.Capabilities {
			s.Capabilities[i].OK = s.Capabilities[i].OK && s.Capabilities[i].Name != name
		}
		return s
	}
	host, pod := snapshot.Netns{Init: true}, snapshot.Netns{Container: "pod shop/cart-5d8f"}
	full := causes.Finding{Code: "conntrack-table-full", Severity: causes.Critical, Title: "The conntrack table is full: 262144 of 262144 entries, 5310 refused", Impact: 10}
	drop := causes.Finding{Code: "rule-drop", Severity: causes.Critical, Title: "198 packets dropped in chain fw", Impact: 198}
	soon := causes.Finding{Code: "conntrack-table-full", Severity: causes.Warning, Title: "nearly full"}
	type seen struct {
		s        *snapshot.Snapshot
		findings []causes.Finding
	}
	for _, test := range []struct {
		name   string
		seen   []seen
		line   string
		status int
	}{
		{"nothing", []seen{{seesAll(host), nil}}, "no critical finding", NPDOK},
		{"a warning", []seen{{seesAll(host), []causes.Finding{soon}}}, "no critical finding, 1 warning", NPDOK},
		{"critical", []seen{{seesAll(host), []causes.Finding{drop}}}, "rule-drop: 198 packets dropped in chain fw", NPDProblem},
		{"too long", []seen{{seesAll(host), []causes.Finding{full}}}, "conntrack-table-full: The conntrack table is full: 262144 of 262144 entries...", NPDProblem},
		{"the worst of two, in a pod", []seen{{seesAll(host), []causes.Finding{full}}, {seesAll(pod), []causes.Finding{drop}}},
			"rule-drop in pod shop/cart-5d8f: 198 packets dropped in chain fw (+1)", NPDProblem},
		{"could not see", []seen{{without(seesAll(host), snapshot.CanConntrack), nil}}, "", NPDUnknown},
		{"critical and could not see", []seen{{without(seesAll(host), snapshot.CanConntrack), []causes.Finding{drop}}}, "rule-drop: 198 packets dropped in chain fw", NPDProblem},
		{"what it can't see is never critical", []seen{{without(seesAll(host), snapshot.CanHooks), nil}}, "no critical finding", NPDOK},
		{"it saw nothing", []seen{{&snapshot.Snapshot{}, nil}}, "", NPDUnknown},
	} {
		t.Run(test.name, func(t *testing.T) {
			var n NPD
			for _, s := range test.seen {
				n.Add(s.s, s.findings)
			}
			line, status := n.Line()
			if status != test.status || test.line != "" && line != test.line || test.line == "" && !strings.Contains(line, "could not be judged: ") {
				t.Errorf("%d %q, want %d %q", status, line, test.status, test.line)
			}
			if len(line) > npdBytes {
				t.Errorf("%d bytes: %q", len(line), line)
			}
		})
	}
}

func TestNPDCut(t *testing.T) {
	for _, text := range []string{strings.Repeat("x", 200), strings.Repeat("é", 79), "one\ntwo\tthree", strings.Repeat("word, ", 40)} {
		got := npdCut(text, npdBytes)
		if len(got) > npdBytes || strings.ContainsAny(got, "\n\t\uFFFD") || strings.HasSuffix(got, ",...") {
			t.Errorf("%q became %q", text, got)
		}
	}
}
