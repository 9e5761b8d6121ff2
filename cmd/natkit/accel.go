// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
)

func newAccelCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "accel",
		Short: "Accelerate the kernel's own NAT; its rules stay as they are",
		Long: `Accelerate the NAT that the kernel already does. The rules of Docker, Kubernetes,
firewalld or your own, their filters and connection tracking stay in place and keep
deciding. The first packets of a flow take the normal path through the stack. Once
both ends have sent and a packet was seen leaving, natkit adds a fast-path entry:
later packets are translated and forwarded at the ingress interface, in XDP or tc,
as connection tracking would.

Once a second one packet of each direction goes through the stack again, and its
connection tracking entry is revalidated. So a new rule, a deleted entry, another
route, link or neighbour takes effect within a second, without a running process,
and the kernel's timeouts do not change. SYN, FIN, RST, fragments, IP options, an
expiring TTL, packets above the MTU, ICMP and flows with a helper always go through
the stack.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newAccelOnCommand(e), newAccelOffCommand(e), newAccelStatusCommand(e))
	return cmd
}

func newAccelOnCommand(e *env) *cobra.Command {
	var o control.AccelOptions
	var attach string
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "on INTERFACE...",
		Short: "Turn acceleration on between these interfaces",
		Long: `Accelerate flows that arrive and leave on these interfaces. For containers name
the bridge, not its ports: eth0 docker0.

TCP is accelerated only if connection tracking does not check TCP windows, because
it no longer sees every packet: --tcp-liberal sets nf_conntrack_tcp_be_liberal to 1
until natkit accel off. Open TCP connections then continue, without a window check
until they end. Without the flag TCP goes through the stack as before.

Whatever the rules and the machine do to every packet of a flow happens to only one
packet per second. natkit looks for shaping, limits, quotas, queues, rules that
change packets or match their length, TOS or TTL, accounting, IPsec, routing by
TOS, and other programs and chains on these interfaces. If it finds any, it lists
them and refuses to start without --bypass. Rules that packets of established flows
never reach are not listed. What is decided once for a whole flow still holds:
filters, routing by mark, and a bridge's VLANs.

Where net.bridge.bridge-nf-call-iptables is 1, as Docker and Kubernetes set it,
packets from a bridge's ports have their destination translated before natkit sees
them, so their flow cannot be identified. Requests from containers to a service
address, and replies to a masqueraded client, go through the stack; the other
direction of such a flow is accelerated, and all other flows in both directions.

Either everything is set up or nothing. The old setting is saved before it is
changed, and natkit accel off restores it, even after natkit was killed.`,
		Example: `  natkit accel on eth0 docker0 --dry-run
  natkit accel on eth0 docker0 --tcp-liberal
  natkit accel on eth0 eth1 --tcp-liberal --attach xdp --netns gateway`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	f := cmd.Flags()
	f.StringVar(&attach, "attach", "auto", "attach point of the programs: auto, xdp or tc")
	f.BoolVar(&o.TCPLiberal, "tcp-liberal", false, "accelerate TCP too; connection tracking then does not check its windows")
	f.BoolVar(&o.Bypass, "bypass", false, "start although packets bypass what is configured here per packet")
	f.IntVar(&o.Flows, "flows", 0, "maximum `number` of flows (default nf_conntrack_max, at most 262144)")
	f.BoolVar(&dryRun, "dry-run", false, "show what would be done and change nothing")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var err error
		if o.Attach, err = control.ParseAttach(attach); err != nil {
			return usagef("--attach %w", err)
		}
		if f.Changed("flows") && (o.Flows < control.MinAccelFlows() || o.Flows > control.MaxAccelFlows) {
			return usagef("--flows %d: want %d to %d", o.Flows, control.MinAccelFlows(), control.MaxAccelFlows)
		}
		o.Interfaces = args
		if o.Namespace, err = netns.Open(e.netns); err != nil {
			return err
		}
		defer o.Namespace.Close()
		if o.Chains, err = probe.Chains(o.Namespace); err != nil {
			return fmt.Errorf("look for rules that packets would bypass: %w", err)
		}
		r := &report.AccelPlan{Done: !dryRun}
		if dryRun {
			r.AccelPlan, err = control.PlanAccel(o)
		} else {
			if _, err := control.Clean(); err != nil {
				return err
			}
			r.AccelPlan, err = control.AccelOn(cmd.Context(), o)
		}
		if err != nil {
			return next(cmd, args, err, "")
		}
		return e.show(*out, r)
	}
	return cmd
}

func newAccelOffCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "off",
		Short: "Turn acceleration off without losing a connection",
		Long: `Turn acceleration off. Packets go through the stack again, which kept the entry of
every flow. The settings of the namespace are restored, except those that
somebody else has changed since: natkit reports these and leaves them.

If TCP was accelerated, connection tracking did not follow its windows and would
treat packets of open connections as invalid. So before natkit restores
nf_conntrack_tcp_be_liberal, it marks every open IPv4 TCP connection as exempt from
the window check until it ends; later connections are checked as before. If they
cannot be marked, the setting stays, and natkit shows how to restore it later.

With XDP, the driver may reset the card's queues when the program is removed and
lose the packets in them; natkit cannot prevent that.`,
		Example: "  natkit accel off\n  natkit accel off --netns gateway",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		kept, err := control.AccelOff(ns)
		if err != nil {
			return err
		}
		r := &report.AccelOff{Kept: append([]string{}, kept...)}
		return e.show(*out, r)
	}
	return cmd
}

func newAccelStatusCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what is accelerated, what is not, and why",
		Long: `Show what is accelerated, how many packets bypassed the stack, and how many went
through it, by reason. Counters start when acceleration is turned on. A problem is
reported if shaping, filters or other programs that accelerated packets bypass were
set up since, or if a link or a setting has changed.

natkit accel status does not show what a packet saves: that depends on the rules,
the cards and the packet, and the path not taken cannot be measured here. natkit
hooks --cost shows what the rules cost, natkit bench udp compares both paths.`,
		Example: "  natkit accel status\n  natkit accel status -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		status, err := control.ReadAccelStatus(ns)
		if err != nil {
			return err
		}
		chains, err := probe.Chains(ns)
		if err == nil {
			err = status.CheckBypassed(ns, chains)
		}
		if err != nil {
			return fmt.Errorf("look for rules that packets bypass: %w", err)
		}
		r := report.NewAccelStatus(status)
		return e.show(*out, r)
	}
	return cmd
}
