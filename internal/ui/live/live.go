// SPDX-License-Identifier: Apache-2.0

// Package live is what a namespace does now, interval by interval: how its
// connection tracking table fills, which flows come and go, what is dropped and
// what the doctor says of the last window. It shows nothing.
//
// What is cheap is read every interval. What is not, the facts that findings rest
// on, is read once a window, by a goroutine of its own, so that a table of a million
// entries does not hold the clock up; and the entries of the table are read no more
// than one part in a hundred of the time, however large it is.
package live

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/observe"
	"natkit/internal/nat/control"
	"natkit/internal/snapshot"
)

// Options say what to watch, and how often.
type Options struct {
	Netns    *netns.Handle // nil is the caller's own
	Interval time.Duration // between two moments
	Window   time.Duration // that findings are judged from
	Dump     bool          // read the entries of the table, once a window or less often
	Events   bool          // count flows by the kernel's events
}

// dumpShare bounds how much of the time the table is being read: from one dump to
// the next it is so many times as long as the dump took, at least.
const dumpShare = 100

// firstWindow is shorter, so that there is something to see.
const firstWindow = 2 * time.Second

// Moment is what happened in one interval, and what is known at its end. Nil is
// not known: the reason stands in Unseen.
type Moment struct {
	At      time.Time      `json:"time"`
	Seconds float64        `json:"interval_s"`
	Host    snapshot.Host  `json:"host"`
	Netns   snapshot.Netns `json:"namespace"`

	Table  *Fill           `json:"conntrack_table,omitzero"`
	Flows  *Flows          `json:"flow_rates,omitzero"`
	Drops  *snapshot.Drops `json:"drops,omitzero"`
	CPUs   []snapshot.CPU  `json:"cpus,omitzero"` // the host's
	Judged *Judged         `json:"judged,omitzero"`
	Unseen []string        `json:"notes,omitzero"`
}

// Fill is how full the table is, and where that leads.
type Fill struct {
	Entries uint64 `json:"entries"`
	Max     uint64 `json:"entries_max"` // 0: no limit
	// PerSecond is how fast it grows over the last half minute; nil at first.
	PerSecond *float64 `json:"growth_per_second,omitzero"`
	// FullIn is in how many seconds it is full if it goes on so; nil if it does not
	// grow, or ever less.
	FullIn *float64 `json:"full_in_s,omitzero"`
}

// Flows is how many entries began and ended.
type Flows struct {
	NewPerSecond   float64 `json:"new_per_second"`
	EndedPerSecond float64 `json:"ended_per_second"`
	LostEvents     uint64  `json:"lost_events"`
}

// Judged is what the last whole window showed.
type Judged struct {
	At            time.Time             `json:"time"`
	WindowSeconds float64               `json:"interval_s"`
	Table         *snapshot.Table       `json:"conntrack_table,omitzero"` // nil without a dump
	TableAt       time.Time             `json:"table_time,omitzero"`      // when it was read, which may be some windows ago
	SNATPorts     []PortUse             `json:"snat_ports"`               // fullest first
	Engine        *snapshot.Engine      `json:"natkit_engine,omitzero"`   // natkit's own, where one is up
	EngineRates   *EngineRates          `json:"engine_rates,omitzero"`
	TopFlows      []FlowRate            `json:"top_flows,omitzero"`       // most bytes first, at most snapshot.TopN
	FlowsNote     string                `json:"top_flows_note,omitempty"` // why there are none, or not all
	Findings      []causes.Finding      `json:"findings"`
	Unseen        []snapshot.Capability `json:"unseen"` // only those that are not there
}

// PortUse is how many of its ports an outside address uses towards a destination.
type PortUse struct {
	snapshot.SNATUse
	Ports int `json:"usable_ports"` // that source translation may choose from
}

