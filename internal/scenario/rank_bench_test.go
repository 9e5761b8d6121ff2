// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"natkit/internal/bench"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// BenchmarkRank has other people's tools measure some routers: requests by ab and by wrk,
// a connection for each, small datagrams by iperf3; and requests by natkit in the same
// testbeds. All should put the routers into the same order. A turn is one run of each.
func BenchmarkRank(b *testing.B) {
	ktest.Root(b)
	for _, tool := range []string{"ab", "wrk", "iperf3", "nginx", "nft", "iptables-nft"} {
		ktest.Tool(b, tool)
	}
	type contender struct {
		name    string
		testbed *bench.Testbed
		rates   map[string][]float64
	}
	var contenders []*contender
	for _, c := range []struct {
		router string
		rules  int
	}{{"none", 0}, {"nft", 0}, {"default", 0}, {"nft", 5000}, {"iptables", 5000}} {
		testbed, err := bench.NewTestbed(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { testbed.Close() })
		routers, err := FindRouters([]string{c.router})
		if err != nil {
			b.Fatal(err)
		}
		remove, err := routers[0].Install(b.Context(), testbed, bench.RouterOptions{Rules: c.rules, Sockets: true})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { remove() })
		startNginx(b, testbed.Right)
		contenders = append(contenders, &contender{fmt.Sprintf("%s-%d", c.router, c.rules), testbed, map[string][]float64{}})
	}
	for b.Loop() {
		for _, c := range contenders {
			url := "http://" + c.testbed.RightAddr.String() + ":8080/"
			ours, err := bench.HTTP(b.Context(), bench.HTTPOptions{URL: url, Concurrency: 50, Requests: 5000, Workers: 1, Netns: c.testbed.Left})
			if err != nil {
				b.Fatal(err)
			}
			for tool, rate := range map[string]float64{
				"natkit-req/s": ours.RequestsPerSecond,
				"ab-req/s":     number(b, output(b, c.testbed.Left, "ab", "-q", "-c", "50", "-n", "5000", url), `Requests per second: +([\d.]+)`),
				"wrk-req/s":    number(b, output(b, c.testbed.Left, "wrk", "-t", "1", "-c", "50", "-d", "1s", "-H", "Connection: close", url), `Requests/sec: +([\d.]+)`),
				"iperf3-pps":   iperfDatagrams(b, c.testbed),
			} {
				c.rates[tool] = append(c.rates[tool], rate)
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, c := range contenders { // one line each, for the test prints ten
		line := fmt.Sprintf("%-13s", c.name)
		for _, tool := range []string{"natkit-req/s", "ab-req/s", "wrk-req/s", "iperf3-pps"} {
			var ratios []float64 // to the first in the same turn
			for i, rate := range c.rates[tool] {
				ratios = append(ratios, rate/contenders[0].rates[tool][i])
			}
			slices.Sort(ratios)
			v := slices.Sorted(slices.Values(c.rates[tool]))
			line += fmt.Sprintf("  %s %.0f (%.0f - %.0f), %.2f", tool, v[len(v)/2], v[0], v[len(v)-1], ratios[len(ratios)/2])
		}
		b.Log(line)
	}
}

// startNginx serves 70 bytes at port 8080 of a namespace.
func startNginx(b *testing.B, ns *netns.Handle) {
	b.Helper()
	dir := b.TempDir()
	conf := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf(`daemon off; worker_processes 1; pid %[1]s/pid; error_log stderr crit; events { worker_connections 4096; }
http { access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
server { listen 8080 backlog=4096; location / { return 200 "%070[2]d"; } } }`, dir, 0)
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "nginx", "-p", dir, "-c", conf)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := ns.Do(cmd.Start); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cancel(); cmd.Wait() })
	for deadline := time.Now().Add(30 * time.Second); ; {
		if _, err := os.Stat(filepath.Join(dir, "pid")); err == nil {
			return
		}
		if time.Now().After(deadline) {
			b.Fatal("nginx does not start")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// iperfDatagrams is how many of 18 bytes a second get through, with both ends on one CPU.
func iperfDatagrams(b *testing.B, testbed *bench.Testbed) float64 {
	b.Helper()
	server := exec.CommandContext(b.Context(), "iperf3", "-s", "-1", "-A", "1")
	if err := testbed.Right.Do(server.Start); err != nil {
		b.Fatal(err)
	}
	var last []byte
	var result struct {
		End struct {
			Sum struct {
				Packets float64
				Lost    float64 `json:"lost_packets"`
				Seconds float64
			}
		}
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); { // until the server listens
		client := exec.CommandContext(b.Context(), "iperf3", "-c", testbed.RightAddr.String(), "-u", "-b", "0", "-l", "18", "-t", "1", "-A", "1", "-J")
		err := testbed.Left.Do(func() (err error) {
			last, err = client.Output()
			return err
		})
		if err == nil && json.Unmarshal(last, &result) == nil && result.End.Sum.Seconds > 0 {
			server.Wait()
			return (result.End.Sum.Packets - result.End.Sum.Lost) / result.End.Sum.Seconds
		}
		time.Sleep(20 * time.Millisecond)
	}
	b.Fatalf("iperf3: %s", last)
	return 0
}

func output(b *testing.B, ns *netns.Handle, name string, args ...string) string {
	b.Helper()
	var out []byte
	if err := ns.Do(func() (err error) {
		out, err = exec.CommandContext(b.Context(), name, args...).CombinedOutput()
		return err
	}); err != nil {
		b.Fatalf("%s: %v\n%s", name, err, out)
	}
	return string(out)
}

func number(b *testing.B, text, pattern string) float64 {
	b.Helper()
	if m := regexp.MustCompile(pattern).FindStringSubmatch(text); m != nil {
		if n, err := strconv.ParseFloat(m[1], 64); err == nil {
			return n
		}
	}
	b.Fatalf("no %s in:\n%s", pattern, text)
	return 0
}
