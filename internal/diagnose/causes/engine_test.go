// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"slices"
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// withEngine has natkit's engine translate on the gateway in place of the kernel.
func withEngine(s *snapshot.Snapshot) *snapshot.Engine {
	s.Engine = &snapshot.Engine{
		Kind: "ebpf", Flags: []string{"--attach", "xdp", "--bypass"}, File: "/etc/natkit.yaml", Rules: 3, Sessions: 600, SessionsMax: 1000, Mappings: 500, MappingsMax: 1000, PerSource: 200, SourcesMax: 100,
		Packets:   map[string]uint64{"translated-in": 40_000, "translated-out": 50_000, "created": 300, "filtered": 12},
		Addresses: []snapshot.EngineAddress{{Addr: addr("198.51.100.9"), Ports: snapshot.PortRange{Min: 5000, Max: 5999}, Given: 1000, FreeTCP: 500, FreeUDP: 400, FreeICMP: 1000, Line: 7}},
		Sources:   []snapshot.EngineSource{{Addr: addr("192.168.1.20"), Sessions: 199}},
		Lines:     map[string]int{"limits": 4, "sessions": 4, "sessions_per_source": 4},
	}
	return s.Engine
}

// withCarrier has it translate for subscribers with port blocks.
func withCarrier(s *snapshot.Snapshot) *snapshot.Engine {
	e := withEngine(s)
	e.PerSource, e.Subscribers, e.HoldDown = 0, 90, 120
	e.Sources = []snapshot.EngineSource{{Addr: addr("100.64.0.7"), Pool: "cgn", Class: "default", Sessions: 600, Ports: 1000, HoldDown: 100, Blocks: 2, BlockPorts: 768}}
	e.Classes = []snapshot.EngineClass{{Name: "default", Ports: 2048, NewPerSecond: 100, Burst: 400, Lines: map[string]int{"ports": 12, "new_per_second": 12}}}
	e.Pools = []snapshot.EnginePool{{Name: "cgn", Addresses: 1, Subscribers: 90, Ports: 64512, FreeTCP: 40000, FreeUDP: 40000, FreeICMP: 40000, Share: 0.71,
		BlockSize: 512, ExtraSize: 256, ExtraMax: 1, BlocksUsed: 90, BlocksFree: 36, Taken: 20000, Lines: map[string]int{"size": 8, "extra": 8, "at_most": 8}}}
	return e
}

// withAccel has natkit accel forward flows of the gateway.
func withAccel(s *snapshot.Snapshot) *snapshot.Engine {
	s.Engine = &snapshot.Engine{Kind: "accel", Sessions: 40, SessionsMax: 1000, Interfaces: []string{"eth0", "eth1"}, Flags: []string{"--flows", "1000", "--bypass"},
		Packets: map[string]uint64{"forwarded": 5000, "tcp-flags": 900, "below-threshold": 300, "local": 1_000_000, "not-ipv4": 1_000_000}}
	return s.Engine
}

