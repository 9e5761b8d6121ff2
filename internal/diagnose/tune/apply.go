// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/journal"
)

// ApplyOptions says how far an apply may go.
type ApplyOptions struct {
	Place
	// NoHostWrite leaves out host settings when the plan is about a namespace that
	// is not the initial one: they change every namespace of the machine.
	NoHostWrite bool
	Persist     bool   // write the files in /etc too
	By          string // who asked for it, where that is not the user: stands in the history
	DryRun      bool   // read everything, write nothing

	// step is called before each write, with what is written. Tests fail there.
	step func(what string) error
}

// PendingError refuses an apply while an earlier one stands half done.
type PendingError struct{ ID string }

func (e *PendingError) Error() string {
	return fmt.Sprintf("apply %s was interrupted and is incomplete: run natkit tune rollback first", e.ID)
}

// Apply makes the changes of a plan, in its order, in the namespace that the
// plan is about. Each old value is on disk before it is overwritten and each new
// one is read back. When a step fails, or ctx ends, what was written is put back
// and the error says so. Changes that are not needed any more are passed over:
// applying a plan twice changes nothing the second time (StateUnchanged).
func Apply(ctx context.Context, p *Plan, o ApplyOptions) (*Record, error) {
	target, err := openSpace(p.Netns.Name, o.procSys())
	if err != nil {
		return nil, err
	}
	defer target.close()
	if !target.isOf(p.Netns) {
		return nil, errors.New("the plan is about another network namespace than the one that natkit runs in: run natkit there, or read the facts with --netns, which names it")
	}
	if o.Persist && !target.initial() {
		return nil, errors.New("settings persist for the initial network namespace only: sysctl.d and udev rules apply to no other")
	}
	a := &applying{o: o, target: target}
	defer a.close()
	if !o.DryRun {
		if a.journal, err = journal.Open(o.journal()); err != nil {
			return nil, err
		}
		defer a.journal.Close()
	}
	a.accounts, err = readAccounts(o.Place)
	if err != nil && !o.DryRun { // who may not read the journal may still look
		return nil, err
	}
	for _, earlier := range a.accounts {
		if earlier.State == StateInterrupted {
			return nil, &PendingError{earlier.ID}
		}
	}
	if err := a.prepare(p); err != nil {
		return nil, err
	}
	switch {
	case len(a.steps) == 0 && len(a.files) == 0:
		a.record.State = StateUnchanged
		if len(a.record.Skipped) == 0 {
			a.record.Unjudged = p.Unjudged
		}
		return &a.record, nil
	case o.DryRun:
		a.record.State = StatePlanned
		return &a.record, nil
	}
	return a.run(ctx)
}

// applying is one apply in progress.
type applying struct {
	o        ApplyOptions
	target   *space
	host     *space // the initial namespace, opened when a host setting needs it
	journal  *journal.Journal
	accounts []*account
	record   Record
	steps    []step
	files    []*fileChange
	written  int // of the files, so far
}

type step struct {
	set
	known setting
	space *space
}

func (a *applying) close() {
	if a.host != nil {
		a.host.close()
	}
}

// prepare turns the plan into steps with the values that are there now, and
// writes nothing.
func (a *applying) prepare(p *Plan) error {
	a.record = Record{Time: time.Now().UTC().Truncate(time.Second), Changes: []Change{}, Skipped: slices.Clone(p.Refused)}
	for _, c := range p.Changes {
		if err := a.prepareChange(p, c); err != nil {
			return err
		}
	}
	if !a.o.Persist {
		return nil
	}
	var err error
	if a.files, err = persistent(a.o.Place, a.accounts, a.target, a.record.Changes); err != nil {
		return err
	}
	for _, f := range a.files {
		a.record.wrote(f.Path)
	}
	return nil
}

