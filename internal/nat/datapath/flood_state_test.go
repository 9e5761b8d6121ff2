// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
)

// reach is how many buckets beside its own a look-up of each home may read, in the tables of sessions
// and of mappings.
func (r *modelRig) reach(t *testing.T) map[string]uint32 {
	t.Helper()
	sums := map[string]uint32{}
	for _, name := range []string{"flow_table", "mapping_table"} {
		for _, bucket := range entries[uint32, abiNatBucket](t, r.maps[name]) {
			sums[name] += bucket.Reach
		}
	}
	return sums
}

// RFC 6888 REQ-5: a subscriber that opens all it can, and is sent all that the world can send, has at
// most what its class gives it in every table. So what others' packets have to read does not grow,
// and each other subscriber finds a first block. What a look-up reads is counted, not timed.
func TestFloodOfOne(t *testing.T) {
	const (
		sessions = 600 // of a subscriber
		others   = 100
		each     = 10
		opened   = 20000
		received = 5000
	)
	r := aModelRig(t)
	r.seed(11)
	// One address with just enough blocks: those of the flood, and one for each other subscriber.
	f := blockFile(rulefile.Blocks{Size: 512, Extra: 512, AtMost: rulefile.MaxExtraBlocks}, 1)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	f.Defaults.Filtering[rulefile.ClassUDP] = rulefile.FilterEndpointIndependent
	f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Sessions: sessions}}
	r.forget(t, f)
	r.model = newModel(f, r.facts, r.route)
	r.applied(t, f, nil)
	host := func(n, port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 3, byte(2 + n)}), uint16(port))
	}
	kept := map[netip.AddrPort]netip.AddrPort{}
	open := func(from, to int) {
		t.Helper()
		for n := from; n < to; n++ {
			for i := range each {
				saw := r.udp(t, host(n, 3000+i), 53)
				if !isTranslated(saw) {
					t.Fatalf("session %d of subscriber %d: %v", i, n, saw)
				}
				kept[host(n, 3000+i)] = saw.ends.src
			}
		}
	}
	open(0, others/2)
	before := r.reach(t)

	flooder := netip.MustParseAddr("192.168.2.2")
	counts := map[abiNatReason]int{}
	var external netip.AddrPort
	for i := range opened {
		saw := r.udp(t, netip.AddrPortFrom(flooder, uint16(1024+i)), uint16(53+i%100))
		if counts[saw.reason]++; isTranslated(saw) {
			external = saw.ends.src
		}
	}
	for i := range received {
		remote := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + i%250)}), uint16(10000+i))
		saw, err := r.send(t, modelPacket{modelKey: modelKey{false, rulefile.UDP, modelEnds{remote, external}}, link: "out", ttl: 64, length: 60})
		if err != nil {
			t.Fatal(err)
		}
		counts[saw.reason]++
	}
	opens := counts[abiNatReasonNAT_TRANSLATED_OUT] + counts[abiNatReasonNAT_TRANSLATED_IN]
	if opens == 0 || opens > sessions || counts[abiNatReasonNAT_DROP_SOURCE_LIMIT] == 0 || opens+counts[abiNatReasonNAT_DROP_SOURCE_LIMIT] != opened+received {
		t.Errorf("the flood ended as %v, want at most %d sessions and the rest refused for it", counts, sessions)
	}
	s := entries[abiNatSourceKey, abiNatSource](t, r.maps["sources"])
	if got := len(s); got != others/2+1 {
		t.Errorf("%d subscribers, want %d", got, others/2+1)
	}
	after := r.reach(t)
	for name := range before {
		// With random places a table of so few entries has hardly a full bucket.
		if after[name] > before[name]+2 {
			t.Errorf("%s: look-ups read %d more buckets after the flood", name, after[name]-before[name])
		}
	}
	open(others/2, others)
	for src, end := range kept {
		if saw := r.udp(t, src, 53); saw.ends.src != end {
			t.Fatalf("%v has had %v: %v", src, end, saw)
		}
	}
}

