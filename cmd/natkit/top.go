// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/ui/live"
	"natkit/internal/ui/report"
	"natkit/internal/ui/tui"
)

func newTopCommand(e *env) *cobra.Command {
	o := live.Options{}
	var total time.Duration
	var once, noDump, noEvents bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show table, flows, drops, top talkers and findings on one live screen",
		Long: `Watch a namespace on one live screen: how full the connection tracking table is and
when it will be full, flows that start and end, who has the most entries, the ports
used by source NAT, drops by cause, CPUs, and the doctor's findings as they appear.
The flows that carry most are listed with bytes and packets per second if connection
tracking counts them (sysctl -w net.netfilter.nf_conntrack_acct=1, for flows that
start from then on); the eBPF engine always counts. The capital letter in a column's
name sorts the focused panel by that column: tab to the panel, then E for Entries.
Press h for all keys.

Cheap values are read every --interval, and the facts behind findings once per
--window. The entries of the table are also read once per window, for at most
1 % of the time: the fourth line shows how long the last reading took and how old it
is, and findings of windows in between use it. With --no-dump the entries are not
read. Flows are counted by kernel events, which cost the kernel some time per flow;
--no-events turns that off.

If a natkit engine or accel is running, a line at the top shows it, and the last
panel shows its details. Sessions, ports and drops of the eBPF engine, which are not
in the kernel's table, are shown beside the kernel's.

If no screen can be drawn (a pipe, TERM=dumb) use --once, which watches for one short
window and prints everything as text, or -o json. It needs root; without root the
screen shows less. NO_COLOR turns colours off.`,
		Example: `  natkit top
  natkit top --netns gateway --window 1m
  natkit top --once --no-dump
  natkit top --for 1m -o json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	timeVar(f, &o.Interval, "interval", time.Second, "time between two readings of cheap values")
	timeVar(f, &o.Window, "window", 10*time.Second, "time between two judgements, and between two readings of the table")
	f.BoolVar(&noDump, "no-dump", false, "do not read the entries of the conntrack table")
	f.BoolVar(&noEvents, "no-events", false, "do not count flows by events")
	f.BoolVar(&once, "once", false, "print once, as text, and end")
	timeVar(f, &total, "for", 0, "with -o json: how long to watch (default until interrupted)")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case o.Interval < 100*time.Millisecond:
			return usagef("--interval %v: want 100ms or more", o.Interval)
		case o.Window < o.Interval:
			return usagef("--window %v: want at least the interval, %v", o.Window, o.Interval)
		case total < 0 || total > 0 && (*out != "json" || once):
			return usagef("--for %v: want a time, with -o json and without --once", total)
		}
		o.Dump, o.Events = !noDump, !noEvents
		watch := func(ctx context.Context, ref string, fn func(*live.Moment) error) error {
			h, err := netns.Open(ref)
			if err != nil {
				return err
			}
			defer h.Close()
			in := o
			in.Netns = h
			return live.Watch(ctx, in, fn)
		}
		switch {
		case once:
			return topOnce(cmd.Context(), e, watch, *out)
		case *out == "json":
			over := errors.New("the time is over") // and something was said, however long it took to begin
			var watched time.Duration
			err := watch(cmd.Context(), e.netns, func(m *live.Moment) error {
				watched += time.Duration(m.Seconds * float64(time.Second))
				if err := report.JSONLine(e.stdout, m); err != nil {
					return err
				}
				if total > 0 && watched >= total {
					return over
				}
				return nil
			})
			if errors.Is(err, over) {
				return nil
			}
			return unlessPipeClosed(err)
		case !isTerminal(e.stdout):
			return usagef("natkit top draws on a terminal, which standard output is not: use --once or -o json")
		}
		h, err := netns.Open(e.netns) // its name may be wrong: say so before the screen is taken
		if err != nil {
			return err
		}
		h.Close()
		screen, err := tui.Open()
		if errors.Is(err, tui.ErrTerminal) {
			return usagef("%w: use --once or -o json", err)
		}
		if err != nil {
			return err
		}
		// Besides those that end every command: without, the terminal would stay as it is.
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGQUIT)
		defer stop()
		return tui.Run(ctx, screen, tui.Options{Netns: e.netns, Watch: watch, Namespaces: live.Namespaces})
	}
	return cmd
}

// topOnce waits for the first window that was judged.
func topOnce(ctx context.Context, e *env, watch func(context.Context, string, func(*live.Moment) error) error, out string) error {
	var last *live.Moment
	done := errors.New("seen")
	line := newProgressLine(e)
	line.show("watching ...")
	err := watch(ctx, e.netns, func(m *live.Moment) error {
		if last = m; m.Judged != nil {
			return done
		}
		return nil
	})
	line.clear()
	if err != nil && !errors.Is(err, done) {
		return err
	}
	if last == nil {
		return ctx.Err()
	}
	if out == "json" {
		return unlessPipeClosed(report.JSON(e.stdout, last))
	}
	_, err = io.WriteString(e.stdout, tui.Text(last, terminalWidth(e.stdout), !localeIsUTF8()))
	return unlessPipeClosed(err)
}
