// SPDX-License-Identifier: Apache-2.0

// Command natkit finds out why NAT on Linux is slow or lossy, proves it, and
// cures it with a way back.
//
// This package is wiring: flags, output, exit codes. One file holds one group
// of commands; the work is in the packages they call.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

// Exit codes, the same for every command.
const (
	exitOK       = 0
	exitError    = 1
	exitUsage    = 2
	exitFindings = 3 // doctor found something of severity warning or above, or an import lost something
	exitUnjudged = 4 // doctor found nothing of the kind, or tune apply nothing to change, but could not judge every cause
	exitReplace  = 5 // what is up cannot be taken over by this natkit: to try again does not help (deploy/systemd/natkit.service)
)

// env is everything that a command may touch of the process it runs in; tests
// run commands with buffers.
type env struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer

	netns string // --netns, a reference as for netns.Open
}

func main() {
	// SIGINT and SIGTERM end the command's context; what it made is removed on the
	// way out. A later signal ends the process at once; one that comes with the first, as
	// timeout(1) sends it to a process and to its group, is the same.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	// A write to a pipe that nobody reads any more is an error, not this process's end.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, end := context.WithCancel(ctx)
	out := &output{File: os.Stdout, gone: end}
	os.Exit(finish(run(ctx, os.Args[1:], &env{stdin: os.Stdin, stdout: out, stderr: os.Stderr}), out.failed(), os.Stderr))
}

// finish is the exit code of a command whose output failed to be written, where it did.
// That its reader has gone away is none of its failures.
func finish(code int, failed error, stderr io.Writer) int {
	switch {
	case failed == nil:
		return code
	case errors.Is(failed, syscall.EPIPE):
		return exitOK
	}
	if code == exitOK || code == exitFindings || code == exitUnjudged { // said otherwise
		fmt.Fprintf(stderr, "natkit: %s\n", inWords(failed))
	}
	return exitError
}

// run executes one command line and returns the exit code.
func run(ctx context.Context, args []string, e *env) int {
	root := newRoot(e)
	refuseUnknownWords(root)
	root.SetArgs(args)
	root.SetIn(e.stdin)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	err := root.ExecuteContext(ctx)
	var usage usageError
	var npd npdStatus
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &npd):
		return int(npd)
	case errors.Is(err, errFindings):
		return exitFindings
	case errors.Is(err, syscall.EPIPE): // its reader has gone away, as with | head
		return exitOK
	case errors.Is(err, errUnjudged):
		return exitUnjudged
	case errors.As(err, &usage):
		return e.fail(args, err, e.here(inWords(err)), exitUsage)
	case errors.As(err, new(*control.ReplaceError)):
		return e.fail(args, err, e.here(inWords(err)), exitReplace)
	default:
		return e.fail(args, err, e.here(inWords(err))+hint(err, os.Geteuid(), args), exitError)
	}
}

// fail reports on standard error why a command failed, as an object where -o json is asked
// for, and returns its exit code.
func (e *env) fail(args []string, err error, text string, code int) int {
	if !asksForJSON(args) {
		fmt.Fprintf(e.stderr, "natkit: %s\n", snapshot.CleanLines(text)) // a chain, a file may be called anything
		return code
	}
	shown := report.Error{Error: text, ExitCode: code}
	if problems := (rulefile.Problems)(nil); errors.As(err, &problems) {
		shown.Problems = problems
	}
	if err := report.JSONLine(e.stderr, shown); err != nil {
		fmt.Fprintf(e.stderr, "natkit: %s\n", text)
	}
	return code
}

// asksForJSON tells whether a command line has -o json. It reads the arguments themselves:
// what is wrong may be another flag, after which none is parsed.
func asksForJSON(args []string) bool {
	for i, a := range args {
		switch a {
		case "--":
			return false
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			if i+1 < len(args) && args[i+1] == "json" {
				return true
			}
		}
	}
	return false
}

// errFindings makes natkit exit with 3; the findings, or what an import lost, are printed
// already.
var errFindings = errors.New("findings of severity warning or above")

// errInterrupted ends a command that shows what it has by then.
var errInterrupted = errors.New("interrupted: what is above is incomplete")

// errUnjudged makes natkit exit with 4; what could not be judged is printed already.
var errUnjudged = errors.New("not every cause could be judged")

// usageError is a mistake in the command line, as opposed to a command that failed.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func init() { cobra.EnableCommandSorting = false } // the order below is that of use

