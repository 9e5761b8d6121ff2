// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/testutil/ktest"
)

var (
	// A mention of the program: by name, by path, or by a variable of a script that has its path.
	mention = regexp.MustCompile(`(?:("\$[\w/]*natkit")|(?:^|[\s"'` + "`" + `(|;])(?:\./|/usr/bin/|/)?natkit) +([^\n]*)`)
	// What can stand behind a word without being part of it.
	behind = ".,:;)\"'`"
	// A flag by itself, in backquotes.
	loneFlag  = regexp.MustCompile("`(--[a-z][a-z0-9-]*)(?:[ =]([^`]*))?`")
	plainWord = regexp.MustCompile(`^[a-z]+$`)
	// What ends a command line.
	endOfCommand = regexp.MustCompile(`^(?:[|<>&;].*|\d>.*|\)+)$`)
)

// Values of these flags depend on the machine, or need not be among those that a shell offers.
var openFlags = []string{"netns", "server-netns", "rx-netns", "tx", "rx", "inside", "outside", "container", "from", "size", "proto", "cause"}

// flagsOf reads the flags in what follows a command as far as they are its own, and returns what is
// wrong with them: no such flag, or a value that it does not take.
func flagsOf(cmd *cobra.Command, words []string) (wrong []string) {
	takesArguments := cmd.HasSubCommands() || cmd.ValidateArgs([]string{"x"}) == nil || cmd.ValidateArgs([]string{"x", "y"}) == nil
	_ = cmd.ParseFlags(nil) // has cobra join its parents' flags
	for i := 0; i < len(words); i++ {
		word := strings.TrimRight(words[i], behind)
		if endOfCommand.MatchString(words[i]) || word == "--" {
			break
		}
		if !strings.HasPrefix(word, "-") || len(word) < 2 || word == "->" {
			if takesArguments && word == strings.TrimRight(words[i], behind[4:]) {
				continue
			}
			break
		}
		name, value, hasValue := strings.Cut(word, "=")
		var f *pflag.Flag
		if long, ok := strings.CutPrefix(name, "--"); ok {
			f = cmd.Flags().Lookup(long)
		} else if len(name) == 2 {
			f = cmd.Flags().ShorthandLookup(name[1:])
		}
		if f == nil {
			wrong = append(wrong, "natkit has no "+cmd.CommandPath()+" "+name)
			continue
		}
		if !hasValue && f.NoOptDefVal == "" {
			if i++; i >= len(words) {
				break
			}
			value = words[i]
		}
		wrong = append(wrong, valueOf(cmd.CommandPath(), f, strings.Trim(value, behind))...)
		if words[i] != strings.TrimRight(words[i], ".,:;)`") { // the sentence goes on
			break
		}
	}
	return wrong
}

// valueOf compares the value of a flag with those that a shell offers for it.
func valueOf(path string, f *pflag.Flag, value string) (wrong []string) {
	of := flagWords[path+" "+f.Name]
	if of == nil {
		of = flagWords[f.Name]
	}
	if of == nil || f.Value.Type() == "bool" || slices.Contains(openFlags, f.Name) {
		return nil
	}
	for v := range strings.SplitSeq(value, ",") {
		for v := range strings.SplitSeq(v, "|") {
			if v != "" && v != strings.ToUpper(v) && !strings.HasPrefix(v, "$") && !slices.Contains(of(), v) {
				wrong = append(wrong, path+" --"+f.Name+" "+v+": it takes "+strings.Join(of(), ", "))
			}
		}
	}
	return wrong
}

