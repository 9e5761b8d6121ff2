// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// Drops is what was dropped during one interval, as `natkit drops` shows it.
type Drops struct {
	At         time.Time       `json:"time"` // the end of the interval
	Seconds    float64         `json:"interval_s"`
	Rows       []snapshot.Drop `json:"rows"` // most first
	LostEvents uint64          `json:"lost_events"`
	// BenignPackets were dropped too, in rows that are left out.
	BenignPackets uint64 `json:"benign_packets"`
	// FilteredPackets were dropped too, in rows that do not fit the filter.
	FilteredPackets uint64 `json:"filtered_packets,omitzero"`
}

// DropFilter chooses rows.
type DropFilter struct {
	All     bool              // benign ones too
	Cause   snapshot.NATCause // only of this one, unless it is CauseNone
	Sampled bool              // only those of which a sampled packet matches
}

func (f DropFilter) fits(row *snapshot.Drop) bool {
	return (f.Cause == snapshot.CauseNone || row.Cause == f.Cause) && (!f.Sampled || row.Matching > 0)
}

// NewDrops takes one interval's rows, those that the filter lets through.
func NewDrops(at time.Time, interval time.Duration, d snapshot.Drops, f DropFilter) *Drops {
	r := &Drops{
		At: at.Truncate(time.Millisecond), Seconds: interval.Seconds(),
		Rows: []snapshot.Drop{}, LostEvents: d.LostEvents,
	}
	for _, row := range d.Rows {
		switch {
		case !f.fits(&row):
			r.FilteredPackets += row.Count
		case row.Benign && !f.All:
			r.BenignPackets += row.Count
		default:
			r.Rows = append(r.Rows, row)
		}
	}
	return r
}

// Text writes the rows as a table, each followed by what is known of its packets.
// own is the inode of the reader's own namespace.
func (r *Drops) Text(w io.Writer, own uint64) error {
	var b strings.Builder
	sum := uint64(0)
	for _, row := range r.Rows {
		sum += row.Count
	}
	fmt.Fprintf(&b, "%s, %.1f s: %s dropped", r.At.Format(time.TimeOnly), r.Seconds, plural.Count(sum, "packet"))
	if r.BenignPackets > 0 {
		fmt.Fprintf(&b, "; %s not shown (--all)", plural.Count(r.BenignPackets, "benign one"))
	}
	if r.FilteredPackets > 0 {
		fmt.Fprintf(&b, "; %d in rows that do not match the filter", r.FilteredPackets)
	}
	if r.LostEvents > 0 {
		fmt.Fprintf(&b, "; %d more NOT in the table: there was no room", r.LostEvents)
	}
	b.WriteByte('\n')
	writeDropTable(&b, r.Rows, own)
	b.WriteByte('\n')
	_, err := io.WriteString(w, b.String())
	return err
}

func writeDropTable(b *strings.Builder, rows []snapshot.Drop, own uint64) {
	if len(rows) == 0 {
		return
	}
	table := [][]string{{"count", "place", "reason", "cause", "namespace", "interface"}}
	for _, row := range rows {
		table = append(table, []string{
			strconv.FormatUint(row.Count, 10), row.Location, row.Reason, orDash(string(row.Cause)),
			namespaceName(row, own), orDash(row.Interface),
		})
	}
	widths := make([]int, len(table[0]))
	for _, line := range table {
		for i, cell := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for i, line := range table {
		fmt.Fprintf(b, "%*s", max(widths[0], 10), line[0])
		for column, cell := range line[1:] {
			if column+2 == len(line) {
				fmt.Fprintf(b, "  %s\n", cell)
			} else {
				fmt.Fprintf(b, "  %-*s", widths[column+1], cell)
			}
		}
		if i == 0 {
			continue
		}
		for _, sample := range rows[i-1].Samples {
			fmt.Fprintf(b, "%12s%s\n", "", sample)
		}
		if row := rows[i-1]; row.Matching > 0 {
			fmt.Fprintf(b, "%12s%d of %s match; the count is of all packets of the row\n", "", row.Matching, plural.Count(row.Sampled, "sampled packet"))
		}
		for _, stack := range rows[i-1].Stacks {
			fmt.Fprintf(b, "%12s%s by\n", "", plural.Count(stack.Count, "time"))
			for _, frame := range stack.Frames {
				fmt.Fprintf(b, "%14s%s\n", "", frame)
			}
		}
	}
}

// namespaceName is how a reader finds the namespace again: what to give to
// --netns, or its number.
func namespaceName(row snapshot.Drop, own uint64) string {
	switch {
	case row.Namespace != "":
		return row.Namespace
	case row.Netns == 0:
		return "-"
	case row.Netns == own:
		return "(own)"
	}
	return strconv.FormatUint(row.Netns, 10)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// DropTotals sums intervals.
type DropTotals struct {
	intervals int
	total     Drops
	rows      map[dropRow]*snapshot.Drop
}

// dropRow is what makes rows of two intervals the same.
type dropRow struct {
	location, reason, netInterface string
	netns                          uint64
	cause                          snapshot.NATCause
	benign                         bool
}

// Add adds an interval.
func (t *DropTotals) Add(r *Drops) {
	if t.rows == nil {
		t.rows = map[dropRow]*snapshot.Drop{}
	}
	t.intervals++
	t.total.At = r.At
	t.total.Seconds += r.Seconds
	t.total.LostEvents += r.LostEvents
	t.total.BenignPackets += r.BenignPackets
	t.total.FilteredPackets += r.FilteredPackets
	for _, row := range r.Rows {
		key := dropRow{row.Location, row.Reason, row.Interface, row.Netns, row.Cause, row.Benign}
		if sum := t.rows[key]; sum != nil {
			sum.Count += row.Count
			sum.Sampled += row.Sampled
			sum.Matching += row.Matching
			continue
		}
		row.Samples, row.Stacks = nil, nil // they were shown with their interval
		t.rows[key] = &row
	}
}

// Text writes the sum of all intervals; one alone is its own sum.
func (t *DropTotals) Text(w io.Writer, own uint64) error {
	if t.intervals < 2 {
		return nil
	}
	t.total.Rows = t.total.Rows[:0]
	for _, row := range t.rows {
		t.total.Rows = append(t.total.Rows, *row)
	}
	slices.SortFunc(t.total.Rows, func(a, b snapshot.Drop) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Location, b.Location), cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.Netns, b.Netns), cmp.Compare(a.Interface, b.Interface), cmp.Compare(a.Cause, b.Cause))
	})
	if _, err := fmt.Fprintf(w, "Total of %d intervals\n", t.intervals); err != nil {
		return err
	}
	return t.total.Text(w, own)
}
