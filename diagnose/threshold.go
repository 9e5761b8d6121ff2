// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"math"
)

// Threshold is a pair of numbers. From Enter on a cause is named; who watches window after
// window goes on naming it until the value is below Leave. Two numbers, because a load that
// hovers about a single one would be news in every other window.
type Threshold struct {
	What  string  `json:"what"` // what is compared: "connections that failed"
	Enter float64 `json:"enter"`
	Leave float64 `json:"leave"`
	Share bool    `json:"share,omitempty"` // of a whole, 0 to 1; otherwise a count of the window
}

// many is a threshold of so many in the window. The same load gives counts that differ by
// chance, about as their square root: two of these below the threshold is the same load.
func many(n float64, what string) Threshold {
	return Threshold{What: what, Enter: n, Leave: math.Max(1, math.Ceil(n-2*math.Sqrt(n)))}
}

// portion is a threshold of a share; three quarters of it are the same within a window's chance.
func portion(x float64, what string) Threshold {
	return Threshold{What: what, Enter: x, Leave: x * 3 / 4, Share: true}
}

// String is how docs and findings write a threshold.
func (t Threshold) String() string {
	if t.Share {
		return fmt.Sprintf("%s, no longer below %s", percent(t.Enter), percent(t.Leave))
	}
	return fmt.Sprintf("%.0f, no longer below %.0f", t.Enter, t.Leave)
}

// least is the number that a value must reach: Enter, or Leave where the cause was named before
// or is asked for as nearly there.
func (f facts) least(t Threshold) float64 {
	if f.lenient {
		return t.Leave
	}
	return t.Enter
}

// reaches says whether a count reaches a threshold.
func (f facts) reaches(n uint64, t Threshold) bool { return float64(n) >= f.least(t) }

// makesUp says whether a share reaches a threshold.
func (f facts) makesUp(x float64, t Threshold) bool { return x >= f.least(t) }
