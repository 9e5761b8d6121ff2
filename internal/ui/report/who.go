// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
	"natkit/internal/snapshot"
)

// Verdicts of natkit who.
const (
	WhoFound  = "found"
	WhoNobody = "nobody"
	WhoGap    = "gap" // and nobody was found
)

// Who is who had an external endpoint when.
type Who struct {
	Address  netip.Addr `json:"external_address,omitzero"`
	Port     uint16     `json:"external_port"`
	Protocol string     `json:"protocol,omitempty"` // empty: any
	Since    time.Time  `json:"since"`              // the time asked about, with --within
	Until    time.Time  `json:"until"`
	Verdict  string     `json:"verdict"` // found, nobody, gap
	Found    []WhoLife  `json:"found"`
	ByRule   []WhoRule  `json:"by_rule"` // who had it by the rules in force, without a record
	Gaps     []WhoGapOf `json:"gaps"`
	// Twice are times that were twice, as the clock was set back.
	Twice    []WhoGapOf `json:"repeated_times"`
	LogBegin time.Time  `json:"log_since"`
	LogEnd   time.Time  `json:"log_until"`
}

// WhoLife is somebody who had it.
type WhoLife struct {
	Kind        string            `json:"kind"`
	Protocol    string            `json:"protocol"`
	Internal    snapshot.Endpoint `json:"internal,omitzero"`
	External    snapshot.Endpoint `json:"external,omitzero"`
	LastPort    uint16            `json:"external_port_last,omitempty"` // of a block
	Destination snapshot.Endpoint `json:"destination,omitzero"`
	Subscriber  string            `json:"subscriber,omitempty"`
	Zone        uint16            `json:"zone,omitempty"`
	VLAN        uint16            `json:"vlan,omitempty"`
	// Since is when it began; Seen when the log first had it, where that is all that is known.
	Since time.Time `json:"since,omitzero"`
	Seen  time.Time `json:"seen_time"`
	// Until is when it ended, at the latest; none if the log has no end of it. It ended after Least.
	Until time.Time `json:"until,omitzero"`
	Least time.Time `json:"until_earliest,omitzero"`
	// Gap is that the log has a gap in the middle: the same was there again after it.
	Gap bool `json:"across_gap,omitempty"`
}

// WhoRule is whose it was by the rules that were in force.
type WhoRule struct {
	Kind string `json:"kind"` // dnat, map, block
	// Internal are the endpoints that the rule sent it to: of several, the client's address chose one.
	Internal []snapshot.Endpoint `json:"internal_endpoints,omitempty"`
	Rule     string              `json:"rule,omitempty"`
	Line     int                 `json:"line,omitempty"`
	// Block is the deterministic port block that it was in.
	Block *rulefile.ComputedBlock `json:"computed_block,omitempty"`
	File  string                  `json:"file"` // the rules, which the log has kept
	Since time.Time               `json:"since"`
	Until time.Time               `json:"until,omitzero"` // when others came into force
}

// WhoGapOf is a time that the log does not have.
type WhoGapOf struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	Why   string    `json:"reason"`
}

// NewWho makes the result of a question.
func NewWho(q store.Question, a store.Answer) Who {
	w := Who{Address: q.Address, Port: q.Port, Since: q.Since.Time(), Until: q.Upto.Time(), Verdict: WhoNobody,
		Found: []WhoLife{}, ByRule: []WhoRule{}, Gaps: gapsOf(a.Gaps), Twice: gapsOf(a.Twice), LogBegin: a.Begin.Time(), LogEnd: a.End.Time()}
	if q.Protocol != 0 {
		w.Protocol = natlog.ProtocolName(q.Protocol)
	}
	for _, l := range a.Lives {
		w.Found = append(w.Found, WhoLife{Kind: l.Kind.String(), Protocol: natlog.ProtocolName(l.Protocol),
			Internal: snapshot.EndpointOf(l.Internal), External: snapshot.EndpointOf(l.External), LastPort: l.LastPort,
			Destination: snapshot.EndpointOf(l.Destination), Subscriber: l.Subscriber, Zone: l.Zone, VLAN: l.VLAN,
			Since: timeOf(l.Since), Seen: l.Log.Time(), Until: timeOf(l.Until), Least: timeOf(l.Least), Gap: l.Gap})
	}
	for i := range a.Rules {
		w.ByRule = append(w.ByRule, whoRule(&a.Rules[i]))
	}
	switch {
	case len(w.Found)+len(w.ByRule) > 0:
		w.Verdict = WhoFound
	case len(w.Gaps) > 0:
		w.Verdict = WhoGap
	}
	return w
}

func whoRule(o *store.RuleOwner) WhoRule {
	w := WhoRule{Kind: natlog.Block.String(), File: o.Path, Since: o.Since.Time(), Until: timeOf(o.Until)}
	if o.Rule == nil {
		w.Block = &o.Block
		return w
	}
	w.Kind, w.Rule, w.Line = o.Rule.Kind(), o.Rule.String(), o.Rule.Position.Line
	for _, end := range o.Internal {
		w.Internal = append(w.Internal, snapshot.EndpointOf(end))
	}
	return w
}

func gapsOf(spans []store.Span) []WhoGapOf {
	out := []WhoGapOf{}
	for _, s := range spans {
		out = append(out, WhoGapOf{s.Since.Time(), s.Until.Time(), s.Why})
	}
	return out
}

func timeOf(m natlog.Micros) time.Time {
	if m == 0 {
		return time.Time{}
	}
	return m.Time()
}

