// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"natkit/internal/bench"
	"natkit/internal/lab"
)

// What can go wrong around NAT: links and neighbours, routes, and the programs at both ends.

var linkFaults = []Fault{
	{
		Code:    "link-down",
		Healthy: "web traffic through the gateway",
		Broken:  "the gateway's interface to the clients is set down",
		Cured:   "it is set up",
		healthy: browse,
		broken:  onGateway("ip link set dev eth1 down"),
		cure:    follow("ip link set"),
	},
	{
		Code:    "mtu-drop",
		Healthy: "the gateway's link to the clients carries packets of 1000 bytes only, and its ICMP messages reach the server",
		Broken:  "a firewall drops the gateway's ICMP messages, and the server's path MTU entry has expired",
		Cured:   "the TCP MSS is clamped to what fits; connections that already hang are closed",
		healthy: do(serve(lab.HTTPServerOptions{Body: bytes.Repeat([]byte("natkit lab\n"), 1000)}), send(requests("{url}", 100)), onGateway("ip link set dev eth1 mtu 1000")),
		// Nothing that the gateway itself sends gets out, and the server gives hanging
		// connections up after seconds instead of minutes.
		broken: do(onGateway("nft add table ip mute", "nft 'add chain ip mute output { type filter hook output priority filter; policy drop; }'"),
			onServer("sysctl -qw net.ipv4.route.flush=1 net.ipv4.tcp_retries2=2 net.ipv4.tcp_orphan_retries=2")),
		cure: do(follow("natkit-mss"), ended(lab.RoleServer)),
	},
	{
		Code:    "qdisc-drop",
		Healthy: "the gateway shapes what it sends to the clients to 100 Mbit/s, and web traffic takes some of that",
		Broken:  "the shaper is set to 4 Mbit/s with room for two packets",
		Cured:   "the shaper passes what arrives, with room for bursts",
		healthy: do(serve(lab.HTTPServerOptions{Body: bytes.Repeat([]byte("natkit lab\n"), 500)}), send(requests("{url}", 100)), shape("100mbit", "256k")),
		broken:  shape("4mbit", "4000"),
		cure:    follow("tc qdisc replace"),
	},
	{
		Code:    "vlan-mismatch",
		Healthy: "web traffic through the gateway, and requests of another VLAN of the trunk, for a router of its own",
		Broken:  "requests for the gateway arrive with the tag of that VLAN",
		Cured:   "the switch sends them untagged",
		Note:    "only the owner of the network knows whether the tag or the interface is wrong: here it is the tag, which the cure removes",
		healthy: do(send(taggedARP("10.30.0.2", "10.30.0.1")), browse),
		broken:  send(taggedARP("{client}", "{near}")),
		cure:    unsend,
	},
	{
		Code:    "wrong-destination-mac",
		Healthy: "web traffic through the gateway",
		Broken:  "the client's ARP entry for the gateway has the hardware address of a card that is gone",
		Cured:   "the gateway announces its own address",
		healthy: browse,
		broken:  onClient("ip neigh replace {near} lladdr 02:00:00:00:0e:ad nud reachable dev eth0"),
		cure:    follow("arping -U"),
	},
	{
		Code:    "duplicate-address",
		Healthy: "web traffic through the gateway, and a second host on the clients' network",
		Broken:  "the second host also has the gateway's address",
		Cured:   "it is removed there, and the gateway announces its hardware address",
		clients: 2,
		healthy: browse,
		broken:  on("client2", "ip addr add {near-net} dev eth0"),
		cure:    do(on("client2", "ip addr del {near-net} dev eth0"), follow("arping -U")),
	},
	{
		Code:    "arp-refused",
		Healthy: "web traffic through the gateway, which does not reply to ARP for an address of its loopback interface, like servers behind a load balancer",
		Broken:  "the gateway replies to ARP for none of its addresses (arp_ignore=8), and the client has no ARP entry for it",
		Cured:   "the setting is undone",
		Note:    "the client sends ARP requests every 100 ms instead of every second, to save time",
		healthy: do(onClient("sysctl -w net.ipv4.neigh.eth0.retrans_time_ms=100"), onGateway("sysctl -w net.ipv4.conf.all.arp_ignore=1 && ip addr add 192.168.0.77/32 dev lo"), browse),
		broken:  do(atLeast(2*time.Second), onGateway("sysctl -w net.ipv4.conf.eth1.arp_ignore=8"), onClient("ip neigh del {near} dev eth0 || true")),
		cure:    follow("sysctl -w"),
	},
	{
		Code:    "clients-unreached",
		Healthy: "web traffic through the gateway",
		Broken:  "the gateway has a permanent entry with another hardware address for the client",
		Cured:   "the entry is deleted, and the gateway resolves the address again",
		healthy: browse,
		// A client and its server try again after one second, and then after two more.
		broken: do(atLeast(3*time.Second), onGateway("ip neigh replace {client} lladdr 02:00:00:00:00:99 nud permanent dev eth1")),
		cure:   follow("neigh del"),
	},
	{
		Code:    "next-hop-silent",
		Healthy: "web traffic through the gateway, and two packets for an address of the server's network that nobody has",
		Broken:  "the client talks to a network behind another router, which is gone",
		Cured:   "the router is back",
		Note:    "the cure is on that router, so it is not a command of the finding; the gateway sends ARP requests every 10 ms instead of every second, to save time",
		healthy: do(onGateway("sysctl -w net.ipv4.neigh.eth0.retrans_time_ms=10"), send(spray("{nobody}", 2, 100)), browse),
		broken:  do(talkBeyond, onGateway("ip route add 10.66.0.0/24 via {router}")),
		cure:    onServer("ip addr add {router}/24 dev eth0"),
	},
}

