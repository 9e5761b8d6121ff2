// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/natproof"
)

// proofLimits keep the tables of an engine small.
func proofLimits(f *rulefile.File) { f.Limits.Sessions, f.Limits.Sources = 8192, 256 }

// bringUp brings an engine up with an imported file, as a user would who read it.
func bringUp(t *testing.T, router *natproof.Router, i *natproof.Imported, engine Engine) error {
	t.Helper()
	file, err := rulefile.Parse("imported.yaml", []byte(i.File.Text()))
	if err != nil {
		return err
	}
	proofLimits(file)
	_, err = Up(t.Context(), file, file.Text(), Options{Namespace: router.Namespace, Engine: engine, Attach: attachOf(engine)})
	return err
}

func attachOf(engine Engine) Attach {
	if engine == EngineEBPF {
		return AttachTC // interfaces without Ethernet have no XDP
	}
	return ""
}

// Random rules are loaded into the kernel, imported, and the file is brought up on both
// engines in their place. What each does with random packets is what the kernel did with the
// original rules, or the rule that decided is named; and it is what the file says.
func TestImportProofEngines(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	first, rounds := natproof.Rounds(t, 3)
	router := natproof.NewRouter(t)
	equal, named, sent := 0, 0, 0
	for seed := first; seed < first+rounds && !t.Failed(); seed++ {
		r := rand.New(rand.NewPCG(seed, 3))
		rules, err := router.LoadRandom(t, r, seed)
		if err != nil {
			t.Fatal(err)
		}
		i, err := natproof.Import(fmt.Sprintf("seed %d", seed), rules)
		if err != nil {
			t.Fatal(err)
		}
		if len(i.File.Rules) == 0 {
			continue // nothing that an engine could be brought up for
		}
		var packets []rulefile.Packet
		for k := range 100 {
			packets = append(packets, natproof.RandomPacket(r, k))
		}
		packets = natproof.Openers(packets)
		original := make([]natproof.Result, len(packets))
		send := func(k int) natproof.Result {
			t.Helper()
			got, err := router.Send(packets[k], uint16(1000+k))
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		for k := range packets {
			original[k] = send(k)
		}
		for _, engine := range []Engine{EngineNFT, EngineEBPF} {
			if err := router.Clear(t); err != nil {
				t.Fatal(err)
			}
			if err := bringUp(t, router, i, engine); err != nil {
				t.Fatalf("%s: engine %s: %v\n%s\n%s", i.Name, engine, err, rules, i.File.Text())
			}
			for k, p := range packets {
				got := send(k)
				sent++
				want, file := i.Model(p), i.Explained(p)
				if engine == EngineNFT {
					file = i.ExplainedNFT(p)
				}
				if natproof.Clashes(p) || want.Unknown {
					continue
				}
				if engine == EngineEBPF && got.Gone() && i.NoPort(p, file) {
					named++
					continue
				}
				if !natproof.May(file.Results, got) {
					t.Error(i.Differ(p, "the rule file", file, "engine "+string(engine), natproof.Outcome{Results: []natproof.Result{got}}))
					break
				}
				switch {
				case got == original[k], natproof.May(want.Results, original[k]) && natproof.May(want.Results, got):
					equal++
				case i.Named(p, want, file):
					named++
				default:
					t.Error(i.Differ(p, fmt.Sprintf("the kernel with the original rules: %v; their model", original[k]), want, fmt.Sprintf("engine %s: %v; the rule file", engine, got), file))
				}
			}
			if _, err := Down(router.Namespace); err != nil && !errors.Is(err, ErrDown) {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d packets sent, %d as with the original rules, %d otherwise and named", sent, equal, named)
	if rounds > 3 && equal < named {
		t.Errorf("only %d packets as with the original rules, %d otherwise and named: the import is of no use", equal, named)
	}
}

// shareRules send connections for an address to several targets, by chance or by turns.
var shareRules = []struct {
	name, rules string
	shares      map[string]map[string]float64 // by address
}{
	{"statistic random and nth", `*nat
-A PREROUTING -d 203.0.113.5/32 -i eth0 -m statistic --mode random --probability 0.9 -j DNAT --to-destination 10.1.2.3
-A PREROUTING -d 203.0.113.5/32 -i eth0 -j DNAT --to-destination 10.1.2.4
-A PREROUTING -d 203.0.113.6/32 -i eth0 -m statistic --mode nth --every 3 --packet 0 -j DNAT --to-destination 10.1.2.3
-A PREROUTING -d 203.0.113.6/32 -i eth0 -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.1.2.4
-A PREROUTING -d 203.0.113.6/32 -i eth0 -j DNAT --to-destination 10.1.9.9
COMMIT
`, map[string]map[string]float64{
		"203.0.113.5": {"10.1.2.3": 0.9, "10.1.2.4": 0.1},
		"203.0.113.6": {"10.1.2.3": 1.0 / 3, "10.1.2.4": 1.0 / 3, "10.1.9.9": 1.0 / 3},
	}},
	{"numgen", `table ip t {
	chain pre {
		type nat hook prerouting priority dstnat
		iifname "eth0" ip daddr 203.0.113.5 dnat to numgen random mod 10 map { 0-6 : 10.1.2.3, 7-8 : 10.1.2.4, 9 : 10.2.0.7 }
	}
}
`, map[string]map[string]float64{"203.0.113.5": {"10.1.2.3": 0.7, "10.1.2.4": 0.2, "10.2.0.7": 0.1}}},
}

// Targets have the shares of new clients that they have by the original rules, and on both
// engines.
func TestImportKeepsShares(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	router := natproof.NewRouter(t)
	for _, tt := range shareRules {
		rules, err := router.Load(t, tt.rules)
		if err != nil {
			t.Fatal(err)
		}
		i, err := natproof.Import(tt.name, rules)
		if err != nil {
			t.Fatal(err)
		}
		checkShares(t, router, tt.name+", original rules", tt.shares)
		for _, engine := range []Engine{EngineNFT, EngineEBPF} {
			if err := router.Clear(t); err != nil {
				t.Fatal(err)
			}
			if err := bringUp(t, router, i, engine); err != nil {
				t.Fatalf("%s: engine %s: %v\n%s", tt.name, engine, err, i.File.Text())
			}
			checkShares(t, router, fmt.Sprintf("%s, engine %s", tt.name, engine), tt.shares)
			if _, err := Down(router.Namespace); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// checkShares has 1000 clients, the same ones each time, send one packet each. Of three
// targets chi-squared has two degrees of freedom: it is above 25 once in 270 000 times.
func checkShares(t *testing.T, router *natproof.Router, what string, services map[string]map[string]float64) {
	t.Helper()
	for address, shares := range services {
		checkService(t, router, what+", "+address, netip.MustParseAddr(address), shares)
	}
}

func checkService(t *testing.T, router *natproof.Router, what string, address netip.Addr, shares map[string]float64) {
	t.Helper()
	const clients, most = 1000, 25
	count := map[string]int{}
	for n := range clients {
		p := rulefile.Packet{
			In: "eth0", Protocol: rulefile.UDP, Source: netip.AddrFrom4([4]byte{192, 0, byte(16 + n>>8), byte(n)}), Destination: address,
			SourcePort: 4000 + uint16(address.As4()[3]), DestinationPort: 53, // of each service another: targets are the same
		}
		got, err := router.Send(p, uint16(1000+n))
		if err != nil {
			t.Fatal(err)
		}
		count[got.Destination()]++
	}
	chi, total := 0.0, 0
	for target, share := range shares {
		want := share * clients
		chi += (float64(count[target]) - want) * (float64(count[target]) - want) / want
		total += count[target]
	}
	t.Logf("%s: %v, chi-squared %.2f", what, count, chi)
	if chi > most || total != clients {
		t.Errorf("%s: %v of %d clients, want shares %v (chi-squared %.1f)", what, count, clients, shares, chi)
	}
}
