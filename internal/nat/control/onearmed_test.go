// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

const oneArmedRules = `
inside: [out]
outside: [out]
limits: {sessions: 8192, sources: 256, sessions_per_source: 5}
rules:
  - masquerade: 10.0.0.0/24
  - map: 10.0.2.0/24 <-> 198.18.2.0/24
  - {map: 10.0.3.0/24 <-> 198.18.3.0/24, stateless: true}
  - {dnat: udp 203.0.113.1:7000, to: 10.0.0.2:9000}
`

// newOneArmed is a crossing whose gateway has the one interface out: everybody is behind it.
func newOneArmed(t *testing.T, engine Engine, attach Attach, rules string) *crossing {
	t.Helper()
	c := newCrossing(t, engine, attach, rules)
	c.in = c.out
	err := c.gateway.Do(func() error {
		l, err := netlink.LinkByName("in")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// becomes sends a packet in by a wire and gives what comes out by another, with these addresses.
func (c *crossing) becomes(t *testing.T, what string, from, to *wire, p pktbuild.IPv4, wantSource, wantDestination string) (out []byte) {
	t.Helper()
	from.put(t, from.frame(p))
	out = to.arrives(t)
	if out == nil || sourceOf(out).String() != wantSource || destinationOf(out).String() != wantDestination {
		t.Fatalf("%s came out as %x, want %s -> %s", what, out, wantSource, wantDestination)
	}
	return out
}

// replyTo is the reply to what came out.
func replyTo(out []byte) pktbuild.IPv4 {
	ends := endsOf(out).turned()
	return udp(ends.src.String(), ends.dst.String())
}

// A gateway with one interface, which is inside and outside: the sources of the rules say who is
// inside. Hosts go out translated, strangers come in by forwards only, internal hosts meet by
// external addresses, and speak to each other untranslated.
func TestOneArmed(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) { testOneArmed(t, run) })
	}
}

