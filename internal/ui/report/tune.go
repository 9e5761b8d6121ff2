// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/tune"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
	"natkit/internal/words/size"
)

// TuneHistory is what natkit tune history prints with -o json.
type TuneHistory struct {
	Applies []tune.Record `json:"records"` // oldest first
}

// TunePlanText writes a plan: what would change, why and who else sets it, what
// could not be planned, and what the connection tracking table costs. apply is
// the command that makes it so.
func TunePlanText(w io.Writer, plan *tune.Plan, apply string) error {
	var p page
	var refused, asked []tune.Refusal
	for _, r := range plan.Refused {
		if r.If != "" {
			asked = append(asked, r)
		} else {
			refused = append(refused, r)
		}
	}
	var about []string
	if plan.Host.Hostname != "" {
		about = append(about, plan.Host.Hostname)
	}
	if plan.Host.Kernel != "" {
		about = append(about, "Linux "+plan.Host.Kernel)
	}
	if plan.Netns.Name != "" {
		about = append(about, "namespace "+plan.Netns.Name)
	}
	about = append(about, "facts of "+plan.TakenAt.UTC().Format(time.DateTime)+" UTC")
	p.text("", "  ", strings.Join(about, "; "))
	p.b.WriteByte('\n')

	switch {
	case len(plan.Changes) > 0:
		p.tuneChanges(plan.Changes, "now", "then")
		p.b.WriteString("\nWhy\n")
		for i, c := range plan.Changes {
			p.tuneReason(c, i == 0 || plan.Changes[i-1].Reason != c.Reason)
		}
	case len(plan.Refused) == 0 && len(plan.Unjudged) > 0:
		p.text("", "", "No change is known to be needed, but not everything could be judged: the end lists what could not be read. Run natkit doctor as root for a full judgement.")
	case len(plan.Refused) == 0:
		p.text("", "", "Nothing to change: no finding asks for another setting, and the connection tracking table has room.")
	case len(refused) == 0:
		p.text("", "", "Nothing changes without confirmation.")
	default:
		p.text("", "", "Nothing can be changed.")
	}
	p.tuneRefused("Not planned", refused)
	p.tuneRefused("Planned only with --confirm", asked)
	p.tuneMemory(plan.Memory)
	for _, note := range plan.Notes {
		p.b.WriteByte('\n')
		p.text("", "", note)
	}
	p.unseen(plan.Unseen)
	if len(plan.Changes) > 0 {
		p.b.WriteString("\nTo apply it: " + apply + "\n")
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

// TuneApplyText writes what an apply did or, as a dry run, would do. rollback is
// the command that takes it back.
func TuneApplyText(w io.Writer, r *tune.Record, rollback string) error {
	var p page
	switch {
	case r.State == tune.StateUnchanged && len(r.Skipped) == 0 && len(r.Unjudged) > 0:
		p.text("", "", fmt.Sprintf("No change is known to be needed, but not everything could be judged: %s lacked sources. natkit doctor lists what could not be read.", plural.Count(len(r.Unjudged), "cause")))
	case r.State == tune.StateUnchanged && len(r.Skipped) == 0:
		p.text("", "", "Nothing to change: every setting is as planned.")
	case r.State == tune.StateUnchanged:
		p.text("", "", "Nothing was changed.")
	case r.State == tune.StatePlanned:
		p.text("", "", "Would save the old values, write these, and read them back:")
	default:
		p.text("", "", fmt.Sprintf("Applied as %s; each value was read back:", r.ID))
	}
	if len(r.Changes) > 0 {
		p.tuneChanges(r.Changes, "before", "now")
	}
	for _, file := range tuneFiles(r) {
		p.b.WriteString("  " + file + "\n")
	}
	p.tuneRefused("Left out", r.Skipped)
	if r.State == tune.StateApplied {
		if len(tuneFiles(r)) == 0 {
			p.text("", "", "A reboot resets these values; --persist would keep those of the initial namespace.")
		}
		p.b.WriteString("To undo it: " + rollback + "\n")
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

// tuneFiles are the files of settings that an apply wrote.
func tuneFiles(r *tune.Record) (files []string) {
	for _, file := range []string{r.File, r.UdevFile} {
		if file != "" {
			files = append(files, file)
		}
	}
	return files
}

// TuneRollbackText writes what became of each setting.
func TuneRollbackText(w io.Writer, r *tune.Record) error {
	var p page
	p.text("", "", fmt.Sprintf("Rolled back %s, newest first:", r.ID))
	for _, x := range r.Restored {
		line := x.Setting + ": " + tuneOutcomes[x.Outcome]
		if x.Detail != "" {
			line += ": " + x.Detail
		}
		p.text("  ", "      ", line)
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

var tuneOutcomes = map[tune.Outcome]string{
	tune.OutcomeRestored: "restored",
	tune.OutcomeAlready:  "already had its old value",
	tune.OutcomeKept:     "kept",
	tune.OutcomeGone:     "gone",
}

// TuneHistoryText writes every apply with its settings, newest first.
func TuneHistoryText(w io.Writer, records []tune.Record) error {
	var p page
	if len(records) == 0 {
		p.text("", "", "natkit's journal lists no apply on this machine.")
	}
	for i := len(records) - 1; i >= 0; i-- {
		r := records[i]
		state := tuneStates[r.State]
		if r.By != "" {
			state += " (by natkit " + r.By + ")"
		}
		p.text("", "    ", fmt.Sprintf("%s  %s UTC  %s", r.ID, r.Time.UTC().Format(time.DateTime), state))
		for _, c := range r.Changes {
			line := fmt.Sprintf("%s: %s -> %s (%s)", c.Setting, c.Old, c.New, tuneWhere(c))
			for _, x := range r.Restored {
				if x.Setting == c.Setting && x.Netns == c.Netns && x.Outcome != tune.OutcomeRestored {
					line += "; " + tuneOutcomes[x.Outcome]
				}
			}
			p.text("    ", "        ", line)
		}
		for _, file := range tuneFiles(&r) {
			p.text("    ", "        ", file)
		}
	}
	_, err := io.WriteString(w, p.b.String())
	return err
}

var tuneStates = map[tune.State]string{
	tune.StateRunning:     "being done",
	tune.StateApplied:     "applied",
	tune.StateInterrupted: "INTERRUPTED: partly applied, natkit tune rollback restores everything",
	tune.StateFailed:      "failed and undone",
	tune.StateRolledBack:  "rolled back",
	tune.StateRebooted:    "ended by a reboot",
}

func (p *page) tuneChanges(changes []tune.Change, before, after string) {
	rows := [][]string{{"setting", before, after, "memory", "where"}}
	for _, c := range changes {
		old, memory := c.Old, ""
		if old == "" {
			old = "?"
		}
		if c.MemoryBytes > 0 {
			memory = "+" + size.Of(uint64(c.MemoryBytes))
		}
		rows = append(rows, []string{c.Setting, old, c.New, memory, tuneWhere(c)})
	}
	p.table("lrrrl", rows)
}

// tuneWhere says how far a change reaches.
func tuneWhere(c tune.Change) string {
	switch {
	case c.Scope == tune.ScopeHost:
		return "whole machine"
	case c.Netns != "":
		return "namespace " + c.Netns
	}
	return "this namespace"
}

// tuneReason writes the reason, once for changes in a row that share it, then
// what the setting is and who else sets it.
func (p *page) tuneReason(c tune.Change, reason bool) {
	if reason && c.Code != "" {
		p.text("  ", "    ", c.Code+": "+c.Reason)
	} else if reason {
		p.text("  ", "    ", c.Reason)
	}
	p.text("      ", "        ", c.Setting+": "+c.Does)
	for _, o := range c.Owners {
		text := fmt.Sprintf("%s sets it to %s (%s)", o.Who, o.Value, o.Where)
		if o.Warning != "" {
			text += ": " + o.Warning
		}
		p.text("        ! ", "          ", text)
	}
}

func (p *page) tuneRefused(title string, refused []tune.Refusal) {
	if len(refused) == 0 {
		return
	}
	p.b.WriteString("\n" + title + "\n")
	for i, r := range refused {
		p.text("  ", "      ", r.Setting+" = "+r.Value)
		if i+1 == len(refused) || refused[i+1].Why != r.Why { // the table's two sizes have one reason
			p.text("      ", "      ", r.Why)
		}
	}
}

func (p *page) tuneMemory(m *tune.Memory) {
	if m == nil {
		return
	}
	changed := m.Then.Max != m.Now.Max || m.Then.Buckets != m.Now.Buckets || m.Then.Entries != m.Now.Entries
	p.b.WriteString("\nThe connection tracking table\n")
	rows := [][]string{{"", "entries", "full in", "limit", "buckets", "chain when full", "memory when full", ""}}
	row := func(name string, t tune.Table) {
		limit, chain, bytes, share := "none", "-", "-", "" // without a limit it is never full
		if t.Max > 0 {
			limit, chain, bytes = fmt.Sprint(t.Max), fmt.Sprintf("%.1f", t.Chain), size.Of(t.Bytes)
			if m.RAMBytes > 0 {
				share = percent.Of(ratioOf(t.Bytes, m.RAMBytes), 1) + " of " + size.Of(m.RAMBytes)
			}
		}
		rows = append(rows, []string{name, fmt.Sprint(t.Entries), fullIn(t), limit, fmt.Sprint(t.Buckets), chain, bytes, share})
	}
	row("now", m.Now)
	if changed {
		row("then", m.Then)
	}
	p.table("lrrrrrrl", rows)
	switch {
	case m.Growth > 0:
		p.text("  ", "  ", fmt.Sprintf("Full in: at %s more entries a second, as during the window; entries that a full table refuses count too.", rate(m.Growth)))
	case m.Growth < 0:
		p.text("  ", "  ", fmt.Sprintf("During the window it lost %s entries a second.", rate(-m.Growth)))
	}
	if m.Then.Entries != m.Now.Entries {
		p.text("  ", "  ", "Entries then: when the shorter timeouts apply to all of them, with as many new ones as now.")
	}
	entry := fmt.Sprintf("An entry takes %d bytes", m.EntryBytes)
	if m.EntryAssumed {
		entry = fmt.Sprintf("An entry is assumed to take %d bytes (only root can read the true size)", m.EntryBytes)
	}
	p.text("  ", "  ", fmt.Sprintf("%s, a bucket %d; the table may take at most %s of the memory. All namespaces share the hash, and each may fill its table to the limit.",
		entry, m.BucketBytes, percent.Of(m.Share, 1)))
}

// fullIn is how long a table takes to fill, in words.
func fullIn(t tune.Table) string {
	switch {
	case t.FullSeconds == nil:
		return "-"
	case *t.FullSeconds == 0:
		return "is full"
	case *t.FullSeconds > 365*86400:
		return "years"
	case *t.FullSeconds > 2*86400:
		return fmt.Sprintf("%.0f days", *t.FullSeconds/86400)
	}
	return time.Duration(*t.FullSeconds * float64(time.Second)).Round(time.Second).String()
}

// table writes rows in columns, aligned left (l) or right (r).
func (p *page) table(align string, rows [][]string) {
	width := make([]int, len(align))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		line := ""
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if align[i] == 'l' {
				line += "  " + cell + pad
			} else {
				line += "  " + pad + cell
			}
		}
		p.b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// rate writes a number a second: to the full, or to three digits if it is small.
func rate(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
