// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["ip-forward-off"] = func(s *snapshot.Snapshot) {
		for _, name := range []string{"ip_forward", "conf.all.forwarding", "conf.eth0.forwarding", "conf.eth1.forwarding"} {
			s.Sysctls["net.ipv4."+name] = "0"
		}
		s.Counters["Ip.InAddrErrors"], s.Counters["Ip.ForwDatagrams"] = 240, 0
		s.Drops.Rows = append(s.Drops.Rows, drop(240, snapshot.CauseIPForwardOff, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN")))
	}
	examples["rp-filter-drop"] = func(s *snapshot.Snapshot) {
		s.Counters["TcpExt.IPReversePathFilter"] = 900
		link(s, "eth0").RxPackets = 1000
		s.Drops.Rows = []snapshot.Drop{drop(900, snapshot.CauseReversePath, "eth0", sample("icmp 10.9.0.1 -> 198.51.100.1 echo"))}
	}
	examples["forward-policy-drop"] = func(s *snapshot.Snapshot) {
		policyDrop(s, 600)
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "filter", Name: "DOCKER-USER"})
		s.Counters["Ip.ForwDatagrams"], s.Counters["Ip.OutTransmits"] = 640, 4040
		s.Drops.Rows = append(s.Drops.Rows, drop(600, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"), forwardStack))
	}
	examples["mtu-drop"] = func(s *snapshot.Snapshot) {
		link(s, "eth0").MTU = 1400
		s.Counters["Ip.FragFails"] = 4000
		s.Drops.Rows = append(s.Drops.Rows, drop(4000, snapshot.CauseTooBig, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 ACK")))
	}
	examples["listen-overflow"] = func(s *snapshot.Snapshot) {
		s.Counters["TcpExt.ListenOverflows"], s.Counters["Tcp.PassiveOpens"] = 9788, 40000
		s.Listeners = append(s.Listeners, snapshot.Listener{Addr: snapshot.EndpointOf(netip.MustParseAddrPort("0.0.0.0:80")), Queue: 512, Backlog: 511, Drops: 9788, Process: "nginx"})
	}
	examples["br-netfilter-overhead"] = func(s *snapshot.Snapshot) {
		s.Sysctls["net.bridge.bridge-nf-call-iptables"] = "1"
		s.Interfaces = append(s.Interfaces,
			snapshot.Interface{Name: "br0", Kind: "bridge", MTU: 1500, Up: true, Addresses: prefixes("10.5.0.1/24"), RxPackets: 90000},
			snapshot.Interface{Name: "veth0", Kind: "veth", Master: "br0", MTU: 1500, Up: true, RxPackets: 50000},
			snapshot.Interface{Name: "veth1", Kind: "veth", Master: "br0", MTU: 1500, Up: true, RxPackets: 40000})
	}
}

var forwardStack = stack("nft_do_chain+0x3c2", "nft_do_chain_ipv4+0x70", "nf_hook_slow+0x41", "ip_forward+0x4d1", "ip_rcv+0x7a", "__netif_receive_skb_one_core+0x86")

// policyDrop replaces the gateway's filter by iptables' chain with a policy of
// drop that met so many packets.
func policyDrop(s *snapshot.Snapshot, met uint64) {
	*chain(s, "forward") = snapshot.Chain{Backend: "nft", Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Type: "filter",
		Policy: "drop", PolicyPackets: &met, Rules: 7}
}

// off6 is a gateway with networks of IPv6 that forwards IPv4 only.
func off6(s *snapshot.Snapshot) {
	s.Sysctls["net.ipv6.conf.all.forwarding"] = "0"
	link(s, "eth0").Addresses = append(link(s, "eth0").Addresses, prefixes("2001:db8:2::1/64")...)
	link(s, "eth1").Addresses = append(link(s, "eth1").Addresses, prefixes("2001:db8:1::1/64")...)
	row := drop(70, snapshot.CauseIPForwardOff, "eth1", sample("tcp [2001:db8:1::20]:4000 -> [2001:db8:2::80]:443 SYN"))
	row.Location = "ip6_forward+0x642"
	s.Drops.Rows = append([]snapshot.Drop{row}, s.Drops.Rows...)
}

// Each family has its own setting, and a cure of one is none for the other.
func TestIPForwardFamilies(t *testing.T) {
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   []string // commands of the remedy
	}{
		{"IPv4", examples["ip-forward-off"], []string{"sysctl -w net.ipv4.ip_forward=1", "natkit tune apply --persist"}},
		{"IPv6", off6, []string{"sysctl -w net.ipv6.conf.all.forwarding=1"}},
		{"both", func(s *snapshot.Snapshot) { examples["ip-forward-off"](s); off6(s) },
			[]string{"sysctl -w net.ipv4.ip_forward=1", "natkit tune apply --persist", "sysctl -w net.ipv6.conf.all.forwarding=1"}},
		{"IPv4 without packets", func(s *snapshot.Snapshot) {
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"], s.Sysctls["net.ipv4.conf.eth1.forwarding"] = "0", "0", "0"
			off6(s)
		}, []string{"sysctl -w net.ipv6.conf.all.forwarding=1", "sysctl -w net.ipv4.ip_forward=1"}},
	} {
		s := gateway()
		r.change(s)
		found := Judge(s)
		if len(found) == 0 || found[0].Code != "ip-forward-off" || found[0].Severity != Critical {
			t.Errorf("%s: found %v", r.name, found)
			continue
		}
		got := slices.DeleteFunc(slices.Clone(found[0].Remedy), func(line string) bool { return strings.HasPrefix(line, "#") })
		if !slices.Equal(got, r.want) {
			t.Errorf("%s: remedy %q, want %q", r.name, got, r.want)
		}
	}
}

func TestIPForward(t *testing.T) {
	off := func(s *snapshot.Snapshot) { examples["ip-forward-off"](s) }
	counterOnly := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { off(s); s.Drops = nil; s.Counters["Ip.InAddrErrors"] = n }
	}
	noNAT := func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }
	const full, warn = "critical ip-forward-off", "warning ip-forward-off"
	run(t, []row{
		{"off on a gateway", off, full},
		{"one packet", counterOnly(1), full},
		{"counters not known", func(s *snapshot.Snapshot) { off(s); s.Counters = nil }, full},
		{"off for one interface", func(s *snapshot.Snapshot) {
			off(s)
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1", "1"
		}, full},
		{"off for one interface, strays for its own network", func(s *snapshot.Snapshot) {
			off(s)
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1", "1"
			s.Drops.Rows[2].Samples = []string{"tcp 192.168.1.20:4000 -> 192.168.1.9:443 SYN"}
		}, ""},
		{"off for one interface, a few that nobody saw", func(s *snapshot.Snapshot) {
			counterOnly(5)(s)
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1", "1"
		}, ""},
		{"a router without translation, packet for the other network", func(s *snapshot.Snapshot) {
			off(s)
			noNAT(s)
			s.Drops.Rows[2].Samples = []string{"tcp 192.168.1.20:4000 -> 198.51.100.80:443 SYN"}
		}, full},
		{"settings not known, traced", func(s *snapshot.Snapshot) { off(s); s.Sysctls = nil }, full},
		{"a router without translation or tracer, nothing else comes in", func(s *snapshot.Snapshot) {
			counterOnly(100)(s)
			noNAT(s)
			s.Counters["Ip.InReceives"] = 120
		}, warn},
		{"nobody sends yet", func(s *snapshot.Snapshot) { counterOnly(0)(s) }, "advice ip-forward-off"},

		{"host that does not forward", func(s *snapshot.Snapshot) { counterOnly(0)(s); noNAT(s) }, ""},
		{"host with strays for an address that moved", func(s *snapshot.Snapshot) { counterOnly(20)(s); noNAT(s) }, ""},
		{"strays for an address of the same network", func(s *snapshot.Snapshot) {
			off(s)
			noNAT(s)
			s.Drops.Rows[2].Samples = []string{"tcp 192.168.1.20:4000 -> 192.168.1.9:443 SYN"}
		}, ""},
		{"forwarding is on", func(s *snapshot.Snapshot) { s.Counters["Ip.InAddrErrors"] = 5000 }, ""},
		{"one interface is off, another lost packets", func(s *snapshot.Snapshot) {
			s.Sysctls["net.ipv4.conf.eth1.forwarding"] = "0"
			s.Drops.Rows = []snapshot.Drop{drop(500, snapshot.CauseIPForwardOff, "eth0")}
		}, ""},
		{"redirects of its own traffic only", func(s *snapshot.Snapshot) {
			counterOnly(3)(s)
			s.Chains[0].NATRules = map[string]int{"redirect": 2}
		}, ""},
		{"one network only", func(s *snapshot.Snapshot) { counterOnly(20)(s); s.Interfaces = s.Interfaces[:2] }, ""},

		{"IPv6 alone is off", func(s *snapshot.Snapshot) { off6(s) }, full},
		{"IPv6 on, a packet with an address that is nobody's", func(s *snapshot.Snapshot) {
			off6(s)
			s.Sysctls["net.ipv6.conf.all.forwarding"] = "1"
		}, ""},
		{"IPv6 off, a stray of the same network", func(s *snapshot.Snapshot) {
			off6(s)
			s.Drops.Rows[0].Samples = []string{"tcp [2001:db8:1::20]:4000 -> [2001:db8:1::9]:443 SYN"}
		}, ""},
		{"IPv6 off, settings not known", func(s *snapshot.Snapshot) { off6(s); s.Sysctls = nil }, ""},
	})

	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   []string
	}{
		{"all off", func(s *snapshot.Snapshot) {}, []string{"net.ipv4.ip_forward=1"}},
		{"one off", func(s *snapshot.Snapshot) {
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1", "1"
		}, []string{"net.ipv4.conf.eth1.forwarding=1"}},
		{"global off, one on by choice", func(s *snapshot.Snapshot) {
			s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1"
		}, []string{"net.ipv4.conf.eth1.forwarding=1"}},
		{"interface with a dot", func(s *snapshot.Snapshot) {
			link(s, "eth1").Name = "eth1.7"
			s.Sysctls["net.ipv4.ip_forward"], s.Sysctls["net.ipv4.conf.eth0.forwarding"] = "1", "1"
			s.Sysctls["net.ipv4.conf.eth1/7.forwarding"] = "0"
			s.Drops.Rows[2].Interface = "eth1.7"
		}, []string{"net.ipv4.conf.eth1/7.forwarding=1"}},
	} {
		s := gateway()
		off(s)
		r.change(s)
		var got []string
		for _, set := range Judge(s)[0].Settings {
			got = append(got, set.Name+"="+set.Value)
		}
		if !slices.Equal(got, r.want) {
			t.Errorf("%s: settings %v, want %v", r.name, got, r.want)
		}
	}
}

