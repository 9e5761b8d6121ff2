// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
)

// Up brings an engine up in a namespace that has none: whole, or not at all. The plan
// says what was done. What a crash of an earlier Up has left is removed first.
//
//  1. the record, which says that it is not whole
//  2. the engine, without rules; pinned
//  3. changes of the namespace, each journalled, but for forwarding
//  4. rules, then the interfaces
//  5. forwarding, so that no packet leaves untranslated
//  6. the record: whole
func Up(ctx context.Context, file *rulefile.File, text string, o Options) (p *Plan, err error) {
	in, left, err := occupy(o.Namespace, o.serve)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			err = in.release()
			return
		}
		var made *record
		if p != nil {
			made = p.record
		}
		if _, undone := in.takeDown(made); undone != nil {
			err = errors.Join(err, undone, in.release()) // the next Up or Down goes on from the journal
		} else {
			err = errors.Join(err, in.remove())
		}
		p = nil
	}()
	if p, err = MakePlan(file, text, o); err != nil {
		return p, err
	}
	p.Warnings = append(p.Warnings, left...)
	if err := p.refusal(o); err != nil {
		return p, err
	}
	if p.Engine != EngineNFT {
		if err := in.canPin(); err != nil {
			return p, err
		}
	}
	return p, in.bringUp(ctx, p, file)
}

func (in *instance) bringUp(ctx context.Context, p *Plan, file *rulefile.File) (err error) {
	p.record.Rules, p.record.Next = *p.record.Next, nil
	p.record.Make = datapath.Make()
	if err := p.record.write(in.inode); err != nil {
		return err
	}
	others, forwarding := splitForwarding(p.Changes)
	if p.Engine == EngineNFT {
		err = do(in.ns, in.j, others)
		if err == nil {
			err = p.ruleset.Apply(in.ns)
		}
	} else {
		err = in.createEngine(p, others)
	}
	if err == nil {
		err = do(in.ns, in.j, forwarding)
	}
	if err := errors.Join(err, context.Cause(ctx)); err != nil {
		return err
	}
	in.retrack(ctx, p, file)
	p.record.Whole = true
	return p.record.write(in.inode)
}

