// SPDX-License-Identifier: Apache-2.0

package causes

// Causes outside of connection tracking's and routing's own tables: rules that drop,
// hops that are silent, sources that nobody answers, and what else drops packets.

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func count(n uint64) *uint64 { return &n }

func addUnanswered(s *snapshot.Snapshot, u ...snapshot.UnansweredUse) {
	s.Conntrack.Table.Unanswered = append(s.Conntrack.Table.Unanswered, u...)
}

func init() {
	examples["rule-drop"] = func(s *snapshot.Snapshot) {
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "inet", Table: "guard", Name: "blocked", Hook: "prerouting", Type: "filter", Policy: "accept", Rules: 2,
			DropRules: []snapshot.DropRule{{Number: 2, Verdict: "drop", Packets: count(600_000)}},
			Walk: []snapshot.Rule{
				{Number: 1, Handle: 4, Text: "tcp dport 22 accept", Verdict: "accept", Matches: []snapshot.Match{{Keys: []string{"tcp dport"}, Values: []string{"22"}, Text: "tcp dport 22"}}},
				{Number: 2, Handle: 5, Text: "ip saddr @blocked counter drop", Verdict: "drop", Packets: count(600_000), Matches: []snapshot.Match{{Keys: []string{"ip saddr"}, Set: "blocked", Text: "ip saddr @blocked"}}},
			}})
		s.Sets = append(s.Sets, snapshot.Set{Backend: "nft", Family: "inet", Table: "guard", Name: "blocked", Size: 1, Whole: true,
			Elements: []snapshot.Element{{Key: []string{"192.168.1.0/24"}, TimeoutSeconds: 3600, ExpiresSeconds: 1200}}})
		row := drop(600_000, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"))
		row.Packets = []snapshot.DroppedPacket{{Text: row.Samples[0], Stands: row.Count, Stage: snapshot.StageArrived, In: "eth1", State: "new", TTL: 64, Length: 60}}
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
	examples["next-hop-silent"] = func(s *snapshot.Snapshot) {
		s.Drops.Rows = append(s.Drops.Rows, drop(300_000, snapshot.CauseNeighbour, "eth0", sample("tcp 198.51.100.1:4000 -> 203.0.113.81:443 SYN (flow 192.168.1.20:4000 -> 203.0.113.81:443)")))
		s.Routes = append(s.Routes, snapshot.RouteAnswer{Dest: addr("203.0.113.81"), Answer: snapshot.RouteFound, Out: "eth0", Via: addr("198.51.100.254")})
	}
	examples["answers-lost"] = func(s *snapshot.Snapshot) {
		addUnanswered(s, snapshot.UnansweredUse{Protocol: "tcp", Source: addr("192.168.1.30"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.90:443")),
			Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.90:443")), Entries: 40, Recent: 12})
		s.Routes = append(s.Routes, snapshot.RouteAnswer{Dest: addr("203.0.113.90"), Answer: snapshot.RouteFound, Out: "eth0", Via: addr("198.51.100.254")})
	}
	examples["receive-buffer-full"] = func(s *snapshot.Snapshot) {
		s.Counters["Udp.RcvbufErrors"], s.Counters["Udp.InDatagrams"] = 490, 700
		row := drop(490, snapshot.CauseNone, "eth1", sample("udp 192.168.1.20:4000 -> 192.168.1.1:53"))
		row.Reason = "SOCKET_RCVBUFF"
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
	examples["local-ports-exhausted"] = func(s *snapshot.Snapshot) {
		s.Sysctls["net.ipv4.ip_local_port_range"], s.Sysctls["net.ipv4.ip_local_reserved_ports"] = "32768 60999", "80,40000-40009"
		s.Sysctls["net.ipv4.tcp_tw_reuse"] = "2"
		s.LocalPorts = []snapshot.LocalPortUse{{Source: addr("172.17.0.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("172.17.0.2:80")), Used: 28_222, TimeWait: 28_000, Process: "docker-proxy", Inode: 4711}}
	}
	examples["answered-from-elsewhere"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Table.Destinations = append(s.Conntrack.Table.Destinations, snapshot.Talker{Addr: addr("203.0.113.53"), Entries: 40, Unreplied: 40})
		s.Conntrack.Table.Strays = []snapshot.StrayUse{{Source: addr("192.168.1.20"), Seen: addr("198.51.100.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:1194")),
			Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:1194")), From: addr("203.0.113.54"), Flows: 40}}
	}
	examples["link-down"] = func(s *snapshot.Snapshot) {
		s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "eth2", Kind: "device", Addresses: prefixes("10.80.0.1/24")})
		s.Conntrack.Table.Sources = append(s.Conntrack.Table.Sources, snapshot.Talker{Addr: addr("10.80.0.9"), Entries: 40})
	}
	examples["clients-unreached"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Table.Halfway = []snapshot.UnansweredUse{{Protocol: "tcp", Source: addr("192.168.1.40"), SNAT: true, Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443")),
			Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443")), Entries: 60, Recent: 24}}
		s.Conntrack.Table.Sources = append(s.Conntrack.Table.Sources, snapshot.Talker{Addr: addr("192.168.1.40"), Entries: 80})
		s.Routes = append(s.Routes, snapshot.RouteAnswer{In: "eth0", Source: addr("203.0.113.80"), Dest: addr("192.168.1.40"), Answer: snapshot.RouteFound, Out: "eth1", Table: 254})
	}
	examples["other-drops"] = func(s *snapshot.Snapshot) {
		row := drop(600_000, snapshot.CauseNone, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"))
		row.Location, row.Reason = "nf_queue+0x21f", "NOT_SPECIFIED"
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
}

// Beside a policy that drops, a rule that counts is told by what it counted.
func TestRuleBesidePolicy(t *testing.T) {
	s := gateway()
	examples["forward-policy-drop"](s)
	forward := chain(s, "FORWARD")
	forward.DropRules = append(forward.DropRules, snapshot.DropRule{Number: 1, Verdict: "drop", Packets: count(2000)})
	for i, row := range s.Drops.Rows {
		if row.Cause == snapshot.CauseRule {
			s.Drops.Rows[i].Count += 2000
		}
	}
	if got := codesOf(Judge(s)); !slices.Equal(got, []string{"forward-policy-drop", "rule-drop"}) {
		t.Errorf("found %q", got)
	}
	forward.DropRules[0].Packets = count(0)
	if got := codesOf(Judge(s)); !slices.Equal(got, []string{"forward-policy-drop"}) {
		t.Errorf("with a rule that no packet met: found %q", got)
	}
}

// A rule without a counter beside a policy without one: where no sample of a packet was saved
// that could be followed, both are named, and how to count. Nothing is opened.
func TestRuleOrPolicy(t *testing.T) {
	s := gateway()
	examples["forward-policy-drop"](s)
	forward := chain(s, "FORWARD")
	forward.Table, forward.Name, forward.PolicyPackets = "f", "fw", nil
	forward.DropRules = []snapshot.DropRule{{Number: 1, Verdict: "drop"}}
	link(s, "eth1").RxPackets = 610
	found := Judge(s)
	if len(found) == 0 || found[0].Code != "rule-drop" || !strings.Contains(found[0].Title, "rule 1 of chain fw or the policy of chain fw") {
		t.Fatalf("found %+v", found)
	}
	remedy := strings.Join(found[0].Remedy, "\n")
	if !strings.Contains(remedy, "nft add rule ip f fw counter") || strings.Contains(remedy, "accept") {
		t.Errorf("remedy\n%s", remedy)
	}
}

func TestRuleDrop(t *testing.T) {
	by := func(n uint64, device, packet string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(n, snapshot.CauseRule, device, sample(packet)))
		}
	}
	const syn = "tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN"
	const answer = "tcp 203.0.113.80:443 -> 192.168.1.20:4000 SYN,ACK (flow 192.168.1.20:4000 -> 203.0.113.80:443)"
	const backscatter = "tcp 203.0.113.80:443 -> 198.51.100.1:4000 SYN,ACK"
	const led = "tcp 203.0.113.9:4000 -> 192.168.1.80:80 SYN (flow 203.0.113.9:4000 -> 198.51.100.1:80)"
	run(t, []row{
		{"all that a network sends", by(950_000, "eth1", syn), "critical rule-drop"},
		{"most of it", by(500_000, "eth1", syn), "warning rule-drop"},
		{"a part", by(60_000, "eth1", syn), "advice rule-drop"},
		{"dropped on the way out", by(950_000, "eth0", syn), "critical rule-drop"},
		{"answers", by(50_000, "eth0", answer), "warning rule-drop"},
		{"most answers", by(600_000, "eth0", answer), "critical rule-drop"},
		{"a published service", by(600_000, "eth0", led), "warning rule-drop"},
		{"dropped after their source was translated", by(950_000, "eth0", "tcp 198.51.100.1:4000 -> 203.0.113.80:443 SYN (flow 192.168.1.20:4000 -> 203.0.113.80:443)"), "critical rule-drop"},
		{"what this machine itself says about a flow to a published service", by(12, "eth0", "icmp 198.51.100.1 -> 198.51.100.9 type 5 code 1 (flow 198.51.100.9:4000 -> 198.51.100.1:80)"), ""},
		{"what this machine itself says about a flow", by(950_000, "eth0", "icmp 198.51.100.1 -> 203.0.113.80 type 3 code 1 (flow 192.168.1.20:4000 -> 203.0.113.80:443)"), ""},
		{"what this machine itself sends", by(950_000, "eth0", "tcp 198.51.100.1:4000 -> 203.0.113.80:443 SYN (flow 198.51.100.1:4000 -> 203.0.113.80:443)"), ""},
		{"a published service, by few packets of private sources", by(12, "eth0", "tcp 10.7.0.9:4000 -> 192.168.1.80:80 SYN (flow 10.7.0.9:4000 -> 198.51.100.1:80)"), "warning rule-drop"},
		{"a published service for some, by few packets of others on the network outside", by(12, "eth0", "tcp 198.51.100.9:4000 -> 192.168.1.80:80 SYN (flow 198.51.100.9:4000 -> 198.51.100.1:80)"), "advice rule-drop"},
		{"a published service, by few packets of strangers", by(12, "eth0", led), "advice rule-drop"},
		{"a published service, before a rule led it anywhere", func(s *snapshot.Snapshot) {
			publish(s, "tcp", 80, "192.168.1.80", 80)
			by(12, "eth0", "tcp 10.7.0.9:4000 -> 198.51.100.1:80 SYN")(s)
		}, "warning rule-drop"},
		{"strangers who want a published service, before a rule led it anywhere", func(s *snapshot.Snapshot) {
			publish(s, "tcp", 80, "192.168.1.80", 80)
			by(950_000, "eth0", "tcp 203.0.113.9:4000 -> 198.51.100.1:80 SYN")(s)
		}, "advice rule-drop"},
		{"some that want a published service, which others reach", func(s *snapshot.Snapshot) {
			by(12, "eth0", led)(s)
			s.Conntrack.Table.Targets = []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(netip.MustParseAddrPort("198.51.100.1:80")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:80")), Answered: 9}}
		}, ""},
		{"answers by UDP, dropped before connection tracking", func(s *snapshot.Snapshot) {
			by(600_000, "eth0", "udp 203.0.113.53:53 -> 198.51.100.1:4000")(s)
			addUnanswered(s, snapshot.UnansweredUse{Protocol: "udp", Source: addr("192.168.1.20"), SNAT: true, Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:53")),
				Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:53")), Entries: 40, Recent: 12})
		}, "critical rule-drop"},
		{"UDP that nobody here asked for", by(600_000, "eth0", "udp 203.0.113.53:53 -> 198.51.100.1:4000"), ""},
		{"answers, dropped before connection tracking", func(s *snapshot.Snapshot) {
			by(600_000, "eth0", backscatter)(s)
			addUnanswered(s, snapshot.UnansweredUse{Protocol: "tcp", Source: addr("192.168.1.20"), SNAT: true, Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443")),
				Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443")), Entries: 40, Recent: 12})
		}, "critical rule-drop"},
		{"answers to others, who forge this address", by(600_000, "eth0", backscatter), ""},
		{"neighbour solicitations", by(4, "eth1", "icmpv6 fd00::2 -> ff02::1:ff00:1 type 135 code 0"), "warning rule-drop"},
		{"ARP", by(4, "eth1", "arp"), "warning rule-drop"},

		{"a small part", by(40_000, "eth1", syn), ""},
		{"router solicitations", by(4, "eth1", "icmpv6 fe80::2 -> ff02::2 type 133 code 0"), ""},
		{"a scan of this machine", by(900_000, "eth0", "tcp 203.0.113.9:4000 -> 198.51.100.1:22 SYN"), ""},
		{"a scan of the network behind it", by(900_000, "eth0", "tcp 203.0.113.9:4000 -> 192.168.1.80:80 SYN"), ""},
		{"a few answers that came late", by(40, "eth0", answer), ""},
		{"damaged", by(1<<60, "eth1", syn), ""},
		{"without a sample", func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(900_000, snapshot.CauseRule, "eth1"))
		}, ""},
	})

	s := gateway()
	s.Chains = append(s.Chains, snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "mangle", Name: "POSTROUTING", Hook: "postrouting",
		DropRules: []snapshot.DropRule{{Number: 3, Verdict: "drop", Packets: count(950_000)}}})
	by(950_000, "eth0", syn)(s)
	f := Judge(s)[0]
	if want := "iptables-legacy -t mangle -D POSTROUTING 3"; !strings.Contains(strings.Join(f.Remedy, "\n"), want) || !strings.HasPrefix(f.Title, "rule 3 of chain POSTROUTING") {
		t.Errorf("%s: remedy %q, want %q", f.Title, f.Remedy, want)
	}
	s.Chains = s.Chains[:2]
	if f := Judge(s)[0]; !strings.Contains(strings.Join(f.Remedy, "\n"), "ip saddr 192.168.1.20 ip daddr 203.0.113.80 meta nftrace set 1") {
		t.Errorf("no trace for a rule that is not known: %q", f.Remedy)
	}
}

func TestNextHop(t *testing.T) {
	silent := func(n uint64, forwarded uint64, packets ...string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["Ip.ForwDatagrams"] = forwarded
			for _, p := range packets {
				s.Drops.Rows = append(s.Drops.Rows, drop(n, snapshot.CauseNeighbour, "eth1", sample(p)))
			}
		}
	}
	const host, other = "udp 10.8.0.2:4000 -> 192.168.1.77:53", "udp 10.8.0.2:4000 -> 192.168.1.78:53"
	const led = "tcp 203.0.113.9:4000 -> 192.168.1.77:80 SYN (flow 203.0.113.9:4000 -> 198.51.100.1:8080)"
	const answer = "tcp 198.51.100.1:8080 -> 192.168.1.77:4000 ACK (flow 192.168.1.77:4000 -> 198.51.100.1:8080)"
	routed := func(n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["next-hop-silent"](s)
			s.Counters["Ip.ForwDatagrams"] = forwarded
			s.Drops.Rows[2].Count = n
		}
	}
	run(t, []row{
		{"a router", routed(500, 2000), "critical next-hop-silent"},
		{"a router of a small part", routed(500, 2_000_000), "warning next-hop-silent"},
		{"a published service", silent(300, 1000, led), "critical next-hop-silent"},
		{"the only host that is talked to", silent(90, 100, host), "warning next-hop-silent"},
		{"one host of many", silent(90, 2_000_000, host), "advice next-hop-silent"},
		{"a scan", silent(90, 200, host, other), "advice next-hop-silent"},
		{"forwarded not known", func(s *snapshot.Snapshot) { routed(500, 0)(s); s.Counters = nil }, "warning next-hop-silent"},

		{"two packets", routed(2, 2000), ""},
		{"damaged", routed(1<<60, 2000), ""},
	})
	s := gateway()
	silent(300, 1000, answer)(s)
	if f := Judge(s); len(f) != 1 || f[0].Severity > Warning || strings.Contains(f[0].Title, "backend") {
		t.Errorf("the client of a service that is gone is taken for its target: %+v", f)
	}

	port := gateway()
	examples["next-hop-silent"](port)
	port.Interfaces = append(port.Interfaces, snapshot.Interface{Name: "veth 9", Kind: "veth", Master: "eth0"})
	if f := Judge(port)[0]; !slices.Contains(f.Remedy, "ip link set dev 'veth 9' up") {
		t.Errorf("a port of the bridge is down: %q", f.Remedy)
	}
}

func TestAnswersLost(t *testing.T) {
	flow := func(u snapshot.UnansweredUse, source, dest string, n, recent uint64) func(s *snapshot.Snapshot) {
		u.Protocol, u.Source, u.Dest, u.Entries, u.Recent = "tcp", addr(source), snapshot.EndpointOf(netip.MustParseAddrPort(dest)), n, recent
		if !u.Target.IsValid() {
			u.Target = u.Dest
		}
		return func(s *snapshot.Snapshot) { addUnanswered(s, u) }
	}
	var plain snapshot.UnansweredUse
	both := func(changes ...func(*snapshot.Snapshot)) func(*snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			for _, c := range changes {
				c(s)
			}
		}
	}
	pool := func(a string, unanswered uint64) func(*snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			c := chain(s, "postrouting")
			c.NATRules, c.SNATTo = map[string]int{"snat": 1}, []snapshot.AddrRange{{First: addr(a), Last: addr(a)}}
			s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr(a), Entries: 40, Recent: 12, Unanswered: unanswered}}
		}
	}
	masked := func(s *snapshot.Snapshot) { s.Conntrack.Table.ByStatus["SNAT"] = 0 }
	small := func(s *snapshot.Snapshot) {
		s.Conntrack.Table.Entries, s.Conntrack.Table.ByProtocol = 40, map[string]uint64{"tcp": 40}
	}
	untracked := func(s *snapshot.Snapshot) {
		s.Conntrack.Count, s.Conntrack.CountStart = 0, 0
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "raw", Name: "prerouting", Hook: "prerouting", Type: "filter", Priority: -300, Policy: "accept", Rules: 1})
	}
	unmatched := func(s *snapshot.Snapshot) {
		s.Conntrack.Table.ByState["SYN_SENT"] = 9000
		row := drop(400, snapshot.CauseNone, "eth0", sample("tcp 203.0.113.80:443 -> 198.51.100.1:4000 SYN,ACK"))
		row.Reason = "NO_SOCKET"
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
	run(t, []row{
		{"a private source to a public address", flow(plain, "192.168.1.30", "203.0.113.90:443", 40, 12), "critical answers-lost"},
		{"not lately", flow(plain, "192.168.1.30", "203.0.113.90:443", 40, 0), "warning answers-lost"},
		{"no flow of a rule's network is translated", both(masked, small, flow(plain, "192.168.1.30", "10.9.0.2:443", 40, 12)), "warning answers-lost"},
		{"an address that is nobody's", both(pool("198.51.100.7", 12), flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 40, 12)), "critical answers-lost"},
		{"nothing is tracked", untracked, "critical answers-lost"},
		{"answers that find no entry", unmatched, "critical answers-lost"},
		{"answers that find no entry, beside many connections that are over", both(unmatched, func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByState["SYN_SENT"] = 2000
		}), "critical answers-lost"},
		{"no rule translates, and nobody answers", both(masked, small, flow(plain, "192.168.1.30", "203.0.113.90:443", 40, 12), func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), "warning answers-lost"},

		{"a router further on translates, and a host is down", both(flow(plain, "192.168.1.30", "203.0.113.90:443", 40, 12), func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), ""},
		{"a host that is down", flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 40, 12), ""},
		{"one that answers others", flow(plain, "192.168.1.30", "203.0.113.80:443", 40, 12), ""},
		{"a network that is routed here", flow(plain, "192.168.1.30", "10.9.0.2:443", 40, 12), ""},
		{"two flows", flow(plain, "192.168.1.30", "203.0.113.90:443", 2, 2), ""},
		{"a public source", flow(plain, "203.0.113.9", "192.0.2.90:443", 40, 12), ""},
		{"a pool that is routed here", both(pool("192.0.2.7", 12), flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 40, 12)), ""},
		{"a pool that is answered for", both(pool("198.51.100.7", 2), flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 4, 2)), ""},
		{"a pool that is answered for, beside flows of another address that are not", both(pool("198.51.100.7", 1), flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 400, 120)), ""},
		{"an idle pool, beside flows of another address that have no reply", both(pool("198.51.100.7", 0), flow(snapshot.UnansweredUse{SNAT: true}, "192.168.1.30", "203.0.113.90:443", 400, 120), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Outsides[0].Recent = 0
			s.Conntrack.Table.Outsides = append(s.Conntrack.Table.Outsides, snapshot.OutsideUse{Addr: addr("198.51.100.1"), Entries: 9000, Recent: 900})
		}), ""},
		{"all entries are gone at once", both(untracked, func(s *snapshot.Snapshot) { s.Chains = s.Chains[:len(s.Chains)-1] }), ""},
		{"stateless maps of engine nft", both(untracked, func(s *snapshot.Snapshot) { withNFT(s, "prerouting") }), ""},
		{"forwarding without rules", both(untracked, func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), ""},
		{"all was dropped on the way", both(untracked, func(s *snapshot.Snapshot) { s.Counters["Ip.OutTransmits"] = 0 }), ""},
		{"a scan's echo", both(unmatched, func(s *snapshot.Snapshot) { s.Conntrack.Table.ByState["SYN_SENT"] = 2 }), ""},
	})
	s := gateway()
	s.Netns.Name = "blue"
	examples["answers-lost"](s)
	accepted := gateway()
	examples["answers-lost"](accepted)
	accepted.Chains[0].Rules++
	if want := `nft 'insert rule ip nat postrouting ip saddr 192.168.1.0/24 oifname "eth0" masquerade'`; !slices.Contains(Judge(accepted)[0].Remedy, want) {
		t.Errorf("beside a rule that may accept: %q, want %q", Judge(accepted)[0].Remedy, want)
	}
	back := gateway()
	examples["answers-lost"](back)
	back.Routes[len(back.Routes)-1].Out = "eth1"
	if f := Judge(back)[0]; !strings.HasSuffix(f.Title, "the route to 203.0.113.90 leads back to them") || strings.Contains(strings.Join(f.Remedy, "\n"), "masquerade") {
		t.Errorf("a route back: %s, %q", f.Title, f.Remedy)
	}
	if want := `ip netns exec blue nft 'add rule ip nat postrouting ip saddr 192.168.1.0/24 oifname "eth0" masquerade'`; !strings.Contains(strings.Join(Judge(s)[0].Remedy, "\n"), want) {
		t.Errorf("remedy %q, want %q", Judge(s)[0].Remedy, want)
	}
}

