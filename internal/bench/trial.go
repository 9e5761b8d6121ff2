// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"strconv"
	"strings"
	"time"
)

// lane is one router in a bed of its own, or elsewhere, ready to be measured.
type lane struct {
	name  string // the router's
	rules int    // that it has before the one that matches
	stand *stand
	undo  []func() error
	own   Table // nil: sessions are in connection tracking, or nowhere

	sessionsLast time.Duration // less than the time-out of a UDP session that had no answer
	learns       time.Duration // of a Learner

	warmed      time.Time // when each flow last went through, with warmedFlows of them
	warmedFlows int
	lost        map[string]int64 // frames of all trials that count, by place
	sent        uint64
}

// newLane makes a bed and the router in it, for loads of at most so many flows.
func newLane(ctx context.Context, r Router, o RouterOptions, flows int, ownCPU bool) (l *lane, err error) {
	l = &lane{name: r.Name(), lost: map[string]int64{}, sessionsLast: bedTimeout / 2}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	bed, err := NewBed(ctx)
	if err != nil {
		return l, err
	}
	l.undo = append(l.undo, bed.Close)
	if l.stand, err = newStand(bed, flows); err != nil {
		return l, err
	}
	l.undo = append(l.undo, l.stand.close)
	// After the rings are there, which cannot change under XDP; before the sinks.
	remove, err := r.Install(ctx, bed, o)
	if err != nil {
		return l, err
	}
	l.undo = append(l.undo, remove)
	if keeper, ok := r.(TableKeeper); ok {
		l.own = keeper.Table(bed)
	}
	if learner, ok := r.(Learner); ok {
		l.learns = learner.Learns()
	}
	if err := l.setUDPTimeout(cmp.Or(o.UDPTimeout, bedTimeout)); err != nil {
		return l, err
	}
	if err := l.stand.attachSinks(); err != nil {
		return l, err
	}
	if ownCPU {
		return l, l.stand.giveRouterACPU()
	}
	return l, nil
}

// addLanes makes the routers that this machine can have, and names the others in the
// result. Those made before an error come with it.
func addLanes(ctx context.Context, res *Result, routers []Router, o RouterOptions, flows int, progress func(string, ...any)) (lanes []*lane, err error) {
	for _, router := range routers {
		progress("%s: making the router", router.Name())
		use := RouterUse{Name: router.Name(), Describe: router.Describe()}
		l, err := newLane(ctx, router, o, flows, false)
		var unsupported *UnsupportedError
		switch {
		case errors.As(err, &unsupported):
			use.Unsupported = unsupported.Reason
		case err != nil:
			return lanes, err
		default:
			lanes = append(lanes, l)
		}
		res.Routers = append(res.Routers, use)
	}
	return lanes, nil
}

