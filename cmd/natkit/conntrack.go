// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
	"natkit/internal/words/plural"
)

func newConntrackCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "conntrack",
		Short: "Show what is in the connection tracking table",
		Long: `Show what is in the connection tracking table: live, or from a dump.

The live table is read entry by entry over ctnetlink, which needs root or
CAP_NET_ADMIN. Nothing is kept, so a table of any size needs the same memory.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newConntrackListCommand(e),
		newConntrackStatsCommand(e),
		newConntrackTopCommand(e),
		newConntrackMemoryCommand(e),
		newConntrackWatchCommand(e),
	)
	return cmd
}

const fromHelp = `
--from reads the output of "conntrack -L" (plain or with -o extended, id,
ktimestamp, labels), or a copy of /proc/net/nf_conntrack. A line that cannot be
read is reported with its number and counted; the others are used.`

func newConntrackListCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the entries in the format of conntrack -L -o extended",
		Long: `List the entries of the table in the format of "conntrack -L -o extended".

If a natkit engine is running, a note shows whether its rules translate the
entries. Sessions of the eBPF engine are not in the table: natkit sessions lists them.
` + fromHelp,
		Example: `  natkit conntrack list
  natkit conntrack list --proto tcp --state TIME_WAIT --src 192.168.0.0/24
  natkit conntrack list --netns gateway -o json
  conntrack -L | natkit conntrack list --from - --dst 10.0.0.1`,
		Args: noArgs,
	}
	in := conntrackInputFlags(e, cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		w := bufio.NewWriterSize(e.stdout, 64<<10)
		show := conntrack.ExtendedFields
		if in.from != "" {
			show = conntrack.AllFields
		}
		engine := in.engine(nil)
		if engine != nil { // beside the entries, whose form is that of conntrack -L
			fmt.Fprint(e.stderr, "natkit: "+engine.Line())
		}
		var line []byte
		err := in.each(cmd.Context(), func(f *conntrack.Flow) error {
			if *out == "json" {
				line = report.AppendConntrackFlow(line[:0], f, engine)
			} else {
				line = f.AppendText(line[:0], show)
			}
			_, err := w.Write(append(line, '\n'))
			return err
		})
		if flushErr := w.Flush(); err == nil {
			err = flushErr
		}
		return unlessPipeClosed(err)
	}
	return cmd
}

func newConntrackStatsCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Count the entries by protocol, TCP state and status",
		Long: `Count the entries of the table by protocol, by TCP state and by status.

SNAT and DNAT count translated entries, recognized by their addresses and ports, so
they are the same for the live table and for a dump. A dump does not show
whether an offloaded entry is assured.
` + fromHelp,
		Example: `  natkit conntrack stats
  natkit conntrack stats --dst 172.17.0.2 -o json
  natkit conntrack stats --from dump.txt`,
		Args: noArgs,
	}
	in := conntrackInputFlags(e, cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		t, limits, text, err := in.table(cmd.Context(), conntrack.TableOptions{Lists: conntrack.NoLists})
		if err != nil {
			return err
		}
		s := report.NewConntrackStats(t)
		s.Max, s.Cut, s.Engine = limits.Max, text.Cut, in.engine(t)
		if *out == "json" {
			return report.JSON(e.stdout, s)
		}
		return s.Text(e.stdout, barsFor(e.stdout))
	}
	return cmd
}

// countsBy are the values of --by.
var countsBy = []string{"source", "destination", "dport", "nat"}

func newConntrackTopCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show who has the most entries: sources, destinations, ports, SNAT ports",
		Long: `Show who has the most entries in the table.

--by is source or destination (addresses of the original direction), dport
(destination port of the original direction), or nat: how many ports each
external address uses towards each destination. Source NAT runs out of ports per
destination, so look at the first row of nat.

