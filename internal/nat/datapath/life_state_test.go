// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// A port at which the gateway itself listens is not given to an internal host, and is free
// again when it listens no more.
func TestPortsOfSockets(t *testing.T) {
	g := aGateway(t)
	for _, h := range hooks {
		g.hook = h
		for _, kind := range []string{"udp", "tcp"} {
			t.Run(h.name+"/"+kind, func(t *testing.T) {
				g.reset(t)
				var socket interface{ Close() error }
				g.do(t, func() (err error) {
					if kind == "udp" {
						socket, err = net.ListenPacket("udp4", "203.0.113.1:5000")
					} else {
						socket, err = net.Listen("tcp4", "203.0.113.1:5000")
					}
					return err
				})
				defer socket.Close()
				class := map[string]abiNatClass{"udp": abiNatClassNAT_UDP, "tcp": abiNatClassNAT_TCP}[kind]
				free := g.freePorts(t, ownAddress, class)
				reason, out := g.send(t, inside, kind, pktbuild.SYN, ends("192.168.1.2:5000", "198.51.100.9:53"))
				if reason != sent || out.sport == 5000 {
					t.Errorf("%v: %v has the port of a socket", reason, out)
				}
				// Of a pool address the gateway's sockets know nothing.
				g.want(t, inside, kind, pktbuild.SYN, ends("192.168.3.2:5000", "198.51.100.9:53"), sent, ends("203.0.113.18:5000", "198.51.100.9:53"))
				if now := g.freePorts(t, ownAddress, class); now != free-1 {
					t.Errorf("%d ports are free, want %d: one was taken", now, free-1)
				}
				socket.Close()
				ktest.Wait(t, 10*time.Second, "the port to be given", func() bool { // a socket goes a moment later
					_, out = g.send(t, inside, kind, pktbuild.SYN, ends("192.168.1.4:5000", "198.51.100.9:53"))
					if out.sport != 5000 {
						g.reset(t)
					}
					return out.sport == 5000
				})
			})
		}
	}
}

