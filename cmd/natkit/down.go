// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
)

func newDownCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Stop the gateway and restore what it changed",
		Long: `Stop what natkit up started, complete or not, by this version or another: its
sessions end. Settings are restored, except those that somebody else has changed
since: natkit reports these and leaves them.

Engines of namespaces that no longer exist, which still hold memory, are removed
too.`,
		Example: "  natkit down\n  natkit down --netns gateway",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		d := &report.NATDown{Kept: []string{}}
		if d.Cleaned, err = control.Clean(); err != nil {
			return err
		}
		kept, err := control.Down(ns)
		if err != nil {
			return err
		}
		d.Kept = append(d.Kept, kept...)
		return e.show(*out, d)
	}
	return cmd
}
