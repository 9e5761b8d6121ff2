// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/words/plural"
)

// course is how full tables were and what was dropped, entry by entry.
type course struct {
	moments []courseMoment
}

type courseMoment struct {
	at      time.Time
	seconds float64
	fill    map[string]float64 // namespace -> share of its limit
	drops   map[string]float64 // cause -> packets a second
}

func (c *course) add(e *history.Entry) {
	m := courseMoment{at: e.At, seconds: max(e.Seconds, 1), fill: map[string]float64{}, drops: map[string]float64{}}
	for _, p := range e.Samples {
		if p.Conntrack != nil && p.Conntrack.Max > 0 {
			m.fill[monitor.Title(p.Netns)] = float64(p.Conntrack.Count) / float64(p.Conntrack.Max)
		}
		if p.Drops != nil {
			for _, row := range p.Drops.Rows {
				if !row.Benign {
					m.drops[cmp.Or(string(row.Cause), "other")] += float64(row.Count) / m.seconds
				}
			}
		}
	}
	c.moments = append(c.moments, m)
}

const (
	nightWidth  = 960
	nightLeft   = 250 // of the names
	nightRow    = 18
	nightCurve  = 150
	mostLines   = 4   // curves of one plot
	mostRows    = 80  // rows of the timeline
	mostMoments = 900 // of a curve: more than there are pixels for
)

// lines are the values of the busiest keys, thinned out: of moments that share a place the highest.
func (c *course) lines(of func(courseMoment) map[string]float64) (names []string, times []time.Time, values [][]float64) {
	peak := map[string]float64{}
	for _, m := range c.moments {
		for name, v := range of(m) {
			peak[name] = max(peak[name], v)
		}
	}
	names = slices.SortedFunc(maps.Keys(peak), func(a, b string) int { return cmp.Or(cmp.Compare(peak[b], peak[a]), strings.Compare(a, b)) })
	names = names[:min(len(names), mostLines)]
	step := max(1, (len(c.moments)+mostMoments-1)/mostMoments)
	for i := 0; i < len(c.moments); i += step {
		times = append(times, c.moments[i].at)
	}
	for _, name := range names {
		var line []float64
		for i := 0; i < len(c.moments); i += step {
			highest := 0.0
			for _, m := range c.moments[i:min(i+step, len(c.moments))] {
				highest = max(highest, of(m)[name])
			}
			line = append(line, highest)
		}
		values = append(values, line)
	}
	return names, times, values
}

// HTML writes the span as one page that needs nothing besides itself: a timeline of the findings,
// how full the tables were, what was dropped, and what changed before each finding.
func (r *HistoryResult) HTML(w io.Writer, zone *time.Location) error {
	const title = "natkit history"
	clock := func(t time.Time) string { return t.In(zone).Format(time.DateTime) }
	body := tag("h1", title)
	if r.Intervals == 0 {
		body += tag("p", text(fmt.Sprintf("Nothing was recorded from %s to %s.", clock(r.Since), clock(r.Until))))
	} else {
		body += tag("p.dim", text(r.about(zone)))
		body += tag("article", tag("h2", "Findings"), r.timeline(zone))
		fill, times, values := r.course.lines(func(m courseMoment) map[string]float64 { return m.fill })
		for _, line := range values {
			for i := range line {
				line[i] *= 100
			}
		}
		body += r.plot("Connection tracking table, % of its limit", fill, times, values, zone)
		drops, times, values := r.course.lines(func(m courseMoment) map[string]float64 { return m.drops })
		body += r.plot("Dropped packets a second, by what that means for NAT", drops, times, values, zone)
		body += each(r.Findings, func(e history.Episode) markup { return r.episode(e, clock) })
	}
	if len(r.Tunings) > 0 {
		body += tag("article", tag("h2", "Settings, by natkit monitor --tune"), scroll("facts", each(r.Tunings, func(n history.Tuning) markup {
			return tag("tr", tag("td", text(clock(n.At))), tag("td", text(tuningInWords(n))))
		})))
	}
	if len(r.Changes) > 0 {
		body += details(false, "All changes", scroll("facts", each(r.Changes, func(c history.Change) markup {
			return tag("tr", tag("td", text(clock(c.At))), tag("td", text(c.Namespace)), tag("td", text(c.What)))
		})))
	}
	if len(r.Gaps) > 0 {
		body += tag("article", tag("h2", "Not recorded"), tag("ul", each(r.Gaps, func(g HistoryGap) markup { return tag("li", text(clock(g.From)+" to "+clock(g.To))) })))
	}
	if len(r.Problems) > 0 {
		body += tag("article", tag("h2", "Problems"), tag("ul", each(r.Problems, func(p string) markup { return tag("li", text(p)) })))
	}
	return document{title: title, style: pageStyle + doctorStyle, body: tag("main", body)}.write(w)
}

