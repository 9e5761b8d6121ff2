// SPDX-License-Identifier: Apache-2.0

package conntrack

// The socket to ctnetlink and the writing of messages. Reading of attributes is
// in parse.go.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Message types of the conntrack subsystem, linux/netfilter/nfnetlink_conntrack.h.
const (
	msgNew    = unix.NFNL_SUBSYS_CTNETLINK << 8 // | 0
	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// Attributes: enum ctattr_type and the enums nested in it.
const (
	ctaTupleOrig     = 1
	ctaTupleReply    = 2
	ctaStatus        = 3
	ctaProtoinfo     = 4
	ctaHelp          = 5
	ctaNATSrc        = 6
	ctaTimeout       = 7
	ctaMark          = 8
	ctaCountersOrig  = 9
	ctaCountersReply = 10
	ctaUse           = 11
	ctaID            = 12
	ctaNATDst        = 13
	ctaZone          = 18
	ctaSecctx        = 19
	ctaTimestamp     = 20
	ctaLabels        = 22
	ctaFilter        = 25
	ctaStatusMask    = 26

	ctaFilterOrig = 1

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum        = 1
	ctaProtoSrcPort    = 2
	ctaProtoDstPort    = 3
	ctaProtoICMPID     = 4
	ctaProtoICMPType   = 5
	ctaProtoICMPCode   = 6
	ctaProtoICMPv6ID   = 7
	ctaProtoICMPv6Type = 8
	ctaProtoICMPv6Code = 9

	ctaProtoinfoTCP  = 1
	ctaProtoinfoDCCP = 2
	ctaProtoinfoSCTP = 3

	ctaProtoinfoState         = 1 // the same number in all three
	ctaProtoinfoTCPFlagsOrig  = 4
	ctaProtoinfoTCPFlagsReply = 5

	ctaCountersPackets = 1
	ctaCountersBytes   = 2
	ctaTimestampStart  = 1
	ctaTimestampStop   = 2
	ctaHelpName        = 1
	ctaSecctxName      = 1

	ctaNATv4Min       = 1
	ctaNATv4Max       = 2
	ctaNATProto       = 3
	ctaNATv6Min       = 4
	ctaNATv6Max       = 5
	ctaProtoNATPortLo = 1
	ctaProtoNATPortHi = 2
)

const (
	nlHeaderLen  = unix.SizeofNlMsghdr
	nfHeaderLen  = 4 // struct nfgenmsg
	nlTypeMask   = 0x3fff
	nestedAttr   = unix.NLA_F_NESTED
	receiveBytes = 4 << 20
)

// socket is a netlink socket to netfilter in the namespace of the thread that
// opened it. It is used by one goroutine.
type socket struct {
	file *os.File // nil: not watched
	fd   int
	seq  uint32
	buf  []byte
	stop func() bool
}

// openSocket opens a socket whose reads end when ctx ends. groups is the bit
// mask of multicast groups to join. Without connection tracking in the kernel
// there is none: the first message would load it, and looking must not.
func openSocket(ctx context.Context, groups uint32) (*socket, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s, err := openUnwatched(groups)
	if err != nil {
		return nil, err
	}
	s.file = os.NewFile(uintptr(s.fd), "ctnetlink")
	s.stop = context.AfterFunc(ctx, func() { s.file.SetReadDeadline(time.Unix(1, 0)) })
	return s, nil
}

// openUnwatched opens a socket for those who look into it now and then: nothing wakes
// this program when a message comes.
func openUnwatched(groups uint32) (*socket, error) {
	if !loaded("/") {
		return nil, errNotLoaded
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, explain(os.NewSyscallError("socket", err))
	}
	s := &socket{fd: fd, buf: make([]byte, 64<<10)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, explain(os.NewSyscallError("bind", err))
	}
	// Best effort, all three: a smaller buffer means more lost events, which are
	// counted; without the options errors carry more bytes.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBytes) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBytes)
	}
	unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return s, nil
}

var errNotLoaded = errors.New("connection tracking is not loaded in this kernel (the first rule that needs it loads it, or `modprobe nf_conntrack`)")

// loaded looks for connection tracking below root. An old kernel hides the
// sysctls from namespaces of unprivileged users, and one without sysfs has no
// /sys/module.
func loaded(root string) bool {
	for _, path := range []string{sysctlDir + "nf_conntrack_count", "/sys/module/nf_conntrack", "/proc/thread-self/net/nf_conntrack"} {
		if _, err := os.Stat(filepath.Join(root, path)); err == nil {
			return true
		}
	}
	return false
}

func (s *socket) close() {
	if s.file == nil {
		unix.Close(s.fd)
		return
	}
	s.stop()
	s.file.Close()
}

// send hands messages to the kernel, which works on them before it returns.
func (s *socket) send(msgs []byte) error {
	if err := unix.Sendto(s.fd, msgs, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return explain(os.NewSyscallError("sendto", err))
	}
	return nil
}

// receive reads one datagram: some messages. They are valid until the next
// call. The error is os.ErrDeadlineExceeded when the socket's context ended.
func (s *socket) receive() ([]byte, error) {
	n, err := s.file.Read(s.buf)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		return nil, err
	}
	return s.buf[:n], nil
}