// newRoot builds the command tree. Nouns show, verbs change.
func newRoot(e *env) *cobra.Command {
	root := &cobra.Command{
		Use:   "natkit",
		Short: "Find out why NAT is slow or loses packets, prove it and fix it",
		Long: `natkit finds out why NAT on this machine is slow or loses packets, proves it
with the kernel's own evidence, and fixes it in a way that can be undone.

Without a command it shows the state in three lines: how full the connection
tracking table is, what was dropped in the last half second, and who translates.

Start with "natkit doctor" on a machine that carries traffic, or with
"natkit demo" to see a whole case in namespaces of its own.`,
		Example: `  natkit                       the state, in three lines
  natkit doctor --for 10s      what is wrong here, with evidence and cure
  natkit demo                  a published case, on this machine's kernel
  natkit conntrack stats       what is in the connection tracking table`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return front(cmd.Context(), e) },
	}
	root.PersistentFlags().Var((*namespaceFlag)(&e.netns), "netns", "network `namespace` to work in: a name, a path, or pid:N")
	root.SetFlagErrorFunc(flagError)
	for _, g := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Diagnose", []*cobra.Command{newDoctorCommand(e), newHooksCommand(e), newProfileCommand(e), newKconfigCommand(e)}},
		{"Watch", []*cobra.Command{newTopCommand(e), newDropsCommand(e), newTraceCommand(e), newConntrackCommand(e), newMonitorCommand(e), newHistoryCommand(e), newLogCommand(e), newWhoCommand(e), newFleetCommand(e)}},
		{"Fix", []*cobra.Command{newTuneCommand(e)}},
		{"Gateway", []*cobra.Command{
			newUpCommand(e), newApplyCommand(e), newDownCommand(e), newServeCommand(e), newStatusCommand(e), newRulesCommand(e),
			newSubscribersCommand(e), newMappingsCommand(e), newSessionsCommand(e), newEventsCommand(e), newExplainCommand(e), newImportCommand(e),
		}},
		{"Accelerate", []*cobra.Command{newAccelCommand(e)}},
		{"Measure", []*cobra.Command{newBenchCommand(e), newReportCommand(e)}},
		{"Lab", []*cobra.Command{newDemoCommand(e), newLabCommand(e)}},
	} {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title + ":"})
		for _, cmd := range g.commands {
			cmd.GroupID = g.title
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(newVersionCommand(e))
	for _, k := range report.Kinds {
		nameKind(root, k)
	}
	completions(root)
	return root
}

// refuseUnknownWords has cobra's own commands, help and completion, refuse a word that they do not know: they
// would print a help text and end with 0.
func refuseUnknownWords(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				if found, rest, err := root.Find(args); err != nil || len(rest) > 0 {
					return argumentsError(found, rest)
				}
				return nil
			}
		case "completion":
			cmd.Args, cmd.RunE = noArgs, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
}

// nameKind adds to the help of the commands that write a kind of object what it is.
func nameKind(root *cobra.Command, k report.Kind) {
	const begin = "With -o json: "
	for _, path := range strings.Split(k.Command, ", ") {
		cmd, _, err := root.Find(strings.Fields(path))
		if err != nil || cmd == root {
			continue
		}
		if i := strings.LastIndex(cmd.Long, begin); i >= 0 {
			kinds := strings.TrimSuffix(strings.TrimRight(cmd.Long[i:], "\n"), "(docs/json.md).")
			cmd.Long = cmd.Long[:i] + strings.TrimRight(report.Wrap("", "", strings.TrimSpace(kinds)+", "+k.Schema()+" (docs/json.md)."), "\n")
			continue
		}
		cmd.Long = strings.TrimRight(cmp.Or(cmd.Long, cmd.Short+"."), "\n") + "\n\n" + begin + k.Schema() + " (docs/json.md)."
	}
}

// noArgs, exactArgs: cobra's argument checks, as usage errors.
func noArgs(cmd *cobra.Command, args []string) error { return asUsage(cobra.NoArgs)(cmd, args) }

func asUsage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return argumentsError(cmd, args)
		}
		return nil
	}
}

// show writes a result in the format that outputFlag has.
func (e *env) show(output string, r interface{ Text(io.Writer) error }) error {
	if output == "json" {
		return report.JSON(e.stdout, r)
	}
	return r.Text(e.stdout)
}

// outputFlag adds -o to a command and returns where its value will stand; check
// it with checkOutput.
func outputFlag(cmd *cobra.Command, formats ...string) *string {
	if len(formats) == 0 {
		formats = []string{"text", "json"}
	}
	value := cmd.Flags().StringP("output", "o", formats[0], "output format: "+choice.List(formats))
	// The only error is that of a flag which is not there.
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	check := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		if !slices.Contains(formats, *value) {
			return usagef("--output %w", choice.Error(*value, formats...))
		}
		if check != nil {
			return check(cmd, args)
		}
		return nil
	}
	return value
}

// namespaceFlag refuses an empty name: a script's variable that is not set must not mean the host.
type namespaceFlag string

func (n *namespaceFlag) String() string { return string(*n) }

func (n *namespaceFlag) Type() string { return "string" }

func (n *namespaceFlag) Set(text string) error {
	if text == "" {
		return errors.New("it is empty: name a namespace, or leave the flag out")
	}
	*n = namespaceFlag(text)
	return nil
}
