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
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/pktbuild"
)

// modelRig is a rig with a second inside link, whose rules are those of a random file,
// and the model of that file.
//
//	192.168.0.0/16 --- in       gateway   out --- router --- the world
//	   10.2.0.0/16 --- in2
//
// One that is armed has no second inside link: in2 is not the file's, and out is on both sides.
//
//	192.168.1.0/24 --- in       gateway   out --- router --- the world, 192.168.0.0/16, 10.2.0.0/16
//
// With zones hosts behind in2 have the addresses of those behind in: the model knows them by
// others, 10.2.x.y for 192.168.x.y, and so says that they are nobody else.
//
//	192.168.0.0/16 --- in       gateway   out --- router --- the world
//	192.168.0.0/16 --- in2
type modelRig struct {
	*rig
	engine *Engine
	ports  map[string]port
	facts  Facts
	known  Facts // as the model has them
	random *rand.Rand
	model  *model
	seen   []modelPacket // packets that left, as they were outside or inside: to be answered
	sent   []modelPacket // that came in: to be repeated
	count  map[abiNatReason]int
	errors map[string]int // see model.errors
	onXDP  int
	armed  bool   // see newModelRig
	tight  bool   // subscribers may have little
	passed uint32 // ticks: the last call of pass

	confirmed uint32 // ticks: when neighbours were, as the engine has it
}

// Random packets through both hooks end as the model says, under random rules. Prints
// the seed of a sequence that does not. NATKIT_PACKETS is how many packets are sent,
// NATKIT_SEED the first sequence's seed.
func TestRandomPackets(t *testing.T) {
	aModelRig(t).packets(t)
}

// The same where subscribers may have little, and blocks are few.
func TestRandomPacketsOfSubscribers(t *testing.T) {
	r := aModelRig(t)
	r.tight = true
	clear(r.count)
	defer func() { r.tight = false; clear(r.count) }()
	packets := number(t, "NATKIT_PACKETS", 5000)
	for n, seed := 0, uint64(number(t, "NATKIT_SEED", 1)); n < packets; seed++ {
		n += r.sequence(t, seed, min(packets-n, 500))
		if t.Failed() {
			t.Fatalf("NATKIT_SEED=%d", seed)
		}
	}
	t.Logf("%v", r.count)
	for _, reason := range []abiNatReason{abiNatReasonNAT_DROP_SOURCE_LIMIT, abiNatReasonNAT_DROP_PORT_LIMIT, abiNatReasonNAT_DROP_NO_BLOCK} {
		if r.count[reason] == 0 {
			t.Errorf("no packet ended as %s", rulefile.Reason(reason))
		}
	}
}

// The same through a gateway of which one link is on both sides.
func TestRandomPacketsOneArmed(t *testing.T) {
	if theArmedRig == nil {
		theArmedRig = newModelRig(keeper{t}, true, false)
	}
	theArmedRig.packets(t)
}

func (r *modelRig) packets(t *testing.T) {
	clear(r.count)
	clear(r.errors)
	r.onXDP = 0
	packets, seed := number(t, "NATKIT_PACKETS", 5000), uint64(number(t, "NATKIT_SEED", 1))
	for n := 0; n < packets; seed++ {
		n += r.sequence(t, seed, min(packets-n, 1000))
		if t.Failed() {
			t.Fatalf("NATKIT_SEED=%d", seed)
		}
	}
	t.Logf("%d packets, seeds up to %d, %d were finished by XDP: %v, errors about %v", packets, seed-1, r.onXDP, r.count, r.errors)
	if translated := r.count[abiNatReasonNAT_TRANSLATED_IN] + r.count[abiNatReasonNAT_TRANSLATED_OUT]; r.onXDP < translated/4 {
		t.Errorf("XDP finished %d packets of %d that were translated", r.onXDP, translated)
	}
	if r.errors["a session"] == 0 && !r.zones {
		t.Error("no ICMP error about a session was translated")
	}
	for _, reason := range []abiNatReason{
		abiNatReasonNAT_TRANSLATED_IN, abiNatReasonNAT_TRANSLATED_OUT, abiNatReasonNAT_PASS_NO_RULE, abiNatReasonNAT_PASS_EXCLUDED,
		abiNatReasonNAT_PASS_LOCAL, abiNatReasonNAT_PASS_TTL, abiNatReasonNAT_PASS_TOO_BIG, abiNatReasonNAT_DROP_SPOOFED,
		abiNatReasonNAT_DROP_FILTERED, abiNatReasonNAT_DROP_NO_MAPPING, abiNatReasonNAT_DROP_NO_SESSION, abiNatReasonNAT_DROP_NO_PORT,
		abiNatReasonNAT_DROP_NO_ADDRESS, abiNatReasonNAT_DROP_TTL,
	} {
		if r.count[reason] == 0 {
			t.Errorf("no packet ended as %v", reason)
		}
	}
}

