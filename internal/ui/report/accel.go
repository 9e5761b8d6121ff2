// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
	"natkit/internal/words/size"
)

// AccelPlan is what `natkit accel on` does, or would do.
type AccelPlan struct {
	Done bool `json:"done"` // false: --dry-run
	*control.AccelPlan
}

// Text writes the plan, and what it goes past.
func (p *AccelPlan) Text(w io.Writer) error {
	var b strings.Builder
	verb := "Would accelerate"
	if p.Done {
		verb = "Accelerated"
	}
	what := "UDP"
	if p.TCP {
		what = "TCP and UDP"
	}
	fmt.Fprintf(&b, "%s: %s that the kernel's NAT translates or forwards\n", verb, what)
	for _, l := range p.Placements {
		fmt.Fprintf(&b, "  %s: %s\n", l.Interface, l.Reason)
	}
	fmt.Fprintf(&b, "%s are remembered, in %s of kernel memory\n", plural.Count(p.Flows, "flow"), size.Of(uint64(p.MemoryBytes)))
	for _, c := range p.Changes {
		fmt.Fprintf(&b, "changed in the namespace, until natkit accel off: %s\n", c)
	}
	planTail(&b, p.Bypassed, p.Warnings)
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// AccelOff is what `natkit accel off` did.
type AccelOff struct {
	Kept []string `json:"kept"` // not put back, each with why
}

// Text says that it is off, and what stays.
func (o *AccelOff) Text(w io.Writer) error {
	var b strings.Builder
	b.WriteString("Off: every packet goes through the stack again.\n")
	for _, k := range o.Kept {
		fmt.Fprintf(&b, "not restored: %s\n", k)
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// AccelStatus is what `natkit accel status` shows.
type AccelStatus struct {
	*control.AccelStatus
	Share *float64 `json:"share,omitempty"` // see control.AccelStatus.Share
}

// NewAccelStatus adds what follows from the counters.
func NewAccelStatus(s *control.AccelStatus) *AccelStatus {
	out := &AccelStatus{AccelStatus: s}
	if share := s.Share(); share >= 0 {
		out.Share = &share
	}
	return out
}

// Text writes what is accelerated, how much of it, and why the rest is not.
func (s *AccelStatus) Text(w io.Writer) error {
	var b strings.Builder
	for _, p := range s.Problems {
		fmt.Fprintf(&b, "! %s\n", p)
	}
	if len(s.Interfaces) > 0 {
		s.attached(&b)
	}
	s.counters(&b)
	for _, c := range s.Changes {
		fmt.Fprintf(&b, "changed until natkit accel off: %s\n", c)
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// attached writes what is accelerated, and where.
func (s *AccelStatus) attached(b *strings.Builder) {
	what := "UDP only (TCP needs --tcp-liberal)"
	if s.TCP {
		what = "TCP and UDP"
	}
	fmt.Fprintf(b, "accelerating the kernel's NAT since %s: %s\n", s.Since.Format(time.DateTime), what)
	t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	for _, l := range s.Interfaces {
		fmt.Fprintf(t, "  %s\t%s\t%s\n", l.Name, strings.Join(l.Hooks, " "), l.Reason)
	}
	t.Flush()
}

// counters writes what became of packets, where that is known.
func (s *AccelStatus) counters(b *strings.Builder) {
	if s.Stats == nil {
		return
	}
	fmt.Fprintf(b, "flow directions that bypass the stack now: %d; with a fast-path entry: %d, of at most %d\n", s.Stats.Valid, s.Stats.Known, 2*s.Flows)
	if s.Share != nil {
		fmt.Fprintf(b, "%s of the TCP and UDP packets to forward bypassed the stack\n", percent.Of(*s.Share, 1))
	}
	var rows []rulefile.AccelReason
	for _, r := range rulefile.AccelReasons[1:] {
		if s.Stats.Reasons[r.Name] > 0 {
			rows = append(rows, r)
		}
	}
	slices.SortStableFunc(rows, func(x, y rulefile.AccelReason) int {
		return int(s.Stats.Reasons[y.Name]) - int(s.Stats.Reasons[x.Name])
	})
	fmt.Fprintf(b, "packets that bypassed the stack\n%12d  forwarded, %s\n", s.Stats.Reasons[rulefile.AccelReasons[0].Name], size.Of(s.Stats.Bytes))
	if len(rows) > 0 {
		b.WriteString("packets through the stack\n")
	}
	t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintf(t, "%12d\t%s\t%s\n", s.Stats.Reasons[r.Name], r.Name, r.Means)
	}
	t.Flush()
}
