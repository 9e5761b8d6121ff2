// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// The same packets, of every kind that IPv4 has, through a gateway that is accelerated and
// one that is not: what comes out on both sides is the same, byte by byte.
func TestAccelEqual(t *testing.T) {
	const seed = 6
	var out [2][]string
	for i, accelerate := range []bool{false, true} {
		name := map[bool]string{false: "plain", true: "accelerated"}[accelerate]
		t.Run(name, func(t *testing.T) { out[i] = randomTraffic(t, accelerate, rand.New(rand.NewPCG(seed, seed))) })
	}
	if t.Failed() {
		return
	}
	plain, accelerated := out[0], out[1]
	if len(plain) < 4000 {
		t.Errorf("only %d packets came out", len(plain))
	}
	slices.Sort(plain)
	slices.Sort(accelerated)
	for i := 0; i < max(len(plain), len(accelerated)); i++ {
		if i >= len(plain) || i >= len(accelerated) || plain[i] != accelerated[i] {
			at := func(s []string) string {
				if i < len(s) {
					return s[i]
				}
				return "nothing more"
			}
			t.Fatalf("%d packets came out plain, %d accelerated; the first that differs:\n%s\n%s", len(plain), len(accelerated), at(plain), at(accelerated))
		}
	}
}

// randomTraffic sends packets of some flows both ways and returns what arrives, in words.
func randomTraffic(t *testing.T, accelerate bool, random *rand.Rand) (arrived []string) {
	b := newTestbedAlone(t).byKernel()
	onOneCPU(t)
	b.in(b.gateway, func() error {
		return errors.Join(
			writeSetting("net.ipv4.icmp_ratemask", "0"), // every ICMP error is sent
			writeSetting(settingLiberal, "1"),
			// What has a wrong checksum is not for the rules: fast-path entries don't look at it.
			writeSetting("net.netfilter.nf_conntrack_checksum", "0"))
	})
	if accelerate {
		b.accelOn(b.accelOptions())
	}
	client, server := b.rawEnd(b.client, "in"), b.rawEnd(b.server, "out")
	for _, ns := range []*netns.Handle{b.client, b.server} {
		b.in(ns, func() error { // the ends don't answer: all there is we send
			return writeSetting("net.ipv4.icmp_echo_ignore_all", "1")
		})
	}
	b.nftIn(b.client, `table ip mute { chain in { type filter hook prerouting priority -300; drop; }; }`)
	b.nftIn(b.server, `table ip mute { chain in { type filter hook prerouting priority -300; drop; }; }`)

	const flows = 12
	marker := uint16(1)
	send := func(flow int, back, plain bool) {
		p := packetOf{protocol: unix.IPPROTO_UDP, ttl: 64, id: marker, from: inside, to: outside, sport: uint16(6000 + flow), dport: 7000}
		if flow%3 == 2 {
			p.protocol = unix.IPPROTO_TCP
			p.flags = 0x10
		}
		if back {
			p.from, p.to, p.sport, p.dport = outside, own, p.dport, p.sport
		}
		marker++
		if !plain {
			p.vary(random)
		}
		if back {
			server.send(t, p.bytes())
		} else {
			client.send(t, p.bytes())
		}
	}
	// Each flow opens; connections as connections do.
	for flow := range flows {
		if flow%3 == 2 {
			for n, flags := range []byte{0x02, 0x12, 0x10} {
				p := packetOf{protocol: unix.IPPROTO_TCP, ttl: 64, id: marker, from: inside, to: outside, sport: uint16(6000 + flow), dport: 7000, flags: flags}
				marker++
				if n == 1 {
					p.from, p.to, p.sport, p.dport = outside, own, p.dport, p.sport
					server.send(t, p.bytes())
				} else {
					client.send(t, p.bytes())
				}
				b.settle(client, server, marker)
			}
			continue
		}
		send(flow, false, true)
		b.settle(client, server, marker)
		send(flow, true, true)
		b.settle(client, server, marker)
	}
	for round := range 300 {
		for flow := range flows {
			// Now and then a packet that is as all others, so that flows stay in use.
			send(flow, false, round%3 > 0)
			send(flow, true, round%3 > 0)
		}
		b.settle(client, server, marker)
	}
	if accelerate {
		s := b.accelStats()
		t.Logf("%v", s.Reasons)
		if s.Reasons["forwarded"] < 2000 {
			t.Errorf("only %d packets used the fast path", s.Reasons["forwarded"])
		}
	}
	return append(client.words("client"), server.words("server")...)
}

