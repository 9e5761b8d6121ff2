// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// frames samples what no counter of the stack tells of: frames for other hardware addresses
// and VLANs, packets that come by again with a smaller TTL, and ARP. It asks once, as a host
// does that is about to take an address (RFC 5227), whether anybody else has one of this
// machine's own, or that of a neighbour in use; nobody notes such a question. One with this machine's
// address in it would tell the neighbours where this machine is, and so hide that they can't find out.
func frames(opts Options) source {
	var tap *framesTap
	stop := func() {
		if tap != nil {
			tap.close()
			tap = nil
		}
	}
	return source{
		name:  snapshot.CanFrames,
		costs: "frames for another hardware address or VLAN, duplicate addresses, ARP requests without a reply, and loops that end on another router are not found",
		live:  true,
		start: func(*view) (err error) {
			if tap, err = openFrames(opts.Quiet, opts.ARPReplies); err == nil && !opts.Quiet {
				tap.askForDuplicates()
			}
			return err
		},
		end: func(_ *view, s *snapshot.Snapshot) (err error) {
			s.Frames, err = tap.read()
			stop()
			return err
		},
		stop: stop,
	}
}

const (
	// A filter compares with so many interfaces and VLANs at most: each takes every packet
	// some nanoseconds.
	maxFrameLinks = 64
	maxFrameVLANs = 64
	maxFrameAddrs = 64
	// maxFrameRows bounds each list of the result.
	maxFrameRows = 40

	// lowTTL is how many hops a packet has left that is looked at for going in circles: so many
	// that it comes by three times, once for every second hop.
	lowTTL = 6

	frameBytes = 14 + 64
)

// framesTap is two packet sockets: ARP is rare, and must not be crowded out by frames of others.
type framesTap struct {
	arp    *packetTap
	astray *packetTap
	links  map[int]frameLink
	own    map[string]bool // hardware addresses of this namespace's interfaces
}

// frameLink is an interface whose frames are looked at.
type frameLink struct {
	name  string
	mac   net.HardwareAddr
	addrs []netip.Prefix // of IPv4
	asks  bool           // an ARP request has a way to go
}

func newFramesTap() *framesTap { return &framesTap{links: map[int]frameLink{}, own: map[string]bool{}} }

// openFrames listens; quiet and replies are Quiet and ARPReplies of Options.
func openFrames(quiet, replies bool) (*framesTap, error) {
	t := newFramesTap()
	vlans, err := t.chooseLinks()
	if err != nil {
		return nil, err
	}
	if len(t.links) == 0 {
		return t, nil
	}
	indexes := make([]int, 0, len(t.links))
	for index := range t.links {
		indexes = append(indexes, index)
	}
	slices.Sort(indexes)
	raw := tap{kind: unix.SOCK_RAW, protocol: unix.ETH_P_ALL, tags: true}
	arp, astray := raw, raw
	arp.filter, arp.quiet = arpFilter(indexes), quiet && !replies
	if t.arp, err = arp.open(); err != nil {
		return nil, fmt.Errorf("look at ARP: %w", err)
	}
	astray.filter, astray.incoming, astray.enough, astray.quiet = astrayFilter(indexes, vlans), true, tapEnough, quiet
	if t.astray, err = astray.open(); err != nil {
		t.close()
		return nil, fmt.Errorf("look at frames: %w", err)
	}
	return t, nil
}

// chooseLinks finds the interfaces to look at and the VLANs that there are. Ports of a
// bridge, bond or team get frames for everybody: that is what they are for.
func (t *framesTap) chooseLinks() (vlans []int, err error) {
	links, err := listWhole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	addrs, err := listWhole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	kinds := map[int]string{}
	for _, l := range links {
		kinds[l.Attrs().Index] = l.Type()
	}
	for _, l := range links {
		a := l.Attrs()
		t.own[a.HardwareAddr.String()] = true
		if v, ok := l.(*netlink.Vlan); ok && len(vlans) < maxFrameVLANs {
			vlans = append(vlans, v.VlanId)
		}
		port := a.MasterIndex != 0 && kinds[a.MasterIndex] != "vrf"
		if port || len(a.HardwareAddr) != 6 || a.Flags&net.FlagUp == 0 || a.Flags&net.FlagLoopback != 0 || len(t.links) >= maxFrameLinks {
			continue
		}
		link := frameLink{name: a.Name, mac: a.HardwareAddr, asks: speaksARP(a)}
		for _, addr := range addrs {
			if p, ok := prefixOf(addr.IPNet); ok && addr.LinkIndex == a.Index {
				link.addrs = append(link.addrs, p)
			}
		}
		t.links[a.Index] = link
	}
	return vlans, nil
}

