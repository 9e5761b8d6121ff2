// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"natkit/bench"
)

// BulkPaper writes what came of the experiment of 1997 in the form of its own
// tables, for each set-up a line each way, with the published ones beside it.
func BulkPaper(w io.Writer, r *bench.Result) error {
	p := &page{}
	p.b.WriteString("The rule-count experiment of 1997, on this machine\n")
	p.text("", "  ", printable(machine(r.Environment)))
	p.text("", "  ", when(r))
	p.text("$ ", "    ", printable(r.Command))
	p.b.WriteByte('\n')
	p.text("", "", "20 MB by TCP through the router: average seconds of the transfers, and the kB/s that makes; processor time of "+
		"the whole machine for each MB, from longer transfers (median). \"noisy\" is the processor time.")

	figure := func(setup, direction, metric string) (bench.Figure, bool) {
		i := slices.IndexFunc(r.Figures, func(f bench.Figure) bool {
			return f.Params.Setup == setup && f.Params.Direction == direction && f.Metric == metric && len(f.Values) > 0
		})
		if i < 0 {
			return bench.Figure{}, false
		}
		return rebuilt(r.Figures[i]), true
	}
	published := func(setup, direction, metric string) string {
		for _, t := range r.Published {
			if t.Params.Setup == setup && t.Params.Direction == direction && t.Metric == metric {
				if metric == bench.MetricTransferSeconds {
					return fmt.Sprintf("%.2f", t.Value)
				}
				return fmt.Sprintf("%.0f", t.Value)
			}
		}
		return "-"
	}

	line := func(way, n, seconds, spread, kbs, cpu, theirSeconds, theirKBs, remark string) {
		p.line("  %-16s %3s %8s %17s %9s %7s | %6s %5s  %s", way, n, seconds, spread, kbs, cpu, theirSeconds, theirKBs, remark)
	}
	p.b.WriteByte('\n')
	p.line("  %-64s| published", "")
	line("", "n", "s", "(min-max)", "kB/s", "µs/MB", "s", "kB/s", "")
	for _, setup := range setupsOf(r) {
		p.line("%s", printable(setup))
		for _, direction := range bench.PaperDirections {
			n, seconds, spread, kbs, cpu, remark := "-", "-", "", "-", "-", ""
			times, ok := figure(setup, direction, bench.MetricTransferSeconds)
			if ok {
				n, seconds = fmt.Sprint(len(times.Values)), fmt.Sprintf("%.4f", mean(times.Values))
				spread = fmt.Sprintf("(%.4f-%.4f)", times.Min, times.Max)
			}
			if rates, have := figure(setup, direction, bench.MetricTransferKBs); have && ok {
				// As the paper does: of the average time. Each transfer has as many bytes.
				kbs = fmt.Sprintf("%.0f", rates.Values[0]*times.Values[0]/mean(times.Values))
			}
			if f, ok := figure(setup, direction, bench.MetricCPUPerGbit); ok {
				cpu = fmt.Sprintf("%.0f", f.Median*microsecondsPerMB)
				remark = f.Label
			}
			line(ways[direction], n, seconds, spread, kbs, cpu,
				published(setup, direction, bench.MetricTransferSeconds), published(setup, direction, bench.MetricTransferKBs), remark)
		}
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
	_, err := io.WriteString(w, p.b.String())
	return err
}

var ways = map[string]string{bench.DirectionDown: "server to client", bench.DirectionUp: "client to server"}

// microsecondsPerMB turns seconds for a Gbit into microseconds for a million bytes.
const microsecondsPerMB = 8e-3 * 1e6

// line writes one line of a table.
func (p *page) line(format string, args ...any) {
	p.b.WriteString(strings.TrimRight(fmt.Sprintf(format, args...), " ") + "\n")
}

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
