// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"natkit/internal/lab"
)

// What can go wrong with the rules of a packet filter, and what they cost.

var ruleFaults = []Fault{
	{
		Code:     "forward-policy-drop",
		Healthy:  "a published port as Docker sets it up: the FORWARD chain drops by policy, and Docker's rules accept what is published",
		Broken:   "the rules of the FORWARD chain are flushed, as a reloaded firewall does it; the policy stays",
		Cured:    "a rule accepts this traffic again",
		topology: "published",
		healthy:  browse,
		broken:   onGateway("nft flush chain ip filter FORWARD"),
		cure:     follow("ACCEPT"),
	},
	{
		Code:    "rule-drop",
		Healthy: "web traffic through a firewall that drops what a client sends to one address",
		Broken:  "a rule drops all that the client sends",
		Cured:   "that rule is deleted",
		healthy: do(send(datagrams("10.65.0.1:5353", 1, 5)), onGateway("iptables-legacy -A FORWARD -d 10.65.0.1 -j DROP"), browse),
		broken:  onGateway("iptables-legacy -A FORWARD -s {client} -j DROP"),
		cure:    follow(" -D FORWARD "),
	},
	{
		Code:    "other-drops",
		Healthy: "the firewall queues some traffic for a program (NFQUEUE), and lets it pass while none reads",
		Broken:  "the same without letting it pass, as when the program has ended",
		Cured:   "packets that no program reads pass again",
		Note:    "every kernel has this one of the functions that drop packets outside NAT; the finding shows what to add to the rule",
		healthy: do(swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", 5, 50)), onGateway("iptables-legacy -A FORWARD -p udp -j NFQUEUE --queue-num 9 --queue-bypass"), browse),
		broken:  onGateway("iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9"),
		cure:    onGateway("iptables-legacy -R FORWARD 1 -p udp -j NFQUEUE --queue-num 9 --queue-bypass"),
	},
	{
		Code:    "rule-chain-long",
		Healthy: "three hundred connections a second through a firewall with one rule and a set of two thousand addresses",
		Broken:  "the firewall has a rule for each of two thousand addresses",
		Cured:   "the set again, instead of the rules",
		healthy: do(browseAt(300), blockList(true)),
		broken:  blockList(false),
		cure:    do(follow("nft -a list chain"), blockList(true)),
	},
	{
		Code:    "iptables-two-backends",
		Healthy: "iptables-legacy has tables without rules beside the rules of nftables",
		Broken:  "iptables-legacy also translates and filters",
		Cured:   "its rules are converted to nftables, and its tables are emptied",
		healthy: do(onGateway("iptables-legacy -t nat -S", "iptables-legacy -S"), browse),
		broken: onGateway("iptables-legacy -t nat -A POSTROUTING -s {clients} -o eth0 -j MASQUERADE",
			"iptables-legacy -A FORWARD -s 198.18.0.0/15 -j DROP"),
		cure: follow("iptables-nft-restore", "iptables-legacy -t", "iptables-legacy -P"),
	},
	{
		Code:    "needless-hooks",
		Healthy: "a gateway with the rules that it needs, and web traffic",
		Broken:  "the tables mangle, raw and security also exist, with chains without a rule",
		Cured:   "the chains without a rule are deleted",
		healthy: do(browse, send(requests("{url}", 300))),
		broken:  do(emptyChains("raw", -300), emptyChains("mangle", -290), emptyChains("security", -280)),
		cure:    follow("nft delete chain"),
	},
	{
		Code:    "conntrack-helper",
		Healthy: "web traffic through a gateway; the kernel has helpers, but assigns none",
		Broken:  "a rule assigns the FTP helper to all connections to port 80",
		Cured:   "the rule and the connections with the helper are deleted",
		Note:    "the output of the finding's commands shows the rule; connections with the helper are removed to save time",
		healthy: browse,
		broken: nftText(`table ip helped {
	ct helper ftp { type "ftp" protocol tcp; }
	chain prerouting {
		type filter hook prerouting priority filter;
		tcp dport 80 ct helper set "ftp"
	}
}
`),
		cure: do(follow("nft -a list ruleset"), onGateway("nft delete table ip helped", "conntrack -F")),
	},
	{
		Code:    "conntrack-helper-missing",
		Healthy: "web traffic through the gateway, and a client that is logged in at an FTP server",
		Broken:  "the server opens the data connection to the client (active mode)",
		Cured:   "a rule assigns the FTP helper to connections to port 21",
		healthy: do(ftpServer, send(ftpClient(false)), browse),
		broken:  send(ftpClient(true)),
		cure:    follow("nft "),
	},
	{
		Code:     "br-netfilter-overhead",
		Healthy:  "a published port gets twenty requests a second: br_netfilter is on, and costs almost nothing",
		Broken:   "a published port gets a thousand requests a second, and bridged frames go through the IP packet filter",
		Cured:    "bridged frames no longer go through the IP packet filter",
		topology: "published",
		healthy:  do(needBridgeNF("bridged frames bypass the packet filter"), browseAt(20)),
		broken:   sendOnly(requests("{url}", 1000)),
		cure:     follow("bridge-nf-call-iptables=0"),
	},
	{
		Code:     "bridge-nf-missing",
		Healthy:  "a second container of the bridge reaches the first by the address of a service, which the host translates, with br_netfilter on",
		Broken:   "bridged frames no longer pass the IP packet filter",
		Cured:    "they do again",
		topology: "published",
		// The client gets a second leg, as a container of the bridge.
		healthy: do(needBridgeNF("replies between containers cannot be translated"),
			onGateway("ip link add veth1 master docker0 type veth peer name eth1 netns {client-netns}", "ip link set veth1 up",
				"nft add rule ip nat PREROUTING ip daddr 10.96.0.10 tcp dport 80 dnat to {server}:80"),
			onClient("ip addr add 172.17.0.3/16 dev eth1", "ip link set eth1 up", "ip route add 10.96.0.10/32 via 172.17.0.1"),
			serve(lab.HTTPServerOptions{}), send(requests("http://10.96.0.10/", 50))),
		broken: onGateway("sysctl -qw net.bridge.bridge-nf-call-iptables=0"),
		// What was tried before would be seen as unanswered for two minutes.
		cure: do(follow("bridge-nf-call-iptables=1"), onGateway("conntrack -F")),
	},
}

// needBridgeNF refuses where the kernel does not give bridged frames to netfilter.
func needBridgeNF(otherwise string) action {
	return func(_ context.Context, s *faultRun) error {
		if _, err := s.watched.SysctlValue("net.bridge.bridge-nf-call-iptables"); err != nil {
			return errors.New("br_netfilter is not loaded in this kernel (modprobe br_netfilter): " + otherwise)
		}
		return nil
	}
}

// emptyChains makes a table of chains without a rule.
func emptyChains(table string, priority int) action {
	lines := []string{"nft add table ip " + table}
	for _, hook := range []string{"prerouting", "forward", "postrouting"} {
		lines = append(lines, fmt.Sprintf("nft 'add chain ip %s %s { type filter hook %s priority %d; }'", table, hook, hook, priority))
	}
	return onGateway(lines...)
}

// blockList drops what comes from two thousand addresses that nobody has, by a set or by
// a rule for each.
func blockList(set bool) action {
	var addrs []string
	for n := range 2000 {
		addrs = append(addrs, fmt.Sprintf("198.18.%d.%d", n/250, 1+n%250))
	}
	rules := "  ip saddr " + strings.Join(addrs, " drop\n  ip saddr ") + " drop\n"
	if set {
		rules = "  ip saddr { " + strings.Join(addrs, ", ") + " } drop\n"
	}
	return nftText("add table ip firewall\ndelete table ip firewall\ntable ip firewall {\n chain forward {\n  type filter hook forward priority filter;\n" + rules + " }\n}\n")
}