// mentions finds what is wrong with the mentions of natkit's commands in a text, and how many there are.
func mentions(text string) (wrong []string, count int) {
	for line := range strings.Lines(text) {
		for _, m := range mention.FindAllStringSubmatch(line, -1) {
			command, _, _ := strings.Cut(m[2], "  ") // what it does is behind it
			cmd, words := testRoot(), strings.Fields(command)
			if len(words) > 0 && m[1] != "" && plainWord.MatchString(words[0]) && subCommand(cmd, words[0]) == nil {
				wrong = append(wrong, "there is no natkit "+words[0])
			}
			for len(words) > 0 {
				sub := subCommand(cmd, strings.TrimRight(words[0], behind))
				if sub == nil {
					break
				}
				last := words[0]
				cmd, words = sub, words[1:]
				if last != strings.TrimRight(last, behind) {
					words = nil
				}
			}
			if cmd.HasParent() && !(cmd.HasSubCommands() && len(words) > 0 && strings.Contains(words[0], "|")) {
				count++
				wrong = append(wrong, flagsOf(cmd, words)...)
			}
			// One more in the same line.
			more, n := mentions(m[2])
			wrong, count = append(wrong, more...), count+n
		}
	}
	return wrong, count
}

func subCommand(cmd *cobra.Command, name string) *cobra.Command {
	for _, sub := range cmd.Commands() {
		if sub.Name() == name {
			return sub
		}
	}
	return nil
}

// Flags of other programs that the documents name in backquotes.
var othersFlags = []string{"--flag", "--help", "--probability", "--random", "--random-fully", "--persistent"}

// Wherever the repository mentions a command of natkit, in sentences, scripts, units, packages and YAML
// too, there is such a command, and it has such flags with such values.
func TestMentions(t *testing.T) {
	cmd := exec.Command("git", "ls-files", "-z")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		ktest.Missing(t, "not a git work tree: %v", err)
	}
	flags := map[string]bool{}
	leaves(testRoot(), nil, func(cmd *cobra.Command, _ []string) {
		_ = cmd.ParseFlags(nil)
		cmd.Flags().VisitAll(func(f *pflag.Flag) { flags["--"+f.Name] = true })
	})
	seen := 0
	for path := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		ext := filepath.Ext(path)
		if !slices.Contains([]string{".md", ".sh", ".yml", ".yaml", ".service"}, ext) && !strings.HasPrefix(path, "deploy/") && path != "Makefile" && path != ".ci/run" ||
			strings.Contains(path, "testdata/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil {
			t.Fatal(err)
		}
		wrong, n := mentions(string(text))
		seen += n
		for _, m := range loneFlag.FindAllStringSubmatch(string(text), -1) {
			if ext == ".md" && !flags[m[1]] && !slices.Contains(othersFlags, m[1]) {
				wrong = append(wrong, "no command of natkit has "+m[1])
			}
		}
		for _, w := range wrong {
			t.Errorf("%s: %s", path, w)
		}
	}
	if seen < 500 {
		t.Errorf("only %d mentions were found", seen)
	}
}

// The check itself finds what is wrong.
func TestMentionsAreFound(t *testing.T) {
	for text, want := range map[string]int{
		"natkit up -f nat.yaml --dry-run":                                    0,
		"  natkit up -f nat.yaml --dry-runs":                                 1,
		"ip netns exec x natkit drops --cause a --every 2s | less":           1,
		"as `natkit accel on eth0 --tcp` does":                               1,
		"    time natkit up --engine kernel -f x":                            1,
		"run natkit subscribers --by refusals: it lists":                     1,
		"run natkit subscribers --by refused: it lists --nothing":            0,
		"a `natkit doctor` that --finds":                                     0,
		"kubectl -n natkit exec POD -- /natkit doctor --all-namespaces":      1,
		`"$work/natkit" monitors >x`:                                         1,
		`"$natkit" bench udp --router nft,none --trial 3 2>/dev/null`:        1,
		"ExecStart=/usr/bin/natkit log $NATKIT_LOG":                          0,
		"sh -c 'natkit sessions --netnss x | grep y'":                        1,
		"natkit doctor --for 3s; natkit status --fast":                       1,
		"natkit is a program, and natkit finds out":                          0,
		"`natkit lab up published`, `natkit bench cps --protocol icmp`, and": 1,
		"natkit bench udp|cps --direction sideways":                          0, // alternatives are checkCommandLines'
	} {
		if wrong, _ := mentions(text); len(wrong) != want {
			t.Errorf("%s: %q, want %d", text, wrong, want)
		}
	}
}
