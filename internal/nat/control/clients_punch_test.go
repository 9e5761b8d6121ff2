// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pion/ice/v4"
	"github.com/pion/stun/v4"
	"github.com/pion/transport/v5"
	"github.com/pion/transport/v5/stdnet"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/kernel/netns"
	"natkit/internal/testutil/ktest"
)

// punchPairs are hosts of stunRules that keep their external endpoint towards everybody, with
// every two kinds of filtering.
var punchPairs = [][2]string{
	{"10.1.0.11", "10.1.0.12"}, {"10.1.0.11", "10.1.0.13"}, {"10.1.0.12", "10.1.0.12"}, {"10.1.0.12", "10.1.0.13"}, {"10.1.0.13", "10.1.0.13"},
}

// punchers gives the client the addresses of these hosts, which it may have.
func (w *world) punchers() {
	w.t.Helper()
	w.in(w.client, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		var errs []error
		for host := 11; host < 14; host++ {
			a, err := netlink.ParseAddr(fmt.Sprintf("10.1.0.%d/24", host))
			errs = append(errs, err, netlink.AddrReplace(l, a))
		}
		return errors.Join(errs...)
	})
}

// Two hosts behind one gateway that know each other by their external endpoints alone get
// through to each other, over UDP and TCP. The kernel has no mappings to address.
func clientPunch(w *world) {
	if w.engine != EngineEBPF {
		return
	}
	w.whoami(w.server, serverAddr+":3480")
	w.whoamiUDP(w.server, serverAddr+":3480")
	w.punchers()
	var all sync.WaitGroup
	for i, pair := range punchPairs {
		all.Go(func() {
			if err := w.punchUDP(pair, 21000+10*i); err != nil {
				w.t.Errorf("UDP, %v: %v", pair, err)
			}
			if err := w.punchTCP(pair, 21000+10*i); err != nil {
				w.t.Errorf("TCP, %v: %v", pair, err)
			}
		})
	}
	all.Wait()
}

// whoamiUDP answers everybody who sends to it with who they are.
func (w *world) whoamiUDP(ns *netns.Handle, at string) {
	w.t.Helper()
	c := w.packets(ns, at)
	go func() {
		b := make([]byte, 64)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo([]byte(from.String()), from)
		}
	}()
}

func (w *world) punchUDP(hosts [2]string, port int) error {
	var sockets [2]net.PacketConn
	var seen [2]string
	server := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(serverAddr + ":3480"))
	b := make([]byte, 64)
	for i, host := range hosts {
		c := w.packets(w.client, fmt.Sprintf("%s:%d", host, port+i))
		sockets[i] = c
		for until := time.Now().Add(patience); seen[i] == "" && time.Now().Before(until); {
			c.WriteTo([]byte("who"), server)
			c.SetReadDeadline(time.Now().Add(time.Second))
			if n, _, err := c.ReadFrom(b); err == nil {
				seen[i] = string(b[:n])
			}
		}
	}
	var got [2]bool
	for until := time.Now().Add(patience); !(got[0] && got[1]) && time.Now().Before(until); {
		for i, c := range sockets {
			to, err := net.ResolveUDPAddr("udp4", seen[1-i])
			if err != nil {
				return err
			}
			c.WriteTo([]byte("punch"), to)
			c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			if n, from, err := c.ReadFrom(b); err == nil && string(b[:n]) == "punch" {
				if from.String() != seen[1-i] {
					return fmt.Errorf("%s arrives from %v", seen[1-i], from)
				}
				got[i] = true
			}
		}
	}
	if !got[0] || !got[1] {
		return fmt.Errorf("%v: got through %v", seen, got)
	}
	return nil
}

// punchTCP has both ends connect at once, from the ports that the server has seen.
func (w *world) punchTCP(hosts [2]string, port int) error {
	reuse := func(_, _ string, c syscall.RawConn) (err error) {
		err1 := c.Control(func(fd uintptr) {
			err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
		})
		return errors.Join(err, err1)
	}
	dial := func(i int, to string) (c net.Conn, err error) {
		dialer := net.Dialer{Timeout: patience, Control: reuse, LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(fmt.Sprintf("%s:%d", hosts[i], port+i)))}
		err = w.client.Do(func() error { c, err = dialer.Dial("tcp4", to); return err })
		return c, err
	}
	var seen [2]string
	for i := range hosts {
		c, err := dial(i, serverAddr+":3480")
		if err != nil {
			return err
		}
		defer c.Close()
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return err
		}
		_, seen[i], _ = strings.Cut(strings.TrimSpace(line), " ")
	}
	var errs [2]error
	var both sync.WaitGroup
	for i := range hosts {
		both.Go(func() {
			c, err := dial(i, seen[1-i])
			for until := time.Now().Add(patience); errors.Is(err, unix.ECONNREFUSED) && time.Now().Before(until); {
				c, err = dial(i, seen[1-i]) // the other has not begun, whose filter lets everybody in
			}
			if err != nil {
				errs[i] = err
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			fmt.Fprintln(c, "punch", i)
			line, err := bufio.NewReader(c).ReadString('\n')
			if want := fmt.Sprintln("punch", 1-i); err != nil || line != want {
				errs[i] = fmt.Errorf("read %q: %v", line, err)
			}
		})
	}
	both.Wait()
	return errors.Join(errs[0], errs[1])
}

