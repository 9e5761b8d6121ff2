// SPDX-License-Identifier: Apache-2.0

package natproof

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Random rules for the router, as iptables-save and as nft would have them.

// oneOf takes one.
func oneOf[T any](r *rand.Rand, choices ...T) T { return choices[r.IntN(len(choices))] }

// Maker makes rules of one seed, once.
type Maker struct {
	*rand.Rand
	b strings.Builder // what it makes
}

var (
	Links       = []string{"eth0", "ppp0", "eth1", "eth2"}
	madePublic  = []string{"203.0.113.1", "203.0.113.5", "203.0.113.6", "203.0.113.129"}
	madeHosts   = []string{"10.1.2.3", "10.1.2.4", "10.1.9.9", "10.2.0.7", "10.2.5.5"}
	madeNets    = []string{"10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "10.2.0.0/16", "10.0.0.0/8", "10.1.2.0/23"}
	madeRemotes = []string{"198.51.100.7", "192.0.2.9", "192.0.2.77"}
	madePorts   = []int{22, 53, 80, 443, 1000, 1005, 1010, 2000}
)

// --- iptables --------------------------------------------------------------------------

func (m *Maker) not() string { return oneOf(m.Rand, "", "", "", "! ") }

// IPTables is a table nat.
func (m *Maker) IPTables() string {
	m.b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n:P0 - [0:0]\n:P1 - [0:0]\n:S0 - [0:0]\n:S1 - [0:0]\n")
	for range 1 + m.IntN(5) {
		m.iptablesRule("PREROUTING", true, []string{"P0", "P1"})
	}
	for range 1 + m.IntN(4) {
		m.iptablesRule("POSTROUTING", false, []string{"S0", "S1"})
	}
	for _, c := range []struct {
		name string
		pre  bool
		to   []string
	}{{"P0", true, []string{"P1"}}, {"P1", true, nil}, {"S0", false, []string{"S1"}}, {"S1", false, nil}} {
		for range m.IntN(4) {
			m.iptablesRule(c.name, c.pre, c.to)
		}
	}
	m.b.WriteString("COMMIT\n")
	return m.b.String()
}

func (m *Maker) iptablesRule(chain string, pre bool, jumps []string) {
	words := []string{"-A", chain}
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if pre {
		if m.IntN(3) == 0 {
			add("%s-s %s", m.not(), oneOf(m.Rand, "198.51.100.0/24", "10.1.0.0/16", "10.2.0.0/16"))
		}
		switch m.IntN(5) {
		case 0, 1:
			add("%s-d %s/32", m.not(), oneOf(m.Rand, madePublic...))
		case 2:
			add("-d 203.0.113.4/30")
		case 3:
			add("-d 100.64.1.0/24")
		}
		if m.IntN(2) == 0 {
			add("%s-i %s", m.not(), oneOf(m.Rand, "eth0", "ppp0", "eth1", "eth2", "eth+"))
		}
	} else {
		if m.IntN(4) > 0 {
			add("%s-s %s", m.not(), oneOf(m.Rand, madeNets...))
		}
		if m.IntN(3) == 0 {
			add("%s-d %s", m.not(), oneOf(m.Rand, "10.0.0.0/8", "10.2.0.0/16", "198.51.100.0/24", "192.0.2.9/32"))
		}
		if m.IntN(2) == 0 {
			add("%s-o %s", m.not(), oneOf(m.Rand, Links...))
		}
	}
	proto := oneOf(m.Rand, "", "", "tcp", "tcp", "udp", "icmp")
	if !pre && m.IntN(2) == 0 {
		proto = ""
	}
	if proto != "" {
		add("-p %s", proto)
	}
	ports := ""
	if proto == "tcp" || proto == "udp" {
		switch a, b := oneOf(m.Rand, madePorts...), oneOf(m.Rand, madePorts...); m.IntN(4) {
		case 0, 1:
			ports = fmt.Sprint(a)
			add("-m %s %s--dport %d", proto, m.not(), a)
		case 2:
			ports = fmt.Sprintf("%d-%d", min(a, b), max(a, b))
			add("-m %s --dport %d:%d", proto, min(a, b), max(a, b))
		case 3:
			add("-m multiport %s--dports %d,%d:%d", m.not(), a, min(b, 1004), max(b, 1006))
		}
	}
	switch m.IntN(12) {
	case 0:
		if pre {
			add("-m addrtype %s--dst-type LOCAL", m.not())
		}
	case 1:
		add("-m statistic --mode random --probability %s", oneOf(m.Rand, "0.50000000000", "0.25000000000", "0.90000000000"))
	case 2:
		add("-m statistic --mode nth --every %d --packet 0", 2+m.IntN(2))
	case 3:
		add("-m conntrack --ctstate %s", oneOf(m.Rand, "NEW", "RELATED,ESTABLISHED", "NEW,RELATED"))
	case 4:
		add("-m length --length %s", oneOf(m.Rand, "0:1000", "1000:2000"))
	case 5:
		add("-m mark %s--mark 0x%x/0xff", m.not(), 1+m.IntN(2))
	case 6:
		add("-m iprange --dst-range %s", oneOf(m.Rand, "203.0.113.1-203.0.113.5", "10.1.2.3-10.2.0.7", "192.0.2.0-198.51.100.255"))
	}
	words = append(words, m.iptablesTarget(pre, proto, ports, jumps)...)
	m.b.WriteString(strings.Join(words, " ") + "\n")
}

func (m *Maker) iptablesTarget(pre bool, proto, ports string, jumps []string) []string {
	target := func(format string, args ...any) []string { return []string{fmt.Sprintf(format, args...)} }
	if k := m.IntN(7); k == 0 && len(jumps) > 0 {
		return target("%s %s", oneOf(m.Rand, "-j", "-j", "-g"), oneOf(m.Rand, jumps...))
	} else if k == 1 {
		return target("-j %s", oneOf(m.Rand, "ACCEPT", "RETURN", "RETURN"))
	} else if k == 2 && m.IntN(2) == 0 {
		return target("-j MARK --set-xmark 0x%x/0xff", 1+m.IntN(2))
	}
	host := oneOf(m.Rand, madeHosts...)
	withPorts := proto == "tcp" || proto == "udp"
	if pre {
		switch k := m.IntN(10); {
		case k == 0 && withPorts && strings.Contains(ports, "-"):
			first, last, _ := strings.Cut(ports, "-")
			var a, b int
			fmt.Sscan(first, &a)
			fmt.Sscan(last, &b)
			return target("-j DNAT --to-destination %s:%d-%d/%d", host, 5000, 5000+b-a, a)
		case k < 4 && withPorts:
			return target("-j DNAT --to-destination %s:%d", host, oneOf(m.Rand, 8080, 8443))
		case k == 4:
			return target("-j DNAT --to-destination 10.1.2.3-10.1.2.4%s", oneOf(m.Rand, "", " --random", " --persistent"))
		case k == 5:
			return target("-j NETMAP --to 10.1.2.0/24")
		case k == 6 && withPorts:
			return target("-j REDIRECT --to-ports 3128")
		}
		return target("-j DNAT --to-destination %s", host)
	}
	switch m.IntN(6) {
	case 0:
		return target("-j SNAT --to-source 203.0.113.%d", oneOf(m.Rand, 1, 20, 21))
	case 1:
		return target("-j SNAT --to-source 203.0.113.32-203.0.113.35%s", oneOf(m.Rand, "", " --persistent"))
	case 2:
		return target("-j NETMAP --to 100.64.1.0/24")
	}
	return target("-j MASQUERADE%s", oneOf(m.Rand, "", "", " --random-fully"))
}

// --- nftables --------------------------------------------------------------------------

// NFTables is a table with sets, maps and chains.
func (m *Maker) NFTables() string {
	family := oneOf(m.Rand, "ip", "inet")
	fmt.Fprintf(&m.b, "table %s t {\n", family)
	m.b.WriteString(`	set ports { type inet_service; flags interval; elements = { 80, 1000-1005 } }
	set nets { type ipv4_addr; flags interval; elements = { 10.1.2.0/24, 10.2.0.0-10.2.0.255 } }
	set ends { type inet_proto . ipv4_addr . inet_service; elements = { tcp . 203.0.113.1 . 80, udp . 203.0.113.5 . 53 } }
	map sends { type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; elements = { tcp . 203.0.113.1 . 443 : 10.1.2.3 . 8443, udp . 203.0.113.6 . 53 : 10.2.0.7 . 53, tcp . 203.0.113.5 . 22 : 10.1.2.4 . 22 } }
	map hosts { type ipv4_addr : ipv4_addr; elements = { 203.0.113.5 : 10.1.9.9, 203.0.113.6 : 10.2.5.5 } }
	map hides { type ipv4_addr : ipv4_addr; flags interval; elements = { 10.1.0.0/16 : 203.0.113.20, 10.2.0.7 : 203.0.113.21 } }
	chain p1 {
`)
	ip := map[string]string{"ip": "", "inet": "ip "}[family]
	for range m.IntN(3) {
		m.nftRule(true, ip, nil, nil)
	}
	m.b.WriteString("	}\n	chain p0 {\n")
	for range m.IntN(3) {
		m.nftRule(true, ip, []string{"p1"}, nil)
	}
	m.b.WriteString("	}\n	map leads { type ipv4_addr . inet_service : verdict; elements = { 203.0.113.1 . 80 : jump p0, 203.0.113.5 . 443 : goto p1, 203.0.113.6 . 1000 : return, 203.0.113.1 . 22 : accept } }\n")
	m.b.WriteString("	chain s0 {\n")
	for range m.IntN(3) {
		m.nftRule(false, ip, nil, nil)
	}
	m.b.WriteString("	}\n	chain pre {\n		type nat hook prerouting priority dstnat; policy accept;\n")
	for range 1 + m.IntN(5) {
		m.nftRule(true, ip, []string{"p0", "p1"}, []string{"leads"})
	}
	m.b.WriteString("	}\n	chain post {\n		type nat hook postrouting priority srcnat; policy accept;\n")
	for range 1 + m.IntN(4) {
		m.nftRule(false, ip, []string{"s0"}, nil)
	}
	m.b.WriteString("	}\n}\n")
	return m.b.String()
}

func (m *Maker) nftRule(pre bool, ip string, jumps, maps []string) {
	var words []string
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	ne := func() string { return oneOf(m.Rand, "", "", "", "!= ") }
	if pre {
		switch m.IntN(8) {
		case 0, 1:
			add("ip daddr %s%s", ne(), oneOf(m.Rand, madePublic...))
		case 2:
			add("ip daddr { 203.0.113.5, 203.0.113.6 }")
		case 3:
			add("ip daddr 203.0.113.4/30")
		case 4:
			add("fib daddr type local")
		case 5:
			add("ip saddr %s@nets", ne())
		}
		if m.IntN(2) == 0 {
			add("iifname %s", oneOf(m.Rand, `"eth0"`, `!= "eth1"`, `"eth*"`, `{ "eth0", "ppp0" }`, `"eth2"`))
		}
	} else {
		switch m.IntN(5) {
		case 0, 1:
			add("ip saddr %s%s", ne(), oneOf(m.Rand, madeNets...))
		case 2:
			add("ip saddr %s@nets", ne())
		case 3:
			add("ip saddr 10.0.0.0/8 ip daddr %s10.0.0.0/8", ne())
		}
		if m.IntN(2) == 0 {
			add("%s %s", oneOf(m.Rand, "oifname", "oifname", "iifname"), oneOf(m.Rand, `"eth0"`, `!= "eth1"`, `{ "eth0", "ppp0" }`, `"ppp0"`))
		}
	}
	proto := ""
	if pre || m.IntN(4) == 0 {
		proto = oneOf(m.Rand, "", "tcp", "udp", "both", "ends", "icmp")
	}
	switch proto {
	case "tcp", "udp":
		switch a, b := oneOf(m.Rand, madePorts...), oneOf(m.Rand, madePorts...); m.IntN(5) {
		case 0, 1:
			add("%s dport %s%d", proto, ne(), a)
		case 2:
			add("%s dport %d-%d", proto, min(a, b), max(a, b)+1)
		case 3:
			add("%s dport %s@ports", proto, ne())
		case 4:
			add("%s dport > %d", proto, a)
		}
	case "both":
		add("meta l4proto { tcp, udp } th dport %d", oneOf(m.Rand, madePorts...))
	case "ends":
		add("meta l4proto . ip daddr . th dport %s@ends", ne())
	case "icmp":
		add("ip protocol icmp")
	}
	switch m.IntN(12) {
	case 0:
		add("meta mark & 0xff == %d", 1+m.IntN(2))
	case 1:
		add("ct state new")
	case 2:
		add("ip ttl < 100")
	case 3:
		add("counter")
	case 4:
		add("numgen random mod 10 < %d", 1+m.IntN(9))
	}
	m.nftVerdict(pre, ip, proto, jumps, maps, add)
	m.b.WriteString("\t\t" + strings.Join(words, " ") + "\n")
}

func (m *Maker) nftVerdict(pre bool, ip, proto string, jumps, maps []string, add func(string, ...any)) {
	if k := m.IntN(8); k == 0 && len(jumps) > 0 {
		add("%s %s", oneOf(m.Rand, "jump", "goto"), oneOf(m.Rand, jumps...))
		return
	} else if k == 1 {
		add("%s", oneOf(m.Rand, "accept", "return"))
		return
	} else if k == 2 && len(maps) > 0 {
		if proto == "" {
			add("ip daddr . th dport vmap @leads")
			return
		}
		add("return")
		return
	} else if k == 3 && m.IntN(2) == 0 {
		add("meta mark set meta mark | %d", 1+m.IntN(2))
		return
	}
	host := oneOf(m.Rand, madeHosts...)
	ports := proto == "tcp" || proto == "udp" || proto == "both"
	if pre {
		switch k := m.IntN(10); {
		case k < 3 && ports:
			add("dnat %sto %s:%d", ip, host, oneOf(m.Rand, 8080, 8443))
		case k == 3 && proto == "":
			add("dnat %sto meta l4proto . ip daddr . th dport map @sends", ip)
		case k == 4:
			add("dnat %sto ip daddr map @hosts", ip)
		case k == 5:
			add("dnat %sto numgen %s mod %s", ip, oneOf(m.Rand, "random", "inc"), oneOf(m.Rand, "2 map { 0 : 10.1.2.3, 1 : 10.1.2.4 }", "10 map { 0-8 : 10.1.2.3, 9 : 10.2.0.7 }"))
		case k == 6 && ports:
			add("redirect to :3128")
		case k == 7:
			add("dnat %sto jhash ip saddr mod 2 map { 0 : 10.1.2.3, 1 : 10.2.0.7 }", ip)
		default:
			add("dnat %sto %s", ip, host)
		}
		return
	}
	switch m.IntN(7) {
	case 0:
		add("snat %sto 203.0.113.%d", ip, oneOf(m.Rand, 1, 20, 21))
	case 1:
		add("snat %sto 203.0.113.32-203.0.113.35 persistent", ip)
	case 2:
		add("snat %sto ip saddr map @hides", ip)
	case 3:
		add("ip saddr 10.1.2.0/24 snat %sprefix to 100.64.1.0/24", ip)
	default:
		add("masquerade%s", oneOf(m.Rand, "", " fully-random"))
	}
}