// speaksARP says whether ARP is spoken on an interface now: a broadcast network that has a carrier.
func speaksARP(a *netlink.LinkAttrs) bool {
	const has, lacks = unix.IFF_BROADCAST | unix.IFF_LOWER_UP, unix.IFF_NOARP | unix.IFF_POINTOPOINT | unix.IFF_LOOPBACK
	return a.RawFlags&(has|lacks) == has
}

// askForDuplicates sends an ARP probe for each of this machine's own addresses, and for each of the
// neighbours that it has used last.
func (t *framesTap) askForDuplicates() {
	t.askForOwn(snapshot.AskedNeighbours)
	asked := 0
	for _, n := range neighboursInUse() {
		addr, _ := netip.AddrFromSlice(n.IP.To4())
		l := t.links[n.LinkIndex]
		near := slices.ContainsFunc(l.addrs, func(own netip.Prefix) bool { return own.Contains(addr) })
		if l.asks && near && asked < snapshot.AskedNeighbours {
			asked++
			t.ask(n.LinkIndex, l, addr)
		}
	}
}

// askForOwn sends one for each address that the namespace of the calling thread has now, at most so many, and returns how
// many it sent. It has to be now: an address may just have moved to a machine that asks for it itself, and a probe
// of somebody else would keep that from taking it.
func (t *framesTap) askForOwn(most int) (asked int) {
	now := newFramesTap()
	if _, err := now.chooseLinks(); err != nil {
		return 0
	}
	for index, l := range now.links {
		if _, heard := t.links[index]; !heard || !l.asks {
			continue
		}
		for _, own := range l.addrs {
			if asked < most {
				asked++
				t.ask(index, l, own.Addr())
			}
		}
	}
	return asked
}

// ask sends a probe for an address. A link that takes nothing now has no replies either.
func (t *framesTap) ask(index int, l frameLink, addr netip.Addr) {
	to := &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ARP), Ifindex: index, Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
	_ = unix.Sendto(t.arp.fd, arpProbe(l.mac, addr), 0, to)
}

// neighboursInUse are the neighbours of IPv4 with a hardware address, those used last first. An
// interrupted list has still most of them.
func neighboursInUse() []netlink.Neigh {
	const known = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
	list, _ := listWhole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_V4) })
	list = slices.DeleteFunc(list, func(n netlink.Neigh) bool { return n.State&known == 0 })
	slices.SortStableFunc(list, func(a, b netlink.Neigh) int { return cmp.Compare(a.Used, b.Used) })
	return list
}

// arpProbe is a frame that asks who has an address, and says nothing of the asker (RFC 5227, 2.1.1).
func arpProbe(from net.HardwareAddr, addr netip.Addr) []byte {
	b := make([]byte, 0, 42)
	b = append(b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)
	b = append(b, from...)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_ARP)
	b = append(b, 0, 1, 8, 0, 6, 4, 0, 1) // Ethernet, IPv4, request
	b = append(b, from...)
	b = append(b, make([]byte, 4+6)...)
	return append(b, addr.AsSlice()...)
}

func (t *framesTap) read() (*snapshot.Frames, error) {
	out := &snapshot.Frames{}
	if t.arp == nil {
		return out, nil
	}
	known := map[string]bool{}
	if err := t.readARP(out, known); err != nil {
		return nil, err
	}
	if err := t.readAstray(out, known); err != nil {
		return nil, err
	}
	return out, nil
}

