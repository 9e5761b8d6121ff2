// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/testutil/golden"
)

// docs/natkit.8 is the command tree as a manual page, so that it can't say
// anything else than --help; `make man` rewrites it.
func TestManPage(t *testing.T) {
	golden.Check(t, "../../docs/natkit.8", manPage(newRoot(&env{}), manFiles(t)))
}

// manPage renders the tree as one page for man(1).
func manPage(root *cobra.Command, files [][2]string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, ".\\\" Generated from the command tree by make man; do not edit.\n")
	fmt.Fprintf(&b, ".TH NATKIT 8\n.SH NAME\nnatkit \\- %s\n", roff(root.Short))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B natkit\nCOMMAND [ARGUMENT...] [\\-\\-netns NAMESPACE]\n")
	fmt.Fprintf(&b, ".SH DESCRIPTION\n")
	paragraphs(&b, root.Long)
	example(&b, root.Example)
	fmt.Fprintf(&b, ".SH GLOBAL OPTIONS\n")
	options(&b, root.PersistentFlags())
	fmt.Fprintf(&b, ".SH COMMANDS\n")
	commands(&b, root)
	for _, section := range []struct {
		title string
		terms [][2]string
	}{
		{"EXIT STATUS", [][2]string{
			{strconv.Itoa(exitOK), "fine"},
			{strconv.Itoa(exitError), "the command failed; the reason is on standard error"},
			{strconv.Itoa(exitUsage), "the command line is wrong"},
			{strconv.Itoa(exitFindings), "doctor found something of severity warning or critical, or import lost something of the rules"},
			{strconv.Itoa(exitUnjudged), "doctor found nothing of the kind, or tune apply nothing to change, but not every cause could be judged: it lacked rights or a part of the kernel"},
		}},
		{"FILES", files},
		{"ENVIRONMENT", [][2]string{
			{"NATKIT_RUN_DIR, NATKIT_STATE_DIR", "other folders than /run/natkit and /var/lib/natkit"},
			{"NO_COLOR", "not empty: no colours on a terminal"},
		}},
	} {
		fmt.Fprintf(&b, ".SH %s\n", section.title)
		for _, term := range section.terms {
			fmt.Fprintf(&b, ".TP\n.B %s\n%s\n", roff(term[0]), roff(term[1]))
		}
	}
	return b.Bytes()
}

// commands renders everything below parent, depth first.
func commands(b *bytes.Buffer, parent *cobra.Command) {
	for _, cmd := range parent.Commands() {
		if cmd.Hidden || cmd.Name() == "help" {
			continue
		}
		usage := cmd.UseLine()
		if cmd.HasSubCommands() {
			usage = cmd.CommandPath()
		}
		fmt.Fprintf(b, ".SS %s\n", roff(strings.TrimPrefix(usage, "natkit ")))
		paragraphs(b, cmp.Or(cmd.Long, cmd.Short+"."))
		options(b, cmd.NonInheritedFlags())
		example(b, cmd.Example)
		commands(b, cmd)
	}
}

func options(b *bytes.Buffer, flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		value, usage := pflag.UnquoteUsage(f)
		fmt.Fprintf(b, ".TP\n.B %s\n%s", roff(strings.TrimSpace(name+" "+value)), roff(usage))
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "[]" && f.DefValue != "0s" {
			fmt.Fprintf(b, " (default %s)", roff(f.DefValue))
		}
		fmt.Fprintln(b)
	})
}

// paragraphs renders text: blank lines divide, indented lines stay as they are.
func paragraphs(b *bytes.Buffer, text string) {
	fmt.Fprintln(b, ".PP")
	literal := false
	for line := range strings.SplitSeq(strings.Trim(text, "\n"), "\n") {
		indented := strings.HasPrefix(line, " ")
		switch {
		case line == "":
			fmt.Fprintln(b, ".PP")
			continue
		case indented && !literal:
			fmt.Fprintln(b, ".nf")
		case !indented && literal:
			fmt.Fprintln(b, ".fi")
		}
		literal = indented
		fmt.Fprintln(b, roff(line))
	}
	if literal {
		fmt.Fprintln(b, ".fi")
	}
}

func example(b *bytes.Buffer, text string) {
	if text != "" {
		fmt.Fprintf(b, ".PP\n.nf\n%s\n.fi\n", roff(strings.Trim(text, "\n")))
	}
}

// roff escapes what the formatter would take as its own.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			lines[i] = `\&` + line
		}
	}
	return strings.Join(lines, "\n")
}
