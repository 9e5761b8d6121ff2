// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// A hundred megabytes each way come out as they went in, and what TCP hands over in one
// piece (GSO) goes through the gateway in one piece.
func clientCurl(w *world) {
	frames, bytes := w.forwarded()
	w.transfer(w.client, w.nginx(w.server, serverAddr+":80"), "http://"+serverAddr, w.large, "/large")
	if who := w.curl(w.client, "http://"+serverAddr+"/who"); who != gatewayAddr {
		w.t.Errorf("the server saw %s, want %s", who, gatewayAddr)
	}
	framesAfter, bytesAfter := w.forwarded()
	frames, bytes = framesAfter-frames, bytesAfter-bytes
	if bytes < uint64(2*w.large.bytes) || bytes/frames < 3000 {
		w.t.Errorf("%d bytes in %d frames: segments are not kept together", bytes, frames)
	}
}

// transfer downloads and uploads a payload, between curl and an nginx.
func (w *world) transfer(ns *netns.Handle, puts, url string, p payload, path string) {
	w.t.Helper()
	if sum := w.fetch(ns, url+path); sum != p.sum {
		w.t.Errorf("downloaded %s, want %s", sum, p.sum)
	}
	w.curl(ns, "-T", p.path, url+"/put/up")
	if sum := w.digestOf(filepath.Join(puts, "up")); sum != p.sum {
		w.t.Errorf("uploaded %s, want %s", sum, p.sum)
	}
}

// forwarded is what the gateway has sent on both sides.
func (w *world) forwarded() (frames, bytes uint64) {
	w.t.Helper()
	w.in(w.gateway, func() error {
		for _, name := range []string{"in", "out"} {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			frames += l.Attrs().Statistics.TxPackets
			bytes += l.Attrs().Statistics.TxBytes
		}
		return nil
	})
	return frames, bytes
}

func clientIperf(w *world) {
	for i, args := range [][]string{{"-n", "30M"}, {"-n", "30M", "-R"}, {"-n", "30M", "-P", "4"}, {"-u", "-b", "50M", "-n", "2M"}, {"-u", "-b", "50M", "-n", "2M", "-R"}} {
		// A server of its own: it refuses who comes before it has done with the one before.
		port := fmt.Sprint(5201 + i)
		w.start(w.server, serverAddr+":"+port, ktest.Tool(w.t, "iperf3"), "-s", "-B", serverAddr, "-p", port)
		if received := w.iperf(w.client, serverAddr, append(args, "-p", port)...); received < 1<<20 {
			w.t.Errorf("iperf3 %s: %d bytes received", args, received)
		}
	}
}

// A hundred questions to a name server, each from a port of its own.
func clientDNS(w *world) {
	server := w.packets(w.server, serverAddr+":53")
	go func() {
		data := make([]byte, 1500)
		for {
			n, from, err := server.ReadFrom(data)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(data[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			m.Response, m.Additionals = true, nil
			if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class},
					Body:   &dnsmessage.AResource{A: [4]byte{192, 0, 2, byte(len(q.Name.String()))}},
				}}
			}
			if answer, err := m.Pack(); err == nil {
				server.WriteTo(answer, from)
			}
		}
	}()
	resolver := net.Resolver{PreferGo: true, StrictErrors: true, Dial: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
		err = w.client.Do(func() error { c, err = (&net.Dialer{}).DialContext(ctx, "udp4", serverAddr+":53"); return err })
		return c, err
	}}
	for i := range 100 {
		name := fmt.Sprintf("host%s.example.", strings.Repeat("x", i%20))
		addrs, err := resolver.LookupNetIP(w.background(), "ip4", name)
		if want := netip.AddrFrom4([4]byte{192, 0, 2, byte(len(name))}); err != nil || !slices.Equal(addrs, []netip.Addr{want}) {
			w.t.Fatalf("%s: %v, %v; want %s", name, addrs, err, want)
		}
	}
}

// Echoes that fit, and that are fragments on every link.
func clientPing(w *world) {
	for _, size := range []string{"56", "1472", "4000", "20000"} {
		w.pings(w.client, serverAddr, 10, "-s", size)
		w.pings(w.server, "198.51.100.77", 10, "-s", size)
	}
}

