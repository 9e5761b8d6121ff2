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

	"natkit/internal/lab"
)

// iperf3Version says which iperf3 is installed.
func iperf3Version(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "iperf3", "--version").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return "", hint("iperf3 is not installed: install it, or leave out {IPerf3}")
	}
	if err != nil {
		return "", fmt.Errorf("run iperf3 --version: %w", err)
	}
	version, _, _ := strings.Cut(string(out), "\n")
	return version, nil
}

// byIPerf3 makes the transfer again, with iperf3.
func (t *bulkTrial) byIPerf3(ctx context.Context, s *site, p Params, duration time.Duration) error {
	before, err := readMachineTime()
	if err != nil {
		return err
	}
	start := time.Now()
	if t.iperf3, err = s.iperf3(ctx, p, duration); err != nil {
		return err
	}
	after, err := readMachineTime()
	if err != nil {
		return err
	}
	t.iperf3CPU = after.since(before)
	if t.iperf3CPU.noisy(time.Since(start)) {
		t.noise = append(t.noise, otherPrograms)
	}
	return nil
}

// iperf3 runs its server and its client, on the processors of transfer.
func (s *site) iperf3(ctx context.Context, p Params, duration time.Duration) (report iperf3Report, err error) {
	source, target := s.endpoints(bulkPort)
	ctx, cancel := context.WithTimeoutCause(ctx, duration+stallLimit, errors.New("stalled"))
	defer cancel()
	server := s.testbed.Node(lab.RoleServer).Command(ctx, "iperf3",
		"-B", target.Addr().String(), "-p", strconv.Itoa(bulkPort), "-s", "-1", "--forceflush")
	said, err := server.StdoutPipe()
	if err != nil {
		return report, fmt.Errorf("run iperf3 server: %w", err)
	}
	if err := server.Start(); err != nil {
		return report, fmt.Errorf("run iperf3 server: %w", err)
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
	out, err := s.testbed.Node(lab.RoleClient).Command(ctx, "iperf3", args...).Output()
	if ctx.Err() != nil {
		return report, fmt.Errorf("run iperf3: %w", context.Cause(ctx))
	}
	report, reportErr := parseIPerf3(out)
	if err := errors.Join(reportErr, err); err != nil {
		return report, fmt.Errorf("run iperf3 %s: %w", strings.Join(args, " "), err)
	}
	for lines.Scan() { // the server's own report, until its end
	}
	return report, nil
}

// iperf3Report is what a client reports: bytes and bits a second as the receiver
// counted them.
type iperf3Report struct{ bps, bytes, retransmits float64 }

// parseIPerf3 reads the report of a client, in iperf3's JSON.
func parseIPerf3(report []byte) (iperf3Report, error) {
	var r struct {
		Error string `json:"error"`
		End   struct {
			Sent struct {
				Retransmits float64 `json:"retransmits"`
			} `json:"sum_sent"`
			Received struct {
				Bytes         float64 `json:"bytes"`
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(report, &r); err != nil {
		return iperf3Report{}, fmt.Errorf("read its report: %w", err)
	}
	if r.Error != "" {
		return iperf3Report{}, errors.New(r.Error)
	}
	if r.End.Received.BitsPerSecond <= 0 || r.End.Received.Bytes <= 0 {
		return iperf3Report{}, errors.New("its report has no throughput")
	}
	return iperf3Report{r.End.Received.BitsPerSecond, r.End.Received.Bytes, r.End.Sent.Retransmits}, nil
}