func TestClientsUnreached(t *testing.T) {
	const code = "clients-unreached"
	change := func(change func(s *snapshot.Snapshot, u *snapshot.UnansweredUse)) func(s *snapshot.Snapshot) {
		return also(code, func(s *snapshot.Snapshot) { change(s, &s.Conntrack.Table.Halfway[0]) })
	}
	run(t, []row{
		{"all of a client's connections", also(code), "critical " + code},
		{"since a moment ago", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) { u.Entries, u.Recent = 6, 6 }), "warning " + code},
		{"a client that is not among those with most entries", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) {
			u.Source, s.Conntrack.Table.Sources = addr("192.168.1.41"), s.Conntrack.Table.Sources[:2]
			u.Entries, u.Recent = 900, 900
		}), "critical " + code},
		{"one published service and a client from outside", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) {
			u.Source, u.Target, s.Routes = addr("203.0.113.9"), snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:443")), nil
			s.Conntrack.Table.Sources = append(s.Conntrack.Table.Sources, snapshot.Talker{Addr: u.Source, Entries: 60})
		}), "critical " + code},

		{"cured a moment ago", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) { u.Recent = 0 }), ""},
		{"a busy client that loses a packet now and then", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) { u.Source, u.Recent = addr("192.168.1.20"), 30 }), ""},
		{"a rule here drops the answers", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) {
			s.Drops.Rows = append(s.Drops.Rows, drop(60, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.80:443 -> 192.168.1.40:4000 SYN,ACK (flow 192.168.1.40:4000 -> 203.0.113.80:443)")))
		}), "warning rule-drop"},
		{"a rule here drops what the client confirms with", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) {
			s.Drops.Rows = append(s.Drops.Rows, drop(60, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.40:4000 -> 203.0.113.80:443 ACK")))
		}), "warning rule-drop"},
		{"absurd", change(func(s *snapshot.Snapshot, u *snapshot.UnansweredUse) { u.Entries, u.Recent = 1<<60, 1<<61 }), ""},
	})
	s := gateway()
	examples[code](s)
	s.Netns.Name = "blue"
	s.Routes[0].Out, s.Routes[0].Via, s.Routes[0].Table = "eth0", addr("198.51.100.254"), 77
	f := Judge(s)[0]
	if want := "leave by eth0, but it is on eth1"; !strings.HasSuffix(f.Title, want) || !slices.Contains(f.Remedy, "ip netns exec blue ip route show table 77") {
		t.Errorf("led astray: %s, %q", f.Title, f.Remedy)
	}
	s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "eth2", Kind: "device", MTU: 1500, Up: true, Addresses: prefixes("192.168.1.2/24"), RxPackets: 9000})
	s.Routes[0].Out = "eth2"
	if f := Judge(s)[0]; f.Code != code || strings.Contains(f.Title, "leave by") {
		t.Errorf("both interfaces are on a network with that address: %s", f.Title)
	}
}

