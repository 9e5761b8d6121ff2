// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
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
	searchRough     = 3 * time.Second // of trials, by which a rate is judged before the bounds are close
	searchRoughStep = 0.05            // width at which the rough search ends
	searchRepeats   = 20              // invalid trials in a row that end a search,
	searchPatience  = time.Minute     // if they took as long as this, for a disturbance may pass,
	searchInvalid   = 60              // or are so many
)

// SearchResult is the outcome of one goal.
type SearchResult struct {
	Goal  SearchGoal
	Lower float64 // highest rate known to fulfil the goal; 0: not even the least did
	Upper float64 // lowest rate known not to; 0: even the greatest did
	// Throughput is what is forwarded at Lower: the rate less the loss that half
	// of its trials stay below (MLRsearch's conditional throughput).
	Throughput float64
	Trials     []SearchTrial // all of the search, in their order
	Invalid    int           // trials that did not count, and were repeated
}

// Label says what is irregular about the result, "" for nothing.
func (r *SearchResult) Label() string {
	switch {
	case r.Lower == 0:
		return "below range"
	case r.Upper == 0:
		return "at the generator's limit"
	}
	return ""
}

// ErrInvalidTrial is returned by a trial that says nothing about the router: the
// generator could not keep up, or the machine was disturbed. It is repeated.
var ErrInvalidTrial = errors.New("trial is not valid")

// Search finds the highest rate between least and most, in frames a second, that
// fulfils the goal. trial offers a rate for a duration and returns the loss ratio.
//
//  1. Halve the interval on a logarithmic scale with a few trials a rate, until
//     its width is 5 %.
//  2. Decide on its bounds with all trials that the goal wants. A bound that does
//     not hold moves outward, by twice the width each time.
//  3. Halve again, now with all trials, until the width is the goal's.
func Search(ctx context.Context, goal SearchGoal, least, most float64, trial func(ctx context.Context, pps float64, d time.Duration) (loss float64, err error)) (*SearchResult, error) {
	if !(least > 0 && least < most) || math.IsInf(most, 0) {
		return nil, fmt.Errorf("search from %v to %v frames/s: want a range above 0", least, most)
	}
	s := &search{goal: goal, trial: trial, res: &SearchResult{Goal: goal}, losses: map[float64][]float64{}}
	lower, upper, err := s.halve(ctx, least, most, max(goal.Width, searchRoughStep), min(goal.Sum, searchRough))
	if err != nil {
		return s.res, err
	}
	for width := goal.Width; ; width *= 2 {
		holds, err := s.holds(ctx, lower, goal.Sum)
		if err != nil {
			return s.res, err
		}
		if holds {
			break
		}
		upper = lower
		if lower <= least {
			s.res.Upper = upper
			return s.res, nil
		}
		lower = max(least, lower*(1-2*width))
	}
	for width := goal.Width; ; width *= 2 {
		holds, err := s.holds(ctx, upper, goal.Sum)
		if err != nil {
			return s.res, err
		}
		if !holds {
			break
		}
		lower = upper
		if upper >= most {
			return s.finish(lower, 0), nil
		}
		upper = min(most, upper*(1+2*width))
	}
	lower, upper, err = s.halve(ctx, lower, upper, goal.Width, goal.Sum)
	if err != nil {
		return s.res, err
	}
	return s.finish(lower, upper), nil
}

type search struct {
	goal   SearchGoal
	trial  func(context.Context, float64, time.Duration) (float64, error)
	res    *SearchResult
	losses map[float64][]float64 // of the valid trials at a rate
}

// halve narrows the interval to a relative width; the bounds themselves are
// taken for granted.
func (s *search) halve(ctx context.Context, lower, upper, width float64, sum time.Duration) (float64, float64, error) {
	for upper > lower*(1+width) {
		middle := math.Sqrt(lower * upper)
		holds, err := s.holds(ctx, middle, sum)
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

// holds decides whether a rate fulfils the goal, with trials of the given sum,
// and with no more of them than the decision needs.
func (s *search) holds(ctx context.Context, pps float64, sum time.Duration) (bool, error) {
	trials := max(1, int(math.Ceil(float64(sum)/float64(s.goal.Trial))))
	mayExceed := int(s.goal.ExceedRatio * float64(trials))
	for invalid := 0; ; {
		good, bad := 0, 0
		for _, loss := range s.losses[pps] {
			if loss <= s.goal.LossRatio {
				good++
			} else {
				bad++
			}
		}
		switch {
		case bad > mayExceed:
			return false, nil
		case good >= trials-mayExceed:
			return true, nil
		}
		loss, err := s.trial(ctx, pps, s.goal.Trial)
		switch {
		case errors.Is(err, ErrInvalidTrial):
			s.res.Invalid++
			if invalid++; invalid >= searchRepeats && (invalid >= searchInvalid || time.Duration(invalid)*s.goal.Trial >= searchPatience) {
				return false, fmt.Errorf("search for %s at %.0f frames/s: %d trials in a row: %w", s.goal.Name, pps, invalid, err)
			}
			continue
		case err != nil:
			return false, err
		}
		invalid = 0
		s.losses[pps] = append(s.losses[pps], loss)
		s.res.Trials = append(s.res.Trials, SearchTrial{PPS: pps, Loss: loss})
	}
}

func (s *search) finish(lower, upper float64) *SearchResult {
	s.res.Lower, s.res.Upper = lower, upper
	losses := slices.Sorted(slices.Values(s.losses[lower]))
	s.res.Throughput = lower * (1 - losses[(len(losses)-1)/2])
	return s.res
}
