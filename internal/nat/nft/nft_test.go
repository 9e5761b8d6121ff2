// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"bytes"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/nft"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/golden"
	"natkit/internal/testutil/ktest"
)

func docker() nft.Docker {
	return nft.Docker{
		Bridge:  "docker0",
		Network: netip.MustParsePrefix("172.17.0.1/16"),
		Publish: []nft.Publish{
			{Protocol: 6, HostPort: 8080, To: netip.MustParseAddrPort("172.17.0.2:80")},
			{Protocol: 17, HostPort: 53, To: netip.MustParseAddrPort("172.17.0.3:5353")},
		},
	}
}

func gateway() nft.Gateway {
	return nft.Gateway{Inside: netip.MustParsePrefix("192.168.0.0/24"), Outside: "eth0"}
}

func gatewayPorts() nft.Gateway {
	g := gateway()
	g.Table, g.Address, g.Ports = "few", netip.MustParseAddr("203.0.113.1"), snapshot.PortRange{Min: 5000, Max: 5003}
	return g
}

var hosts = []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.8")}

func namespace(t *testing.T) *netns.Handle {
	t.Helper()
	ktest.Root(t)
	name := ktest.Name(t)
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		if err := netns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	return h
}

func listRuleset(t *testing.T, h *netns.Handle) []byte {
	t.Helper()
	var list []byte
	if err := h.Do(func() (err error) {
		list, err = exec.Command(ktest.Tool(t, "nft"), "list", "ruleset").CombinedOutput()
		return err
	}); err != nil {
		t.Fatalf("nft list ruleset: %v\n%s", err, list)
	}
	return traceTable.ReplaceAll(list, nil)
}

// traceTable is what traces put into every namespace of the machine for as long as they run.
var traceTable = regexp.MustCompile(`(?m)^table (inet|ip6?) natkit-trace-\d+ \{(.*\n)+?\}\n`)

// The native tool reads every rule back as the text a person would have written.
func TestGolden(t *testing.T) {
	for name, rules := range map[string]nft.Ruleset{
		"docker":         docker().Compile(),
		"docker-nothing": nft.Docker{Bridge: "docker0", Network: netip.MustParsePrefix("172.17.0.0/16")}.Compile(),
		"gateway":        gateway().Compile(),
		"gateway-ports":  gatewayPorts().Compile(),
		"empty-hooks":    nft.EmptyHooks(),
		"distribution":   gateway().Distribution(),
		"behind":         gateway().Behind(hosts, netip.MustParseAddr("203.0.113.1")),
		"behind-map":     gateway().BehindMap(hosts, netip.MustParseAddr("203.0.113.1")),
		"idle-nat":       nft.IdleNAT(),
		"one-to-one":     nft.OneToOne(hosts[0], netip.MustParseAddr("203.0.113.9"), "eth0"),
		"double": nft.Double{
			Host: hosts[0], Middle: netip.MustParseAddr("198.51.100.1"), SeenAs: netip.MustParseAddr("203.0.113.9"),
			Inside: "eth1", Outside: "eth0", Idle: hosts[1:],
		}.Compile(),
		"stateless": nft.Stateless(netip.MustParsePrefix("198.18.0.0/16"), netip.MustParsePrefix("100.64.0.0/16"), "eth0"),
	} {
		t.Run(name, func(t *testing.T) {
			h := namespace(t)
			for range 2 { // a second time replaces, it does not add
				if err := rules.Apply(h); err != nil {
					t.Fatal(err)
				}
			}
			golden.Check(t, filepath.Join("testdata", name+".nft"), listRuleset(t, h))
		})
	}
}

// A ruleset of which one rule is impossible leaves what was there, whole.
// Remove takes away what Apply brought, also twice, and nothing else.
func TestRemove(t *testing.T) {
	h := namespace(t)
	if err := gateway().Compile().Apply(h); err != nil {
		t.Fatal(err)
	}
	before := listRuleset(t, h)
	few := gatewayPorts().Compile()
	if err := few.Apply(h); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := few.Remove(h); err != nil {
			t.Fatal(err)
		}
		if after := listRuleset(t, h); !bytes.Equal(after, before) {
			t.Errorf("ruleset after Remove:\n%s\nbefore:\n%s", after, before)
		}
	}
}

func TestApplyIsAllOrNothing(t *testing.T) {
	h := namespace(t)
	if err := gateway().Compile().Apply(h); err != nil {
		t.Fatal(err)
	}
	before := listRuleset(t, h)
	bad := docker().Compile()
	bad[1].Chains = bad[1].Chains[1:] // the chain the rules jump to
	if err := bad.Apply(h); err == nil {
		t.Fatal("a jump to a missing chain was accepted")
	}
	if after := listRuleset(t, h); !bytes.Equal(after, before) {
		t.Errorf("ruleset after a refused one:\n%s\nbefore:\n%s", after, before)
	}
}

// A map of more elements than one message can carry gets all of them.
func TestLargeMap(t *testing.T) {
	h := namespace(t)
	many := make([]netip.Addr, 2500)
	for i := range many {
		many[i] = netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
	}
	if err := gateway().BehindMap(many, netip.MustParseAddr("203.0.113.1")).Apply(h); err != nil {
		t.Fatal(err)
	}
	if got := bytes.Count(listRuleset(t, h), []byte(" : 203.0.113.1")); got != len(many) {
		t.Errorf("%d elements, want %d", got, len(many))
	}
}
