// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

//go:embed doctor.css
var doctorStyle string

// DoctorHTML writes what the doctor found as one page that needs nothing besides
// itself: the findings with curves of the window, the facts that they rest on, and
// what could not be seen.
func DoctorHTML(w io.Writer, s *snapshot.Snapshot, findings []causes.Finding) error {
	var header page
	header.header(s, findings)
	d := doctorHTML{
		Title: "natkit doctor: " + cmp.Or(s.Host.Hostname, "a machine"),
		About: strings.Join(strings.Fields(header.b.String()), " "),
	}
	unjudged := causes.NotJudged(s, findings)
	d.notJudged(unjudged)
	d.Findings, d.Window = withCurves(s, findings, "")
	if len(findings) == 0 {
		d.Nothing = nothingWrong(s, unjudged)
	}
	d.Facts = factsOf(s)
	for _, c := range s.Capabilities {
		if !c.OK {
			d.Unseen = append(d.Unseen, c)
		}
	}
	return d.write(w)
}

// withCurves are the findings with the curves that speak for them, and all curves of
// the window. Findings begin their places on the page with prefix.
func withCurves(s *snapshot.Snapshot, findings []causes.Finding, prefix string) (out []doctorFinding, window []markup) {
	curves := curvesOf(s)
	for _, f := range findings {
		h := doctorFinding{Finding: f, ID: prefix + f.Code}
		for _, c := range curves {
			if c.speaksFor(f.Code) {
				h.Plots = append(h.Plots, c.svg())
			}
		}
		out = append(out, h)
	}
	for _, c := range curves {
		window = append(window, c.svg())
	}
	return out, window
}

// notJudged says on the page what could not be judged.
func (d *doctorHTML) notJudged(causes []causes.Unjudged) {
	if len(causes) > 0 {
		d.NotJudged, d.Unjudged = notJudged(causes)
	}
}

func (d *doctorHTML) write(w io.Writer) error {
	body := tag("h1", text(d.Title)) + tag("p.dim", text(d.About))
	if d.NotJudged != "" {
		body += tag("article.warning", tag("p", tag("span.tag", "NOT JUDGED"), " ", text(d.NotJudged), ":"), tag("p.dim", text(d.Unjudged)))
	}
	body += said("p", d.Nothing) + each(d.Findings, doctorFinding.markup) + d.namespaces() + paragraphs(d.Closing)
	if len(d.Window) > 0 {
		body += tag("article", tag("h2", "The window"), windows(d.Window), windowLegend)
	}
	if len(d.Unseen) > 0 {
		body += tag("article", tag("h2", "Could not be seen"), tag("dl", each(d.Unseen, func(c snapshot.Capability) markup {
			reason := c.Reason
			if c.Costs != "" {
				reason += "; so " + c.Costs
			}
			return tag("dt", text(c.Name)) + tag("dd", text(reason))
		})))
	}
	if len(d.Facts) > 0 {
		body += tag("article", tag("h2", "The facts"), each(d.Facts, doctorFacts.markup))
	}
	return document{title: d.Title, style: pageStyle + doctorStyle, body: tag("main", body)}.write(w)
}

const windowLegend markup = `<p class="dim">Seconds since the window began.</p>
`

// windows are plots of the window beside each other.
func windows(plots []markup) markup {
	if len(plots) == 0 {
		return ""
	}
	return tag("div.windows", plots...)
}

// namespaces are a list with a link to each, and then each.
func (d *doctorHTML) namespaces() markup {
	if len(d.Namespaces) == 0 {
		return ""
	}
	list := tag("ul", each(d.Namespaces, func(n doctorNamespace) markup {
		var codes []string
		for _, f := range n.Findings {
			codes = append(codes, f.Code)
		}
		link := element("a", []attribute{{"href", "#" + n.ID}}, text(n.Title))
		return tag("li."+n.Worst.String(), severityTag(n.Worst), " ", link, ": ", text(strings.Join(codes, ", ")))
	}))
	return list + each(d.Namespaces, doctorNamespace.markup)
}

