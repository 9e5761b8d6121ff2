// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
)

// machine is a gateway with two inside networks and two ways out.
func machine() Facts {
	link := func(index int, name, addr string, inside bool) Link {
		return Link{Name: name, Index: index, Ifindex: index + 10, MTU: 1500, Inside: inside, Outside: !inside, Ethernet: true, Addresses: []netip.Prefix{netip.MustParsePrefix(addr)}}
	}
	return Facts{
		Links: []Link{
			link(0, "eth1", "192.168.1.1/24", true), link(1, "eth2", "192.168.2.1/24", true),
			link(2, "eth0", "203.0.113.1/24", false), link(3, "wan", "198.51.100.1/24", false),
		},
		Local: []netip.Addr{
			netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("192.168.2.1"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("198.51.100.1"),
		},
		LocalPorts: [2]uint16{32768, 60999},
	}
}

func gatewayFile(rules ...rulefile.Rule) *rulefile.File {
	f := rulefile.New()
	f.Name = "nat.yaml"
	f.Inside, f.Outside = []string{"eth1", "eth2"}, []string{"eth0", "wan"}
	f.Pools = []rulefile.Pool{
		{Name: "office", Addresses: []rulefile.AddressRange{rulefile.RangeOf(netip.MustParsePrefix("203.0.113.16/28"))}},
		{Name: "whole", Addresses: []rulefile.AddressRange{rulefile.RangeOf(netip.MustParsePrefix("203.0.113.64/30"))}, OneToOne: true},
	}
	f.Rules = rules
	return f
}

func mustCompile(t *testing.T, f *rulefile.File, facts Facts) *Tables {
	t.Helper()
	tables, err := Compile(f, facts)
	if err != nil {
		t.Fatal(err)
	}
	return tables
}

func TestTicks(t *testing.T) {
	for d, want := range map[time.Duration]uint32{0: 0, 1: 1, 1 << 20: 1, 1<<20 + 1: 2, time.Second: 954} {
		if got := Ticks(d); got != want {
			t.Errorf("Ticks(%d) = %d, want %d", d, got, want)
		}
	}
}

// Prefixes of a range cover its ports, all of them and no other, once.
func TestPortPrefixes(t *testing.T) {
	for _, r := range []rulefile.PortRange{{First: 1, Last: 65535}, {First: 8000, Last: 8099}, {First: 65535, Last: 65535}, {First: 1024, Last: 1024}, {First: 1, Last: 2}} {
		seen := map[uint32]int{}
		for _, p := range portPrefixes(r) {
			for n := range uint32(1) << (16 - p.bits) {
				seen[uint32(p.first)+n]++
			}
		}
		for port := range uint32(65536) {
			want := 0
			if r.Contains(uint16(port)) {
				want = 1
			}
			if seen[port] != want {
				t.Fatalf("%v: port %d is covered %d times", r, port, seen[port])
			}
		}
	}
}

// trieLookup is the kernel's longest prefix match over origins, plainly.
func trieLookup(t *Tables, in, out int, src netip.Addr) int {
	for bits := 32; bits >= 0; bits-- {
		key := abiNatOriginKey{
			Prefixlen: uint32(32 + bits), In: bigEndian(uint16(in + 1)), Out: bigEndian(uint16(out + 1)),
			Addr: octets(netip.PrefixFrom(src, bits).Masked().Addr()),
		}
		if index, ok := t.Origins[key]; ok {
			return int(index)
		}
	}
	return -1
}

// The source rule that the look-ups of bpf/nat/rule.h find is the one that the precedence
// asks for: by interfaces, then by the longest prefix.
func TestOriginsFollowPrecedence(t *testing.T) {
	names := []string{"", "eth1", "eth2", "eth0", "wan"}
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		type claim struct {
			prefix  netip.Prefix
			in, out string
		}
		used := map[claim]bool{}
		var rules []rulefile.Rule
		for range 1 + rng.IntN(12) {
			bits := 8 + rng.IntN(25)
			c := claim{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(2)), byte(rng.IntN(2)), byte(rng.IntN(4))}), bits).Masked(), names[rng.IntN(3)], names[[]int{0, 1, 3, 4}[rng.IntN(4)]]}
			if used[c] {
				continue
			}
			used[c] = true
			rules = append(rules, rulefile.Rule{Action: rulefile.SNAT{Source: c.prefix, Pool: "office"}, In: c.in, Out: c.out})
		}
		tables := mustCompile(t, gatewayFile(rules...), machine())
		for range 200 {
			src := netip.AddrFrom4([4]byte{10, byte(rng.IntN(2)), byte(rng.IntN(2)), byte(rng.IntN(4))})
			in, out := rng.IntN(2), rng.IntN(4)
			want, best := -1, -1
			for i, r := range rules {
				prefix := r.Action.(rulefile.SNAT).Source
				if !prefix.Contains(src) || r.In != "" && r.In != machine().Links[in].Name || r.Out != "" && r.Out != machine().Links[out].Name {
					continue
				}
				if r.Out == "" && machine().Links[out].Inside {
					continue
				}
				rank := prefix.Bits()
				if r.In != "" {
					rank += 100
				}
				if r.Out != "" {
					rank += 200
				}
				if rank > best {
					want, best = i, rank
				}
			}
			got := -1
			if tables.Config.Lookups&uint32(abiNatLookupNAT_LOOKUP_SOURCE_IN_OUT) != 0 {
				got = trieLookup(tables, in, out, src)
			}
			if got < 0 {
				got = trieLookup(tables, -1, out, src)
			}
			if got != want {
				t.Fatalf("seed %d: %s from %s to %s: rule %d, want %d of\n%v", seed, src, machine().Links[in].Name, machine().Links[out].Name, got, want, rules)
			}
		}
	}
}

