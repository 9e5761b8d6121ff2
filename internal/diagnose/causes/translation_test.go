// SPDX-License-Identifier: Apache-2.0

package causes

// Causes in what is translated, and where to.

import (
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// all makes several changes.
func all(changes ...func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
	return func(s *snapshot.Snapshot) {
		for _, change := range changes {
			change(s)
		}
	}
}

func one(a string) snapshot.AddrRange { return snapshot.AddrRange{First: addr(a), Last: addr(a)} }

func unanswered(protocol, source, dest, target string, entries, recent uint64) snapshot.UnansweredUse {
	return snapshot.UnansweredUse{Protocol: protocol, Source: addr(source), Dest: snapshot.EndpointOf(netip.MustParseAddrPort(dest)), Target: snapshot.EndpointOf(netip.MustParseAddrPort(target)), Entries: entries, Recent: recent}
}

// publish makes a rule of s lead packets for 198.51.100.1 to a target.
func publish(s *snapshot.Snapshot, protocol string, port uint16, target string, targetPort uint16) {
	s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "prerouting", Hook: "prerouting", Type: "nat", Policy: "accept", Rules: 1,
		NATRules: map[string]int{"dnat": 1}, DNATTo: []snapshot.Target{{AddrRange: one(target), Ports: snapshot.PortRange{Min: targetPort, Max: targetPort},
			Protocol: protocol, DestPorts: snapshot.PortRange{Min: port, Max: port}}}})
}

func init() {
	examples["conntrack-invalid-reset"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Stats["invalid"], s.Counters["Tcp.OutRsts"] = 1600, 800
		d := drop(800, snapshot.CauseNone, "eth0", sample("tcp 203.0.113.80:443 -> 198.51.100.1:40112 ACK"))
		d.Reason = "NO_SOCKET"
		s.Drops.Rows = append(s.Drops.Rows, d)
	}
	examples["stale-snat"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr("198.51.100.1"), Entries: 18000, Recent: 900}, {Addr: addr("198.51.100.7"), Entries: 40, Recent: 12}}
	}
	examples["stale-udp-dnat"] = func(s *snapshot.Snapshot) {
		publish(s, "udp", 53, "192.168.1.54", 53)
		s.Conntrack.Table.Unanswered = []snapshot.UnansweredUse{
			unanswered("udp", "203.0.113.9", "198.51.100.1:53", "192.168.1.53:53", 6, 5), unanswered("udp", "203.0.113.10", "198.51.100.1:53", "192.168.1.53:53", 1, 1),
		}
	}
	examples["backend-silent"] = func(s *snapshot.Snapshot) {
		publish(s, "tcp", 443, "192.168.1.80", 8443)
		s.Conntrack.Refused = []snapshot.RefusedUse{{Dest: snapshot.EndpointOf(netip.MustParseAddrPort("198.51.100.1:443")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:8443")), Count: 240}}
	}
	examples["hairpin-missing"] = func(s *snapshot.Snapshot) {
		publish(s, "tcp", 443, "192.168.1.80", 8443)
		s.Conntrack.Table.Unanswered = []snapshot.UnansweredUse{
			unanswered("tcp", "192.168.1.20", "198.51.100.1:443", "192.168.1.80:8443", 9, 4), unanswered("tcp", "192.168.1.21", "198.51.100.1:443", "192.168.1.80:8443", 3, 1),
		}
	}
	examples["bridge-nf-missing"] = func(s *snapshot.Snapshot) {
		s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "cni0", Index: 7, Kind: "bridge", MTU: 1500, Up: true, Addresses: prefixes("10.244.0.1/24"), RxPackets: 5000, TxPackets: 5000})
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "KUBE-SERVICES", Rules: 20})
		s.Sysctls["net.bridge.bridge-nf-call-iptables"] = "0"
		s.Conntrack.Table.Unanswered = []snapshot.UnansweredUse{unanswered("tcp", "10.244.0.9", "10.96.0.10:80", "10.244.0.4:8080", 12, 6)}
	}
	examples["asymmetric-routing"] = func(s *snapshot.Snapshot) {
		t := s.Conntrack.Table
		t.OneWay, t.ByState["SYN_SENT"] = 400, 5000
		s.Conntrack.Stats["invalid"] = 2500
		t.Unanswered = []snapshot.UnansweredUse{unanswered("tcp", "192.168.1.20", "10.50.0.9:5432", "10.50.0.9:5432", 900, 40)}
	}
	examples["established-timeout-short"] = func(s *snapshot.Snapshot) {
		examples["conntrack-invalid-reset"](s)
		s.Conntrack.Stats["invalid"] = 0
		s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_established"] = "600"
	}
}

