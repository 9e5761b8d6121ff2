// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/tune"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
	"natkit/internal/words/shell"
)

func newTuneCommand(e *env) *cobra.Command {
	var auto bool
	cmd := &cobra.Command{
		Use:   "tune",
		Short: "Change kernel settings for NAT, with reason, cost and rollback",
		Long: `Change the kernel settings that the doctor's findings ask for, with the reason,
their cost in memory, who else sets them, and a rollback.

natkit only writes settings of a fixed list, all of the network except
vm.min_free_kbytes. Every old value is in the journal in /var/lib/natkit before the
setting is changed; NATKIT_STATE_DIR names another directory. If natkit is killed
between two writes, the next rollback undoes the whole apply.

natkit monitor --tune advise shows all the time what would change, and natkit monitor
--tune apply changes it in small steps and measures the effect.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if auto {
				return usagef("automatic tuning is part of natkit monitor: natkit monitor --tune advise shows what it would change, natkit monitor --tune apply changes it")
			}
			return cmd.Help()
		},
	}
	cmd.Flags().BoolVar(&auto, "auto", false, "show where automatic tuning is: natkit monitor --tune")
	cmd.AddCommand(newTunePlanCommand(e), newTuneApplyCommand(e), newTuneRollbackCommand(e), newTuneHistoryCommand(e))
	return cmd
}

func newTunePlanCommand(e *env) *cobra.Command {
	var in tuneInput
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what would change, why, and what it costs",
		Long: `Show what would change, why, its cost in memory with the kernel's true entry size,
and who else sets the value and may write it back (sysctl.d, tuned, ufw, kube-proxy,
k3s, Docker, firewalld, NetworkManager, systemd-networkd). Nothing is changed.

The facts are read from the kernel twice, --for apart, or from a file that "natkit
doctor --save" wrote. A table that needs more than --memory-share of the memory is
not planned; the plan shows how much it would need.

Changes that natkit cannot verify from here (no program reads the counters, a link
may go down) need --confirm with the finding's code, as the plan shows. The plan
also shows the future table: its memory at the limit, its mean chain, and when it
will be full at the present growth.

The limit of the connection tracking table and the size of its hash are settings of
the whole machine: natkit writes them in the initial network namespace, whichever
namespace it examines.`,
		Example: `  natkit tune plan
  natkit tune plan --netns blue --for 10s
  natkit tune plan --confirm conntrack-accounting
  natkit tune plan --from facts.json -o json`,
		Args: noArgs,
	}
	in.flags(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		plan, err := in.plan(cmd, e)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, plan)
		}
		return report.TunePlanText(e.stdout, plan, in.applyCommand(cmd, plan))
	}
	return cmd
}

func newTuneApplyCommand(e *env) *cobra.Command {
	var in tuneInput
	var o tune.ApplyOptions
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Change the settings of the plan; each is journalled and verified",
		Long: `Make the changes of the plan: save each old value in the journal, write the new
one, read it back. If one step fails, the earlier ones are undone. Applying again
changes nothing. After an interrupted apply it refuses to run: roll that one back
first.

--persist also writes /etc/sysctl.d/90-natkit.conf and, for settings of network
devices, /etc/udev/rules.d/90-natkit.rules, the only files that natkit writes below
/etc, with every setting of the initial network namespace that natkit has applied
and not rolled back.

The exit code is 1 when a change could not be made that was neither left out by
--no-host-write nor waits for a --confirm, and 4 when nothing was changed but not every
cause could be judged. In a container, causes that only the host shows do not count.`,
		Example: `  natkit tune apply --dry-run
  natkit tune apply --persist
  natkit tune apply --netns blue --no-host-write
  natkit tune apply --from facts.json`,
		Args: noArgs,
	}
	in.flags(cmd)
	f := cmd.Flags()
	f.BoolVar(&o.Persist, "persist", false, "write files below /etc too, so that a reboot keeps the changes")
	f.BoolVar(&o.DryRun, "dry-run", false, "show what would be written, write nothing")
	f.BoolVar(&o.NoHostWrite, "no-host-write", false, "leave out settings of the whole machine unless it is the initial namespace that is tuned")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		plan, err := in.plan(cmd, e)
		if err != nil {
			return err
		}
		if err := in.meantForHere(plan, e); err != nil {
			return err
		}
		o.Place = tunePlace()
		record, err := tune.Apply(cmd.Context(), plan, o)
		if err != nil {
			return err
		}
		if *out == "json" {
			err = report.JSON(e.stdout, record)
		} else {
			err = report.TuneApplyText(e.stdout, record, "natkit tune rollback "+record.ID)
			if err == nil && in.onHost != "" {
				_, err = fmt.Fprintln(e.stdout, in.onHost)
			}
		}
		if err != nil {
			return err
		}
		if slices.ContainsFunc(record.Skipped, func(r tune.Refusal) bool { return !r.Chosen }) {
			return errors.New("not every change of the plan could be made")
		}
		if len(record.Unjudged) > 0 {
			return errUnjudged
		}
		return nil
	}
	return cmd
}

func newTuneRollbackCommand(e *env) *cobra.Command {
	o := tune.RollbackOptions{}
	cmd := &cobra.Command{
		Use:   "rollback [ID]",
		Short: "Change settings back to their values before an apply",
		Long: `Restore the values from before an apply, newest first: the apply named by ID (see
natkit tune history), otherwise an interrupted one, otherwise the newest that
stands.

A setting that somebody else has changed since is reported and kept, unless --force
is given. An apply that a later one builds on is refused without --force: roll the
later one back first. A namespace that is gone is left alone, even when another one
has its name now.`,
		Example: `  natkit tune rollback
  natkit tune rollback last
  natkit tune rollback 20260102-150405 --force`,
		Args: asUsage(cobra.MaximumNArgs(1)),
	}
	cmd.Flags().BoolVar(&o.Force, "force", false, "also restore what somebody else or a later apply has changed since")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if e.netns != "" {
			return usagef("--netns: a rollback goes to the namespaces that the apply changed")
		}
		id := tune.Last
		if len(args) > 0 {
			id = args[0]
		}
		o.Place = tunePlace()
		record, err := tune.Rollback(cmd.Context(), id, o)
		nothing := errors.Is(err, tune.ErrNothing)
		switch {
		case err != nil && !nothing:
			return err
		case *out == "json" && nothing:
			return report.JSON(e.stdout, tune.Record{State: tune.StateUnchanged, Changes: []tune.Change{}})
		case *out == "json":
			return report.JSON(e.stdout, record)
		case nothing:
			_, err = fmt.Fprintln(e.stdout, "Nothing to roll back.")
			return err
		}
		return report.TuneRollbackText(e.stdout, record)
	}
	return cmd
}

func newTuneHistoryCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "history",
		Short: "List what natkit has changed on this machine, and its state",
		Long: `List every apply on this machine: when, which settings, old and new values, and
whether it is in effect, was rolled back, failed and was undone, ended by a reboot,
or was interrupted and needs a rollback.`,
		Example: "  natkit tune history\n  natkit tune history -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		records, err := tune.History(tunePlace())
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, report.TuneHistory{Applies: records})
		}
		return report.TuneHistoryText(e.stdout, records)
	}
	return cmd
}

// tunePlace is where the journal is.
func tunePlace() tune.Place { return tune.Place{StateDir: os.Getenv("NATKIT_STATE_DIR")} }

// tuneInput is where a plan's facts come from.
type tuneInput struct {
	facts     doctorOptions
	share     float64
	confirmed []string
	onHost    string // set by plan: what can be judged and changed on the host only, "" for nothing
}

func (in *tuneInput) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	timeVar(f, &in.facts.window, "for", 2*time.Second, "how long to watch before planning")
	f.StringVar(&in.facts.from, "from", "", "plan from the facts in `FILE` (- is stdin) instead of this machine's")
	f.Float64Var(&in.share, "memory-share", tune.DefaultMemoryShare, "largest part of the memory that the full connection tracking table may take, 0 to 1")
	f.StringSliceVar(&in.confirmed, "confirm", nil, "confirm the condition that the plan shows for finding `CODE`; may be repeated")
}

// plan reads the facts, judges them, and plans what the findings ask for.
func (in *tuneInput) plan(cmd *cobra.Command, e *env) (*tune.Plan, error) {
	if in.facts.from != "" && cmd.Flags().Changed("for") {
		return nil, usagef("--for and --from exclude each other: the facts in a file are what they are")
	}
	if in.facts.window <= 0 {
		return nil, usagef("--for %v: want a time above zero", in.facts.window)
	}
	if !(in.share > 0 && in.share <= 1) {
		return nil, usagef("--memory-share %v: want more than 0 and at most 1", in.share)
	}
	for _, code := range in.confirmed {
		known := causeCodes()
		if !slices.Contains(known, code) {
			return nil, usagef("--confirm %w", choice.Error(code, known...))
		}
	}
	s, err := in.facts.facts(cmd.Context(), e)
	if err != nil {
		return nil, err
	}
	if err := context.Cause(cmd.Context()); err != nil {
		return nil, err // half a window is no ground for a change
	}
	if in.facts.from != "" && e.netns != "" && e.netns != s.Netns.Name {
		return nil, usagef("--netns %s: the facts in %s are of namespace %q", e.netns, in.facts.from, s.Netns.Name)
	}
	findings := causes.Judge(s)
	var unjudged []string
	var onHost []string
	for _, c := range causes.NotJudged(s, findings) {
		if hostsAlone(s, c) {
			onHost = append(onHost, c.Code)
			continue
		}
		unjudged = append(unjudged, c.Code)
	}
	plan, err := tune.MakePlan(s, tune.PlanOptions{Wanted: causes.Settings(findings), MemoryShare: in.share, Confirmed: in.confirmed, Unjudged: unjudged})
	if err == nil && len(onHost) > 0 {
		in.onHost = fmt.Sprintf("Only the host shows %s, and only there can its settings be changed: run natkit tune plan on the host.", strings.Join(onHost, ", "))
		plan.Notes = append(plan.Notes, in.onHost)
	}
	return plan, err
}

// hostsAlone says whether a cause could be judged on the host only, as its settings can be
// changed there only: in a container the host's neighbour table is not to be seen.
func hostsAlone(s *snapshot.Snapshot, c causes.Unjudged) bool {
	return !s.Netns.Init && len(s.Capabilities) > 0 && !slices.ContainsFunc(c.Lacks, func(name string) bool { return name != snapshot.CanNeighbours })
}

// applyCommand is the command line that applies a plan made with these flags.
func (in *tuneInput) applyCommand(cmd *cobra.Command, plan *tune.Plan) string {
	words := []string{"natkit", "tune", "apply"}
	if plan.Netns.Name != "" {
		words = append(words, "--netns", plan.Netns.Name)
	}
	for _, name := range []string{"for", "from", "memory-share"} {
		if f := cmd.Flags().Lookup(name); f.Changed {
			words = append(words, "--"+name, f.Value.String())
		}
	}
	for _, code := range in.confirmed {
		words = append(words, "--confirm", code)
	}
	return shell.Command(words...)
}

// meantForHere refuses to apply a plan from a file that is about another machine
// or about a namespace that the command line does not name.
func (in *tuneInput) meantForHere(plan *tune.Plan, e *env) error {
	if in.facts.from == "" {
		return nil
	}
	if host, err := os.Hostname(); err != nil || host != plan.Host.Hostname {
		return fmt.Errorf("the facts in %s are of the machine %q, this is %q: apply there, or make a plan here", in.facts.from, plan.Host.Hostname, host)
	}
	if plan.Netns.Name != e.netns {
		return usagef("the facts in %s are of namespace %q: add --netns %s", in.facts.from, plan.Netns.Name, shell.Quote(plan.Netns.Name))
	}
	return nil
}
