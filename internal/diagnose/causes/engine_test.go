// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// withEngine has natkit's engine translate on the gateway in place of the kernel.
func withEngine(s *snapshot.Snapshot) *snapshot.Engine {
	s.Engine = &snapshot.Engine{
		Kind: "ebpf", File: "/etc/natkit.yaml", Rules: 3, Sessions: 600, SessionsMax: 1000, Mappings: 500, MappingsMax: 1000, PerSource: 200, SourcesMax: 100,
		Packets:   map[string]uint64{"translated-in": 40_000, "translated-out": 50_000, "created": 300, "filtered": 12},
		Addresses: []snapshot.EngineAddress{{Addr: addr("198.51.100.9"), Ports: snapshot.PortRange{Min: 5000, Max: 5999}, Given: 1000, FreeTCP: 500, FreeUDP: 400, FreeICMP: 1000, Line: 7}},
		Sources:   []snapshot.EngineSource{{Addr: addr("192.168.1.20"), Sessions: 199}},
		Lines:     map[string]int{"limits": 4, "sessions": 4, "sessions_per_source": 4},
	}
	return s.Engine
}

// withAccel has natkit accel forward flows of the gateway.
func withAccel(s *snapshot.Snapshot) *snapshot.Engine {
	s.Engine = &snapshot.Engine{Kind: "accel", Sessions: 40, SessionsMax: 1000, Interfaces: []string{"eth0", "eth1"}, Bypass: true,
		Packets: map[string]uint64{"forwarded": 5000, "tcp-flags": 900, "young": 300, "local": 1_000_000, "not-ipv4": 1_000_000}}
	return s.Engine
}

func init() {
	examples["engine-source-limit"] = func(s *snapshot.Snapshot) {
		e := withEngine(s)
		e.Packets["source-limit"], e.Sources[0].Sessions = 80, 200
	}
	examples["engine-drift"] = func(s *snapshot.Snapshot) {
		withEngine(s).Drift = []snapshot.EngineDrift{{What: "interface eth0 was made anew and carries no program", Stops: true}, {What: "interface eth1 has another MTU, 1400"}}
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
	moreExamples["accel-slow-path, by another interface"] = func(s *snapshot.Snapshot) { withAccel(s).Packets["no-way"] = 90_000 }
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
		"engine nft":          func(e *snapshot.Engine) { *e = snapshot.Engine{Kind: "nft", Table: "ip natkit", Rules: 3} },
		"accel":               func(e *snapshot.Engine) { *e = snapshot.Engine{Kind: "accel", Sessions: 1000, SessionsMax: 1000} },
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

// The commands of a cure change the line of the file that is meant, and no other.
func TestEngineRemedies(t *testing.T) {
	for name, want := range map[string]string{
		"snat-ports-exhausted, engine":       `sed -i -E '7s/\bports: *5000-5999\b/ports: 1024-65535/' /etc/natkit.yaml`,
		"conntrack-table-full, engine":       `sed -i -E '4s/\bsessions: *1000\b/sessions: 2000/' /etc/natkit.yaml`,
		"accel-slow-path":                    "natkit accel on --bypass --tcp-liberal eth0 eth1",
		"accel-slow-path, a full flow cache": "natkit accel on --bypass --flows 2000 eth0 eth1",
		"engine-drift":                       "natkit apply -f /etc/natkit.yaml",
		"engine-source-limit":                `sed -i -E '4s/\bsessions_per_source: *200\b/sessions_per_source: 800/' /etc/natkit.yaml`,
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