func TestInvalidReset(t *testing.T) {
	const code = "conntrack-invalid-reset"
	resets := func(n uint64, samples ...string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Stats["invalid"], s.Counters["Tcp.OutRsts"] = 2*n, n
			d := drop(n, snapshot.CauseNone, "eth0")
			d.Reason, d.Samples = "NO_SOCKET", samples
			s.Drops.Rows = append(s.Drops.Rows, d)
		}
	}
	const late = "tcp 203.0.113.80:443 -> 198.51.100.1:40112 ACK"
	run(t, []row{
		{"most of what ends is reset", also(code), "critical " + code},
		{"a fifth of it", resets(200, late), "warning " + code},
		{"with data", resets(800, "tcp 203.0.113.80:443 -> 198.51.100.1:40112 PSH,ACK"), "critical " + code},
		{"no tracer", all(resets(800), func(s *snapshot.Snapshot) { s.Drops = nil }), "warning " + code},
		{"no tracer and no dump, one in a thousand packets", all(resets(4000), func(s *snapshot.Snapshot) { s.Drops, s.Conntrack.Table = nil, nil }), "warning " + code},
		{"late segments of connections that are over", resets(40, late), "advice " + code},
		{"late FINs", resets(800, "tcp 203.0.113.80:443 -> 198.51.100.1:40112 FIN,ACK"), ""},
		{"a scan with odd flags", resets(800, "tcp 203.0.113.66:443 -> 198.51.100.1:1 FIN,PSH,URG"), ""},
		{"a few", resets(9, late), ""},
		{"invalid, and no reset", func(s *snapshot.Snapshot) { s.Conntrack.Stats["invalid"] = 5000 }, ""},
		{"invalid beside published ports", func(s *snapshot.Snapshot) {
			publish(s, "tcp", 80, "192.168.1.80", 80)
			s.Conntrack.Stats["invalid"] = 5000
		}, "advice " + code},
		{"invalid in the ports of a bridge, whose connections are the engine's", func(s *snapshot.Snapshot) {
			publish(s, "tcp", 80, "192.168.1.80", 80)
			s.Conntrack.Stats["invalid"] = 5000
			s.Sysctls["net.bridge.bridge-nf-call-iptables"] = "1"
			s.Engine = &snapshot.Engine{Kind: snapshot.EngineEBPF, Sessions: 40, SessionsMax: 1000}
		}, ""},
		{"a few invalid beside published ports", func(s *snapshot.Snapshot) {
			publish(s, "tcp", 80, "192.168.1.80", 80)
			s.Conntrack.Stats["invalid"] = 50
		}, ""},
		{"a server that translates nothing", also(code, func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), ""},
		{"liberal already", also(code, func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_tcp_be_liberal"] = "1" }), ""},
	})
}

func TestStaleSNAT(t *testing.T) {
	const code = "stale-snat"
	six := func(s *snapshot.Snapshot) {
		link(s, "eth0").Addresses = append(link(s, "eth0").Addresses, prefixes("2001:db8:1::1/64")...)
		s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr("2001:db8:1::1"), Entries: 900, Recent: 90}, {Addr: addr("2001:db8::7"), Entries: 40, Recent: 12}}
	}
	last := func(recent uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Conntrack.Table.Outsides[1].Recent = recent }
	}
	run(t, []row{
		{"flows that go on", also(code), "critical " + code},
		{"one that goes on", also(code, last(1)), "warning " + code},
		{"nothing goes on", also(code, last(0)), "advice " + code},
		{"a pool that is routed here", also(code, func(s *snapshot.Snapshot) {
			s.Chains[0].SNATTo = []snapshot.AddrRange{{First: addr("198.51.100.5"), Last: addr("198.51.100.8")}}
		}), ""},
		{"addresses from a map", also(code, func(s *snapshot.Snapshot) { s.Chains[0].SNATUnknown = true }), ""},
		{"of IPv6", also(code, six), "critical " + code},
		{"of IPv6, a pool that is routed here", also(code, six, func(s *snapshot.Snapshot) {
			s.Chains[0].SNATTo = []snapshot.AddrRange{{First: addr("2001:db8::1"), Last: addr("2001:db8::ff")}}
		}), ""},
		{"of IPv6, IPv4 addresses from a map", also(code, six, func(s *snapshot.Snapshot) {
			s.Chains[0].Family, s.Chains[0].SNATUnknown = "ip", true
		}), "critical " + code},
		{"of IPv6, addresses from a map", also(code, six, func(s *snapshot.Snapshot) {
			s.Chains[0].Family, s.Chains[0].SNATUnknown = "inet", true
		}), ""},
		{"rules not known", also(code, func(s *snapshot.Snapshot) { s.Chains = nil }), ""},
		{"interfaces not known", also(code, func(s *snapshot.Snapshot) { s.Interfaces = nil }), ""},
		{"an address of an interface that is down", also(code, func(s *snapshot.Snapshot) {
			s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "wan2", Addresses: prefixes("198.51.100.7/30")})
		}), "advice link-down"},
	})
}

