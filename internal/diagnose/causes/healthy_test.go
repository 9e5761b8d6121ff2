// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// healthy are machines on which nothing is wrong, each with something that
// looks as if. A false alarm is as bad as a miss.
var healthy = map[string]func(s *snapshot.Snapshot){
	"gateway": func(s *snapshot.Snapshot) {},
	"Docker host under load": func(s *snapshot.Snapshot) {
		policyDrop(s, 0)
		examples["br-netfilter-overhead"](s)
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "filter", Name: "DOCKER-USER"},
			snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "DOCKER", NATRules: map[string]int{"dnat": 4}})
	},
	"firewall that drops scans": func(s *snapshot.Snapshot) {
		policyDrop(s, 5000)
		s.Drops.Rows = append(s.Drops.Rows, drop(5000, snapshot.CauseRule, "eth0", forwardStack))
	},
	"web server after a burst": func(s *snapshot.Snapshot) {
		fill(s, 120000)
		s.Conntrack.CountStart = 20000
		s.Conntrack.Table.ByState = map[string]uint64{"TIME_WAIT": 100000, "ESTABLISHED": 20000}
		s.Counters["TcpExt.ListenOverflows"], s.Counters["Tcp.PassiveOpens"] = 3, 100000
		s.Counters["TcpExt.TCPSynRetrans"] = 40
	},
	"host that forwards nothing": func(s *snapshot.Snapshot) {
		s.Chains = nil
		for name := range s.Sysctls {
			if s.Sysctls[name] == "1" {
				s.Sysctls[name] = "0"
			}
		}
		s.Counters["Ip.InAddrErrors"] = 30
	},
	"resolver": func(s *snapshot.Snapshot) {
		fill(s, 60000)
		s.Conntrack.Table.ByState = nil
		s.Conntrack.Table.ByProtocol = map[string]uint64{"udp": 60000}
		s.Conntrack.Table.ByStatus = map[string]uint64{"UNREPLIED": 9000}
	},
	"idle machine": func(s *snapshot.Snapshot) {
		*s = snapshot.Snapshot{WindowSeconds: 10, Host: s.Host, Netns: s.Netns, Interfaces: s.Interfaces[:2], Sysctls: map[string]string{"net.ipv4.ip_forward": "0"},
			Counters: map[string]uint64{"Ip.InReceives": 12, "Ip.InAddrErrors": 1}, Conntrack: &snapshot.Conntrack{Count: 30, CountStart: 31, Max: 65536, Buckets: 65536,
				Table: &snapshot.Table{Entries: 30, ByStatus: map[string]uint64{"UNREPLIED": 25}, ByState: map[string]uint64{"TIME_WAIT": 4}}}}
	},
	"unprivileged view": func(s *snapshot.Snapshot) {
		s.Conntrack.Table, s.Conntrack.Stats, s.Conntrack.HostObjects, s.Conntrack.ObjectBytes = nil, nil, 0, 0
		s.Drops, s.Hooks, s.Chains, s.KernelLog = nil, nil, nil, nil
	},
	"gateway with small MTU to the outside": func(s *snapshot.Snapshot) {
		link(s, "eth0").MTU = 1492
		s.Counters["Ip.FragFails"] = 60
	},
	"SIP behind one port": func(s *snapshot.Snapshot) {
		s.Chains[0].SNATRanges = []snapshot.PortRange{{Min: 5060, Max: 5060}}
		s.Conntrack.Table.SNATPorts = append(s.Conntrack.Table.SNATPorts, snapshot.SNATUse{Protocol: "udp", Outside: addr("198.51.100.1"),
			Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.5:5060")), Used: 1, MinPort: 5060, MaxPort: 5060})
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 2, 2
	},
	"gateway at 80 % of all its limits": func(s *snapshot.Snapshot) {
		fill(s, 209_000)
		s.Conntrack.CountStart = 208_000
		s.Conntrack.Table.ByState = map[string]uint64{"ESTABLISHED": 120_000, "TIME_WAIT": 60_000, "SYN_SENT": 4000, "CLOSE_WAIT": 3000}
		s.Conntrack.Table.SNATPorts[0].Used = 51_000
		for n := range 4 {
			s.CPUs = append(s.CPUs, snapshot.CPU{Number: n, Busy: 0.8, Softirq: 0.7, Packets: 400_000, Squeezed: 30, BacklogDropped: 1,
				KsoftirqdRuns: ptr(uint64(900)), KsoftirqdWait: ptr(0.9)})
		}
		s.Sysctls["net.core.netdev_budget"], s.Sysctls["net.core.netdev_max_backlog"] = "300", "1000"
		s.Neighbours = []snapshot.Neighbours{{Family: "ipv4", Entries: 820, Here: 800, Busiest: "eth1", Thresh2: 512, Thresh3: 1024, ForcedRuns: 2, Failed: 40}}
		link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: "fq_codel", Packets: 990_000, Dropped: 9000, Overlimits: 0, LimitPackets: 10240}
		link(s, "eth1").Qdisc = &snapshot.Qdisc{Kind: "tbf", Packets: 1_000_000, Dropped: 4000, Overlimits: 500_000, LimitBytes: 1 << 20, RateBytes: 125_000_000}
		link(s, "eth0").RxMissed = 40
		link(s, "eth0").NIC = &snapshot.NIC{Driver: "mlx5_core", RxRing: 1024, RxRingMax: 8192, Channels: 4, ChannelsMax: 4, RxQueues: 4, Lost: map[string]uint64{"rx_out_of_buffer": 40}}
		s.Counters["Ip.InHdrErrors"], s.Counters["IpExt.InNoRoutes"] = 30, 60
		s.Counters["Ip.ReasmFails"], s.Counters["Ip.ReasmTimeout"], s.Counters["Ip.ReasmOKs"] = 12, 12, 3000
		s.Counters["Tcp.InCsumErrors"] = 40
		s.Drops.Rows = append(s.Drops.Rows, drop(30, snapshot.CauseTTL, "eth1", sample("udp 192.168.1.20:4000 -> 203.0.113.80:33434")),
			drop(60, snapshot.CauseNoRoute, "eth1", sample("tcp 192.168.1.20:4000 -> 10.65.0.1:443 SYN")),
			drop(80, snapshot.CauseMartian, "eth0", sample("udp 10.0.0.1:53 -> 127.0.0.1:53")), drop(9000, snapshot.CauseQueue, "eth0"), drop(4000, snapshot.CauseQueue, "eth1"))
		s.Routes = []snapshot.RouteAnswer{{In: "eth1", Source: addr("192.168.1.20"), Dest: addr("203.0.113.80"), Answer: snapshot.RouteFound, Out: "eth0"}}
		s.Listeners[0].Queue = 100
	},
	"Kubernetes node with 5000 rules": func(s *snapshot.Snapshot) {
		examples["br-netfilter-overhead"](s)
		for n := range 1600 {
			s.Chains = append(s.Chains,
				snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: fmt.Sprintf("KUBE-SVC-%016d", n), Rules: 2},
				snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: fmt.Sprintf("KUBE-SEP-%016d", n), Rules: 1, NATRules: map[string]int{"dnat": 1}})
		}
		s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "KUBE-SERVICES", Rules: 1600},
			snapshot.Chain{Backend: "nft", Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Type: "filter", Policy: "accept", Rules: 4,
				DropRules: []snapshot.DropRule{{Number: 1, Verdict: "drop", Packets: ptr(uint64(200))}}})
		s.Sysctls["net.ipv4.conf.all.route_localnet"], s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_close_wait"] = "1", "3600"
		s.Owners = []snapshot.Owner{{Setting: "net.netfilter.nf_conntrack_max", Value: "262144", Who: "kube-proxy", Where: "process 7 (kube-proxy)"}}
		s.Drops.Rows = append(s.Drops.Rows, drop(40, snapshot.CauseNoRoute, "eth1", sample("tcp 192.168.1.20:4000 -> 10.244.3.9:443 SYN")),
			drop(200, snapshot.CauseRule, "eth1", forwardStack))
		s.Routes = []snapshot.RouteAnswer{{In: "eth1", Source: addr("192.168.1.20"), Dest: addr("10.244.3.9"), Answer: snapshot.RouteBlackhole,
			Match: netip.MustParsePrefix("10.244.3.0/26"), Table: 254}}
		s.Neighbours = []snapshot.Neighbours{{Family: "ipv4", Entries: 980, Here: 60, Thresh2: 512, Thresh3: 1024}} // most of them permanent
	},
	"web server without NAT or connection tracking": func(s *snapshot.Snapshot) {
		s.Conntrack, s.Chains, s.Hooks = nil, []snapshot.Chain{}, []snapshot.Hook{}
		s.Sysctls = map[string]string{"net.ipv4.ip_forward": "0", "net.ipv4.conf.eth0.rp_filter": "2", "net.core.somaxconn": "4096"}
		s.Interfaces = s.Interfaces[:2]
		link(s, "eth0").Qdisc = &snapshot.Qdisc{Kind: "mq", Packets: 900_000, Dropped: 7}
		link(s, "eth0").NIC = &snapshot.NIC{Driver: "virtio_net", RxRing: 256, RxRingMax: 256, RxQueues: 1}
		s.CPUs = []snapshot.CPU{{Number: 0, Busy: 0.7, Softirq: 0.3, Packets: 900_000}, {Number: 1, Busy: 0.6, Softirq: 0.02, Packets: 20_000}}
		s.Counters = map[string]uint64{"Ip.InReceives": 900_000, "Ip.InDelivers": 900_000, "Ip.ForwDatagrams": 0, "Tcp.PassiveOpens": 80_000, "TcpExt.ListenOverflows": 2,
			"TcpExt.TCPSynRetrans": 60, "Tcp.InCsumErrors": 3, "Ip.InAddrErrors": 5}
		s.Drops.Rows = s.Drops.Rows[:1]
	},
	"neighbour of a namespace whose table is full": func(s *snapshot.Snapshot) {
		s.KernelLog.OtherTableFull, s.KernelLog.TableFull, s.KernelLog.Suppressed = 11, 0, 3000
		d := drop(9000, snapshot.CauseTableFull, "veth1")
		d.Netns = 4026532999
		s.Drops.Rows = append(s.Drops.Rows, d)
	},
}

