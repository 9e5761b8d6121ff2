// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"net/netip"
	"strings"
	"testing"

	"natkit/internal/snapshot"
)

// droppedOthers is a program that dropped packets at about that time.
type droppedOthers struct{ Deriver }

func (droppedOthers) Refused(uint64, uint64) string { return "no-port: no port is free" }

func (droppedOthers) RefusedUnseen(uint64, uint64) string { return "gateway, no-port: no port is free" }

// What a program at XDP drops left the namespace before: whether the packet was one of these is not known.
func TestUnseenEnd(t *testing.T) {
	for want, deriver := range map[string]Deriver{"and was not seen again": nil, "and was not seen again; perhaps it was dropped before the stack saw it: gateway, no-port: no port is free": droppedOthers{}} {
		if _, end := account([]snapshot.TraceEvent{{TimeNS: 1, Netns: 1, Point: snapshot.PointSent}}, deriver); end.Outcome != Left || end.Why != want {
			t.Errorf("ended as %+v, want %q", end, want)
		}
	}
}

// A program at tc that makes an ICMP error of a packet has dropped it, and the error is a packet of its own: a reply.
func TestBecomesReply(t *testing.T) {
	tuple := snapshot.TraceTuple{Protocol: "udp", Source: netip.MustParseAddrPort("10.0.0.2:4000"), Destination: netip.MustParseAddrPort("198.51.100.1:53")}
	about := tuple
	reply := snapshot.TraceTuple{Protocol: "icmp", Source: netip.MustParseAddrPort("10.0.0.1:0"), Destination: netip.MustParseAddrPort("10.0.0.2:0")}
	for _, tt := range []struct {
		deriver Deriver
		why     string
	}{{droppedOthers{}, "no-port: no port is free"}, {nil, "a program at tc replied with ICMP type 3 code 13"}} {
		a := NewAssembler(tt.deriver)
		a.Add(snapshot.TraceEvent{TimeNS: 1, Netns: 1, Namespace: "gateway", Interface: "eth1", Identity: 7, Packet: 3, Point: snapshot.PointReceived, Tuple: tuple})
		a.Add(snapshot.TraceEvent{TimeNS: 2, Netns: 1, Namespace: "gateway", Interface: "eth1", Identity: 8, Packet: 3, Point: snapshot.PointQueued, Tuple: reply, About: &about, Kind: "type 3 code 13"})
		packets := a.Take(0)
		if len(packets) != 2 {
			t.Fatalf("%+v", packets)
		}
		if end := packets[0].End; end.Outcome != Died || end.Why != tt.why || end.Namespace != "gateway" || packets[0].Reply {
			t.Errorf("ended as %+v, want %q", end, tt.why)
		}
		if p := packets[1]; p.Kind != "type 3 code 13" || p.Connection != packets[0].Connection || !p.Reply {
			t.Errorf("the reply is %+v", p)
		}
	}
}

// What a packet's end says is no more than was seen.
func TestEnds(t *testing.T) {
	rule := snapshot.TraceEvent{Netns: 1, Point: snapshot.PointRule, Hook: "input", Rule: &snapshot.TraceRule{Family: "ip", Table: "fw", Chain: "in", Handle: 2, Verdict: "accept"}}
	drops := rule
	drops.Rule = &snapshot.TraceRule{Family: "ip", Table: "fw", Chain: "in", Handle: 3, Verdict: "drop"}
	for _, tt := range []struct {
		name    string
		part    bool // of a packet
		rules   []snapshot.TraceEvent
		deriver Deriver
		want    Outcome
		why     string
	}{
		{"received", false, nil, nil, Arrived, "no netfilter function"},
		{"a fragment", true, nil, nil, Vanished, "a fragment"},
		{"a rule was met", false, []snapshot.TraceEvent{rule}, nil, Vanished, "last seen in hook input"},
		{"a rule dropped it", false, []snapshot.TraceEvent{rule, drops}, nil, Died, "ip fw in handle 3"},
		{"a program dropped some", false, nil, droppedOthers{}, Vanished, "perhaps it was dropped: no-port"},
	} {
		events := append([]snapshot.TraceEvent{{TimeNS: 1, Netns: 1, Point: snapshot.PointReceived, Fragment: tt.part}}, tt.rules...)
		if _, end := account(events, tt.deriver); end.Outcome != tt.want || !strings.Contains(end.Why, tt.why) {
			t.Errorf("%s: ended as %+v, want %s, %q", tt.name, end, tt.want, tt.why)
		}
	}
}

// Of a route of IPv6 natkit does not read the next hop: it says nothing of it.
func TestRouteOfIPv6(t *testing.T) {
	for ends, want := range map[[2]string]string{
		{"192.0.2.1:1000", "198.51.100.1:53"}: "out eth0, on the link",
		{"[fd00::1]:1000", "[fd00::53]:53"}:   "out eth0",
	} {
		tuple := snapshot.TraceTuple{Protocol: "udp", Source: netip.MustParseAddrPort(ends[0]), Destination: netip.MustParseAddrPort(ends[1])}
		steps, _ := account([]snapshot.TraceEvent{
			{TimeNS: 1, Netns: 1, Point: snapshot.PointReceived, Tuple: tuple},
			{TimeNS: 2, Netns: 1, Point: snapshot.PointHook, Hook: "forward", Tuple: tuple, Route: &snapshot.TraceRoute{Function: "forward", Interface: "eth0"}},
		}, nil)
		if got := steps[len(steps)-1]; got.What != Routed || got.Detail != want {
			t.Errorf("%s: %+v, want %q", ends[1], got, want)
		}
	}
}
