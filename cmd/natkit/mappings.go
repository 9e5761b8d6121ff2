// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"errors"

	"github.com/spf13/cobra"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
)

func newMappingsCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mappings",
		Short: "List the mappings: internal and external endpoints (engine ebpf)",
		Long: `List the mappings of engine ebpf: the internal endpoint, the external address and
port that all its sessions use, the number of sessions, and its filtering. A
mapping without sessions is in hold-down: the same internal endpoint gets it back
until its timeout. An explicit mapping, which a host asked for by PCP or NAT-PMP,
stays for the time shown without sessions, and lets strangers in.`,
		Example: "  natkit mappings\n  natkit mappings --netns gateway -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return e.withEngine(func(r *datapath.Engine) error {
			w := bufio.NewWriterSize(e.stdout, 64<<10)
			var failed error
			err := r.Mappings(func(m *rulefile.Mapping) bool {
				if *out == "json" {
					failed = report.JSONLine(w, m)
				} else {
					failed = report.NATMappingText(w, m)
				}
				return failed == nil && cmd.Context().Err() == nil
			})
			return unlessPipeClosed(errors.Join(err, cmp.Or(failed, w.Flush())))
		})
	}
	return cmd
}
