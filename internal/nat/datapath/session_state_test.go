// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/testutil/pktbuild"
)

// gateway is a rig with one rule of every kind, and GC's programs; packets
// enter at one hook.
type gateway struct {
	*rig
	hook      hook
	addresses []func() // reset each
}

// External addresses of the gateway's rules, by index.
const (
	ownAddress   = iota // the gateway's own: masquerade, port forwards
	fullAddress         // pool of two: full cone
	fullAddress2        //
	knownAddress        // address-dependent filtering
	apdmAddress         // address-and-port-dependent mapping
	wholeAddress        // without ports
	wholeAddress2
	tinyAddress // a pool with four ports
	addressCount
)

// rules of the gateway: each has the inside prefix 192.168.N.0/24 to itself.
const (
	masqueradeRule = iota + 1 // 192.168.1.0/24
	fullRule                  // 2
	knownRule                 // 3
	apdmRule                  // 4
	wholeRule                 // 5
	mapRule                   // 6 <-> 198.18.6.0/24
	statelessRule             // 7 <-> 198.18.7.0/24
	tinyRule                  // 8
	forwardRule               // tcp 203.0.113.1:8080 -> 192.168.1.2:80
	rangeRule                 // udp 203.0.113.1:7000-7099 -> 192.168.1.2:9000-9099
	balanceRule               // tcp 203.0.113.1:443 -> 192.168.2.1..3:4430
	mapBackRule
	statelessBackRule
	keepRule // udp 203.0.113.1:6600-6009 -> 192.168.1.2, port kept
	hostRule // 198.18.8.0/24 -> 192.168.1.2, every protocol, port kept
	ruleCount
)

// The rules after those: UDP and TCP to that port of 203.0.113.1. Several lead to one endpoint.
var moreForwards = []struct {
	port            uint16
	target, targets int // of newGateway's
}{{9090, 0, 1}, {9091, 0, 1}, {9443, 2, 3}, {9444, 2, 3}, {9093, 6, 1}, {9094, 7, 1}}

var externalAddresses = [addressCount]string{"203.0.113.1", "203.0.113.16", "203.0.113.17", "203.0.113.18", "203.0.113.19", "203.0.113.20", "203.0.113.21", "203.0.113.22"}

// newGateway makes the gateway. Its ports are 1024-9999.
func newGateway(t testing.TB) *gateway {
	t.Helper()
	g := &gateway{rig: newRig(t), hook: hooks[1]}
	g.ready(t, hooks[1:], "_inside", "_outside")
	g.do(t, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: g.in.ifindex, Gw: insideHost.AsSlice(),
			Dst: &net.IPNet{IP: net.IP{192, 168, 0, 0}, Mask: net.CIDRMask(16, 32)}})
	})
	g.put(t, "links", uint32(g.out.link), &abiNatLink{Ifindex: uint32(g.out.ifindex), Mtu: outsideMTU, Mac: [6]uint8(g.out.mac),
		Flags: uint16(abiNatLinkFlagNAT_LINK_OUTSIDE | abiNatLinkFlagNAT_LINK_XDP), Pool: 1, Address: ownAddress + 1})

	const (
		independent = uint8(abiNatFilteringModeNAT_FILTER_ENDPOINT_INDEPENDENT)
		known       = uint8(abiNatFilteringModeNAT_FILTER_ADDRESS)
		session     = uint8(abiNatFilteringModeNAT_FILTER_ADDRESS_AND_PORT)
		napt        = uint8(abiNatRuleKindNAT_RULE_NAPT)
		each        = uint8(abiNatMappingModeNAT_ADDRESS_AND_PORT_DEPENDENT)
	)
	prefix := func(s string) abiNatAddr { return addr(netip.MustParseAddr(s)) }
	all := func(n uint8) [3]uint8 { return [3]uint8{n, n, n} }
	rules := []abiNatRule{
		masqueradeRule:    {Kind: napt, Flags: uint8(abiNatRuleFlagNAT_RULE_MASQUERADE), Filtering: all(session)},
		fullRule:          {Kind: napt, Filtering: all(independent), Pool: fullAddress + 1, PoolFirst: fullAddress, PoolCount: 2},
		knownRule:         {Kind: napt, Filtering: all(known), Pool: knownAddress + 1, PoolFirst: knownAddress, PoolCount: 1},
		apdmRule:          {Kind: napt, Mapping: all(each), Filtering: all(session), Pool: apdmAddress + 1, PoolFirst: apdmAddress, PoolCount: 1},
		wholeRule:         {Kind: uint8(abiNatRuleKindNAT_RULE_ONE_TO_ONE), Filtering: all(independent), Pool: wholeAddress + 1, PoolFirst: wholeAddress, PoolCount: 2},
		mapRule:           {Kind: uint8(abiNatRuleKindNAT_RULE_MAP), Prefix: 24, To: prefix("198.18.6.0")},
		statelessRule:     {Kind: uint8(abiNatRuleKindNAT_RULE_STATELESS), Prefix: 24, To: prefix("198.18.7.0")},
		tinyRule:          {Kind: napt, Filtering: all(session), Pool: tinyAddress + 1, PoolFirst: tinyAddress, PoolCount: 1},
		forwardRule:       {Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: 8080, Targets: 0, TargetCount: 1},
		rangeRule:         {Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: 7000, Targets: 1, TargetCount: 1},
		balanceRule:       {Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: 443, Targets: 2, TargetCount: 3},
		mapBackRule:       {Kind: uint8(abiNatRuleKindNAT_RULE_MAP), Prefix: 24, To: prefix("192.168.6.0")},
		statelessBackRule: {Kind: uint8(abiNatRuleKindNAT_RULE_STATELESS), Prefix: 24, To: prefix("192.168.7.0")},
		keepRule:          {Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: 6000, Targets: 5, TargetCount: 1, Flags: uint8(abiNatRuleFlagNAT_RULE_KEEP_PORT)},
		hostRule:          {Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), Targets: 5, TargetCount: 1, Flags: uint8(abiNatRuleFlagNAT_RULE_KEEP_PORT)},
	}
	own := addr(gatewayOut)
	exact := []entry{
		{&abiNatExactKey{Addr: own, Port: be(8080), Protocol: unix.IPPROTO_TCP}, uint32(forwardRule)},
		{&abiNatExactKey{Addr: own, Port: be(443), Protocol: unix.IPPROTO_TCP}, uint32(balanceRule)},
	}
	for _, f := range moreForwards {
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			exact = append(exact, entry{&abiNatExactKey{Addr: own, Port: be(f.port), Protocol: protocol}, uint32(len(rules))})
		}
		rules = append(rules, abiNatRule{Kind: uint8(abiNatRuleKindNAT_RULE_FORWARD), FromPort: f.port, Targets: uint32(f.target), TargetCount: uint32(f.targets)})
	}
	for i := range rules {
		rules[i].Id = uint32(i)
	}
	g.fill(t, "rules", indexed(rules))
	g.fill(t, "targets", indexed([]abiNatTarget{
		{Addr: addr(insideHost), Port: be(80)},
		{Addr: addr(insideHost), Port: be(9000)},
		{Addr: prefix("192.168.2.1"), Port: be(4430)}, {Addr: prefix("192.168.2.2"), Port: be(4430)}, {Addr: prefix("192.168.2.3"), Port: be(4430)},
		{Addr: addr(insideHost)},
		{Addr: prefix("192.168.6.2"), Port: be(80)}, {Addr: prefix("192.168.2.2"), Port: be(80)},
	}))
	g.fill(t, "exact", exact)
	destinations := []entry{
		{&abiNatDestinationKey{Prefixlen: 56, Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Addr: prefix("198.18.6.0")}, uint32(mapBackRule)},
		{&abiNatDestinationKey{Prefixlen: 56, Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Addr: prefix("198.18.7.0")}, uint32(statelessBackRule)},
		{&abiNatDestinationKey{Prefixlen: 56, Kind: uint8(abiNatDestinationKindNAT_BY_PREFIX), Addr: prefix("198.18.8.0")}, uint32(hostRule)},
	}
	for _, r := range []struct {
		first, last uint16
		rule        uint32
	}{{7000, 7099, rangeRule}, {6000, 6009, keepRule}} {
		for port := r.first; port <= r.last; port++ {
			destinations = append(destinations, entry{&abiNatDestinationKey{Prefixlen: 80, Kind: uint8(abiNatDestinationKindNAT_BY_RANGE),
				Protocol: unix.IPPROTO_UDP, Addr: own, Port: be(port)}, r.rule})
		}
	}
	g.fill(t, "destinations", destinations)
	var origins []entry
	for rule := masqueradeRule; rule <= tinyRule; rule++ {
		origins = append(origins, entry{&abiNatOriginKey{Prefixlen: 56, Out: be(g.out.link + 1), Addr: prefix(fmt.Sprintf("192.168.%d.0", rule))}, uint32(rule)})
	}
	g.fill(t, "origins", origins)
	g.fill(t, "exclude_src", []entry{
		{&abiNatPrefixKey{Prefixlen: 16, Addr: prefix("192.168.0.0")}, uint32(1)},
	})
	g.fill(t, "exclude_dst", []entry{
		{&abiNatPrefixKey{Prefixlen: 8, Addr: prefix("10.0.0.0")}, uint32(1)},
		{&abiNatPrefixKey{Prefixlen: 32, Addr: prefix("198.51.100.22")}, uint32(2)},
	})
	g.fill(t, "excludes", []entry{
		{&abiNatExcludeKey{Src: 1, Dst: 1}, uint32(1)},
		{&abiNatExcludeKey{Src: 1, Dst: 2, Port: be(22), Protocol: unix.IPPROTO_TCP}, uint32(1)},
	})
	g.addAddresses(t)
	g.reset(t)
	return g
}

