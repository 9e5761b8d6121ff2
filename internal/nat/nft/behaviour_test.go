// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// A router between two ends, to which everything is routed. They do not have the
// addresses and do not route, so their kernels answer nothing.
//
//	inside ── i0 ── eth1 ── router ── eth0 ── o0 ── outside
//	10/8, 192.168/16        203.0.113.1             everything else
type bench struct {
	inside, router, outside *host
}

// host is an end: sends packets as they are given, sees those that arrive for it.
type host struct {
	ns      *netns.Handle
	send    int
	receive int
}

const (
	routerInside  = "10.255.255.254"
	routerOutside = "203.0.113.1"
	endInside     = "10.255.255.253"
	endOutside    = "203.0.113.2"
)

func newBench(t *testing.T) *bench {
	t.Helper()
	in, router, out := namespace(t), namespace(t), namespace(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(router.Do(func() error {
		for _, v := range []struct {
			here, there string
			ns          *netns.Handle
		}{{"eth1", "i0", in}, {"eth0", "o0", out}} {
			if err := netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: netlink.LinkAttrs{Name: v.here}, PeerName: v.there, PeerNamespace: netlink.NsFd(v.ns.Fd()),
			}); err != nil {
				return err
			}
		}
		return errors.Join(
			address("eth1", routerInside+"/32"), address("eth0", routerOutside+"/32"),
			route("eth1", endInside+"/32"), route("eth0", endOutside+"/32"), via("eth0", "0.0.0.0/0", endOutside),
			via("eth1", "10.0.0.0/8", endInside), via("eth1", "192.168.0.0/16", endInside), via("eth1", "172.31.0.0/24", endInside),
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
		)
	}))
	end := func(ns *netns.Handle, link, own, router string) *host {
		h := &host{ns: ns}
		must(ns.Do(func() (err error) {
			if err := errors.Join(address(link, own+"/32"), route(link, router+"/32"), via(link, "0.0.0.0/0", router)); err != nil {
				return err
			}
			h.send, h.receive, err = ends(link)
			return err
		}))
		t.Cleanup(func() { unix.Close(h.send); unix.Close(h.receive) })
		return h
	}
	b := &bench{
		inside:  end(in, "i0", endInside, routerInside),
		outside: end(out, "o0", endOutside, routerOutside),
	}
	b.router = &host{ns: router, receive: -1}
	must(router.Do(func() (err error) {
		b.router.send, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}))
	t.Cleanup(func() { unix.Close(b.router.send) })
	return b
}

func network(s string) *net.IPNet {
	_, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return n
}

func address(link, a string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	ip, n, err := net.ParseCIDR(a)
	if err != nil {
		return err
	}
	n.IP = ip
	return errors.Join(netlink.LinkSetUp(l), netlink.AddrAdd(l, &netlink.Addr{IPNet: n}))
}

func route(link, dst string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: network(dst), Scope: unix.RT_SCOPE_LINK})
}

func via(link, dst, gateway string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: network(dst), Gw: net.ParseIP(gateway)})
}

// ends opens a socket that sends whole packets and one that sees what arrives.
func ends(link string) (send, receive int, err error) {
	l, err := net.InterfaceByName(link)
	if err != nil {
		return 0, 0, err
	}
	if send, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
		return 0, 0, err
	}
	const ipv4 = unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8 // in network order
	if receive, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, ipv4); err != nil {
		return 0, 0, err
	}
	return send, receive, errors.Join(
		unix.Bind(receive, &unix.SockaddrLinklayer{Protocol: ipv4, Ifindex: l.Index}),
		unix.SetsockoptTimeval(receive, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2}))
}

// packet is what of a packet a NAT looks at, as "udp 10.0.0.1:1000 > 198.51.100.9:53".
// Of ICMP, an echo request or its reply, both ports are the identifier; other
// protocols are a number and have none. A plus behind tcp is a SYN that answers one.
type packet struct {
	protocol string
	src, dst netip.AddrPort
}

func parsePacket(s string) packet {
	f := strings.Fields(s)
	end := func(s string) netip.AddrPort {
		if p, err := netip.ParseAddrPort(s); err == nil {
			return p
		}
		return netip.AddrPortFrom(addr(s), 0)
	}
	return packet{f[0], end(f[1]), end(f[3])}
}

