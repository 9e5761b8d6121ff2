// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func fill(s *snapshot.Snapshot, count uint64) {
	s.Conntrack.Count, s.Conntrack.CountStart, s.Conntrack.HostObjects = count, count, count
	s.Conntrack.Table.Entries = count
	s.Conntrack.Table.ByState = map[string]uint64{"ESTABLISHED": count}
}

func init() {
	examples["conntrack-table-full"] = func(s *snapshot.Snapshot) {
		fill(s, 262144)
		s.Conntrack.Table.ByState = map[string]uint64{"ESTABLISHED": 100000, "TIME_WAIT": 160000, "SYN_SENT": 2144}
		s.Conntrack.Table.Sources[0] = snapshot.Talker{Addr: addr("192.168.1.20"), Entries: 260000}
		s.Conntrack.Stats["drop"] = 10031
		s.Drops.Rows = append(s.Drops.Rows, drop(10031, snapshot.CauseTableFull, "eth1", sample("tcp 192.168.1.20:4000 -> 203.0.113.80:443 SYN")))
		s.KernelLog.TableFull, s.KernelLog.Suppressed = 11, 3939
		s.Counters["TcpExt.TCPSynRetrans"] = 7
	}
	examples["conntrack-table-nearly-full"] = func(s *snapshot.Snapshot) {
		fill(s, 250000)
		s.Conntrack.CountStart = 249000
	}
	examples["time-wait-heavy"] = func(s *snapshot.Snapshot) {
		fill(s, 150000)
		s.Conntrack.Table.ByState = map[string]uint64{"TIME_WAIT": 140000, "ESTABLISHED": 10000}
	}
	examples["unreplied-flood"] = func(s *snapshot.Snapshot) {
		fill(s, 60000)
		s.Conntrack.Table.ByState = map[string]uint64{"ESTABLISHED": 6000}
		s.Conntrack.Table.ByStatus = map[string]uint64{"UNREPLIED": 50000, "ASSURED": 6000}
		s.Conntrack.Table.ByProtocol = map[string]uint64{"udp": 51000, "tcp": 9000}
		s.Conntrack.Table.Sources[0] = snapshot.Talker{Addr: addr("192.168.1.66"), Entries: 49500, Unreplied: 49400}
	}
	examples["conntrack-hash-too-small"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Buckets = 1024
		s.Conntrack.Stats["search_restart"] = 12
	}
	examples["snat-ports-exhausted"] = func(s *snapshot.Snapshot) {
		*chain(s, "postrouting") = snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "postrouting", Hook: "postrouting", Type: "nat", Policy: "accept",
			Rules: 1, NATRules: map[string]int{"snat": 1}, SNATRanges: []snapshot.PortRange{{Min: 5000, Max: 5003}}}
		s.Conntrack.Table.SNATPorts = []snapshot.SNATUse{{Protocol: "udp", Outside: addr("198.51.100.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.53:53")), Used: 4, MinPort: 5000, MaxPort: 5003}}
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 8, 8
		s.Drops.Rows = append(s.Drops.Rows, drop(8, snapshot.CauseConfirm, "eth1"))
	}
}