var inside, outside, own = netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("198.51.100.9"), netip.MustParseAddr("198.51.100.1")

// onOneCPU keeps the test's thread on one processor. Packets between veth wait in that
// processor's queue: what was sent first arrives first.
func onOneCPU(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	var all, one unix.CPUSet
	err := unix.SchedGetaffinity(0, &all)
	for cpu := 0; err == nil && one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			one.Set(cpu)
			err = unix.SchedSetaffinity(0, &one)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.SchedSetaffinity(0, &all) })
}

// settle waits until all that was sent has arrived: until an echo of that number, which is
// sent last, has, and its answer.
func (b *testbed) settle(client, server *rawEnd, number uint16) {
	b.t.Helper()
	for _, way := range []struct {
		kind     byte
		by, at   *rawEnd
		from, to netip.Addr
	}{{8, client, server, inside, outside}, {0, server, client, outside, own}} {
		echo := packetOf{protocol: unix.IPPROTO_ICMP, ttl: 64, id: number, from: way.from, to: way.to, sport: uint16(way.kind) << 8}
		way.by.send(b.t, echo.bytes())
		ktest.Wait(b.t, 20*time.Second, "what was sent last arrives", func() bool {
			way.at.take()
			i := slices.IndexFunc(way.at.arrived, func(p []byte) bool {
				return p[9] == unix.IPPROTO_ICMP && p[20] == way.kind && binary.BigEndian.Uint16(p[4:]) == number
			})
			if i >= 0 {
				way.at.arrived = slices.Delete(way.at.arrived, i, i+1)
			}
			return i >= 0
		})
	}
}

func (b *testbed) nftIn(ns *netns.Handle, rules string) {
	b.t.Helper()
	gateway := b.gateway
	b.gateway = ns
	b.nft(rules)
	b.gateway = gateway
}

// rawEnd is the end of a veth as frames.
type rawEnd struct {
	fd      int
	header  [14]byte // to the gateway
	arrived [][]byte
}

func (b *testbed) rawEnd(ns *netns.Handle, gateway string) *rawEnd {
	b.t.Helper()
	w := &rawEnd{}
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(gateway)
		if err == nil {
			copy(w.header[:], l.Attrs().HardwareAddr)
		}
		return err
	})
	b.in(ns, func() (err error) {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		copy(w.header[6:], l.Attrs().HardwareAddr)
		binary.BigEndian.PutUint16(w.header[12:], unix.ETH_P_IP)
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_IP))); err != nil {
			return err
		}
		unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_IP), Ifindex: l.Attrs().Index})
	})
	b.t.Cleanup(func() { unix.Close(w.fd) })
	// Neighbours that are known from the beginning, and for good.
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName(gateway)
		if err != nil {
			return err
		}
		ip := map[string]net.IP{"in": net.IPv4(10, 0, 0, 2), "out": net.IPv4(198, 51, 100, 9)}[gateway]
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET, IP: ip, HardwareAddr: w.header[6:12], State: netlink.NUD_PERMANENT})
	})
	return w
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (w *rawEnd) send(t *testing.T, ip []byte) {
	t.Helper()
	frame := append(w.header[:len(w.header):len(w.header)], ip...)
	ktest.Wait(t, 10*time.Second, "the frame is sent", func() bool {
		_, err := unix.Write(w.fd, frame)
		return err == nil
	})
}

