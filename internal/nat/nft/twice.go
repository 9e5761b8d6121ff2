// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"

	"github.com/google/nftables"
)

// Rulesets for the set-ups of a published experiment with the NAT of Linux 2.0,
// which scanned one list of rules for every packet, on its way in and on its way
// out. Today's NAT asks its rules about the first packet of a connection only;
// rewriting without connection tracking asks them about every packet, as then.

// IdleNAT is NAT without a rule: packets are tracked, and meet the hooks that
// would translate them.
func IdleNAT() Ruleset {
	return Ruleset{{Name: "nat", Chains: []Chain{
		// Nothing jumps there. A rule about connections makes the kernel track them.
		{Name: "tracked", Rules: []Rule{rule(established(), accept())}},
		{Name: "PREROUTING", Base: preroutingNAT()},
		{Name: "POSTROUTING", Base: postroutingNAT()},
	}}}
}

// OneToOne lets a host be seen by another address beyond the outside device,
// both ways.
func OneToOne(host, seenAs netip.Addr, outside string) Ruleset {
	return Ruleset{{Name: "nat", Chains: []Chain{
		{Name: "PREROUTING", Base: preroutingNAT(), Rules: []Rule{
			rule(dest(netip.PrefixFrom(seenAs, 32)), in(outside), dnatAddress(host)),
		}},
		{Name: "POSTROUTING", Base: postroutingNAT(), Rules: []Rule{
			rule(source(netip.PrefixFrom(host, 32)), out(outside), snatAddress(seenAs)),
		}},
	}}}
}

// Double is translation of each packet twice: on ingress to an address that
// is seen on the router alone, on egress to the final one.
type Double struct {
	Host, Middle, SeenAs netip.Addr
	Inside, Outside      string       // devices
	Idle                 []netip.Addr // hosts that send nothing, a rule for each stands first
}

// Compile gives one list of rules, which packets go through in prerouting and in
// postrouting.
func (d Double) Compile() Ruleset {
	single := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, 32) }
	list := Chain{Name: "list"}
	for _, h := range d.Idle {
		list.Rules = append(list.Rules, rule(source(single(h)), rewrite(sourceOffset, single(d.Middle))))
	}
	list.Rules = append(list.Rules,
		rule(source(single(d.Host)), in(d.Inside), rewrite(sourceOffset, single(d.Middle))),
		rule(source(single(d.Middle)), out(d.Outside), rewrite(sourceOffset, single(d.SeenAs))),
		rule(dest(single(d.SeenAs)), in(d.Outside), rewrite(destOffset, single(d.Middle))),
		rule(dest(single(d.Middle)), out(d.Inside), rewrite(destOffset, single(d.Host))))
	prerouting := filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	postrouting := filterChain("POSTROUTING", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	prerouting.Rules = []Rule{rule(jump(list.Name))}
	postrouting.Rules = []Rule{rule(jump(list.Name))}
	return Ruleset{{Name: "double", Chains: []Chain{list, prerouting, postrouting}}}
}
