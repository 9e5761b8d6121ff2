// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

// program returns how to run the program, with a run directory of its own.
func program(t *testing.T) func(args ...string) *exec.Cmd {
	t.Helper()
	ktest.Root(t)
	path := ktest.Natkit(t)
	run := filepath.Join(t.TempDir(), "run")
	t.Setenv("NATKIT_RUN_DIR", run) // also for calls of package lab in this process
	return func(args ...string) *exec.Cmd { return exec.Command(path, args...) }
}

// try runs a command line and returns what it wrote and its exit code.
func try(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// labServers returns the command lines of background servers of this test.
func labServers(t *testing.T) (out []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if env, err := os.ReadFile(path); err == nil && bytes.Contains(env, []byte("NATKIT_RUN_DIR="+os.Getenv("NATKIT_RUN_DIR")+"\x00")) {
			cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			out = append(out, strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
	return out
}

// labNamespaces returns the names in /run/netns that begin so.
func labNamespaces(t *testing.T, prefix string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(netns.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			out = append(out, e.Name())
		}
	}
	return out
}

// A lab from beginning to end as a user would have it.
func TestLabCommands(t *testing.T) {
	natkit := program(t)
	ktest.Tool(t, "curl")
	name := ktest.Name(t)
	defer natkit("lab", "down", "--all").Run()

	out, _, code := try(t, natkit("lab", "up", "published", "--name", name, "--clients", "2"))
	if code != exitOK {
		t.Fatalf("lab up: exit code %d", code)
	}
	for _, want := range []string{name + "-client2", "docker0", "172.17.0.2", "natkit lab down " + name} {
		if !strings.Contains(out, want) {
			t.Errorf("lab up does not say %q:\n%s", want, out)
		}
	}
	// Every command that it proposes and that is about the lab works.
	for line := range strings.Lines(out) {
		if args := strings.Fields(line); len(args) > 2 && args[0] == "natkit" && args[1] == "lab" && args[2] == "exec" {
			if body, errs, code := try(t, natkit(args[1:]...)); code != exitOK || !strings.HasPrefix(body, "natkit lab") {
				t.Errorf("%s: exit code %d: %s%s", strings.TrimSpace(line), code, body, errs)
			}
		}
	}
	if _, errs, code := try(t, natkit("lab", "up", "routed", "--name", name)); code != exitError || !strings.Contains(errs, "natkit lab down "+name) {
		t.Errorf("second lab of the name: exit code %d: %s", code, errs)
	}

	var list report.Labs
	out, _, _ = try(t, natkit("lab", "list", "-o", "json"))
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list.Labs) != 1 || list.Labs[0].Name != name || list.Labs[0].State != lab.StateUp || len(list.Labs[0].Nodes) != 5 {
		t.Errorf("lab list -o json: %v: %s", err, out)
	}
	if out, _, _ := try(t, natkit("lab", "list")); !strings.Contains(out, name) || !strings.Contains(out, "http://192.168.0.96:8080/") {
		t.Errorf("lab list:\n%s", out)
	}

	for _, c := range []struct {
		args   []string
		stdin  string
		stdout string
		code   int
	}{
		{args: []string{"host", "--", "sh", "-c", "ls /sys/class/net; exit 7"}, stdout: "docker0\neth0\nlo\nveth0\n", code: 7},
		{args: []string{"client2", "cat", "-"}, stdin: "through\n", stdout: "through\n"},
		{args: []string{"client", "--", "sh", "-c", "kill -TERM $$"}, code: -1}, // by a signal, as the program itself
	} {
		cmd := natkit(append([]string{"lab", "exec", name}, c.args...)...)
		cmd.Stdin = strings.NewReader(c.stdin)
		out, errs, code := try(t, cmd)
		if out != c.stdout || code != c.code {
			t.Errorf("lab exec %q: exit code %d, %q, %q; want %d, %q", c.args, code, out, errs, c.code, c.stdout)
		}
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"exec", name, "moon", "--", "true"}, exitUsage, "container"},
		{[]string{"exec", "nothing", "client", "--", "true"}, exitError, "natkit lab list"},
		{[]string{"exec", name, "client", "--", "no-such-program"}, exitError, "no-such-program"},
		{[]string{"exec", name, "client", "--"}, exitUsage, "no command"},
		{[]string{"exec", name}, exitUsage, "want natkit lab exec NAME ROLE"},
		{[]string{"up"}, exitUsage, "want natkit lab up TOPOLOGY"},
		{[]string{"up", "ring"}, exitUsage, `"ring"`},
		{[]string{"up", "routed", "--near-addr", "10.0.0.1"}, exitUsage, "10.0.0.1"},
		{[]string{"up", "routed", "--near-addr", "x"}, exitUsage, "near-addr"},
		{[]string{"up", "routed", "--clients", "0"}, exitUsage, "clients"},
		{[]string{"up", "routed", "--client", "moon"}, exitUsage, "moon"},
		{[]string{"up", "routed", "--netns", "x"}, exitUsage, "--netns"},
		{[]string{"up", "routed", "-o", "xml"}, exitUsage, "xml"},
		{[]string{"down"}, exitUsage, "--all"},
		{[]string{"down", "--all", "x"}, exitUsage, "--all"},
		{[]string{"down", "nothing"}, exitError, "natkit lab list"},
		{[]string{"serve", "http", ":80"}, exitError, "lab up"},
	} {
		if out, errs, code := try(t, natkit(append([]string{"lab"}, c.args...)...)); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("lab %q: exit code %d, want %d: %s%s, want %q", c.args, code, c.code, out, errs, c.want)
		}
	}

	if out, _, code := try(t, natkit("lab", "down", "--all", "--dry-run")); code != exitOK || !strings.Contains(out, name+"-host") {
		t.Errorf("lab down --dry-run: exit code %d:\n%s", code, out)
	}
	if out, errs, code := try(t, natkit("lab", "down", "nothing", "--dry-run")); code != exitError || out != "" {
		t.Errorf("lab down --dry-run of none: exit code %d: %s%s", code, out, errs)
	}
	if out, errs, code := try(t, natkit("lab", "down", name)); code != exitOK || out != "lab "+name+" is down\n" {
		t.Errorf("lab down: exit code %d: %s%s", code, out, errs)
	}
	if out, _, code := try(t, natkit("lab", "down", "--all", "-o", "json")); code != exitOK || strings.Join(strings.Fields(out), "") != `{"schema":"natkit/lab-down/1","down":[],"in_use":[]}` {
		t.Errorf("lab down --all -o json of none: exit code %d: %s", code, out)
	}
	if out, _, code := try(t, natkit("lab", "list")); code != exitOK || out != "no lab\n" {
		t.Errorf("lab list after down: %s", out)
	}
	if left := append(labNamespaces(t, name), labServers(t)...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A dry run makes nothing, and needs no root.
func TestLabDryRun(t *testing.T) {
	t.Setenv("NATKIT_RUN_DIR", t.TempDir())
	for _, format := range []string{"text", "json"} {
		var out, errs bytes.Buffer
		code := run(t.Context(), []string{"lab", "up", "published", "--name", "dry", "--dry-run", "-o", format}, &env{stdout: &out, stderr: &errs})
		if code != exitOK || !strings.Contains(out.String(), "network namespace dry-container") {
			t.Errorf("exit code %d: %s%s", code, &out, &errs)
		}
	}
	if left := labNamespaces(t, "dry-"); len(left) > 0 {
		t.Errorf("a dry run made %q", left)
	}
}

// SIGINT in the middle of lab up: the lab is undone, and the exit code says so.
func TestLabUpInterrupted(t *testing.T) {
	natkit := program(t)
	name := ktest.Name(t)
	cmd := natkit("lab", "up", "published", "--name", name, "--clients", "100")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 20*time.Second, "the first namespaces", func() bool { return len(labNamespaces(t, name)) > 3 })
	cmd.Process.Signal(os.Interrupt)
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitError {
		t.Errorf("exit code %d: %s", code, &errs)
	}
	if left := append(labNamespaces(t, name), labServers(t)...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if infos, err := lab.List(); err != nil || len(infos) > 0 {
		t.Errorf("lab.List: %v, %v", infos, err)
	}
}

// Killed at any moment, lab up leaves nothing that lab down --all does not remove,
// and lab down --all removes nothing else.
func TestLabKilled(t *testing.T) {
	natkit := program(t)
	ktest.Tool(t, "nginx")
	name := ktest.Name(t)
	bystander, err := netns.Create(name + "-bystander")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(bystander.Name())
	defer bystander.Close()
	// How long an undisturbed one takes; kills come up to a little later.
	start := time.Now()
	if _, errs, code := try(t, natkit("lab", "up", "published", "--name", name)); code != exitOK {
		t.Fatalf("lab up: exit code %d: %s", code, errs)
	}
	whole := time.Since(start)
	if _, errs, code := try(t, natkit("lab", "down", name)); code != exitOK {
		t.Fatalf("lab down: exit code %d: %s", code, errs)
	}
	linksBefore := links(t)
	complete := 0
	for i := range 20 {
		server := []string{"builtin", "nginx"}[i%2]
		cmd := natkit("lab", "up", "published", "--name", name, "--server", server)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		died := make(chan error, 1)
		go func() { died <- cmd.Wait() }()
		delay := time.NewTimer(rand.N(whole * 5 / 4))
		select {
		case <-delay.C:
			cmd.Process.Kill()
			<-died
		case <-died:
			complete++
		}
		if out, errs, code := try(t, natkit("lab", "down", "--all")); code != exitOK || errs != "" {
			t.Fatalf("lab down --all: exit code %d: %s%s", code, out, errs)
		}
		left := slices.DeleteFunc(labNamespaces(t, name), func(n string) bool { return n == bystander.Name() })
		if len(left) > 0 {
			t.Fatalf("left: %q", left)
		}
		// Others may be making namespaces at this moment, but not for long.
		ktest.Wait(t, 5*time.Second, "no unfinished namespace is left", func() bool { return len(labNamespaces(t, ".natkit-")) == 0 })
		if files, err := os.ReadDir(filepath.Join(os.Getenv("NATKIT_RUN_DIR"), "lab")); err != nil || len(files) > 0 {
			t.Fatalf("left in the run directory: %v, %v", files, err)
		}
		// A server that was not told to go ends by itself.
		ktest.Wait(t, 5*time.Second, "no process is left", func() bool { return len(labServers(t)) == 0 })
	}
	t.Logf("one lab up takes %v; %d of 20 were complete before the kill", whole, complete)
	if after := links(t); !slices.Equal(after, linksBefore) {
		t.Errorf("links of this namespace: %q, before: %q", after, linksBefore)
	}
	if again, err := netns.Open(bystander.Name()); err != nil {
		t.Errorf("a namespace of somebody else is gone: %v", err)
	} else {
		again.Close()
	}
}

// links names the devices of this test's own namespace.
func links(t *testing.T) (out []string) {
	t.Helper()
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestAddressFlags(t *testing.T) {
	var p prefixFlag
	var a addrFlag
	if p.String() != "" || a.String() != "" {
		t.Errorf("empty flags: %q, %q", p.String(), a.String())
	}
	if err := errors.Join(p.Set("10.0.0.1/8"), a.Set("10.0.0.1")); err != nil || p.String() != "10.0.0.1/8" || a.String() != "10.0.0.1" || netip.Addr(a) != netip.MustParseAddr("10.0.0.1") {
		t.Errorf("flags: %v, %q, %q", err, p.String(), a.String())
	}
	if p.Set("10.0.0.1") == nil || a.Set("10.0.0.1/8") == nil {
		t.Error("an address was taken for a prefix, or a prefix for an address")
	}
}
