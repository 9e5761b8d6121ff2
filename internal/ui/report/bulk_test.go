// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"

	"natkit/internal/bench"
)

// The paper's tables: averages, not medians; kB/s of the average time; published
// rows beside; what was not measured is no zero.
func TestBulkPaper(t *testing.T) {
	down := bench.Params{Streams: 1, Direction: bench.DirectionDown, Protocol: "tcp", Setup: "3 one rule"}
	up := down
	up.Direction = bench.DirectionUp
	noisy := bench.NewFigure("nat-one", bench.MetricCPUPerGbit, down, 0.1, 0.125, 0.2)
	noisy.Label = "noisy"
	var b strings.Builder
	if err := Result(&b, &bench.Result{
		Kind: "bulk", Command: "natkit bench bulk --paper",
		Routers: []bench.RouterUse{{Name: "nat-one", Describe: "one rule"}, {Name: "lost", Unsupported: "no such kernel"}},
		Figures: []bench.Figure{
			bench.NewFigure("nat-one", bench.MetricTransferSeconds, down, 0.01, 0.01, 0.04),
			bench.NewFigure("nat-one", bench.MetricTransferKBs, down, 2_000_000, 2_000_000, 500_000),
			noisy,
		},
		Published: []bench.Published{
			{Source: "someone", Metric: bench.MetricTransferSeconds, Params: down, Value: 41.68},
			{Source: "someone", Metric: bench.MetricTransferKBs, Params: up, Value: 542},
		},
		Notes: []string{"a note"},
	}); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(strings.Fields(b.String()), " ")
	for _, want := range []string{
		"3 one rule server to client 3 0.0200 (0.0100-0.0400) 1000000 1000 | 41.68 - noisy client to server - - - - | - 542",
		"lost: NOT MEASURED: no such kernel", "Published: someone.", "Note: a note",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