func (p packet) String() string {
	return fmt.Sprintf("%s %s > %s", p.protocol, p.src, p.dst)
}

// answer is what the receiver sends back.
func (p packet) answer() packet {
	p.src, p.dst = p.dst, p.src
	switch p.protocol {
	case "tcp", "icmp":
		p.protocol += "+"
	}
	return p
}

func (p packet) bytes() []byte {
	ip := pktbuild.IPv4{Src: p.src.Addr(), Dst: p.dst.Addr(), TTL: 64}
	switch p.protocol {
	case "udp":
		ip.Payload = pktbuild.UDP{Src: p.src.Port(), Dst: p.dst.Port(), Data: []byte("natkit")}
	case "tcp":
		ip.Payload = pktbuild.TCP{Src: p.src.Port(), Dst: p.dst.Port(), Flags: pktbuild.SYN, Seq: 1, Window: 1000}
	case "tcp+":
		ip.Payload = pktbuild.TCP{Src: p.src.Port(), Dst: p.dst.Port(), Flags: pktbuild.SYN | pktbuild.ACK, Seq: 9, Ack: 2, Window: 1000}
	case "icmp":
		ip.Payload = pktbuild.Echo(8, p.src.Port(), 1, nil)
	case "icmp+":
		ip.Payload = pktbuild.Echo(0, p.src.Port(), 1, nil)
	default:
		number, err := strconv.ParseUint(p.protocol, 10, 8)
		if err != nil {
			panic(err)
		}
		ip.Protocol, ip.Payload = uint8(number), pktbuild.Bytes("natkit natkit")
	}
	return ip.Bytes()
}

// parse reads a packet that arrived, whose checksums have to be right: it must be the
// one that would be built of what is read.
func parse(b []byte) (packet, error) {
	ap := func(a []byte, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(a)), port)
	}
	if len(b) < 28 || b[0] != 0x45 {
		return packet{}, fmt.Errorf("%x", b)
	}
	l4 := b[20:]
	sport, dport := binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	p := packet{protocol: strconv.Itoa(int(b[9]))}
	switch b[9] {
	case pktbuild.UDPProtocol:
		p.protocol = "udp"
	case pktbuild.TCPProtocol:
		p.protocol = "tcp"
		if l4[13]&pktbuild.ACK != 0 {
			p.protocol = "tcp+"
		}
	case pktbuild.ICMPProtocol:
		p.protocol = "icmp"
		sport = binary.BigEndian.Uint16(l4[4:])
		dport = sport
		if l4[0] == 0 {
			p.protocol = "icmp+"
		}
	default:
		sport, dport = 0, 0
	}
	p.src, p.dst = ap(b[12:16], sport), ap(b[16:20], dport)
	built := p.bytes()
	// The identification is the sending kernel's, the time to live one less.
	copy(built[4:12], b[4:12])
	if len(b) < len(built) || string(b[20:len(built)]) != string(built[20:]) {
		return p, fmt.Errorf("%s arrived as %x, should be %x", p, b, built)
	}
	return p, nil
}

func (h *host) sends(t *testing.T, p packet) {
	t.Helper()
	if err := unix.Sendto(h.send, p.bytes(), 0, &unix.SockaddrInet4{Addr: p.dst.Addr().As4()}); err != nil {
		t.Fatalf("send %s: %v", p, err)
	}
}

// arrives gives the next packet that comes in, "" if none does.
func (h *host) arrives(t *testing.T, flags int) string {
	t.Helper()
	b := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(h.receive, b, flags)
		if err == unix.EAGAIN {
			return ""
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if text := errorText(b[:n]); text != "" {
			return text
		}
		p, err := parse(b[:n])
		if err != nil {
			t.Error(err)
		}
		if p.protocol == "icmp" && b[20] != 8 {
			continue // an error of a kernel about what was sent
		}
		return p.String()
	}
}

// errorCode is that of the ICMP errors that tests send, of type 3: no kernel sends it.
const errorCode = 10

// errorText is such an error, with what it is about; "" of other packets.
func errorText(b []byte) string {
	if len(b) < 48 || b[0] != 0x45 || b[9] != pktbuild.ICMPProtocol || b[20] != 3 || b[21] != errorCode {
		return ""
	}
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte(b[i : i+4])) }
	return fmt.Sprintf("error %s > %s about %s > %s, checksum %x: %x", at(12), at(16), at(40), at(44), b[22:24], b[28:])
}

