// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// This file makes the filters of the packet sockets that look at frames: classic BPF, in which
// jumps lead forward only and 255 instructions far.

// Offsets of what is beside the packet (SKF_AD_OFF and on), and of the network header.
const (
	adProtocol    = 0xfffff000 + 0
	adKind        = 0xfffff000 + 4
	adLink        = 0xfffff000 + 8
	adVLAN        = 0xfffff000 + 44
	adVLANPresent = 0xfffff000 + 48
	netHeader     = 0xfff00000
	// Of ARP, behind the header of Ethernet.
	arpOperation = 14 + 6
	arpSender    = 14 + 14
	arpTarget    = 14 + 24
)

type frameFilter []unix.SockFilter

func (p *frameFilter) add(code uint16, k uint32) { *p = append(*p, unix.SockFilter{Code: code, K: k}) }

func (p *frameFilter) load(at uint32) { p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, at) }

func (p *frameFilter) accept() { p.add(unix.BPF_RET|unix.BPF_K, frameBytes) }

func (p *frameFilter) drop() { p.add(unix.BPF_RET|unix.BPF_K, 0) }

// when has what then adds run if the value is k, and goes on behind it if not.
func (p *frameFilter) when(k uint32, then func()) {
	at := len(*p)
	p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, k)
	then()
	(*p)[at].Jf = uint8(len(*p) - at - 1)
}

// unless has what then adds run if the value is none of ks.
func (p *frameFilter) unless(ks []int, then func()) {
	first := len(*p)
	for _, k := range ks {
		p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, uint32(k))
	}
	last := len(*p)
	then()
	for i := first; i < last; i++ {
		(*p)[i].Jt = uint8(len(*p) - i - 1)
	}
}

// arpFilter accepts ARP of these interfaces, in and out.
func arpFilter(links []int) frameFilter {
	var p frameFilter
	p.load(adProtocol)
	p.when(unix.ETH_P_ARP, func() {
		p.load(adLink)
		p.unless(links, p.drop)
		p.accept()
	})
	p.drop()
	return p
}

// arpWatchFilter accepts, of the ARP that comes in by these interfaces, broadcast requests for one of the addresses (who has had a
// reply asks that host alone, and is not heard), what another machine sends with one of them, and broadcast frames that the kernel takes for another
// host's, as ARP's socket sees those of a VLAN without an interface: the tag itself is gone by then.
func arpWatchFilter(links []int, own []netip.Addr) frameFilter {
	var p frameFilter
	p.load(adLink)
	p.unless(links, p.drop)
	p.load(adKind)
	p.when(unix.PACKET_OTHERHOST, func() {
		p.load(0) // its hardware address
		p.when(0xffffffff, p.accept)
		p.drop()
	})
	addrs := make([]int, len(own))
	for i, a := range own {
		b := a.As4()
		addrs[i] = int(binary.BigEndian.Uint32(b[:]))
	}
	p.load(adKind)
	p.when(unix.PACKET_BROADCAST, func() {
		p.add(unix.BPF_LD|unix.BPF_H|unix.BPF_ABS, arpOperation)
		p.when(1, func() { // a request
			p.load(arpTarget)
			p.unless(addrs, func() {
				p.load(arpSender)
				p.unless(addrs, p.drop)
			})
			p.accept()
		})
	})
	p.load(arpSender)
	p.unless(addrs, p.drop)
	p.accept()
	return p
}

// astrayFilter accepts what comes in by these interfaces for other hardware addresses, what is for this
// machine with the tag of a VLAN that it does not have, and IPv4 packets with a small TTL.
func astrayFilter(links, vlans []int) frameFilter {
	var p frameFilter
	p.load(adLink)
	p.unless(links, p.drop)
	p.load(adVLANPresent)
	p.when(1, func() {
		p.load(adVLAN)
		p.add(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, 0xfff)
		p.unless([]int{0}, func() { // priority alone
			p.unless(vlans, func() {
				p.load(adKind)
				p.when(unix.PACKET_HOST, p.accept)
			})
			p.drop()
		})
	})
	p.load(adKind)
	p.when(unix.PACKET_OTHERHOST, p.accept)
	p.when(unix.PACKET_HOST, func() {
		p.load(adProtocol)
		p.when(unix.ETH_P_IP, func() {
			p.add(unix.BPF_LD|unix.BPF_B|unix.BPF_ABS, netHeader+8)
			p.add(unix.BPF_JMP|unix.BPF_JGT|unix.BPF_K, lowTTL)
			p[len(p)-1].Jt = 1
			p.accept()
		})
	})
	p.drop()
	return p
}
