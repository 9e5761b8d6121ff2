// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// whole has every key of a rule file.
const whole = `inside: [eth1, docker0]
outside: [eth0, ppp0]
pools:
  office: {addresses: [100.64.0.0/28], ports: 1024-65535}
  whole:
    addresses: [100.65.0.1, 100.65.0.16-100.65.0.31]
    ports: none
    arp: none
defaults:
  mapping: endpoint-independent
  filtering: {tcp: address-and-port-dependent, udp: endpoint-independent}
  mss: clamp
  inbound_refresh: false
  port_parity: true
  timeouts: {tcp_opening: 250s, tcp_transitory: 5m, tcp_established: 7440s, udp: 300s, icmp: 1m30s}
limits: {sessions: 1000000, mappings: 500000, sources: 1000, sessions_per_source: 4000, icmp_errors_per_second: 50}
rules:
  - masquerade: 192.168.0.0/16
    out: eth0
  - masquerade: any
    in: docker0
    out: ppp0
    ports: 20000-29999
    filtering: endpoint-independent
  - snat: 10.8.0.0/16
    to: office
    out: eth0
    mapping: {tcp: address-and-port-dependent}
  - {snat: 192.168.0.2, to: 100.100.100.100, ports: 1024-2047, arp: none, mss: keep}
  - snat: 10.9.0.0/16
    to: whole
  - dnat: tcp 100.100.100.100:8080
    to: [172.17.0.2:80, 172.17.0.3:80]
  - dnat: udp 100.100.100.100:8000-8099
    to: 172.17.0.2:9000-9099
    in: eth0
  - dnat: 100.100.100.102
    to: 172.17.0.4
  - dnat: gre 100.100.100.100
    to: 172.17.0.4
  - map: 192.168.0.9 <-> 100.100.100.101
  - map: 10.1.0.0/24 <-> 100.64.1.0/24
    stateless: true
  - exclude: 10.8.0.0/16 -> 10.0.0.0/8
  - exclude: udp any -> 10.0.0.0/8:53
`

