// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	tracing "natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/snapshot"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// traceIn traces a flow in a lab while send runs, until a packet is as wanted. send is run again
// and again until then.
func traceIn(t *testing.T, l *lab.Lab, flow string, send func(), wanted func(trace.Packet) bool) (found *trace.Packet, all []trace.Packet) {
	t.Helper()
	f, err := trace.ParseFlow(flow)
	if err != nil {
		t.Fatal(err)
	}
	r, err := tracing.Open(tracing.Options{Flow: f, Rate: 1000, Programs: packetPrograms})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			send()
		}
	}()
	err = r.Watch(ctx, func(p trace.Packet) error {
		if !strings.HasPrefix(p.Steps[0].Namespace, l.Name()+"-") { // of another test's lab
			return nil
		}
		all = append(all, p)
		if found == nil && wanted(p) {
			found = &p
			stop()
		}
		return nil
	})
	<-done
	if err != nil {
		t.Fatal(err)
	}
	return found, all
}

// packetPrograms opens natkit's own programs of a namespace.
func packetPrograms(ref string) (tracing.Program, error) {
	p, err := control.OpenPacketReader(ref)
	if p == nil {
		return nil, err // not a nil of another type
	}
	return p, err
}

// datagramEach sends one datagram from a node, from a port of its own each time, and waits a bit.
func datagramEach(l *lab.Lab, role, to string) func() {
	return func() {
		_ = l.Node(role).Do(func() error {
			c, err := net.Dial("udp4", to)
			if err != nil {
				return err
			}
			defer c.Close()
			_, _ = c.Write([]byte("x"))
			_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
			return err
		})
	}
}

