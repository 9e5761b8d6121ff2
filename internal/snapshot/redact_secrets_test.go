// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

// secrets are in the text that plant writes into every field: none may be left of any.
var secrets = []string{
	"gw7.acme.example", "acme", "blue-team", "cart-db", "52:54:00:a1:b2:c3", "203.0.113.77", "2001:db8:beef::5", "alice",
	"the boss's laptop", "ACME-DROP", "vip_customers",
}

const planted = `gw7.acme.example gw7: blue-team cart-db 52:54:00:a1:b2:c3 203.0.113.77 2001:db8:beef::5 /home/alice/nat.conf:3 ` +
	`ip saddr @vip_customers meta skuid "alice" log prefix "ACME-DROP" drop comment "the boss's laptop" ` +
	`-m set --match-set vip_customers src -m owner --uid-owner alice -m comment --comment "the boss's laptop" -j LOG --log-prefix ACME-DROP`

// plant writes the text into every string of v, and into one more of every list and map.
func plant(v reflect.Value, depth int) {
	if e, ok := v.Addr().Interface().(*Endpoint); ok {
		*e = EndpointFrom(netip.MustParseAddr("203.0.113.77"), 80)
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(planted)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				plant(v.Field(i), depth+1)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.Uint8 && depth < 12 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			plant(v.Index(0), depth+1)
		}
	case reflect.Pointer:
		if depth < 12 {
			v.Set(reflect.New(v.Type().Elem()))
			plant(v.Elem(), depth+1)
		}
	case reflect.Map:
		if v.Type().Key().Kind() == reflect.String && depth < 12 {
			v.Set(reflect.MakeMap(v.Type()))
			value := reflect.New(v.Type().Elem()).Elem()
			plant(value, depth+1)
			v.SetMapIndex(reflect.ValueOf(planted).Convert(v.Type().Key()), value)
		}
	}
}

// A snapshot that has secrets in every text has none after Redact, whatever fields it gets.
func TestRedactLeavesNoSecret(t *testing.T) {
	s := &Snapshot{}
	plant(reflect.ValueOf(s).Elem(), 0)
	s.Host.Hostname, s.Netns.Name, s.Netns.Container = "gw7.acme.example", "blue-team", "docker cart-db"
	if s.KernelLog != nil {
		s.KernelLog.Lines = []string{"[  12.345678] ACME-DROP: IN=eth0 OUT= MAC=52:54:00:a1:b2:c3:52:54:00:11:22:33:08:00 SRC=203.0.113.77 DST=192.0.2.1"}
	}
	newRedactor("key").Redact(s)
	var out bytes.Buffer
	if err := Save(&out, s); err != nil {
		t.Fatal(err)
	}
	for _, secret := range secrets {
		if at := strings.Index(strings.ToLower(out.String()), strings.ToLower(secret)); at >= 0 {
			t.Errorf("%q is left: ...%s...", secret, out.String()[max(0, at-80):min(out.Len(), at+80)])
		}
	}
}

// A machine may be called by any word.
func TestRedactHostname(t *testing.T) {
	for _, name := range []string{"vm", "gw", "nat", "x", "host", "gw.example.org", "GW"} {
		s := &Snapshot{}
		s.Host.Hostname = name
		Redact(s)
		if s.Host.Hostname != "host-1" {
			t.Errorf("%q became %q", name, s.Host.Hostname)
		}
	}
}

// A sink of the log names hosts of others: one that is an address is replaced as such, and none by a word that means
// something else in other texts.
func TestRedactSinks(t *testing.T) {
	s := &Snapshot{
		Log: &Log{Sinks: []LogSink{
			{URL: "ipfix+udp://192.0.2.9:4739", Hostname: "192.0.2.9"},
			{URL: "syslog+tls://log.acme.example:6514?ca=/etc/acme/ca.pem&name=acme.example", Hostname: "log.acme.example", Error: "lookup log.acme.example: no such host"},
			{URL: "kafka://k1.acme.example:9092,k2.acme.example:9092/nat?user=alice&password-file=/etc/acme/secret", Hostname: "k1.acme.example"},
			{URL: "json+tcp://log:5140", Hostname: "log"},
			{URL: "json+tcp://[2001:db8::9]:5140", Hostname: "2001:db8::9"},
		}},
		KernelLog: &KernelLog{Lines: []string{"tcp 192.168.0.2:80 -> 192.0.2.1:80"}},
		Chains:    []Chain{{Backend: "nft", Walk: []Rule{{Text: "ct state new log drop"}}}},
		Owners:    []Owner{{Where: "/var/log/natkit"}},
	}
	r := newRedactor("key")
	r.Redact(s)
	var out bytes.Buffer
	if err := Save(&out, s); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"acme", "alice", "192.0.2.9", "host-1.168", "168.0.2"} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("%q is left:\n%s", secret, out.String())
		}
	}
	at := func(a string) string { return r.addr(netip.MustParseAddr(a)).String() }
	if want := "tcp " + at("192.168.0.2") + ":80 -> " + at("192.0.2.1") + ":80"; s.KernelLog.Lines[0] != want {
		t.Errorf("%q, want %q", s.KernelLog.Lines[0], want)
	}
	if want := "json+tcp://[" + at("2001:db8::9") + "]:5140"; s.Log.Sinks[4].URL != want {
		t.Errorf("%q, want %q", s.Log.Sinks[4].URL, want)
	}
	if s.Log.Sinks[0].Hostname != at("192.0.2.9") || s.Log.Sinks[0].URL != "ipfix+udp://"+at("192.0.2.9")+":4739" {
		t.Errorf("%+v", s.Log.Sinks[0])
	}
	if s.Chains[0].Walk[0].Text != "ct state new log drop" || s.Owners[0].Where != "/var/log/natkit" {
		t.Errorf("%q, %q", s.Chains[0].Walk[0].Text, s.Owners[0].Where)
	}
}