// marker passes the router, whatever its rules are.
var marker = packet{"254", netip.MustParseAddrPort("172.31.0.1:0"), netip.MustParseAddrPort("172.31.1.1:0")}

// crossing is a packet, where it comes out and as what; and that its answer comes back
// as the answer to what was sent.
type crossing struct {
	from string // in, out, gw
	sent string
	to   string // in, out; "" nowhere
	seen string // a port of * is whatever it is
}

func TestBehaviour(t *testing.T) {
	links := []crossing{
		{"in", "udp 10.0.0.1:5000 > 198.51.100.9:53", "out", "udp 100.64.0.3:5000 > 198.51.100.9:53"},
		{"in", "udp 10.0.5.5:5000 > 198.51.100.9:53", "out", "udp 100.64.0.2:5000 > 198.51.100.9:53"},
		{"in", "udp 10.5.5.5:5000 > 198.51.100.9:53", "out", "udp 100.64.0.1:5000 > 198.51.100.9:53"},
		{"in", "udp 192.168.0.1:5000 > 198.51.100.9:53", "out", "udp 203.0.113.1:5000 > 198.51.100.9:53"},
		{"in", "udp 10.6.0.7:5000 > 198.51.100.9:53", "out", "udp 100.64.6.7:5000 > 198.51.100.9:53"},
		{"out", "tcp 198.51.100.9:4000 > 100.64.9.1:80", "in", "tcp 198.51.100.9:4000 > 10.0.0.9:80"},
		{"out", "tcp 198.51.100.9:4000 > 100.64.9.1:81", "in", "tcp 198.51.100.9:4000 > 10.0.0.8:81"},
		{"out", "tcp 198.51.100.9:4000 > 100.64.6.7:81", "in", "tcp 198.51.100.9:4000 > 10.6.0.7:81"},
		{"in", "udp 192.168.0.2:5000 > 100.64.6.7:53", "in", "udp 100.64.6.7:* > 10.6.0.7:53"}, // hairpin by a map bound to its interfaces
		{"in", "tcp 10.0.0.1:4000 > 100.64.9.1:80", "in", "tcp 100.64.0.3:4000 > 10.0.0.8:80"},
		{"in", "tcp 10.7.0.1:4000 > 100.64.9.1:80", "in", "tcp 100.64.0.1:4000 > 10.0.0.8:80"},
		{"in", "tcp 192.168.0.1:4001 > 100.64.9.1:80", "in", "tcp 100.64.9.1:4001 > 10.0.0.8:80"},
	}
	for _, test := range []struct {
		file      string
		crossings []crossing
	}{
		{"links", links},
		{"links-of-two", links},
		{"masquerade", []crossing{
			{"in", "udp 192.168.1.1:5000 > 198.51.100.9:53", "out", "udp 203.0.113.1:5000 > 198.51.100.9:53"},
			{"in", "tcp 192.168.1.1:5000 > 198.51.100.9:80", "out", "tcp 203.0.113.1:5000 > 198.51.100.9:80"},
			{"in", "icmp 192.168.1.1:77 > 198.51.100.9:77", "out", "icmp 203.0.113.1:77 > 198.51.100.9:77"},
			{"in", "99 192.168.1.1 > 198.51.100.9", "out", "99 203.0.113.1:0 > 198.51.100.9:0"},
			{"in", "udp 10.0.0.1:5000 > 198.51.100.9:53", "out", "udp 10.0.0.1:5000 > 198.51.100.9:53"},
		}},
		{"source", []crossing{
			{"in", "udp 192.168.1.1:25000 > 198.51.100.9:53", "out", "udp 203.0.113.1:25000 > 198.51.100.9:53"},
			{"in", "udp 192.168.7.9:5000 > 198.51.100.9:53", "out", "udp 100.100.100.100:5000 > 198.51.100.9:53"},
			{"in", "udp 192.168.8.1:1500 > 198.51.100.9:53", "out", "udp 100.100.100.101:1500 > 198.51.100.9:53"},
			{"in", "tcp 192.168.0.9:5000 > 198.51.100.9:80", "out", "tcp 100.100.100.102:5000 > 198.51.100.9:80"},
			{"in", "tcp 10.1.0.77:5000 > 198.51.100.9:80", "out", "tcp 100.64.1.77:5000 > 198.51.100.9:80"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.1.77:22", "in", "tcp 198.51.100.9:4000 > 10.1.0.77:22"},
			{"out", "99 198.51.100.9 > 100.100.100.102", "in", "99 198.51.100.9:0 > 192.168.0.9:0"},
			{"out", "icmp 198.51.100.9:3 > 100.100.100.102:3", "in", "icmp 198.51.100.9:3 > 192.168.0.9:3"},
			{"out", "udp 198.51.100.9:4000 > 100.64.0.3:22", "", ""}, // an address of a pool
			{"out", "udp 198.51.100.9:4000 > 100.100.100.100:22", "", ""},
			{"in", "udp 192.168.1.1:4000 > 100.100.100.102:22", "in", "udp 100.100.100.102:* > 192.168.0.9:22"},
			{"in", "udp 192.168.7.9:4000 > 100.64.1.8:22", "in", "udp 100.100.100.100:4000 > 10.1.0.8:22"},
			{"in", "udp 10.1.0.9:4000 > 100.64.1.8:22", "in", "udp 100.64.1.9:4000 > 10.1.0.8:22"},
		}},
		{"destination", []crossing{
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:80", "in", "tcp 198.51.100.9:4000 > 10.0.0.1:8080"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:443", "in", "tcp 198.51.100.9:4000 > 10.0.0.1:443"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:8000", "in", "tcp 198.51.100.9:4000 > 10.0.0.2:8000"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:8005", "in", "tcp 198.51.100.9:4000 > 10.0.0.3:9005"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:8009", "in", "tcp 198.51.100.9:4000 > 10.0.0.2:8009"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:8010", "in", "tcp 198.51.100.9:4000 > 10.0.0.5:8010"},
			{"out", "udp 198.51.100.9:4000 > 100.64.0.1:80", "in", "udp 198.51.100.9:4000 > 10.0.0.4:80"},
			{"out", "icmp 198.51.100.9:4 > 100.64.0.1:4", "in", "icmp 198.51.100.9:4 > 10.0.0.5:4"},
			{"out", "99 198.51.100.9 > 100.64.0.1", "in", "99 198.51.100.9:0 > 10.0.0.5:0"},
			{"out", "udp 198.51.100.9:4000 > 100.64.0.17:80", "in", "udp 198.51.100.9:4000 > 10.2.0.17:80"},
			{"out", "udp 198.51.100.9:4000 > 100.64.0.33:80", "in", "udp 198.51.100.9:4000 > 10.1.0.33:80"},
			{"gw", "tcp 203.0.113.1:4000 > 100.64.0.1:80", "in", "tcp 203.0.113.1:4000 > 10.0.0.1:8080"},
		}},
		{"balance", []crossing{
			{"out", "tcp 198.51.100.1:4000 > 100.64.0.1:80", "in", "tcp 198.51.100.1:4000 > *"},
			{"out", "tcp 198.51.100.2:4000 > 100.64.0.2:8001", "in", "tcp 198.51.100.2:4000 > 10.0.0.*001"},
			{"in", "tcp 192.168.0.1:4000 > 100.64.0.1:80", "in", "tcp 100.64.0.1:4000 > *"}, // seen as the address it asked for
		}},
		{"exclude", []crossing{
			{"in", "udp 10.1.0.1:5000 > 198.51.100.9:53", "out", "udp 203.0.113.1:5000 > 198.51.100.9:53"},
			{"in", "udp 10.8.3.1:5000 > 198.51.100.9:5555", "out", "udp 10.8.3.1:5000 > 198.51.100.9:5555"},
			{"in", "udp 10.8.3.1:5000 > 198.51.100.9:6000", "out", "udp 203.0.113.1:5000 > 198.51.100.9:6000"},
			{"in", "tcp 10.8.3.1:5000 > 198.51.100.9:5555", "out", "tcp 203.0.113.1:5000 > 198.51.100.9:5555"},
		}},
		{"pool-names", []crossing{
			{"in", "udp 10.2.0.1:5000 > 198.51.100.9:53", "out", "udp 100.64.0.24:5000 > 198.51.100.9:53"},
		}},
		{"stateless-beside", []crossing{
			{"in", "udp 10.1.0.7:5000 > 198.51.100.9:53", "out", "udp 100.64.1.7:5000 > 198.51.100.9:53"},
			{"in", "udp 10.1.0.65:5000 > 198.51.100.9:53", "out", "udp 100.64.3.1:5000 > 198.51.100.9:53"},
			{"in", "udp 10.2.0.1:5000 > 198.51.100.9:53", "out", "udp 100.64.2.1:5000 > 198.51.100.9:53"},
			{"in", "udp 10.4.0.7:5000 > 198.51.100.9:53", "out", "udp 100.70.4.7:5000 > 198.51.100.9:53"},
			{"in", "udp 10.3.0.7:5000 > 198.51.100.9:53", "out", "udp 100.70.0.7:5000 > 198.51.100.9:53"},
			{"out", "tcp 198.51.100.9:4001 > 100.64.1.255:80", "in", "tcp 198.51.100.9:4001 > 10.1.0.255:80"},
			{"out", "tcp 198.51.100.9:4002 > 100.64.2.1:80", "in", "tcp 198.51.100.9:4002 > 10.0.0.1:80"},
			{"out", "tcp 198.51.100.9:4003 > 100.64.2.1:81", "in", "tcp 198.51.100.9:4003 > 10.2.0.1:81"},
			{"out", "tcp 198.51.100.9:4004 > 100.64.0.1:80", "in", "tcp 198.51.100.9:4004 > 10.1.0.0:80"},
			{"out", "tcp 198.51.100.9:4005 > 100.70.4.8:80", "in", "tcp 198.51.100.9:4005 > 10.4.0.8:80"},
		}},
		{"stateless", []crossing{
			{"in", "tcp 10.1.0.7:5000 > 198.51.100.9:80", "out", "tcp 100.64.1.7:5000 > 198.51.100.9:80"},
			{"in", "udp 10.2.0.1:5000 > 198.51.100.9:80", "out", "udp 100.64.2.1:5000 > 198.51.100.9:80"},
			{"in", "99 10.1.0.7 > 198.51.100.9", "out", "99 100.64.1.7:0 > 198.51.100.9:0"},
			{"out", "udp 198.51.100.9:80 > 100.64.1.9:7", "in", "udp 198.51.100.9:80 > 10.1.0.9:7"},
			{"in", "udp 10.1.0.7:80 > 100.64.1.9:7", "in", "udp 100.64.1.7:80 > 10.1.0.9:7"}, // hairpin
			{"in", "udp 192.168.1.1:5000 > 198.51.100.9:53", "out", "udp 203.0.113.1:5000 > 198.51.100.9:53"},
			{"out", "tcp 198.51.100.9:4000 > 100.64.0.1:80", "in", "tcp 198.51.100.9:4000 > 10.0.0.1:80"},
		}},
	} {
		t.Run(test.file, func(t *testing.T) {
			b := newBench(t)
			if err := compile(t, files[test.file]).Apply(b.router.ns); err != nil {
				t.Fatal(err)
			}
			for _, c := range test.crossings {
				b.cross(t, c)
			}
		})
	}
}

