// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"natkit/internal/nat/control"
	"natkit/internal/words/plural"
)

// ServeEventText writes what natkit serve has done, or could not do, as lines of a log
// that says when by itself only if stamp.
func ServeEventText(w io.Writer, e *control.ServeEvent, stamp bool) error {
	var b strings.Builder
	if stamp {
		b.WriteString(e.Time.Format(time.DateTime) + " ")
	}
	why := strings.Join(e.Why, "; ")
	switch e.Kind {
	case "up":
		fmt.Fprintf(&b, "up on engine %s: %s of %s\n", e.Plan.Engine, plural.Count(e.Plan.Rules, "rule"), e.File)
	case "adopted":
		fmt.Fprintf(&b, "adopted the running engine %s: %s\n", e.Plan.Engine, plural.Count(e.Plan.Rules, "rule"))
	case "reloaded":
		fmt.Fprintf(&b, "%s of %s in use: %d new, %d gone\n", plural.Count(e.Plan.Rules, "rule"), e.File, len(e.Plan.Added), len(e.Plan.Removed))
		markLines(&b, "  +", e.Plan.Set)
		markLines(&b, "  -", e.Plan.Unset)
	case "followed":
		fmt.Fprintf(&b, "followed: %s\n", why)
	case "waiting":
		fmt.Fprintf(&b, "waiting: %s\n", why)
	case "kept":
		fmt.Fprintf(&b, "the rules in use stay in effect: %s\n", strings.ReplaceAll(e.Error, "\n", "\n  "))
	case "log":
		fmt.Fprintf(&b, "log: %s\n", why)
	case "unrecorded":
		fmt.Fprintf(&b, "translations are not recorded, packets are translated as before: %s\n", e.Error)
	case "ended":
		b.WriteString("ended; NAT continues without it: natkit down stops it\n")
	case "down":
		b.WriteString("ended, and stopped the gateway\n")
		for _, k := range e.Why {
			fmt.Fprintf(&b, "  left: %s\n", k)
		}
	}
	if e.Plan != nil {
		serveNotes(&b, e)
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// serveNotes adds what of a plan an operator does not expect.
func serveNotes(b *strings.Builder, e *control.ServeEvent) {
	for _, name := range e.Plan.Awaited {
		why := "it does not exist"
		if slices.Contains(e.Plan.Unaddressed, name) {
			why = "it has no IPv4 address"
		}
		fmt.Fprintf(b, "waiting for %s: %s\n", name, why)
	}
	if e.Plan.Upgrade {
		b.WriteString("  programs of another natkit were replaced; sessions continue\n")
	}
	for _, c := range control.ChangesText(e.Plan.Changes) {
		fmt.Fprintf(b, "  changed in the namespace, until natkit down: %s\n", c)
	}
	if e.Kind == "followed" {
		return
	}
	for _, g := range e.Plan.Bypassed {
		fmt.Fprintf(b, "  bypassed: %s: %s\n", g.What, g.Effect)
	}
	for _, t := range e.Plan.Warnings {
		fmt.Fprintf(b, "  note: %s\n", t)
	}
}
