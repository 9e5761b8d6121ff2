// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"

	"natkit/internal/nat/nft"
)

// planPublished is a host with a port published into a container, as Docker sets
// it up.
//
//	┌────────────────┐     ┌─────────────────────────────────────┐     ┌───────────────┐
//	│ client         │     │ host                                │     │ container     │
//	│ eth0           ├─────┤ eth0                docker0 = veth0 ├─────┤ eth0          │
//	│ 192.168.0.2/24 │     │ 192.168.0.96/24     172.17.0.1/16   │     │ 172.17.0.2/16 │
//	└────────────────┘     └─────────────────────────────────────┘     └───────────────┘
//	                         published: 192.168.0.96:8080 -> 172.17.0.2:80
//
// The baseline without NAT is a server on the host itself, on port 80.
func planPublished(o Options) (plan, error) {
	o, err := o.fill(Addresses{
		Client: netip.MustParsePrefix("192.168.0.2/24"), Near: netip.MustParseAddr("192.168.0.96"),
		Far: netip.MustParsePrefix("172.17.0.1/16"), Server: netip.MustParseAddr("172.17.0.2"),
		Port: 8080,
	})
	if err != nil {
		return plan{}, err
	}
	const bridge = "docker0"
	a := o.Addresses
	container := netip.PrefixFrom(a.Server, a.Far.Bits())
	target := netip.AddrPortFrom(a.Server, serverPort)

	p := plan{
		options: o,
		natRole: RoleHost, serverRole: RoleContainer,
		listen: []listenPlan{{RoleContainer, target}, {RoleHost, netip.AddrPortFrom(a.Near, serverPort)}},
		url:    fmt.Sprintf("http://%s:%d/", a.Near, a.Port), directURL: fmt.Sprintf("http://%s/", a.Near),
		rules: rules{
			nft: nft.Docker{Bridge: bridge, Network: a.Far, Publish: []nft.Publish{
				{Protocol: 6, HostPort: a.Port, To: target},
			}}.Compile(),
			restore: fmt.Sprintf(`*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s %[1]s ! -o docker0 -j MASQUERADE
-A POSTROUTING -s %[2]s -d %[2]s -p tcp --dport %[3]d -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp --dport %[4]d -j DNAT --to-destination %[2]s:%[3]d
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 -j ACCEPT
-A DOCKER -d %[2]s ! -i docker0 -o docker0 -p tcp --dport %[3]d -j ACCEPT
COMMIT
`, a.Far.Masked(), a.Server, serverPort, a.Port),
		},
	}
	if a.Port == serverPort {
		return plan{}, fmt.Errorf("port %d: taken by the server on the host itself, choose another", a.Port)
	}
	p.addClients(RoleHost, "eth0")
	p.nodes = append(p.nodes,
		nodePlan{role: RoleHost, addr: a.Near, sysctls: append(quiet(true),
			sysctl{key: "net.bridge.bridge-nf-call-iptables", value: "1", optional: true,
				note: "br_netfilter is not loaded: frames bypass netfilter on docker0, unlike on a Docker host (modprobe br_netfilter)"})},
		nodePlan{role: RoleContainer, addr: a.Server, sysctls: quiet(false)})
	p.bridges = append(p.bridges, bridgePlan{role: RoleHost, name: bridge, addr: a.Far})
	p.links = append(p.links, linkPlan{
		end{role: RoleHost, name: "veth0", master: bridge},
		end{role: RoleContainer, name: "eth0", addr: container}})
	p.routes = append(p.routes, routePlan{RoleContainer, a.Far.Addr()})

	title := "host"
	if o.LocalClient {
		title = "host (the client is here)"
	}
	near := netip.PrefixFrom(a.Near, a.Client.Bits())
	p.drawing = draw(append(p.clientBoxes(),
		[]string{title, fmt.Sprintf("%-20s%s", "eth0", "docker0 = veth0"), fmt.Sprintf("%-20s%s", near, a.Far)},
		[]string{"container", "eth0", container.String()})...)
	if o.Rules != RulesNone {
		p.drawing += fmt.Sprintf("published: %s:%d -> %s\n", a.Near, a.Port, target)
	}
	return p, nil
}