Counts are exact up to 32768 different addresses or ports. With more, each one
with more than 1/32768 of the entries is still found, no count is too high, and
the column missed shows by how much it may be too low.
` + fromHelp,
		Example: `  natkit conntrack top
  natkit conntrack top --by nat --proto tcp
  natkit conntrack top --by destination --rows 5 -o json
  natkit conntrack top --by source --unreplied --from dump.txt`,
		Args: noArgs,
	}
	in := conntrackInputFlags(e, cmd)
	by := cmd.Flags().String("by", "source", "what to count by: source, destination, dport or nat")
	rows := cmd.Flags().Int("rows", snapshot.TopN, "rows to show")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		lists, ok := map[string]conntrack.Lists{
			"source": conntrack.ListSources, "destination": conntrack.ListDestinations,
			"dport": conntrack.ListDestPorts, "nat": conntrack.ListSNATPorts,
		}[*by]
		if !ok {
			return usagef("--by %w", choice.Error(*by, countsBy...))
		}
		if *rows < 1 {
			return usagef("--rows %d: want 1 or more", *rows)
		}
		t, _, _, err := in.table(cmd.Context(), conntrack.TableOptions{Lists: lists, Rows: *rows})
		if err != nil {
			return err
		}
		top := report.NewConntrackTop(t, *by)
		top.Engine = in.engine(t)
		if *out == "json" {
			return report.JSON(e.stdout, top)
		}
		return top.Text(e.stdout, barsFor(e.stdout))
	}
	return cmd
}

func newConntrackMemoryCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "memory",
		Short: "Show how much memory the table uses, now and when full",
		Long: `Show how much memory the connection tracking table uses, now and when full.

The size of an entry is read from the kernel's slab information, which needs
root. An entry uses 128 bytes more if it is masqueraded, accounted, time-stamped,
labelled or watched by events; no file shows which entries are, so both sums are
shown. The limit is one number for the host, but each namespace counts its own
entries; all namespaces share the hash and its chains.`,
		Example: `  natkit conntrack memory
  natkit conntrack memory --netns gateway -o json`,
		Args: noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var m conntrack.Memory
		err := inNetns(e, func() (err error) {
			m, err = conntrack.ReadMemory()
			return err
		})
		if err != nil {
			return err
		}
		r := report.NewConntrackMemory(&m)
		r.Engine = engineNote(e, nil)
		return e.show(*out, r)
	}
	return cmd
}

func newConntrackWatchCommand(e *env) *cobra.Command {
	var o conntrack.WatchOptions
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show how many entries are created and end per second, live",
		Long: `Show how many entries are created and end per second, and which states TCP flows
enter, live from the kernel's events.

