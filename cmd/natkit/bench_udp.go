// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/kernel/netns"
	"natkit/internal/scenario"
	"natkit/internal/ui/report"
)

func newBenchUDPCommand(e *env) *cobra.Command {
	var o bench.UDPOptions
	var routers, sizes, rates []string
	var curve, ndr, rfc2544 bool
	var pdr string
	var wire wireFlags
	cmd := &cobra.Command{
		Use:   "udp",
		Short: "Measure UDP forwarding: cost per packet, frame loss, throughput without loss",
		Long: `Measure routers with UDP frames, generated in the kernel by XDP and sent through
separate namespaces. Nothing outside these namespaces is touched, unless --tx and
--rx name two interfaces with a router elsewhere between them.

Without --rate, --curve, --ndr, --pdr and --rfc2544 the generator, the router and
the sink share the number of CPUs in --cores, and run at full speed. Nothing can be
lost then. The cost of a frame is its CPU time, including generator and sink, which
are the same for all routers. CPU time of other programs is left out of the cost,
but not of the rate received.

With any of them the router has one CPU, and the generator another. A rate is frames
a second (250000, 500kpps, 1.5Mpps) or a share of what the router forwards under
overload (50%); it counts both directions together. The generator's clock is in the
kernel; slots that it misses are counted, and a trial with many is repeated.

--ndr and --pdr search the highest rate without loss, or with at most that loss, by
MLRsearch: half of 42 trials may lose more, because single trials on a shared machine
contradict each other. Disturbed trials are repeated, at most 210; figures that stay
disturbed are labelled. --rfc2544 is strict: trials of 60 seconds, and none may lose
a frame.

Trials of several routers are interleaved, except those of searches. A trial that the
hypervisor, other programs or missed slots disturbed is repeated; figures that stay
disturbed are labelled. natkit looks for every lost frame in the kernel's counters: the
note below the tables shows where they were lost, and how many remain unexplained.

Two interfaces. With --tx and --rx frames leave on the first, addressed to the router,
and are counted on the second:

  --tx ── router ── --rx

The router's MAC is that of the next hop to --target through --tx, from the routing
and neighbour tables, or --router-mac. Flows are UDP to port 9 of --target, from 63
ports of each address of --source; 32768 flows go to one target address. The router
must route --target to an address of --rx, forward from --source, and resolve the
next hop; --rx needs no route. Both interfaces are in --netns; --rx-netns names the
namespace of --rx if it is another.
  ip route add 198.19.0.0/16 via ADDRESS-OF-RX    on the router
  ip route add 198.19.0.0/16 via ROUTER dev TX    here, or --router-mac
Without a rate or a search natkit measures how much arrives under overload. The cost
and CPU time of the router are not known. Both interfaces get an XDP program, which
consumes only natkit's frames and is removed when natkit ends, however it ends;
nothing else is changed. They need native XDP, and --tx needs a driver that transmits
for XDP (ndo_xdp_xmit). An interface with a default route is refused without --force.

` + routerList(),
		Example: `  natkit bench udp --router none,nft,xdp-forward
  natkit bench udp --router none,nft --flows 1,1000,50000 --size 64,imix --cores 1,2
  natkit bench udp --router nft --both-ways --trials 3 --duration 200ms
  natkit bench udp --router nft,ebpf --flows 10000 --cores 1,2 --both-ways --apart
  natkit bench udp --router none,nft --rate 500kpps -o json
  natkit bench udp --router nft --curve --trials 3
  natkit bench udp --router none,nft --ndr --pdr 0.5%
  natkit bench udp --tx eth1 --rx eth2 --rate 100kpps,1Mpps
  natkit bench udp --tx eth1 --rx eth2 --router-mac 02:00:00:00:00:01 --ndr`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"none", "nft", "xdp-forward", "ebpf"}, "routers to measure, by `name`")
	f.StringSliceVar(&sizes, "size", []string{"64"}, "`lengths` of frames on the wire: 64 to 1518, or imix")
	f.IntSliceVar(&o.Flows, "flows", []int{1000}, "`numbers` of flows")
	f.IntSliceVar(&o.Cores, "cores", []int{1}, "`numbers` of CPUs that generator, router and sink share")
	f.BoolVar(&o.BothWays, "both-ways", false, "send half of the frames back, on the same flows")
	f.BoolVar(&o.Apart, "apart", false, "with --both-ways on several cores: each sends one way, so that a flow's two ways meet no core twice")
	f.StringSliceVar(&rates, "rate", nil, "offered `rates`: 500kpps, 1.5Mpps, 50%")
	f.BoolVar(&curve, "curve", false, "offer 10% to 120% in twelve steps")
	f.BoolVar(&ndr, "ndr", false, "search the highest rate without loss")
	f.StringVar(&pdr, "pdr", "", "search the highest rate with at most this `loss`, as in 0.5%")
	f.BoolVar(&rfc2544, "rfc2544", false, "search the highest rate without loss by RFC 2544, which takes long")
	timeVar(f, &o.Duration, "duration", time.Second, "of a trial")
	f.IntVar(&o.Trials, "trials", 7, "trials under each set of conditions")
	f.StringVar(&wire.tx, "tx", "", "`interface` to send from, to a router elsewhere")
	f.StringVar(&wire.rx, "rx", "", "`interface` where that router's frames arrive")
	f.StringVar(&wire.rxNetns, "rx-netns", "", "the network `namespace` of --rx, if not that of --tx")
	f.StringVar(&wire.source, "source", bench.DefaultSources.String(), "`network` that frames between interfaces come from")
	f.StringVar(&wire.target, "target", bench.DefaultTargets.String(), "`network` that they go to")
	f.StringVar(&wire.routerMAC, "router-mac", "", "`MAC` of the router towards --tx (default by the route to --target)")
	f.BoolVar(&wire.force, "force", false, "use also an interface that has a default route")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var err error
		if f.Changed("tx") || f.Changed("rx") {
			for _, name := range []string{"router", "cores", "both-ways", "apart"} {
				if f.Changed(name) {
					return usagef("--%s: not with --tx and --rx, between which the router is elsewhere and frames go one way", name)
				}
			}
			if o.Wire, err = wire.open(e.netns); err != nil {
				return err
			}
			defer o.Wire.TX.Netns.Close()
			defer o.Wire.RX.Netns.Close()
		} else {
			for _, name := range []string{"rx-netns", "source", "target", "router-mac", "force"} {
				if f.Changed(name) {
					return usagef("--%s: only with --tx and --rx", name)
				}
			}
			if e.netns != "" {
				return usagef("--netns %q: bench udp measures in its own namespaces, except with --tx and --rx", e.netns)
			}
			if o.Routers, err = scenario.FindRouters(routers); err != nil {
				return usagef("--router %w", err)
			}
		}
		for _, text := range sizes {
			size, err := bench.ParseFrameSize(text)
			if err != nil {
				return usagef("--size: %w", err)
			}
			o.Sizes = append(o.Sizes, size)
		}
		for _, text := range rates {
			rate, err := bench.ParseRate(text)
			if err != nil {
				return usagef("--rate: %w", err)
			}
			o.Rates = append(o.Rates, rate)
		}
		if curve {
			o.Rates = append(o.Rates, bench.CurveRates()...)
		}
		if o.Goals, err = bench.SearchGoals(ndr, pdr, rfc2544, o.Duration, f.Changed("duration")); err != nil {
			return inFlags(err)
		}
		return showMeasured(cmd.Context(), e, *out, func(about bench.About) (*bench.Result, error) {
			o.About = about
			return bench.UDP(cmd.Context(), o)
		})
	}
	return cmd
}

