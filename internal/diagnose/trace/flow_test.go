// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParseFlow(t *testing.T) {
	side := func(prefix string, port uint16) Side {
		s := Side{Port: port}
		if prefix != "" {
			s.Addresses = netip.MustParsePrefix(prefix)
		}
		return s
	}
	for text, want := range map[string]Flow{
		"tcp 10.0.0.5 -> 198.51.100.1:443":        {"tcp", side("10.0.0.5/32", 0), side("198.51.100.1/32", 443)},
		"10.0.0.0/8 -> any":                       {"", side("10.0.0.0/8", 0), Side{}},
		"UDP *:5353 -> 10.1.2.3/16":               {"udp", side("", 5353), side("10.1.0.0/16", 0)},
		"tcp [2001:db8::1]:4000 -> 2001:db8::/32": {"tcp", side("2001:db8::1/128", 4000), side("2001:db8::/32", 0)},
		"icmp any -> ::ffff:10.0.0.1":             {"icmp", Side{}, side("10.0.0.1/32", 0)},
		"sctp":                                    {"sctp", Side{}, Side{}},
	} {
		got, err := ParseFlow(text)
		if err != nil || got != want {
			t.Errorf("%q: got %+v, %v, want %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                             "empty",
		"tcp 10.0.0.5":                 "want [PROTOCOL]",
		"tpc 10.0.0.5 -> 10.0.0.6":     "want [PROTOCOL]",
		"tcp 10.0.0.5:0 -> 10.0.0.6":   "a port from 1",
		"tcp 10.0.0.5:99999 -> any":    "a port from 1",
		"tcp 10.0.0.500 -> any":        "want an address",
		"icmp 10.0.0.5:7 -> 10.0.0.6":  "icmp has no ports",
		"tcp 10.0.0.5 -> 2001:db8::1":  "one end is IPv4",
		"tcp fe80::1%eth0 -> 10.0.0.1": "want an address",
		"icmp any -> 2001:db8::1":      "write icmpv6",
		"icmpv6 10.0.0.5 -> any":       "write icmp",
	} {
		if _, err := ParseFlow(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %q", text, err, want)
		}
	}
}

func FuzzParseFlow(f *testing.F) {
	for _, s := range []string{"tcp 10.0.0.5 -> 198.51.100.1:443", "any -> *:53", "udp [::1]:1 -> ::/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		flow, err := ParseFlow(s)
		if err != nil {
			return
		}
		for _, side := range []Side{flow.A, flow.B} {
			if side.Addresses.IsValid() && side.Addresses != side.Addresses.Masked() {
				t.Errorf("%q: %v has bits behind its length", s, side.Addresses)
			}
		}
	})
}