// Packets excluded by the look-ups of bpf/nat/rule.h are those that a rule names.
func TestExcludesMatchRules(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		prefix := func() netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(2)), 0, byte(rng.IntN(4))}), []int{0, 8, 15, 16, 24, 31, 32}[rng.IntN(7)]).Masked()
		}
		var rules []rulefile.Rule
		for range 1 + rng.IntN(6) {
			a := rulefile.Exclude{Source: prefix(), Destination: prefix()}
			if rng.IntN(2) == 0 {
				a.Protocol = rulefile.TCP
				if rng.IntN(2) == 0 {
					a.Ports = rulefile.PortRange{First: 80, Last: 81}
				}
			}
			rules = append(rules, rulefile.Rule{Action: a})
		}
		tables := mustCompile(t, gatewayFile(rules...), machine())
		class := func(keys map[abiNatPrefixKey]uint32, a netip.Addr) int {
			for bits := 32; bits >= 0; bits-- {
				if n, ok := keys[abiNatPrefixKey{Prefixlen: uint32(bits), Addr: octets(netip.PrefixFrom(a, bits).Masked().Addr())}]; ok {
					return int(n)
				}
			}
			return -1
		}
		for range 300 {
			src, dst := prefix().Addr(), prefix().Addr()
			protocol, port := []rulefile.Protocol{rulefile.TCP, rulefile.UDP}[rng.IntN(2)], uint16(80+rng.IntN(3))
			want := false
			for _, r := range rules {
				a := r.Action.(rulefile.Exclude)
				want = want || a.Source.Contains(src) && a.Destination.Contains(dst) && (a.Protocol == 0 || a.Protocol == protocol) && (a.Ports.IsZero() || a.Ports.Contains(port))
			}
			s, d := class(tables.ExcludeSrc, src), class(tables.ExcludeDst, dst)
			got := false
			if s >= 0 && d >= 0 {
				for _, key := range []abiNatExcludeKey{{}, {Protocol: uint8(protocol)}, {Protocol: uint8(protocol), Port: bigEndian(port)}} {
					key.Src, key.Dst = uint32(s), uint32(d)
					_, ok := tables.Excludes[key]
					got = got || ok
				}
			}
			if got != want {
				t.Fatalf("seed %d: %s -> %s %s:%d: excluded %t, want %t by %v", seed, src, dst, protocol, port, got, want, rules)
			}
		}
	}
}