func (n doctorNamespace) markup() markup {
	body := tag("h2", text(n.Title)) + each(n.Findings, doctorFinding.markup)
	if len(n.Facts) > 0 {
		window := windows(n.Window)
		if window != "" {
			window += windowLegend
		}
		body += details(false, "The facts of "+n.Title, window, each(n.Facts, doctorFacts.markup))
	}
	return element("section", []attribute{{"id", n.ID}}, body)
}

func severityTag(s causes.Severity) markup {
	return tag("span.tag", text(strings.ToUpper(s.String())))
}

func (f doctorFinding) markup() markup {
	body := severityTag(f.Severity) + " " + tag("code", text(f.Code)) + tag("h2", text(f.Title)) + windows(f.Plots)
	if len(f.Evidence) > 0 {
		body += tag("h3", "Evidence") + scroll("evidence", tag("tr", tag("th", "what"), tag("th", "value"), tag("th", "source")), each(f.Evidence, func(e causes.Evidence) markup {
			return tag("tr", tag("td", text(e.What)), tag("td", text(e.Value)), tag("td.source", text(e.Source)))
		}))
	}
	if f.Why != "" {
		body += tag("h3", "Why it matters") + tag("p", text(f.Why))
	}
	body += commands("Remedy", f.Remedy) + commands("Verify", f.Verify)
	if len(f.Consequences) > 0 {
		body += tag("h3", "Follows from it, and ends with it") + each(f.Consequences, consequence)
	}
	return element("article", []attribute{{"class", f.Severity.String()}, {"id", f.ID}}, body)
}

// consequence is a finding that another one explains, with those that it explains.
func consequence(f causes.Finding) markup {
	about := tag("span.dim", text(fmt.Sprintf("(%s, %s)", f.Severity, f.Code)))
	return tag("p", text(f.Title), " ", about) + each(f.Consequences, consequence)
}

// commands are lines to type, and remarks between them.
func commands(title markup, lines []string) markup {
	if len(lines) == 0 {
		return ""
	}
	return tag("h3", title) + tag("pre.cmd", each(lines, func(line string) markup {
		if strings.HasPrefix(line, "#") {
			return tag("span.rem", text(line)) + "\n"
		}
		return text(line) + "\n"
	}))
}

func (f doctorFacts) markup() markup {
	cell := func(name string, i int, s string) markup {
		if i >= f.Words {
			name += ".num"
		}
		return tag(name, text(s))
	}
	var head, rows markup
	for i, h := range f.Head {
		head += cell("th", i, h)
	}
	head += said("th.track", f.Bar)
	for _, r := range f.Rows {
		var cells markup
		for i, c := range r.Cells {
			cells += cell("td", i, c)
		}
		if f.Bar != "" {
			var bar markup
			if r.Share != 0 {
				bar = element("span", []attribute{{"class", "bar"}, {"style", "width: " + r.Percent() + "%"}})
			}
			cells += tag("td.track", bar)
		}
		rows += tag("tr", cells)
	}
	return details(len(f.Rows) <= 12, f.Title, scroll("facts", tag("tr", head), rows))
}

// doctorHTML is a page about one namespace, or about several, which are then in
// Namespaces.
type doctorHTML struct {
	Title, About, Nothing string
	NotJudged, Unjudged   string // how much, and what
	Findings              []doctorFinding
	Namespaces            []doctorNamespace
	Closing               []string
	Window                []markup
	Facts                 []doctorFacts
	Unseen                []snapshot.Capability
}

// doctorNamespace is one of several on a page.
type doctorNamespace struct {
	ID, Title string
	Worst     causes.Severity
	Findings  []doctorFinding
	Window    []markup
	Facts     []doctorFacts
}

type doctorFinding struct {
	causes.Finding
	ID    string // of its place on the page
	Plots []markup
}

