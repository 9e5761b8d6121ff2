// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

// The comparisons of routers, in their smallest form.
func TestBenchRouters(t *testing.T) {
	ktest.Root(t)
	for _, c := range []struct {
		args   []string
		metric string
	}{
		{[]string{"bulk", "--router", "none,nft", "--streams", "2", "--direction", "down", "--seconds", "500ms", "--trials", "1"}, bench.MetricThroughput},
		{[]string{"rules", "--router", "nft,nft-map", "--counts", "50", "--seconds", "300ms", "--flows", "10", "--trials", "1"}, bench.MetricFirstPacket},
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), append(append([]string{"bench"}, c.args...), "-o", "json"), &env{stdout: &out, stderr: &errs}); code != exitOK {
			t.Fatalf("%q: exit %d\n%s", c.args, code, errs.String())
		}
		var r bench.Result
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, f := range r.Figures {
			if f.Metric == c.metric && len(f.Values) == 1 && f.Router == r.Routers[n].Name {
				n++
			}
		}
		if n != 2 || r.Kind != c.args[0] || r.Command == "" || r.Environment.Kernel == "" {
			t.Errorf("%q: %d figures of %s in\n%s", c.args, n, c.metric, out.String())
		}
	}
}

func TestBenchRoutersUsage(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"bulk --router nonsense", `router "nonsense"`},
		{"bulk --streams 0", "--streams: 0"},
		{"bulk --streams 1000000", "--streams: 1000000"},
		{"bulk --direction sideways", "--direction"},
		{"bulk --seconds 1e5", "--seconds"},
		{"bulk --trials 0", "--trials"},
		{"bulk --paper --streams 2", "not with --paper"},
		{"bulk --netns x", "--netns"},
		{"rules --counts 100001", "--counts: 100001"},
		{"rules --counts -1", "--counts: -1"},
		{"rules --flows 0", "--flows"},
		{"rules --router ,", "router"},
		{"rules --netns x", "--netns"},
	} {
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"bench"}, strings.Fields(c.args)...), &env{stdout: &out, stderr: &errs})
		if code != exitUsage || out.Len() > 0 || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%s: exit %d, %q", c.args, code, errs.String())
		}
	}
}
