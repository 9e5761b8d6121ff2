// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/control"
	"natkit/internal/nat/nft"
	"natkit/internal/scenario"
	"natkit/internal/snapshot"
	"natkit/internal/ui/report"
)

func newHooksCommand(e *env) *cobra.Command {
	var cost hookCostOptions
	cmd := &cobra.Command{
		Use:   "hooks",
		Short: "List the functions on the netfilter hooks, and what they cost",
		Long: `List the functions on the netfilter hooks of a namespace, by family, hook and
priority, in the order in which a packet meets them, with the chain of nftables
or the table of iptables behind them where there is one.

Functions behind a └ are not on the hook themselves: the NAT core above them passes
the first packet of a flow to these chains.

A BPF program reads the kernel's own lists, which needs root or CAP_BPF and
CAP_PERFMON. Without these natkit asks the kernel by netlink, if the kernel was built
with CONFIG_NETFILTER_NETLINK_HOOK.

With --cost natkit measures the share of CPU time of each function and the number of
packets on each hook, and shows which functions no rule in use needs, with the
commands that remove them: empty chains, legacy tables, br_netfilter, tracking of
traffic that nothing translates, helpers. Time is sampled on the whole machine. The
saving depends on the kernel: --measure compares routers in separate namespaces,
which keeps the CPUs busy for about forty seconds. It loads no module: the cost of
br_netfilter and of the SIP helper is shown only if they are loaded. The output
lists what was not measured.`,
		Example: `  natkit hooks
  natkit hooks --cost --for 10s
  natkit hooks --netns gateway
  natkit hooks --netns pid:1234 -o json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.BoolVar(&cost.on, "cost", false, "measure the CPU time of each function, and show which no rule needs")
	timeVar(f, &cost.window, "for", 10*time.Second, "with --cost: how long to look")
	f.BoolVar(&cost.noDump, "no-dump", false, "with --cost: do not read the entries of the conntrack table")
	f.BoolVar(&cost.measure, "measure", false, "with --cost: measure in a lab what removing saves")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !cost.on {
			for _, name := range []string{"for", "no-dump", "measure"} {
				if cmd.Flags().Changed(name) {
					return usagef("--%s goes with --cost", name)
				}
			}
		}
		if cost.window <= 0 {
			return usagef("--for %v: want a time", cost.window)
		}
		h, err := netns.Open(e.netns)
		if err != nil {
			return err
		}
		defer h.Close()
		if cost.on {
			r, err := cost.look(cmd.Context(), e, h)
			if err != nil {
				return err
			}
			e.cutShort(cmd.Context(), seconds(r.Seconds), cost.window)
			if *out == "json" {
				return unlessPipeClosed(report.JSON(e.stdout, r))
			}
			return unlessPipeClosed(r.Text(e.stdout))
		}
		hooks, err := observe.Hooks(h)
		if err != nil {
			return err
		}
		r := &report.Hooks{Netns: h.Inode(), Hooks: hooks}
		r.Engine = report.NewHooksNote(e.engine(h), e.netns)
		if *out == "json" {
			return unlessPipeClosed(report.JSON(e.stdout, r))
		}
		return unlessPipeClosed(r.Text(e.stdout))
	}
	return cmd
}

type hookCostOptions struct {
	on, noDump, measure bool
	window              time.Duration
}

// look reads the facts and takes a profile of the same time, and measures then.
func (o *hookCostOptions) look(ctx context.Context, e *env, h *netns.Handle) (*report.HookCost, error) {
	line := newProgressLine(e)
	defer line.clear()
	line.show("looking for %v ...", o.window)
	var s *snapshot.Snapshot
	p := &observe.Profile{}
	var unsampled error
	rulesBefore, rulesErr := baseRules(h)
	g, inner := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		s, err = probe.Take(inner, probe.Options{Netns: h, Window: o.window, Dump: !o.noDump, Engine: control.ReadFacts})
		return err
	})
	g.Go(func() error {
		taken, err := observe.TakeProfile(inner, observe.ProfileOptions{For: o.window})
		if errors.Is(err, observe.ErrUnavailable) { // the rest can be told
			unsampled = err
			return nil
		}
		p = taken
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var rules map[nft.ChainName][]nft.RuleUse
	if rulesErr == nil { // the facts say what is missing
		if rules, rulesErr = baseRules(h); rulesErr == nil {
			nft.Since(rulesBefore, rules)
		}
	}
	r := report.NewHookCost(s, p, rules)
	if unsampled != nil {
		r.Miss("shares of time", unsampled)
	}
	if !o.measure || ctx.Err() != nil {
		return r, nil
	}
	var err error
	line.say("%s was watched; measuring in a lab takes about %s", about(o.window), about(scenario.MeasureHooksTakes))
	if r.Measured, err = scenario.MeasureHooks(ctx, version(), line.show); err != nil {
		if ctx.Err() == nil {
			return nil, err
		}
		r.Miss("what removing saves", errors.New("interrupted while it was measured"))
		return r, nil
	}
	r.Measured.Fill(r.Needless)
	return r, nil
}

// baseRules are the rules of the chains on hooks. Without such a chain nobody is
// asked: the question would load nftables where it is not.
func baseRules(h *netns.Handle) (map[nft.ChainName][]nft.RuleUse, error) {
	hooks, err := observe.Hooks(h)
	if err != nil || !slices.ContainsFunc(hooks, func(h snapshot.Hook) bool { return h.Owner == "nf_tables" }) {
		return nil, err
	}
	return nft.BaseRules(h)
}
