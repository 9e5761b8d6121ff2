// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

const zoneRules = `
subscribers: {by: [interface, address], classes: {default: {ports: 40}}}
pools:
  cgn: {addresses: [203.0.113.16], blocks: {size: 64, at_most: 1}}
rules:
  - {snat: any, to: cgn, filtering: endpoint-independent}
  - {dnat: "udp 203.0.113.1:53", to: "192.168.2.2:5353", out: in2}
  - {dnat: "udp 203.0.113.1:54", to: "192.168.2.2:5353", out: in}
`

var zoneNames = map[int]string{3: "in", 7: "in2", 5: "out"}

// aZonedFile has the rig use a rule file, and nobody know a session.
func aZonedFile(t *testing.T, text string) *modelRig {
	t.Helper()
	r := aZoneRig(t)
	r.seed(3)
	f := parseFile(t, text)
	r.forget(t, f)
	r.model = newModel(f, r.known, r.route)
	r.passed = now()
	r.engine.NameZones(zoneNames)
	r.confirm(t)
	return r
}

// both are the addresses of one host of each zone, which are the same on the wire, by interface.
var both = map[string]netip.Addr{"in": netip.MustParseAddr("192.168.2.2"), "in2": netip.MustParseAddr("10.2.2.2")}

// datagram sends one of the host behind an interface and gives its external endpoint; not valid: it
// was refused.
func (r *modelRig) datagram(t *testing.T, link string, port uint16) netip.AddrPort {
	t.Helper()
	p := modelPacket{modelKey: modelKey{true, rulefile.UDP, modelEnds{netip.AddrPortFrom(both[link], port), netip.AddrPortFrom(world, 53)}}, link: link, ttl: 64, length: 60}
	r.confirm(t)
	saw, err := r.send(t, p)
	if err != nil {
		t.Fatalf("%v: %v", p, err)
	}
	if !isTranslated(saw) {
		return netip.AddrPort{}
	}
	return saw.ends.src
}

// answered is who gets what a remote host sends to an external endpoint.
func (r *modelRig) answered(t *testing.T, from, to netip.AddrPort) netip.AddrPort {
	t.Helper()
	p := modelPacket{modelKey: modelKey{false, rulefile.UDP, modelEnds{from, to}}, link: "out", ttl: 64, length: 60}
	r.confirm(t)
	saw, err := r.send(t, p)
	if err != nil {
		t.Fatalf("%v: %v", p, err)
	}
	return saw.ends.dst
}

