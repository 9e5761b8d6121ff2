// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"time"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/words/plural"
)

// HistoryLead is how long before a span its entries are read, so that it is known how what was on began.
const HistoryLead = 30 * time.Minute

// HistoryResult is what natkit monitor has recorded in a span, as -o json prints it.
type HistoryResult struct {
	Since     time.Time         `json:"since"`
	Until     time.Time         `json:"until"`
	First     time.Time         `json:"first_time,omitzero"` // the ends of the first and the last interval
	Last      time.Time         `json:"last_time,omitzero"`
	Intervals int               `json:"interval_count"`
	Findings  []history.Episode `json:"findings"`
	Changes   []history.Change  `json:"changes"`
	Tunings   []history.Tuning  `json:"tunings"` // what natkit monitor --tune did or would do
	Gaps      []HistoryGap      `json:"gaps"`
	Problems  []string          `json:"problems"` // what could not be read or written
	Forecasts monitor.Score     `json:"forecasts"`
	Filling   []monitor.Filling `json:"filling_tables"` // at the end of the last interval

	over bool // the record ends before the span: what was on then may not be

	episodes history.Episodes
	record   monitor.Record
	course   course
	step     float64 // seconds of the last interval
}

// HistoryGap is a time of which nothing was recorded.
type HistoryGap struct {
	From time.Time `json:"since"`
	To   time.Time `json:"until"`
}

// Add takes the next entry.
func (r *HistoryResult) Add(e *history.Entry) error {
	r.episodes.Add(e)
	if e.At.Before(r.Since) {
		return nil
	}
	// An interval more than twice as long as it should be means that some are missing.
	if began := e.At.Add(-seconds64(2*e.Seconds) - time.Second); !r.Last.IsZero() && began.After(r.Last) {
		r.Gaps = append(r.Gaps, HistoryGap{r.Last, e.At.Add(-seconds64(e.Seconds))})
	}
	if r.First.IsZero() {
		r.First = e.At
	}
	r.Last, r.step = e.At, e.Seconds
	r.Intervals++
	r.Changes = append(r.Changes, e.Changes...)
	r.Tunings = append(r.Tunings, e.Tunings...)
	if e.Lost != "" {
		r.Problems = append(r.Problems, e.At.Local().Format(time.DateTime)+": "+e.Lost)
	}
	r.course.add(e)
	r.record.Add(e)
	return nil
}

func seconds64(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// Finish ends the reading.
func (r *HistoryResult) Finish(damaged []string) {
	r.Findings = slices.DeleteFunc(r.episodes.List(), func(e history.Episode) bool { return !e.Ended.IsZero() && e.Ended.Before(r.Since) })
	r.Problems = append(r.Problems, damaged...)
	if r.over = r.Intervals > 0 && r.Until.Sub(r.Last) > seconds64(2*r.step)+time.Minute; r.over {
		r.Gaps = append(r.Gaps, HistoryGap{r.Last, r.Until})
	}
	r.Forecasts = r.record.Score()
	r.Filling = append([]monitor.Filling{}, r.record.Filling()...)
	r.Findings = append([]history.Episode{}, r.Findings...)
	r.Changes = append([]history.Change{}, r.Changes...)
	r.Tunings = append([]history.Tuning{}, r.Tunings...)
	r.Gaps = append([]HistoryGap{}, r.Gaps...)
	r.Problems = append([]string{}, r.Problems...)
}

// Text writes the findings in the order in which they began, each with what changed before.
func (r *HistoryResult) Text(w io.Writer, zone *time.Location, color bool) error {
	p := page{color: color}
	clock := func(t time.Time) string { return t.In(zone).Format("01-02 15:04:05") }
	if r.Intervals == 0 {
		p.text("", "  ", fmt.Sprintf("Nothing was recorded from %s to %s.", r.Since.In(zone).Format(time.DateTime), r.Until.In(zone).Format(time.DateTime)))
	} else {
		p.text("", "  ", r.about(zone))
	}
	if len(r.Findings) > 0 {
		fmt.Fprintf(&p.b, "\n%-14s  %-14s  %-8s  %-20s  %s\n", "BEGAN", "ENDED", "SEVERITY", "NAMESPACE", "FINDING")
	}
	for _, f := range r.Findings {
		began, ended := r.when(f, clock)
		fmt.Fprintf(&p.b, "%-14s  %-14s  %s  %-20s  %s\n", began, ended, p.style(severityColor(f.Severity), fmt.Sprintf("%-8s", f.Severity)), f.Namespace, f.Code+": "+f.Title)
		for _, c := range f.Changes {
			fmt.Fprintf(&p.b, "  %s before: %s\n", since(f.Began.Sub(c.At)), c.What)
		}
		if f.Why != "" {
			fmt.Fprintf(&p.b, "  ended: %s\n", f.Why)
		}
	}
	if len(r.Tunings) > 0 {
		p.b.WriteString("\nSettings, by natkit monitor --tune:\n")
	}
	for _, n := range r.Tunings {
		fmt.Fprintf(&p.b, "  %s  %s\n", clock(n.At), tuningInWords(n))
	}
	if len(r.Gaps) > 0 {
		p.b.WriteString("\nNot recorded:\n")
		for _, g := range r.Gaps {
			fmt.Fprintf(&p.b, "  %s to %s\n", clock(g.From), clock(g.To))
		}
	}
	if len(r.Problems) > 0 {
		p.b.WriteString("\nProblems:\n")
		for _, text := range r.Problems {
			p.text("  ", "    ", text)
		}
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

// when is when a finding began and ended, in words.
func (r *HistoryResult) when(e history.Episode, clock func(time.Time) string) (began, ended string) {
	began, ended = "before", "still on"
	if !e.Began.IsZero() {
		began = clock(e.Began)
	}
	switch {
	case !e.Ended.IsZero():
		ended = clock(e.Ended)
	case r.over:
		ended = "on at the end"
	}
	return began, ended
}

// about is what was recorded, in a sentence or two.
func (r *HistoryResult) about(zone *time.Location) string {
	out := fmt.Sprintf("%s recorded from %s to %s: %s, %s.", plural.Count(r.Intervals, "interval"), r.First.In(zone).Format(time.DateTime),
		r.Last.In(zone).Format(time.DateTime), plural.Count(len(r.Findings), "finding"), plural.Count(len(r.Changes), "change"))
	if f := r.Forecasts; f.Checked > 0 {
		out += fmt.Sprintf(" %d of %s of the entries five minutes ahead held.", f.Held, plural.Count(f.Checked, "forecast"))
	}
	const most = 3
	for _, f := range r.Filling[:min(len(r.Filling), most)] {
		out += fmt.Sprintf(" At the end the connection tracking table of %s was filling: %s.", f.Namespace, f)
	}
	if more := len(r.Filling) - most; more > 0 {
		out += fmt.Sprintf(" Filling, too: %s.", plural.Count(more, "other table"))
	}
	return out
}

// since is a duration in whole seconds.
func since(d time.Duration) string { return d.Round(time.Second).String() }

func severityColor(name string) string {
	switch name {
	case "critical":
		return red
	case "warning":
		return yellow
	}
	return cyan
}
