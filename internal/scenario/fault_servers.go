// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
)

// What runs in the scenarios: servers that live until close, and clients that need one of
// them in particular.

// serve answers HTTP behind the NAT, where the lab's URL leads.
func serve(o lab.HTTPServerOptions) action { return serveAt(lab.RoleServer, ":80", o) }

// serveAt answers HTTP at an address of a node.
//
//go:noinline
func serveAt(role, addr string, o lab.HTTPServerOptions) action {
	return func(ctx context.Context, s *faultRun) error {
		server, err := s.node(role).ServeHTTP(ctx, addr, o)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, func() { server.Close() })
		return nil
	}
}

func (s *faultRun) listenUDP(role string, at netip.AddrPort) (c *net.UDPConn, err error) {
	node := s.node(role)
	err = node.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	s.closers = append(s.closers, func() { c.Close() })
	return c, nil
}

// answer takes datagrams at an address of a node, and replies with what reply makes of them, from
// another address if that is not the same. Nothing is replied to with nil.
func answer(role, at, from string, reply func(b []byte, send func([]byte))) action {
	return func(_ context.Context, s *faultRun) error {
		in, err := s.listenUDP(role, s.addrPort(at))
		if err != nil {
			return err
		}
		out := in
		if from != at {
			if out, err = s.listenUDP(role, s.addrPort(from)); err != nil {
				return err
			}
		}
		go func() {
			buf := make([]byte, 2048)
			for {
				n, client, err := in.ReadFromUDPAddrPort(buf)
				if err != nil {
					return
				}
				if reply != nil {
					reply(buf[:n], func(b []byte) { _, _ = out.WriteToUDPAddrPort(b, client) })
				}
			}
		}()
		return nil
	}
}

func anyAt(port uint16) string { return fmt.Sprintf("0.0.0.0:%d", port) }

// swallow takes datagrams and never replies.
func swallow(role string, port uint16) action { return answer(role, anyAt(port), anyAt(port), nil) }

// echo answers datagrams with themselves.
func echo(role string, port uint16) action { return echoFrom(role, anyAt(port), anyAt(port)) }

// echoFrom is echo at one address and from another.
func echoFrom(role, at, from string) action {
	return answer(role, at, from, func(b []byte, send func([]byte)) { send(b) })
}

// lateEcho is echo after a while.
func lateEcho(role string, port uint16, after time.Duration) action {
	return answer(role, anyAt(port), anyAt(port), func(b []byte, send func([]byte)) {
		b = bytes.Clone(b)
		time.AfterFunc(after, func() { send(b) })
	})
}

// deaf opens a socket for datagrams and reads none.
func deaf(role string, port uint16) action {
	return func(_ context.Context, s *faultRun) error {
		c, err := s.listenUDP(role, s.addrPort(anyAt(port)))
		if err != nil {
			return err
		}
		return c.SetReadBuffer(1)
	}
}

// accepting hands each connection to a port of a node to handle, one after the other. What
// end does is done behind the last.
func (s *faultRun) accepting(ctx context.Context, role string, port uint16, handle func(c *net.TCPConn), end func()) error {
	var l net.Listener
	node := s.node(role)
	if err := node.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", anyAt(port))
		return err
	}); err != nil {
		return fmt.Errorf("listen in %s: %w", node.Netns, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer end()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			handle(c.(*net.TCPConn))
		}
	}()
	s.closers = append(s.closers, func() { l.Close(); <-ended })
	return nil
}

// dial opens a connection from a node.
func (s *faultRun) dial(ctx context.Context, d net.Dialer, role, to string) (c net.Conn, err error) {
	err = s.node(role).Do(func() (err error) {
		c, err = d.DialContext(ctx, "tcp4", s.expand(to))
		return err
	})
	return c, err
}

// accept takes connections to a port of a node, and keeps them.
func accept(role string, port uint16) action {
	return func(ctx context.Context, s *faultRun) error {
		var held []net.Conn
		return s.accepting(ctx, role, port, func(c *net.TCPConn) { held = append(held, c) }, func() {
			for _, c := range held {
				c.Close()
			}
		})
	}
}

// connect opens so many connections from a node, and keeps them.
func connect(role, to string, connections int) action {
	return func(ctx context.Context, s *faultRun) error {
		for n := range connections {
			c, err := s.dial(ctx, net.Dialer{}, role, to)
			if err != nil {
				return fmt.Errorf("open connection %d: %w", n+1, err)
			}
			s.closers = append(s.closers, func() { c.Close() })
		}
		return nil
	}
}

// connectToTheLast opens connections until there is no port for another.
func connectToTheLast(role, to string, most int) action {
	return func(ctx context.Context, s *faultRun) error {
		err := connect(role, to, most)(ctx, s)
		switch {
		case err == nil:
			return errors.New("the local ports did not run out")
		case errors.Is(err, unix.EADDRNOTAVAIL):
			return nil
		}
		return err
	}
}

// listenEvents opens a socket in the watched namespace that gets the events of
// connection tracking, and reads them or not.
func listenEvents(buffer int, reads bool) action {
	return func(_ context.Context, s *faultRun) error {
		fd := -1
		err := s.watched.Do(func() (err error) {
			if fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER); err != nil {
				return err
			}
			listener := os.NewFile(uintptr(fd), "events")
			s.closers = append(s.closers, func() { listener.Close() })
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
				return err
			}
			if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 | 2 | 4}); err != nil { // new, update, destroy
				return err
			}
			if reads {
				go func() {
					buf := make([]byte, 64<<10)
					for err := error(nil); !errors.Is(err, os.ErrClosed); {
						_, err = listener.Read(buf)
					}
				}()
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("listen to events in %s: %w", s.watched.Netns, err)
		}
		return nil
	}
}