func TestStaleUDPDNAT(t *testing.T) {
	const code = "stale-udp-dnat"
	only := func(u ...snapshot.UnansweredUse) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Conntrack.Table.Unanswered = u }
	}
	own := unanswered("udp", "203.0.113.9", "198.51.100.1:53", "198.51.100.1:53", 5, 5)
	six := func(s *snapshot.Snapshot) {
		link(s, "eth0").Addresses = append(link(s, "eth0").Addresses, prefixes("2001:db8:1::1/64")...)
		c := &s.Chains[len(s.Chains)-1] // the example's rule
		c.Family, c.DNATTo[0].AddrRange = "ip6", one("fd00::54")
		only(unanswered("udp", "2001:db8:9::9", "[2001:db8:1::1]:53", "[fd00::53]:53", 5, 5))(s)
	}
	noSocket := func(dest string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			d := drop(9, snapshot.CauseNone, "eth0", sample("udp 203.0.113.9:999 -> "+dest))
			d.Reason = "NO_SOCKET"
			s.Drops.Rows = append(s.Drops.Rows, d)
		}
	}
	gone := func(target, dest string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(70, snapshot.CauseNeighbour, "eth1", sample("udp 203.0.113.9:999 -> "+target+" (flow 203.0.113.9:999 -> "+dest+")")))
		}
	}
	run(t, []row{
		{"to a backend that is gone", also(code), "critical " + code},
		{"one flow", also(code, only(unanswered("udp", "203.0.113.9", "198.51.100.1:53", "192.168.1.53:53", 1, 1))), "warning " + code},
		{"the same backend, another port", also(code, only(unanswered("udp", "203.0.113.9", "198.51.100.1:53", "192.168.1.54:5300", 4, 4))), "critical " + code},
		{"from before there was a rule", also(code, only(own), noSocket("198.51.100.1:53")), "critical " + code},
		{"the same by the counter", also(code, only(own), func(s *snapshot.Snapshot) { s.Drops = nil; s.Counters["Udp.NoPorts"] = 9 }), "critical " + code},
		{"a route for the answers is missing", also(code, only(), func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(70, snapshot.CauseNoRoute, "eth0", sample("udp 203.0.113.80:53 -> 192.168.1.20:4000 (flow 192.168.1.20:4000 -> 203.0.113.80:53)")))
		}), "advice no-route"},
		{"answered once, and its neighbour is gone", also(code, only(), gone("192.168.1.53:53", "198.51.100.1:53")), "critical " + code},

		{"the rule's backend is gone", also(code, only(), gone("192.168.1.54:53", "198.51.100.1:53")), "warning next-hop-silent"},
		{"a neighbour that is gone, without translation", also(code, only(), gone("192.168.1.53:53", "192.168.1.53:53")), "advice next-hop-silent"},
		{"the rule's backend is dead", also(code, only(unanswered("udp", "203.0.113.9", "198.51.100.1:53", "192.168.1.54:53", 5, 5))), ""},
		{"nothing sent of late", also(code, only(unanswered("udp", "203.0.113.9", "198.51.100.1:53", "192.168.1.53:53", 5, 0))), ""},
		{"TCP", also(code, only(unanswered("tcp", "203.0.113.9", "198.51.100.1:53", "192.168.1.53:53", 5, 5))), ""},
		{"redirected to here", also(code, only(unanswered("udp", "192.168.1.9", "203.0.113.1:53", "192.168.1.1:5353", 5, 5))), ""},
		{"a resolver here beside the rule for outside", also(code, only(own)), ""},
		{"no rule for that port", also(code, only(unanswered("udp", "203.0.113.9", "198.51.100.1:99", "198.51.100.1:99", 5, 5)), noSocket("198.51.100.1:99")), ""},
		{"targets from a map", also(code, func(s *snapshot.Snapshot) { s.Chains[0].DNATUnknown = true }), ""},
		{"rules not known", also(code, func(s *snapshot.Snapshot) { s.Chains = nil }), ""},
		{"some of the rules not known", also(code, func(s *snapshot.Snapshot) {
			s.Capabilities = []snapshot.Capability{{Name: snapshot.CanIPTablesLegacy}}
		}), ""},
		{"a service of IPVS", also(code, only(unanswered("udp", "203.0.113.9", "10.96.0.10:53", "10.244.0.4:53", 5, 5)), func(s *snapshot.Snapshot) {
			s.Hooks = append(s.Hooks, snapshot.Hook{Family: "ipv4", Hook: "input", Function: "ip_vs_in_hook"})
		}), ""},
		{"a service of kube-proxy's rules", also(code, only(unanswered("udp", "203.0.113.9", "10.96.0.10:53", "10.244.0.4:53", 5, 5))), "critical " + code},
		{"of IPv6", also(code, six), "critical " + code},
		{"of IPv6, beside a rule for IPv4 from a map", also(code, six, func(s *snapshot.Snapshot) { s.Chains[0].Family, s.Chains[0].DNATUnknown = "ip", true }), "critical " + code},
		{"of IPv6, a rule from a map", also(code, six, func(s *snapshot.Snapshot) { s.Chains[0].Family, s.Chains[0].DNATUnknown = "ip6", true }), ""},
		{"of IPv6, the rule's backend is dead", also(code, six, only(unanswered("udp", "2001:db8:9::9", "[2001:db8:1::1]:53", "[fd00::54]:53", 5, 5))), ""},
		{"of IPv6, from before there was a rule", also(code, six, only(unanswered("udp", "2001:db8:9::9", "[2001:db8:1::1]:53", "[2001:db8:1::1]:53", 5, 5)), noSocket("[2001:db8:1::1]:53")), "critical " + code},
		{"of IPv6, a rule for IPv4 is no rule for it", also(code, six, func(s *snapshot.Snapshot) { s.Chains[len(s.Chains)-1].DNATTo[0].AddrRange = one("192.168.1.54") },
			only(unanswered("udp", "2001:db8:9::9", "[2001:db8:1::1]:53", "[2001:db8:1::1]:53", 5, 5)), noSocket("[2001:db8:1::1]:53")), ""},
		{"of IPv6, answered once, and its neighbour is gone", also(code, six, only(), func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(70, snapshot.CauseNeighbour, "eth1", sample("udp [2001:db8:9::9]:999 -> [fd00::53]:53 (flow [2001:db8:9::9]:999 -> [2001:db8:1::1]:53)")))
		}), "critical " + code},
		{"absurd", also(code, only(snapshot.UnansweredUse{Protocol: "udp", Recent: 1 << 60}, snapshot.UnansweredUse{Protocol: "udp", Recent: 5})), ""},
	})
}

