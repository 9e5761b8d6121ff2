// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/kubernetes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/golden"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/scraped"
)

// crowded is a monitor of a machine on which there is as much as can be of everything.
func crowded() *monitor {
	m := &monitor{findings: newFindings(), state: newState(Options{Build: map[string]string{"version": "test"}}), o: Options{Kubernetes: kubernetes.New(nil, "n1")}}
	m.tuner, m.o.Say, m.state.tuned = newTuner(TuneAdvise, 10*time.Second), func(Line) {}, map[string]uint64{}
	for i := range 40 {
		m.tuner.proposed[settingKey{uint64(i), "net.ipv4.ipfrag_high_thresh"}] = history.Tuning{Kind: history.Proposed, Setting: "net.ipv4.ipfrag_high_thresh", Namespace: fmt.Sprint("n", i), New: "8388608"}
	}
	m.observeTunings([]history.Tuning{{Kind: history.Proposed}, {Kind: history.TakenBack}})
	r := &probe.Round{At: noon, Unwatched: 12}
	for i := range 400 {
		n := snapshot.Netns{Inode: uint64(i + 1), Name: fmt.Sprintf("n%d", i), Init: i == 0}
		for w := range onAfter {
			m.findings.window(n, noon.Add(time.Duration(w)*time.Second), []causes.Finding{{Code: causes.Catalogue()[i%len(causes.Catalogue())].Code, Severity: causes.Critical, Impact: float64(i)}})
		}
		table := &snapshot.Table{Entries: 1}
		for a := range 20 {
			address := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(a)})
			table.Sources = append(table.Sources, snapshot.Talker{Addr: address, Entries: uint64(a)})
			table.SNATPorts = append(table.SNATPorts, snapshot.SNATUse{Protocol: "tcp", Outside: address, Used: uint64(a)})
		}
		ct := snapshot.Conntrack{Count: uint64(1000 * (i + 1)), Max: 1 << 20, Stats: map[string]uint64{"drop": 1}}
		r.Samples = append(r.Samples, &snapshot.Snapshot{TakenAt: noon, Netns: n, Conntrack: &ct,
			Drops: &snapshot.Drops{Rows: []snapshot.Drop{{Count: 2, Cause: snapshot.NATCauses[i%len(snapshot.NATCauses)]}, {Count: 1}, {Count: 5, Benign: true}}}})
		full := ct
		full.Table = table
		r.Looks = append(r.Looks, &snapshot.Snapshot{TakenAt: noon, Netns: n, Conntrack: &full, WindowSeconds: 2, Engine: crowdedEngine(i), Log: crowdedLog(i)})
	}
	// Every table grows, so that there are forecasts of all.
	for i := range 20 {
		for _, p := range r.Samples {
			p.TakenAt = noon.Add(time.Duration(i) * 10 * time.Second)
			p.Conntrack.Count += 100
		}
		m.observe(r)
	}
	return m
}

// crowdedLog is one with as many sinks as facts can have.
func crowdedLog(n int) *snapshot.Log {
	l := &snapshot.Log{Written: noon, GapCount: 50}
	for i := range snapshot.TopN {
		l.Sinks = append(l.Sinks, snapshot.LogSink{URL: fmt.Sprintf("syslog+udp://192.0.2.%d:%d?interim=all", n%250, i+1), Behind: float64(i)})
	}
	return l
}

// crowdedEngine is one with as many pools and subscribers as facts can have.
func crowdedEngine(n int) *snapshot.Engine {
	e := &snapshot.Engine{Kind: snapshot.EngineEBPF, Sessions: 1, SessionsMax: 2, Subscribers: 65536, Packets: map[string]uint64{"port-limit": 10}}
	for i := range snapshot.TopN {
		e.Pools = append(e.Pools, snapshot.EnginePool{Name: fmt.Sprint("cgn", i), Share: float64(n) / 400, BlockSize: 512, BlocksUsed: 5, BlocksFree: 1, Ports: 64512, FreeTCP: 5})
		e.Sources = append(e.Sources, snapshot.EngineSource{Addr: netip.AddrFrom4([4]byte{100, 64, byte(n), byte(i)}), Refused: map[string]uint64{"port-limit": uint64(n + i)}})
	}
	return e
}

