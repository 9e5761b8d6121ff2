// SPDX-License-Identifier: Apache-2.0

// Package collect makes the records of the log from its sources, and keeps them in the store. A
// source is what translates in a namespace: the kernel's own NAT, also under accel (kernel.go), and
// the eBPF engine (engine.go). Each reports what begins and ends, knows what is alive, and tells
// when something is missing.
package collect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/natlog"
	"natkit/internal/natlog/sink"
	"natkit/internal/natlog/store"
)

// What chooses what is recorded of the kernel's NAT, and of an engine whose rules do not say.
type What struct {
	Sessions     bool // each session instead of mappings
	Destinations bool // and with whom it is to
}

// record is that as a rule file says it.
func (w What) record() rulefile.LogRecord {
	if w.Sessions || w.Destinations {
		return rulefile.LogSessions
	}
	return rulefile.LogMappings
}

// Options of Run.
type Options struct {
	Namespace *netns.Handle
	Store     store.Options // Alive and Resume are set here
	What      What
	// KernelNAT reports whether the kernel translates beside an engine. nil: it does not.
	KernelNAT func() (bool, error)
	// Started is called when everything that happens from then on is recorded, with how many
	// translations were alive.
	Started func(alive int)
	Say     func(text string)
	// Ticked is called every second.
	Ticked func(store.Stats)
	// Sinks are sent what is recorded; SinksTicked is called every second with how they are.
	Sinks       []natlog.Sink
	SinksTicked func([]sink.State)

	// Now reads the clock; nil: time.Now.
	Now func() time.Time

	openEngine func() (engineLog, error) // for tests; nil: that of the namespace
}

// Times of a log.
const (
	tick = time.Second
	poll = 20 * time.Millisecond // between two looks at sources
	// looksForSources: between two looks whether something else translates now.
	looksForSources = 10 * time.Second
	looksForKernel  = time.Minute

	// gcPercent of what is in use may be garbage. Most of what is in use is long-lived, what is alive, and a
	// part of an hour while it becomes a file: twice that would be reserved for garbage that is little.
	gcPercent = 50
)

// source is what translates.
type source interface {
	// each gives what is alive, as of the last record that take has made.
	each(yield func(natlog.Record) bool)
	// reported is called when all that is alive was recorded as that, in the middle of an hour: no end
	// may be before it, since rows of a file are in the order of time.
	reported(at natlog.Micros)
	// take records what has happened.
	take(ctx context.Context) error
	// tick is called once a second, after take. over: it translates no more, and everything of it
	// has ended.
	tick(ctx context.Context) (over bool, err error)
	close() error
}

// rulesInUse is control.RulesInUse.
type rulesInUse interface {
	Changed() (*control.RulesChange, error)
}

// collector is one Run.
type collector struct {
	o       Options
	store   *store.Store
	sources []source
	kernel  *kernelSource // of sources, or nil
	engine  *engineSource
	rules   rulesInUse
	// unreadable is why the rules could not be read, as it was reported.
	unreadable string
	records    []natlog.Record

	offset  int64 // of the clock from CLOCK_MONOTONIC, nanoseconds, by which all times of the log are
	checked int64 // CLOCK_MONOTONIC when that was right
	was     []earlier
	left    natlog.Micros // when the log that was found ended, by the clock of the hour that goes on from it
	// followed is when the rules were looked at last; 0: not yet.
	followed natlog.Micros
	looked   struct{ engine, kernel time.Time }
	// without is when an engine, and the kernel, were known to translate nothing that is not recorded;
	// 0: they have been recorded since the log began.
	without struct{ engine, kernel natlog.Micros }
	ticked  natlog.Micros // the last time
	limits  limits
}

