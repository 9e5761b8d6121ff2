// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/observe"
	"natkit/internal/words/plural"
)

// TraceText writes packets as ladders.
type TraceText struct {
	w           io.Writer
	width       int       // of the terminal; 0: lines are not broken
	boot        time.Time // when CLOCK_MONOTONIC was 0
	connections map[int]*tracedConnection
	others      struct{ last, connections, packets, dropped int } // beyond maxConnections: the highest number, and how many
}

// maxConnections are listed at the end of a trace; of others there are sums.
const maxConnections = 1000

type tracedConnection struct {
	tuple            string
	protocol         string
	packets, dropped int
	translations     []string
	ends             []string
}

// NewTraceText writes to w, with lines of width columns (0: as long as they are); boot is when CLOCK_MONOTONIC was 0.
func NewTraceText(w io.Writer, width int, boot time.Time) *TraceText {
	return &TraceText{w: w, width: width, boot: boot, connections: map[int]*tracedConnection{}}
}

// Packet writes one.
func (t *TraceText) Packet(p trace.Packet) error {
	t.count(p)
	var b strings.Builder
	b.WriteString(broken(packetTitle(&p, t.boot), t.width, 4) + "\n")
	namespace := ""
	last := p.StartNS
	for i := range p.Steps {
		s := &p.Steps[i]
		if i == 0 || s.Namespace != namespace {
			namespace = s.Namespace
			fmt.Fprintf(&b, "  %s\n", namespaceLabel(namespace))
		}
		elapsed := ""
		if s.TimeNS != 0 {
			elapsed = "+" + shortTime(s.TimeNS-last)
			last = s.TimeNS
		}
		line := fmt.Sprintf("  %9s  %-10s %-12s %s", elapsed, s.Interface, s.Hook, stepText(s))
		b.WriteString(broken(line, t.width, textColumn) + "\n")
	}
	b.WriteString(broken("  "+TraceEnd(p.End), t.width, 7) + "\n\n")
	_, err := io.WriteString(t.w, b.String())
	return err
}

// textColumn is where the text of a step begins, and narrowText the fewest columns that it is given: on a narrower
// terminal it goes on further to the left.
const (
	textColumn = 37
	narrowText = 30
)

// broken breaks a line between words so that it fits; what follows is indented. A word that does not fit stays whole, so
// that it can be copied. Unlike page.text it keeps the spaces of the line, which are columns.
func broken(line string, width, indent int) string {
	if width <= 0 {
		return line
	}
	if indent+narrowText > width {
		indent = min(indent, 4)
	}
	var b strings.Builder
	from := len(line) - len(strings.TrimLeft(line, " "))
	for utf8.RuneCountInString(line) > width {
		end := len(line) // of what fits
		for i, n := 0, 0; i < len(line); n++ {
			if n == width {
				end = i
				break
			}
			_, size := utf8.DecodeRuneInString(line[i:])
			i += size
		}
		at := strings.LastIndexByte(line[:end+1], ' ')
		if at <= from {
			if at = strings.IndexByte(line[end:], ' '); at < 0 {
				break
			}
			at += end
		}
		b.WriteString(strings.TrimRight(line[:at], " ") + "\n")
		line = strings.Repeat(" ", indent) + strings.TrimLeft(line[at:], " ")
		from = indent
	}
	return b.String() + line
}

func packetTitle(p *trace.Packet, boot time.Time) string {
	direction := "original direction"
	if p.Reply {
		direction = "reply direction"
	}
	at := boot.Add(time.Duration(p.StartNS))
	return fmt.Sprintf("packet %d  %s  %s  %s  connection %d, %s  %s", p.Number, strings.TrimSpace(p.Protocol+" "+p.Tuple+" "+p.Kind),
		plural.Count(p.Length, "byte"), endWord(p.End), p.Connection, direction, at.Format("15:04:05.000000"))
}

func endWord(e trace.End) string {
	if e.Outcome == trace.Died {
		return "DROPPED"
	}
	return string(e.Outcome)
}

func namespaceLabel(name string) string {
	if name == "" {
		return "(the namespace that natkit was started in)"
	}
	return name
}

// shortTime writes nanoseconds as people say them.
func shortTime(ns uint64) string {
	switch {
	case ns < 1_000_000:
		return fmt.Sprintf("%.1f us", float64(ns)/1e3)
	case ns < 1_000_000_000:
		return fmt.Sprintf("%.1f ms", float64(ns)/1e6)
	}
	return fmt.Sprintf("%.1f s", float64(ns)/1e9)
}

func stepText(s *trace.Step) string {
	var words []string
	switch s.What {
	case trace.RuleMet:
		words = append(words, s.Rule.String())
		if !s.Rule.Policy {
			words = append(words, "=> "+verdictText(s.Rule))
		}
	case trace.Translated, trace.Bypassed:
		words = append(words, string(s.What)+" ("+s.Detail+"): "+s.Before+"  =>  "+s.After)
		if s.Rule != nil {
			words = append(words, "by "+ruleName(s.Rule))
		}
	case trace.NewEntry, trace.Found, trace.NoEntry, trace.Confirmed:
		words = append(words, "conntrack: "+string(s.What)+" ("+s.Detail+")")
	default:
		words = append(words, string(s.What))
		if s.Detail != "" {
			words = append(words, s.Detail)
		}
	}
	if s.Rule != nil && s.Rule.Derived {
		words = append(words, "(derived from the rules)")
	}
	return strings.Join(words, " ")
}

