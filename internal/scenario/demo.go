// SPDX-License-Identifier: Apache-2.0

// Package scenario tells what joins the parts of natkit from beginning to end: the
// demo's steps and the fault scenarios. It makes labs, loads them, looks at them
// with the doctor's eyes and cures them; what it tells goes to a Reporter.
package scenario

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/observe"
	"natkit/internal/lab"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
)

// DemoOptions says which demo to run. Its zero value is the published case.
type DemoOptions struct {
	Site int // 1 (default): a client of its own; 2: the client on the host itself, smaller load
	// NoHostWrite cures inside the lab's namespace: nf_conntrack_max, which is one
	// limit for all namespaces, is left alone.
	NoHostWrite bool
	// FillShare is how much of the machine's memory the table may be filled to;
	// 0 means DefaultFillShare. Where the table could grow larger, the demo makes
	// the collapse another way.
	FillShare float64
	Requests  int           // 0 means the site's number
	Window    time.Duration // how long the diagnosis watches; 0 means 6 s
	Turns     int           // of each mitigation, side by side; 0 means 3

	Command      string     // the command line, for the result
	ServeCommand []string   // as lab.Options.ServeCommand
	Place        tune.Place // where tune keeps its journal
	Report       Reporter
}

// DefaultFillShare keeps what the demo fills small beside everything else that
// runs on the machine.
const DefaultFillShare = 0.05

const (
	patience     = 2 * time.Second  // the case's -s 2
	leave        = 1000             // places left in the table: the case's nf_conntrack_max
	collapseTime = 15 * time.Second // enough to see it; all requests would take a minute of time-outs
	loadTime     = 60 * time.Second // a slow machine shows fewer requests, not a longer demo
	demoName     = "demo"           // whose the changes are, in tune's history
)

type site struct{ concurrency, requests int }

var sites = map[int]site{
	1: {concurrency: 5000, requests: 100000},
	2: {concurrency: 2000, requests: 10000},
}

// Demo runs the published case on this machine's kernel: a web server, the same
// server collapsing behind a published port, the cause found, cured, and the
// proof. It returns what it measured up to an error, too. Whatever happens, what
// it made is removed and what it changed is put back; after SIGKILL the next Demo
// does that, and so do natkit tune rollback and natkit lab down --all.
func Demo(ctx context.Context, o DemoOptions) (*DemoResult, error) {
	if o.Site == 0 {
		o.Site = 1
	}
	size, ok := sites[o.Site]
	if !ok {
		return nil, fmt.Errorf("site %d: want 1 or 2", o.Site)
	}
	if o.Requests > 0 {
		size.requests = o.Requests
		size.concurrency = min(size.concurrency, o.Requests)
	}
	if o.FillShare == 0 {
		o.FillShare = DefaultFillShare
	}
	if o.Window == 0 {
		o.Window = 6 * time.Second
	}
	if o.Turns == 0 {
		o.Turns = usualTurns
	}
	lock, err := o.lock()
	if err != nil {
		return nil, err
	}
	defer lock.Remove()
	if err := o.recover(ctx); err != nil {
		return nil, err
	}
	before, err := readHostValues()
	if err != nil {
		return nil, err
	}
	l, err := lab.Up(ctx, "published", lab.Options{
		LocalClient: o.Site == 2, Owned: true, Server: lab.ServerBuiltin, ServeCommand: o.ServeCommand,
	})
	if err != nil {
		return nil, err
	}
	d := &demo{o: o, size: size, lab: l, rules: l.Rules(), res: &DemoResult{Command: o.Command, Site: o.Site, Before: before, Steps: []DemoStep{}}}
	err = d.run(ctx)
	return d.res, errors.Join(err, d.restore())
}

// demo is a demo while it runs.
type demo struct {
	o           DemoOptions
	size        site
	lab         *lab.Lab
	res         *DemoResult
	applied     *tune.Record       // what the cure changed, nil before
	facts       *snapshot.Snapshot // what the diagnosis saw
	found       []causes.Finding
	rules       nft.Ruleset // of the kernel's NAT in the lab
	bridged     string      // net.bridge.bridge-nf-call-iptables with them
	accelerated bool        // this kernel can
}