func closeLanes(lanes []*lane) error {
	var errs []error
	for _, l := range lanes {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// bedTimeout is when routers forget a session of UDP: what RFC 4787 recommends, and
// long enough for a table of millions to be filled and measured.
const bedTimeout = 5 * time.Minute

// setUDPTimeout sets connection tracking's time-outs in the router's namespace, if it
// has any.
func (l *lane) setUDPTimeout(d time.Duration) error {
	seconds := strconv.Itoa(int(d.Seconds()))
	return l.stand.bed.Router.Do(func() error {
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
func (l *lane) close() error {
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
func (l *lane) warm(ctx context.Context, load frameLoad) error {
	if load.traffic == segments {
		return l.open(ctx, load.flows)
	}
	if l.warmedFlows == load.flows && time.Since(l.warmed) < l.sessionsLast {
		return nil
	}
	through := frameLoad{frames: []int{MinFrame}, flows: load.flows, cpus: []int{l.stand.generatorCPU},
		pps: warmPPS, duration: 20*time.Millisecond + time.Duration(load.flows)*time.Second/warmPPS}
	if l.stand.threads == nil && !l.stand.bed.elsewhere() && load.flows > manyFlows {
		// On the generator's CPU the router can't be overrun.
		through.pps, through.once, through.duration = 0, true, fillTime(load.flows)
	}
	for attempt := 1; ; attempt++ {
		t, err := l.stand.runLearning(ctx, through, true)
		if err != nil {
			return err
		}
		missing := max(0, load.flows-int(t.sent.frames))
		if load.bothWays {
			if missing, err = l.stand.unknownFlows(load.flows); err != nil {
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
			return fmt.Errorf("router %s: %d of %d flows did not come through after %d attempts (%d frames sent in %v; %s)",
				l.name, missing, load.flows, attempt, t.sent.frames, through.duration, placesOf(t.lost))
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
func (l *lane) open(ctx context.Context, flows int) error {
	if l.warmedFlows == flows {
		return nil
	}
	load := frameLoad{traffic: openings, frames: []int{MinFrame}, flows: flows, once: true, pps: openCPS, cpus: []int{l.stand.generatorCPU}}
	for attempt := 1; ; attempt++ {
		load.duration = time.Second + time.Duration(4*float64(flows)/load.pps*1e9)
		t, err := l.stand.runLearning(ctx, load, true)
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
			return fmt.Errorf("router %s: of %d TCP connections %d were opened, in %d attempts (%s)",
				l.name, flows, t.received.frames, attempt, placesOf(t.lost))
		}
		if err := l.emptyTable(ctx); err != nil {
			return err
		}
		load.pps /= 2
	}
}

func (l *lane) forwardsNothing(t *trial) error {
	return fmt.Errorf("router %s forwards nothing: of %d frames none came through (%s)", l.name, t.sent.frames, placesOf(t.lost))
}

// unknownFlows counts flows of which the right sink has seen no frame.
func (s *stand) unknownFlows(flows int) (unknown int, err error) {
	var t sinkTranslation
	for flow := range uint32(flows) {
		if err := s.translations.Lookup(flow, &t); err != nil {
			return 0, fmt.Errorf("read translation of flow %d: %w", flow, err)
		}
		if t.Known == 0 {
			unknown++
		}
	}
	return unknown, nil
}

// run warms the router up and runs one trial, in which it must forward something. A
// router that learns has had the same load right before.
func (l *lane) run(ctx context.Context, load frameLoad) (*trial, error) {
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
func (l *lane) runWarm(ctx context.Context, load frameLoad) (*trial, error) {
	if err := l.warm(ctx, load); err != nil {
		return nil, err
	}
	t, err := l.stand.run(ctx, load)
	if err == nil {
		l.warmed = time.Now()
	}
	return t, err
}

// series is the trials of one lane under one set of conditions.
type series struct {
	trials    []*trial
	discarded int
	noise     []string // of trials that were kept all the same
	late      bool     // among them are such whose generator missed slots
	lossy     bool     // more was lost than a cost may bear
}

// label is the series' Figure.Label.
func (s *series) label() string {
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
func (s *series) figure(router, metric string, p Params, of func(*trial) float64) Figure {
	f := NewFigure(router, metric, p, s.values(of)...)
	f.Discarded, f.Label = s.discarded, s.label()
	return f
}

// values are one quantity of all trials.
func (s *series) values(of func(*trial) float64) []float64 {
	v := make([]float64, len(s.trials))
	for i, t := range s.trials {
		v[i] = of(t)
	}
	return v
}

// interleave runs n rounds, in each of which every lane has one trial: A B C A B C.
// What disturbs the machine for a while so disturbs all alike. A trial that was
// disturbed is repeated at once, n times at most over all of a lane's; then it is
// kept and labelled. With an error come the trials before it.
func interleave(ctx context.Context, lanes []*lane, n int, run func(context.Context, *lane) (*trial, error)) ([]series, error) {
	all := make([]series, len(lanes))
	for range n {
		for i, l := range lanes {
			s := &all[i]
			for {
				if ctx.Err() != nil {
					return all, context.Cause(ctx)
				}
				t, err := run(ctx, l)
				if err != nil {
					return all, err
				}
				if len(t.noise) > 0 && s.discarded < n {
					s.discarded++
					continue
				}
				s.trials = append(s.trials, t)
				s.noise = append(s.noise, t.noise...)
				s.late = s.late || t.late
				l.count(t)
				break
			}
		}
	}
	return all, nil
}

// measured are the lanes that have trials, with them. After an interrupt not all do.
func measured(lanes []*lane, all []series) iter.Seq2[int, *lane] {
	return func(yield func(int, *lane) bool) {
		for i, l := range lanes {
			if len(all[i].trials) > 0 && !yield(i, l) {
				return
			}
		}
	}
}

// count adds a trial that counts to the lane's account of lost frames.
func (l *lane) count(t *trial) {
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
