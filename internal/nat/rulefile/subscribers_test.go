// SPDX-License-Identifier: Apache-2.0

package rulefile

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
)

const subscribed = `inside: eth1
outside: eth0
pools:
  cgn: {addresses: 203.0.113.0/28, blocks: {size: 512, extra: 256, at_most: 3}}
  small: {addresses: 203.0.113.16, ports: 1024-2047, blocks: {size: 1024}}
subscribers:
  by: /29
  classes:
    default: {ports: 1024, sessions: 2000, new_per_second: 50, burst: 200}
    business: {of: [10.1.0.0/16, 10.2.0.0/24], ports: 8192, new_per_second: 10}
    lab: {of: 10.1.2.0/24}
rules:
  - {snat: 10.0.0.0/8, to: cgn}
  - {snat: 192.168.0.0/16, to: small}
`

func TestSubscribers(t *testing.T) {
	f := must(Parse("f", []byte(subscribed)))
	prefix := netip.MustParsePrefix
	want := Subscribers{Prefix: 29, Default: Share{1024, 2000, 50, 200}, Classes: []SubscriberClass{
		{Name: "business", Of: []netip.Prefix{prefix("10.1.0.0/16"), prefix("10.2.0.0/24")}, Share: Share{8192, 0, 10, 10}, Position: Position{10, 5}},
		{Name: "lab", Of: []netip.Prefix{prefix("10.1.2.0/24")}, Position: Position{11, 5}},
	}}
	if !reflect.DeepEqual(f.Subscribers, want) {
		t.Errorf("got %+v\nwant %+v", f.Subscribers, want)
	}
	if cgn, small := f.Pool("cgn").Blocks, f.Pool("small").Blocks; cgn != (Blocks{Size: 512, Extra: 256, AtMost: 3}) || small != (Blocks{Size: 1024, Extra: 1024, AtMost: MaxExtraBlocks}) || cgn.Most() != 1280 {
		t.Errorf("blocks %v and %v", cgn, small)
	}
	for host, class := range map[string]string{"10.9.0.1": "default", "10.1.9.1": "business", "10.1.2.3": "lab", "10.2.0.255": "business"} {
		if got, _ := f.ShareOf(netip.MustParseAddr(host)); got != class {
			t.Errorf("%s is in class %s, want %s", host, got, class)
		}
	}
	if got := f.Subscribers.Of(netip.MustParseAddr("10.1.2.15")).String(); got != "10.1.2.8" {
		t.Errorf("10.1.2.15 is of subscriber %s", got)
	}
	again := must(Parse("f", []byte(f.Text())))
	if text := again.Text(); text != f.Text() {
		t.Errorf("written again:\n%s\n%s", f.Text(), text)
	}
}

func TestSubscriberProblems(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"by: /29", "by: vlan+address", "f:7:7: by: vlan+address is not possible: a VLAN is known by its interface; write [interface, address] or [interface, /24], and VLAN interfaces such as eth1.10 under inside"},
		{"by: /29", "by: interface", "f:7:7: by: interface does not say what behind an interface is a subscriber: write [interface, address], or [interface, /24] for the length of a prefix"},
		{"by: /29", "by: [/29, /30]", `f:7:13: by is one of address, /24, [interface, address] and [interface, /24], and "/30" is one too many`},
		{"by: /29", "by: 29", `f:7:7: by is address, or the length of a prefix from /8 to /32, and not "29"`},
		{"by: /29", "by: /33", `f:7:7: by is address, or the length of a prefix from /8 to /32, and not "/33"`},
		{"10.2.0.0/24", "10.2.0.0/30", "f:10:34: 10.2.0.0/30 is a part of a subscriber, which is a /29"},
		{"of: 10.1.2.0/24", "of: 10.1.0.0/16", "f:11:15: 10.1.0.0/16 is in class business and in class lab"},
		{"{of: 10.1.2.0/24}", "{ports: 3}", "f:11:5: class lab has no key of, which names its internal addresses; those in no class are in class default"},
		{"default: {", "default: {of: 10.0.0.0/8, ", "f:9:19: class default has all that are in no other class: it has no key of"},
		{"new_per_second: 50, ", "", "f:9:44: burst belongs to new_per_second, which class default does not have"},
		{"burst: 200", "brust: 200", `f:9:64: unknown key "brust" in a class; known keys: of, ports, sessions, new_per_second, burst; did you mean burst?`},
		{"size: 512", "size: 500", "f:4:51: size is a power of two from 64 to 4096, and not 500"},
		{"at_most: 3", "at_most: 8", `f:4:77: at_most is a number from 0 to 7, and not "8"`},
		{"{size: 1024}", "{extra: 1024}", "f:5:62: blocks need a size, as in {size: 512}"},
		{"1024-2047", "1025-2047", "f:5:3: pool small has no block of 1024 ports in 1025-2047: a block begins at a multiple of its size"},
		{"ports: 1024-2047", "ports: none", "f:5:3: pool small gives whole addresses: it has no blocks of ports"},
		{"subscribers:", "limits: {sessions_per_source: 9}\nsubscribers:", "f:6:10: with subscribers, sessions_per_source is the key sessions of their classes"},
	} {
		text := strings.Replace(subscribed, c.old, c.new, 1)
		_, err := Parse("f", []byte(text))
		problems, _ := err.(Problems)
		var got []string
		for _, p := range problems {
			got = append(got, p.String())
		}
		if !slices.Contains(got, c.want) || len(got) != 1 {
			t.Errorf("%s for %s:\ngot %q\nwant %q", c.new, c.old, got, c.want)
		}
	}
}