Events that the kernel could not deliver are counted as lost. If
net.netfilter.nf_conntrack_events is 2, the present default, only entries that are
created while a program listens have events; older entries end without one, and
only the number of entries shows it.`,
		Example: `  natkit conntrack watch
  natkit conntrack watch --interval 5s --for 1m --proto tcp
  natkit conntrack watch --netns gateway --for 10s -o json`,
		Args: noArgs,
	}
	filter := conntrackFilterFlags(cmd)
	timeVar(cmd.Flags(), &o.Interval, "interval", time.Second, "time between two lines")
	timeVar(cmd.Flags(), &o.For, "for", 0, "how long to watch (default until interrupted)")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if o.Filter, err = filter(); err != nil {
			return err
		}
		if o.Interval < 100*time.Millisecond {
			return usagef("--interval %v: want 100ms or more", o.Interval)
		}
		if o.For < 0 {
			return usagef("--for %v: want a time, or nothing to watch until interrupted", o.For)
		}
		header := *out == "text"
		return unlessPipeClosed(inNetns(e, func() error {
			if mode, err := conntrack.ReadEventsMode(); err == nil && mode == conntrack.EventsOff {
				return errors.New("watch conntrack events: they are off here (net.netfilter.nf_conntrack_events is 0): set it to 2 and watch again")
			}
			return conntrack.Watch(cmd.Context(), o, func(r *conntrack.Rates) error {
				rates := report.NewConntrackRates(time.Now(), r)
				if *out == "json" {
					return report.JSONLine(e.stdout, rates)
				}
				if header {
					header = false
					if _, err := io.WriteString(e.stdout, report.ConntrackRatesHeader); err != nil {
						return err
					}
				}
				return rates.Text(e.stdout)
			})
		}))
	}
	return cmd
}

// barsFor says which bars w can show: none but on a terminal, which is asked by its
// locale whether it has the signs for fine ones.
func barsFor(w io.Writer) report.Bars {
	if !isTerminal(w) || os.Getenv("TERM") == "dumb" {
		return report.NoBars
	}
	const withBars = 60 // what a table takes with them: on less, its lines would break
	if width := terminalWidth(w); width > 0 && width < withBars {
		return report.NoBars
	}
	if localeIsUTF8() {
		return report.BlockBars
	}
	return report.PlainBars
}

// terminalWidth is how many columns the terminal has that w is, 0 where it is none or they are not known.
func terminalWidth(w io.Writer) int {
	f, ok := w.(interface{ Fd() uintptr })
	if !ok || !isTerminal(w) {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}

// localeIsUTF8 says whether signs outside ASCII are shown as such.
func localeIsUTF8() bool {
	locale := cmp.Or(os.Getenv("LC_ALL"), os.Getenv("LC_CTYPE"), os.Getenv("LANG"))
	return strings.Contains(strings.ToUpper(strings.ReplaceAll(locale, "-", "")), "UTF8")
}

// inNetns runs fn in the namespace of --netns.
func inNetns(e *env, fn func() error) error {
	h, err := netns.Open(e.netns)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Do(fn)
}

// unlessPipeClosed takes the reader's going away, as with `| head`, for the end
// of the work.
func unlessPipeClosed(err error) error {
	if errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return err
}

// conntrackFilterFlags adds the flags that choose entries, and returns what
// reads them.
func conntrackFilterFlags(cmd *cobra.Command) func() (conntrack.Filter, error) {
	f := cmd.Flags()
	family := f.StringP("family", "f", "", "only this family: ipv4 or ipv6")
	proto := f.StringP("proto", "p", "", "only this protocol: tcp, udp, icmp, ... or a number")
	src := f.StringP("src", "s", "", "only from this `address` or prefix (original direction)")
	dst := f.StringP("dst", "d", "", "only to this `address` or prefix (original direction, before translation)")
	return func() (w conntrack.Filter, err error) {
		var errs [4]error
		w.Family, errs[0] = conntrack.ParseFamily(*family)
		w.Proto, errs[1] = conntrack.ParseProto(*proto)
		w.Src, errs[2] = conntrack.ParsePrefix(*src)
		w.Dst, errs[3] = conntrack.ParsePrefix(*dst)
		for i, name := range []string{"family", "proto", "src", "dst"} {
			if errs[i] != nil {
				return w, usagef("--%s %w", name, errs[i])
			}
		}
		return w, nil
	}
}

// conntrackInput is where list, stats and top get the entries from.
type conntrackInput struct {
	e         *env
	from      string // "" for the live table
	state     string
	unreplied bool
	filter    func() (conntrack.Filter, error)
}

func conntrackInputFlags(e *env, cmd *cobra.Command) *conntrackInput {
	in := &conntrackInput{e: e, filter: conntrackFilterFlags(cmd)}
	cmd.Flags().StringVar(&in.from, "from", "", "read a dump from `FILE` (- is stdin) instead of the live table")
	cmd.Flags().StringVar(&in.state, "state", "", "only in these states: TIME_WAIT or SYN_SENT,SYN_RECV (those of DCCP with --proto dccp)")
	cmd.Flags().BoolVar(&in.unreplied, "unreplied", false, "only those that saw no reply")
	return in
}

// engine is what natkit's own engine has to do with the live table; t is what was counted of it.
func (in *conntrackInput) engine(t *snapshot.Table) *report.EngineNote {
	if in.from != "" {
		return nil
	}
	return engineNote(in.e, t)
}

// engineNote is about the engine in the namespace of --netns. It stands beside what was asked
// for, which does without where it cannot be read.
func engineNote(e *env, t *snapshot.Table) *report.EngineNote {
	h, err := netns.Open(e.netns)
	if err != nil {
		return nil
	}
	defer h.Close()
	return report.NewEngineNote(e.engine(h), t, e.netns)
}

// engine is natkit's own in a namespace, nil for none; that it cannot be read is said on stderr.
func (e *env) engine(h *netns.Handle) *snapshot.Engine {
	facts, err := control.ReadFacts(h, nil, false)
	if err != nil {
		fmt.Fprintf(e.stderr, "natkit: whether natkit's own engine runs here is unknown: %s\n", inWords(err))
	}
	return facts
}

func (in *conntrackInput) choice() (conntrack.Filter, error) {
	w, err := in.filter()
	if err != nil {
		return w, err
	}
	w.Unreplied = in.unreplied
	if w.States, err = conntrack.ParseStates(in.state, w.Proto); err != nil {
		return w, usagef("--state %w", err)
	}
	return w, nil
}

// each gives every entry to fn, and says on stderr what could not be read.
func (in *conntrackInput) each(ctx context.Context, fn func(*conntrack.Flow) error) error {
	w, err := in.choice()
	if err != nil {
		return err
	}
	if in.from != "" {
		return in.open(func(r io.Reader, name string) error {
			bad := in.badLines(name)
			res, err := conntrack.ReadText(ctx, r, w, fn, bad)
			if err != nil {
				return err
			}
			return in.afterText(name, res)
		})
	}
	var res conntrack.DumpResult
	if err = inNetns(in.e, func() (err error) {
		res, err = conntrack.Dump(ctx, w, fn)
		return err
	}); err != nil {
		return err
	}
	in.afterDump(res.Interrupted, res.Malformed)
	return nil
}

// table counts the entries; limits are those of the live table, text is about
// the dump.
func (in *conntrackInput) table(ctx context.Context, o conntrack.TableOptions) (t *snapshot.Table, limits conntrack.Limits, text conntrack.TextResult, err error) {
	if o.Filter, err = in.choice(); err != nil {
		return nil, limits, text, err
	}
	o.Label = nft.LabelBit
	if in.from != "" {
		err = in.open(func(r io.Reader, name string) (err error) {
			if t, text, err = conntrack.TabulateText(ctx, r, o, in.badLines(name)); err != nil {
				return err
			}
			return in.afterText(name, text)
		})
		return t, limits, text, err
	}
	err = inNetns(in.e, func() (err error) {
		limits, _ = conntrack.ReadLimits() // shown beside the counts, which do without
		t, err = conntrack.Tabulate(ctx, o)
		return err
	})
	if err == nil {
		in.afterDump(t.Interrupted, t.Malformed)
	}
	return t, limits, text, err
}

func (in *conntrackInput) open(fn func(r io.Reader, name string) error) error {
	if in.from == "-" {
		return fn(in.e.stdin, "stdin")
	}
	f, err := os.Open(in.from)
	if err != nil {
		return err
	}
	defer f.Close()
	return fn(f, in.from)
}

// badLines says on stderr which lines can't be read: the first ten of them.
func (in *conntrackInput) badLines(name string) func(*conntrack.LineError) {
	n := 0
	return func(err *conntrack.LineError) {
		if n++; n <= 10 {
			fmt.Fprintf(in.e.stderr, "natkit: %s: %v\n", name, err)
		}
	}
}

func (in *conntrackInput) afterText(name string, res conntrack.TextResult) error {
	if res.Bad > 0 && res.Bad == res.Lines {
		return fmt.Errorf("%s: none of its %s is a conntrack entry: want what conntrack -L prints", name, plural.Count(res.Lines, "line"))
	}
	if res.Bad > 0 {
		fmt.Fprintf(in.e.stderr, "natkit: %s: %d of %d lines can't be read; not counted\n", name, res.Bad, res.Lines)
	}
	if res.Cut {
		fmt.Fprintf(in.e.stderr, "natkit: %s: the last line has no newline: the dump may be cut\n", name)
	}
	if res.HasAnnounced && res.Announced != res.Lines {
		fmt.Fprintf(in.e.stderr, "natkit: %s: says that it shows %s, but has %d\n", name, plural.Count(res.Announced, "entry"), res.Lines)
	}
	return nil
}

func (in *conntrackInput) afterDump(interrupted bool, malformed uint64) {
	if interrupted {
		fmt.Fprintln(in.e.stderr, "natkit: the table changed while it was read: entries may be missing or shown twice")
	}
	if malformed > 0 {
		fmt.Fprintf(in.e.stderr, "natkit: %s can't be read; not counted\n", plural.Count(malformed, "entry"))
	}
}
