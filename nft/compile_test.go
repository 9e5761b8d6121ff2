// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/nat"
	"natkit/nft"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func ports(first, last uint16) nat.PortRange {
	return nat.PortRange{First: first, Last: last}
}

func addresses(s string) nat.AddressRange {
	if first, last, ok := strings.Cut(s, "-"); ok {
		return nat.AddressRange{First: addr(first), Last: addr(last)}
	}
	return nat.RangeOf(prefix(s))
}

func target(a string, p ...uint16) nat.Target {
	t := nat.Target{Address: addr(a)}
	if len(p) > 0 {
		t.Ports = ports(p[0], p[len(p)-1])
	}
	return t
}

func rules(actions ...nat.Action) []nat.Rule {
	out := make([]nat.Rule, len(actions))
	for i, a := range actions {
		out[i] = nat.Rule{Action: a, Position: nat.Position{Line: i + 1}}
	}
	return out
}

// file is a rule file with one inside and one outside interface.
func file(rules []nat.Rule, change ...func(*nat.File)) *nat.File {
	f := nat.New()
	f.Name, f.Inside, f.Outside, f.Rules = "test", []string{"eth1"}, []string{"eth0"}, rules
	for _, c := range change {
		c(f)
	}
	return f
}

// linkRules are bound in every way.
var linkRules = []nat.Rule{
	{Action: nat.Masquerade{Source: prefix("10.0.0.1/32")}},
	{Action: nat.SNAT{Source: prefix("10.0.0.0/8"), Address: addr("100.64.0.1")}, In: "eth1"},
	{Action: nat.SNAT{Source: prefix("10.0.0.0/16"), Address: addr("100.64.0.2")}, Out: "eth0"},
	{Action: nat.SNAT{Source: prefix("10.0.0.0/24"), Address: addr("100.64.0.3")}, In: "eth1", Out: "eth0"},
	{Action: nat.Masquerade{Source: prefix("192.168.0.0/16")}},
	{Action: nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.9.1"), Ports: ports(80, 80), Targets: []nat.Target{target("10.0.0.9")}}, In: "eth0"},
	{Action: nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.9.1"), Ports: ports(1, 1000), Targets: []nat.Target{target("10.0.0.8")}}},
	{Action: nat.Map{Inside: prefix("10.6.0.0/24"), Outside: prefix("100.64.6.0/24")}, Out: "eth0"},
}

// files has every kind of rule, alone and against others.
var files = map[string]*nat.File{
	"masquerade": file(rules(nat.Masquerade{Source: prefix("192.168.0.0/16")})),
	"source": file(rules(
		nat.Masquerade{Source: prefix("192.168.0.0/16"), Ports: ports(20000, 29999)},
		nat.SNAT{Source: prefix("192.168.7.0/24"), Pool: "office"},
		nat.SNAT{Source: prefix("192.168.7.9/32"), Address: addr("100.100.100.100")},
		nat.SNAT{Source: prefix("192.168.8.0/24"), Address: addr("100.100.100.101"), Ports: ports(1024, 2047)},
		nat.SNAT{Source: prefix("10.8.0.0/16"), Pool: "own"},
		nat.SNAT{Source: prefix("10.9.0.0/16"), Pool: "two"},
		nat.Map{Inside: prefix("192.168.0.9/32"), Outside: prefix("100.100.100.102/32")},
		nat.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24")},
	), func(f *nat.File) {
		f.Pools = []nat.Pool{
			{Name: "office", Addresses: []nat.AddressRange{addresses("100.64.0.0/28")}, Ports: ports(1024, 65535)},
			{Name: "own", Addresses: []nat.AddressRange{addresses("100.65.0.0/24")}, OneToOne: true},
			{Name: "two", Addresses: []nat.AddressRange{addresses("100.66.0.1-100.66.0.3"), addresses("100.66.1.0/32")}},
		}
	}),
	"destination": file(rules(
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []nat.Target{target("10.0.0.1", 8080)}},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(443, 443), Targets: []nat.Target{target("10.0.0.1")}},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(8000, 8009), Targets: []nat.Target{target("10.0.0.2")}},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(8004, 8005), Targets: []nat.Target{target("10.0.0.3", 9004, 9005)}},
		nat.DNAT{Protocol: nat.UDP, Address: addr("100.64.0.1"), Targets: []nat.Target{target("10.0.0.4")}},
		nat.DNAT{Address: addr("100.64.0.1"), Targets: []nat.Target{target("10.0.0.5")}},
		nat.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.0.0/24")},
		nat.Map{Inside: prefix("10.2.0.16/28"), Outside: prefix("100.64.0.16/28")},
	)),
	"bound": file([]nat.Rule{
		{Action: nat.Masquerade{Source: prefix("10.0.0.0/8")}},
		{Action: nat.Masquerade{Source: prefix("10.0.0.0/8")}, Out: "ppp0"},
		{Action: nat.SNAT{Source: prefix("10.0.0.0/8"), Address: addr("100.64.0.1")}, In: "eth1"},
		{Action: nat.SNAT{Source: prefix("10.0.0.1/32"), Address: addr("100.64.0.2")}, In: "eth1", Out: "eth0"},
		{Action: nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []nat.Target{target("10.0.0.1")}}, In: "eth0"},
		{Action: nat.Map{Inside: prefix("10.3.0.0/24"), Outside: prefix("100.65.0.0/24")}, Out: "eth0"},
	}, func(f *nat.File) { f.Outside = []string{"eth0", "ppp0"} }),
	"links":        file(linkRules),
	"links-of-two": file(linkRules, func(f *nat.File) { f.Outside = []string{"eth0", "ppp0"} }),
	"balance": file(rules(
		nat.Masquerade{Source: prefix("192.168.0.0/16")},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []nat.Target{target("10.0.0.1", 8080), target("10.0.0.2", 80), target("10.0.0.3")}},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.2"), Ports: ports(8000, 8001), Targets: []nat.Target{target("10.0.0.1", 9000, 9001), target("10.0.0.2", 7000, 7001)}},
	)),
	"exclude": file(rules(
		nat.Masquerade{Source: prefix("10.0.0.0/8")},
		nat.Exclude{Source: prefix("10.8.0.0/16"), Destination: prefix("10.0.0.0/8")},
		nat.Exclude{Source: nat.Everywhere, Destination: prefix("10.9.0.0/16")},
		nat.Exclude{Protocol: nat.UDP, Source: prefix("10.8.3.0/24"), Destination: nat.Everywhere, Ports: ports(5000, 5999)},
	)),
	"stateless": file(rules(
		nat.Masquerade{Source: prefix("192.168.0.0/16")},
		nat.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24"), Stateless: true},
		nat.Map{Inside: prefix("10.2.0.1/32"), Outside: prefix("100.64.2.1/32"), Stateless: true},
		nat.DNAT{Protocol: nat.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []nat.Target{target("10.0.0.1")}},
		nat.Exclude{Source: prefix("10.1.0.0/24"), Destination: prefix("10.0.0.0/8")},
	)),
	"options": file(rules(nat.Masquerade{Source: prefix("192.168.0.0/16")}), func(f *nat.File) {
		f.Defaults.MSS = nat.MSSClamp
		f.Limits.SessionsPerSource = 4000
	}),
}

func compile(t testing.TB, f *nat.File) nft.Ruleset {
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
			golden := filepath.Join("testdata", "rules-"+name+".nft")
			if *update {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("nft list ruleset:\n%s\nwant:\n%s", got.Bytes(), want)
			}
		})
	}
}
