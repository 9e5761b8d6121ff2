// SPDX-License-Identifier: Apache-2.0

// Package scenario tells what joins the parts of natkit from beginning to end: the
// demo's steps and the fault scenarios. It makes labs, loads them, looks at them
// with the doctor's eyes and cures them; what it tells goes to a Reporter.
package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"natkit/internal/bench"
	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/journal"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/lab"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
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

// Reporter is told the demo while it happens.
type Reporter interface {
	// Begin comes once, before anything is changed.
	Begin(d *DemoResult, drawing string, hostWrite string)
	// Step begins a step: what it shows, and the command that does it alone.
	Step(step *DemoStep)
	// Say is a line inside the step.
	Say(format string, args ...any)
	// Progress replaces itself; part is 0 to 1.
	Progress(what string, part float64)
	// Facts shows what the diagnosis looked at before the doctor spoke; p is nil
	// where this kernel's stacks can't be sampled.
	Facts(s *snapshot.Snapshot, p *observe.Profile)
	// Done ends the step: its figures are in.
	Done(step *DemoStep)
}

// The steps, in their order.
const (
	StepBaseline   = "baseline"
	StepCollapse   = "collapse"
	StepDiagnosis  = "diagnosis"
	StepCure       = "cure"
	StepProof      = "proof"
	StepAccelerate = "accelerate"
	StepReplace    = "replace"
)

// DemoStep is one step. Which of HTTP, Findings and Changes it has depends on what
// it does; each has the form that its own command prints.
type DemoStep struct {
	Name      string             `json:"name"`
	Shows     string             `json:"shows"`
	Command   string             `json:"command"` // that does it alone, in a lab named case
	Seconds   float64            `json:"duration_s"`
	HTTP      *bench.HTTPResult  `json:"http,omitempty"`
	Published *Published         `json:"published_result,omitempty"`
	Findings  []causes.Finding   `json:"findings,omitempty"`
	Changes   []tune.Change      `json:"changes,omitempty"`
	Removed   uint64             `json:"removed_entries,omitempty"` // from the conntrack table, by a cure without host-wide write
	Facts     *snapshot.Snapshot `json:"facts,omitempty"`           // what the findings rest on
	RuleFile  string             `json:"rule_file,omitempty"`       // that the load ran on
	Figures   []bench.Figure     `json:"figures,omitempty"`         // of mitigations side by side, by their names
	NotRun    string             `json:"not_run,omitempty"`         // why the step was left out here
}

// Published is what the case's authors measured, elsewhere and on other
// hardware: never natkit's own figures.
type Published struct {
	Completed         int     `json:"completed"`
	RequestsPerSecond float64 `json:"requests_per_second,omitempty"`
	TimePerRequestMS  float64 `json:"time_per_request_ms,omitempty"`
	ConnectMS         float64 `json:"connect_mean_ms,omitempty"`
	Note              string  `json:"note,omitempty"`
}

// published are the figures of the first site; the second published none of its
// requests.
var published = map[string]Published{
	StepBaseline: {Completed: 100000, RequestsPerSecond: 6576, TimePerRequestMS: 760, ConnectMS: 177},
	StepCollapse: {Completed: 5602, Note: "stopped by a timeout of 2 s"},
	StepProof:    {Completed: 100000, RequestsPerSecond: 6315, TimePerRequestMS: 791, ConnectMS: 355},
}

// DemoResult is a whole demo.
type DemoResult struct {
	Command     string     `json:"command"` // that made it
	Kernel      string     `json:"kernel"`
	Site        int        `json:"site"`
	Fault       string     `json:"fault"` // code of the cause that was made
	FaultReason string     `json:"fault_reason,omitempty"`
	HostWrite   bool       `json:"host_write"` // nf_conntrack_max was raised, and put back
	Steps       []DemoStep `json:"steps"`
	// Restored reports that in the end the host-wide values were as before and
	// nothing of the lab was left. Left names what was not so.
	Restored bool       `json:"restored"`
	Left     []string   `json:"left,omitempty"`
	Before   HostValues `json:"before"`
	After    HostValues `json:"after"`
}

// HostValues are the settings that no namespace has for itself and that the demo
// could have changed.
type HostValues struct {
	ConntrackMax     uint64 `json:"nf_conntrack_max"`
	ConntrackBuckets uint64 `json:"nf_conntrack_buckets"`
}

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

