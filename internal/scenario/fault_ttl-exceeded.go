// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/causes"
	"natkit/internal/lab"
)

var ttlExceededFault = Fault{
	Code:    "ttl-exceeded",
	Healthy: "datagrams through the gateway, and a traceroute that has two packets a second expire there",
	Broken:  "the client sends with TTL 1: nothing of it gets past the gateway",
	Cured:   "the client sends with TTL 64",

	topology: "routed",
	healthy: func(_ context.Context, s *faultRun) error {
		to := netip.AddrPortFrom(s.lab.ServerNode().Addr, 5353)
		if err := s.swallow(s.lab.ServerNode(), to.Port()); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.datagrams(netip.Addr{}, to, 3, 50), s.probes(to))
		return nil
	},
	broken: func(_ context.Context, s *faultRun) error {
		return s.lab.Node(lab.RoleClient).Sysctl("net.ipv4.ip_default_ttl", "1")
	},
	cure: func(_ context.Context, s *faultRun, _ causes.Finding) error {
		s.commands = append(s.commands, "sysctl -w net.ipv4.ip_default_ttl=64   # on the client")
		return s.lab.Node(lab.RoleClient).Sysctl("net.ipv4.ip_default_ttl", "64")
	},
}

// probes sends what traceroute sends to find the gateway.
func (s *faultRun) probes(to netip.AddrPort) func(context.Context) error {
	return func(ctx context.Context) error {
		var c net.Conn
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				err2 := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, 1) })
				if err2 != nil {
					return err2
				}
				return err
			}}
			c, err = d.DialContext(ctx, "udp4", to.String())
			return err
		})
		if err != nil {
			return err
		}
		defer c.Close()
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			_, _ = c.Write([]byte("natkit lab")) // the ICMP error that comes back is what it asks for
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}
