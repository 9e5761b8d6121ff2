// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/diagnose/trace"
	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/lab"
	"natkit/internal/testutil/ktest"
)

// watching runs a trace of a flow until the test ends; what it shows goes to fn.
func watching(t *testing.T, o Options, fn func(trace.Packet)) *Run {
	t.Helper()
	o.Rate = 1000
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- r.Watch(ctx, func(p trace.Packet) error {
			fn(p)
			return nil
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// seenInHooks skips a test where the kernel does not show packets between the functions of a hook.
func seenInHooks(t *testing.T) {
	t.Helper()
	ktest.Root(t)
	r, err := Open(Options{Flow: flowOf(t, "udp 192.0.2.1 -> 192.0.2.2:9"), Rate: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, m := range r.Missing() {
		if strings.Contains(m.What, "functions of a netfilter hook") {
			ktest.Unsupported(t, "%s: %s", m.What, m.Why)
		}
	}
}

// A namespace that goes while it is traced is not held by the trace: the other end of its veth goes with it.
func TestNamespaceGoes(t *testing.T) {
	for _, wait := range []bool{false, true} {
		t.Run(map[bool]string{false: "tracing", true: "waiting"}[wait], func(t *testing.T) {
			ktest.Root(t)
			name := ktest.Name(t)
			goes, err := netns.New()
			if err == nil {
				err = goes.Pin(name)
			}
			if err != nil {
				t.Fatal(err)
			}
			id, err := goes.ID()
			if err != nil {
				t.Fatal(err)
			}
			gone := false
			t.Cleanup(func() {
				if !gone {
					_ = netns.Unpin(name, id)
				}
			})
			stays, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { stays.Close() })
			if err := goes.Do(func() error {
				return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "natkit-a"}, PeerName: "natkit-b", PeerNamespace: netlink.NsFd(stays.Fd())})
			}); err != nil {
				t.Fatal(err)
			}
			for _, command := range []string{"add table ip nat", "add chain ip nat post { type nat hook postrouting priority 100 ; }", "add rule ip nat post masquerade"} {
				if err := goes.Do(func() error { return exec.Command(ktest.Tool(t, "nft"), strings.Fields(command)...).Run() }); err != nil {
					t.Fatalf("nft %s: %v", command, err)
				}
			}
			watching(t, Options{Flow: flowOf(t, "tcp 198.18.0.1 -> 198.18.0.2:9"), Wait: wait}, func(trace.Packet) {})
			if err := goes.Close(); err != nil {
				t.Fatal(err)
			}
			if err := netns.Unpin(name, id); err != nil {
				t.Fatal(err)
			}
			gone = true
			ktest.Wait(t, 10*time.Second, "the other end of the veth is gone", func() bool {
				there := true
				if err := stays.Do(func() error {
					_, err := net.InterfaceByName("natkit-b")
					there = err == nil
					return nil
				}); err != nil {
					t.Fatal(err)
				}
				return !there
			})
		})
	}
}

// A trace that begins while a flow is on shows no packet in part: each that comes through the gateway has met its rules.
func TestBeginsUnderTraffic(t *testing.T) {
	seenInHooks(t)
	l := up(t, "routed", lab.RulesNft)
	in(t, l, "gateway", `nft add table ip fw
nft add chain ip fw forward { type filter hook forward priority 10 ; }
nft add rule ip fw forward udp dport 9 accept`)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	sink := listening(t, l, to)
	ctx, stop := context.WithCancel(t.Context())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_ = l.Node("client").Do(func() error {
			c, err := net.Dial("udp4", to.String())
			if err != nil {
				return err
			}
			defer c.Close()
			for ctx.Err() == nil {
				_, _ = c.Write([]byte("x"))
				time.Sleep(time.Millisecond)
			}
			return nil
		})
	}()
	defer func() { stop(); <-sent }()
	ktest.Wait(t, 10*time.Second, "the flow is on", func() bool {
		_ = sink.SetReadDeadline(time.Now().Add(time.Second))
		_, _, err := sink.ReadFrom(make([]byte, 10))
		return err == nil
	})
	for range 3 {
		packets := traced(t, l, Options{Flow: flowOf(t, "udp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String())}, func() {},
			func(packets []trace.Packet) bool { return len(packets) >= 3 })
		for _, p := range packets[:3] {
			if p.Reply {
				continue
			}
			if step(p, trace.RuleMet, "forward") == nil || step(p, trace.Passed, "postrouting") == nil || p.Steps[0].Namespace != l.Name()+"-client" {
				t.Errorf("packet %d is seen in part: %+v", p.Number, p.Steps)
			}
		}
	}
}

// What the machine's names make of a terminal a trace does not.
func TestNamesAreClean(t *testing.T) {
	l := up(t, "routed", lab.RulesNone)
	to := netip.MustParseAddrPort("198.51.100.9:9")
	if err := l.Node("client").Do(func() error {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a\x1b[31mb", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}, PeerName: "natkit-b"}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		peer, err := netlink.LinkByName(link.PeerName)
		if err != nil {
			return err
		}
		index := link.Attrs().Index
		return errors.Join(netlink.LinkSetUp(link), netlink.LinkSetUp(peer),
			netlink.RouteAdd(&netlink.Route{LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}}),
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: to.Addr().AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 2}}))
	}); err != nil {
		t.Fatal(err)
	}
	packets := traced(t, l, Options{Flow: flowOf(t, "udp any -> "+to.String())}, func() { datagram(l, to.String()) },
		func(packets []trace.Packet) bool { return len(packets) > 0 })
	if len(packets) == 0 || packets[0].Steps[0].Interface != "a?[31mb" {
		t.Errorf("%+v", packets)
	}
}