// arpPacket is what ARP says.
type arpPacket struct {
	request            bool
	senderMAC          string
	sender, target     netip.Addr
	fromMAC, toMAC     string // of the frame
	outgoing, toMyself bool
	elsewhere          bool // for another host
}

func parseARP(f tappedFrame) (p arpPacket, ok bool) {
	b := f.bytes
	if len(b) < 42 || binary.BigEndian.Uint16(b[14:]) != 1 || binary.BigEndian.Uint16(b[16:]) != unix.ETH_P_IP || b[18] != 6 || b[19] != 4 {
		return p, false
	}
	op := binary.BigEndian.Uint16(b[20:])
	p = arpPacket{
		request:   op == 1,
		toMAC:     net.HardwareAddr(b[:6]).String(),
		fromMAC:   net.HardwareAddr(b[6:12]).String(),
		senderMAC: net.HardwareAddr(b[22:28]).String(),
		sender:    netip.AddrFrom4([4]byte(b[28:])),
		target:    netip.AddrFrom4([4]byte(b[38:])),
		outgoing:  f.kind == unix.PACKET_OUTGOING,
		toMyself:  f.kind == unix.PACKET_HOST,
		elsewhere: f.kind == unix.PACKET_OTHERHOST,
	}
	return p, op == 1 || op == 2
}

// readARP finds who claims which address, and which requests were answered.
func (t *framesTap) readARP(out *snapshot.Frames, known map[string]bool) error {
	seen, err := t.hearARP(known)
	out.Asked, out.Claims = seen.questions(), seen.claimed()
	return err
}

// hearARP reads what came; known gets the hardware addresses of the senders.
func (t *framesTap) hearARP(known map[string]bool) (seen arpSeen, err error) {
	seen = arpSeen{own: ownAddresses(), routers: routersHere(), answered: map[arpPair]uint64{}, asked: map[arpPair]*snapshot.ARPQuestion{}, tagged: map[arpPair]bool{},
		claims: map[arpClaim]*snapshot.AddressClaim{}}
	err = t.arp.each(func(f tappedFrame) {
		p, ok := parseARP(f)
		link, here := t.links[f.link]
		switch {
		case !ok || !here:
			return
		case p.outgoing:
			if !p.request {
				seen.answered[arpPair{p.sender, p.target}]++
			}
			return
		}
		known[p.fromMAC], known[p.senderMAC] = true, true
		if !p.sender.IsUnspecified() && !t.own[p.senderMAC] {
			seen.add(p, link.name, f.vlan)
		}
	})
	return seen, err
}

// arpSeen is what others said by ARP, and what this machine answered.
type arpSeen struct {
	own, routers map[netip.Addr]bool
	answered     map[arpPair]uint64
	asked        map[arpPair]*snapshot.ARPQuestion
	tagged       map[arpPair]bool // with that of a VLAN that has no interface, as the kernel takes them for another host's
	claims       map[arpClaim]*snapshot.AddressClaim
}

type arpPair struct{ addr, asker netip.Addr }

type arpClaim struct {
	link string
	addr netip.Addr
	mac  string
}

// add counts a packet of another machine that names its address.
func (s *arpSeen) add(p arpPacket, link string, vlan uint16) {
	claim := arpClaim{link, p.sender, p.senderMAC}
	if s.claims[claim] == nil {
		s.claims[claim] = &snapshot.AddressClaim{Interface: link, Addr: p.sender, MAC: p.senderMAC, Own: s.own[p.sender], Router: s.routers[p.sender]}
	}
	s.claims[claim].Count++
	if !p.request && p.toMyself {
		s.claims[claim].Replies++
	}
	if p.request && s.own[p.target] && p.sender != p.target {
		pair := arpPair{p.target, p.sender}
		if s.asked[pair] == nil {
			s.asked[pair] = &snapshot.ARPQuestion{Interface: link, VLAN: vlan, Addr: p.target, Asker: p.sender, MAC: p.senderMAC}
		}
		s.asked[pair].Count++
		s.tagged[pair] = s.tagged[pair] || p.elsewhere
	}
}

