// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"natkit/internal/diagnose/probe"
	"natkit/internal/lab"
	"natkit/internal/nat/control"
	"natkit/internal/nat/rulefile"
)

// What can go wrong with translation: ports, rules that lead elsewhere, natkit's engine and accel.

// dstnat is the chain that a gateway of the lab lacks.
const dstnat = "nft 'add chain ip nat PREROUTING { type nat hook prerouting priority dstnat; }'"

var natFaults = []Fault{
	{
		Code:    "snat-ports-exhausted",
		Healthy: "twenty programs of the client send to one port of the server through masquerading",
		Broken:  "the rule that translates twenty flows to one destination allows four ports",
		Cured:   "a rule before it allows all ports",
		healthy: do(swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", 20, 20))),
		broken: onGateway("nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING ip saddr {clients} oifname eth0 meta l4proto tcp snat to {far}:5000-5003",
			"nft add rule ip nat POSTROUTING ip saddr {clients} oifname eth0 meta l4proto udp snat to {far}:5000-5003"),
		cure: follow("1024-65535"),
	},
	{
		Code:    "snat-port-race",
		Healthy: "two clients on two CPUs open connections to one server at the same time, from different source ports",
		Broken:  "two clients on two CPUs open connections from the same source ports, which masquerading tries to keep",
		Cured:   "masquerading chooses ports at random from the start",
		Note:    "the clients are two threads on two CPUs that synchronize before each SYN; the rule that the finding shows is replaced manually",
		clients: 2,
		healthy: do(needTwoCPUs, send(pairs(20000))),
		broken:  sendOnly(pairs(0)),
		cure: do(follow("list chain"), onGateway("nft flush chain ip nat POSTROUTING",
			"nft add rule ip nat POSTROUTING ip saddr {clients} oifname eth0 masquerade fully-random")),
	},
	{
		Code:    "stale-snat",
		Healthy: "UDP flows through a gateway that translates their source to its external address",
		Broken:  "the gateway has another external address now and a rule for it; older flows continue with the old one",
		Cured:   "their entries are removed, and the rules translate them again",
		healthy: do(echo(lab.RoleServer, 5353), onGateway("nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING oifname eth0 snat to {far}"),
			background(datagrams("{server}:5353", 5, 20))),
		broken: onGateway("ip addr del {far-net} dev eth0", "ip addr add 203.0.113.9/24 dev eth0",
			"nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING oifname eth0 snat to 203.0.113.9"),
		cure: follow("conntrack -D"),
	},
	{
		Code:    "stale-udp-dnat",
		Healthy: "clients send UDP to the gateway, whose rule translates to a server that never replies",
		Broken:  "the rule for a UDP service names another server now; older flows continue to the old one",
		Cured:   "their entries are removed, and the rules translate them again",
		healthy: do(swallow(lab.RoleServer, 5353), echo(lab.RoleServer, 5354),
			onGateway(dstnat, "nft add rule ip nat PREROUTING ip daddr {near} udp dport 53 dnat to {server}:5353"), background(datagrams("{near}:53", 5, 20))),
		broken: onGateway("nft flush chain ip nat PREROUTING", "nft add rule ip nat PREROUTING ip daddr {near} udp dport 53 dnat to {server}:5354"),
		cure:   follow("conntrack -D"),
	},
	{
		Code:    "answers-lost",
		Healthy: "web traffic through the gateway, and two packets for an address that nobody has",
		Broken:  "the rule that translates sources names an interface that is no longer the egress interface",
		Cured:   "a rule for the right interface",
		// The server, like any on the Internet, has no way to private addresses of others.
		healthy: do(onServer("ip route del default"), send(spray("10.65.0.1", 2, 100)), browse),
		broken:  onGateway("nft flush chain ip nat POSTROUTING", "nft add rule ip nat POSTROUTING oifname eth9 masquerade", "conntrack -F"),
		cure:    follow("masquerade", "MASQUERADE", "conntrack -D"),
	},
	{
		Code:    "hairpin-missing",
		Healthy: "a port of the gateway's external address is forwarded to a server in the clients' network; a client of that network uses the server's own address",
		Broken:  "a client of the server's own network uses the gateway's external address",
		Cured:   "the source of traffic back into this network is also translated",
		clients: 2,
		healthy: do(serveAt("client2", ":80", lab.HTTPServerOptions{}), onGateway(dstnat, "nft add rule ip nat PREROUTING ip daddr {far} tcp dport 8080 dnat to {client2}:80"),
			send(requests("http://{client2}/", 50))),
		broken: sendOnly(requests("http://{far}:8080/", 50)),
		cure:   follow("MASQUERADE", "hairpin", "conntrack -D"),
	},
	{
		Code:    "backend-silent",
		Healthy: "web traffic to a published port, behind which a program listens",
		Broken:  "the rule translates to a port of the backend on which no program listens any more",
		Cured:   "a rule with the right port",
		Note:    "only the backend knows the right port, so the cure is not a command of the finding",
		healthy: do(serve(lab.HTTPServerOptions{}), publishedAt(80), send(requests("http://{near}:8080/", 100))),
		broken:  publishedAt(8081),
		cure:    publishedAt(80),
	},
	{
		Code:    "port-blocks-exhausted",
		Healthy: "one subscriber of a pool whose only address has fifteen port blocks of 4096 ports",
		Broken:  "thirteen more subscribers have one block each, of which they use a port",
		Cured:   "the pool gives smaller blocks from now on; sessions and blocks in use stay as they are",
		healthy: do(onClient(manyAddresses), engine(fmt.Sprintf(carrier, "{size: 4096}"))),
		broken:  send(datagramsOfMany),
		cure:    follow("sed -i", "natkit"),
	},
	{
		Code:    "port-block-too-small",
		Healthy: "a subscriber has twenty sessions, and a block of 64 ports with another one like it",
		Broken:  "it also sends forty datagrams a second, each from another port: the ports of those before are in hold-down",
		Cured:   "extra blocks are larger, and there may be more of them",
		healthy: engine(fmt.Sprintf(carrier, "{size: 64, extra: 64, at_most: 1}")),
		broken:  do(before(9*time.Second, freshFlows(40, 1024)), send(freshFlows(40, 15000))),
		cure:    follow("sed -i", "natkit"),
	},
	{
		Code:    "engine-source-limit",
		Healthy: "a client has exactly as many sessions as the engine's rule file allows one host",
		Broken:  "the rule file allows one host five sessions fewer than the client needs",
		Cured:   "the limit is raised in the rule file, and the file is applied",
		healthy: engine(fmt.Sprintf("limits: {sessions_per_source: %d}\n", engineFlows) + masquerade),
		broken:  engine(fmt.Sprintf("limits: {sessions_per_source: %d}\n", engineFlows-5) + masquerade),
		cure:    follow("sed -i", "natkit"),
	},
	{
		Code:    "engine-drift",
		Healthy: "the engine masquerades behind an address; another one was added to the interface",
		Broken:  "the interface has lost the first address, and the engine still uses it",
		Cured:   "the rule file is applied again",
		healthy: do(engine(masquerade), onGateway("sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1", "ip addr add 203.0.113.3/24 dev eth0")),
		broken:  onGateway("ip addr del {far-net} dev eth0"),
		cure:    follow("natkit"),
	},
	{
		Code:    "accel-slow-path",
		Healthy: "natkit accel forwards UDP; there is little TCP, which takes the stack",
		Broken:  "a client asks a web server two hundred times a second: nearly all packets are TCP",
		Cured:   "acceleration is turned off, and on again with TCP",
		healthy: do(swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", 4, 20)), accelerate),
		broken:  browse,
		cure:    follow("natkit"),
	},
}

// publishedAt has a port of the gateway's inside address lead to one of the server, and to no other.
func publishedAt(port int) action {
	return onGateway(dstnat, "nft flush chain ip nat PREROUTING", fmt.Sprintf("nft add rule ip nat PREROUTING ip daddr {near} tcp dport 8080 dnat to {server}:%d", port))
}

// engineFlows is how many programs of the client send through the engine.
const engineFlows = 20

const masquerade = "rules:\n  - masquerade: {clients}\n"

// carrier is a rule file of a pool with port blocks, in which sessions end soon and their ports are
// in hold-down as long as usual.
const carrier = "pools: {cgn: {addresses: 203.0.113.9, blocks: %s}}\ndefaults: {timeouts: {udp: 2s}}\nrules:\n  - {snat: '{clients}', to: cgn}\n"

// manyAddresses gives the client the addresses that datagramsOfMany sends from.
const manyAddresses = "for n in $(seq 50 62); do ip addr add 192.168.0.$n/24 dev eth0; done"

// datagramsOfMany has each of these addresses send a flow.
func datagramsOfMany(ctx context.Context, s *faultRun) error {
	var wg sync.WaitGroup
	var failed [13]error
	for i := range failed {
		wg.Go(func() {
			failed[i] = datagramsFrom(fmt.Sprintf("192.168.0.%d", 50+i), "{server}:5353", 1, 20, 10)(ctx, s)
		})
	}
	wg.Wait()
	return errors.Join(failed[:]...)
}

// freshFlows sends so many datagrams a second from the client, each from another port, from the one
// after first on. A port that was used before would get its mapping back out of hold-down.
func freshFlows(perSecond, first int) action {
	return func(ctx context.Context, s *faultRun) error {
		const ticks = 20 // a second
		to, port := net.UDPAddrFromAddrPort(s.addrPort("{server}:5353")), first
		return every(ctx, time.Second/ticks, func() error {
			return s.lab.Node(lab.RoleClient).Do(func() error {
				for range perSecond / ticks {
					if port++; port > 30000 {
						port = first + 1
					}
					c, err := net.DialUDP("udp4", &net.UDPAddr{Port: port}, to)
					if err != nil {
						return err
					}
					_, _ = c.Write([]byte("x")) // what comes back is none of its business
					c.Close()
				}
				return nil
			})
		})
	}
}

// engine brings natkit's engine up on the gateway with a rule file, in place of the one that
// is, and lets the client's programs send.
func engine(rules string) action {
	return func(ctx context.Context, s *faultRun) error {
		ns, text := s.watched.Handle(), s.expand(rules)
		if s.file == "" {
			if err := s.beforeEngine(ctx); err != nil {
				return err
			}
		} else if _, err := control.Down(ns); err != nil {
			return err
		}
		if !strings.HasPrefix(text, "inside:") {
			text = "inside: [eth1]\noutside: [eth0]\n" + text
		}
		if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
			return err
		}
		file, err := rulefile.Parse(s.file, []byte(text))
		if err == nil {
			_, err = control.Up(ctx, file, text, control.Options{Namespace: ns, Engine: s.kind})
		}
		if err != nil {
			return fmt.Errorf("start the engine: %w", err)
		}
		return nil
	}
}

// beforeEngine makes room for the first engine of a run.
func (s *faultRun) beforeEngine(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "natkit-lab")
	if err != nil {
		return err
	}
	ns := s.watched.Handle()
	s.file = filepath.Join(dir, "nat.yaml")
	s.closers = append(s.closers, func() {
		_, _ = control.Down(ns) // with the lab all of it goes
		os.RemoveAll(dir)
	})
	return do(swallow(lab.RoleServer, 5353), send(datagrams("{server}:5353", engineFlows, 20)), onGateway("nft flush ruleset"))(ctx, s)
}

