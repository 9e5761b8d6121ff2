// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natkit/internal/words/plural"
)

// PortsOptions is a measurement of routers whose outside ports run out: all flows go
// to one target, from behind one address.
type PortsOptions struct {
	Routers  []Router
	Duration time.Duration // of a trial when the ports are taken
	Trials   int

	About
}

const (
	// portsWindow is how many flows are timed together: a batch of the generator, after
	// which it waits until the router is done with them.
	portsWindow = 64
	// wantedFlows is how many flows want a port in the end, for each that gets one.
	wantedFlows = 8
)

// portLevels are the shares of the ports that are in use when new flows are timed.
var portLevels = []float64{0.1, 0.5, 0.9, 0.99, 0.999}

// The metrics of MeasurePorts, besides those of established flows and of the table.
const (
	MetricNewFlow = "new_flow_ns"     // all that a new flow's packet takes, generator and sink included
	MetricRefused = "refused_cost_ns" // likewise of one for which there is no port
	MetricMixed   = "mixed_pps"       // packets dealt with, forwarded and refused
)

func (o *PortsOptions) check() error {
	switch {
	case len(o.Routers) == 0:
		return refuse("Routers", "none given")
	case o.Trials < 1 || o.Trials > MaxTrials:
		return refuse("Trials", "%d: want 1 to %d", o.Trials, MaxTrials)
	case o.Duration < 10*time.Millisecond || o.Duration > MaxDuration:
		return refuse("Duration", "%v: want 10ms to %v", o.Duration, MaxDuration)
	}
	return nil
}

// portsRun is a measurement under way.
type portsRun struct {
	PortsOptions
	ports   int
	levels  []float64
	res     *Result
	duts    []*dut
	windows map[*trial][]window
}

// window is what new flows met at one of portLevels.
type window struct {
	each    time.Duration // that one took
	refused float64       // share of them
}

// MeasurePorts measures what a new flow costs while the outside ports of a router are taken
// one by one, and what the router does with flows for which none is left.
func MeasurePorts(ctx context.Context, o PortsOptions) (*Result, error) {
	return measurePortsOf(ctx, o, PortsOfAddress, portLevels)
}

// measurePortsOf is MeasurePorts of routers with so many ports, timing new flows at these levels.
func measurePortsOf(ctx context.Context, o PortsOptions, ports int, levels []float64) (res *Result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.About.complete()
	r := &portsRun{PortsOptions: o, ports: ports, levels: levels, windows: map[*trial][]window{}, res: newResult("ports", o.About)}
	defer func() {
		if e := closeDUTs(r.duts); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	// Each way to run out of ports takes a trial with its time besides the fill of the ports.
	o.Plan(fmt.Sprintf("%d outside ports of %s that run out", ports, plural.Count(len(o.Routers), "router")),
		time.Duration(len(o.Routers))*(routerTakes+time.Duration(o.Trials)*(time.Second+4*(o.Duration+trialOverhead))))
	if r.duts, err = addDUTs(ctx, r.res, o.Routers, RouterOptions{}, wantedFlows*ports, o.Progress); err != nil {
		return nil, err
	}
	err = r.fills(ctx)
	if err == nil {
		err = r.exhausted(ctx)
	}
	r.note("All flows go to one target from behind one outside address, whose %d ports are given in pseudo-random order. What a new flow takes is the mean of %d one after the other.",
		ports, portsWindow)
	r.note("A router without NAT refuses nothing: what it takes for the packets that others refuse is what forwarding them costs.")
	return r.res.ended(ctx, err)
}

// served are flows that have a port with every router: for later ones some don't look
// long enough.
func (r *portsRun) served() int { return r.ports / 2 }

// wanted are all flows that want a port.
func (r *portsRun) wanted() int { return wantedFlows * r.ports }

func (r *portsRun) note(format string, args ...any) {
	r.res.Notes = append(r.res.Notes, fmt.Sprintf(format, args...))
}

// params are the conditions of so many flows on so many CPUs.
func (r *portsRun) params(flows, cores int) Params {
	return Params{FrameBytes: MinFrame, Flows: flows, Cores: cores, Protocol: "udp"}
}

func (r *portsRun) figure(l *dut, s *series, metric string, p Params, of func(*trial) float64) {
	r.res.add(s.figure(l.name, metric, p, of))
}

// fills takes all ports of each router, and times new flows on the way.
func (r *portsRun) fills(ctx context.Context) error {
	sessions := map[*trial]uint64{}
	all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		r.Progress("%s: new flows until all ports are taken", l.name)
		t, err := r.fill(ctx, l)
		if err != nil {
			return nil, err
		}
		limits, err := l.table()
		sessions[t] = limits.Count
		return t, err
	})
	for i, l := range measured(r.duts, all) {
		s := &all[i]
		refused := make([]float64, len(r.levels))
		for level, share := range r.levels {
			p := r.params(0, 1)
			p.PortsUsed = share
			r.figure(l, s, MetricNewFlow, p, func(t *trial) float64 {
				w := r.windows[t][level]
				refused[level] = max(refused[level], w.refused)
				return float64(w.each)
			})
			if refused[level] > 0 {
				r.note("%s refused up to %.0f %% of the new flows when %.4g %% of the ports had been asked for.", l.name, 100*refused[level], 100*share)
			}
		}
		if n := s.values(func(t *trial) float64 { return float64(sessions[t]) }); n[0] > 0 {
			r.figure(l, s, "capacity_sessions", r.params(r.ports, 1), func(t *trial) float64 { return float64(sessions[t]) })
		}
	}
	return err
}

