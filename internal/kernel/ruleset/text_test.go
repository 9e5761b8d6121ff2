// SPDX-License-Identifier: Apache-2.0

package ruleset_test

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/ruleset"
	"natkit/internal/testutil/ktest"
)

// textRules have what NAT rules of the field have, in the words of nft(8).
const textRules = `table inet t {
	set nets { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	map sends { type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; }
	map hosts { type ipv4_addr : ipv4_addr; }
	map leads { type ipv4_addr . inet_service : verdict; }
	quota month { 1 mbytes }
	limit few { rate 3/minute }
	counter seen { }
	chain other { return; }
	chain pre {
		type nat hook prerouting priority dstnat; policy accept;
		iifname "eth0" tcp dport 80 dnat ip to 10.0.0.1:8080
		iifname { "eth0", "eth1" } tcp dport { 80, 443 } counter dnat ip to 10.0.0.1
		iifname "eth*" ip daddr 203.0.113.0/24 udp dport 1000-2000 dnat ip to 10.0.0.1-10.0.0.9
		iif "lo" oif != "lo" accept
		meta l4proto { tcp, udp } th dport 53 redirect to :5353
		tcp dport 80 redirect
		meta l4proto . ip daddr . th dport { tcp . 203.0.113.1 . 80 } accept
		dnat ip to meta l4proto . ip daddr . th dport map @sends
		dnat ip to ip daddr map @hosts
		dnat ip to ip daddr map { 203.0.113.1 : 10.0.0.1, 203.0.113.2 : 10.0.0.2 }
		tcp dport 80 dnat ip to numgen random mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }
		tcp dport 80 dnat ip to numgen inc mod 10 offset 1 map { 1-9 : 10.0.0.1, 10 : 10.0.0.2 }
		tcp dport 80 dnat ip to jhash ip saddr . tcp sport mod 2 seed 0x1 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }
		tcp dport 80 dnat ip to symhash mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }
		ip daddr . tcp dport vmap @leads
		tcp dport vmap { 80 : jump other, 443 : goto other, 22 : accept, 23 : drop }
		fib daddr type local jump other
		fib daddr . iif type != unicast return
		ip daddr != 203.0.113.1 ip saddr @nets goto other
		ip saddr != @nets tcp dport > 1024 tcp sport <= 100 accept
		tcp dport != { 80, 443 } tcp flags syn / syn,ack accept
		tcp flags syn accept
		tcp flags & (fin | syn) == syn accept
		ct state new,established accept
		ct state vmap { new : accept, invalid : drop }
		ct mark 0x1 ct status dnat ct direction original accept
		meta mark 0x10 accept
		meta mark & 0xff == 0x1 accept
		meta mark set 0x1
		meta mark set meta mark | 0x2
		meta mark set meta mark & 0xfffffff0
		meta mark set meta mark and 0xffff00ff xor 0x100
		meta mark set ct mark
		ct mark set meta mark
		ip protocol gre accept
		meta l4proto 132 accept
		ip ttl < 5 ip dscp cs1 accept
		ip length 100-200 meta length > 1000 accept
		tcp dport 80 ip6 saddr fd00::/8 dnat ip6 to [fd00::1]:80
		meta nfproto ipv4 meta protocol ip accept
		icmp type echo-request accept
		icmp type { echo-request, echo-reply } icmp code 0 accept
		meta skuid 0 accept
		meta pkttype broadcast accept
		meta hour "10:00"-"12:00" accept
		limit rate 10/second burst 20 packets accept
		limit rate over 1 mbytes/second drop
		limit name "few" accept
		quota over 1000 bytes drop
		quota name "month" drop
		counter name "seen" accept
		log prefix "nat: " level info accept
		log group 3 accept
		tcp dport 80 accept comment "with a \\ word"
	}
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
		masquerade
		oifname "eth0" masquerade random
		oifname "eth0" masquerade fully-random,persistent
		ip protocol tcp masquerade to :1024-65535
		ip saddr 10.0.0.0/24 snat ip to 203.0.113.1
		ip saddr 10.0.0.0/24 snat ip to 203.0.113.1-203.0.113.9 persistent
		meta l4proto tcp ip saddr 10.0.0.0/24 snat ip to 203.0.113.1:1024-65535 random
		ip saddr 10.0.1.0/24 snat ip prefix to 100.64.1.0/24
		snat ip to ip saddr map { 10.0.0.0/24 : 203.0.113.5, 10.0.1.7 : 203.0.113.6 }
		snat ip prefix to ip saddr map { 10.0.0.0/24 : 203.0.113.0/24 }
	}
	chain pull {
		type filter hook prerouting priority raw; policy accept;
		udp dport 53 notrack
		ct zone set 3
		meta l4proto tcp tproxy ip to 127.0.0.1:3128
		tcp flags syn tcp option maxseg size set 1400
	}
}
`

