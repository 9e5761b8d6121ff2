// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"natkit/internal/bench"
	"natkit/internal/scenario"
	"natkit/internal/words/schema"
)

// Saved is one saved result. One of Result, HTTP and Demo is set.
type Saved struct {
	Name   string               `json:"file"`
	Result *bench.Result        `json:"bench,omitempty"`
	HTTP   *bench.HTTPResult    `json:"http,omitempty"`
	Demo   *scenario.DemoResult `json:"demo,omitempty"`
}

// SavedResults is what natkit report prints with -o json.
type SavedResults struct {
	Results []*Saved `json:"results"`
}

// What a file may hold at most. It may come from anybody.
const (
	maxFileBytes = 64 << 20
	maxFigures   = 20_000
	maxValues    = 10_000 // of one figure
	maxSteps     = 100
	maxCommas    = 2 << 20 // as of two bytes each a figure of some hundred is made
	maxMagnitude = 1e18    // of any number: sums and ratios of them stay finite
)

// Load reads a result as -o json wrote it, and recognises by its content what it
// is. name is for its errors.
func Load(name string, r io.Reader) (*Saved, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", name, err)
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("read %q: more than %d MiB: no result is that large", name, maxFileBytes>>20)
	}
	if bytes.Count(data, []byte{','}) > maxCommas {
		return nil, fmt.Errorf("read %q: more than %d values: no result has that many", name, maxCommas)
	}
	s, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", name, err)
	}
	s.Name = name
	return s, nil
}

// errForeign is for JSON that is no result.
var errForeign = errors.New("not the result of a measurement: want what natkit bench or natkit demo wrote with -o json")

// errEarlier is for the results of a natkit whose files had no schema.
var errEarlier = errors.New("an earlier natkit saved it, and this one does not read its form: measure again, or show it with the natkit that saved it")

func parse(data []byte) (*Saved, error) {
	var object map[string]json.RawMessage
	if err := decode(data, &object); err != nil {
		return nil, err
	}
	var name string
	if text, ok := object[schema.Key]; !ok {
		if _, ok := object["figures"]; ok || object["percentiles_ms"] != nil || object["restored"] != nil {
			return nil, errEarlier
		}
		return nil, errForeign
	} else if err := json.Unmarshal(text, &name); err != nil {
		return nil, errForeign
	}
	kind, version, ok := schema.Parse(name)
	s := &Saved{}
	var check func() error
	var into any
	switch {
	case !ok:
		return nil, errForeign
	case kind == KindBench:
		s.Result = new(bench.Result)
		into, check = s.Result, func() error { return checkResult(s.Result) }
	case kind == KindDemo:
		s.Demo = new(scenario.DemoResult)
		into, check = s.Demo, func() error { return checkDemo(s.Demo) }
	case kind == KindBenchHTTP:
		s.HTTP = new(bench.HTTPResult)
		into, check = s.HTTP, func() error { return checkHTTP("", s.HTTP) }
	default:
		return nil, fmt.Errorf("it is %q: %w", name, errForeign)
	}
	if version > bench.ResultVersion {
		return nil, fmt.Errorf("it is %q, this natkit reads %q: use a newer natkit", name, schema.Name(kind, bench.ResultVersion))
	}
	if err := decode(data, into); err != nil {
		return nil, err
	}
	return s, check()
}

// decode reads the one JSON value that data is; an error says at which line and
// column it lies.
func decode(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	err := d.Decode(v)
	if err == nil {
		if _, err := d.Token(); err != io.EOF {
			return fmt.Errorf("%s: more data after the end of the result: want one result per file", place(data, d.InputOffset()))
		}
		return nil
	}
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	var day *time.ParseError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("%s: this is not JSON, which natkit bench writes with -o json", place(data, syntax.Offset))
	case errors.As(err, &wrong) && wrong.Field == "":
		return errForeign // all of it is something else
	case errors.As(err, &wrong):
		return fmt.Errorf("%s: %s is of type %s, want %s", place(data, wrong.Offset), wrong.Field, wrong.Value, wrong.Type)
	case errors.As(err, &day):
		return fmt.Errorf("%q is not a time: want a form such as 2026-01-31T12:00:00Z", day.Value)
	case errors.Is(err, io.EOF):
		return errors.New("it is empty")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s: it ends too early: it is truncated", place(data, int64(len(data))))
	}
	return err
}