func TestHairpin(t *testing.T) {
	const code = "hairpin-missing"
	first := func(change func(u *snapshot.UnansweredUse)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Unanswered = s.Conntrack.Table.Unanswered[:1]
			change(&s.Conntrack.Table.Unanswered[0])
		}
	}
	run(t, []row{
		{"tried now", also(code), "critical " + code},
		{"tried a minute ago", also(code, first(func(u *snapshot.UnansweredUse) { u.Recent = 0 })), "warning " + code},
		{"tried a minute ago, and others get through now", also(code, func(s *snapshot.Snapshot) {
			for i := range s.Conntrack.Table.Unanswered {
				s.Conntrack.Table.Unanswered[i].Recent = 0
			}
			s.Conntrack.Table.Targets = []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(netip.MustParseAddrPort("198.51.100.1:443")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:8443")), Answered: 30}}
		}), ""},
		{"a bridge without containers", also(code, func(s *snapshot.Snapshot) { link(s, "eth1").Kind = "bridge" }), "critical " + code},
		{"source translated", also(code, first(func(u *snapshot.UnansweredUse) { u.SNAT = true })), ""},
		{"not translated at all", also(code, first(func(u *snapshot.UnansweredUse) { u.Dest = u.Target })), ""},
		{"from elsewhere to a dead server", also(code, first(func(u *snapshot.UnansweredUse) { u.Source = addr("203.0.113.4") })), ""},
		{"one being opened", also(code, first(func(u *snapshot.UnansweredUse) { u.Entries, u.Recent = 1, 1 })), ""},
		{"syslog to the outside address", also(code, first(func(u *snapshot.UnansweredUse) { u.Protocol = "udp"; u.Recent = 0 })), ""},
		{"absurd", also(code, first(func(u *snapshot.UnansweredUse) { u.Entries, u.Recent = 1<<60, 1<<61 })), ""},
	})
	outsideOnly := func(n uint64, asked string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			publish(s, "tcp", 443, "192.168.1.80", 8443)
			dest := netip.MustParseAddrPort(asked)
			s.Conntrack.Refused = []snapshot.RefusedUse{{Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(dest), Count: n}}
			d := drop(n, snapshot.CauseNone, "eth1", sample("tcp 192.168.1.20:4000 -> "+asked+" SYN"))
			d.Reason = "NO_SOCKET"
			s.Drops.Rows = append(s.Drops.Rows, d)
		}
	}
	run(t, []row{
		{"published for what comes in from outside", outsideOnly(12, "198.51.100.1:443"), "warning " + code},
		{"tried by hand", outsideOnly(4, "198.51.100.1:443"), ""},
		{"a port that nobody publishes", outsideOnly(12, "198.51.100.1:22"), ""},
		{"the address of their own network", outsideOnly(12, "192.168.1.1:443"), ""},
		{"asked by strangers", func(s *snapshot.Snapshot) {
			outsideOnly(12, "198.51.100.1:443")(s)
			s.Drops.Rows[len(s.Drops.Rows)-1].Samples = []string{"tcp 203.0.113.9:4000 -> 198.51.100.1:443 SYN"}
		}, ""},
		{"published for all, and refused by the backend", func(s *snapshot.Snapshot) {
			outsideOnly(12, "198.51.100.1:443")(s)
			s.Conntrack.Refused[0].Target = snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:8443"))
		}, "critical backend-silent"},
	})
	within := gateway()
	outsideOnly(12, "198.51.100.1:443")(within)
	for _, want := range []string{
		`nft 'add rule ip nat prerouting iifname "eth1" ip daddr 198.51.100.1 tcp dport 443 dnat ip to 192.168.1.80:8443'`,
		"ip saddr 192.168.1.0/24 ip daddr 192.168.1.80 tcp dport 8443 masquerade",
	} {
		if got := strings.Join(Judge(within)[0].Remedy, "\n"); !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	s := gateway()
	examples[code](s)
	s.Chains[0].Name = "POSTROUTING"
	want := "iptables-nft -t nat -I POSTROUTING -s 192.168.1.0/24 -d 192.168.1.80 -p tcp --dport 8443 -j MASQUERADE"
	if got := strings.Join(Judge(s)[0].Remedy, "\n"); !strings.Contains(got, want) {
		t.Errorf("no %q in\n%s", want, got)
	}
}

