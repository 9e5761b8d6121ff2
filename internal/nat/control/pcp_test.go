// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/datapath"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

const pcpRules = `inside: [in]
outside: [out]
pcp: {on: [in], mappings_per_subscriber: 4}
rules:
  - masquerade: 10.0.0.0/24
`

// pcpTestbed is a gateway that answers PCP, and a client of the test's own.
type pcpTestbed struct {
	*servedTestbed
	nonce byte
}

func servePCP(t *testing.T, rules string, attach Attach) *pcpTestbed {
	b := newTestbed(t)
	b.in(b.server, func() error { // strangers of other addresses
		l, err := netlink.LinkByName("eth0")
		a, err2 := netlink.ParseAddr("198.51.100.77/24")
		return errors.Join(err, err2, netlink.AddrAdd(l, a))
	})
	if attach == AttachXDP {
		b.passXDP(b.client)
		b.passXDP(b.server)
	}
	s := &pcpTestbed{b.serve(rules, ServeOptions{Options: Options{Attach: attach}}), 1}
	s.hears("up", "")
	return s
}

// request is a PCP request of the client.
func (b *pcpTestbed) request(opcode, protocol byte, port uint16, lifetime uint32, change func([]byte)) []byte {
	length := 60
	if opcode == 2 {
		length = 80
	}
	q := make([]byte, length)
	q[0], q[1] = 2, opcode
	binary.BigEndian.PutUint32(q[4:], lifetime)
	client := netip.MustParseAddr("::ffff:10.0.0.2").As16()
	copy(q[8:], client[:])
	q[24], q[36] = b.nonce, protocol
	binary.BigEndian.PutUint16(q[40:], port)
	if change != nil {
		change(q)
	}
	return q
}

