// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"

	"github.com/google/nftables"
)

// Docker is a container network of a lab, for which natkit writes the rules that Docker would, and what
// is published of it. A real Docker is recognised in package probe (owners.go).
type Docker struct {
	Bridge  string       // the host's bridge: "docker0"
	Network netip.Prefix // the containers' addresses
	Publish []Publish
}

// Publish is a port of the host that leads into a container.
type Publish struct {
	Protocol uint8 // of IP: tcp 6, udp 17
	HostPort uint16
	To       netip.AddrPort
}

// Compile gives the rules that Docker keeps for such a network: destination
// translation of what is sent to the host, from outside and from the host
// itself; masquerading of what containers send out; a FORWARD chain that drops
// by default.
func (d Docker) Compile() Ruleset {
	dockerNAT := Chain{Name: "DOCKER", Rules: []Rule{rule(in(d.Bridge), ret())}}
	dockerFilter := Chain{Name: "DOCKER"}
	postrouting := Chain{Name: "POSTROUTING", Base: postroutingNAT(), Rules: []Rule{
		rule(source(d.Network), notOut(d.Bridge), masquerade()),
	}}
	for _, p := range d.Publish {
		to := netip.PrefixFrom(p.To.Addr(), 32)
		dockerNAT.Rules = append(dockerNAT.Rules,
			rule(notIn(d.Bridge), destPort(p.Protocol, p.HostPort), dnatTo(p.To)))
		dockerFilter.Rules = append(dockerFilter.Rules,
			rule(dest(to), notIn(d.Bridge), out(d.Bridge), destPort(p.Protocol, p.To.Port()), accept()))
		// A container that reaches itself by its published port must not see its own address as source.
		postrouting.Rules = append(postrouting.Rules,
			rule(source(to), dest(to), destPort(p.Protocol, p.To.Port()), masquerade()))
	}
	return Ruleset{
		{Name: "nat", Chains: []Chain{
			dockerNAT,
			{Name: "PREROUTING", Base: preroutingNAT(), Rules: []Rule{rule(destIsLocal(), jump("DOCKER"))}},
			{Name: "OUTPUT", Base: outputNAT(), Rules: []Rule{
				rule(notDest(netip.MustParsePrefix("127.0.0.0/8")), destIsLocal(), jump("DOCKER")),
			}},
			postrouting,
		}},
		{Name: "filter", Chains: []Chain{
			dockerFilter,
			{Name: "FORWARD", Base: forwardFilter(nftables.ChainPolicyDrop), Rules: []Rule{
				rule(out(d.Bridge), established(), accept()),
				rule(out(d.Bridge), jump("DOCKER")),
				rule(in(d.Bridge), accept()),
			}},
		}},
	}
}
