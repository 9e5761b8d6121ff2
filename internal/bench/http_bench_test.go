// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// BenchmarkHTTPAgainstAB makes the same load on the same nginx with ab and with
// natkit in turn, the clients on one processor and the server on another. An
// iteration is one run of each; -benchtime 7x makes seven. It reports medians
// of the requests per second, and of the ratio within an iteration, the only
// one of the figures that stands on a machine that does other things, too.
func BenchmarkHTTPAgainstAB(b *testing.B) {
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil || !cpus.IsSet(0) || !cpus.IsSet(1) {
		b.Skip("needs processors 0 and 1")
	}
	ab := ktest.Tool(b, "ab")
	ns := newNamespace(b, map[string]string{"core/somaxconn": "16384", "ipv4/tcp_max_syn_backlog": "16384"})
	startNginx(b, ns, 1, "127.0.0.1:80")
	natkit := filepath.Join(b.TempDir(), "natkit")
	if out, err := exec.Command("go", "build", "-o", natkit, "../../cmd/natkit").CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}

	for _, load := range []struct{ concurrency, requests int }{{100, 30000}, {5000, 100000}} {
		b.Run(fmt.Sprintf("c=%d", load.concurrency), func(b *testing.B) {
			args := []string{"-c", strconv.Itoa(load.concurrency), "-n", strconv.Itoa(load.requests), "-r", "-s", "10"}
			const url = "http://127.0.0.1/"
			var theirs, ours, ratio, theirTime, ourTime, resident []float64
			for b.Loop() {
				out, process := runOn(b, ns, exec.Command(ab, append(slices.Clone(args), "-q", url)...))
				m := regexp.MustCompile(`Requests per second: +([0-9.]+)`).FindStringSubmatch(out)
				if m == nil || !strings.Contains(out, "Failed requests:        0") {
					b.Fatalf("ab: %s", out)
				}
				their, _ := strconv.ParseFloat(m[1], 64)
				theirTime = append(theirTime, processorTime(process, load.requests))

				out, process = runOn(b, ns, exec.Command(natkit, append([]string{"bench", "http", "-o", "json", url}, args...)...))
				var r HTTPResult
				if err := json.Unmarshal([]byte(out), &r); err != nil || r.Completed != int64(load.requests) || r.Failed.Sum() != 0 {
					b.Fatalf("natkit: %v %s", err, out)
				}
				ourTime = append(ourTime, processorTime(process, load.requests))
				resident = append(resident, float64(process.Maxrss)/1024)

				theirs, ours = append(theirs, their), append(ours, r.RequestsPerSecond)
				ratio = append(ratio, r.RequestsPerSecond/their)
				b.Logf("ab %.0f, natkit %.0f requests/s, ratio %.2f", their, r.RequestsPerSecond, r.RequestsPerSecond/their)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median(theirs), "ab-req/s")
			b.ReportMetric(median(ours), "natkit-req/s")
			b.ReportMetric(median(ratio), "ratio")
			b.ReportMetric(slices.Min(ratio), "ratio-min")
			b.ReportMetric(slices.Max(ratio), "ratio-max")
			b.ReportMetric(median(theirTime), "ab-cpu-us/req")
			b.ReportMetric(median(ourTime), "natkit-cpu-us/req")
			b.ReportMetric(slices.Max(resident), "natkit-MiB")
		})
	}
}

// runOn runs a command on processor 0 and returns its output and what it used.
func runOn(b *testing.B, ns *netns.Handle, cmd *exec.Cmd) (string, *syscall.Rusage) {
	b.Helper()
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	err := startOn(ns, 0, cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		b.Fatalf("%s: %v\n%s", cmd.Path, err, out.String())
	}
	return out.String(), cmd.ProcessState.SysUsage().(*syscall.Rusage)
}

// processorTime is microseconds of processor time for each request.
func processorTime(u *syscall.Rusage, requests int) float64 {
	used := time.Duration(u.Utime.Nano() + u.Stime.Nano())
	return float64(used.Microseconds()) / float64(requests)
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	return (s[len(s)/2] + s[(len(s)-1)/2]) / 2
}
