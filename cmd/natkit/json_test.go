// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/natlog/store"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

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
	v := ktest.ReadSchemas(t)
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
		if names := v.Check(t, c.args, stderr.Bytes()); len(names) != 1 || json.Unmarshal(stderr.Bytes(), &e) != nil {
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

// What every command writes with -o json is what its schema says: each kind comes from a run
// of its command, from files or in namespaces.
func TestEveryJSON(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	t.Setenv("NATKIT_STATE_DIR", t.TempDir())
	// Kinds that no command writes here, and why.
	elsewhere := map[string]string{
		"natkit/demo/1": "takes one to two minutes: TestDemoTableFull of internal/scenario validates the result of a shorter one",
	}
	r := &jsonRuns{t: t, schemas: ktest.ReadSchemas(t), seen: map[string]bool{}, dir: t.TempDir()}
	r.fromFiles()
	r.fromHost()
	r.fromGateway(twoLinks(t))
	r.fromLab()
	r.fromMeasurements()
	for _, k := range report.Kinds {
		name := k.Schema()
		switch why := elsewhere[name]; {
		case r.seen[name] && why != "":
			t.Errorf("%s: a command here writes it, and it is excepted: %s", name, why)
		case !r.seen[name] && why == "":
			t.Errorf("%s: no command here writes it", name)
		}
		delete(elsewhere, name)
	}
	for name := range elsewhere {
		t.Errorf("%s: excepted, and none of report.Kinds", name)
	}
}

// jsonRuns are runs of commands with -o json, and the kinds that they wrote.
type jsonRuns struct {
	t       *testing.T
	schemas ktest.Schemas
	seen    map[string]bool
	dir     string
}

// run runs a command that succeeds, or finds something, and returns what it wrote.
func (r *jsonRuns) run(args ...string) []byte {
	r.t.Helper()
	var stdout, stderr bytes.Buffer
	code := run(r.t.Context(), args, &env{stdin: strings.NewReader(""), stdout: &stdout, stderr: &stderr})
	what := strings.Join(args, " ")
	if code == exitError || code == exitUsage || stdout.Len() == 0 {
		r.t.Errorf("%s: exit %d: %s", what, code, stderr.String())
	}
	r.wrote(what, stdout.Bytes())
	return stdout.Bytes()
}

// line runs a command of words without spaces, with -o json.
func (r *jsonRuns) line(line string) []byte {
	r.t.Helper()
	return r.run(append(strings.Fields(line), "-o", "json")...)
}

func (r *jsonRuns) wrote(what string, output []byte) {
	r.t.Helper()
	for _, name := range r.schemas.Check(r.t, what, output) {
		r.seen[name] = true
	}
}

// until runs a command that goes on until it is stopped, makes traffic for it, and stops it when it
// has written an object of the kind.
func (r *jsonRuns) until(kind, line string, traffic func()) {
	r.t.Helper()
	ctx, stop := context.WithCancel(r.t.Context())
	defer stop()
	var out, errs log
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, append(strings.Fields(line), "-o", "json"), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs})
	}()
	code := -1
	ktest.Wait(r.t, time.Minute, kind+" of "+line, func() bool {
		if traffic != nil {
			traffic()
		}
		select {
		case code = <-ended:
			return true
		default:
			return out.has(kind)
		}
	})
	if stop(); code < 0 {
		code = <-ended
	}
	if code != exitOK && code != exitFindings {
		r.t.Errorf("%s: exit %d: %s", line, code, errs.text.String())
	}
	r.wrote(line, []byte(out.text.String()))
}

