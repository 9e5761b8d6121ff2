// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

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
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show natkit's version and build",
		Example: "  natkit version\n  natkit version -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if *out == "json" {
			return report.JSON(e.stdout, report.Version{Version: version(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH})
		}
		_, err := fmt.Fprintf(e.stdout, "natkit %s (%s, %s/%s)\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
		return err
	}
	return cmd
}