func TestHealthy(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(healthy)) {
		t.Run(name, func(t *testing.T) {
			s := gateway()
			healthy[name](s)
			for _, f := range Judge(s) {
				if f.Severity >= Warning {
					t.Errorf("%v %s: %s", f.Severity, f.Code, f.Title)
				}
			}
		})
	}
}

// Facts that are missing cost nothing but their own causes: whatever part of a
// snapshot is taken away, Judge goes on, and invents nothing.
func TestMissingFacts(t *testing.T) {
	parts := []func(s *snapshot.Snapshot){
		func(s *snapshot.Snapshot) { s.Conntrack = nil },
		func(s *snapshot.Snapshot) { s.Conntrack.Stats = nil },
		func(s *snapshot.Snapshot) { s.Conntrack.Table = nil },
		func(s *snapshot.Snapshot) { s.Sysctls = nil },
		func(s *snapshot.Snapshot) { s.Counters = nil },
		func(s *snapshot.Snapshot) { s.Drops = nil },
		func(s *snapshot.Snapshot) { s.Hooks = nil },
		func(s *snapshot.Snapshot) { s.Chains = nil },
		func(s *snapshot.Snapshot) { s.Interfaces = nil },
		func(s *snapshot.Snapshot) { s.Listeners = nil },
		func(s *snapshot.Snapshot) { s.KernelLog = nil },
		func(s *snapshot.Snapshot) { s.CPUs = nil },
		func(s *snapshot.Snapshot) { s.Neighbours, s.Routes = nil, nil },
		func(s *snapshot.Snapshot) { s.WindowSeconds = 0 },
		func(s *snapshot.Snapshot) { s.Host = snapshot.Host{} },
	}
	for i := range parts {
		for j := range parts {
			s := gateway()
			for _, k := range []int{max(i, j), min(i, j)} { // the table's parts before the table
				parts[k](s)
			}
			for _, f := range Judge(s) {
				t.Errorf("without parts %d and %d a healthy gateway has %v %s", i, j, f.Severity, f.Code)
			}
			for code, change := range examples {
				s := gateway()
				change(s)
				parts[max(i, j)](s)
				if !(min(i, j) <= 2 && s.Conntrack == nil) {
					parts[min(i, j)](s)
				}
				for _, f := range Judge(s) {
					// Without dump or tracer it is not known whether ports are free, or for whom.
					blind := strings.HasSuffix(code, "-race") && strings.HasPrefix(f.Code, "snat-port") ||
						code == "rule-drop" && f.Code == "forward-policy-drop" // without the rules, which of them it was
					if f.Severity >= Warning && f.Code != code && !explained(code, f.Code) && !blind {
						t.Errorf("%s without parts %d and %d: found %s", code, i, j, f.Code)
					}
				}
			}
		}
	}
	for _, s := range []*snapshot.Snapshot{nil, {}, {Conntrack: &snapshot.Conntrack{}}, {Conntrack: &snapshot.Conntrack{Table: &snapshot.Table{}}, Drops: &snapshot.Drops{}}} {
		if found := Judge(s); len(found) != 0 {
			t.Errorf("nothing known, found %v", found)
		}
	}
}

