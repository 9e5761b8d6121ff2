// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// DoctorResult is what natkit doctor found and what it could see, as -o json
// prints it.
type DoctorResult struct {
	Kernel        string                `json:"kernel"`
	Hostname      string                `json:"hostname"`
	Netns         snapshot.Netns        `json:"namespace"`
	TakenAt       time.Time             `json:"time"`
	WindowSeconds float64               `json:"interval_s"`
	Capabilities  []snapshot.Capability `json:"capabilities"`
	Unjudged      []causes.Unjudged     `json:"unjudged"`
	Findings      []causes.Finding      `json:"findings"`
}

// Doctor is the result of judging s. Its lists are never null in JSON.
func Doctor(s *snapshot.Snapshot, findings []causes.Finding) DoctorResult {
	return DoctorResult{
		Kernel:        s.Host.Kernel,
		Hostname:      s.Host.Hostname,
		Netns:         s.Netns,
		TakenAt:       s.TakenAt,
		WindowSeconds: s.WindowSeconds,
		Capabilities:  append([]snapshot.Capability{}, s.Capabilities...),
		Unjudged:      causes.NotJudged(s, findings),
		Findings:      filled(findings),
	}
}

func filled(findings []causes.Finding) []causes.Finding {
	out := append([]causes.Finding{}, findings...)
	for i := range out {
		f := &out[i]
		f.Evidence = append([]causes.Evidence{}, f.Evidence...)
		f.Remedy = append([]string{}, f.Remedy...)
		f.Verify = append([]string{}, f.Verify...)
		if len(f.Consequences) > 0 {
			f.Consequences = filled(f.Consequences)
		}
	}
	return out
}

// DoctorText writes what the doctor found for people: most severe first, with the
// evidence, the commands that cure it, and last what could not be seen. Text is
// broken at 80 columns, commands never are.
func DoctorText(w io.Writer, s *snapshot.Snapshot, findings []causes.Finding, color bool) error {
	p := page{color: color}
	unjudged := causes.NotJudged(s, findings)
	p.header(s, findings)
	p.unjudged(unjudged)
	for _, f := range findings {
		p.finding(f)
	}
	if len(findings) == 0 {
		p.b.WriteByte('\n')
		p.text("", "", nothingWrong(s, unjudged))
	}
	p.unseen(s.Capabilities)
	_, err := io.WriteString(w, p.b.String())
	return err
}

const columns = 80

// page is text that grows, in lines of at most columns.
type page struct {
	b     strings.Builder
	color bool
}

// ANSI attributes.
const (
	bold   = "1"
	red    = "1;31"
	yellow = "1;33"
	cyan   = "1;36"
)

func (p *page) style(attributes, text string) string {
	if !p.color {
		return text
	}
	return "\x1b[" + attributes + "m" + text + "\x1b[0m"
}

// text writes words, the first line after first, the others after next.
func (p *page) text(first, next, words string) { p.b.WriteString(Wrap(first, next, words)) }

// Wrap is words in lines of at most 80 columns, the first after first, the others after next.
func Wrap(first, next, words string) string {
	var b strings.Builder
	line, width := first, utf8.RuneCountInString(first)
	empty := true
	for _, word := range strings.Fields(words) {
		n := utf8.RuneCountInString(word)
		if !empty && width+1+n > columns {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line, width, empty = next, utf8.RuneCountInString(next), true
		}
		if !empty {
			line += " "
			width++
		}
		line += word
		width += n
		empty = false
	}
	b.WriteString(strings.TrimRight(line, " ") + "\n")
	return b.String()
}

func (p *page) header(s *snapshot.Snapshot, findings []causes.Finding) {
	var about []string
	if s.Host.Hostname != "" {
		about = append(about, s.Host.Hostname)
	}
	if s.Host.Kernel != "" {
		about = append(about, "Linux "+s.Host.Kernel)
	}
	if s.Netns.Name != "" {
		about = append(about, "namespace "+namespaceTitle(s.Netns))
	}
	watched := "watched for " + seconds(s.WindowSeconds)
	if !s.TakenAt.IsZero() {
		watched += " until " + s.TakenAt.UTC().Format("2006-01-02 15:04:05 UTC")
	}
	about = append(about, watched)
	count := map[causes.Severity]int{}
	for _, f := range findings {
		count[f.Severity]++
	}
	var counts []string
	for _, sev := range []causes.Severity{causes.Critical, causes.Warning, causes.Advice} {
		if count[sev] > 0 {
			noun := sev.String()
			if sev == causes.Warning {
				noun = plural.Noun(count[sev], noun)
			}
			counts = append(counts, fmt.Sprintf("%d %s", count[sev], noun))
		}
	}
	if len(counts) > 0 {
		about = append(about, strings.Join(counts, ", "))
	}
	p.text("", "  ", strings.Join(about, "; "))
}

func (p *page) finding(f causes.Finding) {
	p.b.WriteByte('\n')
	attributes := map[causes.Severity]string{causes.Critical: red, causes.Warning: yellow, causes.Advice: cyan}[f.Severity]
	p.b.WriteString(p.style(attributes, strings.ToUpper(f.Severity.String())) + " [" + f.Code + "]\n")
	p.paragraph(f.Title)
	if len(f.Evidence) > 0 {
		p.section("Evidence")
		for _, e := range f.Evidence {
			p.evidence(e)
		}
	}
	if f.Why != "" {
		p.section("Why it matters")
		p.text("    ", "    ", f.Why)
	}
	p.commands("Remedy", f.Remedy)
	p.commands("Verify", f.Verify)
	if len(f.Consequences) > 0 {
		p.section("Follows from it, and ends with it")
		p.consequences("    ", f.Consequences)
	}
}

