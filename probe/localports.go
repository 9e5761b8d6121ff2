// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/snapshot"
)

const (
	// maxLocalDestinations is how many pairs of address and destination are counted; one
	// that holds a good part of the ports is among the first of the kernel's list.
	maxLocalDestinations = 1 << 16
	// localPortsPatience is how long the kernel may take for the next part of its list.
	localPortsPatience = 5 * time.Second
)

// localPorts counts by destination the ports that connections of the namespace's own
// programs hold.
func localPorts() source {
	return source{
		name:  snapshot.CanLocalPorts,
		costs: "whether programs here run out of ports for connections of their own is not told",
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
				if err := eachConnection(family, count.add); err != nil {
					return err
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

const tcpTimeWait = 6 // TCP_TIME_WAIT

// Offsets in struct inet_diag_msg, beside those of listeners.go.
const (
	diagState    = 1
	diagDestPort = 6
	diagDestAddr = 24
)

// add counts the connection of a struct inet_diag_msg.
func (c *portCount) add(b []byte) {
	port := binary.BigEndian.Uint16(b[diagSourcePort:])
	if port < c.low || port > c.high || c.listening[port] {
		return
	}
	source, dest := diagAddr(b[0], b[diagSourceAddr:]), diagAddr(b[0], b[diagDestAddr:])
	user := portUser{source.As16(), dest.As16(), binary.BigEndian.Uint16(b[diagDestPort:])}
	use := c.uses[user]
	if use == nil {
		if len(c.uses) == maxLocalDestinations {
			return
		}
		use = &snapshot.LocalPortUse{Source: source, Dest: netip.AddrPortFrom(dest, user.port)}
		c.uses[user] = use
	}
	use.Used++
	if b[diagState] == tcpTimeWait {
		use.TimeWait++
	} else if use.Inode == 0 {
		use.Inode = uint64(binary.NativeEndian.Uint32(b[diagInode:]))
	}
}

func diagAddr(family byte, b []byte) netip.Addr {
	if family == unix.AF_INET6 {
		return netip.AddrFrom16([16]byte(b)).Unmap()
	}
	return netip.AddrFrom4([4]byte(b))
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

// eachConnection gives add a struct inet_diag_msg of each TCP connection that holds a port
// of its own: not of what listens, nor of what is half open to it. The list is read as it
// comes: it may be of a million.
func eachConnection(family byte, add func(message []byte)) error {
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &largeMessages)
	if err != nil {
		return fmt.Errorf("open socket diagnosis: %w", err)
	}
	defer conn.Close()
	const established, synSent, finWait1, finWait2, closeWait, lastAck, closing = 1, 2, 4, 5, 8, 9, 11
	request := make([]byte, diagRequestLen)
	request[0], request[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(request[diagRequestMask:],
		1<<established|1<<synSent|1<<finWait1|1<<finWait2|1<<tcpTimeWait|1<<closeWait|1<<lastAck|1<<closing)
	sent, err := conn.Send(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump},
		Data:   request,
	})
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	buffer := make([]byte, 64<<10)
	for {
		if err := conn.SetReadDeadline(time.Now().Add(localPortsPatience)); err != nil {
			return err
		}
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, _, failed = unix.Recvfrom(int(fd), buffer, 0)
			return failed != unix.EAGAIN && failed != unix.EINTR
		})
		if err := cmp.Or(err, failed); err != nil {
			return fmt.Errorf("list connections: %w", err)
		}
		if done, err := diagMessages(buffer[:n], sent.Header.Sequence, add); done || err != nil {
			return err
		}
	}
}

// diagMessages reads what the kernel sent at once.
func diagMessages(b []byte, sequence uint32, add func([]byte)) (done bool, err error) {
	const header = unix.NLMSG_HDRLEN
	for len(b) >= header {
		u32 := binary.NativeEndian.Uint32
		length := int(u32(b))
		if length < header || length > len(b) {
			return false, fmt.Errorf("list connections: a message of %d bytes in %d", length, len(b))
		}
		kind, payload := binary.NativeEndian.Uint16(b[4:]), b[header:length]
		switch {
		case u32(b[8:]) != sequence:
		case kind == unix.NLMSG_DONE:
			return true, nil
		case kind == unix.NLMSG_ERROR && len(payload) >= 4:
			errno := unix.Errno(-int32(u32(payload)))
			if errno == unix.ENOENT {
				return true, errors.New("this kernel has no TCP socket diagnosis (module tcp_diag)")
			}
			return true, fmt.Errorf("list connections: %w", errno)
		case kind == sockDiagByFamily && len(payload) >= diagMessageLen:
			add(payload)
		}
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
	return false, nil
}
