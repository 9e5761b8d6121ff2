// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/netns"
	"natkit/observe"
	"natkit/report"
)

func newHooksCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hooks",
		Short: "List what every packet walks through: the functions on the netfilter hooks",
		Long: `List the functions on the netfilter hooks of a namespace, by family, hook and
priority, in the order in which a packet meets them, with the chain of nftables
or the table of iptables behind them where there is one.

Functions behind a └ are not on the hook themselves: the NAT core, above them,
asks these chains about the first packet of a flow.

The kernel's own lists are read by a program, which needs root or CAP_BPF and
CAP_PERFMON; without, the kernel is asked by netlink, if it was built for that
(CONFIG_NETFILTER_NETLINK_HOOK). With -o json the answer is one object: netns and
hooks (family, hook, priority, function, owner, device, chain, via).`,
		Example: `  natkit hooks
  natkit hooks --netns gateway
  natkit hooks --netns pid:1234 -o json`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		h, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer h.Close()
		hooks, err := observe.Hooks(h)
		if err != nil {
			return err
		}
		r := &report.Hooks{Netns: h.Inode(), Hooks: hooks}
		if *out == "json" {
			return unlessPipeClosed(report.JSON(e.stdout, r))
		}
		return unlessPipeClosed(r.Text(e.stdout))
	}
	return cmd
}
