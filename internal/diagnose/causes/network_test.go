// SPDX-License-Identifier: Apache-2.0

package causes

// Causes on the way of a packet through routing, queues and reassembly.

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["no-route"] = func(s *snapshot.Snapshot) {
		s.Counters["IpExt.InNoRoutes"], s.Counters["Ip.ForwDatagrams"] = 400, 2000
		s.Drops.Rows = append(s.Drops.Rows, drop(400, snapshot.CauseNoRoute, "eth1", sample("tcp 192.168.1.20:4000 -> 10.65.0.1:443 SYN")))
		s.Routes = []snapshot.RouteAnswer{{In: "eth1", Source: addr("192.168.1.20"), Dest: addr("10.65.0.1"), Answer: snapshot.RouteNone}}
	}
	examples["routing-loop"] = func(s *snapshot.Snapshot) {
		s.Counters["Ip.InHdrErrors"], s.Counters["Ip.ForwDatagrams"] = 500, 17000
		s.Drops.Rows = append(s.Drops.Rows, drop(500, snapshot.CauseTTL, "eth0", sample("udp 192.168.1.20:4000 -> 10.71.0.1:53")))
		s.Routes = []snapshot.RouteAnswer{{In: "eth0", Source: addr("192.168.1.20"), Dest: addr("10.71.0.1"), Answer: snapshot.RouteFound, Out: "eth0", Via: addr("198.51.100.254")}}
	}
	examples["ttl-exceeded"] = func(s *snapshot.Snapshot) {
		s.Counters["Ip.InHdrErrors"], s.Counters["Ip.ForwDatagrams"] = 500, 17000
		s.Drops.Rows = append(s.Drops.Rows, drop(500, snapshot.CauseTTL, "eth1", sample("udp 192.168.1.20:4000 -> 203.0.113.80:443")))
		s.Routes = []snapshot.RouteAnswer{{In: "eth1", Source: addr("192.168.1.20"), Dest: addr("203.0.113.80"), Answer: snapshot.RouteFound, Out: "eth0", Via: addr("198.51.100.254")}}
		s.Frames = &snapshot.Frames{}
	}
	examples["martian-drop"] = func(s *snapshot.Snapshot) {
		s.Sysctls["net.ipv4.conf.eth1.route_localnet"], s.Sysctls["net.ipv4.conf.all.route_localnet"] = "0", "0"
		row := drop(60, snapshot.CauseMartian, "eth1", sample("tcp 192.168.1.20:4000 -> 127.0.0.1:80 SYN (flow 192.168.1.20:4000 -> 192.168.1.1:8080)"))
		row.Reason = "IP_LOCALNET"
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
	examples["fragments-lost"] = func(s *snapshot.Snapshot) {
		s.Sysctls["net.ipv4.ipfrag_high_thresh"] = "4194304"
		s.Counters["Ip.ReasmFails"], s.Counters["Ip.ReasmTimeout"], s.Counters["Ip.ReasmOKs"] = 900, 40, 3000
		s.Drops.Rows = append(s.Drops.Rows, drop(40, snapshot.CauseFragment, "eth1", sample("udp 192.168.1.20:4000 -> 203.0.113.80:4500")))
	}
	examples["checksum-errors"] = func(s *snapshot.Snapshot) {
		s.Counters["Udp.InCsumErrors"], s.Counters["Tcp.InCsumErrors"], s.Counters["Ip.InReceives"] = 300, 20, 20000
		s.Drops.Rows = append(s.Drops.Rows, drop(320, snapshot.CauseChecksum, "eth0", sample("udp 203.0.113.80:53 -> 198.51.100.1:4000")))
	}
	examples["qdisc-drop"] = func(s *snapshot.Snapshot) {
		link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: "tbf", Packets: 9000, Dropped: 3000, Overlimits: 9000, LimitBytes: 65536, RateBytes: 1_250_000, BurstBytes: 4096}
		s.Drops.Rows = append(s.Drops.Rows, drop(3000, snapshot.CauseQueue, "eth0", sample("tcp 198.51.100.1:4000 -> 203.0.113.80:443 ACK")))
	}
	examples["neighbour-table-full"] = func(s *snapshot.Snapshot) {
		s.Neighbours = []snapshot.Neighbours{
			{Family: "ipv4", Entries: 1024, Here: 900, Busiest: "eth1", Thresh2: 512, Thresh3: 1024, TableFulls: 70, ForcedRuns: 75},
			{Family: "ipv6", Entries: 12, Here: 3, Thresh2: 512, Thresh3: 1024},
		}
	}
}