// ask sends a datagram from a namespace to an address, and gives the answer: nil if there is none.
func (b *pcpTestbed) ask(ns *netns.Handle, to string, q []byte) (answer []byte) {
	b.t.Helper()
	b.in(ns, func() error {
		c, err := net.Dial("udp4", to)
		if err != nil {
			return err
		}
		defer c.Close()
		for range 3 {
			if _, err := c.Write(q); err != nil {
				return nil // an ICMP error: nobody is there
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			buffer := make([]byte, 1200)
			if n, err := c.Read(buffer); err == nil {
				answer = buffer[:n]
				return nil
			}
		}
		return nil
	})
	return answer
}

// mapped asks for a mapping and gives its external port.
func (b *pcpTestbed) mapped(q []byte) uint16 {
	b.t.Helper()
	a := b.ask(b.client, "10.0.0.1:5351", q)
	if len(a) < 60 || a[3] != 0 {
		b.t.Fatalf("answer % x", a)
	}
	return binary.BigEndian.Uint16(a[42:])
}

func (b *pcpTestbed) result(q []byte) int {
	b.t.Helper()
	a := b.ask(b.client, "10.0.0.1:5351", q)
	if len(a) < 24 {
		b.t.Fatalf("answer % x", a)
	}
	return int(a[3])
}

// reaches reports whether what a stranger sends to an external port arrives at a port of the client.
func (b *pcpTestbed) reaches(network, from string, external, port uint16) bool {
	b.t.Helper()
	got := make(chan bool, 1)
	var closer interface{ Close() error }
	b.in(b.client, bound(func() error {
		at := fmt.Sprintf("10.0.0.2:%d", port)
		if network == "udp4" {
			l, err := net.ListenPacket(network, at)
			if err != nil {
				return err
			}
			closer = l
			go func() {
				_, _, err := l.ReadFrom(make([]byte, 10))
				got <- err == nil
			}()
			return nil
		}
		l, err := net.Listen(network, at)
		if err != nil {
			return err
		}
		closer = l
		go func() {
			c, err := l.Accept()
			if err == nil {
				c.Close()
			}
			got <- err == nil
		}()
		return nil
	}))
	defer closer.Close()
	b.in(b.server, func() error {
		d := net.Dialer{Timeout: 2 * time.Second, LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
		if network == "tcp4" {
			d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
		}
		c, err := d.Dial(network, fmt.Sprintf("198.51.100.1:%d", external))
		if err != nil {
			return nil
		}
		defer c.Close()
		_, _ = c.Write([]byte("hello"))
		return nil
	})
	select {
	case in := <-got:
		return in
	case <-time.After(2 * time.Second):
		return false
	}
}

// leases are the explicit mappings of the engine.
func (b *pcpTestbed) leases() (out []datapath.Lease) {
	b.t.Helper()
	e, err := Open(b.gateway)
	if err != nil {
		b.t.Fatal(err)
	}
	defer e.Close()
	if err := e.Leases(func(l *datapath.Lease) bool { out = append(out, *l); return true }); err != nil {
		b.t.Fatal(err)
	}
	return out
}

// What a host asked for lets strangers in by TCP and UDP, on both hooks, is extended and ended by
// whoever has the nonce, and outlives natkit serve and an apply.
func TestPCP(t *testing.T) {
	for _, attach := range []Attach{AttachTC, AttachXDP} {
		t.Run(string(attach), func(t *testing.T) { testPCP(t, attach) })
	}
}

func testPCP(t *testing.T, attach Attach) {
	b := servePCP(t, pcpRules, attach)
	udp, tcp := b.request(1, 17, 7000, 600, nil), b.request(1, 6, 7000, 600, nil)
	uport, tport := b.mapped(udp), b.mapped(tcp)
	if !b.reaches("udp4", "198.51.100.77", uport, 7000) {
		t.Error("UDP of a stranger does not arrive")
	}
	if !b.reaches("tcp4", "198.51.100.77", tport, 7000) {
		t.Error("TCP of a stranger does not arrive")
	}
	before := b.leases()[0].Left
	binary.BigEndian.PutUint32(udp[4:], 3600)
	if again := b.mapped(udp); again != uport {
		t.Errorf("extended, the port is %d and not %d", again, uport)
	}
	longest := time.Duration(0)
	for _, l := range b.leases() {
		longest = max(longest, l.Left)
	}
	if longest < before+40*time.Minute {
		t.Errorf("asked for an hour, it has %s", longest)
	}
	if r := b.result(b.request(1, 17, 7000, 600, func(q []byte) { q[24] = 99 })); r != 2 {
		t.Errorf("with another nonce: result %d", r)
	}

	// Without natkit serve, and with the next one.
	b.end()
	if !b.reaches("udp4", "198.51.100.9", uport, 7000) {
		t.Error("without natkit serve a stranger's UDP does not arrive")
	}
	epoch := func() uint32 {
		return binary.BigEndian.Uint32(b.ask(b.client, "10.0.0.1:5351", append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, udp[8:24]...))[8:])
	}
	b.begin(ServeOptions{})
	b.hears("adopted", "")
	first := epoch()
	if again := b.mapped(udp); again != uport {
		t.Errorf("after a restart the port is %d and not %d", again, uport)
	}
	b.replace(strings.Replace(pcpRules, "10.0.0.0/24", "10.0.0.0/16", 1))
	b.hears("reloaded", "")
	if again := b.mapped(udp); again != uport {
		t.Errorf("after an apply the port is %d and not %d", again, uport)
	}
	if last := epoch(); last < first {
		t.Errorf("the epoch went back from %d to %d", first, last)
	}

	// Ended, it lets nobody in.
	binary.BigEndian.PutUint32(udp[4:], 0)
	binary.BigEndian.PutUint32(tcp[4:], 0)
	if r := b.result(udp); r != 0 {
		t.Errorf("end: result %d", r)
	}
	if r := b.result(tcp); r != 0 {
		t.Errorf("end: result %d", r)
	}
	if n := len(b.leases()); n != 0 {
		t.Errorf("%d leases after the end", n)
	}
}

// A mapping that ends before a session has used it is closed at once.
func TestPCPEnd(t *testing.T) {
	b := servePCP(t, strings.Replace(pcpRules, "rules:", "defaults: {filtering: endpoint-independent}\nrules:", 1), AttachTC)
	q := b.request(1, 17, 7001, 600, nil)
	port := b.mapped(q)
	binary.BigEndian.PutUint32(q[4:], 0)
	if r := b.result(q); r != 0 {
		t.Fatalf("end: result %d", r)
	}
	if b.reaches("udp4", "198.51.100.77", port, 7001) {
		t.Error("a stranger gets in after the end")
	}
}

// Each refusal has its result code; outside nobody answers.
func TestPCPRefusals(t *testing.T) {
	b := servePCP(t, pcpRules, AttachTC)
	option := func(code byte, value ...byte) func([]byte) []byte {
		return func(q []byte) []byte {
			return append(q, append([]byte{code, 0, 0, byte(len(value))}, value...)...)
		}
	}
	plain := b.request(1, 17, 7000, 600, nil)
	for _, row := range []struct {
		name string
		q    []byte
		want int
	}{
		{"version 1", b.request(1, 17, 7000, 600, func(q []byte) { q[0] = 1 }), 1},
		{"opcode 3", b.request(3, 17, 7000, 600, nil), 4},
		{"too short", plain[:40], 3},
		{"another address", b.request(1, 17, 7000, 600, func(q []byte) { q[23] = 3 }), 12},
		{"SCTP", b.request(1, 132, 7000, 600, nil), 9},
		{"all ports", b.request(1, 17, 0, 600, nil), 9},
		{"THIRD_PARTY", option(1, make([]byte, 16)...)(plain), 5},
		{"a long FILTER", option(3, make([]byte, 16)...)(plain), 6},
		{"PREFER_FAILURE for another address", option(2)(b.request(1, 17, 7000, 600, func(q []byte) {
			other := netip.MustParseAddr("::ffff:198.51.100.200").As16()
			copy(q[44:], other[:])
		})), 11},
	} {
		if r := b.result(row.q); r != row.want {
			t.Errorf("%s: result %d, want %d", row.name, r, row.want)
		}
	}
	for port := range uint16(4) {
		b.mapped(b.request(1, 17, 7100+port, 600, nil))
	}
	if r := b.result(b.request(1, 17, 7104, 600, nil)); r != 10 {
		t.Errorf("a fifth mapping of four: result %d", r)
	}
	if a := b.ask(b.server, "198.51.100.1:5351", plain); a != nil {
		t.Errorf("outside it answers % x", a)
	}
}

// A subscriber's own limits are its quota; what nobody has left is no quota of its own.
func TestPCPQuotas(t *testing.T) {
	rules := func(ports, share string) string {
		return "inside: [in]\noutside: [out]\npcp: {on: [in]}\npools:\n  p: {addresses: 198.51.100.20, ports: " + ports + "}\n" + share + "rules:\n  - {snat: 10.0.0.0/24, to: p}\n"
	}
	const share = "subscribers: {classes: {default: {%s}}}\n"
	cases := []struct {
		name, rules string
		want        int
	}{
		{"ports", rules("1024-65535", fmt.Sprintf(share, "ports: 2")), 10},
		{"sessions", rules("1024-65535", fmt.Sprintf(share, "sessions: 2")), 10},
		{"new sessions", rules("1024-65535", fmt.Sprintf(share, "new_per_second: 1, burst: 2")), 10},
		{"the pool's ports", rules("20000-20001", fmt.Sprintf(share, "sessions: 1000")), 8},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := servePCP(t, c.rules, AttachTC)
			first := b.request(1, 17, 7000, 600, nil)
			b.mapped(first)
			b.mapped(b.request(1, 17, 7001, 600, nil))
			a := b.ask(b.client, "10.0.0.1:5351", b.request(1, 17, 7002, 600, nil))
			if len(a) < 24 || int(a[3]) != c.want || binary.BigEndian.Uint32(a[4:]) != 30 {
				t.Errorf("a third mapping: % x, want result %d for 30 s", a, c.want)
			}
			if r := b.result(first); r != 0 && c.name != "new sessions" {
				t.Errorf("one that is there is not extended: result %d", r)
			}
			s, err := ReadSubscribers(b.gateway, SubscriberOptions{})
			if err != nil || len(s.Rows) != 1 || s.Rows[0].Sessions != 2 || *s.Rows[0].Ports != 2 {
				t.Errorf("the subscriber has %+v (%v)", s, err)
			}
		})
	}
}