func init() {
	examples["engine-source-limit"] = func(s *snapshot.Snapshot) {
		e := withEngine(s)
		e.Packets["source-limit"], e.Sources[0].Sessions = 80, 200
		e.Sources[0].Refused = map[string]uint64{"source-limit": 80}
	}
	examples["port-blocks-exhausted"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Pools[0].BlocksUsed, e.Pools[0].BlocksFree, e.Pools[0].Refused = 126, 0, map[string]uint64{"no-block": 40}
		e.Packets["no-block"] = 40
	}
	moreExamples["port-blocks-exhausted, nearly, large blocks"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Pools[0].BlocksUsed, e.Pools[0].BlocksFree, e.Pools[0].Taken = 101, 25, 3000
	}
	examples["port-block-too-small"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Packets["port-limit"], e.Sources[0].Refused, e.Sources[0].HoldDown = 300, map[string]uint64{"port-limit": 300}, 900
	}
	moreExamples["engine-source-limit, ports of a class"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Packets["port-limit"], e.Sources[0].Refused, e.Sources[0].Ports = 300, map[string]uint64{"port-limit": 300}, 2048
	}
	moreExamples["engine-source-limit, blocks"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Packets["port-limit"], e.Sources[0].Refused, e.Sources[0].HoldDown = 300, map[string]uint64{"port-limit": 300}, 400
	}
	moreExamples["engine-source-limit, new sessions"] = func(s *snapshot.Snapshot) {
		e := withCarrier(s)
		e.Packets["rate-limit"], e.Sources[0].Refused = 300, map[string]uint64{"rate-limit": 300}
	}
	examples["engine-drift"] = func(s *snapshot.Snapshot) {
		withEngine(s).Drift = []snapshot.EngineDrift{{What: "interface eth0 was recreated and carries no program", Stops: true}, {What: "interface eth1 has another MTU, 1400"}}
	}
	moreExamples["snat-ports-exhausted, engine"] = func(s *snapshot.Snapshot) {
		e := withEngine(s)
		e.Packets["no-port"], e.Addresses[0].FreeUDP = 312, 0
	}
	moreExamples["snat-ports-exhausted, engine, all given"] = func(s *snapshot.Snapshot) {
		e := withEngine(s)
		e.Packets["no-port"] = 312
		e.Addresses[0] = snapshot.EngineAddress{Addr: addr("198.51.100.9"), Ports: snapshot.PortRange{Min: 1024, Max: 65535}, Given: 64512}
	}
	moreExamples["conntrack-table-full, engine"] = func(s *snapshot.Snapshot) {
		e := withEngine(s)
		e.Packets["sessions-full"], e.Sessions = 90, 1000
	}
	examples["accel-slow-path"] = func(s *snapshot.Snapshot) { withAccel(s).Packets["tcp-strict"] = 90_000 }
	moreExamples["accel-slow-path, a full flow cache"] = func(s *snapshot.Snapshot) { withAccel(s).Packets["no-room"] = 90_000 }
	moreExamples["accel-slow-path, by another interface"] = func(s *snapshot.Snapshot) { withAccel(s).Packets["no-route"] = 90_000 }
	moreExamples["engine-drift, accel"] = func(s *snapshot.Snapshot) {
		s.Engine = &snapshot.Engine{Kind: "accel", Sessions: 40, SessionsMax: 1000, Problems: []string{"interface eth1 is gone"}}
	}
}

// What is near a fault of the engine, and none.
func TestEngineHealthy(t *testing.T) {
	for name, change := range map[string]func(e *snapshot.Engine){
		"at work":                     func(*snapshot.Engine) {},
		"a host one below its limit":  func(e *snapshot.Engine) { e.Sources[0].Sessions = e.PerSource - 1 },
		"a host at its limit":         func(e *snapshot.Engine) { e.Sources[0].Sessions = e.PerSource },
		"a table with one place left": func(e *snapshot.Engine) { e.Sessions = e.SessionsMax - 1 },
		"a tenth of the ports left":   func(e *snapshot.Engine) { e.Addresses[0].FreeTCP = 100 },
		"drift that serve follows": func(e *snapshot.Engine) {
			e.Served, e.Drift = true, []snapshot.EngineDrift{{What: "interface eth0 has another MTU, 1400"}}
		},
		"engine nft": func(e *snapshot.Engine) { *e = snapshot.Engine{Kind: "nft", Table: "ip natkit", Rules: 3} },
		"accel":      func(e *snapshot.Engine) { *e = snapshot.Engine{Kind: "accel", Sessions: 1000, SessionsMax: 1000} },
		"four of five port blocks in use, less one": func(e *snapshot.Engine) {
			e.Pools = []snapshot.EnginePool{{Name: "cgn", BlockSize: 512, BlocksUsed: 79, BlocksFree: 21}}
		},
		"a subscriber whose ports are in hold-down, refused nothing": func(e *snapshot.Engine) {
			e.Sources[0].Blocks, e.Sources[0].Ports, e.Sources[0].HoldDown = 1, 64, 64
		},
		"stray packets alone": func(e *snapshot.Engine) { e.Packets["no-mapping"], e.Packets["filtered"] = 5000, 5000 },
	} {
		s := gateway()
		change(withEngine(s))
		if found := Judge(s); len(found) > 0 {
			t.Errorf("%s: %s", name, titles(found))
		}
	}
}

// What is near packets that accel should forward, and none.
func TestAccelHealthy(t *testing.T) {
	for name, change := range map[string]func(e *snapshot.Engine){
		"at work":                       func(*snapshot.Engine) {},
		"half of the packets, less one": func(e *snapshot.Engine) { e.Packets["tcp-strict"] = 6200 - 1 },
		"all, but few":                  func(e *snapshot.Engine) { e.Packets = map[string]uint64{"tcp-strict": 99 * 10} },
		"short connections":             func(e *snapshot.Engine) { e.Packets["unsteady"], e.Packets["tcp-flags"] = 90_000, 90_000 },
		"another engine":                func(e *snapshot.Engine) { e.Kind, e.Packets["tcp-strict"] = "ebpf", 90_000 },
	} {
		s := gateway()
		change(withAccel(s))
		if found := Judge(s); len(found) > 0 {
			t.Errorf("%s: %s", name, titles(found))
		}
	}
}