func TestRPFilter(t *testing.T) {
	lost := func(n, received uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["TcpExt.IPReversePathFilter"] = n
			link(s, "eth0").RxPackets = received
			s.Drops.Rows = []snapshot.Drop{drop(n, snapshot.CauseReversePath, "eth0")}
		}
	}
	const full, warn, advice = "critical rp-filter-drop", "warning rp-filter-drop", "advice rp-filter-drop"
	run(t, []row{
		{"one way of an asymmetric route", lost(900, 1000), full},
		{"a ping", lost(3, 4), warn},
		{"a part of the traffic", lost(100, 1000), full},
		{"no tracer", func(s *snapshot.Snapshot) { lost(900, 1000)(s); link(s, "eth1").RxPackets = 1000; s.Drops = nil }, full},
		{"no counters", func(s *snapshot.Snapshot) { lost(900, 1000)(s); s.Counters = nil }, full},
		{"interfaces and settings not known", func(s *snapshot.Snapshot) {
			lost(900, 0)(s)
			s.Interfaces, s.Sysctls = nil, nil
			s.Counters["Ip.InReceives"] = 1000
		}, full},
		{"nothing to compare with", func(s *snapshot.Snapshot) { lost(900, 0)(s); s.Interfaces, s.Counters = nil, nil }, warn},
		{"spoofed packets beside real traffic", lost(40, 1_000_000), advice},
		{"strict, and nothing dropped", lost(0, 1_000_000), ""},
		{"one packet", lost(1, 1), ""},
	})

	// The cure is for the interface that lost packets, and only where strict.
	for _, r := range []struct{ all, eth0, want string }{
		{"0", "1", "net.ipv4.conf.eth0.rp_filter=2"},
		{"1", "0", "net.ipv4.conf.eth0.rp_filter=2"},
		{"2", "1", ""}, // the larger one counts: loose already
	} {
		s := gateway()
		lost(900, 1000)(s)
		s.Sysctls["net.ipv4.conf.all.rp_filter"], s.Sysctls["net.ipv4.conf.eth0.rp_filter"] = r.all, r.eth0
		got := ""
		for _, set := range Judge(s)[0].Settings {
			got += set.Name + "=" + set.Value
		}
		if got != r.want {
			t.Errorf("all=%s eth0=%s: %q, want %q", r.all, r.eth0, got, r.want)
		}
	}
}

