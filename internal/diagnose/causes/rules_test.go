// SPDX-License-Identifier: Apache-2.0

package causes

// Causes in races for a tuple, in rules, helpers and listeners.

import (
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["conntrack-no-memory"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Stats["drop"] = 40
		s.KernelLog.NoMemory, s.KernelLog.Lines = 3, []string{"ksoftirqd/1: page allocation failure: order:0, mode:0x820(GFP_ATOMIC)"}
		s.Host.AvailableBytes = 30 << 20
	}
	examples["snat-port-race"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 60, 60
		s.Drops.Rows = append(s.Drops.Rows, drop(60, snapshot.CauseConfirm, "eth1", sample("tcp 198.51.100.1:40112 -> 203.0.113.80:443 SYN (flow 192.168.1.20:40112 -> 203.0.113.80:443)")))
	}
	examples["dns-race"] = func(s *snapshot.Snapshot) {
		s.Host.Kernel = "4.15.0"
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 200, 200
		s.Drops.Rows = append(s.Drops.Rows, drop(200, snapshot.CauseConfirm, "eth1", sample("udp 10.244.0.9:40112 -> 10.244.0.4:53 (flow 10.244.0.9:40112 -> 10.96.0.10:53)")))
	}
	examples["event-listener-lag"] = func(s *snapshot.Snapshot) {
		s.EventSockets = []snapshot.EventSocket{{PortID: 4711, QueueBytes: 212992, Drops: 5000, Inode: 9, Process: "conntrackd"}, {PortID: 4712, Inode: 10}}
		s.Sysctls["net.netfilter.nf_conntrack_events"] = "2"
	}
	examples["conntrack-limit-in-container"] = func(s *snapshot.Snapshot) {
		s.Netns.Init = false
		s.Owners = append(s.Owners, snapshot.Owner{Setting: "net.netfilter.nf_conntrack_max", Value: "1048576", Who: "sysctl.d", Where: "/etc/sysctl.d/99-nat.conf:3"})
	}
	examples["iptables-two-backends"] = func(s *snapshot.Snapshot) {
		s.Chains = append(s.Chains,
			snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", Priority: 100, Policy: "accept", Rules: 2, NATRules: map[string]int{"masquerade": 2}})
	}
	examples["rule-chain-long"] = func(s *snapshot.Snapshot) {
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "firewall", Name: "forward-blocked", Rules: 5000})
	}
	examples["conntrack-helper"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Table.ByHelper = map[string]uint64{"sip": 40, "ftp": 3}
		s.Conntrack.Stats["expect_new"] = 12
	}
}

func TestNoMemory(t *testing.T) {
	const code = "conntrack-no-memory"
	run(t, []row{
		{"logged", also(code), "critical " + code},
		{"little memory, not logged", also(code, func(s *snapshot.Snapshot) { s.KernelLog = nil }), "warning " + code},
		{"memory to spare, not logged", also(code, func(s *snapshot.Snapshot) { s.KernelLog = nil; s.Host.AvailableBytes = 4 << 30 }), ""},
		{"nothing refused", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Stats["drop"] = 0 }), ""},
		{"full as well", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Count = 262144 }), "critical conntrack-table-full"},
	})
}

func TestPortRace(t *testing.T) {
	const code = "snat-port-race"
	failed := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = n, n
			s.Drops.Rows = s.Drops.Rows[:2]
		}
	}
	run(t, []row{
		{"a few a second", also(code), "warning " + code},
		{"many a second", also(code, failed(300)), "critical " + code},
		{"now and then", also(code, failed(4)), ""},
		{"many in an hour", also(code, failed(300), func(s *snapshot.Snapshot) { s.WindowSeconds = 3600 }), ""},
		{"no tracer", also(code, func(s *snapshot.Snapshot) { s.Drops = nil }), "warning " + code},
		{"no translation", also(code, func(s *snapshot.Snapshot) { s.Chains = s.Chains[1:] }), ""},
		{"no port left", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Table.SNATPorts[0].Used = 64000 }), "critical snat-ports-exhausted"},
	})
}

func TestDNSRace(t *testing.T) {
	const code = "dns-race"
	untraced := func(s *snapshot.Snapshot) {
		s.Drops = nil
		s.Chains = s.Chains[1:]
		s.Conntrack.Table.DestPorts = []snapshot.PortUse{{Protocol: "tcp", Port: 443, Entries: 9000}, {Protocol: "udp", Port: 53, Entries: 2500}}
	}
	run(t, []row{
		{"traced", also(code), "critical " + code},
		{"by what the table holds", also(code, untraced), "critical " + code},
		{"by what the table holds, with translated sources", also(code, func(s *snapshot.Snapshot) { c := s.Chains; untraced(s); s.Chains = c }), "critical snat-port-race"},
		{"other UDP", also(code, func(s *snapshot.Snapshot) { s.Drops.Rows[2].Samples = []string{"udp 10.0.0.9:4000 -> 10.0.0.4:4789"} }), "critical snat-port-race"},
		{"resolved", func(s *snapshot.Snapshot) { s.Conntrack.Stats["clash_resolve"] = 8000 }, ""},
	})
}