func (b *bench) cross(t *testing.T, c crossing) {
	t.Helper()
	hosts := map[string]*host{"in": b.inside, "out": b.outside, "gw": b.router}
	sent := parsePacket(c.sent)
	hosts[c.from].sends(t, sent)
	if c.to == "" { // then what is sent afterwards comes first
		m := marker
		if c.from == "out" {
			m = m.answer()
		}
		hosts[c.from].sends(t, m)
		other := map[string]*host{"in": b.outside, "out": b.inside}[c.from]
		if got := other.arrives(t, 0); got != m.String() {
			t.Errorf("%s came out as %q, wanted it dropped", c.sent, got)
		}
		if got := hosts[c.from].arrives(t, unix.MSG_DONTWAIT); got != "" {
			t.Errorf("%s came back as %q, wanted it dropped", c.sent, got)
		}
		return
	}
	got := hosts[c.to].arrives(t, 0)
	want, wild, _ := strings.Cut(c.seen, "*")
	if ok := got == c.seen || want != c.seen && strings.HasPrefix(got, want) && strings.HasSuffix(got, wild); !ok {
		t.Errorf("%s came out at %s as %q, want %q", c.sent, c.to, got, c.seen)
		return
	}
	if c.from == "gw" {
		return
	}
	hosts[c.to].sends(t, parsePacket(got).answer())
	if got, want := hosts[c.from].arrives(t, 0), sent.answer().String(); got != want {
		t.Errorf("the answer to %s came back as %q, want %q", c.sent, got, want)
	}
}