// wireFlags name two interfaces and what goes between them.
type wireFlags struct {
	tx, rx, rxNetns           string
	source, target, routerMAC string
	force                     bool
}

// open reads the flags and opens the namespaces, of which ref is that of both
// interfaces where no other is named.
func (w *wireFlags) open(ref string) (*bench.Wire, error) {
	wire := &bench.Wire{TX: bench.Port{Device: w.tx}, RX: bench.Port{Device: w.rx}, Force: w.force}
	var err error
	if wire.Sources, err = bench.ParsePlayed(w.source); err != nil {
		return nil, usagef("--source %w", err)
	}
	if wire.Targets, err = bench.ParsePlayed(w.target); err != nil {
		return nil, usagef("--target %w", err)
	}
	if w.routerMAC != "" {
		if wire.RouterMAC, err = net.ParseMAC(w.routerMAC); err != nil || len(wire.RouterMAC) != 6 {
			return nil, usagef("--router-mac %q: want a MAC such as 02:00:00:00:00:01", w.routerMAC)
		}
	}
	if wire.TX.Netns, err = netns.Open(ref); err != nil {
		return nil, err
	}
	if wire.RX.Netns, err = netns.Open(cmp.Or(w.rxNetns, ref)); err != nil {
		wire.TX.Netns.Close()
		return nil, err
	}
	return wire, nil
}

// routerList says which routers there are.
func routerList() string { return listed(scenario.Routers()) }

func listed(routers []bench.Router) string {
	var b strings.Builder
	b.WriteString("Routers:\n")
	for _, r := range routers {
		b.WriteString(report.Wrap(fmt.Sprintf("  %-15s ", r.Name()), strings.Repeat(" ", 18), r.Describe()))
	}
	return strings.TrimSuffix(b.String(), "\n")
}