func number(t *testing.T, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

var theModelRig, theArmedRig *modelRig

// aModelRig is one for tests that run one after the other: see aRig.
func aModelRig(t *testing.T) *modelRig {
	t.Helper()
	if theModelRig == nil {
		theModelRig = newModelRig(keeper{t}, false, false)
	}
	return theModelRig
}

func newModelRig(t testing.TB, armed, zones bool) *modelRig {
	t.Helper()
	r := &modelRig{rig: newRig(t), count: map[abiNatReason]int{}, errors: map[string]int{}, armed: armed}
	if r.zones = zones; zones {
		r.ready(t, hooks, "_zone", "_outside")
	} else {
		r.ready(t, hooks, "_inside", "_outside")
	}
	if armed {
		r.ready(t, hooks, "_both")
	}
	r.ports = map[string]port{"in": r.in, "out": r.out}
	if zones {
		r.do(t, r.addZone(t))
	} else if !armed {
		r.do(t, r.addSecond(t))
	}
	change := r.load(t, loadPorts)
	maps.Copy(r.programs, change.Programs)
	r.engine = engineOn(t, r.maps)
	r.engine.programs = r.programs
	r.facts.LocalPorts = [2]uint16{32768, 60999}
	for _, l := range []struct {
		name, addr string
		mtu        int
	}{{"in", "192.168.1.1/24", insideMTU}, {"in2", "10.2.0.1/24", insideMTU}, {"out", "203.0.113.1/24", outsideMTU}} {
		if armed && l.name == "in2" {
			continue
		}
		p, prefix := r.ports[l.name], netip.MustParsePrefix(l.addr)
		r.facts.Links = append(r.facts.Links, Link{
			Name: l.name, Index: int(p.link), Ifindex: p.ifindex, MAC: [6]byte(p.mac), MTU: l.mtu, Inside: armed || l.name != "out", Outside: l.name == "out",
			Transmit: true, Ethernet: true, Addresses: []netip.Prefix{prefix},
		})
		r.facts.Local = append(r.facts.Local, prefix.Addr())
	}
	r.known = r.facts
	if zones {
		r.facts = r.wire(r.facts)
	}
	return r
}

// addSecond makes the second inside link, and the routes to both networks.
func (r *modelRig) addSecond(t testing.TB) func() error {
	return func() error {
		second, err := r.addPort(t, "in2", 7, insideMTU, netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.2.0.2"), abiNatLinkFlagNAT_LINK_INSIDE)
		if err != nil {
			return err
		}
		r.ports["in2"] = second
		for _, route := range []struct {
			link    int
			network net.IP
			via     netip.Addr
		}{{r.in.ifindex, net.IP{192, 168, 0, 0}, insideHost}, {second.ifindex, net.IP{10, 2, 0, 0}, netip.MustParseAddr("10.2.0.2")}} {
			err := netlink.RouteAdd(&netlink.Route{LinkIndex: route.link, Gw: route.via.AsSlice(), Dst: &net.IPNet{IP: route.network, Mask: net.CIDRMask(16, 32)}})
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// route is the gateway's table.
func (r *modelRig) route(a netip.Addr) string {
	switch b := a.As4(); {
	case r.armed && (b[0] != 192 || b[1] != 168 || b[2] != 1):
		return "out"
	case b[0] == 192 && b[1] == 168:
		return "in"
	case b[0] == 10 && b[1] == 2:
		return "in2"
	}
	return "out"
}

// file makes random rules: of every kind with random modes.
func (r *modelRig) file() *rulefile.File {
	f := rulefile.New()
	f.Name = "random"
	f.Inside, f.Outside = []string{"in", "in2"}, []string{"out"}
	everybody, second := rulefile.Everywhere, "in2"
	if r.armed {
		f.Inside, everybody, second = []string{"in", "out"}, netip.MustParsePrefix("10.2.0.0/16"), "out"
	}
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	modes := func(rule rulefile.Rule) rulefile.Rule {
		for class := range rule.Mapping {
			rule.Mapping[class] = rulefile.MappingMode(r.random.IntN(3))
			rule.Filtering[class] = rulefile.FilteringMode(r.random.IntN(4))
		}
		return rule
	}
	ports := func() rulefile.PortRange {
		first := uint16([]int{5000, 1000, 1020}[r.random.IntN(3)])
		return rulefile.PortRange{First: first, Last: first + uint16(r.random.IntN(60))}
	}
	one := func(s string) rulefile.AddressRange { return rulefile.AddressRange{First: addr(s), Last: addr(s)} }
	f.Pools = []rulefile.Pool{
		{Name: "two", Addresses: []rulefile.AddressRange{{First: addr("203.0.113.16"), Last: addr("203.0.113.17")}}, Ports: ports()},
		{Name: "whole", Addresses: []rulefile.AddressRange{one("203.0.113.24"), one("203.0.113.25")}, OneToOne: true},
	}
	for i, chance := 0, int(f.Pools[0].Ports.Last); i < len(f.Pools); i++ {
		if chance%4 == 2*i {
			f.Pools[i].Drain = []rulefile.AddressRange{one(f.Pools[i].At(chance / 4 % 2).String())}
		}
	}
	if r.tight || r.random.IntN(4) == 0 {
		f.Pools[0].Ports = rulefile.PortRange{First: 5056, Last: 5119 + 64*uint16(r.random.IntN(2)*r.random.IntN(4))}
		f.Pools[0].Blocks = rulefile.Blocks{Size: 64, Extra: 64, AtMost: r.random.IntN(3)}
	}
	near, far := prefix("192.168.2.0/24"), prefix("10.2.0.0/16")
	if b := &f.Pools[0].Blocks; !b.IsZero() && !r.zones && r.random.IntN(2) == 0 {
		// Eight subscribers, four on each address, and up to three blocks beside theirs.
		b.Deterministic, near, far = rulefile.Deterministic(1+r.random.IntN(2)), prefix("192.168.2.0/30"), prefix("10.2.0.0/30")
		computed := 4
		if b.Deterministic == rulefile.DeterministicAll {
			computed *= 1 + b.AtMost
		}
		f.Pools[0].Ports.Last = f.Pools[0].Ports.First + 64*uint16(computed+r.random.IntN(4)) - 1
	}
	if r.tight || r.random.IntN(4) == 0 {
		share := func() rulefile.Share {
			return rulefile.Share{Sessions: r.random.IntN(2) * (1 + r.random.IntN(16)), Ports: r.random.IntN(2) * (1 + r.random.IntN(8))}
		}
		f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: share(), Classes: []rulefile.SubscriberClass{
			{Name: "some", Of: []netip.Prefix{prefix("192.168.2.0/24")}, Share: share()}, {Name: "one", Of: []netip.Prefix{prefix("192.168.2.2/32")}, Share: share()}}}
	}
	target := func(s string) rulefile.Target {
		a := netip.MustParseAddrPort(s)
		return rulefile.Target{Address: a.Addr(), Ports: rulefile.PortRange{First: a.Port(), Last: a.Port()}}
	}
	point := func(p uint16) rulefile.PortRange { return rulefile.PortRange{First: p, Last: p} }
	rules := []rulefile.Rule{
		{Action: rulefile.Masquerade{Source: pick(r.random, everybody, prefix("192.168.0.0/16")), Ports: rulefile.PortRange{First: 2000, Last: 9000}}},
		{Action: rulefile.SNAT{Source: near, Pool: "two"}},
		{Action: rulefile.SNAT{Source: far, Pool: "two"}, In: second, Out: "out"},
		{Action: rulefile.SNAT{Source: prefix("192.168.3.0/24"), Address: addr("203.0.113.20"), Ports: ports()}, Out: "out"},
		{Action: rulefile.SNAT{Source: prefix("192.168.5.0/24"), Pool: "whole"}},
		{Action: rulefile.Map{Inside: prefix("192.168.4.0/24"), Outside: prefix("198.18.4.0/24"), Stateless: r.random.IntN(2) == 0}},
		{Action: rulefile.Map{Inside: prefix("192.168.6.0/24"), Outside: prefix("192.168.6.0/24"), Stateless: r.random.IntN(3) == 0}},
		{Action: rulefile.Map{Inside: prefix("192.168.1.1/32"), Outside: prefix("192.168.1.1/32")}}, // the gateway's own
		{Action: rulefile.Map{Inside: prefix("10.2.4.2/31"), Outside: prefix("203.0.113.40/31")}},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: gatewayOut, Ports: point(8080), Targets: []rulefile.Target{target("192.168.1.2:80")}}},
		{Action: rulefile.DNAT{Protocol: rulefile.UDP, Address: gatewayOut, Ports: rulefile.PortRange{First: 7000, Last: 7009}, Targets: []rulefile.Target{
			{Address: addr("192.168.2.2"), Ports: rulefile.PortRange{First: 9000, Last: 9009}}}}},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: gatewayOut, Ports: point(443), Targets: []rulefile.Target{
			target("192.168.2.1:4430"), target("192.168.2.2:4430"), target("10.2.0.2:4430")}, Weights: pick(r.random, nil, []int{1, 1, 9}, []int{1000, 1, 500})}},
		{Action: rulefile.DNAT{Address: addr("203.0.113.30"), Targets: []rulefile.Target{{Address: addr("192.168.3.1")}}}},
		{Action: rulefile.Exclude{Source: prefix("192.168.0.0/16"), Destination: prefix("198.51.100.22/32")}},
		{Action: rulefile.Exclude{Source: rulefile.Everywhere, Destination: prefix("198.51.100.8/32"), Protocol: rulefile.TCP, Ports: point(53)}},
	}
	if r.zones {
		rules = r.bound(f, rules)
	} else if !r.tight {
		rules = r.freely(f, append(rules, r.more(ports())...))
	}
	for _, rule := range rules {
		if r.random.IntN(6) == 0 {
			continue
		}
		f.Rules = append(f.Rules, modes(rule))
		f.Rules[len(f.Rules)-1].Position.Line = len(f.Rules)
		if f.Validate() != nil {
			f.Rules = f.Rules[:len(f.Rules)-1]
		}
	}
	f.Defaults.PortParity = r.random.IntN(2) == 0
	// Odd quarters of 100 s: time passes in steps of 50 s, and 25 s are more than a packet takes.
	for i, seconds := range []int{125, 75, 425, 175, 225, 75, 225, 25, 125} {
		f.Defaults.Timeouts[i] = time.Duration(seconds) * time.Second
	}
	f.Limits.ICMPErrorsPerSecond = 1 << 20
	return f
}