func TestNoRoute(t *testing.T) {
	lost := func(n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["no-route"](s)
			s.Counters["IpExt.InNoRoutes"], s.Counters["Ip.ForwDatagrams"] = n, forwarded
			s.Drops.Rows[2].Count = n
		}
	}
	refused := func(kind snapshot.RouteKind, n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			lost(n, forwarded)(s)
			s.Counters["IpExt.InNoRoutes"] = 0
			s.Routes[0].Answer, s.Routes[0].Match, s.Routes[0].Table = kind, netip.MustParsePrefix("10.64.0.0/15"), 254
		}
	}
	const full, warn, advice = "critical no-route", "warning no-route", "advice no-route"
	run(t, []row{
		{"a sixth of all", lost(400, 2000), full},
		{"everything", lost(30, 0), full},
		{"a small part", lost(400, 20000), warn},
		{"many beside far more", lost(400, 2_000_000), advice},
		{"a small part, while a rule drops nearly all of the rest", func(s *snapshot.Snapshot) {
			lost(45, 3421)(s)
			s.Drops.Rows = append(s.Drops.Rows, drop(3400, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN")))
		}, advice},
		{"a rule drops some of the rest", func(s *snapshot.Snapshot) {
			lost(45, 3421)(s)
			s.Drops.Rows = append(s.Drops.Rows, drop(300, snapshot.CauseRule, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN")))
		}, warn},
		{"forwarded not known", func(s *snapshot.Snapshot) { lost(4, 0)(s); delete(s.Counters, "Ip.ForwDatagrams") }, warn},
		{"counters only", func(s *snapshot.Snapshot) { lost(400, 2000)(s); s.Drops, s.Routes = nil, nil }, full},
		{"tracer only", func(s *snapshot.Snapshot) { lost(400, 2000)(s); s.Counters = nil }, warn},
		{"unreachable on purpose, most of all", refused(snapshot.RouteUnreachable, 400, 2000), warn},
		{"blackhole on purpose, a part", refused(snapshot.RouteBlackhole, 400, 20000), advice},
		{"blackhole for the answers to connections that were let out", func(s *snapshot.Snapshot) {
			refused(snapshot.RouteBlackhole, 400, 20000)(s)
			s.Routes[0].Source, s.Routes[0].Dest = addr("203.0.113.80"), addr("192.168.1.20")
			s.Drops.Rows[2].Samples = []string{"tcp 203.0.113.80:443 -> 192.168.1.20:4000 SYN,ACK (flow 192.168.1.20:4000 -> 203.0.113.80:443)"}
		}, warn},
		{"blackhole for a published service", func(s *snapshot.Snapshot) {
			refused(snapshot.RouteBlackhole, 400, 20000)(s)
			s.Routes[0].Source, s.Routes[0].Dest = addr("203.0.113.9"), addr("192.168.9.80")
			s.Drops.Rows[2].Samples = []string{"tcp 203.0.113.9:4000 -> 192.168.9.80:80 SYN (flow 203.0.113.9:4000 -> 198.51.100.1:80)"}
		}, warn},
		{"prohibited by a rule, and something without a route as well", func(s *snapshot.Snapshot) {
			refused(snapshot.RouteProhibited, 400, 2000)(s)
			s.Counters["IpExt.InNoRoutes"] = 5
		}, full},

		{"two strays", lost(2, 0), ""},
		{"strays beside traffic", lost(9, 2_000_000), ""},
		{"blackhole for what nobody uses", refused(snapshot.RouteBlackhole, 400, 2_000_000), ""},
		{"multicast without a route", func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(90, snapshot.CauseNoRoute, "eth1", sample("icmpv6 :: -> ff02::16 type 143 code 0")))
		}, ""},
		{"a host that forwards nothing", func(s *snapshot.Snapshot) {
			lost(400, 0)(s)
			s.Chains = nil
			for name := range s.Sysctls {
				s.Sysctls[name] = "0"
			}
		}, ""},
		{"another namespace's", func(s *snapshot.Snapshot) {
			lost(400, 0)(s)
			s.Counters["IpExt.InNoRoutes"], s.Drops.Rows[2].Netns = 0, 4026539999
		}, ""},
	})

	// A rule for a whole network is said once, and called a rule, however many addresses were asked for.
	s := gateway()
	refused(snapshot.RouteProhibited, 400, 2000)(s)
	s.Routes[0].Match = netip.Prefix{}
	s.Drops.Rows[2].Samples = append(slices.Clone(s.Drops.Rows[2].Samples), "udp 192.168.1.20:4000 -> 10.64.0.77:53")
	s.Routes = append(s.Routes, s.Routes[0])
	s.Routes[len(s.Routes)-1].Dest = addr("10.64.0.77")
	found := Judge(s)[0]
	if text := strings.Join(found.Remedy, "\n"); strings.Count(text, "is of type prohibit") != 1 || !strings.HasPrefix(found.Title, "a policy routing rule of type prohibit") {
		t.Errorf("%s\n%s", found.Title, text)
	}
	asked := 0
	for _, e := range found.Evidence {
		if strings.HasPrefix(e.What, "route from ") {
			asked++
		}
	}
	if asked != 1 {
		t.Errorf("one answer of the routing tables is shown %d times: %+v", asked, found.Evidence)
	}

	s = gateway()
	refused(snapshot.RouteBlackhole, 400, 2000)(s)
	s.Netns.Name = "blue"
	if got, want := Judge(s)[0].Remedy[1], "ip netns exec blue ip route del blackhole 10.64.0.0/15 table 254"; got != want {
		t.Errorf("remedy %q, want %q", got, want)
	}
}

func TestTTL(t *testing.T) {
	lost := func(n, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			examples["routing-loop"](s)
			s.Counters["Ip.InHdrErrors"], s.Counters["Ip.ForwDatagrams"] = n, forwarded
			s.Drops.Rows[2].Count = n
		}
	}
	onward := func(s *snapshot.Snapshot) { s.Routes[0].Out = "eth1" }
	const full, warn, exceeded, advice = "critical routing-loop", "warning routing-loop", "warning ttl-exceeded", "advice ttl-exceeded"
	run(t, []row{
		{"a loop", lost(500, 17000), full},
		{"three pings into a loop", lost(3, 100), warn},
		{"masqueraded packets that come back", func(s *snapshot.Snapshot) {
			back := drop(90, snapshot.CauseMartian, "eth0", sample("udp 198.51.100.1:4000 -> 10.71.0.1:53 (flow 192.168.1.20:4000 -> 10.71.0.1:53)"))
			back.Reason = "IP_LOCAL_SOURCE"
			examples["routing-loop"](s)
			s.Counters["Ip.InHdrErrors"], s.Drops.Rows[2] = 0, back
		}, full},
		{"routes not known, many", func(s *snapshot.Snapshot) { lost(500, 17000)(s); s.Routes = nil }, exceeded},
		{"no tracer, many", func(s *snapshot.Snapshot) { lost(500, 17000)(s); s.Routes, s.Drops = nil, nil }, exceeded},
		{"out where it came in, and no frame came by again", func(s *snapshot.Snapshot) { lost(500, 17000)(s); s.Frames = &snapshot.Frames{} }, exceeded},
		{"the route leads on, many", func(s *snapshot.Snapshot) { lost(500, 17000)(s); onward(s) }, exceeded},
		{"the route leads on, many of many", func(s *snapshot.Snapshot) { lost(500, 2_000_000)(s); onward(s) }, advice},

		{"traceroute", func(s *snapshot.Snapshot) { lost(30, 2_000_000)(s); onward(s) }, ""},
		{"mtr on a quiet gateway", func(s *snapshot.Snapshot) { lost(50, 100)(s); onward(s) }, ""},
		{"two packets into a loop", lost(2, 60), ""},
		{"broken headers", func(s *snapshot.Snapshot) { s.Counters["Ip.InHdrErrors"] = 5000 }, ""},
	})
}

