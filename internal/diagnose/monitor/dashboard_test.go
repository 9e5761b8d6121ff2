// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"natkit/internal/words/exposition"
)

var (
	metricName = regexp.MustCompile(`natkit_[a-z_]+`)
	alertName  = regexp.MustCompile(`(?m)- alert: (\w+)$`)
)

// panel is what a dashboard shows of one or more families.
type panel struct {
	title    string
	unit     string // of Grafana: short, percentunit, s, pps
	families []*exposition.Family
}

// panels are those of the dashboard; what is in none has one of its own.
var panels = []panel{
	{"Findings", "short", []*exposition.Family{descFinding}},
	{"Impact of findings", "short", []*exposition.Family{descImpact}},
	{"Connection tracking entries and limit", "short", []*exposition.Family{descEntries, descLimit, descOthers}},
	{"Time until the table is full, and its error", "s", []*exposition.Family{descFull, descFullEarly, descFullLate}},
	{"Dropped packets", "pps", []*exposition.Family{descDrops, descDropsLost}},
	{"Connection tracking refuses", "pps", []*exposition.Family{descStats}},
	{"SNAT ports in use towards the busiest destination", "short", []*exposition.Family{descPortsUsed}},
	{"Share of the busiest destination", "percentunit", []*exposition.Family{descTopShare}},
	{"Top talkers", "short", []*exposition.Family{descTalkers}},
	{"Namespaces watched, and not", "short", []*exposition.Family{descSpaces, descUnwatched}},
	{"natkit's engines", "short", []*exposition.Family{descEngine, descDrift}},
	{"Sessions of the engines", "percentunit", []*exposition.Family{descEngineUse}},
	{"Forecasts checked and held", "short", []*exposition.Family{descChecked, descHeld}},
	{"The monitor's work", "short", []*exposition.Family{descIntervals, descLooks, descDumps, descHistory}},
}

// query is how a family is shown: a counter by its rate, a finding only while it is on.
func query(f *exposition.Family) string {
	selected := f.Name + `{instance=~"$instance"}`
	switch {
	case f == descFinding:
		return selected + " == 1"
	case strings.HasSuffix(f.Name, "_total"):
		return "rate(" + selected + "[5m])"
	case strings.HasSuffix(f.Name, "_timestamp_seconds"):
		return "time() - " + selected
	}
	return selected
}

func legend(f *exposition.Family) string {
	words := []string{"{{instance}}"}
	for _, label := range f.Labels {
		words = append(words, "{{"+label+"}}")
	}
	return strings.Join(words, " ") + " " + strings.TrimPrefix(strings.TrimSuffix(f.Name, "_total"), "natkit_")
}

// dashboard is Grafana's, as it imports it.
func dashboard(t testing.TB) []byte {
	t.Helper()
	all, shown := panels, map[*exposition.Family]bool{}
	for _, p := range panels {
		for _, f := range p.families {
			shown[f] = true
		}
	}
	for _, f := range Families {
		if !shown[f] {
			all = append(all, panel{f.Name, "short", []*exposition.Family{f}})
		}
	}
	source := map[string]any{"type": "prometheus", "uid": "${datasource}"}
	var out []any
	for i, p := range all {
		var targets []any
		var help []string
		for j, f := range p.families {
			targets = append(targets, map[string]any{"datasource": source, "expr": query(f), "legendFormat": legend(f), "refId": string(rune('A' + j))})
			help = append(help, f.Name+": "+f.Help)
		}
		out = append(out, map[string]any{
			"id": i + 1, "title": p.title, "type": "timeseries", "description": strings.Join(help, "\n"), "datasource": source, "targets": targets,
			"gridPos":     map[string]any{"h": 8, "w": 12, "x": 12 * (i % 2), "y": 8 * (i / 2)},
			"fieldConfig": map[string]any{"defaults": map[string]any{"unit": p.unit, "min": 0}, "overrides": []any{}},
		})
	}
	variable := func(name, kind string, more map[string]any) map[string]any {
		more["name"], more["type"] = name, kind
		return more
	}
	b, err := json.MarshalIndent(map[string]any{
		"title": "natkit monitor", "uid": "natkit-monitor", "tags": []string{"nat", "natkit"}, "schemaVersion": 39, "refresh": "30s", "editable": true,
		"time": map[string]any{"from": "now-12h", "to": "now"}, "panels": out,
		"templating": map[string]any{"list": []any{
			variable("datasource", "datasource", map[string]any{"query": "prometheus"}),
			variable("instance", "query", map[string]any{"datasource": source, "query": "label_values(" + descIntervals.Name + ", instance)", "multi": true, "includeAll": true, "refresh": 2}),
		}},
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(b, '\n')
}

const (
	tableBegin = "<!-- metrics: made by go test ./internal/diagnose/monitor -run TestGenerated -update -->\n"
	tableEnd   = "<!-- end of metrics -->\n"
)

// metricsTable is a page with the table of metrics as they are.
func metricsTable(t testing.TB, path string) []byte {
	t.Helper()
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := bytes.Cut(page, []byte(tableBegin))
	_, after, ok2 := bytes.Cut(rest, []byte(tableEnd))
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the metrics", path)
	}
	var b bytes.Buffer
	b.Write(before)
	b.WriteString(tableBegin + "| Metric | Labels | What it is |\n|---|---|---|\n")
	for _, f := range Families {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.Name, strings.Join(f.Labels, ", "), f.Help)
	}
	b.WriteString(tableEnd)
	b.Write(after)
	return b.Bytes()
}

// What the dashboard asks for is there, and all that is there is on it.
func TestDashboard(t *testing.T) {
	asked := map[string]bool{}
	for _, name := range metricName.FindAllString(string(dashboard(t)), -1) {
		asked[name] = true
	}
	for _, f := range Families {
		if !asked[f.Name] {
			t.Errorf("%s is not on the dashboard", f.Name)
		}
	}
}
