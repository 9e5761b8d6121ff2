// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/kubernetes"
	"natkit/internal/diagnose/monitor"
	"natkit/internal/diagnose/tune"
	"natkit/internal/nat/control"
	"natkit/internal/natlog/collect"
	"natkit/internal/ui/report"
	"natkit/internal/words/choice"
)

// Intervals of the monitor.
const (
	monitorInterval      = 10 * time.Second
	leastMonitorInterval = time.Second
	mostMonitorInterval  = 5 * time.Minute
)

// probeModes are the values of --arp-probes.
var probeModes = []string{string(monitor.ProbesOff), string(monitor.ProbesOnSymptom), string(monitor.ProbesAlways)}

// tuneModes are the values of --tune.
var tuneModes = []string{string(monitor.TuneOff), string(monitor.TuneAdvise), string(monitor.TuneApply)}

func newMonitorCommand(e *env) *cobra.Command {
	interval := monitorInterval
	metrics := "127.0.0.1:9641"
	var dir, room, age string
	var cluster clusterFlags
	tuning, arp := string(monitor.TuneOff), string(monitor.ProbesOnSymptom)
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "Run the doctor all the time: metrics, history and events",
		Long: `Watch every network namespace of this machine until SIGTERM or SIGINT: the host,
containers and pods. In each interval natkit reads what is cheap to read (how full
each connection tracking table is, its counters, what the kernel dropped) and
examines the namespaces that this, a change of rules, routes or links, or the time
since the last examination gives reason to. The judgement is that of natkit doctor.

A finding begins after two windows in a row that show it and ends after five that do
not. Each beginning and end is printed on one line. Without --node-name natkit sends
nothing to anybody: Prometheus reads the metrics, Alertmanager pages.

--metrics serves Prometheus metrics at /metrics, and /healthz, which answers 200
while intervals end and the history can be written, otherwise 503 and why. At
/findings it serves what natkit fleet report compares. There is no authentication:
use an address that only the machine itself or a trusted network can reach. An empty
address serves none.

The history is kept in /var/lib/natkit/history (NATKIT_STATE_DIR names another
directory than /var/lib/natkit, --history another folder): at most 256 MB or 7 days,
whichever is less. natkit history and natkit doctor --at read it, also while it is
written.

--node-name NAME is for a node of Kubernetes: the node gets the condition NATProblem
while a critical finding is on, and the node or the pod it is in an Event of each cause,
at most one an hour. The API is that of the pod which natkit runs in, or the one that
--kubernetes-api and --kubernetes-credentials name. If it does not answer, nothing else
is affected. See docs/kubernetes.md.

--tune advise writes into history and metrics which settings the findings ask for and
natkit would change; nothing is changed. --tune apply changes them: settings of a short
list (docs/monitor.md), at most doubled, the connection tracking table at most a quarter
of the memory, one change in ten minutes, none that another program sets. The effect of
each is measured in the next windows; within 60 s it is taken back if more is lost than
before. Every change is in the history with its reason, and natkit tune history lists
and natkit tune rollback undoes it.

The only packets that natkit sends to networks of this machine are ARP probes (RFC 5227),
which ask whether another machine has one of its addresses; no host learns anything by
them. --arp-probes symptom sends three of each address in ten minutes, and only while
something looks like a second machine with the address: ARP from it, clients that do not
confirm their connections, traffic that falls to a third; and one in each interval while
such a machine replies. --arp-probes always sends one in each interval for the addresses
of namespaces that translate and have traffic. --arp-probes off sends none.

It needs root. For systemd it is a service of Type=notify with a watchdog.`,
		Example: `  natkit monitor
  natkit monitor --interval 30s --history-size 64MB --history-age 2d
  natkit monitor --metrics '' --history /tmp/night
  natkit monitor --node-name "$NODE_NAME"
  natkit monitor --tune advise
  natkit monitor --arp-probes off`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.Var((*secondsFlag)(&interval), "interval", "time between two looks, in `seconds` or with a unit")
	f.StringVar(&metrics, "metrics", metrics, "serve Prometheus metrics at this `ADDRESS:PORT`")
	f.StringVar(&dir, "history", "", "keep the history in this `FOLDER`")
	f.StringVar(&room, "history-size", "256MB", "keep at most so `much` history")
	f.StringVar(&age, "history-age", "7d", "keep history for at most this `time`")
	cluster.add(cmd)
	f.StringVar(&tuning, "tune", tuning, "change settings that findings ask for: off, advise (only say which) or apply")
	f.StringVar(&arp, "arp-probes", arp, "look for other machines with an address of this one by ARP: off, symptom or always")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if !slices.Contains(probeModes, arp) {
			return usagef("--arp-probes %w", choice.Error(arp, probeModes...))
		}
		if !slices.Contains(tuneModes, tuning) {
			return usagef("--tune %w", choice.Error(tuning, tuneModes...))
		}
		if tuning == string(monitor.TuneApply) && interval > monitor.MostTuneInterval {
			return usagef("--tune apply measures its effect within a minute: it needs an --interval of at most %v", monitor.MostTuneInterval)
		}
		if interval < leastMonitorInterval || interval > mostMonitorInterval {
			return usagef("--interval %v: want %v to %v", interval, leastMonitorInterval, mostMonitorInterval)
		}
		if cmd.Flags().Changed("netns") {
			return usagef("--netns: natkit monitor watches all network namespaces")
		}
		limits, err := historyLimits(room, age)
		if err != nil {
			return err
		}
		if err := checkListen("metrics", metrics); err != nil {
			return err
		}
		o := monitor.Options{Interval: interval, Engine: control.ReadFacts, EngineSample: control.SampleEngine, Log: collect.FactsFrom(logFolder("")), ARPProbes: monitor.ARPProbes(arp), Tune: monitor.Tuning(tuning), TunePlace: tunePlace(), HistoryDir: historyFolder(dir), Build: map[string]string{"version": version(), "goversion": runtime.Version()}}
		if o.Kubernetes, err = cluster.reporter(cmd); err != nil {
			return err
		}
		if metrics != "" {
			if o.Metrics, err = e.listen(cmd.Context(), metrics); err != nil {
				return fmt.Errorf("serve metrics: %w", err)
			}
			defer o.Metrics.Close()
		}
		if o.History, err = history.Create(historyFolder(dir), limits); err != nil {
			return err
		}
		defer func() { err = cmp.Or(err, o.History.Close()) }()
		// It runs for years beside what the machine is there for: room is worth more to it than time.
		defer debug.SetGCPercent(debug.SetGCPercent(80))
		stamp := os.Getenv("JOURNAL_STREAM") == ""
		var failed error
		o.Say = func(l monitor.Line) {
			err := error(nil)
			if *out == "json" {
				err = report.JSONLine(e.stdout, l)
			} else {
				err = report.MonitorLineText(e.stdout, l, stamp)
			}
			failed = cmp.Or(failed, err)
		}
		if o.Kubernetes != nil {
			defer runBeside(cmd.Context(), o.Kubernetes.Run)()
		}
		return unlessPipeClosed(cmp.Or(monitor.Run(cmd.Context(), o), failed))
	}
	return cmd
}