// floodRules are subscribers with one limit, of sessions, who share an address and let everybody in.
func floodRules(sessions int) *rulefile.File {
	f := blockFile(rulefile.Blocks{}, 1)
	f.Defaults.Timeouts = rulefile.DefaultTimeouts()
	for class := range f.Defaults.Filtering {
		f.Defaults.Filtering[class] = rulefile.FilterEndpointIndependent
	}
	f.Subscribers = rulefile.Subscribers{Prefix: 32, Default: rulefile.Share{Sessions: sessions}}
	return f
}

// RFC 6888 REQ-5: sessions that strangers open through a subscriber's mapping are limited in their rate, too.
// They leave half of what it may open at once to the subscriber.
func TestFloodRate(t *testing.T) {
	const burst = 40
	r := aModelRig(t)
	r.seed(13)
	f := floodRules(0)
	f.Subscribers.Default = rulefile.Share{NewPerSecond: 1, Burst: burst}
	published := netip.MustParseAddrPort("203.0.113.20:7000")
	f.Rules = append(f.Rules, rulefile.Rule{Action: rulefile.DNAT{Protocol: rulefile.UDP, Address: published.Addr(),
		Ports: rulefile.PortRange{First: published.Port(), Last: published.Port()}, Targets: []rulefile.Target{{Address: netip.MustParseAddr("192.168.2.2")}}}})
	r.forget(t, f)
	r.model = newModel(f, r.facts, r.route)
	r.applied(t, f, nil)
	host := netip.MustParseAddrPort("192.168.2.2:5000")
	external := r.udp(t, host, 53).ends.src
	began := time.Now()
	opened, own := 0, 0
	for n := range 1000 {
		remote := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + n%200)}), uint16(10000+n))
		saw, err := r.send(t, modelPacket{modelKey: modelKey{false, rulefile.UDP, modelEnds{remote, external}}, link: "out", ttl: 64, length: 60})
		if err != nil {
			t.Fatal(err)
		}
		if isTranslated(saw) {
			opened++
		} else if saw.reason != abiNatReasonNAT_DROP_RATE_LIMIT {
			t.Fatalf("packet %d: %v", n, saw)
		}
	}
	for n := range burst {
		if isTranslated(r.udp(t, host, uint16(1000+n))) {
			own++
		}
	}
	refilled := int(time.Since(began).Seconds()) + 1
	if opened < burst/2-1 || opened > burst/2+refilled {
		t.Errorf("strangers opened %d sessions of %d", opened, burst)
	}
	if own < burst/2-1 || own > burst/2+refilled {
		t.Errorf("the subscriber itself opened %d sessions of %d after that", own, burst)
	}
	// Who is published has a share for that, which nobody else takes from.
	began, opened = time.Now(), 0
	for n := range 1000 {
		remote := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + n%200)}), uint16(10000+n))
		saw, err := r.send(t, modelPacket{modelKey: modelKey{false, rulefile.UDP, modelEnds{remote, published}}, link: "out", ttl: 64, length: 60})
		if err != nil || !isTranslated(saw) && saw.reason != abiNatReasonNAT_DROP_RATE_LIMIT {
			t.Fatalf("packet %d: %v, %v", n, saw, err)
		}
		if isTranslated(saw) {
			opened++
		}
	}
	if refilled = int(time.Since(began).Seconds()) + 1; opened < burst || opened > burst+refilled {
		t.Errorf("strangers opened %d sessions of %d by a rule", opened, burst)
	}
}

