// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"natkit/internal/diagnose/causes"
	"natkit/internal/diagnose/history"
	"natkit/internal/diagnose/tune"
	"natkit/internal/kernel/journal"
	"natkit/internal/snapshot"
	"natkit/internal/words/percent"
)

// Tuning is how far the monitor goes about settings that its findings ask for.
type Tuning string

// How far it goes.
const (
	TuneOff    Tuning = "off"
	TuneAdvise Tuning = "advise" // say what it would change
	TuneApply  Tuning = "apply"
)

const (
	// tuneApart is between two changes, whatever they are of.
	tuneApart = 10 * time.Minute
	// tuneWithin is how long after a change it is decided whether it stays.
	tuneWithin = 60 * time.Second
	// MostTuneInterval is the longest interval with which two windows end in that time.
	MostTuneInterval = 20 * time.Second

	// askWindows is in how many windows in a row a step must be asked for: a load that is just growing would be taken
	// for the effect of the step.
	askWindows = 4

	// harmWindows are the last windows before a change that its effect is compared with, of a minute at least.
	harmWindows = 6
	// harmFactor and harmSlack are how much more must be lost a second than before for a change to have
	// made it worse, and harmFor how long in each window: losses come in bursts, and what a change breaks stays broken.
	harmFactor = 1.5
	harmSlack  = 1.0
	harmFor    = 25 * time.Second

	// restFirst is how long what was taken back is left alone; it doubles each time up to restMost.
	restFirst = time.Hour
	restMost  = 24 * time.Hour
	// helpedShare of what was lost before may be lost after a change that helped.
	helpedShare = 0.9
	// acquitShare of what was lost with a change must be lost in each of acquitWindows without it, for the change not to
	// have been the cause.
	acquitShare   = 0.7
	acquitWindows = 3

	// leastMemory is the share of the memory that must be available.
	leastMemory = 0.10
)

// sideEffects are what more room for something may bring about.
var sideEffects = []string{"conntrack-no-memory", "conntrack-chain-too-long", "conntrack-hash-too-small", "softirq-one-cpu", "softirq-all-cpus", "softirq-delayed", "cpu-backlog-full"}

// tuner decides which settings are changed when. It reads no clock and changes nothing: it is a function of
// windows of facts and of what it did before.
type tuner struct {
	mode     Tuning
	interval time.Duration
	last     time.Time // of the last change or of the last taking back
	trial    *trial
	review   *review
	resting  map[settingKey]rest
	wrote    map[settingKey]string // what it gave a setting last
	harm     map[harmKey][]loss
	proposed map[settingKey]history.Tuning
	asked    map[settingKey]int // windows in a row, by the first setting of the step
}

// settingKey is a setting of a namespace, or of the machine, whose inode is 0.
type settingKey struct {
	inode   uint64
	setting string
}

type harmKey struct {
	inode uint64
	code  string
}

type rest struct {
	until time.Time
	pause time.Duration
}

// trial is a change whose effect is being measured.
type trial struct {
	step    step
	id      string // of the journal
	at      time.Time
	before  loss // at most
	worse   int  // windows in a row, by worseBy
	windows int
	after   loss
	worseBy int             // lossGrew or sideEffect, of the last window; 0: it was no worse
	had     map[string]bool // side effects that were there before
	gone    bool            // its namespace; another one may have its number
	owed    string          // why it is to be taken back, which was not possible yet
}

// review is a change that was taken back: if as much is lost without it, the load had grown, and the change was not
// the cause.
type review struct {
	step    step
	id      string // of the journal
	at      time.Time
	after   loss // with the change
	windows int
	least   loss // without it, in the best window
}

// What was worse after a change.
const (
	lossGrew = iota + 1
	sideEffect
)

// step is a change that is to be made.
type step struct {
	plan  *tune.Plan
	netns snapshot.Netns
	code  string
	why   string
}

// action is what is to be done now: a change, or one that is to be taken back.
type action struct {
	change   *step
	takeBack string // the journal's number of a change
	why      string
}

