// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// balanced is a rule with targets of these last octets and weights.
func balanced(weights map[int]int) *DNAT {
	a := &DNAT{Protocol: TCP, Address: netip.MustParseAddr("192.0.2.1"), Ports: PortRange{80, 80}}
	octets := make([]int, 0, len(weights))
	for octet := range weights {
		octets = append(octets, octet)
	}
	slices.Sort(octets)
	for _, octet := range octets {
		a.Targets = append(a.Targets, Target{Address: netip.AddrFrom4([4]byte{10, 0, byte(octet >> 8), byte(octet)}), Ports: a.Ports})
		a.Weights = append(a.Weights, weights[octet])
	}
	return a
}

// equal is n targets with the same weight.
func equal(n, weight int) map[int]int {
	all := map[int]int{}
	for octet := range n {
		all[octet+1] = weight
	}
	return all
}

// owners is which address each entry of the rule's table leads to.
func owners(a *DNAT) (out []netip.Addr) {
	for _, i := range a.Table() {
		out = append(out, a.Targets[i].Address)
	}
	return out
}

// Every target's share is that of its weight, to a percent of all, and to a tenth of its own.
func TestSharesFollowWeights(t *testing.T) {
	for what, weights := range map[string]map[int]int{
		"two":       {1: 9, 2: 1},
		"three":     {1: 5, 2: 3, 3: 2},
		"primes":    {1: 97, 2: 89, 3: 61, 4: 7},
		"fine":      {1: 1000, 2: 1},
		"unequal":   {1: 1, 2: 2, 3: 4, 4: 8, 5: 16, 6: 32, 7: 64, 8: 128},
		"equal":     equal(10, 1),
		"most":      equal(maxTargets, 1),
		"most, odd": {1: 655, 2: 1, 3: 1, 4: 1},
	} {
		a := balanced(weights)
		count := make([]int, len(a.Targets))
		table := a.Table()
		for _, target := range table {
			count[target]++
		}
		for i, n := range count {
			share, want := float64(n)/float64(len(table)), float64(a.Weights[i])/float64(a.totalWeight())
			if math.Abs(share-want) > min(0.01, 0.1*want+0.0001) {
				t.Errorf("%s: target %d has a share of %.4f, want %.4f", what, i, share, want)
			}
		}
	}
}

// When a target goes or comes, or gets another weight, its entries are shared out, and
// hardly any other moves, for each number of targets that a table's size is for.
func TestFewClientsMove(t *testing.T) {
	check := func(what string, before, after map[int]int) {
		t.Helper()
		a, b := owners(balanced(before)), owners(balanced(after))
		if len(a) != len(b) {
			t.Fatalf("%s: tables of %d and %d", what, len(a), len(b))
		}
		share := func(weights map[int]int, octet int) float64 {
			all := 0
			for _, w := range weights {
				all += w
			}
			return float64(weights[octet]) / float64(all)
		}
		must := 0.0 // what changes hands at least
		for octet := range equal(300, 1) {
			must += math.Max(0, share(before, octet)-share(after, octet))
		}
		moved := 0
		for i := range a {
			if a[i] != b[i] {
				moved++
			}
		}
		if got := float64(moved) / float64(len(a)); got > must+0.06 {
			t.Errorf("%s: %.3f of the clients move, of which %.3f must", what, got, must)
		}
	}
	for n := 2; n <= 9; n++ {
		check(fmt.Sprint(n, " and one more"), equal(n, 1), equal(n+1, 1))
		check(fmt.Sprint(n+1, " and one less"), equal(n+1, 1), equal(n, 1))
	}
	check("20 and one more", equal(20, 1), equal(21, 1))
	check("a tenth goes", map[int]int{1: 9, 2: 9, 3: 2}, map[int]int{1: 9, 2: 9})
	check("a heavy one goes", map[int]int{1: 5, 2: 3, 3: 2}, map[int]int{2: 3, 3: 2})
	check("one comes", map[int]int{1: 5, 2: 3}, map[int]int{1: 5, 2: 3, 3: 2})
	check("a weight grows", map[int]int{1: 9, 2: 1}, map[int]int{1: 8, 2: 2})
	check("a weight shrinks", map[int]int{1: 10, 2: 10, 3: 10}, map[int]int{1: 10, 2: 10, 3: 5})
}

// Weights that are the same are none.
func TestEqualWeightsAreNone(t *testing.T) {
	weighted, plain := balanced(equal(7, 5)), balanced(equal(7, 5))
	plain.Weights = nil
	if !slices.Equal(weighted.Table(), plain.Table()) {
		t.Error("tables differ")
	}
	if got := balanced(equal(1, 3)).Table(); !slices.Equal(got, []int{0}) {
		t.Errorf("one target: %v", got)
	}
}

func TestWeightsAreRead(t *testing.T) {
	rule := func(rest string) string {
		return head + "- dnat: tcp 192.0.2.1:80\n  to: [10.0.0.1, 10.0.0.2]\n" + rest
	}
	for _, c := range []struct{ text, want string }{
		{rule("  weights: [9, 1]"), ""},
		{rule("  weights: [1000, 1]"), ""},
		{head + "- {weights: [9, 1], dnat: tcp 192.0.2.1:80, to: [10.0.0.1, 10.0.0.2]}", ""},
		{head + "- {dnat: tcp 192.0.2.1:80, to: 10.0.0.1, weights: 5}", ""},
		{rule("  weights: [9]"), "6:12: want a weight for each of the 2 targets, in the order of to, and not 1"},
		{rule("  weights: [9, 1, 1]"), "and not 3"},
		{rule("  weights: 9"), "and not 1"},
		{rule("  weights: [9, 0]"), "6:16: a target of weight 0 gets nobody: take it out of to, and its weight"},
		{rule("  weights: [9, -1]"), `6:16: a weight is a number from 1 to 1000, and not "-1"`},
		{rule("  weights: [9, 1001]"), `6:16: a weight is a number from 1 to 1000, and not "1001"`},
		{rule("  weights: [0.9, 0.1]"), `6:13: a weight is a number from 1 to 1000, and not "0.9"`},
		{rule("  weights: [9, 01]"), `6:16: a weight: a number begins with no zero, and "01" does`},
		{rule("  weights: [9, [1]]"), "6:16: a weight must be one value"},
		{rule("  weights: {a: 9}"), "6:12: weights must be a list"},
		{rule("  weights: []"), "6:12: weights is empty"},
		{rule("  weight: [9, 1]"), "did you mean weights?"},
		{head + "- {masquerade: any, weights: [1, 2]}", "4:21: unknown key \"weights\""},
	} {
		_, err := Parse("f", []byte(c.text))
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s\n%v", c.text, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s\n%v, want %s", c.text, err, c.want)
		}
	}
	var to, weights string
	for i := range 10 {
		to += fmt.Sprintf("10.0.0.%d, ", i+1)
		weights += "1000, "
	}
	text := head + "- {dnat: tcp 192.0.2.1:80, to: [" + to + "10.0.0.99], weights: [" + weights + "1]}"
	if _, err := Parse("f", []byte(text)); err == nil || !strings.Contains(err.Error(), "weight 1 of 10001 in all is less than one client of 6552") {
		t.Errorf("too fine: %v", err)
	}
}
