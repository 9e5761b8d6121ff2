// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
)

// HTTPServer answers every GET with the same small body, and keeps the connection where
// the client asks for that: by HTTP/1.1, or by a word in HTTP/1.0. It is the other end of the
// published case. It is one event loop over
// epoll that never waits for a peer, so that thousands of connections, slow and
// dead ones among them, cost no more than their sockets. It is there to be
// measured against.
type HTTPServer struct {
	idle    uint32 // seconds
	answers [answerKinds][]byte
	hold    int // milliseconds, see wait

	listener, epoll int
	paused          bool // the listener is not watched, for want of descriptors

	conns []httpConn // by descriptor
	tick  uint32     // seconds the loop has run

	answered, refused, idled atomic.Uint64

	mu      sync.Mutex // held while wake is written to or closed
	wake    int        // an eventfd that ends the loop's wait; -1 once closed
	closing atomic.Bool
	done    chan struct{}
	err     error // why the loop ended, nil after Close; read it after done
}

// HTTPServerOptions has defaults for its zero fields.
type HTTPServerOptions struct {
	Backlog int           // connections that may wait for accept; default 16384
	Body    []byte        // default: a line of text
	Idle    time.Duration // a connection silent for so long is closed; default 60 s, whole seconds
}

// HTTPServerStats counts since the start.
type HTTPServerStats struct {
	Answered uint64 `json:"answered"` // requests
	Refused  uint64 `json:"refused"`  // what is no request, or none we answer
	Idle     uint64 `json:"idle"`     // connections closed for their silence
}

const (
	defaultBacklog = 16384
	defaultBody    = "natkit lab: this line is as long as the answer to a health check often is.\n"

	maxHead       = 16 << 10
	lingerSeconds = 2
)

// httpConn is one connection. It has no buffer: a request is matched as it comes,
// not kept.
type httpConn struct {
	state   connState
	answer  uint8
	keep    bool          // the client wants the connection kept
	later   bool          // a line of the head ended: what follows is no request line
	start   [5]byte       // of the request: its method
	line    [maxWord]byte // the first bytes of the line that is read, in small letters and without spaces
	length  uint8         // how many of them
	last    byte          // the request line's last digit: of the version
	seen    uint32        // bytes of the head so far
	since   uint32        // tick of the last progress
	sent    uint32        // bytes of the answer
	watched uint32        // epoll events, 0 when not in the epoll set yet
}

type connState uint8

const (
	connNone    connState = iota
	connReading           // the head is not complete
	connWriting           // the answer is not all in the socket's buffer
	connLinger            // answered and shut: what still comes is thrown away, or a reset would overtake the answer
)

// Indices of HTTPServer.answers. Those of a connection that is kept follow those of one that is not.
const (
	answerGet = iota
	answerHead
	answerGetKept
	answerHeadKept
	answerBad
	answerTooLong
	answerKinds

	answerKept = answerGetKept - answerGet
)

// What a client says of the connection, as httpConn.line has it, and how long that is at most.
const (
	sayClose = "connection:close"
	sayKeep  = "connection:keep-alive"
	maxWord  = len(sayKeep)
)

// ServeHTTP starts an HTTPServer in the namespace, on "ADDRESS:PORT" or ":PORT".
// It serves until Close, the end of ctx or the end of the lab. Limits of the
// namespace that would cut its backlog are raised.
func (n *Node) ServeHTTP(ctx context.Context, addr string, o HTTPServerOptions) (*HTTPServer, error) {
	s, err := listenHTTP(n.handle, addr, o)
	if err != nil {
		return nil, fmt.Errorf("serve HTTP in %s: %w", n.Netns, err)
	}
	go func() {
		defer context.AfterFunc(ctx, s.stop)()
		defer context.AfterFunc(n.lab.ctx, s.stop)()
		s.loop()
	}()
	return s, nil
}

// listenHTTP makes the server's sockets in the namespace of h; loop does the rest.
func listenHTTP(h *netns.Handle, addr string, o HTTPServerOptions) (*HTTPServer, error) {
	if o.Backlog == 0 {
		o.Backlog = defaultBacklog
	}
	if o.Body == nil {
		o.Body = []byte(defaultBody)
	}
	if o.Idle == 0 {
		o.Idle = time.Minute
	}
	if strings.HasPrefix(addr, ":") {
		addr = "0.0.0.0" + addr
	}
	at, err := netip.ParseAddrPort(addr)
	if err != nil || !at.Addr().Is4() {
		return nil, fmt.Errorf("listen on %q: want an IPv4 ADDRESS:PORT, or :PORT", addr)
	}
	s := &HTTPServer{
		idle:     max(1, uint32(o.Idle/time.Second)),
		listener: -1, epoll: -1, wake: -1,
		done: make(chan struct{}),
	}
	head, kept := httpHead("200 OK", len(o.Body), false), httpHead("200 OK", len(o.Body), true)
	s.answers = [...][]byte{
		answerGet:      append(bytes.Clone(head), o.Body...),
		answerHead:     head,
		answerGetKept:  append(bytes.Clone(kept), o.Body...),
		answerHeadKept: kept,
		answerBad:      httpHead("400 Bad Request", 0, false),
		answerTooLong:  httpHead("431 Request Header Fields Too Large", 0, false),
	}
	if err := h.Do(func() error { return s.listen(at, o.Backlog) }); err != nil {
		s.closeSockets()
		return nil, fmt.Errorf("listen on %s: %w", at, err)
	}
	return s, nil
}

