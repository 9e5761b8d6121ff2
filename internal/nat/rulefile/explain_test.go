// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestParsePacket(t *testing.T) {
	for text, want := range map[string]string{
		"tcp 192.168.0.5:40000 -> 192.0.2.1:80 in eth1":  "",
		"udplite 192.168.0.5:1 -> 192.0.2.1:80 in eth1":  "",
		"icmp 192.168.0.5:7 -> 192.0.2.1 in eth1":        "",
		"gre 192.168.0.5 -> 192.0.2.1 in eth1":           "",
		"  192.168.0.5:1  ->  192.0.2.1:80 in eth1":      "tcp 192.168.0.5:1 -> 192.0.2.1:80 in eth1",
		"192.168.0.5 -> 192.0.2.1 in eth1":               "icmp 192.168.0.5 -> 192.0.2.1 in eth1",
		"192.168.0.5 -> 192.0.2.1":                       "error: is not of the form [PROTOCOL] SOURCE",
		"any 192.168.0.5 -> 192.0.2.1 in eth1":           "error: a packet has a protocol",
		"gre 192.168.0.5 -> 192.0.2.1:80 in eth1":        "error: gre has no ports",
		"tcp 192.168.0.5:0 -> 192.0.2.1:80 in eth1":      "error: want a port from 1 to 65535",
		"tcp 2001:db8::1 -> 192.0.2.1:80 in eth1":        `error: "2001:db8::1" is not an IPv4 address`,
		"tcp 192.168.0.5:40000 -> example.org:80 in e":   `error: "example.org:80" is not an IPv4 address`,
		"tcp 192.168.0.5:40000 -> 192.0.2.1:99999 in et": "error: want a port",
		"foo 192.168.0.5:40000 -> 192.0.2.1:80 in eth1":  `error: unknown protocol "foo"`,
	} {
		p, err := ParsePacket(text)
		got := p.String()
		if err != nil {
			got = "error: " + err.Error()
		}
		if want == "" {
			want = text
		}
		if got != want && !(strings.HasPrefix(want, "error: ") && strings.Contains(got, strings.TrimPrefix(want, "error: ")) && err != nil) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// network is one where 192.168.0.0/16 and 172.17.0.0/16 are behind eth1 and docker0,
// the rest behind eth0, whose network is 100.100.100.0/24.
type network struct{}

func (network) Egress(_, to netip.Addr) string {
	switch b := to.As4(); {
	case b[0] == 192 && b[1] == 168:
		return "eth1"
	case b[0] == 172:
		return "docker0"
	case b[0] == 9:
		return "tun0"
	case b[0] == 8 || to == netip.MustParseAddr("100.100.100.1"):
		return ""
	}
	return "eth0"
}

func (network) LinkOf(a netip.Addr) string {
	if netip.MustParsePrefix("100.100.100.0/24").Contains(a) {
		return "eth0"
	}
	return ""
}

func (network) IsLocal(a netip.Addr) bool { return a == netip.MustParseAddr("100.100.100.1") }

const explained = `inside: [eth1, docker0]
outside: [eth0]
pools:
  whole: {addresses: 100.64.0.0/28, ports: none}
rules:
  - masquerade: 192.168.0.0/16
  - snat: 192.168.0.2
    to: 100.100.100.100
  - snat: 192.168.3.0/24
    to: whole
  - masquerade: 172.16.0.0/12
    out: eth1
  - dnat: tcp 100.100.100.100:8080
    to: [172.17.0.2:80, 172.17.0.3:80]
  - dnat: tcp 100.100.100.100:8000-8099
    to: 172.17.0.4:9000-9099
  - dnat: tcp 100.100.100.100:8080
    to: 172.17.0.5:80
    in: docker0
  - dnat: 100.100.100.103
    to: 100.100.100.1
  - map: 192.168.0.9 <-> 100.100.100.101
  - exclude: 192.168.0.0/16 -> 10.0.0.0/8
  - exclude: udp 192.168.0.0/16 -> 11.0.0.0/8:53
  - dnat: tcp 100.100.100.104:443
    to: [172.17.0.6, 172.17.0.7]
    weights: [9, 1]
  - map: 172.18.0.0/24 <-> 172.18.0.0/24
`

func TestExplain(t *testing.T) {
	f := must(Parse("nat.yaml", []byte(explained)))
	for _, c := range []struct{ packet, want string }{
		{"tcp 192.168.0.2:4000 -> 192.0.2.1:80 in eth1", `
exclude: no rule
destination: no rule
route: 192.0.2.1 is reached by eth0
source: APPLIES 7 snat: 192.168.0.2, to: 100.100.100.100: its prefix is /32
source: 6 masquerade: 192.168.0.0/16: its prefix is /16: less specific
result: source becomes 100.100.100.100, the destination stays`},
		{"tcp 192.0.2.1:4000 -> 100.100.100.100:8080 in eth0", `
exclude: no rule
destination: APPLIES 13 dnat: tcp 100.100.100.100:8080, to: [172.17.0.2:80, 172.17.0.3:80]: the port
destination: 15 dnat: tcp 100.100.100.100:8000-8099, to: 172.17.0.4:9000-9099: the range of ports: less specific
destination: 17 dnat: tcp 100.100.100.100:8080, to: 172.17.0.5:80, in: docker0: it is bound to docker0
route: 172.17.0.2 is reached by docker0
source: no rule
result: destination becomes one of 172.17.0.2:80, 172.17.0.3:80 (the client's address chooses), the source stays`},
		{"tcp 192.0.2.1:4000 -> 100.100.100.104:443 in eth0", `
exclude: no rule
destination: APPLIES 25 dnat: tcp 100.100.100.104:443, to: [172.17.0.6, 172.17.0.7], weights: [9, 1]: the port
route: 172.17.0.6 is reached by docker0
source: no rule
result: destination becomes one of 172.17.0.6:443 (9 of 10), 172.17.0.7:443 (1 of 10) (the client's address chooses), the source stays`},
		{"tcp 192.0.2.1:4000 -> 172.18.0.7:443 in eth0", `
exclude: no rule
destination: APPLIES 28 map: 172.18.0.0/24 <-> 172.18.0.0/24: its prefix is /24
route: 172.18.0.7 is reached by docker0
result: source and destination stay: its session is tracked, not translated`},
		{"tcp 172.18.0.7:4000 -> 192.0.2.1:443 in docker0", `
exclude: no rule
destination: no rule
route: 192.0.2.1 is reached by eth0
source: APPLIES 28 map: 172.18.0.0/24 <-> 172.18.0.0/24: its prefix is /24
source: 11 masquerade: 172.16.0.0/12, out: eth1: it is bound to the egress interface eth1
result: source and destination stay: its session is tracked, not translated`},
		{"tcp 192.168.0.7:4000 -> 172.18.0.7:443 in eth1", `
exclude: no rule
destination: APPLIES 28 map: 172.18.0.0/24 <-> 172.18.0.0/24: its prefix is /24
route: 172.18.0.7 is reached by docker0
source: no rule
source: 6 masquerade: 192.168.0.0/16: without out it holds for outside interfaces, and docker0 is none
result: source and destination stay: its session is tracked, not translated`},
		{"tcp 192.168.0.7:4000 -> 100.100.100.100:8090 in eth1", `
exclude: no rule
destination: APPLIES 15 dnat: tcp 100.100.100.100:8000-8099, to: 172.17.0.4:9000-9099: the range of ports
destination: 13 dnat: tcp 100.100.100.100:8080, to: [172.17.0.2:80, 172.17.0.3:80]: another port
destination: 17 dnat: tcp 100.100.100.100:8080, to: 172.17.0.5:80, in: docker0: another port
route: 172.17.0.4 is reached by docker0
route: from inside to inside by an external address (hairpin): the source rules of eth0 hold, where 100.100.100.100 is, and not those of docker0
source: APPLIES 6 masquerade: 192.168.0.0/16: its prefix is /16
result: destination becomes 172.17.0.4:9090, source becomes the address of eth0`},
		{"icmp 192.168.0.9:77 -> 192.0.2.1 in eth1", `
exclude: no rule
destination: no rule
route: 192.0.2.1 is reached by eth0
source: APPLIES 22 map: 192.168.0.9 <-> 100.100.100.101: its prefix is /32
source: 6 masquerade: 192.168.0.0/16: its prefix is /16: less specific
result: source becomes 100.100.100.101, the destination stays`},
		{"gre 192.0.2.1 -> 100.100.100.101 in eth0", `
exclude: no rule
destination: APPLIES 22 map: 192.168.0.9 <-> 100.100.100.101: its prefix is /32
route: 192.168.0.9 is reached by eth1
source: no rule
result: destination becomes 192.168.0.9, the source stays`},
		{"udp 192.168.3.1:4000 -> 10.1.1.1:53 in eth1", `
exclude: APPLIES 23 exclude: 192.168.0.0/16 -> 10.0.0.0/8: excluded
result: goes on untranslated`},
		{"udp 192.168.3.1:4000 -> 11.1.1.1:5353 in eth1", `
exclude: no rule
exclude: 24 exclude: udp 192.168.0.0/16 -> 11.0.0.0/8:53: another port
destination: no rule
route: 11.1.1.1 is reached by eth0
source: APPLIES 9 snat: 192.168.3.0/24, to: whole: its prefix is /24
source: 6 masquerade: 192.168.0.0/16: its prefix is /16: less specific
result: source becomes an address of its own from pool whole, the destination stays`},
		{"tcp 172.17.0.2:4000 -> 192.0.2.1:80 in docker0", `
exclude: no rule
destination: no rule
route: 192.0.2.1 is reached by eth0
source: no rule
source: 11 masquerade: 172.16.0.0/12, out: eth1: it is bound to the egress interface eth1
result: goes on untranslated, unless it is for the external endpoint of a mapping`},
		{"tcp 192.168.0.7:4000 -> 172.17.0.2:80 in eth1", `
exclude: no rule
destination: no rule
route: 172.17.0.2 is reached by docker0
source: no rule
source: 6 masquerade: 192.168.0.0/16: without out it holds for outside interfaces, and docker0 is none
result: goes on untranslated, unless it is for the external endpoint of a mapping`},
		{"tcp 192.0.2.1:4000 -> 100.100.100.1:5000 in eth0", `
exclude: no rule
destination: no rule
result: if it is for the external endpoint of a mapping that lets its sender in, it goes to the internal endpoint, and its source stays; otherwise it is not translated`},
		{"tcp 192.0.2.1:4000 -> 100.100.100.103:5000 in eth0", `
exclude: no rule
destination: APPLIES 20 dnat: 100.100.100.103, to: 100.100.100.1: the address
route: 100.100.100.1 is the gateway itself: it can't be reached by a rule
result: dropped`},
		{"tcp 192.168.0.7:4000 -> 100.100.100.1:5000 in eth1", `
exclude: no rule
destination: no rule
route: 100.100.100.1 is the gateway itself
result: goes on untranslated, unless it is for the external endpoint of a mapping`},
		{"tcp 192.168.0.7:4000 -> 100.64.0.3:5000 in eth1", `
exclude: no rule
destination: no rule
result: if it is for the external endpoint of a mapping that lets its sender in, it goes to the internal endpoint (hairpin); otherwise it is dropped`},
		{"tcp 192.0.2.1:4000 -> 100.64.0.3:5000 in eth0", `
exclude: no rule
destination: no rule
result: if it is for the external endpoint of a mapping that lets its sender in, it goes to the internal endpoint, and its source stays; otherwise it is dropped`},
		{"tcp 192.168.0.7:4000 -> 9.9.9.9:80 in eth1", `
exclude: no rule
destination: no rule
route: 9.9.9.9 is reached by tun0, which is not an interface of the rule file
result: goes on untranslated`},
		{"tcp 192.168.0.7:4000 -> 8.8.8.8:80 in eth1", `
exclude: no rule
destination: no rule
route: there is no route to 8.8.8.8
result: goes on untranslated`},
		{"tcp 192.168.0.7:4000 -> 9.9.9.9:80 in eth9", `
packet: eth9 is not an interface of the rule file`},
		{"tcp 192.168.0.7:4000 -> 192.168.0.7:80 in eth1", `
packet: its source is its destination: dropped`},
		{"udp 192.168.0.7:4000 -> 224.0.0.251:5353 in eth1", `
packet: multicast and broadcast are not translated`},
		{"udp 127.0.0.1:4000 -> 9.9.9.9:5353 in eth1", `
packet: these addresses are not of hosts on a network: not translated`},
	} {
		var got strings.Builder
		for _, s := range Explain(f, must(ParsePacket(c.packet)), network{}) {
			fmt.Fprintf(&got, "\n%s: ", s.Stage)
			if s.Applies {
				got.WriteString("APPLIES ")
			}
			if s.Rule != nil {
				fmt.Fprintf(&got, "%d %s: ", s.Line, s.Text)
			}
			got.WriteString(s.Why)
		}
		if got.String() != c.want {
			t.Errorf("%s\ngot%s\nwant%s", c.packet, got.String(), c.want)
		}
	}
}

// With subscribers by interface a rule says behind which one its hosts are, whatever the routes say,
// and hosts behind another one reach them by the external address.
func TestExplainByInterface(t *testing.T) {
	f := must(Parse("f", []byte(`inside: [eth1, eth2]
outside: [eth0]
subscribers: {by: [interface, address]}
rules:
  - {masquerade: any}
  - {dnat: "tcp 100.100.100.100:80", to: "192.168.0.9:80", out: eth2}
  - {map: 192.168.0.7 <-> 100.100.100.7, in: eth2}
`)))
	for text, want := range map[string]string{
		"tcp 9.9.9.9:1000 -> 100.100.100.100:80 in eth0":   "192.168.0.9 is reached by eth2",
		"tcp 9.9.9.9:1000 -> 100.100.100.7:80 in eth0":     "192.168.0.7 is reached by eth2",
		"tcp 192.168.0.9:1000 -> 100.100.100.7:80 in eth1": "192.168.0.7 is reached by eth2",
	} {
		p, err := ParsePacket(text)
		if err != nil {
			t.Fatal(err)
		}
		var routes []string
		for _, step := range Explain(f, p, network{}) {
			if step.Stage == StageRoute {
				routes = append(routes, step.Why)
			}
		}
		if len(routes) == 0 || routes[0] != want {
			t.Errorf("%s: %q, want %q", text, routes, want)
		}
	}
}