func TestLeaving(t *testing.T) {
	const code = "answers-lost"
	seen := func(inside, others, back uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Leaving = []snapshot.Leaving{{Interface: "eth0", Inside: inside, Others: others, Back: back, Samples: []string{"udp 192.168.1.20:5353 -> 203.0.113.53:53"}}}
		}
	}
	noRules := func(s *snapshot.Snapshot) { chain(s, "postrouting").NATRules = nil }
	six := func(s *snapshot.Snapshot) {
		s.Leaving[0].Family, s.Leaving[0].Samples = "ipv6", []string{"udp [fd00::2]:4000 -> [2001:db8::53]:53"}
	}
	once := func(s *snapshot.Snapshot) {
		s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr("198.51.100.1"), Entries: 900}}
	}
	change := func(all ...func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			for _, f := range all {
				f(s)
			}
		}
	}
	run(t, []row{
		{"a tenth is not tracked", change(seen(20, 180, 0)), "warning " + code},
		{"half is not tracked", change(seen(100, 100, 0)), "critical " + code},
		{"some invalid segments", change(seen(4, 20, 0)), ""},
		{"some invalid segments of many packets", change(seen(9, 290, 0)), ""},
		{"routed elsewhere, and answered", change(seen(100, 100, 60)), ""},
		{"half of IPv6", change(seen(100, 100, 0), six, noRules), "critical " + code},
		{"a tenth of IPv6", change(seen(20, 180, 0), six), "warning " + code},
		{"IPv6 beside IPv4, all of which is translated", change(seen(20, 30, 0), six, func(s *snapshot.Snapshot) {
			s.Leaving = append(s.Leaving, snapshot.Leaving{Interface: "eth0", Others: 900})
		}), "critical " + code},
		{"IPv6 that the next router translates", change(seen(100, 100, 60), six), ""},
		{"a few packets of IPv6", change(seen(4, 0, 0), six), ""},
		{"IPv6 that a bridge takes to another router", change(seen(100, 0, 0), six, func(s *snapshot.Snapshot) {
			s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "br0", Kind: "bridge", Up: true})
			link(s, "eth0").Master = "br0"
		}), ""},
		{"absurd IPv6", change(seen(1<<60, 1<<61, 0), six), ""},
		{"of no family that is known", change(seen(100, 100, 0), func(s *snapshot.Snapshot) { s.Leaving[0].Family = "ipx" }), ""},
		{"the rules are gone", change(seen(100, 10, 0), noRules, once), "critical " + code},
		{"rules for IPv6 only", change(seen(100, 10, 0), func(s *snapshot.Snapshot) { chain(s, "postrouting").Family = "ip6" }), ""},
		{"never any rules: a router behind another one", change(seen(100, 10, 0), noRules), ""},
		{"bridged, not routed", change(seen(100, 10, 0), func(s *snapshot.Snapshot) { link(s, "eth0").Addresses = nil }), ""},
		{"absurd", change(seen(1<<60, 1<<61, 0)), ""},
	})
}