// questions are the requests for this machine's addresses, those without a reply first.
func (s *arpSeen) questions() (out []snapshot.ARPQuestion) {
	for pair, q := range s.asked {
		q.Answered = s.answered[pair]
		out = append(out, *q)
	}
	slices.SortFunc(out, func(a, b snapshot.ARPQuestion) int {
		return cmp.Or(cmp.Compare(b.Count-min(b.Count, b.Answered), a.Count-min(a.Count, a.Answered)), a.Addr.Compare(b.Addr), a.Asker.Compare(b.Asker))
	})
	return out[:min(len(out), maxFrameRows)]
}

// claimed are the claims: of this machine's addresses first, then of routers', then of addresses that
// several hardware addresses claim.
func (s *arpSeen) claimed() (out []snapshot.AddressClaim) {
	claimants := map[netip.Addr]int{}
	for claim, c := range s.claims {
		claimants[claim.addr]++
		out = append(out, *c)
	}
	rank := func(c snapshot.AddressClaim) int {
		switch {
		case c.Own:
			return 0
		case c.Router:
			return 1
		case claimants[c.Addr] > 1:
			return 2
		}
		return 3
	}
	slices.SortFunc(out, func(a, b snapshot.AddressClaim) int {
		return cmp.Or(rank(a)-rank(b), cmp.Compare(b.Count, a.Count), a.Addr.Compare(b.Addr), cmp.Compare(a.MAC, b.MAC))
	})
	return out[:min(len(out), maxFrameRows)]
}

// routersHere are the next hops of routes of the calling thread's namespace, as far as a thousand
// routes show them.
func routersHere() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	left := 1000
	_ = netlink.RouteListFilteredIter(netlink.FAMILY_V4, &netlink.Route{}, 0, func(r netlink.Route) bool {
		for _, gw := range append([]net.IP{r.Gw}, hopsOf(r)...) {
			if a, ok := netip.AddrFromSlice(gw.To4()); ok {
				out[a] = true
			}
		}
		left--
		return left > 0
	})
	return out
}

func hopsOf(r netlink.Route) (out []net.IP) {
	for _, hop := range r.MultiPath {
		out = append(out, nextHop(hop))
	}
	return out
}