// Each router answers for itself, whatever the probes are. From outside a mapped host's
// address hides the gateway and everything behind it.
func clientTraceroute(w *world) {
	want := []string{"10.1.0.1", "10.0.0.1", "198.51.100.9", serverAddr}
	for _, probe := range [][]string{{"-U"}, {"-I"}, {"-T", "-p", "80"}} {
		if hops := w.hops(w.client, serverAddr, probe...); !slices.Equal(hops, want) {
			w.t.Errorf("traceroute %s: %s, want %s", probe, hops, want)
		}
	}
	want = []string{"203.0.113.1", "198.51.100.77", "198.51.100.77", "198.51.100.77"}
	for _, probe := range [][]string{{"-U"}, {"-I"}} {
		if hops := w.hops(w.server, "198.51.100.77", probe...); !slices.Equal(hops, want) {
			w.t.Errorf("traceroute %s from outside: %s, want %s", probe, hops, want)
		}
	}
}

// To a server outside passive transfers work both ways. Active ones do not, on either
// engine: the client names its internal address to the server, and nobody reads along.
func clientFTP(w *world) {
	root := w.vsftpd(w.server, serverAddr, serverAddr)
	if sum := w.fetch(w.client, "ftp://"+serverAddr+"/small"); sum != w.small.sum {
		w.t.Errorf("downloaded %s, want %s", sum, w.small.sum)
	}
	w.curl(w.client, "-T", w.small.path, "ftp://"+serverAddr+"/up/small")
	if sum := w.digestOf(filepath.Join(root, "up", "small")); sum != w.small.sum {
		w.t.Errorf("uploaded %s, want %s", sum, w.small.sum)
	}
	out, err := w.try(w.client, ktest.Tool(w.t, "curl"), "-sS", "--max-time", "20", "--ftp-port", "-", "ftp://"+serverAddr+"/small", "-o", os.DevNull)
	const portRefused = 30 // of curl: the server won't connect to that address
	if ended := (*exec.ExitError)(nil); !errors.As(err, &ended) || ended.ExitCode() != portRefused {
		w.t.Errorf("active: %v: %s", err, out)
	}
}

// A server inside, whose ports are forwarded and that knows its external address, can do
// both.
func clientFTPForwarded(w *world) {
	w.vsftpd(w.peer, peerAddr, gatewayAddr)
	for _, mode := range []string{"--ftp-pasv", "--ftp-port=-"} {
		args := []string{"ftp://" + gatewayAddr + "/small", "--disable-epsv"}
		if flag, value, ok := strings.Cut(mode, "="); ok {
			args = append(args, flag, value)
		}
		if sum := w.fetch(w.server, args...); sum != w.small.sum {
			w.t.Errorf("%s: downloaded %s, want %s", mode, sum, w.small.sum)
		}
	}
}

// whoami answers every connection with its own address and whom it came from.
func (w *world) whoami(ns *netns.Handle, at string) {
	w.t.Helper()
	w.serveTCP(ns, at, func(c net.Conn) { fmt.Fprintln(c, c.LocalAddr(), c.RemoteAddr()) })
}

// who asks a whoami from an address: who it is, and whom it sees.
func (w *world) who(ns *netns.Handle, from, to string) (server, client netip.AddrPort) {
	w.t.Helper()
	line, err := bufio.NewReader(w.dial(ns, from, to)).ReadString('\n')
	a, b, _ := strings.Cut(strings.TrimSpace(line), " ")
	server, err1 := netip.ParseAddrPort(a)
	client, err2 := netip.ParseAddrPort(b)
	if err := errors.Join(err, err1, err2); err != nil {
		w.t.Fatal(err)
	}
	return server, client
}

func clientForward(w *world) {
	puts := w.nginx(w.peer, peerAddr+":80")
	const url = "http://" + gatewayAddr + ":8080"
	if who := w.curl(w.server, url+"/who"); who != serverAddr {
		w.t.Errorf("the forwarded server saw %s, want %s", who, serverAddr)
	}
	w.transfer(w.server, puts, url, w.small, "/small")
}

// Every client keeps its target, and each target has clients.
func clientBalanced(w *world) {
	targets := []string{"10.2.0.3:80", "10.2.0.4:80"}
	for _, at := range targets {
		w.whoami(w.peer, at)
	}
	clients := map[netip.AddrPort]int{}
	for i := range 32 {
		from := fmt.Sprintf("203.0.113.%d", 100+i)
		w.addresses(w.server, from+"/24")
		first, seen := w.who(w.server, from+":0", gatewayAddr+":9000")
		if seen.Addr().String() != from {
			w.t.Errorf("%s was seen as %s", from, seen)
		}
		for range 3 {
			if again, _ := w.who(w.server, from+":0", gatewayAddr+":9000"); again != first {
				w.t.Errorf("%s met %s, and then %s", from, first, again)
			}
		}
		clients[first]++
	}
	for _, at := range targets {
		if clients[netip.MustParseAddrPort(at)] == 0 {
			w.t.Errorf("%s got none of 32 clients: %v", at, clients)
		}
	}
}

