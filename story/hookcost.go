// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"fmt"
	"slices"
	"time"

	"natkit/bench"
	"natkit/trim"
)

// HookCosts is what parts of netfilter cost a forwarded frame on this kernel,
// measured in the lab. The differences are of medians; Figures have the spread.
type HookCosts struct {
	Figures []bench.Figure `json:"figures"` // cost_ns of each router
	Notes   []string       `json:"notes,omitzero"`
	Seconds float64        `json:"seconds"`
	// Parts is the measured cost of each part, in nanoseconds a frame.
	Parts []HookPart `json:"parts"`
}

// HookPart is one difference of two routers.
type HookPart struct {
	Name  string  `json:"name"`
	More  string  `json:"more"` // router with the part
	Less  string  `json:"less"` // router without
	NS    float64 `json:"ns"`
	Noise float64 `json:"noise_ns"` // how wide the middle half of each router's trials is, both together
	// Kind is what of package trim it measures, per function on a hook if PerHook.
	Kind    string `json:"kind,omitzero"`
	PerHook int    `json:"per_hook,omitzero"`
}

// How the trials of MeasureHooks are: some twenty seconds together.
const (
	hookTrials   = 7
	hookDuration = 150 * time.Millisecond
	hookFlows    = 1000
)

// MeasureHooks compares routers in a lab, from no netfilter to what distributions
// register, by what a frame costs on one core.
func MeasureHooks(ctx context.Context, version string, progress func(format string, args ...any)) (*HookCosts, error) {
	return measureHooks(ctx, version, hookTrials, hookDuration, progress)
}

func measureHooks(ctx context.Context, version string, trials int, duration time.Duration, progress func(format string, args ...any)) (*HookCosts, error) {
	routers, err := FindRouters([]string{"none", "framework", "trimmed", "default"})
	if err != nil {
		return nil, err
	}
	idle := PaperSetups()[1].Router // tracking and NAT chains, and nothing translated
	begun := time.Now()
	res, err := bench.UDP(ctx, bench.UDPOptions{
		Routers: append(routers, idle), Sizes: []bench.FrameSize{{Bytes: bench.MinFrame}}, Flows: []int{hookFlows}, Cores: []int{1},
		Duration: duration, Trials: trials, Command: "natkit hooks --cost --measure", Natkit: version, Progress: progress,
	})
	if err != nil {
		return nil, err
	}
	out := &HookCosts{Notes: res.Notes, Seconds: time.Since(begun).Seconds()}
	cost := map[string]bench.Figure{}
	for _, f := range res.Figures {
		if f.Metric == "cost_ns" && len(f.Values) > 0 {
			cost[f.Router] = f
			out.Figures = append(out.Figures, f)
		}
	}
	for _, p := range []HookPart{
		{Name: "three empty chains on prerouting, forward and postrouting", More: "framework", Less: "none", Kind: trim.EmptyChain, PerHook: 3},
		{Name: "tracking of flows that nothing translates", More: idle.Name(), Less: "none", Kind: trim.IdleTracking},
		{Name: "tracking and translation", More: "trimmed", Less: "none"},
		{Name: "the tables raw, mangle, security and filter besides", More: "default", Less: "trimmed"},
	} {
		more, ok1 := cost[p.More]
		less, ok2 := cost[p.Less]
		if !ok1 || !ok2 {
			out.Notes = append(out.Notes, fmt.Sprintf("%s: not measured", p.Name))
			continue
		}
		p.NS = more.Median - less.Median
		p.Noise = middleHalf(more.Values) + middleHalf(less.Values)
		out.Parts = append(out.Parts, p)
	}
	return out, nil
}

// middleHalf is how far the quartiles of some values are apart.
func middleHalf(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	return v[len(v)*3/4] - v[len(v)/4]
}

// Fill writes what was measured to what is needless, where the difference is more
// than noise.
func (h *HookCosts) Fill(needless []trim.Needless) {
	for i := range needless {
		n := &needless[i]
		for _, p := range h.Parts {
			if p.Kind == "" || p.Kind != n.Kind || p.NS <= p.Noise {
				continue
			}
			saves := p.NS
			if p.PerHook > 0 {
				saves = p.NS / float64(p.PerHook)
			}
			n.SavesNS = &saves
		}
	}
}
