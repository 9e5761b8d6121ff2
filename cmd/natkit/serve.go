// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
)

func newServeCommand(e *env) *cobra.Command {
	var file, engine, attach, metrics string
	var bypass, down bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the gateway as a service that follows its file and the machine",
		Long: `Start the gateway of a rule file, or adopt the one that is running, and keep it in
line with the file and the machine until SIGTERM or SIGINT. Packets do not depend
on this process: when it ends or is killed they are still translated, and the next
natkit serve adopts the gateway. With --down the gateway stops at the end.

The file is applied when it changes, however an editor replaces it, and on SIGHUP
even if it has not. A file with errors, or one that cannot be applied, is reported
and leaves the rules in use. natkit serve follows interfaces that are recreated or
appear later (the file may name one that does not exist yet), a masqueraded address
that changes (sessions of the old one end; if it is only lost, they wait), MAC
addresses and MTUs, ARP replies that an interface forgets when it goes down,
forwarding that somebody turns off, an nft table that somebody flushes, and garbage
collection that has stopped. natkit status reports the same.

While it runs nobody else may change the gateway: apply and down refuse.

A file with the key log has natkit serve keep the log of translations too, as natkit log
does: natkit who answers from it. The engine records also while natkit serve does not
run, and natkit serve reads on from there.

--metrics serves Prometheus metrics at /metrics, and /healthz, which answers 200
while packets are translated, otherwise 503 and why. It listens in the network
namespace where natkit was started, even with --netns. An address that no interface
has yet is no error: it is served once one has it. There is no authentication: use an
address that only the machine itself can reach.

Each action is printed on one line. For systemd this is a service of Type=notify,
or notify-reload from systemd 253.`,
		Example: `  natkit serve -f /etc/natkit/nat.yaml
  natkit serve -f nat.yaml --metrics 127.0.0.1:9640
  natkit serve -f nat.yaml --engine nft --netns gateway --down`,
		Args: noArgs,
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "rule `FILE`")
	cmd.Flags().StringVar(&engine, "engine", "", "engine that translates: ebpf or nft (default the running one, otherwise ebpf)")
	cmd.Flags().StringVar(&attach, "attach", "", "attach point of engine ebpf: auto, xdp or tc (default as it is, otherwise auto)")
	cmd.Flags().BoolVar(&bypass, "bypass", false, "start although packets of engine ebpf bypass filters, marks and shaping configured here")
	cmd.Flags().BoolVar(&down, "down", false, "stop the gateway at the end")
	cmd.Flags().StringVar(&metrics, "metrics", "", "serve Prometheus metrics at this `ADDRESS:PORT`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		o := control.ServeOptions{Down: down, Build: map[string]string{"version": version(), "goversion": runtime.Version()}}
		if o.Engine, o.Attach, err = serveFlags(file, engine, attach); err != nil {
			return err
		}
		if err := checkListen("metrics", metrics); err != nil {
			return err
		}
		o.Bypass = bypass
		if o.File, err = filepath.Abs(file); err != nil { // the record is read in other folders
			return err
		}
		if o.Namespace, err = netns.Open(e.netns); err != nil {
			return err
		}
		defer o.Namespace.Close()
		if metrics != "" {
			if o.Metrics, err = e.listen(cmd.Context(), metrics); err != nil {
				return fmt.Errorf("serve metrics: %w", err)
			}
			defer o.Metrics.Close()
		}
		if _, err := control.Clean(); err != nil {
			return err
		}
		o.Filters = func() ([]snapshot.Chain, error) { return probe.Chains(o.Namespace) }
		reload := make(chan os.Signal, 1)
		signal.Notify(reload, syscall.SIGHUP)
		defer signal.Stop(reload)
		o.Reload = reload
		// Under systemd the journal says when.
		stamp := os.Getenv("JOURNAL_STREAM") == ""
		var failed error
		var saying sync.Mutex // what keeps the log speaks, too
		o.Say = func(ev *control.ServeEvent) {
			saying.Lock()
			defer saying.Unlock()
			err := error(nil)
			if *out == "json" {
				err = report.JSONLine(e.stdout, ev)
			} else {
				err = report.ServeEventText(e.stdout, ev, stamp)
			}
			failed = cmp.Or(failed, err)
		}
		o.Record = recordFor(o.Namespace, func(text string) {
			o.Say(&control.ServeEvent{Time: time.Now(), Kind: "log", File: o.File, Why: []string{text}})
		})
		return unlessPipeClosed(next(cmd, nil, errors.Join(control.Serve(cmd.Context(), o), failed), "--engine nft"))
	}
	return cmd
}

// serveFlags reads what has few values, and refuses no file.
func serveFlags(file, engine, attach string) (en control.Engine, at control.Attach, err error) {
	if file == "" || file == "-" {
		return "", "", usagef("which rules? give --file FILE, which is watched")
	}
	if engine != "" {
		if en, err = control.ParseEngine(engine); err != nil {
			return "", "", usagef("--engine %w", err)
		}
	}
	if attach != "" {
		if at, err = control.ParseAttach(attach); err != nil {
			return "", "", usagef("--attach %w", err)
		}
	}
	return en, at, nil
}
