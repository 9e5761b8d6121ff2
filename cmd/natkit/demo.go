// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/tune"
	"natkit/internal/scenario"
	"natkit/internal/ui/report"
)

func newDemoCommand(e *env) *cobra.Command {
	var o scenario.DemoOptions
	var reportFile string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show a whole case in namespaces of its own: fault, diagnosis, cure, proof",
		Long: `Show a published case on this machine's own kernel, in separate network namespaces:
a web server that serves thousands of requests a second, its collapse behind a
published port, the cause with evidence, the cure, the figures after it, and the
same load on the kernel accelerated by natkit and on the eBPF engine, side by side.
It takes one to two minutes.

The steps are baseline, collapse, diagnosis, cure, proof, accelerate and replace;
each prints the command that does it alone.

The cure raises nf_conntrack_max, one limit for all namespaces of the machine, and
restores it at the end, as the first line shows. --no-host-write cures inside the
namespace instead. An interrupted demo restores everything too; after SIGKILL the
next demo does, or "natkit tune rollback" and "natkit lab down --all".

The table is filled to at most a share of the machine's memory. If its limit is
larger than that, the demo exhausts the source ports instead.`,
		Example: `  natkit demo
  natkit demo --no-host-write
  natkit demo --site 2
  natkit demo --report demo.html
  natkit demo -o json > demo.json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.IntVar(&o.Site, "site", 1, "whose case: 1, a client of its own and 5000 connections; 2, a client on the host itself and 2000")
	f.BoolVar(&o.NoHostWrite, "no-host-write", false, "change nothing outside the demo's namespaces")
	f.Float64Var(&o.FillShare, "fill-share", scenario.DefaultFillShare, "how much of the memory the table may be filled to, 0 to 1")
	f.StringVar(&reportFile, "report", "", "also write the result as a web page to this `file`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if o.Site != 1 && o.Site != 2 {
			return usagef("--site %d: want 1 or 2", o.Site)
		}
		if !(o.FillShare > 0 && o.FillShare <= 1) {
			return usagef("--fill-share %v: want more than 0 and at most 1", o.FillShare)
		}
		if e.netns != "" {
			return usagef("--netns %q: the demo has namespaces of its own", e.netns)
		}
		if os.Geteuid() != 0 {
			return errors.New("the demo needs root: it makes network namespaces (sudo natkit demo)")
		}
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find own program: %w", err)
		}
		var page *resultFile
		if reportFile != "" {
			if page, err = openResultFile(reportFile); err != nil {
				return fmt.Errorf("write report: %w", err)
			}
			defer func() { err = errors.Join(err, page.close()) }()
		}
		o.Command = calledAs()
		o.ServeCommand = []string{self, "lab", "serve"}
		o.Place = tune.Place{StateDir: os.Getenv("NATKIT_STATE_DIR")}
		line := newProgressLine(e)
		text := &report.DemoText{W: e.stdout, Color: colored(e.stdout)}
		if *out == "json" {
			text.W = e.stderr // the demo goes where it does not mix with the result
			text.Color = colored(e.stderr)
		}
		text.Line = func(s string) {
			if s == "" {
				line.clear()
			} else {
				line.show("%s", s)
			}
		}
		o.Report = text
		res, err := scenario.Demo(cmd.Context(), o)
		line.clear()
		if res == nil {
			return err
		}
		if page != nil && cmd.Context().Err() == nil { // half a demo is no report
			err = errors.Join(err, report.HTML(&page.content, []*report.Saved{{Name: "natkit demo", Demo: res}}))
		}
		if *out == "json" {
			return errors.Join(err, report.JSON(e.stdout, res))
		}
		return errors.Join(err, report.Demo(e.stdout, res, text.Color))
	}
	return cmd
}