// withNFT has engine nft translate on the gateway: its table is the chain of that name.
func withNFT(s *snapshot.Snapshot, name string, rules ...snapshot.EngineRule) {
	s.Engine = &snapshot.Engine{Kind: "nft", Table: "ip natkit", File: "/etc/natkit.yaml", RuleList: rules}
	c := chain(s, name)
	c.Backend, c.Family, c.Table = "nft", "ip", "natkit"
}

// A finding about a rule of engine nft names the rule of the rule file, and no command of its
// cure writes into the table that natkit made.
func TestEngineNFTRules(t *testing.T) {
	narrow := func(s *snapshot.Snapshot, chainName string, line int) {
		examples["snat-ports-exhausted"](s)
		withNFT(s, chainName, snapshot.EngineRule{ID: "0b11cafe", Line: 4, Rule: "masquerade: 10.9.0.0/16"},
			snapshot.EngineRule{ID: "3c090655", Line: 5, Rule: "snat: 10.0.0.0/8, ports", Ports: chain(s, chainName).SNATRanges[0], PortsLine: line})
	}
	dropped := snapshot.Rule{Number: 4, Handle: 9, Text: "ip daddr @outside_addresses_nets counter drop", Verdict: "drop"}
	for _, c := range []struct {
		name, code string
		change     func(s *snapshot.Snapshot)
		evidence   string
		remedy     string
	}{
		{"narrow ports", "snat-ports-exhausted", func(s *snapshot.Snapshot) { narrow(s, narrowChain(s), 6) },
			"3c090655, line 5: snat: 10.0.0.0/8, ports", "sed -i -E '6s/"},
		{"narrow ports, on a line that is not known", "snat-ports-exhausted", func(s *snapshot.Snapshot) { narrow(s, narrowChain(s), 0) },
			"3c090655, line 5: snat: 10.0.0.0/8, ports", "natkit apply -f /etc/natkit.yaml"},
		{"narrow ports of a pool", "snat-ports-exhausted", func(s *snapshot.Snapshot) {
			narrow(s, narrowChain(s), 0)
			s.Engine.RuleList[1].Ports = snapshot.PortRange{}
		}, "", "# a pool in /etc/natkit.yaml gives "},
		{"a silent backend", "backend-silent", func(s *snapshot.Snapshot) {
			examples["backend-silent"](s)
			s.Engine = &snapshot.Engine{Kind: "nft", Table: "ip natkit", File: "/etc/natkit.yaml",
				RuleList: []snapshot.EngineRule{{ID: "77aa0001", Line: 9, Rule: "dnat", To: []snapshot.Endpoint{snapshot.EndpointOf(s.Conntrack.Refused[0].Target.AddrPort)}}}}
		}, "77aa0001, line 9: dnat", "natkit rules"},
		{"a rule that drops", "rule-drop", func(s *snapshot.Snapshot) {
			examples["rule-drop"](s)
			n := uint64(950_000)
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "natkit", Name: "prerouting", Hook: "prerouting", Type: "nat", Policy: "accept", Rules: 4})
			for i := range s.Chains { // only natkit's drops
				s.Chains[i].DropRules, s.Chains[i].Walk = nil, nil
			}
			dropped.Packets = &n
			last := &s.Chains[len(s.Chains)-1]
			last.Walk, last.DropRules = []snapshot.Rule{dropped}, []snapshot.DropRule{{Number: 4, Verdict: "drop", Packets: &n}}
			s.Engine = &snapshot.Engine{Kind: "nft", Table: "ip natkit", File: "/etc/natkit.yaml"}
		}, "", "natkit rules"},
		{"a network that no rule is for", "answers-lost", func(s *snapshot.Snapshot) {
			addUnanswered(s, unanswered("tcp", "192.168.1.30", "203.0.113.90:443", "203.0.113.90:443", 40, 12))
			withNFT(s, "postrouting")
		}, "", "# if not, add one to /etc/natkit.yaml (- masquerade: 192.168.1.0/24)"},
		{"a host at its limit of connections", "rule-drop", func(s *snapshot.Snapshot) {
			examples["rule-drop"](s)
			for i := range s.Chains {
				s.Chains[i].DropRules, s.Chains[i].Walk = nil, nil
			}
			n := uint64(950_000)
			over := snapshot.Rule{Number: 1, Handle: 9, Text: "add @connections { ip saddr ct count over 100 } drop", Verdict: "drop", Packets: &n, Matches: []snapshot.Match{{Text: "add @connections { ip saddr ct count over 100 }"}}}
			s.Chains = append(s.Chains, snapshot.Chain{Backend: "nft", Family: "ip", Table: "natkit", Name: "prerouting", Hook: "prerouting", Type: "nat", Policy: "accept", Rules: 1,
				Walk: []snapshot.Rule{over}, DropRules: []snapshot.DropRule{{Number: 1, Verdict: "drop", Packets: &n}}})
			s.Engine = &snapshot.Engine{Kind: "nft", Table: "ip natkit", File: "/etc/natkit.yaml"}
		}, "", "# natkit made this rule from sessions_per_source in /etc/natkit.yaml"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := gateway()
			c.change(s)
			all := Judge(s)
			i := slices.IndexFunc(all, func(f Finding) bool { return f.Code == c.code })
			if i < 0 {
				t.Fatalf("found %s", titles(all))
			}
			f := all[i]
			if c.evidence != "" && !slices.ContainsFunc(f.Evidence, func(e Evidence) bool { return e.Value == c.evidence }) {
				t.Errorf("evidence %v, want %q", f.Evidence, c.evidence)
			}
			if !slices.ContainsFunc(f.Remedy, func(line string) bool { return strings.HasPrefix(line, c.remedy) }) {
				t.Errorf("remedy %q, want %q", f.Remedy, c.remedy)
			}
			for _, line := range f.Remedy {
				if strings.Contains(line, " ip natkit ") && !strings.Contains(line, "list chain") {
					t.Errorf("the cure changes the table of the engine: %s", line)
				}
			}
		})
	}
}