// A packet of no connection, sent to an address that is routed to lo for the sake of ARP,
// does not go round there.
func TestStrayOfNoConnection(t *testing.T) {
	b := newBench(t)
	if err := compile(t, files["source"]).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	loops := func() (n uint64) {
		t.Helper()
		if err := b.router.ns.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err == nil {
				n = lo.Attrs().Statistics.RxPackets
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := b.router.ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		return errors.Join(err, netlink.LinkSetUp(lo), route("lo", "100.100.100.100/32"))
	}); err != nil {
		t.Fatal(err)
	}
	before := loops()
	stray := pktbuild.IPv4{Src: netip.MustParseAddr("198.51.100.9"), Dst: netip.MustParseAddr("100.100.100.100"), TTL: 64,
		Payload: pktbuild.TCP{Src: 80, Dst: 5000, Flags: pktbuild.SYN | pktbuild.ACK, Seq: 9, Ack: 1, Window: 1000}}
	if err := unix.Sendto(b.outside.send, stray.Bytes(), 0, &unix.SockaddrInet4{Addr: stray.Dst.As4()}); err != nil {
		t.Fatal(err)
	}
	b.outside.sends(t, marker.answer())
	if got := b.inside.arrives(t, 0); got != marker.answer().String() {
		t.Fatalf("%s came, wanted the marker", got)
	}
	if n := loops() - before; n > 0 {
		t.Errorf("it went round lo %d times", n)
	}
}