func TestReceiveBuffer(t *testing.T) {
	const code = "receive-buffer-full"
	counted := func(lost, taken uint64) func(s *snapshot.Snapshot) {
		return also(code, func(s *snapshot.Snapshot) {
			s.Counters["Udp.RcvbufErrors"], s.Counters["Udp.InDatagrams"] = lost, taken
		})
	}
	run(t, []row{
		{"a good part", also(code), "critical " + code},
		{"some", counted(490, 20_000), "warning " + code},
		{"few of many", counted(490, 500_000), "advice " + code},
		{"no tracer", also(code, func(s *snapshot.Snapshot) { s.Drops = nil }), "critical " + code},
		{"tracer only", also(code, func(s *snapshot.Snapshot) { s.Counters = nil }), "critical " + code},
		{"a few in a burst", counted(9, 20), "advice receive-buffer-full"},
		{"absurd", counted(1<<60, 20), "critical " + code},
	})
}

func TestLocalPorts(t *testing.T) {
	const code = "local-ports-exhausted"
	use := func(change func(s *snapshot.Snapshot, u *snapshot.LocalPortUse)) func(s *snapshot.Snapshot) {
		return also(code, func(s *snapshot.Snapshot) { change(s, &s.LocalPorts[0]) })
	}
	run(t, []row{
		{"none is left", also(code), "critical " + code},
		{"by connections that are open", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { u.TimeWait = 0 }), "critical " + code},
		{"nearly none", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { u.Used, u.TimeWait = 27_500, 27_000 }), "warning " + code},
		{"most of them", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { u.Used, u.TimeWait = 22_600, 0 }), "warning " + code},
		{"of a range that is reserved but for few", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) {
			s.Sysctls["net.ipv4.ip_local_reserved_ports"] = "1024-60000"
			u.Used, u.TimeWait = 999, 0
		}), "critical " + code},
		{"open ones, where those that are over are used again", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) {
			s.Sysctls["net.ipv4.tcp_tw_reuse"] = "1"
			u.TimeWait = 0
		}), "critical " + code},
		{"IPv6", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) {
			u.Source, u.Dest = addr("fd00::1"), snapshot.EndpointOf(netip.MustParseAddrPort("[fd00::2]:80"))
		}), "critical " + code},

		{"many", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { u.Used, u.TimeWait = 22_500, 0 }), ""},
		{"that are over and used again", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { s.Sysctls["net.ipv4.tcp_tw_reuse"] = "1" }), ""},
		{"that are over, on loopback", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) {
			u.Source, u.Dest = addr("127.0.0.1"), snapshot.EndpointOf(netip.MustParseAddrPort("127.0.0.1:80"))
		}), ""},
		{"to two destinations", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) {
			u.Used, u.TimeWait = 15_000, 0
			other := *u
			other.Dest = snapshot.EndpointOf(netip.MustParseAddrPort("172.17.0.3:80"))
			s.LocalPorts = append(s.LocalPorts, other)
		}), ""},
		{"range not known", also(code, func(s *snapshot.Snapshot) { delete(s.Sysctls, "net.ipv4.ip_local_port_range") }), ""},
		{"range absurd", also(code, func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.ip_local_port_range"] = "60000 70000" }), ""},
		{"range turned round", also(code, func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.ip_local_port_range"] = "60000 50000" }), ""},
		{"all reserved", also(code, func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.ip_local_reserved_ports"] = "1-65535" }), ""},
		{"reserved absurd", also(code, func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.ip_local_reserved_ports"] = "9-3" }), ""},
		{"absurd", use(func(s *snapshot.Snapshot, u *snapshot.LocalPortUse) { u.Used, u.TimeWait = 1<<60, 1<<61 }), ""},
	})

	s := gateway()
	examples[code](s)
	f := Judge(s)[0]
	want := []string{"net.ipv4.ip_local_port_range=1024 65535", "net.ipv4.tcp_tw_reuse=1"}
	var got []string
	for _, set := range f.Settings {
		got = append(got, set.Name+"="+set.Value)
	}
	if !slices.Equal(got, want) || !strings.HasSuffix(f.Title, " (docker-proxy)") {
		t.Errorf("%s: settings %q, want %q", f.Title, got, want)
	}
	s.LocalPorts[0].TimeWait = 100
	s.Sysctls["net.ipv4.ip_local_port_range"] = "512 65535"
	s.LocalPorts[0].Used = 65_000
	if f := Judge(s)[0]; len(f.Settings) != 0 {
		t.Errorf("open connections on the whole range: settings %+v", f.Settings)
	}
}

func TestAnsweredFromElsewhere(t *testing.T) {
	const code = "answered-from-elsewhere"
	stray := func(change func(s *snapshot.Snapshot, u *snapshot.StrayUse)) func(s *snapshot.Snapshot) {
		return also(code, func(s *snapshot.Snapshot) { change(s, &s.Conntrack.Table.Strays[0]) })
	}
	run(t, []row{
		{"nobody is answered", also(code), "critical " + code},
		{"others are", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { s.Conntrack.Table.Destinations[1].Unreplied = 20 }), "warning " + code},
		{"not known whether others are", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { s.Conntrack.Table.Destinations = nil }), "warning " + code},
		{"one tunnel", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { u.Flows = 1 }), "advice " + code},
		{"and nobody else answers what was asked behind the gateway", also(code, func(s *snapshot.Snapshot) { // folded under it
			addUnanswered(s, snapshot.UnansweredUse{Protocol: "udp", Source: addr("192.168.1.20"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:1194")),
				Target: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:1194")), SNAT: true, Entries: 40, Recent: 40})
			s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr("198.51.100.1"), Entries: 40, Recent: 40, Unanswered: 40}}
		}), "critical " + code},

		{"from where it was asked", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { u.From = u.Target.Addr() }), ""},
		{"absurd", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { u.Flows = 1 << 60 }), ""},
		{"from nobody", stray(func(s *snapshot.Snapshot, u *snapshot.StrayUse) { u.From = netip.Addr{} }), ""},
	})
}

func TestInterfaceDown(t *testing.T) {
	const code = "link-down"
	run(t, []row{
		{"clients were there a moment ago", also(code), "warning " + code},
		{"no carrier", also(code, func(s *snapshot.Snapshot) { link(s, "eth2").Up, link(s, "eth2").NoCarrier = true, true }), "warning " + code},
		{"long since", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table.Sources = nil }), "advice " + code},

		{"a bridge whose last container has ended", also(code, func(s *snapshot.Snapshot) {
			l := link(s, "eth2")
			l.Up, l.NoCarrier, l.Kind = true, true, "bridge"
		}), ""},
		{"without an address", also(code, func(s *snapshot.Snapshot) { link(s, "eth2").Addresses = prefixes("fe80::1/64") }), ""},
		{"a host that does not forward", also(code, func(s *snapshot.Snapshot) {
			s.Chains, s.Sysctls = nil, map[string]string{"net.ipv4.ip_forward": "0"}
		}), ""},
	})
}

