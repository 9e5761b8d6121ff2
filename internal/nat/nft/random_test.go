// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/pktbuild"
)

// Random packets through the kernel with random rule files: each comes out as Explain reports,
// and its reply comes back. Of what the kernel chooses, a port of a range or an address of a
// pool, it is one of those allowed. NATKIT_PACKETS is how many, NATKIT_SEED the first file's seed.
//
// An ICMP error about it comes back, too. What docs/rules.md lists as a difference of engine nft is
// known by outcome.exempt, by hidden and by stateless.
func TestRandomPackets(t *testing.T) {
	b := newBench(t)
	met := map[string]int{}
	for sent, seed := 0, uint64(setting(t, "NATKIT_SEED", 1)); sent < setting(t, "NATKIT_PACKETS", 2000); seed++ {
		rng := rand.New(rand.NewPCG(seed, 11))
		f := randomRules(rng)
		r, _, err := nft.CompileRules(f, nft.Facts{TimeoutPolicies: true, Labels: true})
		if err == nil {
			err = r.Apply(b.router.ns)
		}
		if err == nil {
			err = b.router.ns.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		}
		if err != nil {
			t.Fatalf("NATKIT_SEED=%d: %v\n%s", seed, err, f.Text())
		}
		for n := range uint16(40) {
			from, p := randomPacket(rng, f, n)
			o := explained(f, from, p)
			if !o.exempt {
				b.expect(t, f, from, p, o)
				sent++
				met[o.kind()]++
			}
			if t.Failed() {
				t.Fatalf("NATKIT_SEED=%d, packet %d from %s: %s\n%s%s", seed, n, from, p, o.told(), f.Text())
			}
		}
	}
	t.Logf("%v", met)
	for _, kind := range []string{"source", "destination", "both", "none", "dropped", "stateless"} {
		if met[kind] < 10 {
			t.Errorf("only %d packets of the kind: %s", met[kind], kind)
		}
	}
}