func TestMartian(t *testing.T) {
	ownSource := func(n, received uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			row := drop(n, snapshot.CauseMartian, "eth0", sample("udp 198.51.100.1:53 -> 192.168.1.20:53"))
			row.Reason = "IP_LOCAL_SOURCE"
			s.Drops.Rows = append(s.Drops.Rows, row)
			link(s, "eth0").RxPackets = received
		}
	}
	const full, warn = "critical martian-drop", "warning martian-drop"
	run(t, []row{
		{"translated to the machine itself", examples["martian-drop"], full},
		{"before Linux 6.14", func(s *snapshot.Snapshot) { examples["martian-drop"](s); s.Drops.Rows[2].Reason = "NOT_SPECIFIED" }, full},
		{"one packet", func(s *snapshot.Snapshot) { examples["martian-drop"](s); s.Drops.Rows[2].Count = 1 }, warn},
		{"interface and settings not known", func(s *snapshot.Snapshot) {
			examples["martian-drop"](s)
			s.Drops.Rows[2].Interface, s.Sysctls = "", nil
		}, full},
		{"own address as source, most of all", ownSource(900, 1000), full},
		{"own address as source, before Linux 6.14", func(s *snapshot.Snapshot) { ownSource(900, 1000)(s); s.Drops.Rows[2].Reason = "NOT_SPECIFIED" }, full},
		{"own address as source, a part", ownSource(90, 10000), warn},

		{"spoofed, beside real traffic", ownSource(90, 1_000_000), ""},
		{"two packets", ownSource(2, 1500), ""},
		{"to 127.0.0.1 directly", func(s *snapshot.Snapshot) {
			examples["martian-drop"](s)
			s.Drops.Rows[2].Samples = []string{"tcp 192.168.1.20:4000 -> 127.0.0.1:80 SYN"}
		}, ""},
		{"no reason, and no address that explains it", func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(900, snapshot.CauseMartian, "eth0", sample("udp 203.0.113.80:53 -> 198.51.100.1:53")))
		}, ""},
	})

	s := gateway()
	examples["martian-drop"](s)
	// The rule that guards what listens there comes first, and nothing sets the one
	// without the user's word that the other is there.
	f := Judge(s)[0]
	guard := slices.IndexFunc(f.Remedy, func(line string) bool { return strings.HasSuffix(line, "ip daddr 127.0.0.0/8 drop'") })
	open := slices.Index(f.Remedy, "sysctl -w net.ipv4.conf.eth1.route_localnet=1")
	if guard < 0 || open < guard || len(f.Settings) != 1 || f.Settings[0].If == "" {
		t.Errorf("settings %v, remedy %q", f.Settings, f.Remedy)
	}
}

