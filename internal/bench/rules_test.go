// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

func TestRules(t *testing.T) {
	ktest.Root(t)
	many, few := &bareRouter{name: "many", maxRules: MaxRules}, &bareRouter{name: "few"}
	res, err := Rules(t.Context(), RulesOptions{
		Routers: []Router{many, few, &bareRouter{name: "missing", unsupported: true}},
		Counts:  []int{500, 0}, Load: 300 * time.Millisecond, Flows: 20, Trials: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	// Twice for the trials, once for those of open connections.
	if want := []RouterOptions{{Sockets: true}, {Sockets: true}, {Rules: 500, Sockets: true}, {Rules: 500, Sockets: true}, {}, {Rules: 500}}; !slices.Equal(many.installed, want) {
		t.Errorf("installed with %v, want %v", many.installed, want)
	}
	for _, c := range []struct {
		router, metric string
		figures        int
	}{
		{"many", MetricNewConnections, 2}, {"many", MetricFirstPacket, 2}, {"many", MetricEstablished, 2},
		{"few", MetricNewConnections, 1}, {"few", MetricFirstPacket, 1}, {"few", MetricEstablished, 1}, {"few", MetricLoad, 0},
		{"missing", MetricNewConnections, 0},
	} {
		figures := figuresOf(res, c.router, c.metric)
		if len(figures) != c.figures {
			t.Errorf("%s %s: %d figures, want %d", c.router, c.metric, len(figures), c.figures)
		}
		for _, f := range figures {
			if len(f.Values) != 2 || c.metric == MetricNewConnections && f.Min <= 0 {
				t.Errorf("%+v", f)
			}
		}
	}
	if res.Routers[1].Unsupported != "" || res.Routers[2].Unsupported == "" || len(res.Notes) < 2 {
		t.Errorf("%+v, notes %q", res.Routers, res.Notes)
	}
}

// The first packet is timed by itself: an answer that comes late only for a
// flow's first datagram is what is measured.
func TestFirstPacket(t *testing.T) {
	ktest.Root(t)
	testbed, err := NewTestbed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testbed.Close() })
	s := &site{testbed: testbed}
	stop, err := serveEcho(testbed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.firstPacket(t.Context(), 20); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.firstPacket(ctx, 20); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v", err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestRulesRefuses(t *testing.T) {
	for option, spoil := range map[string]func(*RulesOptions){
		"Routers": func(o *RulesOptions) { o.Routers = nil },
		"Counts":  func(o *RulesOptions) { o.Counts = []int{0, MaxRules + 1} },
		"Load":    func(o *RulesOptions) { o.Load = 0 },
		"Flows":   func(o *RulesOptions) { o.Flows = 0 },
		"Trials":  func(o *RulesOptions) { o.Trials = MaxTrials + 1 },
	} {
		o := RulesOptions{Routers: []Router{&bareRouter{}}, Counts: []int{0}, Load: time.Second, Flows: 1, Trials: 1}
		spoil(&o)
		_, err := Rules(t.Context(), o)
		var refused *OptionError
		if !errors.As(err, &refused) || strings.Join(refused.Fields, ", ") != option {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// Memory that other allocations hid is left out, and that is said.
func TestHiddenMemory(t *testing.T) {
	for _, c := range []struct {
		values []float64
		stays  bool
	}{{[]float64{100, 110, 90}, true}, {[]float64{100, 110, -1}, false}, {[]float64{100, 150, 100}, false}} {
		comparison := &comparison{result: &Result{}}
		comparison.addMemory(NewFigure("a", MetricMemory, Params{}, c.values...))
		comparison.rulesNotes(RulesOptions{Counts: []int{1}})
		res := comparison.result
		hidden := strings.Contains(strings.Join(res.Notes, " "), "other allocations of the machine hid it: a behind 0 rules")
		if (len(res.Figures) == 1) != c.stays || hidden == c.stays {
			t.Errorf("%v: %+v, notes %q", c.values, res.Figures, res.Notes)
		}
	}
}

func TestMeminfo(t *testing.T) {
	text := "MemTotal:       24000 kB\nSlab:            2048 kB\n"
	if got := meminfo(text, "Slab"); got != 2<<20 {
		t.Errorf("%d", got)
	}
	if got := meminfo(text, "Percpu"); got != 0 {
		t.Errorf("%d for a line that is not there", got)
	}
}
