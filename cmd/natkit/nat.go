// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/datapath"
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
		return fmt.Errorf("look for filters that packets would bypass: %w", err)
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
