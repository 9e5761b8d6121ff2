// SPDX-License-Identifier: Apache-2.0

package report

import (
	"io"
	"strings"
)

// Text writes saved results for people, one after the other.
func Text(w io.Writer, saved []*Saved) error {
	for i, s := range saved {
		p := &page{}
		if i > 0 {
			p.b.WriteString("\n\n")
		}
		if len(saved) > 1 {
			p.b.WriteString(printable(s.Name) + "\n\n")
		}
		switch {
		case s.Result != nil:
			p.result(s.Result)
		case s.HTTP != nil:
			var b strings.Builder
			if err := HTTP(&b, s.HTTP); err != nil {
				return err
			}
			for line := range strings.SplitSeq(strings.TrimSuffix(b.String(), "\n"), "\n") {
				p.b.WriteString(printable(line) + "\n") // a file may hold anything
			}
		default:
			p.demo(s)
		}
		if _, err := io.WriteString(w, p.b.String()); err != nil {
			return err
		}
	}
	return nil
}

// demo is the steps and what they gave.
func (p *page) demo(s *Saved) {
	section := demoSection(s.Demo)
	p.b.WriteString(section.Title + "\n")
	for _, line := range section.About {
		p.text("", "  ", printable(line))
	}
	if section.Command != "" {
		p.text("$ ", "    ", printable(section.Command))
	}
	for _, a := range section.Steps {
		p.b.WriteByte('\n')
		p.text(printable(strings.ToUpper(a.Name))+": ", "  ", printable(a.Shows))
		if a.Command != "" {
			p.text("  $ ", "      ", printable(a.Command))
		}
		for line := range strings.Lines(a.RuleFile) {
			p.b.WriteString("    " + printable(strings.TrimSuffix(line, "\n")) + "\n")
		}
		if a.NotRun != "" {
			p.text("  the load was not run: ", "    ", printable(a.NotRun))
		}
		for _, f := range a.Findings {
			p.text("  found ", "    ", printable(f))
		}
		for _, c := range a.Changes {
			p.text("  changed ", "    ", printable(c))
		}
	}
	steps, sideBySide := demoSheets(s.Demo, false)
	p.sheets(steps, "step")
	p.sheets(sideBySide, "NAT")
	for _, note := range section.Notes {
		p.b.WriteByte('\n')
		p.text("Note: ", "      ", printable(note))
	}
}
