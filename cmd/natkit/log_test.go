// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/natlog/store"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

func TestLogUsage(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"log --size many", "such as 10GB"},
		{"log --age 5m", "at least 1h"},
		{"who 198.51.100.1 --at 1h", "an address and a port"},
		{"who 198.51.100.1:5000", "give --at"},
		{"who 198.51.100.1:5000 tpc --at 1h", "such as tcp, udp or icmp"},
		{"who 198.51.100.1:5000 --at 2099-01-01", "in the future"},
		{"who 198.51.100.1:5000 --at soon", "03:12"},
		{"who 198.51.100.1:5000 --at 1h --within -1s", "above 0"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %q", tt.args, code, stdout, stderr, tt.says)
		}
	}
	code, _, stderr := observed(t.Context(), "who 198.51.100.1:5000 --at 1h --dir "+t.TempDir())
	if code != exitError || !strings.Contains(stderr, "natkit log writes it") {
		t.Errorf("without a log: exit %d, %q", code, stderr)
	}
}

// What conntrack(8) makes and deletes in a namespace is what natkit who finds, during the log,
// after it, and over a second one; each look-up is in the audit file.
func TestLogAndWho(t *testing.T) {
	ktest.Root(t)
	conntrack := ktest.Tool(t, "conntrack")
	name, dir := twoLinks(t), t.TempDir()
	ns, err := netns.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	table := func(args string) {
		t.Helper()
		if err := ns.Do(func() error {
			out, err := exec.Command(conntrack, strings.Fields(args)...).CombinedOutput()
			if err != nil {
				t.Errorf("conntrack %s: %v %s", args, err, out)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	const entry = " -t 500 -p tcp -d 192.0.2.9 --dport 80 --state ESTABLISHED --sport 1000 "
	table("-I -s 10.0.0.8 --src-nat 198.51.100.1:4999" + entry)
	begin := func() (end func()) {
		t.Helper()
		ctx, stop := context.WithCancel(t.Context())
		var out, errs log
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, strings.Fields("log --node gw1 --dir "+dir+" --netns "+name), &env{stdout: &out, stderr: &errs})
		}()
		ktest.Wait(t, time.Minute, "natkit log to record", func() bool { return out.has("recording in " + dir) })
		return func() {
			t.Helper()
			stop()
			if code := <-ended; code != exitOK {
				t.Errorf("natkit log: exit %d: %s", code, errs.text.String())
			}
		}
	}
	asked := 0
	who := func(what string, at time.Time) (code int, w report.Who) {
		t.Helper()
		code, stdout, stderr := observed(t.Context(), "who "+what+" --at "+at.UTC().Format(time.RFC3339Nano)+" -o json --dir "+dir)
		if err := json.Unmarshal([]byte(stdout), &w); err != nil {
			t.Fatalf("who %s: exit %d: %s %s", what, code, stdout, stderr)
		}
		asked++
		return code, w
	}
	found := func(what string, at time.Time, internal string, ended bool) bool {
		t.Helper()
		code, w := who(what, at)
		return code == exitOK && len(w.Found) == 1 && w.Found[0].Internal.String() == internal && w.Found[0].Until.IsZero() != ended
	}
	end := begin()
	table("-I -s 10.0.0.9 --src-nat 198.51.100.1:5000" + entry)
	ktest.Wait(t, time.Minute, "the new entry in the log", func() bool { return found("198.51.100.1:5000 tcp", time.Now(), "10.0.0.9:1000", false) })
	during := time.Now()
	if !found("198.51.100.1:4999 tcp", during, "10.0.0.8:1000", false) {
		t.Error("what was alive at the start is not found")
	}
	ktest.Wait(t, time.Minute, "the log to reach so far", func() bool {
		code, _ := who("198.51.100.1:5001", during)
		return code == exitFindings // nobody had it
	})
	table("-D -s 10.0.0.9")
	ktest.Wait(t, time.Minute, "the end in the log", func() bool { return found("198.51.100.1:5000 tcp", during, "10.0.0.9:1000", true) })
	end()
	between := time.Now()
	end = begin()
	end()
	if code, w := who("198.51.100.1:5000", between); code != exitUnjudged || w.Verdict != report.WhoGap || !strings.Contains(w.Gaps[0].Why, "not running") {
		t.Errorf("while natkit log was not running: exit %d, %+v", code, w)
	}
	if !found("198.51.100.1:5000 tcp", during, "10.0.0.9:1000", true) {
		t.Error("it is gone after a restart")
	}
	audit, err := os.ReadFile(filepath.Join(dir, store.AuditFile))
	if lines := strings.Count(string(audit), "\n"); err != nil || lines != asked {
		t.Errorf("%d look-ups in the audit file, want %d: %v", lines, asked, err)
	}
	if strings.Contains(string(audit), "login_uid") != (loginUID() != nil) {
		t.Errorf("logged in as %v: %s", loginUID(), audit)
	}
	// A process can say once as whom its user logged in; a shell does so for the next look-up.
	out, err := exec.Command("sh", "-c", `echo 65533 >/proc/self/loginuid || exit 99; exec "$0" who 198.51.100.1:5000 --at 1s --dir "$1"`, ktest.Natkit(t), dir).CombinedOutput()
	if code := new(exec.ExitError); errors.As(err, &code) && code.ExitCode() == 99 {
		t.Log("this kernel does not keep as whom a user logged in, or it is set already: ", string(out))
		return
	}
	if audit, err = os.ReadFile(filepath.Join(dir, store.AuditFile)); err != nil || !strings.Contains(string(audit[bytes.LastIndexByte(bytes.TrimSpace(audit), '\n')+1:]), `"login_uid":65533`) {
		t.Errorf("%v\n%s\n%s", err, audit, out)
	}
}
