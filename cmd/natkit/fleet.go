// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/fleet"
	"natkit/internal/ui/report"
	"natkit/internal/words/plural"
)

func newFleetCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fleet",
		Short: "Compare many machines: findings and differences",
		Long: `Compare the machines of a fleet by what natkit doctor saved or natkit monitor serves.
Prometheus stores what the monitors measure; natkit has no server for a fleet.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newFleetReportCommand(e))
	return cmd
}

func newFleetReportCommand(e *env) *cobra.Command {
	timeout := 5 * time.Second
	var targets string
	cmd := &cobra.Command{
		Use:   "report [flags] FILE|URL...",
		Short: "Show which finding is on which nodes, outliers first",
		Long: `Show which finding is on which nodes of a fleet: first those of few nodes (one, or at
most a tenth of them), then those of many. Then settings, kernels and rule sets in
which a few nodes differ from at least two thirds of the fleet, and the nodes that
differ most.

Each argument is one node: a file of natkit doctor --save (of one namespace or, with
--all-netns, of all), or the URL of a natkit monitor, such as http://node1:9641, which
serves its findings at /findings. Facts are judged with the causes of this natkit;
a monitor's findings are its own and say since when. --targets names a file with
one file or URL per line, for fleets that do not fit on a command line ("-" reads
standard input; empty lines and lines that begin with # are ignored).

A node that cannot be reached or read is listed with the reason, and the rest goes on.
natkit holds the facts of one node at a time, so 1000 nodes take little memory.

The exit code is 3 when a node has a finding of severity warning or above; otherwise
1 when no node could be read, and 4 when some could not or a cause could not be judged.
-o html is one self-contained page.`,
		Example: `  natkit fleet report node1.json node2.json node3.json
  natkit fleet report http://node1:9641 http://node2:9641
  natkit fleet report --targets nodes.txt -o html > fleet.html
  natkit fleet report -o json *.json | jq '.causes[] | select(.outlier)'`,
		Args: cobra.ArbitraryArgs,
	}
	f := cmd.Flags()
	f.Var((*secondsFlag)(&timeout), "timeout", "how long a node may take to reply, in `seconds` or with a unit")
	f.StringVar(&targets, "targets", "", "read the names of further files and URLs from `FILE` (- is stdin)")
	out := outputFlag(cmd, "text", "json", "html")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if e.netns != "" {
			return usagef("--netns %q: a fleet report is made from files and URLs", e.netns)
		}
		if timeout <= 0 {
			return usagef("--timeout %v: want a time above zero", timeout)
		}
		names, err := e.targets(args, targets)
		if err != nil {
			return err
		}
		// What is read is let go at once: time is worth more here than room.
		defer debug.SetGCPercent(debug.SetGCPercent(400))
		var g fleet.Gather
		line, done := newProgressLine(e), 0
		fleet.Read(cmd.Context(), names, timeout, func(in fleet.Input) {
			g.Add(in)
			done++
			line.show("%d of %s read", done, plural.Count(len(names), "node"))
		})
		line.clear()
		r := g.Report()
		switch *out {
		case "json":
			err = report.JSON(e.stdout, r)
		case "html":
			err = report.FleetHTML(e.stdout, r, time.Local)
		default:
			err = report.FleetText(e.stdout, r, time.Local, colored(e.stdout))
		}
		if err != nil {
			return err
		}
		return fleetAlarm(r)
	}
	return cmd
}

// fleetAlarm is the exit code of a report.
func fleetAlarm(r *fleet.Report) error {
	switch {
	case r.Worst() >= causes.Warning:
		return errFindings
	case r.NodeCount == 0:
		return errors.New("no node could be read")
	case len(r.Unread)+len(r.Unjudged) > 0:
		return errUnjudged
	}
	return nil
}

// targets are the arguments and the lines of a file, each once.
func (e *env) targets(args []string, file string) (names []string, err error) {
	names = slices.Clone(args)
	if file != "" {
		var in io.Reader = e.stdin
		if file != "-" {
			f, err := os.Open(file)
			if err != nil {
				return nil, fmt.Errorf("--targets: %w", err)
			}
			defer f.Close()
			in = f
		}
		lines := bufio.NewScanner(in)
		for lines.Scan() {
			if name := strings.TrimSpace(lines.Text()); name != "" && !strings.HasPrefix(name, "#") {
				names = append(names, name)
			}
		}
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("--targets %s: %w", file, err)
		}
	}
	if len(names) == 0 {
		return nil, usagef("no node: name files of natkit doctor --save or URLs of natkit monitor, such as http://node1:9641")
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(names, func(name string) bool {
		before := seen[name]
		seen[name] = true
		return before
	}), nil
}