func newTuner(mode Tuning, interval time.Duration) *tuner {
	return &tuner{mode: mode, interval: interval, resting: map[settingKey]rest{}, wrote: map[settingKey]string{}, harm: map[harmKey][]loss{}, proposed: map[settingKey]history.Tuning{}, asked: map[settingKey]int{}}
}

// remembers takes what earlier processes changed, oldest first: when the last change was, and what settings were given,
// those of a namespace as long as it lives: another one gets its number.
func (t *tuner) remembers(records []tune.Record, now time.Time, lives func(tune.Change) bool) {
	last := map[settingKey]tune.Change{}
	for _, r := range records {
		// The clock may have been set back since.
		if t.last = r.Time; r.Time.After(now) {
			t.last = now
		}
		for _, c := range r.Changes {
			key := t.keyOf(c.Space.Inode, c.Setting)
			if r.State == tune.StateApplied {
				last[key] = c
			} else {
				delete(last, key)
			}
		}
	}
	for key, c := range last {
		if key.inode == 0 || lives(c) {
			t.wrote[key] = c.New
		}
	}
}

// window takes the facts of one window of a namespace, what they show, and the findings that are on there.
func (t *tuner) window(s *snapshot.Snapshot, shown, on []causes.Finding, now time.Time) (act *action, said []history.Tuning) {
	if t.trial != nil && t.trial.step.netns.Inode == s.Netns.Inode && !t.trial.gone {
		act, said = t.measure(s, shown, now)
	}
	said = append(said, t.acquit(s, shown, now)...)
	t.remember(s, shown)
	if act != nil || len(said) > 0 {
		return act, said
	}
	next := t.steady(s.Netns.Inode, t.next(s, on, now))
	if t.mode == TuneAdvise {
		return nil, t.propose(s, next, now)
	}
	if next == nil || t.trial != nil || !t.last.IsZero() && now.Sub(t.last) < tuneApart {
		return nil, nil
	}
	return &action{change: next, why: next.why}, nil
}

// steady is a step that was asked for in several windows in a row, otherwise nil.
func (t *tuner) steady(inode uint64, next *step) *step {
	windows := 0
	if next != nil {
		windows = t.asked[settingKey{inode, next.plan.Changes[0].Setting}] + 1
	}
	for key := range t.asked {
		if key.inode == inode {
			delete(t.asked, key)
		}
	}
	if next == nil {
		return nil
	}
	t.asked[settingKey{inode, next.plan.Changes[0].Setting}] = windows
	if windows < askWindows {
		return nil
	}
	return next
}

// next is the step that the findings that are on ask for, nil for none.
func (t *tuner) next(s *snapshot.Snapshot, on []causes.Finding, now time.Time) *step {
	var wanted []snapshot.Setting
	for _, w := range causes.Settings(on) {
		key := t.key(s, w.Name)
		if r, ok := t.resting[key]; ok && now.Before(r.until) {
			continue
		}
		wanted = append(wanted, w)
	}
	if len(wanted) == 0 || scarce(s) {
		return nil
	}
	plan, err := tune.MakeStep(s, wanted)
	for err == nil && t.isTheirs(s, plan) { // then another purpose is the most important one
		left := slices.DeleteFunc(slices.Clone(wanted), func(w snapshot.Setting) bool { return plan.Has(w.Name) })
		if len(left) == len(wanted) {
			return nil
		}
		wanted = left
		plan, err = tune.MakeStep(s, wanted)
	}
	if err != nil || len(plan.Changes) == 0 {
		return nil
	}
	out := &step{plan: plan, netns: s.Netns}
	for _, c := range plan.Changes {
		if i := slices.IndexFunc(on, func(f causes.Finding) bool { return f.Code == c.Code }); i >= 0 && out.code == "" {
			out.code, out.why = c.Code, on[i].Title
		}
	}
	if out.code == "" {
		return nil
	}
	return out
}

// isTheirs says whether somebody else has changed a setting of a plan since natkit did.
func (t *tuner) isTheirs(s *snapshot.Snapshot, plan *tune.Plan) bool {
	return slices.ContainsFunc(plan.Changes, func(c tune.Change) bool {
		wrote, ok := t.wrote[t.key(s, c.Setting)]
		return ok && wrote != c.Old
	})
}

