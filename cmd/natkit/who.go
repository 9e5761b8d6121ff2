// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/natlog"
	"natkit/internal/natlog/store"
	"natkit/internal/ui/report"
)

func newWhoCommand(e *env) *cobra.Command {
	var dir, at string
	var within time.Duration
	cmd := &cobra.Command{
		Use:   "who ADDRESS:PORT [PROTOCOL]",
		Short: "Show who had an external address and port at a time",
		Long: `Show which internal endpoint had an external address and port at a time, and from when
to when, from the log that natkit log keeps. A time is as exact as it is written: 03:12:07
is all of that second, 03:12 all of that minute. Without a zone it is local; where the
clocks went back it needs one. --within widens the time to both sides, for clocks that
differ. For ICMP the port is the identifier of the query.

What follows from the rules alone is answered by the rule file that was in force then,
which the log has kept: port forwards (dnat), maps and deterministic port blocks. Where
the rules changed within a second of the time asked about, both files are asked.

The exit code is 0 if somebody had it, 3 if nobody had it, and 4 if nobody is in the log
and the log has a gap then, or does not reach so far.

Every look-up is written to who.audit in the folder of the log before its result is
shown: when, by which user, what was asked and how many were found.`,
		Example: `  natkit who 198.51.100.1:5000 tcp --at '2026-11-20 03:12:07'
  natkit who 198.51.100.1:5000 --at 2026-11-20T03:12:07Z --within 2s
  natkit who [2001:db8::1]:5000 udp --at 1h -o json`,
		Args: asUsage(cobra.RangeArgs(1, 2)),
	}
	f := cmd.Flags()
	f.StringVar(&at, "at", "", "`time` to ask about, such as '2026-11-20 03:12:07', 03:12 or 1h (ago)")
	f.Var((*secondsFlag)(&within), "within", "widen the time to both sides by so many `seconds` or with a unit")
	f.StringVar(&dir, "dir", "", "read the log in this `FOLDER`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		q, err := whoQuestion(args, at, within)
		if err != nil {
			return err
		}
		answer, err := store.Who(logFolder(dir), q)
		if err != nil {
			return err
		}
		result := report.NewWho(q, answer)
		audit := store.Audit{Time: time.Now().UTC(), UID: os.Getuid(), LoginUID: loginUID(), User: os.Getenv("SUDO_USER"), External: netip.AddrPortFrom(q.Address, q.Port).String(),
			Protocol: result.Protocol, Since: result.Since, Until: result.Until, Verdict: result.Verdict, Found: len(result.Found) + len(result.ByRule)}
		if err := store.WriteAudit(logFolder(dir), audit); err != nil {
			return err
		}
		if err := e.show(*out, result); err != nil {
			return err
		}
		switch result.Verdict {
		case report.WhoNobody:
			return errFindings
		case report.WhoGap:
			return errUnjudged
		}
		return nil
	}
	return cmd
}

// loginUID is as whom the user logged in (Linux's /proc/self/loginuid), nil where nobody did.
func loginUID() *uint32 {
	text, err := os.ReadFile("/proc/self/loginuid")
	if err != nil {
		return nil
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if uid := uint32(n); err == nil && uid != math.MaxUint32 {
		return &uid
	}
	return nil
}

// whoQuestion reads what is asked.
func whoQuestion(args []string, at string, within time.Duration) (q store.Question, err error) {
	endpoint, err := netip.ParseAddrPort(args[0])
	if err != nil {
		return q, usagef("%q: want an address and a port, such as 198.51.100.1:5000", args[0])
	}
	q.Address, q.Port = endpoint.Addr().Unmap().WithZone(""), endpoint.Port()
	if len(args) == 2 {
		var ok bool
		if q.Protocol, ok = natlog.ParseProtocol(args[1]); !ok || q.Protocol == 0 {
			return q, usagef("%q: want a protocol such as tcp, udp or icmp, or its number", args[1])
		}
	}
	if at == "" {
		return q, usagef("at which time? give --at, such as --at '2026-11-20 03:12:07'")
	}
	now := time.Now()
	from, upto, err := parseWritten(at, now)
	if err != nil {
		return q, usagef("--at %w", err)
	}
	if within < 0 {
		return q, usagef("--within %v: want a time of 0 or more", within)
	}
	if from.Add(-within).After(now) {
		return q, usagef("--at %q is in the future", at)
	}
	q.Since, q.Upto = natlog.MicrosOf(from.Add(-within)), natlog.MicrosOf(upto.Add(within))
	return q, nil
}