// readAstray finds frames that the stack did not take, and packets that came by more than once.
func (t *framesTap) readAstray(out *snapshot.Frames, known map[string]bool) error {
	for mac := range t.neighbourMACs() {
		known[mac] = true
	}
	astray := map[string]*snapshot.AstrayFrames{}
	circles := circles{}
	err := t.astray.each(func(f tappedFrame) {
		link, here := t.links[f.link]
		if !here || len(f.bytes) < 14 {
			return
		}
		packet, ok := parseLeaving(f.bytes[14:])
		to, from := net.HardwareAddr(f.bytes[:6]).String(), net.HardwareAddr(f.bytes[6:12]).String()
		known[from] = true
		switch {
		case !ok:
		case f.vlan == 0 && f.kind == unix.PACKET_HOST:
			circles.add(link.name, packet, f.bytes[14:])
		default:
			key := fmt.Sprint(link.name, f.vlan, from, to)
			if astray[key] == nil {
				astray[key] = &snapshot.AstrayFrames{Interface: link.name, VLAN: f.vlan, From: from, To: to, Source: packet.src, Dest: packet.dst}
			}
			astray[key].Count++
		}
	})
	for _, a := range astray {
		a.Known = known[a.To] || t.own[a.To]
		out.Astray = append(out.Astray, *a)
	}
	slices.SortFunc(out.Astray, func(a, b snapshot.AstrayFrames) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	out.Astray = out.Astray[:min(len(out.Astray), maxFrameRows)]
	out.Circles = circles.rows()
	return err
}

// neighbourMACs are the hardware addresses of this namespace's neighbours that were of use lately. An
// interrupted list has still most of them.
func (t *framesTap) neighbourMACs() map[string]bool {
	out := map[string]bool{}
	list, _ := listWhole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	for _, n := range list {
		if n.State&(netlink.NUD_REACHABLE|netlink.NUD_DELAY|netlink.NUD_PROBE) != 0 {
			out[n.HardwareAddr.String()] = true
		}
	}
	return out
}

// circles counts packets by how often they came by. A packet is one by its addresses, its
// identification and the first bytes of what it carries: those that traceroute sends one after the other
// differ in one of these.
type circles map[circlePacket]map[byte]bool // the hops that it had left

type circlePacket struct {
	link     string
	src, dst netip.Addr
	id       uint16
	payload  [8]byte
	text     string
}

func (c circles) add(link string, p leavingPacket, b []byte) {
	if !p.src.Is4() || p.dst.IsMulticast() {
		return
	}
	key := circlePacket{link: link, src: p.src, dst: p.dst, id: binary.BigEndian.Uint16(b[4:]), text: p.String()}
	copy(key.payload[:], p.payload)
	if c[key] == nil {
		c[key] = map[byte]bool{}
	}
	c[key][b[8]] = true
}

func (c circles) rows() (out []snapshot.Circle) {
	for p, hops := range c {
		if len(hops) < 2 {
			continue
		}
		i := slices.IndexFunc(out, func(r snapshot.Circle) bool { return r.Interface == p.link && r.Source == p.src && r.Dest == p.dst })
		if i < 0 {
			out = append(out, snapshot.Circle{Interface: p.link, Source: p.src, Dest: p.dst, Sample: p.text})
			i = len(out) - 1
		}
		out[i].Packets++
		out[i].Sample = min(out[i].Sample, p.text)
	}
	slices.SortFunc(out, func(a, b snapshot.Circle) int {
		return cmp.Or(cmp.Compare(b.Packets, a.Packets), a.Dest.Compare(b.Dest), a.Source.Compare(b.Source))
	})
	return out[:min(len(out), maxFrameRows)]
}

func (t *framesTap) close() {
	for _, tap := range []*packetTap{t.arp, t.astray} {
		if tap != nil {
			tap.close()
		}
	}
}

// tappedFrame is one frame of a packet socket.
type tappedFrame struct {
	link  int
	kind  uint8 // PACKET_HOST and the like
	vlan  uint16
	bytes []byte
}

// any says whether the socket has a frame.
func (t *packetTap) any() bool {
	_, _, err := unix.Recvfrom(t.fd, make([]byte, 1), unix.MSG_PEEK)
	return err == nil
}

// each reads what the tap has, and ends its watch.
func (t *packetTap) each(fn func(tappedFrame)) error {
	t.unwatch()
	for _, f := range t.held {
		fn(f)
	}
	t.held = nil
	return t.receive(fn)
}

// receive reads what the socket has, with VLAN tags, which stand beside the frame. fn must not keep its bytes.
func (t *packetTap) receive(fn func(tappedFrame)) error {
	b, control := make([]byte, frameBytes), make([]byte, 128)
	for {
		n, controls, _, from, err := unix.Recvmsg(t.fd, b, control, 0)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if errors.Is(err, unix.ENETDOWN) { // an interface went down, whose frames are here all the same
			continue
		}
		if err != nil {
			return fmt.Errorf("read frames: %w", err)
		}
		link, ok := from.(*unix.SockaddrLinklayer)
		if !ok {
			continue
		}
		fn(tappedFrame{link: link.Ifindex, kind: link.Pkttype, vlan: vlanOf(control[:controls]), bytes: b[:n]})
	}
}

// vlanOf reads struct tpacket_auxdata.
func vlanOf(control []byte) uint16 {
	const vlanValid = 1 << 4 // TP_STATUS_VLAN_VALID
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		if m.Header.Level == unix.SOL_PACKET && m.Header.Type == unix.PACKET_AUXDATA && len(m.Data) >= 20 &&
			binary.NativeEndian.Uint32(m.Data)&vlanValid != 0 {
			return binary.NativeEndian.Uint16(m.Data[16:]) & 0xfff
		}
	}
	return 0
}
