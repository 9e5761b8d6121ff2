// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"natkit/internal/testutil/ktest"
)

// BenchmarkReadAgainstTools reads a table of 200 000 entries with cat,
// conntrack(8) and natkit in turn, beginning with another one each time. An
// iteration is one run of each; -benchtime 9x makes nine. It reports medians,
// and for natkit and conntrack(8) the ratio to cat within an iteration, the only
// one of the figures that stands on a machine that does other things, too.
func BenchmarkReadAgainstTools(b *testing.B) {
	tool := ktest.Tool(b, "conntrack")
	h := newNetns(b)
	natkit := buildNatkit(b)
	in(b, h, func() error {
		_, err := Fill(context.Background(), FillOptions{Count: 200000})
		return err
	})
	commands := [][]string{
		{"cat", "/proc/net/nf_conntrack"},
		{tool, "-L"},
		{natkit, "conntrack", "stats"},
		{natkit, "conntrack", "list"},
	}
	names := []string{"cat", "conntrack-L", "stats", "list"}
	used := make([][]usage, len(commands))
	for first := 0; b.Loop(); first++ {
		for i := range commands {
			i = (i + first) % len(commands)
			in(b, h, func() error {
				u, err := runMeasured(exec.Command(commands[i][0], commands[i][1:]...))
				used[i] = append(used[i], u)
				return err
			})
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, name := range names {
		report(b, name+"-s", values(used[i], func(u usage) float64 { return u.elapsed.Seconds() }))
		report(b, name+"-cpu-s", values(used[i], func(u usage) float64 { return u.cpu.Seconds() }))
		if i == 0 {
			continue
		}
		var ratio []float64
		for run := range used[i] {
			ratio = append(ratio, used[i][run].elapsed.Seconds()/used[0][run].elapsed.Seconds())
		}
		report(b, name+"/cat", ratio)
		b.ReportMetric(slices.Max(values(used[i], func(u usage) float64 { return u.resident / 1024 })), name+"-MiB")
	}
}

// BenchmarkReadFile reads dumps of a million lines with natkit on one processor:
// of few and of a million different sources, and of IPv6 as /proc and as
// conntrack(8) print it.
func BenchmarkReadFile(b *testing.B) {
	natkit := buildNatkit(b)
	const lines = 1000000
	for _, dump := range []struct {
		name  string
		write func(w io.Writer, i, sport int)
	}{
		{"few-sources", func(w io.Writer, i, sport int) {
			writeEntry(w, "ipv4     2", fmt.Sprintf("192.168.%d.%d", i%8, i%250), "192.168.0.96", "172.17.0.2", sport)
		}},
		{"million-sources", func(w io.Writer, i, sport int) {
			n := uint32(i) * 2654435761 // each once, in no order
			writeEntry(w, "ipv4     2", fmt.Sprintf("%d.%d.%d.%d", n>>24, n>>16&255, n>>8&255, n&255), "192.168.0.96", "172.17.0.2", sport)
		}},
		{"ipv6-proc", func(w io.Writer, i, sport int) {
			writeEntry(w, "ipv6     10", fmt.Sprintf("2001:0db8:0000:0000:0000:0000:0000:%04x", i%60000),
				"2001:0db8:0000:0000:0000:0000:0001:0002", "2001:0db8:0000:0000:0000:0000:0001:0003", sport)
		}},
		{"ipv6", func(w io.Writer, i, sport int) {
			writeEntry(w, "ipv6     10", fmt.Sprintf("2001:db8::%x", i%60000), "2001:db8::1:2", "2001:db8::1:3", sport)
		}},
	} {
		path := filepath.Join(b.TempDir(), "dump")
		f, err := os.Create(path)
		if err != nil {
			b.Fatal(err)
		}
		w := bufio.NewWriter(f)
		for i := range lines {
			dump.write(w, i, 1024+i%64000)
		}
		if err := w.Flush(); err != nil {
			b.Fatal(err)
		}
		f.Close()
		for _, command := range []string{"stats", "top"} {
			b.Run(command+"/"+dump.name, func(b *testing.B) {
				var used []usage
				for b.Loop() {
					cmd := exec.Command(natkit, "conntrack", command, "--from", path)
					cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
					u, err := runMeasured(cmd)
					if err != nil {
						b.Fatal(err)
					}
					used = append(used, u)
				}
				b.ReportMetric(0, "ns/op")
				report(b, "lines/s", values(used, func(u usage) float64 { return lines / u.elapsed.Seconds() }))
				report(b, "lines/cpu-s", values(used, func(u usage) float64 { return lines / u.cpu.Seconds() }))
				b.ReportMetric(slices.Max(values(used, func(u usage) float64 { return u.resident / 1024 })), "MiB")
			})
		}
	}
}

func writeEntry(w io.Writer, family, src, dst, inside string, sport int) {
	fmt.Fprintf(w, "%s tcp      6 %d TIME_WAIT src=%s dst=%s sport=%d dport=8080 src=%s dst=%s sport=8080 dport=%d [ASSURED] mark=0 use=1\n",
		family, sport%120, src, dst, sport, inside, src, sport)
}

func buildNatkit(b *testing.B) string {
	b.Helper()
	path := filepath.Join(b.TempDir(), "natkit")
	if out, err := exec.Command("go", "build", "-o", path, "../../../cmd/natkit").CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	return path
}

// usage is what a run took.
type usage struct {
	elapsed, cpu time.Duration
	resident     float64 // KiB at its peak
}

// runMeasured runs a command with its output thrown away. The peak of its memory
// is read from /proc while it runs: what wait4 says includes the memory of the
// process that started it.
func runMeasured(cmd *exec.Cmd) (usage, error) {
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return usage{}, err
	}
	peak := make(chan float64)
	go func() {
		highest := 0.0
		for {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
			_, after, found := bytes.Cut(status, []byte("VmHWM:"))
			if err != nil || !found { // it ended
				peak <- highest
				return
			}
			if n, err := strconv.ParseFloat(strings.Fields(string(after))[0], 64); err == nil {
				highest = max(highest, n)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	highest := <-peak
	err := cmd.Wait()
	state := cmd.ProcessState
	return usage{elapsed: time.Since(began), cpu: state.UserTime() + state.SystemTime(), resident: highest}, err
}

func values(used []usage, of func(usage) float64) (out []float64) {
	for _, u := range used {
		out = append(out, of(u))
	}
	return out
}

// report reports the median as a metric and logs the spread.
func report(b *testing.B, name string, v []float64) {
	b.Helper()
	s := slices.Sorted(slices.Values(v))
	median := (s[len(s)/2] + s[(len(s)-1)/2]) / 2
	b.ReportMetric(median, name)
	b.Logf("%-20s n=%d median %.4g (%.4g - %.4g)", name, len(s), median, s[0], s[len(s)-1])
}