func (a *applying) prepareChange(p *Plan, c Change) error {
	// A plan is a value that anybody can make: check it as if it were.
	k, err := find(c.Setting)
	if err != nil {
		return err
	}
	if c.New, err = k.value(c.New); err != nil {
		return err
	}
	c.Scope, c.Netns, c.Does = k.scope, "", k.does
	r := Refusal{Setting: c.Setting, Value: c.New, Code: c.Code}
	skip := func(why string) error {
		r.Netns, r.Why = c.Netns, why
		a.record.Skipped = append(a.record.Skipped, r)
		return nil
	}
	at := a.target
	if k.scope == ScopeHost {
		if a.o.NoHostWrite && !at.initial() {
			r.Chosen = true
			return skip("it has one value for the whole machine, set in the initial network namespace, which --no-host-write forbids")
		}
		if at, err = a.hostSpace(); err != nil {
			return skip(err.Error())
		}
		if why := tooMuchHere(p.Memory, c, a.o.root); why != "" {
			return skip(why)
		}
	} else {
		c.Netns = a.target.ref
	}
	c.Old, err = at.read(c.Setting)
	if errors.Is(err, fs.ErrNotExist) {
		return skip("there is no such setting here: its interface is gone, its driver does not know it, or its kernel module is not loaded")
	}
	if err != nil {
		return err
	}
	if k.fulfilled(c.Old, c.New) || k.took(c.Old, c.New) {
		return nil
	}
	s := step{set: set{Change: c, Initial: at.initial()}, known: k, space: at}
	if s.Space, err = at.handle.ID(); err != nil {
		return err
	}
	if s.Along, err = k.changedAlong(at, c.Setting); err != nil {
		return err
	}
	if s.Interfaces, err = at.indices(s.set); err != nil {
		return err
	}
	a.steps = append(a.steps, s)
	a.record.Changes = append(a.record.Changes, c)
	return nil
}

// changedAlong are the other settings that the kernel changes with this one, as they are; nil where
// there are none.
func (k setting) changedAlong(at *space, name string) (along map[string]string, err error) {
	for _, pattern := range k.spreads {
		names, err := at.glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, other := range names {
			if other == name {
				continue
			}
			if along == nil {
				along = map[string]string{}
			}
			if along[other], err = at.read(other); err != nil {
				return nil, err
			}
		}
	}
	return along, nil
}

// hostSpace is where host settings are written.
func (a *applying) hostSpace() (*space, error) {
	if a.target.initial() {
		return a.target, nil
	}
	if a.host == nil {
		host, err := openInitial(a.o.procSys())
		if err != nil {
			return nil, err
		}
		a.host = host
	}
	return a.host, nil
}

