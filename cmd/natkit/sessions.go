// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

// sessionFilter chooses sessions.
type sessionFilter struct {
	source, destination, protocol, state, rule string

	sources, destinations netip.Prefix
	number                rulefile.Protocol
	id                    rulefile.RuleID
}

func (f *sessionFilter) flags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.source, "source", "s", "", "address or prefix of the source, before or after translation")
	cmd.Flags().StringVarP(&f.destination, "destination", "d", "", "address or prefix of the destination, before or after translation")
	cmd.Flags().StringVarP(&f.protocol, "protocol", "p", "", "protocol: tcp, udp, icmp, or another name or number")
	cmd.Flags().StringVar(&f.state, "state", "", "state, as natkit sessions shows it: udp, tcp_established, ...")
	cmd.Flags().StringVar(&f.rule, "rule", "", "rule `ID`, as natkit rules lists it")
}

// parse reads the flags.
func (f *sessionFilter) parse() (err error) {
	prefix := func(flag, text string) (p netip.Prefix) {
		if text == "" || err != nil {
			return p
		}
		p, ok := ipv4Prefix(text)
		if !ok {
			err = usagef("--%s %q: want an IPv4 address or prefix", flag, text)
		}
		return p
	}
	f.sources, f.destinations = prefix("source", f.source), prefix("destination", f.destination)
	if err == nil && f.protocol != "" {
		if f.number, err = rulefile.ParseProtocol(f.protocol); err != nil {
			return usagef("--protocol %w", choice.Error(f.protocol, "tcp", "udp", "udplite", "icmp", "gre", "esp", "ah", "sctp", "a number from 1 to 255"))
		}
	}
	if err == nil && f.rule != "" {
		if f.id, err = rulefile.ParseRuleID(f.rule); err != nil {
			return usagef("--rule: %w", err)
		}
	}
	if states := sessionStates(); err == nil && f.state != "" && !slices.Contains(states, f.state) {
		return usagef("--state %w", choice.Error(f.state, states...))
	}
	return err
}

// sessionStates are the time-outs that a session can be under, and dead.
func sessionStates() (out []string) {
	for t := rulefile.TimeoutUDP; t <= rulefile.TimeoutOther; t++ {
		out = append(out, t.String())
	}
	return append(out, rulefile.StateDead)
}

func (f *sessionFilter) wants(s *rulefile.Session) bool {
	in := func(p netip.Prefix, a, b netip.AddrPort) bool {
		return !p.IsValid() || p.Contains(a.Addr()) || p.Contains(b.Addr())
	}
	return in(f.sources, s.Source.AddrPort, s.SourceAfter.AddrPort) && in(f.destinations, s.Destination.AddrPort, s.DestinationAfter.AddrPort) &&
		(f.number == rulefile.AnyProtocol || s.Protocol == f.number) && (f.state == "" || s.State == f.state) &&
		(f.rule == "" || s.Rule == f.id)
}

// lists tells whether a list of sessions has it: one that has ended only where it is
// asked for.
func (f *sessionFilter) lists(s *rulefile.Session) bool {
	return f.wants(s) && (s.State != rulefile.StateDead || f.state == rulefile.StateDead)
}

func newSessionsCommand(e *env) *cobra.Command {
	f := &sessionFilter{}
	cmd := &cobra.Command{
		Use:   "sessions",
		Short: "List the translated sessions (engine ebpf)",
		Long: `List the sessions of engine ebpf while the table is read. Nothing is kept, so a
table of any size takes the same memory, and sessions that start or end during the
listing may be missing. Sessions that have ended and wait for garbage collection are
listed only with --state dead. Addresses are those of the side that opened the
session, before and after translation. Packets and bytes are shown for the original
and the reply direction.`,
		Example: `  natkit sessions
  natkit sessions --source 192.168.0.0/24 --protocol tcp --state tcp_established
  natkit sessions --rule 1f3a9c02 -o json`,
		Args: noArgs,
	}
	f.flags(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := f.parse(); err != nil {
			return err
		}
		return e.withEngine(func(r *datapath.Engine) error {
			w := bufio.NewWriterSize(e.stdout, 64<<10)
			var failed error
			var line []byte
			err := r.Sessions(func(s *rulefile.Session) bool {
				switch {
				case !f.lists(s):
				case *out == "json":
					failed = report.JSONLine(w, s)
				default:
					line = append(report.AppendNATSession(line[:0], s), '\n')
					_, failed = w.Write(line)
				}
				return failed == nil && cmd.Context().Err() == nil
			})
			return unlessPipeClosed(errors.Join(err, cmp.Or(failed, w.Flush())))
		})
	}
	return cmd
}
