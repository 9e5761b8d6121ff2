// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

func TestTraceUsage(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"trace", "what to trace?"},
		{"trace nonsense", "want [PROTOCOL]"},
		{"trace --port 0", "--port 0: want 1 to 65535"},
		{"trace --port 80 --rate 0", "--rate 0: want 1 or more"},
		{"trace --container none-such", "--container none-such: no container"},
		{"trace --container none-such --host 10.0.0.1", "--host and --container"},
		{"trace --host nonsense", "--host \"nonsense\": want an address or prefix"},
		{"trace icmp --port 80", "icmp has no ports"},
		{"trace --port 80 -o xml", "want text, json, html or pcapng"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, exitUsage, tt.says)
		}
	}
}

// What no packet can match is refused, instead of waiting for it.
func TestTraceNothing(t *testing.T) {
	for _, tt := range []struct {
		flow, flag, value, says string
	}{
		{"any -> 2001:db8::1", "--host", "10.0.0.1", "one end is IPv4"},
		{"tcp *:1000 -> *:2000", "--port", "80", "neither is 80"},
		{"icmp", "--host", "2001:db8::1", "write icmpv6"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), []string{"trace", tt.flow, tt.flag, tt.value}, &env{stdin: strings.NewReader(""), stdout: &stdout, stderr: &stderr})
		if code != exitUsage || !strings.Contains(stderr.String(), tt.says) {
			t.Errorf("%q: exit %d, %q; want %d and %q", tt.flow, code, &stderr, exitUsage, tt.says)
		}
	}
}

// Of a container's addresses the one is followed that may talk to the flow's other end.
func TestContainerAddress(t *testing.T) {
	for _, tt := range []struct{ addresses, other, want, says string }{
		{"10.0.0.2 fd00::2", "", "10.0.0.2/32", ""},
		{"10.0.0.2 fd00::2", "2001:db8::/32", "fd00::2/128", ""},
		{"10.0.0.2 fd00::2", "192.0.2.1/32", "10.0.0.2/32", ""},
		{"10.0.0.2 10.0.1.2 fd00::2", "2001:db8::1/128", "fd00::2/128", ""},
		{"10.0.0.2 10.0.1.2", "", "", "choose one with --host: 10.0.0.2, 10.0.1.2"},
		{"10.0.0.2", "2001:db8::1/128", "", "it has no IPv6 address"},
		{"", "", "", "it has no address"},
	} {
		var addresses []netip.Addr
		for _, a := range strings.Fields(tt.addresses) {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		var other netip.Prefix
		if tt.other != "" {
			other = netip.MustParsePrefix(tt.other)
		}
		got, err := oneAddress("web1", addresses, other)
		if err == nil && got.String() != tt.want || (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%q beside %q: %v, %v; want %q, %q", tt.addresses, tt.other, got, err, tt.want, tt.says)
		}
	}
}

// tracing starts natkit trace as a process of its own, and returns when it traces.
func tracing(t *testing.T, args ...string) (cmd *exec.Cmd, stdout *bytes.Buffer) {
	t.Helper()
	cmd = exec.Command(ktest.Natkit(t), append([]string{"trace"}, args...)...)
	stdout = &bytes.Buffer{}
	cmd.Stdout = stdout
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	var said []byte
	for b := make([]byte, 4096); !bytes.Contains(said, []byte("Ctrl-C")); {
		n, err := errs.Read(b)
		if said = append(said, b[:n]...); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
	}
	go func() { // the pipe must not fill up
		for b := make([]byte, 4096); err == nil; {
			_, err = errs.Read(b)
		}
	}()
	return cmd, stdout
}

func traceLab(t *testing.T) *lab.Lab {
	t.Helper()
	ktest.Root(t)
	// Addresses that no other test has: a trace sees the machines of all of them.
	addresses := lab.Addresses{Client: netip.MustParsePrefix("10.83.7.2/24"), Near: netip.MustParseAddr("10.83.7.1"),
		Far: netip.MustParsePrefix("198.19.83.1/24"), Server: netip.MustParseAddr("198.19.83.2")}
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t), Owned: true, Addresses: addresses})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// A trace that is killed leaves no rule behind: its table belongs to its socket.
func TestTraceKilled(t *testing.T) {
	t.Run("tracing", func(t *testing.T) { traceKilled(t, "--now") })
	t.Run("waiting", func(t *testing.T) { traceKilled(t) })
}

