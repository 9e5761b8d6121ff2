// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"natkit/diagnose"
	"natkit/internal/netns"
	"natkit/probe"
	"natkit/report"
	"natkit/snapshot"
)

func newDoctorCommand(e *env) *cobra.Command {
	o := doctorOptions{window: 10 * time.Second}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with NAT here, with evidence, and what cures it",
		Long: `Say what makes NAT on this machine slow or lossy: the cause, the evidence with
its source, why it matters, the commands that cure it, and how to check.

The doctor reads the kernel's counters twice, --for apart, and judges what
happened in between; totals since boot decide nothing. It changes nothing and
runs no program. What follows from another finding is folded under it.

Severities: critical is traffic lost now, a warning will be lost soon, advice is
waste. With a finding of warning or above the exit code is 3.

What it can't see, for lack of root, of BPF or of a part of the kernel, costs
that part of the answer; the end of the output lists it. With --save the facts
go to a file, which --from judges anywhere: send it with a bug report (it holds
host name, addresses, settings and names of rules, no packet's content). --redact
replaces addresses, hardware addresses and the names of the host and of namespaces
and containers, the same by the same everywhere, before anything is judged, saved
or printed; networks stay networks, and private addresses private.

--all-netns looks into every network namespace that a name or a process leads to,
in one window: the host's, and those of containers and pods, which it calls by
their names where their engine tells. What all share is told once. Namespaces with
no interface but loopback are left out. It needs root.

-o html is one page that needs nothing besides itself, to attach to a ticket: the
findings with curves of the window, the facts, and what could not be seen.

JSON: kernel, hostname, netns, taken_at, window_s; capabilities, a list of {name,
ok, reason, costs}; findings, a list of {code, severity, title, evidence: [{what,
value, source}], why, remedy, verify, settings, consequences}. With --all-netns:
namespaces, a list of such objects; idle, how many were left out; skipped, why
others were.`,
		Example: `  natkit doctor
  natkit doctor --for 1m -o json
  natkit doctor --netns blue
  natkit doctor --all-netns
  natkit doctor --save facts.json
  natkit doctor --from facts.json
  natkit doctor --redact -o html > ticket.html`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.Var((*secondsFlag)(&o.window), "for", "how long to watch, in `seconds` or with a unit")
	f.BoolVar(&o.allNetns, "all-netns", false, "look into every network namespace of the machine")
	f.BoolVar(&o.noDump, "no-dump", false, "do not read the entries of the conntrack table, only its counters")
	f.StringVar(&o.save, "save", "", "write the facts to `FILE`, too")
	f.StringVar(&o.from, "from", "", "judge the facts in `FILE` (- is stdin) instead of this machine's")
	f.BoolVar(&o.redact, "redact", false, "replace addresses and names, everywhere alike")
	out := outputFlag(cmd, "text", "json", "html")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.from != "" {
			for _, name := range []string{"for", "no-dump", "save", "netns", "all-netns"} {
				if cmd.Flags().Changed(name) {
					return usagef("--%s and --from exclude each other: the facts in a file are what they are", name)
				}
			}
		}
		if o.allNetns {
			for _, name := range []string{"netns", "save", "redact"} {
				if cmd.Flags().Changed(name) {
					return usagef("--%s and --all-netns exclude each other: use --netns for the one namespace", name)
				}
			}
			if *out == "html" {
				return usagef("-o html is a page about one namespace: use --netns for it instead of --all-netns")
			}
			return o.everywhere(cmd.Context(), e, *out)
		}
		s, err := o.facts(cmd.Context(), e)
		if err != nil {
			return err
		}
		findings := diagnose.Judge(s)
		switch *out {
		case "json":
			err = report.JSON(e.stdout, report.Doctor(s, findings))
		case "html":
			err = report.DoctorHTML(e.stdout, s, findings)
		default:
			err = report.DoctorText(e.stdout, s, findings, colored(e.stdout))
		}
		if err != nil {
			return err
		}
		return alarm(findings)
	}
	return cmd
}

// alarm is errFindings when one of them is of severity warning or above.
func alarm(findings []diagnose.Finding) error {
	for _, f := range findings {
		if f.Severity >= diagnose.Warning {
			return errFindings
		}
	}
	return nil
}

// everywhere is the doctor for all namespaces.
func (o *doctorOptions) everywhere(ctx context.Context, e *env, out string) error {
	line := newProgressLine(e)
	all, err := probe.TakeAll(ctx, probe.Options{Window: o.window, Dump: !o.noDump, Progress: doctorProgress(line)})
	line.clear()
	if err != nil {
		return err
	}
	findings := diagnose.JudgeAll(all.Snapshots)
	if out == "json" {
		err = report.JSON(e.stdout, report.DoctorAll(all.Snapshots, findings, all.Idle, all.Skipped))
	} else {
		err = report.DoctorAllText(e.stdout, all.Snapshots, findings, all.Idle, all.Skipped, colored(e.stdout))
	}
	if err != nil {
		return err
	}
	return alarm(slices.Concat(findings...))
}

// doctorProgress shows how much of the window is over.
func doctorProgress(line *progressLine) func(what string, part float64) {
	return func(what string, part float64) {
		const width = 30
		done := int(part * width)
		line.show("doctor: [%s%s] %s", strings.Repeat("#", done), strings.Repeat(".", width-done), what)
	}
}

type doctorOptions struct {
	window     time.Duration
	noDump     bool
	redact     bool
	allNetns   bool
	save, from string
}

// facts takes a Snapshot of this machine, or of the file that was given.
func (o *doctorOptions) facts(ctx context.Context, e *env) (*snapshot.Snapshot, error) {
	if o.from != "" {
		s, err := o.load(e)
		if err == nil && o.redact {
			snapshot.Redact(s)
		}
		return s, err
	}

	ns, err := netns.Open(e.netns)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	var file *os.File
	if o.save != "" { // before the wait, not after it
		if file, err = os.Create(o.save); err != nil {
			return nil, err
		}
		defer file.Close()
	}
	line := newProgressLine(e)
	s, err := probe.Take(ctx, probe.Options{
		Netns: ns, Window: o.window, Dump: !o.noDump,
		Progress: doctorProgress(line),
	})
	line.clear()
	if err == nil && o.redact {
		snapshot.Redact(s)
	}
	if err != nil || file == nil {
		return s, err
	}
	if err := snapshot.Save(file, s); err != nil {
		return nil, err
	}
	return s, file.Close()
}

func (o *doctorOptions) load(e *env) (*snapshot.Snapshot, error) {
	if o.from == "-" {
		return snapshot.Load(e.stdin)
	}
	f, err := os.Open(o.from)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return snapshot.Load(f)
}

// colored says whether to use colours on w: it is a terminal, and NO_COLOR is
// not set (https://no-color.org).
func colored(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == ""
}