// more are rules about what others are about, too: around their prefixes, and within them.
func (r *modelRig) more(ports rulefile.PortRange) []rulefile.Rule {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	around, host := prefix("192.168.0.0/16"), addr("10.2.4.9")
	return []rulefile.Rule{
		{Action: rulefile.SNAT{Source: around, Address: addr("203.0.113.21"), Ports: ports}, Out: pick(r.random, "out", "in")},
		{Action: rulefile.Masquerade{Source: prefix("192.168.4.0/30"), Ports: rulefile.PortRange{First: 2000, Last: 9000}}, In: "in"},
		{Action: rulefile.Map{Inside: prefix("10.2.4.0/24"), Outside: prefix("198.18.8.0/24"), Stateless: r.random.IntN(3) > 0}},
		{Action: rulefile.Map{Inside: prefix("192.168.4.2/31"), Outside: prefix("198.18.8.2/31"), Stateless: r.random.IntN(2) == 0}},
		{Action: rulefile.Map{Inside: prefix("192.168.3.2/32"), Outside: prefix("198.18.4.1/32"), Stateless: r.random.IntN(2) == 0}},
		{Action: rulefile.DNAT{Protocol: rulefile.TCP, Address: gatewayOut, Ports: rulefile.PortRange{First: 8080, Last: 8080}, Targets: []rulefile.Target{{Address: host}}}, In: pick(r.random, slices.Sorted(maps.Keys(r.ports))...)},
		{Action: rulefile.DNAT{Protocol: pick(r.random, rulefile.AnyProtocol, rulefile.UDP), Address: addr("198.18.4.1"), Targets: []rulefile.Target{{Address: addr("192.168.2.1")}}}},
		{Action: rulefile.DNAT{Protocol: rulefile.UDP, Address: addr("198.18.4.1"), Ports: rulefile.PortRange{First: 5000, Last: 5031}, Weights: []int{1, 2}, Targets: []rulefile.Target{
			{Address: addr("192.168.4.1"), Ports: rulefile.PortRange{First: 6000, Last: 6031}}, {Address: addr("192.168.2.3"), Ports: rulefile.PortRange{First: 6000, Last: 6031}}}}},
	}
}

