// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/ethtool"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// deviceEnd is one of two devices that are connected over Ethernet.
type deviceEnd struct {
	ns            *netns.Handle
	name, addr    string // of the device
	id            int    // of the tunnel
	under         string // the Ethernet that it is upon; another has the name with a 2 behind it
	local, remote net.IP // of that Ethernet, here and at the other end
	key           *ecdh.PrivateKey
	farKey        *ecdh.PublicKey
	files         []int // that it needs to be open
}

// cable is Ethernet between the gateway and a neighbour, and the devices upon it.
type cable struct {
	peer          *netns.Handle
	under         string // the Ethernet's name in the gateway
	local, remote string // its addresses
	name          string // of the devices
	id            int    // another for each cable
	gateway, far  string // addresses of the devices
}

// deviceKinds make one end of a pair of devices, which has no address and is down. Kinds
// that natkit refuses for the eBPF engine are for the kernel's alone.
var deviceKinds = []struct {
	name       string
	refused    string // what engine ebpf says
	inside     string // likewise of an inside interface
	noEthernet bool
	make       func(e *deviceEnd) error
}{
	{"veth", "", "", false, func(e *deviceEnd) error {
		l, err := netlink.LinkByName(e.under + "2")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, e.name))
	}},
	{"vlan", "", "", false, makeVLAN},
	{"vlan-in-vlan", "", "", false, func(e *deviceEnd) error {
		outer := *e
		outer.name += "s"
		err := makeVLAN(&outer)
		e.under = outer.name
		return errors.Join(err, setUp(outer.name), makeVLAN(e))
	}},
	{"vlan-of-bridge", "", "", false, func(e *deviceEnd) error {
		bridge := e.name + "b"
		err := makeVLANBridge(e, bridge, false)
		e.under = bridge
		return errors.Join(err, setUp(bridge), makeVLAN(e))
	}},
	{"bridge-of-vlan", "", "", false, func(e *deviceEnd) error { return makeVLANBridge(e, e.name, true) }},
	{"bond", "", "", false, func(e *deviceEnd) error {
		bond := netlink.NewLinkBond(netlink.LinkAttrs{Name: e.name})
		bond.Mode = netlink.BOND_MODE_BALANCE_XOR
		bond.Miimon = 100
		return errors.Join(netlink.LinkAdd(bond), e.enslave(e.under), e.enslave(e.under+"2"))
	}},
	{"team", "", "", false, func(e *deviceEnd) error {
		if err := netlink.LinkAdd(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: e.name}, LinkType: "team"}); err != nil {
			return err
		}
		return errors.Join(setTeamMode(e.name, "roundrobin"), e.enslave(e.under), e.enslave(e.under+"2"))
	}},
	{"macvlan", "", "", false, func(e *deviceEnd) error {
		return e.above(func(a netlink.LinkAttrs) netlink.Link {
			return &netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE}
		})
	}},
	{"ipvlan", "", "is an ipvlan: what internal hosts send to others does not come in there", false, func(e *deviceEnd) error {
		return e.above(func(a netlink.LinkAttrs) netlink.Link {
			return &netlink.IPVlan{LinkAttrs: a, Mode: netlink.IPVLAN_MODE_L2}
		})
	}},
	{"vxlan", "", "", false, func(e *deviceEnd) error {
		return e.above(func(a netlink.LinkAttrs) netlink.Link {
			index := a.ParentIndex
			a.ParentIndex = 0
			return &netlink.Vxlan{LinkAttrs: a, VtepDevIndex: index, VxlanId: e.id, SrcAddr: e.local, Group: e.remote, Port: 4789, Learning: true}
		})
	}},
	{"geneve", "", "", false, func(e *deviceEnd) error {
		return netlink.LinkAdd(&netlink.Geneve{LinkAttrs: netlink.LinkAttrs{Name: e.name}, ID: uint32(e.id), Remote: e.remote, Dport: 6081})
	}},
	{"gretap", "", "", false, func(e *deviceEnd) error {
		return netlink.LinkAdd(&netlink.Gretap{LinkAttrs: netlink.LinkAttrs{Name: e.name}, Local: e.local, Remote: e.remote, Ttl: 64, PMtuDisc: 1})
	}},
	{"ipip", "", "", true, func(e *deviceEnd) error {
		return netlink.LinkAdd(&netlink.Iptun{LinkAttrs: netlink.LinkAttrs{Name: e.name}, Local: e.local, Remote: e.remote, Ttl: 64, PMtuDisc: 1})
	}},
	{"wireguard", "", "", true, makeWireGuard},
	{"ppp", "", "", true, makePPPoE},
	{"gre", "(gre): the engine needs Ethernet frames", "", true, func(e *deviceEnd) error {
		return netlink.LinkAdd(&netlink.Gretun{LinkAttrs: netlink.LinkAttrs{Name: e.name}, Local: e.local, Remote: e.remote, Ttl: 64, PMtuDisc: 1})
	}},
}

func setUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

// above makes a device that has another under it.
func (e *deviceEnd) above(device func(netlink.LinkAttrs) netlink.Link) error {
	under, err := netlink.LinkByName(e.under)
	if err != nil {
		return err
	}
	return netlink.LinkAdd(device(netlink.LinkAttrs{Name: e.name, ParentIndex: under.Attrs().Index}))
}

// enslave makes a port of the device.
func (e *deviceEnd) enslave(port string) error {
	l, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	master, err := netlink.LinkByName(e.name)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetMaster(l, master), netlink.LinkSetUp(l))
}

func makeVLAN(e *deviceEnd) error {
	return e.above(func(a netlink.LinkAttrs) netlink.Link { return &netlink.Vlan{LinkAttrs: a, VlanId: e.id} })
}

// vlan makes a VLAN of an Ethernet in one namespace a device of another one.
func (b *testbed) vlan(ns *netns.Handle, under string, id int, home *netns.Handle, name, addr string) {
	b.t.Helper()
	const made = "moves" // the name may be another device's where it is made
	err := ns.Do(func() error {
		if err := makeVLAN(&deviceEnd{name: made, under: under, id: id}); err != nil {
			return err
		}
		l, err := netlink.LinkByName(made)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(l, home.Fd())
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		ktest.Unsupported(b.t, "no VLANs on this kernel: %v", err)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.in(home, func() error {
		l, err := netlink.LinkByName(made)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(addr)
		return errors.Join(err, netlink.LinkSetName(l, name), netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
	})
}

// makeVLANBridge makes a bridge that filters by VLAN, with one that is tagged on its port,
// and either the bridge's own without a tag, or not.
func makeVLANBridge(e *deviceEnd, name string, own bool) error {
	yes := true
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}, VlanFiltering: &yes}); err != nil {
		return err
	}
	bridge, err1 := netlink.LinkByName(name)
	port, err2 := netlink.LinkByName(e.under)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetMaster(port, bridge),
		netlink.BridgeVlanDel(port, 1, true, true, false, true),
		netlink.BridgeVlanDel(bridge, 1, true, true, true, false),
		netlink.BridgeVlanAdd(port, uint16(e.id), false, false, false, true),
		netlink.BridgeVlanAdd(bridge, uint16(e.id), own, own, true, false))
}

// commandGeneric sends a command of a family of generic netlink.
func commandGeneric(family string, command byte, attrs ...*nl.RtAttr) error {
	id := askGeneric(nl.GENL_ID_CTRL, nl.GENL_CTRL_CMD_GETFAMILY, nl.GENL_CTRL_VERSION,
		nl.NewRtAttr(nl.GENL_CTRL_ATTR_FAMILY_NAME, nl.ZeroTerminated(family)), nl.GENL_CTRL_ATTR_FAMILY_ID)
	if len(id) != 2 {
		return fmt.Errorf("generic netlink has no %s", family)
	}
	request := nl.NewNetlinkRequest(int(binary.NativeEndian.Uint16(id)), unix.NLM_F_ACK)
	request.AddData(&genericHeader{command, 1})
	for _, a := range attrs {
		request.AddData(a)
	}
	_, err := request.Execute(unix.NETLINK_GENERIC, 0)
	return err
}

