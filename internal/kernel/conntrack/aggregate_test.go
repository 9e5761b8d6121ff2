// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/snapshot"
)

// TestTallyAgainstMap: below its limit a tally is a map. Above, rows never
// overstate, are off by no more than they say, and every frequent key is there.
func TestTallyAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, tt := range []struct{ limit, keys, adds int }{
		{100, 100, 5000}, // exact
		{100, 101, 5000},
		{64, 3000, 50000},
		{1, 10, 100},
	} {
		tally, truth, unreplied := newTally[int](tt.limit), map[int]uint32{}, map[int]uint32{}
		for range tt.adds {
			// A few keys are much more frequent than the rest, as addresses are.
			key := int(float64(tt.keys) * rng.Float64() * rng.Float64() * rng.Float64())
			open := rng.IntN(3) == 0
			tally.add(key, open, uint16(key))
			truth[key]++
			if open {
				unreplied[key]++
			}
		}
		for i := range tally.heap {
			if up := tally.heap[max(i-1, 0)/2]; tally.rows[up].count > tally.rows[tally.heap[i]].count {
				t.Fatalf("limit %d: the rarest is not on top of the heap", tt.limit)
			}
		}
		rows := tally.top(tt.limit+1, func(a, b int) int { return cmp.Compare(a, b) })
		if len(rows) > tt.limit {
			t.Fatalf("%d rows, limit %d", len(rows), tt.limit)
		}
		there := map[int]bool{}
		for i, r := range rows {
			there[r.key] = true
			if r.sure() > truth[r.key] || r.sure()+r.missed < truth[r.key] {
				t.Errorf("limit %d: key %d has %d, row says %d to %d", tt.limit, r.key, truth[r.key], r.sure(), r.sure()+r.missed)
			}
			if r.unreplied > unreplied[r.key] {
				t.Errorf("limit %d: key %d has %d unreplied, row says %d", tt.limit, r.key, unreplied[r.key], r.unreplied)
			}
			if r.minPort != uint16(r.key) || r.maxPort != uint16(r.key) {
				t.Errorf("key %d: ports %d-%d", r.key, r.minPort, r.maxPort)
			}
			if i > 0 && r.sure() > rows[i-1].sure() {
				t.Errorf("row %d has more than the one before", i)
			}
			if len(truth) <= tt.limit && r.missed != 0 {
				t.Errorf("limit %d, %d keys: missed %d", tt.limit, len(truth), r.missed)
			}
		}
		for key, n := range truth {
			if int(n) > tt.adds/tt.limit && !there[key] {
				t.Errorf("limit %d: key %d with %d of %d is missing", tt.limit, key, n, tt.adds)
			}
		}
	}
}

