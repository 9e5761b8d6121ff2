// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"natkit/internal/kernel/conntrack"
	"natkit/internal/kernel/netns"
	"natkit/internal/nat/rulefile"
	"natkit/internal/testutil/ktest"
	"natkit/internal/testutil/pktbuild"
)

// entries are the sources of the connections that a namespace knows.
func entries(t *testing.T, ns *netns.Handle) (sources []string) {
	t.Helper()
	err := ns.Do(func() error {
		_, err := conntrack.Dump(context.Background(), conntrack.Filter{Family: unix.AF_INET}, func(f *conntrack.Flow) error {
			sources = append(sources, f.Orig.Src.String())
			return nil
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(sources)
	return sources
}

const endingRules = `
inside: [in]
outside: [out]
limits: {sessions: 8192, sources: 256}
rules:
  - masquerade: 10.0.0.0/24
  - {snat: 10.0.1.0/24, to: 203.0.113.16}
  - map: 10.0.2.0/24 <-> 198.18.2.0/24
  - {dnat: udp 203.0.113.1:7000, to: 10.0.0.2:9000}
  - {dnat: udp 203.0.113.1:7001, to: 10.0.0.2:9001}
`

// foreignRules translate as natkit's do, from another table.
const foreignRules = `table ip other {
	chain post {
		type nat hook postrouting priority 50
		oifname "out" ip saddr 10.0.5.0/24 snat to 203.0.113.1
	}
}
`

// What engine nft has translated ends with the rules that translated it, as on engine ebpf:
// the kernel would go on for as long as packets come. What others translate, and what
// nobody does, stays.
func TestConnectionsEndWithTheirRules(t *testing.T) {
	ktest.Root(t)
	ktest.RunDir(t)
	c := newCrossing(t, EngineNFT, "", endingRules)
	err := c.gateway.Do(func() error {
		cmd := exec.Command(ktest.Tool(t, "nft"), "-f", "-")
		cmd.Stdin = strings.NewReader(foreignRules)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	send := func(from, to *wire, p pktbuild.IPv4, source string) {
		t.Helper()
		from.put(t, from.frame(p))
		if got := to.arrives(t); got == nil || sourceOf(got) != netip.MustParseAddr(source) {
			t.Fatalf("%s -> %s came out as %x, want it from %s", p.Src, p.Dst, got, source)
		}
	}
	const world = "198.51.100.9:53"
	send(c.in, c.out, udp("10.0.0.5:1000", world), "203.0.113.1")
	send(c.in, c.out, udp("10.0.1.5:1000", world), "203.0.113.16")
	send(c.in, c.out, udp("10.0.2.5:1000", world), "198.18.2.5")
	send(c.in, c.out, udp("10.0.5.5:1000", world), "203.0.113.1") // another's
	send(c.in, c.out, udp("10.0.6.5:1000", world), "10.0.6.5")    // nobody's
	send(c.out, c.in, udp("198.51.100.70:1", "203.0.113.1:7000"), "198.51.100.70")
	send(c.out, c.in, udp("198.51.100.71:1", "203.0.113.1:7001"), "198.51.100.71")
	check := func(when string, want ...string) {
		t.Helper()
		if got := entries(t, c.gateway); !slices.Equal(got, want) {
			t.Errorf("%s: connections of %v, want %v", when, got, want)
		}
	}
	check("before", "10.0.0.5", "10.0.1.5", "10.0.2.5", "10.0.5.5", "10.0.6.5", "198.51.100.70", "198.51.100.71")

	apply := func(rules string) {
		t.Helper()
		file, err := rulefile.Parse("test.yaml", []byte(rules))
		if err != nil {
			t.Fatal(err)
		}
		p, err := Apply(t.Context(), file, rules, Options{Namespace: c.gateway})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range p.Warnings {
			if strings.Contains(w, "connections") {
				t.Error(w)
			}
		}
	}
	apply(endingRules)
	check("the same rules again", "10.0.0.5", "10.0.1.5", "10.0.2.5", "10.0.5.5", "10.0.6.5", "198.51.100.70", "198.51.100.71")
	apply(strings.NewReplacer("  - map: 10.0.2.0/24 <-> 198.18.2.0/24\n", "", "203.0.113.16", "203.0.113.17",
		"  - {dnat: udp 203.0.113.1:7001, to: 10.0.0.2:9001}\n", "").Replace(endingRules))
	check("without a map, a dnat, an address", "10.0.0.5", "10.0.5.5", "10.0.6.5", "198.51.100.70")
	send(c.in, c.out, udp("10.0.1.5:1000", world), "203.0.113.17")

	if kept, err := Down(c.gateway); err != nil || len(kept) > 0 {
		t.Fatalf("down: %v, %v", kept, err)
	}
	check("down", "10.0.5.5", "10.0.6.5")

	// A new up translates the flow that went on to the address that it says.
	const other = "inside: [in]\noutside: [out]\nrules:\n  - {snat: 10.0.0.0/24, to: 203.0.113.30}\n"
	file, err := rulefile.Parse("test.yaml", []byte(other))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), file, other, Options{Namespace: c.gateway, Engine: EngineNFT}); err != nil {
		t.Fatal(err)
	}
	send(c.in, c.out, udp("10.0.0.5:1000", world), "203.0.113.30")
}

// tcpSeconds is the time-out in seconds of the connection from that port, by either engine.
func tcpSeconds(t *testing.T, c *crossing, engine Engine, port uint16) (seconds int) {
	t.Helper()
	if engine == EngineNFT {
		err := c.gateway.Do(func() error {
			_, err := conntrack.Dump(context.Background(), conntrack.Filter{Proto: unix.IPPROTO_TCP}, func(f *conntrack.Flow) error {
				if f.Orig.SrcPort == port {
					seconds = int(f.Timeout)
				}
				return nil
			})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return seconds
	}
	e, err := Open(c.gateway)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	err = e.Sessions(func(s *rulefile.Session) bool {
		if s.Source.Port() == port {
			seconds = int(s.Expires.Seconds())
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return seconds
}

// A connection that one side has ended lives as long as an open one, and one that both
// have ended as one that closes, whichever side is first (RFC 5382 REQ-5).
func TestHalfClosedConnections(t *testing.T) {
	const rules = "inside: [in]\noutside: [out]\nlimits: {sessions: 8192, sources: 256}\nrules:\n  - masquerade: 10.0.0.0/16\n"
	for _, way := range everyWay {
		t.Run(way.name, func(t *testing.T) {
			ktest.Root(t)
			ktest.RunDir(t)
			c := newCrossing(t, way.engine, way.attach, rules)
			for port, insideFirst := range map[uint16]bool{4000: true, 4001: false} {
				inside, server := netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("198.51.100.9")
				seq := [2]uint32{1000, 5000} // next, of inside and of outside
				say := func(out bool, flags byte) {
					t.Helper()
					me, from, to, src, dst := 0, c.in, c.out, inside, server
					sport, dport := port, uint16(80)
					if !out {
						me, from, to, src, dst, sport, dport = 1, c.out, c.in, server, crossingOut, 80, port
					}
					p := pktbuild.TCP{Src: sport, Dst: dport, Flags: flags, Seq: seq[me], Window: 60000}
					if flags&pktbuild.ACK != 0 {
						p.Ack = seq[1-me]
					}
					from.put(t, from.frame(pktbuild.IPv4{Src: src, Dst: dst, TTL: 64, Payload: p}))
					if to.arrives(t) == nil {
						t.Fatalf("inside first %t, flags %x, out %t: lost", insideFirst, flags, out)
					}
					if flags&(pktbuild.SYN|pktbuild.FIN) != 0 {
						seq[me]++
					}
				}
				life := func(when string, want int) {
					t.Helper()
					if got := tcpSeconds(t, c, way.engine, port); got > want || got < want-60 {
						t.Errorf("inside first %t, %s it lives %d s, want %d", insideFirst, when, got, want)
					}
				}
				say(true, pktbuild.SYN)
				say(false, pktbuild.SYN|pktbuild.ACK)
				say(true, pktbuild.ACK)
				life("open", 7440)
				say(insideFirst, pktbuild.FIN|pktbuild.ACK)
				life("after one FIN", 7440)
				say(!insideFirst, pktbuild.ACK)
				life("after its acknowledgement", 7440)
				say(!insideFirst, pktbuild.FIN|pktbuild.ACK)
				life("after the other FIN", 240)
				say(insideFirst, pktbuild.ACK)
				life("closed", 240)
			}
		})
	}
}
