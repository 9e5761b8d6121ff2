// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/bench"
	"natkit/internal/lab"
)

// What the scenarios send: traffic that is bounded, from the client where nothing else is said.

// send lets traffic flow while the doctor watches, from now on.
//
//go:noinline
func send(traffic ...action) action {
	return func(_ context.Context, s *faultRun) error {
		s.traffic = append(s.traffic, traffic...)
		return nil
	}
}

// sendOnly lets this flow, and no more what flowed before.
func sendOnly(traffic ...action) action {
	return func(_ context.Context, s *faultRun) error {
		s.traffic = append([]action{}, traffic...)
		return nil
	}
}

// unsend ends the traffic that was added last.
func unsend(_ context.Context, s *faultRun) error {
	s.traffic = s.traffic[:len(s.traffic)-1]
	return nil
}

// before lets traffic flow for a while before the doctor comes, or until it ends by itself.
func before(d time.Duration, traffic action) action {
	return func(ctx context.Context, s *faultRun) error {
		begun, stop := context.WithTimeout(ctx, d)
		defer stop()
		return traffic(begun, s)
	}
}

// background lets traffic flow from now on until close, so that its flows outlive
// the steps.
func background(traffic action) action {
	return func(ctx context.Context, s *faultRun) error {
		flowing, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = traffic(flowing, s) // what fails is not seen by the doctor either, who is asked
		}()
		s.closers = append(s.closers, func() { stop(); <-ended })
		return nil
	}
}

// every does something again and again, until it fails or the context ends.
func every(ctx context.Context, d time.Duration, fn func() error) error {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for {
		if err := fn(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// browse is a web server and a client that asks it a little, through the NAT: a
// network at work.
func browse(ctx context.Context, s *faultRun) error { return browseAt(200)(ctx, s) }

// browseAt is browse with so many connections a second.
func browseAt(perSecond float64) action {
	return do(serve(lab.HTTPServerOptions{}), send(requests("{url}", perSecond)))
}

// requests makes HTTP requests at a rate, each on a connection of its own, as many
// at a time as it takes.
func requests(url string, rate float64) action {
	return pages(bench.HTTPOptions{URL: url, Rate: rate, Concurrency: 500})
}

//go:noinline
func pages(o bench.HTTPOptions) action {
	return func(ctx context.Context, s *faultRun) error {
		o := o
		o.URL = s.expand(o.URL)
		o.Netns = s.lab.Node(lab.RoleClient).Handle()
		o.Requests = math.MaxInt32
		o.SocketTimeout = 2 * time.Second
		o.TolerateErrors = true
		o.Workers = 1
		_, err := bench.HTTP(ctx, o)
		return err
	}
}

// datagrams sends UDP from several sockets, each flow so many datagrams a second.
func datagrams(to string, flows int, perSecond float64) action {
	return datagramsFrom("0.0.0.0", to, flows, perSecond, 10)
}

// datagramsFrom is datagrams with a source address and a size.
//
//go:noinline
func datagramsFrom(from, to string, flows int, perSecond float64, size int) action {
	return func(ctx context.Context, s *faultRun) error {
		var socks []*net.UDPConn
		defer func() {
			for _, c := range socks {
				c.Close()
			}
		}()
		local, remote := net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.addr(from), 0)), net.UDPAddrFromAddrPort(s.addrPort(to))
		err := s.lab.Node(lab.RoleClient).Do(func() error {
			for range flows {
				c, err := net.DialUDP("udp4", local, remote)
				if err != nil {
					return err
				}
				socks = append(socks, c)
			}
			return nil
		})
		if err != nil {
			return err
		}
		text := make([]byte, size)
		return every(ctx, time.Duration(float64(time.Second)/perSecond), func() error {
			for _, c := range socks {
				// What comes back, such as an ICMP error, is none of the sender's business.
				_, _ = c.Write(text)
			}
			return nil
		})
	}
}

// spray sends one datagram to each of so many ports of an address, as a scan does, at
// most perSecond of them, and ends.
//
//go:noinline
func spray(to string, ports, perSecond int) action {
	return func(ctx context.Context, s *faultRun) error {
		var c *net.UDPConn
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			c, err = net.ListenUDP("udp4", nil)
			return err
		})
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, enough := context.WithCancel(ctx)
		defer enough()
		host, sent := s.addr(to), 0
		return every(ctx, 10*time.Millisecond, func() error {
			for range max(1, perSecond/100) {
				_, _ = c.WriteToUDPAddrPort([]byte("natkit lab"), netip.AddrPortFrom(host, uint16(10000+sent)))
				sent++
			}
			if sent >= ports {
				enough()
			}
			return nil
		})
	}
}

