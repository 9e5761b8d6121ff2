// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"natkit/internal/nat/control"
)

// What natkit subscribers writes: limits where there are any, a block's address where it is another
// one than the subscriber's, refusals by how many they are, and totals.
func TestSubscribersText(t *testing.T) {
	n := func(v int) *int { return &v }
	since := time.Date(2026, 11, 20, 3, 12, 7, 0, time.UTC)
	external, other := netip.MustParseAddr("203.0.113.16"), netip.MustParseAddr("203.0.113.17")
	refused := map[string]uint64{"port-limit": 16, "rate-limit": 400}
	for name, s := range map[string]*control.Subscribers{
		"subscribers.txt": {
			By: "ports", Count: 1300,
			Rows: []control.Subscriber{
				{Of: netip.MustParsePrefix("100.64.3.7/32"), Pool: "cgn", Class: "default", External: external, Sessions: 2000, SessionLimit: 4000, Ports: n(900), PortLimit: 1000, HoldDown: n(120),
					Blocks: []control.PortBlock{{Address: external, First: 1024, Last: 1535}, {Address: other, First: 4096, Last: 4351}}, BlockLimit: 4, Share: 0.9, Refused: refused, Since: since},
				{Of: netip.MustParsePrefix("100.64.8.0/24"), Pool: "cgn", Class: "business", External: external, Sessions: 1, Ports: n(1), HoldDown: n(0),
					Blocks: []control.PortBlock{{Address: external, First: 2048, Last: 2559}}, BlockLimit: 4, Since: since.Add(25 * time.Hour)},
				{Of: netip.MustParsePrefix("100.64.9.1/32"), Class: "default", Since: since},
			},
			Pools:   []control.SubscriberTotal{{Name: "cgn", Subscribers: 1299, Sessions: 54321, Ports: n(40000), Blocks: 1350, Refused: refused}, {Subscribers: 1}},
			Classes: []control.SubscriberTotal{{Name: "business", Subscribers: 1, Sessions: 1, Ports: n(1), Blocks: 1}, {Name: "default", Subscribers: 1299, Sessions: 54320, Ports: n(39999), Blocks: 1349, Refused: refused}},
		},
		"subscribers-none.txt": {By: "ports"},
	} {
		var b bytes.Buffer
		if err := SubscribersText(&b, s); err != nil {
			t.Fatal(err)
		}
		printed(t, name, b.Bytes())
	}
}
