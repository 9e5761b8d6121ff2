// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"math"
	"net/netip"
	"slices"
	"testing"

	"natkit/internal/snapshot"
)

// A packet that is seen only when it is dropped met its rules before: a reader of nftables' trace is often
// faster than the drop. What a packet of the same content met long before is not its own.
func TestRulesBeforeTheDrop(t *testing.T) {
	const seen = 10_000_000_000
	for _, tt := range []struct {
		name   string
		point  snapshot.TracePoint
		before uint64
		want   string
	}{
		{"drop", snapshot.PointDropped, 100_000, "tcp dport 81 drop"},
		{"drop/long-before", snapshot.PointDropped, 2 * settle, ""},
		{"received", snapshot.PointReceived, 100_000, ""}, // it is seen from its beginning
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := NewAssembler(nil)
			a.Add(snapshot.TraceEvent{TimeNS: seen - tt.before, Netns: 1, Identity: 7, Packet: 3, Hook: "forward", Head: []byte{0x45}, Point: snapshot.PointRule,
				Rule: &snapshot.TraceRule{Family: "ip", Table: "fw", Chain: "forward", Handle: 2, Verdict: "drop", Text: "tcp dport 81 drop"}})
			e := snapshot.TraceEvent{TimeNS: seen, Netns: 1, Identity: 7, Packet: 99, Point: tt.point}
			if tt.point == snapshot.PointDropped {
				e.Drop = &snapshot.TraceDrop{Reason: "NETFILTER_DROP", Cause: snapshot.CauseRule}
			}
			a.Add(e)
			packets := a.Take(0)
			if len(packets) != 1 {
				t.Fatalf("%d packets", len(packets))
			}
			got := ""
			if rule := packets[0].End.Rule; rule != nil {
				got = rule.Text
			}
			if got != tt.want {
				t.Errorf("ended by %q, want %q: %+v", got, tt.want, packets[0].End)
			}
		})
	}
}

// A socket that closes frees what it has received (QUEUE_PURGE): that is no end of a packet's path.
func TestFreedBySocket(t *testing.T) {
	a := NewAssembler(nil)
	a.Add(snapshot.TraceEvent{TimeNS: 10_000_000_000, Netns: 1, Namespace: "client", Identity: 7, Packet: 3, Interface: "eth0", Point: snapshot.PointReceived})
	for _, packet := range []uint64{3, 4} { // one that was seen before, and one that was not
		a.Add(snapshot.TraceEvent{TimeNS: 10_000_100_000, Namespace: "inode:0", Identity: 7, Packet: packet, Point: snapshot.PointDropped,
			Drop: &snapshot.TraceDrop{Reason: "QUEUE_PURGE", Location: "sk_stream_kill_queues+0x57", Benign: true}})
	}
	packets := a.Take(0)
	if len(packets) != 1 || packets[0].End.Outcome != Arrived || packets[0].End.Namespace != "client" || len(packets[0].Steps) != 1 {
		t.Errorf("%+v", packets)
	}
}

// A packet that its socket drops has left its device: the kernel no longer knows the namespace, but the trace does.
func TestDroppedBySocket(t *testing.T) {
	a := NewAssembler(nil)
	a.Add(snapshot.TraceEvent{TimeNS: 10_000_000_000, Netns: 1, Namespace: "client", Identity: 7, Packet: 3, Interface: "eth0", Point: snapshot.PointReceived})
	a.Add(snapshot.TraceEvent{TimeNS: 10_000_100_000, Namespace: "inode:0", Identity: 7, Packet: 3, Point: snapshot.PointDropped,
		Drop: &snapshot.TraceDrop{Reason: "TCP_RFC7323_PAWS_ACK", Location: "tcp_validate_incoming+0x15b"}})
	packets := a.Take(0)
	if len(packets) != 1 || packets[0].End.Outcome != Died || packets[0].End.Namespace != "client" || packets[0].End.Interface != "eth0" {
		t.Errorf("%+v", packets)
	}
}

