// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"testing"

	"natkit/internal/snapshot"
)

// What a chain is for its type says, whatever the name of its table.
func TestPastChains(t *testing.T) {
	for _, c := range []struct {
		chain snapshot.Chain
		past  bool
	}{
		{snapshot.Chain{Family: "ip", Table: "nat", Type: "nat", Hook: "postrouting", Rules: 1}, false},
		{snapshot.Chain{Family: "ip", Table: "nat", Type: "filter", Hook: "postrouting", Rules: 1}, true},
		{snapshot.Chain{Family: "inet", Table: "filter", Type: "filter", Hook: "forward", Policy: "drop"}, true},
		{snapshot.Chain{Family: "ip", Table: "filter", Type: "filter", Hook: "forward", Policy: "accept"}, false},
		{snapshot.Chain{Family: "ip", Table: "filter", Type: "filter", Hook: "input", Rules: 1}, false},
		{snapshot.Chain{Family: "ip6", Table: "filter", Type: "filter", Hook: "forward", Rules: 1}, false},
	} {
		if got := len(PastChains([]snapshot.Chain{c.chain})) > 0; got != c.past {
			t.Errorf("%+v: past %v, want %v", c.chain, got, c.past)
		}
	}
}
