// SPDX-License-Identifier: Apache-2.0

package control

import (
	"net/netip"
	"testing"

	"natkit/internal/kernel/observe"
	"natkit/internal/testutil/ktest"
)

// What natkit reads of an engine is no traffic: on a machine without any, nothing is dropped
// but what the kernel makes and frees for the requests themselves, and that is benign.
func TestReadingDropsNothing(t *testing.T) {
	type reading struct {
		name  string
		start func(*testbed)
		read  func(*testbed) error
	}
	facts := func(b *testbed) error {
		for _, whole := range []bool{false, true} {
			if _, err := ReadFacts(b.gateway, nil, whole); err != nil {
				return err
			}
		}
		return nil
	}
	up := func(engine Engine) func(*testbed) {
		return func(b *testbed) {
			o := b.options()
			o.Engine = engine
			b.up(baseRules, o)
		}
	}
	routes := func(b *testbed) error {
		return b.gateway.Do(func() error {
			for _, to := range []string{"198.51.100.9", "10.0.0.77", "192.0.2.1", "2001:db8::1", "::1"} {
				kernelSurroundings{}.Egress(netip.Addr{}, netip.MustParseAddr(to))
			}
			return nil
		})
	}
	for _, r := range []reading{
		{"ebpf", up(EngineEBPF), facts},
		{"nft", up(EngineNFT), facts},
		{"accel", func(b *testbed) {
			if _, err := AccelOn(b.t.Context(), b.accelOptions()); err != nil {
				b.t.Fatal(err)
			}
			b.t.Cleanup(func() {
				if _, err := AccelOff(b.gateway); err != nil {
					b.t.Error(err)
				}
			})
		}, facts},
		{"routes", func(*testbed) {}, routes},
	} {
		t.Run(r.name, func(t *testing.T) {
			b := makeTestbed(t)
			r.start(b)
			drops, err := observe.OpenDrops(observe.DropOptions{Netns: b.gateway.Inode()})
			if err != nil {
				ktest.Unsupported(t, "%v", err)
			}
			defer drops.Close()
			for range 3 {
				if err := r.read(b); err != nil {
					t.Fatal(err)
				}
			}
			seen, err := drops.Read()
			if err != nil {
				t.Fatal(err)
			}
			for _, row := range seen.Rows {
				t.Logf("%d %s %s on %s, benign %v", row.Count, row.Location, row.Reason, row.Interface, row.Benign)
				if !row.Benign {
					t.Errorf("reading drops %v", row)
				}
			}
			if len(seen.Rows) == 0 && r.name == "routes" {
				t.Error("the kernel freed nothing of what it was asked: this shows nothing")
			}
		})
	}
}
