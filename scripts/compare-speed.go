// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Measures two builds of natkit in turn and prints for each row how the second compares
// with the first: what scripts/compare-speed.sh runs.
//
//	compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] BEFORE AFTER
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
	flows  int  // where the metric is measured at several numbers of flows
}

const manyRouters = "nft,xdp-forward,ebpf,ebpf-tc"

var runs = []run{
	{args: []string{"bench", "udp", "--flows", "10000", "--router", manyRouters}, rows: []row{
		{name: "one way, 10 000 flows, XDP", router: "ebpf", metric: "cost_ns", lower: true},
		{name: "one way, 10 000 flows, tc", router: "ebpf-tc", metric: "cost_ns", lower: true},
	}},
	{args: []string{"bench", "udp", "--both-ways", "--flows", "10000", "--router", manyRouters + ",accel,accel-tc"}, rows: []row{
		{name: "both ways, 10 000 flows, XDP", router: "ebpf", metric: "cost_ns", lower: true},
		{name: "both ways, 10 000 flows, tc", router: "ebpf-tc", metric: "cost_ns", lower: true},
		{name: "both ways, 10 000 flows, accel at XDP", router: "accel", metric: "cost_ns", lower: true},
		{name: "both ways, 10 000 flows, accel at tc", router: "accel-tc", metric: "cost_ns", lower: true},
	}},
	{args: []string{"bench", "cps", "--router", manyRouters}, rows: []row{
		{name: "new UDP sessions, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true},
		{name: "new UDP sessions, tc", router: "ebpf-tc", metric: "new_flow_cost_ns", lower: true},
		{name: "64 512 sessions, XDP", router: "ebpf", metric: "established_pps", flows: 64512},
		{name: "64 512 sessions, tc", router: "ebpf-tc", metric: "established_pps", flows: 64512},
	}},
	{args: []string{"bench", "cps", "--protocol", "tcp", "--router", manyRouters}, rows: []row{
		{name: "TCP opened and closed, XDP", router: "ebpf", metric: "establishment_cps"},
		{name: "TCP opened and closed, tc", router: "ebpf-tc", metric: "establishment_cps"},
	}},
	// nft is not asked for so many: the machine's own limit would have to be raised.
	{long: true, args: []string{"bench", "cps", "--router", "ebpf", "--sessions", "1000000"}, rows: []row{
		{name: "a million new UDP sessions, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true},
		{name: "a million sessions, XDP", router: "ebpf", metric: "established_pps", flows: 1000000},
	}},
	{long: true, args: []string{"bench", "cps", "--router", "ebpf", "--held", "459776"}, rows: []row{
		{name: "new UDP sessions, half-full table, XDP", router: "ebpf", metric: "new_flow_cost_ns", lower: true},
	}},
	{fixed: true, args: []string{"bench", "bulk", "--router", "none,ebpf-tc", "--streams", "1", "--direction", "up"}, rows: []row{
		{name: "TCP bulk, CPU time a Gbit, tc", router: "ebpf-tc", metric: "cpu_seconds_per_gbit", lower: true},
	}},
}

// references are the routers whose figures stand beside each ratio.
var references = []string{"nft", "xdp-forward"}

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
	if flag.NArg() != 2 || *rounds < 1 {
		log.Fatal("usage: compare-speed [-rounds N] [-rows REGEXP] [-duration D] [-quick] BEFORE AFTER")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	fmt.Printf("\n%-40s %-24s %-14s %s\n", "row (better is more)", "after : before", "verdict", "after (before), times as good as ...")
	found := false
	for _, r := range runs {
		r.rows = slices.DeleteFunc(slices.Clone(r.rows), func(row row) bool { return !wanted.MatchString(row.name) })
		if len(r.rows) == 0 || *quick && r.long {
			continue
		}
		found = true
		if err := compare(ctx, r, *rounds, *duration, flag.Args()); err != nil {
			log.Fatal(err)
		}
	}
	if !found {
		log.Fatalf("no row matches %q; -r list lists them", *only)
	}
	fmt.Printf("\nn = %d rounds; median (least - most) of the ratios of the rounds. A verdict holds with 95 %% confidence:\n"+
		"the interval of order statistics around the median is above or below 1, or within 2 %% of it.\n", *rounds)
}

// compare runs both builds in turn and prints the rows.
func compare(ctx context.Context, r run, rounds int, duration time.Duration, builds []string) error {
	values := map[string][2][]float64{} // by row or row and reference
	keep := func(key string, build int, v float64) {
		pair := values[key]
		pair[build] = append(pair[build], v)
		values[key] = pair
	}
	for round := range rounds {
		for turn := range 2 {
			build := (round + turn) % 2
			progress("round %d of %d: %s", round+1, rounds, strings.Join(r.args, " "))
			args := append(slices.Clone(r.args), "--trials", "1", "-o", "json")
			if !r.fixed {
				args = append(args, "--duration", duration.String())
			}
			res, err := measure(ctx, builds[build], args)
			if err != nil {
				return err
			}
			for _, row := range r.rows {
				v, ok := res.value(row, row.router)
				if !ok {
					return fmt.Errorf("%s: no figure %s of %s", row.name, row.metric, row.router)
				}
				keep(row.name, build, v)
				for _, ref := range references {
					if to, ok := res.value(row, ref); ok {
						keep(row.name+ref, build, v/to)
					}
				}
			}
		}
	}
	progress("")
	for _, row := range r.rows {
		pair := values[row.name]
		ratios := make([]float64, rounds)
		for i := range ratios {
			ratios[i] = pair[1][i] / pair[0][i]
		}
		slices.Sort(ratios)
		var beside []string
		for _, ref := range references {
			if of, ok := values[row.name+ref]; ok {
				slices.Sort(of[0])
				slices.Sort(of[1])
				beside = append(beside, fmt.Sprintf("%s %.2f (%.2f)", ref, median(of[1]), median(of[0])))
			}
		}
		fmt.Printf("%-40s %-24s %-14s %s\n", row.name, fmt.Sprintf("%.3f (%.3f - %.3f)", median(ratios), ratios[0], ratios[rounds-1]),
			verdict(ratios), strings.Join(beside, ", "))
	}
	return nil
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
