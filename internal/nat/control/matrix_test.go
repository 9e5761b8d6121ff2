// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// What docs/rfc.md calls met is so for every kind of rule, at both hooks and on both engines:
// each row below goes through each check of matrixChecks.

// matrixKind is a kind of rule, with an internal host that it is for.
type matrixKind struct {
	name    string
	rules   string             // of the file
	host    netip.AddrPort     // inside; of rules without ports any
	outside netip.AddrPort     // where it is reached from outside; not valid: only by what it opens
	opens   bool               // packets of the host itself are translated
	icmp    bool               // not only UDP and TCP
	ports   rulefile.PortRange // that it is seen with; none: any
}

var matrixPorts = rulefile.PortRange{First: 40000, Last: 44095}

// portedKind is masquerade that gives some ports: in a file of its own, where it takes the place
// of masquerade with all of them, for an address gives the same ports to all.
var portedKind = matrixKind{name: "masquerade with ports", rules: "- {masquerade: 10.0.1.0/24, ports: 40000-44095}", host: end("10.0.1.2:6000"), opens: true, icmp: true, ports: matrixPorts}

var matrixKinds = []matrixKind{
	{name: "masquerade", rules: "- masquerade: 10.0.1.0/24", host: end("10.0.1.2:6000"), opens: true, icmp: true},
	{name: "snat to an address", rules: "- {snat: 10.0.2.0/24, to: 203.0.113.16}", host: end("10.0.2.2:6000"), opens: true, icmp: true},
	{name: "snat to a pool", rules: "- {snat: 10.0.3.0/24, to: several}", host: end("10.0.3.2:6000"), opens: true, icmp: true},
	{name: "snat to whole addresses", rules: "- {snat: 10.0.4.0/24, to: whole}", host: end("10.0.4.2:6000"), opens: true, icmp: true},
	{name: "snat to an address with ports", rules: "- {snat: 10.0.16.0/24, to: 203.0.113.17, ports: 40000-44095}", host: end("10.0.16.2:6000"), opens: true, icmp: true, ports: matrixPorts},
	{name: "snat to a pool with ports", rules: "- {snat: 10.0.17.0/24, to: narrow}", host: end("10.0.17.2:6000"), opens: true, icmp: true, ports: matrixPorts},
	{name: "dnat of a port", rules: "- {dnat: 'PROTOCOL 203.0.113.30:5000', to: '10.0.5.2:6000'}", host: end("10.0.5.2:6000"), outside: end("203.0.113.30:5000")},
	{name: "dnat of ports", rules: "- {dnat: 'PROTOCOL 203.0.113.31:5000-5009', to: '10.0.6.2:6000-6009'}", host: end("10.0.6.2:6003"), outside: end("203.0.113.31:5003")},
	{name: "dnat of an address", rules: "- {dnat: 203.0.113.32, to: 10.0.7.2}", host: end("10.0.7.2:6000"), outside: end("203.0.113.32:6000"), icmp: true},
	{name: "dnat of a protocol", rules: "- {dnat: PROTOCOL 203.0.113.35, to: 10.0.13.2}", host: end("10.0.13.2:6000"), outside: end("203.0.113.35:6000")},
	{name: "dnat to several hosts", rules: "- {dnat: 'PROTOCOL 203.0.113.33:5000', to: ['10.0.8.2:6000', '10.0.8.3:6000']}", host: end("10.0.8.0:6000"), outside: end("203.0.113.33:5000")},
	{name: "dnat to several hosts by weight", rules: "- {dnat: 'PROTOCOL 203.0.113.36:5000', to: ['10.0.14.2:6000', '10.0.14.3:6000'], weights: [9, 1]}", host: end("10.0.14.0:6000"), outside: end("203.0.113.36:5000")},
	{name: "dnat of the gateway's own address", rules: "- {dnat: 'PROTOCOL 203.0.113.1:5000', to: '10.0.9.2:6000'}", host: end("10.0.9.2:6000"), outside: end("203.0.113.1:5000")},
	{name: "map of a host", rules: "- map: 10.0.10.2 <-> 203.0.113.34", host: end("10.0.10.2:6000"), outside: end("203.0.113.34:6000"), opens: true, icmp: true},
	{name: "map of a network", rules: "- map: 10.0.11.0/24 <-> 198.18.11.0/24", host: end("10.0.11.2:6000"), outside: end("198.18.11.2:6000"), opens: true, icmp: true},
	{name: "stateless map", rules: "- {map: 10.0.12.0/24 <-> 198.18.12.0/24, stateless: true}", host: end("10.0.12.2:6000"), outside: end("198.18.12.2:6000"), opens: true, icmp: true},
}