func TestAggregate(t *testing.T) {
	text := `tcp      6 7 TIME_WAIT src=10.0.0.1 dst=192.168.0.96 sport=1000 dport=8080 src=172.17.0.2 dst=10.0.0.1 sport=80 dport=1000 [ASSURED] use=1
tcp      6 7 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=1000 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=5005 [ASSURED] use=1
tcp      6 7 ESTABLISHED src=10.0.0.2 dst=1.1.1.1 sport=1000 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=5001 [HW_OFFLOAD] use=1
udp      17 7 src=10.0.0.2 dst=1.1.1.1 sport=1000 dport=443 [UNREPLIED] src=1.1.1.1 dst=100.64.0.1 sport=443 dport=1000 use=1
icmp     1 7 src=10.0.0.2 dst=1.1.1.1 type=8 code=0 id=5 src=1.1.1.1 dst=100.64.0.1 type=0 code=0 id=9 use=1
sctp     132 7 ESTABLISHED src=2001:db8::1 dst=2001:db8::2 sport=1 dport=2 src=2001:db8::2 dst=2001:db8::1 sport=2 dport=1 use=1
`
	a := NewAggregate(0)
	if _, err := ReadText(t.Context(), strings.NewReader(text), Filter{}, a.add, func(e *LineError) { t.Error(e) }); err != nil {
		t.Fatal(err)
	}
	one, outside := netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("100.64.0.1")
	want := &snapshot.Table{
		Entries:    6,
		ByProtocol: map[string]uint64{"tcp": 3, "udp": 1, "icmp": 1, "sctp": 1},
		ByState:    map[string]uint64{"TIME_WAIT": 1, "ESTABLISHED": 2}, // of TCP
		ByStatus:   map[string]uint64{"ASSURED": 2, "UNREPLIED": 1, "OFFLOAD": 1, "HW_OFFLOAD": 1, "SNAT": 4, "DNAT": 1},
		Sources: []snapshot.Talker{
			{Addr: netip.MustParseAddr("10.0.0.2"), Entries: 3, Unreplied: 1},
			{Addr: netip.MustParseAddr("10.0.0.1"), Entries: 2},
			{Addr: netip.MustParseAddr("2001:db8::1"), Entries: 1},
		},
		Destinations: []snapshot.Talker{
			{Addr: one, Entries: 4, Unreplied: 1},
			{Addr: netip.MustParseAddr("192.168.0.96"), Entries: 1},
			{Addr: netip.MustParseAddr("2001:db8::2"), Entries: 1},
		},
		DestPorts: []snapshot.PortUse{
			{Protocol: "tcp", Port: 443, Entries: 2}, {Protocol: "tcp", Port: 8080, Entries: 1},
			{Protocol: "udp", Port: 443, Entries: 1, Unreplied: 1}, {Protocol: "sctp", Port: 2, Entries: 1},
		},
		SNATPorts: []snapshot.SNATUse{
			{Protocol: "tcp", Outside: outside, Dest: snapshot.EndpointOf(netip.AddrPortFrom(one, 443)), Used: 2, MinPort: 5001, MaxPort: 5005},
			{Protocol: "icmp", Outside: outside, Dest: snapshot.EndpointOf(netip.AddrPortFrom(one, 0)), Used: 1, MinPort: 9, MaxPort: 9},
			{Protocol: "udp", Outside: outside, Dest: snapshot.EndpointOf(netip.AddrPortFrom(one, 443)), Used: 1, MinPort: 1000, MaxPort: 1000},
		},
		Outsides:   []snapshot.OutsideUse{{Addr: outside, Entries: 4}},
		Unanswered: []snapshot.UnansweredUse{{Protocol: "udp", Source: netip.MustParseAddr("10.0.0.2"), Dest: snapshot.EndpointOf(netip.AddrPortFrom(one, 443)), Target: snapshot.EndpointOf(netip.AddrPortFrom(one, 443)), SNAT: true, Entries: 1}},
	}
	if got := a.Table(snapshot.TopN); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := a.Table(1); len(got.Sources) != 1 || len(got.DestPorts) != 1 {
		t.Errorf("one row: %+v", got)
	}

	sums := NewAggregate(NoLists)
	if _, err := ReadText(t.Context(), strings.NewReader(text), Filter{}, sums.add, nil); err != nil {
		t.Fatal(err)
	}
	got := sums.Table(snapshot.TopN)
	if got.Sources != nil || got.Outsides != nil || got.Unanswered != nil || got.Destinations != nil || got.DestPorts != nil || got.SNATPorts != nil {
		t.Errorf("lists that were not asked for: %+v", got)
	}
	if !reflect.DeepEqual(got.ByStatus, want.ByStatus) {
		t.Errorf("sums alone: %+v", got)
	}
}

