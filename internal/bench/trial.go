// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"natkit/internal/words/plural"
	"os"
	"strconv"
	"strings"
	"time"
)

// dut is one router in a testbed of its own, or elsewhere, ready to be measured.
type dut struct {
	name   string // the router's
	rules  int    // that it has before the one that matches
	tester *tester
	undo   []func() error
	own    Table // nil: sessions are in connection tracking, or nowhere

	sessionsLast time.Duration // less than the time-out of a UDP session that had no answer
	learns       time.Duration // of a Learner

	warmed      time.Time // when each flow last went through, with warmedFlows of them
	warmedFlows int
	lost        map[string]int64 // frames of all trials that count, by place
	sent        uint64
}

// newDUT makes a testbed and the router in it, for loads of at most so many flows.
func newDUT(ctx context.Context, r Router, o RouterOptions, flows int, ownCPU bool) (l *dut, err error) {
	l = &dut{name: r.Name(), lost: map[string]int64{}, sessionsLast: testbedTimeout / 2}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	testbed, err := NewTestbed(ctx)
	if err != nil {
		return l, err
	}
	l.undo = append(l.undo, testbed.Close)
	if l.tester, err = newTester(testbed, flows); err != nil {
		return l, err
	}
	l.undo = append(l.undo, l.tester.close)
	// After the rings are there, which cannot change under XDP; before the sinks.
	remove, err := r.Install(ctx, testbed, o)
	if err != nil {
		return l, err
	}
	l.undo = append(l.undo, remove)
	if keeper, ok := r.(TableKeeper); ok {
		l.own = keeper.Table(testbed)
	}
	if learner, ok := r.(Learner); ok {
		l.learns = learner.Learns()
	}
	if err := l.setUDPTimeout(cmp.Or(o.UDPTimeout, testbedTimeout)); err != nil {
		return l, err
	}
	if err := l.tester.attachSinks(); err != nil {
		return l, err
	}
	if ownCPU {
		return l, l.tester.giveRouterACPU()
	}
	return l, nil
}

// addDUTs makes the routers that this machine can have, and names the others in the
// result. Those made before an error come with it.
func addDUTs(ctx context.Context, res *Result, routers []Router, o RouterOptions, flows int, progress func(string, ...any)) (duts []*dut, err error) {
	for _, router := range routers {
		progress("%s: making the router", router.Name())
		use := RouterUse{Name: router.Name(), Describe: router.Describe()}
		l, err := newDUT(ctx, router, o, flows, false)
		var unsupported *UnsupportedError
		switch {
		case errors.As(err, &unsupported):
			use.Unsupported = unsupported.Reason
		case err != nil:
			return duts, err
		default:
			duts = append(duts, l)
		}
		res.Routers = append(res.Routers, use)
	}
	return duts, nil
}