var theGateway *gateway

// aGateway is a gateway that knows nobody, for tests that run one after the other: see aRig.
func aGateway(t *testing.T) *gateway {
	t.Helper()
	if theGateway == nil {
		theGateway = newGateway(keeper{t})
		theGateway.ready(t, hooks, "_inside", "_outside")
	}
	theGateway.hook, theGateway.flags = hooks[1], checksumComplete
	theGateway.reset(t)
	theGateway.counted(t)
	return theGateway
}

// addAddresses makes the external addresses.
func (g *gateway) addAddresses(t testing.TB) {
	t.Helper()
	for i, s := range externalAddresses {
		a := abiNatAddress{Addr: addr(netip.MustParseAddr(s)), PortFirst: 1024, PortCount: 8976, Pool: uint8(i + 1)}
		switch i {
		case ownAddress:
			a.Flags = uint16(abiNatAddressFlagNAT_ADDRESS_OWNED | abiNatAddressFlagNAT_ADDRESS_MASQUERADE)
			a.Link = g.out.link + 1
		case wholeAddress, wholeAddress2:
			a.PortFirst, a.PortCount = 0, 0
		case tinyAddress:
			a.PortFirst, a.PortCount = 4000, 4
		}
		g.addresses = append(g.addresses, addAddress(t, g.maps, uint32(i), a))
	}
}

// limitSessions keeps every subscriber to so many.
func limitSessions(c *abiNatConfig, sessions uint32) {
	c.Limits.Sessions = sessions
	c.Flags |= uint32(abiNatConfigFlagNAT_CONFIG_COUNT_SESSIONS)
}

// configure writes the configuration: time-outs of a minute and all look-ups, but for
// what change changes.
func (g *gateway) configure(t testing.TB, change func(*abiNatConfig)) {
	c := abiNatConfig{Lookups: 1<<14 - 1}
	for i := range c.Timeouts {
		c.Timeouts[i] = ticks(60)
	}
	change(&c)
	g.put(t, "config", uint32(0), &c)
	g.nextGeneration(t)
}

// nextGeneration says that the rules have changed, in the slot that is in use.
func (g *gateway) nextGeneration(t testing.TB) {
	t.Helper()
	var control abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &control); err != nil {
		t.Fatal(err)
	}
	control.Generation += uint32(abiNatLimitNAT_GENERATIONS)
	g.put(t, "control", uint32(0), &control)
}

type entry struct{ key, value any }

func indexed[T any](values []T) []entry {
	var out []entry
	for i := range values {
		out = append(out, entry{uint32(i), &values[i]})
	}
	return out
}

