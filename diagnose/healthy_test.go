// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"natkit/snapshot"
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
		*s = snapshot.Snapshot{Version: 1, WindowSeconds: 10, Host: s.Host, Netns: s.Netns, Interfaces: s.Interfaces[:2], Sysctls: map[string]string{"net.ipv4.ip_forward": "0"},
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
			Dest: netip.MustParseAddrPort("203.0.113.5:5060"), Used: 1, MinPort: 5060, MaxPort: 5060})
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 2, 2
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
					if f.Severity >= Warning && f.Code != code && !explained(code, f.Code) {
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
			t.Skip()
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
