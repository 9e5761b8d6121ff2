// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/nat/control"
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

// typed is the command line of a command as it was given, but for --engine.
func typed(cmd *cobra.Command, args []string) string {
	words := []string{cmd.CommandPath()}
	for _, arg := range args {
		words = append(words, shellWord(arg))
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		switch {
		case f.Name == "engine":
		case f.Value.Type() == "bool":
			words = append(words, "--"+f.Name)
		default:
			words = append(words, "--"+f.Name, shellWord(f.Value.String()))
		}
	})
	return strings.Join(words, " ")
}

// shellWord quotes what a shell would read as anything but one word.
func shellWord(s string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-_./:,=@%+", c)
	}
	if s != "" && strings.TrimFunc(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
