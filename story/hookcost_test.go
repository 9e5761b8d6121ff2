// SPDX-License-Identifier: Apache-2.0

package story

import (
	"strings"
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
	parts := 5
	if h.Unmeasured[trim.LegacyTable] != "" { // a kernel without iptables-legacy
		parts = 4
	}
	if len(h.Parts) != parts || len(h.Figures) != parts+1 {
		t.Fatalf("%d parts, %d figures: %v", len(h.Parts), len(h.Figures), h.Notes)
	}
	for _, f := range h.Figures {
		if len(f.Values) != 2 || f.Median <= 0 && f.Label != "noisy" { // disturbed as often as it was tried
			t.Errorf("%+v", f)
		}
	}
}

func TestFillSavings(t *testing.T) {
	h := HookCosts{Parts: []HookPart{
		{Kind: trim.EmptyChain, PerHook: 3, NS: 300, Noise: 20},
		{Kind: trim.IdleTracking, NS: 300, Noise: 400},
		{NS: 900},
		{Kind: trim.LegacyTable, PerHook: 3, NS: 60, Noise: 10},
	}, Unmeasured: unmeasurable}
	needless := []trim.Needless{{Kind: trim.EmptyChain}, {Kind: trim.IdleTracking}, {Kind: trim.BridgeHooks}, {Kind: trim.LegacyTable, OnPath: 2}}
	h.Fill(needless)
	for i, part := range []string{"", "noise", "no bridge", ""} {
		if why := needless[i].Unmeasured; !strings.Contains(why, part) || (why == "") != (needless[i].SavesNS != nil) {
			t.Errorf("%s: saves %v, not measured %q", needless[i].Kind, needless[i].SavesNS, why)
		}
	}
	if s := needless[3].SavesNS; s == nil || *s != 40 {
		t.Errorf("two chains of a legacy table save %v, want 40", s)
	}
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