// What the doctor asks of the entries: how long they have been idle, who was
// answered, which helper they have.
func TestAggregateJudges(t *testing.T) {
	text := `tcp 6 431999 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=1 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=1 [ASSURED] use=1
tcp 6 400000 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=2 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=2 [ASSURED] use=1
tcp 6 290 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=3 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=3 [ASSURED] use=1
tcp 6 200 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=4 dport=443 src=1.1.1.1 dst=100.64.0.1 sport=443 dport=4 [ASSURED] use=1
tcp 6 500000 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=5 dport=443 src=1.1.1.1 dst=10.0.0.1 sport=443 dport=5 [ASSURED] use=1
tcp 6 431990 ESTABLISHED src=10.0.0.1 dst=1.1.1.1 sport=6 dport=443 [UNREPLIED] src=1.1.1.1 dst=10.0.0.1 sport=443 dport=6 use=1
tcp 6 115 SYN_SENT src=192.168.0.2 dst=1.2.3.4 sport=7 dport=80 [UNREPLIED] src=192.168.0.9 dst=192.168.0.2 sport=8080 dport=7 use=1
tcp 6 20 SYN_SENT src=192.168.0.2 dst=1.2.3.4 sport=8 dport=80 [UNREPLIED] src=192.168.0.9 dst=192.168.0.2 sport=8080 dport=8 use=1
udp 17 25 src=192.168.0.3 dst=1.2.3.4 sport=7 dport=53 [UNREPLIED] src=192.168.0.8 dst=100.64.0.2 sport=53 dport=7 use=1
udp 17 100 src=192.168.0.3 dst=1.2.3.4 sport=8 dport=53 src=192.168.0.8 dst=100.64.0.2 sport=53 dport=8 [ASSURED] helper=sip use=1
tcp 6 59 SYN_RECV src=192.168.0.4 dst=1.2.3.4 sport=7 dport=80 src=192.168.0.9 dst=192.168.0.4 sport=8080 dport=7 use=1
tcp 6 58 SYN_RECV src=192.168.0.4 dst=1.2.3.4 sport=8 dport=80 src=192.168.0.9 dst=192.168.0.4 sport=8080 dport=8 use=1
tcp 6 20 SYN_RECV src=192.168.0.4 dst=1.2.3.4 sport=9 dport=80 src=192.168.0.9 dst=192.168.0.4 sport=8080 dport=9 use=1
`
	a := NewAggregate(0)
	a.Timeouts = Timeouts{TCPEstablished: 432000, TCPSynSent: 120, TCPSynRecv: 60, TCPUnacknowledged: 300, TCPMaxRetrans: 300, UDP: 30, UDPStream: 120}
	if _, err := ReadText(t.Context(), strings.NewReader(text), Filter{}, a.add, func(e *LineError) { t.Error(e) }); err != nil {
		t.Fatal(err)
	}
	got := a.Table(snapshot.TopN)
	if got.Idle != 1 || got.OneWay != 1 {
		t.Errorf("idle %d, one way %d; want 1, 1", got.Idle, got.OneWay)
	}
	addr, ap := netip.MustParseAddr, netip.MustParseAddrPort
	if want := []snapshot.OutsideUse{{Addr: addr("100.64.0.1"), Entries: 4, Recent: 2}, {Addr: addr("100.64.0.2"), Entries: 2, Recent: 1, Unanswered: 1}}; !reflect.DeepEqual(got.Outsides, want) {
		t.Errorf("outside addresses %+v\nwant %+v", got.Outsides, want)
	}
	want := []snapshot.UnansweredUse{
		{Protocol: "tcp", Source: addr("192.168.0.2"), Dest: snapshot.EndpointOf(ap("1.2.3.4:80")), Target: snapshot.EndpointOf(ap("192.168.0.9:8080")), Entries: 2, Recent: 1},
		{Protocol: "udp", Source: addr("192.168.0.3"), Dest: snapshot.EndpointOf(ap("1.2.3.4:53")), Target: snapshot.EndpointOf(ap("192.168.0.8:53")), SNAT: true, Entries: 1, Recent: 1},
	}
	if !reflect.DeepEqual(got.Unanswered, want) {
		t.Errorf("unanswered %+v\nwant %+v", got.Unanswered, want)
	}
	// What was answered a moment ago may still be confirmed.
	want = []snapshot.UnansweredUse{{Protocol: "tcp", Source: addr("192.168.0.4"), Dest: snapshot.EndpointOf(ap("1.2.3.4:80")), Target: snapshot.EndpointOf(ap("192.168.0.9:8080")), Entries: 2, Recent: 1}}
	if !reflect.DeepEqual(got.Halfway, want) {
		t.Errorf("answered and not confirmed %+v\nwant %+v", got.Halfway, want)
	}
	for _, c := range got.Sources {
		if want := map[netip.Addr]uint64{addr("192.168.0.2"): 2, addr("192.168.0.4"): 3}[c.Addr]; c.HalfOpen != want {
			t.Errorf("%s has %d half-open connections, want %d", c.Addr, c.HalfOpen, want)
		}
	}
	if want := map[string]uint64{"sip": 1}; !reflect.DeepEqual(got.ByHelper, want) {
		t.Errorf("helpers %v, want %v", got.ByHelper, want)
	}
	// In a shorter time fewer are recent.
	b := NewAggregate(0)
	b.Timeouts, b.Recent = a.Timeouts, 4
	if _, err := ReadText(t.Context(), strings.NewReader(text), Filter{}, b.add, func(e *LineError) { t.Error(e) }); err != nil {
		t.Fatal(err)
	}
	if got := b.Table(snapshot.TopN); got.Unanswered[0].Recent != 0 || got.RecentSeconds != 4 {
		t.Errorf("of the last 4 s: %+v, %d s", got.Unanswered, got.RecentSeconds)
	}
}

