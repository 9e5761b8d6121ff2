// SPDX-License-Identifier: Apache-2.0

package causes

// Causes in the entries of the table beyond their number, and in who reads them.

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["syn-flood"] = func(s *snapshot.Snapshot) {
		fill(s, 60000)
		t := s.Conntrack.Table
		t.ByState = map[string]uint64{"ESTABLISHED": 4000, "SYN_RECV": 45000, "SYN_SENT": 2000}
		t.ByProtocol = map[string]uint64{"tcp": 55000, "udp": 5000}
		t.Destinations = []snapshot.Talker{{Addr: addr("192.168.1.80"), Entries: 50000, Unreplied: 2000}}
		s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_syn_recv"] = "60"
		s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_syn_sent"] = "120"
	}
	examples["conntrack-early-drop"] = func(s *snapshot.Snapshot) {
		fill(s, 262100)
		s.Conntrack.Count = 262144
		s.Conntrack.Stats["early_drop"] = 900
		s.Conntrack.Table.ByStatus = map[string]uint64{"ASSURED": 200000}
	}
	examples["conntrack-chain-too-long"] = func(s *snapshot.Snapshot) {
		s.Conntrack.Stats["chaintoolong"], s.Conntrack.Stats["insert_failed"], s.Conntrack.Stats["drop"] = 8, 8, 8
		s.Drops.Rows = append(s.Drops.Rows, drop(8, snapshot.CauseConfirm, "eth1", sample("udp 10.0.0.5:4789 -> 10.0.0.6:4789")))
	}
	examples["established-timeout-long"] = func(s *snapshot.Snapshot) {
		fill(s, 150000)
		s.Conntrack.Table.Idle = 120000
		s.Owners = []snapshot.Owner{{Setting: "net.netfilter.nf_conntrack_tcp_timeout_established", Value: "432000", Who: "kube-proxy", Where: "process 7 (kube-proxy)"}}
	}
	examples["close-wait-heavy"] = func(s *snapshot.Snapshot) {
		fill(s, 150000)
		s.Conntrack.Table.ByState = map[string]uint64{"CLOSE_WAIT": 130000, "ESTABLISHED": 20000}
		s.Sysctls["net.netfilter.nf_conntrack_tcp_timeout_close_wait"] = "3600"
		s.Owners = []snapshot.Owner{{Setting: "net.netfilter.nf_conntrack_tcp_timeout_close_wait", Value: "3600", Who: "kube-proxy", Where: "process 7 (kube-proxy)"}}
	}
	examples["conntrack-accounting"] = func(s *snapshot.Snapshot) {
		s.Sysctls["net.netfilter.nf_conntrack_acct"], s.Sysctls["net.netfilter.nf_conntrack_timestamp"] = "1", "1"
	}
}

// also is an example with something changed in it.
func also(code string, changes ...func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
	return func(s *snapshot.Snapshot) {
		examples[code](s)
		for _, change := range changes {
			change(s)
		}
	}
}

// clients are so many hosts with so many half-open connections each.
func clients(hosts, halfOpen int) (out []snapshot.Talker) {
	for i := range hosts {
		out = append(out, snapshot.Talker{Addr: addr(fmt.Sprintf("192.168.1.%d", 100+i)), Entries: uint64(halfOpen), HalfOpen: uint64(halfOpen)})
	}
	return out
}

// unconfirmed has such hosts not confirm connections that a server replied to.
func unconfirmed(hosts, each int) func(s *snapshot.Snapshot) {
	return func(s *snapshot.Snapshot) {
		t := s.Conntrack.Table
		t.Sources = clients(hosts, each)
		to := snapshot.EndpointOf(netip.MustParseAddrPort("203.0.113.80:443"))
		for _, c := range t.Sources {
			t.Halfway = append(t.Halfway, snapshot.UnansweredUse{Protocol: "tcp", Source: c.Addr, SNAT: true, Dest: to, Target: to, Entries: c.Entries, Recent: c.Entries / 2})
		}
	}
}

