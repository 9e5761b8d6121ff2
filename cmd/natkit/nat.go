// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/ui/report"
)

// natFlags are what up and apply have in common.
type natFlags struct {
	file, engine, attach string
	bypass, dryRun       bool
}

func (f *natFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.file, "file", "f", "", "rule `FILE` (- is stdin)")
	cmd.Flags().StringVar(&f.attach, "attach", "", "attach point of engine ebpf: auto, xdp or tc")
	cmd.Flags().BoolVar(&f.bypass, "bypass", false, "start although packets of engine ebpf bypass filters, marks and shaping configured here")
	cmd.Flags().BoolVar(&f.dryRun, "dry-run", false, "show what would be done and change nothing")
}

// read reads the rule file and the options for it.
func (f *natFlags) read(ctx context.Context, e *env) (file *rulefile.File, text string, o control.Options, err error) {
	if f.file == "" {
		return nil, "", o, usagef("which rules? give --file FILE")
	}
	if f.engine != "" {
		if o.Engine, err = control.ParseEngine(f.engine); err != nil {
			return nil, "", o, usagef("--engine %w", err)
		}
	}
	if f.attach != "" {
		if o.Attach, err = control.ParseAttach(f.attach); err != nil {
			return nil, "", o, usagef("--attach %w", err)
		}
	}
	o.Bypass = f.bypass
	if f.file == "-" {
		data, err := rulefile.Read(ctx, e.stdin)
		if err != nil {
			return nil, "", o, err
		}
		file, err = rulefile.Parse(rulefile.Stdin, data)
		return file, string(data), o, err
	}
	path, err := filepath.Abs(f.file) // the record is read in other folders
	if err != nil {
		return nil, "", o, err
	}
	data, err := rulefile.ReadFile(ctx, path)
	if err != nil {
		return nil, "", o, err
	}
	file, err = rulefile.Parse(path, data)
	return file, string(data), o, err
}

// run plans, or does, what a rule file says.
func (f *natFlags) run(ctx context.Context, e *env, output string,
	plan func(*rulefile.File, string, control.Options) (*control.Plan, error),
	do func(context.Context, *rulefile.File, string, control.Options) (*control.Plan, error),
) error {
	file, text, o, err := f.read(ctx, e)
	if err != nil {
		return err
	}
	if o.Namespace, err = netns.Open(e.netns); err != nil {
		return err
	}
	defer o.Namespace.Close()
	if o.Chains, err = probe.Chains(o.Namespace); err != nil {
		return fmt.Errorf("look for filters that packets would go past: %w", err)
	}
	var p *control.Plan
	if f.dryRun {
		p, err = plan(file, text, o)
	} else {
		if _, err := control.Clean(); err != nil {
			return err
		}
		p, err = do(ctx, file, text, o)
	}
	if err != nil {
		return err
	}
	r := &report.NATPlan{File: f.file, Done: !f.dryRun, Plan: p}
	return e.show(output, r)
}

func newUpCommand(e *env) *cobra.Command {
	f := &natFlags{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a NAT gateway here from a rule file",
		Long: `Start a NAT gateway in this network namespace, as a rule file describes it.

Engine ebpf translates and forwards packets at the ingress interface, before the
stack: in XDP where the network card's driver supports it, in tc elsewhere and for
what XDP cannot finish. No process keeps running: programs and maps are pinned.
Engine nft uses the kernel's own NAT, through one nftables table named natkit. The
same file works with both; where an engine cannot follow the file exactly, natkit
prints a warning.

Packets of engine ebpf bypass the FORWARD chain, other programs' chains and filters
on the interfaces, IPsec, routing by mark, and shaping. natkit lists which of these
are configured and refuses to start without --bypass.

Either everything is set up or nothing. What natkit changes in the namespace
(forwarding, ports reserved for NAT, proxy neighbours) is recorded first, and natkit
down restores it, even after natkit was killed.`,
		Example: `  natkit up -f nat.yaml --dry-run
  natkit up -f nat.yaml
  natkit up -f nat.yaml --engine nft --netns gateway`,
		Args: noArgs,
	}
	f.add(cmd)
	cmd.Flags().StringVar(&f.engine, "engine", "ebpf", "engine that translates: ebpf or nft")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := f.run(cmd.Context(), e, *out, control.MakePlan, control.Up)
		return next(cmd, nil, err, "--engine nft")
	}
	return cmd
}

func newApplyCommand(e *env) *cobra.Command {
	f := &natFlags{}
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Change the rules of the running gateway without losing sessions",
		Long: `Replace the rules in use with those of a rule file, atomically: all of them, or
none. Sessions whose mappings the new file still allows continue. Interfaces and
addresses are read again, so applying the rules in use also attaches to an
interface that was recreated and follows an address that has changed.

Programs of another natkit version are replaced too, if both use the same data
structures; no session is lost.`,
		Example: `  natkit apply -f nat.yaml --dry-run
  natkit apply -f nat.yaml
  natkit apply -f nat.yaml --netns gateway -o json`,
		Args: noArgs,
	}
	f.add(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return next(cmd, nil, f.run(cmd.Context(), e, *out, control.PlanApply, control.Apply), "")
	}
	return cmd
}

func newDownCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Stop the gateway and restore what it changed",
		Long: `Stop what natkit up started, complete or not, by this version or another: its
sessions end. Settings are restored, except those that somebody else has changed
since: natkit reports these and leaves them.

Engines of namespaces that no longer exist, which still hold memory, are removed
too.`,
		Example: "  natkit down\n  natkit down --netns gateway",
		Args:    noArgs,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		ns, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer ns.Close()
		d := &report.NATDown{Kept: []string{}}
		if d.Cleaned, err = control.Clean(); err != nil {
			return err
		}
		kept, err := control.Down(ns)
		if err != nil {
			return err
		}
		d.Kept = append(d.Kept, kept...)
		return e.show(*out, d)
	}
	return cmd
}