func TestNothingBack(t *testing.T) {
	const code = "answers-lost"
	silent := func(destinations int, recent, unanswered uint64, protocol string, port uint16) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Outsides = []snapshot.OutsideUse{{Addr: addr("198.51.100.1"), Entries: 9000, Recent: recent, Unanswered: unanswered}}
			for i := range destinations {
				to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}), port)
				addUnanswered(s, snapshot.UnansweredUse{Protocol: protocol, Source: addr("192.168.1.20"), SNAT: true, Dest: snapshot.EndpointOf(to), Target: snapshot.EndpointOf(to), Entries: 30, Recent: 15})
			}
		}
	}
	run(t, []row{
		{"nothing is answered", silent(8, 130, 120, "tcp", 443), "critical " + code},
		{"DNS", silent(3, 45, 45, "udp", 53), "critical " + code},
		{"syslog", silent(3, 45, 45, "udp", 514), ""},
		{"the only two servers that are asked", silent(2, 30, 30, "tcp", 443), "warning " + code},
		{"two servers are down", silent(2, 31, 30, "tcp", 443), ""},
		{"a scan beside traffic", silent(20, 900, 300, "tcp", 443), ""},
		{"few flows", silent(1, 15, 15, "tcp", 443), ""},
		{"a queue here drops them", func(s *snapshot.Snapshot) {
			silent(8, 130, 120, "tcp", 443)(s)
			s.Drops.Rows = append(s.Drops.Rows, drop(400, snapshot.CauseNone, "eth0"))
		}, ""},
		{"absurd", silent(8, 1<<60, 1<<61, "tcp", 443), ""},
	})
}

// Where packets arrive that match no entry, it is not said that no reply arrives.
func TestBackendBesideInvalid(t *testing.T) {
	s := gateway()
	examples["backend-silent"](s)
	s.Conntrack.Refused = nil
	s.Conntrack.Table.Targets = []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(netip.MustParseAddrPort("198.51.100.1:443")), Target: snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.80:8443")), Unanswered: 60}}
	if found := Judge(s)[0]; !strings.Contains(found.Title, "no SYN-ACK arrives here") {
		t.Errorf("%s: %s", found.Code, found.Title)
	}
	s.Conntrack.Stats["invalid"] = 80
	found := Judge(s)[0]
	if text := found.Title + found.Why; found.Code != "backend-silent" || strings.Contains(text, "nothing comes back") || strings.Contains(text, "no SYN-ACK arrives") || !strings.Contains(text, "80 invalid or unmatched") {
		t.Errorf("%s: %s\n%s", found.Code, found.Title, found.Why)
	}
}

