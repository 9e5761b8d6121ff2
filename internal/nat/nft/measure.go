// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Rulesets that are measured beside a gateway's own: what costs what.

// EmptyHooks registers chains without a rule where a gateway's packets pass: the
// netfilter framework, and nothing that it calls does anything.
func EmptyHooks() Ruleset {
	return Ruleset{{Name: "empty", Chains: []Chain{
		filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw),
		filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPriorityFilter),
		filterChain("POSTROUTING", nftables.ChainHookPostrouting, nftables.ChainPriorityMangle),
	}}}
}

// Distribution is the gateway with all that distributions and Docker register
// besides: the tables raw, mangle, security and filter of iptables, the first
// three without a rule, in the last established flows accepted behind a user's
// empty chain.
func (g Gateway) Distribution() Ruleset {
	user := Chain{Name: "DOCKER-USER", Rules: []Rule{rule(ret())}}
	forward := filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPriorityFilter)
	forward.Rules = []Rule{rule(jump(user.Name)), rule(established(), accept()), rule(in(g.Outside), drop())}
	return append(Ruleset{
		{Name: "raw", Chains: []Chain{
			filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw),
		}},
		{Name: "mangle", Chains: []Chain{
			filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityMangle),
			filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPriorityMangle),
			filterChain("POSTROUTING", nftables.ChainHookPostrouting, nftables.ChainPriorityMangle),
		}},
		{Name: "security", Chains: []Chain{
			filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPrioritySecurity),
		}},
		{Name: "filter", Chains: []Chain{user, forward}},
	}, g.Compile()...)
}

// Filtered is the gateway behind a filter that every packet walks through: a rule that drops
// what one of the hosts sends, for each of them, and only then established flows accepted.
func (g Gateway) Filtered(hosts []netip.Addr) Ruleset {
	forward := filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPriorityFilter)
	for _, h := range hosts {
		forward.Rules = append(forward.Rules, rule(source(netip.PrefixFrom(h, 32)), drop()))
	}
	forward.Rules = append(forward.Rules, rule(established(), accept()))
	return append(Ruleset{{Name: "filter", Chains: []Chain{forward}}}, g.Compile()...)
}

// Helped is the gateway whose UDP flows all have a helper of that type.
func (g Gateway) Helped(helper string) Ruleset {
	prerouting := filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityFilter)
	prerouting.Rules = []Rule{rule(protocol(unix.IPPROTO_UDP), []expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_CT_HELPER, Name: helper}})}
	return append(Ruleset{{
		Name: "helped", Helpers: []Helper{{Name: helper, Type: helper, Protocol: unix.IPPROTO_UDP}}, Chains: []Chain{prerouting},
	}}, g.Compile()...)
}

// Offloaded is the gateway with a flowtable: flows that both sides have spoken in
// go past the hooks, from one device to the other.
func (g Gateway) Offloaded(inside string) Ruleset {
	forward := filterChain("FORWARD", nftables.ChainHookForward, nftables.ChainPriorityFilter)
	forward.Rules = []Rule{{&expr.FlowOffload{Name: "fast"}}}
	return append(Ruleset{{
		Name: "offload", Flowtables: []Flowtable{{Name: "fast", Devices: []string{inside, g.Outside}}},
		Chains: []Chain{forward},
	}}, g.Compile()...)
}

// Behind is the gateway with rules before its own: each translates one of the
// hosts, which send nothing.
func (g Gateway) Behind(hosts []netip.Addr, outside netip.Addr) Ruleset {
	r := g.Compile()
	chain := &r[0].Chains[0]
	rules := make([]Rule, 0, len(hosts)+len(chain.Rules))
	for _, h := range hosts {
		rules = append(rules, rule(source(netip.PrefixFrom(h, 32)), out(g.Outside), snatAddress(outside)))
	}
	chain.Rules = append(rules, chain.Rules...)
	return r
}

// BehindMap is Behind with a map instead of rules: one look-up for all hosts.
func (g Gateway) BehindMap(hosts []netip.Addr, outside netip.Addr) Ruleset {
	r := g.Compile()
	m := Set{
		Name: "hosts", Key: []nftables.SetDatatype{nftables.TypeIPAddr}, Data: []nftables.SetDatatype{nftables.TypeIPAddr},
		Elements: make([]Element, len(hosts)),
	}
	for i, h := range hosts {
		m.Elements[i] = Element{Key: h.AsSlice(), Value: outside.AsSlice()}
	}
	r[0].Sets = []Set{m}
	chain := &r[0].Chains[0]
	chain.Rules = append([]Rule{rule(out(g.Outside), snatByMap(m.Name))}, chain.Rules...)
	return r
}

// Stateless rewrites the addresses of a network to those of another of the same
// length and back, without connection tracking: what leaves by the outside
// device, and what comes in there.
func Stateless(inside, outside netip.Prefix, device string) Ruleset {
	postrouting := filterChain("POSTROUTING", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	postrouting.Rules = []Rule{rule(source(inside), out(device), rewrite(sourceOffset, outside))}
	prerouting := filterChain("PREROUTING", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	prerouting.Rules = []Rule{rule(dest(outside), in(device), rewrite(destOffset, inside))}
	return Ruleset{{Name: "stateless", Chains: []Chain{prerouting, postrouting}}}
}

func filterChain(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority) Chain {
	return Chain{Name: name, Base: &Base{nftables.ChainTypeFilter, hook, priority, nftables.ChainPolicyAccept}}
}

// counter snat to ADDRESS
func snatAddress(to netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: to.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: familyIPv4, RegAddrMin: 1},
	}
}

// counter dnat to ADDRESS
func dnatAddress(to netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: to.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: familyIPv4, RegAddrMin: 1},
	}
}

// snat to ip saddr map @NAME
func snatByMap(name string) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: sourceOffset, Len: 4},
		&expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: name},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: familyIPv4, RegAddrMin: 1},
	}
}

// counter ip saddr set ip saddr & HOSTMASK | NETWORK, or daddr; a single address
// is set as it is
func rewrite(offset uint32, network netip.Prefix) []expr.Any {
	network = network.Masked()
	words := []expr.Any{&expr.Counter{}, &expr.Immediate{Register: 1, Data: network.Addr().AsSlice()}}
	if !network.IsSingleIP() {
		hosts := ^(^uint32(0) << (32 - network.Bits()))
		words = []expr.Any{
			&expr.Counter{},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
			&expr.Bitwise{
				SourceRegister: 1, DestRegister: 1, Len: 4,
				Mask: binaryutil.BigEndian.PutUint32(hosts), Xor: network.Addr().AsSlice(),
			},
		}
	}
	return append(words, &expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4,
		CsumType: expr.CsumTypeInet, CsumOffset: checksumOffset, CsumFlags: pseudoHeader,
	})
}