func TestTableFull(t *testing.T) {
	const full, warn = "critical conntrack-table-full", "warning conntrack-table-full"
	run(t, []row{
		{"refused by the counter alone", func(s *snapshot.Snapshot) { fill(s, 262144); s.Conntrack.Stats["drop"] = 5 }, full},
		{"seen by the tracer alone", func(s *snapshot.Snapshot) {
			fill(s, 262144)
			s.Drops.Rows = []snapshot.Drop{drop(5, snapshot.CauseTableFull, "eth1")}
		}, full},
		{"logged alone", func(s *snapshot.Snapshot) {
			fill(s, 262144)
			s.Conntrack.Stats, s.Drops = nil, nil
			s.KernelLog.TableFull = 2
		}, full},
		{"a little room again at the end", func(s *snapshot.Snapshot) {
			fill(s, 262144)
			s.Conntrack.Count = 240000
			s.Conntrack.Stats["drop"] = 5
		}, full},
		{"filled and emptied within the window", func(s *snapshot.Snapshot) {
			s.Conntrack.Stats["drop"] = 50
			s.Drops.Rows = []snapshot.Drop{drop(50, snapshot.CauseTableFull, "eth1")}
			s.KernelLog.TableFull = 3
		}, full},
		{"limit lowered below the count", func(s *snapshot.Snapshot) { s.Conntrack.Max = 1000; s.Conntrack.Stats["drop"] = 5 }, full},
		{"full, nobody came", func(s *snapshot.Snapshot) { fill(s, 262144) }, warn},
		{"table unreadable, two signs", func(s *snapshot.Snapshot) {
			s.Conntrack = nil
			s.KernelLog.TableFull = 3
			s.Drops.Rows = []snapshot.Drop{drop(50, snapshot.CauseTableFull, "eth1")}
		}, full},
		{"table unreadable, one sign", func(s *snapshot.Snapshot) { s.Conntrack = nil; s.KernelLog.TableFull = 3 }, warn},

		// Alike and healthy.
		{"old lines in the log", func(s *snapshot.Snapshot) { s.KernelLog.TableFullBefore = 5000 }, ""},
		{"another namespace's lines", func(s *snapshot.Snapshot) { s.KernelLog.OtherTableFull = 50 }, ""},
		{"lines, but a table with room", func(s *snapshot.Snapshot) { s.KernelLog.TableFull = 50 }, ""},
		{"invalid packets counted as drop in a table with room", func(s *snapshot.Snapshot) { s.Conntrack.Stats["drop"] = 200 }, ""},
		{"a raw rule that drops looks the same to the tracer", func(s *snapshot.Snapshot) {
			s.Drops.Rows = []snapshot.Drop{drop(500, snapshot.CauseTableFull, "eth1")}
		}, ""},
		{"no limit", func(s *snapshot.Snapshot) { s.Conntrack.Max = 0; s.Conntrack.Stats["drop"] = 5 }, ""},
		{"another namespace's drops", func(s *snapshot.Snapshot) {
			s.Conntrack = nil
			d := drop(500, snapshot.CauseTableFull, "eth1")
			d.Netns = 4026532322
			s.Drops.Rows = []snapshot.Drop{d}
		}, ""},
		{"counter that went backwards", func(s *snapshot.Snapshot) { s.Conntrack = nil; s.KernelLog.TableFull = ^uint64(0) - 4 }, ""},
	})
}

// The remedy's sizes: what a machine gets, and when it gets none.
func TestGrowTable(t *testing.T) {
	for _, r := range []struct {
		name         string
		change       func(s *snapshot.Snapshot)
		max, buckets string // "" for no such setting
	}{
		{"doubled when nothing was refused", func(s *snapshot.Snapshot) {}, "524288", "524288"},
		{"for what was refused", func(s *snapshot.Snapshot) { s.Conntrack.Stats["drop"] = 20000 }, "1048576", "1048576"}, // (262144 + 2000/s x 120 s) x 1.25
		{"at most four times", func(s *snapshot.Snapshot) { s.Conntrack.Stats["drop"] = 4_000_000 }, "1048576", "1048576"},
		{"the published case: a limit of 1000 under a large hash", func(s *snapshot.Snapshot) {
			fill(s, 1000)
			s.Conntrack.Max, s.Conntrack.Buckets, s.Conntrack.Stats["drop"] = 1000, 65536, 10031
		}, "262144", "262144"},
		{"a limit far below the hash", func(s *snapshot.Snapshot) { s.Conntrack.Max = 1000; fill(s, 1000) }, "262144", ""},
		{"as many as fit the memory", func(s *snapshot.Snapshot) { s.Host.MemoryBytes = 3 << 30; s.Conntrack.Stats["drop"] = 20000 }, "524288", "524288"},
		{"no memory left", func(s *snapshot.Snapshot) { s.Host.MemoryBytes = 1 << 30 }, "", ""},
		{"memory not known", func(s *snapshot.Snapshot) { s.Host.MemoryBytes = 0 }, "", ""},
		{"sizes not known: the pessimistic ones", func(s *snapshot.Snapshot) {
			s.Conntrack.ObjectBytes, s.Conntrack.ExtensionBytes, s.Conntrack.BucketBytes = 0, 0, 0
			s.Host.MemoryBytes = 2800 << 20 // 384 bytes an entry would fit
		}, "524288", "524288"},
		{"hash large enough", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 1 << 20 }, "1048576", ""},
	} {
		t.Run(r.name, func(t *testing.T) {
			s := gateway()
			fill(s, 262144)
			r.change(s)
			v := judgeTableFull(newFacts(s))
			if v == nil {
				t.Fatal("not found")
			}
			if got := settingOf(v.Finding, "net.netfilter.nf_conntrack_max"); got != r.max {
				t.Errorf("max %q, want %q", got, r.max)
			}
			if got := settingOf(v.Finding, "net.netfilter.nf_conntrack_buckets"); got != r.buckets {
				t.Errorf("buckets %q, want %q", got, r.buckets)
			}
		})
	}
}

