// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
	"natkit/internal/words/plural"
)

func newStatusCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the gateway: sessions, free ports, counters, problems",
		Long: `Show the gateway of a namespace: engine, rules, interfaces with their attach points
and the reason, sessions, free ports of each external address, packets by outcome
since it started, and whether a natkit serve keeps it. Lines with ! report what has
changed on the machine that a pinned program cannot notice, and what to do: natkit
serve does it by itself.`,
		Example: "  natkit status\n  natkit status --netns gateway -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		cleaned, err := control.Clean()
		if err != nil {
			return err
		}
		if cleaned > 0 {
			fmt.Fprintf(e.stderr, "natkit: removed %s of namespaces that are gone\n", plural.Count(cleaned, "engine"))
		}
		s, err := control.ReadStatus(ns)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, s)
		}
		return unlessPipeClosed(report.NATStatusText(e.stdout, s))
	}
	return cmd
}