var routeFaults = []Fault{
	{
		Code:    "ip-forward-off",
		Healthy: "the doctor watches the web server behind the gateway: a host with forwarding off, which is normal for hosts",
		Broken:  "forwarding is off on the gateway",
		Cured:   "forwarding is turned on",
		healthy: do(watch(lab.RoleServer), browse),
		broken:  do(watch(lab.RoleGateway), onGateway("sysctl -qw net.ipv4.ip_forward=0")),
		cure:    follow("sysctl -w"),
	},
	{
		Code:    "no-route",
		Healthy: "web traffic through the gateway, and two packets for an address that nobody has",
		Broken:  "the client talks to a network behind the server, and the gateway's route there is gone",
		Cured:   "the gateway has the route again",
		Note:    "only its owner knows which router leads to a network, so the cure follows the finding's description, with the router of this lab",
		healthy: do(send(spray("10.65.0.1", 2, 100)), browse),
		broken:  talkBeyond,
		cure:    byOwner(lab.RoleGateway, "ip route add 10.66.0.0/24 via {server}"),
	},
	{
		Code:    "routing-loop",
		Healthy: "web traffic through the gateway",
		Broken:  "the gateway sends packets for a network to the server, and the server sends them back",
		Cured:   "the server has that network, and sends nothing back",
		Note:    "only their owner knows which of the two routers is wrong: here it is the server, whose route the cure corrects",
		// An address that is not masqueraded: a packet with the gateway's own would end its
		// first turn there.
		healthy: do(onClient("ip addr add 10.99.0.1/32 dev lo"), browse),
		broken: do(onServer("sysctl -qw net.ipv4.ip_forward=1"), swallow(lab.RoleServer, 5353), onGateway("ip route add 10.66.0.0/24 via {server}"),
			send(datagramsFrom("10.99.0.1", "10.66.0.1:5353", 3, 50, 10))),
		cure: byOwner(lab.RoleServer, "ip addr add 10.66.0.1/24 dev lo   # on the server"),
	},
	{
		Code:    "ttl-exceeded",
		Healthy: "datagrams through the gateway, and a traceroute that has two packets a second expire there",
		Broken:  "the client sends with TTL 1: nothing of it gets past the gateway",
		Cured:   "the client sends with TTL 64",
		healthy: do(swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", 3, 50), packets(lab.RoleClient, 2, func(s *faultRun, _ int) []byte {
			return datagram{from: s.addr("{client}"), to: s.addr("{server}"), ttl: 1, payload: []byte("natkit lab")}.packet()
		}))),
		broken: onClient("sysctl -qw net.ipv4.ip_default_ttl=1"),
		cure:   byOwner(lab.RoleClient, "sysctl -w net.ipv4.ip_default_ttl=64   # on the client"),
	},
	{
		Code:    "rp-filter-drop",
		Healthy: "the gateway filters strictly by reverse path, and routes are symmetric",
		Broken:  "the client sends from an address whose return path uses the gateway's other interface",
		Cured:   "filtering is set to loose on that interface",
		healthy: do(onGateway("sysctl -qw net.ipv4.conf.eth1.rp_filter=1"), browse),
		broken: do(swallow(lab.RoleServer, 5353), onClient("ip addr add 10.99.0.1/32 dev lo"), onGateway("ip route add 10.99.0.1/32 via {server}"),
			send(datagramsFrom("10.99.0.1", "{server}:5353", 10, 50, 10))),
		cure: follow("sysctl -w"),
	},
	{
		Code:    "martian-drop",
		Healthy: "web traffic through the gateway, on which a server listens on 127.0.0.1",
		Broken:  "the gateway's port 8080 is forwarded to that server, and nothing arrives",
		Cured:   "packets that a rule translates to 127.0.0.1 are accepted, and those sent there directly are not",
		healthy: do(serveAt(lab.RoleGateway, "127.0.0.1:80", lab.HTTPServerOptions{}), browse),
		broken: do(onGateway("nft add table ip published", "nft 'add chain ip published prerouting { type nat hook prerouting priority dstnat; }'",
			"nft add rule ip published prerouting tcp dport 8080 dnat to 127.0.0.1:80"), send(requests("http://{near}:8080/", 50))),
		cure: follow("natkit-localnet", "route_localnet=1"),
	},
	asymmetricBy("nft add table ip firewall", "nft 'add chain ip firewall forward { type filter hook forward priority filter; }'",
		"nft add rule ip firewall forward ct state invalid counter drop"),
	{
		Code:    "ipsec-policies-many",
		Healthy: "a gateway with one IPsec policy, and web traffic that does not match it",
		Broken:  "the gateway has two hundred policies, one for each small network of a site",
		Cured:   "one policy covers the whole site",
		Note:    "only their owner knows which policies may become one, so the cure follows the finding's description",
		healthy: do(browse, send(requests("{url}", 300)), onGateway(onePolicy)),
		broken:  onGateway("ip xfrm policy flush", "seq 0 199 | sed 's|.*|xfrm policy add src {clients} dst 10.20.&.0/24 dir out tmpl src {far} dst {server} proto esp mode tunnel|' | ip -batch -"),
		cure:    byOwner(lab.RoleGateway, "ip xfrm policy flush", onePolicy),
	},
}

