// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

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
		Long: `Bring up the NAT of a rule file, or adopt the one that is up, and keep it equal to
the file and to the machine until SIGTERM or SIGINT. Packets don't need this
process: when it ends, or is killed, they go on, and the next one adopts what is
up. --down takes the NAT down at the end.

The file is applied when it changes, however an editor replaces it, and by SIGHUP
also if it has not. A file with errors, or one that can't be applied, leaves the
rules in use, and is said. Followed are interfaces that are made anew or appear
later (the file may name one that is not there yet), a masqueraded address that
changes (sessions behind the old one end; they wait for an address that is only
lost), MAC addresses and MTUs, answers to ARP that an interface forgets when it
goes down, forwarding that somebody turns off, the table of engine nft that
somebody flushes, and expiry that has stopped. natkit status names the same.

As long as it runs nobody else may change the NAT: apply and down refuse.

--metrics answers Prometheus at /metrics, and at /healthz whether packets are
translated: 200, or 503 and why. It listens in the network namespace that natkit
was started in, also with --netns. There is no authentication: an address of the
machine's own is meant.

What it does it prints, a line each; for systemd it is a service of
Type=notify, or notify-reload from systemd 253 on. With -o json each is an object:
time, kind (up, adopted, reloaded, followed, waiting, kept, ended, down), file, why,
error, plan as natkit apply has it.`,
		Example: `  natkit serve -f /etc/natkit/nat.yaml
  natkit serve -f nat.yaml --metrics 127.0.0.1:9640
  natkit serve -f nat.yaml --engine nft --netns gateway --down`,
		Args: noArgs,
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "rule `FILE`")
	cmd.Flags().StringVar(&engine, "engine", "", "what carries the rules out: ebpf or nft; without it what is up, or else ebpf")
	cmd.Flags().StringVar(&attach, "attach", "", "where engine ebpf meets packets: auto, xdp or tc; without it as it is, or else auto")
	cmd.Flags().BoolVar(&bypass, "bypass", false, "accept that packets of engine ebpf go past filters, marks and shaping that are set up here")
	cmd.Flags().BoolVar(&down, "down", false, "take the NAT down at the end")
	cmd.Flags().StringVar(&metrics, "metrics", "", "answer Prometheus at this `ADDRESS:PORT`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		o := control.ServeOptions{Down: down, Build: map[string]string{"version": version(), "goversion": runtime.Version()}}
		if o.Engine, o.Attach, err = serveFlags(file, engine, attach); err != nil {
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
			if o.Metrics, err = net.Listen("tcp", metrics); err != nil {
				return fmt.Errorf("answer Prometheus: %w", err)
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
		o.Say = func(ev *control.ServeEvent) {
			err := error(nil)
			if *out == "json" {
				err = report.JSONLine(e.stdout, ev)
			} else {
				err = report.ServeEventText(e.stdout, ev, stamp)
			}
			failed = cmp.Or(failed, err)
		}
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