// A mapped host keeps its ports both ways.
func clientOneToOne(w *world) {
	w.whoami(w.server, serverAddr+":7")
	w.whoami(w.peer, "10.2.0.9:7")
	if _, seen := w.who(w.peer, "10.2.0.9:700", serverAddr+":7"); seen != netip.MustParseAddrPort("198.51.100.77:700") {
		w.t.Errorf("the server saw %s", seen)
	}
	if at, seen := w.who(w.server, serverAddr+":701", "198.51.100.77:7"); at.String() != "10.2.0.9:7" || seen.String() != serverAddr+":701" {
		w.t.Errorf("%s saw %s", at, seen)
	}
}

// An internal host meets another by its external address, and is seen by an outside one.
func clientHairpin(w *world) {
	puts := w.nginx(w.peer, peerAddr+":80")
	const url = "http://" + gatewayAddr + ":8080"
	if who := w.curl(w.client, url+"/who"); who != gatewayAddr {
		w.t.Errorf("the inside server saw %s, want %s", who, gatewayAddr)
	}
	w.transfer(w.client, puts, url, w.small, "/small")
	w.whoami(w.peer, "10.2.0.9:7")
	if at, seen := w.who(w.client, clientAddr+":0", "198.51.100.77:7"); at.String() != "10.2.0.9:7" || seen.Addr().String() != by(w, gatewayAddr, "198.51.100.77") {
		w.t.Errorf("%s saw %s", at, seen)
	}
}

// gatewaysPort is one that the gateway may give its own connections.
const gatewaysPort = "40000"

// What the gateway itself serves is there from both sides, and what it asks for comes back
// to it, though a client has the same port. The kernel gives it another one then.
func clientGateway(w *world) {
	w.whoami(w.gateway, "0.0.0.0:7")
	w.whoami(w.server, serverAddr+":7")
	for _, c := range []struct {
		ns       *netns.Handle
		from, to string
	}{
		{w.client, clientAddr, "10.0.0.1"}, {w.client, clientAddr, gatewayAddr}, {w.server, serverAddr, gatewayAddr},
	} {
		at, seen := w.who(c.ns, c.from+":0", c.to+":7")
		if at.Addr().String() != c.to || seen.Addr().String() != c.from {
			w.t.Errorf("%s asked %s: %s saw %s", c.from, c.to, at, seen)
		}
	}
	if _, seen := w.who(w.client, clientAddr+":"+gatewaysPort, serverAddr+":7"); seen.Addr().String() != gatewayAddr {
		w.t.Errorf("the server saw the client as %s", seen)
	}
	if _, seen := w.who(w.gateway, gatewayAddr+":"+gatewaysPort, serverAddr+":7"); seen.Addr().String() != gatewayAddr || (fmt.Sprint(seen.Port()) == gatewaysPort) != by(w, true, false) {
		w.t.Errorf("the server saw the gateway as %s", seen)
	}
	w.pings(w.gateway, serverAddr, 3)
	w.pings(w.server, gatewayAddr, 3)
}

// Two hosts with the same port, to the same server, at the same time.
func clientSamePort(w *world) {
	l := w.listen(w.server, serverAddr+":7")
	seen := map[string]bool{}
	for _, from := range []struct {
		ns   *netns.Handle
		addr string
	}{{w.client, clientAddr}, {w.peer, peerAddr}} {
		inside := w.dial(from.ns, from.addr+":20100", l.Addr().String())
		outside, err := l.Accept()
		if err != nil {
			w.t.Fatal(err)
		}
		defer outside.Close()
		seen[outside.RemoteAddr().String()] = true
		outside.SetDeadline(time.Now().Add(patience))
		if err := errors.Join(say(inside, outside, from.addr), say(outside, inside, "to "+from.addr)); err != nil {
			w.t.Error(err)
		}
	}
	if len(seen) != 2 || !seen[gatewayAddr+":20100"] {
		w.t.Errorf("the server saw %v", seen)
	}
}

