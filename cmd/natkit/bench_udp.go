// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/bench"
	"natkit/report"
	"natkit/story"
)

func newBenchUDPCommand(e *env) *cobra.Command {
	o := bench.UDPOptions{Natkit: version()}
	var routers, sizes, rates []string
	var curve, ndr, rfc2544 bool
	var pdr string
	cmd := &cobra.Command{
		Use:   "udp",
		Short: "Measure what routers make of UDP frames: cost, loss at a rate, zero-loss rate",
		Long: `Measure routers with UDP frames, made in the kernel by XDP and sent through
namespaces of their own. Nothing outside these namespaces is touched.

Without --rate, --curve, --ndr, --pdr and --rfc2544 the generator, the router and
the sink share the CPUs that --cores counts, and go as fast as they can. Nothing
can be lost then; the CPU time a frame takes is its cost, generator and sink
included, which are the same for all routers. What other programs had of the CPUs
is left out of the cost, but not of the rate received.

With them the router has one CPU of its own, and the generator another. A rate is
frames a second (250000, 500kpps, 1.5Mpps) or a share of what the router forwards
under overload (50%), and counts both ways together. The generator's clock is in
the kernel; slots it misses are counted, and a trial with many is repeated.

--ndr and --pdr search the highest rate without loss, or with at most that much,
by MLRsearch: of 21 trials half may lose more, because single trials on a shared
machine contradict each other. --rfc2544 is strict: trials of 60 seconds, none
may lose a frame.

Trials of several routers are interleaved. A trial that was disturbed, by the
hypervisor, other programs or missed slots, is repeated; what could not be had
undisturbed is labelled. Every lost frame is looked for in the kernel's counters:
the note below the tables says where they went, and what stays unexplained.

` + routerList(),
		Example: `  natkit bench udp --router none,nft,xdp-forward
  natkit bench udp --router none,nft --flows 1,1000,50000 --size 64,imix --cores 1,2
  natkit bench udp --router nft --both-ways --trials 3 --duration 200ms
  natkit bench udp --router none,nft --rate 500kpps -o json
  natkit bench udp --router nft --curve --trials 3
  natkit bench udp --router none,nft --ndr --pdr 0.5%`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringSliceVar(&routers, "router", []string{"none", "nft", "xdp-forward"}, "routers to measure, by `name`")
	f.StringSliceVar(&sizes, "size", []string{"64"}, "`lengths` of frames on the wire: 64 to 1518, or imix")
	f.IntSliceVar(&o.Flows, "flows", []int{1000}, "`numbers` of flows")
	f.IntSliceVar(&o.Cores, "cores", []int{1}, "`numbers` of CPUs that generator, router and sink share")
	f.BoolVar(&o.BothWays, "both-ways", false, "send half of the frames back, on the same flows")
	f.StringSliceVar(&rates, "rate", nil, "offered `rates`: 500kpps, 1.5Mpps, 50%")
	f.BoolVar(&curve, "curve", false, "offer 10% to 120% in twelve steps")
	f.BoolVar(&ndr, "ndr", false, "search the highest rate without loss")
	f.StringVar(&pdr, "pdr", "", "search the highest rate with at most this `loss`, as in 0.5%")
	f.BoolVar(&rfc2544, "rfc2544", false, "search the highest rate without loss by RFC 2544, which takes long")
	f.DurationVar(&o.Duration, "duration", time.Second, "of a trial")
	f.IntVar(&o.Trials, "trials", 7, "trials under each set of conditions")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench udp measures in namespaces that it makes", e.netns)
		}
		var err error
		if o.Routers, err = story.FindRouters(routers); err != nil {
			return usagef("--router: %w", err)
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
			return usagef("%w", err)
		}
		o.Command = calledAs()
		progress := newProgressLine(e)
		o.Progress = progress.show
		res, err := bench.UDP(cmd.Context(), o)
		progress.clear()
		var option *bench.OptionError
		if errors.As(err, &option) {
			return usagef("%w", err)
		}
		if err != nil {
			return err
		}
		show := report.Result
		if *out == "json" {
			show = func(w io.Writer, r *bench.Result) error { return report.JSON(w, r) }
		}
		return show(e.stdout, res)
	}
	return cmd
}

// routerList says which routers there are.
func routerList() string {
	var b strings.Builder
	b.WriteString("Routers:\n")
	for _, r := range story.Routers() {
		b.WriteString("  " + r.Name() + strings.Repeat(" ", max(16-len(r.Name()), 1)) + r.Describe() + "\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}
