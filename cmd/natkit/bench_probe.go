// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"natkit/internal/bench"
	"natkit/internal/scenario"
	"natkit/internal/ui/report"
)

func newBenchProbeCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Show what this machine can measure, and how to fix what it cannot",
		Long: `Check what measurements need: packets generated in the kernel (live frames), XDP
and NAPI on veth devices, a CPU for the router alone, open files, and each router.
The checks run in namespaces that natkit creates and removes; nothing else is
touched.`,
		Example: "  natkit bench probe\n  natkit bench probe -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if e.netns != "" {
			return usagef("--netns %q: bench probe tries things in namespaces that it makes", e.netns)
		}
		res, err := bench.Probe(cmd.Context(), version(), scenario.Routers())
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, res)
		}
		return report.Probe(e.stdout, res)
	}
	return cmd
}
