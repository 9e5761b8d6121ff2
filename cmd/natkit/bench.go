// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/bench"
	"natkit/internal/ui/report"
)

func newBenchCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure NAT under load: throughput, loss, new sessions, cost of rules",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBenchHTTPCommand(e), newBenchUDPCommand(e), newBenchProbeCommand(e), newBenchBulkCommand(e), newBenchRulesCommand(e), newBenchCPSCommand(e), newBenchTrimmingCommand(e), newBenchPortsCommand(e), newBenchExpiryCommand(e), newBenchSubscribersCommand(e))
	return cmd
}

// showMeasured makes a measurement of routers and writes what it gave.
func showMeasured(ctx context.Context, e *env, format string, measure func(bench.About) (*bench.Result, error)) error {
	line := newProgressLine(e)
	res, err := measure(bench.About{
		Command: calledAs(), Natkit: version(), Progress: line.show,
		Plan: func(what string, takes time.Duration) {
			line.say("%s; about %s on a machine that is idle", what, about(takes))
		},
		Row: func(f bench.Figure) { line.say("%s", report.Row(f)) },
	})
	line.clear()
	err = inFlags(err)
	if errors.As(err, new(usageError)) {
		return err
	}
	if res == nil {
		return interruptedEmpty(ctx, err)
	}
	var shown error
	if format == "json" {
		shown = report.JSON(e.stdout, res)
	} else {
		shown = report.Result(e.stdout, res)
	}
	return errors.Join(shown, interrupted(ctx, err))
}

// benchFlags are the flags by the fields of package bench's options that they set.
var benchFlags = map[string]string{
	"Apart": "apart", "Block": "block", "BothWays": "both-ways", "Concurrency": "concurrency", "Cores": "cores", "Counts": "counts", "Directions": "direction",
	"Duration": "duration", "Flows": "flows", "Force": "force", "Goals": "ndr", "Headers": "header", "Held": "held", "Hosts": "hosts", "IPerf3": "iperf3",
	"Load": "seconds", "PDR": "pdr", "Protocols": "protocol", "RX": "rx", "Rate": "rate", "Rates": "rate", "Requests": "requests",
	"RouterMAC": "router-mac", "Routers": "router", "Rules": "rules", "Sessions": "sessions", "Sizes": "size", "SocketTimeout": "socket-timeout",
	"Sources": "source", "Streams": "streams", "TX": "tx", "Targets": "target", "TimeLimit": "time-limit", "TransferFor": "seconds",
	"Trials": "trials", "Workers": "workers",
}

// inFlags is an error of package bench with flags in place of its options' fields; what
// is wrong with an option is an error of usage.
func inFlags(err error) error {
	flag := func(field string) string {
		if name := benchFlags[field]; name != "" {
			return "--" + name
		}
		return field // the argument
	}
	var option *bench.OptionError
	if errors.As(err, &option) {
		return usagef("%s", option.Worded(flag))
	}
	var hint *bench.HintError
	if errors.As(err, &hint) {
		return errors.New(strings.Replace(err.Error(), hint.Error(), hint.Worded(flag), 1))
	}
	return err
}

// interruptedEmpty is the error of a measurement that has nothing to show.
func interruptedEmpty(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return errors.New("interrupted before anything was measured")
	}
	return err
}

// calledAs is how natkit was called.
func calledAs() string { return strings.Join(append([]string{"natkit"}, os.Args[1:]...), " ") }

// timeVar is a flag for a time: all commands take it alike.
func timeVar(f *pflag.FlagSet, to *time.Duration, name string, value time.Duration, usage string) {
	*to = value
	f.Var((*secondsFlag)(to), name, usage)
}

// secondsFlag is a time given as ab(1) takes it, a number of seconds, or with a
// unit, as in 500ms.
type secondsFlag time.Duration

func (s *secondsFlag) String() string {
	if *s == 0 {
		return ""
	}
	return time.Duration(*s).String()
}

func (s *secondsFlag) Type() string { return "seconds" }

func (s *secondsFlag) Set(text string) error {
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		if !(n > 0 && n <= 1e6) { // nor NaN
			return errors.New("want more than 0 and at most a million seconds")
		}
		*s = secondsFlag(n * float64(time.Second))
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("%q: want a number of seconds, or a time such as 500ms", text)
	}
	if d <= 0 {
		return errors.New("want a time above 0, such as 10 (seconds) or 500ms")
	}
	if d > 1e6*time.Second {
		return errors.New("want more than 0 and at most a million seconds")
	}
	*s = secondsFlag(d)
	return nil
}
