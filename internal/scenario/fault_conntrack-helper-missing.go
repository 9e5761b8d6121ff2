// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
)

var helperMissingFault = Fault{
	Code:    "conntrack-helper-missing",
	Healthy: "web traffic through the gateway, and a client that is logged in at an FTP server",
	Broken:  "the server opens the data connection to the client (active mode)",
	Cured:   "a rule assigns the FTP helper to connections to port 21",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		if err := s.ftpServer(ctx); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.ftpClient(false))
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, s.ftpClient(true))
		return nil
	},
	cure: follow("nft "),
}

// ftpServer knows nothing of FTP but PORT: it connects from port 20 to the port that it is told, at the
// address that it sees, as servers do which connect to nobody else.
func (s *faultRun) ftpServer(ctx context.Context) error {
	var l net.Listener
	server := s.lab.ServerNode()
	if err := server.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", ":21")
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
			go func() {
				defer c.Close()
				fmt.Fprint(c, "220 ready\r\n")
				lines := bufio.NewScanner(c)
				for lines.Scan() {
					to, ok := portCommand(lines.Text())
					if ok {
						peer := netip.MustParseAddrPort(c.RemoteAddr().String()).Addr()
						s.dialData(ctx, server, netip.AddrPortFrom(peer, to.Port()))
					}
					fmt.Fprint(c, "200 done\r\n")
				}
			}()
		}
	}()
	return nil
}

// portCommand reads "PORT 192,168,0,2,156,64".
func portCommand(line string) (netip.AddrPort, bool) {
	var b [6]byte
	if n, _ := fmt.Sscanf(strings.TrimSpace(line), "PORT %d,%d,%d,%d,%d,%d", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5]); n != 6 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(b[4])<<8|uint16(b[5])), true
}

// dialData opens a data connection, and closes it.
func (s *faultRun) dialData(ctx context.Context, node *lab.Node, to netip.AddrPort) {
	d := net.Dialer{Timeout: time.Second, LocalAddr: &net.TCPAddr{Port: 20}, Control: reuseAddr}
	_ = node.Do(func() error {
		c, err := d.DialContext(ctx, "tcp4", to.String())
		if err == nil {
			c.Close()
		}
		return nil // what fails is the fault
	})
}

// ftpClient is logged in, and in active mode announces a port again and again.
func (s *faultRun) ftpClient(active bool) func(context.Context) error {
	return func(ctx context.Context) error {
		client := s.lab.Node(lab.RoleClient)
		var c net.Conn
		var data net.Listener
		if err := client.Do(func() (err error) {
			d := net.Dialer{Timeout: 2 * time.Second}
			if c, err = d.DialContext(ctx, "tcp4", netip.AddrPortFrom(s.lab.ServerNode().Addr, 21).String()); err != nil {
				return err
			}
			data, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", ":0")
			return err
		}); err != nil {
			return fmt.Errorf("log in at the FTP server: %w", err)
		}
		defer c.Close()
		defer data.Close()
		ip := client.Addr.As4()
		for n := 0; ; n++ {
			if active {
				port := data.Addr().(*net.TCPAddr).Port
				_, _ = fmt.Fprintf(c, "PORT %d,%d,%d,%d,%d,%d\r\n", ip[0], ip[1], ip[2], ip[3], port>>8, port&0xff)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

func reuseAddr(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }); e != nil {
		return e
	}
	return err
}