// doctorFacts is a table of facts; a row's Share, 0 to 1, is drawn as a bar, where Bar
// says what it is.
type doctorFacts struct {
	Title string
	Head  []string
	Words int // how many columns are words; the others are numbers
	Bar   string
	Rows  []doctorFact
}

type doctorFact struct {
	Cells []string
	Share float64
}

// Percent is the length of the bar.
func (f doctorFact) Percent() string { return digits(100 * max(0, min(1, f.Share))) }

// windowCurve is a small plot: some lines of the Series.
type windowCurve struct {
	title string
	times []float64
	names []string
	lines [][]float64
	codes []string // parts of the codes of findings that it speaks for
}

func (c *windowCurve) speaksFor(code string) bool {
	return slices.ContainsFunc(c.codes, func(part string) bool { return strings.Contains(code, part) })
}

// mostCurves is how many lines one plot can show apart.
const mostCurves = 8

// curvesOf joins the lines of the window into plots, those without a line left out.
func curvesOf(s *snapshot.Snapshot) []windowCurve {
	if s.Series == nil || len(s.Series.Times) < 2 || len(s.Series.Times) > snapshot.MaxSeries || !plottable(s.Series.Times) || !slices.IsSorted(s.Series.Times) {
		return nil
	}
	plots := []struct {
		title   string
		perTime bool // increases: shown by the second
		match   func(name string) bool
		codes   []string
	}{
		{"entries of the conntrack table", false, func(n string) bool { return n == "conntrack.count" }, []string{"conntrack", "table", "unreplied", "time-wait", "snat"}},
		{"refused by the table, per second", true, func(n string) bool {
			return n == "conntrack.drop" || n == "conntrack.early_drop" || n == "conntrack.insert_failed" || n == "conntrack.chaintoolong"
		}, []string{"conntrack", "table", "snat", "hash", "unreplied"}},
		{"invalid packets and clashes, per second", true, func(n string) bool {
			return n == "conntrack.invalid" || n == "conntrack.clash_resolve" || n == "conntrack.error"
		}, []string{"invalid", "clash", "checksum"}},
		{"softirq, % of each CPU", false, func(n string) bool { return strings.HasSuffix(n, ".softirq") }, []string{"cpu", "softirq", "backlog", "netfilter", "rules", "hook"}},
		{"connections refused by full queues, per second", true, func(n string) bool { return strings.HasPrefix(n, "TcpExt.Listen") || n == "TcpExt.TCPBacklogDrop" }, []string{"listen"}},
		{"retransmitted and failed, per second", true, func(n string) bool { return n == "Tcp.RetransSegs" || n == "Tcp.AttemptFails" }, []string{"table-full", "snat", "listen", "drop"}},
		{"discarded by IP, per second", true, func(n string) bool {
			return strings.HasPrefix(n, "Ip.") || n == "TcpExt.IPReversePathFilter" || n == "Icmp.OutTimeExcds"
		}, []string{"rp-filter", "forward", "mtu", "fragment", "route"}},
	}
	var out []windowCurve
	for _, p := range plots {
		c := windowCurve{title: p.title, times: s.Series.Times, codes: p.codes}
		for _, name := range sortedKeys(keysOf(s.Series.Lines)) {
			line := s.Series.Lines[name]
			if !p.match(name) || len(line) != len(c.times) || !plottable(line) || len(c.lines) == mostCurves {
				continue
			}
			values := slices.Clone(line)
			for i := range values {
				before := 0.0
				if i > 0 {
					before = c.times[i-1]
				}
				if p.perTime && c.times[i] > before {
					values[i] /= c.times[i] - before
				}
				if strings.HasSuffix(name, ".softirq") {
					values[i] *= 100
				}
			}
			_, short, _ := strings.Cut(name, ".")
			if strings.HasSuffix(name, ".softirq") {
				short, _, _ = strings.Cut(name, ".")
			}
			c.names, c.lines = append(c.names, short), append(c.lines, values)
		}
		if len(c.lines) > 0 {
			out = append(out, c)
		}
	}
	return out
}

