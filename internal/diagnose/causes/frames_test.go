// SPDX-License-Identifier: Apache-2.0

package causes

// Causes that show in frames alone, and connections that agree on further ones.

import (
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

func init() {
	examples["wrong-destination-mac"] = func(s *snapshot.Snapshot) {
		s.Frames = &snapshot.Frames{Astray: []snapshot.AstrayFrames{{Interface: "eth1", From: "02:00:00:00:00:14", To: "02:00:00:00:0e:ad",
			Source: addr("192.168.1.20"), Dest: addr("203.0.113.80"), Count: 40}}}
	}
	examples["vlan-mismatch"] = func(s *snapshot.Snapshot) {
		s.Frames = &snapshot.Frames{Asked: []snapshot.ARPQuestion{{Interface: "eth1", VLAN: 30, Addr: addr("192.168.1.1"), Asker: addr("192.168.1.20"), MAC: "02:00:00:00:00:14", Count: 10}}}
	}
	examples["duplicate-address"] = func(s *snapshot.Snapshot) {
		s.Frames = &snapshot.Frames{Claims: []snapshot.AddressClaim{{Interface: "eth1", Addr: addr("192.168.1.1"), MAC: "02:00:00:00:00:99", Count: 1, Own: true}}}
	}
	examples["arp-refused"] = func(s *snapshot.Snapshot) {
		s.Frames = &snapshot.Frames{Asked: []snapshot.ARPQuestion{{Interface: "eth1", Addr: addr("192.168.1.1"), Asker: addr("192.168.1.20"), MAC: "02:00:00:00:00:14", Count: 8}}}
		s.Sysctls["net.ipv4.conf.eth1.arp_ignore"] = "8"
	}
	examples["conntrack-helper-missing"] = func(s *snapshot.Snapshot) {
		control := netip.MustParseAddrPort("203.0.113.80:21")
		s.Conntrack.Table.Controls = []snapshot.ControlUse{{Protocol: "tcp", Source: addr("192.168.1.20"), Seen: addr("198.51.100.1"), Dest: snapshot.EndpointOf(control), Target: snapshot.EndpointOf(control), Entries: 1}}
		row := drop(4, snapshot.CauseNone, "eth0", sample("tcp 203.0.113.80:20 -> 198.51.100.1:40100 SYN"))
		row.Reason = "NO_SOCKET"
		s.Drops.Rows = append(s.Drops.Rows, row)
	}
}

// with is an example with something else about it.
func with(code string, change func(s *snapshot.Snapshot)) func(s *snapshot.Snapshot) {
	return func(s *snapshot.Snapshot) {
		examples[code](s)
		change(s)
	}
}

func TestWrongDestinationMAC(t *testing.T) {
	astray := func(change func(a *snapshot.AstrayFrames)) func(s *snapshot.Snapshot) {
		return with("wrong-destination-mac", func(s *snapshot.Snapshot) { change(&s.Frames.Astray[0]) })
	}
	const warn = "warning wrong-destination-mac"
	run(t, []row{
		{"a client with a stale gateway", astray(func(*snapshot.AstrayFrames) {}), warn},
		{"for an address of this machine", astray(func(a *snapshot.AstrayFrames) { a.Dest = addr("192.168.1.1") }), warn},
		{"nearly all that came in", astray(func(a *snapshot.AstrayFrames) { a.Count = 90_000_000 }), "critical wrong-destination-mac"},
		{"a few that a switch flooded", astray(func(a *snapshot.AstrayFrames) { a.Count = 3 }), ""},
		{"somebody has that hardware address", astray(func(a *snapshot.AstrayFrames) { a.Known = true }), ""},
		{"between two others of the network", astray(func(a *snapshot.AstrayFrames) { a.Dest = addr("192.168.1.40") }), ""},
		{"a group", astray(func(a *snapshot.AstrayFrames) { a.Dest = addr("224.0.0.251") }), ""},
		{"a host that routes nothing", with("wrong-destination-mac", func(s *snapshot.Snapshot) {
			forwarding(s, "0")
			s.Chains, s.Counters["Ip.ForwDatagrams"] = nil, 0
		}), ""},
		{"damaged", astray(func(a *snapshot.AstrayFrames) { a.Count, a.Dest = 1<<63, netip.Addr{} }), ""},
	})
}

func TestVLANMismatch(t *testing.T) {
	run(t, []row{
		{"tagged frames for this machine", func(s *snapshot.Snapshot) {
			examples["wrong-destination-mac"](s)
			s.Frames.Astray[0].VLAN = 30
		}, "warning vlan-mismatch"},
		{"tagged ARP", examples["vlan-mismatch"], "warning vlan-mismatch"},
		{"few", with("vlan-mismatch", func(s *snapshot.Snapshot) { s.Frames.Asked[0].Count = 0 }), ""},
		{"answered after all", with("vlan-mismatch", func(s *snapshot.Snapshot) { s.Frames.Asked[0].Answered = 10 }), ""},
	})
}

func TestDuplicateAddress(t *testing.T) {
	claims := func(c ...snapshot.AddressClaim) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) { s.Frames = &snapshot.Frames{Claims: c} }
	}
	router := func(mac string, n uint64) snapshot.AddressClaim {
		return snapshot.AddressClaim{Interface: "eth0", Addr: addr("198.51.100.254"), MAC: mac, Count: n, Router: true}
	}
	client := func(mac string, replies uint64) snapshot.AddressClaim {
		return snapshot.AddressClaim{Interface: "eth1", Addr: addr("192.168.1.10"), MAC: mac, Count: max(replies, 1), Replies: replies}
	}
	both := claims(client("02:00:00:00:00:01", 1), client("02:00:00:00:00:02", 1))
	run(t, []row{
		{"a client's address, of which nothing is lost", both, "advice duplicate-address"},
		{"a client that moved", claims(client("02:00:00:00:00:01", 1), client("02:00:00:00:00:02", 0)), ""},
		{"the address of a client that no reply reaches", func(s *snapshot.Snapshot) {
			with("clients-unreached", func(s *snapshot.Snapshot) {
				c := client("02:00:00:00:00:01", 1)
				c.Addr = s.Conntrack.Table.Halfway[0].Source
				d := c
				d.MAC = "02:00:00:00:00:02"
				s.Frames = &snapshot.Frames{Claims: []snapshot.AddressClaim{c, d}}
			})(s)
		}, "critical duplicate-address"},
		{"the address of a backend that is silent", func(s *snapshot.Snapshot) {
			with("backend-silent", func(s *snapshot.Snapshot) {
				c := client("02:00:00:00:00:01", 1)
				c.Addr = s.Conntrack.Refused[0].Target.Addr()
				d := c
				d.MAC = "02:00:00:00:00:02"
				s.Frames = &snapshot.Frames{Claims: []snapshot.AddressClaim{c, d}}
			})(s)
		}, "critical duplicate-address"},
		{"this machine's address", examples["duplicate-address"], "critical duplicate-address"},
		{"its router's", claims(router("02:00:00:00:00:01", 3), router("02:00:00:00:00:02", 2)), "warning duplicate-address"},
		{"a router that moved", claims(router("02:00:00:00:00:01", 3), router("02:00:00:00:00:02", 1)), ""},
		{"one router", claims(router("02:00:00:00:00:01", 9)), ""},
		{"a cluster's multicast hardware address", with("duplicate-address", func(s *snapshot.Snapshot) { s.Frames.Claims[0].MAC = "01:00:5e:00:00:99" }), ""},
		{"a virtual network that replies for all", with("duplicate-address", func(s *snapshot.Snapshot) { s.Frames.Claims[0].MAC = "12:34:56:78:9a:bc" }), ""},
		{"others' addresses", with("duplicate-address", func(s *snapshot.Snapshot) {
			s.Frames.Claims[0].Own, s.Frames.Claims[0].Addr = false, addr("192.168.1.77")
		}), ""},
		{"damaged", claims(snapshot.AddressClaim{Own: true, Count: 1}, snapshot.AddressClaim{Router: true, Count: 1 << 63, MAC: "x"}), ""},
	})
}

