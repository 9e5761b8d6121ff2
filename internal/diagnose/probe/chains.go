// SPDX-License-Identifier: Apache-2.0

package probe

// What the readers of nftables and of iptables-legacy share: a chain is read
// twice with the totals of its counters, and the two become one with increases.

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"natkit/internal/snapshot"
)

// maxChains is how many chains of one back end a Snapshot tells of; base chains
// come first and are always in.
const maxChains = snapshot.MaxChains

// chainIncreases turns the totals in after's counters to increases since before.
func chainIncreases(before, after []snapshot.Chain) []snapshot.Chain {
	type key struct{ family, table, name string }
	known := make(map[key]*snapshot.Chain, len(before))
	for i := range before {
		c := &before[i]
		known[key{c.Family, c.Table, c.Name}] = c
	}
	for i := range after {
		c := &after[i]
		was := known[key{c.Family, c.Table, c.Name}]
		if c.PolicyPackets != nil {
			var start uint64 // a chain that is new has counted from zero
			if was != nil && was.PolicyPackets != nil {
				start = *was.PolicyPackets
			}
			*c.PolicyPackets = increase(start, *c.PolicyPackets)
		}
		// Rules are paired by their place. When there are more or fewer than before,
		// which is which is not known.
		samePlaces := was == nil || was.Rules == c.Rules && len(was.DropRules) == len(c.DropRules)
		for j := range c.DropRules {
			r := &c.DropRules[j]
			switch {
			case r.Packets == nil:
			case !samePlaces:
				r.Packets = nil
			case was != nil && was.DropRules[j].Packets != nil:
				*r.Packets = increase(*was.DropRules[j].Packets, *r.Packets)
			}
		}
		ruleIncreases(was, c)
		slices.SortStableFunc(c.DropRules, func(a, b snapshot.DropRule) int {
			return cmp.Compare(packets(b), packets(a))
		})
		c.DropRules = c.DropRules[:min(len(c.DropRules), snapshot.TopN)]
	}
	slices.SortStableFunc(after, func(a, b snapshot.Chain) int {
		return cmp.Compare(base(b), base(a))
	})
	return after[:min(len(after), maxChains)]
}

// ruleIncreases does the same for the counters of Walk. Rules of nftables are known by their
// handles, others by their place.
func ruleIncreases(was, c *snapshot.Chain) {
	before := map[uint64]uint64{}
	samePlaces := was == nil || len(was.Walk) == len(c.Walk)
	id := func(r snapshot.Rule) uint64 {
		if r.Handle != 0 {
			return r.Handle
		}
		return uint64(r.Number)
	}
	if was != nil {
		for _, r := range was.Walk {
			if r.Packets != nil {
				before[id(r)] = *r.Packets
			}
		}
	}
	for i := range c.Walk {
		switch r := &c.Walk[i]; {
		case r.Packets == nil:
		case r.Handle == 0 && !samePlaces:
			r.Packets = nil
		default:
			*r.Packets = increase(before[id(*r)], *r.Packets)
		}
	}
}

func packets(r snapshot.DropRule) uint64 {
	if r.Packets == nil {
		return 0
	}
	return *r.Packets
}

func base(c snapshot.Chain) int {
	if c.Hook == "" {
		return 0
	}
	return 1
}

// natRule is a rule that translates, as far as its kind needs.
type natRule struct {
	kind  string             // masquerade, snat, dnat, redirect, netmap
	ports snapshot.PortRange // that it translates to; empty where it gives none
	addrs snapshot.AddrRange // the same; not valid where it gives none that can be read
	// Its conditions, as far as they are of the plain form; not set otherwise.
	protocol  string
	destPorts snapshot.PortRange
	dest      netip.Addr
}

// addNAT notes a rule that translates, with what its translation allows.
func addNAT(c *snapshot.Chain, r natRule) {
	if c.NATRules == nil {
		c.NATRules = map[string]int{}
	}
	c.NATRules[r.kind]++
	if (r.kind == "snat" || r.kind == "masquerade") && !slices.Contains(c.SNATRanges, r.ports) {
		c.SNATRanges = append(c.SNATRanges, r.ports)
	}
	switch r.kind {
	case "snat":
		switch {
		case r.addrs.First.IsValid() && slices.Contains(c.SNATTo, r.addrs):
		case r.addrs.First.IsValid() && len(c.SNATTo) < snapshot.MaxTargets:
			c.SNATTo = append(c.SNATTo, r.addrs)
		default:
			c.SNATUnknown = true
		}
	case "netmap": // of sources or of destinations, by the hook
		c.SNATUnknown, c.DNATUnknown = true, true
	case "dnat":
		t := snapshot.Target{AddrRange: r.addrs, Ports: r.ports, Protocol: r.protocol, DestPorts: r.destPorts, Dest: r.dest}
		switch {
		case r.addrs.First.IsValid() && slices.Contains(c.DNATTo, t):
		case r.addrs.First.IsValid() && len(c.DNATTo) < snapshot.MaxTargets:
			c.DNATTo = append(c.DNATTo, t)
		default:
			c.DNATUnknown = true
		}
	}
}

// xtNATKinds are the targets of iptables that translate.
var xtNATKinds = map[string]string{
	"MASQUERADE": "masquerade", "SNAT": "snat", "DNAT": "dnat", "REDIRECT": "redirect", "NETMAP": "netmap",
}

// xtNATRange reads addresses and ports from the private part of such a target.
// IPv4 targets of revision 0 have a struct nf_nat_ipv4_multi_range_compat (20
// bytes and padding), all others a struct nf_nat_range (40) or one that begins so.
// A masquerade has no addresses, whatever stands there.
func xtNATRange(family string, info []byte) (addrs snapshot.AddrRange, ports snapshot.PortRange) {
	const (
		mapIPs         = 1 << 0 // NF_NAT_RANGE_MAP_IPS
		protoSpecified = 1 << 1 // NF_NAT_RANGE_PROTO_SPECIFIED
	)
	var flags uint32
	var first, last, raw []byte
	switch {
	case len(info) >= 40:
		flags, first, last, raw = binary.NativeEndian.Uint32(info), info[4:20], info[20:36], info[36:]
		if family == "ip" {
			first, last = first[:4], last[:4]
		}
	case len(info) >= 20:
		flags, first, last, raw = binary.NativeEndian.Uint32(info[4:]), info[8:12], info[12:16], info[16:]
	}
	if flags&mapIPs != 0 {
		addrs.First, _ = netip.AddrFromSlice(first)
		addrs.Last, _ = netip.AddrFromSlice(last)
	}
	if flags&protoSpecified != 0 {
		ports = snapshot.PortRange{Min: binary.BigEndian.Uint16(raw), Max: binary.BigEndian.Uint16(raw[2:])}
	}
	return addrs, ports
}