// packets sends what no socket would: IPv4 packets with headers of their own, so many a
// second. No packet is not sent. The kernel fills in the header's checksum.
func packets(role string, perSecond int, next func(s *faultRun, n int) []byte) action {
	return func(ctx context.Context, s *faultRun) error {
		fd, err := s.rawSocket(role)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		n, ticks := 0, min(perSecond, 50) // a second
		return every(ctx, time.Second/time.Duration(ticks), func() error {
			for range perSecond / ticks {
				if p := next(s, n); p != nil {
					// A queue that is full on the way is part of a flood.
					_ = unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:20])})
					n++
				}
			}
			return nil
		})
	}
}

// burst sends so many such packets at once.
func burst(role string, n int, next func(s *faultRun, n int) []byte) action {
	return func(_ context.Context, s *faultRun) error {
		fd, err := s.rawSocket(role)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for i := range n {
			p := next(s, i)
			if err := unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:20])}); err != nil {
				return fmt.Errorf("send packet: %w", err)
			}
		}
		return nil
	}
}

func (s *faultRun) rawSocket(role string) (fd int, err error) {
	err = s.node(role).Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("open raw socket: %w", err)
	}
	return fd, nil
}

// segment is a TCP segment without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
}

const (
	tcpSYN = 0x02
	tcpACK = 0x10
)

// packet is the segment with its IPv4 header.
func (s segment) packet() []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(b[12:], s.from.Addr().AsSlice())
	copy(b[16:], s.to.Addr().AsSlice())
	tcp := b[20:]
	binary.BigEndian.PutUint16(tcp, s.from.Port())
	binary.BigEndian.PutUint16(tcp[2:], s.to.Port())
	binary.BigEndian.PutUint32(tcp[4:], s.seq)
	binary.BigEndian.PutUint32(tcp[8:], s.ack)
	tcp[12], tcp[13] = 5<<4, s.flags
	binary.BigEndian.PutUint16(tcp[14:], 64240)
	sum := uint32(unix.IPPROTO_TCP + len(tcp)) // with the pseudo header
	for i := 12; i < 40; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return b
}

// datagram is the first fragment of a datagram, or all of it, from port 4000 to port 5353.
type datagram struct {
	from, to     netip.Addr
	ttl          byte
	id, fragment uint16
	sum          uint16 // 0: left out
	payload      []byte
}

// packet is the datagram with its IPv4 header.
func (d datagram) packet() []byte {
	const headers = 20 + 8
	p := make([]byte, headers, headers+len(d.payload))
	p[0], p[8], p[9] = 0x45, d.ttl, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(headers+len(d.payload)))
	binary.BigEndian.PutUint16(p[4:], d.id)
	binary.BigEndian.PutUint16(p[6:], d.fragment)
	copy(p[12:], d.from.AsSlice())
	copy(p[16:], d.to.AsSlice())
	binary.BigEndian.PutUint16(p[20:], 4000)
	binary.BigEndian.PutUint16(p[22:], 5353)
	binary.BigEndian.PutUint16(p[24:], uint16(8+len(d.payload)))
	binary.BigEndian.PutUint16(p[26:], d.sum)
	return append(p, d.payload...)
}

// taggedARP asks for an address, in VLAN 30.
func taggedARP(sender, target string) action {
	return func(ctx context.Context, s *faultRun) error {
		fd := -1
		var link *net.Interface
		err := s.lab.Node(lab.RoleClient).Do(func() (err error) {
			if link, err = net.InterfaceByName("eth0"); err != nil {
				return err
			}
			fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		defer unix.Close(fd)
		frame := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, link.HardwareAddr...)
		for _, word := range []uint16{unix.ETH_P_8021Q, 30, unix.ETH_P_ARP, 1, unix.ETH_P_IP, 6<<8 | 4, 1} { // Ethernet, IPv4, lengths of their addresses, request
			frame = binary.BigEndian.AppendUint16(frame, word)
		}
		frame = append(append(frame, link.HardwareAddr...), s.addr(sender).AsSlice()...)
		frame = append(append(frame, make([]byte, 6)...), s.addr(target).AsSlice()...)
		return every(ctx, 20*time.Millisecond, func() error {
			// A queue that is full takes the next one.
			_ = unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index, Halen: 6})
			return nil
		})
	}
}