func TestForwardPolicy(t *testing.T) {
	full := func(s *snapshot.Snapshot) { examples["forward-policy-drop"](s) }
	uncounted := func(s *snapshot.Snapshot) { full(s); chain(s, "FORWARD").PolicyPackets = nil }
	ruled := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			chain(s, "FORWARD").DropRules = []snapshot.DropRule{{Number: 2, Verdict: "drop", Packets: &n}}
		}
	}
	const critical, warn, advice = "critical forward-policy-drop", "warning forward-policy-drop", "advice forward-policy-drop"
	run(t, []row{
		{"nearly all is dropped", full, critical},
		{"no tracer", func(s *snapshot.Snapshot) { full(s); s.Drops = nil }, critical},
		{"nft does not count its policy", uncounted, critical},
		{"no stacks, by its packets", func(s *snapshot.Snapshot) { uncounted(s); s.Drops.Rows[2].Stacks = nil }, critical},
		{"a last rule without condition", func(s *snapshot.Snapshot) {
			uncounted(s)
			chain(s, "FORWARD").Policy = "accept"
			chain(s, "FORWARD").DropRules = []snapshot.DropRule{{Number: 7, Verdict: "reject", All: true}}
		}, critical},
		{"one interface loses all, the others carry much", func(s *snapshot.Snapshot) {
			full(s)
			s.Counters["Ip.ForwDatagrams"] = 1_000_000
			link(s, "eth1").RxPackets = 610
		}, critical},
		{"a tenth", func(s *snapshot.Snapshot) { full(s); s.Counters["Ip.ForwDatagrams"] = 6000 }, warn},
		{"a published service that nobody gets through to, a small part", func(s *snapshot.Snapshot) {
			full(s)
			s.Counters["Ip.ForwDatagrams"] = 1_000_000
			s.Drops.Rows[2].Samples = []string{"tcp 198.51.100.9:4000 -> 192.168.1.80:80 SYN (flow 198.51.100.9:4000 -> 198.51.100.1:8080)"}
		}, warn},
		{"strangers, most of what comes in", func(s *snapshot.Snapshot) {
			full(s)
			s.Drops.Rows[2].Samples = []string{"tcp 203.0.113.9:4000 -> 198.18.0.7:23 SYN"}
		}, advice},
		{"a ping", func(s *snapshot.Snapshot) {
			full(s)
			policyDrop2(s, 2)
			s.Counters["Ip.ForwDatagrams"] = 2
			s.Drops.Rows[2].Count = 2
		}, warn},
		{"rules not known, traced", func(s *snapshot.Snapshot) { full(s); s.Chains = nil }, warn},
		{"neither tracer nor counter", func(s *snapshot.Snapshot) {
			uncounted(s)
			s.Drops = nil
			s.Counters["Ip.FragFails"] = 0
		}, warn},
		{"a firewall's trickle", func(s *snapshot.Snapshot) { full(s); s.Counters["Ip.ForwDatagrams"] = 1_000_000 }, advice},

		{"Docker's policy, nothing met it", func(s *snapshot.Snapshot) { policyDrop(s, 0) }, ""},
		{"Docker's policy, two packets of many", func(s *snapshot.Snapshot) { policyDrop(s, 2) }, ""},
		{"dropped by a rule with a condition, policy accepts", func(s *snapshot.Snapshot) {
			full(s)
			chain(s, "FORWARD").Policy = "accept"
		}, ""},
		{"dropped by a rule with a condition, nothing met the policy", func(s *snapshot.Snapshot) {
			full(s)
			policyDrop2(s, 0)
			ruled(600)(s)
		}, ""},
		{"dropped by a rule with a condition, policy not counted", func(s *snapshot.Snapshot) { uncounted(s); ruled(600)(s) }, ""},
		{"dropped on the input hook", func(s *snapshot.Snapshot) {
			uncounted(s)
			s.Drops.Rows[2] = drop(600, snapshot.CauseRule, "eth0", stack("nft_do_chain+0x1", "nf_hook_slow+0x41", "ip_local_deliver+0x10", "ip_rcv+0x7a"))
		}, ""},
		{"for the machine itself, without stacks", func(s *snapshot.Snapshot) {
			uncounted(s)
			s.Drops.Rows[2] = drop(600, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 198.51.100.1:23 SYN"))
		}, ""},
		{"neither tracer nor counter, the output chain drops too", func(s *snapshot.Snapshot) {
			uncounted(s)
			s.Drops = nil
			s.Counters["Ip.FragFails"] = 0
			s.Chains = append(s.Chains, snapshot.Chain{Family: "ip", Table: "filter", Name: "OUTPUT", Hook: "output", Policy: "drop"})
		}, ""},
		{"host that forwards nothing and drops what it sends, rules not known", func(s *snapshot.Snapshot) {
			s.Drops, s.Chains = nil, nil
			s.Counters["Ip.ForwDatagrams"], s.Counters["Ip.OutRequests"], s.Counters["Ip.OutTransmits"], s.Counters["Ip.FragFails"] = 0, 500, 100, 0
		}, ""},
		{"a little is missing, rules not known", func(s *snapshot.Snapshot) {
			s.Drops, s.Chains = nil, nil
			s.Counters["Ip.OutTransmits"] -= 500
			s.Counters["Ip.FragFails"] = 0
		}, ""},
		{"neither tracer nor counter, all left", func(s *snapshot.Snapshot) {
			policyDrop(s, 0)
			chain(s, "FORWARD").PolicyPackets = nil
			s.Drops = nil
		}, ""},
	})

	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"Docker's", func(s *snapshot.Snapshot) {}, "iptables-nft -I DOCKER-USER -i eth1 -o eth0 -j ACCEPT"},
		{"iptables'", func(s *snapshot.Snapshot) { s.Chains = s.Chains[:2] }, "iptables-nft -I FORWARD -i eth1 -o eth0 -j ACCEPT"},
		{"legacy", func(s *snapshot.Snapshot) {
			s.Chains = s.Chains[:2]
			chain(s, "FORWARD").Backend = "iptables-legacy"
		}, "iptables-legacy -I FORWARD -i eth1 -o eth0 -j ACCEPT"},
		{"nft", func(s *snapshot.Snapshot) {
			s.Chains = s.Chains[:2]
			c := chain(s, "FORWARD")
			c.Family, c.Table, c.Name = "inet", "fw", "fwd"
		}, `nft 'insert rule inet fw fwd iifname "eth1" oifname "eth0" accept'`},
		{"nft, in a namespace", func(s *snapshot.Snapshot) {
			s.Chains = s.Chains[:2]
			s.Netns.Name = "blue"
			c := chain(s, "FORWARD")
			c.Family, c.Table, c.Name = "inet", "fw", "fwd"
		}, `ip netns exec blue nft 'insert rule inet fw fwd iifname "eth1" oifname "eth0" accept'`},
		{"bridged: the switch", func(s *snapshot.Snapshot) {
			examples["br-netfilter-overhead"](s)
			s.Drops.Rows[2].Interface = "veth1"
		}, "sysctl -w net.bridge.bridge-nf-call-iptables=0"},
		{"bridged: the rule", func(s *snapshot.Snapshot) {
			examples["br-netfilter-overhead"](s)
			s.Chains = s.Chains[:2]
			s.Drops.Rows[2].Interface = "veth1"
		}, "iptables-nft -I FORWARD -i br0 -o br0 -j ACCEPT"},
	} {
		s := gateway()
		full(s)
		r.change(s)
		if f := Judge(s)[0]; !slices.Contains(f.Remedy, r.want) {
			t.Errorf("%s: no %q in\n%s", r.name, r.want, strings.Join(f.Remedy, "\n"))
		}
	}
	// A rule for everything is never proposed.
	s := gateway()
	full(s)
	s.Drops = nil
	for _, line := range Judge(s)[0].Remedy {
		if strings.Contains(line, "ACCEPT") {
			t.Errorf("proposed without knowing what is dropped: %s", line)
		}
	}
}