func settingOf(f Finding, name string) string {
	for _, s := range f.Settings {
		if s.Name == name {
			return s.Value
		}
	}
	return ""
}

// Global limits are written in the initial namespace, everything else in the
// namespace that was looked at.
func TestRemedyNamespaces(t *testing.T) {
	for _, r := range []struct{ ref, local, natkit string }{
		{"", "sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30", "natkit tune apply"},
		{"blue", "ip netns exec blue sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30", "natkit --netns blue tune apply"},
		{"pid:77", "nsenter -t 77 -n sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30", "natkit --netns pid:77 tune apply"},
		{"/run/x y", "nsenter --net='/run/x y' sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=30", "natkit --netns '/run/x y' tune apply"},
	} {
		s := gateway()
		examples["conntrack-table-full"](s)
		s.Netns.Name, s.Netns.Init = r.ref, r.ref == ""
		f := Judge(s)[0]
		for _, want := range []string{r.local, r.natkit, "sysctl -w net.netfilter.nf_conntrack_max=" + settingOf(f, "net.netfilter.nf_conntrack_max")} {
			if !slices.Contains(f.Remedy, want) {
				t.Errorf("%q: no %q in\n%s", r.ref, want, strings.Join(f.Remedy, "\n"))
			}
		}
		for _, set := range f.Settings {
			global := strings.HasSuffix(set.Name, "_max") || strings.HasSuffix(set.Name, "_buckets")
			if want := map[bool]string{true: "", false: r.ref}[global]; set.Netns != want {
				t.Errorf("%q: %s is set in %q, want %q", r.ref, set.Name, set.Netns, want)
			}
		}
	}
}

// What comes from a snapshot must not become a command of its own.
func TestRemedyIsQuoted(t *testing.T) {
	s := gateway()
	examples["rp-filter-drop"](s)
	s.Netns.Name = "x; touch /tmp/owned"
	for _, line := range append(Judge(s)[0].Remedy, Judge(s)[0].Verify...) {
		if !strings.HasPrefix(line, "#") && strings.Contains(strings.ReplaceAll(line, "'x; touch /tmp/owned'", ""), ";") {
			t.Errorf("a command of its own: %s", line)
		}
	}
}

