// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// device is a router with a capacity; noise is how often a stall loses frames at
// any rate, as on a shared machine.
type device struct {
	capacity float64
	noise    float64
	random   *rand.Rand
	trials   int
	invalid  int // every so many trials; 0: none
}

func (d *device) trial(_ context.Context, pps float64, _ time.Duration) (float64, error) {
	d.trials++
	if d.invalid > 0 && d.trials%d.invalid == 0 {
		return 1, ErrInvalidTrial
	}
	loss := max(0, 1-d.capacity/pps)
	if d.random.Float64() < d.noise {
		loss += 0.02 * d.random.Float64()
	}
	return loss, nil
}

func TestSearch(t *testing.T) {
	const least, most = 10_000, 10_000_000
	for _, tt := range []struct {
		name   string
		goal   SearchGoal
		device device
		want   float64 // the rate that just fulfils the goal
		label  string
		atMost int // trials
	}{
		{"zero loss", GoalNDR, device{capacity: 1_000_000}, 1_000_000, "", 200},
		{"partial drop", GoalPDR, device{capacity: 1_000_000}, 1_000_000 / 0.995, "", 200},
		{"strict", GoalRFC2544, device{capacity: 123_456}, 123_456, "", 40},
		{"noisy", GoalNDR, device{capacity: 1_000_000, noise: 0.2}, 1_000_000, "", 300},
		{"noisy partial", GoalPDR, device{capacity: 3_000_000, noise: 0.3}, 3_000_000 / 0.995, "", 300},
		{"invalid trials", GoalNDR, device{capacity: 1_000_000, invalid: 3}, 1_000_000, "", 300},
		{"too fast", GoalNDR, device{capacity: 20_000_000}, most, "at the generator's limit", 60},
		{"too slow", GoalNDR, device{capacity: 5_000}, 0, "below range", 60},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(20) {
				d := tt.device
				d.random = rand.New(rand.NewPCG(seed, 7))
				res, err := Search(t.Context(), tt.goal, least, most, d.trial)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if res.Label() != tt.label {
					t.Errorf("seed %d: label %q, want %q", seed, res.Label(), tt.label)
				}
				if tt.want == 0 {
					if res.Lower != 0 {
						t.Errorf("seed %d: lower bound %.0f below the range", seed, res.Lower)
					}
					continue
				}
				if off := res.Lower/tt.want - 1; math.Abs(off) > 0.02 {
					t.Errorf("seed %d: %.0f, want %.0f: off by %.1f %%", seed, res.Lower, tt.want, 100*off)
				}
				if res.Upper > 0 && res.Upper > res.Lower*(1+tt.goal.Width)*1.0001 {
					t.Errorf("seed %d: bounds %.0f and %.0f are further apart than %.1f %%", seed, res.Lower, res.Upper, 100*tt.goal.Width)
				}
				if res.Throughput > res.Lower || res.Throughput < res.Lower*(1-tt.goal.LossRatio-1e-9) {
					t.Errorf("seed %d: throughput %.0f at %.0f", seed, res.Throughput, res.Lower)
				}
				if d.trials > tt.atMost {
					t.Errorf("seed %d: %d trials, want at most %d", seed, d.trials, tt.atMost)
				}
			}
		})
	}
}

func TestSearchEnds(t *testing.T) {
	never := func(context.Context, float64, time.Duration) (float64, error) { return 0, ErrInvalidTrial }
	if _, err := Search(t.Context(), GoalNDR, 1, 10, never); !errors.Is(err, ErrInvalidTrial) {
		t.Errorf("only invalid trials: %v", err)
	}
	short, trials := GoalNDR, 0
	short.Trial = 10 * time.Millisecond // a minute of these would take far longer, for what is around each
	_, err := Search(t.Context(), short, 1, 10, func(ctx context.Context, pps float64, d time.Duration) (float64, error) {
		trials++
		return never(ctx, pps, d)
	})
	if !errors.Is(err, ErrInvalidTrial) || trials != searchInvalid {
		t.Errorf("%d short trials, all invalid: %v", trials, err)
	}
	broken := errors.New("broken")
	if _, err := Search(t.Context(), GoalNDR, 1, 10, func(context.Context, float64, time.Duration) (float64, error) {
		return 0, broken
	}); !errors.Is(err, broken) {
		t.Errorf("failing trial: %v", err)
	}
	for _, r := range [][2]float64{{0, 1}, {2, 1}, {1, 1}, {1, math.Inf(1)}, {math.NaN(), 1}} {
		if _, err := Search(t.Context(), GoalNDR, r[0], r[1], never); err == nil {
			t.Errorf("range %v accepted", r)
		}
	}
}