// RFC 6888 REQ-5: by no way of flooding has a subscriber more sessions, ports, mappings or filter entries
// than its limit of sessions, also while it has no other limit; and by those that a rule sends to it, or that it
// opens by a map, as many for each. Others who share its address keep what they have and get more.
func TestFloods(t *testing.T) {
	const sessions, packets = 200, 3000
	var (
		flooder  = netip.MustParseAddr("192.168.2.2")
		receiver = netip.MustParseAddr("192.168.4.2")
		other    = netip.MustParseAddr("192.168.3.2")
	)
	at := netip.AddrPortFrom
	remote := func(n int) netip.AddrPort {
		return at(netip.AddrFrom4([4]byte{198, 51, byte(100 + n/200), byte(1 + n%200)}), uint16(1024+n))
	}
	out := func(protocol rulefile.Protocol, src, dst netip.AddrPort) modelPacket {
		return modelPacket{modelKey: modelKey{true, protocol, modelEnds{src, dst}}, link: "in", ttl: 64, length: 60, syn: protocol == rulefile.TCP, query: protocol == rulefile.ICMP}
	}
	in := func(protocol rulefile.Protocol, src, dst netip.AddrPort) modelPacket {
		p := out(protocol, src, dst)
		p.inside, p.link = false, "out"
		return p
	}
	echo := func(host netip.Addr, id uint16) netip.AddrPort { return at(host, id) }
	type opener func(modelPacket) netip.AddrPort // gives the external endpoint
	fullReceiver := func(open opener) (external netip.AddrPort) {
		for n := range sessions {
			external = open(out(rulefile.UDP, at(receiver, 5000), remote(n)))
		}
		return external
	}
	published, mapped := netip.MustParseAddrPort("203.0.113.20:7000"), netip.MustParseAddr("198.18.2.2")
	forward := func(f *rulefile.File) {
		f.Rules = append(f.Rules, rulefile.Rule{Action: rulefile.DNAT{Protocol: rulefile.UDP, Address: published.Addr(),
			Ports: rulefile.PortRange{First: published.Port(), Last: published.Port()}, Targets: []rulefile.Target{{Address: flooder}}}})
	}
	aMap := func(f *rulefile.File) {
		f.Rules = append(f.Rules, rulefile.Rule{Action: rulefile.Map{Inside: netip.PrefixFrom(flooder, 32), Outside: netip.PrefixFrom(mapped, 32)}})
	}
	for _, way := range []struct {
		name   string
		class  rulefile.Class
		begin  func(open opener) (external netip.AddrPort)
		flood  func(n int, external netip.AddrPort) modelPacket
		change func(*rulefile.File)
		still  func(n int) modelPacket // what the flood has no part in, though it is the same host's
	}{
		{name: "UDP to many endpoints", class: rulefile.ClassUDP,
			flood: func(n int, _ netip.AddrPort) modelPacket { return out(rulefile.UDP, at(flooder, 5000), remote(n)) }},
		{name: "UDP to many addresses, filtered by address", class: rulefile.ClassUDP,
			change: func(f *rulefile.File) { f.Defaults.Filtering[rulefile.ClassUDP] = rulefile.FilterAddress },
			flood:  func(n int, _ netip.AddrPort) modelPacket { return out(rulefile.UDP, at(flooder, 5000), remote(n)) }},
		{name: "UDP from many ports", class: rulefile.ClassUDP,
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(2000+n)), remote(0))
			}},
		{name: "UDP from many ports, each session with one of its own", class: rulefile.ClassUDP,
			change: func(f *rulefile.File) { f.Defaults.Mapping[rulefile.ClassUDP] = rulefile.AddressAndPortDependent },
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(2000+n)), remote(n))
			}},
		{name: "SYNs from inside", class: rulefile.ClassTCP,
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.TCP, at(flooder, uint16(2000+n)), remote(n))
			}},
		{name: "SYNs from outside to a mapping", class: rulefile.ClassTCP,
			begin: func(open opener) netip.AddrPort { return open(out(rulefile.TCP, at(flooder, 5000), remote(0))) },
			flood: func(n int, external netip.AddrPort) modelPacket { return in(rulefile.TCP, remote(n), external) }},
		{name: "UDP from outside to a mapping", class: rulefile.ClassUDP,
			begin: func(open opener) netip.AddrPort { return open(out(rulefile.UDP, at(flooder, 5000), remote(0))) },
			flood: func(n int, external netip.AddrPort) modelPacket { return in(rulefile.UDP, remote(n), external) }},
		{name: "pings with many identifiers", class: rulefile.ClassICMP,
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.ICMP, echo(flooder, uint16(n)), at(world, 0))
			}},
		{name: "pings to many hosts", class: rulefile.ClassICMP,
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.ICMP, echo(flooder, 7), at(remote(n).Addr(), 0))
			}},
		{name: "hairpin to its own mapping", class: rulefile.ClassUDP,
			begin: func(open opener) netip.AddrPort { return open(out(rulefile.UDP, at(flooder, 5000), remote(0))) },
			flood: func(n int, external netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(6000+n)), external)
			}},
		{name: "hairpin to a host that has all of its sessions", class: rulefile.ClassUDP,
			begin: fullReceiver,
			flood: func(n int, external netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(6000+n)), external)
			}},
		{
			name: "the same, each session with a port of its own", class: rulefile.ClassUDP,
			change: func(f *rulefile.File) {
				own := rulefile.Rule{Action: rulefile.SNAT{Source: netip.PrefixFrom(flooder, 32), Pool: "cgn"}}
				own.Mapping[rulefile.ClassUDP] = rulefile.AddressAndPortDependent
				f.Rules = append(f.Rules, own)
			},
			begin: fullReceiver,
			flood: func(n int, external netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(6000+n)), external)
			},
		},
		{name: "UDP from outside to a published port", class: rulefile.ClassUDP, change: forward,
			flood: func(n int, _ netip.AddrPort) modelPacket { return in(rulefile.UDP, remote(n), published) },
			still: func(n int) modelPacket { return out(rulefile.UDP, at(flooder, 5000), remote(n)) }},
		{name: "UDP from inside to a published port of its own", class: rulefile.ClassUDP, change: forward,
			flood: func(n int, _ netip.AddrPort) modelPacket {
				return out(rulefile.UDP, at(flooder, uint16(2000+n)), published)
			}},
		{name: "SYNs from outside to the address of a map", class: rulefile.ClassTCP, change: aMap,
			flood: func(n int, _ netip.AddrPort) modelPacket { return in(rulefile.TCP, remote(n), at(mapped, 80)) },
			still: func(n int) modelPacket { return out(rulefile.TCP, at(flooder, 5000), remote(n)) }},
		{name: "UDP from a host that has an address of a map", class: rulefile.ClassUDP, change: aMap,
			flood: func(n int, _ netip.AddrPort) modelPacket { return out(rulefile.UDP, at(flooder, 5000), remote(n)) },
			still: func(n int) modelPacket { return in(rulefile.UDP, remote(n+packets), at(mapped, 80)) }},
	} {
		t.Run(way.name, func(t *testing.T) {
			r := aModelRig(t)
			r.seed(12)
			f := floodRules(sessions)
			if way.change != nil {
				way.change(f)
			}
			r.forget(t, f)
			r.model = newModel(f, r.facts, r.route)
			index := uint32(r.applied(t, f, nil)[0].Index)
			open := func(p modelPacket) netip.AddrPort {
				t.Helper()
				saw, err := r.send(t, p)
				if err != nil || !isTranslated(saw) {
					t.Fatalf("%v: %v, %v", p, saw, err)
				}
				return saw.ends.src
			}
			had := open(out(rulefile.UDP, at(other, 4000), at(world, 53)))
			var external netip.AddrPort
			if way.begin != nil {
				external = way.begin(open)
			}
			before, ports := r.reach(t), r.freePorts(t, index, abiNatClass(way.class))
			counts := map[abiNatReason]int{}
			for n := range packets {
				saw, err := r.send(t, way.flood(n, external))
				if err != nil {
					t.Fatal(err)
				}
				counts[saw.reason]++
			}
			opened := counts[abiNatReasonNAT_TRANSLATED_OUT] + counts[abiNatReasonNAT_TRANSLATED_IN]
			if opened > sessions || opened+counts[abiNatReasonNAT_DROP_SOURCE_LIMIT]+counts[abiNatReasonNAT_DROP_FILTERED] != packets {
				t.Errorf("the flood ended as %v, want at most %d sessions", counts, sessions)
			}
			if took := ports - r.freePorts(t, index, abiNatClass(way.class)); took > sessions {
				t.Errorf("the flood took %d ports", took)
			}
			if n := len(entries[abiNatFilterKey, abiNatFilterEntry](t, r.maps["filter_entries"])); n > sessions+1 {
				t.Errorf("%d filter entries", n)
			}
			for name, reach := range r.reach(t) {
				if reach > before[name]+1 {
					t.Errorf("%s: look-ups read %d more buckets", name, reach-before[name])
				}
			}
			for n := 0; n < sessions && way.still != nil; n++ {
				open(way.still(n))
			}
			if now := open(out(rulefile.UDP, at(other, 4000), at(world, 53))); now != had {
				t.Errorf("another subscriber had %v, and has %v", had, now)
			}
			for n := range sessions - 1 {
				open(out(rulefile.UDP, at(other, 4000), remote(n)))
			}
		})
	}
}
