// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"natkit/internal/words/plural"
)

// SearchGoal is what a rate must fulfil to count as sustained, in the terms of
// MLRsearch (draft-ietf-bmwg-mlrsearch): trials of one duration, of which a share
// may exceed the loss, for single trials on a shared machine contradict each other.
type SearchGoal struct {
	Name        string
	LossRatio   float64 // of a trial's frames that may be lost
	ExceedRatio float64 // share of the trials' time that may lose more
	Trial       time.Duration
	Sum         time.Duration // of the trials that decide on one rate
	Width       float64       // relative distance of the bounds at which the search ends
}

// takes is about how long a search lasts: on a quiet machine it ends after some seven times
// as many trials as decide on one rate.
func (g SearchGoal) takes() time.Duration {
	return 7*g.Sum + 7*time.Duration(math.Ceil(float64(g.Sum)/float64(g.Trial)))*trialOverhead
}

// The goals of CSIT, and RFC 2544's own, section 26.1.
var (
	GoalNDR     = SearchGoal{Name: "ndr", ExceedRatio: 0.5, Trial: time.Second, Sum: 21 * time.Second, Width: 0.005}
	GoalPDR     = SearchGoal{Name: "pdr", LossRatio: 0.005, ExceedRatio: 0.5, Trial: time.Second, Sum: 21 * time.Second, Width: 0.005}
	GoalRFC2544 = SearchGoal{Name: "rfc2544", Trial: time.Minute, Sum: time.Minute, Width: 0.005}
)

// SearchTrial is one trial of a search.
type SearchTrial struct {
	PPS  float64 // offered
	Loss float64 // ratio
}

// Search limits.
const (
	searchRough     = 3    // trials, by which a rate is judged before the bounds are close
	searchRoughStep = 0.05 // width at which the rough search ends
	searchRepeats   = 10   // as many disturbed trials are repeated as decide on so many rates
	searchLimited   = 7    // trials that say a rate is more than the generator sends, if no more say else
	searchNoisy     = 0.25 // trials repeated for each that counts, from which on the result is labelled
)

// SearchResult is the outcome of one goal.
type SearchResult struct {
	Goal  SearchGoal
	Lower float64 // highest rate known to fulfil the goal; 0: not even the least did
	Upper float64 // lowest rate known not to; 0: even the greatest did
	// Throughput is what is forwarded at Lower: the rate less the loss that half
	// of its trials stay below (MLRsearch's conditional throughput).
	Throughput float64
	Trials     []SearchTrial // that count, in their order
	Repeated   int           // trials that do not, for they were disturbed
	Disturbed  int           // trials that do, for undisturbed ones could not be had
	Limited    bool          // Upper is more than the generator sends
}

// Label says what is irregular about the result, "" for nothing.
func (r *SearchResult) Label() string {
	switch {
	case r.noisy():
		return "noisy"
	case r.Lower == 0:
		return "below range"
	case r.Upper == 0 || r.Limited:
		return "at the generator's limit"
	}
	return ""
}

// noisy tells whether the machine was disturbed so often that what went unnoticed
// matters, too.
func (r *SearchResult) noisy() bool {
	return r.Disturbed > 0 || float64(r.Repeated) > searchNoisy*float64(len(r.Trials))
}

// What a trial may return beside its loss.
var (
	// ErrDisturbed says that the machine was disturbed, so that the trial says little
	// about the router. It is repeated, but not for ever.
	ErrDisturbed = errors.New("trial was disturbed")
	// ErrGeneratorLimit says that the generator missed slots of a rate near its highest
	// though it had its CPU. If it does so again and again, the rate is more than it
	// sends; once, it was disturbed by what nobody can see.
	ErrGeneratorLimit = errors.New("more than the generator sends")
)

// Search finds the highest rate, in frames a second, that fulfils the goal; it
// begins between least and most, and does not go below least. trial offers a rate
// for a duration and returns the loss ratio.
//
//  1. Halve the interval on a logarithmic scale with a few trials a rate, until
//     its width is 5 %.
//  2. Decide on its bounds with all trials that the goal wants. A bound that does
//     not hold moves outward, by twice the width each time.
//  3. Halve again, now with all trials, until the width is the goal's.
//  4. Repeat 2 and 3 with twice as many trials, the earlier ones included. What
//     disturbed the trials of a rate and went unnoticed is over when more of them
//     come, and has no majority of them all.
//
// Disturbed trials are repeated, ten times as many as the goal wants of a rate. From
// then on they count, and the result says so.
func Search(ctx context.Context, goal SearchGoal, least, most float64, trial func(ctx context.Context, pps float64, d time.Duration) (loss float64, err error)) (*SearchResult, error) {
	if !(least > 0 && least < most) || most > MaxPPS {
		return nil, fmt.Errorf("search from %v to %v frames/s: want a range above 0", least, most)
	}
	full := max(1, int(math.Ceil(float64(goal.Sum)/float64(goal.Trial))))
	s := &search{goal: goal, least: least, trial: trial, repeats: searchRepeats * full, res: &SearchResult{Goal: goal},
		losses: map[float64][]float64{}, limited: map[float64]int{}}
	lower, upper, err := s.halve(ctx, least, most, max(goal.Width, searchRoughStep), min(full, searchRough))
	if err != nil {
		return nil, err
	}
	passes := []int{full, 2 * full}
	if goal.ExceedRatio == 0 { // a single trial decides for ever
		passes = passes[:1]
	}
	for _, trials := range passes {
		if lower, upper, err = s.settle(ctx, max(lower, least), upper, trials); err != nil {
			return nil, err
		}
		if upper == 0 {
			break
		}
		if lower == 0 {
			continue
		}
		if lower, upper, err = s.halve(ctx, lower, upper, goal.Width, trials); err != nil {
			return nil, err
		}
	}
	s.finish(lower, upper)
	return s.res, nil
}

