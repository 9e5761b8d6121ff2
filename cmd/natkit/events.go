// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

func newEventsCommand(e *env) *cobra.Command {
	f := &sessionFilter{}
	var kinds string
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show sessions as they are created, end or are refused (engine ebpf)",
		Long: `Show sessions of engine ebpf as they are created, end or are refused, with the
reason, until interrupted. The engine produces events only while somebody reads
them; two readers share them. Events that found no room are counted by natkit
status (lost_events).`,
		Example: `  natkit events
  natkit events --kind refused
  natkit events --source 192.168.0.7 -o json`,
		Args: noArgs,
	}
	f.flags(cmd)
	cmd.Flags().StringVar(&kinds, "kind", "", "show only these events: created, ended, refused, separated by commas")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := f.parse(); err != nil {
			return err
		}
		var wanted []string
		if kinds != "" {
			wanted = strings.Split(kinds, ",")
		}
		for _, k := range wanted {
			if known := []string{"created", "ended", "refused"}; !slices.Contains(known, k) {
				return usagef("--kind %w", choice.Error(k, known...))
			}
		}
		return e.withEngine(func(r *datapath.Engine) error {
			var failed error
			err := r.Events(cmd.Context(), func(ev *rulefile.Event) bool {
				switch {
				case wanted != nil && !slices.Contains(wanted, ev.Kind) || !f.wants(&ev.Session):
				case *out == "json":
					failed = report.JSONLine(e.stdout, ev)
				default:
					failed = report.NATEventText(e.stdout, ev)
				}
				return failed == nil
			})
			return unlessPipeClosed(errors.Join(err, failed))
		})
	}
	return cmd
}
