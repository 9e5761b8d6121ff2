// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// httpResult is a run with everything that can be shown.
func httpResult() *bench.HTTPResult {
	return &bench.HTTPResult{
		URL: "http://192.168.0.96:8080/", Endpoint: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.0.96:8080")), Host: "192.168.0.96", Port: 8080, Path: "/",
		Server: "test/1.0 \x1b[31m", Concurrency: 5000, Workers: 2, KeepAlive: true,
		Requests: 100000, Begun: 60000, Completed: 56020,
		Failed:     bench.HTTPFailed{Connect: 5, Receive: 30, Length: 20, Exceptions: 1, Timeout: 3940},
		Failures:   map[string]int64{"no_local_port": 5, "reset": 10, "closed_early": 20, "length_differs": 20, "not_http": 1, "connect_timeout": 3940},
		Unfinished: 4, Non2xx: 20, KeepAliveRequests: 7, LeftOpen: 3,
		Seconds: 18.25, RequestsPerSecond: 3069.59, TimePerRequestMS: 1628.883, TimePerRequestAll: 0.325777,
		DocumentBytes: 70, TransferredBytes: 16862020, HTMLBytes: 3921400, TransferRate: 902.29,
		Connect:     bench.Times{Min: 0.041, Mean: 177.25, SD: 420.061, Median: 12.031, Max: 1031.2},
		Processing:  bench.Times{Min: 0.2, Mean: 583.1, SD: 120.9, Median: 560.3, Max: 1500.25},
		Waiting:     bench.Times{Min: 0.2, Mean: 580.4, SD: 119, Median: 558, Max: 1500},
		Total:       bench.Times{Min: 0.31, Mean: 760.35, SD: 430.4, Median: 590.1, Max: 1999.4},
		Percentiles: map[string]float64{"50": 590.1, "66": 640, "75": 702.5, "80": 810, "90": 1400, "95": 1610, "98": 1800, "99": 1890.25, "100": 1999.4},
		Rate:        &bench.HTTPRate{Requested: 4000, Achieved: 3287.7, LateStarts: 41000},
		TCP:         bench.TCPCounters{SYNRetransmits: 3952, ListenOverflows: 12, ListenOverflowsAt: "server"},
		Ports:       bench.Ports{PortsRange: 28232, PortsLeft: 3}, ClientCPUShare: 0.957,
		Stopped: "stopped: context canceled",
	}
}

func TestHTTP(t *testing.T) {
	for name, r := range map[string]*bench.HTTPResult{
		"http.txt": httpResult(),
		// Nothing completed: no times, nothing divided by nothing.
		"http-none.txt": {Host: "192.168.0.96", Port: 80, Path: "/", Endpoint: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.0.96:80")), Concurrency: 1, Workers: 1, Requests: 1, Begun: 1,
			Failed: bench.HTTPFailed{Connect: 1}, Failures: map[string]int64{"refused": 1}, Seconds: 0.001,
			TCP: bench.TCPCounters{ListenOverflowsAt: "client"}, Ports: bench.Ports{PortsRange: 28232, PortsLeft: 28232}},
	} {
		var b bytes.Buffer
		if err := HTTP(&b, r); err != nil {
			t.Fatal(err)
		}
		printed(t, name, b.Bytes())
	}
}

// The JSON form is a promise: a key that is missing here breaks somebody's script.
func TestHTTPJSON(t *testing.T) {
	var b bytes.Buffer
	if err := JSON(&b, httpResult()); err != nil {
		t.Fatal(err)
	}
	printed(t, "http.json", b.Bytes())
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	times := []string{"min", "mean", "sd", "median", "max"}
	for key, want := range map[string][]string{
		"requests": nil, "completed": nil, "requests_per_second": nil, "duration_s": nil, "time_per_request_ms": nil,
		"transferred_bytes": nil, "client_cpu_share": nil,
		"failed":     {"connect", "receive", "length", "exceptions", "timeout"},
		"connect_ms": times, "processing_ms": times, "waiting_ms": times, "total_ms": times,
		"percentiles_ms": {"50", "66", "75", "80", "90", "95", "98", "99", "100"},
		"tcp_counters":   {"syn_retransmits", "listen_overflows"},
	} {
		value, ok := got[key]
		if !ok {
			t.Errorf("no key %s", key)
		}
		for _, k := range want {
			if _, ok := value.(map[string]any)[k].(float64); !ok {
				t.Errorf("no number under %s.%s", key, k)
			}
		}
	}
}

// Whoever reads ab's output with a script can read natkit's: each line that ab
// labels has the same label here, in the same order.
func TestHTTPIsInTheShapeOfAB(t *testing.T) {
	ab := ktest.Tool(t, "ab")
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	out, err := exec.CommandContext(t.Context(), ab, "-q", "-k", "-n", "10", s.URL+"/").Output()
	if err != nil {
		t.Fatalf("ab: %v\n%s", err, out)
	}
	r, err := bench.HTTP(t.Context(), bench.HTTPOptions{URL: s.URL, Requests: 10, KeepAlive: true})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := HTTP(&b, r); err != nil {
		t.Fatal(err)
	}
	label := regexp.MustCompile(`(?m)^( *\d+%|[A-Z][^:\n]+(:|\(ms\)))`)
	ours := label.FindAllString(b.String(), -1)
	_, figures, _ := strings.Cut(string(out), "\n\n") // after ab's own name
	n := 0
	for _, want := range label.FindAllString(figures, -1) {
		if want == "WARNING:" { // about its own deviations, where they are large
			continue
		}
		i := slices.Index(ours, want)
		if i < 0 {
			t.Fatalf("ab prints %q, natkit does not, or not there:\n%s", want, b.String())
		}
		ours = ours[i+1:]
		n++
	}
	if n < 25 {
		t.Errorf("only %d labels found in\n%s", n, out)
	}
}
