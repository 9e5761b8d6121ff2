// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Hook is a place where the engine can meet packets.
type Hook string

// Every interface has tc; XDP may run before it. Acceleration also looks at what leaves.
const (
	HookTC     Hook = "tc"
	HookXDP    Hook = "xdp"
	HookEgress Hook = "egress"
)

// filterPriority and filterHandle are natkit's tc filter where there are no tcx links.
const (
	filterPriority = 1
	filterHandle   = 0x6e61 // "na"
	filterName     = "natkit"
)

// IsProgram reports whether a program of that name at a hook is natkit's: of an engine or of
// an accelerator, perhaps one that was taken off and is still there for a moment.
func IsProgram(name string) bool {
	return name != leaseAsk && !slices.Contains(ofEvery, name) && slices.ContainsFunc(slices.Concat(objects, accelObjects), func(o object) bool {
		return slices.Contains(o.programs, name)
	})
}

// Attachment is a hook of an interface, and the sides that the interface is on.
type Attachment struct {
	Name    string // of the interface, for messages
	Ifindex int
	Inside  bool
	Outside bool
	Zone    bool // Link.Zone
	Raw     bool // packets come without Ethernet, see Link.Ethernet; only tc
	Hook    Hook
}

// Attach puts the engine's programs on the ingress of interfaces; the calling thread
// must be in their namespace. Attachments are pinned: they last until DetachOthers or
// Unload. Those that are there are kept, with the program they ought to have. On an
// error, and by undo, everything is as before.
func (e *Engine) Attach(want []Attachment) (undo func() error, err error) {
	var undos []func() error
	undo = func() error {
		var errs []error
		for i := len(undos) - 1; i >= 0; i-- {
			errs = append(errs, undos[i]())
		}
		return errors.Join(errs...)
	}
	var names []string
	for _, a := range want {
		names = append(names, programName(a))
	}
	forget, err := e.need(names)
	if err != nil {
		return nil, err
	}
	undos = append(undos, forget)
	for _, a := range want {
		back, err := e.attach(a.Name, a.Ifindex, a.Hook, programName(a))
		if err != nil {
			return nil, errors.Join(err, undo())
		}
		undos = append(undos, back)
	}
	return undo, nil
}

func (e *Engine) attach(name string, ifindex int, hook Hook, programName string) (undo func() error, err error) {
	program := e.programs[programName]
	pin := e.linkPin(ifindex, hook)
	if e.dir != "" {
		undo, err := e.keep(pin, ifindex, program)
		if undo != nil || err != nil {
			return undo, err
		}
	}
	var l link.Link
	if hook == HookXDP {
		l, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: ifindex, Flags: link.XDPDriverMode})
	} else {
		options := link.TCXOptions{Program: program, Interface: ifindex, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()}
		if hook == HookEgress { // after those that might not let a packet out
			options.Attach, options.Anchor = ebpf.AttachTCXEgress, link.Tail()
		}
		l, err = link.AttachTCX(options)
		if errors.Is(err, ebpf.ErrNotSupported) { // Linux 6.5 and older
			return e.attachFilter(ifindex, hook, program)
		}
	}
	if err != nil {
		return nil, attachError(hook, name, ifindex, err)
	}
	if e.dir == "" {
		e.links = append(e.links, l)
		return l.Close, nil
	}
	defer l.Close()
	if err := l.Pin(pin); err != nil {
		return nil, fmt.Errorf("pin %s of interface %d: %w", hook, ifindex, err)
	}
	return func() error { return unpin(pin) }, nil
}

// unpin takes a pinned link's program off, and removes the pin.
func unpin(pin string) error {
	detach(pin)
	return os.Remove(pin)
}

// attachError names the interface. A driver refuses XDP for more than it can say in advance,
// and says why in the kernel's log at most.
func attachError(hook Hook, name string, ifindex int, err error) error {
	var missing netlink.LinkNotFoundError
	_, gone := netlink.LinkByIndex(ifindex)
	switch {
	case errors.As(gone, &missing):
		return fmt.Errorf("interface %q was removed while natkit attached %s to it: check `ip link show`, then try again", name, hook)
	case hook == HookXDP && errors.Is(err, unix.EBUSY):
		return fmt.Errorf("attach xdp to interface %q, where a program of somebody else is: %w; --attach tc does without", name, err)
	case hook == HookXDP:
		return fmt.Errorf("attach xdp to interface %q: %w: the driver does not take XDP with this MTU, these queues or these offloads; --attach tc does without", name, err)
	}
	return fmt.Errorf("attach %s to interface %q: %w", hook, name, err)
}

