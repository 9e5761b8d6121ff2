// SPDX-License-Identifier: Apache-2.0

package causes

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

// many is a threshold of so many in the window.
func many(n float64, what string) Threshold {
	return Threshold{What: what, Enter: n, Leave: leaveCount(n)}
}

// portion is a threshold of a share of what happened in the window.
func portion(x float64, what string) Threshold {
	return Threshold{What: what, Enter: x, Leave: leaveShare(x), Share: true}
}

// level is a threshold of how full something is.
func level(x float64, what string) Threshold {
	return Threshold{What: what, Enter: x, Leave: leaveLevel(x), Share: true}
}

// leaveCount: the same load gives counts that differ by chance, about as their square root, so that two
// of these below the threshold it may be the same load; half of it is not.
func leaveCount(n float64) float64 {
	return math.Ceil(math.Max(n-2*math.Sqrt(n), n/2))
}

// leaveShare: three quarters of a share are the same within the chance of a window.
func leaveShare(x float64) float64 { return x * 3 / 4 }

// leaveLevel: a level has no chance in it, and moves a little all the time.
func leaveLevel(x float64) float64 { return x * 19 / 20 }

// String is how docs and findings write a threshold.
func (t Threshold) String() string {
	if t.Share {
		return fmt.Sprintf("%.4g %%, %.4g %%", 100*t.Enter, 100*t.Leave)
	}
	return fmt.Sprintf("%.0f, %.0f", t.Enter, t.Leave)
}

// strictness is from which number of a threshold on a cause is asked for.
type strictness uint8

const (
	enter strictness = iota // the upper one: it was not named before
	held                    // the lower one: it was named in the last window
	near                    // the lower one, where it may be less than the upper one by chance alone
)

// chanceFrom is the least count that may be less by chance and still tell of something: of fewer,
// one or two packets would.
const chanceFrom = 10

// few is a count that many makes a threshold of, as it is asked for now.
func (f facts) few(n uint64) uint64 {
	if f.ask == enter || f.ask == near && n < chanceFrom {
		return n
	}
	return uint64(leaveCount(float64(n)))
}

// part is a share that portion makes a threshold of, as it is asked for now.
func (f facts) part(x float64) float64 {
	if f.ask == enter {
		return x
	}
	return leaveShare(x)
}

// full is a share that level makes a threshold of, as it is asked for now.
func (f facts) full(x float64) float64 {
	if f.ask == held {
		return leaveLevel(x)
	}
	return x
}

// reaches says whether a count reaches a threshold.
func (f facts) reaches(n uint64, t Threshold) bool { return n >= f.few(uint64(t.Enter)) }
