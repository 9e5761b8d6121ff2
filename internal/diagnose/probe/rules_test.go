// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
)

// saved are the rules of a chain, and its sets spelt out, as a Snapshot has them.
func saved(t *testing.T, s *snapshot.Snapshot, backend, chain string) (texts []string) {
	t.Helper()
	for _, c := range s.Chains {
		if c.Name == chain && c.Backend == backend {
			for _, r := range c.Walk {
				texts = append(texts, r.Text)
			}
		}
	}
	return texts
}

// Rules are written as nft(8) writes them.
func TestLiveRuleTextsAreThoseOfNFT(t *testing.T) {
	for family, rules := range map[string]string{
		"inet": `table inet f {
	set bad { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	set who { type ipv4_addr; flags dynamic; }
	set seen { type ipv4_addr; flags dynamic,timeout; timeout 1m; }
	set pairs { type ipv4_addr . inet_service; flags dynamic; }
	quota month { 1 mbytes }
	limit few { rate 3/minute }
	chain other { return; }
	chain fw {
		type filter hook output priority 0; policy drop;
		ip saddr 10.0.0.1 drop
		ip saddr 10.0.0.0/24 ip daddr != 10.0.1.0/24 counter drop
		ip saddr 10.0.0.1-10.0.0.7 drop
		ip saddr { 10.0.0.1, 10.0.0.2 } tcp dport { 80, 443 } drop
		ip saddr @bad ip daddr 10.1.1.1 drop
		ip saddr != @bad drop
		ip saddr . tcp dport { 10.0.0.1 . 80 } drop
		tcp dport 80 tcp sport 1024-65535 drop
		udp dport != 53 drop
		tcp dport < 1024 drop
		ip6 saddr fd00::/8 drop
		ip6 saddr fd00::/10 drop
		ip6 saddr fd00::1 ip6 daddr fd00::2 drop
		ct state established,related accept
		ct state invalid drop
		ct state vmap { invalid : drop, established : accept }
		ct status dnat accept
		iifname "eth0" oifname != "eth1" drop
		iifname { "eth0", "eth1" } drop
		iifname "eth*" drop
		oif "lo" accept
		icmp type echo-request accept
		meta mark 0x00000007 drop
		meta l4proto gre drop
		ip ttl < 5 drop
		limit rate 10/second accept
		limit rate over 10/second drop
		quota over 1000 bytes drop
		quota name "month" drop
		limit name "few" drop
		ct count over 5 reject
		limit rate over 10/second burst 20 packets drop
		add @who { ip saddr ct count over 5 } drop
		ct state new update @seen { ip saddr timeout 30s limit rate over 10/minute burst 5 packets } drop
		add @pairs { ip saddr . tcp dport limit rate over 7/hour burst 9 packets } drop
		add @who { ip saddr quota over 1000 bytes } drop
		add @seen { ip saddr }
		add @seen { ip saddr counter }
		ct mark 0x00000001 drop
		ct mark != 0x00000001 drop
		ct mark & 0x000000ff == 0x00000001 drop
		ct mark & 0x000000ff > 0x00000005 drop
		meta mark & 0x000000ff 0x00000001-0x00000005 drop
		meta mark & 0x0000ff00 != 0x00000100-0x00000500 drop
		ct mark { 0x00000001, 0x00000002 } drop
		ct mark 0x00000001-0x00000005 drop
		meta mark 0x00000001-0x00000005 drop
		meta mark { 0x00000001-0x00000005, 0x00000009 } drop
		meta length 100-200 drop
		meta length > 1000 drop
		meta skuid != 0-999 drop
		ct mark vmap { 0x00000001 : drop, 0x00000002 : accept }
		ct zone 1 drop
		ct helper "ftp" drop
		ct original packets > 1000 drop
		ct bytes < 1000 drop
		meta cgroup 5 drop
		meta cpu 1 drop
		iifgroup 5 drop
		ip id 5 drop
		@th,16,16 0x35 drop
		numgen random mod 2 0 drop
		socket mark 0x00000005 drop
		rt mtu 1400 drop
		fib daddr . oif type local drop
		tcp flags & (fin|syn|rst|ack) == syn|ack drop
		tcp flags syn drop
		tcp flags & (syn|ack) == syn drop
		tcp flags != syn drop
		tcp flags & (fin|syn) != 0 drop
		meta pkttype != host drop
		meta iiftype ether drop
		ip dscp ef drop
		ip dscp != cs1 drop
		ip ecn ce drop
		ether saddr 02:00:00:00:00:01 drop
		ether saddr & ff:ff:ff:00:00:00 == 02:00:00:00:00:00 drop
		vlan id 5 drop
		meta priority set 1:10
		meta priority 1:10 drop
		meta day "Monday" drop
		ct expiration > 10s drop
		tcp option maxseg size 1-500 drop
		tcp option maxseg size set 1400
		meta mark set 0x5
		meta mark set ct mark
		ct mark set 0x7
		tcp dport set 81
		ip saddr set 10.0.0.1
		udp length > 1000 drop
		tcp window 0 drop
		esp spi 5 drop
		tcp dport 80 reject with tcp reset
		ip saddr 10.0.0.1 meta nftrace set 1
		jump other
		goto other
	}
}`,
		"ip": `table ip f {
	chain fw {
		type filter hook prerouting priority 0; policy drop;
		fib saddr . iif oif missing drop
		fib saddr . mark oif exists drop
		fib saddr type != unicast drop
		ip saddr 10.0.0.1 drop
	}
}`,
		"arp": `table arp f {
	chain fw {
		type filter hook output priority 0; policy drop;
		arp operation request drop
		arp saddr ip 10.0.0.1 drop
		arp daddr ip 10.0.0.1 arp operation reply drop
		arp saddr ether 02:00:00:00:00:01 drop
		arp htype 1 drop
		arp ptype ip drop
		iifname "eth0" arp operation { request, reply } drop
	}
}`,
		"bridge": `table bridge f {
	chain fw {
		type filter hook output priority 0; policy drop;
		ether saddr 02:00:00:00:00:01 drop
		ether daddr ff:ff:ff:ff:ff:ff drop
		ether type ip udp dport 53 drop
		ether type 8021q drop
		vlan id 5 drop
		arp operation request drop
		ip saddr 10.0.0.1 drop
		ip protocol udp udp dport 5000 drop
	}
}`,
	} {
		t.Run(family, func(t *testing.T) { ruleTextsAreThoseOfNFT(t, family, rules) })
	}
}

