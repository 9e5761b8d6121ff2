// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// leaving samples which sources packets have that leave for the Internet, and
// which come from there for inside addresses: what translation makes of them can't be
// seen anywhere else, least of all what is kept from connection tracking.
func leaving(opts Options) source {
	var tap *packetTap
	stop := func() {
		if tap != nil {
			tap.close()
			tap = nil
		}
	}
	return source{
		name:  snapshot.CanLeaving,
		costs: "packets that leave untranslated, while others are translated, are not found",
		live:  true,
		start: func(*view) (err error) {
			tap, err = openLeaving(opts.Quiet)
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) (err error) {
			s.Leaving, err = tap.readLeaving()
			stop()
			return err
		},
		stop: stop,
	}
}

// packetTap is a packet socket whose buffer holds the first few hundred packets.
type packetTap struct {
	fd   int
	held []tappedFrame // what it had when it was muted
	end  chan struct{} // nil: nobody watches it
	done sync.WaitGroup
}

// A tap costs each packet of the namespace that comes or goes some tenths of a microsecond, as docs/monitor.md has measured,
// until it is taken off their way.
const (
	// tapEnough is more packets than its buffer holds.
	tapEnough = 1000
	// quietEnough is how many may pass it of a Quiet reading.
	quietEnough = 50_000
	// Whether it is enough is looked at after tapLook, then after twice as long each time, up to a second.
	tapLook = 20 * time.Millisecond
)

// internetOnly lets packets by that leave for an address of the Internet, or come in
// from one for an address that is private (of IPv6 a unique local one, RFC 4193): their first
// bytes.
var internetOnly = func() []unix.SockFilter {
	const (
		ancillary = 0xfffff000 // SKF_AD_OFF
		protocol  = ancillary + 0
		kind      = ancillary + 4
		source    = 12
		dest      = 16
		source6   = 8
		dest6     = 24
	)
	load := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: k}
	}
	// A jump that is not yet known where to is a block's end: to the next block, to accept or to drop.
	const next, accept, drop = 0, 250, 251
	var out []unix.SockFilter
	add := func(f ...unix.SockFilter) { out = append(out, f...) }
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	// inside compares what is at an offset with the networks that mean something within a site only.
	inside := func(at uint32, yes uint8) {
		for _, n := range []struct{ mask, net uint32 }{
			{0xff000000, 10 << 24}, {0xfff00000, 172<<24 | 16<<16}, {0xffff0000, 192<<24 | 168<<16}, {0xffc00000, 100<<24 | 64<<16},
			{0xff000000, 127 << 24}, {0xffff0000, 169<<24 | 254<<16}, {0xff000000, 0},
		} {
			add(load(at), unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: n.mask}, equal(n.net, yes, next))
		}
	}
	multicast := func(at uint32) {
		add(load(at), unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: 224 << 24, Jt: drop})
	}
	// lies says whether the first bits of an IPv6 address are those.
	lies := func(at, mask, net uint32, yes, no uint8) {
		add(load(at), unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask}, equal(net, yes, no))
	}
	global := func(at uint32, yes uint8) { lies(at, 0xe0000000, 0x20000000, yes, drop) }
	// otherwise has the jump at i go here if it is not equal.
	otherwise := func(i int) { out[i].Jf = uint8(len(out) - i - 1) }

	add(load(protocol), equal(unix.ETH_P_IP, next, 0), load(kind))
	four := 1
	outgoing := len(out)
	add(equal(unix.PACKET_OUTGOING, next, 0))
	inside(dest, drop)
	multicast(dest)
	add(unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: accept})
	otherwise(outgoing)
	add(equal(unix.PACKET_HOST, next, drop))
	inside(source, drop)
	multicast(source)
	inside(dest, accept)
	add(unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: drop})

	otherwise(four)
	add(equal(unix.ETH_P_IPV6, next, drop), load(kind))
	outgoing = len(out)
	add(equal(unix.PACKET_OUTGOING, next, 0))
	global(dest6, accept)
	otherwise(outgoing)
	add(equal(unix.PACKET_HOST, next, drop))
	global(source6, next)
	lies(dest6, 0xfe000000, 0xfc000000, accept, drop)
	add(unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0}, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 64})
	last := len(out) - 1
	for i := range out {
		to := func(j uint8) uint8 {
			switch j {
			case accept:
				return uint8(last - i - 1)
			case drop:
				return uint8(last - 1 - i - 1)
			}
			return j
		}
		if out[i].Code&7 != unix.BPF_JMP {
			continue
		}
		if out[i].Code&0xf0 == unix.BPF_JA {
			out[i].K = uint32(to(uint8(out[i].K)))
			continue
		}
		out[i].Jt, out[i].Jf = to(out[i].Jt), to(out[i].Jf)
	}
	return out
}()

