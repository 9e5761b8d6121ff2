// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// raise brings up what up makes in a namespace that has nothing: whole, or not at all. Left is
// what a crash of an earlier one has changed and could not be put back; the rest of it is
// removed first.
func raise(ns *netns.Handle, by *serving, up func(*instance) (*record, error)) (left []string, err error) {
	in, left, err := occupy(ns, by)
	if err != nil {
		return nil, err
	}
	made, err := up(in)
	if err == nil {
		return left, in.release()
	}
	kept, undone := in.lower(made)
	for _, k := range append(left, kept...) {
		err = errors.Join(err, errors.New(k))
	}
	return nil, errors.Join(err, undone)
}

// bringUp makes what the record is about:
//
//  1. the record, which says that it is not whole
//  2. programs and tables, without rules; pinned
//  3. changes of the namespace, each journalled, but for forwarding
//  4. rules, then the interfaces
//  5. forwarding, so that no packet leaves untranslated
//  6. the record: whole
func (in *instance) bringUp(ctx context.Context, rec *record, changes []Change, create func() (start func() error, made io.Closer, err error)) error {
	if err := rec.write(in.inode); err != nil {
		return err
	}
	start, made, err := create()
	if err != nil {
		return err
	}
	others, forwarding := splitForwarding(changes)
	err = do(in.ns, in.j, others)
	if err == nil {
		err = start()
	}
	if err == nil {
		err = do(in.ns, in.j, forwarding)
	}
	if err := errors.Join(err, made.Close(), context.Cause(ctx)); err != nil {
		return err
	}
	rec.Whole = true
	return rec.write(in.inode)
}

// Up brings an engine up in a namespace that has none: whole, or not at all. The plan
// says what was done. What a crash of an earlier Up has left is removed first.
func Up(ctx context.Context, file *rulefile.File, text string, o Options) (p *Plan, err error) {
	left, err := raise(o.Namespace, o.serve, func(in *instance) (*record, error) {
		if p, err = MakePlan(file, text, o); err != nil {
			return nil, err
		}
		if err := p.refusal(o); err != nil {
			return p.record, err
		}
		return p.record, in.upWith(ctx, p)
	})
	if err != nil {
		return nil, err
	}
	p.Warnings = append(p.Warnings, left...)
	return p, nil
}

// upWith brings up what the plan is for.
func (in *instance) upWith(ctx context.Context, p *Plan) error {
	rec := p.record
	if rec.Engine.rules().pinned() {
		if err := in.canPin(); err != nil {
			return err
		}
	}
	rec.Rules, rec.Next = *rec.Next, nil
	rec.Make = datapath.Make()
	return in.bringUp(ctx, rec, p.Changes, func() (func() error, io.Closer, error) {
		e, err := rec.Engine.rules().create(in, p)
		return func() error {
			err := e.start(ctx, p)
			rec.Rules.came()
			return err
		}, e, err
	})
}

// Apply makes the file the rules of the engine that is up: all of it or nothing.
// Sessions of mappings that the file still allows go on. Programs of another natkit
// are replaced by this one's, if they can work on the same maps.
func Apply(ctx context.Context, file *rulefile.File, text string, o Options) (p *Plan, err error) {
	if err := refuseServed(o.Namespace, o.serve); err != nil {
		return nil, err
	}
	in, err := hold(o.Namespace)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, in.release()) }()
	rec, err := ofEngine(in.record())
	if err == nil && !rec.Whole {
		err = rec.killed(o.Namespace)
	}
	if err != nil {
		return nil, err
	}
	if o.Engine != "" && o.Engine != rec.Engine {
		want := record{Engine: o.Engine, Attach: cmp.Or(o.Attach, rec.Attach), Accepted: rec.Accepted, Rules: ruleText{File: file.Name}}
		return nil, fmt.Errorf("engine %s is up: %s; sessions end", rec.Engine, want.restart(o.Namespace))
	}
	e, err := rec.Engine.rules().open(o.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		err = rec.killed(o.Namespace) // the hold is this one's
	}
	if err != nil {
		return nil, rec.unopened(o.Namespace, err)
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	return in.apply(ctx, rec, file, text, o, e)
}

