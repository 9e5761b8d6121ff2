// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"natkit/internal/words/choice"
	"natkit/internal/words/plural"
)

// BulkOptions says which transfers Bulk makes.
type BulkOptions struct {
	Routers     []Router
	Streams     []int    // connections at a time
	Directions  []string // "up": client to server, "down"
	TransferFor time.Duration
	Trials      int
	// IPerf3 repeats each transfer with iperf3, to compare with.
	IPerf3 bool

	About
}

// Limits of BulkOptions.
const (
	MaxStreams  = 128
	MaxTrials   = 1000
	MaxDuration = 10 * time.Minute
)

func (o *BulkOptions) check() error {
	switch {
	case len(o.Routers) == 0:
		return refuse("Routers", "none given")
	case len(o.Streams) == 0:
		return refuse("Streams", "none given")
	case o.Trials < 1 || o.Trials > MaxTrials:
		return refuse("Trials", "%d: want 1 to %d", o.Trials, MaxTrials)
	case o.TransferFor < 10*time.Millisecond || o.TransferFor > MaxDuration:
		return refuse("TransferFor", "%v: want 10ms to %v", o.TransferFor, MaxDuration)
	}
	for _, n := range o.Streams {
		if n < 1 || n > MaxStreams {
			return refuse("Streams", "%d: want 1 to %d", n, MaxStreams)
		}
	}
	for _, d := range o.Directions {
		if d != DirectionUp && d != DirectionDown {
			return refuse("Directions", "%q: want up, down or both", d)
		}
	}
	return nil
}

// The directions of Params.
const (
	DirectionUp   = "up"
	DirectionDown = "down"
)

// The metrics of Bulk. Processor time is that of the whole machine, ends, router
// and all else that ran, without idle time.
const (
	MetricThroughput  = "throughput_bits_per_second"
	MetricCPUPerGbit  = "cpu_seconds_per_gbit"
	MetricRetransmits = "retransmits_total"

	metricIPerf3Throughput  = "iperf3_throughput_bits_per_second"
	metricIPerf3CPUPerGbit  = "iperf3_cpu_seconds_per_gbit"
	metricIPerf3Retransmits = "iperf3_retransmits_total"
)

// bulkPort is where the right end listens.
const bulkPort = 5001

// Bulk measures TCP connections that carry as much as they can through each
// router. Trials of different routers take turns.
func Bulk(ctx context.Context, o BulkOptions) (res *Result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c, err := newComparison(ctx, "bulk", o.Routers, o.About)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := c.close(); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	sites, err := c.installAll(ctx)
	if err != nil {
		return nil, err
	}
	if o.IPerf3 {
		version, err := iperf3Version(ctx)
		if err != nil {
			return nil, err
		}
		c.result.Environment.Versions = map[string]string{"iperf3": version}
	}
	trials := &steps{total: o.Trials * len(o.Streams) * len(o.Directions) * len(sites), show: o.Progress}
	trials.expected = time.Duration(trials.total) * (o.TransferFor + trialOverhead)
	if o.IPerf3 {
		trials.expected *= 2
	}
	c.Plan(fmt.Sprintf("TCP bulk transfer through %s, %s", plural.Count(len(sites), "router"), plural.Count(trials.total, "trial")), trials.expected)
	err = c.bulkTrials(ctx, sites, o, trials)
	c.result.Notes = append(c.result.Notes, bulkNote)
	return c.result.ended(ctx, err)
}

