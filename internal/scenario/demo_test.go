// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/observe"
	"natkit/internal/lab"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
	"natkit/internal/words/schema"
)

// The test binary is also the web server that the demo's lab starts, and the monitor beside a lab.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == monitorProcess {
		if err := runMonitor(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if lab.Serve(ctx, os.Args[2:]) != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	remove := ktest.SharedRunDir() // labs of others are none of these tests' business
	ktest.MoreAtOnce(2)
	code := ktest.OwnMachine(m)
	remove()
	ktest.CleanNatkit()
	os.Exit(code)
}

// heard is a Reporter that remembers, and can do something at a step's beginning, and
// when a step of it is said.
type heard struct {
	steps []string
	hosts string
	facts *snapshot.Snapshot
	at    func(step, said string)
}

func (h *heard) Begin(_ *DemoResult, _ string, hostWrite string) { h.hosts = hostWrite }
func (h *heard) Progress(string, float64)                        {}
func (h *heard) Facts(s *snapshot.Snapshot, _ *observe.Profile)  { h.facts = s }
func (h *heard) Done(*DemoStep)                                  {}
func (h *heard) Step(a *DemoStep) {
	h.steps = append(h.steps, a.Name)
	if h.at != nil {
		h.at(a.Name, "")
	}
}

func (h *heard) Say(format string, args ...any) {
	if h.at != nil {
		h.at(h.steps[len(h.steps)-1], fmt.Sprintf(format, args...))
	}
}

func demoOptions(t *testing.T) (DemoOptions, *heard) {
	t.Helper()
	ktest.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := &heard{}
	return DemoOptions{
		Site: 2, Requests: 2500, NoHostWrite: true, Report: h, Window: 2 * time.Second, Turns: 1,
		ServeCommand: []string{self, "serve"}, Place: tune.Place{StateDir: t.TempDir()},
	}, h
}

var allActs = []string{StepBaseline, StepCollapse, StepDiagnosis, StepCure, StepProof, StepAccelerate, StepReplace}

// checkDemo checks what holds for every demo that came to its end.
func checkDemo(t *testing.T, res *DemoResult, h *heard, fault string) map[string]DemoStep {
	t.Helper()
	if !slices.Equal(h.steps, allActs) {
		t.Errorf("told the steps %q, want %q", h.steps, allActs)
	}
	steps := map[string]DemoStep{}
	for _, a := range res.Steps {
		steps[a.Name] = a
		t.Logf("%s took %.1f s", a.Name, a.Seconds)
	}
	if len(steps) != len(allActs) {
		t.Fatalf("%d steps in the result, want %d", len(steps), len(allActs))
	}
	if !res.Restored || len(res.Left) > 0 || res.Before != res.After {
		t.Errorf("restored %v, left %q, before %+v, after %+v", res.Restored, res.Left, res.Before, res.After)
	}
	if found := steps[StepDiagnosis].Findings; res.Fault != fault || len(found) == 0 || found[0].Code != fault || found[0].Severity != causes.Critical {
		t.Errorf("fault %s, found %+v, want %s first and critical", res.Fault, found, fault)
	}
	if h.facts == nil {
		t.Error("the facts were not told")
	}
	text, err := json.Marshal(struct {
		Schema string `json:"schema"`
		*DemoResult
	}{schema.Name("demo", bench.ResultVersion), res})
	if err != nil {
		t.Fatal(err)
	}
	if names := ktest.ReadSchemas(t).Check(t, "the result", text); len(names) != 1 {
		t.Errorf("the result is %q", names)
	}
	// What the machine does besides may cost requests, too: by the clock of the case,
	// two seconds for each.
	cured := []string{StepProof}
	if res.Site == 1 {
		cured = append(cured, StepAccelerate, StepReplace)
	}
	done := func(step string) int64 { return steps[step].HTTP.Completed }
	for _, step := range cured {
		if steps[step].HTTP == nil {
			t.Fatalf("step %s ran no load: %s", step, steps[step].NotRun)
		}
		if lost := done(StepBaseline) - done(StepCollapse); lost <= 0 || done(step)-done(StepCollapse) < lost/2 {
			t.Errorf("completed: baseline %d, collapse %d, %s %d: want the collapse least by far", done(StepBaseline), done(StepCollapse), step, done(step))
		}
	}
	return steps
}