func (in *instance) createEngine(p *Plan, changes []Change) (err error) {
	e, err := datapath.Create(in.dir, p.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := do(in.ns, in.j, changes); err != nil {
		return err
	}
	return in.ns.Do(func() error {
		if err := datapath.PinLifetime(in.dir); err != nil {
			return err
		}
		if err := e.Apply(p.tables); err != nil {
			return err
		}
		_, err := e.Attach(p.attachments())
		return err
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
		err = errHalf
	}
	if err != nil {
		return nil, err
	}
	if o.Engine != "" && o.Engine != rec.Engine {
		return nil, fmt.Errorf("engine %s is up: `natkit down`, then `natkit up --engine %s`; sessions end", rec.Engine, o.Engine)
	}
	if rec.Engine == EngineNFT {
		return in.apply(ctx, rec, file, text, o, nil)
	}
	e, err := datapath.Open(in.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errHalf
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	return in.apply(ctx, rec, file, text, o, e)
}

var errHalf = errors.New("an engine is half up here: who brought it up, or down, was killed: `natkit up` brings it up anew, `natkit down` removes it")

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
func (in *instance) apply(ctx context.Context, rec *record, file *rulefile.File, text string, o Options, e *datapath.Engine) (*Plan, error) {
	made, err := standing(in.j.Path())
	if err != nil {
		return nil, err
	}
	var forgotten []datapath.OutsideAddress
	if e != nil {
		if forgotten, err = rec.refresh(e); err != nil {
			return nil, err
		}
	}
	before := *rec
	rec.Links = slices.Clone(rec.Links)
	p, err := makePlan(rec, file, text, o, made)
	if err != nil {
		return nil, err
	}
	p.forgotten = forgotten
	if err := errors.Join(p.refusal(o), context.Cause(ctx)); err != nil {
		return nil, err
	}
	undo := func() error { return nil }
	if e != nil {
		if undo, err = p.prepare(e); err != nil {
			return nil, err
		}
	}
	intent := before
	intent.Links, intent.Addresses, intent.Next = rec.Links, rec.Addresses, rec.Next
	if err := in.change(p, &intent, e); err != nil {
		changes, err2 := standing(in.j.Path())
		if err2 == nil {
			err2 = takeBack(in.ns, in.j, changes[len(made):])
		}
		return nil, errors.Join(err, err2, undo())
	}
	in.retrack(ctx, p, file)
	rec.Rules, rec.Next = *rec.Next, nil
	return p, errors.Join(takeBack(in.ns, in.j, p.Undone), rec.write(in.inode))
}

// fits refuses a plan for more, or less, than the engine was made for.
func (p *Plan) fits(e *datapath.Engine) error {
	have := e.Size()
	if have == p.size {
		return nil
	}
	var what []string
	for _, n := range []struct {
		of         string
		have, want int
	}{
		{"sessions", have.Sessions, p.size.Sessions}, {"mappings", have.Mappings, p.size.Mappings}, {"sources", have.Sources, p.size.Sources},
		{"places for filtering address-dependent", have.Contacts, p.size.Contacts},
	} {
		if n.have != n.want {
			what = append(what, fmt.Sprintf("%d instead of %d %s", n.want, n.have, n.of))
		}
	}
	return fmt.Errorf("%s: tables of %s need other memory, which an engine that is up can't be given: `natkit down`, then `natkit up`; sessions end", p.record.Next.File, strings.Join(what, ", "))
}

// prepare makes the engine one that the plan's tables can be put into. Undo takes that
// back.
func (p *Plan) prepare(e *datapath.Engine) (undo func() error, err error) {
	undo = func() error { return nil }
	if err := p.fits(e); err != nil {
		return nil, err
	}
	generation, err := e.Generation()
	if err != nil {
		return nil, err
	}
	p.record.Next.Generation = generation + 1
	if err := e.Forget(p.forgotten); err != nil {
		return nil, err
	}
	if p.Upgrade {
		if undo, err = e.Upgrade(); err != nil {
			return nil, err
		}
		p.record.Make = datapath.Make()
		return undo, nil
	}
	stats, err := e.Stats()
	if err == nil && stats.SweepAge > staleSweep {
		err = e.StartSweep()
	}
	return undo, err
}

// change puts the plan's rules in place, or nothing but changes of the namespace, which
// are in the journal.
func (in *instance) change(p *Plan, intent *record, e *datapath.Engine) error {
	others, forwarding := splitForwarding(p.Changes)
	if err := do(in.ns, in.j, others); err != nil {
		return err
	}
	if err := intent.write(in.inode); err != nil {
		return err
	}
	var err error
	if e == nil {
		err = p.ruleset.Apply(in.ns)
	} else {
		err = in.ns.Do(func() error {
			undo, err := e.Attach(p.attachments())
			if err != nil {
				return err
			}
			if err := e.Apply(p.tables); err != nil {
				return errors.Join(err, undo())
			}
			return e.DetachOthers(p.attachments())
		})
	}
	if err != nil {
		return err
	}
	return do(in.ns, in.j, forwarding)
}

// Down takes the engine off the namespace and puts back what it changed there. What
// somebody else has changed since is kept, and told.
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
	if kept, err = in.takeDown(rec); err != nil {
		return kept, errors.Join(err, in.release())
	}
	return kept, in.remove()
}

// Open opens the engine ebpf of a namespace, for reading what it does.
func Open(ns *netns.Handle) (*datapath.Engine, error) {
	rec, err := ofEngine(readRecord(ns.Inode()))
	if err != nil {
		return nil, err
	}
	if rec.Engine == EngineNFT {
		return nil, errors.New("engine nft is up here: its sessions are the kernel's, `natkit conntrack list` shows them")
	}
	e, err := datapath.Open(pinsOf(ns.Inode()))
	if errors.Is(err, os.ErrNotExist) {
		return nil, half(ns.Inode())
	}
	return e, err
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