// explain adds the remedy to the errors that a user can do something about.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w (needs root, or CAP_NET_ADMIN in the namespace)", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return fmt.Errorf("%w (this kernel has no netfilter netlink: needs the module nfnetlink)", err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w (does this kernel have ctnetlink? needs the module nf_conntrack_netlink)", err)
	}
	return err
}

// message is a buffer that netlink messages are appended to.
type message struct {
	b     []byte
	start int // of the message being written
}

// begin starts a message; end must follow.
func (m *message) begin(typ, flags uint16, seq uint32, family uint8) {
	m.start = len(m.b)
	m.b = binary.NativeEndian.AppendUint32(m.b, 0) // length, by end
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
	m.b = binary.NativeEndian.AppendUint16(m.b, flags|unix.NLM_F_REQUEST)
	m.b = binary.NativeEndian.AppendUint32(m.b, seq)
	m.b = binary.NativeEndian.AppendUint32(m.b, 0)
	m.b = append(m.b, family, unix.NFNETLINK_V0, 0, 0)
}

// requestAck makes the kernel acknowledge the last message.
func (m *message) requestAck() {
	flags := m.b[m.start+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
}

func (m *message) end() {
	binary.NativeEndian.PutUint32(m.b[m.start:], uint32(len(m.b)-m.start))
}

// nest starts an attribute that holds others; give its result to endNest.
func (m *message) nest(typ uint16) int {
	at := len(m.b)
	m.b = binary.NativeEndian.AppendUint16(m.b, 0)
	m.b = binary.NativeEndian.AppendUint16(m.b, typ|nestedAttr)
	return at
}

func (m *message) endNest(at int) {
	binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at))
}

// attr appends an attribute. Values are in network order, as ctnetlink wants.
func (m *message) attr(typ uint16, value ...byte) {
	m.b = binary.NativeEndian.AppendUint16(m.b, uint16(4+len(value)))
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
	m.b = append(m.b, value...)
	for len(m.b)%4 != 0 {
		m.b = append(m.b, 0)
	}
}

func (m *message) attr16(typ, v uint16) { m.attr(typ, byte(v>>8), byte(v)) }

func (m *message) attr32(typ uint16, v uint32) {
	m.attr(typ, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
}

func (m *message) attrAddr(v4, v6 uint16, a netip.Addr) {
	if a.Is4() {
		b := a.As4()
		m.attr(v4, b[:]...)
		return
	}
	b := a.As16()
	m.attr(v6, b[:]...)
}

// tuple appends one direction of a flow.
func (m *message) tuple(typ uint16, proto uint8, t *Tuple) {
	at := m.nest(typ)
	m.tupleParts(proto, t)
	m.endNest(at)
}

// zonedTuple appends one direction of a flow that has a zone in it alone.
func (m *message) zonedTuple(typ uint16, proto uint8, t *Tuple, zone uint16) {
	at := m.nest(typ)
	m.tupleParts(proto, t)
	m.attr16(ctaTupleZone, zone)
	m.endNest(at)
}

func (m *message) tupleParts(proto uint8, t *Tuple) {
	ip := m.nest(ctaTupleIP)
	m.attrAddr(ctaIPv4Src, ctaIPv6Src, t.Src)
	m.attrAddr(ctaIPv4Dst, ctaIPv6Dst, t.Dst)
	m.endNest(ip)
	pr := m.nest(ctaTupleProto)
	m.attr(ctaProtoNum, proto)
	switch proto {
	case unix.IPPROTO_ICMP:
		m.attr16(ctaProtoICMPID, t.SrcPort)
		m.attr(ctaProtoICMPType, t.ICMPType)
		m.attr(ctaProtoICMPCode, t.ICMPCode)
	case unix.IPPROTO_ICMPV6:
		m.attr16(ctaProtoICMPv6ID, t.SrcPort)
		m.attr(ctaProtoICMPv6Type, t.ICMPType)
		m.attr(ctaProtoICMPv6Code, t.ICMPCode)
	default:
		m.attr16(ctaProtoSrcPort, t.SrcPort)
		m.attr16(ctaProtoDstPort, t.DstPort)
	}
	m.endNest(pr)
}

// errorOf reads what NLMSG_ERROR and NLMSG_DONE begin with; errno 0 is an
// acknowledgement.
func errorOf(payload []byte) (unix.Errno, bool) {
	if len(payload) < 4 {
		return 0, false
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(payload))), true
}

// eachMessage calls fn with the header fields and payload of each message of a
// datagram, until fn returns false. The error says that the datagram is not
// well formed.
func eachMessage(b []byte, fn func(typ, flags uint16, seq uint32, payload []byte) bool) error {
	for len(b) > 0 {
		if len(b) < nlHeaderLen {
			return fmt.Errorf("read netlink message: %d bytes left, a header has %d", len(b), nlHeaderLen)
		}
		length := int(binary.NativeEndian.Uint32(b))
		if length < nlHeaderLen || length > len(b) {
			return fmt.Errorf("read netlink message: says %d bytes, %d are there", length, len(b))
		}
		if !fn(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[nlHeaderLen:length]) {
			return nil
		}
		b = b[min((length+3)&^3, len(b)):]
	}
	return nil
}