// freely are the rules, some bound to interfaces that they were not bound to.
func (r *modelRig) freely(f *rulefile.File, rules []rulefile.Rule) []rulefile.Rule {
	for i := range rules {
		rule := &rules[i]
		in, out := "", ""
		switch rule.Action.(type) {
		case rulefile.Exclude:
			continue
		case rulefile.DNAT:
			in = pick(r.random, slices.Concat(f.Inside, f.Outside)...)
		default:
			in, out = pick(r.random, f.Inside...), "out"
		}
		if r.random.IntN(4) == 0 {
			rule.In = in
		}
		if rule.Out == "" && r.random.IntN(4) == 0 {
			rule.Out = out
		}
	}
	return rules
}

// forget makes the engine one that has seen nothing, with those rules.
func (r *modelRig) forget(t testing.TB, f *rulefile.File) {
	t.Helper()
	forgetSessions(t, r.maps)
	forgetMappings(t, r.maps)
	deleteAll[abiNatSourceKey, abiNatSource](t, r.maps["sources"])
	deleteAll[abiNatFilterKey, abiNatFilterEntry](t, r.maps["filter_entries"])
	deleteAll[abiNatAddr, uint32](t, r.maps["address_indices"])
	for _, name := range []string{"mapping_queue"} {
		value := make([]byte, r.maps[name].ValueSize())
		for r.maps[name].LookupAndDelete(nil, &value) == nil {
		}
	}
	for i := range uint32(16) {
		if err := r.maps["addresses"].Put(i, &abiNatAddress{}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"slots", "free_ports", "blocks"} {
			if err := r.maps[name].Delete(i); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatal(err)
			}
		}
	}
	zero(t, r.maps["whole_slots"])
	if err := r.maps["free_addresses"].Put(uint32(0), &abiNatPorts{}); err != nil {
		t.Fatal(err)
	}
	tables, err := Compile(f, r.facts)
	if err != nil {
		t.Fatal(err)
	}
	r.do(t, func() error { return r.engine.Apply(tables) })
}

