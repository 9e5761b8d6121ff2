// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"net/netip"
	"testing"
	"time"

	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
)

// chained are stateless maps, each of which has a host of the one before, and a forward to a host of the
// first: by that one, host after host has sessions.
func chained(n int) *rulefile.File {
	prefix := func(net byte, region, bits int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{net, byte(region >> 14), byte(region >> 6), byte(region << 2)}), bits)
	}
	actions := []rulefile.Action{rulefile.DNAT{Address: prefix(100, 0, 32).Addr(), Targets: []rulefile.Target{{Address: addr("192.168.0.1")}}}}
	for i := range n {
		bits := 30 + i%2
		actions = append(actions, rulefile.Map{Inside: prefix(10, i/2, bits), Outside: prefix(100, (i+1)/2, bits), Stateless: true})
	}
	return file(rules(actions...))
}

// The time it takes to compile stateless maps is about proportional to their number, whatever they have
// in common. With one look at all maps for each of them it was a hundred times as long.
func TestChainedMapsCompileFast(t *testing.T) {
	took := func(f *rulefile.File) time.Duration {
		t.Helper()
		start := time.Now()
		_, warnings, err := nft.CompileRules(f, nft.Facts{TimeoutPolicies: true, Labels: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d rules: %v, %d warnings", len(f.Rules), time.Since(start), len(warnings))
		return time.Since(start)
	}
	chain := chained(5000)
	if err := chain.Validate(); err != nil {
		t.Fatal(err)
	}
	apart := chained(5000)
	apart.Rules = apart.Rules[1:]
	if with, without := took(chain), took(apart); with > 10*without {
		t.Errorf("%v, and %v if no host has sessions", with, without)
	}
}