func TestOtherDrops(t *testing.T) {
	at := func(n uint64, function, reason, packet string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			row := drop(n, snapshot.CauseNone, "eth1", sample(packet))
			row.Location, row.Reason = function+"+0x1", reason
			s.Drops.Rows = append(s.Drops.Rows, row)
		}
	}
	const through = "udp 192.168.1.20:4000 -> 203.0.113.80:443"
	run(t, []row{
		{"most of what came in", at(600_000, "sch_handle_ingress", "TC_INGRESS", through), "critical other-drops"},
		{"a good part", at(60_000, "xfrm_policy_check", "XFRM_POLICY", through), "warning other-drops"},
		{"a small part", at(20_000, "somewhere", "NOMEM", through), "advice other-drops"},
		{"an XDP program on a veth", at(600_000, "veth_xdp_rcv_skb", "NOT_SPECIFIED", through), "advice other-drops"},

		{"very little", at(2000, "somewhere", "NOMEM", through), ""},
		{"for this machine", at(600_000, "udp_queue_rcv_one_skb", "SOCKET_FILTER", "udp 192.168.1.20:4000 -> 192.168.1.1:53"), ""},
		{"for all", at(600_000, "udp_v4_early_demux", "NO_SOCKET", "udp 192.168.1.20:67 -> 255.255.255.255:68"), ""},
		{"damaged", at(1<<60, "somewhere", "NOMEM", through), ""},
	})
	s := gateway()
	at(600_000, "__nf_queue", "NOT_SPECIFIED", through)(s)
	if why := Judge(s)[0].Why; !strings.Contains(why, "NFQUEUE") {
		t.Errorf("a queue that nobody reads: %s", why)
	}
}

