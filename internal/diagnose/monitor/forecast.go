// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/trend"
	"natkit/internal/snapshot"
)

// Forecast is when a table will be full if it goes on as it did: likely at Full, between Early
// and Late. Late is zero where the growth may end before.
type Forecast struct {
	At    time.Time
	Full  time.Duration
	Early time.Duration
	Late  time.Duration
}

const (
	// trendOver is what a forecast is made from, trendLeast what it needs at least.
	trendOver  = 10 * time.Minute
	trendLeast = 2 * time.Minute
	// leastLevels is how many levels a rate is made from: the error of one from fewer says nothing. trendLevels are kept however
	// old they are, so that the last quarter has as many with long intervals, too.
	leastLevels = 4
	trendLevels = 4*leastLevels + 1

	// leastGrowth is entries a second; less is noise.
	leastGrowth = 0.5
	// farthest is how far a forecast looks ahead.
	farthest = 24 * time.Hour

	// horizon is how far ahead a forecast is checked.
	horizon = 5 * time.Minute
)

// tableTrend watches one table.
type tableTrend struct {
	levels []trend.Level
	made   []prediction
	score  Score
}

// prediction is what a forecast said of a time, to be checked then.
type prediction struct {
	due              time.Time
	likely, low, top float64
}

// Score is how good forecasts were: of the number of entries that they foretold five minutes ahead.
type Score struct {
	Checked int `json:"checked"`
	Held    int `json:"held"` // the number was within the range
}

// Filling is a table that will be full if it grows as it did.
type Filling struct {
	Namespace string           `json:"netns"`
	FullIn    snapshot.Seconds `json:"full_in_s"`
	Early     snapshot.Seconds `json:"earliest_s"` // by the error of the forecast
	Late      snapshot.Seconds `json:"latest_s,omitzero"`
}

// String is "full in 40 min (30 min to 60 min)".
func (f Filling) String() string {
	in := func(s snapshot.Seconds) string {
		switch d := time.Duration(s); {
		case d < 2*time.Minute:
			return fmt.Sprintf("%.0f s", d.Seconds())
		case d < 3*time.Hour:
			return fmt.Sprintf("%.0f min", d.Minutes())
		default:
			return fmt.Sprintf("%.0f h", d.Hours())
		}
	}
	if f.Late == 0 {
		return fmt.Sprintf("full in %s (%s or more)", in(f.FullIn), in(f.Early))
	}
	return fmt.Sprintf("full in %s (%s to %s)", in(f.FullIn), in(f.Early), in(f.Late))
}

// Record is the score of forecasts that entries of a history would have had, and the last forecasts.
type Record struct {
	trends  map[history.Namespace]*tableTrend
	filling []Filling // by the last entry
}

// Add takes the next entry.
func (r *Record) Add(e *history.Entry) {
	if r.trends == nil {
		r.trends = map[history.Namespace]*tableTrend{}
	}
	r.filling = nil
	for _, p := range e.Samples {
		if ct := p.Conntrack; ct != nil {
			key := history.Namespace{Inode: p.Netns.Inode, Title: Title(p.Netns)}
			if r.trends[key] == nil {
				r.trends[key] = &tableTrend{}
			}
			if f := r.trends[key].add(p.TakenAt, ct.Count, ct.Max); f != nil {
				r.filling = append(r.filling, Filling{key.Title, snapshot.Seconds(f.Full), snapshot.Seconds(f.Early), snapshot.Seconds(f.Late)})
			}
		}
	}
}

// Filling are the tables that were filling in the last entry, the first to be full first.
func (r *Record) Filling() []Filling {
	return slices.SortedStableFunc(slices.Values(r.filling), func(a, b Filling) int { return cmp.Compare(a.FullIn, b.FullIn) })
}

// Score is that of all tables.
func (r *Record) Score() (s Score) {
	for _, t := range r.trends {
		s.Checked, s.Held = s.Checked+t.score.Checked, s.Held+t.score.Held
	}
	return s
}

// add takes the level of now and the limit, and says where that leads; nil where it does not grow.
func (t *tableTrend) add(now time.Time, count, limit uint64) *Forecast {
	if n := len(t.levels); n > 0 {
		if since := now.Sub(t.levels[n-1].At); since <= 0 || since > trendOver { // the clock was set back, or nobody looked
			t.levels, t.made = nil, nil
		}
	}
	t.levels = append(t.levels, trend.Level{At: now, Entries: count})
	for len(t.levels) > trendLevels && now.Sub(t.levels[0].At) > trendOver {
		t.levels = t.levels[1:]
	}
	t.check(now, float64(count))
	span := now.Sub(t.levels[0].At)
	if limit == 0 || span < trendLeast {
		return nil
	}
	// The growth of the whole time, of its later half and of its last quarter: as far as they differ
	// the future does.
	likely, low, high := 0.0, math.Inf(1), math.Inf(-1)
	for _, part := range []float64{1, 0.25, 0.5} {
		from := now.Add(-time.Duration(float64(span) * part))
		first, _ := slices.BinarySearchFunc(t.levels, from, func(l trend.Level, at time.Time) int { return l.At.Compare(at) })
		rate, spread, known := trend.Slope(t.levels[first:])
		if !known || len(t.levels)-first < leastLevels {
			return nil
		}
		likely, low, high = rate, min(low, rate-2*spread), max(high, rate+2*spread)
	}
	t.made = append(t.made, prediction{now.Add(horizon), float64(count) + likely*horizon.Seconds(), float64(count) + low*horizon.Seconds(), float64(count) + high*horizon.Seconds()})
	if len(t.made) > int(trendOver/time.Second) {
		t.made = t.made[1:]
	}
	left := float64(limit) - float64(count)
	if likely < leastGrowth || left <= 0 {
		return nil
	}
	f := &Forecast{At: now, Full: after(left, likely), Early: after(left, high), Late: after(left, low)}
	if f.Full == 0 || f.Full > farthest {
		return nil
	}
	return f
}

// after is how long growth at a rate takes; 0 is more than a year.
func after(left, rate float64) time.Duration {
	if seconds := left / rate; rate >= leastGrowth/10 && seconds < (365*24*time.Hour).Seconds() {
		return time.Duration(seconds * float64(time.Second))
	}
	return 0
}

// check compares what was foretold for now with what is.
func (t *tableTrend) check(now time.Time, count float64) {
	for len(t.made) > 0 && !now.Before(t.made[0].due) {
		p := t.made[0]
		t.made = t.made[1:]
		if now.Sub(p.due) > time.Minute { // nobody looked then
			continue
		}
		t.score.Checked++
		// A table that stands still moves by a few entries all the time.
		slack := max(5, 0.01*count)
		if p.low-slack <= count && count <= p.top+slack {
			t.score.Held++
		}
	}
}
