// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchExpiryCommand(e *env) *cobra.Command {
	var o bench.ExpiryOptions
	var routers []string
	var rate string
	cmd := &cobra.Command{
		Use:   "expiry",
		Short: "Measure packet delay while many other sessions expire",
		Long: `Measure how the expiry of many sessions delays the packets of others. natkit fills
a table with sessions of one packet each. Then it times every packet of some flows:
median, 99th and 99.99th percentile and the longest, alternating between a table
that keeps its sessions and one where they expire. The router has one CPU, the
generator another, in separate namespaces.

Connection tracking removes expired sessions up to a minute late: "Sessions that
expired during the trial" shows how many were removed while packets were timed. The
eBPF engine removes them in slices of some microseconds, for which the packets of
one CPU wait.

Trials take turns and time packets for 30 seconds. A disturbed trial is repeated; figures
that stay disturbed are labelled. The defaults take about six minutes.

` + routerList(),
		Example: `  natkit bench expiry
  natkit bench expiry --router ebpf,ebpf-tc --sessions 250000 --trials 3
  natkit bench expiry --sessions 20000 --rate 20kpps --trials 1 -o json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"ebpf"}, "routers to measure, by `name`")
	f.IntVar(&o.Sessions, "sessions", 1_000_000, "`number` of sessions that expire")
	f.IntVar(&o.Flows, "flows", 1000, "`number` of flows whose packets are timed")
	f.StringVar(&rate, "rate", "100kpps", "their `rate`")
	f.IntVar(&o.Trials, "trials", 5, "trials with and without expiry")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench expiry measures in namespaces that it makes", e.netns)
		}
		r, err := bench.ParseRate(rate)
		if err != nil || r.PPS == 0 {
			return usagef("--rate %q: want packets a second such as 100kpps", rate)
		}
		o.Rate = r.PPS
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.Expiry(cmd.Context(), o)
		})
	}
	return cmd
}
