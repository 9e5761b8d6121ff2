// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/service"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/collect"
	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
	"natkit/internal/words/plural"
)

// logFolder is where the log of translations is.
func logFolder(dir string) string {
	return cmp.Or(dir, filepath.Join(cmp.Or(os.Getenv("NATKIT_STATE_DIR"), tune.DefaultStateDir), "log"))
}

func newLogCommand(e *env) *cobra.Command {
	var dir, room, age, node string
	var sinks []string
	var what collect.What
	cmd := &cobra.Command{
		Use:   "log",
		Short: "Keep a log of who had which external address and port",
		Long: `Record who has which external address and port in a network namespace, until SIGTERM or
SIGINT: what the kernel's NAT translates, also under natkit accel, and what engine ebpf
does. natkit who answers from it. natkit serve does the same for a rule file with the
key log, so it does not need natkit log beside it.

What engine ebpf records is chosen by the key log of its rule file: port blocks, mappings
or sessions. Without the key, and of the kernel's NAT, mappings of an internal endpoint to
an external endpoint are recorded. Destinations are not, as RFC 6888 (REQ-12) wants it,
unless --destinations is given: then each session is a record. netfilter gives one
external port to several internal hosts if their destinations differ; only destinations
tell these apart.

The log is in /var/lib/natkit/log (NATKIT_STATE_DIR names another directory than
/var/lib/natkit, --dir another folder). Each hour is a Parquet file, which DuckDB,
ClickHouse, Spark and pandas read (docs/log.md); the running hour is a journal, of which
a kill loses nothing. Hours older than --age, and the oldest beyond --size, are removed.

Engine ebpf records whether natkit log runs or not, up to some 700 000 records: what is
started again reads on without a gap. The kernel's events come from conntrack:
net.netfilter.nf_conntrack_events must not be 0 and should be 1. What was lost is in the
log as a gap, and so is the time without natkit log under the kernel's NAT.

--sink sends every record on to another program, and can be repeated: IPFIX and NetFlow
collectors, syslog servers, a file or a server of JSON lines, and Kafka (docs/log.md has
the URLs). A sink that is down or slow delays nothing: it catches up from the log. Sinks
are reached from the network namespace in which natkit log runs, not from that of --netns.
sinks.json in the folder of the log has what each was sent, what waits, and its last error.

It needs root. As a service: systemctl enable --now natkit-log.`,
		Example: `  natkit log
  natkit log --age 180d --size 20GB
  natkit log --dir /tmp/natlog --destinations --netns gateway
  natkit log --sink syslog+tls://log.example.net:6514?ca=/etc/ssl/log.pem
  natkit log --sink ipfix+udp://192.0.2.9:4739 --sink json:///var/log/nat.json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "keep the log in this `FOLDER`")
	f.StringVar(&room, "size", "10GB", "keep at most this `SIZE`, such as 500MB")
	f.StringVar(&age, "age", "180d", "keep hours for at most this `time`")
	f.StringVar(&node, "node", "", "`NAME` of this machine in the log (default its host name)")
	f.BoolVar(&what.Destinations, "destinations", false, "record each session with its destination")
	f.StringArrayVar(&sinks, "sink", nil, "send records on to this `URL`, such as syslog+udp://192.0.2.9; can be repeated")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		o := collect.Options{What: what, Store: store.Options{Dir: logFolder(dir), Node: node}}
		if o.Store.Bytes, err = parseBytes(room); err != nil || o.Store.Bytes < 1<<20 {
			return usagef("--size %q: want a size of at least 1MB, such as 10GB", room)
		}
		if o.Store.Age, err = parseAge(age); err != nil || o.Store.Age < time.Hour {
			return usagef("--age %q: want a time of at least 1h, such as 180d", age)
		}
		for _, url := range sinks {
			to, err := natlog.ParseSink(url)
			if err != nil {
				return usagef("--sink %w", err)
			}
			o.Sinks = append(o.Sinks, to)
		}
		if o.Store.Node == "" {
			if o.Store.Node, err = os.Hostname(); err != nil {
				return fmt.Errorf("read the host name: %w", err)
			}
		}
		if o.Namespace, err = netns.Open(e.netns); err != nil {
			return err
		}
		defer o.Namespace.Close()
		o.KernelNAT = func() (bool, error) { return kernelTranslates(o.Namespace) }
		lines := &logLines{e: e, json: *out == "json", stamp: os.Getenv("JOURNAL_STREAM") == ""}
		o.Say, o.Store.Say = lines.say, lines.say
		o.Started = func(alive int) {
			lines.say(fmt.Sprintf("recording in %s; %s at the start", o.Store.Dir, plural.Count(alive, "translation")))
			service.Notify(service.Ready)
		}
		o.Ticked = func(s store.Stats) {
			lines.count(s)
			service.Notify(service.Alive)
		}
		o.SinksTicked = lines.countSinks
		err = collect.Run(cmd.Context(), o)
		service.Notify(service.Stopping)
		return unlessPipeClosed(cmp.Or(err, lines.failed))
	}
	return cmd
}

// recordFor keeps the log that a rule file wants, for natkit serve.
func recordFor(ns *netns.Handle, say func(text string)) func(context.Context, rulefile.Log) error {
	return func(ctx context.Context, l rulefile.Log) error {
		node, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("read the host name: %w", err)
		}
		dir := logFolder(l.Folder)
		var sinks []natlog.Sink
		for _, url := range l.Sinks {
			to, err := natlog.ParseSink(url)
			if err != nil { // the rule file was read with the same function
				return fmt.Errorf("sink %w", err)
			}
			sinks = append(sinks, to)
		}
		return collect.Run(ctx, collect.Options{
			Sinks:     sinks,
			Namespace: ns,
			Store: store.Options{
				Dir: dir, Node: node, Age: cmp.Or(l.Age, defaultLogAge), Bytes: cmp.Or(l.Bytes, defaultLogBytes), Say: say,
			},
			What:      collect.What{Sessions: l.Record == rulefile.LogSessions, Destinations: l.Destinations},
			KernelNAT: func() (bool, error) { return kernelTranslates(ns) },
			Started: func(alive int) {
				say(fmt.Sprintf("recording in %s; %s at the start", dir, plural.Count(alive, "translation")))
			},
			Say:    say,
			Ticked: func(store.Stats) {},
		})
	}
}

// How much of a log is kept, if nobody says.
const (
	defaultLogAge   = 180 * 24 * time.Hour
	defaultLogBytes = 10 << 30
)

// kernelTranslates reports whether rules of netfilter translate in a namespace.
func kernelTranslates(ns *netns.Handle) (bool, error) {
	chains, err := probe.Chains(ns)
	return slices.ContainsFunc(chains, func(c snapshot.Chain) bool { return len(c.NATRules) > 0 }), err
}

// logLines prints what natkit log reports. Its writer and its converter both report.
type logLines struct {
	e           *env
	json, stamp bool

	mu     sync.Mutex
	stats  store.Stats
	sinks  []sink.State
	failed error
}

func (l *logLines) countSinks(s []sink.State) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sinks = s
}

func (l *logLines) count(s store.Stats) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats = s
}

func (l *logLines) say(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := report.LogLine{Time: time.Now(), Text: text, Records: l.stats.Records, Lost: l.stats.Lost, Gaps: l.stats.Gaps, Sinks: l.sinks}
	err := error(nil)
	if l.json {
		err = report.JSONLine(l.e.stdout, line)
	} else {
		err = report.LogLineText(l.e.stdout, line, l.stamp)
	}
	l.failed = cmp.Or(l.failed, err)
}
