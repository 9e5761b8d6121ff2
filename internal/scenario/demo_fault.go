// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
	"natkit/internal/words/size"
)

// How the demo makes the published port collapse, and cures that.

// demoFault is a way to make the published port collapse.
type demoFault struct {
	code        string
	shows       string
	hostWrite   string // what the cure writes host-wide, in a sentence; "" for nothing
	cureShows   string
	cureCommand string
	make        func(context.Context) error
	cure        func(context.Context, *DemoStep) error
}

// chooseFault takes the case's own fault, a full table, unless filling the table
// to its limit would take too much of this machine's memory.
func (d *demo) chooseFault(s *snapshot.Snapshot) demoFault {
	ct := s.Conntrack
	switch {
	case ct == nil || ct.Max == 0:
		d.res.FaultReason = "nf_conntrack_max is not set here: the table has no limit to reach"
	default:
		object := ct.ObjectBytes
		if object == 0 {
			object = 512 // more than any kernel's; slab information is for root
		}
		need, allowed := float64(ct.Max)*float64(object), float64(s.Host.MemoryBytes)*d.o.FillShare
		if need <= allowed {
			return d.tableFull(ct)
		}
		d.res.FaultReason = fmt.Sprintf("filling the table to its limit of %d entries would take %s of kernel memory, more than %.0f %% of this machine's %s",
			ct.Max, size.Of(uint64(min(need, 1<<62))), 100*d.o.FillShare, size.Of(s.Host.MemoryBytes))
	}
	return d.portsExhausted()
}

// filled is what the table is filled with; the cure without host-wide write takes
// it out again.
var filled = netip.MustParsePrefix("198.18.0.0/15")

// tableFull is the case's own fault.
func (d *demo) tableFull(ct *snapshot.Conntrack) demoFault {
	f := demoFault{
		code:  "conntrack-table-full",
		shows: fmt.Sprintf("the same server behind the published port, with room for only %s more in the connection tracking table", plural.Count(leave, "entry")),
		make: func(ctx context.Context) error {
			node := d.lab.NATNode()
			// The baseline's connections are still in TIME_WAIT and would make room by expiring.
			if err := node.Do(func() error { return conntrack.Flush(ctx) }); err != nil {
				return err
			}
			res, err := node.FillConntrack(ctx, leave, func(done, total int) {
				d.o.Report.Progress(fmt.Sprintf("filling the host's table: %d of %d entries", done, total), float64(done)/float64(total))
			})
			if err != nil {
				return err
			}
			d.o.Report.Say("the table of the lab's host holds %d idle connections more; its limit is %d", res.Added, ct.Max)
			return nil
		},
	}
	// Every request leaves an entry for the two minutes of TIME_WAIT.
	want := ct.Max + uint64(2*d.size.requests)
	limit := uint64(1)
	for limit < want {
		limit *= 2
	}
	if d.o.NoHostWrite {
		f.cureShows = "inside the namespace: shorter timeouts, and the entries that fill the table removed"
		f.cureCommand = "natkit tune apply --netns case-host --no-host-write"
		f.cure = d.cureInside
		return f
	}
	d.res.HostWrite = true
	f.hostWrite = fmt.Sprintf("for the cure nf_conntrack_max, one limit for the whole machine, is raised from %d to %d and restored at the end (if natkit is killed: natkit tune rollback)", ct.Max, limit)
	f.cureShows = "the limit of the table raised to fit, with the old value kept in a journal"
	f.cureCommand = "natkit tune apply --netns case-host"
	f.cure = func(ctx context.Context, a *DemoStep) error {
		return d.apply(ctx, a, []snapshot.Setting{{
			Name: "net.netfilter.nf_conntrack_max", Value: strconv.FormatUint(limit, 10), Code: f.code,
			Reason: fmt.Sprintf("the table is full at %d, and %s keep one entry each for two minutes", ct.Max, plural.Count(d.size.requests, "request")),
		}}, func(c tune.Change) bool { return c.Setting == "net.netfilter.nf_conntrack_max" })
	}
	return f
}

// cureInside cures a full table without touching the limit that all namespaces share.
func (d *demo) cureInside(ctx context.Context, a *DemoStep) error {
	if err := d.apply(ctx, a, causes.Settings(d.found), func(c tune.Change) bool { return c.Scope == tune.ScopeNamespace }); err != nil {
		return err
	}
	return d.lab.NATNode().Do(func() (err error) {
		a.Removed, err = conntrack.Delete(ctx, conntrack.Filter{Src: filled})
		return err
	})
}

// apply makes those changes of the plan that are chosen.
func (d *demo) apply(ctx context.Context, a *DemoStep, wanted []snapshot.Setting, choose func(tune.Change) bool) error {
	plan, err := tune.MakePlan(d.facts, tune.PlanOptions{Wanted: wanted, MemoryShare: 1})
	if err != nil {
		return err
	}
	chosen := []tune.Change{}
	for _, c := range plan.Changes {
		if choose(c) {
			chosen = append(chosen, c)
		}
	}
	plan.Changes = chosen
	if a.Changes = chosen; len(chosen) == 0 {
		return nil
	}
	d.applied, err = tune.Apply(ctx, plan, tune.ApplyOptions{Place: d.o.Place, By: demoName})
	return err
}

// portsExhausted makes the collapse with source translation instead: the host
// hides its clients from the container behind too few ports.
func (d *demo) portsExhausted() demoFault {
	a := d.lab.Options().Addresses
	rules := func(ports snapshot.PortRange) error {
		set := nft.Gateway{
			Table: "natkit-demo", Inside: a.Client.Masked(), Outside: "docker0",
			Address: a.Far.Addr(), Ports: ports,
		}.Compile()
		d.rules = append(d.lab.Rules(), set...)
		return set.Apply(d.lab.NATNode().Handle())
	}
	few := snapshot.PortRange{Min: 40000, Max: 40009}
	return demoFault{
		code:        "snat-ports-exhausted",
		shows:       fmt.Sprintf("the same server behind the published port, its clients hidden behind ports %d to %d of the bridge", few.Min, few.Max),
		cureShows:   "all ports from 1024 up instead",
		cureCommand: fmt.Sprintf("ip netns exec case-host nft 'insert rule ip natkit-demo POSTROUTING ip daddr %s meta l4proto tcp snat to %s:1024-65535'", a.Server, a.Far.Addr()),
		make:        func(context.Context) error { return rules(few) },
		cure:        func(context.Context, *DemoStep) error { return rules(snapshot.PortRange{Min: 1024, Max: 65535}) },
	}
}
