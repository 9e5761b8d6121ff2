// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"natkit/observe"
	"natkit/report"
)

func newProfileCommand(e *env) *cobra.Command {
	o := observe.ProfileOptions{}
	var root, file string
	var least float64
	cmd := &cobra.Command{
		Use:   "profile",
		Short: "Show where the kernel spends its time below nf_hook_slow",
		Long: `Look at what every CPU is doing, some hundred times a second, and show where the
kernel spends its time below one function: by default nf_hook_slow, through which
the kernel calls everything that hangs on the netfilter hooks.

The first table is what that function calls, wherever it is on the stack; the
second the tree of calls from its outermost call on. A function's samples hold
those of all it calls: a bridge's hook functions (br_nf_pre_routing,
ip_sabotage_in) carry the packet on themselves, so what follows is theirs too.
Functions that the compiler jumps to instead of calling are not on the stack;
conntrack's hook functions, which end that way, are put back.

The whole machine is looked at: which namespace a packet is in is not on the
stack, so --netns does not apply. What runs with interrupts off is seen where
they come on again.

-o json is one object: root, interval_s, frequency_hz, cpus, samples (total,
kernel, user, idle, lost, root), called and tree. -o pprof holds all kernel
stacks, whatever the root, for "go tool pprof".`,
		Example: `  natkit profile --for 10s
  natkit profile --root net_rx_action --min 2
  natkit profile --root all --for 3s -o json
  natkit profile --for 30s -o pprof --file kernel.pb.gz && go tool pprof -top kernel.pb.gz`,
		Args: noArgs,
	}
	cmd.Flags().DurationVar(&o.For, "for", 10*time.Second, "how long to look")
	cmd.Flags().IntVar(&o.Frequency, "frequency", observe.DefaultFrequency, "looks a second at every CPU")
	cmd.Flags().StringVar(&root, "root", "nf_hook_slow", `kernel function to start from, or "all"`)
	cmd.Flags().Float64Var(&least, "min", 1, "leave out branches below so many `percent` of the root")
	cmd.Flags().StringVar(&file, "file", "", "write to this file instead of standard output")
	out := outputFlag(cmd, "text", "json", "pprof")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		switch {
		case e.netns != "":
			return usagef("--netns %q: a profile is of the whole machine", e.netns)
		case o.For <= 0:
			return usagef("--for %v: want a time", o.For)
		case o.Frequency < 1 || o.Frequency > observe.MaxFrequency:
			return usagef("--frequency %d: want 1 to %d", o.Frequency, observe.MaxFrequency)
		case least < 0 || least > 100:
			return usagef("--min %g: want 0 to 100", least)
		case *out == "pprof" && file == "" && isTerminal(e.stdout):
			return usagef("--output pprof is not for a terminal: give --file, or pipe it")
		}
		if root != observe.AllFunctions {
			known, err := observe.HasFunction(root)
			if err != nil {
				return err
			}
			if !known {
				return usagef("--root %q: this kernel has no function of that name (see /proc/kallsyms)", root)
			}
		}
		w := e.stdout
		if file != "" {
			f, err := os.Create(file)
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
		progress := newProgressLine(e)
		progress.show("looking for %v ...", o.For)
		p, err := observe.TakeProfile(cmd.Context(), o)
		progress.clear()
		if err != nil {
			return err
		}
		switch *out {
		case "pprof":
			return unlessPipeClosed(report.WriteProfile(w, p))
		case "json":
			return unlessPipeClosed(report.JSON(w, report.NewProfile(p, root)))
		}
		return unlessPipeClosed(report.NewProfile(p, root).Text(w, least))
	}
	return cmd
}

// isTerminal says whether people, and no program, read what is written to w.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
