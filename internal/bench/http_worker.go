// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An httpWorker drives its share of the connections from one thread: an epoll
// set, one state machine for each connection, everything allocated before the
// first request. A connection goes through these states:
//
//	        begin              connected            sent
//	idle ──────────▶ connecting ────────▶ sending ────────▶ waiting
//	 ▲  └────────── (kept alive) ───────────▲                  │ response complete
//	 │                                                         │
//	 ├──────────── kept alive, or already at its end ──────────┤
//	 └───────────────────── closing ◀──────────────────────────┘
//	           until the server closes, at most lingerTime
//
// The server is left to close first. Who closes first holds the pair of ports
// for a minute (TIME_WAIT), and the client has only ip_local_port_range of them.
//
// Events are edge-triggered: one registration serves a connection for its life.
type httpWorker struct {
	run    *httpRun
	index  int
	epoll  int
	remote unix.Sockaddr // of this worker alone: x/sys keeps the raw form in it
	family int

	conns []httpConn
	idle  []int32 // connections without a request, the last one used first
	busy  int     // the others

	// Connections that wait, the one that waits longest first. All of one queue
	// wait equally long, so the queue is in order of expiry.
	answering waitQueue // for progress of the request
	closing   waitQueue // for the server to close

	begun int // requests of this worker, which with a rate are every Workers-th
	over  bool

	buffer [64 << 10]byte
	events [256]unix.EpollEvent
	tally  httpTally

	completedSoFar, failedSoFar atomic.Int64 // for progress
}

// httpConn is one connection and the request on it. Times are nanoseconds since
// the run's base.
type httpConn struct {
	fd         int32 // -1 without a socket
	generation int32 // tells events of an earlier socket
	state      connState
	reused     bool // the request is not the first on this connection
	failed     bool // the response has been counted as failed by its length

	sent       int   // bytes of the request
	intended   int64 // when the request was due; without a rate when it began
	dialled    int64
	connected  int64
	requested  int64 // when the request had been sent
	firstBytes int64 // of the response, 0 before them

	expires    int64
	next, prev int32
	queue      *waitQueue

	response response
}

type connState uint8

const (
	connIdle connState = iota
	connConnecting
	connSending
	connWaiting
	connClosing
)

const (
	// lingerTime bounds how long a connection waits for the server to close it. One
	// that means to does it along with the response.
	lingerTime = 200 * time.Millisecond
	// lateAfter is from when on a request counts as begun late.
	lateAfter = time.Millisecond
	// beginsPerRound and readsPerEvent keep one part of the loop from starving the
	// others. No fewer requests begin in a round than can end in one.
	beginsPerRound = len(httpWorker{}.events)
	readsPerEvent  = 16
)

const (
	wakeEvent  = -1 // in place of a connection's index: the run is to stop
	connEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET&math.MaxUint32
)

func newHTTPWorker(run *httpRun, index, connections int) *httpWorker {
	w := &httpWorker{
		run: run, index: index, epoll: -1,
		conns: make([]httpConn, connections),
		idle:  make([]int32, connections),
	}
	w.remote, w.family = sockaddr(run.target.addr)
	w.answering.init(w.conns)
	w.closing.init(w.conns)
	for i := range w.conns {
		w.conns[i].fd = -1
		w.idle[i] = int32(connections - 1 - i)
	}
	return w
}

func sockaddr(a netip.AddrPort) (unix.Sockaddr, int) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}, unix.AF_INET
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}, unix.AF_INET6
}

func (w *httpWorker) now() int64 { return int64(time.Since(w.run.base)) }

// work runs until no request is left, the time limit is reached or the run
// halts. It is called on a thread that belongs to it.
func (w *httpWorker) work() (err error) {
	if w.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("make epoll set: %w", err)
	}
	defer unix.Close(w.epoll)
	err = unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, w.run.wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: wakeEvent})
	if err != nil {
		return fmt.Errorf("watch eventfd: %w", err)
	}
	defer w.drop()
	start, used := w.now(), threadTime()
	defer func() {
		w.tally.wall = time.Duration(w.now() - start)
		w.tally.processor = threadTime() - used
	}()

	for !w.run.stop.Load() {
		due, err := w.begin()
		if err != nil {
			return err
		}
		if w.busy == 0 && w.over {
			return nil
		}
		now := w.now()
		if now >= w.run.limit {
			return nil
		}
		due = min(due, w.answering.first(), w.closing.first(), w.run.limit)
		n, err := w.poll(due, now)
		if err != nil {
			return err
		}
		for i := range n {
			if e := &w.events[i]; e.Fd != wakeEvent {
				w.handle(e)
			}
		}
		w.expire()
		w.completedSoFar.Store(w.tally.completed)
		w.failedSoFar.Store(w.tally.failed)
	}
	return nil
}