// Watch gives a Moment an interval to fn until ctx ends, which is no error, or fn
// returns one. What can't be seen costs its part.
func Watch(ctx context.Context, o Options, fn func(*Moment) error) error {
	w := &watcher{o: o, fn: fn, take: probe.Take, last: time.Now()}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.host = probe.Host()
	w.host.AvailableBytes = 0 // it would be that of the start
	drops, err := observe.OpenDrops(observe.DropOptions{Netns: o.Netns.Inode()})
	if err != nil {
		w.cannot("dropped packets", err)
	} else {
		defer drops.Close()
		w.drops = drops
	}
	if w.cpus, err = probe.NewCPUMeter(o.Netns); err != nil {
		w.cannot("processors", err)
		w.cpus = nil
	}
	broken := make(chan error, 1)
	var judging sync.WaitGroup
	judging.Go(func() { w.judge(ctx, broken) })
	err = w.watch(ctx, broken)
	if ctx.Err() != nil {
		err = nil
	}
	cancel()
	judging.Wait() // it reads from the namespace, which is the caller's to close
	return err
}

type watcher struct {
	o     Options
	fn    func(*Moment) error
	take  func(context.Context, probe.Options) (*snapshot.Snapshot, error)
	host  snapshot.Host
	drops *observe.Drops
	cpus  *probe.CPUMeter

	unseen []string
	trend  fillTrend
	last   time.Time
	judged atomic.Pointer[Judged]
}

func (w *watcher) cannot(what string, err error) {
	w.unseen = append(w.unseen, fmt.Sprintf("%s: %v", what, err))
}

// watch lets the events' clock tick, or one of its own where there are no events.
func (w *watcher) watch(ctx context.Context, broken <-chan error) error {
	tick := func(r *conntrack.Rates) error {
		select {
		case err := <-broken:
			return err
		default:
			return w.tick(r)
		}
	}
	if w.o.Events {
		var failed error
		err := w.o.Netns.Do(func() error {
			if err := eventsAreOn(); err != nil {
				failed = err
				return nil
			}
			told := false
			err := conntrack.Watch(ctx, conntrack.WatchOptions{Interval: w.o.Interval, NoStates: true}, func(r *conntrack.Rates) error {
				told = true
				return tick(r)
			})
			if err != nil && !told { // it can't be watched at all
				failed, err = err, nil
			}
			return err
		})
		if err != nil || failed == nil {
			return err
		}
		w.cannot("new and ended flows", failed)
	}
	ticks := time.NewTicker(w.o.Interval)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
			if ctx.Err() != nil { // where both are so, select takes either
				return nil
			}
			if err := tick(nil); err != nil {
				return err
			}
		}
	}
}

// eventsAreOn says why there would be no events. It does not load connection
// tracking where it is not.
func eventsAreOn() error {
	mode, err := conntrack.ReadEventsMode()
	if err != nil {
		return err
	}
	if mode == conntrack.EventsOff {
		return errors.New("events are off (net.netfilter.nf_conntrack_events is 0)")
	}
	return nil
}

// tick makes a Moment of what is cheap to read and of the last judgement.
func (w *watcher) tick(r *conntrack.Rates) error {
	now := time.Now()
	m := &Moment{
		At: now, Seconds: now.Sub(w.last).Seconds(), Host: w.host,
		Netns:  snapshot.Netns{Name: w.o.Netns.Name(), Inode: w.o.Netns.Inode()},
		Judged: w.judged.Load(), Unseen: w.unseen,
	}
	w.last = now
	var limits conntrack.Limits
	if err := w.o.Netns.Do(func() (err error) {
		limits, err = conntrack.ReadLimits()
		return err
	}); err == nil {
		m.Table = w.trend.add(now, limits)
	}
	if r != nil {
		m.Flows = &Flows{float64(r.New) / r.Seconds, float64(r.Destroyed) / r.Seconds, r.Lost}
	}
	if w.drops != nil {
		d, err := w.drops.Read()
		if err != nil {
			return err
		}
		m.Drops = &d
	}
	if w.cpus != nil {
		var err error
		if m.CPUs, err = w.cpus.Read(); err != nil {
			return err
		}
	}
	return w.fn(m)
}

