// SPDX-License-Identifier: Apache-2.0

package causes

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

var (
	four     = regexp.MustCompile(`\b(\d+\.\d+\.\d+\.\d+)(:\d+|/\d+)?\b`)
	familyIP = regexp.MustCompile(`"family":"ip"`)
)

// sixth is an address or network of IPv6 in the place of one of IPv4.
func sixth(text string) string {
	m := four.FindStringSubmatch(text)
	a, err := netip.ParseAddr(m[1])
	if err != nil || !a.Is4() || a.IsUnspecified() {
		return text
	}
	b := a.As4()
	prefix := "2001:db8"
	if a.IsPrivate() {
		prefix = "fd00:db8"
	}
	address := fmt.Sprintf("%s::%x:%x", prefix, int(b[0])<<8|int(b[1])|0x1000, int(b[2])<<8|int(b[3]))
	switch {
	case a.IsLoopback():
		address = "::1"
	case strings.HasPrefix(m[2], ":"):
		address = "[" + address + "]"
	}
	if strings.HasPrefix(m[2], "/") {
		bits := 0
		fmt.Sscanf(m[2], "/%d", &bits)
		return address + fmt.Sprintf("/%d", bits+96)
	}
	return address + m[2]
}

// withSix is a machine whose networks, flows and rules are of IPv6.
func withSix(t *testing.T, s *snapshot.Snapshot) *snapshot.Snapshot {
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	text := four.ReplaceAllStringFunc(string(data), sixth)
	text = familyIP.ReplaceAllString(text, `"family":"ip6"`)
	text = strings.ReplaceAll(text, `"icmp `, `"icmpv6 `)
	out := new(snapshot.Snapshot)
	if err := json.Unmarshal([]byte(text), out); err != nil {
		t.Fatal(err)
	}
	return out
}

// A command about an address of IPv6 is one for IPv6: conntrack(8) takes such an address only with -f ipv6, and rules
// of family ip never match it.
func TestPrintedFamilies(t *testing.T) {
	cases := maps.Clone(examples)
	maps.Copy(cases, moreExamples)
	seen := 0
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		s := gateway()
		cases[name](s)
		for _, f := range flat(Judge(withSix(t, s))) {
			for _, line := range slices.Concat(f.Remedy, f.Verify) {
				if strings.HasPrefix(line, "#") || !strings.Contains(line, "2001:db8") && !strings.Contains(line, "fd00:db8") {
					continue
				}
				seen++
				if strings.Contains(line, "conntrack -") && !strings.HasPrefix(line, "natkit") && !strings.Contains(line, " -f ipv6 ") || strings.HasPrefix(line, "iptables") {
					t.Errorf("%s (%s): %q", f.Code, name, line)
				}
				if regexp.MustCompile(`\bip [sd]addr (!= )?[0-9a-f]*:`).MatchString(line) {
					t.Errorf("%s (%s): a rule of IPv4 with an address of IPv6: %q", f.Code, name, line)
				}
			}
		}
	}
	if seen < 20 {
		t.Errorf("%d commands have an address of IPv6", seen)
	}
}

// What is lost of IPv6 is a share of what came in, not of the IPv4 packets that were forwarded; and IPv4 that is not
// forwarded makes no fault of a few packets.
func TestLossOfIPv6(t *testing.T) {
	on := func(cause snapshot.NATCause, lost, received, forwarded uint64) func(s *snapshot.Snapshot) {
		return func(s *snapshot.Snapshot) {
			s.Counters = map[string]uint64{"Ip.ForwDatagrams": forwarded}
			link(s, "eth1").RxPackets = received
			link(s, "eth0").MTU = 1400
			s.Drops.Rows = append(s.Drops.Rows, drop(lost, cause, "eth1", sample("tcp [2001:db8:1::20]:4000 -> [2001:db8:9::80]:443 ACK")))
		}
	}
	run(t, []row{
		{"few without a route, and no IPv4", on(snapshot.CauseNoRoute, 5, 1_000_000, 0), ""},
		{"all without a route, beside much IPv4", on(snapshot.CauseNoRoute, 5000, 6000, 1_000_000), "critical no-route"},
		{"few too big, and no IPv4", on(snapshot.CauseTooBig, 3, 1_000_000, 0), "advice mtu-drop"},
		{"many too big, beside much IPv4", on(snapshot.CauseTooBig, 80, 1000, 1_000_000), "critical mtu-drop"},
		{"few with TTL exceeded, and no IPv4", on(snapshot.CauseTTL, 12, 1_000_000, 0), ""},
		{"all with TTL exceeded, beside much IPv4", on(snapshot.CauseTTL, 12, 14, 1_000_000), "warning ttl-exceeded"},
	})
}

