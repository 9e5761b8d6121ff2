// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/nat/control"
)

func newUpCommand(e *env) *cobra.Command {
	f := &natFlags{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a NAT gateway here from a rule file",
		Long: `Start a NAT gateway in this network namespace, as a rule file describes it.

Engine ebpf translates and forwards packets at the ingress interface, before the
stack: in XDP where the network card's driver supports it, in tc elsewhere and for
what XDP cannot finish. No process keeps running: programs and maps are pinned.
Engine nft uses the kernel's own NAT, through one nftables table named natkit. The
same file works with both; where an engine cannot follow the file exactly, natkit
prints a warning.

Packets of engine ebpf bypass the FORWARD chain, other programs' chains and filters
on the interfaces, IPsec, routing by mark, and shaping. natkit lists which of these
are configured and refuses to start without --bypass.

Either everything is set up or nothing. What natkit changes in the namespace
(forwarding, ports reserved for NAT, proxy neighbours) is recorded first, and natkit
down restores it, even after natkit was killed.`,
		Example: `  natkit up -f nat.yaml --dry-run
  natkit up -f nat.yaml
  natkit up -f nat.yaml --engine nft --netns gateway`,
		Args: noArgs,
	}
	f.add(cmd)
	cmd.Flags().StringVar(&f.engine, "engine", "ebpf", "engine that translates: ebpf or nft")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := f.run(cmd.Context(), e, *out, control.MakePlan, control.Up)
		return next(cmd, nil, err, "--engine nft")
	}
	return cmd
}
