// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/diagnose"
	"natkit/snapshot"
)

// DoctorAllResult is what natkit doctor found in all namespaces of a machine.
type DoctorAllResult struct {
	Namespaces []DoctorResult `json:"namespaces"`
	Idle       int            `json:"idle"`    // left out: they have no interface but loopback
	Skipped    []string       `json:"skipped"` // left out for the reason that stands there
}

// DoctorAll is the result of judging several snapshots; findings are those of
// each.
func DoctorAll(all []*snapshot.Snapshot, findings [][]diagnose.Finding, idle int, skipped []string) DoctorAllResult {
	out := DoctorAllResult{Namespaces: []DoctorResult{}, Idle: idle, Skipped: append([]string{}, skipped...)}
	for i, s := range all {
		out.Namespaces = append(out.Namespaces, Doctor(s, findings[i]))
	}
	return out
}

// maxQuiet is how many namespaces are named in which nothing was found.
const maxQuiet = 20

// DoctorAllText writes the namespaces in which something was found, the worst
// first, then in a line those in which nothing was.
func DoctorAllText(w io.Writer, all []*snapshot.Snapshot, findings [][]diagnose.Finding, idle int, skipped []string, color bool) error {
	worst := func(i int) diagnose.Severity {
		if len(findings[i]) == 0 {
			return 0
		}
		return findings[i][0].Severity
	}
	var order []int
	for i := range all {
		order = append(order, i)
	}
	slices.SortStableFunc(order, func(a, b int) int { return int(worst(b) - worst(a)) })

	p := page{color: color}
	if len(all) > 0 {
		s := all[0]
		p.text("", "  ", fmt.Sprintf("%s; Linux %s; %s watched for %s until %s", s.Host.Hostname, s.Host.Kernel,
			plural(len(all), "network namespace"), seconds(s.WindowSeconds), s.TakenAt.UTC().Format("2006-01-02 15:04:05 UTC")))
	}
	var quiet []string
	for _, i := range order {
		if worst(i) == 0 {
			quiet = append(quiet, namespaceTitle(all[i].Netns))
			continue
		}
		p.b.WriteByte('\n')
		p.text("", "    ", p.style(bold, "== "+namespaceTitle(all[i].Netns)))
		for _, f := range findings[i] {
			p.finding(f)
		}
	}
	names := strings.Join(quiet[:min(len(quiet), maxQuiet)], ", ")
	if n := len(quiet) - maxQuiet; n > 0 {
		names += fmt.Sprintf(" and %d more", n)
	}
	p.b.WriteByte('\n')
	switch {
	case len(quiet) > 0 && len(quiet) == len(all):
		p.text("", "  ", "Nothing wrong was found in any of them: "+names+".")
	case len(quiet) > 0:
		p.text("", "  ", fmt.Sprintf("Nothing wrong was found in %d more: %s.", len(quiet), names))
	}
	if idle > 0 {
		p.text("", "  ", fmt.Sprintf("Left out: %s with no interface but loopback.", plural(idle, "namespace")))
	}
	for _, text := range skipped {
		p.text("", "  ", "Left out: "+text+".")
	}
	p.unseen(missingSomewhere(all))
	_, err := io.WriteString(w, p.b.String())
	return err
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
		return n.Container + " (--netns " + ref + ")"
	}
	return ref
}

// missingSomewhere are the capabilities that were missing, each once, with the
// first namespace where it was if others have it.
func missingSomewhere(all []*snapshot.Snapshot) []snapshot.Capability {
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