func openLeaving(quiet bool) (*packetTap, error) {
	t, err := tap{kind: unix.SOCK_DGRAM, filter: internetOnly, protocol: unix.ETH_P_ALL, enough: tapEnough, quiet: quiet}.open()
	if err != nil {
		return nil, fmt.Errorf("look at packets that leave: %w", err)
	}
	return t, nil
}

// tap is which packets a packetTap gets.
type tap struct {
	kind     int // of the socket
	filter   []unix.SockFilter
	protocol uint16 // ETH_P_*
	tags     bool   // with VLAN tags
	incoming bool   // nothing that leaves, which would be copied for the filter to refuse it
	// The tap ends when it has accepted so many (0: any number) and, if quiet, when so many have passed the namespace that
	// to look at each would slow them.
	enough int
	quiet  bool
}

// open listens on all interfaces of the namespace of the calling thread.
func (o tap) open() (*packetTap, error) {
	fd, err := unix.Socket(unix.AF_PACKET, o.kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0) // no packets yet
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", err)
	}
	program := unix.SockFprog{Len: uint16(len(o.filter)), Filter: &o.filter[0]}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	if err == nil && o.tags {
		err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1)
	}
	if err == nil && o.incoming {
		err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 256<<10)
	}
	var devices *os.File
	if err == nil && o.quiet {
		devices, err = os.Open("/proc/thread-self/net/dev")
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(o.protocol)})
	}
	if err != nil {
		devices.Close()
		unix.Close(fd)
		return nil, err
	}
	t := &packetTap{fd: fd}
	if o.enough > 0 || o.quiet {
		t.end = make(chan struct{})
		t.done.Go(func() {
			defer devices.Close()
			t.watch(o.enough, devices)
		})
	}
	return t, nil
}

// watch ends the tap where it has accepted so many packets, if that is not 0, or where quietEnough have passed the namespace
// of an open /proc/net/dev, if that is not nil.
func (t *packetTap) watch(enough int, devices *os.File) {
	accepted, begin := 0, devicePackets(devices)
	for every := tapLook; ; every = min(2*every, time.Second) {
		select {
		case <-t.end:
			return
		case <-time.After(every):
		}
		stats, err := unix.GetsockoptTpacketStats(t.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS) // since the last time
		if err == nil {
			accepted += int(min(stats.Packets, tapEnough))
		}
		if err != nil || enough > 0 && accepted >= enough || devicePackets(devices)-begin >= quietEnough {
			t.mute()
			return
		}
	}
}

// devicePackets is how many packets all interfaces of a namespace have received and sent, by an open /proc/net/dev. It falls
// when an interface goes.
func devicePackets(devices *os.File) (n int64) {
	if devices == nil {
		return 0
	}
	_, _ = devices.Seek(0, io.SeekStart)
	text, _ := io.ReadAll(devices)
	for line := range bytes.Lines(text) {
		_, counters, ok := bytes.Cut(line, []byte(":"))
		if fields := bytes.Fields(counters); ok && len(fields) > 9 {
			for _, i := range []int{1, 9} { // received, sent
				count, _ := strconv.ParseInt(string(fields[i]), 10, 64)
				n += count
			}
		}
	}
	return n
}

// mute takes the socket off the packets' way, and what it has out of the socket: packets that the kernel has to keep make
// all others dearer (docs/monitor.md). A bind to another interface does the first, and loopback has the same number everywhere.
func (t *packetTap) mute() {
	_ = unix.Bind(t.fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: 1})
	_ = t.receive(func(f tappedFrame) {
		f.bytes = bytes.Clone(f.bytes)
		t.held = append(t.held, f)
	})
}

