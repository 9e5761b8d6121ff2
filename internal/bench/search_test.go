// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// device is a router with a capacity; noise is how often a stall loses frames at
// any rate, as on a shared machine, unnoticed.
type device struct {
	capacity  float64
	noise     float64
	random    *rand.Rand
	trials    int
	disturbed int     // every so many trials; 0: none
	stalls    [2]int  // trials, the first and the one after the last, that all lose frames
	stumbles  int     // the generator, in every so many trials; 0: never
	generator float64 // what it sends at most; 0: everything
}

func (d *device) trial(_ context.Context, pps float64, _ time.Duration) (float64, error) {
	d.trials++
	if d.disturbed > 0 && d.trials%d.disturbed == 0 {
		return 1, ErrDisturbed
	}
	if d.generator > 0 && pps > d.generator || d.stumbles > 0 && d.trials%d.stumbles == 0 {
		return 0.1, ErrGeneratorLimit
	}
	loss := max(0, 1-d.capacity/pps)
	if d.random.Float64() < d.noise || d.trials >= d.stalls[0] && d.trials < d.stalls[1] {
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
		{"noisy", GoalNDR, device{capacity: 1_000_000, noise: 0.2}, 1_000_000, "", 400},
		{"noisy partial", GoalPDR, device{capacity: 3_000_000, noise: 0.3}, 3_000_000 / 0.995, "", 400},
		{"some disturbed trials", GoalNDR, device{capacity: 1_000_000, disturbed: 6}, 1_000_000, "", 300},
		{"many disturbed trials", GoalNDR, device{capacity: 1_000_000, disturbed: 3}, 1_000_000, "noisy", 300},
		{"a generator that stumbles", GoalNDR, device{capacity: 1_000_000, stumbles: 6}, 1_000_000, "", 300},
		{"a while of stalls at the start", GoalNDR, device{capacity: 1_000_000, stalls: [2]int{1, 30}}, 1_000_000, "", 500},
		{"a while of stalls in the middle", GoalNDR, device{capacity: 1_000_000, stalls: [2]int{50, 75}}, 1_000_000, "", 500},
		{"a while of stalls near the end", GoalNDR, device{capacity: 1_000_000, stalls: [2]int{80, 105}}, 1_000_000, "", 500},
		{"faster than under overload", GoalNDR, device{capacity: 20_000_000}, 20_000_000, "", 300},
		{"too fast", GoalNDR, device{capacity: 20_000_000, generator: 12_000_000}, 12_000_000, "at the generator's limit", 300},
		{"without end", GoalNDR, device{capacity: 2 * MaxPPS}, MaxPPS, "at the generator's limit", 400},
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

// What could only be had disturbed counts in the end, and is labelled.
func TestSearchDisturbed(t *testing.T) {
	for _, tt := range []struct {
		disturbed int // trials from the first on
		repeated  int
		label     string
	}{
		{0, 0, ""},
		{10, 10, ""},
		{150, 150, "noisy"},
		{100_000, 210, "noisy"},
	} {
		trials := 0
		res, err := Search(t.Context(), GoalNDR, 10_000, 10_000_000, func(_ context.Context, pps float64, _ time.Duration) (float64, error) {
			loss := max(0, 1-1_000_000/pps)
			if trials++; trials <= tt.disturbed {
				return loss, ErrDisturbed
			}
			return loss, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if res.Label() != tt.label || res.Repeated != tt.repeated || math.Abs(res.Lower/1_000_000-1) > 0.01 {
			t.Errorf("%d disturbed: %.0f %q, %d repeated, want 1000000 %q, %d", tt.disturbed, res.Lower, res.Label(), res.Repeated, tt.label, tt.repeated)
		}
		r := &Result{}
		r.addSearch("nft", "ndr_pps", Params{}, res)
		if f := r.Figures[0]; f.Label != tt.label || f.Discarded != tt.repeated || f.Median != res.Lower {
			t.Errorf("%d disturbed: %+v", tt.disturbed, f)
		}
		if notes := strings.Join(r.Notes, ""); (tt.label != "") != strings.Contains(notes, "were disturbed and repeated") {
			t.Errorf("%d disturbed: notes %q", tt.disturbed, notes)
		}
	}
}

func TestSearchRefuses(t *testing.T) {
	broken := errors.New("broken")
	if _, err := Search(t.Context(), GoalNDR, 1, 10, func(context.Context, float64, time.Duration) (float64, error) {
		return 0, broken
	}); !errors.Is(err, broken) {
		t.Errorf("failing trial: %v", err)
	}
	for _, r := range [][2]float64{{0, 1}, {2, 1}, {1, 1}, {1, math.Inf(1)}, {math.NaN(), 1}} {
		if _, err := Search(t.Context(), GoalNDR, r[0], r[1], nil); err == nil {
			t.Errorf("range %v accepted", r)
		}
	}
}

func TestOutcome(t *testing.T) {
	for _, tt := range []struct {
		name string
		t    trial
		loss float64
		err  error
	}{
		{"all came through", trial{sent: sendCount{frames: 1000, skipped: 2}, received: receiveCount{frames: 1000}}, 0, nil},
		{"some lost", trial{sent: sendCount{frames: 1000}, received: receiveCount{frames: 900}}, 0.1, nil},
		{"stolen", trial{sent: sendCount{frames: 1000}, received: receiveCount{frames: 1000}, noise: []string{"steal"}}, 0, ErrDisturbed},
		{"disturbed generator", trial{sent: sendCount{frames: 500, skipped: 500}, received: receiveCount{frames: 500}, late: true, noise: []string{"late"}}, 0.5, ErrDisturbed},
		{"slow generator", trial{sent: sendCount{frames: 800, skipped: 200}, received: receiveCount{frames: 800}, late: true, overtaxed: true, noise: []string{"late"}}, 0.2, ErrGeneratorLimit},
	} {
		if loss, err := tt.t.outcome(); math.Abs(loss-tt.loss) > 1e-9 || err != tt.err {
			t.Errorf("%s: %v, %v, want %v, %v", tt.name, loss, err, tt.loss, tt.err)
		}
	}
}