// What there is of every kind of rule; a key that is new is a kind of its own, perhaps.
var matrixKeys = map[string][]string{
	"masquerade": {"Source", "Ports"},
	"snat":       {"Source", "Address", "Ports", "Pool"},
	"dnat":       {"Protocol", "Address", "Ports", "Targets", "Weights"},
	"map":        {"Inside", "Outside", "Stateless"},
	"exclude":    {"Source", "Destination", "Protocol", "Ports"}, // is not translated
}

func end(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// matrixRules is the file with all kinds, for those interfaces.
func matrixRules(inside, outside string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "inside: [%s]\noutside: [%s]", inside, outside)
	b.WriteString(`
limits: {sessions: 8192, sources: 256}
pools:
  several: {addresses: [203.0.113.20-203.0.113.21]}
  narrow: {addresses: [203.0.113.22-203.0.113.23], ports: 40000-44095}
  whole: {addresses: [203.0.113.24-203.0.113.25], ports: none}
rules:
`)
	for _, k := range matrixKinds {
		for _, protocol := range []string{"udp", "tcp"} {
			b.WriteString("  " + strings.ReplaceAll(k.rules, "PROTOCOL", protocol) + "\n")
			if !strings.Contains(k.rules, "PROTOCOL") {
				break
			}
		}
	}
	b.WriteString("  - exclude: udp any -> 198.51.100.9:7777\n")
	return b.String()
}

// No kind of rule is forgotten in matrixKinds.
func TestMatrixIsWhole(t *testing.T) {
	file, err := rulefile.Parse("matrix.yaml", []byte(matrixRules("in", "out")))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{"exclude": true}
	for i := range file.Rules {
		kind := file.Rules[i].Kind()
		seen[kind] = true
		action := reflect.TypeOf(file.Rules[i].Action)
		for n := range action.NumField() {
			if name := action.Field(n).Name; !slices.Contains(matrixKeys[kind], name) {
				t.Errorf("%s has %s, which no row of matrixKinds is about", kind, name)
			}
		}
	}
	for _, kind := range rulefile.RuleKinds() {
		if !seen[kind] || matrixKeys[kind] == nil {
			t.Errorf("no row of matrixKinds is a rule %s", kind)
		}
	}
}

// matrix is a gateway of one engine at one hook.
type matrix struct {
	*crossing
	engine Engine
	id     uint16
	port   uint16 // of the last conversation
	far    netip.AddrPort
}

const matrixMTU = 1400

// narrow gives the gateway's routes an MTU, which the engine sees where it is locked; and has the
// stack send every ICMP error.
func (m *matrix) narrow() {
	m.t.Helper()
	err := m.gateway.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/icmp_ratelimit", []byte("0"), 0); err != nil {
			return err
		}
		for name, network := range map[string]string{"in": "10.0.0.0/16", "out": "0.0.0.0/0"} {
			if name == "in" && m.oneArmed() {
				continue
			}
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			_, dst, _ := net.ParseCIDR(network)
			via := net.IPv4(10, 0, 255, 2)
			if name == "out" {
				via = net.IPv4(203, 0, 113, 254)
			}
			if err := netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Gw: via, MTU: matrixMTU, MTULock: true}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		m.t.Fatal(err)
	}
}

// oneArmed reports whether both sides are behind the same interface.
func (m *matrix) oneArmed() bool { return m.in == m.out }

// wireOf is that of the side.
func (m *matrix) wireOf(inside bool) *wire {
	if inside {
		return m.in
	}
	return m.out
}

// put sends a packet from a side, with an identification of its own if it has none.
func (m *matrix) put(inside bool, ip pktbuild.IPv4) uint16 {
	if ip.ID == 0 {
		m.id++
		ip.ID = m.id
	}
	w := m.wireOf(inside)
	w.put(m.t, w.frame(ip))
	return ip.ID
}

// await gives what arrives on a side until done says so; nil if it never does.
func (m *matrix) await(inside bool, limit time.Duration, done func(ip []byte) bool) []byte {
	w := m.wireOf(inside)
	for deadline := time.Now().Add(limit); arrives(deadline, w); {
		for b := w.take(m.t); b != nil; b = w.take(m.t) {
			if done(b) {
				return bytes.Clone(b)
			}
		}
	}
	return nil
}

const matrixPatience = 10 * time.Second

// pass sends a packet from one side and gives it as it arrives on the other.
func (m *matrix) pass(from, to bool, ip pktbuild.IPv4) ([]byte, error) {
	id := m.put(from, ip)
	b := m.await(to, matrixPatience, func(b []byte) bool { return binary.BigEndian.Uint16(b[4:]) == id })
	if b == nil {
		return nil, fmt.Errorf("%s -> %s does not arrive", ip.Src, ip.Dst)
	}
	if b[8] != ip.TTL-1 {
		return nil, fmt.Errorf("TTL %d", b[8])
	}
	return b, checkSums(b)
}

