// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// maxListeners is how many listening sockets a Snapshot tells of; the fullest
// are always in.
const maxListeners = 2000

// listeners reads the listening TCP sockets and how full their accept queues
// are, by sock_diag as ss(8) does: /proc/net/tcp does not have the limit.
func listeners() source {
	before := map[uint64]uint64{} // cookie -> drops
	return source{
		name:  snapshot.CanListeners,
		costs: "the server whose accept queue is full is unknown",
		live:  true,
		start: func(*view) error {
			list, err := readListeners()
			for _, l := range list {
				before[l.cookie] = l.Drops
			}
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) error {
			list, err := readListeners()
			if err != nil {
				return err
			}
			for i := range list {
				list[i].Drops = increase(before[list[i].cookie], list[i].Drops)
			}
			slices.SortStableFunc(list, func(a, b listener) int {
				return cmp.Or(cmp.Compare(b.Drops, a.Drops), cmp.Compare(b.Queue, a.Queue))
			})
			list = list[:min(len(list), maxListeners)]
			s.Listeners = []snapshot.Listener{} // known, also when there is none
			for _, l := range list {
				s.Listeners = append(s.Listeners, l.Listener)
			}
			return nil
		},
	}
}

// processNames finds the programs that the listeners belong to.
func processNames() source {
	return source{
		name:  snapshot.CanProcessNames,
		costs: "the programs of some listeners are unknown",
		live:  true,
		end: func(v *view, s *snapshot.Snapshot) error {
			if s.Listeners == nil {
				return errors.New("no listener is known")
			}
			missing := map[uint64]bool{}
			for _, l := range s.Listeners {
				if l.Inode != 0 {
					missing[l.Inode] = true
				}
			}
			names, err := socketOwners(v, missing)
			for i := range s.Listeners {
				s.Listeners[i].Process = names[s.Listeners[i].Inode]
			}
			return err
		},
	}
}

type listener struct {
	snapshot.Listener        // its Drops are a total
	cookie            uint64 // the kernel's own identity of the socket
}

func readListeners() ([]listener, error) {
	var out []listener
	var bad error
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		err := eachTCPSocket(family, 1<<tcpListen, diagSkMeminfo, func(message []byte) {
			l, err := parseListener(message)
			bad = errors.Join(bad, err)
			out = append(out, l)
		})
		if err := cmp.Or(err, bad); err != nil {
			return nil, fmt.Errorf("list listening sockets: %w", err)
		}
	}
	return out, nil
}

// parseListener reads what eachTCPSocket gives.
func parseListener(b []byte) (listener, error) {
	u32 := binary.NativeEndian.Uint32
	l := listener{
		Listener: snapshot.Listener{
			Addr:    snapshot.EndpointOf(netip.AddrPortFrom(diagAddr(b, diagSourceAddr), binary.BigEndian.Uint16(b[diagSourcePort:]))),
			Queue:   u32(b[diagQueue:]),
			Backlog: u32(b[diagBacklog:]),
			Inode:   uint64(u32(b[diagInode:])),
		},
		cookie: binary.NativeEndian.Uint64(b[diagCookie:]),
	}
	ad, err := netlink.NewAttributeDecoder(b[diagMessageLen:])
	if err != nil {
		return listener{}, err
	}
	for ad.Next() {
		if mem := ad.Bytes(); ad.Type() == diagSkMeminfo && len(mem) >= 4*(skMeminfoDrops+1) {
			l.Drops = uint64(u32(mem[4*skMeminfoDrops:]))
		}
	}
	return l, ad.Err()
}

// socketOwners finds the programs that hold sockets, by the sockets' inodes. It
// looks through /proc for half a second at most: on a host of many thousand
// processes a name is not worth more.
func socketOwners(v *view, missing map[uint64]bool) (map[uint64]string, error) {
	names := map[uint64]string{}
	deadline := time.Now().Add(500 * time.Millisecond)
	var denied error
	folders, err := os.ReadDir(filepath.Join(v.root, "proc"))
	if err != nil {
		return nil, err
	}
	for _, dir := range folders {
		if len(missing) == 0 {
			return names, nil
		}
		if time.Now().After(deadline) {
			return names, errors.New("too many processes to look through in half a second")
		}
		if _, err := strconv.Atoi(dir.Name()); err != nil {
			continue
		}
		proc := filepath.Join(v.root, "proc", dir.Name())
		files, err := os.ReadDir(filepath.Join(proc, "fd"))
		if errors.Is(err, os.ErrPermission) {
			denied = err
		}
		for _, fd := range files {
			target, _ := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
			inode, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]"), 10, 64)
			if err != nil || !missing[inode] {
				continue
			}
			comm, err := v.read(filepath.Join("proc", dir.Name(), "comm"))
			if err != nil {
				continue
			}
			names[inode] = strings.TrimSpace(comm)
			delete(missing, inode)
		}
	}
	if denied != nil && len(missing) > 0 {
		return names, denied
	}
	return names, nil // what is left belongs to the kernel or to another PID namespace
}
