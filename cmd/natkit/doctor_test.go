// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// doctor runs a doctor's command line.
func doctor(t *testing.T, ctx context.Context, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(ctx, append([]string{"doctor"}, args...), &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs})
	return code, out.String(), errs.String()
}

func saved(t *testing.T, s *snapshot.Snapshot) string {
	t.Helper()
	var b bytes.Buffer
	if err := snapshot.Save(&b, s); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// healthyFacts are those of a gateway that works, fullFacts of one whose table
// is full.
func healthyFacts() *snapshot.Snapshot {
	return &snapshot.Snapshot{
		TakenAt: time.Date(2026, 11, 21, 1, 2, 3, 0, time.UTC), WindowSeconds: 10,
		Host:         snapshot.Host{Hostname: "gw1", Kernel: "6.18.44", CPUs: 2, MemoryBytes: 8 << 30},
		Netns:        snapshot.Netns{Inode: 4026531833, Init: true},
		Capabilities: []snapshot.Capability{{Name: snapshot.CanConntrack, OK: true}, {Name: snapshot.CanDrops, Reason: "no BPF here", Costs: "places are not told"}},
		Conntrack: &snapshot.Conntrack{Count: 180, CountStart: 170, Max: 262144, Buckets: 262144, ObjectBytes: 256, ExtensionBytes: 128, BucketBytes: 8,
			Stats: map[string]uint64{"drop": 0, "insert_failed": 0}},
		Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
	}
}

func fullFacts() *snapshot.Snapshot {
	s := healthyFacts()
	s.Conntrack.Count, s.Conntrack.CountStart, s.Conntrack.Max = 1000, 1000, 1000
	s.Conntrack.Stats["drop"] = 5310
	s.KernelLog = &snapshot.KernelLog{TableFull: 10, TableFullBefore: 10, Suppressed: 3939, Lines: []string{"nf_conntrack: table full, dropping packet"}}
	return s
}

func TestDoctorFrom(t *testing.T) {
	healthy, full := saved(t, healthyFacts()), saved(t, fullFacts())
	for _, c := range []struct {
		name, facts string
		code        int
		text        []string // in the output as text
	}{
		{"healthy", healthy, exitUnjudged, []string{"gw1; Linux 6.18.44; watched for 10.0 s", "NOT JUDGED", "Nothing wrong was found among what could be judged.", "180 of 262144", "drop-tracing: no BPF here; so places are not told"}},
		{"full", full, exitFindings, []string{"CRITICAL [conntrack-table-full]", "nf_conntrack_max"}},
		{"nothing known", `{"schema": "natkit/snapshot/1"}`, exitUnjudged, []string{"cannot judge anything"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errs := doctor(t, t.Context(), c.facts, "--from", "-")
			if code != c.code || errs != "" {
				t.Errorf("exit code %d, want %d; stderr %q", code, c.code, errs)
			}
			for _, want := range c.text {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
			file := filepath.Join(t.TempDir(), "facts.json")
			if err := os.WriteFile(file, []byte(c.facts), 0o600); err != nil {
				t.Fatal(err)
			}
			if code, same, _ := doctor(t, t.Context(), "", "--from", file); code != c.code || same != out {
				t.Errorf("from a file, exit code %d:\n%s", code, same)
			}

			code, out, _ = doctor(t, t.Context(), c.facts, "--from", "-", "-o", "json")
			var result struct {
				Kernel       string
				Window       float64 `json:"interval_s"`
				Capabilities []snapshot.Capability
				Findings     []struct {
					Code, Severity, Title, Why string
					Evidence                   []struct{ What, Value, Source string }
					Remedy, Verify             []string
				}
			}
			if err := json.Unmarshal([]byte(out), &result); err != nil || code != c.code {
				t.Fatalf("exit code %d, %v:\n%s", code, err, out)
			}
			if (len(result.Findings) > 0) != (c.code == exitFindings) {
				t.Errorf("exit code %d with findings %+v", code, result.Findings)
			}
			for _, f := range result.Findings {
				if f.Code == "" || f.Severity == "" || f.Title == "" || f.Why == "" || len(f.Evidence) == 0 || len(f.Remedy) == 0 || len(f.Verify) == 0 {
					t.Errorf("finding %+v", f)
				}
			}
		})
	}
}

func TestDoctorRefuses(t *testing.T) {
	for _, c := range []struct {
		args  string
		stdin string
		code  int
		want  string
	}{
		{"--from - --for 5s", "", exitUsage, "--for and --from exclude each other"},
		{"--from - --save x", "", exitUsage, "--save and --from"},
		{"--from - --redact --save x", "{", exitError, "it is cut off"},
		{"--from - --netns x", "", exitUsage, "--netns and --from"},
		{"--from - --no-dump", "", exitUsage, "--no-dump and --from"},
		{"--for 0", "", exitUsage, "want more than 0"},
		{"--for -1s", "", exitUsage, "--for"},
		{"--for soon", "", exitUsage, "soon"},
		{"-o yaml", "", exitUsage, "yaml"},
		{"here", "", exitUsage, "here"},
		{"--from /nowhere/facts.json", "", exitError, "/nowhere does not exist"},
		{"--from .", "", exitError, "is a directory"},
		{"--from -", "{", exitError, "it is cut off"},
		{"--from -", `{"schema": "natkit/snapshot/99"}`, exitError, "use a newer natkit"},
		{"--for 10ms --netns no-such-namespace", "", exitError, "not found"},
		{"--for 10ms --save /nowhere/facts.json", "", exitError, "/nowhere/facts.json"},
	} {
		code, out, errs := doctor(t, t.Context(), c.stdin, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("%s: exit code %d, stderr %q, stdout %q; want %d and %q", c.args, code, errs, out, c.code, c.want)
		}
	}
}

// What is saved gives the same answer later as at once, and an interrupt ends the
// window, not the answer.
func TestDoctorSave(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close(); netns.Delete(name) })
	// A forward chain that drops, which is no fault without traffic.
	nft := ktest.Tool(t, "nft")
	if err := ns.Do(func() error {
		cmd := exec.Command(nft, "-f", "-")
		cmd.Stdin = strings.NewReader("table ip f { chain x { type filter hook forward priority 0; policy drop; }; }")
		return cmd.Run()
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	file := filepath.Join(t.TempDir(), "facts.json")
	began := time.Now()
	code, now, errs := doctor(t, ctx, "", "--netns", name, "--for", "1h", "--save", file)
	want := exitOK
	if strings.Contains(now, "NOT JUDGED") { // in a container, say
		want = exitUnjudged
	}
	if code != want || !strings.HasPrefix(errs, "natkit: interrupted after ") || time.Since(began) > time.Minute {
		t.Fatalf("exit code %d after %v, stderr %q:\n%s", code, time.Since(began), errs, now)
	}
	code, later, errs := doctor(t, t.Context(), "", "--from", file)
	if code != want || errs != "" || later != now {
		t.Errorf("exit code %d, stderr %q; at once\n%s\nlater\n%s", code, errs, now, later)
	}
	if !strings.Contains(now, "namespace "+name) || !strings.Contains(now, "1 chain") {
		t.Errorf("of another namespace?\n%s", now)
	}
}

// A redacted ticket names the same causes and nobody's machine.
func TestDoctorRedact(t *testing.T) {
	s := fullFacts()
	s.Netns.Name = "customer"
	s.KernelLog.Lines = append(s.KernelLog.Lines, "gw1: from 192.0.2.7")
	for _, format := range []string{"text", "json", "html"} {
		code, plain, _ := doctor(t, t.Context(), saved(t, s), "--from", "-", "-o", format)
		redactedCode, redacted, stderr := doctor(t, t.Context(), saved(t, s), "--from", "-", "--redact", "-o", format)
		if code != exitFindings || redactedCode != code || stderr != "" {
			t.Errorf("%s: exit %d, redacted %d, %q", format, code, redactedCode, stderr)
		}
		if !strings.Contains(plain, "gw1") || !strings.Contains(plain, "customer") {
			t.Errorf("%s lacks the names", format)
		}
		for _, secret := range []string{"gw1", "customer", "192.0.2.7"} {
			if strings.Contains(redacted, secret) {
				t.Errorf("%s: %q is left", format, secret)
			}
		}
		if !strings.Contains(redacted, "conntrack-table-full") {
			t.Errorf("%s: the cause is not found any more", format)
		}
	}
}

// A file is redacted afterwards, into another one that is judged alike: of one
// namespace and of all of them, of which an early one speaks of a later one.
func TestDoctorRedactFile(t *testing.T) {
	early, late := fullFacts(), healthyFacts()
	early.KernelLog.Lines = append(early.KernelLog.Lines, "of customer: from 192.0.2.7")
	late.Netns.Name = "customer"
	var all strings.Builder
	w := snapshot.NewWriter(&all)
	for _, s := range []*snapshot.Snapshot{early, late} {
		if err := w.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.End(snapshot.LeftOut{Skipped: []string{"customer: gone, it had 192.0.2.7"}}); err != nil {
		t.Fatal(err)
	}
	for name, facts := range map[string]string{"one": saved(t, early), "all": all.String()} {
		for _, stdin := range []bool{true, false} {
			dir := t.TempDir()
			from, stdinText, to := "-", facts, filepath.Join(dir, "redacted.json")
			if !stdin {
				from, stdinText = filepath.Join(dir, "facts.json"), ""
				if err := os.WriteFile(from, []byte(facts), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			code, now, errs := doctor(t, t.Context(), stdinText, "--from", from, "--redact", "--save", to, "-o", "json")
			if code != exitFindings || errs != "" {
				t.Fatalf("%s: exit code %d, stderr %q", name, code, errs)
			}
			data, err := os.ReadFile(to)
			if err != nil {
				t.Fatal(err)
			}
			secrets := []string{"gw1", "192.0.2.7"}
			if name == "all" {
				secrets = append(secrets, "customer")
			}
			for _, secret := range secrets {
				if strings.Contains(string(data), secret) || strings.Contains(now, secret) {
					t.Errorf("%s: %q is left", name, secret)
				}
			}
			if code, later, errs := doctor(t, t.Context(), "", "--from", to, "-o", "json"); code != exitFindings || later != now {
				t.Errorf("%s: exit code %d, stderr %q; at once\n%s\nlater\n%s", name, code, errs, now, later)
			}
			// The file that is read is not written.
			code, _, errs = doctor(t, t.Context(), "", "--from", to, "--redact", "--save", to)
			if again, _ := os.ReadFile(to); code != exitUsage || string(again) != string(data) {
				t.Errorf("%s: exit code %d, %q, %d bytes of %d", name, code, errs, len(again), len(data))
			}
		}
	}
}

// --all-netns is about all of a machine: the name of one of its namespaces is
// refused beside it, and so is a file.
func TestDoctorAllNetnsUsage(t *testing.T) {
	for _, args := range [][]string{
		{"--all-netns", "--netns", "blue"}, {"--all-netns", "--from", "x"},
	} {
		if code, _, stderr := doctor(t, t.Context(), "", args...); code != 2 || !strings.Contains(stderr, "--all-netns") && !strings.Contains(stderr, "one namespace") {
			t.Errorf("%q: exit code %d, %q", args, code, stderr)
		}
	}
}

// A fault in a namespace that only a process leads to is found from outside.
func TestDoctorAllNetns(t *testing.T) {
	ktest.Root(t)
	ktest.Tool(t, "ip")
	ktest.Tool(t, "nft")
	ktest.Tool(t, "sysctl")
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	shell := func(script string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
		cmd.Stderr = os.Stderr
		if err := h.Do(cmd.Run); err != nil {
			t.Fatal(err)
		}
	}
	sleep := exec.CommandContext(t.Context(), "sleep", "60")
	if err := h.Do(sleep.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sleep.Process.Kill(); sleep.Wait() })
	// A gateway whose forwarding is off: nothing comes, which is worth advice.
	shell("ip link add eth0 type veth peer name eth1; ip link set eth0 up; ip link set eth1 up; " +
		"ip addr add 10.1.0.1/24 dev eth0; ip addr add 10.2.0.1/24 dev eth1; sysctl -qw net.ipv4.ip_forward=0; " +
		"nft add table ip nat; nft add chain ip nat post '{ type nat hook postrouting priority 100; }'; nft add rule ip nat post oifname eth0 masquerade")
	// As it is taken, and judged again from the file; without what tells whose it is.
	file := filepath.Join(t.TempDir(), "all.json")
	type namespace struct {
		Netns    snapshot.Netns `json:"namespace"`
		Findings []struct{ Code string }
	}
	for _, args := range [][]string{{"--all-netns", "--for", "0.2s", "--redact", "--save", file}, {"--from", file}} {
		_, stdout, stderr := doctor(t, t.Context(), "", append(args, "-o", "json")...)
		var got struct{ Namespaces []namespace }
		if err := json.Unmarshal([]byte(stdout), &got); err != nil {
			t.Fatalf("%v: %s", err, stderr)
		}
		i := slices.IndexFunc(got.Namespaces, func(n namespace) bool { return n.Netns.Inode == h.Inode() })
		if i < 0 {
			t.Fatalf("%q: namespace %d is not among %+v", args, h.Inode(), got.Namespaces)
		}
		if n := got.Namespaces[i]; len(n.Findings) == 0 || n.Findings[0].Code != "ip-forward-off" {
			t.Errorf("%q: found %+v", args, n)
		}
	}
	if data, err := os.ReadFile(file); err != nil || bytes.Contains(data, []byte("10.1.0.1/24")) {
		t.Errorf("addresses are in the file (%v)", err)
	}
	if _, page, stderr := doctor(t, t.Context(), "", "--from", file, "-o", "html"); !strings.Contains(page, `-ip-forward-off">`) {
		t.Errorf("no finding on the page: %s", stderr)
	}
}
