// SPDX-License-Identifier: Apache-2.0

package story

import (
	"testing"
	"time"

	"natkit/internal/ktest"
	"natkit/trim"
)

// Every part has its two routers, and a figure with its trials. What comes out is
// the machine's and asserted by nobody.
func TestMeasureHooks(t *testing.T) {
	ktest.Root(t)
	h, err := measureHooks(t.Context(), "test", 2, 20*time.Millisecond, func(string, ...any) {})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Parts) != 4 || len(h.Figures) != 5 {
		t.Fatalf("%d parts, %d figures: %v", len(h.Parts), len(h.Figures), h.Notes)
	}
	for _, f := range h.Figures {
		if len(f.Values) != 2 || f.Median <= 0 {
			t.Errorf("%+v", f)
		}
	}
}

func TestFillSavings(t *testing.T) {
	h := HookCosts{Parts: []HookPart{
		{Kind: trim.EmptyChain, PerHook: 3, NS: 300, Noise: 20},
		{Kind: trim.IdleTracking, NS: 300, Noise: 400},
		{NS: 900},
	}}
	needless := []trim.Needless{{Kind: trim.EmptyChain}, {Kind: trim.IdleTracking}, {Kind: trim.LegacyTable}}
	h.Fill(needless)
	if s := needless[0].SavesNS; s == nil || *s != 100 {
		t.Errorf("an empty chain saves %v, want 100", s)
	}
	if needless[1].SavesNS != nil {
		t.Error("a difference within the noise is shown as a saving")
	}
	if needless[2].SavesNS != nil {
		t.Error("what was not measured has a figure")
	}
}

func TestMiddleHalf(t *testing.T) {
	for want, values := range map[float64][]float64{0: {5}, 2: {1, 2, 3, 4, 100}} {
		if got := middleHalf(values); got != want {
			t.Errorf("%v: %g, want %g", values, got, want)
		}
	}
}
