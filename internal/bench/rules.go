// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/lab"
	"natkit/internal/words/plural"
)

// RulesOptions says what Rules measures.
type RulesOptions struct {
	Routers []Router
	Counts  []int         // of rules that match nothing, before the one that matches
	Load    time.Duration // of new connections, in a trial
	Flows   int           // whose first packets are timed, in a trial
	Trials  int

	About
}

// MaxRules is the largest of RulesOptions.Counts.
const MaxRules = 100_000

// DefaultRuleCounts are those of the published experiment, and up to where a list
// of rules is no sensible thing any more.
var DefaultRuleCounts = []int{0, 1, 4, 50, 500, 5000, 50_000}

// The metrics of Rules.
const (
	MetricNewConnections = "new_connections_per_second"
	MetricFirstPacket    = "first_packet_ns"
	MetricEstablished    = "established_pps" // a second of the one CPU that ends and router share
	MetricLoad           = "load_seconds"
	MetricMemory         = "memory_bytes"
)

func (o *RulesOptions) check() error {
	switch {
	case len(o.Routers) == 0:
		return refuse("Routers", "none given")
	case len(o.Counts) == 0:
		return refuse("Counts", "none given")
	case o.Trials < 1 || o.Trials > MaxTrials:
		return refuse("Trials", "%d: want 1 to %d", o.Trials, MaxTrials)
	case o.Load < 10*time.Millisecond || o.Load > MaxDuration:
		return refuse("Load", "%v: want 10ms to %v", o.Load, MaxDuration)
	case o.Flows < 1 || o.Flows > maxTimedFlows:
		return refuse("Flows", "%d: want 1 to %d", o.Flows, maxTimedFlows)
	}
	for _, n := range o.Counts {
		if n < 0 || n > MaxRules {
			return refuse("Counts", "%d: want 0 to %d", n, MaxRules)
		}
	}
	return nil
}

const (
	rulesConnections = 32 // at a time
	rulesPort        = 80
	echoPort         = 7 // RFC 862

	// leastRulesForMemory is below what the machine's other allocations hide.
	leastRulesForMemory = 5000
)

// Rules measures what the number of rules before the one that matches costs: what
// pays is the first packet of a connection. Trials of different routers take turns;
// each loads its rules again.
func Rules(ctx context.Context, o RulesOptions) (res *Result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.Counts = slices.Compact(slices.Sorted(slices.Values(o.Counts)))
	c, err := newComparison(ctx, "rules", o.Routers, o.About)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := c.close(); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	for _, s := range c.sites {
		if err := s.serve(ctx); err != nil {
			return nil, err
		}
	}
	trials := &steps{total: 2 * o.Trials * len(o.Counts) * len(c.sites), show: o.Progress}
	// Half of them are of open connections; half a second for the rest of a trial.
	trials.expected = time.Duration(trials.total/2) * (o.Load + establishedFor + 500*time.Millisecond)
	c.Plan(fmt.Sprintf("%s in front of the one that matches, in %s", numbersOf(o.Counts), plural.Count(len(c.sites), "router")), trials.expected)
	err = c.rulesTrials(ctx, o, trials)
	c.rulesNotes(o)
	return c.result.ended(ctx, err)
}

// numbersOf writes numbers of rules: 0, 1 and 50 rules.
func numbersOf(counts []int) string {
	var words []string
	for _, n := range counts {
		words = append(words, strconv.Itoa(n))
	}
	last := len(words) - 1
	if last == 0 {
		return plural.Count(counts[0], "rule")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last] + " rules"
}

// rulesTrials makes all trials: those of new connections first, then those of open ones.
func (c *comparison) rulesTrials(ctx context.Context, o RulesOptions, trials *steps) error {
	limited := map[string]string{} // by router: why it has not all counts
	for _, count := range o.Counts {
		if err := c.newConnections(ctx, count, o, trials, limited); err != nil {
			return err
		}
	}
	for _, count := range o.Counts {
		if err := c.established(ctx, count, o, trials); err != nil {
			return err
		}
	}
	for _, s := range c.sites {
		if why := limited[s.router.Name()]; why != "" {
			c.result.Notes = append(c.result.Notes, why)
		}
	}
	return nil
}

// newConnections measures connections that begin behind so many rules.
func (c *comparison) newConnections(ctx context.Context, count int, o RulesOptions, trials *steps, limited map[string]string) error {
	all, err := interleave(ctx, c.sites, o.Trials, func(ctx context.Context, s *site) (*rulesTrial, error) {
		name := s.router.Name()
		trials.next("%s behind %s", name, plural.Count(count, "rule"))
		t, err := s.rulesTrial(ctx, count, o)
		var unsupported *UnsupportedError
		switch {
		case errors.As(err, &unsupported) && s.works: // without these rules it does
			limited[name] = fmt.Sprintf("%s behind %s was left out: %s.", name, plural.Count(count, "rule"), unsupported.Reason)
		case err != nil:
			if err := c.exclude(name, err); err != nil {
				return nil, fmt.Errorf("router %s behind %s: %w", name, plural.Count(count, "rule"), err)
			}
		default:
			return t, nil
		}
		return &rulesTrial{leftOut: true}, nil
	})
	for i, s := range c.sites {
		c.rulesFigures(s, count, &all[i])
	}
	return err
}

