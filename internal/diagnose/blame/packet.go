// SPDX-License-Identifier: Apache-2.0

package blame

// What rules compare of a packet, and how.

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"natkit/internal/kernel/ruleset"
	"natkit/internal/snapshot"
)

// packet is a dropped one with its text read.
type packet struct {
	snapshot.DroppedPacket
	s            *snapshot.Snapshot
	protocol     string
	number       int // of the protocol
	source, dest netip.AddrPort
	ports        bool     // it has a transport header that begins with ports
	words        []string // what the text says besides
}

// newPacket reads "tcp 10.0.0.2:4000 -> 10.0.1.2:80 SYN".
func newPacket(s *snapshot.Snapshot, d snapshot.DroppedPacket) (*packet, bool) {
	p := &packet{DroppedPacket: d, s: s}
	fields := strings.Fields(d.Text)
	if len(fields) < 4 || fields[2] != "->" {
		p.protocol = d.Text
		return p, d.Text == "arp"
	}
	var ok1, ok2 bool
	p.protocol, p.words = fields[0], fields[4:]
	if n, ok := ruleset.Protocols[p.protocol]; ok {
		p.number = int(n)
	} else if _, err := fmt.Sscanf(p.protocol, "ip-protocol-%d", &p.number); err != nil {
		return nil, false
	}
	p.source, p.ports, ok1 = parseEnd(fields[1])
	p.dest, _, ok2 = parseEnd(fields[3])
	return p, ok1 && ok2
}

func parseEnd(s string) (end netip.AddrPort, port, ok bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap, true, true
	}
	a, err := netip.ParseAddr(s)
	return netip.AddrPortFrom(a, 0), false, err == nil
}

// hook is a netfilter hook of some families.
type hook struct {
	name     string
	families []string
}

var (
	device = []string{"netdev", "inet"} // inet has ingress only
	ip     = []string{"ip", "ip6", "inet"}
	bridge = []string{"bridge"}
	arp    = []string{"arp"}
)

// hooks are those that the packet may have met until it was dropped, in their order. One that
// was dropped later has got past the hooks before.
func (p *packet) hooks() []hook {
	if p.protocol == "arp" {
		return []hook{{"ingress", device}, {"prerouting", bridge}, {"input", bridge}, {"forward", bridge}, {"input", arp}, {"forward", arp}, {"output", arp}, {"egress", device}}
	}
	bridged := p.port(p.In)
	switch p.Stage {
	case snapshot.StageArrived:
		out := []hook{{"ingress", device}}
		if bridged {
			out = append(out, hook{"prerouting", bridge}, hook{"input", bridge}, hook{"forward", bridge})
		}
		return append(out, hook{"prerouting", ip})
	case snapshot.StageRouted:
		if p.own(p.dest.Addr()) || p.dest.Addr().IsMulticast() {
			return []hook{{"input", ip}}
		}
		return []hook{{"forward", ip}}
	case snapshot.StageLocal:
		return []hook{{"output", ip}, {"postrouting", ip}, {"egress", device}}
	}
	if bridged { // to another port of its bridge, or by br_netfilter
		return []hook{{"input", bridge}, {"forward", bridge}, {"forward", ip}, {"postrouting", bridge}, {"postrouting", ip}, {"egress", device}}
	}
	return []hook{{"postrouting", ip}, {"output", bridge}, {"postrouting", bridge}, {"egress", device}}
}

// meets says whether chains of a family are asked about the packet.
func (p *packet) meets(family string) bool {
	switch family {
	case "ip":
		return p.protocol != "arp" && p.dest.Addr().Is4()
	case "ip6":
		return p.protocol != "arp" && p.dest.Addr().Is6()
	case "arp":
		return p.protocol == "arp"
	}
	return true
}

func (p *packet) own(a netip.Addr) bool {
	for _, i := range p.s.Interfaces {
		if slices.ContainsFunc(i.Addresses, func(n netip.Prefix) bool { return n.Addr() == a }) {
			return true
		}
	}
	return false
}

func (p *packet) link(name string) (snapshot.Interface, bool) {
	i := slices.IndexFunc(p.s.Interfaces, func(l snapshot.Interface) bool { return l.Name == name && name != "" })
	if i < 0 {
		return snapshot.Interface{}, false
	}
	return p.s.Interfaces[i], true
}

// port says whether an interface is a bridge's.
func (p *packet) port(name string) bool {
	l, _ := p.link(name)
	master, ok := p.link(l.Master)
	return ok && master.Kind == "bridge"
}

// lacks says whether a packet has no such field, so that no condition on it holds.
func (p *packet) lacks(key string) bool {
	head, rest, _ := strings.Cut(key, " ")
	four := p.protocol != "arp" && p.dest.Addr().Is4()
	switch head {
	case "ip":
		return !four
	case "ip6":
		return p.protocol == "arp" || four
	case "tcp", "udp", "sctp", "dccp", "udplite", "icmp":
		return p.protocol != head || p.number != 0 && (rest == "sport" || rest == "dport") && !p.ports
	case "arp":
		return p.protocol != "arp"
	case "icmpv6":
		return p.number != int(ruleset.Protocols["icmpv6"])
	case "th":
		return !p.ports
	}
	return false
}