// tooMuchHere weighs the plan's table against the memory of this machine: the
// facts may have been read on another one.
func tooMuchHere(m *Memory, c Change, root string) string {
	if m == nil || (c.Setting != settingMax && c.Setting != settingBuckets) {
		return ""
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil || root != "" {
		return ""
	}
	here := *m
	here.RAMBytes = uint64(info.Totalram) * uint64(info.Unit)
	return here.tooMuch()
}

// run writes what was prepared.
func (a *applying) run(ctx context.Context) (*Record, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	a.record.ID, a.record.By = newID(a.record.Time, a.accounts), a.o.By
	if err := a.append(entry{Op: opBegin, Time: a.record.Time, Boot: boot, By: a.o.By}); err != nil {
		return nil, err
	}
	for i := range a.steps {
		if err := ctx.Err(); err != nil {
			return nil, a.undo(a.steps[:i], err)
		}
		if err := a.write(&a.steps[i]); err != nil {
			return nil, a.undo(a.steps[:i+1], err)
		}
	}
	for _, f := range a.files {
		a.written++
		if err := a.writePersistent(f); err != nil {
			return nil, a.undo(a.steps, err)
		}
	}
	a.record.State = StateApplied
	if err := a.append(entry{Op: opEnd, State: StateApplied}); err != nil {
		return nil, a.undo(a.steps, err)
	}
	return &a.record, nil
}

func (a *applying) append(e entry) error {
	e.ID = a.record.ID
	return a.journal.Append(e)
}

func (a *applying) atStep(what string) error {
	if a.o.step == nil {
		return nil
	}
	return a.o.step(what)
}

// write makes one change: journal, write, read back.
func (a *applying) write(s *step) error {
	if err := a.append(entry{Op: opSet, Set: &s.set}); err != nil {
		return err
	}
	if err := a.atStep(s.Setting); err != nil {
		return err
	}
	if err := s.space.write(s.Setting, s.New); err != nil {
		return err
	}
	present, err := s.space.read(s.Setting)
	if err != nil {
		return err
	}
	if !s.known.took(present, s.New) {
		return fmt.Errorf("write %s%s: the kernel took %q and shows %q", s.Setting, s.space.where(), s.New, present)
	}
	return nil
}

func (a *applying) writePersistent(f *fileChange) error {
	if err := a.append(entry{Op: opFile, File: f}); err != nil {
		return err
	}
	if err := a.atStep(f.Path); err != nil {
		return err
	}
	return writeFile(f.Path, &f.New)
}

// undo puts back what the steps wrote, newest first, and returns cause with what
// came of that. The last step may or may not have been written.
func (a *applying) undo(steps []step, cause error) error {
	var failed error
	for _, f := range slices.Backward(a.files[:a.written]) {
		text, err := readFile(f.Path)
		if err == nil && text != nil && *text == f.New {
			err = writeFile(f.Path, f.Old)
		}
		failed = errors.Join(failed, err)
	}
	for _, s := range slices.Backward(steps) {
		present, err := s.space.read(s.Setting)
		if errors.Is(err, fs.ErrNotExist) { // its interface is gone, and what was written with it
			continue
		}
		if err == nil && present != s.Old {
			err = restore(s.space, s.set, s.Along)
		}
		failed = errors.Join(failed, err)
	}
	if failed == nil {
		if err := a.append(entry{Op: opEnd, State: StateFailed}); err != nil {
			return fmt.Errorf("%w; the earlier changes are undone, but that could not be recorded (%w): run natkit tune rollback when it can", cause, err)
		}
	}
	if failed != nil {
		return fmt.Errorf("%w; undoing the earlier changes failed too (%w): run natkit tune rollback", cause, failed)
	}
	if errors.Is(cause, context.Canceled) {
		return fmt.Errorf("apply stopped (%w); all changes are undone", cause)
	}
	return fmt.Errorf("%w; the earlier changes are undone", cause)
}

// restore gives a setting its old value again, and the settings that the kernel
// changes along with it these.
func restore(at *space, s set, along map[string]string) error {
	k, err := find(s.Setting)
	if err != nil {
		return err
	}
	if err := at.write(s.Setting, s.Old); err != nil {
		return err
	}
	present, err := at.read(s.Setting)
	if err != nil {
		return err
	}
	if !k.took(present, s.Old) {
		return fmt.Errorf("restore %s%s: wrote %q, the kernel shows %q", s.Setting, at.where(), s.Old, present)
	}
	return restoreAlong(at, along)
}

func restoreAlong(at *space, along map[string]string) error {
	var failed error
	for _, name := range slices.Sorted(maps.Keys(along)) {
		present, err := at.read(name)
		switch {
		case errors.Is(err, fs.ErrNotExist): // its interface is gone
		case err != nil:
			failed = errors.Join(failed, err)
		case present != along[name]:
			failed = errors.Join(failed, at.write(name, along[name]))
		}
	}
	return failed
}

// alongNow is what the settings that the kernel changes along with one are to be once that is put back: as before
// the apply, but for theirs, those that somebody else has changed since.
func alongNow(at *space, s set) (along map[string]string, theirs []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(s.Along)) {
		present, err := at.read(name)
		if errors.Is(err, fs.ErrNotExist) { // its interface is gone
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if along == nil {
			along = map[string]string{}
		}
		along[name] = s.Along[name]
		if present != spread(name, s.New) && present != along[name] {
			along[name] = present
			theirs = append(theirs, name)
		}
	}
	return along, theirs, nil
}

// spread is what the kernel gives a setting with one that spreads: its value, but redirects are accepted
// where nothing is forwarded (inet_forward_change).
func spread(name, value string) string {
	if strings.HasSuffix(name, ".accept_redirects") {
		return map[string]string{"0": "1", "1": "0"}[value]
	}
	return value
}
