// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// ebpfEngine is natkit's own: programs and tables in the kernel, pinned.
type ebpfEngine struct{}

func (ebpfEngine) pinned() bool { return true }

func (ebpfEngine) exists(r *record) error { return engineExists(r) }

// engineExists is why no engine can be brought up beside that of the record.
func engineExists(r *record) error {
	return fmt.Errorf("%w (engine %s, rules of %s)", datapath.ErrExists, r.Engine, r.Rules.File)
}

func (ebpfEngine) remove(in *instance, rec *record) ([]string, error) {
	return nil, in.ns.Do(func() error { return rec.detachFilters(nil) })
}

// detachFilters takes off what is not a pinned link, tc filters of old kernels, but for those of
// these attachments. An interface may have another name by now. The calling thread is in the
// namespace.
func (r *record) detachFilters(keep []datapath.Attachment) error {
	var errs []error
	for _, l := range r.Links {
		if slices.ContainsFunc(keep, func(a datapath.Attachment) bool { return a.Ifindex == l.Ifindex }) {
			continue
		}
		if _, err := netlink.LinkByIndex(l.Ifindex); err == nil {
			errs = append(errs, datapath.DetachFilter(l.Ifindex))
		}
	}
	return errors.Join(errs...)
}

func (ebpfEngine) plan(p *Plan, file *rulefile.File, o Options, made []Change) error {
	if err := p.compileEBPF(file, o, made); err != nil {
		return err
	}
	if !o.follow {
		there := slices.DeleteFunc(slices.Clone(p.tables.Links), func(l datapath.Link) bool { return l.Ifindex == 0 })
		var err error
		if p.Bypassed, err = bypassed(o.Namespace, o.Chains, there); err != nil {
			return err
		}
		p.Warnings = append(p.Warnings, kernelNAT(o.Chains)...)
	}
	p.size = sizeOf(file)
	p.MemoryBytes = p.size.MemoryBytes()
	if p.tables.Records() {
		p.MemoryBytes += int64(datapath.LogBytes)
	}
	for _, a := range p.tables.Addresses {
		if a.Leaving {
			continue
		}
		p.Addresses++
		if a.Ports[0] > 0 {
			p.MemoryBytes += datapath.AddressBytes(int(a.Ports[1]) - int(a.Ports[0]) + 1)
		}
		if !a.Blocks.IsZero() {
			p.MemoryBytes += datapath.BlockBytes()
		}
	}
	return nil
}

// compileEBPF plans the tables, what is attached where, and what it changes.
func (p *Plan) compileEBPF(file *rulefile.File, o Options, made []Change) error {
	rec := p.record
	facts, placements, err := gather(file, rec, o.Wait)
	if err != nil {
		return err
	}
	reserved := facts.ReservedPorts
	if facts.ReservedPorts, err = reservedByOthers(reserved, made); err != nil {
		return err
	}
	if p.tables, err = datapath.Compile(file, facts); err != nil {
		return err
	}
	p.Placements = placements
	p.Warnings = append(p.Warnings, cautions(file, facts.Local)...)
	strict, err := zoneCautions(file)
	if err != nil {
		return err
	}
	p.Warnings = append(p.Warnings, strict...)
	for i, l := range facts.Links {
		known := &rec.Links[slices.IndexFunc(rec.Links, func(r linkRecord) bool { return r.Name == l.Name })]
		known.Ifindex, known.Awaited = l.Ifindex, l.Awaited
		if l.Awaited {
			p.Awaited = append(p.Awaited, l.Name)
			if l.Ifindex != 0 {
				p.Unaddressed = append(p.Unaddressed, l.Name)
			}
		}
		if softwareKinds[placements[i].kind] != "" && placements[i].XDP {
			p.Warnings = append(p.Warnings, softwareCaution(placements[i]))
		}
		if !l.Transmit && placements[i].XDP {
			p.Warnings = append(p.Warnings, l.Name+": the driver's XDP can't send: packets that leave here take tc")
		}
	}
	for _, old := range rec.Rules.Placements {
		if !slices.ContainsFunc(placements, func(n Placement) bool { return n.Interface == old.Interface }) {
			p.Detached = append(p.Detached, old.Interface)
		}
	}
	p.Upgrade = rec.Whole && rec.Make != datapath.Make()
	rec.Addresses, rec.Next.Placements = p.tables.Addresses, placements
	return p.planChanges(file, p.tables.ReservePorts, p.tables.ProxyNeighbours, reserved, made)
}

