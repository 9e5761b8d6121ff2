// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/snapshot"
)

// Fault is one cause of the doctor's catalogue, made to happen in a lab: first
// something that looks like it and is healthy, then the fault, then the cure that
// the doctor's finding gives. Faults are rows of the files faults_*.go; what such a row can
// say is in fault_actions.go, fault_traffic.go and fault_servers.go.
type Fault struct {
	Code string // of the cause
	// Healthy, Broken and Cured say what is done, a sentence each.
	Healthy, Broken, Cured string
	// Note says how the scenario differs from the real thing, "" where it does not.
	Note string

	topology string // "" for routed
	clients  int    // of the topology, 0 for one
	// healthy and broken bring their state about and say which traffic flows while
	// the doctor watches; cure does what the finding says. They are called in this
	// order on one lab.
	healthy, broken, cure action
}

// Faults are the scenarios, one for each cause that a lab can show, in the
// catalogue's order.
func Faults() (out []Fault) {
	rows := slices.Concat(tableFaults, natFaults, ruleFaults, linkFaults, routeFaults, programFaults)
	for _, c := range causes.Catalogue() {
		if i := slices.IndexFunc(rows, func(f Fault) bool { return f.Code == c.Code }); i >= 0 {
			out = append(out, rows[i])
		}
	}
	return out
}

// NoFault is why no lab can show a cause, "" where one does or there is no such cause.
func NoFault(code string) string {
	for _, c := range causes.Catalogue() {
		if c.Code == code {
			return c.NoLab
		}
	}
	return ""
}

// FaultOptions is how a Fault is run.
type FaultOptions struct {
	Window time.Duration // how long the doctor watches each time; 0 means 2 s
	// Begin, if not nil, is told the lab once it is up, and Step each step once it
	// is done; their error ends the run. Progress says what is going on, part from 0
	// to 1.
	Begin    func(drawing string, notes []string) error
	Step     func(*FaultStep) error
	Progress func(what string, part float64)

	// For tests. inside has findings write their commands for who is in the watched
	// namespace already. command, if not nil, is given every command of the finding's
	// remedy, in its order, in place of those that the scenario follows, and check each
	// one that shows whether the cure worked, while the traffic flows.
	inside         bool
	command, check func(ctx context.Context, watched *lab.Node, code, line string) error
}

// FaultStep is one state of the lab and what the doctor says about it.
type FaultStep struct {
	Name     string // healthy, broken, cured
	What     string
	Commands []string           // of the finding's remedy, that the cure consists of
	Facts    *snapshot.Snapshot // what the findings rest on
	Findings []causes.Finding
}