// tool runs a program in a namespace.
func tool(t *testing.T, h *netns.Handle, in string, command ...string) string {
	t.Helper()
	var out, complaint bytes.Buffer
	if err := h.Do(func() error {
		cmd := exec.Command(ktest.Tool(t, command[0]), command[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &out, &complaint
		return cmd.Run()
	}); err != nil {
		t.Fatalf("%v: %v: %s", command, err, complaint.String())
	}
	return out.String()
}

func newNamespace(t *testing.T) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

// listed are the rules that nft prints, by chain and handle.
func listed(text string) map[string]string {
	rules := map[string]string{}
	table, chain := "", ""
	handle := regexp.MustCompile(` # handle (\d+)$`)
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "table":
			table, chain = words[1]+" "+words[2], ""
		case len(words) > 1 && (words[0] == "chain" || words[0] == "set" || words[0] == "map") && strings.HasPrefix(line, "\t") && !strings.HasPrefix(line, "\t\t"):
			chain = table + " " + words[1]
		default:
			line = strings.TrimSpace(line)
			if m := handle.FindStringSubmatch(line); m != nil && chain != "" {
				rules[chain+" handle "+m[1]] = strings.TrimSuffix(line, m[0])
			}
		}
	}
	return rules
}

// Rules are named as nft list prints them.
func TestTextsAreThoseOfNFT(t *testing.T) {
	h := newNamespace(t)
	tool(t, h, textRules, "nft", "-f", "-")
	set, err := ruleset.ReadNFTables([]byte(tool(t, h, "", "nft", "-j", "list", "ruleset")), "nft")
	if err != nil {
		t.Fatal(err)
	}
	want := listed(tool(t, h, "", "nft", "-a", "list", "ruleset"))
	n := 0
	for r := range set.Rules {
		at := fmt.Sprintf("%s handle %d", r.Chain, r.Handle)
		if got := r.Text; got != want[at] {
			t.Errorf("%s:\n%s\nnft prints\n%s", at, got, want[at])
		}
		n++
	}
	if n != len(want) || n < 60 {
		t.Errorf("%d rules, nft lists %d", n, len(want))
	}
}