func TestARPRefused(t *testing.T) {
	asked := func(change func(q *snapshot.ARPQuestion)) func(s *snapshot.Snapshot) {
		return with("arp-refused", func(s *snapshot.Snapshot) { change(&s.Frames.Asked[0]) })
	}
	run(t, []row{
		{"by arp_ignore", asked(func(*snapshot.ARPQuestion) {}), "critical arp-refused"},
		{"an address of another interface, asked from this network", asked(func(q *snapshot.ARPQuestion) { q.Addr = addr("198.51.100.1") }), "warning arp-refused"},
		{"and from no network of it", asked(func(q *snapshot.ARPQuestion) { q.Addr, q.Asker = addr("198.51.100.1"), addr("10.9.9.9") }), ""},
		{"answered", asked(func(q *snapshot.ARPQuestion) { q.Answered = 1 }), ""},
		{"twice", asked(func(q *snapshot.ARPQuestion) { q.Count = 1 }), ""},
		{"kept quiet on loopback", with("arp-refused", func(s *snapshot.Snapshot) {
			s.Interfaces = append(s.Interfaces, snapshot.Interface{Name: "lo", Kind: "device", Up: true, Addresses: prefixes("192.168.1.200/32")})
			s.Frames.Asked[0].Addr = addr("192.168.1.200")
		}), ""},
		{"nobody's", asked(func(q *snapshot.ARPQuestion) { q.Addr = addr("192.168.1.66") }), ""},
	})
}