func testOneArmed(t *testing.T, run matrixRun) {
	c := newOneArmed(t, run.engine, run.attach, oneArmedRules)
	arm := c.out
	send := func(what string, p pktbuild.IPv4, wantSource, wantDestination string) []byte {
		t.Helper()
		return c.becomes(t, what, arm, arm, p, wantSource, wantDestination)
	}
	out := send("an internal host", udp("10.0.0.5:1000", "198.51.100.9:53"), "203.0.113.1", "198.51.100.9")
	send("the reply", replyTo(out), "198.51.100.9", "10.0.0.5")
	send("a mapped host", udp("10.0.2.7:1000", "198.51.100.9:53"), "198.18.2.7", "198.51.100.9")
	send("a stranger to a mapped host", udp("198.51.100.77:1", "198.18.2.7:5"), "198.51.100.77", "10.0.2.7")
	send("a stateless host", udp("10.0.3.7:1000", "198.51.100.9:53"), "198.18.3.7", "198.51.100.9")
	send("a stranger to a stateless host", udp("198.51.100.77:1", "198.18.3.7:5"), "198.51.100.77", "10.0.3.7")
	send("a stranger to a forward", udp("198.51.100.77:1", "203.0.113.1:7000"), "198.51.100.77", "10.0.0.2")
	send("the forward's reply", udp("10.0.0.2:9000", "198.51.100.77:1"), "203.0.113.1", "198.51.100.77")
	send("hairpinning to a forward", udp("10.0.0.6:1", "203.0.113.1:7000"), "203.0.113.1", "10.0.0.2")
	hairpinned := "203.0.113.1"
	if run.engine == EngineNFT {
		hairpinned = "198.18.2.7" // as what it asked for
	}
	send("hairpinning to a map", udp("10.0.0.6:2", "198.18.2.7:5"), hairpinned, "10.0.2.7")
	send("inside to inside", udp("10.0.0.7:1", "10.0.2.8:1"), "10.0.0.7", "10.0.2.8")
	send("stateless inside to inside", udp("10.0.3.8:1", "10.0.0.8:1"), "10.0.3.8", "10.0.0.8")
	send("outside to outside", udp("198.51.100.77:1", "192.0.2.5:1"), "198.51.100.77", "192.0.2.5")
	// A host's share of sessions is an internal host's: strangers have none.
	for i := range uint16(8) {
		send("a stranger's many sessions", udp(fmt.Sprintf("198.51.100.78:%d", 1000+i), fmt.Sprintf("198.18.2.%d:5", 9+i)), "198.51.100.78", fmt.Sprintf("10.0.2.%d", 9+i))
	}
	// No redirect was among all that came out: it would lead hosts past the gateway.
	if left := arm.take(t); left != nil && left[9] == unix.IPPROTO_ICMP {
		t.Errorf("the gateway sends %x", left)
	}
	redirects := func() (values string) {
		err := c.gateway.Do(func() error {
			for _, link := range []string{"all", "out"} {
				value, err := readSetting(redirectSetting(link))
				if err != nil {
					return err
				}
				values += value
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return values
	}
	if got := redirects(); got != "00" {
		t.Errorf("send_redirects of all and out: %s", got)
	}
	if kept, err := Down(c.gateway); err != nil || len(kept) > 0 {
		t.Fatalf("down: %v, %v", kept, err)
	}
	if got := redirects(); got != "11" {
		t.Errorf("send_redirects of all and out after down: %s", got)
	}
}

// Down puts back the setting of an interface that was renamed since, and leaves alone another one that has its name.
func TestOneArmedRenamed(t *testing.T) {
	b := newTestbed(t)
	o := b.options()
	o.Engine = EngineNFT
	b.up("inside: [out]\noutside: [out]\nrules:\n  - masquerade: 10.0.0.0/24\n", o)
	b.rename("out", "wan.1")
	b.in(b.gateway, func() error {
		return errors.Join(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out"}, PeerName: "peer"}),
			writeSetting(redirectSetting("out"), "0"))
	})
	if kept, err := Down(b.gateway); err != nil || len(kept) > 0 {
		t.Fatalf("down: %v, %v", kept, err)
	}
	b.in(b.gateway, func() error {
		renamed, err1 := readSetting(redirectSetting("wan.1"))
		other, err2 := readSetting(redirectSetting("out"))
		if renamed != "1" || other != "0" {
			t.Errorf("send_redirects of the renamed interface %s, of the other %s", renamed, other)
		}
		return errors.Join(err1, err2)
	})
}

// The gateway, its internal hosts and the router to the world are on one network, as behind many a
// router that can't be replaced. The router is an internal host by its address.
func TestOneArmedNetwork(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	const rules = `
inside: [out]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: 203.0.113.0/24
  - {dnat: udp 203.0.113.1:7000, to: 203.0.113.50:9000}
`
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			c := newOneArmed(t, run.engine, run.attach, rules)
			c.neighbours(t, "203.0.113.50", "203.0.113.60")
			arm := c.out
			send := func(what string, p pktbuild.IPv4, wantSource, wantDestination string) []byte {
				t.Helper()
				return c.becomes(t, what, arm, arm, p, wantSource, wantDestination)
			}
			out := send("an internal host", udp("203.0.113.50:1000", "198.51.100.9:53"), "203.0.113.1", "198.51.100.9")
			send("the reply", replyTo(out), "198.51.100.9", "203.0.113.50")
			for _, from := range []string{"203.0.113.254", "192.0.2.200"} {
				got := send("an error from a router", pktbuild.IPv4{Src: netip.MustParseAddr(from), Dst: crossingOut, TTL: 64, Payload: pktbuild.ICMP{Type: 11, Data: out[:28]}}, from, "203.0.113.50")
				if sourceOf(got[28:]).String() != "203.0.113.50" || destinationOf(got[28:]).String() != "198.51.100.9" {
					t.Errorf("the error is about %x", got[28:])
				}
			}
			send("a stranger to a forward", udp("198.51.100.77:1", "203.0.113.1:7000"), "198.51.100.77", "203.0.113.50")
			send("the forward's reply", udp("203.0.113.50:9000", "198.51.100.77:1"), "203.0.113.1", "198.51.100.77")
			out = send("hairpinning to the forward", udp("203.0.113.60:2000", "203.0.113.1:7000"), "203.0.113.1", "203.0.113.50")
			send("its reply", replyTo(out), "203.0.113.1", "203.0.113.60")
			send("inside to inside", udp("203.0.113.60:2000", "203.0.113.50:1"), "203.0.113.60", "203.0.113.50")
		})
	}
}

