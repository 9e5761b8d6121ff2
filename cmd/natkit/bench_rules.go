// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchRulesCommand(e *env) *cobra.Command {
	o := bench.RulesOptions{Load: 500 * time.Millisecond}
	var routers []string
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Measure how much each additional NAT rule costs",
		Long: `Measure what rules cost that match nothing, before the one that matches: NAT asks
its rules about the first packet of a connection, so bulk transfer does not show
it. In network namespaces of its own it measures, for each router and number of
rules:

  New connections     HTTP requests, a connection for each, 32 at a time
  First packet        what the first datagram of a flow, with its answer, takes
                      longer than the second
  Packets of open connections
                      64-byte frames of 1000 flows that the router knows, as
                      fast as generator, router and sink go on one CPU
  Time to load        the rules, as one transaction or one file
  Kernel memory       of 5000 rules and more

Trials take turns: every router once, then every router again; each loads its
rules anew. The defaults take two to three minutes, four on a busy machine.

A router that has no rules whose number could vary is measured without them.`,
		Example: `  natkit bench rules
  natkit bench rules --router nft,nft-map --counts 0,500,5000 --trials 5
  natkit bench rules -o json > rules.json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"nft", "nft-map", "iptables", "iptables-legacy", "ebpf-tc"}, "routers to compare, by `name`")
	f.IntSliceVar(&o.Counts, "counts", bench.DefaultRuleCounts, "`numbers` of rules that match nothing")
	f.Var((*secondsFlag)(&o.Load), "seconds", "`seconds` of new connections in a trial")
	f.IntVar(&o.Flows, "flows", 300, "flows whose first packet is timed in a trial")
	f.IntVar(&o.Trials, "trials", 3, "trials of each router with each number of rules")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench rules measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.Rules(cmd.Context(), o)
		})
	}
	return cmd
}