// Who refuses is heard: a reset, and ICMP errors of the host and of routers, both ways.
func clientRefused(w *world) {
	w.in(w.isp, func() error {
		to := &net.IPNet{IP: net.IPv4(203, 0, 113, 66).To4(), Mask: net.CIDRMask(32, 32)}
		return netlink.RouteAdd(&netlink.Route{Dst: to, Type: unix.RTN_UNREACHABLE})
	})
	for _, tt := range []struct {
		ns          *netns.Handle
		network, to string
		want        error
	}{
		{w.client, "tcp4", serverAddr + ":9", unix.ECONNREFUSED},
		{w.client, "tcp4", "203.0.113.66:9", unix.EHOSTUNREACH},
		{w.client, "udp4", serverAddr + ":9", unix.ECONNREFUSED},
		{w.server, "tcp4", "198.51.100.77:9", unix.ECONNREFUSED},
		{w.server, "udp4", "198.51.100.77:9", unix.ECONNREFUSED},
	} {
		err := tt.ns.Do(func() error {
			c, err := net.DialTimeout(tt.network, tt.to, patience)
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			if _, err := c.Write([]byte("hello")); err != nil {
				return err
			}
			_, err = c.Read(make([]byte, 1))
			return err
		})
		if !errors.Is(err, tt.want) {
			w.t.Errorf("%s to %s: %v, want %v", tt.network, tt.to, err, tt.want)
		}
	}
}

// Both ends connect, and neither listens (RFC 5382 REQ-2a). The client's SYN is lost
// behind the gateway, which so sees a SYN from either side. On a busy machine the client
// may have repeated its own before that of the server came: then once more.
func clientSimultaneousOpen(w *world) {
	var err error
	for port := 20000; port < 20005; port++ {
		if err = w.openFromBothEnds(port); err == nil {
			return
		}
		w.t.Logf("port %d: %v", port, err)
	}
	w.t.Error(err)
}

func (w *world) openFromBothEnds(port int) error {
	w.t.Helper()
	type end struct {
		net.Conn
		err error
	}
	connect := func(ns *netns.Handle, from, to string) <-chan end {
		done := make(chan end, 1)
		go func() {
			var e end
			dialer := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from), Port: port}}
			e.err = ns.Do(func() (err error) {
				e.Conn, err = dialer.Dial("tcp4", net.JoinHostPort(to, fmt.Sprint(port)))
				return err
			})
			done <- e
		}()
		return done
	}
	lost := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP(serverAddr).To4(), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_BLACKHOLE}
	w.in(w.isp, func() error { return netlink.RouteAdd(lost) })
	client := connect(w.client, clientAddr, serverAddr)
	ktest.Wait(w.t, patience, "the client's session", func() bool {
		return w.hasSession(rulefile.TCP, netip.MustParseAddrPort(fmt.Sprintf("%s:%d", clientAddr, port)))
	})
	w.in(w.isp, func() error { return netlink.RouteDel(lost) })
	a := <-connect(w.server, serverAddr, gatewayAddr)
	b := <-client
	for _, e := range []end{a, b} {
		if e.err == nil {
			defer e.Close()
			e.SetDeadline(time.Now().Add(patience))
		}
	}
	if err := errors.Join(a.err, b.err); err != nil {
		return err
	}
	return errors.Join(notRepeated(b.Conn), say(a, b, "hello"), say(b, a, "and back"))
}

// notRepeated is an error for a connection that has sent anything again.
func notRepeated(c net.Conn) error {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	var info *unix.TCPInfo
	err2 := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	if info.Total_retrans > 0 {
		return fmt.Errorf("%s repeated %d segments", c.LocalAddr(), info.Total_retrans)
	}
	return nil
}

// say has one end of a connection say something that the other must hear.
func say(from, to net.Conn, text string) error {
	heard := make([]byte, len(text))
	_, err := io.WriteString(from, text)
	if err == nil {
		_, err = io.ReadFull(to, heard)
	}
	if err != nil || string(heard) != text {
		return fmt.Errorf("%q came as %q: %w", text, heard, err)
	}
	return nil
}

func clientManyConnections(w *world) {
	w.t.Helper()
	const connections, files = 10_000, 12_000
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		w.t.Fatal(err)
	}
	if limit.Cur < files {
		ktest.Missing(w.t, "needs %d open files, of %d (ulimit -n)", files, limit.Cur)
	}
	w.nginx(w.server, serverAddr+":80")
	conns := make([]net.Conn, 0, connections)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	w.in(w.client, func() error {
		for range connections {
			c, err := net.DialTimeout("tcp4", serverAddr+":80", patience)
			if err != nil {
				return fmt.Errorf("connection %d: %w", len(conns), err)
			}
			conns = append(conns, c)
		}
		return nil
	})
	for i, c := range conns {
		if _, err := fmt.Fprintf(c, "GET /who HTTP/1.1\r\nHost: host\r\n\r\n"); err != nil {
			w.t.Fatalf("connection %d: %v", i, err)
		}
	}
	deadline := time.Now().Add(patience)
	for i, c := range conns {
		c.SetReadDeadline(deadline)
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			w.t.Fatalf("connection %d: %v", i, err)
		}
		if who, err := io.ReadAll(answer.Body); err != nil || string(who) != gatewayAddr {
			w.t.Fatalf("connection %d: the server saw %q, %v", i, who, err)
		}
	}
}

