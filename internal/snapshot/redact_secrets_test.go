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
	Redact(s)
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