func policyDrop2(s *snapshot.Snapshot, met uint64) { chain(s, "FORWARD").PolicyPackets = &met }

func TestMTU(t *testing.T) {
	lost := func(n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			link(s, "eth0").MTU = 1000
			s.Counters["Ip.FragFails"], s.Counters["Ip.ForwDatagrams"] = n, forwarded
		}
	}
	const full, warn, advice = "critical mtu-drop", "warning mtu-drop", "advice mtu-drop"
	run(t, []row{
		{"a transfer that hangs", lost(6, 30), full},
		{"part of the traffic", lost(4000, 1_990_000), warn},
		{"tracer alone", func(s *snapshot.Snapshot) {
			s.Counters = nil
			s.Drops.Rows = []snapshot.Drop{drop(600, snapshot.CauseTooBig, "eth1")}
		}, warn},
		{"all the time, beside much else", lost(150, 100_000_000), warn},
		{"path MTU discovery at work", lost(10, 1_000_000), advice},
		{"one connection learns its size", lost(2, 40), ""},
		{"smaller MTU, nothing lost", lost(0, 1_000_000), ""},
	})
	s := gateway()
	lost(600, 6000)(s)
	f := Judge(s)[0]
	for _, want := range []string{
		`nft 'add rule ip natkit-mss forward oifname "eth0" tcp flags & (syn|rst) == syn tcp option maxseg size set 960'`,
		`nft 'add rule ip natkit-mss forward iifname "eth0" tcp flags & (syn|rst) == syn tcp option maxseg size set 960'`,
	} {
		if !slices.Contains(f.Remedy, want) {
			t.Errorf("no %q in\n%s", want, strings.Join(f.Remedy, "\n"))
		}
	}
}

