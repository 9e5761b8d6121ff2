// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"net/netip"

	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// Gateway is a router that hides an inside network behind its external address.
type Gateway struct {
	Inside  netip.Prefix // the network that is hidden
	Outside string       // the interface towards everybody else: "eth0"

	// Address and Ports, where given, are the external address and its ports that
	// TCP and UDP are translated to. Without, the network is masqueraded: the
	// interface's own address, and the source port kept where that is possible.
	Address netip.Addr
	Ports   snapshot.PortRange

	// Pool, where given, are the external addresses instead: a host keeps one of them.
	Pool netip.Prefix

	Table string // name of the table, "" for "nat"
}

// Compile gives the one rule that takes, or one for each protocol with ports.
func (g Gateway) Compile() Ruleset {
	hidden := rule(source(g.Inside), out(g.Outside))
	rules := []Rule{rule(hidden, masquerade())}
	if g.Address.IsValid() {
		to := snatTo(g.Address, g.Ports)
		rules = []Rule{rule(hidden, protocol(unix.IPPROTO_TCP), to), rule(hidden, protocol(unix.IPPROTO_UDP), to)}
	}
	if g.Pool.IsValid() {
		rules = []Rule{rule(hidden, snatRange(rulefile.RangeOf(g.Pool), rulefile.PortRange{}))}
	}
	return Ruleset{{Name: cmp.Or(g.Table, "nat"), Chains: []Chain{{
		Name: "POSTROUTING", Base: postroutingNAT(), Rules: rules,
	}}}}
}
