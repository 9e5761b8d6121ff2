// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"

	"natkit/internal/nat/nft"
)

// planRouted is a gateway that hides the clients' network behind its own outside
// address.
//
//	┌────────────────┐     ┌─────────────────────────────────────┐     ┌────────────────┐
//	│ client         │     │ gateway                             │     │ server         │
//	│ eth0           ├─────┤ eth1                eth0            ├─────┤ eth0           │
//	│ 192.168.0.2/24 │     │ 192.168.0.1/24      203.0.113.1/24  │     │ 203.0.113.2/24 │
//	└────────────────┘     └─────────────────────────────────────┘     └────────────────┘
//	                         masquerade: 192.168.0.0/24 -> 203.0.113.1
//
// The server has a route back to the clients, so that without rules the same
// path is plain forwarding: the baseline.
func planRouted(o Options) (plan, error) {
	if o.LocalClient {
		return plan{}, fmt.Errorf("a local client needs the topology published: a gateway does not translate what it sends itself")
	}
	o, err := o.fill(Addresses{
		Client: netip.MustParsePrefix("192.168.0.2/24"), Near: netip.MustParseAddr("192.168.0.1"),
		Far: netip.MustParsePrefix("203.0.113.1/24"), Server: netip.MustParseAddr("203.0.113.2"),
	})
	if err != nil {
		return plan{}, err
	}
	a := o.Addresses
	if a.Port != 0 {
		return plan{}, fmt.Errorf("port %d: only the topology published has a published port", a.Port)
	}
	inside := a.Client.Masked()
	server := netip.PrefixFrom(a.Server, a.Far.Bits())

	p := plan{
		options: o,
		natRole: RoleGateway, serverRole: RoleServer,
		listen: []listenPlan{{RoleServer, netip.AddrPortFrom(a.Server, serverPort)}},
		url:    fmt.Sprintf("http://%s/", a.Server), directURL: fmt.Sprintf("http://%s/", a.Server),
		rules: rules{
			nft: nft.Gateway{Inside: inside, Outside: "eth0"}.Compile(),
			restore: fmt.Sprintf(`*nat
-A POSTROUTING -s %s -o eth0 -j MASQUERADE
COMMIT
`, inside),
		},
	}
	p.addClients(RoleGateway, "eth1")
	p.nodes = append(p.nodes,
		nodePlan{role: RoleGateway, addr: a.Near, sysctls: quiet(true)},
		nodePlan{role: RoleServer, addr: a.Server, sysctls: quiet(false)})
	p.links = append(p.links, linkPlan{
		end{role: RoleGateway, name: "eth0", addr: a.Far},
		end{role: RoleServer, name: "eth0", addr: server}})
	p.routes = append(p.routes, routePlan{RoleServer, a.Far.Addr()})

	near := netip.PrefixFrom(a.Near, a.Client.Bits())
	p.drawing = draw(append(p.clientBoxes(),
		[]string{"gateway", fmt.Sprintf("%-20s%s", "eth1", "eth0"), fmt.Sprintf("%-20s%s", near, a.Far)},
		[]string{"server", "eth0", server.String()})...)
	if o.Rules != RulesNone {
		p.drawing += fmt.Sprintf("masquerade: %s -> %s\n", inside, a.Far.Addr())
	}
	return p, nil
}