// Rules of iptables are named as iptables -S prints them, and iptables-save.
func TestTextsAreThoseOfIPTables(t *testing.T) {
	const rules = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A PREROUTING ! -s 10.0.0.0/8 ! -i docker0 -p tcp -m multiport --dports 80,443:445 -j DNAT --to-destination 10.0.0.1:8080
-A PREROUTING -m statistic --mode random --probability 0.9 -m comment --comment "nine of \"ten\"" -j DNAT --to-destination 10.0.0.1-10.0.0.9 --random --persistent
-A PREROUTING -m conntrack --ctstate NEW -m mark --mark 0x1/0xff -g DOCKER
-A DOCKER -p udp -m udp --dport 53 -j REDIRECT --to-ports 5353
-A DOCKER -j RETURN
-A POSTROUTING -s 10.0.0.0/24 -o eth0 -p tcp -j MASQUERADE --to-ports 1024-65535 --random-fully
-A POSTROUTING -d 10.1.0.0/24 -j NETMAP --to 10.2.0.0/24
-A POSTROUTING -m iprange --src-range 10.0.0.1-10.0.0.9 -j SNAT --to-source 203.0.113.1-203.0.113.9
COMMIT
`
	h := newNamespace(t)
	tool(t, h, rules, "iptables-nft-restore")
	set, err := ruleset.ReadIPTables([]byte(tool(t, h, "", "iptables-nft-save", "-t", "nat")), "save")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for line := range strings.Lines(tool(t, h, "", "iptables-nft", "-t", "nat", "-S")) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "-A") {
			want = append(want, line)
		}
	}
	for r := range set.Rules {
		got = append(got, r.Where())
	}
	slices.Sort(want) // chains are listed in another order
	slices.Sort(got)
	if !slices.Equal(got, want) || len(want) != 9 {
		t.Errorf("%s\niptables -S prints\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A match that holds for every packet is no condition; the same with another option is one.
func TestMatchesThatOnlyNote(t *testing.T) {
	for match, unknown := range map[string]bool{
		"-m nfacct --nfacct-name web": false, "-m comment --comment x": false, "-m recent --set --name seen --mask 255.255.255.255 --rsource": false,
		"-m recent --rcheck --name seen --rsource": true, "-m recent ! --set --name seen": true, "-m recent --update --seconds 60 --name seen": true,
		"-m quota --quota 1000": true, "-m nfacct ! --nfacct-name web": true, "-m limit --limit 3/min": true,
		"-m policy --dir in --pol ipsec --mode tunnel": true, "-m policy --dir in --pol ipsec --mode tunnel -m statistic --mode nth --every 2 --packet 0": true,
	} {
		text := "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD " + match + " -p tcp -j DROP\nCOMMIT\n"
		rules, err := ruleset.ReadIPTables([]byte(text), "rules")
		if err != nil {
			t.Errorf("%s: %v", match, err)
			continue
		}
		got := false
		for _, s := range rules.Tables[0].Chain("FORWARD").Rules[0].Statements {
			if m, ok := s.(ruleset.Match); ok {
				got = got || m.Fields[0].Kind == ruleset.Unknown
			}
		}
		if got != unknown {
			t.Errorf("%s: a condition that is not understood: %v, want %v", match, got, unknown)
		}
	}
}

// A map of prefixes is one, whichever of its elements is a single address.
func TestPrefixMapWithSingleAddress(t *testing.T) {
	const prefix, single = `["10.1.0.0", {"prefix": {"addr": "10.2.0.0", "len": 24}}]`, `["10.3.0.1", "10.4.0.1"]`
	for _, elements := range []string{prefix + "," + single, single + "," + prefix} {
		text := `{"nftables": [{"table": {"family": "ip", "name": "nat"}},
			{"chain": {"family": "ip", "table": "nat", "name": "pre", "type": "nat", "hook": "prerouting", "prio": -100, "policy": "accept"}},
			{"rule": {"family": "ip", "table": "nat", "chain": "pre", "handle": 2, "expr": [{"dnat": {"addr": {"map": {
				"key": {"payload": {"protocol": "ip", "field": "daddr"}}, "data": {"set": [` + elements + `]}}}, "type_flags": ["prefix"]}}]}}]}`
		rules, err := ruleset.ReadNFTables([]byte(text), "rules")
		if err != nil {
			t.Fatal(err)
		}
		to, ok := rules.Tables[0].Chain("pre").Rules[0].Statements[0].(ruleset.Translate)
		if !ok || to.Kind != ruleset.Netmap || to.Lost != "" || len(to.Choices) != 2 {
			t.Fatalf("%s is %+v", elements, to)
		}
		for _, c := range to.Choices {
			if want := map[bool]int{true: 32, false: 24}[c.First == c.Last]; c.Bits != want {
				t.Errorf("%s: %+v, want %d bits", elements, c, want)
			}
		}
	}
}