// plottable says whether a file's numbers are such as a machine has.
func plottable(values []float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return v < 0 || v > 1e15 })
}

func keysOf(m map[string][]float64) map[string]string {
	out := map[string]string{}
	for name := range m {
		out[name] = ""
	}
	return out
}

// A window's plots stand side by side, or one below the other.
const (
	curveWidth  = 300
	curveHeight = 130
)

func (c *windowCurve) svg() markup {
	last, most := c.times[len(c.times)-1], 0.0
	for _, line := range c.lines {
		most = max(most, slices.Max(line))
	}
	if last <= 0 {
		last = 1
	}
	picture := drawSVG(curveWidth, curveHeight, "window", c.title, func(on *canvas) {
		p := &chart{canvas: on, x: linear(0, last, 4), y: linear(0, upTo(most), 3), left: 1, right: on.width - 6, top: 6, bottom: on.height}
		p.frame(false, textSize-2)
		for i, line := range c.lines { // without marks: the points are many
			var path []spot
			for j, v := range line {
				path = append(path, p.at(c.times[j], v))
			}
			look := lookOf(i, false).line
			look.width = 1.5
			p.lines(look, path...)
		}
	})
	var legend markup
	for i, name := range c.names {
		legend += tag("li", tag("span.key i-"+string(inks[i%len(inks)])), text(name))
	}
	return tag("figure.window", tag("figcaption", text(c.title)), markup(picture), tag("ul.legend", legend))
}

// factsOf are the facts of the snapshot as tables, those that have rows.
func factsOf(s *snapshot.Snapshot) []doctorFacts {
	tables := slices.Concat(trackingFacts(s.Conntrack), []doctorFacts{
		dropFacts(s.Drops), processorFacts(s.CPUs), interfaceFacts(s.Interfaces), counterFacts(s.Counters), ruleFacts(s.Chains), settingFacts(s.Sysctls),
	})
	if s.KernelLog != nil {
		f := doctorFacts{Title: "Kernel log", Head: []string{"line"}, Words: 1}
		for _, line := range s.KernelLog.Lines {
			f.row(0, line)
		}
		tables = append(tables, f)
	}
	return slices.DeleteFunc(tables, func(f doctorFacts) bool { return len(f.Rows) == 0 })
}

// row adds a row, with the share that its bar shows.
func (f *doctorFacts) row(share float64, cells ...string) {
	f.Rows = append(f.Rows, doctorFact{cells, share})
}

// trackingFacts are about the connection tracking table and what is in it.
func trackingFacts(ct *snapshot.Conntrack) []doctorFacts {
	if ct == nil {
		return nil
	}
	about := doctorFacts{Title: "Connection tracking", Head: []string{"what", "number"}, Words: 1, Bar: "share of the limit"}
	about.row(ratioOf(ct.Count, ct.Max), "table", entriesOf(ct))
	about.row(0, "buckets of the hash", fmt.Sprint(ct.Buckets))
	for _, name := range byCount(ct.Stats) {
		if n := ct.Stats[name]; n > 0 {
			about.row(0, name+" in the window", fmt.Sprint(n))
		}
	}
	t := ct.Table
	if t == nil {
		return []doctorFacts{about}
	}
	const share = "share of all entries"
	kinds := doctorFacts{Title: fmt.Sprintf("Its entries, read in %.2f s", t.DumpSeconds), Head: []string{"protocol, state or status", "entries"}, Words: 1, Bar: share}
	for _, rows := range []map[string]uint64{t.ByProtocol, t.ByState, t.ByStatus} {
		for _, name := range byCount(rows) {
			kinds.row(ratioOf(rows[name], t.Entries), name, fmt.Sprint(rows[name]))
		}
	}
	talkers := func(title, who string, list []snapshot.Talker) doctorFacts {
		f := doctorFacts{Title: title, Head: []string{who, "entries"}, Words: 1, Bar: share}
		for _, r := range list[:min(len(list), 10)] {
			f.row(ratioOf(r.Entries, t.Entries), r.Addr.String(), fmt.Sprint(r.Entries))
		}
		return f
	}
	ports := doctorFacts{Title: "Ports of source translation in use, towards one destination", Head: []string{"outside address", "destination", "ports"}, Words: 2, Bar: "share of all ports"}
	for _, r := range t.SNATPorts[:min(len(t.SNATPorts), 10)] {
		ports.row(ratioOf(r.Used, 65536-1024), fmt.Sprintf("%s %s", r.Protocol, r.Outside), fmt.Sprint(r.Dest), fmt.Sprint(r.Used))
	}
	return []doctorFacts{about, kinds, talkers("Sources with most entries", "source", t.Sources),
		talkers("Destinations with most entries", "destination", t.Destinations), ports}
}

