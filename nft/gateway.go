// SPDX-License-Identifier: Apache-2.0

package nft

import "net/netip"

// Gateway is a router that hides an inside network behind its outside address.
type Gateway struct {
	Inside  netip.Prefix // the network that is hidden
	Outside string       // the interface towards everybody else: "eth0"
}

// Compile gives the one rule that takes.
func (g Gateway) Compile() Ruleset {
	return Ruleset{{Name: "nat", Chains: []Chain{{
		Name: "POSTROUTING", Base: postroutingNAT(),
		Rules: []Rule{rule(source(g.Inside), out(g.Outside), masquerade())},
	}}}}
}
