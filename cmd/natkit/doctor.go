// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"io"
	"net/netip"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/natlog/collect"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
)

func newDoctorCommand(e *env) *cobra.Command {
	o := doctorOptions{window: 10 * time.Second}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find what makes NAT slow or lossy here, with evidence and cure",
		Long: `Find what makes NAT on this machine slow or lossy: the cause, the evidence with
its source, why it matters, the commands that cure it, and how to check.

The doctor reads the kernel's counters twice, --for apart, and judges what
happened in between; it ignores totals since boot. It changes nothing and runs no
program. A finding that follows from another one is listed under it. During the
window the doctor listens for refused connections (a tenth of the time if the
table has many entries), and records the sources of the first few hundred packets
that leave for the Internet, which costs the kernel some time for each.

Severities: critical means that traffic is lost now, warning that it will be lost
soon, advice that resources are wasted. With a critical finding or a warning the
exit code is 3.

Without root, BPF or some part of the kernel, the doctor cannot judge some causes.
It names these first and the reasons at the end; if there is no warning or critical
finding, the exit code is then 4.

--save writes the facts to a file, which --from judges anywhere: send it with a bug
report (it contains host name, addresses, settings and names of rules, but no packet
contents). --redact replaces addresses, hardware addresses, the names of the host,
namespaces, containers, users and sets, and the comments and log prefixes of rules,
before anything is judged, saved or printed. Equal values stay equal, networks stay
networks, and private addresses stay private. Names of interfaces, tables, chains
and programs are kept. To redact a saved file, give --redact, --from and --save.

--all-netns examines every network namespace that a name or a process refers to, in
one window: the host's, and those of containers and pods, by name if their engine
shows it. What all share is reported once. Namespaces with no interface other than
loopback are left out. The doctor reads the start values of all, waits for --for
once, and reads the end values of all. A namespace takes about 20 milliseconds of
CPU time; one with conntrack entries also a walk through the machine's table, which
--no-dump leaves out. It needs root. --save writes one file for all of them.

--at judges what natkit monitor recorded, with the causes of this natkit: of each
namespace the facts that are nearest to that time. --since judges all facts since
then and shows the worst window of each finding. --netns selects one namespace.

--diff A B compares two files of --save, or two recorded times: findings that are
new, gone or still there, and what is configured differently.

-o html is one self-contained page to attach to a ticket: the findings with charts
of the window, the facts, and what could not be seen.

-o npd is for a custom plugin of Kubernetes' node-problem-detector: one line of at
most 80 bytes. Its exit codes differ from natkit's: 0 without a critical finding, 1
with one, 2 if a cause that may be critical could not be judged or the doctor failed.`,
		Example: `  natkit doctor
  natkit doctor --for 1m -o json
  natkit doctor --netns blue
  natkit doctor --all-netns
  natkit doctor --all-netns --redact --save all.json -o html > ticket.html
  natkit doctor --save facts.json
  natkit doctor --from facts.json
  natkit doctor --from facts.json --redact --save redacted.json
  natkit doctor --redact -o html > ticket.html
  natkit doctor --all-netns --for 5s --no-dump -o npd
  natkit doctor --at 03:12
  natkit doctor --since 1h
  natkit doctor --diff before.json after.json
  natkit doctor --diff 02:00 03:12`,
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if o.diff != "" {
			if len(args) != 1 {
				return usagef("--diff wants two: natkit doctor --diff A B, each a file of --save or a time such as 03:12")
			}
			return nil
		}
		return noArgs(cmd, args)
	}
	f := cmd.Flags()
	f.Var((*secondsFlag)(&o.window), "for", "how long to watch, in `seconds` or with a unit")
	f.BoolVar(&o.allNetns, "all-netns", false, "look into every network namespace of the machine")
	f.BoolVar(&o.noDump, "no-dump", false, "do not read the entries of the conntrack table, only its counters")
	f.StringVar(&o.save, "save", "", "write the facts to `FILE`, too")
	f.StringVar(&o.from, "from", "", "judge the facts in `FILE` (- is stdin) instead of this machine's")
	f.BoolVar(&o.redact, "redact", false, "replace addresses and names, everywhere alike")
	f.StringVar(&o.at, "at", "", "judge what natkit monitor recorded at this `time`, such as 03:12")
	f.StringVar(&o.since, "since", "", "judge all that natkit monitor recorded since this `time`")
	f.StringVar(&o.diff, "diff", "", "compare the facts `A` with those of the argument B, each a file or a time")
	f.StringVar(&o.history, "history", "", "`FOLDER` of the recorded history")
	out := outputFlag(cmd, "text", "json", "html", "npd")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		err := o.run(cmd, e, args, *out)
		if *out == "npd" {
			return npdFailure(e, err)
		}
		return err
	}
	return cmd
}

