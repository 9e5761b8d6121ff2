// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
)

func newDropsCommand(e *env) *cobra.Command {
	var every, total time.Duration
	var all, stacks bool
	cmd := &cobra.Command{
		Use:   "drops",
		Short: "Show dropped packets by place, reason and cause",
		Long: `Count the packets that the kernel drops, by the place in the kernel, the kernel's
reason, the namespace and the interface, and say what the drop means for NAT
where that can be told from the packet and from conntrack's counters.

Causes: conntrack-table-full, nat-confirm (an entry could not be put into the
table: source ports used up, or a race for one), firewall-rule, ip-forward-off,
rp-filter, no-route, martian (an address that no packet may have there), mtu,
ttl-expired, queue-full, neighbour, listen-overflow, checksum, fragment,
cpu-backlog.

Counting happens in the kernel and costs less than 0.1 us a packet, so that it
can stay on during a flood; with --stacks some 5 us. All namespaces of the host
are watched unless --netns names one. Packets dropped by a network card, or by
XDP, never were the stack's and are not seen.

It needs root, or CAP_BPF and CAP_PERFMON; without CAP_SYSLOG places are shown by
their addresses, and without CAP_SYS_ADMIN interfaces of other namespaces by
their numbers.

With -o json each interval is one object in a line of its own: at, interval_s,
rows (count, location, reason, netns, namespace, interface, cause, benign,
samples, stacks), lost_events and benign_packets, which is the packets in rows
that were left out for want of --all.`,
		Example: `  natkit drops
  natkit drops --interval 1s --for 10s --netns gateway
  natkit drops --for 30s --stacks
  natkit drops --for 5s --all -o json`,
		Args: noArgs,
	}
	timeVar(cmd.Flags(), &every, "interval", 5*time.Second, "time between two tables")
	timeVar(cmd.Flags(), &total, "for", 0, "how long to watch (default until interrupted)")
	cmd.Flags().BoolVar(&stacks, "stacks", false, "show the most frequent kernel stacks of each row")
	cmd.Flags().BoolVar(&all, "all", false, "show also what is benign, such as packets of closed sockets")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case every < 100*time.Millisecond:
			return usagef("--interval %v: want 100ms or more", every)
		case total < 0:
			return usagef("--for %v: want a time, or nothing to watch until interrupted", total)
		}
		o := observe.DropOptions{Stacks: stacks}
		if e.netns != "" {
			h, err := netns.Open(e.netns)
			if err != nil {
				return err
			}
			defer h.Close()
			o.Netns = h.Inode()
		}
		d, err := observe.OpenDrops(o)
		if err != nil {
			return err
		}
		defer d.Close()

		own := (*netns.Handle)(nil).Inode()
		var totals report.DropTotals
		err = d.Watch(cmd.Context(), every, total, func(at time.Time, interval time.Duration, got snapshot.Drops) error {
			r := report.NewDrops(at, interval, got, all)
			if *out == "json" {
				return report.JSONLine(e.stdout, r)
			}
			totals.Add(r)
			return r.Text(e.stdout, own)
		})
		if err == nil && *out == "text" {
			err = totals.Text(e.stdout, own)
		}
		return unlessPipeClosed(err)
	}
	return cmd
}
