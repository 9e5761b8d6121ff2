// SPDX-License-Identifier: Apache-2.0

package percent

import "testing"

func TestOf(t *testing.T) {
	for _, tt := range []struct {
		share    float64
		decimals int
		want     string
	}{
		{0, 1, "0.0 %"}, {1, 1, "100.0 %"}, {2.0 / 3, 1, "66.7 %"}, {1.2, 0, "120 %"}, {0, 0, "0 %"}, {1, 0, "100 %"},
		{262143.0 / 262144, 1, ">99.9 %"}, {0.9996, 1, ">99.9 %"}, {0.9994, 1, "99.9 %"}, {1e-9, 1, "<0.1 %"}, {0.0004, 1, "<0.1 %"}, {0.0006, 1, "0.1 %"},
		{0.999, 0, ">99 %"}, {0.994, 0, "99 %"}, {0.004, 0, "<1 %"}, {0.006, 0, "1 %"}, {0.99999, 2, ">99.99 %"},
	} {
		if got := Of(tt.share, tt.decimals); got != tt.want {
			t.Errorf("%v with %d decimals is %q, want %q", tt.share, tt.decimals, got, tt.want)
		}
	}
}

func TestWhole(t *testing.T) {
	for share, want := range map[float64]string{-1e-9: "0 %", 0.003: "<1 %", 0.5: "50 %", 0.999: ">99 %", 1: "100 %"} {
		if got := Whole(share); got != want {
			t.Errorf("%v is %q, want %q", share, got, want)
		}
	}
}
