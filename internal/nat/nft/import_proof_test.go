// SPDX-License-Identifier: Apache-2.0

package nft_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/kernel/ruleset"
	"natkit/internal/nat/nft"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// The proof of an import. Random rules are loaded into a kernel, and random packets sent
// through them. What the kernel does must be what the model of the rules says, and what
// the imported rule file says (rulefile.Explain, which the engines are tested against), or one
// of the rules that decided about the packet is named in a note.
//
//	              ┌── eth0 ── everything else     outside, 203.0.113.1
//	router (tun) ─┼── ppp0 ── 198.51.100.0/24     outside, 203.0.113.129
//	              ├── eth1 ── 10.1.0.0/16         inside, 10.1.0.1
//	              └── eth2 ── 10.2.0.0/16         inside, 10.2.0.1
//
// NATKIT_IMPORT_ROUNDS is how many rule sets are tried, NATKIT_IMPORT_SEED the first of
// them.

func proofRounds(t *testing.T, usual int) (first, rounds uint64) {
	rounds = uint64(usual)
	for name, to := range map[string]*uint64{"NATKIT_IMPORT_ROUNDS": &rounds, "NATKIT_IMPORT_SEED": &first} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			*to = n
		}
	}
	return first, rounds
}

var proofOptions = nft.ImportOptions{
	Name: "proof", Inside: []string{"eth1", "eth2"}, Outside: []string{"eth0", "ppp0"},
	Local: []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.129")},
}

// proofRouter is the router's surroundings, for rulefile.Explain and for the model.
type proofRouter struct{}

func (proofRouter) WayOut(_, destination netip.Addr) string {
	if (proofRouter{}).IsLocal(destination) {
		return ""
	}
	for prefix, link := range map[string]string{"10.1.0.0/16": "eth1", "10.2.0.0/16": "eth2", "198.51.100.0/24": "ppp0"} {
		if netip.MustParsePrefix(prefix).Contains(destination) {
			return link
		}
	}
	return "eth0"
}

func (proofRouter) LinkOf(a netip.Addr) string {
	for link, own := range proofAddresses {
		if a.String() == own {
			return link
		}
	}
	return ""
}

func (proofRouter) IsLocal(a netip.Addr) bool { return (proofRouter{}).LinkOf(a) != "" }

var proofAddresses = map[string]string{"eth0": "203.0.113.1", "ppp0": "203.0.113.129", "eth1": "10.1.0.1", "eth2": "10.2.0.1"}

// proofPacket is a packet that may come to the router.
func proofPacket(r *rand.Rand, n int) rulefile.Packet {
	p := rulefile.Packet{In: oneOf(r, madeLinks...), Protocol: oneOf(r, rulefile.TCP, rulefile.TCP, rulefile.UDP, rulefile.ICMP, rulefile.GRE)}
	host := func(list ...string) netip.Addr { return netip.MustParseAddr(oneOf(r, list...)) }
	inside := p.In == "eth1" || p.In == "eth2"
	switch p.In {
	case "eth1":
		p.Source = host("10.1.2.3", "10.1.2.4", "10.1.3.5", "10.1.9.9", fmt.Sprintf("10.1.%d.%d", r.IntN(4), 2+r.IntN(250)))
	case "eth2":
		p.Source = host("10.2.0.7", "10.2.5.5", "10.2.0.99")
	case "ppp0":
		p.Source = host("198.51.100.7", "198.51.100.99")
	default:
		p.Source = host("192.0.2.9", "192.0.2.77", fmt.Sprintf("192.0.%d.%d", r.IntN(200), 1+r.IntN(250)))
	}
	switch k := r.IntN(10); {
	case k < 5:
		p.Destination = host(append(slices.Clone(madePublic), "203.0.113.4", "203.0.113.7", "100.64.1.9")...)
	case k < 7 || !inside:
		p.Destination = host("10.1.2.3", "10.2.0.7", "10.1.0.1", "10.2.9.9")
	default:
		p.Destination = host(append(slices.Clone(madeRemotes), "192.0.2.10")...)
	}
	if p.Protocol.HasPorts() {
		p.SourcePort = uint16(20000 + n)
		p.DestinationPort = uint16(oneOf(r, append(slices.Clone(madePorts), 79, 444, 1003, 3000)...))
	}
	if p.Source == p.Destination { // dropped by whoever sees it
		return proofPacket(r, n)
	}
	return p
}

// result is what becomes of a packet: dropped (or the router's own), or sent on.
type result struct {
	gone     bool
	dst, src string // as text: an address, "masquerade" resolved, pools as "a-b"
	port     uint16
}