func TestMetrics(t *testing.T) {
	m := crowded()
	e := m.collect()
	if n := e.Len(); n > maxSeries || n < maxSeries*8/10 {
		t.Errorf("%d series, want at most %d", n, maxSeries)
	}
	gatherer := scraped.Gathered(t, e)
	if problems, err := testutil.GatherAndLint(gatherer); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
	for _, f := range Families {
		if n := scraped.SeriesOf(t, e, f.Name); n == 0 && f != descFullLate {
			t.Errorf("no series of %s", f.Name)
		}
	}
	const want = `# HELP natkit_dropped_packets_total Packets that the kernel dropped in all namespaces, by what that means for NAT; other are those that mean nothing for it.
# TYPE natkit_dropped_packets_total counter
`
	if err := testutil.GatherAndCompare(gatherer, strings.NewReader(want+dropSeries()), descDrops.Name); err != nil {
		t.Error(err)
	}
	// A monitor that has seen nothing yet answers, too.
	fresh := &monitor{findings: newFindings(), state: newState(Options{})}
	if problems, err := testutil.GatherAndLint(scraped.Gathered(t, fresh.collect())); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
	if err := fresh.health(); err == nil {
		t.Error("healthy before the first interval")
	}
}

// One cause in all namespaces leaves every other cause a series, so that there is room for fewer findings.
func TestMetricsOfOneCause(t *testing.T) {
	m := crowded()
	for i := range m.state.active {
		m.state.active[i].Finding.Code = causes.Catalogue()[0].Code
	}
	e := m.collect()
	if n := e.Len(); n > maxSeries {
		t.Errorf("%d series, want at most %d", n, maxSeries)
	}
	if n := scraped.SeriesOf(t, e, descImpact.Name); n < 20 {
		t.Errorf("%d findings are shown", n)
	}
}

// What a reading of a table has shown is not said for ever: an alert about a flood of last week would stay on.
func TestReadingsEnd(t *testing.T) {
	m := crowded()
	ns := snapshot.Netns{Inode: 1, Name: "n0", Init: true}
	for _, minutes := range []int{5, 14, 16} {
		m.observe(&probe.Round{At: noon.Add(time.Duration(minutes) * time.Minute), Samples: []*snapshot.Snapshot{{Netns: ns, TakenAt: noon.Add(time.Duration(minutes) * time.Minute), Conntrack: &snapshot.Conntrack{Count: 5, Max: 9}}}})
		for _, name := range []string{descPortsUsed.Name, descTopShare.Name, descTalkers.Name, descReadAt.Name} {
			if n := scraped.SeriesOf(t, m.collect(), name); (n > 0) != (minutes < 15) {
				t.Errorf("after %d minutes: %d series of %s", minutes, n, name)
			}
		}
	}
}

// dropSeries are those of crowded: 20 rounds of 400 namespaces with three rows.
func dropSeries() string {
	counts := map[string]int{otherDrops: 20 * 400}
	for i := range 400 {
		counts[string(snapshot.NATCauses[i%len(snapshot.NATCauses)])] += 20 * 2
	}
	var b strings.Builder
	for cause, n := range counts {
		fmt.Fprintf(&b, "natkit_dropped_packets_total{cause=%q} %d\n", cause, n)
	}
	return b.String()
}

// What Prometheus' own tool says of the metrics and of the alerts.
func TestPromtool(t *testing.T) {
	ktest.Tool(t, "promtool")
	var b bytes.Buffer
	if err := crowded().collect().Write(&b); err != nil {
		t.Fatal(err)
	}
	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = &b
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	rules := exec.Command("promtool", "test", "rules", "natkit.rules.test.yml")
	rules.Dir = "../../../deploy/prometheus"
	if out, err := rules.CombinedOutput(); err != nil {
		t.Errorf("promtool test rules: %v\n%s", err, out)
	}
}

// Every alert is of metrics that there are, and is tested.
func TestAlerts(t *testing.T) {
	rules, err := os.ReadFile("../../../deploy/prometheus/natkit.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("../../../deploy/prometheus/natkit.rules.test.yml")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range Families {
		known[f.Name] = true
	}
	for _, name := range metricName.FindAllString(string(rules), -1) {
		if !known[name] {
			t.Errorf("there is no metric %s", name)
		}
	}
	for _, m := range alertName.FindAllStringSubmatch(string(rules), -1) {
		if !strings.Contains(string(tests), "alertname: "+m[1]+"\n        exp_alerts:") {
			t.Errorf("alert %s has no test in which it fires", m[1])
		}
	}
}

// The dashboard and the table of metrics are made from Families; -update rewrites them.
func TestGenerated(t *testing.T) {
	for path, want := range map[string][]byte{
		"../../../deploy/grafana/natkit-monitor.json": dashboard(t),
		"../../../docs/monitor.md":                    metricsTable(t, "../../../docs/monitor.md"),
	} {
		golden.Check(t, path, want)
	}
}
