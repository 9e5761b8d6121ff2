// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"natkit/internal/kernel/journal"
)

// Last names the apply that a rollback takes back when no other is named: an
// interrupted one, otherwise the newest that stands.
const Last = "last"

// ErrNothing means that there is no apply to take back.
var ErrNothing = errors.New("nothing to roll back")

// RollbackOptions says how far a rollback may go.
type RollbackOptions struct {
	Place
	Force bool // restore also what somebody else has changed since, and what a later apply builds on
	// Beneath takes back an apply although a later one builds on it, and keeps what that has changed: for who finds
	// that its change does harm.
	Beneath bool
}

// Rollback takes an apply back: the files in /etc, then each setting, newest
// first. What has neither its old value nor the one that natkit wrote was changed
// by somebody else since, and is kept unless o.Force is set; a namespace that is
// no more is left alone, even when another one has its name. The record's
// Restored says what came of each.
//
// It does not stop half way for ctx. When it is killed, or one setting can't be
// restored, the next rollback goes on with the same apply.
func Rollback(ctx context.Context, id string, o RollbackOptions) (*Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if accounts, err := readAccounts(o.Place); err != nil || len(accounts) == 0 {
		return nil, cmpErr(err, id) // and no journal is made for nothing
	}
	j, err := journal.Open(o.journal())
	if err != nil {
		return nil, err
	}
	defer j.Close()
	accounts, err := readAccounts(o.Place)
	if err != nil {
		return nil, err
	}
	a, err := choose(accounts, id, o.Force)
	if err == nil && !o.Force && !o.Beneath && a.State != StateInterrupted { // which has to be gone on with
		err = onTop(accounts, a)
	}
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	r := &rolling{account: a, o: o, journal: j, sameBoot: a.boot == boot}
	return r.run()
}

func cmpErr(err error, id string) error {
	switch {
	case err != nil:
		return err
	case id == "" || id == Last:
		return ErrNothing
	}
	return fmt.Errorf("apply %q: not in the history (natkit tune history)", id)
}

// choose finds the apply to take back.
func choose(accounts []*account, id string, force bool) (*account, error) {
	if id == "" || id == Last {
		var found *account
		for _, a := range accounts {
			if a.State == StateInterrupted || (a.State == StateApplied && (found == nil || found.State != StateInterrupted)) {
				found = a
			}
		}
		if found == nil {
			return nil, ErrNothing
		}
		return found, nil
	}
	i := slices.IndexFunc(accounts, func(a *account) bool { return a.ID == id })
	if i < 0 {
		return nil, cmpErr(nil, id)
	}
	a := accounts[i]
	if a.undoable() || a.State == StateRebooted || (a.State == StateRolledBack && a.Kept() && force) {
		return a, nil
	}
	if a.State == StateRolledBack && a.Kept() {
		return nil, fmt.Errorf("apply %s is rolled back, except what somebody else had changed: --force restores that too", id)
	}
	return nil, fmt.Errorf("apply %s: nothing to undo, it is %s", id, a.State)
}

// onTop refuses to take an apply back from under a later one: its values would be taken for somebody else's, and
// those in a file return with the later one's rollback, or at the next boot.
func onTop(accounts []*account, a *account) error {
	for i := len(accounts) - 1; accounts[i] != a; i-- {
		if what := accounts[i].buildsOn(a); what != "" && accounts[i].undoable() {
			return fmt.Errorf("apply %s: the later apply %s builds on it, by %s: run natkit tune rollback %s first, or add --force", a.ID, accounts[i].ID, what, accounts[i].ID)
		}
	}
	return nil
}

// buildsOn is a setting or a file that a later apply b has changed again, or the file in which it keeps
// what a has set; "" for none.
func (b *account) buildsOn(a *account) string {
	for _, f := range b.files {
		if slices.ContainsFunc(a.files, func(g *fileChange) bool { return g.Path == f.Path }) {
			return f.Path
		}
	}
	for _, s := range a.sets {
		if slices.ContainsFunc(b.sets, func(t set) bool {
			return t.Setting == s.Setting && (t.Space == s.Space || t.Initial && s.Initial)
		}) {
			return s.Setting
		}
		for _, f := range b.files {
			kept, _ := persistFile{f.Path, strings.HasSuffix(f.Path, udevName)}.parse(f.New) // another natkit's may have more
			if s.Initial && slices.ContainsFunc(kept, func(c Change) bool { return c.Setting == s.Setting && c.New == s.New }) {
				return f.Path
			}
		}
	}
	return ""
}

// rolling is one rollback in progress.
type rolling struct {
	*account
	o        RollbackOptions
	journal  *journal.Journal
	sameBoot bool
	unnoted  error // why the journal could not be written, from then on not at all
}

// append notes what is done. The way back must not end at a full disk: without the note the
// next rollback finds everything as it was before the apply, and says so.
func (r *rolling) append(e entry) {
	if r.unnoted == nil {
		e.ID = r.ID
		r.unnoted = r.journal.Append(e)
	}
}