// Answers over UDP from another address than was asked, translated on their way or not.
func TestAggregateStrays(t *testing.T) {
	// asked: behind masquerading (two clients), behind a published port, one that was answered,
	// one long ago, one of which the other end has the same port, and one whose "answer" is
	// from another port.
	text := `udp 17 29 src=10.0.0.2 dst=1.1.1.1 sport=5000 dport=1194 [UNREPLIED] src=1.1.1.1 dst=100.64.0.1 sport=1194 dport=5000 use=1
udp 17 29 src=1.1.1.2 dst=100.64.0.1 sport=1194 dport=5000 [UNREPLIED] src=100.64.0.1 dst=1.1.1.2 sport=5000 dport=1194 use=1
udp 17 28 src=1.1.1.2 dst=100.64.0.1 sport=1194 dport=5001 [UNREPLIED] src=100.64.0.1 dst=1.1.1.2 sport=5001 dport=1194 use=1
udp 17 28 src=10.0.0.1 dst=1.1.1.1 sport=6000 dport=1194 [UNREPLIED] src=1.1.1.1 dst=100.64.0.1 sport=1194 dport=5001 use=1
udp 17 29 src=7.7.7.7 dst=100.64.0.1 sport=4000 dport=53 [UNREPLIED] src=10.0.0.53 dst=7.7.7.7 sport=5353 dport=4000 use=1
udp 17 29 src=10.0.0.54 dst=7.7.7.7 sport=5353 dport=4000 [UNREPLIED] src=7.7.7.7 dst=100.64.0.1 sport=4000 dport=5353 use=1
udp 17 29 src=10.0.0.3 dst=1.1.1.1 sport=7000 dport=1194 src=1.1.1.1 dst=100.64.0.1 sport=1194 dport=7000 use=1
udp 17 29 src=1.1.1.3 dst=100.64.0.1 sport=1194 dport=7000 [UNREPLIED] src=100.64.0.1 dst=1.1.1.3 sport=7000 dport=1194 use=1
udp 17 9 src=10.0.0.3 dst=1.1.1.1 sport=7001 dport=1194 [UNREPLIED] src=1.1.1.1 dst=100.64.0.1 sport=1194 dport=7001 use=1
udp 17 9 src=1.1.1.3 dst=100.64.0.1 sport=1194 dport=7001 [UNREPLIED] src=100.64.0.1 dst=1.1.1.3 sport=7001 dport=1194 use=1
udp 17 29 src=10.0.0.3 dst=1.1.1.4 sport=123 dport=123 [UNREPLIED] src=1.1.1.4 dst=100.64.0.1 sport=123 dport=123 use=1
udp 17 29 src=1.1.1.5 dst=100.64.0.1 sport=123 dport=123 [UNREPLIED] src=100.64.0.1 dst=1.1.1.5 sport=123 dport=123 use=1
udp 17 29 src=10.0.0.4 dst=1.1.1.6 sport=8000 dport=69 [UNREPLIED] src=1.1.1.6 dst=100.64.0.1 sport=69 dport=8000 use=1
udp 17 29 src=1.1.1.6 dst=100.64.0.1 sport=3000 dport=8000 [UNREPLIED] src=100.64.0.1 dst=1.1.1.6 sport=8000 dport=3000 use=1
`
	a := NewAggregate(0)
	a.Timeouts = Timeouts{UDP: 30, UDPStream: 120}
	if _, err := ReadText(t.Context(), strings.NewReader(text), Filter{}, a.add, func(e *LineError) { t.Error(e) }); err != nil {
		t.Fatal(err)
	}
	addr, ap := netip.MustParseAddr, netip.MustParseAddrPort
	want := []snapshot.StrayUse{
		{Source: addr("10.0.0.1"), Seen: addr("100.64.0.1"), Dest: snapshot.EndpointOf(ap("1.1.1.1:1194")), Target: snapshot.EndpointOf(ap("1.1.1.1:1194")), From: addr("1.1.1.2"), Flows: 2},
		{Source: addr("7.7.7.7"), Seen: addr("7.7.7.7"), Dest: snapshot.EndpointOf(ap("100.64.0.1:53")), Target: snapshot.EndpointOf(ap("10.0.0.53:5353")), From: addr("10.0.0.54"), Flows: 1},
	}
	if got := a.Table(snapshot.TopN).Strays; !reflect.DeepEqual(got, want) {
		t.Errorf("strays %+v\nwant %+v", got, want)
	}
	if got := a.Table(1).Strays; !reflect.DeepEqual(got, want[:1]) {
		t.Errorf("in one row %+v", got)
	}
}

