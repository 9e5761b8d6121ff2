// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// raw is what only those understand who know Go: nothing that natkit prints has it.
var raw = regexp.MustCompile(`strconv\.|netip\.|ParseAddr|ParsePrefix|time: (invalid|missing|unknown)|context (canceled|deadline)|signal received|\$PATH|` +
	`no such file or directory|unexpected end of JSON|invalid character|^EOF|: EOF|\bnil\b|%!|0x[0-9a-f]{10}|goroutine |invalid argument ".*" for|arg\(s\)|Link not found|json:|yaml:|exit status`)

// refused checks what a command says that was given something wrong: a reason, on stderr, in
// words, and an exit code that is not 0.
func refused(t *testing.T, args []string, code int, stdout, stderr string) {
	t.Helper()
	line := "natkit " + strings.Join(args, " ")
	switch {
	case code != exitError && code != exitUsage:
		t.Errorf("%s: exit code %d\n%.300s%.300s", line, code, stdout, stderr)
	case !strings.HasPrefix(stderr, "natkit: ") || len(strings.TrimSpace(stderr)) < 20:
		t.Errorf("%s: no reason: %q", line, stderr)
	case len(stderr) > 3000:
		t.Errorf("%s: %d bytes of reason: %.300s...", line, len(stderr), stderr)
	}
	if m := raw.FindString(stdout + stderr); m != "" {
		t.Errorf("%s: says %q: %.600s", line, m, stderr)
	}
}

// runBad runs a command line that can't work, for ten seconds at most.
func runBad(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	code = run(ctx, args, &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs})
	if ctx.Err() != nil {
		t.Errorf("natkit %s: went on for ten seconds", strings.Join(args, " "))
	}
	return code, out.String(), errs.String()
}

// leaves calls fn with the words of each command that does something.
func leaves(cmd *cobra.Command, words []string, fn func(*cobra.Command, []string)) {
	for _, sub := range cmd.Commands() {
		if sub.Hidden || sub.Name() == "help" || sub.Name() == "completion" {
			continue
		}
		path := append(append([]string{}, words...), sub.Name())
		if sub.HasSubCommands() {
			leaves(sub, path, fn)
		} else {
			fn(sub, path)
		}
	}
}

// Every command refuses unknown flags, and every flag that is no free text values that it
// can't have, before it does anything.
func TestBadFlags(t *testing.T) {
	leaves(testRoot(), nil, func(cmd *cobra.Command, words []string) {
		args := append(words, "--no-such-flag")
		code, out, errs := runBad(t, "", args...)
		refused(t, args, code, out, errs)
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			bad := []string{"@", "-1x", "999999999999999999999", ""}
			switch f.Value.Type() {
			case "string", "stringSlice", "stringArray", "bool":
				return // free text; those with few values are below
			}
			for _, value := range bad {
				args := append(append([]string{}, words...), "--"+f.Name+"="+value)
				code, out, errs := runBad(t, "", args...)
				refused(t, args, code, out, errs)
				if code != exitUsage || !strings.Contains(errs, "--"+f.Name) && !strings.Contains(errs, "missing") {
					t.Errorf("natkit %s: exit code %d, %s", strings.Join(args, " "), code, errs)
				}
			}
		})
	})
}

// Of a file in a directory that does not exist, the directory is named.
func TestMissingDirectoryIsNamed(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	file := filepath.Join(missing, "deeper", "x")
	for _, args := range [][]string{{"doctor", "--for", "1s", "--save", file}, {"import", "--from", file}, {"report", file}, {"up", "-f", file}} {
		code, out, errs := runBad(t, "", args...)
		refused(t, args, code, out, errs)
		if want := missing + " does not exist, the directory of " + file; !strings.Contains(errs, want) {
			t.Errorf("natkit %s: %q, want %q", strings.Join(args, " "), errs, want)
		}
	}
}

