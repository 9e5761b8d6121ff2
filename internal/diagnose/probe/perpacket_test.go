// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
)

// Rules that must see every packet, by those who write them: nft and both iptables.
func TestPerPacket(t *testing.T) {
	ktest.Root(t)
	for _, c := range []struct{ program, name, rules, want string }{
		{"nft", "conditions and statements", `
table ip filter {
	quota q { over 10 mbytes; }
	chain forward { type filter hook forward priority 0
		ct state established limit rate 10/second accept
		ip dscp set cs1
		meta priority set 1:10
		quota name q drop
		tcp dport 80 counter accept
	}
}`, "filter/forward: limit objref payload priority"},
		{"nft", "none", `
table ip filter {
	chain forward { type filter hook forward priority 0
		ct state established,related counter accept
		meta mark set 1
		ip saddr 10.0.0.0/8 drop
	}
}`, ""},
		{"nft", "what varies in a flow", `
table inet t {
	chain a { type filter hook forward priority 0; meta length > 1000 drop; }
	chain b { type filter hook forward priority 1; ct bytes > 1000 mark set 1; }
	chain c { type filter hook forward priority 2; tcp flags syn tcp option maxseg size set rt mtu; }
	chain d { type filter hook forward priority 3; ether saddr 02:00:00:00:00:01 drop; }
	chain e { type filter hook forward priority 4; tcp sequence 1 drop; }
	chain f { type filter hook forward priority 5; log drop; }
}
table inet t1 { chain a { type filter hook forward priority 0; meta random < 1000000 drop; }; }
table inet t2 { chain a { type filter hook forward priority 0; meta cpu 1 drop; }; }
table inet t3 { chain a { type filter hook forward priority 0; ip ttl 1 drop; }; }
table inet t4 { chain a { type filter hook forward priority 0; ip dscp cs1 drop; }; }
table inet t5 { chain a { type filter hook forward priority 0; ip length > 1000 drop; }; }
table inet t6 { chain a { type filter hook forward priority 0; ip6 hoplimit 1 drop; ip6 saddr fd00::1 ip6 dscp cs1 drop; ip6 length > 1000 drop; }; }
table inet t7 { chain a { type filter hook forward priority 0; ip protocol tcp ip saddr 10.0.0.1 drop; ip frag-off & 0x1fff != 0 drop; ip saddr . ip daddr { 10.0.0.1 . 10.0.0.2 } drop; }; }
table ip t { chain a { type filter hook forward priority 0; ip ttl 1 drop; }; }`,
			"t/a: meta, t/b: connbytes, t/d: payload, t/e: payload, t1/a: meta, t2/a: meta, t3/a: payload, t4/a: payload, t5/a: payload, t/a: payload"},
		{"nft", "after what accepts established flows", `
table inet t {
	chain forward { type filter hook forward priority 0
		meta nfproto ipv6 limit rate 1/second log
		ct state new limit rate 1/second log
		ct state { new, invalid } limit rate 1/second log
		ct state != established limit rate 1/second log
		jump accepted
		limit rate 1/second log
	}
	chain accepted { ct state vmap { invalid : drop, established : goto yes, related : accept }; limit rate 1/second log; }
	chain yes { iifname "eth0" limit rate 1/second; ct state { established, related } accept; limit rate 1/second log; }
}`, "t/yes: limit"},
		{"nft", "chains of maps, and those of NAT", `
table ip nat {
	chain backend { dnat to 10.0.0.2; }
	chain service { numgen random mod 2 vmap { 0 : goto backend, 1 : goto backend }; }
	chain firewall { numgen random mod 2 vmap { 0 : drop }; }
	chain unused { limit rate 1/second; }
	map services { type inet_service : verdict; elements = { 80 : goto service }; }
	map firewalls { type inet_service : verdict; elements = { 80 : goto firewall }; }
	chain pre { type nat hook prerouting priority -100; tcp dport vmap @services; }
	chain forward { type filter hook forward priority 0; tcp dport vmap @firewalls; }
}`, "nat/firewall: numgen"},
		{"nft", "return", `
table ip t {
	chain forward { type filter hook forward priority 0; jump a; }
	chain a { return; limit rate 1/second; }
}`, ""},
		{"iptables-nft", "a limit", "-A FORWARD -m limit --limit 5/sec -j ACCEPT", "filter/FORWARD: limit"},
		{"iptables-nft", "after what accepts established flows", ufwLike, "filter/first: length"},
		{"iptables-legacy", "after what accepts established flows", ufwLike, "filter/first: length"},
		{"iptables-legacy", "a target", "-A FORWARD -m length --length 100:200 -j LOG", "filter/FORWARD: LOG length"},
		{"iptables-legacy", "goto", "-N a\n-N b\n-A a -g b\n-A a -m limit --limit 1/sec\n-A b -j ACCEPT\n-A FORWARD -j a\n-A FORWARD -m limit --limit 1/sec", ""},
		{"iptables-legacy", "new", "-A FORWARD -p tcp --tcp-flags SYN,RST SYN -m conntrack --ctstate NEW -m limit --limit 1/sec -j ACCEPT", ""},
		{"iptables-legacy", "not new", "-A FORWARD -p tcp -m conntrack ! --ctstate NEW -m limit --limit 1/sec -j ACCEPT", "filter/FORWARD: limit"},
	} {
		t.Run(c.program+"/"+c.name, func(t *testing.T) {
			ns, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			defer ns.Close()
			args, stdin := []string{"-f", "-"}, c.rules
			if c.program != "nft" {
				args, stdin = []string{"-n"}, "*filter\n"+c.rules+"\nCOMMIT\n"
				c.program += "-restore"
			}
			program := ktest.Tool(t, c.program)
			var chains []snapshot.Chain
			err = ns.Do(func() (err error) {
				cmd := exec.Command(program, args...)
				cmd.Stdin = strings.NewReader(stdin)
				if out, err := cmd.CombinedOutput(); err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
			if err == nil {
				chains, err = Chains(ns)
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, chain := range chains {
				if len(chain.PerPacket) > 0 {
					got = append(got, chain.Table+"/"+chain.Name+": "+strings.Join(chain.PerPacket, " "))
				}
			}
			if got := strings.Join(got, ", "); got != c.want {
				t.Errorf("per packet %q, want %q", got, c.want)
			}
		})
	}
}

// ufwLike has its limits after the rule that accepts established flows, as ufw does.
const ufwLike = `-N before
-N first
-N log
-N unused
-A FORWARD -m conntrack --ctstate NEW -j log
-A FORWARD -m conntrack --ctstate INVALID -m limit --limit 1/sec -j LOG
-A FORWARD -j before
-A FORWARD -m limit --limit 1/sec -j LOG
-A before -i lo -j first
-A before -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A before -m limit --limit 1/sec -j log
-A first -m length --length 100:200 -j RETURN
-A log -m limit --limit 1/sec -j LOG
-A unused -m limit --limit 1/sec -j LOG`

// A hook on devices says which.
func TestChainDevices(t *testing.T) {
	ns := newNetns(t)
	nft := ktest.Tool(t, "nft")
	err := ns.Do(func() error {
		cmd := exec.Command(nft, "-f", "-")
		cmd.Stdin = strings.NewReader(`table netdev early { chain in { type filter hook ingress device "lo" priority 0; counter; }; }`)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	chains, err := Chains(ns)
	if err != nil || len(chains) != 1 || !slices.Equal(chains[0].Devices, []string{"lo"}) {
		t.Fatalf("%+v, %v", chains, err)
	}
}

func TestChainOffloads(t *testing.T) {
	set := newNFTRuleset()
	set.chains[nftKey{unix.NFPROTO_IPV4, "filter", "forward"}] = 0
	set.out, set.keys = make([]snapshot.Chain, 1), make([]nftKey, 1)
	for _, e := range []encoder{counter(1), expression("flow_offload", func(ae *netlink.AttributeEncoder) { ae.String(1, "fast") })} {
		if err := set.addRule(unix.NFPROTO_IPV4, ruleOf(t, "filter", "forward", e)); err != nil {
			t.Fatal(err)
		}
	}
	if n := set.out[0].Offloads; n != 1 {
		t.Errorf("%d rules give flows to a flowtable", n)
	}
}