// nothing arrives of packets: those sent after them arrive alone. From XDP one packet may
// overtake others once.
func (m *matrix) nothing(from, to bool, ips ...pktbuild.IPv4) error {
	var ids []uint16
	for _, ip := range ips {
		ids = append(ids, m.put(from, ip))
	}
	var wrong error
	for range 2 {
		marker := pktbuild.IPv4{Src: netip.MustParseAddr("10.0.1.250"), Dst: m.far.Addr(), TTL: 64, Payload: pktbuild.UDP{Src: 4999, Dst: 9}}
		if from == to { // one that was hairpinned
			marker.Dst = netip.MustParseAddr("203.0.113.32")
		}
		if !from {
			marker.Src, marker.Dst = m.far.Addr(), netip.MustParseAddr("203.0.113.32")
		}
		id := m.put(from, marker)
		if m.await(to, matrixPatience, func(b []byte) bool {
			got := binary.BigEndian.Uint16(b[4:])
			if slices.Contains(ids, got) {
				wrong = fmt.Errorf("%x arrives", b)
			}
			return got == id
		}) == nil {
			return errors.New("what was sent last does not arrive")
		}
	}
	return wrong
}

// conversation is between an internal host and a remote one, which sees it by an outside
// endpoint. Of ICMP ports are the identifier.
type conversation struct {
	protocol              string
	fromInside            bool // its opener is the host
	host, outside, remote netip.AddrPort
	seq                   [2]uint32 // of the host, of the remote: TCP
}

// packet is one of the conversation, as the host sees it or as the remote does.
func (c *conversation) packet(fromHost, hostSees bool, flags uint8, data []byte) pktbuild.IPv4 {
	local := c.outside
	if hostSees {
		local = c.host
	}
	src, dst, own, other := local, c.remote, 0, 1
	if !fromHost {
		src, dst, own, other = c.remote, local, 1, 0
	}
	ip := pktbuild.IPv4{Src: src.Addr(), Dst: dst.Addr(), TTL: 64}
	switch c.protocol {
	case "tcp":
		ip.Payload = pktbuild.TCP{Src: src.Port(), Dst: dst.Port(), Seq: c.seq[own], Ack: c.seq[other], Flags: flags, Window: 60000, Data: data}
	case "udp":
		ip.Payload = pktbuild.UDP{Src: src.Port(), Dst: dst.Port(), Data: data}
	default:
		kind := uint8(0)
		if fromHost == c.fromInside {
			kind = 8
		}
		ip.Payload = pktbuild.Echo(kind, local.Port(), 1, data)
	}
	return ip
}

// learn notes what only a first packet shows, the external endpoint or which host of several has
// it, and gives the ends that one is to arrive with.
func (c *conversation) learn(fromHost bool, arrived pktEnds) pktEnds {
	switch {
	case fromHost && !c.outside.IsValid():
		c.outside = arrived.src
	case !fromHost && c.host.Addr().As4()[3] == 0:
		c.host = arrived.dst
	}
	if fromHost {
		return pktEnds{c.outside, c.remote}
	}
	return pktEnds{c.remote, c.host}
}

// say sends a packet of the conversation and checks it where it arrives.
func (m *matrix) say(c *conversation, fromHost bool, flags uint8, data string) error {
	ip := c.packet(fromHost, fromHost, flags, []byte(data))
	got, err := m.pass(fromHost, !fromHost, ip)
	if err != nil {
		return fmt.Errorf("%s from the host %t: %w", c.protocol, fromHost, err)
	}
	ends := endsOf(got)
	want := c.learn(fromHost, ends)
	if c.protocol == "icmp" {
		ends.src, ends.dst = netip.AddrPortFrom(ends.src.Addr(), 0), netip.AddrPortFrom(ends.dst.Addr(), 0)
		want.src, want.dst = netip.AddrPortFrom(want.src.Addr(), 0), netip.AddrPortFrom(want.dst.Addr(), 0)
	}
	if ends != want {
		return fmt.Errorf("%s arrives as %v, want %v", c.protocol, ends, want)
	}
	own := 0
	if !fromHost {
		own = 1
	}
	c.seq[own] += uint32(len(data))
	if flags&(pktbuild.SYN|pktbuild.FIN) != 0 {
		c.seq[own]++
	}
	return nil
}