// A flood is answered as far as the limit goes, and costs no other client its answers.
func TestPCPFlood(t *testing.T) {
	b := servePCP(t, pcpRules, AttachTC)
	b.in(b.client, func() error {
		l, err := netlink.LinkByName("eth0")
		a, err2 := netlink.ParseAddr("10.0.0.3/24")
		return errors.Join(err, err2, netlink.AddrAdd(l, a))
	})
	answered, began := 0, time.Now()
	b.in(b.client, func() error {
		c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 0, 0, 3)}, &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 5351})
		if err != nil {
			return err
		}
		defer c.Close()
		for range 5000 {
			if _, err := c.Write([]byte{0, 0}); err != nil {
				return err
			}
		}
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		for buffer := make([]byte, 64); ; answered++ {
			if _, err := c.Read(buffer); err != nil {
				return nil
			}
		}
	})
	most := 64 + int(16*time.Since(began).Seconds()) + 1
	if answered == 0 || answered > most {
		t.Errorf("%d of 5000 requests were answered, want 1 to %d", answered, most)
	}
	b.mapped(b.request(1, 17, 7000, 600, nil))
}

// PEER keeps a mapping, and the session of it, for longer than packets do.
func TestPCPPeer(t *testing.T) {
	rules := strings.Replace(pcpRules, "rules:", "defaults: {timeouts: {udp: 2s, port_hold_down: 1s}}\nrules:", 1)
	b := servePCP(t, rules, AttachTC)
	peer := func(q []byte) {
		binary.BigEndian.PutUint16(q[60:], 9000)
		remote := netip.MustParseAddr("::ffff:198.51.100.9").As16()
		copy(q[64:], remote[:])
	}
	var in net.PacketConn
	b.in(b.client, func() (err error) { in, err = net.ListenPacket("udp4", "10.0.0.2:7200"); return err })
	defer in.Close()
	var out net.PacketConn
	b.in(b.server, func() (err error) { out, err = net.ListenPacket("udp4", "198.51.100.9:9000"); return err })
	defer out.Close()
	if _, err := in.WriteTo([]byte("open"), &net.UDPAddr{IP: net.IPv4(198, 51, 100, 9), Port: 9000}); err != nil {
		t.Fatal(err)
	}
	_ = out.SetReadDeadline(time.Now().Add(patient))
	_, from, err := out.ReadFrom(make([]byte, 10))
	if err != nil {
		t.Fatal(err)
	}
	port := b.mapped(b.request(2, 17, 7200, 600, peer))
	if have := from.(*net.UDPAddr).Port; have != int(port) {
		t.Fatalf("the session has port %d, PEER says %d", have, port)
	}
	time.Sleep(9 * time.Second) // longer than a session lives by its packets, and its memory
	n := 0
	e, err := Open(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(e.Sessions(func(s *rulefile.Session) bool { n++; return true }), e.Close())
	if n != 1 || err != nil {
		t.Errorf("%d sessions after four timeouts (%v)", n, err)
	}
	if _, err := out.WriteTo([]byte("still"), from); err != nil {
		t.Fatal(err)
	}
	_ = in.SetReadDeadline(time.Now().Add(patient))
	if _, _, err := in.ReadFrom(make([]byte, 10)); err != nil {
		t.Errorf("the remote endpoint does not reach it: %v", err)
	}
}

// PEER keeps an established TCP connection that is silent for longer than its time-out, so that either end may
// speak first. When both have closed it, it ends as any other. On both hooks; with address-and-port-dependent
// mapping the session has a port of its own; and of one that was opened from outside the remote end is the owner.
func TestPCPPeerTCP(t *testing.T) {
	for _, attach := range []Attach{AttachTC, AttachXDP} {
		for _, c := range []struct {
			name, mapping string
			outside       bool
		}{
			{"own mapping", "endpoint-independent", false},
			{"own port", "address-and-port-dependent", false},
			{"opened from outside", "endpoint-independent", true},
		} {
			t.Run(string(attach)+" "+c.name, func(t *testing.T) { testPCPPeerTCP(t, attach, c.mapping, c.outside) })
		}
	}
}

func testPCPPeerTCP(t *testing.T, attach Attach, mapping string, outside bool) {
	const timeouts = "tcp_established: 2s, tcp_opening: 2s, tcp_closing: 2s, tcp_reset: 2s, port_hold_down: 1s"
	b := servePCP(t, strings.Replace(pcpRules, "rules:", "defaults: {mapping: "+mapping+", timeouts: {"+timeouts+"}}\nrules:", 1), attach)
	connect := func(from *netns.Handle, at string, l net.Listener, to string) (here, there net.Conn) {
		b.in(from, func() (err error) {
			local, err := net.ResolveTCPAddr("tcp4", at)
			if err == nil {
				here, err = (&net.Dialer{Timeout: patient, LocalAddr: local}).Dial("tcp4", to)
			}
			return err
		})
		there, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{here, there} {
			t.Cleanup(func() { c.Close() })
			if err := c.SetDeadline(time.Now().Add(patient)); err != nil {
				t.Fatal(err)
			}
		}
		return here, there
	}
	says := func(from, to net.Conn, text string) {
		t.Helper()
		if err := say(from, to, text); err != nil {
			t.Fatal(err)
		}
	}
	sessions := func(from netip.AddrPort) (n int) {
		e, err := Open(b.gateway)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(e.Sessions(func(s *rulefile.Session) bool {
			if s.Source.AddrPort == from {
				n++
			}
			return true
		}), e.Close())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	peer := netip.MustParseAddrPort("10.0.0.2:7300") // whose session it is
	if outside {
		peer = netip.MustParseAddrPort("198.51.100.9:9000")
	}
	l := b.listen(b.server, "198.51.100.9:9001")
	var client, server net.Conn
	if outside {
		at := b.mapped(b.request(1, 6, 7300, 600, nil))
		server, client = connect(b.server, "198.51.100.9:9000", b.listen(b.client, "10.0.0.2:7300"), fmt.Sprintf("198.51.100.1:%d", at))
	} else {
		client, server = connect(b.client, "10.0.0.2:7300", b.listen(b.server, "198.51.100.9:9000"), "198.51.100.9:9000")
	}
	says(client, server, "login")
	port := b.mapped(b.request(2, 6, 7300, 600, func(q []byte) {
		binary.BigEndian.PutUint16(q[60:], 9000)
		remote := netip.MustParseAddr("::ffff:198.51.100.9").As16()
		copy(q[64:], remote[:])
	}))
	if have := server.RemoteAddr().(*net.TCPAddr).Port; have != int(port) {
		t.Fatalf("the connection has port %d, PEER says %d", have, port)
	}
	for i, first := range [][2]net.Conn{{server, client}, {client, server}} {
		// The end of a younger one, without PEER, shows that the time-out is over.
		at := netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), uint16(7301+i))
		connect(b.client, at.String(), l, l.Addr().String())
		ktest.Wait(t, patient, "the connection without PEER to be removed", func() bool { return sessions(at) == 0 })
		if n := sessions(peer); n != 1 {
			t.Fatalf("%d sessions of the connection with PEER", n)
		}
		says(first[0], first[1], "still")
		says(first[1], first[0], "there")
	}
	client.Close()
	server.Close()
	ktest.Wait(t, patient, "the session of the closed connection to be removed", func() bool { return sessions(peer) == 0 })
}