func TestFragments(t *testing.T) {
	lost := func(fails, timeouts, done uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["Ip.ReasmFails"], s.Counters["Ip.ReasmTimeout"], s.Counters["Ip.ReasmOKs"] = fails, timeouts, done
		}
	}
	const full, warn, advice = "critical fragments-lost", "warning fragments-lost", "advice fragments-lost"
	run(t, []row{
		{"no memory", examples["fragments-lost"], full},
		{"others never come", lost(50, 50, 100), full},
		{"a part", lost(50, 50, 2000), warn},
		{"few of many", lost(50, 50, 100_000), advice},
		{"counters not known", func(s *snapshot.Snapshot) { examples["fragments-lost"](s); s.Counters = nil }, warn},

		{"a lost one now and then", lost(4, 4, 10), ""},
		{"none lost", lost(0, 0, 100_000), ""},
	})
	for _, r := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"no memory", examples["fragments-lost"], "16777216"},
		{"no memory, limit lowered", func(s *snapshot.Snapshot) {
			examples["fragments-lost"](s)
			s.Sysctls["net.ipv4.ipfrag_high_thresh"] = "65536"
		}, "4194304"},
		{"limit not known", func(s *snapshot.Snapshot) { examples["fragments-lost"](s); s.Sysctls = nil }, "4194304"},
		{"others never come", lost(50, 50, 100), ""},
		{"too many others of the sender", func(s *snapshot.Snapshot) {
			examples["fragments-lost"](s)
			row := drop(860, snapshot.CauseFragment, "eth1")
			row.Reason = "FRAG_TOO_FAR"
			s.Drops.Rows = append(s.Drops.Rows, row)
		}, ""},
	} {
		s := gateway()
		r.change(s)
		got := ""
		for _, set := range Judge(s)[0].Settings {
			got += set.Value
		}
		if got != r.want {
			t.Errorf("%s: sets %q, want %q", r.name, got, r.want)
		}
	}
}

func TestChecksum(t *testing.T) {
	lost := func(n, received uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters["Tcp.InCsumErrors"], s.Counters["Ip.InReceives"] = n, received
		}
	}
	const full, warn, advice = "critical checksum-errors", "warning checksum-errors", "advice checksum-errors"
	run(t, []row{
		{"of a tunnel", examples["checksum-errors"], full},
		{"a part", lost(30, 20000), warn},
		{"many of far more", lost(300, 2_000_000), advice},
		{"counters not known", func(s *snapshot.Snapshot) { examples["checksum-errors"](s); s.Counters = nil }, warn},

		{"a few from far away", lost(9, 2_000_000), ""},
		{"none", lost(0, 2_000_000), ""},
	})
}