func TestEventListener(t *testing.T) {
	const code = "event-listener-lag"
	run(t, []row{
		{"far behind", also(code), "warning " + code},
		{"a burst", also(code, func(s *snapshot.Snapshot) { s.EventSockets[0].Drops = 3 }), "advice " + code},
		{"keeps up", also(code, func(s *snapshot.Snapshot) { s.EventSockets[0].Drops = 0 }), ""},
		{"counter that went backwards", also(code, func(s *snapshot.Snapshot) { s.EventSockets[0].Drops = ^uint64(0) - 3 }), ""},
	})
}

func TestLimitInContainer(t *testing.T) {
	const code = "conntrack-limit-in-container"
	run(t, []row{
		{"in a table with room", also(code), "advice " + code},
		{"in a table that fills", also(code, func(s *snapshot.Snapshot) { fill(s, 210000) }), "warning " + code},
		{"on the host", also(code, func(s *snapshot.Snapshot) { s.Netns.Init = true }), ""},
		{"a namespace seen from the host", also(code, func(s *snapshot.Snapshot) { s.Netns.Name = "gw" }), ""},
		{"in force", also(code, func(s *snapshot.Snapshot) { s.Conntrack.Max = 1048576 }), ""},
		{"not a number", also(code, func(s *snapshot.Snapshot) { s.Owners[0].Value = "lots" }), ""},
	})
}

func TestTwoBackends(t *testing.T) {
	const code = "iptables-two-backends"
	legacy := func(c snapshot.Chain) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			c.Backend, c.Family, c.Table = "iptables-legacy", "ip", "filter"
			s.Chains = append(s.Chains, c)
		}
	}
	run(t, []row{
		{"both translate", also(code), "advice " + code},
		{"what one accepts the other drops", all(
			legacy(snapshot.Chain{Name: "INPUT", Hook: "input", Type: "filter", Policy: "drop", PolicyPackets: new(uint64(400))}),
			func(s *snapshot.Snapshot) {
				s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "inet", Table: "f", Name: "in", Hook: "input", Type: "filter", Policy: "accept", Rules: 9})
			}), "advice " + code},
		{"empty legacy tables", legacy(snapshot.Chain{Name: "FORWARD", Hook: "forward", Type: "filter", Policy: "accept"}), "advice needless-hooks"},
		{"on different hooks", legacy(snapshot.Chain{Name: "INPUT", Hook: "input", Type: "filter", Policy: "accept", Rules: 5}), "advice needless-hooks"},
		{"nftables beside iptables-nft", func(s *snapshot.Snapshot) {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "POSTROUTING", Hook: "postrouting", Type: "nat", Policy: "accept", Rules: 3})
		}, ""},
	})
}

func TestRuleChain(t *testing.T) {
	const code = "rule-chain-long"
	run(t, []row{
		{"five thousand", also(code), "advice " + code},
		{"on a quiet machine", also(code, func(s *snapshot.Snapshot) { link(s, "eth0").RxPackets, link(s, "eth1").RxPackets = 300, 300 }), ""},
		{"five thousand in five hundred chains", func(s *snapshot.Snapshot) {
			for range 500 {
				s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "KUBE-SVC", Rules: 10})
			}
		}, ""},
	})
}

func TestHelper(t *testing.T) {
	const code = "conntrack-helper"
	run(t, []row{
		{"at work", also(code), "advice " + code},
		{"drops", also(code, func(s *snapshot.Snapshot) {
			s.KernelLog.HelperDrops, s.KernelLog.Lines = 20, []string{"nf_ct_sip: dropping packet: cannot mangle packet"}
		}), "warning " + code},
		{"drops one packet of a scanner", also(code, func(s *snapshot.Snapshot) { s.KernelLog.HelperDrops = 1 }), "advice " + code},
		{"by port, on an old kernel", func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_helper"] = "1" }, "advice " + code},
		{"given to nobody", func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_helper"] = "0" }, ""},
	})
}

// A rule that sets the TTL is named where it may have met the packets that expired, and no other.
func TestTTLRule(t *testing.T) {
	rule := func(packets *uint64, matches ...snapshot.Match) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["ttl-exceeded"](s)
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "f", Name: "pre", Hook: "prerouting", Type: "filter", Priority: -150, Policy: "accept", Rules: 1,
				Walk: []snapshot.Rule{{Number: 1, Text: "ip ttl set 1", Sets: []string{"ttl"}, Packets: packets, Matches: matches}}})
		}
	}
	from := func(address string) snapshot.Match {
		return snapshot.Match{Keys: []string{"ip saddr"}, Values: []string{address}}
	}
	run(t, []row{
		{"without a condition", rule(nil), "warning rule-drop"},
		{"about them", rule(nil, from("192.168.1.0/24")), "warning rule-drop"},
		{"that counted", rule(count(500)), "warning rule-drop"},
		{"about others", rule(nil, from("10.0.0.0/8")), "warning ttl-exceeded"},
		{"that met nobody", rule(count(0)), "warning ttl-exceeded"},
	})
}