func TestTableNearlyFull(t *testing.T) {
	const want = "warning conntrack-table-nearly-full"
	run(t, []row{
		{"90 %", func(s *snapshot.Snapshot) { fill(s, 235930) }, want},
		{"a thousand places left", func(s *snapshot.Snapshot) { fill(s, 261144) }, want},
		{"a thousand left, and packets refused for another reason before", func(s *snapshot.Snapshot) { fill(s, 250000); s.KernelLog.TableFullBefore = 9 }, want},
		{"filling fast", func(s *snapshot.Snapshot) { fill(s, 200000); s.Conntrack.CountStart = 180000 }, want},
		{"no dump, no counters", func(s *snapshot.Snapshot) {
			fill(s, 250000)
			s.Conntrack.Table, s.Conntrack.Stats, s.Drops, s.Counters, s.KernelLog = nil, nil, nil, nil, nil
		}, want},

		{"89 %", func(s *snapshot.Snapshot) { fill(s, 233000) }, ""},
		{"half, filling fast", func(s *snapshot.Snapshot) { fill(s, 140000); s.Conntrack.CountStart = 100000 }, ""},
		{"filling slowly", func(s *snapshot.Snapshot) { fill(s, 200000); s.Conntrack.CountStart = 199000 }, ""},
		{"shrinking", func(s *snapshot.Snapshot) { fill(s, 200000); s.Conntrack.CountStart = 230000 }, ""},
		{"filling, window not known", func(s *snapshot.Snapshot) { fill(s, 200000); s.Conntrack.CountStart = 100000; s.WindowSeconds = 0 }, ""},
		{"no limit", func(s *snapshot.Snapshot) { fill(s, 250000); s.Conntrack.Max = 0 }, ""},
	})
}

func TestTimeWait(t *testing.T) {
	waiting := func(n, entries uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			fill(s, entries)
			s.Conntrack.Table.ByState = map[string]uint64{"TIME_WAIT": n}
		}
	}
	const want = "warning time-wait-heavy"
	run(t, []row{
		{"most of a table two thirds full", waiting(150000, 170000), want},
		{"time-out short already", func(s *snapshot.Snapshot) {
			waiting(150000, 170000)(s)
			s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_time_wait"] = "30"
		}, want},
		{"most, and the table fills", waiting(90000, 95000), "advice time-wait-heavy"},
		{"most, in a table far from full", waiting(45000, 46000), ""},
		{"many, but not most", waiting(105000, 220000), ""},
		{"no dump", func(s *snapshot.Snapshot) { waiting(150000, 170000)(s); s.Conntrack.Table = nil }, ""},
		{"more of them than entries", waiting(200000, 100), ""},
	})
	s := gateway()
	waiting(150000, 170000)(s)
	if got := settingOf(Judge(s)[0], "net.netfilter.nf_conntrack_tcp_timeout_time_wait"); got != "30" {
		t.Errorf("time-out is set to %q", got)
	}
	s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_time_wait"] = "20"
	if got := Judge(s)[0].Settings; got != nil {
		t.Errorf("a short time-out is made longer: %v", got)
	}
}

func TestUnrepliedFlood(t *testing.T) {
	flood := func(unreplied, entries uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			fill(s, entries)
			s.Conntrack.Table.ByState = nil
			s.Conntrack.Table.ByStatus = map[string]uint64{"UNREPLIED": unreplied}
			s.Conntrack.Table.Sources = []snapshot.Talker{{Addr: addr("10.1.2.3"), Entries: unreplied, Unreplied: unreplied}}
		}
	}
	const want = "warning unreplied-flood"
	run(t, []row{
		{"a scan", flood(20000, 25000), want},
		{"from nobody in particular", func(s *snapshot.Snapshot) { flood(20000, 25000)(s); s.Conntrack.Table.Sources = nil }, want},
		{"others thrown out", func(s *snapshot.Snapshot) { flood(200000, 210000)(s); s.Conntrack.Stats["early_drop"] = 300 }, "critical unreplied-flood"},
		{"counters not known", func(s *snapshot.Snapshot) { flood(20000, 25000)(s); s.Conntrack.Stats = nil }, want},
		{"a third of a small table", func(s *snapshot.Snapshot) { flood(340, 400)(s); s.Conntrack.Max = 1000 }, want},
		{"most of fifty entries", flood(40, 50), ""},
		{"a little of a small table", func(s *snapshot.Snapshot) { flood(240, 400)(s); s.Conntrack.Max = 1000 }, ""},
		{"one-way telemetry", flood(3500, 5000), ""},
		{"many, but few of this table", func(s *snapshot.Snapshot) { flood(5000, 6000)(s); s.Conntrack.Max = 2_000_000 }, ""},
		{"many, but not most", flood(20000, 60000), ""},
		{"more than entries", flood(20000, 100), ""},
		{"no dump", func(s *snapshot.Snapshot) { flood(20000, 25000)(s); s.Conntrack.Table = nil }, ""},
	})
	s := gateway()
	flood(20000, 25000)(s)
	s.Conntrack.Table.Sources[0].Addr = addr("2001:db8::7")
	if got := strings.Join(Judge(s)[0].Remedy, "\n"); !strings.Contains(got, "ip6 saddr 2001:db8::7 limit rate over 100/second drop") {
		t.Errorf("IPv6 source:\n%s", got)
	}
}