// rulesFigures adds what the trials of new connections gave.
func (c *comparison) rulesFigures(s *site, count int, r *runs[*rulesTrial]) {
	r.trials = slices.DeleteFunc(r.trials, func(t *rulesTrial) bool { return t.leftOut })
	if len(r.trials) == 0 {
		return
	}
	name, p := s.router.Name(), Params{Rules: count}
	connections := r.figure(name, MetricNewConnections, p, func(t *rulesTrial) float64 { return t.perSecond })
	if slices.ContainsFunc(r.trials, func(t *rulesTrial) bool { return t.busy }) {
		connections.Label = "noisy"
	}
	c.result.add(connections)
	c.result.add(r.figure(name, MetricFirstPacket, p, func(t *rulesTrial) float64 { return float64(t.first) }))
	if count > 0 || s.router.NAT() {
		c.result.add(r.figure(name, MetricLoad, p, func(t *rulesTrial) float64 { return t.load.Seconds() }))
	}
	if count >= leastRulesForMemory {
		c.addMemory(r.figure(name, MetricMemory, p, func(t *rulesTrial) float64 { return float64(t.memory) }))
	}
}

// rulesNotes says what the figures are.
func (c *comparison) rulesNotes(o RulesOptions) {
	c.result.Notes = append(c.result.Notes,
		"New connections are HTTP requests, a connection for each, between ends on the same processors as the router: where they are the limit, "+
			"routers look the same. The first packet is how much longer the first datagram of a flow and its reply take than the second, median of a trial.",
		fmt.Sprintf("Packets of open connections: 64-byte frames of %d flows, in a second of the one CPU that generator, router and sink share.", establishedFlows))
	if o.Counts[len(o.Counts)-1] >= leastRulesForMemory {
		c.result.Notes = append(c.result.Notes, fmt.Sprintf(
			"Memory is what the kernel's slabs, vmalloc areas and per-processor data grew by while the rules were loaded, "+
				"other allocations of that moment included; it is read for %s and more.", plural.Count(leastRulesForMemory, "rule")))
	}
	if len(c.hidden) > 0 {
		c.result.Notes = append(c.result.Notes,
			"Kernel memory was left out where other allocations of the machine hid it: "+strings.Join(c.hidden, ", ")+".")
	}
}

// addMemory adds a figure of memory, unless other allocations hid it.
func (c *comparison) addMemory(f Figure) {
	if f.Min > (1-maxMemorySpread)*max(f.Max, 0) {
		c.result.add(f)
		return
	}
	c.hidden = append(c.hidden, fmt.Sprintf("%s behind %s", f.Router, plural.Count(f.Params.Rules, "rule")))
}

// maxMemorySpread of a figure's values, as a share of the largest.
const maxMemorySpread = 0.3

// Established flows, as CSIT's smaller tests have them.
const (
	establishedFlows = 1000
	establishedFor   = 200 * time.Millisecond
)

// established measures frames of flows that the router knows behind so many rules.
// Its ends are XDP programs, which sockets can't have beside them: so it has testbeds
// of its own.
func (c *comparison) established(ctx context.Context, count int, o RulesOptions, trials *steps) (err error) {
	var duts []*dut
	defer func() { err = errors.Join(err, closeDUTs(duts)) }()
	for _, s := range c.sites {
		l, err := newDUT(ctx, s.router, RouterOptions{Rules: count}, establishedFlows, false)
		switch {
		case errors.As(err, new(*UnsupportedError)): // said already
		case err != nil:
			return fmt.Errorf("open connections: %w", err)
		default:
			duts = append(duts, l)
		}
	}
	all, err := interleave(ctx, duts, o.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		trials.next("%s behind %s, open connections", l.name, plural.Count(count, "rule"))
		cpus := l.tester.cpus[len(l.tester.cpus)-1:]
		return l.run(ctx, frameLoad{frames: []int{MinFrame}, flows: establishedFlows, duration: establishedFor, cpus: cpus})
	})
	if err != nil {
		err = fmt.Errorf("open connections: %w", err)
	}
	for i, l := range measured(duts, all) {
		c.result.add(all[i].figure(l.name, MetricEstablished, Params{Rules: count}, func(t *trial) float64 {
			return ratio(float64(t.received.frames), t.spent.Seconds())
		}))
	}
	return err
}

