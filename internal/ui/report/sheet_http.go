// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strconv"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

// An HTTP load, and the steps of a demo that make one, as sheets: each run stands
// where otherwise a router does.

// httpRun is a load and what it is called beside others.
type httpRun struct {
	name      string
	http      *bench.HTTPResult
	published *scenario.Published
}

// carriers say who carries the load of a step.
var carriers = map[string]string{
	scenario.StepBaseline: "no NAT", scenario.StepCollapse: "kernel, broken", scenario.StepProof: "kernel, cured",
	scenario.StepAccelerate: "kernel, accelerated", scenario.StepReplace: "natkit's engine",
}

func httpRuns(d *scenario.DemoResult) []httpRun {
	var runs []httpRun
	for _, a := range d.Steps {
		if a.HTTP != nil {
			runs = append(runs, httpRun{a.Name, a.HTTP, a.Published})
		}
	}
	return runs
}

// publishedCase says whose the published figures of the demo are.
const publishedCase = "the same case, measured by its authors on other machines and an older kernel"

// httpSheets is the figures of loads that are compared, and the distribution of
// their times.
func httpSheets(runs []httpRun) []sheet {
	var names []string
	var figures []bench.Figure
	var published []bench.Published
	for _, r := range runs {
		names = append(names, r.name)
		figures = append(figures, httpFigures(r.name, r.http)...)
		if p := r.published; p != nil {
			for _, v := range []struct {
				metric string
				value  float64
			}{
				{"requests_per_second", p.RequestsPerSecond}, {"completed_total", float64(p.Completed)},
				{"time_per_request_mean_ms", p.TimePerRequestMS}, {"connect_mean_ms", p.ConnectMS},
			} {
				if v.value != 0 {
					published = append(published, bench.Published{Source: publishedCase, Router: r.name, Name: r.name,
						Metric: v.metric, Value: v.value, Note: p.Note})
				}
			}
		}
	}
	sheets := sheetsOf(names, figures, published)
	if s := percentileSheet(runs); len(s.Blocks[0].Rows) > 0 {
		sheets = append(sheets, s)
	}
	return sheets
}

// demoSheets is the steps' loads, then what was measured of mitigations side by side.
// Where there is room the steps say who carried their load.
func demoSheets(d *scenario.DemoResult, room bool) (steps, sideBySide []sheet) {
	if runs := httpRuns(d); len(runs) > 0 {
		for i := range runs {
			if by := carriers[runs[i].name]; by != "" && room {
				runs[i].name += " (" + by + ")"
			}
		}
		steps = httpSheets(runs)
	}
	for _, a := range d.Steps {
		for _, s := range sheetsOf(nil, a.Figures, nil) {
			s.Measure.Title += ", side by side"
			sideBySide = append(sideBySide, s)
		}
	}
	return steps, sideBySide
}

// httpFigures is a load's main figures, in the form of figures of routers.
func httpFigures(name string, h *bench.HTTPResult) []bench.Figure {
	var out []bench.Figure
	add := func(metric string, v float64) {
		out = append(out, bench.NewFigure(name, metric, bench.Params{}, v))
	}
	add("requests_per_second", h.RequestsPerSecond)
	add("completed_total", float64(h.Completed))
	add("failed_total", float64(h.Failed.Sum()))
	if h.Completed > 0 {
		add("time_per_request_mean_ms", h.TimePerRequestMS)
		add("connect_mean_ms", h.Connect.Mean)
	}
	add("syn_retransmits_total", float64(h.TCP.SYNRetransmits))
	return out
}

// percentileSheet is within which time which share of the requests was answered.
func percentileSheet(runs []httpRun) sheet {
	s := sheet{Metric: "answered_within_ms", Measure: measureOf("answered_within_ms"), Axis: axisPercentile, Blocks: make([]block, 1)}
	s.Measure.Title = "Time within which a share of the requests completed"
	for _, share := range bench.Percentages {
		for i, r := range runs {
			v, ok := r.http.Percentiles[strconv.Itoa(share)]
			if !ok || r.http.Completed <= 0 {
				continue
			}
			s.Blocks[0].Rows = append(s.Blocks[0].Rows, row{X: float64(share), Name: r.name, Series: i, N: 1, Median: v, Min: v, Max: v})
		}
	}
	s.finish()
	return s
}

// namedTimes is the distribution of one part of a request's time.
type namedTimes struct {
	Name string
	bench.Times
}

func timesOf(h *bench.HTTPResult) []namedTimes {
	return []namedTimes{{"Connect", h.Connect}, {"Processing", h.Processing}, {"Waiting", h.Waiting}, {"Total", h.Total}}
}
