// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/diagnose/probe"
	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// ruleSets publish a service of containers 172.17.0.2 and, where they balance, 172.17.0.3,
// and let these out, in the form that who is named writes. OTHER in remove is the last
// number of the container that stays.
var ruleSets = []struct {
	name, bridge  string
	tool          []string
	rules         string
	service       string // of UDP and TCP
	balanced      bool
	seen          string // the address that containers see the server have
	remove        string // the endpoint, from the rules
	removeEntries []string
}{
	{name: "Docker", bridge: "docker0", tool: []string{"iptables-nft-restore", "-n"}, service: "198.51.100.1:8080", seen: "198.51.100.9", rules: `*raw
-A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p udp -m udp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-ISOLATION-STAGE-1
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
COMMIT
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER ! -i docker0 -p udp -m udp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
`, remove: `*nat
-D DOCKER ! -i docker0 -p udp -m udp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
-D DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p udp -m udp --dport 80 -j ACCEPT
COMMIT
`, removeEntries: []string{"--orig-port-dst", "8080"}},

	{name: "kube-proxy with iptables", bridge: "cni0", tool: []string{"iptables-nft-restore", "-n"}, service: "10.96.171.32:80", balanced: true, seen: "172.17.0.1", rules: `*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SEP-T2 - [0:0]
:KUBE-SEP-T3 - [0:0]
:KUBE-SEP-U2 - [0:0]
:KUBE-SEP-U3 - [0:0]
:KUBE-SVC-T - [0:0]
:KUBE-SVC-U - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 172.17.0.0/16 ! -d 172.17.0.0/16 -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-T2 -s 172.17.0.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-T2 -p tcp -m comment --comment "default/web:http" -m tcp -j DNAT --to-destination 172.17.0.2:80
-A KUBE-SEP-T3 -s 172.17.0.3/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-T3 -p tcp -m comment --comment "default/web:http" -m tcp -j DNAT --to-destination 172.17.0.3:80
-A KUBE-SEP-U2 -s 172.17.0.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-U2 -p udp -m comment --comment "default/web:quic" -m udp -j DNAT --to-destination 172.17.0.2:80
-A KUBE-SEP-U3 -s 172.17.0.3/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-U3 -p udp -m comment --comment "default/web:quic" -m udp -j DNAT --to-destination 172.17.0.3:80
-A KUBE-SERVICES -d 10.96.171.32/32 -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-T
-A KUBE-SERVICES -d 10.96.171.32/32 -p udp -m comment --comment "default/web:quic cluster IP" -m udp --dport 80 -j KUBE-SVC-U
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-T ! -s 172.17.0.0/16 -d 10.96.171.32/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-T -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-T2
-A KUBE-SVC-T -j KUBE-SEP-T3
-A KUBE-SVC-U ! -s 172.17.0.0/16 -d 10.96.171.32/32 -p udp -m udp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-U -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-U2
-A KUBE-SVC-U -j KUBE-SEP-U3
COMMIT
`, remove: `*nat
:KUBE-SVC-U - [0:0]
-A KUBE-SVC-U ! -s 172.17.0.0/16 -d 10.96.171.32/32 -p udp -m udp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-U -j KUBE-SEP-UOTHER
COMMIT
`, removeEntries: []string{"--orig-dst", "10.96.171.32", "--dst-nat"}},

	{name: "kube-proxy with nftables", bridge: "cni0", tool: []string{"nft", "-f", "-"}, service: "10.96.171.32:80", balanced: true, seen: "172.17.0.1", rules: `
table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { 10.96.171.32 }; }
	map no-endpoint-services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.7.7 . tcp . 80 : goto reject-chain }
	}
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.171.32 . tcp . 80 : goto service-T, 10.96.171.32 . udp . 80 : goto service-U }
	}
	chain reject-chain { reject; }
	chain mark-for-masquerade { meta mark set meta mark | 0x4000; }
	chain masquerading {
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade fully-random
	}
	chain endpoint-T2 { ip saddr 172.17.0.2 jump mark-for-masquerade; meta l4proto tcp dnat to 172.17.0.2:80; }
	chain endpoint-T3 { ip saddr 172.17.0.3 jump mark-for-masquerade; meta l4proto tcp dnat to 172.17.0.3:80; }
	chain endpoint-U2 { ip saddr 172.17.0.2 jump mark-for-masquerade; meta l4proto udp dnat to 172.17.0.2:80; }
	chain endpoint-U3 { ip saddr 172.17.0.3 jump mark-for-masquerade; meta l4proto udp dnat to 172.17.0.3:80; }
	chain service-T {
		ip daddr 10.96.171.32 tcp dport 80 ip saddr != 172.17.0.0/16 jump mark-for-masquerade
		numgen random mod 2 vmap { 0 : goto endpoint-T2, 1 : goto endpoint-T3 }
	}
	chain service-U {
		ip daddr 10.96.171.32 udp dport 80 ip saddr != 172.17.0.0/16 jump mark-for-masquerade
		numgen random mod 2 vmap { 0 : goto endpoint-U2, 1 : goto endpoint-U3 }
	}
	chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
	chain cluster-ips-check { ip daddr @cluster-ips reject; }
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept; jump services; }
	chain nat-output { type nat hook output priority -100; policy accept; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; policy accept; jump masquerading; }
	chain filter-forward { type filter hook forward priority -110; policy accept; ct state new jump service-endpoints-check; }
	chain filter-forward-post-dnat { type filter hook forward priority filter; policy accept; ct state new jump cluster-ips-check; }
}
table ip cni { chain post { type nat hook postrouting priority srcnat + 1; ip saddr 172.17.0.0/16 ip daddr != 172.17.0.0/16 masquerade fully-random; }; }
`, remove: `
flush chain ip kube-proxy service-U
add rule ip kube-proxy service-U ip daddr 10.96.171.32 udp dport 80 ip saddr != 172.17.0.0/16 jump mark-for-masquerade
add rule ip kube-proxy service-U numgen random mod 1 vmap { 0 : goto endpoint-UOTHER }
`, removeEntries: []string{"--orig-dst", "10.96.171.32", "--dst-nat"}},

	{name: "firewalld", bridge: "lan", tool: []string{"nft", "-f", "-"}, service: "198.51.100.1:8080", seen: "198.51.100.9", rules: `
table inet firewalld {
	ct helper helper-ftp-tcp { type "ftp" protocol tcp; }
	chain mangle_PREROUTING { type filter hook prerouting priority mangle + 10; policy accept; }
	chain nat_PRE_external_allow {
		meta nfproto ipv4 tcp dport 8080 dnat ip to 172.17.0.2:80
		meta nfproto ipv4 udp dport 8080 dnat ip to 172.17.0.2:80
	}
	chain nat_PREROUTING_ZONES { iifname "out" goto nat_PRE_external_allow; }
	chain nat_PREROUTING { type nat hook prerouting priority dstnat + 10; policy accept; jump nat_PREROUTING_ZONES; }
	chain nat_POST_external { meta nfproto ipv4 oifname != "lo" masquerade; }
	chain nat_POSTROUTING_ZONES { oifname "out" goto nat_POST_external; }
	chain nat_POSTROUTING { type nat hook postrouting priority srcnat + 10; policy accept; jump nat_POSTROUTING_ZONES; }
	chain filter_PREROUTING {
		type filter hook prerouting priority filter + 10; policy accept
		icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept
		meta nfproto ipv6 fib saddr . mark . iif oif missing drop
	}
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		udp dport 8080 accept
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10; policy accept
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		ip6 daddr { ::/96, ::ffff:0.0.0.0/96 } reject with icmpv6 addr-unreachable
		jump filter_FORWARD_ZONES
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD_ZONES { iifname "lan" goto filter_FWD_internal; iifname "out" goto filter_FWD_external; }
	chain filter_FWD_internal { oifname "out" ct state { new, untracked } accept; }
	chain filter_FWD_external { reject with icmpx admin-prohibited; }
}
`, remove: `
flush chain inet firewalld nat_PRE_external_allow
add rule inet firewalld nat_PRE_external_allow meta nfproto ipv4 tcp dport 8080 dnat ip to 172.17.0.2:80
`, removeEntries: []string{"--orig-port-dst", "8080"}},

	{name: "ufw", bridge: "lan", tool: []string{"iptables-nft-restore", "-n"}, service: "198.51.100.1:8080", seen: "198.51.100.9", rules: `*nat
-A PREROUTING -i out -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A PREROUTING -i out -p udp -m udp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A POSTROUTING -s 172.17.0.0/16 -o out -j MASQUERADE
COMMIT
*filter
:INPUT DROP [0:0]
:FORWARD DROP [0:0]
:ufw-after-forward - [0:0]
:ufw-after-logging-forward - [0:0]
:ufw-before-forward - [0:0]
:ufw-before-input - [0:0]
:ufw-before-logging-forward - [0:0]
:ufw-logging-deny - [0:0]
:ufw-user-forward - [0:0]
-A INPUT -j ufw-before-input
-A FORWARD -j ufw-before-logging-forward
-A FORWARD -j ufw-before-forward
-A FORWARD -j ufw-after-forward
-A FORWARD -j ufw-after-logging-forward
-A ufw-after-logging-forward -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix "[UFW BLOCK] "
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -p icmp -m icmp --icmp-type 3 -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -m conntrack --ctstate INVALID -j ufw-logging-deny
-A ufw-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw-before-input -p udp -m udp --dport 8080 -j ACCEPT
-A ufw-logging-deny -m conntrack --ctstate INVALID -m limit --limit 3/min --limit-burst 10 -j RETURN
-A ufw-logging-deny -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix "[UFW BLOCK] "
-A ufw-user-forward -d 172.17.0.2/32 -i out -o lan -p tcp -m tcp --dport 80 -j ACCEPT
-A ufw-user-forward -d 172.17.0.2/32 -i out -o lan -p udp -m udp --dport 80 -j ACCEPT
-A ufw-user-forward -i lan -o out -j ACCEPT
COMMIT
`, remove: `*nat
-D PREROUTING -i out -p udp -m udp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
`, removeEntries: []string{"--orig-port-dst", "8080"}},
}