// Run plays the scenario in a lab of its own, which is gone when it returns, and
// returns the steps that were played. It is an error when the doctor does not say
// what it should: nothing of severity warning or above about the first and the
// last step, the fault's own code first about the second.
func (f Fault) Run(ctx context.Context, o FaultOptions) (steps []FaultStep, err error) {
	if o.Window == 0 {
		o.Window = 2 * time.Second
	}
	if o.Progress == nil {
		o.Progress = func(string, float64) {}
	}
	l, err := lab.Up(ctx, cmp.Or(f.topology, "routed"), lab.Options{Owned: true, Clients: f.clients})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	if o.Begin != nil {
		if err := o.Begin(l.Drawing(), l.Notes()); err != nil {
			return nil, err
		}
	}
	s := &faultRun{lab: l, watched: l.NATNode(), options: o}
	defer s.close()

	play := func(name, what string, change action) (*FaultStep, error) {
		step, err := s.step(ctx, name, what, change)
		if ctx.Err() != nil { // and not that some command was killed
			err = context.Cause(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("step %s: %w", name, err)
		}
		steps = append(steps, *step)
		return step, nil
	}
	healthy, err := play("healthy", f.Healthy, f.healthy)
	if err != nil {
		return steps, err
	}
	if wrong, ok := alarm(healthy); ok {
		return steps, fmt.Errorf("the doctor reported %s although nothing is wrong", wrong)
	}
	broken, err := play("broken", f.Broken, f.broken)
	if err != nil {
		return steps, err
	}
	if len(broken.Findings) == 0 || broken.Findings[0].Code != f.Code {
		return steps, fmt.Errorf("the doctor did not report %s first, but %s", f.Code, cmp.Or(strings.Join(codes(broken.Findings), ", "), "nothing"))
	}
	cured, err := play("cured", f.Cured, func(ctx context.Context, s *faultRun) error {
		return s.cure(ctx, f, &broken.Findings[0])
	})
	if err != nil {
		return steps, err
	}
	if wrong, ok := alarm(cured); ok {
		return steps, fmt.Errorf("the doctor still found %s after the cure", wrong)
	}
	if found := codes(cured.Findings); slices.Contains(found, f.Code) {
		return steps, fmt.Errorf("the doctor still advises about %s after the cure", f.Code)
	}
	return steps, nil
}

// alarm is the first finding of severity warning or above, which come first.
func alarm(step *FaultStep) (code string, ok bool) {
	if len(step.Findings) == 0 || step.Findings[0].Severity < causes.Warning {
		return "", false
	}
	return step.Findings[0].Code, true
}

func codes(findings []causes.Finding) (out []string) {
	for _, f := range findings {
		out = append(append(out, f.Code), codes(f.Consequences)...)
	}
	return out
}

// faultRun is the lab while a scenario runs in it.
type faultRun struct {
	lab     *lab.Lab
	watched *lab.Node // where the doctor looks; the NAT node unless a step says otherwise
	options FaultOptions

	// least is how long the doctor watches at least, where the fault shows only after a while.
	least time.Duration
	// traffic flows while the doctor watches, each function until its context ends.
	traffic []action
	// reads, if not nil, changes what the doctor is given to judge.
	reads    func(*snapshot.Snapshot)
	commands []string        // run by the present step
	found    *causes.Finding // what the cure follows, nil before
	file     string          // rule file of natkit's engine, where one is up
	kind     control.Engine
	closers  []func()
}

// close ends the servers.
func (s *faultRun) close() {
	for _, c := range s.closers {
		c()
	}
	s.closers = nil
}

// step changes the lab and asks the doctor about it.
func (s *faultRun) step(ctx context.Context, name, what string, change action) (*FaultStep, error) {
	s.options.Progress(what, 0)
	s.commands = nil
	if err := change(ctx, s); err != nil {
		return nil, err
	}
	facts, err := s.watch(ctx)
	if err != nil {
		return nil, err
	}
	step := &FaultStep{Name: name, What: what, Commands: s.commands, Facts: facts, Findings: causes.Judge(facts)}
	if s.options.Step != nil {
		return step, s.options.Step(step)
	}
	return step, nil
}

// watch takes a Snapshot while the traffic flows.
func (s *faultRun) watch(ctx context.Context) (*snapshot.Snapshot, error) {
	flowing, stop := context.WithCancel(ctx)
	failed := make([]error, len(s.traffic))
	var wg sync.WaitGroup
	for i, run := range s.traffic {
		wg.Go(func() { failed[i] = run(flowing, s) })
	}
	facts, err := probe.Take(ctx, probe.Options{Netns: s.watched.Handle(), Window: max(s.options.Window, s.least), Dump: true, Engine: control.ReadFacts, Progress: s.options.Progress})
	err = errors.Join(err, s.check(ctx))
	stop()
	wg.Wait()
	for _, e := range failed {
		if e != nil && !errors.Is(e, context.Canceled) {
			err = errors.Join(err, fmt.Errorf("make traffic: %w", e))
		}
	}
	if err = errors.Join(err, ctx.Err()); err != nil {
		return nil, err
	}
	if s.reads != nil {
		s.reads(facts)
	}
	if s.options.inside {
		facts.Netns.Name = ""
	}
	return facts, nil
}

// cure does what the scenario takes from the finding's remedy, or all of that.
func (s *faultRun) cure(ctx context.Context, f Fault, found *causes.Finding) error {
	s.found = found
	if s.options.command != nil {
		for _, line := range found.Remedy {
			if strings.HasPrefix(line, "#") {
				continue
			}
			s.commands = append(s.commands, line)
			if err := s.options.command(ctx, s.watched, f.Code, line); err != nil {
				return err
			}
		}
	}
	return f.cure(ctx, s)
}

// check runs the commands that show whether the cure worked, where a test wants that.
func (s *faultRun) check(ctx context.Context) error {
	if s.found == nil || s.options.check == nil {
		return nil
	}
	for _, line := range s.found.Verify {
		if err := s.options.check(ctx, s.watched, s.found.Code, line); err != nil {
			return err
		}
	}
	return nil
}
