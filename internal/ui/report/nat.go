// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/words/plural"
	"natkit/internal/words/size"
)

// NATPlan is what `natkit up` or `natkit apply` does, or would do.
type NATPlan struct {
	File string `json:"file"`
	Done bool   `json:"done"` // false: --dry-run
	*control.Plan
}

// Text writes the plan, and what it goes past or does otherwise than the file says.
func (p *NATPlan) Text(w io.Writer) error {
	var b strings.Builder
	verb := "Would be up"
	if p.Done {
		verb = "Up"
	}
	fmt.Fprintf(&b, "%s on engine %s: %s of %s\n", verb, p.Engine, plural.Count(p.Rules, "rule"), p.File)
	if p.MemoryBytes > 0 {
		fmt.Fprintf(&b, "kernel memory for its limits: %s\n", size.Of(uint64(p.MemoryBytes)))
	}
	for _, l := range p.Placements {
		fmt.Fprintf(&b, "  %s: %s\n", l.Interface, l.Reason)
	}
	for _, name := range p.Detached {
		fmt.Fprintf(&b, "  %s: no longer in the file\n", name)
	}
	markLines(&b, "+", p.Set)
	markLines(&b, "-", p.Unset)
	markLines(&b, "+", p.Added)
	markLines(&b, "-", p.Removed)
	if p.Upgrade {
		b.WriteString("programs of another natkit are replaced; sessions continue\n")
	}
	for _, c := range control.ChangesText(p.Changes) {
		fmt.Fprintf(&b, "changed in the namespace, until natkit down: %s\n", c)
	}
	for _, c := range control.ChangesText(p.Undone) {
		fmt.Fprintf(&b, "undone: %s\n", c)
	}
	planTail(&b, p.Bypassed, p.Warnings)
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// markLines writes what comes or goes, a line each behind a mark.
func markLines(b *strings.Builder, mark string, texts []string) {
	for _, t := range texts {
		fmt.Fprintf(b, "%s %s\n", mark, t)
	}
}

// planTail is what all plans end with.
func planTail(b *strings.Builder, bypassed []control.Bypassed, warnings []string) {
	for _, g := range bypassed {
		fmt.Fprintf(b, "bypassed: %s: %s\n", g.What, g.Effect)
	}
	for _, t := range warnings {
		fmt.Fprintf(b, "note: %s\n", t)
	}
}

// NATDown is what `natkit down` did.
type NATDown struct {
	Kept    []string `json:"kept"`    // changed by somebody else since, and left so
	Cleaned int      `json:"cleaned"` // engines of namespaces that are gone
}

// Text says that it is down, and what stays.
func (d *NATDown) Text(w io.Writer) error {
	var b strings.Builder
	b.WriteString("Down; the namespace is as it was.\n")
	if len(d.Kept) > 0 {
		b.Reset()
		b.WriteString("Down. Left as changed by somebody else since:\n")
		for _, k := range d.Kept {
			fmt.Fprintf(&b, "  %s\n", k)
		}
	}
	if d.Cleaned > 0 {
		fmt.Fprintf(&b, "Removed %s of namespaces that are gone.\n", plural.Count(d.Cleaned, "engine"))
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

// NATStatusText writes what is up, what it holds and has counted, and what is wrong.
func NATStatusText(w io.Writer, s *control.Status) error {
	var b strings.Builder
	for _, p := range s.Problems {
		fmt.Fprintf(&b, "! %s\n", p)
	}
	if s.File == "" {
		_, err := io.WriteString(w, trimLines(b.String()))
		return err
	}
	fmt.Fprintf(&b, "engine %s, up since %s: %s of %s\n", s.Engine, s.Since.Format(time.DateTime), plural.Count(s.Rules, "rule"), s.File)
	if v := s.Serve; v != nil {
		fmt.Fprintf(&b, "natkit serve (process %d, since %s) keeps it in line with %s\n", v.Process, v.Since.Format(time.DateTime), v.File)
	} else {
		b.WriteString("natkit serve is not running: packets do not need it, but changes of the file, of interfaces and of masquerade addresses take effect only with natkit apply\n")
	}
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, l := range s.Interfaces {
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\n", l.Name, l.Side, strings.Join(l.Hooks, " "), l.Reason)
	}
	t.Flush()
	if s.Stats != nil {
		natCounts(&b, s)
	}
	for _, c := range control.ChangesText(s.Changes) {
		fmt.Fprintf(&b, "changed until natkit down: %s\n", c)
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}

func natCounts(b *strings.Builder, s *control.Status) {
	fmt.Fprintf(b, "%s of at most %d, %s\n", plural.Count(s.Stats.Sessions, "session"), s.Sessions, plural.Count(s.Stats.Mappings, "mapping"))
	if s.Stats.Explicit > 0 {
		fmt.Fprintf(b, "%s that hosts asked for by PCP or NAT-PMP\n", plural.Count(s.Stats.Explicit, "explicit mapping"))
	}
	t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	for _, a := range s.Addresses {
		switch {
		case a.FirstPort > 0:
			fmt.Fprintf(t, "  %s\tports %d-%d\tfree of %d: tcp %d, udp %d, icmp %d\t%s\n", a.Address, a.FirstPort, a.LastPort, a.Ports, a.FreeTCP, a.FreeUDP, a.FreeICMP, natKind(a))
		default:
			fmt.Fprintf(t, "  %s\t\t\t%s\n", a.Address, natKind(a))
		}
	}
	t.Flush()
	poolsText(b, s.Pools)
	for _, kind := range []string{"translated", "dropped", "passed", "counted"} {
		var rows []rulefile.ReasonInfo
		for _, r := range rulefile.Reasons {
			if r.Kind == kind && s.Stats.Reasons[r.Name] > 0 {
				rows = append(rows, r)
			}
		}
		if len(rows) == 0 {
			continue
		}
		fmt.Fprintf(b, "%s\n", map[string]string{
			"translated": "packets translated", "dropped": "packets dropped",
			"passed": "packets passed to the stack, unchanged", "counted": "also counted",
		}[kind])
		slices.SortStableFunc(rows, func(x, y rulefile.ReasonInfo) int { return int(s.Stats.Reasons[y.Name]) - int(s.Stats.Reasons[x.Name]) })
		t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
		for _, r := range rows {
			fmt.Fprintf(t, "%12d\t%s\t%s\n", s.Stats.Reasons[r.Name], r.Name, r.Means)
		}
		t.Flush()
	}
}

func natKind(a control.AddressStatus) string {
	switch {
	case a.Leaving:
		return "no rule uses it; it is removed with its last mapping" + natRemaining(a)
	case a.Drains:
		return "drained: nothing new is given from it" + natRemaining(a)
	case a.Masquerade:
		return "address of the interface"
	case a.OneToOne:
		return "given whole"
	}
	return ""
}

// natRemaining is what an address that is drained still has.
func natRemaining(a control.AddressStatus) string {
	if a.Sessions == nil || a.EndsIn == nil {
		return ""
	}
	if *a.Sessions == 0 {
		return "; no session is left"
	}
	return fmt.Sprintf("; %s left, the last ends in %s if nothing more is sent", plural.Count(*a.Sessions, "session"), endsIn(time.Duration(*a.EndsIn)))
}

// NATRules is what natkit rules prints with -o json.
type NATRules struct {
	Rules []control.RuleUse `json:"rules"`
}

// NATRulesText writes the rules in use with their use.
func NATRulesText(w io.Writer, rules []control.RuleUse) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	title := "sessions"
	if len(rules) > 0 && rules[0].Sessions == nil {
		title = "uses"
	}
	fmt.Fprintf(t, "id\t%s\tline\trule\n", title)
	for _, r := range rules {
		use := "-"
		switch {
		case r.Sessions != nil:
			use = fmt.Sprint(*r.Sessions)
		case r.Uses != nil:
			use = fmt.Sprint(*r.Uses)
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\n", r.ID, use, r.Line, r.Rule)
	}
	return t.Flush()
}

// AppendNATSession appends a session as a line, without its end.
func AppendNATSession(line []byte, s *rulefile.Session) []byte {
	line = fmt.Appendf(line, "%-5s %-15s %s%s -> %s", s.Protocol, s.State, s.Source, onInterface(s.SourceInterface), s.Destination)
	if s.SourceAfter != s.Source {
		line = fmt.Appendf(line, ", source %s", s.SourceAfter)
	}
	if s.DestinationAfter != s.Destination {
		line = fmt.Appendf(line, ", destination %s%s", s.DestinationAfter, onInterface(s.DestinationInterface))
	}
	return fmt.Appendf(line, ", packets %d/%d, bytes %d/%d, ends in %s, rule %s",
		s.Packets[0], s.Packets[1], s.Bytes[0], s.Bytes[1], endsIn(time.Duration(s.Expires)), s.Rule)
}

// onInterface is what an internal host is behind, where that tells subscribers apart.
func onInterface(name string) string {
	if name == "" {
		return ""
	}
	return " on " + name
}

// endsIn is what is left to a session in whole seconds: none has 0 that is open.
func endsIn(left time.Duration) time.Duration {
	return max(left+time.Second-1, 0).Truncate(time.Second)
}

// NATMappingText writes a mapping as a line.
func NATMappingText(w io.Writer, m *rulefile.Mapping) error {
	rest := ""
	if m.HoldDown {
		rest = ", in hold-down"
	}
	_, err := fmt.Fprintf(w, "%-5s %s%s <-> %s, %s, filtering %s%s\n", m.Class, natEnd(m.Inside.AddrPort), onInterface(m.Interface), natEnd(m.Outside.AddrPort), plural.Count(m.Sessions, "session"), m.Filtering, rest+explicitText(m.Explicit))
	return err
}

// explicitText says who keeps a mapping until when.
func explicitText(all []rulefile.ExplicitMapping) (text string) {
	for _, x := range all {
		text += fmt.Sprintf(", explicit (%s) for %s", x.By, endsIn(time.Duration(x.Left)))
		if x.Remote.IsValid() {
			text += " towards " + x.Remote.String()
		}
		if len(x.Filters) > 0 {
			text += ", lets in " + strings.Join(x.Filters, ", ")
		}
	}
	return text
}

func natEnd(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}

// NATEventText writes an event as a line.
func NATEventText(w io.Writer, e *rulefile.Event) error {
	s := &e.Session
	line := fmt.Appendf(nil, "%s %-7s %-5s %s -> %s", e.Time.Format("15:04:05.000"), e.Kind, s.Protocol, s.Source, s.Destination)
	if e.Reason != "" {
		line = fmt.Appendf(line, ": %s", e.Reason)
	} else {
		if s.SourceAfter != s.Source {
			line = fmt.Appendf(line, ", source %s", s.SourceAfter)
		}
		if s.DestinationAfter != s.Destination {
			line = fmt.Appendf(line, ", destination %s", s.DestinationAfter)
		}
		if e.Kind == "ended" {
			line = fmt.Appendf(line, ", packets %d/%d, bytes %d/%d", s.Packets[0], s.Packets[1], s.Bytes[0], s.Bytes[1])
		}
	}
	_, err := w.Write(append(line, '\n'))
	return err
}

// NATExplanation is which rules a packet meets, and why.
type NATExplanation struct {
	Packet string          `json:"packet"` // or what else was asked
	Steps  []rulefile.Step `json:"steps"`
	// Blocks answer a question about a subscriber or an external endpoint.
	Blocks []rulefile.ComputedBlock `json:"computed_blocks,omitempty"`
}

// Text writes the answers in the order in which they are asked for.
func (x *NATExplanation) Text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", x.Packet)
	for _, c := range x.Blocks {
		fmt.Fprintf(&b, "pool %s: block %d of subscriber %s is %s ports %d-%d\n", c.Pool, c.Number, c.Subscriber, c.Address, c.FirstPort, c.LastPort)
	}
	if len(x.Blocks)+len(x.Steps) == 0 {
		b.WriteString("no port block follows from the rules: natkit who searches the log\n")
	}
	var last rulefile.Stage
	for _, s := range x.Steps {
		stage := string(s.Stage)
		if s.Stage == last {
			stage = ""
		}
		last = s.Stage
		switch {
		case s.Text == "":
			fmt.Fprintf(&b, "%-12s %s\n", stage, s.Why)
		case s.Applies:
			fmt.Fprintf(&b, "%-12s %s (line %d): %s\n", stage, s.Text, s.Line, s.Why)
		default:
			fmt.Fprintf(&b, "%-12s   not %s (line %d): %s\n", stage, s.Text, s.Line, s.Why)
		}
	}
	_, err := io.WriteString(w, trimLines(b.String()))
	return err
}
