// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
)

// Programs that people use, and the kernel's own sockets, behind a gateway of either
// engine, and of the kernel's accelerated: the same clients, the same packets, the same expectations. Where the engines
// differ on purpose a case says so by world.by, and docs/rules.md has it.
//
// The cases of a network run one after the other, networks at once.
var clientNetworks = []struct {
	name  string
	rules string
	accel bool // also by the kernel's NAT accelerated: there is more than first packets
	cases []clientCase
}{
	{"plain", plainRules, true, []clientCase{
		{"curl-and-nginx", clientCurl},
		{"iperf3", clientIperf},
		{"dns", clientDNS},
		{"ping", clientPing},
		{"traceroute", clientTraceroute},
		{"ftp-server-outside", clientFTP},
		{"ftp-server-inside", clientFTPForwarded},
		{"port-forward", clientForward},
		{"balanced", clientBalanced},
		{"one-to-one", clientOneToOne},
		{"hairpin", clientHairpin},
		{"gateway-itself", clientGateway},
		{"same-port", clientSamePort},
		{"refused", clientRefused},
		{"tcp-simultaneous-open", clientSimultaneousOpen},
	}},
	{"idle", plainRules + "defaults: {timeouts: {udp: 1s}}\n", false, []clientCase{
		{"udp", clientIdleUDP},
		{"tcp", clientIdleTCP},
		{"tcp-timed-out", clientIdleTooLong},
	}},
	{"stun", stunRules, false, []clientCase{
		{"discovery", clientDiscovery},
		{"hole-punching", clientPunch},
		{"ice", clientICE},
	}},
	{"changes", plainRules, true, []clientCase{
		{"path-mtu", clientPathMTU},
		{"apply-and-upgrade", clientApply},
		{"kill", clientKill},
		{"link-flap", clientFlap},
		{"address-change", clientAddressChange},
	}},
}

type clientCase struct {
	name string
	run  func(*world)
}

const plainRules = `
inside: [in]
outside: [out]
limits: {sessions: 32768, sources: 256}
rules:
  - masquerade: 10.0.0.0/8
  - map: 10.2.0.9 <-> 198.51.100.77
  - {dnat: "tcp 198.51.100.1:8080", to: "10.2.0.2:80"}
  - {dnat: "tcp 198.51.100.1:9000", to: ["10.2.0.3:80", "10.2.0.4:80"]}
  - {dnat: "tcp 198.51.100.1:21", to: 10.2.0.2}
  - {dnat: "tcp 198.51.100.1:30000-30009", to: 10.2.0.2}
`

// Ten thousand connections at once, all of which carry something both ways.
func TestClientsMany(t *testing.T) {
	ktest.Root(t)
	if testing.Short() {
		ktest.Unsupported(t, "takes long (-short)")
	}
	ktest.RunDir(t)
	some := newPayload(t, 1)
	for _, engine := range []Engine{EngineEBPF, EngineNFT} { // too few packets of each for accel
		// One after the other: this process holds all of them.
		t.Run(string(engine), func(t *testing.T) {
			w := newWorld(t, engine, plainRules)
			w.large, w.small = some, some
			clientManyConnections(w)
		})
	}
}

func TestClients(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	large, small := newPayload(t, 100<<20), newPayload(t, 10<<20)
	for _, network := range clientNetworks {
		for _, engine := range []Engine{EngineEBPF, EngineNFT, EngineAccel} {
			if engine == EngineAccel && !network.accel {
				continue
			}
			t.Run(network.name+"/"+string(engine), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, engine, network.rules)
				w.large, w.small = large, small
				for _, c := range network.cases {
					t.Run(c.name, func(t *testing.T) { c.run(w.as(t)) })
				}
			})
		}
	}
}

// world is a gateway with a router on either side, so that paths have hops, and hosts
// behind those:
//
//	client 10.1.0.2 ── 10.1.0.1 client │      │                              │     │
//	                                   │ home │ 10.0.0.2 ── gateway (testbed) ── │ isp │ server 203.0.113.1 ── 203.0.113.2, .3 server
//	peer 10.2.0.2-9 ── 10.2.0.1 peer   │      │                 198.51.100.9 │     │
type world struct {
	*testbed
	engine                          Engine
	large, small                    payload
	client, peer, home, isp, server *netns.Handle
}

const (
	clientAddr  = "10.1.0.2"
	peerAddr    = "10.2.0.2"
	gatewayAddr = "198.51.100.1"
	serverAddr  = "203.0.113.2"
)

func newWorld(t *testing.T, engine Engine, rules string) *world {
	t.Helper()
	b := makeTestbed(t)
	w := &world{testbed: b, engine: engine, home: b.client, isp: b.server}
	for _, h := range []**netns.Handle{&w.client, &w.peer, &w.server} {
		*h = b.namespace()
	}
	b.link(w.home, "client", "10.1.0.1/24", w.client, "eth0", clientAddr+"/24")
	b.link(w.home, "peer", "10.2.0.1/24", w.peer, "eth0", peerAddr+"/24")
	b.link(w.isp, "server", "203.0.113.1/24", w.server, "eth0", serverAddr+"/24")
	w.addresses(w.server, "203.0.113.3/24")
	w.addresses(w.peer, "10.2.0.3/24", "10.2.0.4/24", "10.2.0.9/24")
	for _, r := range []struct {
		ns      *netns.Handle
		to, via string
	}{
		{w.client, "0.0.0.0/0", "10.1.0.1"}, {w.peer, "0.0.0.0/0", "10.2.0.1"}, {w.server, "0.0.0.0/0", "203.0.113.1"},
		{w.gateway, "10.0.0.0/8", "10.0.0.2"}, {w.gateway, "0.0.0.0/0", "198.51.100.9"},
	} {
		w.in(r.ns, func() error {
			to, err := netlink.ParseIPNet(r.to)
			return errors.Join(err, netlink.RouteReplace(&netlink.Route{Dst: to, Gw: net.ParseIP(r.via)}))
		})
	}
	for _, router := range []*netns.Handle{w.home, w.isp, w.gateway} {
		w.in(router, func() error {
			return errors.Join(writeSetting(settingForward, "1"), writeSetting("net.ipv4.icmp_ratelimit", "0"))
		})
	}
	// Programs of the client that ask for any port leave this one to clientGateway.
	w.in(w.client, func() error { return writeSetting("net.ipv4.ip_local_reserved_ports", gatewaysPort) })
	o := b.options()
	o.Engine = engine
	if engine == EngineAccel {
		w.engine, o.Engine = EngineNFT, EngineNFT
	}
	b.up(rules, o)
	if engine == EngineAccel {
		w.accelerate()
	}
	return w
}

