// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"natkit/internal/words/plural"
)

// SubscribersOptions is a measurement of what port blocks and limits of subscribers cost, and of
// what they leave to hosts beside one that floods. The first router is what the others are
// compared with.
type SubscribersOptions struct {
	Routers  []Router
	Sessions int           // of a trial with new ones
	Block    int           // ports of a block
	Hosts    int           // beside the one that floods
	Duration time.Duration // of a trial with established sessions, or with a flood
	Trials   int

	About
}

// The metrics of MeasureSubscribers, besides those of new and established sessions.
const (
	MetricNewSessionsRatio = "new_sessions_ratio"
	MetricPacketsRatio     = "packets_ratio"
	MetricHostsServed      = "hosts_served_share"
	MetricHostsWithout     = "hosts_without_share"
	MetricFloodSessions    = "flood_sessions_total"
	MetricHostsPackets     = "hosts_pps" // forwarded or refused
)

// Bounds of SubscribersOptions.
const (
	// MaxFairHosts have a block each of one address, beside those that the flood has taken.
	MaxFairHosts = 1000
	minBlock     = 64
	maxBlock     = 4096
	blocksOfHost = 8
)

// fairHosts is how many hosts can have a block of an address beside one that has all it may have.
func fairHosts(block int) int { return PortsOfAddress/block - blocksOfHost }

func (o *SubscribersOptions) check() error {
	cps := o.cost()
	switch {
	case len(o.Routers) == 0:
		return refuse("Routers", "none given")
	case o.Block < minBlock || o.Block > maxBlock || bits.OnesCount(uint(o.Block)) != 1:
		return refuse("Block", "%d: want a power of two from %d to %d", o.Block, minBlock, maxBlock)
	case o.Hosts < 1 || o.Hosts > min(MaxFairHosts, fairHosts(o.Block)):
		return refuse("Hosts", "%d: want 1 to %d, which have a block of %d ports each of one address", o.Hosts, min(MaxFairHosts, fairHosts(o.Block)), o.Block)
	}
	return cps.complete()
}

// cost are the options of the part that is measured as any new sessions are.
func (o *SubscribersOptions) cost() CPSOptions {
	return CPSOptions{Routers: o.Routers, Protocols: []string{"udp"}, Sessions: o.Sessions, Rules: []int{0}, Block: o.Block, Duration: o.Duration, Trials: o.Trials, About: o.About}
}

// MeasureSubscribers measures new and established sessions through each router in turn, and then
// what one host that opens sessions as fast as it can leaves of one external address to others.
func MeasureSubscribers(ctx context.Context, o SubscribersOptions) (*Result, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.About.complete()
	cost := o.cost()
	// What CPS shows of its own would not be all.
	what, takes := cost.plan()
	o.Plan(fmt.Sprintf("%s, and a flood beside %s", what, plural.Count(o.Hosts, "host")),
		takes+time.Duration(len(o.Routers))*(routerTakes+time.Duration(o.Trials)*(3*(o.Duration+trialOverhead)+time.Second)))
	cost.Plan = nil
	res, err := CPS(ctx, cost)
	if res == nil {
		return nil, err
	}
	res.Kind = "subscribers"
	compareWithFirst(res, "establishment_cps", MetricNewSessionsRatio)
	compareWithFirst(res, "established_pps", MetricPacketsRatio)
	blocks := (HostSessions + o.Block - 1) / o.Block
	res.Notes = append(res.Notes, fmt.Sprintf("Each internal host opens %s. With blocks of %s each host takes %s for them.",
		plural.Count(HostSessions, "session"), plural.Count(o.Block, "port"), plural.Count(blocks, "block")))
	if err == nil {
		err = o.fairness(ctx, res)
	}
	return res.ended(ctx, err)
}

// compareWithFirst adds, for each figure of a metric, its values over those of the first router in
// the same rounds.
func compareWithFirst(res *Result, metric, as string) {
	for _, f := range res.Figures {
		if f.Metric != metric {
			continue
		}
		for _, base := range res.Figures {
			if base.Metric != metric || base.Router != res.Routers[0].Name || base.Params != f.Params || len(base.Values) != len(f.Values) {
				continue
			}
			values := make([]float64, len(f.Values))
			for i := range values {
				values[i] = ratio(f.Values[i], base.Values[i])
			}
			compared := NewFigure(f.Router, as, f.Params, values...)
			if compared.Label = f.Label; base.Label != "" {
				compared.Label = base.Label
			}
			res.add(compared)
		}
	}
}

// A flood wants all ports of an address.
const floodFlows = PortsOfAddress

// fairTrial is what hosts got beside one that floods.
type fairTrial struct {
	*trial
	served, without, flood int // hosts with all of their sessions, hosts without any; sessions of the flood
}

