// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
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
tcp if a port is given, otherwise icmp.

With subscriber ADDRESS or external ADDRESS:PORT instead of a packet: which port
blocks follow for an internal address from the rules alone (deterministic blocks),
or whose the block of an external port is. The exit code is 3 if none follows: then
only a log can know (natkit who).`,
		Example: `  natkit explain 'tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1'
  natkit explain -f nat.yaml '192.168.0.5 -> 192.0.2.1 in eth1'
  natkit explain subscriber 10.8.0.5
  natkit explain -f nat.yaml external 203.0.113.5:5000`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().StringVarP(&path, "file", "f", "", "use the rules of this `FILE` instead of those in use")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		blocks, err := blockQuestion(args)
		if err != nil {
			return err
		}
		var p rulefile.Packet
		if blocks == nil {
			if p, err = rulefile.ParsePacket(strings.Join(args, " ")); err != nil {
				return usageError{err}
			}
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
		if blocks != nil {
			x := &report.NATExplanation{Packet: strings.Join(args, " "), Steps: []rulefile.Step{}, Blocks: blocks(file)}
			if err := e.show(*out, x); err != nil || len(x.Blocks) > 0 {
				return err
			}
			return errFindings
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

// blockQuestion reads what is asked about computed port blocks; nil: it is about a packet.
func blockQuestion(args []string) (func(*rulefile.File) []rulefile.ComputedBlock, error) {
	if len(args) != 2 {
		return nil, nil
	}
	switch args[0] {
	case "subscriber":
		host, err := netip.ParseAddr(args[1])
		if err != nil || !host.Is4() {
			return nil, usagef("%q: want an IPv4 address, such as 10.8.0.5", args[1])
		}
		return func(f *rulefile.File) []rulefile.ComputedBlock { return f.ComputedBlocks(host) }, nil
	case "external":
		end, err := netip.ParseAddrPort(args[1])
		if err != nil || !end.Addr().Is4() {
			return nil, usagef("%q: want an IPv4 address and a port, such as 203.0.113.5:5000", args[1])
		}
		return func(f *rulefile.File) []rulefile.ComputedBlock {
			if b, ok := f.ComputedOwner(end); ok {
				return []rulefile.ComputedBlock{b}
			}
			return nil
		}, nil
	}
	return nil, nil
}