func nested(attr int, children ...*nl.RtAttr) *nl.RtAttr {
	out := nl.NewRtAttr(attr|unix.NLA_F_NESTED, nil)
	for _, c := range children {
		out.AddChild(c)
	}
	return out
}

// setTeamMode does what teamd would (Linux include/uapi/linux/if_team.h).
func setTeamMode(name, mode string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	const set, ifindex, list, item, optionName, optionType, optionData, isString = 1, 1, 2, 1, 1, 3, 4, 5
	err = commandGeneric("team", set, nl.NewRtAttr(ifindex, nl.Uint32Attr(uint32(l.Attrs().Index))),
		nested(list, nested(item, nl.NewRtAttr(optionName, nl.ZeroTerminated("mode")), nl.NewRtAttr(optionType, []byte{isString}), nl.NewRtAttr(optionData, nl.ZeroTerminated(mode)))))
	if errors.Is(err, unix.ESRCH) { // the mode is set; nobody listens to such news
		return nil
	}
	return err
}

// makeWireGuard does what wg would (Linux include/uapi/linux/wireguard.h).
func makeWireGuard(e *deviceEnd) error {
	if err := netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: e.name}}); err != nil {
		return err
	}
	port := uint16(51820 + e.id)
	const set, ifname, private, listen, peers, public, endpoint, allowed, family, address, bits = 1, 2, 3, 6, 8, 1, 4, 9, 1, 2, 3
	where := make([]byte, unix.SizeofSockaddrInet4)
	binary.NativeEndian.PutUint16(where, unix.AF_INET)
	binary.BigEndian.PutUint16(where[2:], port)
	copy(where[4:], e.remote.To4())
	return commandGeneric("wireguard", set,
		nl.NewRtAttr(ifname, nl.ZeroTerminated(e.name)), nl.NewRtAttr(private, e.key.Bytes()), nl.NewRtAttr(listen, nl.Uint16Attr(port)),
		nested(peers, nested(0, nl.NewRtAttr(public, e.farKey.Bytes()), nl.NewRtAttr(endpoint, where),
			nested(allowed, nested(0, nl.NewRtAttr(family, nl.Uint16Attr(unix.AF_INET)), nl.NewRtAttr(address, make([]byte, 4)), nl.NewRtAttr(bits, []byte{0}))))))
}

// makePPPoE does what pppd does when both ends have agreed: a session of PPPoE, and a
// device that has it as its only channel. Both live as long as their files.
func makePPPoE(e *deviceEnd) error {
	mac := func(ip net.IP) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, ip[len(ip)-1]} }
	session, err := unix.Socket(unix.AF_PPPOX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return unix.EOPNOTSUPP
	}
	if err != nil {
		return err
	}
	channel, err1 := unix.Open("/dev/ppp", unix.O_RDWR|unix.O_CLOEXEC, 0)
	unit, err2 := unix.Open("/dev/ppp", unix.O_RDWR|unix.O_CLOEXEC, 0)
	e.files = append(e.files, session, channel, unit)
	under, err3 := netlink.LinkByName(e.under)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	if err := netlink.LinkSetHardwareAddr(under, mac(e.local)); err != nil {
		return err
	}
	if err := unix.Connect(session, &unix.SockaddrPPPoE{SID: 7, Remote: mac(e.remote), Dev: e.under}); err != nil {
		return fmt.Errorf("connect PPPoE: %w", err)
	}
	channelNumber, err1 := unix.IoctlGetInt(session, unix.PPPIOCGCHAN)
	const deviceFile = 1 // IFLA_PPP_DEV_FD
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(e.name)))
	request.AddData(nested(unix.IFLA_LINKINFO, nl.NewRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("ppp")),
		nested(nl.IFLA_INFO_DATA, nl.NewRtAttr(deviceFile, nl.Uint32Attr(uint32(unit))))))
	_, err2 = request.Execute(unix.NETLINK_ROUTE, 0)
	unitNumber, err3 := unix.IoctlGetInt(unit, unix.PPPIOCGUNIT)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("PPP device: %w", err)
	}
	device, err := netlink.LinkByName(e.name)
	if err != nil {
		return err
	}
	return errors.Join(unix.IoctlSetPointerInt(channel, unix.PPPIOCATTCHAN, channelNumber),
		unix.IoctlSetPointerInt(channel, unix.PPPIOCCONNECT, unitNumber), netlink.LinkSetMTU(device, 1492))
}