// run is the command by its flags.
func (o *doctorOptions) run(cmd *cobra.Command, e *env, args []string, out string) error {
	if o.diff != "" {
		for _, name := range []string{"for", "no-dump", "from", "all-netns", "at", "since", "save", "redact"} {
			if cmd.Flags().Changed(name) {
				return usagef("--%s does not go with --diff, which compares what is there", name)
			}
		}
		if out != "text" && out != "json" {
			return usagef("--diff has no output %s: use text or json", out)
		}
		return o.compared(e, o.diff, args[0], out)
	}
	if o.at != "" || o.since != "" {
		for _, name := range []string{"for", "no-dump", "from", "all-netns"} {
			if cmd.Flags().Changed(name) {
				return usagef("--%s does not go with --at and --since: what was recorded is what it is", name)
			}
		}
		if o.at != "" && o.since != "" {
			return usagef("--at and --since exclude each other: one is a time, the other a span")
		}
		if o.save != "" && o.since != "" {
			return usagef("--save does not go with --since: use --at")
		}
		return o.recorded(e, out)
	}
	if o.from != "" {
		for _, name := range []string{"for", "no-dump", "save", "netns", "all-netns"} {
			if cmd.Flags().Changed(name) && !(name == "save" && o.redact) {
				return usagef("--%s and --from exclude each other: the facts in a file are what they are", name)
			}
		}
	}
	if o.allNetns && cmd.Flags().Changed("netns") {
		return usagef("--netns and --all-netns exclude each other: use --netns for the one namespace")
	}
	switch {
	case o.allNetns:
		return o.everywhere(cmd.Context(), e, out)
	case o.from != "":
		return o.saved(e, out)
	}
	s, err := o.facts(cmd.Context(), e)
	if err != nil {
		return err
	}
	if o.from == "" {
		e.cutShort(cmd.Context(), seconds(s.WindowSeconds), o.window)
	}
	return showDoctor(e, s, out)
}

// showDoctor prints what is wrong in one namespace.
func showDoctor(e *env, s *snapshot.Snapshot, out string) error {
	findings := causes.Judge(s)
	var err error
	switch out {
	case "json":
		err = report.JSON(e.stdout, report.Doctor(s, findings))
	case "html":
		err = report.DoctorHTML(e.stdout, s, findings)
	case "npd":
		var n report.NPD
		n.Add(s, findings)
		return showNPD(e, &n)
	default:
		err = report.DoctorText(e.stdout, s, findings, colored(e.stdout))
	}
	if err != nil {
		return err
	}
	return alarm(s, findings)
}

// seconds are a duration.
func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// alarm is errFindings when one of them is of severity warning or above, else errUnjudged
// when another could not have been seen.
func alarm(s *snapshot.Snapshot, findings []causes.Finding) error {
	for _, f := range findings {
		if f.Severity >= causes.Warning {
			return errFindings
		}
	}
	if len(causes.NotJudged(s, findings)) > 0 {
		return errUnjudged
	}
	return nil
}

// namespaces takes the Snapshots of a machine's namespaces one by one, and keeps
// what was found.
type namespaces struct {
	redactor *snapshot.Redactor // nil: nothing is replaced
	file     *snapshot.Writer   // nil: nothing is saved
	machine  causes.Machine
	page     report.DoctorAll
	npd      report.NPD
	alarm    error
}

func (n *namespaces) add(s *snapshot.Snapshot) error {
	if n.redactor != nil {
		n.redactor.Redact(s)
	}
	if n.file != nil {
		if err := n.file.Add(s); err != nil {
			return err
		}
	}
	findings := n.machine.Judge(s)
	n.page.Add(s, findings)
	n.npd.Add(s, findings)
	if err := alarm(s, findings); n.alarm == nil || err == errFindings {
		n.alarm = err
	}
	return nil
}

func (n *namespaces) show(e *env, left snapshot.LeftOut, out string) error {
	var err error
	switch out {
	case "json":
		err = report.JSON(e.stdout, n.page.Result(left))
	case "html":
		err = n.page.HTML(e.stdout, left)
	case "npd":
		return showNPD(e, &n.npd)
	default:
		err = n.page.Text(e.stdout, left, colored(e.stdout))
	}
	if err != nil {
		return err
	}
	return n.alarm
}

func (o *doctorOptions) namespaces(out string) *namespaces {
	n := &namespaces{page: report.DoctorAll{Facts: out == "html"}}
	if o.redact {
		n.redactor = snapshot.NewRedactor()
	}
	return n
}

