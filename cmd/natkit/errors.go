// SPDX-License-Identifier: Apache-2.0

// What a user reads of an error: no message of Go's libraries, and always what to do.

package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"natkit/internal/words/choice"
)

// inWords is an error's text with words in the place of what Go's libraries say. Packages
// that know more than that say it themselves; this is for what passes through them.
func inWords(err error) string {
	text := err.Error()
	replaceOwn(err, &text)
	text = signalError.ReplaceAllString(text, "interrupted")
	return addressError.ReplaceAllString(text, `"$1" is no IP address or prefix`)
}

// signalError is the cause of a context that a signal ended.
var signalError = regexp.MustCompile(`\w+ signal received`)

// addressError is what package netip says, whose errors have no type.
var addressError = regexp.MustCompile(`(?:netip\.)?Parse(?:Addr|Prefix|AddrPort)\("([^"]*)"\): [^;\n]*`)

// replaceOwn puts words where an error of the tree stands in the text. What is below one
// that has words is told by them.
func replaceOwn(err error, text *string) {
	if words := wordsOf(err); words != "" {
		*text = strings.Replace(*text, err.Error(), words, 1)
		return
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if below := e.Unwrap(); below != nil {
			replaceOwn(below, text)
		}
	case interface{ Unwrap() []error }:
		for _, below := range e.Unwrap() {
			replaceOwn(below, text)
		}
	}
}

// wordsOf are the words for one error, "" where it has its own.
func wordsOf(err error) string {
	switch e := err.(type) {
	case *fs.PathError:
		return fileInWords(e.Op, e.Path, e.Err)
	case *os.LinkError:
		return fileInWords(e.Op, e.New, e.Err)
	case *os.SyscallError:
		return e.Syscall + ": " + inWords(e.Err)
	case *exec.Error:
		if errors.Is(e.Err, exec.ErrNotFound) {
			return fmt.Sprintf("the program %s is not installed", e.Name)
		}
		return fmt.Sprintf("run %s: %s", e.Name, inWords(e.Err))
	case *exec.ExitError:
		if status, ok := e.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return "it was ended by signal " + strconv.Itoa(int(status.Signal()))
		}
		return "it ended with exit code " + strconv.Itoa(e.ExitCode())
	case *strconv.NumError:
		if errors.Is(e.Err, strconv.ErrRange) {
			return fmt.Sprintf("%q is out of range", e.Num)
		}
		return fmt.Sprintf("%q is not a number", e.Num)
	case *net.DNSError:
		return fmt.Sprintf("no address is known for the name %q", e.Name)
	case *net.OpError:
		where := ""
		if e.Addr != nil {
			where = " " + e.Addr.String()
		}
		return e.Op + where + ": " + inWords(e.Err)
	case *net.AddrError:
		return fmt.Sprintf("%q: want ADDRESS:PORT", e.Addr)
	case *json.SyntaxError:
		return "this is not JSON"
	case syscall.Errno:
		return errnoWords[e]
	}
	switch err {
	case context.Canceled:
		return "interrupted"
	case context.DeadlineExceeded:
		return "it took too long"
	case io.EOF, io.ErrUnexpectedEOF:
		return "it ends too early"
	}
	return ""
}

// errnoWords say more than the kernel's name for what happened.
var errnoWords = map[syscall.Errno]string{
	syscall.EPERM:      "the kernel refused it: operation not permitted",
	syscall.EINVAL:     "the kernel refused it: invalid argument",
	syscall.ENOENT:     "it does not exist",
	syscall.EOPNOTSUPP: "the kernel does not support it",
	syscall.ENOSYS:     "the kernel does not support it",
}

// fileInWords says what a file could not be used for.
func fileInWords(op, path string, err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if folder := missingFolder(path); folder != "" {
			return fmt.Sprintf("%s does not exist, the directory of %s", folder, path)
		}
		return path + " does not exist"
	case errors.Is(err, syscall.EISDIR):
		return path + " is a directory, not a file"
	case errors.Is(err, syscall.ENOTDIR):
		return path + ": a part of this path is a file, not a directory"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return path + ": permission denied"
	}
	return fmt.Sprintf("%s %s: %s", op, path, inWords(err))
}

// missingFolder is the first directory on the way to a file that does not exist, "" if only the file itself does not.
func missingFolder(path string) (missing string) {
	for folder := filepath.Dir(path); folder != filepath.Dir(folder); folder = filepath.Dir(folder) {
		if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		missing = folder
	}
	return missing
}