// What keeps the reply back is named, and taken back.
func TestARPRefusedBy(t *testing.T) {
	for what, change := range map[string]func(s *snapshot.Snapshot){
		"arp_ignore": func(*snapshot.Snapshot) {},
		"arp_filter": func(s *snapshot.Snapshot) { s.Sysctls["net.ipv4.conf.all.arp_filter"] = "1" },
		"table arp f": func(s *snapshot.Snapshot) {
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "arp", Table: "f", Name: "in", Hook: "input", Type: "filter", Policy: "drop"})
		},
	} {
		s := gateway()
		with("arp-refused", change)(s)
		found := Judge(s)
		var text strings.Builder
		for _, e := range found[0].Evidence {
			text.WriteString(e.What + "\n")
		}
		if found[0].Code != "arp-refused" || !strings.Contains(text.String(), what) {
			t.Errorf("%s is not in the evidence of %s:\n%s", what, found[0].Code, text.String())
		}
	}
}

func TestRoutingLoopOfTheOther(t *testing.T) {
	circle := func(change func(c *snapshot.Circle, r *snapshot.RouteAnswer)) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			c := snapshot.Circle{Interface: "eth0", Source: addr("192.168.1.20"), Dest: addr("10.71.0.1"), Packets: 12, Sample: "udp 192.168.1.20:4000 -> 10.71.0.1:53"}
			r := snapshot.RouteAnswer{In: "eth0", Source: addr("192.168.1.20"), Dest: addr("10.71.0.1"), Answer: snapshot.RouteFound, Out: "eth0"}
			change(&c, &r)
			s.Frames, s.Routes = &snapshot.Frames{Circles: []snapshot.Circle{c}}, []snapshot.RouteAnswer{r}
		}
	}
	run(t, []row{
		{"they expire on the other router", circle(func(*snapshot.Circle, *snapshot.RouteAnswer) {}), "critical routing-loop"},
		{"few", circle(func(c *snapshot.Circle, _ *snapshot.RouteAnswer) { c.Packets = 3 }), "warning routing-loop"},
		{"the route leads on by now", circle(func(_ *snapshot.Circle, r *snapshot.RouteAnswer) { r.Out = "eth1" }), ""},
		{"damaged", circle(func(c *snapshot.Circle, _ *snapshot.RouteAnswer) { c.Packets = 1 << 63 }), ""},
	})
}