// narrowChain is the chain with a rule that allows few ports, of the example.
func narrowChain(s *snapshot.Snapshot) string {
	examples["snat-ports-exhausted"](s)
	for _, c := range s.Chains {
		if slices.ContainsFunc(c.SNATRanges, func(r snapshot.PortRange) bool { return r.Min > 0 }) {
			return c.Name
		}
	}
	panic("no chain with ports")
}

// A cure that brings the engine up again does so with the flags that it was brought up with.
func TestEngineUpAgain(t *testing.T) {
	s := gateway()
	withEngine(s)
	s.Netns.Name = "gw"
	s.Engine.File = "stdin"
	want := []string{"natkit --netns gw down", "natkit --netns gw up -f - --attach xdp --bypass"}
	if got := (facts{Snapshot: s}).again(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// The commands of a cure change the line of the file that is meant, and no other.
func TestEngineRemedies(t *testing.T) {
	for name, want := range map[string]string{
		"snat-ports-exhausted, engine":                `sed -i -E '7s/\bports: *5000-5999\b/ports: 1024-65535/' /etc/natkit.yaml`,
		"conntrack-table-full, engine":                `sed -i -E '4s/\bsessions: *1000\b/sessions: 2000/' /etc/natkit.yaml`,
		"accel-slow-path":                             "natkit accel on --flows 1000 --bypass --tcp-liberal eth0 eth1",
		"accel-slow-path, a full flow cache":          "natkit accel on --bypass --flows 2000 eth0 eth1",
		"engine-drift":                                "natkit apply -f /etc/natkit.yaml",
		"port-blocks-exhausted, nearly, large blocks": `sed -i -E '8s/\bsize: *512\b/size: 128/' /etc/natkit.yaml`,
		"port-block-too-small":                        `sed -i -E '8s/\bextra: *256\b/extra: 2048/' /etc/natkit.yaml`,
		"engine-source-limit, ports of a class":       `sed -i -E '12s/\bports: *2048\b/ports: 8192/' /etc/natkit.yaml`,
		"engine-source-limit, blocks":                 `sed -i -E '8s/\bat_most: *1\b/at_most: 3/' /etc/natkit.yaml`,
		"engine-source-limit, new sessions":           `sed -i -E '12s/\bnew_per_second: *100\b/new_per_second: 400/' /etc/natkit.yaml`,
		"engine-source-limit":                         `sed -i -E '4s/\bsessions_per_source: *200\b/sessions_per_source: 800/' /etc/natkit.yaml`,
	} {
		s := gateway()
		change := moreExamples[name]
		if change == nil {
			change = examples[name]
		}
		change(s)
		code, _, _ := strings.Cut(name, ",")
		found := Judge(s)
		if len(found) == 0 || found[0].Code != code || !slices.Contains(found[0].Remedy, want) {
			t.Errorf("%s: %+v", name, found)
		}
	}
}

// A title has what the facts show: who of several was refused what, and of several changes one that stops packets.
func TestEngineTitles(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(s *snapshot.Snapshot)
		want   string
	}{
		"one host": {examples["engine-source-limit"], "192.168.1.20 reached sessions_per_source (200): the engine dropped 80 packets in 10 s"},
		"many hosts": {func(s *snapshot.Snapshot) { examples["engine-source-limit"](s); s.Engine.Packets["source-limit"] = 800 },
			"192.168.1.20 and others reached sessions_per_source (200): the engine dropped 800 packets"},
		"one pool": {examples["port-blocks-exhausted"], "pool cgn has too few port blocks: the engine dropped 40 packets in 10 s"},
		"two pools": {func(s *snapshot.Snapshot) {
			examples["port-blocks-exhausted"](s)
			s.Engine.Packets["no-block"] = 70
			s.Engine.Pools = append(s.Engine.Pools, snapshot.EnginePool{Name: "b", BlockSize: 512, BlocksUsed: 9, Refused: map[string]uint64{"no-block": 30}})
		}, "pool cgn has too few port blocks: the engine dropped 40 packets in 10 s"},
		"no port": {moreExamples["snat-ports-exhausted, engine"], "the engine has no port left at 198.51.100.9: 312 packets of new sessions dropped in 10 s"},
		"no port, but there are some now": {func(s *snapshot.Snapshot) { withEngine(s).Packets["no-port"] = 312 },
			"the engine found no port for 312 packets in 10 s; now 198.51.100.9 has 400 left"},
		"the change that stops packets": {func(s *snapshot.Snapshot) {
			examples["engine-drift"](s)
			slices.Reverse(s.Engine.Drift)
		}, "engine ebpf is out of date: interface eth0 was recreated and carries no program"},
	} {
		s := gateway()
		tt.change(s)
		if found := Judge(s); len(found) == 0 || found[0].Title != tt.want {
			t.Errorf("%s: %s, want %q", name, titles(found), tt.want)
		}
	}
}

// A cure writes no value that natkit then refuses: an engine that was taken down for it would stay down.
func TestEngineAtMost(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(s *snapshot.Snapshot)
		want   string // in the remedy, or "" for no command that changes something
	}{
		"sessions": {func(s *snapshot.Snapshot) {
			moreExamples["conntrack-table-full, engine"](s)
			s.Engine.Sessions, s.Engine.SessionsMax = 10_000_000, 10_000_000
		}, "sessions: 16777215/"},
		"sessions, the most": {func(s *snapshot.Snapshot) {
			moreExamples["conntrack-table-full, engine"](s)
			s.Engine.Sessions, s.Engine.SessionsMax = rulefile.MaxSessions, rulefile.MaxSessions
		}, ""},
		"sessions of a host": {func(s *snapshot.Snapshot) { examples["engine-source-limit"](s); s.Engine.PerSource = 10_000_000 }, "sessions_per_source: 16777215/"},
		"new sessions of a class": {func(s *snapshot.Snapshot) {
			moreExamples["engine-source-limit, new sessions"](s)
			s.Engine.Classes[0].NewPerSecond = 600_000
		}, "new_per_second: 1000000/"},
		"flows of accel": {func(s *snapshot.Snapshot) {
			moreExamples["accel-slow-path, a full flow cache"](s)
			s.Engine.SessionsMax = 5 << 20
		}, "--flows 8388608 "},
		"flows of accel, the most": {func(s *snapshot.Snapshot) {
			moreExamples["accel-slow-path, a full flow cache"](s)
			s.Engine.SessionsMax = 1 << 23
		}, ""},
	} {
		s := gateway()
		tt.change(s)
		found := Judge(s)
		if len(found) == 0 {
			t.Fatalf("%s: nothing found", name)
		}
		remedy := strings.Join(found[0].Remedy, "\n")
		changes := strings.Contains(remedy, "sed -i") || strings.Contains(remedy, "natkit down") || strings.Contains(remedy, "accel off")
		if !strings.Contains(remedy, tt.want) || changes != (tt.want != "") {
			t.Errorf("%s: %s", name, remedy)
		}
	}
}
