// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"strings"
	"testing"

	"natkit/internal/nat/rulefile"
)

// What the kernel's NAT has nothing like is refused by its name.
func TestRefused(t *testing.T) {
	for keys, want := range map[string]string{
		"drain: 203.0.113.1": "f:3:9: pool p: the kernel's NAT drains no address",
		"blocks: {size: 64}": "f:3:9: pool p: the kernel's NAT gives no blocks of ports",
	} {
		f, err := rulefile.Parse("f", []byte("inside: a\noutside: b\npools: {p: {addresses: 203.0.113.0/30, "+keys+"}}\nrules: [{snat: 10.0.0.0/24, to: p}]\n"))
		if err != nil {
			t.Fatal(err)
		}
		if err := refused(f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", keys, err, want)
		}
	}
}

// Stateless maps that are bound to interfaces and have the same addresses can't be told apart by the
// kernel's NAT.
func TestStatelessTwiceRefused(t *testing.T) {
	const head = "inside: [a, d]\noutside: [b, c]\nrules:\n"
	for rules, want := range map[string]string{
		"- {map: 10.1.0.1 <-> 100.64.1.1, out: b, stateless: true}\n- {map: 10.1.0.1 <-> 100.64.2.1, out: c, stateless: true}\n":                           `f:5:4: the kernel's NAT binds no stateless map to interfaces, and "map 10.1.0.1 <-> 100.64.1.1" has 10.1.0.1/32 too`,
		"- {map: 10.1.0.0/24 <-> 100.64.1.0/24, in: a, out: b, stateless: true}\n- {map: 10.2.0.0/24 <-> 100.64.1.0/24, in: d, out: c, stateless: true}\n": "f:5:4: the kernel's NAT binds no stateless map",
		"- {map: 10.1.0.1 <-> 100.64.1.1, out: b}\n- {map: 10.1.0.1 <-> 100.64.2.1, out: c, stateless: true}\n":                                            "",
	} {
		f, err := rulefile.Parse("f", []byte(head+rules))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := CompileRules(f, Facts{}); (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", rules, err, want)
		}
	}
}

// A range of ports that become others at several targets takes elements for each port and target,
// and for the choice of the target once.
func TestShiftedElements(t *testing.T) {
	parse := func(ports, first, second string) *rulefile.File {
		t.Helper()
		f, err := rulefile.Parse("f", []byte("inside: a\noutside: b\nrules:\n- {dnat: \"udp 203.0.113.1:"+ports+"\", to: [\"10.0.0.1:"+first+"\", \"10.0.0.2:"+second+"\"]}\n"+
			"- {dnat: \"tcp 203.0.113.1:"+ports+"\", to: [\"10.0.0.1:"+first+"\", \"10.0.0.2:"+second+"\"]}\n"))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	r, _, err := CompileRules(parse("10000-10999", "30000-30999", "20000-20999"), Facts{})
	if err != nil {
		t.Fatal(err)
	}
	elements := 0
	for _, s := range r[0].Sets {
		elements += len(s.Elements)
	}
	if elements < 4000 || elements > 7000 {
		t.Errorf("%d elements, of which 4000 are of ports", elements)
	}
	many := parse("1-60000", "2-60001", "3-60002")
	for range 5 {
		many.Rules = append(many.Rules, many.Rules...)
	}
	if _, _, err := CompileRules(many, Facts{}); err == nil || !strings.Contains(err.Error(), "f:4:4: the kernel's NAT has an element for each port") {
		t.Errorf("got %v", err)
	}
}