func TestHelperMissing(t *testing.T) {
	dropped := func(text string) func(s *snapshot.Snapshot) {
		return with("conntrack-helper-missing", func(s *snapshot.Snapshot) { s.Drops.Rows[len(s.Drops.Rows)-1].Samples = []string{text} })
	}
	control := func(port uint16, protocol, text string) func(s *snapshot.Snapshot) {
		return with("conntrack-helper-missing", func(s *snapshot.Snapshot) {
			c := &s.Conntrack.Table.Controls[0]
			c.Protocol, c.Dest, c.Target = protocol, snapshot.EndpointOf(netip.AddrPortFrom(c.Dest.Addr(), port)), snapshot.EndpointOf(netip.AddrPortFrom(c.Dest.Addr(), port))
			s.Drops.Rows[len(s.Drops.Rows)-1].Samples = []string{text}
		})
	}
	const warn = "warning conntrack-helper-missing"
	run(t, []row{
		{"FTP, active", examples["conntrack-helper-missing"], warn},
		{"FTP, active, once", with("conntrack-helper-missing", func(s *snapshot.Snapshot) { s.Drops.Rows[len(s.Drops.Rows)-1].Count = 1 }), warn},
		{"a scan of others beside one packet from the server", with("conntrack-helper-missing", func(s *snapshot.Snapshot) {
			row := &s.Drops.Rows[len(s.Drops.Rows)-1]
			row.Count, row.Samples = 3, []string{"tcp 203.0.113.80:40000 -> 198.51.100.1:45000 SYN", "tcp 203.0.113.7:40000 -> 198.51.100.1:23 SYN", "tcp 203.0.113.8:40000 -> 198.51.100.1:23 SYN"}
		}), ""},
		{"FTP, passive, to the server's port", dropped("tcp 192.168.1.20:40000 -> 203.0.113.80:45000 SYN"), warn},
		{"TFTP", control(69, "udp", "udp 203.0.113.80:40123 -> 198.51.100.1:40000"), warn},
		{"SIP", control(5060, "udp", "udp 203.0.113.80:17000 -> 198.51.100.1:17002"), warn},
		{"PPTP", control(1723, "tcp", "gre 203.0.113.80 -> 198.51.100.1"), warn},
		{"from another host", dropped("tcp 203.0.113.81:20 -> 198.51.100.1:40100 SYN"), ""},
		{"in the middle of a connection", dropped("tcp 203.0.113.80:45000 -> 198.51.100.1:40100 ACK"), ""},
		{"it has a helper", with("conntrack-helper-missing", func(s *snapshot.Snapshot) { s.Conntrack.Table.Controls[0].Helped = 1 }), ""},
		{"a port that has none", control(8080, "tcp", "tcp 203.0.113.80:45000 -> 198.51.100.1:40100 SYN"), ""},
	})
}

// Replies over UDP that come when the entry is gone, and replies in another zone.
func TestUDPReplies(t *testing.T) {
	const server = "203.0.113.53"
	late := func(cause snapshot.NATCause, reason string, seconds string, samples ...string) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Sysctls["net.netfilter.nf_conntrack_udp_timeout_stream"] = seconds
			row := drop(40, cause, "eth0", sample(samples[0]))
			row.Reason, row.Samples = reason, samples
			s.Drops.Rows = append(s.Drops.Rows, row)
		}
	}
	talks := func(change func(s *snapshot.Snapshot), unreplied uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			change(s)
			t := s.Conntrack.Table
			t.Destinations = append(t.Destinations, snapshot.Talker{Addr: addr(server), Entries: 10, Unreplied: unreplied})
			t.DestPorts = append(t.DestPorts, snapshot.PortUse{Protocol: "udp", Port: 5000, Entries: 10})
		}
	}
	reply := "udp " + server + ":5000 -> 198.51.100.1:40000"
	noSocket := late(snapshot.CauseNone, "NO_SOCKET", "2", reply)
	const short, lost = "critical established-timeout-short", "critical answers-lost"
	run(t, []row{
		{"late, the flow is there again", talks(noSocket, 0), short},
		{"late, and nothing of it in the table", func(s *snapshot.Snapshot) {
			noSocket(s)
			s.Leaving = []snapshot.Leaving{{Interface: "eth0", Others: 4, Datagrams: []snapshot.Endpoint{snapshot.EndpointOf(netip.MustParseAddrPort(server + ":5000"))}}}
		}, short},
		{"late, dropped by a rule", talks(late(snapshot.CauseRule, "NETFILTER_DROP", "2", reply), 0), short},
		{"late, with the kernel's time-outs", talks(late(snapshot.CauseNone, "NO_SOCKET", "120", reply), 0), ""},
		{"a scan of ports, from one that scanners have", late(snapshot.CauseNone, "NO_SOCKET", "2", "udp "+server+":45000 -> 198.51.100.1:40000"), ""},
		{"a scan from a host that clients talk to", talks(late(snapshot.CauseNone, "NO_SOCKET", "2", "udp "+server+":45000 -> 198.51.100.1:40000"), 0), ""},
		{"no reply in this zone, and the kernel's time-outs", talks(late(snapshot.CauseNone, "NO_SOCKET", "120", reply), 10), lost},
		{"most are answered", talks(late(snapshot.CauseNone, "NO_SOCKET", "120", reply), 5), ""},
	})
}