// evidence writes a number, and where it was read beside it or below.
func (p *page) evidence(e causes.Evidence) {
	number, source := e.What+": "+e.Value, "("+e.Source+")"
	if one := "    " + number + " " + source; utf8.RuneCountInString(one) <= columns {
		p.b.WriteString(one + "\n")
		return
	}
	p.text("    ", "      ", number)
	p.text("        ", "         ", source)
}

// paragraph writes the title, which may take more than one line.
func (p *page) paragraph(title string) {
	var one page
	one.text("", "", title)
	for line := range strings.Lines(one.b.String()) {
		p.b.WriteString(p.style(bold, strings.TrimSuffix(line, "\n")) + "\n")
	}
}

func (p *page) section(name string) { p.b.WriteString("  " + name + "\n") }

func (p *page) commands(name string, lines []string) {
	if len(lines) == 0 {
		return
	}
	p.section(name)
	for _, line := range lines {
		if remark, ok := strings.CutPrefix(line, "# "); ok {
			p.text("    # ", "    # ", remark)
		} else {
			p.b.WriteString("    " + line + "\n")
		}
	}
}

func (p *page) consequences(indent string, findings []causes.Finding) {
	for _, f := range findings {
		p.text(indent, indent+"    ", fmt.Sprintf("%s (%s) [%s]", f.Title, f.Severity, f.Code))
		p.consequences(indent+"  ", f.Consequences)
	}
}

// unjudged names the causes that may be at work unseen.
func (p *page) unjudged(causes []causes.Unjudged) {
	if len(causes) == 0 {
		return
	}
	title, codes := notJudged(causes)
	p.b.WriteString("\n" + p.style(yellow, "NOT JUDGED") + "\n")
	p.text("", "", title+":")
	p.text("  ", "  ", codes)
}

// notJudged says how much could not be judged and for lack of what, and lists it.
func notJudged(causes []causes.Unjudged) (title, codes string) {
	var lacks, names []string
	for _, c := range causes {
		names = append(names, c.Code)
		for _, l := range c.Lacks {
			if !slices.Contains(lacks, l) {
				lacks = append(lacks, l)
			}
		}
	}
	title = fmt.Sprintf("%s: could not read %s (the reasons are at the end)", plural.Count(len(causes), "cause"), strings.Join(lacks, ", "))
	return title, strings.Join(names, ", ")
}

// unseen lists what the doctor could not look at.
func (p *page) unseen(capabilities []snapshot.Capability) {
	first := true
	for _, c := range capabilities {
		if c.OK {
			continue
		}
		if first {
			p.b.WriteString("\nCould not be seen:\n")
			first = false
		}
		text := c.Name + ": " + c.Reason
		if c.Costs != "" {
			text += "; so " + c.Costs
		}
		p.text("  ", "    ", text)
	}
}

// nothingWrong is the result without findings, and what it rests on.
func nothingWrong(s *snapshot.Snapshot, unjudged []causes.Unjudged) string {
	var parts []string
	add := func(known bool, format string, args ...any) {
		if known {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	if ct := s.Conntrack; ct != nil {
		add(true, "the conntrack table (%s)", entriesOf(ct))
	}
	if e := s.Engine; e.Tracks() {
		add(true, "the eBPF engine (%d of %s)", e.Sessions, plural.Count(e.SessionsMax, "session"))
	}
	add(s.Drops != nil, "dropped packets")
	add(s.Counters != nil, "the stack's counters")
	add(s.Sysctls != nil, "%s", plural.Count(len(s.Sysctls), "setting"))
	add(s.Chains != nil, "%s of rules", plural.Count(len(s.Chains), "chain"))
	add(s.Hooks != nil, "%s", plural.Count(len(s.Hooks), "netfilter hook"))
	add(s.Interfaces != nil, "%s", plural.Count(len(s.Interfaces), "interface"))
	add(s.Listeners != nil, "%s", plural.Count(len(s.Listeners), "listening socket"))
	add(s.CPUs != nil, "%s", plural.Count(len(s.CPUs), "CPU"))
	add(s.KernelLog != nil, "the kernel's log")
	found := "Nothing wrong was found. Looked at "
	if len(unjudged) > 0 {
		found = "Nothing wrong was found among what could be judged. Looked at "
	}
	switch n := len(parts); n {
	case 0:
		return "Nothing could be read, so natkit cannot judge anything."
	case 1:
		return found + parts[0] + "."
	default:
		return found + strings.Join(parts[:n-1], ", ") + " and " + parts[n-1] + "."
	}
}

// entriesOf is how many entries a table has, and may have: a limit of 0 is none.
func entriesOf(ct *snapshot.Conntrack) string {
	if ct.Max == 0 {
		return plural.Count(ct.Count, "entry") + ", no limit"
	}
	return fmt.Sprintf("%d of %s", ct.Count, plural.Count(ct.Max, "entry"))
}

// seconds is a time in seconds with one decimal where it is short.
func seconds(s float64) string {
	if s < 100 {
		return strconv.FormatFloat(s, 'f', 1, 64) + " s"
	}
	return strconv.FormatFloat(s, 'f', 0, 64) + " s"
}