func TestDemoTableFull(t *testing.T) {
	if testing.Short() {
		ktest.Unsupported(t, "fills the table of connections (-short)")
	}
	o, h := demoOptions(t)
	res, err := Demo(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	steps := checkDemo(t, res, h, "conntrack-table-full")
	if res.HostWrite || h.hosts != "" {
		t.Errorf("host-wide write announced: %v %q", res.HostWrite, h.hosts)
	}
	if cure := steps[StepCure]; cure.Removed == 0 {
		t.Errorf("cure %+v: removed nothing", cure)
	}
	for _, c := range steps[StepCure].Changes {
		if c.Scope != tune.ScopeNamespace {
			t.Errorf("change %+v of the host", c)
		}
	}
	for _, step := range []string{StepAccelerate, StepReplace} {
		if steps[step].NotRun == "" || steps[step].HTTP != nil {
			t.Errorf("the client is on the host itself, and step %s had its load: %+v", step, steps[step])
		}
	}
	if left, err := lab.List(); err != nil || slices.ContainsFunc(left, func(i lab.Info) bool { return strings.HasPrefix(i.Name, "published") }) {
		t.Errorf("labs left: %+v, %v", left, err)
	}
}

func TestDemoPortsExhausted(t *testing.T) {
	o, h := demoOptions(t)
	o.Site = 1         // whose load comes from outside, so that the engine can have it
	o.FillShare = 1e-9 // no machine has that little
	res, err := Demo(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	replace := checkDemo(t, res, h, "snat-ports-exhausted")[StepReplace]
	if res.FaultReason == "" {
		t.Error("not said why the fault is another one")
	}
	for _, mitigation := range []string{MitigationKernel, MitigationAccel, MitigationEngine} {
		measured := slices.ContainsFunc(replace.Figures, func(f bench.Figure) bool {
			return f.Router == mitigation && f.Metric == "requests_per_second" && len(f.Values) == o.Turns && f.Min > 0
		})
		if !measured {
			t.Errorf("figures %+v: none of %s", replace.Figures, mitigation)
		}
	}
	if file, err := rulefile.Parse("nat.yaml", []byte(replace.RuleFile)); err != nil || len(file.Rules) != 2 {
		t.Errorf("rule file told: %v\n%s", err, replace.RuleFile)
	}
}

// An interrupt in any step ends the demo, which takes away what it made and still
// returns the steps before.
func TestDemoInterrupted(t *testing.T) {
	for _, c := range []struct {
		step string
		said string // the step of the step that is interrupted; "" for its beginning
		full bool   // the fault is the full table, which takes longer to make
	}{
		{step: StepBaseline}, {step: StepCollapse, full: true}, {step: StepDiagnosis}, {step: StepCure, full: true}, {step: StepAccelerate, said: "rules stay"},
		{step: StepReplace, said: "in turn,"}, // with the engine in the place of the kernel's NAT, or about to be
	} {
		if testing.Short() && c.step != StepBaseline && c.step != StepReplace {
			continue
		}
		t.Run(c.step, func(t *testing.T) {
			t.Parallel() // nothing is compared with another step's figures
			o, h := demoOptions(t)
			o.Site = 1
			if !c.full {
				o.FillShare = 1e-9
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			h.at = func(step, said string) {
				if step == c.step && strings.Contains(said, c.said) {
					cancel()
				}
			}
			res, err := Demo(ctx, o)
			if err == nil || !strings.Contains(err.Error(), "step "+c.step) {
				t.Errorf("error %v, want one that names the step", err)
			}
			if res == nil || !res.Restored {
				t.Errorf("result %+v: not restored", res)
			}
		})
	}
}

// What a killed demo changed is put back by the next one, and what the user
// changed is not.
func TestDemoRecovers(t *testing.T) {
	o, _ := demoOptions(t)
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t), Owned: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Down() })
	node := l.NATNode()
	const users, demos = "net.netfilter.nf_conntrack_udp_timeout", "net.netfilter.nf_conntrack_tcp_timeout_time_wait"
	before := map[string]string{}
	for _, c := range []struct{ by, setting, value string }{{"", users, "17"}, {demoName, demos, "33"}} {
		if before[c.setting], err = node.SysctlValue(c.setting); err != nil {
			t.Fatal(err)
		}
		_, err := tune.Apply(t.Context(), &tune.Plan{
			Netns:   snapshot.Netns{Name: node.Netns},
			Changes: []tune.Change{{Setting: c.setting, Netns: node.Netns, Scope: tune.ScopeNamespace, Old: before[c.setting], New: c.value}},
		}, tune.ApplyOptions{Place: o.Place, By: c.by})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := o.recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	for setting, want := range map[string]string{users: "17", demos: before[demos]} {
		if got, err := node.SysctlValue(setting); err != nil || got != want {
			t.Errorf("%s is %s, want %s (%v)", setting, got, want, err)
		}
	}
}

func TestDemoOneAtATime(t *testing.T) {
	o, _ := demoOptions(t)
	lock, err := o.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := Demo(t.Context(), o); err == nil || !strings.Contains(err.Error(), "another demo") {
		t.Errorf("second demo: %v", err)
	}
}

func TestChooseFault(t *testing.T) {
	d := &demo{res: &DemoResult{}, o: DemoOptions{FillShare: DefaultFillShare}, lab: &lab.Lab{}}
	facts := func(limit uint64) *snapshot.Snapshot {
		return &snapshot.Snapshot{
			Host:      snapshot.Host{MemoryBytes: 1 << 30},
			Conntrack: &snapshot.Conntrack{Max: limit, ObjectBytes: 256},
		}
	}
	for _, tt := range []struct {
		facts *snapshot.Snapshot
		want  string
	}{
		{facts(65536), "conntrack-table-full"},
		{facts(1 << 20), "snat-ports-exhausted"}, // 256 MiB of 1 GiB
		{facts(0), "snat-ports-exhausted"},
		{facts(1 << 63), "snat-ports-exhausted"},
		{&snapshot.Snapshot{}, "snat-ports-exhausted"},
	} {
		t.Run(fmt.Sprint(tt.facts.Conntrack), func(t *testing.T) {
			if got := d.chooseFault(tt.facts).code; got != tt.want {
				t.Errorf("fault %s, want %s", got, tt.want)
			}
		})
	}
}

// The host-wide values that a demo compares are the ones it could have changed.
func TestReadHostValues(t *testing.T) {
	got, err := readHostValues()
	if err != nil {
		ktest.Missing(t, "%v", err)
	}
	limits, err := conntrack.ReadLimits()
	if err != nil || got != (HostValues{limits.Max, limits.Buckets}) || got.ConntrackMax == 0 {
		t.Errorf("%+v, limits %+v, %v", got, limits, err)
	}
}
