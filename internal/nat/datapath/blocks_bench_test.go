// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"natkit/internal/nat/rulefile"
)

// The first session of a subscriber who has no block yet, when so many percent of a pool's blocks are in use:
// 64 addresses of 1008 blocks. The blocks are anywhere. In each round every share has its turn, and the
// median of its runs is taken; a run is of 32 subscribers, whose blocks are free again after it. The
// cost must not depend on the share. -benchtime 11x is eleven rounds.
func BenchmarkBlockChoice(b *testing.B) {
	const (
		addresses   = 64
		each        = (65536 - 1024) / granulePorts
		subscribers = 32
		runs        = 50
	)
	r := newModelRig(b, false, false)
	f := blockFile(rulefile.Blocks{Size: granulePorts, Extra: granulePorts, AtMost: 1}, addresses)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	r.forget(b, f)
	r.applied(b, f, nil)
	open := r.load(b, loadSessionTest).Programs["scatter"]
	var inner [addresses]*ebpf.Map
	for i := range inner {
		inner[i] = r.inner(b, "blocks", uint32(i))
		defer inner[i].Close()
	}
	shares := []float64{0, 50, 90, 99, 99.9}
	var used [][addresses]abiNatBlocks
	var hints []abiNatPorts
	for _, share := range shares {
		var of [addresses]abiNatBlocks
		for i := range of {
			if err := inner[i].Lookup(uint32(0), &of[i]); err != nil {
				b.Fatal(err)
			}
		}
		var hint abiNatPorts
		if err := r.maps["free_addresses"].Lookup(uint32(0), &hint); err != nil {
			b.Fatal(err)
		}
		for _, n := range rand.New(rand.NewPCG(1, 2)).Perm(addresses * each)[:int(float64(addresses*each)*share/100)] {
			of[n/each].Free[(16+n%each)/64] &^= 1 << ((16 + n%each) % 64)
			of[n/each].Count--
		}
		used, hints = append(used, of), append(hints, hint)
	}
	run := func(share int) float64 {
		forgetSessions(b, r.maps)
		forgetMappings(b, r.maps)
		deleteAll[abiNatSourceKey, abiNatSource](b, r.maps["sources"])
		for i := range inner {
			if err := inner[i].Put(uint32(0), &used[share][i]); err != nil {
				b.Fatal(err)
			}
		}
		if err := r.maps["free_addresses"].Put(uint32(0), &hints[share]); err != nil {
			b.Fatal(err)
		}
		// Sessions that follow each other are of hosts that do not.
		opened, ns := r.scatter(b, open, subscribers, 0, 0, 63*4096)
		if got := len(entries[abiNatSourceKey, abiNatSource](b, r.maps["sources"])); opened != subscribers || got != subscribers {
			b.Fatalf("%v %%: opened %d of %d sessions, of %d subscribers", shares[share], opened, subscribers, got)
		}
		return ns / subscribers
	}
	medians := make([][]float64, len(shares))
	for range b.N {
		for share := range shares {
			var took []float64
			for range runs {
				took = append(took, run(share))
			}
			slices.Sort(took)
			medians[share] = append(medians[share], took[runs/2])
		}
	}
	for share, m := range medians {
		slices.Sort(m)
		b.ReportMetric(m[len(m)/2], fmt.Sprintf("%v%%-ns", shares[share]))
		b.Logf("%v %% in use: %.0f ns (%.0f - %.0f)", shares[share], m[len(m)/2], m[0], m[len(m)-1])
	}
}
