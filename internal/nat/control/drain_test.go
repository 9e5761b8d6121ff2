// SPDX-License-Identifier: Apache-2.0

package control

import (
	"strings"
	"testing"

	"natkit/internal/testutil/ktest"
)

const drainRules = `
inside: [in]
outside: [out]
pools: {p: {addresses: 198.51.100.20-198.51.100.21}}
rules: [{snat: 10.0.0.0/24, to: p}]
`

// Status shows what an address that is drained still has: its sessions go on, and are counted until
// they end.
func TestDrainStatus(t *testing.T) {
	ktest.Root(t)
	b := newTestbed(t)
	b.up(drainRules, b.options())
	b.ping(b.client, "198.51.100.9")
	status := func() *Status {
		t.Helper()
		s, err := ReadStatus(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	var home string
	for _, a := range status().Addresses {
		if a.Sessions != nil || a.Drains {
			t.Errorf("%s is drained: %+v", a.Address, a)
		}
		if a.FreeICMP < a.Ports {
			home = a.Address.String()
		}
	}
	text := strings.Replace(drainRules, "21}}", "21, drain: "+home+"}}", 1)
	if _, err := Apply(t.Context(), b.parse(text), text, b.options()); err != nil {
		t.Fatal(err)
	}
	b.ping(b.client, "198.51.100.9") // of the same session
	for _, a := range status().Addresses {
		switch {
		case a.Address.String() != home:
			if a.Drains || a.FreeICMP != a.Ports {
				t.Errorf("beside the drained address: %+v", a)
			}
		case !a.Drains || a.Sessions == nil || *a.Sessions != 1 || a.EndsIn == nil || *a.EndsIn <= 0:
			t.Errorf("the drained address: %+v", a)
		}
	}
}
