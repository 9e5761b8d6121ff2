// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
)

func newBenchCPSCommand(e *env) *cobra.Command {
	var o bench.CPSOptions
	var routers []string
	var ndr bool
	var pdr string
	cmd := &cobra.Command{
		Use:   "cps",
		Short: "Measure new sessions per second, established sessions and table capacity",
		Long: `Measure how fast routers accept new sessions, as in RFC 9693: UDP or TCP, generated
in the kernel by XDP and sent through separate namespaces. Nothing outside these
namespaces is touched.

A UDP session is one packet from left to right. A TCP session is a whole connection:
SYN, SYN-ACK, ACK, the server's FIN, the client's FIN, the last ACK. Client and
server are XDP programs without state: they reply to the segment that arrives. Its
sequence numbers are cookies of the connection, so a segment that was translated to
the wrong connection is detected and counted. Nothing is retransmitted; a connection
that loses a segment is not completed.

Without --ndr and --pdr the generator, the router and the sink share one CPU and run
at full speed, so nothing waits or is lost:
  1. New sessions. The router's table is flushed in its namespace; then each frame
     starts another session, in pseudo-random order, 63 ports per source address. The
     cost is the time per session, including generator and ends, which are the same
     for all routers. The rate counts sessions in the table (UDP) or completed
     sessions (TCP) in that time. CPU time of other programs is left out.
  2. Established sessions. Packets a second with one session, and with all of them
     in the table; with TCP, data on open connections.
  3. Capacity. How many of the sessions offered were in the table after 1, and what
     one took of the kernel's memory by /proc/slabinfo, from 10000 sessions on. A
     note says which are missing and where their packets were lost.

With them the router has one CPU, and the generator another. natkit searches the
highest rate of new sessions at which no session fails, or at most that share of
them, by MLRsearch as in natkit bench udp. The table is flushed before each trial.
It takes some minutes per router.

--sessions is at most the size of one table, sysctl net.netfilter.nf_conntrack_max.
CSIT's grid is 64512, 129024, 258048 and so on to 4128768: 1024 source addresses and
more. With more sessions than the 64512 ports of one external address the routers get
a pool of addresses with about twice as many ports. The eBPF engine has room for
1048576 sessions, or the next power of two. With --held the table already holds that
many other sessions, like a table in use. With --rules each router is measured with
several numbers of rules that its new sessions do not match. Routers without a table
(none, xdp-forward) show the cost of the frames alone.

Trials of several routers are interleaved, except those of searches. A trial that the
hypervisor or other programs disturbed is repeated; figures that stay disturbed are
labelled.

` + routerList(),
		Example: `  natkit bench cps
  natkit bench cps --protocol udp,tcp --router none,nft,stateless
  natkit bench cps --router none,nft,trimmed --sessions 258048 --trials 11
  natkit bench cps --router nft,ebpf --held 64512
  natkit bench cps --router nft-map,ebpf --rules 1,50000
  natkit bench cps --router nft --sessions 20000 --trials 3 --duration 200ms -o json
  natkit bench cps --router nft,iptables --protocol tcp --ndr`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"none", "nft", "xdp-forward", "ebpf"}, "routers to measure, by `name`")
	f.StringSliceVar(&o.Protocols, "protocol", []string{"udp"}, "`names` of protocols: udp, tcp")
	f.IntVar(&o.Sessions, "sessions", 64512, "new sessions of a trial")
	f.IntVar(&o.Held, "held", 0, "sessions that the table has already when those of a trial come")
	f.IntSliceVar(&o.Rules, "rules", []int{0}, "`numbers` of rules that match nothing, before the one that matches")
	timeVar(f, &o.Duration, "duration", time.Second, "of a trial with established sessions")
	f.IntVar(&o.Trials, "trials", 7, "trials under each set of conditions")
	f.BoolVar(&ndr, "ndr", false, "search the highest rate of new sessions without loss")
	f.StringVar(&pdr, "pdr", "", "search the highest rate with at most this `loss`, as in 0.5%")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench cps measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Goals, err = bench.SearchGoals(ndr, pdr, false, 0, false); err != nil {
			return inFlags(err)
		}
		for _, name := range []string{"duration", "trials"} {
			if len(o.Goals) > 0 && f.Changed(name) {
				return usagef("--%s: not with --ndr or --pdr, whose trials end with their sessions and are as many as the search needs", name)
			}
		}
		if o.Routers, err = scenario.FindRouters(routers); err != nil {
			return usagef("--router %w", err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.CPS(cmd.Context(), o)
		})
	}
	return cmd
}
