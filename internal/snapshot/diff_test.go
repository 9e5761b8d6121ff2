// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"net/netip"
	"reflect"
	"testing"
)

func TestDifferences(t *testing.T) {
	a := &Snapshot{
		Sysctls:    map[string]string{"net.ipv4.ip_forward": "1", "net.netfilter.nf_conntrack_count": "5", "x": "1"},
		Conntrack:  &Conntrack{Count: 5, Max: 100, Buckets: 10},
		Interfaces: []Interface{{Name: "eth0", Up: true, MTU: 1500, RxPackets: 7, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}, {Name: "eth1", MTU: 1500}},
		Chains:     []Chain{{Backend: "nft", Family: "ip", Table: "f", Name: "c", Policy: "accept", Rules: 2, Walk: []Rule{{Text: "drop"}, {Text: "drop"}}}},
	}
	b := &Snapshot{
		Sysctls:    map[string]string{"net.ipv4.ip_forward": "0", "net.netfilter.nf_conntrack_count": "9", "y": "2"},
		Conntrack:  &Conntrack{Count: 9, Max: 200, Buckets: 10},
		Interfaces: []Interface{{Name: "eth0", Up: true, MTU: 1400, RxPackets: 9, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}},
		Chains:     []Chain{{Backend: "nft", Family: "ip", Table: "f", Name: "c", Policy: "accept", Rules: 1, Walk: []Rule{{Text: "drop"}}}},
	}
	want := []Difference{
		{"chain nft ip f c", "rules: 2, policy accept", "rules: 1, policy accept"},
		{"interface eth0", "up, MTU 1500, 10.0.0.1/24", "up, MTU 1400, 10.0.0.1/24"},
		{"interface eth1", "down, MTU 1500", ""},
		{"limit of the connection tracking table", "100", "200"},
		{"rule of nft ip f c: drop (2)", "there", ""},
		{"setting net.ipv4.ip_forward", "1", "0"},
		{"setting x", "1", ""},
		{"setting y", "", "2"},
	}
	if got := Differences(a, b); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	if got := Differences(a, a); len(got) > 0 {
		t.Errorf("with itself %+v", got)
	}
	// What one of them does not know is no difference.
	b.Chains, b.Sysctls = nil, nil
	for _, d := range Differences(a, b) {
		if d.What[:5] == "chain" || d.What[:5] == "setti" {
			t.Errorf("%+v", d)
		}
	}
}
