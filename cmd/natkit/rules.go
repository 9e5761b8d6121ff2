// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
)

func newRulesCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "List the rules in use and how often each is used",
		Long: `List the rules in use, with the ID by which sessions name them. For engine ebpf the
list shows how many sessions each rule has now, for engine nft how many connections
it has translated since it was applied.`,
		Example: "  natkit rules\n  natkit rules --netns gateway -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		rules, err := control.Rules(ns)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, report.NATRules{Rules: rules})
		}
		return unlessPipeClosed(report.NATRulesText(e.stdout, rules))
	}
	return cmd
}
