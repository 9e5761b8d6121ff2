// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"cmp"
	"net/netip"

	"natkit/snapshot"
)

// Gateway is a router that hides an inside network behind its outside address.
type Gateway struct {
	Inside  netip.Prefix // the network that is hidden
	Outside string       // the interface towards everybody else: "eth0"
	// Ports are those of the outside address that it may use; zero leaves the
	// choice to the kernel, which keeps the source port where it can.
	Ports snapshot.PortRange
	Table string // name of the table, "" for "nat"
}

// Compile gives the one rule that takes.
func (g Gateway) Compile() Ruleset {
	return Ruleset{{Name: cmp.Or(g.Table, "nat"), Chains: []Chain{{
		Name: "POSTROUTING", Base: postroutingNAT(),
		Rules: []Rule{rule(source(g.Inside), out(g.Outside), masqueradeTo(g.Ports))},
	}}}}
}