// Of a trace of many connections natkit remembers some; of those that go on, and of ones with the same ends, it still learns
// the rules.
func TestManyConnections(t *testing.T) {
	was := maxKnown
	maxKnown = 4
	t.Cleanup(func() { maxKnown = was })
	l := up(t, "routed", lab.RulesNft)
	// Behind the translation, in a namespace of its own, nothing but the followed tuples leads to the connection.
	in(t, l, "server", `nft add table ip fw
nft add chain ip fw in { type filter hook input priority 0 ; }
nft add rule ip fw in udp dport 9 accept`)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	listening(t, l, to)
	var clients []net.Conn
	for range 6 {
		if err := l.Node("client").Do(func() error {
			c, err := net.Dial("udp4", to.String())
			clients = append(clients, c)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer clients[len(clients)-1].Close()
	}
	met := map[string]int{}
	packets := traced(t, l, Options{Flow: flowOf(t, "udp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String())}, func() {
		for range 4 {
			for _, c := range clients {
				_, _ = c.Write([]byte("x"))
				// What natkit learns from it is there before the second: the reply's tuple begins with the server.
				port := fmt.Sprintf("%04x0000 ", c.LocalAddr().(*net.UDPAddr).Port)
				for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
					if strings.Contains(followed(t, l), port) {
						break
					}
				}
				_, _ = c.Write([]byte("x"))
			}
		}
	}, func(packets []trace.Packet) bool {
		if len(packets) == 6*4 { // it is on
			if n := followedTuples(t, l); n == 0 || n > 2*maxKnown {
				t.Errorf("the kernel has %d tuples of connections, natkit %d at most", n, maxKnown)
			}
		}
		return len(packets) >= 6*4*2
	})
	for _, p := range packets {
		if s := step(p, trace.RuleMet, "input"); s != nil && s.Namespace == l.Name()+"-server" {
			met[p.Tuple]++
		}
	}
	for _, c := range clients {
		if n := met[c.LocalAddr().String()+" -> "+to.String()]; n < 3 {
			t.Errorf("the rule behind the translation was met %d times by %s: %v", n, c.LocalAddr(), met)
		}
	}
}

// listening takes datagrams at an address of the server until the end of the test.
func listening(t *testing.T, l *lab.Lab, at netip.AddrPort) net.PacketConn {
	t.Helper()
	c, err := listen(l, at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// dialed is a socket of the client for datagrams to an endpoint.
func dialed(t *testing.T, l *lab.Lab, to netip.AddrPort) (c net.Conn) {
	t.Helper()
	if err := l.Node("client").Do(func() (err error) {
		c, err = net.Dial("udp4", to.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return c
}

// followed is what the trace of this process has in its set of the server's tuples.
func followed(t *testing.T, l *lab.Lab) string {
	t.Helper()
	var out []byte
	if err := l.ServerNode().Do(func() (err error) {
		out, err = exec.Command(ktest.Tool(t, "nft"), "list", "set", "inet", fmt.Sprintf("natkit-trace-%d", os.Getpid()), "followed4").Output()
		return err
	}); err != nil {
		t.Error(err)
	}
	return string(out)
}

// followedTuples is how many they are.
func followedTuples(t *testing.T, l *lab.Lab) int {
	t.Helper()
	_, elements, _ := strings.Cut(followed(t, l), "elements")
	return strings.Count(elements, ",") + strings.Count(elements, "}")/3
}

// An entry that is deleted before its time is reported, and one that goes on is not.
func TestEntryDeleted(t *testing.T) {
	seenInHooks(t)
	l := up(t, "routed", lab.RulesNft)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	listening(t, l, to)
	kept, deleted := dialed(t, l, to), dialed(t, l, to)
	defer kept.Close()
	defer deleted.Close()
	var seen, replaced atomic.Int32
	ends := make(chan trace.EntryEnd, 10)
	watching(t, Options{
		Flow: flowOf(t, "udp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String()), Netns: l.Node("client").Handle().Inode(),
		Ended: func(e trace.EntryEnd) error { ends <- e; return nil },
	}, func(p trace.Packet) {
		seen.Add(1)
		if slices.ContainsFunc(p.Steps, func(s trace.Step) bool {
			return s.What == trace.NewEntry && strings.Contains(s.Detail, "the one before is gone")
		}) {
			replaced.Add(1)
		}
	})
	send := func() {
		_, _ = kept.Write([]byte("x"))
		_, _ = deleted.Write([]byte("x"))
	}
	send()
	ktest.Wait(t, 10*time.Second, "both are followed", func() bool { return seen.Load() >= 2 })
	time.Sleep(2 * askEvery) // natkit has asked for them
	if err := l.NATNode().Handle().Do(func() error {
		n, err := conntrack.DeleteFunc(t.Context(), conntrack.Filter{}, func(f *conntrack.Flow) bool {
			return f.Orig.SrcPort == deleted.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		})
		if n != 1 {
			t.Errorf("%d entries deleted", n)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-ends:
		if e.How != trace.EntryGone || e.Namespace != l.Name()+"-gateway" || !strings.Contains(e.Original, deleted.LocalAddr().String()) || e.Connection == 0 || e.LeftSeconds == 0 || e.TimeNS == 0 {
			t.Errorf("%+v", e)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nothing is reported")
	}
	send()
	ktest.Wait(t, 10*time.Second, "the next packet makes another entry", func() bool { return replaced.Load() == 1 })
	time.Sleep(3 * askEvery) // it would have been asked about, and reported
	if len(ends) > 0 {
		t.Errorf("one more ended: %+v", <-ends)
	}
}

// A connection that is refused takes its entry with it, however late: nobody has deleted that.
func TestEntryOfRefused(t *testing.T) {
	seenInHooks(t)
	l := up(t, "routed", lab.RulesNft)
	in(t, l, "server", "nft add table ip fw\nnft add chain ip fw in { type filter hook input priority 0 ; }\nnft add rule ip fw in tcp dport 81 drop")
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 81).String()
	var syns, refused atomic.Int32
	ends := make(chan trace.EntryEnd, 10)
	watching(t, Options{
		Flow: flowOf(t, "tcp "+l.Options().Addresses.Client.Addr().String()+" -> "+to), Netns: l.Node("client").Handle().Inode(),
		Ended: func(e trace.EntryEnd) error { ends <- e; return nil },
	}, func(p trace.Packet) {
		switch {
		case p.Kind == "SYN":
			syns.Add(1)
		case strings.Contains(p.Kind, "RST"):
			refused.Add(1)
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		dial(l, "client", to, 20*time.Second)
	}()
	ktest.Wait(t, 10*time.Second, "it is followed", func() bool { return syns.Load() > 0 })
	time.Sleep(2 * askEvery) // natkit has asked for the entry
	in(t, l, "server", "nft flush chain ip fw in")
	<-done
	ktest.Wait(t, 10*time.Second, "it is refused", func() bool { return refused.Load() > 0 })
	time.Sleep(3 * askEvery) // it would have been asked about, and reported
	if len(ends) > 0 {
		t.Errorf("reported: %+v", <-ends)
	}
}

// Why an entry ended is what the table shows: none that is assured is evicted, and where the counters are not known nothing is.
func TestEntryEnd(t *testing.T) {
	counted := func(n uint64) conntrack.Stats { return conntrack.Stats{{"early_drop": n}} }
	for _, tt := range []struct {
		name        string
		status      conntrack.Status
		before, now tableState
		how         trace.EntryHow
		why         string
	}{
		{"evicted", 0, tableState{counts: counted(1)}, tableState{counts: counted(3)}, trace.EntryEvicted, "evicted 2 entries"},
		{"deleted", 0, tableState{counts: counted(1)}, tableState{counts: counted(1)}, trace.EntryGone, "somebody deleted it: "},
		{"crowded", 0, tableState{counts: counted(1)}, tableState{counts: counted(1), crowded: true}, trace.EntryGone, "95 %"},
		{"assured", conntrack.StatusAssured, tableState{counts: counted(1)}, tableState{counts: counted(3), crowded: true}, trace.EntryGone, "somebody deleted it: "},
		{"unknown before", 0, tableState{}, tableState{counts: counted(3)}, trace.EntryGone, "somebody deleted it: "},
		{"unknown now", 0, tableState{counts: counted(3)}, tableState{}, trace.EntryGone, "somebody deleted it: "},
	} {
		e := entry{last: &conntrack.Flow{Status: tt.status}}
		if got := e.end(10, tt.before, tt.now); got.How != tt.how || !strings.Contains(got.Why, tt.why) {
			t.Errorf("%s: got %+v", tt.name, got)
		}
	}
}

// A namespace that gets rules while a trace is on has those of connections reported that are followed already.
func TestRulesLater(t *testing.T) {
	l := up(t, "routed", lab.RulesNft)
	to := netip.AddrPortFrom(l.Options().Addresses.Server, 9)
	listening(t, l, to)
	c := dialed(t, l, to)
	defer c.Close()
	var seen, met atomic.Int32
	watching(t, Options{Flow: flowOf(t, "udp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String()), Netns: l.Node("client").Handle().Inode()}, func(p trace.Packet) {
		seen.Add(1)
		if s := step(p, trace.RuleMet, "input"); s != nil && s.Namespace == l.Name()+"-server" {
			met.Add(1)
		}
	})
	send := func() { _, _ = c.Write([]byte("x")) }
	send()
	ktest.Wait(t, 10*time.Second, "it is followed", func() bool { return seen.Load() > 0 })
	// Behind the translation nothing but the followed tuples leads to the connection.
	in(t, l, "server", "nft add table ip fw\nnft add chain ip fw in { type filter hook input priority 0 ; }\nnft add rule ip fw in udp dport 9 accept")
	ktest.Wait(t, 20*time.Second, "the rule is reported", func() bool {
		send()
		return met.Load() > 0
	})
}

// An entry that the kernel evicts from a full table is reported as such.
func TestEntryEvicted(t *testing.T) {
	l := up(t, "routed", lab.RulesNft)
	server := l.Options().Addresses.Server
	to := netip.AddrPortFrom(server, 9)
	listening(t, l, to) // it replies to nobody: the entries are not assured
	var seen atomic.Int32
	ends := make(chan trace.EntryEnd, 1000)
	watching(t, Options{
		Flow: flowOf(t, "udp "+l.Options().Addresses.Client.Addr().String()+" -> "+to.String()), Netns: l.Node("client").Handle().Inode(),
		Ended: func(e trace.EntryEnd) error { ends <- e; return nil },
	}, func(trace.Packet) { seen.Add(1) })
	const flows = 200 // the kernel looks for one in few of the table's buckets
	var clients []net.Conn
	sent := func(at netip.AddrPort) net.Conn {
		c := dialed(t, l, at)
		_, _ = c.Write([]byte("x"))
		return c
	}
	for range flows {
		c := sent(to)
		defer c.Close()
		clients = append(clients, c)
	}
	ktest.Wait(t, 10*time.Second, "they are followed", func() bool { return seen.Load() >= flows })
	if _, err := l.NATNode().FillConntrack(t.Context(), 0, nil); err != nil {
		t.Fatal(err)
	}
	ktest.Wait(t, 20*time.Second, "an entry is evicted", func() bool {
		for _, c := range clients { // they do not expire while the table is filled
			_, _ = c.Write([]byte("x"))
		}
		for range 300 {
			sent(netip.AddrPortFrom(server, 11)).Close()
		}
		for len(ends) > 0 {
			if e := <-ends; e.How == trace.EntryEvicted {
				if e.Namespace != l.Name()+"-gateway" || !strings.Contains(e.Why, "early_drop") || e.LeftSeconds == 0 {
					t.Errorf("%+v", e)
				}
				return true
			}
		}
		return false
	})
}

// listen opens a port of a lab's server.
func listen(l *lab.Lab, at netip.AddrPort) (c *net.UDPConn, err error) {
	err = l.ServerNode().Do(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	})
	return c, err
}