// bulkTrials makes all of them, those of each set of conditions in turns.
func (c *comparison) bulkTrials(ctx context.Context, sites []*site, o BulkOptions, trials *steps) error {
	for _, streams := range o.Streams {
		for _, direction := range o.Directions {
			p := Params{Streams: streams, Direction: direction, Protocol: "tcp"}
			all, err := interleave(ctx, sites, o.Trials, func(ctx context.Context, s *site) (*bulkTrial, error) {
				trials.next("%s, %s %s", s.router.Name(), plural.Count(streams, "stream"), direction)
				t, err := s.transferFor(ctx, p, o.TransferFor)
				if err == nil && o.IPerf3 {
					err = t.byIPerf3(ctx, s, p, o.TransferFor)
				}
				if err != nil {
					return nil, fmt.Errorf("router %s: %w", s.router.Name(), err)
				}
				return t, nil
			})
			for i, s := range measured(sites, all) {
				for _, m := range bulkMetrics {
					if o.IPerf3 || !m.iperf3 {
						c.result.add(all[i].figure(s.router.Name(), m.name, p, m.of))
					}
				}
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// bulkMetrics are what is told of a transfer.
var bulkMetrics = []struct {
	name   string
	iperf3 bool
	of     func(*bulkTrial) float64
}{
	{MetricThroughput, false, func(t *bulkTrial) float64 { return t.gbit() * 1e9 / t.elapsed.Seconds() }},
	{MetricCPUPerGbit, false, (*bulkTrial).cpuPerGbit},
	{MetricRetransmits, false, func(t *bulkTrial) float64 { return float64(t.retransmits) }},
	{metricIPerf3Throughput, true, func(t *bulkTrial) float64 { return t.iperf3.bps }},
	{metricIPerf3CPUPerGbit, true, func(t *bulkTrial) float64 { return t.iperf3CPU.busy.Seconds() / (t.iperf3.bytes * 8 / 1e9) }},
	{metricIPerf3Retransmits, true, func(t *bulkTrial) float64 { return t.iperf3.retransmits }},
}

const bulkNote = "Processor time is the whole machine's: both ends, the router and whatever else ran. " +
	"All of them share its processors, so a router that costs less leaves more to the ends."

// installAll makes every router that this machine can have, once for all trials.
// They go with their testbeds.
func (c *comparison) installAll(ctx context.Context) (sites []*site, err error) {
	for _, s := range c.sites {
		_, err := s.router.Install(ctx, s.testbed, RouterOptions{Sockets: true})
		if err == nil {
			sites = append(sites, s)
		} else if err := c.exclude(s.router.Name(), err); err != nil {
			return nil, err
		}
	}
	return sites, nil
}

// endpoints are the addresses of a site's next trial: ports of the last one may
// still be in use.
func (s *site) endpoints(port uint16) (source, target netip.AddrPort) {
	s.number++
	source = netip.AddrPortFrom(s.testbed.Sources.Addr().Next(), 0)
	n := s.number%250 + 1
	a := s.testbed.Targets.Addr().As4()
	a[2], a[3] = byte(s.number/250%250), byte(n)
	return source, netip.AddrPortFrom(netip.AddrFrom4(a), port)
}

// bulkTrial is one transfer, and the same by iperf3 where that is compared with.
type bulkTrial struct {
	transferred
	iperf3    iperf3Report
	iperf3CPU machineTime
	noise     []string
}

func (t *bulkTrial) disturbed() []string { return t.noise }
func (t *bulkTrial) limited() bool       { return false }

func (t *bulkTrial) cpuPerGbit() float64 { return t.cpu.busy.Seconds() / t.gbit() }

// transferFor makes a transfer that lasts so long.
func (s *site) transferFor(ctx context.Context, p Params, duration time.Duration) (*bulkTrial, error) {
	source, target := s.endpoints(bulkPort)
	done, err := transfer{source: source, target: target, streams: p.Streams, down: p.Direction == DirectionDown, duration: duration}.run(ctx, s.testbed)
	if err != nil {
		return nil, err
	}
	if done.bytes == 0 {
		return nil, errors.New("no data came through")
	}
	t := &bulkTrial{transferred: done}
	if done.cpu.noisy(done.elapsed) {
		t.noise = append(t.noise, otherPrograms)
	}
	return t, nil
}

const otherPrograms = "other programs or the hypervisor had the processors"

// ParseDirection turns an option into directions.
func ParseDirection(text string) ([]string, error) {
	switch {
	case text == "both":
		return []string{DirectionUp, DirectionDown}, nil
	case slices.Contains([]string{DirectionUp, DirectionDown}, text):
		return []string{text}, nil
	}
	return nil, refuse("Directions", "%v", choice.Error(text, DirectionUp, DirectionDown, "both"))
}
