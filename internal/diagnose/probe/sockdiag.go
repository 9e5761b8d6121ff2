// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// TCP sockets by sock_diag, as ss(8) reads them.

// Layout of linux/inet_diag.h and sock_diag.h: struct inet_diag_req_v2 and inet_diag_msg.
const (
	sockDiagByFamily = 20

	diagRequestLen  = 56
	diagRequestExt  = 2
	diagRequestMask = 4

	diagMessageLen = 72
	diagState      = 1
	diagSourcePort = 4
	diagDestPort   = 6
	diagSourceAddr = 8
	diagDestAddr   = 24
	diagCookie     = 44
	diagQueue      = 56
	diagBacklog    = 60
	diagInode      = 68

	diagSkMeminfo  = 7 // INET_DIAG_SKMEMINFO, an array of uint32
	skMeminfoDrops = 8
)

// States of TCP, as in the kernel's tcp_states.h.
const (
	tcpEstablished = 1
	tcpSynSent     = 2
	tcpFinWait1    = 4
	tcpFinWait2    = 5
	tcpTimeWait    = 6
	tcpCloseWait   = 8
	tcpLastAck     = 9
	tcpListen      = 10
	tcpClosing     = 11
)

// sockDiagPatience is how long the kernel may take for the next part of its list.
const sockDiagPatience = 5 * time.Second

// diagAddr is the address at an offset of a struct inet_diag_msg.
func diagAddr(message []byte, at int) netip.Addr {
	if message[0] == unix.AF_INET6 {
		return netip.AddrFrom16([16]byte(message[at:]))
	}
	return netip.AddrFrom4([4]byte(message[at:]))
}

// eachTCPSocket gives fn a struct inet_diag_msg, with its attributes, of each TCP socket of
// the thread's namespace in one of the states of a mask; extension is an attribute that the
// kernel adds when asked, 0 for none. The list is read as it comes: it may be of a million.
func eachTCPSocket(family byte, states uint32, extension uint8, fn func(message []byte)) error {
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &largeMessages)
	if err != nil {
		return fmt.Errorf("open socket diagnosis: %w", err)
	}
	defer conn.Close()
	request := make([]byte, diagRequestLen)
	request[0], request[1] = family, unix.IPPROTO_TCP
	if extension > 0 {
		request[diagRequestExt] = 1 << (extension - 1)
	}
	binary.NativeEndian.PutUint32(request[diagRequestMask:], states)
	sent, err := conn.Send(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump},
		Data:   request,
	})
	if err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	buffer := make([]byte, 64<<10)
	for {
		if err := conn.SetReadDeadline(time.Now().Add(sockDiagPatience)); err != nil {
			return err
		}
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, _, failed = unix.Recvfrom(int(fd), buffer, 0)
			return failed != unix.EAGAIN && failed != unix.EINTR
		})
		if err := cmp.Or(err, failed); err != nil {
			return err
		}
		if done, err := diagMessages(buffer[:n], sent.Header.Sequence, fn); done || err != nil {
			return err
		}
	}
}

// diagMessages reads what the kernel sent at once.
func diagMessages(b []byte, sequence uint32, fn func([]byte)) (done bool, err error) {
	const header = unix.NLMSG_HDRLEN
	for len(b) >= header {
		u32 := binary.NativeEndian.Uint32
		length := int(u32(b))
		if length < header || length > len(b) {
			return false, fmt.Errorf("a message of %d bytes in %d", length, len(b))
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
			return true, errno
		case kind == sockDiagByFamily && len(payload) >= diagMessageLen:
			fn(payload)
		}
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
	return false, nil
}