func TestSYNFlood(t *testing.T) {
	const warn = "warning syn-flood"
	states := func(open, answered, silent uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByState = map[string]uint64{"ESTABLISHED": open, "SYN_RECV": answered, "SYN_SENT": silent}
		}
	}
	run(t, []row{
		{"answered, never finished", also("syn-flood"), warn},
		{"a server's queue is full", also("syn-flood", func(s *snapshot.Snapshot) { s.Counters["TcpExt.TCPReqQFullDrop"] = 10 }), "critical syn-flood"},
		{"others thrown out", also("syn-flood", func(s *snapshot.Snapshot) { s.Conntrack.Stats["early_drop"] = 10 }), "critical syn-flood"},
		{"nobody answers, from everywhere to one", also("syn-flood", states(4000, 0, 47000), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByStatus["UNREPLIED"] = 47000
		}), warn},
		{"a destination that replies to nobody", also("syn-flood", states(4000, 0, 47000), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByStatus["UNREPLIED"] = 47000
			s.Conntrack.Table.Destinations[0] = snapshot.Talker{Addr: addr("192.168.1.80"), Entries: 47000, Unreplied: 47000}
		}), "warning unreplied-flood"},
		{"nobody answers one source: a scan", also("syn-flood", states(4000, 0, 47000), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByStatus["UNREPLIED"] = 47000
			s.Conntrack.Table.Sources[0] = snapshot.Talker{Addr: addr("192.168.1.66"), Entries: 47000, Unreplied: 46000}
		}), "warning unreplied-flood"},
		{"a few clients of a server that does not reply any more", also("syn-flood", states(4000, 0, 47000), func(s *snapshot.Snapshot) {
			s.Conntrack.Table.ByStatus["UNREPLIED"] = 47000
			s.Conntrack.Table.Sources = clients(10, 4700)
		}), "warning unreplied-flood"},
		{"from the addresses of a network", also("syn-flood", func(s *snapshot.Snapshot) { s.Conntrack.Table.Sources = clients(snapshot.TopN, 190) }), warn},
		{"a busy host beside it", also("syn-flood", func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Sources = append([]snapshot.Talker{{Addr: addr("192.168.1.20"), Entries: 5000, HalfOpen: 10}}, clients(snapshot.TopN-1, 190)...)
		}), warn},
		{"a few clients that do not confirm", also("syn-flood", unconfirmed(10, 4500)), "critical clients-unreached"},
		{"a few clients, by a file of an older version", also("syn-flood", unconfirmed(10, 4500), func(s *snapshot.Snapshot) {
			for i := range s.Conntrack.Table.Sources {
				s.Conntrack.Table.Sources[i].HalfOpen = 0
			}
		}), "critical clients-unreached"},
		{"a network of clients whose replies are led astray", also("syn-flood", unconfirmed(snapshot.TopN, 190), func(s *snapshot.Snapshot) {
			s.Routes = []snapshot.RouteAnswer{{In: "eth0", Source: addr("203.0.113.80"), Dest: addr("192.168.1.100"), Answer: snapshot.RouteFound, Out: "eth0", Table: 77}}
		}), "critical clients-unreached"},
		{"a network of forged addresses", also("syn-flood", unconfirmed(snapshot.TopN, 190), func(s *snapshot.Snapshot) {
			s.Routes = []snapshot.RouteAnswer{{In: "eth0", Source: addr("203.0.113.80"), Dest: addr("192.168.1.100"), Answer: snapshot.RouteFound, Out: "eth1", Table: 254}}
		}), warn},
		{"a busy service", also("syn-flood", states(40000, 5000, 1000)), ""},
		{"few", also("syn-flood", states(100, 2000, 1000)), ""},
		{"more than entries", also("syn-flood", states(0, 1<<50, 1<<50)), ""},
	})
	for _, c := range []struct {
		name   string
		change func(s *snapshot.Snapshot)
		want   string
	}{
		{"a server behind", also("syn-flood"), "nft 'add rule ip natkit-synproxy forward ip daddr 192.168.1.80 meta l4proto tcp ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm'"},
		{"a server here", also("syn-flood", func(s *snapshot.Snapshot) { s.Conntrack.Table.Destinations[0].Addr = addr("198.51.100.1") }), "add chain ip natkit-synproxy input { type filter hook input priority filter; }"},
		{"published from here", also("syn-flood", func(s *snapshot.Snapshot) {
			s.Conntrack.Table.Destinations[0].Addr = addr("198.51.100.1")
			s.Chains[0].NATRules["dnat"] = 1
		}), "limit rate over 1000/second drop"},
	} {
		s := gateway()
		c.change(s)
		if got := strings.Join(Judge(s)[0].Remedy, "\n"); !strings.Contains(got, c.want) {
			t.Errorf("%s: no %q in\n%s", c.name, c.want, got)
		}
	}
}