// fill makes the inner map of a rule map, for the generation in use.
func (g *gateway) fill(t testing.TB, name string, entries []entry) {
	t.Helper()
	inner := newInner(t, name, len(entries))
	defer inner.Close()
	for _, e := range entries {
		if err := inner.Put(e.key, e.value); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	g.put(t, name, uint32(0), inner)
	g.nextGeneration(t)
}

func (g *gateway) put(t testing.TB, name string, key, value any) {
	t.Helper()
	if err := g.maps[name].Put(key, value); err != nil {
		t.Fatalf("put %s: %v", name, err)
	}
}

// What is counted beside a packet's end.
var sideCounters = []abiNatReason{abiNatReasonNAT_CREATED, abiNatReasonNAT_EXPIRED, abiNatReasonNAT_MAPPED,
	abiNatReasonNAT_UNMAPPED, abiNatReasonNAT_HAIRPINNED, abiNatReasonNAT_MSS_CLAMPED, abiNatReasonNAT_ICMP_TRANSLATED, abiNatReasonNAT_ICMP_SENT}

const (
	sent   = abiNatReasonNAT_TRANSLATED_OUT
	back   = abiNatReasonNAT_TRANSLATED_IN
	inside = abiNatSideNAT_INSIDE
	outer  = abiNatSideNAT_OUTSIDE
)

// packet makes an IPv4 packet between endpoints: "udp", "tcp" with flags, "ping" or
// "pong" with sport as identifier, or "gre" without ports.
func packet(kind string, flags uint8, e endpoints) pktbuild.IPv4 {
	ip := pktbuild.IPv4{Src: e.src, Dst: e.dst, TTL: 64}
	switch kind {
	case "udp":
		ip.Payload = pktbuild.UDP{Src: e.sport, Dst: e.dport, Data: []byte("data")}
	case "tcp":
		ip.Payload = pktbuild.TCP{Src: e.sport, Dst: e.dport, Seq: 1, Flags: flags, Window: 1000}
	case "ping":
		ip.Payload = pktbuild.Echo(8, e.sport, 1, []byte("data"))
	case "pong":
		ip.Payload = pktbuild.Echo(0, e.sport, 1, []byte("data"))
	default:
		ip.Protocol, ip.Payload = 47, pktbuild.Bytes("0123456789")
	}
	return ip
}

// send lets a packet come in from that side and returns how it ended and, if it was
// translated, the endpoints that it left with. Every byte that left is checked: it must
// be the same packet with those endpoints, right checksums and a smaller TTL.
func (g *gateway) send(t testing.TB, side abiNatSide, kind string, flags uint8, e endpoints) (abiNatReason, endpoints) {
	t.Helper()
	way := g.in
	if side == outer {
		way = g.out
	}
	frame := way.arriving(packet(kind, flags, e))
	verdict, got, reason := g.enter(t, g.hook, side, way, frame.Bytes())
	if reason == abiNatReasonNAT_PASS_TO_TC {
		verdict, got, reason = g.enter(t, hooks[1], side, way, got)
	}
	if reason != sent && reason != back {
		if verdict == xdpRedirect || verdict == tcRedirect {
			t.Errorf("a packet that was not translated (%v) leaves", reason)
		}
		return reason, endpoints{}
	}
	out := endpoints{src: netip.AddrFrom4([4]byte(got[26:30])), dst: netip.AddrFrom4([4]byte(got[30:34]))}
	switch kind {
	case "udp", "tcp":
		out.sport, out.dport = binary.BigEndian.Uint16(got[34:]), binary.BigEndian.Uint16(got[36:])
	case "ping", "pong":
		out.sport = binary.BigEndian.Uint16(got[38:])
	}
	leaves := g.out
	if netip.MustParsePrefix("192.168.0.0/16").Contains(out.dst) {
		leaves = g.in
	}
	want := leaves.leaving(packet(kind, flags, out))
	want.IP.TTL--
	copy(got, want.Bytes()[:12]) // MACs are not this test's; the kernel writes those of new neighbours
	if !bytes.Equal(got, want.Bytes()) {
		t.Errorf("%v -> %v: the frame is not as it should be:\n%s", e, out, differ(got, want.Bytes()))
	}
	return reason, out
}

// enter lets a frame in at a hook.
func (g *gateway) enter(t testing.TB, h hook, side abiNatSide, way port, frame []byte) (uint32, []byte, abiNatReason) {
	t.Helper()
	verdict, got, err := g.run(t, h, side, way, frame, 0)
	if err != nil {
		t.Fatal(err)
	}
	reason := abiNatReason(255)
	for r := range g.counted(t) {
		if !slices.Contains(sideCounters, r) {
			reason = r
		}
	}
	return verdict, got, reason
}

// want sends a packet and checks its end and its endpoints.
func (g *gateway) want(t testing.TB, side abiNatSide, kind string, flags uint8, in endpoints, reason abiNatReason, out endpoints) {
	t.Helper()
	gotReason, got := g.send(t, side, kind, flags, in)
	if gotReason != reason || got != out {
		t.Errorf("%s %v: %v %v, want %v %v", kind, in, gotReason, got, reason, out)
	}
}

// refused sends a packet that must end with that reason.
func (g *gateway) refused(t testing.TB, side abiNatSide, kind string, flags uint8, in endpoints, reason abiNatReason) {
	t.Helper()
	g.want(t, side, kind, flags, in, reason, endpoints{})
}

// ends builds endpoints from "address:port" twice.
func ends(src, dst string) endpoints {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return endpoints{s.Addr(), d.Addr(), s.Port(), d.Port()}
}

// answer is the other way round.
func (e endpoints) answer() endpoints { return endpoints{e.dst, e.src, e.dport, e.sport} }

// entries reads what a map holds.
func entries[K comparable, V any](t testing.TB, m *ebpf.Map) map[K]V {
	t.Helper()
	out := map[K]V{}
	keys, values := make([]K, 4096), make([]V, 4096)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			out[keys[i]] = values[i]
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func deleteAll[K comparable, V any](t testing.TB, m *ebpf.Map) {
	t.Helper()
	keys := slices.Collect(maps.Keys(entries[K, V](t, m)))
	if len(keys) == 0 {
		return
	}
	if _, err := m.BatchDelete(keys, nil); err != nil {
		t.Fatal(err)
	}
}

// What a gateway does with packets, at both hooks; each test begins with none known.
func TestSession(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		g.hook = h
		for _, test := range []struct {
			name string
			run  func(*testing.T, *gateway)
		}{
			{"outbound", testOutbound},
			{"forward", testForward},
			{"hairpin", testHairpin},
			{"refused", testRefused},
			{"limits", testLimits},
		} {
			t.Run(h.name+"/"+test.name, func(t *testing.T) {
				g.reset(t)
				test.run(t, g)
			})
		}
	}
}

// reset forgets all sessions and what they held.
func (g *gateway) reset(t testing.TB) {
	t.Helper()
	g.configure(t, func(*abiNatConfig) {})
	forgetSessions(t, g.maps)
	forgetMappings(t, g.maps)
	deleteAll[abiNatSourceKey, abiNatSource](t, g.maps["sources"])
	deleteAll[abiNatFilterKey, abiNatFilterEntry](t, g.maps["filter_entries"])
	for _, name := range []string{"mapping_queue"} {
		value := make([]byte, g.maps[name].ValueSize())
		for g.maps[name].LookupAndDelete(nil, &value) == nil {
		}
	}
	for _, reset := range g.addresses {
		reset()
	}
	g.put(t, "free_addresses", uint32(0), freePorts(wholeAddress, 2))
}

// Sessions that internal hosts open, their answers, and what others get.
func testOutbound(t *testing.T, g *gateway) {
	// Masquerade: the port is kept, and the same for every receiver.
	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.1:5000", "198.51.100.9:53"))
	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "198.51.100.8:54"), sent, ends("203.0.113.1:5000", "198.51.100.8:54"))
	g.want(t, outer, "udp", 0, ends("198.51.100.9:53", "203.0.113.1:5000"), back, ends("198.51.100.9:53", "192.168.1.2:5000"))
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:54", "203.0.113.1:5000"), abiNatReasonNAT_DROP_FILTERED)
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:53", "203.0.113.1:5001"), abiNatReasonNAT_PASS_LOCAL)
	// Another host with the same port gets another; both are answered.
	_, out := g.send(t, inside, "udp", 0, ends("192.168.1.3:5000", "198.51.100.9:53"))
	if out.sport == 5000 || out.src != gatewayOut {
		t.Errorf("the second host has %v", out)
	}
	g.want(t, outer, "udp", 0, out.answer(), back, ends("198.51.100.9:53", "192.168.1.3:5000"))
	// UDP's ports are not TCP's, nor ICMP's identifiers.
	g.want(t, inside, "tcp", pktbuild.SYN, ends("192.168.1.4:5000", "198.51.100.9:53"), sent, ends("203.0.113.1:5000", "198.51.100.9:53"))
	g.want(t, inside, "ping", 0, ends("192.168.1.5:5000", "198.51.100.9:0"), sent, ends("203.0.113.1:5000", "198.51.100.9:0"))
	g.want(t, outer, "pong", 0, ends("198.51.100.9:5000", "203.0.113.1:0"), back, ends("198.51.100.9:5000", "192.168.1.5:0"))
	_, out = g.send(t, inside, "ping", 0, ends("192.168.1.6:5000", "198.51.100.9:0"))
	if out.sport == 5000 {
		t.Error("two hosts have one identifier")
	}
	pong := ends("198.51.100.9:0", "203.0.113.1:0")
	pong.sport = out.sport
	g.want(t, outer, "pong", 0, pong, back, ends("198.51.100.9:5000", "192.168.1.6:0"))

	// A protocol without ports: by address, one host a receiver.
	g.want(t, inside, "gre", 0, ends("192.168.1.2:0", "198.51.100.9:0"), sent, ends("203.0.113.1:0", "198.51.100.9:0"))
	g.want(t, outer, "gre", 0, ends("198.51.100.9:0", "203.0.113.1:0"), back, ends("198.51.100.9:0", "192.168.1.2:0"))
	g.refused(t, inside, "gre", 0, ends("192.168.1.3:0", "198.51.100.9:0"), abiNatReasonNAT_DROP_NO_PORT)
	g.want(t, inside, "gre", 0, ends("192.168.1.3:0", "198.51.100.8:0"), sent, ends("203.0.113.1:0", "198.51.100.8:0"))

	// Reserved addresses are hosts as any others, for the stack would let their packets out.
	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "240.1.2.3:53"), sent, ends("203.0.113.1:5000", "240.1.2.3:53"))
	g.want(t, outer, "udp", 0, ends("240.1.2.3:53", "203.0.113.1:5000"), back, ends("240.1.2.3:53", "192.168.1.2:5000"))

	g.want(t, inside, "udp", 0, ends("192.168.1.2:5000", "0.1.2.3:53"), sent, ends("203.0.113.1:5000", "0.1.2.3:53"))

	// Full cone: strangers come in, and keep their address. Paired: a host keeps its.
	_, out = g.send(t, inside, "udp", 0, ends("192.168.2.9:700", "198.51.100.9:53"))
	if out.sport < 1024 {
		t.Errorf("port %d is not in the pool's range", out.sport)
	}
	stranger := endpoints{netip.MustParseAddr("198.51.100.77"), out.src, 7, out.sport}
	g.want(t, outer, "udp", 0, stranger, back, ends("198.51.100.77:7", "192.168.2.9:700"))
	g.want(t, inside, "udp", 0, ends("192.168.2.9:700", "198.51.100.77:7"), sent, stranger.answer())
	first := out.src
	for port := range 8 {
		e := ends("192.168.2.9:2000", "198.51.100.9:53")
		e.sport += uint16(port)
		if _, out = g.send(t, inside, "udp", 0, e); out.src != first || out.sport != e.sport {
			t.Errorf("the host of %v left as %v", first, out)
		}
	}
	used := map[netip.Addr]bool{}
	for host := range 16 {
		_, out = g.send(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.2.%d:1", 20+host), "198.51.100.9:53"))
		used[out.src] = true
	}
	if len(used) != 2 {
		t.Errorf("16 hosts share %v of two addresses", used)
	}

	// By address: any port of a receiver that was sent to.
	g.want(t, inside, "udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.18:5000", "198.51.100.9:53"))
	g.want(t, outer, "udp", 0, ends("198.51.100.9:99", "203.0.113.18:5000"), back, ends("198.51.100.9:99", "192.168.3.2:5000"))
	g.refused(t, outer, "udp", 0, ends("198.51.100.8:53", "203.0.113.18:5000"), abiNatReasonNAT_DROP_FILTERED)
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:53", "203.0.113.18:5001"), abiNatReasonNAT_DROP_NO_MAPPING)

	// Address-and-port-dependent: a port for each receiver.
	g.want(t, inside, "udp", 0, ends("192.168.4.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.19:5000", "198.51.100.9:53"))
	_, out = g.send(t, inside, "udp", 0, ends("192.168.4.2:5000", "198.51.100.9:54"))
	if out.sport == 5000 {
		t.Error("two receivers see one port")
	}
	g.want(t, outer, "udp", 0, out.answer(), back, ends("198.51.100.9:54", "192.168.4.2:5000"))
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:99", "203.0.113.19:5000"), abiNatReasonNAT_DROP_FILTERED)

	// A pool without ports: whole addresses, until there are no more.
	_, out = g.send(t, inside, "tcp", pktbuild.SYN, ends("192.168.5.2:5000", "198.51.100.9:53"))
	if out.sport != 5000 {
		t.Errorf("the port became %d", out.sport)
	}
	whole := out.src
	if _, out = g.send(t, inside, "gre", 0, ends("192.168.5.2:0", "198.51.100.9:0")); out.src != whole {
		t.Errorf("the host of %v left as %v", whole, out.src)
	}
	g.want(t, outer, "udp", 0, endpoints{world, whole, 9, 12345}, back, ends("198.51.100.9:9", "192.168.5.2:12345"))
	if _, out = g.send(t, inside, "gre", 0, ends("192.168.5.3:0", "198.51.100.9:0")); out.src == whole || !out.src.IsValid() {
		t.Errorf("the second host has %v", out.src)
	}
	g.refused(t, inside, "gre", 0, ends("192.168.5.4:0", "198.51.100.9:0"), abiNatReasonNAT_DROP_NO_ADDRESS)

	// Prefix to prefix, both ways, with sessions and without.
	for rule, kind := range map[int]string{6: "udp", 7: "udp"} {
		in, out := fmt.Sprintf("192.168.%d.77:53", rule), fmt.Sprintf("198.18.%d.77:53", rule)
		before := len(flowsOf(t, g.maps))
		g.want(t, inside, kind, 0, ends(in, "198.51.100.9:9"), sent, ends(out, "198.51.100.9:9"))
		g.want(t, outer, kind, 0, ends("198.51.100.7:9", out), back, ends("198.51.100.7:9", in))
		made := len(flowsOf(t, g.maps)) - before
		if want := map[int]int{6: 4, 7: 0}[rule]; made != want {
			t.Errorf("prefix rule %d made %d flows, want %d", rule, made, want)
		}
	}
	// Without sessions everything is translated, whatever it is.
	g.want(t, outer, "tcp", pktbuild.ACK, ends("198.51.100.7:9", "198.18.7.1:9"), back, ends("198.51.100.7:9", "192.168.7.1:9"))
}