// apply does what Apply says. The order is such that what can be refused comes before
// what can't be taken back, and that a later run can tell how far this one came:
//
//  1. programs of this natkit, if it is another; taken back if 2 to 4 fail
//  2. changes of the namespace, each journalled, but for forwarding, which comes after 6
//  3. the record, with the indices that are new and the rules that come
//  4. interfaces that are new, which do by the old rules for a moment
//  5. the rules: from here on nothing is taken back
//  6. interfaces and changes that are not needed any more
//  7. the record
func (in *instance) apply(ctx context.Context, rec *record, file *rulefile.File, text string, o Options, e running) (*Plan, error) {
	made, err := standing(in.j.Path())
	if err != nil {
		return nil, err
	}
	if err := e.refresh(rec); err != nil {
		return nil, err
	}
	before := *rec
	rec.Links = slices.Clone(rec.Links)
	p, err := makePlan(rec, file, text, o, made)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(p.refusal(o), context.Cause(ctx)); err != nil {
		return nil, err
	}
	undo, err := e.prepare(p)
	if err != nil {
		return nil, err
	}
	intent := before
	intent.Links, intent.Addresses, intent.Next = rec.Links, rec.Addresses, rec.Next
	failed := in.change(ctx, p, &intent, e)
	if failed != nil && !intent.changedOver(rec.Next) {
		changes, err := standing(in.j.Path())
		if err == nil {
			err = takeBack(in.ns, in.j, changes[len(made):])
		}
		return nil, errors.Join(failed, err, undo(), before.forgetPast(in.inode))
	}
	if rec.Next.Number != rec.Rules.Number {
		rec.Next.came()
	}
	rec.Rules, rec.Next = *rec.Next, nil
	_, forwarding := splitForwarding(p.Changes)
	return p, errors.Join(failed, do(in.ns, in.j, forwarding), takeBack(in.ns, in.j, p.Undone), rec.write(in.inode))
}

// change puts the plan's rules in place, or nothing but changes of the namespace, which
// are in the journal.
func (in *instance) change(ctx context.Context, p *Plan, intent *record, e running) error {
	others, _ := splitForwarding(p.Changes)
	if err := do(in.ns, in.j, others); err != nil {
		return err
	}
	if err := errors.Join(intent.keepPast(in.inode), intent.write(in.inode)); err != nil {
		return err
	}
	if err := e.replace(ctx, p); err != nil {
		return errors.Join(err, intent.refused(in.inode, e))
	}
	return nil
}

// refused is for rules that were to come and have not: who reads the record must not take their apply for killed.
// Of engine nft, which settles nothing, the kernel takes the whole table or leaves what is there.
func (r *record) refused(inode uint64, e running) error {
	if err := e.settle(r); err != nil {
		return err
	}
	r.Next = nil
	return r.write(inode)
}

// changedOver reports whether rules that were to come are in force though what came after that failed, as refused has
// found.
func (r *record) changedOver(next *ruleText) bool {
	return next.Generation > 0 && r.Rules.Generation == next.Generation
}

// Down takes the engine off the namespace and puts back what it changed there. What
// somebody else has changed since is kept, and reported.
func Down(ns *netns.Handle) (kept []string, err error) { return down(ns, nil) }

func down(ns *netns.Handle, by *serving) (kept []string, err error) {
	if by == nil {
		if err := forgetServing(ns.Inode()); err != nil {
			return nil, err
		}
	}
	in, err := holdToRemove(ns, ErrDown)
	if err != nil {
		return nil, err
	}
	rec, err := ofEngine(in.record())
	if errors.Is(err, errRecord) {
		rec = &record{Engine: EngineNFT} // whichever it is: pins are removed in any case
	} else if err != nil && !errors.Is(err, ErrDown) {
		return nil, errors.Join(err, in.release())
	}
	changes, err := standing(in.j.Path())
	if err != nil {
		return nil, errors.Join(err, in.release())
	}
	if rec == nil && !in.pinned() && len(changes) == 0 {
		return nil, errors.Join(ErrDown, in.remove())
	}
	return in.lower(rec)
}

// Open opens the engine ebpf of a namespace, for reading what it does.
func Open(ns *netns.Handle) (*datapath.Engine, error) {
	rec, err := ofEngine(recordOf(ns))
	if err != nil {
		return nil, err
	}
	e, err := rec.Engine.rules().tables(ns)
	if err != nil {
		return nil, rec.unopened(ns, err)
	}
	e.NameZones(rec.linkNames())
	return e, nil
}

// Temporary runs a file on an engine that ends with its Close, or with the process
// however that ends: for labs and measurements. Only the settings of the
// namespace that the plan changes stay.
func Temporary(p *Plan, ns *netns.Handle) (_ *datapath.Engine, err error) {
	e, err := datapath.New(p.size)
	if err != nil {
		return nil, err
	}
	err = ns.Do(func() error {
		for _, c := range p.Changes {
			if err := c.make(); err != nil {
				return err
			}
		}
		if err := e.Apply(p.tables); err != nil {
			return err
		}
		_, err := e.Attach(p.attachments())
		return err
	})
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}