// Rules as others write them, put in place by their tools, decide as before: who is seen
// by whom and what arrives is the same before flows are accelerated and after, both ways,
// and an endpoint that is removed as they do it gets no more packets.
func TestAccelRuleSets(t *testing.T) {
	for _, c := range ruleSets {
		t.Run(c.name, func(t *testing.T) {
			b := newTestbed(t)
			b.in(b.gateway, func() error { return writeSetting(settingForward, "1") })
			b.in(b.server, func() error { return addRoute("10.96.0.0/16", "198.51.100.1") })
			// Else the bridge has the answers' destinations translated before its own ingress
			// sees them: these are not accelerated.
			b.in(b.gateway, func() error {
				if v, err := readSetting(settingBridge); err != nil || v == "0" {
					return nil
				}
				return writeSetting(settingBridge, "0")
			})
			containers := b.bridge(c.bridge, "172.17.0.1/16", "172.17.0.2/16", "172.17.0.3/16")
			b.run(c.rules, c.tool[0], c.tool[1:]...)
			for i, ns := range containers {
				at := fmt.Sprintf("172.17.0.%d:80", i+2)
				b.parrotNamed(ns, at, " at "+at)
				b.mirror(ns, at)
			}
			b.parrotNamed(b.gateway, "198.51.100.1:8080", " at the gateway")
			b.parrot(b.server, "198.51.100.9:7000")
			b.mirror(b.server, "198.51.100.9:7000")

			var in, out []*dialogue
			var connsIn, connsOut []*mirrored
			// begin has flows begin both ways, with whom they are to be seen.
			begin := func(port int) {
				t.Helper()
				for i := range 3 {
					in = append(in, b.dialogue(b.server, fmt.Sprintf("198.51.100.9:%d", port+i), c.service))
					connsIn = append(connsIn, b.connect(b.server, c.service))
				}
				out = append(out, b.dialogue(containers[0], fmt.Sprintf("172.17.0.2:%d", port), "198.51.100.9:7000"))
				connsOut = append(connsOut, b.connect(containers[0], "198.51.100.9:7000"))
			}
			checked := func(what, seen, want string) {
				t.Helper()
				if !strings.HasPrefix(seen, want+":") {
					t.Errorf("%s is seen as %q, want %s", what, seen, want)
				}
			}
			begin(6000)
			before := map[*dialogue]string{}
			for _, k := range slices.Concat(in, out) {
				before[k] = k.ask(10 * time.Second)
			}
			for _, m := range slices.Concat(connsIn, connsOut) {
				m.exchange(b)
			}
			o := b.accelOptions()
			o.Interfaces = append(o.Interfaces, c.bridge)
			var err error
			if o.Chains, err = probe.Chains(b.gateway); err != nil {
				t.Fatal(err)
			}
			b.accelOn(o)
			begin(6100)
			for i, k := range slices.Concat(in, out) {
				seen, want := b.accelerated(k), c.seen
				if i >= len(in) {
					want = "198.51.100.1"
				}
				checked(k.conn.LocalAddr().String(), seen, want)
				if before[k] != "" && seen != before[k] {
					t.Errorf("%v is seen as %q, and was as %q when it was not accelerated", k.conn.LocalAddr(), seen, before[k])
				}
			}
			for i, m := range slices.Concat(connsIn, connsOut) {
				want := c.seen
				if i >= len(connsIn) {
					want = "198.51.100.1"
				}
				checked(m.conn.LocalAddr().String(), m.seen, want)
				ktest.Wait(t, 30*time.Second, "a connection uses the fast path", func() bool {
					m.exchange(b)
					return b.valid(m.conn) >= 2
				})
				m.exchange(b)
			}

			k := in[0]
			_, gone, _ := strings.Cut(b.accelerated(k), " at ")
			other, entries := "3", c.removeEntries
			if strings.HasPrefix(gone, "172.17.0.3") {
				other = "2"
			}
			b.run(strings.ReplaceAll(c.remove, "OTHER", other), c.tool[0], c.tool[1:]...)
			if c.balanced {
				entries = append(slices.Clip(entries), netip.MustParseAddrPort(gone).Addr().String())
			}
			b.run("", "conntrack", append([]string{"-D", "-p", "udp"}, entries...)...)
			want := " at the gateway"
			if c.balanced {
				want = fmt.Sprintf(" at 172.17.0.%s:80", other)
			}
			seen := ""
			t.Cleanup(func() { t.Logf("%s was removed, the answer is %q", gone, seen) })
			for _, k := range in {
				ktest.Wait(t, 30*time.Second, "nothing reaches what was removed", func() bool {
					seen = k.ask(300 * time.Millisecond)
					return strings.HasSuffix(seen, want)
				})
			}
			for _, m := range slices.Concat(connsIn, connsOut) {
				m.exchange(b) // of a service that is still there
			}
		})
	}
}