var programFaults = []Fault{
	{
		Code:    "listen-overflow",
		Healthy: "a web server with a long accept queue takes 300 connections at a time",
		Broken:  "the web server is started with a queue for one connection, and 300 arrive at a time",
		Cured:   "the server is restarted with the backlog that the finding proposes",
		healthy: do(watch(lab.RoleServer), send(pages(bench.HTTPOptions{URL: "{url}", Concurrency: 300})), serve(lab.HTTPServerOptions{})),
		broken:  do(closeAll, serve(lab.HTTPServerOptions{Backlog: 1})),
		cure:    do(closeAll, serveWithFoundBacklog),
	},
	{
		Code:    "receive-buffer-full",
		Healthy: "a program on the server replies to datagrams",
		Broken:  "it stops reading, and the datagrams continue",
		Cured:   "it reads again",
		Note:    "the cure is in the program, so it is not a command of the finding",
		healthy: do(watch(lab.RoleServer), send(datagrams("{server}:5300", 20, 50)), echo(lab.RoleServer, 5300)),
		broken:  do(closeAll, deaf(lab.RoleServer, 5300)),
		cure:    do(closeAll, echo(lab.RoleServer, 5300)),
	},
	{
		Code:    "local-ports-exhausted",
		Healthy: "the gateway itself has 350 connections to a server, from a range of 500 ports",
		Broken:  "it opens more, until connect() fails",
		Cured:   "it gets more ports, and opens another connection",
		healthy: do(onGateway("sysctl -qw net.ipv4.ip_local_port_range='40000 40499'"), accept(lab.RoleServer, 8000), connect(lab.RoleGateway, "{server}:8000", 350)),
		broken:  connectToTheLast(lab.RoleGateway, "{server}:8000", 500),
		cure:    do(follow("net.ipv4.ip_local_port_range="), connect(lab.RoleGateway, "{server}:8000", 1)),
	},
	{
		Code:    "answered-from-elsewhere",
		Healthy: "a program on the server replies from the address to which the datagrams were sent",
		Broken:  "it replies from the server's other address",
		Cured:   "it is bound to the address that clients ask",
		Note:    "the cure is a setting of the program, not a command of the finding",
		healthy: do(echo(lab.RoleServer, 5300), background(datagrams("{server}:5300", 20, 10))),
		broken: do(closeAll, onServer("ip address add {spare}/24 dev eth0"), background(datagrams("{server}:5300", 20, 10)),
			echoFrom(lab.RoleServer, "{server}:5300", "{spare}:5300")),
		cure: do(closeLast(2), echo(lab.RoleServer, 5300)), // those who ask go on
	},
}