// Port forwards: exact, ranges, several targets.
func testForward(t *testing.T, g *gateway) {
	g.want(t, outer, "tcp", pktbuild.SYN, ends("198.51.100.9:1234", "203.0.113.1:8080"), back, ends("198.51.100.9:1234", "192.168.1.2:80"))
	g.want(t, inside, "tcp", pktbuild.SYN|pktbuild.ACK, ends("192.168.1.2:80", "198.51.100.9:1234"), sent, ends("203.0.113.1:8080", "198.51.100.9:1234"))
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:1234", "203.0.113.1:8080"), abiNatReasonNAT_PASS_LOCAL)
	g.want(t, outer, "udp", 0, ends("198.51.100.9:1", "203.0.113.1:7042"), back, ends("198.51.100.9:1", "192.168.1.2:9042"))
	g.want(t, outer, "udp", 0, ends("198.51.100.9:1", "203.0.113.1:6007"), back, ends("198.51.100.9:1", "192.168.1.2:6007"))
	g.refused(t, outer, "udp", 0, ends("198.51.100.9:1", "203.0.113.1:7100"), abiNatReasonNAT_PASS_LOCAL)

	targets := map[netip.Addr]int{}
	for host := range 60 {
		client := endpoints{netip.AddrFrom4([4]byte{198, 51, 100, byte(host + 1)}), gatewayOut, 1000, 443}
		_, out := g.send(t, outer, "tcp", pktbuild.SYN, client)
		if out.src != client.src || out.sport != 1000 || out.dport != 4430 {
			t.Fatalf("%v became %v", client, out)
		}
		targets[out.dst]++
		client.sport++
		if _, again := g.send(t, outer, "tcp", pktbuild.SYN, client); again.dst != out.dst {
			t.Errorf("client %v met %v, then %v", client.src, out.dst, again.dst)
		}
		if want := netip.AddrFrom4([4]byte{192, 168, 2, byte(1 + addressHash(client.src)%3)}); out.dst != want {
			t.Errorf("client %v met %v, the table says %v", client.src, out.dst, want)
		}
	}
	if len(targets) != 3 {
		t.Errorf("60 clients met %v, want all three targets", targets)
	}
}

// Internal hosts that address each other by external endpoints: both sides see those.
func testHairpin(t *testing.T, g *gateway) {
	// By a port forward.
	g.want(t, inside, "tcp", pktbuild.SYN, ends("192.168.1.3:5000", "203.0.113.1:8080"), sent, ends("203.0.113.1:5000", "192.168.1.2:80"))
	g.want(t, inside, "tcp", pktbuild.SYN|pktbuild.ACK, ends("192.168.1.2:80", "203.0.113.1:5000"), sent, ends("203.0.113.1:8080", "192.168.1.3:5000"))
	// By a mapping, filtered as anybody from outside would be.
	_, out := g.send(t, inside, "udp", 0, ends("192.168.2.9:5000", "198.51.100.9:53"))
	to := endpoints{netip.MustParseAddr("192.168.1.3"), out.src, 6600, 5000}
	want := ends("203.0.113.1:6600", "192.168.2.9:5000")
	g.want(t, inside, "udp", 0, to, sent, want)
	g.want(t, inside, "udp", 0, want.answer(), sent, to.answer())
	g.send(t, inside, "udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53"))
	g.refused(t, inside, "udp", 0, ends("192.168.1.3:6600", "203.0.113.18:5000"), abiNatReasonNAT_DROP_FILTERED)
	// It has left all the same: who it was sent to is let in from now on, and then it is, too.
	g.want(t, inside, "udp", 0, ends("192.168.3.2:5000", "203.0.113.1:6600"), sent, ends("203.0.113.18:5000", "192.168.1.3:6600"))
	g.want(t, inside, "udp", 0, ends("192.168.1.3:6600", "203.0.113.18:5000"), sent, ends("203.0.113.1:6600", "192.168.3.2:5000"))
	// Who is not translated himself leaves nothing behind.
	g.send(t, inside, "udp", 0, ends("192.168.1.9:7700", "198.51.100.9:53"))
	sessions := g.flowCount(t)
	g.refused(t, inside, "udp", 0, ends("192.168.99.3:6601", "203.0.113.1:7700"), abiNatReasonNAT_DROP_FILTERED)
	if now := g.flowCount(t); now != sessions {
		t.Errorf("%d flows after a packet that was refused, %d before", now, sessions)
	}
	// To the gateway itself: the stack's.
	g.refused(t, inside, "udp", 0, ends("192.168.1.3:6600", "203.0.113.1:53"), abiNatReasonNAT_PASS_LOCAL)
	g.refused(t, inside, "udp", 0, ends("192.168.1.3:6600", "203.0.113.18:53"), abiNatReasonNAT_DROP_NO_MAPPING)
}