func TestEarlyDrop(t *testing.T) {
	run(t, []row{
		{"many", also("conntrack-early-drop"), "critical conntrack-early-drop"},
		{"a few", func(s *snapshot.Snapshot) { s.Conntrack.Stats["early_drop"] = 3 }, "warning conntrack-early-drop"},
		{"full and refusing as well", also("conntrack-early-drop", func(s *snapshot.Snapshot) { s.Conntrack.Stats["drop"] = 5000 }), "critical conntrack-table-full"},
		{"counter that went backwards", func(s *snapshot.Snapshot) { s.Conntrack.Stats["early_drop"] = ^uint64(0) - 3 }, ""},
	})
}

func TestChainTooLong(t *testing.T) {
	run(t, []row{
		{"refused beside short chains", also("conntrack-chain-too-long"), "critical conntrack-chain-too-long"},
		{"one", func(s *snapshot.Snapshot) { s.Conntrack.Stats["chaintoolong"] = 1 }, "warning conntrack-chain-too-long"},
		{"long chains everywhere", also("conntrack-chain-too-long", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 1024 }), "critical conntrack-hash-too-small"},
		{"buckets not known", also("conntrack-chain-too-long", func(s *snapshot.Snapshot) { s.Conntrack.Buckets = 0 }), ""},
	})
}

func TestEstablishedTimeoutLong(t *testing.T) {
	idle := func(n uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { fill(s, 150000); s.Conntrack.Table.Idle = n }
	}
	const name = "net.netfilter.nf_conntrack_tcp_timeout_established"
	run(t, []row{
		{"most of the table", idle(120000), "warning established-timeout-long"},
		{"a quarter of it", idle(60000), "advice established-timeout-long"},
		{"idle in a table with room", idle(30000), ""},
		{"a day already", also("established-timeout-long", func(s *snapshot.Snapshot) { s.Sysctls[name] = "86400" }), ""},
		{"keepalive that takes a week", also("established-timeout-long", func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.tcp_keepalive_time"] = "604800" }), ""},
		{"time-out not known", also("established-timeout-long", func(s *snapshot.Snapshot) { delete(s.Sysctls, name) }), ""},
		{"more than entries", also("established-timeout-long", func(s *snapshot.Snapshot) { s.Conntrack.Table.Idle = 1 << 50 }), ""},
	})
	s := gateway()
	idle(120000)(s)
	s.Sysctls["net.ipv4.tcp_keepalive_time"] = "100000"
	if got := settingOf(Judge(s)[0], name); got != "100735" { // 100000 + 9 * 75 + 60
		t.Errorf("time-out is set to %s", got)
	}
}

func TestCloseWait(t *testing.T) {
	const name = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
	run(t, []row{
		{"most of the table", also("close-wait-heavy"), "warning close-wait-heavy"},
		{"a quarter of it", also("close-wait-heavy", func(s *snapshot.Snapshot) { s.Conntrack.Table.ByState["CLOSE_WAIT"] = 60000 }), "advice close-wait-heavy"},
		{"with the kernel's time-out", also("close-wait-heavy", func(s *snapshot.Snapshot) { s.Sysctls[name] = "60" }), ""},
		{"kube-proxy's time-out in a table with room", func(s *snapshot.Snapshot) { s.Sysctls[name] = "3600" }, ""},
	})
}

func TestAccounting(t *testing.T) {
	const want = "advice conntrack-accounting"
	run(t, []row{
		{"both", also("conntrack-accounting"), want},
		{"time stamps", func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_timestamp"] = "1" }, want},
		{"in a small table", also("conntrack-accounting", func(s *snapshot.Snapshot) { s.Conntrack.Count = 500 }), ""},
		{"off", func(s *snapshot.Snapshot) { s.Sysctls["net.netfilter.nf_conntrack_acct"] = "0" }, ""},
	})
}
