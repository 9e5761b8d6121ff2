// SPDX-License-Identifier: Apache-2.0

package report

import (
	"reflect"

	"natkit/internal/bench"
	"natkit/internal/diagnose/fleet"
	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/kconfig"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/diagnose/trace"
	"natkit/internal/diagnose/tune"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
	"natkit/internal/natlog/wire"
	"natkit/internal/scenario"
	"natkit/internal/snapshot"
	"natkit/internal/ui/live"
	"natkit/internal/words/schema"
)

// Kind is one kind of JSON object: what JSON and JSONLine write.
type Kind struct {
	Name    string
	Version int    // raised when a field is removed, renamed or given another meaning
	Of      any    // a value of its type, which says what its fields are
	Command string // that writes it, without "natkit"; several separated by commas
	Example string // the rest of a command line that uses it
}

// Kinds are all of them, in the order of natkit --help: a new output of -o json is a type
// and a line here. docs/schema and the table of docs/json.md are generated from them
// (make schema).
var Kinds = []Kind{
	{"doctor", 1, DoctorResult{}, "doctor", "doctor -o json | jq -r '.findings[].code'"},
	{"doctor-all", 1, DoctorAllResult{}, "doctor", "doctor --all-netns -o json | jq '.namespaces[].findings[].title'"},
	{"doctor-diff", 1, DiffResult{}, "doctor", "doctor --diff before.json after.json -o json | jq -r '.namespaces[].new_findings[].code'"},
	{snapshot.Kind, snapshot.Version, snapshot.Snapshot{}, "doctor", "doctor --save facts.json | jq .conntrack.entries facts.json"},
	{snapshot.KindAll, snapshot.Version, snapshots{}, "doctor", "doctor --all-netns --save facts.json | jq '.namespaces[].host.kernel' facts.json"},
	{"hooks", 1, Hooks{}, "hooks", "hooks -o json | jq -r '.hooks[].function'"},
	{"hook-cost", 1, HookCost{}, "hooks", "hooks --cost -o json | jq .hooks_share"},
	{"profile", 1, Profile{}, "profile", "profile -o json | jq .sample_counts"},
	{"profile-diff", 1, ProfileDiff{}, "profile", "profile --diff before.pprof -o json | jq '.function_changes[0]'"},
	{"kconfig", 1, kconfig.Report{}, "kconfig", "kconfig -o json | jq -r '.lacks[].name'"},
	{"top", 1, live.Moment{}, "top", "top -o json | jq .conntrack_table"},
	{"drops", 1, Drops{}, "drops", "drops --for 5s -o json | jq '.rows[0]'"},
	{"monitor-line", 1, monitor.Line{}, "monitor", "monitor -o json | jq -r .title"},
	{"history", 1, HistoryResult{}, "history", "history -o json | jq -r '.findings[].title'"},
	{"fleet", 1, fleet.Report{}, "fleet report", "fleet report -o json *.json | jq '.causes[] | select(.outlier)'"},
	{fleet.Kind, fleet.Version, fleet.Node{}, "monitor", "monitor --metrics 127.0.0.1:9641"},
	{"log-line", 1, LogLine{}, "log", "log -o json | jq -r .text"},
	{wire.LineKind, wire.LineVersion, wire.Line{}, "log", "log --sink json:///var/log/nat.json"},
	{store.StateKind, store.StateVersion, store.State{}, "log", "log --dir /var/lib/natkit/log"},
	{sink.Kind, sink.Version, sink.File{}, "log", "log --sink json:///var/log/nat.json"},
	{"who", 1, Who{}, "who", "who 198.51.100.1:5000 tcp --at 1h -o json | jq -r '.found[].internal.address'"},
	{"trace-packet", 1, trace.Packet{}, "trace", "trace --host 192.0.2.1 -o json | jq .end"},
	{"trace-entry", 1, trace.EntryEnd{}, "trace", "trace --host 192.0.2.1 -o json | jq 'select(.left_s)'"},
	{"trace-summary", 1, follow.Summary{}, "trace", "trace --host 192.0.2.1 -o json | jq .packets"},
	{kindConntrackEntry, 1, ConntrackEntry{}, "conntrack list", "conntrack list -o json | jq -r .original.source.address"},
	{"conntrack-stats", 1, ConntrackStats{}, "conntrack stats", "conntrack stats -o json | jq .by_state"},
	{"conntrack-top", 1, ConntrackTop{}, "conntrack top", "conntrack top -o json | jq '.rows[0]'"},
	{"conntrack-memory", 1, ConntrackMemory{}, "conntrack memory", "conntrack memory -o json | jq .full_bytes"},
	{"conntrack-rates", 1, ConntrackRates{}, "conntrack watch", "conntrack watch --for 10s -o json | jq .new_per_second"},
	{"tune-plan", 1, tune.Plan{}, "tune plan", "tune plan -o json | jq '.changes[].setting'"},
	{"tune-apply", 1, tune.Record{}, "tune apply, tune rollback", "tune apply -o json | jq -r .id"},
	{"tune-history", 1, TuneHistory{}, "tune history", "tune history -o json | jq '.records[-1].time'"},
	{"nat-plan", 1, NATPlan{}, "up, apply", "up -f nat.yaml --dry-run -o json | jq .memory_bytes"},
	{"nat-down", 1, NATDown{}, "down", "down -o json | jq .kept"},
	{"serve-event", 1, control.ServeEvent{}, "serve", "serve -f nat.yaml -o json"},
	{"status", 1, control.Status{}, "status", "status -o json | jq '.problems[]'"},
	{"rules", 1, NATRules{}, "rules", "rules -o json | jq '.rules[] | select(.sessions == 0)'"},
	{"subscribers", 1, control.Subscribers{}, "subscribers", "subscribers --by refused -o json | jq -r '.rows[].subscriber'"},
	{"mapping", 1, rulefile.Mapping{}, "mappings", "mappings -o json | jq -r .external.port"},
	{"session", 1, rulefile.Session{}, "sessions", "sessions -o json | jq 'select(.idle_s > 60)'"},
	{"session-event", 1, rulefile.Event{}, "events", "events --kind refused -o json | jq -r .reason"},
	{"explain", 1, NATExplanation{}, "explain", "explain -o json '192.168.0.7:4000 -> 203.0.113.1:80 in lan0' | jq .steps"},
	{"import", 1, ImportView{}, "import", "import --from rules.v4 --inside lan0 -o json | jq '.differences[] | select(.lost)'"},
	{"accel-plan", 1, AccelPlan{}, "accel on", "accel on lan0 wan0 --dry-run -o json | jq .changes"},
	{"accel-off", 1, AccelOff{}, "accel off", "accel off -o json | jq .kept"},
	{"accel-status", 1, AccelStatus{}, "accel status", "accel status -o json | jq .share"},
	{KindBenchHTTP, bench.ResultVersion, bench.HTTPResult{}, "bench http", "bench http -o json http://192.0.2.1:8080/ | jq .requests_per_second"},
	{"bench-probe", 1, bench.ProbeResult{}, "bench probe", "bench probe -o json | jq '.abilities[] | select(.ok | not)'"},
	{KindBench, bench.ResultVersion, bench.Result{}, "bench udp, bench bulk, bench rules, bench cps, bench trimming, bench ports, bench expiry, bench subscribers", "bench cps -o json | jq '.figures[].median'"},
	{"saved", 1, SavedResults{}, "report", "report -o json udp.json | jq '.results[].file'"},
	{"comparison", 1, Comparison{}, "report", "report --compare -o json before.json after.json | jq '.figures[] | select(.worse)'"},
	{KindDemo, bench.ResultVersion, scenario.DemoResult{}, "demo", "demo -o json | jq '.steps[].name'"},
	{"lab", 1, lab.Info{}, "lab up", "lab up routed -o json | jq -r .url"},
	{"lab-plan", 1, LabPlan{}, "lab up, lab down", "lab up routed --dry-run -o json | jq '.plan[]'"},
	{"lab-down", 1, LabsDown{}, "lab down", "lab down --all -o json | jq .down"},
	{"labs", 1, Labs{}, "lab list", "lab list -o json | jq -r '.labs[].name'"},
	{"faults", 1, Faults{}, "lab run", "lab run --list -o json | jq -r '.faults[].code'"},
	{"fault", 1, FaultResult{}, "lab run", "lab run mtu-drop -o json | jq .ok"},
	{"version", 1, Version{}, "version", "version -o json | jq -r .version"},
	{"error", 1, Error{}, "", "status -o json | jq -r .error"},
}

