// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchSubscribersCommand(e *env) *cobra.Command {
	var o bench.SubscribersOptions
	var routers []string
	cmd := &cobra.Command{
		Use:   "subscribers",
		Short: "Measure what port blocks and limits cost, and whether they are fair",
		Long: `Measure the eBPF engine with and without port blocks and limits of subscribers.
Each internal host is a subscriber and opens 63 UDP sessions. Everything runs in
separate network namespaces.

  Cost       new sessions per second, and packets per second of open sessions:
             generator, router and sink share one CPU. Routers take turns, and
             each round is compared with that of the first router.
  Fairness   one host opens sessions as fast as it can, until all ports of the one
             external address or all of its own are taken. While it goes on, other
             hosts open sessions: how many hosts get all of them, how many get
             none. Needs two CPUs.

With the least block size, 64, a block begins for every 63 sessions, which is the
most that blocks can cost. The begin and end of every block is recorded, whether a
program reads the records or not.

A disturbed trial is repeated; figures that stay disturbed are labelled. The
defaults take about a minute.

` + listed(scenario.SubscriberRouters()),
		Example: `  natkit bench subscribers
  natkit bench subscribers --block 512 --hosts 50 --trials 11
  natkit bench subscribers --router ebpf-tc,ebpf-tc-blocks --sessions 20000 -o json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"ebpf", "ebpf-blocks", "ebpf-limits"}, "routers to compare, by `name`; the others with the first")
	f.IntVar(&o.Sessions, "sessions", 100_000, "`number` of new sessions in a trial")
	f.IntVar(&o.Block, "block", 64, "`ports` of a block")
	f.IntVar(&o.Hosts, "hosts", 100, "`number` of hosts beside the one that opens everything")
	timeVar(f, &o.Duration, "duration", 500*time.Millisecond, "of a trial with open sessions")
	f.IntVar(&o.Trials, "trials", 7, "trials of everything")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench subscribers measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Routers, err = scenario.FindSubscriberRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.MeasureSubscribers(cmd.Context(), o)
		})
	}
	return cmd
}