func setting(t *testing.T, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	var n int
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

func oneOf[T any](rng *rand.Rand, of ...T) T { return of[rng.IntN(len(of))] }

// few are addresses of which rules and packets often have the same.
func few(rng *rand.Rand, net byte) netip.Addr {
	return netip.AddrFrom4([4]byte{net, 0, 0, byte(1 + rng.IntN(8))})
}

func somePorts(rng *rand.Rand) rulefile.PortRange {
	first := uint16(79 + rng.IntN(4))
	return ports(first, first+uint16(oneOf(rng, 0, 0, 1, 4)))
}

// randomRules are rules about few addresses. eth2 and eth3 do not exist: rules bound to them are for
// no packet. What would tie is left out. Where eth0 is on both sides, hosts of 11.0.0.0/8 are behind it.
func randomRules(rng *rand.Rand) *rulefile.File {
	f := file(nil)
	switch rng.IntN(6) {
	case 0, 1, 2:
		f.Inside, f.Outside = []string{"eth1", "eth2"}, []string{"eth0", "eth3"}
	case 3:
		f.Inside, f.Outside = []string{"eth1", "eth0"}, oneOf(rng, []string{"eth0"}, []string{"eth0", "eth3"}, []string{"eth3", "eth0"})
	case 4:
		f.Inside = f.Outside
	}
	f.Pools = []rulefile.Pool{
		{Name: "one", Addresses: []rulefile.AddressRange{addresses("100.65.0.0/30")}},
		{Name: "ports", Addresses: []rulefile.AddressRange{addresses("100.66.0.0/32"), addresses("100.66.0.2-100.66.0.4")}, Ports: ports(2000, 2099)},
		{Name: "whole", Addresses: []rulefile.AddressRange{addresses("100.67.0.0/31")}, OneToOne: true},
	}
	for range 1 + rng.IntN(10) {
		f.Rules = append(f.Rules, randomRule(rng, f))
		f.Rules[len(f.Rules)-1].Position.Line = len(f.Rules)
		if f.Validate() != nil || isRefused(f) {
			f.Rules = f.Rules[:len(f.Rules)-1]
		}
	}
	return f
}

// isRefused reports whether two stateless maps are told apart by their interfaces only.
func isRefused(f *rulefile.File) bool {
	_, _, err := nft.CompileRules(f, nft.Facts{})
	return err != nil
}

func randomRule(rng *rand.Rand, f *rulefile.File) (r rulefile.Rule) {
	link := func(names []string) string { return oneOf(rng, "", "", oneOf(rng, names...)) }
	net := func(n byte) netip.Prefix { return netip.PrefixFrom(few(rng, n), 27+rng.IntN(6)).Masked() }
	inside, wide := byte(10), rulefile.Everywhere
	if len(f.OneArmed()) > 0 {
		inside, wide = oneOf[byte](rng, 10, 11, 11), prefix("11.0.0.0/8")
	}
	source := oneOf(rng, net(inside), net(inside), net(inside), prefix("10.0.0.0/8"), wide)
	r.In, r.Out = link(f.Inside), link(f.Outside)
	switch rng.IntN(8) {
	case 0:
		r.Action = rulefile.Masquerade{Source: source, Ports: oneOf(rng, rulefile.PortRange{}, ports(3000, 3099))}
		r.Out = oneOf(rng, r.Out, r.Out, f.Inside[0])
	case 1:
		r.Action = rulefile.SNAT{Source: source, Pool: oneOf(rng, f.Pools...).Name}
	case 2:
		r.Action = rulefile.SNAT{Source: source, Address: few(rng, 101), Ports: oneOf(rng, rulefile.PortRange{}, ports(4000, 4099))}
		r.Out = oneOf(rng, r.Out, r.Out, f.Inside[0])
	case 3, 4:
		m := rulefile.Map{Inside: net(inside), Stateless: rng.IntN(2) == 0}
		m.Outside = netip.PrefixFrom(few(rng, 100), m.Inside.Bits()).Masked()
		if rng.IntN(8) == 0 {
			m.Outside = m.Inside
		}
		r.Action = m
	case 5:
		a := rulefile.Exclude{Source: source, Destination: oneOf(rng, net(100), net(inside), prefix("198.51.100.0/28"))}
		if a.Protocol = oneOf(rng, rulefile.AnyProtocol, rulefile.TCP, rulefile.UDP); a.Protocol != rulefile.AnyProtocol && rng.IntN(2) == 0 {
			a.Ports = somePorts(rng)
		}
		r = rulefile.Rule{Action: a}
	default:
		a := rulefile.DNAT{Protocol: oneOf(rng, rulefile.TCP, rulefile.UDP), Address: oneOf(rng, few(rng, 100), few(rng, 100), addr(routerOutside)), Ports: somePorts(rng)}
		if rng.IntN(3) == 0 {
			a.Protocol, a.Ports = oneOf(rng, a.Protocol, rulefile.AnyProtocol), rulefile.PortRange{}
		}
		toInside := rng.IntN(4) > 0 // all targets: Explain follows the route of the first
		for n := range oneOf(rng, byte(1), 1, 2, 3) {
			to := rulefile.Target{Address: netip.AddrFrom4([4]byte{198, 51, 100, 50 + n})}
			if toInside {
				to.Address = few(rng, inside)
			}
			if !a.Ports.IsZero() && rng.IntN(2) == 0 {
				to.Ports = ports(a.Ports.First+8000, a.Ports.Last+8000)
			}
			a.Targets = append(a.Targets, to)
			a.Weights = append(a.Weights, oneOf(rng, 1, 1, 20))
		}
		if len(a.Targets) == 1 || rng.IntN(2) == 0 {
			a.Weights = nil
		}
		r.Action, r.In, r.Out = a, link(slices.Concat(f.Inside, f.Outside)), ""
	}
	return r
}

// randomPacket is the n-th of a file. Each has a port of its own, and one without ports comes first,
// so none belongs to the session of another.
func randomPacket(rng *rand.Rand, f *rulefile.File, n uint16) (from string, p packet) {
	from, p.protocol = oneOf(rng, "in", "out"), oneOf(rng, "udp", "udp", "tcp", "tcp", "icmp")
	inside := byte(10)
	if len(f.OneArmed()) > 0 {
		inside = oneOf[byte](rng, 10, 11)
	}
	src, dst := few(rng, 10), oneOf(rng, few(rng, 100), few(rng, 100), few(rng, 101), few(rng, inside), addr(routerOutside), addr("198.51.100.9"), addr("198.51.100.77"), addr("100.66.0.2"))
	if from == "out" {
		src = netip.AddrFrom4([4]byte{198, 51, 100, byte(100 + rng.IntN(20))})
		if inside == 11 {
			src = few(rng, 11)
		}
	}
	own, asked := 20000+n, uint16(78+rng.IntN(11))
	switch {
	case n == 0:
		p.protocol, own, asked = "99", 0, 0
	case p.protocol == "icmp":
		asked = own
	}
	p.src, p.dst = netip.AddrPortFrom(src, own), netip.AddrPortFrom(dst, asked)
	return from, p
}

// routes are those of the bench.
type routes struct{}

func (routes) Egress(_, to netip.Addr) string {
	if prefix("10.0.0.0/8").Contains(to) {
		return "eth1"
	}
	return "eth0"
}

func (routes) LinkOf(a netip.Addr) string {
	switch a {
	case addr(routerOutside):
		return "eth0"
	case addr(routerInside):
		return "eth1"
	}
	return ""
}

func (routes) IsLocal(a netip.Addr) bool { return routes{}.LinkOf(a) != "" }

// outcome is what may become of a packet.
type outcome struct {
	steps               []rulefile.Step
	source, destination *rulefile.Rule
	stateless           bool // rewritten without a session
	dropped             bool
	exempt              bool // engine nft differs by design
	src                 []rulefile.AddressRange
	srcPorts            rulefile.PortRange
	dst                 []netip.AddrPort
}

func (o outcome) kind() string {
	switch {
	case o.dropped:
		return "dropped"
	case o.stateless:
		return "stateless"
	case o.source != nil && o.destination != nil:
		return "both"
	case o.source != nil:
		return "source"
	case o.destination != nil:
		return "destination"
	}
	return "none"
}

// moves reports whether a rule gives another destination.
func (o outcome) moves() bool {
	if o.destination == nil {
		return false
	}
	m, ok := o.destination.Action.(rulefile.Map)
	return !ok || !m.IsIdentity()
}

func (o outcome) told() string {
	var b strings.Builder
	for _, s := range o.steps {
		fmt.Fprintf(&b, "%s: applies %t, %s: %s\n", s.Stage, s.Applies, s.Text, s.Why)
	}
	return b.String()
}

// protocols of packets as rules name them.
var protocols = map[string]rulefile.Protocol{"udp": rulefile.UDP, "tcp": rulefile.TCP, "icmp": rulefile.ICMP, "99": 99}

// explained asks Explain, and makes of the rules that it names what they allow.
func explained(f *rulefile.File, from string, p packet) outcome {
	asked := rulefile.Packet{In: map[string]string{"in": "eth1", "out": "eth0"}[from], Protocol: protocols[p.protocol],
		Source: p.src.Addr(), Destination: p.dst.Addr(), SourcePort: p.src.Port()}
	if asked.Protocol.HasPorts() {
		asked.DestinationPort = p.dst.Port()
	}
	o := outcome{dst: []netip.AddrPort{p.dst}}
	o.src, o.srcPorts = single(asked.Source), rulefile.PortRange{First: p.src.Port(), Last: p.src.Port()}
	maps := statelessOf(f)
	if maps.rewrite(&o, asked) {
		return o
	}
	o.steps = rulefile.Explain(maps.sessions(asked), asked, routes{})
	for _, s := range o.steps {
		switch {
		case s.Stage == rulefile.StageDestination && s.Applies:
			o.destination = s.Rule
		case s.Stage == rulefile.StageSource && s.Applies:
			o.source = s.Rule
		case s.Stage == rulefile.StageResult || s.Stage == rulefile.StagePacket:
			o.dropped = strings.HasSuffix(s.Why, "dropped")
		}
	}
	if o.destination != nil {
		o.dst = destined(o.destination, p.dst)
	} else if (routes{}).IsLocal(asked.Destination) {
		o.exempt = true // the gateway's own stack has it
	}
	out := (routes{}).Egress(asked.Source, o.dst[0].Addr())
	hairpin := isInside(f, asked.In, asked.Source) && isInside(f, out, o.dst[0].Addr()) && o.moves()
	if o.source != nil {
		o.hidden(f, asked, out, hairpin)
	}
	// By design: passed on, as what goes to an interface that is not the file's.
	o.exempt = o.exempt || asked.Source == asked.Destination || !f.IsInside(out) && !f.IsOutside(out)
	// By design: the rules of the first outside interface.
	o.exempt = o.exempt || hairpin && f.Outside[0] != "eth0" && slices.ContainsFunc(f.Rules, func(r rulefile.Rule) bool { return f.IsOutside(r.Out) })
	return o
}

// isInside reports whether an address behind an interface is an internal host's.
func isInside(f *rulefile.File, link string, a netip.Addr) bool {
	if !f.IsOneArmed(link) {
		return f.IsInside(link)
	}
	return slices.ContainsFunc(f.InsideHosts(), func(p netip.Prefix) bool { return p.Contains(a) })
}

func single(a netip.Addr) []rulefile.AddressRange {
	return []rulefile.AddressRange{{First: a, Last: a}}
}

// destined are the endpoints that a rule may send to.
func destined(r *rulefile.Rule, dst netip.AddrPort) (to []netip.AddrPort) {
	if m, ok := r.Action.(rulefile.Map); ok {
		return []netip.AddrPort{netip.AddrPortFrom(atSamePlace(dst.Addr(), m.Outside, m.Inside), dst.Port())}
	}
	a := r.Action.(rulefile.DNAT)
	for _, t := range a.Targets {
		port := dst.Port()
		if !t.Ports.IsZero() {
			port = port - a.Ports.First + t.Ports.First
		}
		to = append(to, netip.AddrPortFrom(t.Address, port))
	}
	return to
}

// atSamePlace is the address of one prefix that is where another is in its own.
func atSamePlace(a netip.Addr, from, to netip.Prefix) netip.Addr {
	in, out := rulefile.RangeOf(from), rulefile.RangeOf(to)
	for i := range in.Count() {
		if in.At(i) == a {
			return out.At(i)
		}
	}
	panic(fmt.Sprintf("%s is not of %s", a, from))
}

// hidden is the source that a rule gives.
func (o *outcome) hidden(f *rulefile.File, p rulefile.Packet, out string, hairpin bool) {
	var given rulefile.PortRange
	switch a := o.source.Action.(type) {
	case rulefile.Masquerade:
		given, o.src = a.Ports, single(addr(routerOutside))
		if out == "eth1" {
			o.src = single(addr(routerInside))
		}
		if hairpin {
			o.src = single(p.Destination) // by design: the address that it asked for
		}
	case rulefile.SNAT:
		given, o.src = a.Ports, single(a.Address)
		if pool := f.Pool(a.Pool); pool != nil {
			given, o.src = pool.Ports, pool.Addresses
			if pool.OneToOne {
				given = rulefile.PortRange{}
			}
		}
	case rulefile.Map:
		o.src = single(atSamePlace(p.Source, a.Inside, a.Outside))
	}
	if !given.IsZero() && o.srcPorts.First != 0 {
		o.srcPorts = given
	}
}

// expect sends a packet and checks what comes out where, and that a reply and an ICMP error come back.
func (b *bench) expect(t *testing.T, f *rulefile.File, from string, p packet, o outcome) {
	t.Helper()
	hosts := map[string]*host{"in": b.inside, "out": b.outside}
	hosts[from].sends(t, p)
	came := b.until(t, from)
	if o.dropped {
		if len(came) > 0 {
			t.Errorf("came out as %v, wanted it dropped", came)
		}
		return
	}
	if len(came) != 1 {
		t.Errorf("came out as %v, wanted one packet: %v port %v > %v", came, o.src, o.srcPorts, o.dst)
		return
	}
	at := strings.Fields(came[0])[0]
	got := parsePacket(strings.TrimPrefix(came[0], at+" "))
	side := map[string]string{"eth1": "in", "eth0": "out"}[routes{}.Egress(got.src.Addr(), got.dst.Addr())]
	if at != side || !o.allows(got) {
		t.Errorf("came out at %s as %s, wanted at %s: %v port %v > %v", at, got, side, o.src, o.srcPorts, o.dst)
		return
	}
	if !repliesReturn(f, o, at, p, got) {
		return
	}
	hosts[at].sends(t, got.answer())
	if back, want := b.until(t, at), from+" "+p.answer().String(); !slices.Equal(back, []string{want}) {
		t.Errorf("came out at %s as %s, its reply came back as %v, want %q", at, got, back, want)
	}
	b.expectError(t, from, at, p, got, o)
}

// repliesReturn reports whether the reply to a packet that came out at a side is translated back. It is
// unless a stateless map rewrites it that has not rewritten the packet, or none does that has.
func repliesReturn(f *rulefile.File, o outcome, at string, p, got packet) bool {
	reply, want := got, p.answer()
	reply.src, reply.dst = got.dst, got.src
	back := explained(f, at, reply)
	if !o.stateless {
		return !back.stateless
	}
	return back.stateless && slices.Equal(back.dst, []netip.AddrPort{want.dst}) && slices.Equal(back.src, single(want.src.Addr()))
}

// expectError sends an ICMP error about a packet that came out, from its receiver or from a router
// before that, and checks that its sender gets it as being about what it sent. Where the destination was
// translated, the error is from the address that was asked for.
func (b *bench) expectError(t *testing.T, from, at string, p, got packet, o outcome) {
	t.Helper()
	sender := got.dst.Addr()
	if p.src.Port()%2 == 0 {
		sender = map[string]netip.Addr{"in": addr("10.99.0.1"), "out": addr("192.0.2.1")}[at]
	}
	as := sender
	if o.moves() || o.stateless && o.destination != nil || sender == got.dst.Addr() {
		as = p.dst.Addr()
	}
	packet := func(src, dst netip.Addr, about packet) []byte {
		quoted := about.bytes()
		quoted = quoted[:min(len(quoted), 28+int(p.src.Port()%3)*8)]
		return pktbuild.IPv4{Src: src, Dst: dst, TTL: 64, Payload: pktbuild.ICMP{Type: 3, Code: errorCode, Data: quoted}}.Bytes()
	}
	h := map[string]*host{"in": b.inside, "out": b.outside}[at]
	if err := unix.Sendto(h.send, packet(sender, got.src.Addr(), got), 0, &unix.SockaddrInet4{Addr: got.src.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	if back, want := b.until(t, at), from+" "+errorText(packet(as, p.src.Addr(), p)); !slices.Equal(back, []string{want}) {
		t.Errorf("came out at %s as %s, an ICMP error of %s about it came back as\n%s\nwant\n%s", at, got, sender, strings.Join(back, "\n"), want)
	}
}

func (o outcome) allows(p packet) bool {
	to := func(dst netip.AddrPort) bool {
		return dst == p.dst || p.protocol == "icmp" && dst.Addr() == p.dst.Addr() // both ports are the identifier
	}
	return slices.ContainsFunc(o.dst, to) && p.src.Port() >= o.srcPorts.First && p.src.Port() <= o.srcPorts.Last &&
		slices.ContainsFunc(o.src, func(r rulefile.AddressRange) bool { return r.Contains(p.src.Addr()) })
}

// until is what arrives, with its side, before the marker that is sent behind it.
func (b *bench) until(t *testing.T, from string) (came []string) {
	t.Helper()
	sender, other, far, m := b.inside, b.outside, "out", marker
	if from == "out" {
		// Not the answer to the other marker, of whose connection a rule for any source makes another.
		m.src, m.dst = netip.MustParseAddrPort("172.31.1.2:0"), netip.MustParseAddrPort("172.31.0.2:0")
		sender, other, far = b.outside, b.inside, "in"
	}
	sender.sends(t, m)
	for {
		got := other.arrives(t, 0)
		if got == "" {
			t.Fatal("the marker does not arrive")
		}
		if strings.HasPrefix(got, m.protocol+" ") {
			break
		}
		came = append(came, far+" "+got)
	}
	for {
		got := sender.arrives(t, unix.MSG_DONTWAIT)
		if got == "" {
			return came
		}
		came = append(came, from+" "+got)
	}
}

// Where the outside interface is on both sides, what an internal host sends by a destination rule to a
// host outside is no hairpin. (Two outside interfaces, of which the other is the first.)
func TestOneArmedToOutside(t *testing.T) {
	b := newBench(t)
	f := file(rules(
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("198.51.100.9")}},
		rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(81, 81), Targets: []rulefile.Target{target("11.2.0.1")}},
		rulefile.Masquerade{Source: prefix("11.0.0.0/8")},
		rulefile.SNAT{Source: prefix("11.1.0.0/16"), Address: addr("100.64.0.2")},
	))
	f.Inside, f.Outside = []string{"eth1", "eth0"}, []string{"eth3", "eth0"}
	f.Rules[3].Out = "eth0"
	if err := compile(t, f).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	for _, c := range []crossing{
		{"out", "tcp 11.2.0.9:4000 > 100.64.0.1:80", "out", "tcp 203.0.113.1:4000 > 198.51.100.9:80"},
		{"out", "tcp 11.1.0.9:4000 > 100.64.0.1:80", "out", "tcp 100.64.0.2:4000 > 198.51.100.9:80"},
		{"out", "tcp 11.2.0.9:4001 > 100.64.0.1:81", "out", "tcp 100.64.0.1:4001 > 11.2.0.1:81"},
	} {
		b.cross(t, c)
	}
}

