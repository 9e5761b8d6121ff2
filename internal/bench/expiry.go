// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"natkit/internal/words/plural"
)

// ExpiryOptions is a measurement of what the end of many sessions does to the packets
// of others.
type ExpiryOptions struct {
	Routers  []Router
	Sessions int     // that expire
	Flows    int     // whose packets are timed
	Rate     float64 // of these packets, a second
	Trials   int

	About

	spare, window time.Duration // of tests; 0: expirySpare and expiryWindow
}

const (
	// expiryFill is how many sessions a second are begun: a router with a CPU of its own
	// must not lose any.
	expiryFill = 150_000
	// expirySpare is what a session lives longer than it takes to begin them all.
	expirySpare = 2 * time.Second
	// expiryWindow is how long packets are timed, from the end of the first session on.
	expiryWindow = 30 * time.Second
)

// MetricExpired is how many sessions left the table during a trial.
const MetricExpired = "expired_sessions"

func (o *ExpiryOptions) check() error {
	o.spare, o.window = cmp.Or(o.spare, expirySpare), cmp.Or(o.window, expiryWindow)
	cpus, err := allowedCPUs()
	switch {
	case err != nil:
		return err
	case len(o.Routers) == 0:
		return refuse("Routers", "none given")
	case o.Flows < 1 || o.Flows > MaxFlows/2:
		return refuse("Flows", "%d: want 1 to %d", o.Flows, MaxFlows/2)
	case o.Sessions < 1 || o.Sessions > MaxFlows-o.Flows:
		return refuse("Sessions", "%d: want 1 to %d", o.Sessions, MaxFlows-o.Flows)
	case !(o.Rate >= 1 && o.Rate <= MaxPPS):
		return refuse("Rate", "%g: want 1 to %g a second", o.Rate, MaxPPS)
	case o.Trials < 1 || o.Trials > MaxTrials:
		return refuse("Trials", "%d: want 1 to %d", o.Trials, MaxTrials)
	case len(cpus) < 2:
		return refuse("Routers", "the generator and the router want a CPU each, and natkit may use one only")
	}
	if least := 2 * float64(o.Flows) / o.lifetime().Seconds(); o.Rate < least {
		return refuse("Rate", "%g packets a second of %s, which would expire between two of their packets: want %.0f at least", o.Rate, plural.Count(o.Flows, "flow"), math.Ceil(least))
	}
	return nil
}

// lifetime of the sessions that expire.
func (o *ExpiryOptions) lifetime() time.Duration {
	return (time.Duration(float64(o.Sessions)/expiryFill*1e9) + o.spare).Round(time.Second)
}

// expiryRun is a measurement under way.
type expiryRun struct {
	ExpiryOptions
	res     *Result
	duts    []*dut
	filled  map[*dut]time.Time // sessions that last
	expired map[*trial]float64
}

// whileExpiring is Params.Beside of trials in which sessions expire.
const whileExpiring = "sessions that expire"