func (r result) String() string {
	if r.gone {
		return "does not leave"
	}
	return fmt.Sprintf("%s -> %s:%d", r.src, r.dst, r.port)
}

// modelled asks the model of the rules, with chance as it may fall.
type modelled struct {
	results []result
	rules   []string // that decided, or took part by accepting or returning
	unknown bool
}

func (m *modelled) add(rules ...*ruleset.Rule) {
	for _, r := range rules {
		if r != nil && !slices.Contains(m.rules, r.Where()) {
			m.rules = append(m.rules, r.Where())
		}
	}
}

func toNumber(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func toAddr(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// model evaluates a packet some times, and collects what may become of it.
func model(set *ruleset.Ruleset, p rulefile.Packet, draws int) modelled {
	var m modelled
	chance := rand.New(rand.NewPCG(7, 7))
	for k := range draws {
		used := false
		e := ruleset.Evaluator{Set: set, Kind: "nat", Draw: func(f ruleset.Field) uint32 {
			used = true
			return chance.Uint32N(f.Mod)
		}}
		for _, r := range m.once(&e, p) {
			if !slices.Contains(m.results, r) {
				m.results = append(m.results, r)
			}
		}
		if k == 0 && !used {
			break
		}
	}
	return m
}

func (m *modelled) once(e *ruleset.Evaluator, p rulefile.Packet) []result {
	router := proofRouter{}
	q := ruleset.Packet{
		In: p.In, Source: toNumber(p.Source), Destination: toNumber(p.Destination), Protocol: uint8(p.Protocol),
		SourcePort: p.SourcePort, DestinationPort: p.DestinationPort, DestinationLocal: router.IsLocal(p.Destination),
	}
	pre := e.Eval("prerouting", q)
	m.add(pre.Rule)
	m.add(pre.Asked...)
	m.unknown = m.unknown || pre.Unknown
	destinations, gone := []uint32{q.Destination}, false
	if pre.Done {
		destinations, q.DestinationPort, gone = translated(pre, q.Destination, q.DestinationPort)
	}
	var out []result
	for _, d := range destinations {
		if gone || router.IsLocal(toAddr(d)) {
			out = append(out, result{gone: true})
			continue
		}
		after := q
		after.Destination, after.Mark = d, pre.Mark
		after.Out = router.WayOut(p.Source, toAddr(d))
		post := e.Eval("postrouting", after)
		m.add(post.Rule)
		m.add(post.Asked...)
		m.unknown = m.unknown || post.Unknown
		r := result{src: p.Source.String(), dst: toAddr(d).String(), port: after.DestinationPort}
		if post.Done && post.Kind == ruleset.Translated {
			switch c := post.Choice; {
			case post.To.Kind == ruleset.Masquerade:
				r.src = proofAddresses[after.Out]
			case post.To.Kind == ruleset.Netmap:
				mask := ^uint32(0) << (32 - c.Bits)
				r.src = toAddr(c.First&mask | after.Source&^mask).String()
			case c.First == c.Last:
				r.src = toAddr(c.First).String()
			default:
				r.src = toAddr(c.First).String() + "-" + toAddr(c.Last).String()
			}
		} else if post.Done {
			r = result{gone: true}
		}
		out = append(out, r)
	}
	return out
}

// translated is where a destination may be sent.
func translated(o ruleset.Outcome, destination uint32, port uint16) (to []uint32, toPort uint16, gone bool) {
	c := o.Choice
	switch {
	case o.Kind != ruleset.Translated, o.To.Kind == ruleset.Redirect:
		return []uint32{destination}, 0, true
	case o.To.Kind == ruleset.Netmap:
		mask := ^uint32(0) << (32 - c.Bits)
		return []uint32{c.First&mask | destination&^mask}, port, false
	}
	for n := c.First; n <= c.Last; n++ {
		to = append(to, n)
	}
	if c.Ports[0] != 0 && port != 0 {
		switch {
		case c.Base != 0:
			port = c.Ports[0] + (port - c.Base)
		case port < c.Ports[0] || port > c.Ports[1]:
			port = c.Ports[0]
		}
	}
	return to, port, false
}

// explained is what the rule file makes of a packet.
func explained(i *nft.Imported, p rulefile.Packet) (m modelled, hairpin, given bool) {
	router := proofRouter{}
	var destination, source *rulefile.Rule
	from := func(r *rulefile.Rule) {
		for k := range i.File.Rules {
			if &i.File.Rules[k] == r {
				m.rules = append(m.rules, i.From[k])
			}
		}
	}
	steps := rulefile.Explain(i.File, p, router)
	for _, s := range steps {
		if !s.Applies {
			continue
		}
		from(s.Rule)
		switch s.Stage {
		case rulefile.StageExclude:
			destination, source = nil, nil
		case rulefile.StageDestination:
			destination = s.Rule
		case rulefile.StageSource:
			source = s.Rule
		}
	}
	last := steps[len(steps)-1].Why
	given = strings.Contains(last, "otherwise it is dropped")
	type end struct {
		a    netip.Addr
		port uint16
	}
	ends := []end{{p.Destination, p.DestinationPort}}
	if destination != nil {
		ends = nil
		switch a := destination.Action.(type) {
		case rulefile.DNAT:
			for _, t := range a.Targets {
				port := p.DestinationPort
				if !t.Ports.IsZero() {
					port = t.Ports.First + port - a.Ports.First
				}
				ends = append(ends, end{t.Address, port})
			}
		case rulefile.Map:
			mask := ^uint32(0) << (32 - a.Inside.Bits())
			ends = []end{{toAddr(toNumber(a.Inside.Masked().Addr()) | toNumber(p.Destination)&^mask), p.DestinationPort}}
		}
	}
	inside := func(link string) bool { return link == "eth1" || link == "eth2" }
	for _, e := range ends {
		way := router.WayOut(p.Source, e.a)
		r := result{src: p.Source.String(), dst: e.a.String(), port: e.port}
		if router.IsLocal(e.a) || destination == nil && given {
			r = result{gone: true}
		} else if source != nil {
			switch a := source.Action.(type) {
			case rulefile.Masquerade:
				r.src = proofAddresses[way]
			case rulefile.SNAT:
				r.src = a.Address.String()
				if pool := i.File.Pool(a.Pool); pool != nil {
					r.src = pool.Addresses[0].First.String() + "-" + pool.Addresses[len(pool.Addresses)-1].Last.String()
				}
			case rulefile.Map:
				mask := ^uint32(0) << (32 - a.Outside.Bits())
				r.src = toAddr(toNumber(a.Outside.Masked().Addr()) | toNumber(p.Source)&^mask).String()
			}
		}
		hairpin = hairpin || destination != nil && inside(p.In) && inside(way)
		m.results = append(m.results, r)
	}
	return m, hairpin, given
}

// sameResults compares what may become of a packet.
func sameResults(a, b []result) bool {
	in := func(list []result, r result) bool { return slices.Contains(list, r) }
	return !slices.ContainsFunc(a, func(r result) bool { return !in(b, r) }) && !slices.ContainsFunc(b, func(r result) bool { return !in(a, r) })
}

// named tells whether a note is about one of the rules, and not only about ports.
func named(i *nft.Imported, rules []string) bool {
	return slices.ContainsFunc(i.Notes, func(n nft.Note) bool {
		return n.Rule != "" && slices.Contains(rules, n.Rule) && !strings.Contains(n.Why, "chooses ports") && !strings.Contains(n.Why, "keeps its address")
	})
}

func general(i *nft.Imported, what string) bool {
	return slices.ContainsFunc(i.Notes, func(n nft.Note) bool { return n.Rule == "" && strings.Contains(n.Why, what) })
}

// compareImport names packets of which the rule file makes something else than the rules
// do, and no note says so. It gives how many were equal and how many were named.
func compareImport(t *testing.T, name string, rules []byte, packets []rulefile.Packet) (set *ruleset.Ruleset, equal, noted int) {
	t.Helper()
	imported, err := nft.Import(bytes.NewReader(rules), proofOptions)
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, rules)
	}
	if err := imported.File.Validate(); err != nil {
		t.Fatalf("%s: refused: %v\n%s\n%s", name, err, rules, imported.File.Text())
	}
	if rules[0] == '{' {
		set, err = ruleset.ReadNFTables(rules, name)
	} else {
		set, err = ruleset.ReadIPTables(rules, name)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range packets {
		want := model(set, p, 200)
		got, hairpin, given := explained(imported, p)
		switch {
		case sameResults(want.results, got.results):
			equal++
		case hairpin && general(imported, "(hairpin)"),
			given && general(imported, "is dropped"),
			named(imported, want.rules), named(imported, got.rules):
			noted++
		default:
			t.Errorf("%s: %s\nthe rules:     %v by %q\nthe rule file: %v by %q\n%s\nnotes %+v\n%s", name, p, want.results, want.rules, got.results, got.rules, rules, imported.Notes, imported.File.Text())
			return set, equal, noted
		}
	}
	return set, equal, noted
}

// Rules of iptables, by the model alone.
func TestImportProof(t *testing.T) {
	first, rounds := proofRounds(t, 400)
	equal, noted := 0, 0
	for seed := first; seed < first+rounds && !t.Failed(); seed++ {
		r := rand.New(rand.NewPCG(seed, 1))
		m := ruleMaker{Rand: r}
		rules := m.iptablesRules()
		packets := make([]rulefile.Packet, 150)
		for k := range packets {
			packets[k] = proofPacket(r, k)
		}
		_, e, n := compareImport(t, fmt.Sprintf("seed %d", seed), []byte(rules), packets)
		equal, noted = equal+e, noted+n
	}
	t.Logf("%d packets alike, %d otherwise and named", equal, noted)
	if equal < noted {
		t.Errorf("only %d packets alike, %d otherwise and named: the import is of no use", equal, noted)
	}
}

// --- the kernel ------------------------------------------------------------------------

// tunRouter is the router in a namespace of its own, whose interfaces the test reads and
// writes.
type tunRouter struct {
	ns   *netns.Handle
	tuns map[string]*os.File
}

func newTunRouter(t *testing.T) *tunRouter {
	t.Helper()
	r := &tunRouter{ns: namespace(t), tuns: map[string]*os.File{}}
	if err := r.ns.Do(func() error {
		for name, value := range map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/default/disable_ipv6": "1", "ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0", "ipv4/conf/default/send_redirects": "0", "ipv4/conf/all/send_redirects": "0"} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil && !strings.HasPrefix(name, "ipv6") {
				return err
			}
		}
		for _, name := range madeLinks {
			tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: name, TxQLen: 4096}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_ONE_QUEUE, NonPersist: true, Queues: 1}
			if err := netlink.LinkAdd(tun); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			r.tuns[name] = tun.Fds[0]
			if err := unix.SetNonblock(int(tun.Fds[0].Fd()), true); err != nil {
				return err
			}
			if err := address(name, proofAddresses[name]+"/32"); err != nil {
				return err
			}
		}
		for link, to := range map[string]string{"eth1": "10.1.0.0/16", "eth2": "10.2.0.0/16", "ppp0": "198.51.100.0/24", "eth0": "0.0.0.0/0"} {
			if err := route(link, to); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range r.tuns {
			f.Close()
		}
	})
	return r
}

