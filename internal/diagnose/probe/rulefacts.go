// SPDX-License-Identifier: Apache-2.0

package probe

// What follows from the conditions and the verdict of a rule, of nftables and iptables alike: what
// it drops, what it translates, and what packets of established flows meet.

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// ruleFacts are of a rule besides its conditions and its verdict.
type ruleFacts struct {
	nat       natRule
	perPacket []string
	lookups   []nftLookup
	offloads  bool
	mayEnd    bool // a statement that is no condition may end it all the same
}

// ending are expressions of nftables behind which a rule goes on for some packets only, besides
// those that compare.
var ending = map[string]bool{"queue": true, "dup": true, "fwd": true, "tproxy": true, "flow_offload": true, "synproxy": true, "dynset": true}

// sees notes what of an expression matters for every packet of a flow.
func (r *ruleReader) sees(name string, a nftAttrs) {
	r.mayEnd = r.mayEnd || ending[name]
	if nftPerPacket[name] && (name != "payload" && name != "exthdr" || writes(name, a)) || varies(r.family, name, a) {
		r.perPacket = append(r.perPacket, name)
	}
	switch name {
	case "ct":
		switch _, loads := a[unix.NFTA_CT_DREG]; a.number(unix.NFTA_CT_KEY) {
		case unix.NFT_CT_PKTS, unix.NFT_CT_BYTES, unix.NFT_CT_AVGPKT:
			if loads {
				r.perPacket = append(r.perPacket, "connbytes")
			}
		}
	case "meta":
		if _, sets := a[unix.NFTA_META_SREG]; sets && a.number(unix.NFTA_META_KEY) == unix.NFT_META_PRIORITY { // as CLASSIFY of iptables
			r.perPacket = append(r.perPacket, "priority")
		}
	case "match", "target": // they have the same numbers
		if name := a.text(unix.NFTA_TARGET_NAME); xtPerPacket[name] {
			r.perPacket = append(r.perPacket, name)
		}
	}
}

// writes tells whether an expression that can load a part of the packet changes it.
func writes(name string, a nftAttrs) bool {
	attr := uint16(unix.NFTA_PAYLOAD_SREG)
	if name == "exthdr" {
		attr = unix.NFTA_EXTHDR_SREG
	}
	const maxseg = 2 // TCP's MSS, which SYNs alone have
	_, source := a[attr]
	return source && (name != "exthdr" || a.number(unix.NFTA_EXTHDR_TYPE) != maxseg)
}

// varies tells whether packets of a flow differ in what is loaded: their length, TOS and
// TTL, TCP's numbers, the link's addresses, a random number, their CPU. Flags of TCP are not among it, because SYN, FIN
// and RST are what rules ask for.
func varies(family, name string, a nftAttrs) bool {
	base, offset := a.number(unix.NFTA_PAYLOAD_BASE), a.number(unix.NFTA_PAYLOAD_OFFSET)
	switch {
	case name == "meta":
		_, loads := a[unix.NFTA_META_DREG]
		key := a.number(unix.NFTA_META_KEY)
		return loads && (key == unix.NFT_META_LEN || key == unix.NFT_META_PRANDOM || key == unix.NFT_META_CPU)
	case name != "payload" || a[unix.NFTA_PAYLOAD_DREG] == nil:
		return false
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return family != "ip6" && offset < 9 && offset != 6 // of family inet, rules for IPv6 say so before
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return offset >= 4 && offset != 12 && offset != 13
	}
	return true
}

// addTo counts the rule in its chain, with what it drops or translates.
func (r *ruleReader) addTo(c *snapshot.Chain) {
	c.Rules++
	if r.offloads {
		c.Offloads++
	}
	if r.nat.kind != "" {
		r.nat.conditions(r.rule.Matches)
		addNAT(c, r.nat)
	}
	if r.drops() {
		drops := snapshot.DropRule{Number: r.rule.Number, Verdict: r.rule.Verdict, All: len(r.rule.Matches) == 0 && r.rule.Map == "" && !r.mayEnd}
		if n := r.rule.Packets; n != nil {
			drops.Packets = new(*n) // not the counter of Chain.Walk, whose increase is taken by itself
		}
		c.DropRules = append(c.DropRules, drops)
	}
}

func (r *ruleReader) drops() bool { return r.rule.Verdict == "drop" || r.rule.Verdict == "reject" }

// walked is what the rule does with packets of established flows.
func (r *ruleReader) walked() walkedRule {
	out := walkedRule{perPacket: r.perPacket, lookups: r.lookups, always: !r.mayEnd}
	if r.drops() { // no packet of the flow gets further, so each comes here
		out.perPacket = slices.DeleteFunc(slices.Clone(r.perPacket), func(name string) bool { return name == "log" })
	}
	for _, m := range r.rule.Matches {
		switch {
		case slices.Equal(m.Keys, []string{"ct state"}) && m.Set != "": // by its elements: walk.look
		case slices.Equal(m.Keys, []string{"ct state"}):
			out.never = out.never || slices.Contains(m.Values, "established") == m.Not
		default:
			out.always = false
			out.never = out.never || slices.Equal(m.Keys, []string{"meta nfproto"}) && !m.Not && !slices.Contains(m.Values, "ipv4")
		}
	}
	if r.rule.Map != "" && !slices.Equal(r.rule.MapKeys, []string{"ct state"}) {
		out.always = false
	}
	if r.rule.Verdict != "" {
		out.verdicts = []walkedVerdict{{r.rule.Verdict, r.rule.Chain}}
	}
	return out
}

// conditions reads those of the plain form: a protocol, one destination, its ports.
func (n *natRule) conditions(matches []snapshot.Match) {
	for _, m := range matches {
		if m.Not || m.Set != "" || m.Mask != 0 || len(m.Keys) != 1 || len(m.Values) != 1 {
			continue
		}
		switch v := m.Values[0]; m.Keys[0] {
		case "meta l4proto", "ip protocol":
			if v == "tcp" || v == "udp" {
				n.protocol = v
			}
		case "ip daddr", "ip6 daddr":
			if p, err := netip.ParsePrefix(v); err == nil && p.IsSingleIP() {
				n.dest = p.Addr()
			} else if a, err := netip.ParseAddr(v); err == nil {
				n.dest = a
			}
		case "tcp dport", "udp dport", "th dport":
			first, last, isRange := strings.Cut(v, "-")
			if !isRange {
				last = first
			}
			from, err1 := strconv.ParseUint(first, 10, 16)
			to, err2 := strconv.ParseUint(last, 10, 16)
			if err1 == nil && err2 == nil {
				n.destPorts = snapshot.PortRange{Min: uint16(from), Max: uint16(to)}
			}
		}
	}
}