// Expiry measures the delay of packets of established flows while sessions are in the
// table, in turn with the same while they expire. The router has a CPU of its own.
func Expiry(ctx context.Context, o ExpiryOptions) (res *Result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.About.complete()
	r := &expiryRun{ExpiryOptions: o, res: newResult("expiry", o.About), filled: map[*dut]time.Time{}, expired: map[*trial]float64{}}
	defer func() {
		if e := closeDUTs(r.duts); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	total := o.Sessions + o.Flows
	fill := time.Duration(float64(o.Sessions) / expiryFill * 1e9)
	o.Plan(fmt.Sprintf("delay of packets while %s expire, through %s", plural.Count(o.Sessions, "session"), plural.Count(len(o.Routers), "router")),
		time.Duration(len(o.Routers))*(2*routerTakes+fill+time.Duration(o.Trials)*(o.lifetime()+2*(o.window+time.Second))))
	for _, timeout := range []time.Duration{0, o.lifetime()} {
		known := &Result{} // each router is named once
		duts, err := addDUTs(ctx, known, o.Routers, RouterOptions{Sessions: total, UDPTimeout: timeout}, total, o.Progress)
		r.duts = append(r.duts, duts...)
		if err != nil {
			return nil, err
		}
		r.res.Routers = known.Routers
	}
	for _, l := range r.duts {
		if err := l.tester.giveRouterACPU(); err != nil {
			return nil, err
		}
		limits, err := l.table()
		if err != nil {
			return nil, err
		}
		if limits.Max > 0 && uint64(total) > limits.Max {
			return nil, tooSmall(total, limits.Max)
		}
	}
	err = r.measure(ctx)
	r.note("The router has a CPU of its own. %d flows send %.0f packets a second, each of which is timed from the generator to the sink, beside %d sessions of one packet. "+
		"Those that expire do so %v after that packet; %d a second were begun. Trials with and without expiry take turns and last %v.",
		o.Flows, o.Rate, o.Sessions, o.lifetime(), expiryFill, o.window)
	r.note(latencyNote)
	return r.res.ended(ctx, err)
}

func (r *expiryRun) note(format string, args ...any) {
	r.res.Notes = append(r.res.Notes, fmt.Sprintf(format, args...))
}

func (r *expiryRun) measure(ctx context.Context) error {
	still := len(r.duts) / 2
	all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		for _, lasting := range r.duts[:still] {
			if lasting == l {
				return r.trial(ctx, l, false)
			}
		}
		return r.trial(ctx, l, true)
	})
	for i, l := range measured(r.duts, all) {
		s := &all[i]
		p := Params{FrameBytes: MinFrame, Flows: r.Flows, Cores: 1, Protocol: "udp", OfferedPPS: r.Rate, Held: r.Sessions}
		if i >= still {
			p.Beside = whileExpiring
			r.res.add(s.figure(l.name, MetricExpired, p, func(t *trial) float64 { return r.expired[t] }))
		}
		for _, at := range []struct {
			metric string
			share  float64
		}{{"latency_median_ns", 0.5}, {"latency_p99_ns", 0.99}, {"latency_p9999_ns", 0.9999}, {"latency_max_ns", 1}} {
			r.res.add(s.figure(l.name, at.metric, p, func(t *trial) float64 { return float64(t.received.latency.quantile(at.share)) }))
		}
		r.res.add(s.figure(l.name, "loss_ratio", p, (*trial).lossRatio))
	}
	return err
}

// trial times the flows' packets beside the sessions, from when the first of them
// expires. Sessions that last are begun again before they are over.
func (r *expiryRun) trial(ctx context.Context, l *dut, expiring bool) (*trial, error) {
	begun := time.Now()
	if expiring || time.Since(r.filled[l])+2*r.window > l.sessionsLast {
		r.Progress("%s: %s", l.name, plural.Count(r.Sessions, "session"))
		if err := r.fill(ctx, l); err != nil {
			return nil, err
		}
		r.filled[l] = begun
	}
	load := frameLoad{frames: []int{MinFrame}, flows: r.Flows, cpus: []int{l.tester.generatorCPU}, pps: r.Rate, once: true,
		duration: time.Second + time.Duration(4*float64(r.Flows)/r.Rate*1e9)}
	if _, err := l.tester.run(ctx, load); err != nil { // begins them
		return nil, err
	}
	what := "no session ends"
	if expiring {
		what = "sessions expire"
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(time.Until(begun.Add(r.lifetime()))):
		}
	}
	r.Progress("%s: packets while %s", l.name, what)
	load.once, load.duration, load.stampEvery = false, r.window, 1
	before, err := l.table()
	if err != nil {
		return nil, err
	}
	t, err := l.tester.run(ctx, load)
	if err != nil {
		return nil, err
	}
	after, err := l.table()
	r.expired[t] = float64(before.Count) - float64(after.Count)
	return t, err
}

// fill begins the sessions in an empty table.
func (r *expiryRun) fill(ctx context.Context, l *dut) error {
	if err := l.emptyTable(ctx); err != nil {
		return err
	}
	t, err := l.tester.run(ctx, frameLoad{frames: []int{MinFrame}, first: r.Flows, flows: r.Sessions, once: true, cpus: []int{l.tester.generatorCPU},
		pps: expiryFill, duration: time.Second + time.Duration(2*float64(r.Sessions)/expiryFill*1e9)})
	if err != nil {
		return err
	}
	if lost := t.lossRatio(); lost > maxCostLoss {
		return fmt.Errorf("router %s: %.1f %% of %d sessions could not be begun (%s)", l.name, 100*lost, r.Sessions, placesOf(t.lost))
	}
	return nil
}