// run runs a program in the router.
func (r *tunRouter) run(in string, command ...string) (out []byte, err error) {
	err = r.ns.Do(func() error {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Stdin = strings.NewReader(in)
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		out, err = cmd.Output()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", command[0], err, complaint.Bytes())
		}
		return nil
	})
	return out, err
}

// flush forgets connections.
func (r *tunRouter) flush() error {
	return r.ns.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// send gives the router a packet, and what it sends on: packets are on their way out
// before the writing ends.
func (r *tunRouter) send(p rulefile.Packet, id uint16) (result, error) {
	if _, err := unix.Write(int(r.tuns[p.In].Fd()), rawPacket(p, id)); err != nil {
		return result{}, err
	}
	found := result{gone: true}
	buffer := make([]byte, 2048)
	for _, name := range madeLinks {
		for {
			n, err := unix.Read(int(r.tuns[name].Fd()), buffer)
			if err != nil || n < 20 {
				break
			}
			b := buffer[:n]
			if b[0]>>4 != 4 || uint16(b[4])<<8|uint16(b[5]) != id || b[9] != byte(p.Protocol) {
				continue
			}
			found = result{src: netip.AddrFrom4([4]byte(b[12:16])).String(), dst: netip.AddrFrom4([4]byte(b[16:20])).String()}
			if p.Protocol.HasPorts() {
				found.port = uint16(b[22])<<8 | uint16(b[23])
			}
		}
	}
	return found, nil
}

// rawPacket is the packet's bytes, with the right checksums.
func rawPacket(p rulefile.Packet, id uint16) []byte {
	var l4 []byte
	switch p.Protocol {
	case rulefile.TCP:
		l4 = make([]byte, 20)
		l4[12], l4[13], l4[14] = 5<<4, 2, 0x20
	case rulefile.UDP:
		l4 = make([]byte, 12)
		l4[5] = 12
	case rulefile.ICMP:
		l4 = make([]byte, 12)
		l4[0], l4[4], l4[5] = 8, byte(id>>8), byte(id)
	default:
		l4 = []byte{0, 0, 8, 0, 0, 0, 0, 0}
	}
	if p.Protocol.HasPorts() {
		l4[0], l4[1], l4[2], l4[3] = byte(p.SourcePort>>8), byte(p.SourcePort), byte(p.DestinationPort>>8), byte(p.DestinationPort)
	}
	b := make([]byte, 20, 20+len(l4))
	b[0], b[2], b[3], b[4], b[5], b[8], b[9] = 0x45, 0, byte(20+len(l4)), byte(id>>8), byte(id), 64, byte(p.Protocol)
	src, dst := p.Source.As4(), p.Destination.As4()
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	put := func(at []byte, sum uint32) {
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		at[0], at[1] = byte(^sum>>8), byte(^sum)
	}
	sum := func(data []byte) (n uint32) {
		for k := 0; k+1 < len(data); k += 2 {
			n += uint32(data[k])<<8 | uint32(data[k+1])
		}
		return n
	}
	put(b[10:], sum(b))
	pseudo := sum(src[:]) + sum(dst[:]) + uint32(p.Protocol) + uint32(len(l4))
	switch p.Protocol {
	case rulefile.TCP:
		put(l4[16:], sum(l4)+pseudo)
	case rulefile.UDP:
		put(l4[6:], sum(l4)+pseudo)
	case rulefile.ICMP:
		put(l4[2:], sum(l4))
	}
	return append(b, l4...)
}

// agrees tells whether a result is one of those that may be: of a pool any address.
func agrees(may []result, r result) bool {
	return slices.ContainsFunc(may, func(m result) bool {
		if m.gone || r.gone {
			return m.gone == r.gone
		}
		src := m.src == r.src
		if first, last, pool := strings.Cut(m.src, "-"); pool && !src {
			a, s := netip.MustParseAddr(first), netip.MustParseAddr(r.src)
			src = a.Compare(s) <= 0 && s.Compare(netip.MustParseAddr(last)) <= 0
		}
		return src && m.dst == r.dst && m.port == r.port
	})
}

// The kernel does what the model says, and the rule file what the kernel does.
func TestImportProofKernel(t *testing.T) {
	ktest.Root(t)
	nftTool := ktest.Tool(t, "nft")
	restore := ktest.Tool(t, "iptables-nft-restore") // and iptables-nft-save
	first, rounds := proofRounds(t, 30)
	router := newTunRouter(t)
	sent, equal, noted, left := 0, 0, 0, 0
	for seed := first; seed < first+rounds && !t.Failed(); seed++ {
		r := rand.New(rand.NewPCG(seed, 2))
		m := ruleMaker{Rand: r}
		must := func(out []byte, err error) []byte {
			t.Helper()
			if err != nil {
				t.Fatalf("seed %d: %v\n%s", seed, err, m.b.String())
			}
			return out
		}
		var rules []byte
		if seed%2 == 0 {
			text := m.iptablesRules()
			must(router.run("", nftTool, "flush", "ruleset"))
			must(router.run(text, restore))
			rules = must(router.run("", "iptables-nft-save", "-t", "nat"))
		} else {
			text := m.nftRules()
			must(router.run("", nftTool, "flush", "ruleset"))
			must(router.run(text, nftTool, "-f", "-"))
			rules = must(router.run("", nftTool, "-j", "list", "ruleset"))
		}
		if err := router.flush(); err != nil {
			t.Fatal(err)
		}
		packets := make([]rulefile.Packet, 100)
		for k := range packets {
			packets[k] = proofPacket(r, k)
		}
		name := fmt.Sprintf("seed %d", seed)
		set, e, n := compareImport(t, name, rules, packets)
		equal, noted = equal+e, noted+n
		seen := map[rulefile.Packet]bool{}
		for k, p := range packets {
			flow := p
			flow.In = ""
			if !p.Protocol.HasPorts() && seen[flow] { // of a connection that there is
				continue
			}
			seen[flow] = true
			want := model(set, p, 200)
			if want.unknown {
				continue
			}
			got, err := router.send(p, uint16(1000+k))
			if err != nil {
				t.Fatal(err)
			}
			sent++
			if !got.gone {
				left++
			}
			if !agrees(want.results, got) && !clashes(p) {
				t.Errorf("%s: %s\nthe kernel: %v\nthe model:  %v by %q\n%s\n%s", name, p, got, want.results, want.rules, m.b.String(), rules)
				break
			}
		}
	}
	t.Logf("%d packets sent, %d of them left the router; %d alike in the rule file, %d otherwise and named", sent, left, equal, noted)
	if left*3 < sent {
		t.Errorf("of %d packets only %d left the router", sent, left)
	}
}

// clashes: of protocols without ports two connections may want the same addresses, and the
// second gets nothing.
func clashes(p rulefile.Packet) bool { return p.Protocol == rulefile.GRE }