// key is a setting as this namespace sees it.
func (t *tuner) key(s *snapshot.Snapshot, setting string) settingKey {
	if tune.OfMachine(setting) {
		return settingKey{0, setting}
	}
	return settingKey{s.Netns.Inode, setting}
}

// scarce says whether memory is.
func scarce(s *snapshot.Snapshot) bool {
	h := s.Host
	return h.MemoryBytes > 0 && h.AvailableBytes > 0 && float64(h.AvailableBytes) < leastMemory*float64(h.MemoryBytes)
}

// loss is what a finding loses, or, where that is nothing yet, how near it is to that.
type loss struct {
	rate float64 // packets or connections a second
	near float64 // share of the limit
}

func lost(s *snapshot.Snapshot, f causes.Finding) loss {
	if f.Impact < 1 {
		return loss{near: f.Impact}
	}
	return loss{rate: f.Impact / max(s.WindowSeconds, 0.1)}
}

// size is a number by which losses are compared.
func (l loss) size() float64 { return l.rate + l.near }

func (l loss) compare(m loss) int { return cmp.Compare(l.size(), m.size()) }

func (l loss) String() string {
	switch {
	case l.rate >= 100:
		return strconv.FormatFloat(l.rate, 'f', 0, 64) + " a second"
	case l.rate > 0:
		return strconv.FormatFloat(l.rate, 'g', 3, 64) + " a second"
	case l.near > 0:
		return "nothing, at " + percent.Whole(l.near) + " of the limit"
	}
	return "nothing"
}

// remember keeps what each finding has lost in the last windows.
func (t *tuner) remember(s *snapshot.Snapshot, shown []causes.Finding) {
	seen := map[string]bool{}
	most := max(harmWindows, int(time.Minute/t.interval))
	for _, f := range shown {
		key := harmKey{s.Netns.Inode, f.Code}
		seen[f.Code] = true
		t.harm[key] = append(t.harm[key], lost(s, f))
		t.harm[key] = t.harm[key][max(0, len(t.harm[key])-most):]
	}
	for key, values := range t.harm {
		if key.inode != s.Netns.Inode || seen[key.code] {
			continue
		}
		values = append(values, loss{})
		if t.harm[key] = values[max(0, len(values)-most):]; slices.MaxFunc(t.harm[key], loss.compare).size() == 0 {
			delete(t.harm, key)
		}
	}
}

// propose says what would be changed, once for each value.
func (t *tuner) propose(s *snapshot.Snapshot, next *step, now time.Time) (said []history.Tuning) {
	want := map[settingKey]bool{}
	if next != nil {
		for _, c := range next.plan.Changes {
			key := settingKey{s.Netns.Inode, c.Setting}
			want[key] = true
			p := next.tuning(history.Proposed, c, now)
			if before, ok := t.proposed[key]; !ok || before.New != c.New || before.Old != c.Old {
				said = append(said, p)
			}
			t.proposed[key] = p
		}
	}
	for key := range t.proposed {
		if key.inode == s.Netns.Inode && !want[key] {
			delete(t.proposed, key)
		}
	}
	return said
}

// tuning is a change of the step for the history.
func (p *step) tuning(kind string, c tune.Change, at time.Time) history.Tuning {
	return history.Tuning{At: at, Kind: kind, Inode: p.netns.Inode, Namespace: Title(p.netns), Setting: c.Setting, Old: c.Old, New: c.New, Code: p.code, Why: p.why}
}

// tunings are all changes of the step.
func (p *step) tunings(kind, why, id string, at time.Time) (out []history.Tuning) {
	for _, c := range p.plan.Changes {
		n := p.tuning(kind, c, at)
		if why != "" {
			n.Why = why
		}
		n.ID = id
		out = append(out, n)
	}
	return out
}

