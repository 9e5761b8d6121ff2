// SPDX-License-Identifier: Apache-2.0

package probe

// What the readers of nftables and of iptables-legacy share: a chain is read
// twice with the totals of its counters, and the two become one with increases.

import (
	"cmp"
	"encoding/binary"
	"slices"

	"natkit/snapshot"
)

// maxChains is how many chains of one back end a Snapshot tells of. Kubernetes
// makes a few a service; base chains come first and are always in.
const maxChains = 20000

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

// addNAT notes a rule that translates, with the ports its source translation allows.
func addNAT(c *snapshot.Chain, kind string, ports snapshot.PortRange) {
	if c.NATRules == nil {
		c.NATRules = map[string]int{}
	}
	c.NATRules[kind]++
	if (kind == "snat" || kind == "masquerade") && !slices.Contains(c.SNATRanges, ports) {
		c.SNATRanges = append(c.SNATRanges, ports)
	}
}

// xtNATKinds are the targets of iptables that translate.
var xtNATKinds = map[string]string{
	"MASQUERADE": "masquerade", "SNAT": "snat", "DNAT": "dnat", "REDIRECT": "redirect", "NETMAP": "netmap",
}

// xtNATPorts reads the port range from the private part of such a target. IPv4
// targets of revision 0 have a struct nf_nat_ipv4_multi_range_compat (20 bytes
// and padding), all others a struct nf_nat_range (40) or one that begins so.
func xtNATPorts(info []byte) snapshot.PortRange {
	const protoSpecified = 1 << 1 // NF_NAT_RANGE_PROTO_SPECIFIED
	var flags uint32
	var ports []byte
	switch {
	case len(info) >= 40:
		flags, ports = binary.NativeEndian.Uint32(info), info[36:]
	case len(info) >= 20:
		flags, ports = binary.NativeEndian.Uint32(info[4:]), info[16:]
	}
	if flags&protoSpecified == 0 {
		return snapshot.PortRange{}
	}
	return snapshot.PortRange{Min: binary.BigEndian.Uint16(ports), Max: binary.BigEndian.Uint16(ports[2:])}
}