// Packets that are not translated, and why; each leaves no trace behind.
func testRefused(t *testing.T, g *gateway) {
	for _, row := range []struct {
		name   string
		side   abiNatSide
		kind   string
		flags  uint8
		e      endpoints
		reason abiNatReason
	}{
		{"excluded prefix", inside, "udp", 0, ends("192.168.1.2:1", "10.1.2.3:1"), abiNatReasonNAT_PASS_EXCLUDED},
		{"excluded port", inside, "tcp", pktbuild.SYN, ends("192.168.1.2:1", "198.51.100.22:22"), abiNatReasonNAT_PASS_EXCLUDED},
		{"no rule for the source", inside, "udp", 0, ends("192.168.99.2:1", "198.51.100.9:1"), abiNatReasonNAT_PASS_NO_RULE},
		{"transit", outer, "udp", 0, ends("198.51.100.9:1", "192.168.1.2:1"), abiNatReasonNAT_PASS_NO_RULE},
		{"to the gateway", inside, "udp", 0, ends("192.168.1.2:1", "192.168.1.1:1"), abiNatReasonNAT_PASS_LOCAL},
		{"multicast", inside, "udp", 0, ends("192.168.1.2:1", "224.0.0.251:5353"), abiNatReasonNAT_PASS_MULTICAST},
		{"from loopback", inside, "udp", 0, ends("127.0.0.1:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"from nowhere", inside, "udp", 0, ends("0.0.0.0:68", "198.51.100.9:67"), abiNatReasonNAT_DROP_SPOOFED},
		{"from nowhere, DHCP", inside, "udp", 0, ends("0.0.0.0:68", "255.255.255.255:67"), abiNatReasonNAT_PASS_MULTICAST},
		{"to nowhere", inside, "udp", 0, ends("192.168.1.2:1", "127.0.0.1:1"), abiNatReasonNAT_PASS_NO_RULE},
		{"broadcast", inside, "udp", 0, ends("192.168.1.2:1", "255.255.255.255:67"), abiNatReasonNAT_PASS_MULTICAST},
		{"from multicast", inside, "udp", 0, ends("224.0.0.5:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"no flags open nothing", inside, "tcp", 0, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"PSH and URG open nothing", inside, "tcp", 0x28, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"SYN FIN opens nothing", inside, "tcp", pktbuild.SYN | pktbuild.FIN, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"SYN RST opens nothing", inside, "tcp", pktbuild.SYN | pktbuild.RST, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"all flags open nothing", inside, "tcp", 0xff, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"no flags open no forward", outer, "tcp", 0, ends("198.51.100.9:1", "203.0.113.1:8080"), abiNatReasonNAT_DROP_NO_SESSION},
		{"SYN FIN opens no forward", outer, "tcp", pktbuild.SYN | pktbuild.FIN, ends("198.51.100.9:1", "203.0.113.1:8080"), abiNatReasonNAT_DROP_NO_SESSION},
		{"all flags open no forward", outer, "tcp", 0xff, ends("198.51.100.9:1", "203.0.113.1:8080"), abiNatReasonNAT_DROP_NO_SESSION},
		{"land", inside, "tcp", pktbuild.SYN, ends("192.168.1.2:1", "192.168.1.2:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"a source that lives elsewhere", inside, "udp", 0, ends("192.168.1.1:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"from outside, an inside source, to a forward", outer, "udp", 0, ends("192.168.1.3:1", "203.0.113.1:7042"), abiNatReasonNAT_DROP_SPOOFED},
		{"from outside, an inside source, to a prefix", outer, "udp", 0, ends("192.168.1.3:1", "198.18.6.7:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"from outside, an inside source, without sessions", outer, "udp", 0, ends("192.168.1.3:1", "198.18.7.7:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"from outside, the gateway's own source", outer, "udp", 0, ends("203.0.113.1:9", "198.18.6.7:1"), abiNatReasonNAT_DROP_SPOOFED},
		{"from outside, land", outer, "tcp", pktbuild.SYN, ends("203.0.113.1:8080", "203.0.113.1:8080"), abiNatReasonNAT_DROP_SPOOFED},
		{"FIN opens nothing", inside, "tcp", pktbuild.FIN | pktbuild.ACK, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"RST opens nothing", inside, "tcp", pktbuild.RST, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"SYN ACK opens nothing", inside, "tcp", pktbuild.SYN | pktbuild.ACK, ends("192.168.1.2:1", "198.51.100.9:1"), abiNatReasonNAT_DROP_NO_SESSION},
		{"ACK opens no forward", outer, "tcp", pktbuild.ACK, ends("198.51.100.9:1", "203.0.113.1:8080"), abiNatReasonNAT_DROP_NO_SESSION},
		{"an echo reply opens nothing", inside, "pong", 0, ends("192.168.1.2:1", "198.51.100.9:0"), abiNatReasonNAT_DROP_NO_SESSION},
		{"pool address that nobody has", outer, "tcp", pktbuild.SYN, ends("198.51.100.9:1", "203.0.113.16:1024"), abiNatReasonNAT_DROP_NO_MAPPING},
		{"pool address below its range", outer, "tcp", pktbuild.SYN, ends("198.51.100.9:1", "203.0.113.16:80"), abiNatReasonNAT_DROP_NO_MAPPING},
		{"whole address that nobody has", outer, "gre", 0, ends("198.51.100.9:0", "203.0.113.20:0"), abiNatReasonNAT_DROP_NO_MAPPING},
		{"the gateway's own ping", outer, "pong", 0, ends("198.51.100.9:5", "203.0.113.1:0"), abiNatReasonNAT_PASS_LOCAL},
	} {
		t.Run(row.name, func(t *testing.T) {
			g.refused(t, row.side, row.kind, row.flags, row.e, row.reason)
		})
	}
	for _, row := range []struct {
		name   string
		side   abiNatSide
		e      endpoints
		ttl    uint8
		bytes  int
		reason abiNatReason
	}{
		{"TTL 1 out", inside, ends("192.168.1.2:1", "198.51.100.9:1"), 1, 10, abiNatReasonNAT_PASS_TTL},
		{"TTL 1 in", outer, ends("198.51.100.9:1", "203.0.113.1:7000"), 1, 10, abiNatReasonNAT_DROP_TTL},
		{"too big out", inside, ends("192.168.1.2:1", "198.51.100.9:1"), 64, outsideMTU, abiNatReasonNAT_PASS_TOO_BIG},
		{"too big in", outer, ends("198.51.100.9:1", "203.0.113.1:7000"), 64, insideMTU, abiNatReasonNAT_DROP_TOO_BIG},
		{"TTL 1 hairpin", inside, ends("192.168.1.2:1", "203.0.113.1:7000"), 1, 10, abiNatReasonNAT_DROP_TTL},
		{"too big hairpin", inside, ends("192.168.1.2:1", "203.0.113.1:7000"), 64, insideMTU, abiNatReasonNAT_DROP_TOO_BIG},
	} {
		t.Run(row.name, func(t *testing.T) {
			frame := g.sidePort(row.side).arriving(pktbuild.IPv4{Src: row.e.src, Dst: row.e.dst, TTL: row.ttl, Fragment: pktbuild.DF,
				Payload: pktbuild.UDP{Src: row.e.sport, Dst: row.e.dport, Data: make([]byte, row.bytes)}})
			if _, _, reason := g.enter(t, g.hook, row.side, g.sidePort(row.side), frame.Bytes()); reason != g.hook.counts(row.reason) {
				t.Errorf("%v, want %v", reason, g.hook.counts(row.reason))
			}
		})
	}
	for name, n := range map[string]int{
		"flows":    len(flowsOf(t, g.maps)),
		"mappings": len(mappingsOf(t, g.maps)),
		"sources":  len(entries[abiNatSourceKey, abiNatSource](t, g.maps["sources"])),
	} {
		if n != 0 {
			t.Errorf("%d %s are left", n, name)
		}
	}
}

// Limits refuse what is new and leave alone what is there.
func testLimits(t *testing.T, g *gateway) {
	g.configure(t, func(c *abiNatConfig) { limitSessions(c, 3) })
	e := ends("192.168.1.2:5000", "198.51.100.9:53")
	for range 3 {
		e.dport++
		g.send(t, inside, "udp", 0, e)
	}
	e.dport++
	g.refused(t, inside, "udp", 0, e, abiNatReasonNAT_DROP_SOURCE_LIMIT)
	e.dport--
	g.want(t, inside, "udp", 0, e, sent, endpoints{gatewayOut, world, 5000, e.dport})
	g.want(t, inside, "udp", 0, ends("192.168.1.3:1234", "198.51.100.9:53"), sent, ends("203.0.113.1:1234", "198.51.100.9:53"))
	g.want(t, inside, "udp", 0, ends("192.168.1.3:1234", "198.51.100.8:53"), sent, ends("203.0.113.1:1234", "198.51.100.8:53"))

	// What strangers open through a host's mapping is the host's, and its address stays.
	cone := ends("192.168.2.2:5000", "198.51.100.9:53")
	_, out := g.send(t, inside, "udp", 0, cone)
	stranger := endpoints{netip.MustParseAddr("198.51.100.70"), out.src, 7, 5000}
	for range 2 {
		stranger.sport++
		g.want(t, outer, "udp", 0, stranger, back, endpoints{stranger.src, cone.src, stranger.sport, 5000})
	}
	stranger.sport++
	g.refused(t, outer, "udp", 0, stranger, abiNatReasonNAT_DROP_SOURCE_LIMIT)
	stranger.sport--
	g.want(t, outer, "udp", 0, stranger, back, endpoints{stranger.src, cone.src, stranger.sport, 5000})
	g.want(t, outer, "udp", 0, out.answer(), back, cone.answer())
	if held := g.held(t); held.sources != 3+2+3 {
		t.Errorf("%d sessions are counted to hosts, want 8", held.sources)
	}
	g.configure(t, func(c *abiNatConfig) {})

	// Four ports: one is left for nobody.
	e = ends("192.168.8.2:4000", "198.51.100.9:53")
	seen := map[uint16]bool{}
	for range 4 {
		_, out := g.send(t, inside, "udp", 0, e)
		seen[out.sport] = true
		e.sport += 2
	}
	g.refused(t, inside, "udp", 0, e, abiNatReasonNAT_DROP_NO_PORT)
	if len(seen) != 4 || seen[0] {
		t.Errorf("four hosts have the ports %v", seen)
	}
	e.sport = 4000
	g.want(t, inside, "udp", 0, e, sent, endpoints{netip.MustParseAddr("203.0.113.22"), world, 4000, 53})
}

// New sessions may go by a route that is a second old, not by an older one; nor is their
// sender believed to be for longer where it was.
func TestRouteOfNewSessions(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	e := ends("192.168.1.2:5000", "198.51.100.9:53")
	g.want(t, inside, "udp", 0, e, sent, ends("203.0.113.1:5000", "198.51.100.9:53"))
	becomes := func(want abiNatReason) {
		t.Helper()
		for since := time.Now(); ; time.Sleep(time.Millisecond) { // or there are not enough ports
			age := time.Since(since)
			e.sport++
			reason, _ := g.send(t, inside, "udp", 0, e)
			if reason == want {
				return
			}
			if reason != sent || age > 1050*time.Millisecond {
				t.Fatalf("%v after %v, want %v", reason, age, want)
			}
		}
	}
	host := &netlink.Route{Dst: &net.IPNet{IP: e.src.AsSlice(), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_UNREACHABLE}
	g.do(t, func() error { return netlink.RouteAdd(host) })
	becomes(abiNatReasonNAT_DROP_SPOOFED)
	g.do(t, func() error {
		all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
		return errors.Join(netlink.RouteDel(host), netlink.RouteDel(&netlink.Route{LinkIndex: g.out.ifindex, Gw: router.AsSlice()}),
			netlink.RouteAdd(&netlink.Route{Dst: all, Type: unix.RTN_UNREACHABLE}))
	})
	becomes(abiNatReasonNAT_PASS_NO_ROUTE)
}

// A session that cannot be made gives back everything it had taken.
func TestSessionFull(t *testing.T) {
	g := aGateway(t)
	for _, row := range []struct {
		full   string
		fill   func(testing.TB, *ebpf.Map) func()
		reason abiNatReason
	}{
		{"counts", useUp, abiNatReasonNAT_DROP_SESSIONS_FULL},
		{"mapping_table", fillTable, abiNatReasonNAT_DROP_MAPPINGS_FULL},
		{"filter_entries", fillUp[[12]byte, abiNatFilterEntry], abiNatReasonNAT_DROP_MAPPINGS_FULL},
		{"sources", fillUp[[8]byte, abiNatSource], abiNatReasonNAT_DROP_SOURCES_FULL},
	} {
		t.Run(row.full, func(t *testing.T) {
			g.reset(t)
			g.configure(t, func(c *abiNatConfig) { limitSessions(c, 1000) })
			empty := row.fill(t, g.maps[row.full])
			free := g.freePorts(t, knownAddress, abiNatClassNAT_UDP)
			g.refused(t, inside, "udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53"), row.reason)
			empty()
			refs := g.held(t)
			if refs.sources+refs.contacts+refs.mappings != 0 {
				t.Errorf("still held: %+v", refs)
			}
			// What is left is a mapping that rests with its port, if it came to that.
			if now := g.freePorts(t, knownAddress, abiNatClassNAT_UDP); now < free-1 {
				t.Errorf("%d ports are free, %d were", now, free)
			}
			g.want(t, inside, "udp", 0, ends("192.168.3.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.18:5000", "198.51.100.9:53"))
		})
	}
}

// fillUp fills a map with keys that no packet has. The function that it returns makes
// room for one session.
func fillUp[K ~[8]byte | ~[12]byte | ~[16]byte, V any](t testing.TB, m *ebpf.Map) (empty func()) {
	t.Helper()
	keys, values := make([]K, m.MaxEntries()), make([]V, m.MaxEntries())
	for i := range keys {
		keys[i][0], keys[i][1], keys[i][2], keys[i][3] = byte(i), byte(i>>8), byte(i>>16), 0xff
	}
	if _, err := m.BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(err)
	}
	return func() {
		for _, key := range keys[:2] {
			if err := m.Delete(key); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// references counts what sessions hold. Elements that a test put in have none.
type references struct{ mappings, sources, contacts int }

func (g *gateway) held(t testing.TB) references {
	t.Helper()
	var r references
	for _, m := range mappingsOf(t, g.maps) {
		r.mappings += int(m.Refs & uint32(abiNatRefsNAT_REFS_COUNT))
	}
	for _, s := range entries[abiNatSourceKey, abiNatSource](t, g.maps["sources"]) {
		r.sources += int(s.Use & uint64(abiNatUseNAT_USE_COUNT))
	}
	for _, c := range entries[abiNatFilterKey, abiNatFilterEntry](t, g.maps["filter_entries"]) {
		r.contacts += int(c.Refs & uint32(abiNatRefsNAT_REFS_COUNT))
	}
	return r
}

// inner is one of the maps in a map.
func (r *rig) inner(t testing.TB, name string, index uint32) (m *ebpf.Map) {
	t.Helper()
	if err := r.maps[name].Lookup(index, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// freePorts is how many ports of a class an address has left.
func (r *rig) freePorts(t testing.TB, address uint32, class abiNatClass) int {
	t.Helper()
	m := r.inner(t, "free_ports", address)
	defer m.Close()
	var p abiNatPorts
	if err := m.Lookup(uint32(class), &p); err != nil {
		t.Fatal(err)
	}
	return int(p.Free)
}

// Which source rule a host meets is remembered, for its egress interface and one generation of the rules.
func TestSourceRuleRemembered(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.hook = hooks[1]
	source := func(e endpoints) string {
		t.Helper()
		reason, out := g.send(t, abiNatSideNAT_INSIDE, "udp", 0, e)
		if reason != abiNatReasonNAT_TRANSLATED_OUT {
			t.Fatalf("%v: %v", e, reason)
		}
		return out.src.String()
	}
	first, second := ends("192.168.1.2:5000", "198.51.100.9:53"), ends("192.168.1.2:5001", "198.51.100.9:53")
	if got := source(first); got != externalAddresses[ownAddress] {
		t.Errorf("%v leaves from %s", first, got)
	}
	g.refused(t, abiNatSideNAT_INSIDE, "udp", 0, ends("192.168.1.2:5002", "192.168.99.2:53"), abiNatReasonNAT_PASS_NO_RULE) // by another egress interface
	if got := source(second); got != externalAddresses[ownAddress] {
		t.Errorf("%v leaves from %s", second, got)
	}
	g.fill(t, "origins", []entry{{&abiNatOriginKey{Prefixlen: 56, Out: be(g.out.link + 1), Addr: addr(netip.MustParseAddr("192.168.1.0"))}, uint32(knownRule)}})
	if got := source(ends("192.168.1.2:5003", "198.51.100.9:53")); got != externalAddresses[knownAddress] {
		t.Errorf("by the rules of the next generation from %s", got)
	}
}

// What was to be led to another internal host and can't be sent there does not go up as it
// came: the stack would route it by the address that it was to lose.
func TestHairpinStaysInside(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	nowhere := func(t *testing.T, host string) {
		g.unreachable(t, &net.IPNet{IP: net.ParseIP(host).To4(), Mask: net.CIDRMask(32, 32)})
	}
	for _, h := range hooks {
		g.hook = h
		t.Run(h.name, func(t *testing.T) {
			known, unknown := ends("192.168.1.2:5000", "198.18.6.7:9"), ends("192.168.1.2:5000", "198.18.7.8:9")
			g.want(t, inside, "udp", 0, known, sent, ends("203.0.113.1:5000", "192.168.6.7:9"))
			nowhere(t, "192.168.6.7")
			nowhere(t, "192.168.7.8")
			g.refused(t, inside, "udp", 0, unknown, abiNatReasonNAT_DROP_NO_ROUTE)
			time.Sleep(time.Second) // the path that the session has is valid for so long
			g.refused(t, inside, "udp", 0, known, abiNatReasonNAT_DROP_NO_ROUTE)
			g.reset(t)
		})
	}
}

// A stranger is not let in by a port that is a session's, though its internal endpoint has a
// mapping, by another port: the rule was another one when the session was made.
func TestStrangerToPortOfSession(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	host := fmt.Sprintf("192.168.%d.9:5000", apdmRule)
	stranger := func(src string, to endpoints, want abiNatReason) {
		t.Helper()
		e := ends(src, fmt.Sprintf("%s:%d", to.src, to.sport))
		if got, _ := g.send(t, outer, "udp", 0, e); got != want {
			t.Errorf("%v: %v, want %v", e, got, want)
		}
	}
	_, first := g.send(t, inside, "udp", 0, ends(host, "198.51.100.9:53"))
	stranger("198.51.100.77:999", first, abiNatReasonNAT_DROP_FILTERED)
	rules := [ruleCount]abiNatRule{}
	rules[apdmRule] = abiNatRule{Id: apdmRule, Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Pool: apdmAddress + 1, PoolFirst: apdmAddress, PoolCount: 1}
	g.fill(t, "rules", indexed(rules[:]))
	_, second := g.send(t, inside, "udp", 0, ends(host, "198.51.100.10:53"))
	if second.sport == first.sport {
		t.Fatalf("%v has the port of %v", second, first)
	}
	stranger("198.51.100.77:999", first, abiNatReasonNAT_DROP_FILTERED)
	stranger("198.51.100.77:999", second, back)
}

// A host whose address has left the pool goes on with another one.
func TestPoolLosesAddress(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	host := func(port int) endpoints {
		return ends(fmt.Sprintf("192.168.%d.9:%d", fullRule, port), "198.51.100.9:53")
	}
	_, first := g.send(t, inside, "udp", 0, host(5000))
	for i := uint32(fullAddress); i < fullAddress+2; i++ {
		var a abiNatAddress
		if err := g.maps["addresses"].Lookup(i, &a); err != nil {
			t.Fatal(err)
		}
		if addr(first.src) == a.Addr {
			a.Flags |= uint16(abiNatAddressFlagNAT_ADDRESS_LEAVING)
			g.put(t, "addresses", i, &a)
		}
	}
	reason, second := g.send(t, inside, "udp", 0, host(5001))
	if reason != sent || second.src == first.src {
		t.Errorf("after %v left: %v by %v", first.src, reason, second.src)
	}
	if _, third := g.send(t, inside, "udp", 0, host(5002)); third.src != second.src {
		t.Errorf("by %v and %v", second.src, third.src)
	}
}

// A pool that grows while hosts use it: its addresses have other indices from then on. Hosts
// keep the address that they have, and who was let in by their mappings still is.
func TestPoolGrowsInUse(t *testing.T) {
	const hosts, more = 16, addressCount + 4 // index of the larger pool
	g := newGateway(t)
	host := func(n, port int) endpoints {
		return ends(fmt.Sprintf("192.168.%d.%d:%d", fullRule, n+10, port), "198.51.100.9:53")
	}
	var before [hosts]endpoints
	for n := range before {
		_, before[n] = g.send(t, inside, "udp", 0, host(n, 5000))
	}
	m, err := mapsOf(g.maps)
	if err != nil {
		t.Fatal(err)
	}
	for i, old := range []uint32{fullAddress, fullAddress2} {
		index := more + 1 + uint32(i)
		for _, in := range []inners{{outer: m.Slots, spec: &ebpf.MapSpec{}}, {outer: m.FreePorts, spec: &ebpf.MapSpec{}}} {
			if err := in.share(index, old); err != nil {
				t.Fatal(err)
			}
			if err := in.put(); err != nil {
				t.Fatal(err)
			}
			if err := in.close(); err != nil {
				t.Fatal(err)
			}
		}
		var a abiNatAddress
		if err := g.maps["addresses"].Lookup(old, &a); err != nil {
			t.Fatal(err)
		}
		g.put(t, "addresses", index, &a)
		g.put(t, "address_indices", &a.Addr, index)
	}
	addAddress(t, g.maps, more, abiNatAddress{Addr: abiNatAddr{Octet: [4]uint8{203, 0, 113, 15}}, PortFirst: 1024, PortCount: 8976, Pool: fullAddress + 1})
	rules := [ruleCount]abiNatRule{}
	rules[fullRule] = abiNatRule{Id: fullRule, Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Pool: fullAddress + 1, PoolFirst: more, PoolCount: 3}
	g.fill(t, "rules", indexed(rules[:]))
	g.nextGeneration(t)
	for n := range before {
		stranger := ends("198.51.100.77:999", fmt.Sprintf("%s:%d", before[n].src, before[n].sport))
		if reason, _ := g.send(t, outer, "udp", 0, stranger); reason != back {
			t.Errorf("host %d: a stranger to %v:%d meets %v", n, before[n].src, before[n].sport, reason)
		}
		reason, after := g.send(t, inside, "udp", 0, host(n, 5001))
		if reason != sent || after.src != before[n].src {
			t.Errorf("host %d: behind %v, then %v behind %v", n, before[n].src, reason, after.src)
		}
	}
}

// addressHash is addr_hash of bpf/lib/base.h.
func addressHash(a netip.Addr) uint32 {
	b := a.As4()
	h := binary.BigEndian.Uint32(b[:])
	h ^= h >> 16
	h *= 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	return h ^ h>>16
}

// A new session with a new mapping, in a range of ports of which so many percent are
// taken: 60 in one run of the program, which measures itself. Hosts and ports differ;
// the rules are one masquerade.
func BenchmarkSessionOpen(b *testing.B) {
	g := newGateway(b)
	addAddress(b, g.maps, ownAddress, abiNatAddress{Addr: addr(gatewayOut), PortFirst: 1024, PortCount: 64512, Pool: 1})
	coll := g.load(b, loadSessionTest)
	var ports *ebpf.Map
	if err := g.maps["free_ports"].Lookup(uint32(ownAddress), &ports); err != nil {
		b.Fatal(err)
	}
	defer ports.Close()
	const batch = 60
	g.configure(b, func(c *abiNatConfig) { c.Lookups = uint32(abiNatLookupNAT_LOOKUP_SOURCE_OUT) })
	for _, fill := range []float64{10, 50, 99, 99.9} {
		b.Run(fmt.Sprint(fill), func(b *testing.B) {
			free := freePorts(1024, 64512)
			for _, n := range rand.New(rand.NewPCG(1, 2)).Perm(64512)[:int(64512*fill/100)] {
				port := 1024 + n
				free.Words[port/64] &^= 1 << (port % 64)
				if free.Words[port/64] == 0 {
					free.Summary[port/4096] &^= 1 << (port / 64 % 64)
				}
				free.Free--
			}
			var rounds []float64
			for done := 0; done < b.N; done += batch {
				forgetSessions(b, g.maps)
				forgetMappings(b, g.maps)
				if err := ports.Put(uint32(abiNatClassNAT_UDP), free); err != nil {
					b.Fatal(err)
				}
				opts := &ebpf.RunOptions{Data: make([]byte, 64), DataOut: make([]byte, 64),
					Context: &skbContext{Ifindex: uint32(g.in.ifindex), CB: [5]uint32{batch}}}
				var opened uint32
				err := g.ns.Do(func() (err error) { opened, err = coll.Programs["open"].Run(opts); return err })
				if err != nil || opened != batch {
					b.Fatalf("opened %d of %d: %v", opened, batch, err)
				}
				rounds = append(rounds, float64(binary.NativeEndian.Uint64(opts.DataOut))/batch)
			}
			slices.Sort(rounds)
			b.ReportMetric(rounds[len(rounds)/2], "median-ns")
			b.ReportMetric(rounds[len(rounds)/10], "p10-ns")
			b.ReportMetric(rounds[len(rounds)*9/10], "p90-ns")
		})
	}
}

// crowd is a gateway with room for a million sessions behind 16 addresses, and the program
// that opens them, 63 a host, touching memory all over as the packets of many hosts do.
type crowd struct {
	*gateway
	*ebpf.Collection
	size Size
}

const (
	crowdBatch = 252 // sessions in one run of the program
	crowdNew   = 64512
	crowdHeld  = 459776
)

func newCrowd(b *testing.B) *crowd {
	const first, addresses = 100, 16
	c := &crowd{gateway: newGateway(b), size: Size{Sessions: 1 << 20, Mappings: 1 << 20, Sources: 65536}}
	for i := range addresses {
		a := netip.AddrFrom4([4]byte{203, 0, 113, byte(100 + i)})
		addAddress(b, c.maps, uint32(first+i), abiNatAddress{Addr: addr(a), PortFirst: 1024, PortCount: 64512, Pool: first})
	}
	c.fill(b, "rules", indexed([]abiNatRule{{Kind: uint8(abiNatRuleKindNAT_RULE_NAPT), Pool: first, PoolFirst: first, PoolCount: addresses}}))
	c.fill(b, "origins", []entry{{&abiNatOriginKey{Prefixlen: 48, Addr: addr(netip.MustParseAddr("192.168.0.0"))}, uint32(0)}})
	c.configure(b, func(c *abiNatConfig) {
		c.Lookups = uint32(abiNatLookupNAT_LOOKUP_SOURCE)
		for i := range c.Timeouts {
			c.Timeouts[i] = ticks(60)
		}
	})
	c.Collection = c.load(b, loadSessionTest, func(name string) *ebpf.Map {
		if _, sized := c.size.entries()[name]; sized {
			return nil
		}
		return c.maps[name]
	})
	of := maps.Clone(c.maps)
	maps.Copy(of, c.Maps)
	if err := putControl(&engineOn(b, of).m, c.size); err != nil {
		b.Fatal(err)
	}
	return c
}

// load loads an object of the crowd's size on the maps that known knows.
func (c *crowd) load(b *testing.B, load func() (*ebpf.CollectionSpec, error), known func(name string) *ebpf.Map) *ebpf.Collection {
	b.Helper()
	return loadOn(b, func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil {
			resize(spec, c.size)
		}
		return spec, err
	}, known)
}

// scatter has that program open count sessions of all, from number first on; after others come before them. It
// returns how many were opened, and what that took in nanoseconds.
func (r *rig) scatter(t testing.TB, program *ebpf.Program, count, first, after, all uint32) (opened uint32, ns float64) {
	t.Helper()
	opts := &ebpf.RunOptions{Data: make([]byte, 64), DataOut: make([]byte, 64),
		Context: &skbContext{Ifindex: uint32(r.in.ifindex), CB: [5]uint32{count, first, after, all}}}
	if err := r.ns.Do(func() (err error) { opened, err = program.Run(opts); return err }); err != nil {
		t.Fatal(err)
	}
	return opened, float64(binary.NativeEndian.Uint64(opts.DataOut))
}

// open opens so many sessions that come after others, and returns what one of them took in
// each run of the program, in nanoseconds.
func (c *crowd) open(b *testing.B, after, sessions uint32) (took []float64) {
	for n := range sessions / crowdBatch {
		opened, ns := c.scatter(b, c.Programs["scatter"], crowdBatch, n*crowdBatch, after, sessions)
		if opened == 0 || opened > crowdBatch {
			b.Fatalf("opened %d of %d", opened, crowdBatch)
		}
		took = append(took, ns/crowdBatch)
	}
	return took
}

// A new session with a new mapping in tables that are half full: 64 512 of 1024 hosts beside
// 459 776 others. Runs once, with -benchtime 1x.
func BenchmarkSessionHalfFull(b *testing.B) {
	c := newCrowd(b)
	c.open(b, crowdNew, crowdHeld)
	took := c.open(b, 0, crowdNew)
	slices.Sort(took)
	b.ReportMetric(took[len(took)/2], "median-ns")
	b.ReportMetric(took[len(took)/10], "p10-ns")
	b.ReportMetric(took[len(took)*9/10], "p90-ns")
}

// 459 776 sessions that end at once: how long until all are removed, 2.1 s of rest included, and
// what GC works for each, removal of the mapping included. Likewise with 1x.
func BenchmarkSessionsEnd(b *testing.B) {
	c := newCrowd(b)
	c.open(b, crowdNew, crowdHeld)
	gc := c.load(b, loadGc, func(name string) *ebpf.Map {
		if m := c.Maps[name]; m != nil {
			return m
		}
		return c.maps[name]
	})
	run := func(program string) {
		if _, err := gc.Programs[program].Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil {
			b.Fatalf("%s: %v", program, err)
		}
	}
	c.configure(b, func(c *abiNatConfig) {
		for i := range c.Timeouts {
			c.Timeouts[i] = 0
		}
	})
	run("gc_start")
	defer run("gc_stop")
	begun := time.Now()
	var removed time.Duration
	for {
		var sum abiNatStats
		var all []abiNatStats
		if err := c.maps["stats"].Lookup(uint32(0), &all); err != nil {
			b.Fatal(err)
		}
		for _, s := range all {
			for _, reason := range []abiNatReason{abiNatReasonNAT_CREATED, abiNatReasonNAT_EXPIRED, abiNatReasonNAT_MAPPED, abiNatReasonNAT_UNMAPPED} {
				sum.Packets[reason] += s.Packets[reason]
			}
			sum.GcNs += s.GcNs
		}
		created := sum.Packets[abiNatReasonNAT_CREATED]
		if removed == 0 && sum.Packets[abiNatReasonNAT_EXPIRED] == created {
			removed = time.Since(begun)
		}
		if removed > 0 && sum.Packets[abiNatReasonNAT_UNMAPPED] == sum.Packets[abiNatReasonNAT_MAPPED] {
			b.ReportMetric(removed.Seconds(), "s-all-removed")
			b.ReportMetric(float64(sum.GcNs)/float64(created), "gc-ns/session")
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Flows whose keys have the same home and the same tag are distinguished by the keys: whose
// addresses are alike by their ports, and the other way round.
func TestFlowsOfOneTag(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.hook = hooks[1]
	var control abiNatControl
	if err := g.maps["control"].Lookup(uint32(0), &control); err != nil {
		t.Fatal(err)
	}
	// Not with any seed there are such flows among so many.
	control.Seed = [2]uint64{0xa708a824f612c926, 0x77ea0ec77608f62a}
	if err := g.maps["control"].Put(uint32(0), &control); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		alike string
		of    func(n uint32) endpoints
	}{
		{"addresses", func(n uint32) endpoints {
			return endpoints{netip.MustParseAddr("192.168.1.2"), world, 2000 + uint16(n%50000), 53 + uint16(n/50000)}
		}},
		{"ports", func(n uint32) endpoints {
			return endpoints{netip.MustParseAddr("192.168.1.3"), netip.AddrFrom4([4]byte{45, byte(n >> 16), byte(n >> 8), byte(n)}), 2000, 53}
		}},
	} {
		t.Run(row.alike, func(t *testing.T) {
			known := map[uint64]endpoints{}
			for n := uint32(0); ; n++ {
				if n == 1<<20 {
					t.Fatal("no two keys of one home and tag")
				}
				e := row.of(n)
				key := abiNatFlowKey{Src: addr(e.src), Dst: addr(e.dst), Sport: be(e.sport), Dport: be(e.dport), Protocol: pktbuild.UDPProtocol, Side: uint8(inside)}
				hash := tableHash(control.Seed, &key)
				at := hash&^(tableTag-1) | tableTag | hash&uint64(control.FlowMask)
				first, met := known[at]
				known[at] = e
				if !met {
					continue
				}
				for _, e := range []endpoints{first, e} {
					reason, out := g.send(t, inside, "udp", 0, e)
					if reason != sent || out.src != gatewayOut || out.dst != e.dst || out.dport != e.dport {
						t.Errorf("%v leaves as %v (%v)", e, out, reason)
					}
					g.want(t, outer, "udp", 0, out.answer(), back, e.answer())
				}
				if n := g.flowCount(t); n != 4 {
					t.Errorf("%d flows, want both of two sessions", n)
				}
				return
			}
		})
		g.reset(t)
	}
}
