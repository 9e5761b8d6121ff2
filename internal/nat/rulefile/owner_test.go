// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

const owned = `inside: [eth1]
outside: [eth0, eth2]
pools:
  cgn: {addresses: 203.0.113.0/30, ports: 1024-65535, blocks: {size: 512, deterministic: true}}
rules:
  - {snat: 10.0.0.0/24, to: cgn}
  - dnat: tcp 198.51.100.1:8080
    to: [172.17.0.2:80, 172.17.0.3:80]
  - dnat: tcp 198.51.100.1:8000-8099
    to: 172.17.0.4:9000-9099
  - dnat: tcp 198.51.100.1:443
    to: 172.17.0.5
    in: eth0
  - dnat: tcp 198.51.100.1:443
    to: 172.17.0.6
    in: eth1
  - dnat: tcp 198.51.100.1:443
    to: 172.17.0.7
  - dnat: 198.51.100.1
    to: 172.17.0.8
  - map: 192.168.4.0/24 <-> 100.100.4.0/24
  - map: 192.168.9.0/26 <-> 100.100.4.64/26
  - map: 172.18.0.0/24 <-> 172.18.0.0/24
  - exclude: udp any -> 100.100.4.9:53
  - dnat: udp 203.0.113.2:5000
    to: 10.0.0.7
`

func TestOwners(t *testing.T) {
	f := must(Parse("nat.yaml", []byte(owned)))
	for _, c := range []struct{ asked, protocol, want string }{
		{"198.51.100.1:8080", "tcp", "dnat 172.17.0.2:80 172.17.0.3:80"},
		{"198.51.100.1:8042", "tcp", "dnat 172.17.0.4:9042"},
		{"198.51.100.1:8042", "udp", "dnat 172.17.0.8:8042"},
		{"198.51.100.1:443", "tcp", "dnat 172.17.0.5:443, dnat 172.17.0.7:443"}, // by eth0 and by eth2; eth1 is inside
		{"198.51.100.1:443", "any", "dnat 172.17.0.8:443, dnat 172.17.0.5:443, dnat 172.17.0.7:443"},
		{"198.51.100.1:77", "icmp", "dnat 172.17.0.8:77"},
		{"198.51.100.2:443", "tcp", ""},
		{"100.100.4.7:1234", "any", "map 192.168.4.7:1234"},
		{"100.100.4.65:0", "gre", "map 192.168.9.1:0"},
		{"100.100.4.9:53", "udp", ""},
		{"100.100.4.9:53", "tcp", "map 192.168.4.9:53"},
		{"172.18.0.3:22", "tcp", "map 172.18.0.3:22"},
		{"203.0.113.2:5000", "tcp", "block 10.0.0.30/32 4608-5119"},
		{"203.0.113.2:5000", "udp", "dnat 10.0.0.7:5000"},
		{"203.0.113.2:5000", "any", "dnat 10.0.0.7:5000, block 10.0.0.30/32 4608-5119"},
		{"203.0.113.2:5000", "gre", ""},
		{"203.0.113.2:1023", "tcp", ""},
		{"[2001:db8::1]:5", "tcp", ""},
	} {
		var got []string
		for _, o := range f.Owners(netip.MustParseAddrPort(c.asked), must(ParseProtocol(c.protocol))) {
			if o.Rule == nil {
				got = append(got, fmt.Sprintf("block %v %d-%d", o.Block.Subscriber, o.Block.FirstPort, o.Block.LastPort))
				continue
			}
			one := o.Rule.Kind()
			for _, end := range o.Internal {
				one += " " + end.String()
			}
			got = append(got, one)
		}
		if got := strings.Join(got, ", "); got != c.want {
			t.Errorf("%s %s: got %q, want %q", c.asked, c.protocol, got, c.want)
		}
	}
}

// Whose an endpoint is by Owners is where Explain sends a packet for it.
func TestOwnersAreExplained(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 17))
	f := must(Parse("nat.yaml", []byte(owned)))
	f.Outside = []string{"eth0"}
	found := 0
	for range 5000 {
		to := pick(rng, "198.51.100.1", "198.51.100.1", "100.100.4.9", "100.100.4.70", "172.18.0.200", "203.0.113.2")
		p := Packet{In: "eth0", Protocol: pick(rng, TCP, UDP, ICMP), Source: netip.MustParseAddr("192.0.2.9"), Destination: netip.MustParseAddr(to),
			SourcePort: 4000, DestinationPort: pick(rng, 53, 443, 8080, 8000, 8099, 8100, 5000, uint16(rng.IntN(65536)))}
		var rule *Rule
		for _, s := range Explain(f, p, network{}) {
			if s.Stage == StageDestination && s.Applies {
				rule = s.Rule
			}
		}
		owners := f.Owners(netip.AddrPortFrom(p.Destination, p.DestinationPort), p.Protocol)
		if rule == nil != (len(owners) == 0 || owners[0].Rule == nil) || rule != nil && owners[0].Rule != rule {
			t.Fatalf("%v: owners %+v, explained by %v", p, owners, rule)
		}
		if rule != nil {
			found++
		}
	}
	if found < 1000 {
		t.Errorf("only %d packets had a rule", found)
	}
}