// Every flag that takes one of a few words refuses others with all of them, and with the one
// that was probably meant.
func TestFewWords(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(rules, []byte("inside: [a]\noutside: [b]\nrules:\n  - masquerade: 10.0.0.0/8\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ args, meant string }{
		{"conntrack list --state TIMEWAIT", "TIME_WAIT"}, {"conntrack list --state ESTABLISHD", "ESTABLISHED"}, {"conntrack stats --proto tpc", "tcp"},
		{"conntrack top --by sorce", "source"}, {"conntrack watch --family ipv5", "ipv4"}, {"conntrack memory -o jsn", "json"},
		{"sessions --state tcp-established", "tcp_established"}, {"sessions --protocol tpc", "tcp"}, {"events --kind refsed", "refused"},
		{"up -f " + rules + " --engine bpf", "ebpf"}, {"up -f " + rules + " --attach xpd", "xdp"}, {"serve -f " + rules + " --engine ebfp", "ebpf"},
		{"accel on lo --attach xpd", "xdp"}, {"bench udp --router nfft", "nft"}, {"bench trimming --router stateles", "stateless"}, {"bench rules --router nftmap", "nft-map"},
		{"bench cps --protocol tpc", "tcp"}, {"bench ports --router ebfp", "ebpf"}, {"bench expiry --router ebfp", "ebpf"}, {"bench subscribers --router ebpf-block", "ebpf-blocks"}, {"bench bulk --direction bth", "both"},
		{"lab up publishd", "published"}, {"lab up published --client lcal", "local"}, {"lab up published --rules iptable", "iptables"}, {"lab up published --server ngnix", "nginx"},
		{"lab run mtu-dorp", "mtu-drop"}, {"tune plan --confirm conntrack-acounting", "conntrack-accounting"}, {"report -o htm x.json", "html"}, {"kconfig -o fragmnt", "fragment"},
		{"drops --cause conntrack-tablefull", "conntrack-table-full"}, {"doctor -o jsno", "json"}, {"profile -o foldd", "folded"}, {"doctr", "doctor"}, {"conntrack lst", "list"}, {"help doctr", "doctor"}, {"help lab rnu", "run"}, {"completion bsh", "bash"}, {"doctor --reduct", "redact"},
		{"conntrack list --source 10.0.0.1", "--src"}, {"sessions --dst 10.0.0.1", "--destination"}, {"status --json", "--output"}, {"lab run snat-port-exhausted", "snat-ports-exhausted"},
	} {
		args := strings.Fields(tt.args)
		code, out, errs := runBad(t, "", args...)
		refused(t, args, code, out, errs)
		if code != exitUsage || !strings.Contains(errs, "did you mean") || !strings.Contains(errs, tt.meant+"?") {
			t.Errorf("natkit %s: exit code %d, %q; want \"did you mean ... %s?\"", tt.args, code, errs, tt.meant)
		}
	}
}

// Files that are missing, folders, empty, binary, cut or of something else are refused by
// every command that reads one.
func TestBadFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	files := map[string]string{
		"unreadable": "/proc/self/mem", // an input/output error, for root too
		"missing":    filepath.Join(dir, "not-there"), "folder": dir, "below a file": write("plain", "words\n") + "/below",
		"empty": write("empty", ""), "binary": write("binary", strings.Repeat("\x7fELF\x00\x01\xff\xfe\n", 2000)), "words": write("words", "these are words\n"),
		"cut": write("cut", `{"schema": "natkit/snapshot/1", "host": {"hostname": "x`), "other": write("other", `{"results": [1, 2, 3]}`), "list": write("list", "[]"),
	}
	for _, command := range []string{
		"doctor --from FILE", "doctor --from FILE --redact", "tune plan --from FILE", "report FILE", "report --compare FILE FILE", "conntrack list --from FILE", "conntrack stats --from FILE",
		"conntrack top --from FILE", "profile --from FILE", "profile --diff FILE --for 10ms", "import --from FILE --inside a --outside b", "kconfig --from FILE", "up -f FILE --dry-run", "apply -f FILE --dry-run",
		"explain -f FILE 1.1.1.1->2.2.2.2-in-eth0", "fleet report FILE", "fleet report FILE FILE", "doctor --compare FILE FILE", "serve -f FILE",
	} {
		for what, file := range files {
			if what == "empty" && strings.HasPrefix(command, "conntrack") {
				continue // a table without entries
			}
			args := strings.Fields(strings.ReplaceAll(command, "FILE", file))
			code, out, errs := runBad(t, "", args...)
			refused(t, args, code, out, errs)
			if what == "missing" && strings.Contains(command, "from") && !strings.Contains(errs, "does not exist") {
				t.Errorf("natkit %s: %s", strings.Join(args, " "), errs)
			}
		}
	}
}

