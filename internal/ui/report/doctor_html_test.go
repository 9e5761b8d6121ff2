// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/diagnose/causes"
	"natkit/internal/snapshot"
)

func TestDoctorHTML(t *testing.T) {
	s := &snapshot.Snapshot{
		WindowSeconds: 10, Host: snapshot.Host{Hostname: "<gw>", Kernel: "6.18.0"},
		Capabilities: []snapshot.Capability{{Name: "drop-tracing", Reason: "no BPF here", Costs: "places are not told"}},
		Conntrack: &snapshot.Conntrack{Count: 900, Max: 1000, Buckets: 65536, Stats: map[string]uint64{"drop": 17},
			Table: &snapshot.Table{Entries: 900, ByState: map[string]uint64{"TIME_WAIT": 450},
				Sources: []snapshot.Talker{{Addr: netip.MustParseAddr("192.0.2.7"), Entries: 300}}}},
		Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
		Series: &snapshot.Series{Times: []float64{1, 2, 3}, Lines: map[string][]float64{
			"conntrack.count": {800, 850, 900}, "conntrack.drop": {0, 12, 5}, "cpu0.softirq": {0.1, 0.9, 0.3}, "Tcp.RetransSegs": {1, 2}}},
	}
	findings := []causes.Finding{{Code: "conntrack-table-full", Severity: causes.Critical, Title: "full & <lossy>",
		Evidence: []causes.Evidence{{What: "entries", Value: "900 of 1000", Source: "/proc"}}, Why: "New flows fail.",
		Remedy: []string{"# more room:", "sysctl -w x=1"}, Verify: []string{"natkit doctor"},
		Consequences: []causes.Finding{{Code: "listen-overflow", Severity: causes.Warning, Title: "folded"}}}}
	var out bytes.Buffer
	if err := DoctorHTML(&out, s, findings); err != nil {
		t.Fatal(err)
	}
	page := out.String()
	for _, text := range []string{"&lt;gw&gt;", "full &amp; &lt;lossy&gt;", "CRITICAL", "900 of 1000", `<span class="rem"># more room:</span>`, "sysctl -w x=1", "folded",
		"no BPF here; so places are not told", "192.0.2.7", "net.ipv4.ip_forward", `style="width: 33.33333%"`, "refused by the table, per second", "--s0:"} {
		if !strings.Contains(page, text) {
			t.Errorf("the page lacks %q", text)
		}
	}
	// The finding's own plots, then all of the window: a line that is cut is left out.
	if got := strings.Count(page, `<svg class="window"`); got != 2+3 {
		t.Errorf("%d plots, want 5", got)
	}
	for _, bad := range []string{"<script", "http://", "https://", "ZgotmplZ", "NaN", "RetransSegs"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	out.Reset()
	if err := DoctorHTML(&out, &snapshot.Snapshot{}, nil); err != nil || !strings.Contains(out.String(), "cannot judge anything") {
		t.Errorf("without facts: %v\n%s", err, out.String())
	}
	// Whatever a file holds.
	s.Series = &snapshot.Series{Times: []float64{0, 0, -5, math.MaxFloat64}, Lines: map[string][]float64{
		"conntrack.count": {-1, math.MaxFloat64, 0, 0}, "conntrack.drop": {0, 0, 0, 0}}}
	s.Conntrack.Max = 0
	out.Reset()
	if err := DoctorHTML(&out, s, findings); err != nil {
		t.Error(err)
	}
}

// Every number of the facts stands below a word that says what it is.
func TestFactsHaveHeads(t *testing.T) {
	tables := 0
	for _, s := range []*snapshot.Snapshot{{
		CPUs: []snapshot.CPU{{}}, Interfaces: []snapshot.Interface{{Name: "eth0"}}, Chains: []snapshot.Chain{{Name: "input"}},
		Sysctls: map[string]string{"a": "1"}, Counters: map[string]uint64{"b": 1}, KernelLog: &snapshot.KernelLog{Lines: []string{"c"}},
		Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 1}}},
	}} {
		for _, f := range factsOf(s) {
			tables++
			for _, r := range f.Rows {
				if len(f.Head) != len(r.Cells) || f.Words < 1 || f.Words > len(f.Head) || slices.Contains(f.Head, "") || r.Share > 0 && f.Bar == "" {
					t.Errorf("%s: heads %q above %q, bar %q", f.Title, f.Head, r.Cells, f.Bar)
				}
			}
		}
	}
	if tables != 7 {
		t.Errorf("%d tables", tables)
	}
}

// Pages follow the reader's theme: colours are those of variables, which dark pages set otherwise.
func TestColoursAreVariables(t *testing.T) {
	colour := regexp.MustCompile(`#[0-9a-fA-F]{3,8}\b`)
	definition := regexp.MustCompile(`--[a-z0-9]+: #[0-9a-fA-F]{3,8};`)
	for name, style := range map[string]string{"page.css": pageStyle, "doctor.css": doctorStyle, "trace.css": traceStyle, "flame.css": flameStyle, "flamepage.css": flamePageStyle} {
		if found := colour.FindAllString(definition.ReplaceAllString(style, ""), -1); len(found) > 0 {
			t.Errorf("%s: %q", name, found)
		}
	}
}