// chat is a client and a server outside that speak UDP.
type chat struct {
	w              *world
	client, server net.PacketConn
	to             *net.UDPAddr
	from           net.Addr // whom the server saw last
}

func (w *world) chat(port int) *chat {
	w.t.Helper()
	return &chat{
		w: w, client: w.packets(w.client, fmt.Sprintf("%s:%d", clientAddr, port)), server: w.packets(w.server, fmt.Sprintf("%s:%d", serverAddr, port)),
		to: &net.UDPAddr{IP: net.ParseIP(serverAddr), Port: port},
	}
}

// ask has the client send, and gives whom the server saw; nil if nothing came in time.
func (k *chat) ask(text string, limit time.Duration) net.Addr {
	k.w.t.Helper()
	if _, err := k.client.WriteTo([]byte(text), k.to); err != nil {
		k.w.t.Fatal(err)
	}
	k.server.SetReadDeadline(time.Now().Add(limit))
	for data := make([]byte, 100); ; {
		n, from, err := k.server.ReadFrom(data)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			k.w.t.Fatal(err)
		}
		if string(data[:n]) == text {
			k.from = from
			return from
		}
	}
}

// answer has the server send to whom it saw.
func (k *chat) answer(text string) {
	k.w.t.Helper()
	if _, err := k.server.WriteTo([]byte(text), k.from); err != nil {
		k.w.t.Fatal(err)
	}
}

// hears gives what the client gets next.
func (k *chat) hears() string {
	k.w.t.Helper()
	data := make([]byte, 100)
	k.client.SetReadDeadline(time.Now().Add(patience))
	n, _, err := k.client.ReadFrom(data)
	if err != nil {
		k.w.t.Fatal(err)
	}
	return string(data[:n])
}

// After its time-out nobody gets in any more. The client that goes on is seen as before on
// engine ebpf, whose mapping outlives its sessions; the kernel takes what came too late for
// its own, which takes the port from the client.
func clientIdleUDP(w *world) {
	k := w.chat(5000)
	before := k.ask("first", patience)
	k.answer("yes")
	if got := k.hears(); got != "yes" {
		w.t.Errorf("the client heard %q", got)
	}
	w.waitForEnd(rulefile.UDP, clientAddr+":5000")
	time.Sleep(100 * time.Millisecond) // the engine's clock ticks; this test's may be ahead of it
	k.answer("too late")
	// What comes from two sides at once has no order: it must be gone before the next.
	k.client.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if n, _, err := k.client.ReadFrom(make([]byte, 100)); err == nil {
		w.t.Errorf("the client heard %d bytes that came too late", n)
	}
	after := k.ask("second", patience)
	if w.engine == EngineEBPF && after.String() != before.String() || netip.MustParseAddrPort(after.String()).Addr().String() != gatewayAddr {
		w.t.Errorf("the server saw %s, and then %s", before, after)
	}
	k.answer("again")
	if got := k.hears(); got != "again" {
		w.t.Errorf("the client heard %q", got)
	}
}

func (w *world) waitForEnd(protocol rulefile.Protocol, from string) {
	w.t.Helper()
	ktest.Wait(w.t, patience, "the end of the session", func() bool {
		return !w.hasSession(protocol, netip.MustParseAddrPort(from))
	})
}

// shell is a connection like that of a terminal: silent for long, and then either side
// may speak.
type remoteShell struct {
	w              *world
	client, server net.Conn
}

func (w *world) shell(port int) *remoteShell {
	w.t.Helper()
	l := w.listen(w.server, fmt.Sprintf("%s:%d", serverAddr, port))
	s := &remoteShell{w: w, client: w.dial(w.client, fmt.Sprintf("%s:%d", clientAddr, port), l.Addr().String())}
	server, err := l.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { server.Close() })
	server.SetDeadline(time.Now().Add(patience))
	s.server = server
	s.says(s.client, s.server, "login")
	s.says(s.server, s.client, "prompt")
	return s
}

