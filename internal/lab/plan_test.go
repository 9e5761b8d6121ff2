// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"natkit/internal/lab"
	"natkit/internal/testutil/golden"
)

// What Up would make, and the drawing, as text.
func TestPlanGolden(t *testing.T) {
	for name, c := range map[string]struct {
		topology string
		options  lab.Options
	}{
		"routed":            {"routed", lab.Options{}},
		"routed-none":       {"routed", lab.Options{Rules: lab.RulesNone}},
		"routed-clients":    {"routed", lab.Options{Clients: 3, Addresses: lab.Addresses{Client: netip.MustParsePrefix("10.0.0.1/29"), Near: netip.MustParseAddr("10.0.0.2")}}},
		"carrier":           {"carrier", lab.Options{}},
		"published":         {"published", lab.Options{Server: lab.ServerBuiltin}},
		"published-clients": {"published", lab.Options{Clients: 2, Rules: lab.RulesIPTables, Addresses: lab.Addresses{Port: 81}}},
		"published-local":   {"published", lab.Options{LocalClient: true}},
	} {
		t.Run(name, func(t *testing.T) {
			steps, err := lab.Plan(c.topology, c.options)
			if err != nil {
				t.Fatal(err)
			}
			drawing, err := lab.PlanDrawing(c.topology, c.options)
			if err != nil {
				t.Fatal(err)
			}
			got := []byte(drawing + "\n" + strings.Join(steps, "\n") + "\n")
			golden.Check(t, filepath.Join("testdata", name+".txt"), got)
		})
	}
}

// Every mistake has its own words, and all of them are reported at once.
func TestOptionsRefused(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	for _, c := range []struct {
		name, topology string
		options        lab.Options
		want           []string
	}{
		{"topology", "ring", lab.Options{}, []string{`topology "ring"`, "carrier, published or routed"}},
		{"name", "routed", lab.Options{Name: "../x"}, []string{`name "../x"`}},
		{"long name", "routed", lab.Options{Name: strings.Repeat("x", 65)}, []string{"at most 64"}},
		{"rules", "routed", lab.Options{Rules: "pf"}, []string{`rules "pf"`, "iptables-legacy"}},
		{"server", "routed", lab.Options{Server: "apache"}, []string{`server "apache"`, "nginx"}},
		{"clients", "routed", lab.Options{Clients: -1}, []string{"-1 clients"}},
		{"many clients", "routed", lab.Options{Clients: 201}, []string{"201 clients"}},
		{"local in routed", "routed", lab.Options{LocalClient: true}, []string{"published"}},
		{"many local", "published", lab.Options{LocalClient: true, Clients: 2}, []string{"2 clients"}},
		{"port in routed", "routed", lab.Options{Addresses: lab.Addresses{Port: 1}}, []string{"port 1"}},
		{"port of the server", "published", lab.Options{Addresses: lab.Addresses{Port: 80}}, []string{"port 80"}},
		{"ipv6", "routed", lab.Options{Addresses: lab.Addresses{Client: prefix("fd00::2/64")}}, []string{"fd00::2", "IPv4"}},
		{"overlap", "routed", lab.Options{Addresses: lab.Addresses{Far: prefix("192.168.0.9/16"), Server: addr("192.168.0.10")}}, []string{"overlap"}},
		{"outside its network", "published", lab.Options{Addresses: lab.Addresses{Server: addr("172.18.0.2")}}, []string{"server address 172.18.0.2", "172.17.0.0/16"}},
		{"same, client", "published", lab.Options{Addresses: lab.Addresses{Near: addr("192.168.0.2")}}, []string{"both the client"}},
		{"same, server", "published", lab.Options{Addresses: lab.Addresses{Server: addr("172.17.0.1")}}, []string{"both the far side"}},
		{"network address", "routed", lab.Options{Addresses: lab.Addresses{Near: addr("192.168.0.0")}}, []string{"near address 192.168.0.0"}},
		{"broadcast address", "routed", lab.Options{Addresses: lab.Addresses{Near: addr("192.168.0.255")}}, []string{"near address 192.168.0.255"}},
		{"multicast", "routed", lab.Options{Addresses: lab.Addresses{Far: prefix("224.0.0.1/24"), Server: addr("224.0.0.2")}}, []string{"far address 224.0.0.1", "server address 224.0.0.2"}},
		{"loopback", "routed", lab.Options{Addresses: lab.Addresses{Far: prefix("127.0.1.1/24"), Server: addr("127.0.1.2")}}, []string{"far address 127.0.1.1"}},
		{"no room", "routed", lab.Options{Addresses: lab.Addresses{Client: prefix("10.0.0.1/31"), Near: addr("10.0.0.0")}}, []string{"/30"}},
		{"no room for clients", "routed", lab.Options{Clients: 2, Addresses: lab.Addresses{Client: prefix("10.0.0.1/30"), Near: addr("10.0.0.2")}}, []string{"2 clients", "10.0.0.0/30"}},
		{"several carriers", "carrier", lab.Options{Clients: 2}, []string{"one client namespace", "leave out --clients"}},
		{"no room for subscribers", "carrier", lab.Options{Addresses: lab.Addresses{Client: prefix("100.64.0.2/22")}}, []string{"100.64.0.0/22", "/20"}},
		{"broadcast address among subscribers", "carrier", lab.Options{Addresses: lab.Addresses{Client: prefix("100.64.0.2/21")}}, []string{"100.64.0.0/21", "/20"}},
		{"near among subscribers", "carrier", lab.Options{Addresses: lab.Addresses{Near: addr("100.64.5.1")}}, []string{"100.64.5.1", "100.64.4.0/22"}},
		{"all at once", "routed", lab.Options{Name: "a b", Rules: "x", Addresses: lab.Addresses{Near: addr("1.2.3.4")}}, []string{`"a b"`, `"x"`, "1.2.3.4"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := lab.Plan(c.topology, c.options)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not have %q", err, want)
				}
			}
		})
	}
}

// A journal that this natkit cannot read, such as one of a later version, does not hide the other labs.
func TestListBesideUnreadable(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("NATKIT_RUN_DIR", dir)
	if err := os.Mkdir(filepath.Join(dir, "lab"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, line := range map[string]string{
		"good":  `{"lab":{"topology":"routed","options":{},"maker":{"pid":1,"start":1},"boot":"x"}}`,
		"later": `{"later":1}`,
		"ring":  `{"lab":{"topology":"ring","options":{},"maker":{"pid":1,"start":1},"boot":"x"}}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, "lab", name+".journal"), []byte(line+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	infos, err := lab.List()
	if err == nil || !strings.Contains(err.Error(), "later") || !strings.Contains(err.Error(), `"ring"`) {
		t.Errorf("error %v", err)
	}
	if len(infos) != 1 || infos[0].Name != "good" {
		t.Errorf("labs %+v, want good alone", infos)
	}
	steps, err := lab.PlanDown([]string{"good"})
	if err != nil || len(steps) == 0 || !strings.Contains(steps[0], "good") {
		t.Errorf("plan %q, %v", steps, err)
	}
	if _, err := lab.PlanDown([]string{"later"}); err == nil || !strings.Contains(err.Error(), "record of a kind") {
		t.Errorf("plan for a lab that cannot be read: %v", err)
	}
	if steps, err := lab.PlanDown(nil); err == nil || len(steps) == 0 {
		t.Errorf("plan for all %q, %v", steps, err)
	}
}
