// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/tune"
	"natkit/internal/words/shell"
)

// hint says what helps a user whom the machine has refused something: a line of its own, with
// what is missing and what to type. args are those of the command.
func hint(err error, uid int, args []string) string {
	switch {
	case errors.Is(err, os.ErrPermission) && uid != 0 && strings.Contains(err.Error(), "root"):
		return "" // said already, with what else would do
	case errors.Is(err, os.ErrPermission) && uid != 0:
		return "\nthis needs root: " + shell.Command(append([]string{"sudo", "natkit"}, args...)...)
	case errors.Is(err, os.ErrPermission):
		if missing := missingCapabilities(processStatus()); len(missing) > 0 {
			return "\nthis process is root without " + strings.Join(missing, ", ") + ": give its container these capabilities, as `docker run --privileged` does, or run natkit outside of it"
		}
	case errors.Is(err, unix.EROFS):
		return readOnlyHint(err)
	}
	return ""
}

// processStatus is what the kernel says of this process, "" where there is no /proc.
func processStatus() string {
	status, _ := os.ReadFile("/proc/thread-self/status")
	return string(status)
}

// needed are the capabilities by which natkit changes or observes anything, with their numbers.
var needed = []struct {
	name   string
	number uint
}{
	{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN}, {"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"CAP_BPF", unix.CAP_BPF}, {"CAP_PERFMON", unix.CAP_PERFMON},
}

// missingCapabilities lists those that a process lacks, from its /proc/PID/status.
func missingCapabilities(status string) (missing []string) {
	_, text, found := strings.Cut(status, "\nCapEff:\t")
	text, _, _ = strings.Cut(text, "\n")
	have, err := strconv.ParseUint(text, 16, 64)
	if !found || err != nil {
		return nil
	}
	for _, c := range needed {
		if have&(1<<c.number) == 0 {
			missing = append(missing, c.name)
		}
	}
	return missing
}

// readOnlyHint names the variable by which natkit's own folders can be elsewhere.
func readOnlyHint(err error) string {
	var path *fs.PathError
	if !errors.As(err, &path) {
		return ""
	}
	for _, own := range []struct{ variable, folder, holds string }{
		{"NATKIT_RUN_DIR", "/run/natkit", "what is running"},
		{"NATKIT_STATE_DIR", tune.DefaultStateDir, "what it changed"},
	} {
		dir := cmp.Or(os.Getenv(own.variable), own.folder)
		if dir == path.Path || strings.HasPrefix(path.Path, dir+"/") || slices.Contains(parents(dir), path.Path) {
			return "\nnatkit records " + own.holds + " in " + dir + ": make it writable, or name another folder, always the same: export " + own.variable + "=DIR"
		}
	}
	return ""
}

// parents lists the folders that a folder is in.
func parents(dir string) (out []string) {
	for i := strings.LastIndexByte(dir, '/'); i > 0; i = strings.LastIndexByte(dir[:i], '/') {
		out = append(out, dir[:i])
	}
	return out
}
