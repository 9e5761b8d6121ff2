// SPDX-License-Identifier: Apache-2.0

package live

import (
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// EngineRates is what natkit's engine, or its acceleration, did in the last window. Engine
// nft counts nothing: its packets are the kernel's.
type EngineRates struct {
	NewPerSecond        float64 `json:"new_per_second"` // sessions
	TranslatedPerSecond float64 `json:"translated_per_second"`
	// DroppedPerSecond is by reason (natkit status), only what was dropped.
	DroppedPerSecond map[string]float64 `json:"dropped_per_second_by_reason,omitzero"`

	// FastPath is which part of the packets that accel could have forwarded it did, 0 to 1;
	// nil where none came, and for engines. SlowPathPerSecond is why the others were not.
	FastPath           *float64           `json:"fast_path_share,omitzero"`
	ForwardedPerSecond float64            `json:"forwarded_per_second,omitzero"`
	SlowPathPerSecond  map[string]float64 `json:"slow_path_per_second_by_reason,omitzero"`
}

// Dropped is all that was dropped.
func (r *EngineRates) Dropped() (sum float64) {
	for _, v := range r.DroppedPerSecond {
		sum += v
	}
	return sum
}

// engineRates are those of a window, nil where nothing counts.
func engineRates(e *snapshot.Engine, seconds float64) *EngineRates {
	if e == nil || e.InNftables() || seconds <= 0 {
		return nil
	}
	rate := func(name string) float64 { return float64(e.Packets[name]) / seconds }
	r := &EngineRates{}
	if e.Accelerates() {
		if share := rulefile.AccelShare(e.Packets); share >= 0 {
			r.FastPath = &share
		}
		r.ForwardedPerSecond = rate("forwarded")
		r.SlowPathPerSecond = map[string]float64{}
		for name, n := range e.Packets {
			if n > 0 && name != "forwarded" && rulefile.AccelEligible(name) {
				r.SlowPathPerSecond[name] = rate(name)
			}
		}
		return r
	}
	r.NewPerSecond, r.TranslatedPerSecond = rate("created"), rate("translated-in")+rate("translated-out")
	r.DroppedPerSecond = map[string]float64{}
	for _, reason := range rulefile.Reasons {
		if reason.Kind == "dropped" && e.Packets[reason.Name] > 0 {
			r.DroppedPerSecond[reason.Name] = rate(reason.Name)
		}
	}
	return r
}
