// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

// Where a machine lacks something, each command works or says what is missing and what to do,
// and leaves nothing half done.
func TestLacking(t *testing.T) {
	const (
		down    = "natkit is not the gateway here"
		rights  = "this process is root without CAP_NET_ADMIN, CAP_SYS_ADMIN"
		runDir  = "export NATKIT_RUN_DIR="
		noSys   = "no sysfs is mounted on /sys"
		noTypes = "mount -t sysfs sysfs /sys"
	)
	type try struct{ args, says string } // says "": it works
	life := []try{{"up -f RULES", ""}, {"status", ""}, {"apply -f RULES", ""}, {"rules", ""}, {"sessions", ""}, {"down", ""}, {"status", down},
		{"up --engine nft -f RULES", ""}, {"status", ""}, {"apply -f RULES", ""}, {"down", ""}, {"serve --down -f RULES", ""},
		{"accel on in out", ""}, {"accel status", ""}, {"accel off", ""}, {"tune plan", ""}}
	labs := []try{{"lab up routed --name x --server none", ""}, {"lab list", ""}, {"lab down x", ""}}
	for _, c := range []struct {
		lacks []ktest.Lack
		tries []try
	}{
		{[]ktest.Lack{ktest.NoBPFFS}, append(life, labs...)},
		{[]ktest.Lack{ktest.NoBPFFS, ktest.NoTracefs, ktest.NoPrograms, ktest.RootNotMount}, append(life, append(labs, try{"import --from iptables", "iptables-save"})...)},
		{[]ktest.Lack{ktest.NoSys}, append([]try{
			{"up -f RULES", noSys}, {"serve -f RULES", noSys}, {"accel on in out", noSys}, {"status", down}, {"hooks", noTypes}, {"drops --for 1s", noTypes}, {"", ""},
			{"up --engine nft -f RULES", ""}, {"apply -f RULES", ""}, {"down", ""},
		}, labs...)},
		{[]ktest.Lack{ktest.ReadOnlyRun}, []try{
			{"up -f RULES", runDir}, {"up --engine nft -f RULES", runDir}, {"serve -f RULES", runDir}, {"accel on in out", runDir}, {"lab up routed", runDir},
			{"demo --no-host-write", runDir}, {"lab run ip-forward-off", runDir}, {"bench rules", runDir}, {"status", down}, {"tune plan", ""}, {"hooks", ""},
		}},
		{[]ktest.Lack{ktest.NoRights}, []try{
			{"up -f RULES", rights}, {"up --engine nft -f RULES", rights}, {"serve -f RULES", rights}, {"accel on in out", rights}, {"lab up routed", rights},
			{"demo --no-host-write", rights}, {"lab run ip-forward-off", rights}, {"bench rules", rights}, {"status", down}, {"tune plan", ""},
			{"", ""}, {"conntrack stats", rights}, {"hooks", "CAP_BPF"}, {"drops --for 1s", "CAP_BPF"},
		}},
	} {
		var names []string
		for _, lack := range c.lacks {
			names = append(names, string(lack))
		}
		t.Run(strings.Join(names, ", "), func(t *testing.T) {
			t.Parallel() // machines of their own, whose commands mostly wait
			ktest.Lacking(t, func(t *testing.T) {
				rules := filepath.Join(t.TempDir(), "nat.yaml")
				text := "inside: [in]\noutside: [out]\nlimits: {sessions: 4096, sources: 256}\nrules:\n  - masquerade: 10.0.0.0/24\n"
				if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				for _, tt := range c.tries {
					code, stdout, stderr := atOnce(t.Context(), strings.Replace(tt.args, "RULES", rules, 1))
					switch {
					case tt.says == "" && code != exitOK:
						t.Errorf("natkit %s: exit %d: %s%s", tt.args, code, stdout, stderr)
					case tt.says != "" && (code != exitError || !strings.Contains(stderr, tt.says)):
						t.Errorf("natkit %s: exit %d: %s; want %q", tt.args, code, stderr, tt.says)
					}
				}
				for _, left := range []string{"/run/natkit/nat/*", "/run/natkit/lab/*", "/run/natkit/bpf", "/sys/fs/bpf/natkit", "/run/netns/*"} {
					if paths, err := filepath.Glob(left); err != nil || len(paths) > 0 {
						t.Errorf("left behind: %q, %v", paths, err)
					}
				}
			}, c.lacks...)
		})
	}
}

