// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

const conntrackDump = `tcp      6 7 TIME_WAIT src=192.168.0.2 dst=192.168.0.96 sport=51744 dport=8080 src=172.17.0.2 dst=192.168.0.2 sport=8080 dport=51744 [ASSURED] mark=0 use=1
ipv4     2 tcp      6 27 ESTABLISHED src=192.168.1.18 dst=1.1.1.1 sport=60162 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=60162 [ASSURED] mark=0 secctx=system_u:object_r:unlabeled_t:s0 use=1
this is no entry
udp      17 29 src=192.168.0.2 dst=1.1.1.1 sport=4000 dport=53 [UNREPLIED] src=1.1.1.1 dst=192.168.0.2 sport=53 dport=4000 mark=0 use=1
conntrack v1.4.4 (conntrack-tools): 5 flow entries have been shown.
udp      17 29 src=192.168.0.2 dst=1.1.1.1 sport=4000 dpo`

// runConntrack runs a command line with a dump on stdin.
func runConntrack(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs}
	code = run(t.Context(), append([]string{"conntrack"}, args...), e)
	return code, out.String(), errs.String()
}

func TestConntrackFromDump(t *testing.T) {
	for _, tt := range []struct {
		args string
		want string // of stdout
	}{
		{"stats", `3 entries

protocol          entries
tcp                     2  66.7 %
udp                     1  33.3 %

TCP state         entries
ESTABLISHED             1  33.3 %
TIME_WAIT               1  33.3 %

status            entries
ASSURED                 2  66.7 %
DNAT                    1  33.3 %
SNAT                    1  33.3 %
UNREPLIED               1  33.3 %
`},
		{"stats --proto udp -o json", `{
  "schema": "natkit/conntrack-stats/1",
  "entries": 1,
  "dump_s": 0,
  "interrupted": false,
  "unreadable": 2,
  "truncated": true,
  "by_protocol": {
    "udp": 1
  },
  "by_state": {},
  "by_status": {
    "UNREPLIED": 1
  }
}
`},
		{"top --rows 1", `ENTRIES  SHARE   UNREPLIED  SOURCE
2        66.7 %  1          192.168.0.2
`},
		{"top --by nat", `ENTRIES  SHARE   PROTOCOL  OUTSIDE     TO           PORTS SEEN
1        33.3 %  tcp       100.64.0.1  1.1.1.1:443  60162-60162
`},
		{"top --by dport --unreplied -o json", `{
  "schema": "natkit/conntrack-top/1",
  "by": "dport",
  "entries": 1,
  "interrupted": false,
  "unreadable": 2,
  "rows": [
    {
      "protocol": "udp",
      "port": 53,
      "entries": 1,
      "unreplied": 1
    }
  ]
}
`},
		{"list --state TIME_WAIT,ESTABLISHED", `ipv4     2 tcp      6 7 TIME_WAIT src=192.168.0.2 dst=192.168.0.96 sport=51744 dport=8080 src=172.17.0.2 dst=192.168.0.2 sport=8080 dport=51744 [ASSURED] mark=0 use=1
ipv4     2 tcp      6 27 ESTABLISHED src=192.168.1.18 dst=1.1.1.1 sport=60162 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=60162 [ASSURED] mark=0 secctx=system_u:object_r:unlabeled_t:s0 use=1
`},
		{"list --src 192.168.1.0/24 -o json", `{"schema":"natkit/conntrack-entry/1","family":"ipv4","protocol":"tcp","protocol_number":6,"timeout_s":27,"state":"ESTABLISHED","status":["ASSURED","SNAT"],"original":{"source":{"address":"192.168.1.18","port":60162},"destination":{"address":"1.1.1.1","port":443}},"reply":{"source":{"address":"1.1.1.1","port":443},"destination":{"address":"100.64.0.1","port":60162}},"mark":0,"use":1,"secctx":"system_u:object_r:unlabeled_t:s0"}
`},
		{"list --family ipv6", ""},
	} {
		t.Run(tt.args, func(t *testing.T) {
			code, stdout, stderr := runConntrack(t, conntrackDump, append(strings.Fields(tt.args), "--from", "-")...)
			if code != exitOK || stdout != tt.want {
				t.Errorf("exit %d, stdout\n%s\nwant\n%s\nstderr %s", code, stdout, tt.want, stderr)
			}
			for _, w := range []string{
				"stdin: line 3: ", "stdin: line 6: ", `"this is no entry"`, "2 of 5 lines can't be read",
				"the last line has no newline",
			} {
				if !strings.Contains(stderr, w) {
					t.Errorf("no %q on stderr:\n%s", w, stderr)
				}
			}
			if strings.Contains(stderr, "says that it shows") {
				t.Errorf("5 lines were announced and 5 are there:\n%s", stderr)
			}
		})
	}
}

func TestConntrackFromFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dump")
	rubbish := strings.Repeat("rubbish\n", 30)
	if err := os.WriteFile(path, []byte(rubbish), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := runConntrack(t, "", "stats", "--from", path)
	if code != exitError || stdout != "" || !strings.Contains(stderr, "none of its 30 lines") || strings.Count(stderr, "\n") > 12 {
		t.Errorf("exit %d, stdout %q, stderr %s", code, stdout, stderr)
	}
	code, _, stderr = runConntrack(t, "", "stats", "--from", path+"-not-there")
	if code != exitError || !strings.Contains(stderr, "does not exist") {
		t.Errorf("exit %d, stderr %s", code, stderr)
	}
	code, stdout, stderr = runConntrack(t, "", "stats", "--from", os.DevNull)
	if code != exitOK || stdout != "0 entries\n" || stderr != "" {
		t.Errorf("empty dump: exit %d, stdout %q, stderr %s", code, stdout, stderr)
	}
	short := strings.SplitAfterN(conntrackDump, "\n", 2)[0] + "conntrack v1.4.4 (conntrack-tools): 2 flow entries have been shown.\n"
	if code, _, stderr = runConntrack(t, short, "list", "--from", "-"); code != exitOK || !strings.Contains(stderr, "says that it shows 2 entries, but has 1") {
		t.Errorf("exit %d, stderr %s", code, stderr)
	}
}

func TestConntrackUsage(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"stats --proto nothing", `--proto "nothing": want tcp`},
		{"stats --family ip", `--family "ip": want ipv4 or ipv6`},
		{"list --src 1.2.3", `--src "1.2.3": want an address`},
		{"list --state NO", `--state "NO": want NONE`},
		{"list --state TIMEWAIT", "did you mean TIME_WAIT?"},
		{"top --by size", `--by "size": want source, destination, dport or nat`},
		{"top --by sources", "did you mean source?"},
		{"top --rows 0", "--rows 0"},
		{"watch --interval 1ms", "--interval 1ms"},
		{"watch --for -1s", "--for \"-1s\""},
		{"memory -o xml", "--output"},
		{"list more", "takes none"},
	} {
		code, stdout, stderr := runConntrack(t, "", strings.Fields(tt.args)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s: exit %d, stdout %q, stderr %s", tt.args, code, stdout, stderr)
		}
	}
}

// closedPipe is a reader that went away, as `head` does.
type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.EPIPE}
}

func TestConntrackListIntoClosedPipe(t *testing.T) {
	var errs bytes.Buffer
	line, _, _ := strings.Cut(conntrackDump, "\n")
	e := &env{stdin: strings.NewReader(strings.Repeat(line+"\n", 5000)), stdout: closedPipe{}, stderr: &errs}
	if code := run(t.Context(), []string{"conntrack", "list", "--from", "-"}, e); code != exitOK || errs.Len() > 0 {
		t.Errorf("exit %d, stderr %s", code, errs.String())
	}
}

