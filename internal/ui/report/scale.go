// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// A scale says where values stand, and which of them are named.
type scale struct {
	low, high float64
	log       bool
	zero      float64 // where a logarithmic axis has 0: a power of ten
	ticks     []tick
}

// A tick without a label is a small one.
type tick struct {
	value float64
	label string
}

// place is where a value stands on the axis, from 0 to 1.
func (a *scale) place(v float64) float64 {
	return (a.scaled(v) - a.scaled(a.low)) / (a.scaled(a.high) - a.scaled(a.low))
}

func (a *scale) scaled(v float64) float64 {
	switch {
	case !a.log:
		return v
	case v <= 0:
		return a.zero
	}
	return max(math.Log10(v), a.zero)
}

// linear is an axis with about so many labels.
func linear(low, high float64, labels int) scale {
	return scale{low: low, high: high, ticks: roundTicks(low, high, labels)}
}

func roundTicks(low, high float64, labels int) (out []tick) {
	step := max(niceStep((high-low)/float64(max(labels, 2))), 1e-30) // of no measure: it only must not be 0
	for v := math.Ceil(low/step) * step; v <= high+step/1e6; v += step {
		label := short(v)
		if abs(v) < step/1e6 { // what is left of adding steps
			label = "0"
		}
		out = append(out, tick{v, label})
	}
	return out
}

// niceStep is the next larger of 1, 2 and 5 times a power of ten.
func niceStep(least float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, n := range []float64{1, 2, 5} {
		if n*power >= least {
			return n * power
		}
	}
	return 10 * power
}

// upTo leaves room above the largest value, and is never 0.
func upTo(largest float64) float64 {
	if largest <= 0 {
		return 1
	}
	return 1.05 * largest
}

// logarithmic is an axis from the least to the largest value with some room. 0, which
// has no logarithm, stands at the low edge, somewhat below the least positive value.
func logarithmic(values []float64, room float64) scale {
	least, positive := slices.Min(values), smallestPositive(values)
	a := scale{log: true, zero: math.Log10(positive) - 0.7, low: max(0, least/room), high: max(slices.Max(values)*room, positive*1.01)}
	a.ticks = a.powers()
	return a
}

func smallestPositive(values []float64) float64 {
	least := math.Inf(1)
	for _, v := range values {
		if v > 0 {
			least = min(least, v)
		}
	}
	if math.IsInf(least, 1) {
		return 1
	}
	return least
}

// powers are the powers of ten, and where there are few, what lies between.
func (a *scale) powers() (out []tick) {
	if a.low <= 0 {
		out = append(out, tick{0, "0"})
	}
	decades := a.scaled(a.high) - a.scaled(a.low)
	from, to := math.Floor(a.scaled(a.low)), math.Ceil(a.scaled(a.high))
	every := max(1, math.Ceil((to-from)/8))
	for e := from; e <= to; e++ {
		for n := 1.0; n < 10; n++ {
			v := n * math.Pow(10, e)
			if v < a.low || v > a.high || a.low <= 0 && math.Log10(v) < a.zero+0.3 {
				continue
			}
			t := tick{value: v}
			if n == 1 && math.Mod(e-from, every) == 0 || decades < 2.2 && (n == 2 || n == 5) || decades < 0.7 {
				t.label = short(v)
			}
			if every == 1 || t.label != "" {
				out = append(out, t)
			}
		}
	}
	return out
}

// ticksAt has ticks where the values are, as far as their labels have room.
func (a *scale) ticksAt(values []float64, width float64) (out []tick) {
	free := math.Inf(1)
	for _, v := range slices.Backward(slices.Compact(slices.Sorted(slices.Values(values)))) {
		label := short(v)
		x, half := a.place(v)*width, textWidth(label, textSize)/2
		if x+half+4 > free {
			continue
		}
		free = x - half
		out = append(out, tick{v, label})
	}
	return out
}

// short writes a number for an axis.
func short(v float64) string {
	for _, p := range []struct {
		scale float64
		name  string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= p.scale && v < 1000*p.scale {
			return strconv.FormatFloat(v/p.scale, 'g', 4, 64) + p.name
		}
	}
	return fmt.Sprintf("%.4g", v)
}
