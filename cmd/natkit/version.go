// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"natkit/internal/nat/control"
	"natkit/internal/ui/report"
)

// release is set by the Makefile from `git describe`; a plain `go install`
// falls back to what the toolchain recorded.
var release = ""

func version() string {
	if release != "" {
		return release
	}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "devel-" + s.Value[:12]
			}
		}
		if v := bi.Main.Version; v != "" && v != "(devel)" {
			return v
		}
	}
	return "devel"
}

func newVersionCommand(e *env) *cobra.Command {
	var check bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show natkit's version and build",
		Long: `Show natkit's version and build.

With --check compare this natkit with the engines that are up, in all network
namespaces of this machine. An engine that a natkit with other data structures made
goes on translating, but only natkit down and up replace it: each is reported, and the
exit code is 5. An upgrade of the packages restarts no service in whose place the new
natkit could not work.`,
		Example: "  natkit version\n  natkit version -o json\n  natkit version --check",
		Args:    noArgs,
	}
	cmd.Flags().BoolVar(&check, "check", false, "exit with 5 if this natkit cannot take over an engine that is up")
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if check {
			if err := control.CheckTakeover(); err != nil {
				return err
			}
		}
		if *out == "json" {
			return report.JSON(e.stdout, report.Version{Version: version(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH})
		}
		_, err := fmt.Fprintf(e.stdout, "natkit %s (%s, %s/%s)\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
		return err
	}
	return cmd
}
