// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchTrimmingCommand(e *env) *cobra.Command {
	var o bench.TrimmingOptions
	var routers []string
	cmd := &cobra.Command{
		Use:   "trimming",
		Short: "Measure NAT with netfilter whole, trimmed and absent (a published report)",
		Long: `Repeat a published report on this machine: how many 64-byte UDP frames a NAT
router loses at 100 Mbit/s and at 1 Gbit/s, the highest rate without loss, and the
router's CPU time, with all that a distribution registers in netfilter, with only
what NAT needs, with empty hooks, without NAT, and with addresses rewritten without
connection tracking.

The load is offered to a router with one core; the generator has another. The
report's rows of a router with two cores have no counterpart: instead natkit measures
the cost of a frame on one core and on two, shared by generator, router and sink.

The published figures are shown beside; they were measured on a kernel and CPUs of
2010. "natkit bench udp --help" explains rates, noise and lost frames. The defaults
take about six minutes.`,
		Example: `  natkit bench trimming
  natkit bench trimming --router default,trimmed,none --flows 1000
  natkit bench trimming -o json > trimming.json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"default", "trimmed", "framework", "none", "stateless", "act-nat", "ebpf"}, "routers to measure, by `name`; see natkit bench udp --help")
	f.IntVar(&o.Flows, "flows", 1, "`number` of flows; the report had one")
	timeVar(f, &o.Duration, "duration", 200*time.Millisecond, "of a trial")
	f.IntVar(&o.Trials, "trials", 7, "trials at each rate")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench trimming measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.Trimming(cmd.Context(), o)
		})
	}
	return cmd
}