// Mappings expire without natkit serve.
func TestPCPExpiry(t *testing.T) {
	b := servePCP(t, strings.Replace(pcpRules, "{on: [in]", "{on: [in], lifetime: {min: 1s, max: 1h}", 1), AttachTC)
	b.mapped(b.request(1, 17, 7000, 1, nil))
	b.end()
	ktest.Wait(t, patient, "the mapping to expire", func() bool { return len(b.leases()) == 0 })
}

// When an external address is no longer the gateway's its mappings end, the epoch begins again, and
// both protocols announce it.
func TestPCPAnnounce(t *testing.T) {
	b := servePCP(t, pcpRules, AttachTC)
	b.mapped(b.request(1, 17, 7000, 600, nil))
	time.Sleep(2100 * time.Millisecond) // the epoch has whole seconds: one that goes on is 2 or more
	var hear *net.UDPConn
	b.in(b.client, func() (err error) {
		l, err := net.InterfaceByName("eth0")
		if err == nil {
			hear, err = net.ListenMulticastUDP("udp4", l, &net.UDPAddr{IP: net.IPv4(224, 0, 0, 1), Port: 5350})
		}
		return err
	})
	defer hear.Close()
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		old, err2 := netlink.ParseAddr("198.51.100.1/24")
		next, err3 := netlink.ParseAddr("198.51.100.2/24")
		return errors.Join(err, err2, err3, netlink.AddrDel(l, old), netlink.AddrAdd(l, next))
	})
	b.hears("followed", "")
	ktest.Wait(t, patient, "the mapping to end", func() bool { return len(b.leases()) == 0 })
	_ = hear.SetReadDeadline(time.Now().Add(patient))
	// The address is announced at once, the loss when GC has ended the mapping.
	announced, address, again := 0, 0, false
	for buffer := make([]byte, 100); announced < 4 || address < 4 || !again; { // of ten, whose pauses double
		n, from, err := hear.ReadFromUDPAddrPort(buffer)
		if err != nil {
			t.Fatalf("PCP announced %d times, the address %d times, a new epoch %t: %v", announced, address, again, err)
		}
		if from.Addr() != netip.MustParseAddr("10.0.0.1") || from.Port() != 5351 {
			t.Fatalf("an announcement from %s", from)
		}
		switch {
		case n == 24 && buffer[0] == 2 && buffer[1] == 128:
			announced++
			again = again || binary.BigEndian.Uint32(buffer[8:]) < 2
		case n == 12 && buffer[1] == 128 && bytes.Equal(buffer[8:12], []byte{198, 51, 100, 2}):
			address++
		}
	}
	a := b.ask(b.client, "10.0.0.1:5351", b.request(1, 17, 7000, 600, nil))
	if len(a) < 60 || a[3] != 0 || !bytes.Equal(a[56:60], []byte{198, 51, 100, 2}) {
		t.Errorf("asked again: % x", a)
	}
}

