// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

func newSubscribersCommand(e *env) *cobra.Command {
	var o control.SubscriberOptions
	cmd := &cobra.Command{
		Use:   "subscribers [ADDRESS]",
		Short: "Show who uses how many sessions, ports and port blocks (engine ebpf)",
		Long: `Show the subscribers of engine ebpf that have a session or a port now: pool, class,
external address, sessions, ports, port blocks, how much of the limits of its class each
has, the packets it was refused by reason, and since when it is there. A subscriber is an
internal address, or a prefix (subscribers.by in the rule file); it stands in one row for
each pool.

Ports count in use and in hold-down, of all protocols together, if the rule file has
subscribers or blocks. The share is that of the limit that is nearest. Refused are
packets that would have opened a session; the reasons are those of natkit status.

ADDRESS, an address or a prefix, shows only subscribers that have an internal or external
address in it. Totals of pools and classes are those of all that match.`,
		Example: `  natkit subscribers
  natkit subscribers --by refused --rows 20
  natkit subscribers 100.64.3.0/24 --class business
  natkit subscribers 203.0.113.7 -o json`,
		Args: asUsage(cobra.MaximumNArgs(1)),
	}
	f := cmd.Flags()
	f.StringVar(&o.By, "by", "ports", "sort by ports, sessions, blocks, refused or share")
	f.IntVarP(&o.Rows, "rows", "n", snapshot.TopN, "rows to show; 0 is all")
	f.StringVar(&o.Class, "class", "", "show only subscribers of this `CLASS` of the rule file")
	f.StringVar(&o.Pool, "pool", "", "show only subscribers of this `POOL`")
	out := outputFlag(cmd)
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if !slices.Contains(control.SubscriberOrders(), o.By) {
			return usagef("--by %w", choice.Error(o.By, control.SubscriberOrders()...))
		}
		if o.Rows < 0 {
			return usagef("--rows %d: want 0 or more", o.Rows)
		}
		if len(args) > 0 {
			var ok bool
			if o.Of, ok = ipv4Prefix(args[0]); !ok {
				return usagef("%q: want an IPv4 address or prefix", args[0])
			}
		}
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		s, err := control.ReadSubscribers(ns, o)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, s)
		}
		return unlessPipeClosed(report.SubscribersText(e.stdout, s))
	}
	return cmd
}

// ipv4Prefix reads an address or a prefix.
func ipv4Prefix(text string) (p netip.Prefix, ok bool) {
	if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
		return netip.PrefixFrom(a, 32), true
	}
	p, err := netip.ParsePrefix(text)
	return p, err == nil && p.Addr().Is4()
}