// begin makes a conversation of a kind that nobody has had, without a packet yet.
func (m *matrix) begin(k *matrixKind, protocol string, fromInside bool) *conversation {
	m.port++
	c := &conversation{protocol: protocol, fromInside: fromInside, host: k.host, outside: k.outside, remote: netip.AddrPortFrom(m.far.Addr(), m.port), seq: [2]uint32{1000, 5000}}
	if fromInside {
		c.host = netip.AddrPortFrom(k.host.Addr(), m.port)
		if c.outside.IsValid() {
			c.outside = netip.AddrPortFrom(c.outside.Addr(), m.port)
		}
	}
	if protocol == "icmp" {
		c.host, c.remote = netip.AddrPortFrom(c.host.Addr(), m.port), netip.AddrPortFrom(c.remote.Addr(), m.port)
		if c.outside.IsValid() {
			c.outside = netip.AddrPortFrom(c.outside.Addr(), m.port)
		}
	}
	return c
}

// open makes a conversation with a packet each way; of TCP the handshake.
func (m *matrix) open(k *matrixKind, protocol string, fromInside bool) (*conversation, error) {
	c := m.begin(k, protocol, fromInside)
	const syn, ack = pktbuild.SYN, pktbuild.ACK
	err := m.say(c, fromInside, syn, "")
	if err == nil {
		err = m.say(c, !fromInside, syn|ack, "")
	}
	if err == nil && protocol == "tcp" {
		err = m.say(c, fromInside, ack, "")
	}
	return c, err
}

// opened is a conversation of each protocol that the kind has, each way it can be opened.
func (m *matrix) opened(k *matrixKind, protocols []string, use func(c *conversation) error) error {
	for _, protocol := range protocols {
		for _, fromInside := range []bool{true, false} {
			if fromInside && !k.opens || !fromInside && !k.outside.IsValid() || protocol == "icmp" && !k.icmp {
				continue
			}
			c, err := m.open(k, protocol, fromInside)
			if err == nil {
				err = use(c)
			}
			if err != nil {
				return fmt.Errorf("%s opened from inside %t: %w", protocol, fromInside, err)
			}
		}
	}
	return nil
}

var matrixProtocols = []string{"udp", "tcp", "icmp"}

// matrixChecks are what every kind of rule is asked. not is why an engine is not.
var matrixChecks = []struct {
	name string
	run  func(m *matrix, k *matrixKind) error
	not  func(e Engine, k *matrixKind) string
}{
	{"there and back", (*matrix).traffic, nil},
	{"ports", (*matrix).given, func(_ Engine, k *matrixKind) string {
		if k.ports.IsZero() {
			return "the rule gives none"
		}
		return ""
	}},
	{"ICMP errors", (*matrix).errors, nil},
	{"fragments", (*matrix).fragments, nil},
	{"fragments of the largest datagram", (*matrix).largest, nil},
	{"hairpin", (*matrix).hairpin, func(e Engine, k *matrixKind) string {
		switch {
		case e == EngineNFT && !k.outside.IsValid():
			return "the kernel has no mappings to address"
		case k.name == portedKind.name:
			return "the other end is masqueraded likewise, and is known by another port than its own"
		case e == EngineNFT && k.name == "stateless map":
			return "between a host of such a map and one of another rule the source stays as it is"
		}
		return ""
	}},
	{"TTL", (*matrix).ttl, nil},
	{"too big", (*matrix).tooBig, nil},
	{"no UDP checksum", (*matrix).noChecksum, nil},
	{"spoofed", (*matrix).spoofed, func(e Engine, _ *matrixKind) string {
		if e == EngineNFT {
			return "sources are not checked but by rp_filter"
		}
		return ""
	}},
}

// matrixRun is an engine at a hook.
type matrixRun struct {
	engine Engine
	attach Attach
}

func (r matrixRun) String() string {
	if r.engine == EngineEBPF {
		return string(r.engine) + " " + string(r.attach)
	}
	return string(r.engine)
}

var matrixRuns = []matrixRun{{EngineEBPF, AttachTC}, {EngineEBPF, AttachXDP}, {EngineNFT, AttachTC}}

func TestMatrix(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			m := &matrix{crossing: newCrossing(t, run.engine, run.attach, matrixRules("in", "out")), engine: run.engine}
			m.all(t, matrixKinds...)
		})
	}
}

func TestMatrixPorts(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	rules := strings.Replace(matrixRules("in", "out"), matrixKinds[0].rules, portedKind.rules, 1)
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			m := &matrix{crossing: newCrossing(t, run.engine, run.attach, rules), engine: run.engine}
			m.all(t, portedKind)
		})
	}
}

