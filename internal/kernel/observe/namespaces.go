// SPDX-License-Identifier: Apache-2.0

package observe

// This file knows the network namespaces of the machine: the kernel names one by
// its inode number, people by a name, and only from inside it can be told what
// its interfaces are called and what its conntrack counted.

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
)

// namespaces finds namespaces by their inode number. It remembers what it found
// and what it did not find; it holds none open.
type namespaces struct {
	refs       map[uint64]string // inode -> reference as for netns.Open; "" is natkit's own
	unknown    map[uint64]bool   // looked for, and in no process or name
	interfaces map[deviceKey]string
}

type deviceKey struct {
	netns   uint64
	ifindex uint32
}

// newNamespaces knows all namespaces that have a name or a process now.
func newNamespaces() *namespaces {
	n := &namespaces{
		refs: map[uint64]string{}, unknown: map[uint64]bool{}, interfaces: map[deviceKey]string{},
	}
	n.scan()
	return n
}

// scan looks at every namespace that can be entered; the reference most useful
// to people wins: natkit's own, a name, the lowest process.
func (n *namespaces) scan() {
	add := func(inode uint64, ref string) {
		if _, known := n.refs[inode]; !known && inode != 0 {
			n.refs[inode] = ref
		}
	}
	clear(n.refs)
	add((*netns.Handle)(nil).Inode(), "")
	named, _ := netns.List()
	for _, ns := range named {
		add(ns.Inode, ns.Name)
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, path := range processes {
		// Of a process that just ended, or of another user, the link is not readable.
		link, err := os.Readlink(path)
		if err != nil {
			continue
		}
		add(netnsNumber(link), "pid:"+strings.Split(path, "/")[2])
	}
}

// ref returns the reference of the namespace with this inode number.
func (n *namespaces) ref(inode uint64) (ref string, ok bool) {
	if ref, ok = n.refs[inode]; ok && leads(ref, inode) {
		return ref, ok
	}
	if inode == 0 || n.unknown[inode] {
		return "", false
	}
	n.scan()
	if ref, ok = n.refs[inode]; !ok {
		n.unknown[inode] = true
	}
	return ref, ok
}

// leads says whether a reference by a process is still one of the namespace: the process may have ended. Names are
// looked at when they are opened.
func leads(ref string, inode uint64) bool {
	pid, ok := strings.CutPrefix(ref, "pid:")
	if !ok {
		return true
	}
	link, _ := os.Readlink("/proc/" + pid + "/ns/net")
	return netnsNumber(link) == inode
}

// netnsNumber is the inode number that a link in /proc/PID/ns names, 0 for none.
func netnsNumber(link string) uint64 {
	inode, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "net:["), "]"), 10, 64)
	return inode
}

// forget forgets what is known of a namespace that has gone: another may get its number.
func (n *namespaces) forget(inode uint64) {
	delete(n.refs, inode)
	delete(n.unknown, inode)
	maps.DeleteFunc(n.interfaces, func(key deviceKey, _ string) bool { return key.netns == inode })
}

// learn looks once for those of several that are not known, where many come and go.
func (n *namespaces) learn(inodes []uint64) {
	missing := slices.DeleteFunc(inodes, func(inode uint64) bool {
		_, known := n.refs[inode]
		return known || inode == 0 || n.unknown[inode]
	})
	if len(missing) == 0 {
		return
	}
	n.scan()
	for _, inode := range missing {
		if _, known := n.refs[inode]; !known {
			n.unknown[inode] = true
		}
	}
}

// do runs fn inside the namespace, if it can still be found.
func (n *namespaces) do(inode uint64, fn func() error) error {
	ref, ok := n.ref(inode)
	if !ok {
		return fmt.Errorf("network namespace %d: no name and no process leads to it", inode)
	}
	if ref == "" {
		return fn()
	}
	h, err := netns.Open(ref)
	if err != nil {
		return err
	}
	defer h.Close()
	if h.Inode() != inode { // a process number or a name that was used again
		delete(n.refs, inode)
		return fmt.Errorf("network namespace %d: %s is another one now", inode, ref)
	}
	return h.Do(fn)
}

// device returns the name of an interface, or "if7" where its namespace can't be
// entered or the interface is gone.
func (n *namespaces) device(inode uint64, ifindex uint32) string {
	switch ifindex {
	case 0:
		return ""
	case 1:
		return "lo" // LOOPBACK_IFINDEX, in every namespace
	}
	key := deviceKey{inode, ifindex}
	name, known := n.interfaces[key]
	if !known {
		name = fmt.Sprintf("if%d", ifindex)
		// Without a name the bare number says as much as can be said. One list names all: each is
		// a list of all for the kernel.
		_ = n.do(inode, func() error {
			all, err := net.Interfaces()
			for _, dev := range all {
				n.interfaces[deviceKey{inode, uint32(dev.Index)}] = dev.Name
				if uint32(dev.Index) == ifindex {
					name = dev.Name
				}
			}
			return err
		})
		n.interfaces[key] = name
	}
	return name
}

// refusals is what the conntrack of one namespace counted of packets that it
// dropped itself.
type refusals struct {
	create  uint64 // no entry could be made: the table is full, or there is no memory
	confirm uint64 // an entry could not be put into the table
}

// refusalsOf reads them from the counters. A failed insertion is counted both as
// insert_failed and as drop; a packet that got no entry only as drop.
func refusalsOf(counted map[string]uint64) refusals {
	drop, failed := counted["drop"], counted["insert_failed"]
	return refusals{create: drop - min(drop, failed), confirm: failed}
}

// counters reads what the conntrack of a namespace counted; an error means that it is not known.
func (n *namespaces) counters(inode uint64) (out conntrack.Stats, err error) {
	err = n.do(inode, func() (err error) {
		out, err = conntrack.ReadStats()
		return err
	})
	return out, err
}

// Refused is how many packets connection tracking has dropped itself in the namespace, since it
// was made: those that it could make no entry for, and those whose entry it could not insert.
// It needs no rights where the kernel has a file of the counters.
func Refused(h *netns.Handle) (create, confirm uint64, err error) {
	var counted conntrack.Stats
	err = h.Do(func() (err error) {
		counted, err = conntrack.ReadStats()
		return err
	})
	r := refusalsOf(counted.Sum())
	return r.create, r.confirm, err
}