// netOf is the network of a namespace as pion/ice has it, at one address.
type netOf struct {
	*stdnet.Net
	ns *netns.Handle
}

func (n netOf) ListenUDP(network string, at *net.UDPAddr) (c transport.UDPConn, err error) {
	err = n.ns.Do(func() error { c, err = net.ListenUDP(network, at); return err })
	return c, err
}

func (n netOf) ListenPacket(network, at string) (c net.PacketConn, err error) {
	err = n.ns.Do(func() error { c, err = net.ListenPacket(network, at); return err })
	return c, err
}

// Two agents of ICE (RFC 8445) behind one gateway, with nothing but what a STUN server reports
// them, connect and talk.
func clientICE(w *world) {
	if w.engine != EngineEBPF {
		return
	}
	dir := w.t.TempDir()
	w.start(w.server, serverAddr+":3490/udp", ktest.Tool(w.t, "turnserver"), "-n", "--listening-ip", serverAddr, "--listening-port", "3490", "--stun-only",
		"--no-cli", "--no-tls", "--no-dtls", "--log-file", "stdout", "--pidfile", dir+"/pid", "--userdb", dir+"/db")
	w.punchers()
	for _, pair := range punchPairs {
		if err := w.connectICE(pair); err != nil {
			w.t.Errorf("%v: %v", pair, err)
		}
	}
}

// agentICE has gathered the candidates of an address: what a STUN server sees, and no other.
func (w *world) agentICE(host string) (agent *ice.Agent, candidates []ice.Candidate, err error) {
	var std *stdnet.Net
	if err := w.client.Do(func() (err error) { std, err = stdnet.NewNet(); return err }); err != nil {
		return nil, nil, err
	}
	agent, err = ice.NewAgentWithOptions(ice.WithNet(netOf{std, w.client}), ice.WithNetworkTypes([]ice.NetworkType{ice.NetworkTypeUDP4}),
		ice.WithCandidateTypes([]ice.CandidateType{ice.CandidateTypeServerReflexive}), ice.WithMulticastDNSMode(ice.MulticastDNSModeDisabled),
		ice.WithUrls([]*stun.URI{{Scheme: stun.SchemeTypeSTUN, Host: serverAddr, Port: 3490, Proto: stun.ProtoTypeUDP}}),
		ice.WithIPFilter(func(ip net.IP) bool { return ip.String() == host }), ice.WithMaxBindingRequests(100))
	if err != nil {
		return nil, nil, err
	}
	gathered := make(chan struct{})
	err = agent.OnCandidate(func(c ice.Candidate) {
		if c == nil {
			close(gathered)
			return
		}
		candidates = append(candidates, c)
	})
	if err == nil {
		err = agent.GatherCandidates()
	}
	if err != nil {
		return agent, nil, err
	}
	select {
	case <-gathered:
	case <-time.After(patience):
	}
	if len(candidates) == 0 {
		return agent, nil, errors.New("no candidates")
	}
	return agent, candidates, nil
}

func (w *world) connectICE(hosts [2]string) error {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var agents [2]*ice.Agent
	var candidates [2][]ice.Candidate
	for i, host := range hosts {
		var err error
		agents[i], candidates[i], err = w.agentICE(host)
		if agents[i] != nil {
			defer agents[i].Close()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", host, err)
		}
	}
	var errs [2]error
	var both sync.WaitGroup
	for i, agent := range agents {
		ufrag, pwd, err := agents[1-i].GetLocalUserCredentials()
		if err != nil {
			return err
		}
		for _, c := range candidates[1-i] {
			remote, err := ice.UnmarshalCandidate(c.Marshal())
			if err == nil {
				err = agent.AddRemoteCandidate(remote)
			}
			if err != nil {
				return err
			}
		}
		both.Go(func() {
			connect := agent.Dial
			if i == 1 {
				connect = agent.Accept
			}
			c, err := connect(ctx, ufrag, pwd)
			if err != nil {
				errs[i] = err
				return
			}
			c.SetDeadline(time.Now().Add(patience))
			b := make([]byte, 64)
			fmt.Fprint(c, "through")
			if n, err := c.Read(b); err != nil || string(b[:n]) != "through" {
				errs[i] = fmt.Errorf("read %q: %v", b[:n], err)
			}
		})
	}
	both.Wait()
	return errors.Join(errs[0], errs[1])
}