// judge takes one Snapshot after the other.
func (w *watcher) judge(ctx context.Context, broken chan<- error) {
	defer func() { // a screen must be taken down before the process ends
		if p := recover(); p != nil {
			broken <- fmt.Errorf("judge the last window: %v", p)
		}
	}()
	var drops probe.DropMeter // besides that of the screen, whose intervals are others
	defer drops.Close()
	hooks := observe.OpenHooks()
	defer hooks.Close()
	window := min(firstWindow, w.o.Window)
	var dump dumped
	var held map[string]bool // what the last window showed
	var flows flowMeters
	for ctx.Err() == nil {
		o := probe.Options{Netns: w.o.Netns, Window: window, Engine: control.ReadFacts, Drops: &drops, Hooks: hooks, NoSeries: true, Quiet: true}
		o.Table = dump.inUse(time.Now().Add(window))
		o.Dump = w.o.Dump && o.Table == nil
		if o.Dump {
			flows.kernel.begin()
		}
		o.EachFlow = flows.kernel.add
		s, err := w.take(ctx, o)
		if err != nil {
			broken <- err
			return
		}
		j := judgement(s, held)
		held = named(j.Findings)
		if j.Table != nil {
			j.TableAt = dump.read(j.Table, time.Now())
		}
		flows.judged(j, w.o.Netns)
		w.judged.Store(j)
		window = w.o.Window
	}
}

// dumped is what was read of the table last.
type dumped struct {
	table *snapshot.Table
	at    time.Time
}

// inUse is what was read, as long as it is too early to read again.
func (d *dumped) inUse(now time.Time) *snapshot.Table {
	if d.table == nil || now.Sub(d.at).Seconds() >= d.table.DumpSeconds*dumpShare {
		return nil
	}
	return d.table
}

// read takes what a window has shown, which may be what is in use already, and
// returns when that was read.
func (d *dumped) read(t *snapshot.Table, now time.Time) time.Time {
	if t != d.table {
		d.table, d.at = t, now
	}
	return d.at
}

// named are the codes of findings that are more than advice, those folded under others included.
func named(findings []causes.Finding) map[string]bool {
	out := map[string]bool{}
	var add func([]causes.Finding)
	add = func(list []causes.Finding) {
		for _, f := range list {
			if f.Severity > causes.Advice {
				out[f.Code] = true
			}
			add(f.Consequences)
		}
	}
	add(findings)
	return out
}

func judgement(s *snapshot.Snapshot, held map[string]bool) *Judged {
	j := &Judged{
		At: s.TakenAt, WindowSeconds: s.WindowSeconds,
		Findings: append([]causes.Finding{}, causes.JudgeAgain(s, held)...), SNATPorts: []PortUse{}, Engine: s.Engine, EngineRates: engineRates(s.Engine, s.WindowSeconds), Unseen: []snapshot.Capability{},
	}
	for _, c := range s.Capabilities {
		if !c.OK {
			j.Unseen = append(j.Unseen, c)
		}
	}
	if s.Conntrack != nil && s.Conntrack.Table != nil {
		j.Table = s.Conntrack.Table
		for _, u := range j.Table.SNATPorts {
			j.SNATPorts = append(j.SNATPorts, PortUse{u, portsFor(s.Chains, u)})
		}
	}
	return j
}

// allPorts is what the kernel chooses from where a rule gives no range.
const allPorts = 65536 - 1024

// portsFor is how many ports the narrowest rule allows that all ports in use are of.
func portsFor(chains []snapshot.Chain, u snapshot.SNATUse) int {
	ports := allPorts
	for _, c := range chains {
		for _, r := range c.SNATRanges {
			if r.Min > 0 && r.Min <= u.MinPort && u.MaxPort <= r.Max {
				ports = min(ports, int(r.Max)-int(r.Min)+1)
			}
		}
	}
	return ports
}