func TestTTLExceeded(t *testing.T) {
	expired := func(n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["Ip.InHdrErrors"], s.Counters["Ip.ForwDatagrams"] = n, forwarded
			s.Drops.Rows = append(s.Drops.Rows, drop(n, snapshot.CauseTTL, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN")))
		}
	}
	run(t, []row{
		{"all that a slow client sends", expired(30, 0), "warning ttl-exceeded"},
		{"mtr on a quiet gateway", expired(30, 90), ""},
	})
}

func TestLinkDown(t *testing.T) {
	s := gateway()
	examples["no-route"](s)
	s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "wan 2", Index: 9, Addresses: prefixes("10.65.0.2/24")})
	f := Judge(s)[0]
	if f.Code != "no-route" || !strings.HasSuffix(f.Title, ": wan 2 is down") || f.Remedy[1] != "ip link set dev 'wan 2' up" {
		t.Errorf("%s %s: %q", f.Code, f.Title, f.Remedy)
	}
}

// A rule that drops what routers say of packets too big for them is told where the message is
// about a flow here, or dropped before connection tracking could know.
func TestSizeUntold(t *testing.T) {
	rule := func(hook string, priority int, packets *uint64) snapshot.Chain {
		return snapshot.Chain{Backend: "nft", Family: "ip", Table: "guard", Name: hook, Hook: hook, Type: "filter", Priority: priority, Policy: "accept", Rules: 1,
			DropRules: []snapshot.DropRule{{Number: 1, Verdict: "drop", Packets: packets}}}
	}
	const message = "icmp 203.0.113.1 -> 198.51.100.1 type 3 code 4"
	for _, tt := range []struct {
		name   string
		count  uint64
		sample string
		rules  []snapshot.Chain
		want   []string
	}{
		{"before connection tracking", 4, message, []snapshot.Chain{rule("prerouting", -300, nil)}, []string{"mtu-drop"}},
		{"by counters", 4, message, []snapshot.Chain{rule("prerouting", -300, count(4)), rule("input", 0, count(1))}, []string{"mtu-drop"}},
		{"of a flow here", 4, message + " (flow 192.168.1.20:4000 -> 203.0.113.80:443)", []snapshot.Chain{rule("input", 0, nil)}, []string{"mtu-drop"}},
		{"of IPv6", 4, "icmpv6 2001:db8::1 -> 2001:db8:1::2 type 2 code 0 (flow [2001:db8:1::2]:4000 -> [2001:db8:2::2]:443)", nil, []string{"mtu-drop"}},
		{"one or two", 2, message, []snapshot.Chain{rule("prerouting", -300, nil)}, nil},
		{"of no flow, as a scan's", 4, message, []snapshot.Chain{rule("input", 0, nil)}, nil},
		{"of no flow, by counters", 4, message, []snapshot.Chain{rule("prerouting", -300, count(0)), rule("input", 0, count(4))}, nil},
		{"of no flow, either rule", 4, message, []snapshot.Chain{rule("prerouting", -300, nil), rule("input", 0, nil)}, nil},
		{"another message", 4, "icmp 203.0.113.1 -> 198.51.100.1 type 3 code 1", []snapshot.Chain{rule("prerouting", -300, nil)}, nil},
	} {
		s := gateway()
		chain(s, "forward").Policy = "accept"
		s.Chains = append(s.Chains, tt.rules...)
		s.Drops.Rows = append(s.Drops.Rows, drop(tt.count, snapshot.CauseRule, "eth0", sample(tt.sample)))
		if got := codesOf(Judge(s)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: found %q, want %q", tt.name, got, tt.want)
		}
	}
}

