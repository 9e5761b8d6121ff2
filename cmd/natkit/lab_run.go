// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/scenario"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

func newLabRunCommand(e *env) *cobra.Command {
	var o scenario.FaultOptions
	list := false
	faults := scenario.Faults()
	codes := faultCodes()
	cmd := &cobra.Command{
		Use:   "run [flags] CODE",
		Short: "Create a fault in a lab, diagnose it, cure it, prove the cure",
		Long: `Create one of the faults that the doctor knows, in a separate lab, in three steps:
healthy traffic that looks like the fault, the fault, and the cure that the doctor's
finding prints, run unchanged. After each step the doctor watches and shows what it
finds. The lab is removed afterwards.

` + report.Wrap("", "", "CODE is a finding's code: "+strings.Join(codes, ", ")+".") + `
The exit code is 0 if the doctor reported nothing in the first and the last step,
and reported the fault first in between.`,
		Example: `  natkit lab run --list
  natkit lab run conntrack-table-full
  natkit lab run mtu-drop -o json`,
	}
	cmd.Flags().BoolVar(&list, "list", false, "list the faults and create none")
	timeVar(cmd.Flags(), &o.Window, "for", 2*time.Second, "how long the doctor watches after each step")
	out := outputFlag(cmd)
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if list != (len(args) == 0) || len(args) > 1 {
			return usagef("want one code, or --list (see %s --help)", cmd.CommandPath())
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if list {
			if *out == "json" {
				return report.JSON(e.stdout, report.NewFaults(faults))
			}
			return report.FaultList(e.stdout, faults)
		}
		i := slices.Index(codes, args[0])
		if why := scenario.NoFault(args[0]); why != "" {
			return usagef("code %q: not in a lab: %s", args[0], why)
		}
		if i < 0 && choice.Nearest(args[0], codes) == "" {
			return usagef("code %q: there is none; natkit lab run --list shows them", args[0])
		}
		if i < 0 {
			return usagef("code %w", choice.Error(args[0], codes...))
		}
		if o.Window <= 0 {
			return usagef("--for %v: want a time above zero", o.Window)
		}
		if os.Geteuid() != 0 {
			return errors.New("a lab needs root: it makes network namespaces (sudo natkit lab run " + args[0] + ")")
		}
		line := newProgressLine(e)
		o.Progress = func(what string, part float64) { line.show("%3.0f %% %s", 100*part, what) }
		text := &report.FaultText{W: e.stdout, Color: colored(e.stdout)}
		if *out != "json" {
			o.Begin = func(drawing string, notes []string) error { return text.Begin(faults[i], drawing, notes) }
			o.Step = func(s *scenario.FaultStep) error {
				line.clear()
				return text.Step(s)
			}
		}
		steps, err := faults[i].Run(cmd.Context(), o)
		line.clear()
		if *out == "json" {
			err = errors.Join(err, report.JSON(e.stdout, report.Fault(faults[i], steps, err)))
		}
		return err
	}
	return cmd
}