// Internal hosts keep their address of a pool, and all of the pool is used.
func TestPoolIsPaired(t *testing.T) {
	b := newBench(t)
	if err := compile(t, files["source"]).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{"192.168.7.", "10.9.0."} {
		seen := map[netip.Addr]bool{}
		for host := 20; host < 84; host++ {
			var first netip.Addr
			for port := range 3 {
				b.inside.sends(t, parsePacket(fmt.Sprintf("udp %s%d:%d > 198.51.100.%d:53", source, host, 5000+port, port+1)))
				got := parsePacket(b.outside.arrives(t, 0)).src.Addr()
				if port == 0 {
					first = got
				} else if got != first {
					t.Errorf("%s%d is %s and %s", source, host, first, got)
				}
			}
			seen[first] = true
		}
		if want := map[string]int{"192.168.7.": 12, "10.9.0.": 4}[source]; len(seen) < want {
			t.Errorf("64 hosts of %s share %d addresses", source, len(seen))
		}
	}
}

// A rule that gives ports gives those alone, whatever the port inside was, to every protocol
// that has ports or identifiers, and to internal hosts that address an external address.
func TestPortsOfRange(t *testing.T) {
	given := ports(2000, 2099)
	f := file(rules(
		rulefile.Masquerade{Source: prefix("10.1.0.0/16"), Ports: given},
		rulefile.SNAT{Source: prefix("10.2.0.0/16"), Address: addr("100.64.0.1"), Ports: given},
		rulefile.SNAT{Source: prefix("10.3.0.0/16"), Pool: "range"},
		rulefile.SNAT{Source: prefix("10.4.0.0/16"), Pool: "ranges"},
		rulefile.Map{Inside: prefix("192.168.0.9/32"), Outside: prefix("100.64.9.9/32")},
	), func(f *rulefile.File) {
		f.Pools = []rulefile.Pool{
			{Name: "range", Addresses: []rulefile.AddressRange{addresses("100.65.0.0/30")}, Ports: given},
			{Name: "ranges", Addresses: []rulefile.AddressRange{addresses("100.66.0.1-100.66.0.3"), addresses("100.66.1.0/32")}, Ports: given},
		}
	})
	b := newBench(t)
	if err := compile(t, f).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	for name, source := range map[string]string{"masquerade": "10.1.0", "snat to an address": "10.2.0", "pool": "10.3.0", "pool of ranges": "10.4.0"} {
		for _, protocol := range []string{"udp", "tcp", "icmp"} {
			for to, at := range map[string]*host{"198.51.100.9": b.outside, "100.64.9.9": b.inside} {
				t.Run(fmt.Sprintf("%s/%s/%s", name, protocol, to), func(t *testing.T) {
					for _, port := range []int{1, 1999, 2000, 2050, 2099, 2100, 65535} {
						dst := port
						if protocol != "icmp" {
							dst = 443
						}
						b.inside.sends(t, parsePacket(fmt.Sprintf("%s %s.7:%d > %s:%d", protocol, source, port, to, dst)))
						arrived := at.arrives(t, 0)
						if arrived == "" {
							t.Fatalf("port %d: nothing arrives", port)
						}
						if src := parsePacket(arrived).src; src.Port() < given.First || src.Port() > given.Last || src.Addr() == addr(source+".7") {
							t.Errorf("port %d leaves as %s, want a port of %s", port, src, given)
						}
					}
				})
			}
		}
	}
}