// plug puts a pair of devices upon the Ethernet between the gateway and a neighbour.
func (b *testbed) plug(kind func(*deviceEnd) error, c cable) {
	b.t.Helper()
	const second = "2"
	b.in(b.gateway, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: c.under + second}, PeerName: "eth0" + second, PeerNamespace: netlink.NsFd(c.peer.Fd())})
	})
	ends := []*deviceEnd{
		{ns: b.gateway, name: c.name, id: c.id, under: c.under, local: net.ParseIP(c.local), remote: net.ParseIP(c.remote), addr: c.gateway},
		{ns: c.peer, name: c.name, id: c.id, under: "eth0", local: net.ParseIP(c.remote), remote: net.ParseIP(c.local), addr: c.far},
	}
	for _, e := range ends {
		var err error
		if e.key, err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			b.t.Fatal(err)
		}
	}
	for i, e := range ends {
		e.farKey = ends[1-i].key.PublicKey()
		err := e.ns.Do(func() error {
			// What is under a device has an address of its own, and is not to answer for those above.
			if err := errors.Join(writeSetting("net.ipv4.conf.all.arp_ignore", "1"), setUp(e.under+second), kind(e)); err != nil {
				return err
			}
			l, err := netlink.LinkByName(e.name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(e.addr)
			return errors.Join(err, netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		})
		b.t.Cleanup(func() {
			for _, f := range e.files {
				unix.Close(f)
			}
		})
		if errors.Is(err, unix.EOPNOTSUPP) {
			ktest.Unsupported(b.t, "no such devices on this kernel: %v", err)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
	for _, e := range ends {
		ktest.Wait(b.t, 10*time.Second, e.name+" runs", func() (runs bool) {
			b.in(e.ns, func() error {
				l, err := netlink.LinkByName(e.name)
				runs = err == nil && l.Attrs().RawFlags&unix.IFF_RUNNING != 0
				return err
			})
			return runs
		})
	}
}

// passXDP has what XDP sends to the veths of a namespace arrive there, and what they send
// be fit for it.
func (b *testbed) passXDP(ns *netns.Handle) {
	b.t.Helper()
	b.in(ns, func() error {
		pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
		if err != nil {
			return err
		}
		defer pass.Close()
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			if l.Type() != "veth" {
				continue
			}
			attached, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
			if err != nil {
				return err
			}
			b.t.Cleanup(func() { attached.Close() })
			if err := wholeChecksums(l.Attrs().Name); err != nil {
				return err
			}
		}
		return nil
	})
}

// wholeChecksums has the kernel compute checksums before a packet leaves by a device: who
// takes it by XDP is not told that one is only begun.
func wholeChecksums(name string) error {
	c, err := ethtool.Open()
	if err != nil {
		return err
	}
	defer c.Close()
	off := struct{ cmd, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	return c.Request(name, unsafe.Pointer(&off))
}

// watch looks at every IPv4 packet that comes in by a device, until the test ends: each
// must be from that address, and what an ICMP error quotes must have been to it.
func (b *testbed) watch(ns *netns.Handle, name, from string) {
	b.t.Helper()
	var socket int
	const all = unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8
	b.in(ns, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 1000}),
			unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Attrs().Index}))
	})
	b.t.Cleanup(func() {
		defer unix.Close(socket)
		seen, errs := 0, 0
		for p := make([]byte, 1<<16); ; {
			n, about, err := unix.Recvfrom(socket, p, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				break
			}
			if about.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING || n < 20 {
				continue
			}
			seen++
			if src := net.IP(p[12:16]).String(); src != from {
				b.t.Errorf("a packet from %s to %s left the gateway", src, net.IP(p[16:20]))
			}
			if p[9] == unix.IPPROTO_ICMP && n >= 48 && p[20] == 3 {
				errs++
				if dst := net.IP(p[44:48]).String(); dst != from {
					b.t.Errorf("an ICMP error that left the gateway quotes a packet to %s", dst)
				}
			}
		}
		if seen < 100 || errs == 0 {
			b.t.Errorf("%d packets were seen at the far side, %d of them ICMP errors", seen, errs)
		}
	})
}