func TestQdisc(t *testing.T) {
	queue := func(kind string, dropped, sent uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: kind, Packets: sent, Dropped: dropped}
			link(s, "eth0").QueueLength = 1000
		}
	}
	const full, warn, advice = "critical qdisc-drop", "warning qdisc-drop", "advice qdisc-drop"
	run(t, []row{
		{"a shaper", examples["qdisc-drop"], full},
		{"a plain queue", queue("pfifo_fast", 50_000, 900_000), warn},
		{"classes", queue("htb", 500_000, 900_000), full},
		{"a fair queue that drops much", queue("fq_codel", 100_000, 900_000), warn},
		{"a fair queue that drops most", queue("fq_codel", 900_000, 100_000), warn},
		{"many of far more", queue("pfifo_fast", 900, 900_000), advice},
		{"tracer only", func(s *snapshot.Snapshot) {
			examples["qdisc-drop"](s)
			link(s, "eth0").Qdisc = nil
			link(s, "eth0").TxPackets = 9000
		}, full},
		{"queue only", func(s *snapshot.Snapshot) { examples["qdisc-drop"](s); s.Drops = nil }, full},

		{"an interface without carrier", func(s *snapshot.Snapshot) {
			s.Drops.Rows = append(s.Drops.Rows, drop(220, snapshot.CauseQueue, "eth0", sample("arp")))
			s.Capabilities = []snapshot.Capability{{Name: snapshot.CanQdiscs, OK: true}}
			link(s, "eth0").TxPackets = 0
		}, ""},
		{"TCP that uses a line fully", queue("fq_codel", 9000, 900_000), ""},
		{"a burst", queue("pfifo_fast", 9, 20), "advice qdisc-drop"},
		{"absurd", queue("tbf", 1<<60, 5), ""},
	})
	for kind, want := range map[string]string{
		"tbf":        "tc qdisc replace dev eth0 root tbf rate 16000kbit burst 8000 limit 400000",
		"pfifo_fast": "ip link set dev eth0 txqueuelen 4000",
		"fq_codel":   "natkit conntrack top",
		"htb":        "tc -s class show dev eth0",
	} {
		s := gateway()
		examples["qdisc-drop"](s)
		link(s, "eth0").Qdisc.Kind, link(s, "eth0").QueueLength = kind, 1000
		if got := Judge(s)[0].Remedy; !slices.Contains(got, want) {
			t.Errorf("%s: remedy\n%s\nwant %s", kind, strings.Join(got, "\n"), want)
		}
	}
}

func TestNeighbourTable(t *testing.T) {
	table := func(n snapshot.Neighbours) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Neighbours = []snapshot.Neighbours{n} }
	}
	const full, warn = "critical neighbour-table-full", "warning neighbour-table-full"
	run(t, []row{
		{"no room", examples["neighbour-table-full"], full},
		{"no room for IPv6", table(snapshot.Neighbours{Family: "ipv6", Entries: 1024, Thresh3: 1024, TableFulls: 1}), full},
		{"no room, limits not known", table(snapshot.Neighbours{Family: "ipv4", Entries: 1024, TableFulls: 1}), full},
		{"nearly full, cleared on the spot", table(snapshot.Neighbours{Family: "ipv4", Entries: 1000, Thresh3: 1024, ForcedRuns: 3}), warn},

		{"nearly full of permanent ones", table(snapshot.Neighbours{Family: "ipv4", Entries: 1020, Thresh3: 1024}), ""},
		{"cleared on the spot, with room", table(snapshot.Neighbours{Family: "ipv4", Entries: 600, Thresh2: 512, Thresh3: 1024, ForcedRuns: 3}), ""},
		{"quiet", table(snapshot.Neighbours{Family: "ipv4", Entries: 5, Thresh3: 1024, Failed: 9}), ""},
		{"a family that does not exist", table(snapshot.Neighbours{Family: "x; rm -rf /", TableFulls: 9}), ""},
		{"absurd", table(snapshot.Neighbours{Family: "ipv4", TableFulls: 1 << 60}), ""},
	})
	s := gateway()
	examples["neighbour-table-full"](s)
	var got []string
	for _, set := range Judge(s)[0].Settings {
		got = append(got, set.Name+"="+set.Value)
	}
	want := []string{"net.ipv4.neigh.default.gc_thresh3=8192", "net.ipv4.neigh.default.gc_thresh2=4096", "net.ipv4.neigh.default.gc_thresh1=1024"}
	if !slices.Equal(got, want) {
		t.Errorf("sets %v, want %v", got, want)
	}
}
