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

// Two pools may give the same ports: the line of an address is that of the pool it is in. Limits are
// found below limits, whatever classes of subscribers have.
func TestEngineLines(t *testing.T) {
	const text = `inside: eth1
outside: eth0
pools:
  office: {addresses: [203.0.113.8/32], ports: 5000-5999}
  guests:
    addresses: [203.0.113.9/32]
    ports: 5000-5999
rules:
  - {snat: 10.0.0.0/24, to: office}
  - {snat: 10.0.1.0/24, to: guests}
  - {snat: 10.0.2.0/24, to: 203.0.113.10, ports: 5000-5999}
`
	file, err := rulefile.Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s := &Status{file: file, text: text}
	want := map[netip.Addr]int{netip.MustParseAddr("203.0.113.8"): 4, netip.MustParseAddr("203.0.113.9"): 7, netip.MustParseAddr("203.0.113.10"): 11}
	for a := range want {
		s.Addresses = append(s.Addresses, AddressStatus{Address: a, FirstPort: 5000, LastPort: 5999, Ports: 1000})
	}
	for _, a := range addressFacts(s) {
		if a.Line != want[a.Addr] {
			t.Errorf("%s: line %d, want %d", a.Addr, a.Line, want[a.Addr])
		}
	}
}

func TestLimitLines(t *testing.T) {
	const classes = "subscribers:\n  classes:\n    home: {sessions: 1000}\n"
	limits := rulefile.Limits{Sessions: 1000, Mappings: 77, Sources: 5, SessionsPerSource: 6}
	for text, want := range map[string]map[string]int{
		classes + "limits:\n  # few\n  sessions: 1000\n": {"limits": 4, "sessions": 6},
		"limits: {sources: 5}\n" + classes:               {"limits": 1, "sources": 1},
		classes:                                          {},
	} {
		s := &Status{text: text, Limits: limits}
		if got := s.limitLines(); !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v\n%s", got, want, text)
		}
	}
}

// Subscribers behind two interfaces may have one address: each was refused what it was refused.
func TestRefusedOfSameAddress(t *testing.T) {
	of := func(link string, n uint64) snapshot.EngineSource {
		return snapshot.EngineSource{Addr: netip.MustParseAddr("10.0.0.2"), Interface: link, Pool: "cgn", Refused: map[string]uint64{"port-limit": n}}
	}
	was := refusedBefore(&snapshot.Engine{Sources: []snapshot.EngineSource{of("eth1", 5000), of("eth2", 3)}})
	for link, now := range map[string]uint64{"eth1": 5000, "eth2": 10} {
		sub := Subscriber{Of: netip.MustParsePrefix("10.0.0.2/32"), Interface: link, Pool: "cgn", Refused: map[string]uint64{"port-limit": now}}
		if was.since(&sub); sub.Refused["port-limit"] != map[string]uint64{"eth1": 0, "eth2": 7}[link] {
			t.Errorf("%s: %v", link, sub.Refused)
		}
	}
}
