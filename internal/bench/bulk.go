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
	return c.finish(ctx, err)
}

// bulkTrials makes all of them, in turns.
func (c *comparison) bulkTrials(ctx context.Context, sites []*site, o BulkOptions, trials *steps) error {
	for round := range o.Trials {
		for _, streams := range o.Streams {
			for _, direction := range o.Directions {
				for _, s := range sites {
					p := Params{Streams: streams, Direction: direction, Protocol: "tcp"}
					trials.next("%s, %s %s", s.router.Name(), plural.Count(streams, "stream"), direction)
					if err := c.bulkTrial(ctx, s, p, o.TransferFor); err != nil {
						return fmt.Errorf("router %s: %w", s.router.Name(), err)
					}
					if o.IPerf3 {
						if err := c.iperf3Trial(ctx, s, p, o.TransferFor); err != nil {
							return fmt.Errorf("router %s: %w", s.router.Name(), err)
						}
					}
				}
				if round == o.Trials-1 {
					c.rows(func(p Params) bool { return p.Streams == streams && p.Direction == direction })
				}
			}
		}
	}
	return nil
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

// bulkTrial makes one transfer that counts.
func (c *comparison) bulkTrial(ctx context.Context, s *site, p Params, duration time.Duration) error {
	done, err := c.undisturbed(ctx, s, p, duration, MetricThroughput, MetricCPUPerGbit, MetricRetransmits)
	if err != nil {
		return err
	}
	name := s.router.Name()
	c.add(name, MetricThroughput, p, done.gbit()*1e9/done.elapsed.Seconds())
	c.add(name, MetricCPUPerGbit, p, done.cpu.busy.Seconds()/done.gbit())
	c.add(name, MetricRetransmits, p, float64(done.retransmits))
	return nil
}

// undisturbed makes a transfer, and once more when something disturbed it. Its
// values will be those of the metrics.
func (c *comparison) undisturbed(ctx context.Context, s *site, p Params, duration time.Duration, metrics ...string) (done transferred, err error) {
	noisy := true
	for attempt := 0; attempt < 2 && noisy; attempt++ {
		if attempt > 0 {
			c.disturbed(s, p, trialCounts{discarded: 1}, metrics...)
		}
		source, target := s.endpoints(bulkPort)
		t := transfer{source: source, target: target, streams: p.Streams, down: p.Direction == DirectionDown, duration: duration}
		if done, err = t.run(ctx, s.testbed); err != nil {
			return done, err
		}
		if done.bytes == 0 {
			return done, errors.New("no data came through")
		}
		noisy = done.cpu.noisy(done.elapsed)
	}
	if noisy {
		c.disturbed(s, p, trialCounts{noisy: 1}, metrics...)
	}
	return done, nil
}

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