func explained(cause, code string) bool {
	for _, c := range Catalogue() {
		if c.Code == cause {
			return slices.Contains(c.Explains, code)
		}
	}
	return false
}

// Whatever a snapshot says, Judge gives complete findings, and the same twice.
func FuzzJudge(f *testing.F) {
	for _, change := range examples {
		s := gateway()
		change(s)
		f.Add(save(f, s))
	}
	for _, change := range healthy {
		s := gateway()
		change(s)
		f.Add(save(f, s))
	}
	f.Add([]byte(`{"version":1,"window_s":1e308,"conntrack":{"count":18446744073709551615,"max":18446744073709551615,"buckets":1,"stats":{"drop":18446744073709551615}}}`))
	f.Add([]byte(`{"version":1,"window_s":-1,"conntrack":{"count":5,"max":0,"buckets":0,"table":{"entries":0,"by_state":{"TIME_WAIT":9}}}}`))
	f.Add([]byte(`{"drops":{"rows":[{"count":18446744073709551615,"cause":"mtu","samples":["tcp - -> -"]}]},"counters":{"Ip.ForwDatagrams":18446744073709551615,"Ip.FragFails":72057594037927935}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var s snapshot.Snapshot
		if json.Unmarshal(data, &s) != nil {
			return // no snapshot
		}
		first := Judge(&s)
		for _, f := range first {
			if f.Code == "" || f.Severity < Advice || f.Title == "" || len(f.Evidence) == 0 || f.Why == "" || len(f.Remedy) == 0 || len(f.Verify) == 0 {
				t.Errorf("incomplete: %+v", f)
			}
		}
		a, err := json.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := json.Marshal(Judge(&s)); !bytes.Equal(a, b) {
			t.Errorf("judged twice, different:\n%s\n%s", a, b)
		}
	})
}

func save(t testing.TB, s *snapshot.Snapshot) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := snapshot.Save(&b, s); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