func (d *demo) run(ctx context.Context) error {
	host, err := probe.Take(ctx, probe.Options{Netns: d.lab.NATNode().Handle()})
	if err != nil {
		return err
	}
	d.res.Kernel = host.Host.Kernel
	fault := d.chooseFault(host)
	d.res.Fault = fault.code
	d.o.Report.Begin(d.res, d.lab.Drawing(), fault.hostWrite)
	steps := []struct {
		DemoStep
		run func(context.Context, *DemoStep) error
	}{
		{DemoStep{Name: StepBaseline, Shows: "the web server on the host's own address, nothing translated",
			Command: d.benchCommand(d.lab.DirectURL(), loadTime)}, d.baseline},
		{DemoStep{Name: StepCollapse, Shows: fault.shows,
			Command: "natkit lab run " + fault.code}, func(ctx context.Context, a *DemoStep) error { return d.collapse(ctx, a, fault) }},
		{DemoStep{Name: StepDiagnosis, Shows: "what the kernel shows under that load, step by step, and what the doctor finds",
			Command: "natkit doctor --netns case-host"}, d.diagnosis},
		{DemoStep{Name: StepCure, Shows: fault.cureShows,
			Command: fault.cureCommand}, func(ctx context.Context, a *DemoStep) error { return fault.cure(ctx, a) }},
		{DemoStep{Name: StepProof, Shows: "the same load on the same published port, after the cure",
			Command: d.benchCommand(d.lab.URL(), loadTime)}, d.proof},
		{DemoStep{Name: StepAccelerate, Shows: "the same load on the cured kernel, with natkit accel forwarding established flows before the stack",
			Command: fmt.Sprintf("natkit accel on %s %s --tcp-liberal --netns case-host", publicSide, containerSide)}, d.accelerate},
		{DemoStep{Name: StepReplace, Shows: "the same load on the eBPF engine instead of the kernel's NAT; then all of them in turn",
			Command: "natkit up --netns case-host -f nat.yaml --bypass", RuleFile: d.engineFile().Text()}, d.replace},
	}
	for i := range steps {
		step := &steps[i].DemoStep
		if p, ok := published[step.Name]; ok && d.o.Site == 1 {
			step.Published = &p
		}
		d.o.Report.Step(step)
		began := time.Now()
		err := steps[i].run(ctx, step)
		step.Seconds = time.Since(began).Seconds()
		d.res.Steps = append(d.res.Steps, *step)
		if err != nil {
			return fmt.Errorf("step %s: %w", step.Name, err)
		}
		d.o.Report.Done(step)
	}
	return nil
}

// benchCommand is the load as a command line, in a lab named case.
func (d *demo) benchCommand(url string, limit time.Duration) string {
	client := "case-client"
	if d.o.Site == 2 {
		client = "case-host"
	}
	return fmt.Sprintf("natkit bench http --netns %s -c %d -n %d -t %.0f -r -s %.0f %s",
		client, d.size.concurrency, d.size.requests, limit.Seconds(), patience.Seconds(), url)
}

// load makes the case's load on url, whose server is in the node.
func (d *demo) load(ctx context.Context, url string, server *lab.Node, limit time.Duration) (*bench.HTTPResult, error) {
	total := float64(d.size.requests)
	return bench.HTTP(ctx, bench.HTTPOptions{
		URL: url, Concurrency: d.size.concurrency, Requests: d.size.requests, TimeLimit: limit,
		SocketTimeout: patience, TolerateErrors: true,
		Netns: d.lab.Node(lab.RoleClient).Handle(), ServerNetns: server.Handle(),
		Progress: func(p bench.HTTPProgress) {
			d.o.Report.Progress(fmt.Sprintf("%.0f s: %d completed, %d failed", p.Elapsed.Seconds(), p.Completed, p.Failed),
				max(float64(p.Completed+p.Failed)/total, p.Elapsed.Seconds()/limit.Seconds()))
		},
	})
}

func (d *demo) baseline(ctx context.Context, a *DemoStep) (err error) {
	a.HTTP, err = d.load(ctx, d.lab.DirectURL(), d.lab.NATNode(), loadTime)
	return err
}

func (d *demo) collapse(ctx context.Context, a *DemoStep, f demoFault) (err error) {
	if err := f.make(ctx); err != nil {
		return err
	}
	a.HTTP, err = d.load(ctx, d.lab.URL(), d.lab.ServerNode(), collapseTime)
	return err
}

func (d *demo) proof(ctx context.Context, a *DemoStep) (err error) {
	a.HTTP, err = d.load(ctx, d.lab.URL(), d.lab.ServerNode(), loadTime)
	return err
}

// diagnosis looks at the NAT node while the same load runs again.
func (d *demo) diagnosis(ctx context.Context, a *DemoStep) error {
	loading, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		quiet := *d
		quiet.o.Report = silent{}
		_, err := quiet.load(loading, d.lab.URL(), d.lab.ServerNode(), 4*d.o.Window)
		ended <- err
	}()
	profiled := make(chan *observe.Profile, 1)
	go func() {
		// Without a profile the rest of the diagnosis goes on.
		p, err := observe.TakeProfile(ctx, observe.ProfileOptions{For: d.o.Window})
		if err != nil {
			p = nil
		}
		profiled <- p
	}()

	node := d.lab.NATNode()
	var err error
	d.facts, err = probe.Take(ctx, probe.Options{
		Netns: node.Handle(), Window: d.o.Window, Dump: true,
		Progress: func(what string, part float64) { d.o.Report.Progress(what, part) },
	})
	profile := <-profiled
	stop()
	if lerr := <-ended; lerr != nil && loading.Err() == nil {
		err = errors.Join(err, lerr)
	}
	if err = errors.Join(err, ctx.Err()); err != nil {
		return err
	}
	d.found = causes.Judge(d.facts)
	a.Facts, a.Findings = d.facts, d.found
	d.o.Report.Facts(d.facts, profile)
	return nil
}