func TestBackend(t *testing.T) {
	const code = "backend-silent"
	dest, target := netip.MustParseAddrPort("198.51.100.1:443"), netip.MustParseAddrPort("192.168.1.80:8443")
	refused := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Conntrack.Refused[0].Count = n }
	}
	seen := func(answered, unanswered uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Targets = append(s.Conntrack.Table.Targets, snapshot.TargetUse{Protocol: "tcp", Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(target), Answered: answered, Unanswered: unanswered})
		}
	}
	silent := func(s *snapshot.Snapshot) { s.Conntrack.Refused = nil }
	run(t, []row{
		{"all refused", also(code), "critical " + code},
		{"a quarter refused", also(code, seen(720, 0)), "warning " + code},
		{"a few of many refused", also(code, seen(5000, 0)), ""},
		{"nine refused", also(code, refused(9)), "advice backend-silent"},
		{"no answer", also(code, silent, seen(0, 60)), "critical " + code},
		{"some are just being opened", also(code, silent, seen(900, 40)), ""},
		{"the table is not known", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table = nil }), "critical " + code},
		{"connection tracking is not known", also(code, func(s *snapshot.Snapshot) { s.Conntrack = nil }), ""},
		{"no translation: a scan", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Refused[0].Target = snapshot.EndpointOf(dest) }), ""},
		{"DNS", also(code, silent, seen(0, 60), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Targets[0].Protocol, s.Conntrack.Table.Targets[0].Target = "udp", snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.53:53"))
		}), "critical " + code},
		{"DNS, some of it answered", also(code, silent, seen(40, 60), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Targets[0].Protocol, s.Conntrack.Table.Targets[0].Target = "udp", snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.53:53"))
		}), "warning " + code},
		{"syslog, which nobody answers", also(code, silent, seen(0, 60), func(s *snapshot.Snapshot) { s.Conntrack.Table.Targets[0].Protocol = "udp" }), ""},
		{"refused, beside one packet that was dropped", also(code, func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(1, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.80:8443 ACK (flow 203.0.113.9:4000 -> 198.51.100.1:443)")))
		}), "critical " + code},
		{"a rule here drops what goes there", also(code, silent, seen(0, 60), func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(80, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.80:8443 SYN (flow 203.0.113.9:4000 -> 198.51.100.1:443)")))
		}), "advice rule-drop"},
		{"refused by this machine itself", also(code, func(s *snapshot.Snapshot) {
			s.Conntrack.Refused[0].Target = snapshot.EndpointOf(netip.MustParseAddrPort("192.168.1.1:3128"))
			d := drop(240, snapshot.CauseNone, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.1:3128 SYN"))
			d.Reason = "NO_SOCKET"
			s.Drops.Rows = append(s.Drops.Rows, d)
		}), "critical " + code},
		{"one packet to it was dropped", also(code, silent, seen(0, 60), func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(1, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.80:8443 SYN (flow 203.0.113.9:4000 -> 198.51.100.1:443)")))
		}), "critical " + code},
		{"absurd", also(code, refused(1<<60), seen(1<<60, 1<<61)), ""},
	})

	down := gateway()
	examples[code](down)
	down.Interfaces = append(down.Interfaces, snapshot.Interface{Name: "br 0", Addresses: prefixes("192.168.9.1/24")})
	down.Conntrack.Refused[0].Target = snapshot.EndpointOf(netip.MustParseAddrPort("192.168.9.80:8443"))
	if f := Judge(down)[0]; !strings.HasSuffix(f.Title, ": br 0 is down") || f.Remedy[1] != "ip link set dev 'br 0' up" {
		t.Errorf("the interface is down: %s, %q", f.Title, f.Remedy)
	}
	// Where all namespaces are watched, the backend's own is asked.
	s := gateway()
	examples[code](s)
	elsewhere := drop(240, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.80:8443 SYN"))
	elsewhere.Netns, elsewhere.Namespace = 4026539999, "pid:77"
	s.Drops.Elsewhere = []snapshot.Drop{drop(240, snapshot.CauseRule, "eth0", sample("tcp 203.0.113.9:4000 -> 192.168.1.81:8443 SYN")), elsewhere}
	f := Judge(s)[0]
	if f.Code != code || !strings.HasSuffix(f.Title, "are dropped in pid:77") || !strings.Contains(strings.Join(f.Remedy, "\n"), "nsenter -t 77 -n nft -a list ruleset") {
		t.Errorf("dropped in the backend's namespace: %s, %q", f.Title, f.Remedy)
	}
	s.Drops.Elsewhere[1].Container = "docker web1"
	if f := Judge(s)[0]; !strings.HasSuffix(f.Title, "are dropped in docker web1") {
		t.Errorf("dropped in a container: %s", f.Title)
	}
	s.Drops.Elsewhere[1].Count = 3
	if f := Judge(s)[0]; strings.Contains(f.Title, "dropped") {
		t.Errorf("a few were dropped there: %s", f.Title)
	}
	// Of two backends of one service each is judged by itself.
	s = gateway()
	examples[code](s)
	other := netip.MustParseAddrPort("192.168.1.81:8443")
	s.Conntrack.Table.Targets = []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(other), Answered: 5000}}
	if got := Judge(s); len(got) != 1 || got[0].Severity != Critical || !strings.Contains(got[0].Title, target.String()+", the backend of "+dest.String()) {
		t.Errorf("beside a backend that works: %+v", got)
	}
}

