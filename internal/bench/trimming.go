// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// TrimmingOptions is how the netfilter-trimming report is repeated: its set-ups as
// routers, and how long each looks.
type TrimmingOptions struct {
	Routers  []Router
	Flows    int
	Duration time.Duration // of a trial
	Trials   int           // at each rate

	About

	goal SearchGoal // of tests; GoalNDR unless given
}

// lineRate64 is how many 64-byte frames a second a line of 100 Mbit/s carries:
// each takes 20 bytes more, for preamble and gap.
const lineRate64 = 100e6 / 8 / (64 + 20)

// Trimming repeats the netfilter-trimming report: the loss of 64-byte UDP frames
// at the rate of its line and ten times that, the highest rate without loss, the
// router's processor time; and what a frame costs on one core and on two, for a
// router with both cores of a small machine leaves no other for the generator.
func Trimming(ctx context.Context, o TrimmingOptions) (*Result, error) {
	o.About.complete()
	begun := time.Now()
	u := UDPOptions{
		Routers: o.Routers, Sizes: []FrameSize{{Bytes: MinFrame}}, Flows: []int{o.Flows}, Cores: []int{1},
		Duration: o.Duration, Trials: o.Trials, About: o.About,
	}
	u.Plan = nil // of both parts together
	goal := cmp.Or(o.goal, GoalNDR)
	goal.Trial, goal.Sum = o.Duration, goal.Sum/goal.Trial*o.Duration
	u.Rates, u.Goals = []Rate{{PPS: lineRate64}, {PPS: 10 * lineRate64}}, []SearchGoal{goal}
	flat := u
	flat.Rates, flat.Goals = nil, nil
	if cpus, err := allowedCPUs(); err == nil && len(cpus) > 1 {
		flat.Cores = []int{1, 2}
	}
	what, takes := u.plan()
	_, more := flat.plan()
	o.Plan(what+"; then what a frame costs", takes+more)
	res, err := UDP(ctx, u)
	cost := &Result{}
	if err == nil {
		var part *Result
		if part, err = UDP(ctx, flat); part != nil {
			cost = part
		}
	}
	if res == nil {
		return nil, err
	}
	res.Kind = "trimming"
	res.Figures = append(res.Figures, cost.Figures...)
	// First what the reader looks for and does not find.
	res.Notes = slices.Concat([]string{fmt.Sprintf(noCounterpart, res.Environment.CPUs)}, trimmingNotes, res.Notes, cost.Notes)
	res.Started = begun.UTC()
	for _, p := range trimmingPublished {
		p.Params.FrameBytes, p.Params.Protocol, p.Params.Flows = MinFrame, "udp", o.Flows
		p.Source = trimmingSource
		if p.Params.Cores > 1 {
			p.Note = strings.TrimPrefix(p.Note+", no counterpart here", ", ")
		}
		res.Published = append(res.Published, p)
	}
	return res.ended(ctx, err)
}

var trimmingNotes = []string{
	"100 Mbit/s of 64-byte frames are 148 810 frames/s, 1 Gbit/s ten times that. At 10 Gbit/s, 14.9 million frames/s, no generator on one core of this kind keeps up: the rate received under overload (mrr_pps) says what each router forwards of all that it can be given.",
	"The report's own NAT hooks, addresses only and rules in the code, lost about as much as the trimmed set-up; it gives no figure. The router stateless is what comes nearest to them.",
}

// noCounterpart is about the rows of two cores, on a machine of so many.
const noCounterpart = "Two cores: the report's loss, zero-loss rate and processor time of a router with two cores are not measured here. At a given rate natkit gives " +
	"the router one processor and the generator another, of the %d that this machine has. What two cores bring is in the cost of a frame, on one core and on two, " +
	"which generator, router and sink share."

const trimmingSource = "netfilter-trimming report: Linux 2.6.33, PowerPC, hardware tester, line of 100 Mbit/s"

// trimmingPublished is the report's table. Rates were given in Mbit/s of a line of
// 100, that is in hundredths of its frames.
var trimmingPublished = []Published{
	{Router: "default", Name: "default netfilter + NAT", Metric: "loss_ratio", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 0.54},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "loss_ratio", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 0.114},
	{Router: "framework", Name: "framework, no hook registered", Metric: "loss_ratio", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 0},
	{Router: "none", Name: "no netfilter", Metric: "loss_ratio", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 0},
	{Router: "default", Name: "default netfilter + NAT", Metric: "loss_ratio", Params: Params{Cores: 2, OfferedPPS: lineRate64}, Value: 0.513},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "loss_ratio", Params: Params{Cores: 2, OfferedPPS: lineRate64}, Value: 0},
	{Router: "default", Name: "default netfilter + NAT", Metric: "ndr_pps", Params: Params{Cores: 1}, Value: 0.30 * lineRate64},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "ndr_pps", Params: Params{Cores: 1}, Value: 0.87 * lineRate64},
	{Router: "default", Name: "default netfilter + NAT", Metric: "ndr_pps", Params: Params{Cores: 2}, Value: 0.55 * lineRate64},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "ndr_pps", Params: Params{Cores: 2}, Value: lineRate64, Note: "at least"},
	{Router: "default", Name: "default netfilter + NAT", Metric: "cpu_share", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 0.87},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "cpu_share", Params: Params{Cores: 1, OfferedPPS: lineRate64}, Value: 1},
	{Router: "default", Name: "default netfilter + NAT", Metric: "cpu_share", Params: Params{Cores: 2, OfferedPPS: lineRate64}, Value: 0.50},
	{Router: "trimmed", Name: "trimmed netfilter + NAT", Metric: "cpu_share", Params: Params{Cores: 2, OfferedPPS: lineRate64}, Value: 0.50},
}
