// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// crossing is a gateway between two wires, on which frames are put as they are and from
// which everything that the gateway sends is read. Nobody else is there to answer.
//
//	10.0.0.0/16 ── wire ── in 10.0.255.1 │ gateway │ 203.0.113.1 out ── wire ── everything else
type crossing struct {
	t            *testing.T
	gateway, far *netns.Handle
	in, out      *wire
}

// wire is the end of a link beyond the gateway.
type wire struct {
	socket       int
	mac, gateway net.HardwareAddr
}

var (
	crossingIn  = netip.MustParseAddr("10.0.255.1")
	crossingOut = netip.MustParseAddr("203.0.113.1")
)

func newCrossing(t *testing.T, engine Engine, attach Attach, rules string) *crossing {
	t.Helper()
	c := &crossing{t: t}
	name := ktest.Name(t)
	far, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	c.far = far
	if c.gateway, err = netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := Down(c.gateway); err != nil && !errors.Is(err, ErrDown) {
			t.Errorf("down: %v", err)
		}
		c.gateway.Close()
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	err = c.gateway.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		return errors.Join(err, netlink.LinkSetUp(lo))
	})
	if err != nil {
		t.Fatal(err)
	}
	c.in = c.wire(far, "in", "10.0.255.1/24", "10.0.255.2", "10.0.0.0/16")
	c.out = c.wire(far, "out", "203.0.113.1/24", "203.0.113.254", "0.0.0.0/0")
	file, err := rulefile.Parse("test.yaml", []byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), file, rules, Options{Namespace: c.gateway, Engine: engine, Attach: attach}); err != nil {
		t.Fatal(err)
	}
	return c
}

// wire makes a link of the gateway, and a neighbour behind it to which that network is
// routed.
func (c *crossing) wire(far *netns.Handle, name, address, neighbour, network string) *wire {
	c.t.Helper()
	w := &wire{}
	do := func(ns *netns.Handle, fn func() error) {
		c.t.Helper()
		if err := ns.Do(fn); err != nil {
			c.t.Fatal(err)
		}
	}
	do(c.gateway, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(far.Fd())})
	})
	do(far, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		w.mac = l.Attrs().HardwareAddr
		// What XDP sends to a veth arrives only where XDP is at work too.
		pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
		if err != nil {
			return err
		}
		defer pass.Close()
		passing, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		c.t.Cleanup(func() { passing.Close() })
		if w.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		c.t.Cleanup(func() { unix.Close(w.socket) })
		return errors.Join(
			netlink.LinkSetUp(l),
			unix.SetsockoptInt(w.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(w.socket, &unix.SockaddrLinklayer{Protocol: unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8, Ifindex: l.Attrs().Index}),
		)
	})
	do(c.gateway, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		w.gateway = l.Attrs().HardwareAddr
		a, err1 := netlink.ParseAddr(address)
		_, dst, err2 := net.ParseCIDR(network)
		via := net.ParseIP(neighbour)
		return errors.Join(err1, err2, netlink.AddrAdd(l, a), netlink.LinkSetUp(l),
			netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: via, HardwareAddr: w.mac}),
			netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Gw: via}),
			os.WriteFile("/proc/sys/net/ipv4/conf/all/rp_filter", []byte("0"), 0),
			os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/rp_filter", []byte("0"), 0))
	})
	return w
}

// frame is one to the gateway.
func (w *wire) frame(ip pktbuild.IPv4) []byte {
	return pktbuild.Frame{To: w.gateway, From: w.mac, IP: ip}.Bytes()
}

// put puts a frame on the wire.
func (w *wire) put(t testing.TB, frame []byte) {
	t.Helper()
	if _, err := unix.Write(w.socket, frame); err != nil {
		t.Fatalf("send %d bytes: %v", len(frame), err)
	}
}