func (r *modelRig) seed(n uint64) { r.random = rand.New(rand.NewPCG(n, 4)) }

// sequence sends packets until there were so many, or the model has lost track.
func (r *modelRig) sequence(t *testing.T, seed uint64, packets int) (n int) {
	t.Helper()
	r.seed(seed)
	f := r.file()
	r.forget(t, r.wireFile(f))
	r.model = newModel(f, r.known, r.route)
	r.model.zones, r.model.errors = r.zones, r.errors
	r.seen, r.sent = nil, nil
	r.passed = now()
	var history []string
	for n = 1; n <= packets && !r.model.lost; n++ {
		if now()-r.passed > ticks(1) {
			r.pass(t, 0)
		}
		if r.random.IntN(40) == 0 {
			pause := time.Duration(1+r.random.IntN(10)) * 50 * time.Second
			r.pass(t, pause)
			history = append(history, fmt.Sprintf("%v pass", pause))
		}
		p := r.packet()
		for !r.meant(p) {
			p = r.packet()
		}
		r.confirm(t)
		saw, err := r.send(t, p)
		if err != nil && r.late() {
			return n - 1
		}
		history = append(history, fmt.Sprintf("%v: %v", p, saw))
		if err == nil {
			err = r.model.packet(p, saw)
		}
		if err != nil {
			for i, rule := range f.Rules {
				t.Logf("rule %d: %s", i, rule.String())
			}
			t.Logf("%+v", f.Pools)
			for _, line := range history {
				if strings.Contains(line, p.src.Addr().String()) || strings.Contains(line, p.dst.Addr().String()) || strings.HasSuffix(line, "pass") {
					t.Log(line)
				}
			}
			t.Errorf("packet %d: %v", n, err)
			return n
		}
		r.count[saw.reason]++
		if p.error != nil {
			continue
		}
		r.sent = append(r.sent, p)
		if isTranslated(saw) {
			left := p
			left.modelEnds = saw.ends
			r.seen = append(r.seen, left)
		}
	}
	return n - 1
}