// Pools with blocks, plain and computed, take the place of pools without in a file of their own: the
// kernel's NAT has no blocks.
func TestMatrixBlocks(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	rules := matrixRules("in", "out")
	for _, pool := range []struct{ without, with string }{
		{"several: {addresses: [203.0.113.20-203.0.113.21]}", "several: {addresses: [203.0.113.20-203.0.113.21], blocks: {size: 512}}"},
		{"narrow: {addresses: [203.0.113.22-203.0.113.23], ports: 40000-44095}", "narrow: {addresses: [203.0.113.22-203.0.113.23], ports: 32768-49151, blocks: {size: 64, extra: 512, at_most: 2, deterministic: true}}"},
	} {
		if !strings.Contains(rules, pool.without) {
			t.Fatalf("no pool %s", pool.without)
		}
		rules = strings.Replace(rules, pool.without, pool.with, 1)
	}
	var kinds []matrixKind
	for _, k := range matrixKinds {
		switch k.name {
		case "snat to a pool":
			k.name = "snat to a pool with blocks"
		case "snat to a pool with ports":
			k.name, k.ports = "snat to a pool with computed blocks", rulefile.PortRange{First: 32768, Last: 49151}
		default:
			continue
		}
		kinds = append(kinds, k)
	}
	for _, run := range matrixRuns {
		if run.engine == EngineNFT {
			continue
		}
		t.Run(run.String(), func(t *testing.T) {
			m := &matrix{crossing: newCrossing(t, run.engine, run.attach, rules), engine: run.engine}
			m.all(t, kinds...)
		})
	}
}

// The same with everybody behind one interface, which is inside and outside.
func TestMatrixOneArmed(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			m := &matrix{crossing: newOneArmed(t, run.engine, run.attach, matrixRules("out", "out")), engine: run.engine}
			m.all(t, matrixKinds...)
		})
	}
}

// all checks of the kinds.
func (m *matrix) all(t *testing.T, kinds ...matrixKind) {
	m.port, m.far = 20000, end("198.51.100.9:0")
	m.narrow()
	t.Run("fragments/excluded by their port", func(t *testing.T) {
		m.t = t
		if err := m.excluded(); err != nil {
			t.Error(err)
		}
	})
	for _, check := range matrixChecks {
		for _, k := range kinds {
			if check.not != nil && check.not(m.engine, &k) != "" {
				continue
			}
			t.Run(check.name+"/"+k.name, func(t *testing.T) {
				m.t = t
				if err := check.run(m, &k); err != nil {
					t.Error(err)
				}
			})
		}
	}
	m.t = t
}

func (m *matrix) traffic(k *matrixKind) error {
	return m.opened(k, matrixProtocols, func(c *conversation) error {
		return errors.Join(m.say(c, true, pktbuild.ACK, "there"), m.say(c, false, pktbuild.ACK, "back"))
	})
}

// given are the ports of the rule, also by the identifier of queries, to hosts outside and inside.
func (m *matrix) given(k *matrixKind) error {
	within := func(seen netip.AddrPort) error {
		if port := seen.Port(); port < k.ports.First || port > k.ports.Last {
			return fmt.Errorf("it is seen as %v, want a port of %v", seen, k.ports)
		}
		return nil
	}
	for range 8 {
		if err := m.opened(k, matrixProtocols, func(c *conversation) error { return within(c.outside) }); err != nil {
			return err
		}
	}
	server := &inner{host: end("10.0.10.2:6000"), outside: end("203.0.113.34:6000")} // by the map of a host
	for _, protocol := range matrixProtocols {
		m.port++
		client := &inner{host: netip.AddrPortFrom(k.host.Addr(), m.port)}
		if protocol == "icmp" {
			server.host, server.outside = netip.AddrPortFrom(server.host.Addr(), m.port), netip.AddrPortFrom(server.outside.Addr(), m.port)
		}
		c := &conversation{protocol: protocol, fromInside: true, host: client.host, remote: server.outside, seq: [2]uint32{1000, 1000}}
		got, err := m.pass(true, true, c.packet(true, true, pktbuild.SYN, nil))
		if err == nil {
			err = within(endsOf(got).src)
		}
		if err != nil {
			return fmt.Errorf("%s to %v: %w", protocol, server.outside, err)
		}
	}
	return nil
}

// matrixErrors are errors and what they quote: options in the header inside are walked, a wrong checksum of the
// transport inside, which may be an earlier NAT's, is no reason to drop one.
var matrixErrors = []struct {
	kind, code uint8
	options    []byte
	wrong      bool
}{{kind: 3, code: 3}, {kind: 3, code: 1}, {kind: 11}, {kind: 3, code: 3, options: []byte{1, 1, 1, 1, 1, 1, 1, 1}}, {kind: 3, code: 3, wrong: true}}