func (r *rolling) run() (*Record, error) {
	r.append(entry{Op: opRollback, Time: time.Now().UTC().Truncate(time.Second)})
	r.Restored = nil
	var failed error
	note := func(x Restored, err error) {
		if err == nil {
			r.append(entry{Op: opRestored, Restored: &x})
		}
		r.Restored = append(r.Restored, x)
		failed = errors.Join(failed, err)
	}
	for _, f := range slices.Backward(r.files) {
		note(restoreFile(f, r.o.Force))
	}
	for _, s := range slices.Backward(r.sets) {
		note(r.restoreSetting(s))
	}
	if failed != nil {
		return nil, fmt.Errorf("roll back %s: %w; the rest is restored, run natkit tune rollback again for this", r.ID, errors.Join(failed, r.unnoted))
	}
	r.State = StateRolledBack
	r.append(entry{Op: opEnd, State: StateRolledBack})
	if r.unnoted != nil {
		return nil, fmt.Errorf("roll back %s: everything is restored, but that could not be recorded: %w; fix that and run natkit tune rollback again", r.ID, r.unnoted)
	}
	return &r.Record, nil
}

func restoreFile(f *fileChange, force bool) (Restored, error) {
	x := Restored{Setting: f.Path}
	text, err := readFile(f.Path)
	same := func(want *string) bool { return (text == nil) == (want == nil) && (text == nil || *text == *want) }
	switch {
	case err != nil:
	case same(f.Old):
		x.Outcome = OutcomeAlready
	case same(&f.New) || force:
		x.Outcome = OutcomeRestored
		err = writeFile(f.Path, f.Old)
	default:
		x.Outcome, x.Detail = OutcomeKept, "it was changed since: its values return at the next boot"
	}
	if err == nil { // that a killed process had begun
		if err = os.Remove(f.Path + temporarySuffix); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	return x, err
}

func (r *rolling) restoreSetting(s set) (Restored, error) {
	x := Restored{Setting: s.Setting, Netns: s.Netns}
	at, gone, err := r.find(s)
	if err != nil {
		return x, err
	}
	if at == nil {
		x.Outcome, x.Detail = OutcomeGone, gone
		return x, nil
	}
	defer at.close()
	there := true
	if r.sameBoot { // indices are given again at each boot
		if s, there, err = at.renamed(s); err != nil {
			return x, err
		}
	}
	k, err := find(s.Setting)
	if err != nil {
		return x, err
	}
	present, err := "", fs.ErrNotExist
	if there {
		present, err = at.read(s.Setting)
	}
	if errors.Is(err, fs.ErrNotExist) {
		x.Outcome, x.Detail = OutcomeGone, "there is no such setting any more: its interface is gone, or its kernel module was unloaded"
		return x, nil
	}
	if err != nil {
		return x, err
	}
	switch {
	case present == s.Old:
		x.Outcome = OutcomeAlready
		if along, begun := r.restoring[x.Setting]; begun { // a rollback was killed between it and those
			if along == nil || r.o.Force {
				along = s.Along
			}
			err = restoreAlong(at, along)
		}
	case k.took(present, s.New) || r.o.Force:
		x.Outcome, x.Detail = OutcomeRestored, fmt.Sprintf("%s -> %s", present, s.Old)
		err = r.putBack(at, s, &x)
	default:
		x.Outcome, x.Detail = OutcomeKept, fmt.Sprintf("somebody set it to %s since (natkit: %s -> %s); --force restores it anyway", present, s.Old, s.New)
	}
	return x, err
}

// putBack restores a setting, which has the name in s now, and what the kernel changes along with it.
func (r *rolling) putBack(at *space, s set, x *Restored) error {
	if s.Setting != x.Setting {
		x.Detail += fmt.Sprintf(" in %s, as its interface was renamed since", s.Setting)
	}
	along, theirs := s.Along, []string(nil)
	if !r.o.Force {
		var err error
		if along, theirs, err = alongNow(at, s); err != nil {
			return err
		}
	}
	for _, name := range theirs {
		x.Detail += fmt.Sprintf("; somebody set %s to %s since: it stays", name, along[name])
	}
	r.append(entry{Op: opRestoring, Restored: &Restored{Setting: x.Setting, Netns: s.Netns}, Along: along})
	return restore(at, s, along)
}

// find opens the namespace that a setting was written in. Without an error and a
// namespace it is gone, and the text says why.
func (r *rolling) find(s set) (*space, string, error) {
	if s.Initial { // it lives as long as the machine, whatever the boot
		at, err := openInitial(r.o.procSys())
		if err != nil {
			return nil, "", fmt.Errorf("restore %s: %w", s.Setting, err)
		}
		return at, "", nil
	}
	if !r.sameBoot {
		return nil, "the machine was rebooted since: its namespace is gone", nil
	}
	at, err := findSpace(s.Netns, s.Space, r.o.procSys())
	if err != nil || at != nil {
		return at, "", err
	}
	if other, err := openSpace(s.Netns, r.o.procSys()); err == nil && s.Netns != "" {
		other.close()
		return nil, fmt.Sprintf("the namespace is gone; %q is another one now and is left alone", s.Netns), nil
	}
	return nil, "its namespace is gone, and the setting with it", nil
}