const whoTime = "2006-01-02 15:04:05.000 MST"

// Text writes it for people.
func (w Who) Text(out io.Writer) error {
	var b bytes.Buffer
	asked := fmt.Sprintf("%v port %d", w.Address, w.Port)
	if w.Protocol != "" {
		asked += " " + w.Protocol
	}
	at := "at " + w.Since.Local().Format(whoTime)
	if w.Until.After(w.Since) {
		at = "from " + w.Since.Local().Format(whoTime) + " to " + w.Until.Local().Format(whoTime)
	}
	switch w.Verdict {
	case WhoNobody:
		fmt.Fprintf(&b, "Nobody had %s %s. The log has no gap then.\n", asked, at)
	case WhoGap:
		fmt.Fprintf(&b, "The log cannot tell who had %s %s: it has a gap.\n", asked, at)
	default:
		fmt.Fprintf(&b, "%s %s:\n", asked, at)
	}
	for _, l := range w.Found {
		l.text(&b)
	}
	for i := range w.ByRule {
		w.ByRule[i].text(&b)
	}
	for _, g := range w.Gaps {
		fmt.Fprintf(&b, "  gap from %s to %s: %s\n", g.Since.Local().Format(whoTime), g.Until.Local().Format(whoTime), g.Why)
	}
	for _, g := range w.Twice {
		fmt.Fprintf(&b, "  %s to %s was twice: %s; both are shown\n", g.Since.Local().Format(whoTime), g.Until.Local().Format(whoTime), g.Why)
	}
	if w.Verdict == WhoGap {
		fmt.Fprintf(&b, "The log is from %s to %s.\n", w.LogBegin.Local().Format(whoTime), w.LogEnd.Local().Format(whoTime))
	}
	_, err := out.Write(b.Bytes())
	return err
}

func (l *WhoLife) text(b *bytes.Buffer) {
	who, what := "", strings.TrimSpace(l.Protocol+" "+l.Kind)
	if !l.Internal.IsZero() {
		who = l.Internal.String()
	}
	switch {
	case l.LastPort != 0: // a block is the subscriber's, of no port of a host
		who, what = "subscriber "+l.Subscriber, fmt.Sprintf("port block %d to %d", l.External.Port(), l.LastPort)
	case l.Subscriber != "":
		who = "subscriber " + l.Subscriber + ": " + who
	}
	fmt.Fprintf(b, "  %s (%s", who, what)
	if !l.Destination.IsZero() {
		fmt.Fprintf(b, ", with %v", l.Destination)
	}
	if l.Zone != 0 && l.Subscriber == "" {
		fmt.Fprintf(b, ", zone %d", l.Zone)
	}
	b.WriteString(")\n    from ")
	if l.Since.IsZero() {
		b.WriteString("before ")
		b.WriteString(l.Seen.Local().Format(whoTime))
	} else {
		b.WriteString(l.Since.Local().Format(whoTime))
	}
	switch {
	case l.Until.IsZero() && !l.Least.IsZero():
		fmt.Fprintf(b, ", not ended at %s; what the log has after that cannot be read", l.Least.Local().Format(whoTime))
	case l.Until.IsZero():
		b.WriteString(", not ended at the end of the log")
	case l.Least.Before(l.Until):
		fmt.Fprintf(b, " to a time between %s and %s; its end is not in the log", l.Least.Local().Format(whoTime), l.Until.Local().Format(whoTime))
	default:
		fmt.Fprintf(b, " to %s", l.Until.Local().Format(whoTime))
	}
	if l.Gap {
		b.WriteString(", seen again after a gap of the log in the middle")
	}
	b.WriteString("\n")
}

func (w *WhoRule) text(b *bytes.Buffer) {
	place := w.File
	if block := w.Block; block != nil {
		fmt.Fprintf(b, "  subscriber %v (by rule: deterministic port block %d to %d of pool %s)\n", block.Subscriber, block.FirstPort, block.LastPort, block.Pool)
	} else {
		ends := make([]string, len(w.Internal))
		for i, end := range w.Internal {
			ends[i] = end.String()
		}
		who := strings.Join(ends, ", ")
		if len(ends) > 1 {
			who = "one of " + who + ", by the client's address"
		}
		fmt.Fprintf(b, "  %s (by rule: %s)\n", who, w.Rule)
		place += fmt.Sprintf(":%d", w.Line)
	}
	fmt.Fprintf(b, "    in force from %s", w.Since.Local().Format(whoTime))
	if w.Until.IsZero() {
		b.WriteString(" on")
	} else {
		fmt.Fprintf(b, " to %s", w.Until.Local().Format(whoTime))
	}
	fmt.Fprintf(b, ": %s\n", place)
}

// LogLine is something that natkit log reports of itself.
type LogLine struct {
	Time    time.Time `json:"time"`
	Text    string    `json:"text"`
	Records uint64    `json:"records_total"` // since the start
	Lost    uint64    `json:"lost_records_total"`
	Gaps    uint64    `json:"gaps_total"`
	// Sinks are those of --sink, as they were a moment ago.
	Sinks []sink.State `json:"sinks,omitempty"`
}

// LogLineText writes it for people.
func LogLineText(w io.Writer, l LogLine, stamp bool) error {
	at := ""
	if stamp {
		at = l.Time.Local().Format(time.DateTime) + " "
	}
	_, err := fmt.Fprintf(w, "%s%s\n", at, snapshot.CleanLines(l.Text)) // a collector may reply anything
	return err
}