// Names of namespaces, interfaces and labs that are not there.
func TestBadNames(t *testing.T) {
	for _, line := range []string{
		"doctor --netns none", "doctor --netns pid:99999999", "hooks --netns pid:x", "drops --netns /etc/passwd", "conntrack list --netns /", "top --once --netns ../x", "status --netns none",
		"accel on no-such-device", "accel on 'a/b'", "accel off", "bench udp --tx no-such0 --rx no-such1", "bench http --netns none http://192.0.2.1/", "bench http --server-netns none http://192.0.2.1/",
		"bench http ftp://x/", "bench http http://", "lab down none", "lab exec none host true", "lab up routed --client-addr x", "lab up routed --near-addr 1.2.3", "tune rollback 1", "mappings --netns none",
		"serve -f /nowhere/nat.yaml", "serve -f /dev/null --metrics nonsense", "profile --root no_such_function --for 1s", "profile --cpu x", "doctor --for 1s --save /nowhere/x", "explain nonsense",
		"profile --for 1s --file /nowhere/x", "demo --report /nowhere/x.html", "import --from", "import --from x --local y",
	} {
		args := strings.Fields(line)
		code, out, errs := runBad(t, "", args...)
		refused(t, args, code, out, errs)
	}
}

// Every command refuses words that it does not take and names those that it lacks, before it
// does anything.
func TestBadArguments(t *testing.T) {
	leaves(testRoot(), nil, func(cmd *cobra.Command, words []string) {
		several := strings.Contains(cmd.Use, "...")
		switch {
		case cmd.Hidden:
			return
		case !strings.ContainsAny(cmd.Use, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"): // takes none
			for _, word := range []string{"surplus", "", "-"} {
				args := append(append([]string{}, words...), word)
				code, out, errs := runBad(t, "", args...)
				refused(t, args, code, out, errs)
				if code != exitUsage {
					t.Errorf("natkit %s: exit code %d, %s", strings.Join(args, " "), code, errs)
				}
			}
		case !several:
			args := append(append([]string{}, words...), "a", "b", "c", "d", "e")
			code, out, errs := runBad(t, "", args...)
			refused(t, args, code, out, errs)
			if code != exitUsage {
				t.Errorf("natkit %s: exit code %d, %s", strings.Join(args, " "), code, errs)
			}
		}
		if names := strings.TrimSpace(strings.TrimPrefix(strings.TrimPrefix(cmd.Use, cmd.Name()), " [flags]")); names != "" && !strings.HasPrefix(names, "[") {
			code, out, errs := runBad(t, "", words...)
			refused(t, words, code, out, errs)
			if code != exitUsage {
				t.Errorf("natkit %s without %s: exit code %d, %s", strings.Join(words, " "), names, code, errs)
			}
		}
	})
}

// What is asked in words of its own form: an endpoint, a flow, a packet, a moment, an identifier.
func TestBadQuestions(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{
		{"who", "198.51.100.1"}, {"who", "198.51.100.1:x", "--at", "1h"}, {"who", "198.51.100.1:70000", "--at", "1h"}, {"who", "198.51.100.1:5", "tpc", "--at", "1h"}, {"who", "198.51.100.1:5"},
		{"who", "198.51.100.1:5", "--at", "yesterday", "--dir", dir}, {"who", "198.51.100.1:5", "--at", "25:99", "--dir", dir}, {"who", "198.51.100.1:5", "--at", "1h", "--dir", filepath.Join(dir, "none")},
		{"who", "198.51.100.1:5", "--at", "1h", "--within", "-3"}, {"log", "--age", "5 minutes"}, {"log", "--size", "1kB"}, {"log", "--size", "lots"},
		{"trace", "tcp 1.2.3 -> 4.5.6.7"}, {"trace", "tcp 1.2.3.4:99999 -> 4.5.6.7:1"}, {"explain", "tcp"}, {"explain", "tcp 1.2.3.4:1 -> x in eth0"},
		{"tune", "rollback", "x"}, {"tune", "rollback", "-1"}, {"doctor", "--at", "noon", "--history", dir}, {"history", "--since", "x"}, {"bench", "udp", "--rate", "fast"}, {"bench", "udp", "--flows", "ten"},
		{"conntrack", "list", "--src", "1.2.3"}, {"conntrack", "list", "--src", "::1/129"}, {"drops", "--host", "nowhere"}, {"drops", "--port", "70000"}, {"sessions", "--source", "10.0.0.0/33"},
	} {
		code, out, errs := runBad(t, "", args...)
		refused(t, args, code, out, errs)
	}
}