func TestParseEveryKey(t *testing.T) {
	f, err := Parse("nat.yaml", []byte(whole))
	if err != nil {
		t.Fatal(err)
	}
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	want := New()
	want.Name = "nat.yaml"
	want.Inside, want.Outside = []string{"eth1", "docker0"}, []string{"eth0", "ppp0"}
	want.Pools = []Pool{
		{Name: "office", Addresses: []AddressRange{RangeOf(prefix("100.64.0.0/28"))}, Ports: PortRange{1024, 65535}},
		{Name: "whole", Addresses: []AddressRange{{addr("100.65.0.1"), addr("100.65.0.1")}, {addr("100.65.0.16"), addr("100.65.0.31")}}, OneToOne: true, Silent: true},
	}
	want.Defaults = Defaults{
		Mapping:   PerClass[MappingMode]{EndpointIndependent, EndpointIndependent, EndpointIndependent},
		Filtering: PerClass[FilteringMode]{FilterAddressAndPort, FilterEndpointIndependent, FilterAddressAndPort},
		MSS:       MSSClamp, PortParity: true, Timeouts: DefaultTimeouts(),
	}
	want.Defaults.Timeouts[TimeoutTCPOpening] = 250 * time.Second
	want.Defaults.Timeouts[TimeoutTCPClosing] = 5 * time.Minute
	want.Defaults.Timeouts[TimeoutTCPReset] = 5 * time.Minute
	want.Defaults.Timeouts[TimeoutICMP] = 90 * time.Second
	want.Limits = Limits{Sessions: 1000000, Mappings: 500000, Sources: 1000, SessionsPerSource: 4000, ICMPErrorsPerSecond: 50}
	everyone := FilterEndpointIndependent
	want.Rules = []Rule{
		{Action: Masquerade{Source: prefix("192.168.0.0/16")}, Out: "eth0"},
		{Action: Masquerade{Source: Everywhere, Ports: PortRange{20000, 29999}}, In: "docker0", Out: "ppp0", Filtering: PerClass[FilteringMode]{everyone, everyone, everyone}},
		{Action: SNAT{Source: prefix("10.8.0.0/16"), Pool: "office"}, Out: "eth0", Mapping: PerClass[MappingMode]{ClassTCP: AddressAndPortDependent}},
		{Action: SNAT{Source: prefix("192.168.0.2/32"), Address: addr("100.100.100.100"), Ports: PortRange{1024, 2047}}, Silent: true, MSS: MSSKeep},
		{Action: SNAT{Source: prefix("10.9.0.0/16"), Pool: "whole"}},
		{Action: DNAT{TCP, addr("100.100.100.100"), PortRange{8080, 8080}, []Target{{addr("172.17.0.2"), PortRange{80, 80}}, {addr("172.17.0.3"), PortRange{80, 80}}}, nil}},
		{Action: DNAT{UDP, addr("100.100.100.100"), PortRange{8000, 8099}, []Target{{addr("172.17.0.2"), PortRange{9000, 9099}}}, nil}, In: "eth0"},
		{Action: DNAT{Address: addr("100.100.100.102"), Targets: []Target{{Address: addr("172.17.0.4")}}}},
		{Action: DNAT{Protocol: GRE, Address: addr("100.100.100.100"), Targets: []Target{{Address: addr("172.17.0.4")}}}},
		{Action: Map{Inside: prefix("192.168.0.9/32"), Outside: prefix("100.100.100.101/32")}},
		{Action: Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24"), Stateless: true}},
		{Action: Exclude{Source: prefix("10.8.0.0/16"), Destination: prefix("10.0.0.0/8")}},
		{Action: Exclude{Protocol: UDP, Source: Everywhere, Destination: prefix("10.0.0.0/8"), Ports: PortRange{53, 53}}},
	}
	if f.Rules[2].Position != (Position{25, 5}) || f.Pools[1].Position != (Position{5, 3}) {
		t.Errorf("positions: rule %v, pool %v", f.Rules[2].Position, f.Pools[1].Position)
	}
	if got := withoutPositions(f); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if w := f.Warnings(); len(w) > 0 {
		t.Errorf("warnings: %v", w)
	}
}

// withoutPositions is what two files of different text are compared by.
func withoutPositions(f *File) *File {
	g := *f
	g.positions = nil
	g.Pools = append([]Pool(nil), f.Pools...)
	for i := range g.Pools {
		g.Pools[i].Position = Position{}
	}
	g.Subscribers.Classes = append([]SubscriberClass(nil), f.Subscribers.Classes...)
	for i := range g.Subscribers.Classes {
		g.Subscribers.Classes[i].Position = Position{}
	}
	g.Rules = append([]Rule(nil), f.Rules...)
	for i := range g.Rules {
		g.Rules[i].Position = Position{}
	}
	return &g
}

func BenchmarkParse50000(b *testing.B) {
	var text strings.Builder
	text.WriteString("inside: eth1\noutside: eth0\nrules:\n")
	for i := range 50000 {
		fmt.Fprintf(&text, "  - dnat: tcp 10.%d.%d.%d:8080\n    to: 192.168.1.9:80\n", i>>16, i>>8&255, i&255)
	}
	data := []byte(text.String())
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := Parse("nat.yaml", data); err != nil {
			b.Fatal(err)
		}
	}
}

func TestParseFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nat.yaml")
	if err := os.WriteFile(path, []byte(whole), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := ParseFile(t.Context(), path)
	if err != nil || f.Name != path || len(f.Rules) != 13 {
		t.Errorf("%v, %v", f, err)
	}
	if _, err := ParseFile(t.Context(), path+"x"); err == nil || !strings.HasPrefix(err.Error(), "read rule file: ") {
		t.Errorf("missing: %v", err)
	}
}