func TestFilter(t *testing.T) {
	_, flows, _ := readAll(t, goodLine, Filter{})
	f := &flows[0]
	for _, tt := range []struct {
		w    Filter
		want bool
	}{
		{Filter{}, true},
		{Filter{Family: unix.AF_INET}, true},
		{Filter{Family: unix.AF_INET6}, false},
		{Filter{Proto: unix.IPPROTO_UDP}, true},
		{Filter{Proto: unix.IPPROTO_TCP}, false},
		{Filter{States: 1}, false}, // it has no state, not even NONE
		{Filter{Unreplied: true}, false},
		{Filter{Src: netip.MustParsePrefix("10.0.0.0/8")}, true},
		{Filter{Src: netip.MustParsePrefix("11.0.0.0/8")}, false},
		{Filter{Dst: netip.MustParsePrefix("1.1.1.1/32")}, true},
		{Filter{Dst: netip.MustParsePrefix("::/0")}, false},
	} {
		if got := tt.w.Match(f); got != tt.want {
			t.Errorf("%+v: %v", tt.w, got)
		}
	}
}

func TestParseChoices(t *testing.T) {
	for _, tt := range []struct {
		parse func() (any, error)
		want  any
		err   string
	}{
		{func() (any, error) { return ParseFamily("ipv6") }, uint8(unix.AF_INET6), ""},
		{func() (any, error) { return ParseFamily("ip6") }, nil, "want ipv4 or ipv6"},
		{func() (any, error) { return ParseProto("icmpv6") }, uint8(unix.IPPROTO_ICMPV6), ""},
		{func() (any, error) { return ParseProto("89") }, uint8(89), ""},
		{func() (any, error) { return ParseProto("igmp") }, uint8(2), ""},
		{func() (any, error) { return ParseProto("256") }, nil, "number from 1 to 255"},
		{func() (any, error) { return ParseProto("0") }, nil, "number from 1 to 255"},
		{func() (any, error) { return ParseStates("TIME_WAIT,established", 0) }, uint64(1<<TCPTimeWait | 1<<TCPEstablished | 1<<(sctpStates+4)), ""},
		{func() (any, error) { return ParseStates("TIME_WAIT,", 0) }, nil, `"": want NONE`},
		{func() (any, error) { return ParseStates("FOO", 0) }, nil, "want NONE, SYN_SENT"},
		{func() (any, error) { return ParseStates("TIMEWAIT", 0) }, nil, "did you mean TIME_WAIT?"},
		{func() (any, error) { return ParseStates("TIMEWAIT", unix.IPPROTO_TCP) }, nil, "did you mean TIME_WAIT?"},
		{func() (any, error) { return ParseStates("TIMEWAIT", unix.IPPROTO_DCCP) }, uint64(1 << (dccpStates + 7)), ""},
		{func() (any, error) { return ParseStates("SHUTDOWN_SENT", 0) }, uint64(1 << (sctpStates + 5)), ""},
		{func() (any, error) { return ParseStates("TIME_WAIT", unix.IPPROTO_SCTP) }, nil, "want NONE, CLOSED"},
		{func() (any, error) { return ParseStates("TIME_WAIT", unix.IPPROTO_UDP) }, nil, "protocol udp has no states"},
		{func() (any, error) { return ParsePrefix("10.0.0.1") }, netip.MustParsePrefix("10.0.0.1/32"), ""},
		{func() (any, error) { return ParsePrefix("2001:db8::/32") }, netip.MustParsePrefix("2001:db8::/32"), ""},
		{func() (any, error) { return ParsePrefix("fe80::1%eth0") }, nil, "want an address or a prefix"},
	} {
		got, err := tt.parse()
		switch {
		case tt.err != "":
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		case err != nil || got != tt.want:
			t.Errorf("got %v, %v, want %v", got, err, tt.want)
		}
	}
}