// Between internal hosts nothing is translated, also where one keeps its address by a stateless map.
func TestStatelessAmongInside(t *testing.T) {
	b := newBench(t)
	f := file(rules(
		rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("10.1.0.0/24"), Stateless: true},
		rulefile.Map{Inside: prefix("10.2.0.0/24"), Outside: prefix("100.64.2.0/24"), Stateless: true},
	))
	if err := compile(t, f).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	for _, c := range []crossing{
		{"in", "udp 10.1.0.1:4000 > 10.2.0.1:53", "in", "udp 10.1.0.1:4000 > 10.2.0.1:53"},
		{"in", "udp 10.2.0.2:4000 > 10.1.0.2:53", "in", "udp 10.2.0.2:4000 > 10.1.0.2:53"},
		{"in", "udp 10.1.0.1:4000 > 198.51.100.9:53", "out", "udp 10.1.0.1:4000 > 198.51.100.9:53"},
		{"out", "udp 198.51.100.9:4001 > 10.1.0.1:53", "in", "udp 198.51.100.9:4001 > 10.1.0.1:53"},
	} {
		b.cross(t, c)
	}
}

// An ICMP error about a packet between internal hosts, which is not translated, is not either, though
// the router that sends it has an address of the outside.
func TestOneArmedErrorAmongInside(t *testing.T) {
	b := newBench(t)
	f := file(rules(rulefile.Map{Inside: prefix("11.0.0.0/28"), Outside: prefix("100.0.0.0/28"), Stateless: true}))
	f.Inside = f.Outside
	if err := compile(t, f).Apply(b.router.ns); err != nil {
		t.Fatal(err)
	}
	p := parsePacket("udp 11.0.0.3:4000 > 11.0.0.8:53")
	b.expect(t, f, "out", p, explained(f, "out", p))
}