func TestHash(t *testing.T) {
	const warn = "warning conntrack-hash-too-small"
	run(t, []row{
		{"chains of forty", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 1024 }, warn},
		{"filled by other namespaces", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 16384; s.Conntrack.HostObjects = 200000 }, warn},
		{"slab information not readable", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 1024; s.Conntrack.HostObjects = 0 }, warn},
		{"entries refused", func(s *snapshot.Snapshot) {
			s.Conntrack.Buckets = 1024
			s.Conntrack.Stats["chaintoolong"], s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 50, 50, 50
			s.Drops.Rows = []snapshot.Drop{drop(50, snapshot.CauseConfirm, "eth1")}
		}, "critical conntrack-hash-too-small"},
		{"a limit that can't be reached", func(s *snapshot.Snapshot) { s.Conntrack.Max = 8 << 20; s.Conntrack.Buckets = 65536 }, "advice conntrack-hash-too-small"},
		{"no limit, long chains", func(s *snapshot.Snapshot) { s.Conntrack.Max = 0; s.Conntrack.Buckets = 1024 }, warn},
		{"full with the old kernels' quarter", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 65536; s.Conntrack.HostObjects = 230000 }, ""},
		{"eight times the buckets, as the kernel does it", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 32768 }, ""},
		{"buckets not known", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 0 }, ""},
	})
	s := gateway()
	s.Conntrack.Buckets = 1024
	if got := settingOf(Judge(s)[0], "net.netfilter.nf_conntrack_buckets"); got != "262144" {
		t.Errorf("buckets are set to %q", got)
	}
	s.Host.MemoryBytes = 10 << 20
	if got := settingOf(Judge(s)[0], "net.netfilter.nf_conntrack_buckets"); got != "131072" {
		t.Errorf("buckets on a machine with 10 MiB are set to %q", got)
	}
}