// changed is told that a step was made, or why not.
func (t *tuner) changed(p *step, r *tune.Record, err error, now time.Time) []history.Tuning {
	t.last = now
	if err != nil || len(r.Changes) == 0 {
		why := "it was so already, or is not possible here"
		if err != nil {
			why = err.Error()
		} else if len(r.Skipped) > 0 {
			why = r.Skipped[0].Why
		}
		t.leave(p, now)
		return p.tunings(history.NotTuned, why, "", now)
	}
	made := *p.plan
	made.Changes = r.Changes
	n := &trial{step: step{&made, p.netns, p.code, p.why}, id: r.ID, at: now, before: t.most(p.netns.Inode, p.code), had: map[string]bool{}}
	for _, code := range sideEffects {
		n.had[code] = t.most(p.netns.Inode, code).size() > 0
	}
	for _, c := range r.Changes {
		t.wrote[t.keyOf(p.netns.Inode, c.Setting)] = c.New
	}
	t.trial = n
	return n.step.tunings(history.Applied, "", r.ID, now)
}

func (t *tuner) keyOf(inode uint64, setting string) settingKey {
	if tune.OfMachine(setting) {
		inode = 0
	}
	return settingKey{inode, setting}
}

// most is what a finding has lost in the last windows, at most.
func (t *tuner) most(inode uint64, code string) loss {
	if values := t.harm[harmKey{inode, code}]; len(values) > 0 {
		return slices.MaxFunc(values, loss.compare)
	}
	return loss{}
}

// leave lets the settings of a step alone for a while, longer each time.
func (t *tuner) leave(p *step, now time.Time) {
	for _, c := range p.plan.Changes {
		key := t.keyOf(p.netns.Inode, c.Setting)
		pause := min(max(restFirst, 2*t.resting[key].pause), restMost)
		t.resting[key] = rest{now.Add(pause), pause}
	}
}