func (r *jsonRuns) file(name, text string) string {
	path := filepath.Join(r.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
	return path
}

func (r *jsonRuns) fromFiles() {
	const saved = "../../internal/ui/report/testdata/"
	for _, name := range []string{"docker", "docker-blocked", "firewalld-blocked", "ufw"} {
		r.line("doctor --from " + saved + "corpus/" + name + ".json")
	}
	r.run("doctor", "-o", "json", "--diff", saved+"corpus/docker.json", saved+"corpus/docker-blocked.json")
	r.line("fleet report " + saved + "corpus/docker.json " + saved + "corpus/ufw.json " + saved + "corpus/firewalld-blocked.json no-such-file")
	r.line("tune plan --from " + saved + "corpus/docker.json")
	r.line("report " + saved + "saved-cps.json " + saved + "saved-demo.json " + saved + "http.json")
	r.line("report --compare " + saved + "saved-udp.json " + saved + "saved-udp-later.json")
	r.line("kconfig --from " + r.file("config", "CONFIG_NETFILTER=y\n"))
	r.line("import --inside eth1 --from " + r.file("rules.v4", "*nat\n-A POSTROUTING -s 10.0.0.0/8 -o eth0 -j MASQUERADE\n-A POSTROUTING -s 10.0.0.0/8 -p tcp -j MASQUERADE\nCOMMIT\n"))
	dump := r.file("dump", "tcp 6 27 ESTABLISHED src=192.168.1.18 dst=1.1.1.1 sport=1 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=1 [ASSURED] mark=0 use=1\n")
	r.line("conntrack list --from " + dump)
	r.line("conntrack stats --from " + dump)
	for _, by := range countsBy {
		r.line("conntrack top --by " + by + " --from " + dump)
	}
}

// fromHost runs what does not depend on a namespace, or looks at all of them.
func (r *jsonRuns) fromHost() {
	for _, line := range []string{"version", "lab run --list", "lab list", "lab up routed --dry-run", "tune rollback", "tune history"} {
		r.line(line)
	}
	all := filepath.Join(r.dir, "all.json")
	r.line("doctor --all-netns --for 100ms --save " + all)
	r.saved(all)
	var stderr bytes.Buffer
	run(r.t.Context(), strings.Fields("doctor --bogus -o json"), &env{stdout: io.Discard, stderr: &stderr})
	r.wrote("doctor --bogus", stderr.Bytes())
	before := filepath.Join(r.dir, "before.pprof")
	if code, _, stderr := observed(r.t.Context(), "profile --for 100ms -o pprof --file "+before); code != exitOK {
		r.t.Errorf("profile -o pprof: exit %d: %s", code, stderr)
	}
	r.line("profile --for 100ms --root all --diff " + before)
}

// saved validates a file that a command wrote.
func (r *jsonRuns) saved(path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		r.t.Fatal(err)
	}
	r.wrote(path, text)
}

// fromGateway runs what shows and changes one namespace.
func (r *jsonRuns) fromGateway(name string) {
	facts := filepath.Join(r.dir, "facts.json")
	rules := r.file("nat.yaml", "inside: [in]\noutside: [out]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - masquerade: 10.0.0.0/24\n")
	for _, line := range []string{
		"doctor --for 100ms --save " + facts, "hooks", "hooks --cost --for 100ms", "conntrack memory", "conntrack watch --interval 100ms --for 100ms",
		"drops --for 100ms --interval 100ms", "top --for 300ms --interval 100ms --window 200ms", "profile --for 100ms",
		"up --dry-run -f " + rules, "up -f " + rules, "status", "rules", "doctor --for 100ms", "apply -f " + rules, "down",
		"accel on in out --dry-run", "accel on in out", "accel status", "accel off",
	} {
		r.line(line + " --netns " + name)
	}
	r.saved(facts)
	r.run("explain", "-o", "json", "--netns", name, "-f", rules, "10.0.0.9:1 -> 10.0.1.9:80 in in")
	kept := filepath.Join(r.dir, "log")
	r.until("natkit/log-line/", "log --dir "+kept+" --netns "+name, nil)
	r.saved(filepath.Join(kept, store.StateFile))
	r.line("who 198.51.100.1:5000 tcp --at 1h --dir " + kept)
	r.until("natkit/serve-event/", "serve --down -f "+rules+" --netns "+name, nil)
}