func TestConntrackLive(t *testing.T) {
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Do(func() error { return conntrack.Flush(context.Background()) }); err != nil {
			t.Error(err)
		}
		h.Close()
		netns.Delete(name)
	})
	if err := h.Do(func() error {
		_, err := conntrack.Fill(t.Context(), conntrack.FillOptions{Count: 7, State: conntrack.TCPSynRecv, Timeout: time.Hour})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	asJSON := func(args ...string) map[string]any {
		code, stdout, stderr := runConntrack(t, "", append(args, "--netns", name, "-o", "json")...)
		if code != exitOK || stderr != "" {
			t.Fatalf("%v: exit %d, stderr %s", args, code, stderr)
		}
		var v map[string]any
		if err := json.Unmarshal([]byte(stdout), &v); err != nil {
			t.Fatalf("%v: %v: %s", args, err, stdout)
		}
		return v
	}
	stats := asJSON("stats")
	if stats["entries"] != 7.0 || fmt.Sprint(stats["by_state"]) != "map[SYN_RECV:7]" || stats["entries_max"].(float64) <= 0 {
		t.Errorf("stats %v", stats)
	}
	memory := asJSON("memory")
	object, buckets := memory["entry_bytes"].(float64), memory["buckets"].(float64)*memory["bucket_bytes"].(float64)
	if memory["entries"] != 7.0 || memory["now_bytes"] != 7*object+buckets || memory["full_bytes"] != memory["entries_max"].(float64)*object+buckets {
		t.Errorf("memory %v", memory)
	}
	watch := asJSON("watch", "--interval", "100ms", "--for", "100ms")
	if watch["entries"] != 7.0 || watch["new_per_second"] != 0.0 || watch["lost_events"] != 0.0 {
		t.Errorf("watch %v", watch)
	}
	code, stdout, stderr := runConntrack(t, "", "list", "--netns", name, "--src", "198.18.0.3")
	if code != exitOK || stderr != "" || strings.Count(stdout, "\n") != 1 || !strings.Contains(stdout, "src=198.18.0.3 ") {
		t.Errorf("list: exit %d, stdout %s, stderr %s", code, stdout, stderr)
	}
	code, stdout, _ = runConntrack(t, "", "memory", "--netns", name)
	if code != exitOK || !strings.Contains(stdout, "entries    7 of at most") {
		t.Errorf("memory: exit %d, %s", code, stdout)
	}
	code, stdout, _ = runConntrack(t, "", "watch", "--netns", name, "--interval", "100ms", "--for", "100ms")
	if code != exitOK || !strings.HasPrefix(stdout, "    TIME ") || strings.Count(stdout, "\n") != 2 {
		t.Errorf("watch: exit %d, %s", code, stdout)
	}
	// Events can be switched off in a namespace; then watching would show nothing.
	if err := h.Do(func() error { return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_events", []byte("0"), 0) }); err != nil {
		t.Fatal(err)
	}
	code, _, stderr = runConntrack(t, "", "watch", "--netns", name, "--for", "100ms")
	if code != exitError || !strings.Contains(stderr, "nf_conntrack_events is 0") {
		t.Errorf("watch without events: exit %d, stderr %s", code, stderr)
	}
}

// Bars are drawn on a terminal that has room for them, and nowhere else.
func TestBarsFor(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("LC_ALL", "C.UTF-8")
	file, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		ktest.Missing(t, "needs a pseudo terminal: %v", err)
	}
	defer file.Close()
	for columns, want := range map[uint16]report.Bars{0: report.BlockBars, 40: report.NoBars, 80: report.BlockBars, 200: report.BlockBars} {
		if err := unix.IoctlSetWinsize(int(file.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
			t.Fatal(err)
		}
		if got := barsFor(file); got != want {
			t.Errorf("%d columns: %v, want %v", columns, got, want)
		}
	}
	if got := barsFor(&strings.Builder{}); got != report.NoBars {
		t.Errorf("no terminal: %v", got)
	}
}
