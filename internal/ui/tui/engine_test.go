// SPDX-License-Identifier: Apache-2.0

package tui

import (
	"strings"
	"testing"

	"github.com/gdamore/tcell/v2"

	"natkit/internal/snapshot"
	"natkit/internal/ui/live"
)

// withEngine is the busy moment of a gateway that one of natkit's engines translates on.
func withEngine(kind string) *live.Moment {
	m := busy()
	j := m.Judged
	switch kind {
	case "ebpf":
		j.Engine = &snapshot.Engine{
			Kind: "ebpf", File: "/etc/natkit.yaml", Rules: 3, Sessions: 600, SessionsMax: 1000, Mappings: 500, MappingsMax: 1000,
			Packets: map[string]uint64{"translated-in": 4000, "translated-out": 5000, "created": 300, "filtered": 12, "no-port": 40, "no-rule": 8},
			Addresses: []snapshot.EngineAddress{
				{Addr: addr("198.51.100.9"), Ports: snapshot.PortRange{Min: 5000, Max: 5999}, Given: 1000, FreeTCP: 500, FreeUDP: 20, FreeICMP: 1000},
				{Addr: addr("198.51.100.10"), Ports: snapshot.PortRange{Min: 1024, Max: 65535}, Given: 64512, FreeTCP: 64000, FreeUDP: 64512, FreeICMP: 64512},
			},
			Sources: []snapshot.EngineSource{{Addr: addr("192.168.1.20"), Sessions: 450}, {Addr: addr("192.168.1.21"), Sessions: 150}},
		}
		j.EngineRates = &live.EngineRates{NewPerSecond: 30, TranslatedPerSecond: 900, DroppedPerSecond: map[string]float64{"filtered": 1.2, "no-port": 4}}
	case "nft":
		j.Engine = &snapshot.Engine{Kind: "nft", File: "/etc/natkit.yaml", Rules: 2, Table: "ip natkit",
			RuleList: []snapshot.EngineRule{{ID: "1f3a9c02", Line: 4, Rule: "masquerade 192.168.1.0/24"}, {ID: "0b11cafe", Line: 5, Rule: "dnat tcp 198.51.100.9:80 to 192.168.1.20:8080"}}}
	case "accel":
		share := 0.251
		j.Engine = &snapshot.Engine{Kind: "accel", Sessions: 40, SessionsMax: 1000, Packets: map[string]uint64{"forwarded": 1000, "tcp-strict": 2900, "tcp-flags": 84, "not-ipv4": 5}}
		j.EngineRates = &live.EngineRates{FastPath: &share, ForwardedPerSecond: 100, SlowPathPerSecond: map[string]float64{"tcp-strict": 290, "tcp-flags": 8.4}}
	}
	return m
}

func TestEngineScreens(t *testing.T) {
	drifted := func(m *live.Moment) {
		m.Judged.Engine.Drift = []snapshot.EngineDrift{{What: "interface eth0 was recreated and carries no program", Stops: true}}
	}
	for _, c := range []struct {
		name, kind string
		keys       string
		w, h       int
		change     func(*live.Moment)
	}{
		{"engine-80x24", "ebpf", "", 80, 24, nil},
		{"engine-160x50", "ebpf", "", 160, 50, nil},
		{"engine-40x10", "ebpf", "", 40, 10, nil},
		{"engine-alone", "ebpf", "\x1b\n", 80, 24, drifted},
		{"engine-nft-alone", "nft", "\x1b\n", 80, 24, nil},
		{"engine-accel-alone", "accel", "\x1b\n", 80, 24, nil},
		{"engine-accel", "accel", "", 80, 24, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, m := newState(), withEngine(c.kind)
			if c.change != nil {
				c.change(m)
			}
			s.add(m)
			for _, r := range c.keys {
				switch r {
				case '\x1b': // one back from the first panel is the last
					s.key(tcell.KeyBacktab, 0)
				case '\n':
					s.key(tcell.KeyEnter, 0)
				}
			}
			screenIs(t, c.name, screen(t, s, c.w, c.h, "UTF-8"))
		})
	}
	for _, kind := range []string{"ebpf", "nft", "accel"} {
		t.Run("text "+kind, func(t *testing.T) { screenIs(t, "engine-text-"+kind, Text(withEngine(kind), 80, false)) })
	}
}

// The panel of the engine goes with it, and every size can be drawn.
func TestEngineGoes(t *testing.T) {
	s := newState()
	s.add(withEngine("ebpf"))
	s.focus, s.zoomed = panelEngine, true
	for w := 1; w < 200; w += 29 {
		for h := 1; h < 60; h += 7 {
			screen(t, s, w, h, "US-ASCII")
		}
	}
	s.add(busy())
	if got := screen(t, s, 80, 24, "UTF-8"); s.focus == panelEngine || strings.Contains(got, "engine") {
		t.Errorf("panel %d:\n%s", s.focus, got)
	}
}