// Indices and pools stay when rules change; a pool's addresses follow each other;
// what no rule wants any more is marked.
func TestIndicesAreForLife(t *testing.T) {
	masquerade := rulefile.Rule{Action: rulefile.Masquerade{Source: netip.MustParsePrefix("192.168.1.0/24")}}
	pooled := rulefile.Rule{Action: rulefile.SNAT{Source: netip.MustParsePrefix("192.168.2.0/24"), Pool: "office"}}
	whole := rulefile.Rule{Action: rulefile.SNAT{Source: netip.MustParsePrefix("192.168.2.128/25"), Pool: "whole"}}
	facts := machine()
	before := mustCompile(t, gatewayFile(masquerade, pooled), facts)
	facts.Addresses = before.Addresses
	after := mustCompile(t, gatewayFile(whole, pooled), facts)
	index := func(tables *Tables, addr string) *ExternalAddress {
		i := slices.IndexFunc(tables.Addresses, func(a ExternalAddress) bool { return a.Addr == netip.MustParseAddr(addr) })
		if i < 0 {
			t.Fatalf("%s is not among the addresses", addr)
		}
		return &tables.Addresses[i]
	}
	for _, addr := range []string{"203.0.113.1", "203.0.113.16", "203.0.113.31"} {
		if a, b := index(before, addr), index(after, addr); a.Index != b.Index || a.Pool != b.Pool {
			t.Errorf("%s was %d in pool %d, is %d in pool %d", addr, a.Index, a.Pool, b.Index, b.Pool)
		}
	}
	if a := index(after, "203.0.113.1"); !a.Leaving {
		t.Error("the masquerading address stays though no rule wants it")
	}
	if a, b := index(after, "203.0.113.64"), index(after, "203.0.113.67"); b.Index != a.Index+3 || !a.OneToOne || a.Ports[0] != 0 {
		t.Errorf("whole addresses: %+v ... %+v", a, b)
	}
	seen := map[int]bool{}
	for _, a := range after.Addresses {
		if seen[a.Index] {
			t.Errorf("index %d is given twice", a.Index)
		}
		seen[a.Index] = true
	}
	narrow := gatewayFile(rulefile.Rule{Action: rulefile.Masquerade{Source: netip.MustParsePrefix("192.168.1.0/24"), Ports: rulefile.PortRange{First: 2000, Last: 3000}}})
	if _, err := Compile(narrow, facts); err == nil || !strings.Contains(err.Error(), "down and up") {
		t.Errorf("other ports of a known address: %v", err)
	}
}

