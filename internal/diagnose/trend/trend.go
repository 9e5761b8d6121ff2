// SPDX-License-Identifier: Apache-2.0

// Package trend fits a line through how full a table was. Pure.
package trend

import (
	"math"
	"time"
)

// Level is how many entries a table had.
type Level struct {
	At      time.Time
	Entries uint64
}

// Slope is the rise of the line with the least squares through levels in the order of their times, in
// entries a second, and its standard error. It is not known from fewer than three.
func Slope(levels []Level) (rate, spread float64, known bool) {
	n := float64(len(levels))
	if n < 3 {
		return 0, 0, false
	}
	var sumX, sumY, sumXX, sumXY, sumYY float64
	for _, l := range levels {
		x, y := l.At.Sub(levels[0].At).Seconds(), float64(l.Entries)-float64(levels[0].Entries)
		sumX, sumY, sumXX, sumXY, sumYY = sumX+x, sumY+y, sumXX+x*x, sumXY+x*y, sumYY+y*y
	}
	width := n*sumXX - sumX*sumX
	if width <= 0 {
		return 0, 0, false
	}
	rate = (n*sumXY - sumX*sumY) / width
	residual := max(0, (sumYY-sumY*sumY/n)-rate*(sumXY-sumX*sumY/n))
	return rate, math.Sqrt(residual / (n - 2) / (width / n)), true
}