// errors are about packets of the conversation: from a router outside to the host, and from
// the host. The conversation goes on after them.
func (m *matrix) errors(k *matrixKind) error {
	return m.opened(k, []string{"udp", "tcp"}, func(c *conversation) error {
		for _, e := range matrixErrors {
			for _, toHost := range []bool{true, false} {
				about, want := c.packet(toHost, !toHost, pktbuild.ACK, nil), c.packet(toHost, toHost, pktbuild.ACK, nil)
				about.TTL, want.TTL, about.ID, want.ID, about.Options, want.Options = 9, 9, 7, 7, e.options, e.options
				from, header := netip.MustParseAddr("192.0.2.200"), 20+len(e.options)
				quoted := about.Bytes()[:header+8]
				if e.wrong && c.protocol == "udp" {
					quoted[header+7] ^= 0x55
				}
				ip := pktbuild.IPv4{Src: from, Dst: c.outside.Addr(), TTL: 64}
				if !toHost {
					ip.Src, ip.Dst, from = c.host.Addr(), c.remote.Addr(), c.outside.Addr()
				}
				ip.Payload = pktbuild.ICMP{Type: e.kind, Code: e.code, Data: quoted}
				got, err := m.pass(!toHost, toHost, ip)
				if err != nil {
					return fmt.Errorf("an error %d/%d to the host %t, options %t, wrong checksum %t: %w", e.kind, e.code, toHost, e.options != nil, e.wrong, err)
				}
				inner := got[28:]
				same := header + 8
				if c.protocol == "udp" { // its checksum may stay as it is
					same -= 2
				}
				if !bytes.Equal(got[12:16], from.AsSlice()) || got[20] != e.kind || got[21] != e.code || !bytes.Equal(inner[:same], want.Bytes()[:same]) {
					return fmt.Errorf("an error %d/%d to the host %t arrives as %x, want %x inside", e.kind, e.code, toHost, got, want.Bytes()[:same])
				}
			}
		}
		return errors.Join(m.say(c, true, pktbuild.ACK, "there"), m.say(c, false, pktbuild.ACK, "back"))
	})
}

// orders of a datagram's four fragments.
var matrixOrders = map[string][]int{"in order": {0, 1, 2, 3}, "reversed": {3, 2, 1, 0}, "the first one last": {1, 2, 3, 0}, "the last one first": {3, 0, 1, 2}}

// datagram sends one in fragments, in that order, and gives the whole that arrives.
func (m *matrix) datagram(from, to bool, ip pktbuild.IPv4, order []int) ([]byte, error) {
	whole := ip.Bytes()[20:]
	size := (len(whole)/len(order) + 7) / 8 * 8
	m.id++
	for _, n := range order {
		p := ip
		p.ID, p.Protocol, p.Fragment = m.id, pktbuild.UDPProtocol, uint16(n*size/8)
		p.Payload = pktbuild.Bytes(whole[n*size : min((n+1)*size, len(whole))])
		if n < len(order)-1 {
			p.Fragment |= pktbuild.MF
		}
		m.put(from, p)
	}
	return m.together(from, to, m.id, len(whole))
}

// together waits for all of a datagram. Fragments from inside have one identification, which
// engine ebpf chooses (RFC 6864 section 5.3.1); those from outside the sender's.
func (m *matrix) together(from, to bool, id uint16, length int) ([]byte, error) {
	out, missing, chosen := make([]byte, 20+length), length, !from
	if m.await(to, matrixPatience, func(b []byte) bool {
		if fragment := binary.BigEndian.Uint16(b[6:])&0x3fff != 0; fragment && !chosen {
			id, chosen = binary.BigEndian.Uint16(b[4:]), true
		}
		if binary.BigEndian.Uint16(b[4:]) == id {
			copy(out, b[:20])
			missing -= copy(out[20+8*int(binary.BigEndian.Uint16(b[6:])&0x1fff):], b[20:])
		}
		return missing <= 0
	}) == nil {
		return nil, fmt.Errorf("%d bytes of the datagram are missing", missing)
	}
	binary.BigEndian.PutUint16(out[2:], uint16(len(out)))
	out[6], out[7], out[10], out[11] = 0, 0, 0, 0
	binary.BigEndian.PutUint16(out[10:], ^uint16(sumOf(0, out[:20])))
	return out, checkSums(out)
}

func matrixData(n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i * 7)
	}
	return data
}

// fragments of the datagram that opens a conversation, and of the reply.
func (m *matrix) fragments(k *matrixKind) error {
	for name, order := range matrixOrders {
		for _, fromInside := range []bool{true, false} {
			if fromInside && !k.opens || !fromInside && !k.outside.IsValid() {
				continue
			}
			c := m.begin(k, "udp", fromInside)
			if err := m.fragmented(c, order, 2992); err != nil {
				return fmt.Errorf("%s, opened from inside %t: %w", name, fromInside, err)
			}
		}
	}
	return nil
}