// place is a byte's line and column, counted from 1.
func place(data []byte, offset int64) string {
	before := data[:min(max(offset-1, 0), int64(len(data)))]
	line := bytes.Count(before, []byte("\n")) + 1
	column := len(before) - bytes.LastIndexByte(before, '\n')
	return fmt.Sprintf("line %d, column %d", line, column)
}

func checkResult(r *bench.Result) error {
	if len(r.Figures) > maxFigures || len(r.Published) > maxFigures || len(r.Routers) > maxFigures {
		return fmt.Errorf("more than %d figures", maxFigures)
	}
	c := checker{}
	c.number("duration_s", r.Seconds)
	c.figures("", r.Figures)
	for i, p := range r.Published {
		at := fmt.Sprintf("published[%d]", i)
		if p.Metric == "" {
			c.problem("%s.metric is missing", at)
		}
		c.number(at+".value", p.Value)
		c.params(at, p.Params)
	}
	return c.err
}

func (c *checker) figures(under string, figures []bench.Figure) {
	if len(figures) > maxFigures {
		c.problem("%sfigures: more than %d", under, maxFigures)
		return
	}
	for i, f := range figures {
		at := fmt.Sprintf("%sfigures[%d]", under, i)
		if len(f.Values) > maxValues {
			c.problem("%s.values: more than %d", at, maxValues)
			return
		}
		if f.Metric == "" {
			c.problem("%s.metric is missing", at)
		}
		for j, v := range f.Values {
			c.number(fmt.Sprintf("%s.values[%d]", at, j), v)
		}
		c.params(at, f.Params)
	}
}

func checkDemo(d *scenario.DemoResult) error {
	if len(d.Steps) > maxSteps {
		return fmt.Errorf("steps: more than %d", maxSteps)
	}
	for i, a := range d.Steps {
		at := fmt.Sprintf("steps[%d]", i)
		if a.HTTP != nil {
			if err := checkHTTP(at+".http.", a.HTTP); err != nil {
				return err
			}
		}
		var c checker
		c.figures(at+".", a.Figures)
		if p := a.Published; p != nil {
			c.number(at+".published.requests_per_second", p.RequestsPerSecond)
			c.number(at+".published.time_per_request_ms", p.TimePerRequestMS)
			c.number(at+".published.connect_ms", p.ConnectMS)
		}
		if c.err != nil {
			return c.err
		}
	}
	return nil
}

func checkHTTP(at string, h *bench.HTTPResult) error {
	var c checker
	c.number(at+"requests_per_second", h.RequestsPerSecond)
	c.number(at+"time_per_request_ms", h.TimePerRequestMS)
	c.number(at+"client_cpu_share", h.ClientCPUShare)
	c.number(at+"machine_cpu_s", h.MachineCPUSeconds)
	for _, t := range timesOf(h) {
		for _, v := range []float64{t.Min, t.Mean, t.SD, t.Median, t.Max} {
			c.number(at+strings.ToLower(t.Name)+"_ms", v)
		}
	}
	for k, v := range h.Percentiles {
		c.number(fmt.Sprintf("%spercentiles_ms[%q]", at, k), v)
	}
	return c.err
}

// checker keeps the first problem.
type checker struct{ err error }

func (c *checker) problem(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

func (c *checker) number(where string, v float64) {
	if math.IsNaN(v) || abs(v) > maxMagnitude {
		c.problem("%s is %g: want a number up to %g", where, v, maxMagnitude)
	}
}

func (c *checker) params(at string, p bench.Params) {
	for _, n := range []struct {
		name  string
		value float64
	}{
		{"frame_bytes", float64(p.FrameBytes)}, {"flows", float64(p.Flows)}, {"cores", float64(p.Cores)},
		{"offered_packets_per_second", p.OfferedPPS}, {"rule_count", float64(p.Rules)}, {"streams", float64(p.Streams)},
		{"held", float64(p.Held)}, {"ports_used", p.PortsUsed},
	} {
		if !(n.value >= 0 && n.value <= maxMagnitude) {
			c.problem("%s.params.%s is %g: want 0 to %g", at, n.name, n.value, maxMagnitude)
		}
	}
}