// Clients keep their target, targets share the clients evenly.
func TestBalance(t *testing.T) {
	b := newBench(t)
	if err := compile(t, files["balance"]).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	clients := map[netip.AddrPort]int{}
	for client := 1; client < 100; client++ {
		var first netip.AddrPort
		for port := range 2 {
			b.outside.sends(t, parsePacket(fmt.Sprintf("tcp 198.51.100.%d:%d > 100.64.0.1:80", client, 5000+port)))
			got := parsePacket(b.inside.arrives(t, 0)).dst
			if port == 0 {
				first = got
			} else if got != first {
				t.Errorf("client %d went to %s and %s", client, first, got)
			}
		}
		clients[first]++
	}
	for _, want := range []string{"10.0.0.1:8080", "10.0.0.2:80", "10.0.0.3:80"} {
		if n := clients[netip.MustParseAddrPort(want)]; n < 15 {
			t.Errorf("%s has %d of 99 clients: %v", want, n, clients)
		}
	}
}

// A connection has the time-outs of the file, a source no more of them than its limit.
func TestTimeoutsAndLimits(t *testing.T) {
	b := newBench(t)
	f := file(rules(rulefile.Masquerade{Source: prefix("192.168.0.0/16")}))
	f.Defaults.Timeouts[rulefile.TimeoutUDP] = 1000 * time.Second
	f.Defaults.Timeouts[rulefile.TimeoutTCPOpening] = 2000 * time.Second
	f.Limits.SessionsPerSource = 3
	if err := compile(t, f).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	b.cross(t, crossing{"in", "udp 192.168.1.1:5000 > 198.51.100.9:53", "out", "udp 203.0.113.1:5000 > 198.51.100.9:53"})
	b.inside.sends(t, parsePacket("tcp 192.168.1.1:5000 > 198.51.100.9:80"))
	b.outside.arrives(t, 0)
	for protocol, want := range map[uint8][2]uint32{unix.IPPROTO_UDP: {900, 1000}, unix.IPPROTO_TCP: {1900, 2000}} {
		var got uint32
		if err := b.router.ns.Do(func() error {
			flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
			for _, f := range flows {
				if f.Forward.Protocol == protocol {
					got = f.TimeOut
				}
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if got < want[0] || got > want[1] {
			t.Errorf("protocol %d: time-out %d s, want up to %d", protocol, got, want[1])
		}
	}
	b.cross(t, crossing{"in", "udp 192.168.1.1:5001 > 198.51.100.9:53", "out", "udp 203.0.113.1:5001 > 198.51.100.9:53"})
	b.cross(t, crossing{"in", "udp 192.168.1.1:5002 > 198.51.100.9:53", "", ""})
	b.cross(t, crossing{"in", "udp 192.168.1.2:5002 > 198.51.100.9:53", "out", "udp 203.0.113.1:5002 > 198.51.100.9:53"})
}

func manyRules(n int) *rulefile.File {
	actions := make([]rulefile.Action, n)
	for i := range actions {
		b := [2]byte{byte(i >> 8), byte(i)}
		if i%2 == 0 {
			actions[i] = rulefile.SNAT{Source: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, b[0], b[1]}), 32), Address: netip.AddrFrom4([4]byte{100, 64, b[0], b[1]})}
		} else {
			actions[i] = rulefile.DNAT{Protocol: rulefile.TCP, Address: netip.AddrFrom4([4]byte{100, 65, b[0], b[1]}), Ports: ports(80, 80),
				Targets: []rulefile.Target{{Address: netip.AddrFrom4([4]byte{10, 1, b[0], b[1]}), Ports: ports(8080, 8080)}}}
		}
	}
	return file(rules(actions...))
}