// Run writes the log until the context ends.
func Run(ctx context.Context, o Options) (err error) {
	defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	o.Store.Namespace = o.Namespace.Inode()
	c := &collector{o: o, rules: control.NewRulesInUse(o.Namespace)}
	if c.o.openEngine == nil {
		c.o.openEngine = func() (engineLog, error) {
			return control.OpenLog(o.Namespace, o.What.record(), o.What.Destinations)
		}
	}
	c.startClock()
	engine, err := c.openEngine()
	if err != nil {
		return err
	}
	kernel, err := c.listenToKernel(ctx, engine != nil)
	if err != nil || ctx.Err() != nil {
		return errors.Join(err, closeBoth(engine, kernel))
	}
	sinks, err := c.openSinks()
	if err == nil {
		err = c.begin(ctx, engine, kernel)
	}
	if err != nil {
		return errors.Join(err, closeBoth(engine, kernel), sinks.Close())
	}
	defer func() { err = errors.Join(err, c.closeSources(), c.store.Close(), sinks.Close()) }()
	alive := 0
	c.each(func(natlog.Record) bool { alive++; return true })
	o.Started(alive)
	return c.loop(ctx)
}

// closeBoth closes sources of a log that has not begun.
func closeBoth(engine *engineSource, kernel *kernelSource) (err error) {
	if engine != nil {
		err = engine.log.Abandon()
	}
	if kernel != nil {
		err = errors.Join(err, kernel.close())
	}
	return err
}

// openSinks has the store send to them what it writes.
func (c *collector) openSinks() (*sink.Sinks, error) {
	if len(c.o.Sinks) == 0 {
		return nil, nil
	}
	sinks, err := sink.Open(sink.Options{Dir: c.o.Store.Dir, Node: c.o.Store.Node, Sinks: c.o.Sinks, Say: c.o.Say})
	if err != nil {
		return nil, err
	}
	c.o.Store.Written, c.o.Store.Needed = sinks.Written, sinks.Needed
	ticked := c.o.Ticked
	c.o.Ticked = func(s store.Stats) {
		ticked(s)
		if c.o.SinksTicked != nil {
			c.o.SinksTicked(sinks.State())
		}
	}
	return sinks, nil
}

// begin opens the store. It goes on without a gap if the engine has everything that has happened
// since the log ended. The kernel's NAT does not.
func (c *collector) begin(ctx context.Context, engine *engineSource, kernel *kernelSource) (err error) {
	var since []natlog.Record
	c.o.Store.Alive = func(yield func(natlog.Record) bool) { c.each(yield) }
	c.o.Store.Resume = func(left *store.Left) (store.Resumed, error) {
		resumed, err := store.Resumed{Gaps: left.Gap()}, error(nil)
		if since, c.left = resumed.Gaps, left.End; engine != nil {
			resumed, err = engine.resume(left)
		}
		if left.End > left.Now || engine != nil && engine.passed { // the clock was set
			c.left = cmp.Or(resumed.At, left.Now)
		}
		return resumed, err
	}
	if engine != nil {
		c.add(engine)
	} else {
		c.add(kernel)
	}
	if c.store, err = store.Open(c.o.Store); err != nil {
		return err
	}
	if engine != nil {
		if err := engine.catchUp(); err != nil {
			return errors.Join(err, c.store.Close())
		}
		if kernel != nil {
			c.join(kernel, since)
		}
	}
	c.followRules()
	return nil
}

func (c *collector) add(s source) {
	c.sources = append(c.sources, s)
	switch s := s.(type) {
	case *kernelSource:
		c.kernel = s
	case *engineSource:
		c.engine = s
	}
}

// join adds a source to a log that is written already.
func (c *collector) join(s source, gaps []natlog.Record) {
	for i := range gaps {
		gaps[i].Source = natlog.Kernel
	}
	c.add(s)
	now := c.now()
	c.records = append(c.records[:0], gaps...)
	for r := range s.each {
		r.Event, r.Time = natlog.Alive, now
		c.record(r)
	}
	s.reported(now)
	c.append()
}

func (c *collector) closeSources() error {
	var errs []error
	for _, s := range c.sources {
		errs = append(errs, s.close())
	}
	c.sources, c.kernel, c.engine = nil, nil, nil
	return errors.Join(errs...)
}

func (c *collector) each(yield func(natlog.Record) bool) {
	for _, s := range c.sources {
		for r := range s.each {
			if !yield(r) {
				return
			}
		}
	}
}

func (c *collector) record(r natlog.Record) { c.records = append(c.records, r) }

