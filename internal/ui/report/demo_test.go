// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

// The published figures have columns and a footnote where there are any.
func TestDemoPublished(t *testing.T) {
	for _, published := range []*scenario.Published{nil, {Completed: 100000, RequestsPerSecond: 6576}} {
		var b strings.Builder
		d := &scenario.DemoResult{Restored: true, Steps: []scenario.DemoStep{{Name: scenario.StepBaseline, HTTP: &bench.HTTPResult{Completed: 1000}, Published: published}}}
		if err := Demo(&b, d, false); err != nil {
			t.Fatal(err)
		}
		got, want := strings.Count(b.String(), "elsewhere")+strings.Count(b.String(), "measured by others"), 0
		if published != nil {
			want = 2
		}
		if got != want {
			t.Errorf("published %v: %d places speak of it, want %d:\n%s", published, got, want, b.String())
		}
	}
}

// What stands side by side fits a terminal, and says how far trials were apart.
func TestDemoSideBySide(t *testing.T) {
	var b strings.Builder
	text := &DemoText{W: &b}
	text.Done(&scenario.DemoStep{Name: scenario.StepReplace, Figures: []bench.Figure{
		bench.NewFigure(scenario.MitigationKernel, "cost_ns", bench.Params{FrameBytes: 64, Flows: 1000, Cores: 1, BothWays: true}, 2000, 2100, 1900),
		bench.NewFigure(scenario.MitigationEngine, "cost_ns", bench.Params{FrameBytes: 64, Flows: 1000, Cores: 1, BothWays: true}, 400, 500, 410),
		bench.NewFigure(scenario.MitigationKernel, "timeouts_total", bench.Params{}, 0, 0, 0),
	}})
	for _, want := range []string{"kernel         2  (1.900 to 2.100, n 3)\n", "ebpf        0.41  (0.4 to 0.5, n 3)  x 0.20\n", "Requests timed out (less is better)\n    kernel         0  (0 to 0, n 3)\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	for line := range strings.Lines(b.String()) {
		if len([]rune(line)) > 81 {
			t.Errorf("%d columns: %s", len([]rune(line)), line)
		}
	}
}