// Of a subscriber with several port blocks a mapping gets the port it asks for in any of them.
func TestPCPPortInLaterBlock(t *testing.T) {
	b := servePCP(t, `inside: [in]
outside: [out]
pcp: {on: [in]}
pools:
  cgn: {addresses: [198.51.100.20], blocks: {size: 64, extra: 64, at_most: 4}}
rules:
  - {snat: 10.0.0.0/24, to: cgn}
`, AttachTC)
	b.in(b.client, func() error { // more than a block of UDP
		for port := range 100 {
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 20000 + port}, &net.UDPAddr{IP: net.IPv4(198, 51, 100, 9), Port: 9})
			if err != nil {
				return err
			}
			_, err = c.Write([]byte("x"))
			if err = errors.Join(err, c.Close()); err != nil {
				return err
			}
		}
		return nil
	})
	blocks := map[uint16]bool{}
	e, err := Open(b.gateway)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(e.Sessions(func(s *rulefile.Session) bool { blocks[s.SourceAfter.Port()/64] = true; return true }), e.Close())
	if err != nil || len(blocks) != 2 {
		t.Fatalf("blocks %v: %v", blocks, err)
	}
	internal := uint16(7000)
	for block := range blocks { // of TCP both have all ports
		want := block*64 + 17
		q := b.request(1, 6, internal, 600, func(q []byte) { binary.BigEndian.PutUint16(q[42:], want) })
		if got := b.mapped(q); got != want {
			t.Errorf("asked for %d of block %d, it has %d", want, block, got)
		}
		internal++
	}
	q := b.request(1, 6, 7100, 600, func(q []byte) { binary.BigEndian.PutUint16(q[42:], 1) })
	if got := b.mapped(q); !blocks[got/64] {
		t.Errorf("asked for a port in no block of its own, it has %d", got)
	}
}

