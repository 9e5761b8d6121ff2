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
		Long: `Accelerate the NAT that is there: rules of Docker, Kubernetes, firewalld or your
own, with their filters and their connection tracking, stay as they are and go on
deciding. The first packets of a flow go through them. When both ends have sent, and
a packet was seen leaving through the stack, those that follow are translated and
forwarded where they come in, by XDP or tc, as connection tracking has it.

Once a second one packet of each direction goes through the stack again, and
connection tracking is asked. So a new rule, a deleted connection, another route, link
or neighbour takes effect within a second, with no process running, and the kernel's
time-outs are as before. SYN, FIN, RST, fragments, IP options, a TTL that ends, what
is too big, ICMP, and flows with a helper always go through the stack.`,
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
		Long: `Accelerate flows that come in and leave by these interfaces. For containers name
the bridge, not its ports: eth0 docker0.

TCP is accelerated if connection tracking does not check TCP windows, because it does
not see every packet any more: --tcp-liberal sets nf_conntrack_tcp_be_liberal to 1
until natkit accel off. TCP connections that are open then go on, and their windows
are not checked till they end. Without it TCP goes through the stack as before.

What the rules and the machine do with each packet of a flow, they do with one a
second. Shaping, limits, quotas, queues, packets changed by rules or judged by their
length, TOS or TTL, accounting, IPsec, routing by TOS, and programs and chains of
others at these interfaces are looked for; if there are some they are listed, and
nothing is done without --bypass. Rules that packets of established flows never reach
are not listed. What decides for a whole flow is obeyed: filters, routing by mark, and
what a bridge does with VLANs.

Where net.bridge.bridge-nf-call-iptables is 1, as Docker and Kubernetes want it, what
comes from a bridge's ports has its destination translated before it gets to natkit,
and its flow can't be told any more: requests from containers to a service's address,
and answers to a masqueraded client, go through the stack; the other direction of
such a flow is accelerated, and of all other flows both are.

All is done or nothing. The setting is written down before it is changed, and put
back by natkit accel off, also after natkit was killed at any moment.

With -o json: done (false with --dry-run), interfaces (interface, xdp, xdp_transmit,
reason), tcp, flows, memory_bytes, changes, bypassed (what, effect), warnings.`,
		Example: `  natkit accel on eth0 docker0 --dry-run
  natkit accel on eth0 docker0 --tcp-liberal
  natkit accel on eth0 eth1 --tcp-liberal --attach xdp --netns gateway`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	f := cmd.Flags()
	f.StringVar(&attach, "attach", "auto", "where packets are met: auto, xdp or tc")
	f.BoolVar(&o.TCPLiberal, "tcp-liberal", false, "accelerate TCP too, and have connection tracking not check its windows")
	f.BoolVar(&o.Bypass, "bypass", false, "accept that packets go past what is set up here for each of them")
	f.IntVar(&o.Flows, "flows", 0, "`number` of flows to remember (default nf_conntrack_max, at most 262144)")
	f.BoolVar(&dryRun, "dry-run", false, "show what would be done, and change nothing")
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
			return fmt.Errorf("look for rules that packets would go past: %w", err)
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
		Long: `End acceleration. Packets go through the stack again, which has known of every flow
all the time. What was changed of the namespace is put back, unless somebody else has
changed it since: that is said, and it stays.

If TCP was accelerated, connection tracking has not followed its windows, and would
take packets of open connections for invalid. So before nf_conntrack_tcp_be_liberal is
put back, every TCP connection over IPv4 that is open is marked as one whose windows
are not checked, till it ends; later ones are checked as before. If they can't be
marked, the setting stays, and what puts it back later is said.

With XDP the driver may reset the card's queues when its program is taken off, and
packets that were in them are lost: the driver decides.

With -o json: kept (what was not put back, each with why).`,
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
		Long: `Show what is accelerated, how many packets went past the stack, and how many went
through it for which reason. Counters begin when acceleration is turned on. What was
set up since that accelerated packets go past is a problem, as is a link or a setting
that is no longer what it was.

What a packet saves is not told: it depends on the rules, the cards and the packet,
and nothing here measures the way that it did not take. natkit hooks --cost shows what
the rules cost those that go through the stack, natkit bench udp compares the ways.

With -o json: since, interfaces (name, hooks, reason), tcp, flows_limit, stats
(reasons by name, bytes, trusted, known), share (past the stack, of the TCP and UDP
packets that came in and were not seen to be for this machine), changes, problems.`,
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
			return fmt.Errorf("look for rules that packets go past: %w", err)
		}
		r := report.NewAccelStatus(status)
		return e.show(*out, r)
	}
	return cmd
}