func TestBridgeNF(t *testing.T) {
	const code, key = "bridge-nf-missing", "net.bridge.bridge-nf-call-iptables"
	run(t, []row{
		{"off", also(code), "critical " + code},
		{"not loaded", also(code, func(s *snapshot.Snapshot) { delete(s.Sysctls, key) }), "critical " + code},
		{"on, and the backend is dead", also(code, func(s *snapshot.Snapshot) { s.Sysctls[key] = "1" }), ""},
		{"off, and all is answered", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table.Unanswered = nil }), ""},
		{"settings not known", also(code, func(s *snapshot.Snapshot) { s.Sysctls = nil }), ""},
	})
}

func TestAsymmetric(t *testing.T) {
	const code = "asymmetric-routing"
	run(t, []row{
		{"half of the flows", also(code), "warning " + code},
		{"dropped by a rule", also(code, func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(300, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 10.50.0.9:5432 ACK")))
		}), "critical " + code},
		{"nothing is translated or refused", also(code, func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), "advice " + code},
		{"taken up in the middle alone", also(code, func(s *snapshot.Snapshot) {
			s.Conntrack.Table.OneWay, s.Conntrack.Stats["invalid"] = 2000, 0
		}), "warning " + code},
		{"a few dead hosts, and late packets over an hour", func(s *snapshot.Snapshot) {
			s.WindowSeconds = 3600
			s.Conntrack.Table.ByProtocol["tcp"], s.Conntrack.Table.ByState["SYN_SENT"], s.Conntrack.Stats["invalid"] = 150, 40, 500
		}, ""},
		{"a scan", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table.OneWay, s.Conntrack.Stats["invalid"] = 0, 3 }), ""},
		{"a few after a restart", func(s *snapshot.Snapshot) { s.Conntrack.Table.OneWay = 40 }, ""},
		{"more than entries", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table.OneWay = 1 << 50 }), ""},
	})
}

func TestEstablishedTimeoutShort(t *testing.T) {
	const code, name = "established-timeout-short", "net.netfilter.nf_conntrack_tcp_timeout_established"
	run(t, []row{
		{"resets", also(code), "critical " + code},
		{"resets, and FINs that follow are invalid", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Stats["invalid"] = 1600 }), "critical " + code},
		{"a few resets", also(code, func(s *snapshot.Snapshot) { s.Drops.Rows[2].Count = 5 }), "warning " + code},
		{"the setting alone", func(s *snapshot.Snapshot) { s.Sysctls[name] = "600" }, "advice " + code},
		{"resets of a scan", also(code, func(s *snapshot.Snapshot) {
			s.Drops.Rows[2].Samples = []string{"tcp 203.0.113.80:443 -> 198.51.100.1:22 SYN"}
		}), "advice " + code},
		{"what is forgotten, rules drop", func(s *snapshot.Snapshot) {
			s.Sysctls[name] = "600"
			s.Drops.Rows = append(s.Drops.Rows, drop(600_000, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 PSH,ACK")))
		}, "critical " + code},
		{"rules drop what they know", func(s *snapshot.Snapshot) {
			s.Sysctls[name] = "600"
			s.Drops.Rows = append(s.Drops.Rows, drop(600_000, snapshot.CauseRule, "eth1", sample("tcp 198.51.100.1:4000 -> 203.0.113.80:443 PSH,ACK (flow 192.168.1.20:4000 -> 203.0.113.80:443)")))
		}, "warning rule-drop"},
		{"as long as RFC 5382 asks", also(code, func(s *snapshot.Snapshot) { s.Sysctls[name] = "7440" }), ""},
		{"a host that translates nothing", also(code, func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), ""},
	})

	late := func(timeout string, n uint64, packet string) func(*snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Sysctls["net.netfilter.nf_conntrack_udp_timeout"] = timeout
			u := unanswered("udp", "192.168.1.20", "203.0.113.80:5060", "203.0.113.80:5060", 40, 0)
			u.SNAT = true
			s.Conntrack.Table.Unanswered = append(s.Conntrack.Table.Unanswered, u)
			d := drop(n, snapshot.CauseNone, "eth0", sample(packet))
			d.Reason = "NO_SOCKET"
			s.Drops.Rows = append(s.Drops.Rows, d)
		}
	}
	const answer = "udp 203.0.113.80:5060 -> 198.51.100.1:40000"
	run(t, []row{
		{"late answers of UDP", late("2", 80, answer), "critical " + code},
		{"a few", late("2", 5, answer), "warning " + code},
		{"one", late("2", 1, answer), ""},
		{"a scan", late("2", 80, "udp 203.0.113.99:5060 -> 198.51.100.1:40000"), ""},
		{"the kernel's own time-out", late("30", 80, answer), ""},
	})
}