// pass lets time go by: for the engine, everything it has seen was so much earlier. What
// time really went by since the last call is taken back, of which a busy machine
// can take a lot, and the model knows nothing.
func (r *modelRig) pass(t *testing.T, d time.Duration) {
	t.Helper()
	r.model.now += d
	real := now()
	shift := func(tick *uint32) {
		if int32(*tick-r.passed) > 0 {
			*tick = r.passed
		}
		*tick += real - r.passed - Ticks(d)
	}
	changeFlows(t, r.maps, func(flow *abiNatFlow) {
		shift(&flow.Seen)
		checked := r.passed - uint32(uint16(r.passed)-flow.HopChecked)
		shift(&checked)
		if flow.Hop == 0 { // not looked up yet: it stays as old as session.h makes it
			checked = real - ticks(1)
		}
		flow.HopChecked = uint16(checked)
	})
	r.passed = real
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// packet makes one: new, a repeated one, or an answer to one that left, each perhaps
// with something wrong.
func (r *modelRig) packet() modelPacket {
	var p modelPacket
	if r.random.IntN(8) == 0 && !r.zones {
		return r.icmpError()
	}
	switch n := r.random.IntN(10); {
	case n < 3 && len(r.seen) > 0:
		p = r.answer(r.seen[r.random.IntN(len(r.seen))])
	case n < 6 && len(r.sent) > 0:
		p = r.sent[r.random.IntN(len(r.sent))]
	default:
		p = r.fresh()
	}
	p.ttl, p.length = pick[uint8](r.random, 2, 64, 255), 0
	switch r.random.IntN(60) {
	case 0:
		p.ttl = 1
	case 1:
		p.length = pick(r.random, 1400, 1401, 1500)
	case 2, 6, 7, 8:
		p.link = pick(r.random, slices.Sorted(maps.Keys(r.ports))...) // spoofed, or from the wrong side
		p.inside = p.link != "out"
	case 3:
		p.src = netip.AddrPortFrom(netip.MustParseAddr(pick(r.random, "10.9.9.9", p.dst.Addr().String(), "127.0.0.1", "0.0.0.0", "0.1.2.3", "240.1.2.3", "224.0.0.5",
			"203.0.113.1", "203.0.113.16", "203.0.113.20", "203.0.113.24", "203.0.113.30", "203.0.113.41", "198.18.4.9")), p.src.Port())
	case 4:
		p.dst = netip.AddrPortFrom(p.dst.Addr(), uint16(r.random.IntN(65536)))
		if p.protocol.Class() >= rulefile.ClassICMP {
			p.dst = netip.AddrPortFrom(p.dst.Addr(), 0)
			if p.protocol == rulefile.ICMP && !p.query {
				p.dst = netip.AddrPortFrom(p.dst.Addr(), 77)
			}
		}
	case 5: // a stranger
		p.src = netip.AddrPortFrom(p.src.Addr(), p.src.Port()^1)
		if p.protocol.Class() == rulefile.ClassOther || p.protocol == rulefile.ICMP && !p.query {
			p.src = netip.AddrPortFrom(p.src.Addr(), 0)
		}
	}
	p.syn, p.ack, p.fin, p.rst = false, false, false, false
	if p.protocol == rulefile.TCP {
		switch r.random.IntN(80) / 9 {
		case 8: // what no TCP sends
			p.syn, p.fin, p.rst = r.random.IntN(2) == 0, r.random.IntN(2) == 0, r.random.IntN(4) == 0
		case 0, 1, 2:
			p.syn = true
		case 3:
			p.syn, p.ack = true, true
		case 4, 5:
			p.ack = true
		case 6:
			p.fin, p.ack = true, true
		case 7:
			p.rst = true
		}
	}
	if least := 48; p.length == 0 {
		p.length = least + r.random.IntN(20)
	}
	return p
}

// answer is a packet from where that one went to.
func (r *modelRig) answer(p modelPacket) modelPacket {
	p = p.turned()
	p.link = r.route(p.src.Addr())
	p.inside = p.link != "out"
	return p
}

// icmpError is one about a packet that left, or that perhaps nobody has seen, from its receiver or from
// a router before that; perhaps with something wrong.
func (r *modelRig) icmpError() (p modelPacket) {
	e := &modelError{}
	switch n := r.random.IntN(10); {
	case n < 7 && len(r.seen) > 0:
		e.about = r.seen[r.random.IntN(len(r.seen))]
	case n < 8 && len(r.sent) > 0:
		e.about = r.sent[r.random.IntN(len(r.sent))]
	default:
		e.about = r.fresh()
		e.about.ttl, e.about.length = 1, 48
	}
	kind := pick(r.random, [2]uint8{3, 1}, [2]uint8{3, 3}, [2]uint8{3, 4}, [2]uint8{11, 0}, [2]uint8{12, 0})
	e.kind, e.code = kind[0], kind[1]
	e.quoted = min(pick(r.random, 28, 38, 1500), e.about.length, quotedMost)
	p = modelPacket{error: e, ttl: 64, link: r.route(e.about.dst.Addr())}
	p.protocol = rulefile.ICMP
	at := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 0) }
	p.src, p.dst = at(e.about.dst.Addr()), at(e.about.src.Addr())
	if r.random.IntN(3) == 0 {
		p.src = at(netip.MustParseAddr(map[string]string{"in": "192.168.1.7", "in2": "10.2.0.7", "out": "198.51.100.77"}[p.link]))
	}
	switch r.random.IntN(40) {
	case 0:
		p.ttl = 1
	case 1, 2:
		p.link = pick(r.random, slices.Sorted(maps.Keys(r.ports))...)
	case 3:
		p.src = at(netip.MustParseAddr(pick(r.random, "203.0.113.1", "203.0.113.16", "203.0.113.40", "198.18.4.9", "192.168.2.2", "10.2.0.2")))
	case 4:
		p.dst = r.fresh().dst
		p.dst = at(p.dst.Addr())
	}
	p.inside = p.link != "out"
	return p
}

