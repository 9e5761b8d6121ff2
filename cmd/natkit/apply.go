// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/nat/control"
)

func newApplyCommand(e *env) *cobra.Command {
	f := &natFlags{}
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Change the rules of the running gateway without losing sessions",
		Long: `Replace the rules in use with those of a rule file, atomically: all of them, or
none. Sessions whose mappings the new file still allows continue. Interfaces and
addresses are read again, so applying the rules in use also attaches to an
interface that was recreated and follows an address that has changed.

Programs of another natkit version are replaced too, if both use the same data
structures; no session is lost.`,
		Example: `  natkit apply -f nat.yaml --dry-run
  natkit apply -f nat.yaml
  natkit apply -f nat.yaml --netns gateway -o json`,
		Args: noArgs,
	}
	f.add(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return next(cmd, nil, f.run(cmd.Context(), e, *out, control.PlanApply, control.Apply), "")
	}
	return cmd
}
