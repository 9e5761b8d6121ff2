// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// eventSockets reads which sockets get the events of connection tracking, and
// how many of them were lost for want of room in a socket's queue.
func eventSockets() source {
	before := map[uint64]uint64{} // inode -> drops
	return source{
		name:  snapshot.CanEventSockets,
		costs: "programs that lose conntrack events are not found",
		start: func(v *view) error {
			list, err := readEventSockets(v)
			for _, s := range list {
				before[s.Inode] = s.Drops
			}
			return err
		},
		end: func(v *view, s *snapshot.Snapshot) error {
			list, err := readEventSockets(v)
			if err != nil {
				return err
			}
			missing := map[uint64]bool{} // to look for their programs costs a look at each of the machine's open files
			for i := range list {
				list[i].Drops = increase32(before[list[i].Inode], list[i].Drops)
				if list[i].Drops > 0 {
					missing[list[i].Inode] = true
				}
			}
			s.EventSockets = list
			if len(missing) == 0 || !v.live {
				return nil
			}
			// A name that can't be found costs nothing but the name.
			names, _ := socketOwners(v, missing)
			for i := range list {
				list[i].Process = names[list[i].Inode]
			}
			return nil
		},
	}
}

func readEventSockets(v *view) ([]snapshot.EventSocket, error) {
	text, err := v.readNet("netlink")
	if err != nil {
		return nil, err
	}
	list, err := parseEventSockets(text)
	if err != nil {
		return nil, fmt.Errorf("read /proc/net/netlink: %w", err)
	}
	return list, nil
}

// conntrackGroups are the bits of the groups NFNLGRP_CONNTRACK_NEW, UPDATE and
// DESTROY; groups are counted from 1.
const conntrackGroups = 1<<0 | 1<<1 | 1<<2

// maxEventSockets is far above what a machine has.
const maxEventSockets = 1000

// parseEventSockets reads the sockets of /proc/net/netlink that have joined one
// of the groups: "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode", groups in
// hexadecimal.
func parseEventSockets(text string) ([]snapshot.EventSocket, error) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	column := map[string]int{}
	for i, name := range strings.Fields(lines[0]) {
		column[name] = i
	}
	for _, name := range []string{"Eth", "Pid", "Groups", "Rmem", "Drops", "Inode"} {
		if _, ok := column[name]; !ok {
			return nil, errors.New("it has no column " + name)
		}
	}
	out := []snapshot.EventSocket{} // known to be none
	for n, line := range lines[1:] {
		fields := strings.Fields(line)
		if len(fields) < len(column) {
			return nil, fmt.Errorf("line %d has %d values for %d names", n+2, len(fields), len(column))
		}
		var errs []error
		number := func(name string, base, bits int) uint64 {
			v, err := strconv.ParseUint(fields[column[name]], base, bits)
			errs = append(errs, err)
			return v
		}
		protocol, groups := number("Eth", 10, 32), number("Groups", 16, 32)
		s := snapshot.EventSocket{PortID: uint32(number("Pid", 10, 32)), QueueBytes: number("Rmem", 10, 32),
			Drops: number("Drops", 10, 32), Inode: number("Inode", 10, 64)}
		if err := errors.Join(errs...); err != nil {
			return nil, fmt.Errorf("line %d: %w", n+2, err)
		}
		if protocol == unix.NETLINK_NETFILTER && groups&conntrackGroups != 0 && len(out) < maxEventSockets {
			out = append(out, s)
		}
	}
	return out, nil
}