func (s *remoteShell) says(from, to net.Conn, text string) {
	s.w.t.Helper()
	if err := say(from, to, text); err != nil {
		s.w.t.Fatal(err)
	}
}

// A connection that is silent for less than its time-out stays, however short others are.
func clientIdleTCP(w *world) {
	s, k := w.shell(2200), w.chat(5001)
	k.ask("short", patience)
	w.waitForEnd(rulefile.UDP, clientAddr+":5001")
	s.says(s.server, s.client, "output")
	s.says(s.client, s.server, "input")
}

// A connection that was silent for longer is forgotten. If its internal host speaks first it
// is taken up again. If the server does, engine ebpf drops that silently, and what the
// server repeats gets through as soon as the internal host has spoken; the kernel's NAT takes
// it for its own and resets the server's end.
func clientIdleTooLong(w *world) {
	w.apply(plainRules + "defaults: {timeouts: {tcp_established: 1s}}\n")
	s := w.shell(2201)
	w.waitForEnd(rulefile.TCP, clientAddr+":2201")
	s.says(s.client, s.server, "input")
	s.says(s.server, s.client, "output")
	w.waitForEnd(rulefile.TCP, clientAddr+":2201")
	if _, err := io.WriteString(s.server, "late"); err != nil {
		w.t.Fatal(err)
	}
	if w.engine == EngineNFT {
		if n, err := s.server.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			w.t.Errorf("the server read %d bytes, %v", n, err)
		}
		return
	}
	s.says(s.client, s.server, "more input")
	heard := make([]byte, len("late"))
	if _, err := io.ReadFull(s.client, heard); err != nil || string(heard) != "late" {
		w.t.Errorf("the client heard %q, %v", heard, err)
	}
}

// Links of less than 1500 bytes behind, before and in the gateway: who sends more with DF
// is reported by whoever is before the link, and TCP goes on with less.
func clientPathMTU(w *world) {
	puts := w.nginx(w.server, serverAddr+":80")
	const url, mapped = "http://" + serverAddr, "198.51.100.77"
	// Engine ebpf asks the routes once a second; what was learned of the path is forgotten.
	told := func(ns *netns.Handle, to string, bytes int, want string) {
		w.t.Helper()
		ktest.Wait(w.t, patience, fmt.Sprintf("who sends %d bytes to %s to be told by %s", bytes, to, want), func() bool {
			w.in(ns, flushRouteCache)
			return w.tooBig(ns, to, bytes) == want
		})
	}
	// Before the server. Its own end is as before: it offers TCP more than gets through.
	w.setMTU(w.isp, "server", 1400)
	told(w.client, serverAddr, 1450, "198.51.100.9 1400")
	w.curl(w.client, "-T", w.small.path, url+"/put/up")
	if sum := w.digestOf(filepath.Join(puts, "up")); sum != w.small.sum {
		w.t.Errorf("uploaded %s, want %s", sum, w.small.sum)
	}
	w.setMTU(w.isp, "server", 1500)
	// Before the client, and before a mapped host.
	w.setMTU(w.home, "client", 1300)
	if sum := w.fetch(w.client, url+"/small"); sum != w.small.sum {
		w.t.Errorf("downloaded %s, want %s", sum, w.small.sum)
	}
	w.setMTU(w.home, "client", 1500)
	w.setMTU(w.home, "peer", 1350)
	w.setMTU(w.peer, "eth0", 1350)
	told(w.server, mapped, 1450, mapped+" 1350")
	w.pings(w.server, mapped, 3, "-s", "1440", "-M", "dont")
	// The gateway's own links.
	w.setMTU(w.gateway, "in", 1280)
	w.setMTU(w.home, "eth0", 1280)
	told(w.server, mapped, 1300, mapped+" 1280")
	w.pings(w.server, mapped, 3, "-s", "1300", "-M", "dont")
	w.setMTU(w.gateway, "in", 1500)
	w.setMTU(w.home, "eth0", 1500)
	w.setMTU(w.gateway, "out", 1280)
	w.setMTU(w.isp, "eth0", 1280)
	told(w.client, serverAddr, 1260, "10.0.0.1 1280")
	w.pings(w.client, serverAddr, 3, "-s", "1260", "-M", "dont")
	w.setMTU(w.gateway, "out", 1500)
	w.setMTU(w.isp, "eth0", 1500)
}

// flushRouteCache forgets what was learned of paths. The calling thread is in the
// namespace.
func flushRouteCache() error { return writeSetting("net.ipv4.route.flush", "1") }

