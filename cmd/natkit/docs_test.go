// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// Every command that does something has an example, and every command line in --help and in the
// repository's documents is one that natkit accepts. Help is as wide as the terminals it is read on.
func TestExamples(t *testing.T) {
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" || cmd.Name() == "help" { // cobra's own
			return
		}
		if !cmd.Hidden && !cmd.HasSubCommands() && cmd.Example == "" {
			t.Errorf("%s --help has no example", cmd.CommandPath())
		}
		checkCommandLines(t, cmd.CommandPath()+" --help", cmd.Long+"\n"+cmd.Example)
		for line := range strings.Lines(cmd.Long) {
			if utf8.RuneCountInString(line) > 96 {
				t.Errorf("%s --help has a line that no terminal of 95 columns shows whole: %s", cmd.CommandPath(), line)
			}
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(testRoot())

	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, more := range []string{"../../docs/causes/*.md", "../../*.md"} {
		found, err := filepath.Glob(more)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		checkCommandLines(t, filepath.Base(page), string(text))
	}
}

var (
	commandLine = regexp.MustCompile(`^ +(?:\$ |# )?(?:sudo |\./)*natkit( .*)?$`)
	inText      = regexp.MustCompile("`(?:sudo )?natkit( [^`]*)?`")
	// What follows a command line: a pipe, a redirection, a remark.
	afterwards = regexp.MustCompile(`  .*| [|<>#&;].*`)
	quoted     = regexp.MustCompile(`'[^']*'`)
)

// checkCommandLines finds the natkit command lines in a text, on a line of their
// own or in backquotes, and parses each without running it.
func checkCommandLines(t *testing.T, where, text string) {
	t.Helper()
	check := func(words string, complete bool) {
		for _, args := range alternatives(strings.Fields(afterwards.ReplaceAllString(quoted.ReplaceAllString(words, "quoted"), ""))) {
			if err := parse(args, complete); err != nil {
				t.Errorf("%s: natkit %s: %v", where, strings.Join(args, " "), err)
			}
		}
	}
	for line := range strings.Lines(text) {
		if m := commandLine.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			check(m[1], true)
		}
		for _, m := range inText.FindAllStringSubmatch(line, -1) {
			check(m[1], false)
		}
	}
}

// alternatives writes out a|b|c, as in "natkit tune plan|apply".
func alternatives(args []string) [][]string {
	for i, arg := range args {
		if strings.Contains(arg, "|") {
			var out [][]string
			for word := range strings.SplitSeq(arg, "|") {
				out = append(out, alternatives(slices.Concat(args[:i], []string{word}, args[i+1:]))...)
			}
			return out
		}
	}
	return [][]string{args}
}

// parse does what cobra does with a command line up to running it. One that is
// not complete only names a command, as in "see natkit lab up".
func parse(args []string, complete bool) error {
	cmd, rest, err := testRoot().Find(args)
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	if rest := cmd.Flags().Args(); complete || len(rest) > 0 {
		return cmd.ValidateArgs(rest)
	}
	return nil
}

func testRoot() *cobra.Command {
	return newRoot(&env{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard})
}