// fromLab runs what only traffic, or a fault, brings about.
func (r *jsonRuns) fromLab() {
	name := ktest.Name(r.t)
	r.t.Cleanup(func() { _, _, _ = observed(context.Background(), "lab down "+name) }) // where the test did not get so far
	var l lab.Info
	if err := json.Unmarshal(r.line("lab up routed --rules none --server none --name "+name), &l); err != nil || len(l.Nodes) != 3 {
		r.t.Fatalf("%v, %+v", err, l)
	}
	client, gateway, server := l.Nodes[0], l.Nodes[1], l.Nodes[2]
	send := func() {
		ns, err := netns.Open(client.Netns)
		if err != nil {
			r.t.Fatal(err)
		}
		defer ns.Close()
		if err := ns.Do(func() error {
			c, err := net.Dial("udp4", net.JoinHostPort(server.Addr.String(), "9"))
			if err != nil {
				return err
			}
			_, _ = c.Write([]byte("x")) // nobody listens
			return c.Close()
		}); err != nil {
			r.t.Fatal(err)
		}
	}
	rules := r.file("lab.yaml", "inside: [eth1]\noutside: [eth0]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - masquerade: 192.168.0.0/24\n")
	r.line("up -f " + rules + " --netns " + gateway.Netns)
	r.until("natkit/session-event/", "events --netns "+gateway.Netns, send)
	kept, sunk := filepath.Join(r.dir, "lab-log"), filepath.Join(r.dir, "records.json")
	r.until("natkit/log-line/", "log --dir "+kept+" --sink json://"+sunk+" --netns "+gateway.Netns, func() {
		ktest.Wait(r.t, time.Minute, "a record in "+sunk, func() bool {
			send()
			records, err := os.Stat(sunk)
			return err == nil && records.Size() > 0
		})
	})
	r.saved(sunk)
	r.saved(filepath.Join(kept, "sinks.json"))
	r.line("sessions --netns " + gateway.Netns)
	r.line("mappings --netns " + gateway.Netns)
	r.line("subscribers --netns " + gateway.Netns)
	r.line("down --netns " + gateway.Netns)
	r.until("natkit/trace-packet/", "trace --port 9 --packets 1 --for 1m --netns "+client.Netns, send)

	// A NAT rule where packets are not forwarded is a finding without traffic.
	ns, err := netns.Open(gateway.Netns)
	if err != nil {
		r.t.Fatal(err)
	}
	defer ns.Close()
	if err := ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0o644) }); err != nil {
		r.t.Fatal(err)
	}
	r.line("up --engine nft -f " + rules + " --netns " + gateway.Netns)
	var sent time.Time
	r.until("natkit/trace-entry/", "trace --port 9 --for 1m --netns "+client.Netns, func() {
		if time.Since(sent) < 1500*time.Millisecond {
			return // it asks for entries twice a second
		}
		sent = time.Now()
		if err := ns.Do(func() error {
			_, err := conntrack.DeleteFunc(r.t.Context(), conntrack.Filter{}, func(f *conntrack.Flow) bool { return f.Orig.DstPort == 9 })
			return err
		}); err != nil {
			r.t.Fatal(err)
		}
		send()
	})
	if err := ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0o644) }); err != nil {
		r.t.Fatal(err)
	}
	history := filepath.Join(r.dir, "history")
	metrics := freeAddress(r.t)
	var findings []byte
	r.until("natkit/monitor-line/", "monitor --interval 1s --history "+history+" --metrics "+metrics, func() {
		if answer, err := http.Get("http://" + metrics + "/findings"); err == nil && answer.StatusCode == http.StatusOK {
			findings, _ = io.ReadAll(answer.Body)
			answer.Body.Close()
		}
	})
	r.wrote("/findings", findings)
	r.line("history --since 1h --history " + history)
	r.line("down --netns " + gateway.Netns)
	r.line("lab down " + name)
	r.line("lab run ip-forward-off --for 1s")
}

// fromMeasurements runs the shortest trials.
func (r *jsonRuns) fromMeasurements() {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	r.line("bench http -n 10 " + s.URL)
	r.line("bench udp --router none --trials 1 --duration 20ms")
	var probe bench.ProbeResult
	if err := json.Unmarshal(r.line("bench probe"), &probe); err != nil || len(probe.Abilities) == 0 || len(probe.Routers) < 10 {
		r.t.Errorf("bench probe: %v, %+v", err, probe)
	}
}

// The error that docs/json.md shows is that of today.
func TestErrorOfTheDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := observed(t.Context(), "status --netns blue -o json")
	if code != exitError || stdout != "" || !strings.Contains(string(page), "\n    "+stderr) {
		t.Errorf("exit %d, %q, and not in docs/json.md: %s", code, stdout, stderr)
	}
}
