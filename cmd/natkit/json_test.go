// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/fleet"
	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/observe"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
	"natkit/internal/words/schema"
)

// validator knows the schemas of docs/schema by the names of their kinds. It is stricter than
// they are: a field that they do not name is an error.
type validator map[string]*jsonschema.Schema

func newValidator(t *testing.T) validator {
	t.Helper()
	v := validator{}
	for _, k := range report.Kinds {
		path := filepath.Join("../../docs/schema", k.Name+".json")
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		doc, err := jsonschema.UnmarshalJSON(f)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		closeObjects(doc)
		c := jsonschema.NewCompiler()
		c.AssertFormat()
		if err := c.AddResource(path, doc); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if v[k.Schema()], err = c.Compile(path); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	return v
}

// closeObjects makes a schema refuse fields that it does not name.
func closeObjects(node any) {
	switch n := node.(type) {
	case map[string]any:
		if _, ok := n["properties"].(map[string]any); ok && n["type"] == "object" {
			n["additionalProperties"] = false
		}
		for _, below := range n {
			closeObjects(below)
		}
	case []any:
		for _, below := range n {
			closeObjects(below)
		}
	}
}

// check validates all objects of an output and returns their schemas.
func (v validator) check(t *testing.T, what string, output []byte) (names []string) {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(output))
	for {
		var object json.RawMessage
		if err := dec.Decode(&object); errors.Is(err, io.EOF) {
			return names
		} else if err != nil {
			t.Errorf("%s: %v\n%s", what, err, output)
			return names
		}
		name, err := schema.Of(object)
		if head := string(bytes.TrimLeft(bytes.TrimPrefix(object, []byte("{")), " \n")); err != nil || !strings.HasPrefix(head, `"`+schema.Key+`"`) {
			t.Errorf("%s: its first field is not its schema (%v)\n%.200s", what, err, object)
			continue
		}
		names = append(names, name)
		kind := v[name]
		if kind == nil {
			t.Errorf("%s: %q is none of report.Kinds", what, name)
			continue
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(object))
		if err == nil {
			err = kind.Validate(value)
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Every command with -o json says in report.Kinds what it writes, and no other does.
func TestKindsHaveCommands(t *testing.T) {
	var have []string
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if f := c.Flags().Lookup("output"); f != nil && strings.Contains(f.Usage, "json") {
			have = append(have, strings.TrimPrefix(c.CommandPath(), "natkit "))
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&env{}))
	var want []string
	for _, k := range report.Kinds {
		if k.Command != "" {
			want = append(want, strings.Split(k.Command, ", ")...)
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	if want = slices.Compact(want); !slices.Equal(want, have) {
		t.Errorf("report.Kinds names %q\nthe commands are %q", want, have)
	}
}

// With -o json an error is an object on standard error, wherever the flag stands.
func TestErrorsAsJSON(t *testing.T) {
	v := newValidator(t)
	rules := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(rules, []byte("natkit: 1\nrules:\n  - nonsense: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args     string
		code     int
		problems bool
	}{
		{"doctor -o json --bogus", exitUsage, false},
		{"doctor --bogus --output=json", exitUsage, false},
		{"conntrack stats --netns no-such-namespace -ojson", exitError, false},
		{"report -o json no-such-file", exitError, false},
		{"up -o json --dry-run -f " + rules, exitError, true},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), strings.Fields(c.args), &env{stdout: &stdout, stderr: &stderr})
		var e report.Error
		if names := v.check(t, c.args, stderr.Bytes()); len(names) != 1 || json.Unmarshal(stderr.Bytes(), &e) != nil {
			t.Errorf("%s: %q: %s", c.args, names, stderr.String())
		}
		if code != c.code || e.ExitCode != code || e.Error == "" || stdout.Len() > 0 || (len(e.Problems) > 0) != c.problems {
			t.Errorf("%s: exit %d, %+v, stdout %s", c.args, code, e, stdout.String())
		}
	}
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"lab", "exec", "x", "y", "--", "-o", "json"}, &env{stdout: io.Discard, stderr: &stderr}); code == exitOK || !strings.HasPrefix(stderr.String(), "natkit: ") {
		t.Errorf("-o json of another program: exit %d, %s", code, stderr.String())
	}
}

// What every command writes with -o json is what its schema says. Commands that take long are
// run from what they saved (testdata of internal/ui/report), or validated by the tests that run
// them.
func TestEveryJSON(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	t.Setenv("NATKIT_STATE_DIR", t.TempDir())
	v := newValidator(t)
	seen := map[string]bool{}
	runs := func(args ...string) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), args, &env{stdin: strings.NewReader(""), stdout: &stdout, stderr: &stderr})
		what := strings.Join(args, " ")
		if code == exitError || code == exitUsage || stdout.Len() == 0 {
			t.Errorf("%s: exit %d: %s", what, code, stderr.String())
		}
		for _, name := range v.check(t, what, stdout.Bytes()) {
			seen[name] = true
		}
	}
	// shows validates a result that takes traffic or long to come about.
	shows := func(result any) {
		t.Helper()
		var b bytes.Buffer
		if err := report.JSONLine(&b, result); err != nil {
			t.Error(err)
		}
		for _, name := range v.check(t, fmt.Sprintf("%T", result), b.Bytes()) {
			seen[name] = true
		}
	}
	const saved = "../../internal/ui/report/testdata/"
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	fields := strings.Fields

	// From files.
	facts := filepath.Join(dir, "facts.json")
	for _, name := range []string{"docker", "docker-blocked", "firewalld-blocked", "ufw"} {
		runs("doctor", "-o", "json", "--from", saved+"corpus/"+name+".json")
	}
	runs("fleet", "report", "-o", "json", saved+"corpus/docker.json", saved+"corpus/ufw.json", saved+"corpus/firewalld-blocked.json", "no-such-file")
	runs("tune", "plan", "-o", "json", "--from", saved+"corpus/docker.json")
	runs("report", "-o", "json", saved+"saved-cps.json", saved+"saved-demo.json", saved+"http.json")
	runs("report", "--compare", "-o", "json", saved+"saved-udp.json", saved+"saved-udp-later.json")
	runs("kconfig", "-o", "json", "--from", file("config", "CONFIG_NETFILTER=y\n"))
	runs("import", "--inside", "eth1", "-o", "json", "--from", file("rules.v4", "*nat\n-A POSTROUTING -s 10.0.0.0/8 -o eth0 -j MASQUERADE\n-A POSTROUTING -s 10.0.0.0/8 -p tcp -j MASQUERADE\nCOMMIT\n"))
	runs("conntrack", "list", "-o", "json", "--from", file("dump", "tcp 6 27 ESTABLISHED src=192.168.1.18 dst=1.1.1.1 sport=1 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=1 [ASSURED] mark=0 use=1\n"))
	runs("conntrack", "stats", "-o", "json", "--from", filepath.Join(dir, "dump"))
	for _, by := range countsBy {
		runs("conntrack", "top", "-o", "json", "--by", by, "--from", filepath.Join(dir, "dump"))
	}
	for _, name := range []string{"saved-cps.json", "saved-udp.json", "saved-demo.json", "http.json"} {
		f, err := os.Open(saved + name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		r, err := report.Load(name, f)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case r.Demo != nil:
			shows(r.Demo)
		case r.HTTP != nil:
			shows(r.HTTP)
		default:
			shows(r.Result)
		}
	}
	runs("version", "-o", "json")
	runs("lab", "run", "--list", "-o", "json")
	runs("lab", "list", "-o", "json")
	runs("lab", "up", "routed", "--dry-run", "-o", "json")
	runs("tune", "rollback", "-o", "json")
	runs("tune", "history", "-o", "json")

	// In a namespace of its own.
	name := twoLinks(t)
	rules := file("nat.yaml", "inside: [in]\noutside: [out]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - masquerade: 10.0.0.0/24\n")
	for _, args := range []string{
		"doctor --for 100ms --save " + facts, "hooks", "hooks --cost --for 100ms", "conntrack memory", "conntrack watch --interval 100ms --for 100ms",
		"drops --for 100ms --interval 100ms", "top --for 300ms --interval 100ms --window 200ms", "profile --for 100ms",
		"up --dry-run -f " + rules, "up -f " + rules, "status", "rules", "doctor --for 100ms", "apply -f " + rules, "down",
		"accel on in out --dry-run", "accel on in out", "accel status", "accel off",
	} {
		runs(append(fields(args), "--netns", name, "-o", "json")...)
	}
	runs("explain", "-o", "json", "--netns", name, "-f", rules, "10.0.0.9:1 -> 10.0.1.9:80 in in")
	text, err := os.ReadFile(facts)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range v.check(t, "doctor --save", text) {
		seen[name] = true
	}
	var all bytes.Buffer
	w := snapshot.NewWriter(&all)
	one, err := snapshot.Load(bytes.NewReader(text))
	if err := errors.Join(err, w.Add(one), w.End(snapshot.LeftOut{})); err != nil {
		t.Fatal(err)
	}
	for _, name := range v.check(t, "doctor --all-netns --save", all.Bytes()) {
		seen[name] = true
	}

	// What only traffic, or a long run, brings about.
	end := snapshot.EndpointFrom(netip.MustParseAddr("192.0.2.1"), 80)
	now := time.Now()
	session := rulefile.Session{Protocol: rulefile.TCP, Source: end, Destination: end, SourceAfter: end, DestinationAfter: end}
	shows(session)
	shows(rulefile.Event{Time: now, Kind: "created", Session: session})
	shows(rulefile.Mapping{Inside: end, Outside: end})
	shows(control.ServeEvent{Time: now, Kind: "applied", Why: []string{"the file"}})
	shows(monitor.Line{Event: history.Event{At: now}})
	shows(fleet.Node{Name: "a", Findings: []fleet.Finding{{Severity: causes.Warning, Since: now}}, Configuration: map[string]string{"kernel": "6.1"}})
	shows(trace.Packet{Steps: []trace.Step{{Rule: &trace.Rule{}}}})
	shows(follow.Summary{Missing: []observe.Missing{{}}})
	shows(report.NewProfileDiff(&observe.Profile{}, &observe.Profile{}, ""))
	shows(report.DoctorAllResult{Namespaces: []report.DoctorResult{}, Skipped: []string{}})
	shows(report.HistoryResult{Findings: []history.Episode{{}}, Changes: []history.Change{{}}, Gaps: []report.HistoryGap{{}}, Problems: []string{}})
	shows(bench.ProbeResult{Abilities: []bench.Ability{{Have: true}}, Routers: []bench.RouterUse{{}}})
	shows(lab.Info{Nodes: []lab.NodeInfo{}})
	shows(report.FaultResult{Steps: []report.FaultStep{}})
	shows(report.LabsDown{Down: []string{name}, InUse: []string{}})
	shows(report.Error{ExitCode: exitError})

	for name := range v {
		if !seen[name] {
			t.Errorf("%s: no command here writes it", name)
		}
	}
}
