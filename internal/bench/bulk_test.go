// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// bareRouter forwards, or can't be had.
type bareRouter struct {
	name        string
	unsupported bool
	maxRules    int

	installed []RouterOptions
	testbed   string // name of the last one's namespace
}

func (r *bareRouter) Name() string     { return r.name }
func (r *bareRouter) Describe() string { return "a router of the test" }
func (r *bareRouter) NAT() bool        { return false }

func (r *bareRouter) Install(_ context.Context, b *Testbed, o RouterOptions) (func() error, error) {
	if r.unsupported || o.Rules > r.maxRules {
		return nil, &UnsupportedError{Router: r.name, Reason: "of the test"}
	}
	r.installed = append(r.installed, o)
	r.testbed = b.Router.Name()
	return func() error { return nil }, nil
}

func figuresOf(r *Result, router, metric string) (out []Figure) {
	for _, f := range r.Figures {
		if f.Router == router && f.Metric == metric {
			out = append(out, f)
		}
	}
	return out
}

func TestBulk(t *testing.T) {
	ktest.Root(t)
	var said []string
	a := &bareRouter{name: "a"}
	res, err := Bulk(t.Context(), BulkOptions{
		Routers: []Router{a, &bareRouter{name: "missing", unsupported: true}},
		Streams: []int{1, 3}, Directions: []string{DirectionUp, DirectionDown}, TransferFor: 150 * time.Millisecond, Trials: 2,
		About: About{Progress: func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, metric := range []string{MetricThroughput, MetricCPUPerGbit, MetricRetransmits} {
		figures := figuresOf(res, "a", metric)
		if len(figures) != 4 {
			t.Errorf("%s: %d figures, want one for each direction and number of streams", metric, len(figures))
		}
		for _, f := range figures {
			if len(f.Values) != 2 || metric == MetricThroughput && f.Min < 1e6 {
				t.Errorf("%+v", f)
			}
		}
	}
	if len(res.Routers) != 2 || res.Routers[1].Unsupported != "of the test" || len(figuresOf(res, "missing", MetricThroughput)) > 0 {
		t.Errorf("routers %+v", res.Routers)
	}
	if len(said) < 8 || !strings.HasPrefix(said[len(said)-1], "8 of 8, ") {
		t.Errorf("progress %q", said)
	}
	if h, err := netns.Open(a.testbed); err == nil {
		h.Close()
		t.Errorf("the testbed's namespace %s is left", a.testbed)
	}
}

// Both ends' sockets are as the kernel makes them, so that a transfer compares with
// that of other programs: Go's would send without Nagle's algorithm.
func TestTransferSockets(t *testing.T) {
	ktest.Root(t)
	testbed, err := NewTestbed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testbed.Close() })
	source, target := (&site{testbed: testbed}).endpoints(bulkPort)
	clients, servers, err := transfer{source: source, target: target, streams: 1}.connect(t.Context(), testbed)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]*os.File{"client": clients[0], "server": servers[0]} {
		t.Cleanup(func() { f.Close() })
		if on, err := unix.GetsockoptInt(int(f.Fd()), unix.IPPROTO_TCP, unix.TCP_NODELAY); err != nil || on != 0 {
			t.Errorf("TCP_NODELAY of the %s: %d, %v", name, on, err)
		}
	}
}

// A transfer carries what it is told to, whichever way; with a limit in bytes
// exactly those.
func TestTransfer(t *testing.T) {
	ktest.Root(t)
	testbed, err := NewTestbed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testbed.Close() })
	s := &site{testbed: testbed}
	for _, down := range []bool{false, true} {
		source, target := s.endpoints(bulkPort)
		got, err := transfer{source: source, target: target, streams: 2, down: down, bytes: 300_001}.run(t.Context(), testbed)
		if err != nil || got.bytes != 600_002 || got.elapsed <= 0 {
			t.Errorf("down %v: %+v, %v", down, got, err)
		}
	}

	// A thread that gets a processor late sends all the same.
	lateSource, lateTarget := s.endpoints(bulkPort)
	if got, err := (transfer{source: lateSource, target: lateTarget, streams: 1, duration: time.Nanosecond}).run(t.Context(), testbed); err != nil || got.bytes == 0 {
		t.Errorf("its time over before it began: %+v, %v", got, err)
	}

	// An interrupt ends it, wherever its threads wait.
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupt := errors.New("interrupted by the test")
	time.AfterFunc(100*time.Millisecond, func() { cancel(interrupt) })
	source, target := s.endpoints(bulkPort)
	start := time.Now()
	if _, err := (transfer{source: source, target: target, streams: 1, duration: time.Minute}).run(ctx, testbed); !errors.Is(err, interrupt) {
		t.Errorf("%v, want the interrupt", err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %v to end", took)
	}
}

func TestBulkRefuses(t *testing.T) {
	good := func() BulkOptions {
		return BulkOptions{Routers: []Router{&bareRouter{}}, Streams: []int{1}, Directions: []string{DirectionUp}, TransferFor: time.Second, Trials: 1}
	}
	for option, spoil := range map[string]func(*BulkOptions){
		"Routers":     func(o *BulkOptions) { o.Routers = nil },
		"Streams":     func(o *BulkOptions) { o.Streams = []int{1, 0} },
		"Directions":  func(o *BulkOptions) { o.Directions = []string{"sideways"} },
		"TransferFor": func(o *BulkOptions) { o.TransferFor = time.Hour },
		"Trials":      func(o *BulkOptions) { o.Trials = 0 },
	} {
		o := good()
		spoil(&o)
		_, err := Bulk(t.Context(), o)
		var refused *OptionError
		if !errors.As(err, &refused) || strings.Join(refused.Fields, ", ") != option {
			t.Errorf("%s: %v", option, err)
		}
	}
}

func TestParseIPerf3(t *testing.T) {
	for _, c := range []struct {
		report string
		want   iperf3Report
		err    string
	}{
		{`{"end":{"sum_sent":{"bytes":9,"bits_per_second":2e9,"retransmits":7},"sum_received":{"bytes":8,"bits_per_second":1.5e9}}}`, iperf3Report{1.5e9, 8, 7}, ""},
		{`{"end":{},"error":"unable to connect to server: Connection refused"}`, iperf3Report{}, "Connection refused"},
		{`{"end":{}}`, iperf3Report{}, "no throughput"},
		{``, iperf3Report{}, "read its report"},
	} {
		got, err := parseIPerf3([]byte(c.report))
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %+v, %v", c.report, got, err)
		}
	}
}

// A disturbed trial is made again, as often as there are trials; then it is kept, and
// the figure says so.
func TestDisturbed(t *testing.T) {
	sites := []*site{{router: &bareRouter{name: "calm"}}, {router: &bareRouter{name: "noisy"}}}
	tried := 0
	all, err := interleave(t.Context(), sites, 3, func(_ context.Context, s *site) (*bulkTrial, error) {
		if s == sites[0] {
			return &bulkTrial{}, nil
		}
		tried++
		return &bulkTrial{noise: []string{otherPrograms}}, nil
	})
	if err != nil || tried != 6 {
		t.Fatal(err, tried)
	}
	of := func(*bulkTrial) float64 { return 1 }
	if f := all[0].figure("calm", MetricThroughput, Params{}, of); f.Label != "" || f.Discarded != 0 || len(f.Values) != 3 {
		t.Errorf("%+v", f)
	}
	if f := all[1].figure("noisy", MetricThroughput, Params{}, of); f.Label != "noisy" || f.Discarded != 3 || len(f.Values) != 3 {
		t.Errorf("%+v", f)
	}
}