// take reads what has arrived.
func (w *rawEnd) take() {
	p := make([]byte, 4096)
	for {
		length, from, err := unix.Recvfrom(w.fd, p, 0)
		if err != nil {
			return
		}
		if a, ok := from.(*unix.SockaddrLinklayer); ok && a.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		w.arrived = append(w.arrived, slices.Clone(p[14:length]))
	}
}

// words are the packets that arrived. The gateway's own errors have an identification
// that it chooses.
func (w *rawEnd) words(where string) (out []string) {
	for _, p := range w.arrived {
		if len(p) > 20 && p[9] == unix.IPPROTO_ICMP {
			clear(p[4:6])
			clear(p[10:12])
		}
		out = append(out, fmt.Sprintf("%s %x", where, p))
	}
	return out
}

// packetOf is what of a packet is varied.
type packetOf struct {
	protocol     byte
	flags        byte // of TCP
	ttl, tos     byte
	id, fragment uint16
	from, to     netip.Addr
	sport, dport uint16
	options      []byte
	payload      int
	noChecksum   bool
	badChecksum  bool
}

// vary makes it one of those that are not as all others.
func (p *packetOf) vary(r *rand.Rand) {
	p.payload = r.IntN(600)
	switch r.IntN(12) {
	case 0:
		p.ttl = byte(1 + r.IntN(3))
	case 1:
		p.tos = byte(r.IntN(256))
	case 2:
		p.options = []byte{1, 1, 1, 0} // no operation
	case 3:
		p.payload = 1400 + r.IntN(52)
	case 4:
		p.fragment = 0x4000 // DF
	case 5:
		p.noChecksum = p.protocol == unix.IPPROTO_UDP
	case 6:
		p.badChecksum = true
	case 7:
		p.payload = r.IntN(3)
	}
}

func (p *packetOf) bytes() []byte {
	header := 20 + len(p.options)
	transport := map[byte]int{unix.IPPROTO_UDP: 8, unix.IPPROTO_TCP: 20, unix.IPPROTO_ICMP: 8}[p.protocol]
	out := make([]byte, header+transport+p.payload)
	out[0], out[1], out[8], out[9] = byte(0x40|header/4), p.tos, p.ttl, p.protocol
	binary.BigEndian.PutUint16(out[2:], uint16(len(out)))
	binary.BigEndian.PutUint16(out[4:], p.id)
	binary.BigEndian.PutUint16(out[6:], p.fragment)
	copy(out[12:], p.from.AsSlice())
	copy(out[16:], p.to.AsSlice())
	copy(out[20:], p.options)
	l4 := out[header:]
	binary.BigEndian.PutUint16(l4, p.sport)
	binary.BigEndian.PutUint16(l4[2:], p.dport)
	for i := transport; i < len(l4); i++ {
		l4[i] = byte(i * 7)
	}
	at, pseudo := 6, out[12:20]
	sum := uint32(p.protocol) + uint32(len(l4))
	switch p.protocol {
	case unix.IPPROTO_UDP:
		binary.BigEndian.PutUint16(l4[4:], uint16(len(l4)))
	case unix.IPPROTO_ICMP: // type and code are where the others have a port
		at, sum, pseudo = 2, 0, nil
	default:
		at = 16
		binary.BigEndian.PutUint32(l4[4:], 1)
		binary.BigEndian.PutUint32(l4[8:], 1)
		l4[12], l4[13] = 5<<4, p.flags
		binary.BigEndian.PutUint16(l4[14:], 65535)
	}
	check := ^uint16(sumOf(sumOf(sum, pseudo), l4))
	switch {
	case p.noChecksum:
		check = 0
	case p.badChecksum:
		check ^= 0x1234
	case check == 0:
		check = 0xffff
	}
	binary.BigEndian.PutUint16(l4[at:], check)
	binary.BigEndian.PutUint16(out[10:], ^uint16(sumOf(0, out[:header])))
	return out
}