// Flows at the port of a protocol that agrees on further connections are told by who has them, those
// without a helper first; a port of such a number over the other transport is another service.
func TestAggregateControls(t *testing.T) {
	client, server, gateway := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("203.0.113.8"), netip.MustParseAddr("198.51.100.1")
	flow := func(proto uint8, port uint16, status Status, helper string) *Flow {
		f := &Flow{Family: unix.AF_INET, Proto: proto, Has: HasState, State: TCPEstablished, Status: status,
			Orig:  Tuple{Src: client, Dst: server, SrcPort: 4000, DstPort: port},
			Reply: Tuple{Src: server, Dst: gateway, SrcPort: port, DstPort: 4000}}
		if helper != "" {
			f.Has |= HasHelper
			f.Helper = []byte(helper)
		}
		return f
	}
	a := NewAggregate(0)
	a.Add(flow(unix.IPPROTO_TCP, 21, StatusSeenReply, "ftp"))
	a.Add(flow(unix.IPPROTO_UDP, 69, 0, ""))   // its reply comes from another port
	a.Add(flow(unix.IPPROTO_TCP, 1723, 0, "")) // not answered: nothing was agreed on
	a.Add(flow(unix.IPPROTO_UDP, 21, StatusSeenReply, ""))
	row := func(proto string, port uint16, helped uint64) snapshot.ControlUse {
		to := netip.AddrPortFrom(server, port)
		return snapshot.ControlUse{Protocol: proto, Source: client, Seen: gateway, Dest: snapshot.EndpointOf(to), Target: snapshot.EndpointOf(to), Entries: 1, Helped: helped}
	}
	want := []snapshot.ControlUse{row("udp", 69, 0), row("tcp", 21, 1)}
	if got := a.Table(10).Controls; !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
