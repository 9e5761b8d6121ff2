// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
)

func newExplainCommand(e *env) *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "explain PACKET",
		Short: "Show which rules a packet matches, and why, without sending it",
		Long: `Show which rules the first packet of a session matches, which do not apply although
they name its addresses, and what happens to the packet. The rules are those in use,
or those of --file; routes and addresses are the namespace's. Nothing is sent.

PACKET is [PROTOCOL] SOURCE[:PORT] -> DESTINATION[:PORT] in INTERFACE, in one
argument or several; the arrow must be quoted in a shell. The default protocol is
tcp if a port is given, otherwise icmp.`,
		Example: `  natkit explain 'tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1'
  natkit explain -f nat.yaml '192.168.0.5 -> 192.0.2.1 in eth1'`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().StringVarP(&path, "file", "f", "", "use the rules of this `FILE` instead of those in use")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		p, err := rulefile.ParsePacket(strings.Join(args, " "))
		if err != nil {
			return usageError{err}
		}
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		file, err := control.RulesOf(cmd.Context(), ns, path)
		if err != nil {
			return err
		}
		steps, err := control.Explain(ns, file, p)
		if err != nil {
			return err
		}
		x := &report.NATExplanation{Packet: p.String(), Steps: steps}
		return e.show(*out, x)
	}
	return cmd
}