func sizeOf(file *rulefile.File) datapath.Size {
	size := datapath.Size{Sessions: file.Limits.Sessions, Mappings: file.Limits.MappingLimit(), Sources: file.Limits.Sources, SubscriberPrefix: file.Subscribers.Prefix % 32, Zones: file.Subscribers.ByInterface}
	for i := range file.Rules {
		for class := range rulefile.Class(rulefile.PortClasses) {
			if file.FilteringMode(&file.Rules[i], class) == rulefile.FilterAddress {
				size.FilterEntries = file.Limits.Sessions
			}
		}
	}
	return size
}

// attachments are where the programs go: tc before XDP, so that nothing that XDP
// passes up meets the stack untranslated.
func (p *Plan) attachments() (out []datapath.Attachment) {
	for _, hook := range []datapath.Hook{datapath.HookTC, datapath.HookXDP} {
		for i, l := range p.tables.Links {
			if l.Ifindex != 0 && (hook == datapath.HookTC || p.Placements[i].XDP) {
				out = append(out, datapath.Attachment{Name: l.Name, Ifindex: l.Ifindex, Inside: l.Inside, Outside: l.Outside, Zone: l.Zone, Raw: !l.Ethernet, Hook: hook})
			}
		}
	}
	return out
}

func (ebpfEngine) create(in *instance, p *Plan) (running, error) {
	e, err := datapath.Create(in.dir, p.size)
	if err != nil {
		return nil, err
	}
	return &ebpfRunning{e, in.ns, in.dir}, nil
}

func (ebpfEngine) open(ns *netns.Handle) (running, error) {
	dir := pinsOf(ns.Inode())
	e, err := datapath.Open(dir)
	if err != nil {
		return nil, err
	}
	return &ebpfRunning{e, ns, dir}, nil
}

func (ebpfEngine) tables(ns *netns.Handle) (*datapath.Engine, error) {
	return datapath.Open(pinsOf(ns.Inode()))
}

func (ebpfEngine) watch(*watcher, *netns.Handle) error { return nil } // of its devices netlink reports

// ebpfRunning is the engine of a namespace, opened.
type ebpfRunning struct {
	*datapath.Engine
	ns  *netns.Handle
	dir string // of its pins
}

func (e *ebpfRunning) settle(rec *record) error {
	generation, err := e.Generation()
	if err == nil {
		rec.settle(generation)
	}
	return err
}

func (e *ebpfRunning) refresh(rec *record) error {
	if err := e.settle(rec); err != nil {
		return err
	}
	var keep []datapath.ExternalAddress
	for _, a := range rec.Addresses {
		idle := false
		if a.Leaving {
			var err error
			if idle, err = e.Idle(a); err != nil {
				return err
			}
		}
		if idle {
			rec.forgotten = append(rec.forgotten, a)
		} else {
			keep = append(keep, a)
		}
	}
	rec.Addresses = keep
	return nil
}

func subscriberKey(s datapath.Size) string {
	by := "address"
	if s.SubscriberPrefix != 0 {
		by = fmt.Sprintf("/%d", s.SubscriberPrefix)
	}
	if s.Zones {
		by = "[interface, " + by + "]"
	}
	return by
}