// keep gives the link that is pinned there the program, and says how to give it back
// the one it had. A link whose interface is gone holds nothing: its pin is removed, and
// undo is nil as if there were none.
func (e *Engine) keep(pin string, ifindex int, program *ebpf.Program) (undo func() error, err error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned link %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("read pinned link %s: %w", pin, err)
	}
	if linkIfindex(info) != ifindex {
		return nil, os.Remove(pin)
	}
	old, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, fmt.Errorf("program of pinned link %s: %w", pin, err)
	}
	if err := l.Update(program); err != nil {
		return nil, errors.Join(fmt.Errorf("replace program of interface %d: %w", ifindex, err), old.Close())
	}
	return func() error {
		defer old.Close()
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			return err
		}
		defer l.Close()
		return l.Update(old)
	}, nil
}

// linkIfindex is the interface that a link is on, 0 when that is gone.
func linkIfindex(info *link.Info) int {
	if tcx := info.TCX(); tcx != nil {
		return int(tcx.Ifindex)
	}
	if xdp := info.XDP(); xdp != nil {
		return int(xdp.Ifindex)
	}
	return 0
}

// DetachOthers takes the engine's programs off everything that is not wanted any more.
func (e *Engine) DetachOthers(want []Attachment) error {
	keep := map[string]bool{}
	for _, a := range want {
		keep[filepath.Base(e.linkPin(a.Ifindex, a.Hook))] = true
	}
	return eachPin(filepath.Join(e.dir, linksDir), func(name, path string) error {
		if keep[name] {
			return nil
		}
		return unpin(path)
	})
}

// Hold counts the links pinned in an instance's folder, and those whose interface is
// there.
func Hold(dir string) (links, alive int, err error) {
	attached, err := Attached(dir)
	for ifindex, hooks := range attached {
		links += len(hooks)
		if ifindex != 0 {
			alive += len(hooks)
		}
	}
	return links, alive, err
}

// Hooks lists where an interface of an instance carries its programs; attached is what
// Attached says. The calling thread is in the namespace.
func Hooks(attached map[int][]Hook, ifindex int) ([]Hook, error) {
	hooks := slices.Clone(attached[ifindex])
	for hook, parent := range map[Hook]uint32{HookTC: netlink.HANDLE_MIN_INGRESS, HookEgress: netlink.HANDLE_MIN_EGRESS} {
		if slices.Contains(hooks, hook) {
			continue
		}
		n, err := countFilters(ifindex, parent)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			hooks = append(hooks, hook)
		}
	}
	slices.Sort(hooks)
	return hooks, nil
}

// Attached lists the interfaces that carry links of an instance, by index; 0 are those
// that are gone. Filters of old kernels are not among them: the kernel has no link of
// theirs to pin.
func Attached(dir string) (map[int][]Hook, error) {
	out := map[int][]Hook{}
	err := eachPin(filepath.Join(dir, linksDir), func(name, path string) error {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return fmt.Errorf("open pinned link %s: %w", path, err)
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return fmt.Errorf("read pinned link %s: %w", path, err)
		}
		hook, _, _ := strings.Cut(name, "-")
		ifindex := linkIfindex(info)
		out[ifindex] = append(out[ifindex], Hook(hook))
		return nil
	})
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return out, err
}

func (e *Engine) linkPin(ifindex int, hook Hook) string {
	return filepath.Join(e.dir, linksDir, fmt.Sprintf("%s-%d", hook, ifindex))
}

func programName(a Attachment) string {
	names := [...]string{tcInside, tcOutside, tcBoth, tcZone}
	switch {
	case a.Hook == HookXDP:
		names = [...]string{xdpInside, xdpOutside, xdpBoth, xdpZone}
	case a.Raw:
		names = [...]string{tcInsideRaw, tcOutsideRaw, tcBothRaw, tcZoneRaw}
	}
	switch {
	case a.Zone:
		return names[3]
	case a.Inside && a.Outside:
		return names[abiNatSideNAT_BOTH]
	case a.Inside:
		return names[abiNatSideNAT_INSIDE]
	}
	return names[abiNatSideNAT_OUTSIDE]
}