// poll waits for events until a time. epoll_wait's milliseconds are too coarse
// for a rate.
func (w *httpWorker) poll(until, now int64) (int, error) {
	var wait *unix.Timespec
	if until != never {
		ts := unix.NsecToTimespec(max(until-now, 0))
		wait = &ts
	}
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(w.epoll), uintptr(unsafe.Pointer(&w.events[0])),
		uintptr(len(w.events)), uintptr(unsafe.Pointer(wait)), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	default:
		return 0, fmt.Errorf("wait for events: %w", errno)
	}
}

// begin starts requests on idle connections, and returns when it wants to be
// called again: now, at the time the next request is due, or never before a
// connection becomes idle.
func (w *httpWorker) begin() (due int64, err error) {
	for range beginsPerRound {
		if len(w.idle) == 0 {
			return never, nil
		}
		intended, ok := w.next()
		if !ok {
			return intended, nil
		}
		i := w.idle[len(w.idle)-1]
		w.idle = w.idle[:len(w.idle)-1]
		w.busy++
		if err := w.request(i, intended); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// next claims a request and returns when it was to begin; not ok when there is
// none now, with the time at which there will be.
func (w *httpWorker) next() (at int64, ok bool) {
	if w.over {
		return never, false
	}
	now := w.now()
	if w.run.Rate == 0 {
		if w.run.toStart.Add(-1) < 0 {
			w.over = true
			return never, false
		}
		at = now
	} else {
		number := w.begun*w.run.Workers + w.index
		if number >= w.run.Requests {
			w.over = true
			return never, false
		}
		at = int64(float64(number) / w.run.Rate * float64(time.Second))
		if at > now {
			return at, false
		}
		if now-at > int64(lateAfter) {
			w.tally.late++
		}
	}
	w.tally.lastBegin = now
	w.begun++
	return at, true
}

// request begins a request on connection i.
func (w *httpWorker) request(i int32, intended int64) error {
	c := &w.conns[i]
	c.intended = intended
	if c.fd < 0 {
		return w.dial(i)
	}
	c.reused = true
	c.dialled = w.now()
	w.established(i, c.dialled)
	return nil
}

// dial makes a socket for connection i and begins to connect it. An error is
// one that ends the run: this machine can't make more sockets.
func (w *httpWorker) dial(i int32) error {
	c := &w.conns[i]
	fd, err := unix.Socket(w.family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	c.fd, c.reused = int32(fd), false
	c.generation++
	c.dialled = w.now()
	c.state = connConnecting
	w.await(c, i, &w.answering, int64(w.run.SocketTimeout))
	if err := unix.Connect(fd, w.remote); err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		w.fail(i, connectFailure(err), err)
		return nil
	}
	if err := w.watch(unix.EPOLL_CTL_ADD, i); err != nil {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

func (w *httpWorker) watch(op int, i int32) error {
	c := &w.conns[i]
	return unix.EpollCtl(w.epoll, op, int(c.fd), &unix.EpollEvent{Events: connEvents, Fd: i, Pad: c.generation})
}

// handle takes one event of a connection.
func (w *httpWorker) handle(e *unix.EpollEvent) {
	i := e.Fd
	c := &w.conns[i]
	// A closed socket is out of the epoll set at once, unless a process that is
	// being forked elsewhere in this one still has it open.
	if c.generation != e.Pad || c.fd < 0 {
		return
	}
	switch c.state {
	case connIdle: // kept, and at its end, or the server talks unasked
		if e.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			w.hangUp(c)
		}
	case connConnecting:
		if e.Events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			errno, err := unix.GetsockoptInt(int(c.fd), unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && errno != 0 {
				err = unix.Errno(errno)
				w.fail(i, connectFailure(err), err)
				return
			}
		}
		if e.Events&unix.EPOLLOUT != 0 {
			w.established(i, w.now())
		}
	case connSending:
		if e.Events&unix.EPOLLOUT != 0 {
			w.send(i)
		}
	}
	if (c.state == connWaiting || c.state == connSending || c.state == connClosing) && c.generation == e.Pad &&
		e.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		w.receive(i, e.Events)
	}
}

// established sends the request on a connection that is ready for it.
func (w *httpWorker) established(i int32, now int64) {
	c := &w.conns[i]
	c.connected = now
	c.state = connSending
	c.sent, c.firstBytes, c.failed = 0, 0, false
	c.response.reset()
	c.response.wantServer = w.index == 0 && w.tally.completed == 0
	w.await(c, i, &w.answering, int64(w.run.SocketTimeout))
	w.send(i)
}

func (w *httpWorker) send(i int32) {
	c := &w.conns[i]
	n, err := unix.Write(int(c.fd), w.run.target.request[c.sent:])
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return
	case err != nil:
		// The server may have answered before it hung up: what it sent is still there
		// to be read, and the end of that tells the error.
		c.requested = w.now()
		c.state = connWaiting
		w.receive(i, unix.EPOLLERR)
		return
	}
	if c.sent += n; c.sent == len(w.run.target.request) {
		c.requested = w.now()
		c.state = connWaiting
	}
}

// receive reads what has come for connection i. After a read that did not fill
// the buffer there is nothing left, so the end of the connection is known
// without another read if the event told of it.
func (w *httpWorker) receive(i int32, events uint32) {
	c := &w.conns[i]
	for range readsPerEvent {
		n, err := unix.Read(int(c.fd), w.buffer[:])
		switch {
		case err == unix.EAGAIN:
			return
		case err == unix.EINTR:
			continue
		case err != nil:
			w.broken(i, err)
			return
		case n == 0:
			w.ended(i)
			return
		}
		w.tally.bytes += int64(n)
		if !w.take(i, w.buffer[:n]) {
			return
		}
		if n < len(w.buffer) && events&unix.EPOLLERR == 0 {
			if events&unix.EPOLLRDHUP != 0 {
				w.ended(i)
			}
			return
		}
	}
	// More is there. To be told again, and not before others had their turn, the
	// edge is armed again.
	if err := w.watch(unix.EPOLL_CTL_MOD, i); err != nil {
		w.broken(i, err)
	}
}

// take feeds a piece of the response to connection i. It returns false when the
// connection has no more use for what follows.
func (w *httpWorker) take(i int32, piece []byte) bool {
	c := &w.conns[i]
	now := w.now()
	switch c.state {
	case connIdle: // kept, and the server talks unasked
		w.hangUp(c)
		return false
	case connClosing:
		w.overrun(i, len(piece))
		return false
	}
	if c.firstBytes == 0 {
		c.firstBytes = now
	}
	used, err := c.response.feed(piece)
	if err != nil {
		w.fail(i, responseFailure(err), err)
		return false
	}
	if c.response.inBody() {
		w.await(c, i, &w.answering, int64(w.run.SocketTimeout))
	}
	if !c.response.done() {
		return true
	}
	w.complete(i, now, nil)
	if used < len(piece) {
		w.overrun(i, len(piece)-used)
		return false
	}
	switch {
	case w.run.KeepAlive && c.response.persistent() && c.sent == len(w.run.target.request):
		w.tally.kept++
		w.settle(i)
	case !w.run.KeepAlive && c.response.saysKeepAlive && !c.response.saysClose:
		w.tally.leftOpen++ // it says that it won't close
		w.release(i)
		return false
	default:
		c.state = connClosing
		w.await(c, i, &w.closing, int64(lingerTime))
	}
	return true
}

// ended: the server closed connection i.
func (w *httpWorker) ended(i int32) {
	c := &w.conns[i]
	switch {
	case c.state == connIdle:
		w.hangUp(c)
		return
	case c.state == connClosing:
		w.release(i)
		return
	case w.retry(i):
		return
	}
	err := c.response.endOfInput()
	if errors.Is(err, errNoResponse) {
		w.fail(i, failClosedEarly, err)
		return
	}
	w.complete(i, w.now(), err)
	w.release(i)
}

// broken: reading from connection i gave an error.
func (w *httpWorker) broken(i int32, err error) {
	c := &w.conns[i]
	switch {
	case c.state == connIdle:
		w.hangUp(c)
	case c.state == connClosing:
		w.release(i)
	case w.retry(i):
	default:
		w.fail(i, receiveFailure(err), err)
	}
}

// retry makes the request of connection i again on a new connection if the
// server closed a kept one before it saw the request, which is its right.
func (w *httpWorker) retry(i int32) bool {
	c := &w.conns[i]
	if !c.reused || c.firstBytes != 0 {
		return false
	}
	w.hangUp(c)
	if err := w.dial(i); err != nil {
		w.run.halt(err)
	}
	return true
}

// complete counts the response on connection i, which has ended: as its length
// says, or short of it.
func (w *httpWorker) complete(i int32, now int64, short error) {
	c := &w.conns[i]
	t := &w.tally
	t.completed++
	t.lastEnd = now
	t.body += c.response.body
	if c.response.status/100 != 2 {
		t.non2xx++
	}
	if c.response.server != "" {
		t.server = c.response.server
	}
	t.connect.add(time.Duration(c.connected - c.dialled))
	t.processing.add(time.Duration(now - c.connected))
	t.waiting.add(time.Duration(c.firstBytes - c.requested))
	t.total.add(time.Duration(now - c.intended))

	switch first := w.run.docBytes.Load(); {
	case short != nil:
		w.wrongLength(c, failShortBody)
	case first < 0 && w.run.docBytes.CompareAndSwap(-1, c.response.body):
	case c.response.body != w.run.docBytes.Load():
		w.wrongLength(c, failLengthDiffers)
	}
}

// overrun: n bytes came after the end of the response on connection i.
func (w *httpWorker) overrun(i int32, n int) {
	c := &w.conns[i]
	w.tally.body += int64(n)
	w.wrongLength(c, failLongBody)
	w.release(i)
}

// wrongLength counts a complete response as failed, once.
func (w *httpWorker) wrongLength(c *httpConn, kind failure) {
	if !c.failed {
		c.failed = true
		w.tally.count(kind)
	}
}

// fail ends the request on connection i without a response.
func (w *httpWorker) fail(i int32, kind failure, err error) {
	w.tally.count(kind)
	w.tally.lastEnd = w.now()
	w.release(i)
	if kind.ofSocket() && !w.run.TolerateErrors {
		w.run.halt(fmt.Errorf("%s %s: %w", kind.verb(), w.run.target.addr, err))
	}
}

var errTimeout = errors.New("the socket time-out has passed")

// expire ends what has waited too long.
func (w *httpWorker) expire() {
	if min(w.answering.first(), w.closing.first()) == never {
		return
	}
	now := w.now()
	for w.answering.first() <= now {
		i := w.answering.head
		if w.conns[i].state == connConnecting {
			w.fail(i, failConnectTimeout, errTimeout)
		} else {
			w.fail(i, failAnswerTimeout, errTimeout)
		}
	}
	for w.closing.first() <= now {
		w.tally.leftOpen++
		w.release(w.closing.head)
	}
}

// settle makes connection i idle and leaves it open.
func (w *httpWorker) settle(i int32) {
	c := &w.conns[i]
	w.leave(c)
	c.state = connIdle
	w.idle = append(w.idle, i)
	w.busy--
}

// release closes connection i and makes it idle.
func (w *httpWorker) release(i int32) {
	w.hangUp(&w.conns[i])
	w.settle(i)
}

func (w *httpWorker) hangUp(c *httpConn) {
	unix.Close(int(c.fd)) // which takes it out of the epoll set, too
	c.fd = -1
}

// drop closes what is still open at the end of the run.
func (w *httpWorker) drop() {
	w.tally.begun = w.begun
	for i := range w.conns {
		if c := &w.conns[i]; c.fd >= 0 {
			if c.state == connConnecting || c.state == connSending || c.state == connWaiting {
				w.tally.unfinished++
			}
			w.hangUp(c)
		}
	}
}

// await puts connection i at the end of a queue.
func (w *httpWorker) await(c *httpConn, i int32, q *waitQueue, wait int64) {
	w.leave(c)
	c.queue = q
	c.expires = w.now() + wait
	q.append(i)
}

func (w *httpWorker) leave(c *httpConn) {
	if c.queue != nil {
		c.queue.remove(c)
		c.queue = nil
	}
}

// waitQueue is a list of connections that wait equally long.
type waitQueue struct {
	conns      []httpConn
	head, tail int32 // -1 when empty
}

func (q *waitQueue) init(conns []httpConn) { q.conns, q.head, q.tail = conns, -1, -1 }

// first is when the first connection of the queue has waited long enough.
func (q *waitQueue) first() int64 {
	if q.head < 0 {
		return never
	}
	return q.conns[q.head].expires
}

func (q *waitQueue) append(i int32) {
	c := &q.conns[i]
	c.next, c.prev = -1, q.tail
	if q.tail < 0 {
		q.head = i
	} else {
		q.conns[q.tail].next = i
	}
	q.tail = i
}

func (q *waitQueue) remove(c *httpConn) {
	if c.prev < 0 {
		q.head = c.next
	} else {
		q.conns[c.prev].next = c.next
	}
	if c.next < 0 {
		q.tail = c.prev
	} else {
		q.conns[c.next].prev = c.prev
	}
}

// threadTime is the processor time that the calling thread has used.
func threadTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_THREAD, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