// Debian's client of NAT-PMP gets a mapping, and gives it back.
func TestPCPNatpmpc(t *testing.T) {
	program, err := exec.LookPath("natpmpc")
	if err != nil {
		ktest.Missing(t, "natpmpc is not here")
	}
	b := servePCP(t, pcpRules, AttachTC)
	run := func(args ...string) string {
		var out bytes.Buffer
		b.in(b.client, func() error {
			cmd := exec.Command(program, append([]string{"-g", "10.0.0.1"}, args...)...)
			cmd.Stdout, cmd.Stderr = &out, &out
			return cmd.Run()
		})
		return out.String()
	}
	if out := run(); !strings.Contains(out, "Public IP address : 198.51.100.1") {
		t.Errorf("address:\n%s", out)
	}
	for _, protocol := range []string{"udp", "tcp"} {
		if out := run("-a", "7500", "7501", protocol, "600"); !strings.Contains(out, "Mapped public port 7500") {
			t.Errorf("%s:\n%s", protocol, out)
		}
		if !b.reaches(protocol+"4", "198.51.100.77", 7500, 7501) {
			t.Errorf("a stranger's %s does not arrive", protocol)
		}
		if out := run("-a", "7500", "7501", protocol, "0"); !strings.Contains(out, "Mapped public port") {
			t.Errorf("%s:\n%s", protocol, out)
		}
	}
}

