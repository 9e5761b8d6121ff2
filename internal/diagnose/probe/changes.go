// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/words/plural"
)

// Change is something that somebody did to a namespace, as the kernel announced it.
type Change struct {
	At    time.Time
	Netns snapshot.Netns
	What  string // "route removed: default via 10.0.0.1 dev eth0"
}

// maxChanges is how many changes are kept between two looks; of more the number is.
const maxChanges = 100

// changeListener collects what the kernel announces of changes in a namespace. It holds the
// namespace, so that only namespaces with a packet filter have one: a few routers, not hundreds
// of containers. nil is one that hears nothing.
type changeListener struct {
	sockets []*os.File

	mu      sync.Mutex // of what follows
	links   map[int32]linkState
	batch   []ruleChange // of a transaction of nftables that has not ended
	changes []Change
	more    int
}

type linkState struct {
	name    string
	up      bool
	carrier bool
	mtu     uint32
}

// watchChanges begins to listen, once the first look has shown that it is worth it. Each look chooses again on
// which interfaces ARP is heard.
func (n *sampled) watchChanges(ns *netns.Handle, s *snapshot.Snapshot) {
	if n.changes == nil && len(s.Chains) == 0 && s.Engine == nil && !s.Netns.Init {
		return
	}
	if n.changes == nil {
		// Without it history shows no changes; a next look tries again.
		n.changes, _ = listenForChanges(ns)
	}
	if n.arp != nil {
		n.arp.close()
	}
	n.arp = nil
	_ = ns.Do(func() (err error) { // without it the looks alone hear ARP
		n.arp, err = openARPWatch()
		return err
	})
}

// listenForChanges begins to listen in a namespace.
func listenForChanges(ns *netns.Handle) (*changeListener, error) {
	l := &changeListener{links: map[int32]linkState{}}
	groups := []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_TC}
	err := ns.Do(func() error {
		err := errors.Join(l.listen(unix.NETLINK_ROUTE, groups, nil, l.routeMessage), l.listen(unix.NETLINK_NETFILTER, []uint{unix.NFNLGRP_NFTABLES}, nil, l.nftMessage),
			l.listen(unix.NETLINK_ROUTE, []uint{unix.RTNLGRP_NEIGH}, permanentNeighbours, l.neighbour))
		l.mu.Lock() // an announcement that comes now waits, and is newer than the list
		defer l.mu.Unlock()
		interfaces, _ := net.Interfaces()
		for _, i := range interfaces {
			l.links[int32(i.Index)] = linkState{i.Name, i.Flags&net.FlagUp != 0, i.Flags&net.FlagRunning != 0, uint32(i.MTU)}
		}
		return err
	})
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// permanentNeighbours accepts, of what is announced of neighbours, what says that an entry is permanent (ndm_state):
// somebody set it. All others change by themselves, all the time.
var permanentNeighbours = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: unix.NLMSG_HDRLEN + 8},
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: unix.NUD_PERMANENT, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// neighbour is that somebody set a neighbour's hardware address.
func (l *changeListener) neighbour(m syscall.NetlinkMessage) {
	const ndMsg = 12
	a := attributes(m.Data, ndMsg)
	addr, ok := netip.AddrFromSlice(a[unix.NDA_DST])
	if !ok || m.Header.Type != unix.RTM_NEWNEIGH || m.Data[0] == unix.AF_BRIDGE || addr.IsMulticast() {
		return
	}
	l.add("neighbour set: %s is %s on %s, permanent", addr, net.HardwareAddr(a[unix.NDA_LLADDR]), l.link(int32(number32(m.Data[4:]))))
}