// mirrored is a connection to a mirror.
type mirrored struct {
	conn net.Conn
	r    *bufio.Reader
	seen string // whom the mirror sees
}

// mirror reports who connects whom it sees, and gives back what is sent.
func (b *testbed) mirror(ns *netns.Handle, at string) {
	b.t.Helper()
	b.serveTCP(ns, at, func(c net.Conn) {
		fmt.Fprintln(c, c.RemoteAddr())
		io.Copy(c, c)
	})
}

func (b *testbed) connect(ns *netns.Handle, to string) *mirrored {
	b.t.Helper()
	m := &mirrored{}
	b.in(ns, func() (err error) { m.conn, err = net.DialTimeout("tcp4", to, 30*time.Second); return err })
	b.t.Cleanup(func() { m.conn.Close() })
	m.conn.SetDeadline(time.Now().Add(30 * time.Second))
	m.r = bufio.NewReader(m.conn)
	line, err := m.r.ReadString('\n')
	if err != nil {
		b.t.Fatal(err)
	}
	m.seen = strings.TrimSpace(line)
	return m
}

// exchange has bytes come back as they were sent.
func (m *mirrored) exchange(b *testbed) {
	b.t.Helper()
	data, got := make([]byte, 64<<10), make([]byte, 64<<10)
	rand.Read(data)
	m.conn.SetDeadline(time.Now().Add(30 * time.Second))
	go m.conn.Write(data)
	if n, err := io.ReadFull(m.r, got); err != nil {
		b.t.Fatalf("after %d bytes of %v: %v", n, m.conn.LocalAddr(), err)
	}
	if !bytes.Equal(got, data) {
		b.t.Fatal("other data came back")
	}
}