// A Tailscale node's port mapper gets a mapping, by PCP, by NAT-PMP and by what it chooses, and gives it back:
// but not by PCP, for each of its requests has another nonce. make test-collectors builds it.
func TestPCPTailscale(t *testing.T) {
	ktest.Collectors(t)
	program := ktest.Tool(t, "portmapper")
	b := servePCP(t, pcpRules, AttachTC)
	for i, c := range []struct {
		services, has string
		ends          bool
	}{
		{"pcp", "PCP=true PMP=false", false},
		{"pmp", "PCP=false PMP=true", true},
		{"pcp,pmp", "PCP=true PMP=true", true},
	} {
		t.Run(c.services, func(t *testing.T) {
			port := uint16(7600 + i)
			cmd := exec.Command(program, c.services, "10.0.0.1", "10.0.0.2", fmt.Sprint(port))
			var log bytes.Buffer
			cmd.Stderr = &log
			in, err := cmd.StdinPipe()
			out, err2 := cmd.StdoutPipe()
			if err := errors.Join(err, err2); err != nil {
				t.Fatal(err)
			}
			b.in(b.client, cmd.Start)
			var has string
			var external netip.AddrPort
			lines := bufio.NewScanner(out)
			if lines.Scan() {
				has = lines.Text()
			}
			if lines.Scan() {
				external, err = netip.ParseAddrPort(lines.Text())
			}
			if has != c.has || err != nil || external.Addr().String() != "198.51.100.1" {
				t.Errorf("it has %q, want %q, and external endpoint %v (%v)", has, c.has, external, err)
			}
			reached := func() bool { return b.reaches("udp4", "198.51.100.77", external.Port(), port) }
			if !reached() {
				t.Error("a stranger does not reach the mapping")
			}
			in.Close()
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, &log)
			}
			if c.ends {
				ktest.Wait(t, 10*time.Second, "the mapping to end", func() bool { return !reached() })
			} else if !reached() {
				t.Error("another nonce has ended the mapping")
			}
		})
	}
}

