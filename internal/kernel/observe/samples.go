// SPDX-License-Identifier: Apache-2.0

package observe

// This file makes of sampled packets what a row shows of them.

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// How many packets are kept of a key, and of a row.
const (
	maxKept    = 16
	maxPackets = 64
)

// kept are the samples of one key: the first ones, and as many by chance of all.
type kept struct {
	first, chosen     []dropsDropSample
	sampled, matching uint64
}

// PacketMatch chooses sampled packets by an address and a port that is source or destination,
// of the packet or of its flow before translation. The zero value takes all.
type PacketMatch struct {
	Host netip.Prefix
	Port uint16
}

// All says whether every packet matches.
func (m PacketMatch) All() bool { return m == PacketMatch{} }

func (m PacketMatch) wants(s *dropsDropSample) bool {
	if m.All() {
		return true
	}
	now, _, _, ok := parsePacket(swap16(s.Ethertype), s.head())
	return ok && (m.has(now) || s.CtStatus&translated != 0 && m.has(s.flow(now)))
}

func (m PacketMatch) has(t tuple) bool {
	return (!m.Host.IsValid() || m.Host.Contains(t.src.Addr()) || m.Host.Contains(t.dst.Addr())) &&
		(m.Port == 0 || hasPorts(t.protocol) && (t.src.Port() == m.Port || t.dst.Port() == m.Port))
}

// add keeps a sample if it is wanted. The program chooses the n-th packet with a chance that falls with n;
// each that is chosen takes the place of another one, so that all parts of the window are in.
func (k *kept) add(s dropsDropSample, wanted bool) {
	k.sampled++
	if !wanted {
		return
	}
	k.matching++
	if len(k.first) < maxSamples {
		k.first = append(k.first, s)
	}
	if len(k.chosen) < maxKept {
		k.chosen = append(k.chosen, s)
		return
	}
	k.chosen[rand.IntN(maxKept)] = s
}

// show adds to a row what is told of a key's packets.
func (d *Drops) show(row *snapshot.Drop, j judged, samples *kept) {
	if samples == nil {
		return
	}
	if !d.match.All() {
		row.Sampled += samples.sampled
		row.Matching += samples.matching
	}
	for i := range samples.first {
		if text := samples.first[i].String(); len(row.Samples) < maxSamples && !slices.Contains(row.Samples, text) {
			row.Samples = append(row.Samples, text)
		}
	}
	if row.Cause != snapshot.CauseRule || len(samples.chosen) == 0 {
		return
	}
	n := uint64(len(samples.chosen))
	for i := range samples.chosen {
		p := samples.chosen[i].packet()
		p.In = d.namespaces.device(uint64(j.Netns), samples.chosen[i].In)
		p.Out = d.namespaces.device(uint64(j.Netns), samples.chosen[i].Out)
		p.Stands = j.count / n
		if uint64(i) < j.count%n {
			p.Stands++
		}
		row.Packets = append(row.Packets, p)
	}
}

// settle joins a row's packets that are alike, and has them stand for the whole row.
func settle(row *snapshot.Drop) {
	var out []snapshot.DroppedPacket
	var stands uint64
	for _, p := range row.Packets {
		stands += p.Stands
		i := slices.IndexFunc(out, func(q snapshot.DroppedPacket) bool {
			q.Stands = p.Stands
			return reflect.DeepEqual(p, q)
		})
		if i < 0 {
			out = append(out, p)
		} else {
			out[i].Stands += p.Stands
		}
	}
	slices.SortStableFunc(out, func(a, b snapshot.DroppedPacket) int { return cmp.Compare(b.Stands, a.Stands) })
	for len(out) > maxPackets {
		stands -= out[len(out)-1].Stands
		out = out[:len(out)-1]
	}
	if len(out) > 0 { // keys without a sample are like those that have one
		out[0].Stands += row.Count - min(row.Count, stands)
	}
	row.Packets = out
}

// Of enum ip_conntrack_info and ip_conntrack_status, which are part of the kernel's user API.
const (
	ctReply     = 3
	ctUntracked = 7
)

var ctStates = map[uint32]string{0: "established", 1: "related", 2: "new", 3: "established", 4: "related", ctUntracked: "untracked"}

var ctStatuses = []string{"expected", "seen-reply", "assured", "confirmed", "snat", "dnat"}

// packet is what rules ask for of it.
func (s *dropsDropSample) packet() snapshot.DroppedPacket {
	has := func(bit dropsDropClass) bool { return s.Key.Class&bit != 0 }
	p := snapshot.DroppedPacket{Text: s.String(), Mark: s.Mark, State: "invalid"}
	switch {
	case has(dropsDropClassDROP_OPAQUE):
		p.State = ""
	case has(dropsDropClassDROP_TRACKED | dropsDropClassDROP_UNTRACKED):
		p.State = ctStates[s.Ctinfo]
		p.Reply = s.Ctinfo >= ctReply && s.Ctinfo != ctUntracked
		for bit, name := range ctStatuses {
			if s.CtStatus&(1<<bit) != 0 {
				p.Status = append(p.Status, name)
			}
		}
	}
	switch {
	case has(dropsDropClassDROP_LOCAL):
		p.Stage = snapshot.StageLocal
	case has(dropsDropClassDROP_SENT):
		p.Stage = snapshot.StageLeaving
	case has(dropsDropClassDROP_ROUTED):
		p.Stage = snapshot.StageRouted
	default:
		p.Stage = snapshot.StageArrived
	}
	head := s.head()
	switch ethertype := swap16(s.Ethertype); {
	case ethertype == unix.ETH_P_IP && len(head) >= 20:
		p.TTL, p.DSCP, p.Length = head[8], head[1]>>2, uint32(binary.BigEndian.Uint16(head[2:]))
	case ethertype == unix.ETH_P_IPV6 && len(head) >= 40:
		p.TTL, p.DSCP, p.Length = head[7], (head[0]&15)<<2|head[1]>>6, uint32(binary.BigEndian.Uint16(head[4:]))+40
	}
	return p
}

// translated are IPS_SRC_NAT and IPS_DST_NAT: part of the kernel's user API.
const translated = 1<<4 | 1<<5

// head is what was kept of the packet, from its network header on.
func (s *dropsDropSample) head() []byte { return s.Packet[:min(int(s.Captured), len(s.Packet))] }

// flow is what the flow's first packet was before its translation, of a packet that is of the
// family of now.
func (s *dropsDropSample) flow(now tuple) tuple {
	src, dst := netip.AddrFrom16(s.Src), netip.AddrFrom16(s.Dst)
	if now.src.Addr().Is4() {
		src, dst = netip.AddrFrom4([4]byte(s.Src[:4])), netip.AddrFrom4([4]byte(s.Dst[:4]))
	}
	return tuple{protocol: s.Protocol, src: netip.AddrPortFrom(src, swap16(s.Sport)), dst: netip.AddrPortFrom(dst, swap16(s.Dport))}
}

// String writes the packet, and which flow it is of where its addresses do not show it.
func (s *dropsDropSample) String() string {
	ethertype := swap16(s.Ethertype)
	text := describe(ethertype, s.head())
	now, _, _, ok := parsePacket(ethertype, s.head())
	if !ok || s.CtStatus&translated == 0 {
		return text
	}
	if was := s.flow(now); was.ends() != now.ends() {
		return text + " (flow " + was.ends() + ")"
	}
	return text
}