// datagrams passes numbered ones of several sizes to and fro, the last one after the other
// has arrived: none is lost.
func (b *testbed) datagrams(from, to *netns.Handle, dialed, heard, seen string) {
	b.t.Helper()
	var s net.PacketConn
	var c net.Conn
	b.in(to, bound(func() (err error) { s, err = net.ListenPacket("udp4", heard); return err }))
	b.in(from, func() (err error) { c, err = net.Dial("udp4", dialed); return err })
	defer s.Close()
	defer c.Close()
	deadline := time.Now().Add(patience)
	s.SetDeadline(deadline)
	c.SetDeadline(deadline)
	var who net.Addr
	got := make([]byte, 1<<16)
	for i := range 100 {
		data := make([]byte, []int{12, 1000, 1400, 4000}[i%4])
		rand.Read(data)
		binary.BigEndian.PutUint32(data, uint32(i))
		if _, err := c.Write(data); err != nil {
			b.t.Fatal(err)
		}
		n, addr, err := s.ReadFrom(got)
		if err != nil {
			b.t.Fatalf("datagram %d of %d bytes to %s: %v", i, len(data), dialed, err)
		}
		if !bytes.Equal(got[:n], data) {
			b.t.Fatalf("datagram %d of %d bytes to %s: %d bytes arrived, number %d", i, len(data), dialed, n, binary.BigEndian.Uint32(got))
		}
		if host, _, _ := net.SplitHostPort(addr.String()); host != seen || who != nil && who.String() != addr.String() {
			b.t.Fatalf("datagram %d to %s came from %s, the one before from %v; want %s", i, dialed, addr, who, seen)
		}
		who = addr
		slices.Reverse(data)
		if _, err := s.WriteTo(data, addr); err != nil {
			b.t.Fatal(err)
		}
		if n, err = c.Read(got); err != nil || !bytes.Equal(got[:n], data) {
			b.t.Fatalf("the answer %d of %d bytes from %s: %d bytes, %v", i, len(data), dialed, n, err)
		}
	}
}

// bulk sends the same random bytes each way of a TCP connection.
func (b *testbed) bulk(from, to *netns.Handle, dialed, heard, seen string) {
	b.t.Helper()
	data := make([]byte, 2<<20)
	rand.Read(data)
	want := sha256.Sum256(data)
	l := b.listen(to, heard)
	defer l.Close()
	var c net.Conn
	b.in(from, func() (err error) { c, err = net.DialTimeout("tcp4", dialed, patience); return err })
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		b.t.Fatal(err)
	}
	defer s.Close()
	if host, _, _ := net.SplitHostPort(s.RemoteAddr().String()); host != seen {
		b.t.Errorf("the connection to %s came from %s, want %s", dialed, host, seen)
	}
	deadline := time.Now().Add(patience)
	for _, way := range [][2]net.Conn{{c, s}, {s, c}} {
		way[0].SetDeadline(deadline)
		written := during(func() error {
			_, err := way[0].Write(data)
			return errors.Join(err, way[0].(*net.TCPConn).CloseWrite())
		})
		sum := sha256.New()
		n, err := io.Copy(sum, way[1])
		if err := errors.Join(err, <-written); err != nil || !bytes.Equal(sum.Sum(nil), want[:]) {
			b.t.Errorf("%d of %d bytes by the connection to %s, or others: %v", n, len(data), dialed, err)
		}
	}
}