// Kinds of results that natkit report reads again.
const (
	KindBench     = "bench"
	KindBenchHTTP = "bench-http"
	KindDemo      = "demo"
)

// Schema is what an object of the kind says of itself.
func (k Kind) Schema() string { return schema.Name(k.Name, k.Version) }

// kindNames says of each type what its objects are.
var kindNames = func() map[reflect.Type]string {
	names := map[reflect.Type]string{}
	for _, k := range Kinds {
		names[reflect.TypeOf(k.Of)] = k.Schema()
	}
	return names
}()

// snapshots is a file of all namespaces, as snapshot.Writer writes it.
type snapshots struct {
	Namespaces []savedSnapshot  `json:"namespaces"`
	LeftOut    snapshot.LeftOut `json:"left_out"`
}

type savedSnapshot struct {
	Schema string `json:"schema"` // natkit/snapshot/1
	snapshot.Snapshot
}

// Version is what natkit version prints.
type Version struct {
	Version  string `json:"version"`
	Go       string `json:"go"`       // the version of the compiler
	Platform string `json:"platform"` // linux/amd64
}

// Error is why a command failed, on standard error in the place of the text.
type Error struct {
	Error    string `json:"error"`     // the text, with what to do
	ExitCode int    `json:"exit_code"` // of the process
	// Problems are those of a rule file, where there are some.
	Problems []rulefile.Problem `json:"file_problems,omitempty"`
}