// neighbours are hosts on the network of the interface out.
func (c *crossing) neighbours(t *testing.T, addresses ...string) {
	t.Helper()
	err := c.gateway.Do(func() error {
		l, err := netlink.LinkByName("out")
		for _, a := range addresses {
			err = errors.Join(err, netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(a), HardwareAddr: c.out.mac}))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// An interface of both sides beside one that is only inside: there everybody is.
func TestOneArmedBeside(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	const rules = `
inside: [in, out]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: 10.0.0.0/24
  - masquerade: 172.16.0.0/24
  - {map: 172.16.3.0/24 <-> 198.18.3.0/24, stateless: true}
`
	for _, run := range matrixRuns {
		t.Run(run.String(), func(t *testing.T) {
			c := newCrossing(t, run.engine, run.attach, rules)
			out := c.becomes(t, "a host inside", c.in, c.out, udp("10.0.0.5:1000", "198.51.100.9:53"), "203.0.113.1", "198.51.100.9")
			c.becomes(t, "its reply", c.out, c.in, replyTo(out), "198.51.100.9", "10.0.0.5")
			out = c.becomes(t, "an internal host by the arm", c.out, c.out, udp("172.16.0.9:2000", "198.51.100.9:53"), "203.0.113.1", "198.51.100.9")
			c.becomes(t, "its reply", c.out, c.out, replyTo(out), "198.51.100.9", "172.16.0.9")
			c.becomes(t, "inside to inside by the arm", c.in, c.out, udp("10.0.0.5:1000", "172.16.0.9:5"), "10.0.0.5", "172.16.0.9")
			c.becomes(t, "inside by the arm to inside", c.out, c.in, udp("172.16.0.9:2000", "10.0.0.6:5"), "172.16.0.9", "10.0.0.6")
			c.becomes(t, "inside to a stateless host by the arm", c.in, c.out, udp("10.0.0.5:1000", "172.16.3.9:5"), "10.0.0.5", "172.16.3.9")
			c.becomes(t, "a stateless host by the arm to inside", c.out, c.in, udp("172.16.3.9:5", "10.0.0.5:1000"), "172.16.3.9", "10.0.0.5")
			c.becomes(t, "nobody's host inside", c.in, c.out, udp("10.0.9.5:1000", "172.16.0.9:5"), "10.0.9.5", "172.16.0.9")
		})
	}
}

// What has begun goes on when the rules no longer say that its host is inside, and when its
// interface gets a second side.
func TestOneArmedSessionsStay(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	for _, run := range matrixRuns {
		if run.engine == EngineNFT {
			continue // apply ends the connections of rules that are gone
		}
		t.Run(run.String(), func(t *testing.T) {
			const head = "limits: {sessions: 8192, sources: 256}\nrules:\n- masquerade: "
			c := newOneArmed(t, run.engine, run.attach, "inside: [out]\noutside: [out]\n"+head+"10.0.0.0/24\n")
			m := &matrix{crossing: c, engine: run.engine, far: end("198.51.100.9:0")}
			packet := udp("10.0.0.5:1000", "198.51.100.9:53")
			out := c.becomes(t, "an internal host", c.out, c.out, packet, "203.0.113.1", "198.51.100.9")
			c.apply(t, "inside: [out]\noutside: [out]\n"+head+"10.0.1.0/24\n")
			c.becomes(t, "an internal host of then", c.out, c.out, packet, "203.0.113.1", "198.51.100.9")
			c.becomes(t, "its reply", c.out, c.out, replyTo(out), "198.51.100.9", "10.0.0.5")
			// In other orders a later fragment has only its addresses, which no rule is for.
			large := packet
			large.Payload = pktbuild.UDP{Src: 1000, Dst: 53, Data: matrixData(2992)}
			m.t = t
			got, err := m.datagram(true, true, large, matrixOrders["in order"])
			if err != nil || endsOf(got) != endsOf(out) {
				t.Errorf("its fragments: %x, %v", got[:min(len(got), 28)], err)
			}
			c.becomes(t, "a host that is none", c.out, c.out, udp("10.0.0.5:1001", "198.51.100.9:53"), "10.0.0.5", "198.51.100.9")
		})
		t.Run(run.String()+" gets a second side", func(t *testing.T) {
			const head = "limits: {sessions: 8192, sources: 256}\nrules:\n- masquerade: 10.0.0.0/24\n"
			c := newCrossing(t, run.engine, run.attach, "inside: [in]\noutside: [out]\n"+head)
			packet := udp("10.0.0.5:1000", "198.51.100.9:53")
			for _, inside := range []string{"in", "in, out", "in"} {
				c.apply(t, "inside: ["+inside+"]\noutside: [out]\n"+head)
				out := c.becomes(t, "an internal host", c.in, c.out, packet, "203.0.113.1", "198.51.100.9")
				c.becomes(t, "its reply", c.out, c.in, replyTo(out), "198.51.100.9", "10.0.0.5")
			}
		})
	}
}

func (c *crossing) apply(t *testing.T, rules string) {
	t.Helper()
	file, err := rulefile.Parse("test.yaml", []byte(rules))
	if err == nil {
		_, err = Apply(t.Context(), file, rules, Options{Namespace: c.gateway})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Explain says of one-armed gateways what the engine does.
func TestOneArmedExplained(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	c := newOneArmed(t, EngineNFT, "", oneArmedRules)
	file, err := rulefile.Parse("test.yaml", []byte(oneArmedRules))
	if err != nil {
		t.Fatal(err)
	}
	for packet, want := range map[string]string{
		"udp 10.0.0.5:1 -> 198.51.100.9:53 in out":       "source becomes the address of out, the destination stays",
		"udp 10.0.0.5:1 -> 10.0.2.5:53 in out":           "goes on untranslated, unless it is for the external endpoint of a mapping",
		"udp 198.51.100.77:1 -> 203.0.113.1:7000 in out": "destination becomes 10.0.0.2:9000, the source stays",
		"udp 10.0.0.6:1 -> 203.0.113.1:7000 in out":      "destination becomes 10.0.0.2:9000, source becomes the address of out",
	} {
		p, err := rulefile.ParsePacket(packet)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := Explain(c.gateway, file, p)
		if err != nil {
			t.Fatal(err)
		}
		if got := steps[len(steps)-1].Why; got != want {
			t.Errorf("%s: %s, want %s", packet, got, want)
		}
	}
}
