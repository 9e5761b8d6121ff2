// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// ResultVersion is the number of the saved form of a Result, an HTTPResult and a demo's: what
// package schema calls a version. A reader takes its own only.
const ResultVersion = 1

// Result is what one measurement of routers gave: raw figures, from which every
// text, table and picture is made. Its JSON form is stable: keys are added, never
// changed.
type Result struct {
	Kind        string      `json:"kind"`    // udp, cps, bulk, rules, trimming, ports, expiry, subscribers
	Command     string      `json:"command"` // that made it
	Started     time.Time   `json:"time"`
	Seconds     float64     `json:"duration_s"`
	Environment Environment `json:"environment"`
	Routers     []RouterUse `json:"routers"` // in the order asked for
	Figures     []Figure    `json:"figures"`
	Published   []Published `json:"published,omitempty"` // other people's, beside which it is shown
	Notes       []string    `json:"notes,omitempty"`     // sentences for the reader
	// Incomplete is why the measurement ended before all was measured; the figures are
	// those that there were by then.
	Incomplete string `json:"incomplete,omitempty"`

	row func(Figure)
}

// RouterUse is a router that was asked for: what it is made of here, or why this
// machine can't have it.
type RouterUse struct {
	Name        string `json:"name"`
	Describe    string `json:"description"`
	Unsupported string `json:"unsupported,omitempty"`
}

// Environment is what a figure depends on besides the router.
type Environment struct {
	Natkit      string            `json:"natkit"`
	Kernel      string            `json:"kernel"`
	CPU         string            `json:"cpu_model"` // model name
	CPUs        int               `json:"cpu_count"`
	MemoryBytes uint64            `json:"ram_bytes"`
	Hypervisor  bool              `json:"hypervisor"` // other machines may share the processors
	Mitigations map[string]string `json:"mitigations,omitempty"`
	Settings    map[string]string `json:"sysctls,omitempty"`  // sysctls and the like that matter
	Offloads    map[string]string `json:"offloads,omitempty"` // "router/eth0": what ethtool -k would say, short
	Versions    map[string]string `json:"versions,omitempty"` // of programs that were used: nft, iptables, iperf3
}

// Params are the conditions under which a figure was measured; those that do not
// apply are zero.
type Params struct {
	FrameBytes int     `json:"frame_bytes,omitempty"` // on the wire, with its checksum; 0 with Mix
	Mix        string  `json:"mix,omitempty"`         // "imix"
	Flows      int     `json:"flows,omitempty"`
	Cores      int     `json:"cores,omitempty"` // of the router
	BothWays   bool    `json:"both_ways,omitempty"`
	WaysApart  bool    `json:"ways_apart,omitempty"` // each on a core of its own
	OfferedPPS float64 `json:"offered_packets_per_second,omitempty"`
	Rules      int     `json:"rule_count"` // that match nothing, before the one that matches
	Streams    int     `json:"streams,omitempty"`
	Direction  string  `json:"direction,omitempty"`  // up: client to server, down: back
	Protocol   string  `json:"protocol,omitempty"`   // udp, tcp
	Setup      string  `json:"setup,omitempty"`      // a published experiment's name for it
	Held       int     `json:"held,omitempty"`       // sessions in the table besides
	PortsUsed  float64 `json:"ports_used,omitempty"` // share of the outside ports that are taken
	Beside     string  `json:"beside,omitempty"`     // what goes on in that time
}

// Figure is one quantity of one router under one set of conditions, with all
// trials that gave it.
type Figure struct {
	Router string `json:"router"`
	Metric string `json:"metric"` // snake_case with its unit at the end: cost_ns, loss_ratio, ndr_pps
	Params Params `json:"params"`

	Values    []float64 `json:"values"`              // of the trials that count, in their order
	Discarded int       `json:"discarded,omitempty"` // trials repeated because something disturbed them
	// Label qualifies a figure that must not be read as the others: "noisy",
	// "generator-limited", "below range".
	Label string `json:"label,omitempty"`

	// Lost is where the frames went that a loss figure counts, over all its trials:
	// frames by place, one of which is what no counter explains.
	Lost map[string]int64 `json:"lost_by_reason,omitempty"`

	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func newResult(kind string, about About) *Result {
	about.complete()
	return &Result{
		Kind: kind, Command: about.Command, Started: time.Now().UTC(), Environment: ReadEnvironment(about.Natkit),
		row: about.Row,
	}
}

// add adds a figure whose trials are all done.
func (r *Result) add(f Figure) {
	r.Figures = append(r.Figures, f)
	if r.row != nil {
		r.row(f)
	}
}

// ended makes the result of what was measured, which is not all if err is set: then it
// comes with the error, and says that it is incomplete, or not at all without a figure.
func (r *Result) ended(ctx context.Context, err error) (*Result, error) {
	r.Seconds = time.Since(r.Started).Seconds()
	switch {
	case err == nil:
		return r, nil
	case !slices.ContainsFunc(r.Figures, func(f Figure) bool { return len(f.Values) > 0 }):
		return nil, err
	case ctx.Err() != nil:
		r.Incomplete = fmt.Sprintf("interrupted after %.0f s", r.Seconds)
	default:
		r.Incomplete = fmt.Sprintf("ended by an error after %.0f s", r.Seconds)
	}
	return r, err
}

// NewFigure makes a figure of the values, which are kept as they are.
func NewFigure(router, metric string, p Params, values ...float64) Figure {
	f := Figure{Router: router, Metric: metric, Params: p, Values: values}
	if len(values) > 0 {
		f.Median, f.Min, f.Max = medianOf(values), slices.Min(values), slices.Max(values)
	}
	return f
}

// Published is a figure that other people measured elsewhere.
type Published struct {
	Source string  `json:"publication"` // what it was and on what
	Router string  `json:"router"`      // natkit's name for the nearest set-up
	Name   string  `json:"name"`        // theirs
	Metric string  `json:"metric"`
	Params Params  `json:"params"`
	Value  float64 `json:"published_value"`
	Note   string  `json:"note,omitempty"` // "at least", where the value is a bound
}

// medianOf is the middle value, or the mean of the two middle ones.
func medianOf(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	if n%2 == 1 {
		return v[n/2]
	}
	return (v[n/2-1] + v[n/2]) / 2
}