// Commands that only read say what they could not see, and what to do, wherever they are.
func TestLackingReaders(t *testing.T) {
	const (
		down    = "natkit is not the gateway here"
		off     = "acceleration is off here"
		sudo    = "this needs root: sudo natkit "
		rights  = "this process is root without CAP_NET_ADMIN, CAP_SYS_ADMIN"
		noTypes = "mount -t sysfs sysfs /sys"
		unsure  = "No change is known to be needed, but not everything could be judged"
		onHost  = "Only the host shows neighbour-table-full, "
	)
	type try struct {
		args string
		code int
		says string
	}
	works := func(args ...string) (tries []try) {
		for _, a := range args {
			tries = append(tries, try{a, exitOK, ""})
		}
		return tries
	}
	refuses := func(says string, args ...string) (tries []try) {
		for _, a := range args {
			tries = append(tries, try{a, exitError, says})
		}
		return tries
	}
	table := []string{"conntrack list", "conntrack stats", "conntrack top"}
	tracers := []string{"drops --for 1", "hooks", "profile --for 1"}
	unknown := []try{{"tune plan --for 1", exitOK, unsure}, {"tune apply --dry-run --for 1", exitUnjudged, unsure}}
	// What is lacking is for the host's tune.
	hosts := []try{{"tune plan --for 1", exitOK, "Nothing to change: "}, {"tune plan --for 1", exitOK, onHost}, {"tune apply --dry-run --for 1", exitOK, onHost}}
	always := works("conntrack memory", "top --once", "kconfig")
	fresh := slices.Concat(always, works("tune history", "tune rollback", "lab list"), refuses(down, "status", "rules", "sessions"), refuses(off, "accel status"))
	roots := refuses(sudo, "tune history", "tune rollback", "tune apply --for 1", "lab list", "status", "rules", "sessions", "accel status")
	nothing := slices.Concat(refuses(down, "down"), refuses(off, "accel off"))
	doctor := func(says string) []try {
		return []try{{"doctor --for 1", exitUnjudged, says}, {"doctor --for 1 -o json", exitUnjudged, "unjudged"}}
	}
	for _, c := range []struct {
		lacks []ktest.Lack
		tries []try
	}{
		{[]ktest.Lack{ktest.NoRoot}, slices.Concat(fresh, unknown, doctor("run as root"), refuses("needs root, or CAP_NET_ADMIN", table...), refuses("run as root", tracers...),
			refuses(sudo, "accel on in out", "up -f RULES", "down", "accel off", "tune apply --for 1"), refuses("needs root", "doctor --all-netns --for 1"), refuses("must be root", "import --from iptables"))},
		{[]ktest.Lack{ktest.NoRoot, ktest.NotFresh}, slices.Concat(always, unknown, roots)},
		{[]ktest.Lack{ktest.NoRights}, slices.Concat(fresh, unknown, nothing, doctor("root here lacks the capability"), refuses(rights, table...),
			refuses(rights, "hooks", "drops --for 1"), refuses("CAP_SYSLOG", "profile --for 1"), refuses("must be root", "import --from nft"))},
		{[]ktest.Lack{ktest.NoSys}, slices.Concat(fresh, unknown, nothing, doctor(noTypes), works(table...), refuses(noTypes, tracers...))},
		{[]ktest.Lack{ktest.NoBPFFS, ktest.NoTracefs, ktest.NoPrograms}, slices.Concat(fresh, hosts, nothing, doctor("neighbour-table-full"), works(table...), works(tracers...),
			refuses("is not installed (or give its output from elsewhere with --from FILE)", "import --from iptables", "import --from nft"))},
		{[]ktest.Lack{ktest.ReadOnlyRun}, slices.Concat(fresh, hosts, nothing, doctor("neighbour-table-full"), works(table...), works(tracers...))},
	} {
		var names []string
		for _, lack := range c.lacks {
			names = append(names, string(lack))
		}
		t.Run(strings.Join(names, ", "), func(t *testing.T) {
			t.Parallel() // machines of their own, whose commands mostly wait
			ktest.Lacking(t, func(t *testing.T) {
				rules := filepath.Join(t.TempDir(), "nat.yaml")
				if err := os.WriteFile(rules, []byte("inside: [in]\noutside: [out]\nrules:\n  - masquerade: 10.0.0.0/24\n"), 0o600); err != nil {
					t.Fatal(err)
				}
				for _, tt := range c.tries {
					code, stdout, stderr := atOnce(t.Context(), strings.Replace(tt.args, "RULES", rules, 1))
					all := stdout + stderr
					if code != tt.code || !strings.Contains(strings.Join(strings.Fields(all), " "), tt.says) { // text is wrapped
						t.Errorf("natkit %s: exit %d, want %d and %q:\n%s", tt.args, code, tt.code, tt.says, all)
					}
					if raw := rawWords.FindString(all); raw != "" {
						t.Errorf("natkit %s: %q:\n%s", tt.args, raw, all)
					}
					if n := len(advice.FindAllString(stderr, -1)); n > 1 {
						t.Errorf("natkit %s: says %d times what it needs:\n%s", tt.args, n, stderr)
					}
					if strings.Count(stderr, "\n") > 2 && !strings.HasPrefix(tt.args, "import") {
						t.Errorf("natkit %s: more than an error and what to do:\n%s", tt.args, stderr)
					}
				}
			}, c.lacks...)
		})
	}
}

// rawWords are what no user should read.
var rawWords = regexp.MustCompile(`panic|goroutine|%!|namespace ""|<nil>|0x[0-9a-f]{8}|strconv|context canceled`)

// advice is what a user without rights is told to do: once is enough.
var advice = regexp.MustCompile(`\b(?:needs? root|as root|be root)\b`)

// atOnce runs a command; natkit serve only until it has begun.
func atOnce(ctx context.Context, args string) (code int, stdout, stderr string) {
	if !strings.HasPrefix(args, "serve") {
		return observed(ctx, args)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var out, errs log
	out.at = func(text string) {
		if strings.Contains(text, "up on engine") {
			stop()
		}
	}
	code = run(ctx, strings.Fields(args), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs})
	return code, out.text.String(), errs.text.String()
}