// listen opens a netlink socket in the namespace of the calling thread; filter, if not nil, says which messages come.
func (l *changeListener) listen(family int, groups []uint, filter []unix.SockFilter, message func(syscall.NetlinkMessage)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, family)
	if err != nil {
		return fmt.Errorf("listen for changes: %w", err)
	}
	if filter != nil {
		program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
			return errors.Join(fmt.Errorf("listen for changes: %w", err), unix.Close(fd))
		}
	}
	mask := uint32(0)
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: mask}); err != nil {
		return errors.Join(fmt.Errorf("listen for changes: %w", err), unix.Close(fd))
	}
	f := os.NewFile(uintptr(fd), "netlink")
	l.sockets = append(l.sockets, f)
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("listen for changes: %w", err)
	}
	go func() {
		for {
			var failed error
			if err := raw.Read(func(fd uintptr) (done bool) {
				done, failed = readChanges(int(fd), message)
				return done
			}); err != nil { // closed
				return
			}
			switch {
			case errors.Is(failed, unix.ENOBUFS):
				l.add("more changes than natkit could follow")
			case failed != nil:
				return
			}
		}
	}()
	return nil
}

// changeBuffers are for messages that are there: hundreds of listeners wait, few read.
var changeBuffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// readChanges reads what a listener's socket has; done is false if that is nothing.
func readChanges(fd int, message func(syscall.NetlinkMessage)) (done bool, err error) {
	buf := changeBuffers.Get().(*[32 << 10]byte)
	defer changeBuffers.Put(buf)
	n, err := unix.Read(fd, buf[:])
	switch {
	case errors.Is(err, unix.EAGAIN):
		return false, nil
	case errors.Is(err, unix.EINTR):
		return true, nil
	case err != nil:
		return true, err
	}
	messages, err := syscall.ParseNetlinkMessage(buf[:n])
	if err != nil {
		return true, nil
	}
	for _, m := range messages {
		message(m)
	}
	return true, nil
}

func (l *changeListener) close() {
	if l == nil {
		return
	}
	for _, s := range l.sockets {
		s.Close()
	}
}

// take returns the changes since the last call.
func (l *changeListener) take() []Change {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.changes
	if l.more > 0 {
		out = append(out, Change{At: time.Now(), What: fmt.Sprintf("%s more", plural.Count(l.more, "change"))})
	}
	l.changes, l.more = nil, 0
	return out
}

func (l *changeListener) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addLocked(fmt.Sprintf(format, args...))
}

func (l *changeListener) addLocked(what string) {
	if len(l.changes) >= maxChanges {
		l.more++
		return
	}
	l.changes = append(l.changes, Change{At: time.Now(), What: snapshot.CleanText(what)})
}

// link is an interface's name.
func (l *changeListener) link(index int32) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok := l.links[index]; ok {
		return s.name
	}
	return fmt.Sprintf("interface %d", index)
}

// routeMessage is one of rtnetlink.
func (l *changeListener) routeMessage(m syscall.NetlinkMessage) {
	switch m.Header.Type {
	case unix.RTM_NEWROUTE:
		l.route("added", m)
	case unix.RTM_DELROUTE:
		l.route("removed", m)
	case unix.RTM_NEWADDR:
		l.address("added", m.Data)
	case unix.RTM_DELADDR:
		l.address("removed", m.Data)
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		l.linkMessage(m)
	case unix.RTM_NEWRULE:
		l.add("routing rule added")
	case unix.RTM_DELRULE:
		l.add("routing rule removed")
	case unix.RTM_NEWNETCONF:
		l.netconf(m.Data)
	case unix.RTM_NEWQDISC:
		l.qdisc("set", m.Data)
	case unix.RTM_DELQDISC:
		l.qdisc("removed", m.Data)
	}
}

// attributes of a message behind its fixed part.
func attributes(data []byte, fixed int) map[uint16][]byte {
	out := map[uint16][]byte{}
	if len(data) < fixed {
		return out
	}
	ad, err := netlink.NewAttributeDecoder(data[fixed:])
	if err != nil {
		return out
	}
	for ad.Next() {
		out[ad.Type()] = ad.Bytes()
	}
	return out
}

func number32(b []byte) (n uint32) {
	if len(b) >= 4 {
		n = uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
	}
	return n
}