// excluded datagrams in fragments leave as they came, whichever fragment is first.
func (m *matrix) excluded() error {
	for name, order := range matrixOrders {
		m.port++
		c := conversation{protocol: "udp", host: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.2"), m.port), remote: end("198.51.100.9:7777")}
		got, err := m.datagram(true, false, c.packet(true, true, 0, matrixData(2992)), order)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if ends := endsOf(got); ends != (pktEnds{c.host, c.remote}) {
			return fmt.Errorf("%s: leaves as %v", name, ends)
		}
	}
	return nil
}

// largest datagram in 49 fragments, the last one first, as some hosts send it.
func (m *matrix) largest(k *matrixKind) error {
	reversed := make([]int, 49)
	for i := range reversed {
		reversed[i] = len(reversed) - 1 - i
	}
	for _, fromInside := range []bool{true, false} {
		if fromInside && !k.opens || !fromInside && !k.outside.IsValid() {
			continue
		}
		if err := m.fragmented(m.begin(k, "udp", fromInside), reversed, 65507); err != nil {
			return fmt.Errorf("opened from inside %t: %w", fromInside, err)
		}
	}
	return nil
}

func (m *matrix) fragmented(c *conversation, order []int, size int) error {
	for _, fromHost := range []bool{c.fromInside, !c.fromInside} {
		got, err := m.datagram(fromHost, !fromHost, c.packet(fromHost, fromHost, 0, matrixData(size)), order)
		if err != nil {
			return fmt.Errorf("from the host %t: %w", fromHost, err)
		}
		ends := endsOf(got)
		want := c.learn(fromHost, ends)
		if ends != want || !bytes.Equal(got[28:], matrixData(size)) {
			return fmt.Errorf("arrives as %v, want %v", ends, want)
		}
	}
	return nil
}

// hairpin is a conversation of the host with another internal one, which is masqueraded.
func (m *matrix) hairpin(k *matrixKind) error {
	for _, protocol := range matrixProtocols {
		if protocol == "icmp" && (!k.icmp || !k.outside.IsValid()) {
			continue
		}
		if err := m.between(k, protocol); err != nil {
			return fmt.Errorf("%s: %w", protocol, err)
		}
	}
	return nil
}

// inner is an internal host with the external endpoint that others know it by.
type inner struct{ host, outside netip.AddrPort }

// to sends a packet from one to the other, and checks who it seems to be from.
func (m *matrix) to(protocol string, flags uint8, a, b *inner) error {
	c := &conversation{protocol: protocol, fromInside: true, host: a.host, remote: b.outside, seq: [2]uint32{1000, 1000}}
	got, err := m.pass(true, true, c.packet(true, true, flags, nil))
	if err != nil {
		return fmt.Errorf("%v to %v: %w", a.host, b.outside, err)
	}
	ends := endsOf(got)
	if protocol == "icmp" {
		ends.dst = b.host
	}
	if b.host.Addr().As4()[3] == 0 {
		b.host = ends.dst
	}
	if m.engine == EngineNFT && !a.outside.IsValid() { // seen as what it asked for, or by masquerade
		a.outside = ends.src
	}
	if ends.src != a.outside || ends.dst != b.host || ends.src.Addr() == a.host.Addr() {
		return fmt.Errorf("%v to %v arrives as %v, want %v to %v", a.host, b.outside, ends, a.outside, b.host)
	}
	return nil
}

func (m *matrix) between(k *matrixKind, protocol string) error {
	m.port++
	client := &inner{host: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.9"), m.port), outside: netip.AddrPortFrom(crossingOut, m.port)}
	server := &inner{k.host, k.outside}
	const syn, ack = pktbuild.SYN, pktbuild.ACK
	if !k.outside.IsValid() { // both punch
		c, err := m.open(k, protocol, true)
		if err != nil {
			return err
		}
		server = &inner{c.host, c.outside}
		first := (&conversation{protocol: protocol, host: client.host, remote: server.outside}).packet(true, true, syn, nil)
		return errors.Join(m.nothing(true, true, first), m.to(protocol, syn, server, client), m.to(protocol, syn, client, server),
			m.to(protocol, syn|ack, server, client), m.to(protocol, syn|ack, client, server), m.to(protocol, ack, server, client), m.pieces(protocol, client, server))
	}
	if m.engine == EngineNFT {
		client.outside = netip.AddrPort{}
	}
	if protocol == "icmp" {
		server.outside = netip.AddrPortFrom(k.outside.Addr(), m.port)
		return m.to(protocol, 0, client, server)
	}
	return errors.Join(m.to(protocol, syn, client, server), m.to(protocol, syn|ack, server, client), m.pieces(protocol, client, server))
}

// pieces are datagrams in fragments, between the two.
func (m *matrix) pieces(protocol string, a, b *inner) error {
	if protocol != "udp" {
		return nil
	}
	for name, order := range matrixOrders {
		for _, way := range [][2]*inner{{a, b}, {b, a}} {
			from, to := way[0], way[1]
			ip := (&conversation{protocol: protocol, host: from.host, remote: to.outside}).packet(true, true, 0, matrixData(2992))
			got, err := m.datagram(true, true, ip, order)
			if err != nil {
				return fmt.Errorf("%s, %v to %v: %w", name, from.host, to.outside, err)
			}
			if ends := endsOf(got); ends != (pktEnds{from.outside, to.host}) || !bytes.Equal(got[28:], matrixData(2992)) {
				return fmt.Errorf("%s: %v to %v arrives as %v", name, from.host, to.outside, ends)
			}
		}
	}
	return nil
}

// refused reports what is wrong with the ICMP error that a packet is to be answered by. It is sent
// until one comes, for the stack sends so many a second.
func (m *matrix) refused(fromHost bool, ip pktbuild.IPv4, kind, code uint8, mtu uint16) error {
	sent := ip.Bytes()
	var b []byte
	for deadline := time.Now().Add(matrixPatience); b == nil && time.Now().Before(deadline); {
		m.put(fromHost, ip)
		b = m.await(fromHost, 200*time.Millisecond, func(b []byte) bool {
			return b[9] == pktbuild.ICMPProtocol && b[20] == kind && b[21] == code && len(b) >= 56 && bytes.Equal(b[16:20], sent[12:16])
		})
	}
	if b == nil {
		return fmt.Errorf("no ICMP error %d/%d from the host %t", kind, code, fromHost)
	}
	if got := binary.BigEndian.Uint16(b[26:]); got != mtu {
		return fmt.Errorf("MTU %d", got)
	}
	if !bytes.Equal(b[28+12:28+24], sent[12:24]) {
		return fmt.Errorf("the error is about %x, sent was %x", b[28:56], sent[:28])
	}
	return checkSums(b)
}

func (m *matrix) ttl(k *matrixKind) error {
	return m.opened(k, []string{"udp", "tcp"}, func(c *conversation) error {
		for _, fromHost := range []bool{true, false} {
			ip := c.packet(fromHost, fromHost, pktbuild.ACK, nil)
			ip.TTL = 1
			if err := m.refused(fromHost, ip, 11, 0, 0); err != nil {
				return err
			}
		}
		return nil
	})
}

func (m *matrix) tooBig(k *matrixKind) error {
	return m.opened(k, []string{"udp"}, func(c *conversation) error {
		for _, fromHost := range []bool{true, false} {
			ip := c.packet(fromHost, fromHost, 0, matrixData(1450))
			ip.Fragment = pktbuild.DF
			if err := m.refused(fromHost, ip, 3, 4, matrixMTU); err != nil {
				return err
			}
			ip.Fragment = 0
			id := m.put(fromHost, ip)
			if _, err := m.together(fromHost, !fromHost, id, 8+1450); err != nil {
				return fmt.Errorf("without DF from the host %t: %w", fromHost, err)
			}
		}
		return nil
	})
}

func (m *matrix) noChecksum(k *matrixKind) error {
	return m.opened(k, []string{"udp"}, func(c *conversation) error {
		for _, fromHost := range []bool{true, false} {
			ip := c.packet(fromHost, fromHost, 0, []byte("data"))
			udp := ip.Payload.(pktbuild.UDP)
			udp.NoChecksum = true
			ip.Payload = udp
			got, err := m.pass(fromHost, !fromHost, ip)
			if err != nil {
				return err
			}
			if got[26] != 0 || got[27] != 0 {
				return fmt.Errorf("from the host %t: checksum %x", fromHost, got[26:28])
			}
		}
		return nil
	})
}

// spoofed packets do not get through: from inside with the external address of the host, from
// outside with its internal address; where both are behind one interface nobody can tell the latter.
func (m *matrix) spoofed(k *matrixKind) error {
	return m.opened(k, []string{"udp"}, func(c *conversation) error {
		var within, outside []pktbuild.IPv4
		for _, protocol := range matrixProtocols {
			lie := *c
			lie.protocol, lie.fromInside = protocol, true
			within = append(within, lie.packet(true, false, pktbuild.SYN, nil), lie.packet(true, false, pktbuild.ACK, nil))
			stranger := conversation{protocol: protocol, outside: c.outside, remote: c.host}
			if !m.oneArmed() {
				outside = append(outside, stranger.packet(false, false, pktbuild.SYN, nil))
			}
		}
		later := pktbuild.IPv4{Src: c.outside.Addr(), Dst: c.remote.Addr(), TTL: 64, Fragment: 9, Protocol: pktbuild.UDPProtocol, Payload: pktbuild.Bytes("later")}
		about := c.packet(false, false, 0, nil).Bytes()[:28]
		lie := pktbuild.IPv4{Src: c.outside.Addr(), Dst: c.remote.Addr(), TTL: 64, Payload: pktbuild.ICMP{Type: 3, Code: 3, Data: about}}
		return errors.Join(m.nothing(true, false, append(within, later, lie)...), m.nothing(false, true, outside...))
	})
}
