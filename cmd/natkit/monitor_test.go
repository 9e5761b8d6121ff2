// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
	"natkit/internal/ui/report"
)

func TestMonitorUsage(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"monitor --interval 10ms", "want 1s to 5m0s"},
		{"monitor --netns blue", "watches all network namespaces"},
		{"monitor --history-size many", "such as 256MB"},
		{"monitor --history-size 1KB", "at least 1MB"},
		{"monitor --history-age 5m", "such as 7d"},
		{"monitor --node-name=", "as kubectl get nodes shows it"},
		{"monitor --node-name a/b", "as kubectl get nodes shows it"},
		{"monitor --kubernetes-api https://x", "--kubernetes-api needs --node-name"},
		{"monitor --node-name a --kubernetes-api http://x", "want https://HOST:PORT"},
		{"monitor --metrics foo", "want ADDRESS:PORT"},
		{"monitor --metrics 127.0.0.1:", "want ADDRESS:PORT"},
		{"monitor --metrics 127.0.0.1:99999", "want ADDRESS:PORT"},
		{"monitor --metrics ::1:9641", "want ADDRESS:PORT"},
		{"serve -f nat.yaml --metrics foo", "want ADDRESS:PORT"},
		{"monitor --tune on", "want off, advise or apply"},
		{"monitor --arp-probes never", "want off, symptom or always"},
		{"monitor --tune apply --interval 30s", "at most 20s"},
		{"tune --auto", "natkit monitor --tune advise"},
		{"history --since soon", "03:12"},
		{"history --since 1h --until 2h", "is before --since"},
		{"doctor --at soon", "03:12"},
		{"doctor --at 03:12 --since 1h", "exclude each other"},
		{"doctor --at 03:12 --for 5s", "what was recorded is what it is"},
		{"doctor --since 1h --save x", "use --at"},
		{"doctor --diff a", "--diff A B"},
		{"doctor --diff a b --at 03:12", "does not go with --diff"},
		{"doctor --diff a b -o html", "text or json"},
		{"doctor --diff no-such-file b", "neither a file"},
	} {
		code, stdout, stderr := observed(t.Context(), tt.args)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: exit %d, %q, %q; want %q", tt.args, code, stdout, stderr, tt.says)
		}
	}
	// What can't be done leaves nothing behind.
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	for _, args := range []string{"monitor --metrics foo", "monitor --metrics " + busy.Addr().String(), "monitor --node-name a --kubernetes-api https://x --kubernetes-credentials /nowhere"} {
		dir := filepath.Join(t.TempDir(), "history")
		code, _, stderr := observed(t.Context(), args+" --history "+dir)
		if _, err := os.Stat(dir); code == exitOK || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: exit %d, %q; the folder of the history: %v", args, code, stderr, err)
		}
	}
	for _, args := range []string{"history", "doctor --at 1h", "doctor --since 1h"} {
		code, _, stderr := observed(t.Context(), args+" --history "+t.TempDir())
		if code != exitError || !strings.Contains(stderr, "natkit monitor records it") {
			t.Errorf("%s: exit %d, %q", args, code, stderr)
		}
	}
}

func TestParseMoment(t *testing.T) {
	zone := time.FixedZone("east", 2*3600)
	now := time.Date(2026, 3, 1, 2, 30, 0, 0, zone)
	for text, want := range map[string]string{
		"02:12":                "2026-03-01T02:12:00+02:00",
		"02:12:05":             "2026-03-01T02:12:05+02:00",
		"22:00":                "2026-02-28T22:00:00+02:00", // the last time that it was so
		"2026-02-27 03:12":     "2026-02-27T03:12:00+02:00",
		"2026-02-27":           "2026-02-27T00:00:00+02:00",
		"2026-02-27T03:12:00Z": "2026-02-27T03:12:00Z",
		"90m":                  "2026-03-01T01:00:00+02:00",
		"2d":                   "2026-02-27T02:30:00+02:00",
		"25:00":                "", "-1h": "", "": "", "yesterday": "", "99999d": "",
	} {
		got, err := parseMoment(text, now)
		if err == nil && got.Format(time.RFC3339) != want || err != nil && want != "" {
			t.Errorf("%q: %v, %v; want %q", text, got, err, want)
		}
	}
}

