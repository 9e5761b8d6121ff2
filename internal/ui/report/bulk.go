// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"
	"strings"

	"natkit/internal/bench"
)

// The experiment of 1997 in the form of its own tables: for each set-up a line each
// way, with the published ones beside it.

const paperTitle = "The rule-count experiment of 1997, on this machine"

// paperForm says what the columns of the tables are.
const paperForm = "20 MB by TCP through the router: average seconds of the transfers, and the kB/s that makes; processor time of " +
	"the whole machine for each MB, from longer transfers (median). \"noisy\" is the processor time."

// paperLine is one set-up one way; what was not measured is "-".
type paperLine struct {
	setup, way                        string
	n, seconds, low, high, kbs, cpuMB string
	theirSeconds, theirKBs            string
	remark                            string
}

// isPaper tells whether a result is that experiment.
func isPaper(r *bench.Result) bool { return r.Kind == "bulk" && len(setupsOf(r)) > 0 }

// paperLines are the tables' lines, in their order.
func paperLines(r *bench.Result) (lines []paperLine) {
	for _, setup := range setupsOf(r) {
		for _, direction := range bench.PaperDirections {
			figure := func(metric string) (bench.Figure, bool) {
				i := slices.IndexFunc(r.Figures, func(f bench.Figure) bool {
					return f.Params.Setup == setup && f.Params.Direction == direction && f.Metric == metric && len(f.Values) > 0
				})
				if i < 0 {
					return bench.Figure{}, false
				}
				return rebuilt(r.Figures[i]), true
			}
			published := func(metric, format string) string {
				for _, t := range r.Published {
					if t.Params.Setup == setup && t.Params.Direction == direction && t.Metric == metric {
						return fmt.Sprintf(format, t.Value)
					}
				}
				return "-"
			}
			l := paperLine{setup: setup, way: ways[direction], n: "-", seconds: "-", low: "-", high: "-", kbs: "-", cpuMB: "-",
				theirSeconds: published(bench.MetricTransferSeconds, "%.2f"), theirKBs: published(bench.MetricTransferKBs, "%.0f")}
			if times, ok := figure(bench.MetricTransferSeconds); ok {
				l.n, l.seconds = fmt.Sprint(len(times.Values)), fmt.Sprintf("%.4f", mean(times.Values))
				l.low, l.high = fmt.Sprintf("%.4f", times.Min), fmt.Sprintf("%.4f", times.Max)
				if rates, ok := figure(bench.MetricTransferKBs); ok && times.Min > 0 {
					// As the paper does: of the average time. Each transfer has as many bytes.
					l.kbs = fmt.Sprintf("%.0f", rates.Values[0]*times.Values[0]/mean(times.Values))
				}
			}
			if f, ok := figure(bench.MetricCPUPerGbit); ok {
				l.cpuMB, l.remark = fmt.Sprintf("%.0f", f.Median*microsecondsPerMB), f.Label
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// paper writes the experiment for people.
func (p *page) paper(r *bench.Result) {
	p.b.WriteString(paperTitle + "\n")
	p.text("", "  ", printable(machine(r.Environment)))
	p.text("", "  ", when(r))
	p.text("$ ", "    ", printable(r.Command))
	p.b.WriteByte('\n')
	p.text("", "", paperForm)
	line := func(way, n, seconds, spread, kbs, cpu, theirSeconds, theirKBs, remark string) {
		s := fmt.Sprintf("  %-16s %3s %8s %17s %9s %7s | %6s %5s  %s", way, n, seconds, spread, kbs, cpu, theirSeconds, theirKBs, remark)
		p.b.WriteString(strings.TrimRight(s, " ") + "\n")
	}
	p.b.WriteByte('\n')
	fmt.Fprintf(&p.b, "  %-64s| published\n", "")
	line("", "n", "s", "(min-max)", "kB/s", "µs/MB", "s", "kB/s", "")
	setup := ""
	for i, l := range paperLines(r) {
		if i == 0 || l.setup != setup {
			setup = l.setup
			p.b.WriteString(printable(setup) + "\n")
		}
		spread := ""
		if l.seconds != "-" {
			spread = "(" + l.low + "-" + l.high + ")"
		}
		line(l.way, l.n, l.seconds, spread, l.kbs, l.cpuMB, l.theirSeconds, l.theirKBs, printable(l.remark))
	}
	p.b.WriteByte('\n')
	for _, u := range r.Routers {
		what := u.Describe
		if u.Unsupported != "" {
			what = "NOT MEASURED: " + u.Unsupported
		}
		p.text("  "+printable(u.Name)+": ", "      ", printable(what))
	}
	if len(r.Published) > 0 {
		p.b.WriteByte('\n')
		p.text("Published: ", "  ", printable(r.Published[0].Source)+".")
	}
	for _, note := range r.Notes {
		p.b.WriteByte('\n')
		p.text("Note: ", "      ", printable(note))
	}
}

// paperCards adds the tables to a page as one, and pictures of natkit's own
// figures: beside published ones, which are thousands of times as slow, nothing of
// them would be seen.
func (out *htmlSection) paperCards(r *bench.Result) {
	out.Title = paperTitle
	card := htmlCard{Title: "Both tables, beside the published ones", Text: paperForm, Table: htmlTable{Open: true,
		Head: []string{"set-up", "way", "s", "kB/s", "published s", "published kB/s", "n", "min s", "max s", "CPU µs/MB", "remarks"}}}
	for _, l := range paperLines(r) {
		cells := []htmlCell{{l.setup, "wrap"}, {l.way, ""}, {l.seconds, "num"}, {l.kbs, "num"}, {l.theirSeconds, "num theirs"}, {l.theirKBs, "num theirs"}}
		for _, number := range []string{l.n, l.low, l.high, l.cpuMB} {
			cells = append(cells, htmlCell{number, "num"})
		}
		card.Table.Rows = append(card.Table.Rows, htmlRow{Cells: append(cells, htmlCell{l.remark, "wrap"})})
	}
	out.Cards = append(out.Cards, card)
	if len(r.Published) > 0 {
		out.Sources = append(out.Sources, r.Published[0].Source)
	}
	var figures []bench.Figure
	for _, f := range r.Figures {
		if f.Params.Setup != "" {
			f.Router, f.Params.Setup = f.Params.Setup, ""
		}
		figures = append(figures, f)
	}
	out.cards(sheetsOf(setupsOf(r), figures, nil), "set-up")
}

var ways = map[string]string{bench.DirectionDown: "server to client", bench.DirectionUp: "client to server"}

// microsecondsPerMB turns seconds for a Gbit into microseconds for a million bytes.
const microsecondsPerMB = 8e-3 * 1e6

// setupsOf are the set-ups that the result has figures of, in their order.
func setupsOf(r *bench.Result) (setups []string) {
	for _, f := range r.Figures {
		if s := f.Params.Setup; s != "" && !slices.Contains(setups, s) {
			setups = append(setups, s)
		}
	}
	return setups
}

func mean(values []float64) (sum float64) {
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}
