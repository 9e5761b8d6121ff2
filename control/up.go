// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/datapath"
	"natkit/internal/journal"
	"natkit/internal/netns"
	"natkit/nat"
	"natkit/snapshot"
)

// Options says how to run a rule file.
type Options struct {
	Namespace *netns.Handle
	Attach    Attach
	Bypass    bool // go past what the stack does with forwarded packets
	// Chains are the filter chains of the namespace, to tell what is gone past.
	Chains []snapshot.Chain
}

// Plan is what Up or Apply would do, and why.
type Plan struct {
	Placements  []Placement `json:"placements"`
	Bypassed    []Bypassed  `json:"bypassed,omitempty"`
	Changes     []Change    `json:"changes,omitempty"`
	MemoryBytes int64       `json:"memory_bytes"`
	Rules       int         `json:"rules"`
	Addresses   int         `json:"outside_addresses"`

	tables *datapath.Tables
	size   datapath.Size
	record *record
	inode  uint64
}

// MakePlan reads the namespace and compiles the file, and changes nothing.
func MakePlan(file *nat.File, text string, o Options) (*Plan, error) {
	inode := o.Namespace.Inode()
	rec, err := readRecord(inode)
	if errors.Is(err, ErrDown) {
		rec, err = &record{Engine: EngineEBPF, Namespace: o.Namespace.Name(), Since: time.Now()}, nil
	}
	if err != nil {
		return nil, err
	}
	rec.File, rec.Rules, rec.Attach = file.Name, text, o.Attach
	p := &Plan{record: rec, inode: inode, Rules: len(file.Rules)}
	err = o.Namespace.Do(func() error {
		facts, placements, err := gather(file, rec, o.Attach)
		if err != nil {
			return err
		}
		p.Placements = placements
		if p.tables, err = datapath.Compile(file, facts); err != nil {
			return err
		}
		rec.Addresses, rec.Placements = p.tables.Addresses, placements
		for _, l := range facts.Links {
			i := slices.IndexFunc(rec.Links, func(r linkRecord) bool { return r.Name == l.Name })
			rec.Links[i].Ifindex = l.Ifindex
		}
		p.Changes, err = changes(p.tables, facts)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.Bypassed, err = bypassed(o.Namespace, o.Chains, append(slices.Clone(file.Inside), file.Outside...))
	if err != nil {
		return nil, err
	}
	p.size = sizeOf(file, p.tables.Addresses)
	p.MemoryBytes = p.size.MemoryBytes()
	for _, a := range p.tables.Addresses {
		p.Addresses++
		if a.Ports[0] > 0 {
			p.MemoryBytes += datapath.AddressBytes(int(a.Ports[1]) - int(a.Ports[0]) + 1)
		}
	}
	return p, nil
}

func sizeOf(file *nat.File, addresses []datapath.OutsideAddress) datapath.Size {
	size := datapath.Size{Sessions: file.Limits.Sessions, Mappings: file.Limits.MappingLimit(), Sources: file.Limits.Sources}
	ports := 0
	for _, a := range addresses {
		if a.Ports[0] > 0 {
			ports += nat.PortClasses * (int(a.Ports[1]) - int(a.Ports[0]) + 1)
		}
	}
	for i := range file.Rules {
		for class := range nat.Class(nat.PortClasses) {
			if file.FilteringMode(&file.Rules[i], class) == nat.FilterAddress {
				size.Contacts = file.Limits.Sessions
			}
			if file.MappingMode(&file.Rules[i], class) == nat.AddressAndPortDependent {
				size.Resting = ports
			}
		}
	}
	return size
}

// changes are what an instance needs of its namespace.
func changes(t *datapath.Tables, facts datapath.Facts) (out []Change, err error) {
	add := func(name, value, reason string) {
		c, e := settingChange(name, value, reason)
		if e != nil {
			err = errors.Join(err, e)
		} else if c != nil {
			out = append(out, *c)
		}
	}
	add(settingForward, "1", "without it the kernel's routes are not for forwarding, and its answers to senders are not given")
	if len(t.ReservePorts) > 0 {
		add(settingReservedPorts, formatPorts(append(slices.Clone(facts.ReservedPorts), t.ReservePorts...)),
			"the gateway's own connections leave alone the ports that the rules give away")
	}
	have, e := proxied()
	err = errors.Join(err, e)
	for _, n := range t.ProxyNeighbours {
		if !slices.Contains(have, n) {
			out = append(out, Change{Kind: changeNeighbour, Interface: n.Link, Address: n.Addr, Reason: "nobody else has the address on that network"})
		}
	}
	return out, err
}

// proxied lists the addresses that are answered for already.
func proxied() (out []datapath.ProxyNeighbour, err error) {
	neighbours, err := netlink.NeighListExecute(netlink.Ndmsg{Family: netlink.FAMILY_V4, Flags: netlink.NTF_PROXY})
	if err != nil {
		return nil, fmt.Errorf("list proxy neighbours: %w", err)
	}
	for _, n := range neighbours {
		l, err := netlink.LinkByIndex(n.LinkIndex)
		if err != nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(n.IP.To4()); ok {
			out = append(out, datapath.ProxyNeighbour{Link: l.Attrs().Name, Addr: addr})
		}
	}
	return out, nil
}

// Up brings engine ebpf up in the namespace, as planned: whole, or not at all.
func Up(ctx context.Context, p *Plan, o Options) (err error) {
	if len(p.Bypassed) > 0 && !o.Bypass {
		return &BypassError{p.Bypassed}
	}
	j, err := journal.Open(instancePath(p.inode, ".journal"))
	if err != nil {
		return err
	}
	dir, err := enginesDir(p.inode)
	if err != nil {
		return errors.Join(err, j.Close())
	}
	if _, err := os.Stat(dir); err == nil {
		return errors.Join(datapath.ErrExists, j.Close())
	}
	// A crash before may have left changes of the namespace, with nothing pinned.
	if _, err := undo(o.Namespace, j); err != nil {
		return errors.Join(err, j.Close())
	}
	defer func() {
		if err == nil {
			err = j.Close()
			return
		}
		_, undone := undo(o.Namespace, j)
		err = errors.Join(err, datapath.Unload(dir), undone)
		if undone == nil {
			err = errors.Join(err, removeRecord(p.inode), j.Remove())
		} else {
			err = errors.Join(err, j.Close())
		}
	}()
	e, err := datapath.Create(dir, p.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := p.record.write(p.inode); err != nil {
		return err
	}
	if err := do(o.Namespace, j, p.Changes); err != nil {
		return err
	}
	if err := o.Namespace.Do(func() error { return e.Apply(p.tables) }); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return attach(e, p, o.Namespace)
}

// attach puts the programs on the interfaces: tc first, so that nothing that XDP
// passes up meets the stack untranslated.
func attach(e *datapath.Engine, p *Plan, ns *netns.Handle) error {
	return ns.Do(func() error {
		for _, hook := range []datapath.Hook{datapath.HookTC, datapath.HookXDP} {
			for i, l := range p.tables.Links {
				if hook == datapath.HookXDP && !p.Placements[i].XDP {
					continue
				}
				if err := e.Attach(l.Ifindex, l.Inside, hook); err != nil {
					return fmt.Errorf("%s: %w", l.Name, err)
				}
			}
		}
		return nil
	})
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
		return e.Apply(p.tables)
	})
	if err == nil {
		err = attach(e, p, ns)
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

func enginesDir(inode uint64) (string, error) {
	root, err := datapath.Root(runDir())
	if err != nil {
		return "", err
	}
	return datapath.InstanceDir(root, inode), nil
}

// Apply makes the file the rules of the engine that is up: all of it or nothing.
// Sessions of mappings that the file still allows go on.
func Apply(p *Plan, o Options) (err error) {
	if len(p.Bypassed) > 0 && !o.Bypass {
		return &BypassError{p.Bypassed}
	}
	j, err := journal.Open(instancePath(p.inode, ".journal"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	e, err := open(p.inode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	have, want := e.Size(), p.size
	if have.Resting > want.Resting {
		want.Resting = have.Resting // room that is not needed any more
	}
	if have != want {
		return fmt.Errorf("the limits fix the size of the engine's tables (now %+v, wanted %+v): take it down and up for that; its sessions end", have, p.size)
	}
	if err := do(o.Namespace, j, p.Changes); err != nil {
		return err
	}
	if err := o.Namespace.Do(func() error { return e.Apply(p.tables) }); err != nil {
		return err
	}
	if err := attach(e, p, o.Namespace); err != nil {
		return err
	}
	return p.record.write(p.inode)
}

// open opens the engine of a namespace.
func open(inode uint64) (*datapath.Engine, error) {
	dir, err := enginesDir(inode)
	if err != nil {
		return nil, err
	}
	e, err := datapath.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrDown
	}
	return e, err
}

// Down takes the engine off the namespace and puts back what it changed there. What
// somebody else has changed since is kept, and told.
func Down(ns *netns.Handle) (kept []string, err error) {
	inode := ns.Inode()
	dir, err := enginesDir(inode)
	if err != nil {
		return nil, err
	}
	_, there := os.Stat(dir)
	_, recorded := os.Stat(instancePath(inode, ".json"))
	_, journalled := os.Stat(instancePath(inode, ".journal"))
	if there != nil && recorded != nil && journalled != nil {
		return nil, ErrDown
	}
	j, err := journal.Open(instancePath(inode, ".journal"))
	if err != nil {
		return nil, err
	}
	if err := detachFilters(inode, ns); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	if err := datapath.Unload(dir); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	kept, err = undo(ns, j)
	if err != nil {
		return kept, errors.Join(err, j.Close())
	}
	return kept, errors.Join(removeRecord(inode), j.Remove())
}

// detachFilters takes off what is not a pinned link: tc filters of old kernels.
func detachFilters(inode uint64, ns *netns.Handle) error {
	rec, err := readRecord(inode)
	if err != nil {
		return nil // nothing was attached before there was one
	}
	return ns.Do(func() error {
		var errs []error
		for _, l := range rec.Links {
			if have, err := netlink.LinkByIndex(l.Ifindex); err == nil && have.Attrs().Name == l.Name {
				errs = append(errs, datapath.DetachFilter(l.Ifindex))
			}
		}
		return errors.Join(errs...)
	})
}

func removeRecord(inode uint64) error {
	err := os.Remove(instancePath(inode, ".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