func (e *ebpfRunning) fits(p *Plan) error {
	have := e.Size()
	if have == p.size {
		return nil
	}
	next := *p.record
	next.Rules = *next.Next
	if have.SubscriberPrefix != p.size.SubscriberPrefix || have.Zones != p.size.Zones {
		return fmt.Errorf("%s: key by of subscribers is %s and not %s: that can't change in an engine that is up; sessions end: %s", next.Rules.File, subscriberKey(p.size), subscriberKey(have), next.restart(e.ns))
	}
	var what []string
	for _, n := range []struct {
		of         string
		have, want int
	}{
		{"sessions", have.Sessions, p.size.Sessions}, {"mappings", have.Mappings, p.size.Mappings}, {"sources", have.Sources, p.size.Sources},
		{"filter entries for address-dependent filtering", have.FilterEntries, p.size.FilterEntries},
	} {
		if n.have != n.want {
			what = append(what, fmt.Sprintf("%d instead of %d %s", n.want, n.have, n.of))
		}
	}
	return fmt.Errorf("%s: tables of %s need other memory, which an engine that is up can't be given: %s; sessions end", next.Rules.File, strings.Join(what, ", "), next.restart(e.ns))
}

func (e *ebpfRunning) prepare(p *Plan) (undo func() error, err error) {
	undo = func() error { return nil }
	if err := e.fits(p); err != nil {
		return nil, err
	}
	generation, err := e.Generation()
	if err != nil {
		return nil, err
	}
	p.record.Next.Generation = generation + 1
	if err := e.Forget(p.record.forgotten); err != nil {
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
	if err == nil && stats.GCAge > snapshot.Seconds(staleGC) {
		err = e.StartGC()
	}
	return undo, err
}

func (e *ebpfRunning) start(_ context.Context, p *Plan) error {
	return e.ns.Do(func() error {
		if err := datapath.PinLifetime(e.dir); err != nil {
			return err
		}
		if err := e.Apply(p.tables); err != nil {
			return err
		}
		_, err := e.Attach(p.attachments())
		return err
	})
}

// replace attaches interfaces that are new before the rules: they do by the old ones for a
// moment. Those that are not needed any more go afterwards.
func (e *ebpfRunning) replace(_ context.Context, p *Plan) error {
	return e.ns.Do(func() error {
		undo, err := e.Attach(p.attachments())
		if err != nil {
			return err
		}
		if err := e.Apply(p.tables); err != nil {
			return errors.Join(err, undo())
		}
		return errors.Join(e.DetachOthers(p.attachments()), p.record.detachFilters(p.attachments()))
	})
}

func (e *ebpfRunning) drift(d *drifting) error {
	d.engine = e.Engine
	if err := d.programs(); err != nil {
		return err
	}
	return d.interfaces(e.dir)
}

func (e *ebpfRunning) status(s *Status, rec *record, file *rulefile.File) (err error) {
	if s.attached, err = datapath.Attached(e.dir); err != nil {
		return err
	}
	if s.Stats, err = e.Stats(); err != nil {
		return err
	}
	if s.Addresses, err = readAddresses(e.Engine, rec); err != nil {
		return err
	}
	s.books = booksOf(rec, file)
	totals := map[string]*SubscriberTotal{}
	if !s.quick {
		if err := s.books.each(e.Engine, func(sub *Subscriber) bool { total(totals, sub.Pool, sub); return true }); err != nil {
			return err
		}
	}
	s.Pools, err = s.books.poolStatus(e.Engine, s.Addresses, totals)
	return err
}

// uses counts the sessions of each rule.
func (e *ebpfRunning) uses(_ *rulefile.File, rules []RuleUse) error {
	sessions := map[rulefile.RuleID]int{}
	err := e.Sessions(func(s *rulefile.Session) bool {
		if s.State != rulefile.StateDead {
			sessions[s.Rule]++
		}
		return true
	})
	for i := range rules {
		n := sessions[rules[i].ID]
		rules[i].Sessions = &n
	}
	return err
}