// append stores what was recorded. What can't be written the store counts, reports and tries again.
func (c *collector) append() {
	if len(c.records) > 0 {
		_ = c.store.Append(c.records)
	}
	c.records = c.records[:0]
}

func (c *collector) gap(source natlog.Source, since, until natlog.Micros, note string) {
	_ = c.store.Gap(source, since, until, note)
}

func (c *collector) loop(ctx context.Context) error {
	polls, ticks := time.NewTicker(poll), time.NewTicker(tick)
	defer polls.Stop()
	defer ticks.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return c.last()
		case <-polls.C:
			err = c.take(ctx)
		case <-ticks.C:
			err = c.tick(ctx)
		}
		if err != nil {
			if ctx.Err() != nil {
				return c.last()
			}
			return err
		}
	}
}

func (c *collector) take(ctx context.Context) error {
	if err := c.checkClock(ctx); err != nil {
		return err
	}
	return c.takeAll(ctx)
}

func (c *collector) takeAll(ctx context.Context) error {
	for _, s := range c.sources {
		if err := s.take(ctx); err != nil {
			return err
		}
	}
	return nil
}

// last records what has happened until now, and of the kernel what was heard.
func (c *collector) last() error {
	errs := []error{c.checkClock(context.Background())}
	for _, s := range c.sources {
		errs = append(errs, s.take(context.Background()))
	}
	for i, err := range errs {
		if errors.Is(err, context.Canceled) { // nobody listens to the kernel any more
			errs[i] = nil
		}
	}
	return errors.Join(errs...)
}

func (c *collector) tick(ctx context.Context) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	for _, s := range slices.Clone(c.sources) {
		over, err := s.tick(ctx)
		if err != nil {
			return err
		}
		if over {
			if err := c.remove(s); err != nil {
				return err
			}
		}
	}
	if err := c.look(ctx); err != nil {
		return err
	}
	if c.engine != nil {
		c.limits.look(c)
	}
	_ = c.store.Tick() // the store reports it, and tries again
	c.followRules()
	c.ticked = c.now()
	c.o.Ticked(c.store.Stats())
	return nil
}

func (c *collector) remove(s source) error {
	c.sources = slices.DeleteFunc(c.sources, func(o source) bool { return o == s })
	if s == source(c.engine) {
		c.engine = nil
		c.looked.engine, c.without.engine = time.Time{}, c.ticked
	} else {
		c.kernel, c.without.kernel = nil, c.ticked
	}
	c.looked.kernel = time.Time{}
	return s.close()
}

// look finds sources that were not there before.
func (c *collector) look(ctx context.Context) error {
	now := time.Now()
	if c.engine == nil && now.Sub(c.looked.engine) >= looksForSources {
		c.looked.engine = now
		engine, err := c.openEngine()
		if err != nil {
			return err
		}
		if engine != nil {
			resumed, err := engine.resume(&store.Left{Now: c.now()})
			if err != nil {
				return errors.Join(err, engine.log.Abandon())
			}
			if engine.log.Asked() && c.without.engine != 0 { // otherwise its ring has everything
				c.gap(natlog.Engine, c.without.engine, c.now(), "an engine was up that did not record yet")
			}
			c.join(engine, resumed.Gaps)
			if err := engine.catchUp(); err != nil {
				return err
			}
			c.o.Say("an engine ebpf is up: it is recorded from here on")
			c.looked.kernel = time.Time{}
		}
	}
	if c.kernel != nil || now.Sub(c.looked.kernel) < looksForKernel {
		return nil
	}
	c.looked.kernel = now
	kernel, err := c.listenToKernel(ctx, c.engine != nil)
	if err != nil {
		c.o.Say("what the kernel translates is not recorded: " + err.Error())
		c.kernelMissing("what the kernel translates was not recorded: " + err.Error())
		return nil
	}
	if kernel == nil {
		return nil
	}
	c.kernelMissing("the kernel translated before it was recorded")
	c.join(kernel, nil)
	c.o.Say("the kernel translates here: it is recorded from here on")
	return nil
}