// slowReplies is a server that answers each connection after a while, and a client that
// opens one every twenty milliseconds, already before the doctor comes.
func slowReplies(port uint16, after time.Duration) action {
	ask := func(ctx context.Context, s *faultRun) error {
		var wg sync.WaitGroup
		defer wg.Wait()
		return every(ctx, 20*time.Millisecond, func() error {
			c, err := s.dial(ctx, net.Dialer{Timeout: time.Second}, lab.RoleClient, fmt.Sprintf("{server}:%d", port))
			if err != nil {
				return nil // some are lost, that is the fault
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetReadDeadline(time.Now().Add(2 * after))
				_, _ = c.Read(make([]byte, 16))
			})
			return nil
		})
	}
	return do(func(ctx context.Context, s *faultRun) error {
		return s.accepting(ctx, lab.RoleServer, port, func(c *net.TCPConn) {
			time.AfterFunc(after, func() {
				_, _ = c.Write([]byte("natkit lab"))
				c.Close()
			})
		}, func() {})
	}, background(ask), wait(after)) // the first answers are due when the doctor comes
}

// ftpServer knows nothing of FTP but PORT: it connects from port 20 to the port that it is told, at the
// address that it sees, as servers do which connect to nobody else.
func ftpServer(ctx context.Context, s *faultRun) error {
	// Connections for data all come from one port.
	data := net.Dialer{Timeout: time.Second, LocalAddr: &net.TCPAddr{Port: 20}, Control: func(_, _ string, c syscall.RawConn) (err error) {
		refused := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
		return errors.Join(refused, err)
	}}
	return s.accepting(ctx, lab.RoleServer, 21, func(c *net.TCPConn) {
		go func() {
			defer c.Close()
			fmt.Fprint(c, "220 ready\r\n")
			lines := bufio.NewScanner(c)
			for lines.Scan() {
				if port, ok := portCommand(lines.Text()); ok {
					peer := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
					if d, err := s.dial(ctx, data, lab.RoleServer, netip.AddrPortFrom(peer, port).String()); err == nil { // what fails is the fault
						d.Close()
					}
				}
				fmt.Fprint(c, "200 done\r\n")
			}
		}()
	}, func() {})
}

// portCommand reads the port of "PORT 192,168,0,2,156,64".
func portCommand(line string) (uint16, bool) {
	var b [6]byte
	n, _ := fmt.Sscanf(strings.TrimSpace(line), "PORT %d,%d,%d,%d,%d,%d", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5])
	return uint16(b[4])<<8 | uint16(b[5]), n == 6
}

// ftpClient is logged in, and in active mode announces a port again and again.
func ftpClient(active bool) action {
	return func(ctx context.Context, s *faultRun) error {
		c, err := s.dial(ctx, net.Dialer{Timeout: 2 * time.Second}, lab.RoleClient, "{server}:21")
		if err != nil {
			return fmt.Errorf("log in at the FTP server: %w", err)
		}
		defer c.Close()
		var data net.Listener
		if err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			data, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", ":0")
			return err
		}); err != nil {
			return fmt.Errorf("listen for data: %w", err)
		}
		defer data.Close()
		ip, port := s.addr("{client}").As4(), data.Addr().(*net.TCPAddr).Port
		return every(ctx, 100*time.Millisecond, func() error {
			if active {
				_, _ = fmt.Fprintf(c, "PORT %d,%d,%d,%d,%d,%d\r\n", ip[0], ip[1], ip[2], ip[3], port>>8, port&0xff)
			}
			return nil
		})
	}
}

// outOfWindow keeps ten connections from the client to a port of the server open, and
// sends so many segments a second from the server that lie outside of their windows.
func outOfWindow(port uint16, perSecond int) action {
	var mu sync.Mutex
	open := map[*net.TCPConn]segment{} // and the next that is sent for each
	hold := func(c *net.TCPConn, next segment) {
		mu.Lock()
		open[c] = next
		mu.Unlock()
		_, _ = c.Read(make([]byte, 1)) // until it is reset or closed
		mu.Lock()
		delete(open, c)
		mu.Unlock()
		c.Close()
	}
	listen := func(ctx context.Context, s *faultRun) error {
		return s.accepting(ctx, lab.RoleServer, port, func(c *net.TCPConn) {
			seq, ack, err := sequence(c)
			if err != nil {
				c.Close()
				return
			}
			remote := c.RemoteAddr().(*net.TCPAddr).AddrPort()
			go hold(c, segment{from: netip.AddrPortFrom(s.addr("{server}"), port), to: netip.AddrPortFrom(s.addr("{far}"), remote.Port()), seq: seq + 1<<28, ack: ack, flags: tcpACK})
		}, func() {})
	}
	stray := packets(lab.RoleServer, perSecond, func(*faultRun, int) []byte {
		mu.Lock()
		defer mu.Unlock()
		for _, seg := range open {
			return seg.packet()
		}
		return nil
	})
	return do(listen, send(stayConnected(port, 10), stray))
}

// stayConnected has so many connections from the client to a port of the server.
func stayConnected(port uint16, connections int) action {
	return func(ctx context.Context, s *faultRun) error {
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() {
				for ctx.Err() == nil {
					c, err := s.dial(ctx, net.Dialer{}, lab.RoleClient, fmt.Sprintf("{server}:%d", port))
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