// fresh is a packet of nothing known.
func (r *modelRig) fresh() modelPacket {
	p := modelPacket{}
	p.protocol = pick(r.random, rulefile.TCP, rulefile.TCP, rulefile.UDP, rulefile.UDP, rulefile.UDP, rulefile.ICMP, rulefile.GRE, rulefile.UDPLite)
	hosts := []string{"192.168.1.2", "192.168.2.1", "192.168.2.2", "192.168.2.3", "192.168.3.1", "192.168.3.2", "192.168.4.1", "192.168.4.2", "192.168.5.1", "192.168.5.2", "192.168.5.3", "192.168.6.1", "192.168.6.2", "10.2.0.2", "10.2.4.2", "10.2.4.3", "10.2.4.9", "192.168.1.1"}
	world := []string{"198.51.100.8", "198.51.100.9", "198.51.100.22"}
	outside := []string{"203.0.113.1", "203.0.113.1", "203.0.113.16", "203.0.113.17", "203.0.113.20", "203.0.113.24", "203.0.113.25", "203.0.113.30", "203.0.113.40", "203.0.113.21", "198.18.4.1", "198.18.8.2", "198.18.8.9", "192.168.6.1", "192.168.6.2", "192.168.1.1", "203.0.113.254"}
	if r.zones {
		hosts = append(hosts, "10.2.1.2", "10.2.2.1", "10.2.2.2", "10.2.3.1", "10.2.5.1", "10.2.5.2", "10.2.2.1", "10.2.2.2")
	}
	src := pick(r.random, hosts...)
	dst := pick(r.random, slices.Concat(world, world, world, world, outside, hosts)...)
	if r.random.IntN(4) == 0 {
		src, dst = pick(r.random, world...), pick(r.random, outside...)
	}
	sport := pick[uint16](r.random, 80, 5000, 5001, 5002, 1022, 1023, 1024, uint16(5000+r.random.IntN(64)))
	dport := pick[uint16](r.random, 53, 80, 443, 8080, 7000, 7009, 5000, 5001, uint16(5000+r.random.IntN(64)))
	switch p.protocol {
	case rulefile.ICMP:
		dport, p.query = 0, true
		if r.random.IntN(8) == 0 {
			sport, dport, p.query = 0, sport, false
		}
	case rulefile.GRE:
		sport, dport = 0, 0
	}
	p.src, p.dst = netip.AddrPortFrom(netip.MustParseAddr(src), sport), netip.AddrPortFrom(netip.MustParseAddr(dst), dport)
	p.link = r.route(p.src.Addr())
	p.inside = p.link != "out"
	return p
}

// with builds the packet, with those ends, and of an error those of the packet inside.
func (p modelPacket) with(ends, about modelEnds) pktbuild.IPv4 {
	e := p.error
	if e == nil {
		return p.ip(ends)
	}
	return pktbuild.IPv4{Src: ends.src.Addr(), Dst: ends.dst.Addr(), TTL: p.ttl, Payload: icmpError(e.kind, e.code, 0, e.about.ip(about), e.quoted, nil)}
}

// ip builds one that is no error.
func (p modelPacket) ip(ends modelEnds) pktbuild.IPv4 {
	ip := pktbuild.IPv4{Src: ends.src.Addr(), Dst: ends.dst.Addr(), TTL: p.ttl, Fragment: pktbuild.DF, ID: uint16(p.length), Protocol: uint8(p.protocol)}
	data := bytes.Repeat([]byte{0xa5, 0x5a, 0x01}, 600)
	switch p.protocol {
	case rulefile.TCP:
		var flags uint8
		for flag, on := range map[uint8]bool{pktbuild.SYN: p.syn, pktbuild.ACK: p.ack, pktbuild.FIN: p.fin, pktbuild.RST: p.rst} {
			if on {
				flags |= flag
			}
		}
		ip.Payload = pktbuild.TCP{Src: ends.src.Port(), Dst: ends.dst.Port(), Seq: 7, Ack: 9, Flags: flags, Window: 1000, Data: data[:p.length-40]}
	case rulefile.UDP:
		ip.Payload = pktbuild.UDP{Src: ends.src.Port(), Dst: ends.dst.Port(), NoChecksum: p.length%7 == 0, Data: data[:p.length-28]}
	case rulefile.UDPLite:
		ip.Payload = pktbuild.UDP{Src: ends.src.Port(), Dst: ends.dst.Port(), Lite: true, Data: data[:p.length-28]}
	case rulefile.ICMP:
		kind, id := uint8(0), ends.dst.Port()
		if p.query {
			kind, id = 8, ends.src.Port()
		}
		ip.Payload = pktbuild.Echo(kind, id, 3, data[:p.length-28])
	default:
		ip.Payload = pktbuild.Bytes(data[:p.length-20])
	}
	return ip
}

