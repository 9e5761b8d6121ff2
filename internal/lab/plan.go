// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
	"slices"

	"natkit/internal/nat/nft"
	"natkit/internal/words/choice"
)

// plan is a topology as values: what Up makes, in the order in which it is made.
// A topology's file turns Options into one and does nothing.
type plan struct {
	topology string
	options  Options // filled

	nodes   []nodePlan
	bridges []bridgePlan
	links   []linkPlan
	routes  []routePlan
	owned   []ownedPlan
	rules   rules

	natRole    string
	serverRole string
	listen     []listenPlan
	url        string
	directURL  string
	drawing    string
}

type nodePlan struct {
	role    string
	addr    netip.Addr
	sysctls []sysctl
}

// sysctl is a setting of a namespace. An optional one belongs to something this
// kernel may not have; what that costs is the note.
type sysctl struct {
	key, value string
	optional   bool
	note       string
}

// bridgePlan is a bridge in a node; links name it as their master.
type bridgePlan struct {
	role, name string
	addr       netip.Prefix // may be zero: a plain switch
}

// linkPlan is a veth pair between two nodes.
type linkPlan struct{ a, b end }

type end struct {
	role, name string
	master     string       // "" or a bridge of the node
	addr       netip.Prefix // zero for a port of a bridge
}

// routePlan is a node's default route.
type routePlan struct {
	role string
	via  netip.Addr
}

// ownedPlan is a network all of whose addresses are the node's.
type ownedPlan struct {
	role    string
	network netip.Prefix
}

// listenPlan is where the background web server of Options.Server listens.
type listenPlan struct {
	role string
	addr netip.AddrPort
}

// rules are a NAT node's, in the two languages the rule sets need.
type rules struct {
	nft     nft.Ruleset
	restore string // iptables-restore input
}

// topologies by name; each file of a topology has one of these.
var topologies = map[string]func(Options) (plan, error){
	"routed":    planRouted,
	"published": planPublished,
	"carrier":   planCarrier,
}

// Topologies returns the names Up takes, sorted.
func Topologies() []string {
	return slices.Sorted(func(yield func(string) bool) {
		for name := range topologies {
			if !yield(name) {
				return
			}
		}
	})
}

func newPlan(topology string, o Options) (plan, error) {
	f, ok := topologies[topology]
	if !ok {
		return plan{}, fmt.Errorf("topology %w", choice.Error(topology, Topologies()...))
	}
	p, err := f(o)
	if err != nil {
		return plan{}, fmt.Errorf("topology %s: %w", topology, err)
	}
	p.topology = topology
	return p, nil
}

// quiet is what every namespace of a lab is set to, so that it does not depend on
// what the host's own settings hand down: no IPv6, no reverse path filter, and
// forwarding where it is wanted alone.
func quiet(forward bool) []sysctl {
	value := "0"
	if forward {
		value = "1"
	}
	return []sysctl{
		{key: "net.ipv6.conf.all.disable_ipv6", value: "1", optional: true},
		{key: "net.ipv6.conf.default.disable_ipv6", value: "1", optional: true},
		{key: "net.ipv4.conf.all.rp_filter", value: "0"},
		{key: "net.ipv4.conf.default.rp_filter", value: "0"},
		{key: "net.ipv4.ip_forward", value: value},
	}
}

// addClients gives the NAT node its clients: one at the other end of a cable, or
// several on a switch. Without any (a client on the host itself) the switch is
// what keeps the NAT node's interface up.
func (p *plan) addClients(natRole, natInterface string) {
	a := p.options.Addresses
	near := end{role: natRole, name: natInterface, addr: netip.PrefixFrom(a.Near, a.Client.Bits())}
	port := func(i int) end { return end{role: RoleLAN, name: fmt.Sprintf("port%d", i), master: "br0"} }

	var clients []netip.Addr
	if !p.options.LocalClient {
		clients = a.clients(p.options.Clients)
	}
	if len(clients) != 1 {
		p.nodes = append(p.nodes, nodePlan{role: RoleLAN, sysctls: append(quiet(false),
			// A switch: netfilter has no business in it.
			sysctl{key: "net.bridge.bridge-nf-call-iptables", value: "0", optional: true})})
		p.bridges = append(p.bridges, bridgePlan{role: RoleLAN, name: "br0"})
		p.links = append(p.links, linkPlan{near, port(0)})
	}
	for i, addr := range clients {
		role := clientRole(i)
		client := end{role: role, name: "eth0", addr: netip.PrefixFrom(addr, a.Client.Bits())}
		p.nodes = append(p.nodes, nodePlan{role: role, addr: addr, sysctls: quiet(false)})
		p.routes = append(p.routes, routePlan{role, a.Near})
		if len(clients) == 1 {
			p.links = append(p.links, linkPlan{client, near})
		} else {
			p.links = append(p.links, linkPlan{client, port(i + 1)})
		}
	}
}

// steps lists what Up would make, for a dry run.
func (p plan) steps(name string) []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for _, n := range p.nodes {
		add("network namespace %s", netnsName(name, n.role))
		for _, s := range n.sysctls {
			add("  sysctl %s = %s", s.key, s.value)
		}
	}
	for _, b := range p.bridges {
		add("bridge %s/%s%s", b.role, b.name, spaced(b.addr))
	}
	for _, l := range p.links {
		add("link %s -- %s", l.a, l.b)
	}
	for _, r := range p.routes {
		add("default route of %s via %s", r.role, r.via)
	}
	for _, o := range p.owned {
		add("addresses of %s: all of %s", o.role, o.network)
	}
	if p.options.Rules != RulesNone {
		add("NAT rules in %s, by %s", p.natRole, p.options.Rules)
	}
	if p.options.Server != ServerNone {
		for _, l := range p.listen {
			add("web server (%s) in %s on %s", p.options.Server, l.role, l.addr)
		}
	}
	return out
}

func (e end) String() string {
	s := e.role + "/" + e.name + spaced(e.addr)
	if e.master != "" {
		s += " (port of " + e.master + ")"
	}
	return s
}

func spaced(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return " " + p.String()
}
