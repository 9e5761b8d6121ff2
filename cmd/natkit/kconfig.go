// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/kconfig"
	"natkit/internal/diagnose/probe"
	"natkit/internal/ui/report"
)

func newKconfigCommand(e *env) *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "kconfig",
		Short: "Show what the kernel's configuration lacks for NAT, and what it could omit",
		Long: `Show what the kernel's configuration means for a machine that does NAT: what it
lacks, including what would make NAT faster (flowtables) or visible (the table's
counters, types for tracing), and what NAT does not need although it costs time per
packet or memory, each with the reason.

The running kernel's configuration is read from /proc/config.gz or
/boot/config-VERSION. -o fragment writes the options to change in the form that the
kernel's scripts/kconfig/merge_config.sh merges into a .config.`,
		Example: `  natkit kconfig
  natkit kconfig --from /boot/config-6.1.0-18-amd64
  natkit kconfig -o fragment > nat.config`,
		Args: noArgs,
	}
	cmd.Flags().StringVar(&from, "from", "", "read this `FILE` (- is stdin), plain or compressed, instead of the running kernel's")
	out := outputFlag(cmd, "text", "json", "fragment")
	cmd.RunE = func(*cobra.Command, []string) error {
		var in io.Reader
		source := from
		switch {
		case e.netns != "":
			return usagef("--netns %q: the kernel is the whole machine's", e.netns)
		case from == "-":
			in, source = e.stdin, "standard input"
		default:
			var f *os.File
			var err error
			if from == "" {
				f, source, err = probe.OpenKernelConfig()
			} else {
				f, err = os.Open(from)
			}
			if err != nil {
				return err
			}
			defer f.Close()
			in = f
		}
		c, err := kconfig.Read(in)
		if err != nil {
			return err
		}
		r := kconfig.Judge(c, source)
		switch *out {
		case "json":
			return unlessPipeClosed(report.JSON(e.stdout, r))
		case "fragment":
			return unlessPipeClosed(r.Fragment(e.stdout))
		}
		return unlessPipeClosed(report.KconfigText(e.stdout, r))
	}
	return cmd
}
