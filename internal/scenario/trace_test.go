// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	tracing "natkit/internal/diagnose/follow"
	"natkit/internal/diagnose/probe"
	"natkit/internal/diagnose/trace"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// traceIn traces a flow in a lab while send runs, until a packet is as wanted. send is run again
// and again until then.
func traceIn(t *testing.T, l *lab.Lab, flow string, send func(), wanted func(trace.Packet) bool) (found *trace.Packet, all []trace.Packet) {
	t.Helper()
	f, err := trace.ParseFlow(flow)
	if err != nil {
		t.Fatal(err)
	}
	r, err := tracing.Open(tracing.Options{Flow: f, Rate: 1000, Programs: func(ref string) (tracing.Program, error) {
		p, err := control.OpenPacketReader(ref)
		if p == nil {
			return nil, err
		}
		return p, err
	}})
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
	for _, role := range []string{"client", "server"} { // veth takes frames from XDP only with NAPI
		if out, err := l.Node(role).Command(t.Context(), ktest.Tool(t, "ethtool"), "-K", "eth0", "tx", "off", "gro", "on").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
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
	o.Name, o.Owned = ktest.Name(t), true
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
	return l
}
