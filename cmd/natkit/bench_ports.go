// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchPortsCommand(e *env) *cobra.Command {
	var o bench.PortsOptions
	var routers []string
	cmd := &cobra.Command{
		Use:   "ports",
		Short: "Measure how a router behaves while its external ports run out, and after",
		Long: `Measure the cost of a new flow while the external ports of a router are used up,
and what the router does with flows for which no port is left. All flows are UDP to
one target, behind one external address with the ports 1024 to 65535. Generator,
router and sink share one CPU, in separate namespaces.

  A new flow's first packet    with 10, 50, 90, 99 and 99.9 % of the ports in use
  Connections in the table     after as many flows as there are ports
  Cost of a packet without a port
                               a router without NAT forwards all of these
  Packets processed            with eight times as many flows as ports, and how
                               many of them were forwarded
  Packets of open connections  alone; and on one core, while another core has open
                               connections or flows that get no port

Trials take turns. A disturbed trial is repeated; figures that stay disturbed are
labelled. The defaults take about a minute.

` + routerList(),
		Example: `  natkit bench ports
  natkit bench ports --router none,nft,ebpf,ebpf-tc --trials 11
  natkit bench ports --router ebpf --trials 3 --duration 100ms -o json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"none", "nft", "ebpf"}, "routers to measure, by `name`")
	timeVar(f, &o.Duration, "duration", 500*time.Millisecond, "of a trial when the ports are taken")
	f.IntVar(&o.Trials, "trials", 7, "trials of everything")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench ports measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.MeasurePorts(cmd.Context(), o)
		})
	}
	return cmd
}