// Names that are words of the kernel, numbers, or parts of addresses change nothing else.
func TestRedactNamesAsOtherWords(t *testing.T) {
	for _, tt := range []struct{ name, hostname, netns, container, want string }{
		{"word", "nat.acme.example", "", "", "host-1"},
		{"number", "gw7", "100", "docker 80", ""},
		{"hexadecimal", "gw7", "be", "docker cafe", ""},
		{"octet", "gw7", "192", "docker 168.0", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &Snapshot{
				Host: Host{Hostname: tt.hostname}, Netns: Netns{Name: tt.netns, Container: tt.container},
				Chains:    []Chain{{Backend: "nft", Table: "nat", Walk: []Rule{{Text: "limit rate 100/second tcp dport 80 drop", Matches: []Match{{Keys: []string{"tcp dport"}, Values: []string{"80"}}}}}}},
				Sysctls:   map[string]string{"net.core.somaxconn": "100"},
				KernelLog: &KernelLog{Lines: []string{"fe80::be -> fe80::cafe", "100.64.0.1 -> 192.168.0.1", "in be: cafe"}},
			}
			r := NewRedactor()
			r.Redact(s)
			at := func(a string) string { return r.addr(netip.MustParseAddr(a)).String() }
			lines := s.KernelLog.Lines
			if want := at("fe80::be") + " -> " + at("fe80::cafe"); lines[0] != want {
				t.Errorf("%q, want %q", lines[0], want)
			}
			if want := at("100.64.0.1") + " -> " + at("192.168.0.1"); lines[1] != want {
				t.Errorf("%q, want %q", lines[1], want)
			}
			if tt.netns == "be" && lines[2] != "in "+s.Netns.Name+": "+strings.TrimPrefix(s.Netns.Container, "docker ") {
				t.Errorf("%q in %+v", lines[2], s.Netns)
			}
			rule := s.Chains[0].Walk[0]
			if s.Chains[0].Table != "nat" || rule.Text != "limit rate 100/second tcp dport 80 drop" || rule.Matches[0].Values[0] != "80" || s.Sysctls["net.core.somaxconn"] != "100" {
				t.Errorf("%+v %v", s.Chains[0], s.Sysctls)
			}
			if tt.want != "" && s.Host.Hostname != tt.want || s.Host.Hostname == tt.hostname || tt.netns != "" && (s.Netns.Name == tt.netns || s.Netns.Container == tt.container) {
				t.Errorf("%+v %+v", s.Host, s.Netns)
			}
		})
	}
}

// The name of a set is the same in a rule's text, in its condition and in the set, whatever it is called.
func TestRedactSets(t *testing.T) {
	for _, name := range []string{"vip_customers", "acme/vip", "acme.vip-4"} {
		s := &Snapshot{
			Chains: []Chain{{Backend: "nft", Walk: []Rule{
				{Text: "ip saddr @" + name + " drop", Matches: []Match{{Keys: []string{"ip saddr"}, Set: name}}},
				{Text: "tcp dport vmap @" + name + ".", Map: name},
				{Text: "-m set --match-set " + name + " src -j DROP"},
				{Text: "tcp dport @__set0", Matches: []Match{{Set: "__set0"}}},
			}}},
			Sets: []Set{{Backend: "nft", Name: name}, {Backend: "nft", Name: "__set0"}},
		}
		Redact(s)
		walk := s.Chains[0].Walk
		if s.Sets[0].Name != "set-1" || walk[0].Text != "ip saddr @set-1 drop" || walk[0].Matches[0].Set != "set-1" || walk[1].Map != "set-1" || walk[1].Text != "tcp dport vmap @set-1." ||
			walk[2].Text != "-m set --match-set set-1 src -j DROP" || s.Sets[1].Name != "__set0" || walk[3].Matches[0].Set != "__set0" || walk[3].Text != "tcp dport @__set0" {
			t.Errorf("%s: %+v %+v", name, s.Sets, walk)
		}
	}
}

// nft writes what people wrote as it is, iptables with a backslash before quotes; either may be cut off.
func TestRedactRemarks(t *testing.T) {
	for text, want := range map[string]string{
		`drop comment "C:\"`:                            `drop comment "redacted"`,
		`drop comment "C:\" accept`:                     `drop comment "redacted" accept`,
		`log prefix "acme: drop`:                        `log prefix "redacted"`,
		`-m comment --comment "the \"boss\"" -j ACCEPT`: `-m comment --comment "redacted" -j ACCEPT`,
		`-m comment --comment "the \"boss`:              `-m comment --comment "redacted"`,
		`-m comment --comment boss -j ACCEPT`:           `-m comment --comment "redacted" -j ACCEPT`,
		`--match-set cali40s:acme src`:                  `--match-set set-1 src`,
	} {
		if got := newRedactor("key").text(text); got != want {
			t.Errorf("%s became %s, want %s", text, got, want)
		}
	}
}