// attachFilter is the function of that name; without pins the filter goes with Close, too.
func (e *Engine) attachFilter(ifindex int, hook Hook, program *ebpf.Program) (undo func() error, err error) {
	if e.dir != "" {
		return attachFilter(ifindex, hook, program)
	}
	here, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	if _, err := attachFilter(ifindex, hook, program); err != nil {
		here.Close()
		return nil, err
	}
	f := &heldFilter{here, filterAt(ifindex, hook)}
	e.links = append(e.links, f)
	return f.remove, nil
}

// heldFilter is a filter that goes with who made it.
type heldFilter struct {
	here   *netlink.Handle // in the interface's namespace, wherever the thread is by then
	filter *netlink.BpfFilter
}

func (f *heldFilter) remove() error {
	err := f.here.FilterDel(f.filter)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		return nil // the interface is gone, or its clsact, or the filter
	}
	return err
}

// Close takes the filter off.
func (f *heldFilter) Close() error {
	defer f.here.Close()
	return f.remove()
}

// attachFilter is tc without links: a clsact qdisc and a filter, known again by its
// priority, handle and name. The qdisc may serve others and stays. By undo, and on an
// error, the filter that was there has its program, or there is none again.
func attachFilter(ifindex int, hook Hook, program *ebpf.Program) (undo func() error, err error) {
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("add clsact to interface %d: %w", ifindex, err)
	}
	filter := filterAt(ifindex, hook)
	before, err := filtersOf(ifindex, filter.Parent)
	if err != nil {
		return nil, err
	}
	undo = func() error { return netlink.FilterDel(filterOf(ifindex, filter.Parent)) }
	if len(before) > 0 {
		old, err := ebpf.NewProgramFromID(ebpf.ProgramID(before[0].Id))
		if err != nil {
			return nil, fmt.Errorf("program of the tc filter of interface %d: %w", ifindex, err)
		}
		undo = func() error {
			defer old.Close()
			filter.Fd = old.FD()
			return netlink.FilterReplace(filter)
		}
	}
	filter.Fd = program.FD()
	if err := netlink.FilterReplace(filter); err != nil { // an old program is closed when it is collected
		return nil, fmt.Errorf("attach tc filter to interface %d: %w", ifindex, err)
	}
	return undo, nil
}

// DetachFilter takes natkit's tc filters off an interface, if there are some: Linux 6.5
// and older, where there is no link whose pin Unload could remove.
func DetachFilter(ifindex int) error {
	var errs []error
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		n, err := countFilters(ifindex, parent)
		for range n {
			err = errors.Join(err, netlink.FilterDel(filterOf(ifindex, parent)))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// countFilters counts natkit's tc filters at a hook of an interface.
func countFilters(ifindex int, parent uint32) (n int, err error) {
	filters, err := filtersOf(ifindex, parent)
	return len(filters), err
}

func filtersOf(ifindex int, parent uint32) (own []*netlink.BpfFilter, err error) {
	filters, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
	if err != nil {
		return nil, fmt.Errorf("list tc filters of interface %d: %w", ifindex, err)
	}
	for _, f := range filters {
		if IsFilter(f) {
			own = append(own, f.(*netlink.BpfFilter))
		}
	}
	return own, nil
}

// IsFilter reports whether a tc filter is natkit's.
func IsFilter(f netlink.Filter) bool {
	own, ok := f.(*netlink.BpfFilter)
	return ok && own.Handle == filterHandle && own.Name == filterName
}

func filterAt(ifindex int, hook Hook) *netlink.BpfFilter {
	if hook == HookEgress {
		return filterOf(ifindex, netlink.HANDLE_MIN_EGRESS)
	}
	return filterOf(ifindex, netlink.HANDLE_MIN_INGRESS)
}

func filterOf(ifindex int, parent uint32) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: parent,
			Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Name: filterName, DirectAction: true,
	}
}
