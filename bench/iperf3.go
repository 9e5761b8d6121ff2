// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"natkit/lab"
)

// iperf3Version says which iperf3 is installed.
func iperf3Version(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "iperf3", "--version").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return "", errors.New("iperf3 is not installed: install it, or leave out --iperf3")
	}
	if err != nil {
		return "", fmt.Errorf("run iperf3 --version: %w", err)
	}
	version, _, _ := strings.Cut(string(out), "\n")
	return version, nil
}

// iperf3Trial makes the transfer of bulkTrial with iperf3, and as that once more
// when something disturbed it.
func (c *comparison) iperf3Trial(ctx context.Context, s *site, p Params, duration time.Duration) error {
	var bps, retransmits float64
	noisy := true
	for attempt := 0; attempt < 2 && noisy; attempt++ {
		if attempt > 0 {
			c.disturbed(s, p, trialCounts{discarded: 1}, metricIPerf3Throughput, metricIPerf3Retransmits)
		}
		before, err := readMachineTime()
		if err != nil {
			return err
		}
		start := time.Now()
		if bps, retransmits, err = s.iperf3(ctx, p, duration); err != nil {
			return err
		}
		after, err := readMachineTime()
		if err != nil {
			return err
		}
		noisy = after.since(before).noisy(time.Since(start))
	}
	if noisy {
		c.disturbed(s, p, trialCounts{noisy: 1}, metricIPerf3Throughput, metricIPerf3Retransmits)
	}
	c.add(s.router.Name(), metricIPerf3Throughput, p, bps)
	c.add(s.router.Name(), metricIPerf3Retransmits, p, retransmits)
	return nil
}

// iperf3 runs its server and its client, on the processors of transfer.
func (s *site) iperf3(ctx context.Context, p Params, duration time.Duration) (bps, retransmits float64, err error) {
	source, target := s.endpoints(bulkPort)
	ctx, cancel := context.WithTimeoutCause(ctx, duration+stallLimit, errors.New("stalled"))
	defer cancel()
	server := s.bed.Node(lab.RoleServer).Command(ctx, "iperf3",
		"-B", target.Addr().String(), "-p", strconv.Itoa(bulkPort), "-s", "-1", "--forceflush")
	said, err := server.StdoutPipe()
	if err != nil {
		return 0, 0, fmt.Errorf("run iperf3 server: %w", err)
	}
	if err := server.Start(); err != nil {
		return 0, 0, fmt.Errorf("run iperf3 server: %w", err)
	}
	defer func() {
		cancel() // a server that did not get its one client
		_ = server.Wait()
	}()
	lines := bufio.NewScanner(said)
	for lines.Scan() && !strings.Contains(lines.Text(), "Server listening") {
	}

	seconds := max(int(duration.Round(time.Second)/time.Second), 1)
	args := []string{"-c", target.Addr().String(), "-p", strconv.Itoa(bulkPort), "-B", source.Addr().String(),
		"-P", strconv.Itoa(p.Streams), "-t", strconv.Itoa(seconds), "-J"}
	if cpus, err := allowedCPUs(); err == nil && len(cpus) > 1 {
		args = append(args, "-A", fmt.Sprintf("%d,%d", cpus[0], cpus[1]))
	}
	if p.Direction == DirectionDown {
		args = append(args, "-R")
	}
	out, err := s.bed.Node(lab.RoleClient).Command(ctx, "iperf3", args...).Output()
	if ctx.Err() != nil {
		return 0, 0, fmt.Errorf("run iperf3: %w", context.Cause(ctx))
	}
	bps, retransmits, reportErr := parseIPerf3(out)
	if err := errors.Join(reportErr, err); err != nil {
		return 0, 0, fmt.Errorf("run iperf3 %s: %w", strings.Join(args, " "), err)
	}
	for lines.Scan() { // the server's own report, until its end
	}
	return bps, retransmits, nil
}

// parseIPerf3 reads the report of a client, in iperf3's JSON.
func parseIPerf3(report []byte) (bps, retransmits float64, err error) {
	var r struct {
		Error string `json:"error"`
		End   struct {
			Sent struct {
				Retransmits float64 `json:"retransmits"`
			} `json:"sum_sent"`
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(report, &r); err != nil {
		return 0, 0, fmt.Errorf("read its report: %w", err)
	}
	if r.Error != "" {
		return 0, 0, errors.New(r.Error)
	}
	if r.End.Received.BitsPerSecond <= 0 {
		return 0, 0, errors.New("its report has no throughput")
	}
	return r.End.Received.BitsPerSecond, r.End.Sent.Retransmits, nil
}