func dropFacts(drops *snapshot.Drops) doctorFacts {
	f := doctorFacts{Title: "Dropped packets", Head: []string{"place", "reason", "cause", "interface", "packets"}, Words: 4, Bar: "share of the largest"}
	if drops == nil {
		return f
	}
	most := uint64(0)
	for _, r := range drops.Rows {
		if !r.Benign {
			most = max(most, r.Count)
		}
	}
	for _, r := range drops.Rows {
		if !r.Benign && len(f.Rows) < 20 {
			f.row(ratioOf(r.Count, most), r.Location, r.Reason, string(r.Cause), r.Interface, fmt.Sprint(r.Count))
		}
	}
	return f
}

func processorFacts(cpus []snapshot.CPU) doctorFacts {
	f := doctorFacts{Title: "CPUs", Head: []string{"CPU", "busy", "in softirq"}, Words: 1, Bar: "busy"}
	for _, c := range cpus {
		f.row(c.Busy, fmt.Sprint(c.Number), percent.Of(c.Busy, 0), percent.Of(c.Softirq, 0))
	}
	return f
}

func interfaceFacts(interfaces []snapshot.Interface) doctorFacts {
	f := doctorFacts{Title: "Interfaces, packets in the window", Head: []string{"interface", "kind", "addresses", "received", "sent", "dropped receiving", "dropped sending"}, Words: 3}
	for _, i := range interfaces {
		f.row(0, i.Name, i.Kind, prefixes(i), fmt.Sprint(i.RxPackets), fmt.Sprint(i.TxPackets), fmt.Sprint(i.RxDropped), fmt.Sprint(i.TxDropped))
	}
	return f
}

func counterFacts(counters map[string]uint64) doctorFacts {
	f := doctorFacts{Title: "Counters of the stack that changed", Head: []string{"counter", "in the window"}, Words: 1}
	for _, name := range byCount(counters) {
		if n := counters[name]; n > 0 {
			f.row(0, name, fmt.Sprint(n))
		}
	}
	return f
}

func ruleFacts(chains []snapshot.Chain) doctorFacts {
	f := doctorFacts{Title: "Rules", Head: []string{"by", "family", "table", "chain", "hook", "rules"}, Words: 5}
	for _, c := range chains {
		f.row(0, c.Backend, c.Family, c.Table, c.Name, c.Hook, fmt.Sprint(c.Rules))
	}
	return f
}

func settingFacts(settings map[string]string) doctorFacts {
	f := doctorFacts{Title: "Settings", Head: []string{"setting", "value"}, Words: 1}
	for _, name := range sortedKeys(settings) {
		f.row(0, name, settings[name])
	}
	return f
}

func prefixes(i snapshot.Interface) string {
	var words []string
	for _, a := range i.Addresses {
		words = append(words, a.String())
	}
	return strings.Join(words, " ")
}

func ratioOf(part, whole uint64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
