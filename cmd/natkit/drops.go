// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

func newDropsCommand(e *env) *cobra.Command {
	var every, total time.Duration
	var all, stacks bool
	var host, cause string
	var port uint16
	cmd := &cobra.Command{
		Use:   "drops",
		Short: "Show dropped packets by place, reason and cause",
		Long: `Show the packets that the kernel drops: how many, where in the kernel, for which
reason, in which namespace and on which interface, and the cause, where the packet
and the counters of connection tracking show it.

Causes: conntrack-table-full, nat-confirm (an entry could not be inserted into the
table: no source port left, or a race for one), firewall-rule, ip-forward-off,
rp-filter, no-route, martian (an address that is not valid there), mtu,
ttl-expired, queue-full, neighbour, listen-overflow, checksum, fragment,
cpu-backlog.

--cause shows the rows of one cause. --host and --port show the rows in which a
sampled packet has that address or port as source or destination, before or after
translation. The kernel counts all packets, but keeps only a sample of their
headers: each row shows how many sampled packets match, its count is for all of its
packets, and a rare packet in a flood may be missed.

Counting costs less than 0.1 us per packet in the kernel, so it can stay on during a
flood; with --stacks it costs about 5 us per packet. All namespaces of the
host are watched unless --netns names one. Packets dropped by a network card or by
XDP do not reach the stack and are not counted.

It needs root, or CAP_BPF and CAP_PERFMON. Without CAP_SYSLOG places are shown as
addresses, and without CAP_SYS_ADMIN interfaces of other namespaces as numbers.`,
		Example: `  natkit drops
  natkit drops --interval 1s --for 10s --netns gateway
  natkit drops --host 192.168.0.7 --port 443
  natkit drops --cause conntrack-table-full --for 30s --stacks
  natkit drops --for 5s --all -o json`,
		Args: noArgs,
	}
	timeVar(cmd.Flags(), &every, "interval", 5*time.Second, "time between two tables")
	timeVar(cmd.Flags(), &total, "for", 0, "how long to watch (default until interrupted)")
	cmd.Flags().BoolVar(&stacks, "stacks", false, "show the most frequent kernel stacks of each row")
	cmd.Flags().BoolVar(&all, "all", false, "also show harmless drops, such as packets for closed sockets")
	cmd.Flags().StringVar(&cause, "cause", "", "show only drops of this cause `CODE`")
	cmd.Flags().StringVar(&host, "host", "", "show only rows with a sampled packet from or to this `ADDRESS` or prefix")
	cmd.Flags().Uint16Var(&port, "port", 0, "show only rows with a sampled packet from or to this port `NUMBER`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case every < 100*time.Millisecond:
			return usagef("--interval %v: want 100ms or more", every)
		case total < 0:
			return usagef("--for %v: want a time, or nothing to watch until interrupted", total)
		}
		filter := report.DropFilter{All: all, Cause: snapshot.NATCause(cause)}
		if cause != "" && !slices.Contains(snapshot.NATCauses, filter.Cause) {
			return usagef("--cause %w", choice.Error(cause, dropCauses()...))
		}
		if port == 0 && cmd.Flags().Changed("port") {
			return usagef("--port 0: want 1 to 65535")
		}
		o := observe.DropOptions{Stacks: stacks, Match: observe.PacketMatch{Port: port}}
		var err error
		if o.Match.Host, err = hostOrPrefix("host", host); err != nil {
			return err
		}
		filter.Sampled = !o.Match.All()
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
			r := report.NewDrops(at, interval, got, filter)
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

// dropCauses are the codes that --cause knows.
func dropCauses() (codes []string) {
	for _, c := range snapshot.NATCauses {
		codes = append(codes, string(c))
	}
	return codes
}

// hostOrPrefix reads a flag that is an address or a prefix; "" is no prefix.
func hostOrPrefix(flag, text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, usagef("--%s %q: want an address or prefix, as in 192.168.0.7 or 10.0.0.0/8", flag, text)
	}
	return p.Masked(), nil
}