const zonedRules = `inside: [eth1.10, eth1.20]
outside: [eth0]
subscribers: {by: [interface, /29]}
pools:
  cgn: {addresses: 203.0.113.0/30, blocks: {size: 512}}
rules:
  - {snat: any, to: cgn}
  - {dnat: "tcp 203.0.113.9:80", to: "10.0.0.2:8080", out: eth1.10}
  - {map: 10.0.0.9 <-> 203.0.113.10, in: eth1.20}
`

// Subscribers by interface: rules that send packets to hosts say behind which one these are.
func TestSubscribersByInterface(t *testing.T) {
	f := must(Parse("f", []byte(zonedRules)))
	if !f.Subscribers.ByInterface || f.Subscribers.Prefix != 29 || f.InsideOf(&f.Rules[1]) != "eth1.10" || f.InsideOf(&f.Rules[2]) != "eth1.20" || f.InsideOf(&f.Rules[0]) != "" {
		t.Errorf("%+v", f.Subscribers)
	}
	again := must(Parse("f", []byte(f.Text())))
	if text := again.Text(); text != f.Text() || !strings.Contains(text, "by: [interface, /29]") {
		t.Errorf("written again:\n%s\n%s", f.Text(), text)
	}
	const one = "inside: [eth1.10]"
	if f := must(Parse("f", []byte(strings.NewReplacer("inside: [eth1.10, eth1.20]", one, ", out: eth1.10", "", ", in: eth1.20", "").Replace(zonedRules)))); f.InsideOf(&f.Rules[1]) != "eth1.10" {
		t.Errorf("with one inside interface a forward is to %q", f.InsideOf(&f.Rules[1]))
	}
	for _, c := range []struct{ old, new, want string }{
		{", out: eth1.10", "", `f:8:6: rule "dnat tcp 203.0.113.9:80" must name the inside interface of its hosts by out: with subscribers by interface, hosts behind others may have the same address`},
		{", out: eth1.10", ", out: eth0", `f:8:6: rule "dnat tcp 203.0.113.9:80" must name the inside interface of its hosts by out: with subscribers by interface, hosts behind others may have the same address`},
		{", in: eth1.20", "", `f:9:6: rule "map 10.0.0.9 <-> 203.0.113.10" must name the inside interface of its hosts by in: with subscribers by interface, hosts behind others may have the same address`},
		{"outside: [eth0]", "outside: [eth0, eth1.20]", `f:1:19: interface "eth1.20" is inside and outside: with subscribers by interface, each is on one side`},
		{"size: 512", "size: 512, deterministic: true", "f:5:3: pool cgn: deterministic blocks follow from the addresses of subscribers, and with subscribers by interface several may have the same: take blocks that the log records"},
		{"by: [interface, /29]", "by: /29", "f:8:55: a rule dnat has no key out: the egress interface follows from the translated destination, but with subscribers by interface"},
	} {
		_, err := Parse("f", []byte(strings.Replace(zonedRules, c.old, c.new, 1)))
		problems, _ := err.(Problems)
		var got []string
		for _, p := range problems {
			got = append(got, p.String())
		}
		if !slices.Contains(got, c.want) {
			t.Errorf("%s:\ngot %q\nwant %q", c.new, got, c.want)
		}
	}
}