// stream sends numbered datagrams as long as other things are done, and each only when the
// one before was answered: so none may be lost. All must come from one external endpoint. The
// pace leaves the machine to those other things.
func (w *world) stream(port int, doing <-chan error) {
	w.t.Helper()
	k := w.chat(port)
	want := fmt.Sprintf("%s:%d", gatewayAddr, port)
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for sent, done := 0, false; !done || sent < 1000; sent++ {
		<-pace.C
		select {
		case err := <-doing:
			if err != nil {
				w.t.Fatal(err)
			}
			done = true
		default:
		}
		text := fmt.Sprint("datagram ", sent)
		if from := k.ask(text, patience); from == nil || from.String() != want {
			w.t.Fatalf("%s came from %v, want %s", text, from, want)
		}
		k.answer(text)
		if got := k.hears(); got != text {
			w.t.Fatalf("%s was answered by %q", text, got)
		}
	}
}

// changed is plainRules with one more, another for each number.
func changed(i int) string {
	if i%2 == 1 {
		return plainRules
	}
	return plainRules + fmt.Sprintf("  - {dnat: \"udp 198.51.100.1:%d\", to: 10.2.0.5}\n", 7000+i)
}

// Rules, and on engine ebpf programs, are replaced twenty times while traffic flows.
func clientApply(w *world) {
	w.stream(5100, during(func() error {
		for i := range 20 {
			upgrade := w.engine == EngineEBPF && i%10 == 9
			if upgrade { // as after an upgrade of natkit
				rec, err := readRecord(w.gateway.Inode())
				if err != nil {
					return err
				}
				rec.Make = "another"
				if err := rec.write(w.gateway.Inode()); err != nil {
					return err
				}
			}
			file, err := rulefile.Parse("changed", []byte(changed(i)))
			if err != nil {
				return err
			}
			p, err := Apply(w.t.Context(), file, changed(i), Options{Namespace: w.gateway})
			if err != nil {
				return fmt.Errorf("apply %d: %w", i, err)
			}
			if p.Upgrade != upgrade {
				return fmt.Errorf("apply %d: upgrade %v", i, p.Upgrade)
			}
		}
		return nil
	}))
}

// natkit is killed (SIGKILL) while it applies rules, sooner or later in its work, and
// traffic flows on. Afterwards an apply does what it should.
func clientKill(w *world) {
	self, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	w.stream(5101, during(func() error {
		for i := range 10 {
			cmd := exec.Command(self, "apply", w.name, changed(i))
			var out bytes.Buffer
			cmd.Stdout = &out
			if err := cmd.Start(); err != nil {
				return err
			}
			kill := time.AfterFunc(time.Duration(i)*20*time.Millisecond, func() { cmd.Process.Kill() })
			err := cmd.Wait()
			kill.Stop()
			if err != nil && out.Len() > 0 {
				return fmt.Errorf("apply %d: %s", i, out.String())
			}
		}
		return nil
	}))
	w.apply(plainRules)
	if s, err := ReadStatus(w.gateway); err != nil || len(s.Problems) > 0 {
		w.t.Errorf("status %+v, %v", s, err)
	}
	w.stream(5102, during(func() error { return nil }))
}

// The link to the provider is gone for a moment, at its end, while a file comes down and
// datagrams go up. Both go on, by the same external endpoint.
func clientFlap(w *world) {
	w.nginx(w.server, serverAddr+":80")
	k := w.chat(5103)
	before := k.ask("before", patience)
	_, start := w.forwarded()
	sum := make(chan string, 1)
	go func() { sum <- w.fetch(w.client, "--limit-rate", "10M", "http://"+serverAddr+"/small") }()
	ktest.Wait(w.t, patience, "the download to begin", func() bool {
		_, bytes := w.forwarded()
		return bytes > start+1<<20
	})
	w.in(w.isp, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(l)
	})
	if k.ask("in between", 100*time.Millisecond) != nil {
		w.t.Error("a datagram came by a link that is down")
	}
	w.in(w.isp, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	})
	w.askUntil(k, before.String())
	if got := <-sum; got != w.small.sum {
		w.t.Errorf("downloaded %s, want %s", got, w.small.sum)
	}
}

// askUntil has the client send until the server sees whom it should.
func (w *world) askUntil(k *chat, want string) {
	w.t.Helper()
	i := 0
	ktest.Wait(w.t, patience, "the server to see "+want, func() bool {
		i++
		from := k.ask(fmt.Sprint("try ", i), 50*time.Millisecond)
		return from != nil && from.String() == want
	})
}