// closed sends a datagram to a port that nobody has, and waits for the error.
func (b *testbed) closed(from *netns.Handle, at string) {
	b.t.Helper()
	var c net.Conn
	b.in(from, func() (err error) { c, err = net.Dial("udp4", at); return err })
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("anybody?")); err != nil {
		b.t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		b.t.Errorf("a datagram to the closed port %s: %v", at, err)
	}
}

// tooBig has the gateway tell a sender what the egress interface can carry.
func (b *testbed) tooBig(from *netns.Handle, at string, carries int) {
	b.t.Helper()
	var c net.Conn
	b.in(from, func() (err error) { c, err = net.Dial("udp4", at); return err })
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		b.t.Fatal(err)
	}
	told := 0
	ktest.Wait(b.t, 20*time.Second, "the sender of a packet that is too big is told", func() bool {
		err := raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			told, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU)
		})
		if err != nil {
			b.t.Fatal(err)
		}
		if told == 1500 {
			c.Write(make([]byte, 1500-28))
		}
		return told != 1500
	})
	if told != carries {
		b.t.Errorf("the sender is told %d bytes, want %d", told, carries)
	}
}

// Every kind of device that a gateway may have instead of an Ethernet card, outside and on
// both sides, carries what the engine translates. In the guests of scripts/test-kernels.sh
// there are all of them.
func TestDevices(t *testing.T) {
	for _, kind := range deviceKinds {
		t.Run(kind.name, func(t *testing.T) {
			testDevice(newTestbed(t), kind.make, true) // that the kernel has it
			for _, way := range []struct {
				name   string
				engine Engine
				attach Attach
				both   bool
			}{
				{"both by tc", EngineEBPF, AttachTC, true},
				{"outside by XDP", EngineEBPF, AttachXDP, false},
				{"both by XDP", EngineEBPF, AttachXDP, true},
				{"outside by nft", EngineNFT, "", false},
			} {
				if (way.engine == EngineNFT) != (kind.refused != "") && way.attach != AttachTC {
					continue
				}
				if way.both && way.attach == AttachXDP && kind.name != "veth" {
					continue
				}
				t.Run(way.name, func(t *testing.T) {
					b := newTestbed(t)
					device := testDevice(b, kind.make, way.both)
					o := Options{Namespace: b.gateway, Engine: way.engine, Attach: way.attach}
					refused := kind.refused
					if way.both && refused == "" {
						refused = kind.inside
					}
					if refused != "" && way.engine == EngineEBPF {
						_, err := Up(t.Context(), b.parse(device.rules), device.rules, o)
						if err == nil || !strings.Contains(err.Error(), refused) {
							t.Errorf("up: %v, want %s", err, refused)
						}
						return
					}
					if way.attach == AttachXDP {
						b.passXDP(b.client)
						b.passXDP(b.server)
					}
					for _, p := range b.up(device.rules, o).Placements {
						t.Logf("%s: XDP %v (%s)", p.Interface, p.XDP, p.Reason)
					}
					device.carries(b)
				})
			}
		})
	}
}

// onDevices is a testbed whose outside, and if so wanted inside, is devices of a kind.
type onDevices struct {
	rules           string
	inside          string // the client's address
	gateway, server string // addresses outside
	far             string // the server's device
}

// setRules makes rules for the interfaces.
func (d *onDevices) setRules(inside, outside string) {
	d.rules = fmt.Sprintf(`
inside: [%s]
outside: [%s]
limits: {sessions: 4096, sources: 256}
rules:
  - masquerade: 10.0.0.0/8
  - {dnat: "tcp %[3]s:8080", to: "%[4]s:80"}
  - {dnat: "udp %[3]s:8080-8081", to: "%[4]s:80-81"}
`, inside, outside, d.gateway, d.inside)
}

func testDevice(b *testbed, kind func(*deviceEnd) error, both bool) onDevices {
	b.t.Helper()
	b.plug(kind, cable{b.server, "out", "198.51.100.1", "198.51.100.9", "wan", 7, "203.0.113.1/24", "203.0.113.9/24"})
	d, name := onDevices{inside: "10.0.0.2", gateway: "203.0.113.1", server: "203.0.113.9", far: "wan"}, "in"
	if both {
		b.plug(kind, cable{b.client, "in", "10.0.0.1", "10.0.0.2", "lan", 8, "10.7.0.1/24", "10.7.0.2/24"})
		b.clientGoesBy(net.IPv4(10, 7, 0, 1))
		d.inside, name = "10.7.0.2", "lan"
	}
	d.setRules(name, "wan")
	return d
}