// The steps of natkit's own engine are told: which rule, which session, why it drops.
func TestTraceEngine(t *testing.T) {
	ktest.Root(t)
	for _, attach := range []control.Attach{control.AttachTC, control.AttachXDP} {
		t.Run(string(attach), func(t *testing.T) {
			l := engineLab(t, attach, "rules:\n  - masquerade: CLIENTS\n    ports: 5000-5000\n")
			to := netip.AddrPortFrom(l.ServerNode().Addr, 9)
			send := datagramEach(l, "client", to.String())
			found, all := traceIn(t, l, "udp any -> "+to.String(), send, func(p trace.Packet) bool {
				return slices.ContainsFunc(p.Steps, func(s trace.Step) bool {
					return s.What == trace.Bypassed && s.Namespace == l.Name()+"-gateway" &&
						strings.Contains(s.Detail, "eBPF engine (") && strings.Contains(s.Detail, "rule 1 `masquerade: ") && strings.Contains(s.Detail, "session created") &&
						strings.HasPrefix(s.After, l.Options().Addresses.Far.Addr().String()+":5000")
				})
			})
			if found == nil {
				t.Fatalf("no packet shows what the engine did: %s", brief(all))
			}
			if attach == control.AttachXDP { // what is dropped there is no packet of the stack; what is forwarded is joined again
				other := engineLab(t, attach, "rules:\n  - masquerade: CLIENTS\n")
				crossedAtXDP(t, other, netip.AddrPortFrom(other.ServerNode().Addr, 9))
				return
			}
			found, all = traceIn(t, l, "udp any -> "+to.String(), send, func(p trace.Packet) bool {
				return p.End.Outcome == trace.Died && strings.Contains(p.End.Why, "eBPF engine (") && strings.Contains(p.End.Why, "no-port: ")
			})
			if found == nil {
				t.Errorf("no packet shows why the engine drops: %s", brief(all))
			}
		})
	}
	t.Run("accel", func(t *testing.T) {
		l := upForTrace(t, "routed", lab.Options{Rules: lab.RulesNft})
		ns := l.NATNode().Handle()
		chains, err := probe.Chains(ns)
		if err == nil {
			_, err = control.AccelOn(t.Context(), control.AccelOptions{Namespace: ns, Interfaces: []string{"eth0", "eth1"}, Attach: control.AttachTC, Chains: chains})
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = control.AccelOff(ns) }) // with the lab all of it goes
		to := netip.AddrPortFrom(l.ServerNode().Addr, 9)
		answerDatagrams(t, l, to)
		var c net.Conn
		if err := l.Node("client").Do(func() (err error) {
			c, err = net.Dial("udp4", to.String())
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		found, all := traceIn(t, l, "udp any -> "+to.String(), func() {
			_, _ = c.Write([]byte("x"))
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			_, _ = c.Read(make([]byte, 1))
		}, func(p trace.Packet) bool {
			return slices.ContainsFunc(p.Steps, func(s trace.Step) bool {
				return s.What == trace.Bypassed && strings.Contains(s.Detail, "accel: forwarded by fast-path entry")
			})
		})
		if found == nil {
			t.Errorf("no packet shows the fast path: %s", brief(all))
		}
	})
}

// crossedAtXDP traces a packet that the gateway forwards at XDP: no packet of its stack.
func crossedAtXDP(t *testing.T, l *lab.Lab, to netip.AddrPort) {
	t.Helper()
	takeXDP(t, l)
	var c net.Conn
	if err := l.Node("client").Do(func() (err error) {
		c, err = net.Dial("udp4", to.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	answerDatagrams(t, l, to)
	found, all := traceIn(t, l, "udp any -> "+to.String(), func() {
		_, _ = c.Write([]byte("x"))
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, _ = c.Read(make([]byte, 1))
	}, func(p trace.Packet) bool {
		gateway := func(s trace.Step) bool { return s.Namespace == l.Name()+"-gateway" }
		i := slices.IndexFunc(p.Steps, gateway)
		return i > 0 && p.Steps[i].What == trace.Bypassed && strings.Contains(p.Steps[i].Detail, "rule 1 `masquerade: ") &&
			!slices.ContainsFunc(p.Steps[i+1:], gateway) && i+1 < len(p.Steps)
	})
	if found == nil {
		t.Errorf("no packet is followed through XDP: %s", brief(all))
	}
}

// takeXDP has the hosts take frames from XDP: veth does so only with NAPI.
func takeXDP(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, role := range []string{"client", "server"} {
		if out, err := l.Node(role).Command(t.Context(), ktest.Tool(t, "ethtool"), "-K", "eth0", "tx", "off", "gro", "on").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// shortConnection is one connection, from its first packet to its last: a request and a reply.
func shortConnection(l *lab.Lab, to string) error {
	return l.Node("client").Do(func() error {
		c, err := net.DialTimeout("tcp4", to, 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err = c.Write([]byte("x")); err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		return err
	})
}

// replyToRequests replies to each connection, and closes it.
func replyToRequests(t *testing.T, l *lab.Lab, at netip.AddrPort) {
	t.Helper()
	if err := l.ServerNode().Do(func() error {
		listener, err := net.Listen("tcp4", at.String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { listener.Close() })
		go func() {
			for {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				if _, err := c.Read(make([]byte, 1)); err == nil {
					_, _ = c.Write([]byte("y"))
				}
				c.Close()
			}
		}()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// A connection through the engine is followed from its first packet on, in both directions and in all namespaces, however late natkit
// comes to read what the kernel reports of it.
func TestTraceEngineShort(t *testing.T) {
	ktest.Root(t)
	for _, attach := range []control.Attach{control.AttachTC, control.AttachXDP} {
		t.Run(string(attach), func(t *testing.T) {
			l := engineLab(t, attach, "rules:\n  - masquerade: CLIENTS\n")
			if attach == control.AttachXDP {
				takeXDP(t, l)
			}
			to := netip.AddrPortFrom(l.ServerNode().Addr, 80)
			replyToRequests(t, l, to)
			if err := shortConnection(l, to.String()); err != nil { // the neighbours are known
				t.Fatal(err)
			}
			r, err := tracing.Open(tracing.Options{Flow: trace.Flow{Protocol: "tcp", B: trace.Side{Addresses: netip.PrefixFrom(to.Addr(), 32), Port: 80}},
				Netns: l.Node("client").Handle().Inode(), Rate: 100000, Programs: packetPrograms})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			const connections = 20
			for range connections { // nobody reads until they are over
				if err := shortConnection(l, to.String()); err != nil {
					t.Fatal(err)
				}
			}
			ctx, stop := context.WithTimeout(t.Context(), time.Second) // what is there is complete by then
			defer stop()
			var lacking []trace.Packet
			seen := map[int]map[string]bool{} // by connection: what came to the other side through the engine
			if err := r.Watch(ctx, func(p trace.Packet) error {
				// Other packages' tests have the same addresses, and packets that no device has received.
				if !slices.ContainsFunc(p.Steps, func(s trace.Step) bool { return strings.HasPrefix(s.Namespace, l.Name()+"-") }) {
					return nil
				}
				if seen[p.Connection] == nil {
					seen[p.Connection] = map[string]bool{}
				}
				from, to := "-client", "-server"
				if p.Reply {
					from, to = to, from
				}
				if p.Steps[0].Namespace == l.Name()+from && p.Steps[len(p.Steps)-1].Namespace == l.Name()+to && slices.ContainsFunc(p.Steps, func(s trace.Step) bool {
					return s.What == trace.Bypassed && s.Namespace == l.Name()+"-gateway" && strings.Contains(s.Detail, "rule 1 `masquerade: ")
				}) {
					seen[p.Connection][fmt.Sprint(p.Kind, p.Reply)] = true
				} else {
					lacking = append(lacking, p)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			whole := 0
			for _, kinds := range seen {
				if kinds["SYNfalse"] && kinds["SYN,ACKtrue"] && kinds["PSH,ACKfalse"] && kinds["PSH,ACKtrue"] {
					whole++
				}
			}
			if whole != connections || len(seen) != connections || len(lacking) > 0 {
				t.Errorf("of %d connections %d are seen, %d of them whole; %d packets are not, the last ones: %s", connections, len(seen), whole, len(lacking), brief(lacking))
			}
		})
	}
}

// A ping through the engine is matched to its session by its identifier, in both directions, beside another one of the same hosts.
func TestTraceEnginePing(t *testing.T) {
	ktest.Root(t)
	for _, attach := range []control.Attach{control.AttachTC, control.AttachXDP} {
		t.Run(string(attach), func(t *testing.T) {
			l := engineLab(t, attach, "rules:\n  - masquerade: CLIENTS\n")
			if attach == control.AttachXDP {
				takeXDP(t, l)
			}
			to := l.ServerNode().Addr
			var c net.Conn
			if err := l.Node("client").Do(func() (err error) {
				c, err = net.Dial("ip4:icmp", to.String())
				return err
			}); err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			sequence := uint16(0)
			send := func() {
				sequence++
				for _, id := range []uint16{7001, 7002} {
					ping := pktbuild.IPv4{Src: l.Options().Addresses.Client.Addr(), Dst: to, Payload: pktbuild.Echo(8, id, sequence, []byte("ping"))}
					_, _ = c.Write(ping.Bytes()[20:])
				}
				_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				_, _ = c.Read(make([]byte, 100))
			}
			shown := map[string]int{} // which ping and direction, and its connection
			_, all := traceIn(t, l, "icmp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String(), send, func(p trace.Packet) bool {
				for _, s := range p.Steps {
					if s.What != trace.Bypassed || s.Namespace != l.Name()+"-gateway" || !strings.Contains(s.Detail, "rule 1 `masquerade: ") {
						continue
					}
					inside := s.Before
					if p.Reply {
						inside = s.After
					}
					if _, id, ok := strings.Cut(inside, " id "); ok {
						shown[fmt.Sprint(id, p.Reply)] = p.Connection
					}
				}
				return len(shown) == 4
			})
			if len(shown) != 4 || shown["7001false"] != shown["7001true"] || shown["7002false"] != shown["7002true"] || shown["7001true"] == shown["7002true"] {
				t.Errorf("shown are %v; the last packets: %s", shown, brief(all))
			}
		})
	}
}

// refusal is how packets come to be dropped by the engine for a reason.
type refusal struct {
	rules string
	from  string // a role
	send  func(l *lab.Lab, n int) []pktbuild.IPv4
}

// provoked are drops of the engine for each reason that packets of hosts lead to.
var provoked = map[string]refusal{
	"source-limit": {"limits: {sessions_per_source: 1}\nrules:\n  - masquerade: CLIENTS\n", "client", freshDatagrams},
	"port-limit":   {"subscribers: {by: address, classes: {default: {ports: 1}}}\nrules:\n  - masquerade: CLIENTS\n", "client", freshDatagrams},
	"rate-limit":   {"subscribers: {by: address, classes: {default: {new_per_second: 1}}}\nrules:\n  - masquerade: CLIENTS\n", "client", freshDatagrams},
	"no-port":      {"rules:\n  - masquerade: CLIENTS\n    ports: 5000-5000\n", "client", freshDatagrams},
	"no-block": {"pools: {cgn: {addresses: 203.0.113.9, blocks: {size: 4096}}}\nrules:\n  - {snat: CLIENTS, to: cgn}\n", "client", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		p := freshDatagrams(l, n)
		p[0].Src = netip.AddrFrom4([4]byte{192, 168, 0, byte(20 + n%100)})
		return p
	}},
	"no-session": {"rules:\n  - masquerade: CLIENTS\n", "client", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		return []pktbuild.IPv4{{Src: l.Options().Addresses.Client.Addr(), Dst: l.ServerNode().Addr, TTL: 64, Payload: pktbuild.TCP{Src: 7000, Dst: 80, Seq: uint32(n), Flags: pktbuild.RST}}}
	}},
	"unsupported": {"rules:\n  - masquerade: CLIENTS\n", "client", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		return []pktbuild.IPv4{{Src: l.Options().Addresses.Client.Addr(), Dst: l.ServerNode().Addr, TTL: 64, ID: uint16(n), Payload: pktbuild.ICMP{Type: 10}}}
	}},
	"malformed": {"rules:\n  - masquerade: CLIENTS\n", "client", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		p := freshDatagrams(l, n)
		p[0].Payload = pktbuild.UDP{Src: 7000, Dst: 9, Length: 2000, Data: []byte("x")}
		return p
	}},
	"spoofed": {"rules:\n  - masquerade: CLIENTS\n", "server", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		return []pktbuild.IPv4{{Src: l.Options().Addresses.Far.Addr(), Dst: l.Options().Addresses.Far.Addr(), TTL: 64, ID: uint16(n), Payload: pktbuild.UDP{Src: 9, Dst: 9}}}
	}},
	"no-mapping": {"pools: {cgn: {addresses: 203.0.113.9}}\nrules:\n  - {snat: CLIENTS, to: cgn}\n", "server", func(l *lab.Lab, n int) []pktbuild.IPv4 {
		return []pktbuild.IPv4{{Src: l.ServerNode().Addr, Dst: netip.MustParseAddr("203.0.113.9"), TTL: 64, Payload: pktbuild.UDP{Src: uint16(5000 + n%50000), Dst: 9}}}
	}},
}

// freshDatagrams is one of the client, each time from another port.
func freshDatagrams(l *lab.Lab, n int) []pktbuild.IPv4 {
	return []pktbuild.IPv4{{Src: l.Options().Addresses.Client.Addr(), Dst: l.ServerNode().Addr, TTL: 64, Payload: pktbuild.UDP{Src: uint16(5000 + n%50000), Dst: 9}}}
}

// notProvoked are the other reasons, and why. The engine counts them as it does the others, and a trace reads all counters alike:
// TestReasons of internal/nat/datapath leads to each.
var notProvoked = map[string]string{
	"filtered": "needs an open session", "inbound-ttl": "needs an open session", "too-big": "needs an open session", "bad-checksum": "needs an ICMP error about an open session",
	"no-address": "needs a pool without ports", "no-route": "needs a target without a route", "fragment": "only beyond 128 of a datagram",
	"sessions-full": "a full table", "mappings-full": "a full table", "sources-full": "a full table", "fragments-full": "a full table",
	"race": "a race", "rewrite": "cannot happen", "bypass": "cannot happen",
}

// A packet that the engine drops ends with the reason: at tc whether or not an ICMP error is made of it, at XDP as a possibility,
// because nothing of it is seen there.
func TestTraceEngineRefusals(t *testing.T) {
	ktest.Root(t)
	for _, r := range rulefile.Reasons {
		_, is := provoked[r.Name]
		if _, not := notProvoked[r.Name]; r.Kind == "dropped" && is == not || r.Kind != "dropped" && (is || not) {
			t.Errorf("%s: have it provoked, or name why it is not", r.Name)
		}
	}
	for _, attach := range []control.Attach{control.AttachTC, control.AttachXDP} {
		for _, replies := range []string{"1000", "0"} {
			t.Run(fmt.Sprintf("%s/%s ICMP errors", attach, replies), func(t *testing.T) {
				t.Parallel() // most of the time is waiting
				l := upForTrace(t, "routed", lab.Options{Rules: lab.RulesNone})
				if attach == control.AttachXDP {
					takeXDP(t, l)
				}
				for name, r := range provoked {
					// With ICMP errors, or without any: each drop is seen in one of few forms.
					if testing.Short() && name != "source-limit" && name != "no-session" {
						continue
					}
					t.Run(name, func(t *testing.T) {
						withICMP := strings.Replace(r.rules, "limits: {", "limits: {icmp_errors_per_second: "+replies+", ", 1)
						if withICMP == r.rules {
							withICMP = "limits: {icmp_errors_per_second: " + replies + "}\n" + r.rules
						}
						engineOn(t, l, attach, withICMP)
						var fd int
						if err := l.Node(r.from).Do(func() (err error) {
							fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
							return err
						}); err != nil {
							t.Fatal(err)
						}
						defer unix.Close(fd)
						n := 0
						found, all := traceIn(t, l, "any -> any", func() {
							n++
							for _, p := range r.send(l, n) {
								_ = unix.Sendto(fd, p.Bytes(), 0, &unix.SockaddrInet4{Addr: p.Dst.As4()})
							}
							time.Sleep(20 * time.Millisecond) // a trace follows so many packets in a second
						}, func(p trace.Packet) bool {
							if !strings.Contains(p.End.Why, "eBPF engine (") || !strings.Contains(p.End.Why, name+": ") {
								return false
							}
							if p.End.Outcome == trace.Left {
								return attach == control.AttachXDP && strings.Contains(p.End.Why, "perhaps it was dropped before the stack saw it: "+l.Name()+"-gateway, ")
							}
							return p.End.Outcome == trace.Died && p.End.Namespace == l.Name()+"-gateway"
						})
						if found == nil {
							t.Errorf("no packet shows it: %s", brief(all))
						}
					})
				}
			})
		}
	}
}

// brief are the last packets, for a failure's message.
func brief(all []trace.Packet) string {
	var b strings.Builder
	for _, p := range all[max(0, len(all)-3):] {
		fmt.Fprintf(&b, "\n%s %s %+v", p.Tuple, p.Kind, p.End)
		for _, s := range p.Steps {
			fmt.Fprintf(&b, "\n\t%s %s %s %s %s", s.Namespace, s.Interface, s.Hook, s.What, s.Detail)
			if s.Rule != nil {
				b.WriteString(" " + s.Rule.String())
			}
		}
	}
	return b.String()
}

// answerDatagrams answers datagrams at an address of the server, while the test runs.
func answerDatagrams(t *testing.T, l *lab.Lab, at netip.AddrPort) {
	t.Helper()
	if err := l.ServerNode().Do(func() error {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			for b := make([]byte, 100); ; {
				n, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo(b[:n], from)
			}
		}()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func upForTrace(t *testing.T, topology string, o lab.Options) *lab.Lab {
	t.Helper()
	o.Name, o.Owned = cmp.Or(o.Name, ktest.Name(t)), true
	l, err := lab.Up(t.Context(), topology, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// engineLab is a gateway with the eBPF engine; CLIENTS in the rules are the clients' network.
func engineLab(t *testing.T, attach control.Attach, rules string) *lab.Lab {
	t.Helper()
	l := upForTrace(t, "routed", lab.Options{Rules: lab.RulesNone})
	engineOn(t, l, attach, rules)
	return l
}

// engineOn brings the eBPF engine of a lab's gateway up until the test ends.
func engineOn(t *testing.T, l *lab.Lab, attach control.Attach, rules string) {
	t.Helper()
	ns := l.NATNode().Handle()
	text := "inside: [eth1]\noutside: [eth0]\n" + strings.ReplaceAll(rules, "CLIENTS", l.Options().Addresses.Client.Masked().String())
	file, err := rulefile.Parse("nat.yaml", []byte(text))
	if err == nil {
		_, err = control.Up(t.Context(), file, text, control.Options{Namespace: ns, Engine: control.EngineEBPF, Attach: attach})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = control.Down(ns) }) // with the lab all of it goes
}

// tracedFaults are the faults that drop packets of a stack, with the cause and a word of the reason
// that a trace gives at that place.
var tracedFaults = map[string]struct {
	cause snapshot.NATCause
	why   string
}{
	"conntrack-table-full": {snapshot.CauseTableFull, "the table is full"},
	"snat-ports-exhausted": {snapshot.CauseConfirm, "no source port was left"},
	"ip-forward-off":       {snapshot.CauseIPForwardOff, "net.ipv4.ip_forward"},
	"no-route":             {snapshot.CauseNoRoute, "no route"},
	"routing-loop":         {snapshot.CauseTTL, "TTL"},
	"ttl-exceeded":         {snapshot.CauseTTL, "TTL"},
	"rp-filter-drop":       {snapshot.CauseReversePath, "rp_filter"},
	"martian-drop":         {snapshot.CauseMartian, "martian"},
	"mtu-drop":             {snapshot.CauseTooBig, "MTU"},
	"qdisc-drop":           {snapshot.CauseQueue, "queue"},
	"next-hop-silent":      {snapshot.CauseNeighbour, "next hop"},
	"listen-overflow":      {snapshot.CauseListenOverflow, "accept queue"},
	"forward-policy-drop":  {snapshot.CauseRule, "policy drop"},
	"rule-drop":            {snapshot.CauseRule, "iptables-legacy filter FORWARD rule 2 `-A FORWARD -s 192.168.0.2/32 -j DROP`"},
	"checksum-errors":      {snapshot.CauseChecksum, "checksum"},
}

// shownFaults are faults of translation whose packets the kernel's stack drops nowhere, and what of a packet shows them.
var shownFaults = map[string]func(s *faultRun, p trace.Packet) bool{
	"stale-snat":     func(s *faultRun, p trace.Packet) bool { return gives(s, p, "{far}:", "") },
	"stale-udp-dnat": func(s *faultRun, p trace.Packet) bool { return gives(s, p, "", "-> {server}:5353") },
	"backend-silent": func(s *faultRun, p trace.Packet) bool {
		return gives(s, p, "", "-> {server}:8081") && p.End.Outcome == trace.Died && p.End.Namespace == s.node(lab.RoleServer).Netns
	},
	// It leaves the gateway as it came.
	"answers-lost": func(s *faultRun, p trace.Packet) bool {
		return strings.HasPrefix(p.Tuple, s.expand("{client}:")) && !gives(s, p, "", "") && slices.ContainsFunc(p.Steps, func(at trace.Step) bool {
			return at.What == trace.Sent && at.Interface == "eth0" && at.Namespace == s.watched.Netns
		})
	},
	// The reply does not pass the gateway, which has translated the request.
	"hairpin-missing": func(s *faultRun, p trace.Packet) bool {
		return p.Reply && strings.HasPrefix(p.Tuple, s.expand("{client2}:80 -> {client}:")) && p.End.Namespace == s.node(lab.RoleClient).Netns &&
			!slices.ContainsFunc(p.Steps, func(at trace.Step) bool { return at.Namespace == s.watched.Netns })
	},
	"conntrack-invalid-reset": func(s *faultRun, p trace.Packet) bool {
		return slices.ContainsFunc(p.Steps, func(at trace.Step) bool { return at.What == trace.NoEntry && at.Namespace == s.watched.Netns })
	},
	"engine-source-limit":  func(s *faultRun, p trace.Packet) bool { return refusedBy(s, p, "source-limit: ") },
	"port-block-too-small": func(s *faultRun, p trace.Packet) bool { return refusedBy(s, p, "port-limit: ") },
}

// gives says whether the watched namespace translates a packet to ends that begin and end so.
func gives(s *faultRun, p trace.Packet, begin, end string) bool {
	return slices.ContainsFunc(p.Steps, func(at trace.Step) bool {
		return at.What == trace.Translated && at.Namespace == s.watched.Netns && strings.HasPrefix(at.After, s.expand(begin)) && strings.HasSuffix(at.After, s.expand(end))
	})
}

// refusedBy says whether a packet ended in natkit's engine of the watched namespace for a reason: it was dropped, or an ICMP error
// was made of it.
func refusedBy(s *faultRun, p trace.Packet, reason string) bool {
	return (p.End.Outcome == trace.Died || p.End.Outcome == trace.Vanished) && p.End.Namespace == s.watched.Netns && strings.Contains(p.End.Why, "eBPF engine (") && strings.Contains(p.End.Why, reason)
}

// untracedFaults are the others, and why no packet shows them.
var untracedFaults = map[string]string{
	"port-blocks-exhausted": "none is lost", "snat-port-race": "a race that a lab meets now and then: as snat-ports-exhausted",
	"engine-drift": "no packet", "accel-slow-path": "none is lost", "link-down": "arrives at no device", "vlan-mismatch": "no IP packet of a known device",
	"wrong-destination-mac": "a frame for somebody else is dropped before its IP header is looked at", "duplicate-address": "taken by another host",
	"arp-refused": "only ARP is refused", "clients-unreached": "sent, and taken by nobody", "ipsec-policies-many": "none is lost",
	"receive-buffer-full": "delivered to a socket, whose drops are behind the trace's end", "local-ports-exhausted": "none is sent",
	"answered-from-elsewhere": "refused by the client's socket", "asymmetric-routing": "half of the packets go by elsewhere",
	"other-drops": "dropped for reasons of all kinds", "rule-chain-long": "none is lost", "iptables-two-backends": "none is lost by itself", "needless-hooks": "none is lost",
	"conntrack-helper": "none is lost", "conntrack-helper-missing": "refused by the client", "br-netfilter-overhead": "none is lost", "bridge-nf-missing": "the reply stays on the bridge",
	"conntrack-table-nearly-full": "none is lost", "time-wait-heavy": "none is lost", "close-wait-heavy": "none is lost", "established-timeout-long": "none is lost",
	"established-timeout-short": "lost after an entry's end", "conntrack-early-drop": "an entry is lost, and no packet: TestEntryEvicted of internal/diagnose/follow", "conntrack-hash-too-small": "none is lost",
	"conntrack-accounting": "none is lost", "unreplied-flood": "none is lost", "syn-flood": "refused by the server's socket",
	"event-listener-lag": "only events are lost", "fragments-lost": "a fragment that never comes: the others time out in the reassembly queue, after the trace's end",
}

// A trace names the right place and reason in the faults that drop packets, and shows the wrong translation in those that lose
// them elsewhere.
func TestTraceFaults(t *testing.T) {
	ktest.Root(t)
	for _, f := range Faults() {
		want, drops := tracedFaults[f.Code]
		is := shownFaults[f.Code]
		if drops && is != nil || (drops || is != nil) == (untracedFaults[f.Code] != "") {
			t.Errorf("%s: name what a trace shows of it, or why it shows nothing", f.Code)
		}
		if drops {
			is = func(s *faultRun, p trace.Packet) bool {
				return p.End.Outcome == trace.Died && !p.End.Benign && p.End.Cause == want.cause && strings.Contains(p.End.Why, want.why) &&
					(p.End.Namespace == s.watched.Netns || f.Code == "routing-loop" && p.End.Namespace == s.node(lab.RoleServer).Netns)
			}
		}
		if is == nil {
			continue
		}
		t.Run(f.Code, func(t *testing.T) {
			t.Parallel() // most of the time is waiting
			l := upForTrace(t, cmp.Or(f.topology, "routed"), lab.Options{Clients: f.clients})
			s := &faultRun{lab: l, watched: l.NATNode(), options: FaultOptions{Progress: func(string, float64) {}}}
			defer s.close()
			if err := f.healthy(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(f.Code, "stale-") { // it is of connections that began before
				ktest.Wait(t, 20*time.Second, "connections", func() bool {
					text, err := s.watched.SysctlValue("net.netfilter.nf_conntrack_count")
					n, err2 := strconv.Atoi(text)
					return err == nil && err2 == nil && n >= 5 // as many as there are programs
				})
			}
			if err := f.broken(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			r, err := tracing.Open(tracing.Options{Netns: s.watched.Handle().Inode(), Rate: 100000, Programs: packetPrograms})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
			defer stop()
			var flowing sync.WaitGroup
			for _, run := range s.traffic {
				flowing.Go(func() { _ = run(ctx, s) }) // what becomes of it the trace shows
			}
			found := false
			var all []trace.Packet
			others := map[string]int{}
			err = r.Watch(ctx, func(p trace.Packet) error {
				all = append(all[max(0, len(all)-2):], p)
				if found = found || is(s, p); found {
					stop()
				} else if p.End.Outcome == trace.Died && !p.End.Benign {
					others[fmt.Sprintf("%s: %s in %s: %s (%s at %s)", p.Tuple, p.End.Cause, p.End.Namespace, p.End.Why, p.End.Reason, p.End.Place)]++
				}
				return nil
			})
			flowing.Wait()
			if err != nil {
				t.Fatal(err)
			}
			if !found {
				t.Errorf("no packet shows it (%s: %q); dropped were: %v; the last packets: %s", want.cause, want.why, others, brief(all))
			}
		})
	}
}
