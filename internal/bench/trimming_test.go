// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// The report has loss and processor time at both rates, the searched rate and the
// cost, and each published figure stands under conditions that are measured, or
// under two cores.
func TestTrimming(t *testing.T) {
	ktest.Root(t)
	if cpus, err := allowedCPUs(); err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	goal := GoalNDR // decided by fewer trials, and sooner: TestSearch is of the search
	goal.Sum, goal.Width = 3*goal.Trial, searchRoughStep
	res, err := Trimming(t.Context(), TrimmingOptions{
		Routers: []Router{Forwarder{}}, Flows: 1, Duration: 10 * time.Millisecond, Trials: 1, goal: goal,
	})
	if err != nil {
		t.Fatal(err)
	}
	has := func(metric string, p Params) bool {
		return slices.ContainsFunc(res.Figures, func(f Figure) bool { return f.Metric == metric && f.Params == p })
	}
	p := Params{FrameBytes: MinFrame, Flows: 1, Cores: 1, Protocol: "udp"}
	for _, cores := range []int{1, 2} {
		p.Cores = cores
		if !has("cost_ns", p) {
			t.Errorf("no cost on %d cores", cores)
		}
	}
	p.Cores = 1
	if !has("ndr_pps", p) || !has("mrr_pps", p) {
		t.Error("no rate without loss, or none under overload")
	}
	for _, pps := range []float64{lineRate64, 10 * lineRate64} {
		p.OfferedPPS = pps
		if !has("loss_ratio", p) || !has("cpu_share", p) {
			t.Errorf("no loss or processor time at %.0f frames/s", pps)
		}
	}
	for _, pub := range res.Published {
		if pub.Params.Cores == 1 && !has(pub.Metric, pub.Params) {
			t.Errorf("published %s of %q stands beside no figure", pub.Metric, pub.Name)
		}
		if pub.Params.Cores == 2 && !strings.HasSuffix(pub.Note, "no counterpart here") {
			t.Errorf("published %s of %q on two cores: note %q", pub.Metric, pub.Name, pub.Note)
		}
		if pub.Source == "" {
			t.Errorf("published %s of %q has no source", pub.Metric, pub.Name)
		}
	}
	if !strings.HasPrefix(res.Notes[0], "Two cores:") {
		t.Errorf("first note %q", res.Notes[0])
	}
	if res.Kind != "trimming" || len(res.Published) == 0 {
		t.Errorf("kind %q with %d published figures", res.Kind, len(res.Published))
	}
}
