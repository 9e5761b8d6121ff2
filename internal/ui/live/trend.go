// SPDX-License-Identifier: Apache-2.0

package live

import (
	"math"
	"time"

	"natkit/internal/diagnose/trend"
	"natkit/internal/kernel/conntrack"
)

// trendOver is the time that a trend is taken from: long enough that one burst is
// none, short enough to be told of before the table is full.
const trendOver = 30 * time.Second

// fillTrend fits a line through the last levels of the table.
type fillTrend struct{ levels []trend.Level }

// add takes the level of now and says where the table is going.
func (t *fillTrend) add(now time.Time, l conntrack.Limits) *Fill {
	t.levels = append(t.levels, trend.Level{At: now, Entries: l.Count})
	for now.Sub(t.levels[0].At) > trendOver {
		t.levels = t.levels[1:]
	}
	f := &Fill{Entries: l.Count, Max: l.Max}
	rate, _, known := trend.Slope(t.levels)
	if !known {
		return f
	}
	f.PerSecond = &rate
	if l.Max > 0 {
		f.FullIn = t.fullIn(max(0, float64(l.Max)-float64(l.Count)))
	}
	return f
}

const (
	leastGrowth = 0.5 // entries a second; less is no growth but noise
	flattens    = 0.8 // of the rate of the half before: a growth that levels off, and no jagged line
)

// fullIn is how many seconds it takes to grow by left, nil for ever. A load that begins fills the table
// at first by its rate, and in the end not at all, when as many entries expire as come: a rate that falls
// goes on falling by the same part.
func (t *fillTrend) fullIn(left float64) *float64 {
	rate, _, known := trend.Slope(t.levels)
	if !known || rate < leastGrowth {
		return nil
	}
	seconds := left / rate
	half := len(t.levels) / 2
	before, _, known1 := trend.Slope(t.levels[:half])
	now, _, known2 := trend.Slope(t.levels[half:])
	if !known1 || !known2 {
		return &seconds
	}
	if now < leastGrowth {
		return nil
	}
	seconds = left / now
	if part := now / before; before > 0 && part < flattens {
		apart := t.levels[len(t.levels)-1].At.Sub(t.levels[0].At).Seconds() / 2
		decay := -math.Log(part) / apart // a second
		now *= math.Sqrt(part)           // the rate was that in the middle of its half
		if now/decay <= left {
			return nil
		}
		seconds = -math.Log(1-left*decay/now) / decay
	}
	return &seconds
}