// send lets a packet in at a hook, after XDP passes it on at tc, and reports how it ended.
// What leaves must be the same packet with other ends, every byte of it.
func (r *modelRig) send(t *testing.T, p modelPacket) (modelOutcome, error) {
	t.Helper()
	way := r.ports[p.link]
	var about modelEnds
	if p.error != nil {
		about = r.wireEnds(p.error.about.modelEnds)
	}
	frame := way.arriving(p.with(r.wireEnds(p.modelEnds), about)).Bytes()
	side := abiNatSideNAT_OUTSIDE
	switch {
	case r.armed && p.link == "out":
		side = abiNatSideNAT_BOTH
	case p.inside:
		side = abiNatSideNAT_INSIDE
	}
	h := hooks[r.random.IntN(2)]
	verdict, got, reason, err := r.end(t, h, side, way, frame)
	if err == nil && reason == abiNatReasonNAT_PASS_TO_TC {
		if verdict != h.pass || !bytes.Equal(got, frame) {
			return modelOutcome{}, fmt.Errorf("XDP passes on what is not the packet (verdict %d)", verdict)
		}
		h = hooks[1]
		verdict, got, reason, err = r.end(t, h, side, way, frame)
	} else if h.name == "xdp" {
		r.onXDP++
	}
	out := modelOutcome{reason: reason}
	if err != nil {
		return out, err
	}
	if !isTranslated(out) {
		switch {
		case reason < abiNatReasonNAT_TRANSLATED_IN && (verdict != h.pass || !bytes.Equal(got, frame)):
			return out, fmt.Errorf("the stack does not get the packet as it was (%v, verdict %d)", reason, verdict)
		case verdict == h.redirect:
			return out, r.icmp(frame, got)
		case reason >= abiNatReasonNAT_DROP_MALFORMED && verdict != h.drop:
			return out, fmt.Errorf("dropped (%v), but the verdict is %d", reason, verdict)
		}
		return out, nil
	}
	if verdict != h.redirect || len(got) != len(frame) {
		return out, fmt.Errorf("translated, but the verdict is %d and the length %d of %d", verdict, len(got), len(frame))
	}
	out.ends = r.ends(p, got)
	if p.error != nil {
		out.about = r.ends(p.error.about, got[errorHeaders:])
	}
	if r.zones {
		if out.ends, err = r.whose(p, out.ends, got); err != nil {
			return out, err
		}
	}
	leaves := r.ports[r.route(out.ends.dst.Addr())]
	want := leaves.leaving(p.with(r.wireEnds(out.ends), r.wireEnds(out.about)))
	want.IP.TTL--
	frame2 := want.Bytes()
	if h.name == "tc" && bytes.Equal(got[:12], frame[:12]) {
		copy(frame2, got[:12]) // the kernel writes the MACs
	}
	if !bytes.Equal(got, frame2) {
		return out, fmt.Errorf("%s: the frame is not as it should be:\n%s", h.name, differ(got, frame2))
	}
	return out, nil
}

// errorHeaders are what is before the packet inside an error, but for an Ethernet header.
const errorHeaders = 20 + 8

// quotedMost is ICMP_QUOTED of bpf/nat/icmp.h.
const quotedMost = 548

func (r *modelRig) end(t *testing.T, h hook, side abiNatSide, way port, frame []byte) (uint32, []byte, abiNatReason, error) {
	t.Helper()
	r.flags = checksumComplete
	if len(frame) > 14+quotedMost { // to quote it in an error it is cut, for which the kernel gives up the skb's sum
		r.flags = 0
	}
	verdict, got, err := r.run(t, h, side, way, frame, 0)
	var reasons []abiNatReason
	for reason := range r.counted(t) {
		if !slices.Contains(sideCounters, reason) {
			reasons = append(reasons, reason)
		}
	}
	if err == nil && len(reasons) != 1 {
		err = fmt.Errorf("%s counted %v", h.name, reasons)
	}
	if err != nil {
		return 0, nil, 0, fmt.Errorf("%s: %w", h.name, err)
	}
	return verdict, got, reasons[0], nil
}

// ends reads where a frame comes from and goes to.
func (r *modelRig) ends(p modelPacket, frame []byte) modelEnds {
	var sport, dport uint16
	switch {
	case p.protocol.HasPorts():
		sport, dport = binary.BigEndian.Uint16(frame[34:]), binary.BigEndian.Uint16(frame[36:])
	case p.error != nil:
	case p.protocol == rulefile.ICMP && p.query:
		sport = binary.BigEndian.Uint16(frame[38:])
	case p.protocol == rulefile.ICMP:
		dport = binary.BigEndian.Uint16(frame[38:])
	}
	return modelEnds{
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(frame[26:30])), sport),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(frame[30:34])), dport),
	}
}

// icmp checks an error that answers a frame.
func (r *modelRig) icmp(frame, got []byte) error {
	const header = 14 + 20 + 8
	if len(got) < header || got[23] != pktbuild.ICMPProtocol || !bytes.Equal(got[30:34], frame[26:30]) ||
		!bytes.Equal(got[:6], frame[6:12]) || !bytes.HasPrefix(frame[14:], got[header:]) {
		return fmt.Errorf("something leaves that is no answer:\n%x", got)
	}
	want := pktbuild.IPv4{Src: netip.AddrFrom4([4]byte(got[26:30])), Dst: netip.AddrFrom4([4]byte(got[30:34])), TTL: 64, TOS: 0xc0, Payload: pktbuild.ICMP{
		Type: got[34], Code: got[35], Rest: binary.BigEndian.Uint32(got[38:]), Data: got[header:]}}
	if !bytes.Equal(got[14:], want.Bytes()) {
		return fmt.Errorf("the error is not as it should be:\n%s", differ(got[14:], want.Bytes()))
	}
	return nil
}
