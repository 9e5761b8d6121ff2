// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
)

// limits.sources bounds the internal hosts of every kind of rule that gives external endpoints.
func TestSourcesOfEveryRule(t *testing.T) {
	g := aGateway(t)
	for _, rule := range []int{masqueradeRule, fullRule, knownRule, apdmRule, wholeRule, tinyRule} {
		for _, h := range hooks {
			g.hook = h
			t.Run(fmt.Sprintf("%s/192.168.%d.0", h.name, rule), func(t *testing.T) {
				g.reset(t)
				room := fillUp[[8]byte, abiNatSource](t, g.maps["sources"])
				e := func(host int) endpoints {
					return ends(fmt.Sprintf("192.168.%d.%d:5000", rule, host), "198.51.100.9:53")
				}
				g.refused(t, inside, "udp", 0, e(2), abiNatReasonNAT_DROP_SOURCES_FULL)
				room() // for two
				for host := 2; host < 4; host++ {
					if reason, _ := g.send(t, inside, "udp", 0, e(host)); reason != sent {
						t.Errorf("host %d: %v", host, reason)
					}
				}
				if got := g.held(t).sources; got != 2 {
					t.Errorf("%d sessions are counted to hosts, want 2", got)
				}
			})
		}
	}
}

// A new host of a pool gets the address with most room, wherever its hash points to.
func TestPoolRoom(t *testing.T) {
	const pool, count = 200, 600
	g := newGateway(t)
	for i := range uint32(count) {
		a := abiNatAddress{Addr: abiNatAddr{Octet: [4]uint8{100, 64, uint8(i >> 8), uint8(i)}}, PortFirst: 1024, PortCount: 64, Pool: 200}
		addAddress(t, g.maps, pool+i, a)
	}
	room := func(index, ports uint32) {
		t.Helper()
		for class := range uint32(abiNatClassNAT_PORT_CLASSES) {
			var inner *ebpf.Map
			if err := g.maps["free_ports"].Lookup(pool+index, &inner); err != nil {
				t.Fatal(err)
			}
			err := inner.Put(class, freePorts(1024, int(ports)))
			inner.Close()
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	choose := func(addresses uint32) map[uint32]int {
		t.Helper()
		rules := [ruleCount]abiNatRule{}
		rules[fullRule] = abiNatRule{Id: fullRule, Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Pool: 200, PoolFirst: pool, PoolCount: addresses}
		g.fill(t, "rules", indexed(rules[:]))
		got := map[uint32]int{}
		for host := range 40 {
			reason, out := g.send(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.%d.%d:5000", fullRule, 10+host), "198.51.100.9:53"))
			if reason != sent {
				t.Errorf("host %d: %v", host, reason)
				continue
			}
			b := out.src.As4()
			got[uint32(b[2])<<8|uint32(b[3])]++
		}
		g.reset(t)
		return got
	}
	for i := range uint32(count) {
		room(i, 0)
	}
	room(0, 1)
	room(1, 64)
	room(2, 1)
	if got := choose(3); got[1] != 40 {
		t.Errorf("of 40 hosts %d got the address with most room: %v", got[1], got)
	}
	for i := range uint32(3) {
		room(i, 0)
	}
	for i := uint32(77); i < count; i += 100 { // few have any
		room(i, 64)
	}
	choose(count) // whatever has room
}