// A pool that grows gets new indices for all its addresses; those it had know which
// index they had, and share its ports.
func TestPoolGrows(t *testing.T) {
	rule := rulefile.Rule{Action: rulefile.SNAT{Source: netip.MustParsePrefix("192.168.2.0/24"), Pool: "office"}}
	small := gatewayFile(rule)
	small.Pools[0].Addresses = []rulefile.AddressRange{rulefile.RangeOf(netip.MustParsePrefix("203.0.113.16/31"))}
	facts := machine()
	facts.Addresses = mustCompile(t, small, facts).Addresses
	var got []string
	for _, a := range mustCompile(t, gatewayFile(rule), facts).Addresses[:3] {
		got = append(got, fmt.Sprint(a.Addr, " ", a.Index, " before ", a.Before))
	}
	want := []string{"203.0.113.16 2 before 1", "203.0.113.17 3 before 2", "203.0.113.18 4 before 0"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// On the gateway's own addresses its own connections keep their ports; where the file
// names the ports, the gateway is to leave them alone.
func TestGatewaysOwnPorts(t *testing.T) {
	prefix := netip.MustParsePrefix("192.168.0.0/16")
	own := mustCompile(t, gatewayFile(rulefile.Rule{Action: rulefile.Masquerade{Source: prefix}, Out: "eth0"},
		rulefile.Rule{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: netip.MustParseAddr("203.0.113.1"), Ports: rulefile.PortRange{First: 8080, Last: 8081}, Targets: []rulefile.Target{{Address: netip.MustParseAddr("192.168.1.9")}}}}), machine())
	a := own.Addresses[0]
	if !a.Owned || a.Ports != [2]uint16{1024, 65535} || !slices.Contains(a.Reserved, 32768) || !slices.Contains(a.Reserved, 60999) || slices.Contains(a.Reserved, 61000) || !slices.Contains(a.Kept(rulefile.ClassTCP), 8081) || slices.Contains(a.Kept(rulefile.ClassUDP), 8081) || slices.Contains(a.Kept(rulefile.ClassICMP), 8081) || len(own.ReservePorts) > 0 {
		t.Errorf("address %v ports %v, %d reserved, %d to be reserved", a.Addr, a.Ports, len(a.Reserved), len(own.ReservePorts))
	}
	for class, forwarded := range map[rulefile.Class]int{rulefile.ClassTCP: 2, rulefile.ClassUDP: 0, rulefile.ClassICMP: 0} {
		ports := portBits(a.Ports[0], a.Ports[1]-a.Ports[0]+1, a.Kept(class))
		if want := uint64(65536 - 1024 - len(a.Reserved) - forwarded); ports.Free != want {
			t.Errorf("%d ports of %s free, want %d", ports.Free, class, want)
		}
	}
	named := mustCompile(t, gatewayFile(rulefile.Rule{Action: rulefile.Masquerade{Source: prefix, Ports: rulefile.PortRange{First: 32000, Last: 33000}}, Out: "eth0"}), machine())
	if a := named.Addresses[0]; len(a.Reserved) > 0 || len(named.ReservePorts) != 33000-32768+1 {
		t.Errorf("named: %d reserved, %d to be reserved", len(a.Reserved), len(named.ReservePorts))
	}
}

func BenchmarkCompile50000(b *testing.B) {
	var rules []rulefile.Rule
	for i := range 50000 {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		rules = append(rules, rulefile.Rule{Action: rulefile.DNAT{
			Protocol: rulefile.TCP, Address: addr, Ports: rulefile.PortRange{First: 80, Last: 80},
			Targets: []rulefile.Target{{Address: netip.MustParseAddr("192.168.1.9"), Ports: rulefile.PortRange{First: 8080, Last: 8080}}},
		}})
	}
	f := gatewayFile(rules...)
	for b.Loop() {
		if _, err := Compile(f, machine()); err != nil {
			b.Fatal(err)
		}
	}
}

// Where the external address of a map is, is known from the tables: the routes lead to lo.
func TestCompileLocatesMaps(t *testing.T) {
	file := gatewayFile(rulefile.Rule{Action: rulefile.Map{Inside: netip.MustParsePrefix("192.168.1.9/32"), Outside: netip.MustParsePrefix("198.51.100.9/32")}})
	tables := mustCompile(t, file, machine())
	want := netip.MustParseAddr("198.51.100.9")
	i := slices.IndexFunc(tables.Addresses, func(a ExternalAddress) bool { return a.Addr == want })
	if i < 0 || tables.Addresses[i].Link != 3 {
		t.Errorf("addresses %+v, want %s on link 3", tables.Addresses, want)
	}
}

// When an interface has another address than the one it was masqueraded behind, rules for
// that one are no error: it leaves as it would without them.
func TestCompileForwardOfFormerAddress(t *testing.T) {
	rules := []rulefile.Rule{
		{Action: rulefile.Masquerade{Source: netip.MustParsePrefix("192.168.0.0/16")}},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: netip.MustParseAddr("203.0.113.1"), Ports: rulefile.PortRange{First: 8080, Last: 8080}, Targets: []rulefile.Target{{Address: netip.MustParseAddr("192.168.1.2")}}}},
	}
	facts := machine()
	facts.Addresses = mustCompile(t, gatewayFile(rules...), facts).Addresses
	now := netip.MustParsePrefix("203.0.113.2/24")
	facts.Links[2].Addresses = []netip.Prefix{now}
	facts.Local[2] = now.Addr()
	tables := mustCompile(t, gatewayFile(rules...), facts)
	for _, a := range tables.Addresses {
		if a.Addr == netip.MustParseAddr("203.0.113.1") && !a.Leaving || a.Addr == now.Addr() && (a.Leaving || !a.Masquerade) {
			t.Errorf("%+v", a)
		}
	}
}

// Of external addresses that are more than a connected network, those on it are answered for; of
// a network that is too large none is, silently or not.
func TestProxiesOnConnectedNetwork(t *testing.T) {
	rule := func(inside, outside string) rulefile.Rule {
		return rulefile.Rule{Action: rulefile.Map{Inside: netip.MustParsePrefix(inside), Outside: netip.MustParsePrefix(outside)}}
	}
	for _, inside := range []string{"10.0.0.0/16", "203.0.0.0/16"} { // of the second hosts keep their addresses
		tables := mustCompile(t, gatewayFile(rule(inside, "203.0.0.0/16")), machine())
		if n := len(tables.ProxyNeighbours); n != 255 { // all but the gateway's
			t.Errorf("%s: %d addresses are answered for, of 255 on the network", inside, n)
		}
		wide := machine()
		wide.Links[2].Addresses[0] = netip.MustParsePrefix("203.0.113.1/17")
		want := "203.0.0.0/17 on a connected network are 32768 addresses"
		if _, err := Compile(gatewayFile(rule(inside, "203.0.0.0/16")), wide); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", inside, err, want)
		}
	}
}
