// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"natkit/internal/words/plural"
)

// FrameSize is the length of a load's frames.
type FrameSize struct {
	Bytes int // on the wire, with the checksum; 0 with Mix
	Mix   string
}

// FrameSizes are the lengths of RFC 2544, section 9.1.
var FrameSizes = []int{64, 128, 256, 512, 1024, 1280, 1518}

// ParseFrameSize reads a length such as "64", or "imix".
func ParseFrameSize(text string) (FrameSize, error) {
	if text == "imix" {
		return FrameSize{Mix: text}, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < MinFrame || n > MaxFrame {
		return FrameSize{}, fmt.Errorf("frame size %q: want %d to %d, or imix", text, MinFrame, MaxFrame)
	}
	return FrameSize{Bytes: n}, nil
}

func (s FrameSize) String() string {
	if s.Mix != "" {
		return s.Mix
	}
	return strconv.Itoa(s.Bytes) + " bytes"
}

func (s FrameSize) frames() []int {
	if s.Mix != "" {
		return IMIX
	}
	return []int{s.Bytes}
}

// Rate is an offered rate: in frames a second, or as a share of what the router
// forwards under overload.
type Rate struct {
	PPS   float64
	Share float64
}

// MaxPPS is more than any generator here sends.
const MaxPPS = 1e9

// ParseRate reads a rate such as "1Mpps", "500kpps", "20000" or "50%".
func ParseRate(text string) (Rate, error) {
	refused := fmt.Errorf("rate %q: want frames a second such as 500kpps or 1.5Mpps, at most 1Gpps, or a share such as 50%%, at most 200%%", text)
	if number, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseFloat(number, 64)
		if err != nil || !(n > 0 && n <= 200) {
			return Rate{}, refused
		}
		return Rate{Share: n / 100}, nil
	}
	number, scale := strings.TrimSuffix(text, "pps"), 1.0
	for suffix, by := range map[string]float64{"k": 1e3, "M": 1e6, "G": 1e9} {
		if n, ok := strings.CutSuffix(number, suffix); ok {
			number, scale = n, by
			break
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n*scale >= 1 && n*scale <= MaxPPS) {
		return Rate{}, refused
	}
	return Rate{PPS: n * scale}, nil
}

// UDPOptions is a measurement of routers with UDP frames. With neither Rates nor
// Goals, the generator, the router and the sink share the CPUs and go as fast as
// they can: nothing can be lost, and the time a frame takes is its cost. With
// them the router has one CPU of its own and the generator another. Of a router
// elsewhere neither is known; without Rates and Goals it is what it forwards under
// overload.
type UDPOptions struct {
	Routers  []Router
	Wire     *Wire // instead of Routers: one elsewhere
	Sizes    []FrameSize
	Flows    []int
	Cores    []int // without Rates and Goals; with them the router has one
	BothWays bool  // half of the frames go back, to what the router made of each flow
	Apart    bool  // with BothWays, where Cores are even: each CPU sends one way only
	Rates    []Rate
	Goals    []SearchGoal
	Duration time.Duration // of a trial
	Trials   int           // of each set of conditions

	About
}

// complete checks the options; an *OptionError names the one that cannot be.
func (o *UDPOptions) complete() error {
	cpus, err := allowedCPUs()
	if err != nil {
		return err
	}
	if o.Wire != nil {
		switch {
		case len(o.Routers) > 0:
			return refuse("Routers", "not with {TX}: the router is elsewhere")
		case o.BothWays:
			return refuse("BothWays", "not with {TX}, whose frames go one way")
		case len(o.Flows) == 0:
			return refuse("Flows", "want one at least")
		}
		if err := o.Wire.complete(slices.Max(o.Flows)); err != nil {
			return err
		}
		o.Cores = []int{0} // not to be known
	}
	for i, router := range o.Routers {
		if slices.ContainsFunc(o.Routers[:i], func(r Router) bool { return r.Name() == router.Name() }) {
			return refuse("Routers", "%s is named twice", router.Name())
		}
	}
	for _, n := range o.Flows {
		if n < 1 || n > MaxFlows {
			return refuse("Flows", "%d: want 1 to %d", n, MaxFlows)
		}
	}
	for _, n := range o.Cores {
		switch {
		case o.Wire != nil:
		case n < 1 || n > len(cpus):
			return refuse("Cores", "%d: want 1 to %d, the CPUs that natkit may use", n, len(cpus))
		case n > 1 && n%2 == 1 && o.Apart:
			return refuse("Apart", "%s: want an even number, half of them for each way, or one to compare with", plural.Count(n, "core"))
		case n > 1 && o.ownCPU():
			return refuse("Cores", "%d: at a given rate the router has one CPU of its own", n)
		}
	}
	switch {
	case o.Apart && (!o.BothWays || o.ownCPU()):
		return refuse("Apart", "only with {BothWays}, and without a rate or a search")
	case len(o.Routers) == 0 && o.Wire == nil || len(o.Sizes) == 0 || len(o.Flows) == 0 || len(o.Cores) == 0:
		return refuseAll([]string{"Routers", "Sizes", "Flows", "Cores"}, "want one at least")
	case o.Trials < 1 || o.Trials > 10_000:
		return refuse("Trials", "%d: want 1 to 10000", o.Trials)
	case o.Duration < 10*time.Millisecond || o.Duration > time.Hour:
		return refuse("Duration", "%v: want 10ms to 1h", o.Duration)
	case o.ownCPU() && o.Wire == nil && len(cpus) < 2:
		return refuse("Rates", "the generator and the router want a CPU each, and natkit may use one only")
	}
	return nil
}

// ownCPU tells whether the router has a CPU of its own.
func (o *UDPOptions) ownCPU() bool { return len(o.Rates) > 0 || len(o.Goals) > 0 || o.Wire != nil }

// needsOverload: what routers with a CPU of their own forward under overload is wanted, or what
// searches and shares are of.
func (o *UDPOptions) needsOverload() bool {
	return len(o.Goals) > 0 || len(o.Rates) == 0 || slices.ContainsFunc(o.Rates, func(r Rate) bool { return r.Share > 0 })
}

// udpRun is a measurement under way.
type udpRun struct {
	UDPOptions
	res  *Result
	duts []*dut
}

// UDP measures routers. A router that this machine can't have is named in the
// result with the reason, and the others are measured.
func UDP(ctx context.Context, o UDPOptions) (res *Result, err error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	o.About.complete()
	r := &udpRun{UDPOptions: o, res: newResult("udp", o.About)}
	defer func() {
		if e := closeDUTs(r.duts); e != nil {
			res, err = nil, errors.Join(err, e)
		}
	}()
	o.Plan(o.plan())
	err = r.measureAll(ctx)
	if len(o.Rates) > 0 {
		r.note(latencyNote)
	}
	for _, l := range r.duts {
		if len(l.lost) > 0 {
			r.note("Of %d frames through %s were lost: %s.", l.sent, l.name, placesOf(l.lost))
		}
	}
	return r.res.ended(ctx, err)
}

// plan is what will be measured, and how long that takes.
func (o *UDPOptions) plan() (what string, takes time.Duration) {
	routers := len(o.Routers)
	if o.Wire != nil {
		routers = 1
	}
	conditions := len(o.Sizes) * len(o.Flows) * len(o.Cores)
	trial := o.Duration + trialOverhead
	takes = time.Duration(routers) * routerTakes
	each := time.Duration(o.Trials) * trial // of one router, one set of conditions
	var parts []string
	if o.ownCPU() {
		if o.needsOverload() {
			parts = append(parts, "overload")
			takes += time.Duration(conditions*routers) * (3*trial + each)
		}
		if len(o.Rates) > 0 {
			parts = append(parts, plural.Count(len(o.Rates), "rate"))
			takes += time.Duration(conditions*routers*len(o.Rates)) * each
		}
		for _, goal := range o.Goals {
			parts = append(parts, "a search for "+strings.ToUpper(goal.Name))
			takes += time.Duration(conditions*routers) * goal.takes()
		}
	} else {
		parts = append(parts, "cost of a frame")
		takes += time.Duration(conditions*routers) * each
	}
	return fmt.Sprintf("UDP through %s, %s each: %s", plural.Count(routers, "router"),
		plural.Count(conditions, "set of conditions", "sets of conditions"), strings.Join(parts, ", ")), takes
}

// measureAll makes the routers and measures them under all conditions.
func (r *udpRun) measureAll(ctx context.Context) error {
	o := &r.UDPOptions
	for _, router := range o.Routers {
		o.Progress("%s: making the router", router.Name())
		use := RouterUse{Name: router.Name(), Describe: router.Describe()}
		l, err := newDUT(ctx, router, RouterOptions{}, slices.Max(o.Flows), o.ownCPU())
		var unsupported *UnsupportedError
		switch {
		case errors.As(err, &unsupported):
			use.Unsupported = unsupported.Reason
		case err != nil:
			return err
		default:
			r.duts = append(r.duts, l)
		}
		r.res.Routers = append(r.res.Routers, use)
	}
	if o.Wire != nil {
		o.Progress("looking for the router between %s and %s", o.Wire.TX.Device, o.Wire.RX.Device)
		l, describe, err := newWireDUT(ctx, o.Wire, slices.Max(o.Flows))
		if err != nil {
			return err
		}
		r.duts = append(r.duts, l)
		r.res.Routers = append(r.res.Routers, RouterUse{Name: l.name, Describe: describe})
	}
	for _, size := range o.Sizes {
		for _, flows := range o.Flows {
			for _, cores := range o.Cores {
				p := Params{FrameBytes: size.Bytes, Mix: size.Mix, Flows: flows, Cores: cores, BothWays: o.BothWays, Protocol: "udp"}
				load := frameLoad{frames: size.frames(), flows: flows, bothWays: o.BothWays, duration: o.Duration}
				load.waysApart = o.Apart && cores > 1
				p.WaysApart = load.waysApart
				measure := r.cost
				if o.ownCPU() {
					measure = r.atRates
				}
				if err := measure(ctx, p, load); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (r *udpRun) note(format string, args ...any) {
	r.res.Notes = append(r.res.Notes, fmt.Sprintf(format, args...))
}

// figure adds one quantity of a series.
func (r *udpRun) figure(l *dut, s *series, metric string, p Params, of func(*trial) float64) {
	f := NewFigure(l.name, metric, p, s.values(of)...)
	f.Discarded, f.Label = s.discarded, s.label()
	if metric == "loss_ratio" {
		f.Lost = map[string]int64{}
		for _, t := range s.trials {
			for place, n := range t.lost {
				f.Lost[place] += n
			}
		}
	}
	r.res.add(f)
}

// maxCostLoss is how many frames of a flat-out trial may be lost: more, and the
// time was not spent on forwarding.
const maxCostLoss = 0.01

// cost measures what a frame costs all CPUs: generator, router and sink together,
// without the time that other programs had them.
func (r *udpRun) cost(ctx context.Context, p Params, load frameLoad) error {
	round := 0
	all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
		r.Progress("%s: %s, %s, %s: trial %d", l.name, lengths(load.frames), plural.Count(p.Flows, "flow"), plural.Count(p.Cores, "core"), round+1)
		load := load
		// The last CPUs: the first ones of many machines do the housekeeping.
		load.cpus = l.tester.cpus[len(l.tester.cpus)-p.Cores:]
		round++
		return l.run(ctx, load)
	})
	for i, l := range measured(r.duts, all) {
		s := &all[i]
		s.lossy = slices.Max(s.values((*trial).lossRatio)) > maxCostLoss
		r.figure(l, s, "cost_ns", p, func(t *trial) float64 {
			return ratio(float64(t.spent), float64(t.received.frames))
		})
		s.lossy = false
		r.figure(l, s, "received_pps", p, (*trial).receivedPPS)
	}
	return err
}

func (t *trial) receivedPPS() float64 {
	return float64(t.received.frames) / t.sent.elapsed.Seconds()
}

// timedShare of the frames carry their time: one in so many. It is a prime, so
// that it does not fall in step with flows or lengths.
const timedShare = 31

// atRates measures routers that have a CPU of their own.
func (r *udpRun) atRates(ctx context.Context, p Params, load frameLoad) error {
	load.cpus = []int{r.generatorCPU()}
	overload := make([]float64, len(r.duts)) // received under it, frames a second
	if r.needsOverload() {
		all, err := r.overload(ctx, load)
		for i, l := range measured(r.duts, all) {
			r.figure(l, &all[i], "mrr_pps", p, (*trial).receivedPPS)
			overload[i] = r.res.Figures[len(r.res.Figures)-1].Median
		}
		if err != nil {
			return err
		}
	}
	load.stampEvery = timedShare
	for _, rate := range r.Rates {
		offered := func(i int) float64 {
			if rate.PPS > 0 {
				return rate.PPS
			}
			return significant(rate.Share * overload[i])
		}
		all, err := interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) {
			load := load
			load.pps = offered(slices.Index(r.duts, l))
			r.Progress("%s: %s, %s, %.0f frames/s", l.name, lengths(load.frames), plural.Count(p.Flows, "flow"), load.pps)
			return l.run(ctx, load)
		})
		for i, l := range measured(r.duts, all) {
			p, s := p, &all[i]
			p.OfferedPPS = offered(i)
			r.figure(l, s, "loss_ratio", p, (*trial).lossRatio)
			r.figure(l, s, "received_pps", p, (*trial).receivedPPS)
			if r.Wire == nil {
				r.figure(l, s, "cpu_share", p, func(t *trial) float64 { return t.routerBusy })
			}
			for _, at := range []struct {
				metric string
				share  float64
			}{{"latency_min_ns", 0}, {"latency_median_ns", 0.5}, {"latency_p99_ns", 0.99}, {"latency_max_ns", 1}} {
				r.figure(l, s, at.metric, p, func(t *trial) float64 { return float64(t.received.latency.quantile(at.share)) })
			}
		}
		if err != nil {
			return err
		}
	}
	load.stampEvery = 0
	for _, goal := range r.Goals {
		for i, l := range r.duts {
			if err := r.search(ctx, l, goal, p, load, overload[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *udpRun) generatorCPU() int {
	if len(r.duts) == 0 {
		return 0
	}
	return r.duts[0].tester.generatorCPU
}

// overload measures what each router forwards of more than it can. A flood without
// pacing lowers what an XDP router forwards, so the overload is paced a fifth above
// what came through the flood, and again above what came through that.
func (r *udpRun) overload(ctx context.Context, load frameLoad) ([]series, error) {
	run := func(ctx context.Context, l *dut, pps float64) (*trial, error) {
		r.Progress("%s: %s, %s, overload", l.name, lengths(load.frames), plural.Count(load.flows, "flow"))
		load := load
		load.pps = pps
		return l.run(ctx, load)
	}
	offered := map[*dut]float64{}
	for _, l := range r.duts {
		flood := 0.0
		for range 3 { // the flood, and two approaches
			t, err := run(ctx, l, offered[l])
			if err != nil {
				return nil, err
			}
			// Of the time that the generator had: with less it would be no overload.
			flood = max(flood, ratio(float64(t.received.frames), t.sent.ran.Seconds()), 1)
			offered[l] = min(1.2*flood, MaxPPS)
		}
	}
	return interleave(ctx, r.duts, r.Trials, func(ctx context.Context, l *dut) (*trial, error) { return run(ctx, l, offered[l]) })
}

func lengths(frames []int) FrameSize {
	if len(frames) > 1 {
		return FrameSize{Mix: "imix"}
	}
	return FrameSize{Bytes: frames[0]}
}

// Where a search begins, as shares of what the router forwards under overload.
const (
	searchLeast = 0.02
	searchMost  = 1.2
)

// search finds the highest rate of a router that fulfils the goal.
func (r *udpRun) search(ctx context.Context, l *dut, goal SearchGoal, p Params, load frameLoad, overload float64) error {
	metric := goal.Name + "_pps"
	if !(overload > 0) { // nothing came through in time to search by
		f := NewFigure(l.name, metric, p)
		f.Label = "noisy"
		r.note("%s of %s was not looked for: it forwarded nothing under overload.", strings.ToUpper(goal.Name), l.name)
		r.res.add(f)
		return nil
	}
	found, err := Search(ctx, goal, searchLeast*overload, searchMost*overload, func(ctx context.Context, pps float64, d time.Duration) (float64, error) {
		r.Progress("%s: %s, %s, search for %s: %.0f frames/s", l.name, lengths(load.frames), plural.Count(p.Flows, "flow"), strings.ToUpper(goal.Name), pps)
		load := load
		load.pps, load.duration = pps, d
		t, err := l.run(ctx, load)
		if err != nil {
			return 0, err
		}
		if len(t.noise) == 0 {
			l.count(t)
		}
		return t.outcome()
	})
	if err != nil {
		return err
	}
	r.res.addSearch(l.name, metric, p, found)
	return nil
}

// significant rounds to three figures.
func significant(v float64) float64 {
	if v <= 0 {
		return 1
	}
	scale := math.Pow10(int(math.Floor(math.Log10(v))) - 2)
	return max(1, math.Round(v/scale)*scale)
}

// CurveRates are the rates of a curve of loss against load.
func CurveRates() (rates []Rate) {
	for step := 1; step <= 12; step++ {
		rates = append(rates, Rate{Share: float64(step) / 10})
	}
	return rates
}

// SearchGoals are the goals of a search as the command line names them: zero loss,
// a partial loss such as "0.5%" unless empty, RFC 2544's. Their trials last as
// RFC 2544 and MLRsearch have it, or d where that is given.
func SearchGoals(ndr bool, pdr string, rfc2544 bool, d time.Duration, given bool) (goals []SearchGoal, err error) {
	if ndr {
		goals = append(goals, GoalNDR)
	}
	if pdr != "" {
		goal := GoalPDR
		percent, err := strconv.ParseFloat(strings.TrimSuffix(pdr, "%"), 64)
		if err != nil || !strings.HasSuffix(pdr, "%") || !(percent > 0 && percent < 100) {
			return nil, refuse("PDR", "%q: want a share above 0%% and below 100%%, such as 0.5%%", pdr)
		}
		goal.LossRatio = percent / 100
		goals = append(goals, goal)
	}
	if rfc2544 {
		goals = append(goals, GoalRFC2544)
	}
	if given {
		for i := range goals {
			g := &goals[i]
			g.Sum = g.Sum / g.Trial * d
			g.Trial = d
		}
	}
	return goals, nil
}