// accelerate has packets of the kernel's NAT go before the kernel stack, until the test ends.
func (w *world) accelerate() {
	w.t.Helper()
	o := w.accelOptions()
	o.Bypass = true        // engine nft counts packets by its rules
	p, err := planAccel(o) // beside what is up, which AccelOn refuses
	if err != nil {
		w.t.Fatal(err)
	}
	a, off, err := TemporaryAccel(p, w.gateway)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		stats, err := a.Stats()
		if err = errors.Join(err, off()); err != nil || stats.Reasons["forwarded"] == 0 {
			w.t.Errorf("%+v, %v: no packet used the fast path", stats, err)
		}
	})
}

// as is the world of a case of its own.
func (w *world) as(t *testing.T) *world {
	c, b := *w, *w.testbed
	b.t = t
	c.testbed = &b
	return &c
}

// by is what is expected of each engine, where they differ on purpose.
func by[T any](w *world, ebpf, nft T) T {
	if w.engine == EngineEBPF {
		return ebpf
	}
	return nft
}

func (w *world) addresses(ns *netns.Handle, addrs ...string) {
	w.t.Helper()
	w.in(ns, func() error {
		l, err := netlink.LinkByName("eth0")
		errs := []error{err}
		for _, addr := range addrs {
			a, err := netlink.ParseAddr(addr)
			errs = append(errs, err, netlink.AddrAdd(l, a))
		}
		return errors.Join(errs...)
	})
}

func (w *world) setMTU(ns *netns.Handle, name string, mtu int) {
	w.t.Helper()
	w.in(ns, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, mtu)
	})
}

// apply makes the rules those of the gateway.
func (w *world) apply(rules string) {
	w.t.Helper()
	if _, err := Apply(w.t.Context(), w.parse(rules), rules, Options{Namespace: w.gateway}); err != nil {
		w.t.Fatal(err)
	}
}

// hasSession reports whether the gateway has a living session from the internal endpoint.
func (w *world) hasSession(protocol rulefile.Protocol, from netip.AddrPort) (found bool) {
	w.t.Helper()
	if w.engine == EngineNFT {
		w.in(w.gateway, func() error {
			_, err := conntrack.Dump(w.t.Context(), conntrack.Filter{Proto: uint8(protocol)}, func(f *conntrack.Flow) error {
				found = found || f.Orig.Src == from.Addr() && f.Orig.SrcPort == from.Port()
				return nil
			})
			return err
		})
		return found
	}
	e, err := Open(w.gateway)
	if err != nil {
		w.t.Fatal(err)
	}
	defer e.Close()
	err = e.Sessions(func(s *rulefile.Session) bool {
		found = s.Protocol == protocol && s.Source.AddrPort == from && s.State != "dead" && s.Expires > 0
		return !found
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}

// patience is how long a test waits for what must come, on a machine that may be busy.
const patience = 2 * time.Minute

// dial connects over TCP from an address of a namespace.
func (w *world) dial(ns *netns.Handle, from, to string) net.Conn {
	w.t.Helper()
	var c net.Conn
	w.in(ns, func() (err error) {
		local, err := net.ResolveTCPAddr("tcp4", from)
		if err != nil {
			return err
		}
		c, err = (&net.Dialer{Timeout: patience, LocalAddr: local}).Dial("tcp4", to)
		return err
	})
	w.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// packets opens a UDP socket that ends with the test.
func (w *world) packets(ns *netns.Handle, at string) net.PacketConn {
	w.t.Helper()
	var c net.PacketConn
	w.in(ns, bound(func() (err error) { c, err = net.ListenPacket("udp4", at); return err }))
	w.t.Cleanup(func() { c.Close() })
	return c
}

// payload is a file of random bytes.
type payload struct {
	path  string
	bytes int64
	sum   string
}

func newPayload(t *testing.T, bytes int64) payload {
	t.Helper()
	p := payload{path: filepath.Join(t.TempDir(), "payload"), bytes: bytes}
	f, err := os.Create(p.path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.New()
	_, err = io.CopyN(io.MultiWriter(f, sum), rand.NewChaCha8([32]byte{}), bytes)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	p.sum = fmt.Sprintf("%x", sum.Sum(nil))
	return p
}

// digest is the SHA-256 of what is read.
func (w *world) digest(r io.Reader) string {
	w.t.Helper()
	sum := sha256.New()
	if _, err := io.Copy(sum, r); err != nil {
		w.t.Error(err)
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// during runs fn while something else goes on, which ends when the channel gives.
func during(fn func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	return done
}

// background ends with the test, or when a program takes longer than anybody would wait.
func (w *world) background() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), 6*time.Minute)
	w.t.Cleanup(cancel)
	return ctx
}
