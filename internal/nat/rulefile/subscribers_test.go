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
		{"by: /29", "by: vlan+address", "f:7:7: by: vlan+address is not possible: engines know packets by their addresses, so hosts with the same address in two VLANs are one; write address, or the length of a prefix such as /24"},
		{"by: /29", "by: 29", `f:7:7: by is address, or the length of a prefix from /8 to /32, and not "29"`},
		{"by: /29", "by: /33", `f:7:7: by is address, or the length of a prefix from /8 to /32, and not "/33"`},
		{"10.2.0.0/24", "10.2.0.0/30", "f:10:34: 10.2.0.0/30 is a part of a subscriber, which is a /29"},
		{"of: 10.1.2.0/24", "of: 10.1.0.0/16", "f:11:15: 10.1.0.0/16 is in class business and in class lab"},
		{"{of: 10.1.2.0/24}", "{ports: 3}", "f:11:5: class lab has no key of, which names its internal addresses; those in no class are in class default"},
		{"default: {", "default: {of: 10.0.0.0/8, ", "f:9:19: class default has all that are in no other class: it has no key of"},
		{"new_per_second: 50, ", "", "f:9:44: burst belongs to new_per_second, which class default does not have"},
		{"burst: 200", "brust: 200", `f:9:64: unknown key "brust" in a class: there are of, ports, sessions, new_per_second, burst; did you mean burst?`},
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