// compare says whether a field has a value.
func (p *packet) compare(key, value string, mask uint32, c *snapshot.Chain, at hook) truth {
	if p.lacks(key) {
		return no
	}
	switch key {
	case "ip saddr", "ip6 saddr":
		return inRange(p.source.Addr(), value)
	case "ip daddr", "ip6 daddr":
		return inRange(p.dest.Addr(), value)
	case "iifname", "iif":
		return p.device(p.In, value, c, at)
	case "oifname", "oif":
		if p.Stage == snapshot.StageArrived && at.name != "forward" {
			return no // it has none yet
		}
		if p.Stage == snapshot.StageArrived && p.Out == "" {
			return maybe
		}
		return p.device(p.Out, value, c, at)
	case "ct state":
		if p.State == "" {
			return maybe
		}
		return truthOf(p.State == value)
	case "ct status":
		return truthOf(slices.Contains(p.Status, value))
	case "ct direction":
		return truthOf(value == "reply" == p.Reply)
	case "meta nfproto":
		return truthOf(value == "ipv4" == p.dest.Addr().Is4())
	case "meta protocol", "ether type":
		return truthOf(value == p.ethertype())
	case "fib daddr type":
		return p.addressType(p.dest.Addr(), value)
	case "fib saddr type":
		return p.addressType(p.source.Addr(), value)
	}
	n, known := p.numeric(key)
	if !known {
		return maybe
	}
	if mask != 0 {
		n &= uint64(mask)
	}
	return numberIn(n, value)
}

func (p *packet) ethertype() string {
	switch {
	case p.protocol == "arp":
		return "arp"
	case p.dest.Addr().Is4():
		return "ip"
	}
	return "ip6"
}

// numeric is the value of a field that is a number.
func (p *packet) numeric(key string) (uint64, bool) {
	switch key {
	case "tcp sport", "udp sport", "th sport", "sctp sport", "dccp sport", "udplite sport":
		return uint64(p.source.Port()), true
	case "tcp dport", "udp dport", "th dport", "sctp dport", "dccp dport", "udplite dport":
		return uint64(p.dest.Port()), true
	case "meta l4proto", "ip protocol", "ip6 nexthdr":
		return uint64(p.number), true
	case "meta mark":
		return uint64(p.Mark), true
	case "ip ttl", "ip6 hoplimit":
		return uint64(p.TTL), p.TTL > 0
	case "ip dscp", "ip6 dscp":
		return uint64(p.DSCP), p.Length > 0
	case "ip length", "meta length":
		return uint64(p.Length), p.Length > 0
	case "icmp type", "icmpv6 type":
		return p.word("type")
	case "icmp code", "icmpv6 code":
		return p.word("code")
	case "tcp flags":
		return p.flags()
	}
	return 0, false
}

// word is the number behind a word of the text: "type 3 code 4".
func (p *packet) word(name string) (uint64, bool) {
	i := slices.Index(p.words, name)
	if i < 0 || i+1 >= len(p.words) {
		return 0, false
	}
	n, err := strconv.ParseUint(p.words[i+1], 10, 32)
	return n, err == nil
}

func (p *packet) flags() (n uint64, known bool) {
	if len(p.words) == 0 || p.words[0] == "fragment" || strings.HasPrefix(p.words[0], "(") {
		return 0, len(p.words) > 0 && p.words[0] != "fragment"
	}
	for _, f := range strings.Split(p.words[0], ",") {
		i := slices.Index([]string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"}, f)
		if i < 0 {
			return 0, false
		}
		n |= 1 << i
	}
	return n, true
}

// device compares an interface's name: IP chains see a bridge, and not its port.
func (p *packet) device(name, value string, c *snapshot.Chain, at hook) truth {
	if l, _ := p.link(name); l.Master != "" && c.Family != "bridge" && c.Family != "netdev" && at.name != "ingress" {
		master, ok := p.link(l.Master)
		if !ok || master.Kind != "bridge" {
			return maybe // of a VRF or a bond it depends
		}
		name = master.Name
	}
	if name == "" && p.Stage == snapshot.StageLeaving && p.port(p.In) {
		l, _ := p.link(p.In)
		name = l.Master
	}
	if prefix, any := strings.CutSuffix(value, "*"); any {
		return truthOf(strings.HasPrefix(name, prefix))
	}
	return truthOf(name == value)
}

func (p *packet) addressType(a netip.Addr, value string) truth {
	switch value {
	case "local":
		return truthOf(p.own(a) || a.IsLoopback())
	case "multicast":
		return truthOf(a.IsMulticast())
	case "unicast":
		if p.own(a) || a.IsMulticast() || a.IsLoopback() {
			return no
		}
	}
	return maybe
}

func truthOf(b bool) truth {
	if b {
		return yes
	}
	return no
}

// inRange compares an address with "10.0.0.1", "10.0.0.0/8" or "10.0.0.1-10.0.0.9".
func inRange(a netip.Addr, value string) truth {
	if first, last, ok := strings.Cut(value, "-"); ok {
		from, err1 := netip.ParseAddr(first)
		to, err2 := netip.ParseAddr(last)
		if err1 != nil || err2 != nil {
			return maybe
		}
		return truthOf(from.Compare(a) <= 0 && a.Compare(to) <= 0)
	}
	if prefix, err := netip.ParsePrefix(value); err == nil {
		return truthOf(prefix.Contains(a))
	}
	one, err := netip.ParseAddr(value)
	if err != nil {
		return maybe
	}
	return truthOf(one == a)
}

// numberIn compares a number with "80", "1024-65535", "0x10" or a protocol's name.
func numberIn(n uint64, value string) truth {
	if named, ok := ruleset.Protocols[value]; ok {
		return truthOf(n == uint64(named))
	}
	first, last, ok := strings.Cut(value, "-")
	if !ok {
		last = first
	}
	from, err1 := strconv.ParseUint(first, 0, 64)
	to, err2 := strconv.ParseUint(last, 0, 64)
	if err1 != nil || err2 != nil {
		return maybe
	}
	return truthOf(from <= n && n <= to)
}

// newer says whether a kernel is of this version or a later one.
func newer(kernel string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(kernel, "%d.%d", &a, &b); n < 2 {
		return false
	}
	return a > major || a == major && b >= minor
}
