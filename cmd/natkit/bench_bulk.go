// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchBulkCommand(e *env) *cobra.Command {
	o := bench.BulkOptions{TransferFor: time.Second}
	var routers []string
	var direction string
	var paper bool
	cmd := &cobra.Command{
		Use:   "bulk",
		Short: "Measure TCP bulk transfer through NAT routers",
		Long: `Measure how much TCP connections carry through one router after the other, in
separate network namespaces.

Trials take turns: every router once, then every router again. A trial that other
programs or the hypervisor disturbed is repeated once; if the second is disturbed
too, the figure is labelled "noisy". The defaults take about two minutes, twice
that on a busy machine.

CPU time is that of the whole machine: both ends, the router, and all other
programs. The left end of a connection runs on one CPU, the right end on the
next, as with "iperf3 -A 0,1"; --iperf3 repeats each transfer with iperf3, in
whole seconds, for comparison.

--paper repeats an experiment of 1997 in its five configurations, 20 MB six times
in each direction, and prints its tables beside the published ones.`,
		Example: `  natkit bench bulk
  natkit bench bulk --router none,nft --streams 1,2,4 --seconds 3 --iperf3
  natkit bench bulk --paper
  natkit bench bulk -o json > bulk.json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"none", "default", "nft", "iptables", "iptables-legacy", "stateless", "act-nat", "ebpf-tc"}, "routers to compare")
	f.IntSliceVar(&o.Streams, "streams", []int{1, 4}, "connections at a time")
	f.StringVar(&direction, "direction", "both", "up (client to server), down or both")
	f.Var((*secondsFlag)(&o.TransferFor), "seconds", "`seconds` that a trial sends for")
	f.IntVar(&o.Trials, "trials", 3, "trials of each router under each condition")
	f.BoolVar(&o.IPerf3, "iperf3", false, "compare with iperf3, which must be installed")
	f.BoolVar(&paper, "paper", false, "repeat the published experiment of 1997")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench bulk measures in namespaces that it makes", e.netns)
		}
		if paper {
			for _, name := range []string{"router", "streams", "direction", "seconds", "trials", "iperf3"} {
				if f.Changed(name) {
					return usagef("--%s: not with --paper, whose set-ups are given", name)
				}
			}
			return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
				return bench.BulkPaper(cmd.Context(), bench.PaperOptions{Setups: scenario.PaperSetups(), About: about})
			})
		}
		var err error
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		if o.Directions, err = bench.ParseDirection(direction); err != nil {
			return inFlags(err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.Bulk(cmd.Context(), o)
		})
	}
	return cmd
}
