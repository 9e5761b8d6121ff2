// SPDX-License-Identifier: Apache-2.0

package live

import (
	"time"

	"natkit/conntrack"
)

// trendOver is the time that a trend is taken from: long enough that one burst is
// none, short enough to be told of before the table is full.
const trendOver = 30 * time.Second

// trend fits a line through the last levels of the table.
type trend struct{ levels []level }

type level struct {
	at      time.Time
	entries uint64
}

// add takes the level of now and says where the table is going.
func (t *trend) add(now time.Time, l conntrack.Limits) *Fill {
	t.levels = append(t.levels, level{now, l.Count})
	for now.Sub(t.levels[0].at) > trendOver {
		t.levels = t.levels[1:]
	}
	f := &Fill{Entries: l.Count, Max: l.Max}
	rate, known := t.slope()
	if !known {
		return f
	}
	f.PerSecond = &rate
	if rate >= 0.5 && l.Max > 0 { // less is no growth but noise
		left := max(0, float64(l.Max)-float64(l.Count)) / rate
		f.FullIn = &left
	}
	return f
}

// slope is the rise, in entries a second, of the line with the least squares.
func (t *trend) slope() (rate float64, known bool) {
	n := float64(len(t.levels))
	if n < 3 {
		return 0, false
	}
	var sumX, sumY, sumXX, sumXY float64
	for _, l := range t.levels {
		x, y := l.at.Sub(t.levels[0].at).Seconds(), float64(l.entries)
		sumX, sumY, sumXX, sumXY = sumX+x, sumY+y, sumXX+x*x, sumXY+x*y
	}
	spread := n*sumXX - sumX*sumX
	if spread <= 0 {
		return 0, false
	}
	return (n*sumXY - sumX*sumY) / spread, true
}
