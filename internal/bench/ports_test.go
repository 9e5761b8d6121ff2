// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// A router with few ports refuses what comes when they are taken, and is measured with
// just that.
func TestPorts(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	few := textRouter{"few", `oifname "eth0" ip protocol udp masquerade to :20000-21999`}
	o := PortsOptions{Routers: []Router{few, &bareRouter{name: "bare"}, &bareRouter{name: "missing", unsupported: true}},
		Duration: 20 * time.Millisecond, Trials: 1}
	res, err := measurePortsOf(t.Context(), o, 2000, []float64{0.1, 0.5})
	if err != nil {
		t.Fatal(err)
	}
	cores := 1
	if cpus, err := allowedCPUs(); err == nil && len(cpus) > 1 {
		cores = 3 // conditions: alone, and beside either load
	}
	for _, want := range []struct {
		router, metric string
		figures        int
	}{
		{"few", MetricNewFlow, 2}, {"few", "established_pps", cores}, {"few", MetricRefused, 1}, {"few", MetricMixed, 1}, {"few", "capacity_sessions", 1},
		{"bare", MetricNewFlow, 2}, {"bare", "established_pps", cores}, {"bare", MetricRefused, 1}, {"bare", "capacity_sessions", 0},
		{"missing", MetricNewFlow, 0},
	} {
		figures := figuresOf(res, want.router, want.metric)
		if len(figures) != want.figures {
			t.Errorf("%s %s: %d figures, want %d", want.router, want.metric, len(figures), want.figures)
		}
		for _, f := range figures {
			if len(f.Values) != 1 || f.Min <= 0 && f.Label == "" { // disturbed as often as it was tried
				t.Errorf("%+v", f)
			}
		}
	}
	ofFew, ofBare := figuresOf(res, "few", "forwarded_share"), figuresOf(res, "bare", "forwarded_share")
	if len(ofFew) != 1 || len(ofBare) != 1 || ofBare[0].Label == "" && ofFew[0].Max > ofBare[0].Min/2 {
		t.Errorf("forwarded %+v, and without NAT %+v", ofFew, ofBare)
	}
	if f := figuresOf(res, "few", "capacity_sessions"); len(f) == 1 && f[0].Max > 2000 {
		t.Errorf("%v of 2000 ports are taken", f[0].Values)
	}
	if res.Kind != "ports" || len(res.Routers) != 3 || res.Routers[2].Unsupported == "" {
		t.Errorf("%+v", res.Routers)
	}
}

// An interruption ends all of it, and is told once.
func TestPortsInterrupted(t *testing.T) {
	ktest.Root(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	stop := errors.New("told to stop")
	res, err := MeasurePorts(ctx, PortsOptions{Routers: []Router{&bareRouter{name: "bare"}}, Duration: time.Second, Trials: 1,
		About: About{Progress: func(format string, _ ...any) {
			if strings.Contains(format, "new flows") {
				cancel(stop)
			}
		}}})
	if res != nil || !errors.Is(err, stop) || strings.Count(err.Error(), stop.Error()) != 1 {
		t.Errorf("%v", err)
	}
}

func TestPortsRefuses(t *testing.T) {
	good := PortsOptions{Routers: []Router{&bareRouter{name: "bare"}}, Duration: time.Second, Trials: 1}
	for option, change := range map[string]func(*PortsOptions){
		"Routers":  func(o *PortsOptions) { o.Routers = nil },
		"Trials":   func(o *PortsOptions) { o.Trials = 0 },
		"Duration": func(o *PortsOptions) { o.Duration = 0 },
	} {
		o := good
		change(&o)
		var refused *OptionError
		if _, err := MeasurePorts(t.Context(), o); !errors.As(err, &refused) || strings.Join(refused.Fields, ", ") != option {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// Each way has a CPU of its own: what one sends forth and the other back is of the same
// flows.
func TestWaysApart(t *testing.T) {
	ktest.Root(t)
	cpus, err := allowedCPUs()
	if err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	l, err := newDUT(t.Context(), stubRouter{"plain", plain}, RouterOptions{}, 10, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	load := frameLoad{frames: []int{MinFrame}, flows: 10, pps: 4000, duration: 100 * time.Millisecond, bothWays: true, waysApart: true, cpus: cpus[:2]}
	var tr *trial
	for range 100 { // other work may have one of the CPUs
		if tr, err = l.runWarm(t.Context(), load); err != nil {
			t.Fatal(err)
		}
		if sent := tr.sent.each; len(sent) == 2 && sent[0] > 0 && sent[1] > 0 {
			break
		}
	}
	forth, err := l.tester.right.read()
	if err != nil {
		t.Fatal(err)
	}
	back, err := l.tester.left.read()
	if err != nil {
		t.Fatal(err)
	}
	if sent := tr.sent.each; len(sent) != 2 || sent[0] == 0 || sent[1] == 0 || forth.frames > sent[0] || back.frames > sent[1] ||
		forth.frames+back.frames != tr.received.frames || tr.lossRatio() > 0.5 {
		t.Errorf("sent %d; forth came %d, back %d", sent, forth.frames, back.frames)
	}
	if want := (share{0, 10}); load.share(0) != want || load.share(1) != want {
		t.Errorf("the CPUs send %v and %v, want %v", load.share(0), load.share(1), want)
	}
}

func TestExpiry(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "nft")
	if cpus, err := allowedCPUs(); err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	o := ExpiryOptions{Routers: []Router{masquerading, &bareRouter{name: "missing", unsupported: true}},
		Sessions: 300, Flows: 10, Rate: 2000, Trials: 1, spare: time.Second, window: 100 * time.Millisecond}
	res, err := Expiry(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for metric, figures := range map[string]int{"latency_median_ns": 2, "latency_p99_ns": 2, "latency_p9999_ns": 2, "latency_max_ns": 2, "loss_ratio": 2, MetricExpired: 1} {
		got := figuresOf(res, "masquerading", metric)
		if len(got) != figures {
			t.Errorf("%s: %d figures, want %d", metric, len(got), figures)
		}
		for _, f := range got {
			if len(f.Values) != 1 || strings.HasPrefix(metric, "latency") && f.Min <= 0 && f.Label == "" {
				t.Errorf("%+v", f)
			}
		}
	}
	if len(res.Routers) != 2 || res.Routers[1].Unsupported == "" {
		t.Errorf("%+v", res.Routers)
	}
	for option, change := range map[string]func(*ExpiryOptions){
		"Routers":  func(o *ExpiryOptions) { o.Routers = nil },
		"Trials":   func(o *ExpiryOptions) { o.Trials = 0 },
		"Sessions": func(o *ExpiryOptions) { o.Sessions = MaxFlows },
		"Flows":    func(o *ExpiryOptions) { o.Flows = 0 },
		"Rate":     func(o *ExpiryOptions) { o.Rate = 0 },
	} {
		o := o
		change(&o)
		var refused *OptionError
		if _, err := Expiry(t.Context(), o); !errors.As(err, &refused) || strings.Join(refused.Fields, ", ") != option {
			t.Errorf("%s: %v", option, err)
		}
	}
	o.Rate = 10 // a packet a second of each flow, which expires after one
	if err := o.check(); !errors.As(err, new(*OptionError)) || !strings.Contains(err.Error(), "want 20 at least") {
		t.Errorf("flows that expire: %v", err)
	}
}