func httpHead(status string, length int, keep bool) []byte {
	version, connection := "HTTP/1.0", "close"
	if keep {
		version, connection = "HTTP/1.1", "keep-alive"
	}
	return fmt.Appendf(nil, "%s %s\r\nServer: natkit\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n",
		version, status, length, connection)
}

func (s *HTTPServer) listen(at netip.AddrPort, backlog int) (err error) {
	for _, key := range []string{"net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog"} {
		if err := raiseSysctl(key, backlog); err != nil {
			return err
		}
	}
	if s.listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(s.listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if err := unix.Bind(s.listener, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
		return err
	}
	if err := unix.Listen(s.listener, backlog); err != nil {
		return err
	}
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return err
	}
	return errors.Join(
		s.control(unix.EPOLL_CTL_ADD, s.wake, unix.EPOLLIN),
		s.control(unix.EPOLL_CTL_ADD, s.listener, unix.EPOLLIN))
}

// raiseSysctl raises a number among the settings of the current namespace to at
// least value.
func raiseSysctl(key string, value int) error {
	data, err := os.ReadFile(sysctlPath(key))
	if err != nil {
		return fmt.Errorf("read sysctl %s: %w", key, err)
	}
	if have, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil && have >= value {
		return nil
	}
	return writeSysctl(key, strconv.Itoa(value))
}

// Stats returns the counts so far.
func (s *HTTPServer) Stats() HTTPServerStats {
	return HTTPServerStats{s.answered.Load(), s.refused.Load(), s.idled.Load()}
}

// Close ends the server and its connections, and returns why it had ended before,
// if it had.
func (s *HTTPServer) Close() error {
	s.stop()
	<-s.done
	return s.err
}

// stop asks the loop to end.
func (s *HTTPServer) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing.Store(true)
	if s.wake >= 0 {
		_, _ = unix.Write(s.wake, binary.NativeEndian.AppendUint64(nil, 1)) // fails only when it is awake anyway
	}
}

func (s *HTTPServer) closeSockets() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fd, c := range s.conns {
		if c.state != connNone {
			unix.Close(fd)
		}
	}
	for _, fd := range []int{s.listener, s.epoll, s.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	s.wake = -1
}

// loop is the server; nothing else touches the connections.
func (s *HTTPServer) loop() {
	defer close(s.done)
	defer s.closeSockets()
	events := make([]unix.EpollEvent, 512)
	buf := make([]byte, 16<<10)
	started := time.Now()
	for {
		n, err := s.wait(events)
		if s.closing.Load() {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			s.err = fmt.Errorf("wait for connections: %w", err)
			return
		}
		for _, ev := range events[:max(n, 0)] {
			switch fd := int(ev.Fd); fd {
			case s.wake:
			case s.listener:
				s.accept(buf)
			default:
				s.serve(fd, buf)
			}
		}
		if now := uint32(time.Since(started) / time.Second); now != s.tick {
			s.tick = now
			s.closeIdle()
		}
	}
}

// wait waits for events, for at most a second.
//
// To let the Go scheduler know of each short wait costs about a fifth of all that
// the server does at 100 connections. So for up to hold milliseconds it is not
// told, and its processor waits too: zero in a process that does other things.
func (s *HTTPServer) wait(events []unix.EpollEvent) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(s.epoll),
		uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(s.hold), 0, 0)
	if errno == 0 && n > 0 {
		return int(n), nil
	}
	return unix.EpollWait(s.epoll, events, 1000)
}

// accept takes what waits, but not so much that those already here starve.
func (s *HTTPServer) accept(buf []byte) {
	for range 256 {
		r, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(s.listener), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case 0:
		case unix.EAGAIN:
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			// The listener would wake us at once again. Until the next round of closeIdle watches
			// it again, connections wait in the backlog.
			s.paused = s.control(unix.EPOLL_CTL_DEL, s.listener, 0) == nil
			return
		default: // that connection is gone already
			continue
		}
		fd := int(r)
		if fd >= len(s.conns) {
			s.conns = append(s.conns, make([]httpConn, fd+1024-len(s.conns))...)
		}
		s.conns[fd] = httpConn{state: connReading, since: s.tick}
		s.serve(fd, buf)
	}
}

