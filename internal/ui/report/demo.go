// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"natkit/internal/bench"
	"natkit/internal/kernel/observe"
	"natkit/internal/scenario"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
	"natkit/internal/words/plural"
)

// DemoText tells a demo for people, as it happens. It is a scenario.Reporter.
type DemoText struct {
	W     io.Writer
	Color bool
	// Line shows a line that replaces itself, "" clears it; nil shows none.
	Line func(string)
}

// write ends the progress line and writes what p holds. An output that is gone
// does not stop a demo that has things to put back.
func (t *DemoText) write(p *page) {
	if t.Line != nil {
		t.Line("")
	}
	io.WriteString(t.W, p.b.String())
}

func (t *DemoText) page() *page { return &page{color: t.Color} }

// Begin says what the demo is, and first of all what it changes on the host.
func (t *DemoText) Begin(d *scenario.DemoResult, drawing, hostWrite string) {
	p := t.page()
	if hostWrite == "" {
		hostWrite = "none: everything happens in separate network namespaces"
	}
	p.text("Host-wide change: ", "  ", hostWrite+".")
	p.b.WriteByte('\n')
	title := "natkit demo: a published port that collapses under load, on Linux " + d.Kernel
	p.b.WriteString(p.style(bold, title) + "\n")
	if d.FaultReason != "" {
		p.text("", "", "The collapse is caused by "+d.Fault+" instead of a full table: "+d.FaultReason+".")
	}
	p.b.WriteString("\n" + drawing)
	p.text("", "", "Each step names the command that does it alone, in a lab of yours: natkit lab up published --name case")
	t.write(p)
}

// Step is the heading of a step.
func (t *DemoText) Step(a *scenario.DemoStep) {
	p := t.page()
	p.b.WriteString("\n" + p.style(bold, strings.ToUpper(a.Name)) + "\n")
	p.text("  ", "  ", "Shows: "+a.Shows+".")
	p.b.WriteString("  $ " + a.Command + "\n")
	if a.RuleFile != "" {
		p.b.WriteString("\n")
		for line := range strings.Lines(a.RuleFile) {
			p.b.WriteString("    " + line)
		}
		p.b.WriteString("\n")
	}
	t.write(p)
}

// Say is a line inside a step.
func (t *DemoText) Say(format string, args ...any) {
	p := t.page()
	p.text("  ", "  ", fmt.Sprintf(format, args...))
	t.write(p)
}

// Progress is shown on a terminal alone.
func (t *DemoText) Progress(what string, part float64) {
	if t.Line != nil {
		t.Line(fmt.Sprintf("  [%3.0f %%] %s", 100*min(part, 1), what))
	}
}

const (
	factRows = 6
	hookRoot = "nf_hook_slow" // calls the functions registered on a hook, one after the other
)

// Facts shows the steps of the diagnosis, each with the command that shows more.
func (t *DemoText) Facts(s *snapshot.Snapshot, prof *observe.Profile) {
	p := t.page()
	step := func(what, command string) {
		p.b.WriteString("\n  " + p.style(cyan, what) + "   $ " + command + "\n")
	}
	if s.Drops != nil {
		step(fmt.Sprintf("Packets dropped in %s", seconds(s.WindowSeconds)), "natkit drops --netns case-host")
		rows := 0
		for _, d := range s.Drops.Rows {
			if d.Benign || rows == factRows {
				continue
			}
			rows++
			p.b.WriteString(strings.TrimRight(fmt.Sprintf("  %9d  %-30s %-18s %s", d.Count, d.Location, d.Reason, d.Cause), " ") + "\n")
		}
		if rows == 0 {
			p.text("    ", "    ", "none")
		}
	}
	if prof != nil {
		below := NewProfile(prof, hookRoot)
		step(fmt.Sprintf("Kernel time in netfilter's hooks: %s of the kernel's", percent.Of(ratioOf(below.Samples.Root, below.Samples.Kernel), 0)),
			"natkit profile --for 10s")
		for i, c := range below.Called {
			if i == factRows {
				break
			}
			p.b.WriteString(fmt.Sprintf("  %9s  %s\n", percent.Of(c.Share, 1), c.Function))
		}
	}
	if len(s.Hooks) > 0 {
		step(fmt.Sprintf("%s that every packet may meet", plural.Count(len(s.Hooks), "hook")), "natkit hooks --netns case-host")
		for _, hook := range []string{"prerouting", "forward", "postrouting"} {
			var names []string
			for _, h := range s.Hooks {
				if h.Hook == hook && (h.Family == "ipv4" || h.Family == "inet" || h.Family == "bridge") {
					names = append(names, h.Function)
				}
			}
			if len(names) > 0 {
				p.text(fmt.Sprintf("    %-12s", hook), "                ", strings.Join(names, ", "))
			}
		}
	}
	if ct := s.Conntrack; ct != nil {
		step("The connection tracking table", "natkit conntrack stats --netns case-host")
		p.text("    ", "    ", fmt.Sprintf("%s, %s, %d bytes an entry", entriesOf(ct), plural.Count(ct.Buckets, "bucket"), ct.ObjectBytes))
		if ct.Table != nil {
			var states []string
			for _, name := range byCount(ct.Table.ByState) {
				states = append(states, fmt.Sprintf("%s %d", name, ct.Table.ByState[name]))
			}
			p.text("    ", "    ", "by state: "+strings.Join(states, ", "))
		}
	}
	if log := s.KernelLog; log != nil && len(log.Lines) > 0 {
		step("The kernel's log", "dmesg")
		p.b.WriteString("    " + log.Lines[len(log.Lines)-1] + "\n")
		p.text("    ", "    ", plural.Count(log.TableFull, "such line")+" in the window, and "+plural.Count(log.Suppressed, "message")+" suppressed")
	}
	p.b.WriteString("\n  " + p.style(cyan, "The doctor") + "   $ natkit doctor --netns case-host\n\n")
	t.write(p)
}

