// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
	"natkit/internal/words/shell"
)

// DoctorAllResult is what natkit doctor found in all namespaces of a machine, as
// -o json prints it.
type DoctorAllResult struct {
	Namespaces []DoctorResult `json:"namespaces"`
	Idle       int            `json:"idle_count"` // left out: they have no interface but loopback
	Skipped    []string       `json:"skipped"`    // left out for the reason that stands there
}

// DoctorAll collects what was found in the namespaces of a machine, one after the
// other, and keeps of each Snapshot only what is shown.
type DoctorAll struct {
	// Facts keeps the curves and tables of facts of namespaces with findings, which the
	// page of HTML shows.
	Facts bool
	// Since is when the first was recorded of what was judged; zero for facts of one window.
	Since time.Time

	results []DoctorResult
	pages   []doctorNamespace // with Facts
}

// Add takes the findings of the next namespace.
func (d *DoctorAll) Add(s *snapshot.Snapshot, findings []causes.Finding) {
	d.results = append(d.results, Doctor(s, findings))
	var ns doctorNamespace
	if d.Facts && len(findings) > 0 {
		ns.ID = fmt.Sprintf("namespace-%d", len(d.results))
		ns.Findings, ns.Window = withCurves(s, findings, ns.ID+"-")
		ns.Facts = factsOf(s)
	}
	d.pages = append(d.pages, ns)
}

// Result is the whole of it. Its lists are never null in JSON.
func (d *DoctorAll) Result(left snapshot.LeftOut) DoctorAllResult {
	return DoctorAllResult{Namespaces: append([]DoctorResult{}, d.results...), Idle: left.Idle, Skipped: append([]string{}, left.Skipped...)}
}

func (r *DoctorResult) worst() causes.Severity {
	if len(r.Findings) == 0 {
		return 0
	}
	return r.Findings[0].Severity
}

// order is the namespaces in which something was found, the worst first, and the
// names of the others.
func (d *DoctorAll) order() (found []int, quiet []string) {
	for i := range d.results {
		if d.results[i].worst() == 0 {
			quiet = append(quiet, namespaceTitle(d.results[i].Netns))
		} else {
			found = append(found, i)
		}
	}
	slices.SortStableFunc(found, func(a, b int) int { return int(d.results[b].worst() - d.results[a].worst()) })
	return found, quiet
}

// about says of what machine and time it is.
func (d *DoctorAll) about() string {
	if len(d.results) == 0 {
		return "no network namespace was watched"
	}
	r := d.results[0]
	first, last := r.TakenAt, r.TakenAt
	for i := range d.results {
		if at := d.results[i].TakenAt; at.Before(first) {
			first = at
		} else if at.After(last) {
			last = at
		}
	}
	const layout = "2006-01-02 15:04:05 UTC"
	out := fmt.Sprintf("%s; Linux %s; %s ", r.Hostname, r.Kernel, plural.Count(len(d.results), "network namespace"))
	switch {
	case !d.Since.IsZero():
		return out + "as recorded from " + d.Since.UTC().Format(layout) + " to " + last.UTC().Format(layout)
	case last.Sub(first) > time.Minute: // recorded, each at its time
		return out + "as recorded between " + first.UTC().Format(layout) + " and " + last.UTC().Format(layout)
	}
	return out + "watched for " + seconds(r.WindowSeconds) + " until " + r.TakenAt.UTC().Format(layout)
}

// maxQuiet is how many namespaces are named in which nothing was found.
const maxQuiet = 20

// closing says where nothing was found, and what was left out.
func closing(quiet []string, all int, unjudged []causes.Unjudged, left snapshot.LeftOut) (lines []string) {
	names := strings.Join(quiet[:min(len(quiet), maxQuiet)], ", ")
	if n := len(quiet) - maxQuiet; n > 0 {
		names += fmt.Sprintf(" and %d more", n)
	}
	judged := ""
	if len(unjudged) > 0 {
		judged = ", among what could be judged"
	}
	switch {
	case len(quiet) > 0 && len(quiet) == all:
		lines = append(lines, fmt.Sprintf("Nothing wrong was found in any of them%s: %s.", judged, names))
	case len(quiet) > 0:
		lines = append(lines, fmt.Sprintf("Nothing wrong was found in %d more%s: %s.", len(quiet), judged, names))
	}
	if left.Idle > 0 {
		lines = append(lines, fmt.Sprintf("Left out: %s with no interface but loopback.", plural.Count(left.Idle, "namespace")))
	}
	for _, text := range left.Skipped {
		lines = append(lines, "Left out: "+text+".")
	}
	return lines
}

