// SPDX-License-Identifier: Apache-2.0

package control

import (
	"net/netip"
	"reflect"
	"testing"

	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
)

// The rules of a file as facts: those that translate, with the lines that change them.
func TestRuleFacts(t *testing.T) {
	const text = `inside: eth1
outside: eth0
rules:
  - masquerade: 10.0.0.0/24
    # ports: 7000-7999
    ports: 5000-5999
  - exclude: 10.0.0.0/8 -> any
  - {snat: 10.0.1.0/24, to: 203.0.113.9}
  - dnat: tcp 203.0.113.9:80
    to: [10.0.0.2:8080, 10.0.0.3:81]
`
	file, err := rulefile.Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	ids := file.RuleIDs()
	for i, want := range []snapshot.EngineRule{
		{Line: 4, Ports: snapshot.PortRange{Min: 5000, Max: 5999}, PortsLine: 6},
	} {
		want.ID, want.Rule = ids[i].String(), file.Rules[i].String()
		if got := ruleFacts(file, text)[i]; !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	var to []snapshot.Endpoint
	for _, r := range ruleFacts(file, text) {
		to = append(to, r.To...)
	}
	if want := []snapshot.Endpoint{snapshot.EndpointOf(netip.MustParseAddrPort("10.0.0.2:8080")), snapshot.EndpointOf(netip.MustParseAddrPort("10.0.0.3:81"))}; !reflect.DeepEqual(to, want) || len(ruleFacts(file, text)) != 3 {
		t.Errorf("%v, want %v; %d rules", to, want, len(ruleFacts(file, text)))
	}
}