// While the uplink is away a request fails as the network does, for half a minute: NOT_AUTHORIZED would
// keep the client from asking for half an hour.
func TestPCPUplinkGone(t *testing.T) {
	b := servePCP(t, pcpRules, AttachTC)
	b.mapped(b.request(1, 17, 7000, 600, nil))
	peer := b.request(2, 17, 7000, 600, func(q []byte) {
		to := netip.MustParseAddr("::ffff:192.0.2.9").As16()
		binary.BigEndian.PutUint16(q[60:], 443)
		copy(q[64:], to[:])
	})
	b.in(b.gateway, func() error {
		l, err := netlink.LinkByName("out")
		return errors.Join(err, netlink.LinkDel(l))
	})
	b.hears("waiting", "out")
	for name, q := range map[string][]byte{"MAP": b.request(1, 17, 7001, 600, nil), "refresh": b.request(1, 17, 7000, 600, nil), "PEER": peer} {
		a := b.ask(b.client, "10.0.0.1:5351", q)
		if len(a) < 24 || a[3] != 7 || binary.BigEndian.Uint32(a[4:]) != 30 {
			t.Errorf("%s: % x", name, a)
		}
	}
	if a := b.ask(b.client, "10.0.0.1:5351", []byte{0, 1, 0, 0, 27, 88, 0, 0, 0, 0, 2, 88}); len(a) < 4 || a[3] != 3 {
		t.Errorf("NAT-PMP: % x", a)
	}
}

// Another program on the port is reported once, and not each time that the machine is looked at.
func TestPCPPortTaken(t *testing.T) {
	b := newTestbed(t)
	var other net.PacketConn
	b.in(b.gateway, func() (err error) { other, err = net.ListenPacket("udp4", ":5351"); return err })
	s := &pcpTestbed{b.serve(pcpRules, ServeOptions{}), 1}
	s.hears("waiting", "another program has UDP port 5351")
	s.hears("up", "")
	time.Sleep(serveLook + 2*time.Second) // serve looks again, of which nothing tells: it is to report nothing
	for len(s.events) > 0 {
		if e := <-s.events; e.Kind == "waiting" {
			t.Errorf("%s again: %q", e.Kind, e.Why)
		}
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if a := s.ask(b.client, "10.0.0.1:5351", []byte{0, 0}); a == nil { // until the next look
		ktest.Wait(t, patient, "an answer", func() bool { return s.ask(b.client, "10.0.0.1:5351", []byte{0, 0}) != nil })
	}
}

// What keeps hosts from asking may pass: the engine is opened again with the next look.
func TestPCPBeginsLater(t *testing.T) {
	b := newTestbed(t)
	file, err := rulefile.Parse("nat.yaml", []byte(pcpRules))
	if err != nil {
		t.Fatal(err)
	}
	c := newPortControl(b.gateway)
	defer c.Close()
	if err := c.use(file); !errors.Is(err, ErrDown) {
		t.Fatalf("%v", err)
	}
	b.up(pcpRules, b.options())
	if err := c.follow(); err != nil {
		t.Fatal(err)
	}
	p := &pcpTestbed{&servedTestbed{testbed: b}, 1}
	if a := p.ask(b.client, "10.0.0.1:5351", []byte{0, 0}); len(a) != 12 {
		t.Errorf("% x", a)
	}
}

// A request with FILTER adds to those of the mapping, whatever its protocol and its pool.
func TestPCPFiltersAdd(t *testing.T) {
	b := servePCP(t, `inside: [in]
outside: [out]
pcp: {on: [in]}
pools:
  other: {addresses: [198.51.100.8]}
  cgn: {addresses: [198.51.100.5]}
rules:
  - {snat: 10.9.0.0/24, to: other}
  - {snat: 10.0.0.0/24, to: cgn}
`, AttachTC)
	for _, protocol := range []byte{6, 17} {
		for i, remote := range []string{"198.51.100.9", "198.51.100.77"} {
			filter := netip.MustParseAddr("::ffff:" + remote).As16()
			q := append(b.request(1, protocol, 7000, 600, nil), append([]byte{3, 0, 0, 20, 0, 128, 0, 0}, filter[:]...)...)
			if r := b.result(q); r != 0 {
				t.Fatalf("protocol %d, %s: result %d", protocol, remote, r)
			}
			for _, l := range b.leases() {
				if l.Protocol == protocol && len(l.Filters) != i+1 {
					t.Errorf("protocol %d, after %s: filters %v", protocol, remote, l.Filters)
				}
			}
		}
	}
	if n := len(b.leases()); n != 2 {
		t.Errorf("%d mappings", n)
	}
}