func (b *testbed) clientGoesBy(gateway net.IP) {
	b.t.Helper()
	b.in(b.client, func() error {
		return netlink.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: gateway})
	})
}

// carries passes traffic of every kind both ways.
func (d onDevices) carries(b *testbed) {
	b.t.Helper()
	gateway, server := d.gateway, d.server
	b.watch(b.server, d.far, gateway)
	b.datagrams(b.client, b.server, server+":7", server+":7", gateway)
	b.datagrams(b.server, b.client, gateway+":8080", d.inside+":80", server)
	b.bulk(b.client, b.server, server+":7", server+":7", gateway)
	b.bulk(b.server, b.client, gateway+":8080", d.inside+":80", server)
	b.closed(b.client, server+":9")
	b.closed(b.server, gateway+":8081")
	b.ping(b.client, server)
	var mtu int
	b.in(b.gateway, func() error {
		routes, err := netlink.RouteGet(net.ParseIP(server))
		if err != nil {
			return err
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err == nil {
			mtu = l.Attrs().MTU
		}
		return err
	})
	if mtu < 1500 && strings.HasPrefix(d.inside, "10.0.") {
		b.tooBig(b.client, server+":7", mtu)
	}
	s, err := ReadStatus(b.gateway)
	if err != nil || len(s.Problems) > 0 {
		b.t.Errorf("status %+v, %v", s, err)
	}
	if s.Stats != nil && (s.Stats.Reasons["translated-out"] < 300 || s.Stats.Reasons["translated-in"] < 300) {
		b.t.Errorf("the engine translated %v", s.Stats.Reasons)
	}
}

// Inside is a VLAN on the Ethernet that is itself outside: its tagged frames are not the
// outside's, and those without a tag are not the inside's.
func TestTrunk(t *testing.T) {
	for _, attach := range []Attach{AttachTC, AttachXDP} {
		t.Run(string(attach), func(t *testing.T) {
			b := newTestbed(t)
			for _, e := range []struct {
				ns, home    *netns.Handle
				under, addr string
			}{{b.gateway, b.gateway, "out", "10.7.0.1/24"}, {b.server, b.client, "eth0", "10.7.0.2/24"}} {
				b.vlan(e.ns, e.under, 7, e.home, "lan", e.addr)
			}
			b.clientGoesBy(net.IPv4(10, 7, 0, 1))
			d := onDevices{inside: "10.7.0.2", gateway: "198.51.100.1", server: "198.51.100.9", far: "eth0"}
			d.setRules("lan", "out")
			if attach == AttachXDP {
				b.passXDP(b.server)
			}
			o := b.options()
			o.Attach = attach
			b.up(d.rules, o)
			d.carries(b)
		})
	}
}

// XDP does not see the tags that a device has taken off: where a VLAN is on it, the engine is at tc
// until it leaves them.
func TestVLANKeepsTC(t *testing.T) {
	b := newTestbed(t)
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		under := l.Attrs().Index
		other := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "other", ParentIndex: under + 1}}
		vlan := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "in.7", ParentIndex: under}}
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pair", ParentIndex: under}}
		if found := vlanOn(l, []netlink.Link{l, other, veth}); found != "" {
			t.Errorf("%s is on it", found)
		}
		if found := vlanOn(l, []netlink.Link{l, other, veth, vlan}); found != "in.7" {
			t.Errorf("%q is on it", found)
		}
		if p := place(l, AttachXDP); !p.XDP {
			t.Errorf("without a VLAN: %s", p.Reason)
		}
		if !stripsVLAN("in") {
			t.Error("a veth leaves tags, though nobody has switched that off")
		}
		made := makeVLAN(&deviceEnd{name: "in.7", under: "in", id: 7})
		if made == nil {
			if p := place(l, AttachXDP); p.XDP || !strings.HasPrefix(p.Reason, "tc: in.7 is on it") {
				t.Errorf("with a VLAN: %s", p.Reason)
			}
		}
		c, err := ethtool.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		flags := struct{ command, data uint32 }{command: unix.ETHTOOL_SFLAGS}
		if err := c.Request("in", unsafe.Pointer(&flags)); err != nil {
			return err
		}
		if stripsVLAN("in") {
			t.Error("it takes tags off, though that is switched off")
		}
		if p := place(l, AttachXDP); !p.XDP {
			t.Errorf("tags are left: %s", p.Reason)
		}
		if errors.Is(made, unix.EOPNOTSUPP) {
			made = nil // this kernel has no VLANs: only the rest was tested
		}
		return made
	})
}