// fairness floods each router, which has one external address, from one host, and lets others open
// sessions while it goes on.
func (o *SubscribersOptions) fairness(ctx context.Context, res *Result) (err error) {
	cpus, err := allowedCPUs()
	if err != nil {
		return err
	}
	if len(cpus) < 2 {
		res.Notes = append(res.Notes, "Fairness was not measured: the flood and the other hosts need a CPU each, and natkit may use one.")
		return nil
	}
	var duts []*dut
	defer func() { err = errors.Join(err, closeDUTs(duts)) }()
	known := &Result{} // routers are named already
	// The first host floods; flows of the others follow.
	others := o.Hosts * HostSessions
	duts, err = addDUTs(ctx, known, o.Routers, RouterOptions{Block: o.Block}, HostSessions+others+floodFlows, o.Progress)
	if err != nil {
		return err
	}
	load := frameLoad{frames: []int{MinFrame}, flows: others, oneTarget: true, duration: o.Duration, oneHost: true,
		shares: []share{{HostSessions + others, floodFlows}, {HostSessions, others}}}
	alone := load
	alone.oneHost, alone.shares = false, load.shares[1:]
	p := Params{FrameBytes: MinFrame, Flows: others, Cores: 1, Protocol: "udp"}
	calm, err := interleave(ctx, duts, o.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		o.Progress("%s: %s", l.name, plural.Count(o.Hosts, "host"))
		load := alone
		if err := l.emptyTable(ctx); err != nil {
			return nil, err
		}
		load.cpus = l.tester.cpus[:1]
		return l.runAll(ctx, load)
	})
	for i, l := range measured(duts, calm) {
		res.add(calm[i].figure(l.name, MetricHostsPackets, p, func(t *trial) float64 { return t.rate(t.sent.frames) }))
	}
	if err != nil {
		return err
	}
	flooded, err := interleave(ctx, duts, o.Trials, func(ctx context.Context, l *dut) (*fairTrial, error) {
		o.Progress("%s: %s beside a flood", l.name, plural.Count(o.Hosts, "host"))
		return o.flood(ctx, l, load)
	})
	p.Beside = "a host that floods"
	for i, l := range measured(duts, flooded) {
		s := &flooded[i]
		share := func(of func(*fairTrial) int) func(*fairTrial) float64 {
			return func(t *fairTrial) float64 { return float64(of(t)) / float64(o.Hosts) }
		}
		res.add(s.figure(l.name, MetricHostsServed, p, share(func(t *fairTrial) int { return t.served })))
		res.add(s.figure(l.name, MetricHostsWithout, p, share(func(t *fairTrial) int { return t.without })))
		res.add(s.figure(l.name, MetricFloodSessions, p, func(t *fairTrial) float64 { return float64(t.flood) }))
		res.add(s.figure(l.name, MetricHostsPackets, p, func(t *fairTrial) float64 { return ratio(float64(t.sent.each[1]), t.sent.elapsed.Seconds()) }))
	}
	res.Notes = append(res.Notes, fmt.Sprintf("The host that floods wants all %d ports of the one external address, and begins before %s open %s each; it and they have a CPU each.",
		floodFlows, plural.Count(o.Hosts, "other"), plural.Count(HostSessions, "session")))
	return err
}

// maxFairRuns is how often a load is sent, on a machine whose CPUs are busy otherwise.
const maxFairRuns = 50

// runAll runs a load until each of its CPUs has sent all of its flows; the trial is the last run's.
func (l *dut) runAll(ctx context.Context, load frameLoad) (*trial, error) {
	sent := make([]uint64, len(load.shares))
	for range maxFairRuns {
		t, err := l.tester.runLearning(ctx, load, true)
		if err != nil {
			return nil, err
		}
		all := true
		for i, s := range load.shares {
			sent[i] += t.sent.each[i]
			all = all && sent[i] >= uint64(s.flows)
		}
		if all {
			return t, nil
		}
	}
	return nil, fmt.Errorf("router %s: in %[3]s of %[4]v the generator sent only %[2]d of its packets: other programs have the CPUs", l.name, sent, plural.Count(maxFairRuns, "run"), load.duration)
}

// flood begins with the first CPU's share of the load alone.
func (o *SubscribersOptions) flood(ctx context.Context, l *dut, load frameLoad) (*fairTrial, error) {
	if err := l.tester.forgetFlows(); err != nil {
		return nil, err
	}
	if err := l.emptyTable(ctx); err != nil {
		return nil, err
	}
	first := load
	first.cpus, first.shares = l.tester.cpus[:1], load.shares[:1]
	if _, err := l.runAll(ctx, first); err != nil {
		return nil, err
	}
	load.cpus = l.tester.cpus[:2]
	t, err := l.runAll(ctx, load)
	if err != nil {
		return nil, err
	}
	got := &fairTrial{trial: t}
	for host := range o.Hosts {
		unknown, err := l.tester.unknownFlows((host+1)*HostSessions, HostSessions)
		if err != nil {
			return nil, err
		}
		switch unknown {
		case 0:
			got.served++
		case HostSessions:
			got.without++
		}
	}
	unknown, err := l.tester.unknownFlows(load.shares[0].first, load.shares[0].flows)
	got.flood = load.shares[0].flows - unknown
	return got, err
}
