// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"testing"

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