// ruleName is the rule without its text, which stands in the step above where the kernel reported it.
func ruleName(r *trace.Rule) string {
	if r.Derived {
		return r.String()
	}
	name := *r
	name.Text = ""
	return name.String()
}

func verdictText(r *trace.Rule) string {
	if r.To != "" {
		return r.Verdict + " " + r.To
	}
	return r.Verdict
}

func endText(e trace.End) string {
	where := namespaceLabel(e.Namespace)
	if e.Interface != "" {
		where += " " + e.Interface
	}
	switch e.Outcome {
	case trace.Died:
		text := "DROPPED in " + where
		if e.Why != "" {
			text += ": " + e.Why
		} else {
			text += ": " + e.Reason + " at " + e.Place
		}
		if e.Rule != nil && e.Rule.Derived {
			text += " (derived from the rules)"
		}
		return text
	case trace.Left:
		return "left " + where + ", " + e.Why
	}
	return string(e.Outcome) + " in " + where + ": " + e.Why
}

// count adds a packet to its connection.
func (t *TraceText) count(p trace.Packet) {
	c := t.connections[p.Connection]
	if c == nil && len(t.connections) >= maxConnections {
		t.countOther(p)
		return
	}
	if c == nil {
		c = &tracedConnection{tuple: p.Tuple, protocol: p.Protocol}
		t.connections[p.Connection] = c
	}
	c.packets++
	if p.End.Outcome == trace.Died && !p.End.Benign {
		c.dropped++
		if why := endText(p.End); !slices.Contains(c.ends, why) && len(c.ends) < 10 {
			c.ends = append(c.ends, why)
		}
	}
	if p.Reply {
		return
	}
	for _, s := range p.Steps {
		if s.What != trace.Translated && s.What != trace.Bypassed {
			continue
		}
		text := fmt.Sprintf("%s: %s  =>  %s", namespaceLabel(s.Namespace), s.Before, s.After)
		if !slices.Contains(c.translations, text) && len(c.translations) < 10 {
			c.translations = append(c.translations, text)
		}
	}
}

func (t *TraceText) countOther(p trace.Packet) {
	o := &t.others
	if o.packets++; p.Connection > o.last {
		o.connections++
		o.last = p.Connection
	}
	if p.End.Outcome == trace.Died && !p.End.Benign {
		o.dropped++
	}
}

// End writes what it came to.
func (t *TraceText) End(s follow.Summary) error {
	var b strings.Builder
	if len(t.connections) == 0 {
		b.WriteString("No packet matched.\n")
	}
	for _, number := range slices.Sorted(maps.Keys(t.connections)) {
		c := t.connections[number]
		title := fmt.Sprintf("connection %d  %s %s: %s, %d dropped", number, c.protocol, c.tuple, plural.Count(c.packets, "packet"), c.dropped)
		b.WriteString(broken(title, t.width, 4) + "\n")
		for _, text := range c.translations {
			b.WriteString(broken("  translated in "+text, t.width, 4) + "\n")
		}
		for _, text := range c.ends {
			b.WriteString(broken("  "+text, t.width, 4) + "\n")
		}
	}
	if o := t.others; o.connections > 0 {
		fmt.Fprintf(&b, "%s more: %s, %d dropped\n", plural.Count(o.connections, "connection"), plural.Count(o.packets, "packet"), o.dropped)
	}
	b.WriteString(TraceLost(s))
	_, err := io.WriteString(t.w, b.String())
	return err
}

// Ended writes that an entry ended.
func (t *TraceText) Ended(e trace.EntryEnd) error {
	_, err := io.WriteString(t.w, broken(TraceEnded(e, t.boot), t.width, 2)+"\n\n")
	return err
}

// TraceEnded says that a conntrack entry ended.
func TraceEnded(e trace.EntryEnd, boot time.Time) string {
	return fmt.Sprintf("connection %d: its conntrack entry in %s (%s) was %s at %s, %d s before its end: %s",
		e.Connection, namespaceLabel(e.Namespace), e.Original, e.How, boot.Add(time.Duration(e.TimeNS)).Format("15:04:05.0"), e.LeftSeconds, e.Why)
}

// TraceLost writes what was not traced, "" if all was.
func TraceLost(s follow.Summary) (text string) {
	if s.Capped > 0 {
		text += "Not traced: " + plural.Count(s.Capped, "packet") + " that matched beyond --rate.\n"
	}
	if s.Lost > 0 {
		text += "Missing above: " + plural.Count(s.Lost, "step") + " for which there was no room.\n"
	}
	return text
}

// TraceMissing writes what a trace can't see, in lines of width columns.
func TraceMissing(missing []observe.Missing, width int) string {
	var b strings.Builder
	for _, m := range missing {
		b.WriteString(broken(missingText(m), width, 4) + "\n")
	}
	return b.String()
}

func missingText(m observe.Missing) string {
	where := "on this machine"
	if m.Namespace != "" {
		where = "in " + m.Namespace
	}
	return fmt.Sprintf("not seen %s: %s: %s", where, m.What, m.Why)
}

// TraceComment is a step as the comment of a frame in a capture.
func TraceComment(s *trace.Step) string {
	place := namespaceLabel(s.Namespace) + " " + s.Interface
	if s.Hook != "" {
		place += " " + s.Hook
	}
	return place + ": " + stepText(s)
}

// TraceEnd is what became of a packet, likewise.
func TraceEnd(e trace.End) string { return "end: " + endText(e) }
