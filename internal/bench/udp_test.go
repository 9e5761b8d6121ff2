// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

func TestParseRate(t *testing.T) {
	for text, want := range map[string]Rate{
		"1Mpps": {PPS: 1e6}, "500kpps": {PPS: 5e5}, "1.5M": {PPS: 1.5e6}, "20000": {PPS: 20000}, "10pps": {PPS: 10},
		"1Gpps": {PPS: 1e9}, "50%": {Share: 0.5}, "0.5%": {Share: 0.005}, "200%": {Share: 2},
	} {
		if got, err := ParseRate(text); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "pps", "0", "-1", "0.5", "2Gpps", "NaN", "Inf", "1e300Mpps", "0%", "-5%", "201%", "NaN%", "1 Mpps", "1mpps"} {
		if got, err := ParseRate(text); err == nil {
			t.Errorf("ParseRate(%q) = %v, want an error", text, got)
		}
	}
}

func TestParseFrameSize(t *testing.T) {
	for text, want := range map[string]FrameSize{"64": {Bytes: 64}, "1518": {Bytes: 1518}, "imix": {Mix: "imix"}} {
		if got, err := ParseFrameSize(text); err != nil || got != want {
			t.Errorf("ParseFrameSize(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "63", "1519", "-64", "64b", "mix"} {
		if got, err := ParseFrameSize(text); err == nil {
			t.Errorf("ParseFrameSize(%q) = %v, want an error", text, got)
		}
	}
}

func TestSearchGoals(t *testing.T) {
	goals, err := SearchGoals(true, "2%", true, 200*time.Millisecond, true)
	if err != nil || len(goals) != 3 {
		t.Fatal(goals, err)
	}
	if g := goals[0]; g.LossRatio != 0 || g.Trial != 200*time.Millisecond || g.Sum != 21*200*time.Millisecond {
		t.Errorf("NDR %+v", g)
	}
	if g := goals[1]; g.LossRatio != 0.02 || g.Name != "pdr" {
		t.Errorf("PDR %+v", g)
	}
	if g := goals[2]; g.ExceedRatio != 0 || g.Sum != g.Trial {
		t.Errorf("RFC 2544 %+v", g)
	}
	if goals, err = SearchGoals(false, "", false, time.Second, false); err != nil || goals != nil {
		t.Error(goals, err)
	}
	for _, pdr := range []string{"0.5", "0%", "100%", "x%", "NaN%"} {
		if _, err := SearchGoals(false, pdr, false, 0, false); err == nil {
			t.Errorf("--pdr %s is taken", pdr)
		}
	}
}

func TestSignificant(t *testing.T) {
	for v, want := range map[float64]float64{0: 1, 0.3: 1, 1234: 1230, 987654: 988000, 55.56: 55.6} {
		if got := significant(v); got < want*0.9999 || got > want*1.0001 {
			t.Errorf("significant(%v) = %v, want %v", v, got, want)
		}
	}
}

// DUTs take turns, and a disturbed trial is repeated until the DUT's share of
// repetitions is used up; then it is kept and labelled.
func TestInterleave(t *testing.T) {
	duts := []*dut{
		{name: "quiet", lost: map[string]int64{}},
		{name: "once", lost: map[string]int64{}},
		{name: "always", lost: map[string]int64{}},
	}
	var order []string
	runs := map[string]int{}
	all, err := interleave(context.Background(), duts, 2, func(_ context.Context, l *dut) (*trial, error) {
		name := l.name
		order = append(order, name)
		runs[name]++
		t := &trial{sent: sendCount{frames: 10}, lost: map[string]int64{LostInStack: 1}}
		if name == "always" || name == "once" && runs[name] == 1 {
			t.noise = []string{"noise"}
		}
		return t, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(order, " "), "quiet once once always always always quiet once always"; got != want {
		t.Errorf("order %s, want %s", got, want)
	}
	for i, want := range []struct {
		discarded int
		label     string
	}{{0, ""}, {1, ""}, {2, "noisy"}} {
		if s := all[i]; len(s.trials) != 2 || s.discarded != want.discarded || s.label() != want.label {
			t.Errorf("%s: %d trials, %d repeated, %q", duts[i].name, len(s.trials), s.discarded, s.label())
		}
		if l := duts[i]; l.sent != 20 || l.lost[LostInStack] != 2 {
			t.Errorf("%s: account of %d frames, lost %v: want that of two trials", l.name, l.sent, l.lost)
		}
	}
	if _, err := interleave(context.Background(), duts, 1, func(context.Context, *dut) (*trial, error) {
		return nil, os.ErrClosed
	}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("%v, want the trial's error", err)
	}
}

// A trial is judged by what else the CPUs did.
func TestJudge(t *testing.T) {
	second := time.Second
	for name, c := range map[string]struct {
		t     trial
		after activity
		want  string
	}{
		"quiet":       {t: trial{sent: sendCount{frames: 1000, skipped: 5, ran: second, waited: 20 * time.Millisecond}}, after: activity{total: 200, stolen: 4}},
		"steal":       {t: trial{sent: sendCount{frames: 1}}, after: activity{total: 200, stolen: 5}, want: "the hypervisor kept 2.5 % of the CPUs"},
		"foreign":     {t: trial{sent: sendCount{frames: 1, ran: second * 9 / 10, waited: second / 10}}, want: "other programs had 10.0 % of the generator's CPU"},
		"ksoftirqd":   {t: trial{sent: sendCount{frames: 1, ran: second * 9 / 10, waited: second / 10}}, after: activity{softirq: second / 10}},
		"router":      {t: trial{sent: sendCount{frames: 1}}, after: activity{router: schedstat{ran: second / 2, waited: second / 4}}, want: "other programs had 25.0 % of the router's CPU"},
		"slots":       {t: trial{sent: sendCount{frames: 99, skipped: 1}}, want: "the generator missed 1.0 % of its slots"},
		"nothing ran": {want: "the generator had no time to send a frame on one of its CPUs"},
		"one of two":  {t: trial{sent: sendCount{frames: 9, each: []uint64{9, 0}}}, want: "the generator had no time to send a frame on one of its CPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			c.t.sent.elapsed = second
			s := &tester{threads: []string{"1"}}
			s.judge(&c.t, frameLoad{cpus: []int{0}}, activity{}, c.after)
			if got := strings.Join(c.t.noise, "; "); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
			if name == "ksoftirqd" && c.t.spent != second {
				t.Errorf("spent %v, want the time of ksoftirqd too", c.t.spent)
			}
			if name == "router" && c.t.routerBusy != 0.5 {
				t.Errorf("router busy %v, want 0.5", c.t.routerBusy)
			}
		})
	}
}

// A paced generator that waited and caught up was not disturbed; one that missed slots is
// at its limit only near the most that it has sent, and if nothing else explains it.
func TestJudgePaced(t *testing.T) {
	for _, tt := range []struct {
		name               string
		pps                float64
		skipped            uint64
		waited             time.Duration
		overtaxed, noticed bool
	}{
		{"caught up", 900, 0, 100 * time.Millisecond, false, false},
		{"more than it sends", 900, 20, 0, true, true},
		{"disturbed", 900, 20, 50 * time.Millisecond, false, true},
		{"stalled at a low rate", 500, 20, 0, false, true},
	} {
		s := &tester{fastest: 1000}
		tr := trial{sent: sendCount{frames: uint64(tt.pps) - tt.skipped, skipped: tt.skipped, ran: time.Second - tt.waited, waited: tt.waited, elapsed: time.Second}}
		s.judge(&tr, frameLoad{cpus: []int{0}, pps: tt.pps}, activity{}, activity{})
		if tr.overtaxed != tt.overtaxed || len(tr.noise) > 0 != tt.noticed {
			t.Errorf("%s: overtaxed %v, noise %q", tt.name, tr.overtaxed, tr.noise)
		}
	}
}

func TestLossCounters(t *testing.T) {
	if n := ipDrops("Ip: Forwarding InReceives InHdrErrors InAddrErrors InDiscards OutDiscards OutNoRoutes FragFails\n" +
		"Ip: 1 1000 1 20 300 4000 50000 600000\nIcmp: InMsgs InErrors\nIcmp: 5 5\n"); n != 654321 {
		t.Errorf("IP dropped %d, want 654321", n)
	}
	stats := map[string]uint64{"rx_queue_0_drops": 1, "rx_queue_1_drops": 2, "rx_queue_0_xdp_drops": 100, "tx_queue_0_drops": 1000}
	if n := sumQueues(stats, "rx_queue_", "_drops"); n != 3 {
		t.Errorf("queues dropped %d, want 3", n)
	}
	if got, want := placesOf(map[string]int64{Unexplained: -1, LostBeforeRouter: 2}), "ring to the router full 2, unexplained -1"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// stubRouter is a router of tests.
type stubRouter struct {
	name    string
	install func(*Testbed) (func() error, error)
}

func (r stubRouter) Name() string     { return r.name }
func (r stubRouter) Describe() string { return "a test's" }
func (r stubRouter) NAT() bool        { return false }
func (r stubRouter) Install(_ context.Context, testbed *Testbed, _ RouterOptions) (func() error, error) {
	return r.install(testbed)
}

func plain(*Testbed) (func() error, error) { return func() error { return nil }, nil }

func udpOptions(routers ...Router) UDPOptions {
	return UDPOptions{Routers: routers, Sizes: []FrameSize{{Bytes: 64}}, Flows: []int{100}, Cores: []int{1},
		Duration: 50 * time.Millisecond, Trials: 1, About: About{Progress: func(string, ...any) {}}}
}

// byMetric is the result's figures, by router and metric.
func byMetric(r *Result) map[string]Figure {
	out := map[string]Figure{}
	for _, f := range r.Figures {
		out[f.Router+" "+f.Metric] = f
	}
	return out
}

// ownLabs are the testbeds that this process has now.
func ownLabs(t *testing.T) (names []string) {
	t.Helper()
	list, err := lab.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range list {
		if l.PID == os.Getpid() {
			names = append(names, l.Name)
		}
	}
	return names
}

func TestUDPCost(t *testing.T) {
	ktest.Root(t)
	o := udpOptions(stubRouter{"plain", plain}, Forwarder{}, stubRouter{"absent", func(*Testbed) (func() error, error) {
		return nil, &UnsupportedError{Router: "absent", Reason: "a test"}
	}})
	o.BothWays, o.Sizes = true, []FrameSize{{Mix: "imix"}}
	res, err := UDP(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Routers) != 3 || res.Routers[2].Unsupported != "a test" || res.Routers[0].Unsupported != "" {
		t.Errorf("routers %+v", res.Routers)
	}
	figures := byMetric(res)
	if names := slices.Sorted(maps.Keys(figures)); len(names) != 4 {
		t.Errorf("figures %q", names)
	}
	for _, router := range []string{"plain", "xdp-forward"} {
		f := figures[router+" cost_ns"]
		if !(f.Median > 0) || f.Params.Flows != 100 || !f.Params.BothWays || f.Params.Mix != "imix" || f.Params.Cores != 1 {
			t.Errorf("%s costs %+v", router, f)
		}
	}
}

func TestUDPAtRate(t *testing.T) {
	ktest.Root(t)
	if cpus, err := allowedCPUs(); err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	o := udpOptions(stubRouter{"plain", plain})
	o.Rates = []Rate{{PPS: 5000}, {Share: 0.1}}
	res, err := UDP(context.Background(), o)
	if errors.Is(err, errThreadsHidden) {
		ktest.Missing(t, "%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var offered []float64
	for _, f := range res.Figures {
		switch f.Metric {
		case "loss_ratio":
			offered = append(offered, f.Params.OfferedPPS)
			var lost int64
			for _, n := range f.Lost {
				lost += n
			}
			if f.Median == 0 != (lost == 0) {
				t.Errorf("loss %v, and an account of %v", f.Median, f.Lost)
			}
		case "latency_max_ns", "latency_min_ns", "mrr_pps", "received_pps", "cpu_share":
			if !(f.Median > 0) {
				t.Errorf("%s is %v", f.Metric, f.Values)
			}
		}
	}
	if len(offered) != 2 || offered[0] != 5000 {
		t.Errorf("offered %v", offered)
	}
	if !slices.Contains(res.Notes, latencyNote) { // percentiles are up to a sixteenth too low
		t.Errorf("notes %q", res.Notes)
	}
}

// Routers take turns under overload, too: what they forward then is compared, and searches begin with it.
func TestOverloadTakesTurns(t *testing.T) {
	ktest.Root(t)
	if cpus, err := allowedCPUs(); err != nil || len(cpus) < 2 {
		ktest.Missing(t, "needs two CPUs")
	}
	o := udpOptions(stubRouter{"a", plain}, stubRouter{"b", plain})
	o.Rates, o.Trials = []Rate{{Share: 0.1}}, 3
	var order []string
	o.Progress = func(format string, args ...any) {
		if strings.HasSuffix(format, "overload") {
			order = append(order, args[0].(string))
		}
	}
	res, err := UDP(context.Background(), o)
	if errors.Is(err, errThreadsHidden) {
		ktest.Missing(t, "%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	figures := byMetric(res)
	if len(figures["a mrr_pps"].Values) != 3 || len(figures["b mrr_pps"].Values) != 3 {
		t.Errorf("%+v", figures)
	}
	order = slices.Compact(order[6:]) // a flood and two approaches of each; a disturbed trial is repeated at once
	if got := strings.Join(order, ""); got != "ababab" {
		t.Errorf("order %s, want ababab", got)
	}
}

// More is offered than the router's devices take: what is lost is found.
func TestLostFramesAreFound(t *testing.T) {
	ktest.Root(t)
	l, err := newDUT(context.Background(), stubRouter{"plain", plain}, RouterOptions{}, 10, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	}()
	ctx := context.Background()
	load := frameLoad{frames: []int{64}, flows: 10, pps: 10_000, duration: 50 * time.Millisecond, cpus: []int{l.tester.generatorCPU}}
	if err := l.warm(ctx, load); err != nil {
		t.Fatal(err)
	}
	// The stack without forwarding drops all as addressed to others.
	if err := l.tester.testbed.Router.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0)
	}); err != nil {
		t.Fatal(err)
	}
	tr, err := l.tester.run(ctx, load)
	if err != nil {
		t.Fatal(err)
	}
	if tr.received.frames != 0 || tr.lossRatio() != 1 && tr.sent.frames > 0 ||
		tr.lost[LostInStack]+tr.lost[LostBeforeRouter] != int64(tr.sent.frames) || tr.lost[Unexplained] != 0 {
		t.Errorf("%d sent, %d received, lost %v", tr.sent.frames, tr.received.frames, tr.lost)
	}
	if _, err := l.run(ctx, load); err == nil || !strings.Contains(err.Error(), "forwards nothing") {
		t.Errorf("%v, want that it forwards nothing", err)
	}
}

func TestUDPRefuses(t *testing.T) {
	router := stubRouter{"never", func(*Testbed) (func() error, error) { panic("installed") }}
	for want, change := range map[string]func(*UDPOptions){
		"Flows":    func(o *UDPOptions) { o.Flows = []int{0} },
		"Flows 2":  func(o *UDPOptions) { o.Flows = []int{MaxFlows + 1} },
		"Cores":    func(o *UDPOptions) { o.Cores = []int{1, 1000} },
		"Cores 2":  func(o *UDPOptions) { o.Cores, o.Rates = []int{2}, []Rate{{PPS: 1}} },
		"Apart":    func(o *UDPOptions) { o.Apart, o.BothWays = true, false },
		"Apart 2":  func(o *UDPOptions) { o.Apart, o.BothWays, o.Rates = true, true, []Rate{{PPS: 1}} },
		"Trials":   func(o *UDPOptions) { o.Trials = 0 },
		"Duration": func(o *UDPOptions) { o.Duration = time.Nanosecond },
		"Routers":  func(o *UDPOptions) { o.Routers = nil },
	} {
		o := udpOptions(router)
		change(&o)
		var refused *OptionError
		option, _, _ := strings.Cut(want, " ")
		if _, err := UDP(context.Background(), o); !errors.As(err, &refused) || refused.Fields[0] != option {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// An interrupt or a router that fails leaves nothing behind.
func TestUDPLeavesNothing(t *testing.T) {
	ktest.Root(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	o := udpOptions(stubRouter{"plain", plain})
	o.Duration, o.Trials = time.Minute, 1
	most := 0
	o.Progress = func(format string, _ ...any) {
		if strings.Contains(format, "trial") {
			most = len(ownLabs(t))
			time.AfterFunc(20*time.Millisecond, cancel)
		}
	}
	if res, err := UDP(ctx, o); !errors.Is(err, context.Canceled) || res != nil {
		t.Errorf("%v, %v, want canceled", res, err)
	}
	o = udpOptions(stubRouter{"plain", plain}, stubRouter{"broken", func(*Testbed) (func() error, error) { return nil, os.ErrInvalid }})
	if _, err := UDP(context.Background(), o); !errors.Is(err, os.ErrInvalid) {
		t.Errorf("%v, want the router's error", err)
	}
	if left := ownLabs(t); left != nil || most != 1 {
		t.Errorf("testbeds %q are left; during the run there were %d", left, most)
	}
	if left, _ := filepath.Glob("/sys/class/net/spare*"); left != nil {
		t.Errorf("devices %q are left", left)
	}
}

func TestProbe(t *testing.T) {
	ktest.Root(t)
	res, err := Probe(context.Background(), "test", []Router{stubRouter{"plain", plain}, stubRouter{"absent", func(*Testbed) (func() error, error) {
		return nil, &UnsupportedError{Router: "absent", Reason: "a test"}
	}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range res.Abilities {
		if a.Have != (len(a.Fix) == 0) || a.Detail == "" {
			t.Errorf("%+v", a)
		}
		if needed := []string{"bpf", "namespaces", "generator", "native_xdp", "live_frames", "forwarding"}; !a.Have && slices.Contains(needed, a.Name) {
			t.Errorf("%s is missing: %s", a.Name, a.Detail)
		}
	}
	if len(res.Routers) != 2 || res.Routers[0].Unsupported != "" || res.Routers[1].Unsupported != "a test" {
		t.Errorf("%+v", res.Routers)
	}
}

// What is printed before a measurement names what is measured, and no more.
func TestUDPPlan(t *testing.T) {
	o := UDPOptions{Routers: make([]Router, 1), Sizes: make([]FrameSize, 1), Flows: []int{1}, Cores: []int{1}, Trials: 1, Duration: time.Second}
	for _, c := range []struct {
		rates []Rate
		want  string
	}{
		{nil, "cost of a frame"},
		{[]Rate{{PPS: 1000}}, "1 rate"},
		{[]Rate{{PPS: 1000}, {Share: 0.5}}, "overload, 2 rates"},
	} {
		o.Rates = c.rates
		if what, _ := o.plan(); !strings.HasSuffix(what, ": "+c.want) {
			t.Errorf("%q, want %q", what, c.want)
		}
	}
}