// A packet that a program translates stays in its connection, and so do the replies to what it has become.
func TestTranslatedOutside(t *testing.T) {
	a := NewAssembler(nil)
	const start = 10_000_000_000
	tuple := func(source, destination string) snapshot.TraceTuple {
		return snapshot.TraceTuple{Protocol: "udp", Source: netip.MustParseAddrPort(source), Destination: netip.MustParseAddrPort(destination)}
	}
	before, after := tuple("10.0.0.2:4000", "203.0.113.2:53"), tuple("203.0.113.1:1024", "203.0.113.2:53")
	a.Add(snapshot.TraceEvent{TimeNS: start, Netns: 1, Identity: 7, Packet: 1, Point: snapshot.PointReceived, Tuple: before})
	a.Add(snapshot.TraceEvent{TimeNS: start + 1000, Netns: 1, Identity: 7, Packet: 1, Point: snapshot.PointQueued, Tuple: after})
	a.Add(snapshot.TraceEvent{TimeNS: start + 2000, Netns: 2, Identity: 8, Packet: 2, Point: snapshot.PointQueued, Tuple: after.Turned()})
	for i, p := range a.Take(0) {
		if p.Connection != 1 || p.Reply != (i == 1) {
			t.Errorf("packet %d is of connection %d, reply %v", i+1, p.Connection, p.Reply)
		}
	}
}

// Two packets of the same content, one shortly behind the other, have met the same rule once each.
func TestRulesOfAlikePackets(t *testing.T) {
	a := NewAssembler(nil)
	const start, apart = 10_000_000_000, 1_000_000
	for i := range uint64(3) {
		at := start + i*apart
		a.Add(snapshot.TraceEvent{TimeNS: at, Netns: 1, Identity: 7, Packet: i + 1, Point: snapshot.PointReceived})
		a.Add(snapshot.TraceEvent{TimeNS: at + 200_000, Netns: 1, Identity: 7, Packet: i + 1, Point: snapshot.PointHook, Hook: "forward", Priority: math.MaxInt32 - 1})
	}
	for i := range uint64(3) { // reported later
		for _, chain := range []string{"early", "forward"} {
			a.Add(snapshot.TraceEvent{TimeNS: start + i*apart + 2*apart, Netns: 1, Identity: 7, Packet: 100 + i, Hook: "forward", Head: []byte{0x45}, Point: snapshot.PointRule,
				Rule: &snapshot.TraceRule{Family: "ip", Table: "fw", Chain: chain, Handle: 2 + i, Verdict: "accept"}})
		}
	}
	for i, p := range a.Take(0) {
		var rules []uint64
		for _, s := range p.Steps {
			if s.Rule != nil {
				rules = append(rules, s.Rule.Handle)
			}
		}
		if want := uint64(2 + i); !slices.Equal(rules, []uint64{want, want}) {
			t.Errorf("packet %d met rules %v, want %d twice", i+1, rules, want)
		}
	}
}

// Datagrams of two connections may be alike but for their ends: a rule that one has met is not the other's.
func TestRulesOfAnotherConnection(t *testing.T) {
	a := NewAssembler(nil)
	const start = 10_000_000_000
	tuple := func(source string) snapshot.TraceTuple {
		return snapshot.TraceTuple{Protocol: "udp", Source: netip.MustParseAddrPort(source), Destination: netip.MustParseAddrPort("[fd00::53]:53")}
	}
	one, other := tuple("[fd00::1]:4000"), tuple("[fd00::2]:4000")
	a.Add(snapshot.TraceEvent{TimeNS: start, Netns: 1, Identity: 7, Packet: 1, Point: snapshot.PointReceived, Tuple: one})
	a.Add(snapshot.TraceEvent{TimeNS: start + 1000, Netns: 1, Identity: 7, Packet: 1, Point: snapshot.PointDropped, Tuple: one, Drop: &snapshot.TraceDrop{Reason: "NETFILTER_DROP"}})
	a.Add(snapshot.TraceEvent{TimeNS: start + 2000, Netns: 1, Identity: 7, Packet: 2, Point: snapshot.PointReceived, Tuple: other})
	a.Add(snapshot.TraceEvent{TimeNS: start + 3000, Netns: 1, Identity: 7, Packet: 2, Point: snapshot.PointHook, Hook: "forward", Priority: math.MaxInt32 - 1, Tuple: other})
	a.Add(snapshot.TraceEvent{TimeNS: start + 4000, Netns: 1, Identity: 7, Packet: 100, Hook: "forward", Head: []byte{0x60}, Point: snapshot.PointRule, Tuple: other,
		Rule: &snapshot.TraceRule{Family: "ip6", Table: "fw", Chain: "forward", Handle: 2, Verdict: "accept"}})
	for i, p := range a.Take(0) {
		if met := slices.ContainsFunc(p.Steps, func(s Step) bool { return s.What == RuleMet }); met != (i == 1) {
			t.Errorf("packet %d has met the rule: %v", i+1, met)
		}
	}
}