func text0(b []byte) string { return strings.TrimRight(string(b), "\x00") }

// Kinds of routes (rtm_type) that are no plain ones.
var routeKinds = map[byte]string{unix.RTN_BLACKHOLE: "blackhole ", unix.RTN_UNREACHABLE: "unreachable ", unix.RTN_PROHIBIT: "prohibit ", unix.RTN_THROW: "throw "}

func (l *changeListener) route(verb string, m syscall.NetlinkMessage) {
	const rtMsg = 12
	if len(m.Data) < rtMsg {
		return
	}
	kind := m.Data[7]
	if number32(m.Data[8:])&unix.RTM_F_CLONED != 0 || kind != unix.RTN_UNICAST && routeKinds[kind] == "" {
		return // of a cache; of an address, which is announced itself
	}
	a := attributes(m.Data, rtMsg)
	table := uint32(m.Data[4])
	if b, ok := a[unix.RTA_TABLE]; ok {
		table = number32(b)
	}
	dest := "default"
	if addr, ok := netip.AddrFromSlice(a[unix.RTA_DST]); ok {
		if addr.IsMulticast() || addr.IsLinkLocalUnicast() {
			return
		}
		dest = netip.PrefixFrom(addr, int(m.Data[1])).String()
	}
	what := fmt.Sprintf("route %s: %s%s", verb, routeKinds[kind], dest)
	if via, ok := netip.AddrFromSlice(a[unix.RTA_GATEWAY]); ok {
		what += " via " + via.String()
	}
	if out, ok := a[unix.RTA_OIF]; ok {
		what += " dev " + l.link(int32(number32(out)))
	}
	if table != unix.RT_TABLE_MAIN {
		what += fmt.Sprintf(" table %d", table)
	}
	l.add("%s", what)
}

func (l *changeListener) address(verb string, data []byte) {
	const ifaddrMsg = 8
	a := attributes(data, ifaddrMsg)
	b, ok := a[unix.IFA_LOCAL]
	if !ok {
		b = a[unix.IFA_ADDRESS]
	}
	addr, ok := netip.AddrFromSlice(b)
	if !ok || addr.IsLinkLocalUnicast() && addr.Is6() {
		return
	}
	l.add("address %s: %s on %s", verb, netip.PrefixFrom(addr, int(data[1])), l.link(int32(number32(data[4:]))))
}

// linkMessage is of an interface, and comes for many reasons; what counts is whether it is there,
// up, connected, and its MTU.
func (l *changeListener) linkMessage(m syscall.NetlinkMessage) {
	const ifinfoMsg = 16
	if len(m.Data) < ifinfoMsg || m.Data[0] == unix.AF_BRIDGE {
		return
	}
	index, flags := int32(number32(m.Data[4:])), number32(m.Data[8:])
	a := attributes(m.Data, ifinfoMsg)
	now := linkState{text0(a[unix.IFLA_IFNAME]), flags&unix.IFF_UP != 0, flags&unix.IFF_RUNNING != 0, number32(a[unix.IFLA_MTU])}
	l.mu.Lock()
	defer l.mu.Unlock()
	before, known := l.links[index]
	if m.Header.Type == unix.RTM_DELLINK {
		delete(l.links, index)
		l.addLocked(fmt.Sprintf("interface %s removed", now.name))
		return
	}
	l.links[index] = now
	switch {
	case !known:
		l.addLocked(fmt.Sprintf("interface %s added", now.name))
		return
	case before.name != now.name:
		l.addLocked(fmt.Sprintf("interface %s renamed to %s", before.name, now.name))
	}
	switch {
	case before.up != now.up:
		l.addLocked(fmt.Sprintf("interface %s set %s", now.name, map[bool]string{true: "up", false: "down"}[now.up]))
	case before.carrier != now.carrier && now.up:
		l.addLocked(fmt.Sprintf("interface %s %s carrier", now.name, map[bool]string{true: "has", false: "lost"}[now.carrier]))
	}
	if before.mtu != now.mtu {
		l.addLocked(fmt.Sprintf("interface %s: MTU %d -> %d", now.name, before.mtu, now.mtu))
	}
}