// Compiling 50 000 rules, and loading them in place of 50 000 others.
func BenchmarkLoad50000(b *testing.B) {
	ktest.Root(b)
	name := ktest.Name(b)
	h, err := netns.Create(name)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { h.Close(); netns.Delete(name) }()
	f := manyRules(50000)
	for b.Loop() {
		r, _, err := nft.CompileRules(f, nft.Facts{TimeoutPolicies: true, Labels: true})
		if err != nil {
			b.Fatal(err)
		}
		if err := r.Apply(h); err != nil {
			b.Fatal(err)
		}
	}
}

// What the kernel counted is reported by the rules of the file.
func TestUses(t *testing.T) {
	b := newBench(t)
	facts, err := nft.ReadFacts(b.router.ns)
	if err != nil || !facts.TimeoutPolicies || !facts.Labels {
		t.Fatalf("%+v, %v", facts, err)
	}
	if list := listRuleset(t, b.router.ns); len(list) > 0 {
		t.Errorf("asking left\n%s", list)
	}
	r := compile(t, files["source"])
	if err := r.Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	for _, c := range []crossing{
		{"in", "udp 192.168.1.1:25000 > 198.51.100.9:53", "out", "udp 203.0.113.1:25000 > 198.51.100.9:53"},
		{"in", "udp 192.168.200.1:25000 > 198.51.100.9:54", "out", "udp 203.0.113.1:25000 > 198.51.100.9:54"},
		{"in", "udp 192.168.7.9:5000 > 198.51.100.9:53", "out", "udp 100.100.100.100:5000 > 198.51.100.9:53"},
	} {
		b.cross(t, c)
	}
	uses, err := r.Uses(b.router.ns)
	if err != nil {
		t.Fatal(err)
	}
	const first = 34 // bytes of the packets above
	want := map[int]nft.Use{0: {2, 2 * first}, 1: {}, 2: {1, first}, 3: {}, 4: {}, 5: {}, 6: {}, 7: {}}
	if !maps.Equal(uses, want) {
		t.Errorf("%v, want %v", uses, want)
	}
}

// A SYN that offers more than the egress interface carries is made to offer less, in both
// directions.
func TestClampMSS(t *testing.T) {
	b := newBench(t)
	if err := compile(t, files["options"]).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	if err := b.router.ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, 1400)
	}); err != nil {
		t.Fatal(err)
	}
	for _, way := range []struct {
		from, to *host
		src, dst string
		flags    uint8
	}{
		{b.inside, b.outside, "192.168.1.1:5000", "198.51.100.9:80", pktbuild.SYN},
		{b.outside, b.inside, "198.51.100.9:80", "203.0.113.1:5000", pktbuild.SYN | pktbuild.ACK},
	} {
		src, dst := netip.MustParseAddrPort(way.src), netip.MustParseAddrPort(way.dst)
		syn := pktbuild.IPv4{Src: src.Addr(), Dst: dst.Addr(), TTL: 64, Payload: pktbuild.TCP{
			Src: src.Port(), Dst: dst.Port(), Flags: way.flags, Seq: 9, Ack: 1, Window: 1000, Options: []byte{2, 4, 1460 >> 8, 1460 & 0xff},
		}}
		if way.flags == pktbuild.SYN {
			syn.Payload = pktbuild.TCP{Src: src.Port(), Dst: dst.Port(), Flags: way.flags, Window: 1000, Options: []byte{2, 4, 1460 >> 8, 1460 & 0xff}}
		}
		if err := unix.Sendto(way.from.send, syn.Bytes(), 0, &unix.SockaddrInet4{Addr: dst.Addr().As4()}); err != nil {
			t.Fatal(err)
		}
		packet := make([]byte, 2048)
		n, _, err := unix.Recvfrom(way.to.receive, packet, 0)
		if err != nil || n < 44 {
			t.Fatalf("%d bytes, %v", n, err)
		}
		if mss := binary.BigEndian.Uint16(packet[42:]); mss != 1360 {
			t.Errorf("%s > %s offers %d, want 1360", way.src, way.dst, mss)
		}
	}
}
