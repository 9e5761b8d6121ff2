// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/golden"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func ports(first, last uint16) rulefile.PortRange {
	return rulefile.PortRange{First: first, Last: last}
}

func addresses(s string) rulefile.AddressRange {
	if first, last, ok := strings.Cut(s, "-"); ok {
		return rulefile.AddressRange{First: addr(first), Last: addr(last)}
	}
	return rulefile.RangeOf(prefix(s))
}

func target(a string, p ...uint16) rulefile.Target {
	t := rulefile.Target{Address: addr(a)}
	if len(p) > 0 {
		t.Ports = ports(p[0], p[len(p)-1])
	}
	return t
}

func rules(actions ...rulefile.Action) []rulefile.Rule {
	out := make([]rulefile.Rule, len(actions))
	for i, a := range actions {
		out[i] = rulefile.Rule{Action: a, Position: rulefile.Position{Line: i + 1}}
	}
	return out
}

// file is a rule file with one inside and one outside interface.
func file(rules []rulefile.Rule, change ...func(*rulefile.File)) *rulefile.File {
	f := rulefile.New()
	f.Name, f.Inside, f.Outside, f.Rules = "test", []string{"eth1"}, []string{"eth0"}, rules
	for _, c := range change {
		c(f)
	}
	return f
}

// linkRules are bound in every way.
var linkRules = []rulefile.Rule{
	{Action: rulefile.Masquerade{Source: prefix("10.0.0.1/32")}},
	{Action: rulefile.SNAT{Source: prefix("10.0.0.0/8"), Address: addr("100.64.0.1")}, In: "eth1"},
	{Action: rulefile.SNAT{Source: prefix("10.0.0.0/16"), Address: addr("100.64.0.2")}, Out: "eth0"},
	{Action: rulefile.SNAT{Source: prefix("10.0.0.0/24"), Address: addr("100.64.0.3")}, In: "eth1", Out: "eth0"},
	{Action: rulefile.Masquerade{Source: prefix("192.168.0.0/16")}},
	{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.9.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.9")}}, In: "eth0"},
	{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.9.1"), Ports: ports(1, 1000), Targets: []rulefile.Target{target("10.0.0.8")}}},
	{Action: rulefile.Map{Inside: prefix("10.6.0.0/24"), Outside: prefix("100.64.6.0/24")}, Out: "eth0"},
}

// files has every kind of rule, alone and against others.
var files = map[string]*rulefile.File{
	"masquerade": file(rules(rulefile.Masquerade{Source: prefix("192.168.0.0/16")})),
	"source": file(rules(
		rulefile.Masquerade{Source: prefix("192.168.0.0/16"), Ports: ports(20000, 29999)},
		rulefile.SNAT{Source: prefix("192.168.7.0/24"), Pool: "office"},
		rulefile.SNAT{Source: prefix("192.168.7.9/32"), Address: addr("100.100.100.100")},
		rulefile.SNAT{Source: prefix("192.168.8.0/24"), Address: addr("100.100.100.101"), Ports: ports(1024, 2047)},
		rulefile.SNAT{Source: prefix("10.8.0.0/16"), Pool: "own"},
		rulefile.SNAT{Source: prefix("10.9.0.0/16"), Pool: "two"},
		rulefile.Map{Inside: prefix("192.168.0.9/32"), Outside: prefix("100.100.100.102/32")},
		rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24")},
	), func(f *rulefile.File) {
		f.Pools = []rulefile.Pool{
			{Name: "office", Addresses: []rulefile.AddressRange{addresses("100.64.0.0/28")}, Ports: ports(1024, 65535)},
			{Name: "own", Addresses: []rulefile.AddressRange{addresses("100.65.0.0/24")}, OneToOne: true},
			{Name: "two", Addresses: []rulefile.AddressRange{addresses("100.66.0.1-100.66.0.3"), addresses("100.66.1.0/32")}},
		}
	}),
	"destination": file(rules(
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.1", 8080)}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(443, 443), Targets: []rulefile.Target{target("10.0.0.1")}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(8000, 8009), Targets: []rulefile.Target{target("10.0.0.2")}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(8004, 8005), Targets: []rulefile.Target{target("10.0.0.3", 9004, 9005)}},
		rulefile.DNAT{Protocol: rulefile.UDP, Address: addr("100.64.0.1"), Targets: []rulefile.Target{target("10.0.0.4")}},
		rulefile.DNAT{Address: addr("100.64.0.1"), Targets: []rulefile.Target{target("10.0.0.5")}},
		rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.0.0/24")},
		rulefile.Map{Inside: prefix("10.2.0.16/28"), Outside: prefix("100.64.0.16/28")},
	)),
	"bound": file([]rulefile.Rule{
		{Action: rulefile.Masquerade{Source: prefix("10.0.0.0/8")}},
		{Action: rulefile.Masquerade{Source: prefix("10.0.0.0/8")}, Out: "ppp0"},
		{Action: rulefile.SNAT{Source: prefix("10.0.0.0/8"), Address: addr("100.64.0.1")}, In: "eth1"},
		{Action: rulefile.SNAT{Source: prefix("10.0.0.1/32"), Address: addr("100.64.0.2")}, In: "eth1", Out: "eth0"},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.1")}}, In: "eth0"},
		{Action: rulefile.Map{Inside: prefix("10.3.0.0/24"), Outside: prefix("100.65.0.0/24")}, Out: "eth0"},
	}, func(f *rulefile.File) { f.Outside = []string{"eth0", "ppp0"} }),
	"links":        file(linkRules),
	"links-of-two": file(linkRules, func(f *rulefile.File) { f.Outside = []string{"eth0", "ppp0"} }),
	"balance": file(rules(
		rulefile.Masquerade{Source: prefix("192.168.0.0/16")},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.1", 8080), target("10.0.0.2", 80), target("10.0.0.3")}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.2"), Ports: ports(8000, 8001), Targets: []rulefile.Target{target("10.0.0.1", 9000, 9001), target("10.0.0.2", 7000, 7001)}},
	)),
	"exclude": file(rules(
		rulefile.Masquerade{Source: prefix("10.0.0.0/8")},
		rulefile.Exclude{Source: prefix("10.8.0.0/16"), Destination: prefix("10.0.0.0/8")},
		rulefile.Exclude{Source: rulefile.Everywhere, Destination: prefix("10.9.0.0/16")},
		rulefile.Exclude{Protocol: rulefile.UDP, Source: prefix("10.8.3.0/24"), Destination: rulefile.Everywhere, Ports: ports(5000, 5999)},
	)),
	"stateless": file(rules(
		rulefile.Masquerade{Source: prefix("192.168.0.0/16")},
		rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24"), Stateless: true},
		rulefile.Map{Inside: prefix("10.2.0.1/32"), Outside: prefix("100.64.2.1/32"), Stateless: true},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.1")}},
		rulefile.Exclude{Source: prefix("10.1.0.0/24"), Destination: prefix("10.0.0.0/8")},
	)),
	"pool-names": file(rules(
		rulefile.SNAT{Source: prefix("10.1.0.0/16"), Pool: "a"},
		rulefile.SNAT{Source: prefix("10.2.0.0/16"), Pool: "a_0"},
	), func(f *rulefile.File) {
		one := func(a string) rulefile.AddressRange { return rulefile.RangeOf(prefix(a + "/32")) }
		f.Pools = []rulefile.Pool{
			{Name: "a", Addresses: []rulefile.AddressRange{one("100.64.0.8"), one("100.64.0.16")}},
			{Name: "a_0", Addresses: []rulefile.AddressRange{one("100.64.0.24")}},
		}
	}),
	"stateless-beside": file(rules(
		rulefile.Masquerade{Source: prefix("10.0.0.0/8")},
		rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24"), Stateless: true},
		rulefile.Map{Inside: prefix("10.2.0.1/32"), Outside: prefix("100.64.2.1/32"), Stateless: true},
		rulefile.Map{Inside: prefix("10.3.0.0/16"), Outside: prefix("100.70.0.0/16")},
		rulefile.Map{Inside: prefix("10.4.0.0/24"), Outside: prefix("100.70.4.0/24"), Stateless: true},
		rulefile.SNAT{Source: prefix("10.1.0.64/28"), Address: addr("100.64.3.1")},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.1.0.0")}},
		rulefile.DNAT{Protocol: rulefile.UDP, Address: addr("100.64.0.1"), Targets: []rulefile.Target{target("10.1.0.255")}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.2.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.1")}},
	)),
	"options": file(rules(rulefile.Masquerade{Source: prefix("192.168.0.0/16")}), func(f *rulefile.File) {
		f.Defaults.MSS = rulefile.MSSClamp
		f.Limits.SessionsPerSource = 4000
	}),
}

func compile(t testing.TB, f *rulefile.File) nft.Ruleset {
	t.Helper()
	r, _, err := nft.CompileRules(f, nft.Facts{TimeoutPolicies: true, Labels: true})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// What the kernel lists of each compiled file, and what it warns of.
func TestCompileRulesGolden(t *testing.T) {
	for name, f := range files {
		t.Run(name, func(t *testing.T) {
			r, warnings, err := nft.CompileRules(f, nft.Facts{TimeoutPolicies: true, Labels: true})
			if err != nil {
				t.Fatal(err)
			}
			h := namespace(t)
			for range 2 { // a second time replaces, it does not add
				if err := r.Apply(h); err != nil {
					t.Fatal(err)
				}
			}
			var got bytes.Buffer
			for _, w := range warnings {
				fmt.Fprintf(&got, "# %s\n", w)
			}
			got.Write(listRuleset(t, h))
			golden.Check(t, filepath.Join("testdata", "rules-"+name+".nft"), got.Bytes())
		})
	}
}