// What does not answer here may answer and send its replies another way: that is asked before anything else.
func TestReturnPath(t *testing.T) {
	silent := func(snat bool) *snapshot.Snapshot {
		s := gateway()
		examples["backend-silent"](s)
		s.Conntrack.Refused = nil
		target := netip.MustParseAddrPort("192.168.1.80:80")
		dest := netip.MustParseAddrPort("198.51.100.1:8080")
		s.Conntrack.Table.Targets = []snapshot.TargetUse{{Protocol: "tcp", Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(target), Unanswered: 40}}
		addUnanswered(s, snapshot.UnansweredUse{Protocol: "tcp", Source: addr("203.0.113.7"), Dest: snapshot.EndpointOf(dest), Target: snapshot.EndpointOf(target), SNAT: snat, Entries: 40, Recent: 40})
		return s
	}
	remedy := func(s *snapshot.Snapshot) (Finding, string) {
		found := Judge(s)
		if len(found) == 0 || found[0].Code != "backend-silent" {
			t.Fatalf("want backend-silent first: %s", titles(found))
		}
		return found[0], strings.Join(found[0].Remedy, "\n")
	}
	f, text := remedy(silent(false))
	back, listens := strings.Index(text, "ip route get 203.0.113.7"), strings.Index(text, "is a program listening")
	if back < 0 || listens < back || !strings.Contains(text, "must lead to 192.168.1.1;") {
		t.Errorf("the return path does not come before the program that listens:\n%s", text)
	}
	if !strings.Contains(f.Title, "no SYN-ACK arrives here") {
		t.Error(f.Title)
	}
	if _, text := remedy(silent(true)); strings.Contains(text, "route get") {
		t.Errorf("the backend sees this machine's own address, and yet:\n%s", text)
	}
	s := silent(false)
	s.Frames = &snapshot.Frames{Astray: []snapshot.AstrayFrames{{Interface: "eth1", From: "02:00:00:00:00:80", To: "02:00:00:00:00:fe",
		Source: addr("192.168.1.80"), Dest: addr("203.0.113.7"), Count: 4, Known: true}}}
	if f, text := remedy(s); !strings.Contains(f.Title, "another machine") || strings.Contains(text, "listening") {
		t.Errorf("%s\n%s", f.Title, text)
	}
}

// A hop whose ARP replies come in is not said to be silent.
func TestNextHopReplies(t *testing.T) {
	s := gateway()
	examples["next-hop-silent"](s)
	s.Frames = &snapshot.Frames{Claims: []snapshot.AddressClaim{{Interface: "eth0", Addr: addr("198.51.100.254"), MAC: "02:00:00:00:00:fe", Count: 9, Replies: 9, Router: true}}}
	f := Judge(s)[0]
	if f.Code != "next-hop-silent" || !strings.Contains(f.Title, "replies to ARP but is ignored") || !strings.Contains(strings.Join(f.Remedy, "\n"), "nft list ruleset arp") {
		t.Errorf("%s: %s: %q", f.Code, f.Title, f.Remedy)
	}
}

// An interface that lost its carrier is the cause of what its next hops do not answer.
func TestLinkDownExplainsSilence(t *testing.T) {
	s := gateway()
	examples["next-hop-silent"](s)
	link(s, "eth0").NoCarrier = true
	found := Judge(s)
	if found[0].Code != "link-down" || found[0].Severity != Critical || len(found) > 1 && found[1].Code == "next-hop-silent" {
		t.Error(titles(found))
	}
}
