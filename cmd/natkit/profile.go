// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/ui/report"
)

func newProfileCommand(e *env) *cobra.Command {
	o := profileOptions{}
	cmd := &cobra.Command{
		Use:   "profile",
		Short: "Measure where the kernel spends its time below nf_hook_slow",
		Long: `Sample what every CPU is doing, several hundred times a second, and show where the
kernel spends its time below one function: by default nf_hook_slow, through which
the kernel calls every function on the netfilter hooks.

The first table lists what that function calls, wherever it is on the stack; the
second is the call tree from its outermost call. The samples of a function include
those of all functions that it calls: a bridge's hook functions (br_nf_pre_routing,
ip_sabotage_in) continue the packet's path themselves, so later work counts as
theirs too. Functions that the compiler jumps to instead of calling are not on the
stack; natkit adds conntrack's hook functions, which end that way.

The whole machine is sampled, because the stack does not show the namespace of a
packet. With --netns natkit shows only system calls of that namespace's tasks;
interrupts and softirqs, where packets are forwarded, belong to no task, and natkit
reports how much was left out. Code that runs with interrupts disabled is attributed
to the point where they are enabled again.

-o html and -o svg draw a flame graph in one self-contained file: a click zooms, /
searches, and colours show what a function does for a packet (tracking, NAT, rules,
bridge, driver, the rest of the stack). -o folded prints one line per stack for other
programs that draw. These and -o pprof, for "go tool pprof", contain all kernel
stacks unless --root is given (-o pprof always).

--from reads a profile that -o pprof wrote instead of sampling; --diff compares with
one: shares of all time, before and after, as text, json, html or svg.`,
		Example: `  natkit profile --for 10s
  natkit profile --root net_rx_action --min 2
  natkit profile --for 10s -o html --file flame.html
  natkit profile --cpu 0,2-3 --root all --for 3s -o json
  natkit profile --for 30s -o pprof --file before.pb.gz
  natkit profile --for 30s --diff before.pb.gz -o html --file change.html`,
		Args: noArgs,
	}
	f := cmd.Flags()
	timeVar(f, &o.For, "for", 10*time.Second, "how long to sample")
	f.IntVar(&o.Frequency, "frequency", observe.DefaultFrequency, "samples per second and CPU")
	f.StringVar(&o.cpus, "cpu", "", "only these CPUs, as in `0,2-3`")
	f.StringVar(&o.root, "root", "nf_hook_slow", `kernel function to start from, or "all"`)
	f.Float64Var(&o.least, "min", 1, "leave out branches below so many `percent` of the root, in text")
	f.StringVar(&o.file, "file", "", "write to this file instead of standard output")
	f.StringVar(&o.from, "from", "", "show the profile in `FILE`, written by -o pprof, instead of sampling")
	f.StringVar(&o.diff, "diff", "", "compare with the profile in `FILE`, written by -o pprof")
	out := outputFlag(cmd, "text", "json", "html", "svg", "folded", "pprof")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if err := o.check(cmd, e, *out); err != nil {
			return err
		}
		var before *observe.Profile
		if o.diff != "" {
			if before, err = readProfile(o.diff); err != nil {
				return err
			}
		}
		w := e.stdout
		if o.file != "" { // before the wait, not after it
			f, err := os.Create(o.file)
			if err != nil {
				return fmt.Errorf("write profile: %w", err)
			}
			defer func() {
				if closeErr := f.Close(); err == nil {
					err = closeErr
				}
			}()
			w = f
		}
		p, err := o.take(cmd, e)
		if err != nil {
			return err
		}
		if o.from == "" {
			e.cutShort(cmd.Context(), p.Duration, o.For)
		}
		return unlessPipeClosed(o.write(w, p, before, *out))
	}
	return cmd
}

type profileOptions struct {
	observe.ProfileOptions
	cpus, root, file, from, diff string
	least                        float64
}

// check refuses what makes no sense, and fits the root to the output.
func (o *profileOptions) check(cmd *cobra.Command, e *env, out string) (err error) {
	set := cmd.Flags().Changed
	if o.from != "" {
		for _, name := range []string{"for", "frequency", "cpu", "netns"} {
			if set(name) {
				return usagef("--%s and --from exclude each other: the profile in a file is what it is", name)
			}
		}
	}
	if o.CPUs, err = parseCPUs(o.cpus); err != nil {
		return err
	}
	pictures := out == "html" || out == "svg" || out == "folded" || out == "pprof"
	switch {
	case o.For <= 0:
		return usagef("--for %v: want a time", o.For)
	case o.Frequency < 1 || o.Frequency > observe.MaxFrequency:
		return usagef("--frequency %d: want 1 to %d", o.Frequency, observe.MaxFrequency)
	case o.least < 0 || o.least > 100:
		return usagef("--min %g: want 0 to 100", o.least)
	case o.diff != "" && (out == "folded" || out == "pprof"):
		return usagef("--diff: %s holds one profile; want text, json, html or svg", out)
	case (out == "pprof" || out == "html" || out == "svg") && o.file == "" && isTerminal(e.stdout):
		return usagef("--output %s is not for a terminal: give --file, or pipe it", out)
	case pictures && !set("root"):
		o.root = observe.AllFunctions
	case o.from == "" && o.root != observe.AllFunctions:
		known, err := observe.HasFunction(o.root)
		if err != nil {
			return err
		}
		if !known {
			return usagef("--root %q: this kernel has no function of that name (see /proc/kallsyms)", o.root)
		}
	}
	return nil
}

// take reads the profile, or takes one.
func (o *profileOptions) take(cmd *cobra.Command, e *env) (*observe.Profile, error) {
	if o.from != "" {
		return readProfile(o.from)
	}
	if e.netns != "" {
		h, err := netns.Open(e.netns)
		if err != nil {
			return nil, err
		}
		defer h.Close()
		o.Netns = h.Inode()
	}
	progress := newProgressLine(e)
	progress.show("looking for %v ...", o.For)
	defer progress.clear()
	return observe.TakeProfile(cmd.Context(), o.ProfileOptions)
}

func (o *profileOptions) write(w io.Writer, p, before *observe.Profile, out string) error {
	title := "Kernel time, whole"
	if o.root != observe.AllFunctions {
		title = "Kernel time below " + o.root
	}
	flame := report.Flame{Title: title, Root: o.root, After: p, Before: before}
	switch {
	case out == "html":
		return flame.HTML(w)
	case out == "svg":
		return flame.SVG(w)
	case out == "folded":
		return report.WriteFolded(w, p, o.root)
	case out == "pprof":
		return report.WriteProfile(w, p)
	case before != nil && out == "json":
		return report.JSON(w, report.NewProfileDiff(before, p, o.root))
	case before != nil:
		return report.NewProfileDiff(before, p, o.root).Text(w)
	case out == "json":
		return report.JSON(w, report.NewProfile(p, o.root))
	}
	return report.NewProfile(p, o.root).Text(w, o.least)
}

func readProfile(name string) (*observe.Profile, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := report.ReadProfile(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// parseCPUs reads a list as the kernel writes them: 0,2-3.
func parseCPUs(list string) (cpus []int, err error) {
	const most = 1 << 14
	for part := range strings.SplitSeq(list, ",") {
		if list == "" {
			return nil, nil
		}
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err1 := strconv.ParseUint(first, 10, 16)
		b, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || a > b || b >= most {
			return nil, usagef("--cpu %q: want numbers and ranges, as in 0,2-3", list)
		}
		for n := a; n <= b; n++ {
			cpus = append(cpus, int(n))
		}
	}
	return cpus, nil
}