// lock keeps a second demo away: it would measure the first one's load.
func (o *DemoOptions) lock() (*journal.Journal, error) {
	lock, err := journal.Open(filepath.Join(cmp.Or(o.Place.StateDir, tune.DefaultStateDir), "demo"))
	if errors.Is(err, journal.ErrLocked) {
		return nil, errors.New("another demo is running on this machine")
	}
	return lock, err
}

// recover puts back what a killed demo changed. Its lab is removed by lab.Up.
func (o *DemoOptions) recover(ctx context.Context) error {
	history, err := tune.History(o.Place)
	if err != nil {
		return err
	}
	for _, r := range history {
		if r.By != demoName || (r.State != tune.StateApplied && r.State != tune.StateInterrupted) {
			continue
		}
		if _, err := tune.Rollback(ctx, r.ID, tune.RollbackOptions{Place: o.Place}); err != nil {
			return fmt.Errorf("restore what a killed demo changed: %w", err)
		}
	}
	for _, r := range history {
		if r.By != demoName && r.State == tune.StateInterrupted {
			return &tune.PendingError{ID: r.ID} // the cure would be refused
		}
	}
	return nil
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

func (d *demo) collapse(ctx context.Context, a *DemoStep, f fault) (err error) {
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

// silent is for a load that runs beside something else.
type silent struct{}

func (silent) Begin(*DemoResult, string, string)          {}
func (silent) Step(*DemoStep)                             {}
func (silent) Say(string, ...any)                         {}
func (silent) Progress(string, float64)                   {}
func (silent) Facts(*snapshot.Snapshot, *observe.Profile) {}
func (silent) Done(*DemoStep)                             {}

// fault is a way to make the published port collapse.
type fault struct {
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
func (d *demo) chooseFault(s *snapshot.Snapshot) fault {
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
			ct.Max, tune.Bytes(uint64(min(need, 1<<62))), 100*d.o.FillShare, tune.Bytes(s.Host.MemoryBytes))
	}
	return d.portsExhausted()
}

// filled is what the table is filled with; the cure without host-wide write takes
// it out again.
var filled = netip.MustParsePrefix("198.18.0.0/15")

// tableFull is the case's own fault.
func (d *demo) tableFull(ct *snapshot.Conntrack) fault {
	f := fault{
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
func (d *demo) portsExhausted() fault {
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
	return fault{
		code:        "snat-ports-exhausted",
		shows:       fmt.Sprintf("the same server behind the published port, its clients hidden behind ports %d to %d of the bridge", few.Min, few.Max),
		cureShows:   "all ports from 1024 up instead",
		cureCommand: fmt.Sprintf("ip netns exec case-host nft 'insert rule ip natkit-demo POSTROUTING ip daddr %s meta l4proto tcp snat to %s:1024-65535'", a.Server, a.Far.Addr()),
		make:        func(context.Context) error { return rules(few) },
		cure:        func(context.Context, *DemoStep) error { return rules(snapshot.PortRange{Min: 1024, Max: 65535}) },
	}
}

// restore puts back what the demo changed, removes what it made, and looks
// whether that is so. It works also when the demo's context has ended.
func (d *demo) restore() error {
	var errs []error
	if d.applied != nil && d.applied.State == tune.StateApplied {
		_, err := tune.Rollback(context.Background(), d.applied.ID, tune.RollbackOptions{Place: d.o.Place})
		errs = append(errs, err)
	}
	var made []netns.Named
	for _, n := range d.lab.Nodes() {
		made = append(made, netns.Named{Name: n.Netns, Inode: n.Handle().Inode()})
	}
	errs = append(errs, d.lab.Down())
	after, err := readHostValues()
	errs = append(errs, err)
	d.res.After = after
	if after != d.res.Before {
		d.res.Left = append(d.res.Left, fmt.Sprintf("host-wide values: were %+v, are %+v", d.res.Before, after))
	}
	list, err := netns.List()
	errs = append(errs, err)
	for _, n := range list {
		if slices.Contains(made, n) {
			d.res.Left = append(d.res.Left, "network namespace "+n.Name)
		}
	}
	err = errors.Join(errs...)
	d.res.Restored = err == nil && len(d.res.Left) == 0
	return err
}

// readHostValues reads the host-wide values as this process sees them.
func readHostValues() (HostValues, error) {
	l, err := conntrack.ReadLimits()
	return HostValues{ConntrackMax: l.Max, ConntrackBuckets: l.Buckets}, err
}