// What random packets have found.
func TestFoundByRandomPackets(t *testing.T) {
	stateless := rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.1.0/24"), Stateless: true}
	pool := func(f *rulefile.File) {
		f.Pools = []rulefile.Pool{{Name: "p", Addresses: []rulefile.AddressRange{addresses("100.64.9.0/30")}}}
	}
	bound := rules(stateless, rulefile.Map{Inside: prefix("10.1.0.0/24"), Outside: prefix("100.64.2.0/24")})
	bound[1].Out = "eth0"
	mixed := rules(rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 89),
		Targets: []rulefile.Target{target("10.0.0.1", 8080, 8089), target("10.0.0.1")}})
	clients := []crossing{}
	for n := range 16 {
		clients = append(clients, crossing{"out", fmt.Sprintf("tcp 198.51.100.%d:4000 > 100.64.0.1:85", n), "in", fmt.Sprintf("tcp 198.51.100.%d:4000 > 10.0.0.1:*85", n)})
	}
	for name, test := range map[string]struct {
		file      *rulefile.File
		crossings []crossing
	}{
		"one target with other ports": {file(mixed), clients},
		"stateless to an address of a pool": {file(rules(stateless, rulefile.SNAT{Source: prefix("10.2.0.0/24"), Pool: "p"}), pool), []crossing{
			{"in", "udp 10.1.0.1:5000 > 100.64.9.1:53", "", ""},
			{"in", "udp 10.1.0.1:5000 > 198.51.100.9:53", "out", "udp 100.64.1.1:5000 > 198.51.100.9:53"},
		}},
		"stateless beside an equal map that is bound": {file(bound), []crossing{
			{"in", "udp 10.1.0.1:5000 > 198.51.100.9:53", "out", "udp 100.64.2.1:5000 > 198.51.100.9:53"},
			{"out", "udp 198.51.100.9:4000 > 100.64.1.1:53", "in", "udp 198.51.100.9:4000 > 10.1.0.1:53"},
			{"out", "udp 198.51.100.9:4001 > 100.64.2.1:53", "in", "udp 198.51.100.9:4001 > 10.1.0.1:53"},
		}},
		"stateless with sessions within a wider one": {file(rules(stateless,
			rulefile.Map{Inside: prefix("10.1.0.2/31"), Outside: prefix("100.64.2.2/31"), Stateless: true},
			rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.1.0.2")}},
			rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.2.3"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.0.0.9")}},
		)), []crossing{
			{"in", "udp 10.1.0.2:5000 > 198.51.100.9:53", "out", "udp 100.64.2.2:5000 > 198.51.100.9:53"},
			{"in", "udp 10.1.0.3:5000 > 198.51.100.9:53", "out", "udp 100.64.2.3:5000 > 198.51.100.9:53"},
			{"in", "udp 10.1.0.4:5000 > 198.51.100.9:53", "out", "udp 100.64.1.4:5000 > 198.51.100.9:53"},
		}},
		"stateless with sessions for a host of another one": {file(rules(
			rulefile.DNAT{Protocol: rulefile.TCP, Address: addr("100.64.0.1"), Ports: ports(80, 80), Targets: []rulefile.Target{target("10.1.0.2")}},
			rulefile.Map{Inside: prefix("10.1.0.2/31"), Outside: prefix("100.64.2.2/31"), Stateless: true},
			rulefile.Map{Inside: prefix("10.5.0.0/24"), Outside: prefix("100.64.2.0/24"), Stateless: true},
			rulefile.Map{Inside: prefix("10.5.0.0/16"), Outside: prefix("100.70.0.0/16"), Stateless: true},
		)), []crossing{
			{"in", "udp 10.5.0.2:5000 > 198.51.100.9:53", "out", "udp 100.64.2.2:5000 > 198.51.100.9:53"},
			{"in", "udp 10.5.0.9:5000 > 198.51.100.9:53", "out", "udp 100.64.2.9:5000 > 198.51.100.9:53"},
			{"in", "udp 10.5.1.2:5000 > 198.51.100.9:53", "out", "udp 100.70.1.2:5000 > 198.51.100.9:53"},
		}},
		"stateless as it is, within a wider one": {file(rules(stateless,
			rulefile.Map{Inside: prefix("10.1.0.5/32"), Outside: prefix("10.1.0.5/32"), Stateless: true},
		)), []crossing{
			{"in", "udp 10.1.0.5:5000 > 198.51.100.9:53", "out", "udp 10.1.0.5:5000 > 198.51.100.9:53"},
			{"in", "udp 10.1.0.6:5000 > 198.51.100.9:53", "out", "udp 100.64.1.6:5000 > 198.51.100.9:53"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			if err := compile(t, test.file).Apply(b.router.ns); err != nil {
				t.Fatal(err)
			}
			for _, c := range test.crossings {
				b.cross(t, c)
			}
		})
	}
}
