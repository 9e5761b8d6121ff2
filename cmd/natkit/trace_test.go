// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

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
		{"trace --port 80 --wait --interface lo", "--wait and --interface"},
		{"trace --host nonsense", "--host \"nonsense\": want an address or prefix"},
		{"trace --port 80 -o xml", "want text, json, html or pcapng"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, exitUsage, tt.says)
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
	l, err := lab.Up(t.Context(), "routed", lab.Options{Name: ktest.Name(t), Owned: true})
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
	t.Run("tracing", func(t *testing.T) { traceKilled(t) })
	t.Run("waiting", func(t *testing.T) { traceKilled(t, "--wait") })
}

func traceKilled(t *testing.T, args ...string) {
	l := traceLab(t)
	ktest.Tool(t, "nft")
	tables := func() string {
		out, err := l.NATNode().Command(t.Context(), "nft", "list", "tables").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	before := tables()
	cmd, _ := tracing(t, append(args, "--port", "80")...)
	if !strings.Contains(tables(), "natkit-trace-") {
		t.Errorf("no table marks packets: %s", tables())
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for end := time.Now().Add(10 * time.Second); tables() != before; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("left behind: %s, before: %s", tables(), before)
		}
	}
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
