// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Measures two builds of natkit in turn and prints for each row how the second compares
// with the first (scripts/compare-speed.sh), or one build, and writes a table and a chart
// of its figures beside those of nftables and plain XDP forwarding (scripts/figures.sh).
//
//	compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] BEFORE AFTER
//	compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] -table FILE.md -chart FILE.svg BUILD
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"
)

// run is one command of natkit and the rows that are read from its result.
type run struct {
	args  []string
	long  bool // more than 64 512 sessions
	fixed bool // its trials have a length of their own
	rows  []row
}

// row is one figure of a run: a metric of a router under conditions.
type row struct {
	name   string
	router string
	metric string
	lower  bool // less is better
	unit   unit
	flows  int // where the metric is measured at several numbers of flows
}

// unit is how a metric is written.
type unit struct {
	scale float64
	name  string
}

var (
	perPacket  = unit{1, "ns a packet"}
	perSession = unit{1, "ns a session"}
	rate       = unit{1e-6, "million packets/s"}
	opened     = unit{1, "connections/s"}
	perGbit    = unit{1e3, "CPU ms a Gbit"}
)

const manyRouters = "nft,xdp-forward,ebpf,ebpf-tc"

var runs = []run{
	{args: []string{"bench", "udp", "--flows", "10000", "--router", manyRouters}, rows: []row{
		{name: "one way, 10 000 flows, XDP", router: "ebpf", metric: "cost_ns", lower: true, unit: perPacket},
		{name: "one way, 10 000 flows, tc", router: "ebpf-tc", metric: "cost_ns", lower: true, unit: perPacket},
	}},
	{args: []string{"bench", "udp", "--both-ways", "--flows", "10000", "--router", manyRouters + ",accel,accel-tc"}, rows: []row{
		{name: "both ways, 10 000 flows, XDP", router: "ebpf", metric: "cost_ns", lower: true, unit: perPacket},
		{name: "both ways, 10 000 flows, tc", router: "ebpf-tc", metric: "cost_ns", lower: true, unit: perPacket},
		{name: "both ways, 10 000 flows, accel at XDP", router: "accel", metric: "cost_ns", lower: true, unit: perPacket},
		{name: "both ways, 10 000 flows, accel at tc", router: "accel-tc", metric: "cost_ns", lower: true, unit: perPacket},
	}},
	{args: []string{"bench", "cps", "--router", manyRouters}, rows: []row{
		{name: "new UDP sessions, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true, unit: perSession},
		{name: "new UDP sessions, tc", router: "ebpf-tc", metric: "new_flow_cost_ns", lower: true, unit: perSession},
		{name: "64 512 sessions, XDP", router: "ebpf", metric: "established_pps", flows: 64512, unit: rate},
		{name: "64 512 sessions, tc", router: "ebpf-tc", metric: "established_pps", flows: 64512, unit: rate},
	}},
	{args: []string{"bench", "cps", "--protocol", "tcp", "--router", manyRouters}, rows: []row{
		{name: "TCP opened and closed, XDP", router: "ebpf", metric: "establishment_cps", unit: opened},
		{name: "TCP opened and closed, tc", router: "ebpf-tc", metric: "establishment_cps", unit: opened},
	}},
	// nft is not asked for so many: the machine's own limit would have to be raised.
	{long: true, args: []string{"bench", "cps", "--router", "ebpf", "--sessions", "1000000"}, rows: []row{
		{name: "a million new UDP sessions, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true, unit: perSession},
		{name: "a million sessions, XDP", router: "ebpf", metric: "established_pps", flows: 1000000, unit: rate},
	}},
	{long: true, args: []string{"bench", "cps", "--router", "ebpf", "--held", "459776"}, rows: []row{
		{name: "new UDP sessions, half-full table, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true, unit: perSession},
	}},
	{fixed: true, args: []string{"bench", "bulk", "--router", "none,ebpf-tc", "--streams", "1", "--direction", "up"}, rows: []row{
		{name: "TCP bulk, CPU time a Gbit, tc", router: "ebpf-tc", metric: "cpu_seconds_per_gbit", lower: true, unit: perGbit},
	}},
}

// references are the routers whose figures stand beside each ratio.
var references = []string{"nft", "xdp-forward", "none"}

// figure is what is read of natkit's JSON.
type figure struct {
	Router string `json:"router"`
	Metric string `json:"metric"`
	Params struct {
		Flows int `json:"flows"`
	} `json:"params"`
	Median float64 `json:"median"`
	Label  string  `json:"label"`
}

type result struct {
	Figures []figure `json:"figures"`
}

func main() {
	log.SetFlags(0)
	rounds := flag.Int("rounds", 9, "rounds")
	only := flag.String("rows", "", "only rows that match this regular expression, or list")
	duration := flag.Duration("duration", 300*time.Millisecond, "of a trial")
	quick := flag.Bool("quick", false, "leave out rows of many sessions")
	table := flag.String("table", "", "write the table of one build between the marks in this file")
	chart := flag.String("chart", "", "draw the chart of one build into this file")
	flag.Parse()
	if *only == "list" {
		for _, r := range runs {
			for _, row := range r.rows {
				fmt.Println(row.name)
			}
		}
		return
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		log.Fatal(err)
	}
	one := *table != "" && *chart != ""
	if flag.NArg() != map[bool]int{false: 2, true: 1}[one] || *rounds < 1 {
		log.Fatal("usage: compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] BEFORE AFTER\n" +
			"       compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] -table FILE.md -chart FILE.svg BUILD")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var chosen []run
	for _, r := range runs {
		r.rows = slices.DeleteFunc(slices.Clone(r.rows), func(row row) bool { return !wanted.MatchString(row.name) })
		if len(r.rows) > 0 && (!r.long || !*quick) {
			chosen = append(chosen, r)
		}
	}
	if len(chosen) == 0 {
		log.Fatalf("no row matches %q; -r list lists them", *only)
	}
	if one {
		if err := figures(ctx, chosen, *rounds, *duration, flag.Arg(0), *table, *chart); err != nil {
			log.Fatal(err)
		}
		return
	}
	fmt.Printf("\n%-40s %-24s %-14s %s\n", "row (better is more)", "after : before", "verdict", "after (before), times as good as ...")
	for _, r := range chosen {
		if err := compare(ctx, r, *rounds, *duration, flag.Args()); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("\nn = %d rounds; median (least - most) of the ratios of the rounds. A verdict holds with 95 %% confidence:\n"+
		"the interval of order statistics around the median is above or below 1, or within 2 %% of it.\n", *rounds)
}

// taken are the figures of a row or of a row and a reference, by round.
type taken map[string][]float64

// round measures a run once and keeps the figures of its rows.
func (t taken) round(ctx context.Context, r run, duration time.Duration, build string) error {
	args := append(slices.Clone(r.args), "--trials", "1", "-o", "json")
	if !r.fixed {
		args = append(args, "--duration", duration.String())
	}
	res, err := measure(ctx, build, args)
	if err != nil {
		return err
	}
	for _, row := range r.rows {
		v, ok := res.value(row, row.router)
		if !ok {
			return fmt.Errorf("%s: no figure %s of %s", row.name, row.metric, row.router)
		}
		t[row.name] = append(t[row.name], v)
		for _, ref := range references {
			if to, ok := res.value(row, ref); ok {
				t[row.name+ref] = append(t[row.name+ref], v/to)
			}
		}
	}
	return nil
}

// compare runs both builds in turn and prints the rows.
func compare(ctx context.Context, r run, rounds int, duration time.Duration, builds []string) error {
	values := [2]taken{{}, {}}
	for round := range rounds {
		for turn := range 2 {
			build := (round + turn) % 2
			progress("round %d of %d: %s", round+1, rounds, strings.Join(r.args, " "))
			if err := values[build].round(ctx, r, duration, builds[build]); err != nil {
				return err
			}
		}
	}
	progress("")
	for _, row := range r.rows {
		ratios := make([]float64, rounds)
		for i := range ratios {
			ratios[i] = values[1][row.name][i] / values[0][row.name][i]
		}
		slices.Sort(ratios)
		var beside []string
		for _, ref := range references {
			if _, ok := values[1][row.name+ref]; ok {
				before, after := slices.Sorted(slices.Values(values[0][row.name+ref])), slices.Sorted(slices.Values(values[1][row.name+ref]))
				beside = append(beside, fmt.Sprintf("%s %.2f (%.2f)", ref, median(after), median(before)))
			}
		}
		fmt.Printf("%-40s %-24s %-14s %s\n", row.name, fmt.Sprintf("%.3f (%.3f - %.3f)", median(ratios), ratios[0], ratios[rounds-1]),
			verdict(ratios), strings.Join(beside, ", "))
	}
	return nil
}

// figures runs one build and writes the table and the chart.
func figures(ctx context.Context, runs []run, rounds int, duration time.Duration, build, table, chart string) error {
	values := taken{}
	for round := range rounds {
		for _, r := range runs {
			progress("round %d of %d: %s", round+1, rounds, strings.Join(r.args, " "))
			if err := values.round(ctx, r, duration, build); err != nil {
				return err
			}
		}
	}
	progress("")
	var rows []row
	for _, r := range runs {
		rows = append(rows, r.rows...)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| What | natkit | times nft | times plain XDP forwarding | times no NAT |\n|---|---|---|---|---|\n")
	for _, row := range rows {
		absolute := slices.Clone(values[row.name])
		for i, v := range absolute {
			if row.lower {
				v = 1 / v
			}
			absolute[i] = v * row.unit.scale
		}
		fmt.Fprintf(&b, "| %s | %s %s |", row.name, spread(absolute), row.unit.name)
		for _, ref := range references {
			fmt.Fprintf(&b, " %s |", spread(values[row.name+ref]))
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nMedian (least - most) of %d rounds of %s a trial; each ratio is of one round, more is better.\n", rounds, duration)
	if err := insert(table, b.String()); err != nil {
		return err
	}
	return os.WriteFile(chart, []byte(draw(rows, values)), 0o644)
}

// spread is a median with the least and the most, of three figures that count.
func spread(values []float64) string {
	if len(values) == 0 {
		return ""
	}
	sorted := slices.Sorted(slices.Values(values))
	digits := max(0, 2-int(math.Floor(math.Log10(median(sorted)))))
	return fmt.Sprintf("%.*f (%.*f - %.*f)", digits, median(sorted), digits, sorted[0], digits, sorted[len(sorted)-1])
}

const (
	beginMark = "<!-- figures: scripts/figures.sh -->\n"
	endMark   = "<!-- end of figures -->\n"
)

// insert puts a text between the marks of a file.
func insert(file, text string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(b), beginMark)
	_, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		return fmt.Errorf("%s: has not the lines %q and %q", file, beginMark, endMark)
	}
	return os.WriteFile(file, []byte(before+beginMark+text+endMark+after), 0o644)
}

// draw is a chart of the rows with a ratio to nft or to no NAT: a bar for each, and a mark
// where plain XDP forwarding of the same rounds is.
func draw(rows []row, values taken) string {
	const (
		left, width, line, top = 300.0, 420.0, 26.0, 44.0
	)
	most := 1.0
	ratio := func(row row) (float64, string) {
		for _, ref := range []string{"nft", "none"} {
			if of := values[row.name+ref]; len(of) > 0 {
				return median(slices.Sorted(slices.Values(of))), ref
			}
		}
		return 0, ""
	}
	rows = slices.DeleteFunc(slices.Clone(rows), func(row row) bool { v, _ := ratio(row); return v == 0 })
	forward := func(row row) float64 { // in the same unit: how many times nft plain XDP forwarding is
		of := values[row.name+"xdp-forward"]
		v, ref := ratio(row)
		if len(of) == 0 || ref != "nft" {
			return 0
		}
		return v / median(slices.Sorted(slices.Values(of)))
	}
	for _, row := range rows {
		v, _ := ratio(row)
		most = max(most, v, forward(row))
	}
	most = math.Ceil(most)
	x := func(v float64) float64 { return left + v/most*width }
	height := top + line*float64(len(rows)) + 30
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 %.0f" width="800" height="%.0f" role="img" aria-label="natkit against nftables">
<style>text{font:13px sans-serif;fill:#1f2328}.v{fill:#fff!important;font-size:12px}.s{font-size:11px;fill:#59636e}@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.bg{fill:#0d1117}}</style>
<rect class="bg" width="800" height="%.0f" fill="#fff"/>
<text x="16" y="22" font-weight="bold">How many times as fast as NAT by nftables</text>
`, height, height, height)
	for v := 0.0; v <= most; v++ {
		fmt.Fprintf(&b, `<path d="M%.1f %.0fV%.0f" stroke="#8c959f" stroke-opacity="%s"/><text class="s" x="%.1f" y="%.0f" text-anchor="middle">%.0f</text>`+"\n",
			x(v), top-6, height-26, map[bool]string{true: "1", false: "0.3"}[v == 1], x(v), height-10, v)
	}
	for i, row := range rows {
		y := top + line*float64(i)
		v, ref := ratio(row)
		name := row.name
		if ref == "none" {
			name += " (no NAT = 1)"
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%.1f" text-anchor="end">%s</text><rect x="%.1f" y="%.1f" width="%.1f" height="16" rx="2" fill="#1f6feb"/>`+"\n",
			left-10, y+13, name, x(0), y, x(v)-x(0))
		fmt.Fprintf(&b, `<text class="v" x="%.1f" y="%.1f" text-anchor="end">%.2f</text>`+"\n", x(v)-5, y+13, v)
		if f := forward(row); f > 0 {
			fmt.Fprintf(&b, `<path d="M%.1f %.1fv22" stroke="#d29922" stroke-width="3"/>`+"\n", x(f), y-3)
		}
	}
	fmt.Fprintf(&b, `<path d="M560 12v14" stroke="#d29922" stroke-width="3"/><text class="s" x="570" y="23">plain XDP forwarding, no NAT</text>`+"\n</svg>\n")
	return b.String()
}

// progress shows on a terminal what is measured now.
func progress(format string, args ...any) {
	if term.IsTerminal(int(os.Stderr.Fd())) {
		fmt.Fprintf(os.Stderr, "\r\033[K"+format, args...)
	}
}

func measure(ctx context.Context, natkit string, args []string) (*result, error) {
	cmd := exec.CommandContext(ctx, natkit, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	var errors strings.Builder
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("natkit %s: %w\n%s", strings.Join(args, " "), err, errors.String())
	}
	var res result
	if err := json.Unmarshal(out, &res); err != nil {
		return nil, fmt.Errorf("natkit %s: %w", strings.Join(args, " "), err)
	}
	return &res, nil
}

// value is the row's figure of a router, so that more is better.
func (r *result) value(want row, router string) (float64, bool) {
	for _, f := range r.Figures {
		if f.Router != router || f.Metric != want.metric || want.flows != 0 && f.Params.Flows != want.flows || f.Median <= 0 {
			continue
		}
		if want.lower {
			return 1 / f.Median, true
		}
		return f.Median, true
	}
	return 0, false
}

func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// interval is the narrowest symmetric interval of order statistics that holds the median
// with 95 % confidence (binomial distribution); of fewer than six there is none.
func interval(sorted []float64) (low, high float64, ok bool) {
	n := len(sorted)
	tail, term := 0.0, math.Pow(0.5, float64(n))
	k := 0 // as many may be cut off at each end
	for ; k <= n/2; k++ {
		tail += term
		if 2*tail > 0.05 {
			break
		}
		term = term * float64(n-k) / float64(k+1)
	}
	if k == 0 {
		return 0, 0, false
	}
	return sorted[k-1], sorted[n-k], true
}

func verdict(sorted []float64) string {
	const same = 0.02
	low, high, ok := interval(sorted)
	switch {
	case !ok:
		return "too few rounds"
	case low > 1-same && high < 1+same:
		return "the same"
	case low > 1:
		return "faster"
	case high < 1:
		return "slower"
	}
	return "can't tell"
}
