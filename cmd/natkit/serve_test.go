// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/testutil/ktest"
)

func TestServeUsage(t *testing.T) {
	for _, tt := range []struct {
		args, says string
		code       int
	}{
		{"serve", "give --file", exitUsage},
		{"serve -f -", "which is watched", exitUsage},
		{"serve -f x --engine magic", "want ebpf or nft", exitUsage},
		{"serve -f x --attach wall", "want auto, xdp or tc", exitUsage},
		{"serve -f x --metrics nowhere", "want ADDRESS:PORT", exitUsage},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != tt.code || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %d and %q", tt.args, code, stdout, stderr, tt.code, tt.says)
		}
	}
}

// log is what a command writes while others read it.
type log struct {
	mu   sync.Mutex
	text strings.Builder
	at   func(written string) // if not nil, is told each time
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at != nil {
		l.at(string(p))
	}
	return l.text.Write(p)
}

func (l *log) has(want string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), want)
}

// A service by its command: it says that it is up, of a file with errors, and at its end.
func TestServeCommand(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	t.Setenv("JOURNAL_STREAM", "8:1")
	name := ktest.Name(t)
	ns, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete(name)
	defer ns.Close()
	if err := ns.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "in"}, PeerName: "out"})
	}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "nat.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const rules = "inside: [in]\noutside: [out]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - masquerade: 10.0.0.0/24\n"
	write(rules + "  - nonsense: 1\n")
	serve := "serve --attach tc --down --netns " + name + " -f " + file
	if code, stdout, stderr := observed(t.Context(), serve); code != exitError || stdout != "" || !strings.Contains(stderr, "nat.yaml:6:5") {
		t.Errorf("with nothing to keep: exit %d, %q, %q", code, stdout, stderr)
	}
	write(rules)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var out log
	ended := make(chan int)
	go func() {
		ended <- run(ctx, strings.Fields(serve), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &out})
	}()
	says := func(want string) {
		t.Helper()
		ktest.Wait(t, 30*time.Second, want, func() bool { return out.has(want) })
	}
	says("up on engine ebpf: 1 rule of " + file)
	says("waiting for out: it has no IPv4 address")
	if code, stdout, _ := observed(t.Context(), "status --netns "+name); code != exitOK || !strings.Contains(stdout, "natkit serve (process ") {
		t.Errorf("status: exit %d, %s", code, stdout)
	}
	write(rules + "  - nonsense: 1\n")
	says("the rules in use stay in effect: " + file + ":6:5: ")
	write(rules + "  - masquerade: 10.0.1.0/24\n")
	says("2 rules of " + file + " in use: 1 new, 0 gone")
	write("defaults: {mss: clamp}\n" + rules)
	says("1 rule of " + file + " in use: 0 new, 1 gone\n  + defaults.mss: clamp\n")
	stop()
	if code := <-ended; code != exitOK {
		t.Errorf("exit %d", code)
	}
	says("ended, and stopped the gateway")
	if code, _, stderr := observed(t.Context(), "status --netns "+name); code != exitError || !strings.Contains(stderr, "natkit is not the gateway here") {
		t.Errorf("status at the end: exit %d, %s", code, stderr)
	}
}

// Where an engine of another natkit is up, commands that would need it end with an exit code of their own.
func TestOtherNatkit(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	name := twoLinks(t)
	file := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(file, []byte("inside: [in]\noutside: [out]\nlimits: {sessions: 1000, sources: 100}\nrules:\n  - masquerade: 10.0.0.0/24\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	about := " --netns " + name
	if code, _, stderr := observed(t.Context(), "up --attach tc -f "+file+about); code != exitOK {
		t.Fatalf("exit %d, %s", code, stderr)
	}
	defer observed(t.Context(), "down"+about)
	if code, stdout, stderr := observed(t.Context(), "version --check"); strings.Contains(stderr, name) {
		t.Errorf("exit %d, %q, %q", code, stdout, stderr)
	}
	ns, err := netns.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	dir := datapath.InstanceDir(datapath.Root(os.Getenv("NATKIT_RUN_DIR")), ns.Inode())
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, "maps", "control"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c, err := m.LookupBytes(uint32(0))
	if err != nil {
		t.Fatal(err)
	}
	c[0]++ // the version of the data structures
	if err := m.Put(uint32(0), c); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"status" + about, "apply -f " + file + about, "serve -f " + file + about, "sessions" + about, "version --check"} {
		code, stdout, stderr := observed(t.Context(), args)
		if code != exitReplace || stdout != "" || strings.Count(stderr, "\n") > 1 && args != "version --check" || !strings.Contains(stderr, "`natkit --netns "+name+" down`") {
			t.Errorf("%s: exit %d, %q, %q", args, code, stdout, stderr)
		}
	}
	_, stdout, _ := observed(t.Context(), "doctor --for 10ms"+about)
	if !strings.Contains(strings.Join(strings.Fields(stdout), " "), "goes on as it is, but has data structures of version ") {
		t.Errorf("the doctor does not name it:\n%s", stdout)
	}
}