// everywhere is the doctor for all namespaces.
func (o *doctorOptions) everywhere(ctx context.Context, e *env, out string) error {
	// Some hundred namespaces are read one after the other: what each leaves behind
	// is to be gone before it is as much again.
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	n := o.namespaces(out)
	var file *os.File
	if o.save != "" { // before the wait, not after it
		var err error
		if file, err = os.Create(o.save); err != nil {
			return err
		}
		defer file.Close()
		n.file = snapshot.NewWriter(file)
	}
	found := func(all []snapshot.Netns, networks []netip.Prefix) {
		if n.redactor != nil {
			n.redactor.Know(all, networks)
		}
	}
	line, begun := newProgressLine(e), time.Now()
	all, err := probe.TakeAll(ctx, probe.Options{Window: o.window, Dump: !o.noDump, Engine: control.ReadFacts, Log: collect.FactsFrom(logFolder("")), Progress: doctorProgress(line)}, found, n.add)
	line.clear()
	if err != nil {
		return err
	}
	e.cutShort(ctx, time.Since(begun), o.window)
	left := snapshot.LeftOut{Idle: all.Idle, Skipped: all.Skipped}
	if n.redactor != nil {
		for i := range left.Skipped {
			left.Skipped[i] = n.redactor.Text(left.Skipped[i])
		}
	}
	if file != nil {
		if err := n.file.End(left); err != nil {
			return err
		}
		if err := file.Close(); err != nil {
			return err
		}
	}
	return n.show(e, left, out)
}

// saved is the doctor for a file of one namespace or of all.
func (o *doctorOptions) saved(e *env, out string) error {
	from, err := o.open(e)
	if err != nil {
		return err
	}
	defer from.Close()
	n, in := o.namespaces(out), io.Reader(from)
	all := false
	if o.redact {
		// One namespace may speak of another that comes later: all names first.
		twice, done, err := rereadable(from)
		if err != nil {
			return err
		}
		defer done()
		_, all, err = snapshot.LoadEach(twice, func(s *snapshot.Snapshot) error {
			n.redactor.Meet(s)
			return nil
		})
		if err != nil {
			return err
		}
		if _, err := twice.Seek(0, io.SeekStart); err != nil {
			return err
		}
		in = twice
	}
	var file *os.File
	if o.save != "" {
		if file, err = createBeside(from, o.save); err != nil {
			return err
		}
		defer file.Close()
		if all {
			n.file = snapshot.NewWriter(file)
		}
	}
	var last *snapshot.Snapshot
	var left snapshot.LeftOut
	left, all, err = snapshot.LoadEach(in, func(s *snapshot.Snapshot) error {
		last = s
		return n.add(s)
	})
	if err != nil {
		return err
	}
	if n.redactor != nil {
		for i := range left.Skipped {
			left.Skipped[i] = n.redactor.Text(left.Skipped[i])
		}
	}
	if file != nil {
		if all {
			err = n.file.End(left)
		} else {
			err = snapshot.Save(file, last)
		}
		if err := cmp.Or(err, file.Close()); err != nil {
			return err
		}
	}
	if !all {
		return showDoctor(e, last, out)
	}
	return n.show(e, left, out)
}

// rereadable is a file that can be read twice with what is in r; done lets go of it.
func rereadable(r io.Reader) (file *os.File, done func(), err error) {
	if f, ok := r.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			return f, func() {}, nil
		}
	}
	if file, err = os.CreateTemp("", "natkit-facts"); err != nil {
		return nil, nil, err
	}
	os.Remove(file.Name()) // it goes with the last who has it open
	if _, err = io.Copy(file, r); err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, func() { file.Close() }, nil
}

// createBeside makes the file at path, unless it is the one that is read.
func createBeside(from io.Reader, path string) (*os.File, error) {
	if f, ok := from.(*os.File); ok {
		was, err := f.Stat()
		if there, err2 := os.Stat(path); err == nil && err2 == nil && os.SameFile(was, there) {
			return nil, usagef("--save %s is the file that is read: give another name", path)
		}
	}
	return os.Create(path)
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

	at, since, diff, history string // of what natkit monitor recorded
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
		Netns: ns, Window: o.window, Dump: !o.noDump, Engine: control.ReadFacts, Log: collect.FactsFrom(logFolder("")),
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
	in, err := o.open(e)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return snapshot.Load(in)
}

// open opens the file that the facts are in.
func (o *doctorOptions) open(e *env) (io.ReadCloser, error) {
	if o.from == "-" {
		return io.NopCloser(e.stdin), nil
	}
	return os.Open(o.from)
}

// colored says whether to use colours on w: it is a terminal, and NO_COLOR is
// not set (https://no-color.org).
func colored(w io.Writer) bool {
	return isTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