// clusterFlags name the node that this machine is in Kubernetes.
type clusterFlags struct{ node, api, credentials string }

func (c *clusterFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.node, "node-name", "", "report to the Kubernetes API as this `node`")
	f.StringVar(&c.api, "kubernetes-api", "", "`URL` of the API (default: that of the pod)")
	f.StringVar(&c.credentials, "kubernetes-credentials", kubernetes.DefaultCredentials, "`FOLDER` with ca.crt and token for the API")
}

// reporter is who reports to the API; nil without --node-name.
func (c *clusterFlags) reporter(cmd *cobra.Command) (*kubernetes.Reporter, error) {
	if !cmd.Flags().Changed("node-name") {
		for _, name := range []string{"kubernetes-api", "kubernetes-credentials"} {
			if cmd.Flags().Changed(name) {
				return nil, usagef("--%s needs --node-name", name)
			}
		}
		return nil, nil
	}
	if !nodeName.MatchString(c.node) || len(c.node) > 253 {
		return nil, usagef("--node-name %q: want the name of this node as kubectl get nodes shows it", c.node)
	}
	api, err := kubernetes.NewAPI(c.api, c.credentials)
	if errors.Is(err, kubernetes.ErrAddress) && c.api != "" {
		return nil, usagef("--kubernetes-api %w", err)
	}
	if err != nil {
		return nil, err
	}
	return kubernetes.New(api, c.node), nil
}

var nodeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// runBeside runs f until ctx ends or the returned function is called, which waits for it.
func runBeside(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// historyFolder is where the history is.
func historyFolder(dir string) string {
	return cmp.Or(dir, filepath.Join(cmp.Or(os.Getenv("NATKIT_STATE_DIR"), tune.DefaultStateDir), "history"))
}

// historyLimits reads how much is kept.
func historyLimits(room, age string) (l history.Limits, err error) {
	bytes, err := parseBytes(room)
	if err != nil || bytes < 1<<20 {
		return l, usagef("--history-size %q: want a size of at least 1MB, such as 256MB", room)
	}
	d, err := parseAge(age)
	if err != nil || d < time.Hour {
		return l, usagef("--history-age %q: want a time of at least 1h, such as 7d", age)
	}
	return history.Limits{Bytes: bytes, Age: d}, nil
}

// checkListen refuses the value of a flag that is no address to listen at; none is none.
func checkListen(flag, address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err == nil && port != "" {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return usagef("--%s %q: want ADDRESS:PORT, such as 127.0.0.1:9641", flag, address)
	}
	return nil
}

// listen listens at an address. Services start before the network: an address that no interface has
// yet is no reason not to start.
func (e *env) listen(ctx context.Context, address string) (net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", address)
	if !errors.Is(err, unix.EADDRNOTAVAIL) {
		return l, err
	}
	config.Control = func(_, _ string, raw syscall.RawConn) error {
		var err error
		err2 := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) })
		return errors.Join(err, err2)
	}
	if l, err = config.Listen(ctx, "tcp", address); err == nil {
		fmt.Fprintf(e.stderr, "natkit: no interface has the address of %s yet; metrics are served once one has it\n", address)
	}
	return l, err
}