// parseFile reads a rule file for a modelRig.
func parseFile(t *testing.T, text string) *rulefile.File {
	t.Helper()
	f, err := rulefile.Parse("test.yaml", []byte("inside: [in, in2]\noutside: [out]\n"+text))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// udpOut is a datagram of an internal host.
var udpOut = modelPacket{
	modelKey: modelKey{true, rulefile.UDP, modelEnds{netip.MustParseAddrPort("192.168.1.2:5000"), netip.MustParseAddrPort("198.51.100.9:53")}},
	link:     "in", ttl: 64, length: 50,
}

// meets sends a packet and checks how it ends, and if it is translated as what.
func (r *modelRig) meets(t *testing.T, p modelPacket, reason abiNatReason, want modelEnds) {
	t.Helper()
	saw, err := r.send(t, p)
	if err != nil || saw.reason != reason || isTranslated(saw) && saw.ends != want {
		t.Errorf("%v: %v, want %v %v (%v)", p, saw, rulefile.Reason(reason), want, err)
	}
}

// When the outside interface has another address, sessions behind the old one end within
// a second, and what comes next is behind the new one.
func TestMasqueradeMoves(t *testing.T) {
	r := aModelRig(t)
	r.seed(1)
	r.forget(t, parseFile(t, "rules: []\n"))
	f := parseFile(t, "rules:\n  - masquerade: any\n")
	r.model = newModel(f, r.facts, r.route)
	facts := r.facts
	facts.Links = slices.Clone(facts.Links)
	apply := func() *Tables {
		t.Helper()
		tables, err := Compile(f, facts)
		if err != nil {
			t.Fatal(err)
		}
		r.do(t, func() error { return r.engine.Apply(tables) })
		return tables
	}
	tables := apply()
	behind := func(a string) modelEnds {
		return modelEnds{netip.AddrPortFrom(netip.MustParseAddr(a), 5000), udpOut.dst}
	}
	r.meets(t, udpOut, sent, behind("203.0.113.1"))

	// The rule goes, the address stays: so does what there is.
	f.Rules = nil
	facts.Addresses = tables.Addresses
	tables = apply()
	r.pass(t, 2*time.Second)
	r.meets(t, udpOut, sent, behind("203.0.113.1"))

	f = parseFile(t, "rules:\n  - masquerade: any\n")
	facts.Addresses = tables.Addresses
	facts.Local = []netip.Addr{netip.MustParseAddr("203.0.113.9"), gatewayIn}
	facts.Links[len(facts.Links)-1].Addresses = []netip.Prefix{netip.MustParsePrefix("203.0.113.9/24")}
	apply()
	r.pass(t, 2*time.Second)
	r.meets(t, udpOut, abiNatReasonNAT_DROP_RACE, modelEnds{})
	for key, flow := range flowsOf(t, r.maps) {
		if flow.State&uint32(abiNatFlowStateNAT_FLOW_DEAD) == 0 {
			t.Errorf("%v is not dead", key)
		}
		if _, known := flowOf(t, r.maps, key); known {
			t.Errorf("%v is still found", key)
		}
	}
	r.meets(t, udpOut, sent, behind("203.0.113.9"))
	r.pass(t, 2*time.Second)
	r.meets(t, udpOut, sent, behind("203.0.113.9"))
}

// Sessions live as long as the rule file says, and no longer.
func TestTimeoutsOfTheFile(t *testing.T) {
	r := aModelRig(t)
	r.seed(1)
	f := parseFile(t, `
rules:
  - masquerade: 192.168.0.0/16
defaults:
  timeouts: {udp: 125s, tcp_opening: 245s, tcp_established: 7445s, tcp_closing: 255s, tcp_reset: 265s, icmp: 65s, other: 305s}
`)
	r.model = newModel(f, r.facts, r.route)
	type step struct {
		out                bool
		syn, ack, fin, rst bool
	}
	syn, synAck := step{out: true, syn: true}, step{syn: true, ack: true}
	for _, test := range []struct {
		name     string
		protocol rulefile.Protocol
		steps    []step
		timeout  time.Duration
		late     abiNatReason // of an answer after it
	}{
		{"udp", rulefile.UDP, []step{{out: true}}, 125 * time.Second, abiNatReasonNAT_DROP_FILTERED},
		{"udplite", rulefile.UDPLite, []step{{out: true}}, 125 * time.Second, abiNatReasonNAT_DROP_FILTERED},
		{"icmp", rulefile.ICMP, []step{{out: true}}, 65 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
		{"other", rulefile.GRE, []step{{out: true}}, 305 * time.Second, abiNatReasonNAT_PASS_LOCAL},
		{"tcp_opening", rulefile.TCP, []step{syn}, 245 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
		{"tcp_established", rulefile.TCP, []step{syn, synAck}, 7445 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
		{"half closed", rulefile.TCP, []step{syn, synAck, {out: true, fin: true, ack: true}}, 7445 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
		{"tcp_closing", rulefile.TCP, []step{syn, synAck, {out: true, fin: true, ack: true}, {fin: true, ack: true}}, 255 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
		{"tcp_reset", rulefile.TCP, []step{syn, synAck, {rst: true}}, 265 * time.Second, abiNatReasonNAT_DROP_NO_SESSION},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, late := range []bool{false, true} {
				r.forget(t, f)
				p := udpOut
				p.protocol = test.protocol
				switch p.protocol {
				case rulefile.ICMP:
					p.query, p.dst = true, netip.AddrPortFrom(p.dst.Addr(), 0)
				case rulefile.GRE:
					p.src, p.dst = netip.AddrPortFrom(p.src.Addr(), 0), netip.AddrPortFrom(p.dst.Addr(), 0)
				}
				to := modelEnds{netip.AddrPortFrom(gatewayOut, p.src.Port()), p.dst}
				answer := r.answer(modelPacket{modelKey: modelKey{protocol: p.protocol, modelEnds: to}, ttl: 64, length: 50})
				for _, s := range test.steps {
					q, want, reason := answer, modelEnds{p.dst, p.src}, back
					if s.out {
						q, want, reason = p, to, sent
					}
					q.syn, q.ack, q.fin, q.rst = s.syn, s.ack, s.fin, s.rst
					r.meets(t, q, reason, want)
				}
				answer.ack = true
				if !late {
					r.pass(t, test.timeout-2*time.Second)
					r.meets(t, answer, back, modelEnds{p.dst, p.src})
					continue
				}
				r.pass(t, test.timeout+time.Second)
				r.meets(t, answer, test.late, modelEnds{})
			}
		})
	}
}

// What XDP leaves to tc is counted once, and is no later there: not when it ends a connection
// that was idle for longer than the time-out of what comes after the end.
func TestLeftToTC(t *testing.T) {
	r := aModelRig(t)
	r.seed(1)
	f := parseFile(t, "rules:\n  - masquerade: 192.168.0.0/16\n")
	r.model = newModel(f, r.facts, r.route)
	facts := r.facts
	facts.Links = slices.Clone(facts.Links)
	for i := range facts.Links {
		facts.Links[i].Transmit = false
	}
	tables, err := Compile(f, facts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.forget(t, f) })
	outside := modelEnds{netip.AddrPortFrom(gatewayOut, udpOut.src.Port()), udpOut.dst}
	send := func(t *testing.T, inward bool, flags uint8) {
		t.Helper()
		p, way, side, last := udpOut, r.in, inside, sent
		p.protocol = rulefile.TCP
		if inward {
			p.modelEnds, way, side, last = modelEnds{outside.dst, outside.src}, r.out, outer, back
		}
		p.syn, p.ack, p.fin, p.rst = flags&pktbuild.SYN > 0, flags&pktbuild.ACK > 0, flags&pktbuild.FIN > 0, flags&pktbuild.RST > 0
		frame := way.arriving(p.ip(p.modelEnds)).Bytes()
		for i, want := range []abiNatReason{abiNatReasonNAT_PASS_TO_TC, last} {
			if _, _, reason, err := r.end(t, hooks[i], side, way, frame); err != nil || reason != want {
				t.Fatalf("%v at %s: %v, want %v (%v)", p, hooks[i].name, rulefile.Reason(reason), rulefile.Reason(want), err)
			}
		}
	}
	for name, end := range map[string]uint8{"FIN": pktbuild.FIN | pktbuild.ACK, "RST": pktbuild.RST} {
		t.Run(name, func(t *testing.T) {
			r.forget(t, f)
			r.do(t, func() error { return r.engine.Apply(tables) })
			send(t, false, pktbuild.SYN)
			send(t, true, pktbuild.SYN|pktbuild.ACK)
			send(t, true, pktbuild.FIN|pktbuild.ACK)
			r.pass(t, 600*time.Second) // time-outs after the end: 240 s
			send(t, false, end)
			for key, flow := range flowsOf(t, r.maps) {
				if flow.Packets != 2 || flow.Bytes != 2*uint64(udpOut.length) {
					t.Errorf("%v counts %d packets and %d bytes, want 2 and %d", key, flow.Packets, flow.Bytes, 2*udpOut.length)
				}
			}
		})
	}
}

// A packet that is not forwarded changes no state of its connection, at neither hook: a RST whose
// TTL is exceeded does not end it, however long it was idle, and the sender gets its ICMP error.
func TestNotForwarded(t *testing.T) {
	r := aModelRig(t)
	r.seed(1)
	f := parseFile(t, "rules:\n  - masquerade: 192.168.0.0/16\n")
	r.model = newModel(f, r.facts, r.route)
	t.Cleanup(func() { r.forget(t, f) })
	out := udpOut
	out.protocol = rulefile.TCP
	in := out
	in.inside, in.link, in.modelEnds = false, "out", modelEnds{out.dst, netip.AddrPortFrom(gatewayOut, out.src.Port())}
	states := func() map[abiNatFlowKey]uint32 {
		all := map[abiNatFlowKey]uint32{}
		for key, flow := range flowsOf(t, r.maps) {
			all[key] = flow.State
		}
		return all
	}
	for _, test := range []struct {
		name   string
		packet modelPacket
		ttl    uint8
		length int
		want   abiNatReason
	}{
		{"out, TTL", out, 1, 50, abiNatReasonNAT_PASS_TTL},
		{"out, MTU", out, 64, outsideMTU + 1, abiNatReasonNAT_PASS_TOO_BIG},
		{"in, TTL", in, 1, 50, abiNatReasonNAT_DROP_TTL},
	} {
		for name, set := range map[string]func(*modelPacket){
			"RST": func(p *modelPacket) { p.rst = true },
			"FIN": func(p *modelPacket) { p.fin, p.ack = true, true },
		} {
			for first, h := range hooks {
				t.Run(test.name+" "+name+" "+h.name, func(t *testing.T) {
					r.forget(t, f)
					p := test.packet
					set(&p)
					p.ttl, p.length = test.ttl, test.length
					r.halfClosed(t, out, in, p.inside)
					r.pass(t, 600*time.Second) // time-outs after the end: 240 s
					before := states()
					if reason := r.endsFrom(t, first, p); reason != test.want {
						t.Errorf("%v: %v, want %v", p, rulefile.Reason(reason), rulefile.Reason(test.want))
					}
					if after := states(); !maps.Equal(before, after) {
						t.Errorf("states were %x, are %x", before, after)
					}
				})
			}
		}
	}
}

// halfClosed makes a connection, which one side has ended: the external host if byRemote.
func (r *modelRig) halfClosed(t *testing.T, out, in modelPacket, byRemote bool) {
	t.Helper()
	outside, internal := modelEnds{in.dst, in.src}, modelEnds{out.dst, out.src}
	out.syn = true
	r.meets(t, out, sent, outside)
	in.syn, in.ack = true, true
	r.meets(t, in, back, internal)
	if byRemote {
		in.syn, in.fin = false, true
		r.meets(t, in, back, internal)
		return
	}
	out.syn, out.fin, out.ack = false, true, true
	r.meets(t, out, sent, outside)
}

// endsFrom is how a packet ends that first comes to that hook.
func (r *modelRig) endsFrom(t *testing.T, first int, p modelPacket) abiNatReason {
	t.Helper()
	way, side := r.ports[p.link], inside
	if !p.inside {
		side = outer
	}
	frame := way.arriving(p.ip(p.modelEnds)).Bytes()
	reason := abiNatReasonNAT_PASS_TO_TC
	for i := first; i < len(hooks) && reason == abiNatReasonNAT_PASS_TO_TC; i++ {
		var err error
		if _, _, reason, err = r.end(t, hooks[i], side, way, frame); err != nil {
			t.Fatal(err)
		}
	}
	return reason
}

// Packets from outside keep a session alive if it is so configured, and otherwise do not;
// those of the internal host always do.
func TestInboundRefresh(t *testing.T) {
	g := aGateway(t)
	refresh := func(on bool) {
		g.configure(t, func(c *abiNatConfig) {
			if on {
				c.Flags = uint32(abiNatConfigFlagNAT_CONFIG_INBOUND_REFRESH)
			}
		})
	}
	refresh(true)
	long := now() - ticks(100) // time-outs are a minute
	flows := map[string]abiNatFlowKey{}
	whose := map[uint16]string{} // by the port
	for i := range uint16(3) {
		e := ends("192.168.1.9:7000", "198.51.100.9:53")
		e.sport += i
		g.send(t, inside, "udp", 0, e)
	}
	changeFlows(t, g.maps, func(flow *abiNatFlow) {
		if flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0 {
			who := []string{"heard", "speaking", "silent"}[len(whose)] // in the order that GC looks at them
			whose[flow.Key.Sport] = who
			flows[who] = packetKey(flow)
		}
	})
	changeFlows(t, g.maps, func(flow *abiNatFlow) {
		owner := flow.State&uint32(abiNatFlowStateNAT_FLOW_OWNER) != 0
		who := whose[flow.Key.Dport]
		if owner {
			who = whose[flow.Key.Sport]
		}
		flow.Seen = now() - ticks(50)
		if who == "silent" || owner == (who == "heard") {
			flow.Seen = long
		}
	})
	dead := func(who string) bool {
		flow, known := flowOf(t, g.maps, flows[who])
		return !known || flow.State&uint32(abiNatFlowStateNAT_FLOW_DEAD) != 0
	}
	defer g.startGC(t)()
	ktest.Wait(t, 30*time.Second, "the silent session ends", func() bool { return dead("silent") })
	if dead("heard") || dead("speaking") {
		t.Error("a session that was heard of has ended")
	}
	refresh(false)
	ktest.Wait(t, 30*time.Second, "the session ends that only outside keeps alive", func() bool { return dead("heard") })
	if dead("speaking") {
		t.Error("a session has ended whose internal host speaks")
	}
}

// A reader goes on hearing of events when another one ends.
func TestEventsOfTwo(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.configure(t, short)
	e := engineOn(t, g.maps)
	made := func() bool {
		var c abiNatConfig
		return g.maps["config"].Lookup(uint32(0), &c) == nil && c.Flags&uint32(abiNatConfigFlagNAT_CONFIG_EVENTS) != 0
	}
	read := func() (stop func()) {
		if err := e.enableEvents(false); err != nil { // so that it shows when this one listens
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- e.Events(ctx, func(*rulefile.Event) bool { return true }) }()
		ktest.Wait(t, 10*time.Second, "somebody to listen", made)
		return func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	first, second := read(), read()
	first()
	ktest.Wait(t, 10*time.Second, "events for the other reader", made)
	if second(); made() {
		t.Error("events are made, and nobody reads them")
	}
}

// Who reads events hears of every session that is made, ends or is refused, with what went
// through it.
func TestEvents(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.ready(t, hooks, "_inside")
	g.configure(t, func(c *abiNatConfig) {
		short(c)
		limitSessions(c, 1)
		c.IcmpPerSecond = 1000
	})
	e := engineOn(t, g.maps)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	heard, ended := make(chan rulefile.Event, 100), make(chan error, 1)
	go func() { ended <- e.Events(ctx, func(ev *rulefile.Event) bool { heard <- *ev; return true }) }()
	ktest.Wait(t, 10*time.Second, "somebody to listen", func() bool {
		var c abiNatConfig
		return g.maps["config"].Lookup(uint32(0), &c) == nil && c.Flags&uint32(abiNatConfigFlagNAT_CONFIG_EVENTS) != 0
	})
	want := func(kind, reason, source string, packets [2]uint64) {
		t.Helper()
		select {
		case ev := <-heard:
			s := ev.Session
			if ev.Kind != kind || ev.Reason != reason || s.Source.String() != source || s.Protocol != rulefile.UDP || s.From != "inside" || s.Packets != packets {
				t.Errorf("event %+v, want %s %s of %s with %v packets", ev, kind, reason, source, packets)
			}
			if reason == "" && (s.SourceAfter.String() != "203.0.113.1:5000" || s.DestinationAfter.String() != "198.51.100.9:53" || s.Rule != masqueradeRule) {
				t.Errorf("session %+v", s)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no event %s", kind)
		}
	}
	out := ends("192.168.1.2:5000", "198.51.100.9:53")
	g.send(t, inside, "udp", 0, out)
	want("created", "", "192.168.1.2:5000", [2]uint64{0, 0})
	g.send(t, inside, "udp", 0, out)
	g.send(t, outer, "udp", 0, endpoints{world, gatewayOut, 53, 5000})
	frame := g.in.arriving(packet("udp", 0, ends("192.168.1.2:5001", "198.51.100.9:53"))).Bytes()
	for _, h := range hooks { // XDP leaves it to tc, which answers: one event
		g.enter(t, h, inside, g.in, frame)
	}
	want("refused", "source-limit", "192.168.1.2:5001", [2]uint64{})
	defer g.startGC(t)()
	want("ended", "", "192.168.1.2:5000", [2]uint64{2, 1})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	select {
	case ev := <-heard:
		t.Errorf("another event: %+v", ev)
	default:
	}
}

// What is refused for want of resources is answered to internal hosts as administratively
// prohibited (RFC 5508 REQ-8, RFC 6888 REQ-11), to nobody outside.
func TestICMPProhibited(t *testing.T) {
	g := aGateway(t)
	refuse := func(t *testing.T, side abiNatSide, in pktbuild.IPv4, reason abiNatReason, answered bool) {
		t.Helper()
		way := g.sidePort(side)
		frame := way.arriving(in).Bytes()
		left := reason // at XDP
		if answered {
			left = abiNatReasonNAT_PASS_TO_TC
		}
		if _, _, got := g.enter(t, hooks[0], side, way, frame); got != left {
			t.Errorf("xdp: %s, want %s", rulefile.Reason(got), rulefile.Reason(left))
		}
		verdict, got, err := g.run(t, hooks[1], side, way, frame, 0)
		if err != nil {
			t.Fatal(err)
		}
		counted := g.counted(t)
		if counted[reason] != 1 || (counted[abiNatReasonNAT_ICMP_SENT] == 1) != answered {
			t.Errorf("counted %v, want %s", counted, rulefile.Reason(reason))
		}
		if !answered {
			if verdict != tcShot {
				t.Errorf("verdict %d, want a drop", int32(verdict))
			}
			return
		}
		from := gatewayIn
		if netip.AddrFrom4([4]byte(got[26:30])) == in.Dst { // before Linux 6.7 the address of the ingress interface is not known
			from = in.Dst
		}
		want := way.leaving(pktbuild.IPv4{Src: from, Dst: in.Src, TTL: 64, TOS: 0xc0, Payload: icmpError(3, 13, 0, in, 0, nil)}).Bytes()
		if verdict != tcRedirect || string(got) != string(want) {
			t.Errorf("verdict %d, and the answer is not as it should be:\n%s", int32(verdict), differ(got, want))
		}
	}
	begin := func(limit uint32) {
		g.reset(t)
		g.configure(t, func(c *abiNatConfig) { c.IcmpPerSecond = 1000; limitSessions(c, limit) })
		g.counted(t)
	}
	udp := func(src string) pktbuild.IPv4 { return packet("udp", 0, ends(src, "198.51.100.9:53")) }
	g.hook = hooks[1]

	begin(1)
	g.send(t, inside, "udp", 0, ends("192.168.1.2:5000", "198.51.100.9:53"))
	refuse(t, inside, udp("192.168.1.2:5001"), abiNatReasonNAT_DROP_SOURCE_LIMIT, true)
	refuse(t, inside, packet("tcp", pktbuild.SYN, ends("192.168.1.2:5001", "198.51.100.9:53")), abiNatReasonNAT_DROP_SOURCE_LIMIT, true)
	for _, s := range entries[abiNatSourceKey, abiNatSource](t, g.maps["sources"]) {
		if s.Refused[abiNatRefusalNAT_REFUSED_SESSIONS] != 2 { // by the hook that drops, not also by the one that leaves it to that
			t.Errorf("a subscriber with two packets refused was refused %v", s.Refused)
		}
	}

	begin(0)
	for n := range 4 {
		g.send(t, inside, "udp", 0, ends(fmt.Sprintf("192.168.8.2:%d", 4000+n), "198.51.100.9:53"))
	}
	refuse(t, inside, udp("192.168.8.2:4010"), abiNatReasonNAT_DROP_NO_PORT, true)

	begin(0)
	g.send(t, inside, "udp", 0, ends("192.168.5.2:1", "198.51.100.9:53"))
	g.send(t, inside, "udp", 0, ends("192.168.5.3:1", "198.51.100.9:53"))
	refuse(t, inside, udp("192.168.5.4:1"), abiNatReasonNAT_DROP_NO_ADDRESS, true)

	begin(0)
	useUp(t, g.maps["counts"])
	refuse(t, inside, udp("192.168.1.2:5000"), abiNatReasonNAT_DROP_SESSIONS_FULL, true)
	refuse(t, outer, packet("tcp", pktbuild.SYN, ends("198.51.100.9:1", "203.0.113.1:8080")), abiNatReasonNAT_DROP_SESSIONS_FULL, false)

	begin(0)
	refuse(t, outer, packet("tcp", pktbuild.SYN, ends("198.51.100.9:1", "203.0.113.16:1024")), abiNatReasonNAT_DROP_NO_MAPPING, false)
}