// serve makes the right end answer: HTTP, and an echo of datagrams; what the left
// end itself sends there gets a source that routers translate.
func (s *site) serve(ctx context.Context) error {
	if _, err := s.testbed.Node(lab.RoleServer).ServeHTTP(ctx, fmt.Sprintf(":%d", rulesPort), lab.HTTPServerOptions{}); err != nil {
		return err
	}
	stop, err := serveEcho(s.testbed)
	if err != nil {
		return err
	}
	s.stop = append(s.stop, stop)
	return s.testbed.Left.Do(func() error {
		if err := netlink.RouteReplace(&netlink.Route{
			Dst: ipNet(s.testbed.Targets), Gw: s.testbed.InsideAddr.AsSlice(), Src: s.testbed.Sources.Addr().Next().AsSlice(),
		}); err != nil {
			return fmt.Errorf("set source towards %s: %w", s.testbed.Targets, err)
		}
		return nil
	})
}

// rulesTrial is what a trial of new connections gave.
type rulesTrial struct {
	leftOut   bool    // the router can't have so many rules
	busy      bool    // other programs had the processors while connections began
	perSecond float64 // connections
	first     time.Duration
	load      time.Duration
	memory    int64
}

// disturbed is nothing: a trial is not made again, as its load of rules takes long.
func (t *rulesTrial) disturbed() []string { return nil }
func (t *rulesTrial) limited() bool       { return false }

// rulesTrial loads rules, measures, and takes them out again.
func (s *site) rulesTrial(ctx context.Context, count int, o RulesOptions) (t *rulesTrial, err error) {
	var memoryBefore, memory int64
	if count >= leastRulesForMemory {
		if memoryBefore, err = settledMemory(ctx); err != nil {
			return nil, err
		}
	}
	start := time.Now()
	remove, err := s.router.Install(ctx, s.testbed, RouterOptions{Rules: count, Sockets: true})
	if err != nil {
		return nil, err
	}
	t = &rulesTrial{load: time.Since(start)}
	s.works = true
	defer func() {
		// A table full of this trial's connections would slow the next.
		err = errors.Join(err, remove(), s.testbed.Router.Do(func() error { return conntrack.Flush(context.WithoutCancel(ctx)) }))
	}()
	if count >= leastRulesForMemory {
		if memory, err = settledMemory(ctx); err != nil {
			return nil, err
		}
		t.memory = memory - memoryBefore
	}
	if err := t.connect(ctx, s, o.Load); err != nil {
		return nil, fmt.Errorf("new connections: %w", err)
	}
	if t.first, err = s.firstPacket(ctx, o.Flows); err != nil {
		return nil, fmt.Errorf("first packet: %w", err)
	}
	return t, nil
}

// connect makes HTTP requests, a connection for each.
func (t *rulesTrial) connect(ctx context.Context, s *site, load time.Duration) error {
	_, target := s.endpoints(rulesPort)
	before, err := readMachineTime()
	if err != nil {
		return err
	}
	http, err := HTTP(ctx, HTTPOptions{
		URL: "http://" + target.String() + "/", Concurrency: rulesConnections, Requests: maxRequests, TimeLimit: load,
		Netns: s.testbed.Left, ServerNetns: s.testbed.Right,
	})
	if err != nil {
		return err
	}
	after, err := readMachineTime()
	if err != nil {
		return err
	}
	if http.Completed == 0 {
		return errors.New("none was made")
	}
	t.perSecond = http.RequestsPerSecond
	t.busy = after.since(before).noisy(time.Duration(http.Seconds * float64(time.Second)))
	return nil
}

// maxRequests of a trial: as many as there are ports for them, RFC 6056's range
// as Linux has it by default.
const maxRequests = 28_000

// kernelMemory is what the kernel has allocated for itself, without page tables,
// stacks and caches of files: where rules are kept.
func kernelMemory() (bytes int64, err error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read kernel memory: %w", err)
	}
	for _, name := range []string{"Slab", "VmallocUsed", "Percpu"} {
		bytes += meminfo(string(text), name)
	}
	return bytes, nil
}

// meminfo returns a line of /proc/meminfo in bytes, 0 where there is none.
func meminfo(text, name string) (bytes int64) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			_, _ = fmt.Sscan(rest, &bytes)
		}
	}
	return bytes << 10
}

// settledMemory is kernelMemory once it stands still: rules that were removed are
// freed some time later.
func settledMemory(ctx context.Context) (bytes int64, err error) {
	const (
		still = 100 * time.Millisecond
		small = 64 << 10
	)
	last := int64(-1)
	for range 10 {
		if bytes, err = kernelMemory(); err != nil {
			return 0, err
		}
		if d := bytes - last; last >= 0 && d < small && d > -small {
			break
		}
		last = bytes
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(still):
		}
	}
	return bytes, nil
}