func TestSNATPorts(t *testing.T) {
	narrow := func(s *snapshot.Snapshot) { examples["snat-ports-exhausted"](s) }
	quiet := func(s *snapshot.Snapshot) {
		s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 0, 0
		s.Drops.Rows = nil
	}
	wide := func(used uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Conntrack.Table.SNATPorts[0].Used = used }
	}
	failed := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = n, n
		}
	}
	both := func(fs ...func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			for _, f := range fs {
				f(s)
			}
		}
	}
	const full, warn = "critical snat-ports-exhausted", "warning snat-ports-exhausted"
	run(t, []row{
		{"four ports, eight flows refused", narrow, full},
		{"counters not known, traced", both(narrow, func(s *snapshot.Snapshot) { s.Conntrack.Stats = nil }), full},
		{"all ports in use, flows refused", both(wide(64000), failed(3)), full},
		{"all ports in use", wide(60000), warn},
		{"no dump, many refused", both(failed(50), func(s *snapshot.Snapshot) { s.Conntrack.Table = nil }), warn},
		{"no dump, rules not known", both(failed(50), func(s *snapshot.Snapshot) { s.Conntrack.Table = nil; s.Chains = nil }), warn},
		{"rules not known, many refused", both(failed(50), func(s *snapshot.Snapshot) { s.Chains = nil }), warn},
		{"no facts but the tracer's", func(s *snapshot.Snapshot) {
			s.Conntrack, s.Chains = nil, nil
			s.Drops.Rows = []snapshot.Drop{drop(50, snapshot.CauseConfirm, "eth1")}
		}, warn},

		{"a narrow rule beside a wide one, seen", both(narrow, func(s *snapshot.Snapshot) {
			s.Conntrack.Table.SNATPorts[0].Used, s.Conntrack.Table.SNATPorts[0].MaxPort = 24, 60547
			s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 600, 600
			s.Drops.Rows = []snapshot.Drop{drop(600, snapshot.CauseConfirm, "eth0", sample("udp 198.51.100.1:5003 -> 203.0.113.53:53 (flow 192.168.1.2:42306 -> 203.0.113.53:53)"))}
		}), full},
		{"a narrow rule beside a wide one, not seen", both(narrow, quiet, failed(600), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.SNATPorts[0].Used, s.Conntrack.Table.SNATPorts[0].MaxPort = 24, 60547
		}), warn},

		{"a narrow rule beside a wide one, few failures", both(narrow, quiet, failed(4), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.SNATPorts[0].Used, s.Conntrack.Table.SNATPorts[0].MaxPort = 24, 60547
		}), ""},
		{"two processors chose the same port", failed(3), ""},
		{"many such races, ports free", failed(300), "critical snat-port-race"},
		{"one service on one port", both(narrow, quiet, func(s *snapshot.Snapshot) {
			chain(s, "postrouting").SNATRanges = []snapshot.PortRange{{Min: 5060, Max: 5060}}
			s.Conntrack.Table.SNATPorts[0] = snapshot.SNATUse{Protocol: "udp", Outside: addr("198.51.100.1"), Dest: snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.5:5060")), Used: 1, MinPort: 5060, MaxPort: 5060}
		}), ""},
		{"half the ports", wide(32000), ""},
		{"no dump, a few refused", both(failed(3), func(s *snapshot.Snapshot) { s.Conntrack.Table = nil }), ""},
		{"no dump, nothing is translated", both(failed(50), func(s *snapshot.Snapshot) { s.Conntrack.Table = nil; s.Chains = s.Chains[1:] }), ""},
		{"absurd use", func(s *snapshot.Snapshot) {
			s.Conntrack.Table.SNATPorts = []snapshot.SNATUse{{Used: 1 << 60, MinPort: 9, MaxPort: 3}, {}}
			failed(50)(s)
		}, "warning snat-port-race"},
	})

	// The rule that cures, by who keeps the chain.
	for _, r := range []struct {
		backend, family, table, name, want string
	}{
		{"nft", "ip", "nat", "postrouting", "nft 'insert rule ip nat postrouting ip daddr 203.0.113.53 udp dport 53 snat to 198.51.100.1:1024-65535'"},
		{"nft", "inet", "mynat", "out", "nft 'insert rule inet mynat out ip daddr 203.0.113.53 udp dport 53 snat ip to 198.51.100.1:1024-65535'"},
		{"nft", "ip", "nat", "POSTROUTING", "iptables-nft -t nat -I POSTROUTING -p udp -d 203.0.113.53 --dport 53 -j SNAT --to-source 198.51.100.1:1024-65535"},
		{"iptables-legacy", "ip", "nat", "POSTROUTING", "iptables-legacy -t nat -I POSTROUTING -p udp -d 203.0.113.53 --dport 53 -j SNAT --to-source 198.51.100.1:1024-65535"},
	} {
		s := gateway()
		narrow(s)
		c := chain(s, "postrouting")
		c.Backend, c.Family, c.Table, c.Name = r.backend, r.family, r.table, r.name
		if f := Judge(s)[0]; !slices.Contains(f.Remedy, r.want) {
			t.Errorf("no %q in\n%s", r.want, strings.Join(f.Remedy, "\n"))
		}
	}
}