func TestListenOverflow(t *testing.T) {
	lost := func(n, taken uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["TcpExt.ListenOverflows"], s.Counters["Tcp.PassiveOpens"] = n, taken
		}
	}
	const full, warn, advice = "critical listen-overflow", "warning listen-overflow", "advice listen-overflow"
	run(t, []row{
		{"a queue of 511 under a burst", lost(9788, 40000), full},
		{"a server that stands still", lost(20, 0), full},
		{"some", lost(500, 20000), warn},
		{"counters not known, traced", func(s *snapshot.Snapshot) {
			s.Counters = nil
			s.Drops.Rows = []snapshot.Drop{drop(60, snapshot.CauseListenOverflow, "eth1")}
		}, warn},
		{"counters not known, by the socket", func(s *snapshot.Snapshot) { s.Counters = nil; s.Listeners[0].Drops = 70 }, warn},
		{"few of many", lost(30, 400000), advice},
		{"one", lost(1, 3), ""},
		{"a full queue, nobody refused", func(s *snapshot.Snapshot) { s.Listeners[0].Queue = 129 }, ""},
		{"a socket that dropped for other reasons", func(s *snapshot.Snapshot) { s.Listeners[0].Drops = 400 }, ""},
	})
	// Which of the two queues' limits must grow.
	for _, r := range []struct {
		name, somaxconn string
		backlog         uint32
		settings        int
		remark          string
	}{
		{"the program asked for little", "65535", 511, 0, "nginx asks for a queue of only 511"},
		{"the kernel allows no more", "4096", 4096, 1, "then raise the backlog of nginx"},
	} {
		s := gateway()
		lost(9788, 40000)(s)
		s.Sysctls["net.core.somaxconn"] = r.somaxconn
		s.Listeners = append(s.Listeners, snapshot.Listener{Addr: snapshot.EndpointOf(netip.MustParseAddrPort("0.0.0.0:80")), Queue: r.backlog + 1, Backlog: r.backlog, Process: "nginx"})
		f := Judge(s)[0]
		if len(f.Settings) != r.settings || !strings.Contains(strings.Join(f.Remedy, "\n"), r.remark) {
			t.Errorf("%s: settings %v, remedy\n%s", r.name, f.Settings, strings.Join(f.Remedy, "\n"))
		}
		if !strings.Contains(f.Title, "0.0.0.0:80 (nginx)") {
			t.Errorf("%s: the full queue is not named: %s", r.name, f.Title)
		}
	}
}