// talkBeyond has the client talk to a network behind the server, which the gateway may know
// a way to.
var talkBeyond = do(swallow(lab.RoleServer, 5353), onServer("ip addr add 10.66.0.1/24 dev lo"), send(datagrams("10.66.0.1:5353", 5, 50)))

const onePolicy = "ip xfrm policy add src {clients} dst 10.20.0.0/16 dir out tmpl src {far} dst {server} proto esp mode tunnel"

// shape puts a token bucket in place of what the gateway sends to the clients by. veth hands over
// what TCP made in one piece: with a smaller burst the bucket would have to hold 64 KiB at once.
func shape(rate, limit string) action {
	return onGateway(fmt.Sprintf("tc qdisc replace dev eth1 root handle 1: tbf rate %s burst 16k limit %s", rate, limit))
}

// asymmetricBy is a fault on a gateway whose firewall is made by these commands.
func asymmetricBy(firewall ...string) Fault {
	return Fault{
		Code:    "asymmetric-routing",
		Healthy: "the gateway forwards without NAT and drops invalid packets, as firewalls do",
		Broken:  "the server replies by another path, around the gateway",
		Cured:   "traffic between the two is excluded from connection tracking",
		// The other way exists, and is not used yet.
		healthy: do(onGateway("nft delete table ip nat"), onGateway(firewall...),
			onClient("ip link add eth1 type veth peer name eth1 netns {server-netns}", "ip addr add 10.98.0.1/30 dev eth1", "ip link set eth1 up"),
			onServer("ip addr add 10.98.0.2/30 dev eth1", "ip link set eth1 up"), browse),
		broken: onServer("ip route add {client}/32 via 10.98.0.1"),
		// What was sent before is forgotten, as it would be after two minutes.
		cure: do(follow("natkit-notrack"), onGateway("conntrack -F")),
	}
}

// serveWithFoundBacklog is a server as the finding proposes it.
func serveWithFoundBacklog(ctx context.Context, s *faultRun) error {
	var backlog int
	for _, line := range s.found.Remedy {
		if _, after, ok := strings.Cut(line, "backlog="); ok {
			fmt.Sscanf(after, "%d", &backlog)
		}
	}
	if backlog == 0 {
		return fmt.Errorf("the remedy of %s names no backlog:\n%s", s.found.Code, strings.Join(s.found.Remedy, "\n"))
	}
	s.commands = append(s.commands, fmt.Sprintf("# listen with a backlog of %d", backlog))
	return serve(lab.HTTPServerOptions{Backlog: backlog})(ctx, s)
}
