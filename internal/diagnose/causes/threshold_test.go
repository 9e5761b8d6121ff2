// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// Each pair has room between its numbers, or says by equal ones that nothing comes by chance.
func TestThresholds(t *testing.T) {
	some := 0
	for _, c := range Catalogue() {
		for _, th := range c.Thresholds {
			some++
			if th.What == "" || th.Enter <= 0 || th.Leave <= 0 || th.Leave > th.Enter || th.Share && th.Enter > 1 {
				t.Errorf("%s: %+v", c.Code, th)
			}
		}
	}
	if some < 25 {
		t.Errorf("only %d thresholds in the catalogue", some)
	}
}

// refused is a backend that refused so many of its connections.
func refused(n uint64) *snapshot.Snapshot {
	s := gateway()
	examples["backend-silent"](s)
	s.Conntrack.Table.Targets = nil
	s.Conntrack.Refused = s.Conntrack.Refused[:1]
	s.Conntrack.Refused[0].Count = n
	return s
}

func severityOf(findings []Finding, code string) Severity {
	for _, f := range findings {
		if f.Code == code {
			return f.Severity
		}
	}
	return 0
}

// The same load, of which each window has as many as chance has it: whoever watches is told once, and a
// single window tells at least that it is near.
func TestSameLoadIsNotNewsInEachWindow(t *testing.T) {
	const code = "backend-silent"
	rng := rand.New(rand.NewPCG(3, 4))
	poisson := func(mean float64) (n uint64) {
		for p := rng.Float64(); p > math.Exp(-mean); p *= rng.Float64() {
			n++
		}
		return n
	}
	changes, missed, before := 0, 0, map[string]bool{}
	const windows = 200
	for range windows {
		s := refused(poisson(12))
		was := before[code]
		now := severityOf(JudgeAgain(s, before), code) > Advice
		before = map[string]bool{code: now}
		if now != was {
			changes++
		}
		if severityOf(Judge(s), code) == 0 {
			missed++
		}
	}
	if changes > windows/20 {
		t.Errorf("%d changes in %d windows of the same load", changes, windows)
	}
	if missed > windows/20 {
		t.Errorf("nothing was told of %d of %d windows of the same load", missed, windows)
	}
}

func TestNearTheThreshold(t *testing.T) {
	const code = "backend-silent"
	for n, want := range map[uint64]Severity{4: 0, 7: Advice, 9: Advice, 10: Critical} {
		found := Judge(refused(n))
		if got := severityOf(found, code); got != want {
			t.Errorf("%d refused: %v, want %v", n, got, want)
		}
		if want == Advice && (!strings.HasPrefix(found[0].Title, "near the threshold: ") || !strings.Contains(found[0].Remedy[1], "--for 1m")) {
			t.Errorf("%d refused: %q, %q", n, found[0].Title, found[0].Remedy)
		}
	}
	if got := severityOf(JudgeAgain(refused(6), map[string]bool{code: true}), code); got < Warning {
		t.Errorf("6 refused where it was named before: %v", got)
	}
	if got := severityOf(JudgeAgain(refused(4), map[string]bool{code: true}), code); got != 0 {
		t.Errorf("4 refused where it was named before: %v", got)
	}
}
