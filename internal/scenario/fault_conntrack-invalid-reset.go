// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
)

var invalidResetFault = Fault{
	Code:    "conntrack-invalid-reset",
	Healthy: "ten connections through masquerading, and one segment a second outside its connection's window",
	Broken:  "two hundred segments a second are outside their connection's window, as after reordering or with offloads that conntrack does not follow",
	Cured:   "connection tracking accepts such segments, and the endpoints decide",
	Note:    "the segments have the server's own acknowledgement numbers and sequence numbers far ahead",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		return s.talk(ctx, 5000, 1)
	},
	broken: func(ctx context.Context, s *faultRun) error {
		s.traffic = nil
		return s.talk(ctx, 5001, 200)
	},
	cure: follow("be_liberal"),
}

// talk keeps ten connections from the client to a port of the server open, and
// sends so many segments a second from the server that lie outside of their windows.
func (s *faultRun) talk(ctx context.Context, port uint16, perSecond int) error {
	server := s.lab.ServerNode()
	outside := s.lab.Options().Addresses.Far.Addr()
	var mu sync.Mutex
	open := map[*net.TCPConn]segment{}

	var l net.Listener
	if err := server.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		return fmt.Errorf("listen in %s: %w", server.Netns, err)
	}
	s.closers = append(s.closers, func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conn := c.(*net.TCPConn)
			seq, ack, err := sequence(conn)
			if err != nil {
				c.Close()
				continue
			}
			remote := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
			mu.Lock()
			open[conn] = segment{from: netip.AddrPortFrom(server.Addr, port), to: netip.AddrPortFrom(outside, remote.Port()), seq: seq + 1<<28, ack: ack, flags: tcpACK}
			mu.Unlock()
			go func() { // until it is reset or closed
				_, _ = conn.Read(make([]byte, 1))
				mu.Lock()
				delete(open, conn)
				mu.Unlock()
				conn.Close()
			}()
		}
	}()

	hold := func(ctx context.Context) error {
		client := s.lab.Node(lab.RoleClient)
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				for ctx.Err() == nil {
					var c net.Conn
					err := client.Do(func() (err error) {
						c, err = (&net.Dialer{}).DialContext(ctx, "tcp4", netip.AddrPortFrom(server.Addr, port).String())
						return err
					})
					if err != nil {
						continue // the context has ended
					}
					// The client is not told that its connection was reset: it tries again.
					_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
					_, _ = c.Read(make([]byte, 1))
					c.Close()
				}
			})
		}
		wg.Wait()
		return nil
	}
	stray := s.segments(server, perSecond, func(int) segment {
		mu.Lock()
		defer mu.Unlock()
		for _, seg := range open {
			return seg
		}
		return segment{}
	})
	s.traffic = append(s.traffic, hold, stray)
	return nil
}

// sequence reads the numbers that a connection's next segment has.
func sequence(c *net.TCPConn) (seq, ack uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	cerr := raw.Control(func(fd uintptr) {
		read := func(queue int) (n int) {
			if err == nil {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queue)
			}
			if err == nil {
				n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
			}
			return n
		}
		if err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
			return
		}
		const receive, send, offWithoutProbe = 1, 2, -1 // TCP_RECV_QUEUE, TCP_SEND_QUEUE, TCP_REPAIR_OFF_NO_WP
		ack, seq = uint32(read(receive)), uint32(read(send))
		err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, offWithoutProbe))
	})
	return seq, ack, errors.Join(cerr, err)
}