// accelerate has natkit accel forward between the gateway's two interfaces.
func accelerate(ctx context.Context, s *faultRun) error {
	ns := s.watched.Handle()
	chains, err := probe.Chains(ns)
	if err == nil {
		_, err = control.AccelOn(ctx, control.AccelOptions{Namespace: ns, Interfaces: []string{"eth0", "eth1"}, Attach: control.AttachTC, Chains: chains})
	}
	if err != nil {
		return fmt.Errorf("turn acceleration on: %w", err)
	}
	s.closers = append(s.closers, func() { _, _ = control.AccelOff(ns) }) // with the lab all of it goes
	return nil
}

func needTwoCPUs(context.Context, *faultRun) error {
	if runtime.NumCPU() < 2 {
		return errors.New("this machine has one CPU: two flows cannot choose a port at the same time")
	}
	return nil
}

// pairs sends SYNs to one port of the server from two clients at the same time, three
// thousand pairs a second in bursts. apart is by how much their source ports differ.
func pairs(apart int) action {
	return func(ctx context.Context, s *faultRun) error {
		const burst = 60
		to := netip.AddrPortFrom(s.lab.ServerNode().Addr, 81)
		var sent [2]atomic.Int64 // how many each is ready to have sent
		var failed [2]error
		var wg sync.WaitGroup
		for k, role := range []string{lab.RoleClient, lab.RoleClient + "2"} {
			wg.Go(func() {
				node := s.lab.Node(role)
				failed[k] = node.Do(func() error { // on one thread, until it ends
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
					if err != nil {
						return err
					}
					defer unix.Close(fd)
					unpin, err := pin(k)
					if err != nil {
						return err
					}
					defer unpin()
					tick := time.NewTicker(20 * time.Millisecond)
					defer tick.Stop()
					for n := 0; ctx.Err() == nil; n++ {
						seg := segment{from: netip.AddrPortFrom(node.Addr, uint16(2000+(n+k*apart)%40000)), to: to, flags: tcpSYN}
						packet := seg.packet()
						if n%burst == 0 {
							<-tick.C
						}
						sent[k].Store(int64(n))
						for spin := 0; sent[1-k].Load() < int64(n) && spin < 2_000_000; spin++ { // the other may have ended
						}
						_ = unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
					}
					return nil
				})
			})
		}
		wg.Wait()
		return errors.Join(failed[:]...)
	}
}

// pin keeps the calling thread, which must be locked, on the nth of the processors that
// it may use, until unpin; if it may, before others that keep that processor busy: two
// threads can only do something at the same time when both of them run.
func pin(n int) (unpin func(), err error) {
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, fmt.Errorf("ask for processors: %w", err)
	}
	for cpu := range 8 * len(allowed) * 8 {
		if !allowed.IsSet(cpu) {
			continue
		}
		if n == 0 {
			one.Set(cpu)
			_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}, 0)
			return func() {
				_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
				_ = unix.SchedSetaffinity(0, &allowed)
			}, unix.SchedSetaffinity(0, &one)
		}
		n--
	}
	return nil, errors.New("only one processor may be used here")
}
