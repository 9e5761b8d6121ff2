// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
	"natkit/internal/words/plural"
)

func newStatusCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the gateway: sessions, free ports, counters, problems",
		Long: `Show the gateway of a namespace: engine, rules, interfaces with their attach points
and the reason, sessions, free ports of each external address, packets by outcome
since it started, and whether a natkit serve keeps it. Lines with ! report what has
changed on the machine that a pinned program cannot notice, and what to do: natkit
serve does it by itself.`,
		Example: "  natkit status\n  natkit status --netns gateway -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		cleaned, err := control.Clean()
		if err != nil {
			return err
		}
		if cleaned > 0 {
			fmt.Fprintf(e.stderr, "natkit: removed %s of namespaces that are gone\n", plural.Count(cleaned, "engine"))
		}
		s, err := control.ReadStatus(ns)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, s)
		}
		return unlessPipeClosed(report.NATStatusText(e.stdout, s))
	}
	return cmd
}

func newRulesCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "List the rules in use and how often each is used",
		Long: `List the rules in use, with the ID by which sessions name them. For engine ebpf the
list shows how many sessions each rule has now, for engine nft how many connections
it has translated since it was applied.`,
		Example: "  natkit rules\n  natkit rules --netns gateway -o json",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		rules, err := control.Rules(ns)
		if err != nil {
			return err
		}
		if *out == "json" {
			return report.JSON(e.stdout, report.NATRules{Rules: rules})
		}
		return unlessPipeClosed(report.NATRulesText(e.stdout, rules))
	}
	return cmd
}

func newMappingsCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mappings",
		Short: "List the mappings: internal and external endpoints (engine ebpf)",
		Long: `List the mappings of engine ebpf: the internal endpoint, the external address and
port that all its sessions use, the number of sessions, and its filtering. A
mapping without sessions is in hold-down: the same internal endpoint gets it back
until its timeout.`,
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
		if a, e := netip.ParseAddr(text); e == nil && a.Is4() {
			return netip.PrefixFrom(a, 32)
		}
		p, e := netip.ParsePrefix(text)
		if e != nil || !p.Addr().Is4() {
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

// withEngine calls fn with the engine of the namespace.
func (e *env) withEngine(fn func(*datapath.Engine) error) error {
	ns, err := netns.Open(e.netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	engine, err := control.Open(ns)
	if err != nil {
		return err
	}
	return errors.Join(fn(engine), engine.Close())
}

func newExplainCommand(e *env) *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "explain PACKET",
		Short: "Show which rules a packet matches, and why, without sending it",
		Long: `Show which rules the first packet of a session matches, which do not apply although
they name its addresses, and what happens to the packet. The rules are those in use,
or those of --file; routes and addresses are the namespace's. Nothing is sent.

PACKET is [PROTOCOL] SOURCE[:PORT] -> DESTINATION[:PORT] in INTERFACE, in one
argument or several; the arrow must be quoted in a shell. The default protocol is
tcp if a port is given, otherwise icmp.`,
		Example: `  natkit explain 'tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1'
  natkit explain -f nat.yaml '192.168.0.5 -> 192.0.2.1 in eth1'`,
		Args: asUsage(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().StringVarP(&path, "file", "f", "", "use the rules of this `FILE` instead of those in use")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		p, err := rulefile.ParsePacket(strings.Join(args, " "))
		if err != nil {
			return usageError{err}
		}
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		file, err := control.RulesOf(cmd.Context(), ns, path)
		if err != nil {
			return err
		}
		steps, err := control.Explain(ns, file, p)
		if err != nil {
			return err
		}
		x := &report.NATExplanation{Packet: p.String(), Steps: steps}
		return e.show(*out, x)
	}
	return cmd
}
