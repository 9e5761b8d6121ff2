// SPDX-License-Identifier: Apache-2.0

package trend

import (
	"math"
	"testing"
	"time"
)

// A line's slope is found whatever its level, with an error that follows from what lies off it.
func TestSlope(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	levels := func(entries ...uint64) (out []Level) {
		for i, n := range entries {
			out = append(out, Level{start.Add(time.Duration(i) * time.Second), n})
		}
		return out
	}
	for _, c := range []struct {
		name         string
		levels       []Level
		rate, spread float64
		known        bool
	}{
		{"two levels", levels(1, 2), 0, 0, false},
		{"one moment", []Level{{start, 1}, {start, 2}, {start, 3}}, 0, 0, false},
		{"rises", levels(1e12, 1e12+10, 1e12+20), 10, 0, true},
		{"falls", levels(30, 20, 10, 0), -10, 0, true},
		// Residuals -1, 2, -1 around the mean: sqrt(6 / 1 / 2).
		{"a tooth", levels(0, 3, 0), 0, math.Sqrt(3), true},
	} {
		rate, spread, known := Slope(c.levels)
		if math.Abs(rate-c.rate) > 1e-9 || math.Abs(spread-c.spread) > 1e-9 || known != c.known {
			t.Errorf("%s: %v, %v, %v; want %v, %v, %v", c.name, rate, spread, known, c.rate, c.spread, c.known)
		}
	}
}