// serve takes a connection as far as it goes without waiting, and has the rest of
// it watched. An event of a connection that is gone may meet a new one with its
// descriptor, or none: both are fine.
func (s *HTTPServer) serve(fd int, buf []byte) {
	c := &s.conns[fd]
	for {
		switch c.state {
		case connNone:
			return
		case connReading, connLinger:
			n, errno := rawRecv(fd, buf)
			switch {
			case errno == unix.EAGAIN:
				s.watch(fd, unix.EPOLLIN)
				return
			case errno != 0 || n == 0: // reset, or the peer's end
				s.drop(fd)
			case c.state == connReading:
				c.since = s.tick
				c.read(buf[:n])
			}
		case connWriting:
			answer := s.answers[c.answer]
			n, errno := rawSend(fd, answer[c.sent:], !c.kept())
			switch {
			case errno == unix.EAGAIN:
				s.watch(fd, unix.EPOLLOUT)
				return
			case errno != 0:
				s.drop(fd)
			default:
				c.since = s.tick
				if c.sent += uint32(n); int(c.sent) == len(answer) {
					s.finish(fd)
				}
			}
		}
	}
}

// read takes a part of the head, and decides on the answer when that is possible.
func (c *httpConn) read(b []byte) {
	if c.seen < uint32(len(c.start)) {
		copy(c.start[c.seen:], b)
	}
	c.seen += uint32(len(b))
	switch {
	case c.start[0] < 'A' || c.start[0] > 'Z': // no method begins like this: why wait for more
		c.state, c.answer = connWriting, answerBad
	case c.endsHead(b):
		c.state, c.answer = connWriting, answerBad
		if bytes.HasPrefix(c.start[:], []byte("GET ")) {
			c.answer = answerGet
		} else if bytes.HasPrefix(c.start[:], []byte("HEAD ")) {
			c.answer = answerHead
		}
		if c.keep && c.answer != answerBad {
			c.answer += answerKept
		}
	case c.seen > maxHead:
		c.state, c.answer = connWriting, answerTooLong
	}
}

// kept says whether the connection goes on after the answer.
func (c *httpConn) kept() bool { return c.answer == answerGetKept || c.answer == answerHeadKept }

// endsHead says whether an empty line ends the head within b, and notes what its lines say of the
// connection. Lines may end with a line feed alone. What follows the head in b would be another
// request, for which there is no room: then the connection is not kept.
func (c *httpConn) endsHead(b []byte) bool {
	for i, ch := range b {
		switch {
		case ch == '\n' && c.length == 0 && c.later:
			c.keep = c.keep && i == len(b)-1
			return true
		case ch == '\n':
			c.endLine()
		case ch == '\r' || ch == ' ' || ch == '\t':
		default:
			if c.last = ch; int(c.length) < len(c.line) {
				c.line[c.length] = ch | 0x20 // of letters the small one
				c.length++
			}
		}
	}
	return false
}

// endLine takes a line of the head: the first ends with the version, by whose default a connection is
// kept or not.
func (c *httpConn) endLine() {
	switch line := string(c.line[:c.length]); {
	case !c.later:
		c.keep = c.last == '1'
	case line == sayClose:
		c.keep = false
	case line == sayKeep:
		c.keep = true
	}
	c.later, c.length = true, 0
}

// finish is after the answer.
func (s *HTTPServer) finish(fd int) {
	c := &s.conns[fd]
	if c.kept() {
		s.answered.Add(1)
		*c = httpConn{state: connReading, since: c.since, watched: c.watched}
		return
	}
	if c.answer == answerGet || c.answer == answerHead {
		s.answered.Add(1)
		s.drop(fd)
		return
	}
	s.refused.Add(1)
	if unix.Shutdown(fd, unix.SHUT_WR) != nil {
		s.drop(fd)
		return
	}
	c.state = connLinger
}

// drop closes a connection, which takes it out of the epoll set too.
func (s *HTTPServer) drop(fd int) {
	s.conns[fd].state = connNone
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

// closeIdle closes connections without progress, once a second.
func (s *HTTPServer) closeIdle() {
	for fd := range s.conns {
		c := &s.conns[fd]
		limit := s.idle
		if c.state == connLinger {
			limit = lingerSeconds
		}
		if c.state != connNone && s.tick-c.since > limit {
			if c.state != connLinger {
				s.idled.Add(1)
			}
			s.drop(fd)
		}
	}
	if s.paused {
		s.paused = s.control(unix.EPOLL_CTL_ADD, s.listener, unix.EPOLLIN) != nil
	}
}

// watch has the loop woken by the next such event of a connection.
func (s *HTTPServer) watch(fd int, events uint32) {
	c := &s.conns[fd]
	op := unix.EPOLL_CTL_MOD
	switch c.watched {
	case events:
		return
	case 0:
		op = unix.EPOLL_CTL_ADD
	}
	if s.control(op, fd, events) != nil {
		s.drop(fd)
		return
	}
	c.watched = events
}

func (s *HTTPServer) control(op, fd int, events uint32) error {
	if err := unix.EpollCtl(s.epoll, op, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

// rawRecv, and rawSend too, do not tell the scheduler that they enter the kernel:
// they never wait there.
func rawRecv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// rawSend says for the last answer that more comes, which is the end of the connection: it leaves
// with the answer's last packet instead of in one of its own.
func rawSend(fd int, b []byte, last bool) (int, unix.Errno) {
	flags := unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	if last {
		flags |= unix.MSG_MORE
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(flags), 0, 0)
	return int(n), errno
}