// kernelMissing records that events of the kernel may be missing until now, if its rules translate.
func (c *collector) kernelMissing(why string) {
	since := c.without.kernel
	if c.without.kernel = c.now(); since == 0 || c.o.KernelNAT == nil {
		return
	}
	if also, err := c.o.KernelNAT(); also || err != nil {
		c.gap(natlog.Kernel, since, c.without.kernel, why)
	}
}

// openEngine opens the engine's log; nil: there is none.
func (c *collector) openEngine() (*engineSource, error) {
	c.looked.engine = time.Now()
	log, err := c.o.openEngine()
	if errors.Is(err, control.ErrNoLog) {
		c.without.engine = c.now()
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what the engine records: %w", err)
	}
	return newEngineSource(c, log)
}

// listenToKernel begins to hear the kernel's events, if it is what translates here; nil if not.
func (c *collector) listenToKernel(ctx context.Context, engine bool) (*kernelSource, error) {
	c.looked.kernel = time.Now()
	if engine {
		if c.o.KernelNAT == nil {
			return nil, nil
		}
		if also, err := c.o.KernelNAT(); err != nil || !also {
			if err == nil {
				c.without.kernel = c.now()
			}
			return nil, err
		}
	}
	return newKernelSource(ctx, c)
}

// followRules keeps the rules that have come into force, and has the engine's records named by them.
func (c *collector) followRules() {
	before := c.followed
	c.followed = c.now()
	change, err := c.rules.Changed()
	if err != nil {
		if text := err.Error(); text != c.unreadable { // once, and not each second
			c.unreadable = text
			c.o.Say("the rules in force cannot be read: " + text)
		}
		return
	}
	c.unreadable = ""
	if change == nil {
		change = &control.RulesChange{Whole: true}
		if before != 0 {
			return
		}
	}
	source := natlog.Kernel
	if c.engine != nil {
		source = natlog.Engine
		if change.File != nil {
			c.engine.use(change.File)
		}
	}
	if err := c.keepRules(source, before, change); err != nil {
		c.o.Say(err.Error())
	}
}

// keepRules keeps those that have come into force since a time; 0: since the log that was found ended.
// Where others may have been in force in between, that is kept, too.
func (c *collector) keepRules(source natlog.Source, before natlog.Micros, change *control.RulesChange) error {
	applied, whole := change.Applied, change.Whole
	if before == 0 {
		last, err := c.store.LastRules()
		if err != nil {
			return err
		}
		if before, whole = cmp.Or(c.left, c.followed), last == nil; !whole {
			applied, whole = c.rulesSince(last, before, change)
		}
	}
	var errs []error
	if !whole {
		errs = append(errs, c.store.RulesUnknown(source, before))
	}
	for _, r := range applied {
		errs = append(errs, c.store.KeepRules(source, c.timeOfRules(r), r.Text))
	}
	if len(applied) == 0 && change.File == nil {
		errs = append(errs, c.store.KeepRules(source, c.followed, ""))
	}
	return errors.Join(errs...)
}

// rulesSince are those that came into force after the last that a log has, whose end is before: whole
// if none is missing.
func (c *collector) rulesSince(last *store.Rules, before natlog.Micros, change *control.RulesChange) (applied []control.AppliedRules, whole bool) {
	if len(change.Applied) == 0 {
		return nil, !last.Unknown && last.None()
	}
	first := -1
	for i, r := range change.Applied {
		at := c.timeOfRules(r)
		if !last.Unknown && at == last.Since {
			return change.Applied[i:], true
		}
		if at <= before {
			first = i
		}
	}
	if first < 0 || !change.Whole {
		return change.Applied, false
	}
	return change.Applied[first:], true // the clock was set: by it, this one was in force then
}

// timeOfRules is when rules came into force, by the clock of the log: if it was set since, by what it
// is now.
func (c *collector) timeOfRules(r control.AppliedRules) natlog.Micros {
	at := natlog.MicrosOf(r.Since)
	if r.Running == 0 {
		return at
	}
	const same = natlog.Micros(store.ClockStep / time.Microsecond)
	if now := c.time(r.Running); at-now > same || now-at > same {
		return now
	}
	return at
}