func traceKilled(t *testing.T, args ...string) {
	l := traceLab(t)
	ktest.Tool(t, "nft")
	// A port that no other test uses: one that waits begins with the first connection of any.
	cmd, _ := tracing(t, append(args, "--port", "1", "--netns", l.NATNode().Netns)...)
	marks := func() bool { // traces of other tests have tables of their own here
		out, err := l.NATNode().Command(t.Context(), "nft", "list", "tables").Output()
		if err != nil {
			t.Fatal(err)
		}
		return slices.Contains(strings.Fields(string(out)), fmt.Sprintf("natkit-trace-%d", cmd.Process.Pid))
	}
	if !marks() {
		t.Error("no table marks packets")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	ktest.Wait(t, 10*time.Second, "its tables are gone", func() bool { return !marks() })
}

// Packets beyond --rate are counted and not traced; each packet is a line of JSON.
func TestTraceRate(t *testing.T) {
	l := traceLab(t)
	const rate, sent = 5, 100
	cmd, stdout := tracing(t, "udp any -> "+l.ServerNode().Addr.String()+":9", "--netns", l.Name()+"-client", "--rate", "5", "--for", "3s", "-o", "json")
	if err := l.Node("client").Do(func() error {
		c, err := net.Dial("udp4", l.ServerNode().Addr.String()+":9")
		if err != nil {
			return err
		}
		defer c.Close()
		for range sent {
			_, _ = c.Write([]byte("x")) // nobody listens
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	var s follow.Summary
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &s); err != nil {
		t.Fatal(err)
	}
	if s.Capped < sent/2 || s.Packets == 0 || s.Packets > sent {
		t.Errorf("of %d packets in three namespaces, %d in a second: %+v", sent, rate, s)
	}
	var p trace.Packet
	if err := json.Unmarshal([]byte(lines[0]), &p); err != nil || p.Protocol != "udp" || len(p.Steps) == 0 {
		t.Errorf("%v: %s", err, lines[0])
	}
}

// Each way to choose packets, and each form of what is shown: of two flows one is dropped by a rule.
func TestTraceForms(t *testing.T) {
	l := traceLab(t)
	server, gateway := l.ServerNode().Addr.String(), l.NATNode().Netns
	if out, err := l.NATNode().Command(t.Context(), ktest.Tool(t, "nft"), "table ip fw { chain forward { type filter hook forward priority 10; udp dport 9 drop; }; }").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := l.ServerNode().Do(func() error {
		c, err := net.ListenPacket("udp4", server+":10")
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go func() { // a full buffer would drop
			for err == nil {
				_, _, err = c.ReadFrom(make([]byte, 1))
			}
		}()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	send := func() {
		_ = l.Node("client").Do(func() error {
			for _, port := range []string{":10", ":9"} {
				c, err := net.Dial("udp4", server+port)
				if err != nil {
					return err
				}
				_, _ = c.Write([]byte("x")) // what becomes of it the trace shows
				c.Close()
			}
			return nil
		})
	}
	const rule = "udp dport 9 drop"
	for _, tt := range []struct {
		args []string
		want string   // in each packet's line, or in the page or capture
		not  []string // and what is in none
	}{
		{[]string{"--host", l.Options().Addresses.Client.Masked().String(), "--drops-only", "-o", "json"}, rule, []string{server + ":10"}},
		{[]string{"--host", server, "--port", "10", "-o", "json"}, server + ":10", []string{rule, server + ":9"}},
		{[]string{"udp any -> " + server + ":9", "-o", "json"}, server + ":9", []string{server + ":10"}},
		{[]string{"udp any -> " + server, "--netns", gateway, "--interface", "eth1", "-o", "json"}, `"interface":"eth1"`, []string{l.Name() + `-client"`}},
		{[]string{"--host", server, "--drops-only"}, "DROPPED", []string{server + ":10"}},
		{[]string{"--host", server, "--drops-only", "-o", "html"}, rule, []string{"<script", server + ":10"}},
		{[]string{"--host", server, "--drops-only", "-o", "pcapng"}, rule, nil},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			cmd, stdout := tracing(t, append(tt.args, "--now", "--packets", "2", "--for", "20s")...)
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			ktest.Wait(t, 30*time.Second, "packets are traced", func() bool {
				send()
				return len(ended) > 0
			})
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			got := stdout.String()
			parts := []string{got}
			if slices.Contains(tt.args, "json") {
				lines := strings.Split(strings.TrimSpace(got), "\n")
				if parts = lines[:len(lines)-1]; len(parts) != 2 { // then the totals
					t.Errorf("%d packets", len(parts))
				}
			}
			for _, part := range parts {
				if !strings.Contains(part, tt.want) || slices.ContainsFunc(tt.not, func(not string) bool { return strings.Contains(part, not) }) {
					t.Errorf("want %q and none of %q in\n%s", tt.want, tt.not, part)
				}
			}
		})
	}
}

// --container follows the address of a container by its name.
func TestTraceContainer(t *testing.T) {
	l := traceLab(t)
	name := "natkit-" + l.Name()
	groups := t.TempDir() // the machine may have control groups mounted or not
	if err := unix.Mount("none", groups, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(groups, 0); err != nil {
			t.Error(err)
		}
	})
	group := filepath.Join(groups, "lxc.payload."+name)
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	program := l.Node("client").Command(t.Context(), "sleep", "300")
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = program.Process.Kill()
		_ = program.Wait() // it was killed
		ktest.Wait(t, 10*time.Second, "the control group is empty", func() bool { return os.Remove(group) == nil })
	})
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(program.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	cmd, stdout := tracing(t, "--container", name, "--packets", "1", "-o", "json")
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	send := func() {
		_ = l.Node("client").Do(func() error {
			c, err := net.Dial("udp4", l.ServerNode().Addr.String()+":9")
			if err == nil {
				_, _ = c.Write([]byte("x")) // nobody listens
				c.Close()
			}
			return err
		})
	}
	ktest.Wait(t, 20*time.Second, "a packet is traced", func() bool {
		send()
		return len(ended) > 0
	})
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	var p trace.Packet
	// The first one traced may be an answer: to one sent before the trace began.
	if err := json.NewDecoder(stdout).Decode(&p); err != nil || !strings.Contains(" "+p.Tuple, " "+l.Options().Addresses.Client.Addr().String()+":") {
		t.Errorf("%v: %+v", err, p)
	}
	if _, out, _ := observed(t.Context(), "__complete trace --container natkit-"); !strings.Contains(out, name) {
		t.Errorf("completion offers %q", out)
	}
}