type search struct {
	goal    SearchGoal
	least   float64
	trial   func(context.Context, float64, time.Duration) (float64, error)
	repeats int // of disturbed trials, at most
	res     *SearchResult
	losses  map[float64][]float64 // of the trials at a rate that count
	limited map[float64]int       // trials at a rate that the generator could not send
}

// settle moves bounds that do not hold outward. The lower one is 0 if the least
// rate does not fulfil the goal, the upper one if every rate does.
func (s *search) settle(ctx context.Context, lower, upper float64, trials int) (float64, float64, error) {
	for width := s.goal.Width; ; width *= 2 {
		holds, err := s.holds(ctx, lower, trials)
		if err != nil {
			return 0, 0, err
		}
		if holds {
			break
		}
		upper = lower
		if lower <= s.least {
			return 0, upper, nil
		}
		lower = max(s.least, lower*(1-2*width))
	}
	for width := s.goal.Width; ; width *= 2 {
		holds, err := s.holds(ctx, upper, trials)
		if err != nil {
			return 0, 0, err
		}
		if !holds {
			return lower, upper, nil
		}
		lower = upper
		if upper >= MaxPPS {
			return lower, 0, nil
		}
		upper = min(MaxPPS, upper*(1+2*width))
	}
}

// halve narrows the interval to a relative width; the bounds themselves are
// taken for granted.
func (s *search) halve(ctx context.Context, lower, upper, width float64, trials int) (float64, float64, error) {
	for upper > lower*(1+width) {
		middle := math.Sqrt(lower * upper)
		holds, err := s.holds(ctx, middle, trials)
		if err != nil {
			return 0, 0, err
		}
		if holds {
			lower = middle
		} else {
			upper = middle
		}
	}
	return lower, upper, nil
}

// holds decides whether a rate fulfils the goal with so many trials, and with no
// more of them than the decision needs.
func (s *search) holds(ctx context.Context, pps float64, trials int) (bool, error) {
	mayExceed := int(s.goal.ExceedRatio * float64(trials))
	for {
		good, bad := 0, 0
		for _, loss := range s.losses[pps] {
			if loss <= s.goal.LossRatio {
				good++
			} else {
				bad++
			}
		}
		switch limited := s.limited[pps]; {
		case bad > mayExceed, limited >= min(searchLimited, trials) && limited > good+bad:
			return false, nil
		case good >= trials-mayExceed:
			return true, nil
		}
		loss, err := s.trial(ctx, pps, s.goal.Trial)
		switch {
		case errors.Is(err, ErrGeneratorLimit):
			s.limited[pps]++
			continue
		case errors.Is(err, ErrDisturbed):
			if s.res.Repeated < s.repeats {
				s.res.Repeated++
				continue
			}
			s.res.Disturbed++
		case err != nil:
			return false, err
		}
		s.losses[pps] = append(s.losses[pps], loss)
		s.res.Trials = append(s.res.Trials, SearchTrial{PPS: pps, Loss: loss})
	}
}

func (s *search) finish(lower, upper float64) {
	s.res.Lower, s.res.Upper = lower, upper
	s.res.Limited = s.limited[upper] > len(s.losses[upper])
	for pps, n := range s.limited {
		if n <= len(s.losses[pps]) {
			s.res.Repeated += n
		}
	}
	if losses := slices.Sorted(slices.Values(s.losses[lower])); len(losses) > 0 {
		s.res.Throughput = lower * (1 - losses[(len(losses)-1)/2])
	}
}

// outcome is what a search makes of a trial: the loss, and whether it says something
// about the router. What a late generator did not send is lost, too.
func (t *trial) outcome() (loss float64, err error) {
	loss = t.lossRatio()
	if t.late {
		slots := float64(t.sent.frames + t.sent.skipped)
		loss = 1 - ratio(float64(t.received.frames), slots)
	}
	switch {
	case t.overtaxed:
		return loss, ErrGeneratorLimit
	case len(t.noise) > 0:
		return loss, ErrDisturbed
	}
	return loss, nil
}

// addSearch adds what a search found.
func (r *Result) addSearch(router, metric string, p Params, found *SearchResult) {
	f := NewFigure(router, metric, p)
	if found.Lower > 0 {
		f = NewFigure(router, metric, p, found.Lower)
	}
	f.Label, f.Discarded = found.Label(), found.Repeated
	r.add(f)
	if !found.noisy() {
		return
	}
	note := fmt.Sprintf("%s of %s: %s of the search, %d were disturbed and repeated", strings.ToUpper(found.Goal.Name), router,
		plural.Count(len(found.Trials), "trial"), found.Repeated)
	if found.Disturbed > 0 {
		note += fmt.Sprintf(", and %d count though they were disturbed, for no others could be had", found.Disturbed)
	}
	if found.Lower > 0 {
		note += "; a quiet machine may show more."
	} else {
		note += "; no rate was found that the router sustains."
	}
	r.Notes = append(r.Notes, note)
}