// Segments of IPv6 are clamped by rules of IPv6, which has larger headers; those of IPv4 as before.
func TestClampFamilies(t *testing.T) {
	for _, tt := range []struct {
		samples []string
		want    []string // table and size
	}{
		{[]string{"tcp 192.168.1.20:4000 -> 203.0.113.80:443 ACK"}, []string{"ip 1360"}},
		{[]string{"tcp [2001:db8:1::20]:4000 -> [2001:db8:9::80]:443 ACK"}, []string{"ip6 1340"}},
		{[]string{"tcp 192.168.1.20:4000 -> 203.0.113.80:443 ACK", "tcp [2001:db8:1::20]:4000 -> [2001:db8:9::80]:443 ACK"}, []string{"ip 1360", "ip6 1340"}},
		{nil, []string{"ip 1360"}},
	} {
		s := gateway()
		examples["mtu-drop"](s)
		s.Drops.Rows[len(s.Drops.Rows)-1].Samples = tt.samples
		found := Judge(s)
		if len(found) == 0 || found[0].Code != "mtu-drop" {
			t.Fatalf("%q: %s", tt.samples, titles(found))
		}
		var got []string
		for _, line := range found[0].Remedy {
			if m := regexp.MustCompile(`add rule (\S+) natkit-mss forward oifname .* size set (\d+)`).FindStringSubmatch(line); m != nil {
				got = append(got, m[1]+" "+m[2])
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.samples, got, tt.want)
		}
	}
}

// A link-local address is nobody's without its interface.
func TestPingOfLinkLocal(t *testing.T) {
	s := gateway()
	s.Drops.Rows = append(s.Drops.Rows, drop(500, snapshot.CauseNeighbour, "eth0", sample("tcp [2001:db8:1::20]:4000 -> [2001:db8:9::80]:443 SYN")))
	s.Routes = []snapshot.RouteAnswer{{Source: addr("2001:db8:1::20"), Dest: addr("2001:db8:9::80"), In: "eth1", Out: "eth0", Via: addr("fe80::1"), Answer: snapshot.RouteFound}}
	found := Judge(s)
	if len(found) == 0 || found[0].Code != "next-hop-silent" || !slices.Contains(found[0].Verify, "ping -c 3 "+quote("fe80::1%eth0")) {
		t.Errorf("%+v", found)
	}
}

// The wider rule of a protocol without ports names none.
func TestWiderRange(t *testing.T) {
	nft := snapshot.Chain{Backend: "nft", Family: "ip", Table: "nat", Name: "post"}
	legacy := snapshot.Chain{Backend: "iptables-legacy", Family: "ip", Table: "nat", Name: "POSTROUTING"}
	inet := snapshot.Chain{Backend: "nft", Family: "inet", Table: "nat", Name: "post"}
	use := func(protocol, outside, dest string) snapshot.SNATUse {
		return snapshot.SNATUse{Protocol: protocol, Outside: addr(outside), Dest: snapshot.EndpointOf(netip.MustParseAddrPort(dest))}
	}
	for _, tt := range []struct {
		chain snapshot.Chain
		use   snapshot.SNATUse
		want  string
	}{
		{nft, use("tcp", "198.51.100.1", "203.0.113.80:443"), "nft 'insert rule ip nat post ip daddr 203.0.113.80 tcp dport 443 snat to 198.51.100.1:1024-65535'"},
		{nft, use("icmp", "198.51.100.1", "203.0.113.80:0"), "nft 'insert rule ip nat post ip daddr 203.0.113.80 meta l4proto icmp snat to 198.51.100.1'"},
		{inet, use("icmpv6", "2001:db8::1", "[2001:db8:9::1]:0"), "nft 'insert rule inet nat post ip6 daddr 2001:db8:9::1 meta l4proto icmpv6 snat ip6 to 2001:db8::1'"},
		{inet, use("udp", "2001:db8::1", "[2001:db8:9::1]:53"), "nft 'insert rule inet nat post ip6 daddr 2001:db8:9::1 udp dport 53 snat ip6 to [2001:db8::1]:1024-65535'"},
		{legacy, use("gre", "198.51.100.1", "203.0.113.80:0"), "iptables-legacy -t nat -I POSTROUTING -p gre -d 203.0.113.80 -j SNAT --to-source 198.51.100.1"},
		{legacy, use("udp", "198.51.100.1", "203.0.113.80:53"), "iptables-legacy -t nat -I POSTROUTING -p udp -d 203.0.113.80 --dport 53 -j SNAT --to-source 198.51.100.1:1024-65535"},
	} {
		if got := widerRange(tt.chain, tt.use); got != tt.want {
			t.Errorf("%s\nwant %s", got, tt.want)
		}
	}
}