// Text writes the namespaces in which something was found, the worst first, then
// in a line those in which nothing was.
func (d *DoctorAll) Text(w io.Writer, left snapshot.LeftOut, color bool) error {
	p := page{color: color}
	p.text("", "  ", d.about())
	unjudged := unjudgedSomewhere(d.results)
	p.unjudged(unjudged)
	found, quiet := d.order()
	for _, i := range found {
		p.b.WriteByte('\n')
		p.text("", "    ", p.style(bold, "== "+namespaceTitle(d.results[i].Netns)))
		for _, f := range d.results[i].Findings {
			p.finding(f)
		}
	}
	p.b.WriteByte('\n')
	for _, line := range closing(quiet, len(d.results), unjudged, left) {
		p.text("", "  ", line)
	}
	p.unseen(missingSomewhere(d.results))
	_, err := io.WriteString(w, p.b.String())
	return err
}

// HTML writes the same as one page that needs nothing besides itself, with the
// facts of the namespaces in which something was found.
func (d *DoctorAll) HTML(w io.Writer, left snapshot.LeftOut) error {
	found, quiet := d.order()
	unjudged := unjudgedSomewhere(d.results)
	page := doctorHTML{Title: "natkit doctor", About: d.about(), Unseen: missingSomewhere(d.results)}
	page.notJudged(unjudged)
	if len(d.results) > 0 {
		page.Title = "natkit doctor: " + cmp.Or(d.results[0].Hostname, "a machine")
	}
	for _, i := range found {
		ns := d.pages[i]
		ns.Title, ns.Worst = namespaceTitle(d.results[i].Netns), d.results[i].worst()
		page.Namespaces = append(page.Namespaces, ns)
	}
	page.Closing = closing(quiet, len(d.results), unjudged, left)
	return page.write(w)
}

// namespaceTitle is how a namespace is spoken of: what it belongs to, then how it
// is referred to on the command line.
func namespaceTitle(n snapshot.Netns) string {
	ref := n.Name
	switch {
	case ref == "" && n.Init:
		return "the host"
	case ref == "":
		return "this namespace"
	case n.Container != "":
		return n.Container + " (--netns " + shell.Quote(ref) + ")"
	}
	return ref
}

// unjudgedSomewhere are the causes that could not be judged in one of the namespaces or
// more, each once, in the catalogue's order.
func unjudgedSomewhere(all []DoctorResult) (out []causes.Unjudged) {
	for _, c := range causes.Catalogue() {
		for _, r := range all {
			if i := slices.IndexFunc(r.Unjudged, func(u causes.Unjudged) bool { return u.Code == c.Code }); i >= 0 {
				out = append(out, r.Unjudged[i])
				break
			}
		}
	}
	return out
}

// missingSomewhere are the capabilities that were missing, each once, with the
// first namespace where it was if others have it.
func missingSomewhere(all []DoctorResult) []snapshot.Capability {
	var out []snapshot.Capability
	for _, s := range all {
		for _, c := range s.Capabilities {
			if c.OK || slices.ContainsFunc(out, func(o snapshot.Capability) bool { return o.Name == c.Name }) {
				continue
			}
			n := 0
			for _, other := range all {
				if slices.ContainsFunc(other.Capabilities, func(o snapshot.Capability) bool { return o.Name == c.Name && !o.OK }) {
					n++
				}
			}
			if n < len(all) {
				c.Reason = fmt.Sprintf("in %d of %d, first in %s: %s", n, len(all), namespaceTitle(s.Netns), c.Reason)
			}
			out = append(out, c)
		}
	}
	return out
}