// take gives the IPv4 packet of the next frame that the gateway sent, nil if there is none
// yet.
func (w *wire) take(t testing.TB) []byte {
	t.Helper()
	b := make([]byte, 4096)
	for {
		n, from, err := unix.Recvfrom(w.socket, b, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			t.Fatal(err)
		case from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING, n < 14+20, b[12] != 8, b[13] != 0:
			continue
		}
		return b[14 : 14+min(n-14, int(binary.BigEndian.Uint16(b[16:])))]
	}
}

// arrives waits until a frame is there to be taken from one of the wires: false when it is late.
func arrives(deadline time.Time, wires ...*wire) bool {
	fds := make([]unix.PollFd, len(wires))
	for i, w := range wires {
		fds[i] = unix.PollFd{Fd: int32(w.socket), Events: unix.POLLIN}
	}
	left := time.Until(deadline)
	if left > 0 {
		unix.Poll(fds, int(left.Milliseconds())+1) // a signal wakes it too
	}
	return left > 0
}

// sumOf is the one's complement sum of RFC 1071, folded: 0xffff over what has a right
// checksum in it.
func sumOf(sum uint32, b []byte) uint32 {
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

// checkSums reports what is wrong with the checksums of a packet that is whole.
func checkSums(ip []byte) error {
	if len(ip) < 20 || int(binary.BigEndian.Uint16(ip[2:])) != len(ip) {
		return fmt.Errorf("length of %x", ip)
	}
	header := int(ip[0]&15) * 4
	if sumOf(0, ip[:header]) != 0xffff {
		return fmt.Errorf("IPv4 checksum of %x", ip)
	}
	l4 := ip[header:]
	pseudo := sumOf(uint32(ip[9])+uint32(len(l4)), ip[12:20])
	switch ip[9] {
	case pktbuild.ICMPProtocol:
		pseudo = 0
	case pktbuild.UDPProtocol:
		if l4[6] == 0 && l4[7] == 0 {
			return nil
		}
	case pktbuild.TCPProtocol:
	default:
		return nil
	}
	if sumOf(pseudo, l4) != 0xffff {
		return fmt.Errorf("checksum of the payload of %x", ip)
	}
	return nil
}

// --- the same packets on both engines ---------------------------------------------------

const bothRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: 10.0.0.0/24
  - snat: 10.0.1.0/24
    to: 203.0.113.16
  - map: 10.0.2.0/24 <-> 198.18.2.0/24
  - dnat: tcp 203.0.113.1:8080
    to: 10.0.0.2:80
  - dnat: udp 203.0.113.1:7000-7009
    to: 10.0.0.2:9000-9009
  - exclude: any -> 192.0.2.0/24
`

// talk is a conversation: what its two ends send in turn, as each engine has it. Ends are
// as the one who sends sees them; of ICMP both ports are the identifier.
type talk struct {
	protocol uint8
	inside   bool // the opener is
	opener   pktEnds
	step     int        // of TCP
	there    [2]pktEnds // as its receiver saw the opener's packet, by engine
	met      bool       // it came through
	seq      [2]uint32  // of the opener, of the other: TCP
}

type pktEnds struct{ src, dst netip.AddrPort }

func (e pktEnds) String() string { return e.src.String() + " -> " + e.dst.String() }

func (e pktEnds) turned() pktEnds { return pktEnds{e.dst, e.src} }

// twins are two gateways with the same rules, one of each engine.
type twins struct {
	t      *testing.T
	random *rand.Rand
	pair   [2]*crossing
	talks  []*talk
	id     uint16
	// External endpoint of a class -> who has it, by engine.
	holders [2]map[string]netip.AddrPort
	// Internal endpoint of a class -> its external endpoint, on engine ebpf.
	mapped map[string]netip.AddrPort
	seen   map[string]int
}

var strangerAddress = netip.MustParseAddr("192.0.2.99")

var engines = [2]Engine{EngineEBPF, EngineNFT}

// Random conversations through two gateways with the same rules, one on each engine: what
// comes out is the same, but for the ports that the engines choose. NATKIT_SEED is the
// first sequence's seed.
func TestEnginesAlike(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	seed := uint64(1)
	if text := os.Getenv("NATKIT_SEED"); text != "" {
		if _, err := fmt.Sscan(text, &seed); err != nil {
			t.Fatalf("NATKIT_SEED: %v", err)
		}
	}
	w := &twins{t: t, random: rand.New(rand.NewPCG(seed, 9)), mapped: map[string]netip.AddrPort{}, seen: map[string]int{}}
	for i, engine := range engines {
		w.pair[i] = newCrossing(t, engine, AttachTC, bothRules)
		w.holders[i] = map[string]netip.AddrPort{}
	}
	for n := range 1200 {
		w.one()
		if t.Failed() {
			t.Fatalf("packet %d, NATKIT_SEED=%d", n, seed)
		}
	}
	t.Logf("what was sent, and came out: %v", w.seen)
	for _, want := range []string{"UDP out", "UDP back", "TCP out", "TCP back", "ICMP out", "ICMP back", "error out", "error back", "stranger", "excluded"} {
		if w.seen[want] == 0 {
			t.Errorf("nothing of the kind: %s", want)
		}
	}
}

func pickOf[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// one sends a packet: of a new conversation, the next or a repeated one of a known
// conversation, an error about one, or a stranger's.
func (w *twins) one() {
	w.id++
	known := slices.DeleteFunc(slices.Clone(w.talks), func(k *talk) bool { return !k.met })
	switch n := w.random.IntN(10); {
	case n < 3 || len(known) == 0:
		k := w.begin()
		if slices.ContainsFunc(w.talks, func(old *talk) bool { return old.protocol == k.protocol && old.opener == k.opener }) {
			return // what the kernel makes of a connection in another one's place depends on its windows
		}
		w.talks = append(w.talks, k)
		w.say(k, true)
	case n < 8:
		k := pickOf(w.random, known...)
		w.say(k, k.opens())
	case n < 9:
		w.complain(pickOf(w.random, known...))
	default:
		w.stranger(pickOf(w.random, known...))
	}
}

func (w *twins) begin() *talk {
	port := func(ports ...uint16) uint16 { return pickOf(w.random, ports...) }
	address := func(all ...string) netip.Addr { return netip.MustParseAddr(pickOf(w.random, all...)) }
	hosts := []string{"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.1.2", "10.0.1.3", "10.0.2.2", "10.0.2.3"}
	world := []string{"198.51.100.8", "198.51.100.9", "198.51.100.10"}
	k := &talk{protocol: pickOf[uint8](w.random, pktbuild.UDPProtocol, pktbuild.TCPProtocol, pktbuild.ICMPProtocol), inside: w.random.IntN(4) > 0}
	k.seq = [2]uint32{w.random.Uint32(), w.random.Uint32()}
	if k.inside {
		k.opener = pktEnds{netip.AddrPortFrom(address(hosts...), port(5000, 5001, 5002, 800, 1024, 65535)), netip.AddrPortFrom(address(append(world, "192.0.2.7")...), port(53, 80))}
		if k.protocol == pktbuild.ICMPProtocol {
			k.opener.dst = netip.AddrPortFrom(k.opener.dst.Addr(), k.opener.src.Port())
		}
		return k
	}
	k.opener.src = netip.AddrPortFrom(address(world...), uint16(20000+w.random.IntN(20000)))
	switch {
	case k.protocol == pktbuild.TCPProtocol && w.random.IntN(2) == 0:
		k.opener.dst = netip.MustParseAddrPort("203.0.113.1:8080")
	case k.protocol == pktbuild.UDPProtocol && w.random.IntN(2) == 0:
		k.opener.dst = netip.AddrPortFrom(crossingOut, 7000+uint16(w.random.IntN(10)))
	default:
		k.opener.dst = netip.AddrPortFrom(address("198.18.2.2", "198.18.2.9"), port(22, 53, 5000))
	}
	if k.protocol == pktbuild.ICMPProtocol {
		k.opener.dst = netip.AddrPortFrom(k.opener.dst.Addr(), k.opener.src.Port())
	}
	return k
}

// The life of a TCP connection: who sends which flags. What comes after is repeated.
var tcpLife = []struct {
	opener bool
	flags  uint8
}{
	{true, pktbuild.SYN}, {false, pktbuild.SYN | pktbuild.ACK}, {true, pktbuild.ACK}, {true, pktbuild.ACK | pktbuild.PSH}, {false, pktbuild.ACK | pktbuild.PSH},
	{true, pktbuild.ACK | pktbuild.PSH}, {false, pktbuild.ACK}, {true, pktbuild.FIN | pktbuild.ACK}, {false, pktbuild.ACK}, {false, pktbuild.ACK | pktbuild.PSH},
	{true, pktbuild.ACK}, {false, pktbuild.FIN | pktbuild.ACK}, {true, pktbuild.ACK},
}

// opens reports whether the opener is the next to send.
func (k *talk) opens() bool {
	if k.protocol == pktbuild.TCPProtocol {
		return tcpLife[min(k.step, len(tcpLife)-1)].opener
	}
	k.step++
	return k.step%3 == 0
}

// packet is the next one of the opener or the other, between those ends.
func (w *twins) packet(k *talk, opener bool, e pktEnds) pktbuild.IPv4 {
	ip := pktbuild.IPv4{Src: e.src.Addr(), Dst: e.dst.Addr(), TTL: 64, ID: w.id}
	if w.id%11 == 0 {
		ip.Options = []byte{1, 1, 1, 0}
	}
	data := fmt.Appendf(nil, "packet %d", w.id)
	switch k.protocol {
	case pktbuild.UDPProtocol:
		ip.Payload = pktbuild.UDP{Src: e.src.Port(), Dst: e.dst.Port(), NoChecksum: w.id%7 == 0, Data: data}
	case pktbuild.ICMPProtocol:
		kind := uint8(0)
		if opener {
			kind = 8
		}
		ip.Payload = pktbuild.Echo(kind, e.src.Port(), w.id, data)
	default:
		s := tcpLife[min(k.step, len(tcpLife)-1)]
		own, other := &k.seq[0], k.seq[1]
		if !opener {
			own, other = &k.seq[1], k.seq[0]
		}
		p := pktbuild.TCP{Src: e.src.Port(), Dst: e.dst.Port(), Seq: *own, Ack: other, Flags: s.flags, Window: 60000}
		if s.flags&pktbuild.ACK == 0 {
			p.Ack = 0
		}
		if s.flags&pktbuild.PSH != 0 {
			p.Data = data
		}
		ip.Payload = p
	}
	return ip
}

// said moves a TCP connection on.
func (k *talk) said(ip pktbuild.IPv4) {
	p, ok := ip.Payload.(pktbuild.TCP)
	if !ok || k.step >= len(tcpLife) {
		return
	}
	own := &k.seq[1]
	if tcpLife[k.step].opener {
		own = &k.seq[0]
	}
	*own += uint32(len(p.Data))
	if p.Flags&(pktbuild.SYN|pktbuild.FIN) != 0 {
		*own++
	}
	k.step++
}

var protocolNames = map[uint8]string{pktbuild.UDPProtocol: "UDP", pktbuild.TCPProtocol: "TCP", pktbuild.ICMPProtocol: "ICMP"}

// say sends the next packet of a conversation on both gateways and compares.
func (w *twins) say(k *talk, opener bool) {
	inside := k.inside == opener
	var ips [2]pktbuild.IPv4
	for i := range engines {
		e := k.opener
		if !opener {
			e = k.there[i].turned()
		}
		ips[i] = w.packet(k, opener, e)
	}
	out := w.cross(inside, ips, 20*time.Second)
	if out[0] == nil || out[1] == nil {
		w.t.Errorf("%s, step %d, %v: came out as %x on %s and %x on %s", protocolNames[k.protocol], k.step, k.opener, out[0], engines[0], out[1], engines[1])
		return
	}
	for i := range engines {
		there := endsOf(out[i])
		switch {
		case opener:
			w.holds(i, k, there)
			if k.met && there != k.there[i] {
				w.t.Errorf("%s: %v was seen as %v before and is now %v", engines[i], k.opener, k.there[i], there)
			}
			k.there[i] = there
		case there != k.opener.turned():
			w.t.Errorf("%s: the answer to %v came in as %v", engines[i], k.opener, there)
		}
	}
	w.same(out)
	k.met = true
	k.said(ips[0])
	kind := protocolNames[k.protocol] + " out"
	switch {
	case k.opener.dst.Addr() == netip.MustParseAddr("192.0.2.7"):
		kind = "excluded"
	case !inside:
		kind = protocolNames[k.protocol] + " back"
	}
	w.seen[kind]++
}

// holds notes who has an external endpoint: towards one remote endpoint never two, and on
// engine ebpf the same for all remotes.
func (w *twins) holds(i int, k *talk, there pktEnds) {
	if !k.inside {
		return
	}
	key := fmt.Sprint(k.protocol, there)
	if k.protocol == pktbuild.ICMPProtocol {
		key = fmt.Sprint(k.protocol, there.src, there.dst.Addr())
	}
	if holder, held := w.holders[i][key]; held && holder != k.opener.src {
		w.t.Errorf("%s: %s belongs to %s and to %s", engines[i], key, holder, k.opener.src)
	}
	w.holders[i][key] = k.opener.src
	if engines[i] != EngineEBPF || k.opener.dst.Addr() == netip.MustParseAddr("192.0.2.7") {
		return
	}
	own := fmt.Sprint(k.protocol, k.opener.src)
	if before, known := w.mapped[own]; known && before != there.src {
		w.t.Errorf("%s was %s and is %s: not endpoint-independent", own, before, there.src)
	}
	w.mapped[own] = there.src
}

// endsOf reads a packet's ends.
func endsOf(ip []byte) pktEnds {
	l4 := ip[int(ip[0]&15)*4:]
	sport, dport := binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	if ip[9] == pktbuild.ICMPProtocol {
		sport = binary.BigEndian.Uint16(l4[4:])
		dport = sport
	}
	return pktEnds{
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:16])), sport),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[16:20])), dport),
	}
}

// cross puts a packet on both wires of a side and gives what comes out on the other, by
// engine: nil if nothing does for so long. The packet is known by its identification.
func (w *twins) cross(inside bool, ips [2]pktbuild.IPv4, limit time.Duration) (out [2][]byte) {
	w.t.Helper()
	for i, c := range w.pair {
		from := c.out
		if inside {
			from = c.in
		}
		from.put(w.t, from.frame(ips[i]))
	}
	var wires []*wire // on which it comes out
	for _, c := range w.pair {
		if inside {
			wires = append(wires, c.out)
		} else {
			wires = append(wires, c.in)
		}
	}
	for deadline := time.Now().Add(limit); (out[0] == nil || out[1] == nil) && arrives(deadline, wires...); {
		for i, to := range wires {
			for b := to.take(w.t); b != nil; b = to.take(w.t) {
				if from := netip.AddrFrom4([4]byte(b[12:16])); from == strangerAddress {
					w.t.Errorf("a stranger's packet came in: %x on %s", b, engines[i])
				}
				if binary.BigEndian.Uint16(b[4:]) == w.id && b[8] == 63 {
					out[i] = bytes.Clone(b)
				}
			}
		}
	}
	return out
}

// same checks that two packets differ in nothing but ports, identifiers and checksums, and
// that these are right.
func (w *twins) same(out [2][]byte) {
	w.t.Helper()
	var plain [2][]byte
	for i, b := range out {
		if err := checkSums(b); err != nil {
			w.t.Errorf("%s: %v", engines[i], err)
			return
		}
		p := bytes.Clone(b)
		blank := func(at, n int) { copy(p[at:at+n], make([]byte, n)) }
		header := int(p[0]&15) * 4
		switch p[9] {
		case pktbuild.UDPProtocol:
			blank(header, 4)
			if binary.BigEndian.Uint16(p[header+6:]) != 0 {
				blank(header+6, 2)
			}
		case pktbuild.TCPProtocol:
			blank(header, 4)
			blank(header+16, 2)
		case pktbuild.ICMPProtocol:
			blank(header+2, 4) // checksum, identifier
			if kind := p[header]; kind != 8 && kind != 0 {
				inner := header + 8
				blank(inner+10, 2) // its checksum follows the addresses, which are compared
				blank(inner+int(p[inner]&15)*4, 8)
				p = p[:inner+int(p[inner]&15)*4+8]
				if sumOf(0, b[inner:inner+int(b[inner]&15)*4]) != 0xffff {
					w.t.Errorf("%s: checksum of the header inside %x", engines[i], b)
				}
			}
		}
		plain[i] = p
	}
	if !bytes.Equal(plain[0], plain[1]) {
		w.t.Errorf("%x on %s\n%x on %s", plain[0], engines[0], plain[1], engines[1])
	}
}

// complain sends an ICMP error about the opener's packet, from its receiver or a router on
// the way.
func (w *twins) complain(k *talk) {
	kind := pickOf(w.random, [2]uint8{3, 3}, [2]uint8{3, 1}, [2]uint8{11, 0}, [2]uint8{3, 4})
	var ips [2]pktbuild.IPv4
	for i := range engines {
		e := k.there[i]
		from := e.dst.Addr()
		if !k.inside {
			kind = [2]uint8{3, 3}
		} else if kind[0] == 11 {
			from = netip.MustParseAddr("192.0.2.200")
		}
		about := w.packet(k, true, e)
		about.TTL, about.ID = 1, 77
		quoted := about.Bytes()
		quoted = quoted[:int(quoted[0]&15)*4+8]
		ips[i] = pktbuild.IPv4{Src: from, Dst: e.src.Addr(), TTL: 64, ID: w.id, Payload: pktbuild.ICMP{Type: kind[0], Code: kind[1], Data: quoted}}
	}
	if k.opener.dst.Addr() == netip.MustParseAddr("192.0.2.7") {
		return
	}
	out := w.cross(!k.inside, ips, 20*time.Second)
	if out[0] == nil || out[1] == nil {
		w.t.Errorf("an error %v about %v came out as %x on %s and %x on %s", kind, k.opener, out[0], engines[0], out[1], engines[1])
		return
	}
	w.same(out)
	if k.inside {
		w.seen["error back"]++
	} else {
		w.seen["error out"]++
	}
}

// stranger sends to an external endpoint that a conversation uses, from an address that it
// has nothing to do with: nobody inside must see it.
func (w *twins) stranger(k *talk) {
	if !k.inside || k.there[0].src.Addr() == k.opener.src.Addr() || k.there[0].src.Addr().As4()[0] == 198 {
		return // untranslated, or of a prefix that is open to all
	}
	var ips [2]pktbuild.IPv4
	for i := range engines {
		from := netip.AddrPortFrom(strangerAddress, k.there[i].src.Port())
		fresh := &talk{protocol: k.protocol}
		ips[i] = w.packet(fresh, true, pktEnds{from, k.there[i].src})
	}
	w.cross(false, ips, 5*time.Millisecond) // what comes later is met by the next packet
	w.seen["stranger"]++
}

// An internal host's packet to another by an external address of the gateway (hairpin), whose
// TTL ends here: the gateway answers by ICMP, its stack does not take it for its own.
func TestHairpinTTL(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	c := newCrossing(t, EngineEBPF, AttachTC, bothRules)
	ack := func(ttl uint8) []byte {
		return c.in.frame(pktbuild.IPv4{Src: netip.MustParseAddr("10.0.0.3"), Dst: crossingOut, TTL: ttl,
			Payload: pktbuild.TCP{Src: 5000, Dst: 8080, Flags: pktbuild.ACK, Seq: 2, Ack: 1, Window: 1000}})
	}
	c.in.put(t, ack(1))
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		if p := c.in.take(t); p != nil {
			if p[9] != pktbuild.ICMPProtocol || p[20] != 11 {
				t.Errorf("answered by %x, want time exceeded", p)
			}
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Error("nothing came back")
}