// The gateway's external address becomes another while traffic flows: the next packets are
// from the new one. Engine ebpf needs an apply for that, which `natkit status` asks for.
func clientAddressChange(w *world) {
	k := w.chat(5104)
	k.ask("before", patience)
	const changed = "198.51.100.2"
	w.in(w.gateway, func() error {
		l, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		old, err1 := netlink.ParseAddr(gatewayAddr + "/24")
		now, err2 := netlink.ParseAddr(changed + "/24")
		return errors.Join(err1, err2, netlink.AddrDel(l, old), netlink.AddrAdd(l, now),
			netlink.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Gw: net.ParseIP("198.51.100.9")}))
	})
	if w.engine == EngineEBPF {
		s, err := ReadStatus(w.gateway)
		if err != nil || !strings.Contains(strings.Join(s.Problems, ";"), "no longer has the address "+gatewayAddr) {
			w.t.Errorf("status %+v, %v", s, err)
		}
		w.apply(plainRules)
	}
	w.askUntil(k, changed+":5104")
	w.whoami(w.server, serverAddr+":7")
	if _, seen := w.who(w.client, clientAddr+":0", serverAddr+":7"); seen.Addr().String() != changed {
		w.t.Errorf("a new connection was seen as %s", seen)
	}
}

const stunRules = `
inside: [in]
outside: [out]
limits: {sessions: 4096, sources: 256}
rules:
  - {masquerade: 10.1.0.11/32, mapping: endpoint-independent, filtering: endpoint-independent}
  - {masquerade: 10.1.0.12/32, mapping: endpoint-independent, filtering: address-dependent}
  - {masquerade: 10.1.0.13/32, mapping: endpoint-independent, filtering: address-and-port-dependent}
  - {masquerade: 10.1.0.14/32, mapping: address-and-port-dependent, filtering: endpoint-independent}
  - {masquerade: 10.1.0.15/32, mapping: address-and-port-dependent, filtering: address-dependent}
  - {masquerade: 10.1.0.16/32, mapping: address-and-port-dependent, filtering: address-and-port-dependent}
`

// A server with two addresses and two ports reports what the NAT does (RFC 5780): what the
// rule of the host says, on engine ebpf; but a port that serves one remote endpoint lets
// in nobody else. The kernel keeps a lone host's port, and lets in answers only, whatever
// the rule; nor is there a way from inside to a port that a mapping has.
func clientDiscovery(w *world) {
	t := w.t
	turnserver, discovery := ktest.Tool(t, "turnserver"), ktest.Tool(t, "turnutils_natdiscovery")
	dir := t.TempDir()
	// What it opens last: UDP at the second address and port.
	w.start(w.server, "203.0.113.3:3479/udp", turnserver, "-n", "--listening-ip", serverAddr, "--listening-ip", "203.0.113.3", "--stun-only",
		"--no-cli", "--no-tls", "--no-dtls", "--log-file", "stdout", "--pidfile", filepath.Join(dir, "pid"), "--userdb", filepath.Join(dir, "db"))
	const eim, apdm = "Endpoint Independent Mapping", "Address and Port Dependent Mapping"
	const eif, adf, apdf = "Endpoint Independent Filtering", "Address Dependent Filtering", "Address and Port Dependent Filtering"
	var all sync.WaitGroup
	for _, tt := range []struct{ host, mapping, filtering string }{
		{"10.1.0.11", eim, by(w, eif, apdf)},
		{"10.1.0.12", eim, by(w, adf, apdf)},
		{"10.1.0.13", eim, apdf},
		{"10.1.0.14", by(w, apdm, eim), apdf},
		{"10.1.0.15", by(w, apdm, eim), apdf},
		{"10.1.0.16", by(w, apdm, eim), apdf},
	} {
		w.addresses(w.client, tt.host+"/24")
		all.Go(func() {
			out, err := w.try(w.client, discovery, "-m", "-f", "-L", tt.host, serverAddr)
			for _, want := range []string{tt.mapping, tt.filtering} {
				if err != nil || !strings.Contains(out, "NAT with "+want) {
					t.Errorf("%s: %v, want %s:\n%s", tt.host, err, want, out)
				}
			}
		})
	}
	all.Go(func() {
		out, err := w.try(w.client, discovery, "-H", "-L", "10.1.0.11", serverAddr)
		if hairpinned := strings.Contains(out, "successful hairpinning"); err != nil || hairpinned != by(w, true, false) {
			t.Errorf("hairpin: %v:\n%s", err, out)
		}
	})
	all.Wait()
}
