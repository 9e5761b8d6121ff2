// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/natproof"
)

// The proof of an import (package natproof), but for the engines: internal/nat/control has
// TestImportProofEngines.

// proof counts packets.
type proof struct{ equal, named int }

// compare names packets of which the rule file makes something else than the rules do, and
// no note says so.
func (c *proof) compare(t *testing.T, i *natproof.Imported, packets []rulefile.Packet) {
	t.Helper()
	for _, p := range packets {
		equal, err := i.Compare(p, i.Model(p), i.Explained(p))
		switch {
		case err != nil:
			t.Error(err)
			return
		case equal:
			c.equal++
		default:
			c.named++
		}
	}
}

func randomPackets(r *rand.Rand, n int) []rulefile.Packet {
	packets := make([]rulefile.Packet, n)
	for k := range packets {
		packets[k] = natproof.RandomPacket(r, k)
	}
	return packets
}

// Rules of iptables, by the model alone.
func TestImportProof(t *testing.T) {
	first, rounds := natproof.Rounds(t, 400)
	var c proof
	for seed := first; seed < first+rounds && !t.Failed(); seed++ {
		r := rand.New(rand.NewPCG(seed, 1))
		m := natproof.Maker{Rand: r}
		i, err := natproof.Import(fmt.Sprintf("seed %d", seed), []byte(m.IPTables()))
		if err != nil {
			t.Fatal(err)
		}
		c.compare(t, i, randomPackets(r, 150))
	}
	t.Logf("%d packets alike, %d otherwise and named", c.equal, c.named)
	if c.equal < c.named {
		t.Errorf("only %d packets alike, %d otherwise and named: the import is of no use", c.equal, c.named)
	}
}

// The kernel does what the model says, and the rule file what the kernel does.
func TestImportProofKernel(t *testing.T) {
	ktest.Root(t)
	first, rounds := natproof.Rounds(t, 30)
	router := natproof.NewRouter(t)
	sent, left := 0, 0
	var c proof
	for seed := first; seed < first+rounds && !t.Failed(); seed++ {
		r := rand.New(rand.NewPCG(seed, 2))
		rules, err := router.LoadRandom(t, r, seed)
		if err != nil {
			t.Fatal(err)
		}
		i, err := natproof.Import(fmt.Sprintf("seed %d", seed), rules)
		if err != nil {
			t.Fatal(err)
		}
		packets := randomPackets(r, 100)
		c.compare(t, i, packets)
		for k, p := range natproof.Openers(packets) {
			want := i.Model(p)
			if want.Unknown {
				continue
			}
			got, err := router.Send(p, uint16(1000+k))
			if err != nil {
				t.Fatal(err)
			}
			sent++
			if !got.Gone() {
				left++
			}
			if !natproof.May(want.Results, got) && !natproof.Clashes(p) {
				t.Error(i.Differ(p, "the model", want, "the kernel", natproof.Outcome{Results: []natproof.Result{got}}))
				break
			}
		}
	}
	t.Logf("%d packets sent, %d of them left the router; %d alike in the rule file, %d otherwise and named", sent, left, c.equal, c.named)
	if left*3 < sent {
		t.Errorf("of %d packets only %d left the router", sent, left)
	}
}
