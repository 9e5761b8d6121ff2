// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"

	"natkit/internal/bench"
	"natkit/internal/testutil/ktest"
)

func runCommand(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(ctx, args, &env{stdout: &out, stderr: &errs})
	return code, out.String(), errs.String()
}

func TestBenchUDP(t *testing.T) {
	ktest.Root(t)
	args := []string{"bench", "udp", "--router", "none,nft", "--both-ways", "--flows", "1,63", "--trials", "1", "--duration", "20ms"}
	code, stdout, stderr := runCommand(t.Context(), append(args, "-o", "json")...)
	var res bench.Result
	if err := json.Unmarshal([]byte(stdout), &res); err != nil || code != exitOK || !onlyProgress(stderr) {
		t.Fatalf("exit %d, %v\n%s%s", code, err, stdout, stderr)
	}
	costs := 0
	for _, f := range res.Figures {
		if f.Metric == "cost_ns" && (f.Median > 0 || f.Label == "noisy") && f.Params.BothWays { // a machine may be too busy for a figure
			costs++
		}
	}
	if res.Kind != "udp" || costs != 4 {
		t.Errorf("%d costs of two routers with two numbers of flows\n%s", costs, stdout)
	}
	code, stdout, stderr = runCommand(t.Context(), args...)
	if code != exitOK || !onlyProgress(stderr) || !strings.Contains(stdout, "Cost of a packet") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}

func TestBenchUDPInterrupted(t *testing.T) {
	ktest.Root(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if code, stdout, stderr := runCommand(ctx, "bench", "udp"); code != exitError || stdout != "" || stderr == "" {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}

func TestBenchUDPUsage(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--router never", "nft-map"},
		{"--router none,none", "twice"},
		{"--router=", "--router"},
		{"--size 63", "64 to 1518"},
		{"--rate fast", "500kpps"},
		{"--rate 2000Mpps", "1Gpps"},
		{"--rate 1kpps --cores 2", "one CPU of its own"},
		{"--flows 0", "--flows"},
		{"--pdr 0.5", "--pdr"},
		{"--trials 0", "--trials"},
		{"--duration 1ns", "--duration"},
		{"--netns pid:1", "--netns"},
		{"--tx a", "--rx"},
		{"--tx a --rx a", "two interfaces"},
		{"--tx a --rx b --router none", "--router"},
		{"--tx a --rx b --cores 1", "--cores"},
		{"--tx a --rx b --both-ways", "--both-ways"},
		{"--tx a --rx b --source x", "--source"},
		{"--tx a --rx b --target ::/0", "--target"},
		{"--tx a --rx b --router-mac x", "--router-mac"},
		{"--source 192.0.2.0/24", "only with --tx"},
		{"--force", "only with --tx"},
		{"-o html", "--output"},
		{"more", "takes none"},
	} {
		code, stdout, stderr := runCommand(t.Context(), append([]string{"bench", "udp"}, strings.Fields(c.args)...)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
}

// An interface that is not there is no mistake in the command.
func TestBenchUDPNoInterface(t *testing.T) {
	args := []string{"bench", "udp", "--tx", "natkit-none0", "--rx", "natkit-none1"}
	if code, stdout, stderr := runCommand(t.Context(), args...); code != exitError || stdout != "" || !strings.Contains(stderr, `"natkit-none0": not found`) {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := runCommand(t.Context(), append(args, "--rx-netns", "natkit-none")...); code != exitError || !strings.Contains(stderr, `"natkit-none": not found`) {
		t.Errorf("exit %d\n%s", code, stderr)
	}
}