// What clients send to everybody on their network is not on its way through.
func TestToEverybody(t *testing.T) {
	const chatter = "udp 192.168.1.20:40000 -> 192.168.1.255:137"
	s := gateway()
	link(s, "eth1").RxPackets = 1000
	row := drop(900, snapshot.CauseNone, "eth1", sample(chatter))
	row.Location, row.Reason = "__udp4_lib_rcv+0xbbf", "NOT_SPECIFIED"
	s.Drops.Rows = append(s.Drops.Rows, row, drop(900, snapshot.CauseRule, "eth1", sample(chatter)))
	if got := codesOf(Judge(s)); len(got) > 0 {
		t.Errorf("found %q", got)
	}
}

// What loses packets comes before what only wastes, however much.
func TestLossBeforeWaste(t *testing.T) {
	s := gateway()
	examples["iptables-two-backends"](s)
	examples["rule-drop"](s)
	link(s, "eth1").RxPackets = 10_000
	s.Drops.Rows[len(s.Drops.Rows)-1].Count = 900
	s.Drops.Rows[len(s.Drops.Rows)-1].Packets[0].Stands = 900
	chain(s, "blocked").DropRules[0].Packets = count(900)
	if got := codesOf(Judge(s)); got[0] != "rule-drop" || !slices.Contains(got, "iptables-two-backends") {
		t.Errorf("found %q", got)
	}
}
