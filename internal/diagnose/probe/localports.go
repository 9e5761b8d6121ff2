// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// maxLocalDestinations is how many pairs of address and destination are counted; one that
// holds a good part of the ports is among the first of the kernel's list.
const maxLocalDestinations = 1 << 16

// localPorts counts by destination the ports that connections of the namespace's own
// programs hold.
func localPorts() source {
	return source{
		name:  snapshot.CanLocalPorts,
		costs: "programs here that run out of local ports are not found",
		live:  true,
		end: func(v *view, s *snapshot.Snapshot) error {
			low, high, err := localPortRange(v)
			if err != nil {
				return err
			}
			s.LocalPorts = []snapshot.LocalPortUse{}
			held, err := tcpSockets(v)
			if err != nil || float64(held) < snapshot.MinLocalPorts*float64(high-low+1) {
				return err
			}
			listening := map[uint16]bool{}
			for _, l := range s.Listeners {
				listening[l.Addr.Port()] = true
			}
			count := portCount{low: low, high: high, listening: listening, uses: map[portUser]*snapshot.LocalPortUse{}}
			for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
				if err := eachTCPSocket(family, holdsPort, 0, count.add); err != nil {
					return fmt.Errorf("list connections: %w", err)
				}
			}
			s.LocalPorts = count.most()
			missing := map[uint64]bool{}
			for _, u := range s.LocalPorts {
				if u.Inode != 0 {
					missing[u.Inode] = true
				}
			}
			names, _ := socketOwners(v, missing) // processNames says why not
			for i := range s.LocalPorts {
				s.LocalPorts[i].Process = names[s.LocalPorts[i].Inode]
			}
			return nil
		},
	}
}

// localPortRange is net.ipv4.ip_local_port_range of the thread's namespace; IPv6 has the same.
func localPortRange(v *view) (low, high uint16, err error) {
	text, err := v.read("proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return 0, 0, err
	}
	if n, err := fmt.Sscan(text, &low, &high); n != 2 || err != nil || high < low {
		return 0, 0, fmt.Errorf("net.ipv4.ip_local_port_range is %q", strings.TrimSpace(text))
	}
	return low, high, nil
}

// tcpSockets is how many TCP sockets the namespace has, those in TIME_WAIT included.
func tcpSockets(v *view) (n uint64, err error) {
	text, err := v.read(v.net + "/sockstat")
	if err != nil {
		return 0, err
	}
	six, _ := v.read(v.net + "/sockstat6") // not there without IPv6
	for line := range strings.Lines(text + six) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "TCP:" && fields[0] != "TCP6:" {
			continue
		}
		for i := 1; i+1 < len(fields); i += 2 {
			if fields[i] == "inuse" || fields[i] == "tw" {
				held, _ := strconv.ParseUint(fields[i+1], 10, 32)
				n += held
			}
		}
	}
	return n, nil
}

// portUser are the ends of a connection but for the local port.
type portUser struct {
	source [16]byte
	dest   [16]byte
	port   uint16
}

type portCount struct {
	low, high uint16
	listening map[uint16]bool
	uses      map[portUser]*snapshot.LocalPortUse
}

// holdsPort are the states of TCP in which a connection has a local port: not of what listens,
// nor of what is half open to it.
const holdsPort = 1<<tcpEstablished | 1<<tcpSynSent | 1<<tcpFinWait1 | 1<<tcpFinWait2 | 1<<tcpTimeWait | 1<<tcpCloseWait | 1<<tcpLastAck | 1<<tcpClosing

// add counts the connection of a struct inet_diag_msg.
func (c *portCount) add(b []byte) {
	port := binary.BigEndian.Uint16(b[diagSourcePort:])
	if port < c.low || port > c.high || c.listening[port] {
		return
	}
	source, dest := diagAddr(b, diagSourceAddr).Unmap(), diagAddr(b, diagDestAddr).Unmap()
	user := portUser{source.As16(), dest.As16(), binary.BigEndian.Uint16(b[diagDestPort:])}
	use := c.uses[user]
	if use == nil {
		if len(c.uses) == maxLocalDestinations {
			return
		}
		use = &snapshot.LocalPortUse{Source: source, Dest: snapshot.EndpointOf(netip.AddrPortFrom(dest, user.port))}
		c.uses[user] = use
	}
	use.Used++
	if b[diagState] == tcpTimeWait {
		use.TimeWait++
	} else if use.Inode == 0 {
		use.Inode = uint64(binary.NativeEndian.Uint32(b[diagInode:]))
	}
}

// most are the users with most ports.
func (c *portCount) most() []snapshot.LocalPortUse {
	out := []snapshot.LocalPortUse{}
	for _, use := range c.uses {
		out = append(out, *use)
	}
	slices.SortFunc(out, func(a, b snapshot.LocalPortUse) int {
		return cmp.Or(cmp.Compare(b.Used, a.Used), a.Source.Compare(b.Source), a.Dest.Compare(b.Dest))
	})
	return slices.Clone(out[:min(len(out), snapshot.TopN)])
}