// sameFlags are the names by which a flag is called in another command of natkit's or in other tools.
var sameFlags = map[string]string{
	"source": "src", "destination": "dst", "protocol": "proto", "src": "source", "dst": "destination",
	"json": "output", "format": "output", "duration": "for", "time": "for", "namespace": "netns",
}

// flagError says which flag is wrong, and what it takes.
func flagError(cmd *cobra.Command, err error) error {
	see := fmt.Sprintf(" (see %s --help)", cmd.CommandPath())
	var unknown *pflag.NotExistError
	var missing *pflag.ValueRequiredError
	var value *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		name := unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			return usagef("unknown flag -%s%s", name, see)
		}
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		meant := choice.Nearest(name, known)
		if other := sameFlags[name]; meant == "" && cmd.Flags().Lookup(other) != nil {
			meant = other
		}
		if meant != "" {
			return usagef("unknown flag --%s; did you mean --%s?%s", name, meant, see)
		}
		return usagef("unknown flag --%s%s", name, see)
	case errors.As(err, &missing):
		return usagef("--%s: its value is missing%s", missing.GetFlag().Name, see)
	case errors.As(err, &value):
		return usagef("--%s %s%s", value.GetFlag().Name, flagValue(value), see)
	}
	return usagef("%s%s", inWords(err), see)
}

// outOfRange tells whether a value is a number as the flag wants it, but too large or
// too small: pflag does not.
func outOfRange(kind, value string) bool {
	var err error
	switch {
	case strings.HasPrefix(kind, "uint"):
		_, err = strconv.ParseUint(value, 0, 64)
	case strings.HasPrefix(kind, "int") && kind != "intSlice":
		_, err = strconv.ParseInt(value, 0, 64)
	case strings.HasPrefix(kind, "float"):
		_, err = strconv.ParseFloat(value, 64)
	default:
		return false
	}
	return err == nil || errors.Is(err, strconv.ErrRange)
}

// flagValue says what is wrong with a flag's value.
func flagValue(e *pflag.InvalidValueError) string {
	got, want := e.GetValue(), ""
	switch kind := e.GetFlag().Value.Type(); {
	case outOfRange(kind, got):
		return fmt.Sprintf("%q: out of range", got)
	case kind == "duration":
		want = "a time such as 10s, 500ms or 2m"
	case kind == "bool":
		want = "true or false"
	case kind == "intSlice":
		want = "whole numbers, separated by commas"
	case strings.HasPrefix(kind, "int"):
		want = "a whole number"
	case strings.HasPrefix(kind, "uint"):
		want = "a whole number, 0 or more"
	case strings.HasPrefix(kind, "float"):
		want = "a number"
	case errors.As(e, new(*csv.ParseError)):
		want = "words separated by commas"
	default: // a type of natkit's own
		text := inWords(e.Unwrap())
		if strings.Contains(text, strconv.Quote(got)) {
			return text
		}
		return fmt.Sprintf("%q: %s", got, text)
	}
	return fmt.Sprintf("%q: want %s", got, want)
}

// argumentsError says which arguments are too few or too many.
func argumentsError(cmd *cobra.Command, args []string) error {
	see := fmt.Sprintf(" (see %s --help)", cmd.CommandPath())
	if cmd.HasSubCommands() && len(args) > 0 {
		var known []string
		for _, sub := range cmd.Commands() {
			if !sub.Hidden {
				known = append(known, sub.Name())
			}
		}
		if meant := choice.Nearest(args[0], known); meant != "" {
			return usagef("unknown command %q; did you mean %s %s?%s", args[0], cmd.CommandPath(), meant, see)
		}
		return usagef("unknown command %q%s", args[0], see)
	}
	_, wants, _ := strings.Cut(cmd.Use, " ")
	wants = strings.TrimPrefix(wants, "[flags] ")
	switch {
	case wants == "":
		return usagef("unexpected argument %q: %s takes none%s", args[0], cmd.CommandPath(), see)
	case len(args) < len(strings.Fields(strings.ReplaceAll(wants, "[--] ", ""))):
		return usagef("an argument is missing: want %s %s%s", cmd.CommandPath(), wants, see)
	}
	return usagef("%d arguments are too many: want %s %s%s", len(args), cmd.CommandPath(), wants, see)
}
