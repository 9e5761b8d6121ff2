// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"runtime"
	"testing"
	"time"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

// Beside a host that wants all ports of the one external address, every other one gets all that it
// opens where ports are in blocks.
func TestBenchSubscribers(t *testing.T) {
	ktest.Root(t)
	if runtime.NumCPU() < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	routers, err := FindSubscriberRouters([]string{"ebpf-tc-blocks"})
	if err != nil {
		t.Fatal(err)
	}
	res, err := bench.MeasureSubscribers(t.Context(), bench.SubscribersOptions{
		Routers: routers, Sessions: 2000, Block: 64, Hosts: 20, Duration: 50 * time.Millisecond, Trials: 1})
	if err != nil {
		t.Fatal(err)
	}
	figures := map[string]float64{}
	for _, f := range res.Figures {
		figures[f.Metric] = f.Median
	}
	for metric, want := range map[string]float64{
		bench.MetricNewSessionsRatio: 1, bench.MetricHostsServed: 1, bench.MetricHostsWithout: 0, bench.MetricFloodSessions: 8 * 64,
	} {
		if got, known := figures[metric]; !known || got != want {
			t.Errorf("%s is %v, want %v", metric, got, want)
		}
	}
}
