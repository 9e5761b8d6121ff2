// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Hook is a place where the engine can meet packets.
type Hook string

// Every interface has tc; XDP may run before it.
const (
	HookTC  Hook = "tc"
	HookXDP Hook = "xdp"
)

// filterPriority and filterHandle are natkit's tc filter where there are no tcx links.
const (
	filterPriority = 1
	filterHandle   = 0x6e61 // "na"
	filterName     = "natkit"
)

// Attach puts the engine's program for that side on the interface's ingress; the
// calling thread must be in the interface's namespace. The attachment is pinned:
// it lasts until Detach or Unload. To attach what is attached is no error.
func (e *Engine) Attach(ifindex int, inside bool, hook Hook) error {
	pin := e.linkPin(ifindex, hook)
	if _, err := os.Stat(pin); e.dir != "" && err == nil {
		return nil
	}
	program := e.programs[programName(hook, inside)]
	var l link.Link
	var err error
	if hook == HookXDP {
		l, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: ifindex, Flags: link.XDPDriverMode})
	} else {
		l, err = link.AttachTCX(link.TCXOptions{Program: program, Interface: ifindex, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		if errors.Is(err, ebpf.ErrNotSupported) {
			return attachFilter(ifindex, program) // Linux 6.5 and older
		}
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", hook, ifindex, err)
	}
	if e.dir == "" {
		e.links = append(e.links, l)
		return nil
	}
	defer l.Close()
	return l.Pin(pin)
}

// Detach takes the engine's program off an interface.
func (e *Engine) Detach(ifindex int, hook Hook) error {
	err := os.Remove(e.linkPin(ifindex, hook))
	if errors.Is(err, os.ErrNotExist) && hook == HookTC {
		return DetachFilter(ifindex)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Attached lists the interfaces that carry links of the engine, by index. Filters
// of old kernels are not among them: the kernel has no link of theirs to pin.
func (e *Engine) Attached() (map[int][]Hook, error) {
	out := map[int][]Hook{}
	err := eachPin(filepath.Join(e.dir, linksDir), func(name, _ string) error {
		hook, index, _ := strings.Cut(name, "-")
		n, err := strconv.Atoi(index)
		if err != nil {
			return fmt.Errorf("pinned link %q: not natkit's", name)
		}
		out[n] = append(out[n], Hook(hook))
		return nil
	})
	return out, err
}

func (e *Engine) linkPin(ifindex int, hook Hook) string {
	return filepath.Join(e.dir, linksDir, fmt.Sprintf("%s-%d", hook, ifindex))
}

func programName(hook Hook, inside bool) string {
	switch {
	case hook == HookXDP && inside:
		return xdpInside
	case hook == HookXDP:
		return xdpOutside
	case inside:
		return tcInside
	default:
		return tcOutside
	}
}

// attachFilter is tc without links: a clsact qdisc and a filter, known again by its
// priority, handle and name. The qdisc may serve others and stays.
func attachFilter(ifindex int, program *ebpf.Program) error {
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", ifindex, err)
	}
	filter := ingressFilter(ifindex)
	filter.Fd = program.FD()
	if err := netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("attach tc filter to interface %d: %w", ifindex, err)
	}
	return nil
}

// DetachFilter takes natkit's tc filter off an interface, if one is there: Linux 6.5
// and older, where there is no link whose pin Unload could remove.
func DetachFilter(ifindex int) error {
	filters, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return fmt.Errorf("list tc filters of interface %d: %w", ifindex, err)
	}
	for _, f := range filters {
		if f, ok := f.(*netlink.BpfFilter); ok && f.Handle == filterHandle && f.Name == filterName {
			return netlink.FilterDel(ingressFilter(ifindex))
		}
	}
	return nil
}

func ingressFilter(ifindex int) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: netlink.HANDLE_MIN_INGRESS,
			Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Name: filterName, DirectAction: true,
	}
}