// measure compares a window after a change with those before.
func (t *tuner) measure(s *snapshot.Snapshot, shown []causes.Finding, now time.Time) (*action, []history.Tuning) {
	n := t.trial
	if n.owed != "" {
		return nil, nil
	}
	if begun := s.TakenAt.Add(-seconds(s.WindowSeconds)); begun.Before(n.at.Add(-time.Second)) {
		return nil, nil // the change was made in the middle of it
	}
	n.windows++
	n.after = loss{}
	why, by := "", 0
	for _, f := range shown {
		if f.Code == n.step.code {
			n.after = lost(s, f)
		}
		if slices.Contains(sideEffects, f.Code) && !n.had[f.Code] && f.Severity >= causes.Warning {
			why, by = "it brought about "+f.Code+": "+f.Title, sideEffect
		}
	}
	if n.after.size() > harmFactor*n.before.size()+harmSlack {
		why, by = n.effect(), cmp.Or(by, lossGrew)
	}
	if scarce(s) {
		why, by = "less than a tenth of the memory is available", sideEffect
	}
	if by != n.worseBy {
		n.worse = 0
	}
	if n.worseBy = by; by != 0 {
		n.worse++
	}
	if need := max(2, int(harmFor/t.interval)+1); by == sideEffect && n.worse >= 2 || by == lossGrew && n.worse >= need {
		return t.takeBack(why), nil
	}
	return t.due(now)
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// effect is what the change has brought.
func (n *trial) effect() string {
	return fmt.Sprintf("lost after it: %s; before: %s", n.after, n.before)
}

// due decides about a change when there is no time for another window.
func (t *tuner) due(now time.Time) (*action, []history.Tuning) {
	n := t.trial
	if n != nil && n.owed != "" {
		return t.takeBack(n.owed), nil
	}
	if n == nil || now.Add(t.interval).Sub(n.at) < tuneWithin {
		return nil, nil
	}
	switch {
	case n.windows == 0:
		return t.takeBack("its effect could not be measured"), nil
	case n.worse > 0 && (n.worseBy == sideEffect || n.worse == n.windows): // there is no time to see whether it stays so
		return t.takeBack("the last window after it was worse than those before"), nil
	}
	why := n.effect()
	t.trial = nil
	if n.after.size() > helpedShare*n.before.size() {
		// More of the same would not help either: the next step is for a load that has grown.
		t.leave(&n.step, now)
		t.last = now
		why += ": not enlarged again before " + t.resting[t.keyOf(n.step.netns.Inode, n.step.plan.Changes[0].Setting)].until.Format("15:04")
	} else {
		for _, c := range n.step.plan.Changes {
			delete(t.resting, t.keyOf(n.step.netns.Inode, c.Setting))
		}
	}
	return nil, n.step.tunings(history.Kept, why, n.id, now)
}

// acquit looks whether a change that was taken back was the cause of what was lost.
func (t *tuner) acquit(s *snapshot.Snapshot, shown []causes.Finding, now time.Time) []history.Tuning {
	r := t.review
	if r == nil || r.step.netns.Inode != s.Netns.Inode || s.TakenAt.Add(-seconds(s.WindowSeconds)).Before(r.at.Add(-time.Second)) {
		return nil
	}
	loses := loss{}
	for _, f := range shown {
		if f.Code == r.step.code {
			loses = lost(s, f)
		}
	}
	if r.windows++; r.windows == 1 || loses.size() < r.least.size() {
		r.least = loses
	}
	if r.least.size() < acquitShare*r.after.size() || now.Sub(r.at) > tuneApart {
		t.review = nil
		return nil
	}
	if r.windows < acquitWindows {
		return nil
	}
	t.review = nil
	for _, c := range r.step.plan.Changes {
		key := t.keyOf(s.Netns.Inode, c.Setting)
		t.resting[key] = rest{now, t.resting[key].pause}
	}
	why := fmt.Sprintf("lost without it, too: %s (with it: %s): the load has grown", r.least, r.after)
	return r.step.tunings(history.NotTheCause, why, r.id, now)
}

func (t *tuner) takeBack(why string) *action { return &action{takeBack: t.trial.id, why: why} }

// tookBack is told that the change on trial was taken back, or why not.
func (t *tuner) tookBack(why string, err error, now time.Time) []history.Tuning {
	n := t.trial
	if errors.Is(err, journal.ErrLocked) { // somebody else is at work with settings, for a moment
		before := n.owed
		if n.owed = why; before != "" {
			return nil
		}
		return n.step.tunings(history.NotTuned, "taking it back failed: "+err.Error()+"; natkit tries again in each interval", n.id, now)
	}
	t.trial, t.last = nil, now
	t.leave(&n.step, now)
	// Once: a load that happens to grow again just after the same change is no reason to go back and forth.
	first := t.resting[t.keyOf(n.step.netns.Inode, n.step.plan.Changes[0].Setting)].pause == restFirst
	if n.worseBy == lossGrew && err == nil && first {
		t.review = &review{step: n.step, id: n.id, at: now, after: n.after}
	}
	for _, c := range n.step.plan.Changes {
		delete(t.wrote, t.keyOf(n.step.netns.Inode, c.Setting))
	}
	if err != nil {
		return n.step.tunings(history.NotTuned, "taking it back failed: "+err.Error()+"; natkit tune rollback "+n.id+" does it", n.id, now)
	}
	out := n.step.tunings(history.TakenBack, why, n.id, now)
	for i := range out {
		out[i].Old, out[i].New = out[i].New, out[i].Old
	}
	return out
}

// gone forgets namespaces that are no more. A change of one is decided when it is due.
func (t *tuner) gone(is func(inode uint64) bool) {
	maps.DeleteFunc(t.harm, func(key harmKey, _ []loss) bool { return is(key.inode) })
	maps.DeleteFunc(t.asked, func(key settingKey, _ int) bool { return is(key.inode) })
	maps.DeleteFunc(t.proposed, func(key settingKey, _ history.Tuning) bool { return is(key.inode) })
	maps.DeleteFunc(t.resting, func(key settingKey, _ rest) bool { return key.inode != 0 && is(key.inode) })
	maps.DeleteFunc(t.wrote, func(key settingKey, _ string) bool { return key.inode != 0 && is(key.inode) })
	if t.trial != nil && is(t.trial.step.netns.Inode) {
		t.trial.gone = true
	}
	if t.review != nil && is(t.review.step.netns.Inode) {
		t.review = nil
	}
}