// Done shows the figures of a step.
func (t *DemoText) Done(a *scenario.DemoStep) {
	p := t.page()
	if r := a.HTTP; r != nil {
		what := fmt.Sprintf("%d of %d requests completed", r.Completed, r.Requests)
		if n := r.Failed.Sum(); n > 0 {
			what += fmt.Sprintf(", %d failed (%d timed out)", n, r.Failed.Timeout)
		}
		what += fmt.Sprintf(": %.0f requests/s", r.RequestsPerSecond)
		if r.Completed > 0 {
			what += fmt.Sprintf(", mean %.0f ms, connect mean %.0f ms", r.TimePerRequestMS, r.Connect.Mean)
		}
		what += ", " + plural.Count(r.TCP.SYNRetransmits, "SYN") + " retransmitted"
		p.text("  ", "  ", what)
	}
	for _, f := range a.Findings {
		p.finding(f)
	}
	if a.Name == scenario.StepDiagnosis && len(a.Findings) == 0 {
		p.text("  ", "  ", "The doctor found nothing.")
	}
	for _, c := range a.Changes {
		p.text("  ", "      ", fmt.Sprintf("%s: %s -> %s", c.Setting, c.Old, c.New))
		p.text("      ", "      ", c.Reason)
	}
	if a.Removed > 0 {
		p.text("  ", "  ", fmt.Sprintf("%d idle entries removed from the table", a.Removed))
	}
	if a.NotRun != "" {
		p.text("  ", "  ", "The load was not run: "+a.NotRun+".")
	}
	p.sideBySide(a.Figures)
	t.write(p)
}

// sideBySide writes figures of mitigations, a few lines each: the median, how far the
// trials were apart, and what it is of the first.
func (p *page) sideBySide(figures []bench.Figure) {
	sheets := sheetsOf(nil, figures, nil)
	if len(sheets) == 0 {
		return
	}
	p.b.WriteByte('\n')
	p.text("  ", "  ", "Side by side: the median of n trials (least to most), x what it is of the first")
	names := 0
	for _, f := range figures {
		names = max(names, utf8.RuneCountInString(f.Router))
	}
	for _, s := range sheets {
		for _, b := range s.Blocks {
			heading := s.heading()
			if b.Conditions != "" {
				heading += "; " + b.Conditions
			}
			p.text("  ", "    ", heading)
			for _, r := range b.Rows {
				line := fmt.Sprintf("    %-*s %9s  (%s to %s, n %d)", names, r.Name, s.Unit.number(r.Median), s.Unit.number(r.Min), s.Unit.number(r.Max), r.N)
				if r.Ratio != 0 && r.Ratio != 1 {
					line += "  x " + ratio(r.Ratio)
				}
				if r.Label != "" {
					line += "  " + r.Label
				}
				p.b.WriteString(line + "\n")
			}
		}
	}
}

// Demo writes what a demo ends with: the steps beside the published figures,
// whether all is as before, and what to do next.
func Demo(w io.Writer, d *scenario.DemoResult, color bool) error {
	p := &page{color: color}
	p.b.WriteString("\n" + p.style(bold, "RESULT") + "\n")
	// The second site published what it saw, and no figures of its load.
	published := slices.ContainsFunc(d.Steps, func(a scenario.DemoStep) bool { return a.Published != nil })
	over, heads := "              this machine", "  step        completed  req/s mean ms connect ms"
	if published {
		over = fmt.Sprintf("%-53s%s", over, "published elsewhere *")
		heads += "   completed req/s  mean connect"
	}
	p.b.WriteString(over + "\n" + heads + "\n")
	for _, a := range d.Steps {
		r := a.HTTP
		if r == nil {
			continue
		}
		row := fmt.Sprintf("  %-10s %10d %6.0f %7s %10s", a.Name, r.Completed, r.RequestsPerSecond,
			known(r.TimePerRequestMS, "%.0f"), known(r.Connect.Mean, "%.0f"))
		if pub := a.Published; pub != nil {
			row += fmt.Sprintf("  %10d %5s %5s %7s", pub.Completed,
				known(pub.RequestsPerSecond, "%.0f"), known(pub.TimePerRequestMS, "%.0f"), known(pub.ConnectMS, "%.0f"))
		}
		p.b.WriteString(row + "\n")
	}
	if published {
		p.text("  * ", "    ", "measured by others for the same case, on other machines and an older kernel")
	}
	p.b.WriteByte('\n')
	switch {
	case d.Restored:
		p.text("", "", fmt.Sprintf("Nothing is left: the lab is removed, and the host-wide values are as before (nf_conntrack_max %d, nf_conntrack_buckets %d).",
			d.After.ConntrackMax, d.After.ConntrackBuckets))
	default:
		for _, l := range d.Left {
			p.text("LEFT: ", "  ", l)
		}
	}
	p.b.WriteString(`
On a machine that carries traffic:
  natkit doctor --for 30s        what is wrong there, with evidence and cure
  natkit drops                   every packet that the kernel drops, by place and cause
  natkit tune plan               what would change; apply changes it, rollback undoes it
  natkit accel on eth0 eth1      forward established flows before the stack; --dry-run first
  natkit up -f nat.yaml          the eBPF engine instead; import writes the file
`)
	_, err := io.WriteString(w, p.b.String())
	return err
}

// known writes a figure, or a dash where there is none.
func known(v float64, format string) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf(format, v)
}
