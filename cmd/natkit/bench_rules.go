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
		Long: `Measure the cost of rules that do not match, before the rule that does. Only the
first packet of a connection passes the NAT rules, so bulk transfer does not show
it. For each router and number of rules natkit measures, in separate network
namespaces:

  New connections     HTTP requests, one connection each, 32 at a time
  First packet        how much longer the first datagram of a flow and its reply
                      take than the second
  Packets of open connections
                      64-byte frames of 1000 flows that the router knows, as
                      fast as generator, router and sink run on one CPU
  Time to load        the rules, as one transaction or one file
  Kernel memory       of 5000 rules and more

Trials take turns: every router once, then every router again; each trial loads
the rules again. The defaults take two to three minutes, four on a busy machine.

A router that has no such rules is measured without them.`,
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
