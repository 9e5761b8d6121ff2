// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/nat/control"
	"natkit/internal/words/shell"
)

// next gives a refusal for what packets would bypass the commands that can be typed next: the
// same one with --bypass, and that with instead, if it is not "".
func next(cmd *cobra.Command, args []string, err error, instead string) error {
	var refused *control.BypassError
	if errors.As(err, &refused) {
		line := typed(cmd, args)
		refused.Accept = line + " --bypass"
		if instead != "" {
			refused.Instead = line + " " + instead
		}
	}
	return err
}

// ofNamespace are commands in a message that are about a namespace and do not name it.
var ofNamespace = regexp.MustCompile("`natkit (accel|apply|down|rules|status|up)\\b")

// here gives the commands in a message the namespace of --netns: pasted without it they would be about
// another one.
func (e *env) here(text string) string {
	if e.netns == "" {
		return text
	}
	return ofNamespace.ReplaceAllStringFunc(text, func(command string) string {
		return "`" + shell.Natkit(e.netns) + strings.TrimPrefix(command, "`natkit")
	})
}

// typed is the command line of a command as it was given, but for --engine.
func typed(cmd *cobra.Command, args []string) string {
	words := []string{cmd.CommandPath()}
	for _, arg := range args {
		words = append(words, shell.Quote(arg))
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		switch {
		case f.Name == "engine":
		case f.Value.Type() == "bool" && f.Value.String() == "true":
			words = append(words, "--"+f.Name)
		case f.Value.Type() == "bool":
			words = append(words, "--"+f.Name+"=false")
		default:
			words = append(words, "--"+f.Name, shell.Quote(f.Value.String()))
		}
	})
	return strings.Join(words, " ")
}
