// SPDX-License-Identifier: Apache-2.0

package control

import (
	"os"
	"strings"
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
func newOneArmed(t *testing.T) *crossing {
	t.Helper()
	c := newCrossing(t, EngineNFT, "", oneArmedRules)
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

// A gateway with one interface, which is inside and outside: the sources of the rules say who is
// inside. Hosts go out translated, strangers come in by forwards only, inside hosts meet by
// outside addresses, and speak to each other untranslated.
func TestOneArmed(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	c := newOneArmed(t)
	arm := c.out
	send := func(what string, p pktbuild.IPv4, wantSource, wantDestination string) (out []byte) {
		t.Helper()
		arm.put(t, arm.frame(p))
		out = arm.arrives(t)
		if out == nil || sourceOf(out).String() != wantSource || destinationOf(out).String() != wantDestination {
			t.Errorf("%s came out as %x, want %s -> %s", what, out, wantSource, wantDestination)
		}
		return out
	}
	out := send("an inside host", udp("10.0.0.5:1000", "198.51.100.9:53"), "203.0.113.1", "198.51.100.9")
	if t.Failed() {
		t.FailNow()
	}
	port := uint16(out[20])<<8 | uint16(out[21])
	answer := udp("198.51.100.9:53", "203.0.113.1:1")
	answer.Payload = pktbuild.UDP{Src: 53, Dst: port, Data: []byte("natkit")}
	send("the reply", answer, "198.51.100.9", "10.0.0.5")
	send("a mapped host", udp("10.0.2.7:1000", "198.51.100.9:53"), "198.18.2.7", "198.51.100.9")
	send("a stranger to a mapped host", udp("198.51.100.77:1", "198.18.2.7:5"), "198.51.100.77", "10.0.2.7")
	send("a stateless host", udp("10.0.3.7:1000", "198.51.100.9:53"), "198.18.3.7", "198.51.100.9")
	send("a stranger to a stateless host", udp("198.51.100.77:1", "198.18.3.7:5"), "198.51.100.77", "10.0.3.7")
	send("a stranger to a forward", udp("198.51.100.77:1", "203.0.113.1:7000"), "198.51.100.77", "10.0.0.2")
	send("the forward's reply", udp("10.0.0.2:9000", "198.51.100.77:1"), "203.0.113.1", "198.51.100.77")
	send("hairpinning to a forward", udp("10.0.0.6:1", "203.0.113.1:7000"), "203.0.113.1", "10.0.0.2")
	send("hairpinning to a map", udp("10.0.0.6:2", "198.18.2.7:5"), "198.18.2.7", "10.0.2.7")
	send("inside to inside", udp("10.0.0.7:1", "10.0.2.8:1"), "10.0.0.7", "10.0.2.8")
	send("stateless inside to inside", udp("10.0.3.8:1", "10.0.0.8:1"), "10.0.3.8", "10.0.0.8")
	send("outside to outside", udp("198.51.100.77:1", "192.0.2.5:1"), "198.51.100.77", "192.0.2.5")
	// A host's share of sessions is an inside host's: strangers have none.
	for i := range uint16(8) {
		p := udp("198.51.100.78:1", "198.18.2.9:5")
		p.Payload = pktbuild.UDP{Src: 1000 + i, Dst: 5, Data: []byte("natkit")}
		send("a stranger's many sessions", p, "198.51.100.78", "10.0.2.9")
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

	file, err := rulefile.Parse("test.yaml", []byte(oneArmedRules))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Up(t.Context(), file, oneArmedRules, Options{Namespace: c.gateway, Engine: EngineEBPF})
	if err == nil || !strings.HasPrefix(err.Error(), "test.yaml:2:10: ") || !strings.Contains(err.Error(), "--engine nft") {
		t.Errorf("engine ebpf: %v", err)
	}
	if _, err := os.Stat(instancePath(c.gateway.Inode(), ".json")); err == nil {
		t.Error("the refused engine has left a record")
	}
}

// Explain says of one-armed gateways what the engine does.
func TestOneArmedExplained(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	c := newOneArmed(t)
	file, err := rulefile.Parse("test.yaml", []byte(oneArmedRules))
	if err != nil {
		t.Fatal(err)
	}
	for packet, want := range map[string]string{
		"udp 10.0.0.5:1 -> 198.51.100.9:53 in out":       "source becomes the address of out, the destination stays",
		"udp 10.0.0.5:1 -> 10.0.2.5:53 in out":           "goes on untranslated, unless it is for the outside endpoint of a mapping",
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