// recordedFacts are facts of a namespace at a time.
func recordedFacts(t *testing.T, at time.Time, ns snapshot.Netns) history.Look {
	t.Helper()
	f, err := os.Open("../../internal/ui/report/testdata/corpus/ufw.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := snapshot.Load(f)
	if err != nil {
		t.Fatal(err)
	}
	s.TakenAt, s.Netns = at, ns
	return history.NewLook(s)
}

// Two namespaces of which one had the number of the other after its end are two, and what of a history is damaged is said.
func TestRecordedNumberIsGivenAgain(t *testing.T) {
	dir := t.TempDir()
	w, err := history.Create(dir, history.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	for i, name := range []string{"blue", "blue", "green", "green"} {
		at := now.Add(time.Duration(i-4) * time.Minute)
		if err := w.Add(&history.Entry{At: at, Seconds: 10, Looks: []history.Look{recordedFacts(t, at, snapshot.Netns{Name: name, Inode: 4026532999})}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "0000000009.segment"), []byte("something else, and longer than a header"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"doctor --at 2m", "doctor --since 1h"} {
		_, stdout, stderr := observed(t.Context(), args+" --history "+dir)
		for _, name := range []string{"blue", "green"} {
			if !strings.Contains(stdout, name) {
				t.Errorf("%s does not show %s:\n%s%s", args, name, stdout, stderr)
			}
		}
		if !strings.Contains(stderr, "0000000009.segment: this is not a segment of natkit's history") {
			t.Errorf("%s: %q", args, stderr)
		}
	}
}

// What lies in the machine is a finding of one namespace, also over many windows. The time between the last of long intervals
// and now is recorded.
func TestRecordedOfTheMachine(t *testing.T) {
	dir := t.TempDir()
	w, err := history.Create(dir, history.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().UTC().Truncate(time.Millisecond).Add(-4 * time.Minute)
	e := &history.Entry{At: at, Seconds: 300}
	for i := range 3 {
		s, err := recordedFacts(t, at, snapshot.Netns{Name: fmt.Sprint("n", i), Inode: uint64(i + 7)}).Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		s.Conntrack.Buckets = 16 // of all namespaces
		e.Looks = append(e.Looks, history.NewLook(s))
	}
	if err := errors.Join(w.Add(e), w.Close()); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"doctor --at 1m", "doctor --since 1h"} {
		_, stdout, stderr := observed(t.Context(), args+" -o json --history "+dir)
		if n := strings.Count(stdout, `"code": "conntrack-hash-too-small"`); n != 1 {
			t.Errorf("%s: %d times\n%s\n%s", args, n, stdout[:min(len(stdout), 2000)], stderr)
		}
	}
}

// freeAddress is an address of this machine that nobody listens at.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// monitored runs natkit monitor until the returned function is called, which returns its exit code.
func monitored(t *testing.T, dir string, out io.Writer) (metrics string, stop func() int) {
	t.Helper()
	metrics = freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, []string{"monitor", "--interval", "1s", "--history", dir, "--metrics", metrics}, &env{stdout: out, stderr: out})
	}()
	ktest.Wait(t, time.Minute, "the first interval", func() bool {
		answer, err := http.Get("http://" + metrics + "/healthz")
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	return metrics, func() int {
		cancel()
		return <-done
	}
}

// allCodes are the codes of findings and of those folded under them.
func allCodes(findings []causes.Finding) (out []string) {
	for _, f := range findings {
		out = append(append(out, f.Code), allCodes(f.Consequences)...)
	}
	return out
}

// A night: faults at random times on a router with traffic. The history shows each of them, and no
// warning that the doctor, who was there, did not see. Faults that other tests make beside it are of no concern.
func TestNight(t *testing.T) {
	if !alone(t) {
		return
	}
	ktest.Tool(t, "ip")
	dir := t.TempDir()
	var said log
	_, stop := monitored(t, dir, &said)
	r := rand.New(rand.NewPCG(7, 8))
	type fault struct {
		code        string
		began, over time.Time
		seen        []string
	}
	var night []fault
	codes := []string{"ip-forward-off", "rp-filter-drop", "rule-drop"}
	r.Shuffle(len(codes), func(i, j int) { codes[i], codes[j] = codes[j], codes[i] })
	if testing.Short() {
		codes = codes[:1]
	}
	for _, code := range codes {
		// A fault begins at any moment of the monitor's interval, not always at the same one.
		time.Sleep(time.Duration(r.Int64N(int64(2 * time.Second))))
		f := fault{code: code, began: time.Now()}
		exit, stdout, stderr := observed(t.Context(), "lab run "+code+" --for 9s -o json")
		if exit != exitOK {
			t.Fatalf("%s: exit %d, %s", code, exit, stderr)
		}
		f.over = time.Now()
		var res report.FaultResult
		if err := json.Unmarshal([]byte(stdout), &res); err != nil {
			t.Fatal(err)
		}
		for _, step := range res.Steps {
			f.seen = append(f.seen, allCodes(step.Doctor.Findings)...)
		}
		night = append(night, f)
	}
	if exit := stop(); exit != exitOK {
		t.Errorf("natkit monitor: exit %d", exit)
	}
	listed := 0
	if _, err := history.Read(dir, history.Span{}, func(e *history.Entry) error {
		if e.On != nil {
			listed++
		}
		return nil
	}); err != nil || listed != 1 {
		t.Errorf("%d lists of what is on, %v", listed, err)
	}

	exit, stdout, stderr := observed(t.Context(), "history --since 1h -o json --history "+dir)
	var res report.HistoryResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || exit != exitOK {
		t.Fatalf("exit %d, %v, %s", exit, err, stderr)
	}
	for _, f := range night {
		i := slices.IndexFunc(res.Findings, func(e history.Episode) bool {
			return e.Code == f.code && e.Began.After(f.began) && e.Began.Before(f.over) && strings.HasPrefix(e.Namespace, "routed-")
		})
		if i < 0 {
			t.Errorf("the history does not show %s between %s and %s", f.code, f.began.Format(time.TimeOnly), f.over.Format(time.TimeOnly))
			continue
		}
		if f.code == "rule-drop" && !slices.ContainsFunc(res.Findings[i].Changes, func(c history.Change) bool {
			return strings.HasPrefix(c.What, "rule added: iptables-legacy ip filter FORWARD `-A FORWARD -s ")
		}) {
			t.Errorf("what changed before is not the rule: %+v", res.Findings[i])
		}
		// The facts of that moment, judged today.
		at := res.Findings[i].Began.Format(time.RFC3339)
		exit, out, errs := observed(t.Context(), strings.Join([]string{"doctor --netns", res.Findings[i].Namespace, "-o json --history", dir, "--at", at}, " "))
		var doctor report.DoctorResult
		if err := json.Unmarshal([]byte(out), &doctor); err != nil || exit != exitFindings || !slices.Contains(allCodes(doctor.Findings), f.code) {
			t.Errorf("doctor --at %s: exit %d, %v, %s, %v", at, exit, err, errs, allCodes(doctor.Findings))
		}
	}
	for _, e := range res.Findings {
		if e.Severity == causes.Advice.String() || !strings.HasPrefix(e.Namespace, "routed-") {
			continue
		}
		if !slices.ContainsFunc(night, func(f fault) bool {
			return slices.Contains(f.seen, e.Code) && e.Began.After(f.began) && e.Began.Before(f.over)
		}) {
			t.Errorf("the history shows what nobody saw: %+v", e)
		}
	}
	if t.Failed() {
		said.mu.Lock()
		t.Log(said.text.String())
		said.mu.Unlock()
	}
}
