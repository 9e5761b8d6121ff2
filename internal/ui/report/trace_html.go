// SPDX-License-Identifier: Apache-2.0

package report

import (
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/trace"
	"natkit/internal/words/plural"
)

//go:embed trace.css
var traceStyle string

// MostTraceDrawn is how many packets one page shows.
const MostTraceDrawn = 1000

// TraceHTML writes a trace as one page of sequence drawings: a column for each namespace, in the
// order in which packets came to them, time from top to bottom.
func TraceHTML(w io.Writer, boot time.Time, packets []trace.Packet, ended []trace.EntryEnd, s follow.Summary) error {
	var namespaces []string
	for i := range packets {
		for j := range packets[i].Steps {
			if name := packets[i].Steps[j].Namespace; !slices.Contains(namespaces, name) {
				namespaces = append(namespaces, name)
			}
		}
	}
	body := tag("h1", text("natkit trace"))
	for _, m := range s.Missing {
		body += tag("p.note", text(missingText(m)))
	}
	if s.Capped+s.Lost > 0 {
		body += tag("p.note", text(fmt.Sprintf("%s beyond --rate were not traced, %s were lost.", plural.Count(s.Capped, "packet"), plural.Count(s.Lost, "step"))))
	}
	for _, e := range ended {
		body += tag("p.note", text(TraceEnded(e, boot)))
	}
	for i := range packets {
		body += tracedPacket(&packets[i], boot, namespaces)
	}
	if len(packets) >= MostTraceDrawn {
		body += tag("p.note", text(fmt.Sprintf("The trace ended with packet %d of those that are shown: a page has no more.", MostTraceDrawn)))
	}
	if len(packets) == 0 {
		body += tag("p", text("No packet matched."))
	}
	return document{title: "natkit trace", style: pageStyle + traceStyle, body: tag("main", body)}.write(w)
}

// tracedPacket is the drawing of one packet.
func tracedPacket(p *trace.Packet, boot time.Time, namespaces []string) markup {
	head := tag("th", text("since start"))
	for _, name := range namespaces {
		head += tag("th", text(namespaceLabel(name)))
	}
	rows := tag("tr", head)
	for i := range p.Steps {
		s := &p.Steps[i]
		elapsed := ""
		if s.TimeNS != 0 {
			elapsed = "+" + shortTime(s.TimeNS-p.StartNS)
		}
		cells := tag("td.time", text(elapsed))
		for _, name := range namespaces {
			if name != s.Namespace {
				cells += tag("td.line", "")
				continue
			}
			place := s.Interface
			if s.Hook != "" {
				place += " " + s.Hook
			}
			cells += tag("td.step", tag("b", text(place)), text(" "), tag("span."+stepClass(s), text(stepText(s))))
		}
		rows += tag("tr", cells)
	}
	class := "p.end"
	if p.End.Outcome == trace.Died {
		class = "p.died"
	}
	return tag("h2", text(strings.ReplaceAll(packetTitle(p, boot), "  ", ", "))) + scroll("trace", rows) + tag(class, text(TraceEnd(p.End)))
}

func stepClass(s *trace.Step) string {
	switch s.What {
	case trace.Translated, trace.Bypassed:
		return "translated"
	case trace.Dropped:
		return "dropped"
	case trace.RuleMet:
		return "rule"
	}
	return "plain"
}
