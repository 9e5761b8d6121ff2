// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func runBench(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(ctx, append([]string{"bench", "http"}, args...), &env{stdout: &out, stderr: &errs})
	return code, out.String(), errs.String()
}

func TestBenchHTTP(t *testing.T) {
	var agents atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.UserAgent() == "tester" {
			agents.Add(1)
		}
		io.WriteString(w, "hello")
	}))
	defer s.Close()

	code, stdout, stderr := runBench(t.Context(), "-c5", "-n", "50", "-r", "-s", "2", "-H", "User-Agent: tester", s.URL)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "\nComplete requests:      50\n") || agents.Load() != 50 {
		t.Errorf("exit %d, %d requests with the header\n%s%s", code, agents.Load(), stdout, stderr)
	}

	code, stdout, stderr = runBench(t.Context(), "-k", "-t", "1", "-n", "20", "--rate", "2000", "-c", "4", "-o", "json", s.URL)
	var r struct {
		Completed int64                        `json:"completed"`
		KeepAlive int64                        `json:"keep_alive_requests"`
		Total     map[string]float64           `json:"total_ms"`
		Rate      *struct{ Requested float64 } `json:"rate"`
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK {
		t.Fatalf("exit %d, %v\n%s%s", code, err, stdout, stderr)
	}
	if r.Completed != 20 || r.KeepAlive != 20 || r.Total["mean"] <= 0 || r.Rate == nil || r.Rate.Requested != 2000 {
		t.Errorf("%+v", r)
	}
}

// A run that ends before its time shows what it has and exits with 1.
func TestBenchHTTPStopped(t *testing.T) {
	s := httptest.NewServer(nil)
	url := s.URL
	s.Close()
	code, stdout, stderr := runBench(t.Context(), url)
	if code != exitError || !strings.Contains(stdout, "Connect: 1,") || !strings.Contains(stderr, "connection refused") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	asked := make(chan struct{}, 1)
	release := make(chan struct{})
	s = httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked <- struct{}{}
		<-release
	}))
	defer s.Close()
	defer close(release)
	go func() { <-asked; cancel(errors.New("interrupt signal received")) }()
	code, stdout, stderr = runBench(ctx, s.URL)
	if code != exitError || !strings.Contains(stdout, "\nUnfinished requests:    1\n") || !strings.Contains(stderr, "interrupt") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}

func TestBenchHTTPUsage(t *testing.T) {
	for _, args := range []string{
		"", "a b", "https://127.0.0.1/", "-c 0 127.0.0.1", "-c 2 127.0.0.1", "-n 0 127.0.0.1", "-s 0 127.0.0.1", "-t x 127.0.0.1", "-H x 127.0.0.1",
		"-c 1000000000000 -n 1000000000000 127.0.0.1", "--rate -1 127.0.0.1", "-o xml 127.0.0.1",
	} {
		if code, stdout, stderr := runBench(t.Context(), strings.Fields(args)...); code != exitUsage || stdout != "" || stderr == "" {
			t.Errorf("%q: exit %d\n%s%s", args, code, stdout, stderr)
		}
	}
}

func TestSecondsFlag(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"2": 2 * time.Second, "0.25": 250 * time.Millisecond, "500ms": 500 * time.Millisecond, "1m": time.Minute,
		"": 0, "0": 0, "-1": 0, "-1s": 0, "NaN": 0, "Inf": 0, "x": 0,
	} {
		var s secondsFlag
		if err := s.Set(text); time.Duration(s) != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %v, %v", text, time.Duration(s), err)
		}
	}
}

// Package bench knows options by the fields that hold them. Every field that an error of
// it names has a flag, and no text of it names a flag.
func TestBenchFlags(t *testing.T) {
	flags := map[string]bool{}
	for _, cmd := range newBenchCommand(&env{}).Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { flags[f.Name] = true })
	}
	for field, flag := range benchFlags {
		if !flags[flag] {
			t.Errorf("%s: no --%s", field, flag)
		}
	}
	files, err := filepath.Glob("../../internal/bench/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(err, len(files))
	}
	named, called := regexp.MustCompile(`refuse(?:All)?\((?:\[\]string\{)?((?:"[A-Za-z0-9]+"(?:, )?)+)|\{([A-Z]\w*)\}[^,})]`), regexp.MustCompile(`"(?:[^"\n]* )?--[a-z][^"\n]* [^"\n]*"`)
	seen := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, "_test.go") || strings.HasSuffix(file, "_bpfel.go") {
			continue
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			for _, field := range strings.Split(m[1]+m[2], ", ") {
				field = strings.Trim(field, `" `)
				if field == "" || field == "URL" || field == "Field" {
					continue
				}
				if seen++; benchFlags[field] == "" {
					t.Errorf("%s names %s, for which there is no flag", file, field)
				}
			}
		}
		for _, m := range called.FindAllString(string(text), -1) {
			if strings.Contains(m, "iperf3 --") { // that program's
				continue
			}
			t.Errorf("%s names a flag: %s", file, m)
		}
	}
	if seen < 40 {
		t.Errorf("%d fields found in the source", seen)
	}
}