// fill sends as many flows as there are ports, each once. What comes back is the trial
// of them all but those that were timed.
func (r *portsRun) fill(ctx context.Context, l *dut) (*trial, error) {
	if err := l.emptyTable(ctx); err != nil {
		return nil, err
	}
	whole := &trial{}
	at := 0
	send := func(until int) (*trial, error) {
		load := r.load(l, at, until-at)
		load.once, load.duration = true, fillTime(until-at)
		at = until
		return l.tester.run(ctx, load)
	}
	rest := func(until int) error {
		t, err := send(until)
		if err != nil {
			return err
		}
		if t.received.frames == 0 {
			return l.forwardsNothing(t)
		}
		whole.noise = append(whole.noise, t.noise...)
		return nil
	}
	var windows []window
	for _, share := range r.levels {
		middle := int(share * float64(r.ports))
		if err := rest(middle - portsWindow/2); err != nil {
			return nil, err
		}
		t, err := send(middle + portsWindow/2)
		if err != nil {
			return nil, err
		}
		windows = append(windows, window{t.sent.served / portsWindow, t.lossRatio()})
	}
	// Of the last ones a router may serve none.
	if _, err := send(r.ports); err != nil {
		return nil, err
	}
	r.windows[whole] = windows
	return whole, nil
}

// load is datagrams of so many flows from one on, as fast as they go on one CPU.
func (r *portsRun) load(l *dut, first, flows int) frameLoad {
	return frameLoad{frames: []int{MinFrame}, first: first, flows: flows, oneTarget: true, duration: r.Duration,
		cpus: l.tester.cpus[len(l.tester.cpus)-1:]}
}

// exhausted measures routers all of whose ports are taken.
func (r *portsRun) exhausted(ctx context.Context) error {
	measure := func(words string, load func(*dut) frameLoad, figures func(*dut, *series)) error {
		all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
			r.Progress("%s: %s", l.name, words)
			return l.tester.run(ctx, load(l))
		})
		for i, l := range measured(r.duts, all) {
			figures(l, &all[i])
		}
		return err
	}
	sent := func(t *trial) float64 { return t.rate(t.sent.frames) }
	err := measure("flows that have a port", func(l *dut) frameLoad { return r.load(l, 0, r.served()) },
		func(l *dut, s *series) {
			r.figure(l, s, "established_pps", r.params(r.served(), 1), func(t *trial) float64 { return t.rate(t.received.frames) })
		})
	if err == nil {
		err = measure("flows that get no port", func(l *dut) frameLoad { return r.load(l, r.ports, r.wanted()-r.ports) },
			func(l *dut, s *series) {
				p := r.params(r.wanted()-r.ports, 1)
				r.figure(l, s, MetricRefused, p, func(t *trial) float64 { return ratio(float64(t.spent), float64(t.sent.frames)) })
			})
	}
	if err == nil {
		err = measure("flows with a port and without", func(l *dut) frameLoad { return r.load(l, 0, r.wanted()) },
			func(l *dut, s *series) {
				r.figure(l, s, MetricMixed, r.params(r.wanted(), 1), sent)
				r.figure(l, s, "forwarded_share", r.params(r.wanted(), 1), func(t *trial) float64 {
					return ratio(float64(t.received.frames), float64(t.sent.frames))
				})
			})
	}
	cpus := len(r.cpus())
	for _, beside := range []struct {
		words        string
		first, flows int
	}{
		{"flows that have a port, on another core", r.served(), r.served() / 2},
		{"flows that get no port, on another core", r.ports, r.wanted() - r.ports},
	} {
		if err != nil || cpus < 2 {
			break
		}
		err = measure("flows that have a port, beside "+beside.words, func(l *dut) frameLoad {
			load := r.load(l, 0, r.served()+beside.flows)
			load.cpus = l.tester.cpus[:2]
			load.shares = []share{{0, r.served()}, {beside.first, beside.flows}}
			return load
		}, func(l *dut, s *series) {
			p := r.params(r.served(), 1)
			p.Beside = beside.words
			r.figure(l, s, "established_pps", p, func(t *trial) float64 {
				return ratio(float64(t.sent.each[0]), t.sent.elapsed.Seconds())
			})
		})
	}
	return err
}

// cpus are those that the DUTs' ends may use.
func (r *portsRun) cpus() []int {
	if len(r.duts) == 0 {
		return nil
	}
	return r.duts[0].tester.cpus
}