func ruleTextsAreThoseOfNFT(t *testing.T, family, rules string) {
	h := newNetns(t)
	const chain = "fw"
	output(t, h, rules, "nft", "-f", "-")
	output(t, h, "", "nft", "add table ip dropping; add chain ip dropping out { type filter hook output priority -1; policy drop; }")
	s := takeWhile(t, Options{Netns: h}, func() { sendUDP(t, h, "127.0.0.1:9", 3) })
	got := saved(t, s, "nft", chain)
	var file bytes.Buffer
	if err := snapshot.Save(&file, s); err != nil {
		t.Fatal(err)
	}
	read, err := snapshot.Load(&file)
	if err != nil {
		t.Fatal(err)
	}
	if again := saved(t, read, "nft", chain); !slices.Equal(again, got) {
		t.Errorf("saved and read again:\n%q\nbefore:\n%q", again, got)
	}
	_, list, _ := strings.Cut(output(t, h, "", "nft", "-s", "list", "chain", family, "f", chain), "policy drop;\n")
	var want []string
	for line := range strings.SplitSeq(list, "\n") {
		if line = strings.TrimSpace(line); line != "" && line != "}" {
			want = append(want, line)
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%d rules, nft lists %d:\n%q\n%q", len(got), len(want), got, want)
	}
	for i := range want {
		if tidy(got[i]) != tidy(want[i]) {
			t.Errorf("rule %d: %q, nft writes %q", i+1, got[i], want[i])
		}
	}
}

// tidy takes away what nft writes in more than one way: leading zeros, and what of a reject or
// a limit is the default.
func tidy(rule string) string {
	rule = regexp.MustCompile(`0x0+([1-9a-f])`).ReplaceAllString(rule, "0x$1")
	rule = regexp.MustCompile(`meta l4proto 47`).ReplaceAllString(rule, "meta l4proto gre")
	return regexp.MustCompile(` burst \d+ packets| with icmpx .*$`).ReplaceAllString(rule, "")
}

// Rules are written as iptables -S writes them.
func TestLiveRuleTextsAreThoseOfIPTables(t *testing.T) {
	for _, backend := range []struct{ tool, name string }{{"iptables-legacy", "iptables-legacy"}, {"iptables-nft", "nft"}} {
		t.Run(backend.tool, func(t *testing.T) {
			h := newNetns(t)
			for _, rule := range []string{
				"-s 10.0.0.1 -j DROP", "-s 10.0.0.0/24 ! -d 10.0.1.0/24 -j DROP", "-i eth0 ! -o eth1 -j DROP", "-i eth+ -j DROP",
				"-p tcp --dport 80 -j DROP", "-p tcp --sport 1024:65535 ! --dport 80 -j DROP", "-p udp --dport 53 -j ACCEPT", "-p icmp --icmp-type 8 -j ACCEPT",
				"-p tcp -m multiport --dports 80,443,8000:8010 -j DROP", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-m conntrack ! --ctstate NEW -j DROP",
				"-m state --state INVALID -j DROP", "-m mark --mark 0x7 -j DROP", "-m iprange --src-range 10.0.0.1-10.0.0.9 -j DROP", "-m limit --limit 10/sec -j ACCEPT",
				"-m connmark --mark 0x1 -j DROP", "-m connmark ! --mark 0x1/0xff -j DROP", "-m dscp --dscp 0x2e -j DROP", "-m mac --mac-source 02:00:00:00:00:01 -j DROP",
				"-m helper --helper ftp -j DROP", "-m statistic --mode nth --every 3 --packet 0 -j DROP", "-m mark ! --mark 0x7/0xf -j DROP", "-m length --length 10:20 -j DROP",
				"-m statistic --mode random --probability 0.5 -j DROP", "-p tcp --tcp-flags SYN,ACK SYN -j DROP",
				"-m ttl --ttl-lt 5 -j DROP", "-m addrtype --dst-type LOCAL -j ACCEPT", "-m connlimit --connlimit-above 5 -j DROP",
				"-m connlimit --connlimit-upto 7 --connlimit-mask 24 --connlimit-daddr -j ACCEPT",
				"-m hashlimit --hashlimit-above 5/sec --hashlimit-burst 5 --hashlimit-mode srcip --hashlimit-name web -j DROP",
				"-m hashlimit --hashlimit-upto 20/min --hashlimit-burst 7 --hashlimit-mode srcip,dstport --hashlimit-name dns -j ACCEPT",
				"-m recent --name www --set -j DROP", "-m recent --name www --update --seconds 60 --hitcount 10 --rdest -j DROP", "-m recent ! --rcheck -j DROP",
				"-m connbytes --connbytes 500000: --connbytes-dir both --connbytes-mode bytes -j DROP", "-m connbytes --connbytes 5:9 --connbytes-dir reply --connbytes-mode packets -j DROP",
				"-j RETURN",
			} {
				output(t, h, "", backend.tool, append([]string{"-A", "FORWARD"}, strings.Fields(rule)...)...)
			}
			s := takeWhile(t, Options{Netns: h}, func() { sendUDP(t, h, "127.0.0.1:9", 3) })
			got := saved(t, s, backend.name, "FORWARD")
			var want []string
			for line := range strings.SplitSeq(output(t, h, "", backend.tool, "-S", "FORWARD"), "\n") {
				if strings.HasPrefix(line, "-A ") {
					want = append(want, line)
				}
			}
			for i := range want {
				if i >= len(got) || tidyXT(got[i]) != tidyXT(want[i]) {
					t.Errorf("rule %d: %q, %s writes %q", i+1, slices.Concat(got, make([]string, len(want)))[i], backend.tool, want[i])
				}
			}
		})
	}
}

// tidyXT takes away what programs write in more than one way.
func tidyXT(rule string) string {
	rule = regexp.MustCompile(` --connlimit-mask \d+ --connlimit-saddr| --limit-burst \d+| --ttl-lt 5`).ReplaceAllStringFunc(rule, func(s string) string {
		if strings.Contains(s, "ttl") {
			return s
		}
		return ""
	})
	rule = strings.ReplaceAll(rule, "-m tcp --sport 1024:65535 -m tcp ! --dport", "-m tcp --sport 1024:65535 ! --dport")
	rule = strings.ReplaceAll(rule, "RELATED,ESTABLISHED", "ESTABLISHED,RELATED")
	return regexp.MustCompile(`-m (icmp|icmpv6) `).ReplaceAllString(rule, "")
}

// Rules that translate are written with what they translate to.
func TestLiveTranslationsAreThoseOfTheirPrograms(t *testing.T) {
	h := newNetns(t)
	for family, rules := range map[string]string{
		"ip": `dnat to 10.0.0.1
tcp dport 80 dnat to 10.0.0.1:8080
tcp dport 81 dnat to 10.0.0.1:8080-8090
dnat to 10.0.0.1-10.0.0.9
dnat to 10.0.0.1-10.0.0.9 persistent
dnat to ip saddr map @targets
tcp dport 82 redirect to :8080
tcp dport 83 redirect`,
		"inet": `tcp dport 80 dnat ip to 10.0.0.1:8080
tcp dport 80 dnat ip6 to [fd00::1]:8080
dnat ip6 to fd00::1`,
	} {
		output(t, h, "table "+family+" n {\n map targets { type ipv4_addr : ipv4_addr; }\n chain pre {\n type nat hook prerouting priority -100; policy accept;\n"+rules+"\n}\n}", "nft", "-f", "-")
		translationsAre(t, h, family, "pre")
	}
	output(t, h, `table ip n { chain post {
 type nat hook postrouting priority 100; policy accept;
masquerade
udp dport 53 masquerade to :1024-2047 random
tcp dport 53 masquerade fully-random,persistent
snat to 10.0.0.1
udp dport 54 snat to 10.0.0.1-10.0.0.3:5000-5999
}
}`, "nft", "-f", "-")
	translationsAre(t, h, "ip", "post")
	for _, backend := range []struct{ tool, name string }{{"iptables-legacy", "iptables-legacy"}, {"iptables-nft", "nft"}} {
		for chain, rules := range map[string][]string{
			"PREROUTING":  {"-p tcp --dport 80 -j DNAT --to-destination 10.0.0.1:8080", "-j DNAT --to-destination 10.0.0.1", "-p tcp -j REDIRECT --to-ports 8080", "-j REDIRECT"},
			"POSTROUTING": {"-s 10.0.0.0/8 -j MASQUERADE", "-p udp -j MASQUERADE --to-ports 1024-2047", "-j SNAT --to-source 10.0.0.1-10.0.0.3", "-p tcp -j SNAT --to-source 10.0.0.1:1024-2047"},
		} {
			for _, rule := range rules {
				output(t, h, "", backend.tool, append([]string{"-t", "nat", "-A", chain}, strings.Fields(rule)...)...)
			}
			s, err := Rules(h, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := saved(t, s, backend.name, chain)
			i := -1
			for want := range strings.SplitSeq(output(t, h, "", backend.tool, "-t", "nat", "-S", chain), "\n") {
				if !strings.HasPrefix(want, "-A ") {
					continue
				}
				if i++; i >= len(got) || got[i] != want {
					t.Errorf("%s: rule %d is %q, want %q", backend.tool, i+1, slices.Concat(got, make([]string, i+1))[i], want)
				}
			}
		}
	}
}

// translationsAre compares a chain of table n with what nft(8) lists.
func translationsAre(t *testing.T, h *netns.Handle, family, chain string) {
	t.Helper()
	s, err := Rules(h, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range s.Chains {
		if c.Name == chain && c.Family == family {
			for _, r := range c.Walk {
				got = append(got, r.Text)
			}
		}
	}
	_, list, _ := strings.Cut(output(t, h, "", "nft", "-s", "list", "chain", family, "n", chain), "policy accept;\n")
	i := 0
	for line := range strings.Lines(list) {
		if line = strings.TrimSpace(line); line == "" || line == "}" {
			continue
		}
		if i >= len(got) || got[i] != line {
			t.Errorf("%s: rule %d is %q, nft writes %q", family, i+1, slices.Concat(got, make([]string, i+1))[i], line)
		}
		i++
	}
}
