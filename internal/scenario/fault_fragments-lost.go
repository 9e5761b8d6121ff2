// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/lab"
)

var fragmentsFault = Fault{
	Code:    "fragments-lost",
	Healthy: "the client sends datagrams of 4000 bytes, in three fragments each, which the gateway reassembles to translate them",
	Broken:  "the gateway has 64 KiB for waiting fragments, and a hundred first fragments whose others never arrive use it up",
	Cured:   "fragments get as much memory as the finding shows",

	topology: "routed",
	healthy: func(ctx context.Context, s *faultRun) error {
		const port = 5353
		if err := s.swallow(s.lab.ServerNode(), port); err != nil {
			return err
		}
		s.traffic = append(s.traffic, s.large(netip.AddrPortFrom(s.lab.ServerNode().Addr, port)))
		return s.browse(ctx)
	},
	broken: func(_ context.Context, s *faultRun) error {
		// The lower limit first: the kernel refuses an upper one below it. And what
		// waits must not time out before the end of the demo.
		for _, set := range [][2]string{{"low_thresh", "32768"}, {"high_thresh", "65536"}, {"time", "120"}} {
			if err := s.watched.Sysctl("net.ipv4.ipfrag_"+set[0], set[1]); err != nil {
				return err
			}
		}
		client := s.lab.Node(lab.RoleClient)
		return client.Do(func() error { return firstFragments(client.Addr, s.lab.ServerNode().Addr, 200) })
	},
	cure: follow("sysctl -w"),
}

// large sends datagrams that are larger than a packet, fifty a second.
func (s *faultRun) large(to netip.AddrPort) func(context.Context) error {
	return func(ctx context.Context) error {
		var c *net.UDPConn
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			c, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
			return err
		})
		if err != nil {
			return err
		}
		defer c.Close()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for datagram := make([]byte, 4000); ; {
			_, _ = c.Write(datagram)
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}

// firstFragments sends the beginning of so many datagrams and never their rest.
func firstFragments(from, to netip.Addr, n int) error {
	return sendRaw(to, n, func(i int) []byte {
		const moreFragments = 0x2000
		return udpPacket(from, to, uint16(i+1), moreFragments, make([]byte, 1400))
	})
}

// sendRaw sends packets with headers of their own from the thread's namespace.
func sendRaw(to netip.Addr, n int, packet func(i int) []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open raw socket: %w", err)
	}
	defer unix.Close(fd)
	for i := range n {
		if err := unix.Sendto(fd, packet(i), 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil {
			return fmt.Errorf("send packet to %s: %w", to, err)
		}
	}
	return nil
}

// udpPacket is an IPv4 packet with a datagram from port 4000 to port 5353 whose
// checksum is left out. The kernel fills in the sum of the IPv4 header.
func udpPacket(from, to netip.Addr, id, fragment uint16, payload []byte) []byte {
	const headers = 20 + 8
	p := make([]byte, headers, headers+len(payload))
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(headers+len(payload)))
	binary.BigEndian.PutUint16(p[4:], id)
	binary.BigEndian.PutUint16(p[6:], fragment)
	copy(p[12:], from.AsSlice())
	copy(p[16:], to.AsSlice())
	binary.BigEndian.PutUint16(p[20:], 4000)
	binary.BigEndian.PutUint16(p[22:], 5353)
	binary.BigEndian.PutUint16(p[24:], uint16(8+len(payload)))
	return append(p, payload...)
}