func TestBrNetfilter(t *testing.T) {
	busy := func(s *snapshot.Snapshot) { examples["br-netfilter-overhead"](s) }
	const want = "advice br-netfilter-overhead"
	run(t, []row{
		{"a busy bridge", busy, want},
		{"hooks not known, chains are", func(s *snapshot.Snapshot) { busy(s); s.Hooks = nil }, want},
		{"Docker", func(s *snapshot.Snapshot) { busy(s); s.Chains = append(s.Chains, snapshot.Chain{Name: "DOCKER"}) }, want},
		{"off", func(s *snapshot.Snapshot) { busy(s); s.Sysctls["net.bridge.bridge-nf-call-iptables"] = "0" }, ""},
		{"module not loaded", func(s *snapshot.Snapshot) { busy(s); delete(s.Sysctls, "net.bridge.bridge-nf-call-iptables") }, ""},
		{"quiet", func(s *snapshot.Snapshot) { busy(s); link(s, "veth0").RxPackets, link(s, "veth1").RxPackets = 20, 30 }, ""},
		{"no function on the IPv4 hooks", func(s *snapshot.Snapshot) { busy(s); s.Hooks = []snapshot.Hook{} }, ""},
		{"Kubernetes", func(s *snapshot.Snapshot) {
			busy(s)
			s.Chains = append(s.Chains, snapshot.Chain{Family: "ip", Table: "nat", Name: "KUBE-SERVICES"})
		}, ""},
		{"ports of something that is no bridge", func(s *snapshot.Snapshot) { busy(s); link(s, "br0").Kind = "bond" }, ""},
	})
}

// What opens a machine is not among the settings that tune writes unasked as long
// as it is only advice.
func TestAdviceOpensNothing(t *testing.T) {
	for code, change := range map[string]func(s *snapshot.Snapshot){
		"ip-forward-off": func(s *snapshot.Snapshot) {
			examples["ip-forward-off"](s)
			s.Drops, s.Counters = nil, nil
		},
		"rp-filter-drop": func(s *snapshot.Snapshot) {
			examples["rp-filter-drop"](s)
			link(s, "eth0").RxPackets = 1_000_000
		},
		"br-netfilter-overhead": examples["br-netfilter-overhead"],
	} {
		s := gateway()
		change(s)
		f := Judge(s)[0]
		unasked := slices.ContainsFunc(f.Settings, func(s snapshot.Setting) bool { return s.If == "" })
		if f.Code != code || f.Severity != Advice || unasked || !strings.Contains(strings.Join(f.Remedy, "\n"), "sysctl -w") {
			t.Errorf("%s: %v %s, settings %v, remedy %q", code, f.Severity, f.Code, f.Settings, f.Remedy)
		}
	}
}