// unwatch leaves the tap as it is.
func (t *packetTap) unwatch() {
	if t.end != nil {
		close(t.end)
		t.done.Wait()
		t.end = nil
	}
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// readLeaving is what the socket has seen, by interface.
func (t *packetTap) readLeaving() ([]snapshot.Leaving, error) {
	c := leavingCounter{rows: map[leavingPlace]*snapshot.Leaving{}, own: ownAddresses(), reachedBy: map[netip.Addr]string{}}
	err := t.each(func(f tappedFrame) {
		if packet, ok := parseLeaving(f.bytes); ok {
			c.add(packet, f)
		}
	})
	return c.result(), err
}

// leavingCounter counts packets by interface and family.
type leavingCounter struct {
	rows      map[leavingPlace]*snapshot.Leaving
	own       map[netip.Addr]bool
	reachedBy map[netip.Addr]string // the interface that a source is reached by
}

type leavingPlace struct {
	link int
	six  bool
}

func (c *leavingCounter) add(packet leavingPacket, f tappedFrame) {
	at := leavingPlace{f.link, packet.src.Is6()}
	row := c.rows[at]
	if row == nil {
		row = &snapshot.Leaving{Samples: []string{}} // none known is not unknown
		if at.six {
			row.Family = "ipv6"
		}
		c.rows[at] = row
	}
	if to, ok := packet.udpTo(); ok && f.kind == unix.PACKET_OUTGOING && len(row.Datagrams) < snapshot.MaxDatagrams && !slices.Contains(row.Datagrams, snapshot.EndpointOf(to)) {
		row.Datagrams = append(row.Datagrams, snapshot.EndpointOf(to))
	}
	switch {
	case packet.midConnection():
		// What connection tracking takes for invalid leaves so everywhere, most of it ends of connections.
	case f.kind == unix.PACKET_HOST:
		if !c.own[packet.dst] {
			row.Back++
		}
	case c.foreign(packet.src, f.link):
		row.Inside++
		if len(row.Samples) < maxLeavingSamples {
			if s := packet.String(); !slices.Contains(row.Samples, s) {
				row.Samples = append(row.Samples, s)
			}
		}
	default:
		row.Others++
	}
}

// foreign says whether a source means something within a site only, is not this machine's, and is
// reached by another interface.
func (c *leavingCounter) foreign(src netip.Addr, index int) bool {
	if !snapshot.OnlyInside(src) || c.own[src] {
		return false
	}
	back, asked := c.reachedBy[src]
	if !asked && len(c.reachedBy) < maxRouteQuestions {
		answer, err := askRoute(snapshot.RouteAnswer{Dest: src}, false)
		if err == nil {
			back = answer.Out
		}
		c.reachedBy[src] = back
	}
	link, err := net.InterfaceByIndex(index)
	return back != "" && err == nil && back != link.Name
}

// result is by the interfaces' names; none is known to be none.
func (c *leavingCounter) result() []snapshot.Leaving {
	out := []snapshot.Leaving{}
	for at, row := range c.rows {
		if link, err := net.InterfaceByIndex(at.link); err == nil {
			row.Interface = link.Name
			out = append(out, *row)
		}
	}
	slices.SortFunc(out, func(a, b snapshot.Leaving) int {
		return cmp.Or(cmp.Compare(a.Interface, b.Interface), cmp.Compare(a.Family, b.Family))
	})
	return out
}

const maxLeavingSamples = 3

// leavingPacket is what the tap's bytes say of a packet.
type leavingPacket struct {
	src, dst netip.Addr
	protocol byte
	payload  []byte // what is there of it; nothing of a fragment behind the first
}

// parseLeaving reads the first bytes of a packet, of IPv6 one without extension headers.
func parseLeaving(b []byte) (p leavingPacket, ok bool) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		header := int(b[0]&15) * 4
		p.src, p.dst, p.protocol = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9]
		if binary.BigEndian.Uint16(b[6:])&0x1fff == 0 {
			p.payload = b[min(max(header, 20), len(b)):]
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		p.src, p.dst, p.protocol = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), b[6]
		p.payload = b[40:]
	default:
		return p, false
	}
	return p, true
}

// midConnection says whether it is of TCP and does not show that it opens a connection or answers one that
// is being opened.
func (p leavingPacket) midConnection() bool {
	const flags, syn = 13, 2
	return p.protocol == unix.IPPROTO_TCP && (len(p.payload) <= flags || p.payload[flags]&syn == 0)
}

// udpTo is where a datagram goes.
func (p leavingPacket) udpTo() (netip.AddrPort, bool) {
	if p.protocol != unix.IPPROTO_UDP || len(p.payload) < 4 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(p.dst, binary.BigEndian.Uint16(p.payload[2:])), true
}

// String writes it as the tracer of drops does.
func (p leavingPacket) String() string {
	name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_IGMP: "igmp", unix.IPPROTO_ICMPV6: "icmpv6"}[p.protocol]
	name = cmp.Or(name, fmt.Sprintf("protocol %d", p.protocol))
	if (name == "tcp" || name == "udp") && len(p.payload) >= 4 {
		port := func(at int) uint16 { return binary.BigEndian.Uint16(p.payload[at:]) }
		return fmt.Sprintf("%s %s -> %s", name, netip.AddrPortFrom(p.src, port(0)), netip.AddrPortFrom(p.dst, port(2)))
	}
	return fmt.Sprintf("%s %s -> %s", name, p.src, p.dst)
}

// ownAddresses are those of the interfaces of the calling thread's namespace.
func ownAddresses() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	list, _ := net.InterfaceAddrs()
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				own[addr.Unmap()] = true
			}
		}
	}
	return own
}

func (t *packetTap) close() {
	t.unwatch()
	unix.Close(t.fd)
}
