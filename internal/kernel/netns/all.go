// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Place is a network namespace that a name or a process leads to.
type Place struct {
	Ref       string // as Open takes it: "" for the caller's own, a name, or pid:N
	Inode     uint64
	Processes []int // those in it, lowest numbers first, at most maxProcesses
}

// maxProcesses of a namespace are remembered: to tell what it belongs to, and to
// enter it when the first has ended.
const maxProcesses = 4

// All returns every namespace of the machine that can be found: the caller's own
// first, then those with a name, then those of processes alone. Processes that
// may not be looked at lead nowhere, and a namespace held by a socket or a mount
// elsewhere is not found.
func All() ([]Place, error) {
	var out []Place
	index := map[uint64]int{}
	add := func(ref string, inode uint64) int {
		i, known := index[inode]
		if !known {
			i = len(out)
			index[inode] = i
			out = append(out, Place{Ref: ref, Inode: inode})
		}
		return i
	}
	add("", (*Handle)(nil).Inode())
	named, err := List()
	if err != nil {
		return nil, err
	}
	for _, n := range named {
		add(n.Name, n.Inode)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	for _, pid := range pids {
		inode, ok := ofProcess(pid)
		if !ok {
			continue
		}
		p := &out[add(fmt.Sprintf("pid:%d", pid), inode)]
		if len(p.Processes) < maxProcesses {
			p.Processes = append(p.Processes, pid)
		}
	}
	return out, nil
}

// ofProcess is the number of a process's namespace, read from the link alone:
// kernel threads and other users' processes have one that can't be opened.
func ofProcess(pid int) (inode uint64, ok bool) {
	var buf [64]byte
	n, err := unix.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid), buf[:])
	if err != nil {
		return 0, false
	}
	text, found := strings.CutPrefix(string(buf[:n]), "net:[")
	inode, err = strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64)
	return inode, found && err == nil
}