// Settings that the kernel announces (NETCONFA_*).
var netconfNames = map[uint16]string{2: "forwarding", 3: "rp_filter", 4: "mc_forwarding", 5: "proxy_neigh"}

func (l *changeListener) netconf(data []byte) {
	a := attributes(data, 4) // struct netconfmsg, padded
	index, ok := a[1]        // NETCONFA_IFINDEX
	if !ok || len(a) > 2 {
		return // all of a new interface's
	}
	family := "ipv4"
	if data[0] == unix.AF_INET6 {
		family = "ipv6"
	}
	where := ""
	switch i := int32(number32(index)); i {
	case -1:
		where = "all"
	case -2:
		where = "default"
	default:
		where = l.link(i)
	}
	for kind, name := range netconfNames {
		if value, ok := a[kind]; ok {
			l.add("setting net.%s.conf.%s.%s = %d", family, where, name, int32(number32(value)))
		}
	}
}

func (l *changeListener) qdisc(verb string, data []byte) {
	const tcMsg = 20
	if len(data) < tcMsg {
		return
	}
	if kind := text0(attributes(data, tcMsg)[unix.TCA_KIND]); kind != "" && kind != "noqueue" {
		l.add("qdisc %s %s on %s", kind, verb, l.link(int32(number32(data[4:]))))
	}
}

// ruleChange is a message of a transaction of nftables.
type ruleChange struct{ what, where string }

// What messages of nftables announce (NFT_MSG_*).
var nftMessages = map[uint16][2]string{
	0: {"table", "added"}, 2: {"table", "removed"}, 3: {"chain", "added or changed"}, 5: {"chain", "removed"}, 6: {"rule", "added"}, 8: {"rule", "removed"},
	9: {"set", "added"}, 11: {"set", "removed"}, 12: {"set element", "added"}, 14: {"set element", "removed"}, 18: {"object", "added or changed"}, 20: {"object", "removed"},
	22: {"flowtable", "added"}, 24: {"flowtable", "removed"},
}

func (l *changeListener) nftMessage(m syscall.NetlinkMessage) {
	const nfgenMsg = 4
	kind := m.Header.Type & 0xff
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < nfgenMsg {
		return
	}
	a := attributes(m.Data, nfgenMsg)
	const newGeneration = 15 // NFT_MSG_NEWGEN ends a transaction, and names who made it
	if kind == newGeneration {
		who := text0(a[3]) // NFTA_GEN_PROC_NAME
		l.mu.Lock()
		defer l.mu.Unlock()
		l.endBatch(who)
		return
	}
	words, ok := nftMessages[kind]
	if !ok {
		return
	}
	where := nftFamilies[m.Data[0]] + " " + text0(a[1])
	switch words[0] {
	case "rule", "set element":
		where += " " + text0(a[2])
	case "chain":
		where += " " + text0(a[3])
	case "set", "object", "flowtable":
		where += " " + text0(a[2])
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.batch) < 64*maxChanges {
		l.batch = append(l.batch, ruleChange{words[0] + "\x00" + words[1], where})
	}
}

// endBatch tells of a transaction: what was done alike at one place is one change.
func (l *changeListener) endBatch(who string) {
	times := map[ruleChange]int{}
	for _, c := range l.batch {
		times[c]++
	}
	by := ""
	if who != "" {
		by = " by " + who
	}
	for _, c := range l.batch {
		n := times[c]
		if n == 0 {
			continue // told
		}
		times[c] = 0
		thing, verb, _ := strings.Cut(c.what, "\x00")
		if n > 1 {
			thing = strconv.Itoa(n) + " " + thing + "s"
		}
		l.addLocked(fmt.Sprintf("%s %s%s: %s", thing, verb, by, c.where))
	}
	l.batch = nil
}