func (r *HistoryResult) episode(e history.Episode, clock func(time.Time) string) markup {
	began, ended := r.when(e, clock)
	if e.Why != "" {
		ended += " (" + e.Why + ")"
	}
	body := tag("span.tag", text(strings.ToUpper(e.Severity))) + " " + tag("code", text(e.Code)) + tag("h2", text(e.Title)) +
		tag("p.dim", text(fmt.Sprintf("%s, began: %s, ended: %s", e.Namespace, began, ended)))
	if len(e.Changes) > 0 {
		body += tag("p", "Changed before:") + tag("ul", each(e.Changes, func(c history.Change) markup {
			return tag("li", text(fmt.Sprintf("%s before: %s", since(e.Began.Sub(c.At)), c.What)))
		}))
	}
	return tag("article."+e.Severity, body)
}

// place is where a time lies on a picture of the night.
func (r *HistoryResult) place(t time.Time) float64 {
	whole := r.Last.Sub(r.First).Seconds()
	if whole <= 0 {
		return nightLeft
	}
	part := min(1, max(0, t.Sub(r.First).Seconds()/whole))
	return nightLeft + part*(nightWidth-nightLeft-10)
}

// timeAxis draws the hours below, and lines up to the top.
func (r *HistoryResult) timeAxis(c *canvas, bottom float64, zone *time.Location) {
	const steps = 6
	layout := time.TimeOnly
	if r.Last.Sub(r.First) > 24*time.Hour {
		layout = "01-02 15:04"
	}
	for i := range steps + 1 {
		t := r.First.Add(r.Last.Sub(r.First) * time.Duration(i) / steps)
		x, a := r.place(t), alignCentre
		if i == steps {
			a = alignRight
		}
		c.line(stroke{ink: "grid", width: 1}, x, 0, x, bottom)
		c.text("dim", textSize-2, x, bottom+10, a, t.In(zone).Format(layout))
	}
}

// timeline is a bar for each finding, a row for each cause of a namespace.
func (r *HistoryResult) timeline(zone *time.Location) markup {
	type key struct{ namespace, code string }
	var rows []key
	for _, e := range r.Findings {
		if k := (key{e.Namespace, e.Code}); !slices.Contains(rows, k) {
			rows = append(rows, k)
		}
	}
	if len(rows) == 0 {
		return tag("p", "No finding.")
	}
	more := len(rows) - mostRows
	rows = rows[:min(len(rows), mostRows)]
	bottom := float64(len(rows)) * nightRow
	picture := drawSVG(nightWidth, bottom+20, "window", "when each finding began and ended", func(c *canvas) {
		r.timeAxis(c, bottom, zone)
		for i, k := range rows {
			y := (float64(i) + 0.5) * nightRow
			c.text("fg", textSize-2, nightLeft-8, y, alignRight, fitted(k.code+", "+k.namespace, nightLeft-12))
			for _, e := range r.Findings {
				if (key{e.Namespace, e.Code}) != k {
					continue
				}
				from, to := r.place(e.Began), r.place(r.Last)
				if !e.Ended.IsZero() {
					to = r.place(e.Ended)
				}
				to = max(to, from+2)
				colour := map[string]ink{"critical": "s6", "warning": "s1"}[e.Severity]
				c.area(cmp.Or(colour, "s0"), spot{from, y - 5}, spot{to, y - 5}, spot{to, y + 5}, spot{from, y + 5})
			}
		}
	})
	out := tag("div.scroll", markup(picture))
	if more > 0 {
		out += tag("p.dim", text(plural.Count(more, "more row")+": see the list below."))
	}
	return out
}

// gapBetween tells whether nothing was recorded for a while between two times: no line joins what was before
// and after it.
func (r *HistoryResult) gapBetween(from, to time.Time) bool {
	return slices.ContainsFunc(r.Gaps, func(g HistoryGap) bool { return !g.From.Before(from) && g.From.Before(to) })
}

// plot is how some values went.
func (r *HistoryResult) plot(title string, names []string, times []time.Time, values [][]float64, zone *time.Location) markup {
	most := 0.0
	for _, line := range values {
		most = max(most, slices.Max(line))
	}
	if most == 0 || len(times) < 2 {
		return ""
	}
	picture := drawSVG(nightWidth, nightCurve+20, "window", title, func(on *canvas) {
		r.timeAxis(on, nightCurve, zone)
		on.text("dim", textSize-2, nightLeft-8, 8, alignRight, digits(most))
		on.text("dim", textSize-2, nightLeft-8, nightCurve-6, alignRight, "0")
		for i, line := range values {
			look := lookOf(i, false).line
			look.width = 1.5
			var path []spot
			for j, v := range line {
				if j > 0 && r.gapBetween(times[j-1], times[j]) {
					on.lines(look, path...)
					path = nil
				}
				path = append(path, spot{r.place(times[j]), nightCurve - v/most*(nightCurve-8)})
			}
			on.lines(look, path...)
		}
	})
	var legend markup
	for i, name := range names {
		legend += tag("li", tag("span.key i-"+string(inks[i%len(inks)])), text(name))
	}
	return tag("article", tag("h2", text(title)), tag("div.scroll", markup(picture)), tag("ul.legend", legend))
}