// Hosts of two zones with the same address and port talk to the same receiver: each has external
// ports of its own, gets its own answers, has its own share, and is shown with its interface.
func TestZonesAtOnce(t *testing.T) {
	r := aZonedFile(t, zoneRules)
	had := map[netip.AddrPort]string{}
	for i := range uint16(40) {
		for link, host := range both {
			out := r.datagram(t, link, 5000+i)
			if other := had[out]; other != "" || !out.IsValid() {
				t.Fatalf("port %d of %s has %v, and %q has that", 5000+i, link, out, other)
			}
			had[out] = link
			for _, from := range []netip.AddrPort{netip.AddrPortFrom(world, 53), netip.AddrPortFrom(world, 54)} {
				if to := r.answered(t, from, out); to != netip.AddrPortFrom(host, 5000+i) {
					t.Fatalf("an answer to %v goes to %v, not to %v of %s", out, to, host, link)
				}
			}
		}
	}
	if out := r.datagram(t, "in", 4000); out.IsValid() {
		t.Errorf("a 41st port is given: %v", out)
	}
	for port, link := range map[uint16]string{53: "in2", 54: "in"} {
		if to, want := r.answered(t, netip.AddrPortFrom(world, 999), netip.AddrPortFrom(gatewayOut, port)), netip.AddrPortFrom(both[link], 5353); to != want {
			t.Errorf("a forward goes to %v, not to %v", to, want)
		}
	}
	shown := map[string]int{}
	if err := r.engine.Sessions(func(s *rulefile.Session) bool {
		shown["session "+s.From+" "+s.SourceInterface+s.DestinationInterface]++
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if err := r.engine.Mappings(func(m *rulefile.Mapping) bool { shown["mapping "+m.Interface]++; return true }); err != nil {
		t.Fatal(err)
	}
	var blocks []rulefile.PortRange
	if err := r.engine.Subscribers(func(s *Subscriber) bool {
		shown[fmt.Sprintf("subscriber %v %s: %d ports, %d blocks, refused %v", s.Addr, r.engine.ZoneName(s.Zone), s.Ports, len(s.Blocks), s.Refused)]++
		for _, b := range s.Blocks {
			if slices.ContainsFunc(blocks, b.Ports.Overlaps) {
				t.Errorf("block %v is two subscribers'", b)
			}
			blocks = append(blocks, b.Ports)
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{
		"session inside in": 40, "session inside in2": 40, "session outside in": 41, "session outside in2": 41, "mapping in": 40, "mapping in2": 40,
		"subscriber 192.168.2.2 in: 40 ports, 1 blocks, refused [0 1 0 0]": 1, "subscriber 192.168.2.2 in2: 40 ports, 1 blocks, refused [0 0 0 0]": 1,
	}
	if !maps.Equal(shown, want) {
		t.Errorf("shown are %v\nwant %v", shown, want)
	}
	allFound(t, r.engine)
}

// A host that sends to the external endpoint of one with its own address in another zone gets there
// by that, and is seen by its external endpoint.
func TestZonesHairpin(t *testing.T) {
	r := aZonedFile(t, zoneRules)
	one, other := r.datagram(t, "in", 5000), r.datagram(t, "in2", 5000)
	for _, way := range []struct {
		from     string
		src, dst netip.AddrPort
		to       string
	}{{"in", one, other, "in2"}, {"in2", other, one, "in"}} {
		p := modelPacket{modelKey: modelKey{true, rulefile.UDP, modelEnds{netip.AddrPortFrom(both[way.from], 5000), way.dst}}, link: way.from, ttl: 64, length: 60}
		r.confirm(t)
		saw, err := r.send(t, p)
		if want := (modelEnds{way.src, netip.AddrPortFrom(both[way.to], 5000)}); err != nil || !isTranslated(saw) || saw.ends != want {
			t.Errorf("from %s: %v, want %v (%v)", way.from, saw, want, err)
		}
	}
}

// through runs a frame through tc and wants it to leave by an interface: what leaves.
func (r *modelRig) through(t *testing.T, side abiNatSide, in, out port, ip pktbuild.IPv4) []byte {
	t.Helper()
	r.confirm(t)
	r.flags = 0
	frame := in.arriving(ip).Bytes()
	verdict, got, err := r.run(t, hooks[1], side, in, frame, 0)
	if err != nil || verdict != tcRedirect {
		t.Fatalf("verdict %d, error %v, counted %v", int32(verdict), err, r.counted(t))
	}
	r.counted(t)
	if !bytes.Equal(got[:6], out.neighbor) {
		t.Fatalf("it leaves for %x, not for %x", got[:6], out.neighbor)
	}
	return got
}

// Fragments of two zones with the same addresses and identification: later ones leave as their own
// first one did, and those from outside reach the zone of theirs.
func TestZonesFragments(t *testing.T) {
	r := aZonedFile(t, zoneRules)
	host := netip.MustParseAddr("192.168.2.2")
	ids := map[string]uint16{}
	for _, link := range []string{"in", "in2"} {
		r.datagram(t, link, 5000)
		got := r.through(t, abiNatSideNAT_INSIDE, r.ports[link], r.out, fragmentOf(host, 5000, 77, 0, 64))
		ids[link] = binary.BigEndian.Uint16(got[18:])
	}
	if ids["in"] == ids["in2"] {
		t.Errorf("both leave with identification %d", ids["in"])
	}
	for _, link := range []string{"in", "in2"} {
		got := r.through(t, abiNatSideNAT_INSIDE, r.ports[link], r.out, fragmentOf(host, 5000, 77, 512, 64))
		if id := binary.BigEndian.Uint16(got[18:]); id != ids[link] {
			t.Errorf("a later fragment of %s leaves with identification %d, its first one with %d", link, id, ids[link])
		}
	}
	for i, link := range []string{"in2", "in"} {
		for _, at := range []uint16{0, 512} {
			p := fragmentOf(world, 999, 78+uint16(i), at, 64)
			p.Dst = gatewayOut
			if at == 0 {
				whole := pktbuild.IPv4{Src: world, Dst: gatewayOut, Payload: pktbuild.UDP{Src: 999, Dst: 53 + uint16(i), Data: make([]byte, 1016)}}.Bytes()[20:]
				p.Payload = pktbuild.Bytes(whole[:512])
			}
			got := r.through(t, abiNatSideNAT_OUTSIDE, r.out, r.ports[link], p)
			if to := netip.AddrFrom4([4]byte(got[30:34])); to != host {
				t.Errorf("a fragment for %s goes to %v", link, to)
			}
		}
	}
}

// ICMP errors reach the zone of the packet that they are about, and go out from there as its host's.
func TestZonesICMPErrors(t *testing.T) {
	r := aZonedFile(t, zoneRules)
	host := netip.MustParseAddr("192.168.2.2")
	ends := map[string]netip.AddrPort{"in": r.datagram(t, "in", 5000), "in2": r.datagram(t, "in2", 5000)}
	udp := func(src, dst uint16) pktbuild.UDP {
		return pktbuild.UDP{Src: src, Dst: dst, Data: []byte("question")}
	}
	for link, end := range ends {
		r.answered(t, netip.AddrPortFrom(world, 53), end) // so that the next hop is known
		about := pktbuild.IPv4{Src: end.Addr(), Dst: world, TTL: 1, ID: 9, Payload: udp(end.Port(), 53)}
		got := r.through(t, abiNatSideNAT_OUTSIDE, r.out, r.ports[link], pktbuild.IPv4{Src: router, Dst: end.Addr(), TTL: 60, Payload: icmpError(11, 0, 0, about, 0, nil)})
		about.Src, about.Payload = host, udp(5000, 53)
		want := r.ports[link].leaving(pktbuild.IPv4{Src: router, Dst: host, TTL: 59, Payload: icmpError(11, 0, 0, about, 0, nil)}).Bytes()
		if !bytes.Equal(got, want) {
			t.Errorf("to %s:\n%s", link, differ(got, want))
		}
		about = pktbuild.IPv4{Src: world, Dst: host, TTL: 1, ID: 9, Payload: udp(53, 5000)}
		got = r.through(t, abiNatSideNAT_INSIDE, r.ports[link], r.out, pktbuild.IPv4{Src: host, Dst: world, TTL: 60, Payload: icmpError(3, 3, 0, about, 0, nil)})
		about.Dst, about.Payload = end.Addr(), udp(53, end.Port())
		want = r.out.leaving(pktbuild.IPv4{Src: end.Addr(), Dst: world, TTL: 59, Payload: icmpError(3, 3, 0, about, 0, nil)}).Bytes()
		if !bytes.Equal(got, want) {
			t.Errorf("from %s:\n%s", link, differ(got, want))
		}
	}
}

// What is recorded says of which zone it is, as it begins, is alive and ends; the ports of one zone
// are not given back for those of another.
func TestZonesLog(t *testing.T) {
	for _, record := range []string{"blocks", "mappings", "sessions"} {
		t.Run(record, func(t *testing.T) {
			timeouts := "defaults: {timeouts: {udp: 2s, port_hold_down: 2s}}\n"
			r := aZonedFile(t, "rules: []\nsubscribers: {by: [interface, address]}\n")
			log := r.withRing(t, 1<<20)
			f := parseFile(t, zoneRules+timeouts+"log: {record: "+record+"}\n")
			r.applied(t, f, nil)
			r.collects(t)
			next, alive := log.Next(), map[LogKey]uint64{}
			for i := range uint16(10) {
				for link := range both {
					r.datagram(t, link, 5000+i)
				}
			}
			r.answered(t, netip.AddrPortFrom(world, 999), netip.AddrPortFrom(gatewayOut, 53))
			seen := map[uint8]int{}
			records := readLog(t, log)
			follow(t, alive, records, &next)
			for _, one := range records {
				seen[one.Zone]++
			}
			want := map[string]map[uint8]int{"blocks": {4: 1, 8: 1}, "mappings": {4: 11, 8: 11}, "sessions": {4: 11, 8: 12}}[record]
			if !maps.Equal(seen, want) {
				t.Errorf("records by zone %v, want %v", seen, want)
			}
			if difference := differs(alive, snapshotOf(t, log)); difference != "" {
				t.Error(difference)
			}
			ktest.Wait(t, time.Minute, "everything to end", func() bool {
				follow(t, alive, readLog(t, log), &next)
				return len(alive) == 0
			})
			left := 0
			ktest.Wait(t, time.Minute, "subscribers to go", func() bool {
				left = 0
				return r.engine.Subscribers(func(*Subscriber) bool { left++; return true }) == nil && left == 0
			})
			if entries, err := tableValues(r.engine.m.MappingTable); err != nil || len(entries) > 0 {
				t.Errorf("%d mappings are still found (%v)", len(entries), err)
			}
			if flows, err := tableValues(r.engine.m.FlowTable); err != nil || len(flows) > 0 {
				t.Errorf("%d flows are still found (%v)", len(flows), err)
			}
		})
	}
}

// Explicit mappings are of the zone of the interface that they are asked for by.
func TestZonesLease(t *testing.T) {
	r := aZonedFile(t, zoneRules+"pcp: {on: [in, in2]}\n")
	maps.Copy(r.programs, r.load(t, loadLease).Programs)
	defer func() {
		deleteAll[abiNatLeaseKey, abiNatLease](t, r.maps["leases"])
		deleteAll[abiNatSourceKey, uint32](t, r.maps["lease_counts"])
		if err := r.maps["lease_state"].Put(uint32(0), &abiNatLeaseState{}); err != nil {
			t.Fatal(err)
		}
	}()
	out := map[string]netip.AddrPort{}
	for link, host := range both {
		q := &LeaseRequest{Inside: netip.AddrPortFrom(r.wireAddr(host), 6000), Protocol: 17, Nonce: [12]byte{1}, In: r.ports[link].ifindex, Out: r.out.ifindex, Lifetime: time.Minute, Limit: 1}
		r.do(t, func() (err error) {
			var result LeaseResult
			out[link], result, err = r.engine.Lease(q)
			if result != LeaseDone {
				t.Errorf("%s: result %d", link, result)
			}
			return err
		})
		if to := r.answered(t, netip.AddrPortFrom(world, 7), out[link]); to != netip.AddrPortFrom(host, 6000) {
			t.Errorf("what is for %v goes to %v, not to %v", out[link], to, host)
		}
		zone, err := r.engine.Zone(r.ports[link].ifindex)
		if err != nil || r.engine.ZoneName(zone) != link {
			t.Errorf("zone %d of %s (%v)", zone, link, err)
		}
	}
	if out["in"] == out["in2"] {
		t.Errorf("both have %v", out["in"])
	}
	zones := map[uint8]netip.AddrPort{}
	if err := r.engine.Leases(func(l *Lease) bool { zones[l.Zone] = l.Outside; return true }); err != nil {
		t.Fatal(err)
	}
	if want := map[uint8]netip.AddrPort{4: out["in"], 8: out["in2"]}; !maps.Equal(zones, want) {
		t.Errorf("leases by zone %v, want %v", zones, want)
	}
}

// Who pretends to be of another zone, or of none, gets nowhere.
func TestZonesSpoofed(t *testing.T) {
	r := aZonedFile(t, zoneRules)
	p := modelPacket{modelKey: modelKey{true, rulefile.UDP, modelEnds{netip.MustParseAddrPort("10.9.9.9:5000"), netip.AddrPortFrom(world, 53)}}, link: "in2", ttl: 64, length: 60}
	r.meets(t, p, abiNatReasonNAT_DROP_SPOOFED, modelEnds{})
	p.link, p.inside, p.src, p.dst = "out", false, netip.MustParseAddrPort("192.168.2.2:5000"), r.datagram(t, "in2", 5000)
	r.meets(t, p, abiNatReasonNAT_DROP_SPOOFED, modelEnds{})
	// An interface that packets find no number of, for a moment.
	index := uint32(r.ports["in2"].link)
	if err := r.maps["link_indices"].Delete(uint32(r.ports["in2"].ifindex)); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.maps["link_indices"].Put(uint32(r.ports["in2"].ifindex), index); err != nil {
			t.Fatal(err)
		}
	}()
	p = modelPacket{modelKey: modelKey{true, rulefile.UDP, modelEnds{netip.AddrPortFrom(both["in2"], 5000), netip.AddrPortFrom(world, 53)}}, link: "in2", ttl: 64, length: 60}
	r.meets(t, p, abiNatReasonNAT_DROP_RACE, modelEnds{})
}