// The kernel's own NAT between devices of every kind is accelerated, or refused for what
// has no Ethernet.
func TestAccelDevices(t *testing.T) {
	for _, kind := range deviceKinds {
		t.Run(kind.name, func(t *testing.T) {
			b := newTestbed(t)
			d := testDevice(b, kind.make, kind.inside == "")
			b.in(b.gateway, func() error { return writeSetting(settingForward, "1") })
			o := b.accelOptions()
			o.Interfaces[1] = "wan"
			if kind.inside == "" {
				o.Interfaces[0] = "lan"
			}
			b.nft(strings.NewReplacer(`"out"`, `"wan"`, `"in"`, strconv.Quote(o.Interfaces[0]), "10.0.0.2", d.inside).Replace(accelRules))
			if kind.noEthernet {
				if _, err := AccelOn(t.Context(), o); err == nil || !strings.Contains(err.Error(), "acceleration needs Ethernet frames") {
					t.Errorf("accel on: %v", err)
				}
				return
			}
			b.accelOn(o)
			b.parrot(b.server, d.server+":7000")
			b.parrot(b.client, d.inside+":80")
			if seen := b.accelerated(b.dialogue(b.client, d.inside+":6000", d.server+":7000")); seen != d.gateway+":6000" {
				t.Errorf("the server sees %s", seen)
			}
			if seen := b.accelerated(b.dialogue(b.server, d.server+":6000", d.gateway+":8080")); seen != d.server+":6000" {
				t.Errorf("the inside server sees %s", seen)
			}
			before := b.accelStats().Reasons["forwarded"]
			b.transfer(t, b.client, b.server, d.server+":0", func() {
				if n := b.accelStats().Reasons["forwarded"]; n < before+100 {
					t.Errorf("%d packets forwarded of a transfer", n-before)
				}
			})
		})
	}
}

// An error of the engine's about a packet whose checksum is only begun is whole: the device that
// sends it back would finish that of the packet inside, and make the error's wrong.
func TestErrorOfUnfinished(t *testing.T) {
	for _, finishes := range []bool{false, true} {
		t.Run(fmt.Sprintf("finished by the kernel %v", finishes), func(t *testing.T) {
			b := newTestbed(t)
			if finishes {
				b.in(b.gateway, func() error { return wholeChecksums("in") })
			}
			o := b.options()
			o.Attach = AttachTC
			b.up(`
inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
subscribers:
  by: address
  classes:
    default: {sessions: 1}
rules:
  - masquerade: 10.0.0.0/8
`, o)
			for i, data := range []int{4, 4, 400, 1400} {
				b.in(b.client, func() error {
					c, err := net.Dial("udp4", "198.51.100.9:7")
					if err != nil {
						return err
					}
					defer c.Close()
					if _, err := c.Write(make([]byte, data)); err != nil || i == 0 {
						return err
					}
					c.SetReadDeadline(time.Now().Add(2 * time.Second))
					if _, err = c.Read(make([]byte, 10)); !errors.Is(err, unix.EHOSTUNREACH) {
						t.Errorf("a datagram with %d bytes is refused: %v", data, err)
					}
					return nil
				})
			}
		})
	}
}