func closeDUTs(duts []*dut) error {
	var errs []error
	for _, l := range duts {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// testbedTimeout is when routers forget a session of UDP: what RFC 4787 recommends, and
// long enough for a table of millions to be filled and measured.
const testbedTimeout = 5 * time.Minute

// setUDPTimeout sets connection tracking's time-outs in the router's namespace, if it
// has any.
func (l *dut) setUDPTimeout(d time.Duration) error {
	seconds := strconv.Itoa(int(d.Seconds()))
	return l.tester.testbed.Router.Do(func() error {
		for _, name := range []string{"udp_timeout", "udp_timeout_stream"} {
			err := os.WriteFile(conntrackSysctls+name, []byte(seconds), 0)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("set time-out of sessions: %w", err)
			}
		}
		return nil
	})
}

// close undoes what was made, the last first.
func (l *dut) close() error {
	var errs []error
	for i := len(l.undo) - 1; i >= 0; i-- {
		errs = append(errs, l.undo[i]())
	}
	l.undo = nil
	return errors.Join(errs...)
}

const (
	warmPPS      = 200_000
	wireFor      = 15 * time.Second // less than the time-out that connection tracking has by default
	warmAttempts = 6
)

// warm sends every flow through the router once, so that a trial meets flows that
// the router knows; and for frames back it learns what the router made of them.
func (l *dut) warm(ctx context.Context, load frameLoad) error {
	if load.traffic == segments {
		return l.open(ctx, load.flows)
	}
	if l.warmedFlows == load.flows && time.Since(l.warmed) < l.sessionsLast {
		return nil
	}
	through := frameLoad{frames: []int{MinFrame}, flows: load.flows, cpus: []int{l.tester.generatorCPU},
		pps: warmPPS, duration: 20*time.Millisecond + time.Duration(load.flows)*time.Second/warmPPS}
	if l.tester.threads == nil && !l.tester.testbed.elsewhere() && load.flows > manyFlows {
		// On the generator's CPU the router can't be overrun.
		through.pps, through.once, through.duration = 0, true, fillTime(load.flows)
	}
	for attempt := 1; ; attempt++ {
		t, err := l.tester.runLearning(ctx, through, true)
		if err != nil {
			return err
		}
		missing := max(0, load.flows-int(t.sent.frames))
		if load.bothWays {
			if missing, err = l.tester.unknownFlows(0, load.flows); err != nil {
				return err
			}
		}
		switch {
		case t.sent.frames > 0 && t.received.frames == 0:
			return l.forwardsNothing(t)
		case missing == 0:
			l.warmed, l.warmedFlows = time.Now(), load.flows
			return nil
		case attempt == warmAttempts:
			return fmt.Errorf("router %s: %d of %d flows did not come through after %s (%s sent in %v; %s)",
				l.name, missing, load.flows, plural.Count(attempt, "attempt"), plural.Count(t.sent.frames, "frame"), through.duration, placesOf(t.lost))
		}
		through.duration = max(2*through.duration, 200*time.Millisecond) // the generator may have missed slots
	}
}

// manyFlows take long to warm up by a paced load.
const manyFlows = 100_000

// fillTime is enough for the slowest router to take so many sessions, which the
// generator sends as fast as it goes.
func fillTime(sessions int) time.Duration {
	return time.Second + 100*time.Microsecond*time.Duration(sessions)
}

// openCPS leaves slow machines time for the three segments of each.
const openCPS = 50_000

// open opens so many TCP connections, which then last: a router forgets one after
// days. Those that were opened before must be gone if they were not as many.
func (l *dut) open(ctx context.Context, flows int) error {
	if l.warmedFlows == flows {
		return nil
	}
	load := frameLoad{traffic: openings, frames: []int{MinFrame}, flows: flows, once: true, pps: openCPS, cpus: []int{l.tester.generatorCPU}}
	for attempt := 1; ; attempt++ {
		load.duration = time.Second + time.Duration(4*float64(flows)/load.pps*1e9)
		t, err := l.tester.runLearning(ctx, load, true)
		if err != nil {
			return err
		}
		switch {
		case t.sent.frames > 0 && t.received.frames == 0:
			return l.forwardsNothing(t)
		case t.received.frames == uint64(flows):
			l.warmed, l.warmedFlows = time.Now(), flows
			return nil
		case attempt == warmAttempts:
			return fmt.Errorf("router %s: of %d TCP connections %d were opened, in %s (%s)",
				l.name, flows, t.received.frames, plural.Count(attempt, "attempt"), placesOf(t.lost))
		}
		if err := l.emptyTable(ctx); err != nil {
			return err
		}
		load.pps /= 2
	}
}

func (l *dut) forwardsNothing(t *trial) error {
	return fmt.Errorf("router %s forwards nothing: of %d frames none came through (%s)", l.name, t.sent.frames, placesOf(t.lost))
}

// unknownFlows counts flows, from a first one on, of which the right sink has seen no frame.
func (s *tester) unknownFlows(first, flows int) (unknown int, err error) {
	var t generatorTranslation
	for flow := uint32(first); flow < uint32(first+flows); flow++ {
		if err := s.translations.Lookup(flow, &t); err != nil {
			return 0, fmt.Errorf("read translation of flow %d: %w", flow, err)
		}
		if t.Known == 0 {
			unknown++
		}
	}
	return unknown, nil
}

// forgetFlows makes all flows unknown.
func (s *tester) forgetFlows() error {
	flows := make([]uint32, s.translations.MaxEntries())
	for i := range flows {
		flows[i] = uint32(i)
	}
	if _, err := s.translations.BatchUpdate(flows, make([]generatorTranslation, len(flows)), nil); err != nil {
		return fmt.Errorf("forget translations: %w", err)
	}
	return nil
}

// run warms the router up and runs one trial, in which it must forward something. A
// router that learns has had the same load right before.
func (l *dut) run(ctx context.Context, load frameLoad) (*trial, error) {
	if l.learns > 0 && load.bothWays {
		lead := load
		lead.duration = l.learns
		if _, err := l.runWarm(ctx, lead); err != nil {
			return nil, err
		}
	}
	t, err := l.runWarm(ctx, load)
	if err == nil && t.sent.frames > 0 && t.received.frames == 0 {
		return nil, l.forwardsNothing(t)
	}
	return t, err
}

// runWarm is run of a router that may have refused all flows but a few.
func (l *dut) runWarm(ctx context.Context, load frameLoad) (*trial, error) {
	if err := l.warm(ctx, load); err != nil {
		return nil, err
	}
	t, err := l.tester.run(ctx, load)
	if err == nil {
		l.warmed = time.Now()
	}
	return t, err
}

// outcome is what a trial gave, of whatever load.
type outcome interface {
	disturbed() []string // what makes the trial no measure of the router
	limited() bool       // the generator missed slots
}

func (t *trial) disturbed() []string { return t.noise }
func (t *trial) limited() bool       { return t.late }

// runs are the trials of one router under one set of conditions.
type runs[T outcome] struct {
	trials    []T
	discarded int
	noise     []string // of trials that were kept all the same
	late      bool     // among them are such whose generator missed slots
	lossy     bool     // more was lost than a cost may bear
}

// series is the trials of one DUT.
type series = runs[*trial]

// label is the trials' Figure.Label.
func (s *runs[T]) label() string {
	switch {
	case s.lossy:
		return "lossy"
	case s.late:
		return "generator-limited"
	case len(s.noise) > 0:
		return "noisy"
	}
	return ""
}

// figure is one quantity of the trials, with what must be known beside.
func (s *runs[T]) figure(router, metric string, p Params, of func(T) float64) Figure {
	f := NewFigure(router, metric, p, s.values(of)...)
	f.Discarded, f.Label = s.discarded, s.label()
	return f
}

// values are one quantity of all trials.
func (s *runs[T]) values(of func(T) float64) []float64 {
	v := make([]float64, len(s.trials))
	for i, t := range s.trials {
		v[i] = of(t)
	}
	return v
}

// interleave runs n rounds, in each of which every router has one trial: A B C A B C.
// What disturbs the machine for a while so disturbs all alike. A trial that was
// disturbed is repeated at once, n times at most over all of a router's; then it is
// kept and labelled. With an error come the trials before it.
func interleave[R any, T outcome](ctx context.Context, routers []R, n int, run func(context.Context, R) (T, error)) ([]runs[T], error) {
	all := make([]runs[T], len(routers))
	for range n {
		for i, r := range routers {
			s := &all[i]
			for {
				if ctx.Err() != nil {
					return all, context.Cause(ctx)
				}
				t, err := run(ctx, r)
				if err != nil {
					return all, err
				}
				noise := t.disturbed()
				if len(noise) > 0 && s.discarded < n {
					s.discarded++
					continue
				}
				s.trials = append(s.trials, t)
				s.noise = append(s.noise, noise...)
				s.late = s.late || t.limited()
				if account, ok := any(r).(interface{ count(T) }); ok { // a DUT's, of lost frames
					account.count(t)
				}
				break
			}
		}
	}
	return all, nil
}

// measured are the routers that have trials. After an interrupt not all do.
func measured[R any, T outcome](routers []R, all []runs[T]) iter.Seq2[int, R] {
	return func(yield func(int, R) bool) {
		for i, l := range routers {
			if len(all[i].trials) > 0 && !yield(i, l) {
				return
			}
		}
	}
}

// count adds a trial that counts to the DUT's account of lost frames.
func (l *dut) count(t *trial) {
	l.sent += t.sent.frames
	for place, n := range t.lost {
		l.lost[place] += n
	}
}

// places are all of them, from the sender on.
var places = []string{LostBeforeRouter, LostOnRouter, LostBacklog, LostInTable, LostInStack, LostAfterRouter, LostBeforeSink, LostAstray, LostElsewhere, Unexplained}

// placesOf writes where frames were lost.
func placesOf(lost map[string]int64) string {
	var words []string
	for _, place := range places {
		if n := lost[place]; n != 0 {
			words = append(words, fmt.Sprintf("%s %d", place, n))
		}
	}
	if words == nil {
		return "no counter moved"
	}
	return strings.Join(words, ", ")
}
